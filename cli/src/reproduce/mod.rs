//! `reproduce`: repeats published figures in the simulator and compares them with what their
//! authors reported.

mod docs;
mod experiment;
mod figure;
mod html;
mod ids;
mod kept;
mod verdict;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use orthodrome_core::ordered::OrdSet;

use anyhow::{Context as _, bail, ensure};
use serde::Serialize;

use crate::compare;
use crate::{Status, common, output};
use experiment::Experiment;
use figure::{Done, Point, carry_out};
use verdict::{Judged, Verdict};

/// Repeat published figures in the simulator and compare them with the papers
///
/// Each figure is a file in `experiments/`: the options of `compare`, the option that varies, and the
/// values that the paper reports. The short form has fewer points and shorter runs; --full runs the
/// figure as in the paper. The output contains the `compare` command of a single point.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  orthodrome reproduce list
  orthodrome reproduce C4
  orthodrome reproduce N7a --full --seeds 3 --html n7a.html
  orthodrome reproduce all --json > figures.json
  orthodrome reproduce all --keep runs          # resumes after an interruption

Exit status: 0 every claim agrees or its difference is explained, 1 a claim differs or a check failed
in a run, 2 bad usage or input.")]
pub struct Args {
    /// list, all, or ids of figures, separated by commas
    #[arg(value_name = "list|ID|all", default_value = "list", value_delimiter = ',')]
    figures: Vec<String>,
    /// Runs of each point, with consecutive seeds from 1
    #[arg(long, value_name = "N", default_value = "1", value_parser = compare::seeds)]
    seeds: u64,
    /// Run every point of the paper's figure, for as long as the paper did
    #[arg(long)]
    full: bool,
    /// Threads; each runs one simulation at a time [default: one per processor]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Write the result of each run to this folder as soon as the run has ended, and reuse results with the same options,
    /// seed and commit: an interrupted command resumes
    #[arg(long, value_name = "FOLDER")]
    keep: Option<PathBuf>,
    /// With --keep: reuse results of other commits if this commit has none; each figure names the commits of its runs
    #[arg(long, requires = "keep")]
    any_commit: bool,
    /// With --keep: run nothing; show the results in the folder
    #[arg(long, requires = "keep")]
    no_runs: bool,
    /// Write an HTML report to this file: tables, plots and verdicts
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Write a plot of each figure to this folder, as ID.svg
    #[arg(long, value_name = "FOLDER")]
    plots: Option<PathBuf>,
    /// With all: write reproduction.md, and plots in plots/, to this folder
    #[arg(long, value_name = "FOLDER")]
    docs: Option<PathBuf>,
    /// Print the results as one JSON object
    #[arg(long)]
    json: bool,
}

/// The result that `--json` prints.
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
    /// The commits of the figure's runs; several if some were kept.
    commits: &'a OrdSet<String>,
}

/// Runs the figures and prints the results.
pub fn run(args: &Args) -> anyhow::Result<Status> {
    let all = Experiment::all()?;
    if args.figures.iter().any(|name| name == "list") {
        output::print(&list(&all))?;
        return Ok(Status::Passed);
    }
    ensure!(
        args.docs.is_none() || args.figures.iter().any(|name| name == "all"),
        "--docs: needs every figure; use reproduce all"
    );
    let chosen = chosen(all, &args.figures)?;
    common::check_place("--html", args.html.as_deref())?;
    if let Some(folder) = &args.plots {
        fs::create_dir_all(folder).with_context(|| format!("--plots {}", folder.display()))?;
    }
    let began = Instant::now();
    let mut done = Vec::new();
    for experiment in chosen {
        let one = carry_out(args, experiment)?;
        if args.keep.is_some() && one.ran < one.runs() {
            let kept = one.runs() - one.ran;
            note!("{}: reused {kept} of {} runs", one.experiment.id, one.runs());
        }
        if !args.json {
            output::print(&describe(&one, args.full))?;
        }
        if let Some(folder) = &args.plots {
            write_plots(&one, folder).with_context(|| format!("--plots {}", folder.display()))?;
        }
        done.push(one);
    }
    if let Some(folder) = &args.docs {
        docs::write(args, &done, folder).with_context(|| format!("--docs {}", folder.display()))?;
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
    Ok(if is_broken { Status::Failed } else { Status::Passed })
}

fn printed(done: &Done) -> PrintedExperiment<'_> {
    let Done { experiment, points, claims, failures, commits, .. } = done;
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
        commits,
    }
}

/// Writes the plots of a figure into a folder.
fn write_plots(done: &Done, folder: &Path) -> anyhow::Result<()> {
    for (name, svg) in done.drawings() {
        let path = folder.join(name);
        fs::write(&path, svg).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

/// The experiments that the command line names, in that order; `all` stands for those that are not
/// named before it.
fn chosen(all: Vec<Experiment>, names: &[String]) -> anyhow::Result<Vec<Experiment>> {
    let is_known = |name: &&String| *name == "all" || all.iter().any(|one| one.id == **name);
    if let Some(unknown) = names.iter().find(|name| !is_known(name)) {
        let known = all.iter().map(|one| one.id.as_str()).collect::<Vec<_>>().join(", ");
        bail!("{unknown}: unknown figure; use list, all, or some of {known}");
    }
    let mut all = all;
    let mut chosen = Vec::new();
    for name in names {
        chosen.extend(all.extract_if(.., |one| name == "all" || *name == one.id));
    }
    Ok(chosen)
}

/// Latencies by the distance of the data, and their distribution; empty if transactions do not
/// differ in it.
fn by_reach(done: &Done) -> String {
    let (header, rows) = reaches(done);
    if rows.is_empty() {
        return String::new();
    }
    format!("\n{BY_REACH}\n{}\n", output::table(&header, rows).trim_fmt())
}

/// The title of the table of [`reaches`].
const BY_REACH: &str = "mean ms by distance of the data, and the distribution over all";

/// The header of that table, and a row for each point at which transactions differ in the distance
/// of their data.
fn reaches(done: &Done) -> (Vec<&'static str>, Vec<Vec<String>>) {
    let mut header = vec!["protocol", "at"];
    header.extend(REACHES);
    header.extend(QUANTILES.map(|(name, _)| name));
    let row = |point: &Point| {
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
        named.chain(REACHES.map(mean)).chain(QUANTILES.map(quantile)).collect()
    };
    let points = done.points.iter().filter(|point| !point.kinds.is_empty());
    (header, points.map(row).collect())
}

/// The names of distances.
const REACHES: [&str; 3] = ["local", "close", "far"];
/// The quantiles of the table. Higher ones are left out, because the distribution is kept in steps
/// of 2 %.
const QUANTILES: [(&str, f64); 4] = [("p25", 25.0), ("p50", 50.0), ("p75", 75.0), ("p90", 90.0)];

fn list(all: &[Experiment]) -> String {
    let rows = all.iter().map(|one| {
        let (there, absent) = one.protocols();
        let of = format!("{} of {}", there.len(), there.len() + absent.len());
        [one.id.clone(), one.source.clone(), one.title.clone(), of]
    });
    format!("{}\n", output::table(&["id", "figure", "what it shows", "protocols"], rows).trim_fmt())
}

/// The figure as readable text.
fn describe(done: &Done, is_full: bool) -> String {
    let Done { experiment, claims, .. } = done;
    let Experiment { id, source, title, column, sweep, .. } = experiment;
    let form = if is_full { "as in the paper" } else { "short form: see --full" };
    let mut text = format!(
        "{id}: {title} ({source})\nSimulated, {form}; {column} by {}; {}\n\n",
        sweep.label,
        done.origin()
    );
    text.push_str(&tables(done, is_full));
    text.push_str(&by_reach(done));
    if let Some(audited) = done.audited {
        let runs = done.runs();
        text.push_str(&format!(
            "\nThe workload's audit of all data passed after {audited} of {runs} runs.\n"
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
    for remark in remarks(done) {
        text.push_str(&format!("\n{remark}"));
    }
    if let Some(&at) = experiment.values(is_full).first() {
        for command in experiment.commands(at, is_full) {
            text.push_str(&format!("\nOne point: {command}"));
        }
        text.push('\n');
    }
    text
}

/// Remarks that a reader of the figures needs.
fn remarks(done: &Done) -> Vec<String> {
    let mut remarks = Vec::new();
    let (_, absent) = done.experiment.protocols();
    if !absent.is_empty() {
        remarks.push(format!("Not implemented yet: {}", absent.join(", ")));
    }
    // Transactions that did not end are not in the latencies.
    for point in done.points.iter().filter(|point| point.outstanding.value() > 0.01) {
        remarks.push(format!(
            "{} at {}: {:.0} % of the requests were still pending at the end, so the latencies are too low",
            point.protocol,
            point.at,
            point.outstanding.value() * 100.0
        ));
    }
    remarks.extend(done.failures.iter().cloned());
    remarks
}

/// A table for each column, with the column's name above it if there are several.
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
    let (header, rows) = figures(done, column, is_full);
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    format!("{}\n", output::table(&header, rows).trim_fmt())
}

/// The table of one column at all points: its header and its rows.
fn figures(done: &Done, column: &str, is_full: bool) -> (Vec<String>, Vec<Vec<String>>) {
    let values = done.experiment.values(is_full).iter().map(f64::to_string);
    let header = ["protocol".to_owned()].into_iter().chain(values).collect();
    let row = |name: &str| {
        let own = done.points.iter().filter(|point| point.protocol == name);
        let cells = own.map(|point| compare::cell(point.figures(column), 1));
        [name.to_owned()].into_iter().chain(cells).collect()
    };
    (header, done.experiment.protocols().0.into_iter().map(row).collect())
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

    /// The parsed arguments of `orthodrome reproduce`.
    pub fn parsed(words: &[&str]) -> Args {
        Reproduce::parse_from(["reproduce"].iter().chain(words)).args
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
    fn a_figure_is_measured_compared_and_drawn() {
        let args = parsed(&["X1", "--seeds", "2"]);
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
    fn an_interrupted_sweep_resumes() {
        let folder = tempfile::tempdir().unwrap();
        let keep = folder.path().display().to_string();
        let figure = |more: &[&str]| {
            let args = parsed(&[&["X1", "--seeds", "2", "--keep", &keep], more].concat());
            carry_out(&args, Experiment::parse("X1", SMALL).unwrap()).unwrap()
        };
        let shown = |done: &Done| (describe(done, false), done.svg.clone());
        assert!(figure(&["--no-runs"]).svg.is_none());
        let whole = figure(&[]);
        assert_eq!((whole.ran, whole.runs()), (8, 8));

        let file = folder.path().join("X1.jsonl");
        let text = fs::read_to_string(&file).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 8);
        // As if the process had been killed while it wrote the fifth line.
        let half = format!("{}\n{}", lines[..4].join("\n"), lines[4].split_at(40).0);
        fs::write(&file, &half).unwrap();
        let looked_at = figure(&["--no-runs"]);
        assert_eq!((looked_at.ran, looked_at.runs()), (0, 4));
        assert_eq!(fs::read_to_string(&file).unwrap(), half, "it was only to be read");
        let resumed = figure(&[]);
        assert_eq!((resumed.ran, resumed.runs()), (4, 8));
        assert_eq!(shown(&resumed), shown(&whole));
        let text = fs::read_to_string(&file).unwrap();
        assert!(
            text.starts_with(&half[..lines[..4].join("\n").len()]) && text.lines().count() == 8
        );
        assert_eq!(figure(&[]).ran, 0);

        // Runs of another commit are repeated, unless `--any-commit` is given.
        let other = text.replace(output::COMMIT, "0123abcd");
        fs::write(&file, &other).unwrap();
        let any = figure(&["--any-commit"]);
        assert_eq!((any.ran, any.runs()), (0, 8));
        assert!(describe(&any, false).contains("commit 0123abcd\n"), "{}", describe(&any, false));
        assert_eq!(figure(&["--no-runs"]).runs(), 0);
        assert_eq!(figure(&[]).ran, 8);

        fs::write(&file, format!("{{}}\n{other}")).unwrap();
        let args = parsed(&["X1", "--keep", &keep]);
        let error = carry_out(&args, Experiment::parse("X1", SMALL).unwrap()).err().unwrap();
        assert!(format!("{error:#}").contains("X1.jsonl:1: not a kept run"), "{error:#}");
    }

    #[test]
    fn figures_are_named_and_unknown_ones_refused() {
        let all = Experiment::all().unwrap();
        let count = all.len();
        assert_eq!(chosen(all.clone(), &["all".into()]).unwrap().len(), count);
        let two = chosen(all.clone(), &["N7a".into(), "C4".into()]).unwrap();
        assert_eq!(two.iter().map(|one| one.id.as_str()).collect::<Vec<_>>(), ["N7a", "C4"]);
        let rest = chosen(all.clone(), &["N7a".into(), "all".into()]).unwrap();
        assert_eq!((rest.len(), rest[0].id.as_str()), (count, "N7a"));
        let error = chosen(all.clone(), &["C99".into()]).unwrap_err().to_string();
        assert!(error.contains("C99") && error.contains("N8b"), "{error}");
        let listed = list(&all);
        assert!(listed.contains("Natto, Fig. 7a") && listed.lines().count() > count, "{listed}");
    }
}
