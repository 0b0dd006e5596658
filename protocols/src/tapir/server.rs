//! One server node: its replicas of many partitions, the transactions that it took over from
//! gateways that are gone, one store, one stream of durable records.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use orthodrome_core::Wire as _;
use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{NodeId, PartitionId, Ticket, TxnId};
use orthodrome_core::machine::{Admin, Claim, Cx, Input, Leak, Machine, Refusal, Setup};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::scan::{Ask, Listing, Unit};
use orthodrome_core::store::Store;
use orthodrome_core::time::Time;
use orthodrome_core::txn::{AbortReason, Key, Outcome, VALUE_BYTES_MAX};

use super::coordinator::{Drive, Out, Progress};
use super::message::{Answer, Ballot, Change, Image, Msg, Part, Record};
use super::replica::{Replica, Status};
use super::state::State;
use super::{Config, Note, Tapir, Timer};
use crate::checkpoint::CheckpointPace;
use crate::ir::View;
use crate::sizes::READ_BYTES_MAX;

/// The server side of TAPIR: every role that one node plays.
#[derive(Debug)]
pub struct Server {
    node: NodeId,
    cluster: Arc<Cluster>,
    config: Arc<Config>,
    replicas: OrdMap<PartitionId, Replica>,
    /// Transactions that this node took over, and when each must be checked again.
    drives: OrdMap<TxnId, (Drive, Time)>,
    store: Store,
    local: VecDeque<Msg>,
    pending_writes: PendingWrites,
    checkpoint: Option<Ticket>,
    /// Partitions whose copied data is in the checkpoint that is being written.
    copied: Vec<PartitionId>,
}

/// Pending writes, and the messages that must not be sent before they are durable.
#[derive(Debug, Default)]
struct PendingWrites {
    last: Option<Ticket>,
    held: VecDeque<(Ticket, NodeId, Msg)>,
    /// When the next checkpoint is due.
    pace: CheckpointPace,
}

/// The context of one replica's handlers.
pub(super) struct World<'a, 'b> {
    pub node: NodeId,
    pub config: &'a Config,
    pub store: &'a mut Store,
    local: &'a mut VecDeque<Msg>,
    pending_writes: &'a mut PendingWrites,
    pub cx: &'a mut Cx<'b, Tapir>,
}

impl World<'_, '_> {
    /// Sends a message at once. A message to this node itself is delivered before the step ends.
    pub(super) fn send(&mut self, to: NodeId, msg: Msg) {
        if to == self.node {
            self.local.push_back(msg);
        } else {
            self.cx.send(to, msg);
        }
    }

    /// True if the values of these keys exceed the size of one answer.
    pub(super) fn is_too_much(&self, partition: PartitionId, keys: &[Key]) -> bool {
        let mut bytes = 0;
        // For a few keys the answer follows without reading.
        keys.len() > READ_BYTES_MAX / VALUE_BYTES_MAX
            && keys.iter().any(|key| {
                bytes += key.size() + self.store.read(partition, key).size();
                bytes > READ_BYTES_MAX
            })
    }

    /// Sends a message once everything written so far is durable (R4).
    pub(super) fn reply(&mut self, to: NodeId, msg: Msg) {
        match self.pending_writes.last {
            Some(ticket) if !self.config.mutations.votes_before_fsync() => {
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

impl Machine<Tapir> for Server {
    fn new(setup: Setup<Tapir>, recovered: Vec<Record>, cx: &mut Cx<'_, Tapir>) -> Self {
        let Setup { node, cluster, config, engine, workers: _, is_replacement: _ } = setup;
        let mut store = Store::new(engine);
        let mut states: OrdMap<PartitionId, State> = OrdMap::new();
        let mut gathered: OrdMap<PartitionId, (View, Vec<Image>)> = OrdMap::new();
        let mut pace = CheckpointPace::default();
        for record in recovered {
            pace.recovered(record.size(), matches!(record, Record::State(..)));
            match record {
                Record::State(partition, state) => match states.get_mut(&partition) {
                    Some(known) => known.join(*state),
                    None => drop(states.insert(partition, *state)),
                },
                Record::Change(partition, change) => {
                    let Some(change) = whole(partition, change, &mut gathered) else { continue };
                    states.entry(partition).or_default().apply(partition, &change, &mut store);
                }
            }
        }
        let mut server = Self {
            node,
            config,
            replicas: OrdMap::new(),
            drives: OrdMap::new(),
            store,
            local: VecDeque::new(),
            pending_writes: PendingWrites { pace, ..PendingWrites::default() },
            checkpoint: None,
            copied: Vec::new(),
            cluster: cluster.clone(),
        };
        for placed in cluster.partitions().filter(|p| p.replicas.contains(&node)) {
            let state = states.remove(&placed.id).unwrap_or_default();
            let members = placed.replicas.clone();
            let Self { node, config, store, local, pending_writes, .. } = &mut server;
            let mut world = World { node: *node, config, store, local, pending_writes, cx };
            let replica = Replica::new(placed.id, members, state, &mut world);
            server.replicas.insert(placed.id, replica);
        }
        server.settle(cx);
        server
    }

    fn step(&mut self, input: Input<Tapir>, cx: &mut Cx<'_, Tapir>) {
        match input {
            Input::Message { from, msg } => self.on_message(from, msg, cx),
            Input::Timer(timer) => self.on_timer(timer, cx),
            Input::Durable(ticket) => self.on_durable(ticket, cx),
            // The paper knows no members other than those with which a group began, and no lasting
            // leader.
            Input::Admin(Admin::TransferLeader { .. } | Admin::ChangeMembers { .. }) => {
                cx.note(Note::OrderRefused);
            }
            Input::Begin(_) | Input::Read { .. } | Input::Decide { .. } | Input::Resolve { .. } => {
                unreachable!("callers talk to gateways, not to server {}", self.node)
            }
        }
        self.settle(cx);
    }

    fn flush(&mut self, cx: &mut Cx<'_, Tapir>) {
        self.checkpoint_if_due(cx);
    }

    fn names(&self, ask: &Ask) -> Option<Listing> {
        let Unit::Partition(id) = ask.unit else { return None };
        self.replicas.get(&id)?.names(ask, &self.store)
    }

    fn refusal(&self, _order: &Admin) -> Option<Refusal> {
        Some(Refusal::Never(
            "the members of a group of TAPIR are those of the placement for ever, and none of them \
             leads; for a server that lost its data, restore a copy of the data directory that was made \
             after it last ran"
                .into(),
        ))
    }

    fn leaks(&self) -> Vec<Leak> {
        let entries = self.replicas.values().flat_map(|replica| replica.state.entries.values());
        let open = entries.filter(|entry| entry.ended.is_none()).count();
        vec![("transactions that have not ended", open)]
    }

    fn assert_invariants(&self) {
        for replica in self.replicas.values() {
            replica.assert_invariants();
        }
        assert!(self.local.is_empty(), "{} left messages to itself", self.node);
    }
}

impl Server {
    fn with<T>(
        &mut self,
        id: PartitionId,
        cx: &mut Cx<'_, Tapir>,
        act: impl FnOnce(&mut Replica, &mut World<'_, '_>) -> T,
    ) -> Option<T> {
        let Self { node, config, replicas, store, local, pending_writes, .. } = self;
        let mut world = World { node: *node, config, store, local, pending_writes, cx };
        let replica = replicas.get_mut(&id)?;
        Some(act(replica, &mut world))
    }

    fn send(&mut self, out: Out, cx: &mut Cx<'_, Tapir>) {
        for (to, msg) in out {
            if to == self.node {
                self.local.push_back(msg);
            } else {
                cx.send(to, msg);
            }
        }
    }

    fn on_message(&mut self, from: NodeId, msg: Msg, cx: &mut Cx<'_, Tapir>) {
        if let Some(id) = msg.partition() {
            self.with(id, cx, |replica, world| {
                replica.on_message(from, msg, world);
                replica.serve_scans(world);
            });
            return;
        }
        match msg {
            Msg::Confirm { txn, partition, answer } => {
                self.on_answer(from, txn, partition, (answer, None), cx);
            }
            Msg::CoordinatorChangeReply { txn, partition, answer, part } => {
                self.on_answer(from, txn, partition, (answer, part), cx);
            }
            Msg::ReplyInconsistent { txn, partition, absent } => {
                let Some((drive, _)) = self.drives.get_mut(&txn) else { return };
                let progress = drive.on_ack(from, partition, absent);
                self.on_progress(txn, progress, cx);
            }
            // Other replicas will answer.
            Msg::NotNormal { .. } => {}
            Msg::Read { .. }
            | Msg::ReadResult { .. }
            | Msg::ProposeConsensus { .. }
            | Msg::ReplyConsensus { .. }
            | Msg::FinalizeConsensus { .. }
            | Msg::ProposeInconsistent { .. }
            | Msg::FinalizeInconsistent { .. }
            | Msg::CoordinatorChange { .. }
            | Msg::ReadOnly { .. }
            | Msg::ReadOnlyResult { .. }
            | Msg::DoViewChange { .. }
            | Msg::StartView { .. }
            | Msg::Gossip { .. }
            | Msg::FetchState { .. }
            | Msg::StateChunk { .. } => {
                unreachable!("answers to clients do not come to server {}", self.node)
            }
        }
    }

    fn on_timer(&mut self, timer: Timer, cx: &mut Cx<'_, Tapir>) {
        match timer {
            Timer::Sweep(id) => {
                let overdue = self.with(id, cx, |replica, world| {
                    replica.on_sweep_timeout(world);
                    replica.overdue(world)
                });
                for (txn, participants, promised) in overdue.into_iter().flatten() {
                    self.take_over(txn, &participants, promised, cx);
                }
                self.look_after_drives(cx);
            }
            Timer::View(id) => {
                self.with(id, cx, Replica::on_view_timeout);
            }
            Timer::Open(_) | Timer::Drive(_) | Timer::Flush => {
                unreachable!("a client's timer at server {}", self.node)
            }
        }
    }

    fn on_durable(&mut self, ticket: Ticket, cx: &mut Cx<'_, Tapir>) {
        if self.pending_writes.last.is_some_and(|last| last <= ticket) {
            self.pending_writes.last = None;
        }
        while self.pending_writes.held.front().is_some_and(|(held, ..)| *held <= ticket) {
            let Some((_, to, msg)) = self.pending_writes.held.pop_front() else { break };
            self.send(vec![(to, msg)], cx);
        }
        if self.checkpoint.is_some_and(|checkpoint| checkpoint <= ticket) {
            self.checkpoint = None;
            self.store.thaw();
            for id in std::mem::take(&mut self.copied) {
                self.with(id, cx, Replica::on_copied);
            }
        }
    }

    /// §5.2.3: the gateway is gone, or has left the transaction in the record. This node drives it
    /// to its end.
    fn take_over(
        &mut self,
        txn: TxnId,
        participants: &[PartitionId],
        promised: Ballot,
        cx: &mut Cx<'_, Tapir>,
    ) {
        if self.drives.contains_key(&txn) {
            return;
        }
        cx.note(Note::Takeover);
        let parts = participants.iter().map(|&partition| (partition, None));
        let mut drive = Drive::new(&self.cluster, txn, parts);
        let mut out = Out::new();
        if self.config.mutations.takeover_aborts() {
            drive.end(Outcome::Aborted(AbortReason::Recovery), &mut out);
        } else {
            drive.take_over(self.node, promised, &mut out);
        }
        self.drives.insert(txn, (drive, cx.now() + self.config.resend_after));
        self.send(out, cx);
    }

    fn on_answer(
        &mut self,
        from: NodeId,
        txn: TxnId,
        partition: PartitionId,
        answer: (Answer, Option<Part>),
        cx: &mut Cx<'_, Tapir>,
    ) {
        let Some((drive, _)) = self.drives.get_mut(&txn) else { return };
        let mut out = Out::new();
        let progress = drive.on_answer(from, partition, answer, &OrdSet::new(), &mut out);
        self.send(out, cx);
        self.on_progress(txn, progress, cx);
    }

    fn on_progress(&mut self, txn: TxnId, progress: Progress, cx: &mut Cx<'_, Tapir>) {
        match progress {
            Progress::Nothing => {}
            Progress::Decided(outcome) => cx.claim(Claim::Decided { txn, outcome }),
            // Another node drives it. If that one fails too, its next check comes.
            Progress::Preempted | Progress::Later(_) => drop(self.drives.remove(&txn)),
            Progress::Complete => {
                let Some((drive, _)) = self.drives.remove(&txn) else { return };
                self.release(&drive, cx);
            }
            Progress::Forgotten => {
                self.drives.remove(&txn);
                let hosted: Vec<PartitionId> = self.replicas.keys().copied().collect();
                for id in hosted {
                    self.with(id, cx, |replica, world| replica.drop_forgotten(txn, world));
                }
            }
        }
    }

    /// All replicas have executed the decision: if the client knows it, all may forget it.
    fn release(&mut self, drive: &Drive, cx: &mut Cx<'_, Tapir>) {
        let txn = drive.txn;
        let hosted: Vec<PartitionId> = self.replicas.keys().copied().collect();
        let known = hosted.into_iter().find_map(|id| {
            self.with(id, cx, |replica, world| replica.may_forget(txn, world)).flatten()
        });
        let Some(below) = known else { return };
        let mut out = Out::new();
        for &partition in drive.participants() {
            let placed = self.cluster.partition(partition);
            for &to in placed.iter().flat_map(|placed| &placed.replicas) {
                let (txns, acknowledged) = (vec![txn], vec![(txn.client, below)]);
                out.push((to, Msg::FinalizeInconsistent { partition, txns, acknowledged }));
            }
        }
        self.send(out, cx);
    }

    fn look_after_drives(&mut self, cx: &mut Cx<'_, Tapir>) {
        let now = cx.now();
        let due: Vec<TxnId> =
            self.drives.iter().filter(|(_, (_, at))| *at <= now).map(|(txn, _)| *txn).collect();
        for txn in due {
            let Some((drive, at)) = self.drives.get_mut(&txn) else { continue };
            if drive.times >= ATTEMPTS {
                // Too few replicas are alive. Its next check comes.
                self.drives.remove(&txn);
                continue;
            }
            let uncertain: Vec<PartitionId> = drive.uncertain().collect();
            let mut out = Out::new();
            let _ = drive.on_timeout(self.node, &OrdSet::new(), &mut out);
            *at = now + self.config.resend_after * (1 << drive.times.min(3));
            self.send(out, cx);
            for partition in uncertain {
                self.with(partition, cx, Replica::resolve_uncertain);
            }
        }
    }

    /// Processes everything that one input caused inside this node.
    fn settle(&mut self, cx: &mut Cx<'_, Tapir>) {
        while let Some(msg) = self.local.pop_front() {
            self.on_message(self.node, msg, cx);
        }
    }

    /// Makes a checkpoint if enough has been persisted since the last one, or a copy of the data
    /// must become durable.
    fn checkpoint_if_due(&mut self, cx: &mut Cx<'_, Tapir>) {
        let must = self.replicas.values().any(|replica| replica.must_checkpoint);
        let is_due = must || self.pending_writes.pace.is_due(self.config.checkpoint_bytes);
        if !is_due || self.store.is_frozen() {
            return;
        }
        cx.note(Note::Checkpoint);
        let keep_from = cx.clock().now - self.config.version_retention;
        let mut records = Vec::new();
        for (&id, replica) in &self.replicas {
            // Replicas end transactions in any order, and one may have missed a deletion.
            self.store.collect_values_below(id, keep_from);
            let parts = replica.state.clone().divide(self.config.piece_bytes);
            records.extend(parts.into_iter().map(|part| Record::State(id, Box::new(part))));
        }
        self.pending_writes.pace.made(records.iter().map(Record::size).sum());
        let ticket = cx.checkpoint(self.store.freeze(), records);
        self.checkpoint = Some(ticket);
        self.pending_writes.last = Some(ticket);
        self.copied = self.replicas.values().filter(|r| r.must_checkpoint).map(|r| r.id).collect();
    }
}

/// The complete change: the parts of an installation are kept in `gathered` until the last one has
/// arrived. If the last one is missing, a crash came before it was written, and the installation
/// has not happened.
fn whole(
    partition: PartitionId,
    change: Change,
    gathered: &mut OrdMap<PartitionId, (View, Vec<Image>)>,
) -> Option<Change> {
    match change {
        Change::Gather { view, number, image } => {
            let (of, parts) = gathered.entry(partition).or_default();
            if *of != view || number == 0 {
                (*of, *parts) = (view, Vec::new());
            }
            parts.push(*image);
            None
        }
        Change::Install { view, synced, image, is_whole, founders } => {
            let parts = gathered.remove(&partition).filter(|(of, _)| *of == view);
            let parts = parts.into_iter().flat_map(|(_, parts)| parts);
            let image = Box::new(Image::join(parts.chain([*image])));
            Some(Change::Install { view, synced, image, is_whole, founders })
        }
        Change::Cast { .. }
        | Change::Promise { .. }
        | Change::End { .. }
        | Change::Forget(_)
        | Change::Acknowledge(_)
        | Change::Ceiling(_)
        | Change::Enter(_)
        | Change::Whole
        | Change::Born(_) => Some(change),
    }
}

/// How often a node that took over asks before it leaves the transaction to its next turn.
const ATTEMPTS: u32 = 6;

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, replica) in self.replicas.values().enumerate() {
            let separator = if at == 0 { "" } else { " | " };
            let status = match replica.status {
                Status::Normal => "normal",
                Status::Changing { .. } => "changing",
                Status::Copying { .. } => "copying",
            };
            write!(f, "{separator}{} {status} in {}", replica.id, replica.state.view)?;
            for (txn, entry) in &replica.state.entries {
                match (entry.ended, entry.cast) {
                    (Some(outcome), _) => write!(f, ", {txn} {outcome}")?,
                    (None, Some(cast)) => {
                        let settled = if cast.is_final { " for good" } else { "" };
                        write!(f, ", {txn} {:?}{settled}", cast.vote)?;
                    }
                    (None, None) => write!(f, ", {txn} promised to {}", entry.promised)?,
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
    use orthodrome_core::host::Host;
    use orthodrome_core::id::ClientId;
    use orthodrome_core::machine::{Effect, Protocol as _};
    use orthodrome_core::rng::Rng;
    use orthodrome_core::store::MemoryEngine;
    use orthodrome_core::time::{Clock, Duration, Timestamp};
    use orthodrome_core::topology::Topology;
    use orthodrome_core::workers::Alone;

    use super::super::state::Entry;
    use super::*;

    const P: PartitionId = PartitionId(0);

    /// Runs a replica with a record of 80 kB, whose offers are lost unless `is_acknowledged`. Returns
    /// the offers to each view's leader: how many bytes each one had.
    fn offers(is_acknowledged: bool) -> OrdMap<View, Vec<usize>> {
        let map = Topology::uniform(3, Duration::from_millis(1), Duration::from_millis(10));
        let cluster = Arc::new(Cluster::spread(map, 1, 1, 1, 3).unwrap());
        let replicas = cluster.partition(P).unwrap().replicas.clone();
        let (node, config) = (replicas[0], Arc::new(Tapir::configure(&cluster, "tapir")));
        let mut state = State { view: View(1), normal_view: View(1), ..State::default() };
        state.is_whole = true;
        for counter in 0..40 {
            let writes = [(Key::from("a"), Some(vec![b'x'; 2_000].into()))].into();
            let part = Some(Part { reads: vec![], writes });
            let (txn, participants) = (TxnId::new(ClientId(counter), 1), vec![P]);
            state.entries.insert(txn, Entry { part, participants, ..Entry::default() });
        }
        let (engine, workers) = (Box::new(MemoryEngine::default()), Arc::new(Alone));
        let setup = Setup { node, cluster, config, engine, workers, is_replacement: false };
        let clock = Clock { now: Timestamp(1_000_000_000), error: Duration::ZERO };
        let recovered = vec![Record::State(P, Box::new(state))];
        let rng = Rng::stream(1, "test", 1);
        let mut host: Host<Tapir, Server> = Host::start(setup, recovered, rng, Time::ZERO, clock);
        let mut offers: OrdMap<View, Vec<usize>> = OrdMap::new();
        for tick in 0..400_u64 {
            let now = Time(tick * 50_000_000);
            host.fire(now, clock);
            let view = host.machine().replicas[&P].state.view;
            if tick % 20 == 0 {
                for &from in &replicas[1..] {
                    let msg = Msg::Gossip { partition: P, view, is_normal: false };
                    host.step(now, clock, Input::Message { from, msg });
                }
            }
            loop {
                let mut inputs = Vec::new();
                for effect in host.drain() {
                    match effect {
                        Effect::Persist { ticket, .. } | Effect::Checkpoint { ticket, .. } => {
                            inputs.push(Input::Durable(ticket));
                        }
                        Effect::Send { to, msg } => {
                            let bytes = msg.size();
                            let Msg::DoViewChange { partition, view, offer: Some(_), portion } =
                                msg
                            else {
                                continue;
                            };
                            offers.entry(view).or_default().push(bytes);
                            if is_acknowledged && portion.of > 1 {
                                let offer = None;
                                let msg = Msg::DoViewChange { partition, view, offer, portion };
                                inputs.push(Input::Message { from: to, msg });
                            }
                        }
                        Effect::Reads { .. }
                        | Effect::Finish { .. }
                        | Effect::Note(_)
                        | Effect::Claim(_) => {}
                    }
                }
                if inputs.is_empty() {
                    break;
                }
                for input in inputs {
                    host.step(now, clock, input);
                }
            }
        }
        offers
    }

    /// A view change needs the records of all replicas that are left, and each was sent once, as one
    /// message of a hundred packets. On a link that loses packets, one of them hardly ever arrived.
    #[test]
    fn an_offer_that_is_lost_is_sent_again_in_small_parts() {
        let most = offers(false).into_values().max_by_key(Vec::len).unwrap_or_default();
        assert!(most.len() > 100, "{most:?}");
        assert!(most[0] > 80_000 && most[1..].iter().all(|bytes| *bytes < 3_000), "{most:?}");
    }

    #[test]
    fn parts_that_were_acknowledged_are_not_sent_again() {
        let offers = offers(true);
        assert!(!offers.is_empty());
        for (view, sent) in offers {
            let (parts, wholes): (Vec<usize>, Vec<usize>) =
                sent.iter().partition(|bytes| **bytes < 3_000);
            assert!((40..=50).contains(&parts.len()), "{view}: {sent:?}");
            assert!(wholes.len() <= 2, "{view}: {sent:?}");
        }
    }
}
