//! The driver of one source: carries out an agent's orders, with one session for each branch.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use orthodrome_core::{NodeId, Timestamp};
use orthodrome_geotp::contract::{
    Failure, FromSource, Isolation, Mark, Reason, Then, ToSource, Wait, Xid,
};
use orthodrome_geotp::sql::plan::Keys;
use orthodrome_geotp::sql::{Answer, Dialect, Record};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tracing::{debug, info, warn};

use super::driver::{
    Described, Endpoint, Fault, Holder, Interrupt, Outcome, Session, Setting, Sql, Statement,
    Trouble,
};
use super::marks::{Failed, Marked, Marks};
use super::names::{self, Missing, Probe};
use super::session_list::{Listed, SessionList};

/// Interval between checks of a source.
const LOOK: Duration = Duration::from_millis(500);
/// Time limit for a server's answer to a question about itself.
pub(super) const SILENT: Duration = Duration::from_secs(5);
/// Time limit of a query batch that is a transaction by itself, in addition to waits for locks.
const STUCK: Duration = Duration::from_secs(60);
/// Pause before a retry.
const AGAIN: Duration = Duration::from_millis(100);
/// Number of interrupts of a query batch before its session is ended.
const INTERRUPTS_MAX: u32 = 10;
/// How often a branch begins, if the statements with which it begins meet changes that are newer
/// than its snapshot.
const BEGINS: u32 = 4;
/// Maximum number of branches with sessions, until the server has said how many sessions it allows.
const BRANCHES_AT_FIRST: usize = 64;
/// The part of a server's sessions that branches may have: three of four. Others are for commits,
/// queries outside of branches, and administrators.
const BRANCHES_OF: (usize, usize) = (3, 4);
/// Maximum number of sessions that a server can allow, whatever it says.
const SESSIONS_MAX: usize = 1 << 20;
/// Maximum number of idle sessions.
const IDLE_MAX: usize = 128;

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

/// Whether a server reports that the user, the password or the database is wrong.
fn is_of_login(fault: &Fault) -> bool {
    fault.sqlstate.starts_with("28")
        || fault.sqlstate == "3D000"
        || matches!(fault.number, 1044 | 1045 | 1049 | 1698)
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
pub(super) struct Source {
    node: NodeId,
    endpoint: Endpoint,
    slots: Mutex<BTreeMap<Xid, Arc<Slot>>>,
    /// Prepared branches that are being ended. That continues until it succeeds, so a repeated
    /// order has no effect.
    ending: Mutex<BTreeSet<Xid>>,
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
pub(super) async fn in_time<T>(
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

/// Keeps an idle session for other branches, unless there are enough.
fn keep(idle: &Mutex<Vec<Session>>, session: Session) {
    let mut idle = locked(idle);
    if idle.len() < IDLE_MAX {
        idle.push(session);
    }
}

/// The role of a part of a query batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Piece {
    Begin,
    /// An action on a savepoint.
    Mark,
    Settings,
    Prelude(u32),
    Statement(u32),
    /// Counts the rows that statements up to this one have looked for, or fails if one is missing.
    Probe(u32),
    Prepare,
    Commit,
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

/// The executed part of an order.
#[derive(Default)]
struct Done {
    pieces: Vec<Piece>,
    outcome: Outcome,
}

impl Done {
    /// The piece that failed, if any.
    fn stopped_at(&self) -> Option<Piece> {
        self.outcome.fault.as_ref()?;
        self.pieces.get(self.outcome.done.len()).copied()
    }

    /// True if a statement met a change that is newer than the branch's snapshot.
    fn is_conflict(&self) -> bool {
        let conflicts = |fault: &Fault| fault.sqlstate == "40001";
        let of_statement =
            |piece| matches!(piece, Piece::Prelude(_) | Piece::Statement(_) | Piece::Probe(_));
        self.outcome.fault.as_ref().is_some_and(conflicts)
            && self.stopped_at().is_some_and(of_statement)
    }

    /// The statement that failed, if one did that is not among the first `skipped`.
    fn failed(&self, skipped: usize) -> Option<Failed> {
        let fault = self.outcome.fault.as_ref()?;
        let (number, in_prelude) = match self.stopped_at()? {
            Piece::Prelude(number) => (number, true),
            Piece::Statement(number) | Piece::Probe(number) => (number, false),
            Piece::Begin | Piece::Mark | Piece::Settings | Piece::Prepare | Piece::Commit => {
                return None;
            }
        };
        // Class 42: syntax, unknown names and missing privileges.
        let took_locks = !fault.sqlstate.starts_with("42");
        Some(Failed { number: (number as usize).checked_sub(skipped)?, in_prelude, took_locks })
    }
}

/// The query batch of an order.
struct Text {
    begin: Option<Isolation>,
    /// The actions on savepoints, which come first; none if the branch only ends, without an
    /// answer.
    marks: Option<Vec<Mark>>,
    statements: Vec<Statement>,
    then: Then,
}

impl Text {
    fn ending(then: Then) -> Self {
        Self { begin: None, marks: None, statements: Vec::new(), then }
    }
}

/// Why an order was not completed.
enum Ended {
    /// Another task is rolling the branch back.
    RolledBack,
    /// Its session broke.
    Lost(Trouble),
}

impl Source {
    /// Starts a driver. `report` is called with every message for the agent.
    pub(super) fn start(
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

    /// Reports lock waits while a statement has been running for a while.
    async fn look_for_waits(self: Arc<Self>) {
        let (mut running, mut told) = (BTreeMap::new(), Vec::new());
        let mut is_refused = false;
        loop {
            tokio::time::sleep(self.endpoint.look_every).await;
            // The running branches, with the numbers of their query batches.
            let before = std::mem::replace(&mut running, self.running());
            let is_long = running.iter().any(|(xid, text)| before.get(xid) == Some(text));
            if !is_long && told.is_empty() {
                continue;
            }
            let (waits, mut session) = match in_time(self.waits()).await {
                Ok(found) => found,
                Err(Trouble::Broken(_)) => continue,
                Err(Trouble::Fault(fault)) => {
                    if !std::mem::replace(&mut is_refused, true) {
                        warn!(
                            source = %self.node,
                            "cannot read lock waits, so deadlocks across sources end by the lock time-out: {}",
                            fault.message
                        );
                    }
                    continue;
                }
            };
            if waits != told {
                told.clone_from(&waits);
                (self.report)(FromSource::Waits { waits });
            }
            if in_time(session.rest()).await.is_ok() {
                self.give_back(session);
            }
        }
    }

    /// Branches with a running query batch, and the number of earlier ones.
    fn running(&self) -> BTreeMap<Xid, u64> {
        let slots = locked(&self.slots);
        let running = slots.iter().filter(|(_, slot)| slot.session.try_lock().is_err());
        running.map(|(&xid, slot)| (xid, slot.texts.load(Ordering::Acquire))).collect()
    }

    /// The branches in sessions, by the sessions' numbers.
    fn owners(&self) -> BTreeMap<u64, Xid> {
        let slots = locked(&self.slots);
        let of =
            |(&xid, slot): (&Xid, &Arc<Slot>)| Some((locked(&slot.handle).of.as_ref()?.id(), xid));
        slots.iter().filter_map(of).collect()
    }

    /// The current lock waits, and the session that was asked, which must rest.
    async fn waits(&self) -> Result<(Vec<Wait>, Session), Trouble> {
        let before = self.owners();
        let mut session = self.session().await?;
        let found = session.waits(self.node, self.endpoint.one_way).await?;
        let after = self.owners();
        // A session may have been assigned to another branch in the meantime.
        let owner = |id: &u64| before.get(id).filter(|xid| after.get(id) == Some(xid)).copied();
        let wait = |(waiter, holder): (u64, Holder)| {
            let waiter = owner(&waiter)?;
            let holder = match holder {
                Holder::Session(id) => owner(&id)?,
                Holder::Prepared(xid) => xid,
            };
            (waiter != holder).then_some(Wait { waiter, holder })
        };
        let mut waits: Vec<Wait> = found.into_iter().filter_map(wait).collect();
        waits.sort();
        waits.dedup();
        Ok((waits, session))
    }

    /// Checks the server at intervals, and reports when it becomes reachable or unreachable.
    async fn watch(self: Arc<Self>) {
        let mut is_first = true;
        loop {
            match Session::connect(&self.endpoint).await {
                Err(trouble) => {
                    *locked(&self.refusal) = Some(trouble.to_string());
                    self.set_reach(Reach::Down);
                    if is_first {
                        warn!(source = %self.node, address = %self.endpoint.address, "cannot be reached: {trouble}");
                        is_first = false;
                    }
                }
                Ok(mut session) => {
                    *locked(&self.refusal) = None;
                    self.set_reach(Reach::Unknown);
                    if let Err(trouble) = self.look(&mut session).await {
                        warn!(source = %self.node, "connection lost: {trouble}");
                    }
                    // The server may have been restarted.
                    self.set_reach(Reach::Unknown);
                    locked(&self.idle).clear();
                    (self.report)(FromSource::Down);
                }
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    /// Notes whether sessions may be opened. Drivers without a list of sessions always may.
    fn set_reach(&self, reach: Reach) {
        if self.sessions.is_some() {
            self.reach.send_replace(reach);
        }
    }

    async fn look(&self, session: &mut Session) -> Result<(), Trouble> {
        let before = (self.start.load(Ordering::Relaxed), self.last_id.load(Ordering::Relaxed));
        let (start, id) = in_time(session.start_id(before.0, before.1)).await?;
        self.start.store(start, Ordering::Relaxed);
        self.last_id.store(id, Ordering::Relaxed);
        self.admit_at_most(in_time(session.sessions_max()).await?);
        self.end_old_sessions(session).await?;
        self.set_reach(Reach::Ready);
        self.number_branches(session).await?;
        let was_numbering = self.is_numbering.load(Ordering::Acquire);
        info!(source = %self.node, "connected");
        (self.report)(FromSource::Up { start });
        loop {
            // A server that dies closes its sessions. The driver notices this before it uses the
            // restarted server.
            let _ = tokio::time::timeout(LOOK, session.stirs()).await;
            in_time(session.text("SELECT 1", Duration::ZERO)).await?;
            if was_numbering && !self.is_numbering.load(Ordering::Acquire) {
                self.number_branches(session).await?;
            }
            if let Some(list) = self.sessions.as_ref().filter(|list| list.is_long()) {
                self.forget_ended_sessions(list, session).await?;
            }
        }
    }

    /// Enables numbers of branches, if the server permits it.
    async fn number_branches(&self, session: &mut Session) -> Result<(), Trouble> {
        let is_numbering = match in_time(session.number_branches()).await {
            Ok(is_numbering) => is_numbering,
            Err(Trouble::Fault(fault)) => {
                warn!(
                    source = %self.node,
                    "cannot read or create the table orthodrome_branches, so deadlocks across sources in which a \
                     transaction has only read there end by the lock time-out: {}",
                    fault.message
                );
                false
            }
            Err(broken) => return Err(broken),
        };
        self.is_numbering.store(is_numbering, Ordering::Release);
        Ok(())
    }

    /// Ends running sessions of earlier incarnations, which could still prepare branches and own
    /// those that are prepared.
    async fn end_old_sessions(&self, session: &mut Session) -> Result<(), Trouble> {
        let Some(list) = &self.sessions else { return Ok(()) };
        for (start, id) in list.earlier()? {
            // After a restart of the server these numbers belong to other sessions.
            if self.is_same_start(start) {
                self.bury(session, id).await?;
            }
        }
        self.forget_ended_sessions(list, session).await
    }

    /// Removes the sessions that have ended from the list.
    async fn forget_ended_sessions(
        &self,
        list: &SessionList,
        session: &mut Session,
    ) -> Result<(), Trouble> {
        // Sessions that are added after the query stay.
        let mut ended = list.own();
        let alive = in_time(session.ids()).await?;
        ended.retain(|(start, id)| !self.is_same_start(*start) || !alive.contains(id));
        list.forget(ended).await?;
        Ok(())
    }

    /// Whether the server has not been restarted since `start`.
    fn is_same_start(&self, start: u64) -> bool {
        // The start of a MariaDB server is known to the second.
        self.start.load(Ordering::Relaxed).abs_diff(start) <= 2_000
    }

    /// Why the server cannot be reached, or refuses the login; none if it was reached.
    pub(super) fn refusal(&self) -> Option<String> {
        locked(&self.refusal).clone()
    }

    /// Opens a session. A login that the server refuses is no error of the client's statement.
    async fn log_in(&self) -> Result<Session, Trouble> {
        Session::connect(&self.endpoint).await.map_err(|trouble| match trouble {
            Trouble::Fault(fault) if is_of_login(&fault) => {
                let why = format!("it refuses the login of the proxy: {}", fault.message);
                Trouble::Broken(std::io::Error::new(std::io::ErrorKind::PermissionDenied, why))
            }
            other => other,
        })
    }

    /// Opens a session. If it is an agent's, it is in the list before anything runs in it.
    async fn connect(&self) -> Result<Session, Trouble> {
        let Some(list) = &self.sessions else { return self.log_in().await };
        let not_ready = || {
            let why = "the source is down, or sessions of an earlier agent are running there";
            let why = self.refusal().unwrap_or_else(|| why.to_owned());
            Trouble::Broken(std::io::Error::new(std::io::ErrorKind::NotConnected, why))
        };
        let mut reach = self.reach.subscribe();
        let known = reach.wait_for(|reach| *reach != Reach::Unknown);
        let known = tokio::time::timeout(SILENT, known).await.map(|known| known.map(|it| *it));
        if !matches!(known, Ok(Ok(Reach::Ready))) {
            return Err(not_ready());
        }
        let session = self.log_in().await?;
        list.add((self.start.load(Ordering::Relaxed), session.interrupt().id())).await?;
        // The number of the server's start may have changed since.
        if *self.reach.borrow() == Reach::Ready { Ok(session) } else { Err(not_ready()) }
    }

    /// A session with initial settings.
    async fn session(&self) -> Result<Session, Trouble> {
        self.session_for(&[]).await
    }

    /// A session with initial settings, or with the wanted ones.
    async fn session_for(&self, wanted: &[Setting]) -> Result<Session, Trouble> {
        let found = {
            let mut idle = locked(&self.idle);
            let place = idle.iter().rposition(|session| session.settings() == wanted);
            place.map(|place| idle.remove(place)).or_else(|| idle.pop())
        };
        if let Some(mut session) = found {
            if !session.settings().is_empty() && session.settings() != wanted {
                let undo = self.endpoint.settle(session.settings(), &[]).join(";");
                // The driver is beside its source, so this costs no emulated delay.
                session.text(&undo, Duration::ZERO).await?.ok()?;
                session.has_settings(Vec::new());
            }
            return Ok(session);
        }
        self.connect().await
    }

    /// Makes a branch's session available to other branches, unless an interrupt may still arrive
    /// at it.
    fn release(&self, slot: &Slot, session: Session) {
        locked(&slot.admitted).take();
        let under_way = {
            let mut handle = locked(&slot.handle);
            handle.of = None;
            handle.under_way
        };
        if under_way > 0 {
            return;
        }
        if slot.may_leave.load(Ordering::Acquire) {
            self.reset_and_give_back(session);
        } else {
            self.give_back(session);
        }
    }

    fn give_back(&self, session: Session) {
        keep(&self.idle, session);
    }

    /// Resets a session at once, because it may hold locks, and keeps it for others. A session that
    /// cannot be reset is closed.
    fn reset_and_give_back(&self, mut session: Session) {
        let (idle, lock_wait, node) = (self.idle.clone(), self.endpoint.lock_wait, self.node);
        tokio::spawn(async move {
            match session.reset(lock_wait).await {
                Ok(()) => keep(&idle, session),
                Err(trouble) => {
                    warn!(source = %node, "a session cannot be reset, and is closed: {trouble}")
                }
            }
        });
    }

    /// Numbers of busy and of idle sessions.
    pub(super) fn pool(&self) -> (usize, usize) {
        (locked(&self.slots).len(), locked(&self.idle).len())
    }

    /// Runs one query batch outside of all branches, with settings. If it may change the session,
    /// the session is reset afterwards.
    pub(super) async fn ask_with(
        &self,
        text: &str,
        settings: &[Setting],
        may_leave: bool,
    ) -> Result<Outcome, Trouble> {
        self.ask_until(text, settings, may_leave, std::future::pending()).await
    }

    /// As [`Source::ask_with`]. When `stop` ends, the batch is interrupted: the outcome is that of
    /// the interrupted batch, which the server has ended.
    pub(super) async fn ask_until(
        &self,
        text: &str,
        settings: &[Setting],
        may_leave: bool,
        stop: impl Future<Output = ()>,
    ) -> Result<Outcome, Trouble> {
        tokio::pin!(stop);
        let mut session = tokio::select! {
            session = self.session_for(settings) => session?,
            // Nothing has been sent.
            () = &mut stop => return Ok(Outcome { done: Vec::new(), fault: Some(interrupted()) }),
        };
        let before = self.endpoint.settle(session.settings(), settings);
        let own = before.len();
        let text = before.into_iter().chain([text.to_owned()]).collect::<Vec<_>>().join(";\n");
        let handle = session.interrupt();
        let (outcome, is_stopped) = {
            let asked = session.text(&text, self.endpoint.one_way);
            tokio::pin!(asked);
            tokio::select! {
                outcome = &mut asked => (outcome?, false),
                () = &mut stop => (self.stop_batch(handle, asked).await?, true),
            }
        };
        let mut outcome = outcome;
        let is_set = outcome.done.len() >= own;
        outcome.done.drain(..own.min(outcome.done.len()));
        if is_stopped {
            // An interrupt may still arrive at the session, so it is closed.
        } else if is_set && may_leave {
            self.reset_and_give_back(session);
        } else if is_set {
            session.has_settings(settings.to_vec());
            self.give_back(session);
        }
        Ok(outcome)
    }

    /// Interrupts the running batch of a session until the batch has ended, and ends the session if
    /// that has no effect.
    async fn stop_batch<T>(
        &self,
        running: Interrupt,
        mut asked: Pin<&mut impl Future<Output = Result<T, Trouble>>>,
    ) -> Result<T, Trouble> {
        for _ in 0..INTERRUPTS_MAX {
            if let Err(trouble) = in_time(self.endpoint.interrupt(running.clone())).await {
                warn!(source = %self.node, "cannot interrupt a statement: {trouble}");
            }
            if let Ok(ended) = tokio::time::timeout(AGAIN, asked.as_mut()).await {
                return ended;
            }
        }
        let mut session = in_time(self.session()).await?;
        self.bury(&mut session, running.id()).await?;
        self.give_back(session);
        // Whatever the server has sent before it ended the session is the outcome. If the
        // connection is dead, nothing arrives.
        in_time(asked).await
    }

    /// The columns of a query's result, with settings and outside of all branches. The query does
    /// not run. When `stop` ends, the source is interrupted.
    pub(super) async fn described_until(
        &self,
        text: &str,
        settings: &[Setting],
        stop: impl Future<Output = ()>,
    ) -> Result<Described, Trouble> {
        tokio::pin!(stop);
        let mut session = tokio::select! {
            session = self.session_for(settings) => session?,
            () = &mut stop => return Err(Trouble::Fault(interrupted())),
        };
        let handle = session.interrupt();
        let (found, is_stopped) = {
            let asked = self.described_in(&mut session, text, settings);
            tokio::pin!(asked);
            tokio::select! {
                found = &mut asked => (found, false),
                () = &mut stop => (self.stop_batch(handle, asked).await, true),
            }
        };
        match found {
            // An interrupt may still arrive at the session, so it is closed.
            Ok(found) if is_stopped => found,
            Ok(found) => {
                self.give_back(session);
                found
            }
            Err(trouble) => Err(trouble),
        }
    }

    /// What a statement takes and gives, from a session. If this returns `Ok`, the session can be used
    /// again.
    async fn described_in(
        &self,
        session: &mut Session,
        text: &str,
        settings: &[Setting],
    ) -> Result<Result<Described, Trouble>, Trouble> {
        let before = self.endpoint.settle(session.settings(), settings);
        // At PostgreSQL the settings end with their transaction.
        let in_block = self.endpoint.kind == Dialect::PostgreSql && !before.is_empty();
        let begin = in_block.then(|| "BEGIN".to_owned());
        let before: Vec<String> = begin.into_iter().chain(before).collect();
        // Only the query itself has an emulated delay.
        if !before.is_empty() {
            session.text(&before.join(";\n"), Duration::ZERO).await?.ok()?;
            session.has_settings(settings.to_vec());
        }
        let found = session.describe(text, self.endpoint.one_way).await;
        if let Err(Trouble::Broken(broken)) = found {
            return Err(Trouble::Broken(broken));
        }
        if in_block {
            session.text("ROLLBACK", Duration::ZERO).await?.ok()?;
        }
        Ok(found)
    }

    /// Runs a query batch that is a transaction by itself. If it leaves a transaction open, that is
    /// rolled back.
    pub(super) async fn transact(&self, text: &str) -> Result<Outcome, Trouble> {
        let carried_out = async {
            let mut session = self.session().await?;
            let outcome = session.text(text, self.endpoint.one_way).await?;
            if outcome.fault.is_some() {
                // The driver is beside its source, so this costs no emulated delay.
                session.text("ROLLBACK", Duration::ZERO).await?;
            }
            self.give_back(session);
            Ok(outcome)
        };
        // A dead host sends no more data.
        let silent = |_| Trouble::Broken(std::io::Error::from(std::io::ErrorKind::TimedOut));
        tokio::time::timeout(self.endpoint.lock_wait + STUCK, carried_out).await.map_err(silent)?
    }

    /// The meaning of an error for a transaction.
    pub(super) fn failure(&self, fault: Fault) -> Failure<Sql> {
        self.endpoint.judge(fault).0
    }

    /// Carries out an order.
    pub(super) fn order(self: &Arc<Self>, order: ToSource<Sql>) {
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

    async fn run(&self, xid: Xid, slot: Option<Arc<Slot>>, text: Text) {
        let Text { begin, marks, statements, then } = text;
        let lost = || (self.report)(FromSource::SessionLost { xid });
        let Some(slot) = slot else { return lost() };
        // A rollback needs the slot meanwhile.
        if begin.is_some()
            && let Err(failure) = self.admit(&slot).await
        {
            if !slot.is_ended.load(Ordering::Acquire) {
                locked(&self.slots).remove(&xid);
                let goes_on = false;
                (self.report)(FromSource::RunFailed { xid, statement: 0, failure, goes_on });
            }
            return;
        }
        let mut place = slot.session.lock().await;
        if begin.is_some() && place.is_none() && !slot.is_ended.load(Ordering::Acquire) {
            let wanted = statements.first().map(|statement| statement.settings.as_slice());
            match self.session_for(wanted.unwrap_or_default()).await {
                Ok(session) => {
                    {
                        let mut handle = locked(&slot.handle);
                        handle.of = Some(session.interrupt());
                        handle.start = self.start.load(Ordering::Relaxed);
                    }
                    *locked(&slot.settings) = session.settings().to_vec();
                    *place = Some(session);
                }
                Err(trouble) => {
                    warn!(source = %self.node, "cannot open a session: {trouble}");
                    return lost();
                }
            }
        }
        // The task that rolls it back reports the result.
        if slot.is_ended.load(Ordering::Acquire) {
            return;
        }
        if statements.iter().any(|statement| statement.may_leave) {
            slot.may_leave.store(true, Ordering::Release);
        }
        let mut done = Done::default();
        let is_run = marks.is_some();
        let is_postgres = self.endpoint.kind == Dialect::PostgreSql;
        let marked =
            locked(&slot.marks).before(begin, &marks.unwrap_or_default(), statements, is_postgres);
        let mut tries = 1;
        let ended = loop {
            let ended =
                self.carry_out(xid, &slot, &mut place, begin, &marked, then, &mut done).await;
            // Nobody has seen anything of the branch yet, so it may as well begin now, with a newer
            // snapshot.
            let begins_again =
                begin.is_some() && is_postgres && ended.is_ok() && done.is_conflict();
            if !begins_again || tries == BEGINS {
                break ended;
            }
            tries += 1;
            let undo = (self.endpoint.rollback(&xid.at(self.node)), vec![Piece::Begin]);
            done = Done::default();
            if let Err(ended) = self.send(&slot, &mut place, undo, &mut done).await {
                break Err(ended);
            }
            done = Done::default();
        };
        match ended {
            Ok(()) => {
                let own = marked.statements.get(marked.again..).unwrap_or_default();
                locked(&slot.marks).note(own, done.failed(marked.again));
                let ran = is_run.then_some(marked.again);
                self.judge(xid, &slot, &mut place, done, then, ran).await;
            }
            // The task that rolls it back reports the result.
            Err(Ended::RolledBack) => {}
            Err(Ended::Lost(trouble)) => {
                // The slot remains, because the task that rolls it back must end what the server
                // may still be running.
                warn!(source = %self.node, %xid, "session lost: {trouble}");
                *place = None;
                lost();
            }
        }
    }

    /// Runs an order of a branch: in one query batch, unless a row that it looks for is missing.
    #[allow(
        clippy::too_many_arguments,
        reason = "an order, where it is carried out, and what comes of it"
    )]
    async fn carry_out(
        &self,
        xid: Xid,
        slot: &Slot,
        place: &mut Option<Session>,
        begin: Option<Isolation>,
        marked: &Marked,
        then: Then,
        done: &mut Done,
    ) -> Result<(), Ended> {
        let statements = &marked.statements[..];
        let none = Marked::default();
        let sought = statements.iter().any(|statement| !statement.keys.sought.is_empty());
        if sought && then != Then::Wait && begin.is_some() {
            let text = self.compose(xid, slot, begin, marked, then, Probe::Fail);
            self.send(slot, place, text, done).await?;
            let is_missed = matches!(done.stopped_at(), Some(Piece::Probe(_)))
                && done.outcome.fault.as_ref().is_some_and(|fault| fault.sqlstate == "22012");
            if !is_missed {
                return Ok(());
            }
            // The order runs again from the beginning, so that the missing row can be locked before
            // the branch ends.
            *done = Done::default();
            let undo = (self.endpoint.rollback(&xid.at(self.node)), vec![Piece::Begin]);
            self.send(slot, place, undo, done).await?;
            *done = Done::default();
        } else if !sought {
            let text = self.compose(xid, slot, begin, marked, then, Probe::Count);
            return self.send(slot, place, text, done).await;
        }
        let text = self.compose(xid, slot, begin, marked, Then::Wait, Probe::Count);
        self.send(slot, place, text, done).await?;
        self.lock_missed(slot, place, statements, done).await?;
        if then != Then::Wait && done.outcome.fault.is_none() {
            let text = self.compose(xid, slot, None, &none, then, Probe::Count);
            self.send(slot, place, text, done).await?;
        }
        Ok(())
    }

    /// Runs one query batch of a branch, after those that are done.
    async fn send(
        &self,
        slot: &Slot,
        place: &mut Option<Session>,
        (text, pieces): (String, Vec<Piece>),
        done: &mut Done,
    ) -> Result<(), Ended> {
        if slot.is_ended.load(Ordering::Acquire) {
            return Err(Ended::RolledBack);
        }
        let Some(session) = place.as_mut() else {
            return Err(Ended::Lost(Trouble::Broken(super::stream::closed())));
        };
        slot.texts.fetch_add(1, Ordering::AcqRel);
        let outcome = session.text(&text, self.endpoint.one_way).await.map_err(Ended::Lost)?;
        done.pieces.extend(pieces);
        done.outcome.done.extend(outcome.done);
        done.outcome.fault = outcome.fault;
        let mut settings = locked(&slot.settings);
        if done.stopped_at() == Some(Piece::Settings) {
            // The session's settings are unknown now: they are set again before the next batch, and
            // no other branch uses the session.
            settings.iter_mut().for_each(|setting| setting.value.clear());
            locked(&slot.handle).under_way += 1;
        }
        session.has_settings(settings.clone());
        Ok(())
    }

    /// PostgreSQL has no locks for missing rows. So rows that were not found are locked by name, as
    /// an insert locks them. They may have been inserted since this transaction's snapshot, so
    /// another session checks that.
    async fn lock_missed(
        &self,
        slot: &Slot,
        place: &mut Option<Session>,
        statements: &[Statement],
        done: &mut Done,
    ) -> Result<(), Ended> {
        if done.outcome.fault.is_some() {
            return Ok(());
        }
        let probes = done.pieces.iter().zip(&done.outcome.done);
        let counts = probes
            .filter(|(piece, _)| matches!(piece, Piece::Probe(_)))
            .flat_map(|(_, (answer, _))| answer.rows.iter().flatten().cloned());
        let probed: Vec<(&Keys, &Record, Vec<u8>)> = statements
            .iter()
            .flat_map(|Statement { keys, .. }| keys.sought.iter().map(move |one| (keys, one)))
            .zip(counts)
            .map(|((keys, record), count)| (keys, record, count.unwrap_or_default()))
            .collect();
        locked(&slot.missing).note(probed.iter().map(|(keys, _, maker)| (*keys, &maker[..])));
        let missed: Vec<&Record> = probed
            .iter()
            .filter(|(.., count)| count == b"0")
            .map(|(_, record, _)| *record)
            .collect();
        if missed.is_empty() {
            return Ok(());
        }
        let has_savepoints = !locked(&slot.marks).is_empty();
        let piece = Piece::Probe(statements.len().saturating_sub(1) as u32);
        self.send(slot, place, (names::holding_off(&missed, has_savepoints), vec![piece]), done)
            .await?;
        if done.outcome.fault.is_some() {
            return Ok(());
        }
        let again = {
            let mut itself = locked(&slot.missing);
            if let Some((answer, _)) = done.outcome.done.last() {
                itself.learn(answer);
            }
            names::looking_again(&missed, &itself)
        };
        let settings = locked(&slot.settings).clone();
        let found = self.ask_with(&again, &settings, false).await;
        let message = match found {
            Ok(Outcome { fault: None, done }) => {
                let cell =
                    done.first().and_then(|(answer, _)| answer.rows.first()?.first()?.clone());
                if cell.as_deref() == Some(b"f") {
                    return Ok(());
                }
                "a row appeared that this transaction has looked for and not found".to_owned()
            }
            Ok(Outcome { fault: Some(fault), .. }) => fault.message,
            Err(trouble) => trouble.to_string(),
        };
        done.pieces.push(piece);
        done.outcome.fault = Some(Fault { sqlstate: "40001".into(), number: 0, message });
        Ok(())
    }

    /// Composes a query batch, with the role of each statement.
    fn compose(
        &self,
        xid: Xid,
        slot: &Slot,
        begin: Option<Isolation>,
        marked: &Marked,
        then: Then,
        probe: Probe,
    ) -> (String, Vec<Piece>) {
        let statements = &marked.statements[..];
        let name = xid.at(self.node);
        let mut texts: Vec<String> = Vec::new();
        let mut pieces = Vec::new();
        let count = |text: &str| {
            if self.endpoint.kind == Dialect::MariaDb { text.split(';').count() } else { 1 }
        };
        let own = |piece: Piece, text: String, texts: &mut Vec<String>, pieces: &mut Vec<Piece>| {
            pieces.extend(std::iter::repeat_n(piece, count(&text)));
            texts.push(text);
        };
        if let Some(isolation) = begin {
            // No other transaction waits for locks of a branch that ends with this batch.
            let is_numbered = then != Then::Commit && self.is_numbering.load(Ordering::Acquire);
            let begin = self.endpoint.begin(&name, isolation, is_numbered);
            own(Piece::Begin, begin, &mut texts, &mut pieces);
        }
        for text in &marked.texts {
            texts.push(text.clone());
            pieces.push(Piece::Mark);
        }
        if marked.goes_back && self.endpoint.kind == Dialect::PostgreSql {
            // A rollback to a savepoint also undoes later settings, so all of them are set again.
            locked(&slot.settings).iter_mut().for_each(|setting| setting.value.clear());
        }
        if let Some(first) = statements.first() {
            let mut settings = locked(&slot.settings);
            if begin.is_some() && self.endpoint.kind == Dialect::PostgreSql {
                settings.clear();
            }
            for text in self.endpoint.settle(&settings, &first.settings) {
                texts.push(text);
                pieces.push(Piece::Settings);
            }
            settings.clone_from(&first.settings);
        }
        for (number, statement) in statements.iter().enumerate() {
            let number = number as u32;
            let keys = &statement.keys;
            let asked = (!keys.sought.is_empty()).then(|| probe.text(keys));
            let inserts = names::inserting(keys, &slot.named);
            let before =
                asked.clone().filter(|_| keys.is_delete).map(|text| (Piece::Probe(number), text));
            let after = asked.filter(|_| !keys.is_delete).map(|text| (Piece::Probe(number), text));
            let preludes = inserts.into_iter().chain(statement.prelude.iter().cloned());
            let preludes = preludes.map(|text| (Piece::Prelude(number), text));
            let itself = [(Piece::Statement(number), statement.text.clone())];
            for (piece, text) in before.into_iter().chain(preludes).chain(itself).chain(after) {
                pieces.push(piece);
                texts.push(text);
            }
        }
        match then {
            Then::Wait => {}
            Then::Prepare => {
                own(Piece::Prepare, self.endpoint.prepare(&name), &mut texts, &mut pieces)
            }
            Then::Commit => {
                own(Piece::Commit, self.endpoint.commit(&name), &mut texts, &mut pieces)
            }
        }
        (texts.join(";\n"), pieces)
    }

    /// Reports the result of a query batch to the agent.
    async fn judge(
        &self,
        xid: Xid,
        slot: &Slot,
        place: &mut Option<Session>,
        Done { pieces, outcome }: Done,
        then: Then,
        ran: Option<usize>,
    ) {
        // Statements that only take locks again precede the client's.
        let again = ran.unwrap_or_default() as u32;
        let mut answers: Vec<Answer> = Vec::new();
        let mut tag = String::new();
        for (piece, (answer, its)) in pieces.iter().zip(outcome.done.iter().cloned()) {
            match piece {
                Piece::Statement(number) if *number >= again => answers.push(answer),
                Piece::Statement(_)
                | Piece::Begin
                | Piece::Mark
                | Piece::Settings
                | Piece::Prelude(_)
                | Piece::Probe(_) => {}
                Piece::Prepare | Piece::Commit => tag = its,
            }
        }
        let is_run = ran.is_some();
        let ran = || {
            if is_run {
                (self.report)(FromSource::Ran { xid, answers: answers.clone() });
            }
        };
        if let Some(fault) = outcome.fault {
            let (failure, goes_on) = self.endpoint.judge(fault);
            // At PostgreSQL the transaction has failed, back to its last savepoint if it has one.
            let goes_on = goes_on || self.can_go_back(slot, &failure);
            match pieces.get(outcome.done.len()) {
                Some(
                    Piece::Prelude(statement)
                    | Piece::Probe(statement)
                    | Piece::Statement(statement),
                ) => {
                    let goes_on = goes_on && *statement >= again;
                    (self.report)(FromSource::RunFailed {
                        xid,
                        statement: statement.saturating_sub(again),
                        failure,
                        goes_on,
                    });
                }
                Some(Piece::Mark) => {
                    let goes_on = false;
                    (self.report)(FromSource::RunFailed { xid, statement: 0, failure, goes_on });
                }
                Some(Piece::Settings) => {
                    (self.report)(FromSource::RunFailed { xid, statement: 0, failure, goes_on });
                }
                Some(Piece::Prepare | Piece::Commit) => {
                    ran();
                    self.refuse(xid, slot, place, failure).await;
                }
                Some(Piece::Begin) if self.endpoint.reads_whole(failure.fault.as_ref()) => {
                    // Nothing of the batch has run: the source could not parse a statement.
                    let goes_on = false;
                    (self.report)(FromSource::RunFailed { xid, statement: 0, failure, goes_on });
                }
                Some(Piece::Begin) | None => {
                    // The table of numbers may have been dropped; the watch makes it anew. An
                    // interrupt says nothing about it.
                    if failure.fault.as_ref().is_some_and(|fault| !fault.is_interrupt()) {
                        self.is_numbering.store(false, Ordering::Release);
                    }
                    *place = None;
                    locked(&self.slots).remove(&xid);
                    let (failure, goes_on) = (Reason::Connection.into(), false);
                    (self.report)(FromSource::RunFailed { xid, statement: 0, failure, goes_on });
                }
            }
            return;
        }
        ran();
        // Only the tag shows whether this succeeded: a failed transaction is "prepared" or
        // "committed" by a rollback.
        let is_said = |word: &str| self.endpoint.kind == Dialect::MariaDb || tag == word;
        match then {
            Then::Wait => {}
            Then::Prepare if is_said("PREPARE TRANSACTION") => {
                slot.is_prepared.store(true, Ordering::Release);
                if self.endpoint.kind == Dialect::PostgreSql
                    && let Some(session) = place.take()
                {
                    // The prepared transaction belongs to no session any more.
                    self.release(slot, session);
                }
                (self.report)(FromSource::Prepared { xid, floor: Timestamp::ZERO });
            }
            Then::Commit if is_said("COMMIT") => {
                self.finish(xid, slot, place);
                (self.report)(FromSource::Committed { xid, at: Timestamp::ZERO });
            }
            Then::Prepare | Then::Commit => {
                self.refuse(xid, slot, place, Reason::Unprepared.into()).await
            }
        }
    }

    /// Whether a branch with this failure can roll back to a savepoint. An interrupted branch must
    /// end.
    fn can_go_back(&self, slot: &Slot, failure: &Failure<Sql>) -> bool {
        self.endpoint.kind == Dialect::PostgreSql
            && failure.reason != Reason::Peer
            && !locked(&slot.marks).is_empty()
    }

    /// Ends a branch; its session can serve others.
    fn finish(&self, xid: Xid, slot: &Slot, place: &mut Option<Session>) {
        if let Some(session) = place.take() {
            self.release(slot, session);
        }
        locked(&self.slots).remove(&xid);
    }

    /// Rolls back a branch that could not prepare.
    async fn refuse(
        &self,
        xid: Xid,
        slot: &Slot,
        place: &mut Option<Session>,
        failure: Failure<Sql>,
    ) {
        self.undo(xid, slot, place).await;
        locked(&self.slots).remove(&xid);
        (self.report)(FromSource::Refused { xid, failure });
    }

    /// Rolls back in a branch's session, or closes the session.
    async fn undo(&self, xid: Xid, slot: &Slot, place: &mut Option<Session>) {
        let Some(mut session) = place.take() else { return };
        let name = xid.at(self.node);
        let text = self.endpoint.rollback(&name);
        let mut outcome = session.text(&text, self.endpoint.one_way).await;
        if self.endpoint.kind == Dialect::MariaDb
            && matches!(&outcome, Ok(Outcome { fault: Some(_), .. }))
        {
            // `XA END` fails if the server has rolled back already, or if it was sent before.
            outcome = session.text(&format!("XA ROLLBACK '{name}'"), self.endpoint.one_way).await;
        }
        if matches!(&outcome, Ok(outcome) if outcome.fault.is_none()) {
            self.release(slot, session);
        }
        // Otherwise the session is closed, which rolls back its transaction.
    }

    async fn rollback(&self, xid: Xid) {
        if let Some(slot) = self.slot(xid) {
            slot.is_ended.store(true, Ordering::Release);
            let mut place = loop {
                self.stop(xid, &slot).await;
                // Another batch may have been waiting for the session.
                if let Ok(place) = tokio::time::timeout(AGAIN, slot.session.lock()).await {
                    break place;
                }
            };
            if place.is_none() && slot.session_id().is_some() {
                // Its connection broke. The server may still be running its batch, and may prepare:
                // its session is ended below.
                slot.is_prepared.store(true, Ordering::Release);
            }
            if !slot.is_prepared.load(Ordering::Acquire) {
                self.undo(xid, &slot, &mut place).await;
                locked(&self.slots).remove(&xid);
                (self.report)(FromSource::RolledBack { xid });
                return;
            }
        }
        if self.end_prepared(xid, false).await.is_some() {
            (self.report)(FromSource::RolledBack { xid });
        }
    }

    /// Interrupts the running query batch of a branch, if there is one.
    async fn interrupt(&self, xid: Xid) {
        if let Some(slot) = self.slot(xid) {
            self.stop(xid, &slot).await;
        }
    }

    /// Interrupts the running query batch of a slot until it has ended. A MariaDB server that is
    /// interrupted between two statements of a batch skips the rest without a message, and both
    /// ends would wait for each other for ever.
    async fn stop(&self, xid: Xid, slot: &Slot) {
        let text = slot.texts.load(Ordering::Acquire);
        let is_running =
            || slot.session.try_lock().is_err() && slot.texts.load(Ordering::Acquire) == text;
        for _ in 0..INTERRUPTS_MAX {
            if let Some(running) = slot.reach_for(is_running) {
                let sent = self.endpoint.interrupt(running).await;
                slot.has_met();
                if let Err(trouble) = sent {
                    warn!(source = %self.node, %xid, "cannot interrupt the session: {trouble}");
                }
            }
            let ended = tokio::time::timeout(AGAIN, slot.session.lock()).await;
            if ended.is_ok() || !is_running() {
                return;
            }
        }
        if let Some(running) = slot.reach_for(is_running) {
            if let Ok(mut session) = self.session().await {
                info!(source = %self.node, %xid, session = running.id(), "the interrupted session does not answer; closed");
                if self.bury(&mut session, running.id()).await.is_ok() {
                    self.give_back(session);
                }
            }
            slot.has_met();
        }
    }

    /// Ends a session whose owner is gone, and waits until it has disappeared. While a MariaDB
    /// session is ending, its prepared branch is visible but cannot be ended: an attempt removes it
    /// from `XA RECOVER` while its locks remain.
    async fn bury(&self, session: &mut Session, lost: u64) -> Result<(), Trouble> {
        for _ in 0..1_000 {
            if !in_time(self.endpoint.end_session(session, lost)).await? {
                return Ok(());
            }
            tokio::time::sleep(AGAIN / 20).await;
        }
        warn!(source = %self.node, lost, "a session whose owner is gone does not end");
        Err(Trouble::Broken(std::io::Error::from(std::io::ErrorKind::TimedOut)))
    }

    async fn commit_prepared(&self, xid: Xid, at: Timestamp) {
        match self.end_prepared(xid, true).await {
            Some(true) => (self.report)(FromSource::Committed { xid, at }),
            Some(false) => (self.report)(FromSource::Gone { xid }),
            None => {}
        }
    }

    /// Ends a prepared branch, and retries as long as the server is unreachable or has no free
    /// session. True if this ended it, false if it does not exist; none if another task is ending
    /// it.
    async fn end_prepared(&self, xid: Xid, commit: bool) -> Option<bool> {
        if !locked(&self.ending).insert(xid) {
            return None;
        }
        let is_ended = self.try_to_end(xid, commit).await;
        locked(&self.ending).remove(&xid);
        Some(is_ended)
    }

    async fn try_to_end(&self, xid: Xid, commit: bool) -> bool {
        let text = self.endpoint.end_prepared(&xid.at(self.node), commit);
        // The session that prepared it, if its connection broke.
        let mut lost: Option<Listed> = None;
        loop {
            let slot = self.slot(xid);
            let place = match &slot {
                Some(slot) => slot.session.lock().await.take(),
                None => None,
            };
            if let (None, Some(slot)) = (&place, &slot) {
                lost = slot.listed();
            }
            locked(&self.slots).remove(&xid);
            let is_own = place.is_some();
            let mut session = match place {
                Some(session) => session,
                None => match self.session().await {
                    Ok(session) => session,
                    Err(trouble) => {
                        debug!(source = %self.node, %xid, "cannot open a session to end a branch: {trouble}");
                        tokio::time::sleep(AGAIN).await;
                        continue;
                    }
                },
            };
            // After a restart of the server, that number belongs to another session.
            let old = lost.filter(|(start, _)| self.is_same_start(*start));
            if let Some((_, id)) = old
                && let Err(trouble) = self.bury(&mut session, id).await
            {
                warn!(source = %self.node, %xid, "cannot end the session of a branch: {trouble}");
                tokio::time::sleep(AGAIN).await;
                continue;
            }
            let own = (self.start.load(Ordering::Relaxed), session.interrupt().id());
            lost = None;
            let keep = |session| match slot.as_deref().filter(|_| is_own) {
                Some(slot) => self.release(slot, session),
                None => self.give_back(session),
            };
            match session.text(&text, self.endpoint.one_way).await {
                Err(_) => {
                    lost = is_own.then_some(own);
                    tokio::time::sleep(AGAIN).await;
                }
                Ok(Outcome { fault: None, .. }) => {
                    keep(session);
                    return true;
                }
                Ok(Outcome { fault: Some(fault), .. }) if self.endpoint.is_gone(&fault) => {
                    // MariaDB also answers this while the session that owns the branch exists (G4).
                    if let Ok(left) = session.prepared(self.node, self.endpoint.one_way).await {
                        keep(session);
                        if !left.contains(&xid) {
                            return false;
                        }
                    }
                    tokio::time::sleep(AGAIN).await;
                }
                Ok(Outcome { fault: Some(fault), .. }) => {
                    // XA_RBROLLBACK of a read-only branch: the server has ended it.
                    if fault.number == 1402 {
                        keep(session);
                        return false;
                    }
                    warn!(source = %self.node, %xid, "cannot end a prepared branch: {}", fault.message);
                    // If the branch belongs to this session, it is closed with it.
                    lost = is_own.then_some(own);
                    tokio::time::sleep(AGAIN * 5).await;
                }
            }
        }
    }

    /// The branches that are prepared at the source.
    pub(super) async fn prepared(&self) -> Result<Vec<Xid>, Trouble> {
        let mut session = self.session().await?;
        let prepared = session.prepared(self.node, self.endpoint.one_way).await?;
        self.give_back(session);
        Ok(prepared)
    }

    async fn list(&self) {
        match self.prepared().await {
            Ok(prepared) => (self.report)(FromSource::Listed { prepared }),
            Err(Trouble::Broken(trouble)) => {
                debug!(source = %self.node, "cannot list prepared branches: {trouble}");
            }
            Err(trouble) => warn!(source = %self.node, "cannot list prepared branches: {trouble}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use orthodrome_geotp::sql::Kind;
    use tempfile::TempDir;
    use tokio::runtime::Runtime;

    use super::super::local::{Client, LocalServer, USER};
    use super::super::names::NAMES_MAX;
    use orthodrome_geotp::sql::Column;

    use super::*;

    const NODE: NodeId = NodeId(1001);
    /// Time limit for a server's answer on a machine that is busy with other work.
    const PATIENCE: Duration = Duration::from_secs(120);

    /// A driver of a private server with one row, and its reports.
    struct Rig {
        source: Arc<Source>,
        reports: mpsc::Receiver<FromSource<Sql>>,
        runtime: Runtime,
        server: LocalServer,
        _directory: TempDir,
    }

    impl Rig {
        fn start(kind: Dialect) -> Self {
            Self::start_with(kind, None)
        }

        fn start_with(kind: Dialect, sessions: Option<PathBuf>) -> Self {
            let directory = tempfile::tempdir().unwrap();
            let server = LocalServer::start(kind, &directory.path().join("server")).unwrap();
            let runtime = Runtime::new().unwrap();
            let (report, reports) = mpsc::channel();
            let source = runtime.block_on(async {
                let mut client = Client::enter(&server.login()).await.unwrap();
                let made =
                    "CREATE TABLE t (id INT PRIMARY KEY, v INT); INSERT INTO t VALUES (1, 0)";
                client.text(made).await.unwrap();
                let to = server.login().endpoint();
                Source::start(NODE, to, sessions, move |said| drop(report.send(said)))
            });
            Self { source, reports, runtime, server, _directory: directory }
        }

        fn order(&self, order: ToSource<Sql>) {
            let _entered = self.runtime.enter();
            self.source.order(order);
        }

        fn wait_for(&self, what: &str, is_it: impl Fn(&FromSource<Sql>) -> bool) {
            let mut before = Vec::new();
            loop {
                let said = self.reports.recv_timeout(PATIENCE).unwrap_or_else(|_| {
                    panic!("awaited for {PATIENCE:?}: {what}; reported meanwhile: {before:?}")
                });
                if is_it(&said) {
                    return;
                }
                before.push(said);
            }
        }

        fn run(&self, xid: Xid, statements: impl IntoIterator<Item = Statement>, then: Then) {
            let statements = statements.into_iter().collect();
            let begin = Some(Isolation::Serializable);
            let marks = Vec::new();
            self.order(ToSource::Run { xid, begin, marks, statements, then, wrote: true });
        }

        fn go_on(&self, xid: Xid, statement: Statement, then: Then) {
            self.go_on_after(xid, Vec::new(), statement, then);
        }

        fn go_on_after(&self, xid: Xid, marks: Vec<Mark>, statement: Statement, then: Then) {
            let statements = vec![statement];
            let begin = None;
            self.order(ToSource::Run { xid, begin, marks, statements, then, wrote: true });
        }

        /// The result of a transaction: the rows of its first answer, or why it failed.
        fn ran(&self, xid: Xid) -> Result<usize, Reason> {
            let of = |said: &FromSource<Sql>| match said {
                FromSource::Ran { xid: which, answers } if *which == xid => {
                    Some(Ok(answers[0].rows.len()))
                }
                FromSource::RunFailed { xid: which, failure, .. } if *which == xid => {
                    Some(Err(failure.reason))
                }
                // An interrupted MariaDB server may send nothing more; then its session is ended.
                FromSource::SessionLost { xid: which } if *which == xid => {
                    Some(Err(Reason::Connection))
                }
                _ => None,
            };
            let found = std::cell::Cell::new(None);
            self.wait_for("ran", |said| {
                let is_it = of(said);
                let is_there = is_it.is_some();
                found.set(is_it);
                is_there
            });
            found.take().unwrap()
        }

        /// Waits until a branch waits for a lock.
        fn wait_until_locked(&self, xid: Xid) {
            self.wait_for("locked", |said| {
                matches!(said, FromSource::Waits { waits } if waits.iter().any(|wait| wait.waiter == xid))
            });
        }
    }

    fn xid(number: u64) -> Xid {
        Xid { middleware: NodeId(1), epoch: 1, number }
    }

    fn plain(text: impl Into<String>) -> Statement {
        let (prelude, keys) = (Vec::new(), Keys::default());
        Statement { prelude, text: text.into(), keys, settings: Vec::new(), may_leave: false }
    }

    fn record(id: usize) -> Record {
        Record { table: "t".into(), key: id.to_string(), condition: format!("\"id\" = '{id}'") }
    }

    fn insert(ids: impl Iterator<Item = usize>) -> Statement {
        let rows: Vec<String> = ids.map(|id| id.to_string()).collect();
        let inserted = rows.iter().map(|id| record(id.parse().unwrap())).collect();
        let keys = Keys { inserted, ..Keys::default() };
        let text = format!("INSERT INTO t VALUES ({}, 0)", rows.join(", 0), ("));
        Statement { keys, ..plain(text) }
    }

    fn select(id: usize) -> Statement {
        let keys = Keys { sought: vec![record(id)], ..Keys::default() };
        Statement { keys, ..plain(format!("SELECT v FROM t WHERE id = {id} FOR SHARE")) }
    }

    fn delete(id: usize) -> Statement {
        let keys = Keys { sought: vec![record(id)], is_delete: true, ..Keys::default() };
        Statement { keys, ..plain(format!("DELETE FROM t WHERE id = {id}")) }
    }

    /// A server that is interrupted while it commits a statement of a batch skips the rest of the
    /// batch and sends nothing more.
    #[test]
    fn a_server_that_falls_silent_when_it_is_interrupted_keeps_nothing() {
        let rig = Rig::start(Dialect::MariaDb);
        for number in 1..=8 {
            let xid = xid(number);
            // The time between the statements of a branch is too short to hit; a commit is long
            // enough.
            let name = xid.at(NODE);
            let ends = [format!("XA END '{name}'"), format!("XA COMMIT '{name}' ONE PHASE")];
            let updates = (0..20).map(|_| "UPDATE t SET v = v + 1 WHERE id = 1".into());
            rig.run(xid, ends.into_iter().chain(updates).map(plain), Then::Wait);
            std::thread::sleep(Duration::from_micros(number * 500));
            rig.order(ToSource::Rollback { xid });
            rig.wait_for(
                "rolled back",
                |said| matches!(said, FromSource::RolledBack { xid: which } if *which == xid),
            );
        }
        // No lock remains.
        let login = rig.server.login();
        let free = login.client("SELECT v FROM t FOR UPDATE NOWAIT").output().unwrap();
        assert!(free.status.success(), "{}", String::from_utf8_lossy(&free.stderr));
    }

    /// An interrupt of a branch that has just ended does not hit the next one in its session.
    #[test]
    fn an_interrupt_that_comes_late_meets_nobody_else() {
        for kind in [Dialect::PostgreSql, Dialect::MariaDb] {
            let rig = Rig::start(kind);
            let (short, long) = match kind {
                Dialect::PostgreSql => ("SELECT v FROM t", "SELECT pg_sleep(0.005)"),
                Dialect::MariaDb => ("SELECT v FROM t", "SELECT SLEEP(0.005)"),
            };
            let (mut late, mut number) = (0, 0);
            // The longer the wait, the more likely the interrupt is late, however busy the machine
            // is.
            while number < 300 || late <= 30 {
                number += 1;
                assert!(number < 3_000, "{kind:?}: only {late} interrupts of {number} were late");
                let (first, next) = (xid(number * 2), xid(number * 2 + 1));
                rig.run(first, [plain(short)], Then::Commit);
                let wait = number % 30 * 20 * (1 + number / 300 * 10);
                std::thread::sleep(Duration::from_micros(wait));
                rig.order(ToSource::Interrupt { xid: first });
                let is_late = rig.ran(first).is_ok();
                late += u32::from(is_late);
                if is_late {
                    rig.wait_for("committed", |said| {
                        matches!(said, FromSource::Committed { .. } | FromSource::Refused { .. })
                    });
                } else {
                    rig.order(ToSource::Rollback { xid: first });
                    rig.wait_for("rolled back", |said| {
                        matches!(said, FromSource::RolledBack { .. })
                    });
                }
                rig.run(next, [plain(long)], Then::Commit);
                assert_eq!(rig.ran(next), Ok(1), "{kind:?}, {number}");
                rig.wait_for("committed", |said| matches!(said, FromSource::Committed { .. }));
            }
        }
    }

    /// A server runs but refuses connections for a while. Afterwards it keeps no branch prepared,
    /// although the end of the branch is ordered only once.
    #[test]
    fn a_prepared_branch_ends_when_the_server_lets_its_driver_in_again() {
        let rig = Rig::start(Dialect::PostgreSql);
        let xid = xid(1);
        rig.run(xid, [plain("UPDATE t SET v = 7 WHERE id = 1")], Then::Prepare);
        rig.wait_for("prepared", |said| matches!(said, FromSource::Prepared { .. }));
        rig.runtime.block_on(async {
            let mut owner = Client::enter(&rig.server.login()).await.unwrap();
            owner.text(&format!("ALTER ROLE {USER} NOLOGIN")).await.unwrap();
            let others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
                          WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'";
            owner.text(others).await.unwrap();
            rig.source.order(ToSource::CommitPrepared { xid, at: Timestamp::ZERO });
            rig.wait_for("lost", |said| matches!(said, FromSource::Down));
            // The order has been tried and has failed.
            tokio::time::sleep(AGAIN * 3).await;
            owner.text(&format!("ALTER ROLE {USER} LOGIN")).await.unwrap();
        });
        rig.wait_for("committed", |said| matches!(said, FromSource::Committed { .. }));
        let seen = rig.server.login().client("SELECT v FROM t").output().unwrap();
        assert_eq!(String::from_utf8_lossy(&seen.stdout).trim(), "7");
    }

    /// A statement that looks for a row which a prepared branch has inserted waits for the branch's
    /// end, whatever its form.
    #[test]
    fn a_row_that_is_being_inserted_is_waited_for() {
        let rig = Rig::start(Dialect::PostgreSql);
        let mut number = 0;
        let mut next = || {
            number += 1;
            xid(number)
        };
        for (id, then, commits) in [
            (10, Then::Commit, true),
            (11, Then::Commit, false),
            (12, Then::Wait, true),
            (13, Then::Prepare, true),
        ] {
            let (writer, reader) = (next(), next());
            rig.run(writer, [insert(id..id + 1)], Then::Prepare);
            rig.wait_for("prepared", |said| matches!(said, FromSource::Prepared { .. }));
            rig.run(reader, [select(id)], then);
            rig.wait_until_locked(reader);
            if commits {
                rig.order(ToSource::CommitPrepared { xid: writer, at: Timestamp::ZERO });
                // Its snapshot was older than the row, so it has begun again.
                assert_eq!(rig.ran(reader), Ok(1), "{id}");
            } else {
                rig.order(ToSource::Rollback { xid: writer });
                assert_eq!(rig.ran(reader), Ok(0), "{id}");
            }
        }
    }

    /// An insert of a row waits for transactions that have looked for the row and not found it.
    #[test]
    fn a_row_that_was_missed_stays_missing() {
        let rig = Rig::start(Dialect::PostgreSql);
        // Many rows are locked through their tables' names.
        for (round, count) in [(0, 1), (1, NAMES_MAX), (2, NAMES_MAX + 1)] {
            let (reader, writer) = (xid(round * 2 + 1), xid(round * 2 + 2));
            let id = 1_000 * (round as usize + 1);
            rig.run(reader, [select(id)], Then::Wait);
            assert_eq!(rig.ran(reader), Ok(0));
            rig.run(writer, [insert(id..id + count)], Then::Commit);
            rig.wait_until_locked(writer);
            // Also in a later batch, and there it waits for nothing.
            rig.go_on(reader, select(id), Then::Prepare);
            assert_eq!(rig.ran(reader), Ok(0));
            rig.wait_for("prepared", |said| matches!(said, FromSource::Prepared { .. }));
            rig.order(ToSource::CommitPrepared { xid: reader, at: Timestamp::ZERO });
            assert_eq!(rig.ran(writer), Ok(0));
        }
    }

    /// A transaction does not conflict with its own deletes and inserts.
    #[test]
    fn a_transaction_does_not_stand_in_its_own_way() {
        let rig = Rig::start(Dialect::PostgreSql);
        let missing = 7;
        let texts = [
            vec![delete(1), select(1)],
            vec![delete(missing), select(missing)],
            vec![insert(2..3), select(2), delete(2), select(2)],
        ];
        for (number, statements) in (1..).zip(texts) {
            for (apart, then) in [(0, Then::Commit), (10, Then::Prepare)] {
                let xid = xid(number + apart);
                let (last, first) = statements.split_last().unwrap();
                rig.run(xid, first.to_vec(), Then::Wait);
                assert!(rig.ran(xid).is_ok(), "{xid}");
                rig.go_on(xid, last.clone(), then);
                assert_eq!(rig.ran(xid), Ok(0), "{xid}");
                rig.order(ToSource::Rollback { xid });
                rig.wait_for("rolled back", |said| {
                    matches!(said, FromSource::RolledBack { .. } | FromSource::Committed { .. })
                });
            }
        }
        let whole = xid(100);
        rig.run(whole, [insert(1..2), delete(1), select(1)], Then::Commit);
        assert_eq!(rig.ran(whole), Ok(0));
    }

    /// A row that a transaction has deleted is missing for it afterwards and no conflict, whatever
    /// has happened to the savepoints between.
    #[test]
    fn a_transaction_with_savepoints_does_not_stand_in_its_own_way() {
        let rig = Rig::start(Dialect::PostgreSql);
        let (set, release, back) = (Mark::Set, Mark::Release, Mark::Back);
        let steps = [
            // The savepoint is released, and then there is none or another one.
            vec![(vec![set(1)], delete(1)), (vec![release(1)], select(1))],
            vec![(vec![set(1)], delete(1)), (vec![release(1), set(2)], select(1))],
            // The row was locked before one savepoint and deleted after another.
            vec![(vec![set(1)], select(1)), (vec![set(2)], delete(1)), (vec![], select(1))],
            // The insert fails, and the lock that it had is taken again.
            vec![
                (vec![set(1)], delete(1)),
                (vec![release(1), set(2)], insert([1, 2].into_iter())),
                (vec![back(2)], insert(1..2)),
            ],
        ];
        rig.run(xid(100), [insert(2..3)], Then::Commit);
        rig.wait_for("committed", |said| matches!(said, FromSource::Committed { .. }));
        let ask = |client: &mut Client, text: &str| {
            rig.runtime.block_on(client.text(text)).unwrap();
        };
        let enter = || rig.runtime.block_on(Client::enter(&rig.server.login())).unwrap();
        let (mut older, mut writer) = (enter(), enter());
        for is_young in [false, true] {
            if is_young {
                // The row is younger than a transaction that runs all the time.
                ask(&mut older, "BEGIN; INSERT INTO t VALUES (50, 0)");
                ask(&mut writer, "UPDATE t SET v = v + 1 WHERE id = 1");
            }
            for (number, steps) in (1..).zip(&steps) {
                let xid = xid(number + if is_young { 10 } else { 0 });
                rig.run(xid, [plain("SELECT 1")], Then::Wait);
                assert_eq!(rig.ran(xid), Ok(1));
                let mut last = Err(Reason::Connection);
                for (marks, statement) in steps.clone() {
                    rig.go_on_after(xid, marks, statement, Then::Wait);
                    last = rig.ran(xid);
                }
                assert_eq!(last, Ok(0), "{number}, young: {is_young}");
                rig.order(ToSource::Rollback { xid });
                rig.wait_for("rolled back", |said| matches!(said, FromSource::RolledBack { .. }));
            }
        }
    }

    /// The columns of a query's result, without a time limit.
    async fn columns(rig: &Rig, text: &str, settings: &[Setting]) -> Result<Vec<Column>, Trouble> {
        let found = rig.source.described_until(text, settings, std::future::pending()).await?;
        Ok(found.columns)
    }

    /// A query whose table another session has locked waits for the lock when it is described. The
    /// source ends it when the proxy does not wait any more.
    #[test]
    fn a_description_that_waits_for_a_lock_can_be_interrupted() {
        let rig = Rig::start(Dialect::PostgreSql);
        rig.runtime.block_on(async {
            let mut owner = Client::enter(&rig.server.login()).await.unwrap();
            owner.text("BEGIN; LOCK TABLE t").await.unwrap();
            let stop = tokio::time::sleep(Duration::from_millis(300));
            let asked = rig.source.described_until("SELECT v FROM t", &[], stop);
            let ended = tokio::time::timeout(PATIENCE, asked).await.unwrap();
            assert!(
                matches!(&ended, Err(Trouble::Fault(fault)) if fault.is_interrupt()),
                "{ended:?}"
            );
            let waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted";
            let answers = owner.text(waiting).await.unwrap();
            assert_eq!(answers[0].rows, [[Some(b"0".to_vec())]]);
        });
    }

    /// A server that describes a query does not run it.
    #[test]
    fn a_query_that_is_described_does_not_run() {
        for (kind, function) in [
            (
                Dialect::PostgreSql,
                "CREATE FUNCTION note() RETURNS int LANGUAGE sql AS \
                 'UPDATE t SET v = v + 1 RETURNING v'",
            ),
            (
                Dialect::MariaDb,
                "CREATE FUNCTION note() RETURNS INT MODIFIES SQL DATA BEGIN \
                 UPDATE t SET v = v + 1; RETURN 1; END",
            ),
        ] {
            let rig = Rig::start(kind);
            rig.runtime.block_on(async {
                let mut client = Client::enter(&rig.server.login()).await.unwrap();
                client.text(function).await.unwrap();
                let setting = match kind {
                    Dialect::PostgreSql => {
                        Setting { name: "timezone".into(), value: "'-1'".into() }
                    }
                    Dialect::MariaDb => {
                        Setting { name: "time_zone".into(), value: "'-01:00'".into() }
                    }
                };
                for settings in [vec![], vec![setting], vec![]] {
                    for text in
                        ["SELECT note() AS a, 'x' AS b", "SELECT v AS a, note() AS b FROM t"]
                    {
                        let columns = columns(&rig, text, &settings).await.unwrap();
                        let names: Vec<&str> = columns.iter().map(|c| c.name.as_str()).collect();
                        assert_eq!(names, ["a", "b"], "{kind}");
                        assert_eq!(columns[0].kind, Kind::Int4, "{kind}");
                    }
                    let wrong = columns(&rig, "SELECT nothing FROM t", &settings).await;
                    assert!(matches!(wrong, Err(Trouble::Fault(_))), "{kind}: {wrong:?}");
                }
                let answers = client.text("SELECT v FROM t").await.unwrap();
                assert_eq!(answers[0].rows, [[Some(b"0".to_vec())]], "{kind}");
            });
        }
    }

    /// A session of an earlier incarnation that owns a prepared branch, and whose connection lives
    /// on, is ended before the branch is committed. The commit does not miss the branch.
    #[test]
    fn a_branch_is_committed_after_its_old_session_has_ended() {
        let rig = Rig::start(Dialect::MariaDb);
        // The start of the server is known.
        rig.wait_for("up", |said| matches!(said, FromSource::Up { .. }));
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sessions");
        for number in 1..=10 {
            let xid = xid(number);
            let name = xid.at(NODE);
            let _old = rig.runtime.block_on(async {
                let mut old = Client::enter(&rig.server.login()).await.unwrap();
                let prepare = format!(
                    "XA START '{name}'; UPDATE t SET v = {number} WHERE id = 1; XA END '{name}'; \
                     XA PREPARE '{name}'; SELECT connection_id()"
                );
                let answers = old.text(&prepare).await.unwrap();
                let id = answers.last().unwrap().rows[0][0].clone().unwrap();
                let start = rig.source.start.load(Ordering::Relaxed);
                let line = format!("{start} {}\n", String::from_utf8(id).unwrap());
                std::fs::write(&path, line).unwrap();
                old
            });
            let (report, reports) = mpsc::channel();
            let _entered = rig.runtime.enter();
            let to = rig.server.login().endpoint();
            let next =
                Source::start(NODE, to, Some(path.clone()), move |said| drop(report.send(said)));
            // At once, before the new incarnation has reached the server.
            next.order(ToSource::CommitPrepared { xid, at: Timestamp::ZERO });
            loop {
                match reports.recv_timeout(PATIENCE).unwrap() {
                    FromSource::Committed { .. } => break,
                    FromSource::Gone { .. } => panic!("{number}: the commit missed the branch"),
                    _ => {}
                }
            }
            let seen = rig.server.login().client("SELECT v FROM t").output().unwrap();
            assert_eq!(String::from_utf8_lossy(&seen.stdout).trim(), number.to_string());
        }
    }

    /// A driver that reaches its server again keeps the sessions that live on in its list.
    #[test]
    fn sessions_that_live_on_stay_in_the_list() {
        for kind in [Dialect::PostgreSql, Dialect::MariaDb] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("sessions");
            let rig = Rig::start_with(kind, Some(path.clone()));
            rig.wait_for("up", |said| matches!(said, FromSource::Up { .. }));
            let xid = xid(1);
            rig.run(xid, [plain("UPDATE t SET v = 7 WHERE id = 1")], Then::Wait);
            assert!(rig.ran(xid).is_ok());
            let own = rig.source.slot(xid).unwrap().session_id().unwrap();
            let is_listed = || {
                let text = std::fs::read_to_string(&path).unwrap();
                text.lines().any(|line| line.ends_with(&format!(" {own}")))
            };
            assert!(is_listed(), "{kind}");
            // All other sessions end, among them the one that watches the server.
            let others = match kind {
                Dialect::PostgreSql => {
                    format!(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> {own} AND \
                         pid <> pg_backend_pid() AND backend_type = 'client backend'"
                    )
                }
                Dialect::MariaDb => "SELECT id FROM information_schema.processlist".into(),
            };
            rig.runtime.block_on(async {
                let mut client = Client::enter(&rig.server.login()).await.unwrap();
                let answers = client.text(&others).await.unwrap();
                if kind == Dialect::MariaDb {
                    let mine = client.text("SELECT connection_id()").await.unwrap();
                    let mine = mine[0].rows[0][0].clone().unwrap();
                    for id in answers[0].rows.iter().flatten().flatten() {
                        let id = String::from_utf8(id.clone()).unwrap();
                        if id != own.to_string() && id.as_bytes() != mine {
                            // It may have ended already.
                            let _ = client.text(&format!("KILL CONNECTION {id}")).await;
                        }
                    }
                }
            });
            rig.wait_for("down", |said| matches!(said, FromSource::Down));
            rig.wait_for("up", |said| matches!(said, FromSource::Up { .. }));
            assert!(is_listed(), "{kind}");
            rig.order(ToSource::Rollback { xid });
            rig.wait_for("rolled back", |said| matches!(said, FromSource::RolledBack { .. }));
        }
    }

    /// A row is a conflict too if its number is lower than those in the snapshot's list, because a
    /// savepoint of a running transaction has inserted it.
    #[test]
    fn a_row_that_a_savepoint_of_a_running_transaction_inserts_is_a_conflict() {
        let rig = Rig::start(Dialect::PostgreSql);
        let reader = xid(1);
        rig.runtime.block_on(async {
            let mut other = Client::enter(&rig.server.login()).await.unwrap();
            let inserting =
                "BEGIN; INSERT INTO t VALUES (20, 0); SAVEPOINT a; INSERT INTO t VALUES (21, 0)";
            other.text(inserting).await.unwrap();
            // With this the number of the savepoint is below the end of the snapshot.
            let mut third = Client::enter(&rig.server.login()).await.unwrap();
            third.text("UPDATE t SET v = 1 WHERE id = 1").await.unwrap();
            rig.source.order(ToSource::Run {
                xid: reader,
                begin: Some(Isolation::Serializable),
                marks: Vec::new(),
                statements: vec![select(1)],
                then: Then::Wait,
                wrote: false,
            });
            assert_eq!(rig.ran(reader), Ok(1));
            other.text("COMMIT").await.unwrap();
        });
        rig.go_on(reader, select(21), Then::Wait);
        assert_eq!(rig.ran(reader), Err(Reason::Serialization));
    }
}
