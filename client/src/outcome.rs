//! What became of a transaction.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use orthodrome_core::{Timestamp, TxnId};

use crate::client::Inner;
use crate::names::Name;
use crate::pace::Pace;
use crate::values::Reads;
use crate::wire::{self, Ended, api};

/// What became of a transaction.
#[derive(Debug)]
#[must_use = "a transaction may have aborted, or nobody may know yet"]
pub enum Outcome {
    /// It is durable, with all its effects.
    Committed(Committed),
    /// It had no effect.
    Aborted(Aborted),
    /// It may have committed, or may yet: never take this for an abort.
    Unknown(InDoubt),
}

/// A transaction that committed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Committed {
    /// Its place in the serial order.
    pub timestamp: Timestamp,
    /// What it read. None if the answer with the reads was lost and only the outcome could be
    /// learned again, or if they were over the limit on the size of an answer.
    pub reads: Option<Reads>,
}

/// A transaction that aborted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Aborted {
    /// Why.
    pub reason: AbortReason,
    /// True if it could succeed when tried again as it is. The library did, until the deadline.
    pub retryable: bool,
    /// What the closure said, if it was the closure that gave up.
    pub because: Option<String>,
}

impl Aborted {
    /// A transaction that read less than its client knows.
    pub(crate) fn behind() -> Self {
        Self { reason: AbortReason::StaleRead, retryable: true, because: None }
    }
}

/// Why a transaction aborted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum AbortReason {
    /// It ran into another transaction on the same keys.
    Conflict,
    /// What it read was overwritten before it could commit.
    StaleRead,
    /// Its closure, or its caller, gave up.
    Client,
    /// A guard of its procedure failed, or an operand was not of the right form.
    Guard,
    /// Recovery found it unfinished and ended it.
    Recovery,
    /// Its lease ran out.
    Abandoned,
    /// The cluster was too busy.
    Overload,
    /// It can never succeed as it is.
    Invalid,
    /// An append would have made a value longer than 1 MiB.
    TooLarge,
    /// A reason that this version of the library does not know, by its number.
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

/// A transaction whose outcome could not be learned in time. Dropping it gives up asking.
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

    /// Why its outcome could not be learned.
    #[must_use]
    pub fn trouble(&self) -> &str {
        &self.trouble
    }

    /// Asks again, at one gateway after the other, for as long as [`crate::Config::deadline`] says.
    /// The transaction is ended if it has not ended; whether it commits is decided once, however
    /// often this is asked.
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
                self.client.told(timestamp, self.reads.as_ref(), &writes);
                Outcome::Committed(Committed { timestamp, reads: self.reads })
            }
            Ended::Aborted(aborted) => Outcome::Aborted(aborted),
            Ended::Unknown(trouble) => Outcome::Unknown(Self { trouble, ..self }),
        }
    }
}
