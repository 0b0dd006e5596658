//! The same scenario in the simulator and on real processes with the same emulated distances.
//! Latencies must agree; otherwise one of the two is wrong. One protocol runs with all tests;
//! `cargo xtask parity --protocol P` compares another one.

#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    missing_docs,
    reason = "a test of real processes; an unmet expectation is a failed test"
)]

mod processes;
#[path = "middleware/tools.rs"]
mod tools;

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use orthodrome_core::ordered::OrdMap;

use processes::{Cluster, Load, json, must_end_within, run};
use serde_json::Value;
use tools::skipped;

/// Transactions a second over all regions: so few that they rarely conflict or queue.
const RATE: &str = "25";
/// The maximum relative difference between medians, which the project's second issue demands.
const APART_MAX: f64 = 0.05;
/// Number of tries that count until the processes agree with the simulator. Other work on this machine
/// sometimes delays messages and disk writes, but an error of the simulator or a slow server shows
/// in every try.
const MEASUREMENTS_MAX: u32 = 4;
/// If this machine takes so long for a step, in the median, a try shows nothing: a transaction has
/// several such steps. Two idle cores take 0.5 ms.
const BUSY_STEP_MS: f64 = 2.0;
/// Nor does it if in the median more threads than this are ready to run for each core: those of the
/// cluster wait for a core at each step, and more often than a thread that mostly sleeps.
const READY_MAX: usize = 3;
/// Number of tries, with those that show nothing.
const TRIES_MAX: u32 = 8;

/// Measures how busy this machine is.
struct Steps {
    stop: Sender<()>,
    thread: JoinHandle<Vec<(f64, usize)>>,
}

/// How busy this machine was.
struct Busy {
    /// How long a step took besides others: a thread wakes up, and a short write becomes durable.
    step_ms: f64,
    /// How many threads were ready to run, or ran.
    ready: usize,
}

impl Busy {
    fn is_too_busy(&self) -> bool {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        self.step_ms >= BUSY_STEP_MS || self.ready > READY_MAX * cores
    }
}

/// How many threads of this machine are ready to run, or run; 0 where the kernel does not say so.
fn ready() -> usize {
    let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
    let line = stat.lines().find_map(|line| line.strip_prefix("procs_running "));
    line.map_or(0, |number| number.trim().parse().unwrap())
}

impl Steps {
    fn start(file: PathBuf) -> Self {
        let (stop, stopped) = channel();
        let thread = std::thread::spawn(move || Self::measure(&file, &stopped));
        Self { stop, thread }
    }

    fn measure(file: &Path, stopped: &Receiver<()>) -> Vec<(f64, usize)> {
        let mut file = File::create(file).unwrap();
        let pause = Duration::from_millis(50);
        let mut all = Vec::new();
        loop {
            let start = Instant::now();
            if stopped.recv_timeout(pause) != Err(RecvTimeoutError::Timeout) {
                return all;
            }
            file.write_all(&[b'x'; 512]).unwrap();
            file.sync_data().unwrap();
            let step_ms = start.elapsed().saturating_sub(pause).as_secs_f64() * 1e3;
            all.push((step_ms, ready()));
        }
    }

    /// The medians.
    fn finish(self) -> Busy {
        drop(self.stop);
        let (mut steps, mut ready): (Vec<f64>, Vec<usize>) =
            self.thread.join().unwrap().into_iter().unzip();
        steps.sort_by(f64::total_cmp);
        ready.sort_unstable();
        Busy { step_ms: median(&steps), ready: ready[ready.len() / 2] }
    }
}

/// The kind of an attempt, and the region of its client.
type Group = (&'static str, String);
/// Sorted latencies in milliseconds.
type Latencies = OrdMap<Group, Vec<f64>>;

/// The sorted latencies, in milliseconds, of the committed attempts of a history, by region and by
/// whether they wrote. They are of attempts and not of requests, because the number of retries is
/// random. Reads are separate, because they take one round trip, and half of `retwis` reads: the
/// median of all would lie between both values and jump.
fn latencies(history: &Path) -> Latencies {
    let mut all = Latencies::new();
    for line in fs::read_to_string(history).unwrap().lines() {
        let entry: Value = serde_json::from_str(line).unwrap();
        if entry["status"] != "ok" {
            continue;
        }
        let is_write = entry["ops"].as_array().unwrap().iter().any(|op| op[0] != "r");
        let kind = if is_write { "write" } else { "read only" };
        let [began, ended] = ["invoke_us", "complete_us"].map(|name| entry[name].as_u64().unwrap());
        let latency = (ended - began) as f64 / 1e3;
        for region in [entry["region"].as_str().unwrap(), "all regions"] {
            all.entry((kind, region.to_owned())).or_default().push(latency);
        }
    }
    for sorted in all.values_mut() {
        sorted.sort_by(f64::total_cmp);
    }
    all
}

fn quantile(sorted: &[f64], share: f64) -> f64 {
    let at = (sorted.len() as f64 * share.clamp(0.0, 1.0)) as usize;
    sorted[at.min(sorted.len() - 1)]
}

fn median(sorted: &[f64]) -> f64 {
    quantile(sorted, 0.5)
}

/// Whether the median of `measured` is within 5 % of a median that so small a sample of `simulated`
/// could have. Latencies form steps, one for each distance of the topology, and a median near a
/// step is on either side by chance. The rank of a median of n varies by 1 / (2 √n); four times
/// that is never exceeded by chance.
fn agree(simulated: &[f64], measured: &[f64]) -> bool {
    let rank_error = 2.0 / (measured.len() as f64).sqrt();
    let least = quantile(simulated, 0.5 - rank_error) * (1.0 - APART_MAX);
    let most = quantile(simulated, 0.5 + rank_error) * (1.0 + APART_MAX);
    (least..=most).contains(&median(measured))
}

/// False if this machine was too busy in so many tries that too few are left to judge by.
fn parity(cluster: &Cluster, protocol: &str, workload: &str) -> bool {
    let [here, there] = ["simulated", "measured"]
        .map(|name| cluster.path().join(format!("{name}-{workload}.jsonl")));
    let scenario = ["--workload", workload, "--rate", RATE, "--json", "--history"];
    let place = ["--topology", "azure5", "--partitions", "5", "--replicas", "3"];
    // Simulated time is cheap, so the run is long enough for exact medians.
    let course = ["--protocol", protocol, "--duration", "600s"];
    let arguments = [&["sim"][..], &place, &course, &scenario, &[here.to_str().unwrap()]];
    let (simulated, status) = json(&run(&arguments.concat()));
    assert_eq!(status, Some(0), "{simulated}");
    let simulated = latencies(&here);
    let mut judged = 0;
    for _ in 0..TRIES_MAX {
        let all = cluster.endpoints(cluster.numbers());
        let course = ["--connect", &all, "--duration", "30s"];
        let arguments = [&course[..], &scenario[..4], &scenario[5..], &[there.to_str().unwrap()]];
        let steps = Steps::start(cluster.path().join("steps"));
        let (measured, status, said) = Load::start(&arguments.concat()).finish();
        let busy = steps.finish();
        assert_eq!(status, Some(0), "{measured}\n{said}");
        let too_far = compare(workload, &simulated, &latencies(&there));
        if too_far.is_empty() {
            return true;
        }
        let Busy { step_ms, ready } = busy;
        println!(
            "more than 5 % apart: {too_far:?}; a step took {step_ms:.1} ms, and {ready} threads were \
             ready to run"
        );
        judged += u32::from(!busy.is_too_busy());
        assert!(judged < MEASUREMENTS_MAX, "{workload}: more than 5 % apart {judged} times");
        fs::remove_file(&there).unwrap();
    }
    false
}

/// Prints both, and returns the medians that differ too much.
fn compare(workload: &str, simulated: &Latencies, measured: &Latencies) -> Vec<Group> {
    println!("{workload:22} {:>17} {:>17} {:>9}", "simulated", "measured", "apart");
    let mut too_far = Vec::new();
    for (group, sorted) in measured {
        let (kind, region) = group;
        let expected = &simulated[group];
        let apart = median(sorted) / median(expected) - 1.0;
        println!(
            "{kind:9} {region:12} {:>6} {:>7.1} ms {:>6} {:>7.1} ms {:>+7.2} %",
            expected.len(),
            median(expected),
            sorted.len(),
            median(sorted),
            100.0 * apart
        );
        if !agree(expected, sorted) {
            too_far.push(group.clone());
        }
    }
    too_far
}

/// Time limit of all measurements together.
const LIMIT: Duration = Duration::from_secs(1_500);

#[test]
fn real_processes_are_as_fast_as_simulated_ones() {
    must_end_within(LIMIT);
    let protocol = std::env::var("ORTHODROME_PARITY_PROTOCOL");
    let protocol = protocol.as_deref().unwrap_or("carousel-basic");
    println!("protocol: {protocol}");
    let map = ["--topology", "azure5", "--protocol", protocol];
    let mut cluster = Cluster::init(5, &map, &[]);
    cluster.start(cluster.numbers());
    // Waits until leaders are elected and connections are open.
    let all = cluster.endpoints(cluster.numbers());
    let warm = ["--workload", "ycsbt:4", "--rate", "50", "--duration", "24h", "--no-check"];
    let load = Load::start(&[&["--connect", &all], &warm[..]].concat());
    load.commits(100);
    load.stop();
    let is_busy = |workload: &&str| !parity(&cluster, protocol, workload);
    let unjudged: Vec<&str> = ["ycsbt:4", "retwis"].into_iter().filter(is_busy).collect();
    if !unjudged.is_empty() {
        // Once for the whole test, which counts once.
        skipped(&format!("this machine is too busy to compare latencies of {unjudged:?}"));
    }
}
