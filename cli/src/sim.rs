//! `sim`: one run of one protocol in the simulator.

use std::cmp::Reverse;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail};
use orthodrome_core::cluster::Cluster;
use orthodrome_core::ordered::OrdMap;
use orthodrome_eval::checker::Verdict;
use orthodrome_eval::metrics::{Check, Retry, RunResult, Summary};
use orthodrome_lab::Subject;
use orthodrome_sim::clock::ClockModel;
use orthodrome_sim::cpu::CpuModel;
use orthodrome_sim::load::LoadModel;
use orthodrome_sim::network::{Delay, Links, NetworkModel};
use orthodrome_sim::orders::OrderReport;
use orthodrome_sim::simulation::Simulated;
use orthodrome_sim::traffic::Traffic;
use orthodrome_sim::{Failure, FailureKind, Options, Report, Schedule, ScheduleError};
use serde::Serialize;

use crate::common::{self, Placement, WorkloadArgs};
use crate::guard::guard;
use crate::recording::Recording;
use crate::{Status, check, output};

/// Run one protocol in the simulator and print latency, throughput and outcomes
///
/// The simulator models time, network, disks, clocks, processors, clients and faults. The protocol is
/// the code that servers run. The same arguments and seed at the same commit give the same run, event
/// for event.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  orthodrome sim --protocol carousel-basic --topology azure5 --workload retwis
  orthodrome sim --protocol carousel-basic --topology azure5 --workload ycsbt:6 --zipf 0.9 \\
      --rate 500 --seed 7 --json
  orthodrome sim --protocol carousel-basic --topology azure5 --workload list-append --rate 50 \\
      --faults scenarios/leader-crash.toml --history run.jsonl --trace run.trace

Exit status: 0 the run passed every check, 1 a check failed, 2 bad usage or input.")]
pub struct Args {
    /// Protocol, by name
    #[arg(long, value_name = "P")]
    protocol: String,
    #[command(flatten)]
    placement: Placement,
    #[command(flatten)]
    workload: WorkloadArgs,
    #[command(flatten)]
    course: Course,
    /// Write the history (what clients submitted and saw) to this file, and check it against the protocol's guarantee
    #[arg(long, value_name = "FILE", help_heading = "Run")]
    history: Option<PathBuf>,
    /// Write the trace (every event of the run) to this file
    #[arg(long, value_name = "FILE", help_heading = "Run")]
    trace: Option<PathBuf>,
    /// Print the results as one JSON object
    #[arg(long)]
    json: bool,
}

/// The options of a run.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Run")]
pub struct Course {
    /// How long clients submit transactions, in simulated time
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = common::duration)]
    pub duration: Duration,
    /// Time at the start of the run that the results leave out [default: 10s, or a sixth of the duration if that is shorter]
    #[arg(long, value_name = "TIME", value_parser = common::duration)]
    pub warmup: Option<Duration>,
    /// Random seed
    #[arg(long, value_name = "S", default_value_t = 1)]
    pub seed: u64,
    /// Attempts at a transaction before its client gives up, the first included
    #[arg(long, value_name = "N", default_value_t = LoadModel::default().retry.attempts,
        value_parser = clap::value_parser!(u32).range(1..))]
    pub attempts: u32,
    /// Attempts at a transaction of low priority before its client gives up [default: the value of --attempts]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub attempts_low: Option<u32>,
    /// Cores of each server and gateway, in the CPU model
    #[arg(long, value_name = "N", default_value_t = CpuModel::default().cores,
        value_parser = clap::value_parser!(u32).range(1..=1_024))]
    pub cores: u32,
    /// Cores that run transactions without conflicts in parallel; only for deterministic protocols [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_024))]
    pub workers: Option<u32>,
    /// Draw network delays from a Pareto distribution with this ratio of standard deviation to mean [default: constant
    /// delays]
    #[arg(long, value_name = "D", value_parser = deviation, help_heading = "Network")]
    pub pareto: Option<f64>,
    /// Let messages between two nodes overtake each other, as over many connections; by default they arrive in the order
    /// in which they were sent, as over one connection. With --loss, lost messages are not sent again
    #[arg(long, help_heading = "Network")]
    pub unordered: bool,
    /// Share of the packets between regions that are lost, from 0 to below 1; connections retransmit them
    #[arg(long, value_name = "F", default_value = "0", value_parser = share, help_heading = "Network")]
    pub loss: f64,
    /// Bound that every node states for the error of its clock, in milliseconds, up to 1000; clocks are off by up to half
    /// of it
    #[arg(long, value_name = "MS", default_value_t = 2,
        value_parser = clap::value_parser!(u32).range(..=1_000))]
    pub clock_error_ms: u32,
    /// Fault schedule (TOML file)
    #[arg(long, value_name = "FILE")]
    pub faults: Option<PathBuf>,
    /// Check the invariants of every node after every event, and every outcome that a client learns against all others;
    /// slower. With --faults, outcomes are always checked
    #[arg(long)]
    pub verify: bool,
    /// Enable an injected bug: a mutation of the protocol, by its name in docs/protocols/. The run shows which guarantee or
    /// figure depends on the mechanism that the mutation removes
    #[arg(long, value_name = "NAME")]
    pub mutation: Option<String>,
}

fn deviation(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(ratio) if (0.0..=10.0).contains(&ratio) => Ok(ratio),
        Ok(_) | Err(_) => Err("use a ratio from 0 to 10, such as 0.2".into()),
    }
}

fn share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if (0.0..1.0).contains(&share) => Ok(share),
        Ok(_) | Err(_) => Err("use a share from 0 to below 1, such as 0.01".into()),
    }
}

impl Course {
    /// The start of a run that is left out of the figures.
    pub fn warmup(&self) -> Duration {
        self.warmup.unwrap_or_else(|| (self.duration / 6).min(Duration::from_secs(10)))
    }

    fn clock_error(&self) -> Duration {
        Duration::from_millis(self.clock_error_ms.into())
    }

    /// Options of the simulation with the given seed.
    pub fn options(&self, workload: &WorkloadArgs, seed: u64) -> anyhow::Result<Options> {
        let (warmup, duration) = (self.warmup(), self.duration);
        if duration == Duration::ZERO {
            bail!("--duration: no time at all; use a time above 0, such as 10s");
        }
        if warmup >= duration {
            bail!(
                "--warmup {warmup:?}: not shorter than --duration {duration:?}; use a shorter warmup"
            );
        }
        Ok(Options {
            seed,
            load: LoadModel {
                arrival: workload.arrival(),
                retry: Retry {
                    attempts: self.attempts,
                    attempts_low: self.attempts_low.unwrap_or(self.attempts),
                },
                ..LoadModel::default()
            },
            cpu: Some(CpuModel { cores: self.cores, workers: self.workers, ..CpuModel::default() }),
            network: NetworkModel {
                delay: self.pareto.map_or(Delay::Constant, Delay::Pareto),
                loss: self.loss,
                links: if self.unordered {
                    Links::Unordered { duplicate: 0.0, reorder: 0.0 }
                } else {
                    Links::Ordered
                },
                ..NetworkModel::default()
            },
            clock: ClockModel {
                error: self.clock_error(),
                skew: self.clock_error() / 2,
                ..ClockModel::default()
            },
            warmup,
            duration,
            invariants_every: u64::from(self.verify),
            check_outcomes: self.verify || self.faults.is_some(),
            ..Options::default()
        })
    }

    /// The fault schedule; an empty one without `--faults`.
    pub fn schedule(&self) -> anyhow::Result<Schedule> {
        let read = |path: &Path| schedule("--faults", path);
        self.faults.as_deref().map_or_else(|| Ok(Schedule::default()), read)
    }

    /// A simulation of `subject` on `cluster` with the given seed, before its first event.
    pub fn simulation(
        &self,
        subject: &Subject,
        cluster: Cluster,
        workload: &WorkloadArgs,
        seed: u64,
    ) -> anyhow::Result<Box<dyn Simulated>> {
        let mut options = self.options(workload, seed)?;
        let regions = cluster.gateways().map(|gateway| cluster.topology.name_of(gateway.region));
        options.load.origins = workload.origins(&regions.collect::<Vec<_>>())?;
        let schedule = self.schedule()?;
        let workload = workload.workload()?;
        let known = subject.mutations;
        if let Some(mutation) =
            self.mutation.as_deref().filter(|mutation| !known.contains(mutation))
        {
            let name = subject.row.name;
            bail!(
                "--mutation {mutation}: {name} has no such mutation; it has {}",
                known.join(", ")
            );
        }
        subject
            .simulation(cluster, workload, &schedule, options, self.mutation.as_deref())
            .map_err(|error| anyhow!("{}: {error}", place(self.faults.as_deref())))
    }
}

/// The result that `--json` prints.
#[derive(Serialize)]
struct Printed<'a> {
    #[serde(flatten)]
    result: &'a RunResult,
    regions: &'a OrdMap<String, Summary>,
    figures: &'static str,
    commit: &'static str,
    partitions: u32,
    replicas: u32,
    servers_per_region: u32,
    shares: u32,
    warmup_seconds: f64,
    outstanding: u32,
    cpu_seconds: f64,
    faults: &'a OrdMap<&'static str, u64>,
    orders: &'a [OrderReport],
    notes: &'a OrdMap<String, u64>,
    trace_hash: String,
    failure: Option<PrintedFailure<'a>>,
    /// Events after this moment are not checked.
    judged_until: Option<PrintedBeyond<'a>>,
}

/// A disk lost writes that it had reported durable.
#[derive(Serialize)]
struct PrintedBeyond<'a> {
    at_ms: f64,
    detail: &'a str,
}

#[derive(Serialize)]
struct PrintedFailure<'a> {
    kind: &'static str,
    at_ms: f64,
    detail: &'a str,
}

/// The results of a run.
struct Run {
    report: Report,
    failure: Option<Failure>,
    verdict: Option<Verdict>,
}

/// Runs the simulation and prints the results.
pub fn run(args: &Args) -> anyhow::Result<Status> {
    let subject = args.placement.subject(&args.protocol)?;
    let cluster = args.placement.cluster_of(&subject)?;
    let run = simulate(args, cluster, &subject)?;
    let is_kept = run.failure.is_none() && run.verdict.as_ref().is_none_or(|verdict| verdict.ok);
    if args.json {
        print_json(args, &run)?;
    } else {
        output::print(&describe(args, &run))?;
        let result = &run.report.result;
        if let Some(warning) = output::few_commits(result.committed, result.aborted_attempts) {
            note!("{warning}");
        }
    }
    Ok(if is_kept { Status::Passed } else { Status::Failed })
}

fn simulate(args: &Args, cluster: Cluster, subject: &Subject) -> anyhow::Result<Run> {
    common::check_place("--history", args.history.as_deref())?;
    common::check_place("--trace", args.trace.as_deref())?;
    let places = cluster.clone();
    let Course { seed, .. } = args.course;
    let mut simulation = args.course.simulation(subject, cluster, &args.workload, seed)?;
    let create = |path: &Option<PathBuf>| path.as_deref().map(Recording::create).transpose();
    let history = create(&args.history).context("--history")?;
    let trace = create(&args.trace).context("--trace")?;
    if let Some(recording) = &history {
        simulation.keep_history(recording.history_sink());
    }
    if let Some(recording) = &trace {
        let command = std::env::args().skip(1).collect::<Vec<_>>().join(" ");
        simulation.keep_trace(recording.trace_sink(&command, &places));
    }
    let bar = output::progress(None, "{spinner} simulating {msg}; {elapsed}")?;
    bar.set_message(format!("{:?} of {}", args.course.duration, args.protocol));
    let outcome = carry_out(&mut *simulation);
    bar.finish_and_clear();
    let (report, failure) = outcome?;
    let mut run = Run { report, failure, verdict: None };
    if let Some(recording) = trace {
        recording.finish().context("--trace")?;
    }
    if let (Some(recording), Some(path)) = (history, &args.history) {
        recording.finish().context("--history")?;
        let faults = args.course.schedule()?;
        let verdict = check::judge(path, subject.model_under(&faults))?;
        run.report.result.check = Some(check_of(&verdict));
        run.verdict = Some(verdict);
    }
    Ok(run)
}

/// Runs to the end, or to the first broken promise.
pub fn carry_out(simulation: &mut dyn Simulated) -> anyhow::Result<(Report, Option<Failure>)> {
    let began = Instant::now();
    let outcome = guard(|| simulation.run());
    let wall = began.elapsed();
    let (mut report, failure) = match outcome {
        Ok(Ok(report)) => (report, None),
        Ok(Err(failure)) => (simulation.report(), Some(failure)),
        Err(detail) => {
            let at = simulation.now();
            let failure = Failure { at, kind: FailureKind::Panic, detail };
            // After a broken promise, even computing the report may panic.
            let report = guard(|| simulation.report());
            (report.map_err(|_| anyhow!("{failure}"))?, Some(failure))
        }
    };
    report.result.wall_seconds = (wall.as_secs_f64() * 1e6).round() / 1e6;
    Ok((report, failure))
}

/// Reads the fault schedule that `option` names.
pub fn schedule(option: &str, path: &Path) -> anyhow::Result<Schedule> {
    let text = fs::read_to_string(path).with_context(|| format!("{option} {}", path.display()))?;
    Schedule::parse(&text).map_err(|error| match error {
        ScheduleError::Syntax(problem) => common::toml_error(path.display(), &problem),
        ScheduleError::Name { .. } | ScheduleError::Value { .. } => {
            anyhow!("{}: {error}", path.display())
        }
    })
}

fn place(faults: Option<&Path>) -> String {
    faults.map_or_else(|| "--faults".into(), |path| format!("--faults {}", path.display()))
}

fn check_of(verdict: &Verdict) -> Check {
    Check {
        model: verdict.model.to_string(),
        ok: verdict.ok,
        anomaly: verdict
            .anomalies
            .first()
            .map(|found| format!("{}: {}", found.kind, found.problem)),
    }
}

fn print_json(args: &Args, run: &Run) -> anyhow::Result<()> {
    let Run { report, failure, .. } = run;
    let failure = failure.as_ref().map(|failure| PrintedFailure {
        kind: kind(failure.kind),
        at_ms: failure.at.as_micros() as f64 / 1_000.0,
        detail: &failure.detail,
    });
    output::print_json(&Printed {
        result: &report.result,
        regions: &report.regions,
        figures: "simulated",
        commit: output::COMMIT,
        partitions: args.placement.partitions,
        replicas: args.placement.replicas,
        servers_per_region: args.placement.servers_per_region,
        shares: args.placement.shares,
        warmup_seconds: args.course.warmup().as_secs_f64(),
        outstanding: report.outstanding,
        cpu_seconds: report.cpu.as_secs_f64(),
        faults: &report.injected,
        orders: &report.orders,
        notes: &report.notes,
        trace_hash: format!("{:016x}", report.trace_hash),
        failure,
        judged_until: report.beyond.as_ref().map(|beyond| PrintedBeyond {
            at_ms: beyond.at.as_micros() as f64 / 1_000.0,
            detail: &beyond.detail,
        }),
    })
}

/// The name of a kind of failure in results.
pub fn kind(kind: FailureKind) -> &'static str {
    match kind {
        FailureKind::Panic => "panic",
        FailureKind::Promise => "promise",
        FailureKind::Stuck => "stuck",
        FailureKind::Claim => "claim",
        FailureKind::Limit => "limit",
        FailureKind::History => "history",
        FailureKind::Twins => "twins",
    }
}

/// The figures as readable text.
fn describe(args: &Args, run: &Run) -> String {
    let (report, result) = (&run.report, &run.report.result);
    let Placement { partitions, replicas, .. } = &args.placement;
    let rows = [
        ("all", &result.latency_ms.all),
        ("high", &result.latency_ms.high),
        ("low", &result.latency_ms.low),
    ]
    .into_iter()
    .filter(|(name, summary)| *name == "all" || summary.n > 0)
    .map(|(name, summary)| latency_row(name, summary));
    let kinds = result.kinds.iter().map(|(name, kind)| latency_row(name, &kind.latency_ms));
    let rows = rows.chain(kinds);
    let latencies = output::table(
        &["latency, ms", "n", "mean", "p50", "p90", "p95", "p99", "p99.9", "max"],
        rows,
    );
    let rate = result.events as f64 / result.wall_seconds.max(1e-6) / 1e6;
    let mut text = format!(
        "Simulated: {} under {} on {}, {partitions} partitions × {replicas} replicas, \
         {}; seed {}, commit {}\n\
         {:.1} s of simulated time in {:.2} s: {} events, {rate:.2} million per second\n\n{}\n",
        result.protocol,
        result.workload,
        result.topology,
        args.placement.servers(),
        result.seed,
        output::COMMIT,
        result.simulated_seconds,
        result.wall_seconds,
        output::count(result.events),
        latencies.trim_fmt(),
    );
    for (name, value) in figures(report) {
        text.push_str(&format!("{name:17} {value}\n"));
    }
    match &run.verdict {
        Some(verdict) => text.push_str(&format!("{:17} {verdict}", "history")),
        None => text.push_str(&format!(
            "{:17} not recorded; --history FILE records and checks it\n",
            "history"
        )),
    }
    if let Some(failure) = &run.failure {
        text.push_str(&format!("\nFAILED: {failure}\n"));
    }
    text
}

fn figures(report: &Report) -> Vec<(&'static str, String)> {
    let result = &report.result;
    let ended: u64 = result.path.values().sum();
    let share =
        |(name, count): (&String, &u64)| format!("{name} {}", output::percent(*count, ended));
    let list = |pairs: Vec<String>| if pairs.is_empty() { "none".into() } else { pairs.join(", ") };
    let counted = |(name, count): (String, u64)| format!("{name} {}", output::count(count));
    let mut rows = vec![
        (
            "throughput",
            format!(
                "{:.1} transactions per second offered, {:.1} committed",
                result.offered_tps, result.committed_tps
            ),
        ),
        (
            "outcomes",
            format!(
                "{} committed, {} failed; {} attempts aborted; commit rate {:.2} %",
                output::count(result.committed),
                output::count(result.failed),
                output::count(result.aborted_attempts),
                result.commit_rate * 100.0
            ),
        ),
        (
            "latency ÷ floor",
            format!(
                "{:.2} median, {:.2} 95th percentile",
                result.floor_ratio.p50, result.floor_ratio.p95
            ),
        ),
        (
            "WAN round trips",
            format!(
                "{:.2} mean, {:.1} at most",
                result.wan_round_trips.mean, result.wan_round_trips.max
            ),
        ),
        (
            "per transaction",
            format!("{:.1} messages, {:.0} bytes", result.messages_per_txn, result.bytes_per_txn),
        ),
        ("bytes by message", list(bytes_by_kind(&report.traffic))),
        ("paths", list(result.path.iter().map(share).collect())),
    ];
    if !report.injected.is_empty() {
        let faults = report.injected.iter().map(|(name, &n)| counted(((*name).into(), n)));
        rows.push(("faults", list(faults.collect())));
    }
    for order in &report.orders {
        let OrderReport { at_ms, partition, voters, state, detail } = order;
        let because = if detail.is_empty() { String::new() } else { format!(": {detail}") };
        let voters = voters.join(" ");
        rows.push((
            "member changes",
            format!("partition {partition} to {voters} at {at_ms} ms: {state}{because}"),
        ));
    }
    if !report.notes.is_empty() {
        let notes = report.notes.iter().map(|(name, &n)| counted((name.clone(), n)));
        rows.push(("notes", list(notes.collect())));
    }
    if let Some(beyond) = &report.beyond {
        rows.push(("checked until", format!("{}: {}", beyond.at, beyond.detail)));
    }
    if report.outstanding > 0 {
        rows.push(("still pending", output::count(u64::from(report.outstanding))));
    }
    rows
}

/// The kinds of messages that take most bytes, with their shares of the bytes of the whole run.
fn bytes_by_kind(traffic: &Traffic) -> Vec<String> {
    let all = traffic.total().bytes;
    let mut kinds: Vec<(&str, u64)> =
        traffic.by_kind().into_iter().map(|(kind, count)| (kind, count.bytes)).collect();
    kinds.sort_by_key(|(kind, bytes)| (Reverse(*bytes), *kind));
    let share = |(kind, bytes)| format!("{kind} {}", output::percent(bytes, all));
    kinds.into_iter().take(KINDS_MAX).map(share).collect()
}

/// As many kinds of messages are listed.
const KINDS_MAX: usize = 8;

fn latency_row(name: &str, summary: &Summary) -> Vec<String> {
    let Summary { n, mean, p50, p90, p95, p99, p999, max } = summary;
    let mut row = vec![name.into(), output::count(*n)];
    row.extend([mean, p50, p90, p95, p99, p999, max].map(|value| format!("{value:.1}")));
    row
}
