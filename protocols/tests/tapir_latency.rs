//! At low load, a transaction takes what the message flow of TAPIR implies on the map, and nothing
//! more: a round trip to the nearest replica of each partition it reads, and one to the furthest
//! replica of any participant, region by region, within three per cent.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test may stop at the first surprise"
)]

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{PartitionId, RegionId, TxnId};
use orthodrome_core::machine::Protocol as _;
use orthodrome_core::time::Duration;
use orthodrome_core::topology::Topology;
use orthodrome_core::txn::Key;
use orthodrome_eval::history::{Entry, Op, Status};
use orthodrome_eval::workload;
use orthodrome_protocols::tapir::Tapir;
use orthodrome_sim::load::{Arrival, LoadModel};
use orthodrome_sim::{Options, Schedule, Simulation};

const AZURE5: &str = include_str!("../../topologies/azure5.toml");
const EC2_5: &str = include_str!("../../topologies/ec2-5.toml");

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

fn entries(topology: &str, workload: &str) -> (Cluster, Vec<Entry>) {
    let cluster = Cluster::spread(Topology::parse(topology).unwrap(), 1, 1, 5, 3).unwrap();
    let config = Tapir::configure(&cluster);
    let workload = workload::parse(workload, &workload::Options::default()).unwrap();
    let arrival = Arrival::Open { per_second: 10.0, poisson: true };
    let options = Options {
        warmup: Duration::from_secs(5),
        duration: Duration::from_secs(305),
        load: LoadModel { arrival, ..LoadModel::default() },
        check_outcomes: true,
        ..Options::default()
    };
    let schedule = Schedule::default();
    let mut run =
        Simulation::<Tapir>::new(cluster.clone(), config, workload, &schedule, options).unwrap();
    let entries = Rc::new(RefCell::new(Vec::new()));
    let sink = entries.clone();
    run.keep_history(Box::new(move |entry| sink.borrow_mut().push(entry)));
    run.run().unwrap();
    drop(run);
    (cluster, Rc::try_unwrap(entries).unwrap().into_inner())
}

fn compare(topology: &str, workload: &str) {
    let (cluster, entries) = entries(topology, workload);
    let mut by_region: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for entry in entries.iter().filter(|e| e.status == Status::Ok && e.invoke_us > 5_000_000) {
        let txn: TxnId = entry.txn.parse().unwrap();
        let is_read_only = !entry.ops.iter().any(|op| matches!(op, Op::WriteVersion(..)));
        if txn.attempt > 0 || is_read_only {
            continue;
        }
        let home = cluster.topology.region_named(&entry.region).unwrap();
        let parts: BTreeSet<PartitionId> = entry
            .ops
            .iter()
            .map(|op| match op {
                Op::Append(key, _)
                | Op::ReadList(key, _)
                | Op::ReadVersion(key, _)
                | Op::WriteVersion(key, _) => cluster.partition_of(&Key::from(key.as_str())),
            })
            .collect();
        let took = Duration::from_micros(entry.complete_us.unwrap() - entry.invoke_us);
        let ratio = took.as_secs_f64() / implied(&cluster, home, &parts).as_secs_f64();
        by_region.entry(entry.region.clone()).or_default().push(ratio);
    }
    assert_eq!(by_region.len(), 5, "every region runs transactions");
    for (region, mut ratios) in by_region {
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
