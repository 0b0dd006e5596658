//! Driving one transaction to its end: by the gateway that began it, and by whoever recovers it. The
//! same code, with another first question.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use orthodrome_core::Wire as _;
use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{NodeId, PartitionId, TxnId};
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::{AbortReason, Key, Outcome, Read, Reads, Writes};

use super::Config;
use super::choose::choose;
use super::message::{Answer, Ballot, Msg, Output, Text, Value, merge_newest};
use crate::portions::{Assembly, Portion};

/// Messages to send.
pub(super) type Out = Vec<(NodeId, Msg)>;

/// A transaction that this node drives to its end.
#[derive(Debug)]
pub(super) struct Drive {
    pub txn: TxnId,
    pub text: Option<Arc<Text>>,
    pub ballot: Ballot,
    pub stage: Stage,
    /// How often its timer has expired in this stage.
    pub times: u32,
    /// What it read, if this node computed what came of it.
    pub reads: Option<Reads>,
    slots: BTreeMap<PartitionId, Slot>,
    /// The highest ballot heard of.
    highest: Ballot,
    /// It was recovered, or it had to wait for predecessors or for a second closing.
    pub path: &'static str,
}

/// What the driver is after.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Stage {
    /// Decisions of all partitions.
    Ordering,
    /// What it reads at F.
    Observing(Timestamp),
    /// It has ended; everybody has to hear of it.
    Ending(Arc<Output>),
}

/// One participant.
#[derive(Debug)]
struct Slot {
    replicas: Vec<NodeId>,
    named: Vec<NodeId>,
    has_reads: bool,
    phase: Phase,
    /// h has decided it.
    is_of_h: bool,
    observed: BTreeMap<NodeId, Observation>,
    acks: BTreeSet<NodeId>,
}

/// How far a slot is.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Phase {
    /// h was asked, or somebody else recovers.
    Asked,
    Promising(BTreeMap<NodeId, Answer>),
    Proposing(Value, BTreeSet<NodeId>),
    Chosen(Value),
}

#[derive(Debug, Default)]
struct Observation {
    at: Timestamp,
    parts: Assembly<Vec<(Key, Read)>>,
    whole: Option<Vec<(Key, Read)>>,
}

/// What came of an answer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Progress {
    /// Nothing that others need to know.
    Nothing,
    /// It has ended so.
    Ended(Arc<Output>),
    /// Somebody else recovers it.
    Preempted,
    /// Enough replicas have applied it.
    Complete,
    /// It ended long ago, and nobody knows how.
    Forgotten,
}

impl Slot {
    fn majority(&self) -> usize {
        self.replicas.len() / 2 + 1
    }
}

impl Drive {
    pub(super) fn new(
        cluster: &Cluster,
        txn: TxnId,
        text: Option<Arc<Text>>,
        participants: impl IntoIterator<Item = PartitionId>,
    ) -> Self {
        let mut drive = Self {
            txn,
            text: None,
            ballot: Ballot::default(),
            stage: Stage::Ordering,
            times: 0,
            reads: None,
            slots: BTreeMap::new(),
            highest: Ballot::default(),
            path: "fast",
        };
        for partition in participants {
            drive.add(cluster, partition);
        }
        if let Some(text) = text {
            drive.adopt(cluster, text);
        }
        drive
    }

    fn add(&mut self, cluster: &Cluster, partition: PartitionId) {
        let placed = cluster.partition(partition);
        let replicas = placed.map_or_else(Vec::new, |placed| placed.replicas.clone());
        self.slots.entry(partition).or_insert_with(|| Slot {
            replicas,
            named: Vec::new(),
            has_reads: false,
            phase: Phase::Asked,
            is_of_h: false,
            observed: BTreeMap::new(),
            acks: BTreeSet::new(),
        });
    }

    fn adopt(&mut self, cluster: &Cluster, text: Arc<Text>) {
        for side in &text.sides {
            self.add(cluster, side.partition);
            if let Some(slot) = self.slots.get_mut(&side.partition) {
                slot.named.clone_from(&side.named);
                slot.has_reads = text.reads(cluster, side.partition).next().is_some();
            }
        }
        self.text = Some(text);
    }

    /// Everybody who takes part.
    pub(super) fn participants(&self) -> Vec<PartitionId> {
        self.slots.keys().copied().collect()
    }

    /// Step 1: gives it to h of each partition.
    pub(super) fn begin(&mut self, out: &mut Out) {
        let Some(text) = &self.text else { return };
        for (&partition, slot) in &self.slots {
            if let Some(&h) = slot.named.first() {
                out.push((h, Msg::Begin { partition, text: text.clone() }));
            }
        }
    }

    /// Recovers every slot that is not decided, in a ballot above all that were heard of.
    pub(super) fn recover(&mut self, (node, incarnation): (NodeId, u64), out: &mut Out) {
        let round = self.highest.round.max(self.ballot.round).saturating_add(1);
        self.ballot = Ballot { round, node, incarnation };
        self.highest = self.ballot;
        self.path = "recovered";
        let (txn, ballot, participants) = (self.txn, self.ballot, self.participants());
        for (&partition, slot) in &mut self.slots {
            if matches!(slot.phase, Phase::Chosen(_)) {
                continue;
            }
            slot.phase = Phase::Promising(BTreeMap::new());
            for &to in &slot.replicas {
                let (text, participants) = (self.text.clone(), participants.clone());
                out.push((to, Msg::Recover { txn, partition, ballot, text, participants }));
            }
        }
    }

    /// Somebody else promised so much.
    pub(super) fn heard_of(&mut self, ballot: Ballot) {
        self.highest = self.highest.max(ballot);
    }

    /// It is known how it ended.
    pub(super) fn end(&mut self, output: Arc<Output>, out: &mut Out) -> Progress {
        if matches!(self.stage, Stage::Ending(_)) {
            return Progress::Nothing;
        }
        self.stage = Stage::Ending(output.clone());
        self.times = 0;
        self.spread(out);
        Progress::Ended(output)
    }

    fn spread(&self, out: &mut Out) {
        let Stage::Ending(output) = &self.stage else { return };
        let (txn, all) = (self.txn, self.participants());
        for (&partition, slot) in &self.slots {
            for &to in slot.replicas.iter().filter(|to| !slot.acks.contains(to)) {
                let (output, participants) = (output.clone(), all.clone());
                out.push((to, Msg::Apply { txn, partition, output, participants }));
            }
        }
    }

    /// h has decided.
    pub(super) fn on_decided(
        &mut self,
        partition: PartitionId,
        at: Timestamp,
        (config, out): (&Config, &mut Out),
    ) -> Progress {
        let Some(slot) = self.slots.get_mut(&partition) else { return Progress::Nothing };
        if let Phase::Chosen(value) = slot.phase {
            assert_eq!(value, Value::At(at), "{} has two decisions at {partition}", self.txn);
            return Progress::Nothing;
        }
        slot.phase = Phase::Chosen(Value::At(at));
        slot.is_of_h = true;
        self.advance((config, out))
    }

    /// A replica answers to a ballot, or to anything that came after the end.
    pub(super) fn on_promised(
        &mut self,
        from: NodeId,
        (partition, ballot): (PartitionId, Ballot),
        answer: Answer,
        cluster: &Cluster,
        (config, out): (&Config, &mut Out),
    ) -> Progress {
        if let Some(progress) = self.on_end_heard(from, partition, &answer, out) {
            return progress;
        }
        if self.text.is_none()
            && let Some(text) = answer.text.clone()
        {
            // With the text, replicas give stamps with their promises.
            self.adopt(cluster, text);
            if ballot == self.ballot && self.stage == Stage::Ordering {
                self.recover((ballot.node, ballot.incarnation), out);
            }
            return Progress::Nothing;
        }
        let txn = self.txn;
        let participants = self.participants();
        let Some(slot) = self.slots.get_mut(&partition) else { return Progress::Nothing };
        let Phase::Promising(answers) = &mut slot.phase else { return Progress::Nothing };
        if ballot != self.ballot {
            return Progress::Nothing;
        }
        if answer.promised > self.ballot {
            self.highest = self.highest.max(answer.promised);
            slot.phase = Phase::Asked;
            return Progress::Preempted;
        }
        answers.insert(from, answer);
        if answers.len() <= slot.replicas.len() / 2 {
            return Progress::Nothing;
        }
        let value = choose(&slot.named, answers, config.mutations).value();
        slot.phase = Phase::Proposing(value, BTreeSet::new());
        for &to in &slot.replicas {
            let (text, participants) = (self.text.clone(), participants.clone());
            out.push((to, Msg::Propose { txn, partition, ballot, value, text, participants }));
        }
        Progress::Nothing
    }

    /// If the answer says how it ended: what comes of that.
    fn on_end_heard(
        &mut self,
        from: NodeId,
        partition: PartitionId,
        answer: &Answer,
        out: &mut Out,
    ) -> Option<Progress> {
        if matches!(self.stage, Stage::Ending(_)) {
            return Some(Progress::Nothing);
        }
        if answer.is_forgotten {
            return Some(Progress::Forgotten);
        }
        let output = answer.ended.clone()?;
        if let Some(slot) = self.slots.get_mut(&partition) {
            slot.acks.insert(from);
        }
        Some(self.end(output, out))
    }

    /// A replica answers to a proposal.
    pub(super) fn on_accepted(
        &mut self,
        from: NodeId,
        (partition, ballot): (PartitionId, Ballot),
        answer: &Answer,
        (config, out): (&Config, &mut Out),
    ) -> Progress {
        if let Some(progress) = self.on_end_heard(from, partition, answer, out) {
            return progress;
        }
        let Some(slot) = self.slots.get_mut(&partition) else { return Progress::Nothing };
        let majority = slot.majority();
        let Phase::Proposing(value, accepted) = &mut slot.phase else { return Progress::Nothing };
        if ballot != self.ballot {
            return Progress::Nothing;
        }
        if answer.promised > self.ballot {
            self.highest = self.highest.max(answer.promised);
            slot.phase = Phase::Asked;
            return Progress::Preempted;
        }
        if answer.accepted == Some((ballot, *value)) {
            accepted.insert(from);
        }
        if accepted.len() < majority {
            return Progress::Nothing;
        }
        slot.phase = Phase::Chosen(*value);
        self.advance((config, out))
    }

    /// A replica has observed.
    pub(super) fn on_observed(
        &mut self,
        from: NodeId,
        (partition, at): (PartitionId, Timestamp),
        (portion, reads): (Portion, Vec<(Key, Read)>),
        (config, out): (&Config, &mut Out),
    ) -> Progress {
        let Some(slot) = self.slots.get_mut(&partition) else { return Progress::Nothing };
        let observation = slot.observed.entry(from).or_default();
        if observation.at > at || (observation.at == at && observation.whole.is_some()) {
            return Progress::Nothing;
        }
        if observation.at < at {
            *observation = Observation { at, ..Observation::default() };
        }
        if let Some(parts) = observation.parts.add(portion, reads) {
            observation.whole = Some(parts.concat());
        }
        self.advance((config, out))
    }

    /// Steps 5 and 6, as far as what is known allows.
    fn advance(&mut self, (config, out): (&Config, &mut Out)) -> Progress {
        if self.stage == Stage::Ordering {
            let mut largest = Some(Timestamp::ZERO);
            for slot in self.slots.values() {
                match slot.phase {
                    Phase::Chosen(Value::Refused) => {
                        let outcome = Outcome::Aborted(AbortReason::Recovery);
                        let output = Arc::new(Output { outcome, writes: Writes::new() });
                        return self.end(output, out);
                    }
                    Phase::Chosen(Value::At(at)) => largest = largest.map(|known| known.max(at)),
                    Phase::Asked | Phase::Promising(_) | Phase::Proposing(..) => largest = None,
                }
            }
            let Some(largest) = largest else { return Progress::Nothing };
            self.stage = Stage::Observing(largest);
            self.times = 0;
            if let Some(output) = self.output(largest, config) {
                return self.end(output, out);
            }
            self.commit(largest, config, out);
            if self.path == "fast" {
                self.path = "waited";
            }
        }
        let Stage::Observing(at) = self.stage else { return Progress::Nothing };
        match self.output(at, config) {
            Some(output) => self.end(output, out),
            None => Progress::Nothing,
        }
    }

    /// Tells those who do not know it that F is final: all whose partition decided less, or was
    /// recovered.
    fn commit(&self, at: Timestamp, config: &Config, out: &mut Out) {
        let txn = self.txn;
        for (&partition, slot) in &self.slots {
            let is_known = slot.is_of_h
                && (slot.phase == Phase::Chosen(Value::At(at))
                    || config.mutations.no_second_closing());
            if is_known {
                continue;
            }
            let (to, text) = if slot.is_of_h {
                (&slot.named, None)
            } else {
                (&slot.replicas, self.text.clone())
            };
            for &to in to {
                out.push((to, Msg::Commit { txn, partition, at, text: text.clone() }));
            }
        }
    }

    /// What comes of it, if everything that it reads is known.
    fn output(&mut self, at: Timestamp, config: &Config) -> Option<Arc<Output>> {
        let text = self.text.clone()?;
        let mut reads = Reads::new();
        for slot in self.slots.values().filter(|slot| slot.has_reads) {
            let is_then = |seen: &&Observation| {
                seen.whole.is_some() && (seen.at == at || config.mutations.no_second_closing())
            };
            let seen: Vec<&Observation> = slot.observed.values().filter(is_then).collect();
            let enough = if config.mutations.one_report() { 1 } else { slot.majority() };
            if seen.len() < enough {
                return None;
            }
            for whole in seen.iter().filter_map(|seen| seen.whole.clone()) {
                merge_newest(&mut reads, whole);
            }
        }
        let bytes: usize = reads.iter().map(|(key, read)| key.size() + read.size()).sum();
        let result = if bytes > config.read_bytes_max {
            Err(AbortReason::TooLarge)
        } else {
            text.functor.execute(&reads)
        };
        let (outcome, writes) = match result {
            Ok(writes) => (Outcome::Committed(at), writes),
            Err(reason) => (Outcome::Aborted(reason), Writes::new()),
        };
        self.reads = Some(reads);
        Some(Arc::new(Output { outcome, writes }))
    }

    /// A replica has applied it.
    pub(super) fn on_applied(&mut self, from: NodeId, partition: PartitionId) -> Progress {
        if !matches!(self.stage, Stage::Ending(_)) {
            return Progress::Nothing;
        }
        if let Some(slot) = self.slots.get_mut(&partition) {
            slot.acks.insert(from);
        }
        let is_complete = self.slots.values().all(|slot| slot.acks.len() >= slot.replicas.len());
        if is_complete { Progress::Complete } else { Progress::Nothing }
    }

    /// Nothing came for a while.
    pub(super) fn on_timeout(
        &mut self,
        me: (NodeId, u64),
        patience: u32,
        out: &mut Out,
    ) -> Progress {
        self.times += 1;
        match &self.stage {
            Stage::Ordering => self.recover(me, out),
            Stage::Observing(at) => {
                let (txn, at) = (self.txn, *at);
                for (&partition, slot) in &self.slots {
                    for &to in &slot.replicas {
                        let text = self.text.clone();
                        out.push((to, Msg::Commit { txn, partition, at, text }));
                    }
                }
            }
            Stage::Ending(_) => {
                let is_enough = |slot: &Slot| slot.acks.len() >= slot.majority();
                if self.times >= patience && self.slots.values().all(is_enough) {
                    // Others will ask when they are back.
                    return Progress::Complete;
                }
                self.spread(out);
            }
        }
        Progress::Nothing
    }
}

impl Drive {
    /// Those who were asked and have not answered: replicas that should decide, or promise.
    pub(super) fn silent(&self) -> Vec<NodeId> {
        if self.stage != Stage::Ordering {
            return Vec::new();
        }
        let of = |slot: &Slot| match &slot.phase {
            Phase::Asked if self.ballot.round == 0 => slot.named.clone(),
            Phase::Promising(answers) => {
                let silent = slot.replicas.iter().filter(|node| !answers.contains_key(node));
                silent.copied().collect()
            }
            Phase::Asked | Phase::Proposing(..) | Phase::Chosen(_) => Vec::new(),
        };
        self.slots.values().flat_map(of).collect()
    }
}
