//! A partition's leader as coordinator, as in Carousel's basic protocol: gather the commit request and
//! the votes, decide, tell, and see the decision through (Carousel §4.1.2, §4.1.3, §4.3.1, §4.3.3).

use std::collections::{BTreeMap, BTreeSet};

use orthodrome_core::id::{NodeId, PartitionId, TxnId};
use orthodrome_core::time::Time;
use orthodrome_core::txn::{AbortReason, Outcome, Read, Version};

use super::leader::{Coordinating, Forward, Leader, Partition, World};
use super::message::{Command, Msg, Vote};
use super::state::{Coordinated, Request, decide, is_refuted};
use super::{Note, Timer};
use crate::acknowledged::overdue;
use crate::carousel::Verdict;
use crate::waiting::{RetryState, take_batch};

impl Coordinating {
    fn new(now: Time) -> Self {
        Self {
            client: None,
            votes: BTreeMap::new(),
            requested: 0,
            withdrawn: None,
            forwards: Vec::new(),
            is_decision_proposed: false,
            outcome: None,
            is_told: false,
            acks: BTreeSet::new(),
            heard: now,
            asked: RetryState::new(now),
        }
    }
}

impl Coordinating {
    /// A participant's vote. One on a condition never takes the place of one without, whatever their
    /// order on the way.
    fn hear(&mut self, partition: PartitionId, vote: Vote) {
        if self.has_settled(partition) && !is_settled(&vote) {
            return;
        }
        self.votes.insert(partition, vote);
    }

    /// True if the participant's vote is here and will not change.
    fn has_settled(&self, partition: PartitionId) -> bool {
        self.votes.get(&partition).is_some_and(is_settled)
    }
}

fn is_settled(vote: &Vote) -> bool {
    match vote {
        Vote::Prepared { unless, .. } => unless.is_empty(),
        Vote::Refused(_) | Vote::Committed(_) => true,
    }
}

/// Who takes part in a transaction, as far as this group's log says.
fn partitions_of(known: Option<&Coordinated>) -> Vec<PartitionId> {
    known.into_iter().flat_map(|known| known.participants.iter().copied()).collect()
}

impl Leader {
    fn coordinating(&mut self, txn: TxnId, now: Time) -> &mut Coordinating {
        self.coordinating.entry(txn).or_insert_with(|| Coordinating::new(now))
    }
}

impl Partition {
    /// Carousel §4.1.4: replicate who takes part.
    pub(super) fn on_coordinator_prepare(
        &mut self,
        client: NodeId,
        txn: TxnId,
        participants: Vec<PartitionId>,
        acknowledged_below: u64,
        world: &mut World<'_>,
    ) {
        if self.is_forgotten(txn) {
            self.tell_forgotten(client, txn, world);
            return;
        }
        if self.answer_if_decided(client, txn, world) {
            // A refusal came before anybody had said who takes part; the others hold locks.
            for partition in participants {
                let verdict = match self.state.decision(txn) {
                    Some(Outcome::Aborted(reason)) => Verdict::Abort(reason),
                    Some(Outcome::Committed(_) | Outcome::Unknown) | None => continue,
                };
                let end = Msg::Writeback { txn, partition, coordinator: self.id, verdict };
                world.send_to_leader(partition, end);
            }
            return;
        }
        let now = world.cx.now();
        let Some(leader) = &mut self.leader else { return };
        let coordinating = leader.coordinating(txn, now);
        coordinating.heard = now;
        let is_repeated = coordinating.client.replace(client).is_some();
        if !is_repeated && !self.state.coordinated.contains_key(&txn) {
            self.propose(Command::Coordinate { txn, participants, acknowledged_below }, world);
        }
    }

    /// Carousel §4.1.2: replicate the commit request. A later one of the same client rests on later reads,
    /// and takes the place of the one before (N5).
    pub(super) fn on_commit(
        &mut self,
        client: NodeId,
        txn: TxnId,
        participants: Vec<PartitionId>,
        request: Request,
        world: &mut World<'_>,
    ) {
        if self.answer_if_decided(client, txn, world) {
            return;
        }
        if self.state.is_acknowledged(txn) {
            self.tell_forgotten(client, txn, world);
            return;
        }
        let now = world.cx.now();
        let Some(leader) = &mut self.leader else { return };
        let coordinating = leader.coordinating(txn, now);
        coordinating.client = Some(client);
        coordinating.heard = now;
        let Request { writes, versions, round, is_provisional } = request;
        if coordinating.requested >= round || coordinating.is_decision_proposed {
            return;
        }
        coordinating.requested = round;
        let command =
            Command::RequestCommit { txn, participants, writes, versions, round, is_provisional };
        self.propose(command, world);
    }

    /// Carousel §4.1.2: the application gave up before it asked to commit; or its client asked on reads
    /// that did not hold.
    pub(super) fn on_abort(
        &mut self,
        client: NodeId,
        (txn, round): (TxnId, u32),
        participants: Vec<PartitionId>,
        reason: AbortReason,
        world: &mut World<'_>,
    ) {
        if self.answer_if_decided(client, txn, world) {
            return;
        }
        if self.state.is_acknowledged(txn) {
            self.tell_forgotten(client, txn, world);
            return;
        }
        let now = world.cx.now();
        let Some(leader) = &mut self.leader else { return };
        let coordinating = leader.coordinating(txn, now);
        coordinating.client = Some(client);
        if coordinating.requested > round {
            // The caller lost track of a commit request of its own; that one decides.
            return;
        }
        if coordinating.requested > 0 {
            coordinating.withdrawn = Some(reason);
            self.abort_if_refuted(txn, world);
            return;
        }
        self.abort_unilaterally(txn, reason, participants, world);
    }

    /// N5: a request that can never be committed, because a participant holds other versions for good,
    /// may be aborted by this group's log, unless the client's next request comes before.
    fn abort_if_refuted(&mut self, txn: TxnId, world: &mut World<'_>) {
        let Some(leader) = &self.leader else { return };
        let Some(coordinating) = leader.coordinating.get(&txn) else { return };
        let Some(known) = self.state.coordinated.get(&txn) else { return };
        let Some(request) = &known.request else { return };
        let is_last = request.round == coordinating.requested;
        if is_last && is_refuted(request, coordinating.votes.values()) {
            let reason = coordinating.withdrawn.unwrap_or(AbortReason::StaleRead);
            world.cx.note(Note::StaleVersions);
            self.abort_unilaterally(txn, reason, vec![], world);
        }
    }

    /// §3.4, RECSF: somebody waits for what `of` writes.
    pub(super) fn on_forward_read(&mut self, of: TxnId, forward: Forward, world: &mut World<'_>) {
        let Some(leader) = &mut self.leader else { return };
        let decided = leader.coordinating.get(&of).and_then(|coordinating| coordinating.outcome);
        if decided.is_some() {
            self.answer_forwards(of, vec![forward], world);
        } else if let Some(coordinating) = leader.coordinating.get_mut(&of) {
            coordinating.forwards.push(forward);
        }
        // Else nothing is known here, and the participant will answer.
    }

    /// `of` is decided: whoever waits for its writes has them, if it commits. If it does not, what is
    /// read is another's affair (N9).
    fn answer_forwards(&self, of: TxnId, forwards: Vec<Forward>, world: &mut World<'_>) {
        let Some(leader) = &self.leader else { return };
        let Some(coordinating) = leader.coordinating.get(&of) else { return };
        let Some(Outcome::Committed(timestamp)) = coordinating.outcome else { return };
        let request = self.state.coordinated.get(&of).and_then(|known| known.request.as_ref());
        let Some(request) = request else { return };
        let version = Version { timestamp, writer: of };
        for Forward { txn, client, partition, mut reads } in forwards {
            for (key, read) in &mut reads {
                if let Some(value) = request.writes.get(key) {
                    *read = Read { value: value.clone(), version };
                }
            }
            world.send(client, Msg::ForwardedRead { txn, partition, reads });
        }
    }

    /// Carousel §4.3.1: the callers are alive.
    pub(super) fn on_heartbeat(&mut self, txns: &[TxnId], world: &mut World<'_>) {
        let now = world.cx.now();
        let Some(leader) = &mut self.leader else { return };
        for txn in txns {
            if let Some(coordinating) = leader.coordinating.get_mut(txn) {
                coordinating.heard = now;
            }
        }
    }

    /// A client asks what became of a transaction that it did not ask to commit, or lost track of.
    pub(super) fn on_resolve(
        &mut self,
        client: NodeId,
        txn: TxnId,
        participants: Vec<PartitionId>,
        world: &mut World<'_>,
    ) {
        world.cx.note(Note::Resolved);
        if self.answer_if_decided(client, txn, world) {
            return;
        }
        if self.state.is_acknowledged(txn) {
            self.tell_forgotten(client, txn, world);
            return;
        }
        let now = world.cx.now();
        let Some(leader) = &mut self.leader else { return };
        let coordinating = leader.coordinating(txn, now);
        coordinating.client = Some(client);
        if coordinating.requested == 0 {
            self.abort_unilaterally(txn, AbortReason::Recovery, participants, world);
        }
    }

    /// True if nothing is known here any more of a transaction that its client has acknowledged, or whose
    /// outcome was kept for as long as any is.
    fn is_forgotten(&self, txn: TxnId) -> bool {
        self.state.is_acknowledged(txn)
            && self.state.decision(txn).is_none()
            && !self.state.coordinated.contains_key(&txn)
    }

    /// Nobody can tell any more what became of it, and silence would have its client ask for ever.
    fn tell_forgotten(&self, client: NodeId, txn: TxnId, world: &mut World<'_>) {
        world.cx.note(Note::Forgotten);
        world.send(client, Msg::Decided { txn, outcome: Outcome::Unknown });
    }

    /// Tells `client` the outcome, if it may be told already.
    fn answer_if_decided(&mut self, client: NodeId, txn: TxnId, world: &mut World<'_>) -> bool {
        let Some(leader) = &mut self.leader else { return false };
        if let Some(coordinating) = leader.coordinating.get_mut(&txn) {
            coordinating.client = Some(client);
            let Some(outcome) = coordinating.outcome else { return false };
            if coordinating.is_told {
                world.send(client, Msg::Decided { txn, outcome });
            }
            return true;
        }
        if let Some(outcome) = self.state.decision(txn) {
            world.send(client, Msg::Decided { txn, outcome });
            return true;
        }
        false
    }

    /// Carousel §4.1.2: a vote.
    pub(super) fn on_prepare_result(
        &mut self,
        txn: TxnId,
        partition: PartitionId,
        vote: Vote,
        world: &mut World<'_>,
    ) {
        // A client may know, and have acknowledged, what only an earlier leader had decided: such a
        // transaction is still open here, and needs the vote.
        let is_open = self.state.coordinated.contains_key(&txn) || !self.state.is_acknowledged(txn);
        if self.state.settled.contains_key(&txn) || !is_open {
            return;
        }
        let now = world.cx.now();
        let Some(leader) = &mut self.leader else { return };
        let coordinating = leader.coordinating(txn, now);
        coordinating.hear(partition, vote);
        self.try_decide(txn, world);
    }

    /// Carousel §4.1.2: decides, if the durable facts do.
    pub(super) fn try_decide(&mut self, txn: TxnId, world: &mut World<'_>) {
        let Some(leader) = &mut self.leader else { return };
        let Some(coordinating) = leader.coordinating.get_mut(&txn) else { return };
        if coordinating.outcome.is_some() || coordinating.is_decision_proposed {
            // Decided, or about to be by an entry that is in the log already.
            return;
        }
        let known = self.state.coordinated.get(&txn);
        let votes = &coordinating.votes;
        let mut participants = partitions_of(known);
        let request = known.and_then(|known| known.request.as_ref());
        if request.is_none() {
            // A refusal decides even before anybody has said who takes part.
            participants.extend(votes.keys());
        }
        participants.sort_unstable();
        participants.dedup();
        let vote = |partition| votes.get(&partition);
        let decided = decide(participants.iter().copied(), request, vote, world.config.mutations);
        let Some(outcome) = decided else {
            if coordinating.withdrawn.is_some() {
                self.abort_if_refuted(txn, world);
            }
            return;
        };
        if votes
            .values()
            .any(|vote| matches!(vote, Vote::Prepared { unless, .. } if !unless.is_empty()))
        {
            world.cx.note(Note::ConditionProved);
        }
        if outcome == Outcome::Aborted(AbortReason::StaleRead) {
            world.cx.note(Note::StaleVersions);
        }
        coordinating.outcome = Some(outcome);
        coordinating.is_decision_proposed = true;
        self.propose(Command::Decide { txn, outcome, only_after: None, participants }, world);
        self.announce(txn, world);
    }

    /// Tells the client and the participants, once the commit timestamp has passed on every
    /// clock: only then does the order of timestamps agree with real time (C13).
    fn announce(&mut self, txn: TxnId, world: &mut World<'_>) {
        let clock = world.cx.clock();
        let now = world.cx.now();
        let Some(leader) = &mut self.leader else { return };
        let Some(coordinating) = leader.coordinating.get_mut(&txn) else { return };
        let Some(outcome) = coordinating.outcome else { return };
        let forwards = std::mem::take(&mut coordinating.forwards);
        self.answer_forwards(txn, forwards, world);
        let Some(leader) = &mut self.leader else { return };
        let Some(coordinating) = leader.coordinating.get_mut(&txn) else { return };
        if let Outcome::Committed(timestamp) = outcome
            && !clock.has_passed_everywhere(timestamp)
        {
            world.cx.note(Note::CommitWait);
            leader.commit_wait.insert(timestamp, txn);
            self.set_commit_wait_timer(world);
            return;
        }
        coordinating.is_told = true;
        coordinating.asked = RetryState::new(now);
        if let Some(client) = coordinating.client {
            world.send(client, Msg::Decided { txn, outcome });
        }
        self.write_back(txn, None, world);
        // Whoever heard it from an earlier leader may have acknowledged while this one still waited
        // for the timestamp to pass, and owes nothing more.
        self.settle_if_done(txn);
    }

    fn set_commit_wait_timer(&mut self, world: &mut World<'_>) {
        let Some(leader) = &self.leader else { return };
        let next = leader.commit_wait.next(world.cx.clock(), world.cx.now());
        let Some(at) = next else { return };
        world.cx.set_timer(Timer::CommitWait(self.id), at);
    }

    /// The first of the waiting timestamps may have passed.
    pub(super) fn on_commit_wait_timeout(&mut self, world: &mut World<'_>) {
        let Some(leader) = &mut self.leader else { return };
        for txn in leader.commit_wait.pop_passed(world.cx.clock()) {
            self.announce(txn, world);
        }
        self.set_commit_wait_timer(world);
    }

    /// Carousel §4.1.3: tells the decision to every participant that has not acknowledged it,
    /// or only to `only`.
    pub(super) fn write_back(&self, txn: TxnId, only: Option<PartitionId>, world: &mut World<'_>) {
        let Some(leader) = &self.leader else { return };
        let Some(coordinating) = leader.coordinating.get(&txn) else { return };
        let Some(outcome) = coordinating.outcome else { return };
        let known = self.state.coordinated.get(&txn);
        let mut participants = partitions_of(known);
        participants.extend(coordinating.votes.keys());
        participants.retain(|partition| {
            !coordinating.acks.contains(partition) && only.is_none_or(|only| only == *partition)
        });
        participants.sort_unstable();
        participants.dedup();
        let request = known.and_then(|known| known.request.as_ref());
        for partition in participants {
            let verdict = match outcome {
                Outcome::Committed(timestamp) => {
                    let all = request.into_iter().flat_map(|request| &request.writes);
                    let mine = all.filter(|(key, _)| world.cluster.partition_of(key) == partition);
                    let writes = mine.map(|(key, value)| (key.clone(), value.clone())).collect();
                    Verdict::Commit(timestamp, writes)
                }
                Outcome::Aborted(reason) => Verdict::Abort(reason),
                Outcome::Unknown => unreachable!("a decision is a commit or an abort"),
            };
            let writeback = Msg::Writeback { txn, partition, coordinator: self.id, verdict };
            world.send_to_leader(partition, writeback);
        }
    }

    /// A participant has the decision in its log.
    pub(super) fn on_writeback_ack(&mut self, txn: TxnId, partition: PartitionId) {
        let Some(leader) = &mut self.leader else { return };
        let Some(coordinating) = leader.coordinating.get_mut(&txn) else { return };
        coordinating.acks.insert(partition);
        self.settle_if_done(txn);
    }

    /// A decision is in this group's own log: it decides, if nothing else had; and once every
    /// participant has acknowledged it, the transaction is settled.
    pub(super) fn on_decided(&mut self, txn: TxnId, world: &mut World<'_>) {
        let now = world.cx.now();
        let decision = self.state.decision(txn);
        let Some(leader) = &mut self.leader else { return };
        let coordinating = leader.coordinating(txn, now);
        coordinating.is_decision_proposed = true;
        match coordinating.outcome {
            Some(outcome) => {
                assert_eq!(Some(outcome), decision, "{txn} was decided twice (R7)");
            }
            None => {
                coordinating.outcome = decision;
                self.announce(txn, world);
            }
        }
        self.settle_if_done(txn);
    }

    /// These are settled: only those who ask again will hear of them.
    pub(super) fn on_settled(&mut self, txns: &[TxnId], world: &mut World<'_>) {
        let now = world.cx.now();
        let Some(leader) = &mut self.leader else { return };
        for txn in txns {
            leader.coordinating.remove(txn);
            leader.settled_since.insert(*txn, now);
        }
    }

    fn settle_if_done(&mut self, txn: TxnId) {
        let Some(leader) = &mut self.leader else { return };
        let Some(coordinating) = leader.coordinating.get(&txn) else { return };
        let Some(known) = self.state.coordinated.get(&txn) else { return };
        let everybody = known.participants.iter().copied();
        let is_acknowledged = everybody
            .chain(coordinating.votes.keys().copied())
            .all(|partition| coordinating.acks.contains(&partition));
        if known.decision.is_some() && coordinating.is_told && is_acknowledged {
            leader.settling.insert(txn);
        }
    }

    /// R2: an abort that nothing durable implies is made durable before anybody hears of it. It
    /// counts only if no commit request stands before it in the log.
    fn abort_unilaterally(
        &mut self,
        txn: TxnId,
        reason: AbortReason,
        participants: Vec<PartitionId>,
        world: &mut World<'_>,
    ) {
        let now = world.cx.now();
        let Some(leader) = &mut self.leader else { return };
        let coordinating = leader.coordinating(txn, now);
        if std::mem::replace(&mut coordinating.is_decision_proposed, true) {
            return;
        }
        let (outcome, only_after) = (Outcome::Aborted(reason), Some(coordinating.requested));
        self.propose(Command::Decide { txn, outcome, only_after, participants }, world);
    }

    /// C10, R1: a participant has waited long. One that nobody here knows is aborted.
    pub(super) fn on_query_decision(
        &mut self,
        txn: TxnId,
        partition: PartitionId,
        vote: Vote,
        world: &mut World<'_>,
    ) {
        let decided = self.state.settled.get(&txn).copied();
        let is_unknown =
            self.state.is_acknowledged(txn) && !self.state.coordinated.contains_key(&txn);
        if is_unknown || decided.is_some() {
            // Everybody who took part has acknowledged the decision. Whoever still holds the
            // transaction prepared it after its end, so it was not a commit.
            let reason = AbortReason::Recovery;
            let (coordinator, verdict) = (self.id, Verdict::Abort(reason));
            let end = Msg::Writeback { txn, partition, coordinator, verdict };
            world.send_to_leader(partition, end);
            return;
        }
        let now = world.cx.now();
        let Some(leader) = &mut self.leader else { return };
        let is_new = !leader.coordinating.contains_key(&txn);
        let coordinating = leader.coordinating(txn, now);
        coordinating.hear(partition, vote);
        if coordinating.is_told {
            coordinating.acks.remove(&partition);
            self.write_back(txn, None, world);
        } else if is_new && !self.state.coordinated.contains_key(&txn) {
            world.cx.note(Note::QueryAborted);
            self.abort_unilaterally(txn, AbortReason::Recovery, vec![partition], world);
        } else {
            self.try_decide(txn, world);
        }
    }

    /// R6: which of these may a participant forget? Those whose end everybody has acknowledged.
    pub(super) fn on_may_forget(
        &mut self,
        partition: PartitionId,
        txns: Vec<TxnId>,
        world: &mut World<'_>,
    ) {
        let Some(leader) = &self.leader else { return };
        let mut done = Vec::new();
        let mut unknown = Vec::new();
        for txn in txns {
            let is_open =
                self.state.coordinated.contains_key(&txn) || leader.coordinating.contains_key(&txn);
            let is_over = !is_open && self.state.is_acknowledged(txn);
            if is_over || self.state.settled.contains_key(&txn) {
                done.push(txn);
            } else if !is_open {
                unknown.push(txn);
            }
        }
        // Also when there are none: silence would make the participant look elsewhere.
        let forget = Msg::Forget { partition, coordinator: self.id, txns: done };
        world.send_to_leader(partition, forget);
        for txn in unknown {
            // A refusal whose vote was lost together with everything else about the transaction.
            world.cx.note(Note::QueryAborted);
            self.abort_unilaterally(txn, AbortReason::Recovery, vec![partition], world);
        }
    }

    /// Carousel §4.3.3: a new leader takes over what its group coordinates.
    pub(super) fn take_over_coordination(&mut self, world: &mut World<'_>) {
        let now = world.cx.now();
        if self.state.coordinated.is_empty() {
            return;
        }
        world.cx.note(Note::CoordinatorTakeover);
        let all: Vec<TxnId> = self.state.coordinated.keys().copied().collect();
        for txn in all {
            let Some(known) = self.state.coordinated.get(&txn) else { continue };
            let (decision, requested) = (known.decision, known.round());
            let Some(leader) = &mut self.leader else { return };
            let coordinating = leader.coordinating(txn, now);
            coordinating.requested = requested;
            coordinating.outcome = decision;
            coordinating.is_decision_proposed = decision.is_some();
            if decision.is_some() {
                self.announce(txn, world);
            } else if requested > 0 {
                self.ask_for_votes(txn, None, world);
            }
        }
    }

    /// Asks every participant whose vote is missing, or only `only`.
    pub(super) fn ask_for_votes(
        &self,
        txn: TxnId,
        only: Option<PartitionId>,
        world: &mut World<'_>,
    ) {
        let Some(leader) = &self.leader else { return };
        let Some(coordinating) = leader.coordinating.get(&txn) else { return };
        let Some(known) = self.state.coordinated.get(&txn) else { return };
        for &partition in &known.participants {
            if !coordinating.has_settled(partition) && only.is_none_or(|only| only == partition) {
                let query = Msg::QueryPrepare { txn, partition, coordinator: self.id };
                world.send_to_leader(partition, query);
            }
        }
    }

    /// Overdue work as coordinator: silent clients, missing votes, missing acknowledgements, and
    /// the settling of what is done.
    pub(super) fn sweep_coordinator(&mut self, world: &mut World<'_>) {
        let now = world.cx.now();
        let config = world.config;
        let Some(leader) = &mut self.leader else { return };
        let (mut abandoned, mut voteless, mut unacknowledged) = (vec![], vec![], vec![]);
        leader.coordinating.retain(|&txn, coordinating| {
            let is_due = coordinating.asked.is_due(config.query_after, now);
            let is_silent = now.since(coordinating.heard) >= config.abandon_after;
            if coordinating.is_told {
                if is_due {
                    unacknowledged.push(txn);
                }
            } else if coordinating.outcome.is_none() && coordinating.requested > 0 {
                if is_due {
                    voteless.push(txn);
                }
            } else if coordinating.outcome.is_none()
                && !coordinating.is_decision_proposed
                && is_silent
            {
                if !self.state.coordinated.contains_key(&txn) {
                    // Votes for a transaction that was never begun here; their senders will ask.
                    return false;
                }
                abandoned.push(txn);
            }
            true
        });
        let mut silent = BTreeMap::new();
        for &txn in voteless.iter().chain(&unacknowledged) {
            let Some(coordinating) = leader.coordinating.get_mut(&txn) else { continue };
            let last = coordinating.asked;
            coordinating.asked = last.again(now);
            let known = self.state.coordinated.get(&txn);
            let all = partitions_of(known).into_iter();
            let is_missing = |partition: &PartitionId| {
                let has_voted = coordinating.has_settled(*partition);
                let has_acked = coordinating.acks.contains(partition);
                if coordinating.is_told { !has_acked } else { !has_voted }
            };
            silent.extend(all.filter(is_missing).map(|partition| (partition, last.at)));
        }
        for (partition, asked) in silent {
            world.suspect(partition, asked);
        }
        for txn in abandoned {
            world.cx.note(Note::Abandoned);
            self.abort_unilaterally(txn, AbortReason::Abandoned, vec![], world);
        }
        for txn in voteless {
            self.ask_for_votes(txn, None, world);
            self.abort_if_refuted(txn, world);
        }
        for txn in unacknowledged {
            self.write_back(txn, None, world);
        }
        self.settle(world);
    }

    /// Settles in one entry what every participant has acknowledged, and acknowledges in their
    /// stead for clients that have been silent for too long.
    fn settle(&mut self, world: &mut World<'_>) {
        let now = world.cx.now();
        let retention = world.config.retention;
        let Some(leader) = &mut self.leader else { return };
        let is_kept = |txn: &TxnId| self.state.settled.contains_key(txn);
        let silent = overdue(&mut leader.settled_since, is_kept, retention, now);
        let done = take_batch(&mut leader.settling);
        if !done.is_empty() {
            self.propose(Command::Settle(done), world);
        }
        if !silent.is_empty() {
            self.propose(Command::Acknowledge(silent), world);
        }
    }
}
