//! The results of a swarm.

use std::borrow::Borrow;

use orthodrome_core::ordered::OrdMap;

use orthodrome_sim::Failure;
use orthodrome_sim::swarm::{ScenarioResult, SeedResult};
use serde::Serialize;

use super::Probed;
use super::keep::Kept;
use crate::output;

/// Trials of a mutation.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Trials {
    /// Number of trials.
    pub made: u64,
    /// Number of trials in which a seed failed.
    pub caught: u64,
    /// The median number of seeds until one failed; none if no seed failed in half of the trials or
    /// more.
    pub median_seeds: Option<u64>,
    /// For each trial that caught the mutation, the number of seeds until one failed, ascending.
    pub seeds_until_caught: Vec<u64>,
}

impl Trials {
    /// Adds a trial: the number of seeds that it took, or none if no seed caught the mutation.
    fn add(&mut self, seeds: Option<u64>) {
        self.made += 1;
        if let Some(seeds) = seeds {
            self.caught += 1;
            self.seeds_until_caught.push(seeds);
            self.seeds_until_caught.sort_unstable();
        }
        // Trials without a catch count as longer than all others.
        let middle = usize::try_from((self.made - 1) / 2).unwrap_or(usize::MAX);
        self.median_seeds = self.seeds_until_caught.get(middle).copied();
    }
}

/// Sums over the seeds of one protocol.
#[derive(Clone, Debug, Serialize)]
pub struct Tally {
    /// The protocol.
    pub protocol: String,
    /// The mutation that was enabled.
    pub mutation: Option<String>,
    /// Every seed was run twice and compared.
    pub twice: bool,
    /// Number of seeds that ran.
    pub seeds: u64,
    /// Simulated time, over all seeds.
    pub simulated_hours: f64,
    /// Real time, over all threads at once.
    pub wall_seconds: f64,
    /// Events handled.
    pub events: u64,
    /// Attempts at transactions in histories that were checked.
    pub transactions_checked: u64,
    /// Those among them whose outcome is unknown.
    pub info: u64,
    /// Seeds whose history violates the protocol's guarantee.
    pub anomalies: u64,
    /// Seeds in which a transaction did not end.
    pub stuck: u64,
    /// Failing seeds by kind of failure.
    pub failed: OrdMap<&'static str, u64>,
    /// With a mutation: seeds that also fail without it, and so do not count as catching it.
    pub fail_anyway: u64,
    /// Seeds that had each unusual draw.
    pub unusual: OrdMap<&'static str, u64>,
    /// Faults injected, by kind.
    pub faults: OrdMap<&'static str, u64>,
    /// The protocol's rare events, by name.
    pub notes: OrdMap<String, u64>,
    /// The seeds that failed.
    pub failures: Vec<Kept>,
    /// Trials, if there were any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trials: Option<Trials>,
}

impl Tally {
    /// An empty tally.
    pub fn new(protocol: &str, mutation: Option<&str>, twice: bool) -> Self {
        Self {
            protocol: protocol.into(),
            mutation: mutation.map(Into::into),
            twice,
            seeds: 0,
            simulated_hours: 0.0,
            wall_seconds: 0.0,
            events: 0,
            transactions_checked: 0,
            info: 0,
            anomalies: 0,
            stuck: 0,
            failed: OrdMap::new(),
            fail_anyway: 0,
            unusual: OrdMap::new(),
            faults: OrdMap::new(),
            notes: OrdMap::new(),
            failures: Vec::new(),
            trials: None,
        }
    }

    /// True if the swarm showed the expected result: no failure, or that it catches the mutation.
    pub fn is_ok(&self) -> bool {
        match (&self.mutation, &self.trials) {
            (None, _) => self.failed.is_empty(),
            (Some(_), Some(trials)) => trials.made > 0 && trials.caught == trials.made,
            (Some(_), None) => !self.failed.is_empty(),
        }
    }

    /// Adds a seed; a failure that also happens without the mutation is counted separately.
    pub fn add(&mut self, result: &SeedResult, fails_anyway: bool) {
        self.fail_anyway += u64::from(fails_anyway);
        let found = result.found.as_ref().filter(|_| !fails_anyway);
        self.count(found.map(|found| &found.original), &result.first);
    }

    /// Adds the run that repeats a failure.
    pub fn add_scenario(&mut self, result: &ScenarioResult) {
        self.count(result.failure.as_ref(), result);
    }

    fn count(&mut self, failure: Option<&Failure>, run: &ScenarioResult) {
        let (attempts, info) = run.attempts;
        self.seeds += 1;
        self.simulated_hours += run.simulated.as_secs_f64() / 3_600.0;
        self.events += run.events;
        self.transactions_checked += attempts;
        self.info += info;
        if let Some(kind) = failure.map(|failure| crate::sim::kind(failure.kind)) {
            *self.failed.entry(kind).or_default() += 1;
            self.anomalies += u64::from(kind == "history");
            self.stuck += u64::from(kind == "stuck");
        }
        for draw in &run.unusual {
            *self.unusual.entry(draw.name()).or_default() += 1;
        }
        for (name, count) in &run.injected {
            *self.faults.entry(name).or_default() += count;
        }
        for (name, count) in &run.notes {
            *self.notes.entry(name.clone()).or_default() += count;
        }
    }

    /// Adds a trial: seeds up to the first that failed, or all of them.
    pub fn add_trial(&mut self, probed: &[Probed]) {
        probed.iter().for_each(|one| self.add(&one.result, one.fails_anyway));
        let is_caught = probed.last().is_some_and(Probed::is_caught);
        self.trials.get_or_insert_default().add(is_caught.then_some(probed.len() as u64));
    }

    /// One line for the progress bar.
    pub fn in_brief(&self) -> String {
        let faults: u64 = self.faults.values().sum();
        let failed: u64 = self.failed.values().sum();
        format!(
            "{:.2} simulated hours, {} faults of {} kinds, {} kinds of notes, {failed} failed",
            self.simulated_hours,
            output::count(faults),
            self.faults.len(),
            self.notes.len(),
        )
    }

    fn rows(&self) -> Vec<(&'static str, String)> {
        let ratio = self.simulated_hours * 3_600.0 / self.wall_seconds.max(1e-6);
        let counted = |name: &str, count: u64| format!("{name} {}", output::count(count));
        let twice = if self.twice {
            ", each run twice; the traces are equal unless a seed below failed"
        } else {
            ""
        };
        let mut rows = vec![
            ("seeds", format!("{}{twice}", output::count(self.seeds))),
            (
                "simulated",
                format!(
                    "{:.2} hours in {:.1} s, {ratio:.0} times real time; {} events",
                    self.simulated_hours,
                    self.wall_seconds,
                    output::count(self.events)
                ),
            ),
            (
                "checked",
                format!(
                    "{} attempts at transactions, {} with unknown outcome",
                    output::count(self.transactions_checked),
                    output::percent(self.info, self.transactions_checked)
                ),
            ),
            ("anomalies", output::count(self.anomalies)),
            ("liveness failures", output::count(self.stuck)),
            (
                "failed",
                list(&self.failed.iter().map(|(name, n)| counted(name, *n)).collect::<Vec<_>>()),
            ),
            (
                "unusual draws",
                list(&self.unusual.iter().map(|(name, n)| counted(name, *n)).collect::<Vec<_>>()),
            ),
            (
                "faults",
                list(&self.faults.iter().map(|(name, n)| counted(name, *n)).collect::<Vec<_>>()),
            ),
            (
                "notes",
                list(&self.notes.iter().map(|(name, n)| counted(name, *n)).collect::<Vec<_>>()),
            ),
        ];
        if self.fail_anyway > 0 {
            let text = format!("{} seeds, which also fail without the mutation", self.fail_anyway);
            rows.push(("not counted", text));
        }
        if let Some(trials) = &self.trials {
            let median = trials.median_seeds.map_or_else(|| "not found".into(), |n| n.to_string());
            let text = format!(
                "{} of {} caught the mutation; median number of seeds until then: {median}",
                trials.caught, trials.made
            );
            rows.push(("trials", text));
        } else if self.mutation.is_some() {
            let first = self.failures.first();
            let text = first.map_or_else(
                || "NOT CAUGHT".into(),
                |kept| format!("caught by seed {}", kept.seed),
            );
            rows.push(("mutation", text));
        }
        rows
    }
}

fn list<T: Borrow<str>>(names: &[T]) -> String {
    if names.is_empty() { "none".into() } else { names.join(", ") }
}

/// The result as readable text.
pub fn describe(tallies: &[Tally]) -> String {
    let mut text = String::new();
    for tally in tallies {
        let mutation = tally.mutation.iter().map(|mutation| format!(" with mutation {mutation}"));
        let title = format!("{}{}", tally.protocol, mutation.collect::<String>());
        text.push_str(&format!("Simulated: swarm of {title}, commit {}\n", output::COMMIT));
        for (name, value) in tally.rows() {
            text.push_str(&format!("  {name:17} {value}\n"));
        }
        for kept in &tally.failures {
            text.push_str(&format!(
                "\nseed {}: {} at {:.3} ms with {} faults, at most {} transactions, and unusual draws: {}; \
                 files in {}\n{}\n  repeat it: orthodrome {}\n",
                kept.seed,
                kept.kind,
                kept.at_ms,
                kept.faults,
                kept.transactions,
                list(&kept.unusual),
                kept.folder.display(),
                kept.detail,
                kept.replay,
            ));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally(mutation: Option<&str>, trials: &[Option<u64>]) -> Tally {
        let mut tally = Tally::new("p", mutation, false);
        for trial in trials {
            tally.trials.get_or_insert_default().add(*trial);
        }
        tally
    }

    #[test]
    fn a_mutation_must_be_caught_in_every_trial() {
        assert!(tally(Some("t"), &[Some(1), Some(3)]).is_ok());
        assert!(!tally(Some("t"), &[Some(1), None]).is_ok());
        assert!(!tally(Some("t"), &[]).is_ok());
        assert!(tally(None, &[]).is_ok());
    }

    #[test]
    fn a_trial_that_catches_nothing_counts_as_the_longest() {
        let median = |trials: &[Option<u64>]| tally(Some("t"), trials).trials.unwrap().median_seeds;
        assert_eq!(median(&[Some(9), Some(1), Some(4)]), Some(4));
        assert_eq!(median(&[Some(9), None, Some(4)]), Some(9));
        assert_eq!(median(&[None, None, Some(4)]), None);
    }
}
