//! The message flow of 2PL and 2PC.

use std::collections::BTreeSet;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{PartitionId, RegionId, TxnId};
use orthodrome_core::time::Duration;
use orthodrome_protocols::carousel::coordinator_of;
use orthodrome_protocols::two_phase_locking::{BY_AGE, Locking};

use super::support::{AZURE5, EC2_5, compare, majority};

/// What the flow implies for a transaction over `participants` begun in `home`: the client locks and
/// reads at the participant leaders; the coordinator asks them to prepare, each replicates its
/// prepare and votes; the coordinator replicates the decision.
fn implied(
    cluster: &Cluster,
    home: RegionId,
    txn: TxnId,
    parts: &BTreeSet<PartitionId>,
) -> Duration {
    let rtt = |a, b| cluster.topology.rtt(a, b);
    let leader = |p| cluster.leader_region(p);
    let coordinator = coordinator_of(cluster, txn, home, parts.iter().copied());
    let at = leader(coordinator);
    let reads = parts.iter().map(|&p| rtt(home, leader(p))).max().unwrap();
    let prepare = |&p: &PartitionId| {
        // The coordinator's own partition is on its own node, others perhaps in its region.
        let there_and_back = if p == coordinator { Duration::ZERO } else { rtt(at, leader(p)) };
        there_and_back + majority(cluster, p)
    };
    let prepares = parts.iter().map(prepare).max().unwrap();
    reads + rtt(home, at) + prepares + majority(cluster, coordinator)
}

#[test]
fn ycsbt_on_azure5_takes_what_the_flow_implies() {
    compare::<Locking>(BY_AGE, AZURE5, "ycsbt:4", implied);
}

#[test]
fn ycsbt_on_ec2_5_takes_what_the_flow_implies() {
    compare::<Locking>(BY_AGE, EC2_5, "ycsbt:4", implied);
}
