//! `demo`: five regions on one machine, in one command; one of them fails and comes back.

mod middleware;
mod planet;
mod view;

use std::fmt::Write as _;
use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::topology::Topology;
use orthodrome_core::{Cluster, RegionId};
use orthodrome_eval::checker::{Model, Verdict};
use orthodrome_eval::metrics::{Check, FloorRatio, LatencyMs, Run, RunResult, Summary};
use orthodrome_eval::workload::{self, Form, Options, Workload};
use orthodrome_protocols::registry;
use orthodrome_sim::floor::Floor;
use orthodrome_sim::load::Origins;
use serde::Serialize;
use tokio::runtime::Runtime;

use crate::load::driver::{Audit, Driver, Pace, Plan, Shared, Site};
use crate::load::results::{Results, Watched};
use crate::load::{check_of, latency_table};
use crate::style::Style;
use crate::{Status, check, common, output, protocols, shell};
use planet::Planet;
use view::{Phase, View};

/// The topology of the demonstration.
const TOPOLOGY: &str = "azure5";
const PARTITIONS: u32 = 5;
const REPLICAS: u32 = 3;
/// Number of accounts in the bank.
const ACCOUNTS: u64 = 900;
/// Number of lists in use at a time: few enough that clients conflict, and enough that they do not
/// queue.
const LISTS: u64 = 200;
/// Time limit for the shutdown of the nodes.
const SHUTDOWN: Duration = Duration::from_secs(3);

/// Run a cluster of five regions on this machine; one region fails and comes back.
///
/// Five nodes with real sockets and files run in this process. Messages between them are delayed by the
/// round-trip times of five Azure regions. Clients in each region transfer money between accounts and
/// append to lists. After a third of the time one region is killed; after two thirds it is restarted. At
/// the end the demonstration counts the money and checks the history of the clients.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  orthodrome demo
  orthodrome demo --seconds 60 --dir /tmp/demo
  orthodrome demo --no-fault --json
  orthodrome demo --no-fault --rising --clients 60
  orthodrome demo --seconds 5 --no-fault --shell
  orthodrome demo --middleware

Exit status: 0 every check passed, 1 a check or a command of the shell failed, 2 the demonstration could not run.")]
pub struct Args {
    /// Protocol that commits the transactions
    #[arg(long, value_name = "P", default_value = protocols::DEFAULT)]
    protocol: String,
    /// Demonstrate the middleware instead: a proxy over four private PostgreSQL and MariaDB servers, with the round-trip
    /// times of Beijing, Shanghai, Singapore and London. It kills a server, then the proxy
    #[arg(long, conflicts_with_all = ["protocol", "rising"])]
    middleware: bool,
    /// How long clients submit transactions, in seconds
    #[arg(long, value_name = "N", default_value_t = 30, value_parser = clap::value_parser!(u64).range(3..=3_600))]
    seconds: u64,
    /// Kill no region; with --middleware, kill no server and no proxy
    #[arg(long)]
    no_fault: bool,
    /// Clients in each region, half of them for each of the two workloads; with --middleware: clients of the proxy
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    clients: u32,
    /// Start the clients one after the other until the end; the live table shows how latency changes for transactions of
    /// high priority as the load rises
    #[arg(long)]
    rising: bool,
    /// After the results, leave the regions running and open a shell on them, until `quit` or Ctrl-D
    #[arg(long, conflicts_with_all = ["middleware", "json"])]
    shell: bool,
    /// New directory for data and history [default: a temporary directory]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Print the results as one JSON object
    #[arg(long)]
    json: bool,
}

/// The result that `--json` prints.
#[derive(Serialize)]
struct Printed {
    protocol: String,
    topology: &'static str,
    /// Latencies in milliseconds by the client's region.
    regions: OrdMap<String, Summary>,
    committed: u64,
    /// Transactions that committed between the kill and the restart of the region; null without a
    /// fault.
    committed_during_outage: Option<u64>,
    /// The longest time that a surviving region went without a commit after the kill, in
    /// milliseconds; null without a fault.
    recovery_ms: Option<f64>,
    killed: Option<String>,
    latency_ms: LatencyMs,
    floor_ratio: FloorRatio,
    commit_rate: f64,
    failed: u64,
    unknown: u64,
    total_ok: bool,
    check: Check,
    findings: Vec<String>,
    seconds: f64,
    history: String,
    data: String,
    measured: bool,
    commit: &'static str,
}

/// Runs the demonstration.
///
/// # Errors
/// It could not run.
pub fn run(args: &Args) -> anyhow::Result<Status> {
    if args.middleware {
        let dir = common::directory(args.dir.as_deref(), "demo")?;
        return middleware::run(&middleware::Wish {
            seconds: args.seconds,
            clients: args.clients,
            no_fault: args.no_fault,
            json: args.json,
            dir: &dir,
        });
    }
    let row = registry::find(&args.protocol).context("--protocol")?;
    let model = protocols::model(row.name)?;
    let dir = common::directory(args.dir.as_deref(), "demo")?;
    let runtime = Runtime::new().context("cannot start the runtime")?;
    let (seen, planet) = runtime.block_on(show(args, row.name, &dir))?;
    let running = if args.shell {
        Some((runtime, planet))
    } else {
        end(runtime, planet);
        None
    };
    seen.shared.results().finish_history()?;
    let verdict = check::judge(&history(&dir), model)?;
    let printed = seen.print(args, row.name, &dir, &verdict);
    let is_kept = printed.total_ok && verdict.ok && printed.findings.is_empty();
    if args.json {
        output::print_json(&printed)?;
    } else {
        output::print(&summary(&printed, &verdict, model))?;
    }
    let is_good = match running {
        Some((runtime, planet)) => stay(runtime, planet, &seen.regions)?,
        None => true,
    };
    Ok(if is_kept && is_good { Status::Passed } else { Status::Failed })
}

fn end(runtime: Runtime, planet: Planet) {
    runtime.block_on(planet.shutdown(SHUTDOWN));
    // Threads of killed nodes may still be ending.
    runtime.shutdown_background();
}

fn history(dir: &Path) -> PathBuf {
    dir.join("history.jsonl")
}

fn cluster() -> anyhow::Result<Cluster> {
    let map =
        Topology::built_in(TOPOLOGY).context("the topology of the demonstration is missing")?;
    Ok(Cluster::spread(map, 1, 1, PARTITIONS, REPLICAS)?)
}

fn workloads() -> anyhow::Result<Vec<Box<dyn Workload>>> {
    let form = Some(Form::Mixed);
    // The bank is audited only at the end: a transaction that reads every account while transfers
    // run would mostly wait for them.
    let bank = Options { form, keys: Some(ACCOUNTS), read_only: Some(0.0), ..Options::default() };
    let lists = Options { form, keys: Some(LISTS), ..Options::default() };
    Ok(vec![workload::parse("bank", &bank)?, workload::parse("list-append", &lists)?])
}

/// The observations of the run.
struct Seen {
    shared: Arc<Shared>,
    audits: Vec<Audit>,
    measured: Duration,
    regions: Vec<String>,
    outage: Option<Outage>,
}

struct Outage {
    region: String,
    /// Observations from the kill to the restart.
    during: Watched,
}

/// Starts the nodes and the clients, kills and restarts a region, and shuts down.
async fn show(args: &Args, protocol: &'static str, dir: &Path) -> anyhow::Result<(Seen, Planet)> {
    let map = cluster()?;
    let names: Vec<String> =
        map.topology.regions().map(|r| map.topology.name_of(r).to_owned()).collect();
    note!(
        "Starting {} regions ({}) with {PARTITIONS} partitions × {REPLICAS} replicas, {}.",
        names.len(),
        names.join(", "),
        protocol
    );
    let mut planet = Planet::start(protocol, map.clone(), &dir.join("data")).await?;
    planet.ready().await?;
    let regions: Vec<RegionId> = map.topology.regions().collect();
    let third = Duration::from_secs(args.seconds) / 3;
    let site = |&region: &RegionId| Site { region, config: planet.config(region) };
    let driver = Driver::start(Plan {
        sites: regions.iter().map(site).collect(),
        origins: Origins::new(vec![1.0; regions.len()]),
        workloads: workloads()?,
        clients: args.clients * u32::try_from(regions.len()).unwrap_or(1),
        pace: if args.rising { Pace::Rising(third * 3) } else { Pace::Closed },
        seed: 1,
        prefix: Some(String::new()),
        regions: names.clone(),
        floor: Some(Floor::new(&map)),
        results: Results::create(Some(&history(dir)))?,
    })
    .await?;
    let shared = Arc::clone(driver.shared());
    let style = Style::new(std::io::stderr().is_terminal());
    let mut view = View::new(Arc::clone(&shared), names.clone(), args.seconds, style);
    let outage = if args.no_fault {
        view.follow(third * 3, Phase::Calm).await;
        None
    } else {
        break_and_mend(&mut planet, &mut view, &regions, third).await?
    };
    let measured = shared.started.elapsed();
    view.end("Waiting for pending transactions, then counting the money.");
    let (shared, audits) = driver.finish().await;
    Ok((Seen { shared, audits, measured, regions: names, outage }, planet))
}

/// Opens a shell on the regions, which run until it ends; true if every command succeeded.
fn stay(runtime: Runtime, planet: Planet, names: &[String]) -> anyhow::Result<bool> {
    let mut text = String::from("\nThe regions are still running. Their gateways:\n");
    for (name, (_, address)) in names.iter().zip(planet.gateways()) {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "  {name:<4} {address}");
    }
    let (first, _) = planet.gateways().next().context("no region is running")?;
    let name = names.first().map_or("", String::as_str);
    let _ = writeln!(
        text,
        "This shell uses the gateway of {name}. `help` lists its commands; `quit` or Ctrl-D ends it."
    );
    output::print(&text)?;
    let ended = shell::open(planet.config(first));
    end(runtime, planet);
    ended
}

/// Three phases of a third each: all regions, one dead, all again.
async fn break_and_mend(
    planet: &mut Planet,
    view: &mut View,
    regions: &[RegionId],
    third: Duration,
) -> anyhow::Result<Option<Outage>> {
    let Some(&victim) = regions.first() else { return Ok(None) };
    if !view.follow(third, Phase::Calm).await {
        return Ok(None);
    }
    let shared = Arc::clone(view.shared());
    let survivors = regions.iter().copied().filter(|&region| region != victim);
    shared.results().watch(survivors);
    planet.kill(victim).await;
    let goes_on = view.follow(third, Phase::Outage(victim)).await;
    let during = shared.results().end_watch().unwrap_or_default();
    if goes_on {
        planet.restart(victim).await?;
        view.follow(third, Phase::Back(victim, during)).await;
    }
    Ok(Some(Outage { region: shared.region_name(victim).to_owned(), during }))
}

impl Seen {
    fn print(&self, args: &Args, protocol: &str, dir: &Path, verdict: &Verdict) -> Printed {
        let results = self.shared.results();
        let run = Run { measured: self.measured, wall: self.measured, ..Run::default() };
        let result = RunResult::new(run, &results.latencies, &results.counters, None);
        let audits = self.audits.iter().filter_map(|audit| {
            audit.problem.as_ref().map(|problem| format!("{}: {problem}", audit.workload))
        });
        let outage = self.outage.as_ref();
        let recovery = outage.map(|outage| outage.during.longest_silence);
        Printed {
            protocol: protocol.into(),
            topology: TOPOLOGY,
            regions: results.latencies.by_region(self.regions.iter().map(String::as_str)),
            committed: result.committed,
            committed_during_outage: outage.map(|outage| outage.during.committed),
            recovery_ms: recovery.map(|gap| (gap.as_secs_f64() * 1e6).round() / 1e3),
            killed: outage.map(|outage| outage.region.clone()),
            latency_ms: result.latency_ms,
            floor_ratio: result.floor_ratio,
            commit_rate: result.commit_rate,
            failed: result.failed,
            unknown: results.unknown,
            total_ok: self.audits.iter().all(|audit| audit.problem.is_none()),
            check: check_of(verdict),
            findings: results.findings().into_iter().chain(audits).collect(),
            seconds: args.seconds.min(self.measured.as_secs_f64().round() as u64) as f64,
            history: history(dir).display().to_string(),
            data: dir.join("data").display().to_string(),
            measured: true,
            commit: output::COMMIT,
        }
    }
}

/// The summary for people.
fn summary(printed: &Printed, verdict: &Verdict, model: Model) -> String {
    let style = Style::new(std::io::stdout().is_terminal());
    let mut text = String::new();
    let tick = |ok: bool| if ok { style.good("✔") } else { style.error("✘") };
    // Writing to a string cannot fail.
    let _ = writeln!(
        text,
        "\n{} on {} ({} regions on this machine, emulated round-trip times; measured)",
        style.bold(&printed.protocol),
        printed.topology,
        printed.regions.len()
    );
    let LatencyMs { all, high, low } = printed.latency_ms;
    let totals = [("high priority", high), ("low priority", low), ("all", all)]
        .map(|(name, summary)| (name.to_owned(), summary));
    let rows = printed.regions.iter().chain(totals.iter().map(|(name, summary)| (name, summary)));
    let _ = writeln!(text, "{}", latency_table(rows.filter(|(_, summary)| summary.n > 0)));
    let _ = writeln!(
        text,
        "  Latency ÷ latency floor: {:.2} (median), {:.2} (p95)",
        printed.floor_ratio.p50, printed.floor_ratio.p95
    );
    if let (Some(killed), Some(committed), Some(recovery)) =
        (&printed.killed, printed.committed_during_outage, printed.recovery_ms)
    {
        let _ = writeln!(
            text,
            "  While {killed} was down: {} commits; longest time without a commit in another region: \
             {recovery:.0} ms",
            output::count(committed)
        );
    }
    let _ = writeln!(
        text,
        "{} Sum over all accounts: {}",
        tick(printed.total_ok),
        if printed.total_ok { "correct, no money was created or lost" } else { "WRONG" }
    );
    let checked = verdict.transactions;
    let _ = writeln!(
        text,
        "{} The history of {} attempts {} {model}",
        tick(verdict.ok),
        output::count(checked.ok + checked.fail + checked.info),
        if verdict.ok { "is" } else { "is NOT" },
    );
    if !verdict.ok {
        let _ = writeln!(text, "{verdict}");
    }
    for finding in &printed.findings {
        let _ = writeln!(text, "{} {finding}", style.error("✘"));
    }
    let _ = writeln!(text, "\n  history  {}\n  data     {}", printed.history, printed.data);
    let _ = writeln!(
        text,
        "{}",
        style.dim(&format!(
            "  repeat the check: orthodrome check {} --model {model}",
            printed.history
        ))
    );
    text
}
