//! The server side: a replica of every stream, the merge, the data, and the gateways' transactions.

mod exchange;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::mem::take;
use std::sync::Arc;

use orthodrome_core::Wire as _;
use orthodrome_core::cluster::Cluster;
use orthodrome_core::digest::Digest;
use orthodrome_core::id::{NodeId, PartitionId, RegionId, Ticket, TxnId};
use orthodrome_core::machine::{
    Admin, Claim, GroupView, Input, Leak, Machine, MembershipOrder, Message as _, Refusal,
    ReplicaDigest, Setup,
};
use orthodrome_core::rng::Rng;
use orthodrome_core::store::{Store, Versions};
use orthodrome_core::time::{Duration, Time, Timestamp};
use orthodrome_core::txn::{Key, Reads, Value, Version};

use self::exchange::Exchange;
use super::checks::Span;
use super::message::{Chunk, Command, Due, Image, Log, Msg, Name, Record, Sequenced};
use super::placement::Placement;
use super::sequencer::{Sequencer, View};
use super::state::{Applied, Leaving, Settings, State, visible};
use super::{Config, Cx, Deterministic, Note, Ordering, Timer};
use crate::checkpoint::CheckpointPace;
use crate::functor::Functor;
use crate::hosting::{change_refusal, group_view, transfer_refusal};
use crate::replication::{self, Event, Group, Index, Payload, Replica};
use crate::routes::Routes;
use crate::waiting::RetryState;

/// A table of the server's own in its store: the number of the checkpoint that the data is of.
const OWN: PartitionId = PartitionId(u32::MAX);

/// The names of shares where partitions are asked for: from here downwards.
const SHARES: PartitionId = PartitionId(u32::MAX - 2);

/// What is sent again is counted by such windows, see [`Again`].
const AGAIN_WINDOW: Duration = Duration::from_millis(250);
/// In a window, at least so many may be sent again, and at most.
const AGAIN: std::ops::RangeInclusive<usize> = 4..=1_024;
/// How often streams tell each other what clients know. It takes a look at everything that they remember.
const ACKNOWLEDGE_AFTER: Duration = Duration::from_secs(1);
/// None is sent again more often than this in the long run, unless settings say so.
const AGAIN_AFTER: Duration = Duration::from_secs(4);

/// Time to send a transaction again: after `timeout` at first, then after twice as long each time.
fn is_due(asked: &RetryState, timeout: Duration, now: Time) -> bool {
    let wait = (timeout * (1 << asked.times.min(10))).min(AGAIN_AFTER.max(timeout));
    now.since(asked.at) >= wait
}

/// How many transactions may be sent again: twice as many as ran in the window before, and a few. A link
/// that carries no more must not be filled with what it has carried already, nor what is slow be made
/// slower.
#[derive(Debug)]
struct Again {
    since: Time,
    most: usize,
    ran: usize,
    forwarded: usize,
    asked: usize,
}

impl Again {
    fn new(now: Time) -> Self {
        Self { since: now, most: *AGAIN.start(), ran: 0, forwarded: 0, asked: 0 }
    }

    /// Begins a new window, if it is time.
    fn turn(&mut self, now: Time) {
        if now.since(self.since) >= AGAIN_WINDOW {
            let most = (2 * self.ran).clamp(*AGAIN.start(), *AGAIN.end());
            *self = Self { most, ..Self::new(now) };
        }
    }
}

/// What survived of each stream's log.
type Logs = BTreeMap<PartitionId, Vec<replication::Record<Log>>>;

/// One server.
#[derive(Debug)]
pub struct Server {
    node: NodeId,
    cluster: Arc<Cluster>,
    config: Arc<Config>,
    placement: Placement,
    streams: BTreeMap<PartitionId, Stream>,
    state: State,
    store: Store,
    routes: Routes,
    /// Transactions that gateways wait for.
    waiting: BTreeMap<TxnId, Waiting>,
    waiting_bytes: usize,
    /// When transactions were last forwarded that are in one stream and not in another.
    forwarded: BTreeMap<Name, RetryState>,
    again: Again,
    /// When streams last told each other what clients know.
    acknowledged_at: Time,
    /// When servers last told each other what their copies came to.
    compared_at: Time,
    /// Messages to this server itself.
    local: VecDeque<Msg>,
    exchange: Exchange,
    disk: Disk,
}

/// One stream's replica.
#[derive(Debug)]
struct Stream {
    replica: Replica<Log>,
    sequencer: Sequencer,
    /// As the leader, this server said that so much is chosen.
    announced: Index,
    /// A snapshot that is arriving in pieces.
    staged: Option<Chunk>,
    /// The data of snapshots that are leaving in pieces, as of their first.
    leaving: BTreeMap<NodeId, Arc<Leaving>>,
}

/// A transaction that a gateway waits for.
#[derive(Debug)]
struct Waiting {
    gateway: NodeId,
    entry: Arc<Sequenced>,
    asked: RetryState,
}

impl Waiting {
    fn size(&self) -> usize {
        self.entry.functor.size()
    }
}

/// The images that survived, by their numbers, and each stream's log.
fn read(node: NodeId, recovered: Vec<Record>) -> (BTreeMap<u64, Image>, Logs) {
    let mut images = BTreeMap::from([(0, Image::default())]);
    let mut logs: Logs = BTreeMap::new();
    for record in recovered {
        match record {
            Record::Image(image) if image.piece == 0 => {
                images.insert(image.number, Image::clone(&image));
            }
            Record::Image(next) => match images.get_mut(&next.number) {
                Some(image) => image.add(&next),
                None => {
                    panic!("{node}: piece {} of image {} comes first", next.piece, next.number)
                }
            },
            Record::Replication(stream, record) => {
                logs.entry(stream).or_default().push(record);
            }
        }
    }
    (images, logs)
}

/// What of the settings concerns a server's state.
fn settings(node: NodeId, cluster: &Cluster, config: &Config) -> Settings {
    let Config { outcomes, compared_entries, mutations, .. } = *config;
    let first = cluster.servers().map(|server| server.id).min();
    let loses_writes = mutations.loses_writes() && first == Some(node);
    Settings { outcomes, compared_entries, mutations, loses_writes }
}

/// What was persisted, and who has something to say.
#[derive(Debug, Default)]
struct Disk {
    /// When the next checkpoint is due.
    pace: CheckpointPace,
    /// Streams whose logs may hold events.
    touched: BTreeSet<PartitionId>,
    /// Streams whose logs may hold messages to be sent together.
    unflushed: BTreeSet<PartitionId>,
    /// The checkpoint under way.
    checkpoint: Option<Ticket>,
    /// Streams by which another's state came, since the last checkpoint.
    installed: BTreeSet<PartitionId>,
    /// The same, before the checkpoint under way.
    settling: BTreeSet<PartitionId>,
}

/// A log's way out.
struct Io<'a, 'b> {
    stream: PartitionId,
    disk: &'a mut Disk,
    cx: &'a mut Cx<'b>,
}

impl replication::Io<Log> for Io<'_, '_> {
    fn now(&self) -> Time {
        self.cx.now()
    }

    fn rng(&mut self) -> &mut Rng {
        self.cx.rng()
    }

    fn send(&mut self, to: NodeId, message: replication::Message<Log>) {
        self.cx.send(to, Msg::Replication { partition: self.stream, message });
    }

    fn persist(&mut self, record: replication::Record<Log>) -> Ticket {
        self.disk.pace.wrote(record.size());
        self.cx.persist(Record::Replication(self.stream, record))
    }

    fn set_timer(&mut self, timer: replication::Timer, at: Time) {
        self.cx.set_timer(Timer::Replication(self.stream, timer), at);
    }

    fn cancel_timer(&mut self, timer: replication::Timer) {
        self.cx.cancel_timer(Timer::Replication(self.stream, timer));
    }
}

impl Machine<Deterministic> for Server {
    fn new(setup: Setup<Deterministic>, recovered: Vec<Record>, cx: &mut Cx<'_>) -> Self {
        let Setup { node, cluster, config, engine, workers } = setup;
        let store = Store::new(engine);
        let (images, mut logs) = read(node, recovered);
        // The data says which checkpoint it is of.
        let number = store.read(OWN, &Key::default()).version.timestamp.0;
        let Some(image) = images.get(&number).filter(|image| image.is_whole()) else {
            panic!("{node}: the data is of checkpoint {number}, and there is no image of that")
        };
        if images.len() > 2 {
            cx.note(Note::CheckpointCutShort);
        }
        let placement = Placement::new(cluster.clone(), config.ordering).seen_by(node);
        let is_new = image.number == 0;
        assert!(
            is_new || image.shares == placement.share_count(),
            "{node}: the data is of a copy in {} shares, not in {}; a data directory keeps its shares",
            image.shares.max(1),
            placement.share_count().max(1)
        );
        let mut exchange = Exchange::new(node, &cluster, config.ask_after, cx.now());
        exchange.restore(image);
        let settings = settings(node, &cluster, &config);
        let mut server = Self {
            node,
            routes: Routes::new(cluster.clone()),
            state: State::new(image, &placement, settings, workers, cx.now()),
            streams: BTreeMap::new(),
            waiting: BTreeMap::new(),
            waiting_bytes: 0,
            forwarded: BTreeMap::new(),
            again: Again::new(cx.now()),
            acknowledged_at: cx.now(),
            compared_at: cx.now(),
            local: VecDeque::new(),
            exchange,
            disk: Disk::default(),
            cluster,
            config,
            placement,
            store,
        };
        for stream in server.placement.streams() {
            let log = logs.remove(&stream).unwrap_or_default();
            server.open(stream, log, cx);
        }
        cx.set_timer(Timer::Sweep, cx.now() + server.config.sweep_interval);
        if server.placement.is_divided() {
            // What was due when the checkpoint was made.
            let mut applied = Applied::default();
            applied.due.extend(server.state.shares.due().map(Due::turn));
            server.state.run_due(&mut applied, &server.placement, &mut server.store);
            server.answer(applied, cx);
        }
        server.settle(cx);
        server
    }

    fn step(&mut self, input: Input<Deterministic>, cx: &mut Cx<'_>) {
        match input {
            Input::Message { from, msg } => self.on_message(from, msg, cx),
            Input::Timer(Timer::Replication(stream, timer)) => {
                self.with(stream, cx, |held, io| held.replica.on_timer(timer, io));
            }
            Input::Timer(Timer::Release(stream)) => self.on_release_timeout(stream, cx),
            Input::Timer(Timer::Sweep) => self.on_sweep_timeout(cx),
            Input::Durable(ticket) => self.on_durable(ticket, cx),
            Input::Admin(admin) => self.on_admin(admin, cx),
            Input::Timer(Timer::Open(_))
            | Input::Begin(_)
            | Input::Read { .. }
            | Input::Decide { .. }
            | Input::Resolve { .. } => unreachable!("callers talk to gateways, not to servers"),
        }
        self.settle(cx);
    }

    fn flush(&mut self, cx: &mut Cx<'_>) {
        self.flush_streams(cx);
        if self.placement.orderer().is_some() {
            // What an orderer of this server has just ordered goes on into the server's other streams.
            self.flush_streams(cx);
        }
        self.settle(cx);
        self.flush_exchange(cx);
        self.checkpoint_if_due(cx);
    }

    fn assert_invariants(&self) {
        for (stream, held) in &self.streams {
            held.replica.assert_invariants();
            let (applied, surfaced) = (self.state.applied(*stream), held.replica.surfaced_index());
            assert!(
                applied >= surfaced || self.exchange.has_gap(*stream),
                "{stream}: {surfaced} was surfaced, {applied} is merged"
            );
        }
        self.state.merge.assert_invariants();
        self.state.shares.assert_invariants();
        self.state.ended.assert_invariants();
        let waiting: usize = self.waiting.values().map(Waiting::size).sum();
        assert_eq!(waiting, self.waiting_bytes, "what gateways wait for is not counted");
        let (largest, most) = (self.state.merge.largest(), self.component_max());
        assert!(largest <= most, "S1: {largest} transactions in one component, not {most}");
        assert!(self.local.is_empty(), "{} left messages to itself", self.node);
    }

    fn leaks(&self) -> Vec<Leak> {
        let sequencing = self.streams.values().map(|held| held.sequencer.len()).sum();
        vec![
            ("transactions that have not run", self.state.merge.len()),
            ("transactions that gateways wait for", self.waiting.len()),
            ("transactions to be sequenced", sequencing),
            ("transactions that wait for other shares", self.state.shares.len()),
            ("logs that begin after the state", usize::from(self.exchange.has_gaps())),
        ]
    }

    fn orders(&self) -> Vec<MembershipOrder> {
        self.streams.iter().flat_map(|(&stream, held)| held.replica.orders(stream)).collect()
    }

    fn refusal(&self, order: &Admin) -> Option<Refusal> {
        let Some(held) = self.streams.get(&order.partition()) else {
            return Some(Refusal::NotLeader(self.routes.learnt_leader(order.partition())));
        };
        match order {
            Admin::TransferLeader { to, .. } => transfer_refusal(&held.replica, *to),
            Admin::ChangeMembers { voters, .. } => change_refusal(&held.replica, voters),
        }
    }

    fn groups(&self, now: Time) -> Vec<GroupView> {
        let view =
            |(&stream, held): (&PartitionId, &Stream)| group_view(stream, &held.replica, now);
        self.streams.iter().map(view).collect()
    }

    fn replica_digests(&self) -> Vec<ReplicaDigest> {
        let mut digest = Digest::default();
        if self.placement.is_divided() {
            self.state.add_ended_to(&mut digest);
        } else {
            self.state.add_to(&mut digest);
        }
        for (partition, _) in self.placement.partitions() {
            for (key, versions) in self.store.scan(partition, None, usize::MAX) {
                assert!(self.placement.holds(&key), "{key} is of another share");
                // Older versions and deletions go when a server makes a checkpoint, which each does
                // by itself.
                if let Some(newest @ (_, Some(_))) = versions.last() {
                    digest.add_debug(&(key, newest));
                }
            }
        }
        let position = self.state.position();
        let copy = |partition, digest: Digest| {
            let digest = digest.value();
            ReplicaDigest { partition, position, digest, members: None }
        };
        // One copy of everything, under the name of the first stream.
        let first = self.streams.keys().next().copied().unwrap_or_default();
        if !self.placement.is_divided() {
            return vec![copy(first, digest)];
        }
        let mut order = Digest::default();
        self.state.add_order_to(&mut order);
        let share = PartitionId(SHARES.0 - self.placement.share().0);
        vec![copy(first, order), copy(share, digest)]
    }
}

impl Server {
    /// Starts a stream's replica with what survived of it. Voters are the replicas of the partition whose
    /// name it has; all others learn.
    fn open(&mut self, stream: PartitionId, log: Vec<replication::Record<Log>>, cx: &mut Cx<'_>) {
        let (voters, preferred_leader) = self.placement.voters(stream);
        let config = self.config.hosting.replication.clone();
        if self.cluster.partition(stream).is_none() {
            self.routes.learn(stream, preferred_leader.unwrap_or_default(), cx.now());
        }
        let group = Group { learners: self.others(&voters), voters, preferred_leader };
        let mut io = Io { stream, disk: &mut self.disk, cx };
        let replica = Replica::new(self.node, group, config, log, &mut io);
        let (applied, base) = (self.state.applied(stream), replica.base_index());
        assert!(
            applied >= base,
            "{stream}: the image ends at {applied}, its log begins after {base}"
        );
        let (sequencer, leaving) = (Sequencer::default(), BTreeMap::new());
        let held = Stream { replica, sequencer, announced: Index(0), staged: None, leaving };
        self.streams.insert(stream, held);
        self.touch(stream);
    }

    /// No component can have more transactions than this (S1). Of those in one that were let into a stream
    /// before any other, none had run when the last of them was, and its sequencer knew of all.
    fn component_max(&self) -> usize {
        match self.config.ordering {
            Ordering::Global | Ordering::Ordered(_) => 1,
            Ordering::Regional => self.config.waiting_max * self.streams.len(),
        }
    }

    /// Every server but these.
    fn others(&self, voters: &[NodeId]) -> Vec<NodeId> {
        let servers = self.cluster.servers().map(|server| server.id);
        servers.filter(|server| !voters.contains(server)).collect()
    }

    fn touch(&mut self, stream: PartitionId) {
        self.disk.touched.insert(stream);
        self.disk.unflushed.insert(stream);
    }

    /// Sends what has come together for streams.
    fn flush_streams(&mut self, cx: &mut Cx<'_>) {
        for stream in take(&mut self.disk.unflushed) {
            self.propose(stream, cx);
            let Some(held) = self.streams.get_mut(&stream) else { continue };
            let mut io = Io { stream, disk: &mut self.disk, cx };
            let chosen = held.replica.chosen_index();
            if held.replica.is_leader() && chosen > held.announced {
                // Others run what is chosen, and wait for nothing else.
                held.announced = chosen;
                held.replica.announce(&mut io);
            }
            held.replica.flush(&mut io);
            self.drain_events(stream, cx);
        }
    }

    /// Does something with a stream's replica.
    fn with(
        &mut self,
        stream: PartitionId,
        cx: &mut Cx<'_>,
        act: impl FnOnce(&mut Stream, &mut Io<'_, '_>),
    ) {
        if let Some(held) = self.streams.get_mut(&stream) {
            act(held, &mut Io { stream, disk: &mut self.disk, cx });
            self.touch(stream);
        }
    }

    /// Does something with the sequencer of a stream that this server leads.
    fn sequencing<T>(
        &mut self,
        stream: PartitionId,
        cx: &Cx<'_>,
        act: impl FnOnce(&mut Sequencer, &View<'_>) -> T,
    ) -> Option<T> {
        let held = self.streams.get_mut(&stream)?;
        if !held.replica.is_leader() {
            return None;
        }
        let (state, placement, config) = (&self.state, &self.placement, &*self.config);
        let (now, clock) = (cx.now(), cx.clock());
        let view = View { stream, state, placement, config, now, clock };
        Some(act(&mut held.sequencer, &view))
    }

    fn send(&mut self, to: NodeId, msg: Msg, cx: &mut Cx<'_>) {
        if to == self.node {
            self.local.push_back(msg);
        } else {
            cx.send(to, msg);
        }
    }

    /// Handles everything that one input set in motion inside this server.
    fn settle(&mut self, cx: &mut Cx<'_>) {
        loop {
            if let Some(stream) = self.disk.touched.pop_first() {
                self.drain_events(stream, cx);
            } else if let Some(msg) = self.local.pop_front() {
                self.on_message(self.node, msg, cx);
            } else {
                return;
            }
        }
    }

    fn on_message(&mut self, from: NodeId, msg: Msg, cx: &mut Cx<'_>) {
        self.exchange.heard(from);
        match msg {
            Msg::Submit { functor } => self.on_submit(from, functor, cx),
            Msg::Look { txn, round, keys } => self.on_look(from, (txn, round), keys, cx),
            Msg::Sequence { stream, entry } => self.on_sequence(from, stream, entry, cx),
            Msg::NotLeader { partition, leader, txn } => {
                self.on_not_leader(from, partition, leader, txn, cx);
            }
            Msg::Replication { partition, message } => {
                self.with(partition, cx, |held, io| held.replica.step(from, message, io));
            }
            Msg::RemoteReads { parts } => self.on_remote_reads(from, parts, cx),
            Msg::WantReads { turns } => self.on_want_reads(from, turns, cx),
            Msg::ReadsGone { turns } => self.on_reads_gone(&turns, cx),
            Msg::Covered { through } => self.on_covered(from, through),
            Msg::WantState { number, past, cursor } => {
                self.on_want_state(from, (number, past), cursor, cx);
            }
            Msg::StatePiece { number, chunk, next } => {
                self.on_state_piece(from, (number, next), chunk, cx);
            }
            Msg::Digests { digests } => self.state.checks.hear(from, digests),
            Msg::Answer { .. } | Msg::TooOld { .. } | Msg::Found { .. } => {
                unreachable!("{} answers a gateway", msg.kind())
            }
        }
    }

    // For gateways (§4.2.1: the batcher).

    /// A gateway wants a transaction to run, or to know what became of it.
    fn on_submit(&mut self, gateway: NodeId, functor: Arc<Functor>, cx: &mut Cx<'_>) {
        let txn = functor.txn;
        if let Some(answer) = self.known(&functor) {
            cx.note(Note::AlreadyRan);
            if matches!(answer, Msg::TooOld { .. }) {
                cx.note(Note::TooOld);
            }
            self.send(gateway, answer, cx);
            return;
        }
        if self.state.is_acknowledged(txn) {
            // Its client knows, and nobody waits.
            cx.note(Note::RepeatedSubmit);
            return;
        }
        if let Some(waiting) = self.waiting.get_mut(&txn) {
            cx.note(Note::RepeatedSubmit);
            waiting.gateway = gateway;
            return;
        }
        let (bytes, bytes_max) = (self.waiting_bytes, self.config.in_flight_bytes);
        let is_over = bytes > 0 && bytes + functor.size() > bytes_max;
        if is_over || self.waiting.len() >= self.config.in_flight_max {
            // Copies of it may have gone elsewhere, so nobody can say that it aborted; its gateway asks again.
            cx.note(Note::Shed);
            return;
        }
        let entry = self.plan(functor, self.cluster.region_of(gateway), cx);
        let asked = RetryState::new(cx.now());
        self.waiting_bytes += entry.functor.size();
        self.waiting.insert(txn, Waiting { gateway, entry: entry.clone(), asked });
        self.sequence(&entry, cx);
    }

    /// What its gateway is told of a transaction that has run.
    fn known(&self, functor: &Functor) -> Option<Msg> {
        let txn = functor.txn;
        if let Some(ended) = self.state.ended.get(txn) {
            return Some(ended.clone().answer(txn));
        }
        let is_here = !self.placement.is_divided()
            || self.placement.shares(functor).contains(&self.placement.share());
        let is_forgotten =
            is_here && !self.state.is_acknowledged(txn) && self.state.has_forgotten(txn);
        is_forgotten.then_some(Msg::TooOld { txn, outcome: None })
    }

    /// Nobody waits for a transaction any more.
    fn stop_waiting(&mut self, txn: TxnId) -> Option<Waiting> {
        let waiting = self.waiting.remove(&txn)?;
        self.waiting_bytes = self.waiting_bytes.saturating_sub(waiting.size());
        Some(waiting)
    }

    /// How a transaction is to be sequenced, as far as is known here.
    fn plan(&self, functor: Arc<Functor>, origin: RegionId, cx: &Cx<'_>) -> Arc<Sequenced> {
        let entry = self.state.plan(functor, origin, &self.placement);
        let due = cx.clock().now + self.furthest(&entry.homes) + cx.clock().error;
        Arc::new(Sequenced { due, ..entry })
    }

    /// How long a message takes to the furthest of these sequencers.
    fn furthest(&self, homes: &[PartitionId]) -> Duration {
        let here = self.cluster.region_of(self.node);
        let regions = homes.iter().map(|&home| self.cluster.region_of(self.routes.leader(home)));
        let rtt = regions.map(|region| self.cluster.topology.rtt(here, region)).max();
        rtt.unwrap_or_default() / 2
    }

    /// The streams that a transaction has to be given to: those that it is missing from. If there is an
    /// orderer, the others take it from there.
    fn asked(&self, entry: &Sequenced) -> Vec<PartitionId> {
        let missing = self.state.merge.missing(entry.name());
        let mut asked = missing.unwrap_or_else(|| entry.homes.clone());
        if let Some(orderer) = self.placement.orderer().filter(|_| entry.is_multi_home()) {
            asked.retain(|&stream| stream == orderer);
        }
        asked
    }

    /// Asks for a transaction to be put into the streams that it is missing from.
    fn sequence(&mut self, entry: &Arc<Sequenced>, cx: &mut Cx<'_>) {
        for stream in self.asked(entry) {
            let leader = self.routes.leader(stream);
            self.send(leader, Msg::Sequence { stream, entry: entry.clone() }, cx);
        }
    }

    /// A caller wants to see these keys before it decides.
    fn on_look(
        &mut self,
        gateway: NodeId,
        (txn, round): (TxnId, u32),
        keys: Vec<Key>,
        cx: &mut Cx<'_>,
    ) {
        let read = |key: Key| {
            let read = self.store.read(self.placement.partition_of(&key), &key);
            (key, visible(read))
        };
        let reads: Reads = keys.into_iter().map(read).collect();
        self.send(gateway, Msg::Found { txn, round, reads }, cx);
    }

    /// Tells who waits.
    fn answer(&mut self, mut applied: Applied, cx: &mut Cx<'_>) {
        self.exchange(&mut applied, cx);
        for _ in 0..applied.repeated {
            cx.note(Note::RepeatedEntry);
        }
        for _ in 0..applied.relocated {
            cx.note(Note::Relocated);
        }
        for name in applied.void {
            cx.note(Note::Void);
            self.plan_again(name, cx);
        }
        self.again.ran += applied.ran.len();
        for (txn, ended) in applied.ran {
            cx.claim(Claim::Decided { txn, outcome: ended.outcome });
            if let Some(waiting) = self.stop_waiting(txn) {
                self.send(waiting.gateway, ended.answer(txn), cx);
            }
        }
    }

    /// A transaction was void: its keys have moved meanwhile. Who waits for it has it sequenced again.
    fn plan_again(&mut self, name: Name, cx: &mut Cx<'_>) {
        let Some(waiting) = self.waiting.get(&name.txn) else { return };
        if waiting.entry.name() == name {
            let (functor, origin) = (waiting.entry.functor.clone(), waiting.entry.origin);
            let entry = self.plan(functor, origin, cx);
            if let Some(waiting) = self.waiting.get_mut(&name.txn) {
                waiting.entry = entry.clone();
                waiting.asked = RetryState::new(cx.now());
            }
            self.sequence(&entry, cx);
        }
    }

    // The sequencer (§4.2.1).

    /// Somebody wants a transaction in a stream.
    fn on_sequence(
        &mut self,
        from: NodeId,
        stream: PartitionId,
        entry: Arc<Sequenced>,
        cx: &mut Cx<'_>,
    ) {
        let txn = entry.functor.txn;
        let taken = self.sequencing(stream, cx, |sequencer, view| {
            (sequencer.take(entry, view), sequencer.next_release())
        });
        let Some((note, release)) = taken else {
            let replica = self.streams.get(&stream).map(|held| &held.replica);
            let leader = replica.and_then(Replica::leader).filter(|&leader| leader != self.node);
            let txn = Some(txn);
            self.send(from, Msg::NotLeader { partition: stream, leader, txn }, cx);
            return;
        };
        if let Some(note) = note {
            cx.note(note);
        }
        if let Some(at) = release {
            cx.set_timer(Timer::Release(stream), at);
        }
        self.disk.unflushed.insert(stream);
    }

    /// What was held until now goes on.
    fn on_release_timeout(&mut self, stream: PartitionId, cx: &mut Cx<'_>) {
        let released = self.sequencing(stream, cx, |sequencer, view| {
            (sequencer.release(view), sequencer.next_release())
        });
        let Some((notes, release)) = released else { return };
        for note in notes {
            cx.note(note);
        }
        if let Some(at) = release {
            cx.set_timer(Timer::Release(stream), at);
        }
        self.disk.unflushed.insert(stream);
    }

    /// Proposes what has come. Not before this server knows everything that earlier leaders left: what is
    /// not chosen for long must not be in the log once for each of them.
    fn propose(&mut self, stream: PartitionId, cx: &mut Cx<'_>) {
        if self.streams.get(&stream).is_some_and(|held| held.replica.is_ready()) {
            self.sequencing(stream, cx, |sequencer, view| sequencer.follow_orderer(view));
        }
        while self.streams.get(&stream).is_some_and(|held| {
            let replica = &held.replica;
            held.sequencer.has_batch() && replica.is_ready() && replica.takes_commands()
        }) {
            let batch = self.sequencing(stream, cx, |sequencer, view| sequencer.next_batch(view));
            let Some(Some(command)) = batch else { return };
            let copy = self.config.mutations.merges_unchosen().then(|| Arc::new(command.clone()));
            let mut proposed = None;
            self.with(stream, cx, |held, io| proposed = held.replica.propose(command, io));
            if let (Some(command), Some((index, _))) = (copy, proposed)
                && index == self.state.applied(stream).next()
            {
                self.on_chosen(stream, index, &Payload::Command(command), cx);
            }
        }
    }

    /// Whoever was asked does not lead the stream.
    fn on_not_leader(
        &mut self,
        from: NodeId,
        stream: PartitionId,
        leader: Option<NodeId>,
        txn: Option<TxnId>,
        cx: &mut Cx<'_>,
    ) {
        if !self.routes.redirect(stream, from, leader, cx.now()) {
            return;
        }
        let Some(entry) = txn.and_then(|txn| Some(self.waiting.get(&txn)?.entry.clone())) else {
            return;
        };
        // Its keys may have moved since that stream was asked.
        if self.asked(&entry).contains(&stream) {
            let leader = self.routes.leader(stream);
            self.send(leader, Msg::Sequence { stream, entry }, cx);
        }
    }

    // What is overdue.

    fn on_sweep_timeout(&mut self, cx: &mut Cx<'_>) {
        self.again.turn(cx.now());
        self.forward(cx);
        self.ask_again(cx);
        self.sweep_exchange(cx);
        if cx.now().since(self.compared_at) >= self.config.compare_interval {
            self.compare(cx);
        }
        let acknowledges = cx.now().since(self.acknowledged_at) >= ACKNOWLEDGE_AFTER;
        for stream in self.placement.streams() {
            self.sequencing(stream, cx, |sequencer, view| sequencer.reopen(view));
            if acknowledges {
                self.acknowledged_at = cx.now();
                self.acknowledge(stream, cx);
            }
            self.disk.unflushed.insert(stream);
        }
        cx.set_timer(Timer::Sweep, cx.now() + self.config.sweep_interval);
    }

    /// Servers that hold the same tell each other what their copies came to. One that came to something else than the others
    /// must not go on: nobody can say what else is wrong there.
    fn compare(&mut self, cx: &mut Cx<'_>) {
        self.compared_at = cx.now();
        let covered = self.state.covered();
        let checks = &mut self.state.checks;
        covered.into_iter().for_each(|(stream, index)| checks.close(stream, index));
        let digests: Vec<(Span, u64)> = checks.take_news();
        if let Some(difference) = checks.judge() {
            panic!("{}: {difference}", self.node);
        }
        if digests.is_empty() {
            return;
        }
        let share = self.placement.share();
        for server in self.cluster.servers().filter(|server| server.id != self.node) {
            if !self.placement.is_divided() || self.cluster.share_at(server.id).0 == share {
                cx.send(server.id, Msg::Digests { digests: digests.clone() });
            }
        }
    }

    /// Transactions that gateways have waited for too long: a message was lost, or a sequencer is gone.
    fn ask_again(&mut self, cx: &mut Cx<'_>) {
        let (now, timeout) = (cx.now(), self.config.resend_after);
        let waits = self.waiting.iter();
        let mut due: Vec<(Time, TxnId)> = waits
            .filter(|(_, waiting)| is_due(&waiting.asked, timeout, now))
            .map(|(&txn, waiting)| (waiting.asked.at, txn))
            .collect();
        due.sort_unstable();
        due.truncate(self.again.most.saturating_sub(self.again.asked));
        for (asked, txn) in due {
            let Some(waiting) = self.waiting.get_mut(&txn) else { continue };
            waiting.asked = waiting.asked.again(now);
            let supposed = waiting.entry.clone();
            if let Some(answer) = self.known(&supposed.functor) {
                // It is in a state that this server took from another.
                let Some(waiting) = self.stop_waiting(txn) else { continue };
                self.send(waiting.gateway, answer, cx);
            } else if self.state.is_acknowledged(txn) {
                self.stop_waiting(txn);
            } else if self.state.shares.is_due(supposed.name()) {
                // It has its place, and waits for other shares.
            } else {
                cx.note(Note::AskedAgain);
                self.again.asked += 1;
                // Keys may have moved since, and this server may have taken over a state that says so.
                let mut entry = self.plan(supposed.functor.clone(), supposed.origin, cx);
                if entry.name() == supposed.name() {
                    entry = supposed;
                } else if let Some(waiting) = self.waiting.get_mut(&txn) {
                    waiting.entry = entry.clone();
                }
                for stream in self.asked(&entry) {
                    self.routes.suspect(stream, asked, now);
                }
                self.sequence(&entry, cx);
            }
        }
    }

    /// S6: whoever leads a stream in which a transaction is sees to it that it is in the others.
    fn forward(&mut self, cx: &mut Cx<'_>) {
        let (now, timeout) = (cx.now(), self.config.forward_after);
        self.forwarded.retain(|name, _| self.state.merge.contains(*name));
        let leads = |home: &PartitionId| {
            self.streams.get(home).is_some_and(|held| held.replica.is_leader())
        };
        let mut due: Vec<(Time, Arc<Sequenced>)> = Vec::new();
        for entry in self.state.merge.incomplete_since(now - timeout) {
            let name = entry.name();
            let missing = self.state.merge.missing(name).unwrap_or_default();
            let asked = self.forwarded.get(&name);
            let is_next = asked.is_none_or(|asked| is_due(asked, timeout, now));
            if is_next && entry.homes.iter().any(|home| !missing.contains(home) && leads(home)) {
                due.push((asked.map(|asked| asked.at).unwrap_or_default(), entry.clone()));
            }
        }
        // What an orderer has is taken from there, by whoever leads.
        if self.config.mutations.forwards_nothing() || self.placement.orderer().is_some() {
            return;
        }
        due.sort_by_key(|(asked, entry)| (*asked, entry.name()));
        due.truncate(self.again.most.saturating_sub(self.again.forwarded));
        for (_, entry) in due {
            cx.note(Note::Forwarded);
            self.again.forwarded += 1;
            let forwarded = self.forwarded.entry(entry.name());
            let asked = forwarded.and_modify(|asked| *asked = asked.again(now));
            asked.or_insert(RetryState::new(now));
            self.sequence(&entry, cx);
        }
    }

    /// Streams that a client does not use any more learn from the others what it knows.
    fn acknowledge(&mut self, stream: PartitionId, cx: &mut Cx<'_>) {
        let takes = self
            .streams
            .get(&stream)
            .is_some_and(|held| held.replica.is_ready() && held.replica.takes_commands());
        if !takes {
            return;
        }
        let news = self.sequencing(stream, cx, |sequencer, view| sequencer.acknowledgement(view));
        let Some(Some(command)) = news else { return };
        cx.note(Note::Acknowledged);
        self.with(stream, cx, |held, io| {
            if let Some((index, _)) = held.replica.propose(command, io) {
                held.sequencer.acknowledging(index);
            }
        });
    }

    // The streams' logs.

    /// Carries out everything that a stream's log has to say.
    fn drain_events(&mut self, stream: PartitionId, cx: &mut Cx<'_>) {
        while let Some(held) = self.streams.get_mut(&stream)
            && let Some(event) = held.replica.next_event()
        {
            match event {
                Event::Chosen { index, term, payload } => {
                    let (partition, at) = (stream, index.0);
                    cx.claim(Claim::Chosen { partition, index: at, term: term.0 });
                    self.on_chosen(stream, index, &payload, cx);
                }
                Event::Leading { term } => {
                    cx.claim(Claim::Leads { partition: stream, term: term.0 });
                }
                Event::Deposed { .. } => {
                    if take(&mut held.sequencer).len() > 0 {
                        cx.note(Note::Deposed);
                    }
                    held.leaving.clear();
                    held.announced = Index(0);
                }
                Event::ReadReady { .. } | Event::ReadFailed { .. } => {
                    unreachable!("nobody reads by leadership")
                }
                Event::SnapshotWanted { to, cursor } => self.send_chunk(stream, to, cursor, cx),
                Event::SnapshotChunk { chunk, first, last, index } => {
                    if first && chunk.image.is_none() {
                        self.on_empty_chunk(stream, index, cx);
                    } else {
                        self.on_chunk(stream, chunk, last, cx);
                    }
                }
            }
        }
        let leader = self.streams.get(&stream).and_then(|held| held.replica.leader());
        self.routes.follow(stream, leader, cx.now());
    }

    /// The next entry of a stream is chosen: merge it, run what may run.
    fn on_chosen(
        &mut self,
        stream: PartitionId,
        index: Index,
        payload: &Payload<Command>,
        cx: &mut Cx<'_>,
    ) {
        if self.exchange.hold(stream, index, payload) {
            return;
        }
        let command = match payload {
            Payload::Command(command) => Some(command.as_ref()),
            Payload::Noop | Payload::Members(_) => None,
        };
        if let (Some(Command::Batch { entries, .. }), Some(held)) =
            (command, self.streams.get_mut(&stream))
        {
            for entry in entries {
                held.sequencer.sequenced(entry);
            }
        }
        let largest = self.state.merge.largest();
        let at = (stream, index);
        let applied = self.state.apply(at, command, &self.placement, &mut self.store, cx.now());
        if self.state.merge.largest() > largest.max(1) {
            cx.note(Note::Component);
        }
        if Some(stream) == self.placement.orderer() {
            // Pieces of it are to be proposed.
            self.disk.unflushed.extend(self.streams.keys());
        }
        if let Some(Command::Batch { entries, .. }) = command {
            self.relocate(stream, entries, cx);
        }
        if !applied.ran.is_empty() {
            // There is room for what sequencers had to keep.
            let keeps = self.streams.iter().filter(|(_, held)| held.sequencer.has_batch());
            self.disk.unflushed.extend(keeps.map(|(&stream, _)| stream));
        }
        self.answer(applied, cx);
    }

    /// As the sequencer of a stream: has keys moved that another region alone touches, and tells the stream
    /// that a key moves to. Nobody else does, so that a key moves from each home once.
    fn relocate(&mut self, stream: PartitionId, entries: &[Arc<Sequenced>], cx: &mut Cx<'_>) {
        let mut moves = Vec::new();
        for entry in entries {
            let observed =
                self.sequencing(stream, cx, |sequencer, view| sequencer.observe(entry, view));
            let Some(observed) = observed else { return };
            moves.extend(observed);
            if entry.target.is_some() && !entry.is_piece && self.state.merge.contains(entry.name())
            {
                self.sequence(entry, cx);
            }
        }
        for (key, target) in moves {
            let (from, orderer) =
                (self.state.home(&key, &self.placement), self.placement.orderer());
            let entry = Arc::new(Sequenced::relocation(key, from, target, orderer));
            let first = orderer.unwrap_or(stream);
            let leader = self.routes.leader(first);
            self.send(leader, Msg::Sequence { stream: first, entry }, cx);
        }
    }

    /// A server that is too far behind needs the state. Whoever runs transactions again must read what
    /// they read, so all pieces are of one moment.
    fn send_chunk(
        &mut self,
        stream: PartitionId,
        to: NodeId,
        cursor: Option<usize>,
        cx: &mut Cx<'_>,
    ) {
        if self.cluster.share_at(to).0 != self.placement.share() && self.placement.is_divided() {
            // It needs the values of its own share, and asks somebody who holds them.
            let empty = Chunk { image: None, keys: Vec::new() };
            self.with(stream, cx, |held, io| held.replica.send_chunk(to, empty, None, io));
            return;
        }
        let all = cursor.is_none().then(|| Arc::new(self.leaving()));
        let limit = self.config.hosting.chunk_keys;
        self.with(stream, cx, |held, io| {
            if let Some(all) = all {
                held.leaving.insert(to, all);
            }
            // Whoever is not in the list has been given up meanwhile, and so has the piece.
            let Some(all) = held.leaving.get(&to) else { return };
            let (chunk, next) = all.piece(cursor.unwrap_or(0), limit);
            if next.is_none() {
                held.leaving.remove(&to);
            }
            held.replica.send_chunk(to, chunk, next, io);
        });
    }

    /// This server's state, to be sent in pieces.
    fn leaving(&self) -> Leaving {
        let image = self.state.image(&self.placement);
        Leaving::new(image.into_pieces(self.config.piece_bytes), self.newest())
    }

    /// All values that are held here.
    fn newest(&self) -> Vec<(Key, Versions)> {
        let scan = |(partition, _)| self.store.scan(partition, None, usize::MAX);
        let newest = |(key, mut versions): (Key, Versions)| {
            versions.drain(..versions.len().saturating_sub(1));
            (key, versions)
        };
        self.placement.partitions().flat_map(scan).map(newest).collect()
    }

    /// The log of a stream goes on after `index`; the leader, which forgot what was before, holds another share.
    fn on_empty_chunk(&mut self, stream: PartitionId, index: Index, cx: &mut Cx<'_>) {
        if self.state.applied(stream) >= index {
            self.disk.installed.insert(stream);
        } else {
            self.open_gap(stream, index, cx);
        }
    }

    /// A piece of another server's state. It may know less than this one of other streams.
    fn on_chunk(&mut self, stream: PartitionId, chunk: Chunk, last: bool, cx: &mut Cx<'_>) {
        let Some(held) = self.streams.get_mut(&stream) else { return };
        match &mut held.staged {
            Some(staged) if !chunk.is_first() => staged.add(chunk),
            staged => *staged = chunk.is_first().then_some(chunk),
        }
        if !last {
            return;
        }
        let Some(Chunk { image: Some(image), keys }) = held.staged.take() else { return };
        self.disk.installed.insert(stream);
        self.take_state(&image, keys, cx);
        self.close_gaps(cx);
    }

    /// Learns what another server of this share knows.
    fn take_state(&mut self, image: &Image, keys: Vec<(Key, Versions)>, cx: &mut Cx<'_>) {
        cx.note(Note::SnapshotInstalled);
        let (state, store) = (&mut self.state, &mut self.store);
        let mut applied = state.join(image, keys, &self.placement, store, cx.now());
        applied.due = state.shares.due().map(Due::turn).collect();
        self.answer(applied, cx);
    }

    /// Everything persisted up to `ticket` is durable.
    fn on_durable(&mut self, ticket: Ticket, cx: &mut Cx<'_>) {
        for stream in self.placement.streams() {
            self.with(stream, cx, |held, io| held.replica.on_durable(ticket, io));
        }
        if self.disk.checkpoint.is_some_and(|checkpoint| checkpoint <= ticket) {
            self.disk.checkpoint = None;
            self.store.thaw();
            if self.placement.is_divided() {
                self.covered(cx);
            }
            for stream in take(&mut self.disk.settling) {
                self.with(stream, cx, |held, io| held.replica.snapshot_durable(io));
            }
        }
    }

    /// Makes a checkpoint if enough has been persisted since the last one, or another's state was
    /// taken (S8).
    fn checkpoint_if_due(&mut self, cx: &mut Cx<'_>) {
        let is_due = !self.disk.installed.is_empty()
            || self.disk.pace.is_due(self.config.hosting.checkpoint_bytes);
        if !is_due || self.store.is_frozen() || self.exchange.has_gaps() {
            return;
        }
        cx.note(Note::Checkpoint);
        self.state.number += 1;
        let number = Timestamp(self.state.number);
        let version = Version { timestamp: number, ..Version::INITIAL };
        self.store.put(OWN, Key::default(), version, Some(Value::default()));
        self.store.collect_below(OWN, number);
        for (partition, below) in self.state.collectables(&self.placement) {
            self.store.collect_below(partition, below);
        }
        let image = self.state.image(&self.placement);
        self.exchange.checkpoint(&image);
        let pieces = image.into_pieces(self.config.piece_bytes).into_iter();
        let pieces: Vec<Record> = pieces.map(Record::Image).collect();
        let mut records = pieces.clone();
        for (&stream, held) in &mut self.streams {
            let applied = self.state.applied(stream);
            let through = held.replica.compactable(self.config.log_kept).min(applied);
            let through = through.min(self.exchange.compactable(self.placement.share(), stream));
            held.replica.compact(through);
            let log = held.replica.checkpoint_records().into_iter();
            records.extend(log.map(|record| Record::Replication(stream, record)));
        }
        // The pieces are written twice.
        let bytes = pieces.iter().chain(&records).map(Record::size).sum();
        for piece in pieces {
            cx.persist(piece);
        }
        self.disk.settling = take(&mut self.disk.installed);
        self.disk.pace.made(bytes);
        self.disk.checkpoint = Some(cx.checkpoint(self.store.freeze(), records));
    }

    /// An operator's order.
    fn on_admin(&mut self, admin: Admin, cx: &mut Cx<'_>) {
        match admin {
            Admin::TransferLeader { partition, to } => {
                self.with(partition, cx, |held, io| held.replica.transfer(to, io));
            }
            Admin::ChangeMembers { partition, voters, learners: _ } => {
                // Every server merges every stream, so all that do not vote learn.
                let learners = self.others(&voters);
                let mut is_refused = false;
                self.with(partition, cx, |held, io| {
                    let is_leader = held.replica.is_leader();
                    let accepted = held.replica.change_members(voters, learners, io);
                    // Who does not lead has no say.
                    is_refused = accepted.is_err() && is_leader;
                });
                if is_refused {
                    cx.note(Note::ChangeRefused);
                }
            }
        }
    }
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (stream, held) in &self.streams {
            write!(f, "{stream} {} merged {} | ", held.replica, self.state.applied(*stream))?;
        }
        write!(f, "{} have not run, {} awaited", self.state.merge.len(), self.waiting.len())?;
        if self.placement.is_divided() {
            let (share, due) = (self.placement.share(), self.state.shares.len());
            write!(f, " | {share}: {due} due, {} parts kept", self.state.shares.kept().len())?;
        }
        Ok(())
    }
}
