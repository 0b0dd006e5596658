//! Transactions that a gateway runs for itself: the reads of scans and watches, and what happens to
//! leases.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use orthodrome_core::scan::KeyRange;
use orthodrome_core::txn::{AbortReason, Priority, Reads};
use orthodrome_core::{ClientId, Decision, Key, Outcome, RegionId, Txn, TxnId};

use crate::backoff::Backoff;
use crate::gateway::{Begun, Finished, Gateway, GatewayError};

/// How long to wait after a transaction that did not commit, at first.
const PAUSE: Duration = Duration::from_millis(5);
/// The longest such pause.
const PAUSE_MAX: Duration = Duration::from_millis(500);

/// Client ids that nobody uses now, each with the number of transactions that it has had.
#[derive(Debug, Default)]
pub(crate) struct OwnClients(Mutex<Vec<(ClientId, u64)>>);

impl OwnClients {
    fn take(&self) -> Option<(ClientId, u64)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    fn give_back(&self, client: ClientId, counter: u64) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push((client, counter));
    }
}

/// Runs transactions of the gateway, one after the other. After one that did not commit it waits before
/// it returns, longer each time up to a bound.
pub(crate) struct OwnTxns<'a> {
    gateway: &'a Gateway,
    priority: Priority,
    backoff: Backoff,
}

impl<'a> OwnTxns<'a> {
    pub(crate) fn new(gateway: &'a Gateway, priority: Priority) -> Self {
        Self { gateway, priority, backoff: Backoff::new(PAUSE, PAUSE_MAX) }
    }

    /// Reads these keys in one transaction.
    pub(crate) async fn read(&mut self, keys: Vec<Key>) -> Result<Finished, GatewayError> {
        self.read_fenced(keys, None).await
    }

    /// Reads keys and fences, which stand for the keys of `fenced` ([`Txn::fenced`]).
    pub(crate) async fn read_fenced(
        &mut self,
        keys: Vec<Key>,
        fenced: Option<KeyRange>,
    ) -> Result<Finished, GatewayError> {
        let read_only = |id, home| Txn { fenced, ..Txn::read_only(id, home, keys) };
        // A read-only transaction has one round, and asks for no decision.
        self.run(read_only, |_| Decision::Abort).await
    }

    /// Runs one transaction. `decide` gets the reads of an interactive one.
    pub(crate) async fn run(
        &mut self,
        make: impl FnOnce(TxnId, RegionId) -> Txn,
        decide: impl FnOnce(&Reads) -> Decision,
    ) -> Result<Finished, GatewayError> {
        let clients = self.gateway.own_clients();
        let (client, before) = match clients.take() {
            Some(taken) => taken,
            None => (self.gateway.register().await?, 0),
        };
        let counter = before + 1;
        let id = TxnId::new(client, counter);
        let mut txn = make(id, self.gateway.backend().home());
        txn.priority = self.priority;
        txn.acknowledged_below = counter;
        let finished = match self.gateway.begin(txn).await? {
            Begun::Finished(finished) => finished,
            Begun::Reads(reads) => self.gateway.decide(id, decide(&reads)).await?,
        };
        match finished.outcome {
            Outcome::Committed(_) | Outcome::Aborted(AbortReason::TooLarge) => {}
            Outcome::Aborted(_) | Outcome::Unknown => {
                tokio::time::sleep(self.backoff.pause()).await;
            }
        }
        // After an unknown outcome the client cannot say that it knows all its outcomes.
        if finished.outcome != Outcome::Unknown {
            clients.give_back(client, counter);
        }
        Ok(finished)
    }
}
