//! Recorded transactions, submitted again: from a trace file, or from the history of a run.
//!
//! The file has one JSON object a line. A line of a trace has the keys that a transaction reads and
//! writes:
//!
//! ```json
//! {"region": "VA", "priority": "high", "reads": ["cart:17"], "writes": ["order:4711", "stock:9"]}
//! ```
//!
//! One of `reads` and `writes` is required; all other fields are optional. A line of a history has
//! the format of [`crate::history`]. Attempts after the first of a transaction are skipped, because
//! the run decides about retries. Each region submits the transactions of the lines that name it,
//! in order, and begins again after the last. If no line names a region, the region submits all
//! lines. The file does not determine the rate.

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::RegionId;
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::rng::Rng;
use orthodrome_core::txn::{Decision, Key, Priority, Reads};
use serde::Deserialize;

use super::options::Priorities;
use super::rows::Rows;
use super::{Form, Issuer, Options, Request, Values, Workload, WorkloadError};
use crate::history;

const UPDATE: &str = "update";
const READ: &str = "read";

/// The most lines kept in memory.
const LINES_MAX: usize = 1_000_000;
/// The most keys of one transaction: the default limit of servers.
const KEYS_MAX: usize = 1_000;

/// One line; of a history only the fields that matter here.
#[derive(Deserialize)]
struct Line {
    region: Option<String>,
    priority: Option<PriorityName>,
    #[serde(default)]
    reads: Vec<String>,
    #[serde(default)]
    writes: Vec<String>,
    #[serde(default)]
    txn: String,
    #[serde(default)]
    ops: Vec<history::Op>,
}

#[derive(Deserialize, Clone, Copy)]
#[serde(rename_all = "lowercase")]
enum PriorityName {
    High,
    Low,
}

/// A transaction of the file.
#[derive(Debug)]
struct Recorded {
    reads: Vec<Key>,
    writes: Vec<Key>,
    priority: Option<Priority>,
}

/// The workload.
#[derive(Debug)]
pub struct Replay {
    name: String,
    recorded: Vec<Recorded>,
    /// The transactions of each region, by its name.
    by_name: OrdMap<String, Vec<usize>>,
    /// The same by the region's id, once the cluster is known.
    by_region: OrdMap<RegionId, Vec<usize>>,
    /// How many transactions each region has submitted.
    begun: OrdMap<RegionId, usize>,
    rows: Rows,
    form: Form,
    priorities: Priorities,
}

impl Replay {
    /// The transactions in `text`, called `name` in results. Values have `value_bytes` (64). Lines
    /// without a priority have high priority with the probability `high_priority`.
    ///
    /// # Errors
    /// If a line or an option is wrong.
    pub fn new(name: &str, text: &str, options: &Options) -> Result<Self, WorkloadError> {
        options.only("a recorded workload", &["value_bytes", "form"])?;
        let mut replay = Self {
            name: name.to_owned(),
            recorded: Vec::new(),
            by_name: OrdMap::new(),
            by_region: OrdMap::new(),
            begun: OrdMap::new(),
            rows: Rows::new(options)?,
            form: options.form.unwrap_or_default(),
            priorities: options.priorities(&[UPDATE, READ])?,
        };
        for (number, line) in (1..).zip(text.lines()) {
            let wrong =
                |problem: String| WorkloadError::Syntax(format!("line {number}: {problem}"));
            if line.trim().is_empty() {
                continue;
            }
            let line: Line =
                serde_json::from_str(line).map_err(|error| wrong(error.to_string()))?;
            replay.add(line).map_err(wrong)?;
        }
        if replay.recorded.is_empty() {
            return Err(WorkloadError::Syntax("the file has no transactions".into()));
        }
        Ok(replay)
    }

    fn add(&mut self, line: Line) -> Result<(), String> {
        let Line { region, priority, reads, writes, txn, ops } = line;
        if txn.contains('#') {
            return Ok(());
        }
        let of_history = |wanted: bool| {
            let keys = ops.iter().filter(move |op| {
                let is_read =
                    matches!(op, history::Op::ReadList(..) | history::Op::ReadVersion(..));
                is_read == wanted
            });
            keys.map(|op| op.key().to_owned())
        };
        let keys = |given: Vec<String>, more: Vec<String>| -> Vec<Key> {
            let mut seen = OrdSet::new();
            let all = given.into_iter().chain(more).filter(|key| seen.insert(key.clone()));
            all.map(Key::from).collect()
        };
        let reads = keys(reads, of_history(true).collect());
        let writes = keys(writes, of_history(false).collect());
        let all: OrdSet<&Key> = reads.iter().chain(&writes).collect();
        match all.len() {
            // An attempt that ended before its first read.
            0 if !txn.is_empty() => return Ok(()),
            0 => return Err("the transaction has neither `reads` nor `writes`".into()),
            keys if keys > KEYS_MAX => {
                return Err(format!(
                    "the transaction has {keys} keys; at most {KEYS_MAX} are allowed"
                ));
            }
            _ => {}
        }
        if all.iter().any(|key| key.is_empty()) {
            return Err("a key is empty".into());
        }
        if self.recorded.len() >= LINES_MAX {
            return Err(format!("more than {LINES_MAX} transactions; leave some out"));
        }
        if let Some(region) = region {
            self.by_name.entry(region).or_default().push(self.recorded.len());
        }
        let priority = priority.map(|priority| match priority {
            PriorityName::High => Priority::HIGH,
            PriorityName::Low => Priority::LOW,
        });
        self.recorded.push(Recorded { reads, writes, priority });
        Ok(())
    }
}

impl Workload for Replay {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn values(&self) -> Values {
        Values::Versions
    }

    fn place(&mut self, cluster: &Cluster) {
        let topology = &cluster.topology;
        let known = self.by_name.iter();
        let known =
            known.filter_map(|(name, own)| Some((topology.region_named(name)?, own.clone())));
        self.by_region = known.collect();
    }

    fn next(&mut self, issuer: Issuer, rng: &mut Rng) -> Request {
        let begun = self.begun.entry(issuer.region).or_default();
        let place = match self.by_region.get(&issuer.region) {
            Some(own) => own.get(*begun % own.len().max(1)).copied().unwrap_or_default(),
            None => *begun % self.recorded.len().max(1),
        };
        *begun += 1;
        let (mut reads, mut writes, mut priority) = (Vec::new(), Vec::new(), None);
        if let Some(recorded) = self.recorded.get(place) {
            (reads, writes) = (recorded.reads.clone(), recorded.writes.clone());
            priority = recorded.priority;
        }
        let name = if writes.is_empty() { READ } else { UPDATE };
        let priority = priority.unwrap_or_else(|| self.priorities.draw(name, rng));
        self.rows.request((name, priority), reads, writes, self.form, rng)
    }

    fn decide(&self, request: &Request, _reads: &Reads) -> Decision {
        self.rows.decide(request)
    }

    fn audit(&self, request: &Request, reads: &Reads) -> Result<(), String> {
        self.rows.audit(request, reads)
    }
}

#[cfg(test)]
mod tests {
    use orthodrome_core::id::ClientId;
    use orthodrome_core::topology::Topology;

    use super::*;

    fn begun(replay: &mut Replay, region: u16, count: usize) -> Vec<(String, String, bool)> {
        let mut rng = Rng::stream(1, "replay", 0);
        let issuer = Issuer { client: ClientId(1), index: 0, region: RegionId(region) };
        let names =
            |keys: &[Key]| keys.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
        let mut next = || {
            let request = replay.next(issuer, &mut rng);
            (names(&request.reads), names(&request.writes), request.priority == Priority::HIGH)
        };
        (0..count).map(|_| next()).collect()
    }

    #[test]
    fn regions_begin_their_own_lines_in_order_and_again() {
        let text = "{\"region\":\"A\",\"priority\":\"high\",\"reads\":[\"x\",\"y\",\"x\"]}\n\n\
                    {\"region\":\"B\",\"priority\":\"low\",\"reads\":[\"x\"],\"writes\":[\"z\"]}\n\
                    {\"region\":\"A\",\"priority\":\"low\",\"writes\":[\"w\"]}\n";
        let mut replay = Replay::new("trace.jsonl", text, &Options::default()).unwrap();
        let cluster = Cluster::spread(Topology::built_in("local3").unwrap(), 1, 1, 1, 1).unwrap();
        replay.place(&cluster);
        let line = |reads: &str, writes: &str, is_high| (reads.into(), writes.into(), is_high);
        let (one, two, three) =
            (line("x y", "", true), line("x", "z", false), line("", "w", false));
        assert_eq!(begun(&mut replay, 0, 3), [one.clone(), three.clone(), one.clone()]);
        assert_eq!(begun(&mut replay, 1, 2), [two.clone(), two.clone()]);
        // No line names the third region.
        assert_eq!(begun(&mut replay, 2, 4), [one.clone(), two, three, one]);
    }

    #[test]
    fn a_history_is_begun_again_without_its_second_attempts() {
        let entry = |txn: &str, ops: &str| {
            format!(
                "{{\"txn\":\"{txn}\",\"process\":4,\"region\":\"VA\",\"priority\":\"low\",\"invoke_us\":1,\"status\":\"ok\",\
                 \"ops\":{ops}}}\n"
            )
        };
        let text = entry("c4.1", "[[\"r\",\"a\",[3,12]],[\"append\",\"b\",7]]")
            + &entry("c4.1#2", "[[\"r\",\"a\",[3,12]],[\"append\",\"b\",7]]")
            + &entry("c4.2", "[]")
            + &entry("c4.3", "[[\"r\",\"c\",\"c4.1@9\"],[\"w\",\"c\",null]]");
        let mut replay = Replay::new("run.jsonl", &text, &Options::default()).unwrap();
        let line = |reads: &str, writes: &str| (reads.into(), writes.into(), false);
        let expected = [line("a", "b"), line("c", "c"), line("a", "b")];
        assert_eq!(begun(&mut replay, 0, 3), expected);
    }

    #[test]
    fn an_error_names_its_line() {
        let good = "{\"reads\":[\"x\"]}\n";
        for (line, expected) in [
            ("{\"reads\":[\"x\"]", "line 2: "),
            ("{\"priority\":\"low\"}", "line 2: the transaction has neither `reads` nor `writes`"),
            ("{\"reads\":[\"\"]}", "line 2: a key is empty"),
            ("{\"reads\":[\"x\"],\"priority\":\"urgent\"}", "urgent"),
        ] {
            let text = format!("{good}{line}\n");
            let error = Replay::new("t", &text, &Options::default()).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        let error = Replay::new("t", "\n", &Options::default()).unwrap_err().to_string();
        assert!(error.contains("no transactions"), "{error}");
    }
}
