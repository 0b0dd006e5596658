//! A leader as coordinator before the decision, for protocols whose participants vote without a
//! request. It collects the commit request and the votes, and decides (Carousel §4.1.2, §4.3).
//! `participant` sends the votes.
//!
//! The participants and the client's commit request are in the log of the coordinator's group. So a
//! new leader lacks only the votes, and asks for them.

use std::sync::Arc;

use orthodrome_core::id::{NodeId, PartitionId, TxnId};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::{AbortReason, Outcome};

use super::coordinator::{Coordinating, Coordinator, Note};
use super::message::{ToCoordinator, ToParticipant};
use super::participant::Participation;
use super::state::{Applied, Coordinated, Ended, Part, Request, State, Verdict};
use crate::hosting::{CommandOf, Leading, World};

/// The hooks by which a protocol, whose participants vote without a request, completes the
/// coordinator and the participant.
pub trait Gathering:
    Coordinator<
        State = State<
            <Self as Gathering>::Prepared,
            Ended,
            Coordinated<<Self as Gathering>::Part, <Self as Gathering>::Request>,
        >,
        Msg: From<ToParticipant<<Self as Gathering>::Part>>
                 + From<ToCoordinator<<Self as Coordinator>::Vote>>,
    >
{
    /// A transaction as a participant prepared it.
    type Prepared;
    /// A participant, as the coordinator's group knows it.
    type Part: Part;
    /// A commit request, as it is replicated.
    type Request: Request;

    /// The command that stores the participants of a transaction.
    fn coordinate_command(
        txn: TxnId,
        participants: Arc<Vec<Self::Part>>,
        acknowledged_below: u64,
    ) -> CommandOf<Self>;
    /// The command for a decision. With `only_after`, an abort that counts only if the log has no
    /// later commit request.
    fn decide_command(
        txn: TxnId,
        outcome: Outcome,
        only_after: Option<u32>,
        participants: Vec<PartitionId>,
    ) -> CommandOf<Self>;
    /// The decision that follows from these participants' votes; none while it is open.
    fn judge(
        participants: &[PartitionId],
        request: Option<&Self::Request>,
        votes: &OrdMap<PartitionId, Self::Vote>,
        world: &mut World<'_, Self>,
    ) -> Option<Outcome>;

    // For the role of participant.

    /// The leader's field for it.
    fn participation(&mut self) -> &mut Participation<Self::Prepared>;
    /// The coordinator's group of a transaction that is prepared here, and the vote that follows.
    fn vote(prepared: &Self::Prepared) -> (PartitionId, Self::Vote);
    /// The vote for a transaction that was refused here.
    fn refusal(reason: AbortReason) -> Self::Vote;
    /// The vote for a transaction that has committed here.
    fn committed(timestamp: Timestamp) -> Self::Vote;
    /// The command for outcomes that need not be remembered for their coordinators.
    fn forget_command(txns: Vec<TxnId>) -> CommandOf<Self>;
    /// Proposes a decision to the log, and frees what the transaction holds here.
    fn end(
        leading: &mut Leading<'_, Self>,
        txn: TxnId,
        coordinator: PartitionId,
        verdict: Verdict,
        world: &mut World<'_, Self>,
    );

    // Optional hooks.

    /// True if a transaction that is in no log yet will be voted on.
    fn is_arriving(&mut self, txn: TxnId) -> bool {
        self.participation().preparing.contains_key(&txn)
    }
    /// True if participants never ask for the decision: unsafe, for mutations.
    fn never_asks(_config: &Self::Config) -> bool {
        false
    }
    /// Stores a vote.
    fn hear(coordinating: &mut Coordinating<Self>, partition: PartitionId, vote: Self::Vote) {
        coordinating.votes.insert(partition, vote);
    }
    /// The votes do not decide the request yet. `is_overdue`: the missing votes have just been
    /// requested again.
    fn on_undecided(
        _leading: &mut Leading<'_, Self>,
        _txn: TxnId,
        _is_overdue: bool,
        _world: &mut World<'_, Self>,
    ) {
    }
    /// True if aborts are announced before they are chosen: unsafe, for mutations.
    fn tells_aborts_at_once(_config: &Self::Config) -> bool {
        false
    }
}

impl<R: Gathering> Leading<'_, R> {
    /// This leader's actions, as coordinator, after an entry is applied. `settled` are the
    /// transactions that it settles.
    pub fn on_coordinated(
        &mut self,
        applied: Applied,
        settled: &[TxnId],
        world: &mut World<'_, R>,
    ) {
        match applied {
            Applied::Requested(txn) => self.try_decide(txn, world),
            Applied::Decided(txn) => self.on_decided(txn, world),
            Applied::Settled => self.on_settled(settled, world),
            Applied::Nothing | Applied::Prepared(_) | Applied::Ended(_) | Applied::Ceiling => {}
        }
    }

    /// A client begins a transaction: replicate its participants (Carousel §4.1.4).
    pub fn on_coordinator_prepare(
        &mut self,
        client: NodeId,
        txn: TxnId,
        participants: Arc<Vec<R::Part>>,
        acknowledged_below: u64,
        world: &mut World<'_, R>,
    ) {
        let is_known = self.state.coordinated.contains_key(&txn);
        if self.state.is_acknowledged(txn) && self.state.decision(txn).is_none() && !is_known {
            self.tell_forgotten(client, txn, world);
            return;
        }
        if self.answer_if_decided(client, txn, world) {
            // A refusal arrived before the participants were known; the others hold locks.
            if let Some(outcome @ Outcome::Aborted(_)) = self.state.decision(txn) {
                for partition in participants.iter().map(R::Part::partition) {
                    let end = R::decision_message(self, (txn, partition), outcome, world);
                    world.send_to_leader(partition, end);
                }
            }
            return;
        }
        let now = world.cx.now();
        let coordinating = self.coordinating(txn, now);
        coordinating.heard = now;
        let is_repeated = coordinating.client.replace(client).is_some();
        if !is_repeated && !is_known {
            self.propose(R::coordinate_command(txn, participants, acknowledged_below), world);
        }
    }

    /// The clients of these transactions are alive (Carousel §4.3.1).
    pub fn on_heartbeat(&mut self, txns: &[TxnId], world: &mut World<'_, R>) {
        for txn in txns {
            if let Some(coordinating) = self.under_way(*txn) {
                coordinating.heard = world.cx.now();
            }
        }
    }

    /// A client asks for the outcome of a transaction that it did not ask to commit, or whose
    /// answer was lost.
    pub fn on_resolve(
        &mut self,
        client: NodeId,
        txn: TxnId,
        participants: Vec<PartitionId>,
        world: &mut World<'_, R>,
    ) {
        world.cx.note(Note::Resolved.into());
        if self.answer(client, txn, world) {
            return;
        }
        let coordinating = self.coordinating(txn, world.cx.now());
        coordinating.client = Some(client);
        if coordinating.requested == 0 {
            self.abort_unilaterally(txn, AbortReason::Recovery, participants, world);
        }
    }

    /// True if a vote may still change something. A client may know, and have acknowledged, an
    /// outcome that only an earlier leader had decided. Such a transaction is still open here, and
    /// needs the vote.
    pub fn takes_votes(&self, txn: TxnId) -> bool {
        let state = self.state;
        (state.coordinated.contains_key(&txn) || !state.is_acknowledged(txn))
            && !state.settled.contains_key(&txn)
    }

    /// A vote (Carousel §4.1.2).
    pub fn on_prepare_result(
        &mut self,
        txn: TxnId,
        partition: PartitionId,
        vote: R::Vote,
        world: &mut World<'_, R>,
    ) {
        if self.takes_votes(txn) {
            R::hear(self.coordinating(txn, world.cx.now()), partition, vote);
            self.try_decide(txn, world);
        }
    }

    /// Decides, if the durable facts determine the decision (Carousel §4.1.2).
    pub fn try_decide(&mut self, txn: TxnId, world: &mut World<'_, R>) {
        let state = self.state;
        let Some(coordinating) = self.under_way(txn) else {
            unreachable!("{txn} has a vote or a commit request, and {} does not know it", self.id);
        };
        if coordinating.outcome.is_some() || coordinating.is_decision_proposed {
            // It is decided, or an entry that is already in the log will decide it.
            return;
        }
        let known = state.coordinated.get(&txn);
        let mut participants: Vec<PartitionId> =
            known.into_iter().flat_map(|known| known.partitions()).collect();
        let request = known.and_then(|known| known.request.as_ref());
        if request.is_none() {
            // A refusal decides even before the participants are known.
            participants.extend(coordinating.votes.keys());
        }
        participants.sort_unstable();
        participants.dedup();
        let Some(outcome) = R::judge(&participants, request, &coordinating.votes, world) else {
            R::on_undecided(self, txn, false, world);
            return;
        };
        if outcome == Outcome::Aborted(AbortReason::StaleRead) {
            world.cx.note(Note::StaleVersions.into());
        }
        coordinating.outcome = Some(outcome);
        coordinating.is_decision_proposed = true;
        self.propose(R::decide_command(txn, outcome, None, participants), world);
        self.announce(txn, world);
    }

    /// R2: an abort that no durable fact implies is made durable before anybody learns of it. It
    /// counts only if no later commit request precedes it in the log.
    pub fn abort_unilaterally(
        &mut self,
        txn: TxnId,
        reason: AbortReason,
        participants: Vec<PartitionId>,
        world: &mut World<'_, R>,
    ) {
        let coordinating = self.coordinating(txn, world.cx.now());
        if std::mem::replace(&mut coordinating.is_decision_proposed, true) {
            return;
        }
        let (outcome, only_after) = (Outcome::Aborted(reason), Some(coordinating.requested));
        if R::tells_aborts_at_once(world.config) {
            coordinating.outcome = Some(outcome);
            self.announce(txn, world);
        }
        self.propose(R::decide_command(txn, outcome, only_after, participants), world);
    }

    /// C10, R1: a participant has waited long. A transaction that this group does not know is
    /// aborted.
    pub fn on_query_decision(
        &mut self,
        txn: TxnId,
        partition: PartitionId,
        vote: R::Vote,
        world: &mut World<'_, R>,
    ) {
        if !self.takes_votes(txn) {
            // All participants have acknowledged the decision. A participant that still has the
            // transaction prepared it after its end, so the decision was not a commit.
            let outcome = Outcome::Aborted(AbortReason::Recovery);
            let end = R::decision_message(self, (txn, partition), outcome, world);
            world.send_to_leader(partition, end);
            return;
        }
        let is_new = self.under_way(txn).is_none();
        let coordinating = self.coordinating(txn, world.cx.now());
        R::hear(coordinating, partition, vote);
        if coordinating.is_told {
            coordinating.acks.remove(&partition);
            self.tell_participants(txn, None, world);
        } else if is_new && !self.state.coordinated.contains_key(&txn) {
            world.cx.note(Note::QueryAborted.into());
            self.abort_unilaterally(txn, AbortReason::Recovery, vec![partition], world);
        } else {
            self.try_decide(txn, world);
        }
    }

    /// R6: a participant may forget the transactions whose end all participants have acknowledged.
    pub fn on_may_forget(
        &mut self,
        partition: PartitionId,
        txns: Vec<TxnId>,
        world: &mut World<'_, R>,
    ) {
        let mut done = Vec::new();
        let mut unknown = Vec::new();
        for txn in txns {
            let is_open =
                self.state.coordinated.contains_key(&txn) || self.under_way(txn).is_some();
            let is_over = !is_open && self.state.is_acknowledged(txn);
            if is_over || self.state.settled.contains_key(&txn) {
                done.push(txn);
            } else if !is_open {
                unknown.push(txn);
            }
        }
        // Also if there are none: without an answer the participant would search for another
        // leader.
        let forget = ToParticipant::Forget { partition, coordinator: self.id, txns: done };
        world.send_to_leader(partition, forget.into());
        for txn in unknown {
            // A refusal whose vote was lost together with all other messages of the transaction.
            world.cx.note(Note::QueryAborted.into());
            self.abort_unilaterally(txn, AbortReason::Recovery, vec![partition], world);
        }
    }

    /// A new leader takes over the transactions that its group coordinates (Carousel §4.3.3).
    pub fn take_over_coordination(&mut self, world: &mut World<'_, R>) {
        let state = self.state;
        if state.coordinated.is_empty() {
            return;
        }
        world.cx.note(Note::CoordinatorTakeover.into());
        for (&txn, known) in &state.coordinated {
            let coordinating = self.coordinating(txn, world.cx.now());
            coordinating.requested = known.round();
            coordinating.outcome = known.decision;
            coordinating.is_decision_proposed = known.decision.is_some();
            if known.decision.is_some() {
                self.announce(txn, world);
            } else if known.request.is_some() {
                self.ask_for_votes(txn, None, world);
            }
        }
    }

    /// Asks for every missing vote, or only for that of `only`.
    fn ask_for_votes(&mut self, txn: TxnId, only: Option<PartitionId>, world: &mut World<'_, R>) {
        let (id, state) = (self.id, self.state);
        let Some(coordinating) = self.under_way(txn) else {
            unreachable!("{id} does not coordinate {txn}");
        };
        // Its commit request is not in the log yet.
        let Some(known) = state.coordinated.get(&txn) else { return };
        for part in known.participants.iter() {
            let partition = part.partition();
            if !R::has_voted(coordinating, partition) && only.is_none_or(|only| only == partition) {
                let (participant, coordinator) = (part.clone(), id);
                let query = ToParticipant::QueryPrepare { txn, participant, coordinator };
                world.send_to_leader(partition, query.into());
            }
        }
    }

    /// A new replica leads `partition`: sends it this leader's open requests.
    pub fn ask_new_leader(&mut self, txn: TxnId, partition: PartitionId, world: &mut World<'_, R>) {
        // The request concerned it as participant, or the transaction is settled meanwhile.
        let Some(coordinating) = self.under_way(txn) else { return };
        if coordinating.is_told {
            self.tell_participants(txn, Some(partition), world);
        } else if coordinating.requested > 0 {
            self.ask_for_votes(txn, Some(partition), world);
        }
    }

    /// Overdue work as coordinator: silent clients, missing votes, missing acknowledgements, and
    /// settling.
    pub fn sweep_coordinator(&mut self, world: &mut World<'_, R>) {
        let now = world.cx.now();
        let state = self.state;
        let timeouts = R::timeouts(world.config);
        let transactions = &mut self.leader.coordination().transactions;
        let (mut abandoned, mut voteless, mut unacknowledged) = (vec![], vec![], vec![]);
        transactions.retain(|&txn, coordinating| {
            let is_due = coordinating.asked.is_due(timeouts.query_after, now);
            let is_silent = now.since(coordinating.heard) >= timeouts.abandon_after;
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
                if !state.coordinated.contains_key(&txn) {
                    // Votes for a transaction that no client registered here; the participants will
                    // ask.
                    return false;
                }
                abandoned.push(txn);
            }
            true
        });
        let mut silent = OrdMap::new();
        for &txn in voteless.iter().chain(&unacknowledged) {
            let Some(coordinating) = transactions.get_mut(&txn) else {
                unreachable!("{txn} is overdue and unknown");
            };
            let last = coordinating.asked;
            coordinating.asked = last.again(now);
            let known = state.coordinated.get(&txn);
            let all = known.into_iter().flat_map(|known| known.partitions());
            let missing = all.filter(|partition| coordinating.awaits(*partition));
            silent.extend(missing.map(|partition| (partition, last.at)));
        }
        for (partition, asked) in silent {
            world.suspect(partition, asked);
        }
        for txn in abandoned {
            world.cx.note(Note::Abandoned.into());
            self.abort_unilaterally(txn, AbortReason::Abandoned, vec![], world);
        }
        for txn in voteless {
            self.ask_for_votes(txn, None, world);
            R::on_undecided(self, txn, true, world);
        }
        for txn in unacknowledged {
            self.tell_participants(txn, None, world);
        }
        self.settle(world);
    }
}
