//! One server node.

use std::collections::VecDeque;
use std::fmt;
use std::mem::take;
use std::sync::Arc;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::digest::Digest;
use orthodrome_core::id::{NodeId, PartitionId, Ticket, TxnId};
use orthodrome_core::machine::{
    Admin, GroupView, Input, Leak, Machine, MembershipOrder, Message as _, OrderState, Protocol,
    Refusal, ReplicaDigest, Setup,
};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::scan::{Ask, LISTS_APART_MAX, Listing, Unit};
use orthodrome_core::store::{StateEngine, Store};
use orthodrome_core::time::Time;

use super::world::{Few, Io, PendingWrites};
use super::{Context, Divisible as _, Note, Partition, Record, RecordOf, Role, World};
use crate::checkpoint::CheckpointPace;
use crate::replication::{self, Group, Index, Replica};
use crate::routes::Routes;

/// The most log entries kept for followers that lag behind. Beyond it, they need a snapshot; see
/// also [`super::Config::kept_bytes`].
const LOG_KEPT: usize = 10_000;

/// The number of orders for partitions on other nodes that a node remembers as having had no
/// effect.
const STRAYS_KEPT: usize = 8;

/// One server node: its replicas of many partitions, one store, one stream of durable records.
#[derive(Debug)]
pub struct Server<R: Role> {
    node: NodeId,
    cluster: Arc<Cluster>,
    config: Arc<R::Config>,
    partitions: OrdMap<PartitionId, Partition<R>>,
    store: Store,
    routes: Routes,
    local: VecDeque<R::Msg>,
    pending_writes: PendingWrites,
    /// Empty; it keeps its memory between two calls of [`Server::on_durable`].
    concerned: Few,
    checkpoint: Option<Ticket>,
    /// Partitions whose installed snapshot the pending checkpoint makes durable.
    installed: Few,
    /// The latest orders to change members of partitions that have no replica here.
    strays: VecDeque<MembershipOrder>,
}

impl<R: Role> Machine<R::Protocol> for Server<R> {
    fn new(
        setup: Setup<R::Protocol>,
        recovered: Vec<RecordOf<R>>,
        cx: &mut Context<'_, R>,
    ) -> Self {
        let Setup { node, cluster, config, engine, workers: _, is_replacement: _ } = setup;
        let mut server = Self::start(node, cluster, config, engine, recovered, cx);
        server.settle(cx);
        server
    }

    fn step(&mut self, input: Input<R::Protocol>, cx: &mut Context<'_, R>) {
        match input {
            Input::Message { from, msg } => R::deliver(self, from, msg, cx),
            Input::Timer(timer) => R::on_timer(self, timer, cx),
            Input::Durable(ticket) => self.on_durable(ticket, cx),
            Input::Admin(admin) => self.on_admin(admin, cx),
            Input::Begin(_) | Input::Read { .. } | Input::Decide { .. } | Input::Resolve { .. } => {
                unreachable!("callers talk to gateways, not to servers")
            }
        }
        self.settle(cx);
    }

    fn flush(&mut self, cx: &mut Context<'_, R>) {
        self.send_shared(cx);
    }

    fn assert_invariants(&self) {
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

    /// State that must disappear when nothing is pending. Replicated state counts where it is led,
    /// and a replica's own state counts if it knows a leader. A replica that was removed while it
    /// was cut off never learns how transactions ended, and does not matter.
    fn leaks(&self) -> Vec<Leak> {
        let of = |partition: &Partition<R>| {
            let leader = partition.leader.as_ref();
            let mut left = leader.map_or_else(Vec::new, |leader| leader.leaks(&partition.state));
            if partition.replica.leader().is_some() {
                left.extend(R::own_leaks(&partition.own));
            }
            left.push(("early requests", partition.early.len()));
            left.push(("waiting commands", partition.backlog.len()));
            left
        };
        self.partitions.values().flat_map(of).collect()
    }

    fn orders(&self) -> Vec<MembershipOrder> {
        let of = |partition: &Partition<R>| partition.replica.orders(partition.id);
        let strays = self.strays.iter().cloned();
        self.partitions.values().flat_map(of).chain(strays).collect()
    }

    fn refusal(&self, order: &Admin) -> Option<Refusal> {
        let id = order.partition();
        match self.partitions.get(&id) {
            Some(partition) => partition.refusal(order),
            None => Some(Refusal::NotLeader(self.routes.learnt_leader(id))),
        }
    }

    fn groups(&self, now: Time) -> Vec<GroupView> {
        let placed = self.cluster.partitions().map(|placed| placed.id);
        placed.filter_map(|id| self.group(id, now)).collect()
    }

    fn names(&self, ask: &Ask) -> Option<Listing> {
        let Unit::Partition(id) = ask.unit else { return None };
        self.partitions.get(&id)?.names(self.node, ask, &self.store)
    }

    fn replica_digests(&self) -> Vec<ReplicaDigest> {
        let copy = |(&partition, held): (&PartitionId, &Partition<R>)| {
            let mut digest = Digest::default();
            digest.add_debug(&held.state);
            for (key, versions) in self.store.scan(partition, None, usize::MAX) {
                // Nodes drop older versions, and deletions, at their checkpoints, independently of each
                // other.
                if let Some(newest @ (_, Some(_))) = versions.last() {
                    digest.add_debug(&(key, newest));
                }
            }
            let position = R::applied(&held.state).0;
            let members = Some(held.replica.members().all().len());
            ReplicaDigest { partition, position, digest: digest.value(), members }
        };
        // While a snapshot arrives, the store has versions that are later than the state.
        let complete = self.partitions.iter().filter(|(_, held)| held.replica.is_complete());
        complete.map(copy).collect()
    }
}

impl<R: Role> Server<R> {
    /// Starts the node from its surviving records.
    fn start(
        node: NodeId,
        cluster: Arc<Cluster>,
        config: Arc<R::Config>,
        engine: Box<dyn StateEngine>,
        recovered: Vec<RecordOf<R>>,
        cx: &mut Context<'_, R>,
    ) -> Self {
        let mut states: OrdMap<PartitionId, R::State> = OrdMap::new();
        let mut logs: OrdMap<PartitionId, Vec<replication::Record<R::Log>>> = OrdMap::new();
        let mut own: OrdMap<PartitionId, Vec<R::OwnRecord>> = OrdMap::new();
        let mut pace = CheckpointPace::default();
        for record in recovered {
            let bytes = <R::Protocol as Protocol>::record_size(&record);
            pace.recovered(bytes, matches!(record, Record::State(..)));
            match record {
                Record::State(partition, state) => match states.get_mut(&partition) {
                    Some(known) => known.join(*state),
                    None => drop(states.insert(partition, *state)),
                },
                Record::Replication(partition, record) => {
                    logs.entry(partition).or_default().push(record);
                }
                Record::Own(partition, record) => own.entry(partition).or_default().push(*record),
            }
        }
        // A partition began on its founders. A replica that came here by a change of members is known
        // from its records, or opened when its leader first writes to it. If servers that a new
        // placement names opened it at once, they would begin an empty log and elect a leader.
        let ids = cluster.partitions().map(|placed| placed.id);
        let placed = ids.filter(|id| cluster.founders(*id).contains(&node));
        let hosted: OrdSet<PartitionId> = placed.chain(logs.keys().copied()).collect();
        let mut server = Self {
            node,
            routes: Routes::new(cluster.clone()),
            cluster,
            config,
            partitions: OrdMap::new(),
            store: Store::new(engine),
            local: VecDeque::new(),
            pending_writes: PendingWrites { pace, ..PendingWrites::default() },
            concerned: Few::default(),
            checkpoint: None,
            installed: Few::default(),
            strays: VecDeque::new(),
        };
        for id in hosted {
            let log = logs.remove(&id).unwrap_or_default();
            let state = states.remove(&id).unwrap_or_default();
            let own = own.remove(&id).unwrap_or_default();
            server.open(id, log, state, own, cx);
        }
        server
    }

    /// Starts a replica from its surviving records.
    fn open(
        &mut self,
        id: PartitionId,
        log: Vec<replication::Record<R::Log>>,
        state: R::State,
        own: Vec<R::OwnRecord>,
        cx: &mut Context<'_, R>,
    ) {
        let placed = self.cluster.partition(id);
        let group = Group {
            voters: self.cluster.founders(id).to_vec(),
            learners: Vec::new(),
            preferred_leader: placed.map(|placed| placed.preferred_leader),
        };
        let config = R::hosting(&self.config).replication.clone();
        let mut io =
            Io::<R> { partition: id, pending_writes: &mut self.pending_writes, cx: cx.reborrow() };
        let replica = Replica::new(self.node, group, config, log, &mut io);
        let applied = R::applied(&state);
        assert!(
            applied >= replica.base_index(),
            "{id} at {}: the checkpoint ends at {applied:?}, but its log begins after {:?}",
            self.node,
            replica.base_index()
        );
        self.pending_writes.touched.insert(id);
        self.store.may_lack(id, R::floor(&state));
        self.partitions.insert(id, Partition::new(id, replica, state));
        self.with(id, cx, |partition, world| R::on_opened(partition, own, world));
    }

    /// What is known here about a partition's group: from its own replica if that is a member,
    /// otherwise from what members have sent.
    fn group(&self, id: PartitionId, now: Time) -> Option<GroupView> {
        if let Some(partition) = self.partitions.get(&id)
            && partition.replica.members().is_member(self.node)
        {
            return Some(partition.group(now));
        }
        let (voters, leader) = (self.routes.learnt_voters(id), self.routes.learnt_leader(id));
        if voters.is_none() && leader.is_none() {
            return None;
        }
        let voters = self.routes.voters(id).to_vec();
        // A leader from before the change of members does not lead now.
        let leader = leader.filter(|leader| voters.contains(leader));
        let (learners, behind) = (Vec::new(), Vec::new());
        Some(GroupView {
            partition: id,
            voters,
            learners,
            leader,
            has_leaders: true,
            successor: None,
            behind,
        })
    }

    /// Calls a function on one of the partitions, if it is here.
    pub fn with(
        &mut self,
        id: PartitionId,
        cx: &mut Context<'_, R>,
        act: impl FnOnce(&mut Partition<R>, &mut World<'_, R>),
    ) {
        let Self {
            node, cluster, config, partitions, store, routes, local, pending_writes, ..
        } = self;
        let (cluster, config): (&Cluster, &R::Config) = (cluster, config);
        let mut world = World {
            node: *node,
            cluster,
            config,
            store,
            routes,
            local,
            pending_writes,
            cx: cx.reborrow(),
            effects: Digest::default(),
        };
        if let Some(partition) = partitions.get_mut(&id) {
            act(partition, &mut world);
        }
    }

    /// Processes a message for partition `id`.
    pub fn on_message(
        &mut self,
        id: PartitionId,
        from: NodeId,
        msg: R::Msg,
        cx: &mut Context<'_, R>,
    ) {
        if self.partitions.contains_key(&id) {
            self.with(id, cx, |partition, world| partition.on_message(from, msg, world));
        } else {
            // A node that asks a server without a replica of the partition is searching for the
            // leader.
            if let Some((since, voters)) = self.routes.learnt_voters(id) {
                cx.send(from, R::members(id, since, voters.to_vec()));
            }
            cx.send(from, R::not_leader(id, None, msg.txn()));
        }
    }

    /// Processes a message of partition `id`'s log.
    pub fn on_log_message(
        &mut self,
        id: PartitionId,
        from: NodeId,
        message: replication::Message<R::Log>,
        cx: &mut Context<'_, R>,
    ) {
        if !self.partitions.contains_key(&id) {
            // A change of members made this node a member; it learns the rest from the leader.
            self.open(id, Vec::new(), R::State::default(), Vec::new(), cx);
        }
        self.with(id, cx, |partition, world| {
            partition.replica.step(from, message, &mut world.io(id));
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
        cx: &mut Context<'_, R>,
    ) {
        if !self.routes.redirect(partition, from, leader, cx.now()) {
            return;
        }
        // The request was not about a single transaction, and is repeated when it is due.
        let Some(txn) = txn else { return };
        let hosted: Vec<PartitionId> = self.partitions.keys().copied().collect();
        for id in hosted {
            self.with(id, cx, |replica, world| {
                if let Some(mut leading) = replica.leading() {
                    R::on_not_leader(&mut leading, partition, txn, world);
                }
            });
        }
    }

    /// A node with a replica of `partition` names the voters.
    pub fn on_members(&mut self, partition: PartitionId, since: Index, voters: &[NodeId]) {
        self.routes.learn_voters(partition, since, voters);
    }

    /// A timer of partition `id`'s log expired.
    pub fn on_log_timer(
        &mut self,
        id: PartitionId,
        timer: replication::Timer,
        cx: &mut Context<'_, R>,
    ) {
        self.with(id, cx, |partition, world| {
            partition.replica.on_timer(timer, &mut world.io(id));
            world.touch(id);
        });
    }

    /// Everything persisted up to `ticket` is durable.
    fn on_durable(&mut self, ticket: Ticket, cx: &mut Context<'_, R>) {
        let mut concerned = take(&mut self.concerned);
        while let Some(&(next, id)) = self.pending_writes.tickets.front()
            && next <= ticket
        {
            self.pending_writes.tickets.pop_front();
            concerned.insert(id);
        }
        while let Some(id) = concerned.pop_first() {
            self.with(id, cx, |partition, world| {
                partition.replica.on_durable(ticket, &mut world.io(id));
                R::on_durable(partition, ticket, world);
                world.touch(id);
            });
        }
        self.concerned = concerned;
        if self.checkpoint.is_some_and(|checkpoint| checkpoint <= ticket) {
            self.checkpoint = None;
            self.store.thaw();
            while let Some(id) = self.installed.pop_first() {
                self.with(id, cx, |partition, world| {
                    partition.replica.snapshot_durable(&mut world.io(id));
                    world.touch(id);
                });
            }
        }
    }

    /// Processes an operator's order.
    fn on_admin(&mut self, admin: Admin, cx: &mut Context<'_, R>) {
        match admin {
            Admin::TransferLeader { partition: id, to } => {
                self.with(id, cx, |partition, world| {
                    partition.replica.transfer(to, &mut world.io(id));
                    world.touch(id);
                });
            }
            Admin::ChangeMembers { partition: id, voters, learners } => {
                if !self.partitions.contains_key(&id) {
                    self.refuse_elsewhere(id, voters, learners, cx.now());
                    return;
                }
                self.with(id, cx, |partition, world| {
                    partition.change_members(voters, learners, world);
                });
            }
        }
    }

    /// Refuses an order for a partition that has no replica here.
    fn refuse_elsewhere(
        &mut self,
        partition: PartitionId,
        voters: Vec<NodeId>,
        learners: Vec<NodeId>,
        given: Time,
    ) {
        let state = OrderState::NotLeader(None);
        if self.strays.len() >= STRAYS_KEPT {
            self.strays.pop_front();
        }
        self.strays.push_back(MembershipOrder { partition, voters, learners, given, state });
    }

    /// Processes everything that one input caused inside this node.
    fn settle(&mut self, cx: &mut Context<'_, R>) {
        loop {
            if let Some(id) = self.pending_writes.touched.pop_first() {
                self.with(id, cx, Partition::drain_events);
            } else if let Some(msg) = self.local.pop_front() {
                R::deliver(self, self.node, msg, cx);
            } else {
                return;
            }
        }
    }

    /// Sends messages that combine several inputs, and makes a checkpoint if one is due.
    fn send_shared(&mut self, cx: &mut Context<'_, R>) {
        // Flushing one log affects other logs only through the network, so one round suffices.
        let mut unflushed = take(&mut self.pending_writes.unflushed);
        while let Some(id) = unflushed.pop_first() {
            self.with(id, cx, |partition, world| {
                partition.replica.flush(&mut world.io(id));
                if partition.has_events() {
                    partition.drain_events(world);
                }
            });
        }
        if self.pending_writes.unflushed.is_empty() {
            self.pending_writes.unflushed = unflushed;
        }
        self.checkpoint_if_due(cx);
    }

    /// Makes a checkpoint if enough has been persisted since the last one, or an installed snapshot
    /// must become durable.
    fn checkpoint_if_due(&mut self, cx: &mut Context<'_, R>) {
        let config = R::hosting(&self.config);
        let is_due = !self.pending_writes.installed.is_empty()
            || self.pending_writes.pace.is_due(config.checkpoint_bytes);
        if !is_due || self.store.is_frozen() {
            return;
        }
        cx.note(Note::Checkpoint.into());
        // A scan must see the deletions between its two lists. Their timestamps may be a little older
        // than the first list, hence twice its time.
        let retention = config.version_retention.max(LISTS_APART_MAX * 2);
        let keep_from = cx.clock().now - retention;
        let mut records = Vec::new();
        for (&id, partition) in &mut self.partitions {
            let applied = R::applied(&partition.state);
            let through = partition.replica.compactable_within(LOG_KEPT, config.kept_bytes);
            let through = through.min(applied);
            partition.replica.compact(through);
            self.store.collect_below(id, keep_from);
            let parts = partition.state.clone().divide(config.piece_bytes);
            records.extend(parts.into_iter().map(|part| Record::State(id, Box::new(part))));
            let log = partition.replica.checkpoint_records();
            records.extend(log.into_iter().map(|record| Record::Replication(id, record)));
            let own = R::own_records(partition).into_iter();
            records.extend(own.map(|record| Record::Own(id, Box::new(record))));
        }
        self.installed = take(&mut self.pending_writes.installed);
        let bytes = records.iter().map(<R::Protocol as Protocol>::record_size).sum();
        self.pending_writes.pace.made(bytes);
        self.checkpoint = Some(cx.checkpoint(self.store.freeze(), records));
    }
}

impl<R: Role> fmt::Display for Server<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, partition) in self.partitions.values().enumerate() {
            let separator = if at == 0 { "" } else { " | " };
            write!(f, "{separator}{partition}")?;
        }
        Ok(())
    }
}
