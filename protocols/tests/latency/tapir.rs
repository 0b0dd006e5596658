//! The message flow of TAPIR: a round trip to the nearest replica of each partition that is read, and
//! one to the furthest replica of any participant.

use std::collections::BTreeSet;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{PartitionId, RegionId};
use orthodrome_core::time::Duration;
use orthodrome_protocols::tapir::{NAME, Tapir};

use super::support::{AZURE5, EC2_5, Sample, samples};

/// What the flow implies for a transaction that reads and writes in `parts`, begun in `home`.
fn implied(cluster: &Cluster, home: RegionId, parts: &BTreeSet<PartitionId>) -> Duration {
    let rtts = |p: &PartitionId| {
        let replicas = cluster.partition(*p).unwrap().replicas.clone();
        let away: Vec<Duration> = replicas
            .into_iter()
            .map(|node| cluster.topology.rtt(home, cluster.region_of(node)))
            .collect();
        (*away.iter().min().unwrap(), *away.iter().max().unwrap())
    };
    let reads = parts.iter().map(|p| rtts(p).0).max().unwrap();
    let votes = parts.iter().map(|p| rtts(p).1).max().unwrap();
    reads + votes
}

fn compare(topology: &str, workload: &str) {
    let (cluster, by_region) = samples::<Tapir>(NAME, topology, workload);
    for (region, samples) in by_region {
        let ratio =
            |s: &Sample| s.took.as_secs_f64() / implied(&cluster, s.home, &s.parts).as_secs_f64();
        let mut ratios: Vec<f64> = samples.iter().map(ratio).collect();
        let count = ratios.len();
        ratios.sort_unstable_by(f64::total_cmp);
        let (least, median) = (ratios[0], ratios[count / 2]);
        let name = &cluster.topology.name;
        println!(
            "{name:8} {workload} {region:5} n={count} ratio: least {least:.4}, median {median:.4}"
        );
        assert!(count > 300 && (0.97..=1.03).contains(&median), "{region}: {median}");
    }
}

#[test]
fn ycsbt_on_azure5_takes_what_the_flow_implies() {
    compare(AZURE5, "ycsbt:4");
}

#[test]
fn ycsbt_on_ec2_5_takes_what_the_flow_implies() {
    compare(EC2_5, "ycsbt:4");
}
