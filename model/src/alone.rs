//! Transactions at one partition that are told early, where a partition has one replica (f = 0).
//!
//! One server for each partition gives all stamps, so a stamp, its record and its closing are one
//! step, and nothing is recovered. Time passes in ticks; each client's clock differs from it by 0
//! or the bound. Whoever can be told is told at once, because a later answer forbids less. A
//! transaction at one partition need not wait for the bound of the clocks after its own timestamp,
//! but only after that of everything at another partition that may come before it. The server
//! keeps that as *traces* of its keys. *Strictness*: nobody who began after an answer comes before
//! the answered one, by any chain of conflicts. *Progress*: where no step is possible, everybody
//! is told once clocks are late enough.

use std::fmt;

use stateright::{Model, Property};

use crate::mutation::Mutation;

/// The bound between two clocks, in ticks.
const EPSILON: u8 = 3;
/// When time begins: late enough that a timestamp of 0 holds up nobody.
const START: u8 = EPSILON;
/// Transactions of one configuration.
pub const TXNS: usize = 4;
const PARTITIONS: usize = 2;
const KEYS_EACH: usize = 2;
const KEYS: usize = PARTITIONS * KEYS_EACH;

/// The keys of p0, one bit each.
pub const A: u8 = 1;
/// The second key of p0.
pub const B: u8 = 2;
/// The first key of p1.
pub const C: u8 = 4;
/// The second key of p1.
pub const D: u8 = 8;

/// What a transaction does. Without keys it does not exist; without writes it is read-only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Op {
    /// The keys that it reads.
    pub reads: u8,
    /// The keys that it writes.
    pub writes: u8,
}

/// The model of one configuration.
#[derive(Clone, Copy, Debug)]
pub struct Alone {
    /// The transactions. Each has a client of its own.
    pub ops: [Op; TXNS],
    /// Ticks of the run.
    pub ticks: u8,
    /// The invariant that is dropped.
    pub mutation: Option<Mutation>,
}

/// One transaction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Txn {
    /// 0 before it begins.
    t: u8,
    /// How far its client's clock is ahead.
    offset: u8,
    /// The stamp at each partition; of a read-only one its t, once the partition has answered.
    stamp: [u8; PARTITIONS],
    /// The partitions that have closed up to F.
    committed: u8,
    /// The partitions where it has ended.
    ended: u8,
    /// At one partition: what may come before it there lies at or below this (M).
    bound: u8,
    is_told: bool,
    /// Transactions that were told before this one began.
    after: u8,
}

/// What may come before the next transaction that meets one key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Trace {
    pending: u8,
    until: u8,
}

/// What a server keeps of one key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Key {
    /// Closed for writers, by whoever has read it.
    closed_read: u8,
    /// Closed for readers and writers, by whoever has written it and may be told early.
    closed_write: u8,
    read: Trace,
    written: Trace,
}

/// A state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct State {
    now: u8,
    keys: [Key; KEYS],
    txns: [Txn; TXNS],
}

/// A step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Time passes.
    Tick,
    /// A transaction begins; its client's clock is ahead by so much.
    Begin(usize, u8),
    /// A server stamps a transaction.
    Stamp(usize, usize),
    /// A server closes up to the agreed timestamp.
    Commit(usize, usize),
    /// A server learns that a transaction has ended.
    End(usize, usize),
    /// A read-only transaction asks a server, which answers or refuses.
    Ask(usize, usize),
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Action::Tick => write!(f, "one tick passes"),
            Action::Begin(txn, 0) => write!(f, "t{txn} begins"),
            Action::Begin(txn, by) => write!(f, "t{txn} begins; its clock is {by} ahead"),
            Action::Stamp(txn, p) => write!(f, "p{p} stamps t{txn}"),
            Action::Commit(txn, p) => write!(f, "p{p} closes up to the timestamp of t{txn}"),
            Action::End(txn, p) => write!(f, "p{p} learns that t{txn} has ended"),
            Action::Ask(txn, p) => write!(f, "t{txn} asks p{p}, which answers or refuses"),
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "now {}", self.now)?;
        for (key, it) in self.keys.iter().enumerate().filter(|(_, it)| **it != Key::default()) {
            let name = ["a", "b", "c", "d"][key];
            write!(
                f,
                " {name}[r{} {} w{} {}]",
                it.closed_read, it.read, it.closed_write, it.written
            )?;
        }
        for (txn, it) in self.txns.iter().enumerate().filter(|(_, it)| it.t != 0) {
            write!(f, " t{txn}[t={} stamps {:?} M={}", it.t, it.stamp, it.bound)?;
            write!(f, "{}]", if it.is_told { " TOLD" } else { "" })?;
        }
        Ok(())
    }
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "({:#b} until {})", self.pending, self.until)
    }
}

impl Trace {
    fn with(self, other: Trace) -> Trace {
        Trace { pending: self.pending | other.pending, until: self.until.max(other.until) }
    }
}

/// The keys of a set that are at a partition.
fn keys_at(keys: u8, p: usize) -> impl Iterator<Item = usize> + Clone {
    (p * KEYS_EACH..(p + 1) * KEYS_EACH).filter(move |key| keys & (1 << key) != 0)
}

impl Alone {
    fn drops(&self, mutation: Mutation) -> bool {
        self.mutation == Some(mutation)
    }

    fn partitions(&self, txn: usize) -> impl Iterator<Item = usize> + Clone + use<> {
        let keys = self.ops[txn].reads | self.ops[txn].writes;
        (0..PARTITIONS).filter(move |&p| keys_at(keys, p).next().is_some())
    }

    fn is_alone(&self, txn: usize) -> bool {
        self.partitions(txn).count() == 1
    }

    fn is_write(&self, txn: usize) -> bool {
        self.ops[txn].writes != 0
    }

    /// The place of a transaction in the order, once every partition has given its part.
    fn place(&self, state: &State, txn: usize) -> Option<u8> {
        let stamps = self.partitions(txn).map(|p| state.txns[txn].stamp[p]);
        let least = stamps.clone().min()?;
        if least == 0 { None } else { stamps.max() }
    }

    /// What may come before a transaction at a partition, as the traces of its keys say.
    fn before(&self, state: &State, txn: usize, p: usize) -> Trace {
        let op = self.ops[txn];
        let written = keys_at(op.reads | op.writes, p).map(|key| state.keys[key].written);
        let read = keys_at(op.writes, p).map(|key| state.keys[key].read);
        let before = written.chain(read).fold(Trace::default(), Trace::with);
        let pending = if self.drops(Mutation::EarlyPendingIgnored) { 0 } else { before.pending };
        Trace { pending, ..before }
    }

    fn leave(&self, state: &mut State, txn: usize, p: usize, trace: Trace) {
        let op = self.ops[txn];
        for key in keys_at(op.reads, p) {
            state.keys[key].read = state.keys[key].read.with(trace);
        }
        for key in keys_at(op.writes, p) {
            state.keys[key].written = state.keys[key].written.with(trace);
        }
    }

    fn close(&self, state: &mut State, txn: usize, p: usize, to: u8) {
        let op = self.ops[txn];
        for key in keys_at(op.reads, p) {
            state.keys[key].closed_read = state.keys[key].closed_read.max(to);
        }
        // Others are answered in full.
        if self.is_alone(txn) {
            for key in keys_at(op.writes, p) {
                state.keys[key].closed_write = state.keys[key].closed_write.max(to);
            }
        }
    }

    fn stamp(&self, state: &mut State, txn: usize, p: usize) {
        let op = self.ops[txn];
        let bound_by_writes =
            if self.drops(Mutation::EarlyReadsBelow) { op.writes } else { op.reads | op.writes };
        let written = keys_at(bound_by_writes, p).map(|key| state.keys[key].closed_write);
        let read = keys_at(op.writes, p).map(|key| state.keys[key].closed_read);
        let closed = written.chain(read).max().unwrap_or(0);
        let stamp = state.txns[txn].t.max(closed + 1);
        let before = self.before(state, txn, p);
        self.close(state, txn, p, stamp);
        let it = &mut state.txns[txn];
        it.stamp[p] = stamp;
        if self.is_alone(txn) {
            it.committed = 1 << p;
            it.bound = match before.pending {
                _ if self.drops(Mutation::EarlyAlways) => 0,
                0 => stamp.min(before.until),
                _ => stamp,
            };
            if self.drops(Mutation::EarlyDirectOnly) {
                it.ended = 1 << p;
                return;
            }
        }
        if self.is_alone(txn) && before.pending == 0 {
            state.txns[txn].ended = 1 << p;
            self.leave(state, txn, p, Trace { pending: 0, until: before.until });
        } else {
            self.leave(state, txn, p, Trace { pending: 1 << txn, until: 0 });
        }
    }

    fn end(&self, state: &mut State, txn: usize, p: usize) {
        for key in keys_at(self.ops[txn].reads | self.ops[txn].writes, p) {
            state.keys[key].read.pending &= !(1 << txn);
            state.keys[key].written.pending &= !(1 << txn);
        }
        let until = self.place(state, txn).unwrap_or(0);
        if !self.drops(Mutation::EarlyEndDropped) {
            self.leave(state, txn, p, Trace { pending: 0, until });
        }
        state.txns[txn].ended |= 1 << p;
    }

    /// Whether a server refuses a read-only transaction: a write may have been told before it.
    fn is_refused(&self, state: &State, txn: usize, p: usize) -> bool {
        let t = state.txns[txn].t;
        let is_near = |write: u8| t < write && write <= t + EPSILON;
        !self.drops(Mutation::EarlyNoRefusal)
            && keys_at(self.ops[txn].reads, p).any(|key| {
                let writers = (0..TXNS).filter(|&other| self.ops[other].writes & (1 << key) != 0);
                writers.map(|other| self.known_place(state, other, p)).any(is_near)
            })
    }

    /// Where a server knows a transaction to be: at F, at its stamp, or nowhere.
    fn known_place(&self, state: &State, txn: usize, p: usize) -> u8 {
        let it = &state.txns[txn];
        let place = self.place(state, txn).filter(|_| it.committed & (1 << p) != 0);
        place.unwrap_or(it.stamp[p])
    }

    fn ask(&self, state: &mut State, txn: usize, p: usize) {
        let t = state.txns[txn].t;
        let is_refused = self.is_refused(state, txn, p);
        let before = self.before(state, txn, p);
        self.close(state, txn, p, t);
        let is_bounded = self.is_alone(txn) && before.pending == 0;
        let until = if is_bounded { t.min(before.until) } else { t };
        if !self.drops(Mutation::EarlyReadNoTrace) {
            self.leave(state, txn, p, Trace { pending: 0, until });
        }
        let it = &mut state.txns[txn];
        if is_refused {
            it.t += 1;
            it.stamp = [0; PARTITIONS];
        } else {
            it.stamp[p] = t;
        }
    }

    /// The writers of what a transaction reads that a partition has stamped below its place.
    fn predecessors(&self, state: &State, txn: usize, at: u8) -> impl Iterator<Item = usize> {
        let reads = self.ops[txn].reads;
        let is_write = self.is_write(txn);
        let is_below = move |stamp: u8, other: usize| {
            stamp != 0 && if is_write { (stamp, other) < (at, txn) } else { stamp <= at }
        };
        (0..TXNS).filter(move |&other| {
            let shared = self.ops[other].writes & reads;
            let mut partitions = (0..PARTITIONS).filter(|&p| keys_at(shared, p).next().is_some());
            other != txn && partitions.any(|p| is_below(state.txns[other].stamp[p], other))
        })
    }

    /// Whether a transaction may be told, at this time of its client's clock.
    fn may_tell(&self, state: &State, txn: usize, clock: u8) -> bool {
        let it = &state.txns[txn];
        let Some(at) = self.place(state, txn) else { return false };
        let mut predecessors = self.predecessors(state, txn, at);
        if !self.is_write(txn) {
            return predecessors.all(|other| {
                self.place(state, other).is_some_and(|f| f > at || clock > f + EPSILON)
            });
        }
        let is_closed = self.partitions(txn).all(|p| it.committed & (1 << p) != 0);
        let is_past = if self.is_alone(txn) {
            clock > at && clock > it.bound + EPSILON
        } else {
            clock > at + EPSILON
        };
        is_closed && is_past && predecessors.all(|other| self.place(state, other).is_some())
    }

    fn tell(&self, state: &mut State) {
        for txn in 0..TXNS {
            let it = state.txns[txn];
            if it.t != 0 && !it.is_told && self.may_tell(state, txn, state.now + it.offset) {
                // The clock of its client matters no more.
                state.txns[txn] = Txn { is_told: true, offset: 0, ..it };
            }
        }
    }

    /// Whether one transaction conflicts with another and comes before it.
    fn precedes(&self, state: &State, one: usize, other: usize) -> bool {
        let (a, b) = (self.ops[one], self.ops[other]);
        let (Some(at), Some(to)) = (self.place(state, one), self.place(state, other)) else {
            return false;
        };
        let is_conflict = (a.writes & (b.reads | b.writes)) | (a.reads & b.writes) != 0;
        // A read-only transaction sees the writes at its place.
        let is_before = match (self.is_write(one), self.is_write(other)) {
            (true, true) => (at, one) < (to, other),
            (true, false) => at <= to,
            (false, _) => at < to,
        };
        one != other && is_conflict && is_before
    }

    fn is_strict(&self, state: &State) -> bool {
        let after = |one: usize| {
            let others = (0..TXNS).filter(|&other| self.precedes(state, one, other));
            others.fold(0u8, |after, other| after | 1 << other)
        };
        let mut paths: [u8; TXNS] = std::array::from_fn(after);
        for middle in 0..TXNS {
            for from in 0..TXNS {
                if paths[from] & (1 << middle) != 0 {
                    paths[from] |= paths[middle];
                }
            }
        }
        (0..TXNS).all(|txn| paths[txn] & state.txns[txn].after == 0)
    }

    fn is_live(&self, state: &State) -> bool {
        let mut actions = Vec::new();
        self.actions(state, &mut actions);
        let mut txns = (0..TXNS).filter(|&txn| self.partitions(txn).next().is_some());
        !actions.is_empty() || txns.all(|txn| self.may_tell(state, txn, u8::MAX))
    }
}

impl Model for Alone {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State { now: START, keys: [Key::default(); KEYS], txns: [Txn::default(); TXNS] }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.now < START + self.ticks {
            actions.push(Action::Tick);
        }
        for txn in 0..TXNS {
            let it = &state.txns[txn];
            let place = self.place(state, txn);
            for p in self.partitions(txn) {
                if it.t == 0 {
                    actions.extend([0, EPSILON].map(|offset| Action::Begin(txn, offset)));
                    break;
                }
                if it.stamp[p] == 0 {
                    let is_write = self.is_write(txn);
                    actions.push(if is_write {
                        Action::Stamp(txn, p)
                    } else {
                        Action::Ask(txn, p)
                    });
                } else if self.is_write(txn) && place.is_some() {
                    let is_committed = it.committed & (1 << p) != 0;
                    let is_ended = it.ended & (1 << p) != 0;
                    match (is_committed, is_ended) {
                        (false, _) => actions.push(Action::Commit(txn, p)),
                        (true, false) => actions.push(Action::End(txn, p)),
                        (true, true) => {}
                    }
                }
            }
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = *last;
        match action {
            Action::Tick => state.now += 1,
            Action::Begin(txn, offset) => {
                let told = (0..TXNS).filter(|&other| last.txns[other].is_told);
                let it = &mut state.txns[txn];
                it.t = last.now + offset;
                it.offset = offset;
                it.after = told.fold(0, |after, other| after | 1 << other);
            }
            Action::Stamp(txn, p) => self.stamp(&mut state, txn, p),
            Action::Commit(txn, p) => {
                let f = self.place(last, txn).unwrap_or(0);
                self.close(&mut state, txn, p, f);
                state.txns[txn].committed |= 1 << p;
            }
            Action::End(txn, p) => self.end(&mut state, txn, p),
            Action::Ask(txn, p) => self.ask(&mut state, txn, p),
        }
        self.tell(&mut state);
        (state != *last).then_some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("strictness", Self::is_strict),
            Property::always("progress", Self::is_live),
        ]
    }
}
