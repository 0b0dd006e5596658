//! What the checker says.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use orthodrome_core::id::TxnId;
use serde::{Serialize, Serializer};

/// What a history is held to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Model {
    /// Some order of the transactions explains every read, and no transaction that completed
    /// before another was invoked comes after it.
    StrictSerializable,
    /// Some order of the transactions explains every read.
    Serializable,
}

impl fmt::Display for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::StrictSerializable => "strict-serializable",
            Self::Serializable => "serializable",
        })
    }
}

/// A text that names no [`Model`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a consistency model; use strict-serializable or serializable")]
pub struct ParseModelError(String);

impl FromStr for Model {
    type Err = ParseModelError;

    fn from_str(text: &str) -> Result<Self, ParseModelError> {
        match text {
            "strict-serializable" => Ok(Self::StrictSerializable),
            "serializable" => Ok(Self::Serializable),
            _ => Err(ParseModelError(text.into())),
        }
    }
}

/// What is wrong, by the names of Adya (1999) and of Kingsbury and Alvaro (2020) where they have
/// one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Phenomenon {
    /// The history breaks the rule that of all attempts that append an element to a key at most one
    /// may take effect. Nothing can be said about such an element; the recorder is at fault.
    AmbiguousAppend,
    /// A read of something that nobody wrote, or that its writer wrote differently.
    GarbageRead,
    /// A read of something that a failed transaction wrote.
    G1a,
    /// A read of a list between two appends of one transaction.
    G1b,
    /// An element that is in a list twice.
    DuplicateAppend,
    /// Two reads of a list neither of which is a prefix of the other, or a list with the appends of
    /// one transaction in another order than it made them.
    IncompatibleOrder,
    /// A transaction's reads contradict each other or its own writes.
    Internal,
    /// Two versions of a key with the same commit timestamp.
    TimestampTie,
    /// An append that committed but is in no list read later.
    LostAppend,
    /// A cycle of writes only.
    G0,
    /// A cycle of writes and reads of what was written.
    G1c,
    /// A cycle with one read that missed a write.
    GSingle,
    /// A cycle with several reads that missed a write.
    G2Item,
    /// A client read less than what it had written before. Whether the attempt that read it committed
    /// does not matter: its client saw it.
    ReadYourWrites,
    /// A client read less than what it had read before in a committed transaction.
    MonotonicReads,
}

/// Which order of invocations and completions a cycle needs, beside what was read and written.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Order {
    /// The order within a client.
    Process,
    /// The order between clients too.
    RealTime,
}

/// The kind of an anomaly; its text is as in `G-single-realtime`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Kind {
    /// What is wrong.
    pub phenomenon: Phenomenon,
    /// The weakest order that makes it wrong; none if it is wrong whatever the order.
    pub order: Option<Order>,
}

impl From<Phenomenon> for Kind {
    fn from(phenomenon: Phenomenon) -> Self {
        Self { phenomenon, order: None }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.phenomenon {
            Phenomenon::AmbiguousAppend => "ambiguous-append",
            Phenomenon::GarbageRead => "garbage-read",
            Phenomenon::G1a => "G1a",
            Phenomenon::G1b => "G1b",
            Phenomenon::DuplicateAppend => "duplicate-append",
            Phenomenon::IncompatibleOrder => "incompatible-order",
            Phenomenon::Internal => "internal",
            Phenomenon::TimestampTie => "timestamp-tie",
            Phenomenon::LostAppend => "lost-append",
            Phenomenon::G0 => "G0",
            Phenomenon::G1c => "G1c",
            Phenomenon::GSingle => "G-single",
            Phenomenon::G2Item => "G2-item",
            Phenomenon::ReadYourWrites => "read-your-writes",
            Phenomenon::MonotonicReads => "monotonic-reads",
        })?;
        match self.order {
            None => Ok(()),
            Some(Order::Process) => f.write_str("-process"),
            Some(Order::RealTime) => f.write_str("-realtime"),
        }
    }
}

impl Serialize for Kind {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Why one transaction must precede another.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Dependency {
    /// It wrote an earlier version.
    Ww,
    /// It wrote what the other read.
    Wr,
    /// It read what the other overwrote.
    Rw,
    /// Their client saw it complete before invoking the other.
    Process,
    /// It completed before the other was invoked.
    RealTime,
}

/// One edge of a cycle.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Step {
    /// The transaction that must come first.
    #[serde(serialize_with = "as_text")]
    pub from: TxnId,
    /// The transaction that must come later.
    #[serde(serialize_with = "as_text")]
    pub to: TxnId,
    /// Why.
    pub dependency: Dependency,
    /// Why, in words, with key and values.
    pub reason: String,
}

fn as_text<S: Serializer>(txn: &TxnId, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(txn)
}

/// One thing that is wrong.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Anomaly {
    /// Its kind.
    pub kind: Kind,
    /// What is wrong, in a sentence.
    pub problem: String,
    /// The cycle, where the anomaly is one: each step leads to where the next starts, and the last
    /// to where the first started.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cycle: Vec<Step>,
}

/// How many attempts the history has, by status.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize)]
pub struct Counts {
    /// Committed.
    pub ok: u64,
    /// Aborted.
    pub fail: u64,
    /// Unknown.
    pub info: u64,
    /// Of the unknown, those whose writes a committed transaction read, so that they committed.
    pub info_committed: u64,
    /// Reads of any consistent state, which are not among the committed: no model was held against them, but that each saw
    /// one.
    pub stale: u64,
}

/// The result of a check.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Verdict {
    /// What the history was held to.
    pub model: Model,
    /// True if nothing is wrong.
    pub ok: bool,
    /// What was checked.
    pub transactions: Counts,
    /// What is wrong: at most [`MAX_OF_A_KIND`] of each kind.
    pub anomalies: Vec<Anomaly>,
    /// Further findings, counted but not described. One group of transactions that are all on
    /// cycles with each other counts once.
    pub unreported: u64,
    /// Committed writes of versions whose place in the version order nothing tells, because neither
    /// their writer nor any reader knew the timestamp. If there are any, anomalies that involve them
    /// may have been missed.
    pub unplaced_writes: u64,
}

/// How many anomalies of each kind a verdict describes.
pub const MAX_OF_A_KIND: usize = 8;

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Counts { ok, fail, info, info_committed, stale } = self.transactions;
        let word = if self.ok { "passed" } else { "FAILED" };
        write!(f, "{}: {word}; {ok} committed, {fail} aborted, {info} unknown", self.model)?;
        if info > 0 {
            write!(f, " ({info_committed} of them seen to be committed)")?;
        }
        if stale > 0 {
            write!(f, "; {stale} stale reads, each checked for a consistent snapshot only")?;
        }
        writeln!(f)?;
        if self.unplaced_writes > 0 {
            let count = self.unplaced_writes;
            writeln!(
                f,
                "incomplete: {count} committed writes have no known position in the version order"
            )?;
        }
        for anomaly in &self.anomalies {
            writeln!(f, "\n{}: {}", anomaly.kind, anomaly.problem)?;
            for (number, step) in anomaly.cycle.iter().enumerate() {
                writeln!(f, "  {}. {} before {}: {}", number + 1, step.from, step.to, step.reason)?;
            }
        }
        if self.unreported > 0 {
            writeln!(f, "\n{} more anomalies are not shown", self.unreported)?;
        }
        Ok(())
    }
}

/// Anomalies as they are found, a bounded number of each kind.
#[derive(Debug, Default)]
pub(super) struct Findings {
    anomalies: Vec<Anomaly>,
    counts: BTreeMap<Kind, usize>,
    unreported: u64,
}

impl Findings {
    /// Adds a finding; describes it only if there is room.
    pub(super) fn add(&mut self, kind: Kind, describe: impl FnOnce() -> (String, Vec<Step>)) {
        let count = self.counts.entry(kind).or_insert(0);
        *count += 1;
        if *count > MAX_OF_A_KIND {
            self.unreported += 1;
            return;
        }
        let (problem, cycle) = describe();
        self.anomalies.push(Anomaly { kind, problem, cycle });
    }

    /// Adds a finding that is no cycle.
    pub(super) fn note(&mut self, phenomenon: Phenomenon, describe: impl FnOnce() -> String) {
        self.add(phenomenon.into(), || (describe(), Vec::new()));
    }

    /// Counts what is not described at all.
    pub(super) fn leave_out(&mut self, count: u64) {
        self.unreported += count;
    }

    /// Everything found, the kinds in order.
    pub(super) fn finish(mut self) -> (Vec<Anomaly>, u64) {
        self.anomalies.sort_by_key(|anomaly| anomaly.kind);
        (self.anomalies, self.unreported)
    }
}
