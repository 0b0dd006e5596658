//! What one server node does for the replicas of partitions that it holds, whatever the protocol:
//! one store, one stream of durable records, checkpoints, snapshots, and the way in and out of each
//! replicated log. A protocol gives its [`Role`]: what a partition's leader does.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::{self, Debug};
use std::mem::take;
use std::sync::Arc;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::digest::Digest;
use orthodrome_core::id::{NodeId, PartitionId, Ticket, TxnId};
use orthodrome_core::machine::{Admin, Claim, Cx, Leftover, Message, Protocol, StateCopy};
use orthodrome_core::rng::Rng;
use orthodrome_core::store::{Memtable, StateEngine, Store, Versions};
use orthodrome_core::time::{Clock, Duration, Time};
use orthodrome_core::txn::{Key, Outcome, Reads};

use crate::replication::{self, Event, Group, Index, Payload, Replica, Replicated};
use crate::routes::Routes;

/// A machine's door to the world, without the name of its protocol: several names (variants of one
/// paper) share one machine.
pub(crate) trait Outside {
    /// As [`Protocol::Msg`].
    type Msg;
    /// As [`Protocol::Timer`].
    type Timer;
    /// As [`Protocol::Record`].
    type Record;
    /// As [`Protocol::Note`].
    type Note;

    fn now(&self) -> Time;
    fn clock(&self) -> Clock;
    fn rng(&mut self) -> &mut Rng;
    fn send(&mut self, to: NodeId, msg: Self::Msg);
    fn set_timer(&mut self, timer: Self::Timer, at: Time);
    fn cancel_timer(&mut self, timer: Self::Timer);
    fn persist(&mut self, record: Self::Record) -> Ticket;
    fn checkpoint(&mut self, versions: Arc<Memtable>, records: Vec<Self::Record>) -> Ticket;
    fn reads(&mut self, txn: TxnId, reads: Reads);
    fn finish(&mut self, txn: TxnId, outcome: Outcome, path: &'static str);
    fn note(&mut self, note: Self::Note);
    fn claim(&mut self, claim: Claim);
}

impl<P: Protocol> Outside for Cx<'_, P> {
    type Msg = P::Msg;
    type Timer = P::Timer;
    type Record = P::Record;
    type Note = P::Note;

    fn now(&self) -> Time {
        Cx::now(self)
    }
    fn clock(&self) -> Clock {
        Cx::clock(self)
    }
    fn rng(&mut self) -> &mut Rng {
        Cx::rng(self)
    }
    fn send(&mut self, to: NodeId, msg: P::Msg) {
        Cx::send(self, to, msg);
    }
    fn set_timer(&mut self, timer: P::Timer, at: Time) {
        Cx::set_timer(self, timer, at);
    }
    fn cancel_timer(&mut self, timer: P::Timer) {
        Cx::cancel_timer(self, timer);
    }
    fn persist(&mut self, record: P::Record) -> Ticket {
        Cx::persist(self, record)
    }
    fn checkpoint(&mut self, versions: Arc<Memtable>, records: Vec<P::Record>) -> Ticket {
        Cx::checkpoint(self, versions, records)
    }
    fn reads(&mut self, txn: TxnId, reads: Reads) {
        Cx::reads(self, txn, reads);
    }
    fn finish(&mut self, txn: TxnId, outcome: Outcome, path: &'static str) {
        Cx::finish(self, txn, outcome, path);
    }
    fn note(&mut self, note: P::Note) {
        Cx::note(self, note);
    }
    fn claim(&mut self, claim: Claim) {
        Cx::claim(self, claim);
    }
}

/// The door of a machine that hosts partitions in the role `R`.
pub(crate) type Way<'a, R> = dyn Outside<
        Msg = <R as Role>::Msg,
        Timer = <R as Role>::Timer,
        Record = Record<<R as Role>::Log, <R as Role>::State>,
        Note = <R as Role>::Note,
    > + 'a;

/// A piece of a partition's state, for a replica that fell too far behind.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Chunk<S> {
    /// The first piece: everything but the data.
    pub state: Option<Box<S>>,
    /// Keys with all their versions.
    pub keys: Vec<(Key, Versions)>,
}

/// What a server remembers of one partition.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Record<R: Replicated, S> {
    /// A partition's state at a checkpoint; the data is in the state engine.
    State(PartitionId, Box<S>),
    /// A record of a partition's log.
    Replication(PartitionId, replication::Record<R>),
}

/// Settings of hosting.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// The replicated log's own settings.
    pub replication: replication::Config,
    /// A node makes a checkpoint after this many bytes of records.
    pub checkpoint_bytes: usize,
    /// Versions that are not the newest of their key are kept for this long.
    pub version_retention: Duration,
    /// Keys per piece of a snapshot.
    pub chunk_keys: usize,
    /// Messages that a leader holds back until it is ready to serve, and commands that it queues
    /// while its log takes none.
    pub early_max: usize,
}

impl Config {
    /// Settings for a cluster whose longest round trip is `round_trip`.
    pub(crate) fn for_round_trip(round_trip: Duration) -> Self {
        Self {
            replication: replication::Config::with_election_timeout(round_trip * 4),
            checkpoint_bytes: 16 << 20,
            version_retention: Duration::from_secs(10),
            chunk_keys: 1_000,
            early_max: 1_024,
        }
    }

    /// Draws other settings, for swarms; what is promised must not rest on those that suit.
    pub(crate) fn vary(&mut self, rng: &mut Rng) {
        let size = |low: u64, high: u64, rng: &mut Rng| {
            // Each order of magnitude is as likely as the next.
            let bits = rng.range(u64::from(low.ilog2()), u64::from(high.ilog2()));
            usize::try_from(rng.range(1 << bits, 2 << bits).clamp(low, high)).unwrap_or(1)
        };
        self.version_retention = vary(self.version_retention, 1, 100, rng);
        self.checkpoint_bytes = size(10_000, 16 << 20, rng);
        self.chunk_keys = size(1, 1_000, rng);
        self.early_max = size(64, 1_024, rng);
        let election_timeout = vary(self.replication.election_timeout, 75, 150, rng);
        let mut replication = replication::Config::with_election_timeout(election_timeout);
        // Above what would make the log the bottleneck: a swarm's seed has no time to wait for it.
        replication.max_batch_bytes = size(16 << 10, 256 << 10, rng);
        replication.max_inflight = size(8, 64, rng);
        replication.max_unchosen = size(256, 64 << 10, rng);
        replication.snapshot_window = size(1, 4, rng);
        self.replication = replication;
    }
}

/// Between `low` and `high` per cent of `span`.
pub(crate) fn vary(span: Duration, low: u32, high: u32, rng: &mut Rng) -> Duration {
    let percent = rng.range(u64::from(low), u64::from(high));
    span * u32::try_from(percent).unwrap_or(high) / 100
}

/// Rare events of hosting.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Note {
    /// A replica took a snapshot of the state from its leader.
    SnapshotInstalled,
    /// A leader whose log takes no commands dropped a request.
    Shed,
    /// A membership change was refused.
    ChangeRefused,
    /// A node made a checkpoint.
    Checkpoint,
}

/// What a protocol's partitions replicate and how their leaders serve. Implemented by what only a
/// leader knows: it exists while a replica leads and is ready.
pub(crate) trait Role: Debug + Sized {
    /// The log.
    type Log: Replicated<Chunk = Chunk<Self::State>, Cursor = Key>;
    /// The state that the log gives, data apart.
    type State: Clone + Eq + Debug + Default;
    /// The protocol's settings.
    type Config;
    /// Its messages.
    type Msg: Message;
    /// Its timers.
    type Timer: Copy;
    /// Its rare events.
    type Note: From<Note>;

    fn hosting(config: &Self::Config) -> &Config;
    fn applied(state: &Self::State) -> Index;
    fn set_applied(state: &mut Self::State, index: Index);
    fn log_message(partition: PartitionId, message: replication::Message<Self::Log>) -> Self::Msg;
    fn log_timer(partition: PartitionId, timer: replication::Timer) -> Self::Timer;
    fn not_leader(partition: PartitionId, leader: Option<NodeId>, txn: Option<TxnId>) -> Self::Msg;

    /// A message for this partition's leader.
    fn serve(
        partition: &mut Partition<Self>,
        from: NodeId,
        msg: Self::Msg,
        world: &mut World<'_, Self>,
    );
    /// A command is chosen: apply it, and do what follows.
    fn on_chosen(
        partition: &mut Partition<Self>,
        command: &<Self::Log as Replicated>::Command,
        world: &mut World<'_, Self>,
    );
    /// This replica leads, and everything that earlier leaders left has been applied.
    fn on_leading(partition: &mut Partition<Self>, world: &mut World<'_, Self>);
    /// This replica no longer leads; what its leader knew is gone.
    fn on_deposed(partition: &mut Partition<Self>, world: &mut World<'_, Self>);
    /// A leadership check that was asked for has been answered.
    fn on_read_index(
        partition: &mut Partition<Self>,
        id: u64,
        is_leader: bool,
        world: &mut World<'_, Self>,
    );
    /// Whoever was asked about `txn` does not lead `other`, and somebody else does.
    fn on_not_leader(
        partition: &mut Partition<Self>,
        other: PartitionId,
        txn: TxnId,
        world: &mut World<'_, Self>,
    );
    /// Panics if the partition's state contradicts itself.
    fn assert_invariants(partition: &Partition<Self>);
    /// What its leader holds that must be gone after quiet, see `Machine::leftovers`.
    fn leftovers(&self, state: &Self::State) -> Vec<Leftover>;
}

/// What was persisted for whom, and who has something to say.
#[derive(Debug, Default)]
struct Ledger {
    /// Records under way, in order.
    tickets: VecDeque<(Ticket, PartitionId)>,
    /// Size of the records since the last checkpoint.
    bytes: usize,
    /// Partitions whose logs may hold events.
    touched: BTreeSet<PartitionId>,
    /// Partitions whose logs may hold messages to be sent together.
    unflushed: BTreeSet<PartitionId>,
}

/// Everything around one partition that its handlers need.
pub(crate) struct World<'a, R: Role> {
    pub node: NodeId,
    pub cluster: &'a Cluster,
    pub config: &'a R::Config,
    pub store: &'a mut Store,
    pub routes: &'a mut Routes,
    local: &'a mut VecDeque<R::Msg>,
    ledger: &'a mut Ledger,
    pub cx: &'a mut Way<'a, R>,
}

/// The replicated log's way out.
struct Door<'a, R: Role> {
    partition: PartitionId,
    ledger: &'a mut Ledger,
    cx: &'a mut Way<'a, R>,
}

impl<R: Role> replication::Door<R::Log> for Door<'_, R> {
    fn now(&self) -> Time {
        self.cx.now()
    }

    fn rng(&mut self) -> &mut Rng {
        self.cx.rng()
    }

    fn send(&mut self, to: NodeId, message: replication::Message<R::Log>) {
        self.cx.send(to, R::log_message(self.partition, message));
    }

    fn persist(&mut self, record: replication::Record<R::Log>) -> Ticket {
        self.ledger.bytes += record.disk_size();
        let ticket = self.cx.persist(Record::Replication(self.partition, record));
        self.ledger.tickets.push_back((ticket, self.partition));
        ticket
    }

    fn set_timer(&mut self, timer: replication::Timer, at: Time) {
        self.cx.set_timer(R::log_timer(self.partition, timer), at);
    }

    fn cancel_timer(&mut self, timer: replication::Timer) {
        self.cx.cancel_timer(R::log_timer(self.partition, timer));
    }
}

impl<R: Role> World<'_, R> {
    /// Sends a message; one to this node itself is delivered before the step ends.
    pub fn send(&mut self, to: NodeId, msg: R::Msg) {
        if to == self.node {
            self.local.push_back(msg);
        } else {
            self.cx.send(to, msg);
        }
    }

    /// Sends a message to whoever leads `partition`, as far as is known.
    pub fn send_to_leader(&mut self, partition: PartitionId, msg: R::Msg) {
        self.send(self.routes.leader(partition), msg);
    }

    /// The supposed leader of `partition` has not answered what it was asked at `asked`.
    pub fn suspect(&mut self, partition: PartitionId, asked: Time) {
        self.routes.suspect(partition, asked, self.cx.now());
    }

    fn door(&mut self, partition: PartitionId) -> Door<'_, R> {
        Door { partition, ledger: self.ledger, cx: self.cx }
    }

    fn touch(&mut self, partition: PartitionId) {
        self.ledger.touched.insert(partition);
        self.ledger.unflushed.insert(partition);
    }
}

/// One replica of one partition: the replicated log, the state it gives, and, where this replica
/// leads, what only a leader knows.
#[derive(Debug)]
pub(crate) struct Partition<R: Role> {
    pub id: PartitionId,
    pub replica: Replica<R::Log>,
    pub state: R::State,
    /// Present while this replica leads and is ready to serve.
    pub leader: Option<R>,
    /// Requests that came while this replica led but was not ready.
    early: Vec<(NodeId, R::Msg)>,
    /// Commands that the log did not take yet.
    backlog: VecDeque<<R::Log as Replicated>::Command>,
    /// A snapshot that is arriving in pieces. It replaces the state only when it is whole: until
    /// then this replica may have to go on with the state it has.
    staged: Option<Chunk<R::State>>,
    /// A snapshot has been installed; it counts once a checkpoint makes it durable.
    must_checkpoint: bool,
}

impl<R: Role> Partition<R> {
    /// Takes a message meant for this partition's leader.
    fn on_message(&mut self, from: NodeId, msg: R::Msg, world: &mut World<'_, R>) {
        let early_max = R::hosting(world.config).early_max;
        if self.leader.is_some() && self.backlog.len() < early_max {
            R::serve(self, from, msg, world);
        } else if self.leader.is_some() {
            // Overloaded, or handing over for long: the sender asks again.
            world.cx.note(Note::Shed.into());
        } else if self.replica.is_leader() && self.early.len() < early_max {
            self.early.push((from, msg));
        } else {
            let leader = self.replica.leader().filter(|&leader| leader != world.node);
            world.send(from, R::not_leader(self.id, leader, msg.txn()));
        }
    }

    /// Proposes a command. While the log takes none, because leadership is being handed over or too
    /// much waits to be chosen, commands queue up in order: a leader that stays has to propose what
    /// it acted on. One that is deposed loses them, like one that crashes.
    pub fn propose(&mut self, command: <R::Log as Replicated>::Command, world: &mut World<'_, R>) {
        self.backlog.push_back(command);
        self.propose_backlog(world);
        world.touch(self.id);
    }

    fn propose_backlog(&mut self, world: &mut World<'_, R>) {
        while self.replica.takes_commands()
            && let Some(command) = self.backlog.pop_front()
        {
            self.replica.propose(command, &mut world.door(self.id));
        }
    }

    /// Asks the group whether this replica still leads; [`Role::on_read_index`] has the answer.
    pub fn read_index(&mut self, id: u64, world: &mut World<'_, R>) {
        self.replica.read_index(id, &mut world.door(self.id));
        world.touch(self.id);
    }

    /// Carries out everything that the replicated log has to say.
    fn drain_events(&mut self, world: &mut World<'_, R>) {
        while let Some(event) = self.replica.next_event() {
            match event {
                Event::Chosen { index, term, payload } => {
                    let (partition, at) = (self.id, index.0);
                    world.cx.claim(Claim::Chosen { partition, index: at, term: term.0 });
                    self.on_chosen(index, &payload, world);
                }
                Event::Leading { term } => {
                    world.cx.claim(Claim::Leads { partition: self.id, term: term.0 });
                    world.routes.follow(self.id, Some(world.node), world.cx.now());
                    R::on_leading(self, world);
                    for (from, msg) in take(&mut self.early) {
                        R::serve(self, from, msg, world);
                    }
                }
                Event::Deposed { .. } => {
                    self.leader = None;
                    self.early.clear();
                    self.backlog.clear();
                    R::on_deposed(self, world);
                }
                Event::ReadReady { id } => R::on_read_index(self, id, true, world),
                Event::ReadFailed { id } => R::on_read_index(self, id, false, world),
                Event::SnapshotWanted { to, cursor } => self.send_chunk(to, cursor, world),
                Event::SnapshotChunk { chunk, last, .. } => self.on_chunk(chunk, last, world),
            }
        }
        self.propose_backlog(world);
        world.routes.follow(self.id, self.replica.leader(), world.cx.now());
    }

    fn on_chosen(
        &mut self,
        index: Index,
        payload: &Payload<<R::Log as Replicated>::Command>,
        world: &mut World<'_, R>,
    ) {
        if index <= R::applied(&self.state) {
            // The checkpoint that this replica started from covers it.
            return;
        }
        R::set_applied(&mut self.state, index);
        if let Payload::Command(command) = payload {
            R::on_chosen(self, command.as_ref(), world);
        }
    }

    fn send_chunk(&mut self, to: NodeId, cursor: Option<Key>, world: &mut World<'_, R>) {
        let limit = R::hosting(world.config).chunk_keys;
        let keys = world.store.scan(self.id, cursor.as_ref(), limit);
        let state = cursor.is_none().then(|| Box::new(self.state.clone()));
        let next = (keys.len() == limit).then(|| keys.last().map(|(key, _)| key.clone())).flatten();
        self.replica.send_chunk(to, Chunk { state, keys }, next, &mut world.door(self.id));
        world.touch(self.id);
    }

    /// A piece of the leader's state arrived. The data may be newer than the state that came with
    /// the first piece; applying the log from there on changes nothing that is there already.
    fn on_chunk(&mut self, chunk: Chunk<R::State>, last: bool, world: &mut World<'_, R>) {
        if chunk.state.is_some() {
            self.staged = Some(chunk);
        } else if let Some(staged) = &mut self.staged {
            staged.keys.extend(chunk.keys);
        }
        if !last {
            return;
        }
        let Some(Chunk { state: Some(state), keys }) = self.staged.take() else { return };
        world.cx.note(Note::SnapshotInstalled.into());
        world.store.clear(self.id);
        for (key, versions) in keys {
            for (version, value) in versions {
                world.store.put(self.id, key.clone(), version, value);
            }
        }
        self.state = *state;
        self.must_checkpoint = true;
    }
}

/// One server node: its replicas of many partitions, one store, one stream of durable records.
#[derive(Debug)]
pub(crate) struct Server<R: Role> {
    node: NodeId,
    cluster: Arc<Cluster>,
    config: Arc<R::Config>,
    pub partitions: BTreeMap<PartitionId, Partition<R>>,
    store: Store,
    routes: Routes,
    local: VecDeque<R::Msg>,
    ledger: Ledger,
    checkpoint: Option<Ticket>,
    /// Partitions whose installed snapshot the checkpoint under way makes durable.
    installed: Vec<PartitionId>,
}

impl<R: Role> Server<R> {
    /// Starts the node with what survived of it.
    pub fn new(
        node: NodeId,
        cluster: Arc<Cluster>,
        config: Arc<R::Config>,
        engine: Box<dyn StateEngine>,
        recovered: Vec<Record<R::Log, R::State>>,
        cx: &mut Way<'_, R>,
    ) -> Self {
        let mut states: BTreeMap<PartitionId, R::State> = BTreeMap::new();
        let mut logs: BTreeMap<PartitionId, Vec<replication::Record<R::Log>>> = BTreeMap::new();
        for record in recovered {
            match record {
                Record::State(partition, state) => drop(states.insert(partition, *state)),
                Record::Replication(partition, record) => {
                    logs.entry(partition).or_default().push(record);
                }
            }
        }
        // The placement says which partitions are here; a replica that a membership change brought
        // here is known from its records.
        let placed = cluster.partitions().filter(|p| p.replicas.contains(&node)).map(|p| p.id);
        let hosted: BTreeSet<PartitionId> = placed.chain(logs.keys().copied()).collect();
        let mut server = Self {
            node,
            routes: Routes::new(cluster.clone()),
            cluster,
            config,
            partitions: BTreeMap::new(),
            store: Store::new(engine),
            local: VecDeque::new(),
            ledger: Ledger::default(),
            checkpoint: None,
            installed: Vec::new(),
        };
        for id in hosted {
            let log = logs.remove(&id).unwrap_or_default();
            let state = states.remove(&id).unwrap_or_default();
            server.open(id, log, state, cx);
        }
        server
    }

    /// Starts a replica with what survived of it.
    fn open(
        &mut self,
        id: PartitionId,
        log: Vec<replication::Record<R::Log>>,
        state: R::State,
        cx: &mut Way<'_, R>,
    ) {
        let placed = self.cluster.partition(id);
        let group = Group {
            voters: placed.map(|placed| placed.replicas.clone()).unwrap_or_default(),
            learners: Vec::new(),
            preferred_leader: placed.map(|placed| placed.preferred_leader),
        };
        let config = R::hosting(&self.config).replication.clone();
        let mut door = Door::<R> { partition: id, ledger: &mut self.ledger, cx };
        let replica = Replica::new(self.node, group, config, log, &mut door);
        let applied = R::applied(&state);
        assert!(
            applied >= replica.base_index(),
            "{id} at {}: the checkpoint ends at {applied:?}, but its log begins after {:?}",
            self.node,
            replica.base_index()
        );
        self.ledger.touched.insert(id);
        let partition = Partition {
            id,
            replica,
            state,
            leader: None,
            early: Vec::new(),
            backlog: VecDeque::new(),
            staged: None,
            must_checkpoint: false,
        };
        self.partitions.insert(id, partition);
    }

    /// Does something with one of the partitions; nothing if it is not here.
    pub fn with(
        &mut self,
        id: PartitionId,
        cx: &mut Way<'_, R>,
        act: impl FnOnce(&mut Partition<R>, &mut World<'_, R>),
    ) {
        let Self { node, cluster, config, partitions, store, routes, local, ledger, .. } = self;
        let (cluster, config): (&Cluster, &R::Config) = (cluster, config);
        let mut world = World { node: *node, cluster, config, store, routes, local, ledger, cx };
        if let Some(partition) = partitions.get_mut(&id) {
            act(partition, &mut world);
        }
    }

    /// A message for the leader of partition `id`.
    pub fn on_message(&mut self, id: PartitionId, from: NodeId, msg: R::Msg, cx: &mut Way<'_, R>) {
        if self.partitions.contains_key(&id) {
            self.with(id, cx, |partition, world| partition.on_message(from, msg, world));
        } else {
            cx.send(from, R::not_leader(id, None, msg.txn()));
        }
    }

    /// A message of partition `id`'s log.
    pub fn on_log_message(
        &mut self,
        id: PartitionId,
        from: NodeId,
        message: replication::Message<R::Log>,
        cx: &mut Way<'_, R>,
    ) {
        if !self.partitions.contains_key(&id) {
            // A membership change made this node a member; it learns the rest from the leader.
            self.open(id, Vec::new(), R::State::default(), cx);
        }
        self.with(id, cx, |partition, world| {
            partition.replica.step(from, message, &mut world.door(id));
            world.touch(id);
        });
    }

    /// `from` does not lead `partition`.
    pub fn on_not_leader(
        &mut self,
        from: NodeId,
        partition: PartitionId,
        leader: Option<NodeId>,
        txn: Option<TxnId>,
        cx: &mut Way<'_, R>,
    ) {
        if !self.routes.redirect(partition, from, leader, cx.now()) {
            return;
        }
        let Some(txn) = txn else { return };
        let hosted: Vec<PartitionId> = self.partitions.keys().copied().collect();
        for id in hosted {
            self.with(id, cx, |replica, world| R::on_not_leader(replica, partition, txn, world));
        }
    }

    /// A timer of partition `id`'s log.
    pub fn on_log_timer(
        &mut self,
        id: PartitionId,
        timer: replication::Timer,
        cx: &mut Way<'_, R>,
    ) {
        self.with(id, cx, |partition, world| {
            partition.replica.on_timer(timer, &mut world.door(id));
            world.touch(id);
        });
    }

    /// Everything persisted up to `ticket` is durable.
    pub fn on_durable(&mut self, ticket: Ticket, cx: &mut Way<'_, R>) {
        let mut concerned = BTreeSet::new();
        while let Some(&(next, id)) = self.ledger.tickets.front() {
            if next > ticket {
                break;
            }
            self.ledger.tickets.pop_front();
            concerned.insert(id);
        }
        for id in concerned {
            self.with(id, cx, |partition, world| {
                partition.replica.on_durable(ticket, &mut world.door(id));
                world.touch(id);
            });
        }
        if self.checkpoint.is_some_and(|checkpoint| checkpoint <= ticket) {
            self.checkpoint = None;
            self.store.thaw();
            for id in take(&mut self.installed) {
                self.with(id, cx, |partition, world| {
                    partition.replica.snapshot_durable(&mut world.door(id));
                    world.touch(id);
                });
            }
        }
    }

    /// An operator's order.
    pub fn on_admin(&mut self, admin: Admin, cx: &mut Way<'_, R>) {
        match admin {
            Admin::TransferLeader { partition: id, to } => {
                self.with(id, cx, |partition, world| {
                    partition.replica.transfer(to, &mut world.door(id));
                    world.touch(id);
                });
            }
            Admin::ChangeMembers { partition: id, voters, learners } => {
                self.with(id, cx, |partition, world| {
                    let mut door = world.door(id);
                    // A refused change is visible in the members; the operator looks and retries.
                    if partition.replica.change_members(voters, learners, &mut door).is_err() {
                        world.cx.note(Note::ChangeRefused.into());
                    }
                    world.touch(id);
                });
            }
        }
    }

    /// Handles everything that one input set in motion inside this node; messages of the node to
    /// itself go through `deliver`.
    pub fn settle(
        &mut self,
        cx: &mut Way<'_, R>,
        deliver: impl Fn(&mut Self, NodeId, R::Msg, &mut Way<'_, R>),
    ) {
        loop {
            if let Some(id) = self.ledger.touched.pop_first() {
                self.with(id, cx, Partition::drain_events);
            } else if let Some(msg) = self.local.pop_front() {
                deliver(self, self.node, msg, cx);
            } else {
                return;
            }
        }
    }

    /// Sends what several inputs can share, and makes a checkpoint if one is due.
    pub fn flush(&mut self, cx: &mut Way<'_, R>) {
        // Flushing one log can make another's work visible only through the network, so one round
        // is enough.
        for id in take(&mut self.ledger.unflushed) {
            self.with(id, cx, |partition, world| {
                partition.replica.flush(&mut world.door(id));
                partition.drain_events(world);
            });
        }
        self.checkpoint_if_due(cx);
    }

    /// Makes a checkpoint if enough has been persisted since the last one, or a snapshot that was
    /// installed must become durable.
    fn checkpoint_if_due(&mut self, cx: &mut Way<'_, R>) {
        let config = R::hosting(&self.config);
        let must = self.partitions.values().any(|partition| partition.must_checkpoint);
        let is_due = must || self.ledger.bytes >= config.checkpoint_bytes;
        if !is_due || self.store.is_frozen() {
            return;
        }
        cx.note(Note::Checkpoint.into());
        let keep_from = cx.clock().now - config.version_retention;
        let mut records = Vec::new();
        for (&id, partition) in &mut self.partitions {
            let applied = R::applied(&partition.state);
            let through = partition.replica.compactable(LOG_KEPT).min(applied);
            partition.replica.compact(through);
            self.store.collect_below(id, keep_from);
            records.push(Record::State(id, Box::new(partition.state.clone())));
            let log = partition.replica.checkpoint_records();
            records.extend(log.into_iter().map(|record| Record::Replication(id, record)));
            if take(&mut partition.must_checkpoint) {
                self.installed.push(id);
            }
        }
        self.ledger.bytes = 0;
        self.checkpoint = Some(cx.checkpoint(self.store.freeze(), records));
    }

    /// What must be gone after quiet. What is replicated counts where it is led: a replica that was
    /// removed while it was cut off never learns how things ended, and does not matter.
    pub fn leftovers(&self) -> Vec<Leftover> {
        let of = |partition: &Partition<R>| {
            let leader = partition.leader.as_ref();
            let mut left =
                leader.map_or_else(Vec::new, |leader| leader.leftovers(&partition.state));
            left.push(("early requests", partition.early.len()));
            left.push(("waiting commands", partition.backlog.len()));
            left
        };
        self.partitions.values().flat_map(of).collect()
    }

    /// The copies of replicated state that are here.
    pub fn copies(&self) -> Vec<StateCopy> {
        let copy = |(&partition, held): (&PartitionId, &Partition<R>)| {
            let mut digest = Digest::default();
            digest.add_debug(&held.state);
            for (key, versions) in self.store.scan(partition, None, usize::MAX) {
                // Older versions go when a node makes a checkpoint, which each does by itself.
                digest.add_debug(&(key, versions.last()));
            }
            let position = R::applied(&held.state).0;
            StateCopy { partition, position, digest: digest.value() }
        };
        self.partitions.iter().map(copy).collect()
    }

    /// Panics if the state contradicts itself.
    pub fn assert_invariants(&self) {
        for partition in self.partitions.values() {
            partition.replica.assert_invariants();
            if partition.leader.is_some() {
                let id = partition.id;
                assert!(partition.replica.is_leader(), "{id} serves without leading");
            }
            R::assert_invariants(partition);
        }
        assert!(self.local.is_empty(), "{} left messages to itself", self.node);
    }
}

/// Log entries kept for followers that are behind, before they need a snapshot.
const LOG_KEPT: usize = 10_000;

impl<R: Role> fmt::Display for Partition<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.id, self.replica)
    }
}
