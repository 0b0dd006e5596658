//! One turn of a machine: take what has arrived, step, fire timers, flush, carry out what the
//! machine wants done. `turns.rs` says on which thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use orthodrome_core::machine::{Admin, Gauge, GroupView, MembershipOrder, Refusal};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::store::MemoryEngine;
use orthodrome_core::wire;
use orthodrome_core::{Clock, Effect, Host, Input, Machine, NodeId, Rng, Setup, Ticket, Time};
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use super::callers::Callers;
use super::names::Waiting;
use super::{ClockError, Shared};
use crate::gateway::{Command, PendingTxns};
use crate::inbox::Inbox;
use crate::storage::{Tag, Work};
use crate::wire::WireProtocol;

/// Maximum number of inputs taken at once, which share one flush and delay a due timer.
const BATCH: usize = 256;

/// An event for a machine.
#[derive(Debug)]
pub(super) enum Event<P: WireProtocol> {
    Message {
        from: NodeId,
        msg: P::Msg,
        /// Its part of the bytes that may be queued here; none for a message from within the
        /// process.
        room: Option<OwnedSemaphorePermit>,
    },
    Durable(Ticket),
    Command(Command),
    /// An operator's order; the answer says whether the machine accepts it.
    Admin(Admin, oneshot::Sender<Result<(), Refusal>>),
    /// The machine's state in one line.
    Describe(oneshot::Sender<String>),
    /// The machine's gauges.
    Gauges(oneshot::Sender<Vec<Gauge>>),
    /// The machine's knowledge of groups.
    Groups(oneshot::Sender<Vec<GroupView>>),
    /// The states of orders to change members, and the current time.
    Orders(oneshot::Sender<(Time, Vec<MembershipOrder>)>),
    /// The transactions in flight.
    Pending(oneshot::Sender<PendingTxns>),
    /// A request for names, for a scan.
    Names(Box<Waiting>),
}

/// The destination of a machine's records.
#[derive(Debug, Clone)]
pub(super) enum Persistence {
    /// To the storage thread.
    Disk(Arc<Inbox<Work>>),
    /// Memory only: records are as durable as the process. Versions go to this engine.
    Memory(MemoryEngine),
}

/// Counts of one machine's work, for status reports.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) inputs: AtomicU64,
    pub(super) timers: AtomicU64,
    pub(super) batches: AtomicU64,
    pub(super) records: AtomicU64,
    pub(super) checkpoints: AtomicU64,
    pub(super) notes: std::sync::Mutex<OrdMap<String, u64>>,
}

fn count(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Ordering::Relaxed);
}

/// A machine that takes turns, whatever its type.
pub(super) trait Turn: Send {
    /// Takes what waits, as much as one turn may, and fires what is due.
    ///
    /// # Errors
    /// The clock broke its promise; nothing was taken.
    fn turn(&mut self) -> Result<(), ClockError>;
}

/// One machine, and what it needs. Dropping it is the machine's crash: callers that still wait learn
/// that the outcome is unknown.
pub(super) struct Driver<P: WireProtocol, M: Machine<P>> {
    host: Host<P, M>,
    me: NodeId,
    tag: Tag,
    shared: Arc<Shared<P>>,
    inbox: Arc<Inbox<Event<P>>>,
    persistence: Persistence,
    callers: Callers,
    events: Vec<Event<P>>,
    effects: Vec<Effect<P>>,
}

impl<P: WireProtocol, M: Machine<P>> Turn for Driver<P, M> {
    fn turn(&mut self) -> Result<(), ClockError> {
        let mut events = std::mem::take(&mut self.events);
        self.inbox.take(&mut events, BATCH);
        // After they were taken: no reading is older than what it is for.
        let (now, clock) = self.shared.clock.read()?;
        self.callers.set_time(now);
        let counters = self.shared.counters(self.tag);
        count(&counters.batches, 1);
        count(&counters.inputs, events.len() as u64);
        for event in events.drain(..) {
            if let Some(input) = self.take(now, event) {
                self.host.step(now, clock, input);
            }
        }
        self.events = events;
        let fired = self.host.fire(now, clock);
        count(&self.shared.counters(self.tag).timers, fired as u64);
        self.settle(now, clock);
        self.shared.flush();
        self.set_alarm();
        Ok(())
    }
}

impl<P: WireProtocol, M: Machine<P>> Driver<P, M> {
    pub(super) fn new(
        tag: Tag,
        setup: Setup<P>,
        recovered: Vec<P::Record>,
        rng: Rng,
        shared: Arc<Shared<P>>,
        persistence: Persistence,
        (now, clock): (Time, Clock),
    ) -> Self {
        let me = setup.node;
        let inbox = shared.inbox(tag).clone();
        let host = Host::start(setup, recovered, rng, now, clock);
        let callers = Callers::default();
        let (events, effects) = (Vec::new(), Vec::new());
        Self { host, me, tag, shared, inbox, persistence, callers, events, effects }
    }

    /// What the machine does by itself when it starts.
    ///
    /// # Errors
    /// The clock broke its promise.
    pub(super) fn begin(&mut self) -> Result<(), ClockError> {
        let (now, clock) = self.shared.clock.read()?;
        self.settle(now, clock);
        self.shared.flush();
        self.set_alarm();
        Ok(())
    }

    /// Sets the time at which the machine must take its next turn, if no thread takes it before.
    fn set_alarm(&self) {
        let deadline = self.host.next_deadline();
        self.inbox.set_alarm(deadline.and_then(|time| self.shared.clock.instant(time)));
    }

    /// Converts an event to the machine's input.
    fn take(&mut self, now: Time, event: Event<P>) -> Option<Input<P>> {
        match event {
            Event::Message { from, msg, room } => {
                drop(room);
                Some(Input::Message { from, msg })
            }
            Event::Durable(ticket) => Some(Input::Durable(ticket)),
            Event::Command(command) => self.callers.command(command),
            Event::Admin(order, reply) => {
                let refusal = self.host.machine().refusal(&order);
                let is_taken = refusal.is_none();
                // The sender of the order may have stopped waiting; the order is executed
                // nevertheless.
                let _ = reply.send(refusal.map_or(Ok(()), Err));
                is_taken.then_some(Input::Admin(order))
            }
            Event::Describe(reply) => {
                // The sender of the request may have stopped waiting.
                let _ = reply.send(self.host.machine().to_string());
                None
            }
            Event::Gauges(reply) => {
                let _ = reply.send(self.host.machine().gauges(now));
                None
            }
            Event::Groups(reply) => {
                let _ = reply.send(self.host.machine().groups(now));
                None
            }
            Event::Orders(reply) => {
                let _ = reply.send((now, self.host.machine().orders()));
                None
            }
            Event::Pending(reply) => {
                let _ = reply.send(self.callers.pending());
                None
            }
            Event::Names(waiting) => {
                let listing = self.host.machine().names(&waiting.ask);
                self.shared.listed(*waiting, listing);
                None
            }
        }
    }

    /// Flushes the machine, and carries out effects until there are none: an answer to a caller may
    /// show that the caller is gone, which is a new input.
    fn settle(&mut self, now: Time, clock: Clock) {
        loop {
            self.host.flush(now, clock);
            let mut effects = std::mem::take(&mut self.effects);
            effects.extend(self.host.drain());
            let mut inputs = Vec::new();
            for effect in effects.drain(..) {
                inputs.extend(self.carry_out(effect));
            }
            self.effects = effects;
            if inputs.is_empty() {
                return;
            }
            for input in inputs {
                self.host.step(now, clock, input);
            }
        }
    }

    fn carry_out(&mut self, effect: Effect<P>) -> Option<Input<P>> {
        match effect {
            Effect::Send { to, msg } => self.shared.send(self.me, to, msg),
            Effect::Persist { ticket, record } => self.persist(ticket, &record),
            Effect::Checkpoint { ticket, versions, records } => {
                count(&self.shared.counters(self.tag).checkpoints, 1);
                match &self.persistence {
                    Persistence::Disk(writer) => {
                        let records = records.iter().map(wire::encode).collect();
                        let tag = self.tag;
                        writer.push(Work::Checkpoint { tag, ticket, versions, records });
                    }
                    Persistence::Memory(engine) => {
                        engine.merge(&versions);
                        self.inbox.put(Event::Durable(ticket));
                    }
                }
            }
            Effect::Reads { txn, reads } => return self.callers.reads(txn, reads),
            Effect::Finish { txn, outcome, path } => self.callers.finish(txn, outcome, path),
            Effect::Note(note) => {
                let notes = &self.shared.counters(self.tag).notes;
                let mut notes = notes.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                *notes.entry(format!("{note:?}")).or_default() += 1;
            }
            // Claims are for the simulator: a process does not see the claims of other nodes.
            Effect::Claim(_) => {}
        }
        None
    }

    fn persist(&mut self, ticket: Ticket, record: &P::Record) {
        count(&self.shared.counters(self.tag).records, 1);
        match &self.persistence {
            Persistence::Disk(writer) => {
                let record = wire::encode(record);
                writer.push(Work::Persist { tag: self.tag, ticket, record });
            }
            Persistence::Memory(_) => {
                self.inbox.put(Event::Durable(ticket));
            }
        }
    }
}
