//! `compare`: several protocols under the same workload on the same topology, side by side.

mod html;
mod journey;
mod map;

use std::fs;
use std::num::ParseIntError;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use orthodrome_core::cluster::Role;
use orthodrome_core::ordered::OrdMap;
use orthodrome_eval::metrics::{RunResult, Summary};
use orthodrome_eval::workload::Reach;
use orthodrome_protocols::registry::{self, Row};
use orthodrome_sim::Failure;
use orthodrome_sim::traffic::Traffic;
use serde::Serialize;

use crate::common::{self, Placement, WorkloadArgs};
use crate::sim::{self, Course};
use crate::workers::Pool;
use crate::{Status, output};
use journey::Journey;

/// Run several protocols in the simulator under the same workload, side by side
///
/// Every protocol runs on the same cluster with the same seeds, so clients submit the same transactions at
/// the same times. With several seeds each figure is a mean with its 95 % confidence interval.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  orthodrome compare --topology azure5 --workload ycsbt:6 --rate 50
  orthodrome compare --topology ec2-5 --workload retwis --rate 200 --seeds 5 \\
      --protocols carousel-basic,carousel-fast,tapir
  orthodrome compare --topology azure5 --workload retwis --rate 200 --html report.html
  orthodrome compare --topology azure5 --workload retwis --rate 200 --json > compared.json

Exit status: 0 every run passed its checks, 1 a check failed, 2 bad usage or input.")]
pub struct Args {
    /// Protocols, by name, separated by commas; all has every protocol but those of the middleware
    #[arg(long, value_name = "all|A,B,C", default_value = "all", value_delimiter = ',')]
    protocols: Vec<String>,
    #[command(flatten)]
    placement: Placement,
    #[command(flatten)]
    workload: WorkloadArgs,
    #[command(flatten)]
    course: Course,
    /// Runs of each protocol, with consecutive seeds from --seed
    #[arg(long, value_name = "N", default_value = "1", value_parser = seeds, help_heading = "Run")]
    seeds: u64,
    /// Threads; each runs one simulation at a time [default: one per processor]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024), help_heading = "Run")]
    threads: Option<u16>,
    /// Write an HTML report to this file: tables, plots, the topology, and one transaction step by step
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// With --html: multiples of --rate or --clients for additional, shorter runs, which show the figures as functions of
    /// the offered load; 1 is always among them
    #[arg(long, value_name = "F,…", default_values_t = [0.5, 2.0, 4.0], value_delimiter = ',', value_parser = multiple)]
    loads: Vec<f64>,
    /// Print the results as one JSON object
    #[arg(long)]
    json: bool,
}

fn multiple(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(multiple) if (0.001..=1_000.0).contains(&multiple) => Ok(multiple),
        Ok(_) | Err(_) => Err("use a multiple from 0.001 to 1000, such as 0.5".into()),
    }
}

/// A number of seeds for which a confidence interval can be computed.
pub fn seeds(text: &str) -> Result<u64, String> {
    let number = text.parse().map_err(|error: ParseIntError| error.to_string())?;
    let most = STUDENT.len() as u64 + 1;
    if (1..=most).contains(&number) { Ok(number) } else { Err(format!("use 1 to {most} seeds")) }
}

/// The result that `--json` prints.
#[derive(Serialize)]
struct Printed<'a> {
    figures: &'static str,
    commit: &'static str,
    topology: &'a str,
    workload: &'a str,
    partitions: u32,
    replicas: u32,
    servers_per_region: u32,
    shares: u32,
    duration_seconds: f64,
    warmup_seconds: f64,
    wall_seconds: f64,
    protocols: &'a [Compared],
}

/// All runs of one protocol.
#[derive(Serialize)]
struct Compared {
    protocol: &'static str,
    guarantee: &'static str,
    runs: Vec<Run>,
}

/// One run of one protocol.
#[derive(Serialize)]
pub struct Run {
    #[serde(flatten)]
    pub result: RunResult,
    /// Requests that had not ended when the run did.
    pub outstanding: u32,
    /// Whether the workload's audit of the database held at the end; null if it has none.
    pub audited: Option<bool>,
    /// The promise that the run broke.
    pub failure: Option<String>,
    /// Latencies by the client's region.
    pub regions: OrdMap<String, Summary>,
    /// The distribution function of the latencies: the 2nd, 4th, … 100th percentile.
    pub cdf_ms: Vec<f64>,
    /// Network traffic of the nodes.
    pub mbit_s: MbitS,
}

/// Average traffic of one node of each role, in Mbit/s.
#[derive(Serialize)]
pub struct MbitS {
    server_sent: f64,
    server_received: f64,
    gateway_sent: f64,
    gateway_received: f64,
}

impl MbitS {
    fn new(traffic: &Traffic, measured: Duration) -> Self {
        let of = |role| traffic.of_each(role).unwrap_or_default();
        let rate = |bytes: f64| bytes * 8e-6 / measured.as_secs_f64();
        let (server, gateway) = (of(Role::Server), of(Role::Gateway));
        Self {
            server_sent: rate(server.0),
            server_received: rate(server.1),
            gateway_sent: rate(gateway.0),
            gateway_received: rate(gateway.1),
        }
    }
}

/// The results of the shorter runs with one other load.
struct Swept {
    protocol: &'static str,
    /// The offered load: transactions a second, or clients.
    load: f64,
    result: RunResult,
}

impl Args {
    /// Checks, before any run begins, the options that all runs share.
    pub fn validate(&self) -> anyhow::Result<()> {
        self.placement.cluster()?;
        self.course.options(&self.workload, self.course.seed)?;
        self.workload.workload()?;
        Ok(())
    }

    /// The course of the shorter runs.
    fn swept_course(&self) -> Course {
        // Transactions that were submitted before the leaders were elected must not count.
        let warmup = Duration::from_secs(5);
        let duration = (self.course.duration / 6).max(warmup * 2);
        Course { duration, warmup: Some(warmup), ..self.course.clone() }
    }

    /// Makes the other contents of the page (a journey for each protocol, the runs with other
    /// loads) and writes the page.
    fn write_html(&self, path: &Path, compared: &[Compared], began: Instant) -> anyhow::Result<()> {
        let cluster = self.placement.cluster()?;
        let layout = map::Layout::new(&cluster);
        let names: Vec<&'static str> = compared.iter().map(|one| one.protocol).collect();
        let mut loads: Vec<f64> = self.loads.iter().copied().chain([1.0]).collect();
        loads.sort_by(f64::total_cmp);
        loads.dedup();
        let course = self.swept_course();
        let jobs = names.len() * (loads.len() + 1);
        let job = |number: u64| {
            let (which, part) = (number as usize % names.len(), number as usize / names.len());
            let name = names.get(which).copied().unwrap_or_default();
            let Some(&multiple) = loads.get(part) else {
                return Ok((None, journey::journey(self, name, &layout)?));
            };
            let workload = self.workload.times(multiple);
            let run = simulated(&self.placement, &course, &workload, name, course.seed)?;
            let load = workload.amount();
            Ok((Some(Swept { protocol: name, load, result: run.result }), None))
        };
        let (mut swept, mut journeys) = (Vec::new(), Vec::new());
        // The journeys come last, because they are the shortest runs.
        let pool = Pool::of(self.threads);
        pool.shown("for the page", jobs as u64, job, |(run, journey)| {
            swept.extend(run);
            journeys.extend(journey);
            Ok(())
        })?;
        swept.sort_by(|a, b| a.load.total_cmp(&b.load));
        let place = |protocol| names.iter().position(|name| *name == protocol);
        journeys.sort_by_key(|journey: &Journey| place(journey.protocol));
        let report = html::Report {
            args: self,
            cluster: &cluster,
            layout: &layout,
            compared,
            swept: &swept,
            journeys: &journeys,
            remarks: &remarks(compared),
            wall_seconds: began.elapsed().as_secs_f64(),
        };
        fs::write(path, report.page()?).with_context(|| format!("--html {}", path.display()))
    }
}

/// One run of the protocol called `name`.
pub fn once(args: &Args, name: &str, seed: u64) -> anyhow::Result<Run> {
    simulated(&args.placement, &args.course, &args.workload, name, seed)
}

fn simulated(
    placement: &Placement,
    course: &Course,
    workload: &WorkloadArgs,
    name: &str,
    seed: u64,
) -> anyhow::Result<Run> {
    let subject = placement.subject(name)?;
    let cluster = placement.cluster_of(&subject)?;
    let mut simulation = course.simulation(&subject, cluster, workload, seed)?;
    let (report, failure) = sim::carry_out(&mut *simulation)?;
    Ok(Run {
        result: report.result,
        regions: report.regions,
        cdf_ms: report.cdf_ms,
        outstanding: report.outstanding,
        audited: report.audited,
        mbit_s: MbitS::new(&report.traffic, course.duration.saturating_sub(course.warmup())),
        failure: failure.as_ref().map(Failure::to_string),
    })
}

/// Runs every protocol and prints the figures side by side.
pub fn run(args: &Args) -> anyhow::Result<Status> {
    let mut compared = chosen(&args.protocols)?;
    args.validate()?;
    common::check_place("--html", args.html.as_deref())?;
    let began = Instant::now();
    let jobs = compared.len() as u64 * args.seeds;
    let names: Vec<&str> = compared.iter().map(|one| one.protocol).collect();
    // Seed by seed: after an interruption, the results so far are comparable.
    let job = |number: u64| {
        let which = (number % names.len() as u64) as usize;
        let seed = args.course.seed.wrapping_add(number / names.len() as u64);
        let name = names.get(which).context("no such protocol")?;
        Ok((which, once(args, name, seed)?))
    };
    Pool::of(args.threads).shown("simulating", jobs, job, |(which, run)| {
        compared.get_mut(which).context("no such protocol")?.runs.push(run);
        Ok(())
    })?;
    for one in &mut compared {
        one.runs.sort_by_key(|run| run.result.seed);
    }
    if let Some(path) = &args.html {
        args.write_html(path, &compared, began)?;
    }
    if args.json {
        print_json(args, &compared, began.elapsed().as_secs_f64())?;
    } else {
        output::print(&describe(args, &compared, began.elapsed().as_secs_f64()))?;
    }
    let mut runs = compared.iter().flat_map(|one| &one.runs);
    Ok(if runs.all(|run| run.failure.is_none()) { Status::Passed } else { Status::Failed })
}

/// The protocols of `--protocols`, in the registry's order.
fn chosen(names: &[String]) -> anyhow::Result<Vec<Compared>> {
    let is_known = |name: &String| orthodrome_lab::rows().any(|row| row.name == name);
    if let Some(unknown) = names.iter().find(|name| *name != "all" && !is_known(name)) {
        let known = orthodrome_lab::rows().map(|row| row.name).collect::<Vec<_>>().join(", ");
        bail!("--protocols {unknown}: unknown protocol; use all, or some of {known}");
    }
    let is_repeated = |(at, name): &(usize, &String)| names.iter().take(*at).any(|n| n == *name);
    if let Some((_, twice)) = names.iter().enumerate().find(is_repeated) {
        bail!("--protocols: names {twice} twice; name each protocol once");
    }
    // Protocols of the middleware replicate nothing, so `all` does not include them.
    let is_comparable = |row: &Row| registry::rows().any(|other| other.name == row.name);
    let wanted = |row: &&Row| {
        names.iter().any(|name| name == row.name || (name == "all" && is_comparable(row)))
    };
    let rows = orthodrome_lab::rows().filter(wanted);
    let compared = rows.map(|row| Compared {
        protocol: row.name,
        guarantee: row.guarantee.name(),
        runs: Vec::new(),
    });
    Ok(compared.collect())
}

fn print_json(args: &Args, compared: &[Compared], wall_seconds: f64) -> anyhow::Result<()> {
    let Placement { topology, partitions, replicas, servers_per_region, shares, .. } =
        &args.placement;
    output::print_json(&Printed {
        figures: "simulated",
        commit: output::COMMIT,
        topology,
        workload: &args.workload.workload,
        partitions: *partitions,
        replicas: *replicas,
        servers_per_region: *servers_per_region,
        shares: *shares,
        duration_seconds: args.course.duration.as_secs_f64(),
        warmup_seconds: args.course.warmup().as_secs_f64(),
        wall_seconds,
        protocols: compared,
    })
}

/// A column of the table: its name, its number of decimals, and the function that takes it from a
/// run.
pub type Column = (&'static str, usize, fn(&Run) -> f64);

const COLUMNS: &[Column] = &[
    ("p50 ms", 1, |run| seen(&run.result.latency_ms.all, |latency| latency.p50)),
    ("p95 ms", 1, |run| seen(&run.result.latency_ms.all, |latency| latency.p95)),
    ("p99 ms", 1, |run| seen(&run.result.latency_ms.all, |latency| latency.p99)),
    ("÷ floor", 2, |run| run.result.floor_ratio.p50),
    ("committed/s", 1, |run| run.result.committed_tps),
    ("commit rate %", 1, |run| run.result.commit_rate * 100.0),
    ("failed", 0, |run| run.result.failed as f64),
    ("WAN trips", 2, |run| run.result.wan_round_trips.mean),
    ("messages", 1, |run| run.result.messages_per_txn),
    ("bytes", 0, |run| run.result.bytes_per_txn),
];

/// Latency by priority, if transactions of both priorities ran.
const BY_PRIORITY: &[Column] = &[
    ("p50 high", 1, |run| seen(&run.result.latency_ms.high, |latency| latency.p50)),
    ("p95 high", 1, |run| seen(&run.result.latency_ms.high, |latency| latency.p95)),
    ("p50 low", 1, |run| seen(&run.result.latency_ms.low, |latency| latency.p50)),
    ("p95 low", 1, |run| seen(&run.result.latency_ms.low, |latency| latency.p95)),
];

/// Mean latency by the distance of the data, if transactions differ in it.
const BY_REACH: &[Column] = &[
    ("mean ms", 1, |run| seen(&run.result.latency_ms.all, |latency| latency.mean)),
    ("mean local", 1, |run| of_kind(run, Reach::Local)),
    ("mean close", 1, |run| of_kind(run, Reach::Close)),
    ("mean far", 1, |run| of_kind(run, Reach::Far)),
];

/// What each node sends and receives on average, in Mbit/s.
const BY_ROLE: &[Column] = &[
    ("server sends", 2, |run| run.mbit_s.server_sent),
    ("server receives", 2, |run| run.mbit_s.server_received),
    ("gateway sends", 2, |run| run.mbit_s.gateway_sent),
    ("gateway receives", 2, |run| run.mbit_s.gateway_received),
];

fn of_kind(run: &Run, reach: Reach) -> f64 {
    let kind = run.result.kinds.get(reach.name());
    kind.map_or(f64::NAN, |kind| seen(&kind.latency_ms, |latency| latency.mean))
}

/// A figure of latencies; NaN if there are none.
fn seen(summary: &Summary, figure: fn(&Summary) -> f64) -> f64 {
    if summary.n == 0 { f64::NAN } else { figure(summary) }
}

/// Every column.
pub fn columns() -> impl Iterator<Item = &'static Column> {
    COLUMNS.iter().chain(BY_PRIORITY).chain(BY_REACH).chain(BY_ROLE)
}

/// The figures as readable text.
fn describe(args: &Args, compared: &[Compared], wall_seconds: f64) -> String {
    let Placement { topology, partitions, replicas, .. } = &args.placement;
    let Course { duration, seed, .. } = &args.course;
    let seeds = match args.seeds {
        1 => format!("seed {seed}"),
        more => format!(
            "seeds {seed} to {}: mean over them ± 95 % confidence interval",
            seed.wrapping_add(more - 1)
        ),
    };
    let mut text = format!(
        "Simulated: {} on {topology}, {partitions} partitions × {replicas} replicas, \
         {}; {duration:?}, of which the first {:?} are \
         left out; {seeds}; commit {}; took {wall_seconds:.1} s\n\n",
        args.workload.workload,
        args.placement.servers(),
        args.course.warmup(),
        output::COMMIT,
    );
    text.push_str(&table(compared, COLUMNS));
    if compared.iter().flat_map(|one| &one.runs).any(has_both) {
        text.push('\n');
        text.push_str(&table(compared, BY_PRIORITY));
    }
    if compared.iter().flat_map(|one| &one.runs).any(differs_in_reach) {
        text.push('\n');
        text.push_str(&table(compared, BY_REACH));
    }
    text.push_str("\nMbit/s per node, on average\n");
    text.push_str(&table(compared, BY_ROLE));
    for remark in remarks(compared) {
        text.push_str(&format!("\n{remark}"));
    }
    text
}

/// Whether transactions of both priorities committed.
fn has_both(run: &Run) -> bool {
    run.result.latency_ms.high.n > 0 && run.result.latency_ms.low.n > 0
}

/// Whether the distance of the data differs between transactions.
fn differs_in_reach(run: &Run) -> bool {
    let kinds = Reach::ALL.iter().filter(|reach| run.result.kinds.contains_key(reach.name()));
    kinds.count() > 1
}

/// Remarks that a reader of the figures needs.
fn remarks(compared: &[Compared]) -> Vec<String> {
    let mut remarks = Vec::new();
    for one in compared {
        for Run { result, outstanding, failure, .. } in &one.runs {
            if let Some(failure) = failure {
                remarks
                    .push(format!("FAILED: {} with seed {}: {failure}", one.protocol, result.seed));
            }
            // Transactions that did not end are not in the latencies.
            if f64::from(*outstanding) > 0.01 * result.committed as f64 {
                remarks.push(format!(
                    "{} with seed {}: {} requests were still pending at the end, so the latencies are too low",
                    one.protocol,
                    result.seed,
                    output::count(u64::from(*outstanding))
                ));
            }
        }
    }
    remarks
}

fn table(compared: &[Compared], columns: &[Column]) -> String {
    let names = columns.iter().map(|(name, ..)| *name);
    let header: Vec<&str> = ["protocol"].into_iter().chain(names).collect();
    let rows = compared.iter().map(|one| {
        let cells = columns.iter().map(|(_, decimals, figure)| {
            let values: Vec<f64> = one.runs.iter().map(figure).collect();
            cell(&values, *decimals)
        });
        [one.protocol.to_owned()].into_iter().chain(cells).collect::<Vec<_>>()
    });
    format!("{}\n", output::table(&header, rows).trim_fmt())
}

/// The mean of `values`, with its confidence interval if there are several.
pub fn cell(values: &[f64], decimals: usize) -> String {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    if mean.is_nan() {
        return "–".into();
    }
    // One degree of freedom less than there are values.
    let Some(quantile) = values.len().checked_sub(2).and_then(|at| STUDENT.get(at)) else {
        return format!("{mean:.decimals$}");
    };
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    let half = quantile * (squares / (count - 1.0) / count).sqrt();
    format!("{mean:.decimals$} ± {half:.decimals$}")
}

/// Student's t for a two-sided interval of 95 %, by degrees of freedom from 1.
const STUDENT: &[f64] = &[
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_values_have_an_interval_and_one_has_none() {
        assert_eq!(cell(&[7.25], 1), "7.2");
        assert_eq!(cell(&[7.25, seen(&Summary::default(), |latency| latency.p50)], 1), "–");
        // Mean 2, standard deviation 1, so 4.303 / √3.
        assert_eq!(cell(&[1.0, 2.0, 3.0], 2), "2.00 ± 2.48");
        assert_eq!(cell(&[5.0; 30], 1), "5.0 ± 0.0");
    }

    #[test]
    fn protocols_are_named_and_unknown_ones_refused() {
        let all = chosen(&["all".into()]).unwrap();
        assert_eq!(all.len(), registry::rows().count());
        let some = chosen(&["tapir".into(), "carousel-basic".into()]).unwrap();
        let names: Vec<&str> = some.iter().map(|one| one.protocol).collect();
        assert_eq!(names, ["carousel-basic", "tapir"]);
        let error = chosen(&["tapir".into(), "paxos".into()]).err().unwrap().to_string();
        assert!(error.contains("--protocols paxos") && error.contains("carousel-fast"), "{error}");
    }
}
