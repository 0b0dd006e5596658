//! Carousel Fast at a replica: votes on the fast path (§4.2), reads from followers (§4.4.1), and
//! how a new leader processes the lists of its group (§4.3.3).

use std::collections::VecDeque;
use std::sync::Arc;

use orthodrome_core::Wire as _;
use orthodrome_core::id::{NodeId, PartitionId, Ticket, TxnId};
use orthodrome_core::limits::Pieces;
use orthodrome_core::locks::PendingKeys;
use orthodrome_core::machine::Leak;
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::time::{Time, Timestamp};
use orthodrome_core::txn::{AbortReason, Key, Version};

use super::cpc::{FastVote, LIST_MAX, Listed, PendingList, examine};
use super::leader::{Leading, Partition, World};
use super::message::{Command, Log, Msg, Vote};
use super::participant::Prepare;
use super::state::{Prepared, State};
use super::{Note, Timer};
use crate::portions::{Assembly, Portion};
use crate::replication::{Replica, Term};
use crate::waiting::BATCH;

/// A replica's state for the fast path.
#[derive(Debug, Default)]
pub struct Fast {
    /// Transactions that it prepared and that the log has not settled.
    pub list: PendingList,
    /// A new leader's progress with the lists of its group.
    pub recovery: Option<Recovery>,
    /// The sets of [`State::prepared`].
    prepared: PendingKeys,
    /// Messages to send when a record is durable, in the order of the records.
    waiting: VecDeque<(Ticket, Waiting)>,
}

#[derive(Debug)]
enum Waiting {
    /// A vote, and its term.
    Vote { coordinator: PartitionId, term: Term, vote: Box<Msg> },
    /// This replica's list, for the leader of this term.
    List { to: NodeId, term: Term },
}

/// A new leader's progress with §4.3.3. Until it is done, requests wait.
#[derive(Debug)]
pub enum Recovery {
    /// Steps 1 and 2: lists arrive, by voter, while the log is being completed.
    Collecting {
        /// Complete lists.
        lists: OrdMap<NodeId, Vec<(TxnId, Listed)>>,
        /// Lists of which only parts have arrived.
        arriving: OrdMap<NodeId, Assembly<Vec<(TxnId, Listed)>>>,
        /// True if the log is complete: the first entry of this term is chosen.
        is_complete: bool,
    },
    /// Step 5: these transactions are in the log and not chosen yet.
    Replicating(OrdSet<TxnId>),
}

impl Fast {
    /// State that must disappear when nothing is pending.
    pub(super) fn leaks(&self) -> Vec<Leak> {
        vec![
            ("listed transactions", self.list.len()),
            ("votes and lists not sent", self.waiting.len()),
            ("recoveries", usize::from(self.recovery.is_some())),
        ]
    }

    /// The whole replicated state was replaced.
    pub(super) fn reindex(&mut self, state: &State) {
        self.prepared = PendingKeys::default();
        for (&txn, prepared) in &state.prepared {
            let reads = prepared.versions.iter().map(|(key, _)| key);
            self.prepared.insert(txn, reads, prepared.writes.iter());
        }
        let is_known = |txn: &TxnId| state.prepared.contains_key(txn) || state.is_over(*txn);
        let known: Vec<TxnId> = self.list.txns().filter(is_known).collect();
        for txn in known {
            self.list.remove(txn);
        }
    }

    /// The next entry of the log is about to be applied to `state`.
    pub(super) fn before_apply(&mut self, command: &Command, state: &State, keeps_ended: bool) {
        let (Command::Prepare { txn, .. } | Command::Refuse { txn, .. } | Command::End { txn, .. }) =
            command
        else {
            return;
        };
        let held = state.prepared.get(txn);
        match command {
            Command::Prepare { versions, writes, .. } => {
                if held.is_none() && !state.ended.contains_key(txn) {
                    let reads = versions.iter().map(|(key, _)| key);
                    self.prepared.insert(*txn, reads, writes.iter());
                }
            }
            Command::End { .. } => {
                if let Some(held) = held {
                    self.prepared.remove(*txn, held.keys());
                }
            }
            Command::Refuse { .. }
            | Command::Coordinate { .. }
            | Command::RequestCommit { .. }
            | Command::Decide { .. }
            | Command::Settle(_)
            | Command::Forget(_)
            | Command::Acknowledge(_)
            | Command::Ceiling(_) => {}
        }
        let is_kept = |listed: &Listed| keeps_ended && listed.prepared.writes.is_empty();
        if !self.list.get(*txn).is_some_and(is_kept) {
            self.list.remove(*txn);
        }
    }
}

/// The latest versions at this replica.
pub(super) fn versions(
    partition: PartitionId,
    keys: Vec<Key>,
    world: &World<'_>,
) -> Vec<(Key, Version)> {
    let version = |key: Key| {
        let version = world.store.read(partition, &key).compared();
        (key, version)
    };
    keys.into_iter().map(version).collect()
}

/// A replica's vote on the fast path, as leader or follower.
pub(super) struct Ballot {
    partition: PartitionId,
    term: Term,
    /// The voters, if this is the leader's vote.
    voters: Option<Vec<NodeId>>,
}

impl Ballot {
    pub(super) fn new(
        partition: PartitionId,
        replica: &Replica<Log>,
        voters: Option<Vec<NodeId>>,
    ) -> Self {
        Self { partition, term: replica.term(), voters }
    }

    /// Adds a transaction to the list, and votes for it once the entry is durable (R4).
    pub(super) fn vote(
        self,
        txn: TxnId,
        prepared: Prepared,
        own: &mut Fast,
        world: &mut World<'_>,
    ) {
        let Self { partition, term, voters } = self;
        let coordinator = prepared.coordinator;
        let vote = FastVote { term, vote: prepared.vote(), voters };
        let vote = Msg::FastPrepareResult { txn, coordinator, partition, vote };
        let listed = Listed { term, prepared };
        if world.config.mutations.votes_volatile() {
            own.list.insert(txn, listed, world.cx.now());
            world.send_to_leader(coordinator, vote);
            return;
        }
        let bytes = listed.size();
        let record = (txn, listed.clone());
        own.list.insert(txn, listed, world.cx.now());
        let ticket = world.persist(partition, record, bytes);
        let vote = Box::new(vote);
        own.waiting.push_back((ticket, Waiting::Vote { coordinator, term, vote }));
    }

    /// A refusal promises nothing, so it is sent at once.
    pub(super) fn refuse(
        self,
        txn: TxnId,
        coordinator: PartitionId,
        reason: AbortReason,
        world: &mut World<'_>,
    ) {
        let Self { partition, term, voters } = self;
        let vote = FastVote { term, vote: Vote::Refused(reason), voters };
        world.send_to_leader(
            coordinator,
            Msg::FastPrepareResult { txn, coordinator, partition, vote },
        );
    }
}

impl Partition {
    /// This replica starts, with the list that its records give.
    pub(super) fn on_opened(&mut self, records: Vec<(TxnId, Listed)>, world: &mut World<'_>) {
        let is_listing = !records.is_empty();
        for (txn, listed) in records {
            self.own.list.supersede(txn);
            self.own.list.insert(txn, listed, world.cx.now());
        }
        self.own.reindex(&self.state);
        if is_listing {
            self.set_sweep_timer(world);
        }
    }

    /// §4.2, for a follower: prepares and votes; and §4.4.1: answers with its values.
    pub(super) fn on_follower_prepare(
        &mut self,
        client: NodeId,
        prepare: Prepare,
        world: &mut World<'_>,
    ) {
        let txn = prepare.txn;
        if !self.replica.voters().contains(&world.node) {
            // Its values may be old, and its vote does not count. A gateway that takes it for the
            // leader, or for the closest voter, must choose another.
            if prepare.wants_reads {
                let (partition, leader) = (self.id, self.replica.leader());
                world.send(client, Msg::NotLeader { partition, leader, txn: Some(txn) });
            }
            return;
        }
        // If the values exceed the size of an answer, the leader refuses the transaction.
        if prepare.wants_reads && !world.is_too_much(self.id, &prepare.participant.reads) {
            let keys = prepare.participant.reads.iter().cloned();
            let reads = keys
                .map(|key| {
                    let read = world.store.read(self.id, &key);
                    (key, read)
                })
                .collect();
            let leader = self.replica.leader();
            let partition = self.id;
            world.send(client, Msg::FollowerReadResult { txn, partition, reads, leader });
        }
        if self.state.is_over(txn) {
            world.cx.note(Note::LatePrepare);
            return;
        }
        if self.state.prepared.contains_key(&txn) || self.own.list.get(txn).is_some() {
            return;
        }
        self.own.list.supersede(txn);
        let (reads, writes) = (&prepare.participant.reads, &prepare.participant.writes);
        let is_free = self.own.list.conflict(txn, reads, writes).is_none()
            && self.own.prepared.conflict(txn, reads, writes).is_none()
            && self.own.list.len() < LIST_MAX;
        if !is_free && prepare.participant.floor != Timestamp::ZERO {
            // The leader may wait for a commit that the client knows (R11). That is no reason to
            // refuse.
            return;
        }
        let Some(proposal) = prepare.timestamp.filter(|_| is_free) else {
            let (ballot, coordinator) =
                (Ballot::new(self.id, &self.replica, None), prepare.coordinator);
            ballot.refuse(txn, coordinator, AbortReason::Conflict, world);
            return;
        };
        let versions = Arc::new(versions(self.id, prepare.participant.reads, world));
        let (coordinator, writes) = (prepare.coordinator, Arc::new(prepare.participant.writes));
        let prepared = Prepared { coordinator, versions, writes, proposal };
        let was_empty = self.own.list.len() == 0;
        Ballot::new(self.id, &self.replica, None).vote(txn, prepared, &mut self.own, world);
        if was_empty {
            self.set_sweep_timer(world);
        }
    }

    /// Everything persisted up to `ticket` is durable.
    pub(super) fn on_durable(&mut self, ticket: Ticket, world: &mut World<'_>) {
        while let Some((due, _)) = self.own.waiting.front() {
            if *due > ticket {
                return;
            }
            match self.own.waiting.pop_front() {
                Some((_, Waiting::Vote { coordinator, term, vote })) => {
                    // R5: a term that has ended has been collected, or will be; its votes are
                    // frozen.
                    if term == self.replica.term() || world.config.mutations.terms_ignored() {
                        world.send_to_leader(coordinator, *vote);
                    }
                }
                Some((_, Waiting::List { to, term })) => self.send_list(to, term, world),
                None => return,
            }
        }
    }

    /// C7: a new leader asks for the list. A member answers only when it has reached the leader's
    /// term, and then votes in no earlier term any more. The leader will know the member's votes in
    /// its own term.
    pub(super) fn on_collect_pending(&mut self, from: NodeId, term: Term, world: &mut World<'_>) {
        if self.replica.term() != term {
            return;
        }
        match world.last_ticket(self.id) {
            Some(ticket) => {
                self.own.waiting.push_back((ticket, Waiting::List { to: from, term }));
            }
            None => self.send_list(from, term, world),
        }
    }

    fn send_list(&self, to: NodeId, term: Term, world: &mut World<'_>) {
        if self.replica.term() != term {
            return;
        }
        let mut parts = Pieces::new(Vec::new(), world.config.hosting.batch_bytes);
        for (txn, listed) in self.frozen(term) {
            parts.of(6 + listed.size()).push((txn, listed));
        }
        let partition = self.id;
        for (portion, listed) in Portion::number(parts.finish(), world.cx.now()) {
            world.send(to, Msg::PendingList { partition, term, listed, portion });
        }
    }

    /// The part of the list from earlier terms.
    fn frozen(&self, term: Term) -> Vec<(TxnId, Listed)> {
        let frozen = self.own.list.iter().filter(|(_, listed)| listed.term < term);
        frozen.map(|(txn, listed)| (txn, listed.clone())).collect()
    }

    /// §4.3.3 step 1: this replica was elected. It collects lists while the log is completed.
    pub(super) fn begin_recovery(&mut self, world: &mut World<'_>) {
        let lists = OrdMap::from([(world.node, self.frozen(self.replica.term()))]);
        let (arriving, is_complete) = (OrdMap::new(), false);
        self.own.recovery = Some(Recovery::Collecting { lists, arriving, is_complete });
        self.collect(world);
        self.set_sweep_timer(world);
    }

    /// Asks the voters whose lists are missing.
    pub(super) fn collect(&self, world: &mut World<'_>) {
        // The lists are complete already, or this replica does not lead any more.
        let Some(Recovery::Collecting { lists, .. }) = &self.own.recovery else { return };
        let (partition, term) = (self.id, self.replica.term());
        for &voter in self.replica.voters() {
            if !lists.contains_key(&voter) {
                world.send(voter, Msg::CollectPending { partition, term });
            }
        }
    }

    pub(super) fn on_pending_list(
        &mut self,
        from: NodeId,
        term: Term,
        (portion, listed): (Portion, Vec<(TxnId, Listed)>),
        world: &mut World<'_>,
    ) {
        if term != self.replica.term() {
            return;
        }
        if let Some(Recovery::Collecting { lists, arriving, .. }) = &mut self.own.recovery
            && let Some(parts) = arriving.entry(from).or_default().add(portion, listed)
        {
            lists.insert(from, parts.concat());
            self.try_recover(world);
        }
    }

    /// §4.3.3 step 2: everything that earlier leaders left in the log has been applied.
    pub(super) fn on_log_complete(&mut self, world: &mut World<'_>) {
        if self.own.recovery.is_none() {
            self.begin_recovery(world);
        }
        if let Some(Recovery::Collecting { is_complete, .. }) = &mut self.own.recovery {
            *is_complete = true;
            self.try_recover(world);
        }
    }

    /// Steps 3 to 5, once the log is complete and the lists of a majority have arrived.
    fn try_recover(&mut self, world: &mut World<'_>) {
        let Some(Recovery::Collecting { lists, is_complete: true, .. }) = &mut self.own.recovery
        else {
            return;
        };
        let voters = self.replica.voters().len();
        lists.retain(|node, _| self.replica.voters().contains(node));
        // Votes count only in a settled membership, and a change of members is in the log behind
        // every prepare that had votes. So during a change, the log says everything.
        let is_joint = self.replica.members().is_joint();
        if !is_joint && lists.len() <= voters / 2 {
            return;
        }
        let lists = if is_joint { OrdMap::new() } else { std::mem::take(lists) };
        self.own.recovery = Some(Recovery::Replicating(OrdSet::new()));
        let ignore_terms = world.config.mutations.terms_ignored();
        let examined = examine(&lists, voters, |one, other| {
            one.prepared == other.prepared && (ignore_terms || one.term == other.term)
        });
        self.on_leading(examined, world);
        self.finish_recovery(world);
    }

    /// A transaction of step 5 is chosen.
    pub(super) fn on_recovered(&mut self, txn: TxnId, world: &mut World<'_>) {
        // Most transactions are chosen outside of recovery.
        let Some(Recovery::Replicating(left)) = &mut self.own.recovery else { return };
        if left.remove(&txn)
            && world.config.mutations.lists_keep_the_ended()
            && let Some(leader) = &mut self.leader
        {
            leader.participation.asked.remove(&txn);
        }
        self.finish_recovery(world);
    }

    /// Once all these transactions are chosen, the leader serves.
    fn finish_recovery(&mut self, world: &mut World<'_>) {
        if matches!(&self.own.recovery, Some(Recovery::Replicating(left)) if left.is_empty()) {
            self.own.recovery = None;
            self.serve_early(world);
        }
    }

    /// Overdue entries of the list: those that have ended are removed, and the leader is asked
    /// about the others.
    pub(super) fn sweep_list(&mut self, world: &mut World<'_>) {
        if world.config.mutations.lists_keep_the_ended() {
            return;
        }
        let over: Vec<TxnId> =
            self.own.list.txns().filter(|txn| self.state.is_over(*txn)).collect();
        for txn in over {
            self.own.list.remove(txn);
        }
        let txns = self.own.list.overdue(world.cx.now(), world.config.timeouts.query_after);
        if txns.is_empty() {
            return;
        }
        let partition = self.id;
        match self.replica.leader() {
            Some(leader) if leader == world.node => {
                if let Some(mut leading) = self.leading() {
                    leading.on_query_pending(txns, world);
                }
            }
            Some(leader) => {
                for txns in txns.chunks(BATCH) {
                    world.send(leader, Msg::QueryPending { partition, txns: txns.to_vec() });
                }
            }
            None => {}
        }
    }

    pub(super) fn set_sweep_timer(&self, world: &mut World<'_>) {
        let next: Time = world.cx.now() + world.config.timeouts.sweep_interval;
        world.cx.set_timer(Timer::Sweep(self.id), next);
    }
}

impl Leading<'_> {
    /// Steps 4 and 5: a transaction that a supermajority may have prepared is prepared now, in the
    /// log, before any other entry. The others are refused.
    pub(super) fn replicate_recovered(
        &mut self,
        examined: OrdMap<TxnId, (Prepared, bool)>,
        world: &mut World<'_>,
    ) {
        for (txn, (prepared, is_enough)) in examined {
            if self.state.prepared.contains_key(&txn) || self.is_finished(txn, world) {
                continue;
            }
            let is_recovered = is_enough && self.may_have_prepared(txn, &prepared, world);
            world.cx.note(match (is_enough, is_recovered) {
                (true, true) => Note::FastRecovered,
                (true, false) => Note::FastExcluded,
                (false, _) => Note::FastNotRecovered,
            });
            if let Some(Recovery::Replicating(left)) = &mut self.own.recovery {
                left.insert(txn);
            }
            if is_recovered {
                self.prepare_in_log(txn, prepared, 0, world);
            } else {
                self.refuse(txn, prepared.coordinator, AbortReason::Recovery, world);
            }
        }
    }

    /// C8: it has ended, and replicas that still list it lag behind.
    fn is_finished(&self, txn: TxnId, world: &World<'_>) -> bool {
        if world.config.mutations.lists_keep_the_ended() {
            return self.state.ended.contains_key(&txn);
        }
        self.state.is_over(txn)
    }

    /// Step 4: could the earlier leader have voted for it? Not if it conflicts with an earlier
    /// entry of that leader in the log; nor if it read other versions than the latest there; nor if
    /// its timestamp was not above every commit and every ceiling there. This log has no entry that
    /// the leader made after such a vote, because it would then also have the prepare.
    fn may_have_prepared(&self, txn: TxnId, listed: &Prepared, world: &World<'_>) -> bool {
        let reads: Vec<Key> = listed.versions.iter().map(|(key, _)| key.clone()).collect();
        let is_latest =
            |(key, version): &(Key, Version)| world.store.read(self.id, key).compared() == *version;
        self.leader.pending.conflict(txn, &reads, &listed.writes).is_none()
            && listed.versions.iter().all(is_latest)
            && (listed.proposal > self.leader.logged
                || world.config.mutations.lists_keep_the_ended())
    }

    /// C9, C10: a follower, or this leader itself, has had these for long.
    pub(super) fn on_query_pending(
        &mut self,
        txns: Vec<(TxnId, PartitionId)>,
        world: &mut World<'_>,
    ) {
        for (txn, coordinator) in txns {
            let is_known = self.state.prepared.contains_key(&txn)
                || self.state.is_over(txn)
                || self.leader.participation.preparing.contains_key(&txn)
                || self.leader.participation.ending.contains(&txn);
            if !is_known {
                world.cx.note(Note::Orphan);
                self.refuse(txn, coordinator, AbortReason::Recovery, world);
            }
        }
    }
}
