//! Looks at the server at intervals: whether it can be reached, who waits for whose locks, and which
//! sessions of an earlier incarnation are still running.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use orthodrome_core::ordered::OrdMap;

use orthodrome_geotp::contract::{FromSource, Wait, Xid};
use tracing::{info, warn};

use super::{AGAIN, Reach, Slot, Source, in_time, locked};
use crate::driver::{Holder, Session, Trouble};
use crate::session_list::SessionList;

/// Interval between checks of a source.
const LOOK: Duration = Duration::from_millis(500);

impl Source {
    /// Reports lock waits while a statement has been running for a while.
    pub(super) async fn look_for_waits(self: Arc<Self>) {
        let (mut running, mut told) = (OrdMap::new(), Vec::new());
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
    fn running(&self) -> OrdMap<Xid, u64> {
        let slots = locked(&self.slots);
        let running = slots.iter().filter(|(_, slot)| slot.session.try_lock().is_err());
        running.map(|(&xid, slot)| (xid, slot.texts.load(Ordering::Acquire))).collect()
    }

    /// The branches in sessions, by the sessions' numbers.
    fn owners(&self) -> OrdMap<u64, Xid> {
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
    pub(super) async fn watch(self: Arc<Self>) {
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
    pub(super) fn is_same_start(&self, start: u64) -> bool {
        // The start of a MariaDB server is known to the second.
        self.start.load(Ordering::Relaxed).abs_diff(start) <= 2_000
    }
}
