//! A partition's leader as coordinator: the hooks of [`commit`](crate::commit). Commit requests
//! have rounds (N5), votes may depend on conditions (N3), and the coordinator answers reads for
//! waiting transactions (§3.4).

use orthodrome_core::id::{NodeId, PartitionId, TxnId};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::txn::{AbortReason, Outcome, Read, Version};

use super::leader::{Forward, Leader, Leading, World};
use super::message::{Command, Msg, Vote};
use super::state::{Prepared, Request, decide, is_refuted};
use super::{Config, Note};
use crate::commit::{self, Coordination, Coordinator, Gathering};

type Coordinating = commit::Coordinating<Leader>;

/// The state of a pending transaction besides the votes.
#[derive(Debug, Default)]
pub struct More {
    /// Set if the client has withdrawn its request, because its reads were wrong, or because the
    /// application aborted.
    withdrawn: Option<AbortReason>,
    /// Clients that wait for this transaction's writes (§3.4, RECSF).
    forwards: Vec<Forward>,
}

/// True if a vote will not change.
fn is_settled(vote: &Vote) -> bool {
    match vote {
        Vote::Prepared { unless, .. } => unless.is_empty(),
        Vote::Refused(_) | Vote::Committed(_) => true,
    }
}

impl Coordinator for Leader {
    commit::coordinator_items!();

    type More = More;

    fn outcome_message(txn: TxnId, outcome: Outcome, _: Option<&Coordinating>) -> Msg {
        Msg::Decided { txn, outcome }
    }

    fn decision_message(
        leading: &Leading<'_>,
        (txn, partition): (TxnId, PartitionId),
        outcome: Outcome,
        world: &World<'_>,
    ) -> Msg {
        let verdict = leading.state.verdict((txn, partition), outcome, world.cluster);
        Msg::Writeback { txn, partition, coordinator: leading.id, verdict }
    }

    fn has_voted(coordinating: &Coordinating, partition: PartitionId) -> bool {
        coordinating.votes.get(&partition).is_some_and(is_settled)
    }

    /// §3.4: the writes are sent to waiting readers before the decision is announced.
    fn before_telling(leading: &mut Leading<'_>, txn: TxnId, world: &mut World<'_>) {
        if let Some(coordinating) = leading.under_way(txn) {
            let forwards = std::mem::take(&mut coordinating.more.forwards);
            leading.answer_forwards(txn, forwards, world);
        }
    }
}

impl Gathering for Leader {
    commit::gathering_items!(PartitionId);

    fn decide_command(
        txn: TxnId,
        outcome: Outcome,
        only_after: Option<u32>,
        participants: Vec<PartitionId>,
    ) -> Command {
        Command::Decide { txn, outcome, only_after, participants }
    }

    fn judge(
        participants: &[PartitionId],
        request: Option<&Request>,
        votes: &OrdMap<PartitionId, Vote>,
        world: &mut World<'_>,
    ) -> Option<Outcome> {
        let vote = |partition| votes.get(&partition);
        let mutations = world.config.mutations;
        let outcome = decide(participants.iter().copied(), request, vote, mutations)?;
        if !votes.values().all(is_settled) {
            world.cx.note(Note::ConditionProved);
        }
        Some(outcome)
    }

    /// While a transaction waits for its turn or a lock, the vote will follow.
    fn is_arriving(&mut self, txn: TxnId) -> bool {
        self.participation.preparing.contains_key(&txn) || self.arrived.contains_key(&txn)
    }

    /// A conditional vote never replaces an unconditional one, in any order of arrival.
    fn hear(coordinating: &mut Coordinating, partition: PartitionId, vote: Vote) {
        if !Self::has_voted(coordinating, partition) || is_settled(&vote) {
            coordinating.votes.insert(partition, vote);
        }
    }

    fn on_undecided(
        leading: &mut Leading<'_>,
        txn: TxnId,
        is_overdue: bool,
        world: &mut World<'_>,
    ) {
        let known = leading.under_way(txn);
        if is_overdue || known.is_some_and(|known| known.more.withdrawn.is_some()) {
            leading.abort_if_refuted(txn, world);
        }
    }
}

impl Leading<'_> {
    /// Carousel §4.1.2: replicates the commit request. A later request of the same client is based
    /// on later reads, and replaces the earlier one (N5).
    pub(super) fn on_commit(
        &mut self,
        client: NodeId,
        txn: TxnId,
        participants: Vec<PartitionId>,
        request: Request,
        world: &mut World<'_>,
    ) {
        if self.answer(client, txn, world) {
            return;
        }
        let now = world.cx.now();
        let coordinating = self.coordinating(txn, now);
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

    /// Carousel §4.1.2: the application aborted before it asked to commit; or its client had asked
    /// on reads that were wrong.
    pub(super) fn on_abort(
        &mut self,
        client: NodeId,
        (txn, round): (TxnId, u32),
        participants: Vec<PartitionId>,
        reason: AbortReason,
        world: &mut World<'_>,
    ) {
        if self.answer(client, txn, world) {
            return;
        }
        let coordinating = self.coordinating(txn, world.cx.now());
        coordinating.client = Some(client);
        if coordinating.requested > round {
            // The client has sent a commit request before and does not remember it; that request
            // decides.
            return;
        }
        if coordinating.requested > 0 {
            coordinating.more.withdrawn = Some(reason);
            self.abort_if_refuted(txn, world);
            return;
        }
        self.abort_unilaterally(txn, reason, participants, world);
    }

    /// N5: a request that can never be committed, because a participant has other versions for
    /// good, may be aborted by this group's log, unless the client's next request arrives before.
    fn abort_if_refuted(&mut self, txn: TxnId, world: &mut World<'_>) {
        let state = self.state;
        let Some(coordinating) = self.under_way(txn) else {
            unreachable!("{txn} is not coordinated by {}", self.id);
        };
        // Before the commit request is in the log there is nothing to refute.
        let known = state.coordinated.get(&txn);
        let Some(request) = known.and_then(|known| known.request.as_ref()) else { return };
        let is_last = request.round == coordinating.requested;
        if is_last && is_refuted(request, coordinating.votes.values()) {
            let reason = coordinating.more.withdrawn.unwrap_or(AbortReason::StaleRead);
            world.cx.note(Note::StaleVersions);
            self.abort_unilaterally(txn, reason, vec![], world);
        }
    }

    /// §3.4, RECSF: a transaction waits for the writes of `of`.
    pub(super) fn on_forward_read(&mut self, of: TxnId, forward: Forward, world: &mut World<'_>) {
        // If this group does not know `of`, the participant will answer.
        let Some(coordinating) = self.under_way(of) else { return };
        if coordinating.outcome.is_some() {
            self.answer_forwards(of, vec![forward], world);
        } else {
            coordinating.more.forwards.push(forward);
        }
    }

    /// `of` is decided. If it commits, its writes are sent to the readers that wait for them. If it
    /// aborts, the participant answers the reader (N9).
    fn answer_forwards(&mut self, of: TxnId, forwards: Vec<Forward>, world: &mut World<'_>) {
        let state = self.state;
        let outcome = self.under_way(of).and_then(|known| known.outcome);
        let Some(Outcome::Committed(timestamp)) = outcome else { return };
        let request = state.coordinated.get(&of).and_then(|known| known.request.as_ref());
        // It is settled, or a participant reported that it had committed.
        let Some(request) = request else { return };
        let version = Version { timestamp, writer: of.name() };
        for Forward { txn, client, partition, mut reads } in forwards {
            for (key, read) in &mut reads {
                if let Some(value) = request.writes.get(key) {
                    *read = Read { value: value.clone(), version };
                }
            }
            world.send(client, Msg::ForwardedRead { txn, partition, reads });
        }
    }
}
