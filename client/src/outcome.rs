//! Outcomes of transactions.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use orthodrome_core::{Timestamp, TxnId};

use crate::client::Inner;
use crate::names::Name;
use crate::pace::Pace;
use crate::values::Reads;
use crate::wire::{self, Ended, api};

/// The outcome of a transaction.
#[derive(Debug)]
#[must_use = "a transaction may have aborted, or nobody may know yet"]
pub enum Outcome {
    /// It is durable, with all its effects.
    Committed(Committed),
    /// It had no effect.
    Aborted(Aborted),
    /// It may have committed, or may still commit. Never treat this as an abort.
    Unknown(InDoubt),
}

/// A transaction that committed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Committed {
    /// Its position in the serial order.
    pub timestamp: Timestamp,
    /// What it read. None if the answer with the reads was lost and only the outcome could be asked
    /// for again, or if the reads were larger than an answer may be.
    pub reads: Option<Reads>,
}

/// A transaction that aborted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Aborted {
    /// The reason.
    pub reason: AbortReason,
    /// True if the same transaction may succeed on a retry. The library has retried it until the
    /// deadline.
    pub retryable: bool,
    /// The closure's message, if the closure gave up.
    pub because: Option<String>,
}

impl Aborted {
    /// A transaction of which no server knows anything, and which nobody asked to commit.
    pub(crate) fn undecided() -> Self {
        Self { reason: AbortReason::Recovery, retryable: true, because: None }
    }

    /// A transaction whose reads were older than what its client knows.
    pub(crate) fn behind() -> Self {
        Self { reason: AbortReason::StaleRead, retryable: true, because: None }
    }
}

/// Why a transaction aborted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum AbortReason {
    /// It conflicted with another transaction.
    Conflict,
    /// A value that it read was overwritten before it could commit.
    StaleRead,
    /// Its closure or its caller gave up.
    Client,
    /// A guard of its procedure failed, or an operand had the wrong form.
    Guard,
    /// Recovery found it unfinished and ended it.
    Recovery,
    /// Its lease ran out.
    Abandoned,
    /// The cluster was too busy.
    Overload,
    /// It is invalid and can never succeed.
    Invalid,
    /// An append would have made a value longer than 1 MiB.
    TooLarge,
    /// A reason that this version of the library does not know; the number is that of the API.
    Other(i32),
}

impl fmt::Display for AbortReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Conflict => "conflict",
            Self::StaleRead => "stale-read",
            Self::Client => "client",
            Self::Guard => "guard",
            Self::Recovery => "recovery",
            Self::Abandoned => "abandoned",
            Self::Overload => "overload",
            Self::Invalid => "invalid",
            Self::TooLarge => "too-large",
            Self::Other(number) => return write!(f, "reason-{number}"),
        })
    }
}

/// A transaction whose outcome could not be learned in time. If you drop it, nobody asks again.
pub struct InDoubt {
    pub(crate) client: Arc<Inner>,
    pub(crate) name: Name,
    pub(crate) question: Box<api::ResolveRequest>,
    pub(crate) reads: Option<Reads>,
    pub(crate) trouble: String,
}

impl fmt::Debug for InDoubt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InDoubt")
            .field("txn", &self.txn())
            .field("trouble", &self.trouble)
            .finish_non_exhaustive()
    }
}

impl InDoubt {
    /// The transaction's name.
    #[must_use]
    pub fn txn(&self) -> TxnId {
        self.name.id()
    }

    /// Why the library could not learn its outcome.
    #[must_use]
    pub fn trouble(&self) -> &str {
        &self.trouble
    }

    /// Asks one gateway after the other again, until [`crate::Config::deadline`] passes. A
    /// transaction that is still pending is ended by this. Its outcome is decided only once,
    /// however often you ask.
    pub async fn resolve(self) -> Outcome {
        let deadline = self.client.deadline;
        self.resolve_within(deadline).await
    }

    /// As [`InDoubt::resolve`], for at most `time`.
    pub async fn resolve_within(self, time: Duration) -> Outcome {
        let mut pace = Pace::new(time);
        match self.client.ask(&self.question, None, &mut pace).await {
            Ended::Committed(timestamp) => {
                let writes = wire::asked_writes(&self.question);
                self.client.learn_commit(timestamp, self.reads.as_ref(), &writes);
                Outcome::Committed(Committed { timestamp, reads: self.reads })
            }
            Ended::Aborted(aborted) => Outcome::Aborted(aborted),
            Ended::Unknown(trouble) => Outcome::Unknown(Self { trouble, ..self }),
        }
    }
}
