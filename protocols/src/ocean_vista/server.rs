//! One server node: coordinator, replicas, executor and gossiper, one store, one stream of durable
//! records.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use orthodrome_core::Wire as _;
use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{NodeId, PartitionId, RegionId, Ticket, TxnId};
use orthodrome_core::machine::{
    Admin, Cx, Gauge, Input, Leak, Machine, Refusal, ReplicaDigest, Setup,
};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::scan::{Ask, Basis, Listing, Unit, Voters};
use orthodrome_core::store::Store;
use orthodrome_core::time::{Time, Timestamp};
use orthodrome_core::txn::{Key, Reads};

use super::control::{Control, Io, backup_of};
use super::coordinator::{Coordinator, replicas};
use super::directory::{self, Keeper, Membership, Task, Window};
use super::execution::{self, Executions, Owner, Progress, Reader};
use super::gossiper::{self, Gossiper, Heard, Pace, Regional, gossipers};
use super::inquiry::{self, Inquiries};
use super::message::{Change, Functor, Msg, Output, Reason, Record};
use super::recovery::Recoveries;
use super::replica::{Get, Replica};
use super::state::State;
use super::sync::{Answer, Done, Syncs};
use super::takeover::{self, Acceptor, Backup, Closed, Tellings};
use super::tid::Tids;
use super::watermark::{Members, Report, Watermarks};
use super::{Config, Note, OceanVista, Timer};
use crate::checkpoint::CheckpointPace;

/// The server side of Ocean Vista: every role that one node plays.
#[derive(Debug)]
pub struct Server {
    node: NodeId,
    region: RegionId,
    cluster: Arc<Cluster>,
    config: Arc<Config>,
    /// The server of each slot.
    slots: Vec<NodeId>,
    marks: Watermarks,
    control: Control,
    roles: Roles,
    gossiper: Gossiper,
    /// Whom this node tells what it coordinates.
    backup: Option<NodeId>,
    /// The gossipers of each region.
    gossipers: OrdMap<RegionId, Vec<NodeId>>,
    reports: Pace,
    /// The Svw that was reported last.
    reported: Timestamp,
    rounds: Pace,
    /// Something was reported since the last round of gossip.
    has_news: bool,
    /// When replicas were compared last.
    compared_at: Time,
    local: VecDeque<Local>,
    pending_writes: PendingWrites,
    checkpoint: Option<Ticket>,
    /// What was copied from peers is in no checkpoint yet.
    is_copy_volatile: bool,
    /// The checkpoint under way makes another voter's state durable.
    is_snapshot_awaited: bool,
}

/// What a node does.
#[derive(Debug)]
struct Roles {
    replica: Replica,
    coordinator: Coordinator,
    reader: Reader,
    executions: Executions,
    inquiries: Inquiries,
    syncs: Syncs,
}

/// What one role of a node has for another.
#[derive(Debug)]
pub(super) enum Local {
    /// A message to this node itself.
    Message(Msg),
    /// A visible functor has to be computed.
    Execute { ts: Timestamp, functor: Arc<Functor> },
    /// A name has to be looked into.
    Inquire { gateway: NodeId, functor: Arc<Functor> },
    /// What members and watermarks allow has changed, or a node came to be complete.
    Reconsider,
}

/// What was written, and what must not be said before it is durable.
#[derive(Debug, Default)]
pub(super) struct PendingWrites {
    last: Option<Ticket>,
    held: VecDeque<(Ticket, NodeId, Msg)>,
    /// When the next checkpoint is due.
    pace: CheckpointPace,
}

impl PendingWrites {
    /// Makes a record durable.
    pub(super) fn persist(&mut self, record: Record, cx: &mut Cx<'_, OceanVista>) -> Ticket {
        self.pace.wrote(record.size());
        let ticket = cx.persist(record);
        self.last = Some(ticket);
        ticket
    }
}

/// Everything around a role that its handlers need.
pub(super) struct World<'a, 'b> {
    pub node: NodeId,
    pub cluster: &'a Cluster,
    pub config: &'a Config,
    pub members: &'a Members,
    pub marks: &'a Watermarks,
    /// Its replicas are complete, and it has a lease.
    pub is_serving: bool,
    /// Its lease may end soon: it takes no more transactions.
    pub is_pressed: bool,
    /// Between which timestamps it may assign now, if at all.
    pub window: Option<Window>,
    /// Whom to tell what is under way.
    pub backup: Option<NodeId>,
    acceptors: &'a mut OrdMap<PartitionId, Acceptor>,
    slots: &'a [NodeId],
    local: &'a mut VecDeque<Local>,
    pending_writes: &'a mut PendingWrites,
    pub cx: &'a mut Cx<'b, OceanVista>,
}

impl World<'_, '_> {
    /// Sends a message at once; one to this node itself is delivered before the step ends.
    pub(super) fn send(&mut self, to: NodeId, msg: Msg) {
        if to == self.node {
            self.local.push_back(Local::Message(msg));
        } else {
            self.cx.send(to, msg);
        }
    }

    /// True if f + 1 replicas of every partition take part.
    fn are_all_backed(&self) -> bool {
        let active: OrdSet<NodeId> = self.members.active().map(|(server, _)| server).collect();
        self.cluster.partitions().all(|placed| {
            let backing = placed.replicas.iter().filter(|replica| active.contains(replica)).count();
            backing > placed.replicas.len() / 2
        })
    }

    /// Sends a message once everything written so far is durable (R4).
    pub(super) fn reply(&mut self, to: NodeId, msg: Msg) {
        match self.pending_writes.last {
            Some(ticket) if !self.config.mutations.acks_before_fsync() => {
                self.pending_writes.held.push_back((ticket, to, msg));
            }
            Some(_) | None => self.send(to, msg),
        }
    }

    /// Which disk this node has, as far as it knows: what is acknowledged is on that one.
    pub(super) fn disk(&self) -> u32 {
        self.members.disk(self.node)
    }

    /// Makes a change of the replicas durable.
    pub(super) fn change(&mut self, change: Change) -> Ticket {
        self.pending_writes.persist(Record::Change(change), self.cx)
    }

    /// True if nobody has taken over in a higher ballot, as far as the replicas here know (V5).
    pub(super) fn allows(&self, ts: Timestamp, incarnation: u32, ballot: u64) -> bool {
        // Nothing of it is new once it is out: an old message must not bring back what is void.
        if self.is_out(ts, incarnation) {
            return false;
        }
        let owner = self.owner(ts);
        self.acceptors.values().all(|acceptor| acceptor.allows(owner, incarnation, ballot, ts))
    }

    /// True if everything that this life of the version's server left is decided.
    pub(super) fn is_out(&self, ts: Timestamp, incarnation: u32) -> bool {
        incarnation <= self.members.settled_through(self.owner(ts))
    }

    /// What the replica of a partition here promised, and what it knows to survive.
    pub(super) fn promises(&self, partition: PartitionId) -> Vec<takeover::Record> {
        self.acceptors.get(&partition).into_iter().flat_map(Acceptor::promises).collect()
    }

    /// Takes over what peers promised, or know to survive of what is out: durably.
    pub(super) fn promise(&mut self, partition: PartitionId, record: takeover::Record) {
        let is_known = match &record {
            takeover::Record::Closed { server, incarnation, .. } => {
                *incarnation <= self.members.settled_through(*server)
            }
            takeover::Record::Pledge { .. } | takeover::Record::Swept { .. } => true,
        };
        if let Some(acceptor) = self.acceptors.get_mut(&partition)
            && is_known
            && acceptor.learn(record.clone())
        {
            self.pending_writes.persist(Record::Takeover(partition, record), self.cx);
        }
    }

    /// Sets another role of this node in motion before the step ends.
    pub(super) fn tell(&mut self, local: Local) {
        self.local.push_back(local);
    }

    /// The server that created a version number.
    pub(super) fn owner(&self, ts: Timestamp) -> NodeId {
        let slot = usize::try_from(Tids::slot_of(ts)).unwrap_or(usize::MAX);
        self.slots.get(slot).copied().unwrap_or_default()
    }
}

impl Machine<OceanVista> for Server {
    fn new(setup: Setup<OceanVista>, recovered: Vec<Record>, cx: &mut Cx<'_, OceanVista>) -> Self {
        let Setup { node, cluster, config, engine, workers: _, is_replacement: _ } = setup;
        let mut state = State::default();
        let (mut is_intact, mut directory) = (false, Vec::new());
        let held = cluster.partitions().filter(|placed| placed.replicas.contains(&node));
        let mut acceptors: OrdMap<PartitionId, Acceptor> =
            held.map(|placed| (placed.id, Acceptor::default())).collect();
        let mut pace = CheckpointPace::default();
        for record in recovered {
            pace.recovered(record.size(), matches!(record, Record::State(..)));
            match record {
                Record::State(piece) => state.extend(*piece),
                Record::Change(change) => state.apply(&change),
                Record::Intact => is_intact = true,
                Record::Takeover(partition, record) => {
                    acceptors.entry(partition).or_default().learn(record);
                }
                Record::Directory(record) => directory.push(record),
            }
        }
        let slots: Vec<NodeId> = cluster.servers().map(|server| server.id).collect();
        let slot = slots.iter().position(|&server| server == node).unwrap_or(usize::MAX);
        let region = cluster.region_of(node);
        let now = cx.now();
        // It was visible before, so it still is.
        let marks = Watermarks { visible: state.settled, ..Watermarks::default() };
        let mut pending_writes = PendingWrites { pace, ..PendingWrites::default() };
        let mut local = VecDeque::new();
        let membership =
            Membership::new(node, &cluster, config.directory.clone(), is_intact, cx.rng());
        let syncs = Syncs::new(membership.life(), &config);
        let tellings = Tellings::new(membership.life().0);
        let is_voter = directory::voters(&cluster).contains(&node);
        let keeper = is_voter.then(|| {
            let mut io = Io { node, local: &mut local, pending_writes: &mut pending_writes, cx };
            let (cluster, config) = (cluster.clone(), config.directory.clone());
            Keeper::new(node, cluster, config, directory, &mut io)
        });
        let mut server = Self {
            node,
            region,
            control: Control {
                membership,
                keeper,
                acceptors,
                recoveries: Recoveries::default(),
                tellings,
                backup: Backup::default(),
                is_intact,
                mark: None,
                is_whole: false,
                needed_epoch: 0,
            },
            roles: Roles {
                replica: Replica::new(node, &cluster, &config, state, Store::new(engine)),
                coordinator: Coordinator::new(Tids::new(slot as u64, Timestamp::ZERO), 0),
                reader: Reader::new(node, &cluster),
                executions: Executions::default(),
                inquiries: Inquiries::default(),
                syncs,
            },
            slots,
            marks,
            gossiper: Gossiper::new(cluster.clone(), region, Members::default()),
            backup: None,
            gossipers: OrdMap::new(),
            reports: Pace::new(config.gossip_interval, now),
            reported: Timestamp::ZERO,
            rounds: Pace::new(config.gossip_interval, now),
            has_news: false,
            compared_at: now,
            local,
            pending_writes,
            checkpoint: None,
            is_copy_volatile: false,
            is_snapshot_awaited: false,
            cluster,
            config,
        };
        server.choose_gossipers();
        cx.set_timer(Timer::Sweep, now + server.config.sweep_interval);
        server.on_ask_timeout(cx);
        server.settle(cx);
        server
    }

    fn step(&mut self, input: Input<OceanVista>, cx: &mut Cx<'_, OceanVista>) {
        match input {
            Input::Message { from, msg } => self.on_message(from, msg, cx),
            Input::Timer(Timer::Sweep) => self.on_sweep_timeout(cx),
            Input::Timer(Timer::Ask) => self.on_ask_timeout(cx),
            Input::Timer(Timer::Directory(timer)) => {
                self.keep(cx, |keeper, io| keeper.on_timer(timer, io));
            }
            // Rounds are looked after when nothing else is to be done.
            Input::Timer(Timer::Report | Timer::Gossip) => {}
            Input::Timer(Timer::Open(txn)) => {
                unreachable!("{txn} is waited for by a gateway, not by {}", self.node)
            }
            Input::Durable(ticket) => self.on_durable(ticket, cx),
            // Version ranges with members of their own (§5.3) are not there yet, and nobody leads.
            Input::Admin(Admin::TransferLeader { .. } | Admin::ChangeMembers { .. }) => {
                cx.note(Note::OrderRefused);
            }
            Input::Begin(_) | Input::Read { .. } | Input::Decide { .. } | Input::Resolve { .. } => {
                unreachable!("callers talk to gateways, not to server {}", self.node)
            }
        }
        self.settle(cx);
    }

    fn flush(&mut self, cx: &mut Cx<'_, OceanVista>) {
        self.report_if_due(cx);
        self.gossip_if_due(cx);
        self.keep(cx, |keeper, io| keeper.flush(io));
        self.settle(cx);
        self.checkpoint_if_due(cx);
    }

    fn refusal(&self, _order: &Admin) -> Option<Refusal> {
        Some(Refusal::Never(
            "the servers of a partition of Ocean Vista are those of the placement, and none of them \
             leads; to replace a server that lost its data, start it with `serve --replace`"
                .into(),
        ))
    }

    fn leaks(&self) -> Vec<Leak> {
        let Roles { replica, coordinator, reader, executions, inquiries, syncs } = &self.roles;
        vec![
            ("transactions coordinated", coordinator.len()),
            ("versions owed by replicas", coordinator.owed()),
            ("functors not computed", replica.unresolved_below(Timestamp::MAX)),
            ("versions not settled", replica.unsettled()),
            ("questions to replicas", reader.len()),
            ("executions", executions.len()),
            ("inquiries", inquiries.len()),
            ("takeovers", self.control.recoveries.len()),
            ("long promises", self.control.tellings.len()),
            ("replicas that catch up", usize::from(!syncs.is_idle())),
        ]
    }

    fn names(&self, ask: &Ask) -> Option<Listing> {
        let Unit::Partition(partition) = ask.unit else { return None };
        let placed = self.cluster.partition(partition)?;
        // A replica that is catching up may lack versions that it acknowledged on another disk.
        if !placed.replicas.contains(&self.node) || !self.control.is_complete() {
            return None;
        }
        let basis =
            Basis::Voter { since: 0, voters: vec![Voters { nodes: placed.replicas.clone() }] };
        Some(self.roles.replica.names(partition, ask, basis, &self.cluster))
    }

    fn replica_digests(&self) -> Vec<ReplicaDigest> {
        // Nothing is left over, so everything is settled, wherever everything is.
        if self.control.is_complete() { self.roles.replica.replica_digests() } else { Vec::new() }
    }

    fn gauges(&self, _: Time) -> Vec<Gauge> {
        let node = self.node;
        let count = |of: usize| i64::try_from(of).unwrap_or(i64::MAX);
        let Roles { replica, coordinator, .. } = &self.roles;
        vec![
            Gauge { name: "pending", node, value: count(replica.state.pending.len()) },
            Gauge { name: "coordinated", node, value: count(coordinator.len()) },
            // 1 while it copies what its replicas lack.
            Gauge { name: "incomplete", node, value: i64::from(!self.control.is_complete()) },
        ]
    }

    fn assert_invariants(&self) {
        self.roles.replica.assert_invariants();
        self.roles.coordinator.assert_invariants();
        self.gossiper.assert_invariants();
        if let Some(keeper) = &self.control.keeper {
            keeper.assert_invariants();
        }
        assert!(self.local.is_empty(), "{} left messages to itself", self.node);
    }
}

impl Server {
    /// The roles, and the world around them.
    fn split<'a, 'b>(
        &'a mut self,
        cx: &'a mut Cx<'b, OceanVista>,
    ) -> (&'a mut Roles, World<'a, 'b>) {
        let (_, roles, world) = self.split_all(cx);
        (roles, world)
    }

    /// The same, with what this node takes over.
    fn split_all<'a, 'b>(
        &'a mut self,
        cx: &'a mut Cx<'b, OceanVista>,
    ) -> (&'a mut Recoveries, &'a mut Roles, World<'a, 'b>) {
        let Control { membership, acceptors, recoveries, is_whole, .. } = &mut self.control;
        let (now, clock) = (cx.now(), cx.clock().now);
        let has_lease = membership.has_lease(now);
        let window = if self.config.mutations.no_lease() && membership.members().epoch > 0 {
            let limit = Timestamp::MAX;
            Some(Window { floor: Timestamp::ZERO, limit, clock })
        } else {
            membership.window(now, clock)
        };
        let owes = |acceptor: &Acceptor| !acceptor.owes(membership.members()).is_empty();
        let is_complete = *is_whole && !acceptors.values().any(owes);
        let world = World {
            node: self.node,
            cluster: &self.cluster,
            config: &self.config,
            members: membership.members(),
            marks: &self.marks,
            is_serving: has_lease && is_complete,
            is_pressed: membership.is_pressed(now) && !self.config.mutations.no_lease(),
            window,
            backup: self.backup,
            acceptors,
            slots: &self.slots,
            local: &mut self.local,
            pending_writes: &mut self.pending_writes,
            cx,
        };
        (recoveries, &mut self.roles, world)
    }

    #[expect(clippy::too_many_lines, reason = "one arm for each message")]
    fn on_message(&mut self, from: NodeId, msg: Msg, cx: &mut Cx<'_, OceanVista>) {
        match msg {
            // Gateways, and replicas that answer.
            Msg::Submit { functor } => {
                self.coordinator(cx, |coordinator, world| {
                    coordinator.on_submit(from, functor, world);
                });
            }
            Msg::Look { txn, round, keys, at } => self.on_look(from, (txn, round), &keys, at, cx),
            Msg::Inquire { functor } => {
                let (roles, mut world) = self.split(cx);
                roles.inquiries.begin(from, functor, &mut world);
            }
            Msg::Known { txn, round, settled, knowledge } => {
                let (roles, mut world) = self.split(cx);
                let answer = inquiry::Answer { settled, knowledge };
                roles.inquiries.on_known(from, (txn, round), answer, &mut world);
            }
            Msg::Written { ts, ballot: 0, disk } => self.coordinator(cx, |coordinator, world| {
                coordinator.on_written((from, disk), ts, world);
            }),
            Msg::Refused { ts, ballot: 0, refusal } => {
                self.coordinator(cx, |coordinator, world| {
                    coordinator.on_refused(from, ts, refusal, world);
                });
            }
            Msg::Confirm { ts, ballot: 0, is_held, disk } => {
                self.coordinator(cx, |coordinator, world| {
                    coordinator.on_confirm((from, disk), ts, is_held, world);
                });
            }
            Msg::Aborted { ts, ballot: _, disk } => self.coordinator(cx, |coordinator, world| {
                coordinator.on_aborted((from, disk), ts, world);
            }),
            Msg::Have { from: first, to } => self.roles.coordinator.on_have(from, first, to),
            // What is written in the name of a coordinator that is gone.
            Msg::Written { ts, ballot, disk: _ } => {
                let (recoveries, _, mut world) = self.split_all(cx);
                recoveries.on_written(from, ts, ballot, &mut world);
            }
            Msg::Refused { ts, ballot, refusal } => {
                let (recoveries, _, mut world) = self.split_all(cx);
                recoveries.on_refused(from, (ts, ballot), refusal, &mut world);
            }
            Msg::Confirm { ts, ballot, is_held, disk: _ } => {
                let (recoveries, _, mut world) = self.split_all(cx);
                recoveries.on_confirm(from, (ts, ballot), is_held, &mut world);
            }
            Msg::Intent { ts, incarnation, functor } => match functor {
                Some(functor) => self.control.backup.begin(from, incarnation, ts, functor),
                None => self.control.backup.end(from, incarnation, ts),
            },
            // What is asked of this node's replicas.
            Msg::Write { ts, ballot, incarnation, functor } => {
                self.acceptor(cx, |replica, world| {
                    replica.on_write(from, (ts, ballot, incarnation), functor, world);
                });
            }
            Msg::Finalize { ts, ballot } => {
                self.acceptor(cx, |replica, world| replica.on_finalize(from, ts, ballot, world));
            }
            Msg::Abort { ts, ballot, incarnation, functor } => {
                self.acceptor(cx, |replica, world| {
                    replica.on_abort(from, (ts, ballot, incarnation), functor, world);
                });
            }
            Msg::Query { txn, is_final, round, epoch } => {
                if self.control.may_tell(epoch) {
                    self.acceptor(cx, |replica, world| {
                        replica.on_query(from, (txn, is_final), round, world);
                    });
                }
            }
            Msg::Get { query, partition, asks, replicated, epoch } => {
                let (roles, mut world) = self.split(cx);
                let get = Get { from, query, partition, asks, replicated, epoch };
                roles.replica.on_get(get, &mut world);
            }
            Msg::Put { ts, output } => {
                let (roles, mut world) = self.split(cx);
                roles.replica.on_put(ts, &output, &mut world);
            }
            // Executors.
            Msg::Got { query, replicated, seen, is_cut } => {
                let (roles, mut world) = self.split(cx);
                roles.reader.on_heard(from);
                let seen = (seen, is_cut);
                let progress = roles.reader.on_got(from, query, replicated, seen, &mut world);
                self.on_progress(progress, cx);
            }
            Msg::NotReady { query, reason } => {
                let (roles, mut world) = self.split(cx);
                let progress = roles.reader.on_not_ready(from, query, reason, &mut world);
                self.on_progress(progress, cx);
            }
            Msg::Executed { ts, output, reads } => {
                // The first to have executed it is believed; this node's own execution can stop.
                if let Some(functor) = self.roles.executions.end(ts) {
                    self.roles.reader.forget(Owner::Execution(ts));
                    self.on_executed(ts, &functor, &output, &reads, cx);
                }
            }
            // Peers.
            Msg::Missing { from: first, to } => self.sync(cx, |syncs, replica, world| {
                syncs.on_missing(from, (first, to), replica, world)
            }),
            Msg::Pull { partition, round, from: first, to, rest, asked } => {
                if self.control.is_acceptor() {
                    let (Roles { syncs, replica, .. }, mut world) = self.split(cx);
                    let of = (partition, round, rest, asked);
                    syncs.on_pull(from, of, (first, to), replica, &mut world);
                }
            }
            Msg::Pulled {
                partition,
                round,
                piece,
                next,
                settled,
                entries,
                names,
                forgotten,
                promises,
                asked,
            } => {
                self.sync(cx, |syncs, replica, world| {
                    let entries = entries.into_iter().collect();
                    let answer = Answer { settled, entries, names, forgotten, promises };
                    let at = (partition, round, piece, asked);
                    syncs.on_piece(from, at, (answer, next), replica, world)
                });
            }
            Msg::Scan { partition, round, from: first, after, asked } => {
                if self.control.is_acceptor() {
                    let (Roles { syncs, replica, .. }, mut world) = self.split(cx);
                    let of = (first, after.as_ref());
                    let at = (partition, round);
                    let (keys, next) = syncs.on_scan(from, at, of, replica, &world);
                    let settled = replica.state.settled_of(partition);
                    let collected = replica.state.collected;
                    let msg =
                        Msg::Scanned { partition, round, keys, next, collected, settled, asked };
                    world.send(from, msg);
                }
            }
            Msg::Scanned { partition, round, keys, next, collected, settled, asked } => {
                self.sync(cx, |syncs, replica, world| {
                    replica.state.collected = replica.state.collected.max(collected);
                    let at = (partition, round, asked);
                    syncs.on_scanned(from, at, (keys, next, settled), replica, world)
                });
            }
            // Who takes part, and how far everybody is.
            Msg::Directory(msg) => self.on_directory(from, *msg, cx),
            Msg::Takeover(msg) => self.on_takeover(from, *msg, cx),
            Msg::Gossip(msg) => self.on_gossip(from, *msg, cx),
            Msg::Digests { sums } => self.roles.replica.checks.hear(from, sums),
            Msg::Answer { .. } | Msg::Found { .. } | Msg::Declined { .. } => {
                unreachable!("answers to gateways do not come to server {}", self.node)
            }
        }
    }

    fn coordinator(
        &mut self,
        cx: &mut Cx<'_, OceanVista>,
        act: impl FnOnce(&mut Coordinator, &mut World<'_, '_>),
    ) {
        let (roles, mut world) = self.split(cx);
        act(&mut roles.coordinator, &mut world);
    }

    /// Has the replicas here promise or tell something: not from a disk that may have forgotten
    /// promises.
    fn acceptor(
        &mut self,
        cx: &mut Cx<'_, OceanVista>,
        act: impl FnOnce(&mut Replica, &mut World<'_, '_>),
    ) {
        if self.control.is_acceptor() {
            let (roles, mut world) = self.split(cx);
            act(&mut roles.replica, &mut world);
        }
    }

    /// Brings the replicas here up to date, as far as can be.
    fn sync(
        &mut self,
        cx: &mut Cx<'_, OceanVista>,
        act: impl FnOnce(&mut Syncs, &mut Replica, &mut World<'_, '_>) -> Done,
    ) {
        let (roles, mut world) = self.split(cx);
        let done = act(&mut roles.syncs, &mut roles.replica, &mut world);
        self.on_done(done);
    }

    // Membership (§5.1).

    fn keep(
        &mut self,
        cx: &mut Cx<'_, OceanVista>,
        act: impl FnOnce(&mut Keeper, &mut Io<'_, '_>),
    ) {
        let Self { node, control, local, pending_writes, .. } = self;
        if let Some(keeper) = &mut control.keeper {
            act(keeper, &mut Io { node: *node, local, pending_writes, cx });
        }
    }

    fn send(&mut self, to: NodeId, msg: Msg, cx: &mut Cx<'_, OceanVista>) {
        if to == self.node {
            self.local.push_back(Local::Message(msg));
        } else {
            cx.send(to, msg);
        }
    }

    fn on_ask_timeout(&mut self, cx: &mut Cx<'_, OceanVista>) {
        let (now, clock) = (cx.now(), cx.clock().now);
        let (to, msg) = self.control.membership.ask(now, clock);
        self.send(to, Msg::Directory(Box::new(msg)), cx);
        cx.set_timer(Timer::Ask, now + self.control.membership.ask_interval());
    }

    fn on_directory(&mut self, from: NodeId, msg: directory::Message, cx: &mut Cx<'_, OceanVista>) {
        let membership = &mut self.control.membership;
        let changes = match msg {
            directory::Message::Log(msg) => {
                self.keep(cx, |keeper, io| keeper.on_log(from, msg, io));
                return;
            }
            directory::Message::Ask(ask) => {
                self.keep(cx, |keeper, io| keeper.on_ask(from, &ask, io));
                return;
            }
            directory::Message::NotLeader { leader } => {
                let (now, clock) = (cx.now(), cx.clock().now);
                if let Some((to, msg)) = membership.on_not_leader(from, leader, now, clock) {
                    self.send(to, Msg::Directory(Box::new(msg)), cx);
                }
                return;
            }
            directory::Message::Answer(answer) => {
                membership.on_answer(from, answer, cx.now(), cx.rng())
            }
            directory::Message::Members(members) => membership.on_members(&members, cx.rng()),
        };
        self.mark_if_new(cx);
        for change in changes {
            self.on_change(change, cx);
        }
    }

    /// A server that has never taken part has promised nothing: its disk is whole.
    fn mark_if_new(&mut self, cx: &mut Cx<'_, OceanVista>) {
        let Control { membership, is_intact, mark, .. } = &mut self.control;
        if !*is_intact && mark.is_none() && membership.is_new() == Some(true) {
            *mark = Some(self.pending_writes.persist(Record::Intact, cx));
        }
    }

    fn on_change(&mut self, change: directory::Change, cx: &mut Cx<'_, OceanVista>) {
        match change {
            directory::Change::Members => {
                let members = self.control.membership.members().clone();
                self.gossiper.on_members(&members);
                self.choose_gossipers();
                self.backup = backup_of(self.node, &self.cluster, &members);
                self.roles.coordinator.on_members(&members);
                let (roles, mut world) = self.split(cx);
                roles.inquiries.on_members(&mut world);
                if !self.control.owes().is_empty() {
                    self.control.needed_epoch = members.epoch;
                }
                self.local.push_back(Local::Reconsider);
            }
            directory::Change::Joined { incarnation, floor } => {
                cx.note(Note::Joined);
                let tids = Tids::new(self.slot(), floor);
                self.roles.coordinator = self.roles.coordinator.next(tids, incarnation);
                self.roles.coordinator.tids.observe(self.marks.visible);
                self.control.is_whole = false;
                self.control.needed_epoch = self.control.membership.members().epoch;
                self.local.push_back(Local::Reconsider);
            }
            directory::Change::Ended if self.config.mutations.no_lease() => {}
            directory::Change::Ended => {
                cx.note(Note::Ended);
                // Gateways will inquire.
                let tids = Tids::new(self.slot(), Timestamp::ZERO);
                self.roles.coordinator = self.roles.coordinator.next(tids, 0);
                self.roles.syncs.on_ended();
                self.control.is_whole = false;
            }
            directory::Change::Tasks => {
                let tasks = self.control.membership.tasks().copied().collect();
                let known = std::mem::take(&mut self.control.backup);
                let (recoveries, _, mut world) = self.split_all(cx);
                recoveries.assign(&tasks, &known, &mut world);
                self.control.backup = known;
            }
        }
    }

    fn slot(&self) -> u64 {
        let at = self.slots.iter().position(|&server| server == self.node);
        at.unwrap_or(usize::MAX) as u64
    }

    /// Members or watermarks have changed: settles what is settled, or sets out to be complete.
    fn reconsider(&mut self, cx: &mut Cx<'_, OceanVista>) {
        let epoch = self.marks.epoch;
        if self.control.is_complete() {
            let (roles, mut world) = self.split(cx);
            roles.replica.settle(&mut world);
        } else if let Some(whole) = self.control.lacks(epoch)
            && self.roles.syncs.is_idle()
        {
            let (roles, mut world) = self.split(cx);
            let done = roles.syncs.complete(whole, &mut roles.replica, &mut world);
            self.on_done(done);
        }
    }

    /// The replicas here were made complete.
    fn on_done(&mut self, done: Done) {
        let Done::Whole(whole) = done else { return };
        self.local.push_back(Local::Reconsider);
        let is_stale = whole.incarnation != self.control.membership.incarnation();
        if is_stale && !whole.is_intact {
            // It is copied as far as that goes, and nothing follows from that yet.
            return;
        }
        // All of this, what was copied, and that the disk is whole, becomes durable at once: after
        // a crash before that, nothing was copied and nothing dropped.
        for (partition, owed) in whole.owes {
            let Some(acceptor) = self.control.acceptors.get_mut(&partition) else { continue };
            for (server, incarnation) in owed {
                acceptor.learn(takeover::Record::Swept { server, incarnation });
            }
        }
        if !whole.is_intact {
            // Promises that this disk forgot were made to whoever takes over now, at the latest.
            let members = self.control.membership.members();
            for (server, incarnation) in members.fenced() {
                let pledge =
                    takeover::Record::Pledge { server, incarnation, ballot: members.epoch };
                for acceptor in self.control.acceptors.values_mut() {
                    acceptor.learn(pledge.clone());
                }
            }
        }
        self.control.is_whole |= !is_stale;
        self.is_copy_volatile = true;
    }

    // Taking over (§5.2, §5.4; V10).

    fn on_takeover(
        &mut self,
        from: NodeId,
        msg: takeover::Message<Arc<Functor>>,
        cx: &mut Cx<'_, OceanVista>,
    ) {
        match msg {
            takeover::Message::Promise { partition, task, after } => {
                self.on_promise(from, (partition, task), after, cx);
            }
            takeover::Message::Promised { partition, task, part, promise } => {
                let (recoveries, _, mut world) = self.split_all(cx);
                recoveries.on_promised(from, (partition, task), part, promise, &mut world);
            }
            takeover::Message::Close { partition, task, closed } => {
                self.on_close(from, (partition, task), closed, cx);
            }
            takeover::Message::Closed { partition, task } => {
                self.control.recoveries.on_closed(from, partition, task);
                for task in std::mem::take(&mut self.control.recoveries.finished) {
                    self.control.membership.finish(task);
                }
            }
            takeover::Message::AskClose { partition, server, incarnation } => {
                self.on_ask_close(from, partition, (server, incarnation), cx);
            }
        }
    }

    /// Somebody takes over: from now on only that ballot counts.
    fn on_promise(
        &mut self,
        from: NodeId,
        (partition, task): (PartitionId, Task),
        after: Option<takeover::Bookmark>,
        cx: &mut Cx<'_, OceanVista>,
    ) {
        let Task { server, incarnation, ballot, .. } = task;
        if !self.control.is_acceptor() {
            return;
        }
        let Some(acceptor) = self.control.acceptors.get_mut(&partition) else { return };
        let Ok(record) = acceptor.promise(server, incarnation, ballot) else {
            cx.note(Note::Outvoted);
            return;
        };
        let closed = acceptor.closed(server, incarnation).cloned();
        self.pending_writes.persist(Record::Takeover(partition, record), cx);
        let mut tellings = std::mem::take(&mut self.control.tellings);
        let (roles, mut world) = self.split(cx);
        let held = || roles.replica.promise(partition, task, closed, &world);
        let bytes = world.config.piece_bytes;
        for (part, promise) in tellings.tell(from, (partition, task), after, bytes, held) {
            let msg = takeover::Message::Promised { partition, task, part, promise };
            world.reply(from, Msg::Takeover(Box::new(msg)));
        }
        self.control.tellings = tellings;
    }

    /// Whoever took over says what survives.
    fn on_close(
        &mut self,
        from: NodeId,
        (partition, task): (PartitionId, Task),
        closed: Closed,
        cx: &mut Cx<'_, OceanVista>,
    ) {
        let Task { server, incarnation, .. } = task;
        if !self.control.is_acceptor() {
            return;
        }
        let Some(acceptor) = self.control.acceptors.get_mut(&partition) else { return };
        let Ok(record) = acceptor.close(server, incarnation, closed.clone()) else {
            cx.note(Note::Outvoted);
            return;
        };
        self.pending_writes.persist(Record::Takeover(partition, record), cx);
        let is_whole = self.control.is_whole;
        let (roles, mut world) = self.split(cx);
        // What was decided before and is still on its way here, nobody sends any more.
        let is_here = roles.replica.close(task, &closed, &mut world)
            && closed.above < roles.replica.state.settled;
        let msg = takeover::Message::Closed { partition, task };
        world.reply(from, Msg::Takeover(Box::new(msg)));
        if is_here
            && is_whole
            && let Some(acceptor) = self.control.acceptors.get_mut(&partition)
            && acceptor.swept(server) + 1 == incarnation
        {
            // Nothing of it is missing.
            let record = takeover::Record::Swept { server, incarnation };
            acceptor.learn(record.clone());
            self.pending_writes.persist(Record::Takeover(partition, record), cx);
        }
        self.local.push_back(Local::Reconsider);
    }

    /// A replica that was away asks what survives of an incarnation that is out.
    fn on_ask_close(
        &mut self,
        from: NodeId,
        partition: PartitionId,
        (server, incarnation): (NodeId, u32),
        cx: &mut Cx<'_, OceanVista>,
    ) {
        if incarnation > self.control.membership.members().settled_through(server) {
            return;
        }
        let acceptor = self.control.acceptors.get(&partition);
        let Some(closed) = acceptor.and_then(|acceptor| acceptor.closed(server, incarnation))
        else {
            return;
        };
        let (after, upto, ballot) = (closed.above, closed.upto, closed.ballot);
        let task = Task { server, incarnation, ballot, after, upto };
        let msg = takeover::Message::Close { partition, task, closed: closed.clone() };
        self.send(from, Msg::Takeover(Box::new(msg)), cx);
    }

    // Watermarks (§3.3, §4.2).

    fn choose_gossipers(&mut self) {
        let Self { cluster, control, config, .. } = self;
        let members = control.membership.members();
        let regions: Vec<RegionId> = cluster.servers().map(|server| server.region).collect();
        let of = |region| (region, gossipers(cluster, members, region, config.gossipers));
        self.gossipers = regions.into_iter().map(of).collect();
    }

    fn on_gossip(&mut self, from: NodeId, msg: gossiper::Message, cx: &mut Cx<'_, OceanVista>) {
        let heard = match msg {
            gossiper::Message::Report(report) => {
                let heard = self.gossiper.on_report(report);
                self.has_news |= heard == Heard::Taken;
                heard
            }
            gossiper::Message::Regional(regional) => self.gossiper.on_regional(regional),
            gossiper::Message::Watermarks(marks) => {
                self.adopt(&marks, cx);
                return;
            }
        };
        match heard {
            // Whoever knows later members sends them when it hears of earlier ones from here.
            Heard::Taken | Heard::Useless | Heard::NewerEpoch => {}
            Heard::OlderEpoch => {
                let members = self.control.membership.members().clone();
                let msg = directory::Message::Members(members);
                self.send(from, Msg::Directory(Box::new(msg)), cx);
            }
        }
    }

    /// Watermarks further than those known make more visible, and settle more.
    fn adopt(&mut self, marks: &Watermarks, cx: &mut Cx<'_, OceanVista>) {
        let known = self.control.membership.members().epoch;
        if marks.epoch > known || !self.marks.adopt(marks) {
            return;
        }
        let visible = self.marks.visible;
        if !self.config.mutations.no_lease() {
            self.roles.coordinator.tids.observe(visible);
        }
        let (roles, mut world) = self.split(cx);
        roles.coordinator.on_visible(&mut world);
        roles.inquiries.on_visible(&mut world);
        self.reconsider(cx);
    }

    /// Tells the gossipers of the region what holds of this server, if it is time.
    fn report_if_due(&mut self, cx: &mut Cx<'_, OceanVista>) {
        let waiting = self.roles.coordinator.waiting(self.reported);
        if cx.now() >= self.reports.next(waiting) {
            self.reports.round(cx.now());
            let report = self.report(cx);
            self.reported = report.as_ref().map_or(self.reported, |report| report.svw);
            let gossipers = self.gossipers.get(&self.region).cloned().unwrap_or_default();
            for (to, report) in gossipers.into_iter().zip(report.iter().cycle()) {
                let msg = Box::new(gossiper::Message::Report(report.clone()));
                self.send(to, Msg::Gossip(msg), cx);
            }
        }
        let waiting = self.roles.coordinator.waiting(self.reported);
        cx.set_timer(Timer::Report, self.reports.next(waiting));
        self.settle(cx);
    }

    /// What holds of this server, if it has a lease.
    fn report(&mut self, cx: &mut Cx<'_, OceanVista>) -> Option<Report> {
        let kept = self.marks.visible - self.config.version_retention;
        let collectable = self.marks.collectable;
        let (node, epoch) = (self.node, self.control.membership.members().epoch);
        let (roles, world) = self.split(cx);
        let Window { limit, clock, .. } = world.window?;
        let Roles { replica, coordinator, reader, .. } = roles;
        coordinator.tids.raise(limit);
        let svw = coordinator.tids.svw(clock);
        let needed = [replica.least_unexecuted(), coordinator.least(), reader.least()];
        let least = needed.into_iter().flatten().min().unwrap_or(kept).min(kept);
        // What a version replaces is needed to execute that version, by whoever comes back too:
        // what it comes to is known to f + 1 replicas before what it replaces goes.
        let is_backed = world.is_serving && world.are_all_backed();
        let sgw = if is_backed { least.0.saturating_sub(1) } else { collectable.0 };
        Some(Report {
            server: node,
            incarnation: coordinator.incarnation,
            epoch,
            svw,
            srw: coordinator.srw(svw, world.cluster),
            sgw: Timestamp(sgw),
        })
    }

    /// Draws conclusions from reports, and exchanges them with the other regions.
    fn gossip_if_due(&mut self, cx: &mut Cx<'_, OceanVista>) {
        if !self.gossipers.get(&self.region).is_some_and(|mine| mine.contains(&self.node)) {
            return;
        }
        if self.gossiper.merge() {
            let results = self.gossiper.results().clone();
            let servers = self.cluster.servers().filter(|server| server.region == self.region);
            let servers: Vec<NodeId> = servers.map(|server| server.id).collect();
            for to in servers {
                let msg = Box::new(gossiper::Message::Watermarks(results.clone()));
                self.send(to, Msg::Gossip(msg), cx);
            }
        }
        if self.has_news && cx.now() >= self.rounds.next(1) {
            self.has_news = false;
            self.rounds.round(cx.now());
            if let Some(regional) = self.gossiper.regional() {
                self.tell_other_regions(&regional, cx);
            }
        }
        if self.has_news {
            cx.set_timer(Timer::Gossip, self.rounds.next(1));
        }
    }

    fn tell_other_regions(&self, regional: &Regional, cx: &mut Cx<'_, OceanVista>) {
        for (&region, gossipers) in &self.gossipers {
            for &to in gossipers.iter().filter(|_| region != self.region) {
                let msg = gossiper::Message::Regional(regional.clone());
                cx.send(to, Msg::Gossip(Box::new(msg)));
            }
        }
    }

    // Executing (§3.1).

    fn on_progress(&mut self, progress: Progress, cx: &mut Cx<'_, OceanVista>) {
        match progress {
            Progress::Nothing => {}
            Progress::Read(Owner::Execution(ts), reads) => {
                let Some(functor) = self.roles.executions.end(ts) else { return };
                let most = self.config.read_bytes_max;
                let (output, reads) = execution::compute(&functor, reads, most);
                self.on_executed(ts, &functor, &Arc::new(output), &reads, cx);
            }
            Progress::TooLarge(Owner::Execution(ts)) => {
                let Some(functor) = self.roles.executions.end(ts) else { return };
                let (output, reads) = execution::too_large();
                self.on_executed(ts, &functor, &Arc::new(output), &reads, cx);
            }
            Progress::TooLarge(Owner::Look { txn, gateway, .. }) => {
                cx.send(gateway, Msg::Declined { txn, reason: Reason::TooLarge });
            }
            Progress::Read(Owner::Look { txn, round, gateway, at }, reads) => {
                cx.send(gateway, Msg::Found { txn, round, at, reads });
            }
            Progress::Collected(Owner::Execution(ts)) => {
                // Others have computed it, and this node was not told.
                self.roles.executions.end(ts);
                let (roles, mut world) = self.split(cx);
                roles.inquiries.on_collected(ts, &mut world);
                roles.coordinator.on_collected(ts, &mut world);
                if roles.replica.lacks(ts) && self.control.is_complete() {
                    self.control.is_whole = false;
                    self.local.push_back(Local::Reconsider);
                }
            }
            Progress::Collected(Owner::Look { txn, gateway, .. }) => {
                cx.send(gateway, Msg::Declined { txn, reason: Reason::Collected });
            }
        }
    }

    fn execute(&mut self, ts: Timestamp, functor: &Arc<Functor>, cx: &mut Cx<'_, OceanVista>) {
        let (roles, mut world) = self.split(cx);
        let Roles { reader, executions, .. } = roles;
        let progress = executions.begin(ts, functor, reader, &mut world);
        self.on_progress(progress, cx);
    }

    /// A functor is computed: its values replace it everywhere (§3.1, circled 3 and 4).
    fn on_executed(
        &mut self,
        ts: Timestamp,
        functor: &Functor,
        output: &Arc<Output>,
        reads: &Reads,
        cx: &mut Cx<'_, OceanVista>,
    ) {
        let (roles, mut world) = self.split(cx);
        let Roles { replica, coordinator, inquiries, .. } = roles;
        let owner = world.owner(ts);
        replica.on_put(ts, output, &mut world);
        if owner == world.node {
            coordinator.on_executed(ts, output, reads, &mut world);
            let mut partitions: Vec<PartitionId> =
                functor.writes.iter().map(|key| world.cluster.partition_of(key)).collect();
            partitions.dedup();
            for to in replicas(world.cluster, &partitions) {
                if to != world.node {
                    world.send(to, Msg::Put { ts, output: output.clone() });
                }
            }
        } else {
            let (output, reads) = (output.clone(), reads.clone());
            world.send(owner, Msg::Executed { ts, output, reads });
        }
        inquiries.on_executed(ts, output, reads, &mut world);
    }

    /// A gateway wants to look at the database before its caller decides (§3.4).
    fn on_look(
        &mut self,
        gateway: NodeId,
        (txn, round): (TxnId, u32),
        keys: &[Key],
        at: Option<Timestamp>,
        cx: &mut Cx<'_, OceanVista>,
    ) {
        let visible = self.marks.visible;
        let at = at.unwrap_or_else(|| {
            let partitions = keys.iter().map(|key| self.cluster.partition_of(key));
            let replicated = partitions.map(|partition| self.marks.replicated(partition)).min();
            let near = replicated.unwrap_or(visible).min(visible);
            // What every replica has is at hand; but it must not be too old.
            if near + self.config.recon_staleness >= visible { near } else { visible }
        });
        if at > visible || visible == Timestamp::ZERO {
            cx.send(gateway, Msg::Declined { txn, reason: Reason::Inactive });
            return;
        }
        let (roles, mut world) = self.split(cx);
        let owner = Owner::Look { txn, round, gateway, at };
        let progress = roles.reader.begin(owner, keys, at, &mut world);
        self.on_progress(progress, cx);
    }

    // Housekeeping.

    fn on_sweep_timeout(&mut self, cx: &mut Cx<'_, OceanVista>) {
        let (recoveries, roles, mut world) = self.split_all(cx);
        let Roles { replica, coordinator, reader, inquiries, syncs, .. } = roles;
        recoveries.on_sweep(&mut world);
        coordinator.on_sweep(&mut world);
        reader.on_sweep(&mut world);
        inquiries.on_sweep(&mut world);
        let done = syncs.on_sweep(replica, &mut world);
        for (ts, functor) in replica.overdue(&world) {
            world.cx.note(Note::Overdue);
            world.tell(Local::Execute { ts, functor });
        }
        self.on_done(done);
        let Control { membership, acceptors, tellings, backup, .. } = &mut self.control;
        tellings.forget(|partition, task| {
            acceptors.get(&partition).is_none_or(|acceptor| !acceptor.is_asked_for(task))
        });
        backup.forget(self.marks.visible, membership.members());
        self.local.push_back(Local::Reconsider);
        if cx.now().since(self.compared_at) >= self.config.compare_interval {
            self.compare(cx);
        }
        cx.set_timer(Timer::Sweep, cx.now() + self.config.sweep_interval);
    }

    /// Replicas of a partition tell each other what settled versions came to. A node whose replica
    /// came to something else than the others must not go on: nobody can say what else is wrong
    /// there.
    fn compare(&mut self, cx: &mut Cx<'_, OceanVista>) {
        self.compared_at = cx.now();
        if self.control.is_complete() {
            self.roles.replica.close_spans();
        }
        let checks = &mut self.roles.replica.checks;
        let news = checks.take_news();
        if let Some(difference) = checks.judge() {
            panic!("{}: {difference}", self.node);
        }
        for (partition, sums) in news {
            let replicas = self.cluster.partition(partition).into_iter().flat_map(|p| &p.replicas);
            for &to in replicas.filter(|&&to| to != self.node) {
                cx.send(to, Msg::Digests { sums: sums.clone() });
            }
        }
    }

    fn on_durable(&mut self, ticket: Ticket, cx: &mut Cx<'_, OceanVista>) {
        if self.pending_writes.last.is_some_and(|last| last <= ticket) {
            self.pending_writes.last = None;
        }
        while self.pending_writes.held.front().is_some_and(|(held, ..)| *held <= ticket) {
            let Some((_, to, msg)) = self.pending_writes.held.pop_front() else { break };
            if to == self.node {
                self.local.push_back(Local::Message(msg));
            } else {
                cx.send(to, msg);
            }
        }
        self.roles.replica.on_durable(ticket);
        if self.control.mark.is_some_and(|mark| mark <= ticket) {
            self.control.mark = None;
            self.control.is_intact = true;
            self.control.membership.on_marked();
            self.on_ask_timeout(cx);
        }
        self.keep(cx, |keeper, io| keeper.on_durable(ticket, io));
        if self.checkpoint.is_some_and(|checkpoint| checkpoint <= ticket) {
            self.checkpoint = None;
            self.roles.replica.store.thaw();
            if std::mem::take(&mut self.is_snapshot_awaited) {
                self.keep(cx, |keeper, io| keeper.on_checkpoint_durable(io));
            }
        }
    }

    /// Handles everything that one input set in motion inside this node.
    fn settle(&mut self, cx: &mut Cx<'_, OceanVista>) {
        while let Some(local) = self.local.pop_front() {
            match local {
                Local::Message(msg) => self.on_message(self.node, msg, cx),
                Local::Execute { ts, functor } => self.execute(ts, &functor, cx),
                Local::Inquire { gateway, functor } => {
                    let (roles, mut world) = self.split(cx);
                    roles.inquiries.begin(gateway, functor, &mut world);
                }
                Local::Reconsider => self.reconsider(cx),
            }
        }
    }

    /// Makes a checkpoint if enough has been persisted since the last one.
    fn checkpoint_if_due(&mut self, cx: &mut Cx<'_, OceanVista>) {
        let is_needed = self.control.keeper.as_ref().is_some_and(Keeper::needs_checkpoint);
        let is_due = is_needed
            || self.is_copy_volatile
            || self.pending_writes.pace.is_due(self.config.checkpoint_bytes);
        if !is_due || self.roles.replica.store.is_frozen() {
            return;
        }
        cx.note(Note::Checkpoint);
        self.is_snapshot_awaited = is_needed;
        let mut records = Vec::new();
        let is_copied = std::mem::take(&mut self.is_copy_volatile);
        if self.control.is_intact || is_copied {
            records.push(Record::Intact);
        }
        let settled = self.roles.replica.state.settled;
        for (&partition, acceptor) in &mut self.control.acceptors {
            acceptor.forget(settled);
            records.extend(acceptor.records().map(|record| Record::Takeover(partition, record)));
        }
        if let Some(keeper) = &mut self.control.keeper {
            records.extend(keeper.checkpoint_records().into_iter().map(Record::Directory));
        }
        let (roles, world) = self.split(cx);
        roles.replica.collect(&world);
        let pieces = roles.replica.state.pieces(world.config.batch_bytes);
        records.extend(pieces.into_iter().map(|piece| Record::State(Box::new(piece))));
        let frozen = roles.replica.store.freeze();
        self.pending_writes.pace.made(records.iter().map(Record::size).sum());
        let ticket = cx.checkpoint(frozen, records);
        self.checkpoint = Some(ticket);
        self.pending_writes.last = Some(ticket);
        if is_copied && !self.control.is_intact {
            self.control.mark = Some(ticket);
        }
    }
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Roles { replica, coordinator, executions, inquiries, .. } = &self.roles;
        write!(f, "vw {} rw {}", self.marks.visible, replica.state.settled)?;
        for (ts, image) in &replica.state.pending {
            write!(f, ", {} {ts} {:?}", image.functor.txn, image.phase)?;
            match image.output.as_deref() {
                None => {}
                Some(Ok(_)) => f.write_str(" computed")?,
                Some(Err(reason)) => write!(f, " void({reason})")?,
            }
        }
        match self.control.membership.incarnation() {
            Some(life) => write!(f, " | life {life}")?,
            None => f.write_str(" | out")?,
        }
        if !self.control.is_complete() {
            f.write_str(", incomplete")?;
        }
        let (flights, running, asked) = (coordinator.len(), executions.len(), inquiries.len());
        write!(f, " | coordinates {flights}, executes {running}, inquires {asked}")
    }
}
