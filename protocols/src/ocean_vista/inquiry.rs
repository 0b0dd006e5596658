//! What became of a transaction whose coordinator is lost: any other finds out (R1).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use orthodrome_core::id::{NodeId, PartitionId, TxnId};
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::{Outcome, Reads};

use super::Note;
use super::message::{Body, Functor, Knowledge, Msg, Output, Path};
use super::server::{Local, World};
use super::state::ABORTED;
use crate::waiting::Asked;

/// Inquiries of a node.
#[derive(Debug, Default)]
pub(super) struct Inquiries {
    open: BTreeMap<TxnId, Inquiry>,
}

#[derive(Debug)]
struct Inquiry {
    gateways: BTreeSet<NodeId>,
    functor: Arc<Functor>,
    /// The first partition that it writes.
    partition: PartitionId,
    /// Counts the times that everybody was asked afresh.
    round: u32,
    /// The Vwatermark when that was: about what lies below, answers are certain.
    visible: Timestamp,
    /// The epoch of that watermark.
    epoch: u64,
    answers: BTreeMap<NodeId, Knowledge>,
    /// So many have refused it that all are to refuse it for good.
    is_final: bool,
    stage: Stage,
    asked: Asked,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// Replicas are asked what they know.
    Asking,
    /// It is stored somewhere; what that comes to is known once it is below the Vwatermark.
    Waiting(Timestamp),
    /// It is there.
    Executing(Timestamp),
    /// It is over, and what it read is read once more.
    Reading(Timestamp),
}

impl Inquiries {
    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.open.len()
    }

    /// A gateway lost track of a transaction that writes something.
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
            answers: BTreeMap::new(),
            is_final: false,
            stage: Stage::Asking,
            asked: Asked::new(world.cx.now()),
        };
        self.open.insert(txn, inquiry);
        self.ask(txn, world);
    }

    /// Asks every replica afresh.
    fn ask(&mut self, txn: TxnId, world: &mut World<'_, '_>) {
        let Some(inquiry) = self.open.get_mut(&txn) else { return };
        inquiry.round += 1;
        (inquiry.visible, inquiry.epoch) = (world.marks.visible, world.marks.epoch);
        inquiry.answers.clear();
        inquiry.is_final = false;
        inquiry.stage = Stage::Asking;
        inquiry.send(txn, world);
    }

    /// A replica says what it knows.
    pub(super) fn on_known(
        &mut self,
        from: NodeId,
        (txn, round): (TxnId, u32),
        knowledge: Knowledge,
        world: &mut World<'_, '_>,
    ) {
        let Some(inquiry) = self.open.get_mut(&txn) else { return };
        if inquiry.round != round || inquiry.stage != Stage::Asking {
            return;
        }
        if let Knowledge::Ended(outcome) = knowledge {
            match (outcome, &inquiry.functor.body) {
                // What it read is told too, if it can still be read.
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
        inquiry.answers.insert(from, knowledge);
        let all = world.cluster.partition(inquiry.partition).map_or(0, |p| p.replicas.len());
        if inquiry.answers.len() <= all / 2 {
            return;
        }
        let Some(last) = inquiry.stored().map(|(ts, ..)| ts).max() else {
            if inquiry.is_final {
                // So many refuse it for good that nobody can store it any more.
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
            None => self.end(txn, Outcome::Aborted(ABORTED), None, world),
        }
    }

    /// The watermarks have moved.
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

    /// A version is computed.
    pub(super) fn on_executed(
        &mut self,
        ts: Timestamp,
        output: &Output,
        reads: &Reads,
        world: &mut World<'_, '_>,
    ) {
        let is_it = |inquiry: &Inquiry| matches!(inquiry.stage, Stage::Executing(at) | Stage::Reading(at) if at == ts);
        let Some((&txn, _)) = self.open.iter().find(|(_, inquiry)| is_it(inquiry)) else { return };
        let outcome = match output {
            Ok(_) => Outcome::Committed(ts),
            Err(reason) => Outcome::Aborted(*reason),
        };
        self.end(txn, outcome, Some(reads.clone()), world);
    }

    /// What it read is gone, so others have computed it.
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

    /// Asks again who has not answered.
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

    /// What replicas hold of it.
    fn stored(&self) -> impl Iterator<Item = (Timestamp, u64, bool, &Arc<Functor>)> {
        self.answers.values().filter_map(|knowledge| match knowledge {
            Knowledge::Stored { ts, ballot, is_aborted, functor } => {
                Some((*ts, *ballot, *is_aborted, functor))
            }
            Knowledge::Refused { .. } | Knowledge::Ended(_) => None,
        })
    }

    /// The version that is there, by the rule for readers ([`super::reading`]).
    fn present(&self) -> Option<(Timestamp, Arc<Functor>)> {
        let versions: BTreeSet<Timestamp> = self.stored().map(|(ts, ..)| ts).collect();
        versions.into_iter().find_map(|ts| {
            let of_ts = || self.stored().filter(|(stored, ..)| *stored == ts);
            let ballot = of_ts().map(|(_, ballot, ..)| ballot).max()?;
            let of_ballot = || of_ts().filter(|(_, held, ..)| *held == ballot);
            if of_ballot().any(|(_, _, is_aborted, _)| is_aborted) {
                return None;
            }
            of_ballot().next().map(|(_, _, _, functor)| (ts, functor.clone()))
        })
    }
}
