//! `reproduce`: published figures, measured again in the simulator and held against what their
//! authors reported.

mod experiment;
mod html;
mod verdict;

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context as _, bail};
use orthodrome_eval::metrics::OfKind;
use orthodrome_eval::plot::{Figure, Series};
use serde::Serialize;

use crate::compare;
use crate::workers::Pool;
use crate::{Status, output};
use experiment::{Claim, Experiment};
use verdict::{Judged, Measured, Verdict};

/// Measure published figures again, and hold them against what their authors reported
///
/// Each figure is a file of `experiments/`: a `compare` with one of its options swept, and the
/// values the paper gives. Figures are run in a short form (fewer points, shorter runs) unless
/// --full is given; every point can be run alone with the command that is printed.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  orthodrome reproduce list
  orthodrome reproduce C4
  orthodrome reproduce N7a --full --seeds 3 --html n7a.html
  orthodrome reproduce all --json > figures.json

Exit status: 0 every claim agrees or its difference is explained, 1 one differs or a run lost its
promise, 2 bad usage or input.")]
pub struct Args {
    /// list, all, or figures by id and separated by commas
    #[arg(value_name = "list|ID|all", default_value = "list", value_delimiter = ',')]
    figures: Vec<String>,
    /// Runs of each point: this many seeds, counted up from 1
    #[arg(long, value_name = "N", default_value = "1", value_parser = compare::seeds)]
    seeds: u64,
    /// Every point of the paper's figure, and runs as long as the paper's
    #[arg(long)]
    full: bool,
    /// Threads, each with one simulation at a time [default: one for each processor]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Write a page with tables, plots and verdicts to this file
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Write each figure as ID.svg into this folder
    #[arg(long, value_name = "FOLDER")]
    plots: Option<PathBuf>,
    /// Print the figures as one JSON object
    #[arg(long)]
    json: bool,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Printed<'a> {
    figures: &'static str,
    commit: &'static str,
    full: bool,
    seeds: u64,
    wall_seconds: f64,
    experiments: Vec<PrintedExperiment<'a>>,
}

#[derive(Serialize)]
struct PrintedExperiment<'a> {
    id: &'a str,
    source: &'a str,
    title: &'a str,
    column: &'a str,
    swept: &'a str,
    absent: Vec<&'a str>,
    points: &'a [Point],
    claims: &'a [Judged],
    failures: &'a [String],
}

/// All runs of one protocol with one value of what is swept.
#[derive(Serialize)]
struct Point {
    protocol: &'static str,
    at: f64,
    /// The figure, by seed.
    values: Vec<f64>,
    /// Other figures that claims speak of, by the names of their columns.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    others: BTreeMap<String, Vec<f64>>,
    /// Latencies by how far transactions reach, of the first seed; where they differ in that.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    kinds: BTreeMap<String, OfKind>,
    /// Requests that had not ended when their runs did, as a share of all.
    outstanding: f64,
    #[serde(skip)]
    requests: f64,
}

impl Point {
    /// One of its columns, by seed.
    fn figures(&self, column: &str) -> &[f64] {
        self.others.get(column).unwrap_or(&self.values)
    }

    /// The distribution function of its latencies, whatever their kind: shares in per cent, and milliseconds.
    fn distribution(&self) -> Vec<(f64, f64)> {
        let of = |kind: &OfKind| {
            let weight = kind.latency_ms.n as f64 / kind.cdf_ms.len().max(1) as f64;
            kind.cdf_ms.iter().map(|&ms| (ms, weight)).collect::<Vec<_>>()
        };
        let mut steps: Vec<(f64, f64)> = self.kinds.values().flat_map(of).collect();
        steps.sort_by(|a, b| a.0.total_cmp(&b.0));
        let all: f64 = steps.iter().map(|(_, weight)| weight).sum();
        let mut below = 0.0;
        let share = |(ms, weight): (f64, f64)| {
            below += weight;
            (100.0 * below / all, ms)
        };
        steps.into_iter().map(share).collect()
    }
}

/// A figure, as measured.
struct Done {
    experiment: Experiment,
    points: Vec<Point>,
    claims: Vec<Judged>,
    /// Promises that runs broke.
    failures: Vec<String>,
    /// Runs after which the workload's audit of the database held; none if it has no audit.
    audited: Option<usize>,
    svg: String,
    /// Distribution functions at the last value of what is swept, where transactions differ in how far they reach.
    distributions: Option<String>,
}

impl Done {
    fn runs(&self) -> usize {
        self.points.iter().map(|point| point.values.len()).sum()
    }
}

/// Runs the figures and prints what came of them.
pub fn run(args: &Args) -> anyhow::Result<Status> {
    let all = Experiment::all()?;
    if args.figures.iter().any(|name| name == "list") {
        output::print(&list(&all))?;
        return Ok(Status::Held);
    }
    let chosen = chosen(all, &args.figures)?;
    if let Some(folder) = &args.plots {
        fs::create_dir_all(folder).with_context(|| format!("--plots {}", folder.display()))?;
    }
    let began = Instant::now();
    let mut done = Vec::new();
    for experiment in chosen {
        let one = carry_out(args, experiment)?;
        if !args.json {
            output::print(&describe(&one, args.full))?;
        }
        if let Some(folder) = &args.plots {
            let path = folder.join(format!("{}.svg", one.experiment.id));
            fs::write(&path, &one.svg).with_context(|| format!("--plots {}", path.display()))?;
            if let Some(svg) = &one.distributions {
                let path = folder.join(format!("{}-cdf.svg", one.experiment.id));
                fs::write(&path, svg).with_context(|| format!("--plots {}", path.display()))?;
            }
        }
        done.push(one);
    }
    if let Some(path) = &args.html {
        let page = html::figures(&done, args.full, args.seeds);
        fs::write(path, page).with_context(|| format!("--html {}", path.display()))?;
    }
    if args.json {
        output::print_json(&Printed {
            figures: "simulated",
            commit: output::COMMIT,
            full: args.full,
            seeds: args.seeds,
            wall_seconds: began.elapsed().as_secs_f64(),
            experiments: done.iter().map(printed).collect(),
        })?;
    }
    let differs = |one: &Done| one.claims.iter().any(|claim| claim.verdict == Verdict::Differs);
    let is_broken = done.iter().any(|one| differs(one) || !one.failures.is_empty());
    Ok(if is_broken { Status::Broken } else { Status::Held })
}

fn printed(done: &Done) -> PrintedExperiment<'_> {
    let Done { experiment, points, claims, failures, .. } = done;
    PrintedExperiment {
        id: &experiment.id,
        source: &experiment.source,
        title: &experiment.title,
        column: &experiment.column,
        swept: &experiment.sweep.label,
        absent: experiment.protocols().1,
        points,
        claims,
        failures,
    }
}

/// The experiments asked for.
fn chosen(all: Vec<Experiment>, names: &[String]) -> anyhow::Result<Vec<Experiment>> {
    let is_known = |name: &&String| *name == "all" || all.iter().any(|one| one.id == **name);
    if let Some(unknown) = names.iter().find(|name| !is_known(name)) {
        let known = all.iter().map(|one| one.id.as_str()).collect::<Vec<_>>().join(", ");
        bail!("{unknown}: there is no such figure; use list, all, or some of {known}");
    }
    let wanted = |one: &Experiment| names.iter().any(|name| name == "all" || *name == one.id);
    Ok(all.into_iter().filter(wanted).collect())
}

fn carry_out(args: &Args, experiment: Experiment) -> anyhow::Result<Done> {
    let (protocols, _) = experiment.protocols();
    let values = experiment.values(args.full).to_vec();
    let mut runs: Vec<compare::Args> = Vec::new();
    let mut points: Vec<Point> = Vec::new();
    for &at in &values {
        for &protocol in &protocols {
            runs.push(experiment.arguments(protocol, at, args.full)?);
            points.push(Point {
                protocol,
                at,
                values: Vec::new(),
                others: BTreeMap::new(),
                kinds: BTreeMap::new(),
                outstanding: 0.0,
                requests: 0.0,
            });
        }
    }
    let columns: Vec<_> = experiment
        .columns()
        .into_iter()
        .map(|name| Ok((name, compare::column(name).context("the column was checked")?)))
        .collect::<anyhow::Result<_>>()?;
    let jobs = points.len() as u64 * args.seeds;
    let template = "{spinner} {msg} {pos}/{len} {bar:20} {elapsed}";
    let bar = output::progress(Some(jobs), template)?;
    bar.set_message(experiment.id.clone());
    let names = protocols.len().max(1);
    let job = |number: u64| {
        let (which, seed) = (number as usize % points.len(), 1 + number / points.len() as u64);
        let (args, name) = (runs.get(which), protocols.get(which % names));
        let (Some(args), Some(name)) = (args, name) else { bail!("no such run") };
        Ok((which, seed, compare::once(args, name, seed)?))
    };
    let (mut results, mut problem) = (Vec::new(), None);
    Pool { threads: args.threads, minutes: None }.run(0..jobs, job, |result| {
        bar.inc(1);
        match result {
            Ok(run) => results.push(run),
            Err(error) => drop(problem.get_or_insert(error)),
        }
        problem.is_none()
    });
    bar.finish_and_clear();
    if let Some(problem) = problem {
        return Err(problem.context(experiment.id));
    }
    // In the order of seeds, whichever ended first.
    results.sort_by_key(|(which, seed, _)| (*which, *seed));
    let mut failures = Vec::new();
    let mut audited = None;
    for (which, seed, run) in results {
        let Some(point) = points.get_mut(which) else { continue };
        if point.kinds.is_empty() && run.result.kinds.len() > 1 {
            point.kinds = run.result.kinds.clone();
        }
        for (at, (name, column)) in columns.iter().enumerate() {
            let figures = match at {
                0 => &mut point.values,
                _ => point.others.entry((*name).to_owned()).or_default(),
            };
            figures.push(column(&run.result));
        }
        point.outstanding += f64::from(run.outstanding);
        point.requests += run.result.committed as f64 + f64::from(run.outstanding);
        let Point { protocol, at, .. } = point;
        if let Some(is_audited) = run.audited {
            *audited.get_or_insert(0) += usize::from(is_audited);
            if !is_audited && run.failure.is_none() {
                failures.push(format!(
                    "{protocol} at {at} with seed {seed}: the database was not audited, for {} \
                     requests did not end",
                    run.outstanding
                ));
            }
        }
        failures.extend(run.failure.map(|failure| {
            format!("{protocol} at {at} with seed {seed} LOST ITS PROMISE: {failure}")
        }));
    }
    for point in &mut points {
        point.outstanding /= point.requests.max(1.0);
    }
    let own = experiment.column.as_str();
    let measured: BTreeMap<&str, Measured> =
        columns.iter().map(|(name, _)| (*name, measured(&points, name))).collect();
    let judge = |claim: &Claim| {
        let column = claim.column.as_deref();
        let about = measured.get(column.unwrap_or(own)).context("every column was measured")?;
        Ok(Judged::new(claim, about))
    };
    let claims = experiment.claims.iter().map(judge).collect::<anyhow::Result<_>>()?;
    let drawn = measured.get(own).context("its own column was measured")?;
    let svg = figure(&experiment, &protocols, drawn).svg().context(experiment.id.clone())?;
    let last = values.last().copied().unwrap_or_default();
    let ends: Vec<&Point> =
        points.iter().filter(|point| point.at == last && !point.kinds.is_empty()).collect();
    let distributions = match ends.as_slice() {
        [] => None,
        ends => Some(distributions(&experiment, ends).svg().context(experiment.id.clone())?),
    };
    Ok(Done { experiment, points, claims, failures, audited, svg, distributions })
}

/// One column of all points.
fn measured(points: &[Point], column: &str) -> Measured {
    let mut measured = Measured::default();
    for point in points {
        measured.record(point.protocol, point.at, mean(point.figures(column)));
    }
    measured
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

fn figure(experiment: &Experiment, protocols: &[&str], measured: &Measured) -> Figure {
    let reported = |name: &str| {
        let is_drawn = |claim: &&Claim| claim.of == name && claim.column.is_none();
        let of = experiment.claims.iter().filter(is_drawn);
        of.filter_map(|claim| Some((claim.at, claim.is?))).collect()
    };
    let series = protocols.iter().map(|&name| Series {
        name: name.to_owned(),
        measured: measured.of(name).to_vec(),
        reported: reported(name),
    });
    Figure {
        title: format!("{} ({}), simulated; × reported", experiment.title, experiment.source),
        x: experiment.sweep.label.clone(),
        y: experiment.column.clone(),
        series: series.collect(),
    }
}

/// Distribution functions, lying on their sides so that the slowest can be told apart.
fn distributions(experiment: &Experiment, points: &[&Point]) -> Figure {
    let at = points.first().map_or(0.0, |point| point.at);
    let series = points.iter().map(|point| Series {
        name: point.protocol.to_owned(),
        measured: point.distribution(),
        reported: Vec::new(),
    });
    Figure {
        title: format!("{} at {at}, simulated: distribution", experiment.title),
        x: "% of the transactions that are not slower".into(),
        y: "ms".into(),
        series: series.collect(),
    }
}

/// Latencies by how far transactions reach, and how they are distributed over all; nothing where they do not differ in that.
fn by_reach(done: &Done) -> String {
    let points = || done.points.iter().filter(|point| !point.kinds.is_empty());
    if points().next().is_none() {
        return String::new();
    }
    let mut header = vec!["protocol", "at"];
    header.extend(REACHES);
    header.extend(QUANTILES.map(|(name, _)| name));
    let rows = points().map(|point| {
        let mean = |name: &str| {
            let kind = point.kinds.get(name).filter(|kind| kind.latency_ms.n > 0);
            compare::cell(&[kind.map_or(f64::NAN, |kind| kind.latency_ms.mean)], 1)
        };
        let distribution = point.distribution();
        let quantile = |(_, share): (&str, f64)| {
            let at = distribution.iter().find(|(below, _)| *below >= share - 1e-9);
            compare::cell(&[at.map_or(f64::NAN, |(_, ms)| *ms)], 1)
        };
        let named = [point.protocol.to_owned(), point.at.to_string()].into_iter();
        named.chain(REACHES.map(mean)).chain(QUANTILES.map(quantile)).collect::<Vec<_>>()
    });
    format!(
        "\nmean ms by how far transactions reach, and the distribution over all\n{}\n",
        output::table(&header, rows).trim_fmt()
    )
}

/// How far transactions reach, by name.
const REACHES: [&str; 3] = ["local", "close", "far"];
/// The shares of all transactions that are not slower.
const QUANTILES: [(&str, f64); 6] =
    [("p25", 25.0), ("p50", 50.0), ("p75", 75.0), ("p90", 90.0), ("p95", 95.0), ("p99", 99.0)];

fn list(all: &[Experiment]) -> String {
    let rows = all.iter().map(|one| {
        let (there, absent) = one.protocols();
        let of = format!("{} of {}", there.len(), there.len() + absent.len());
        [one.id.clone(), one.source.clone(), one.title.clone(), of]
    });
    format!("{}\n", output::table(&["id", "figure", "what it shows", "protocols"], rows).trim_fmt())
}

/// The figure for people.
fn describe(done: &Done, is_full: bool) -> String {
    let Done { experiment, points, claims, failures, .. } = done;
    let Experiment { id, source, title, column, sweep, .. } = experiment;
    let form = if is_full { "as in the paper" } else { "short form: see --full" };
    let mut text = format!(
        "{id}: {title} ({source})\nSimulated, {form}; {column} by {}; commit {}\n\n",
        sweep.label,
        output::COMMIT
    );
    text.push_str(&tables(done, is_full));
    text.push_str(&by_reach(done));
    if let Some(audited) = done.audited {
        let runs = done.runs();
        text.push_str(&format!(
            "\nThe workload's audit of the whole database held after {audited} of {runs} runs.\n"
        ));
    }
    let rows = claims.iter().map(|claim| {
        [claim.reported.clone(), claim.measured.clone(), claim.verdict.name().to_owned()]
    });
    if !claims.is_empty() {
        let table = output::table(&["reported", "measured", "verdict"], rows);
        text.push_str(&format!("\n{}\n", table.trim_fmt()));
    }
    for claim in claims {
        if let Some(why) = &claim.why {
            text.push_str(&format!("\n{}: {why}", claim.reported));
        }
    }
    let (_, absent) = experiment.protocols();
    if !absent.is_empty() {
        text.push_str(&format!("\nNot implemented yet: {}", absent.join(", ")));
    }
    // Those that did not end are not in the latencies.
    for point in points.iter().filter(|point| point.outstanding > 0.01) {
        text.push_str(&format!(
            "\n{} at {}: {:.0} % of the requests had not ended, so its latencies are too low",
            point.protocol,
            point.at,
            point.outstanding * 100.0
        ));
    }
    for failure in failures {
        text.push_str(&format!("\n{failure}"));
    }
    if let Some(&at) = experiment.values(is_full).first() {
        for command in experiment.commands(at, is_full) {
            text.push_str(&format!("\nOne point: {command}"));
        }
        text.push('\n');
    }
    text
}

/// A table for each column, named above it where there are several.
fn tables(done: &Done, is_full: bool) -> String {
    let columns = done.experiment.columns();
    let is_one = columns.len() == 1;
    let named = |column: &str| {
        let table = table(done, column, is_full);
        if is_one { table } else { format!("{column}\n{table}\n") }
    };
    columns.into_iter().map(named).collect()
}

fn table(done: &Done, column: &str, is_full: bool) -> String {
    let values = done.experiment.values(is_full);
    let header = values.iter().map(f64::to_string);
    let header: Vec<String> = ["protocol".to_owned()].into_iter().chain(header).collect();
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    let rows = done.experiment.protocols().0.into_iter().map(|name| {
        let own = done.points.iter().filter(move |point| point.protocol == name);
        let cells = own.map(|point| compare::cell(point.figures(column), 1));
        [name.to_owned()].into_iter().chain(cells).collect::<Vec<_>>()
    });
    format!("{}\n", output::table(&header, rows).trim_fmt())
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct Reproduce {
        #[command(flatten)]
        args: Args,
    }

    const SMALL: &str = r#"
        id = "X1"
        source = "nobody"
        title = "two protocols, at two rates & <once>"
        options = ["--topology", "local3", "--workload", "ycsbt:2", "--partitions", "3"]
        protocols = ["carousel-basic", "2pl", "paxos-commit"]
        column = "p50 ms"
        sweep = { option = "--rate", label = "transactions a second", full = [20, 50, 80], short = [20, 50], short_seconds = [2, 2] }
        claims = [
            { of = "carousel-basic", at = 20, above = 8 },
            { of = "carousel-basic", at = 20, lower_than = "2pl" },
            { of = "2pl", at = 50, is = 1_000, why = "nobody <measured> it" },
            { of = "2pl", at = 80, is = 1 },
            { of = "paxos-commit", at = 20, is = 1 },
            { of = "2pl", at = 20, column = "commit rate %", above = 50 },
        ]
        own_options = { 2pl = ["--attempts", "7"] }
    "#;

    #[test]
    fn a_figure_is_measured_judged_and_drawn() {
        let args = Reproduce::parse_from(["reproduce", "X1", "--seeds", "2"]).args;
        let experiment = Experiment::parse("X1", SMALL).unwrap();
        let done = carry_out(&args, experiment).unwrap();
        let places: Vec<_> = done.points.iter().map(|point| (point.protocol, point.at)).collect();
        let expected =
            [("carousel-basic", 20.0), ("2pl", 20.0), ("carousel-basic", 50.0), ("2pl", 50.0)];
        assert_eq!(places, expected);
        assert!(done.points.iter().all(|point| point.values.len() == 2), "{:?}", done.failures);
        let verdicts: Vec<_> = done.claims.iter().map(|claim| claim.verdict).collect();
        let expected = [
            Verdict::Agrees,
            Verdict::Agrees,
            Verdict::Explained,
            Verdict::NotRun,
            Verdict::NotRun,
            Verdict::Agrees,
        ];
        assert_eq!(verdicts, expected, "{:?}", done.claims);
        let text = describe(&done, false);
        for part in
            ["X1: two protocols", "±", "nobody <measured> it", "Not implemented yet: paxos-commit"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(text.contains("--rate 20 --protocols carousel-basic\n"), "{text}");
        assert!(text.contains("--attempts 7 --duration 2s --rate 20 --protocols 2pl"), "{text}");
        assert!(text.contains("commit rate %\n"), "{text}");
        let page = html::figures(&[done], false, 2);
        for part in
            ["&amp; &lt;once&gt;", "<svg", "nobody &lt;measured&gt; it", "class=\"explained\""]
        {
            assert!(page.contains(part), "{part}: {page}");
        }
        let addresses = page.match_indices("http").map(|(at, _)| page.split_at(at).1);
        let mut foreign = addresses.filter(|text| !text.starts_with("http://www.w3.org/2000/svg"));
        assert_eq!(foreign.next(), None, "the page loads something");
    }

    #[test]
    fn figures_are_named_and_unknown_ones_refused() {
        let all = Experiment::all().unwrap();
        let count = all.len();
        assert_eq!(chosen(all.clone(), &["all".into()]).unwrap().len(), count);
        let two = chosen(all.clone(), &["N7a".into(), "C4".into()]).unwrap();
        assert_eq!(two.iter().map(|one| one.id.as_str()).collect::<Vec<_>>(), ["C4", "N7a"]);
        let error = chosen(all.clone(), &["C99".into()]).unwrap_err().to_string();
        assert!(error.contains("C99") && error.contains("N8b"), "{error}");
        let listed = list(&all);
        assert!(listed.contains("Natto, Fig. 7a") && listed.lines().count() > count, "{listed}");
    }
}
