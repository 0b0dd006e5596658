//! Measures how many events a second the queue and whole runs process on one core.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    missing_docs,
    reason = "a benchmark may panic, and is its own documentation"
)]

#[path = "../tests/toy/mod.rs"]
mod toy;

mod echo;

use divan::Bencher;
use divan::counter::ItemsCount;
use orthodrome_core::cluster::Cluster;
use orthodrome_core::machine::Protocol;
use orthodrome_core::rng::Rng;
use orthodrome_core::time::{Duration, Time};
use orthodrome_core::topology::Topology;
use orthodrome_eval::workload;
use orthodrome_sim::load::{Arrival, LoadModel};
use orthodrome_sim::queue::Queue;
use orthodrome_sim::{Options, Schedule, Simulation};
use toy::Toy;

fn main() {
    divan::main();
}

/// The classical hold model: take one event, and schedule another at a random later time.
#[divan::bench(args = [100, 10_000, 1_000_000], sample_count = 20)]
fn queue_hold(bencher: Bencher<'_, '_>, size: u64) {
    let mut rng = Rng::stream(1, "bench", 0);
    let delays: Vec<u64> = (0..65_536).map(|_| rng.below(100_000_000)).collect();
    let mut queue = Queue::default();
    for number in 0..size {
        queue.push(Time(delays[number as usize % delays.len()]), [number; 16]);
    }
    const STEPS: usize = 10_000;
    bencher.counter(ItemsCount::new(STEPS)).bench_local(move || {
        for delay in &delays[..STEPS] {
            let (at, event) = queue.pop(Time::MAX).unwrap();
            queue.push(at + Duration::from_nanos(*delay), event);
        }
    });
}

/// The simulator's own cost: a protocol that only answers, on fifteen nodes. The items are events.
#[divan::bench(args = [false, true], sample_count = 5)]
fn echo(bencher: Bencher<'_, '_>, cpu: bool) {
    let run = move || {
        let topology = Topology::built_in("azure5").unwrap();
        let cluster = Cluster::spread(topology, 2, 1, 5, 3).unwrap();
        let options = Options {
            load: LoadModel { transactions_max: 0, ..LoadModel::default() },
            warmup: Duration::ZERO,
            duration: Duration::from_secs(30),
            cpu: cpu.then(Default::default),
            ..Options::default()
        };
        let workload = workload::parse("ycsbt", &workload::Options::default()).unwrap();
        let schedule = Schedule::default();
        let mut simulation =
            Simulation::<echo::Echo>::new(cluster, (), workload, &schedule, options).unwrap();
        simulation.run().unwrap().result.events
    };
    bencher.counter(ItemsCount::new(run())).bench_local(run);
}

/// Simulated seconds of the toy protocol; the items are events. Most of the time goes to the toy
/// protocol and the workload.
#[divan::bench(args = [false, true], sample_count = 3)]
fn whole_run(bencher: Bencher<'_, '_>, cpu: bool) {
    let run = move || {
        let text = include_str!("../../topologies/azure5.toml");
        let cluster = Cluster::spread(Topology::parse(text).unwrap(), 1, 1, 5, 3).unwrap();
        let options = Options {
            load: LoadModel {
                arrival: Arrival::Open { per_second: 2_000.0, poisson: true },
                ..LoadModel::default()
            },
            warmup: Duration::ZERO,
            duration: Duration::from_secs(10),
            cpu: cpu.then(Default::default),
            ..Options::default()
        };
        // The toy protocol's checkpoints copy everything, and would dominate the measurement.
        let config = toy::Config { checkpoint_every: 1_000_000, ..Toy::configure(&cluster, "toy") };
        let workload = workload::parse("ycsbt", &workload::Options::default()).unwrap();
        let mut simulation =
            Simulation::<Toy>::new(cluster, config, workload, &Schedule::default(), options)
                .unwrap();
        simulation.run().unwrap().result.events
    };
    bencher.counter(ItemsCount::new(run())).bench_local(run);
}
