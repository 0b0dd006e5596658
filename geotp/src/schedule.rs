//! Decides when the statements for each source start, so that locks are held as briefly as possible
//! (GeoTP §IV-B, Eq. 3; with forecasts §IV-C, Eq. 8); and keeps the average round trips.

use orthodrome_core::id::NodeId;
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::time::{Duration, nanos};

/// An exponentially weighted average of durations.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Average {
    mean: Option<u64>,
}

impl Average {
    /// Adds a measurement with a weight of `weight_percent`.
    pub fn add(&mut self, measured: Duration, weight_percent: u64) {
        let measured = nanos(measured);
        let weight = weight_percent.min(100);
        self.mean = Some(match self.mean {
            None => measured,
            Some(mean) => (mean / 100)
                .saturating_mul(100 - weight)
                .saturating_add((measured / 100).saturating_mul(weight)),
        });
    }

    /// The average so far; none before the first measurement.
    #[must_use]
    pub fn get(&self) -> Option<Duration> {
        self.mean.map(Duration::from_nanos)
    }
}

/// How long each source's statements are postponed, given the expected time until each source's
/// answer: the round trip, and with forecasts the local execution. The slowest source starts at
/// once, and the others so that they end together with it.
#[must_use]
pub fn postpone(latencies: &OrdMap<NodeId, Duration>) -> OrdMap<NodeId, Duration> {
    let slowest = latencies.values().max().copied().unwrap_or_default();
    latencies.iter().map(|(&source, &latency)| (source, slowest.saturating_sub(latency))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn the_example_of_the_paper() {
        // §IV-B: 10 and 100 ms away; the nearer one starts 90 ms later.
        let latencies = OrdMap::from([(NodeId(1), ms(10)), (NodeId(2), ms(100))]);
        assert_eq!(postpone(&latencies), OrdMap::from([(NodeId(1), ms(90)), (NodeId(2), ms(0))]));
    }

    #[test]
    fn everybody_ends_when_the_slowest_does() {
        let latencies: OrdMap<_, _> = [0, 27, 73, 251]
            .into_iter()
            .enumerate()
            .map(|(at, rtt)| (NodeId(at as u32), ms(rtt)))
            .collect();
        for (source, wait) in postpone(&latencies) {
            assert_eq!(wait + latencies[&source], ms(251));
        }
        assert!(postpone(&OrdMap::new()).is_empty());
    }

    #[test]
    fn averages_follow_what_is_measured() {
        let mut average = Average::default();
        assert_eq!(average.get(), None);
        average.add(ms(100), 10);
        assert_eq!(average.get(), Some(ms(100)));
        average.add(ms(200), 10);
        assert_eq!(average.get(), Some(ms(110)));
        for _ in 0..200 {
            average.add(ms(200), 10);
        }
        let end = average.get().unwrap();
        assert!(end > ms(199) && end <= ms(200), "{end:?}");
    }
}
