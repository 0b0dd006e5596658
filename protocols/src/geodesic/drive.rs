//! Driving one transaction to its end: by the gateway that began it, and by whoever recovers it. The
//! same code, with another first question.

use std::sync::Arc;

use orthodrome_core::Wire as _;
use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{NodeId, PartitionId, TxnId};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::{AbortReason, Key, Outcome, Read, Reads, Version, Writes};

use super::Config;
use super::choose::choose;
use super::message::{
    Answer, Ballot, Foretold, Msg, Offer, Output, Predecessor, Text, Value, merge_newest,
};
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
    /// How often its timer has expired in this stage. News sets it back to 1.
    pub times: u32,
    /// Since the timer was set, a predecessor has ended or a replica has observed.
    has_news: bool,
    /// What it read, if this node computed what came of it.
    pub reads: Option<Reads>,
    /// What it writes, if that does not depend on what it reads.
    fixed: Option<Writes>,
    slots: OrdMap<PartitionId, Slot>,
    /// What an interactive transaction writes.
    register: Option<Register>,
    /// The highest ballot heard of.
    highest: Ballot,
    /// Predecessors whose gateways this driver has asked what they write at these partitions.
    followed: OrdSet<(TxnId, PartitionId)>,
    /// The keys for which it stands in line behind those predecessors.
    pub hot: OrdSet<Key>,
    /// The answers of those gateways.
    foretold: OrdMap<(TxnId, PartitionId), Arc<Foretold>>,
    /// What must have passed on every clock before it is answered, if that is less than F (D20).
    pub after: Option<Timestamp>,
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
    /// All replicas got it from the gateway (D9).
    is_direct: bool,
    /// h waits until it is asked again, or a stamp is above the timestamp.
    is_patient: bool,
    /// Their stamps of ballot 0.
    stamps: OrdMap<NodeId, Timestamp>,
    phase: Phase,
    /// Ballot 0 has decided it.
    is_of_ballot_zero: bool,
    /// By replica, and by the time as of which it tells: that may be F, or more, or less.
    observed: OrdMap<(NodeId, Timestamp), Observation>,
    acks: OrdSet<NodeId>,
    /// Replicas that know nothing of it, and will not hear of it any more: its client knows the outcome.
    gone: OrdSet<NodeId>,
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
    stored: OrdSet<NodeId>,
}

/// What the register says.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Verdict {
    Wait,
    /// f + 1 replicas have stored it.
    Decided(Option<Writes>),
    /// The caller decided on what is not true at the transaction's place.
    Stale,
}

/// How far a slot is.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Phase {
    /// h was asked, or somebody else recovers.
    Asked,
    Promising(OrdMap<NodeId, Answer>),
    Proposing(Proposal),
    Chosen(Value),
    /// f + 1 replicas know nothing of it. That was so when this driver had this ballot.
    Gone(Ballot),
}

/// What a recovery proposes for a slot.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Proposal {
    value: Value,
    accepted: OrdSet<NodeId>,
    /// These replicas have the text.
    have_text: OrdSet<NodeId>,
}

/// What a replica knows without the pending predecessors, and these.
type Partial = (Vec<(Key, Read)>, Vec<Predecessor>);

#[derive(Debug, Default)]
struct Observation {
    parts: Assembly<Vec<(Key, Read)>>,
    whole: Option<Vec<(Key, Read)>>,
    /// The answer that the replica gave while predecessors were still pending there.
    partial: Option<Partial>,
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
    /// It ended long ago. Hardly anybody knows how: this is the outcome, if one was told.
    Forgotten(Option<Outcome>),
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
            has_news: false,
            reads: None,
            fixed: None,
            slots: OrdMap::new(),
            register: None,
            highest: Ballot::default(),
            followed: OrdSet::new(),
            hot: OrdSet::new(),
            foretold: OrdMap::new(),
            after: None,
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
            is_direct: false,
            is_patient: false,
            stamps: OrdMap::new(),
            phase: Phase::Asked,
            is_of_ballot_zero: false,
            observed: OrdMap::new(),
            acks: OrdSet::new(),
            gone: OrdSet::new(),
        });
    }

    fn adopt(&mut self, cluster: &Cluster, text: Arc<Text>) {
        for side in &text.sides {
            self.add(cluster, side.partition);
            if let Some(slot) = self.slots.get_mut(&side.partition) {
                slot.named.clone_from(&side.named);
                (slot.is_direct, slot.is_patient) = (side.is_direct, side.is_patient);
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
                stored: OrdSet::new(),
            });
        }
        self.fixed = text.fixed_writes();
        self.text = Some(text);
    }

    /// True if nobody has to wait for what it reads, because its writes do not depend on that.
    pub(super) fn has_fixed_writes(&self) -> bool {
        self.fixed.is_some()
    }

    /// The caller of this gateway will decide what it writes.
    pub(super) fn expect_decision(&mut self) {
        if let Some(register) = &mut self.register {
            register.has_caller = true;
        }
    }

    /// The caller has decided.
    pub(super) fn offer(
        &mut self,
        seen: Vec<(Key, Version)>,
        writes: Writes,
        (config, out): (&Config, &mut Out),
    ) -> Progress {
        let Some(register) = &mut self.register else { return Progress::Nothing };
        let attempt = register.mine.as_ref().map_or(0, |mine| mine.attempt) + 1;
        let (ballot, writes) = (Ballot::default(), Some(writes));
        register.mine = Some(Arc::new(Offer { ballot, attempt, seen, writes }));
        if register.ballot == Ballot::default() {
            register.stored.clear();
        }
        self.store(out);
        self.advance((config, out))
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
    fn verdict(&mut self, exact: &[(Key, Version)], out: &mut Out) -> Verdict {
        let Some(register) = &mut self.register else { return Verdict::Wait };
        let majority = self.slots.get(&register.partition).map_or(1, Slot::majority);
        if register.is_fenced {
            return Verdict::Wait;
        }
        let is_stored = register.stored.len() >= majority;
        let is_fresh = |offer: &Arc<Offer>| offer.seen == exact;
        if register.ballot == Ballot::default() {
            return match &register.mine {
                None => Verdict::Wait,
                Some(mine) if !is_fresh(mine) => Verdict::Stale,
                Some(mine) if is_stored => Verdict::Decided(mine.writes.clone()),
                Some(_) => Verdict::Wait,
            };
        }
        if let Some(proposed) = &register.proposed {
            let writes = proposed.writes.clone();
            return if is_stored { Verdict::Decided(writes) } else { Verdict::Wait };
        }
        let Some(found) = &register.found else { return Verdict::Wait };
        let accepted = found.iter().filter(|offer| offer.ballot != Ballot::default());
        let accepted = accepted.max_by_key(|offer| offer.ballot);
        let own = found.iter().filter(|offer| is_fresh(offer)).max_by_key(|offer| offer.attempt);
        let writes = match (accepted.or(own), &register.mine) {
            (Some(offer), _) => offer.writes.clone(),
            (None, Some(mine)) if is_fresh(mine) => mine.writes.clone(),
            (None, Some(_)) => return Verdict::Stale,
            (None, None) if register.has_caller => return Verdict::Wait,
            (None, None) => None,
        };
        let (ballot, seen) = (register.ballot, exact.to_vec());
        register.proposed = Some(Arc::new(Offer { ballot, attempt: 0, seen, writes }));
        register.stored.clear();
        self.store(out);
        Verdict::Wait
    }

    /// Everybody who takes part.
    pub(super) fn participants(&self) -> Vec<PartitionId> {
        self.slots.keys().copied().collect()
    }

    /// Step 1: gives it to h of each partition; in direct mode to all replicas.
    pub(super) fn begin(&mut self, out: &mut Out) {
        let Some(text) = &self.text else { return };
        for (&partition, slot) in &self.slots {
            let first = slot.named.get(..1).unwrap_or_default();
            for &to in if slot.is_direct { &slot.replicas } else { first } {
                out.push((to, Msg::Begin { partition, text: text.clone(), more: vec![] }));
            }
        }
    }

    /// A replica has stamped it, in direct mode. If all have the same stamp, that is the decision (D9).
    pub(super) fn on_stamped(
        &mut self,
        from: NodeId,
        (partition, at): (PartitionId, Timestamp),
        (config, out): (&Config, &mut Out),
    ) -> Progress {
        let Some(slot) = self.slots.get_mut(&partition) else { return Progress::Nothing };
        if !(slot.is_direct && slot.replicas.contains(&from)) {
            return Progress::Nothing;
        }
        slot.stamps.insert(from, at);
        let enough = if config.mutations.two_equal_stamps() { 2 } else { slot.replicas.len() };
        let equal = slot.stamps.values().filter(|stamp| **stamp == at).count();
        if equal < enough {
            Progress::Nothing
        } else {
            self.on_decided(partition, at, (config, out))
        }
    }

    /// Asks h to decide where that is patient. False if that would not help everywhere: h or y has not
    /// answered, or h was asked before.
    fn ask_first(&mut self, out: &mut Out) -> bool {
        let Some(text) = &self.text else { return false };
        let mut open = self.slots.values().filter(|slot| slot.phase == Phase::Asked).peekable();
        let can_decide = |slot: &Slot| {
            slot.is_patient && slot.named.iter().all(|node| slot.stamps.contains_key(node))
        };
        if open.peek().is_none() || !open.all(can_decide) {
            return false;
        }
        for (&partition, slot) in &mut self.slots {
            if slot.phase == Phase::Asked
                && let Some(&h) = slot.named.first()
            {
                slot.is_patient = false;
                out.push((h, Msg::Begin { partition, text: text.clone(), more: vec![] }));
            }
        }
        true
    }

    /// Nobody recovers it here.
    pub(super) fn is_of_ballot_zero(&self) -> bool {
        self.ballot == Ballot::default()
    }

    /// Whether ballot 0 has decided at a partition.
    pub(super) fn is_decided(&self, partition: PartitionId) -> bool {
        self.slots.get(&partition).is_some_and(|slot| slot.is_of_ballot_zero)
    }

    /// Asks again what has not been answered. The ballot stays the same unless somebody else was
    /// promised more: an answer may take longer than the time-out, and one to an earlier ballot would
    /// not count.
    fn ask_again(&mut self, me: (NodeId, u64), out: &mut Out) {
        if self.stage == Stage::Ordering && self.is_of_ballot_zero() && self.ask_first(out) {
            return;
        }
        let is_lost = |slot: &Slot| match slot.phase {
            Phase::Asked => true,
            // Nobody was asked since that was known.
            Phase::Gone(then) => self.ballot <= then,
            Phase::Promising(_) | Phase::Proposing(_) | Phase::Chosen(_) => false,
        };
        let is_lost = self.slots.values().any(is_lost)
            || self.register.as_ref().is_some_and(|register| register.is_fenced);
        if is_lost {
            self.recover(me, out);
            return;
        }
        for (&partition, slot) in &self.slots {
            for &to in &slot.replicas {
                match &slot.phase {
                    Phase::Promising(answers) if !answers.contains_key(&to) => {
                        out.push((to, self.recover_msg(partition)));
                    }
                    Phase::Proposing(proposal) if !proposal.accepted.contains(&to) => {
                        out.push((to, self.propose_msg(partition, to, proposal)));
                    }
                    Phase::Asked
                    | Phase::Promising(_)
                    | Phase::Proposing(_)
                    | Phase::Chosen(_)
                    | Phase::Gone(_) => {}
                }
            }
        }
        self.store(out);
    }

    /// The ballot of this driver when it last learned that nothing is known of a slot.
    fn gone_since(&self) -> Option<Ballot> {
        let then = |slot: &Slot| match slot.phase {
            Phase::Gone(then) => Some(then),
            Phase::Asked | Phase::Promising(_) | Phase::Proposing(_) | Phase::Chosen(_) => None,
        };
        self.slots.values().filter_map(then).max()
    }

    fn recover_msg(&self, partition: PartitionId) -> Msg {
        let (txn, ballot, text) = (self.txn, self.ballot, self.text.clone());
        Msg::Recover { txn, partition, ballot, text, participants: self.participants() }
    }

    fn propose_msg(&self, partition: PartitionId, to: NodeId, proposal: &Proposal) -> Msg {
        let (txn, ballot, value) = (self.txn, self.ballot, proposal.value);
        let text = self.text.clone().filter(|_| !proposal.have_text.contains(&to));
        Msg::Propose { txn, partition, ballot, value, text, participants: self.participants() }
    }

    /// Recovers every slot that is not decided, in a ballot above all that were heard of.
    pub(super) fn recover(&mut self, (node, incarnation): (NodeId, u64), out: &mut Out) {
        let round = self.highest.round.max(self.ballot.round).saturating_add(1);
        self.ballot = Ballot { round, node, incarnation };
        self.highest = self.ballot;
        self.path = "recovered";
        let ballot = self.ballot;
        let is_gone = self.gone_since().is_some();
        let mut asked = Vec::new();
        for (&partition, slot) in &mut self.slots {
            let register = self.register.as_mut().filter(|it| it.partition == partition);
            let is_fenced = register.as_ref().is_some_and(|register| register.is_fenced);
            let is_chosen = matches!(slot.phase, Phase::Chosen(_)) && !is_fenced && !is_gone;
            if is_chosen || matches!(slot.phase, Phase::Gone(_)) {
                continue;
            }
            if let Some(register) = register {
                (register.ballot, register.is_fenced) = (ballot, false);
                (register.found, register.proposed) = (None, None);
                register.stored.clear();
            }
            slot.phase = Phase::Promising(OrdMap::new());
            asked.extend(slot.replicas.iter().map(|&to| (to, partition)));
        }
        out.extend(asked.into_iter().map(|(to, partition)| (to, self.recover_msg(partition))));
    }

    /// Somebody else promised so much.
    pub(super) fn heard_of(&mut self, ballot: Ballot) {
        self.highest = self.highest.max(ballot);
    }

    /// The highest ballot that it heard of.
    pub(super) fn highest(&self) -> Ballot {
        self.highest
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
                let more = vec![];
                out.push((to, Msg::Apply { txn, partition, output, participants, more }));
            }
        }
    }

    /// Ballot 0 has decided.
    pub(super) fn on_decided(
        &mut self,
        partition: PartitionId,
        at: Timestamp,
        (config, out): (&Config, &mut Out),
    ) -> Progress {
        let Some(slot) = self.slots.get_mut(&partition) else { return Progress::Nothing };
        match slot.phase {
            Phase::Chosen(value) => {
                assert_eq!(value, Value::At(at), "{} has two decisions at {partition}", self.txn);
                return Progress::Nothing;
            }
            // The message is late: everybody has forgotten the transaction since.
            Phase::Gone(_) => return Progress::Nothing,
            Phase::Asked | Phase::Promising(_) | Phase::Proposing(_) => {}
        }
        let is_recovering = |it: &Register| it.partition == partition && it.ballot.round > 0;
        if self.text.is_none() || self.register.as_ref().is_some_and(is_recovering) {
            // This driver needs the text, or for the register the promises, that it has asked for.
            return Progress::Nothing;
        }
        slot.phase = Phase::Chosen(Value::At(at));
        slot.is_of_ballot_zero = true;
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
        let gone_since = self.gone_since();
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
        if gone_since.is_some_and(|then| ballot > then) {
            // f + 1 replicas of another slot knew nothing of it before these were asked. Had it ended
            // and been forgotten, one of these would know. So that slot has no decision, and never will.
            return self.abort(out);
        }
        // A stamp is given to a text.
        let stamped = answers.iter().filter(|(_, answer)| answer.stamp.is_some());
        let have_text: OrdSet<NodeId> = stamped.map(|(node, _)| *node).collect();
        let named = (slot.named.as_slice(), slot.is_direct);
        let value = choose(named, answers, config.mutations).value();
        let offers = answers.values().filter_map(|answer| answer.offer.clone()).collect();
        if let Some(register) = self.register.as_mut().filter(|it| it.partition == partition) {
            register.found = Some(offers);
        }
        let proposal = Proposal { value, accepted: OrdSet::new(), have_text };
        slot.phase = Phase::Proposing(proposal.clone());
        let replicas = slot.replicas.clone();
        let asked = replicas.iter().map(|&to| (to, self.propose_msg(partition, to, &proposal)));
        out.extend(asked);
        Progress::Nothing
    }

    fn abort(&mut self, out: &mut Out) -> Progress {
        let outcome = Outcome::Aborted(AbortReason::Recovery);
        self.end(Arc::new(Output { outcome, writes: Writes::new() }), out)
    }

    /// If the answer says how it ended, or that the replica knows nothing of it: what comes of that.
    ///
    /// A replica that remembers that it ended is enough. One that does not remember even that has
    /// forgotten it with all others (R6), or never heard of it, and its client needs no answer any
    /// more. Neither it nor f + 1 of one slot can tell these apart; but f + 1 of each can.
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
        if answer.is_forgotten && answer.has_ended {
            return Some(Progress::Forgotten(answer.outcome));
        }
        if answer.is_forgotten {
            let ballot = self.ballot;
            let slot = self.slots.get_mut(&partition)?;
            slot.gone.insert(from);
            if slot.gone.len() >= slot.majority() && !matches!(slot.phase, Phase::Gone(_)) {
                slot.phase = Phase::Gone(ballot);
            }
            let mut slots = self.slots.values();
            let are_gone = slots.all(|slot| matches!(slot.phase, Phase::Gone(_)));
            return Some(if are_gone { Progress::Forgotten(None) } else { Progress::Nothing });
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
        let Phase::Proposing(proposal) = &mut slot.phase else { return Progress::Nothing };
        if ballot != self.ballot {
            return Progress::Nothing;
        }
        if answer.promised > self.ballot {
            self.highest = self.highest.max(answer.promised);
            slot.phase = Phase::Asked;
            return Progress::Preempted;
        }
        if answer.accepted == Some((ballot, proposal.value)) {
            proposal.accepted.insert(from);
        }
        if proposal.accepted.len() < majority {
            return Progress::Nothing;
        }
        slot.phase = Phase::Chosen(proposal.value);
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
        if matches!(self.stage, Stage::Observing(f) if f != at && !config.mutations.no_second_closing())
        {
            return Progress::Nothing;
        }
        let observation = slot.observed.entry((from, at)).or_default();
        if observation.whole.is_some() {
            return Progress::Nothing;
        }
        if let Some(parts) = observation.parts.add(portion, reads) {
            observation.whole = Some(parts.concat());
            self.has_news = true;
        }
        self.advance((config, out))
    }

    /// A replica has closed, but predecessors are still pending there. This driver asks their gateways.
    pub(super) fn on_blocked(
        &mut self,
        from: NodeId,
        (partition, at): (PartitionId, Timestamp),
        (reads, behind): Partial,
        (config, out): (&Config, &mut Out),
    ) -> Progress {
        if matches!(self.stage, Stage::Ending(_)) {
            return Progress::Nothing;
        }
        self.follow(partition, &behind, out);
        let Some(slot) = self.slots.get_mut(&partition) else { return Progress::Nothing };
        let observation = slot.observed.entry((from, at)).or_default();
        let known = observation.partial.as_ref().map_or(usize::MAX, |(_, known)| known.len());
        self.has_news |= behind.len() < known;
        observation.partial = Some((reads, behind));
        self.advance((config, out))
    }

    /// Asks the gateways of these predecessors what they write, if they were not asked before.
    pub(super) fn follow(&mut self, partition: PartitionId, behind: &[Predecessor], out: &mut Out) {
        for Predecessor { txn, gateway, keys } in behind {
            if self.followed.insert((*txn, partition)) {
                self.hot.extend(keys.iter().cloned());
                let (txn, keys, follower) = (*txn, keys.clone(), self.txn);
                out.push((*gateway, Msg::Follow { txn, partition, keys, follower }));
            }
        }
    }

    /// The gateway of a predecessor says what that writes.
    pub(super) fn on_foretold(
        &mut self,
        of: (TxnId, PartitionId),
        told: Arc<Foretold>,
        (config, out): (&Config, &mut Out),
    ) -> Progress {
        if matches!(self.stage, Stage::Ending(_)) {
            return Progress::Nothing;
        }
        let is_better = self.foretold.get(&of).is_none_or(|known| !known.is_certain);
        if self.followed.contains(&of) && is_better {
            self.foretold.insert(of, told);
            self.has_news = true;
        }
        self.advance((config, out))
    }

    /// True if a predecessor has ended, or a replica has observed, since this was last called. Then the
    /// next pause is short: if the next answer is lost, all transactions behind this one wait for it.
    pub(super) fn take_news(&mut self) -> bool {
        let is_observing = matches!(self.stage, Stage::Observing(_));
        let has_news = std::mem::take(&mut self.has_news) && is_observing;
        if has_news {
            self.times = self.times.min(1);
        }
        has_news
    }

    /// What followers may know of this transaction. Its outcome and its writes for certain, once they are
    /// computed, or once F is final if the writes do not depend on what it reads. Or those that its
    /// caller decided, if the caller had read what the transaction will probably read at its place:
    /// otherwise it aborts.
    pub(super) fn foretell(&self, config: &Config) -> Option<(Outcome, &Writes, bool)> {
        match &self.stage {
            Stage::Ending(output) => match output.outcome {
                Outcome::Committed(_) | Outcome::Aborted(_) => {
                    Some((output.outcome, &output.writes, true))
                }
                Outcome::Unknown => None,
            },
            Stage::Observing(at) if self.fixed.is_some() => {
                Some((Outcome::Committed(*at), self.fixed.as_ref()?, true))
            }
            Stage::Observing(at) => {
                let register = self.register.as_ref()?;
                let mine = register.mine.as_ref().filter(|_| register.ballot.round == 0)?;
                let (reads, writes) = (self.foreseen()?, mine.writes.as_ref()?);
                let versions = reads.iter().map(|(key, read)| (key, read.version));
                let is_fresh = versions.eq(mine.seen.iter().map(|(key, version)| (key, *version)));
                is_fresh.then_some((Outcome::Committed(*at), writes, false))
            }
            Stage::Ordering if config.mutations.foretold_before_final() => {
                let outcome = Outcome::Committed(self.text.as_ref()?.t);
                Some((outcome, self.fixed.as_ref()?, true))
            }
            Stage::Ordering => None,
        }
    }

    /// What the transaction will probably read at its place: what f + 1 replicas of each partition
    /// know, and what pending predecessors will write.
    pub(super) fn foreseen(&self) -> Option<Reads> {
        let Stage::Observing(at) = self.stage else { return None };
        self.merged(|then| then == at, Slot::majority, false)
    }

    /// What at least `enough` replicas of each partition know of the times that `is_then` accepts,
    /// completed with what predecessors write: for certain, or probably.
    fn merged(
        &self,
        is_then: impl Fn(Timestamp) -> bool,
        enough: impl Fn(&Slot) -> usize,
        is_certain: bool,
    ) -> Option<Reads> {
        let mut reads = Reads::new();
        for (&partition, slot) in self.slots.iter().filter(|(_, slot)| slot.has_reads) {
            let seen = slot.observed.iter().filter(|((_, then), _)| is_then(*then));
            let seen = seen.filter_map(|((from, then), observation)| {
                Some((*from, self.seen(partition, *then, observation, is_certain)?))
            });
            let seen: OrdMap<NodeId, Vec<(Key, Read)>> = seen.collect();
            if seen.len() < enough(slot) {
                return None;
            }
            for whole in seen.into_values() {
                merge_newest(&mut reads, whole);
            }
        }
        Some(reads)
    }

    /// What a replica observed, completed with what predecessors write if all of that is known: for
    /// certain, or probably.
    fn seen(
        &self,
        partition: PartitionId,
        at: Timestamp,
        observation: &Observation,
        is_certain: bool,
    ) -> Option<Vec<(Key, Read)>> {
        if let Some(whole) = &observation.whole {
            return Some(whole.clone());
        }
        let (reads, behind) = observation.partial.as_ref()?;
        let mut reads: Reads = reads.iter().cloned().collect();
        for predecessor in behind {
            let told = self.foretold.get(&(predecessor.txn, partition))?;
            if is_certain && !told.is_certain {
                return None;
            }
            let Outcome::Committed(timestamp) = told.outcome else { continue };
            if (timestamp, predecessor.txn) >= (at, self.txn) {
                continue;
            }
            let version = Version { timestamp, writer: predecessor.txn.name() };
            let own = told.writes.iter().filter(|(key, _)| reads.contains_key(*key));
            let own = own.map(|(key, value)| (key.clone(), Read { value: value.clone(), version }));
            let own: Vec<(Key, Read)> = own.collect();
            merge_newest(&mut reads, own);
        }
        Some(reads.into_iter().collect())
    }

    /// Steps 5 and 6, as far as what is known allows.
    fn advance(&mut self, (config, out): (&Config, &mut Out)) -> Progress {
        if self.stage == Stage::Ordering {
            let mut largest = Some(Timestamp::ZERO);
            for slot in self.slots.values() {
                match slot.phase {
                    Phase::Chosen(Value::Refused) => return self.abort(out),
                    Phase::Chosen(Value::At(at)) => largest = largest.map(|known| known.max(at)),
                    Phase::Asked | Phase::Promising(_) | Phase::Proposing(_) | Phase::Gone(_) => {
                        largest = None;
                    }
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

    /// Whether no replica that has promised has a value for the register, and nobody may bring one. Then
    /// it aborts, whatever it would read: it need not wait for predecessors.
    fn has_no_value(&self) -> bool {
        self.register.as_ref().is_some_and(|register| {
            let is_empty = register.found.as_ref().is_some_and(Vec::is_empty);
            is_empty && register.mine.is_none() && !register.has_caller
        })
    }

    /// Computes what comes of it, if everything is known that this depends on.
    fn compute(&mut self, at: Timestamp, config: &Config, out: &mut Out) -> Progress {
        let is_first = self.reads.is_none();
        let Some(text) = self.text.clone() else { return Progress::Nothing };
        if is_first {
            self.reads = self.observed(at, config);
        }
        if self.reads.is_none() && self.has_no_value() {
            return match self.verdict(&[], out) {
                Verdict::Decided(_) => self.abort(out),
                Verdict::Stale | Verdict::Wait => Progress::Nothing,
            };
        }
        let Some(reads) = self.reads.clone() else { return Progress::Nothing };
        let bytes: usize = reads.iter().map(|(key, read)| key.size() + read.size()).sum();
        let result = if bytes > config.read_bytes_max {
            Err(AbortReason::TooLarge)
        } else if text.register.is_some() {
            let exact: Vec<(Key, Version)> =
                reads.iter().map(|(key, read)| (key.clone(), read.version)).collect();
            match self.verdict(&exact, out) {
                Verdict::Decided(writes) => writes.ok_or(AbortReason::Recovery),
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
        self.end(Arc::new(Output { outcome, writes }), out)
    }

    /// Tells those who do not know it that F is final: all whose partition decided less, or was
    /// recovered. If F is above the timestamp, all: replicas with lower stamps would take it for a
    /// predecessor of others, which it may wait for itself. If what it writes does not depend on what it
    /// reads, all: nobody has to wait then for what it waits for.
    fn commit(&self, at: Timestamp, config: &Config, out: &mut Out) {
        let txn = self.txn;
        let is_raised = self.text.as_ref().is_some_and(|text| at > text.t);
        for (&partition, slot) in &self.slots {
            let is_known = slot.is_of_ballot_zero
                && self.fixed.is_none()
                && (slot.phase == Phase::Chosen(Value::At(at)) && !is_raised
                    || config.mutations.no_second_closing());
            if is_known {
                continue;
            }
            let (to, text) = match (slot.is_of_ballot_zero, slot.is_direct) {
                (true, false) => (&slot.named, None),
                (true, true) => (&slot.replicas, None),
                (false, _) => (&slot.replicas, self.text.clone()),
            };
            for &to in to {
                out.push((to, Msg::Commit { txn, partition, at, text: text.clone() }));
            }
        }
    }

    /// What it reads at its place, once f + 1 replicas of each partition have told.
    fn observed(&self, at: Timestamp, config: &Config) -> Option<Reads> {
        let mutations = config.mutations;
        self.merged(
            |then| then == at || mutations.no_second_closing(),
            |slot| if mutations.one_report() { 1 } else { slot.majority() },
            !mutations.foretold_is_certain(),
        )
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
            Stage::Ordering => self.ask_again(me, out),
            Stage::Observing(at) => {
                let (txn, at) = (self.txn, *at);
                // Its register may have to be recovered although its place is known.
                self.ask_again(me, out);
                if self.reads.is_some() {
                    return Progress::Nothing;
                }
                for (&partition, slot) in &self.slots {
                    for &to in &slot.replicas {
                        // Whoever observes for it has its text.
                        let has_text = slot.observed.keys().any(|(node, _)| *node == to);
                        let text = self.text.clone().filter(|_| !has_text);
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
    /// What one receiver may get of it: a text, a decision of the caller or an output for each
    /// partition.
    pub(super) fn bytes(&self) -> usize {
        let text = self.text.as_ref().map_or(0, |text| text.size());
        let register = self.register.as_ref();
        let offer = register.and_then(|it| it.proposed.as_ref().or(it.mine.as_ref()));
        let offer = offer.map_or(0, |offer| offer.size());
        let output = match &self.stage {
            Stage::Ending(output) => output.size(),
            Stage::Ordering | Stage::Observing(_) => 0,
        };
        text.max(offer).max(output).saturating_mul(self.slots.len())
    }

    /// True if others need not wait for it any more: it waits for predecessors, which may be among those
    /// others; or few answers are missing at its end; or nobody answers.
    pub(super) fn makes_room(&self, patience: u32) -> bool {
        let is_enough = |slot: &Slot| slot.acks.len() >= slot.majority();
        let is_ending = matches!(self.stage, Stage::Ending(_));
        let is_applied = is_ending && self.slots.values().all(is_enough);
        let is_observing = matches!(self.stage, Stage::Observing(_));
        self.times >= patience || ((is_applied || is_observing) && self.times > 0)
    }

    /// Partitions of which nobody has answered in this stage.
    pub(super) fn unanswered(&self) -> Vec<PartitionId> {
        let is_ending = matches!(self.stage, Stage::Ending(_));
        let is_unanswered = |slot: &Slot| match &slot.phase {
            _ if is_ending => slot.acks.is_empty(),
            Phase::Asked => slot.stamps.is_empty(),
            Phase::Promising(answers) => answers.is_empty(),
            Phase::Proposing(proposal) => proposal.accepted.is_empty(),
            Phase::Chosen(_) | Phase::Gone(_) => false,
        };
        let unanswered = self.slots.iter().filter(|(_, slot)| is_unanswered(slot));
        unanswered.map(|(partition, _)| *partition).collect()
    }

    /// The partition has other members now. What a former member has said is not counted any more.
    /// True if that concerns this transaction.
    pub(super) fn relocate(&mut self, partition: PartitionId, members: &[NodeId]) -> bool {
        let Some(slot) = self.slots.get_mut(&partition) else { return false };
        let is_member = |node: &NodeId| members.contains(node);
        slot.replicas = members.to_vec();
        slot.stamps.retain(|node, _| is_member(node));
        slot.observed.retain(|(node, _), _| is_member(node));
        slot.acks.retain(is_member);
        slot.gone.retain(is_member);
        match &mut slot.phase {
            Phase::Promising(answers) => answers.retain(|node, _| is_member(node)),
            Phase::Proposing(proposal) => {
                proposal.accepted.retain(is_member);
                proposal.have_text.retain(is_member);
            }
            Phase::Asked | Phase::Chosen(_) | Phase::Gone(_) => {}
        }
        if let Some(register) = self.register.as_mut().filter(|it| it.partition == partition) {
            register.stored.retain(is_member);
        }
        true
    }

    /// True if it has waited for answers in vain, and this node is a replica of one of its partitions.
    pub(super) fn is_delayed_by(&self, node: NodeId) -> bool {
        self.times > 0 && self.slots.values().any(|slot| slot.replicas.contains(&node))
    }

    /// Those who were asked and have not answered: replicas that should decide, or promise; in direct
    /// mode, where one that is dead would not be missed otherwise, those that should apply what came of
    /// it.
    pub(super) fn silent(&self) -> Vec<NodeId> {
        let is_ending = matches!(self.stage, Stage::Ending(_));
        if is_ending {
            let direct = self.slots.values().filter(|slot| slot.is_direct);
            let silent = direct.flat_map(|slot| {
                slot.replicas.iter().filter(|node| !slot.acks.contains(node)).copied()
            });
            return silent.collect();
        }
        if self.stage != Stage::Ordering {
            return Vec::new();
        }
        let of = |slot: &Slot| match &slot.phase {
            Phase::Asked if self.ballot.round == 0 && slot.is_direct => {
                let silent = slot.replicas.iter().filter(|node| !slot.stamps.contains_key(node));
                silent.copied().collect()
            }
            Phase::Asked if self.ballot.round == 0 => slot.named.clone(),
            Phase::Promising(answers) => {
                let silent = slot.replicas.iter().filter(|node| !answers.contains_key(node));
                silent.copied().collect()
            }
            Phase::Asked | Phase::Proposing(_) | Phase::Chosen(_) | Phase::Gone(_) => Vec::new(),
        };
        self.slots.values().flat_map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use orthodrome_core::id::ClientId;
    use orthodrome_core::machine::Protocol as _;
    use orthodrome_core::topology::Topology;
    use orthodrome_core::txn::{Op, Priority};

    use super::super::Geodesic;
    use super::super::message::{Kind, Side, Stamp};
    use super::*;
    use crate::functor::{Body, Functor};

    const P: PartitionId = PartitionId(0);
    const ME: (NodeId, u64) = (NodeId(4), 7);

    fn text() -> Arc<Text> {
        let (key, txn) = (Key::from("a"), TxnId::new(ClientId(1), 1));
        let body = Body::Ops(vec![Op::Put(key.clone(), "1".into())]);
        let (reads, writes) = (vec![], vec![key]);
        let functor = Functor { txn, reads, writes, body, acknowledged_below: 0 };
        let sides = vec![Side {
            partition: P,
            named: vec![NodeId(1), NodeId(2)],
            is_direct: false,
            is_patient: false,
        }];
        let (priority, gateway, t) = (Priority::default(), NodeId(4), Timestamp(5));
        Arc::new(Text { functor, priority, gateway, t, sides, register: None })
    }

    #[test]
    fn who_has_the_text_does_not_get_it_with_the_proposal() {
        let map = Topology::uniform(3, Duration::from_millis(1), Duration::from_millis(10));
        let cluster = Cluster::spread(map, 1, 1, 1, 3).unwrap();
        let config = Geodesic::configure(&cluster, "geodesic");
        let text = text();
        let mut drive = Drive::new(&cluster, text.txn(), Some(text.clone()), []);
        let mut out = Out::new();
        drive.recover(ME, &mut out);
        out.clear();
        let at = (P, drive.ballot);
        let stamp = Some(Stamp { at: Timestamp(5), kind: Kind::Recovery });
        let promised = Answer { promised: drive.ballot, ..Answer::default() };
        let stamped = Answer { stamp, ..promised.clone() };
        drive.on_promised(NodeId(1), at, stamped, &cluster, (&config, &mut out));
        assert_eq!(out, [], "one is not enough");
        drive.on_promised(NodeId(3), at, promised, &cluster, (&config, &mut out));
        let mut texts = Vec::new();
        for (to, msg) in &out {
            if let Msg::Propose { text, .. } = msg {
                texts.push((*to, text.is_some()));
            }
        }
        assert_eq!(texts, [(NodeId(1), false), (NodeId(2), true), (NodeId(3), true)]);
        // One accepts it. After a time-out the others are asked the same in the same ballot.
        let mut accepted = None;
        for (_, msg) in &out {
            if let Msg::Propose { value, .. } = msg {
                accepted = Some((drive.ballot, *value));
            }
        }
        let answer = Answer { promised: drive.ballot, accepted, ..Answer::default() };
        let _ = drive.on_accepted(NodeId(1), at, &answer, (&config, &mut out));
        out.clear();
        let _ = drive.on_timeout(ME, 5, &mut out);
        let asked: Vec<NodeId> = out.iter().map(|(to, _)| *to).collect();
        assert_eq!((asked, drive.ballot), (vec![NodeId(2), NodeId(3)], at.1));
    }

    /// Three equal stamps are a decision in direct mode. Two, or three that differ, wait for h.
    #[test]
    fn three_equal_stamps_decide_in_direct_mode() {
        let map = Topology::uniform(3, Duration::from_millis(1), Duration::from_millis(10));
        let cluster = Cluster::spread(map, 1, 1, 1, 3).unwrap();
        let decided = |is_direct, stamps: &[(u32, u64)], mutation: Option<&str>| {
            let mut config = Geodesic::configure(&cluster, "geodesic");
            mutation.into_iter().for_each(|mutation| config.mutations.enable(mutation));
            let mut text = Text::clone(&text());
            text.sides[0].is_direct = is_direct;
            let mut drive = Drive::new(&cluster, text.txn(), Some(Arc::new(text)), []);
            let mut out = Out::new();
            drive.begin(&mut out);
            for &(node, at) in stamps {
                let at = (P, Timestamp(at));
                let _ = drive.on_stamped(NodeId(node), at, (&config, &mut out));
            }
            let asked = out.iter().filter(|(_, msg)| matches!(msg, Msg::Begin { .. })).count();
            (asked, drive.is_decided(P))
        };
        assert_eq!(decided(true, &[(1, 5), (2, 5), (3, 5)], None), (3, true));
        assert_eq!(decided(true, &[(1, 5), (2, 5)], None), (3, false));
        assert_eq!(decided(true, &[(1, 5), (2, 5), (2, 5)], None), (3, false), "one says it twice");
        assert_eq!(decided(true, &[(1, 5), (2, 5), (3, 6)], None), (3, false));
        assert_eq!(decided(true, &[(1, 5), (2, 5)], Some("D9")), (3, true), "the mutation shows");
        assert_eq!(decided(false, &[(1, 5), (2, 5), (3, 5)], None), (1, false));
    }

    #[test]
    fn a_patient_h_is_asked_again_before_anybody_recovers() {
        let map = Topology::uniform(3, Duration::from_millis(1), Duration::from_millis(10));
        let cluster = Cluster::spread(map, 1, 1, 1, 3).unwrap();
        let config = Geodesic::configure(&cluster, "geodesic");
        let mut text = Text::clone(&text());
        (text.sides[0].is_direct, text.sides[0].is_patient) = (true, true);
        let text = Arc::new(text);
        // Those who have answered, and who is asked after a time-out, and after another one: whether by
        // `Begin`, or in recovery.
        let asked = |answered: [u32; 2]| {
            let mut drive = Drive::new(&cluster, text.txn(), Some(text.clone()), []);
            let mut out = Out::new();
            drive.begin(&mut out);
            for node in answered.map(NodeId) {
                let _ = drive.on_stamped(node, (P, Timestamp(5)), (&config, &mut out));
            }
            let silent: Vec<NodeId> = drive.silent();
            assert!(silent.len() == 1 && !answered.map(NodeId).contains(&silent[0]));
            [(); 2].map(|()| {
                out.clear();
                let _ = drive.on_timeout(ME, 5, &mut out);
                let kind = |(to, msg): &(NodeId, Msg)| (to.0, matches!(msg, Msg::Begin { .. }));
                out.iter().map(kind).collect::<Vec<_>>()
            })
        };
        let recovery = [1, 2, 3].map(|node| (node, false));
        assert_eq!(asked([1, 2]), [vec![(1, true)], recovery.to_vec()]);
        // h or y is silent, so h could not decide.
        assert_eq!(asked([1, 3])[0], recovery);
        assert_eq!(asked([2, 3])[0], recovery);
    }

    /// Replicas with lower stamps would take it for a predecessor of others until it has ended, and it
    /// may wait for one of those.
    #[test]
    fn everybody_learns_that_a_place_is_above_the_timestamp() {
        let map = Topology::uniform(3, Duration::from_millis(1), Duration::from_millis(10));
        let cluster = Cluster::spread(map, 1, 1, 1, 3).unwrap();
        let config = Geodesic::configure(&cluster, "geodesic");
        let told = |is_direct, at| {
            let mut text = Text::clone(&text());
            (text.functor.reads, text.sides[0].is_direct) = (vec![Key::from("a")], is_direct);
            text.functor.body = Body::Ops(vec![Op::Add(Key::from("a"), 1)]);
            let mut drive = Drive::new(&cluster, text.txn(), Some(Arc::new(text)), []);
            let mut out = Out::new();
            let _ = drive.on_decided(P, Timestamp(at), (&config, &mut out));
            let commits =
                out.iter().filter(|(_, msg)| matches!(msg, Msg::Commit { text: None, .. }));
            commits.map(|(to, _)| to.0).collect::<Vec<u32>>()
        };
        assert_eq!(told(false, 5), []);
        assert_eq!(told(false, 6), [1, 2]);
        assert_eq!(told(true, 5), []);
        assert_eq!(told(true, 6), [1, 2, 3]);
    }

    /// A transaction at [`P`] and p1, three replicas each.
    fn at_two_partitions() -> (Cluster, Config, Drive) {
        let map = Topology::uniform(3, Duration::from_millis(1), Duration::from_millis(10));
        let cluster = Cluster::spread(map, 1, 1, 2, 3).unwrap();
        let config = Geodesic::configure(&cluster, "geodesic");
        let drive = Drive::new(&cluster, text().txn(), Some(text()), [P, PartitionId(1)]);
        (cluster, config, drive)
    }

    #[test]
    fn what_one_partition_never_heard_of_is_aborted_once_the_other_was_asked_again() {
        let (cluster, config, mut drive) = at_two_partitions();
        let (other, mut out) = (PartitionId(1), Out::new());
        drive.recover(ME, &mut out);
        let unknown = Answer { is_forgotten: true, ..Answer::default() };
        let promise = |drive: &mut Drive, from, out: &mut Out| {
            let stamp = Some(Stamp { at: Timestamp(5), kind: Kind::Recovery });
            let answer = Answer { promised: drive.ballot, stamp, ..Answer::default() };
            let at = (P, drive.ballot);
            drive.on_promised(NodeId(from), at, answer, &cluster, (&config, out))
        };
        for from in [1, 2] {
            let at = (other, drive.ballot);
            let answer = unknown.clone();
            let from = NodeId(from);
            let told = drive.on_promised(from, at, answer, &cluster, (&config, &mut out));
            assert_eq!(told, Progress::Nothing);
        }
        // These may have answered before the others forgot it.
        for from in [1, 2] {
            assert_eq!(promise(&mut drive, from, &mut out), Progress::Nothing);
        }
        let _ = drive.on_timeout(ME, 5, &mut out);
        assert_eq!(promise(&mut drive, 1, &mut out), Progress::Nothing);
        let ended = promise(&mut drive, 3, &mut out);
        let Progress::Ended(output) = ended else { panic!("{ended:?}") };
        assert_eq!(output.outcome, Outcome::Aborted(AbortReason::Recovery));
    }

    /// Nobody is asked to decide where nothing is left to decide.
    #[test]
    fn what_one_partition_does_not_know_and_the_other_has_decided_is_recovered() {
        let (cluster, config, mut drive) = at_two_partitions();
        let (other, mut out) = (PartitionId(1), Out::new());
        drive.begin(&mut out);
        let _ = drive.on_decided(P, Timestamp(5), (&config, &mut out));
        let unknown = Answer { is_forgotten: true, ..Answer::default() };
        for from in [1, 2] {
            let (answer, at) = (unknown.clone(), (other, Ballot::default()));
            drive.on_promised(NodeId(from), at, answer, &cluster, (&config, &mut out));
        }
        out.clear();
        let _ = drive.on_timeout(ME, 5, &mut out);
        assert!(out.iter().any(|(_, msg)| matches!(msg, Msg::Recover { partition: P, .. })));
    }

    #[test]
    fn what_a_majority_of_each_partition_does_not_know_is_forgotten() {
        let map = Topology::uniform(3, Duration::from_millis(1), Duration::from_millis(10));
        let cluster = Cluster::spread(map, 1, 1, 1, 3).unwrap();
        let config = Geodesic::configure(&cluster, "geodesic");
        let mut drive = Drive::new(&cluster, text().txn(), Some(text()), []);
        let mut out = Out::new();
        drive.recover(ME, &mut out);
        let at = (P, drive.ballot);
        let unknown = Answer { is_forgotten: true, ..Answer::default() };
        let mut hear = |from| {
            drive.on_promised(NodeId(from), at, unknown.clone(), &cluster, (&config, &mut out))
        };
        assert_eq!(hear(1), Progress::Nothing);
        assert_eq!(hear(1), Progress::Nothing, "one of three may never have heard of it");
        assert_eq!(hear(3), Progress::Forgotten(None));
    }

    #[test]
    fn what_predecessors_write_completes_what_replicas_know_once_it_is_certain() {
        let map = Topology::uniform(3, Duration::from_millis(1), Duration::from_millis(10));
        let cluster = Cluster::spread(map, 1, 1, 1, 3).unwrap();
        let config = Geodesic::configure(&cluster, "geodesic");
        let (key, before) = (Key::from("a"), TxnId::new(ClientId(2), 1));
        let mut text = Text::clone(&text());
        text.functor.reads = vec![key.clone()];
        // What it reads if its predecessor ends so, and what its caller would be given before that.
        let run = |outcome, is_certain| {
            let mut drive = Drive::new(&cluster, text.txn(), Some(Arc::new(text.clone())), []);
            let mut out = Out::new();
            let _ = drive.on_decided(P, Timestamp(5), (&config, &mut out));
            out.clear();
            for replica in [1, 2] {
                let behind =
                    Predecessor { txn: before, gateway: NodeId(5), keys: vec![key.clone()] };
                let seen = (vec![(key.clone(), Read::default())], vec![behind]);
                let at = (P, Timestamp(5));
                let _ = drive.on_blocked(NodeId(replica), at, seen, (&config, &mut out));
            }
            let follows =
                |(to, msg): &(NodeId, Msg)| matches!(msg, Msg::Follow { .. }).then_some(*to);
            let asked: Vec<NodeId> = out.iter().filter_map(follows).collect();
            assert_eq!((asked, drive.foreseen()), (vec![NodeId(5)], None), "asked once");
            let writes = Writes::from([(key.clone(), Some("2".into()))]);
            let told = Arc::new(Foretold { outcome, writes, is_certain });
            let progress = drive.on_foretold((before, P), told, (&config, &mut out));
            let is_over = matches!(progress, Progress::Ended(_));
            let foreseen = drive.foreseen().or(drive.reads);
            (is_over, foreseen.and_then(|reads| Some(reads.get(&key)?.version.timestamp)))
        };
        let committed = |at| Outcome::Committed(Timestamp(at));
        assert_eq!(run(committed(4), false), (false, Some(Timestamp(4))), "only probably");
        assert_eq!(run(committed(4), true), (true, Some(Timestamp(4))));
        assert_eq!(run(committed(6), true), (true, Some(Timestamp(0))), "it comes later");
        let aborted = Outcome::Aborted(AbortReason::Client);
        assert_eq!(run(aborted, true), (true, Some(Timestamp(0))));
    }

    /// The pauses between questions grow while nothing changes.
    #[test]
    fn the_pause_is_short_again_after_a_predecessor_has_ended() {
        let map = Topology::uniform(3, Duration::from_millis(1), Duration::from_millis(10));
        let cluster = Cluster::spread(map, 1, 1, 1, 3).unwrap();
        let config = Geodesic::configure(&cluster, "geodesic");
        let key = Key::from("a");
        let before = |number| TxnId::new(ClientId(2), number);
        let mut text = Text::clone(&text());
        text.functor.reads = vec![key.clone()];
        let mut drive = Drive::new(&cluster, text.txn(), Some(Arc::new(text)), []);
        let mut out = Out::new();
        let _ = drive.on_decided(P, Timestamp(5), (&config, &mut out));
        let wait = |drive: &mut Drive| {
            for _ in 0..5 {
                let _ = drive.on_timeout(ME, 5, &mut Out::new());
            }
            (drive.take_news(), drive.times)
        };
        let block = |drive: &mut Drive, numbers: &[u64]| {
            let of = |number: &u64| {
                let (txn, gateway) = (before(*number), NodeId(5));
                Predecessor { txn, gateway, keys: vec![key.clone()] }
            };
            let seen = (vec![], numbers.iter().map(of).collect());
            let _ =
                drive.on_blocked(NodeId(1), (P, Timestamp(5)), seen, (&config, &mut Out::new()));
            drive.take_news()
        };
        assert_eq!(wait(&mut drive), (false, 5));
        assert!(block(&mut drive, &[1, 2]), "it is known now for whom it waits");
        assert_eq!((drive.times, wait(&mut drive)), (1, (false, 6)));
        assert!(!block(&mut drive, &[1, 2]), "the same again");
        assert!(block(&mut drive, &[2]), "one of two has ended");
        assert_eq!((drive.times, wait(&mut drive)), (1, (false, 6)));
        let outcome = Outcome::Aborted(AbortReason::Client);
        let told = Arc::new(Foretold { outcome, writes: Writes::new(), is_certain: true });
        for is_new in [true, false] {
            let told = told.clone();
            let _ = drive.on_foretold((before(2), P), told, (&config, &mut out));
            assert_eq!(drive.take_news(), is_new);
        }
        assert_eq!((drive.times, wait(&mut drive)), (1, (false, 6)));
        for is_new in [true, false] {
            let seen = (Portion::WHOLE, vec![(key.clone(), Read::default())]);
            let _ = drive.on_observed(NodeId(1), (P, Timestamp(5)), seen, (&config, &mut out));
            assert_eq!(drive.take_news(), is_new);
        }
    }

    #[test]
    fn a_transaction_without_a_value_is_given_up_whatever_its_predecessors_do() {
        let map = Topology::uniform(3, Duration::from_millis(1), Duration::from_millis(10));
        let cluster = Cluster::spread(map, 1, 1, 1, 3).unwrap();
        let config = Geodesic::configure(&cluster, "geodesic");
        let mut text = Text::clone(&text());
        (text.functor.reads, text.register) = (vec![Key::from("a")], Some(P));
        let mut drive = Drive::new(&cluster, text.txn(), Some(Arc::new(text)), []);
        let mut out = Out::new();
        drive.recover(ME, &mut out);
        let ballot = drive.ballot;
        let stamp = Some(Stamp { at: Timestamp(5), kind: Kind::Recovery });
        let promised = Answer { promised: ballot, stamp, ..Answer::default() };
        for from in [1, 2] {
            let answer = promised.clone();
            drive.on_promised(NodeId(from), (P, ballot), answer, &cluster, (&config, &mut out));
        }
        let accepted = Some((ballot, Value::At(Timestamp(5))));
        let accepted = Answer { accepted, ..promised.clone() };
        for from in [1, 2] {
            let _ = drive.on_accepted(NodeId(from), (P, ballot), &accepted, (&config, &mut out));
        }
        assert_eq!(drive.stage, Stage::Observing(Timestamp(5)), "and nobody has observed");
        let of = (P, ballot, 0);
        let first = drive.on_stored(NodeId(1), of, &promised, (&config, &mut out));
        assert_eq!(first, Progress::Nothing, "one may be lost");
        let ended = drive.on_stored(NodeId(2), of, &promised, (&config, &mut out));
        let Progress::Ended(output) = ended else { panic!("{ended:?}") };
        assert_eq!(output.outcome, Outcome::Aborted(AbortReason::Recovery));
    }

    #[test]
    fn what_one_replica_remembers_to_have_ended_is_forgotten() {
        let map = Topology::uniform(3, Duration::from_millis(1), Duration::from_millis(10));
        let cluster = Cluster::spread(map, 1, 1, 2, 3).unwrap();
        let config = Geodesic::configure(&cluster, "geodesic");
        let mut drive = Drive::new(&cluster, text().txn(), Some(text()), [P, PartitionId(1)]);
        let mut out = Out::new();
        drive.recover(ME, &mut out);
        let at = (P, drive.ballot);
        let answer = Answer { is_forgotten: true, has_ended: true, ..Answer::default() };
        let told = drive.on_promised(NodeId(1), at, answer.clone(), &cluster, (&config, &mut out));
        assert_eq!(told, Progress::Forgotten(None));
        let outcome = Some(Outcome::Committed(Timestamp(5)));
        let answer = Answer { outcome, ..answer };
        let told = drive.on_promised(NodeId(1), at, answer, &cluster, (&config, &mut out));
        assert_eq!(told, Progress::Forgotten(outcome));
    }
}
