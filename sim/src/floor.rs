//! The latency floor: the least time that any protocol needs for a transaction on a topology.

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{PartitionId, RegionId};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::scan;
use orthodrome_core::time::Duration;
use orthodrome_core::txn::{Key, Kind};
use orthodrome_eval::workload::{Reach, Request};

/// The distances that bound latency, computed once for each cluster.
///
/// R(P) is the round trip from the client to the nearest replica of partition P. *Read* is the
/// largest R over the partitions read, and *reach* the largest R over all partitions accessed.
/// *Durable* is the round trip to the nearest majority of any partition's replicas.
///
/// - Read-only: *read*.
/// - Procedure: max(*reach*, *durable*), because the request can be made durable while its reads
///   travel.
/// - Interactive: max(*reach*, *read* + *durable*), because the writes are known only after the
///   reads have returned.
/// - General: *read* + *durable*, with the keys of the first round, because the other keys may be
///   anywhere.
/// - Scan: *read*, over all partitions that may have keys of its range.
#[derive(Clone, Debug)]
pub struct Floor {
    cluster: Cluster,
    nearest: OrdMap<(RegionId, PartitionId), Duration>,
    durable: OrdMap<RegionId, Duration>,
}

impl Floor {
    /// Computes the floor of a cluster.
    #[must_use]
    pub fn new(cluster: &Cluster) -> Self {
        let mut nearest = OrdMap::new();
        let mut durable: OrdMap<RegionId, Duration> = OrdMap::new();
        for region in cluster.topology.regions() {
            for partition in cluster.partitions() {
                let rtt = |&node| cluster.topology.rtt(region, cluster.region_of(node));
                let mut distances: Vec<Duration> = partition.replicas.iter().map(rtt).collect();
                distances.sort_unstable();
                let first = distances.first().copied().unwrap_or_default();
                let majority = distances.get(distances.len() / 2).copied().unwrap_or_default();
                nearest.insert((region, partition.id), first);
                let best = durable.entry(region).or_insert(majority);
                *best = majority.min(*best);
            }
        }
        Self { cluster: cluster.clone(), nearest, durable }
    }

    pub(crate) fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// The least time until any protocol could acknowledge to a client in `home` that `request`
    /// committed.
    #[must_use]
    pub fn of(&self, home: RegionId, request: &Request) -> Duration {
        if let Some(scan) = &request.scan {
            let fences = scan::fences(&self.cluster, false, scan.range()).unwrap_or_default();
            return self.furthest(home, fences.iter());
        }
        let read = self.furthest(home, request.reads.iter());
        let reach = read.max(self.furthest(home, request.writes.iter()));
        let durable = self.durable.get(&home).copied().unwrap_or_default();
        match &request.kind {
            _ if request.writes.is_empty() => read,
            Kind::ReadOnly | Kind::StaleReadOnly => read,
            Kind::Procedure(_) => reach.max(durable),
            Kind::Interactive => reach.max(read + durable),
            Kind::General => read + durable,
        }
    }

    /// The reach of `request` from `home`: the distance to the farthest region that leads one of
    /// its partitions.
    #[must_use]
    pub fn reach(&self, home: RegionId, request: &Request) -> Reach {
        let keys = request.reads.iter().chain(&request.writes);
        let leader = |key| self.cluster.leader_region(self.cluster.partition_of(key));
        let reaches = keys.map(|key| Reach::between(&self.cluster, home, leader(key)));
        reaches.max().unwrap_or(Reach::Local)
    }

    fn furthest<'a>(&self, home: RegionId, keys: impl Iterator<Item = &'a Key>) -> Duration {
        let partitions = keys.map(|key| self.cluster.partition_of(key));
        let distance = |partition| self.nearest.get(&(home, partition)).copied();
        partitions.filter_map(distance).max().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use orthodrome_core::topology::Topology;
    use orthodrome_core::txn::Priority;

    /// Five partitions on the topology azure5, with three replicas each: p0 in VA, WA, PR; p1 in
    /// WA, PR, NSW; p2 in PR, NSW, SG; p3 in NSW, SG, VA; p4 in SG, VA, WA.
    #[test]
    fn floors_worked_out_by_hand_on_azure5() {
        let text = include_str!("../../topologies/azure5.toml");
        let cluster = Cluster::spread(Topology::parse(text).unwrap(), 1, 1, 5, 3).unwrap();
        let key_of = |partition: u32| {
            let keys = (0..).map(|number: u32| Key::from(number.to_string()));
            keys.into_iter()
                .find(|key| cluster.partition_of(key) == PartitionId(partition))
                .unwrap()
        };
        let floor = Floor::new(&cluster);
        let of = |home: &str, kind: Kind, reads: &[u32], writes: &[u32]| {
            let request = Request {
                name: "test",
                kind,
                reads: reads.iter().copied().map(key_of).collect(),
                writes: writes.iter().copied().map(key_of).collect(),
                priority: Priority::LOW,
                parameter: 0,
                scan: None,
            };
            let home = cluster.topology.region_named(home).unwrap();
            floor.of(home, &request).as_secs_f64() * 1_000.0
        };
        // From VA: p0, p3, p4 are local (0.5 ms); p1 is nearest in WA (67); p2 in PR (80). The
        // nearest majority is two of p0 or p4: VA itself and WA, 67 ms.
        assert_eq!(of("VA", Kind::ReadOnly, &[0, 3], &[]), 0.5);
        assert_eq!(of("VA", Kind::ReadOnly, &[0, 1], &[]), 67.0);
        assert_eq!(of("VA", Kind::Interactive, &[0], &[0]), 67.5);
        assert_eq!(of("VA", Kind::Interactive, &[2], &[0]), 80.0 + 67.0);
        assert_eq!(of("VA", Kind::Procedure(vec![]), &[2], &[2]), 80.0);
        assert_eq!(of("VA", Kind::Procedure(vec![]), &[0], &[0]), 67.0);
        // Blind writes: participants are asked while the writes are made durable.
        assert_eq!(of("VA", Kind::Interactive, &[], &[2]), 80.0);
        // From NSW: p1, p2, p3 are local; p0 is nearest in WA (175), p4 in SG (87); the nearest
        // majority is NSW and SG, 87 ms.
        assert_eq!(of("NSW", Kind::Interactive, &[4], &[0, 4]), 175.0);
        assert_eq!(of("NSW", Kind::Interactive, &[4], &[4]), 174.0);
    }
}
