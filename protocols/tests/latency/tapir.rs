//! The message flow of TAPIR.

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::PartitionId;
use orthodrome_core::time::Duration;
use orthodrome_protocols::tapir::NAME;

use super::support::{Sample, compare_ycsbt};

/// What the flow implies: a round trip to the nearest replica of each partition that is read, and
/// one to the furthest replica of any participant.
fn implied(cluster: &Cluster, sample: &Sample) -> Duration {
    let away = |p: PartitionId| {
        let replicas = cluster.partition(p).unwrap().replicas.iter();
        replicas.map(|&node| cluster.topology.rtt(sample.home, cluster.region_of(node)))
    };
    let reads = sample.reads.iter().map(|&p| away(p).min().unwrap()).max().unwrap();
    let votes = sample.parts().into_iter().flat_map(away).max().unwrap();
    reads + votes
}

#[test]
fn ycsbt_takes_what_the_flow_implies() {
    compare_ycsbt(NAME, implied);
}
