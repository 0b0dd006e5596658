//! The geo-agent (GeoTP §III-B, §IV-A): it runs beside one data source, or inside a middleware if
//! none can be installed there, and serves every middleware of that source.
//!
//! After the last statement of a branch, it prepares the branch without a request. When a branch
//! fails, it informs the agents of the other branches. It ensures that no branch prepares which was
//! ended, or whose middleware is gone.

mod answers;
mod requests;

use std::fmt;

use orthodrome_core::id::NodeId;
use orthodrome_core::limits::Limits;
use orthodrome_core::machine::Leak;
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::time::{Duration, Time, Timestamp};

use crate::contract::{
    AgentEffect, AgentTimer, Failure, Fence, FromAgent, Io, Note, PeerRollback, Reason, Then,
    ToAgent, ToSource, Work, Xid,
};

/// Settings.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// Unprepared branches of a middleware that has been silent for this long are rolled back.
    pub master_timeout: Duration,
    /// No new statement runs for this long after the source or the agent has started. The same at
    /// every agent, and in every middleware's settings.
    pub quarantine: Duration,
    /// The limits of records and messages: a message about several transactions ends at a part of
    /// them.
    pub limits: Limits,
    /// Mutations, for tests.
    pub mutations: Mutations,
}

/// Mutations: unsafe variants that the tests must catch. None is enabled in real use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Mutations {
    /// G5: no tombstone is left for a branch that is ended before its statements arrive.
    pub no_tombstones: bool,
    /// G4: a prepared branch that does not exist any more, because it only read, is treated as one
    /// that could not be committed.
    pub waits_for_vanished: bool,
    /// G6: when a middleware has restarted, its earlier branches keep running.
    pub ignores_epochs: bool,
    /// A branch is reported as prepared as soon as its statements have been executed.
    pub votes_early: bool,
}

/// A middleware, as the agent sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Master {
    epoch: u64,
    heard: Time,
    /// All transactions of this incarnation with a smaller number have ended.
    oldest: u64,
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum State<W: Work> {
    Running(Then),
    Idle,
    Preparing,
    Prepared,
    /// It commits in one phase.
    Committing,
    CommittingPrepared,
    /// With the failure to report to the middleware, if the middleware did not request the
    /// rollback.
    RollingBack(Option<Failure<W>>),
}

#[derive(Clone, Debug)]
struct Branch<W: Work> {
    state: State<W>,
    peers: Vec<NodeId>,
    /// The number of rounds that have begun here.
    rounds: u32,
    /// When the current round began.
    since: Time,
    fence: Fence,
    wrote: bool,
    floor: Timestamp,
    /// The answer to the last round, in case it is requested again.
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
    /// No new statement runs before this time.
    open_at: Time,
    masters: OrdMap<NodeId, Master>,
    branches: OrdMap<Xid, Branch<W>>,
    /// Ended branches, until their middleware says that no message will name them any more (G5,
    /// R6).
    ended: OrdMap<Xid, End>,
    /// For committed transactions with one branch, the answer, in case it was lost.
    answers: OrdMap<Xid, FromAgent<W>>,
    /// Statements that arrived before they may run.
    held: Vec<(NodeId, ToAgent<W>)>,
    /// The middlewares that asked for prepared branches.
    scanners: OrdMap<NodeId, u64>,
    /// The middlewares that were last informed about waits here.
    watchers: OrdSet<NodeId>,
    /// The number of reports about waits so far.
    looks: u64,
}

/// The approximate size of one branch name in a message, in bytes.
const XID_BYTES: usize = 24;

type Out<'a, 'b, W> = &'a mut Io<'b, AgentEffect<W>>;

impl<W: Work> Agent<W> {
    /// Starts the agent. `life` is the number of its incarnation, which no earlier incarnation had.
    #[must_use]
    pub fn new(config: Config, life: u64, io: Out<'_, '_, W>) -> Self {
        io.push(AgentEffect::SetTimer(AgentTimer::Sweep, io.now + config.master_timeout / 2));
        Self {
            fence: Fence { agent: life.max(1), source: 0 },
            is_up: false,
            open_at: io.now,
            masters: OrdMap::new(),
            branches: OrdMap::new(),
            ended: OrdMap::new(),
            answers: OrdMap::new(),
            held: Vec::new(),
            scanners: OrdMap::new(),
            watchers: OrdSet::new(),
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

    fn say_prepared(&self, xid: Xid, io: Out<'_, '_, W>) {
        let Some(branch) = self.branches.get(&xid) else { return };
        let (fence, wrote, floor) = (branch.fence, branch.wrote, branch.floor);
        let vote = FromAgent::Prepared { xid, fence, wrote, floor };
        io.push(AgentEffect::Send { to: xid.middleware, msg: vote });
    }

    /// The branch fails before the middleware requests its end: the peers are informed, then it is
    /// rolled back.
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
        let silent: OrdSet<NodeId> = self
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

    /// State that must disappear when every transaction has ended.
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

/// The transaction to which a message's statements belong.
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
    use crate::contract::{FromSource, Isolation, Wait};
    use crate::simulated::Msg;
    use crate::source::Model;

    const MIDDLEWARE: NodeId = NodeId(1);

    fn xid(number: u64) -> Xid {
        Xid { middleware: MIDDLEWARE, epoch: 1, number }
    }

    /// The messages that an agent with small messages sends when its source reports these events.
    fn sent(scans: bool, said: &[FromSource<Model>]) -> Vec<FromAgent<Model>> {
        let limits = Limits { record_bytes: 40 << 10, message_bytes: 40 << 10, ..Limits::SERVER };
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
            let FromAgent::Waits { look, waits, more } = msg else { panic!("{msg:?}") };
            found.extend(waits);
            last = look;
            assert_eq!(more, look == 1 && found.len() < 4_950, "{} of 4950", found.len());
        }
        assert_eq!(found, waits);
        // A report that nobody waits any more counts as another look.
        assert_eq!(last, 2);
    }

    /// An agent whose source is up, with its commands to the source and its messages to the
    /// middleware.
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
            marks: Vec::new(),
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

    /// A source with a prepared transaction that is decided, and with statements of the same
    /// session that arrived before the decision or after it.
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
        // Transactions that have already committed are not waited for, nor are those that their
        // middleware has forgotten.
        let after = |number| ToAgent::After {
            earlier: vec![xid(1)],
            order: Box::new(execute(number, Then::Wait)),
        };
        assert!(runs(&rig.tell(after(3)), 3));
        rig.tell(ToAgent::Ping { epoch: 1, sent: Time::ZERO, oldest: 3 });
        assert!(runs(&rig.tell(after(4)), 4));
        // The outcome of a transaction from another incarnation of this agent is found out first.
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

    /// Statements that arrived before their middleware's new epoch were refused, and so it forgot
    /// the branch. They were sent again at the same moment, and opened the branch that nobody ended
    /// (seed 1000000801).
    #[test]
    fn a_branch_that_its_middleware_has_forgotten_is_rolled_back() {
        let rolls_back = |effects: &[AgentEffect<Model>]| {
            effects.iter().any(|effect| {
                matches!(effect, AgentEffect::Source(ToSource::Rollback { xid: which }) if *which == xid(1))
            })
        };
        let ping = |oldest| ToAgent::Ping { epoch: 1, sent: Time::ZERO, oldest };
        let mut rig = Rig::start();
        assert!(runs(&rig.tell(execute(1, Then::Wait)), 1));
        assert!(!rolls_back(&rig.tell(ping(1))));
        assert!(rolls_back(&rig.tell(ping(2))));
        // What is prepared may be committed, and what commits at once may have committed.
        let mut rig = Rig::start();
        rig.tell(execute(1, Then::Prepare));
        rig.hear(FromSource::Ran { xid: xid(1), answers: Vec::new() });
        rig.hear(FromSource::Prepared { xid: xid(1), floor: Timestamp::ZERO });
        assert!(!rolls_back(&rig.tell(ping(2))));
        let mut rig = Rig::start();
        rig.tell(execute(1, Then::Commit));
        assert!(!rolls_back(&rig.tell(ping(2))));
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
