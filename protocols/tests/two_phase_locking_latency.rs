//! At low load, a transaction takes what the message flow of 2PL and 2PC implies on the map, and
//! nothing more: region by region, within three per cent.

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
use orthodrome_protocols::carousel::coordinator_of;
use orthodrome_protocols::two_phase_locking::{ByAge, Locking};
use orthodrome_sim::load::{Arrival, LoadModel};
use orthodrome_sim::{Options, Schedule, Simulation};

const AZURE5: &str = include_str!("../../topologies/azure5.toml");
const EC2_5: &str = include_str!("../../topologies/ec2-5.toml");

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

/// Round trip from a partition's leader to the nearest followers that make a majority with it.
fn majority(cluster: &Cluster, partition: PartitionId) -> Duration {
    let placed = cluster.partition(partition).unwrap();
    let from = cluster.region_of(placed.preferred_leader);
    let others = placed.replicas.iter().filter(|&&node| node != placed.preferred_leader);
    let mut rtts: Vec<Duration> =
        others.map(|&node| cluster.topology.rtt(from, cluster.region_of(node))).collect();
    rtts.sort_unstable();
    rtts[rtts.len() / 2 - 1]
}

fn entries(topology: &str, workload: &str) -> (Cluster, Vec<Entry>) {
    let cluster = Cluster::spread(Topology::parse(topology).unwrap(), 1, 1, 5, 3).unwrap();
    let config = Locking::<ByAge>::configure(&cluster);
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
        Simulation::<Locking<ByAge>>::new(cluster.clone(), config, workload, &schedule, options)
            .unwrap();
    let entries = Rc::new(RefCell::new(Vec::new()));
    let sink = entries.clone();
    run.keep_history(Box::new(move |entry| sink.borrow_mut().push(entry)));
    run.run().unwrap();
    drop(run);
    (cluster, Rc::try_unwrap(entries).unwrap().into_inner())
}

fn median(values: &mut [Duration]) -> Duration {
    values.sort_unstable();
    values[values.len() / 2]
}

fn compare(topology: &str, workload: &str) {
    let (cluster, entries) = entries(topology, workload);
    let mut by_region: BTreeMap<String, (Vec<Duration>, Vec<Duration>)> = BTreeMap::new();
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
        let (measured, expected) = by_region.entry(entry.region.clone()).or_default();
        measured.push(took);
        expected.push(implied(&cluster, home, txn, &parts));
    }
    assert_eq!(by_region.len(), 5, "every region runs transactions");
    for (region, (mut measured, mut expected)) in by_region {
        let count = measured.len();
        let (measured, expected) = (median(&mut measured), median(&mut expected));
        let ratio = measured.as_secs_f64() / expected.as_secs_f64();
        println!(
            "{:8} {workload} {region:5} n={count} median {:.1} ms, implied {:.1} ms, ratio {ratio:.4}",
            cluster.topology.name,
            measured.as_secs_f64() * 1e3,
            expected.as_secs_f64() * 1e3,
        );
        assert!(count > 300 && (0.97..=1.03).contains(&ratio), "{region}: {ratio}");
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
