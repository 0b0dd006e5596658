//! The message flows of Carousel §4.1 and §4.2.

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::NodeId;
use orthodrome_core::time::Duration;
use orthodrome_protocols::carousel::{BASIC, FAST, supermajority};
use orthodrome_protocols::gateway::coordinator_of;

use super::support::{Sample, compare_ycsbt, majority};

/// What §4.1's flow implies: the client reads from the participant leaders; its commit request is
/// replicated by the coordinator's group; meanwhile the participants replicate their votes and send
/// them to the coordinator.
fn implied(cluster: &Cluster, sample: &Sample) -> Duration {
    let (home, parts) = (sample.home, sample.parts());
    let rtt = |a, b| cluster.topology.rtt(a, b);
    let leader = |p| cluster.leader_region(p);
    let coordinator = coordinator_of(cluster, sample.txn, home, parts.iter().copied());
    let at = leader(coordinator);
    let reads = parts.iter().map(|&p| rtt(home, leader(p))).max().unwrap();
    let requested = reads + rtt(home, at) / 2 + majority(cluster, coordinator);
    let votes = parts
        .iter()
        .map(|&p| {
            // A vote of the coordinator's own partition crosses no network.
            let back = if p == coordinator { Duration::ZERO } else { rtt(leader(p), at) / 2 };
            rtt(home, leader(p)) / 2 + majority(cluster, p) + back
        })
        .max()
        .unwrap();
    requested.max(votes) + rtt(at, home) / 2
}

/// What §4.2 and §4.4.1 imply: the client reads from the closest replica; a participant's vote is
/// there when the leader's and enough others are, or when the slow path's is.
fn implied_fast(cluster: &Cluster, sample: &Sample) -> Duration {
    let (home, parts) = (sample.home, sample.parts());
    let rtt = |a, b| cluster.topology.rtt(a, b);
    let coordinator = coordinator_of(cluster, sample.txn, home, parts.iter().copied());
    let decider = cluster.partition(coordinator).unwrap().preferred_leader;
    let at = cluster.region_of(decider);
    let way = |node: NodeId| {
        let region = cluster.region_of(node);
        let back = if node == decider { Duration::ZERO } else { rtt(region, at) / 2 };
        rtt(home, region) / 2 + back
    };
    let mut reads = Duration::ZERO;
    let mut votes = Duration::ZERO;
    for partition in parts {
        let placed = cluster.partition(partition).unwrap();
        let nearest = placed.replicas.iter().map(|&node| rtt(home, cluster.region_of(node))).min();
        reads = reads.max(nearest.unwrap());
        let leader = placed.preferred_leader;
        let mut others: Vec<Duration> =
            placed.replicas.iter().filter(|&&node| node != leader).map(|&node| way(node)).collect();
        others.sort_unstable();
        let last = supermajority(placed.replicas.len()) - 2;
        let fast = way(leader).max(others[last]);
        votes = votes.max(fast.min(way(leader) + majority(cluster, partition)));
    }
    let requested = reads + rtt(home, at) / 2 + majority(cluster, coordinator);
    requested.max(votes) + rtt(at, home) / 2
}

#[test]
fn ycsbt_takes_what_the_flow_implies() {
    compare_ycsbt(BASIC, implied);
}

#[test]
fn fast_ycsbt_takes_what_the_flow_implies() {
    compare_ycsbt(FAST, implied_fast);
}
