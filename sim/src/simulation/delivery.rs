//! Messages: from the sender over a link to the receiver, or lost.

use std::fmt;

use orthodrome_core::id::{NodeId, TxnId};
use orthodrome_core::machine::{Input, Lane, Machine, Message, Protocol};
use orthodrome_core::scan::{Answer, Ask};
use orthodrome_core::time::Time;
use orthodrome_core::trace::Event as TraceEvent;
use orthodrome_core::txn::Key;

use super::{Environment, Event, FailureKind, Node, Process, Simulation};
use crate::cpu::Cpu;
use crate::load::{Asked, ScanId};
use crate::network::{Fate, Released};

/// What links carry.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum Parcel<M> {
    /// A message of the protocol.
    Machine(M),
    /// A request for names, of a scan.
    Ask(ScanId, Box<Ask>),
    /// The answer.
    Names(ScanId, Box<Answer>),
}

impl<M: fmt::Debug> fmt::Debug for Parcel<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Machine(msg) => msg.fmt(f),
            Self::Ask(_, ask) => ask.fmt(f),
            Self::Names(_, answer) => answer.fmt(f),
        }
    }
}

/// The size of a request for names or of an answer, without keys.
const NAMES_HEAD: usize = 48;

impl<M: Message> Message for Parcel<M> {
    fn kind(&self) -> &'static str {
        match self {
            Self::Machine(msg) => msg.kind(),
            Self::Ask(..) => "Ask",
            Self::Names(..) => "Names",
        }
    }

    fn txn(&self) -> Option<TxnId> {
        match self {
            Self::Machine(msg) => msg.txn(),
            Self::Ask(..) | Self::Names(..) => None,
        }
    }

    fn wire_size(&self) -> usize {
        match self {
            Self::Machine(msg) => msg.wire_size(),
            Self::Ask(_, ask) => {
                let until = ask.range.until.as_ref().map_or(0, |key| key.len());
                NAMES_HEAD + ask.range.from.len() + until
            }
            Self::Names(_, answer) => {
                let names = answer.listing.iter().flat_map(|listing| &listing.names);
                NAMES_HEAD + names.map(|name| name.key.len() + 4).sum::<usize>()
            }
        }
    }

    fn keys(&self) -> usize {
        match self {
            Self::Machine(msg) => msg.keys(),
            Self::Ask(..) => 0,
            Self::Names(_, answer) => answer.listing.iter().map(|l| l.names.len()).sum(),
        }
    }

    fn keys_held(&self, holds: &dyn Fn(&Key) -> bool) -> usize {
        match self {
            Self::Machine(msg) => msg.keys_held(holds),
            Self::Ask(..) | Self::Names(..) => self.keys(),
        }
    }

    fn lane(&self) -> Lane {
        match self {
            Self::Machine(msg) => msg.lane(),
            Self::Ask(..) | Self::Names(..) => Lane::Data,
        }
    }
}

/// A message in flight.
#[derive(Debug)]
pub(crate) struct InFlight<P: Protocol> {
    pub(crate) from: u32,
    pub(crate) to: u32,
    /// The incarnations of sender and receiver to which the connection belongs.
    pub(super) incarnations: (u32, u32),
    pub(crate) sent: Time,
    /// Size on the wire.
    pub(super) bytes: u32,
    pub(super) hops: u16,
    pub(crate) msg: Parcel<P::Msg>,
}

/// The same where it lies: a message goes through the queue twice, and stays in its place.
pub(crate) type Flight<P> = Box<InFlight<P>>;

impl<P: Protocol> Simulation<P> {
    pub(super) fn arrive(&mut self, flight: Flight<P>, is_ready: bool) {
        let (now, to) = (self.env.now, flight.to);
        if self.env.is_cut(&flight) {
            self.env.lose(&flight);
            return;
        }
        let node = self.node(to);
        if node.paused > 0 {
            node.backlog.push_back(Event::Arrive { flight, is_ready });
            return;
        }
        if !is_ready && flight.from != to && !node.cpu.is_infinite(now) {
            let (bytes, keys) = (flight.bytes as usize, self.keys_at_receiver(&flight));
            let node = self.node(to);
            let ready = match flight.msg.lane() {
                Lane::Control => node.cpu.admit_control(now, bytes, keys),
                Lane::Data => node.cpu.admit(now, bytes, keys),
            };
            if ready > now {
                self.env.queue.push(ready, Event::Arrive { flight, is_ready: true });
                return;
            }
        }
        self.accept(*flight);
    }

    /// The number of keys of a message that its receiver processes.
    fn keys_at_receiver(&self, flight: &InFlight<P>) -> usize {
        let receiver = self.env.id(flight.to);
        let holds = |key: &Key| {
            let placed = self.cluster.partition(self.cluster.partition_of(key));
            placed.is_some_and(|placed| placed.replicas.contains(&receiver))
        };
        flight.msg.keys_held(&holds)
    }

    /// A message has arrived and had its CPU time.
    pub(crate) fn accept(&mut self, flight: InFlight<P>) {
        let InFlight { from: sender, to, sent, hops, msg, .. } = flight;
        let from = self.env.id(sender);
        let env = &mut self.env;
        env.log(to, TraceEvent::Receive, Some(from), Some(sent), msg.txn(), msg.kind(), || {
            format!("{msg:?}")
        });
        match msg {
            Parcel::Machine(msg) => self.input(to, Input::Message { from, msg }, hops),
            Parcel::Ask(scan, ask) => self.list_names(sender, to, (scan, &ask), hops),
            Parcel::Names(scan, answer) => {
                env.events += 1;
                env.load.on_names(env.now, (scan, to), (from, *answer), hops);
            }
        }
    }

    /// A server lists its names for a scan.
    fn list_names(&mut self, from: u32, to: u32, (scan, ask): (ScanId, &Ask), hops: u16) {
        let Self { nodes, env, .. } = self;
        env.events += 1;
        let Some(Node { process, cpu, .. }) = nodes.get_mut(to as usize) else { return };
        let listing = match process {
            Process::Server(host) => host.machine().names(ask),
            Process::Gateway(_) | Process::Down => return,
        };
        let answer = Answer { unit: ask.unit, round: ask.round, listing };
        let gateway = env.id(from);
        env.send(to, cpu, (gateway, Parcel::Names(scan, Box::new(answer))), hops);
    }

    /// Sends the requests for names of scans.
    pub(super) fn send_asks(&mut self) {
        for asked in std::mem::take(&mut self.env.load.asks) {
            self.send_ask(Box::new(asked));
        }
    }

    pub(super) fn send_ask(&mut self, asked: Box<Asked>) {
        let Self { nodes, env, .. } = self;
        let gateway = asked.gateway;
        let incarnation = env.incarnation(gateway);
        let Some(node) = nodes.get_mut(gateway as usize) else { return };
        if node.paused > 0 {
            node.backlog.push_back(Event::Ask { incarnation, asked });
            return;
        }
        let Asked { scan, to, ask, hops, .. } = *asked;
        env.send(gateway, &mut node.cpu, (to, Parcel::Ask(scan, Box::new(ask))), hops);
    }

    /// Sends what links held while they were blocked.
    pub(crate) fn release(&mut self, released: Released<Flight<P>>) {
        for flight in &released.lost {
            self.env.lose(flight);
        }
        for flight in released.send {
            self.env.transmit(flight);
        }
    }
}

impl<P: Protocol> Environment<P> {
    pub(super) fn send(
        &mut self,
        from: u32,
        cpu: &mut Cpu,
        (to, msg): (NodeId, Parcel<P::Msg>),
        hops: u16,
    ) {
        let to_index = self.dense.get(to.0 as usize).copied().unwrap_or(u32::MAX);
        if to_index == u32::MAX {
            let from = self.id(from);
            let kind = msg.kind();
            self.fail(
                FailureKind::Promise,
                format!("{from} sent {kind} to {to}, which is not in the cluster"),
            );
            return;
        }
        let is_wan = self.network.is_wan(from, to_index);
        let bytes = msg.wire_size();
        let most = self.limits.message_bytes;
        if bytes > most && matches!(msg, Parcel::Machine(_)) {
            let (node, kind) = (self.id(from), msg.kind());
            let detail = format!("{node} sent {kind} of {bytes} bytes to {to}, over {most}");
            self.fail(FailureKind::Limit, detail);
        }
        if from != to_index {
            cpu.charge_send(self.now, bytes);
            if self.load.measured.contains(&self.now) {
                self.traffic.count(msg.kind(), from, to_index, is_wan, bytes);
            }
        }
        let incarnations = (self.incarnation(from), self.incarnation(to_index));
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let hops = hops.saturating_add(u16::from(is_wan));
        let sent = self.now;
        let flight = InFlight { from, to: to_index, incarnations, sent, bytes, hops, msg };
        let flight = Box::new(flight);
        match &mut self.manual {
            Some(manual) => manual.hold(flight),
            None => self.transmit(flight),
        }
    }

    pub(super) fn transmit(&mut self, flight: Flight<P>) {
        let (now, from, to) = (self.now, flight.from, flight.to);
        let lane = flight.msg.lane();
        match self.network.send_in(lane, now, (from, to), flight.bytes as usize) {
            Fate::Arrives(at, again) => {
                if let Some(again) = again {
                    let flight = Box::new(InFlight { msg: flight.msg.clone(), ..*flight });
                    self.queue.push(again, Event::Arrive { flight, is_ready: false });
                }
                self.queue.push(at, Event::Arrive { flight, is_ready: false });
            }
            Fate::Lost => self.lose(&flight),
            Fate::Stalls => {
                let size = (lane, flight.bytes as usize);
                for lost in self.network.stall(now, (from, to), size, flight) {
                    self.lose(&lost);
                }
            }
        }
    }

    /// True if the message's connection broke before it arrived.
    fn is_cut(&self, flight: &InFlight<P>) -> bool {
        let &InFlight { from, to, incarnations, sent, .. } = flight;
        let is_down = !self.up.get(to as usize).copied().unwrap_or(false);
        is_down
            || self.incarnation(to) != incarnations.1
            || (self.incarnation(from) != incarnations.0 && self.network.was_cut(from, to, sent))
    }

    pub(crate) fn lose(&mut self, flight: &InFlight<P>) {
        let to = self.id(flight.to);
        let (msg, sent) = (&flight.msg, flight.sent);
        self.log(
            flight.from,
            TraceEvent::Lose,
            Some(to),
            Some(sent),
            msg.txn(),
            msg.kind(),
            || format!("{msg:?}"),
        );
    }
}
