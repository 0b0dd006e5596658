//! What a run reports: its figures, or the check that failed.

use std::collections::BTreeMap;
use std::fmt;

use orthodrome_core::machine::Protocol;
use orthodrome_core::time::{Duration, Time};
use orthodrome_eval::metrics::{Run, RunResult, Summary};

use super::Simulation;
use crate::orders::OrderReport;
use crate::promise::Beyond;
use crate::traffic::Traffic;

/// What went wrong in a run.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum FailureKind {
    /// A machine's assertion failed.
    Panic,
    /// A client was told something that is not so.
    Promise,
    /// Something that must end did not.
    Stuck,
    /// Two machines contradict each other, or what a client was told.
    Claim,
    /// A machine made a record or a message that no host takes.
    Limit,
    /// The history is not what the protocol guarantees.
    History,
    /// The same seed gave two different runs.
    Twins,
}

impl fmt::Display for FailureKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Panic => "assertion failed",
            Self::Promise => "safety violated",
            Self::Stuck => "liveness failed",
            Self::Claim => "contradictory claims",
            Self::Limit => "size limit exceeded",
            Self::History => "history check failed",
            Self::Twins => "not deterministic",
        })
    }
}

/// A run in which a check failed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{kind} at {at}: {detail}")]
pub struct Failure {
    /// When it was found.
    pub at: Time,
    /// What kind of failure it is.
    pub kind: FailureKind,
    /// What exactly.
    pub detail: String,
}

/// What a run amounted to.
#[derive(Clone, Debug)]
pub struct Report {
    /// The published figures. `wall` is the caller's to fill in: this crate has no clock.
    pub result: RunResult,
    /// Latencies by the region that transactions were begun in.
    pub regions: BTreeMap<String, Summary>,
    /// The distribution function of all latencies, as [`orthodrome_eval::metrics::OfKind::cdf_ms`].
    pub cdf_ms: Vec<f64>,
    /// Messages and bytes of the measured part.
    pub traffic: Traffic,
    /// How often each of the protocol's rare events happened, by its `Debug` name.
    pub notes: BTreeMap<String, u64>,
    /// How often each kind of fault was injected.
    pub injected: BTreeMap<&'static str, u64>,
    /// What has become of the orders to change members that the schedule gave.
    pub orders: Vec<OrderReport>,
    /// A hash of everything that happened.
    pub trace_hash: u64,
    /// Transactions that had not ended when the run did.
    pub outstanding: u32,
    /// Core time of all nodes, of the whole run, by the CPU-time model.
    pub cpu: Duration,
    /// Whether the workload's own audit of the database held at the end; none if it has no audit. False if it was not made,
    /// because not everything had ended, or found something wrong.
    pub audited: Option<bool>,
    /// The run ended early because a disk lost writes that it had reported durable.
    pub beyond: Option<Beyond>,
}

impl<P: Protocol> Simulation<P> {
    /// The figures so far. What is under way counts as unknown and is dropped.
    pub fn report(&mut self) -> Report {
        let outstanding = self.env.load.outstanding();
        self.env.load.abandon();
        let total = self.env.traffic.total();
        let load = &mut self.env.load;
        (load.counters.messages, load.counters.bytes) = (total.messages, total.bytes);
        let run = Run {
            protocol: P::name(&self.config).into(),
            topology: self.cluster.topology.name.clone(),
            workload: load.workload_name(),
            seed: self.options.seed,
            measured: self.options.duration.saturating_sub(self.options.warmup),
            simulated: self.env.now.since(Time::ZERO),
            wall: Duration::ZERO,
            events: self.env.events,
        };
        Report {
            result: RunResult::new(run, &load.latencies, &load.counters, None),
            cdf_ms: load.latencies.cdf_ms(),
            regions: load.latencies.by_region(
                self.cluster.topology.regions().map(|region| self.cluster.topology.name_of(region)),
            ),
            traffic: self.env.traffic.clone(),
            notes: self.env.notes.iter().map(|(n, &c)| (format!("{n:?}"), c)).collect(),
            injected: self.injected.clone(),
            orders: self.orders(),
            trace_hash: self.trace_hash(),
            outstanding,
            cpu: self.nodes.iter().map(|node| node.cpu.busy()).sum(),
            beyond: self.env.beyond.clone(),
            audited: (!self.env.load.final_requests().is_empty()).then_some(self.is_audited),
        }
    }

    /// A hash of everything that happened so far.
    #[must_use]
    pub fn trace_hash(&self) -> u64 {
        self.env.hash.value()
    }
}
