//! The message flow of Natto without conflicts.

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::PartitionId;
use orthodrome_core::time::Duration;
use orthodrome_protocols::gateway::coordinator_of;
use orthodrome_protocols::natto::{RECSF, TS};

use super::support::{Sample, compare_ycsbt, majority};

/// What §3.2 and Carousel's flow imply: every participant processes the transaction when it has
/// arrived at the furthest; the answers come back; the coordinator's group replicates the commit
/// request, and the participants' meanwhile their votes.
fn implied(cluster: &Cluster, sample: &Sample) -> Duration {
    let (home, parts) = (sample.home, sample.parts());
    let rtt = |a, b| cluster.topology.rtt(a, b);
    let leader = |p| cluster.leader_region(p);
    let coordinator = coordinator_of(cluster, sample.txn, home, parts.iter().copied());
    let at = leader(coordinator);
    let turn = parts.iter().map(|&p| rtt(home, leader(p))).max().unwrap() / 2;
    let requested = turn * 2 + rtt(home, at) / 2 + majority(cluster, coordinator);
    let vote = |&p: &PartitionId| {
        // A vote of the coordinator's own partition crosses no network.
        let back = if p == coordinator { Duration::ZERO } else { rtt(leader(p), at) / 2 };
        turn + majority(cluster, p) + back
    };
    let votes = parts.iter().map(vote).max().unwrap();
    requested.max(votes) + rtt(at, home) / 2
}

#[test]
fn ycsbt_takes_what_the_flow_implies() {
    compare_ycsbt(TS, implied);
}

#[test]
fn ycsbt_takes_no_longer_with_everything() {
    compare_ycsbt(RECSF, implied);
}
