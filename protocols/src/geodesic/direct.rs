//! When a gateway gives a transaction to all replicas of a partition itself (direct mode, D9): where
//! their answers come sooner than that of h, and while it begins so few transactions that the
//! additional messages cost little.

use orthodrome_core::id::NodeId;
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::time::{Duration, Time};

use super::naming::Path;
use super::per_second::PerSecond;
use super::{Config, DirectUse};
use crate::delays::{Delays, delay};

/// How long answers take, and how many transactions begin.
#[derive(Debug)]
pub(super) struct Direct {
    /// From here through h to the last named replica and back; from here to one replica and back, with
    /// one durable write there.
    trips: Delays<(NodeId, NodeId)>,
    measured: OrdMap<(NodeId, NodeId), Time>,
    begun: PerSecond,
}

impl Default for Direct {
    fn default() -> Self {
        let (trips, measured) = (Delays::at_percentile(50), OrdMap::new());
        Self { trips, measured, begun: PerSecond::default() }
    }
}

impl Direct {
    /// A transaction begins.
    pub(super) fn began(&mut self, now: Time) {
        self.begun.add(1, now);
    }

    /// An answer has come along a path.
    pub(super) fn record(
        &mut self,
        path: (NodeId, NodeId),
        trip: Duration,
        config: &Config,
        now: Time,
    ) {
        let last = self.measured.get(&path);
        if last.is_none_or(|last| now.since(*last) >= config.delay_window / SAMPLES_MAX) {
            self.measured.insert(path, now);
            self.trips.record(path, delay(trip), config.delay_window, now);
        }
    }

    /// Whether the replicas of a partition should get a transaction from here; and if so, whether h is
    /// to be patient.
    pub(super) fn choose(&mut self, path: &Path, config: &Config, now: Time) -> Option<bool> {
        let (Some(all), Some((h, last))) = (&path.all, path.ends()) else { return None };
        if let DirectUse::Always { is_patient } = config.direct {
            return Some(is_patient);
        }
        let Config { delay_window, delay_refresh, .. } = *config;
        let mut trip = |ends| self.trips.estimate(ends, delay_window, delay_refresh, now);
        let known = trip((h, last));
        // If h is always patient, nobody measures the way through it.
        let known = known.or_else(|| Some(trip((h, h))?.saturating_add(trip((last, last))?)));
        let through_h = known.unwrap_or_else(|| delay(path.round_trip));
        let each = all.iter().map(|&(node, rtt)| trip((node, node)).unwrap_or(delay(rtt)));
        let slowest = each.max()?;
        if slowest >= through_h / 100 * GAIN_PERCENT {
            return None;
        }
        let is_patient = slowest <= delay(config.patience_max);
        let is_busy = self.begun.most() > config.direct_rate_max;
        (is_patient || !is_busy).then_some(is_patient)
    }
}

/// Measurements that are kept of one path.
const SAMPLES_MAX: u32 = 1_000;

/// The answers of all replicas have to come within this share of the time that h needs: less is not
/// worth the messages.
const GAIN_PERCENT: i64 = 95;

#[cfg(test)]
mod tests {
    use orthodrome_core::cluster::Cluster;
    use orthodrome_core::machine::Protocol as _;
    use orthodrome_core::topology::Topology;

    use super::super::Geodesic;
    use super::super::per_second::SECOND;
    use super::*;

    const MILLI: Duration = Duration::from_millis(1);

    fn config() -> Config {
        let map = Topology::uniform(3, MILLI, MILLI * 10);
        Geodesic::configure(&Cluster::spread(map, 1, 1, 1, 3).unwrap(), "geodesic")
    }

    /// Three replicas, of which h is at hand.
    fn path(others: [u64; 2]) -> Path {
        let [y, z] = others.map(Duration::from_millis);
        let all = vec![(NodeId(1), MILLI), (NodeId(2), y), (NodeId(3), z)];
        Path {
            named: vec![NodeId(1), NodeId(2)],
            one_way: (MILLI + y) / 2,
            round_trip: MILLI + y,
            majority: y,
            are_enough: true,
            all: Some(all),
        }
    }

    #[test]
    fn all_replicas_are_asked_where_the_furthest_is_nearer_than_the_way_through_h() {
        let (mut direct, config) = (Direct::default(), config());
        let mut choose = |path| direct.choose(&path, &config, Time::ZERO);
        assert_eq!(choose(path([20, 20])), None, "that gains too little");
        assert_eq!(choose(path([10, 12])), None);
        assert_eq!(choose(path([10, 10])), Some(true));
        assert_eq!(choose(Path { round_trip: MILLI * 30, ..path([20, 20]) }), Some(false));
        assert_eq!(choose(Path { all: None, ..path([10, 10]) }), None, "one of them is not well");
    }

    #[test]
    fn what_is_measured_counts_more_than_the_map() {
        let (mut direct, config) = (Direct::default(), config());
        for (node, micros) in [(1, 300), (2, 500), (3, 600)] {
            let node = NodeId(node);
            direct.record((node, node), Duration::from_micros(micros), &config, Time::ZERO);
        }
        let far = path([10, 12]);
        assert_eq!(direct.choose(&far, &config, Time::ZERO), Some(true), "through h it is 800");
        direct.record((NodeId(1), NodeId(2)), Duration::from_micros(600), &config, Time::ZERO);
        let later = Time::ZERO + config.delay_refresh;
        assert_eq!(direct.choose(&far, &config, later), None, "or even less");
        let later = Time::ZERO + config.delay_window * 2;
        assert_eq!(direct.choose(&path([10, 10]), &config, later), Some(true), "that was long ago");
    }

    #[test]
    fn whoever_begins_many_transactions_leaves_them_to_h_unless_that_is_patient() {
        let (mut direct, config) = (Direct::default(), config());
        let far = Path { round_trip: MILLI * 30, ..path([20, 20]) };
        for _ in 0..=config.direct_rate_max {
            direct.began(Time::ZERO);
        }
        assert_eq!(direct.choose(&far, &config, Time::ZERO), None);
        assert_eq!(direct.choose(&path([10, 10]), &config, Time::ZERO), Some(true));
        direct.began(Time::ZERO + SECOND);
        assert_eq!(direct.choose(&far, &config, Time::ZERO + SECOND), None, "a second ago it did");
        direct.began(Time::ZERO + SECOND * 2);
        assert_eq!(direct.choose(&far, &config, Time::ZERO + SECOND * 2), Some(false));
    }
}
