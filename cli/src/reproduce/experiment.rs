//! Experiments: how one published figure was measured, and what its authors reported.

use orthodrome_core::ordered::{OrdMap, OrdSet};

use anyhow::{Context as _, anyhow, ensure};
use clap::Parser as _;
use serde::Deserialize;

use super::kept::Key;
use crate::common::toml_error;
use crate::compare;

/// One file of `experiments/`.
#[derive(Clone, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Experiment {
    /// The figure's short name: letters of the paper, number of the figure.
    pub id: String,
    /// Paper and figure.
    pub source: String,
    /// What the figure shows.
    pub title: String,
    /// Arguments of `orthodrome compare`, without the protocols and without the option that varies.
    pub options: Vec<String>,
    /// The protocols of the figure, by name. The output names those that do not exist here, and
    /// leaves them out.
    pub protocols: Vec<String>,
    /// Additional arguments for some of the protocols, which the authors set differently for each
    /// system.
    #[serde(default)]
    pub own_options: OrdMap<String, Vec<String>>,
    /// The column of `orthodrome compare` that the figure shows.
    pub column: String,
    pub sweep: Sweep,
    #[serde(default)]
    pub claims: Vec<Claim>,
}

/// The option that varies.
#[derive(Clone, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Sweep {
    /// The argument of `orthodrome compare` that takes the value.
    pub option: String,
    /// The name of the value, with its unit.
    pub label: String,
    /// The values of the paper.
    pub full: Vec<f64>,
    /// The values that are run without `--full`.
    pub short: Vec<f64>,
    /// Simulated seconds of each of these runs: enough for a meaningful 95th percentile.
    pub short_seconds: Vec<u32>,
}

/// A statement of the authors that can be compared with the measured figures.
#[derive(Clone, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Claim {
    /// The protocol that the claim is about.
    pub of: String,
    /// The value of the option that varies.
    pub at: f64,
    /// The column that the claim is about, if it is not the experiment's.
    pub column: Option<String>,
    /// The figure equals this value.
    pub is: Option<f64>,
    /// The figure is above this value.
    pub above: Option<f64>,
    /// The figure is below this value.
    pub below: Option<f64>,
    /// The figure is lower than that of this other protocol.
    pub lower_than: Option<String>,
    /// The figure equals that of this other protocol.
    pub like: Option<String>,
    /// With `lower_than`: the value of the varying option at which the other protocol is compared;
    /// otherwise the same value.
    pub than_at: Option<f64>,
    /// With `lower_than`: the reported difference.
    pub by: Option<f64>,
    /// With `lower_than`: the reported factor.
    pub times: Option<f64>,
    /// With `above` or `below`: these are about the figure's relative growth since this value of
    /// the varying option.
    pub growth_from: Option<f64>,
    /// The relative difference from the reported value that still counts as agreement.
    #[serde(default = "tenth")]
    pub within: f64,
    /// Why our figure differs, if it does, and which run shows the reason.
    pub why: Option<String>,
}

fn tenth() -> f64 {
    0.1
}

impl Claim {
    /// Refuses a claim that is ambiguous, or that names a protocol that is not `known` or a value
    /// that is not swept.
    fn validate(&self, known: &OrdSet<&str>, sweep: &Sweep) -> anyhow::Result<()> {
        let Self {
            of,
            at,
            is,
            above,
            below,
            lower_than,
            like,
            by,
            times,
            growth_from,
            than_at,
            ..
        } = self;
        for name in [Some(of), lower_than.as_ref(), like.as_ref()].into_iter().flatten() {
            ensure!(known.contains(name.as_str()), "claims: {name} is not among the protocols");
        }
        for value in [Some(at), growth_from.as_ref(), than_at.as_ref()].into_iter().flatten() {
            ensure!(sweep.full.contains(value), "claims: {value} is not among sweep.full");
        }
        let kinds =
            [is.is_some(), above.is_some(), below.is_some(), lower_than.is_some(), like.is_some()];
        ensure!(
            kinds.iter().filter(|kind| **kind).count() == 1,
            "claims, {of} at {at}: give one of is, above, below, lower_than, like"
        );
        ensure!(
            lower_than.is_some() || (by.is_none() && times.is_none() && than_at.is_none()),
            "claims, {of} at {at}: by, times and than_at belong to lower_than"
        );
        ensure!(
            growth_from.is_none() || above.is_some() || below.is_some(),
            "claims, {of} at {at}: growth_from needs above or below"
        );
        Ok(())
    }
}

#[derive(clap::Parser)]
#[command(no_binary_name = true)]
struct Compare {
    #[command(flatten)]
    args: compare::Args,
}

impl Experiment {
    /// All experiments, by id.
    pub fn all() -> anyhow::Result<Vec<Self>> {
        FILES.iter().map(|(name, text)| Self::parse(name, text)).collect()
    }

    /// Reads the file called `name`.
    pub fn parse(name: &str, text: &str) -> anyhow::Result<Self> {
        let place = format!("experiments/{name}.toml");
        let read: Self =
            toml::from_str(text).map_err(|error| toml_error(&place, &error.to_string()))?;
        read.validate().with_context(|| place.clone())?;
        ensure!(read.id == name, "{place}: id {} differs from the name of the file", read.id);
        Ok(read)
    }

    /// Refuses an experiment that cannot be run or compared.
    fn validate(&self) -> anyhow::Result<()> {
        for column in self.columns() {
            ensure!(
                compare::columns().any(|(name, ..)| *name == column),
                "column {column:?}: compare has no such column"
            );
        }
        let known: OrdSet<&str> = self.protocols.iter().map(String::as_str).collect();
        for name in self.own_options.keys() {
            ensure!(
                known.contains(name.as_str()),
                "own_options: {name} is not among the protocols"
            );
        }
        for claim in &self.claims {
            claim.validate(&known, &self.sweep)?;
        }
        for value in &self.sweep.short {
            ensure!(
                self.sweep.full.contains(value),
                "sweep.short: {value} is not among sweep.full"
            );
        }
        ensure!(
            self.sweep.short_seconds.len() == self.sweep.short.len(),
            "sweep.short_seconds: needs one value for each of sweep.short"
        );
        for is_full in [false, true] {
            for &value in self.values(is_full) {
                for name in &self.protocols {
                    self.arguments(name, value, is_full)?;
                }
            }
        }
        Ok(())
    }

    /// The values of the option that varies.
    pub fn values(&self, is_full: bool) -> &[f64] {
        if is_full { &self.sweep.full } else { &self.sweep.short }
    }

    /// The protocols of the figure that exist here, and those that do not.
    pub fn protocols(&self) -> (Vec<&'static str>, Vec<&str>) {
        let find = |name: &String| orthodrome_lab::find(name).map(|subject| subject.row.name).ok();
        let there = self.protocols.iter().filter_map(find).collect();
        let absent = self.protocols.iter().filter(|name| find(name).is_none());
        (there, absent.map(String::as_str).collect())
    }

    /// Every column that the experiment shows or that a claim is about, its own first.
    pub fn columns(&self) -> Vec<&str> {
        let mut columns = vec![self.column.as_str()];
        for column in self.claims.iter().filter_map(|claim| claim.column.as_deref()) {
            if !columns.contains(&column) {
                columns.push(column);
            }
        }
        columns
    }

    /// Commands that run one value: one command for all protocols with the same options.
    pub fn commands(&self, value: f64, is_full: bool) -> Vec<String> {
        let mut by_words: Vec<(Vec<String>, Vec<&str>)> = Vec::new();
        for name in self.protocols().0 {
            let words = self.words(name, value, is_full);
            match by_words.iter_mut().find(|(known, _)| *known == words) {
                Some((_, names)) => names.push(name),
                None => by_words.push((words, vec![name])),
            }
        }
        let command = |(words, names): &(Vec<String>, Vec<&str>)| {
            format!("orthodrome compare {} --protocols {}", words.join(" "), names.join(","))
        };
        by_words.iter().map(command).collect()
    }

    /// The arguments of `orthodrome compare` that run one value for a protocol.
    pub fn words(&self, name: &str, value: f64, is_full: bool) -> Vec<String> {
        let mut words = self.options.clone();
        words.extend(self.own_options.get(name).into_iter().flatten().cloned());
        let at = self.sweep.short.iter().position(|&short| short == value);
        if let (false, Some(seconds)) =
            (is_full, at.and_then(|at| self.sweep.short_seconds.get(at)))
        {
            words.extend(["--duration".into(), format!("{seconds}s")]);
        }
        words.extend([self.sweep.option.clone(), value.to_string()]);
        words
    }

    /// The key of a run.
    pub fn run(&self, name: &str, value: f64, is_full: bool, seed: u64) -> Key {
        let options = self.words(name, value, is_full);
        Key { protocol: name.to_owned(), options, seed }
    }

    /// The parsed arguments of a run.
    pub fn arguments(
        &self,
        name: &str,
        value: f64,
        is_full: bool,
    ) -> anyhow::Result<compare::Args> {
        let words = self.words(name, value, is_full);
        let read = Compare::try_parse_from(&words);
        let args = read.map_err(|error| anyhow!("options: {error}"))?.args;
        args.validate()?;
        Ok(args)
    }
}

/// Every file of `experiments/`, by name and in order.
const FILES: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/experiments.rs"));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_experiment_in_the_repository_can_be_run() {
        let all = Experiment::all().unwrap();
        assert!(all.len() >= 9, "{}", all.len());
        let ids: OrdSet<&str> = all.iter().map(|one| one.id.as_str()).collect();
        assert_eq!(ids.len(), all.len(), "two experiments have one id");
    }

    #[test]
    fn invalid_claims_are_refused() {
        let text = FILES.first().unwrap().1;
        let (name, good) = (FILES.first().unwrap().0, text);
        assert!(Experiment::parse(name, good).is_ok());
        for (more, problem) in [
            ("[[claims]]\nof = \"paxos\"\nat = 1\nis = 2\n", "paxos is not among the protocols"),
            ("[[claims]]\nof = \"tapir\"\nat = -1\nis = 2\n", "-1 is not among sweep.full"),
            ("[[claims]]\nof = \"tapir\"\n", "missing field `at`"),
            ("[[claims]]\nof = \"tapir\"\nat = 200\nis = 2\ncolumn = \"p51\"\n", "no such column"),
            ("[own_options]\npaxos = []\n", "own_options: paxos is not among the protocols"),
            ("colour = 3\n", "unknown field"),
        ] {
            let error = Experiment::parse(name, &format!("{good}\n{more}")).unwrap_err();
            assert!(format!("{error:#}").contains(problem), "{error:#}");
        }
    }
}
