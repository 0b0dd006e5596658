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
use super::message::{Answer, Ballot, Msg, Offer, Output, Text, Value, merge_newest};
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
    /// What an interactive transaction writes.
    register: Option<Register>,
    /// The highest ballot heard of.
    highest: Ballot,
    /// It was recovered, or it had to wait for predecessors or for a second closing.
    pub path: &'static str,
    /// Why its caller, or the gateway for it, aborts it.
    pub reason: AbortReason,
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
    /// h has decided it, or all replicas have stamped it alike.
    is_of_h: bool,
    /// In direct mode: who has stamped it how.
    stamped: BTreeMap<NodeId, Timestamp>,
    /// By replica, and by the time as of which it tells: that may be F, or more, or less.
    observed: BTreeMap<(NodeId, Timestamp), Observation>,
    /// Predecessors that were open and are not any more, as of then; and what was read of their keys.
    cleared: BTreeMap<(TxnId, Timestamp), Vec<(Key, Read)>>,
    acks: BTreeSet<NodeId>,
}

/// The register of an interactive transaction (D16).
#[derive(Debug)]
struct Register {
    partition: PartitionId,
    /// What its replicas have promised to this driver: 0 is the gateway's own ballot.
    ballot: Ballot,
    /// Somebody else was promised more: it needs a ballot above that.
    is_fenced: bool,
    /// Only the gateway has a caller that may still decide.
    has_caller: bool,
    /// What the caller decided last.
    mine: Option<Arc<Offer>>,
    /// What f + 1 replicas that promised had.
    found: Option<Vec<Arc<Offer>>>,
    proposed: Option<Arc<Offer>>,
    /// Who has stored what was proposed, or `mine` at ballot 0.
    stored: BTreeSet<NodeId>,
}

/// What the register says.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Verdict {
    Wait,
    /// f + 1 replicas have stored what this decision of the caller writes, or that it does not.
    Decided(Option<Writes>, u32),
    /// The caller decided on what is not true at the transaction's place.
    Stale,
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
    parts: Assembly<Seen>,
    whole: Option<Seen>,
}

/// What a replica knows below a place, and which predecessors have not ended there.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    pub reads: Vec<(Key, Read)>,
    pub open: Vec<TxnId>,
}

/// What came of an answer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Progress {
    /// Nothing that others need to know.
    Nothing,
    /// It has ended so.
    Ended(Arc<Output>),
    /// What it reads at its place is known, and nothing is decided on it yet.
    Exact,
    /// Its caller decided on what is not true at its place.
    Stale,
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
            register: None,
            highest: Ballot::default(),
            path: "fast",
            reason: AbortReason::Client,
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
            stamped: BTreeMap::new(),
            observed: BTreeMap::new(),
            cleared: BTreeMap::new(),
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
        if let Some(partition) = text.register {
            self.register.get_or_insert_with(|| Register {
                partition,
                ballot: self.ballot,
                is_fenced: false,
                has_caller: false,
                mine: None,
                found: None,
                proposed: None,
                stored: BTreeSet::new(),
            });
        }
        self.text = Some(text);
    }

    /// The caller of this gateway will decide what it writes.
    pub(super) fn expect_decision(&mut self) {
        if let Some(register) = &mut self.register {
            register.has_caller = true;
        }
    }

    /// True if the caller has decided before. Somebody who recovers may find that decision, so the
    /// register has to say what counts.
    pub(super) fn has_offer(&self) -> bool {
        self.register.as_ref().is_some_and(|register| register.mine.is_some())
    }

    /// True if the caller, or the gateway for it, aborts it.
    pub(super) fn is_aborting(&self) -> bool {
        let mine = self.register.as_ref().and_then(|register| register.mine.as_ref());
        mine.is_some_and(|mine| mine.writes.is_none())
    }

    /// The caller has decided, for the first time or again, in this run. Of some keys it had seen
    /// guesses.
    pub(super) fn offer(
        &mut self,
        (run, reads, guessed): (u32, &Reads, &BTreeSet<Key>),
        writes: Option<Writes>,
        cluster: &Cluster,
        (config, out): (&Config, &mut Out),
    ) -> Progress {
        let Some(register) = &mut self.register else { return Progress::Nothing };
        let (ballot, attempt) = (Ballot::default(), run);
        let seen = reads.iter().map(|(key, read)| (key.clone(), read.version)).collect();
        let of = |key: &Key| Some((key.clone(), reads.get(key)?.value.clone()));
        let guessed = guessed.iter().filter_map(of).collect();
        register.mine = Some(Arc::new(Offer { ballot, attempt, seen, writes, guessed }));
        if register.ballot == Ballot::default() {
            register.stored.clear();
        }
        self.store(out);
        let progress = self.advance((config, out));
        if !matches!(self.stage, Stage::Ending(_)) {
            self.announce(cluster, out);
        }
        progress
    }

    /// Tells the replicas that later transactions may ask what this one will probably write.
    fn announce(&self, cluster: &Cluster, out: &mut Out) {
        let (Some(register), Some(text)) = (&self.register, &self.text) else { return };
        let Some(mine) = &register.mine else { return };
        let (txn, at, run) = (self.txn, text.t, mine.attempt);
        for (&partition, slot) in &self.slots {
            if text.writes(cluster, partition).next().is_none() {
                continue;
            }
            let of = |(key, _): &(&Key, &Option<_>)| cluster.partition_of(key) == partition;
            let writes = mine.writes.iter().flatten().filter(of);
            let writes: Writes = writes.map(|(key, value)| (key.clone(), value.clone())).collect();
            for &to in &slot.replicas {
                let writes = writes.clone();
                out.push((to, Msg::Guess { txn, partition, at, run, writes }));
            }
        }
    }

    /// Stores what is to be stored where it is not yet.
    fn store(&self, out: &mut Out) {
        let Some(register) = &self.register else { return };
        let Some(slot) = self.slots.get(&register.partition) else { return };
        let own = register.mine.as_ref().filter(|_| register.ballot == Ballot::default());
        let Some(offer) = register.proposed.as_ref().or(own) else { return };
        if register.is_fenced {
            return;
        }
        let (txn, partition, all) = (self.txn, register.partition, self.participants());
        for &to in slot.replicas.iter().filter(|to| !register.stored.contains(to)) {
            let (offer, participants) = (offer.clone(), all.clone());
            out.push((to, Msg::Store { txn, partition, offer, participants }));
        }
    }

    /// A replica answers to what was to be stored.
    pub(super) fn on_stored(
        &mut self,
        from: NodeId,
        (partition, ballot, attempt): (PartitionId, Ballot, u32),
        answer: &Answer,
        (config, out): (&Config, &mut Out),
    ) -> Progress {
        if let Some(progress) = self.on_end_heard(from, partition, answer, out) {
            return progress;
        }
        let Some(register) = &mut self.register else { return Progress::Nothing };
        if ballot != register.ballot || register.is_fenced {
            return Progress::Nothing;
        }
        if answer.promised > ballot {
            register.is_fenced = true;
            self.highest = self.highest.max(answer.promised);
            return Progress::Preempted;
        }
        let offer = register.proposed.as_ref().or(register.mine.as_ref());
        if offer.is_some_and(|offer| (offer.ballot, offer.attempt) == (ballot, attempt)) {
            register.stored.insert(from);
            return self.advance((config, out));
        }
        Progress::Nothing
    }

    /// What the register says, given what the transaction reads at its place.
    fn verdict(&mut self, exact: &Reads, out: &mut Out) -> Verdict {
        let Some(register) = &mut self.register else { return Verdict::Wait };
        let majority = self.slots.get(&register.partition).map_or(1, Slot::majority);
        if register.is_fenced {
            return Verdict::Wait;
        }
        let is_stored = register.stored.len() >= majority;
        let is_fresh = |offer: &Arc<Offer>| offer.is_based_on(exact);
        if register.ballot == Ballot::default() {
            return match &register.mine {
                None => Verdict::Wait,
                Some(mine) if !is_fresh(mine) => Verdict::Stale,
                Some(mine) if is_stored => Verdict::Decided(mine.writes.clone(), mine.attempt),
                Some(_) => Verdict::Wait,
            };
        }
        if let Some(proposed) = &register.proposed {
            let (writes, run) = (proposed.writes.clone(), proposed.attempt);
            return if is_stored { Verdict::Decided(writes, run) } else { Verdict::Wait };
        }
        let Some(found) = &register.found else { return Verdict::Wait };
        let accepted = found.iter().filter(|offer| offer.ballot != Ballot::default());
        let accepted = accepted.max_by_key(|offer| offer.ballot);
        let own = found.iter().filter(|offer| is_fresh(offer)).max_by_key(|offer| offer.attempt);
        let (writes, attempt) = match (accepted.or(own), &register.mine) {
            (Some(offer), _) => (offer.writes.clone(), offer.attempt),
            (None, Some(mine)) if is_fresh(mine) => (mine.writes.clone(), mine.attempt),
            (None, Some(_)) => return Verdict::Stale,
            (None, None) if register.has_caller => return Verdict::Wait,
            (None, None) => (None, 0),
        };
        let seen = exact.iter().map(|(key, read)| (key.clone(), read.version)).collect();
        let (ballot, guessed) = (register.ballot, Writes::new());
        register.proposed = Some(Arc::new(Offer { ballot, attempt, seen, writes, guessed }));
        register.stored.clear();
        self.store(out);
        Verdict::Wait
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
                let direct = slot.replicas.iter().filter(|_| text.is_direct(partition));
                for &to in direct.filter(|to| **to != h) {
                    out.push((to, Msg::Direct { partition, text: text.clone() }));
                }
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
            let register = self.register.as_mut().filter(|it| it.partition == partition);
            let is_fenced = register.as_ref().is_some_and(|register| register.is_fenced);
            if matches!(slot.phase, Phase::Chosen(_)) && !is_fenced {
                continue;
            }
            if let Some(register) = register {
                (register.ballot, register.is_fenced) = (ballot, false);
                (register.found, register.proposed) = (None, None);
                register.stored.clear();
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
        let is_recovering = |it: &Register| it.partition == partition && it.ballot.round > 0;
        if self.text.is_none() || self.register.as_ref().is_some_and(is_recovering) {
            // This driver needs the text, or for the register the promises, that it has asked for.
            return Progress::Nothing;
        }
        slot.phase = Phase::Chosen(Value::At(at));
        slot.is_of_h = true;
        self.advance((config, out))
    }

    /// In direct mode a replica has stamped, and closed up to its stamp. Three equal stamps are the
    /// decision (D9).
    pub(super) fn on_stamped(
        &mut self,
        from: NodeId,
        (partition, stamp): (PartitionId, Timestamp),
        (config, out): (&Config, &mut Out),
    ) -> Progress {
        let Some(slot) = self.slots.get_mut(&partition) else { return Progress::Nothing };
        slot.stamped.insert(from, stamp);
        let enough = if config.mutations.two_stamps_are_enough() { 2 } else { slot.replicas.len() };
        let equal = slot.stamped.values().filter(|at| **at == stamp).count();
        if equal < enough || matches!(slot.phase, Phase::Chosen(_)) {
            return Progress::Nothing;
        }
        self.on_decided(partition, stamp, (config, out))
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
        let offers = answers.values().filter_map(|answer| answer.offer.clone()).collect();
        if let Some(register) = self.register.as_mut().filter(|it| it.partition == partition) {
            register.found = Some(offers);
        }
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
        (portion, seen): (Portion, Seen),
        (config, out): (&Config, &mut Out),
    ) -> Progress {
        let Some(slot) = self.slots.get_mut(&partition) else { return Progress::Nothing };
        if matches!(self.stage, Stage::Observing(f) if f != at && !config.mutations.no_second_closing())
        {
            return Progress::Nothing;
        }
        let observation = slot.observed.entry((from, at)).or_default();
        let Some(parts) = observation.parts.add(portion, seen) else { return Progress::Nothing };
        let mut whole = Seen::default();
        for Seen { reads, open } in parts {
            whole.reads.extend(reads);
            whole.open.extend(open);
        }
        // A predecessor that is open in one report and not in a later one has ended in between.
        if let Some(known) = observation.whole.take() {
            let mut reads = Reads::new();
            merge_newest(&mut reads, known.reads);
            merge_newest(&mut reads, whole.reads);
            whole.reads = reads.into_iter().collect();
            whole.open.retain(|txn| known.open.contains(txn));
        }
        observation.whole = Some(whole);
        self.advance((config, out))
    }

    /// A predecessor that was open has ended, or is none. One replica's word is enough: either is a
    /// fact.
    pub(super) fn on_cleared(
        &mut self,
        (partition, at): (PartitionId, Timestamp),
        (of, reads): (TxnId, Vec<(Key, Read)>),
        (config, out): (&Config, &mut Out),
    ) -> Progress {
        let Some(slot) = self.slots.get_mut(&partition) else { return Progress::Nothing };
        if matches!(self.stage, Stage::Ending(_)) {
            return Progress::Nothing;
        }
        slot.cleared.entry((of, at)).or_insert(reads);
        self.advance((config, out))
    }

    /// Steps 5 and 6, as far as what is known allows.
    fn advance(&mut self, (config, out): (&Config, &mut Out)) -> Progress {
        if self.stage == Stage::Ordering {
            let mut largest = Some(Timestamp::ZERO);
            for slot in self.slots.values() {
                match slot.phase {
                    Phase::Chosen(Value::Refused) => {
                        let output = Arc::new(Output::abort(AbortReason::Recovery));
                        return self.end(output, out);
                    }
                    Phase::Chosen(Value::At(at)) => largest = largest.map(|known| known.max(at)),
                    Phase::Asked | Phase::Promising(_) | Phase::Proposing(..) => largest = None,
                }
            }
            let Some(largest) = largest else { return Progress::Nothing };
            self.stage = Stage::Observing(largest);
            self.times = 0;
            let progress = self.compute(largest, config, out);
            if !matches!(self.stage, Stage::Ending(_)) {
                self.commit(largest, config, out);
                if self.path == "fast" && self.reads.is_none() {
                    self.path = "waited";
                }
            }
            return progress;
        }
        let Stage::Observing(at) = self.stage else { return Progress::Nothing };
        self.compute(at, config, out)
    }

    /// Computes what comes of it, if everything is known that this depends on.
    fn compute(&mut self, at: Timestamp, config: &Config, out: &mut Out) -> Progress {
        let is_first = self.reads.is_none();
        let Some(text) = self.text.clone() else { return Progress::Nothing };
        if is_first {
            self.reads = self.observed(at, config);
        }
        let Some(reads) = self.reads.clone() else { return Progress::Nothing };
        let bytes: usize = reads.iter().map(|(key, read)| key.size() + read.size()).sum();
        let mut run = 0;
        let result = if bytes > config.read_bytes_max {
            Err(AbortReason::TooLarge)
        } else if text.register.is_some() {
            match self.verdict(&reads, out) {
                Verdict::Decided(writes, of) => {
                    run = of;
                    writes.ok_or(if of == 0 { AbortReason::Recovery } else { self.reason })
                }
                Verdict::Stale => return Progress::Stale,
                Verdict::Wait if is_first => return Progress::Exact,
                Verdict::Wait => return Progress::Nothing,
            }
        } else {
            text.functor.execute(&reads)
        };
        let (outcome, writes) = match result {
            Ok(writes) => (Outcome::Committed(at), writes),
            Err(reason) => (Outcome::Aborted(reason), Writes::new()),
        };
        self.end(Arc::new(Output { outcome, writes, run }), out)
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

    /// What it reads at its place, once f + 1 replicas of each partition have told.
    fn observed(&self, at: Timestamp, config: &Config) -> Option<Reads> {
        let mut reads = Reads::new();
        for slot in self.slots.values().filter(|slot| slot.has_reads) {
            let is_then = |then: Timestamp| then == at || config.mutations.no_second_closing();
            let seen = slot.observed.iter().filter(|((_, then), _)| is_then(*then));
            let seen: BTreeMap<NodeId, &Seen> =
                seen.filter_map(|((from, _), seen)| Some((*from, seen.whole.as_ref()?))).collect();
            let enough = if config.mutations.one_report() { 1 } else { slot.majority() };
            if seen.len() < enough {
                return None;
            }
            for of in seen.values().flat_map(|seen| &seen.open) {
                let mut cleared = slot.cleared.iter();
                let is_it =
                    |((txn, then), _): &(&(TxnId, Timestamp), _)| txn == of && is_then(*then);
                let cleared = match slot.cleared.get(&(*of, at)) {
                    Some(reads) => Some(reads),
                    None => cleared.find(is_it).map(|(_, reads)| reads),
                };
                merge_newest(&mut reads, cleared?.clone());
            }
            for whole in seen.into_values() {
                merge_newest(&mut reads, whole.reads.clone());
            }
        }
        Some(reads)
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
        if let Some(register) = &mut self.register {
            // Promises were asked for and have not come, or the slot is not decided yet.
            let slot = self.slots.get(&register.partition);
            let is_chosen = slot.is_some_and(|slot| matches!(slot.phase, Phase::Chosen(_)));
            let is_open = register.found.is_none() || !is_chosen;
            register.is_fenced |= register.ballot.round > 0 && is_open;
        }
        match &self.stage {
            Stage::Ordering => self.recover(me, out),
            Stage::Observing(_) if self.register.as_ref().is_some_and(|it| it.is_fenced) => {
                self.recover(me, out);
            }
            Stage::Observing(_) if self.reads.is_some() => self.store(out),
            Stage::Observing(at) => {
                let (txn, at) = (self.txn, *at);
                self.store(out);
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
