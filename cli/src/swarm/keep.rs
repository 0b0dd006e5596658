//! Keeps the files of failing seeds for investigation.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use orthodrome_lab::Subject;
use orthodrome_sim::Failure;
use orthodrome_sim::swarm::{Found, Scenario, SwarmOptions};
use serde::Serialize;

use crate::recording::Recording;
use crate::sim;

/// The most bytes of the beginning, and of the end, of the trace of a failure.
const TRACE_END_BYTES: usize = 128 << 20;

/// A summary of a failing seed.
#[derive(Clone, Debug, Serialize)]
pub struct Kept {
    /// The seed.
    pub seed: u64,
    /// The kind of failure.
    pub kind: &'static str,
    /// The simulated time at which it was found.
    pub at_ms: f64,
    /// The details of the failure.
    pub detail: String,
    /// Faults and transactions of the smallest run that still fails.
    pub faults: usize,
    /// See `faults`.
    pub transactions: u64,
    /// The unusual draws that the failure needs.
    pub unusual: Vec<&'static str>,
    /// The folder with schedule, trace and history.
    pub folder: PathBuf,
    /// The command that repeats it at this commit.
    pub replay: String,
}

impl Kept {
    /// Describes a failure whose schedule is in `folder`.
    pub fn new(
        scenario: &Scenario,
        failure: &Failure,
        folder: PathBuf,
        options: &SwarmOptions,
    ) -> Self {
        let (seed, transactions) = (scenario.seed, scenario.options.load.transactions_max);
        let mutation = options.mutation.iter().map(|mutation| format!(" --mutation {mutation}"));
        let profile =
            options.profile.iter().map(|profile| format!(" --profile {}", profile.name()));
        let without: Vec<&str> = scenario.without.iter().map(|draw| draw.name()).collect();
        let without = if without.is_empty() {
            String::new()
        } else {
            format!(" --without {}", without.join(","))
        };
        let replay = format!(
            "swarm --protocol {}{}{} --seeds {seed}..{}{without} --schedule {} \
             --transactions {transactions}",
            options.name,
            mutation.collect::<String>(),
            profile.collect::<String>(),
            seed.saturating_add(1),
            folder.join("schedule.toml").display(),
        );
        Self {
            seed,
            kind: sim::kind(failure.kind),
            at_ms: failure.at.as_micros() as f64 / 1_000.0,
            detail: failure.detail.trim_end().into(),
            faults: scenario.schedule.faults.len(),
            transactions,
            unusual: scenario.unusual.iter().map(|draw| draw.name()).collect(),
            folder,
            replay,
        }
    }

    /// Writes schedule, trace and history of a failure to a folder of its own in `failures`.
    pub fn write(
        failures: &Path,
        subject: &Subject,
        found: &Found,
        options: &SwarmOptions,
    ) -> anyhow::Result<Self> {
        let scenario = &found.scenario;
        let mutation =
            options.mutation.iter().map(|mutation| format!("{mutation}-")).collect::<String>();
        let folder = failures.join(format!("{}-{mutation}{}", options.name, scenario.seed));
        let kept = Self::new(scenario, &found.failure, folder.clone(), options);
        fs::create_dir_all(&folder)
            .with_context(|| format!("--failures: cannot create {}", folder.display()))?;
        let path = folder.join("schedule.toml");
        fs::write(&path, scenario.schedule.to_toml())
            .with_context(|| format!("--failures: cannot write {}", path.display()))?;
        let trace =
            Recording::of_ends(&folder.join("trace"), TRACE_END_BYTES).context("--failures")?;
        let history = Recording::create(&folder.join("history.jsonl")).context("--failures")?;
        subject.record(
            scenario,
            options,
            Some(trace.trace_sink(&kept.replay, &scenario.cluster)),
            Some(history.history_sink()),
        )?;
        trace.finish().context("--failures")?;
        history.finish().context("--failures")?;
        Ok(kept)
    }
}
