//! Regions and the round-trip times between them.

use serde::Deserialize;

use crate::id::RegionId;
use crate::ordered::OrdMap;
use crate::time::Duration;

/// A topology: named regions, and the round-trip times between them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Topology {
    /// Its name: the file's name without its ending.
    pub name: String,
    /// The source of the numbers.
    pub source: String,
    regions: Vec<String>,
    rtt: Vec<Vec<Duration>>,
}

/// Time-outs never assume a shorter longest round trip. Within one region packets take less than a
/// millisecond, but a process on a busy machine gets no processor for tens of milliseconds: with
/// time-outs that follow from packets alone, leaders that are well would be replaced again and
/// again, and heartbeats would cost more than the work.
const RTT_ASSUMED_MIN: Duration = Duration::from_millis(75);

/// Name and text of every file of `topologies/`, by name.
const BUILT_IN: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/topologies.rs"));

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    name: String,
    source: String,
    /// Round trip between two nodes of one region.
    local_rtt_ms: f64,
    regions: Vec<String>,
    /// Round trips between regions; each pair once, in either order.
    rtt_ms: OrdMap<String, OrdMap<String, f64>>,
}

/// The file does not describe a topology.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TopologyError {
    /// It is not TOML, or has the wrong fields; the text says where.
    #[error("not a topology: {0}")]
    Syntax(String),
    /// A name in `rtt_ms` is not in `regions`.
    #[error("`rtt_ms` names region {0:?}, which `regions` does not list")]
    UnknownRegion(String),
    /// A pair of regions has no round-trip time.
    #[error("`rtt_ms` gives no time between {0:?} and {1:?}; add it to either's table")]
    Missing(String, String),
    /// A pair of regions has two different times.
    #[error("`rtt_ms` gives two different times between {0:?} and {1:?}; delete one")]
    Twice(String, String),
    /// A number is not a valid time.
    #[error("{field}: {value} ms is not a round-trip time; use a number from 0 to 100000")]
    OutOfRange {
        /// The field.
        field: String,
        /// Its content.
        value: String,
    },
    /// There are no regions, two have the same name, or there are too many.
    #[error("`regions` must list between 1 and 1000 different names")]
    Regions,
}

impl Topology {
    /// Reads a topology from the text of a TOML file.
    ///
    /// # Errors
    /// The first problem found, and where it is.
    pub fn parse(text: &str) -> Result<Self, TopologyError> {
        let file: File =
            toml::from_str(text).map_err(|error| TopologyError::Syntax(error.to_string()))?;
        let count = file.regions.len();
        let mut index = OrdMap::new();
        for (at, name) in file.regions.iter().enumerate() {
            index.insert(name.clone(), at);
        }
        if count == 0 || count > 1_000 || index.len() != count {
            return Err(TopologyError::Regions);
        }
        let local = millis("local_rtt_ms", file.local_rtt_ms)?;
        let mut known = OrdMap::new();
        for (from, row) in &file.rtt_ms {
            for (to, &value) in row {
                let find = |name: &String| {
                    index
                        .get(name)
                        .copied()
                        .ok_or_else(|| TopologyError::UnknownRegion(name.clone()))
                };
                let (a, b) = (find(from)?, find(to)?);
                let rtt = millis(&format!("rtt_ms.{from}.{to}"), value)?;
                if known.insert((a.min(b), a.max(b)), rtt).is_some_and(|other| other != rtt) {
                    return Err(TopologyError::Twice(from.clone(), to.clone()));
                }
            }
        }
        let mut rtt = vec![vec![local; count]; count];
        for (a, row) in rtt.iter_mut().enumerate() {
            for (b, cell) in row.iter_mut().enumerate() {
                if a != b {
                    *cell = *known.get(&(a.min(b), a.max(b))).ok_or_else(|| {
                        let name = |at: usize| file.regions.get(at).cloned().unwrap_or_default();
                        TopologyError::Missing(name(a.min(b)), name(a.max(b)))
                    })?;
                }
            }
        }
        Ok(Self { name: file.name, source: file.source, regions: file.regions, rtt })
    }

    /// Names of the built-in topologies.
    pub fn built_in_names() -> impl Iterator<Item = &'static str> {
        BUILT_IN.iter().map(|&(name, _)| name)
    }

    /// The built-in topology with this name.
    #[must_use]
    pub fn built_in(name: &str) -> Option<Self> {
        let &(_, text) = BUILT_IN.iter().find(|(known, _)| *known == name)?;
        // The files are part of the program, and a test reads them all.
        let map = Self::parse(text);
        Some(map.unwrap_or_else(|error| unreachable!("topologies/{name}.toml: {error}")))
    }

    /// A topology of `count` regions `R0`, `R1`, …, with the round trip `rtt` between any two; for
    /// tests and random clusters.
    #[must_use]
    pub fn uniform(count: u16, local: Duration, rtt: Duration) -> Self {
        Self::from_fn(count, local, |_, _| rtt)
    }

    /// A topology of `count` regions with the round trips that `rtt(a, b)` gives for `a < b`.
    #[must_use]
    pub fn from_fn(count: u16, local: Duration, mut rtt: impl FnMut(u16, u16) -> Duration) -> Self {
        let size = usize::from(count);
        let mut table = vec![vec![local; size]; size];
        for a in 0..count {
            for b in a + 1..count {
                let value = rtt(a, b);
                for (row, column) in [(a, b), (b, a)] {
                    if let Some(cell) =
                        table.get_mut(usize::from(row)).and_then(|r| r.get_mut(usize::from(column)))
                    {
                        *cell = value;
                    }
                }
            }
        }
        Self {
            name: format!("drawn{count}"),
            source: "drawn".into(),
            regions: (0..count).map(|at| format!("R{at}")).collect(),
            rtt: table,
        }
    }

    /// All regions, in order.
    pub fn regions(&self) -> impl ExactSizeIterator<Item = RegionId> + use<> {
        #[expect(clippy::cast_possible_truncation, reason = "parse bounds the count at 1000")]
        (0..self.regions.len()).map(|at| RegionId(at as u16))
    }

    /// The number of regions.
    #[must_use]
    pub fn len(&self) -> usize {
        self.regions.len()
    }

    /// False: a topology has at least one region.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.regions.is_empty()
    }

    /// The name of a region; `?` if the topology does not have it.
    #[must_use]
    pub fn name_of(&self, region: RegionId) -> &str {
        self.regions.get(usize::from(region.0)).map_or("?", String::as_str)
    }

    /// The region with this name.
    #[must_use]
    pub fn region_named(&self, name: &str) -> Option<RegionId> {
        self.regions().find(|&region| self.name_of(region) == name)
    }

    /// Round-trip time between nodes in `a` and `b`; if they are the same region, between two of
    /// its nodes. Zero for a region that the topology does not have.
    #[must_use]
    pub fn rtt(&self, a: RegionId, b: RegionId) -> Duration {
        self.rtt
            .get(usize::from(a.0))
            .and_then(|row| row.get(usize::from(b.0)))
            .copied()
            .unwrap_or_default()
    }

    /// The longest round trip.
    #[must_use]
    pub fn rtt_max(&self) -> Duration {
        self.rtt.iter().flatten().copied().max().unwrap_or_default()
    }

    /// The round trip that time-outs follow from: the longest one, and at least 75 ms.
    #[must_use]
    pub fn rtt_assumed(&self) -> Duration {
        self.rtt_max().max(RTT_ASSUMED_MIN)
    }
}

#[expect(clippy::float_arithmetic, reason = "reads a file; protocols see whole nanoseconds")]
fn millis(field: &str, value: f64) -> Result<Duration, TopologyError> {
    if (0.0..=100_000.0).contains(&value) {
        Ok(Duration::from_secs_f64(value / 1_000.0))
    } else {
        Err(TopologyError::OutOfRange { field: field.into(), value: value.to_string() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"
        name = "two"
        source = "a test"
        local_rtt_ms = 0.5
        regions = ["A", "B"]
        [rtt_ms]
        A = { B = 67 }
    "#;

    #[test]
    fn a_file_gives_both_directions() {
        let map = Topology::parse(TEXT).unwrap();
        let (a, b) = (RegionId(0), RegionId(1));
        assert_eq!(map.rtt(a, b), Duration::from_millis(67));
        assert_eq!(map.rtt(b, a), Duration::from_millis(67));
        assert_eq!(map.rtt(a, a), Duration::from_micros(500));
        assert_eq!(map.region_named("B"), Some(b));
    }

    #[test]
    fn time_outs_allow_for_busy_processors() {
        let assumed = |rtt: &str| Topology::parse(&TEXT.replace("67", rtt)).unwrap().rtt_assumed();
        assert_eq!(assumed("251"), Duration::from_millis(251));
        assert_eq!(assumed("1"), RTT_ASSUMED_MIN);
    }

    #[test]
    fn built_in_maps_are_maps_and_are_called_as_their_files() {
        assert!(Topology::built_in_names().count() >= 6);
        for name in Topology::built_in_names() {
            assert_eq!(Topology::built_in(name).unwrap().name, name);
        }
        assert_eq!(Topology::built_in("atlantis"), None);
    }

    #[test]
    fn errors_name_the_place() {
        let cases = [
            (TEXT.replace("B = 67", "C = 67"), "\"C\""),
            (TEXT.replace("A = { B = 67 }", ""), "\"A\" and \"B\""),
            (TEXT.replace("67", "-1"), "rtt_ms.A.B"),
            (TEXT.replace("name = \"two\"", "naem = \"two\""), "naem"),
            (TEXT.replace("[\"A\", \"B\"]", "[]"), "regions"),
            (format!("{TEXT}\nB = {{ A = 68 }}"), "two different"),
        ];
        for (text, expected) in cases {
            let message = Topology::parse(&text).unwrap_err().to_string();
            assert!(message.contains(expected), "{message:?} does not contain {expected:?}");
        }
    }
}
