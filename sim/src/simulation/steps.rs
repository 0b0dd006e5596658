//! The steps of machines: inputs, timers and effects.

use orthodrome_core::machine::{Effect, Input, Machine, Protocol};
use orthodrome_core::trace::Event as TraceEvent;

use super::delivery::Parcel;
use super::node::on_host;
use super::trace::{describe, shortened};
use super::{Environment, Event, FailureKind, Node, Process, Simulation};
use crate::cpu::{Cpu, sooner};
use crate::disk::Disk;

impl<P: Protocol> Simulation<P> {
    /// A client calls a gateway.
    pub(crate) fn call(&mut self, gateway: u32, input: Input<P>, hops: u16) {
        let (now, incarnation) = (self.env.now, self.env.incarnation(gateway));
        let keys = match &input {
            Input::Begin(txn) | Input::Resolve { txn, .. } => txn.reads.len() + txn.writes.len(),
            Input::Read { keys, .. } => keys.len(),
            Input::Decide { .. }
            | Input::Message { .. }
            | Input::Timer(_)
            | Input::Durable(_)
            | Input::Admin(_) => 0,
        };
        let node = self.node(gateway);
        if node.paused > 0 {
            let input = Box::new(input);
            node.backlog.push_back(Event::Input { node: gateway, incarnation, input, hops });
        } else if !node.cpu.is_infinite(now) {
            let ready = node.cpu.admit(now, 0, keys);
            let input = Box::new(input);
            self.env.queue.push(ready, Event::Input { node: gateway, incarnation, input, hops });
        } else {
            self.input(gateway, input, hops);
        }
    }

    /// Gives a machine an input, and carries out its effects.
    pub(crate) fn input(&mut self, index: u32, input: Input<P>, hops: u16) {
        let now = self.env.now;
        if self.node(index).paused > 0 {
            // The input had its CPU time before the pause began.
            let incarnation = self.env.incarnation(index);
            let event = Event::Input { node: index, incarnation, input: Box::new(input), hops };
            self.node(index).backlog.push_back(event);
            return;
        }
        self.env.log_input(index, &input);
        let node = self.node(index);
        let clock = node.clock.read(now);
        on_host!(&mut node.process, host => {
            host.step(now, clock, input);
            host.flush(now, clock);
        }, return);
        self.env.events += 1;
        self.settle_input(index, hops);
    }

    pub(super) fn wake(&mut self, index: u32) {
        let now = self.env.now;
        let node = self.node(index);
        if node.wake != Some(now) {
            return;
        }
        node.wake = None;
        if node.paused > 0 {
            return;
        }
        self.fire(index);
    }

    /// Expires all timers of a node that are due.
    fn fire(&mut self, index: u32) {
        // A handler may set a timer that is due at once. The bound on events at one instant stops a
        // machine that always does so.
        for _ in 0..10_000 {
            if !self.fire_one(index) {
                break;
            }
        }
        self.rearm(index);
    }

    /// Expires a node's earliest timer, if it is due.
    pub(super) fn fire_one(&mut self, index: u32) -> bool {
        let now = self.env.now;
        let node = self.node(index);
        let clock = node.clock.read(now);
        let fired = on_host!(&mut node.process, host => {
            let fired = host.fire_next(now, clock);
            host.flush(now, clock);
            fired
        }, None);
        let Some(timer) = fired else { return false };
        self.env.events += 1;
        self.env.log(index, TraceEvent::Timer, None, None, None, "-", || format!("{timer:?}"));
        self.settle_input(index, 0);
        true
    }

    /// Carries out a machine's effects after an input, and checks its invariants.
    pub(super) fn settle_input(&mut self, index: u32, hops: u16) {
        let Self { nodes, env, options, .. } = self;
        let every = options.invariants_every;
        let is_checked = every > 0 && env.events.is_multiple_of(every);
        let Some(node) = nodes.get_mut(index as usize) else { return };
        let Node { process, disk, cpu, work, .. } = node;
        let effects = on_host!(process, host => {
            if is_checked {
                host.machine().assert_invariants();
            }
            host.drain()
        }, return);
        cpu.charge_work(env.now, &work.take());
        for effect in effects {
            env.carry_out(index, (disk, cpu), effect, hops);
        }
        self.start_flush(index);
        self.rearm(index);
    }

    /// Schedules the node's next wake-up, if it must be earlier than the scheduled one.
    pub(super) fn rearm(&mut self, index: u32) {
        if self.env.manual.is_some() {
            return;
        }
        let now = self.env.now;
        let node = self.node(index);
        let Some(deadline) = on_host!(&node.process, host => host.next_deadline(), None) else {
            return;
        };
        let deadline = deadline.max(now);
        if node.paused == 0 && node.wake.is_none_or(|wake| deadline < wake) {
            node.wake = Some(deadline);
            self.env.queue.push(deadline, Event::Wake { node: index });
        }
    }

    /// A node's processor has its full speed again, also for the work that waits.
    pub(crate) fn speed_up(&mut self, index: u32) {
        let now = self.env.now;
        let factor = self.node(index).cpu.speed_up(now);
        let is_waiting = |event: &Event<P>| match event {
            Event::Arrive { flight, is_ready } => *is_ready && flight.to == index,
            Event::Input { node, .. } => *node == index,
            Event::Wake { .. }
            | Event::Ask { .. }
            | Event::Flushed { .. }
            | Event::Arrival
            | Event::Client { .. }
            | Event::Fault { .. } => false,
        };
        if factor > 1 {
            let when = |event: &_, at| if is_waiting(event) { sooner(at, now, factor) } else { at };
            self.env.queue.reschedule(when);
        }
    }
}

impl<P: Protocol> Environment<P> {
    fn carry_out(
        &mut self,
        index: u32,
        (disk, cpu): (&mut Disk<P>, &mut Cpu),
        effect: Effect<P>,
        hops: u16,
    ) {
        match effect {
            Effect::Send { to, msg } => {
                self.send(index, cpu, (to, Parcel::Machine(msg)), hops);
            }
            Effect::Persist { ticket, record } => {
                self.judge_record(index, &record);
                disk.write(ticket, record, hops);
            }
            Effect::Checkpoint { ticket, versions, records } => {
                for record in &records {
                    self.judge_record(index, record);
                }
                disk.checkpoint(ticket, versions, records, hops);
            }
            Effect::Reads { txn, reads } => {
                self.log(index, TraceEvent::Reads, None, None, Some(txn), "-", || describe(&reads));
                self.load.on_reads(self.now, index, txn, reads, hops);
            }
            Effect::Finish { txn, outcome, path } => {
                self.log(index, TraceEvent::Finish, None, None, Some(txn), path, || {
                    outcome.to_string()
                });
                if let Some(watch) = self.watch.as_mut()
                    && !self.load.only_reads(txn)
                {
                    let told = watch.told(txn, outcome);
                    self.note_claim(told);
                }
                self.load.on_finish(self.now, index, (txn, outcome, path), hops);
            }
            Effect::Note(note) => {
                self.log(index, TraceEvent::Note, None, None, None, "-", || format!("{note:?}"));
                *self.notes.entry(note).or_default() += 1;
            }
            Effect::Claim(claim) => {
                let node = self.id(index);
                let fits = self.watch.as_mut().map_or(Ok(()), |watch| watch.claim(node, claim));
                self.note_claim(fits);
            }
        }
    }

    /// A server that is given a larger record cannot continue, and a restart does not help.
    fn judge_record(&mut self, index: u32, record: &P::Record) {
        let (bytes, most) = (P::record_size(record), self.limits.record_bytes);
        if bytes > most {
            let (node, what) = (self.id(index), shortened(format!("{record:?}")));
            let detail = format!("{node} wrote a record of {bytes} bytes, over {most}: {what}");
            self.fail(FailureKind::Limit, detail);
        }
    }

    fn note_claim(&mut self, verdict: Result<(), String>) {
        if let Err(detail) = verdict {
            self.fail(FailureKind::Claim, detail);
        }
    }
}
