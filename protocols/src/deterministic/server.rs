//! The server side: a replica of every stream, the merge, the data, and the transactions of
//! gateways.

mod checkpoint;
mod exchange;
mod gateways;
mod sequencing;
mod snapshots;
mod streams;
mod sweep;

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::digest::Digest;
use orthodrome_core::id::{NodeId, PartitionId, TxnId};
use orthodrome_core::machine::{
    Admin, GroupView, Input, Leak, Machine, MembershipOrder, Message as _, Refusal, ReplicaDigest,
    Setup,
};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::scan::{Ask, Basis, Listing, Unit};
use orthodrome_core::store::Store;
use orthodrome_core::time::{Time, Timestamp};
use orthodrome_core::txn::Key;

use self::checkpoint::{Disk, OWN, read};
use self::exchange::Exchange;
use self::gateways::Waiting;
use self::streams::Stream;
use self::sweep::Again;
use super::fences::{fences, hide};
use super::message::{Due, Msg, Name, Record};
use super::placement::Placement;
use super::state::{Applied, Settings, State};
use super::{Config, Cx, Deterministic, Note, Ordering, Timer};
use crate::hosting::{change_refusal, group_view, transfer_refusal};
use crate::routes::Routes;
use crate::waiting::RetryState;

/// The first of the names that denote shares where partitions are expected; further shares follow
/// downwards.
const SHARES: PartitionId = PartitionId(u32::MAX - 2);

/// One server.
#[derive(Debug)]
pub struct Server {
    node: NodeId,
    cluster: Arc<Cluster>,
    config: Arc<Config>,
    placement: Placement,
    streams: OrdMap<PartitionId, Stream>,
    state: State,
    store: Store,
    routes: Routes,
    /// Transactions for which gateways wait.
    waiting: OrdMap<TxnId, Waiting>,
    waiting_bytes: usize,
    /// When each transaction that is in one stream and not in another was last forwarded.
    forwarded: OrdMap<Name, RetryState>,
    again: Again,
    /// When streams last exchanged acknowledgements.
    acknowledged_at: Time,
    /// When servers last exchanged sums.
    compared_at: Time,
    /// Messages to this server itself.
    local: VecDeque<Msg>,
    exchange: Exchange,
    disk: Disk,
    /// The fences of scans.
    fences: OrdSet<Key>,
}

/// The settings that concern a server's state.
fn settings(node: NodeId, cluster: &Cluster, config: &Config) -> Settings {
    let Config { outcomes, compared_entries, mutations, .. } = *config;
    let first = cluster.servers().map(|server| server.id).min();
    let loses_writes = mutations.loses_writes() && first == Some(node);
    Settings { outcomes, compared_entries, mutations, loses_writes }
}

impl Machine<Deterministic> for Server {
    fn new(setup: Setup<Deterministic>, recovered: Vec<Record>, cx: &mut Cx<'_>) -> Self {
        let Setup { node, cluster, config, engine, workers, is_replacement: _ } = setup;
        let store = Store::new(engine);
        let (images, mut logs, pace) = read(node, recovered);
        // The data contains the number of its checkpoint.
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
            streams: OrdMap::new(),
            waiting: OrdMap::new(),
            waiting_bytes: 0,
            forwarded: OrdMap::new(),
            again: Again::new(cx.now()),
            acknowledged_at: cx.now(),
            compared_at: cx.now(),
            local: VecDeque::new(),
            exchange,
            disk: Disk::new(pace),
            fences: fences(&cluster),
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
            // Transactions that were due when the checkpoint was made.
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
            | Input::Resolve { .. } => unreachable!("clients talk to gateways, not to servers"),
        }
        self.settle(cx);
    }

    fn flush(&mut self, cx: &mut Cx<'_>) {
        self.flush_streams(cx);
        if self.placement.orderer().is_some() {
            // What an orderer on this server has just ordered goes into the server's other streams.
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
        let partition = order.partition();
        let Some(held) = self.streams.get(&partition) else {
            // Every server has every log.
            let mut placed = self.placement.partitions();
            let why = match placed.find(|(known, _)| *known == partition) {
                Some((_, log)) => {
                    format!("{partition} has no log of its own; give the order for {log}")
                }
                None => format!("there is no {partition}"),
            };
            return Some(Refusal::Invalid(why));
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

    fn names(&self, ask: &Ask) -> Option<Listing> {
        let Unit::Share(share) = ask.unit else { return None };
        if share != self.placement.share() || self.exchange.has_gaps() {
            return None;
        }
        if let Some(after) = ask.changes_after {
            let later = self.state.collectables(&self.placement).into_iter().map(|(_, at)| at);
            let closed = Timestamp(later.min().unwrap_or_default().0.saturating_sub(1));
            let partitions = self.placement.partitions().map(|(partition, _)| partition);
            let basis = Basis::Complete;
            return Some(Listing::of_changes(&self.store, partitions, (ask, after), closed, basis));
        }
        // The read left marks on all fences when it ran. If it ran here, everything that goes
        // before it has run here as well, or at least waits here.
        let mut here = self.fences.iter().filter(|fence| self.placement.holds(fence));
        let mark = |fence: &Key| {
            self.store.read(self.placement.partition_of(fence), fence).version.timestamp
        };
        if ask.at > Timestamp::ZERO && !here.any(|fence| mark(fence) >= ask.at) {
            return None;
        }
        let partitions = self.placement.partitions().map(|(partition, _)| partition);
        let pending = self.state.merge.writes().chain(self.state.shares.writes());
        let pending = pending.filter(|key| ask.range.contains(key) && self.placement.holds(key));
        let basis = Basis::Complete;
        let mut listing = Listing::of(&self.store, partitions, pending.cloned(), ask, basis);
        hide(&mut listing, &self.fences);
        Some(listing)
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
                // Servers drop older versions and deletions at their checkpoints, independently of
                // each other.
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
        // One digest of everything, under the name of the first stream.
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
    /// No component can have more transactions than this (S1). Consider the transactions of a
    /// component that entered a stream before all others: none of them had run when the last of
    /// them entered, and its sequencer knew all of them.
    fn component_max(&self) -> usize {
        match self.config.ordering {
            Ordering::Global | Ordering::Ordered(_) => 1,
            Ordering::Regional => self.config.waiting_max * self.streams.len(),
        }
    }

    fn send(&mut self, to: NodeId, msg: Msg, cx: &mut Cx<'_>) {
        if to == self.node {
            self.local.push_back(msg);
        } else {
            cx.send(to, msg);
        }
    }

    /// Processes everything that one input caused inside this server.
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
            Msg::StatePiece { number, chunk, next, start } => {
                self.on_state_piece(from, (number, start, next), chunk, cx);
            }
            Msg::Digests { digests } => self.state.checks.hear(from, digests),
            Msg::Answer { .. } | Msg::TooOld { .. } | Msg::Found { .. } => {
                unreachable!("{} answers a gateway", msg.kind())
            }
        }
    }

    /// An operator's order.
    fn on_admin(&mut self, admin: Admin, cx: &mut Cx<'_>) {
        match admin {
            Admin::TransferLeader { partition, to } => {
                self.with(partition, cx, |held, io| held.replica.transfer(to, io));
            }
            Admin::ChangeMembers { partition, voters, learners: _ } => {
                // Every server merges every stream, so all servers that do not vote are learners.
                let learners = self.others(&voters);
                let mut is_refused = false;
                self.with(partition, cx, |held, io| {
                    let is_leader = held.replica.is_leader();
                    let accepted = held.replica.change_members(voters, learners, io);
                    // A server that does not lead does not judge.
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
