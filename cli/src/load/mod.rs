//! `load`: runs a workload against a running cluster, measures it, and checks the recorded history.

pub mod client;
pub mod driver;
pub mod ranges;
pub mod results;

use std::fmt::Write as _;
use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, bail};
use orthodrome_client::{Client, ClusterInfo, KeyspaceInfo};
use orthodrome_core::RegionId;
use orthodrome_core::ordered::OrdMap;
use orthodrome_eval::checker::{Model, Verdict};
use orthodrome_eval::metrics::{Check, FloorRatio, OfKind, Run, RunResult, Summary};
use orthodrome_sim::floor::Floor;
use orthodrome_sim::load::{Arrival, Origins};
use serde::Serialize;
use tokio::runtime::Runtime;

use crate::common::{self, WorkloadArgs};
use crate::connect::Connect;
use crate::style::Style;
use crate::{Status, check, output};
use driver::{Audit, Driver, Pace, Plan, Shared, Site};
use results::Results;

/// Number of seconds of arrivals that the clients of an open loop can have pending at once.
const OPEN_LOOP_SECONDS: f64 = 2.0;
/// Maximum number of clients of an open loop; each has its own connection.
const OPEN_LOOP_CLIENTS_MAX: u32 = 1_000;
/// Time limit for a gateway's description of itself.
const DESCRIBE_DEADLINE: Duration = Duration::from_secs(5);

/// Run a workload against a running cluster, measure it, and check the answers.
///
/// The clients are spread over the gateways in --connect; give one gateway of each region. When a
/// gateway fails, its clients use the next gateway by distance. Every attempt is recorded in a history,
/// which is checked against the guarantee that the cluster states.
#[derive(clap::Args)]
#[command(after_help = "\
The keys of each run have their own prefix, so runs on one cluster do not conflict.

Examples:
  orthodrome load --connect 127.0.0.1:7400,127.0.0.1:7401 --workload bank --clients 20
  orthodrome load --connect db-va:7400,db-sg:7400 --tls-ca ca.pem --token-file token \\
      --workload ycsbt:4 --rate 500 --duration 5m --history out.jsonl --json

Exit status: 0 every check passed, 1 a check failed, 2 bad usage or no gateway can be reached.")]
pub struct Args {
    #[command(flatten)]
    connect: Connect,
    #[command(flatten)]
    workload: WorkloadArgs,
    /// How long clients submit transactions
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = common::duration)]
    duration: Duration,
    /// Time limit of one transaction, retries included
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = common::duration)]
    deadline: Duration,
    /// Random seed of the workload
    #[arg(long, value_name = "S", default_value_t = 1)]
    seed: u64,
    /// Write the history to this file, one JSON object on each line [default: a temporary file, kept if a check fails]
    #[arg(long, value_name = "FILE")]
    history: Option<PathBuf>,
    /// Do not check the history; without --history, do not record it either
    #[arg(long)]
    no_check: bool,
    /// Print the results as one JSON object
    #[arg(long)]
    json: bool,
}

/// The result that `--json` prints. Figures that clients of a real cluster cannot observe
/// (messages, bytes, round trips, paths) are left out.
#[derive(Serialize)]
struct Printed {
    protocol: String,
    cluster: String,
    workload: String,
    seed: u64,
    /// Time zero of the history, in microseconds since the Unix epoch.
    started_unix_us: u64,
    wall_seconds: f64,
    offered_tps: f64,
    committed_tps: f64,
    committed: u64,
    aborted_attempts: u64,
    failed: u64,
    /// Failed requests whose outcome is unknown.
    unknown: u64,
    /// Failed requests that were refused because every client was busy.
    shed: u64,
    commit_rate: f64,
    latency_ms: OrdMap<String, Summary>,
    regions: OrdMap<String, Summary>,
    /// Latency by kind. Distances are left out where `floor_ratio` is.
    kinds: OrdMap<String, OfKind>,
    /// Latency divided by the latency floor; left out if the cluster does not say which partition
    /// holds a key.
    #[serde(skip_serializing_if = "Option::is_none")]
    floor_ratio: Option<FloorRatio>,
    total_ok: bool,
    findings: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    history: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    check: Option<Check>,
    /// Always true: the figures are of real processes on real clocks.
    measured: bool,
    commit: &'static str,
}

/// The file of the history.
enum HistoryFile {
    None,
    Kept(PathBuf),
    /// A file that is removed at the end if every check passes.
    Temporary(PathBuf),
}

impl HistoryFile {
    fn of(args: &Args) -> Self {
        match &args.history {
            Some(path) => Self::Kept(path.clone()),
            None if args.no_check => Self::None,
            None => Self::Temporary(
                std::env::temp_dir().join(format!("orthodrome-load-{}.jsonl", std::process::id())),
            ),
        }
    }

    fn path(&self) -> Option<&Path> {
        match self {
            Self::None => None,
            Self::Kept(path) | Self::Temporary(path) => Some(path),
        }
    }
}

/// Runs the load.
///
/// # Errors
/// The cluster cannot be reached, or an option makes no sense.
pub fn run(args: &Args) -> anyhow::Result<Status> {
    let mut workload = args.workload.workload()?;
    common::check_place("--history", args.history.as_deref())?;
    let runtime = Runtime::new().context("cannot start the runtime")?;
    let (about, sites) = runtime.block_on(sites(args))?;
    let keyspace = about.keyspaces.first().context("the cluster has no keyspace")?.clone();
    let model = model(&keyspace)?;
    let file = HistoryFile::of(args);
    let (clients, pace) = pace(args, sites.len());
    if let Some(map) = &about.map {
        workload.place(map);
    }
    let name = workload.name();
    let plan = Plan {
        origins: origins(&args.workload, &about, &sites)?,
        sites,
        workloads: vec![workload],
        clients,
        pace,
        seed: args.seed,
        prefix: None,
        regions: about.regions.iter().map(|region| region.name.clone()).collect(),
        floor: about.map.as_ref().map(Floor::new),
        results: Results::create(file.path())?,
    };
    note!(
        "{name} on {:?} ({}, {}): {clients} clients in {} regions for {:?}",
        about.cluster,
        keyspace.protocol,
        keyspace.guarantee,
        plan.sites.len(),
        args.duration
    );
    let (shared, audits, measured) = runtime.block_on(drive(plan, args.duration))?;
    let mut results = shared.results();
    results.finish_history()?;
    let verdict = match file.path().filter(|_| !args.no_check) {
        Some(path) => Some(check::judge(path, model)?),
        None => None,
    };
    let since_start = shared.started.elapsed();
    let started_unix_us = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let started_unix_us = started_unix_us.saturating_sub(since_start).as_micros() as u64;
    let found = Found {
        about: &about,
        keyspace: &keyspace,
        name,
        started_unix_us,
        measured,
        audits,
        verdict,
    };
    let printed = found.print(args, &results, &file);
    let is_kept = printed.total_ok
        && printed.findings.is_empty()
        && printed.check.as_ref().is_none_or(|check| check.ok);
    if let (HistoryFile::Temporary(path), true) = (&file, is_kept) {
        // The history was checked, so a failure to remove it does not matter.
        let _ = std::fs::remove_file(path);
    }
    if args.json {
        output::print_json(&printed)?;
    } else {
        output::print(&found.describe(&printed))?;
        if let Some(warning) = output::few_commits(printed.committed, printed.aborted_attempts) {
            note!("{warning}");
        }
    }
    Ok(if is_kept { Status::Passed } else { Status::Failed })
}

/// The sites of the given endpoints, and the cluster's description of itself.
async fn sites(args: &Args) -> anyhow::Result<(ClusterInfo, Vec<Site>)> {
    let mut known: Vec<(String, ClusterInfo)> = Vec::new();
    let mut silent: Vec<String> = Vec::new();
    for endpoint in args.connect.endpoints() {
        let config = args.connect.config(std::slice::from_ref(endpoint))?;
        match describe(config.deadline(DESCRIBE_DEADLINE)).await {
            Ok(about) => known.push((endpoint.clone(), about)),
            Err(error) => {
                note!(
                    "warning: gateway {endpoint} does not answer, so clients use it last: {error}"
                );
                silent.push(endpoint.clone());
            }
        }
    }
    let Some((first, about)) = known.first() else {
        bail!(
            "--connect {}: no gateway answers; check the addresses, and that the nodes run",
            silent.join(",")
        );
    };
    if let Some((other, _)) = known.iter().find(|(_, other)| other.cluster != about.cluster) {
        bail!(
            "--connect: {first} and {other} belong to different clusters; use gateways of one cluster"
        );
    }
    let mut sites = Vec::new();
    for (endpoint, here) in &known {
        let distance = |region: RegionId| {
            let row = here.regions.get(usize::from(here.region.0))?;
            row.rtt.get(usize::from(region.0)).copied()
        };
        let mut others: Vec<&(String, ClusterInfo)> =
            known.iter().filter(|(other, _)| other != endpoint).collect();
        others.sort_by_key(|(_, there)| distance(there.region));
        let others = others.into_iter().map(|(other, _)| other.clone());
        let order: Vec<String> =
            std::iter::once(endpoint.clone()).chain(others).chain(silent.clone()).collect();
        let config = args.connect.config(&order)?.deadline(args.deadline);
        sites.push(Site { region: here.region, config });
    }
    Ok((about.clone(), sites))
}

/// The share of the load that each site submits.
fn origins(
    workload: &WorkloadArgs,
    about: &ClusterInfo,
    sites: &[Site],
) -> anyhow::Result<Origins> {
    let name = |site: &Site| {
        let region = about.regions.get(usize::from(site.region.0));
        region.map_or("", |region| &region.name)
    };
    let names: Vec<&str> = sites.iter().map(name).collect();
    let origins = workload.origins(&names)?;
    let weight = |name: &&str| {
        let here = names.iter().filter(|other| *other == name).count() as f64;
        origins.get(*name).copied().unwrap_or(0.0) / here
    };
    let equal = || vec![1.0; names.len()];
    let given = || names.iter().map(weight).collect();
    Ok(Origins::new(if origins.is_empty() { equal() } else { given() }))
}

async fn describe(
    config: orthodrome_client::Config,
) -> Result<ClusterInfo, orthodrome_client::Error> {
    Client::connect(config).await?.describe().await
}

/// The consistency model that a cluster's histories are checked against.
fn model(keyspace: &KeyspaceInfo) -> anyhow::Result<Model> {
    match keyspace.guarantee.as_str() {
        "strict serializability" | "strict-serializable" => Ok(Model::StrictSerializable),
        "serializability" | "serializable" => Ok(Model::Serializable),
        other => bail!(
            "the cluster guarantees {other:?}, which this program cannot check; use --no-check"
        ),
    }
}

fn pace(args: &Args, sites: usize) -> (u32, Pace) {
    match args.workload.arrival() {
        Arrival::Closed { clients, .. } => (clients, Pace::Closed),
        Arrival::Open { per_second, .. } => {
            let sites = u32::try_from(sites).unwrap_or(1);
            let wanted = (per_second * OPEN_LOOP_SECONDS).ceil();
            let clients = (wanted as u32).clamp(4 * sites, OPEN_LOOP_CLIENTS_MAX.max(sites));
            (clients, Pace::Open { per_second })
        }
    }
}

/// Runs the clients for a time, or until Ctrl-C, and shows progress.
async fn drive(
    plan: Plan,
    duration: Duration,
) -> anyhow::Result<(Arc<Shared>, Vec<Audit>, Duration)> {
    let driver = Driver::start(plan).await?;
    let shared = Arc::clone(driver.shared());
    let style = Style::new(std::io::stderr().is_terminal());
    let template = "{spinner} {msg}";
    let bar = output::progress(None, template)?;
    let end = tokio::time::Instant::now() + duration;
    let mut ticks = tokio::time::interval(Duration::from_secs(1));
    ticks.tick().await;
    let interrupted = tokio::signal::ctrl_c();
    tokio::pin!(interrupted);
    loop {
        tokio::select! {
            () = tokio::time::sleep_until(end) => break,
            _ = &mut interrupted => {
                bar.println("stopping: clients submit no more transactions");
                break;
            }
            _ = ticks.tick() => {
                let line = progress_line(&shared, duration);
                if bar.is_hidden() {
                    note!("{line}");
                } else {
                    bar.set_message(line);
                }
                let trouble = shared.results().take_trouble();
                if let Some(trouble) = trouble {
                    bar.println(style.warning(&trouble));
                }
            }
        }
    }
    let measured = shared.started.elapsed();
    bar.set_message("waiting for pending transactions");
    let (shared, audits) = driver.finish().await;
    bar.finish_and_clear();
    Ok((shared, audits, measured))
}

fn progress_line(shared: &Shared, duration: Duration) -> String {
    let mut results = shared.results();
    let (rate, latency) = results.recent(|_, _| true);
    let counters = &results.counters;
    let line = format!(
        "{:>3.0}/{:.0} s  {rate:>7.0} commits/s  p50 {:>6.1} ms  p95 {:>6.1} ms  p99 {:>6.1} ms  \
         {} committed, {} aborted attempts, {} failed, {} unknown",
        shared.started.elapsed().as_secs_f64(),
        duration.as_secs_f64(),
        latency.p50,
        latency.p95,
        latency.p99,
        output::count(counters.committed),
        output::count(counters.aborted_attempts()),
        counters.failed,
        results.unknown,
    );
    results.tick();
    line
}

/// The findings of a run, before they are formatted.
struct Found<'a> {
    about: &'a ClusterInfo,
    keyspace: &'a KeyspaceInfo,
    name: String,
    started_unix_us: u64,
    measured: Duration,
    audits: Vec<Audit>,
    verdict: Option<Verdict>,
}

impl Found<'_> {
    fn print(&self, args: &Args, results: &Results, file: &HistoryFile) -> Printed {
        let run = Run {
            protocol: self.keyspace.protocol.clone(),
            topology: String::new(),
            workload: self.name.clone(),
            seed: args.seed,
            measured: self.measured,
            simulated: Duration::ZERO,
            wall: self.measured,
            events: 0,
        };
        let result = RunResult::new(run, &results.latencies, &results.counters, None);
        let latencies = result.latency_ms;
        let audit = self.audits.iter().filter_map(|audit| {
            audit.problem.as_ref().map(|problem| format!("{}: {problem}", audit.workload))
        });
        let kept = match file {
            HistoryFile::None => None,
            HistoryFile::Kept(path) => Some(path),
            HistoryFile::Temporary(path) => {
                self.verdict.as_ref().is_some_and(|verdict| !verdict.ok).then_some(path)
            }
        };
        Printed {
            protocol: result.protocol,
            cluster: self.about.cluster.clone(),
            workload: result.workload,
            seed: result.seed,
            started_unix_us: self.started_unix_us,
            wall_seconds: result.wall_seconds,
            offered_tps: result.offered_tps,
            committed_tps: result.committed_tps,
            committed: result.committed,
            aborted_attempts: result.aborted_attempts,
            failed: result.failed,
            unknown: results.unknown,
            shed: results.shed,
            commit_rate: result.commit_rate,
            latency_ms: OrdMap::from([
                ("all".into(), latencies.all),
                ("high".into(), latencies.high),
                ("low".into(), latencies.low),
            ]),
            regions: results
                .latencies
                .by_region(self.about.regions.iter().map(|region| region.name.as_str())),
            kinds: result.kinds,
            floor_ratio: self.about.map.is_some().then_some(result.floor_ratio),
            total_ok: self.audits.iter().all(|audit| audit.problem.is_none()),
            findings: results.findings().into_iter().chain(audit).collect(),
            history: kept.map(|path| path.display().to_string()),
            check: self.verdict.as_ref().map(check_of),
            measured: true,
            commit: output::COMMIT,
        }
    }

    /// The result as readable text.
    fn describe(&self, printed: &Printed) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{} on {:?}, {} (measured, {:.1} s)\n{:.0} transactions/s committed of {:.0} offered; {} \
             committed, {} aborted attempts, {} failed ({} unknown, {} shed)",
            printed.workload,
            printed.cluster,
            printed.protocol,
            printed.wall_seconds,
            printed.committed_tps,
            printed.offered_tps,
            output::count(printed.committed),
            output::count(printed.aborted_attempts),
            printed.failed,
            printed.unknown,
            printed.shed,
        );
        let rows = printed.regions.iter().chain(&printed.latency_ms);
        let rows = rows.filter(|(_, summary)| summary.n > 0);
        let _ = writeln!(text, "{}", latency_table(rows));
        if let Some(ratio) = &printed.floor_ratio {
            let _ = writeln!(
                text,
                "latency ÷ floor: {:.2} median, {:.2} 95th percentile",
                ratio.p50, ratio.p95
            );
        }
        for audit in &self.audits {
            let found = audit.problem.as_deref().unwrap_or("passed");
            let _ = writeln!(text, "{}: audit of all data: {found}", audit.workload);
        }
        for finding in &printed.findings {
            let _ = writeln!(text, "FAILED: {finding}");
        }
        if let Some(verdict) = &self.verdict {
            let _ = writeln!(text, "{verdict}");
        }
        if let Some(history) = &printed.history {
            let _ = writeln!(text, "history: {history}");
        }
        text
    }
}

/// A table of latencies in milliseconds.
pub fn latency_table<'a>(
    rows: impl Iterator<Item = (&'a String, &'a Summary)>,
) -> comfy_table::Table {
    let figure = |value: f64| format!("{value:.1}");
    let rows = rows.map(|(name, s)| {
        [
            name.clone(),
            output::count(s.n),
            figure(s.p50),
            figure(s.p90),
            figure(s.p95),
            figure(s.p99),
            figure(s.max),
        ]
    });
    output::table(&["latency, ms", "commits", "p50", "p90", "p95", "p99", "max"], rows)
}

/// A verdict as a part of the results.
pub fn check_of(verdict: &Verdict) -> Check {
    let first = verdict.anomalies.first();
    let anomaly = first.map(|anomaly| format!("{}: {}", anomaly.kind, anomaly.problem));
    let unshown = (!verdict.ok).then(|| "there are anomalies; none is shown".to_owned());
    Check { model: verdict.model.to_string(), ok: verdict.ok, anomaly: anomaly.or(unshown) }
}
