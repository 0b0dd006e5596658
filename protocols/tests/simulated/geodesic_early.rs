//! Early answers of geodesic, where partitions have one replica (D20): clocks differ by much more than
//! messages take, so an answer that came too early shows.

use std::cell::RefCell;
use std::rc::Rc;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::time::Duration;
use orthodrome_core::topology::Topology;
use orthodrome_eval::checker::{self, Model};
use orthodrome_eval::history::History;
use orthodrome_eval::workload;
use orthodrome_sim::load::{Arrival, LoadModel};
use orthodrome_sim::network::{Delay, NetworkModel};
use orthodrome_sim::{Options, Report};

/// So many lists are in use, at so many partitions.
#[derive(Clone, Copy)]
struct Size {
    partitions: u32,
    keys: u64,
}

/// A run of two seconds, and whether its history is strictly serializable.
fn run(size: Size, seed: u64, mutation: Option<&str>) -> (Report, bool) {
    let far = |a: u16, b: u16| Duration::from_micros(100 * u64::from(a.abs_diff(b)) + 100);
    let map = Topology::from_fn(3, Duration::from_micros(100), far);
    let cluster = Cluster::spread(map, 1, 1, size.partitions, 1).unwrap();
    let keys = workload::Options { keys: Some(size.keys), ..workload::Options::default() };
    let workload = workload::parse("list-append", &keys).unwrap();
    let options = Options {
        seed,
        load: LoadModel {
            arrival: Arrival::Open { per_second: 4_000.0, poisson: true },
            ..LoadModel::default()
        },
        network: NetworkModel { delay: Delay::Pareto(0.5), ..NetworkModel::default() },
        warmup: Duration::from_millis(500),
        duration: Duration::from_secs(2),
        ..Options::default()
    };
    let subject = orthodrome_lab::find("geodesic").unwrap();
    let schedule = orthodrome_sim::Schedule::default();
    let mut run = subject.simulation(cluster, workload, &schedule, options, mutation).unwrap();
    let history = Rc::new(RefCell::new(History::new()));
    let sink = Rc::clone(&history);
    run.keep_history(Box::new(move |entry| sink.borrow_mut().push(&entry).unwrap()));
    let report = run.run().unwrap_or_else(|failure| panic!("seed {seed}: {failure}"));
    let is_strict = checker::check(&history.borrow(), Model::StrictSerializable).ok;
    (report, is_strict)
}

#[test]
fn early_answers_are_strictly_serializable() {
    let sizes = [(1, 60), (2, 200), (3, 12)];
    for (partitions, keys) in sizes {
        for seed in 0..4 {
            let (report, is_strict) = run(Size { partitions, keys }, seed, None);
            assert!(is_strict, "seed {seed}, {partitions} partitions, {keys} keys");
            assert!(report.notes.contains_key("ReadAgain"), "{:?}", report.notes);
        }
    }
}

/// Nothing has two partitions, so no answer waits for clocks that may differ by 4 ms.
#[test]
fn an_answer_waits_for_no_clock_where_all_is_at_one_partition() {
    let (report, _) = run(Size { partitions: 1, keys: 1_000 }, 1, None);
    let latency = &report.result.latency_ms.all;
    assert!(latency.p50 < 2.0, "{latency:?}");
}

#[test]
fn answers_that_come_too_early_are_caught() {
    let mutations = [
        ("D20", Size { partitions: 3, keys: 12 }),
        ("missed_is_missed", Size { partitions: 3, keys: 12 }),
        ("written_is_open", Size { partitions: 1, keys: 60 }),
    ];
    for (mutation, size) in mutations {
        let caught = (0..40).find(|seed| !run(size, *seed, Some(mutation)).1);
        println!("{mutation}: {caught:?}");
        assert!(caught.is_some(), "{mutation} is caught by no seed");
    }
}
