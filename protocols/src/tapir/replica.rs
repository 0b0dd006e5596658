//! One replica of one partition: the record and the conflict check.

mod copying;
mod views;

use orthodrome_core::Wire;
use orthodrome_core::id::{ClientId, NodeId, PartitionId, TxnId};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::scan::{Ask, Basis, Listing, Voters};
use orthodrome_core::store::{Start, Store};
use orthodrome_core::time::{Duration, Time, Timestamp};
use orthodrome_core::txn::{AbortReason, Key, Outcome};

use self::views::Outgoing;
use super::message::{Answer, Ballot, Cast, Change, Image, Msg, Part, Vote};
use super::occ::{Validator, snapshot};
use super::server::World;
use super::state::{Entry, State};
use super::{Note, Timer};
use crate::acknowledged::below as below_of;
use crate::commit::has_fence;
use crate::ir::{Gathering, Quorums, View};
use crate::portions::Assembly;

/// One replica of one partition.
#[derive(Debug)]
pub(super) struct Replica {
    pub id: PartitionId,
    pub state: State,
    pub status: Status,
    replicas: Vec<NodeId>,
    quorums: Quorums,
    validator: Validator,
    /// Read-only requests of scans that wait for prepared writers.
    scans: Vec<ScanRead>,
    gathering: Gathering<Image>,
    /// Records that have arrived in part, by replica; also that of the view that begins.
    arriving: OrdMap<NodeId, Assembly<Image>>,
    starting: Assembly<Image>,
    /// For each peer, the record that is on its way to it.
    outgoing: OrdMap<NodeId, Outgoing>,
    /// When the last message of each peer arrived.
    heard: OrdMap<NodeId, Time>,
    /// Peers that take part in this view.
    joined: OrdSet<NodeId>,
    /// When this view's record was last sent to each peer.
    view_sent: OrdMap<NodeId, Time>,
    /// The number of views entered since the last one that lasted, and when the present one was
    /// installed.
    views_failed: u32,
    /// Part of a record or of a view has moved since the time-out of the view was set.
    is_moving: bool,
    installed: Time,
    gossiped: Time,
    /// Size of the record.
    entries_bytes: usize,
    /// When to check each transaction of the record, and how often that was done.
    watched: OrdMap<TxnId, Watch>,
    due: OrdSet<(Time, TxnId)>,
    /// True if the copy of the data is complete and must be made durable.
    pub must_checkpoint: bool,
}

#[derive(Clone, Copy, Debug)]
struct Watch {
    at: Time,
    since: Time,
    times: u32,
}

/// A scan's part of a read-only transaction, which waits for prepared writers.
#[derive(Clone, PartialEq, Eq, Debug)]
struct ScanRead {
    from: NodeId,
    txn: TxnId,
    keys: Vec<Key>,
    timestamp: Timestamp,
}

/// The most scans that one replica lets wait.
const SCANS_MAX: usize = 1_024;

/// The abilities of a replica at the moment (§3.2).
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Status {
    /// It can do everything.
    Normal,
    /// It only executes decisions: it has left its view for another that has not begun.
    Changing { since: Time },
    /// It only executes decisions: it is in the view, and copies the data that it lacks.
    Copying { start: Start, asked: Time },
}

/// A result of a `Prepare` that a coordinator wants to be accepted.
#[derive(Debug)]
pub(super) struct Finalize {
    pub txn: TxnId,
    pub view: View,
    pub cast: Cast,
    pub part: Option<Part>,
    pub participants: Vec<PartitionId>,
}

impl Replica {
    pub(super) fn new(
        id: PartitionId,
        replicas: Vec<NodeId>,
        state: State,
        world: &mut World<'_, '_>,
    ) -> Self {
        let now = world.cx.now();
        let mut replica = Self {
            id,
            validator: Validator::new(state.ceiling),
            status: Status::Changing { since: now },
            scans: Vec::new(),
            quorums: Quorums::of(replicas.len()),
            heard: replicas.iter().map(|&node| (node, now)).collect(),
            replicas,
            gathering: Gathering::default(),
            arriving: OrdMap::new(),
            starting: Assembly::default(),
            outgoing: OrdMap::new(),
            joined: OrdSet::new(),
            view_sent: OrdMap::new(),
            views_failed: 0,
            is_moving: false,
            installed: now,
            gossiped: now,
            entries_bytes: 0,
            watched: OrdMap::new(),
            due: OrdSet::new(),
            must_checkpoint: false,
            state,
        };
        if world.config.mutations.recovering_replicas_join() {
            replica.state.entries.clear();
        }
        if replica.state.born == Timestamp::ZERO {
            replica.change(Change::Born(world.cx.clock().now), world);
        }
        replica.reindex(world);
        // A replica that was away brings itself and all others up to date (§3.2.2).
        replica.enter(replica.state.view.next(), world);
        world.cx.set_timer(Timer::Sweep(id), now + world.config.sweep_interval);
        replica
    }

    /// Processes a message for this replica.
    pub(super) fn on_message(&mut self, from: NodeId, msg: Msg, world: &mut World<'_, '_>) {
        if let Some(heard) = self.heard.get_mut(&from) {
            *heard = world.cx.now();
        }
        let is_normal = self.status == Status::Normal;
        match msg {
            Msg::Read { txn, .. }
            | Msg::ProposeConsensus { txn, .. }
            | Msg::FinalizeConsensus { txn, .. }
            | Msg::CoordinatorChange { txn, .. }
            | Msg::ReadOnly { txn, .. }
                if !is_normal =>
            {
                world.send(from, Msg::NotNormal { partition: self.id, txn });
            }
            Msg::Read { txn, keys, .. } => self.on_read(from, txn, keys, world),
            Msg::ProposeConsensus { txn, ballot, timestamp, part, participants, .. } => {
                self.on_propose_consensus(
                    from,
                    txn,
                    (ballot, timestamp),
                    part,
                    participants,
                    world,
                );
            }
            Msg::FinalizeConsensus { txn, view, ballot, vote, part, participants, .. } => {
                let cast = Cast { ballot, vote, is_final: true };
                let finalize = Finalize { txn, view, cast, part, participants };
                self.on_finalize_consensus(from, finalize, world);
            }
            Msg::ProposeInconsistent { txn, outcome, part, participants, .. } => {
                self.on_propose_inconsistent(from, txn, outcome, (part, participants), world);
            }
            Msg::FinalizeInconsistent { txns, acknowledged, .. } => {
                self.on_finalize_inconsistent(txns, acknowledged, world);
            }
            Msg::CoordinatorChange { txn, ballot, participants, .. } => {
                self.on_coordinator_change(from, txn, ballot, participants, world);
            }
            Msg::ReadOnly { txn, keys, timestamp, .. } => {
                self.on_read_only(from, txn, keys, timestamp, world);
            }
            Msg::DoViewChange { view, offer: None, portion, .. } if portion.of > 1 => {
                self.on_part_arrived(from, view, portion, world);
            }
            Msg::DoViewChange { view, offer, portion, .. } => {
                self.on_do_view_change(from, view, offer.map(|offer| (portion, *offer)), world);
            }
            Msg::StartView { view, synced, is_new_group, image, portion, founders, .. } => {
                let members = (synced, is_new_group, founders);
                self.on_start_view(view, members, (portion, *image), world);
            }
            Msg::Gossip { view, is_normal, .. } => self.on_gossip(from, view, is_normal, world),
            Msg::FetchState { view, start, .. } => self.on_fetch_state(from, view, start, world),
            Msg::StateChunk { view, start, keys, is_cut, is_last, .. } => {
                self.on_state_chunk((view, &start), keys, (is_cut, is_last), world);
            }
            Msg::ReadResult { .. }
            | Msg::ReplyConsensus { .. }
            | Msg::Confirm { .. }
            | Msg::ReplyInconsistent { .. }
            | Msg::CoordinatorChangeReply { .. }
            | Msg::ReadOnlyResult { .. }
            | Msg::NotNormal { .. } => unreachable!("{} is asked, and was answered", self.id),
        }
    }

    /// Makes a change durable, and applies it.
    fn change(&mut self, change: Change, world: &mut World<'_, '_>) {
        let concerned: Vec<TxnId> = match &change {
            Change::Cast { txn, .. } | Change::Promise { txn, .. } | Change::End { txn, .. } => {
                vec![*txn]
            }
            Change::Forget(txns) => txns.clone(),
            Change::Acknowledge(_)
            | Change::Ceiling(_)
            | Change::Enter(_)
            | Change::Install { .. }
            | Change::Gather { .. }
            | Change::Whole
            | Change::Born(_) => vec![],
        };
        let before = self.bytes_of(&concerned);
        self.state.apply(self.id, &change, world.store);
        self.entries_bytes += self.bytes_of(&concerned);
        self.entries_bytes = self.entries_bytes.saturating_sub(before);
        for record in change.divide(world.config.piece_bytes) {
            world.persist(self.id, record);
        }
    }

    fn bytes_of(&self, txns: &[TxnId]) -> usize {
        txns.iter().filter_map(|txn| self.state.entries.get(txn)).map(Wire::size).sum()
    }

    fn answer(&self, txn: TxnId) -> Answer {
        let entry = self.state.entries.get(&txn);
        Answer {
            view: self.state.view,
            promised: entry.map_or_else(Ballot::default, |entry| entry.promised),
            cast: entry.and_then(|entry| entry.cast),
            ended: entry.and_then(|entry| entry.ended),
            absent: self.absent(),
            is_forgotten: entry.is_none() && self.state.is_acknowledged(txn),
        }
    }

    fn absent(&self) -> Vec<NodeId> {
        let counts = |node: &NodeId| self.state.synced.contains_key(node);
        self.replicas.iter().copied().filter(|node| !counts(node)).collect()
    }

    /// §5.2 "Read": the latest committed versions that this replica knows.
    fn on_read(&self, from: NodeId, txn: TxnId, keys: Vec<Key>, world: &mut World<'_, '_>) {
        let is_too_much = world.is_too_much(self.id, &keys);
        let keys = if is_too_much { vec![] } else { keys };
        let read = |key: Key| {
            let read = world.store.read(self.id, &key);
            (key, read)
        };
        let reads = keys.into_iter().map(read).collect();
        world.send(from, Msg::ReadResult { txn, partition: self.id, reads, is_too_much });
    }

    /// §5.2 "Prepare": validate, persist, then vote.
    fn on_propose_consensus(
        &mut self,
        from: NodeId,
        txn: TxnId,
        (ballot, timestamp): (Ballot, Timestamp),
        part: Part,
        participants: Vec<PartitionId>,
        world: &mut World<'_, '_>,
    ) {
        self.end_earlier_attempts(txn, world);
        let held = self.state.entries.get(&txn);
        let is_answered = held.is_some_and(|entry| {
            let is_later = entry.cast.is_some_and(|cast| cast.ballot >= ballot);
            entry.ended.is_some() || entry.promised > ballot || is_later
        });
        if is_answered {
            world.cx.note(Note::RepeatedPrepare);
        } else if held.is_none() && self.state.is_acknowledged(txn) {
            // It is an old copy; or its client was silent for so long that the group acknowledged
            // it.
            world.cx.note(Note::LatePrepare);
            let answer = Answer { promised: ballot, ..self.answer(txn) };
            world.reply(from, Msg::ReplyConsensus { txn, partition: self.id, answer });
            return;
        } else {
            let vote = self.validate(txn, timestamp, &part, world);
            let cast = Cast { ballot, vote, is_final: false };
            self.cast(txn, participants, Some(part), cast, world);
        }
        let answer = self.answer(txn);
        world.reply(from, Msg::ReplyConsensus { txn, partition: self.id, answer });
    }

    fn validate(
        &self,
        txn: TxnId,
        timestamp: Timestamp,
        part: &Part,
        world: &mut World<'_, '_>,
    ) -> Vote {
        if self.is_far_future(timestamp, world) {
            return Vote::Abstain;
        }
        let vote = self.validator.check((self.id, world.store), txn, timestamp, part);
        world.cx.note(match vote {
            Vote::PrepareOk(_) | Vote::Refused(_) => return vote,
            Vote::Abort => Note::VoteAbort,
            Vote::Abstain => Note::VoteAbstain,
            Vote::Retry(_) => Note::VoteRetry,
        });
        vote
    }

    /// R8: a timestamp that no correct clock shows yet would conflict with every other transaction.
    fn is_far_future(&self, timestamp: Timestamp, world: &mut World<'_, '_>) -> bool {
        let clock = world.cx.clock();
        let is_far = timestamp > clock.now + clock.error * 2 + world.config.clock_ahead_max;
        if is_far {
            world.cx.note(Note::FarFuture);
        }
        is_far
    }

    /// Stores a vote, and updates the conflict check.
    fn cast(
        &mut self,
        txn: TxnId,
        participants: Vec<PartitionId>,
        part: Option<Part>,
        cast: Cast,
        world: &mut World<'_, '_>,
    ) {
        let is_known = self.state.entries.get(&txn).is_some_and(|entry| entry.part.is_some());
        let part = part.filter(|_| !is_known);
        self.change(Change::Cast { txn, participants, part, cast }, world);
        self.hold(txn);
        self.watch(txn, world);
    }

    /// Brings the conflict check in line with the record.
    fn hold(&mut self, txn: TxnId) {
        let prepared = self.state.entries.get(&txn).and_then(|entry| {
            let at = entry.held_at()?;
            Some((at, entry.part.as_ref()?))
        });
        match prepared {
            Some((at, part)) => self.validator.prepare(txn, at, part),
            None => self.validator.release(txn),
        }
    }

    /// A client begins attempt n + 1 only when it knows that attempt n aborted.
    fn end_earlier_attempts(&mut self, txn: TxnId, world: &mut World<'_, '_>) {
        if txn.attempt == 0 {
            return;
        }
        let earlier = self.state.entries.range(txn.earlier());
        let open: Vec<(TxnId, Vec<PartitionId>)> = earlier
            .filter(|(_, entry)| entry.ended.is_none())
            .map(|(txn, entry)| (*txn, entry.participants.clone()))
            .collect();
        for (old, participants) in open {
            world.cx.note(Note::AttemptSuperseded);
            let outcome = Outcome::Aborted(AbortReason::Conflict);
            self.end(old, outcome, (None, participants), world);
        }
    }

    /// §3.1: this is the result, whatever this replica voted.
    fn on_finalize_consensus(
        &mut self,
        from: NodeId,
        Finalize { txn, view, cast, part, participants }: Finalize,
        world: &mut World<'_, '_>,
    ) {
        let held = self.state.entries.get(&txn);
        let is_late = held.is_none() && self.state.is_acknowledged(txn);
        let is_refused =
            held.is_some_and(|entry| entry.ended.is_some() || entry.promised > cast.ballot);
        let has_part = part.is_some() || held.is_some_and(|entry| entry.part.is_some());
        let is_repeated = held.is_some_and(|entry| entry.cast == Some(cast));
        if view != self.state.view {
            // R5: its votes are from another view, and may not count any more.
            world.cx.note(Note::FinalizeOfOtherView);
        } else if !is_late && !is_refused && !is_repeated && (has_part || !cast.vote.is_ok()) {
            self.cast(txn, participants, part, cast, world);
        }
        let answer = self.answer(txn);
        world.reply(from, Msg::Confirm { txn, partition: self.id, answer });
    }

    /// §5.2 "Commit" and "Abort".
    fn on_propose_inconsistent(
        &mut self,
        from: NodeId,
        txn: TxnId,
        outcome: Outcome,
        facts: (Option<Part>, Vec<PartitionId>),
        world: &mut World<'_, '_>,
    ) {
        match self.state.entries.get(&txn) {
            Some(Entry { ended: Some(before), .. }) => {
                let is_commit = |outcome| matches!(outcome, Outcome::Committed(_));
                assert!(
                    is_commit(*before) == is_commit(outcome),
                    "{txn} {before} at {}, and now it {outcome}",
                    self.id
                );
            }
            None if self.state.is_acknowledged(txn)
                && !matches!(outcome, Outcome::Committed(_)) => {}
            None => {
                world.cx.note(Note::EndBeforePrepare);
                self.end(txn, outcome, facts, world);
            }
            Some(Entry { ended: None, .. }) => self.end(txn, outcome, facts, world),
        }
        let absent = self.absent();
        world.reply(from, Msg::ReplyInconsistent { txn, partition: self.id, absent });
    }

    /// Executes a decision.
    fn end(
        &mut self,
        txn: TxnId,
        outcome: Outcome,
        (part, participants): (Option<Part>, Vec<PartitionId>),
        world: &mut World<'_, '_>,
    ) {
        let is_known = self.state.entries.get(&txn).is_some_and(|entry| entry.part.is_some());
        let part = part.filter(|_| !is_known);
        self.change(Change::End { txn, participants, part, outcome }, world);
        self.ended(txn, outcome);
        self.unwatch(txn);
        self.watch(txn, world);
    }

    /// A transaction has ended. Its reads are recorded at its timestamp, and it conflicts with no
    /// other transaction any more.
    fn ended(&mut self, txn: TxnId, outcome: Outcome) {
        self.validator.release(txn);
        let Outcome::Committed(at) = outcome else { return };
        let part = self.state.entries.get(&txn).and_then(|entry| entry.part.as_ref());
        for (key, _) in part.iter().flat_map(|part| &part.reads) {
            self.validator.read(key, at);
        }
    }

    /// R6: all participants have executed these transactions, and their clients know the outcomes.
    fn on_finalize_inconsistent(
        &mut self,
        txns: Vec<TxnId>,
        acknowledged: Vec<(ClientId, u64)>,
        world: &mut World<'_, '_>,
    ) {
        let is_news = |(client, below): &(ClientId, u64)| {
            below_of(&self.state.acknowledged, *client) < *below
        };
        let acknowledged: Vec<(ClientId, u64)> = acknowledged.into_iter().filter(is_news).collect();
        if !acknowledged.is_empty() {
            self.change(Change::Acknowledge(acknowledged), world);
        }
        let is_over = |txn: &TxnId| self.state.entries.get(txn).is_some_and(|e| e.ended.is_some());
        let over: Vec<TxnId> = txns.into_iter().filter(is_over).collect();
        if over.is_empty() {
            return;
        }
        for &txn in &over {
            self.unwatch(txn);
        }
        self.change(Change::Forget(over), world);
    }

    /// A majority of a participant's replicas has forgotten a transaction of this record: it had
    /// ended, and its effects came with the data that this replica copied. So this replica forgets
    /// it as well.
    pub(super) fn drop_forgotten(&mut self, txn: TxnId, world: &mut World<'_, '_>) {
        if self.state.entries.get(&txn).is_some_and(|entry| entry.ended.is_none()) {
            world.cx.note(Note::Forgotten);
            self.change(
                Change::Acknowledge(vec![(txn.client, txn.counter.saturating_add(1))]),
                world,
            );
            self.change(Change::Forget(vec![txn]), world);
            self.validator.release(txn);
            self.unwatch(txn);
        }
    }

    /// §5.2.3: from now on only the node that takes over is followed. If this replica does not know
    /// the transaction, it refuses it from now on (R1).
    fn on_coordinator_change(
        &mut self,
        from: NodeId,
        txn: TxnId,
        ballot: Ballot,
        participants: Vec<PartitionId>,
        world: &mut World<'_, '_>,
    ) {
        let held = self.state.entries.get(&txn);
        let is_over = held.is_some_and(|entry| entry.ended.is_some());
        let mut answer = self.answer(txn);
        if held.is_none() && self.state.is_acknowledged(txn) {
            // Its client has acknowledged it, so it is refused anyway, and nothing needs to be
            // stored.
            answer.promised = ballot;
        } else if !is_over {
            let promised = held.map_or_else(Ballot::default, |entry| entry.promised);
            if promised == ballot {
                // A repetition; or the same node has restarted and forgotten its request, and will
                // ask again.
                return;
            }
            if promised < ballot {
                world.cx.note(if held.is_some() { Note::Promised } else { Note::Tombstone });
                self.change(Change::Promise { txn, participants, ballot }, world);
                self.watch(txn, world);
            }
            answer = self.answer(txn);
        }
        let part = self.state.entries.get(&txn).and_then(|entry| entry.part.clone());
        let partition = self.id;
        world.reply(from, Msg::CoordinatorChangeReply { txn, partition, answer, part });
    }

    /// A read-only transaction at `timestamp`: later writers of these keys must have later
    /// timestamps.
    fn on_read_only(
        &mut self,
        from: NodeId,
        txn: TxnId,
        keys: Vec<Key>,
        timestamp: Timestamp,
        world: &mut World<'_, '_>,
    ) {
        let is_too_much = world.is_too_much(self.id, &keys);
        let is_far = self.is_far_future(timestamp, world);
        if has_fence(&keys) && !is_too_much && !is_far {
            // A scan reads all keys of the partition, in effect, and those that are absent too. No
            // transaction prepares here before it from now on; and it waits for those that have.
            self.validator.raise_floor(timestamp);
            if self.validator.is_any_pending(timestamp) && self.scans.len() < SCANS_MAX {
                let read = ScanRead { from, txn, keys, timestamp };
                if !self.scans.contains(&read) {
                    self.scans.push(read);
                }
                return;
            }
        }
        let is_refused = is_too_much
            || is_far
            || (has_fence(&keys) && self.validator.is_any_pending(timestamp))
            || self.validator.is_pending(&keys, timestamp);
        let reads = if is_refused {
            None
        } else {
            for key in &keys {
                self.validator.read(key, timestamp);
            }
            if timestamp > self.state.ceiling {
                let ceiling = timestamp + world.config.ceiling_ahead;
                self.change(Change::Ceiling(ceiling), world);
            }
            snapshot((self.id, world.store), keys, timestamp)
        };
        let partition = self.id;
        let result = Msg::ReadOnlyResult { txn, partition, timestamp, reads, is_too_much };
        world.reply(from, result);
    }

    /// Answers the scans that need not wait any more. Some of the transactions for which they waited
    /// have ended. A scan whose replica has left its view is answered by other replicas.
    pub(super) fn serve_scans(&mut self, world: &mut World<'_, '_>) {
        if self.status != Status::Normal {
            self.scans.clear();
            return;
        }
        let validator = &self.validator;
        let is_free = |read: &mut ScanRead| !validator.is_any_pending(read.timestamp);
        let free: Vec<ScanRead> = self.scans.extract_if(.., is_free).collect();
        for ScanRead { from, txn, keys, timestamp } in free {
            self.on_read_only(from, txn, keys, timestamp, world);
        }
    }

    /// The names that this replica has. None if its record or its data may be incomplete.
    pub(super) fn names(&self, ask: &Ask, store: &Store) -> Option<Listing> {
        if self.status != Status::Normal {
            return None;
        }
        let voters = vec![Voters { nodes: self.replicas.clone() }];
        let basis = Basis::Voter { since: 0, voters };
        if let Some(after) = ask.changes_after {
            let closed = self.validator.written_until();
            return Some(Listing::of_changes(store, [self.id], (ask, after), closed, basis));
        }
        let open = self.state.entries.values().filter(|entry| entry.ended.is_none());
        let written = open.filter_map(|entry| entry.part.as_ref());
        let written = written.flat_map(|part| part.writes.keys());
        let pending = written.filter(|key| ask.range.contains(key)).cloned();
        Some(Listing::of(store, [self.id], pending, ask, basis))
    }

    /// Schedules a check of `txn`: if it has not ended by then, its gateway is gone; if it has
    /// ended, it is still in the record.
    fn watch(&mut self, txn: TxnId, world: &mut World<'_, '_>) {
        if self.watched.contains_key(&txn) {
            return;
        }
        let timeout = self.turn(txn, world);
        let now = world.cx.now();
        let watch = Watch { at: now + timeout, since: now, times: 0 };
        self.watched.insert(txn, watch);
        self.due.insert((watch.at, txn));
    }

    /// How long after its first message about `txn` this replica takes it over.
    fn turn(&self, txn: TxnId, world: &World<'_, '_>) -> Duration {
        let participants = self.state.entries.get(&txn).map_or(&[][..], |e| &e.participants);
        // The replicas of the first participant, in turn; then all others (§5.2.3).
        let turn = |nodes: &[NodeId]| nodes.iter().position(|&node| node == world.node);
        let mut rank = turn(&self.replicas).unwrap_or(0);
        if participants.first() != Some(&self.id) {
            rank += self.replicas.len();
        }
        let rank = u32::try_from(rank).unwrap_or(u32::MAX);
        world.config.takeover_after + world.config.takeover_step * rank
    }

    fn unwatch(&mut self, txn: TxnId) {
        if let Some(watch) = self.watched.remove(&txn) {
            self.due.remove(&(watch.at, txn));
        }
    }

    /// Transactions to take over, with the highest ballot received.
    pub(super) fn overdue(
        &mut self,
        world: &mut World<'_, '_>,
    ) -> Vec<(TxnId, Vec<PartitionId>, Ballot)> {
        let now = world.cx.now();
        let mut overdue = Vec::new();
        while let Some(&(at, txn)) = self.due.first() {
            if at > now || overdue.len() >= TAKEOVERS_AT_ONCE {
                break;
            }
            self.due.pop_first();
            let Some(watch) = self.watched.get_mut(&txn) else { continue };
            let Some(entry) = self.state.entries.get(&txn) else { continue };
            watch.times += 1;
            let pause = world.config.takeover_after * (1 << watch.times.min(3));
            let jitter = world.cx.rng().below(1 + u64::try_from(pause.as_nanos()).unwrap_or(0) / 2);
            watch.at = now + pause + Duration::from_nanos(jitter);
            self.due.insert((watch.at, txn));
            let since = watch.since;
            // A transaction that has ended stays until its client knows the outcome, or is gone for
            // ever.
            let is_kept = entry.ended.is_some()
                && !self.state.is_acknowledged(txn)
                && now.since(since) < world.config.retention
                && !self.is_too_much(since, world);
            if self.status == Status::Normal && !is_kept {
                overdue.push((txn, entry.participants.clone(), entry.promised));
            }
        }
        overdue
    }

    /// This node has driven `txn` to its end everywhere: whether it may leave the record.
    pub(super) fn may_forget(&self, txn: TxnId, world: &World<'_, '_>) -> Option<u64> {
        let below = below_of(&self.state.acknowledged, txn.client);
        if txn.counter < below {
            return Some(below);
        }
        let watch = self.watched.get(&txn)?;
        let is_old = world.cx.now().since(watch.since) >= world.config.retention;
        (is_old || self.is_too_much(watch.since, world)).then_some(txn.counter.saturating_add(1))
    }

    /// True if the record exceeds its bound and this replica has watched the transaction `since` a
    /// time long enough ago: eight times the time until a take-over. A slow gateway asks for the
    /// outcome meanwhile; otherwise it would have to report an unknown outcome.
    fn is_too_much(&self, since: Time, world: &World<'_, '_>) -> bool {
        let grace = world.config.takeover_after * 8;
        self.entries_bytes > world.config.kept_bytes && world.cx.now().since(since) >= grace
    }

    /// Periodic work.
    pub(super) fn on_sweep_timeout(&mut self, world: &mut World<'_, '_>) {
        let now = world.cx.now();
        self.validator.collect();
        let is_normal = self.status == Status::Normal;
        if is_normal && now.since(self.installed) >= world.config.view_timeout * 8 {
            self.views_failed = 0;
        }
        if now.since(self.gossiped) >= world.config.gossip_interval {
            self.gossiped = now;
            for to in self.peers(world.node) {
                world.send(to, self.gossip());
            }
        }
        self.repeat_offer(world);
        self.leave_behind(world);
        if let Status::Copying { start, asked } = &self.status
            && now.since(*asked) >= world.config.resend_after
        {
            let start = start.clone();
            self.fetch(start, world);
        }
        world.cx.set_timer(Timer::Sweep(self.id), now + world.config.sweep_interval);
    }

    fn peers(&self, me: NodeId) -> Vec<NodeId> {
        self.replicas.iter().copied().filter(|&node| node != me).collect()
    }

    fn gossip(&self) -> Msg {
        let is_normal = !matches!(self.status, Status::Changing { .. });
        Msg::Gossip { partition: self.id, view: self.state.view, is_normal }
    }

    /// The record must not grow for ever because a replica does not come back: the next view does
    /// not count it.
    fn leave_behind(&mut self, world: &mut World<'_, '_>) {
        let is_leader = self.state.view.leader(&self.replicas) == world.node;
        if self.status != Status::Normal || !is_leader {
            return;
        }
        let is_silent = |node: &NodeId| !self.is_here(*node, world.config.absence_after, world);
        let silent = self.replicas.iter().filter(|node| is_silent(node)).count();
        let is_counted_on = self.state.synced.keys().any(is_silent);
        if is_counted_on && self.quorums.replicas() - silent >= self.quorums.slow() {
            world.cx.note(Note::LeftBehind);
            self.enter(self.next_view(world), world);
        }
    }

    /// Only a view change can determine the result of an operation.
    pub(super) fn resolve_uncertain(&mut self, world: &mut World<'_, '_>) {
        if self.status == Status::Normal {
            world.cx.note(Note::Uncertain);
            self.enter(self.next_view(world), world);
        }
    }

    pub(super) fn assert_invariants(&self) {
        for txn in self.validator.prepared() {
            let entry = self.state.entries.get(&txn);
            assert!(
                entry.is_some_and(|entry| entry.held_at().is_some()),
                "{}: {txn} holds keys and is not prepared",
                self.id
            );
            assert!(
                entry.is_none_or(|e| e.cast.is_none_or(|cast| cast.ballot <= e.promised)),
                "{}: {txn} was voted on below the promise",
                self.id
            );
        }
        assert!(
            self.status != Status::Normal
                || (self.state.view == self.state.normal_view && self.state.is_whole),
            "{} serves in a view it is not part of",
            self.id
        );
    }
}

/// The most transactions that one sweep of a replica takes over.
const TAKEOVERS_AT_ONCE: usize = 64;
