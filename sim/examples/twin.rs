//! Prints the trace of one simulated run with faults: `cargo xtask twin` compares what a debug and
//! a release build print.

use std::cell::RefCell;
use std::io::Write as _;
use std::rc::Rc;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::machine::Protocol;
use orthodrome_core::time::Duration;
use orthodrome_core::topology::Topology;
use orthodrome_eval::workload;
use orthodrome_protocols::carousel::{BASIC, Carousel};
use orthodrome_sim::{Options, Schedule, Simulation};

const FAULTS: &str = r#"
    [[faults]]
    at_ms = 1500
    until_ms = 3000
    fault.crash = { nodes = ["n2"] }
"#;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let topology = Topology::parse(include_str!("../../topologies/azure5.toml"))?;
    let cluster = Cluster::spread(topology, 1, 1, 5, 3)?;
    let config = Carousel::configure(&cluster, BASIC);
    let workload = workload::parse("list-append", &workload::Options::default())?;
    let schedule = Schedule::parse(FAULTS)?;
    let options = Options {
        warmup: Duration::ZERO,
        duration: Duration::from_secs(5),
        check_outcomes: true,
        ..Options::default()
    };
    let mut run = Simulation::<Carousel>::new(cluster, config, workload, &schedule, options)?;
    let lines = Rc::new(RefCell::new(Vec::new()));
    let sink = lines.clone();
    run.keep_trace(Box::new(move |line| {
        // A vector never fails to take bytes.
        let _ = writeln!(sink.borrow_mut(), "{line}");
    }));
    let report = run.run().map_err(|failure| format!("{failure:?}"))?;
    std::io::stdout().write_all(&lines.borrow())?;
    println!("hash {:016x} events {}", report.trace_hash, report.result.events);
    Ok(())
}
