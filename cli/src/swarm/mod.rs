//! `swarm`: many simulated runs; the seed decides the cluster, the load and the faults of each.

mod keep;
mod seeds;
mod tally;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail};
use orthodrome_lab::Subject;
use orthodrome_sim::swarm::{FaultProfile, SeedResult, SwarmError, SwarmOptions, Unusual};
use serde::Serialize;

use crate::workers::Pool;
use crate::{Status, output, sim};
use keep::Kept;
use seeds::Seeds;
use tally::Tally;

/// Run many random clusters under random faults and check the protocol's guarantees
///
/// Each seed decides a topology, a cluster, a workload, models of network, clocks, disks and processors,
/// and a fault schedule. The swarm checks safety during the faults and liveness after they have healed:
/// every transaction must end. It checks every history. An unusual draw is a setting that few seeds
/// have. When a seed fails, the swarm shrinks the run to few unusual draws, faults and transactions,
/// and writes it to a folder, with the command that repeats it.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  orthodrome swarm                                            # every protocol, 200 seeds
  orthodrome swarm --protocol carousel-basic --seeds 0..10000 --twice
  orthodrome swarm --protocol carousel-basic --minutes 30 --json
  orthodrome swarm --protocol carousel-basic --mutation NAME --trials 20

Kinds of failures: panic (an assertion failed), promise (safety violated), stuck (liveness failed),
claim (contradictory claims of nodes), limit (size limit exceeded), history (history check failed),
twins (two runs of one seed differ).
A seed gives the same run only at the same commit.
Exit status: 0 no seed failed (with --mutation: the mutation was caught, in every trial), 1 otherwise,
2 bad usage.")]
pub struct Args {
    /// Protocol, by name [default: all protocols, one after the other]
    #[arg(long, value_name = "P")]
    protocol: Option<String>,
    /// Range of seeds, from A to B - 1 [default: 0..200; with --minutes: all seeds from 0]
    #[arg(long, value_name = "A..B")]
    seeds: Option<Seeds>,
    /// Time limit for each protocol, in minutes; the swarm starts no seed after it
    #[arg(long, value_name = "M", value_parser = minutes)]
    minutes: Option<Duration>,
    /// Run every seed twice and compare the traces; they must be equal
    #[arg(long)]
    twice: bool,
    /// Threads; each runs one simulation at a time [default: one per processor]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Stop after this many failed seeds
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
    failures_max: u64,
    /// Folder for the traces, histories and fault schedules of failed seeds
    #[arg(long, value_name = "FOLDER", default_value = "failures")]
    failures: PathBuf,
    /// Enable an injected bug: a mutation of the protocol, by its name in docs/protocols/. The swarm stops at the first
    /// seed that catches it
    #[arg(
        long,
        value_name = "NAME",
        requires = "protocol",
        help_heading = "Testing the swarm itself"
    )]
    mutation: Option<String>,
    /// Number of trials: each looks for the mutation with other seeds, at most as many as --seeds has. Prints the median
    /// number of seeds until the mutation was caught
    #[arg(long, value_name = "N", requires = "mutation", conflicts_with_all = ["twice", "minutes"], help_heading = "Testing the swarm itself", value_parser = clap::value_parser!(u64).range(1..=100_000))]
    trials: Option<u64>,
    /// Fault profile of every seed [default: each seed draws one]
    #[arg(long, value_name = "NAME", value_parser = profile)]
    profile: Option<FaultProfile>,
    /// Repeat a failed seed with the faults in this file (TOML) instead of the seed's own; needs --seeds with one seed
    #[arg(long, value_name = "FILE", requires_all = ["seeds", "protocol"], conflicts_with_all = ["trials", "minutes", "twice"], help_heading = "Repeating a failure")]
    schedule: Option<PathBuf>,
    /// With --schedule: maximum number of transactions
    #[arg(long, value_name = "N", requires = "schedule", help_heading = "Repeating a failure")]
    transactions: Option<u64>,
    /// Ignore these unusual draws of the seed; the file of a failure names those that the failure does not need
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_parser = unusual, help_heading = "Repeating a failure")]
    without: Vec<Unusual>,
    /// Print the results as one JSON object
    #[arg(long)]
    json: bool,
}

fn unusual(name: &str) -> Result<Unusual, String> {
    let known = || Unusual::ALL.map(Unusual::name).join(", ");
    Unusual::named(name).ok_or_else(|| format!("use some of {}", known()))
}

fn profile(name: &str) -> Result<FaultProfile, String> {
    let known = || FaultProfile::ALL.map(FaultProfile::name).join(", ");
    FaultProfile::named(name).ok_or_else(|| format!("use one of {}", known()))
}

fn minutes(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(minutes) if minutes > 0.0 && minutes <= 1e6 => {
            Ok(Duration::from_secs_f64(minutes * 60.0))
        }
        Ok(_) | Err(_) => Err("use a number of minutes above 0, at most 1000000".into()),
    }
}

/// The result that `--json` prints.
#[derive(Serialize)]
struct Printed<'a> {
    figures: &'static str,
    commit: &'static str,
    ok: bool,
    protocols: &'a [Tally],
}

/// Runs the swarm and prints the results.
pub fn run(args: &Args) -> anyhow::Result<Status> {
    let names: Vec<&str> = match &args.protocol {
        Some(name) => vec![name.as_str()],
        None => orthodrome_lab::rows()
            .map(|row| row.name)
            .filter(|name| !orthodrome_lab::NOT_ATOMIC.contains(name))
            .collect(),
    };
    let mut tallies = Vec::new();
    for name in names {
        let subject = orthodrome_lab::find(name).map_err(|error| anyhow!("--protocol: {error}"))?;
        tallies.push(examine(args, &subject)?);
    }
    let ok = tallies.iter().all(Tally::is_ok);
    if args.json {
        let commit = output::COMMIT;
        output::print_json(&Printed { figures: "simulated", commit, ok, protocols: &tallies })?;
    } else {
        output::print(&tally::describe(&tallies))?;
    }
    Ok(if ok { Status::Passed } else { Status::Failed })
}

fn examine(args: &Args, subject: &Subject) -> anyhow::Result<Tally> {
    let row = subject.row;
    if let Some(mutation) = &args.mutation
        && !subject.mutations.contains(&mutation.as_str())
    {
        let known = subject.mutations.join(", ");
        bail!("--mutation {mutation}: {} has no such mutation; it has {known}", row.name);
    }
    let options = SwarmOptions {
        model: subject.model(),
        mutation: args.mutation.clone(),
        profile: args.profile,
        twins: args.twice,
        without: args.without.iter().copied().collect(),
        ..SwarmOptions::of(row.name)
    };
    if args.schedule.is_some() {
        return repeat(args, subject, &options);
    }
    match args.trials {
        Some(trials) => find_often(args, subject, options, trials),
        None => seek(args, subject, &options),
    }
}

/// Runs the seeds of the range.
fn seek(args: &Args, subject: &Subject, options: &SwarmOptions) -> anyhow::Result<Tally> {
    let seeds = args.seeds.unwrap_or(match args.minutes {
        Some(_) => Seeds { first: 0, end: u64::MAX },
        None => Seeds { first: 0, end: 200 },
    });
    let mut tally = Tally::new(options.name, args.mutation.as_deref(), args.twice);
    let length = (seeds.end != u64::MAX).then(|| seeds.len());
    let bar = progress(options.name, length)?;
    let failures_max = if args.mutation.is_some() { 1 } else { args.failures_max };
    let pool = Pool { threads: args.threads, minutes: args.minutes };
    let began = Instant::now();
    let mut problem = None;
    pool.run(
        seeds.first..seeds.end,
        |seed| probe(subject, seed, options),
        |result| {
            bar.inc(1);
            match result
                .map_err(anyhow::Error::from)
                .and_then(|r| take(args, subject, options, &mut tally, r))
            {
                Ok(()) => {}
                Err(error) => drop(problem.get_or_insert(error)),
            }
            bar.set_message(tally.in_brief());
            problem.is_none() && (tally.failures.len() as u64) < failures_max
        },
    );
    bar.finish_and_clear();
    tally.wall_seconds = began.elapsed().as_secs_f64();
    tally.failures.sort_by_key(|failure| failure.seed);
    problem.map_or(Ok(tally), Err)
}

/// The result of one seed.
#[derive(Debug)]
struct Probed {
    result: SeedResult,
    /// The seed failed with a mutation, but it also fails without it. So the failure does not count
    /// as a catch.
    fails_anyway: bool,
}

impl Probed {
    fn is_caught(&self) -> bool {
        self.result.found.is_some() && !self.fails_anyway
    }
}

/// Runs a seed. If it fails with a mutation, runs it again without the mutation.
fn probe(subject: &Subject, seed: u64, options: &SwarmOptions) -> Result<Probed, SwarmError> {
    if options.mutation.is_none() {
        return Ok(Probed { result: subject.run_seed(seed, options)?, fails_anyway: false });
    }
    let quick = SwarmOptions { shrink_budget: 0, ..options.clone() };
    let result = subject.run_seed(seed, &quick)?;
    if result.found.is_none() {
        return Ok(Probed { result, fails_anyway: false });
    }
    let safe = SwarmOptions { mutation: None, ..quick };
    let fails_anyway = subject.run_seed(seed, &safe)?.found.is_some();
    let is_final = fails_anyway || options.shrink_budget == 0;
    let result = if is_final { result } else { subject.run_seed(seed, options)? };
    Ok(Probed { result, fails_anyway })
}

/// Adds a seed to the tally, and keeps it if it failed.
fn take(
    args: &Args,
    subject: &Subject,
    options: &SwarmOptions,
    tally: &mut Tally,
    Probed { result, fails_anyway }: Probed,
) -> anyhow::Result<()> {
    tally.add(&result, fails_anyway);
    if let Some(found) = result.found.as_ref().filter(|_| !fails_anyway) {
        tally.failures.push(Kept::write(&args.failures, subject, found, options)?);
    }
    Ok(())
}

/// Runs the trials: each counts how many seeds it takes until one fails.
fn find_often(
    args: &Args,
    subject: &Subject,
    mut options: SwarmOptions,
    trials: u64,
) -> anyhow::Result<Tally> {
    // Trials only need to know whether a seed fails, so nothing is shrunk.
    options.shrink_budget = 0;
    let seeds = args.seeds.unwrap_or(Seeds { first: 0, end: 1_000 });
    let span = seeds.len();
    if span.checked_mul(trials).and_then(|all| all.checked_add(seeds.first)).is_none() {
        bail!(
            "--trials {trials}: too many trials for this range of --seeds; use a smaller range or fewer trials"
        );
    }
    let mut tally = Tally::new(options.name, args.mutation.as_deref(), false);
    let bar = progress(options.name, Some(trials))?;
    let pool = Pool { threads: args.threads, minutes: None };
    let began = Instant::now();
    let mut problem = None;
    let trial = |number: u64| {
        let first = seeds.first + number * span;
        let mut results = Vec::new();
        for seed in first..first + span {
            results.push(probe(subject, seed, &options)?);
            if results.last().is_some_and(Probed::is_caught) {
                break;
            }
        }
        Ok(results)
    };
    pool.run(0..trials, trial, |results: Result<Vec<Probed>, SwarmError>| {
        bar.inc(1);
        match results {
            Ok(results) => tally.add_trial(&results),
            Err(error) => drop(problem.get_or_insert(anyhow::Error::from(error))),
        }
        bar.set_message(tally.in_brief());
        problem.is_none()
    });
    bar.finish_and_clear();
    tally.wall_seconds = began.elapsed().as_secs_f64();
    problem.map_or(Ok(tally), Err)
}

/// Repeats a failure from its files.
fn repeat(args: &Args, subject: &Subject, options: &SwarmOptions) -> anyhow::Result<Tally> {
    let Some((seeds, path)) = args.seeds.zip(args.schedule.as_deref()) else {
        bail!("--schedule: needs --seeds with one seed, such as 5..6");
    };
    if seeds.len() != 1 {
        bail!(
            "--seeds {seeds}: --schedule repeats one seed; use {0}..{1}",
            seeds.first,
            seeds.first.saturating_add(1)
        );
    }
    let mut scenario = subject.draw(seeds.first, options)?;
    scenario.schedule = sim::schedule("--schedule", path)?;
    if let Some(transactions) = args.transactions {
        scenario.options.load.transactions_max = transactions;
    }
    let mut tally = Tally::new(options.name, args.mutation.as_deref(), false);
    let began = Instant::now();
    let result = subject
        .record(&scenario, options, None, None)
        .map_err(|error| anyhow!("{}: {error}", path.display()))?;
    tally.wall_seconds = began.elapsed().as_secs_f64();
    tally.add_scenario(&result);
    if let Some(failure) = &result.failure {
        let folder = path.parent().unwrap_or(path).to_owned();
        tally.failures.push(Kept::new(&scenario, failure, folder, options));
    }
    Ok(tally)
}

fn progress(name: &str, length: Option<u64>) -> anyhow::Result<indicatif::ProgressBar> {
    let of = if length.is_some() { "/{len} {bar:20}" } else { "" };
    output::progress(length, &format!("{{spinner}} {name}: {{pos}}{of} {{per_sec}} {{msg}}"))
}
