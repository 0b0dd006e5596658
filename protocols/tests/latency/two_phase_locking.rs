//! The message flows of 2PL and 2PC.

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::PartitionId;
use orthodrome_core::time::Duration;
use orthodrome_eval::workload::Options;
use orthodrome_protocols::gateway::coordinator_of;
use orthodrome_protocols::two_phase_locking::BY_AGE;

use super::support::{AZURE5, EC2_5, Sample, compare, compare_ycsbt, majority};

/// The client locks and reads at the leaders of all participants at once.
fn implied(cluster: &Cluster, sample: &Sample) -> Duration {
    let parts = sample.parts();
    let coordinator = coordinator_of(cluster, sample.txn, sample.home, parts.iter().copied());
    let locks = parts.iter().map(|&p| to_leader(cluster, sample, p)).max().unwrap();
    locks + commit(cluster, sample, coordinator)
}

/// General transactions: the client locks and reads key after key, for each follows from the one
/// before; then it locks at once all that it writes. The coordinator does not depend on what it
/// touches, which nobody knows when it begins.
fn implied_general(cluster: &Cluster, sample: &Sample) -> Duration {
    let coordinator = coordinator_of(cluster, sample.txn, sample.home, [].into_iter());
    let away = |&p: &PartitionId| to_leader(cluster, sample, p);
    let reads: Duration = sample.reads.iter().map(away).sum();
    let locks = sample.writes.iter().map(away).max().unwrap();
    reads + locks + commit(cluster, sample, coordinator)
}

fn to_leader(cluster: &Cluster, sample: &Sample, partition: PartitionId) -> Duration {
    cluster.topology.rtt(sample.home, cluster.leader_region(partition))
}

/// The coordinator asks the participants to prepare, each replicates its prepare and votes; the
/// coordinator replicates the decision.
fn commit(cluster: &Cluster, sample: &Sample, coordinator: PartitionId) -> Duration {
    let at = cluster.leader_region(coordinator);
    let prepare = |p: PartitionId| {
        // The coordinator's own partition is on its own node, others perhaps in its region.
        let is_here = p == coordinator;
        let there = cluster.topology.rtt(at, cluster.leader_region(p));
        majority(cluster, p) + if is_here { Duration::ZERO } else { there }
    };
    let prepares = sample.parts().into_iter().map(prepare).max().unwrap();
    cluster.topology.rtt(sample.home, at) + prepares + majority(cluster, coordinator)
}

#[test]
fn ycsbt_takes_what_the_flow_implies() {
    compare_ycsbt(BY_AGE, implied);
}

#[test]
fn general_transactions_take_what_the_flow_implies() {
    // So many lists that few transactions meet, and no transactions but dependent ones.
    let options = Options { keys: Some(2_000), read_only: Some(0.0), ..Options::default() };
    for topology in [AZURE5, EC2_5] {
        compare(BY_AGE, topology, "list-append:dependent", &options, implied_general);
    }
}
