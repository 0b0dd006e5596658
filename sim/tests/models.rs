//! Tests the effects of the models on a running protocol: disks, crashes, clocks, CPUs, partitions.
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
use orthodrome_core::id::{ClientId, NodeId, Ticket, TxnId};
use orthodrome_core::machine::Protocol;
use orthodrome_core::ordered::OrdSet;
use orthodrome_core::rng::Rng;
use orthodrome_core::store::{Memtable, StateEngine, Store};
use orthodrome_core::time::{Duration, Time, Timestamp};
use orthodrome_core::topology::Topology;
use orthodrome_core::txn::{Key, Version};
use orthodrome_eval::workload;
use orthodrome_sim::cpu::CpuModel;
use orthodrome_sim::disk::{Disk, DiskModel, Refusal};
use orthodrome_sim::load::{Arrival, LoadModel};
use orthodrome_sim::{Options, Report, Schedule, Simulation};
use toy::Toy;

fn run(schedule: &str, change: impl FnOnce(&mut Options)) -> (Report, Vec<String>) {
    run_with(schedule, None, change)
}

fn run_with(
    schedule: &str,
    retransmit: Option<Duration>,
    change: impl FnOnce(&mut Options),
) -> (Report, Vec<String>) {
    let topology = Topology::uniform(3, Duration::from_micros(500), Duration::from_millis(60));
    let cluster = Cluster::spread(topology, 1, 1, 1, 3).unwrap();
    let mut config = Toy::configure(&cluster, "toy");
    config.retransmit = retransmit.unwrap_or(config.retransmit);
    let workload = workload::parse("list-append", &workload::Options::default()).unwrap();
    let mut options = Options {
        load: LoadModel {
            arrival: Arrival::Open { per_second: 100.0, poisson: true },
            ..LoadModel::default()
        },
        cpu: None,
        warmup: Duration::ZERO,
        duration: Duration::from_secs(5),
        invariants_every: 1,
        check_outcomes: true,
        ..Options::default()
    };
    change(&mut options);
    let schedule = Schedule::parse(schedule).unwrap();
    let mut run = Simulation::<Toy>::new(cluster, config, workload, &schedule, options).unwrap();
    let lines = Rc::new(RefCell::new(Vec::new()));
    let sink = Rc::clone(&lines);
    run.keep_trace(Box::new(move |line| sink.borrow_mut().push(line.to_string())));
    let report = run.run().unwrap();
    let lines = lines.borrow().clone();
    (report, lines)
}

/// Times of lines that contain a text, in milliseconds.
fn times(lines: &[String], text: &str) -> Vec<u64> {
    let found = lines.iter().filter(|line| line.contains(text));
    found.map(|line| line.split(' ').next().unwrap().parse::<u64>().unwrap() / 1_000_000).collect()
}

type Record = <Toy as Protocol>::Record;

fn record(number: u64) -> Record {
    let outcome = orthodrome_core::txn::Outcome::Committed(Timestamp(number));
    toy::record(TxnId::new(ClientId(1), number), outcome)
}

#[test]
fn one_flush_covers_everything_written_before_it_and_nothing_after() {
    let mut disk = Disk::<Toy>::new(
        NodeId(1),
        DiskModel {
            write: Duration::from_micros(10),
            flush: Duration::from_millis(1),
            jitter: Duration::ZERO,
        },
    );
    let rng = &mut Rng::stream(1, "disk", 0);
    disk.write(Ticket(1), record(1), 4);
    disk.write(Ticket(2), record(2), 1);
    let done = disk.start_flush(Time::ZERO, rng);
    assert_eq!(done, Some(Time::ZERO + Duration::from_micros(1_020)));
    disk.write(Ticket(3), record(3), 9);
    assert_eq!(disk.start_flush(Time::ZERO, rng), None, "one flush at a time");
    assert_eq!(disk.finish_flush(), Some((Ticket(2), 4)));
    assert_eq!((disk.records().len(), disk.unflushed()), (2, 1));
    assert!(disk.start_flush(Time::from_millis(2), rng).is_some());
    assert_eq!(disk.finish_flush(), Some((Ticket(3), 9)));
    assert_eq!(disk.finish_flush(), None);
}

#[test]
fn a_crash_keeps_what_was_flushed_and_some_prefix_of_the_rest() {
    let (mut whole, mut torn_lengths) = (OrdSet::new(), OrdSet::new());
    for seed in 0..200 {
        for torn in [false, true] {
            let mut disk = Disk::<Toy>::new(NodeId(1), DiskModel::default());
            let rng = &mut Rng::stream(seed, "disk", 0);
            (1..=3).for_each(|number| disk.write(Ticket(number), record(number), 0));
            disk.start_flush(Time::ZERO, rng);
            disk.finish_flush();
            (4..=6).for_each(|number| disk.write(Ticket(number), record(number), 0));
            disk.crash(torn, rng);
            let kept = disk.records().len() as u64;
            assert_eq!(disk.records(), (1..=kept).map(record).collect::<Vec<_>>());
            assert_eq!(disk.unflushed(), 0);
            if torn {
                torn_lengths.insert(kept)
            } else {
                whole.insert(kept)
            };
        }
    }
    assert_eq!(whole, OrdSet::from([3, 4, 5, 6]));
    assert_eq!(torn_lengths, OrdSet::from([3, 4, 5]), "a torn write loses its last record");
}

#[test]
fn a_node_refuses_a_disk_that_is_damaged_or_another_nodes() {
    let wrong = Refusal::WrongOwner { found: NodeId(1), expected: NodeId(2) };
    let mut seen = OrdSet::new();
    for seed in 0..60 {
        let mut disk = Disk::<Toy>::new(NodeId(1), DiskModel::default());
        let rng = &mut Rng::stream(seed, "disk", 0);
        for number in 1..=3 {
            disk.write(Ticket(number), record(number), 0);
            disk.start_flush(Time::from_millis(2_000), rng);
            disk.finish_flush();
        }
        assert_eq!(disk.open(NodeId(2)), Err(wrong));
        assert_eq!(disk.crash(false, rng), 0);
        // Once a second the node notes how much of its log is durable.
        let is_noted = seed % 2 == 0;
        let lost = disk.flip_bit(Time::from_millis(if is_noted { 3_500 } else { 2_900 }), rng);
        seen.insert((is_noted, lost));
        match lost {
            0 => {
                assert_eq!(disk.open(NodeId(1)), Err(Refusal::Damaged));
                disk.restore();
                assert_eq!(disk.open(NodeId(1)), Ok([1, 2, 3].map(record).to_vec()));
            }
            _ => assert_eq!(disk.open(NodeId(1)), Ok([1, 2].map(record).to_vec())),
        }
    }
    assert_eq!(seen, OrdSet::from([(true, 0), (false, 0), (false, 1)]));
}

#[test]
fn a_crash_in_a_checkpoint_leaves_the_old_records_or_the_new_ones() {
    let p = orthodrome_core::id::PartitionId(0);
    let mut seen = OrdSet::new();
    for seed in 0..100 {
        let mut disk = Disk::<Toy>::new(NodeId(1), DiskModel::default());
        let rng = &mut Rng::stream(seed, "disk", 0);
        (1..=3).for_each(|number| disk.write(Ticket(number), record(number), 0));
        disk.start_flush(Time::ZERO, rng);
        disk.finish_flush();
        let mut store = Store::new(Box::new(disk.engine()));
        let version = Version { timestamp: Timestamp(1), writer: TxnId::default() };
        store.put(p, Key::from("k"), version, Some("v".into()));
        let versions: std::sync::Arc<Memtable> = store.freeze();
        disk.checkpoint(Ticket(4), versions, vec![record(9)], 0);
        disk.crash(false, rng);
        let is_merged = disk.engine().read(p, &Key::from("k"), Timestamp::MAX).is_some();
        let is_new = disk.records() == [record(9)];
        assert!(is_new || disk.records() == [1, 2, 3].map(record));
        seen.insert((is_new, is_merged));
    }
    assert_eq!(seen, OrdSet::from([(false, false), (false, true), (true, true)]));
}

#[test]
fn a_paused_node_processes_everything_when_it_resumes() {
    let schedule = r#"
        [[faults]]
        at_ms = 1000
        until_ms = 2000
        fault.pause = { nodes = ["n1"] }
    "#;
    let (report, lines) = run(schedule, |_| {});
    let received = times(&lines, " n1 recv ");
    assert!(!received.iter().any(|at| (1_000..2_000).contains(at)), "n1 acted while paused");
    let after = received.iter().filter(|&&at| at == 2_000).count();
    assert!(after > 50, "only {after} messages had waited");
    assert!(report.result.latency_ms.all.max > 1_000.0);
}

#[test]
fn a_failed_disk_stops_the_node_until_it_is_repaired() {
    for kind in ["disk-full", "fsync-error"] {
        let schedule = format!(
            "[[faults]]\nat_ms = 1000\nuntil_ms = 3000\nfault.{kind} = {{ nodes = [\"n1\"] }}"
        );
        let (_, lines) = run(&schedule, |_| {});
        let crash = times(&lines, " n1 fault - - - crash ")[0];
        let starts = times(&lines, " n1 fault - - - start");
        assert!((1_000..1_200).contains(&crash), "{kind}: crashed at {crash} ms");
        assert_eq!(starts, [0, 3_000], "{kind}");
        let told = times(&lines, " recv n1 ");
        assert!(!told.iter().any(|at| (1_300..3_000).contains(at)), "{kind}: it kept answering");
    }
}

#[test]
fn crashes_at_a_flush_come_before_or_after_what_the_node_does_about_it() {
    for (after_report, told) in [(true, true), (false, false)] {
        let schedule = format!(
            "[[faults]]\nat_ms = 1000\nuntil_ms = 3000\n\
             fault.crash-at-flush = {{ nodes = [\"n1\"], after_report = {after_report} }}"
        );
        let (report, lines) = run(&schedule, |_| {});
        let crash = lines.iter().position(|line| line.contains(" n1 fault - - - crash ")).unwrap();
        let before = lines[..crash].last().unwrap();
        assert_eq!(before.contains(" n1 durable "), told, "{before}");
        assert_eq!(report.injected["crash-at-flush"], 1);
        assert!(report.notes["Recovered"] > 0);
    }
}

#[test]
fn partitions_are_as_wide_and_as_long_as_the_schedule_says() {
    let schedule = r#"
        [[faults]]
        at_ms = 1000
        until_ms = 2000
        fault.partition = { from = ["R1"], to = ["n1"], both_ways = false }
    "#;
    let (_, lines) = run(schedule, |_| {});
    // n5 is the gateway of R1: the messages that it sends are held, and messages to it arrive.
    let sent: Vec<u64> = times(&lines, " n1 recv n5 ");
    let got: Vec<u64> = times(&lines, " n5 recv n1 ");
    assert!(!sent.iter().any(|at| (1_040..2_029).contains(at)), "{sent:?}");
    assert!(got.iter().any(|at| (1_000..1_060).contains(at)));
    assert!(sent.iter().filter(|&&at| at == 2_030).count() > 10, "the backlog comes at once");
    assert!(times(&lines, " n1 recv n4 ").iter().any(|at| (1_100..1_900).contains(at)));
}

#[test]
fn a_saturated_cpu_caps_throughput_and_an_infinite_one_does_not() {
    let messages_per_second = |cpu| {
        // Nobody retries while the leader's queue is long, or the queue would keep growing.
        let (_, lines) = run_with("", Some(Duration::from_secs(60)), |options| {
            options.cpu = cpu;
            options.duration = Duration::from_secs(2);
            options.load.arrival = Arrival::Closed { clients: 24, think: Duration::ZERO };
        });
        let received = times(&lines, " n1 recv ");
        received.iter().filter(|at| (1_000..2_000).contains(*at)).count()
    };
    let slow = CpuModel {
        cores: 1,
        workers: None,
        message: Duration::from_millis(4),
        send: Duration::ZERO,
        byte_ps: 0,
        key: Duration::ZERO,
    };
    let (finite, infinite) = (messages_per_second(Some(slow)), messages_per_second(None));
    assert!((245..=250).contains(&finite), "{finite} messages a second, of 4 ms each");
    assert!(infinite > 2 * finite, "{infinite} messages a second on an infinite CPU");
}

#[test]
fn a_schedule_that_does_not_fit_is_refused_by_name() {
    let refuse = |text: &str| {
        let topology = Topology::uniform(3, Duration::ZERO, Duration::from_millis(60));
        let cluster = Cluster::spread(topology, 1, 1, 1, 3).unwrap();
        let config = Toy::configure(&cluster, "toy");
        let workload = workload::parse("bank", &workload::Options::default()).unwrap();
        let schedule = match Schedule::parse(text) {
            Ok(schedule) => schedule,
            Err(error) => return error.to_string(),
        };
        let options = Options::default();
        let made = Simulation::<Toy>::new(cluster, config, workload, &schedule, options);
        made.err().unwrap().to_string()
    };
    let at = "[[faults]]\nat_ms = 5\n";
    let cases = [
        (format!("{at}fault.crash = {{ nodes = [\"n77\"] }}"), "\"n77\""),
        (format!("{at}fault.pause = {{ nodes = [\"Mars\"] }}"), "\"Mars\""),
        (
            format!("{at}fault.loss = {{ from = [\"*\"], percent = 101 }}"),
            "101 is not a percentage",
        ),
        (format!("{at}fault.duplicate = {{ from = [\"*\"], percent = 1 }}"), "ordered links"),
        (format!("{at}until_ms = 5\nfault.pause = {{ nodes = [\"*\"] }}"), "later than at_ms"),
        (format!("{at}fault.crash = {{ node = [\"n1\"] }}"), "node"),
        (format!("{at}fault.flood = {{ nodes = [\"n1\"] }}"), "flood"),
        (format!("{at}fault.transfer-leader = {{ partition = 9, to = \"n1\" }}"), "p9"),
        (format!("{at}fault.transfer-leader = {{ partition = 0, to = \"n5\" }}"), "server"),
    ];
    for (text, expected) in cases {
        let message = refuse(&text);
        assert!(message.contains(expected), "{message:?} does not contain {expected:?}");
    }
}

#[test]
fn every_scenario_in_the_repository_can_be_run() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../scenarios");
    let mut count = 0;
    for file in std::fs::read_dir(folder).unwrap() {
        let path = file.unwrap().path();
        let schedule = std::fs::read_to_string(&path).unwrap();
        let (report, _) = run(&schedule, |options| {
            options.load.arrival = Arrival::Open { per_second: 5.0, poisson: true };
            options.duration = Duration::from_secs(60);
        });
        assert!(!report.injected.is_empty(), "{} injected nothing", path.display());
        assert!(report.result.committed > 100, "{}: {:?}", path.display(), report.result);
        count += 1;
    }
    assert!(count >= 3);
}

#[test]
fn clients_of_a_dead_gateway_die_or_use_another() {
    let schedule = r#"
        [[faults]]
        at_ms = 1000
        until_ms = 4000
        fault.crash = { nodes = ["n5"] }
    "#;
    let (report, lines) = run(schedule, |_| {});
    assert!(times(&lines, " resolve ").iter().any(|at| (1_000..1_300).contains(at)));
    assert_eq!(report.result.failed, 0);
    let (report, lines) = run(schedule, |options| options.load.die_with_gateway = 1.0);
    assert!(times(&lines, " resolve ").is_empty());
    assert!(report.result.failed > 0);
    // Clients of the dead gateway's region use the nearest other one.
    let begins = times(&lines, " n5 begin ");
    assert!(!begins.iter().any(|at| (1_001..4_000).contains(at)));
}

#[test]
fn states_and_timers_can_be_looked_at() {
    let topology = Topology::uniform(3, Duration::ZERO, Duration::from_millis(60));
    let cluster = Cluster::spread(topology, 1, 1, 1, 3).unwrap();
    let config = Toy::configure(&cluster, "toy");
    let workload = workload::parse("bank", &workload::Options::default()).unwrap();
    let mut run =
        Simulation::<Toy>::new(cluster, config, workload, &Schedule::default(), Options::default())
            .unwrap();
    assert_eq!(run.state_of(NodeId(1)), "down");
    run.start_nodes();
    run.start_load();
    run.run_until(Time::from_millis(500)).unwrap();
    assert!(run.state_of(NodeId(1)).starts_with("n1 outcomes="));
    assert!((4..=6).any(|node| !run.timers_of(NodeId(node)).is_empty()));
}
