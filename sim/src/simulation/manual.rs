//! Step-by-step control: a golden script delivers messages, expires timers and completes flushes.

use orthodrome_core::machine::{Input, Protocol};

use super::node::on_host;
use super::{Flight, InFlight, Process, Simulation};

/// The events that step-by-step control holds back.
pub(crate) struct Manual<P: Protocol> {
    /// Messages that were sent and not delivered, numbered from 1 in the order of sending.
    pub(crate) held: Vec<(u32, Flight<P>)>,
    next: u32,
    /// Receives every message that is sent.
    echo: EchoSink<P>,
}

type EchoSink<P> = Box<dyn FnMut(u32, &InFlight<P>)>;

impl<P: Protocol> Manual<P> {
    pub(super) fn hold(&mut self, flight: Flight<P>) {
        self.next += 1;
        (self.echo)(self.next, &flight);
        self.held.push((self.next, flight));
    }
}

#[cfg_attr(
    not(feature = "golden"),
    expect(dead_code, reason = "only golden scripts take control, and they are a feature")
)]
impl<P: Protocol> Simulation<P> {
    /// From now on, messages, flushes and timers wait for a command.
    pub(crate) fn take_control(&mut self, echo: EchoSink<P>) {
        self.env.manual = Some(Manual { held: Vec::new(), next: 0, echo });
    }

    /// Releases all events that were held back.
    pub(crate) fn give_control_back(&mut self) {
        let Some(manual) = self.env.manual.take() else { return };
        for (_, flight) in manual.held {
            self.env.transmit(flight);
        }
        for index in 0..u32::try_from(self.nodes.len()).unwrap_or(u32::MAX) {
            self.start_flush(index);
            self.rearm(index);
        }
    }

    /// Delivers or loses message `number`, and removes it unless it `stays`.
    pub(crate) fn step_message(&mut self, number: u32, arrives: bool, stays: bool) {
        let Some(manual) = &mut self.env.manual else { return };
        let Some(at) = manual.held.iter().position(|(held, _)| *held == number) else { return };
        let (_, flight) = manual.held.remove(at);
        if stays {
            let msg = flight.msg.clone();
            manual.held.insert(at, (number, Box::new(InFlight { msg, ..*flight })));
        }
        if arrives {
            self.arrive(flight, true);
        } else {
            self.env.lose(&flight);
        }
    }

    /// Makes everything that a node wrote durable, and reports it. False if there was nothing.
    pub(crate) fn flush_disk(&mut self, index: u32) -> bool {
        let Self { nodes, env, .. } = self;
        let Some(node) = nodes.get_mut(index as usize) else { return false };
        node.disk.start_flush(env.now, &mut env.disk_rng);
        let Some((ticket, hops)) = node.disk.finish_flush() else { return false };
        self.input(index, Input::Durable(ticket), hops);
        true
    }

    /// Expires a node's earliest timer, and advances time to its deadline. False if it has none.
    pub(crate) fn fire_first(&mut self, index: u32) -> bool {
        let node = self.node(index);
        let Some(deadline) = on_host!(&node.process, host => host.next_deadline(), None) else {
            return false;
        };
        self.env.now = self.env.now.max(deadline);
        self.fire_one(index)
    }
}
