//! Which replicas a gateway names: h and the others of ballot 0.

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{NodeId, PartitionId};
use orthodrome_core::time::Duration;

/// The replicas that a gateway names at one partition, and how far they are.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Path {
    /// h, then the others, the furthest from h last.
    pub named: Vec<NodeId>,
    /// From the gateway through h to the last one.
    pub one_way: Duration,
    /// There and back.
    pub round_trip: Duration,
    /// To the nearest f + 1 replicas and back.
    pub majority: Duration,
    /// All of them are well. If not, ballot 0 cannot decide.
    pub are_enough: bool,
    /// The three replicas of a group, and how far each is, there and back, if all of them are well:
    /// they may get the transaction from the gateway (D9).
    pub all: Option<Vec<(NodeId, Duration)>>,
}

impl Path {
    /// h and the last one, which the delay is measured to.
    pub(super) fn ends(&self) -> Option<(NodeId, NodeId)> {
        Some((*self.named.first()?, *self.named.last()?))
    }
}

/// How many replicas ballot 0 needs of a group of so many: h and y; for f ≥ 2 all but one (D11).
fn quorum(replicas: usize) -> usize {
    (replicas / 2 * 2).max(1)
}

/// Names the replicas of `partition` that answer soonest, among those that are well.
pub(super) fn name(
    cluster: &Cluster,
    gateway: NodeId,
    partition: PartitionId,
    is_well: impl Fn(NodeId) -> bool,
) -> Path {
    let all = cluster.partition(partition).map_or(&[][..], |placed| &placed.replicas);
    let rtt = |a: NodeId, b: NodeId| {
        if a == b {
            return Duration::ZERO;
        }
        cluster.topology.rtt(cluster.region_of(a), cluster.region_of(b))
    };
    let mut distances: Vec<Duration> = all.iter().map(|&node| rtt(gateway, node)).collect();
    distances.sort_unstable();
    let majority = distances.get(all.len() / 2).copied().unwrap_or_default();
    let needed = quorum(all.len());
    let well: Vec<NodeId> = all.iter().copied().filter(|&node| is_well(node)).collect();
    let are_enough = well.len() >= needed;
    let may_be_direct = all.len() == 3 && well.len() == 3;
    let each = may_be_direct.then(|| all.iter().map(|&node| (node, rtt(gateway, node))).collect());
    let candidates = if are_enough { well } else { all.to_vec() };
    let with_h = |&h: &NodeId| {
        let mut named: Vec<NodeId> = candidates.clone();
        named.sort_by_key(|&node| (node != h, rtt(h, node), node));
        named.truncate(needed);
        let beyond = named.last().map_or(Duration::ZERO, |&last| rtt(h, last));
        let to_h = rtt(gateway, h);
        let round_trip = to_h + beyond;
        let one_way = to_h / 2 + beyond / 2;
        let all = None;
        (round_trip, to_h, h, Path { named, one_way, round_trip, majority, are_enough, all })
    };
    let best = candidates
        .iter()
        .map(with_h)
        .min_by_key(|(round_trip, to_h, h, _)| (*round_trip, *to_h, *h));
    best.map_or_else(
        || Path {
            named: vec![],
            one_way: Duration::ZERO,
            round_trip: Duration::ZERO,
            majority,
            are_enough: false,
            all: None,
        },
        |(.., path)| Path { all: each, ..path },
    )
}

#[cfg(test)]
mod tests {
    use orthodrome_core::topology::Topology;

    use super::*;

    fn cluster(replicas: u32) -> Cluster {
        let map = Topology::from_fn(5, Duration::from_millis(1), |a, b| {
            Duration::from_millis(u64::from(a.abs_diff(b)) * 10)
        });
        Cluster::spread(map, 1, 1, 1, replicas).unwrap()
    }

    #[test]
    fn the_nearest_pair_is_named_and_a_suspect_is_passed_over() {
        let (cluster, gateway) = (cluster(3), NodeId(6));
        let path = name(&cluster, gateway, PartitionId(0), |_| true);
        assert_eq!(path.named, [NodeId(1), NodeId(2)]);
        assert_eq!(path.round_trip, Duration::from_millis(11));
        let away = |node, millis| (NodeId(node), Duration::from_millis(millis));
        assert_eq!(path.all, Some(vec![away(1, 1), away(2, 10), away(3, 20)]));
        let path = name(&cluster, gateway, PartitionId(0), |node| node != NodeId(2));
        assert_eq!((path.named, path.are_enough), (vec![NodeId(1), NodeId(3)], true));
        assert_eq!(path.all, None, "all three have to answer");
        let path = name(&cluster, gateway, PartitionId(0), |node| node == NodeId(3));
        assert!(!path.are_enough, "one is not enough");
    }

    #[test]
    fn ballot_zero_needs_all_but_one_of_five() {
        let path = name(&cluster(5), NodeId(6), PartitionId(0), |_| true);
        assert_eq!((path.named.len(), path.all), (4, None));
        assert_eq!([1, 3, 5, 7].map(quorum), [1, 2, 4, 6]);
    }
}
