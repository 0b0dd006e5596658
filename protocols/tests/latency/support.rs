//! Runs of five simulated minutes at low load, and what became of their transactions.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{PartitionId, RegionId, TxnId};
use orthodrome_core::machine::Protocol;
use orthodrome_core::time::Duration;
use orthodrome_core::topology::Topology;
use orthodrome_core::txn::Key;
use orthodrome_eval::history::{Entry, Op, Status};
use orthodrome_eval::workload;
use orthodrome_sim::load::{Arrival, LoadModel};
use orthodrome_sim::{Options, Schedule, Simulation};

pub const AZURE5: &str = include_str!("../../../topologies/azure5.toml");
pub const EC2_5: &str = include_str!("../../../topologies/ec2-5.toml");

/// A transaction that committed at its first attempt and wrote something.
pub struct Sample {
    pub txn: TxnId,
    pub home: RegionId,
    /// The partitions it touched.
    pub parts: BTreeSet<PartitionId>,
    pub took: Duration,
}

/// The transactions of one run, by the name of the region they began in.
pub fn samples<P: Protocol>(
    name: &str,
    topology: &str,
    workload: &str,
) -> (Cluster, BTreeMap<String, Vec<Sample>>) {
    let (cluster, entries) = entries::<P>(name, topology, workload);
    let mut by_region: BTreeMap<String, Vec<Sample>> = BTreeMap::new();
    for entry in entries.iter().filter(|e| e.status == Status::Ok && e.invoke_us > 5_000_000) {
        let txn: TxnId = entry.txn.parse().unwrap();
        let is_read_only = !entry.ops.iter().any(|op| matches!(op, Op::WriteVersion(..)));
        if txn.attempt > 0 || is_read_only {
            continue;
        }
        let part = |op: &Op| match op {
            Op::Append(key, _)
            | Op::ReadList(key, _)
            | Op::ReadVersion(key, _)
            | Op::WriteVersion(key, _) => cluster.partition_of(&Key::from(key.as_str())),
        };
        let sample = Sample {
            txn,
            home: cluster.topology.region_named(&entry.region).unwrap(),
            parts: entry.ops.iter().map(part).collect(),
            took: Duration::from_micros(entry.complete_us.unwrap() - entry.invoke_us),
        };
        by_region.entry(entry.region.clone()).or_default().push(sample);
    }
    assert_eq!(by_region.len(), 5, "every region runs transactions");
    (cluster, by_region)
}

fn entries<P: Protocol>(name: &str, topology: &str, workload: &str) -> (Cluster, Vec<Entry>) {
    let cluster = Cluster::spread(Topology::parse(topology).unwrap(), 1, 1, 5, 3).unwrap();
    let config = P::configure(&cluster, name);
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
        Simulation::<P>::new(cluster.clone(), config, workload, &schedule, options).unwrap();
    let entries = Rc::new(RefCell::new(Vec::new()));
    let sink = entries.clone();
    run.keep_history(Box::new(move |entry| sink.borrow_mut().push(entry)));
    run.run().unwrap();
    drop(run);
    (cluster, Rc::try_unwrap(entries).unwrap().into_inner())
}

/// What a flow implies for a transaction begun in this region over these partitions.
pub type Implied = fn(&Cluster, RegionId, TxnId, &BTreeSet<PartitionId>) -> Duration;

/// Holds the median of each region to the median of what the flow implies.
pub fn compare<P: Protocol>(name: &str, topology: &str, workload: &str, implied: Implied) {
    let (cluster, by_region) = samples::<P>(name, topology, workload);
    for (region, samples) in by_region {
        let imply = |s: &Sample| implied(&cluster, s.home, s.txn, &s.parts);
        let measured = median(samples.iter().map(|sample| sample.took));
        let expected = median(samples.iter().map(imply));
        let ratio = measured.as_secs_f64() / expected.as_secs_f64();
        let count = samples.len();
        println!(
            "{:8} {workload} {region:5} n={count} median {:.1} ms, implied {:.1} ms, ratio {ratio:.4}",
            cluster.topology.name,
            measured.as_secs_f64() * 1e3,
            expected.as_secs_f64() * 1e3,
        );
        assert!(count > 300 && (0.97..=1.03).contains(&ratio), "{region}: {ratio}");
    }
}

fn median(values: impl Iterator<Item = Duration>) -> Duration {
    let mut values: Vec<Duration> = values.collect();
    values.sort_unstable();
    values[values.len() / 2]
}

/// Round trip from a partition's leader to the nearest followers that make a majority with it.
pub fn majority(cluster: &Cluster, partition: PartitionId) -> Duration {
    let placed = cluster.partition(partition).unwrap();
    let from = cluster.region_of(placed.preferred_leader);
    let others = placed.replicas.iter().filter(|&&node| node != placed.preferred_leader);
    let mut rtts: Vec<Duration> =
        others.map(|&node| cluster.topology.rtt(from, cluster.region_of(node))).collect();
    rtts.sort_unstable();
    rtts[rtts.len() / 2 - 1]
}
