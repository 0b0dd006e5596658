//! How branches end: rolled back, interrupted, or committed after they have been prepared.

use std::sync::atomic::Ordering;

use orthodrome_core::Timestamp;
use orthodrome_geotp::contract::{FromSource, Xid};
use orthodrome_geotp::sql::Dialect;
use tracing::{debug, info, warn};

use super::{AGAIN, INTERRUPTS_MAX, Slot, Source, in_time, locked};
use crate::driver::{Outcome, Session, Trouble};
use crate::session_list::Listed;

impl Source {
    /// Rolls back in a branch's session, or closes the session.
    pub(super) async fn undo(&self, xid: Xid, slot: &Slot, place: &mut Option<Session>) {
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

    pub(super) async fn rollback(&self, xid: Xid) {
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
    pub(super) async fn interrupt(&self, xid: Xid) {
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
    pub(super) async fn bury(&self, session: &mut Session, lost: u64) -> Result<(), Trouble> {
        for _ in 0..1_000 {
            if !in_time(self.endpoint.end_session(session, lost)).await? {
                return Ok(());
            }
            tokio::time::sleep(AGAIN / 20).await;
        }
        warn!(source = %self.node, lost, "a session whose owner is gone does not end");
        Err(Trouble::Broken(std::io::Error::from(std::io::ErrorKind::TimedOut)))
    }

    pub(super) async fn commit_prepared(&self, xid: Xid, at: Timestamp) {
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
    pub(crate) async fn prepared(&self) -> Result<Vec<Xid>, Trouble> {
        let mut session = self.session().await?;
        let prepared = session.prepared(self.node, self.endpoint.one_way).await?;
        self.give_back(session);
        Ok(prepared)
    }

    pub(super) async fn list(&self) {
        match self.prepared().await {
            Ok(prepared) => (self.report)(FromSource::Listed { prepared }),
            Err(Trouble::Broken(trouble)) => {
                debug!(source = %self.node, "cannot list prepared branches: {trouble}");
            }
            Err(trouble) => warn!(source = %self.node, "cannot list prepared branches: {trouble}"),
        }
    }
}
