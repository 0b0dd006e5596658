//! Messages of middlewares and of other branches' agents.

use orthodrome_core::id::NodeId;
use orthodrome_core::time::{Time, Timestamp};

use super::{Agent, Branch, End, Master, Out, State, failed, lost, statements_of};
use crate::contract::{
    AgentEffect, Fence, FromAgent, Isolation, Note, PeerRollback, Reason, Then, ToAgent, ToSource,
    Work, Xid,
};

impl<W: Work> Agent<W> {
    /// A middleware has started: its earlier unprepared branches can never be decided (G6).
    pub(super) fn on_attach(&mut self, from: NodeId, epoch: u64, io: Out<'_, '_, W>) {
        if self.masters.get(&from).is_some_and(|master| master.epoch > epoch) {
            io.push(AgentEffect::Note(Note::OldEpoch));
            return;
        }
        let oldest = self
            .masters
            .get(&from)
            .filter(|master| master.epoch == epoch)
            .map_or(0, |master| master.oldest);
        self.masters.insert(from, Master { epoch, heard: io.now, oldest });
        if !self.config.mutations.ignores_epochs {
            self.ended.retain(|xid, _| xid.middleware != from || xid.epoch >= epoch);
            self.answers.retain(|xid, _| xid.middleware != from || xid.epoch >= epoch);
            self.held.retain(|(at, _)| *at != from);
            self.drop_unprepared(|xid| xid.middleware == from && xid.epoch < epoch, io);
        }
        // The incarnation of the source is not known while the source is down. The answer to a ping
        // reports it.
        if self.is_up {
            io.push(AgentEffect::Send {
                to: from,
                msg: FromAgent::Attached { epoch, fence: self.fence },
            });
        }
    }

    /// Rolls back branches that nobody can commit.
    pub(super) fn drop_unprepared(&mut self, of: impl Fn(&Xid) -> bool, io: Out<'_, '_, W>) {
        let open: Vec<Xid> = self.branches.keys().copied().filter(of).collect();
        for xid in open {
            let Some(branch) = self.branches.get(&xid) else { continue };
            match branch.state {
                State::Running(Then::Wait | Then::Prepare) | State::Idle | State::Preparing => {
                    self.roll_back(xid, Some(Reason::Master.into()), io);
                }
                // By now the source decides whether that commits.
                State::Running(Then::Commit)
                | State::Committing
                | State::CommittingPrepared
                | State::Prepared
                | State::RollingBack(_) => {}
            }
        }
    }

    pub(super) fn on_ping(
        &mut self,
        from: NodeId,
        epoch: u64,
        sent: Time,
        oldest: u64,
        io: Out<'_, '_, W>,
    ) {
        let mut is_attached = false;
        if let Some(master) = self.masters.get_mut(&from).filter(|master| master.epoch == epoch) {
            master.heard = io.now;
            master.oldest = master.oldest.max(oldest);
            is_attached = true;
            let passed =
                |xid: &Xid| xid.middleware == from && (xid.epoch, xid.number) < (epoch, oldest);
            self.ended.retain(|xid, _| !passed(xid));
            self.answers.retain(|xid, _| !passed(xid));
            if !self.config.mutations.ignores_epochs {
                // A repeated request may have opened a branch again after its refusal was told.
                self.drop_unprepared(passed, io);
            }
            self.go_on(io);
        }
        if self.is_up {
            io.push(AgentEffect::Send {
                to: from,
                msg: FromAgent::Pong { sent, fence: self.fence, is_attached },
            });
        }
    }

    pub(super) fn on_execute(&mut self, from: NodeId, msg: ToAgent<W>, io: Out<'_, '_, W>) {
        let ToAgent::Execute {
            xid,
            round,
            life,
            ref peers,
            isolation,
            ref marks,
            ref statements,
            writes,
            then,
        } = msg
        else {
            unreachable!("the caller looked");
        };
        if !self.is_admitted(from, xid, life, then, io) {
            return;
        }
        if let Some(branch) = self.branches.get_mut(&xid) {
            if round < branch.rounds {
                // A repeated request: repeat the answer.
                let is_vote = branch.state == State::Prepared;
                io.effects
                    .extend(branch.answered.clone().map(|msg| AgentEffect::Send { to: from, msg }));
                if is_vote {
                    self.say_prepared(xid, io);
                }
                return;
            }
            if branch.state != State::Idle || round != branch.rounds {
                return;
            }
            branch.peers.clone_from(peers);
            branch.rounds += 1;
            branch.since = io.now;
            branch.wrote |= writes;
            branch.state = State::Running(then);
            branch.answered = None;
            let (marks, statements, wrote) = (marks.clone(), statements.clone(), branch.wrote);
            let run = ToSource::Run { xid, begin: None, marks, statements, then, wrote };
            io.push(AgentEffect::Source(run));
            return;
        }
        if let Some(reason) = self.cannot_open(round) {
            self.ended.insert(xid, End::RolledBack);
            io.push(failed(xid, reason));
            return;
        }
        if io.now < self.open_at {
            self.hold(from, xid, msg);
            return;
        }
        // It may also be held, if it was sent twice.
        self.held.retain(|(_, held)| statements_of(held) != Some(xid));
        let branch = Branch {
            state: State::Running(then),
            peers: peers.clone(),
            rounds: 1,
            since: io.now,
            fence: self.fence,
            wrote: writes,
            floor: Timestamp::ZERO,
            answered: None,
        };
        self.branches.insert(xid, branch);
        let begin: Option<Isolation> = Some(isolation);
        let (marks, statements) = (marks.clone(), statements.clone());
        let run = ToSource::Run { xid, begin, marks, statements, then, wrote: writes };
        io.push(AgentEffect::Source(run));
    }

    /// True if the statements belong to a transaction that is still open, and to this agent's
    /// incarnation. If not, their middleware is informed.
    fn is_admitted(
        &mut self,
        from: NodeId,
        xid: Xid,
        life: u64,
        then: Then,
        io: Out<'_, '_, W>,
    ) -> bool {
        let master = self.masters.get(&from).copied();
        let is_current = master.is_some_and(|master| master.epoch == xid.epoch);
        if !is_current && !self.config.mutations.ignores_epochs {
            io.push(AgentEffect::Note(Note::OldEpoch));
            io.push(if then == Then::Commit { lost(xid) } else { failed(xid, Reason::Master) });
            return false;
        }
        if is_current && master.is_some_and(|master| xid.number < master.oldest) {
            return false;
        }
        if let Some(&end) = self.ended.get(&xid) {
            if end == End::RolledBack {
                io.push(AgentEffect::Note(Note::LateStatements));
            }
            if end != End::RolledBack || !self.config.mutations.no_tombstones {
                let answered = self.answers.get(&xid).cloned();
                io.effects.extend(answered.map(|msg| AgentEffect::Send { to: from, msg }));
                self.say_end(xid, end, io);
                return false;
            }
        }
        if life != self.fence.agent {
            // The agent of that incarnation may have executed it, or not.
            io.push(if then == Then::Commit { lost(xid) } else { failed(xid, Reason::Restarted) });
            return false;
        }
        true
    }

    /// Why a branch whose first round is `round` cannot be opened here.
    fn cannot_open(&self, round: u32) -> Option<Reason> {
        if round > 0 {
            return Some(Reason::Unknown);
        }
        (!self.is_up).then_some(Reason::Connection)
    }

    /// Keeps statements until the quarantine is over.
    fn hold(&mut self, from: NodeId, xid: Xid, msg: ToAgent<W>) {
        if !self.held.iter().any(|(_, held)| statements_of(held) == Some(xid)) {
            self.held.push((from, msg));
        }
    }

    /// Statements of a session that has committed other transactions here. They run once the source
    /// has committed those.
    pub(super) fn on_after(
        &mut self,
        from: NodeId,
        earlier: Vec<Xid>,
        order: Box<ToAgent<W>>,
        io: Out<'_, '_, W>,
    ) {
        let Some(xid) = statements_of(&order) else { return };
        let master = self.masters.get(&from);
        let has_ended = |earlier: &Xid| {
            let is_past = master.is_some_and(|master| {
                (earlier.epoch, earlier.number) < (master.epoch, master.oldest)
            });
            is_past || self.ended.contains_key(earlier)
        };
        let is_current = master.is_some_and(|master| master.epoch == xid.epoch);
        let is_known = self.branches.contains_key(&xid) || self.ended.contains_key(&xid);
        if !is_current || is_known || !self.is_up || earlier.iter().all(has_ended) {
            self.on_message(from, *order, io);
            return;
        }
        let is_held = |(_, held): &(NodeId, ToAgent<W>)| statements_of(held) == Some(xid);
        if !self.held.iter().any(is_held) {
            self.held.push((from, ToAgent::After { earlier, order }));
        }
    }

    /// Checks held statements again.
    pub(super) fn go_on(&mut self, io: Out<'_, '_, W>) {
        for (from, msg) in std::mem::take(&mut self.held) {
            if let ToAgent::After { earlier, order } = msg {
                self.on_after(from, earlier, order, io);
            } else {
                self.on_message(from, msg, io);
            }
        }
    }

    pub(super) fn on_prepare(&mut self, xid: Xid, peers: Vec<NodeId>, io: Out<'_, '_, W>) {
        let Some(branch) = self.branches.get_mut(&xid) else {
            // It was lost. From now on it counts as ended (R1).
            let end = *self.ended.entry(xid).or_insert(End::RolledBack);
            self.say_end(xid, end, io);
            return;
        };
        match branch.state {
            State::Idle => {
                branch.peers = peers;
                branch.state = State::Preparing;
                let wrote = branch.wrote;
                io.push(AgentEffect::Source(ToSource::Prepare { xid, wrote }));
                self.vote_early(xid, io);
            }
            State::Prepared => self.say_prepared(xid, io),
            State::Running(_)
            | State::Preparing
            | State::Committing
            | State::CommittingPrepared
            | State::RollingBack(_) => {}
        }
    }

    pub(super) fn vote_early(&mut self, xid: Xid, io: Out<'_, '_, W>) {
        if self.config.mutations.votes_early {
            self.say_prepared(xid, io);
        }
    }

    pub(super) fn on_commit(
        &mut self,
        from: NodeId,
        xid: Xid,
        at: Timestamp,
        one_phase: bool,
        io: Out<'_, '_, W>,
    ) {
        let Some(branch) = self.branches.get_mut(&xid) else {
            match self.ended.get(&xid) {
                Some(&end) if one_phase => self.say_end(xid, end, io),
                Some(&End::Committed(at)) => {
                    io.push(AgentEffect::Send { to: from, msg: FromAgent::Committed { xid, at } });
                }
                // A one-phase commit of which nothing is known here: it may have committed before
                // this agent started.
                None if one_phase => {
                    self.ended.insert(xid, End::Lost);
                    io.push(AgentEffect::Send { to: from, msg: FromAgent::Lost { xid } });
                }
                // The decision is durable, so a branch that does not exist any more has committed,
                // or only read (G4).
                Some(End::RolledBack | End::Lost) | None => {
                    let mut branch = self.recovered(State::CommittingPrepared);
                    branch.floor = at;
                    self.branches.insert(xid, branch);
                    io.push(AgentEffect::Source(ToSource::CommitPrepared { xid, at }));
                }
            }
            return;
        };
        match branch.state {
            State::Idle if one_phase => {
                branch.state = State::Committing;
                io.push(AgentEffect::Source(ToSource::CommitOnePhase { xid, at }));
            }
            State::Prepared => {
                branch.state = State::CommittingPrepared;
                branch.floor = at;
                io.push(AgentEffect::Source(ToSource::CommitPrepared { xid, at }));
            }
            State::Idle
            | State::Running(_)
            | State::Preparing
            | State::Committing
            | State::CommittingPrepared
            | State::RollingBack(_) => {}
        }
    }

    pub(super) fn recovered(&self, state: State<W>) -> Branch<W> {
        Branch {
            state,
            peers: Vec::new(),
            rounds: 0,
            since: Time::ZERO,
            // Its fence does not count for a vote: it was prepared in another incarnation.
            fence: Fence::default(),
            wrote: true,
            floor: Timestamp::ZERO,
            answered: None,
        }
    }

    pub(super) fn on_rollback(&mut self, from: NodeId, xid: Xid, io: Out<'_, '_, W>) {
        self.unhold(xid);
        if let Some(branch) = self.branches.get(&xid) {
            match &branch.state {
                // Its failure is still reported: it may be the cause of the abort.
                State::RollingBack(_)
                | State::Committing
                | State::CommittingPrepared
                | State::Running(Then::Commit) => {}
                State::Running(_) | State::Idle | State::Preparing | State::Prepared => {
                    self.roll_back(xid, None, io)
                }
            }
            return;
        }
        match self.ended.get(&xid) {
            Some(_) => io.push(AgentEffect::Send { to: from, msg: FromAgent::RolledBack { xid } }),
            None => {
                // It may have been prepared in an earlier incarnation.
                let branch = self.recovered(State::RollingBack(None));
                self.branches.insert(xid, branch);
                io.push(AgentEffect::Source(ToSource::Rollback { xid }));
            }
        }
    }

    pub(super) fn on_interrupt(&mut self, xid: Xid, io: Out<'_, '_, W>) {
        let is_running =
            |branch: &Branch<W>| matches!(branch.state, State::Running(_) | State::Committing);
        if self.branches.get(&xid).is_some_and(is_running) {
            io.push(AgentEffect::Source(ToSource::Interrupt { xid }));
        }
        if self.unhold(xid) {
            io.push(failed(xid, Reason::Session));
        }
    }

    /// The other branches cannot commit, so this one need not continue (GeoTP §IV-A, early abort).
    pub fn on_peer(&mut self, msg: PeerRollback, io: Out<'_, '_, W>) {
        let PeerRollback { xid } = msg;
        self.unhold(xid);
        let Some(branch) = self.branches.get(&xid) else {
            let master = self.masters.get(&xid.middleware);
            let is_due = master
                .is_none_or(|master| master.epoch <= xid.epoch && master.oldest <= xid.number);
            if !self.ended.contains_key(&xid) && is_due && !self.config.mutations.no_tombstones {
                // Its statements have not arrived yet (G5).
                io.push(AgentEffect::Note(Note::Tombstone));
                self.ended.insert(xid, End::RolledBack);
            }
            return;
        };
        match branch.state {
            State::Running(Then::Wait | Then::Prepare)
            | State::Idle
            | State::Preparing
            | State::Prepared => {
                self.roll_back(xid, Some(Reason::Peer.into()), io);
            }
            State::Running(Then::Commit)
            | State::Committing
            | State::CommittingPrepared
            | State::RollingBack(_) => {}
        }
    }

    /// Drops the held statements of a transaction. True if there were any.
    pub(super) fn unhold(&mut self, xid: Xid) -> bool {
        let before = self.held.len();
        self.held.retain(|(_, held)| statements_of(held) != Some(xid));
        let was_held = self.held.len() < before;
        if was_held {
            self.ended.insert(xid, End::RolledBack);
        }
        was_held
    }

    pub(super) fn on_scan(&mut self, from: NodeId, epoch: u64, io: Out<'_, '_, W>) {
        self.scanners.insert(from, epoch);
        if self.is_up {
            io.push(AgentEffect::Source(ToSource::List));
        }
    }
}
