//! A partition's leader as participant: it locks, reads, prepares and applies decisions; and it
//! serves read-only transactions.

use orthodrome_core::id::{NodeId, PartitionId, TxnId};
use orthodrome_core::ordered::OrdSet;
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::{AbortReason, Key, Outcome, Priority, Version, Writes};

use super::leader::{Leader, Leading, Session, World};
use super::locks::{Loss, Preemption, Rank};
use super::message::{Command, Msg, Vote, modes};
use super::state::Prepared;
use super::{Config, Note};
use crate::commit::{Reader, Reading};
use crate::gateway::{Participant, Snapshot};
use crate::waiting::{RetryState, take_due};

/// This partition's part of a prepare.
pub(super) struct Wish {
    pub versions: Vec<(Key, Version)>,
    pub writes: Writes,
    pub acknowledged_below: u64,
}

impl Reader for Leader {
    const READ_INDEX: Note = Note::ReadIndex;
    const READ_WAIT: Note = Note::ReadWait;

    fn reading(&mut self) -> &mut Reading {
        &mut self.reading
    }

    fn writers(&self, keys: &[Key]) -> OrdSet<TxnId> {
        self.locks.prepared_writers(keys)
    }

    fn unchosen(&self) -> OrdSet<TxnId> {
        self.preparing.keys().copied().collect()
    }

    fn proposal(leading: &Leading<'_>, writer: TxnId) -> Option<Timestamp> {
        let preparing = &leading.leader.preparing;
        let prepared = leading.state.prepared.get(&writer).or(preparing.get(&writer));
        prepared.map(|prepared| prepared.proposal)
    }

    fn ceiling_command(ceiling: Timestamp) -> Command {
        Command::Ceiling(ceiling)
    }

    fn snapshot_message(
        txn: TxnId,
        partition: PartitionId,
        snapshot: Snapshot,
        is_too_much: bool,
    ) -> Msg {
        Msg::ReadOnlyResult { txn, partition, snapshot, is_too_much }
    }

    fn skips_lease(config: &Config) -> bool {
        config.mutations.no_lease()
    }

    fn skips_writers(config: &Config) -> bool {
        config.mutations.reads_do_not_wait()
    }
}

impl Leading<'_> {
    /// Natto §4: locks all keys that the transaction declared here, then reads. The transaction may
    /// wait, and others may lose their locks to it. A later round of a general transaction adds to
    /// its locks here, or makes them stronger. If this leader does not know the earlier rounds,
    /// because another leader granted those locks or they are lost, the prepare finds that out.
    pub(super) fn on_lock(
        &mut self,
        client: NodeId,
        (txn, round): (TxnId, u32),
        rank: Rank,
        participant: Participant,
        world: &mut World<'_>,
    ) {
        if let Some(Outcome::Aborted(reason)) = self.state.ended.get(&txn) {
            world.cx.note(Note::LateLock);
            let wounded = Msg::Wounded { txn, partition: self.id, reason: *reason };
            world.send(client, wounded);
            return;
        }
        self.end_earlier_attempts(txn, world);
        if self.state.has_forgotten(txn) && !self.leader.preparing.contains_key(&txn) {
            // Its client was silent for so long that the group acknowledged later transactions, and
            // no attempt of that name is accepted. Without an answer it would ask for ever.
            world.cx.note(Note::LateLock);
            let reason = AbortReason::Invalid;
            world.send(client, Msg::Wounded { txn, partition: self.id, reason });
            return;
        }
        let now = world.cx.now();
        let later = txn.later();
        let is_late = self.state.is_acknowledged(txn)
            || self.state.ended.contains_key(&txn)
            || self.state.prepared.contains_key(&txn)
            || self.leader.preparing.contains_key(&txn)
            || self.leader.sessions.range(later).next().is_some();
        if is_late {
            world.cx.note(Note::LateLock);
            return;
        }
        if let Some(session) = self.leader.sessions.get_mut(&txn)
            && session.round >= round
        {
            if session.round > round {
                world.cx.note(Note::LateLock);
                return;
            }
            world.cx.note(Note::RepeatedLock);
            (session.client, session.heard) = (client, now);
            if self.leader.locks.is_granted(txn) {
                self.send_reads(txn, world);
            } else {
                world.send(client, Msg::Waiting { txn, partition: self.id });
            }
            return;
        }
        let Participant { reads, writes, .. } = participant;
        let wanted = modes(&reads, &writes);
        let before = self.leader.sessions.insert(txn, Session { client, round, reads, heard: now });
        if before.is_some() {
            world.cx.note(Note::LaterRound);
        }
        let lost = self.leader.locks.request(txn, rank, wanted);
        let waits = !self.leader.locks.is_granted(txn);
        for (victim, loss) in lost {
            self.wound(victim, loss.into(), AbortReason::Conflict, world);
        }
        self.serve_granted(world);
        if waits {
            world.cx.note(Note::LockWait);
            // The message is sent only if it can matter to a transaction of higher priority.
            if world.config.preemption == Preemption::OnWait && rank.priority == Priority::LOW {
                world.send(client, Msg::Waiting { txn, partition: self.id });
            }
        }
    }

    /// Sends the values to transactions that have received their last requested lock. The values
    /// stay the newest while the locks are held.
    fn serve_granted(&mut self, world: &mut World<'_>) {
        for txn in self.leader.locks.take_granted() {
            let session = self.leader.sessions.get(&txn);
            if session.is_some_and(|session| world.is_too_much(self.id, &session.reads)) {
                self.wound(txn, Note::TooMuch, AbortReason::TooLarge, world);
            } else {
                self.send_reads(txn, world);
            }
        }
    }

    fn send_reads(&self, txn: TxnId, world: &mut World<'_>) {
        // It was asked to prepare in the same step: its client has the values.
        let Some(session) = self.leader.sessions.get(&txn) else { return };
        // Nobody else has a lock to write these keys, so every commit that is not applied yet will have
        // a timestamp above the floor (C11).
        let read =
            |key: &Key| (key.clone(), world.store.read_known(self.id, key, || self.state.floor));
        let reads = session.reads.iter().map(read);
        let (round, partition) = (session.round, self.id);
        let locked = Msg::Locked { txn, round, partition, reads: reads.collect() };
        world.send(session.client, locked);
    }

    /// A transaction that is not prepared loses its locks here, and its client is informed. If it
    /// was about to commit, its prepare will be refused here unless nothing has changed meanwhile.
    fn wound(&mut self, txn: TxnId, note: Note, reason: AbortReason, world: &mut World<'_>) {
        world.cx.note(note);
        self.leader.locks.release(txn);
        if let Some(session) = self.leader.sessions.remove(&txn) {
            world.send(session.client, Msg::Wounded { txn, partition: self.id, reason });
        }
    }

    /// A client begins attempt n + 1 only when it knows that attempt n aborted. So attempt n is
    /// decided, and ends here without further messages.
    fn end_earlier_attempts(&mut self, txn: TxnId, world: &mut World<'_>) {
        if txn.attempt == 0 {
            return;
        }
        let earlier = txn.earlier();
        let idle: Vec<TxnId> =
            self.leader.sessions.range(earlier.clone()).map(|(txn, _)| *txn).collect();
        for old in idle {
            world.cx.note(Note::AttemptSuperseded);
            self.leader.sessions.remove(&old);
            self.leader.locks.release(old);
        }
        let open: Vec<(TxnId, PartitionId)> = self
            .state
            .prepared
            .range(earlier.clone())
            .chain(self.leader.preparing.range(earlier))
            .map(|(txn, prepared)| (*txn, prepared.coordinator))
            .filter(|(txn, _)| !self.leader.ending.contains_key(txn))
            .collect();
        for (old, coordinator) in open {
            world.cx.note(Note::AttemptSuperseded);
            self.end(old, coordinator, Outcome::Aborted(AbortReason::Conflict), world);
        }
        self.serve_granted(world);
    }

    /// The clients are alive; some of their transactions wait for a lock elsewhere.
    pub(super) fn on_heartbeat(
        &mut self,
        txns: &[TxnId],
        waiting: &[TxnId],
        world: &mut World<'_>,
    ) {
        let now = world.cx.now();
        let mut lost = Vec::new();
        for txn in txns {
            if let Some(session) = self.leader.sessions.get_mut(txn) {
                session.heard = now;
                lost.extend(self.leader.locks.set_waits_elsewhere(*txn, waiting.contains(txn)));
            }
        }
        for (victim, loss) in lost {
            self.wound(victim, loss.into(), AbortReason::Conflict, world);
        }
        self.serve_granted(world);
    }

    /// The client will not commit the transaction, or not here. A prepared transaction stays:
    /// another gateway asked to commit it, and the coordinator decides.
    pub(super) fn on_release(&mut self, txn: TxnId, world: &mut World<'_>) {
        if self.leader.sessions.remove(&txn).is_some() {
            self.leader.locks.release(txn);
            self.serve_granted(world);
        }
    }

    /// 2PC, first phase. The transaction prepares if it still holds its locks, or can have them at
    /// once because the leader that granted them is gone, and if the values that it read are still
    /// the newest (R3, T4). So at the moment of its last vote every lock is held and every value
    /// read is current.
    pub(super) fn on_prepare(
        &mut self,
        txn: TxnId,
        coordinator: PartitionId,
        wish: Wish,
        world: &mut World<'_>,
    ) {
        if let Some(prepared) = self.state.prepared.get(&txn) {
            world.cx.note(Note::RepeatedPrepare);
            self.send_vote(txn, coordinator, prepared.vote(), world);
            return;
        }
        let ended = self.state.ended.get(&txn);
        if ended.is_some() || self.state.is_acknowledged(txn) {
            // It ended before its prepare arrived (C9).
            world.cx.note(Note::LatePrepare);
            let reason = match ended {
                Some(Outcome::Aborted(reason)) => *reason,
                Some(Outcome::Committed(_) | Outcome::Unknown) | None => AbortReason::Recovery,
            };
            self.send_vote(txn, coordinator, Vote::Refused(reason), world);
            return;
        }
        if self.leader.preparing.contains_key(&txn) || self.leader.ending.contains_key(&txn) {
            world.cx.note(Note::RepeatedPrepare);
            return;
        }
        let Wish { versions, writes, acknowledged_below } = wish;
        let reads: Vec<Key> = versions.iter().map(|(key, _)| key.clone()).collect();
        let locks = modes(&reads, writes.keys());
        self.leader.sessions.remove(&txn);
        let is_current =
            versions.iter().all(|(key, read)| world.store.read(self.id, key).compared() == *read);
        let has_locks = self.leader.locks.holds(txn, &locks)
            || (world.config.mutations.trusts_rounds() && self.leader.locks.is_granted(txn));
        let refusal = if !is_current && !world.config.mutations.no_version_check() {
            Some((Note::StaleVersions, AbortReason::StaleRead))
        } else if has_locks {
            self.leader.locks.prepare(txn);
            None
        } else {
            self.leader.locks.release(txn);
            let is_free = self.leader.locks.seize(txn, locks);
            if is_free {
                world.cx.note(Note::LocksRegained);
            }
            (!is_free).then_some((Note::LocksLost, AbortReason::Conflict))
        };
        if let Some((note, reason)) = refusal {
            world.cx.note(note);
            self.leader.locks.release(txn);
            self.send_vote(txn, coordinator, Vote::Refused(reason), world);
            self.serve_granted(world);
            return;
        }
        let proposal = self.leader.reading.floor.next().max(world.cx.clock().now);
        let prepared = Prepared { coordinator, reads, writes, proposal };
        let command = Command::Prepare {
            txn,
            coordinator,
            reads: prepared.reads.clone(),
            writes: prepared.writes.clone(),
            proposal,
            acknowledged_below,
        };
        self.leader.preparing.insert(txn, prepared);
        self.reserve(proposal, world);
        self.propose(command, world);
        self.serve_granted(world);
    }

    fn send_vote(&self, txn: TxnId, coordinator: PartitionId, vote: Vote, world: &mut World<'_>) {
        let vote = Msg::Vote { txn, coordinator, partition: self.id, vote };
        world.send_to_leader(coordinator, vote);
    }

    /// A prepare is chosen: vote.
    pub(super) fn on_prepared(&mut self, txn: TxnId, world: &mut World<'_>) {
        self.leader.preparing.remove(&txn);
        let Some(prepared) = self.state.prepared.get(&txn) else {
            unreachable!("{txn} is not prepared at {} by its prepare", self.id);
        };
        self.leader.asked.insert(txn, RetryState::new(world.cx.now()));
        self.send_vote(txn, prepared.coordinator, prepared.vote(), world);
        self.release_scans(world);
    }

    /// 2PC, second phase: replicate the decision, apply it, acknowledge it.
    pub(super) fn on_decision(
        &mut self,
        txn: TxnId,
        coordinator: PartitionId,
        outcome: Outcome,
        world: &mut World<'_>,
    ) {
        if self.leader.ending.contains_key(&txn) {
            return;
        }
        if self.leader.sessions.remove(&txn).is_some() {
            self.leader.locks.release(txn);
        }
        let is_open =
            self.state.prepared.contains_key(&txn) || self.leader.preparing.contains_key(&txn);
        let is_over = self.state.is_over(txn);
        if is_open {
            self.end(txn, coordinator, outcome, world);
        } else if is_over || matches!(outcome, Outcome::Committed(_)) {
            // A commit needs this partition's prepare, so the transaction was prepared and has
            // ended here.
            self.acknowledge(txn, coordinator, world);
        } else {
            // This partition does not know the transaction: its prepare is in flight, or was lost.
            // Remember the end (C9).
            world.cx.note(Note::Tombstone);
            self.end(txn, coordinator, outcome, world);
        }
        self.serve_granted(world);
    }

    /// Proposes a decision to the log.
    fn end(
        &mut self,
        txn: TxnId,
        coordinator: PartitionId,
        outcome: Outcome,
        world: &mut World<'_>,
    ) {
        if self.leader.ending.insert(txn, coordinator).is_some() {
            return;
        }
        if matches!(outcome, Outcome::Aborted(_)) || world.config.mutations.releases_early() {
            // A transaction that takes the keys now comes after this abort in the log, so its vote
            // is sent only if the abort is chosen. The keys of a commit are released when it is
            // applied (T5).
            self.leader.locks.release(txn);
        }
        self.propose(Command::End { txn, coordinator, outcome }, world);
        self.serve_granted(world);
    }

    fn acknowledge(&self, txn: TxnId, coordinator: PartitionId, world: &mut World<'_>) {
        let ack = Msg::DecisionAck { txn, coordinator, partition: self.id };
        world.send_to_leader(coordinator, ack);
    }

    /// A decision is applied: read-only transactions that waited for it continue, then those that
    /// wait for its locks.
    pub(super) fn on_ended(&mut self, txn: TxnId, world: &mut World<'_>) {
        self.leader.asked.remove(&txn);
        self.leader.preparing.remove(&txn);
        self.leader.sessions.remove(&txn);
        self.leader.reading.floor = self.leader.reading.floor.max(self.state.floor);
        self.leader.coordination.kept.insert(txn, world.cx.now());
        self.leader.locks.release(txn);
        if let Some(coordinator) = self.leader.ending.remove(&txn) {
            self.acknowledge(txn, coordinator, world);
        }
        self.release_reads(txn, world);
        self.serve_granted(world);
    }

    /// Asks the coordinator of a prepared transaction for the decision.
    pub(super) fn query_decision(&self, txn: TxnId, world: &mut World<'_>) {
        let Some(&Prepared { coordinator, proposal, .. }) = self.state.prepared.get(&txn) else {
            unreachable!("{txn} is not prepared at {}", self.id);
        };
        let query = Msg::QueryDecision { txn, coordinator, partition: self.id, proposal };
        world.send_to_leader(coordinator, query);
    }

    /// Overdue work as participant: ask for the decisions on prepared transactions, and release the
    /// locks of transactions whose clients are gone.
    pub(super) fn sweep_participant(&mut self, world: &mut World<'_>) {
        let now = world.cx.now();
        self.reserve(world.cx.clock().now, world);
        let after = world.config.timeouts.query_after;
        let due = take_due(&mut self.leader.asked, after, now);
        let abandon_after = world.config.timeouts.abandon_after;
        let is_gone = |session: &Session| now.since(session.heard) >= abandon_after;
        let gone = self.leader.sessions.iter().filter(|(_, session)| is_gone(session));
        let gone: Vec<TxnId> = gone.map(|(txn, _)| *txn).collect();
        for (txn, last) in due {
            let Some(prepared) = self.state.prepared.get(&txn) else {
                unreachable!("{} doubts {txn}, which is not prepared", self.id);
            };
            world.suspect(prepared.coordinator, last.at);
            self.query_decision(txn, world);
        }
        for txn in gone {
            self.wound(txn, Note::Abandoned, AbortReason::Abandoned, world);
        }
        self.serve_granted(world);
    }
}

impl From<Loss> for Note {
    fn from(loss: Loss) -> Self {
        match loss {
            Loss::Wounded => Self::Wounded,
            Loss::Preempted => Self::Preempted,
            Loss::PreemptedOnWait => Self::PreemptedOnWait,
        }
    }
}
