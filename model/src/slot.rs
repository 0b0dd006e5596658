//! One transaction at one partition: stamps, the record of h, and recovery by ballots.
//!
//! Messages are not objects here. A message contains durable state of its sender, and that state
//! only grows. So a step that a message causes reads the sender's state at any later moment, and a
//! message that is lost or late is a step that is not taken yet. In two cases state can change
//! after it was sent. They are kept as history: stamps that were raised, and answers to a ballot.

use std::fmt;
use std::hash::{Hash, Hasher};

use crate::mutation::Mutation;

/// No stamp, and no value.
pub const NONE: u8 = 0;
/// The decision that a transaction is refused for ever at this partition.
pub const TOMBSTONE: u8 = 15;

/// The origin of a replica's stamp.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// It has none.
    #[default]
    None,
    /// From the client, in direct mode, before the forward of h arrived.
    Direct,
    /// At ballot 0: the stamp of h, or a stamp that respects the stamp of h.
    Confirmed,
    /// With a promise.
    Recovery,
}

impl Kind {
    fn is_ballot_zero(self) -> bool {
        matches!(self, Kind::Direct | Kind::Confirmed)
    }
}

/// A replica's durable state about one transaction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Replica {
    /// The stamp, or `NONE`.
    pub stamp: u8,
    /// The origin of the stamp.
    pub kind: Kind,
    /// The highest ballot that the replica has promised; 0 at first.
    pub promised: u8,
    /// The ballot of the accepted value.
    pub accepted_ballot: u8,
    /// The accepted value, or `NONE`.
    pub accepted: u8,
    /// Stamps that this replica has acknowledged to h: bit s for stamp s. Used with raises only.
    pub acks: u8,
}

impl Hash for Replica {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let Replica { stamp, kind, promised, accepted_ballot, accepted, acks } = *self;
        let small = u32::from(stamp) | (kind as u32) << 4 | u32::from(promised) << 6;
        let rest = u32::from(accepted_ballot) << 8 | u32::from(accepted) << 10;
        state.write_u32(small | rest | u32::from(acks) << 16);
    }
}

/// The knowledge of one recovery coordinator. Each ballot has one coordinator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ballot {
    /// Replicas that have promised and answered, one bit each.
    pub answers: u8,
    /// The best accepted value among the answers, and its ballot.
    pub best_ballot: u8,
    /// The value that belongs to `best_ballot`.
    pub best: u8,
    /// The value that the coordinator proposes, or `NONE`.
    pub value: u8,
    /// Replicas that have accepted it.
    pub accepted: u8,
}

impl Hash for Ballot {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let Ballot { answers, best_ballot, best, value, accepted } = *self;
        let small = u32::from(answers) | u32::from(best_ballot) << 5 | u32::from(best) << 7;
        state.write_u32(small | u32::from(value) << 11 | u32::from(accepted) << 15);
    }
}

/// The rules of one configuration.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Failures that the group survives. It has 2f + 1 replicas.
    pub f: u8,
    /// How many recovery ballots there may be.
    pub ballots: u8,
    /// The client sends to all replicas at once.
    pub direct: bool,
    /// How often y may raise its stamp.
    pub raises: u8,
    /// No stamp exceeds this; it only ends raises.
    pub stamp_max: u8,
    /// The invariant that is dropped.
    pub mutation: Option<Mutation>,
}

impl Rules {
    /// Replicas in a group.
    #[must_use]
    pub fn replicas(&self) -> u8 {
        2 * self.f + 1
    }

    /// Whether `mutation` is the one that is enabled.
    #[must_use]
    pub fn drops(&self, mutation: Mutation) -> bool {
        self.mutation == Some(mutation)
    }
}

/// One step of one replica, of h, or of a recovery coordinator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// h stamps on the client's message.
    First,
    /// A named replica stamps, or confirms its stamp, on the forward of h.
    Second(u8),
    /// A replica stamps on the client's own message (direct mode).
    Direct(u8),
    /// y acknowledges its stamp to h. A step of its own only when stamps can be raised.
    Ack(u8),
    /// h records the decision at ballot 0.
    Record(u8),
    /// h proposes at ballot 0, because too few gave the largest stamp (f = 2).
    Slow,
    /// A replica accepts that proposal.
    SlowAccept(u8),
    /// y raises its stamp by one, for a transaction of higher priority.
    RaiseSecond(u8),
    /// h raises its stamp to a stamp that y has reported.
    RaiseFirst(u8),
    /// A replica promises ballot `ballot`, and answers.
    Promise {
        /// The ballot.
        ballot: u8,
        /// The replica.
        replica: u8,
    },
    /// The coordinator of a ballot proposes a value.
    Propose {
        /// The ballot.
        ballot: u8,
        /// The value.
        value: u8,
    },
    /// A replica accepts the value of a ballot.
    Accept {
        /// The ballot.
        ballot: u8,
        /// The replica.
        replica: u8,
    },
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Step::First => write!(f, "client → h: h stamps and forwards to the named replicas"),
            Step::Second(replica) => {
                write!(f, "h → n{replica}: forward; n{replica} stamps, or confirms its stamp")
            }
            Step::Direct(replica) => write!(f, "client → n{replica}: direct; n{replica} stamps"),
            Step::Ack(replica) => write!(f, "n{replica} closes and acknowledges its stamp"),
            Step::Record(value) => write!(f, "named replicas → h: h records the decision {value}"),
            Step::Slow => write!(f, "h proposes the largest stamp at ballot 0"),
            Step::SlowAccept(replica) => {
                write!(f, "h → n{replica}: n{replica} accepts at ballot 0")
            }
            Step::RaiseFirst(stamp) => write!(f, "h raises its stamp to {stamp}"),
            Step::RaiseSecond(replica) => write!(f, "n{replica} raises its stamp by one"),
            Step::Promise { ballot, replica } => {
                write!(f, "b{ballot} → n{replica}: n{replica} promises and answers")
            }
            Step::Propose { ballot, value: TOMBSTONE } => write!(f, "b{ballot} proposes: refused"),
            Step::Propose { ballot, value } => write!(f, "b{ballot} proposes {value}"),
            Step::Accept { ballot, replica } => {
                write!(f, "b{ballot} → n{replica}: n{replica} accepts")
            }
        }
    }
}

/// The values that recovery may choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// This value may have been decided: no other is safe.
    Only(u8),
    /// Nothing was decided. The largest stamp of the answers is safe, and so is a tombstone.
    Free(u8),
}

/// One transaction at one partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot<const N: usize> {
    /// The replica that the client calls h.
    pub h: u8,
    /// The named replicas without h, one bit each: y, or for f = 2 three replicas.
    pub named: u8,
    /// Replicas by number.
    pub replicas: [Replica; N],
    /// The first stamp of h, which it may raise later.
    pub first: u8,
    /// The decision that h has recorded at ballot 0.
    pub record: u8,
    /// The value that h proposes at ballot 0 when it may not decide (f = 2).
    pub slow: u8,
    /// The replicas that accepted it, one bit each.
    pub slow_accepted: u8,
    /// How often y has raised its stamp.
    pub raised: u8,
    /// Recovery ballots 1 to 3.
    pub ballots: [Ballot; 3],
}

impl<const N: usize> Hash for Slot<N> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let few = [self.h, self.named, self.first, self.record];
        state.write_u32(u32::from_le_bytes(few));
        state.write_u32(u32::from_le_bytes([self.slow, self.slow_accepted, self.raised, 0]));
        for replica in &self.replicas {
            replica.hash(state);
        }
        for ballot in &self.ballots {
            ballot.hash(state);
        }
    }
}

/// Whether `replica` is in the set `bits`.
#[must_use]
pub fn has(bits: u8, replica: u8) -> bool {
    bits & (1 << replica) != 0
}

impl<const N: usize> Slot<N> {
    /// A transaction that names `h` and the other replicas `named`.
    #[must_use]
    pub fn new(h: u8, named: u8) -> Slot<N> {
        Slot {
            h,
            named,
            replicas: [Replica::default(); N],
            first: NONE,
            record: NONE,
            slow: NONE,
            slow_accepted: 0,
            raised: 0,
            ballots: [Ballot::default(); 3],
        }
    }

    fn at(&self, replica: u8) -> &Replica {
        &self.replicas[usize::from(replica)]
    }

    fn at_mut(&mut self, replica: u8) -> &mut Replica {
        &mut self.replicas[usize::from(replica)]
    }

    fn ids() -> impl Iterator<Item = u8> {
        0..N as u8
    }

    fn others(&self) -> impl Iterator<Item = u8> + use<N> {
        let named = self.named;
        Self::ids().filter(move |&replica| has(named, replica))
    }

    /// The stamp that the replica would give: above its closing.
    fn above(rules: &Rules, least: u8, closed: u8) -> u8 {
        let above = if rules.drops(Mutation::StampAtClosing) { closed } else { closed + 1 };
        least.max(above)
    }

    /// Every step that can be taken, except closings. `t` is the client's timestamp.
    pub fn steps(&self, rules: &Rules, out: &mut Vec<Step>) {
        self.normal_steps(rules, out);
        self.raise_steps(rules, out);
        self.recovery_steps(rules, out);
    }

    fn may_stamp(&self, rules: &Rules, replica: u8) -> bool {
        let it = self.at(replica);
        let is_free = it.promised == 0 || rules.drops(Mutation::StampAfterPromise);
        let is_new = it.kind == Kind::None
            || (it.kind == Kind::Recovery && rules.drops(Mutation::StampAfterPromise));
        is_free && is_new
    }

    fn normal_steps(&self, rules: &Rules, out: &mut Vec<Step>) {
        if self.may_stamp(rules, self.h) && self.first == NONE {
            out.push(Step::First);
        }
        if rules.direct {
            out.extend(
                Self::ids()
                    .filter(|&replica| replica != self.h && self.may_stamp(rules, replica))
                    .map(Step::Direct),
            );
        }
        let partners: u8 = if rules.drops(Mutation::UnnamedPair) {
            ((1 << N) - 1) & !(1 << self.h)
        } else {
            self.named
        };
        if self.first != NONE {
            for replica in Self::ids().filter(|&replica| has(partners, replica)) {
                let it = self.at(replica);
                if self.may_stamp(rules, replica) || (it.kind == Kind::Direct && it.promised == 0) {
                    out.push(Step::Second(replica));
                }
                if rules.raises > 0
                    && it.kind == Kind::Confirmed
                    && it.promised == 0
                    && !has(it.acks, it.stamp)
                {
                    out.push(Step::Ack(replica));
                }
            }
        }
        self.decide_steps(rules, partners, out);
    }

    fn decide_steps(&self, rules: &Rules, partners: u8, out: &mut Vec<Step>) {
        let h = self.at(self.h);
        let may_record = h.promised == 0 || rules.drops(Mutation::RecordAfterPromise);
        if may_record && self.first != NONE && self.record == NONE && self.slow == NONE {
            if rules.f == 1 {
                for replica in Self::ids().filter(|&replica| has(partners, replica)) {
                    self.decide_with(rules, replica, out);
                }
            } else {
                self.decide_five(rules, out);
            }
        }
        if self.slow != NONE {
            out.extend(
                Self::ids()
                    .filter(|&replica| {
                        self.at(replica).promised == 0 && !has(self.slow_accepted, replica)
                    })
                    .map(Step::SlowAccept),
            );
        }
    }

    /// f = 1: h decides the stamp of y.
    fn decide_with(&self, rules: &Rules, replica: u8, out: &mut Vec<Step>) {
        let it = self.at(replica);
        let is_confirmed = it.kind == Kind::Confirmed
            || (it.kind == Kind::Direct && rules.drops(Mutation::DirectUnconfirmed));
        let own = self.at(self.h).stamp;
        if rules.raises > 0 {
            out.extend((1..8).filter(|&stamp| has(it.acks, stamp)).map(Step::Record));
        } else if is_confirmed {
            let value = if rules.drops(Mutation::IgnoreSecond) { own } else { it.stamp };
            out.push(Step::Record(value));
        }
    }

    /// f = 2: Tempo's rule. The named replicas and h are 2f; f of them must give the largest.
    fn decide_five(&self, rules: &Rules, out: &mut Vec<Step>) {
        let stamps = self.others().map(|replica| {
            let it = self.at(replica);
            (it.kind == Kind::Confirmed).then_some(it.stamp)
        });
        let mut stamps: Vec<Option<u8>> = stamps.collect();
        stamps.push(Some(self.at(self.h).stamp));
        let missing = stamps.iter().filter(|stamp| stamp.is_none()).count();
        let may_miss = usize::from(rules.drops(Mutation::FiveSmallQuorum));
        if missing > may_miss {
            return;
        }
        let largest = stamps.iter().flatten().copied().max().unwrap_or(NONE);
        let times = stamps.iter().filter(|stamp| **stamp == Some(largest)).count();
        if times >= usize::from(rules.f) || rules.drops(Mutation::FiveNoThreshold) {
            out.push(Step::Record(largest));
        } else {
            out.push(Step::Slow);
        }
    }

    fn raise_steps(&self, rules: &Rules, out: &mut Vec<Step>) {
        if rules.raises == 0 || (rules.direct && !rules.drops(Mutation::RaiseDirect)) {
            return;
        }
        let may = |it: &Replica| {
            (it.promised == 0 || rules.drops(Mutation::RaiseAfterPromise))
                && it.stamp < rules.stamp_max
                && it.kind.is_ballot_zero()
        };
        let h = self.at(self.h);
        for replica in self.others() {
            let it = self.at(replica);
            let is_silent = it.acks == 0 || rules.drops(Mutation::RaiseAfterAck);
            if may(it) && is_silent && self.raised < rules.raises {
                out.push(Step::RaiseSecond(replica));
            }
            let known = match rules.mutation {
                Some(Mutation::RaiseFirstAlone) => h.stamp + 1,
                _ if it.kind == Kind::Confirmed => it.stamp,
                _ => NONE,
            };
            if may(h) && self.record == NONE {
                out.extend((h.stamp + 1..=known).map(Step::RaiseFirst));
            }
        }
    }

    fn recovery_steps(&self, rules: &Rules, out: &mut Vec<Step>) {
        for number in 1..=rules.ballots {
            let ballot = &self.ballots[usize::from(number) - 1];
            for replica in Self::ids() {
                let it = self.at(replica);
                if ballot.value == NONE && it.promised < number {
                    out.push(Step::Promise { ballot: number, replica });
                }
                let may = it.promised <= number || rules.drops(Mutation::AcceptBelowPromise);
                if ballot.value != NONE && may && !has(ballot.accepted, replica) {
                    out.push(Step::Accept { ballot: number, replica });
                }
            }
            let least = match rules.mutation {
                Some(Mutation::OneAnswer) => 1,
                Some(Mutation::WaitForAll) => rules.replicas(),
                _ => rules.f + 1,
            };
            if ballot.value == NONE && ballot.answers.count_ones() >= u32::from(least) {
                match self.choose(rules, ballot) {
                    Choice::Only(value) => out.push(Step::Propose { ballot: number, value }),
                    Choice::Free(largest) => {
                        out.push(Step::Propose { ballot: number, value: largest });
                        out.push(Step::Propose { ballot: number, value: TOMBSTONE });
                    }
                }
            }
        }
    }

    /// The one decision function of recovery.
    #[must_use]
    pub fn choose(&self, rules: &Rules, ballot: &Ballot) -> Choice {
        if ballot.best != NONE {
            return Choice::Only(ballot.best);
        }
        let answers = || Self::ids().filter(|&replica| has(ballot.answers, replica));
        let largest = answers().map(|replica| self.at(replica).stamp).max().unwrap_or(NONE);
        let are_stamped = answers().all(|replica| self.at(replica).stamp != NONE)
            || rules.drops(Mutation::NoRecoveryStamp);
        let largest = if largest == NONE || !are_stamped { TOMBSTONE } else { largest };
        if has(ballot.answers, self.h) {
            return match rules.f {
                1 => self.choose_with_h(rules, ballot, largest),
                _ => Choice::Free(largest),
            };
        }
        let named = || answers().filter(|&replica| has(self.named, replica));
        let counts = |it: &Replica| {
            it.kind == Kind::Confirmed
                || (it.kind == Kind::Recovery && rules.drops(Mutation::RecoveryStampCounts))
                || (it.kind == Kind::Direct && rules.drops(Mutation::DirectUnconfirmedRecovered))
        };
        if named().all(|replica| counts(self.at(replica))) {
            let decided = named().map(|replica| self.at(replica).stamp).max();
            let decided = match rules.mutation {
                Some(Mutation::FiveUnnamedStamps) => Some(largest),
                _ => decided,
            };
            return Choice::Only(decided.unwrap_or(TOMBSTONE));
        }
        if rules.direct && !rules.drops(Mutation::DirectNoEqualRule) {
            return self.choose_direct(ballot, largest);
        }
        Choice::Free(largest)
    }

    /// In direct mode the client may have learned from three equal stamps, h's among them.
    fn choose_with_h(&self, rules: &Rules, ballot: &Ballot, largest: u8) -> Choice {
        if rules.direct { self.choose_direct(ballot, largest) } else { Choice::Free(largest) }
    }

    /// If all answers hold the same ballot-0 stamp, the client may have learned it.
    fn choose_direct(&self, ballot: &Ballot, largest: u8) -> Choice {
        let mut answers = Self::ids().filter(|&replica| has(ballot.answers, replica));
        let are_equal = answers.all(|replica| {
            let it = self.at(replica);
            it.kind.is_ballot_zero() && it.stamp == largest
        });
        if are_equal { Choice::Only(largest) } else { Choice::Free(largest) }
    }

    /// Takes one step. `closed` has the closing of each replica of the partition.
    pub fn apply(&mut self, rules: &Rules, t: u8, closed: &[u8; N], step: Step) {
        let closing = |replica: u8| closed[usize::from(replica)];
        match step {
            Step::First => {
                let stamp = Self::above(rules, t, closing(self.h));
                self.first = stamp;
                let h = self.at_mut(self.h);
                (h.stamp, h.kind) = (stamp, Kind::Confirmed);
            }
            Step::Direct(replica) => {
                let stamp = Self::above(rules, t, closing(replica));
                let it = self.at_mut(replica);
                (it.stamp, it.kind) = (stamp, Kind::Direct);
            }
            Step::Second(replica) => self.second(rules, t, closing(replica), replica),
            Step::Ack(replica) => {
                let it = self.at_mut(replica);
                it.acks |= 1 << it.stamp;
            }
            Step::Record(value) => {
                self.record = value;
                let h = self.at_mut(self.h);
                if h.accepted == NONE {
                    (h.accepted_ballot, h.accepted) = (0, value);
                }
            }
            Step::Slow => {
                let named = self.others().chain([self.h]);
                self.slow = named.map(|replica| self.at(replica).stamp).max().unwrap_or(NONE);
            }
            Step::SlowAccept(replica) => {
                self.slow_accepted |= 1 << replica;
                let value = self.slow;
                let it = self.at_mut(replica);
                (it.accepted_ballot, it.accepted) = (0, value);
            }
            Step::RaiseFirst(stamp) => self.at_mut(self.h).stamp = stamp,
            Step::RaiseSecond(replica) => {
                self.raised += 1;
                self.at_mut(replica).stamp += 1;
            }
            Step::Promise { ballot, replica } => {
                self.promise(rules, t, closing(replica), ballot, replica);
            }
            Step::Propose { ballot, value } => self.ballots[usize::from(ballot) - 1].value = value,
            Step::Accept { ballot, replica } => {
                let entry = &mut self.ballots[usize::from(ballot) - 1];
                entry.accepted |= 1 << replica;
                let value = entry.value;
                let it = self.at_mut(replica);
                it.promised = it.promised.max(ballot);
                (it.accepted_ballot, it.accepted) = (ballot, value);
            }
        }
    }

    fn second(&mut self, rules: &Rules, t: u8, closing: u8, replica: u8) {
        let from = self.first;
        let least = if rules.drops(Mutation::SecondBelowFirst) { t } else { from };
        let it = self.at_mut(replica);
        it.stamp = match it.kind {
            Kind::None | Kind::Recovery => Self::above(rules, least, closing),
            Kind::Direct if rules.drops(Mutation::DirectNoRaise) => it.stamp,
            Kind::Direct | Kind::Confirmed => it.stamp.max(from),
        };
        it.kind = Kind::Confirmed;
    }

    fn promise(&mut self, rules: &Rules, t: u8, closing: u8, ballot: u8, replica: u8) {
        let it = self.at_mut(replica);
        it.promised = ballot;
        if it.accepted != NONE && rules.drops(Mutation::PromiseIsAccept) {
            it.accepted_ballot = ballot;
        }
        if it.kind == Kind::None && !rules.drops(Mutation::NoRecoveryStamp) {
            (it.stamp, it.kind) = (Self::above(rules, t, closing), Kind::Recovery);
        }
        let it = *it;
        let entry = &mut self.ballots[usize::from(ballot) - 1];
        let is_first = entry.best == NONE;
        let is_better = if rules.drops(Mutation::LowestAccepted) {
            it.accepted_ballot < entry.best_ballot
        } else {
            it.accepted_ballot > entry.best_ballot
        };
        entry.answers |= 1 << replica;
        if it.accepted != NONE && (is_first || is_better) {
            (entry.best_ballot, entry.best) = (it.accepted_ballot, it.accepted);
        }
    }

    /// Every value that some node may have learned: one bit each. Agreement means at most one.
    #[must_use]
    pub fn learned(&self, rules: &Rules) -> u16 {
        let mut learned = 0;
        if self.record != NONE {
            learned |= 1 << self.record;
        }
        let majority = u32::from(rules.f) + 1;
        if self.slow != NONE && self.slow_accepted.count_ones() >= majority {
            learned |= 1 << self.slow;
        }
        for ballot in &self.ballots {
            if ballot.value != NONE && ballot.accepted.count_ones() >= majority {
                learned |= 1 << ballot.value;
            }
        }
        if rules.drops(Mutation::LearnFromSecond) {
            let confirmed = self.others().filter(|&y| self.at(y).kind == Kind::Confirmed);
            learned |= confirmed.fold(0, |learned, y| learned | 1 << self.at(y).stamp);
        }
        if rules.direct {
            learned |= self.learned_directly(rules);
        }
        learned
    }

    fn learned_directly(&self, rules: &Rules) -> u16 {
        let least = if rules.drops(Mutation::DirectTwoEqual) { 2 } else { N };
        let mut learned = 0;
        for stamp in 1..TOMBSTONE {
            let holds = |it: &&Replica| it.kind.is_ballot_zero() && it.stamp == stamp;
            if self.replicas.iter().filter(holds).count() >= least {
                learned |= 1 << stamp;
            }
        }
        learned
    }
}

impl<const N: usize> fmt::Display for Slot<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for replica in Self::ids() {
            let it = self.at(replica);
            let role = match replica {
                _ if replica == self.h => "=h",
                _ if has(self.named, replica) => "=y",
                _ => "",
            };
            write!(f, " n{replica}{role}[")?;
            match it.kind {
                Kind::None => write!(f, "-")?,
                Kind::Direct => write!(f, "{}?", it.stamp)?,
                Kind::Confirmed => write!(f, "{}", it.stamp)?,
                Kind::Recovery => write!(f, "{}r", it.stamp)?,
            }
            if it.promised > 0 {
                write!(f, " b{}", it.promised)?;
            }
            match it.accepted {
                NONE => {}
                TOMBSTONE => write!(f, " refused@b{}", it.accepted_ballot)?,
                value => write!(f, " {value}@b{}", it.accepted_ballot)?,
            }
            write!(f, "]")?;
        }
        Ok(())
    }
}
