//! A leader as participant, for protocols whose participants vote without a request: its votes, and
//! what it remembers until all parties of a transaction can forget it (Carousel §4.1.3, §4.3.3, as
//! corrected by R1 and R6).

use orthodrome_core::id::{PartitionId, TxnId};
use orthodrome_core::machine::Leak;
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::time::Time;
use orthodrome_core::txn::{AbortReason, Outcome};

use super::coordinator::Note;
use super::message::ToCoordinator;
use super::state::{Ended, Verdict};
use super::votes::Gathering;
use crate::hosting::{Leading, World};
use crate::waiting::{BATCH, RetryState, take_due};

/// A leader's state as participant.
#[derive(Debug)]
pub struct Participation<P> {
    /// Prepares that are proposed but not chosen.
    pub preparing: OrdMap<TxnId, P>,
    /// Refusals that are proposed but not chosen.
    pub refusing: OrdSet<TxnId>,
    /// Decisions that are proposed but not chosen.
    pub ending: OrdSet<TxnId>,
    /// For each prepared transaction, when its coordinator was last asked for the decision.
    pub asked: OrdMap<TxnId, RetryState>,
    /// Ended transactions about which the coordinator's group may still ask, and when that group
    /// was last asked.
    unforgotten: OrdMap<TxnId, RetryState>,
    /// Coordinators that were asked what may be forgotten and have not answered, and since when.
    forget_asked: OrdMap<PartitionId, Time>,
}

impl<P> Default for Participation<P> {
    fn default() -> Self {
        Self {
            preparing: OrdMap::new(),
            refusing: OrdSet::new(),
            ending: OrdSet::new(),
            asked: OrdMap::new(),
            unforgotten: OrdMap::new(),
            forget_asked: OrdMap::new(),
        }
    }
}

impl<P> Participation<P> {
    /// The state of a new leader, whose log has these prepared and ended transactions.
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

    /// State that must disappear when nothing is pending.
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
    /// Sends this partition's vote to the coordinator.
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

    /// Asks the coordinator of a prepared transaction for the decision.
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

    /// Reports that the decision is in the log.
    pub fn acknowledge(&self, txn: TxnId, coordinator: PartitionId, world: &mut World<'_, R>) {
        let ack = ToCoordinator::Ack { txn, coordinator, partition: self.id };
        world.send_to_leader(coordinator, ack.into());
    }

    /// True if this group knows nothing of a transaction, because its client has acknowledged it,
    /// or was silent for so long that the group acknowledged it.
    pub fn has_forgotten(&mut self, txn: TxnId) -> bool {
        !self.leader.is_arriving(txn) && self.state.has_forgotten(txn)
    }

    /// It will never be prepared here, according to the log; nor will another attempt of that name.
    /// A coordinator that has decided needs no vote; one that has not would ask for ever.
    pub fn refuse_forgotten(&self, txn: TxnId, coordinator: PartitionId, world: &mut World<'_, R>) {
        self.send_vote(txn, coordinator, R::refusal(AbortReason::Invalid), world);
    }

    /// Earlier attempts of a transaction that are prepared or being prepared here, and their
    /// coordinators.
    pub fn earlier_attempts(&mut self, txn: TxnId) -> Vec<(TxnId, PartitionId)> {
        let earlier = txn.earlier();
        let prepared = self.state.prepared.range(earlier.clone());
        let Participation { preparing, ending, .. } = self.leader.participation();
        prepared
            .chain(preparing.range(earlier))
            .map(|(txn, prepared)| (*txn, R::vote(prepared).0))
            .filter(|(txn, _)| !ending.contains(txn))
            .collect()
    }

    /// Answers a coordinator that asks for this partition's vote. True if it answered, or the
    /// answer is being written to the log.
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

    /// Carousel §4.1.3: the decision. Replicates it, applies it, and acknowledges it.
    pub fn on_decision(
        &mut self,
        txn: TxnId,
        coordinator: PartitionId,
        verdict: Verdict,
        world: &mut World<'_, R>,
    ) {
        let Participation { preparing, ending, .. } = self.leader.participation();
        if ending.contains(&txn) {
            return;
        }
        let is_open = preparing.contains_key(&txn) || self.state.prepared.contains_key(&txn);
        let ended = self.state.ended.get(&txn).map(|ended| ended.outcome);
        match (verdict, ended) {
            // A client may have received the commit. Continuing would lose it silently (N6).
            (Verdict::Commit(..), Some(Outcome::Aborted(reason))) => {
                unreachable!("{txn} commits and has aborted at {} ({reason})", self.id);
            }
            (verdict, _) if is_open => R::end(self, txn, coordinator, verdict, world),
            _ if self.state.is_over(txn) => self.acknowledge(txn, coordinator, world),
            (Verdict::Abort(_), _) if R::never_asks(world.config) => {
                self.acknowledge(txn, coordinator, world);
            }
            // This partition does not know the transaction, or the transaction waits here: its
            // prepare is in flight, or was lost. Remember the end (C9).
            (verdict @ Verdict::Abort(_), _) => {
                world.cx.note(Note::Tombstone.into());
                R::end(self, txn, coordinator, verdict, world);
            }
            // A commit needs this partition's prepare, and the end is kept until the client has
            // acknowledged it.
            (Verdict::Commit(..), _) => {
                unreachable!("{txn} commits and is not known at {}", self.id);
            }
        }
    }

    /// A client begins attempt n + 1 only when it knows that attempt n aborted. So attempt n is
    /// decided, and ends here without the coordinator's message.
    pub fn end_attempts(&mut self, earlier: Vec<(TxnId, PartitionId)>, world: &mut World<'_, R>) {
        for (old, coordinator) in earlier {
            world.cx.note(Note::AttemptSuperseded.into());
            R::end(self, old, coordinator, Verdict::Abort(AbortReason::Conflict), world);
        }
    }

    /// A transaction has ended here in the log. A decision must be acknowledged; the partition's
    /// own refusal is a vote.
    pub fn answer_ended(&mut self, txn: TxnId, by_decision: bool, world: &mut World<'_, R>) {
        // Otherwise an earlier leader ended it, and all parties have forgotten it.
        let Some(ended) = self.state.ended.get(&txn).copied() else { return };
        if by_decision {
            self.acknowledge(txn, ended.coordinator, world);
        } else if let Outcome::Aborted(reason) = ended.outcome {
            self.send_vote(txn, ended.coordinator, R::refusal(reason), world);
        }
    }

    /// Drops the state of a pending transaction and keeps only its ending. True if a decision ended
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

    /// R6: these outcomes need not be remembered for the coordinator any more.
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

    /// Overdue work as participant: ask for the decisions on prepared transactions, and which
    /// outcomes may be forgotten.
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
            // No answer may mean that the client has not decided yet, or that the coordinator has
            // failed.
            world.suspect(coordinator, last.at);
            self.query_decision(txn, coordinator, vote, world);
        }
        self.ask_to_forget(world);
    }

    fn ask_to_forget(&mut self, world: &mut World<'_, R>) {
        let (now, after) = (world.cx.now(), R::timeouts(world.config).query_after);
        let mut batches = OrdMap::<PartitionId, Vec<TxnId>>::new();
        let Participation { unforgotten, forget_asked, .. } = self.leader.participation();
        unforgotten.retain(|txn, asked| {
            // The cheap test first: there may be tens of thousands, and few are due.
            if !asked.is_due(after, now) {
                return true;
            }
            // Otherwise it was forgotten: its client acknowledged it.
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
