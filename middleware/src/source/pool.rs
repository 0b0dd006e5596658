//! Sessions: those of branches, idle ones that wait for another branch, and those of queries outside of
//! branches.

use std::pin::Pin;
use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::time::Duration;

use orthodrome_geotp::sql::Dialect;
use tracing::warn;

use super::{AGAIN, INTERRUPTS_MAX, Reach, SILENT, Slot, Source, in_time, interrupted, locked};
use crate::driver::{Described, Fault, Interrupt, Outcome, Session, Setting, Trouble};

/// Time limit of a query batch that is a transaction by itself, in addition to waits for locks.
const STUCK: Duration = Duration::from_secs(60);
/// Maximum number of idle sessions.
const IDLE_MAX: usize = 128;

/// Whether a server reports that the user, the password or the database is wrong.
fn is_of_login(fault: &Fault) -> bool {
    fault.sqlstate.starts_with("28")
        || fault.sqlstate == "3D000"
        || matches!(fault.number, 1044 | 1045 | 1049 | 1698)
}

/// Keeps an idle session for other branches, unless there are enough.
fn keep(idle: &Mutex<Vec<Session>>, session: Session) {
    let mut idle = locked(idle);
    if idle.len() < IDLE_MAX {
        idle.push(session);
    }
}

impl Source {
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
    pub(super) async fn session(&self) -> Result<Session, Trouble> {
        self.session_for(&[]).await
    }

    /// A session with initial settings, or with the wanted ones.
    pub(super) async fn session_for(&self, wanted: &[Setting]) -> Result<Session, Trouble> {
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
    pub(super) fn release(&self, slot: &Slot, session: Session) {
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

    pub(super) fn give_back(&self, session: Session) {
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
    pub(crate) fn pool(&self) -> (usize, usize) {
        (locked(&self.slots).len(), locked(&self.idle).len())
    }

    /// Runs one query batch outside of all branches, with settings. If it may change the session,
    /// the session is reset afterwards.
    pub(crate) async fn ask_with(
        &self,
        text: &str,
        settings: &[Setting],
        may_leave: bool,
    ) -> Result<Outcome, Trouble> {
        self.ask_until(text, settings, may_leave, std::future::pending()).await
    }

    /// As [`Source::ask_with`]. When `stop` ends, the batch is interrupted: the outcome is that of
    /// the interrupted batch, which the server has ended.
    pub(crate) async fn ask_until(
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
    pub(crate) async fn described_until(
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
    pub(crate) async fn transact(&self, text: &str) -> Result<Outcome, Trouble> {
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
}
