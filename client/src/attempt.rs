//! Attempts at transactions, for callers that record a history.

use std::time::Instant;

use orthodrome_core::txn::AbortReason as CoreReason;
use orthodrome_core::{Outcome, RegionId, TxnId};
use tokio::sync::mpsc::UnboundedSender;

use crate::outcome::AbortReason;
use crate::values::Reads;
use crate::wire::Ended;

/// One attempt that the library made for `Transaction::run`, `General::run`, `Client::execute` or
/// `Client::read`. The library sends it to the channel of [`crate::Config::attempts`] when it has
/// ended. If a general transaction runs by reconnaissance, its reads and its interactive
/// transaction appear as separate attempts.
#[derive(Clone, Debug)]
pub struct Attempt {
    /// The attempt's name.
    pub txn: TxnId,
    /// The region of the gateway that the library used.
    pub home: RegionId,
    /// A moment no later than the attempt's start.
    pub began: Instant,
    /// A moment no earlier than the arrival of its outcome.
    pub ended: Instant,
    /// The outcome. If it is unknown, a later [`crate::InDoubt::resolve`] may find it out; that
    /// result is not sent here.
    pub outcome: Outcome,
    /// What it read, if the client received it.
    pub reads: Option<Reads>,
    /// True for a read-only transaction: a `Client::read`, or a reconnaissance read of a general
    /// transaction.
    pub is_read_only: bool,
}

/// The channel for attempts, if the caller wants them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Recorder(pub(crate) Option<UnboundedSender<Attempt>>);

impl Recorder {
    /// Sends one attempt that ends now.
    pub(crate) fn record(
        &self,
        txn: TxnId,
        home: RegionId,
        began: Instant,
        ended: &Ended,
        reads: Option<&Reads>,
        is_read_only: bool,
    ) {
        let Some(sender) = &self.0 else { return };
        let outcome = match ended {
            Ended::Committed(timestamp) => Outcome::Committed(*timestamp),
            Ended::Aborted(aborted) => Outcome::Aborted(aborted.reason.into()),
            Ended::Unknown(_) => Outcome::Unknown,
        };
        let reads = reads.cloned();
        // The receiver may have been dropped.
        let ended = Instant::now();
        let _ = sender.send(Attempt { txn, home, began, ended, outcome, reads, is_read_only });
    }
}

impl From<AbortReason> for CoreReason {
    /// A reason that this version does not know becomes [`CoreReason::Invalid`].
    fn from(reason: AbortReason) -> Self {
        match reason {
            AbortReason::Conflict => Self::Conflict,
            AbortReason::StaleRead => Self::StaleRead,
            AbortReason::Client => Self::Client,
            AbortReason::Guard => Self::Guard,
            AbortReason::Recovery => Self::Recovery,
            AbortReason::Abandoned => Self::Abandoned,
            AbortReason::Overload => Self::Overload,
            AbortReason::TooLarge => Self::TooLarge,
            AbortReason::Invalid | AbortReason::Other(_) => Self::Invalid,
        }
    }
}
