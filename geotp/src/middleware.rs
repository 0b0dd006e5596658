//! The middleware (DM of GeoTP §III-A): coordinates global transactions over the agents of their sources.
//!
//! A plain state machine. Its host calls [`Middleware::begin`], [`Middleware::round`], [`Middleware::commit`] and
//! [`Middleware::rollback`] for a session, hands it messages, timers and durable tickets, and carries out the
//! effects in order. A session has one call under way at a time.
//!
//! What it promises: [`Effect::Finished`] says committed only after the decision is durable and every branch can
//! only commit, or the only branch has committed at its source. What it says is aborted has no commit record and never
//! will, and without one recovery rolls back.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use orthodrome_core::id::{ClientId, NodeId, Ticket, TxnId};
use orthodrome_core::machine::Leak;
use orthodrome_core::time::{Duration, Time, Timestamp};
use orthodrome_core::txn::{AbortReason, Key, Outcome};

use crate::contract::{
    Effect, Failure, Fence, FromAgent, Io, Isolation, Kind, Last, Note, Part, Reason, Record, Then,
    Timer, ToAgent, Wait, Work, Xid,
};
use crate::deadlock::cycle;
use crate::hotspot::{Hotspots, Place, Spot};
use crate::schedule::{Average, postpone};

/// The optimizations of the paper; each can be switched while transactions run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Optimizations {
    /// O1: agents prepare after the last statement by themselves, and tell each other of failures.
    pub decentralized_prepare: bool,
    /// O2: statements of nearer sources start later.
    pub latency_aware: bool,
    /// O3: with forecasts of how long records take, and transactions on hot records held back.
    pub high_contention: bool,
}

/// How transactions of several sources commit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Commit {
    /// Two phases, with a durable decision.
    TwoPhase,
    /// Each branch by itself, at once: not atomic if one fails. A baseline, to show what atomicity costs.
    Local,
}

/// Settings.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// Every source, and what it is.
    pub sources: BTreeMap<NodeId, Kind>,
    /// At the start.
    pub optimizations: Optimizations,
    /// How transactions of several sources commit.
    pub commit: Commit,
    /// Statements of sources that are nearer than this start when those of all others have been executed (Chiller).
    pub inner_below: Option<Duration>,
    /// A `COMMIT` in the text of a transaction of one source goes to the source in the same text.
    pub commit_in_text: bool,
    /// The session is told when the decision is durable; otherwise when every branch has committed, as
    /// ShardingSphere does.
    pub answers_at_decision: bool,
    /// How often each agent is measured, and told that this middleware lives.
    pub ping_interval: Duration,
    /// How much one measurement counts in the average, in per cent.
    pub rtt_weight_percent: u64,
    /// How many records are watched.
    pub hot_records: usize,
    /// α of Eq. 4, in per cent.
    pub hot_keep_percent: u64,
    /// How much of a forecast is believed, in per cent (GeoTP §IV-C: scale down).
    pub forecast_percent: u32,
    /// No forecast is longer: what would be postponed for longer than others can wait would be lost to them.
    pub forecast_max: Duration,
    /// A transaction that is held back is looked at again after this.
    pub admission_wait: Duration,
    /// It is refused when it has been held back so often.
    pub admission_tries: u32,
    /// What is not answered is sent again after this.
    pub resend_after: Duration,
    /// A transaction whose statements or votes are not there after this is aborted. Longer than sources wait for locks.
    pub give_up_after: Duration,
    /// How often agents are asked for prepared branches that nobody ended.
    pub scan_interval: Duration,
    /// Deadlocks across sources are looked for; otherwise they end by the sources' lock time-out.
    pub finds_deadlocks: bool,
    /// How long an agent lets nothing run after its source, or itself, has started: what it had confirmed less than
    /// this ago still holds everywhere. The same at every agent.
    pub quarantine: Duration,
    /// The decision log is replaced by what still matters after so many records.
    pub checkpoint_records: u32,
    /// Unsafe variants, for tests.
    pub mutations: Mutations,
}

/// Unsafe variants that tests switch on to see that they are caught. All off in any real use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Mutations {
    /// G3: restarts between a branch's first statement and the last vote go unnoticed.
    pub no_fence: bool,
    /// The outcome is told before the decision is durable.
    pub tells_early: bool,
    /// After a restart decisions are not looked up: what is prepared is rolled back.
    pub forgets_decisions: bool,
    /// A branch without a vote is taken to be prepared.
    pub skips_vote: bool,
}

/// A source, as the middleware sees it.
#[derive(Clone, Debug, Default)]
struct Source {
    rtt: Average,
    /// Its agent's and its own life, as last heard.
    fence: Option<Fence>,
    /// When the ping was sent that was answered last, in that life.
    confirmed: Time,
    /// It knows this life of the middleware.
    is_attached: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// Its statements are postponed.
    Waiting,
    /// Its statements are under way.
    Running(Then),
    /// Nothing is under way.
    Idle,
    /// Its vote is.
    Preparing,
    /// It can only commit, or be rolled back.
    Prepared,
}

#[derive(Clone, Debug)]
struct Branch<W: Work> {
    stage: Stage,
    /// What was sent and not answered.
    outbox: Option<ToAgent<W>>,
    /// Rounds so far here.
    rounds: u32,
    /// The life of source and agent that it began in.
    fence: Option<Fence>,
    /// It has statements that write.
    writes: bool,
    /// It changed something, as its vote says.
    wrote: bool,
    floor: Timestamp,
    /// Records whose counts it raised, and those of the round under way.
    places: Vec<Place>,
    recent: Vec<Place>,
    /// The source has heard of it.
    is_sent: bool,
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
        }
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum Phase<W: Work> {
    /// The session's turn.
    Idle,
    /// It is held back.
    HeldBack { parts: BTreeMap<NodeId, Part<W>>, last: Last },
    /// A round is under way.
    Executing,
    /// The session wants to commit; votes are missing.
    Voting,
    /// The only branch commits; or all, each by itself.
    Committing,
    /// The decision is on its way to the disk.
    Logging(Ticket, Timestamp),
}

#[derive(Clone, Debug)]
struct Open<W: Work> {
    label: Option<TxnId>,
    isolation: Isolation,
    branches: BTreeMap<NodeId, Branch<W>>,
    phase: Phase<W>,
    /// Of the round under way.
    last: Last,
    answers: BTreeMap<NodeId, Vec<W::Answer>>,
    /// Sources of the round under way that have not answered.
    unanswered: BTreeSet<NodeId>,
    /// Parts that start when every other has been answered (Chiller).
    inner: BTreeMap<NodeId, Part<W>>,
    /// How often it was held back.
    tries: u32,
    /// Since when it waits for something.
    since: Time,
    /// Agents prepare by themselves.
    is_decentralized: bool,
}

/// A decision to commit that some branch has not acknowledged.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Decided<W: Work> {
    label: Option<TxnId>,
    at: Timestamp,
    branches: BTreeMap<NodeId, bool>,
    unacknowledged: BTreeSet<NodeId>,
    /// What the session is told when every branch has committed.
    news: Option<Effect<W>>,
}

/// Who waits for whom at one source.
#[derive(Debug, Default)]
struct Seen {
    look: u64,
    waits: BTreeSet<Wait>,
}

/// What is known of a transaction that a caller asks about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Known {
    /// It is under way here.
    Open(Xid),
    /// It has aborted. Its session is told once the branch that failed first has said why.
    Untold(Xid),
    /// It committed.
    Committed(Timestamp),
    /// It is not known here: it is not under way, and no decision to commit it was ever logged here.
    Nothing,
}

/// A transaction in doubt, for operators.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct InDoubt {
    /// Its name.
    pub xid: Xid,
    /// It will commit; otherwise it will be rolled back.
    pub commits: bool,
    /// Sources that have not acknowledged.
    pub sources: Vec<NodeId>,
}

/// How a round would start, for `EXPLAIN` and for operators.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Planned {
    /// The source.
    pub source: NodeId,
    /// Its average round trip.
    pub rtt: Option<Duration>,
    /// The forecast of its local execution.
    pub forecast: Duration,
    /// How long its statements would be postponed.
    pub postponed: Duration,
}

/// The middleware.
#[derive(Debug)]
pub struct Middleware<W: Work> {
    node: NodeId,
    config: Config,
    optimizations: Optimizations,
    epoch: u64,
    /// The record of this life, until it is durable. Nothing is sent before.
    starting: Option<Ticket>,
    held: Vec<(NodeId, ToAgent<W>)>,
    number: u64,
    ticket: Ticket,
    sources: BTreeMap<NodeId, Source>,
    open: BTreeMap<Xid, Open<W>>,
    decided: BTreeMap<Xid, Decided<W>>,
    /// Sources that have not said that they have rolled back.
    aborting: BTreeMap<Xid, BTreeSet<NodeId>>,
    /// Of those, transactions whose session has not been told, because the branch that failed first has not said why.
    untold: BTreeMap<Xid, Effect<W>>,
    /// What committed, by its caller's name for it.
    labels: BTreeMap<TxnId, Timestamp>,
    by_label: BTreeMap<TxnId, Xid>,
    hot: Hotspots,
    /// Who waits for whom at each source, as its agent said last.
    waits: BTreeMap<NodeId, Seen>,
    /// The last commit timestamp.
    last_at: Timestamp,
    /// Records since the last checkpoint, and whether one is under way.
    records: u32,
    checkpoint: Option<Ticket>,
}

type Out<'a, 'b, W> = &'a mut Io<'b, Effect<W>>;

impl<W: Work> Middleware<W> {
    /// Starts, or starts again, with every durable record in order.
    #[must_use]
    pub fn new(node: NodeId, config: Config, recovered: Vec<Record>, io: Out<'_, '_, W>) -> Self {
        let mut epoch = 0;
        let mut decided: BTreeMap<Xid, Decided<W>> = BTreeMap::new();
        let mut labels = BTreeMap::new();
        for record in recovered {
            match record {
                Record::Epoch(begun) => epoch = begun.max(epoch),
                Record::Commit { xid, label, at, branches } => {
                    labels.extend(label.map(|label| (label, at)));
                    let unacknowledged = branches.keys().copied().collect();
                    decided
                        .insert(xid, Decided { label, at, branches, unacknowledged, news: None });
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
            open: BTreeMap::new(),
            decided,
            aborting: BTreeMap::new(),
            untold: BTreeMap::new(),
            labels,
            by_label: BTreeMap::new(),
            waits: BTreeMap::new(),
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

    /// Its life.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Switches optimizations, for what begins from now on and for later rounds of what is under way.
    pub fn optimize(&mut self, optimizations: Optimizations) {
        self.optimizations = optimizations;
    }

    /// Which optimizations are on.
    #[must_use]
    pub fn optimizations(&self) -> Optimizations {
        self.optimizations
    }

    /// Records that transactions are on, hottest first.
    #[must_use]
    pub fn hottest(&self, count: usize) -> Vec<(Place, Spot)> {
        self.hot.hottest(count)
    }

    /// Transactions that are decided or ended here and not yet everywhere.
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

    /// How parts of a round on these records would start now.
    #[must_use]
    pub fn plan(&self, parts: &BTreeMap<NodeId, Vec<Key>>) -> Vec<Planned> {
        let expected = |(&source, records): (&NodeId, &Vec<Key>)| {
            let places: Vec<Place> = records.iter().map(|key| (source, key.clone())).collect();
            (source, self.latency(source, &places))
        };
        let delays = postpone(&parts.iter().map(expected).collect());
        let planned = |(&source, records): (&NodeId, &Vec<Key>)| {
            let places: Vec<Place> = records.iter().map(|key| (source, key.clone())).collect();
            let rtt = self.sources.get(&source).and_then(|source| source.rtt.get());
            let postponed =
                delays.get(&source).copied().filter(|_| self.optimizations.latency_aware);
            let forecast = self.hot.forecast(places.iter());
            Planned { source, rtt, forecast, postponed: postponed.unwrap_or_default() }
        };
        parts.iter().map(planned).collect()
    }

    /// What is known of the transaction that its caller calls `label`.
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

    /// This caller will never ask about any of its transactions with a smaller count.
    pub fn forget(&mut self, client: ClientId, below: u64) {
        let from = TxnId { client, counter: 0, attempt: 0 };
        let to = TxnId { client, counter: below, attempt: 0 };
        let old: Vec<TxnId> = self.labels.range(from..to).map(|(&label, _)| label).collect();
        for label in old {
            self.labels.remove(&label);
        }
    }

    /// Begins a transaction. Nothing is sent before its first round.
    pub fn begin(&mut self, label: Option<TxnId>, isolation: Isolation, io: Out<'_, '_, W>) -> Xid {
        self.number += 1;
        let xid = Xid { middleware: self.node, epoch: self.epoch, number: self.number };
        self.by_label.extend(label.map(|label| (label, xid)));
        let open = Open {
            label,
            isolation,
            branches: BTreeMap::new(),
            phase: Phase::Idle,
            last: Last::No,
            answers: BTreeMap::new(),
            unanswered: BTreeSet::new(),
            inner: BTreeMap::new(),
            tries: 0,
            since: io.now,
            is_decentralized: false,
        };
        self.open.insert(xid, open);
        xid
    }

    /// The next statements of a transaction. [`Effect::Answers`] or [`Effect::StatementFailed`] follow, or
    /// [`Effect::Finished`]; with [`Last::Commit`], answers and then the outcome.
    pub fn round(
        &mut self,
        xid: Xid,
        parts: BTreeMap<NodeId, Part<W>>,
        last: Last,
        io: Out<'_, '_, W>,
    ) {
        let Some(open) = self.open.get_mut(&xid) else { return };
        if open.phase != Phase::Idle {
            return;
        }
        let is_over =
            |branch: &Branch<W>| matches!(branch.stage, Stage::Preparing | Stage::Prepared);
        if open.branches.values().any(is_over) && !parts.is_empty() {
            // The mark was wrong: a prepared branch takes no statements.
            self.abort(xid, None, Reason::Marked.into(), io);
            return;
        }
        open.last = last;
        open.since = io.now;
        self.admit(xid, parts, last, io);
    }

    /// The session wants the transaction to commit. [`Effect::Finished`] follows.
    pub fn commit(&mut self, xid: Xid, io: Out<'_, '_, W>) {
        let Some(open) = self.open.get_mut(&xid) else { return };
        open.since = io.now;
        match open.phase {
            Phase::Idle => self.finish_commit(xid, io),
            Phase::Executing | Phase::HeldBack { .. } => open.last = Last::Commit,
            Phase::Voting | Phase::Committing | Phase::Logging(..) => {}
        }
    }

    /// The session gives up. [`Effect::Finished`] follows, unless it is too late: then the outcome does.
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

    /// The caller of the session gives up. As [`Middleware::rollback`]; but where the only branch may commit by itself, its
    /// source is asked to interrupt what it runs, and its answer decides.
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

    /// An operator ends a branch of a middleware that is gone for ever and took its log with it.
    pub fn settle(&mut self, xid: Xid, source: NodeId, commit: bool, io: Out<'_, '_, W>) {
        let msg = if commit {
            ToAgent::Commit { xid, at: io.clock, one_phase: false }
        } else {
            ToAgent::Rollback { xid }
        };
        self.send(source, msg, io);
    }

    // --- Starting statements ---

    /// Late transaction scheduling (Alg. 2 l. 11-18): a transaction that holds nothing yet, and would probably abort, waits.
    fn admit(
        &mut self,
        xid: Xid,
        parts: BTreeMap<NodeId, Part<W>>,
        last: Last,
        io: Out<'_, '_, W>,
    ) {
        let Some(open) = self.open.get_mut(&xid) else { return };
        if self.optimizations.high_contention && open.branches.is_empty() {
            let places: Vec<Place> = places(&parts).collect();
            if !self.hot.admits(places.iter(), io.rng) {
                open.tries += 1;
                if open.tries > self.config.admission_tries {
                    io.push(Effect::Note(Note::Refused));
                    self.abort(xid, None, Reason::Refused.into(), io);
                    return;
                }
                io.push(Effect::Note(Note::HeldBack));
                open.phase = Phase::HeldBack { parts, last };
                io.push(Effect::SetTimer(Timer::Admit(xid), io.now + self.config.admission_wait));
                return;
            }
        }
        self.launch(xid, parts, io);
    }

    /// Sends every part of a round, each at its time.
    fn launch(&mut self, xid: Xid, mut parts: BTreeMap<NodeId, Part<W>>, io: Out<'_, '_, W>) {
        let Some(open) = self.open.get_mut(&xid) else { return };
        open.phase = Phase::Executing;
        open.unanswered = parts.keys().copied().collect();
        open.answers.clear();
        let participants: BTreeSet<NodeId> =
            open.branches.keys().chain(parts.keys()).copied().collect();
        let is_global = participants.len() > 1;
        open.is_decentralized =
            self.optimizations.decentralized_prepare && is_global && open.last != Last::No;
        if open.is_decentralized {
            // §III-A: sources that have nothing to do in the last round prepare at once.
            let others: Vec<NodeId> =
                open.branches.keys().filter(|at| !parts.contains_key(*at)).copied().collect();
            for source in others {
                self.ask_prepare(xid, source, &participants, io);
            }
        }
        if let Some(below) = self.config.inner_below {
            let is_inner = |source: &NodeId| self.rtt(*source) < below;
            if parts.keys().any(is_inner) && !parts.keys().all(is_inner) {
                let outer = parts
                    .keys()
                    .filter(|source| !is_inner(source))
                    .copied()
                    .collect::<BTreeSet<_>>();
                let (outer, inner) =
                    parts.into_iter().partition(|(source, _)| outer.contains(source));
                parts = outer;
                if let Some(open) = self.open.get_mut(&xid) {
                    open.inner = inner;
                }
            }
        }
        self.launch_parts(xid, parts, &participants, io);
        self.after_answer(xid, io);
    }

    fn launch_parts(
        &mut self,
        xid: Xid,
        parts: BTreeMap<NodeId, Part<W>>,
        participants: &BTreeSet<NodeId>,
        io: Out<'_, '_, W>,
    ) {
        let expected = |(&source, part): (&NodeId, &Part<W>)| {
            (source, self.latency(source, &places_of(source, part).collect::<Vec<_>>()))
        };
        let delays = if self.optimizations.latency_aware && parts.len() > 1 {
            postpone(&parts.iter().map(expected).collect())
        } else {
            BTreeMap::new()
        };
        for (source, part) in parts {
            self.hot.enter(places_of(source, &part).collect::<Vec<_>>().iter());
            let Some(open) = self.open.get_mut(&xid) else { return };
            let then = match open.last {
                Last::No => Then::Wait,
                Last::Marked | Last::Commit if open.is_decentralized => Then::Prepare,
                Last::Commit if participants.len() == 1 && self.config.commit_in_text => {
                    Then::Commit
                }
                Last::Marked | Last::Commit => Then::Wait,
            };
            let branch = open.branches.entry(source).or_insert_with(Branch::new);
            branch.recent = places_of(source, &part).collect();
            branch.places.extend(branch.recent.iter().cloned());
            branch.writes |= part.writes;
            branch.outbox = Some(ToAgent::Execute {
                xid,
                round: branch.rounds,
                life: 0,
                peers: peers(source, participants, self.optimizations),
                isolation: open.isolation,
                statements: part.statements,
                writes: part.writes,
                then,
            });
            branch.rounds += 1;
            let wait = delays.get(&source).copied().unwrap_or_default();
            if wait.is_zero() {
                branch.stage = Stage::Running(then);
                self.transmit(xid, source, io);
            } else {
                branch.stage = Stage::Waiting;
                io.push(Effect::Note(Note::Postponed));
                io.push(Effect::SetTimer(Timer::Start(xid, source), io.now + wait));
            }
        }
        io.push(Effect::SetTimer(Timer::Resend(xid), io.now + self.config.resend_after));
    }

    /// Sends what is in a branch's outbox, if its agent is known to be there; otherwise when it is.
    fn transmit(&mut self, xid: Xid, source: NodeId, io: Out<'_, '_, W>) {
        let Some(known) = self.sources.get(&source) else { return };
        let Some(fence) = known.fence.filter(|_| known.is_attached) else { return };
        let Some(branch) = self.open.get_mut(&xid).and_then(|open| open.branches.get_mut(&source))
        else {
            return;
        };
        if let Some(ToAgent::Execute { life, .. }) = &mut branch.outbox
            && *life == 0
        {
            *life = fence.agent;
        }
        branch.is_sent = true;
        if let Some(msg) = branch.outbox.clone() {
            self.send(source, msg, io);
        }
    }

    fn ask_prepare(
        &mut self,
        xid: Xid,
        source: NodeId,
        participants: &BTreeSet<NodeId>,
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
        branch.outbox = Some(ToAgent::Prepare { xid, peers });
        self.transmit(xid, source, io);
    }

    fn rtt(&self, source: NodeId) -> Duration {
        self.sources.get(&source).and_then(|source| source.rtt.get()).unwrap_or_default()
    }

    /// How long until the answer of statements on these records is here: Eq. 3, or Eq. 8.
    fn latency(&self, source: NodeId, places: &[Place]) -> Duration {
        let forecast = if self.optimizations.high_contention {
            let forecast = self.hot.forecast(places.iter()) / 100 * self.config.forecast_percent;
            forecast.min(self.config.forecast_max)
        } else {
            Duration::ZERO
        };
        self.rtt(source) + forecast
    }

    // --- Answers and votes ---

    /// A message from the agent of a source.
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
            FromAgent::Waits { look, waits } => self.on_waits(from, look, waits, io),
        }
    }

    /// Ends deadlocks across sources: the youngest of each cycle that can still be rolled back.
    fn on_waits(&mut self, from: NodeId, look: u64, waits: Vec<Wait>, io: Out<'_, '_, W>) {
        if !self.config.finds_deadlocks {
            return;
        }
        let seen = self.waits.entry(from).or_default();
        if look < seen.look {
            return;
        }
        // Agents of an earlier version do not count.
        if look > seen.look || look == 0 {
            *seen = Seen { look, waits: BTreeSet::new() };
        }
        seen.waits.extend(waits);
        loop {
            let is_open = |xid: &Xid| xid.middleware != self.node || self.open.contains_key(xid);
            let known = self.waits.values().flat_map(|seen| &seen.waits);
            let waits: Vec<Wait> = known
                .filter(|wait| is_open(&wait.waiter) && is_open(&wait.holder))
                .copied()
                .collect();
            let Some(cycle) = cycle(&waits) else { return };
            let victim = cycle.into_iter().filter(|xid| self.can_abort(*xid)).max();
            // Another middleware, which sees the same cycle, has the youngest; or it comes out as its source decides.
            let Some(victim) = victim.filter(|xid| xid.middleware == self.node) else { return };
            io.push(Effect::Note(Note::GlobalDeadlock));
            self.abort(victim, None, Reason::Deadlock.into(), io);
        }
    }

    /// Nothing of it commits by itself. What others have is taken to be so.
    fn can_abort(&self, xid: Xid) -> bool {
        let Some(open) = self.open.get(&xid) else { return xid.middleware != self.node };
        let is_committing = |branch: &Branch<W>| branch.is_committing() && branch.is_sent;
        !matches!(open.phase, Phase::Logging(..)) && !open.branches.values().any(is_committing)
    }

    fn branch(&mut self, xid: Xid, source: NodeId) -> Option<&mut Branch<W>> {
        self.open.get_mut(&xid)?.branches.get_mut(&source)
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of one message")]
    fn on_answered(
        &mut self,
        from: NodeId,
        xid: Xid,
        round: u32,
        answers: Vec<W::Answer>,
        fence: Fence,
        took: Duration,
        io: Out<'_, '_, W>,
    ) {
        let Some(branch) = self.branch(xid, from) else { return };
        let Stage::Running(then) = branch.stage else { return };
        if round + 1 != branch.rounds {
            return;
        }
        if branch.fence.is_some_and(|begun| begun != fence) {
            self.abort(xid, None, Reason::Restarted.into(), io);
            return;
        }
        branch.fence = Some(fence);
        let recent = std::mem::take(&mut branch.recent);
        branch.stage = match then {
            Then::Wait => Stage::Idle,
            // What was sent stays in the outbox until the vote, or the end, is here.
            Then::Prepare => Stage::Preparing,
            Then::Commit => Stage::Running(Then::Commit),
        };
        if then == Then::Wait {
            branch.outbox = None;
        }
        self.hot.measured(&recent, took);
        if let Some(open) = self.open.get_mut(&xid)
            && open.unanswered.remove(&from)
        {
            open.answers.insert(from, answers);
        }
        self.after_answer(xid, io);
    }

    /// Goes on if every part of the round has been answered.
    fn after_answer(&mut self, xid: Xid, io: Out<'_, '_, W>) {
        let Some(open) = self.open.get_mut(&xid) else { return };
        if open.phase != Phase::Executing {
            return;
        }
        if !open.inner.is_empty()
            && open.unanswered.iter().all(|source| open.inner.contains_key(source))
        {
            let inner = std::mem::take(&mut open.inner);
            let participants = open.branches.keys().chain(inner.keys()).copied().collect();
            self.launch_parts(xid, inner, &participants, io);
            return;
        }
        if !open.unanswered.is_empty() {
            return;
        }
        open.phase = Phase::Idle;
        let answers = std::mem::take(&mut open.answers);
        let (last, is_committing) = (open.last, open.branches.values().any(Branch::is_committing));
        if is_committing {
            open.phase = Phase::Committing;
        }
        io.push(Effect::Answers { xid, answers });
        if last == Last::Commit && !is_committing {
            self.finish_commit(xid, io);
        }
    }

    fn on_statement_failed(
        &mut self,
        from: NodeId,
        xid: Xid,
        round: u32,
        statement: u32,
        failure: Failure<W>,
        io: Out<'_, '_, W>,
    ) {
        let Some(open) = self.open.get_mut(&xid) else {
            self.learn_cause(from, xid, failure, io);
            return;
        };
        let is_alone =
            open.unanswered.len() == 1 && open.answers.is_empty() && open.inner.is_empty();
        let Some(branch) = open.branches.get_mut(&from) else { return };
        if !matches!(branch.stage, Stage::Running(_)) || round + 1 != branch.rounds {
            return;
        }
        if !is_alone {
            // Another source may have done its part of the same statement.
            self.abort(xid, Some(from), failure, io);
            return;
        }
        (branch.stage, branch.outbox) = (Stage::Idle, None);
        open.unanswered.clear();
        (open.phase, open.last) = (Phase::Idle, Last::No);
        io.push(Effect::StatementFailed { xid, source: from, statement, failure });
    }

    fn on_failed(&mut self, from: NodeId, xid: Xid, failure: Failure<W>, io: Out<'_, '_, W>) {
        let Some(open) = self.open.get(&xid) else {
            self.learn_cause(from, xid, failure, io);
            self.on_rolled_back(from, xid, io);
            return;
        };
        match open.phase {
            Phase::Logging(..) => {}
            // The only branch said that it did not commit; or, by themselves, one of several.
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

    fn on_prepared(
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
        (branch.stage, branch.outbox) = (Stage::Prepared, None);
        (branch.wrote, branch.floor) = (wrote, floor);
        if is_voting {
            self.count_votes(xid, io);
        }
    }

    /// The session wants to commit, and nothing is under way but votes.
    fn finish_commit(&mut self, xid: Xid, io: Out<'_, '_, W>) {
        let Some(open) = self.open.get_mut(&xid) else { return };
        let participants: BTreeSet<NodeId> = open.branches.keys().copied().collect();
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
                if let Some(branch) = self.branch(xid, source) {
                    branch.stage = Stage::Running(Then::Commit);
                    branch.outbox = Some(ToAgent::Commit { xid, at, one_phase: true });
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

    /// Decides if every vote is here, and no lock can have been lost meanwhile (G3).
    fn count_votes(&mut self, xid: Xid, io: Out<'_, '_, W>) {
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
            // A tenth less, for clocks that do not run alike.
            if io.now.since(known.confirmed) > self.config.quarantine / 10 * 9 {
                stale.push(source);
            }
        }
        if !stale.is_empty() {
            io.push(Effect::Note(Note::FenceAsked));
            for source in stale {
                self.ping(source, io);
            }
            return;
        }
        self.decide(xid, io);
    }

    /// Every branch can only commit. The decision counts when it is durable.
    fn decide(&mut self, xid: Xid, io: Out<'_, '_, W>) {
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

    /// Everything persisted up to this ticket is durable.
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

    /// The decision is durable: the session is told, and every branch commits.
    fn on_logged(&mut self, xid: Xid, at: Timestamp, io: Out<'_, '_, W>) {
        let Some(open) = self.open.get(&xid) else { return };
        let branches: BTreeMap<NodeId, bool> =
            open.branches.iter().map(|(&at, b)| (at, b.wrote)).collect();
        let path = if open.is_decentralized { "decentralized" } else { "two-phase" };
        let unacknowledged = branches.keys().copied().collect();
        self.labels.extend(open.label.map(|label| (label, at)));
        let label = open.label;
        self.decided.insert(xid, Decided { label, at, branches, unacknowledged, news: None });
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

    fn send_commit(&mut self, xid: Xid, io: Out<'_, '_, W>) {
        let Some(decided) = self.decided.get(&xid) else { return };
        let (at, sources) = (decided.at, decided.unacknowledged.clone());
        for source in sources {
            self.send(source, ToAgent::Commit { xid, at, one_phase: false }, io);
        }
    }

    fn on_committed(&mut self, from: NodeId, xid: Xid, at: Timestamp, io: Out<'_, '_, W>) {
        if let Some(decided) = self.decided.get_mut(&xid) {
            decided.unacknowledged.remove(&from);
            if decided.unacknowledged.is_empty() {
                let news = self.decided.remove(&xid).and_then(|decided| decided.news);
                io.effects.extend(news);
                io.push(Effect::CancelTimer(Timer::Resend(xid)));
                self.persist(Record::Ended(xid), io);
                self.checkpoint_if_due(io);
            }
            return;
        }
        let Some(open) = self.open.get_mut(&xid) else { return };
        let Some(branch) = open.branches.get_mut(&from) else { return };
        // Its answers may be missing: then both come again.
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

    /// The only branch does not know whether it committed.
    fn on_lost(&mut self, xid: Xid, io: Out<'_, '_, W>) {
        let Some(open) = self.open.get(&xid) else { return };
        if open.branches.values().any(Branch::is_committing) {
            io.push(Effect::Note(Note::Unknowable));
            self.finish(xid, Outcome::Unknown, None, orthodrome_core::machine::UNKNOWABLE, io);
        }
    }

    // --- The end ---

    /// The transaction cannot commit any more. It has no commit record and will never have one, so the session may
    /// be told at once.
    fn abort(&mut self, xid: Xid, source: Option<NodeId>, failure: Failure<W>, io: Out<'_, '_, W>) {
        let Some(open) = self.open.get(&xid) else { return };
        let told: BTreeSet<NodeId> =
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
            // Another branch failed first, and says why: that decides whether trying again makes sense.
            self.untold.insert(xid, news);
        }
        self.aborting.insert(xid, told);
        io.push(Effect::SetTimer(Timer::Resend(xid), io.now + self.config.resend_after));
    }

    /// The branch that failed first says why its transaction, of which the session has not been told, was aborted.
    fn learn_cause(&mut self, from: NodeId, xid: Xid, cause: Failure<W>, io: Out<'_, '_, W>) {
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

    /// Tells the session of an aborted transaction whose cause nobody has said.
    fn tell(&mut self, xid: Xid, io: Out<'_, '_, W>) {
        let news = self.untold.remove(&xid);
        io.effects.extend(news);
    }

    fn finish(
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

    fn on_rolled_back(&mut self, from: NodeId, xid: Xid, io: Out<'_, '_, W>) {
        if let Some(sources) = self.aborting.get_mut(&xid) {
            sources.remove(&from);
            if sources.is_empty() {
                self.aborting.remove(&xid);
                io.push(Effect::CancelTimer(Timer::Resend(xid)));
                self.tell(xid, io);
            }
            return;
        }
        // A peer of it failed, and its agent was the first to know.
        let Some(open) = self.open.get(&xid) else { return };
        let is_final = matches!(open.phase, Phase::Logging(..) | Phase::Committing);
        if open.branches.contains_key(&from) && !is_final {
            self.abort(xid, Some(from), Reason::Peer.into(), io);
            self.on_rolled_back(from, xid, io);
        }
    }

    // --- Agents come and go ---

    fn on_attached(&mut self, from: NodeId, epoch: u64, fence: Fence, io: Out<'_, '_, W>) {
        if epoch != self.epoch {
            return;
        }
        let Some(source) = self.sources.get_mut(&from) else { return };
        source.is_attached = true;
        self.learn_fence(from, fence, None, io);
        let waiting: Vec<Xid> = self
            .open
            .iter()
            .filter(|(_, open)| {
                open.branches
                    .get(&from)
                    .is_some_and(|b| b.outbox.is_some() && b.stage != Stage::Waiting)
            })
            .map(|(&xid, _)| xid)
            .collect();
        for xid in waiting {
            self.transmit(xid, from, io);
        }
        self.send(from, ToAgent::Scan { epoch }, io);
    }

    fn on_pong(
        &mut self,
        from: NodeId,
        sent: Time,
        fence: Fence,
        is_attached: bool,
        io: Out<'_, '_, W>,
    ) {
        let Some(source) = self.sources.get_mut(&from) else { return };
        source.rtt.add(io.now.since(sent), self.config.rtt_weight_percent);
        let was_attached = std::mem::replace(&mut source.is_attached, is_attached);
        self.learn_fence(from, fence, Some(sent), io);
        match (was_attached, is_attached) {
            (_, false) => self.send(from, ToAgent::Attach { epoch: self.epoch }, io),
            // The answer to that was lost.
            (false, true) => self.on_attached(from, self.epoch, fence, io),
            (true, true) => {}
        }
    }

    /// The life of a source and its agent. In a new one, what was open there and not prepared is lost.
    fn learn_fence(&mut self, from: NodeId, fence: Fence, sent: Option<Time>, io: Out<'_, '_, W>) {
        let Some(source) = self.sources.get_mut(&from) else { return };
        let is_new = source.fence.replace(fence).is_some_and(|before| before != fence);
        if is_new {
            // Nobody who waited there does any more.
            self.waits.remove(&from);
        }
        if let Some(sent) = sent {
            source.confirmed = source.confirmed.max(sent);
        }
        let here: Vec<Xid> = self
            .open
            .iter()
            .filter(|(_, open)| open.branches.contains_key(&from))
            .map(|(&xid, _)| xid)
            .collect();
        for xid in here {
            let Some(open) = self.open.get(&xid) else { continue };
            let Some(branch) = open.branches.get(&from) else { continue };
            let is_lost = is_new
                && branch.is_sent
                && !matches!(branch.stage, Stage::Prepared | Stage::Preparing);
            match open.phase {
                Phase::Logging(..) => {}
                // Whoever commits in one phase is asked until the agent says what it knows.
                Phase::Committing => {}
                Phase::Voting => self.count_votes(xid, io),
                Phase::Idle | Phase::Executing | Phase::HeldBack { .. } => {
                    if is_lost && !branch.is_committing() {
                        self.abort(xid, None, Reason::Restarted.into(), io);
                    }
                }
            }
        }
    }

    fn ping(&mut self, source: NodeId, io: Out<'_, '_, W>) {
        let ours = |xid: &&Xid| xid.epoch == self.epoch;
        let pending =
            self.open.keys().chain(self.decided.keys()).chain(self.aborting.keys()).filter(ours);
        let oldest = pending.map(|xid| xid.number).min().unwrap_or(self.number + 1);
        let ping = ToAgent::Ping { epoch: self.epoch, sent: io.now, oldest };
        self.send(source, ping, io);
    }

    /// Branches that are prepared at a source: those that nobody will end are ended.
    fn on_scanned(&mut self, from: NodeId, epoch: u64, prepared: Vec<Xid>, io: Out<'_, '_, W>) {
        if epoch != self.epoch {
            return;
        }
        for xid in prepared {
            if xid.middleware != self.node || xid.epoch > self.epoch || self.open.contains_key(&xid)
            {
                continue;
            }
            if let Some(decided) = self.decided.get(&xid) {
                self.send(from, ToAgent::Commit { xid, at: decided.at, one_phase: false }, io);
            } else {
                io.push(Effect::Note(Note::Orphan));
                self.aborting.entry(xid).or_default().insert(from);
                self.send(from, ToAgent::Rollback { xid }, io);
                io.push(Effect::SetTimer(Timer::Resend(xid), io.now + self.config.resend_after));
            }
        }
    }

    // --- Timers ---

    /// A timer expired.
    pub fn on_timer(&mut self, timer: Timer, io: Out<'_, '_, W>) {
        match timer {
            Timer::Ping => self.on_ping_timeout(io),
            Timer::Scan => self.on_scan_timeout(io),
            Timer::Start(xid, source) => self.on_start_timeout(xid, source, io),
            Timer::Admit(xid) => self.on_admit_timeout(xid, io),
            Timer::Resend(xid) => self.on_resend_timeout(xid, io),
        }
    }

    fn on_ping_timeout(&mut self, io: Out<'_, '_, W>) {
        for source in self.config.sources.keys().copied().collect::<Vec<_>>() {
            self.ping(source, io);
        }
        io.push(Effect::SetTimer(Timer::Ping, io.now + self.config.ping_interval));
    }

    fn on_scan_timeout(&mut self, io: Out<'_, '_, W>) {
        for source in self.config.sources.keys().copied().collect::<Vec<_>>() {
            self.send(source, ToAgent::Scan { epoch: self.epoch }, io);
        }
        io.push(Effect::SetTimer(Timer::Scan, io.now + self.config.scan_interval));
    }

    fn on_start_timeout(&mut self, xid: Xid, source: NodeId, io: Out<'_, '_, W>) {
        let Some(branch) = self.branch(xid, source) else { return };
        let Some(ToAgent::Execute { then, .. }) = branch.outbox else { return };
        branch.stage = Stage::Running(then);
        self.transmit(xid, source, io);
    }

    fn on_admit_timeout(&mut self, xid: Xid, io: Out<'_, '_, W>) {
        let Some(open) = self.open.get_mut(&xid) else { return };
        let Phase::HeldBack { parts, last } = std::mem::replace(&mut open.phase, Phase::Idle)
        else {
            unreachable!("the timer runs only while a transaction is held back");
        };
        let last = last.max(open.last);
        open.last = last;
        self.admit(xid, parts, last, io);
    }

    /// Nobody answered for a while: the messages may be lost, or their receivers are down.
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
            // Whoever failed first may be gone.
            self.tell(xid, io);
            return;
        }
        let Some(open) = self.open.get(&xid) else {
            io.push(Effect::CancelTimer(Timer::Resend(xid)));
            return;
        };
        let is_overdue = io.now.since(open.since) > self.config.give_up_after;
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
                    .filter(|(_, branch)| is_due(branch))
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

    // --- The log ---

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
            // Ended, but its caller may still ask: a name of an earlier life that no branch can have.
            let xid = Xid { middleware: self.node, epoch: 0, number: records.len() as u64 };
            records.push(Record::Commit { xid, label: Some(label), at, branches: BTreeMap::new() });
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

    /// What must be gone when every transaction has ended.
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

    /// Panics if the state contradicts itself.
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

/// Whom an agent tells of a failure: everybody else, or, without O1, nobody.
fn peers(
    source: NodeId,
    participants: &BTreeSet<NodeId>,
    optimizations: Optimizations,
) -> Vec<NodeId> {
    let others = participants.iter().copied().filter(|&peer| peer != source);
    if optimizations.decentralized_prepare { others.collect() } else { Vec::new() }
}

fn places_of<W: Work>(source: NodeId, part: &Part<W>) -> impl Iterator<Item = Place> + '_ {
    part.records.iter().map(move |key| (source, key.clone()))
}

fn places<W: Work>(parts: &BTreeMap<NodeId, Part<W>>) -> impl Iterator<Item = Place> + '_ {
    parts.iter().flat_map(|(&source, part)| places_of(source, part))
}

/// It only says that another branch failed before.
fn is_consequence(reason: Reason) -> bool {
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

/// What callers of every protocol are told.
fn abort_reason(reason: Reason) -> AbortReason {
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
mod tests {
    use orthodrome_core::rng::Rng;

    use super::*;

    /// Everything that can be told apart is in the reasons.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    struct Bare;

    impl Work for Bare {
        type Statement = ();
        type Answer = ();
        type Fault = ();
    }

    const NEAR: NodeId = NodeId(1001);
    const FAR: NodeId = NodeId(1002);

    struct Rig {
        middleware: Middleware<Bare>,
        rng: Rng,
        now: Time,
    }

    impl Rig {
        /// Does something, and gives back the reasons that sessions are told for the end of their transactions.
        fn step(
            &mut self,
            act: impl FnOnce(&mut Middleware<Bare>, &mut Io<'_, Effect<Bare>>),
        ) -> Vec<Reason> {
            let mut effects = Vec::new();
            let Self { middleware, rng, now } = self;
            let mut io = Io { now: *now, clock: Timestamp::ZERO, rng, effects: &mut effects };
            act(middleware, &mut io);
            middleware.assert_invariants();
            let told = |effect| {
                let Effect::Finished { failure, .. } = effect else { return None };
                failure.map(|(_, failure)| failure.reason)
            };
            effects.into_iter().filter_map(told).collect()
        }

        fn hear(&mut self, from: NodeId, msg: FromAgent<Bare>) -> Vec<Reason> {
            self.step(|middleware, io| middleware.on_message(from, msg, io))
        }
    }

    /// A transaction whose statements are under way at two sources.
    fn under_way() -> (Rig, Xid) {
        let millis = Duration::from_millis;
        let config = Config {
            sources: [(NEAR, Kind::Postgres), (FAR, Kind::MariaDb)].into(),
            optimizations: Optimizations {
                decentralized_prepare: true,
                ..Optimizations::default()
            },
            commit: Commit::TwoPhase,
            inner_below: None,
            commit_in_text: true,
            answers_at_decision: true,
            ping_interval: millis(100),
            rtt_weight_percent: 10,
            hot_records: 10,
            hot_keep_percent: 80,
            forecast_percent: 25,
            forecast_max: millis(10),
            admission_wait: millis(10),
            admission_tries: 10,
            resend_after: millis(500),
            give_up_after: millis(5_000),
            scan_interval: millis(1_000),
            finds_deadlocks: true,
            quarantine: millis(1_000),
            checkpoint_records: 100,
            mutations: Mutations::default(),
        };
        let (mut rng, now) = (Rng::stream(1, "test", 1), Time::ZERO);
        let mut effects = Vec::new();
        let mut io = Io { now, clock: Timestamp::ZERO, rng: &mut rng, effects: &mut effects };
        let middleware = Middleware::new(NodeId(1), config, Vec::new(), &mut io);
        let mut rig = Rig { middleware, rng, now };
        rig.step(|middleware, io| middleware.on_durable(Ticket(1), io));
        for source in [NEAR, FAR] {
            let fence = Fence { agent: 1, source: 1 };
            rig.hear(source, FromAgent::Attached { epoch: 1, fence });
        }
        let part = || Part { statements: vec![()], records: Vec::new(), writes: true };
        let mut xid = None;
        rig.step(|middleware, io| {
            let begun = middleware.begin(None, Isolation::Serializable, io);
            let parts = [(NEAR, part()), (FAR, part())].into();
            middleware.round(begun, parts, Last::Commit, io);
            xid = Some(begun);
        });
        (rig, xid.unwrap())
    }

    fn failed(xid: Xid, reason: Reason) -> FromAgent<Bare> {
        FromAgent::Failed { xid, failure: reason.into() }
    }

    #[test]
    fn a_session_is_told_the_cause_and_not_what_came_of_it() {
        for consequence in [Reason::Peer, Reason::Ended] {
            let (mut rig, xid) = under_way();
            assert_eq!(rig.hear(FAR, failed(xid, consequence)), []);
            assert_eq!(rig.hear(NEAR, failed(xid, Reason::Statement)), [Reason::Statement]);
            // Said again, it is not told again.
            assert_eq!(rig.hear(NEAR, failed(xid, Reason::Statement)), []);
        }
    }

    /// A deadlock whose ends came in two messages is seen; one that an earlier look saw is not.
    #[test]
    fn waits_of_one_look_add_up_and_those_of_an_earlier_one_are_forgotten() {
        for (looks, is_found) in [([3, 3], true), ([3, 4], false), ([4, 3], false)] {
            let (mut rig, xid) = under_way();
            let other = Xid { middleware: NodeId(0), ..xid };
            let [first, second] = looks;
            let wait = |waiter, holder| vec![Wait { waiter, holder }];
            let told = rig.hear(NEAR, FromAgent::Waits { look: first, waits: wait(xid, other) });
            assert_eq!(told, []);
            let told = rig.hear(NEAR, FromAgent::Waits { look: second, waits: wait(other, xid) });
            assert_eq!(told.is_empty(), !is_found, "{looks:?}");
        }
    }

    #[test]
    fn a_cause_is_told_at_once() {
        let (mut rig, xid) = under_way();
        assert_eq!(rig.hear(NEAR, failed(xid, Reason::Statement)), [Reason::Statement]);
        assert_eq!(rig.hear(FAR, failed(xid, Reason::Peer)), []);
    }

    #[test]
    fn a_session_does_not_wait_for_a_cause_that_nobody_says() {
        let (mut rig, xid) = under_way();
        assert_eq!(rig.hear(FAR, failed(xid, Reason::Peer)), []);
        assert_eq!(rig.hear(NEAR, FromAgent::RolledBack { xid }), [Reason::Peer]);
        let (mut rig, xid) = under_way();
        assert_eq!(rig.hear(FAR, failed(xid, Reason::Peer)), []);
        let told = rig.step(|middleware, io| middleware.on_timer(Timer::Resend(xid), io));
        assert_eq!(told, [Reason::Peer]);
        assert_eq!(rig.hear(NEAR, FromAgent::RolledBack { xid }), []);
    }
}
