//! The report of a run: its figures, or the check that failed.

use std::fmt;

use orthodrome_core::machine::Protocol;
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::time::{Duration, Time};
use orthodrome_eval::metrics::{Run, RunResult, Summary};

use super::Simulation;
use crate::orders::OrderReport;
use crate::promise::Beyond;
use crate::traffic::Traffic;

/// The kinds of failures.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum FailureKind {
    /// A machine's assertion failed.
    Panic,
    /// A client received a false answer.
    Promise,
    /// A transaction, or something else that must end, did not.
    Stuck,
    /// Two machines contradict each other, or contradict what a client received.
    Claim,
    /// A machine made a record or a message beyond the host's limits.
    Limit,
    /// The history violates the protocol's guarantee.
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
    /// When the failure was found.
    pub at: Time,
    /// The kind of failure.
    pub kind: FailureKind,
    /// The details.
    pub detail: String,
}

/// The results of a run.
#[derive(Clone, Debug)]
pub struct Report {
    /// The published figures. The caller fills in `wall`, because this crate has no clock.
    pub result: RunResult,
    /// Latencies by the clients' region.
    pub regions: OrdMap<String, Summary>,
    /// The distribution function of all latencies, as [`orthodrome_eval::metrics::OfKind::cdf_ms`].
    pub cdf_ms: Vec<f64>,
    /// Messages and bytes of the measured part.
    pub traffic: Traffic,
    /// The number of the protocol's rare events, by their `Debug` form.
    pub notes: OrdMap<String, u64>,
    /// The number of faults injected, by kind.
    pub injected: OrdMap<&'static str, u64>,
    /// The results of the schedule's orders to change members.
    pub orders: Vec<OrderReport>,
    /// A hash of all events.
    pub trace_hash: u64,
    /// The number of transactions that were still pending at the end.
    pub outstanding: u32,
    /// Core time of all nodes in the whole run, by the CPU-time model.
    pub cpu: Duration,
    /// True if the workload's final audit of the database passed; none if it has no audit. False if
    /// the audit failed, or did not run because something was still pending.
    pub audited: Option<bool>,
    /// Set if the run ended early because a disk lost writes that it had reported as durable.
    pub beyond: Option<Beyond>,
}

impl<P: Protocol> Simulation<P> {
    /// The figures so far. Pending transactions are dropped, with an unknown outcome.
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

    /// A hash of all events so far.
    #[must_use]
    pub fn trace_hash(&self) -> u64 {
        self.env.hash.value()
    }
}
