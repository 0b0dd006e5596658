//! A leader as participant, where participants vote unasked: what it says of its votes, and what it
//! remembers until everybody who took part can forget (Carousel §4.1.3, §4.3.3, as corrected by R1 and
//! R6).

use std::collections::{BTreeMap, BTreeSet};

use orthodrome_core::id::{PartitionId, TxnId};
use orthodrome_core::machine::Leak;
use orthodrome_core::time::Time;
use orthodrome_core::txn::{AbortReason, Outcome};

use super::message::ToCoordinator;
use super::state::Ended;
use super::votes::Gathering;
use crate::hosting::{Leading, World};
use crate::waiting::{BATCH, RetryState, take_due};

/// What a leader keeps as participant.
#[derive(Debug)]
pub struct Participation<P> {
    /// Prepares proposed, not yet chosen.
    pub preparing: BTreeMap<TxnId, P>,
    /// Refusals proposed, not yet chosen.
    pub refusing: BTreeSet<TxnId>,
    /// Decisions proposed, not yet chosen.
    pub ending: BTreeSet<TxnId>,
    /// When the coordinator of a prepared transaction was last asked for the decision.
    pub asked: BTreeMap<TxnId, RetryState>,
    /// Endings that the coordinator's group may still ask about, and when it was last asked.
    unforgotten: BTreeMap<TxnId, RetryState>,
    /// Coordinators that were asked what may be forgotten and have not answered, and since when.
    forget_asked: BTreeMap<PartitionId, Time>,
}

impl<P> Default for Participation<P> {
    fn default() -> Self {
        Self {
            preparing: BTreeMap::new(),
            refusing: BTreeSet::new(),
            ending: BTreeSet::new(),
            asked: BTreeMap::new(),
            unforgotten: BTreeMap::new(),
            forget_asked: BTreeMap::new(),
        }
    }
}

impl<P> Participation<P> {
    /// A new leader's, which finds these prepared and those ended.
    pub fn new<'a>(
        prepared: impl Iterator<Item = &'a TxnId>,
        ended: impl Iterator<Item = &'a TxnId>,
        now: Time,
    ) -> Self {
        Self {
            asked: prepared.map(|&txn| (txn, RetryState::new(now))).collect(),
            unforgotten: ended.map(|&txn| (txn, RetryState::new(now))).collect(),
            ..Self::default()
        }
    }

    /// What must be gone after quiet.
    pub fn leaks(&self) -> Vec<Leak> {
        vec![
            ("prepares under way", self.preparing.len()),
            ("refusals under way", self.refusing.len()),
            ("endings under way", self.ending.len()),
            ("doubtful prepares", self.asked.len()),
            ("unforgotten endings", self.unforgotten.len()),
        ]
    }
}

impl<R: Gathering> Leading<'_, R> {
    /// To the coordinator: how this partition votes.
    pub fn send_vote(
        &self,
        txn: TxnId,
        coordinator: PartitionId,
        vote: R::Vote,
        world: &mut World<'_, R>,
    ) {
        let vote = ToCoordinator::Vote { txn, coordinator, partition: self.id, vote };
        world.send_to_leader(coordinator, vote.into());
    }

    /// To the coordinator of a prepared transaction: what was decided?
    fn query_decision(
        &self,
        txn: TxnId,
        coordinator: PartitionId,
        vote: R::Vote,
        world: &mut World<'_, R>,
    ) {
        let query = ToCoordinator::QueryDecision { txn, coordinator, partition: self.id, vote };
        world.send_to_leader(coordinator, query.into());
    }

    /// The decision is in the log.
    pub fn acknowledge(&self, txn: TxnId, coordinator: PartitionId, world: &mut World<'_, R>) {
        let ack = ToCoordinator::Ack { txn, coordinator, partition: self.id };
        world.send_to_leader(coordinator, ack.into());
    }

    /// True if nothing is known here of a transaction whose client has acknowledged it, or was silent
    /// for so long that this group acknowledged it.
    pub fn has_forgotten(&mut self, txn: TxnId) -> bool {
        !self.leader.is_arriving(txn) && self.state.has_forgotten(txn)
    }

    /// It will never be prepared here, which the log says already; nor will another attempt of that
    /// name. A coordinator that has decided needs no vote; one that has not would ask for ever.
    pub fn refuse_forgotten(&self, txn: TxnId, coordinator: PartitionId, world: &mut World<'_, R>) {
        self.send_vote(txn, coordinator, R::refusal(AbortReason::Invalid), world);
    }

    /// Earlier attempts of a transaction that are prepared here, or about to be, and their
    /// coordinators.
    pub fn earlier_attempts(&mut self, txn: TxnId) -> Vec<(TxnId, PartitionId)> {
        let earlier = TxnId { attempt: 0, ..txn }..txn;
        let prepared = self.state.prepared.range(earlier.clone());
        let Participation { preparing, ending, .. } = self.leader.participation();
        prepared
            .chain(preparing.range(earlier))
            .map(|(txn, prepared)| (*txn, R::vote(prepared).0))
            .filter(|(txn, _)| !ending.contains(txn))
            .collect()
    }

    /// How did this partition vote? True if that was answered, or the answer is on its way to the log.
    pub fn answer_query_prepare(
        &mut self,
        txn: TxnId,
        coordinator: PartitionId,
        world: &mut World<'_, R>,
    ) -> bool {
        if let Some(prepared) = self.state.prepared.get(&txn) {
            self.send_vote(txn, coordinator, R::vote(prepared).1, world);
        } else if let Some(ended) = self.state.ended.get(&txn) {
            let vote = match ended.outcome {
                Outcome::Aborted(reason) => R::refusal(reason),
                Outcome::Committed(timestamp) => R::committed(timestamp),
                Outcome::Unknown => unreachable!("{txn} ended at {} without an outcome", self.id),
            };
            self.send_vote(txn, coordinator, vote, world);
        } else if self.has_forgotten(txn) {
            self.refuse_forgotten(txn, coordinator, world);
        } else {
            return self.leader.is_arriving(txn);
        }
        true
    }

    /// A transaction has ended here in the log: by a decision, to be acknowledged, or by this
    /// partition's own refusal, to be voted.
    pub fn answer_ended(&mut self, txn: TxnId, by_decision: bool, world: &mut World<'_, R>) {
        // Else it ended here before, by an earlier leader, and everybody has forgotten it.
        let Some(ended) = self.state.ended.get(&txn).copied() else { return };
        if by_decision {
            self.acknowledge(txn, ended.coordinator, world);
        } else if let Outcome::Aborted(reason) = ended.outcome {
            self.send_vote(txn, ended.coordinator, R::refusal(reason), world);
        }
    }

    /// What is kept of a transaction under way goes; only its ending is kept. True if a decision ended
    /// it.
    pub fn take_ended(&mut self, txn: TxnId, now: Time) -> bool {
        let Participation { preparing, refusing, ending, asked, unforgotten, .. } =
            self.leader.participation();
        preparing.remove(&txn);
        refusing.remove(&txn);
        asked.remove(&txn);
        unforgotten.insert(txn, RetryState::new(now));
        ending.remove(&txn)
    }

    /// The replica that was asked about `txn` does not lead `other`. Sends this leader's open
    /// requests about `txn` to the new leader.
    pub fn on_not_leader(&mut self, other: PartitionId, txn: TxnId, world: &mut World<'_, R>) {
        let state = self.state;
        if let Some((coordinator, vote)) = state.prepared.get(&txn).map(R::vote)
            && coordinator == other
        {
            let asked = self.leader.participation().asked.get(&txn);
            if asked.is_some_and(|asked| asked.times > 0) {
                self.query_decision(txn, coordinator, vote, world);
            } else {
                self.send_vote(txn, coordinator, vote, world);
            }
        }
        if let Some(Ended { coordinator, outcome: Outcome::Aborted(reason), .. }) =
            state.ended.get(&txn)
            && *coordinator == other
        {
            self.send_vote(txn, other, R::refusal(*reason), world);
        }
        self.ask_new_leader(txn, other, world);
    }

    /// R6: these need not be remembered for the coordinator's sake any more.
    pub fn on_forget(
        &mut self,
        coordinator: PartitionId,
        txns: Vec<TxnId>,
        world: &mut World<'_, R>,
    ) {
        let Participation { unforgotten, forget_asked, .. } = self.leader.participation();
        forget_asked.remove(&coordinator);
        let known: Vec<TxnId> = txns
            .into_iter()
            .filter(|txn| unforgotten.remove(txn).is_some())
            .filter(|txn| self.state.ended.get(txn).is_some_and(|ended| !ended.is_forgettable))
            .collect();
        if !known.is_empty() {
            self.propose(R::forget_command(known), world);
        }
    }

    /// Overdue work as participant: ask what became of prepared transactions, and which endings may be
    /// forgotten.
    pub fn sweep_participation(&mut self, world: &mut World<'_, R>) {
        let (now, after) = (world.cx.now(), R::timeouts(world.config).query_after);
        let due = match R::never_asks(world.config) {
            true => vec![],
            false => take_due(&mut self.leader.participation().asked, after, now),
        };
        for (txn, last) in due {
            let Some(prepared) = self.state.prepared.get(&txn) else {
                unreachable!("{} doubts {txn}, which is not prepared", self.id);
            };
            let (coordinator, vote) = R::vote(prepared);
            // Silence may mean that the caller still thinks, or that nobody is there.
            world.suspect(coordinator, last.at);
            self.query_decision(txn, coordinator, vote, world);
        }
        self.ask_to_forget(world);
    }

    fn ask_to_forget(&mut self, world: &mut World<'_, R>) {
        let (now, after) = (world.cx.now(), R::timeouts(world.config).query_after);
        let mut batches = BTreeMap::<PartitionId, Vec<TxnId>>::new();
        let Participation { unforgotten, forget_asked, .. } = self.leader.participation();
        unforgotten.retain(|txn, asked| {
            // First what costs nothing: there may be tens of thousands, and few are due.
            if !asked.is_due(after, now) {
                return true;
            }
            // Else it is forgotten: its client acknowledged it.
            let Some(ended) = self.state.ended.get(txn) else { return false };
            let batch = batches.entry(ended.coordinator).or_default();
            if batch.len() < BATCH {
                *asked = asked.again(now);
                batch.push(*txn);
            }
            true
        });
        for (coordinator, txns) in batches {
            if let Some(asked) = forget_asked.insert(coordinator, now) {
                world.suspect(coordinator, asked);
            }
            let ask = ToCoordinator::MayForget { coordinator, partition: self.id, txns };
            world.send_to_leader(coordinator, ask.into());
        }
    }
}
