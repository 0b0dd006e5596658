//! One figure: its runs, their results, and its plot.

use orthodrome_core::ordered::{OrdMap, OrdSet};

use anyhow::Context as _;
use orthodrome_eval::metrics::OfKind;
use orthodrome_eval::plot::{Figure, Mark, Series};
use orthodrome_eval::workload::Reach;
use serde::{Serialize, Serializer};

use super::Args;
use super::experiment::{Claim, Experiment};
use super::kept::{Entry, Kept, Key, Outcome};
use super::verdict::{Judged, Measured};
use crate::compare;
use crate::workers::Pool;

/// All runs of one protocol with one value of the option that varies.
#[derive(Serialize)]
pub struct Point {
    pub protocol: &'static str,
    pub at: f64,
    /// The figure, by seed.
    pub values: Vec<f64>,
    /// Other figures that claims are about, by the names of their columns.
    #[serde(skip_serializing_if = "OrdMap::is_empty")]
    others: OrdMap<String, Vec<f64>>,
    /// Latencies by the distance of the data, of the first seed; empty if transactions do not
    /// differ in it.
    #[serde(skip_serializing_if = "OrdMap::is_empty")]
    pub kinds: OrdMap<String, OfKind>,
    /// Requests that had not ended when their runs did, as a share of all.
    #[serde(serialize_with = "as_number")]
    pub outstanding: Share,
}

impl Point {
    fn new(protocol: &'static str, at: f64) -> Self {
        Self {
            protocol,
            at,
            values: Vec::new(),
            others: OrdMap::new(),
            kinds: OrdMap::new(),
            outstanding: Share::default(),
        }
    }

    /// Adds the result of the run with the next seed; `columns` are the experiment's.
    fn take(&mut self, columns: &[&str], outcome: &Outcome) {
        if self.kinds.is_empty() {
            let is_reach = |name: &str| Reach::ALL.iter().any(|reach| reach.name() == name);
            let own = outcome.kinds.iter().filter(|(name, _)| is_reach(name));
            let reaches: OrdMap<_, _> = own.map(|(a, b)| (a.clone(), b.clone())).collect();
            if reaches.len() > 1 {
                self.kinds = reaches;
            }
        }
        for (at, name) in columns.iter().enumerate() {
            let figures = match at {
                0 => &mut self.values,
                _ => self.others.entry((*name).to_owned()).or_default(),
            };
            figures.push(outcome.column(name));
        }
        self.outstanding.part += u64::from(outcome.outstanding);
        self.outstanding.whole += outcome.committed + u64::from(outcome.outstanding);
    }

    /// One column, by seed.
    pub fn figures(&self, column: &str) -> &[f64] {
        self.others.get(column).unwrap_or(&self.values)
    }

    /// The distribution function of the latencies of all transactions, in steps of 2 %; in
    /// milliseconds.
    pub fn distribution(&self) -> Vec<(f64, f64)> {
        let of = |kind: &OfKind| {
            let weight = kind.latency_ms.n as f64 / kind.cdf_ms.len().max(1) as f64;
            kind.cdf_ms.iter().map(|&ms| (ms, weight)).collect::<Vec<_>>()
        };
        let mut steps: Vec<(f64, f64)> = self.kinds.values().flat_map(of).collect();
        steps.sort_by(|a, b| a.0.total_cmp(&b.0));
        let all: f64 = steps.iter().map(|(_, weight)| weight).sum();
        let mut below = 0.0;
        let mut shares = (1..=50).map(|step| f64::from(2 * step)).peekable();
        let mut distribution = Vec::new();
        for (ms, weight) in steps {
            below += weight;
            while let Some(share) = shares.next_if(|share| 100.0 * below / all >= share - 1e-9) {
                distribution.push((share, ms));
            }
        }
        distribution
    }
}

/// A measured figure.
pub struct Done {
    pub experiment: Experiment,
    pub points: Vec<Point>,
    pub claims: Vec<Judged>,
    /// Promises that runs broke.
    pub failures: Vec<String>,
    /// Runs after which the workload's audit of the database held; none if it has no audit.
    pub audited: Option<usize>,
    /// The plot; none if nothing was measured.
    pub svg: Option<String>,
    /// Distribution functions at the last value of the option that varies, if transactions differ
    /// in the distance of their data.
    pub distributions: Option<String>,
    /// The commits of the figure's runs.
    pub commits: OrdSet<String>,
    /// Number of runs of this invocation; the others were kept from earlier ones.
    pub ran: usize,
    /// Total time of all runs of the figure.
    pub wall_seconds: f64,
}

/// A part of a whole.
#[derive(Clone, Copy, Default, Debug)]
pub struct Share {
    part: u64,
    whole: u64,
}

impl Share {
    pub fn value(self) -> f64 {
        self.part as f64 / self.whole.max(1) as f64
    }
}

fn as_number<S: Serializer>(share: &Share, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(share.value())
}

impl Done {
    /// The plots of the figure, with the names of their files.
    pub fn drawings(&self) -> Vec<(String, &str)> {
        let id = &self.experiment.id;
        let named =
            [(format!("{id}.svg"), &self.svg), (format!("{id}-cdf.svg"), &self.distributions)];
        named.into_iter().filter_map(|(name, svg)| Some((name, svg.as_deref()?))).collect()
    }

    /// The commits of the figure's runs, as text.
    pub fn origin(&self) -> String {
        let commits: Vec<&str> = self.commits.iter().map(String::as_str).collect();
        match commits.as_slice() {
            [] => "no runs".into(),
            [one] => format!("commit {one}"),
            several => format!("commits {}", several.join(", ")),
        }
    }

    pub fn runs(&self) -> usize {
        self.points.iter().map(|point| point.values.len()).sum()
    }
}

/// Runs the runs of a figure that are not kept, and compares the figure with what was reported.
///
/// # Errors
/// A run cannot begin, or cannot be kept.
pub fn carry_out(args: &Args, experiment: Experiment) -> anyhow::Result<Done> {
    let (protocols, _) = experiment.protocols();
    let values = experiment.values(args.full).to_vec();
    let mut kept = match &args.keep {
        Some(folder) => Kept::open(folder, &experiment.id, args.any_commit, args.no_runs)?,
        None => Kept::nothing(),
    };
    let ran = run_missing(args, &experiment, &mut kept)?;
    let Gathered { points, failures, audited, commits, wall_seconds } =
        Gathered::of(args, &experiment, &kept);
    let own = experiment.column.as_str();
    let measured: OrdMap<&str, Measured> =
        experiment.columns().into_iter().map(|name| (name, measured(&points, name))).collect();
    let judge = |claim: &Claim| {
        let column = claim.column.as_deref();
        let about = measured.get(column.unwrap_or(own)).context("every column was measured")?;
        Ok(Judged::new(claim, about))
    };
    let claims = experiment.claims.iter().map(judge).collect::<anyhow::Result<_>>()?;
    let drawn = measured.get(own).context("its own column was measured")?;
    let is_empty = protocols.iter().all(|name| drawn.of(name).is_empty());
    let svg = match is_empty {
        true => None,
        false => Some(figure(args, &experiment, &protocols, drawn).svg()?),
    };
    let last = values.last().copied().unwrap_or_default();
    let ends: Vec<&Point> =
        points.iter().filter(|point| point.at == last && !point.kinds.is_empty()).collect();
    let distributions = match ends.as_slice() {
        [] => None,
        ends => Some(distributions(args, &experiment, ends).svg()?),
    };
    Ok(Done {
        experiment,
        points,
        claims,
        failures,
        audited,
        svg,
        distributions,
        commits,
        ran,
        wall_seconds,
    })
}

/// Executes the runs that are not kept, in the order of seeds, so that an interruption leaves
/// comparable points. Returns their number.
fn run_missing(args: &Args, experiment: &Experiment, kept: &mut Kept) -> anyhow::Result<usize> {
    let (protocols, _) = experiment.protocols();
    let mut jobs: Vec<(Key, compare::Args)> = Vec::new();
    for seed in 1..=args.seeds {
        for &at in experiment.values(args.full) {
            for &protocol in &protocols {
                let run = experiment.run(protocol, at, args.full, seed);
                if kept.get(&run).is_none() && !args.no_runs {
                    jobs.push((run, experiment.arguments(protocol, at, args.full)?));
                }
            }
        }
    }
    let work = |number: u64| {
        let (run, args) = jobs.get(number as usize).context("no such run")?;
        let outcome = Outcome::new(&compare::once(args, &run.protocol, run.seed)?);
        Ok((run.clone(), outcome))
    };
    Pool::of(args.threads)
        .shown(&experiment.id, jobs.len() as u64, work, |(run, outcome)| kept.add(run, outcome))
        .with_context(|| experiment.id.clone())?;
    Ok(jobs.len())
}

/// The collected results of a figure's runs.
#[derive(Default)]
struct Gathered {
    points: Vec<Point>,
    failures: Vec<String>,
    audited: Option<usize>,
    commits: OrdSet<String>,
    wall_seconds: f64,
}

impl Gathered {
    fn of(args: &Args, experiment: &Experiment, kept: &Kept) -> Self {
        let (protocols, _) = experiment.protocols();
        let columns = experiment.columns();
        let mut all = Self::default();
        for &at in experiment.values(args.full) {
            for &protocol in &protocols {
                let mut point = Point::new(protocol, at);
                for seed in 1..=args.seeds {
                    let run = experiment.run(protocol, at, args.full, seed);
                    let Some(Entry { commit, outcome, .. }) = kept.get(&run) else { continue };
                    point.take(&columns, outcome);
                    all.commits.insert(commit.clone());
                    all.add(&format!("{protocol} at {at} with seed {seed}"), outcome);
                }
                all.points.push(point);
            }
        }
        all
    }

    fn add(&mut self, run: &str, outcome: &Outcome) {
        self.wall_seconds += outcome.wall_seconds;
        if let Some(is_audited) = outcome.audited {
            *self.audited.get_or_insert(0) += usize::from(is_audited);
            if !is_audited && outcome.failure.is_none() {
                self.failures.push(format!(
                    "{run}: no audit, because {} requests were still pending at the end",
                    outcome.outstanding
                ));
            }
        }
        let lost = |failure| format!("FAILED: {run}: {failure}");
        self.failures.extend(outcome.failure.as_ref().map(lost));
    }
}

/// The values of one column at all points.
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

/// A short description of the full or the short form of an experiment.
pub fn form(args: &Args, experiment: &Experiment) -> String {
    let seeds = match args.seeds {
        1 => "1 seed".to_owned(),
        more => format!("{more} seeds"),
    };
    if args.full {
        return format!("as in the paper, {seeds}");
    }
    let seconds = &experiment.sweep.short_seconds;
    let (least, most) = (seconds.iter().min(), seconds.iter().max());
    let seconds = match (least, most) {
        (Some(least), Some(most)) if least != most => format!("{least} to {most} s"),
        (_, most) => format!("{} s", most.copied().unwrap_or_default()),
    };
    format!("short form: {seconds} a point, {seeds}")
}

/// The mark of a claim in the plot, if it states a value or a bound.
fn mark(claim: &Claim, measured: &Measured) -> Option<(Mark, (f64, f64))> {
    let (mark, value) = if let Some(value) = claim.is {
        (Mark::Value, value)
    } else if let Some(other) = &claim.lower_than {
        let other = measured.at(other, claim.than_at.unwrap_or(claim.at))?;
        let by_ratio = claim.times.map(|times| other / times);
        (Mark::Derived, claim.by.map(|by| other - by).or(by_ratio)?)
    } else {
        let (mark, bound) = match claim.above {
            Some(above) => (Mark::Above, above),
            None => (Mark::Below, claim.below?),
        };
        let value = match claim.growth_from {
            Some(from) => measured.at(&claim.of, from)? * (1.0 + bound),
            None => bound,
        };
        (mark, value)
    };
    Some((mark, (claim.at, value)))
}

fn figure(args: &Args, experiment: &Experiment, protocols: &[&str], measured: &Measured) -> Figure {
    let own = experiment.column.as_str();
    let reported = |name: &str| {
        let is_drawn =
            |claim: &&Claim| claim.of == name && claim.column.as_deref().is_none_or(|c| c == own);
        let of = experiment.claims.iter().filter(is_drawn);
        of.filter_map(|claim| mark(claim, measured)).collect()
    };
    let series = protocols.iter().map(|&name| Series {
        name: name.to_owned(),
        measured: measured.of(name).to_vec(),
        reported: reported(name),
    });
    Figure {
        title: experiment.title.clone(),
        note: note(args, experiment),
        x: experiment.sweep.label.clone(),
        y: own.to_owned(),
        series: series.collect(),
    }
}

/// The subtitle of a plot.
fn note(args: &Args, experiment: &Experiment) -> String {
    format!("{} · {} · simulated, {}", experiment.id, experiment.source, form(args, experiment))
}

/// A plot of distribution functions with latency on the vertical axis, so that the slowest
/// transactions can be distinguished.
fn distributions(args: &Args, experiment: &Experiment, points: &[&Point]) -> Figure {
    let at = points.first().map_or(0.0, |point| point.at);
    let series = points.iter().map(|point| Series {
        name: point.protocol.to_owned(),
        measured: point.distribution(),
        reported: Vec::new(),
    });
    Figure {
        title: format!("{}: distribution of latencies at {at}", experiment.title),
        note: note(args, experiment),
        x: "% of the transactions with at most this latency".into(),
        y: "ms".into(),
        series: series.collect(),
    }
}
