//! A partition's leader as participant: wait for the turn, read, prepare, vote, and carry out the
//! decision (§3.2; Carousel §4.1).

use std::collections::{BTreeMap, BTreeSet};

use orthodrome_core::id::{NodeId, PartitionId, TxnId};
use orthodrome_core::time::{Duration, Time, Timestamp};
use orthodrome_core::txn::{AbortReason, Key, Outcome, Priority, Read, Version, Writes};

use super::leader::{Arrived, Leader, Partition, World};
use super::message::{Command, Elsewhere, Msg, Turn, Vote};
use super::queue;
use super::state::Prepared;
use super::{Level, Note, Timer};
use crate::carousel::Verdict;
use crate::gateway::Participant;
use crate::waiting::{BATCH, RetryState, take_due};

impl Partition {
    /// §3.2: a transaction arrives, early as it should or late, and waits for its turn.
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
        self.end_earlier_attempts(txn, world);
        if let Some(ended) = self.state.ended.get(&txn) {
            // It was refused or ended before its prepare came (C9): say so again.
            world.cx.note(Note::LatePrepare);
            if let Outcome::Aborted(reason) = ended.outcome {
                self.send_vote(txn, arrived.coordinator, Vote::Refused(reason), world);
            }
            return;
        }
        let Some(leader) = &mut self.leader else { return };
        if leader.refusing.contains(&txn) || leader.ending.contains(&txn) {
            return;
        }
        if let Some(known) = leader.arrived.get_mut(&txn) {
            world.cx.note(Note::RepeatedPrepare);
            known.client = arrived.client;
            world.send(arrived.client, Msg::Waiting { txn, partition: self.id });
            return;
        }
        if self.state.prepared.contains_key(&txn) || leader.preparing.contains_key(&txn) {
            // Its keys are held since the first time, so these are the versions it prepared with.
            world.cx.note(Note::RepeatedPrepare);
            self.send_reads(arrived.client, txn, &arrived.participant.reads, false, world);
            if let Some(prepared) = self.state.prepared.get(&txn) {
                self.send_vote(txn, arrived.coordinator, prepared.vote(), world);
            }
            return;
        }
        let clock = world.cx.clock();
        if turn.timestamp > clock.now + clock.error * 2 + world.config.ahead_max {
            // N10, R8: one that comes so early would keep others from its keys for long.
            world.cx.note(Note::FarAhead);
            self.refuse(txn, arrived.coordinator, AbortReason::Conflict, world);
            return;
        }
        if turn.timestamp < clock.now {
            world.cx.note(Note::Late);
        }
        let participant = &arrived.participant;
        leader.queue.enqueue(txn, turn, &participant.reads, &participant.writes);
        leader.arrived.insert(txn, arrived);
        if world.config.level >= Level::PriorityAbort {
            self.abort_by_priority(txn, world);
        }
        if world.config.mutations.forwards_on_arrival {
            self.forward_read(txn, world);
        }
        self.on_turn(world);
    }

    /// §3.3.1: nobody of lower priority stands in the queue before one that it conflicts with, unless it
    /// will be gone by then: neither those before the new one, nor the new one itself.
    fn abort_by_priority(&mut self, txn: TxnId, world: &mut World<'_>) {
        let Some(leader) = &self.leader else { return };
        let ends = |txn: TxnId| {
            let turn = leader.queue.turn(txn).unwrap_or_default();
            turn.timestamp + leader.arrived.get(&txn).map_or(Duration::ZERO, |known| known.lasts)
        };
        let mut victims = Vec::new();
        for (victim, important) in leader.queue.out_of_rank(txn) {
            let turn = leader.queue.turn(important).unwrap_or_default();
            if ends(victim) <= turn.timestamp {
                world.cx.note(Note::Spared);
            } else {
                victims.push((victim, important));
            }
        }
        for (victim, important) in victims {
            let Some(leader) = &mut self.leader else { return };
            if let Some(known) = leader.arrived.get_mut(&important) {
                known.refused.push(victim);
            }
            let Some(known) = leader.arrived.get(&victim) else { continue };
            let coordinator = known.coordinator;
            world.cx.note(Note::PriorityAbort);
            if world.config.mutations.refusals_are_volatile {
                self.send_vote(victim, coordinator, Vote::Refused(AbortReason::Conflict), world);
                self.free(victim, Fate::Aborted, world);
                continue;
            }
            // In the log before the prepare of whoever it is for: that prepare proves it (N4).
            self.refuse(victim, coordinator, AbortReason::Conflict, world);
        }
    }

    /// Processes every transaction whose timestamp has passed, in their order, and waits for the next.
    pub(super) fn on_turn(&mut self, world: &mut World<'_>) {
        loop {
            let clock = world.cx.clock().now;
            let Some(leader) = &self.leader else { return };
            if let Some(txn) = leader.queue.due(clock) {
                self.process(txn, world);
                continue;
            }
            if let Some(next) = leader.queue.next() {
                let left = next.0.saturating_sub(clock.0);
                let at = Time(world.cx.now().0.saturating_add(left));
                world.cx.set_timer(Timer::Turn(self.id), at);
            }
            return;
        }
    }

    /// §3.2: its turn has come. One that matters waits for those before it; any other gives up at
    /// once if anybody is in its way. Nobody waits for one whose turn is later (N1).
    fn process(&mut self, txn: TxnId, world: &mut World<'_>) {
        let Some(leader) = &mut self.leader else { return };
        let Some(arrived) = leader.arrived.get(&txn) else { return };
        let coordinator = arrived.coordinator;
        let priority = leader.queue.turn(txn).unwrap_or_default().priority;
        if world.is_too_much(self.id, &arrived.participant.reads) {
            self.refuse(txn, coordinator, AbortReason::TooLarge, world);
            return;
        }
        let Some(leader) = &mut self.leader else { return };
        match leader.queue.judge(txn) {
            queue::Verdict::Free => self.prepare(txn, world),
            queue::Verdict::Behind if priority > Priority::LOW => {
                world.cx.note(Note::LockWait);
                if let Some(unless) = self.doomed_before(txn, world) {
                    self.prepare_conditionally(txn, unless, world);
                    return;
                }
                let Some(leader) = &mut self.leader else { return };
                leader.queue.wait(txn);
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

    /// §3.3.2: those that `txn` has to wait for, if all of them are of lower priority and have been
    /// aborted for its sake at some other participant, by all that is known.
    fn doomed_before(&self, txn: TxnId, world: &World<'_>) -> Option<BTreeSet<TxnId>> {
        if world.config.level < Level::ConditionalPrepare {
            return None;
        }
        let leader = self.leader.as_ref()?;
        let holders = leader.queue.holders_before(txn)?;
        let slack = world.config.guess_slack;
        holders.iter().all(|&holder| self.is_doomed(holder, txn, slack)).then_some(holders)
    }

    /// True if `holder`, prepared here, was in the queue of another participant when `txn` got there, and
    /// in its way.
    fn is_doomed(&self, holder: TxnId, txn: TxnId, slack: Duration) -> bool {
        let Some(leader) = &self.leader else { return false };
        let (Some(held), Some(turn)) = (leader.queue.turn(holder), leader.queue.turn(txn)) else {
            return false;
        };
        let (Some((theirs, lasts)), Some(arrived)) =
            (leader.known.get(&holder), leader.arrived.get(&txn))
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

    /// §3.3.2: prepares `txn` on the condition that those it waits for do not commit, and goes on waiting
    /// for them. What it reads is what holds if they do not.
    fn prepare_conditionally(
        &mut self,
        txn: TxnId,
        unless: BTreeSet<TxnId>,
        world: &mut World<'_>,
    ) {
        world.cx.note(Note::Conditional);
        let Some(leader) = &mut self.leader else { return };
        let Some(arrived) = leader.arrived.get(&txn).cloned() else { return };
        leader.queue.prepare_conditionally(txn);
        leader.conditional.insert(txn, unless.clone());
        self.prepare_in_log(txn, arrived, unless.into_iter().collect(), world);
    }

    /// Answers with the values, and puts the prepare into the log. The transaction holds its keys from
    /// now on.
    fn prepare(&mut self, txn: TxnId, world: &mut World<'_>) {
        let Some(leader) = &mut self.leader else { return };
        let Some(mut arrived) = leader.arrived.remove(&txn) else { return };
        leader.queue.prepare(txn);
        leader.hold(txn, &mut arrived);
        self.prepare_in_log(txn, arrived, Vec::new(), world);
    }

    fn prepare_in_log(
        &mut self,
        txn: TxnId,
        arrived: Arrived,
        unless: Vec<TxnId>,
        world: &mut World<'_>,
    ) {
        let Some(leader) = &mut self.leader else { return };
        let Arrived { client, participant, coordinator, acknowledged_below, refused, .. } = arrived;
        if participant.reads.iter().any(|key| leader.forwarded.contains_key(key)) {
            world.cx.note(Note::Forwarded);
        }
        let turn = leader.queue.turn(txn).unwrap_or_default();
        let proposal = leader.floor.next().max(world.cx.clock().now);
        self.send_reads(client, txn, &participant.reads, !unless.is_empty(), world);
        let version = |key: Key| {
            let version = self.read(&key, world).version;
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
        let Some(leader) = &mut self.leader else { return };
        leader.preparing.insert(txn, prepared);
        self.reserve(proposal, world);
        self.propose(command, world);
    }

    /// §3.4, RECSF: whoever waits for one prepared transaction alone may have its values from that one's
    /// coordinator, which knows first whether it commits. Its turn has come, so nobody can get between
    /// (N8).
    fn forward_read(&mut self, txn: TxnId, world: &mut World<'_>) {
        if world.config.level < Level::RemoteForwarding {
            return;
        }
        let Some(leader) = &self.leader else { return };
        let Some(holders) = leader.queue.holders_before(txn) else { return };
        let mut holders = holders.into_iter();
        let (Some(of), None) = (holders.next(), holders.next()) else { return };
        let Some(arrived) = leader.arrived.get(&txn) else { return };
        let keys = &arrived.participant.reads;
        let is_of_use = leader.queue.written(of, keys).next().is_some();
        let is_unasked = arrived.forwarded_to != Some(of);
        let prepared = self.state.prepared.get(&of).or_else(|| leader.preparing.get(&of));
        let Some(prepared) = prepared.filter(|_| is_of_use && is_unasked) else { return };
        world.cx.note(Note::ReadForwarded);
        let coordinator = prepared.coordinator;
        let reads = keys.iter().map(|key| (key.clone(), self.read(key, world))).collect();
        let (client, partition) = (arrived.client, self.id);
        let forward = Msg::ForwardRead { txn, client, partition, of, coordinator, reads };
        let Some(leader) = &mut self.leader else { return };
        if let Some(arrived) = leader.arrived.get_mut(&txn) {
            arrived.forwarded_to = Some(of);
        }
        world.send_to_leader(coordinator, forward);
    }

    /// Refuses a transaction for ever, in the log; the vote follows when it is chosen.
    fn refuse(
        &mut self,
        txn: TxnId,
        coordinator: PartitionId,
        reason: AbortReason,
        world: &mut World<'_>,
    ) {
        let Some(leader) = &mut self.leader else { return };
        if leader.refusing.insert(txn) {
            self.propose(Command::Refuse { txn, coordinator, reason }, world);
            self.free(txn, Fate::Aborted, world);
        }
    }

    /// `txn` leaves the queue, or gives its keys back: those that waited for it may go. One that is
    /// prepared on the condition that it does not commit is prepared without it if it aborts, and waits
    /// like any other if it commits.
    fn free(&mut self, txn: TxnId, fate: Fate, world: &mut World<'_>) {
        let Some(leader) = &mut self.leader else { return };
        leader.arrived.remove(&txn);
        leader.known.remove(&txn);
        leader.conditional.remove(&txn);
        let mut void = Vec::new();
        for (&dependent, conditions) in &mut leader.conditional {
            if conditions.remove(&txn) && fate == Fate::Committed {
                void.push(dependent);
            }
        }
        for dependent in void {
            world.cx.note(Note::ConditionFailed);
            leader.conditional.remove(&dependent);
            leader.queue.wait(dependent);
        }
        for waiter in leader.queue.remove(txn) {
            let Some(leader) = &mut self.leader else { return };
            if !leader.queue.is_waiting(waiter) {
                // Another that went just now has taken it along.
                continue;
            }
            if !leader.queue.is_free(waiter) {
                self.forward_read(waiter, world);
            } else if leader.conditional.remove(&waiter).is_some() {
                world.cx.note(Note::ConditionHeld);
                leader.queue.prepare(waiter);
                if let Some(mut arrived) = leader.arrived.remove(&waiter) {
                    leader.hold(waiter, &mut arrived);
                }
            } else if leader.arrived.contains_key(&waiter) {
                self.prepare(waiter, world);
            } else {
                // An earlier leader prepared it on a condition that has failed: nobody here knows
                // what it would need.
                self.free(waiter, Fate::Aborted, world);
            }
        }
    }

    /// One that `txn` was prepared on the condition of has ended in the log.
    pub(super) fn on_condition(
        &mut self,
        txn: TxnId,
        coordinator: PartitionId,
        world: &mut World<'_>,
    ) {
        let Some(leader) = &mut self.leader else { return };
        match self.state.prepared.get(&txn) {
            // It stands now, and says so.
            Some(prepared) if prepared.unless.is_empty() => {
                let vote = prepared.vote();
                self.send_vote(txn, coordinator, vote, world);
            }
            Some(_) => {}
            None => {
                leader.asked.remove(&txn);
                let is_known = leader.arrived.contains_key(&txn)
                    || leader.preparing.contains_key(&txn)
                    || self.state.ended.contains_key(&txn);
                if !is_known {
                    self.refuse(txn, coordinator, AbortReason::Recovery, world);
                }
            }
        }
    }

    /// A client begins attempt n + 1 only when it knows that attempt n aborted, so that is a
    /// decision, and nothing need wait for the coordinator's word of it.
    fn end_earlier_attempts(&mut self, txn: TxnId, world: &mut World<'_>) {
        let Some(leader) = &self.leader else { return };
        if txn.attempt == 0 {
            return;
        }
        let earlier = TxnId { attempt: 0, ..txn }..txn;
        let waiting: Vec<TxnId> = leader.arrived.range(earlier.clone()).map(|(t, _)| *t).collect();
        let open: Vec<(TxnId, PartitionId)> = self
            .state
            .prepared
            .range(earlier.clone())
            .chain(leader.preparing.range(earlier))
            .map(|(txn, prepared)| (*txn, prepared.coordinator))
            .filter(|(txn, _)| !leader.ending.contains(txn))
            .collect();
        for old in waiting {
            world.cx.note(Note::AttemptSuperseded);
            self.free(old, Fate::Aborted, world);
        }
        for (old, coordinator) in open {
            world.cx.note(Note::AttemptSuperseded);
            self.end(old, coordinator, Verdict::Abort(AbortReason::Conflict), world);
        }
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

    /// The newest value of a key, applied or about to be.
    fn read(&self, key: &Key, world: &World<'_>) -> Read {
        let forwarded = self.leader.as_ref().and_then(|leader| leader.forwarded.get(key)).cloned();
        forwarded.unwrap_or_else(|| world.store.read(self.id, key))
    }

    pub(super) fn send_vote(
        &self,
        txn: TxnId,
        coordinator: PartitionId,
        vote: Vote,
        world: &mut World<'_>,
    ) {
        let result = Msg::PrepareResult { txn, coordinator, partition: self.id, vote };
        world.send_to_leader(coordinator, result);
    }

    /// A prepare is chosen: vote.
    pub(super) fn on_prepared(&mut self, txn: TxnId, world: &mut World<'_>) {
        let Some(leader) = &mut self.leader else { return };
        let Some(prepared) = self.state.prepared.get(&txn) else { return };
        // A conditional prepare may be followed by one without the condition.
        if leader.preparing.get(&txn).is_some_and(|last| last.unless == prepared.unless) {
            leader.preparing.remove(&txn);
        }
        leader.asked.insert(txn, RetryState::new(world.cx.now()));
        self.send_vote(txn, prepared.coordinator, prepared.vote(), world);
    }

    /// True if nothing is known here of a transaction whose client has acknowledged it, or was silent for so
    /// long that this group acknowledged it.
    fn has_forgotten(&self, txn: TxnId) -> bool {
        let is_open = self.leader.as_ref().is_some_and(|leader| {
            leader.preparing.contains_key(&txn) || leader.arrived.contains_key(&txn)
        });
        !is_open && self.state.has_forgotten(txn)
    }

    /// It will never be prepared here, which the log says already; nor will another attempt of that name.
    /// A coordinator that has decided needs no vote; one that has not would ask for ever.
    fn refuse_forgotten(&self, txn: TxnId, coordinator: PartitionId, world: &mut World<'_>) {
        self.send_vote(txn, coordinator, Vote::Refused(AbortReason::Invalid), world);
    }

    /// Carousel §4.3.3, as corrected by R1: how did this partition vote? While a transaction waits for
    /// its turn or a lock it has not, and the vote will follow.
    pub(super) fn on_query_prepare(
        &mut self,
        txn: TxnId,
        coordinator: PartitionId,
        world: &mut World<'_>,
    ) {
        if let Some(prepared) = self.state.prepared.get(&txn) {
            self.send_vote(txn, coordinator, prepared.vote(), world);
            return;
        }
        if let Some(ended) = self.state.ended.get(&txn) {
            let vote = match ended.outcome {
                Outcome::Aborted(reason) => Vote::Refused(reason),
                Outcome::Committed(timestamp) => Vote::Committed(timestamp),
                Outcome::Unknown => unreachable!("{txn} ended at {} without an outcome", self.id),
            };
            self.send_vote(txn, coordinator, vote, world);
            return;
        }
        if self.has_forgotten(txn) {
            self.refuse_forgotten(txn, coordinator, world);
            return;
        }
        let Some(leader) = &self.leader else { return };
        if leader.preparing.contains_key(&txn) || leader.arrived.contains_key(&txn) {
            return;
        }
        world.cx.note(Note::QueryRefused);
        self.refuse(txn, coordinator, AbortReason::Recovery, world);
    }

    /// Carousel §4.1.3: the decision. Replicate it, apply it, acknowledge it.
    pub(super) fn on_writeback(
        &mut self,
        txn: TxnId,
        coordinator: PartitionId,
        verdict: Verdict,
        world: &mut World<'_>,
    ) {
        let Some(leader) = &self.leader else { return };
        if leader.ending.contains(&txn) {
            return;
        }
        let is_open = self.state.prepared.contains_key(&txn) || leader.preparing.contains_key(&txn);
        let is_over = self.state.ended.contains_key(&txn) || self.state.is_acknowledged(txn);
        if let (Verdict::Commit(..), Some(Outcome::Aborted(reason))) =
            (&verdict, self.state.ended.get(&txn).map(|ended| ended.outcome))
        {
            // N6: somebody has been told otherwise. Going on would be worse than not.
            unreachable!("{txn} commits and has aborted here ({reason})");
        }
        match (is_open, is_over, &verdict) {
            (true, _, _) => self.end(txn, coordinator, verdict, world),
            (false, true, _) => self.acknowledge(txn, coordinator, world),
            // It waits here, or its prepare is on the way, or was lost. Remember (C9).
            (false, false, Verdict::Abort(_)) => {
                world.cx.note(Note::Tombstone);
                self.end(txn, coordinator, verdict, world);
            }
            // A commit needs this partition's prepare, so it was prepared and has ended here.
            (false, false, Verdict::Commit(..)) => self.acknowledge(txn, coordinator, world),
        }
    }

    /// Puts a decision into the log.
    fn end(
        &mut self,
        txn: TxnId,
        coordinator: PartitionId,
        verdict: Verdict,
        world: &mut World<'_>,
    ) {
        let Some(leader) = &mut self.leader else { return };
        if !leader.ending.insert(txn) {
            return;
        }
        let fate = match &verdict {
            Verdict::Abort(_) => Some(Fate::Aborted),
            Verdict::Commit(timestamp, writes) if world.config.level >= Level::LocalForwarding => {
                leader.forward(txn, *timestamp, writes);
                Some(Fate::Committed)
            }
            // Its keys are free when it is applied (T5).
            Verdict::Commit(..) => None,
        };
        let conditions = match fate {
            Some(Fate::Committed) => leader.conditional.get(&txn).cloned().unwrap_or_default(),
            Some(Fate::Aborted) | None => BTreeSet::new(),
        };
        self.propose(Command::End { txn, coordinator, verdict }, world);
        // N6: that it commits is the end of those that must not.
        for other in conditions {
            self.free(other, Fate::Aborted, world);
        }
        if let Some(fate) = fate {
            // Whoever takes the keys now stands behind this decision in the log, so its vote is out
            // only if the decision is chosen here (N7).
            self.free(txn, fate, world);
        }
    }

    fn acknowledge(&self, txn: TxnId, coordinator: PartitionId, world: &mut World<'_>) {
        let ack = Msg::WritebackAck { txn, coordinator, partition: self.id };
        world.send_to_leader(coordinator, ack);
    }

    /// A transaction has ended here in the log: by a decision, to be acknowledged, or by this
    /// partition's own refusal, to be voted. Read-only transactions that waited for it go on, then
    /// those that wait for its keys.
    pub(super) fn on_ended(&mut self, txn: TxnId, world: &mut World<'_>) {
        let Some(leader) = &mut self.leader else { return };
        leader.asked.remove(&txn);
        leader.preparing.remove(&txn);
        leader.floor = leader.floor.max(self.state.floor);
        leader.on_applied(txn);
        let by_decision = leader.ending.remove(&txn);
        leader.refusing.remove(&txn);
        leader.unforgotten.insert(txn, RetryState::new(world.cx.now()));
        let mut fate = Fate::Aborted;
        if let Some(ended) = self.state.ended.get(&txn).copied() {
            if let Outcome::Committed(_) = ended.outcome {
                fate = Fate::Committed;
            }
            if by_decision {
                self.acknowledge(txn, ended.coordinator, world);
            } else if let Outcome::Aborted(reason) = ended.outcome {
                self.send_vote(txn, ended.coordinator, Vote::Refused(reason), world);
            }
        }
        self.free(txn, fate, world);
        self.release_reads(txn, world);
    }

    /// R6: these need not be remembered for the coordinator's sake any more.
    pub(super) fn on_forget(
        &mut self,
        coordinator: PartitionId,
        txns: Vec<TxnId>,
        world: &mut World<'_>,
    ) {
        let Some(leader) = &mut self.leader else { return };
        leader.forget_asked.remove(&coordinator);
        let known: Vec<TxnId> = txns
            .into_iter()
            .filter(|txn| leader.unforgotten.remove(txn).is_some())
            .filter(|txn| self.state.ended.get(txn).is_some_and(|ended| !ended.is_forgettable))
            .collect();
        if !known.is_empty() {
            self.propose(Command::Forget(known), world);
        }
    }

    /// Makes sure that the ceiling lies above `timestamp` before anything that follows in the log
    /// is chosen, and extends it well before it is reached.
    pub(super) fn reserve(&mut self, timestamp: Timestamp, world: &mut World<'_>) {
        let Some(leader) = &mut self.leader else { return };
        let ahead = world.config.ceiling_ahead;
        if leader.ceiling_proposed < timestamp + ahead / 2 {
            leader.ceiling_proposed = timestamp + ahead;
            self.propose(Command::Ceiling(timestamp + ahead), world);
        }
    }

    /// Overdue work as participant: ask what became of prepared transactions, and which endings
    /// may be forgotten.
    pub(super) fn sweep_participant(&mut self, world: &mut World<'_>) {
        let now = world.cx.now();
        self.reserve(world.cx.clock().now, world);
        let Some(leader) = &mut self.leader else { return };
        let after = world.config.query_after;
        for (txn, last) in take_due(&mut leader.asked, after, now) {
            let Some(prepared) = self.state.prepared.get(&txn) else { continue };
            let coordinator = prepared.coordinator;
            let vote = prepared.vote();
            // Silence may mean that the caller still thinks, or that nobody is there.
            world.suspect(coordinator, last.at);
            let query = Msg::QueryDecision { txn, coordinator, partition: self.id, vote };
            world.send_to_leader(coordinator, query);
        }
        self.ask_to_forget(world);
    }

    fn ask_to_forget(&mut self, world: &mut World<'_>) {
        let now = world.cx.now();
        let Some(leader) = &mut self.leader else { return };
        let after = world.config.query_after;
        let mut batches = BTreeMap::<PartitionId, Vec<TxnId>>::new();
        let Leader { unforgotten, forget_asked, .. } = leader;
        unforgotten.retain(|txn, asked| {
            let Some(ended) = self.state.ended.get(txn) else { return false };
            if asked.is_due(after, now) {
                let batch = batches.entry(ended.coordinator).or_default();
                if batch.len() < BATCH {
                    *asked = asked.again(now);
                    batch.push(*txn);
                }
            }
            true
        });
        for (coordinator, txns) in batches {
            if let Some(asked) = forget_asked.insert(coordinator, now) {
                world.suspect(coordinator, asked);
            }
            let ask = Msg::MayForget { coordinator, partition: self.id, txns };
            world.send_to_leader(coordinator, ask);
        }
    }
}

/// How a transaction leaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fate {
    Aborted,
    Committed,
}

/// Whether two transactions touch a key that one of them writes.
fn conflict(one: &Participant, other: &Participant) -> bool {
    let hits = |writes: &[Key], keys: &[Key]| writes.iter().any(|key| keys.contains(key));
    hits(&one.writes, &other.reads)
        || hits(&one.writes, &other.writes)
        || hits(&other.writes, &one.reads)
}

impl Leader {
    /// `txn` is prepared: what is known of it beside that may show that it will not commit.
    fn hold(&mut self, txn: TxnId, arrived: &mut Arrived) {
        if !arrived.elsewhere.is_empty() {
            let elsewhere = std::mem::take(&mut arrived.elsewhere);
            self.known.insert(txn, (elsewhere, arrived.lasts));
        }
    }

    /// LECSF (§3.4): the commit is final at its coordinator, so what it writes is what the next
    /// transaction reads, though this group does not have it yet.
    fn forward(&mut self, txn: TxnId, timestamp: Timestamp, writes: &Writes) {
        let version = Version { timestamp, writer: txn };
        for (key, value) in writes {
            self.forwarded.insert(key.clone(), Read { value: value.clone(), version });
        }
        self.leaving.insert(txn, writes.keys().cloned().collect());
        // Whoever prepares from here on commits later (C11).
        self.floor = self.floor.max(timestamp);
    }

    /// What `txn` wrote is in the store.
    fn on_applied(&mut self, txn: TxnId) {
        for key in self.leaving.remove(&txn).into_iter().flatten() {
            if self.forwarded.get(&key).is_some_and(|read| read.version.writer == txn) {
                self.forwarded.remove(&key);
            }
        }
    }

    /// Those that may write one of these keys, or have committed such a write, and have not ended in
    /// the log.
    pub(super) fn writers(&self, keys: &[Key]) -> BTreeSet<TxnId> {
        let mut writers = self.queue.writers(keys);
        let writes = |written: &Vec<Key>| written.iter().any(|key| keys.contains(key));
        let leaving = self.leaving.iter().filter(|(_, written)| writes(written));
        writers.extend(leaving.map(|(txn, _)| *txn));
        writers
    }
}
