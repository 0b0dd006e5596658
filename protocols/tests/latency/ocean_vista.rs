//! The message flow of Ocean Vista while regions hardly ever have two transactions at once.

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::PartitionId;
use orthodrome_core::time::Duration;
use orthodrome_eval::workload::{Form, Options};
use orthodrome_protocols::ocean_vista::NAME;

use super::support::{AZURE5, EC2_3, EC2_5, Load, Sample, compare_at};

/// So little that the transaction before has ended, nearly always: what is still in its S-phase
/// anywhere holds up everything later (§3.3).
const IDLE: Load = Load { per_second: 1.0, seconds: 1_800 };

/// Round trips from the home of a transaction to the replicas of a partition, least first.
fn away(cluster: &Cluster, sample: &Sample, partition: PartitionId) -> Vec<Duration> {
    let replicas = cluster.partition(partition).unwrap().replicas.iter();
    let to = |region| {
        let is_here = region == sample.home;
        // One server of each region: what is here is on the coordinator itself.
        if is_here { Duration::ZERO } else { cluster.topology.rtt(sample.home, region) }
    };
    let mut all: Vec<Duration> = replicas.map(|&node| to(cluster.region_of(node))).collect();
    all.sort_unstable();
    all
}

/// Until the nearest replica of each partition that it reads has answered.
fn read(cluster: &Cluster, sample: &Sample) -> Duration {
    sample.reads.iter().map(|&p| away(cluster, sample, p)[0]).max().unwrap()
}

/// What §3.1, §3.3 and §4.1 imply for a procedure: a round trip within the region; all replicas
/// store it, or a majority does and confirms it; meanwhile the other regions' watermarks have
/// passed its number in their next round, whether they hear of it or not, and come; then it reads
/// from the nearest replicas.
fn implied(cluster: &Cluster, sample: &Sample) -> Duration {
    let (home, topology) = (sample.home, &cluster.topology);
    let replies =
        |at: usize| sample.parts().into_iter().map(|p| away(cluster, sample, p)[at]).max().unwrap();
    let (majority, all) = (replies(1), replies(2));
    let stored = all.min(majority * 2);
    // Half a round of 25 ms, and the way.
    let told = |region| topology.rtt(home, region) / 2 + Duration::from_micros(12_500);
    let visible = stored.max(topology.regions().map(told).max().unwrap());
    topology.rtt(home, home) + visible + read(cluster, sample)
}

#[test]
fn procedures_take_what_the_flow_implies() {
    let options = Options { form: Some(Form::Procedure), ..Options::default() };
    for topology in [AZURE5, EC2_3, EC2_5] {
        compare_at(NAME, topology, "ycsbt:4", &options, IDLE, implied);
    }
}

/// A caller who decides looks first, at the nearest replicas, and what it saw is read again.
fn implied_of_interactive(cluster: &Cluster, sample: &Sample) -> Duration {
    cluster.topology.rtt(sample.home, sample.home)
        + read(cluster, sample)
        + implied(cluster, sample)
}

#[test]
fn interactive_transactions_take_what_the_flow_implies() {
    for topology in [AZURE5, EC2_3, EC2_5] {
        compare_at(NAME, topology, "ycsbt:4", &Options::default(), IDLE, implied_of_interactive);
    }
}
