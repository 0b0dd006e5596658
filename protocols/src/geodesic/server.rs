//! One server node: its replicas of many partitions, the transactions that it recovers, one store, one
//! stream of durable records.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use orthodrome_core::Wire as _;
use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{NodeId, PartitionId, Ticket, TxnId};
use orthodrome_core::machine::{
    Admin, Claim, Cx, Gauge, GroupView, Input, Lane, Leak, Machine, MembershipOrder, Message as _,
    OrderState, Refusal, Setup,
};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::scan::{Ask, Listing, Unit};
use orthodrome_core::store::Store;
use orthodrome_core::time::{Duration, Time, Timestamp, nanos};
use orthodrome_core::txn::{Key, VALUE_BYTES_MAX};

use super::drive::{Drive, Out, Progress, Stage};
use super::members::{Locating, Members, founded, is_member, is_same};
use super::message::{Change, Inner, Msg, Plain, Record};
use super::outbox::Outbox;
use super::pending::Maker;
use super::replica::{Overdue, Reached, Release, Replica};
use super::state::State;
use super::under_way::UnderWay;
use super::{Config, Geodesic, Note, Timer, backoff};
use crate::checkpoint::CheckpointPace;
use crate::sizes::READ_BYTES_MAX;

/// The server side of Geodesic: every role that one node plays.
#[derive(Debug)]
pub struct Server {
    node: NodeId,
    /// Which start of this node it is, for ballots.
    incarnation: u64,
    cluster: Arc<Cluster>,
    config: Arc<Config>,
    replicas: OrdMap<PartitionId, Replica>,
    /// Transactions that this node recovers, and when each has to be looked at again.
    drives: OrdMap<TxnId, (Drive, Time)>,
    under_way: UnderWay,
    store: Store,
    local: VecDeque<Msg>,
    outbox: Outbox,
    /// When a message last came from each node.
    heard: OrdMap<NodeId, Time>,
    maker: Maker,
    pending_writes: PendingWrites,
    checkpoint: Option<Ticket>,
    /// Partitions of which this server was a member and is none any more. Whoever asks is told who is.
    left: OrdMap<PartitionId, Left>,
    locating: Locating,
    /// The latest orders to change members, oldest first.
    orders: VecDeque<MembershipOrder>,
}

/// What a former member knows of a partition.
#[derive(Debug)]
struct Left {
    members: Arc<Members>,
    /// The newest of them takes part.
    is_newest_whole: bool,
}

impl Left {
    fn to(members: &Arc<Members>) -> Self {
        Self { members: members.clone(), is_newest_whole: false }
    }

    /// How far an order is that was taken here.
    fn progress(&self, partition: PartitionId, target: &[NodeId]) -> Reached {
        let Members { nodes, newest, target: ordered, .. } = self.members.as_ref();
        if !is_same(target, ordered) && !is_same(target, nodes) {
            return Reached::Overtaken;
        }
        match (newest.filter(|_| !self.is_newest_whole), is_same(target, nodes)) {
            (Some(newest), _) => Reached::Pending(format!("{newest} copies {partition}")),
            (None, true) => Reached::Finished,
            (None, false) => Reached::Pending("the members go on with it".into()),
        }
    }
}

/// What was written, and what must not be said before it is durable.
#[derive(Debug, Default)]
struct PendingWrites {
    last: Option<Ticket>,
    held: VecDeque<(Ticket, NodeId, Msg)>,
    /// When the next checkpoint is due.
    pace: CheckpointPace,
}

/// Everything around one replica that its handlers need.
pub(super) struct World<'a, 'b> {
    pub node: NodeId,
    pub incarnation: u64,
    pub cluster: &'a Cluster,
    pub config: &'a Config,
    pub store: &'a mut Store,
    /// When a message last came from each node.
    pub heard: &'a OrdMap<NodeId, Time>,
    local: &'a mut VecDeque<Msg>,
    outbox: &'a mut Outbox,
    pub locating: &'a mut Locating,
    pub maker: &'a mut Maker,
    pending_writes: &'a mut PendingWrites,
    pub cx: &'a mut Cx<'b, Geodesic>,
}

impl World<'_, '_> {
    /// Sends a message when the step ends; one to this node itself is delivered before.
    pub(super) fn send(&mut self, to: NodeId, msg: Msg) {
        if to == self.node {
            self.local.push_back(msg);
        } else {
            self.outbox.push(to, msg);
        }
    }

    /// True if these keys hold more than one answer may tell.
    pub(super) fn is_too_much(&self, partition: PartitionId, keys: &[Key]) -> bool {
        let mut bytes = 0;
        // Of a few keys it is certain without a look.
        keys.len() > READ_BYTES_MAX / VALUE_BYTES_MAX
            && keys.iter().any(|key| {
                bytes += key.size() + self.store.read(partition, key).size();
                bytes > READ_BYTES_MAX
            })
    }

    /// Sends a message once everything written so far is durable (D1, R4).
    pub(super) fn reply(&mut self, to: NodeId, msg: Msg) {
        match self.pending_writes.last {
            Some(ticket) if !self.config.mutations.sends_before_fsync() => {
                self.pending_writes.held.push_back((ticket, to, msg));
            }
            Some(_) | None => self.send(to, msg),
        }
    }

    /// Makes a change durable.
    pub(super) fn persist(&mut self, partition: PartitionId, change: Change) {
        let record = Record::Change(partition, change);
        self.pending_writes.pace.wrote(record.size());
        self.pending_writes.last = Some(self.cx.persist(record));
    }
}

impl Machine<Geodesic> for Server {
    fn new(setup: Setup<Geodesic>, recovered: Vec<Record>, cx: &mut Cx<'_, Geodesic>) -> Self {
        let Setup { node, cluster, config, engine, workers: _, is_replacement } = setup;
        let cluster = founded(cluster);
        let mut store = Store::new(engine);
        let mut states: OrdMap<PartitionId, State> = OrdMap::new();
        let mut pace = CheckpointPace::default();
        for record in recovered {
            pace.recovered(record.size(), matches!(record, Record::State(..)));
            match record {
                Record::State(partition, state) => match states.get_mut(&partition) {
                    Some(known) => known.join(*state),
                    None => drop(states.insert(partition, *state)),
                },
                Record::Change(partition, change) => {
                    let state = states.entry(partition).or_default();
                    state.apply((&cluster, partition), &change, &mut store);
                }
            }
        }
        let (mut cluster, mut outbox) = (cluster, Outbox::default());
        for (&partition, state) in &states {
            let Some(members) = &state.members else { continue };
            Arc::make_mut(&mut cluster).place(partition, members.nodes.clone());
            outbox.members.insert(partition, members.clone());
        }
        let mut server = Self {
            node,
            incarnation: cx.rng().next_u64(),
            config,
            replicas: OrdMap::new(),
            drives: OrdMap::new(),
            under_way: UnderWay::default(),
            store,
            local: VecDeque::new(),
            outbox,
            heard: OrdMap::new(),
            maker: Maker::new(node),
            pending_writes: PendingWrites { pace, ..PendingWrites::default() },
            checkpoint: None,
            left: OrdMap::new(),
            locating: Locating::default(),
            orders: VecDeque::new(),
            cluster: cluster.clone(),
        };
        // What it made before it started lies below the ceiling of one of its partitions. Timestamps of
        // one partition may be final at another, so they differ from those of all.
        let ceilings = states.values().map(|state| state.ceiling);
        server.maker.forget(ceilings.max().unwrap_or_default());
        for placed in cluster.partitions().filter(|p| p.replicas.contains(&node)) {
            let state = states.remove(&placed.id).unwrap_or_default();
            let members = placed.replicas.clone();
            let state = (state, is_replacement);
            let (_, mut world) = server.world(cx);
            let replica = Replica::new(placed.id, members, state, &mut world);
            server.replicas.insert(placed.id, replica);
        }
        let left = states.into_iter().filter_map(|(id, it)| Some((id, Left::to(&it.members?))));
        server.left.extend(left);
        server.settle(cx);
        server
    }

    fn step(&mut self, input: Input<Geodesic>, cx: &mut Cx<'_, Geodesic>) {
        match input {
            Input::Message { from, msg } => {
                self.heard.insert(from, cx.now());
                self.on_message(from, msg, cx);
            }
            Input::Timer(timer) => self.on_timer(timer, cx),
            Input::Durable(ticket) => self.on_durable(ticket),
            Input::Admin(Admin::ChangeMembers { partition, voters, learners }) => {
                self.on_order(partition, voters, learners, cx);
            }
            Input::Admin(Admin::TransferLeader { .. }) => cx.note(Note::OrderRefused),
            Input::Begin(_) | Input::Read { .. } | Input::Decide { .. } | Input::Resolve { .. } => {
                unreachable!("callers talk to gateways, not to server {}", self.node)
            }
        }
        self.settle(cx);
    }

    fn flush(&mut self, cx: &mut Cx<'_, Geodesic>) {
        self.checkpoint_if_due(cx);
    }

    fn orders(&self) -> Vec<MembershipOrder> {
        self.orders.iter().cloned().collect()
    }

    fn refusal(&self, order: &Admin) -> Option<Refusal> {
        let Admin::ChangeMembers { partition, voters, learners } = order else {
            return Some(Refusal::Never(
                "geodesic has no leaders: any replica of a partition serves its transactions"
                    .into(),
            ));
        };
        let Some(replica) = self.replicas.get(partition) else {
            let known = self.cluster.partition(*partition);
            let member = known.and_then(|placed| placed.replicas.first().copied());
            return Some(Refusal::NotLeader(member.filter(|&node| node != self.node)));
        };
        if !learners.is_empty() {
            return Some(Refusal::Invalid("geodesic has no learners".into()));
        }
        if let Some(why) = replica.refusal(voters) {
            return Some(Refusal::Invalid(why));
        }
        let stays = |node: &&NodeId| voters.contains(node);
        if !voters.contains(&self.node)
            && let Some(&member) = replica.members().iter().find(stays)
        {
            // Who stays sees how it ends.
            return Some(Refusal::NotLeader(Some(member)));
        }
        if let Some(stranger) = voters.iter().find(|&&node| !self.cluster.is_server(node)) {
            return Some(Refusal::Invalid(format!("{stranger} is no server of this cluster")));
        }
        let still = format!("{} still copies {partition}; repeat the request later", self.node);
        (!replica.is_ready()).then_some(Refusal::NotNow(still))
    }

    fn groups(&self, _now: Time) -> Vec<GroupView> {
        let view = |(&partition, members): (&PartitionId, &Arc<Members>)| GroupView {
            partition,
            voters: members.nodes.clone(),
            learners: Vec::new(),
            leader: None,
            has_leaders: false,
            successor: None,
            behind: Vec::new(),
        };
        self.outbox.members.iter().map(view).collect()
    }

    fn names(&self, ask: &Ask) -> Option<Listing> {
        let Unit::Partition(partition) = ask.unit else { return None };
        let replica = self.replicas.get(&partition).filter(|replica| replica.is_ready());
        replica.map(|replica| replica.names(ask, &self.store))
    }

    fn leaks(&self) -> Vec<Leak> {
        let entries = self.replicas.values().flat_map(|replica| replica.state.entries.values());
        let open = entries.filter(|entry| entry.ended.is_none()).count();
        let waiting = self.replicas.values().map(Replica::waiting).sum();
        vec![("transactions that have not ended", open), ("questions that wait", waiting)]
    }

    fn gauges(&self, _now: Time) -> Vec<Gauge> {
        let node = self.node;
        let of = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        let waiting = self.replicas.values().map(Replica::waiting).sum();
        let incomplete = self.replicas.values().filter(|replica| replica.is_incomplete()).count();
        let silent: OrdSet<NodeId> =
            self.replicas.values().flat_map(Replica::silent_peers).collect();
        vec![
            Gauge { name: "observations_waiting", node, value: of(waiting) },
            Gauge { name: "transactions_recovering", node, value: of(self.drives.len()) },
            Gauge { name: "incomplete", node, value: of(incomplete) },
            Gauge { name: "peers_that_do_not_send_a_copy", node, value: of(silent.len()) },
        ]
    }

    fn assert_invariants(&self) {
        for replica in self.replicas.values() {
            replica.assert_invariants();
        }
        assert!(self.local.is_empty(), "{} left messages to itself", self.node);
        assert!(self.outbox.is_empty(), "{} left messages to others", self.node);
    }
}

impl Server {
    fn with<T>(
        &mut self,
        id: PartitionId,
        cx: &mut Cx<'_, Geodesic>,
        act: impl FnOnce(&mut Replica, &mut World<'_, '_>) -> T,
    ) -> Option<T> {
        let (replicas, mut world) = self.world(cx);
        let replica = replicas.get_mut(&id)?;
        Some(act(replica, &mut world))
    }

    /// True if all its replicas give stamps. Gateways know of those that are new members.
    fn is_well(&self, now: Timestamp) -> bool {
        let mut replicas = self.replicas.values();
        let joins = |replica: &Replica| replica.joins(self.node);
        replicas.all(|it| joins(it) || it.is_ready() && !it.is_ahead(now))
    }

    /// The replicas, and everything around them.
    fn world<'a, 'b>(
        &'a mut self,
        cx: &'a mut Cx<'b, Geodesic>,
    ) -> (&'a mut OrdMap<PartitionId, Replica>, World<'a, 'b>) {
        let Self {
            node,
            incarnation,
            cluster,
            config,
            replicas,
            store,
            local,
            outbox,
            heard,
            locating,
            maker,
            pending_writes,
            ..
        } = self;
        let (node, incarnation) = (*node, *incarnation);
        let world = World {
            node,
            incarnation,
            cluster,
            config,
            store,
            local,
            outbox,
            heard,
            locating,
            maker,
            pending_writes,
            cx,
        };
        (replicas, world)
    }

    fn send(&mut self, out: Out) {
        for (to, msg) in out {
            if to == self.node {
                self.local.push_back(msg);
            } else {
                self.outbox.push(to, msg);
            }
        }
    }

    /// The number of changes of a partition's members, as far as this server knows.
    fn epoch(&self, id: PartitionId) -> u64 {
        self.outbox.members.get(&id).map_or(0, |members| members.epoch)
    }

    /// Gives a message to a replica, unless it is of an earlier epoch.
    fn deliver(
        &mut self,
        id: PartitionId,
        epoch: u64,
        (from, msg): (NodeId, Msg),
        cx: &mut Cx<'_, Geodesic>,
    ) {
        let is_earlier = from != self.node && epoch < self.epoch(id);
        let is_outdated = is_earlier && msg.lane() == Lane::Data;
        if is_outdated && !self.config.mutations.epochs_are_ignored() {
            cx.note(Note::Outdated);
            self.tell_members(id, from);
            return;
        }
        self.with(id, cx, |replica, world| replica.on_message(from, msg, world));
    }

    fn tell_members(&mut self, partition: PartitionId, to: NodeId) {
        if let Some(members) = self.outbox.members.get(&partition) {
            let members = Some(members.clone());
            self.send(vec![(to, Msg::Members { partition, members })]);
        }
    }

    /// A partition has other members than this server knew.
    fn learn(&mut self, id: PartitionId, members: &Arc<Members>, cx: &mut Cx<'_, Geodesic>) {
        if members.epoch <= self.epoch(id) || !members.fit(&self.cluster, id) {
            return;
        }
        cx.note(Note::Moved);
        self.outbox.members.insert(id, members.clone());
        let cluster = Arc::make_mut(&mut self.cluster);
        cluster.place(id, members.nodes.clone());
        let soon = cx.now() + self.config.resend_after / 2;
        for (drive, at) in self.drives.values_mut() {
            if drive.relocate(id, &members.nodes) {
                *at = soon.min(*at);
            }
        }
        if !members.nodes.contains(&self.node) {
            if self.replicas.remove(&id).is_some() {
                self.left.insert(id, Left::to(members));
                let (_, mut world) = self.world(cx);
                world.store.clear(id);
                world.persist(id, Change::Leave(members.clone()));
                cx.cancel_timer(Timer::Sweep(id));
                cx.cancel_timer(Timer::Close(id));
                if self.replicas.is_empty() {
                    // Nothing reminds it of them. The members look after them.
                    for txn in self.drives.keys().copied().collect::<Vec<_>>() {
                        self.leave(txn);
                    }
                }
            } else if let Some(known) = self.left.get_mut(&id) {
                let is_newest_whole =
                    known.is_newest_whole && known.members.newest == members.newest;
                *known = Left { is_newest_whole, ..Left::to(members) };
                let (_, mut world) = self.world(cx);
                world.persist(id, Change::Leave(members.clone()));
            }
        } else if self.replicas.contains_key(&id) {
            self.with(id, cx, |replica, world| replica.adopt(members, world));
        } else {
            self.left.remove(&id);
            let (replicas, mut world) = self.world(cx);
            // Who is a member, but not since this epoch, and has nothing, has lost its disk.
            let is_replacement = members.newest != Some(world.node);
            world.persist(id, Change::Members(members.clone()));
            let state = State { members: Some(members.clone()), ..State::default() };
            let state = (state, is_replacement);
            let replica = Replica::new(id, members.nodes.clone(), state, &mut world);
            replicas.insert(id, replica);
        }
        self.review_orders(id);
    }

    /// An operator's order to change members.
    fn on_order(
        &mut self,
        partition: PartitionId,
        voters: Vec<NodeId>,
        learners: Vec<NodeId>,
        cx: &mut Cx<'_, Geodesic>,
    ) {
        let given = cx.now();
        let order = Admin::ChangeMembers { partition, voters, learners };
        let refusal = self.refusal(&order);
        let Admin::ChangeMembers { voters, learners, .. } = order else { return };
        let state = match refusal {
            None => OrderState::Pending("the members have to agree".into()),
            Some(Refusal::NotLeader(member)) => OrderState::NotLeader(member),
            Some(Refusal::NotNow(why) | Refusal::Invalid(why) | Refusal::Never(why)) => {
                OrderState::Failed(why)
            }
        };
        let is_taken = matches!(state, OrderState::Pending(_));
        let target = voters.clone();
        let of = |order: &MembershipOrder| order.partition == partition;
        if self.orders.iter().filter(|order| of(order)).count() >= ORDERS_KEPT {
            let oldest = self.orders.iter().position(of);
            drop(oldest.and_then(|at| self.orders.remove(at)));
        }
        self.orders.push_back(MembershipOrder { partition, voters, learners, given, state });
        if is_taken {
            self.with(partition, cx, |replica, world| replica.order(target, world));
            self.review_orders(partition);
        } else {
            cx.note(Note::OrderRefused);
        }
    }

    /// Updates what is known of the orders for a partition that were taken here.
    fn review_orders(&mut self, id: PartitionId) {
        for order in self.orders.iter_mut().filter(|order| order.partition == id) {
            let is_pending = matches!(order.state, OrderState::Pending(_));
            if !is_pending && order.state != OrderState::Failed(OVERTAKEN.into()) {
                continue;
            }
            let reached = match (self.replicas.get(&id), self.left.get(&id)) {
                (Some(replica), _) => replica.progress(&order.voters, self.node),
                (None, Some(left)) => left.progress(id, &order.voters),
                (None, None) => Reached::Overtaken,
            };
            order.state = match reached {
                Reached::Finished => OrderState::Finished,
                Reached::Pending(what) if is_pending => OrderState::Pending(what),
                Reached::Pending(_) | Reached::Overtaken => OrderState::Failed(OVERTAKEN.into()),
            };
        }
    }

    /// Asks all other servers for the members of partitions of which nobody answers.
    fn locate(&mut self, partitions: &[PartitionId], cx: &mut Cx<'_, Geodesic>) {
        let when = (cx.now(), self.config.resend_after * 4);
        for &partition in partitions {
            for to in self.locating.whom((&self.cluster, partition), when) {
                self.send(vec![(to, Msg::Members { partition, members: None })]);
            }
        }
    }

    fn on_message(&mut self, from: NodeId, msg: Msg, cx: &mut Cx<'_, Geodesic>) {
        let (msg, epoch) = if let Msg::Under { partition, members, msg } = msg {
            self.learn(partition, &members, cx);
            let Plain(msg) = *msg;
            (msg, members.epoch)
        } else {
            (msg, 0)
        };
        for (id, msg) in msg.of_further_partitions() {
            self.deliver(id, 0, (from, msg), cx);
        }
        if let Some(id) = msg.partition() {
            if let (Msg::Gossip { .. }, Some(left)) = (&msg, self.left.get_mut(&id)) {
                left.is_newest_whole |=
                    epoch == left.members.epoch && left.members.newest == Some(from);
                self.review_orders(id);
                return;
            }
            self.deliver(id, epoch, (from, msg), cx);
            return;
        }
        if let Some(id) = msg.answers_about()
            && !is_member(&self.cluster, id, from)
        {
            cx.note(Note::Outdated);
            return;
        }
        let (cluster, config) = (self.cluster.clone(), self.config.clone());
        let mut out = Out::new();
        let (txn, progress) = match msg {
            Msg::Promised { txn, partition, ballot, answer } => {
                let Some((drive, _)) = self.drives.get_mut(&txn) else { return };
                let at = (partition, ballot);
                (txn, drive.on_promised(from, at, *answer, &cluster, (&config, &mut out)))
            }
            Msg::Accepted { txn, partition, ballot, answer } => {
                let Some((drive, _)) = self.drives.get_mut(&txn) else { return };
                let at = (partition, ballot);
                (txn, drive.on_accepted(from, at, &answer, (&config, &mut out)))
            }
            Msg::Observed { txn, partition, at, portion, reads } => {
                let Some((drive, _)) = self.drives.get_mut(&txn) else { return };
                let seen = (portion, reads);
                (txn, drive.on_observed(from, (partition, at), seen, (&config, &mut out)))
            }
            Msg::Stored { txn, partition, ballot, attempt, answer } => {
                let Some((drive, _)) = self.drives.get_mut(&txn) else { return };
                let of = (partition, ballot, attempt);
                (txn, drive.on_stored(from, of, &answer, (&config, &mut out)))
            }
            Msg::Applied { txn, partition, .. } => {
                let Some((drive, _)) = self.drives.get_mut(&txn) else { return };
                (txn, drive.on_applied(from, partition))
            }
            // Gateways name no replica that cannot answer.
            Msg::Ping if !self.is_well(cx.clock().now) => return,
            Msg::Ping => {
                self.send(vec![(from, Msg::Pong)]);
                return;
            }
            Msg::Several(parts) => {
                for Inner(msg) in parts {
                    self.on_message(from, msg, cx);
                }
                return;
            }
            // It was asked before it becomes a member. That it was heard from is known by now.
            Msg::Pong => return,
            Msg::Members { partition, members: Some(members) } => {
                self.learn(partition, &members, cx);
                return;
            }
            Msg::Members { partition, members: None } => {
                self.tell_members(partition, from);
                return;
            }
            Msg::Begin { .. }
            | Msg::Forward { .. }
            | Msg::Apply { .. }
            | Msg::Ack { .. }
            | Msg::Settle { .. }
            | Msg::Settled { .. }
            | Msg::Stamped { .. }
            | Msg::Decided { .. }
            | Msg::Store { .. }
            | Msg::Commit { .. }
            | Msg::Forget { .. }
            | Msg::Fetch { .. }
            | Msg::Fetched { .. }
            | Msg::Recover { .. }
            | Msg::Propose { .. }
            | Msg::Read { .. }
            | Msg::ReadResult { .. }
            | Msg::ReadOnly { .. }
            | Msg::ReadOnlyResult { .. }
            | Msg::Gossip { .. }
            | Msg::Inquire { .. }
            | Msg::Driving { .. }
            | Msg::Hint { .. }
            | Msg::Blocked { .. }
            | Msg::Follow { .. }
            | Msg::Foretold { .. }
            | Msg::Rejoin { .. }
            | Msg::Known { .. }
            | Msg::Copy { .. }
            | Msg::Copied { .. }
            | Msg::Fence { .. }
            | Msg::Fenced { .. }
            | Msg::Elect { .. }
            | Msg::Elected { .. }
            | Msg::Under { .. } => {
                unreachable!("answers to gateways do not come to server {}", self.node)
            }
        };
        self.send(out);
        self.on_progress(txn, progress, cx);
    }

    fn on_timer(&mut self, timer: Timer, cx: &mut Cx<'_, Geodesic>) {
        match timer {
            Timer::Sweep(id) => {
                let overdue = self.with(id, cx, |replica, world| {
                    replica.on_sweep_timeout(world);
                    replica.overdue(world)
                });
                for overdue in overdue.into_iter().flatten() {
                    let is_free = overdue.ended.is_some() || self.recovering() < RECOVERING_MAX;
                    if is_free && self.under_way.has_room(overdue.bytes(), &self.config) {
                        self.take_over(overdue, cx);
                    } else {
                        self.with(id, cx, |replica, world| replica.postpone(overdue.txn, world));
                    }
                }
                self.look_after_drives(cx);
                self.review_orders(id);
            }
            Timer::Close(id) => {
                self.with(id, cx, Replica::close_due);
            }
            Timer::Late => self.outbox.send_late(&self.config, cx),
            Timer::Open(_) | Timer::Drive(_) | Timer::Flush | Timer::Ping => {
                unreachable!("a gateway's timer at server {}", self.node)
            }
        }
    }

    fn on_durable(&mut self, ticket: Ticket) {
        if self.pending_writes.last.is_some_and(|last| last <= ticket) {
            self.pending_writes.last = None;
        }
        while self.pending_writes.held.front().is_some_and(|(held, ..)| *held <= ticket) {
            let Some((_, to, msg)) = self.pending_writes.held.pop_front() else { break };
            self.send(vec![(to, msg)]);
        }
        if self.checkpoint.is_some_and(|checkpoint| checkpoint <= ticket) {
            self.checkpoint = None;
            self.store.thaw();
        }
    }

    /// A transaction has lost its gateway, or has ended and is not forgotten: this node drives it to
    /// its end.
    fn take_over(&mut self, overdue: Overdue, cx: &mut Cx<'_, Geodesic>) {
        let Overdue { txn, participants, text, promised, ended } = overdue;
        if self.drives.contains_key(&txn) {
            return;
        }
        let mut drive = Drive::new(&self.cluster, txn, text, participants);
        let mut out = Out::new();
        if let Some(output) = ended {
            let _ = drive.end(output, &mut out);
        } else {
            cx.note(Note::Takeover);
            drive.heard_of(promised);
            drive.recover((self.node, self.incarnation), &mut out);
        }
        self.under_way.add(txn, drive.bytes(), &self.config);
        let span = self.config.resend_after + self.under_way.span(&self.config);
        self.drives.insert(txn, (drive, cx.now() + span));
        self.send(out);
    }

    fn on_progress(&mut self, txn: TxnId, progress: Progress, cx: &mut Cx<'_, Geodesic>) {
        match progress {
            Progress::Nothing => {
                if let Some((drive, at)) = self.drives.get_mut(&txn)
                    && drive.take_news()
                {
                    let pause = self.config.resend_after * backoff(drive.times);
                    *at = (*at).min(cx.now() + pause + self.under_way.span(&self.config));
                }
            }
            Progress::Exact | Progress::Stale => {}
            Progress::Ended(output) => {
                cx.claim(Claim::Decided { txn, outcome: output.outcome });
            }
            // Somebody else takes care of it. If that one fails too, its watch comes round again.
            Progress::Preempted => {
                cx.note(Note::Preempted);
                if let Some(drive) = self.leave(txn) {
                    for replica in self.replicas.values_mut() {
                        replica.heard_of(txn, drive.highest());
                    }
                }
            }
            Progress::Complete => {
                let Some(drive) = self.leave(txn) else { return };
                self.release(&drive, cx);
            }
            Progress::Forgotten(outcome) => {
                cx.note(Note::Forgotten);
                self.leave(txn);
                let hosted: Vec<PartitionId> = self.replicas.keys().copied().collect();
                for id in hosted {
                    self.with(id, cx, |replica, world| {
                        replica.on_forgotten(txn, outcome.is_some(), world)
                    });
                }
            }
        }
    }

    fn leave(&mut self, txn: TxnId) -> Option<Drive> {
        self.under_way.remove(txn);
        self.drives.remove(&txn).map(|(drive, _)| drive)
    }

    /// Enough replicas have applied it: if the client knows, all may forget it. If what is kept takes
    /// too much memory, they may forget all but the outcome.
    fn release(&mut self, drive: &Drive, cx: &mut Cx<'_, Geodesic>) {
        let txn = drive.txn;
        let hosted: Vec<PartitionId> = self.replicas.keys().copied().collect();
        let known = hosted.into_iter().find_map(|id| {
            self.with(id, cx, |replica, world| replica.may_forget(txn, world)).flatten()
        });
        let Some(known) = known else { return };
        let (acknowledged, keeps_outcomes) = match known {
            Release::Known(below) => (vec![(txn.client, below)], false),
            Release::TooMuch => (vec![], true),
        };
        let mut out = Out::new();
        for partition in drive.participants() {
            let placed = self.cluster.partition(partition);
            for &to in placed.iter().flat_map(|placed| &placed.replicas) {
                let (txns, acknowledged) = (vec![txn], acknowledged.clone());
                out.push((to, Msg::Forget { partition, txns, acknowledged, keeps_outcomes }));
            }
        }
        self.send(out);
    }

    /// How many transactions this node recovers whose places are not known.
    fn recovering(&self) -> usize {
        self.drives.values().filter(|(drive, _)| drive.stage == Stage::Ordering).count()
    }

    fn look_after_drives(&mut self, cx: &mut Cx<'_, Geodesic>) {
        let now = cx.now();
        let due: Vec<TxnId> =
            self.drives.iter().filter(|(_, (_, at))| *at <= now).map(|(txn, _)| *txn).collect();
        for txn in due {
            let Some((drive, at)) = self.drives.get_mut(&txn) else { continue };
            if drive.times >= ATTEMPTS && drive.stage == Stage::Ordering {
                // Too few are there. Its watch comes round again.
                self.leave(txn);
                continue;
            }
            let mut out = Out::new();
            let me = (self.node, self.incarnation);
            let progress = drive.on_timeout(me, self.config.spread_tries, &mut out);
            let unheard = if drive.times > 1 { drive.unanswered() } else { Vec::new() };
            if drive.makes_room(self.config.spread_tries) {
                self.under_way.make_room(txn);
            }
            self.under_way.add(txn, drive.bytes(), &self.config);
            let pause = self.config.resend_after * backoff(drive.times);
            let pause = pause + self.under_way.span(&self.config);
            let jitter = cx.rng().below(1 + nanos(pause) / 2);
            *at = now + pause + Duration::from_nanos(jitter);
            self.send(out);
            self.locate(&unheard, cx);
            self.on_progress(txn, progress, cx);
        }
    }

    /// Handles everything that one input set in motion inside this node, and sends what others are to
    /// know.
    fn settle(&mut self, cx: &mut Cx<'_, Geodesic>) {
        while let Some(msg) = self.local.pop_front() {
            self.on_message(self.node, msg, cx);
        }
        self.outbox.send(&self.config, cx);
    }

    /// Makes a checkpoint if enough has been persisted since the last one.
    fn checkpoint_if_due(&mut self, cx: &mut Cx<'_, Geodesic>) {
        let is_due = self.pending_writes.pace.is_due(self.config.checkpoint_bytes);
        if !is_due || self.store.is_frozen() {
            return;
        }
        cx.note(Note::Checkpoint);
        let mut records = Vec::new();
        let hosted: Vec<PartitionId> = self.replicas.keys().copied().collect();
        for id in hosted {
            let settled = self.with(id, cx, |replica, world| replica.settled(world));
            let Some(replica) = self.replicas.get_mut(&id) else { continue };
            let collected = replica.state.collected.max(settled.unwrap_or_default());
            replica.state.collected = collected;
            // A replica may have missed a deletion that all others have applied and forgotten.
            self.store.collect_values_below(id, collected);
            let parts = replica.state.clone().divide(self.config.piece_bytes);
            records.extend(parts.into_iter().map(|part| Record::State(id, Box::new(part))));
        }
        for (&id, left) in &self.left {
            let state = State { members: Some(left.members.clone()), ..State::default() };
            records.push(Record::State(id, Box::new(state)));
        }
        self.pending_writes.pace.made(records.iter().map(Record::size).sum());
        let ticket = cx.checkpoint(self.store.freeze(), records);
        self.checkpoint = Some(ticket);
        self.pending_writes.last = Some(ticket);
    }
}

/// A node that recovers asks so often before it leaves the transaction to its next turn.
const ATTEMPTS: u32 = 8;

/// Why an order has failed, unless a later one wants the same.
const OVERTAKEN: &str = "a later order has taken its place";

/// So many orders for one partition are remembered.
const ORDERS_KEPT: usize = 8;

/// A node recovers at most so many transactions at once whose places are not known. Others wait: a
/// network that is too slow for all would bring none of them to its end.
const RECOVERING_MAX: usize = 64;

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, replica) in self.replicas.values().enumerate() {
            let separator = if at == 0 { "" } else { " | " };
            write!(f, "{separator}{}", replica.id)?;
            if !replica.is_ready() {
                f.write_str(" rejoins")?;
            }
            for (txn, entry) in &replica.state.entries {
                write!(f, ", {txn}")?;
                if let Some(output) = &entry.ended {
                    write!(f, " {}", output.outcome)?;
                    continue;
                }
                if let Some(stamp) = entry.stamp {
                    write!(f, " {stamp:?}")?;
                }
                if entry.promised.round > 0 {
                    write!(f, " promised to {}", entry.promised)?;
                }
                if let Some((ballot, value)) = entry.accepted {
                    write!(f, " accepted {value:?} in {ballot}")?;
                }
                if let Some(at) = entry.finally_at {
                    write!(f, " finally {at}")?;
                }
            }
        }
        for (drive, _) in self.drives.values() {
            write!(f, " | drives {} {:?}", drive.txn, drive.stage)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use orthodrome_core::id::ClientId;
    use orthodrome_core::machine::{Effect, Protocol as _};
    use orthodrome_core::scan::KeyRange;
    use orthodrome_core::store::MemoryEngine;
    use orthodrome_core::time::Clock;
    use orthodrome_core::topology::Topology;
    use orthodrome_core::txn::{AbortReason, Op, Outcome, Priority, Version, Writes};
    use orthodrome_core::workers::Alone;
    use orthodrome_core::{Host, Rng};

    use super::super::message::{Ballot, Kind, Output, Side, Text};
    use super::*;
    use crate::functor::{Body, Functor};

    const P: PartitionId = PartitionId(0);
    const GATEWAY: NodeId = NodeId(4);

    fn at(millis: u64) -> Timestamp {
        Timestamp(millis * 1_000_000)
    }

    fn clock(millis: u64) -> (Time, Clock) {
        (Time(at(millis).0), Clock { now: at(millis), error: Duration::from_millis(1) })
    }

    /// n1 of three servers.
    fn server() -> Host<Geodesic, Server> {
        server_with(None)
    }

    fn server_with(mutation: Option<&str>) -> Host<Geodesic, Server> {
        started(mutation, vec![])
    }

    /// n1, which finds these records on its disk.
    fn started(mutation: Option<&str>, records: Vec<Record>) -> Host<Geodesic, Server> {
        let set =
            |config: &mut Config| mutation.into_iter().for_each(|it| config.mutations.enable(it));
        configured(set, records)
    }

    fn configured(set: impl FnOnce(&mut Config), records: Vec<Record>) -> Host<Geodesic, Server> {
        let map = Topology::uniform(3, Duration::from_millis(1), Duration::from_millis(10));
        let cluster = Arc::new(Cluster::spread(map, 1, 1, 1, 3).unwrap());
        let mut config = Geodesic::configure(&cluster, "geodesic");
        set(&mut config);
        let config = Arc::new(config);
        let (engine, workers) = (Box::new(MemoryEngine::default()), Arc::new(Alone));
        let is_replacement = false;
        let setup = Setup { node: NodeId(1), cluster, config, engine, workers, is_replacement };
        let (now, clock) = clock(1_000);
        Host::start(setup, records, Rng::stream(1, "test", 1), now, clock)
    }

    /// What it sends; all that it writes becomes durable.
    fn sent(host: &mut Host<Geodesic, Server>, millis: u64) -> Vec<Msg> {
        let (mut all, (now, clock)) = (Vec::new(), clock(millis));
        loop {
            let mut last = None;
            for effect in host.drain() {
                if let Effect::Send { msg: Msg::Several(parts), .. } = effect {
                    all.extend(parts.into_iter().map(|Inner(msg)| msg));
                } else if let Effect::Send { msg, .. } = effect {
                    all.push(msg);
                } else if let Effect::Persist { ticket, .. } = effect {
                    last = Some(ticket);
                }
            }
            let Some(ticket) = last else { return all };
            host.step(now, clock, Input::Durable(ticket));
        }
    }

    /// What it sends when this message comes.
    fn hears(
        host: &mut Host<Geodesic, Server>,
        millis: u64,
        (from, msg): (NodeId, Msg),
    ) -> Vec<Msg> {
        let (now, clock) = clock(millis);
        host.step(now, clock, Input::Message { from, msg });
        sent(host, millis)
    }

    fn txn(counter: u64) -> TxnId {
        TxnId::new(ClientId(1), counter)
    }

    /// A transaction that reads and writes the key `a`.
    fn text(counter: u64, t: u64, (named, is_direct): ([u32; 2], bool), op: Op) -> Arc<Text> {
        let key = Key::from("a");
        let (reads, writes) = (vec![key.clone()], vec![key.clone()]);
        let body = Body::Ops(vec![Op::Get(key), op]);
        let functor = Functor { txn: txn(counter), reads, writes, body, acknowledged_below: 0 };
        let (named, is_patient) = (named.map(NodeId).to_vec(), false);
        let sides = vec![Side { partition: P, named, is_direct, is_patient }];
        let (t, priority, gateway) = (at(t), Priority::default(), GATEWAY);
        Arc::new(Text { functor, priority, gateway, t, sides, register: None })
    }

    /// n2 forwards it.
    fn forward(counter: u64, stamp: u64, op: Op) -> (NodeId, Msg) {
        let text = text(counter, stamp, ([2, 1], false), op);
        (NodeId(2), Msg::Forward { partition: P, text, stamp: at(stamp), more: vec![] })
    }

    /// What a second transaction on a key reads when the place of the first one, which is pending, is
    /// final.
    fn read_behind(op: Op) -> Option<Version> {
        let mut host = server();
        hears(&mut host, 1_000, forward(1, 990, op.clone()));
        let behind = hears(&mut host, 1_000, forward(2, 995, op));
        assert!(behind.iter().any(|msg| matches!(msg, Msg::Blocked { .. })), "{behind:?}");
        let commit = Msg::Commit { txn: txn(1), partition: P, at: at(990), text: None };
        let told = hears(&mut host, 1_001, (GATEWAY, commit));
        let of_second = |msg: &Msg| {
            let Msg::Observed { txn: of, reads, .. } = msg else { return None };
            reads.first().filter(|_| *of == txn(2)).map(|(_, read)| read.version)
        };
        told.iter().find_map(of_second)
    }

    #[test]
    fn what_depends_on_no_read_is_read_before_it_has_ended() {
        let (key, value) = (Key::from("a"), "1".into());
        let version = Version { timestamp: at(990), writer: txn(1).name() };
        assert_eq!(read_behind(Op::Put(key.clone(), value)), Some(version));
        assert_eq!(read_behind(Op::Add(key, 1)), None, "it depends on what the first one reads");
    }

    /// What is told of a transaction that nobody waits for: when, and how long it was kept back.
    #[test]
    fn acknowledgements_wait_for_company_where_much_is_sent() {
        let apply = |counter| {
            let (outcome, writes) = (Outcome::Aborted(AbortReason::Conflict), Writes::new());
            let output = Arc::new(Output { outcome, writes });
            let (participants, more) = (vec![P], vec![]);
            (GATEWAY, Msg::Apply { txn: txn(counter), partition: P, output, participants, more })
        };
        let late = |msgs: &[Msg]| {
            let late = msgs.iter().filter_map(|msg| {
                let Msg::Applied { late, .. } = msg else { return None };
                Some(*late)
            });
            late.collect::<Vec<u64>>()
        };
        let mut host = server();
        assert_eq!(late(&hears(&mut host, 1_000, apply(1))), [0], "little is sent");

        let mut host = configured(|config| config.late_from = 0, vec![]);
        assert_eq!(hears(&mut host, 1_000, apply(1)), []);
        let read = Msg::Read { txn: txn(9), partition: P, keys: vec![Key::from("a")] };
        let told = hears(&mut host, 1_001, (GATEWAY, read));
        assert!(matches!(told[..], [Msg::Applied { .. }, Msg::ReadResult { .. }]), "{told:?}");
        assert_eq!(late(&told), [1_000_000]);

        assert_eq!(hears(&mut host, 1_005, apply(2)), []);
        assert_eq!(hears(&mut host, 1_006, apply(3)), []);
        let (now, reading) = clock(1_007);
        host.fire(now, reading);
        assert_eq!(late(&sent(&mut host, 1_007)), [2_000_000, 1_000_000], "nothing else came");

        let is_full = |config: &mut Config| (config.late_from, config.piece_bytes) = (0, 1);
        let mut host = configured(is_full, vec![]);
        assert_eq!(late(&hears(&mut host, 1_000, apply(1))), [0], "they fill a message");
    }

    /// Whether the read of a scan of a range is answered while a transaction that writes the key `a` is
    /// pending before it, and once that has ended.
    fn scan_is_answered(range: KeyRange, mutation: Option<&str>) -> (bool, bool) {
        let mut host = server_with(mutation);
        hears(&mut host, 1_000, forward(1, 990, Op::Put(Key::from("a"), "1".into())));
        let (keys, fenced) = (vec![Key::from("\0fence0")], Some(range));
        let read =
            Msg::ReadOnly { txn: txn(2), partition: P, keys, at: at(999), fenced, is_single: true };
        let is_answer = |msg: &Msg| matches!(msg, Msg::ReadOnlyResult { reads: Some(_), .. });
        let at_once = hears(&mut host, 1_000, (GATEWAY, read)).iter().any(is_answer);
        let (outcome, writes) = (Outcome::Aborted(AbortReason::Conflict), Writes::new());
        let output = Arc::new(Output { outcome, writes });
        let (participants, more) = (vec![P], vec![]);
        let end = Msg::Apply { txn: txn(1), partition: P, output, participants, more };
        (at_once, hears(&mut host, 1_001, (GATEWAY, end)).iter().any(is_answer))
    }

    #[test]
    fn a_scan_waits_for_the_writers_of_its_range_alone() {
        let range = KeyRange::prefix;
        assert_eq!(scan_is_answered(range(b"a"), None), (false, true));
        assert_eq!(scan_is_answered(range(b""), None), (false, true));
        assert_eq!(scan_is_answered(range(b"b"), None), (true, false));
        let mutation = Some("fences_stand_for_nothing");
        assert_eq!(scan_is_answered(range(b"a"), mutation), (true, false), "the mutation shows");
    }

    /// What a replica says in direct mode: its stamp, what it has acknowledged to h, and whether it has
    /// told what the transaction reads, and as of when.
    #[derive(Default, PartialEq, Eq, Debug)]
    struct Said {
        stamped: Vec<Timestamp>,
        acknowledged: Vec<Timestamp>,
        observed: Vec<Timestamp>,
        decided: Vec<Timestamp>,
    }

    fn said(messages: Vec<Msg>) -> Said {
        let mut said = Said::default();
        for msg in messages {
            if let Msg::Stamped { at, .. } = msg {
                said.stamped.push(at);
            } else if let Msg::Ack { stamp, .. } = msg {
                said.acknowledged.push(stamp);
            } else if let Msg::Observed { at, .. } = msg {
                said.observed.push(at);
            } else if let Msg::Decided { at, .. } = msg {
                said.decided.push(at);
            }
        }
        said
    }

    /// What n1, whom the gateway gives a transaction itself, says to that; when its clock passes the
    /// stamp; and when `then` comes.
    fn direct(named: [u32; 2], then: Msg, mutation: Option<&str>) -> [Said; 3] {
        let mut host = server_with(mutation);
        let text = text(1, 1_010, (named, true), Op::Put(Key::from("a"), "1".into()));
        let begin = Msg::Begin { partition: P, text, more: vec![] };
        let first = said(hears(&mut host, 1_000, (GATEWAY, begin)));
        let (now, clock) = clock(1_011);
        host.fire(now, clock);
        let second = said(sent(&mut host, 1_011));
        [first, second, said(hears(&mut host, 1_020, (NodeId(2), then)))]
    }

    #[test]
    fn in_direct_mode_every_replica_stamps_closes_and_tells_by_itself() {
        let stamped = Said { stamped: vec![at(1_010)], ..Said::default() };
        let observed = Said { observed: vec![at(1_010)], ..Said::default() };
        let text = |named| text(1, 1_010, (named, true), Op::Put(Key::from("a"), "1".into()));
        let forward = |named, stamp| Msg::Forward {
            partition: P,
            text: text(named),
            stamp: at(stamp),
            more: vec![],
        };
        // As y: what h says later it acknowledges, and does not tell the gateway again.
        let said = direct([2, 1], forward([2, 1], 1_010), None);
        let acknowledged = Said { acknowledged: vec![at(1_010)], ..Said::default() };
        assert_eq!(said, [stamped, observed, acknowledged]);
        // If h has a larger stamp, y raises its own, and closes again.
        let [.., third] = direct([2, 1], forward([2, 1], 1_015), None);
        let (acknowledged, observed) = (vec![at(1_015)], vec![at(1_015)]);
        assert_eq!(third, Said { acknowledged, observed, ..Said::default() });
        let [.., third] = direct([2, 1], forward([2, 1], 1_015), Some("confirmed_as_it_is"));
        assert_eq!(third.acknowledged, [at(1_010)], "the mutation shows");
        let [_, second, _] =
            direct([2, 1], forward([2, 1], 1_015), Some("direct_stamp_is_acknowledged"));
        assert_eq!(second.acknowledged, [at(1_010)], "the mutation shows");
        // As the third: nothing that h says is for it.
        let [.., third] = direct([2, 3], forward([2, 3], 1_010), None);
        assert_eq!(third, Said::default());
        // As h: the decision is as of its own stamp, as of which it has told already.
        let (txn, arrived) = (txn(1), at(1_005));
        let ack = Msg::Ack { txn, partition: P, stamp: at(1_010), arrived };
        let [.., third] = direct([1, 2], ack, None);
        assert_eq!(third, Said { decided: vec![at(1_010)], ..Said::default() });
        let ack = Msg::Ack { txn, partition: P, stamp: at(1_013), arrived };
        let [.., third] = direct([1, 2], ack, None);
        let (decided, observed) = (vec![at(1_013)], vec![at(1_013)]);
        assert_eq!(third, Said { decided, observed, ..Said::default() });
    }

    /// What n1 says when the gateway gives it a transaction, and when it gives it the same again: whether
    /// it forwards it, and whether it asks h to.
    fn patient(named: [u32; 2], is_read: bool) -> [(bool, bool); 2] {
        let mut host = server();
        if is_read {
            let (keys, fenced) = (vec![Key::from("a")], None);
            let read = Msg::ReadOnly {
                txn: txn(2),
                partition: P,
                keys,
                at: at(1_020),
                fenced,
                is_single: true,
            };
            hears(&mut host, 1_000, (GATEWAY, read));
        }
        let text = text(1, 1_010, (named, true), Op::Put(Key::from("a"), "1".into()));
        let mut text = Text::clone(&text);
        text.sides[0].is_patient = true;
        let begin = Msg::Begin { partition: P, text: Arc::new(text), more: vec![] };
        [(); 2].map(|()| {
            let said = hears(&mut host, 1_000, (GATEWAY, begin.clone()));
            assert!(said.iter().any(|msg| matches!(msg, Msg::Stamped { .. })), "{said:?}");
            let forwards = said.iter().any(|msg| matches!(msg, Msg::Forward { .. }));
            (forwards, said.iter().any(|msg| matches!(msg, Msg::Begin { .. })))
        })
    }

    #[test]
    fn a_patient_h_decides_if_a_stamp_was_raised_or_if_it_is_asked_again() {
        assert_eq!(patient([1, 2], false), [(false, false), (true, false)]);
        assert_eq!(patient([1, 2], true), [(true, false); 2], "its own stamp was raised");
        assert_eq!(patient([2, 1], false), [(false, false); 2]);
        assert_eq!(patient([2, 1], true), [(false, true); 2], "that of y was");
        assert_eq!(patient([2, 3], true), [(false, true); 2], "that of the third was");
    }

    /// After a promise no stamp of ballot 0 counts (D5), so y confirms none either.
    #[test]
    fn a_stamp_is_not_confirmed_after_a_promise() {
        let mut host = server();
        let text = text(1, 990, ([2, 1], true), Op::Put(Key::from("a"), "1".into()));
        let begin = Msg::Begin { partition: P, text: text.clone(), more: vec![] };
        assert_eq!(said(hears(&mut host, 1_000, (GATEWAY, begin))).stamped, [at(990)]);
        let ballot = Ballot { round: 1, node: NodeId(3), incarnation: 1 };
        let (txn, partition, participants) = (txn(1), P, vec![P]);
        let recover = Msg::Recover { txn, partition, ballot, text: None, participants };
        let promised = hears(&mut host, 1_000, (NodeId(3), recover));
        let kind = promised.iter().find_map(|msg| {
            let Msg::Promised { answer, .. } = msg else { return None };
            answer.stamp.map(|stamp| stamp.kind)
        });
        assert_eq!(kind, Some(Kind::Direct));
        let forward = Msg::Forward { partition: P, text, stamp: at(995), more: vec![] };
        assert_eq!(said(hears(&mut host, 1_001, (NodeId(2), forward))), Said::default());
    }

    #[test]
    fn a_server_that_starts_again_gives_no_stamps_ahead_of_its_clock() {
        let mut host = started(None, vec![Record::Change(P, Change::Ceiling(at(1_500)))]);
        let put = || Op::Put(Key::from("a"), "1".into());
        let begin = |counter, t| {
            let text = text(counter, t, ([1, 2], true), put());
            (GATEWAY, Msg::Begin { partition: P, text, more: vec![] })
        };
        let recover = |counter, t| {
            let text = Some(text(counter, t, ([2, 3], false), put()));
            let ballot = Ballot { round: 1, node: NodeId(3), incarnation: 1 };
            let (txn, partition, participants) = (txn(counter), P, vec![P]);
            (NodeId(3), Msg::Recover { txn, partition, ballot, text, participants })
        };
        assert_eq!(hears(&mut host, 1_100, begin(1, 1_110)), []);
        assert_eq!(hears(&mut host, 1_100, forward(2, 1_110, put())), []);
        assert_eq!(hears(&mut host, 1_100, recover(3, 1_110)), []);
        assert_eq!(hears(&mut host, 1_100, (GATEWAY, Msg::Ping)), [], "gateways leave it out");
        // What is later than the ceiling anyway needs no higher stamp.
        assert_eq!(said(hears(&mut host, 1_100, begin(4, 1_501))).stamped, [at(1_501)]);
        // Its clock has passed the ceiling.
        assert_eq!(hears(&mut host, 1_501, (GATEWAY, Msg::Ping)), [Msg::Pong]);
        let stamped = said(hears(&mut host, 1_501, begin(1, 1_110))).stamped;
        assert!(stamped.len() == 1 && stamped[0] > at(1_500), "{stamped:?}");
        let promised = hears(&mut host, 1_501, recover(3, 1_110));
        assert!(matches!(promised[..], [Msg::Promised { .. }]), "{promised:?}");
    }

    #[test]
    fn a_gateway_that_is_there_is_asked_again_before_a_takeover() {
        let mut host = server();
        hears(&mut host, 1_000, forward(1, 990, Op::Put(Key::from("a"), "1".into())));
        let mut inquiries = 0;
        for millis in (1_000..60_000).step_by(100) {
            let (now, clock) = clock(millis);
            host.fire(now, clock);
            let sent = sent(&mut host, millis);
            if sent.iter().any(|msg| matches!(msg, Msg::Inquire { .. })) {
                inquiries += 1;
                if inquiries <= 3 {
                    hears(&mut host, millis + 50, (GATEWAY, Msg::Ping));
                }
            }
            if sent.iter().any(|msg| matches!(msg, Msg::Recover { .. })) {
                assert_eq!(inquiries, 4, "nothing came after the last one");
                return;
            }
        }
        panic!("nobody takes the transaction over");
    }
}
