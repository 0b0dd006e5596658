//! Real time: strictness of writes, read-only transactions, and read leases.
//!
//! `stamp.rs` and `order.rs` show that a partition of three replicas behaves like one sequencer
//! with a closing, so here a partition is one. Time passes in ticks; each gateway's clock differs
//! from it by an offset. *Strictness*: real-time order, the order of versions, and what reads
//! observed have no cycle together.

use std::fmt;

use stateright::{Model, Property};

use crate::mutation::Mutation;

const PARTITIONS: usize = 2;
/// The bound between two clocks, in ticks.
const EPSILON: u8 = 1;
/// Operations of one configuration.
pub const OPS: usize = 4;

/// What an operation does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// It does not exist in this configuration.
    Absent,
    /// Writes the partitions, one bit each; its timestamp is the clock plus `slack`.
    Write {
        /// Partitions.
        at: u8,
        /// Ticks.
        slack: u8,
    },
    /// Reads the partitions at the gateway's clock.
    Read {
        /// Partitions.
        at: u8,
    },
    /// Reads p0 at the holder of its lease, without a message.
    Local,
}

/// The model of one configuration.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    /// The operations. Each has a gateway of its own.
    pub ops: [Op; OPS],
    /// The lease on p0 ends at this time of its holder's clock; 0 for no lease.
    pub lease_end: u8,
    /// Ticks of the run.
    pub ticks: u8,
    /// The invariant that is dropped.
    pub mutation: Option<Mutation>,
}

/// One operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Progress {
    /// 0 before it begins.
    t: u8,
    /// The decided stamp at each partition, 0 before.
    stamp: [u8; PARTITIONS],
    /// The stamp of the lease holder.
    holder: u8,
    /// The closer's report at each partition, for reads: writes at or below t. Bit 7: asked.
    reported: [u8; PARTITIONS],
    is_told: bool,
    /// Operations that were acknowledged before this one began.
    after: u8,
}

/// A state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct State {
    now: u8,
    /// The offset of each gateway; the last is that of the lease holder.
    offset: [u8; OPS + 1],
    closed: [u8; PARTITIONS],
    holder_closed: u8,
    ops: [Progress; OPS],
}

/// A step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Time passes.
    Tick,
    /// An operation begins.
    Begin(usize),
    /// The lease holder stamps a write.
    HolderStamps(usize),
    /// The partition decides the stamp of a write.
    Decide(usize, usize),
    /// The same without the holder of the lease.
    DecideWithout(usize),
    /// The partition closes for a write at its agreed timestamp.
    Close(usize, usize),
    /// The partition closes for a read and reports.
    Ask(usize, usize),
    /// The client receives the answer.
    Tell(usize),
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Action::Tick => write!(f, "one tick passes"),
            Action::Begin(op) => write!(f, "client → gateway g{op}: t{op} begins"),
            Action::HolderStamps(op) => write!(f, "h → lease holder: it stamps t{op}"),
            Action::Decide(op, p) => write!(f, "p{p} decides the stamp of t{op}"),
            Action::DecideWithout(op) => write!(f, "p0 decides t{op} without the lease holder"),
            Action::Close(op, p) => write!(f, "p{p} closes up to the timestamp of t{op}"),
            Action::Ask(op, p) => write!(f, "g{op} → p{p}: read; p{p} closes and answers"),
            Action::Tell(op) => write!(f, "g{op} → client: t{op} is told"),
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "now {} offsets {:?} closed {:?}", self.now, self.offset, self.closed)?;
        for (op, it) in self.ops.iter().enumerate().filter(|(_, it)| it.t != 0) {
            write!(f, " t{op}[t={} stamps {:?}", it.t - 1, it.stamp)?;
            let asked = it.reported.iter().any(|reported| *reported != 0);
            if asked {
                write!(f, " reports {:#b} {:#b}", it.reported[0] & 127, it.reported[1] & 127)?;
            }
            write!(f, "{}]", if it.is_told { " TOLD" } else { "" })?;
        }
        Ok(())
    }
}

impl Times {
    fn drops(&self, mutation: Mutation) -> bool {
        self.mutation == Some(mutation)
    }

    fn partitions(&self, op: usize) -> impl Iterator<Item = usize> + Clone + use<> {
        let at = match self.ops[op] {
            Op::Absent => 0,
            Op::Write { at, .. } | Op::Read { at } => at,
            Op::Local => 1,
        };
        (0..PARTITIONS).filter(move |&partition| at & (1 << partition) != 0)
    }

    fn is_write(&self, op: usize) -> bool {
        matches!(self.ops[op], Op::Write { .. })
    }

    /// The gateway's clock. The holder of the lease is the gateway of local reads.
    fn clock(&self, state: &State, op: usize) -> u8 {
        let whose = if self.ops[op] == Op::Local { OPS } else { op };
        state.now + state.offset[whose]
    }

    /// The agreed timestamp of a write, when every partition has decided.
    fn timestamp(&self, state: &State, op: usize) -> Option<u8> {
        let it = &state.ops[op];
        let stamps = self.partitions(op).map(|partition| it.stamp[partition]);
        let is_final = it.t != 0 && self.is_write(op) && stamps.clone().all(|stamp| stamp != 0);
        is_final.then(|| stamps.max().unwrap_or(0))
    }

    /// The writes that a read observes, if they are final.
    fn observed(&self, state: &State, op: usize, partition: usize) -> Option<u8> {
        let it = &state.ops[op];
        if it.reported[partition] == 0 {
            return None;
        }
        let mut observed = 0;
        for write in (0..OPS).filter(|write| it.reported[partition] & (1 << write) != 0) {
            match self.timestamp(state, write) {
                Some(at) if at < it.t => observed |= 1 << write,
                None if !self.drops(Mutation::ReadNoPredecessors) => return None,
                Some(_) | None => {}
            }
        }
        Some(observed)
    }

    fn may_tell(&self, state: &State, op: usize) -> bool {
        let it = &state.ops[op];
        if it.t == 0 || it.is_told {
            return false;
        }
        let clock = self.clock(state, op);
        if let Some(at) = self.timestamp(state, op) {
            let is_past = match self.mutation {
                Some(Mutation::NoClockWait) => true,
                Some(Mutation::ClockWaitAtBound) => clock >= at + EPSILON,
                _ => clock > at + EPSILON,
            };
            let mut partitions = self.partitions(op);
            return is_past && partitions.all(|partition| state.closed[partition] >= at);
        }
        if self.is_write(op) {
            return false;
        }
        // A read waits for the newest version that it returns, not for its own timestamp.
        self.partitions(op).all(|partition| {
            self.observed(state, op, partition).is_some_and(|observed| {
                let writes = (0..OPS).filter(|write| observed & (1 << write) != 0);
                let newest = writes.filter_map(|write| self.timestamp(state, write)).max();
                self.drops(Mutation::ReadNoClockWait)
                    || newest.is_none_or(|newest| clock > newest + EPSILON)
            })
        })
    }

    fn write_actions(&self, state: &State, op: usize, actions: &mut Vec<Action>) {
        let it = &state.ops[op];
        for partition in self.partitions(op) {
            let has_lease = partition == 0 && self.lease_end > 0;
            if has_lease && it.holder == 0 {
                actions.push(Action::HolderStamps(op));
            }
            if it.stamp[partition] == 0 {
                if !has_lease || it.holder != 0 || self.drops(Mutation::LeaseIgnored) {
                    actions.push(Action::Decide(op, partition));
                }
                if has_lease {
                    actions.push(Action::DecideWithout(op));
                }
            }
            if let Some(at) = self.timestamp(state, op)
                && state.closed[partition] < at
            {
                actions.push(Action::Close(op, partition));
            }
        }
    }

    fn begin(&self, state: &mut State, op: usize) {
        let clock = self.clock(state, op);
        let told = (0..OPS).filter(|&other| state.ops[other].is_told);
        let after = told.fold(0, |after, other| after | 1 << other);
        let it = &mut state.ops[op];
        it.after = after;
        // Timestamps begin at 0, and 0 means that the operation has not begun.
        it.t = 1 + match self.ops[op] {
            Op::Write { slack, .. } => clock + slack,
            Op::Read { .. } | Op::Local | Op::Absent => clock,
        };
        if self.ops[op] == Op::Local {
            let t = it.t - 1;
            let below = self.below(state, 0, |it| it.holder, t);
            state.ops[op].reported[0] = 1 << 7 | below;
            state.holder_closed = state.holder_closed.max(t);
        }
    }

    fn below(&self, state: &State, p: usize, of: impl Fn(&Progress) -> u8, t: u8) -> u8 {
        let writes = (0..OPS).filter(|&write| {
            let stamp = of(&state.ops[write]);
            self.is_write(write)
                && self.partitions(write).any(|at| at == p)
                && stamp != 0
                && stamp <= t
        });
        writes.fold(0, |below, write| below | 1 << write)
    }

    /// Version order, observations and real time have no cycle.
    fn is_strict(&self, state: &State) -> bool {
        let is_in = |op: usize| match self.timestamp(state, op) {
            Some(_) => true,
            None => state.ops[op].is_told,
        };
        let mut edges = [0u8; OPS];
        for one in (0..OPS).filter(|&op| is_in(op)) {
            for other in (0..OPS).filter(|&op| op != one && is_in(op)) {
                if state.ops[other].after & (1 << one) != 0 || self.precedes(state, one, other) {
                    edges[one] |= 1 << other;
                }
            }
        }
        for middle in 0..OPS {
            for from in 0..OPS {
                if edges[from] & (1 << middle) != 0 {
                    edges[from] |= edges[middle];
                }
            }
        }
        (0..OPS).all(|op| edges[op] & (1 << op) == 0)
    }

    fn precedes(&self, state: &State, one: usize, other: usize) -> bool {
        let shared = self.partitions(one).filter(|p| self.partitions(other).any(|q| q == *p));
        let mut shared = shared.collect::<Vec<_>>().into_iter();
        match (self.timestamp(state, one), self.timestamp(state, other)) {
            (Some(a), Some(b)) => shared.next().is_some() && (a, one) < (b, other),
            (Some(_), None) => shared
                .any(|p| self.observed(state, other, p).is_some_and(|seen| seen & (1 << one) != 0)),
            (None, Some(_)) => shared
                .any(|p| self.observed(state, one, p).is_some_and(|seen| seen & (1 << other) == 0)),
            (None, None) => false,
        }
    }
}

impl Model for Times {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let most = if self.drops(Mutation::BrokenClock) { 3 } else { EPSILON };
        let mut offsets = vec![[0; OPS + 1]];
        for whose in 0..=OPS {
            let is_used = match whose {
                OPS => self.lease_end > 0,
                op => !matches!(self.ops[op], Op::Absent | Op::Local),
            };
            let most = if is_used { most } else { 0 };
            let with = |offset: [u8; OPS + 1], by: u8| {
                let mut offset = offset;
                offset[whose] = by;
                offset
            };
            offsets = offsets
                .into_iter()
                .flat_map(|offset| (0..=most).map(move |by| with(offset, by)))
                .collect();
        }
        let of = |offset| State {
            now: 0,
            offset,
            closed: [0; PARTITIONS],
            holder_closed: 0,
            ops: [Progress::default(); OPS],
        };
        offsets.into_iter().map(of).collect()
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.now < self.ticks {
            actions.push(Action::Tick);
        }
        for op in (0..OPS).filter(|&op| self.ops[op] != Op::Absent) {
            let it = &state.ops[op];
            if it.t == 0 {
                let is_late = self.ops[op] == Op::Local
                    && self.clock(state, op) > self.lease_end
                    && !self.drops(Mutation::LeaseReadLate);
                if !is_late {
                    actions.push(Action::Begin(op));
                }
                continue;
            }
            if self.is_write(op) {
                self.write_actions(state, op, actions);
            } else if self.ops[op] != Op::Local {
                let asked = self.partitions(op).filter(|&p| it.reported[p] == 0);
                actions.extend(asked.map(|p| Action::Ask(op, p)));
            }
            if self.may_tell(state, op) {
                actions.push(Action::Tell(op));
            }
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = *last;
        match action {
            Action::Tick => state.now += 1,
            Action::Begin(op) => self.begin(&mut state, op),
            Action::HolderStamps(op) => {
                let it = &mut state.ops[op];
                it.holder = (it.t - 1).max(last.holder_closed + 1);
            }
            Action::Decide(op, p) => {
                let it = &mut state.ops[op];
                let own = (it.t - 1).max(last.closed[p] + 1);
                let ignores = self.drops(Mutation::LeaseStampIgnored);
                it.stamp[p] = if p == 0 && !ignores { own.max(it.holder) } else { own };
            }
            Action::DecideWithout(op) => {
                // A lease is a closing up to its end: without its holder, a write goes above it.
                let above = u8::from(!self.drops(Mutation::LeaseAtEnd));
                let it = &mut state.ops[op];
                let own = (it.t - 1).max(last.closed[0] + 1);
                it.stamp[0] = own.max(self.lease_end + above);
            }
            Action::Close(op, p) => {
                let at = self.timestamp(last, op).unwrap_or(0);
                state.closed[p] = state.closed[p].max(at);
            }
            Action::Ask(op, p) => {
                let t = state.ops[op].t - 1;
                state.ops[op].reported[p] = 1 << 7 | self.below(last, p, |it| it.stamp[p], t);
                if !self.drops(Mutation::ReadNoClosing) {
                    state.closed[p] = state.closed[p].max(t);
                }
            }
            Action::Tell(op) => {
                state.ops[op].is_told = true;
                for p in self.partitions(op).filter(|_| !self.is_write(op)) {
                    let observed = self.observed(last, op, p).unwrap_or(0);
                    state.ops[op].reported[p] = 1 << 7 | observed;
                }
            }
        }
        (state != *last).then_some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![Property::always("strictness", Self::is_strict)]
    }
}
