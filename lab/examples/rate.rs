//! Runs one simulation, and prints how many events it handled and how fast.
//!
//! `cargo run --release -p orthodrome-lab --example rate -- PROTOCOL TOPOLOGY WORKLOAD RATE SECONDS
//! [FORM [SEED]]`. The trace hash shows whether two builds simulated the same run. With the
//! environment variable `TRACE` set to a file, the trace is written to that file.

#![allow(clippy::disallowed_types, reason = "it measures how long a simulation takes")]

use std::error::Error;
use std::fs::{self, File};
use std::io::{BufWriter, Write as _};
use std::time::Instant;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::time::Duration;
use orthodrome_core::topology::Topology;
use orthodrome_eval::workload::{self, Form};
use orthodrome_sim::load::{Arrival, LoadModel};
use orthodrome_sim::{Options, Schedule};

/// The allocator of the program.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const USAGE: &str = "usage: rate PROTOCOL TOPOLOGY WORKLOAD RATE SECONDS [FORM [SEED]]";

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [protocol, topology, workload, rate, seconds, rest @ ..] = arguments.as_slice() else {
        return Err(USAGE.into());
    };
    let form = match rest.first().map(String::as_str) {
        None | Some("interactive") => Form::Interactive,
        Some("procedure") => Form::Procedure,
        Some("mixed") => Form::Mixed,
        Some(other) => return Err(format!("no form is called {other:?}; {USAGE}").into()),
    };
    let seed = rest.get(1).map_or(Ok(1), |seed| seed.parse())?;
    let subject = orthodrome_lab::find(protocol)?;
    let topology = Topology::built_in(topology).ok_or("no such topology")?;
    let replicas = if subject.is_replicated { 3 } else { 1 };
    let cluster = Cluster::spread(topology, 1, 1, 5, replicas)?;
    let workload_options = workload::Options { form: Some(form), ..workload::Options::default() };
    let workload = workload::parse(workload, &workload_options)?;
    let duration = Duration::from_secs(seconds.parse()?);
    let arrival = Arrival::Open { per_second: rate.parse()?, poisson: true };
    let options = Options {
        seed,
        load: LoadModel { arrival, ..LoadModel::default() },
        warmup: (duration / 6).min(Duration::from_secs(10)),
        duration,
        ..Options::default()
    };
    let schedule = Schedule::default();
    let mut simulation = subject.simulation(cluster, workload, &schedule, options, None)?;
    if let Some(path) = std::env::var_os("TRACE") {
        let mut file = BufWriter::new(File::create(path)?);
        simulation.keep_trace(Box::new(move |line| {
            writeln!(file, "{line}").unwrap_or_else(|error| panic!("TRACE: {error}"));
        }));
    }

    let (wall, processor) = (Instant::now(), processor_seconds());
    let report = simulation.run().map_err(|failure| failure.to_string())?;
    let (wall, processor) = (wall.elapsed().as_secs_f64(), processor_seconds() - processor);
    let events = report.result.events;
    println!(
        "{protocol}: {events} events, {} commits, {wall:.2} s, {processor:.2} s of processor time, \
         {:.3} M events a second of processor time, {} MB, trace {:016x}",
        report.result.committed,
        events as f64 / processor.max(0.01) / 1e6,
        peak_memory_kb() / 1_000,
        report.trace_hash
    );
    Ok(())
}

/// The processor time of this process so far; zero where the system does not tell it.
fn processor_seconds() -> f64 {
    let text = fs::read_to_string("/proc/self/schedstat").unwrap_or_default();
    let nanoseconds = text.split_whitespace().next().and_then(|number| number.parse::<f64>().ok());
    nanoseconds.unwrap_or_default() / 1e9
}

/// The most memory that this process had; zero where the system does not tell it.
fn peak_memory_kb() -> u64 {
    let text = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let number = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    number.unwrap_or_default()
}
