//! One server node: its replicas of many partitions, one store, one stream of durable records.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::Arc;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::digest::Digest;
use orthodrome_core::id::{NodeId, PartitionId, Ticket};
use orthodrome_core::machine::{Admin, Cx, Input, Leftover, Machine, Setup, StateCopy};
use orthodrome_core::rng::Rng;
use orthodrome_core::store::Store;
use orthodrome_core::time::Time;

use super::cpc::PendingList;
use super::message::{Log, Msg, Record};
use super::partition::Partition;
use super::port::Port;
use super::state::State;
use super::{Carousel, Config, Note, Timer};
use crate::replication::{self, Group, Replica};
use crate::routes::Routes;

/// The server side of Carousel: every role that one node plays.
#[derive(Debug)]
pub struct Server {
    node: NodeId,
    cluster: Arc<Cluster>,
    config: Arc<Config>,
    partitions: BTreeMap<PartitionId, Partition>,
    store: Store,
    routes: Routes,
    local: VecDeque<Msg>,
    ledger: Ledger,
    checkpoint: Option<Ticket>,
    /// Partitions whose installed snapshot the checkpoint under way makes durable.
    installed: Vec<PartitionId>,
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
pub(super) struct World<'a, 'b> {
    pub node: NodeId,
    pub cluster: &'a Cluster,
    pub config: &'a Config,
    pub store: &'a mut Store,
    pub routes: &'a mut Routes,
    local: &'a mut VecDeque<Msg>,
    ledger: &'a mut Ledger,
    pub cx: &'a mut (dyn Port + 'b),
}

/// The replicated log's way out.
pub(super) struct Door<'a, 'b> {
    partition: PartitionId,
    ledger: &'a mut Ledger,
    cx: &'a mut (dyn Port + 'b),
}

impl replication::Door<Log> for Door<'_, '_> {
    fn now(&self) -> Time {
        self.cx.now()
    }

    fn rng(&mut self) -> &mut Rng {
        self.cx.rng()
    }

    fn send(&mut self, to: NodeId, message: replication::Message<Log>) {
        self.cx.send(to, Msg::Replication { partition: self.partition, message });
    }

    fn persist(&mut self, record: replication::Record<Log>) -> Ticket {
        self.ledger.bytes += record.disk_size();
        let ticket = self.cx.persist(Record::Replication(self.partition, record));
        self.ledger.tickets.push_back((ticket, self.partition));
        ticket
    }

    fn set_timer(&mut self, timer: replication::Timer, at: Time) {
        self.cx.set_timer(Timer::Replication(self.partition, timer), at);
    }

    fn cancel_timer(&mut self, timer: replication::Timer) {
        self.cx.cancel_timer(Timer::Replication(self.partition, timer));
    }
}

impl<'b> World<'_, 'b> {
    /// Sends a message; one to this node itself is delivered before the step ends.
    pub(super) fn send(&mut self, to: NodeId, msg: Msg) {
        if to == self.node {
            self.local.push_back(msg);
        } else {
            self.cx.send(to, msg);
        }
    }

    /// Sends a message to whoever leads `partition`, as far as is known.
    pub(super) fn send_to_leader(&mut self, partition: PartitionId, msg: Msg) {
        self.send(self.routes.leader(partition), msg);
    }

    /// The supposed leader of `partition` has not answered what it was asked at `asked`.
    pub(super) fn suspect(&mut self, partition: PartitionId, asked: Time) {
        self.routes.suspect(partition, asked, self.cx.now());
    }

    /// The way out for the log of `partition`.
    pub(super) fn door(&mut self, partition: PartitionId) -> Door<'_, 'b> {
        Door { partition, ledger: self.ledger, cx: self.cx }
    }

    /// Persists a record of `partition`, of about so many bytes.
    pub(super) fn persist(
        &mut self,
        partition: PartitionId,
        record: Record,
        bytes: usize,
    ) -> Ticket {
        self.ledger.bytes += bytes;
        let ticket = self.cx.persist(record);
        self.ledger.tickets.push_back((ticket, partition));
        ticket
    }

    /// The last record of `partition` that is not durable yet.
    pub(super) fn last_ticket(&self, partition: PartitionId) -> Option<Ticket> {
        let mut open = self.ledger.tickets.iter().rev();
        open.find(|(_, id)| *id == partition).map(|(ticket, _)| *ticket)
    }

    /// The log of `partition` may have events and messages.
    pub(super) fn touch(&mut self, partition: PartitionId) {
        self.ledger.touched.insert(partition);
        self.ledger.unflushed.insert(partition);
    }
}

impl<const FAST: bool> Machine<Carousel<FAST>> for Server {
    fn new(
        setup: Setup<Carousel<FAST>>,
        recovered: Vec<Record>,
        cx: &mut Cx<'_, Carousel<FAST>>,
    ) -> Self {
        let Setup { node, cluster, config, engine } = setup;
        let mut states: BTreeMap<PartitionId, State> = BTreeMap::new();
        let mut logs: BTreeMap<PartitionId, Vec<replication::Record<Log>>> = BTreeMap::new();
        let mut lists: BTreeMap<PartitionId, PendingList> = BTreeMap::new();
        for record in recovered {
            match record {
                Record::State(partition, state) => drop(states.insert(partition, *state)),
                Record::Replication(partition, record) => {
                    logs.entry(partition).or_default().push(record);
                }
                Record::Pending(partition, txn, listed) => {
                    let list = lists.entry(partition).or_default();
                    list.supersede(txn);
                    list.insert(txn, *listed, cx.now());
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
            let list = lists.remove(&id).unwrap_or_default();
            server.open(id, log, state, list, cx);
        }
        server.settle(cx);
        server
    }

    fn step(&mut self, input: Input<Carousel<FAST>>, cx: &mut Cx<'_, Carousel<FAST>>) {
        match input {
            Input::Message { from, msg } => self.on_message(from, msg, cx),
            Input::Timer(timer) => self.on_timer(timer, cx),
            Input::Durable(ticket) => self.on_durable(ticket, cx),
            Input::Admin(admin) => self.on_admin(admin, cx),
            Input::Begin(_) | Input::Decide { .. } | Input::Resolve { .. } => {
                unreachable!("callers talk to gateways, not to server {}", self.node)
            }
        }
        self.settle(cx);
    }

    fn flush(&mut self, cx: &mut Cx<'_, Carousel<FAST>>) {
        // Flushing one log can make another's work visible only through the network, so one round
        // is enough.
        for id in std::mem::take(&mut self.ledger.unflushed) {
            self.with(id, cx, |partition, world| {
                partition.replica.flush(&mut world.door(id));
                partition.drain_events(world);
            });
        }
        self.checkpoint_if_due(cx);
    }

    fn assert_invariants(&self) {
        for partition in self.partitions.values() {
            partition.assert_invariants();
        }
        assert!(self.local.is_empty(), "{} left messages to itself", self.node);
    }

    fn leftovers(&self) -> Vec<Leftover> {
        self.partitions.values().flat_map(Partition::leftovers).collect()
    }

    fn copies(&self) -> Vec<StateCopy> {
        let copy = |(&partition, held): (&PartitionId, &Partition)| {
            let mut digest = Digest::default();
            digest.add_debug(&held.state);
            for (key, versions) in self.store.scan(partition, None, usize::MAX) {
                // Older versions go when a node makes a checkpoint, which each does by itself.
                digest.add_debug(&(key, versions.last()));
            }
            let position = held.state.applied.0;
            StateCopy { partition, position, digest: digest.value() }
        };
        self.partitions.iter().map(copy).collect()
    }
}

impl Server {
    /// Starts a replica with what survived of it.
    fn open(
        &mut self,
        id: PartitionId,
        log: Vec<replication::Record<Log>>,
        state: State,
        list: PendingList,
        cx: &mut dyn Port,
    ) {
        let placed = self.cluster.partition(id);
        let group = Group {
            voters: placed.map(|placed| placed.replicas.clone()).unwrap_or_default(),
            learners: Vec::new(),
            preferred_leader: placed.map(|placed| placed.preferred_leader),
        };
        let config = self.config.replication.clone();
        let mut door = Door { partition: id, ledger: &mut self.ledger, cx };
        let replica = Replica::new(self.node, group, config, log, &mut door);
        assert!(
            state.applied >= replica.base_index(),
            "{id} at {}: the checkpoint ends at {:?}, but its log begins after {:?}",
            self.node,
            state.applied,
            replica.base_index()
        );
        self.ledger.touched.insert(id);
        let is_listing = list.len() > 0;
        self.partitions.insert(id, Partition::new(id, replica, state, list));
        if is_listing {
            self.with(id, cx, |partition, world| partition.set_sweep_timer(world));
        }
    }

    fn with<T>(
        &mut self,
        id: PartitionId,
        cx: &mut dyn Port,
        act: impl FnOnce(&mut Partition, &mut World<'_, '_>) -> T,
    ) -> Option<T> {
        let Self { node, cluster, config, partitions, store, routes, local, ledger, .. } = self;
        let mut world = World { node: *node, cluster, config, store, routes, local, ledger, cx };
        let partition = partitions.get_mut(&id)?;
        Some(act(partition, &mut world))
    }

    fn on_message(&mut self, from: NodeId, msg: Msg, cx: &mut dyn Port) {
        if let Some(id) = msg.partition() {
            if self.partitions.contains_key(&id) {
                self.with(id, cx, |partition, world| partition.on_message(from, msg, world));
            } else {
                let txn = orthodrome_core::Message::txn(&msg);
                cx.send(from, Msg::NotLeader { partition: id, leader: None, txn });
            }
            return;
        }
        match msg {
            Msg::Replication { partition, message } => {
                self.on_replication(from, partition, message, cx);
            }
            Msg::NotLeader { partition, leader, txn } => {
                self.on_not_leader(from, partition, leader, txn, cx);
            }
            Msg::ReadResult { .. }
            | Msg::FollowerReadResult { .. }
            | Msg::Decided { .. }
            | Msg::FastDecided { .. }
            | Msg::ReadOnlyResult { .. }
            | Msg::ReadAndPrepare { .. }
            | Msg::FastPrepare { .. }
            | Msg::FastPrepareResult { .. }
            | Msg::CollectPending { .. }
            | Msg::PendingList { .. }
            | Msg::QueryPending { .. }
            | Msg::CoordinatorPrepare { .. }
            | Msg::Commit { .. }
            | Msg::Abort { .. }
            | Msg::Heartbeat { .. }
            | Msg::Resolve { .. }
            | Msg::PrepareResult { .. }
            | Msg::Writeback { .. }
            | Msg::WritebackAck { .. }
            | Msg::QueryPrepare { .. }
            | Msg::QueryDecision { .. }
            | Msg::MayForget { .. }
            | Msg::Forget { .. }
            | Msg::ReadOnly { .. } => {
                unreachable!("answers to clients do not come to server {}", self.node)
            }
        }
    }

    fn on_replication(
        &mut self,
        from: NodeId,
        id: PartitionId,
        message: replication::Message<Log>,
        cx: &mut dyn Port,
    ) {
        if !self.partitions.contains_key(&id) {
            // A membership change made this node a member; it learns the rest from the leader.
            self.open(id, Vec::new(), State::default(), PendingList::default(), cx);
        }
        self.with(id, cx, |partition, world| {
            partition.replica.step(from, message, &mut world.door(id));
            world.touch(id);
        });
    }

    fn on_not_leader(
        &mut self,
        from: NodeId,
        partition: PartitionId,
        leader: Option<NodeId>,
        txn: Option<orthodrome_core::TxnId>,
        cx: &mut dyn Port,
    ) {
        if !self.routes.redirect(partition, from, leader, cx.now()) {
            return;
        }
        let Some(txn) = txn else { return };
        let hosted: Vec<PartitionId> = self.partitions.keys().copied().collect();
        for id in hosted {
            self.with(id, cx, |replica, world| replica.on_not_leader(partition, txn, world));
        }
    }

    fn on_timer(&mut self, timer: Timer, cx: &mut dyn Port) {
        match timer {
            Timer::Replication(id, timer) => {
                self.with(id, cx, |partition, world| {
                    partition.replica.on_timer(timer, &mut world.door(id));
                    world.touch(id);
                });
            }
            Timer::Sweep(id) => {
                self.with(id, cx, Partition::on_sweep_timeout);
            }
            Timer::CommitWait(id) => {
                self.with(id, cx, Partition::on_commit_wait_timeout);
            }
            Timer::Resend(_) | Timer::Heartbeat => {
                unreachable!("a client's timer at server {}", self.node)
            }
        }
    }

    fn on_durable(&mut self, ticket: Ticket, cx: &mut dyn Port) {
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
                partition.on_durable(ticket, world);
                world.touch(id);
            });
        }
        if self.checkpoint.is_some_and(|checkpoint| checkpoint <= ticket) {
            self.checkpoint = None;
            self.store.thaw();
            for id in std::mem::take(&mut self.installed) {
                self.with(id, cx, |partition, world| {
                    partition.replica.snapshot_durable(&mut world.door(id));
                    world.touch(id);
                });
            }
        }
    }

    fn on_admin(&mut self, admin: Admin, cx: &mut dyn Port) {
        match admin {
            Admin::TransferLeader { partition: id, to } => {
                self.with(id, cx, |partition, world| {
                    partition.replica.transfer(to, &mut world.door(id));
                    world.touch(id);
                });
            }
            Admin::ChangeMembers { partition: id, voters, learners } => {
                self.with(id, cx, |partition, world| {
                    if partition.recovery.is_some() {
                        // What the lists of this membership show must be in the log first.
                        world.cx.note(Note::ChangeRefused);
                        return;
                    }
                    let mut door = world.door(id);
                    // A refused change is visible in the members; the operator looks and retries.
                    if partition.replica.change_members(voters, learners, &mut door).is_err() {
                        world.cx.note(Note::ChangeRefused);
                    }
                    world.touch(id);
                });
            }
        }
    }

    /// Handles everything that one input set in motion inside this node.
    fn settle(&mut self, cx: &mut dyn Port) {
        loop {
            if let Some(id) = self.ledger.touched.pop_first() {
                self.with(id, cx, Partition::drain_events);
            } else if let Some(msg) = self.local.pop_front() {
                self.on_message(self.node, msg, cx);
            } else {
                return;
            }
        }
    }

    /// Makes a checkpoint if enough has been persisted since the last one, or a snapshot that was
    /// installed must become durable.
    fn checkpoint_if_due(&mut self, cx: &mut dyn Port) {
        let must = self.partitions.values().any(|partition| partition.must_checkpoint);
        let is_due = must || self.ledger.bytes >= self.config.checkpoint_bytes;
        if !is_due || self.store.is_frozen() {
            return;
        }
        cx.note(Note::Checkpoint);
        let keep_from = cx.clock().now - self.config.version_retention;
        let mut records = Vec::new();
        for (&id, partition) in &mut self.partitions {
            let through = partition.replica.compactable(LOG_KEPT).min(partition.state.applied);
            partition.replica.compact(through);
            self.store.collect_below(id, keep_from);
            records.push(Record::State(id, Box::new(partition.state.clone())));
            let log = partition.replica.checkpoint_records();
            records.extend(log.into_iter().map(|record| Record::Replication(id, record)));
            let listed = partition.fast.list.iter();
            records.extend(
                listed.map(|(txn, listed)| Record::Pending(id, txn, Box::new(listed.clone()))),
            );
            if std::mem::take(&mut partition.must_checkpoint) {
                self.installed.push(id);
            }
        }
        self.ledger.bytes = 0;
        self.checkpoint = Some(cx.checkpoint(self.store.freeze(), records));
    }
}

/// Log entries kept for followers that are behind, before they need a snapshot.
const LOG_KEPT: usize = 10_000;

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, partition) in self.partitions.values().enumerate() {
            let State { prepared, coordinated, .. } = &partition.state;
            let separator = if at == 0 { "" } else { " | " };
            write!(f, "{separator}{} {}", partition.id, partition.replica)?;
            if !prepared.is_empty() {
                write!(f, " prepared {:?}", prepared.keys())?;
            }
            if !coordinated.is_empty() {
                write!(f, " coordinated {:?}", coordinated.keys())?;
            }
            if partition.fast.list.len() > 0 {
                let listed: Vec<_> = partition.fast.list.txns().collect();
                write!(f, " listed {listed:?}")?;
            }
        }
        Ok(())
    }
}
