//! Records and messages under limits that a few transactions reach together: values are long, many
//! transactions are under way, servers crash, and one is away for so long that it needs a copy of
//! the state.

use std::time::Duration;

use orthodrome_core::limits::Limits;
use orthodrome_core::machine::Protocol;
use orthodrome_core::topology::Topology;
use orthodrome_core::{Cluster, Time};
use orthodrome_eval::metrics::Retry;
use orthodrome_eval::workload;
use orthodrome_protocols::carousel::{self, Carousel};
use orthodrome_protocols::natto::{self, Natto};
use orthodrome_protocols::ocean_vista::{self, OceanVista};
use orthodrome_protocols::tapir::{self, Tapir};
use orthodrome_protocols::two_phase_locking::{self, Locking};
use orthodrome_sim::fault::{Entry, Fault, Schedule};
use orthodrome_sim::load::{Arrival, LoadModel};
use orthodrome_sim::simulation::{Failure, FailureKind, Options, Report, Simulation};

/// One transaction may have a few thousand bytes; a record or a message not twice as much as the
/// largest.
const LIMITS: Limits =
    Limits { record_bytes: 48 << 10, message_bytes: 48 << 10, queue_bytes: 48 << 10 };

fn schedule() -> Schedule {
    let entry = |at_ms, until_ms, fault| Entry { at_ms, until_ms: Some(until_ms), fault };
    let node = |id: u32| vec![format!("n{id}")];
    let faults = vec![
        // Long enough for the others to go on without it.
        entry(1_500, 6_000, Fault::Crash { nodes: node(3) }),
        entry(7_000, 7_300, Fault::Crash { nodes: node(1) }),
        entry(8_500, 8_700, Fault::Crash { nodes: node(2) }),
    ];
    Schedule { faults, ..Schedule::default() }
}

fn run<P: Protocol>(name: &'static str, change: fn(&mut P::Config)) -> Result<Report, Failure> {
    let topology = Topology::uniform(3, Duration::from_millis(1), Duration::from_millis(80));
    let cluster = Cluster::spread(topology, 1, 1, 2, 3).unwrap();
    let mut config = P::configure(&cluster, name);
    assert!(P::limit(&mut config, LIMITS), "{name} keeps no limits");
    change(&mut config);
    let values = workload::Options {
        keys: Some(2_000),
        zipf: Some(0.0),
        value_bytes: Some(1_000),
        ..workload::Options::default()
    };
    let workload = workload::parse("retwis", &values).unwrap();
    let options = Options {
        seed: 7,
        cpu: None,
        limits: LIMITS,
        load: LoadModel {
            arrival: Arrival::Open { per_second: 150.0, poisson: true },
            retry: Retry::up_to(8),
            ..LoadModel::default()
        },
        warmup: Duration::ZERO,
        duration: Duration::from_secs(10),
        drain: Duration::from_secs(120),
        invariants_every: 64,
        check_outcomes: true,
        ..Options::default()
    };
    let mut run = Simulation::<P>::new(cluster, config, workload, &schedule(), options).unwrap();
    let report = run.run()?;
    run.settle(Duration::from_secs(60))?;
    assert!(run.now() > Time::ZERO);
    Ok(report)
}

fn hold<P: Protocol>(name: &'static str, often: fn(&mut P::Config)) {
    let report = run::<P>(name, often).unwrap_or_else(|failure| panic!("{name}: {failure}"));
    let count = |note: &str| report.notes.get(note).copied().unwrap_or(0);
    assert!(count("Hosting(Checkpoint)") + count("Checkpoint") > 10, "{name}: {:?}", report.notes);
    println!("{name}: {:?}", report.notes);
}

/// The first failure must be the limit, and not something that follows from it.
fn notice<P: Protocol>(name: &'static str, change: fn(&mut P::Config)) {
    let failure = run::<P>(name, change).unwrap_err();
    assert_eq!(failure.kind, FailureKind::Limit, "{name}: {failure}");
    println!("{name}: {failure}");
}

#[test]
fn carousel_keeps_them() {
    for name in [carousel::BASIC, carousel::FAST] {
        hold::<Carousel>(name, |config| config.hosting.checkpoint_bytes = 100_000);
        notice::<Carousel>(name, |config| {
            config.hosting.checkpoint_bytes = 100_000;
            config.hosting.piece_bytes = usize::MAX;
        });
    }
}

#[test]
fn natto_keeps_them() {
    hold::<Natto>(natto::RECSF, |config| config.hosting.checkpoint_bytes = 100_000);
}

#[test]
fn two_phase_locking_keeps_them() {
    hold::<Locking>(two_phase_locking::BY_AGE, |config| {
        config.hosting.checkpoint_bytes = 100_000;
    });
}

#[test]
fn tapir_keeps_them() {
    hold::<Tapir>(tapir::NAME, |config| config.checkpoint_bytes = 100_000);
    notice::<Tapir>(tapir::NAME, |config| {
        config.checkpoint_bytes = 100_000;
        config.piece_bytes = usize::MAX;
    });
}

#[test]
fn ocean_vista_keeps_them() {
    hold::<OceanVista>(ocean_vista::NAME, |config| config.checkpoint_bytes = 100_000);
    notice::<OceanVista>(ocean_vista::NAME, |config| {
        config.checkpoint_bytes = 100_000;
        config.batch_bytes = usize::MAX;
    });
}
