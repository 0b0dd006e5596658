//! A partition's leader as coordinator: it asks every participant to prepare, and decides in the
//! log. [`commit`](crate::commit) announces the decision and collects the acknowledgements.

use orthodrome_core::id::{NodeId, PartitionId, TxnId};
use orthodrome_core::time::{Time, Timestamp};
use orthodrome_core::txn::{AbortReason, Outcome};

use super::leader::{Leader, Leading, Request, World};
use super::message::{Command, Msg, Vote};
use super::state::{State, decide};
use super::{Config, Note};
use crate::commit::{self, Coordination, Coordinator, Outcomes};
use crate::waiting::RetryState;

type Coordinating = commit::Coordinating<Leader>;

impl Outcomes for State {
    fn decision(&self, txn: TxnId) -> Option<Outcome> {
        self.decision(txn)
    }

    fn participants(&self, txn: TxnId) -> Option<Vec<PartitionId>> {
        self.coordinated.get(&txn).map(|decided| decided.participants.clone())
    }

    /// This includes the outcomes that this partition keeps as participant: only their clients ask
    /// for them.
    fn is_kept(&self, txn: TxnId) -> bool {
        self.ended.contains_key(&txn) || self.settled.contains_key(&txn)
    }

    fn is_acknowledged(&self, txn: TxnId) -> bool {
        self.is_acknowledged(txn)
    }
}

impl Coordinator for Leader {
    commit::coordinator_items!();

    /// The client's request to commit, if there was one.
    type More = Option<Request>;

    fn outcome_message(txn: TxnId, outcome: Outcome, _: Option<&Coordinating>) -> Msg {
        Msg::Decided { txn, outcome }
    }

    fn decision_message(
        leading: &Leading<'_>,
        (txn, partition): (TxnId, PartitionId),
        outcome: Outcome,
        _: &World<'_>,
    ) -> Msg {
        Msg::Decision { txn, partition, coordinator: leading.id, outcome }
    }

    fn on_retired(world: &mut World<'_>) {
        world.cx.note(Note::Retired);
    }
}

impl Leading<'_> {
    /// 2PC begins: every participant, read-only ones included, is asked to prepare (T4). Nothing is
    /// written here first: a coordinator that forgets the transaction has decided nothing.
    pub(super) fn on_commit(
        &mut self,
        client: NodeId,
        txn: TxnId,
        request: Request,
        world: &mut World<'_>,
    ) {
        if self.answer(client, txn, world) {
            return;
        }
        let now = world.cx.now();
        let coordinating = self.coordinating(txn, now);
        coordinating.client = Some(client);
        if coordinating.more.is_some() || coordinating.is_decision_proposed {
            return;
        }
        if world.config.mutations.skips_readers() {
            let is_written = |partition: &PartitionId| {
                request.writes.keys().any(|key| world.cluster.partition_of(key) == *partition)
            };
            let readers = request.participants.iter().filter(|partition| !is_written(partition));
            let vote = Vote::Prepared { proposal: Timestamp::ZERO };
            coordinating.votes.extend(readers.map(|&partition| (partition, vote)));
        }
        (coordinating.heard, coordinating.asked) = (now, RetryState::new(now));
        coordinating.requested = 1;
        coordinating.more = Some(request);
        self.ask_for_votes(txn, None, world);
        self.try_decide(txn, world);
    }

    /// A client asks for the outcome of a transaction that it did not ask to commit, or whose
    /// answer was lost.
    pub(super) fn on_resolve(
        &mut self,
        client: NodeId,
        txn: TxnId,
        participants: Vec<PartitionId>,
        world: &mut World<'_>,
    ) {
        world.cx.note(Note::Resolved);
        if self.answer(client, txn, world) {
            return;
        }
        let coordinating = self.coordinating(txn, world.cx.now());
        coordinating.client = Some(client);
        if coordinating.more.is_none() {
            self.propose_decision(
                txn,
                Outcome::Aborted(AbortReason::Recovery),
                participants,
                world,
            );
        }
    }

    /// Asks for every missing vote, or only for that of `only`.
    pub(super) fn ask_for_votes(
        &mut self,
        txn: TxnId,
        only: Option<PartitionId>,
        world: &mut World<'_>,
    ) {
        let coordinator = self.id;
        // The request concerned it as participant, or the transaction is settled meanwhile.
        let Some(coordinating) = self.under_way(txn) else { return };
        // Nobody asked to commit it: it is about to be aborted.
        let Some(request) = &coordinating.more else { return };
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
                coordinator,
                versions: versions.cloned().collect(),
                writes: writes.map(|(key, value)| (key.clone(), value.clone())).collect(),
                acknowledged_below: request.acknowledged_below,
            };
            world.send_to_leader(partition, prepare);
        }
    }

    /// A participant's vote. A vote on a transaction that nobody here asked about is ignored: if it
    /// stands for a prepare, the participant will ask.
    pub(super) fn on_vote(
        &mut self,
        txn: TxnId,
        partition: PartitionId,
        vote: Vote,
        world: &mut World<'_>,
    ) {
        let Some(coordinating) = self.under_way(txn) else { return };
        coordinating.votes.insert(partition, vote);
        self.try_decide(txn, world);
    }

    /// Proposes the decision, if the votes determine it. It is announced only when it is chosen.
    fn try_decide(&mut self, txn: TxnId, world: &mut World<'_>) {
        let Some(coordinating) = self.under_way(txn) else {
            unreachable!("{txn} is not coordinated by {}", self.id);
        };
        // Nobody asked to commit it: it is about to be aborted.
        let Some(request) = &coordinating.more else { return };
        let participants = request.participants.clone();
        let vote = |partition| coordinating.votes.get(&partition).copied();
        if let Some(outcome) = decide(participants.iter().copied(), vote) {
            self.propose_decision(txn, outcome, participants, world);
        }
    }

    /// The only place where a decision is proposed; once for each leadership and transaction.
    fn propose_decision(
        &mut self,
        txn: TxnId,
        outcome: Outcome,
        participants: Vec<PartitionId>,
        world: &mut World<'_>,
    ) {
        let coordinating = self.coordinating(txn, world.cx.now());
        if std::mem::replace(&mut coordinating.is_decision_proposed, true) {
            return;
        }
        let acknowledged_below = coordinating.more.as_ref().map_or(0, |r| r.acknowledged_below);
        self.propose(Command::Decide { txn, outcome, participants, acknowledged_below }, world);
    }

    /// C10, R1: a participant has waited long. A transaction that this group does not know is
    /// aborted.
    pub(super) fn on_query_decision(
        &mut self,
        txn: TxnId,
        partition: PartitionId,
        vote: Vote,
        world: &mut World<'_>,
    ) {
        let is_open = self.under_way(txn).is_some() || self.state.coordinated.contains_key(&txn);
        let is_over = self.state.settled.contains_key(&txn) || self.state.is_acknowledged(txn);
        if !is_open && is_over {
            // All participants have acknowledged the decision. A participant that still has the
            // transaction prepared it after its end, so the decision was not a commit.
            let outcome = Outcome::Aborted(AbortReason::Recovery);
            let decision = Msg::Decision { txn, partition, coordinator: self.id, outcome };
            world.send_to_leader(partition, decision);
            return;
        }
        let coordinating = self.coordinating(txn, world.cx.now());
        coordinating.votes.insert(partition, vote);
        if coordinating.is_announced {
            coordinating.acks.remove(&partition);
            self.send_decision(txn, Some(partition), world);
        } else if coordinating.more.is_some() {
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

    /// A new leader completes its group's decisions. Undecided transactions are left to the client,
    /// which asks to commit again, or to a participant that asks, for which they are aborted.
    pub(super) fn take_over_coordination(&mut self, world: &mut World<'_>) {
        let state = self.state;
        if !state.coordinated.is_empty() {
            world.cx.note(Note::CoordinatorTakeover);
        }
        for txn in state.coordinated.keys() {
            self.on_decided(*txn, world);
        }
    }

    /// Overdue work as coordinator: missing votes, missing acknowledgements, and settling.
    pub(super) fn sweep_coordinator(&mut self, world: &mut World<'_>) {
        let now = world.cx.now();
        let config = world.config;
        let (mut due, mut hopeless) = (vec![], vec![]);
        for (&txn, coordinating) in &mut self.leader.coordination.transactions {
            let last = coordinating.asked;
            let is_due = last.is_due(config.timeouts.query_after, now);
            let is_undecided = !coordinating.is_decision_proposed;
            if is_undecided && now.since(coordinating.heard) >= config.timeouts.abandon_after {
                hopeless.push(txn);
            } else if is_due && (is_undecided || coordinating.is_announced) {
                coordinating.asked = last.again(now);
                due.push((txn, last.at));
            }
        }
        for (txn, at) in due {
            self.suspect_silent(txn, at, world);
            self.ask_for_votes(txn, None, world);
            self.send_decision(txn, None, world);
        }
        for txn in hopeless {
            // A participant cannot be reached, and the others should not wait for it.
            world.cx.note(Note::Hopeless);
            let request = self.under_way(txn).and_then(|known| known.more.as_ref());
            let participants = request.map_or_else(Vec::new, |r| r.participants.clone());
            let outcome = Outcome::Aborted(AbortReason::Recovery);
            self.propose_decision(txn, outcome, participants, world);
        }
        self.settle(world);
    }

    /// Participants that have not sent a vote or an acknowledgement since `asked` may have lost
    /// their leader.
    fn suspect_silent(&mut self, txn: TxnId, asked: Time, world: &mut World<'_>) {
        let mut audience = self.audience(txn);
        let Some(coordinating) = self.under_way(txn) else {
            unreachable!("{txn} is overdue and unknown at {}", self.id);
        };
        audience.extend(coordinating.more.iter().flat_map(|request| &request.participants));
        for partition in audience {
            if coordinating.awaits(partition) {
                world.suspect(partition, asked);
            }
        }
    }
}
