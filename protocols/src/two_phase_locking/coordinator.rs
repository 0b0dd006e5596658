//! A partition's leader as coordinator: ask every participant to prepare, decide in the log, tell,
//! and see the decision through.

use std::collections::{BTreeMap, BTreeSet};

use orthodrome_core::id::{NodeId, PartitionId, TxnId};
use orthodrome_core::time::{Time, Timestamp};
use orthodrome_core::txn::{AbortReason, Outcome};

use super::leader::{Coordinating, Leader, Partition, Request, World};
use super::message::{Command, Msg, Vote};
use super::state::decide;
use super::{Note, Timer};
use crate::waiting::{RetryState, take_batch};

impl Coordinating {
    fn new(now: Time) -> Self {
        Self {
            client: None,
            request: None,
            votes: BTreeMap::new(),
            is_decision_proposed: false,
            outcome: None,
            is_told: false,
            acks: BTreeSet::new(),
            since: now,
            asked: RetryState::new(now),
        }
    }
}

impl Leader {
    fn coordinating(&mut self, txn: TxnId, now: Time) -> &mut Coordinating {
        self.coordinating.entry(txn).or_insert_with(|| Coordinating::new(now))
    }
}

impl Partition {
    /// 2PC begins: every participant, the read-only ones too, is asked to prepare (T4). Nothing is
    /// written here first: a coordinator that forgets the transaction has decided nothing.
    pub(super) fn on_commit(
        &mut self,
        client: NodeId,
        txn: TxnId,
        request: Request,
        world: &mut World<'_>,
    ) {
        if self.answer_if_known(client, txn, world) {
            return;
        }
        let now = world.cx.now();
        let Some(leader) = &mut self.leader else { return };
        let coordinating = leader.coordinating(txn, now);
        coordinating.client = Some(client);
        if coordinating.request.is_some() {
            return;
        }
        if world.config.mutations.skips_readers {
            let is_written = |partition: &PartitionId| {
                request.writes.keys().any(|key| world.cluster.partition_of(key) == *partition)
            };
            let readers = request.participants.iter().filter(|partition| !is_written(partition));
            let vote = Vote::Prepared { proposal: Timestamp::ZERO };
            coordinating.votes.extend(readers.map(|&partition| (partition, vote)));
        }
        (coordinating.since, coordinating.asked) = (now, RetryState::new(now));
        coordinating.request = Some(request);
        self.ask_for_votes(txn, None, world);
        self.try_decide(txn, world);
    }

    /// Tells `client` the outcome if there is one; true if there is nothing else to do.
    fn answer_if_known(&mut self, client: NodeId, txn: TxnId, world: &mut World<'_>) -> bool {
        let Some(leader) = &mut self.leader else { return true };
        if let Some(coordinating) = leader.coordinating.get_mut(&txn) {
            coordinating.client = Some(client);
            if let Some(outcome) = coordinating.outcome.filter(|_| coordinating.is_told) {
                world.send(client, Msg::Decided { txn, outcome });
            }
            return coordinating.is_decision_proposed || coordinating.outcome.is_some();
        }
        if let Some(outcome) = self.state.decision(txn) {
            world.send(client, Msg::Decided { txn, outcome });
            return true;
        }
        if self.state.is_acknowledged(txn) {
            // Nobody here knows any more: the client has acknowledged it, or was silent for too long.
            world.cx.note(Note::Forgotten);
            world.send(client, Msg::Decided { txn, outcome: Outcome::Unknown });
            return true;
        }
        false
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
        if self.answer_if_known(client, txn, world) {
            return;
        }
        let now = world.cx.now();
        let Some(leader) = &mut self.leader else { return };
        let coordinating = leader.coordinating(txn, now);
        coordinating.client = Some(client);
        if coordinating.request.is_none() {
            self.propose_decision(
                txn,
                Outcome::Aborted(AbortReason::Recovery),
                participants,
                world,
            );
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
        let Some(request) = &coordinating.request else { return };
        if coordinating.is_decision_proposed {
            return;
        }
        for &partition in &request.participants {
            if coordinating.votes.contains_key(&partition)
                || only.is_some_and(|only| only != partition)
            {
                continue;
            }
            let versions = request.versions.iter();
            let versions = versions.filter(|(key, _)| world.cluster.partition_of(key) == partition);
            let writes = request.writes.iter();
            let writes = writes.filter(|(key, _)| world.cluster.partition_of(key) == partition);
            let prepare = Msg::Prepare {
                txn,
                partition,
                coordinator: self.id,
                versions: versions.cloned().collect(),
                writes: writes.map(|(key, value)| (key.clone(), value.clone())).collect(),
                acknowledged_below: request.acknowledged_below,
            };
            world.send_to_leader(partition, prepare);
        }
    }

    /// A participant's vote. One for a transaction that nobody here asked about is left alone: if it
    /// stands for a prepare, the participant will ask.
    pub(super) fn on_vote(
        &mut self,
        txn: TxnId,
        partition: PartitionId,
        vote: Vote,
        world: &mut World<'_>,
    ) {
        let Some(leader) = &mut self.leader else { return };
        let Some(coordinating) = leader.coordinating.get_mut(&txn) else { return };
        coordinating.votes.insert(partition, vote);
        self.try_decide(txn, world);
    }

    /// Proposes what the votes decide, if they do. Nobody hears of it before it is chosen.
    fn try_decide(&mut self, txn: TxnId, world: &mut World<'_>) {
        let Some(leader) = &self.leader else { return };
        let Some(coordinating) = leader.coordinating.get(&txn) else { return };
        let Some(request) = &coordinating.request else { return };
        let participants = request.participants.clone();
        let vote = |partition| coordinating.votes.get(&partition).copied();
        if let Some(outcome) = decide(participants.iter().copied(), vote) {
            self.propose_decision(txn, outcome, participants, world);
        }
    }

    /// The one place where a decision is proposed; once for each leadership and transaction.
    fn propose_decision(
        &mut self,
        txn: TxnId,
        outcome: Outcome,
        participants: Vec<PartitionId>,
        world: &mut World<'_>,
    ) {
        let now = world.cx.now();
        let Some(leader) = &mut self.leader else { return };
        let coordinating = leader.coordinating(txn, now);
        if std::mem::replace(&mut coordinating.is_decision_proposed, true) {
            return;
        }
        let acknowledged_below = coordinating.request.as_ref().map_or(0, |r| r.acknowledged_below);
        self.propose(Command::Decide { txn, outcome, participants, acknowledged_below }, world);
    }

    /// A decision is chosen. It is final: tell it.
    pub(super) fn on_decided(&mut self, txn: TxnId, world: &mut World<'_>) {
        let now = world.cx.now();
        let Some(outcome) = self.state.decision(txn) else { return };
        let Some(leader) = &mut self.leader else { return };
        let coordinating = leader.coordinating(txn, now);
        coordinating.is_decision_proposed = true;
        let before = coordinating.outcome.replace(outcome);
        assert!(before.is_none_or(|before| before == outcome), "{txn} was decided twice (R7)");
        self.announce(txn, world);
    }

    /// Tells the client and the participants, once the commit timestamp has passed on every clock:
    /// only then does the order of timestamps, which read-only transactions see, agree with real
    /// time (C13).
    fn announce(&mut self, txn: TxnId, world: &mut World<'_>) {
        let clock = world.cx.clock();
        let now = world.cx.now();
        let Some(leader) = &mut self.leader else { return };
        let Some(coordinating) = leader.coordinating.get_mut(&txn) else { return };
        let Some(outcome) = coordinating.outcome else { return };
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
        self.tell_participants(txn, None, world);
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

    /// Tells the decision to every participant that has not acknowledged it, or only to `only`.
    pub(super) fn tell_participants(
        &self,
        txn: TxnId,
        only: Option<PartitionId>,
        world: &mut World<'_>,
    ) {
        let Some(leader) = &self.leader else { return };
        let Some(coordinating) = leader.coordinating.get(&txn) else { return };
        let Some(outcome) = coordinating.outcome.filter(|_| coordinating.is_told) else { return };
        for partition in self.participants(txn, coordinating) {
            let is_wanted = only.is_none_or(|only| only == partition);
            if is_wanted && !coordinating.acks.contains(&partition) {
                let coordinator = self.id;
                world.send_to_leader(
                    partition,
                    Msg::Decision { txn, partition, coordinator, outcome },
                );
            }
        }
    }

    /// Everybody who must hear the decision: those in it, and those who turned up later.
    fn participants(&self, txn: TxnId, coordinating: &Coordinating) -> BTreeSet<PartitionId> {
        let known = self.state.coordinated.get(&txn);
        let known = known.into_iter().flat_map(|decided| decided.participants.iter().copied());
        known.chain(coordinating.votes.keys().copied()).collect()
    }

    /// A participant has the decision in its log.
    pub(super) fn on_decision_ack(&mut self, txn: TxnId, partition: PartitionId) {
        let Some(leader) = &mut self.leader else { return };
        let Some(coordinating) = leader.coordinating.get_mut(&txn) else { return };
        coordinating.acks.insert(partition);
        self.settle_if_done(txn);
    }

    fn settle_if_done(&mut self, txn: TxnId) {
        let Some(leader) = &self.leader else { return };
        let Some(coordinating) = leader.coordinating.get(&txn) else { return };
        let everybody = self.participants(txn, coordinating);
        let is_done = coordinating.is_told && everybody.is_subset(&coordinating.acks);
        if let Some(leader) = self.leader.as_mut().filter(|_| is_done) {
            leader.settling.insert(txn);
        }
    }

    /// C10, R1: a participant has waited long. A transaction that nobody here knows is aborted.
    pub(super) fn on_query_decision(
        &mut self,
        txn: TxnId,
        partition: PartitionId,
        vote: Vote,
        world: &mut World<'_>,
    ) {
        let now = world.cx.now();
        let Some(leader) = &mut self.leader else { return };
        let is_open =
            leader.coordinating.contains_key(&txn) || self.state.coordinated.contains_key(&txn);
        let is_over = self.state.settled.contains_key(&txn) || self.state.is_acknowledged(txn);
        if !is_open && is_over {
            // Everybody who took part has acknowledged the decision. Whoever still holds the
            // transaction prepared it after its end, so it was not a commit.
            let outcome = Outcome::Aborted(AbortReason::Recovery);
            let decision = Msg::Decision { txn, partition, coordinator: self.id, outcome };
            world.send_to_leader(partition, decision);
            return;
        }
        let coordinating = leader.coordinating(txn, now);
        coordinating.votes.insert(partition, vote);
        if coordinating.is_told {
            coordinating.acks.remove(&partition);
            self.tell_participants(txn, Some(partition), world);
        } else if coordinating.request.is_some() {
            self.try_decide(txn, world);
        } else if coordinating.outcome.is_none() {
            world.cx.note(Note::QueryAborted);
            self.propose_decision(
                txn,
                Outcome::Aborted(AbortReason::Recovery),
                vec![partition],
                world,
            );
        }
    }

    /// A new leader sees its group's decisions through. What is not decided is left to those who
    /// want to know: the client, who asks to commit again, or a participant, for whom it is aborted.
    pub(super) fn take_over_coordination(&mut self, world: &mut World<'_>) {
        if self.state.coordinated.is_empty() {
            return;
        }
        world.cx.note(Note::CoordinatorTakeover);
        let all: Vec<TxnId> = self.state.coordinated.keys().copied().collect();
        for txn in all {
            self.on_decided(txn, world);
        }
    }

    /// Overdue work as coordinator: missing votes, missing acknowledgements, and the settling of
    /// what is done.
    pub(super) fn sweep_coordinator(&mut self, world: &mut World<'_>) {
        let now = world.cx.now();
        let config = world.config;
        let Some(leader) = &mut self.leader else { return };
        let (mut due, mut hopeless) = (vec![], vec![]);
        for (&txn, coordinating) in &mut leader.coordinating {
            let last = coordinating.asked;
            let is_due = last.is_due(config.query_after, now);
            let is_undecided = !coordinating.is_decision_proposed;
            if is_undecided && now.since(coordinating.since) >= config.abandon_after {
                hopeless.push(txn);
            } else if is_due && (is_undecided || coordinating.is_told) {
                coordinating.asked = last.again(now);
                due.push((txn, last.at));
            }
        }
        for (txn, at) in due {
            self.suspect_silent(txn, at, world);
            self.ask_for_votes(txn, None, world);
            self.tell_participants(txn, None, world);
        }
        for txn in hopeless {
            // A participant cannot be reached; the others should not wait with it.
            world.cx.note(Note::Hopeless);
            let Some(leader) = &self.leader else { return };
            let request = leader.coordinating.get(&txn).and_then(|c| c.request.as_ref());
            let participants = request.map_or_else(Vec::new, |r| r.participants.clone());
            let outcome = Outcome::Aborted(AbortReason::Recovery);
            self.propose_decision(txn, outcome, participants, world);
        }
        self.settle(world);
    }

    /// Participants that owe a vote or an acknowledgement since `asked` may have lost their leader.
    fn suspect_silent(&self, txn: TxnId, asked: Time, world: &mut World<'_>) {
        let Some(leader) = &self.leader else { return };
        let Some(coordinating) = leader.coordinating.get(&txn) else { return };
        if coordinating.is_told {
            for partition in self.participants(txn, coordinating) {
                if !coordinating.acks.contains(&partition) {
                    world.suspect(partition, asked);
                }
            }
        } else if let Some(request) = &coordinating.request {
            for partition in &request.participants {
                if !coordinating.votes.contains_key(partition) {
                    world.suspect(*partition, asked);
                }
            }
        }
    }

    /// Settles in one entry what every participant has acknowledged.
    fn settle(&mut self, world: &mut World<'_>) {
        let Some(leader) = &mut self.leader else { return };
        let done = take_batch(&mut leader.settling);
        if !done.is_empty() {
            self.propose(Command::Settle(done), world);
        }
    }

    /// Decisions are settled: nothing more is to be done for them.
    pub(super) fn on_settled(&mut self, world: &mut World<'_>) {
        let now = world.cx.now();
        let state = &self.state;
        let Some(leader) = &mut self.leader else { return };
        leader.coordinating.retain(|txn, coordinating| {
            let is_settled = coordinating.is_told && !state.coordinated.contains_key(txn);
            if is_settled && state.settled.contains_key(txn) {
                leader.kept_since.insert(*txn, now);
            }
            !is_settled
        });
    }
}
