//! The state that a node's threads share: the inboxes of both machines, and what the node's clients
//! and its transport ask of it.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use bytes::Bytes;
use orthodrome_core::machine::{
    Admin, Gauge, GroupView, Lane, MembershipOrder, Message as _, Refusal,
};
use orthodrome_core::wire::{self, Wire as _};
use orthodrome_core::{ClientId, Cluster, NodeId, Time};
use orthodrome_protocols::registry;
use tokio::sync::{Notify, Semaphore, oneshot, watch};
use tokio_util::sync::CancellationToken;
use tracing::error;

use super::Settings;
use super::clock::NodeClock;
use super::driver::{Counters, Event, Turn};
use crate::gateway::{Backend, Command, Description, GatewayError, Health};
use crate::inbox::Inbox;
use crate::storage::{Report, Tag, Work};
use crate::transport::handshake::Process;
use crate::transport::{Deliver, Transport};
use crate::wire::WireProtocol;

/// Number of queued messages of a machine at which its connections stop reading.
const BACKLOG_MAX: usize = 16_384;
/// Bytes of queued messages of a machine at which its connections stop reading.
const BACKLOG_BYTES_MAX: usize = 64 << 20;

/// Adds an event to the inbox of a machine that this thread is about to run.
fn put<P: WireProtocol>(inbox: &Inbox<Event<P>>, lane: Lane, event: Event<P>) {
    match lane {
        // Few and short. Leases must not run out behind what waits.
        Lane::Control => inbox.put_urgent(event),
        Lane::Data => inbox.put(event),
    };
}

/// The state that a node's threads share.
pub(super) struct Shared<P: WireProtocol> {
    pub(super) me: Process,
    pub(super) cluster: String,
    pub(super) protocol: &'static str,
    pub(super) guarantee: &'static str,
    pub(super) general: bool,
    pub(super) map: Arc<Cluster>,
    pub(super) clock: NodeClock,
    pub(super) server: Arc<Inbox<Event<P>>>,
    pub(super) gateway: Arc<Inbox<Event<P>>>,
    /// The server machine and the gateway machine, once they have started and until they end.
    pub(super) machines: [Mutex<Option<Box<dyn Turn>>>; 2],
    /// Notified when there is work for the machines.
    pub(super) ticks: Notify,
    pub(super) counters: [Counters; 2],
    pub(super) health: Mutex<Health>,
    /// Why the node failed, once it has.
    pub(super) failure: watch::Sender<Option<String>>,
    /// Cancelled when the node ends, for any reason.
    pub(super) ended: CancellationToken,
    pub(super) transport: OnceLock<Transport>,
    pub(super) clients: Clients,
}

/// The source of new client ids.
pub(super) struct Clients {
    /// The next free number, and the first that is not reserved.
    pub(super) block: tokio::sync::Mutex<(u64, u64)>,
    /// The storage thread; not set without durability, when ids need not be reserved.
    pub(super) writer: OnceLock<Arc<Inbox<Work>>>,
}

impl<P: WireProtocol> Shared<P> {
    pub(super) fn new(
        protocol: &'static str,
        settings: &Settings,
        me: &Process,
        clock: NodeClock,
        failure: watch::Sender<Option<String>>,
        clients: (u64, u64),
    ) -> Self {
        let block = tokio::sync::Mutex::new(clients);
        Self {
            me: me.clone(),
            cluster: settings.cluster.clone(),
            protocol,
            guarantee: registry::find(protocol).map_or("none", |row| row.guarantee.name()),
            general: P::GENERAL,
            map: settings.map.clone(),
            clock,
            server: Arc::default(),
            gateway: Arc::default(),
            machines: Default::default(),
            ticks: Notify::new(),
            counters: Default::default(),
            health: Mutex::new(Health::Serving),
            failure,
            ended: CancellationToken::new(),
            transport: OnceLock::new(),
            clients: Clients { block, writer: OnceLock::new() },
        }
    }

    /// Handles a report of the storage thread.
    pub(super) fn report(&self, report: Report) {
        match report {
            Report::Durable(tag, ticket) => {
                self.inbox(tag).put(Event::Durable(ticket));
                // The storage thread must not wait for machines.
                let is_busy = self.clients.writer.get().is_some_and(|writer| writer.len() > 0);
                if is_busy { self.leave_to_owners() } else { self.run() }
            }
            Report::Failed(error) => self.fail(&error.to_string()),
        }
    }

    pub(super) fn machine(&self, tag: Tag) -> &Mutex<Option<Box<dyn Turn>>> {
        let [server, gateway] = &self.machines;
        match tag {
            Tag::Server => server,
            Tag::Gateway => gateway,
        }
    }

    /// Puts an event into a machine's inbox, to be taken soon. False if the machine has ended.
    pub(super) fn put(&self, tag: Tag, event: Event<P>) -> bool {
        let is_open = self.inbox(tag).put(event);
        self.tick();
        is_open
    }

    pub(super) fn inbox(&self, tag: Tag) -> &Arc<Inbox<Event<P>>> {
        match tag {
            Tag::Server => &self.server,
            Tag::Gateway => &self.gateway,
        }
    }

    pub(super) fn counters(&self, tag: Tag) -> &Counters {
        let [server, gateway] = &self.counters;
        match tag {
            Tag::Server => server,
            Tag::Gateway => gateway,
        }
    }

    /// The inbox of the machine with this id, if it is in this process.
    pub(super) fn local(&self, id: NodeId) -> Option<&Arc<Inbox<Event<P>>>> {
        if id == self.me.node {
            Some(&self.server)
        } else if id == self.me.gateway {
            Some(&self.gateway)
        } else {
            None
        }
    }

    pub(super) fn send(&self, from: NodeId, to: NodeId, msg: P::Msg) {
        match (self.local(to), self.transport.get()) {
            // Messages between machines of one process are not encoded.
            (Some(inbox), _) => {
                // The thread that runs one machine also runs the other.
                let lane = msg.lane();
                put(inbox, lane, Event::Message { from, msg, room: None });
            }
            (None, Some(transport)) => {
                let lane = msg.lane();
                transport.queue(lane, from, to, |out| msg.put(out));
            }
            // Before the transport has started, messages are lost, as on a network.
            (None, None) => {}
        }
    }

    /// Sends what [`Shared::send`] has queued.
    pub(super) fn flush(&self) {
        if let Some(transport) = self.transport.get() {
            transport.flush();
        }
    }

    pub(super) fn health(&self) -> MutexGuard<'_, Health> {
        self.health.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the node because of an internal failure. Only the first reason counts.
    pub(super) fn fail(&self, why: &str) {
        let mut health = self.health();
        if let Health::Failed(_) = *health {
            return;
        }
        *health = Health::Failed(why.to_owned());
        drop(health);
        error!(node = %self.me.node, why, "this node has failed and stops serving");
        self.failure.send_replace(Some(why.to_owned()));
        self.end();
    }

    pub(super) fn end(&self) {
        self.ended.cancel();
        self.server.close();
        self.gateway.close();
        self.tick();
        if let Some(transport) = self.transport.get() {
            transport.cancel();
        }
    }
}

impl<P: WireProtocol> Backend for Shared<P> {
    fn submit(&self, command: Command) -> bool {
        self.put(Tag::Gateway, Event::Command(command))
    }

    fn admin(&self, order: Admin) -> oneshot::Receiver<Result<(), Refusal>> {
        let (reply, answer) = oneshot::channel();
        self.put(Tag::Server, Event::Admin(order, reply));
        answer
    }

    fn groups(&self) -> oneshot::Receiver<Vec<GroupView>> {
        let (reply, groups) = oneshot::channel();
        self.put(Tag::Server, Event::Groups(reply));
        groups
    }

    fn gauges(&self) -> [oneshot::Receiver<Vec<Gauge>>; 2] {
        let (reply, of_gateway) = oneshot::channel();
        self.put(Tag::Gateway, Event::Gauges(reply));
        let (reply, of_server) = oneshot::channel();
        self.put(Tag::Server, Event::Gauges(reply));
        [of_gateway, of_server]
    }

    fn orders(&self) -> oneshot::Receiver<(Time, Vec<MembershipOrder>)> {
        let (reply, orders) = oneshot::channel();
        self.put(Tag::Server, Event::Orders(reply));
        orders
    }

    fn health(&self) -> Health {
        self.health().clone()
    }

    fn describe(&self) -> Description {
        let leaders = self.map.partitions().map(|p| (p.id, p.preferred_leader)).collect();
        Description {
            cluster: self.cluster.clone(),
            protocol: self.protocol,
            guarantee: self.guarantee,
            general: self.general,
            node: self.me.node,
            gateway: self.me.gateway,
            region: self.me.region.clone(),
            leaders,
            health: Backend::health(self),
            in_flight: 0,
            in_flight_max: 0,
        }
    }

    fn register(
        &self,
    ) -> Pin<Box<dyn Future<Output = Result<ClientId, GatewayError>> + Send + '_>> {
        Box::pin(async {
            let mut block = self.clients.block.lock().await;
            if block.0 == block.1 {
                let writer = self.clients.writer.get().ok_or(GatewayError::Stopping)?;
                let (reply, reserved) = oneshot::channel();
                writer.push(Work::Clients(reply));
                *block = reserved.await.map_err(|_| GatewayError::Stopping)?;
            }
            let number = block.0;
            block.0 += 1;
            // Ids are counters within a gateway, so no two gateways can give the same.
            Ok(ClientId::registered(self.me.gateway, number))
        })
    }
}

/// Takes the messages that arrive from other processes.
pub(super) struct Receiver<P: WireProtocol> {
    shared: Arc<Shared<P>>,
    /// The remaining bytes of the queues of the server machine and of the gateway machine.
    room: [Arc<Semaphore>; 2],
}

impl<P: WireProtocol> Receiver<P> {
    pub(super) fn new(shared: Arc<Shared<P>>) -> Self {
        let room = || Arc::new(Semaphore::new(BACKLOG_BYTES_MAX));
        Self { shared, room: [room(), room()] }
    }
}

impl<P: WireProtocol> Deliver for Receiver<P> {
    async fn deliver(&self, from: NodeId, to: NodeId, bytes: Bytes) -> Result<(), String> {
        let inbox = self.shared.local(to);
        let inbox = inbox
            .ok_or_else(|| format!("a message for {to}, which does not run in this process"))?;
        let [of_server, of_gateway] = &self.room;
        let room = if to == self.shared.me.gateway { of_gateway } else { of_server };
        let bytes_of = u32::try_from(bytes.len().min(BACKLOG_BYTES_MAX)).unwrap_or(u32::MAX);
        let msg = wire::decode::<P::Msg>(&bytes).map_err(|error| error.to_string())?;
        if let Lane::Control = msg.lane() {
            // Few and short. Leases must not run out behind what waits.
            inbox.put_urgent(Event::Message { from, msg, room: None });
            return Ok(());
        }
        let room = match room.clone().try_acquire_many_owned(bytes_of) {
            Ok(room) => Some(room),
            Err(_) => {
                // What this connection put there must be taken first. Never closed.
                self.shared.leave_to_owners();
                room.clone().acquire_many_owned(bytes_of).await.ok()
            }
        };
        inbox.put_when_room(Event::Message { from, msg, room }, BACKLOG_MAX).await;
        Ok(())
    }

    fn delivered(&self) {
        self.shared.tick();
    }
}
