//! The only interpreter of a machine's timers and tickets. The simulator and the server each drive
//! hosts, and only move messages, bytes and deadlines.

use crate::id::Ticket;
use crate::machine::{Cx, Effect, Input, Machine, Protocol, Setup};
use crate::ordered::{OrdMap, OrdSet};
use crate::rng::Rng;
use crate::time::{Clock, Time};

/// The outputs that a host's driver must carry out, in order. They are the machine's effects.
pub type Output<P> = Effect<P>;

/// The timers of one machine. Each timer runs at most once at a time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Timers<T: Ord> {
    deadlines: OrdMap<T, Time>,
    order: OrdSet<(Time, T)>,
}

impl<T: Copy + Ord> Timers<T> {
    fn new() -> Self {
        Self { deadlines: OrdMap::new(), order: OrdSet::new() }
    }

    pub(crate) fn set(&mut self, timer: T, at: Time) {
        if let Some(old) = self.deadlines.insert(timer, at) {
            if old == at {
                return;
            }
            self.order.remove(&(old, timer));
        }
        self.order.insert((at, timer));
    }

    pub(crate) fn cancel(&mut self, timer: T) {
        if let Some(old) = self.deadlines.remove(&timer) {
            self.order.remove(&(old, timer));
        }
    }

    fn pop_due(&mut self, now: Time) -> Option<T> {
        let &(at, timer) = self.order.first()?;
        if at > now {
            return None;
        }
        self.cancel(timer);
        Some(timer)
    }

    /// The earliest deadline.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Time> {
        self.order.first().map(|&(at, _)| at)
    }

    /// Every running timer with its deadline, earliest first.
    pub fn iter(&self) -> impl Iterator<Item = (Time, T)> + '_ {
        self.order.iter().copied()
    }
}

/// One running machine. A crash drops the host; a restart calls [`Host::start`] with the surviving
/// records.
#[derive(Debug)]
pub struct Host<P: Protocol, M: Machine<P>> {
    machine: M,
    rng: Rng,
    timers: Timers<P::Timer>,
    effects: Vec<Effect<P>>,
    last_ticket: Ticket,
    durable: Ticket,
}

impl<P: Protocol, M: Machine<P>> Host<P, M> {
    /// Starts a machine with its surviving records. `rng` must be a stream of its own, and a
    /// different one after each restart.
    #[must_use]
    pub fn start(
        setup: Setup<P>,
        recovered: Vec<P::Record>,
        mut rng: Rng,
        now: Time,
        clock: Clock,
    ) -> Self {
        let mut timers = Timers::new();
        let mut effects = Vec::new();
        let mut last_ticket = Ticket(0);
        let mut cx = Cx {
            now,
            clock,
            rng: &mut rng,
            timers: &mut timers,
            effects: &mut effects,
            last_ticket: &mut last_ticket,
        };
        let machine = M::new(setup, recovered, &mut cx);
        Self { machine, rng, timers, effects, last_ticket, durable: Ticket(0) }
    }

    /// Gives the machine one input. After [`Host::flush`], [`Host::drain`] returns the outputs.
    pub fn step(&mut self, now: Time, clock: Clock, input: Input<P>) {
        if let Input::Durable(ticket) = input {
            assert!(
                self.durable < ticket && ticket <= self.last_ticket,
                "{ticket} reported durable, but {} already is and {} is the last issued",
                self.durable,
                self.last_ticket
            );
            self.durable = ticket;
        }
        self.with(now, clock, |machine, cx| machine.step(input, cx));
    }

    /// Expires every timer that is due, earliest first. Returns how many expired.
    pub fn fire(&mut self, now: Time, clock: Clock) -> usize {
        let mut fired = 0;
        // A handler may set a timer that is due at once. The bound stops a machine that always does
        // so.
        while fired < 10_000 && self.fire_next(now, clock).is_some() {
            fired += 1;
        }
        fired
    }

    /// Expires the earliest timer that is due, and returns it.
    pub fn fire_next(&mut self, now: Time, clock: Clock) -> Option<P::Timer> {
        let timer = self.timers.pop_due(now)?;
        self.with(now, clock, |machine, cx| machine.step(Input::Timer(timer), cx));
        Some(timer)
    }

    /// Lets the machine send messages that combine several inputs since the last flush.
    pub fn flush(&mut self, now: Time, clock: Clock) {
        self.with(now, clock, Machine::flush);
    }

    fn with(&mut self, now: Time, clock: Clock, act: impl FnOnce(&mut M, &mut Cx<'_, P>)) {
        let mut cx = Cx {
            now,
            clock,
            rng: &mut self.rng,
            timers: &mut self.timers,
            effects: &mut self.effects,
            last_ticket: &mut self.last_ticket,
        };
        act(&mut self.machine, &mut cx);
    }

    /// Takes the outputs so far, in the order in which they must be carried out.
    pub fn drain(&mut self) -> std::vec::Drain<'_, Output<P>> {
        self.effects.drain(..)
    }

    /// The deadline of the host's next timer.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Time> {
        self.timers.next_deadline()
    }

    /// The machine, for inspection.
    #[must_use]
    pub fn machine(&self) -> &M {
        &self.machine
    }

    /// The running timers, for inspection.
    #[must_use]
    pub fn timers(&self) -> &Timers<P::Timer> {
        &self.timers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timer_set_again_moves() {
        let mut timers = Timers::new();
        timers.set('a', Time(10));
        timers.set('b', Time(20));
        timers.set('a', Time(30));
        assert_eq!(timers.next_deadline(), Some(Time(20)));
        assert_eq!(timers.pop_due(Time(25)), Some('b'));
        assert_eq!(timers.pop_due(Time(25)), None);
        timers.cancel('a');
        timers.cancel('a');
        assert_eq!(timers.next_deadline(), None);
    }

    #[test]
    fn timers_due_together_fire_in_order_of_name() {
        let mut timers = Timers::new();
        for name in ['c', 'a', 'b'] {
            timers.set(name, Time(5));
        }
        let fired: Vec<char> = std::iter::from_fn(|| timers.pop_due(Time(5))).collect();
        assert_eq!(fired, ['a', 'b', 'c']);
    }
}
