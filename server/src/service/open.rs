//! Interactive transactions that wait for their clients, each on a lease.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use orthodrome_core::{Key, TxnId};
use tokio::time::Instant;
use tonic::Status;

use super::access::Principal;
use super::admission::Held;
use super::refuse;

/// One open transaction.
#[derive(Debug)]
pub(super) struct Open {
    owner: Arc<Principal>,
    /// What it may write.
    pub(super) write_keys: Vec<Key>,
    expires: Instant,
    /// The bytes of the request that began it, which the write keys still take.
    _held: Option<Arc<Held>>,
}

/// The open transactions of one gateway, and room for those that are being begun.
#[derive(Debug)]
pub(super) struct OpenTxns {
    table: Mutex<Table>,
    most: usize,
    lease: Duration,
}

#[derive(Debug, Default)]
struct Table {
    open: BTreeMap<TxnId, Open>,
    beginning: usize,
}

/// Room for one transaction that is being begun; given back when dropped.
#[derive(Debug)]
pub(super) struct Room<'a>(&'a OpenTxns);

impl Drop for Room<'_> {
    fn drop(&mut self) {
        self.0.lock().beginning -= 1;
    }
}

impl Room<'_> {
    /// The transaction has begun and waits for its client.
    pub(super) fn open(
        self,
        id: TxnId,
        owner: Arc<Principal>,
        write_keys: Vec<Key>,
        held: Option<Arc<Held>>,
    ) {
        let expires = Instant::now() + self.0.lease;
        let open = Open { owner, write_keys, expires, _held: held };
        // The gateway refuses a name that is in use, so nothing is replaced here.
        self.0.lock().open.insert(id, open);
    }
}

impl OpenTxns {
    pub(super) fn new(most: usize, lease: Duration) -> Self {
        Self { table: Mutex::default(), most, lease }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        // No code that holds the lock can leave the table half changed.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.lock().open.len()
    }

    /// Room for one more.
    pub(super) fn room(&self) -> Result<Room<'_>, Status> {
        let mut table = self.lock();
        if table.open.len() + table.beginning >= self.most {
            return Err(refuse(Status::resource_exhausted(format!(
                "busy: {} interactive transactions are open at this gateway; try again after a \
                 pause, or at another gateway",
                self.most
            ))));
        }
        table.beginning += 1;
        Ok(Room(self))
    }

    /// Takes a transaction of `caller` out, if `check` accepts it; who takes it out decides it.
    pub(super) fn take(
        &self,
        id: TxnId,
        caller: &Principal,
        check: impl FnOnce(&Open) -> Result<(), Status>,
    ) -> Result<(), Status> {
        let mut table = self.lock();
        // Somebody else's is reported as none: names of transactions are easy to guess.
        let open = table.open.get(&id).filter(|open| open.owner.name == caller.name);
        let open = open.ok_or_else(|| {
            refuse(Status::not_found(format!(
                "transaction {id} is not open here: its lease ran out, it was decided, or it began \
                 at another gateway; ask Resolve"
            )))
        })?;
        check(open)?;
        table.open.remove(&id);
        Ok(())
    }

    /// Extends the lease of a transaction of `caller`; false if it has none.
    pub(super) fn keep(&self, id: TxnId, caller: &Principal) -> bool {
        let expires = Instant::now() + self.lease;
        let mut table = self.lock();
        match table.open.get_mut(&id).filter(|open| open.owner.name == caller.name) {
            Some(open) => {
                open.expires = expires;
                true
            }
            None => false,
        }
    }

    /// Takes out every transaction whose lease ran out before `now`.
    pub(super) fn take_expired(&self, now: Instant) -> Vec<TxnId> {
        self.lock().open.extract_if(.., |_, open| open.expires < now).map(|(id, _)| id).collect()
    }

    /// How often to look for expired leases, so that none lives more than a quarter too long.
    pub(super) fn sweep_interval(&self) -> Duration {
        self.lease / 4
    }
}
