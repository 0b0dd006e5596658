//! The threads that run a middleware and an agent: they take arrived inputs, call the machine, fire
//! timers and carry out effects. These are the machines of the simulator, in real time.

use std::path::Path;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::time::nanos;
use orthodrome_core::{NodeId, Outcome, Rng, Ticket, Time, Timestamp};
use orthodrome_geotp::agent::{self, Agent};
use orthodrome_geotp::contract::{
    AgentEffect, AgentTimer, Effect, Failure, FromAgent, FromSource, Io, Isolation, Last, Note,
    Part, PeerRollback, Record, SessionId, Timer, ToAgent, Xid,
};
use orthodrome_geotp::middleware::{self, Middleware};
use orthodrome_geotp::sql::Answer;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot, watch};
use tracing::{error, info};

use super::decisions::{Decisions, Found, Report, Work};
use super::driver::Sql;
use super::halt;
use super::messages;
use super::source::Source;
use orthodrome_server::inbox::Inbox;
use orthodrome_server::storage::{Identity, StorageError};

/// Maximum number of inputs taken at once, which share one sync of the decision log.
pub(crate) const BATCH: usize = 256;

/// A result of a transaction, for its session.
#[derive(Debug)]
pub(crate) enum Heard {
    /// The answers of a round.
    Answers(OrdMap<NodeId, Vec<Answer>>),
    /// A statement failed, and the transaction continues.
    StatementFailed(NodeId, Failure<Sql>),
    /// The transaction has ended.
    Finished(Outcome, Option<(NodeId, Failure<Sql>)>),
}

type Act = Box<dyn FnOnce(&mut Middleware<Sql>, &mut Io<'_, Effect<Sql>>) + Send>;

enum Event {
    Message(NodeId, FromAgent<Sql>),
    Arriving(NodeId),
    Durable(Ticket),
    Begin(Isolation, SessionId, mpsc::UnboundedSender<Heard>, oneshot::Sender<Xid>),
    Act(Act),
}

/// The clocks of one process.
#[derive(Clone, Copy)]
pub(crate) struct Clocks {
    start: Instant,
}

impl Clocks {
    pub(crate) fn new() -> Self {
        Self { start: Instant::now() }
    }

    pub(crate) fn now(self) -> Time {
        Time(nanos(self.start.elapsed()))
    }

    pub(crate) fn physical() -> Timestamp {
        Timestamp(nanos(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()))
    }

    pub(crate) fn instant(self, time: Time) -> Option<Instant> {
        self.start.checked_add(std::time::Duration::from_nanos(time.0))
    }
}

/// Timers by name; setting a timer again replaces it.
struct Timers<T>(OrdMap<T, Time>);

impl<T: Ord + Copy> Timers<T> {
    fn due(&mut self, now: Time) -> Vec<T> {
        let mut due: Vec<(Time, T)> =
            self.0.iter().filter(|(_, at)| **at <= now).map(|(timer, at)| (*at, *timer)).collect();
        due.sort();
        due.into_iter()
            .map(|(_, timer)| {
                self.0.remove(&timer);
                timer
            })
            .collect()
    }

    fn next(&self) -> Option<Time> {
        self.0.values().min().copied()
    }
}

/// Sends messages to an agent.
pub(crate) type ToAgentLink = Box<dyn Fn(ToAgent<Sql>) + Send>;

/// A running middleware. Dropping it acts as a crash.
pub(crate) struct MiddlewareHost {
    inbox: Arc<Inbox<Event>>,
    notes: Arc<std::sync::Mutex<OrdMap<Note, u64>>>,
}

impl Drop for MiddlewareHost {
    fn drop(&mut self) {
        self.inbox.close();
    }
}

/// The inbox for messages of agents.
#[derive(Clone)]
pub(crate) struct Postbox(Arc<Inbox<Event>>);

impl Postbox {
    pub(crate) fn new() -> Self {
        Self(Arc::default())
    }

    pub(crate) fn deliver(&self, from: NodeId, msg: FromAgent<Sql>) {
        self.0.push(Event::Message(from, msg));
    }

    /// A part of a long message of `from` has arrived.
    pub(crate) fn arriving(&self, from: NodeId) {
        self.0.push(Event::Arriving(from));
    }
}

/// A recovered decision log.
pub(crate) struct Opened {
    decisions: Decisions,
    records: Vec<Record>,
    /// Its name.
    pub(crate) log: String,
    postbox: Postbox,
}

impl Opened {
    /// Recovers the decision log in `data_dir`. `failed` is notified when the log cannot be written
    /// any more.
    pub(crate) fn open(
        node: NodeId,
        name: &str,
        data_dir: &Path,
        postbox: Postbox,
        failed: impl Fn(String) + Send + 'static,
    ) -> Result<Self, StorageError> {
        let identity = Identity { cluster: name.to_owned(), node };
        let reported = postbox.0.clone();
        let (decisions, Found { name: log, records: recovered, torn }) =
            Decisions::open(data_dir, &identity, move |report| match report {
                Report::Durable(ticket) => {
                    reported.push(Event::Durable(ticket));
                }
                Report::Failed(error) => failed(error.to_string()),
            })?;
        if let Some(torn) = torn {
            info!("{torn}");
        }
        let mut records = Vec::new();
        for bytes in recovered {
            let record = messages::decode_record(&bytes).ok_or(StorageError::Record {
                node,
                why: "cannot decode a record of the decision log".into(),
            })?;
            records.push(record);
        }
        Ok(Self { decisions, records, log, postbox })
    }

    /// The last incarnation in the log; 0 if it is new.
    pub(crate) fn life(&self) -> u64 {
        let lives = self.records.iter().map(|record| match record {
            Record::Epoch(life) => *life,
            Record::Commit { .. } | Record::Ended(_) => 0,
        });
        lives.max().unwrap_or(0)
    }

    /// Makes new incarnations greater than this one too.
    pub(crate) fn skip_to(&mut self, life: u64) {
        self.records.push(Record::Epoch(life));
    }
}

impl MiddlewareHost {
    /// Starts with an opened decision log. `begun` gets the number of this incarnation when it is
    /// durable.
    pub(crate) fn start(
        node: NodeId,
        config: middleware::Config,
        opened: Opened,
        links: OrdMap<NodeId, ToAgentLink>,
        begun: watch::Sender<u64>,
    ) -> std::io::Result<Self> {
        let Opened { decisions, records, log: _, postbox } = opened;
        let inbox = postbox.0;
        let notes = Arc::default();
        let driver = MiddlewareDriver {
            node,
            clocks: Clocks::new(),
            inbox: inbox.clone(),
            timers: Timers(OrdMap::new()),
            sessions: OrdMap::new(),
            links,
            decisions,
            notes: Arc::clone(&notes),
            begun,
        };
        std::thread::Builder::new()
            .name("middleware".into())
            .spawn(move || driver.run(config, records))?;
        Ok(Self { inbox, notes })
    }

    /// Begins a transaction of a session; its results arrive at the receiver.
    pub(crate) async fn begin(
        &self,
        isolation: Isolation,
        session: SessionId,
    ) -> Option<(Xid, mpsc::UnboundedReceiver<Heard>)> {
        let (hears, hearing) = mpsc::unbounded_channel();
        let (reply, named) = oneshot::channel();
        self.inbox.push(Event::Begin(isolation, session, hears, reply));
        Some((named.await.ok()?, hearing))
    }

    fn act(
        &self,
        act: impl FnOnce(&mut Middleware<Sql>, &mut Io<'_, Effect<Sql>>) + Send + 'static,
    ) {
        self.inbox.push(Event::Act(Box::new(act)));
    }

    /// Runs the next statements of a transaction.
    pub(crate) fn round(&self, xid: Xid, parts: OrdMap<NodeId, Part<Sql>>, last: Last) {
        self.act(move |middleware, io| middleware.round(xid, parts, last, io));
    }

    /// Commits a transaction.
    pub(crate) fn commit(&self, xid: Xid) {
        self.act(move |middleware, io| middleware.commit(xid, io));
    }

    /// Rolls a transaction back.
    pub(crate) fn rollback(&self, xid: Xid) {
        self.act(move |middleware, io| middleware.rollback(xid, io));
    }

    /// Sets a savepoint.
    pub(crate) fn set_savepoint(&self, xid: Xid, savepoint: u32) {
        self.act(move |middleware, _| middleware.set_savepoint(xid, savepoint));
    }

    /// Rolls back to a savepoint.
    pub(crate) fn roll_back_to(&self, xid: Xid, savepoint: u32) {
        self.act(move |middleware, _| middleware.roll_back_to(xid, savepoint));
    }

    /// Releases a savepoint, and those after it.
    pub(crate) fn release_savepoint(&self, xid: Xid, savepoint: u32) {
        self.act(move |middleware, _| middleware.release_savepoint(xid, savepoint));
    }

    /// Cancels a transaction at its client's request.
    pub(crate) fn cancel(&self, xid: Xid) {
        self.act(move |middleware, io| middleware.cancel(xid, io));
    }

    /// Ends a branch at an operator's request.
    pub(crate) fn settle(&self, xid: Xid, source: NodeId, commit: bool) {
        self.act(move |middleware, io| middleware.settle(xid, source, commit, io));
    }

    /// Calls a function on the machine, which returns information or changes a setting.
    pub(crate) async fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&mut Middleware<Sql>) -> T + Send + 'static,
    ) -> Option<T> {
        let (reply, answer) = oneshot::channel();
        self.act(move |middleware, _| {
            // The caller may have stopped waiting.
            let _ = reply.send(question(middleware));
        });
        answer.await.ok()
    }

    /// Counts of rare events so far.
    pub(crate) fn notes(&self) -> OrdMap<Note, u64> {
        self.notes.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }
}

struct MiddlewareDriver {
    node: NodeId,
    clocks: Clocks,
    inbox: Arc<Inbox<Event>>,
    timers: Timers<Timer>,
    sessions: OrdMap<Xid, mpsc::UnboundedSender<Heard>>,
    links: OrdMap<NodeId, ToAgentLink>,
    decisions: Decisions,
    notes: Arc<std::sync::Mutex<OrdMap<Note, u64>>>,
    /// Gets the number of this incarnation when its record, the first one, is durable.
    begun: watch::Sender<u64>,
}

impl MiddlewareDriver {
    fn run(mut self, config: middleware::Config, records: Vec<Record>) {
        let mut rng = Rng::stream(Clocks::physical().0, "middleware", u64::from(self.node.0));
        let mut effects = Vec::new();
        let mut io = Io {
            now: self.clocks.now(),
            clock: Clocks::physical(),
            rng: &mut rng,
            effects: &mut effects,
        };
        let mut middleware = Middleware::new(self.node, config, records, &mut io);
        self.carry_out(&mut effects);
        let mut events = Vec::new();
        loop {
            let deadline = self.timers.next().and_then(|time| self.clocks.instant(time));
            if !self.inbox.drain(&mut events, BATCH, deadline) {
                return;
            }
            let now = self.clocks.now();
            let mut io =
                Io { now, clock: Clocks::physical(), rng: &mut rng, effects: &mut effects };
            for event in events.drain(..) {
                match event {
                    Event::Message(from, msg) => middleware.on_message(from, msg, &mut io),
                    Event::Arriving(from) => middleware.on_arriving(from, now),
                    Event::Durable(ticket) => {
                        middleware.on_durable(ticket, &mut io);
                        self.begun.send_if_modified(|begun| {
                            std::mem::replace(begun, middleware.epoch()) != middleware.epoch()
                        });
                    }
                    Event::Begin(isolation, session, hears, reply) => {
                        let xid = middleware.begin(None, isolation, &mut io);
                        middleware.follow(xid, session);
                        self.sessions.insert(xid, hears);
                        if reply.send(xid).is_err() {
                            middleware.rollback(xid, &mut io);
                        }
                    }
                    Event::Act(act) => act(&mut middleware, &mut io),
                }
            }
            for timer in self.timers.due(now) {
                middleware.on_timer(timer, &mut io);
            }
            self.carry_out(&mut effects);
        }
    }

    fn carry_out(&mut self, effects: &mut Vec<Effect<Sql>>) {
        for effect in effects.drain(..) {
            halt::before(&effect);
            match effect {
                Effect::Send { to, msg } => {
                    if let Some(link) = self.links.get(&to) {
                        link(msg);
                    }
                }
                Effect::Answers { xid, answers } => self.tell(xid, Heard::Answers(answers)),
                Effect::StatementFailed { xid, source, statement: _, failure } => {
                    self.tell(xid, Heard::StatementFailed(source, failure));
                }
                Effect::Finished { xid, label: _, outcome, failure, path: _ } => {
                    self.tell(xid, Heard::Finished(outcome, failure));
                    self.sessions.remove(&xid);
                }
                Effect::Persist { ticket, record } => {
                    let record = messages::encode_record(&record);
                    self.decisions.submit(Work::Persist(ticket, record));
                }
                Effect::Checkpoint { ticket, records } => {
                    let records: Vec<Bytes> = records.iter().map(messages::encode_record).collect();
                    self.decisions.submit(Work::Checkpoint(ticket, records));
                }
                Effect::SetTimer(timer, at) => {
                    self.timers.0.insert(timer, at);
                }
                Effect::CancelTimer(timer) => {
                    self.timers.0.remove(&timer);
                }
                Effect::Note(note) => {
                    let mut notes =
                        self.notes.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                    *notes.entry(note).or_default() += 1;
                }
            }
        }
    }

    fn tell(&self, xid: Xid, heard: Heard) {
        if let Some(session) = self.sessions.get(&xid) {
            // If the session is gone, it has already asked for a rollback.
            let _ = session.send(heard);
        }
    }
}

enum AgentEvent {
    Message(NodeId, ToAgent<Sql>),
    Peer(PeerRollback),
    Source(FromSource<Sql>),
}

/// A running agent. Dropping the last handle acts as a crash.
pub(crate) struct AgentHost {
    inbox: Arc<Inbox<AgentEvent>>,
    /// The driver of its source.
    pub(crate) source: Arc<Source>,
}

impl Drop for AgentHost {
    fn drop(&mut self) {
        self.inbox.close();
    }
}

impl AgentHost {
    /// Starts an agent for the source that `connect` makes; `connect` gets the function that
    /// reports to the agent.
    pub(crate) fn start(
        node: NodeId,
        config: agent::Config,
        connect: impl FnOnce(Box<dyn Fn(FromSource<Sql>) + Send + Sync>) -> Arc<Source>,
        to_middleware: impl Fn(NodeId, FromAgent<Sql>) + Send + 'static,
        to_peer: impl Fn(NodeId, PeerRollback) + Send + 'static,
    ) -> std::io::Result<Self> {
        let inbox: Arc<Inbox<AgentEvent>> = Arc::default();
        let reports = inbox.clone();
        let source = connect(Box::new(move |from| {
            reports.push(AgentEvent::Source(from));
        }));
        let driver = AgentDriver {
            node,
            clocks: Clocks::new(),
            inbox: inbox.clone(),
            timers: Timers(OrdMap::new()),
            source: source.clone(),
            to_middleware: Box::new(to_middleware),
            to_peer: Box::new(to_peer),
        };
        let runtime = Handle::current();
        std::thread::Builder::new().name(format!("agent-{node}")).spawn(move || {
            let _entered = runtime.enter();
            driver.run(config);
        })?;
        Ok(Self { inbox, source })
    }

    pub(crate) fn deliver(&self, from: NodeId, msg: ToAgent<Sql>) {
        self.inbox.push(AgentEvent::Message(from, msg));
    }

    pub(crate) fn peer(&self, msg: PeerRollback) {
        self.inbox.push(AgentEvent::Peer(msg));
    }
}

struct AgentDriver {
    node: NodeId,
    clocks: Clocks,
    inbox: Arc<Inbox<AgentEvent>>,
    timers: Timers<AgentTimer>,
    source: Arc<Source>,
    to_middleware: Box<dyn Fn(NodeId, FromAgent<Sql>) + Send>,
    to_peer: Box<dyn Fn(NodeId, PeerRollback) + Send>,
}

impl AgentDriver {
    fn run(mut self, config: agent::Config) {
        // The physical clock is the only available number that differs after a restart.
        let life = Clocks::physical().0;
        let mut rng = Rng::stream(life, "agent", u64::from(self.node.0));
        let mut effects = Vec::new();
        let mut io = Io {
            now: self.clocks.now(),
            clock: Clocks::physical(),
            rng: &mut rng,
            effects: &mut effects,
        };
        let mut agent = Agent::new(config, life, &mut io);
        self.carry_out(&mut effects);
        let mut events = Vec::new();
        loop {
            let deadline = self.timers.next().and_then(|time| self.clocks.instant(time));
            if !self.inbox.drain(&mut events, BATCH, deadline) {
                error!(agent = %self.node, "stopped");
                return;
            }
            let now = self.clocks.now();
            let mut io =
                Io { now, clock: Clocks::physical(), rng: &mut rng, effects: &mut effects };
            for event in events.drain(..) {
                match event {
                    AgentEvent::Message(from, msg) => agent.on_message(from, msg, &mut io),
                    AgentEvent::Peer(msg) => agent.on_peer(msg, &mut io),
                    AgentEvent::Source(from) => agent.on_source(from, &mut io),
                }
            }
            for timer in self.timers.due(now) {
                agent.on_timer(timer, &mut io);
            }
            self.carry_out(&mut effects);
        }
    }

    fn carry_out(&mut self, effects: &mut Vec<AgentEffect<Sql>>) {
        for effect in effects.drain(..) {
            halt::before_agents(&effect);
            match effect {
                AgentEffect::Send { to, msg } => (self.to_middleware)(to, msg),
                AgentEffect::Peer { to, msg } => (self.to_peer)(to, msg),
                AgentEffect::Source(order) => self.source.order(order),
                AgentEffect::SetTimer(timer, at) => {
                    self.timers.0.insert(timer, at);
                }
                AgentEffect::Note(_) => {}
            }
        }
    }
}
