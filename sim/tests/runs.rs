//! Whole runs of a small protocol.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    missing_docs,
    reason = "tests may panic, and are their own documentation"
)]

mod toy;

use std::cell::RefCell;
use std::rc::Rc;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::machine::Protocol;
use orthodrome_core::time::{Duration, Time};
use orthodrome_core::topology::Topology;
use orthodrome_eval::checker::{self, Model};
use orthodrome_eval::history::History;
use orthodrome_eval::workload;
use orthodrome_sim::disk::DiskModel;
use orthodrome_sim::load::{Arrival, LoadModel};
use orthodrome_sim::{Options, Schedule, Simulation};
use toy::Toy;

fn azure5() -> Cluster {
    let text = include_str!("../../topologies/azure5.toml");
    Cluster::spread(Topology::parse(text).unwrap(), 1, 1, 5, 3).unwrap()
}

fn options(seed: u64, per_second: f64) -> Options {
    Options {
        seed,
        load: LoadModel {
            arrival: Arrival::Open { per_second, poisson: true },
            ..LoadModel::default()
        },
        warmup: Duration::from_secs(1),
        duration: Duration::from_secs(6),
        invariants_every: 1,
        check_outcomes: true,
        ..Options::default()
    }
}

fn simulation(workload: &str, schedule: &str, options: Options) -> Simulation<Toy> {
    let cluster = azure5();
    let config = Toy::configure(&cluster, "toy");
    let workload = workload::parse(workload, &workload::Options::default()).unwrap();
    let schedule = Schedule::parse(schedule).unwrap();
    Simulation::new(cluster, config, workload, &schedule, options).unwrap()
}

const CRASHES: &str = r#"
    [[faults]]
    at_ms = 2000
    until_ms = 2300
    fault.crash = { nodes = ["n1"] }
    [[faults]]
    at_ms = 3000
    until_ms = 3700
    fault.partition = { from = ["VA"], both_ways = false }
    [[faults]]
    at_ms = 4000
    until_ms = 4100
    fault.crash = { nodes = ["n6", "n8"] }
"#;

#[test]
fn a_run_without_faults_keeps_every_promise_and_measures_it() {
    let mut run = simulation("ycsbt", "", options(1, 200.0));
    let report = run.run().unwrap();
    let result = &report.result;
    assert_eq!(report.outstanding, 0);
    assert!((900..1_100).contains(&result.committed), "{result:?}");
    // Clients are spread evenly. The toy protocol needs two round trips to its leader in VA, and
    // for the fifth of the clients in VA none of them crosses regions.
    let rtt = [0.5, 67.0, 80.0, 196.0, 214.0];
    let mean = rtt.iter().sum::<f64>() / 5.0 * 2.0;
    assert!((result.latency_ms.all.mean / mean - 1.0).abs() < 0.2, "{result:?}");
    assert!((1.4..1.8).contains(&result.wan_round_trips.mean), "{result:?}");
    assert!(result.floor_ratio.p50 > 0.9, "{result:?}");
    assert!((3.9..4.6).contains(&result.messages_per_txn), "{result:?}");
}

/// Each flush writes everything that arrived during the previous one, so flushes grow. Together
/// they take longer than any single one.
#[test]
fn slow_progress_is_not_reported_as_stuck() {
    let slow_disk = || {
        let disk = DiskModel { write: Duration::from_millis(200), ..DiskModel::default() };
        let options = Options { disk, check_outcomes: false, ..options(1, 25.0) };
        let mut run = simulation("ycsbt:1", "", options);
        run.start_nodes();
        run.start_load();
        run.run_until(Time::ZERO + Duration::from_secs(4)).unwrap();
        run.drain(Duration::ZERO).unwrap();
        run
    };
    let limit = Duration::from_secs(15);
    let mut run = slow_disk();
    let stuck = run.settle(limit).unwrap_err();
    assert!(stuck.detail.contains("records that are not on disk"), "{stuck}");
    let mut run = slow_disk();
    run.settle_while_moving(limit).unwrap();
    let took = run.now().since(Time::ZERO + Duration::from_secs(4));
    assert!(took > limit, "{took:?}");
    // A single step that exceeds the limit fails the run.
    let stuck = slow_disk().settle_while_moving(Duration::from_secs(5)).unwrap_err();
    assert!(stuck.detail.contains("records that are not on disk"), "{stuck}");
}

#[test]
fn twins_are_equal_byte_for_byte_and_other_seeds_are_not() {
    let trace = |seed| {
        let mut run = simulation("bank", CRASHES, options(seed, 100.0));
        let lines = Rc::new(RefCell::new(String::new()));
        let sink = Rc::clone(&lines);
        run.keep_trace(Box::new(move |line| {
            sink.borrow_mut().push_str(&line.to_string());
            sink.borrow_mut().push('\n');
        }));
        let report = run.run().unwrap();
        let text = lines.borrow().clone();
        (text, report.trace_hash)
    };
    let (first, second, other) = (trace(7), trace(7), trace(8));
    assert!(first.0.lines().count() > 2_000);
    assert_eq!(first, second);
    assert_ne!(first.0, other.0);
    assert_ne!(first.1, other.1);
}

#[test]
fn nothing_is_lost_through_crashes_and_partitions() {
    for seed in 0..20 {
        let mut run = simulation("list-append", CRASHES, options(seed, 60.0));
        let history = Rc::new(RefCell::new(Vec::new()));
        let sink = Rc::clone(&history);
        run.keep_history(Box::new(move |entry| sink.borrow_mut().push(entry)));
        let report = run.run().unwrap_or_else(|failure| panic!("seed {seed}: {failure}"));
        assert_eq!(report.outstanding, 0);
        assert_eq!(report.injected["crash"], 2);
        assert!(report.notes["Recovered"] > 0);
        assert!(history.borrow().len() as u64 >= report.result.committed);
    }
}

/// The toy protocol runs no general transactions.
#[test]
fn general_transactions_find_their_keys_by_reading_ahead() {
    for (workload, name) in [("list-append:dependent", "follow"), ("tpcc", "stock-level")] {
        for (seed, schedule) in [(1, ""), (2, CRASHES)] {
            let mut run = simulation(workload, schedule, options(seed, 60.0));
            let history = Rc::new(RefCell::new(History::new()));
            let sink = Rc::clone(&history);
            run.keep_history(Box::new(move |entry| sink.borrow_mut().push(&entry).unwrap()));
            let report = run.run().unwrap_or_else(|failure| panic!("{workload} {seed}: {failure}"));
            assert_eq!(report.outstanding, 0);
            let result = &report.result;
            assert!(result.committed > 150, "{workload}: {result:?}");
            // Each part takes a round trip to the leader, of 214 ms for the furthest clients.
            let kind = result.kinds[name].latency_ms;
            assert!(kind.n > 0 && kind.max > 2.0 * 214.0, "{workload}: {kind:?}");
            let verdict = checker::check(&history.borrow(), Model::Serializable);
            assert!(verdict.ok, "{workload} {seed}: {verdict}");
        }
    }
}

/// A run of the toy protocol, with leader n1, under a fault from 2 s to 3 s.
fn run_under(fault: &str) -> (orthodrome_sim::Report, Simulation<Toy>) {
    let entry = format!("[[faults]]\nat_ms = 2000\nuntil_ms = 3000\nfault.{fault}\n");
    let mut run = simulation("list-append", &entry, options(1, 60.0));
    let report = run.run().unwrap_or_else(|failure| panic!("{fault}: {failure}"));
    (report, run)
}

#[test]
fn swapped_disks_are_refused_until_each_node_has_its_own_again() {
    let (report, _) = run_under("swap-disks = { nodes = [\"n1\", \"n2\"] }");
    assert_eq!(report.injected["refused-start"], 2);
    assert_eq!((report.outstanding, report.beyond), (0, None));
    let entry = "[[faults]]\nat_ms = 2000\nfault.swap-disks = { nodes = [\"n1\", \"n2\"] }\n";
    let mut run = simulation("list-append", entry, options(1, 60.0));
    run.start_nodes();
    run.run_until(Time::from_millis(4_000)).unwrap();
    assert_eq!(run.state_of(orthodrome_core::id::NodeId(1)), "down");
    let error = Schedule::parse("[[faults]]\nat_ms = 1\nfault.swap-disks = { nodes = [\"n1\"] }");
    let workload = workload::parse("bank", &workload::Options::default()).unwrap();
    let config = Toy::configure(&azure5(), "toy");
    let made =
        Simulation::<Toy>::new(azure5(), config, workload, &error.unwrap(), options(1, 60.0));
    assert!(made.err().unwrap().to_string().contains("two nodes"));
}

#[test]
fn a_flipped_bit_is_refused_until_the_data_is_restored() {
    let (report, _) = run_under("flip-bit = { nodes = [\"n1\"] }");
    assert_eq!(report.injected["refused-start"], 1);
    assert_eq!((report.outstanding, report.beyond), (0, None));
}

#[test]
fn a_run_with_a_lying_disk_is_checked_until_a_crash() {
    let (report, _) = run_under("lying-fsync = { nodes = [\"n1\"] }");
    assert_eq!((report.outstanding, report.beyond), (0, None));
    let schedule = r#"
        [[faults]]
        at_ms = 2000
        fault.lying-fsync = { nodes = ["n1"] }
        [[faults]]
        at_ms = 4000
        until_ms = 4100
        fault.crash = { nodes = ["n1"] }
    "#;
    let mut run = simulation("list-append", schedule, options(1, 60.0));
    let report = run.run().unwrap();
    let beyond = report.beyond.unwrap();
    assert_eq!(beyond.at, Time::from_millis(4_000));
    assert!(beyond.detail.contains("n1 lost") && beyond.detail.contains("lied"), "{beyond:?}");
    assert_eq!((report.injected["lost-writes"], run.now()), (1, beyond.at));
}

#[test]
fn a_run_with_an_old_disk_copy_is_checked_until_the_copy_returns() {
    let (report, run) = run_under("old-copy = { nodes = [\"n1\"] }");
    let beyond = report.beyond.unwrap();
    assert_eq!((beyond.at, run.now()), (Time::from_millis(3_000), Time::from_millis(3_000)));
    // Nothing was written since the copy was made: n2 stores nothing in the toy protocol.
    let (report, _) = run_under("old-copy = { nodes = [\"n2\"] }");
    assert_eq!((report.outstanding, report.beyond), (0, None));
}
