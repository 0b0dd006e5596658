//! The driver of one source: carries out an agent's orders, with one session for each branch.

mod batch;
mod ending;
mod look;
mod pool;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use orthodrome_core::NodeId;
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_geotp::contract::{Failure, FromSource, Reason, Then, ToSource, Xid};
use orthodrome_geotp::sql::Dialect;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use self::batch::Text;
use super::driver::{Endpoint, Fault, Interrupt, Session, Setting, Sql, Trouble};
use super::marks::Marks;
use super::names::Missing;
use super::session_list::{Listed, SessionList};

/// Time limit for a server's answer to a question about itself.
pub(crate) const SILENT: Duration = Duration::from_secs(5);
/// Pause before a retry.
const AGAIN: Duration = Duration::from_millis(100);
/// Number of interrupts of a query batch before its session is ended.
const INTERRUPTS_MAX: u32 = 10;
/// Maximum number of branches with sessions, until the server has said how many sessions it allows.
const BRANCHES_AT_FIRST: usize = 64;
/// The part of a server's sessions that branches may have: three of four. Others are for commits,
/// queries outside of branches, and administrators.
const BRANCHES_OF: (usize, usize) = (3, 4);
/// Maximum number of sessions that a server can allow, whatever it says.
const SESSIONS_MAX: usize = 1 << 20;

/// A branch's session.
struct Slot {
    session: tokio::sync::Mutex<Option<Session>>,
    handle: Mutex<Handle>,
    /// Number of query batches that have been started in it.
    texts: AtomicU64,
    /// True if the branch must be rolled back; no further batch starts in it.
    is_ended: AtomicBool,
    is_prepared: AtomicBool,
    /// Number of locks on names of rows that it has taken.
    named: AtomicUsize,
    /// What tells rows that it has deleted itself from those that others have inserted.
    missing: Mutex<Missing>,
    /// Its savepoints.
    marks: Mutex<Marks>,
    /// Settings of its session and transaction.
    settings: Mutex<Vec<Setting>>,
    /// True if its session must be reset before another branch uses it.
    may_leave: AtomicBool,
    /// Its share of the sessions that branches may have.
    admitted: Mutex<Option<OwnedSemaphorePermit>>,
}

/// Whether a driver may open sessions. An agent's driver may if no session of an earlier
/// incarnation is running; before, it opens none, and so ends no branch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Reach {
    /// It is connecting to the server, or ending old sessions.
    Unknown,
    /// It may.
    Ready,
    /// The server cannot be reached.
    Down,
}

/// The handle for interrupting a branch's session.
#[derive(Default)]
struct Handle {
    /// The session, while it belongs to this branch.
    of: Option<Interrupt>,
    /// The start of the session's server.
    start: u64,
    /// Number of interrupts that may still arrive at it.
    under_way: u32,
}

/// One source.
pub(crate) struct Source {
    node: NodeId,
    endpoint: Endpoint,
    slots: Mutex<OrdMap<Xid, Arc<Slot>>>,
    /// Prepared branches that are being ended. That continues until it succeeds, so a repeated
    /// order has no effect.
    ending: Mutex<OrdSet<Xid>>,
    idle: Arc<Mutex<Vec<Session>>>,
    report: Box<dyn Fn(FromSource<Sql>) + Send + Sync>,
    /// Why the server cannot be reached, or refuses the login, since it was reached last.
    refusal: Mutex<Option<String>>,
    /// The sessions of this incarnation, on disk, so that the next one can end those that are still
    /// running (G6).
    sessions: Option<SessionList>,
    /// Whether sessions may be opened.
    reach: watch::Sender<Reach>,
    start: AtomicU64,
    /// The number of branches that may get a session now.
    branches: Arc<Semaphore>,
    /// The number of branches that may have one at the same time.
    branches_max: AtomicUsize,
    last_id: AtomicU64,
    /// True if branches get transaction numbers, so that the holders of locks can be identified.
    is_numbering: AtomicBool,
}

/// A server's answer, or an error if it takes too long.
pub(crate) async fn in_time<T>(
    asked: impl Future<Output = Result<T, Trouble>>,
) -> Result<T, Trouble> {
    let silent = |_| Trouble::Broken(std::io::Error::from(std::io::ErrorKind::TimedOut));
    tokio::time::timeout(SILENT, asked).await.map_err(silent)?
}

/// The fault of a statement that was interrupted before it was sent.
fn interrupted() -> Fault {
    let message = "the statement was interrupted before it was sent".to_owned();
    Fault { sqlstate: "57014".into(), number: 1317, message }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic elsewhere leaves the state behind these locks consistent, because every change is one
    // call.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Slot {
    /// The number of the branch's session at the server.
    fn session_id(&self) -> Option<u64> {
        locked(&self.handle).of.as_ref().map(Interrupt::id)
    }

    /// The branch's session, with the start of its server.
    fn listed(&self) -> Option<Listed> {
        let handle = locked(&self.handle);
        handle.of.as_ref().map(|of| (handle.start, of.id()))
    }

    /// The session to interrupt, if the branch has one and it is running. No other branch uses it
    /// until [`has_met`](Self::has_met).
    fn reach_for(&self, is_running: impl Fn() -> bool) -> Option<Interrupt> {
        let mut handle = locked(&self.handle);
        let running = handle.of.clone().filter(|_| is_running())?;
        handle.under_way += 1;
        Some(running)
    }

    fn has_met(&self) {
        locked(&self.handle).under_way -= 1;
    }
}

impl Source {
    /// Starts a driver. `report` is called with every message for the agent.
    pub(crate) fn start(
        node: NodeId,
        endpoint: Endpoint,
        sessions: Option<PathBuf>,
        report: impl Fn(FromSource<Sql>) + Send + Sync + 'static,
    ) -> Arc<Self> {
        let source = Arc::new(Self {
            node,
            endpoint,
            slots: Mutex::default(),
            ending: Mutex::default(),
            idle: Arc::default(),
            report: Box::new(report),
            refusal: Mutex::default(),
            reach: watch::Sender::new(if sessions.is_none() {
                Reach::Ready
            } else {
                Reach::Unknown
            }),
            sessions: sessions.map(SessionList::new),
            start: AtomicU64::new(0),
            last_id: AtomicU64::new(0),
            is_numbering: AtomicBool::new(false),
            branches: Arc::new(Semaphore::new(BRANCHES_AT_FIRST)),
            branches_max: AtomicUsize::new(BRANCHES_AT_FIRST),
        });
        tokio::spawn(source.clone().watch());
        tokio::spawn(source.clone().look_for_waits());
        source
    }

    /// Why the server cannot be reached, or refuses the login; none if it was reached.
    pub(crate) fn refusal(&self) -> Option<String> {
        locked(&self.refusal).clone()
    }

    /// The meaning of an error for a transaction.
    pub(crate) fn failure(&self, fault: Fault) -> Failure<Sql> {
        self.endpoint.judge(fault).0
    }

    /// Carries out an order.
    pub(crate) fn order(self: &Arc<Self>, order: ToSource<Sql>) {
        let source = self.clone();
        match order {
            ToSource::Run { xid, begin, marks, statements, then, wrote: _ } => {
                let slot = if begin.is_some() {
                    let slot = Arc::new(Slot {
                        session: tokio::sync::Mutex::new(None),
                        handle: Mutex::default(),
                        texts: AtomicU64::new(0),
                        is_ended: AtomicBool::new(false),
                        is_prepared: AtomicBool::new(false),
                        named: AtomicUsize::new(0),
                        missing: Mutex::default(),
                        marks: Mutex::default(),
                        settings: Mutex::default(),
                        may_leave: AtomicBool::new(false),
                        admitted: Mutex::default(),
                    });
                    locked(&self.slots).insert(xid, slot.clone());
                    Some(slot)
                } else {
                    self.slot(xid)
                };
                let text = Text { begin, marks: Some(marks), statements, then };
                tokio::spawn(async move { source.run(xid, slot, text).await });
            }
            ToSource::Prepare { xid, wrote: _ } => {
                tokio::spawn(async move {
                    source.run(xid, source.slot(xid), Text::ending(Then::Prepare)).await
                });
            }
            ToSource::CommitOnePhase { xid, at: _ } => {
                tokio::spawn(async move {
                    source.run(xid, source.slot(xid), Text::ending(Then::Commit)).await
                });
            }
            ToSource::CommitPrepared { xid, at } => {
                tokio::spawn(async move { source.commit_prepared(xid, at).await });
            }
            ToSource::Rollback { xid } => {
                tokio::spawn(async move { source.rollback(xid).await });
            }
            ToSource::Interrupt { xid } => {
                tokio::spawn(async move { source.interrupt(xid).await });
            }
            ToSource::List => {
                tokio::spawn(async move { source.list().await });
            }
        }
    }

    /// Waits until a branch may have a session. Branches that pile up, such as those that wait for
    /// the same row, must not use up the connections of the server.
    async fn admit(&self, slot: &Slot) -> Result<(), Failure<Sql>> {
        let free = self.branches.clone().acquire_owned();
        match tokio::time::timeout(self.endpoint.lock_wait, free).await {
            Ok(Ok(permit)) => {
                *locked(&slot.admitted) = Some(permit);
                Ok(())
            }
            Ok(Err(_)) | Err(_) => {
                let most = self.branches_max.load(Ordering::Relaxed);
                let message = format!(
                    "{most} transactions use the sessions that the proxy may have at this source"
                );
                let (sqlstate, number) = match self.endpoint.kind {
                    Dialect::PostgreSql => ("53300", 0),
                    Dialect::MariaDb => ("08004", 1040),
                };
                let fault = Fault { sqlstate: sqlstate.into(), number, message };
                Err(Failure { reason: Reason::Statement, fault: Some(fault) })
            }
        }
    }

    /// Adapts the number of branches with sessions to what the server allows.
    fn admit_at_most(&self, sessions: usize) {
        let (part, whole) = BRANCHES_OF;
        let most = (sessions.min(SESSIONS_MAX) * part / whole).max(1);
        let before = self.branches_max.load(Ordering::Relaxed);
        let now = match most.checked_sub(before) {
            Some(more) => {
                self.branches.add_permits(more);
                most
            }
            // Those that are in use go on.
            None => before - self.branches.forget_permits(before - most),
        };
        self.branches_max.store(now, Ordering::Relaxed);
    }

    fn slot(&self, xid: Xid) -> Option<Arc<Slot>> {
        locked(&self.slots).get(&xid).cloned()
    }
}
