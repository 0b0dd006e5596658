//! One server node: coordinator, replicas, executor and gossiper, one store, one stream of durable
//! records.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::Arc;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{NodeId, PartitionId, RegionId, Ticket, TxnId};
use orthodrome_core::machine::{Admin, Cx, Gauge, Input, Leftover, Machine, Setup};
use orthodrome_core::store::Store;
use orthodrome_core::time::{Time, Timestamp};
use orthodrome_core::txn::{Key, Reads};

use super::coordinator::{Coordinator, replicas};
use super::execution::{Executions, Owner, Progress, Reader};
use super::gossiper::{self, Gossiper, Heard, Pace, Regional, gossipers};
use super::inquiry::Inquiries;
use super::message::{Change, Functor, Msg, Output, Reason, Record};
use super::pull::Pulls;
use super::replica::{Get, Replica};
use super::state::State;
use super::tid::Tids;
use super::watermark::{Member, Members, Report, Status, Watermarks};
use super::{Config, Note, OceanVista, Timer};

/// The server side of Ocean Vista: every role that one node plays.
#[derive(Debug)]
pub struct Server {
    node: NodeId,
    region: RegionId,
    cluster: Arc<Cluster>,
    config: Arc<Config>,
    /// The server of each slot.
    slots: Vec<NodeId>,
    members: Members,
    marks: Watermarks,
    roles: Roles,
    gossiper: Gossiper,
    /// The gossipers of each region.
    gossipers: BTreeMap<RegionId, Vec<NodeId>>,
    reports: Pace,
    rounds: Pace,
    /// Something was reported since the last round of gossip.
    has_news: bool,
    local: VecDeque<Local>,
    ledger: Ledger,
    checkpoint: Option<Ticket>,
}

/// What a node does.
#[derive(Debug)]
struct Roles {
    replica: Replica,
    coordinator: Coordinator,
    reader: Reader,
    executions: Executions,
    inquiries: Inquiries,
    pulls: Pulls,
}

/// What one role of a node has for another.
#[derive(Debug)]
pub(super) enum Local {
    /// A message to this node itself.
    Message(Msg),
    /// A visible functor has to be computed.
    Execute { ts: Timestamp, functor: Arc<Functor> },
    /// A name has to be looked into.
    Inquire { gateway: NodeId, txn: TxnId, partition: PartitionId },
}

/// What was written, and what must not be said before it is durable.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    last: Option<Ticket>,
    held: VecDeque<(Ticket, NodeId, Msg)>,
    /// Size of the records since the last checkpoint.
    bytes: usize,
}

/// Everything around a role that its handlers need.
pub(super) struct World<'a, 'b> {
    pub node: NodeId,
    pub cluster: &'a Cluster,
    pub config: &'a Config,
    pub members: &'a Members,
    pub marks: &'a Watermarks,
    pub is_serving: bool,
    slots: &'a [NodeId],
    local: &'a mut VecDeque<Local>,
    ledger: &'a mut Ledger,
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

    /// Sends a message once everything written so far is durable (R4).
    pub(super) fn reply(&mut self, to: NodeId, msg: Msg) {
        match self.ledger.last {
            Some(ticket) if !self.config.teeth.acks_before_fsync => {
                self.ledger.held.push_back((ticket, to, msg));
            }
            Some(_) | None => self.send(to, msg),
        }
    }

    /// Makes a change of the replicas durable.
    pub(super) fn change(&mut self, change: Change) -> Ticket {
        let record = Record::Change(change);
        self.ledger.bytes += record.disk_size();
        let ticket = self.cx.persist(record);
        self.ledger.last = Some(ticket);
        ticket
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
        let Setup { node, cluster, config, engine } = setup;
        let mut state = State::default();
        for record in recovered {
            match record {
                Record::State(checkpoint) => state = *checkpoint,
                Record::Change(change) => state.apply(&change),
            }
        }
        let slots: Vec<NodeId> = cluster.servers().map(|server| server.id).collect();
        let slot = slots.iter().position(|&server| server == node).unwrap_or(usize::MAX);
        let one = Member { incarnation: 1, status: Status::Active };
        let members =
            Members { epoch: 1, servers: slots.iter().map(|&server| (server, one)).collect() };
        let region = cluster.region_of(node);
        let mut tids = Tids::new(slot as u64, Timestamp::ZERO);
        tids.raise(Timestamp::MAX);
        let now = cx.now();
        let mut server = Self {
            node,
            region,
            roles: Roles {
                replica: Replica::new(node, &cluster, state, Store::new(engine)),
                coordinator: Coordinator::new(tids, 1),
                reader: Reader::new(node, &cluster),
                executions: Executions::default(),
                inquiries: Inquiries::default(),
                pulls: Pulls::default(),
            },
            slots,
            marks: Watermarks::default(),
            gossiper: Gossiper::new(cluster.clone(), region, members.clone()),
            gossipers: BTreeMap::new(),
            reports: Pace::new(config.gossip_interval, now),
            rounds: Pace::new(config.gossip_interval, now),
            has_news: false,
            local: VecDeque::new(),
            ledger: Ledger::default(),
            checkpoint: None,
            members,
            cluster,
            config,
        };
        server.choose_gossipers();
        cx.set_timer(Timer::Sweep, now + server.config.sweep_interval);
        cx.set_timer(Timer::Report, now);
        server
    }

    fn step(&mut self, input: Input<OceanVista>, cx: &mut Cx<'_, OceanVista>) {
        match input {
            Input::Message { from, msg } => self.on_message(from, msg, cx),
            Input::Timer(Timer::Sweep) => self.on_sweep_timeout(cx),
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
        self.settle(cx);
        self.checkpoint_if_due(cx);
    }

    fn leftovers(&self) -> Vec<Leftover> {
        let Roles { replica, coordinator, reader, executions, inquiries, pulls } = &self.roles;
        vec![
            ("transactions coordinated", coordinator.len()),
            ("versions owed by replicas", coordinator.owed()),
            ("functors not computed", replica.unresolved_below(Timestamp::MAX)),
            ("questions to replicas", reader.len()),
            ("executions", executions.len()),
            ("inquiries", inquiries.len()),
            ("pulls", usize::from(!pulls.is_idle())),
        ]
    }

    fn gauges(&self, _: Time) -> Vec<Gauge> {
        let node = self.node;
        let count = |of: usize| i64::try_from(of).unwrap_or(i64::MAX);
        let Roles { replica, coordinator, .. } = &self.roles;
        vec![
            Gauge { name: "pending", node, value: count(replica.state.pending.len()) },
            Gauge { name: "coordinated", node, value: count(coordinator.len()) },
        ]
    }

    fn assert_invariants(&self) {
        self.roles.replica.assert_invariants();
        self.roles.coordinator.assert_invariants();
        self.gossiper.assert_invariants();
        assert!(self.local.is_empty(), "{} left messages to itself", self.node);
    }
}

impl Server {
    /// The roles, and the world around them.
    fn split<'a, 'b>(
        &'a mut self,
        cx: &'a mut Cx<'b, OceanVista>,
    ) -> (&'a mut Roles, World<'a, 'b>) {
        let world = World {
            node: self.node,
            cluster: &self.cluster,
            config: &self.config,
            members: &self.members,
            marks: &self.marks,
            is_serving: true,
            slots: &self.slots,
            local: &mut self.local,
            ledger: &mut self.ledger,
            cx,
        };
        (&mut self.roles, world)
    }

    fn on_message(&mut self, from: NodeId, msg: Msg, cx: &mut Cx<'_, OceanVista>) {
        let (roles, mut world) = self.split(cx);
        let world = &mut world;
        let Roles { replica, coordinator, reader, executions, inquiries, pulls } = roles;
        match msg {
            Msg::Submit { functor } => {
                coordinator.on_submit(from, functor, world);
            }
            Msg::Look { txn, round, keys, at } => self.on_look(from, (txn, round), &keys, at, cx),
            Msg::Inquire { txn, partition } => inquiries.begin(from, txn, partition, world),
            Msg::Write { ts, ballot, incarnation, functor } => {
                replica.on_write(from, (ts, ballot, incarnation), functor, world);
            }
            Msg::Finalize { ts, ballot } => replica.on_finalize(from, ts, ballot, world),
            Msg::Abort { ts, ballot, incarnation, functor } => {
                replica.on_abort(from, (ts, ballot, incarnation), functor, world);
            }
            Msg::Written { ts, ballot } => coordinator.on_written(from, ts, ballot, world),
            Msg::Refused { ts, ballot, refusal } => {
                coordinator.on_refused(from, (ts, ballot), refusal, world);
            }
            Msg::Confirm { ts, ballot, is_held } => {
                coordinator.on_confirm(from, (ts, ballot), is_held, world);
            }
            Msg::Aborted { ts, ballot } => coordinator.on_aborted(from, ts, ballot, world),
            Msg::Get { query, partition, asks, replicated } => {
                replica.on_get(Get { from, query, partition, asks, replicated }, world);
            }
            Msg::Got { query, replicated, seen } => {
                reader.on_heard(from);
                let progress = reader.on_got(from, query, replicated, seen, world);
                self.on_progress(progress, cx);
            }
            Msg::NotReady { query, reason } => {
                let progress = reader.on_not_ready(from, query, reason, world);
                self.on_progress(progress, cx);
            }
            Msg::Put { ts, output } => replica.on_put(ts, &output, world),
            Msg::Executed { ts, output, reads } => {
                // The first to have executed it is believed; this node's own execution can stop.
                if let Some(functor) = executions.end(ts) {
                    reader.forget(Owner::Execution(ts));
                    self.on_executed(ts, &functor, &output, &reads, cx);
                }
            }
            Msg::Query { txn, round } => replica.on_query(from, txn, round, world),
            Msg::Known { txn, round, knowledge } => {
                inquiries.on_known(from, (txn, round), knowledge, world);
            }
            Msg::Missing { from: first, to } => {
                pulls.on_missing(from, (first, to), replica, world);
            }
            Msg::Have { from: first, to } => coordinator.on_have(from, first, to),
            Msg::Pull { partition, round, from: first, to } => {
                let entries = replica.range(partition, (first, to), world.cluster);
                let replicated = world.marks.replicated(partition).min(world.marks.visible);
                world.reply(from, Msg::Pulled { partition, round, replicated, entries });
            }
            Msg::Pulled { partition, round, replicated, entries } => {
                pulls.on_pulled(from, (partition, round), replicated, entries, replica, world);
            }
            Msg::Gossip(msg) => self.on_gossip(*msg, cx),
            Msg::Answer { .. } | Msg::Found { .. } | Msg::Declined { .. } => {
                unreachable!("answers to gateways do not come to server {}", self.node)
            }
        }
    }

    // Watermarks (§3.3, §4.2).

    fn choose_gossipers(&mut self) {
        let Self { cluster, members, config, .. } = self;
        let regions: Vec<RegionId> = cluster.servers().map(|server| server.region).collect();
        let of = |region| (region, gossipers(cluster, members, region, config.gossipers));
        self.gossipers = regions.into_iter().map(of).collect();
    }

    fn on_gossip(&mut self, msg: gossiper::Message, cx: &mut Cx<'_, OceanVista>) {
        match msg {
            gossiper::Message::Report(report) => {
                self.has_news |= self.gossiper.on_report(report) == Heard::Taken;
            }
            gossiper::Message::Regional(regional) => {
                self.gossiper.on_regional(regional);
            }
            gossiper::Message::Watermarks(marks) => self.adopt(&marks, cx),
        }
    }

    /// Watermarks further than those known make more visible, and settle more.
    fn adopt(&mut self, marks: &Watermarks, cx: &mut Cx<'_, OceanVista>) {
        if marks.epoch > self.members.epoch || !self.marks.adopt(marks) {
            return;
        }
        let visible = self.marks.visible;
        let (roles, mut world) = self.split(cx);
        roles.coordinator.tids.observe(visible);
        roles.replica.settle(&mut world);
        roles.coordinator.on_visible(&mut world);
        roles.inquiries.on_visible(&mut world);
    }

    /// Tells the gossipers of the region what holds of this server, if it is time.
    fn report_if_due(&mut self, cx: &mut Cx<'_, OceanVista>) {
        let waiting = self.roles.coordinator.waiting();
        if cx.now() >= self.reports.next(waiting) {
            self.reports.round(cx.now());
            let report = self.report(cx);
            for &to in self.gossipers.get(&self.region).into_iter().flatten() {
                let msg = Box::new(gossiper::Message::Report(report.clone()));
                if to == self.node {
                    self.local.push_back(Local::Message(Msg::Gossip(msg)));
                } else {
                    cx.send(to, Msg::Gossip(msg));
                }
            }
        }
        cx.set_timer(Timer::Report, self.reports.next(waiting));
        self.settle(cx);
    }

    fn report(&mut self, cx: &Cx<'_, OceanVista>) -> Report {
        let Roles { replica, coordinator, reader, .. } = &mut self.roles;
        let svw = coordinator.tids.svw(cx.clock().now);
        let needed = [replica.least_unexecuted(), coordinator.least(), reader.least()];
        let kept = self.marks.visible - self.config.version_retention;
        let least = needed.into_iter().flatten().min().unwrap_or(kept).min(kept);
        Report {
            server: self.node,
            incarnation: coordinator.incarnation,
            epoch: self.members.epoch,
            svw,
            srw: coordinator.srw(svw, &self.cluster),
            // What a version replaces is needed to execute that version.
            sgw: Timestamp(least.0.saturating_sub(1)),
        }
    }

    /// Draws conclusions from reports, and exchanges them with the other regions.
    fn gossip_if_due(&mut self, cx: &mut Cx<'_, OceanVista>) {
        if !self.gossipers.get(&self.region).is_some_and(|mine| mine.contains(&self.node)) {
            return;
        }
        if self.gossiper.merge() {
            let results = self.gossiper.results().clone();
            let servers = self.cluster.servers().filter(|server| server.region == self.region);
            for to in servers.map(|server| server.id) {
                let msg = Box::new(gossiper::Message::Watermarks(results.clone()));
                if to == self.node {
                    self.local.push_back(Local::Message(Msg::Gossip(msg)));
                } else {
                    cx.send(to, Msg::Gossip(msg));
                }
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
                let output = Arc::new(functor.execute(&reads));
                self.on_executed(ts, &functor, &output, &reads, cx);
            }
            Progress::Read(Owner::Look { txn, round, gateway, at }, reads) => {
                cx.send(gateway, Msg::Found { txn, round, at, reads });
            }
            Progress::Collected(Owner::Execution(ts)) => {
                self.roles.executions.end(ts);
                let (roles, mut world) = self.split(cx);
                roles.inquiries.on_collected(ts, &mut world);
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
        let (roles, mut world) = self.split(cx);
        let Roles { replica, coordinator, reader, inquiries, pulls, .. } = roles;
        coordinator.on_sweep(&mut world);
        reader.on_sweep(&mut world);
        inquiries.on_sweep(&mut world);
        pulls.on_sweep(&mut world);
        for (ts, functor) in replica.overdue(&world) {
            world.cx.note(Note::Overdue);
            world.tell(Local::Execute { ts, functor });
        }
        cx.set_timer(Timer::Sweep, cx.now() + self.config.sweep_interval);
    }

    fn on_durable(&mut self, ticket: Ticket, cx: &mut Cx<'_, OceanVista>) {
        if self.ledger.last.is_some_and(|last| last <= ticket) {
            self.ledger.last = None;
        }
        while self.ledger.held.front().is_some_and(|(held, ..)| *held <= ticket) {
            let Some((_, to, msg)) = self.ledger.held.pop_front() else { break };
            if to == self.node {
                self.local.push_back(Local::Message(msg));
            } else {
                cx.send(to, msg);
            }
        }
        self.roles.replica.on_durable(ticket);
        if self.checkpoint.is_some_and(|checkpoint| checkpoint <= ticket) {
            self.checkpoint = None;
            self.roles.replica.store.thaw();
        }
    }

    /// Handles everything that one input set in motion inside this node.
    fn settle(&mut self, cx: &mut Cx<'_, OceanVista>) {
        while let Some(local) = self.local.pop_front() {
            match local {
                Local::Message(msg) => self.on_message(self.node, msg, cx),
                Local::Execute { ts, functor } => self.execute(ts, &functor, cx),
                Local::Inquire { gateway, txn, partition } => {
                    let (roles, mut world) = self.split(cx);
                    roles.inquiries.begin(gateway, txn, partition, &mut world);
                }
            }
        }
    }

    /// Makes a checkpoint if enough has been persisted since the last one.
    fn checkpoint_if_due(&mut self, cx: &mut Cx<'_, OceanVista>) {
        let is_due = self.ledger.bytes >= self.config.checkpoint_bytes;
        if !is_due || self.roles.replica.store.is_frozen() {
            return;
        }
        cx.note(Note::Checkpoint);
        let (roles, mut world) = self.split(cx);
        roles.replica.collect(&mut world);
        let records = vec![Record::State(Box::new(roles.replica.state.clone()))];
        let frozen = roles.replica.store.freeze();
        self.ledger.bytes = 0;
        let ticket = cx.checkpoint(frozen, records);
        self.checkpoint = Some(ticket);
        self.ledger.last = Some(ticket);
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
        let (flights, running, asked) = (coordinator.len(), executions.len(), inquiries.len());
        write!(f, " | coordinates {flights}, executes {running}, inquires {asked}")
    }
}
