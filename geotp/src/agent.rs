//! The geo-agent (GeoTP §III-B, §IV-A): stands in front of one source, beside it, or inside a middleware where none can be
//! installed there, and serves every middleware of that source.
//!
//! It prepares a branch after its last statement by itself, tells the agents of the other branches when one fails, and sees to
//! it that nothing of a branch that was ended, or whose middleware is gone, ever prepares.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use orthodrome_core::id::NodeId;
use orthodrome_core::limits::{Limits, Pieces};
use orthodrome_core::machine::Leak;
use orthodrome_core::time::{Duration, Time, Timestamp};

use crate::contract::{
    AgentEffect, AgentTimer, Failure, Fence, FromAgent, FromSource, Io, Isolation, Note,
    PeerRollback, Reason, Then, ToAgent, ToSource, Wait, Work, Xid,
};

/// Settings.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// Unprepared branches of a middleware that has not been heard of for so long are rolled back.
    pub master_timeout: Duration,
    /// Nothing new runs for so long after the source or the agent has started. The same at every agent, and in every
    /// middleware's settings.
    pub quarantine: Duration,
    /// Where a message about several transactions ends and another begins.
    pub limits: Limits,
    /// Unsafe variants, for tests.
    pub mutations: Mutations,
}

/// Unsafe variants that tests switch on to see that they are caught. All off in any real use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Mutations {
    /// G5: no tombstone is left for a branch that is ended before its statements come.
    pub no_tombstones: bool,
    /// G4: a prepared branch that is nowhere, since it only read, is taken for one that could not be committed.
    pub waits_for_vanished: bool,
    /// G6: a middleware that has started again finds what it left still running.
    pub ignores_epochs: bool,
    /// A branch is said to be prepared as soon as its statements have been executed.
    pub votes_early: bool,
}

/// A middleware, as the agent sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Master {
    epoch: u64,
    heard: Time,
    /// Everything of this life with a smaller number has ended.
    oldest: u64,
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum State<W: Work> {
    Running(Then),
    Idle,
    Preparing,
    Prepared,
    /// In one phase.
    Committing,
    CommittingPrepared,
    /// With the failure that its middleware will hear of, if it did not ask for this.
    RollingBack(Option<Failure<W>>),
}

#[derive(Clone, Debug)]
struct Branch<W: Work> {
    state: State<W>,
    peers: Vec<NodeId>,
    /// Rounds that have begun here.
    rounds: u32,
    /// Since when the round under way runs.
    since: Time,
    fence: Fence,
    wrote: bool,
    floor: Timestamp,
    /// The answer to the last round, in case it is asked for again.
    answered: Option<FromAgent<W>>,
}

/// How a branch ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    RolledBack,
    Committed(Timestamp),
    Lost,
}

/// The agent.
#[derive(Debug)]
pub struct Agent<W: Work> {
    config: Config,
    fence: Fence,
    is_up: bool,
    /// Nothing new runs before.
    open_at: Time,
    masters: BTreeMap<NodeId, Master>,
    branches: BTreeMap<Xid, Branch<W>>,
    /// What ended, until its middleware says that nobody will speak of it any more (G5, R6).
    ended: BTreeMap<Xid, End>,
    /// What the only branches of those that committed had answered, in case it was lost on the way.
    answers: BTreeMap<Xid, FromAgent<W>>,
    /// Statements that came before it was time.
    held: Vec<(NodeId, ToAgent<W>)>,
    /// Who asked for prepared branches.
    scanners: BTreeMap<NodeId, u64>,
    /// Who was told last that somebody waits here.
    watchers: BTreeSet<NodeId>,
    /// How often they were told who waits.
    looks: u64,
}

/// About how many bytes a message takes for one branch that it names.
const XID_BYTES: usize = 24;

type Out<'a, 'b, W> = &'a mut Io<'b, AgentEffect<W>>;

impl<W: Work> Agent<W> {
    /// Starts. `life` is any number that no earlier life of this agent had.
    #[must_use]
    pub fn new(config: Config, life: u64, io: Out<'_, '_, W>) -> Self {
        io.push(AgentEffect::SetTimer(AgentTimer::Sweep, io.now + config.master_timeout / 2));
        Self {
            fence: Fence { agent: life.max(1), source: 0 },
            is_up: false,
            open_at: io.now,
            masters: BTreeMap::new(),
            branches: BTreeMap::new(),
            ended: BTreeMap::new(),
            answers: BTreeMap::new(),
            held: Vec::new(),
            scanners: BTreeMap::new(),
            watchers: BTreeSet::new(),
            looks: 0,
            config,
        }
    }

    /// A message from a middleware.
    pub fn on_message(&mut self, from: NodeId, msg: ToAgent<W>, io: Out<'_, '_, W>) {
        match msg {
            ToAgent::Attach { epoch } => self.on_attach(from, epoch, io),
            ToAgent::Ping { epoch, sent, oldest } => self.on_ping(from, epoch, sent, oldest, io),
            ToAgent::Execute { .. } => self.on_execute(from, msg, io),
            ToAgent::After { earlier, order } => {
                let before = self.held.len();
                self.on_after(from, earlier, order, io);
                if self.held.len() > before {
                    io.push(AgentEffect::Note(Note::OwnCommitAwaited));
                }
            }
            ToAgent::Prepare { xid, peers } => self.on_prepare(xid, peers, io),
            ToAgent::Commit { xid, at, one_phase } => self.on_commit(from, xid, at, one_phase, io),
            ToAgent::Rollback { xid } => self.on_rollback(from, xid, io),
            ToAgent::Interrupt { xid } => self.on_interrupt(xid, io),
            ToAgent::Scan { epoch } => self.on_scan(from, epoch, io),
        }
    }

    /// A middleware has started: what it left unprepared can never be decided (G6).
    fn on_attach(&mut self, from: NodeId, epoch: u64, io: Out<'_, '_, W>) {
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
        // Which life of the source that would be is not known while it is away. The answer to a ping tells it.
        if self.is_up {
            io.push(AgentEffect::Send {
                to: from,
                msg: FromAgent::Attached { epoch, fence: self.fence },
            });
        }
    }

    /// Rolls back what nobody can commit.
    fn drop_unprepared(&mut self, of: impl Fn(&Xid) -> bool, io: Out<'_, '_, W>) {
        let open: Vec<Xid> = self.branches.keys().copied().filter(of).collect();
        for xid in open {
            let Some(branch) = self.branches.get(&xid) else { continue };
            match branch.state {
                State::Running(Then::Wait | Then::Prepare) | State::Idle | State::Preparing => {
                    self.roll_back(xid, Some(Reason::Master.into()), io);
                }
                // Whether that commits is the source's affair by now.
                State::Running(Then::Commit)
                | State::Committing
                | State::CommittingPrepared
                | State::Prepared
                | State::RollingBack(_) => {}
            }
        }
    }

    fn on_ping(&mut self, from: NodeId, epoch: u64, sent: Time, oldest: u64, io: Out<'_, '_, W>) {
        let mut is_attached = false;
        if let Some(master) = self.masters.get_mut(&from).filter(|master| master.epoch == epoch) {
            master.heard = io.now;
            master.oldest = master.oldest.max(oldest);
            is_attached = true;
            let passed =
                |xid: &Xid| xid.middleware == from && (xid.epoch, xid.number) < (epoch, oldest);
            self.ended.retain(|xid, _| !passed(xid));
            self.answers.retain(|xid, _| !passed(xid));
            self.go_on(io);
        }
        if self.is_up {
            io.push(AgentEffect::Send {
                to: from,
                msg: FromAgent::Pong { sent, fence: self.fence, is_attached },
            });
        }
    }

    fn on_execute(&mut self, from: NodeId, msg: ToAgent<W>, io: Out<'_, '_, W>) {
        let ToAgent::Execute {
            xid,
            round,
            life,
            ref peers,
            isolation,
            ref statements,
            writes,
            then,
        } = msg
        else {
            unreachable!("the caller looked");
        };
        let master = self.masters.get(&from).copied();
        let is_current = master.is_some_and(|master| master.epoch == xid.epoch);
        if !is_current && !self.config.mutations.ignores_epochs {
            io.push(AgentEffect::Note(Note::OldEpoch));
            io.push(if then == Then::Commit { lost(xid) } else { failed(xid, Reason::Master) });
            return;
        }
        if is_current && master.is_some_and(|master| xid.number < master.oldest) {
            return;
        }
        if let Some(&end) = self.ended.get(&xid) {
            if end == End::RolledBack {
                io.push(AgentEffect::Note(Note::LateStatements));
            }
            if end != End::RolledBack || !self.config.mutations.no_tombstones {
                let answered = self.answers.get(&xid).cloned();
                io.effects.extend(answered.map(|msg| AgentEffect::Send { to: from, msg }));
                self.say_end(xid, end, io);
                return;
            }
        }
        if life != self.fence.agent {
            // The agent of that life may have carried it out, or not.
            io.push(if then == Then::Commit { lost(xid) } else { failed(xid, Reason::Restarted) });
            return;
        }
        if let Some(branch) = self.branches.get_mut(&xid) {
            if round < branch.rounds {
                // Asked again: what there is to say is said again.
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
            let run = ToSource::Run {
                xid,
                begin: None,
                statements: statements.clone(),
                then,
                wrote: branch.wrote,
            };
            io.push(AgentEffect::Source(run));
            return;
        }
        if round > 0 {
            self.ended.insert(xid, End::RolledBack);
            io.push(failed(xid, Reason::Unknown));
            return;
        }
        if !self.is_up {
            self.ended.insert(xid, End::RolledBack);
            io.push(failed(xid, Reason::Connection));
            return;
        }
        if io.now < self.open_at {
            if !self.held.iter().any(|(_, held)| statements_of(held) == Some(xid)) {
                self.held.push((from, msg));
            }
            return;
        }
        // It may be held, too, if it was sent twice.
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
        let run = ToSource::Run { xid, begin, statements: statements.clone(), then, wrote: writes };
        io.push(AgentEffect::Source(run));
    }

    /// Statements of a session that has committed others here: whether the source has carried that out decides when they run.
    fn on_after(
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

    /// Looks again at what is held.
    fn go_on(&mut self, io: Out<'_, '_, W>) {
        for (from, msg) in std::mem::take(&mut self.held) {
            if let ToAgent::After { earlier, order } = msg {
                self.on_after(from, earlier, order, io);
            } else {
                self.on_message(from, msg, io);
            }
        }
    }

    fn on_prepare(&mut self, xid: Xid, peers: Vec<NodeId>, io: Out<'_, '_, W>) {
        let Some(branch) = self.branches.get_mut(&xid) else {
            // It was lost. From now on it is ended (R1).
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

    fn vote_early(&mut self, xid: Xid, io: Out<'_, '_, W>) {
        if self.config.mutations.votes_early {
            self.say_prepared(xid, io);
        }
    }

    fn on_commit(
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
                // It had no time to be asked twice: whether it committed before this agent started is not known.
                None if one_phase => {
                    self.ended.insert(xid, End::Lost);
                    io.push(AgentEffect::Send { to: from, msg: FromAgent::Lost { xid } });
                }
                // The decision is durable, so a branch that is nowhere has committed, or only read (G4).
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

    fn recovered(&self, state: State<W>) -> Branch<W> {
        Branch {
            state,
            peers: Vec::new(),
            rounds: 0,
            since: Time::ZERO,
            // Nobody votes with it: it was prepared in another life.
            fence: Fence::default(),
            wrote: true,
            floor: Timestamp::ZERO,
            answered: None,
        }
    }

    fn on_rollback(&mut self, from: NodeId, xid: Xid, io: Out<'_, '_, W>) {
        self.unhold(xid);
        if let Some(branch) = self.branches.get(&xid) {
            match &branch.state {
                // Its failure is still told: it may be what the transaction was aborted for.
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
                // Perhaps it is prepared since another life.
                let branch = self.recovered(State::RollingBack(None));
                self.branches.insert(xid, branch);
                io.push(AgentEffect::Source(ToSource::Rollback { xid }));
            }
        }
    }

    fn on_interrupt(&mut self, xid: Xid, io: Out<'_, '_, W>) {
        let is_running =
            |branch: &Branch<W>| matches!(branch.state, State::Running(_) | State::Committing);
        if self.branches.get(&xid).is_some_and(is_running) {
            io.push(AgentEffect::Source(ToSource::Interrupt { xid }));
        }
        if self.unhold(xid) {
            io.push(failed(xid, Reason::Session));
        }
    }

    /// Its other branches cannot commit, so this one need not (GeoTP §IV-A, early abort).
    pub fn on_peer(&mut self, msg: PeerRollback, io: Out<'_, '_, W>) {
        let PeerRollback { xid } = msg;
        self.unhold(xid);
        let Some(branch) = self.branches.get(&xid) else {
            let master = self.masters.get(&xid.middleware);
            let is_due = master
                .is_none_or(|master| master.epoch <= xid.epoch && master.oldest <= xid.number);
            if !self.ended.contains_key(&xid) && is_due && !self.config.mutations.no_tombstones {
                // Its statements are still on their way (G5).
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

    /// What is held of a transaction never runs. Whether something was.
    fn unhold(&mut self, xid: Xid) -> bool {
        let before = self.held.len();
        self.held.retain(|(_, held)| statements_of(held) != Some(xid));
        let was_held = self.held.len() < before;
        if was_held {
            self.ended.insert(xid, End::RolledBack);
        }
        was_held
    }

    fn on_scan(&mut self, from: NodeId, epoch: u64, io: Out<'_, '_, W>) {
        self.scanners.insert(from, epoch);
        if self.is_up {
            io.push(AgentEffect::Source(ToSource::List));
        }
    }

    // --- The source ---

    /// The source answered, or came or went.
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
        // What is being ended may have been interrupted.
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

    fn say_prepared(&self, xid: Xid, io: Out<'_, '_, W>) {
        let Some(branch) = self.branches.get(&xid) else { return };
        let (fence, wrote, floor) = (branch.fence, branch.wrote, branch.floor);
        let vote = FromAgent::Prepared { xid, fence, wrote, floor };
        io.push(AgentEffect::Send { to: xid.middleware, msg: vote });
    }

    /// It is over before the middleware asked for it: peers are told, then it is rolled back.
    fn fail(&mut self, xid: Xid, failure: Failure<W>, io: Out<'_, '_, W>) {
        self.tell_peers(xid, io);
        self.roll_back(xid, Some(failure), io);
    }

    fn tell_peers(&self, xid: Xid, io: Out<'_, '_, W>) {
        let Some(branch) = self.branches.get(&xid) else { return };
        for &to in &branch.peers {
            io.push(AgentEffect::Note(Note::EarlyAbort));
            io.push(AgentEffect::Peer { to, msg: PeerRollback { xid } });
        }
    }

    fn roll_back(&mut self, xid: Xid, failure: Option<Failure<W>>, io: Out<'_, '_, W>) {
        let Some(branch) = self.branches.get_mut(&xid) else { return };
        branch.state = State::RollingBack(failure);
        if self.is_up {
            io.push(AgentEffect::Source(ToSource::Rollback { xid }));
        }
    }

    /// The source has rolled it back by itself.
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
            // It may have been prepared: the order to roll back finds out.
            State::Running(_) | State::Idle | State::Preparing => {
                self.fail(xid, Reason::Connection.into(), io)
            }
            State::Prepared | State::CommittingPrepared | State::RollingBack(_) => {}
        }
    }

    /// Prepared branches that this agent does not know are from another life.
    fn on_listed(&mut self, prepared: Vec<Xid>, io: Out<'_, '_, W>) {
        let left: BTreeSet<Xid> =
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

    /// What goes into one message each, if one item takes so many bytes: at least one message.
    fn in_pieces<T: Clone>(&self, bytes: usize, items: impl Iterator<Item = T>) -> Vec<Vec<T>> {
        let mut pieces = Pieces::new(Vec::new(), self.config.limits.piece_bytes());
        items.for_each(|item| pieces.of(bytes).push(item));
        pieces.finish()
    }

    /// Whoever has a transaction among them is told of all: a cycle may go through others'.
    fn on_waits(&mut self, waits: &[Wait], io: Out<'_, '_, W>) {
        let of = |wait: &Wait| [wait.waiter.middleware, wait.holder.middleware];
        let watchers: BTreeSet<NodeId> = waits.iter().flat_map(of).collect();
        let before = std::mem::replace(&mut self.watchers, watchers.clone());
        self.looks += 1;
        let look = self.looks;
        let pieces = self.in_pieces(2 * XID_BYTES, waits.iter().copied());
        for &to in before.union(&watchers) {
            for waits in pieces.clone() {
                io.push(AgentEffect::Send { to, msg: FromAgent::Waits { look, waits } });
            }
        }
    }

    fn end(&mut self, xid: Xid, end: End) {
        let branch = self.branches.remove(&xid);
        let master = self.masters.get(&xid.middleware);
        let is_kept = master.is_none_or(|m| {
            m.epoch < xid.epoch || (m.epoch == xid.epoch && m.oldest <= xid.number)
        });
        let is_tombstone = end == End::RolledBack && self.config.mutations.no_tombstones;
        if is_kept && !is_tombstone {
            self.ended.insert(xid, end);
            let is_only = |branch: &Branch<W>| branch.state == State::Committing;
            if let (End::Committed(_), Some(branch)) = (end, branch.filter(is_only)) {
                self.answers.extend(branch.answered.map(|answered| (xid, answered)));
            }
        }
    }

    fn say_end(&self, xid: Xid, end: End, io: Out<'_, '_, W>) {
        let msg = match end {
            End::RolledBack => FromAgent::Failed { xid, failure: Reason::Ended.into() },
            End::Committed(at) => FromAgent::Committed { xid, at },
            End::Lost => FromAgent::Lost { xid },
        };
        io.push(AgentEffect::Send { to: xid.middleware, msg });
    }

    // --- Timers ---

    /// A timer expired.
    pub fn on_timer(&mut self, timer: AgentTimer, io: Out<'_, '_, W>) {
        match timer {
            AgentTimer::Sweep => self.on_sweep_timeout(io),
            AgentTimer::Open => self.on_open_timeout(io),
        }
    }

    fn on_sweep_timeout(&mut self, io: Out<'_, '_, W>) {
        let timeout = self.config.master_timeout;
        let now = io.now;
        let silent: BTreeSet<NodeId> = self
            .masters
            .iter()
            .filter(|(_, master)| now.since(master.heard) > timeout)
            .map(|(&node, _)| node)
            .collect();
        let is_lost = |xid: &Xid| silent.contains(&xid.middleware);
        let held: Vec<Xid> =
            self.held.iter().filter_map(|(_, held)| statements_of(held)).filter(is_lost).collect();
        for xid in held {
            self.unhold(xid);
        }
        if self.branches.keys().any(is_lost) && !self.config.mutations.ignores_epochs {
            io.push(AgentEffect::Note(Note::MasterLost));
            self.drop_unprepared(is_lost, io);
        }
        io.push(AgentEffect::SetTimer(AgentTimer::Sweep, now + timeout / 2));
    }

    fn on_open_timeout(&mut self, io: Out<'_, '_, W>) {
        if io.now < self.open_at {
            return;
        }
        self.go_on(io);
    }

    /// What must be gone when every transaction has ended.
    #[must_use]
    pub fn leaks(&self) -> Vec<Leak> {
        vec![
            ("branches", self.branches.len()),
            ("tombstones", self.ended.len()),
            ("held", self.held.len()),
        ]
    }

    /// Panics if the state contradicts itself.
    ///
    /// # Panics
    /// If a branch has ended and has not.
    pub fn assert_invariants(&self) {
        for (xid, branch) in &self.branches {
            let is_reopened =
                matches!(branch.state, State::CommittingPrepared | State::RollingBack(_));
            let is_unsafe = self.config.mutations != Mutations::default();
            assert!(
                is_reopened || is_unsafe || !self.ended.contains_key(xid),
                "{xid} has ended and has not"
            );
        }
    }
}

/// The transaction whose statements a message has.
fn statements_of<W: Work>(msg: &ToAgent<W>) -> Option<Xid> {
    match msg {
        ToAgent::Execute { xid, .. } => Some(*xid),
        ToAgent::After { order, .. } => statements_of(order),
        ToAgent::Attach { .. }
        | ToAgent::Ping { .. }
        | ToAgent::Prepare { .. }
        | ToAgent::Commit { .. }
        | ToAgent::Rollback { .. }
        | ToAgent::Interrupt { .. }
        | ToAgent::Scan { .. } => None,
    }
}

fn lost<W: Work>(xid: Xid) -> AgentEffect<W> {
    AgentEffect::Send { to: xid.middleware, msg: FromAgent::Lost { xid } }
}

fn failed<W: Work>(xid: Xid, reason: Reason) -> AgentEffect<W> {
    AgentEffect::Send { to: xid.middleware, msg: FromAgent::Failed { xid, failure: reason.into() } }
}

impl<W: Work> fmt::Display for Agent<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.branches.is_empty() {
            f.write_str("idle")?;
        }
        for (at, (xid, branch)) in self.branches.iter().enumerate() {
            let separator = if at == 0 { "" } else { ", " };
            let state = match branch.state {
                State::Running(_) => "running",
                State::Idle => "idle",
                State::Preparing => "preparing",
                State::Prepared => "prepared",
                State::Committing | State::CommittingPrepared => "committing",
                State::RollingBack(_) => "rolling back",
            };
            write!(f, "{separator}{xid} {state}")?;
        }
        if !self.ended.is_empty() {
            write!(f, "; ended {:?}", self.ended.keys())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use orthodrome_core::machine::Message as _;
    use orthodrome_core::rng::Rng;

    use super::*;
    use crate::simulated::Msg;
    use crate::source::Model;

    const MIDDLEWARE: NodeId = NodeId(1);

    fn xid(number: u64) -> Xid {
        Xid { middleware: MIDDLEWARE, epoch: 1, number }
    }

    /// What an agent with small messages sends of what its source says.
    fn sent(scans: bool, said: &[FromSource<Model>]) -> Vec<FromAgent<Model>> {
        let limits = Limits { record_bytes: 40 << 10, message_bytes: 40 << 10 };
        let second = Duration::from_secs(1);
        let config = Config {
            master_timeout: second,
            quarantine: second,
            limits,
            mutations: Mutations::default(),
        };
        let (mut rng, mut effects) = (Rng::stream(1, "test", 1), Vec::new());
        let clock = Timestamp::ZERO;
        let mut io = Io { now: Time::ZERO, clock, rng: &mut rng, effects: &mut effects };
        let mut agent: Agent<Model> = Agent::new(config, 1, &mut io);
        if scans {
            agent.on_message(MIDDLEWARE, ToAgent::Scan { epoch: 1 }, &mut io);
        }
        for said in said {
            agent.on_source(said.clone(), &mut io);
        }
        let of = |effect| match effect {
            AgentEffect::Send { msg, .. } => Some(msg),
            AgentEffect::Peer { .. }
            | AgentEffect::Source(_)
            | AgentEffect::SetTimer(..)
            | AgentEffect::Note(_) => None,
        };
        let sent: Vec<FromAgent<Model>> = effects.into_iter().filter_map(of).collect();
        for msg in &sent {
            let bytes = Msg::FromAgent(msg.clone()).wire_size();
            assert!(bytes <= limits.batch_bytes(), "{bytes} bytes in one message");
        }
        sent
    }

    #[test]
    fn many_who_wait_are_reported_in_several_messages_of_one_look() {
        let pair = |waiter| (0..waiter).map(move |holder| (xid(waiter), xid(holder)));
        let of = |(waiter, holder)| Wait { waiter, holder };
        let waits: Vec<Wait> = (0..100).flat_map(pair).map(of).collect();
        let said = [waits.clone(), Vec::new()].map(|waits| FromSource::Waits { waits });
        let mut found = Vec::new();
        let mut last = 0;
        for msg in sent(false, &said) {
            let FromAgent::Waits { look, waits } = msg else { panic!("{msg:?}") };
            found.extend(waits);
            last = look;
        }
        assert_eq!(found, waits);
        // That nobody waits any more is another look.
        assert_eq!(last, 2);
    }

    /// An agent whose source is there, and what it has its source do and says to its middleware.
    struct Rig {
        agent: Agent<Model>,
        rng: Rng,
    }

    impl Rig {
        fn start() -> Self {
            let second = Duration::from_secs(1);
            let config = Config {
                master_timeout: second,
                quarantine: Duration::ZERO,
                limits: Limits::SERVER,
                mutations: Mutations::default(),
            };
            let (mut rng, mut effects) = (Rng::stream(1, "test", 1), Vec::new());
            let clock = Timestamp::ZERO;
            let mut io = Io { now: Time::ZERO, clock, rng: &mut rng, effects: &mut effects };
            let agent = Agent::new(config, 1, &mut io);
            let mut rig = Self { agent, rng };
            rig.step(|agent, io| agent.on_source(FromSource::Up { start: 1 }, io));
            rig.tell(ToAgent::Attach { epoch: 1 });
            rig
        }

        fn step(
            &mut self,
            act: impl FnOnce(&mut Agent<Model>, &mut Io<'_, AgentEffect<Model>>),
        ) -> Vec<AgentEffect<Model>> {
            let (mut effects, clock) = (Vec::new(), Timestamp::ZERO);
            let rng = &mut self.rng;
            let mut io = Io { now: Time::ZERO, clock, rng, effects: &mut effects };
            act(&mut self.agent, &mut io);
            self.agent.assert_invariants();
            effects
        }

        fn tell(&mut self, msg: ToAgent<Model>) -> Vec<AgentEffect<Model>> {
            self.step(|agent, io| agent.on_message(MIDDLEWARE, msg, io))
        }

        fn hear(&mut self, said: FromSource<Model>) -> Vec<AgentEffect<Model>> {
            self.step(|agent, io| agent.on_source(said, io))
        }
    }

    fn execute(number: u64, then: Then) -> ToAgent<Model> {
        ToAgent::Execute {
            xid: xid(number),
            round: 0,
            life: 1,
            peers: Vec::new(),
            isolation: Isolation::ReadCommitted,
            statements: Vec::new(),
            writes: false,
            then,
        }
    }

    fn runs(effects: &[AgentEffect<Model>], number: u64) -> bool {
        effects.iter().any(|effect| {
            matches!(effect, AgentEffect::Source(ToSource::Run { xid: which, .. }) if *which == xid(number))
        })
    }

    /// A source with a prepared transaction that is decided, and statements of the same session that came before the
    /// decision or after it.
    fn waiting() -> Rig {
        let mut rig = Rig::start();
        rig.tell(execute(1, Then::Prepare));
        rig.hear(FromSource::Ran { xid: xid(1), answers: Vec::new() });
        rig.hear(FromSource::Prepared { xid: xid(1), floor: Timestamp::ZERO });
        let order = Box::new(execute(2, Then::Commit));
        let after = ToAgent::After { earlier: vec![xid(1)], order };
        assert!(!runs(&rig.tell(after.clone()), 2));
        assert!(!runs(&rig.tell(after), 2), "sent twice");
        rig
    }

    #[test]
    fn statements_run_when_their_source_has_committed_what_their_session_had() {
        let mut rig = waiting();
        let (at, one_phase) = (Timestamp::ZERO, false);
        assert!(!runs(&rig.tell(ToAgent::Commit { xid: xid(1), at, one_phase }), 2));
        assert!(runs(&rig.hear(FromSource::Committed { xid: xid(1), at }), 2));
        // What has been committed already is not waited for; nor is what its middleware has forgotten.
        let after = |number| ToAgent::After {
            earlier: vec![xid(1)],
            order: Box::new(execute(number, Then::Wait)),
        };
        assert!(runs(&rig.tell(after(3)), 3));
        rig.tell(ToAgent::Ping { epoch: 1, sent: Time::ZERO, oldest: 3 });
        assert!(runs(&rig.tell(after(4)), 4));
        // What a transaction of another life of this agent has become is found out first.
        let order = Box::new(execute(6, Then::Wait));
        let unknown = ToAgent::After { earlier: vec![xid(5)], order };
        assert!(!runs(&rig.tell(unknown), 6));
        rig.tell(ToAgent::Commit { xid: xid(5), at, one_phase });
        assert!(runs(&rig.hear(FromSource::Gone { xid: xid(5) }), 6));
    }

    #[test]
    fn statements_that_wait_for_a_commit_can_be_ended() {
        let is_failed = |effects: &[AgentEffect<Model>]| {
            effects.iter().any(|effect| {
                matches!(effect, AgentEffect::Send { msg: FromAgent::Failed { xid: which, .. }, .. } if *which == xid(2))
            })
        };
        let mut rig = waiting();
        assert!(is_failed(&rig.tell(ToAgent::Interrupt { xid: xid(2) })));
        let mut rig = waiting();
        assert!(is_failed(&rig.hear(FromSource::Down)));
        let mut rig = waiting();
        rig.tell(ToAgent::Rollback { xid: xid(2) });
        let (at, one_phase) = (Timestamp::ZERO, false);
        rig.tell(ToAgent::Commit { xid: xid(1), at, one_phase });
        assert!(!runs(&rig.hear(FromSource::Committed { xid: xid(1), at }), 2));
    }

    #[test]
    fn many_prepared_branches_are_reported_in_several_messages() {
        let prepared: Vec<Xid> = (0..5_000).map(xid).collect();
        let said = [FromSource::Listed { prepared: prepared.clone() }];
        let mut found = Vec::new();
        for msg in sent(true, &said) {
            let FromAgent::Scanned { prepared, .. } = msg else { panic!("{msg:?}") };
            found.extend(prepared);
        }
        assert_eq!(found, prepared);
    }
}
