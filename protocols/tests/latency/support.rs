//! Runs of some simulated minutes at low load, and what became of their transactions.

use std::cell::RefCell;
use std::rc::Rc;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{PartitionId, RegionId, TxnId};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::time::Duration;
use orthodrome_core::topology::Topology;
use orthodrome_core::txn::Key;
use orthodrome_eval::history::{Entry, Op, Status};
use orthodrome_eval::workload::{self, Workload};
use orthodrome_sim::load::{Arrival, LoadModel};
use orthodrome_sim::{Options, Schedule};

pub const AZURE5: &str = include_str!("../../../topologies/azure5.toml");
pub const EC2_5: &str = include_str!("../../../topologies/ec2-5.toml");
pub const EC2_3: &str = include_str!("../../../topologies/ec2-3.toml");

/// A transaction that committed at its first attempt and wrote something.
pub struct Sample {
    pub txn: TxnId,
    pub home: RegionId,
    /// The partition of each key that it read.
    pub reads: Vec<PartitionId>,
    /// The partition of each key that it wrote.
    pub writes: Vec<PartitionId>,
    pub took: Duration,
}

impl Sample {
    /// The partitions it touched.
    pub fn parts(&self) -> OrdSet<PartitionId> {
        self.reads.iter().chain(&self.writes).copied().collect()
    }
}

/// How much is asked, and for how long.
#[derive(Clone, Copy)]
pub struct Load {
    /// Transactions begun a second in all regions together.
    pub per_second: f64,
    pub seconds: u64,
}

/// Little enough that transactions hardly meet on a key.
pub const LOW: Load = Load { per_second: 10.0, seconds: 300 };

/// The transactions of one run, by the name of the region they began in.
fn samples(
    protocol: &str,
    cluster: &Cluster,
    workload: Box<dyn Workload>,
    load: Load,
) -> OrdMap<String, Vec<Sample>> {
    let mut by_region: OrdMap<String, Vec<Sample>> = OrdMap::new();
    for entry in entries(protocol, cluster, workload, load) {
        let txn: TxnId = entry.txn.parse().unwrap();
        let is_measured = entry.status == Status::Ok && entry.invoke_us > 5_000_000;
        let (mut reads, mut writes) = (vec![], vec![]);
        for op in &entry.ops {
            let (key, to) = match op {
                Op::ReadList(key, _) | Op::ReadVersion(key, _) => (key, &mut reads),
                Op::Append(key, _) | Op::WriteVersion(key, _) | Op::DeleteVersion(key, _) => {
                    (key, &mut writes)
                }
            };
            to.push(cluster.partition_of(&Key::from(key.as_str())));
        }
        if !is_measured || txn.attempt > 0 || writes.is_empty() {
            continue;
        }
        let home = cluster.topology.region_named(&entry.region).unwrap();
        let took = Duration::from_micros(entry.complete_us.unwrap() - entry.invoke_us);
        by_region.entry(entry.region).or_default().push(Sample { txn, home, reads, writes, took });
    }
    assert_eq!(by_region.len(), cluster.topology.regions().count(), "every region has callers");
    by_region
}

fn entries(
    protocol: &str,
    cluster: &Cluster,
    workload: Box<dyn Workload>,
    load: Load,
) -> Vec<Entry> {
    let subject = orthodrome_lab::find(protocol).unwrap();
    let arrival = Arrival::Open { per_second: load.per_second, poisson: true };
    let options = Options {
        warmup: Duration::from_secs(5),
        duration: Duration::from_secs(5 + load.seconds),
        load: LoadModel { arrival, ..LoadModel::default() },
        check_outcomes: true,
        ..Options::default()
    };
    let schedule = Schedule::default();
    let mut run = subject.simulation(cluster.clone(), workload, &schedule, options, None).unwrap();
    let entries = Rc::new(RefCell::new(Vec::new()));
    let sink = entries.clone();
    run.keep_history(Box::new(move |entry| sink.borrow_mut().push(entry)));
    run.run().unwrap();
    drop(run);
    Rc::try_unwrap(entries).unwrap().into_inner()
}

/// What a flow implies for this transaction.
pub type Implied = fn(&Cluster, &Sample) -> Duration;

/// Holds each transaction to what the flow implies for it: the median of each region.
pub fn compare(
    protocol: &str,
    topology: &str,
    workload: &str,
    options: &workload::Options,
    implied: Implied,
) {
    compare_at(protocol, topology, workload, options, LOW, implied);
}

/// The same under another load.
pub fn compare_at(
    protocol: &str,
    topology: &str,
    workload: &str,
    options: &workload::Options,
    load: Load,
    implied: Implied,
) {
    let topology = Topology::parse(topology).unwrap();
    let partitions = u32::try_from(topology.regions().count()).unwrap();
    let cluster = Cluster::spread(topology, 1, 1, partitions, 3).unwrap();
    let name = &cluster.topology.name;
    let parsed = workload::parse(workload, options).unwrap();
    for (region, samples) in samples(protocol, &cluster, parsed, load) {
        let ratio = |s: &Sample| s.took.as_secs_f64() / implied(&cluster, s).as_secs_f64();
        let mut ratios: Vec<f64> = samples.iter().map(ratio).collect();
        ratios.sort_unstable_by(f64::total_cmp);
        let (count, median) = (ratios.len(), ratios[ratios.len() / 2]);
        println!("{protocol} {name:8} {workload} {region:5} n={count} ratio {median:.4}");
        assert!(count > 300 && (0.97..=1.03).contains(&median), "{region}: {median}");
    }
}

/// On both maps, at low load and contention.
pub fn compare_ycsbt(protocol: &str, implied: Implied) {
    for topology in [AZURE5, EC2_5] {
        compare(protocol, topology, "ycsbt:4", &workload::Options::default(), implied);
    }
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
