//! The middleware (DM of GeoTP §III-A) coordinates global transactions over the agents of their
//! sources.
//!
//! It is a plain state machine. Its host calls [`Middleware::begin`], [`Middleware::round`],
//! [`Middleware::commit`] and [`Middleware::rollback`] for a session, passes it messages, timers
//! and durable tickets, and carries out the effects in order. A session has one pending call at a
//! time.
//!
//! Guarantee: [`Effect::Finished`] reports a commit only after the decision is durable and every
//! branch can only commit, or after the only branch has committed at its source. A transaction that
//! it reports as aborted has no commit record and never will, and without one, recovery rolls it
//! back.

mod abort;
mod commit;
mod execute;
mod savepoints;
mod sources;
mod waits;

use std::fmt;

use orthodrome_core::id::{ClientId, NodeId, Ticket, TxnId};
use orthodrome_core::machine::Leak;
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::time::{Duration, Time, Timestamp};
use orthodrome_core::txn::Key;

use self::waits::Seen;
use crate::contract::{
    Effect, Failure, Fence, FromAgent, Io, Isolation, Kind, Last, Note, Part, Reason, Record,
    SessionId, Then, Timer, ToAgent, Work, Xid,
};
use crate::hotspot::{HotRecord, Hotspots, SourceKey};
use crate::schedule::{Average, postpone};

/// The optimizations of the paper. Each can be switched while transactions run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Optimizations {
    /// O1: agents prepare after the last statement without a request, and report failures to each
    /// other.
    pub decentralized_prepare: bool,
    /// O2: statements of nearer sources start later.
    pub latency_aware: bool,
    /// O3: forecasts of the time that hot records cost; transactions that would probably fail are
    /// delayed or refused.
    pub high_contention: bool,
}

/// How transactions of several sources commit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Commit {
    /// Two-phase commit with a durable decision.
    TwoPhase,
    /// Each branch commits by itself, in parallel: not atomic if one fails. A baseline that shows
    /// the cost of atomicity.
    Local,
}

/// Settings.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// All sources and their kinds.
    pub sources: OrdMap<NodeId, Kind>,
    /// The optimizations at the start.
    pub optimizations: Optimizations,
    /// How transactions of several sources commit.
    pub commit: Commit,
    /// Statements of sources with a shorter round trip than this start after those of all other
    /// sources have been executed (Chiller).
    pub inner_below: Option<Duration>,
    /// If a transaction of one source has its `COMMIT` in the query batch, the source gets it in
    /// the same batch.
    pub commit_in_text: bool,
    /// True if the session is answered when the decision is durable; otherwise when every branch
    /// has committed, as in ShardingSphere.
    pub answers_at_decision: bool,
    /// The interval of pings to each agent, which measure its round trip and show that this
    /// middleware is alive.
    pub ping_interval: Duration,
    /// The weight of one measurement in the average, in per cent.
    pub rtt_weight_percent: u64,
    /// The number of records whose contention is tracked.
    pub hot_records: usize,
    /// α of Eq. 4, in per cent.
    pub hot_keep_percent: u64,
    /// The factor by which forecasts are scaled down, in per cent (GeoTP §IV-C).
    pub forecast_percent: u32,
    /// The maximum forecast. If statements were postponed for longer than other transactions can
    /// wait, those would fail.
    pub forecast_max: Duration,
    /// The time after which a delayed transaction is examined again.
    pub admission_wait: Duration,
    /// The number of delays after which a transaction is refused.
    pub admission_tries: u32,
    /// The time after which an unanswered message is sent again.
    pub resend_after: Duration,
    /// The time after which a transaction without answers or votes is aborted, if a source has been
    /// silent for as long. It must be longer than the lock time-out of sources.
    pub give_up_after: Duration,
    /// The interval at which agents are asked for prepared branches that have not been ended.
    pub scan_interval: Duration,
    /// True if deadlocks across sources are detected; otherwise the lock time-out of the sources
    /// ends them.
    pub finds_deadlocks: bool,
    /// The time for which an agent runs no statements after a start of its source or of itself. A
    /// fence that was confirmed less than this ago is therefore still valid. It must be equal at
    /// all agents.
    pub quarantine: Duration,
    /// The number of records after which the decision log is replaced by a checkpoint.
    pub checkpoint_records: u32,
    /// Mutations, for tests.
    pub mutations: Mutations,
}

/// Mutations: unsafe variants that tests enable to show that they are caught. All are off in real
/// use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Mutations {
    /// G3: restarts between a branch's first statement and the last vote are not noticed.
    pub no_fence: bool,
    /// The session is answered before the decision is durable.
    pub tells_early: bool,
    /// After a restart, decisions are ignored: prepared branches are rolled back.
    pub forgets_decisions: bool,
    /// A branch without a vote counts as prepared.
    pub skips_vote: bool,
    /// A branch that commits without further statements does not roll back to its savepoint first.
    pub forgets_savepoints: bool,
}

/// The middleware's knowledge of a source.
#[derive(Clone, Debug, Default)]
struct Source {
    rtt: Average,
    /// The last reported incarnations of its agent and of the source.
    fence: Option<Fence>,
    /// The time at which the newest ping that its agent has answered was sent.
    confirmed: Time,
    /// The time of the last ping that a transaction waits for, besides those at intervals.
    asked: Time,
    /// The time at which a part of a long message of its agent last arrived.
    arriving: Option<Time>,
    /// True if the agent knows this incarnation of the middleware.
    is_attached: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// The statements are postponed.
    Waiting,
    /// The statements are pending.
    Running(Then),
    /// No request is pending.
    Idle,
    /// The vote is pending.
    Preparing,
    /// The branch is prepared: it can only commit, or be rolled back.
    Prepared,
}

#[derive(Clone, Debug)]
struct Branch<W: Work> {
    stage: Stage,
    /// The message that was sent and not answered.
    outbox: Option<ToAgent<W>>,
    /// Number of rounds so far at this source.
    rounds: u32,
    /// The incarnations of source and agent in which the branch began.
    fence: Option<Fence>,
    /// True if the branch has statements that write.
    writes: bool,
    /// True if the branch has changed data, according to its vote.
    wrote: bool,
    floor: Timestamp,
    /// The records that the branch is counted at, and those of the current round.
    places: Vec<SourceKey>,
    recent: Vec<SourceKey>,
    /// True if a message about the branch has been sent to the source.
    is_sent: bool,
    /// The branch's own savepoints, in the order in which they were set.
    marks: Vec<u32>,
    /// The savepoint to which the branch must roll back before anything else.
    back: Option<u32>,
}

impl<W: Work> Branch<W> {
    fn new() -> Self {
        Self {
            stage: Stage::Waiting,
            outbox: None,
            rounds: 0,
            fence: None,
            writes: false,
            wrote: false,
            floor: Timestamp::ZERO,
            places: Vec::new(),
            recent: Vec::new(),
            is_sent: false,
            marks: Vec::new(),
            back: None,
        }
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum Phase<W: Work> {
    /// Waiting for the session.
    Idle,
    /// Delayed by O3.
    HeldBack { parts: OrdMap<NodeId, Part<W>>, last: Last },
    /// A round is pending.
    Executing,
    /// The session has asked to commit; votes are missing.
    Voting,
    /// The only branch is committing, or with `Commit::Local` all branches are.
    Committing,
    /// The decision is being written to disk.
    Logging(Ticket, Timestamp),
}

#[derive(Clone, Debug)]
struct Open<W: Work> {
    label: Option<TxnId>,
    session: Option<SessionId>,
    isolation: Isolation,
    branches: OrdMap<NodeId, Branch<W>>,
    phase: Phase<W>,
    /// The `Last` of the current round.
    last: Last,
    answers: OrdMap<NodeId, Vec<W::Answer>>,
    /// Sources of the current round that have not answered.
    unanswered: OrdSet<NodeId>,
    /// Parts that start when all others have been answered (Chiller).
    inner: OrdMap<NodeId, Part<W>>,
    /// Number of delays so far.
    tries: u32,
    /// The time since which it has been waiting.
    since: Time,
    /// True if agents prepare without a request.
    is_decentralized: bool,
    /// Savepoints of the session, oldest first.
    savepoints: Vec<u32>,
    /// The first statement of the current round that failed, while other answers are missing.
    failed: Option<(NodeId, u32, Failure<W>)>,
}

/// A decision to commit that some branch has not acknowledged.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Decided<W: Work> {
    label: Option<TxnId>,
    session: Option<SessionId>,
    at: Timestamp,
    branches: OrdMap<NodeId, bool>,
    unacknowledged: OrdSet<NodeId>,
    /// The answer to the session, sent when every branch has committed.
    news: Option<Effect<W>>,
}

/// The state of a transaction that a client asks about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Known {
    /// It is open here.
    Open(Xid),
    /// It has aborted. Its session is answered when the branch that failed first has reported the
    /// cause.
    Untold(Xid),
    /// It committed.
    Committed(Timestamp),
    /// It is unknown: it is not open, and no decision to commit it was ever logged here.
    Nothing,
}

/// A transaction in doubt, for operators.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct InDoubt {
    /// Its id.
    pub xid: Xid,
    /// True if it will commit; otherwise it will be rolled back.
    pub commits: bool,
    /// Sources that have not acknowledged.
    pub sources: Vec<NodeId>,
}

/// The schedule of a round, for `EXPLAIN` and for operators.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Planned {
    /// The source.
    pub source: NodeId,
    /// Its average round trip.
    pub rtt: Option<Duration>,
    /// The forecast of the execution time at the source.
    pub forecast: Duration,
    /// The time for which its statements would be postponed.
    pub postponed: Duration,
}

/// The middleware.
#[derive(Debug)]
pub struct Middleware<W: Work> {
    node: NodeId,
    config: Config,
    optimizations: Optimizations,
    epoch: u64,
    /// The ticket of this incarnation's record, until it is durable. No message is sent before
    /// that.
    starting: Option<Ticket>,
    held: Vec<(NodeId, ToAgent<W>)>,
    number: u64,
    ticket: Ticket,
    sources: OrdMap<NodeId, Source>,
    open: OrdMap<Xid, Open<W>>,
    decided: OrdMap<Xid, Decided<W>>,
    /// The transactions of `decided` whose session may still be open.
    of_sessions: OrdMap<SessionId, OrdSet<Xid>>,
    /// Sources that have not reported the rollback.
    aborting: OrdMap<Xid, OrdSet<NodeId>>,
    /// Answers to sessions of transactions in `aborting`. Each waits until the branch that failed
    /// first reports the cause, every branch has rolled back, or the resend timer expires.
    untold: OrdMap<Xid, Effect<W>>,
    /// Committed transactions, by the client's id of each.
    labels: OrdMap<TxnId, Timestamp>,
    by_label: OrdMap<TxnId, Xid>,
    hot: Hotspots,
    /// The waits between transactions at each source, as its agent last reported them.
    waits: OrdMap<NodeId, Seen>,
    /// The last commit timestamp.
    last_at: Timestamp,
    /// Number of records since the last checkpoint, and whether a checkpoint is being written.
    records: u32,
    checkpoint: Option<Ticket>,
}

type Out<'a, 'b, W> = &'a mut Io<'b, Effect<W>>;

impl<W: Work> Middleware<W> {
    /// Starts or restarts with every durable record, in order.
    #[must_use]
    pub fn new(node: NodeId, config: Config, recovered: Vec<Record>, io: Out<'_, '_, W>) -> Self {
        let mut epoch = 0;
        let mut decided: OrdMap<Xid, Decided<W>> = OrdMap::new();
        let mut labels = OrdMap::new();
        for record in recovered {
            match record {
                Record::Epoch(begun) => epoch = begun.max(epoch),
                Record::Commit { xid, label, at, branches } => {
                    labels.extend(label.map(|label| (label, at)));
                    let unacknowledged = branches.keys().copied().collect();
                    decided.insert(
                        xid,
                        Decided { label, session: None, at, branches, unacknowledged, news: None },
                    );
                }
                Record::Ended(xid) => drop(decided.remove(&xid)),
            }
        }
        if config.mutations.forgets_decisions {
            decided.clear();
        }
        let sources = config.sources.keys().map(|&source| (source, Source::default())).collect();
        let last_at = decided.values().map(|decided| decided.at).max().unwrap_or_default();
        let mut middleware = Self {
            node,
            optimizations: config.optimizations,
            hot: Hotspots::new(config.hot_records, config.hot_keep_percent),
            epoch: epoch + 1,
            starting: None,
            held: Vec::new(),
            number: 0,
            ticket: Ticket(0),
            sources,
            open: OrdMap::new(),
            decided,
            of_sessions: OrdMap::new(),
            aborting: OrdMap::new(),
            untold: OrdMap::new(),
            labels,
            by_label: OrdMap::new(),
            waits: OrdMap::new(),
            last_at,
            records: 0,
            checkpoint: None,
            config,
        };
        let ticket = middleware.persist(Record::Epoch(middleware.epoch), io);
        middleware.starting = Some(ticket);
        for source in middleware.config.sources.keys().copied().collect::<Vec<_>>() {
            middleware.send(source, ToAgent::Attach { epoch: middleware.epoch }, io);
        }
        for xid in middleware.decided.keys().copied().collect::<Vec<_>>() {
            middleware.send_commit(xid, io);
            let again = io.now + middleware.config.resend_after;
            io.push(Effect::SetTimer(Timer::Resend(xid), again));
        }
        middleware.on_ping_timeout(io);
        middleware.on_scan_timeout(io);
        middleware
    }

    /// The middleware's incarnation.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Switches optimizations, for new transactions and for later rounds of open ones.
    pub fn optimize(&mut self, optimizations: Optimizations) {
        self.optimizations = optimizations;
    }

    /// The enabled optimizations.
    #[must_use]
    pub fn optimizations(&self) -> Optimizations {
        self.optimizations
    }

    /// Records that transactions access, the hottest first.
    #[must_use]
    pub fn hottest(&self, count: usize) -> Vec<(SourceKey, HotRecord)> {
        self.hot.hottest(count)
    }

    /// Transactions that are decided or ended here but not yet at all sources.
    #[must_use]
    pub fn in_doubt(&self) -> Vec<InDoubt> {
        let commits = self.decided.iter().map(|(&xid, decided)| InDoubt {
            xid,
            commits: true,
            sources: decided.unacknowledged.iter().copied().collect(),
        });
        let aborts = self.aborting.iter().map(|(&xid, sources)| InDoubt {
            xid,
            commits: false,
            sources: sources.iter().copied().collect(),
        });
        commits.chain(aborts).collect()
    }

    /// The schedule that a round on these records would get now.
    #[must_use]
    pub fn plan(&self, parts: &OrdMap<NodeId, Vec<Key>>) -> Vec<Planned> {
        let expected = |(&source, records): (&NodeId, &Vec<Key>)| {
            let places: Vec<SourceKey> = records.iter().map(|key| (source, key.clone())).collect();
            (source, self.latency(source, &places))
        };
        let delays = postpone(&parts.iter().map(expected).collect());
        let planned = |(&source, records): (&NodeId, &Vec<Key>)| {
            let places: Vec<SourceKey> = records.iter().map(|key| (source, key.clone())).collect();
            let rtt = self.sources.get(&source).and_then(|source| source.rtt.get());
            let postponed =
                delays.get(&source).copied().filter(|_| self.optimizations.latency_aware);
            let forecast = self.hot.forecast(places.iter());
            Planned { source, rtt, forecast, postponed: postponed.unwrap_or_default() }
        };
        parts.iter().map(planned).collect()
    }

    /// The state of the transaction with the client's id `label`.
    #[must_use]
    pub fn known(&self, label: TxnId) -> Known {
        match (self.by_label.get(&label), self.labels.get(&label)) {
            (Some(&xid), _) => Known::Open(xid),
            (None, Some(&at)) => Known::Committed(at),
            (None, None) => self.untold(label).map_or(Known::Nothing, Known::Untold),
        }
    }

    fn untold(&self, wanted: TxnId) -> Option<Xid> {
        let is_wanted = |news: &Effect<W>| matches!(news, Effect::Finished { label, .. } if *label == Some(wanted));
        self.untold.iter().find(|(_, news)| is_wanted(news)).map(|(&xid, _)| xid)
    }

    /// Forgets transactions: this client will never ask about those with a smaller count.
    pub fn forget(&mut self, client: ClientId, below: u64) {
        let (from, to) = (TxnId::new(client, 0), TxnId::new(client, below));
        let old: Vec<TxnId> = self.labels.range(from..to).map(|(&label, _)| label).collect();
        for label in old {
            self.labels.remove(&label);
        }
    }

    /// Begins a transaction. No message is sent before its first round.
    pub fn begin(&mut self, label: Option<TxnId>, isolation: Isolation, io: Out<'_, '_, W>) -> Xid {
        self.number += 1;
        let xid = Xid { middleware: self.node, epoch: self.epoch, number: self.number };
        self.by_label.extend(label.map(|label| (label, xid)));
        let open = Open {
            label,
            session: None,
            isolation,
            branches: OrdMap::new(),
            phase: Phase::Idle,
            last: Last::No,
            answers: OrdMap::new(),
            unanswered: OrdSet::new(),
            inner: OrdMap::new(),
            tries: 0,
            since: io.now,
            is_decentralized: false,
            savepoints: Vec::new(),
            failed: None,
        };
        self.open.insert(xid, open);
        xid
    }

    /// Makes a new transaction see what earlier transactions of `session` have committed: its first
    /// statements at a source wait there until the source has committed those.
    pub fn follow(&mut self, xid: Xid, session: SessionId) {
        if let Some(open) = self.open.get_mut(&xid) {
            open.session = Some(session);
        }
    }

    /// A part of a long message of a source's agent has arrived. Its answers to pings wait behind
    /// that message, so until the message is here, the agent counts as alive and is not asked again.
    pub fn on_arriving(&mut self, from: NodeId, now: Time) {
        if let Some(source) = self.sources.get_mut(&from) {
            source.arriving = Some(now);
        }
    }

    /// Handles a message of a source's agent.
    pub fn on_message(&mut self, from: NodeId, msg: FromAgent<W>, io: Out<'_, '_, W>) {
        match msg {
            FromAgent::Attached { epoch, fence } => self.on_attached(from, epoch, fence, io),
            FromAgent::Pong { sent, fence, is_attached } => {
                self.on_pong(from, sent, fence, is_attached, io)
            }
            FromAgent::Answered { xid, round, answers, fence, took } => {
                self.on_answered(from, xid, round, answers, fence, took, io);
            }
            FromAgent::StatementFailed { xid, round, statement, failure } => {
                self.on_statement_failed(from, xid, round, statement, failure, io);
            }
            FromAgent::Failed { xid, failure } => self.on_failed(from, xid, failure, io),
            FromAgent::Prepared { xid, fence, wrote, floor } => {
                self.on_prepared(from, xid, fence, wrote, floor, io)
            }
            FromAgent::Committed { xid, at } => self.on_committed(from, xid, at, io),
            FromAgent::Lost { xid } => self.on_lost(xid, io),
            FromAgent::RolledBack { xid } => self.on_rolled_back(from, xid, io),
            FromAgent::Scanned { epoch, prepared } => self.on_scanned(from, epoch, prepared, io),
            FromAgent::Waits { look, waits, more } => self.on_waits(from, look, (waits, more), io),
        }
    }

    fn branch(&mut self, xid: Xid, source: NodeId) -> Option<&mut Branch<W>> {
        self.open.get_mut(&xid)?.branches.get_mut(&source)
    }

    /// Handles a timer that expired.
    pub fn on_timer(&mut self, timer: Timer, io: Out<'_, '_, W>) {
        match timer {
            Timer::Ping => self.on_ping_timeout(io),
            Timer::Scan => self.on_scan_timeout(io),
            Timer::Start(xid, source) => self.on_start_timeout(xid, source, io),
            Timer::Admit(xid) => self.on_admit_timeout(xid, io),
            Timer::Resend(xid) => self.on_resend_timeout(xid, io),
        }
    }

    /// No answer came for a while: messages may be lost, or their receivers down.
    fn on_resend_timeout(&mut self, xid: Xid, io: Out<'_, '_, W>) {
        io.push(Effect::SetTimer(Timer::Resend(xid), io.now + self.config.resend_after));
        if self.decided.contains_key(&xid) {
            io.push(Effect::Note(Note::Resent));
            self.send_commit(xid, io);
            return;
        }
        if let Some(sources) = self.aborting.get(&xid).cloned() {
            io.push(Effect::Note(Note::Resent));
            for source in sources {
                self.send(source, ToAgent::Rollback { xid }, io);
            }
            // The branch that failed first may be lost.
            self.tell(xid, io);
            return;
        }
        let Some(open) = self.open.get(&xid) else {
            io.push(Effect::CancelTimer(Timer::Resend(xid)));
            return;
        };
        let is_overdue = io.now.since(open.since) > self.config.give_up_after
            && open
                .branches
                .iter()
                .any(|(&source, branch)| branch.outbox.is_some() && self.is_silent(source, io.now));
        let is_committing =
            open.branches.values().any(|branch| branch.is_committing() && branch.is_sent);
        match open.phase {
            Phase::Idle | Phase::Logging(..) | Phase::HeldBack { .. } => {}
            Phase::Committing | Phase::Executing if is_overdue && is_committing => {
                self.on_lost(xid, io)
            }
            Phase::Executing | Phase::Voting | Phase::Committing if is_overdue => {
                self.abort(xid, None, Reason::Timeout.into(), io);
            }
            Phase::Executing | Phase::Voting | Phase::Committing => {
                let is_due =
                    |branch: &Branch<W>| branch.outbox.is_some() && branch.stage != Stage::Waiting;
                let silent: Vec<NodeId> = open
                    .branches
                    .iter()
                    .filter(|&(&at, branch)| is_due(branch) && !self.is_arriving(at, io.now))
                    .map(|(&at, _)| at)
                    .collect();
                for source in silent {
                    io.push(Effect::Note(Note::Resent));
                    self.transmit(xid, source, io);
                }
                self.count_votes(xid, io);
            }
        }
    }

    /// True if no message of a source has arrived for longer than the lock time-out of sources. A
    /// source that answers pings may be executing a long statement: then it is asked again and
    /// answers.
    fn is_silent(&self, source: NodeId, now: Time) -> bool {
        let heard = self
            .sources
            .get(&source)
            .map(|known| known.confirmed.max(known.arriving.unwrap_or_default()));
        heard.is_none_or(|heard| now.since(heard) > self.config.give_up_after)
    }

    /// True if a long message of a source is arriving. It may be the answer that is missing.
    fn is_arriving(&self, source: NodeId, now: Time) -> bool {
        let arriving = self.sources.get(&source).and_then(|known| known.arriving);
        arriving.is_some_and(|at| now.since(at) < self.config.resend_after)
    }

    fn persist(&mut self, record: Record, io: Out<'_, '_, W>) -> Ticket {
        self.ticket.0 += 1;
        self.records += 1;
        io.push(Effect::Persist { ticket: self.ticket, record });
        self.ticket
    }

    fn checkpoint_if_due(&mut self, io: Out<'_, '_, W>) {
        if self.records < self.config.checkpoint_records || self.checkpoint.is_some() {
            return;
        }
        let mut records = vec![Record::Epoch(self.epoch)];
        for (&label, &at) in &self.labels {
            // It has ended, but its client may still ask. The id is of an earlier incarnation, and
            // no branch can have it.
            let xid = Xid { middleware: self.node, epoch: 0, number: records.len() as u64 };
            records.push(Record::Commit { xid, label: Some(label), at, branches: OrdMap::new() });
            records.push(Record::Ended(xid));
        }
        for (&xid, decided) in &self.decided {
            let Decided { label, at, branches, .. } = decided.clone();
            records.push(Record::Commit { xid, label, at, branches });
        }
        for (&xid, open) in &self.open {
            if let Phase::Logging(_, at) = open.phase {
                let branches =
                    open.branches.iter().map(|(&at, branch)| (at, branch.wrote)).collect();
                records.push(Record::Commit { xid, label: open.label, at, branches });
            }
        }
        self.ticket.0 += 1;
        self.records = 0;
        self.checkpoint = Some(self.ticket);
        io.push(Effect::Note(Note::Checkpoint));
        io.push(Effect::Checkpoint { ticket: self.ticket, records });
    }

    fn send(&mut self, to: NodeId, msg: ToAgent<W>, io: Out<'_, '_, W>) {
        if self.starting.is_some() {
            self.held.push((to, msg));
        } else {
            io.push(Effect::Send { to, msg });
        }
    }

    /// State that must be empty when every transaction has ended.
    #[must_use]
    pub fn leaks(&self) -> Vec<Leak> {
        vec![
            ("open", self.open.len()),
            ("decided and not committed everywhere", self.decided.len()),
            ("aborted and not rolled back everywhere", self.aborting.len()),
            ("aborted and not told", self.untold.len()),
            ("on hot records", usize::try_from(self.hot.active()).unwrap_or(usize::MAX)),
        ]
    }

    /// Panics if the state is inconsistent.
    ///
    /// # Panics
    /// If a transaction is in two states, or a round waits for a source without a branch.
    pub fn assert_invariants(&self) {
        for (xid, open) in &self.open {
            assert!(!self.decided.contains_key(xid), "{xid} is open and decided");
            assert!(!self.aborting.contains_key(xid), "{xid} is open and aborted");
            assert!(
                xid.epoch == self.epoch && xid.number <= self.number,
                "{xid} is of another life"
            );
            assert!(open.savepoints.is_sorted(), "{xid} has savepoints {:?}", open.savepoints);
            for source in &open.unanswered {
                let is_known =
                    open.branches.contains_key(source) || open.inner.contains_key(source);
                assert!(
                    is_known || matches!(open.phase, Phase::HeldBack { .. }),
                    "{xid} waits for {source}, which it has nothing at"
                );
            }
            if let Phase::Logging(..) = open.phase {
                let all = open.branches.values().all(|branch| branch.stage == Stage::Prepared);
                assert!(
                    all || self.config.mutations.skips_vote,
                    "{xid} is decided without every vote"
                );
            }
        }
        for (xid, decided) in &self.decided {
            assert!(!decided.unacknowledged.is_empty(), "{xid} is kept for nobody");
            assert!(!self.aborting.contains_key(xid), "{xid} is decided and aborted");
        }
        for (session, committed) in &self.of_sessions {
            assert!(!committed.is_empty(), "{session:?} is kept for nothing");
            for xid in committed {
                assert!(
                    self.decided.contains_key(xid),
                    "{xid} committed everywhere and is waited for"
                );
            }
        }
        for xid in self.untold.keys() {
            assert!(
                self.aborting.contains_key(xid),
                "{xid} ended everywhere and its session waits"
            );
        }
        for (label, xid) in &self.by_label {
            assert!(self.open.contains_key(xid), "{label} names {xid}, which is not open");
        }
    }
}

impl<W: Work> Branch<W> {
    fn is_committing(&self) -> bool {
        self.stage == Stage::Running(Then::Commit)
    }
}

impl<W: Work> fmt::Display for Middleware<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "life {}", self.epoch)?;
        for (xid, open) in &self.open {
            let phase = match open.phase {
                Phase::Idle => "idle",
                Phase::HeldBack { .. } => "held back",
                Phase::Executing => "executing",
                Phase::Voting => "voting",
                Phase::Committing => "committing",
                Phase::Logging(..) => "logging",
            };
            write!(f, " | {xid} {phase}")?;
            for (source, branch) in &open.branches {
                let stage = match branch.stage {
                    Stage::Waiting => "postponed",
                    Stage::Running(_) => "running",
                    Stage::Idle => "idle",
                    Stage::Preparing => "preparing",
                    Stage::Prepared => "prepared",
                };
                write!(f, " {source} {stage}")?;
            }
        }
        for (xid, decided) in &self.decided {
            write!(f, " | {xid} committed, not at {:?}", decided.unacknowledged)?;
        }
        for (xid, sources) in &self.aborting {
            write!(f, " | {xid} aborted, not at {sources:?}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
