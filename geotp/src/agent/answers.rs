//! The source's answers to its agent.

use orthodrome_core::id::NodeId;
use orthodrome_core::limits::Pieces;
use orthodrome_core::ordered::OrdSet;
use orthodrome_core::time::Timestamp;

use super::{Agent, End, Out, State, XID_BYTES};
use crate::contract::{
    AgentEffect, AgentTimer, Failure, FromAgent, FromSource, Note, Reason, Then, ToSource, Wait,
    Work, Xid,
};

impl<W: Work> Agent<W> {
    /// Processes an answer of the source, or a change of its connection.
    pub fn on_source(&mut self, from: FromSource<W>, io: Out<'_, '_, W>) {
        match from {
            FromSource::Up { start } => self.on_up(start, io),
            FromSource::Down => self.on_down(io),
            FromSource::Ran { xid, answers } => self.on_ran(xid, answers, io),
            FromSource::RunFailed { xid, statement, failure, goes_on } => {
                self.on_run_failed(xid, statement, failure, goes_on, io);
            }
            FromSource::Prepared { xid, floor } => self.on_prepared(xid, floor, io),
            FromSource::Refused { xid, failure } => self.on_refused(xid, failure, io),
            FromSource::Committed { xid, at } => self.on_committed(xid, at, io),
            FromSource::RolledBack { xid } => self.on_rolled_back(xid, io),
            FromSource::Gone { xid } => {
                if !self.config.mutations.waits_for_vanished {
                    self.on_committed(xid, Timestamp::ZERO, io);
                }
            }
            FromSource::SessionLost { xid } => self.on_session_lost(xid, io),
            FromSource::Listed { prepared } => self.on_listed(prepared, io),
            FromSource::Waits { waits } => self.on_waits(&waits, io),
        }
    }

    fn on_up(&mut self, start: u64, io: Out<'_, '_, W>) {
        if self.fence.source != start {
            self.lose_sessions(io);
            self.fence.source = start;
            self.open_at = io.now + self.config.quarantine;
            io.push(AgentEffect::SetTimer(AgentTimer::Open, self.open_at));
        }
        self.is_up = true;
        // A branch that is being ended may have been interrupted.
        for (&xid, branch) in &self.branches {
            match branch.state {
                State::RollingBack(_) => {
                    io.effects.push(AgentEffect::Source(ToSource::Rollback { xid }))
                }
                State::CommittingPrepared => {
                    let at = branch.floor;
                    io.effects.push(AgentEffect::Source(ToSource::CommitPrepared { xid, at }));
                }
                State::Running(_)
                | State::Idle
                | State::Preparing
                | State::Prepared
                | State::Committing => {}
            }
        }
        io.push(AgentEffect::Source(ToSource::List));
    }

    fn on_down(&mut self, io: Out<'_, '_, W>) {
        self.is_up = false;
        self.lose_sessions(io);
        self.go_on(io);
    }

    fn lose_sessions(&mut self, io: Out<'_, '_, W>) {
        for xid in self.branches.keys().copied().collect::<Vec<_>>() {
            self.on_session_lost(xid, io);
        }
    }

    fn on_ran(&mut self, xid: Xid, answers: Vec<W::Answer>, io: Out<'_, '_, W>) {
        let Some(branch) = self.branches.get_mut(&xid) else { return };
        let State::Running(then) = branch.state else { return };
        let took = io.now.since(branch.since);
        let answered = FromAgent::Answered {
            xid,
            round: branch.rounds - 1,
            answers,
            fence: branch.fence,
            took,
        };
        branch.answered = Some(answered.clone());
        branch.state = match then {
            Then::Wait => State::Idle,
            Then::Prepare => State::Preparing,
            Then::Commit => State::Committing,
        };
        io.push(AgentEffect::Send { to: xid.middleware, msg: answered });
        if then == Then::Prepare {
            self.vote_early(xid, io);
        }
    }

    fn on_run_failed(
        &mut self,
        xid: Xid,
        statement: u32,
        failure: Failure<W>,
        goes_on: bool,
        io: Out<'_, '_, W>,
    ) {
        let Some(branch) = self.branches.get_mut(&xid) else { return };
        let State::Running(_) = branch.state else { return };
        if failure.reason == Reason::Deadlock {
            io.push(AgentEffect::Note(Note::Deadlock));
        }
        if failure.reason == Reason::LockTimeout {
            io.push(AgentEffect::Note(Note::LockTimeout));
        }
        if !goes_on {
            self.fail(xid, failure, io);
            return;
        }
        branch.state = State::Idle;
        let told = FromAgent::StatementFailed { xid, round: branch.rounds - 1, statement, failure };
        branch.answered = Some(told.clone());
        io.push(AgentEffect::Send { to: xid.middleware, msg: told });
    }

    fn on_prepared(&mut self, xid: Xid, floor: Timestamp, io: Out<'_, '_, W>) {
        let Some(branch) = self.branches.get_mut(&xid) else { return };
        if branch.state == State::Preparing {
            branch.state = State::Prepared;
            branch.floor = floor;
            if !self.config.mutations.votes_early {
                self.say_prepared(xid, io);
            }
        }
    }

    /// The source has rolled it back.
    fn on_refused(&mut self, xid: Xid, failure: Failure<W>, io: Out<'_, '_, W>) {
        let Some(branch) = self.branches.get_mut(&xid) else { return };
        match branch.state {
            State::Preparing | State::Committing => {
                self.tell_peers(xid, io);
                self.end(xid, End::RolledBack);
                io.push(AgentEffect::Send {
                    to: xid.middleware,
                    msg: FromAgent::Failed { xid, failure },
                });
            }
            State::Running(_)
            | State::Idle
            | State::Prepared
            | State::CommittingPrepared
            | State::RollingBack(_) => {}
        }
    }

    fn on_committed(&mut self, xid: Xid, at: Timestamp, io: Out<'_, '_, W>) {
        let Some(branch) = self.branches.get(&xid) else { return };
        match branch.state {
            State::Committing | State::CommittingPrepared => {
                self.end(xid, End::Committed(at));
                self.say_end(xid, End::Committed(at), io);
                self.go_on(io);
            }
            State::Running(_)
            | State::Idle
            | State::Preparing
            | State::Prepared
            | State::RollingBack(_) => {}
        }
    }

    fn on_rolled_back(&mut self, xid: Xid, io: Out<'_, '_, W>) {
        let Some(branch) = self.branches.get_mut(&xid) else { return };
        let State::RollingBack(failure) = &mut branch.state else { return };
        let failure = failure.take();
        self.end(xid, End::RolledBack);
        match failure {
            Some(failure) => {
                io.push(AgentEffect::Send {
                    to: xid.middleware,
                    msg: FromAgent::Failed { xid, failure },
                });
            }
            None => io
                .push(AgentEffect::Send { to: xid.middleware, msg: FromAgent::RolledBack { xid } }),
        }
    }

    fn on_session_lost(&mut self, xid: Xid, io: Out<'_, '_, W>) {
        let Some(branch) = self.branches.get(&xid) else { return };
        match branch.state {
            State::Running(Then::Commit) | State::Committing => {
                self.end(xid, End::Lost);
                self.say_end(xid, End::Lost, io);
            }
            // It may have been prepared: the rollback finds out.
            State::Running(_) | State::Idle | State::Preparing => {
                self.fail(xid, Reason::Connection.into(), io)
            }
            State::Prepared | State::CommittingPrepared | State::RollingBack(_) => {}
        }
    }

    /// Prepared branches that this agent does not know belong to another incarnation.
    fn on_listed(&mut self, prepared: Vec<Xid>, io: Out<'_, '_, W>) {
        let left: OrdSet<Xid> =
            prepared.into_iter().filter(|xid| !self.ended.contains_key(xid)).collect();
        for &xid in &left {
            if !self.branches.contains_key(&xid) {
                let branch = self.recovered(State::Prepared);
                self.branches.insert(xid, branch);
            }
        }
        for (to, epoch) in std::mem::take(&mut self.scanners) {
            let of = left.iter().copied().filter(|xid| xid.middleware == to);
            for prepared in self.in_pieces(XID_BYTES, of) {
                io.push(AgentEffect::Send { to, msg: FromAgent::Scanned { epoch, prepared } });
            }
        }
    }

    /// Groups items of `bytes` bytes each into messages: at least one message.
    fn in_pieces<T: Clone>(&self, bytes: usize, items: impl Iterator<Item = T>) -> Vec<Vec<T>> {
        let mut pieces = Pieces::new(Vec::new(), self.config.limits.piece_bytes());
        items.for_each(|item| pieces.of(bytes).push(item));
        pieces.finish()
    }

    /// Every middleware with a transaction among them receives all of them: a cycle may pass
    /// through transactions of others.
    fn on_waits(&mut self, waits: &[Wait], io: Out<'_, '_, W>) {
        let of = |wait: &Wait| [wait.waiter.middleware, wait.holder.middleware];
        let watchers: OrdSet<NodeId> = waits.iter().flat_map(of).collect();
        let before = std::mem::replace(&mut self.watchers, watchers.clone());
        self.looks += 1;
        let look = self.looks;
        let pieces = self.in_pieces(2 * XID_BYTES, waits.iter().copied());
        for &to in before.union(&watchers) {
            let last = pieces.len().saturating_sub(1);
            for (number, waits) in pieces.iter().cloned().enumerate() {
                let msg = FromAgent::Waits { look, waits, more: number < last };
                io.push(AgentEffect::Send { to, msg });
            }
        }
    }
}
