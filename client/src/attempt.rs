//! Every attempt at a transaction, for callers that keep a history of what they saw.

use std::time::Instant;

use orthodrome_core::txn::AbortReason as CoreReason;
use orthodrome_core::{Outcome, RegionId, TxnId};
use tokio::sync::mpsc::UnboundedSender;

use crate::outcome::AbortReason;
use crate::values::Reads;
use crate::wire::Ended;

/// One attempt that the library made for `Transaction::run`, `General::run`, `Client::execute` or
/// `Client::read`, when it had ended. One at a general transaction that goes by reconnaissance is seen
/// as the reads and the interactive transaction that it consists of. Sent to whoever asked for it by [`crate::Config::attempts`].
#[derive(Clone, Debug)]
pub struct Attempt {
    /// Its name.
    pub txn: TxnId,
    /// The region that it was begun in: that of the gateway in use.
    pub home: RegionId,
    /// Not later than it was begun.
    pub began: Instant,
    /// Not earlier than its outcome was known here.
    pub ended: Instant,
    /// What became of it. If nobody could tell in time, a later [`crate::InDoubt::resolve`] may know
    /// more; that is not sent here.
    pub outcome: Outcome,
    /// What it read, if that was learned.
    pub reads: Option<Reads>,
    /// It was a read-only transaction: a `Client::read`, or reconnaissance for a general transaction.
    pub is_read_only: bool,
}

/// Where attempts are sent, if anywhere.
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
        // Whoever asked may have stopped listening.
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
