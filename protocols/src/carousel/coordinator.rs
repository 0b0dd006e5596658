//! A partition's leader as coordinator: the hooks of [`commit`](crate::commit). Commit requests,
//! aborts by the client, and votes of the fast path (§4.1.2, §4.2).

use std::sync::Arc;

use orthodrome_core::id::{NodeId, PartitionId, TxnId};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::txn::{AbortReason, Key, Outcome, Version, Writes};

use super::cpc::{FastVote, agreed};
use super::leader::{Leader, Leading, World};
use super::message::{Command, Msg, Vote};
use super::state::{Prepared, Request, decide};
use super::{Config, Note};
use crate::commit::{self, Coordination, Coordinator, Gathering};
use crate::gateway::Participant;

type Coordinating = commit::Coordinating<Leader>;

/// Votes of the fast path, besides the others; and a procedure's refusal.
#[derive(Debug, Default)]
pub struct More {
    /// Votes of single replicas, while their partition has not voted.
    open: OrdMap<PartitionId, OrdMap<NodeId, FastVote>>,
    /// Partitions that have voted on the fast path.
    given: OrdSet<PartitionId>,
    /// The participants of a procedure that refuses what it read, and the versions of that.
    refused: Option<(Vec<PartitionId>, Request)>,
}

impl Coordinator for Leader {
    commit::coordinator_items!();

    type More = More;

    fn outcome_message(txn: TxnId, outcome: Outcome, coordinating: Option<&Coordinating>) -> Msg {
        let is_fast = coordinating.is_some_and(|Coordinating { votes, more, .. }| {
            !votes.is_empty() && votes.keys().all(|partition| more.given.contains(partition))
        });
        match is_fast {
            true => Msg::FastDecided { txn, outcome },
            false => Msg::Decided { txn, outcome },
        }
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

    fn waits_for_timestamps(config: &Config) -> bool {
        !config.mutations.no_floor()
    }
}

impl Gathering for Leader {
    commit::gathering_items!(Participant);

    fn decide_command(
        txn: TxnId,
        outcome: Outcome,
        only_after: Option<u32>,
        participants: Vec<PartitionId>,
    ) -> Command {
        Command::Decide { txn, outcome, unilateral: only_after.is_some(), participants }
    }

    fn judge(
        participants: &[PartitionId],
        request: Option<&Request>,
        votes: &OrdMap<PartitionId, Vote>,
        world: &mut World<'_>,
    ) -> Option<Outcome> {
        let participants = participants.iter().copied();
        let vote = |partition| votes.get(&partition);
        match request {
            Some(Request { writes, .. }) if world.config.mutations.recovery_prepares() => {
                let bare = Request { writes: writes.clone(), versions: Arc::default() };
                decide(participants, Some(&bare), vote)
            }
            Some(_) | None => decide(participants, request, vote),
        }
    }

    fn on_undecided(leading: &mut Leading<'_>, txn: TxnId, _: bool, world: &mut World<'_>) {
        leading.try_refuse(txn, world);
    }

    /// The paper's participants never ask (see C9).
    fn never_asks(config: &Config) -> bool {
        config.mutations.no_tombstones()
    }

    fn tells_aborts_at_once(config: &Config) -> bool {
        config.mutations.recovery_prepares()
    }
}

impl Leading<'_> {
    /// §4.1.2 ⑦⑧: replicate the commit request.
    pub(super) fn on_commit(
        &mut self,
        client: NodeId,
        txn: TxnId,
        participants: Vec<PartitionId>,
        writes: Arc<Writes>,
        versions: Arc<Vec<(Key, Version)>>,
        world: &mut World<'_>,
    ) {
        if self.answer(client, txn, world) {
            return;
        }
        let now = world.cx.now();
        let coordinating = self.coordinating(txn, now);
        coordinating.client = Some(client);
        coordinating.heard = now;
        if std::mem::replace(&mut coordinating.requested, 1) > 0 {
            return;
        }
        let versions = if world.config.mutations.versions_not_replicated() {
            Arc::default()
        } else {
            versions
        };
        self.propose(Command::RequestCommit { txn, participants, writes, versions }, world);
    }

    /// §4.1.2: the application aborted before it asked to commit; or a procedure refuses what it
    /// read, in these versions.
    pub(super) fn on_abort(
        &mut self,
        client: NodeId,
        txn: TxnId,
        participants: Vec<PartitionId>,
        refused: Option<Arc<Vec<(Key, Version)>>>,
        world: &mut World<'_>,
    ) {
        if self.answer(client, txn, world) {
            return;
        }
        let coordinating = self.coordinating(txn, world.cx.now());
        coordinating.client = Some(client);
        if coordinating.requested > 0 {
            // The client has sent a commit request before and does not remember it; that request
            // decides.
            return;
        }
        let Some(versions) = refused else {
            self.abort_unilaterally(txn, AbortReason::Client, participants, world);
            return;
        };
        if coordinating.more.refused.is_some() {
            // The client has asked again, so a vote may be lost, which nobody asks for: there is no
            // commit request.
            self.abort_unilaterally(txn, AbortReason::Recovery, participants, world);
            return;
        }
        let request = Request { writes: Arc::default(), versions };
        coordinating.more.refused = Some((participants, request));
        coordinating.heard = world.cx.now();
        self.try_decide(txn, world);
    }

    /// A procedure's refusal aborts the transaction once the votes show whether what it read is what
    /// the participants hold. If they do not, others were about to change it, and the procedure must
    /// run again: a refusal is final for its client.
    fn try_refuse(&mut self, txn: TxnId, world: &mut World<'_>) {
        let Some(coordinating) = self.under_way(txn) else { return };
        let Some((participants, request)) = &coordinating.more.refused else { return };
        let vote = |partition| coordinating.votes.get(&partition);
        let reason = match decide(participants.iter().copied(), Some(request), vote) {
            Some(Outcome::Committed(_)) => AbortReason::Client,
            Some(Outcome::Aborted(reason)) => reason,
            Some(Outcome::Unknown) | None => return,
        };
        let participants = participants.clone();
        self.abort_unilaterally(txn, reason, participants, world);
    }

    /// §4.1.2 ⑨⑩: a partition's vote, from its log. The votes of its single replicas are not needed
    /// any more.
    pub(super) fn on_slow_vote(
        &mut self,
        txn: TxnId,
        partition: PartitionId,
        vote: Vote,
        world: &mut World<'_>,
    ) {
        if self.takes_votes(txn) {
            self.coordinating(txn, world.cx.now()).more.open.remove(&partition);
        }
        self.on_prepare_result(txn, partition, vote, world);
    }

    /// §4.2: the vote of one replica. Together with enough others it is the partition's vote.
    pub(super) fn on_fast_prepare_result(
        &mut self,
        from: NodeId,
        txn: TxnId,
        partition: PartitionId,
        vote: FastVote,
        world: &mut World<'_>,
    ) {
        if !self.takes_votes(txn) {
            return;
        }
        let mutations = world.config.mutations;
        let coordinating = self.coordinating(txn, world.cx.now());
        if coordinating.outcome.is_some() || coordinating.votes.contains_key(&partition) {
            // The slow path was faster, or the transaction has ended.
            return;
        }
        let is_leaders = vote.voters.is_some();
        let votes = coordinating.more.open.entry(partition).or_default();
        if mutations.leader_abort_acts()
            && is_leaders
            && let Vote::Refused(reason) = vote.vote
        {
            self.abort_untold(txn, reason, world);
            return;
        }
        votes.insert(from, vote);
        match agreed(votes, mutations.terms_ignored()) {
            Some(vote @ Vote::Prepared { .. }) => {
                world.cx.note(Note::FastVote);
                coordinating.more.open.remove(&partition);
                coordinating.more.given.insert(partition);
                coordinating.votes.insert(partition, vote);
                self.try_decide(txn, world);
            }
            Some(Vote::Refused(reason)) => {
                world.cx.note(Note::FastRefusal);
                if mutations.abort_told_at_once() {
                    self.abort_untold(txn, reason, world);
                } else if coordinating.requested == 0 {
                    // C2, R2: no later leader could find these refusals, so the abort must be this
                    // group's own decision. If a commit request is already in the log, the slow
                    // path decides.
                    let participants = coordinating.more.open.keys().copied().collect();
                    self.abort_unilaterally(txn, reason, participants, world);
                }
            }
            Some(Vote::Committed(_)) | None => {}
        }
    }

    /// C2, C3 as in the paper: an abort that is announced before any durable fact implies it.
    fn abort_untold(&mut self, txn: TxnId, reason: AbortReason, world: &mut World<'_>) {
        let coordinating = self.coordinating(txn, world.cx.now());
        let outcome = Outcome::Aborted(reason);
        if coordinating.outcome.is_none()
            && !std::mem::replace(&mut coordinating.is_decision_proposed, true)
        {
            coordinating.outcome = Some(outcome);
            let participants = coordinating.more.open.keys().copied().collect();
            self.announce(txn, world);
            self.propose(Command::Decide { txn, outcome, unilateral: false, participants }, world);
        }
    }
}
