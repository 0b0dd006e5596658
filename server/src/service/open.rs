//! Interactive and general transactions that wait for their clients, each with a lease.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::{Key, TxnId};
use tokio::time::Instant;
use tonic::Status;

use super::access::Principal;
use super::admission::Held;
use super::metrics::Timing;
use super::refuse;

/// How long a node that is stopping waits for the client of an open transaction. A client that
/// thinks for longer, and extends its lease meanwhile, would keep the node from ending.
const IDLE_WHILE_STOPPING: Duration = Duration::from_secs(1);

/// One open transaction.
#[derive(Debug)]
pub(super) struct Open {
    owner: Arc<Principal>,
    /// The keys that it may access.
    pub(super) scope: Scope,
    timing: Timing,
    expires: Instant,
    /// When the node last did something for it.
    touched: Instant,
    /// True during a round of reads: no other request is accepted, and the lease does not expire.
    is_reading: bool,
    /// The bytes of the requests whose keys are kept here.
    held: Vec<Arc<Held>>,
}

/// The keys that an open transaction may access.
#[derive(Debug)]
pub(super) enum Scope {
    /// It may write these keys.
    Declared(Vec<Key>),
    /// Any keys.
    General {
        /// The keys that it has read.
        keys: OrdSet<Key>,
        /// The bytes of keys and values that it has read.
        bytes: usize,
    },
}

/// The open transactions of one gateway, and the room for new ones.
#[derive(Debug)]
pub(super) struct OpenTxns {
    table: Mutex<Table>,
    most: usize,
    lease: Duration,
}

#[derive(Debug, Default)]
struct Table {
    open: OrdMap<TxnId, Open>,
    beginning: usize,
}

impl Table {
    /// The transaction of `caller`, if it waits for its client.
    fn idle(&mut self, id: TxnId, caller: &Principal) -> Result<&mut Open, Status> {
        // Another client's transaction is reported as unknown, because ids are easy to guess.
        let open = self.open.get_mut(&id).filter(|open| open.owner.name == caller.name);
        let open = open.ok_or_else(|| {
            refuse(Status::not_found(format!(
                "transaction {id} is not open here: its lease expired, the node is stopping, it is \
                 decided, or it began at another gateway; use Resolve"
            )))
        })?;
        if open.is_reading {
            return Err(refuse(Status::failed_precondition(format!(
                "transaction {id} is reading; wait for that round, or use Resolve"
            ))));
        }
        Ok(open)
    }
}

/// Room for one transaction that is about to begin; released when dropped.
#[derive(Debug)]
pub(super) struct Room<'a>(&'a OpenTxns);

impl Drop for Room<'_> {
    fn drop(&mut self) {
        self.0.lock().beginning -= 1;
    }
}

impl Room<'_> {
    /// Adds the transaction, which has begun and waits for its client.
    pub(super) fn open(
        self,
        id: TxnId,
        owner: Arc<Principal>,
        scope: Scope,
        timing: Timing,
        held: Option<Arc<Held>>,
    ) {
        let touched = Instant::now();
        let expires = touched + self.0.lease;
        let held = held.into_iter().collect();
        let open = Open { owner, scope, timing, expires, touched, is_reading: false, held };
        // The gateway refuses an id that is in use, so nothing is replaced here.
        self.0.lock().open.insert(id, open);
    }
}

/// A pending round of reads. If it is dropped before [`Round::complete`], the transaction is
/// removed: it has ended, or the gateway aborts it because no call waits for the round any more.
#[derive(Debug)]
pub(super) struct Round<'a> {
    open: &'a OpenTxns,
    id: TxnId,
    pub(super) timing: Timing,
    is_over: bool,
}

impl Round<'_> {
    /// Completes the round: the transaction waits for its client again. Returns the bytes that it
    /// has read so far.
    pub(super) fn complete(
        mut self,
        keys: impl IntoIterator<Item = Key>,
        more: usize,
        hold: Option<Arc<Held>>,
    ) -> usize {
        let touched = Instant::now();
        self.is_over = true;
        let mut table = self.open.lock();
        let Some(open) = table.open.get_mut(&self.id) else { return more };
        (open.is_reading, open.touched, open.expires) = (false, touched, touched + self.open.lease);
        open.timing.reads_answered = Some(touched);
        open.held.extend(hold);
        match &mut open.scope {
            Scope::Declared(_) => more,
            Scope::General { keys: all, bytes } => {
                all.extend(keys);
                *bytes += more;
                *bytes
            }
        }
    }
}

impl Drop for Round<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            self.open.lock().open.remove(&self.id);
        }
    }
}

impl OpenTxns {
    pub(super) fn new(most: usize, lease: Duration) -> Self {
        Self { table: Mutex::default(), most, lease }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        // No code that holds the lock can leave the table inconsistent.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of open transactions.
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

    /// Removes a transaction of `caller`, if `check` accepts it; the caller of this function then
    /// decides it.
    pub(super) fn take(
        &self,
        id: TxnId,
        caller: &Principal,
        check: impl FnOnce(&Open) -> Result<(), Status>,
    ) -> Result<Timing, Status> {
        let mut table = self.lock();
        let open = table.idle(id, caller)?;
        check(open)?;
        let timing = open.timing;
        table.open.remove(&id);
        Ok(timing)
    }

    /// Begins a round of reads of a transaction of `caller`, if `check` accepts it.
    pub(super) fn read(
        &self,
        id: TxnId,
        caller: &Principal,
        check: impl FnOnce(&Open) -> Result<(), Status>,
    ) -> Result<Round<'_>, Status> {
        let mut table = self.lock();
        let open = table.idle(id, caller)?;
        check(open)?;
        open.is_reading = true;
        let timing = open.timing;
        Ok(Round { open: self, id, timing, is_over: false })
    }

    /// Refuses `Resolve` of a transaction that another principal has open here. Otherwise `Resolve`
    /// would end it, and its owner would receive that outcome.
    pub(super) fn check_owner(&self, id: TxnId, caller: &Principal) -> Result<(), Status> {
        match self.lock().open.get(&id) {
            Some(open) if open.owner.name != caller.name => {
                Err(refuse(Status::permission_denied(format!(
                    "transaction {id} is open for another principal; only that one may resolve it"
                ))))
            }
            Some(_) | None => Ok(()),
        }
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

    /// Removes every transaction whose lease expired before `now`. If the node is stopping, also
    /// those that have waited for their client for [`IDLE_WHILE_STOPPING`].
    pub(super) fn take_expired(&self, now: Instant, is_stopping: bool) -> Vec<TxnId> {
        let is_expired = |open: &Open| {
            let is_over = is_stopping && open.touched + IDLE_WHILE_STOPPING < now;
            (open.expires < now || is_over) && !open.is_reading
        };
        self.lock().open.extract_if(.., |_, open| is_expired(open)).map(|(id, _)| id).collect()
    }

    /// Interval of the search for expired leases, so that no lease lasts more than a quarter too
    /// long.
    pub(super) fn sweep_interval(&self) -> Duration {
        (self.lease / 4).min(IDLE_WHILE_STOPPING / 2)
    }
}
