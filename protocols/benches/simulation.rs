//! How many events a second the simulator handles on one core with a real protocol in it. The items
//! are events; divan counts them by the second.
#![allow(clippy::unwrap_used, missing_docs, reason = "a benchmark is its own documentation")]

use divan::Bencher;
use divan::counter::ItemsCount;
use orthodrome_core::cluster::Cluster;
use orthodrome_core::machine::Protocol;
use orthodrome_core::time::Duration;
use orthodrome_core::topology::Topology;
use orthodrome_eval::workload;
use orthodrome_protocols::carousel::{BASIC, Carousel};
use orthodrome_sim::load::{Arrival, LoadModel};
use orthodrome_sim::{Options, Schedule, Simulation};

/// What the command line allocates with.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() {
    divan::main();
}

/// Ten simulated seconds of `name` at `per_second` transactions, on azure5.
fn simulation<P: Protocol>(name: &str, per_second: f64, cpu: bool) -> Simulation<P> {
    let cluster = Cluster::spread(Topology::built_in("azure5").unwrap(), 1, 1, 5, 3).unwrap();
    let config = P::configure(&cluster, BASIC);
    let workload = workload::parse(name, &workload::Options::default()).unwrap();
    let defaults = Options::default();
    let options = Options {
        load: LoadModel {
            arrival: Arrival::Open { per_second, poisson: true },
            ..LoadModel::default()
        },
        warmup: Duration::ZERO,
        duration: Duration::from_secs(10),
        cpu: if cpu { defaults.cpu } else { None },
        ..defaults
    };
    Simulation::new(cluster, config, workload, &Schedule::default(), options).unwrap()
}

/// Runs it; the run includes starting and dropping the simulation.
fn measure<P: Protocol>(bencher: Bencher<'_, '_>, name: &str, per_second: f64, cpu: bool) {
    let run = || {
        let mut simulation = simulation::<P>(name, per_second, cpu);
        simulation.run().unwrap();
        simulation.events()
    };
    let events = run();
    bencher.counter(ItemsCount::new(events)).bench_local(run);
}

#[divan::bench(args = [false, true], sample_count = 5)]
fn carousel_basic_ycsbt(bencher: Bencher<'_, '_>, cpu: bool) {
    measure::<Carousel>(bencher, "ycsbt:4", 100.0, cpu);
}

#[divan::bench(args = [false, true], sample_count = 5)]
fn carousel_basic_retwis(bencher: Bencher<'_, '_>, cpu: bool) {
    measure::<Carousel>(bencher, "retwis", 100.0, cpu);
}
