//! The checker's verdict.

use std::fmt;
use std::str::FromStr;

use orthodrome_core::id::TxnId;
use orthodrome_core::ordered::OrdMap;
use serde::{Serialize, Serializer};

/// The guarantee against which a history is checked.
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

/// The string that names no [`Model`].
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

/// The kinds of anomaly, named as in Adya (1999) and in Kingsbury and Alvaro (2020) where they have
/// a name there.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Phenomenon {
    /// Several attempts that may have taken effect append the same element to a key. The history
    /// format forbids that: the recorder is at fault, and nothing can be said about the element.
    AmbiguousAppend,
    /// A read of a value that nobody wrote, or that its writer wrote differently.
    GarbageRead,
    /// A read of a failed transaction's write.
    G1a,
    /// A read of a list in the middle of one transaction's appends.
    G1b,
    /// An element occurs twice in a list.
    DuplicateAppend,
    /// Two reads of a list of which neither is a prefix of the other; or a list that has the
    /// appends of one transaction in the wrong order.
    IncompatibleOrder,
    /// A transaction's reads contradict each other or its own writes.
    Internal,
    /// Two versions of a key with the same commit timestamp.
    TimestampTie,
    /// A committed append is missing from every list read later.
    LostAppend,
    /// A cycle of write dependencies only.
    G0,
    /// A cycle of write dependencies and reads of written values.
    G1c,
    /// A cycle with one read that missed a write.
    GSingle,
    /// A cycle with several reads that missed a write.
    G2Item,
    /// A client did not see its own earlier write. The attempt that read it need not have
    /// committed: its client saw the result.
    ReadYourWrites,
    /// A client saw less than it had read before in a committed transaction.
    MonotonicReads,
}

/// The order of invocations and completions that a cycle needs, in addition to reads and writes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Order {
    /// The order within a client.
    Process,
    /// The order between clients as well.
    RealTime,
}

/// The kind of an anomaly. Its display form is like `G-single-realtime`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Kind {
    /// The phenomenon.
    pub phenomenon: Phenomenon,
    /// The weakest order under which it is an anomaly; none if it is one under any order.
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
    /// Their client saw it complete before it invoked the other.
    Process,
    /// It completed before the other was invoked.
    RealTime,
}

/// One edge of a cycle.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Step {
    /// The transaction that must precede.
    #[serde(serialize_with = "as_text")]
    pub from: TxnId,
    /// The transaction that must follow.
    #[serde(serialize_with = "as_text")]
    pub to: TxnId,
    /// The reason.
    pub dependency: Dependency,
    /// The reason as a sentence, with key and values.
    pub reason: String,
}

fn as_text<S: Serializer>(txn: &TxnId, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(txn)
}

/// One anomaly.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Anomaly {
    /// Its kind.
    pub kind: Kind,
    /// A sentence that describes it.
    pub problem: String,
    /// The cycle, if the anomaly is one. Each step ends where the next starts, and the last ends
    /// where the first starts.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cycle: Vec<Step>,
}

/// How many attempts the history has, by status.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize)]
pub struct Counts {
    /// Attempts that committed.
    pub ok: u64,
    /// Attempts that aborted.
    pub fail: u64,
    /// Attempts of unknown outcome.
    pub info: u64,
    /// Attempts of unknown outcome whose writes a committed transaction read: they committed.
    pub info_committed: u64,
    /// Stale reads, which are not counted as committed. The checker only requires that each saw one
    /// consistent state.
    pub stale: u64,
}

/// The result of a check.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Verdict {
    /// The guarantee that was checked.
    pub model: Model,
    /// True if no anomaly was found.
    pub ok: bool,
    /// The number of attempts that were checked, by status.
    pub transactions: Counts,
    /// The anomalies: at most [`MAX_OF_A_KIND`] of each kind.
    pub anomalies: Vec<Anomaly>,
    /// Further anomalies, counted but not described. One group of transactions that are all on
    /// cycles with each other counts once.
    pub unreported: u64,
    /// Committed writes whose position in the version order is unknown, because neither the writer
    /// nor any reader knew the timestamp. If there are any, the checker may have missed anomalies
    /// that involve them.
    pub unplaced_writes: u64,
    /// Reads of an absent key of which it is not known which absence they saw: the database had
    /// forgotten that the key was deleted. The checker may have missed anomalies that involve them.
    #[serde(skip_serializing_if = "is_zero")]
    pub unplaced_reads: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(count: &u64) -> bool {
    *count == 0
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
        if self.unplaced_reads > 0 {
            let count = self.unplaced_reads;
            writeln!(f, "incomplete: {count} reads of absent keys may each have several places")?;
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

/// Collects anomalies, a bounded number of each kind.
#[derive(Debug, Default)]
pub(super) struct Findings {
    anomalies: Vec<Anomaly>,
    counts: OrdMap<Kind, usize>,
    unreported: u64,
}

impl Findings {
    /// Adds an anomaly, and describes it if there is room.
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

    /// Adds an anomaly that is not a cycle.
    pub(super) fn note(&mut self, phenomenon: Phenomenon, describe: impl FnOnce() -> String) {
        self.add(phenomenon.into(), || (describe(), Vec::new()));
    }

    /// Counts anomalies without describing them.
    pub(super) fn leave_out(&mut self, count: u64) {
        self.unreported += count;
    }

    /// All anomalies, ordered by kind.
    pub(super) fn finish(mut self) -> (Vec<Anomaly>, u64) {
        self.anomalies.sort_by_key(|anomaly| anomaly.kind);
        (self.anomalies, self.unreported)
    }
}
