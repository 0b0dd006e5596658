//! The client side of two-phase locking: the hooks of [`commit`](crate::commit). It locks in
//! rounds, remembers the ages of transactions, and ends transactions that nobody was asked to
//! commit.

use orthodrome_core::id::{ClientId, NodeId, PartitionId, TxnId};
use orthodrome_core::machine::{Setup, UNKNOWABLE};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::session::is_below;
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::{
    AbortReason, Decision, Key, Kind, Outcome, Priority, Read, Reads, Txn, Writes,
};

use super::leader::Context;
use super::locks::{Preemption, Rank};
use super::message::Msg;
use super::{Config, Locking, Note, Timer};
use crate::commit::{self, Gateway, Phase};
use crate::gateway::{Participant, split};

/// The most ages that one gateway remembers; beyond it, those of the oldest clients are forgotten.
const AGES_MAX: usize = 100_000;

/// The client side of two-phase locking.
pub type Client = commit::Client<Own>;
/// A pending transaction.
type Open = commit::Open<Own>;

/// The state of two-phase locking at a gateway, besides the transactions.
#[derive(Debug, Default)]
pub struct Own {
    /// When the first attempts began of transactions that have not committed yet (T5).
    ages: OrdMap<(ClientId, u64), Timestamp>,
}

/// The state of a pending transaction. Its participants are those of all rounds so far.
#[derive(Debug, Default)]
pub struct More {
    rank: Rank,
    /// Counts its rounds of locks, from 1.
    round: u32,
    /// The keys that its client requested in this round.
    asked_for: Vec<Key>,
    /// The locks that this round requests from each participant.
    wanted: OrdMap<PartitionId, Participant>,
    /// Participants that reported that it waits for a lock there.
    waiting: OrdSet<PartitionId>,
    /// The client of a general transaction has decided, and these writes are being locked.
    writes: Option<Writes>,
}

impl Gateway for Own {
    commit::gateway_items!();

    type Protocol = Locking;
    type More = More;

    fn new(_: &Setup<Locking>) -> Self {
        Self::default()
    }

    fn on_begun(client: &mut Client, open: &mut Open, cx: &mut Context<'_>) {
        open.more = More {
            rank: Rank { priority: open.txn.priority, age: client.own.age(&open.txn, cx) },
            round: 1,
            asked_for: open.txn.reads.clone(),
            wanted: open.participants.clone(),
            ..More::default()
        };
    }

    /// A participant that is only written to must lock, too.
    fn must_answer(_: &Participant) -> bool {
        true
    }

    fn send_prepare(client: &Client, open: &Open, partition: PartitionId, cx: &mut Context<'_>) {
        let Some(participant) = open.more.wanted.get(&partition).cloned() else {
            unreachable!("this round of {} asks nothing of {partition}", open.txn.id);
        };
        let (txn, round, rank) = (open.txn.id, open.more.round, open.more.rank);
        cx.send(client.routes.leader(partition), Msg::Lock { txn, round, rank, participant });
    }

    fn end_message(open: &Open, decision: &Decision) -> Msg {
        let Decision::Commit(writes) = decision else {
            unreachable!("the coordinator of {} is not asked to abort", open.txn.id);
        };
        let versions = open.reads.iter().map(|(key, read)| (key.clone(), read.compared()));
        Msg::Commit {
            txn: open.txn.id,
            coordinator: open.coordinator,
            participants: open.committing(writes).collect(),
            versions: versions.collect(),
            writes: writes.clone(),
            acknowledged_below: open.txn.acknowledged_below,
        }
    }

    /// Every participant holds locks until the client decides.
    fn watchers(open: &Open) -> Vec<PartitionId> {
        open.participants.keys().copied().collect()
    }

    /// It also says which of them wait for a lock elsewhere.
    fn heartbeat_message(client: &Client, partition: PartitionId, txns: Vec<TxnId>) -> Msg {
        let waits_elsewhere =
            |txn: &TxnId| client.at(*txn).more.waiting.iter().any(|&at| at != partition);
        let waiting = txns.iter().copied().filter(waits_elsewhere).collect();
        Msg::KeepAlive { partition, txns, waiting }
    }

    fn on_timer(client: &mut Client, timer: Timer, cx: &mut Context<'_>) {
        match timer {
            Timer::Resend(txn) => client.on_resend_timeout(txn, cx),
            Timer::Heartbeat => client.on_heartbeat_timeout(cx),
            Timer::Replication(..) | Timer::Sweep(_) | Timer::CommitWait(_) => {
                unreachable!("a server's timer at a client")
            }
        }
    }

    /// Values that it has read already do not change, because of its locks.
    fn on_read(client: &mut Client, txn: TxnId, keys: Vec<Key>, cx: &mut Context<'_>) {
        // It was wounded meanwhile: its client will receive the outcome, or already has.
        let Some(open) = client.open.get_mut(&txn) else { return };
        if !matches!((&open.phase, &open.txn.kind), (Phase::Deciding, Kind::General)) {
            return;
        }
        let unread = keys.iter().filter(|key| !open.reads.contains_key(*key));
        let wanted = split(&client.cluster, unread, []);
        open.more.asked_for = keys;
        client.next_round(txn, wanted, cx);
    }

    /// The values requested in this round.
    fn told(open: &mut Open) -> Reads {
        let told = |key: Key| open.reads.get(&key).cloned().map(|read| (key, read));
        std::mem::take(&mut open.more.asked_for).into_iter().filter_map(told).collect()
    }

    /// The writes of a general transaction are locked before any participant is asked to prepare.
    /// So here, too, a prepared transaction waits for no other.
    fn carry_out(client: &mut Client, id: TxnId, decision: Decision, cx: &mut Context<'_>) {
        let open = client.at(id);
        match decision {
            Decision::Commit(writes) if matches!(open.txn.kind, Kind::General) => {
                let wanted = split(&client.cluster, [], writes.keys());
                client.at_mut(id).more.writes = Some(writes);
                client.next_round(id, wanted, cx);
            }
            Decision::Commit(writes) => client.commit(id, writes, cx),
            // Its client has decided already.
            Decision::Abort if open.more.writes.is_some() => {}
            Decision::Abort => client.give_up(id, cx),
        }
    }

    fn resolve(client: &mut Client, id: TxnId, decision: Option<Decision>, cx: &mut Context<'_>) {
        let Some(open) = client.open.get_mut(&id) else { unreachable!("{id} was just opened") };
        // Its next attempt may begin here.
        client.own.age(&open.txn, cx);
        let is_general = matches!(open.txn.kind, Kind::General);
        if is_general {
            let written = decision.iter().flat_map(|decision| match decision {
                Decision::Commit(writes) => writes.keys().collect(),
                Decision::Abort => Vec::new(),
            });
            open.participants = split(&client.cluster, open.reads.keys(), written);
        }
        let has_reads = open.txn.reads.iter().all(|key| open.reads.contains_key(key));
        let is_fit = |writes| has_reads && (is_general || open.txn.declares(writes));
        match decision {
            Some(Decision::Commit(writes)) if is_fit(&writes) => client.commit(id, writes, cx),
            Some(Decision::Commit(_)) | None => client.ask(id, cx),
            // Its client asked nobody to commit it.
            Some(Decision::Abort) => client.give_up(id, cx),
        }
    }

    fn on_finished(client: &mut Client, txn: TxnId, outcome: Outcome) {
        if let Outcome::Committed(_) = outcome {
            client.own.ages.remove(&(txn.client, txn.counter));
        }
    }
}

impl Own {
    /// T5: a transaction is as old as its first attempt.
    fn age(&mut self, txn: &Txn, cx: &mut Context<'_>) -> Timestamp {
        let TxnId { client, counter, .. } = txn.id;
        // If the client will not ask for a transaction again, its age is not needed any more.
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
}

impl Open {
    /// The partitions that it reads from or writes to. The others only have locks for writes that
    /// the client did not make.
    fn committing(&self, writes: &Writes) -> impl Iterator<Item = PartitionId> {
        let takes_part = |participant: &&Participant| {
            !participant.reads.is_empty()
                || participant.writes.iter().any(|key| writes.contains_key(key))
        };
        self.participants.values().filter(takes_part).map(|participant| participant.partition)
    }
}

impl Client {
    /// Releases the locks at these partitions, if the message arrives. Otherwise the participants
    /// find out because no heartbeat arrives.
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
                self.on_read_only_result(txn, partition, Some(snapshot), cx);
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
            // A wound elsewhere has ended it here meanwhile.
            self.release(txn, [partition], cx);
            return;
        };
        if is_below(&open.txn.floors, reads.iter().map(|(key, read)| (key, read))) {
            // From a leader that was deposed (R11).
            cx.note(Note::BehindClient);
            return;
        }
        let is_wanted = matches!(open.phase, Phase::Reading) && open.more.round == round;
        if !is_wanted || !open.silent.remove(&partition) {
            // A repetition: the client may have computed from the first answer.
            return;
        }
        open.more.waiting.remove(&partition);
        open.reads.extend(reads);
        if open.silent.is_empty() {
            self.on_round_complete(txn, cx);
        }
    }

    /// It waits for a lock at one participant. With preempt-on-wait the other participants must
    /// know, if it could be preempted for that.
    fn on_waiting(&mut self, txn: TxnId, partition: PartitionId, cx: &mut Context<'_>) {
        // It has finished.
        let Some(open) = self.open.get_mut(&txn) else { return };
        if !open.silent.contains(&partition) || !open.more.waiting.insert(partition) {
            return;
        }
        if self.config.preemption != Preemption::OnWait || open.txn.priority != Priority::LOW {
            return;
        }
        for &other in open.participants.keys().filter(|&&other| other != partition) {
            let (txns, waiting) = (vec![txn], vec![txn]);
            let beat = Msg::KeepAlive { partition: other, txns, waiting };
            cx.send(self.routes.leader(other), beat);
        }
    }

    /// It has lost its locks at one participant. Unless the coordinator was asked to commit it,
    /// nobody can commit it any more, so it has aborted.
    fn on_wounded(
        &mut self,
        txn: TxnId,
        partition: PartitionId,
        reason: AbortReason,
        cx: &mut Context<'_>,
    ) {
        // It has finished: this is the second loss of one transaction.
        let Some(open) = self.open.get(&txn) else { return };
        match open.phase {
            Phase::Reading | Phase::Deciding => {
                let others = open.participants.keys().copied();
                self.release(txn, others.filter(|&other| other != partition), cx);
                self.finish(txn, Outcome::Aborted(reason), "locking", cx);
            }
            Phase::Ending(_) | Phase::Resolving | Phase::Snapshotting(_) => {}
        }
    }

    /// Requests more locks for a general transaction.
    fn next_round(
        &mut self,
        id: TxnId,
        wanted: OrdMap<PartitionId, Participant>,
        cx: &mut Context<'_>,
    ) {
        let open = self.at_mut(id);
        open.phase = Phase::Reading;
        if wanted.is_empty() {
            self.on_round_complete(id, cx);
            return;
        }
        for (&at, more) in &wanted {
            let all = open.participants.entry(at).or_insert_with(|| Participant::bare(at));
            all.reads.extend(more.reads.iter().cloned());
            all.writes.extend(more.writes.iter().cloned());
        }
        open.silent = wanted.keys().copied().collect();
        open.more.wanted = wanted;
        open.more.round += 1;
        self.ask(id, cx);
    }

    /// All locks of this round are held.
    fn on_round_complete(&mut self, id: TxnId, cx: &mut Context<'_>) {
        match self.at_mut(id).more.writes.take() {
            Some(writes) => self.commit(id, writes, cx),
            None => self.on_all_answered(id, cx),
        }
    }

    /// The transaction ends before any node was asked to commit it, so no node can.
    fn give_up(&mut self, id: TxnId, cx: &mut Context<'_>) {
        self.release(id, self.at(id).participants.keys().copied(), cx);
        self.at_mut(id).phase = Phase::Ending(Decision::Abort);
        self.finish(id, Outcome::Aborted(AbortReason::Client), "locking", cx);
    }

    /// Asks the coordinator to commit.
    fn commit(&mut self, id: TxnId, writes: Writes, cx: &mut Context<'_>) {
        let open = self.at(id);
        let committing: OrdSet<PartitionId> = open.committing(&writes).collect();
        let unused = open.participants.keys().filter(|partition| !committing.contains(partition));
        self.release(id, unused.copied(), cx);
        if committing.is_empty() {
            self.finish(id, Outcome::Committed(cx.clock().now), "empty", cx);
            return;
        }
        self.end(id, Decision::Commit(writes), cx);
    }
}
