//! How a transaction aborts, and which cause its session learns.

use orthodrome_core::id::NodeId;
use orthodrome_core::ordered::OrdSet;
use orthodrome_core::txn::{AbortReason, Outcome};

use super::{Middleware, Out, Phase};
use crate::contract::{Effect, Failure, Reason, Timer, ToAgent, Work, Xid};

impl<W: Work> Middleware<W> {
    pub(super) fn on_failed(
        &mut self,
        from: NodeId,
        xid: Xid,
        failure: Failure<W>,
        io: Out<'_, '_, W>,
    ) {
        let Some(open) = self.open.get(&xid) else {
            self.learn_cause(from, xid, failure, io);
            self.on_rolled_back(from, xid, io);
            return;
        };
        match open.phase {
            Phase::Logging(..) => {}
            // The only branch reported that it did not commit; or, with `Commit::Local`, one of
            // several.
            Phase::Committing
            | Phase::Idle
            | Phase::Executing
            | Phase::HeldBack { .. }
            | Phase::Voting => {
                self.abort(xid, Some(from), failure, io);
                self.on_rolled_back(from, xid, io);
            }
        }
    }

    /// Aborts a transaction. It has no commit record and will never have one, so the session may be
    /// answered at once.
    pub(super) fn abort(
        &mut self,
        xid: Xid,
        source: Option<NodeId>,
        failure: Failure<W>,
        io: Out<'_, '_, W>,
    ) {
        let Some(open) = self.open.get(&xid) else { return };
        let told: OrdSet<NodeId> =
            open.branches.iter().filter(|(_, branch)| branch.is_sent).map(|(&at, _)| at).collect();
        for &source in open.branches.keys() {
            io.push(Effect::CancelTimer(Timer::Start(xid, source)));
        }
        for &at in &told {
            if Some(at) != source {
                self.send(at, ToAgent::Rollback { xid }, io);
            }
        }
        let outcome = Outcome::Aborted(abort_reason(failure.reason));
        let is_consequence = source.is_some() && is_consequence(failure.reason);
        let failure = source.map_or((self.node, failure.clone()), |source| (source, failure));
        self.finish(xid, outcome, Some(failure), "aborted", io);
        if told.is_empty() {
            return;
        }
        if is_consequence && let Some(news) = io.effects.pop() {
            // Another branch failed first, and will report the cause. The cause decides whether a
            // retry makes sense.
            self.untold.insert(xid, news);
        }
        self.aborting.insert(xid, told);
        io.push(Effect::SetTimer(Timer::Resend(xid), io.now + self.config.resend_after));
    }

    /// The branch that failed first reports why its transaction was aborted. If the session has not
    /// been answered yet, it learns that cause.
    pub(super) fn learn_cause(
        &mut self,
        from: NodeId,
        xid: Xid,
        cause: Failure<W>,
        io: Out<'_, '_, W>,
    ) {
        if is_consequence(cause.reason) {
            return;
        }
        let Some(mut news) = self.untold.remove(&xid) else { return };
        if let Effect::Finished { outcome, failure, .. } = &mut news {
            *outcome = Outcome::Aborted(abort_reason(cause.reason));
            *failure = Some((from, cause));
        }
        io.push(news);
    }

    /// Answers the session of an aborted transaction, although no branch has reported another
    /// cause.
    pub(super) fn tell(&mut self, xid: Xid, io: Out<'_, '_, W>) {
        let news = self.untold.remove(&xid);
        io.effects.extend(news);
    }

    pub(super) fn finish(
        &mut self,
        xid: Xid,
        outcome: Outcome,
        failure: Option<(NodeId, Failure<W>)>,
        path: &'static str,
        io: Out<'_, '_, W>,
    ) {
        let Some(open) = self.open.remove(&xid) else { return };
        let is_committed = matches!(outcome, Outcome::Committed(_));
        for branch in open.branches.values() {
            self.hot.leave(branch.places.iter(), is_committed);
        }
        if let Some(label) = open.label {
            if self.by_label.get(&label) == Some(&xid) {
                self.by_label.remove(&label);
            }
            if let Outcome::Committed(at) = outcome {
                self.labels.insert(label, at);
            }
        }
        io.push(Effect::CancelTimer(Timer::Resend(xid)));
        io.push(Effect::CancelTimer(Timer::Admit(xid)));
        io.push(Effect::Finished { xid, label: open.label, outcome, failure, path });
    }

    pub(super) fn on_rolled_back(&mut self, from: NodeId, xid: Xid, io: Out<'_, '_, W>) {
        if let Some(sources) = self.aborting.get_mut(&xid) {
            sources.remove(&from);
            if sources.is_empty() {
                self.aborting.remove(&xid);
                io.push(Effect::CancelTimer(Timer::Resend(xid)));
                self.tell(xid, io);
            }
            return;
        }
        // A peer branch failed, and this agent reports that first.
        let Some(open) = self.open.get(&xid) else { return };
        let is_final = matches!(open.phase, Phase::Logging(..) | Phase::Committing);
        if open.branches.contains_key(&from) && !is_final {
            self.abort(xid, Some(from), Reason::Peer.into(), io);
            self.on_rolled_back(from, xid, io);
        }
    }
}

/// True for reasons that only say that another branch failed before.
pub(super) fn is_consequence(reason: Reason) -> bool {
    match reason {
        Reason::Peer | Reason::Ended => true,
        Reason::Deadlock
        | Reason::LockTimeout
        | Reason::Serialization
        | Reason::Statement
        | Reason::Connection
        | Reason::Unprepared
        | Reason::Restarted
        | Reason::Master
        | Reason::Unknown
        | Reason::Timeout
        | Reason::Refused
        | Reason::Session
        | Reason::Marked => false,
    }
}

/// The reason for the abort in the terms of clients of all protocols.
pub(super) fn abort_reason(reason: Reason) -> AbortReason {
    match reason {
        Reason::Deadlock
        | Reason::LockTimeout
        | Reason::Serialization
        | Reason::Peer
        | Reason::Unprepared => AbortReason::Conflict,
        Reason::Statement => AbortReason::Guard,
        Reason::Connection
        | Reason::Restarted
        | Reason::Master
        | Reason::Ended
        | Reason::Unknown
        | Reason::Timeout => AbortReason::Recovery,
        Reason::Refused => AbortReason::Overload,
        Reason::Session => AbortReason::Client,
        Reason::Marked => AbortReason::Invalid,
    }
}
