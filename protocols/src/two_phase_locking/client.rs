//! The client side: runs transactions for the callers of one gateway.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{ClientId, NodeId, PartitionId, TxnId};
use orthodrome_core::machine::{Cx, Input, Leak, Machine, Setup, UNKNOWABLE};
use orthodrome_core::session::is_below;
use orthodrome_core::time::{Time, Timestamp};
use orthodrome_core::txn::{
    AbortReason, Decision, Key, Kind, Outcome, Priority, Read, Reads, Txn, Writes,
};

use super::leader::Context;
use super::locks::{Preemption, Rank};
use super::message::{Msg, Record};
use super::{Config, Locking, Note, Timer};
use crate::gateway::{Participant, Snapshot, Snapshots, coordinator_of, split};
use crate::routes::Routes;
use crate::waiting::RetryState;

/// Ages remembered by one gateway, at most; beyond, those of the oldest clients are forgotten.
const AGES_MAX: usize = 100_000;

/// The client side of two-phase locking.
#[derive(Debug)]
pub struct Client {
    cluster: Arc<Cluster>,
    config: Arc<Config>,
    routes: Routes,
    open: BTreeMap<TxnId, Open>,
    /// When the first attempts of transactions began that have not committed yet (T5).
    ages: BTreeMap<(ClientId, u64), Timestamp>,
    beats: bool,
}

/// A transaction under way.
#[derive(Debug)]
struct Open {
    txn: Txn,
    rank: Rank,
    /// What it touches where, in all rounds so far.
    participants: BTreeMap<PartitionId, Participant>,
    coordinator: PartitionId,
    /// What it read, in all rounds so far.
    reads: Reads,
    /// Counts its rounds of locks, from 1.
    round: u32,
    /// What its caller asked for in this round.
    asked_for: Vec<Key>,
    /// Participants that have not answered this round, with what it asks of them.
    silent: BTreeMap<PartitionId, Participant>,
    /// Participants that said that it waits for a lock there.
    waiting: BTreeSet<PartitionId>,
    phase: Phase,
    begun: Time,
    /// When the unanswered requests were last sent.
    asked: RetryState,
    /// The caller lost track of it: what it knows of its reads are versions at most.
    is_resolved: bool,
}

#[derive(Debug)]
enum Phase {
    /// Waiting for locks and reads.
    Locking,
    /// The caller thinks.
    Deciding,
    /// The caller of a general transaction has decided; what it writes is being locked.
    LockingWrites(Writes),
    /// The coordinator was asked to commit.
    Committing(Writes),
    /// The caller lost track, and had not decided.
    Resolving,
    /// A read-only transaction.
    Snapshotting(Snapshots),
}

impl Machine<Locking> for Client {
    fn new(setup: Setup<Locking>, _recovered: Vec<Record>, _cx: &mut Cx<'_, Locking>) -> Self {
        // A gateway keeps nothing: a caller whose gateway died resolves through another.
        Self {
            routes: Routes::new(setup.cluster.clone()),
            cluster: setup.cluster,
            config: setup.config,
            open: BTreeMap::new(),
            ages: BTreeMap::new(),
            beats: false,
        }
    }

    fn step(&mut self, input: Input<Locking>, cx: &mut Cx<'_, Locking>) {
        match input {
            Input::Begin(txn) => self.on_begin(txn, cx),
            Input::Read { txn, keys } => self.on_read(txn, keys, cx),
            Input::Decide { txn, decision } => self.on_decide(txn, decision, cx),
            Input::Resolve { txn, reads, decision } => {
                self.on_resolve_request(txn, reads, decision, cx);
            }
            Input::Message { from, msg } => self.on_message(from, msg, cx),
            Input::Timer(Timer::Resend(txn)) => self.on_resend_timeout(txn, cx),
            Input::Timer(Timer::Heartbeat) => self.on_heartbeat_timeout(cx),
            Input::Timer(Timer::Replication(..) | Timer::Sweep(_) | Timer::CommitWait(_))
            | Input::Durable(_)
            | Input::Admin(_) => unreachable!("a server's input at a client"),
        }
    }

    fn flush(&mut self, _cx: &mut Cx<'_, Locking>) {}

    fn assert_invariants(&self) {
        for (id, open) in &self.open {
            assert!(
                open.silent.keys().all(|partition| open.participants.contains_key(partition)),
                "{id} waits for a partition that takes no part"
            );
        }
    }

    fn leaks(&self) -> Vec<Leak> {
        vec![("open transactions", self.open.len())]
    }
}

impl Client {
    fn open(&mut self, txn: Txn, cx: &mut Context<'_>) -> Open {
        let participants = split(&self.cluster, &txn.reads, &txn.writes);
        // Where a general transaction will take part is not known, and another gateway that is asked
        // what became of it may never learn: its coordinator follows from its name alone.
        let near: Vec<PartitionId> = match txn.kind {
            Kind::General => Vec::new(),
            Kind::Interactive | Kind::Procedure(_) | Kind::ReadOnly | Kind::StaleReadOnly => {
                participants.keys().copied().collect()
            }
        };
        let coordinator = coordinator_of(&self.cluster, txn.id, txn.home, near.into_iter());
        Open {
            rank: Rank { priority: txn.priority, age: self.age(&txn, cx) },
            silent: participants.clone(),
            waiting: BTreeSet::new(),
            participants,
            coordinator,
            reads: Reads::new(),
            round: 1,
            asked_for: txn.reads.clone(),
            phase: Phase::Locking,
            begun: cx.now(),
            asked: RetryState::new(cx.now()),
            is_resolved: false,
            txn,
        }
    }

    /// T5: a transaction is as old as its first attempt.
    fn age(&mut self, txn: &Txn, cx: &mut Context<'_>) -> Timestamp {
        let TxnId { client, counter, .. } = txn.id;
        // What the client will not ask about again needs no age any more.
        let over = (client, 0)..(client, txn.acknowledged_below.min(counter));
        let over: Vec<_> = self.ages.range(over).map(|(name, _)| *name).collect();
        for name in over {
            self.ages.remove(&name);
        }
        if self.ages.len() >= AGES_MAX {
            self.ages.pop_first();
        }
        *self.ages.entry((client, counter)).or_insert(cx.clock().now)
    }

    /// Starts a transaction: one message to each participant leader.
    fn on_begin(&mut self, txn: Txn, cx: &mut Context<'_>) {
        let id = txn.id;
        if self.open.contains_key(&id) {
            // Begun here already: its answers will come.
            return;
        }
        let mut open = self.open(txn, cx);
        if open.txn.is_read_only() {
            open.phase = Phase::Snapshotting(Snapshots::default());
        }
        let has_nobody_to_ask = open.silent.is_empty();
        self.open.insert(id, open);
        self.ask(id, cx);
        if !std::mem::replace(&mut self.beats, true) {
            cx.set_timer(Timer::Heartbeat, cx.now() + self.config.timeouts.heartbeat_interval);
        }
        if has_nobody_to_ask {
            self.on_all_answered(id, cx);
        }
    }

    /// Sends what a new phase or round asks for.
    fn ask(&mut self, id: TxnId, cx: &mut Context<'_>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        open.asked = RetryState::new(cx.now());
        self.send_outstanding(id, cx);
        cx.set_timer(Timer::Resend(id), cx.now() + self.config.timeouts.resend_after);
    }

    /// Sends whatever has not been answered yet.
    fn send_outstanding(&mut self, id: TxnId, cx: &mut Context<'_>) {
        let Some(open) = self.open.get(&id) else { return };
        match &open.phase {
            Phase::Locking | Phase::LockingWrites(_) => {
                for partition in open.silent.keys() {
                    self.send_lock(open, *partition, cx);
                }
            }
            Phase::Deciding => {}
            Phase::Committing(_) | Phase::Resolving => self.send_end(open, cx),
            Phase::Snapshotting(snapshots) => {
                for &partition in open.silent.keys() {
                    self.send_read_only(open, snapshots, partition, cx);
                }
            }
        }
    }

    fn send_read_only(
        &self,
        open: &Open,
        snapshots: &Snapshots,
        partition: PartitionId,
        cx: &mut Context<'_>,
    ) {
        let Some(participant) = open.silent.get(&partition) else { return };
        let (keys, at_least) = (participant.reads.clone(), snapshots.at_least);
        let read = Msg::ReadOnly { txn: open.txn.id, partition, keys, at_least };
        cx.send(self.routes.leader(partition), read);
    }

    fn send_lock(&self, open: &Open, partition: PartitionId, cx: &mut Context<'_>) {
        let Some(participant) = open.silent.get(&partition).cloned() else { return };
        let (txn, round, rank) = (open.txn.id, open.round, open.rank);
        cx.send(self.routes.leader(partition), Msg::Lock { txn, round, rank, participant });
    }

    /// Asks the coordinator to commit, or what became of the transaction.
    fn send_end(&self, open: &Open, cx: &mut Context<'_>) {
        let (txn, coordinator) = (open.txn.id, open.coordinator);
        let msg = match &open.phase {
            Phase::Committing(writes) => {
                let versions = open.reads.iter().map(|(key, read)| (key.clone(), read.version));
                Msg::Commit {
                    txn,
                    coordinator,
                    participants: self.committing(open, writes).collect(),
                    versions: versions.collect(),
                    writes: writes.clone(),
                    acknowledged_below: open.txn.acknowledged_below,
                }
            }
            Phase::Resolving => {
                let participants = open.participants.keys().copied().collect();
                Msg::Resolve { txn, coordinator, participants }
            }
            Phase::Locking | Phase::Deciding | Phase::LockingWrites(_) | Phase::Snapshotting(_) => {
                return;
            }
        };
        cx.send(self.routes.leader(coordinator), msg);
    }

    /// The partitions that something was read from or is written to. Others only hold locks for
    /// writes that the caller did not make.
    fn committing<'a>(
        &'a self,
        open: &'a Open,
        writes: &'a Writes,
    ) -> impl Iterator<Item = PartitionId> + 'a {
        let takes_part = |participant: &&Participant| {
            !participant.reads.is_empty()
                || participant.writes.iter().any(|key| writes.contains_key(key))
        };
        open.participants.values().filter(takes_part).map(|participant| participant.partition)
    }

    /// Frees the locks at these partitions, as far as the message gets through; else they find out
    /// when no heartbeat comes.
    fn release(
        &self,
        txn: TxnId,
        partitions: impl IntoIterator<Item = PartitionId>,
        cx: &mut Context<'_>,
    ) {
        for partition in partitions {
            cx.send(self.routes.leader(partition), Msg::Release { txn, partition });
        }
    }

    fn on_message(&mut self, from: NodeId, msg: Msg, cx: &mut Context<'_>) {
        if let Some(led) = msg.led_by_sender() {
            self.routes.learn(led, from, cx.now());
        }
        match msg {
            Msg::Locked { txn, round, partition, reads } => {
                self.on_locked((txn, round), partition, reads, cx);
            }
            Msg::Waiting { txn, partition } => self.on_waiting(txn, partition, cx),
            Msg::Wounded { txn, partition, reason } => {
                self.on_wounded(txn, partition, reason, cx);
            }
            Msg::Decided { txn, outcome } => {
                if let Some(open) = self.open.get(&txn) {
                    self.routes.learn(open.coordinator, from, cx.now());
                    let is_forgotten = outcome == Outcome::Unknown;
                    let path = if is_forgotten { UNKNOWABLE } else { "locking" };
                    self.finish(txn, outcome, path, cx);
                }
            }
            Msg::ReadOnlyResult { txn, is_too_much: true, .. } => self.on_too_much(txn, cx),
            Msg::ReadOnlyResult { txn, partition, snapshot, is_too_much: false } => {
                self.on_read_only_result(txn, partition, snapshot, cx);
            }
            Msg::Members { partition, since, voters } => {
                self.routes.learn_voters(partition, since, &voters);
            }
            Msg::NotLeader { partition, leader, txn } => {
                self.on_not_leader(from, partition, leader, txn, cx);
            }
            Msg::Lock { .. }
            | Msg::KeepAlive { .. }
            | Msg::Release { .. }
            | Msg::Commit { .. }
            | Msg::Prepare { .. }
            | Msg::Vote { .. }
            | Msg::Decision { .. }
            | Msg::DecisionAck { .. }
            | Msg::QueryDecision { .. }
            | Msg::Resolve { .. }
            | Msg::ReadOnly { .. }
            | Msg::Replication { .. } => unreachable!("a server's message at a client"),
        }
    }

    /// One participant holds every lock.
    fn on_locked(
        &mut self,
        (txn, round): (TxnId, u32),
        partition: PartitionId,
        reads: Vec<(Key, Read)>,
        cx: &mut Context<'_>,
    ) {
        let Some(open) = self.open.get_mut(&txn) else {
            // It has ended here meanwhile, by a wound elsewhere.
            self.release(txn, [partition], cx);
            return;
        };
        if is_below(&open.txn.floors, reads.iter().map(|(key, read)| (key, read))) {
            // From a leader that was deposed (R11).
            cx.note(Note::BehindClient);
            return;
        }
        if !open.is_locking() || open.round != round || open.silent.remove(&partition).is_none() {
            // A repetition: the caller may have computed from the first answer.
            return;
        }
        open.waiting.remove(&partition);
        open.reads.extend(reads);
        if open.silent.is_empty() {
            self.on_all_answered(txn, cx);
        }
    }

    /// It waits for a lock at one participant. With preempt-on-wait the others must know, if it
    /// could be preempted for it.
    fn on_waiting(&mut self, txn: TxnId, partition: PartitionId, cx: &mut Context<'_>) {
        let Some(open) = self.open.get_mut(&txn) else { return };
        if !open.silent.contains_key(&partition) || !open.waiting.insert(partition) {
            return;
        }
        if self.config.preemption != Preemption::OnWait || open.rank.priority != Priority::LOW {
            return;
        }
        for &other in open.participants.keys().filter(|&&other| other != partition) {
            let (txns, waiting) = (vec![txn], vec![txn]);
            let beat = Msg::KeepAlive { partition: other, txns, waiting };
            cx.send(self.routes.leader(other), beat);
        }
    }

    /// Its locks at one participant are lost. Unless the coordinator was asked to commit it, nobody
    /// can commit it any more, so it has aborted.
    fn on_wounded(
        &mut self,
        txn: TxnId,
        partition: PartitionId,
        reason: AbortReason,
        cx: &mut Context<'_>,
    ) {
        let Some(open) = self.open.get(&txn) else { return };
        match open.phase {
            Phase::Locking | Phase::Deciding | Phase::LockingWrites(_) => {
                let others = open.participants.keys().copied();
                self.release(txn, others.filter(|&other| other != partition), cx);
                self.finish(txn, Outcome::Aborted(reason), "locking", cx);
            }
            Phase::Committing(_) | Phase::Resolving | Phase::Snapshotting(_) => {}
        }
    }

    /// The read round is complete: ask the caller, or compute in its stead.
    fn on_all_answered(&mut self, id: TxnId, cx: &mut Context<'_>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        match (&mut open.phase, &open.txn.kind) {
            (Phase::Snapshotting(_), _) => self.on_snapshot_complete(id, cx),
            (Phase::LockingWrites(writes), _) => {
                let writes = std::mem::take(writes);
                self.commit(id, writes, cx);
            }
            (_, Kind::General) => {
                let told = |key: Key| Some((key.clone(), open.reads.get(&key)?.clone()));
                let round = std::mem::take(&mut open.asked_for).into_iter().filter_map(told);
                cx.reads(id, round.collect());
                open.phase = Phase::Deciding;
                cx.cancel_timer(Timer::Resend(id));
            }
            (_, Kind::Interactive) => {
                cx.reads(id, open.reads.clone());
                open.phase = Phase::Deciding;
                cx.cancel_timer(Timer::Resend(id));
            }
            (_, Kind::Procedure(ops)) => match Txn::execute(ops, &open.reads) {
                Ok(writes) => self.commit(id, writes, cx),
                Err(reason) => self.give_up(id, reason, cx),
            },
            (_, Kind::ReadOnly | Kind::StaleReadOnly) => {
                unreachable!("a read-only transaction takes its own path")
            }
        }
    }

    /// The caller of a general transaction wants to know more. What it has read already stays as it
    /// was, under its locks.
    fn on_read(&mut self, id: TxnId, keys: Vec<Key>, cx: &mut Context<'_>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        if !matches!((&open.phase, &open.txn.kind), (Phase::Deciding, Kind::General)) {
            return;
        }
        let unread = keys.iter().filter(|key| !open.reads.contains_key(*key));
        let wanted = split(&self.cluster, unread, []);
        open.asked_for = keys;
        open.phase = Phase::Locking;
        self.next_round(id, wanted, cx);
    }

    /// Locks more for a general transaction.
    fn next_round(
        &mut self,
        id: TxnId,
        wanted: BTreeMap<PartitionId, Participant>,
        cx: &mut Context<'_>,
    ) {
        let Some(open) = self.open.get_mut(&id) else { return };
        if wanted.is_empty() {
            self.on_all_answered(id, cx);
            return;
        }
        for (&at, more) in &wanted {
            let all = open.participants.entry(at).or_insert_with(|| Participant::bare(at));
            all.reads.extend(more.reads.iter().cloned());
            all.writes.extend(more.writes.iter().cloned());
        }
        open.silent = wanted;
        open.round += 1;
        self.ask(id, cx);
    }

    /// The caller of an interactive or general transaction has decided. What a general one writes is
    /// locked before anybody is asked to prepare, so that here too a prepared transaction waits for
    /// nobody.
    fn on_decide(&mut self, id: TxnId, decision: Decision, cx: &mut Context<'_>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        match (&open.phase, decision) {
            (Phase::Deciding, Decision::Commit(writes))
                if matches!(open.txn.kind, Kind::General) =>
            {
                let wanted = split(&self.cluster, [], writes.keys());
                open.phase = Phase::LockingWrites(writes);
                self.next_round(id, wanted, cx);
            }
            (Phase::Deciding, Decision::Commit(writes)) if open.txn.declares(&writes) => {
                self.commit(id, writes, cx);
            }
            (Phase::Deciding, _) | (Phase::Locking, Decision::Abort) => {
                self.give_up(id, AbortReason::Client, cx);
            }
            (
                Phase::Locking
                | Phase::LockingWrites(_)
                | Phase::Committing(_)
                | Phase::Resolving
                | Phase::Snapshotting(_),
                _,
            ) => {}
        }
    }

    /// The transaction ends before anybody was asked to commit it, so nobody can.
    fn give_up(&mut self, id: TxnId, reason: AbortReason, cx: &mut Context<'_>) {
        let Some(open) = self.open.get(&id) else { return };
        self.release(id, open.participants.keys().copied(), cx);
        self.finish(id, Outcome::Aborted(reason), "locking", cx);
    }

    /// Asks the coordinator to commit.
    fn commit(&mut self, id: TxnId, writes: Writes, cx: &mut Context<'_>) {
        let Some(open) = self.open.get(&id) else { return };
        let committing: BTreeSet<PartitionId> = self.committing(open, &writes).collect();
        let unused = open.participants.keys().filter(|partition| !committing.contains(partition));
        self.release(id, unused.copied(), cx);
        if committing.is_empty() {
            self.finish(id, Outcome::Committed(cx.clock().now), "empty", cx);
            return;
        }
        let Some(open) = self.open.get_mut(&id) else { return };
        open.phase = Phase::Committing(writes);
        self.ask(id, cx);
    }

    /// A caller lost track of a transaction that it began here or elsewhere.
    fn on_resolve_request(
        &mut self,
        txn: Txn,
        reads: Reads,
        decision: Option<Decision>,
        cx: &mut Context<'_>,
    ) {
        let id = txn.id;
        if txn.is_read_only() {
            // It changes nothing, so it can simply be read again.
            self.open.remove(&id);
            self.on_begin(txn, cx);
            return;
        }
        let mut open = self.open(txn, cx);
        let is_general = matches!(open.txn.kind, Kind::General);
        if is_general {
            let written = decision.iter().flat_map(|decision| match decision {
                Decision::Commit(writes) => writes.keys().collect(),
                Decision::Abort => Vec::new(),
            });
            open.participants = split(&self.cluster, reads.keys(), written);
        } else if open.participants.is_empty() {
            cx.finish(id, Outcome::Committed(cx.clock().now), "empty");
            return;
        }
        open.is_resolved = true;
        open.silent.clear();
        open.phase = Phase::Resolving;
        let has_reads = open.txn.reads.iter().all(|key| reads.contains_key(key));
        open.reads = reads;
        let is_declared = |writes: &Writes| is_general || open.txn.declares(writes);
        let is_fit = |writes: &Writes| has_reads && is_declared(writes);
        let decision = decision.filter(|decision| match decision {
            Decision::Commit(writes) => is_fit(writes),
            Decision::Abort => true,
        });
        self.open.insert(id, open);
        match decision {
            Some(Decision::Commit(writes)) => self.commit(id, writes, cx),
            None => self.ask(id, cx),
            // Its caller never asked anybody to commit it.
            Some(Decision::Abort) => self.give_up(id, AbortReason::Client, cx),
        }
    }

    /// A part of what a read-only transaction reads is more than one answer may tell.
    fn on_too_much(&mut self, id: TxnId, cx: &mut Context<'_>) {
        if let Some(open) = self.open.get(&id)
            && matches!(open.phase, Phase::Snapshotting(_))
        {
            self.finish(id, Outcome::Aborted(AbortReason::TooLarge), "read-only", cx);
        }
    }

    /// One participant's part of a read-only transaction.
    fn on_read_only_result(
        &mut self,
        id: TxnId,
        partition: PartitionId,
        snapshot: Snapshot,
        cx: &mut Context<'_>,
    ) {
        let Some(open) = self.open.get_mut(&id) else { return };
        let Phase::Snapshotting(snapshots) = &mut open.phase else { return };
        if !snapshots.is_current(&snapshot) || open.silent.remove(&partition).is_none() {
            return;
        }
        snapshots.insert(partition, snapshot);
        if open.silent.is_empty() {
            self.on_snapshot_complete(id, cx);
        }
    }

    /// Every part is here: done, or some are asked again.
    fn on_snapshot_complete(&mut self, id: TxnId, cx: &mut Context<'_>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        let Phase::Snapshotting(snapshots) = &mut open.phase else { return };
        match snapshots.complete(&open.txn) {
            Ok((reads, outcome)) => {
                let path = snapshots.path();
                open.reads = reads;
                self.finish(id, outcome, path, cx);
            }
            Err(short) => {
                cx.note(Note::SecondRound);
                let again = |id: PartitionId| Some((id, open.participants.get(&id)?.clone()));
                open.silent.extend(short.into_iter().filter_map(again));
                self.ask(id, cx);
            }
        }
    }

    /// Tells the caller, and forgets.
    fn finish(&mut self, id: TxnId, outcome: Outcome, path: &'static str, cx: &mut Context<'_>) {
        let Some(open) = self.open.remove(&id) else { return };
        cx.cancel_timer(Timer::Resend(id));
        if let Outcome::Committed(_) = outcome {
            self.ages.remove(&(id.client, id.counter));
            match open.txn.kind {
                Kind::Procedure(_) | Kind::ReadOnly | Kind::StaleReadOnly if !open.is_resolved => {
                    cx.reads(id, open.reads);
                }
                Kind::Interactive
                | Kind::General
                | Kind::Procedure(_)
                | Kind::ReadOnly
                | Kind::StaleReadOnly => {}
            }
        }
        cx.finish(id, outcome, path);
    }

    fn on_not_leader(
        &mut self,
        from: NodeId,
        partition: PartitionId,
        leader: Option<NodeId>,
        txn: Option<TxnId>,
        cx: &mut Context<'_>,
    ) {
        if !self.routes.redirect(partition, from, leader, cx.now()) {
            return;
        }
        let Some(open) = txn.and_then(|txn| self.open.get(&txn)) else { return };
        match &open.phase {
            Phase::Locking | Phase::LockingWrites(_) => self.send_lock(open, partition, cx),
            Phase::Deciding => {}
            Phase::Committing(_) | Phase::Resolving => {
                if open.coordinator == partition {
                    self.send_end(open, cx);
                }
            }
            Phase::Snapshotting(snapshots) => {
                self.send_read_only(open, snapshots, partition, cx);
            }
        }
    }

    /// Nobody answered for a while: ask somebody else, and more patiently each time.
    fn on_resend_timeout(&mut self, id: TxnId, cx: &mut Context<'_>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        cx.note(Note::Resent);
        let asked = open.asked.at;
        open.asked = open.asked.again(cx.now());
        let timeout = open.asked.timeout(self.config.timeouts.resend_after);
        match &open.phase {
            Phase::Locking | Phase::LockingWrites(_) | Phase::Snapshotting(_) => {
                for &partition in open.silent.keys() {
                    self.routes.suspect(partition, asked, cx.now());
                }
            }
            Phase::Committing(_) | Phase::Resolving => {
                self.routes.suspect(open.coordinator, asked, cx.now());
            }
            Phase::Deciding => {}
        }
        self.send_outstanding(id, cx);
        cx.set_timer(Timer::Resend(id), cx.now() + timeout);
    }

    /// Tells each participant whose callers are alive, and which of them wait for a lock elsewhere.
    fn on_heartbeat_timeout(&mut self, cx: &mut Context<'_>) {
        let now = cx.now();
        let interval = self.config.timeouts.heartbeat_interval;
        let mut beats: BTreeMap<PartitionId, (Vec<TxnId>, Vec<TxnId>)> = BTreeMap::new();
        for (&id, open) in &self.open {
            let is_undecided = open.is_locking() || matches!(open.phase, Phase::Deciding);
            if !is_undecided || now.since(open.begun) < interval / 2 {
                continue;
            }
            for &partition in open.participants.keys() {
                let (txns, waiting) = beats.entry(partition).or_default();
                txns.push(id);
                if open.waiting.iter().any(|&at| at != partition) {
                    waiting.push(id);
                }
            }
        }
        for (partition, (txns, waiting)) in beats {
            let beat = Msg::KeepAlive { partition, txns, waiting };
            cx.send(self.routes.leader(partition), beat);
        }
        self.beats = !self.open.is_empty();
        if self.beats {
            cx.set_timer(Timer::Heartbeat, now + interval);
        }
    }
}

impl Open {
    /// It asks for locks.
    fn is_locking(&self) -> bool {
        matches!(self.phase, Phase::Locking | Phase::LockingWrites(_))
    }
}

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.open.is_empty() {
            return f.write_str("idle");
        }
        for (at, (id, open)) in self.open.iter().enumerate() {
            let separator = if at == 0 { "" } else { " | " };
            let phase = match &open.phase {
                Phase::Locking => "locking",
                Phase::Deciding => "deciding",
                Phase::LockingWrites(_) => "locking writes",
                Phase::Committing(_) => "committing",
                Phase::Resolving => "resolving",
                Phase::Snapshotting(_) => "snapshotting",
            };
            write!(f, "{separator}{id} {phase} via {}", open.coordinator)?;
            if !open.silent.is_empty() {
                write!(f, " waits {:?}", open.silent.keys())?;
            }
        }
        Ok(())
    }
}
