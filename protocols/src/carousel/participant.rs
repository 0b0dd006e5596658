//! A partition's leader as participant: it reads, prepares, votes and applies decisions (§4.1.1,
//! §4.1.3, §4.1.4), and serves read-only transactions (§4.4.2).

use std::sync::Arc;

use orthodrome_core::id::{NodeId, PartitionId, TxnId};
use orthodrome_core::ordered::OrdSet;
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::{AbortReason, Key, Outcome, Version};

use super::Note;
use super::fast::{Ballot, versions};
use super::leader::{Leading, WaitingRead, World};
use super::message::{Command, Msg, Vote};
use super::state::Prepared;
use crate::commit::{Verdict, has_fence, valid_at_least};
use crate::gateway::{Participant, Snapshot};
use crate::waiting::RetryState;

/// The most prepares that one leader lets wait.
const WAITING_MAX: usize = 1_024;

/// The fields of [`Msg::ReadAndPrepare`].
#[derive(Clone, Debug)]
pub struct Prepare {
    pub txn: TxnId,
    pub participant: Participant,
    pub coordinator: PartitionId,
    pub acknowledged_below: u64,
    /// On the fast path: the timestamp that every replica proposes.
    pub timestamp: Option<Timestamp>,
    /// True if the values are requested too.
    pub wants_reads: bool,
}

impl Prepare {
    /// The fields of [`Msg::FastPrepare`], if it is one.
    pub(super) fn fast(msg: Msg) -> Option<Self> {
        let Msg::FastPrepare {
            txn,
            participant,
            coordinator,
            priority: _,
            acknowledged_below,
            timestamp,
            wants_reads,
        } = msg
        else {
            return None;
        };
        let timestamp = Some(timestamp);
        Some(Self { txn, participant, coordinator, acknowledged_below, timestamp, wants_reads })
    }
}

impl Leading<'_> {
    /// §4.1.1 and §4.1.4: checks for conflicts, answers with the values, and replicates the vote.
    pub(super) fn on_read_and_prepare(
        &mut self,
        client: NodeId,
        prepare: Prepare,
        world: &mut World<'_>,
    ) {
        let txn = prepare.txn;
        if self.has_forgotten(txn) {
            world.cx.note(Note::LatePrepare);
            self.refuse_forgotten(txn, prepare.coordinator, world);
            return;
        }
        let earlier = self.earlier_attempts(txn);
        self.end_attempts(earlier, world);
        if let Some(ended) = self.state.ended.get(&txn) {
            // It was refused or ended before its prepare arrived (C9): repeat the answer.
            world.cx.note(Note::LatePrepare);
            if let Outcome::Aborted(reason) = ended.outcome {
                self.send_vote(txn, prepare.coordinator, Vote::Refused(reason), world);
            }
            return;
        }
        if self.state.prepared.contains_key(&txn)
            || self.leader.participation.preparing.contains_key(&txn)
        {
            // Its keys have been held since the first request, so these are the versions with which
            // it was prepared.
            world.cx.note(Note::RepeatedPrepare);
            if prepare.wants_reads {
                self.send_reads(client, txn, &prepare.participant, world);
            }
            if let Some(prepared) = self.state.prepared.get(&txn) {
                self.send_vote(txn, prepare.coordinator, prepared.vote(), world);
            }
            return;
        }
        if self.leader.participation.refusing.contains(&txn) {
            return;
        }
        if world.is_too_much(self.id, &prepare.participant.reads) {
            self.refuse(txn, prepare.coordinator, AbortReason::TooLarge, world);
            return;
        }
        if self.is_behind_client(&prepare.participant, world) {
            self.wait_for_known(client, prepare, world);
            return;
        }
        if prepare.wants_reads {
            self.send_reads(client, txn, &prepare.participant, world);
        }
        self.prepare(prepare, world);
    }

    /// R11: true if the client may know a commit here that is not applied yet. The coordinator
    /// decides before the participants apply, and the client may be faster. The committed
    /// transaction is prepared here, so it writes one of these keys; and it is decided, so it waits
    /// for nothing. But the floor is the highest timestamp that the client knows of any of its keys
    /// here, so the writer may be another transaction, which is not decided and may itself wait at
    /// another partition.
    fn is_behind_client(&self, participant: &Participant, world: &World<'_>) -> bool {
        let Participant { reads, writes, floor, .. } = participant;
        *floor != Timestamp::ZERO
            && reads.iter().chain(writes).any(|key| {
                self.leader.pending.writer_of(key).is_some()
                    && world.store.read(self.id, key).version.timestamp < *floor
            })
    }

    /// Lets a prepare wait until the conflicting transaction has ended. If its gateway sends it again,
    /// that lasts longer than a commit takes to arrive, so it is refused: two transactions may wait
    /// for each other at two partitions.
    fn wait_for_known(&mut self, client: NodeId, prepare: Prepare, world: &mut World<'_>) {
        let (txn, coordinator) = (prepare.txn, prepare.coordinator);
        let waits_already = self.leader.waiting.remove(&txn).is_some();
        if !waits_already && self.leader.waiting.len() < WAITING_MAX {
            world.cx.note(Note::WaitedForKnown);
            self.leader.waiting.insert(txn, (client, prepare));
        } else {
            self.refuse(txn, coordinator, AbortReason::Conflict, world);
        }
    }

    /// A transaction has released its keys: prepares that waited for it continue.
    fn serve_waiting(&mut self, world: &mut World<'_>) {
        for (client, prepare) in std::mem::take(&mut self.leader.waiting).into_values() {
            self.on_read_and_prepare(client, prepare, world);
        }
    }

    /// Prepares a transaction in the log, or refuses it because of a conflict.
    fn prepare(&mut self, prepare: Prepare, world: &mut World<'_>) {
        let Prepare { txn, participant, coordinator, acknowledged_below, timestamp, .. } = prepare;
        // The fast path relies on the log: everything for which this leader votes is in its log
        // before any later change of members, so that a new leader with other voters finds it
        // there. A prepare that would have to wait for the log gets no fast vote.
        let is_taken = timestamp.is_some() && self.log_takes_commands();
        let voters = self.replica.settled_voters().filter(|_| is_taken).map(<[_]>::to_vec);
        if self.leader.pending.conflict(txn, &participant.reads, &participant.writes).is_some() {
            self.refuse(txn, coordinator, AbortReason::Conflict, world);
            if let Some(voters) = voters {
                let ballot = Ballot::new(self.id, self.replica, Some(voters));
                ballot.refuse(txn, coordinator, AbortReason::Conflict, world);
            }
            return;
        }
        // Keys of an abort that is not chosen yet: a vote of the slow path comes after the abort in
        // the log, but a vote of the fast path would not.
        let is_clear = voters.is_some() && self.is_clear_of_endings(&participant);
        let versions = Arc::new(versions(self.id, participant.reads, world));
        let writes = Arc::new(participant.writes);
        let proposal = self.propose_timestamp(timestamp, &versions, &writes, world);
        let prepared = Prepared { coordinator, versions, writes, proposal };
        let voters = voters.filter(|_| timestamp == Some(proposal) && is_clear);
        let by_fast = voters.map(|voters| (voters, prepared.clone()));
        self.prepare_in_log(txn, prepared, acknowledged_below, world);
        if let Some((voters, prepared)) = by_fast {
            let ballot = Ballot::new(self.id, self.replica, Some(voters));
            ballot.vote(txn, prepared, self.own, world);
        }
    }

    /// The commit timestamp to propose: the client's, if it is above everything promised here and
    /// not too far ahead (R8); otherwise one of this leader's own.
    fn propose_timestamp(
        &self,
        wanted: Option<Timestamp>,
        versions: &[(Key, Version)],
        writes: &[Key],
        world: &World<'_>,
    ) -> Timestamp {
        let now = world.cx.clock().now;
        let (floor, logged) = if world.config.mutations.no_floor() {
            let written = writes.iter().map(|key| world.store.read(self.id, key).version);
            let accessed = versions.iter().map(|(_, version)| *version).chain(written);
            let latest = accessed.map(|version| version.timestamp).max().unwrap_or_default();
            (latest, latest)
        } else {
            (self.leader.floor, self.leader.logged)
        };
        let latest = now + world.config.ahead_max;
        let is_fit = |wanted: &Timestamp| (floor.max(logged) < *wanted) && *wanted <= latest;
        wanted.filter(is_fit).unwrap_or_else(|| floor.next().max(now))
    }

    /// True if no transaction whose abort is in the log and not chosen had any of these keys.
    fn is_clear_of_endings(&self, participant: &Participant) -> bool {
        self.leader.freed.is_clear_of(&participant.reads, &participant.writes)
    }

    /// Proposes a prepare to the log, and holds its keys from now on.
    pub(super) fn prepare_in_log(
        &mut self,
        txn: TxnId,
        prepared: Prepared,
        acknowledged_below: u64,
        world: &mut World<'_>,
    ) {
        self.leader.hold(txn, &prepared);
        let command = Command::Prepare {
            txn,
            coordinator: prepared.coordinator,
            versions: prepared.versions.clone(),
            writes: prepared.writes.clone(),
            proposal: prepared.proposal,
            acknowledged_below,
        };
        let proposal = prepared.proposal;
        self.leader.participation.preparing.insert(txn, prepared);
        if !world.config.is_fast {
            self.reserve(proposal, world);
        }
        self.propose(command, world);
    }

    /// Refuses a transaction for ever, in the log. The vote follows when the entry is chosen.
    pub(super) fn refuse(
        &mut self,
        txn: TxnId,
        coordinator: PartitionId,
        reason: AbortReason,
        world: &mut World<'_>,
    ) {
        if self.leader.participation.refusing.insert(txn) {
            self.propose(Command::Refuse { txn, coordinator, reason }, world);
        }
    }

    /// Sends the newest values. All that the client knows has been applied.
    fn send_reads(&self, client: NodeId, txn: TxnId, of: &Participant, world: &mut World<'_>) {
        if of.reads.is_empty() {
            return;
        }
        let read = |key: &Key| (key.clone(), world.store.read_known(self.id, key, || of.floor));
        let reads = of.reads.iter().map(read).collect();
        world.send(client, Msg::ReadResult { txn, partition: self.id, reads });
    }

    /// A prepare or a refusal is chosen: vote (⑨⑩).
    pub(super) fn on_prepared(&mut self, txn: TxnId, world: &mut World<'_>) {
        self.leader.participation.preparing.remove(&txn);
        let Some(prepared) = self.state.prepared.get(&txn) else {
            unreachable!("{txn} is not prepared at {} by its prepare", self.id);
        };
        self.leader.participation.asked.insert(txn, RetryState::new(world.cx.now()));
        self.send_vote(txn, prepared.coordinator, prepared.vote(), world);
        self.serve_scans(world);
    }

    /// §4.3.3, as corrected by R1: the coordinator asks for this partition's vote.
    pub(super) fn on_query_prepare(
        &mut self,
        txn: TxnId,
        participant: Participant,
        coordinator: PartitionId,
        world: &mut World<'_>,
    ) {
        if self.answer_query_prepare(txn, coordinator, world) {
            return;
        }
        if world.config.mutations.recovery_prepares() || world.config.mutations.abort_told_at_once()
        {
            let (acknowledged_below, timestamp, wants_reads) = (0, None, false);
            let prepare = Prepare {
                txn,
                participant,
                coordinator,
                acknowledged_below,
                timestamp,
                wants_reads,
            };
            self.prepare(prepare, world);
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
        match verdict {
            // A transaction that takes the keys now comes after this abort in the log, so its vote
            // is sent only if the abort is chosen. The keys of a commit are released when it is
            // applied (T5).
            Verdict::Abort(_) => {
                let prepared =
                    self.state.prepared.get(&txn).or(self.leader.participation.preparing.get(&txn));
                if let Some(prepared) = prepared.filter(|_| world.config.is_fast).cloned() {
                    self.leader.freed.insert(txn, prepared);
                }
                self.leader.free(txn);
            }
            Verdict::Commit(timestamp, _) => self.leader.logged = self.leader.logged.max(timestamp),
        }
        self.propose(Command::End { txn, coordinator, verdict }, world);
        self.serve_waiting(world);
    }

    /// A transaction has ended here in the log. A decision must be acknowledged; the partition's
    /// own refusal is a vote.
    pub(super) fn on_ended(&mut self, txn: TxnId, world: &mut World<'_>) {
        let by_decision = self.take_ended(txn, world.cx.now());
        self.leader.free(txn);
        self.leader.freed.remove(txn);
        self.leader.floor = self.leader.floor.max(self.state.floor);
        self.serve_waiting(world);
        self.serve_scans(world);
        self.answer_ended(txn, by_decision, world);
    }

    /// §4.4.2 with C11–C13: the latest values, and how long they are promised to be the latest.
    pub(super) fn on_read_only(
        &mut self,
        client: NodeId,
        txn: TxnId,
        keys: Vec<Key>,
        at_least: Timestamp,
        world: &mut World<'_>,
    ) {
        let at_least = valid_at_least(&keys, at_least, world.cx.clock().now);
        let read = WaitingRead { client, txn, keys, at_least, behind: None };
        self.on_waiting_read(read, world);
    }

    fn on_waiting_read(&mut self, read: WaitingRead, world: &mut World<'_>) {
        let (now, at_least) = (world.cx.now(), read.at_least);
        let has_lease = self.replica.has_lease(now) || world.config.mutations.no_lease();
        if !has_lease {
            // A leader that was deposed without knowing it must not return old values (C12).
            world.cx.note(Note::ReadIndex);
            let id = self.leader.next_read;
            self.leader.next_read += 1;
            self.leader.reads.insert(id, read);
            self.read_index(id, world);
        } else if at_least > self.state.ceiling {
            // The promise must be within what the group has agreed on (R8).
            self.leader.reads_above_ceiling.push(read);
            self.raise_ceiling(at_least + world.config.timeouts.ceiling_ahead, world);
        } else {
            self.serve_read(read, world);
        }
    }

    /// The answer to a leadership check.
    pub(super) fn on_read_index(&mut self, id: u64, is_leader: bool, world: &mut World<'_>) {
        let Some(read) = self.leader.reads.remove(&id) else {
            unreachable!("{} was asked for no leadership check {id}", self.id);
        };
        if !is_leader {
            let (partition, txn) = (self.id, Some(read.txn));
            world.send(read.client, Msg::NotLeader { partition, leader: None, txn });
        } else if read.at_least > self.state.ceiling {
            let at_least = read.at_least;
            self.leader.reads_above_ceiling.push(read);
            self.reserve(at_least, world);
        } else {
            self.serve_read(read, world);
        }
    }

    /// Answers a read-only request under a valid lease or a confirmed leadership.
    pub(super) fn serve_read(&mut self, read: WaitingRead, world: &mut World<'_>) {
        let Some(read) = self.wait_as_scan(read) else { return };
        let WaitingRead { client, txn, keys, at_least, behind } = read;
        let is_too_much = world.is_too_much(self.id, &keys);
        let snapshot = if is_too_much || self.leader.pending.conflict(txn, &keys, &[]).is_some() {
            None
        } else {
            let wanted = world.cx.clock().now.max(at_least).max(self.leader.floor);
            let mut valid_until = wanted.min(self.state.ceiling).max(self.state.floor);
            if behind.is_some() {
                // A scan is ordered before every prepare that is not chosen yet.
                let preparing = self.leader.participation.preparing.values();
                let below =
                    preparing.map(|prepared| Timestamp(prepared.proposal.0.saturating_sub(1)));
                valid_until = below.fold(valid_until, Timestamp::min);
            }
            if !world.config.mutations.no_floor() {
                self.leader.floor = self.leader.floor.max(valid_until);
            }
            let forgets = world.store.forgets(self.id).min(self.state.floor);
            let read = |key: Key| {
                let read = world.store.read_known(self.id, &key, || forgets);
                (key, read)
            };
            Some(Snapshot { reads: keys.into_iter().map(read).collect(), valid_until })
        };
        let partition = self.id;
        world.send(client, Msg::ReadOnlyResult { txn, partition, snapshot, is_too_much });
    }

    /// A scan's request stands for all keys of the partition that a pending transaction may create,
    /// and the scan's second list shows only prepares that a majority has. So it waits until every
    /// prepare is chosen that precedes it. Returns a request that need not wait.
    fn wait_as_scan(&mut self, mut read: WaitingRead) -> Option<WaitingRead> {
        if !has_fence(&read.keys) {
            return Some(read);
        }
        let preparing = &self.leader.participation.preparing;
        let behind: OrdSet<TxnId> = match read.behind.take() {
            None => preparing.keys().copied().collect(),
            Some(known) => known.into_iter().filter(|txn| preparing.contains_key(txn)).collect(),
        };
        // Transactions that prepare from now on commit above `at_least`.
        self.leader.floor = self.leader.floor.max(read.at_least);
        let waits = !behind.is_empty();
        read.behind = Some(behind);
        if waits {
            self.leader.reads_of_scans.push(read);
            return None;
        }
        Some(read)
    }

    /// A prepare is chosen, or its transaction has ended: answers the scans that waited for it.
    fn serve_scans(&mut self, world: &mut World<'_>) {
        let preparing = &self.leader.participation.preparing;
        let is_free = |read: &mut WaitingRead| {
            let mut behind = read.behind.iter().flatten();
            !behind.any(|txn| preparing.contains_key(txn))
        };
        let free: Vec<WaitingRead> = self.leader.reads_of_scans.extract_if(.., is_free).collect();
        for read in free {
            self.on_waiting_read(read, world);
        }
    }

    /// A higher ceiling is chosen: answers the requests that waited for it.
    pub(super) fn on_ceiling(&mut self, world: &mut World<'_>) {
        for read in std::mem::take(&mut self.leader.reads_above_ceiling) {
            self.on_waiting_read(read, world);
        }
    }

    /// Ensures that the ceiling is above `timestamp` before any later log entry is chosen, and
    /// raises it well before it is reached.
    pub(super) fn reserve(&mut self, timestamp: Timestamp, world: &mut World<'_>) {
        let ahead = world.config.timeouts.ceiling_ahead;
        if self.leader.ceiling_proposed < timestamp + ahead / 2 {
            self.raise_ceiling(timestamp + ahead, world);
        }
    }

    fn raise_ceiling(&mut self, ceiling: Timestamp, world: &mut World<'_>) {
        if self.leader.ceiling_proposed < ceiling {
            self.leader.ceiling_proposed = ceiling;
            self.leader.logged = self.leader.logged.max(ceiling);
            self.propose(Command::Ceiling(ceiling), world);
        }
    }
}
