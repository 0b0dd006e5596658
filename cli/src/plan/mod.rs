//! `plan`: finds the protocol and the placement of replicas and leaders that suit a topology and a load.

mod objective;
mod placement;
mod search;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail, ensure};
use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::RegionId;
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::topology::Topology;
use orthodrome_protocols::registry;
use serde::Serialize;

use crate::common::{self, Placement, WorkloadArgs};
use crate::serve::init::{self, Wish as Files};
use crate::sim::Course;
use crate::{Status, compare, output};
use objective::Objective;
use placement::{Candidate, Wish};
use search::{Found, Run, Search, Tried};

/// Find the protocol and the placement that suit a topology and a load
///
/// The planner simulates protocols at placements, which differ in the regions of leaders and replicas: many combinations
/// in short runs, the better ones in longer runs, the best with several seeds. It prints the recommendation, the
/// runner-up, the naive placement (the leader of partition i in region i, its other replicas in the following regions),
/// and the results when a region dies. --init writes the configuration files of the recommended cluster.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
A workload file can contain the load and the goal:

  workload = \"retwis\"
  origins = { VA = 3, SG = 1 }    # shares of the load by region
  [options]
  zipf = 0.9
  [goal]
  objective = \"p95-high\"
  survive = 1
  egress_price = { VA = 0.09, SG = 0.12 }    # dollars for each gigabyte that leaves the region

Examples:
  orthodrome plan --topology azure5 --workload retwis --rate 200 --objective p95-high
  orthodrome plan --topology map.toml --workload shop.toml --rate 500 --init cluster
  orthodrome plan --topology azure5 --workload smallbank --clients 400 --objective throughput --json

Exit status: 0 there is a recommendation, 1 a check failed in a run, 2 bad usage, or no protocol sustains the load.")]
pub struct Args {
    /// Protocols to choose from, by name, separated by commas
    #[arg(long, value_name = "all|A,B,C", default_value = "all", value_delimiter = ',')]
    protocols: Vec<String>,
    /// Figure to optimize: mean, p50, p95 or p99 latency, each also with -high or -low for transactions of that priority;
    /// throughput (needs --clients); egress: bytes between regions per transaction, or their price if the workload file
    /// has egress_price [default: p95]
    #[arg(long, value_name = "O")]
    objective: Option<Objective>,
    /// Number of regions that may fail without loss of data: each partition has replicas in at least 2 N + 1 regions
    /// [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=10))]
    survive: Option<u32>,
    /// Topology, the regions and the round-trip times between them: a built-in name (azure5, azure6, ec2-3, ec2-5, geotp4,
    /// local3, local5) or a TOML file
    #[arg(long, value_name = "T", help_heading = "Cluster")]
    topology: String,
    /// Number of partitions [default: the number of regions]
    #[arg(long, value_name = "N", help_heading = "Cluster", value_parser = clap::value_parser!(u32).range(1..=4096))]
    partitions: Option<u32>,
    /// Servers in each region
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Cluster",
          value_parser = clap::value_parser!(u32).range(1..=16))]
    servers_per_region: u32,
    #[command(flatten)]
    workload: WorkloadArgs,
    #[command(flatten)]
    course: Course,
    /// Runs of each finalist, with consecutive seeds from --seed
    #[arg(long, value_name = "N", default_value = "3", value_parser = compare::seeds, help_heading = "Run")]
    seeds: u64,
    /// Threads; each runs one simulation at a time [default: one per processor]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024), help_heading = "Run")]
    threads: Option<u16>,
    /// Write the configuration files of the recommended cluster, for this machine, to this new directory
    #[arg(long, value_name = "DIR")]
    init: Option<PathBuf>,
    /// With --init: first port; each node uses two
    #[arg(long, value_name = "PORT", default_value_t = 7400, requires = "init")]
    base_port: u16,
    /// Print the plan as one JSON object
    #[arg(long)]
    json: bool,
}

/// The result that `--json` prints.
#[derive(Serialize)]
struct Printed<'a> {
    figures: &'static str,
    commit: &'static str,
    topology: &'a str,
    workload: &'a str,
    objective: String,
    unit: &'static str,
    survive: u32,
    runs: usize,
    wall_seconds: f64,
    recommended: PrintedPair<'a>,
    /// The other pairs of the last round, the best first.
    runners_up: Vec<PrintedPair<'a>>,
    /// The recommended protocol with the naive placement.
    same_protocol_naive: PrintedPair<'a>,
    /// The best protocol with the naive placement.
    best_naive: PrintedPair<'a>,
    /// The recommended pair when a region dies a third into the run.
    deaths: Vec<PrintedDeath<'a>>,
}

#[derive(Serialize)]
struct PrintedPair<'a> {
    protocol: &'static str,
    placement: &'a str,
    /// The figure of the objective: the mean over the runs.
    figure: f64,
    partitions: Vec<PrintedPartition<'a>>,
    runs: &'a [Run],
}

#[derive(Serialize)]
struct PrintedPartition<'a> {
    id: String,
    leader: &'a str,
    replicas: Vec<&'a str>,
}

#[derive(Serialize)]
struct PrintedDeath<'a> {
    region: &'a str,
    #[serde(flatten)]
    run: &'a Run,
}

/// Searches for a plan and prints it.
///
/// # Errors
/// An argument is wrong, or no pair sustains the load.
pub fn run(args: &Args) -> anyhow::Result<Status> {
    // These options are for `sim` and `compare`; here they would have no effect.
    ensure!(
        args.course.faults.is_none(),
        "--faults: not used by plan, which tests region failures itself; use sim"
    );
    ensure!(args.course.mutation.is_none(), "--mutation: not used by plan; use sim");
    let map = common::topology(&args.topology)?;
    let goal = args.workload.described()?.goal;
    let objective = objective(args, goal.objective.as_deref())?;
    let prices = prices(&map, &goal.egress_price)
        .with_context(|| format!("--workload {}: goal.egress_price", args.workload.workload))?;
    let survive = args.survive.or(goal.survive).unwrap_or(1);
    let wanted = 2 * survive as usize + 1;
    ensure!(
        wanted <= map.len(),
        "--survive {survive}: needs {wanted} regions; --topology {} has {}",
        args.topology,
        map.len()
    );
    let users = users(args, &map)?;
    let placement = placement(args, &map, survive);
    if let Some(dir) = &args.init {
        let is_free = !dir.exists() || dir.read_dir().is_ok_and(|mut files| files.next().is_none());
        ensure!(
            is_free,
            "--init {}: the directory is not empty; use a new directory",
            dir.display()
        );
    }
    let began = Instant::now();
    let search = Search {
        placement: &placement,
        workload: &args.workload,
        course: &args.course,
        seeds: args.seeds,
        objective,
        prices,
        protocols: chosen(&args.protocols)?,
        wish: Wish {
            map: &map,
            users: &users,
            partitions: placement.partitions as usize,
            survive: survive as usize,
        },
        threads: args.threads,
    };
    let found = search.run()?;
    let wall = began.elapsed();
    let best = found.finalists.first().context("no combination was tried")?;
    if args.json {
        output::print_json(&plan_as_json(args, objective, (&map, survive), &found, best, wall))?;
    } else {
        output::print(&describe(args, objective, &map, &found, best, wall))?;
    }
    if let Some(dir) = &args.init {
        let cluster = placement.cluster_at(&best.pair.candidate.regions)?;
        let made = init::init(&files(args, &placement, best, &cluster, dir.clone()))?;
        if args.json {
            note!("{made}");
        } else {
            output::print(&format!("\n{made}"))?;
        }
    }
    let all = found.finalists.iter().chain([&found.naive, &found.same_naive]);
    let mut runs = all.flat_map(|tried| &tried.runs).chain(found.deaths.iter().map(|(_, run)| run));
    Ok(if runs.all(|run| run.failure.is_none()) { Status::Passed } else { Status::Failed })
}

/// The figure to optimize: from the command line, else from the workload file.
fn objective(args: &Args, of_file: Option<&str>) -> anyhow::Result<Objective> {
    let objective = match (&args.objective, of_file) {
        (Some(objective), _) => *objective,
        (None, Some(text)) => text
            .parse()
            .map_err(|problem| anyhow!("--workload {}: goal: {problem}", args.workload.workload))?,
        (None, None) => "p95".parse().map_err(|problem: String| anyhow!(problem))?,
    };
    ensure!(
        objective != Objective::Throughput || args.workload.clients.is_some(),
        "--objective throughput: needs --clients; at a fixed rate every protocol that sustains the load has the same throughput"
    );
    Ok(objective)
}

/// The share of the load that each region submits.
fn users(args: &Args, map: &Topology) -> anyhow::Result<Vec<f64>> {
    let names: Vec<&str> = map.regions().map(|region| map.name_of(region)).collect();
    let origins = args.workload.origins(&names)?;
    let share = |name: &&str| {
        origins.get(*name).copied().unwrap_or(f64::from(u8::from(origins.is_empty())))
    };
    Ok(names.iter().map(share).collect())
}

fn placement(args: &Args, map: &Topology, survive: u32) -> Placement {
    Placement {
        topology: args.topology.clone(),
        partitions: args.partitions.unwrap_or(map.len() as u32),
        replicas: 2 * survive + 1,
        servers_per_region: args.servers_per_region,
        gateways_per_region: 1,
        sources: None,
        shares: 1,
        gateways: Vec::new(),
    }
}

fn plan_as_json<'a>(
    args: &'a Args,
    objective: Objective,
    (map, survive): (&'a Topology, u32),
    found: &'a Found,
    best: &'a Tried,
    wall: Duration,
) -> Printed<'a> {
    let pair = |tried| printed(tried, objective, map);
    let death = |(region, run): &'a (RegionId, Run)| {
        let region = map.name_of(*region);
        PrintedDeath { region, run }
    };
    Printed {
        figures: "simulated",
        commit: output::COMMIT,
        topology: &args.topology,
        workload: &args.workload.workload,
        objective: objective.to_string(),
        unit: objective.unit(found.is_priced()),
        survive,
        runs: found.count,
        wall_seconds: wall.as_secs_f64(),
        recommended: pair(best),
        runners_up: found.finalists.iter().skip(1).map(pair).collect(),
        same_protocol_naive: pair(&found.same_naive),
        best_naive: pair(&found.naive),
        deaths: found.deaths.iter().map(death).collect(),
    }
}

/// The price of a gigabyte that leaves each region; empty if the file has no prices.
fn prices(map: &Topology, given: &OrdMap<String, f64>) -> anyhow::Result<OrdMap<RegionId, f64>> {
    for (name, price) in given {
        ensure!(map.region_named(name).is_some(), "{name}: the topology has no such region");
        ensure!((0.0..=1e6).contains(price), "{name}: use dollars per gigabyte, such as 0.09");
    }
    let price = |region| {
        let name = map.name_of(region);
        Ok((
            region,
            *given
                .get(name)
                .with_context(|| format!("{name} has no price; use 0 if egress is free there"))?,
        ))
    };
    if given.is_empty() { Ok(OrdMap::new()) } else { map.regions().map(price).collect() }
}

/// The protocols to choose from, among those that servers can run.
fn chosen(names: &[String]) -> anyhow::Result<Vec<&'static str>> {
    let known = || registry::rows().map(|row| row.name);
    if let Some(unknown) = names.iter().find(|name| *name != "all" && !known().any(|k| k == *name))
    {
        let known = known().collect::<Vec<_>>().join(", ");
        bail!(
            "--protocols {unknown}: servers do not run this protocol; use all, or some of {known}"
        );
    }
    let is_wanted = |known: &&str| names.iter().any(|name| name == "all" || name == known);
    Ok(known().filter(is_wanted).collect())
}

/// The cluster whose files `--init` writes.
fn files(
    args: &Args,
    placement: &Placement,
    best: &Tried,
    cluster: &Cluster,
    dir: PathBuf,
) -> Files {
    Files {
        dir,
        topology: args.topology.clone(),
        servers_per_region: args.servers_per_region,
        partitions: placement.partitions,
        replicas: best.pair.candidate.regions.first().map_or(0, |held| held.len() as u32),
        explicit: cluster.partitions().map(|partition| partition.replicas.clone()).collect(),
        protocol: best.pair.protocol.to_owned(),
        redis: false,
        tls: false,
        base_port: args.base_port,
        cluster: init::CLUSTER.into(),
        hosts: Vec::new(),
    }
}

fn printed<'a>(tried: &'a Tried, objective: Objective, map: &'a Topology) -> PrintedPair<'a> {
    let Candidate { name, regions } = &tried.pair.candidate;
    let partition = |(at, regions): (usize, &Vec<_>)| {
        let mut replicas = regions.iter().map(|region| map.name_of(*region));
        PrintedPartition {
            id: format!("p{at}"),
            leader: replicas.clone().next().unwrap_or_default(),
            replicas: replicas.by_ref().collect(),
        }
    };
    PrintedPair {
        protocol: tried.pair.protocol,
        placement: name,
        figure: objective.mean(&tried.runs),
        partitions: regions.iter().enumerate().map(partition).collect(),
        runs: &tried.runs,
    }
}

/// A column of the table: its name, its number of decimals, and the function that takes it from a
/// run.
type Column = (&'static str, usize, fn(&Run) -> f64);

const COLUMNS: &[Column] = &[
    ("p50 ms", 1, |run| run.result.latency_ms.all.p50),
    ("p95 ms", 1, |run| run.result.latency_ms.all.p95),
    ("p99 ms", 1, |run| run.result.latency_ms.all.p99),
    ("p95 high", 1, |run| run.result.latency_ms.high.p95),
    ("committed/s", 1, |run| run.result.committed_tps),
    ("WAN trips", 2, |run| run.result.wan_round_trips.mean),
    ("egress bytes", 0, |run| run.egress_bytes_per_txn),
    ("$ per million", 2, |run| run.egress_dollars.unwrap_or(f64::NAN)),
];

/// The plan as readable text.
fn describe(
    args: &Args,
    objective: Objective,
    map: &Topology,
    found: &Found,
    best: &Tried,
    wall: Duration,
) -> String {
    let Course { duration, seed, .. } = &args.course;
    let mut text = format!(
        "Planned by simulation: {} ({:.0} {}) on {}, objective {objective}; {} runs in {:.0} s, finalists with {} seeds from {seed} and \
         {duration:?} each; commit {}\n\nRecommended: {}, {}\n\n",
        args.workload.workload,
        args.workload.amount(),
        args.workload.amount_unit(),
        args.topology,
        found.count,
        wall.as_secs_f64(),
        args.seeds,
        output::COMMIT,
        best.pair.protocol,
        best.pair.candidate.name,
    );
    let rows = best.pair.candidate.regions.iter().enumerate().map(|(at, regions)| {
        let names: Vec<&str> = regions.iter().map(|region| map.name_of(*region)).collect();
        let (leader, others) = names.split_first().map_or(("", &[][..]), |(a, b)| (*a, b));
        vec![format!("p{at}"), leader.to_owned(), others.join(", ")]
    });
    let table = output::table(&["partition", "leader", "other replicas"], rows);
    text.push_str(&format!("{}\n\n", table.trim_fmt()));
    text.push_str(&format!("{}\n\n", comparison(found)));
    for line in reasons(objective, found, best) {
        text.push_str(&format!("{line}\n"));
    }
    if !found.deaths.is_empty() {
        text.push_str(&format!(
            "\nWhen all nodes of a region fail and stay down:\n{}\n",
            deaths(map, found)
        ));
    }
    if args.init.is_none() {
        text.push_str("\n--init DIR writes the configuration files of this cluster.");
    }
    text
}

/// A table of the finalists and of the naive placements.
fn comparison(found: &Found) -> String {
    let header: Vec<&str> =
        ["protocol", "placement"].into_iter().chain(COLUMNS.iter().map(|c| c.0)).collect();
    let row = |tried: &Tried| {
        let cells = COLUMNS.iter().map(|(_, decimals, figure)| {
            let values: Vec<f64> = tried.runs.iter().map(figure).collect();
            compare::cell(&values, *decimals)
        });
        let pair = &tried.pair;
        [pair.protocol.to_owned(), pair.candidate.name.clone()]
            .into_iter()
            .chain(cells)
            .collect::<Vec<_>>()
    };
    let mut shown: Vec<&Tried> = found.finalists.iter().collect();
    for naive in [&found.same_naive, &found.naive] {
        if shown.iter().all(|tried| tried.pair != naive.pair) {
            shown.push(naive);
        }
    }
    output::table(&header, shown.into_iter().map(row)).trim_fmt()
}

/// A table of the recommended pair's figures when a region dies.
fn deaths(map: &Topology, found: &Found) -> String {
    let rows = found.deaths.iter().map(|(region, run)| {
        let result = &run.result;
        let submitted = result.committed + result.failed + u64::from(run.outstanding);
        vec![
            map.name_of(*region).to_owned(),
            output::percent(result.committed, submitted),
            format!("{:.1}", result.latency_ms.all.p50),
            format!("{:.1}", result.latency_ms.all.p95),
            format!("{:.1}", result.latency_ms.all.max / 1e3),
            run.failure.clone().unwrap_or_else(|| "passed".into()),
        ]
    });
    let header = ["region", "committed", "p50 ms", "p95 ms", "max s", "checks"];
    output::table(&header, rows).trim_fmt()
}

/// The reasons for the recommendation.
fn reasons(objective: Objective, found: &Found, best: &Tried) -> Vec<String> {
    let figure = |tried: &Tried| {
        let value = objective.mean(&tried.runs);
        format!("{value:.1} {}", objective.unit(found.is_priced()))
    };
    let trips = |tried: &Tried| {
        let sum: f64 = tried.runs.iter().map(|run| run.result.wan_round_trips.mean).sum();
        sum / tried.runs.len() as f64
    };
    let against = |what: &str, other: &Tried| {
        format!(
            "{what}: {}, {}: {}; the recommendation is {:.2} times better, with {:.2} instead of {:.2} WAN round trips",
            other.pair.protocol,
            other.pair.candidate.name,
            figure(other),
            objective.ratio(&best.runs, &other.runs),
            trips(best),
            trips(other)
        )
    };
    let mut lines = vec![format!("Why: {objective} {}", figure(best))];
    let another = |tried: &&Tried| tried.pair.protocol != best.pair.protocol;
    let others = || found.finalists.iter().skip(1);
    lines.extend(others().next().map(|other| against("Runner-up", other)));
    if others().next().is_some_and(|other| !another(&other)) {
        lines.extend(others().find(another).map(|other| against("Best other protocol", other)));
    }
    lines.push(against("Same protocol, placed naively", &found.same_naive));
    if found.naive.pair != found.same_naive.pair {
        lines.push(against("Best protocol, placed naively", &found.naive));
    }
    lines
}
