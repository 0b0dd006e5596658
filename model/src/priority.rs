//! One transaction of low priority on two partitions, among an endless sequence of high priority.
//!
//! `stamp.rs` shows that raises are safe. Here time passes, and at each moment transactions of high
//! priority may arrive at either partition, each with a timestamp up to two ticks ahead.
//! *Deadline*: the transaction of low priority is acknowledged at most 3·K + 1 ticks after its
//! timestamp, where K bounds the raises at one partition. So it neither starves nor moves for ever.

use std::fmt;

use stateright::{Model, Property};

use crate::mutation::Mutation;

/// How far ahead the timestamp of a new transaction may be, in ticks.
const AHEAD: u8 = 2;

/// The model.
#[derive(Clone, Copy, Debug)]
pub struct Priorities {
    /// Raises at one partition.
    pub raises: u8,
    /// The timestamp of the transaction of low priority.
    pub t: u8,
    /// The invariant that is dropped.
    pub mutation: Option<Mutation>,
}

/// A state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct State {
    now: u8,
    /// Its stamp at each partition.
    stamp: [u8; 2],
    raised: [u8; 2],
    /// Each partition has closed up to this timestamp.
    closed: [u8; 2],
    is_told: bool,
}

/// A step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Time passes; partitions close due stamps.
    Tick,
    /// A transaction of high priority arrives at a partition with this timestamp.
    High(usize, u8),
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Action::Tick => write!(f, "one tick passes; due stamps close"),
            Action::High(p, at) => write!(f, "a high transaction arrives at p{p} with stamp {at}"),
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "now {} low stamps {:?} raised {:?}", self.now, self.stamp, self.raised)?;
        write!(f, " closed {:?}{}", self.closed, if self.is_told { " TOLD" } else { "" })
    }
}

impl Priorities {
    fn deadline(&self) -> u8 {
        self.t + (AHEAD + 1) * self.raises + 1
    }

    /// Each partition closes the stamp when its time has passed; both close at the largest.
    fn close(state: &mut State) {
        let largest = state.stamp[0].max(state.stamp[1]);
        let is_due = |stamp: u8| state.now > stamp;
        let are_decided = state.stamp.iter().all(|&stamp| is_due(stamp));
        for p in 0..2 {
            if is_due(state.stamp[p]) {
                state.closed[p] = state.closed[p].max(state.stamp[p]);
            }
            if are_decided {
                state.closed[p] = state.closed[p].max(largest);
            }
        }
        state.is_told |= are_decided && state.now > largest;
    }
}

impl Model for Priorities {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let stamp = [self.t; 2];
        vec![State { now: 0, stamp, raised: [0; 2], closed: [0; 2], is_told: false }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.now <= self.deadline() {
            actions.push(Action::Tick);
            for p in 0..2 {
                actions.extend((state.now..=state.now + AHEAD).map(|at| Action::High(p, at)));
            }
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = *last;
        match action {
            Action::Tick => {
                state.now += 1;
                Self::close(&mut state);
            }
            Action::High(p, at) => {
                let at = at.max(state.closed[p] + 1);
                let is_open = state.closed[p] < state.stamp[p];
                let may = state.raised[p] < self.raises
                    || self.mutation == Some(Mutation::RaiseUnbounded);
                if is_open && state.stamp[p] <= at && may {
                    state.stamp[p] = at + 1;
                    state.raised[p] = (state.raised[p] + 1).min(self.raises);
                }
                // Otherwise it is ordered after the transaction of low priority, or was before it
                // in any case.
            }
        }
        (state != *last).then_some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![Property::always("deadline", |model: &Self, state: &State| {
            state.is_told || state.now <= model.deadline()
        })]
    }
}
