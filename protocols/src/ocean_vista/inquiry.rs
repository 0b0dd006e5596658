//! Inquiries: any coordinator can find out the outcome of a transaction whose coordinator is lost
//! (R1).

use std::sync::Arc;

use orthodrome_core::id::{NodeId, PartitionId, TxnId};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::{Outcome, Reads};

use super::Note;
use super::message::{Body, Functor, Holding, Knowledge, Msg, Output, Path};
use super::server::{Local, World};
use super::state::ABORTED;
use crate::waiting::RetryState;

/// Inquiries of a node.
#[derive(Debug, Default)]
pub(super) struct Inquiries {
    open: OrdMap<TxnId, Inquiry>,
}

#[derive(Debug)]
struct Inquiry {
    gateways: OrdSet<NodeId>,
    functor: Arc<Functor>,
    /// The first partition that the transaction writes.
    partition: PartitionId,
    /// The number of times that all replicas were asked.
    round: u32,
    /// The Vwatermark at that time: answers about lower versions are final.
    visible: Timestamp,
    /// The epoch of that watermark.
    epoch: u64,
    /// The disks of the replicas.
    disks: Vec<u32>,
    answers: OrdMap<NodeId, Answer>,
    /// True if enough replicas have refused it, and now all are asked to refuse it finally.
    is_final: bool,
    stage: Stage,
    asked: RetryState,
}

/// A replica's knowledge of a transaction.
#[derive(Debug)]
pub(super) struct Answer {
    /// The replica has settled all versions up to this.
    pub settled: Timestamp,
    /// The knowledge.
    pub knowledge: Knowledge,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// The replicas are asked.
    Asking,
    /// It is stored somewhere; the outcome is known when it is below the Vwatermark.
    Waiting(Timestamp),
    /// It is committed and being executed.
    Executing(Timestamp),
    /// It has ended, and its reads are being repeated.
    Reading(Timestamp),
}

impl Inquiries {
    /// The number of inquiries.
    pub(super) fn len(&self) -> usize {
        self.open.len()
    }

    /// Starts an inquiry of a gateway about a transaction that writes something.
    pub(super) fn begin(
        &mut self,
        gateway: NodeId,
        functor: Arc<Functor>,
        world: &mut World<'_, '_>,
    ) {
        let txn = functor.txn;
        let first = functor.writes.first();
        let partition = first.map(|key| world.cluster.partition_of(key)).unwrap_or_default();
        if let Some(inquiry) = self.open.get_mut(&txn) {
            inquiry.gateways.insert(gateway);
            return;
        }
        world.cx.note(Note::Inquired);
        let inquiry = Inquiry {
            gateways: [gateway].into(),
            functor,
            partition,
            round: 0,
            visible: Timestamp::ZERO,
            epoch: 0,
            disks: Vec::new(),
            answers: OrdMap::new(),
            is_final: false,
            stage: Stage::Asking,
            asked: RetryState::new(world.cx.now()),
        };
        self.open.insert(txn, inquiry);
        self.ask(txn, world);
    }

    /// Asks every replica again, in a new round.
    fn ask(&mut self, txn: TxnId, world: &mut World<'_, '_>) {
        let Some(inquiry) = self.open.get_mut(&txn) else { return };
        inquiry.round += 1;
        (inquiry.visible, inquiry.epoch) = (world.marks.visible, world.marks.epoch);
        inquiry.disks = disks(inquiry.partition, world);
        inquiry.answers.clear();
        inquiry.is_final = false;
        inquiry.stage = Stage::Asking;
        inquiry.send(txn, world);
    }

    /// Handles a replica's knowledge.
    pub(super) fn on_known(
        &mut self,
        from: NodeId,
        (txn, round): (TxnId, u32),
        answer: Answer,
        world: &mut World<'_, '_>,
    ) {
        let Some(inquiry) = self.open.get_mut(&txn) else { return };
        if inquiry.round != round || inquiry.stage != Stage::Asking {
            return;
        }
        if let Knowledge::Ended(outcome) = answer.knowledge {
            match (outcome, &inquiry.functor.body) {
                // Its reads are reported too, if they can still be repeated.
                (Outcome::Committed(ts), Body::Ops(_)) => {
                    inquiry.stage = Stage::Reading(ts);
                    world.tell(Local::Execute { ts, functor: inquiry.functor.clone() });
                }
                (Outcome::Committed(_) | Outcome::Aborted(_) | Outcome::Unknown, _) => {
                    self.end(txn, outcome, None, world);
                }
            }
            return;
        }
        inquiry.answers.insert(from, answer);
        drop_void(&mut inquiry.answers);
        let all = world.cluster.partition(inquiry.partition).map_or(0, |p| p.replicas.len());
        if inquiry.answers.len() <= all / 2 {
            return;
        }
        let Some(last) = inquiry.stored().map(|held| held.ts).max() else {
            if inquiry.is_forgotten() {
                self.end(txn, Outcome::Unknown, None, world);
            } else if inquiry.is_final {
                // Enough replicas have refused it finally, so it can never be stored.
                self.end(txn, Outcome::Aborted(ABORTED), None, world);
            } else {
                inquiry.is_final = true;
                inquiry.round += 1;
                inquiry.answers.clear();
                inquiry.send(txn, world);
            }
            return;
        };
        if last >= inquiry.visible {
            inquiry.stage = Stage::Waiting(last);
            self.on_visible(world);
            return;
        }
        match inquiry.present() {
            Some((ts, functor)) => {
                inquiry.stage = Stage::Executing(ts);
                world.tell(Local::Execute { ts, functor });
            }
            // The void version is a late copy.
            None if inquiry.is_forgotten() => self.end(txn, Outcome::Unknown, None, world),
            None => self.end(txn, Outcome::Aborted(ABORTED), None, world),
        }
    }

    /// Handles a change of members. A transaction that a lost disk had refused may be accepted by
    /// its successor, so all replicas are asked again.
    pub(super) fn on_members(&mut self, world: &mut World<'_, '_>) {
        let is_lost = |(_, inquiry): &(&TxnId, &Inquiry)| {
            inquiry.stage == Stage::Asking && inquiry.disks != disks(inquiry.partition, world)
        };
        let due: Vec<TxnId> = self.open.iter().filter(is_lost).map(|(txn, _)| *txn).collect();
        for txn in due {
            self.ask(txn, world);
        }
    }

    /// Handles new watermarks.
    pub(super) fn on_visible(&mut self, world: &mut World<'_, '_>) {
        let visible = world.marks.visible;
        let is_visible =
            |inquiry: &Inquiry| matches!(inquiry.stage, Stage::Waiting(ts) if ts < visible);
        let due: Vec<TxnId> =
            self.open.iter().filter(|(_, i)| is_visible(i)).map(|(txn, _)| *txn).collect();
        for txn in due {
            self.ask(txn, world);
        }
    }

    /// Handles the result of a version.
    pub(super) fn on_executed(
        &mut self,
        ts: Timestamp,
        output: &Output,
        reads: &Reads,
        world: &mut World<'_, '_>,
    ) {
        let is_it = |inquiry: &Inquiry| matches!(inquiry.stage, Stage::Executing(at) | Stage::Reading(at) if at == ts);
        let Some((&txn, inquiry)) = self.open.iter().find(|(_, inquiry)| is_it(inquiry)) else {
            return;
        };
        let outcome = match (inquiry.stage, output) {
            // It has committed, regardless of the reads.
            (Stage::Reading(_), _) | (_, Ok(_)) => Outcome::Committed(ts),
            (_, Err(reason)) => Outcome::Aborted(*reason),
        };
        let reads = output.is_ok().then(|| reads.clone());
        self.end(txn, outcome, reads, world);
    }

    /// Its reads have been garbage-collected, so other nodes have computed it.
    pub(super) fn on_collected(&mut self, ts: Timestamp, world: &mut World<'_, '_>) {
        let is_it = |inquiry: &Inquiry| matches!(inquiry.stage, Stage::Executing(at) | Stage::Reading(at) if at == ts);
        let Some((&txn, inquiry)) = self.open.iter().find(|(_, i)| is_it(i)) else { return };
        if matches!(inquiry.stage, Stage::Reading(_)) {
            self.end(txn, Outcome::Committed(ts), None, world);
        } else {
            self.ask(txn, world);
        }
    }

    fn end(
        &mut self,
        txn: TxnId,
        outcome: Outcome,
        reads: Option<Reads>,
        world: &mut World<'_, '_>,
    ) {
        let Some(inquiry) = self.open.remove(&txn) else { return };
        for gateway in inquiry.gateways {
            let (reads, path) = (reads.clone(), Path::Recovered);
            world.send(gateway, Msg::Answer { txn, outcome, reads, path });
        }
    }

    /// Asks the replicas that have not answered again.
    pub(super) fn on_sweep(&mut self, world: &mut World<'_, '_>) {
        let now = world.cx.now();
        for (&txn, inquiry) in &mut self.open {
            if inquiry.stage == Stage::Asking
                && inquiry.asked.is_due(world.config.resend_after, now)
            {
                inquiry.asked = inquiry.asked.again(now);
                world.cx.note(Note::Resent);
                inquiry.send(txn, world);
            }
        }
    }
}

/// The disks of a partition's replicas.
fn disks(partition: PartitionId, world: &World<'_, '_>) -> Vec<u32> {
    let placed = world.cluster.partition(partition).into_iter();
    placed.flat_map(|placed| &placed.replicas).map(|&node| world.members.disk(node)).collect()
}

impl Inquiry {
    fn send(&self, txn: TxnId, world: &mut World<'_, '_>) {
        let placed = world.cluster.partition(self.partition);
        for &to in placed.into_iter().flat_map(|placed| &placed.replicas) {
            if !self.answers.contains_key(&to) {
                let Self { is_final, round, epoch, .. } = *self;
                world.send(to, Msg::Query { txn, is_final, round, epoch });
            }
        }
    }

    /// True if a replica has forgotten the transaction. A majority settled it and knew the outcome,
    /// so of any majority one replica knows it or has forgotten it.
    fn is_forgotten(&self) -> bool {
        self.answers.values().any(|answer| answer.knowledge == Knowledge::Forgotten)
    }

    /// The versions of the transaction at the replicas.
    fn stored(&self) -> impl Iterator<Item = &Holding> {
        self.answers.values().flat_map(Answer::stored)
    }

    /// The committed version, by the rule for readers ([`super::reading`]).
    fn present(&self) -> Option<(Timestamp, Arc<Functor>)> {
        let versions: OrdSet<Timestamp> = self.stored().map(|held| held.ts).collect();
        versions.into_iter().find_map(|ts| {
            let of_ts = || self.stored().filter(|held| held.ts == ts);
            let ballot = of_ts().map(|held| held.ballot).max()?;
            let of_ballot = || of_ts().filter(|held| held.ballot == ballot);
            if of_ballot().any(|held| held.is_aborted) {
                return None;
            }
            of_ballot().next().map(|held| (ts, held.functor.clone()))
        })
    }
}

impl Answer {
    fn stored(&self) -> &[Holding] {
        match &self.knowledge {
            Knowledge::Stored(held) => held,
            Knowledge::Refused { .. } | Knowledge::Ended(_) | Knowledge::Forgotten => &[],
        }
    }
}

/// Removes a version of one replica if another replica has settled everything past it without it.
/// The version is void, and its replica does not know that yet: it has restarted, or answered
/// before the others were informed. It will be asked again, and knows it then.
fn drop_void(answers: &mut OrdMap<NodeId, Answer>) {
    let best = answers.values().max_by_key(|answer| answer.settled);
    let Some(best) = best else { return };
    let settled = best.settled;
    let there: OrdSet<Timestamp> = best.stored().iter().map(|held| held.ts).collect();
    let is_void =
        |held: &Holding| !held.is_aborted && held.ts < settled && !there.contains(&held.ts);
    answers.retain(|_, answer| !answer.stored().iter().any(is_void));
}

#[cfg(test)]
mod tests {
    use orthodrome_core::id::ClientId;
    use orthodrome_core::txn::Key;

    use super::*;

    /// Three replicas' answers: the version up to which each has settled, and the numbers under
    /// which it has the transaction; negative ones are aborted.
    fn answers(of: [(u64, &[i64]); 3]) -> OrdMap<NodeId, Answer> {
        let functor = Arc::new(Functor {
            txn: TxnId::new(ClientId(1), 1),
            reads: Vec::new(),
            writes: vec![Key::from("k")],
            body: Body::Ops(Vec::new()),
            acknowledged_below: 0,
        });
        let holding = |&number: &i64| Holding {
            ts: Timestamp(number.unsigned_abs()),
            ballot: 0,
            is_aborted: number < 0,
            functor: functor.clone(),
        };
        let answer = |(settled, held): (u64, &[i64])| {
            let knowledge = match held {
                [] => Knowledge::Refused { is_final: false },
                held => Knowledge::Stored(held.iter().map(holding).collect()),
            };
            Answer { settled: Timestamp(settled), knowledge }
        };
        (0..).map(NodeId).zip(of.map(answer)).collect()
    }

    /// Which of three replicas' answers count.
    fn counted(of: [(u64, &[i64]); 3]) -> Vec<u32> {
        let mut answers = answers(of);
        drop_void(&mut answers);
        answers.keys().map(|node| node.0).collect()
    }

    /// The number under which it is committed.
    fn present(of: [(u64, &[i64]); 3]) -> Option<u64> {
        let inquiry = Inquiry {
            gateways: OrdSet::new(),
            functor: answers([(0, &[1]), (0, &[]), (0, &[])]).values().next().unwrap().stored()[0]
                .functor
                .clone(),
            partition: PartitionId(0),
            round: 1,
            visible: Timestamp::MAX,
            epoch: 0,
            disks: Vec::new(),
            answers: answers(of),
            is_final: false,
            stage: Stage::Asking,
            asked: RetryState::new(orthodrome_core::time::Time(0)),
        };
        inquiry.present().map(|(ts, _)| ts.0)
    }

    /// The 10 128th seed with leader churn. A replica had refused the transaction and then learned
    /// of the abort, but reported only the refusal. So the inquirer counted the version as stored,
    /// because the third replica had not learned of the abort.
    #[test]
    fn a_tombstone_counts_whatever_the_name_stands_for() {
        assert_eq!(present([(0, &[10]), (0, &[-10]), (0, &[])]), None);
        // A copy of it was aborted; it is committed under another number.
        assert_eq!(present([(0, &[-10, 20]), (0, &[-10]), (0, &[20])]), Some(20));
        assert_eq!(present([(0, &[-10, 20]), (0, &[-10, -20]), (0, &[])]), None);
    }

    /// The 10 091st seed with partitions. The first replica had restarted and not caught up. The
    /// second had learned that the version was dropped, and forgot it when that was settled.
    #[test]
    fn what_others_have_settled_without_is_not_there() {
        assert_eq!(counted([(5, &[10]), (20, &[]), (0, &[])]), [1, 2]);
        // No replica has settled past it, so it may be committed.
        assert_eq!(counted([(5, &[10]), (10, &[]), (0, &[])]), [0, 1, 2]);
        // The replica that has settled past it has it, and has not computed it yet.
        assert_eq!(counted([(5, &[10]), (20, &[10]), (0, &[10])]), [0, 1, 2]);
        // One number is void, the other is not; a known abort still counts.
        assert_eq!(counted([(5, &[10]), (20, &[30]), (0, &[-10, 30])]), [1, 2]);
    }
}
