//! A partition's leader as participant: it waits for a transaction's turn, reads, prepares, votes,
//! and applies decisions (§3.2; Carousel §4.1).

use orthodrome_core::id::{NodeId, PartitionId, TxnId};
use orthodrome_core::ordered::OrdSet;
use orthodrome_core::time::{Duration, Time, Timestamp};
use orthodrome_core::txn::{AbortReason, Key, Outcome, Priority, Read, Version, Writes};

use super::leader::{Arrived, Leader, Leading, World};
use super::message::{Command, Elsewhere, Msg, Turn, Vote};
use super::queue;
use super::state::Prepared;
use super::{Level, Note, Timer};
use crate::commit::{Reader, Reading, Verdict};
use crate::gateway::{Participant, Snapshot};
use crate::waiting::RetryState;

impl Reader for Leader {
    const READ_INDEX: Note = Note::ReadIndex;
    const READ_WAIT: Note = Note::ReadWait;

    fn reading(&mut self) -> &mut Reading {
        &mut self.reading
    }

    fn writers(&self, keys: &[Key]) -> OrdSet<TxnId> {
        let mut writers = self.queue.writers(keys);
        let writes = |written: &Vec<Key>| written.iter().any(|key| keys.contains(key));
        let leaving = self.leaving.iter().filter(|(_, written)| writes(written));
        writers.extend(leaving.map(|(txn, _)| *txn));
        writers
    }

    fn unchosen(&self) -> OrdSet<TxnId> {
        self.participation.preparing.keys().copied().collect()
    }

    fn proposal(leading: &Leading<'_>, writer: TxnId) -> Option<Timestamp> {
        let preparing = &leading.leader.participation.preparing;
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
}

impl Leading<'_> {
    /// §3.2: a transaction arrives, on time or late, and waits for its turn.
    pub(super) fn on_read_and_prepare(
        &mut self,
        txn: TxnId,
        turn: Turn,
        arrived: Arrived,
        world: &mut World<'_>,
    ) {
        if self.has_forgotten(txn) {
            world.cx.note(Note::LatePrepare);
            self.refuse_forgotten(txn, arrived.coordinator, world);
            return;
        }
        self.end_earlier_waiting(txn, world);
        if let Some(ended) = self.state.ended.get(&txn) {
            // It was refused or ended before its prepare arrived (C9): repeat the answer.
            world.cx.note(Note::LatePrepare);
            if let Outcome::Aborted(reason) = ended.outcome {
                self.send_vote(txn, arrived.coordinator, Vote::Refused(reason), world);
            }
            return;
        }
        if self.leader.participation.refusing.contains(&txn)
            || self.leader.participation.ending.contains(&txn)
        {
            return;
        }
        if let Some(known) = self.leader.arrived.get_mut(&txn) {
            world.cx.note(Note::RepeatedPrepare);
            known.client = arrived.client;
            world.send(arrived.client, Msg::Waiting { txn, partition: self.id });
            return;
        }
        if self.state.prepared.contains_key(&txn)
            || self.leader.participation.preparing.contains_key(&txn)
        {
            // Its keys have been held since the first request, so these are the versions with which
            // it was prepared.
            world.cx.note(Note::RepeatedPrepare);
            self.send_reads(arrived.client, txn, &arrived.participant.reads, false, world);
            if let Some(prepared) = self.state.prepared.get(&txn) {
                self.send_vote(txn, arrived.coordinator, prepared.vote(), world);
            }
            return;
        }
        let clock = world.cx.clock();
        if turn.timestamp > clock.now + clock.error * 2 + world.config.ahead_max {
            // N10, R8: a transaction with such an early request would block its keys for long.
            world.cx.note(Note::FarAhead);
            self.refuse(txn, arrived.coordinator, AbortReason::Conflict, world);
            return;
        }
        if turn.timestamp < clock.now {
            world.cx.note(Note::Late);
        }
        let participant = &arrived.participant;
        self.leader.queue.enqueue(txn, turn, &participant.reads, &participant.writes);
        self.leader.arrived.insert(txn, arrived);
        if world.config.level >= Level::PriorityAbort {
            self.abort_by_priority(txn, world);
        }
        if world.config.mutations.forwards_on_arrival() {
            self.forward_read(txn, world);
        }
        self.on_turn(world);
    }

    /// §3.3.1: no transaction of lower priority stays in the queue before a conflicting one of
    /// higher priority, unless it will have ended by then. This concerns the transactions before
    /// the new one, and the new one itself.
    fn abort_by_priority(&mut self, txn: TxnId, world: &mut World<'_>) {
        let ends = |txn: TxnId| {
            let turn = self.leader.queue.turn(txn).unwrap_or_default();
            turn.timestamp
                + self.leader.arrived.get(&txn).map_or(Duration::ZERO, |known| known.lasts)
        };
        let mut victims = Vec::new();
        for (victim, important) in self.leader.queue.out_of_rank(txn) {
            let turn = self.leader.queue.turn(important).unwrap_or_default();
            if ends(victim) <= turn.timestamp {
                world.cx.note(Note::Spared);
            } else {
                victims.push((victim, important));
            }
        }
        for (victim, important) in victims {
            if let Some(known) = self.leader.arrived.get_mut(&important) {
                known.refused.push(victim);
            }
            let Some(known) = self.leader.arrived.get(&victim) else { continue };
            let coordinator = known.coordinator;
            world.cx.note(Note::PriorityAbort);
            if world.config.mutations.refusals_are_volatile() {
                self.send_vote(victim, coordinator, Vote::Refused(AbortReason::Conflict), world);
                self.free(victim, Fate::Aborted, world);
                continue;
            }
            // The refusal is in the log before the prepare of the transaction that it favours, so
            // that prepare proves it (N4).
            self.refuse(victim, coordinator, AbortReason::Conflict, world);
        }
    }

    /// Processes, in their order, all transactions whose timestamp has passed, and sets the timer
    /// for the next.
    pub(super) fn on_turn(&mut self, world: &mut World<'_>) {
        loop {
            let clock = world.cx.clock().now;
            if let Some(txn) = self.leader.queue.due(clock) {
                self.process(txn, world);
                continue;
            }
            if let Some(next) = self.leader.queue.next() {
                let left = next.0.saturating_sub(clock.0);
                let at = Time(world.cx.now().0.saturating_add(left));
                world.cx.set_timer(Timer::Turn(self.id), at);
            }
            return;
        }
    }

    /// §3.2: its turn has come. A transaction of high priority waits for earlier ones; any other
    /// aborts at once if one blocks it. No transaction waits for one whose turn is later (N1).
    fn process(&mut self, txn: TxnId, world: &mut World<'_>) {
        let Some(arrived) = self.leader.arrived.get(&txn) else {
            unreachable!("{txn} has not arrived at {}", self.id);
        };
        let coordinator = arrived.coordinator;
        let priority = self.leader.queue.turn(txn).unwrap_or_default().priority;
        if world.is_too_much(self.id, &arrived.participant.reads) {
            self.refuse(txn, coordinator, AbortReason::TooLarge, world);
            return;
        }
        match self.leader.queue.judge(txn) {
            queue::Verdict::Free => self.prepare(txn, world),
            queue::Verdict::Behind if priority > Priority::LOW => {
                world.cx.note(Note::LockWait);
                if let Some(unless) = self.doomed_before(txn, world) {
                    self.prepare_conditionally(txn, unless, world);
                    return;
                }
                self.leader.queue.wait(txn);
                self.forward_read(txn, world);
            }
            queue::Verdict::Behind => {
                self.refuse(txn, coordinator, AbortReason::Conflict, world);
            }
            queue::Verdict::Overtaken => {
                world.cx.note(Note::Overtaken);
                self.refuse(txn, coordinator, AbortReason::Conflict, world);
            }
        }
    }

    /// §3.3.2: the transactions for which `txn` must wait, if all of them have lower priority and
    /// were, as far as this leader knows, aborted in favour of `txn` at some other participant.
    fn doomed_before(&self, txn: TxnId, world: &World<'_>) -> Option<OrdSet<TxnId>> {
        if world.config.level < Level::ConditionalPrepare {
            return None;
        }
        let holders = self.leader.queue.holders_before(txn)?;
        let slack = world.config.guess_slack;
        holders.iter().all(|&holder| self.is_doomed(holder, txn, slack)).then_some(holders)
    }

    /// True if `holder`, which is prepared here, was in the queue of another participant when `txn`
    /// arrived there, and conflicted with it.
    fn is_doomed(&self, holder: TxnId, txn: TxnId, slack: Duration) -> bool {
        let (Some(held), Some(turn)) =
            (self.leader.queue.turn(holder), self.leader.queue.turn(txn))
        else {
            return false;
        };
        let (Some((theirs, lasts)), Some(arrived)) =
            (self.leader.known.get(&holder), self.leader.arrived.get(&txn))
        else {
            return false;
        };
        let is_spared = held.timestamp + *lasts <= turn.timestamp;
        let meets = |mine: &Elsewhere| {
            let other = &mine.participant;
            let there = theirs.iter().map(|e| &e.participant);
            let mut there = there.filter(|theirs| theirs.partition == other.partition);
            mine.arrives < held.timestamp + slack && there.any(|theirs| conflict(theirs, other))
        };
        held.priority < turn.priority && !is_spared && arrived.elsewhere.iter().any(meets)
    }

    /// §3.3.2: prepares `txn` on the condition that the transactions for which it waits do not
    /// commit. It keeps waiting for them. Its reads are valid if they do not commit.
    fn prepare_conditionally(&mut self, txn: TxnId, unless: OrdSet<TxnId>, world: &mut World<'_>) {
        world.cx.note(Note::Conditional);
        let Some(arrived) = self.leader.arrived.get(&txn).cloned() else {
            unreachable!("{txn} has not arrived at {}", self.id);
        };
        self.leader.queue.prepare_conditionally(txn);
        self.leader.conditional.insert(txn, unless.clone());
        self.prepare_in_log(txn, arrived, unless.into_iter().collect(), world);
    }

    /// Answers with the values, and proposes the prepare to the log. The transaction holds its keys
    /// from now on.
    fn prepare(&mut self, txn: TxnId, world: &mut World<'_>) {
        let Some(mut arrived) = self.leader.arrived.remove(&txn) else {
            unreachable!("{txn} has not arrived at {}", self.id);
        };
        self.leader.queue.prepare(txn);
        self.leader.hold(txn, &mut arrived);
        self.prepare_in_log(txn, arrived, Vec::new(), world);
    }

    fn prepare_in_log(
        &mut self,
        txn: TxnId,
        arrived: Arrived,
        unless: Vec<TxnId>,
        world: &mut World<'_>,
    ) {
        let Arrived { client, participant, coordinator, acknowledged_below, refused, .. } = arrived;
        if participant.reads.iter().any(|key| self.leader.forwarded.contains_key(key)) {
            world.cx.note(Note::Forwarded);
        }
        let turn = self.leader.queue.turn(txn).unwrap_or_default();
        let proposal = self.leader.reading.floor.next().max(world.cx.clock().now);
        self.send_reads(client, txn, &participant.reads, !unless.is_empty(), world);
        let version = |key: Key| {
            let version = self.read(&key, world).compared();
            (key, version)
        };
        let versions = participant.reads.into_iter().map(version).collect();
        let writes = participant.writes;
        let prepared = Prepared { coordinator, turn, versions, writes, proposal, unless, refused };
        let command = Command::Prepare {
            txn,
            coordinator,
            turn,
            versions: prepared.versions.clone(),
            writes: prepared.writes.clone(),
            proposal,
            unless: prepared.unless.clone(),
            refused: prepared.refused.clone(),
            acknowledged_below,
        };
        self.leader.participation.preparing.insert(txn, prepared);
        self.reserve(proposal, world);
        self.propose(command, world);
    }

    /// §3.4, RECSF: a transaction that waits for a single prepared one may receive its values from
    /// that one's coordinator, which knows first whether it commits. Its turn has come, so no other
    /// transaction can come in between (N8).
    fn forward_read(&mut self, txn: TxnId, world: &mut World<'_>) {
        if world.config.level < Level::RemoteForwarding {
            return;
        }
        // It waits for a transaction that is not prepared, or for several.
        let Some(holders) = self.leader.queue.holders_before(txn) else { return };
        let mut holders = holders.into_iter();
        let (Some(of), None) = (holders.next(), holders.next()) else { return };
        // An earlier leader prepared it on a condition: no client waits for its values here.
        let Some(arrived) = self.leader.arrived.get(&txn) else { return };
        let keys = &arrived.participant.reads;
        let is_of_use = self.leader.queue.written(of, keys).next().is_some();
        let is_unasked = arrived.forwarded_to != Some(of);
        let prepared =
            self.state.prepared.get(&of).or_else(|| self.leader.participation.preparing.get(&of));
        let Some(prepared) = prepared.filter(|_| is_of_use && is_unasked) else { return };
        world.cx.note(Note::ReadForwarded);
        let coordinator = prepared.coordinator;
        let reads = keys.iter().map(|key| (key.clone(), self.read(key, world))).collect();
        let (client, partition) = (arrived.client, self.id);
        let forward = Msg::ForwardRead { txn, client, partition, of, coordinator, reads };
        if let Some(arrived) = self.leader.arrived.get_mut(&txn) {
            arrived.forwarded_to = Some(of);
        }
        world.send_to_leader(coordinator, forward);
    }

    /// Refuses a transaction for ever, in the log. The vote follows when the entry is chosen.
    fn refuse(
        &mut self,
        txn: TxnId,
        coordinator: PartitionId,
        reason: AbortReason,
        world: &mut World<'_>,
    ) {
        if self.leader.participation.refusing.insert(txn) {
            self.propose(Command::Refuse { txn, coordinator, reason }, world);
            self.free(txn, Fate::Aborted, world);
        }
    }

    /// `txn` leaves the queue, or releases its keys: transactions that waited for it may continue.
    /// One that was prepared on the condition that `txn` does not commit becomes unconditional if
    /// `txn` aborts, and waits like any other if `txn` commits.
    fn free(&mut self, txn: TxnId, fate: Fate, world: &mut World<'_>) {
        self.leader.arrived.remove(&txn);
        self.leader.known.remove(&txn);
        self.leader.conditional.remove(&txn);
        let mut void = Vec::new();
        for (&dependent, conditions) in &mut self.leader.conditional {
            if conditions.remove(&txn) && fate == Fate::Committed {
                void.push(dependent);
            }
        }
        for dependent in void {
            world.cx.note(Note::ConditionFailed);
            self.leader.conditional.remove(&dependent);
            self.leader.queue.wait(dependent);
        }
        for waiter in self.leader.queue.remove(txn) {
            if !self.leader.queue.is_waiting(waiter) {
                // Another transaction that was just removed has removed it too.
                continue;
            }
            if !self.leader.queue.is_free(waiter) {
                self.forward_read(waiter, world);
            } else if self.leader.conditional.remove(&waiter).is_some() {
                world.cx.note(Note::ConditionHeld);
                self.leader.queue.prepare(waiter);
                if let Some(mut arrived) = self.leader.arrived.remove(&waiter) {
                    self.leader.hold(waiter, &mut arrived);
                }
            } else if self.leader.arrived.contains_key(&waiter) {
                self.prepare(waiter, world);
            } else {
                // An earlier leader prepared it on a condition that turned out false: this leader
                // does not know its request.
                self.free(waiter, Fate::Aborted, world);
            }
        }
    }

    /// A transaction on whose abort `txn` was conditional has ended in the log.
    pub(super) fn on_condition(
        &mut self,
        txn: TxnId,
        coordinator: PartitionId,
        world: &mut World<'_>,
    ) {
        match self.state.prepared.get(&txn) {
            // It is unconditional now, and its vote says so.
            Some(prepared) if prepared.unless.is_empty() => {
                let vote = prepared.vote();
                self.send_vote(txn, coordinator, vote, world);
            }
            Some(_) => {}
            None => {
                self.leader.participation.asked.remove(&txn);
                let is_known = self.leader.arrived.contains_key(&txn)
                    || self.leader.participation.preparing.contains_key(&txn)
                    || self.state.ended.contains_key(&txn);
                if !is_known {
                    self.refuse(txn, coordinator, AbortReason::Recovery, world);
                }
            }
        }
    }

    /// Earlier attempts end here, also those that wait for their turn or for a lock.
    fn end_earlier_waiting(&mut self, txn: TxnId, world: &mut World<'_>) {
        let earlier = txn.earlier();
        let waiting: Vec<TxnId> = self.leader.arrived.range(earlier).map(|(t, _)| *t).collect();
        let open = self.earlier_attempts(txn);
        for old in waiting {
            world.cx.note(Note::AttemptSuperseded);
            self.free(old, Fate::Aborted, world);
        }
        self.end_attempts(open, world);
    }

    fn send_reads(
        &self,
        client: NodeId,
        txn: TxnId,
        keys: &[Key],
        is_provisional: bool,
        world: &mut World<'_>,
    ) {
        if keys.is_empty() {
            return;
        }
        let reads = keys.iter().map(|key| (key.clone(), self.read(key, world))).collect();
        world.send(client, Msg::ReadResult { txn, partition: self.id, reads, is_provisional });
    }

    /// The newest value of a key, applied or about to be applied.
    fn read(&self, key: &Key, world: &World<'_>) -> Read {
        let forwarded = self.leader.forwarded.get(key).cloned();
        let known = || self.known_of(key);
        forwarded.unwrap_or_else(|| world.store.read_known(self.id, key, known))
    }

    /// Every version of a key up to here is applied. Later commits have a timestamp above the floor
    /// (C11), but those of transactions that are prepared only have one that is not below their
    /// proposal. One of these may be the transaction that reads, if its gateway asks again.
    fn known_of(&self, key: &Key) -> Timestamp {
        let proposal = |txn| {
            let chosen = self.state.prepared.get(&txn);
            let prepared = chosen.or_else(|| self.leader.participation.preparing.get(&txn));
            prepared.map(|prepared| Timestamp(prepared.proposal.0.saturating_sub(1)))
        };
        let writers = self.leader.queue.writers(std::slice::from_ref(key));
        writers.into_iter().filter_map(proposal).fold(self.state.floor, Timestamp::min)
    }

    /// A prepare is chosen: vote.
    pub(super) fn on_prepared(&mut self, txn: TxnId, world: &mut World<'_>) {
        let Some(prepared) = self.state.prepared.get(&txn) else {
            unreachable!("{txn} is not prepared at {} by its prepare", self.id);
        };
        // A conditional prepare may be followed by an unconditional one.
        if self
            .leader
            .participation
            .preparing
            .get(&txn)
            .is_some_and(|last| last.unless == prepared.unless)
        {
            self.leader.participation.preparing.remove(&txn);
        }
        self.leader.participation.asked.insert(txn, RetryState::new(world.cx.now()));
        self.send_vote(txn, prepared.coordinator, prepared.vote(), world);
        self.release_scans(world);
    }

    /// Carousel §4.3.3, as corrected by R1: the coordinator asks for this partition's vote. While a
    /// transaction waits for its turn or a lock there is none, and the vote will follow.
    pub(super) fn on_query_prepare(
        &mut self,
        txn: TxnId,
        coordinator: PartitionId,
        world: &mut World<'_>,
    ) {
        if self.answer_query_prepare(txn, coordinator, world) {
            return;
        }
        world.cx.note(Note::QueryRefused);
        self.refuse(txn, coordinator, AbortReason::Recovery, world);
    }

    /// Proposes a decision to the log.
    pub(super) fn end(
        &mut self,
        txn: TxnId,
        coordinator: PartitionId,
        verdict: Verdict,
        world: &mut World<'_>,
    ) {
        if !self.leader.participation.ending.insert(txn) {
            return;
        }
        let fate = match &verdict {
            Verdict::Abort(_) => Some(Fate::Aborted),
            Verdict::Commit(timestamp, writes) if world.config.level >= Level::LocalForwarding => {
                self.leader.forward(txn, *timestamp, writes);
                Some(Fate::Committed)
            }
            // Its keys are released when it is applied (T5).
            Verdict::Commit(..) => None,
        };
        let conditions = match fate {
            Some(Fate::Committed) => self.leader.conditional.get(&txn).cloned().unwrap_or_default(),
            Some(Fate::Aborted) | None => OrdSet::new(),
        };
        self.propose(Command::End { txn, coordinator, verdict }, world);
        // N6: its commit ends the transactions that must not commit.
        for other in conditions {
            self.free(other, Fate::Aborted, world);
        }
        if let Some(fate) = fate {
            // A transaction that takes the keys now comes after this decision in the log, so its
            // vote is sent only if the decision is chosen here (N7).
            self.free(txn, fate, world);
        }
    }

    /// A transaction has ended here in the log. A decision must be acknowledged; the partition's
    /// own refusal is a vote. Read-only transactions that waited for it continue, then those that
    /// wait for its keys.
    pub(super) fn on_ended(&mut self, txn: TxnId, world: &mut World<'_>) {
        let by_decision = self.take_ended(txn, world.cx.now());
        self.leader.reading.floor = self.leader.reading.floor.max(self.state.floor);
        self.leader.on_applied(txn);
        let fate = match self.state.ended.get(&txn).map(|ended| ended.outcome) {
            Some(Outcome::Committed(_)) => Fate::Committed,
            Some(Outcome::Aborted(_) | Outcome::Unknown) | None => Fate::Aborted,
        };
        self.answer_ended(txn, by_decision, world);
        self.free(txn, fate, world);
        self.release_reads(txn, world);
    }
}

/// How a transaction ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fate {
    Aborted,
    Committed,
}

/// True if two transactions access a key that one of them writes.
fn conflict(one: &Participant, other: &Participant) -> bool {
    let hits = |writes: &[Key], keys: &[Key]| writes.iter().any(|key| keys.contains(key));
    hits(&one.writes, &other.reads)
        || hits(&one.writes, &other.writes)
        || hits(&other.writes, &one.reads)
}

impl Leader {
    /// `txn` is prepared. Its request may show later that it will not commit.
    fn hold(&mut self, txn: TxnId, arrived: &mut Arrived) {
        if !arrived.elsewhere.is_empty() {
            let elsewhere = std::mem::take(&mut arrived.elsewhere);
            self.known.insert(txn, (elsewhere, arrived.lasts));
        }
    }

    /// LECSF (§3.4): the commit is final at its coordinator, so the next transaction reads its
    /// writes, although this group has not applied it yet.
    fn forward(&mut self, txn: TxnId, timestamp: Timestamp, writes: &Writes) {
        let version = Version { timestamp, writer: txn.name() };
        for (key, value) in writes {
            self.forwarded.insert(key.clone(), Read { value: value.clone(), version });
        }
        self.leaving.insert(txn, writes.keys().cloned().collect());
        // Every transaction that prepares from here on commits later (C11).
        self.reading.floor = self.reading.floor.max(timestamp);
    }

    /// The writes of `txn` are in the store.
    fn on_applied(&mut self, txn: TxnId) {
        for key in self.leaving.remove(&txn).into_iter().flatten() {
            if self.forwarded.get(&key).is_some_and(|read| read.version.writer == txn.name()) {
                self.forwarded.remove(&key);
            }
        }
    }
}
