//! Two or three transactions on two partitions of three replicas, and the answers to their clients.
//!
//! An acknowledged transaction takes effect at (F, id), after exactly the predecessors that were
//! final before it and below it. *Order*: no other transaction ever commits below an acknowledged
//! one at a shared partition. *Agreement*: each partition decides one value. *Progress*: if no
//! further step is possible, every transaction was acknowledged or is refused; so transactions
//! never wait in a cycle.

use std::fmt;

use stateright::{Model, Property};

use crate::mutation::Mutation;
use crate::slot::{Kind, NONE, Rules, Slot, Step, TOMBSTONE};

const PARTITIONS: usize = 2;

/// The model of one configuration of `X` transactions.
#[derive(Clone, Debug)]
pub struct Orders<const X: usize> {
    /// The rules of each slot.
    pub rules: Rules,
    /// The partitions of each transaction, one bit each.
    pub at: [u8; X],
    /// Timestamps that the client may have given each transaction.
    pub times: &'static [[u8; X]],
    /// Which slots may be recovered: transaction and partition.
    pub recovered: &'static [(usize, usize)],
    /// Whether a later transaction may name other replicas than an earlier one.
    pub pairs: &'static [(u8, u8)],
}

/// The fate of a transaction, as far as any node may know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Open,
    Refused,
    Committed(u8),
}

/// Everything durable, and the answers to clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct State<const X: usize> {
    times: [u8; X],
    slots: [[Slot<3>; PARTITIONS]; X],
    closed: [[u8; 3]; PARTITIONS],
    /// The timestamp of each acknowledged transaction, else 0.
    told: [u8; X],
    /// And the transactions after which it takes effect, at each partition, one bit each.
    after: [[u8; PARTITIONS]; X],
}

/// One step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// A step of one transaction at one partition.
    Step {
        /// The transaction.
        txn: usize,
        /// The partition.
        partition: usize,
        /// The step.
        step: Step,
    },
    /// A replica closes for a transaction.
    Close {
        /// The transaction.
        txn: usize,
        /// The partition.
        partition: usize,
        /// The replica.
        replica: u8,
        /// Up to this timestamp.
        to: u8,
    },
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Action::Step { txn, partition, step } => write!(f, "t{txn} at p{partition}: {step}"),
            Action::Close { txn, partition, replica, to } => {
                write!(f, "t{txn} at p{partition}: n{replica} closes up to {to}")
            }
        }
    }
}

impl<const X: usize> fmt::Display for State<X> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (partition, closed) in self.closed.iter().enumerate() {
            write!(f, "| p{partition} closed {closed:?}")?;
            for (txn, slots) in self.slots.iter().enumerate() {
                if slots[partition].named != 0 {
                    write!(f, " t{txn}:{}", slots[partition])?;
                }
            }
            write!(f, " ")?;
        }
        for (txn, told) in self.told.iter().enumerate().filter(|(_, told)| **told != NONE) {
            write!(f, "TOLD t{txn} at {told} after {:?} ", self.after[txn])?;
        }
        Ok(())
    }
}

impl<const X: usize> Orders<X> {
    fn is_at(&self, txn: usize, partition: usize) -> bool {
        self.at[txn] & (1 << partition) != 0
    }

    fn rules_of(&self, txn: usize, partition: usize) -> Rules {
        let may = self.recovered.contains(&(txn, partition));
        Rules { ballots: if may { self.rules.ballots } else { 0 }, ..self.rules }
    }

    fn fate(&self, state: &State<X>, txn: usize) -> Fate {
        let mut largest = NONE;
        let mut is_open = false;
        for partition in (0..PARTITIONS).filter(|&partition| self.is_at(txn, partition)) {
            let learned = state.slots[txn][partition].learned(&self.rules);
            match learned {
                0 => is_open = true,
                _ if learned & (1 << TOMBSTONE) != 0 => return Fate::Refused,
                _ => largest = largest.max(learned.trailing_zeros() as u8),
            }
        }
        let is_half = self.rules.drops(Mutation::HalfFinal) && largest != NONE;
        if is_open && !is_half { Fate::Open } else { Fate::Committed(largest) }
    }

    fn is_before(&self, one: (u8, usize), other: (u8, usize)) -> bool {
        if self.rules.drops(Mutation::TiesIgnored) { one.0 < other.0 } else { one < other }
    }

    /// The predecessors that two closed replicas report for a transaction at `f`.
    fn reported(&self, state: &State<X>, txn: usize, f: u8, partition: usize, by: u8) -> u8 {
        let mut reported = 0;
        for other in (0..X).filter(|&other| other != txn && self.is_at(other, partition)) {
            let slot = &state.slots[other][partition];
            let knows = |replica: usize| {
                let it = &slot.replicas[replica];
                by & (1 << replica) != 0
                    && it.kind != Kind::None
                    && self.is_before((it.stamp, other), (f, txn))
            };
            if (0..3).any(knows) {
                reported |= 1 << other;
            }
        }
        reported
    }

    /// For each set of closers that allows an answer: the transactions before it, or None.
    fn answer(&self, state: &State<X>, txn: usize, partition: usize, by: u8) -> Option<u8> {
        let Fate::Committed(f) = self.fate(state, txn) else { return None };
        let slot = &state.slots[txn][partition];
        let enough = if self.rules.drops(Mutation::NoSecondClosing) {
            slot.learned(&self.rules).trailing_zeros() as u8
        } else {
            f
        };
        let is_closed =
            |replica: usize| by & (1 << replica) == 0 || state.closed[partition][replica] >= enough;
        if !(0..3).all(is_closed) {
            return None;
        }
        let heard = match self.rules.mutation {
            // The lower bit: one of the two closers.
            Some(Mutation::OneReport) => by & by.wrapping_neg(),
            _ => by,
        };
        let reported = self.reported(state, txn, f, partition, heard);
        let mut before = 0;
        for other in (0..X).filter(|other| reported & (1 << other) != 0) {
            match self.fate(state, other) {
                Fate::Open if self.rules.drops(Mutation::NoPredecessors) => {}
                Fate::Open => return None,
                Fate::Committed(at) if self.is_before((at, other), (f, txn)) => {
                    before |= 1 << other
                }
                Fate::Committed(_) | Fate::Refused => {}
            }
        }
        Some(before)
    }

    fn closers(&self) -> &'static [u8] {
        if self.rules.drops(Mutation::OneCloser) {
            &[0b001, 0b010, 0b100]
        } else {
            &[0b011, 0b101, 0b110]
        }
    }

    fn tell(&self, state: &mut State<X>) {
        for txn in 0..X {
            let Fate::Committed(f) = self.fate(state, txn) else { continue };
            if state.told[txn] != NONE {
                continue;
            }
            let mut after = [0; PARTITIONS];
            let is_told = (0..PARTITIONS).filter(|&p| self.is_at(txn, p)).all(|partition| {
                let answer =
                    self.closers().iter().find_map(|&by| self.answer(state, txn, partition, by));
                after[partition] = answer.unwrap_or(0);
                answer.is_some()
            });
            if is_told {
                (state.told[txn], state.after[txn]) = (f, after);
            }
        }
    }

    /// Whether the committed transactions below (f, txn) at the partition are those in `before`.
    fn agrees(&self, state: &State<X>, txn: usize, f: u8, partition: usize, before: u8) -> bool {
        (0..X).filter(|&other| other != txn && self.is_at(other, partition)).all(|other| match self
            .fate(state, other)
        {
            Fate::Committed(at) => ((at, other) < (f, txn)) == (before & (1 << other) != 0),
            Fate::Open | Fate::Refused => true,
        })
    }

    fn is_ordered(&self, state: &State<X>) -> bool {
        (0..X).all(|txn| {
            (0..PARTITIONS).filter(|&p| self.is_at(txn, p)).all(|partition| {
                let told = state.told[txn];
                let is_right = told == NONE
                    || self.agrees(state, txn, told, partition, state.after[txn][partition]);
                // The answers of all other closers must be right too.
                let others_too = self.closers().iter().all(|&by| {
                    let Fate::Committed(f) = self.fate(state, txn) else { return true };
                    self.answer(state, txn, partition, by)
                        .is_none_or(|before| self.agrees(state, txn, f, partition, before))
                });
                is_right && others_too
            })
        })
    }

    fn is_done(&self, state: &State<X>) -> bool {
        (0..X).all(|txn| state.told[txn] != NONE || self.fate(state, txn) == Fate::Refused)
    }
}

impl<const X: usize> Model for Orders<X> {
    type State = State<X>;
    type Action = Action;

    fn init_states(&self) -> Vec<State<X>> {
        // The first transaction at a partition names n0 and n1, because replicas are
        // interchangeable.
        let mut choices: Vec<[[Slot<3>; PARTITIONS]; X]> = vec![[[Slot::new(0, 0); PARTITIONS]; X]];
        for partition in 0..PARTITIONS {
            let mut is_first = true;
            for txn in (0..X).filter(|&txn| self.is_at(txn, partition)) {
                let pairs = if is_first { &[(0, 1)] } else { self.pairs };
                is_first = false;
                let with = |(slots, &(h, y)): (&[[Slot<3>; PARTITIONS]; X], &(u8, u8))| {
                    let mut slots = *slots;
                    slots[txn][partition] = Slot::new(h, 1 << y);
                    slots
                };
                choices = choices
                    .iter()
                    .flat_map(|slots| pairs.iter().map(move |pair| (slots, pair)))
                    .map(with)
                    .collect();
            }
        }
        let of = |times: &[u8; X]| {
            let times = *times;
            choices.iter().map(move |&slots| State {
                times,
                slots,
                closed: [[0; 3]; PARTITIONS],
                told: [NONE; X],
                after: [[0; PARTITIONS]; X],
            })
        };
        self.times.iter().flat_map(of).collect()
    }

    fn actions(&self, state: &State<X>, actions: &mut Vec<Action>) {
        let mut steps = Vec::new();
        for txn in 0..X {
            let fate = self.fate(state, txn);
            for partition in (0..PARTITIONS).filter(|&partition| self.is_at(txn, partition)) {
                let slot = &state.slots[txn][partition];
                let closed = &state.closed[partition];
                steps.clear();
                slot.steps(&self.rules_of(txn, partition), &mut steps);
                // y closes before it acknowledges, and h learns the stamp from that.
                let y = slot.named.trailing_zeros() as u8;
                let stamp = &slot.replicas[usize::from(y)];
                let has_closed = closed[usize::from(y)] >= stamp.stamp;
                steps.retain(|step| !matches!(step, Step::Record(_)) || has_closed);
                actions.extend(steps.iter().map(|&step| Action::Step { txn, partition, step }));
                if stamp.kind == Kind::Confirmed && !has_closed {
                    actions.push(Action::Close { txn, partition, replica: y, to: stamp.stamp });
                }
                let Fate::Committed(to) = fate else { continue };
                for replica in 0..3 {
                    let is_done = replica == y && !has_closed && to == stamp.stamp;
                    if closed[usize::from(replica)] < to && !is_done {
                        actions.push(Action::Close { txn, partition, replica, to });
                    }
                }
            }
        }
    }

    fn next_state(&self, last: &State<X>, action: Action) -> Option<State<X>> {
        let mut state = *last;
        match action {
            Action::Step { txn, partition, step } => {
                let rules = self.rules_of(txn, partition);
                let closed = last.closed[partition];
                let slot = &mut state.slots[txn][partition];
                slot.apply(&rules, last.times[txn], &closed, step);
                if let Step::Record(value) = step {
                    // The record is h's closing too: one write.
                    let h = usize::from(slot.h);
                    state.closed[partition][h] = closed[h].max(value);
                }
            }
            Action::Close { partition, replica, to, .. } => {
                state.closed[partition][usize::from(replica)] = to;
            }
        }
        self.tell(&mut state);
        (state != *last).then_some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("agreement", |model: &Self, state: &State<X>| {
                state
                    .slots
                    .iter()
                    .flatten()
                    .all(|slot| slot.named == 0 || slot.learned(&model.rules).count_ones() <= 1)
            }),
            Property::always("order", Self::is_ordered),
            Property::always("progress", |model: &Self, state: &State<X>| {
                let mut actions = Vec::new();
                if !model.is_done(state) {
                    model.actions(state, &mut actions);
                    return !actions.is_empty();
                }
                true
            }),
        ]
    }
}

/// Every ordered pair of replicas.
pub const ALL_PAIRS: &[(u8, u8)] = &[(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)];
