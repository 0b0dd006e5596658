//! Values of interactive transactions: one register for each, kept by three replicas.
//!
//! The order is decided: t0 is before t1, and both write the same key. The client of t1 may compute
//! from the earlier value, or from the value that the client of t0 forwards to it. It repairs its
//! value when it learns that its read was stale. A client may vanish at any moment; then a recovery
//! coordinator decides its value, or that there is none. *Agreement*: one value for each register.
//! *Freshness*: t1's value was computed from the value that t0 decided. *Progress*: if no further
//! step is possible, both are decided.

use std::fmt;

use stateright::{Model, Property};

use crate::mutation::Mutation;
use crate::slot::{NONE, has};

/// t0's value.
const A: u8 = 1;
/// No value: the client has vanished.
const BOTTOM: u8 = 2;
/// t1's value, computed from the value before t0.
const FROM_OLD: u8 = 3;
/// t1's value, computed from `A`.
const FROM_A: u8 = 4;

fn name(value: u8) -> &'static str {
    match value {
        NONE => "-",
        A => "a",
        BOTTOM => "⊥",
        FROM_OLD => "b(old)",
        _ => "b(a)",
    }
}

/// The model.
#[derive(Clone, Copy, Debug)]
pub struct Values {
    /// Recovery ballots for each register.
    pub ballots: [u8; 2],
    /// How often a client may send a value.
    pub attempts: u8,
    /// The invariant that is dropped.
    pub mutation: Option<Mutation>,
}

/// A replica of a register.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Replica {
    promised: u8,
    ballot: u8,
    attempt: u8,
    value: u8,
}

/// A recovery coordinator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Ballot {
    answers: u8,
    best_ballot: u8,
    best: u8,
    /// Ballot-0 values among the answers, one bit each.
    seen: u8,
    value: u8,
    accepted: u8,
}

/// A register.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Register {
    replicas: [Replica; 3],
    /// The client's latest attempt and its value.
    attempt: u8,
    value: u8,
    /// Replicas that have stored it.
    acks: u8,
    ballots: [Ballot; 2],
    is_told: bool,
    /// Every value that some node may have learned, one bit each.
    learned: u8,
}

/// A state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct State {
    registers: [Register; 2],
}

/// A step; the first number is the transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// The client computes a value and sends it.
    Compute(usize, u8),
    /// A replica stores the client's value.
    Store(usize, u8),
    /// The client receives the answer.
    Tell(usize),
    /// A replica promises a ballot.
    Promise(usize, u8, u8),
    /// The coordinator of a ballot proposes.
    Propose(usize, u8),
    /// A replica accepts.
    Accept(usize, u8, u8),
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Action::Compute(t, value) => write!(f, "client of t{t} computes {}", name(value)),
            Action::Store(t, replica) => {
                write!(f, "client of t{t} → n{replica}: n{replica} stores the value")
            }
            Action::Tell(t) => write!(f, "two replicas → client of t{t}: told"),
            Action::Promise(t, ballot, replica) => {
                write!(f, "t{t}: b{ballot} → n{replica}: n{replica} promises and answers")
            }
            Action::Propose(t, ballot) => write!(f, "t{t}: b{ballot} proposes"),
            Action::Accept(t, ballot, replica) => {
                write!(f, "t{t}: b{ballot} → n{replica}: n{replica} accepts")
            }
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (txn, register) in self.registers.iter().enumerate() {
            write!(f, "t{txn}: client {}", name(register.value))?;
            for (number, it) in register.replicas.iter().enumerate() {
                write!(f, " n{number}[{} b{}]", name(it.value), it.promised)?;
            }
            for value in (1..8).filter(|value| register.learned & (1 << value) != 0) {
                write!(f, " LEARNED {}", name(value))?;
            }
            write!(f, "; ")?;
        }
        Ok(())
    }
}

impl Values {
    fn drops(&self, mutation: Mutation) -> bool {
        self.mutation == Some(mutation)
    }

    /// The value that t0 decided, or `NONE`.
    fn decided_before(state: &State) -> u8 {
        match state.registers[0].learned {
            0 => NONE,
            learned => learned.trailing_zeros() as u8,
        }
    }

    /// Whether the value was computed from the value that the predecessor decided.
    fn is_fresh(state: &State, txn: usize, value: u8) -> bool {
        match (txn, Self::decided_before(state)) {
            (0, _) => true,
            (_, A) => value == FROM_A,
            (_, BOTTOM) => value == FROM_OLD,
            _ => false,
        }
    }

    /// Whether the client may receive its latest value.
    fn may_tell(&self, state: &State, txn: usize) -> bool {
        let register = &state.registers[txn];
        let before = Self::decided_before(state);
        let is_right = Self::is_fresh(state, txn, register.value)
            || (before == NONE && self.drops(Mutation::ValueBeforePredecessor))
            || (before != NONE && self.drops(Mutation::ValueStale));
        !register.is_told && register.acks.count_ones() >= 2 && is_right
    }

    fn observe(state: &mut State) {
        for register in &mut state.registers {
            for ballot in &register.ballots {
                if ballot.accepted.count_ones() >= 2 {
                    register.learned |= 1 << ballot.value;
                }
            }
        }
    }

    fn propose(&self, state: &State, txn: usize, ballot: &Ballot) -> u8 {
        if ballot.best_ballot > 0 {
            return ballot.best;
        }
        if self.drops(Mutation::ValueDropped) {
            return BOTTOM;
        }
        let mut seen = (1..8).filter(|value| ballot.seen & (1 << value) != 0);
        let kept = seen.find(|&value| {
            Self::is_fresh(state, txn, value) || self.drops(Mutation::ValueStaleRecovered)
        });
        kept.unwrap_or(BOTTOM)
    }

    fn store(&self, register: &mut Register, replica: u8) {
        register.acks |= 1 << replica;
        let it = &mut register.replicas[usize::from(replica)];
        if it.value == NONE || !self.drops(Mutation::ValueFirstWins) {
            (it.ballot, it.attempt, it.value) = (0, register.attempt, register.value);
        }
    }

    fn promise(register: &mut Register, ballot: u8, replica: u8) {
        let it = &mut register.replicas[usize::from(replica)];
        it.promised = ballot;
        let it = *it;
        let entry = &mut register.ballots[usize::from(ballot) - 1];
        entry.answers |= 1 << replica;
        if it.value != NONE && it.ballot == 0 {
            entry.seen |= 1 << it.value;
        }
        if it.ballot > entry.best_ballot {
            (entry.best_ballot, entry.best) = (it.ballot, it.value);
        }
    }
}

impl Model for Values {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State { registers: [Register::default(); 2] }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        for txn in 0..2 {
            let register = &state.registers[txn];
            let forwarded = state.registers[0].value == A || Self::decided_before(state) == A;
            let can = |value: u8| match value {
                A => txn == 0,
                FROM_OLD => txn == 1,
                FROM_A => txn == 1 && forwarded,
                _ => false,
            };
            let attempts = [1, self.attempts][txn];
            if register.attempt < attempts && !register.is_told {
                let new = (1..8).filter(|&value| can(value) && value != register.value);
                actions.extend(new.map(|value| Action::Compute(txn, value)));
            }
            if self.may_tell(state, txn) {
                actions.push(Action::Tell(txn));
            }
            for replica in 0..3 {
                let it = &register.replicas[usize::from(replica)];
                let may = it.promised == 0 || self.drops(Mutation::ValueAfterPromise);
                if register.value != NONE && may && !has(register.acks, replica) {
                    actions.push(Action::Store(txn, replica));
                }
                for number in 1..=self.ballots[txn] {
                    let ballot = &register.ballots[usize::from(number) - 1];
                    if ballot.value == NONE && it.promised < number {
                        actions.push(Action::Promise(txn, number, replica));
                    }
                    let may = it.promised <= number && !has(ballot.accepted, replica);
                    if ballot.value != NONE && may {
                        actions.push(Action::Accept(txn, number, replica));
                    }
                }
            }
            for number in 1..=self.ballots[txn] {
                let ballot = &register.ballots[usize::from(number) - 1];
                let least = if self.drops(Mutation::ValueNoFence) { 1 } else { 2 };
                let is_known = txn == 0 || Self::decided_before(state) != NONE;
                if ballot.value == NONE && ballot.answers.count_ones() >= least && is_known {
                    actions.push(Action::Propose(txn, number));
                }
            }
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = *last;
        match action {
            Action::Compute(txn, value) => {
                let register = &mut state.registers[txn];
                register.attempt += 1;
                register.value = value;
                if !self.drops(Mutation::ValueOldAttempt) {
                    register.acks = 0;
                }
            }
            Action::Tell(txn) => {
                let register = &mut state.registers[txn];
                register.is_told = true;
                register.learned |= 1 << register.value;
            }
            Action::Store(txn, replica) => self.store(&mut state.registers[txn], replica),
            Action::Promise(txn, ballot, replica) => {
                Self::promise(&mut state.registers[txn], ballot, replica);
            }
            Action::Propose(txn, ballot) => {
                let number = usize::from(ballot) - 1;
                let value = self.propose(last, txn, &last.registers[txn].ballots[number]);
                state.registers[txn].ballots[number].value = value;
            }
            Action::Accept(txn, ballot, replica) => {
                let register = &mut state.registers[txn];
                let entry = &mut register.ballots[usize::from(ballot) - 1];
                entry.accepted |= 1 << replica;
                let value = entry.value;
                let it = &mut register.replicas[usize::from(replica)];
                it.promised = it.promised.max(ballot);
                (it.ballot, it.value) = (ballot, value);
            }
        }
        Self::observe(&mut state);
        (state != *last).then_some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("agreement", |_, state: &State| {
                state.registers.iter().all(|register| register.learned.count_ones() <= 1)
            }),
            Property::always("freshness", |_, state: &State| {
                let learned =
                    |txn: usize, value: u8| state.registers[txn].learned & (1 << value) != 0;
                (!learned(1, FROM_A) || learned(0, A))
                    && (!learned(1, FROM_OLD) || learned(0, BOTTOM))
            }),
            Property::always("progress", |model: &Self, state: &State| {
                let mut actions = Vec::new();
                if state.registers.iter().any(|register| register.learned == 0) {
                    model.actions(state, &mut actions);
                    return !actions.is_empty();
                }
                true
            }),
        ]
    }
}
