//! How a transaction commits: votes, the decision, and its delivery to every source.

use orthodrome_core::id::{NodeId, Ticket};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::Outcome;

use super::execute::peers;
use super::{Branch, Commit, Decided, Middleware, Open, Out, Phase, Stage};
use crate::contract::{
    Effect, Fence, Last, Note, Reason, Record, SessionId, Then, Timer, ToAgent, Work, Xid,
};

impl<W: Work> Middleware<W> {
    /// Commits the transaction. [`Effect::Finished`] follows.
    pub fn commit(&mut self, xid: Xid, io: Out<'_, '_, W>) {
        let Some(open) = self.open.get_mut(&xid) else { return };
        open.since = io.now;
        match open.phase {
            Phase::Idle => self.finish_commit(xid, io),
            Phase::Executing | Phase::HeldBack { .. } => open.last = Last::Commit,
            Phase::Voting | Phase::Committing | Phase::Logging(..) => {}
        }
    }

    /// Rolls the transaction back. [`Effect::Finished`] follows. If the commit cannot be stopped
    /// any more, it has that outcome.
    pub fn rollback(&mut self, xid: Xid, io: Out<'_, '_, W>) {
        let Some(open) = self.open.get(&xid) else { return };
        let is_committing =
            open.branches.values().any(|branch| branch.is_committing() && branch.is_sent);
        match open.phase {
            Phase::Idle | Phase::Executing | Phase::HeldBack { .. } | Phase::Voting
                if !is_committing =>
            {
                self.abort(xid, None, Reason::Session.into(), io);
            }
            Phase::Idle
            | Phase::Executing
            | Phase::HeldBack { .. }
            | Phase::Voting
            | Phase::Committing
            | Phase::Logging(..) => {}
        }
    }

    /// Cancels the transaction at the client's request. As [`Middleware::rollback`], except if the
    /// only branch may commit by itself: then its source is asked to interrupt the running
    /// statement, and the source's answer is the outcome.
    pub fn cancel(&mut self, xid: Xid, io: Out<'_, '_, W>) {
        let Some(open) = self.open.get(&xid) else { return };
        let is_committing = |branch: &Branch<W>| branch.is_committing() && branch.is_sent;
        let committing: Vec<NodeId> = open
            .branches
            .iter()
            .filter(|(_, branch)| is_committing(branch))
            .map(|(&at, _)| at)
            .collect();
        for &source in &committing {
            self.send(source, ToAgent::Interrupt { xid }, io);
        }
        if committing.is_empty() {
            self.rollback(xid, io);
        }
    }

    /// Ends a branch at an operator's request. The branch belongs to a middleware that is gone for
    /// ever, and its decision log too.
    pub fn settle(&mut self, xid: Xid, source: NodeId, commit: bool, io: Out<'_, '_, W>) {
        let msg = if commit {
            ToAgent::Commit { xid, at: io.clock, one_phase: false }
        } else {
            ToAgent::Rollback { xid }
        };
        self.send(source, msg, io);
    }

    pub(super) fn ask_prepare(
        &mut self,
        xid: Xid,
        source: NodeId,
        participants: &OrdSet<NodeId>,
        io: Out<'_, '_, W>,
    ) {
        let Some(branch) = self.open.get_mut(&xid).and_then(|open| open.branches.get_mut(&source))
        else {
            return;
        };
        if branch.stage != Stage::Idle {
            return;
        }
        branch.stage = Stage::Preparing;
        let peers = peers(source, participants, self.optimizations);
        let order = self.end_after_going_back(xid, source, peers.clone(), Then::Prepare, io);
        let Some(branch) = self.branch(xid, source) else { return };
        if order.is_some() {
            branch.stage = Stage::Running(Then::Prepare);
        }
        branch.outbox = order.or(Some(ToAgent::Prepare { xid, peers }));
        self.transmit(xid, source, io);
    }

    pub(super) fn on_prepared(
        &mut self,
        from: NodeId,
        xid: Xid,
        fence: Fence,
        wrote: bool,
        floor: Timestamp,
        io: Out<'_, '_, W>,
    ) {
        let Some(open) = self.open.get_mut(&xid) else { return };
        let is_voting = open.phase == Phase::Voting;
        let Some(branch) = open.branches.get_mut(&from) else { return };
        if branch.stage != Stage::Preparing {
            return;
        }
        if branch.fence.is_some_and(|begun| begun != fence) && !self.config.mutations.no_fence {
            io.push(Effect::Note(Note::FenceBroken));
            self.abort(xid, None, Reason::Restarted.into(), io);
            return;
        }
        if open.is_decentralized {
            io.push(Effect::Note(Note::DecentralizedPrepare));
        }
        // If every statement of the branch failed, no earlier message has reported the fence.
        branch.fence = Some(fence);
        (branch.stage, branch.outbox) = (Stage::Prepared, None);
        (branch.wrote, branch.floor) = (wrote, floor);
        if is_voting {
            self.count_votes(xid, io);
        }
    }

    /// Continues the commit when no statement is pending, only votes.
    pub(super) fn finish_commit(&mut self, xid: Xid, io: Out<'_, '_, W>) {
        let Some(open) = self.open.get_mut(&xid) else { return };
        let participants: OrdSet<NodeId> = open.branches.keys().copied().collect();
        if participants.is_empty() {
            self.finish(xid, Outcome::Committed(io.clock), None, "empty", io);
            return;
        }
        let is_alone = participants.len() == 1;
        let has_votes =
            open.branches.values().any(|b| matches!(b.stage, Stage::Preparing | Stage::Prepared));
        if (is_alone && !has_votes) || self.config.commit == Commit::Local {
            open.phase = Phase::Committing;
            let at = io.clock;
            for &source in &participants {
                let order = self.end_after_going_back(xid, source, Vec::new(), Then::Commit, io);
                if let Some(branch) = self.branch(xid, source) {
                    branch.stage = Stage::Running(Then::Commit);
                    branch.outbox = order.or(Some(ToAgent::Commit { xid, at, one_phase: true }));
                    self.transmit(xid, source, io);
                }
            }
        } else {
            open.phase = Phase::Voting;
            for &source in &participants {
                self.ask_prepare(xid, source, &participants, io);
            }
            self.count_votes(xid, io);
        }
        io.push(Effect::SetTimer(Timer::Resend(xid), io.now + self.config.resend_after));
    }

    /// Decides if all votes have arrived and no lock can have been lost in the meantime (G3).
    pub(super) fn count_votes(&mut self, xid: Xid, io: Out<'_, '_, W>) {
        let Some(open) = self.open.get(&xid) else { return };
        let is_ready = |branch: &Branch<W>| {
            branch.stage == Stage::Prepared
                || (self.config.mutations.skips_vote && branch.stage == Stage::Preparing)
        };
        if open.phase != Phase::Voting || !open.branches.values().all(is_ready) {
            return;
        }
        let mut stale = Vec::new();
        for (&source, branch) in &open.branches {
            let forgets = self.config.sources.get(&source).is_none_or(|kind| kind.forgets_locks());
            let Some(known) = self.sources.get(&source) else { continue };
            if !forgets || self.config.mutations.no_fence {
                continue;
            }
            if known.fence != branch.fence {
                io.push(Effect::Note(Note::FenceBroken));
                self.abort(xid, None, Reason::Restarted.into(), io);
                return;
            }
            // A tenth less, because clocks run at different rates.
            if io.now.since(known.confirmed) > self.config.quarantine / 10 * 9 {
                stale.push(source);
            }
        }
        if !stale.is_empty() {
            io.push(Effect::Note(Note::FenceAsked));
            for source in stale {
                self.ask_fence(source, io);
            }
            return;
        }
        self.decide(xid, io);
    }

    /// Logs the decision to commit, when every branch is prepared. The decision counts when it is
    /// durable.
    pub(super) fn decide(&mut self, xid: Xid, io: Out<'_, '_, W>) {
        let Some(open) = self.open.get(&xid) else { return };
        let above =
            open.branches.values().map(|branch| branch.floor.next()).max().unwrap_or_default();
        let at = above.max(io.clock).max(self.last_at.next());
        self.last_at = at;
        let branches =
            open.branches.iter().map(|(&source, branch)| (source, branch.wrote)).collect();
        let record = Record::Commit { xid, label: open.label, at, branches };
        let ticket = self.persist(record, io);
        if let Some(open) = self.open.get_mut(&xid) {
            open.phase = Phase::Logging(ticket, at);
        }
        if self.config.mutations.tells_early {
            self.on_logged(xid, at, io);
        }
    }

    /// All records up to this ticket are durable.
    pub fn on_durable(&mut self, ticket: Ticket, io: Out<'_, '_, W>) {
        if self.starting.is_some_and(|starting| starting <= ticket) {
            self.starting = None;
            for (to, msg) in std::mem::take(&mut self.held) {
                io.push(Effect::Send { to, msg });
            }
        }
        if self.checkpoint.is_some_and(|checkpoint| checkpoint <= ticket) {
            self.checkpoint = None;
        }
        let is_logged = |open: &Open<W>| match open.phase {
            Phase::Logging(wanted, at) if wanted <= ticket => Some(at),
            Phase::Logging(..)
            | Phase::Idle
            | Phase::HeldBack { .. }
            | Phase::Executing
            | Phase::Voting
            | Phase::Committing => None,
        };
        let logged: Vec<(Xid, Timestamp)> =
            self.open.iter().filter_map(|(&xid, open)| Some((xid, is_logged(open)?))).collect();
        for (xid, at) in logged {
            self.on_logged(xid, at, io);
        }
    }

    /// The decision is durable: answers the session, and sends the commit to every branch.
    pub(super) fn on_logged(&mut self, xid: Xid, at: Timestamp, io: Out<'_, '_, W>) {
        let Some(open) = self.open.get(&xid) else { return };
        let branches: OrdMap<NodeId, bool> =
            open.branches.iter().map(|(&at, b)| (at, b.wrote)).collect();
        let path = if open.is_decentralized { "decentralized" } else { "two-phase" };
        let unacknowledged = branches.keys().copied().collect();
        self.labels.extend(open.label.map(|label| (label, at)));
        let (label, session) = (open.label, open.session);
        if let Some(session) = session {
            self.of_sessions.entry(session).or_default().insert(xid);
        }
        let decided = Decided { label, session, at, branches, unacknowledged, news: None };
        self.decided.insert(xid, decided);
        self.send_commit(xid, io);
        self.finish(xid, Outcome::Committed(at), None, path, io);
        if !self.config.answers_at_decision {
            let news = io.effects.pop();
            if let Some(decided) = self.decided.get_mut(&xid) {
                decided.news = news;
            }
        }
        io.push(Effect::SetTimer(Timer::Resend(xid), io.now + self.config.resend_after));
    }

    pub(super) fn send_commit(&mut self, xid: Xid, io: Out<'_, '_, W>) {
        let Some(decided) = self.decided.get(&xid) else { return };
        let (at, sources) = (decided.at, decided.unacknowledged.clone());
        for source in sources {
            self.send(source, ToAgent::Commit { xid, at, one_phase: false }, io);
        }
    }

    pub(super) fn on_committed(
        &mut self,
        from: NodeId,
        xid: Xid,
        at: Timestamp,
        io: Out<'_, '_, W>,
    ) {
        if let Some(decided) = self.decided.get_mut(&xid) {
            decided.unacknowledged.remove(&from);
            if decided.unacknowledged.is_empty() {
                let session = decided.session;
                let news = self.decided.remove(&xid).and_then(|decided| decided.news);
                io.effects.extend(news);
                self.forget_own(session, xid);
                io.push(Effect::CancelTimer(Timer::Resend(xid)));
                self.persist(Record::Ended(xid), io);
                self.checkpoint_if_due(io);
            }
            return;
        }
        let Some(open) = self.open.get_mut(&xid) else { return };
        let Some(branch) = open.branches.get_mut(&from) else { return };
        // The answers of its statements may be missing. Then the agent sends both again.
        if branch.stage != Stage::Running(Then::Commit) || open.phase != Phase::Committing {
            return;
        }
        (branch.stage, branch.outbox) = (Stage::Idle, None);
        branch.floor = branch.floor.max(at);
        if open.branches.values().all(|branch| !branch.is_committing()) {
            let at = open.branches.values().map(|branch| branch.floor).max().unwrap_or(at);
            self.finish(xid, Outcome::Committed(at), None, "one-phase", io);
        }
    }

    /// Every source has committed this transaction, so no statements of its session need to wait
    /// for it.
    fn forget_own(&mut self, session: Option<SessionId>, xid: Xid) {
        let Some(session) = session else { return };
        if let Some(committed) = self.of_sessions.get_mut(&session) {
            committed.remove(&xid);
            if committed.is_empty() {
                self.of_sessions.remove(&session);
            }
        }
    }

    /// The transactions that a session has committed and that a source has not acknowledged.
    pub(super) fn own_commits(&self, session: Option<SessionId>, source: NodeId) -> Vec<Xid> {
        let committed = session.and_then(|session| self.of_sessions.get(&session));
        let is_awaited = |xid: &Xid| {
            self.decided.get(xid).is_some_and(|decided| decided.unacknowledged.contains(&source))
        };
        committed.into_iter().flatten().copied().filter(is_awaited).collect()
    }

    /// Whether a session has committed transactions that a source has not acknowledged.
    #[must_use]
    pub fn awaits_own(&self, session: SessionId, source: NodeId) -> bool {
        !self.own_commits(Some(session), source).is_empty()
    }

    /// The only branch does not know whether it committed.
    pub(super) fn on_lost(&mut self, xid: Xid, io: Out<'_, '_, W>) {
        let Some(open) = self.open.get(&xid) else { return };
        if open.branches.values().any(Branch::is_committing) {
            io.push(Effect::Note(Note::Unknowable));
            self.finish(xid, Outcome::Unknown, None, orthodrome_core::machine::UNKNOWABLE, io);
        }
    }
}
