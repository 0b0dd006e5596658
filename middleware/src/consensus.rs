//! `scalardb` and `scalardb+` in the proxy: runs the machine of [`orthodrome_geotp::scalardb`] in
//! real time, over sources that [`records`] addresses in SQL.
//!
//! The machine controls concurrency: it reads versions, prepares, validates, writes transaction
//! states and ends abandoned transactions. It knows nothing of SQL. The sources evaluate a client's
//! statements in transactions that are rolled back. A statement runs after the versions of all
//! records that it names have been read, and after all earlier writes of the transaction. Its
//! result is valid if those versions are unchanged at the commit, which the machine checks.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use orthodrome_core::cluster::{Node, Partition, Partitioning, Role};
use orthodrome_core::host::Output;
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::store::MemoryEngine;
use orthodrome_core::topology::Topology;
use orthodrome_core::txn::{AbortReason, Writes};
use orthodrome_core::workers::Alone;
use orthodrome_core::{
    ClientId, Clock, Cluster, Decision, Duration, Host, Input, Key, NodeId, Outcome, PartitionId,
    Protocol as _, RegionId, Rng, Setup, Txn, TxnId, Value,
};
use orthodrome_geotp::contract::{Failure, Last, Reason, Xid};
use orthodrome_geotp::scalardb::{self, Msg, ScalarDb};
use orthodrome_geotp::sql::{Answer, Dialect};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tracing::warn;

use super::driver::{Outcome as Told, Sql, Trouble};
use super::host::{BATCH, Clocks, Heard};
use super::names;
use super::records::{self, Text};
use super::source::Source;
use orthodrome_server::inbox::Inbox;

/// Time limit of a request, in addition to its round trip and a wait for a lock. After it, the
/// request is sent again.
const PATIENCE: Duration = Duration::from_secs(1);

/// A statement at one source.
#[derive(Clone, Debug)]
pub(crate) struct Order {
    /// The SQL for the source.
    pub(crate) text: String,
    /// All the rows that it reads or changes: tables, and keys in them.
    pub(crate) rows: Vec<(String, String)>,
    /// True if it changes these rows.
    pub(crate) is_write: bool,
}

impl Order {
    /// Its rows as keys of the machine, at the source with that number.
    fn keys(&self, place: u16) -> impl Iterator<Item = Key> {
        self.rows.iter().map(move |(table, key)| records::key(place, names::name(table, key)))
    }
}

/// A source of the machine.
pub(crate) struct Store {
    pub(crate) source: Arc<Source>,
    pub(crate) kind: Dialect,
    /// An emulated round trip.
    pub(crate) rtt: std::time::Duration,
}

enum Event {
    Begin(mpsc::UnboundedSender<Heard>, oneshot::Sender<Xid>),
    Round(Xid, OrdMap<NodeId, Vec<Order>>, Last),
    Commit(Xid),
    Rollback(Xid),
    Message(NodeId, Msg),
    Evaluated(Evaluated),
}

/// The results of a round's statements at a source.
struct Evaluated {
    txn: TxnId,
    round: u64,
    at: NodeId,
    found: Result<Vec<Answer>, Failure<Sql>>,
    /// The versions that were requested together with the statements, read before these ran.
    versions: Option<Msg>,
}

/// A running middleware. Dropping it acts as a crash: other transactions that find its prepared
/// records end them.
pub(crate) struct Consensus {
    inbox: Arc<Inbox<Event>>,
    notes: Arc<Mutex<OrdMap<scalardb::Note, u64>>>,
}

impl Drop for Consensus {
    fn drop(&mut self) {
        self.inbox.close();
    }
}

impl Consensus {
    /// Starts in the caller's runtime. `node` is the proxy, `name` the variant, `lock_wait` the
    /// lock time-out of statements.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(crate) fn start(
        node: NodeId,
        name: &str,
        lock_wait: std::time::Duration,
        stores: OrdMap<NodeId, Store>,
    ) -> std::io::Result<Self> {
        let inbox: Arc<Inbox<Event>> = Arc::default();
        let notes = Arc::default();
        let cluster = map(&stores).map_err(std::io::Error::other)?;
        let mut config = ScalarDb::configure(&cluster, name);
        config.resend_after += lock_wait + PATIENCE;
        let clocks = Clocks::new();
        // Microseconds and the proxy's number, so that no two incarnations of any proxies share
        // transaction ids.
        let client = (Clocks::physical().0 / 1_000) << 10 | u64::from(node.0 & 1_023);
        let setup = Setup {
            node,
            cluster: Arc::new(cluster),
            config: Arc::new(config),
            engine: Box::new(MemoryEngine::default()),
            workers: Arc::new(Alone),
            is_replacement: false,
        };
        let rng = Rng::stream(client, "scalardb", u64::from(node.0));
        let host = Host::start(setup, Vec::new(), rng, clocks.now(), clock());
        let driver = Driver {
            node,
            client: ClientId(client),
            clocks,
            inbox: inbox.clone(),
            places: (0..).zip(stores.keys()).map(|(place, node)| (*node, place)).collect(),
            stores: stores.into_iter().map(|(node, store)| (node, Arc::new(store))).collect(),
            open: OrdMap::new(),
            last: 0,
            notes: Arc::clone(&notes),
        };
        let runtime = Handle::current();
        std::thread::Builder::new().name("middleware".into()).spawn(move || {
            let _entered = runtime.enter();
            driver.run(host);
        })?;
        Ok(Self { inbox, notes })
    }

    /// Begins a transaction; its results arrive at the receiver.
    pub(crate) async fn begin(&self) -> Option<(Xid, mpsc::UnboundedReceiver<Heard>)> {
        let (hears, hearing) = mpsc::unbounded_channel();
        let (reply, named) = oneshot::channel();
        self.inbox.push(Event::Begin(hears, reply));
        Some((named.await.ok()?, hearing))
    }

    /// Runs the next statements of a transaction.
    pub(crate) fn round(&self, xid: Xid, orders: OrdMap<NodeId, Vec<Order>>, last: Last) {
        self.inbox.push(Event::Round(xid, orders, last));
    }

    /// Commits a transaction.
    pub(crate) fn commit(&self, xid: Xid) {
        self.inbox.push(Event::Commit(xid));
    }

    /// Rolls a transaction back.
    pub(crate) fn rollback(&self, xid: Xid) {
        self.inbox.push(Event::Rollback(xid));
    }

    /// Counts of rare events so far.
    pub(crate) fn notes(&self) -> OrdMap<scalardb::Note, u64> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// The machine's placement: the proxy's region, one region for each source, and a range of keys for
/// each.
fn map(stores: &OrdMap<NodeId, Store>) -> Result<Cluster, String> {
    let rtts: Vec<std::time::Duration> = stores.values().map(|store| store.rtt).collect();
    let rtt = |a: u16, b: u16| {
        let far = |region: u16| {
            region
                .checked_sub(1)
                .and_then(|at| rtts.get(usize::from(at)))
                .copied()
                .unwrap_or_default()
        };
        Duration::from(far(a) + far(b))
    };
    let count = u16::try_from(stores.len()).map_err(|_| "there are too many sources".to_owned())?;
    let topology = Topology::from_fn(count + 1, Duration::ZERO, rtt);
    let nodes = (1..).zip(stores.keys()).map(|(region, id)| Node {
        id: *id,
        region: RegionId(region),
        role: Role::Server,
    });
    let partitions = (0..).zip(stores.keys()).map(|(id, node)| Partition {
        id: PartitionId(id),
        replicas: vec![*node],
        preferred_leader: *node,
    });
    let starts = (0..count)
        .map(|place| (records::first_key(place), PartitionId(u32::from(place))))
        .collect();
    Cluster::new(topology, 1, nodes, partitions, Partitioning::Range { starts })
        .map_err(|error| error.to_string())
}

/// Clocks of other proxies matter only when a prepared record is found, and then seconds suffice.
fn clock() -> Clock {
    Clock { now: Clocks::physical(), error: Duration::ZERO }
}

type Machine = Host<ScalarDb, scalardb::Client>;

struct Driver {
    node: NodeId,
    client: ClientId,
    clocks: Clocks,
    inbox: Arc<Inbox<Event>>,
    stores: OrdMap<NodeId, Arc<Store>>,
    /// Each source's number in the order of keys.
    places: OrdMap<NodeId, u16>,
    open: OrdMap<TxnId, Open>,
    last: u64,
    notes: Arc<Mutex<OrdMap<scalardb::Note, u64>>>,
}

/// A transaction.
struct Open {
    hears: mpsc::UnboundedSender<Heard>,
    is_begun: bool,
    /// Records whose versions it has requested.
    known: OrdSet<Key>,
    /// Its writing statements so far.
    redo: OrdMap<NodeId, Vec<String>>,
    /// The records that it has written.
    written: OrdMap<NodeId, OrdSet<Key>>,
    round: Option<Round>,
    rounds: u64,
    failure: Option<(NodeId, Failure<Sql>)>,
}

/// Statements that are running.
struct Round {
    orders: OrdMap<NodeId, Vec<Order>>,
    /// Records whose versions are not known yet. The statements of a source are sent with the
    /// request for the last of its versions.
    left: OrdMap<NodeId, OrdSet<Key>>,
    answers: OrdMap<NodeId, Vec<Answer>>,
    /// Sources that are running statements: their next answers include the versions.
    busy: OrdSet<NodeId>,
    /// True if the machine has all versions.
    is_read: bool,
    commits: bool,
}

impl Driver {
    fn run(mut self, mut host: Machine) {
        let mut events = Vec::new();
        loop {
            let deadline = host.next_deadline().and_then(|time| self.clocks.instant(time));
            if !self.inbox.drain(&mut events, BATCH, deadline) {
                return;
            }
            for event in events.drain(..) {
                self.take(event, &mut host);
                self.carry_out(&mut host);
            }
            let now = self.clocks.now();
            host.fire(now, clock());
            host.flush(now, clock());
            self.carry_out(&mut host);
        }
    }

    fn step(&self, input: Input<ScalarDb>, host: &mut Machine) {
        let now = self.clocks.now();
        host.step(now, clock(), input);
        host.flush(now, clock());
    }

    fn xid(&self, txn: TxnId) -> Xid {
        Xid { middleware: self.node, epoch: txn.client.0, number: txn.counter }
    }

    fn txn(&self, xid: Xid) -> TxnId {
        TxnId::new(ClientId(xid.epoch), xid.number)
    }

    fn take(&mut self, event: Event, host: &mut Machine) {
        match event {
            Event::Begin(hears, reply) => {
                self.last += 1;
                let txn = TxnId::new(self.client, self.last);
                let open = Open {
                    hears,
                    is_begun: false,
                    known: OrdSet::new(),
                    redo: OrdMap::new(),
                    written: OrdMap::new(),
                    round: None,
                    rounds: 0,
                    failure: None,
                };
                if reply.send(self.xid(txn)).is_ok() {
                    self.open.insert(txn, open);
                }
            }
            Event::Round(xid, orders, last) => self.round(self.txn(xid), orders, last, host),
            Event::Commit(xid) => self.commit(self.txn(xid), host),
            Event::Rollback(xid) => self.rollback(self.txn(xid), host),
            Event::Message(from, msg) => self.step(Input::Message { from, msg }, host),
            Event::Evaluated(mut evaluated) => {
                if let Some(msg) = evaluated.versions.take() {
                    self.step(Input::Message { from: evaluated.at, msg }, host);
                    self.carry_out(host);
                }
                self.on_evaluated(evaluated, host);
            }
        }
    }

    fn round(
        &mut self,
        txn: TxnId,
        orders: OrdMap<NodeId, Vec<Order>>,
        last: Last,
        host: &mut Machine,
    ) {
        let place_of = |node: &NodeId| self.places.get(node).copied().unwrap_or_default();
        let Some(open) = self.open.get_mut(&txn) else { return };
        let mut left: OrdMap<NodeId, OrdSet<Key>> = OrdMap::new();
        for (node, orders) in &orders {
            let keys = orders.iter().flat_map(|order| order.keys(place_of(node)));
            left.insert(*node, keys.filter(|key| !open.known.contains(key)).collect());
        }
        let new: Vec<Key> = left.values().flatten().cloned().collect();
        open.known.extend(new.iter().cloned());
        // Their versions are known, so these statements can run.
        let known: Vec<NodeId> =
            left.iter().filter(|(_, keys)| keys.is_empty()).map(|(node, _)| *node).collect();
        open.rounds += 1;
        open.round = Some(Round {
            orders,
            left,
            answers: OrdMap::new(),
            busy: OrdSet::new(),
            is_read: false,
            commits: last == Last::Commit,
        });
        let is_begun = std::mem::replace(&mut open.is_begun, true);
        for node in known {
            self.evaluate(txn, node, None);
        }
        let input = if is_begun {
            Input::Read { txn, keys: new }
        } else {
            Input::Begin(Txn::general(txn, RegionId(0), new))
        };
        self.step(input, host);
    }

    /// Runs statements of the current round at a source, with a request for versions if they go
    /// together.
    fn evaluate(&mut self, txn: TxnId, node: NodeId, request: Option<Msg>) {
        let Some(open) = self.open.get_mut(&txn) else { return };
        let (Some(round), Some(store)) = (&mut open.round, self.stores.get(&node)) else { return };
        round.busy.insert(node);
        let keys = match &request {
            Some(Msg::Read { keys, .. }) => keys.clone(),
            _ => Vec::new(),
        };
        let orders = round.orders.get(&node).cloned().unwrap_or_default();
        let own: Vec<String> = orders.into_iter().map(|order| order.text).collect();
        let redo = open.redo.get(&node).cloned().unwrap_or_default();
        let text = records::evaluate(store.kind, &keys, &redo, &own);
        let (number, store, inbox) = (open.rounds, store.clone(), self.inbox.clone());
        tokio::spawn(async move {
            let told = match transact(&store, &text).await {
                Ok(told) => told,
                Err(trouble) => {
                    warn!(source = %node, %txn, "cannot execute statements: {trouble}");
                    let found = Err(Reason::Connection.into());
                    let evaluated =
                        Evaluated { txn, round: number, at: node, found, versions: None };
                    inbox.push(Event::Evaluated(evaluated));
                    return;
                }
            };
            let answers = told.done.iter().skip(text.own).take(own.len());
            let answers: Vec<Answer> = answers.map(|(answer, _)| answer.clone()).collect();
            let found = match &told.fault {
                // The transaction's earlier writes cannot be repeated any more.
                Some(_) if told.done.len() < text.own => Err(Reason::Serialization.into()),
                Some(fault) => Err(store.source.failure(fault.clone())),
                None => Ok(answers),
            };
            // The versions were read before the failure.
            let versions = request
                .as_ref()
                .and_then(|request| records::hear(request, &text, &Told { fault: None, ..told }));
            let evaluated = Evaluated { txn, round: number, at: node, found, versions };
            inbox.push(Event::Evaluated(evaluated));
        });
    }

    fn on_evaluated(&mut self, evaluated: Evaluated, host: &mut Machine) {
        let Evaluated { txn, round: number, at, found, .. } = evaluated;
        let Some(open) = self.open.get_mut(&txn) else { return };
        let Some(round) = open.round.as_mut().filter(|_| open.rounds == number) else { return };
        round.busy.remove(&at);
        match found {
            Ok(answers) => {
                round.answers.insert(at, answers);
                self.complete(txn, host);
            }
            Err(failure) if failure.reason == Reason::Statement && round.is_read => {
                open.round = None;
                // If the session is gone, it has already asked for a rollback.
                let _ = open.hears.send(Heard::StatementFailed(at, failure));
            }
            Err(failure) => {
                open.failure = Some((at, failure));
                self.step(Input::Decide { txn, decision: Decision::Abort }, host);
            }
        }
    }

    /// Answers the session's round if it is complete.
    fn complete(&mut self, txn: TxnId, host: &mut Machine) {
        let Some(open) = self.open.get_mut(&txn) else { return };
        let Some(round) =
            open.round.take_if(|round| round.is_read && round.answers.len() == round.orders.len())
        else {
            return;
        };
        for (node, orders) in &round.orders {
            let place = self.places.get(node).copied().unwrap_or_default();
            for order in orders.iter().filter(|order| order.is_write) {
                open.redo.entry(*node).or_default().push(order.text.clone());
                open.written.entry(*node).or_default().extend(order.keys(place));
            }
        }
        // As above.
        let _ = open.hears.send(Heard::Answers(round.answers));
        if round.commits {
            self.commit(txn, host);
        }
    }

    fn commit(&mut self, txn: TxnId, host: &mut Machine) {
        let Some(open) = self.open.get(&txn) else { return };
        let mut writes = Writes::new();
        for (node, keys) in &open.written {
            // The message about the first record of a source contains all statements for that
            // source.
            let redo = open.redo.get(node).map(|redo| redo.join(";\n"));
            let texts = redo.into_iter().chain(std::iter::repeat(String::new()));
            let write = |(key, text): (&Key, String)| (key.clone(), Some(Value(Bytes::from(text))));
            writes.extend(keys.iter().zip(texts).map(write));
        }
        self.step(Input::Decide { txn, decision: Decision::Commit(writes) }, host);
    }

    fn rollback(&mut self, txn: TxnId, host: &mut Machine) {
        let Some(open) = self.open.get(&txn) else { return };
        if open.is_begun {
            self.step(Input::Decide { txn, decision: Decision::Abort }, host);
        } else {
            self.finish(txn, Outcome::Aborted(AbortReason::Client));
        }
    }

    fn carry_out(&mut self, host: &mut Machine) {
        let mut read = Vec::new();
        for output in host.drain().collect::<Vec<_>>() {
            match output {
                Output::Send { to, msg } => self.send(to, msg),
                Output::Reads { txn, .. } => {
                    if let Some(round) =
                        self.open.get_mut(&txn).and_then(|open| open.round.as_mut())
                    {
                        round.is_read = true;
                        read.push(txn);
                    }
                }
                Output::Finish { txn, outcome, .. } => self.finish(txn, outcome),
                Output::Note(note) => {
                    let mut notes = self.notes.lock().unwrap_or_else(PoisonError::into_inner);
                    *notes.entry(note).or_default() += 1;
                }
                Output::Claim(_) => {}
                Output::Persist { .. } | Output::Checkpoint { .. } => {
                    unreachable!("this middleware keeps nothing")
                }
            }
        }
        if !read.is_empty() {
            for txn in read {
                self.complete(txn, host);
            }
            self.carry_out(host);
        }
    }

    fn finish(&mut self, txn: TxnId, outcome: Outcome) {
        let Some(open) = self.open.remove(&txn) else { return };
        let failure = open.failure.or_else(|| match outcome {
            Outcome::Aborted(AbortReason::Conflict | AbortReason::StaleRead) => {
                Some((NodeId(0), Reason::Peer.into()))
            }
            Outcome::Aborted(AbortReason::Overload) => Some((NodeId(0), Reason::Refused.into())),
            Outcome::Aborted(_) | Outcome::Committed(_) | Outcome::Unknown => None,
        });
        // As above.
        let _ = open.hears.send(Heard::Finished(outcome, failure));
    }

    fn send(&mut self, to: NodeId, msg: Msg) {
        if let Msg::Read { txn, keys, .. } = &msg
            && let Some(round) = self.open.get_mut(txn).and_then(|open| open.round.as_mut())
            && let Some(left) = round.left.get_mut(&to)
        {
            // During a round, versions are requested for the round's statements.
            left.retain(|key| !keys.contains(key));
            if left.is_empty() && round.busy.contains(&to) {
                // The request has been sent before, and the answer is pending.
                return;
            }
            if left.is_empty() && !round.answers.contains_key(&to) {
                self.evaluate(*txn, to, Some(msg.clone()));
                return;
            }
        }
        let Some(store) = self.stores.get(&to).cloned() else { return };
        let own = match &msg {
            Msg::Commit { txn, .. } => {
                let open = self.open.get(txn).and_then(|open| open.redo.get(&to));
                open.map(|redo| redo.join(";\n"))
            }
            _ => None,
        };
        let inbox = self.inbox.clone();
        tokio::spawn(async move {
            match answer(&store, &msg, own).await {
                Ok(Some(answer)) => drop(inbox.push(Event::Message(to, answer))),
                // The request will be sent again.
                Ok(None) => {}
                Err(trouble) => warn!(source = %to, "no answer: {trouble}"),
            }
        });
    }
}

/// Runs a query batch, after creating the tables if they do not exist.
async fn transact(store: &Store, text: &Text) -> Result<Told, Trouble> {
    let told = store.source.transact(&text.text()).await?;
    if told.fault.as_ref().is_none_or(|fault| !records::wants_tables(fault)) {
        return Ok(told);
    }
    // Another proxy may be creating them too.
    let made = store.source.transact(&records::tables(store.kind)).await?;
    if let Some(fault) = made.fault {
        warn!("cannot create the tables of records: {}", fault.message);
    }
    store.source.transact(&text.text()).await
}

/// The answer of a source to a message. `own` has the committing transaction's writes there, if it
/// is this proxy's.
async fn answer(store: &Store, msg: &Msg, own: Option<String>) -> Result<Option<Msg>, Trouble> {
    let text = match (records::say(store.kind, msg), msg) {
        (Some(text), _) => text,
        (None, Msg::Commit { request, txn, at, .. }) => {
            let redo = match own {
                Some(redo) => Some(redo),
                None => {
                    let told = store.source.transact(&records::redo_of(*txn)).await?;
                    if told.fault.is_some() {
                        return Ok(None);
                    }
                    match told.done.first().and_then(|(answer, _)| answer.rows.first()) {
                        None => None,
                        Some(row) => match records::decode_redo(row) {
                            Some(redo) => Some(redo),
                            None => {
                                warn!(%txn, "cannot read its prepared records, so it cannot be ended");
                                return Ok(None);
                            }
                        },
                    }
                }
            };
            let Some(redo) = redo else { return Ok(Some(Msg::Ended { request: *request })) };
            records::commit(store.kind, *txn, *at, &redo)
        }
        (None, _) => return Ok(None),
    };
    let told = transact(store, &text).await?;
    let heard = records::hear(msg, &text, &told);
    if let Some(fault) = told.fault.as_ref().filter(|fault| !records::is_guard(fault)) {
        warn!("{}: {}", orthodrome_core::Message::kind(msg), fault.message);
    }
    Ok(heard)
}
