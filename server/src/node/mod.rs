//! One process of a cluster: a server machine and a gateway machine, with their storage, transport
//! and clocks.
//!
//! [`start`] recovers the node's data, starts its threads and returns a [`NodeHandle`]. An internal
//! failure (of the disk, of the clock, or an inconsistent machine) ends the whole node at once and
//! is reported by [`NodeHandle::failed`], because half a node could serve no client.

mod callers;
mod clock;
mod driver;
mod names;
// Unit tests run no nodes; with this module, every protocol would be compiled once more for them.
#[cfg(not(test))]
pub mod embedded;
#[cfg(not(test))]
pub mod run;
mod turns;
mod used;
mod workers;

use std::num::NonZero;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use orthodrome_core::lease::LeaseId;
use orthodrome_core::machine::{
    Admin, Gauge, GroupView, Lane, MembershipOrder, Message as _, Refusal,
};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::scan::Ask;
use orthodrome_core::store::{MemoryEngine, StateEngine};
use orthodrome_core::wire::{self, Wire as _};
use orthodrome_core::{ClientId, Clock, Cluster, NodeId, RegionId, Rng, Setup, Time, Timestamp};
use orthodrome_protocols::registry;
use tokio::net::TcpListener;
use tokio::sync::{Notify, Semaphore, oneshot, watch};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

pub use self::clock::ClockError;
use self::clock::NodeClock;
use self::driver::{Counters, Driver, Event, Persistence, Turn};
use self::names::Scans;
use self::turns::Life;
use self::workers::Threads;
use crate::gateway::{
    Backend, Command, Description, Gateway, GatewayError, Health, InFlight, InFlightMax,
    PendingTxns,
};
use crate::inbox::Inbox;
use crate::scan::{ScanFailed, Subscription};
use crate::storage::{
    self, Expected, Founders, Identity, Placement, Report, Storage, StorageError, Tag, Work, Writer,
};
use crate::tls::Tls;
use crate::transport::handshake::{Introduction, Process, draw_instance, map_digest};
use crate::transport::{self, Deliver, LinkStatus, Peer, Transport};
use crate::wire::WireProtocol;

/// Number of queued messages of a machine at which its connections stop reading.
const BACKLOG_MAX: usize = 16_384;
/// Bytes of queued messages of a machine at which its connections stop reading.
const BACKLOG_BYTES_MAX: usize = 64 << 20;
/// Interval at which the clock is checked and its reading made durable.
const CLOCK_EVERY: Duration = Duration::from_secs(1);
/// Time limit for handing leadership to another node, in addition to network delays.
const HAND_OVER_EXTRA: Duration = Duration::from_millis(500);
/// Interval at which a node that is shutting down checks whether it has handed over its
/// leaderships.
const HAND_OVER_LOOK: Duration = Duration::from_millis(10);

/// The durability of a node's data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Durability {
    /// Acknowledged data survives a power failure.
    Sync,
    /// Acknowledged data survives the death of the process, but not of the machine.
    NoSync,
    /// Data does not survive: for benchmarks.
    None,
}

/// The address of a process of the cluster.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Endpoint {
    /// Its server machine; also the id of the process.
    pub node: NodeId,
    /// Its gateway machine.
    pub gateway: NodeId,
    /// `host:port` for other nodes.
    pub address: String,
}

/// The settings of a node.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The cluster's id.
    pub cluster: String,
    /// The placement, equal at every node.
    pub map: Arc<Cluster>,
    /// This process, one of `endpoints`.
    pub node: NodeId,
    /// Every process of the cluster, this one included.
    pub endpoints: Vec<Endpoint>,
    /// Its data directory. Not used without durability.
    pub data_dir: PathBuf,
    /// The expected contents of the directory.
    pub expected: Expected,
    /// The durability of a node's data.
    pub durability: Durability,
    /// Whether to check every page of the state engine at the start.
    pub verify_state: bool,
    /// TLS; none for plain TCP, on loopback only.
    pub tls: Option<Tls>,
    /// Whether messages to other processes are delayed by the topology's one-way delays.
    pub emulate_wan: bool,
    /// The maximum error of the system clock.
    pub clock_error: Duration,
    /// True if all nodes run on this machine and share one clock. Then nodes of other machines are
    /// refused.
    pub shared_clock: bool,
    /// An offset added to the system clock, in nanoseconds; for tests of clock faults within one
    /// process.
    pub clock_skew: Arc<AtomicI64>,
    /// Maximum number of transactions in flight at this gateway.
    pub in_flight_max: usize,
    /// Maximum number of bytes of their requests.
    pub bytes_in_flight_max: usize,
    /// Number of threads for independent work; none: one for each processor.
    pub workers: Option<NonZero<usize>>,
    /// Maximum number of queued bytes for each other process.
    pub queue_bytes_max: usize,
}

/// Why a node cannot start. It has served no request.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The settings are inconsistent.
    #[error("{0}")]
    Settings(String),
    /// Its data cannot be used.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// Its data is lost, at least in part, and this protocol knows another way than to restore it.
    #[error("{error}. {otherwise}")]
    Lost {
        /// What is lost.
        error: StorageError,
        /// What to do if there is no copy.
        otherwise: &'static str,
    },
    /// The clock is behind a reading that this node has already used.
    #[error(
        "the system clock is {behind_ms} ms behind the newest time this node has used, more than \
         `clock_error_ms` allows; correct the clock, then start the node again"
    )]
    ClockBehind {
        /// By how much, in milliseconds.
        behind_ms: u64,
    },
    /// The clock was moved while the node was starting.
    #[error(transparent)]
    Clock(#[from] ClockError),
    /// An operation of the operating system failed.
    #[error("cannot start a thread: {0}")]
    Io(#[from] std::io::Error),
}

/// Adds an event to the inbox of a machine that this thread is about to run.
fn put<P: WireProtocol>(inbox: &Inbox<Event<P>>, lane: Lane, event: Event<P>) {
    match lane {
        // Few and short. Leases must not run out behind what waits.
        Lane::Control => inbox.put_urgent(event),
        Lane::Data => inbox.put(event),
    };
}

/// The state that a node's threads share.
struct Shared<P: WireProtocol> {
    me: Process,
    cluster: String,
    protocol: &'static str,
    guarantee: &'static str,
    general: bool,
    map: Arc<Cluster>,
    clock: NodeClock,
    server: Arc<Inbox<Event<P>>>,
    gateway: Arc<Inbox<Event<P>>>,
    /// The server machine and the gateway machine, once they have started and until they end.
    machines: [Mutex<Option<Box<dyn Turn>>>; 2],
    /// Notified when there is work for the machines.
    ticks: Notify,
    counters: [Counters; 2],
    health: Mutex<Health>,
    /// Why the node failed, once it has.
    failure: watch::Sender<Option<String>>,
    /// Cancelled when the node ends, for any reason.
    ended: CancellationToken,
    transport: OnceLock<Transport>,
    clients: Clients,
    scans: Scans,
    /// Processes that were refused because of their placement.
    placed_otherwise: Mutex<OrdSet<NodeId>>,
}

/// The source of new client ids.
struct Clients {
    /// The first number that this process gave; the largest of all numbers before it gave one.
    first: AtomicU64,
    /// The number that it gives next.
    next: AtomicU64,
    /// The next free number, and the first that is not reserved.
    block: tokio::sync::Mutex<(u64, u64)>,
    /// The storage thread; not set without durability, when ids need not be reserved.
    writer: OnceLock<Arc<Inbox<Work>>>,
}

impl<P: WireProtocol> Shared<P> {
    fn new(
        protocol: &'static str,
        settings: &Settings,
        me: &Process,
        clock: NodeClock,
        failure: watch::Sender<Option<String>>,
        clients: (u64, u64),
    ) -> Self {
        let (first, next) = (AtomicU64::new(u64::MAX), AtomicU64::new(0));
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
            clients: Clients { first, next, block, writer: OnceLock::new() },
            scans: Scans::default(),
            placed_otherwise: Mutex::default(),
        }
    }

    /// Handles a report of the storage thread.
    fn report(&self, report: Report) {
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

    fn machine(&self, tag: Tag) -> &Mutex<Option<Box<dyn Turn>>> {
        let [server, gateway] = &self.machines;
        match tag {
            Tag::Server => server,
            Tag::Gateway => gateway,
        }
    }

    /// Puts an event into a machine's inbox, to be taken soon. False if the machine has ended.
    fn put(&self, tag: Tag, event: Event<P>) -> bool {
        let is_open = self.inbox(tag).put(event);
        self.tick();
        is_open
    }

    fn inbox(&self, tag: Tag) -> &Arc<Inbox<Event<P>>> {
        match tag {
            Tag::Server => &self.server,
            Tag::Gateway => &self.gateway,
        }
    }

    fn counters(&self, tag: Tag) -> &Counters {
        let [server, gateway] = &self.counters;
        match tag {
            Tag::Server => server,
            Tag::Gateway => gateway,
        }
    }

    /// The inbox of the machine with this id, if it is in this process.
    fn local(&self, id: NodeId) -> Option<&Arc<Inbox<Event<P>>>> {
        if id == self.me.node {
            Some(&self.server)
        } else if id == self.me.gateway {
            Some(&self.gateway)
        } else {
            None
        }
    }

    fn send(&self, from: NodeId, to: NodeId, msg: P::Msg) {
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
    fn flush(&self) {
        if let Some(transport) = self.transport.get() {
            transport.flush();
        }
    }

    fn health(&self) -> MutexGuard<'_, Health> {
        self.health.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the node because of an internal failure. Only the first reason counts.
    fn fail(&self, why: &str) {
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

    /// Another process has connected, or was refused because of its placement. If at least half of
    /// all processes have another placement, then this node's file is probably wrong. It must not
    /// commit anything alone.
    fn met(&self, peer: NodeId, has_other_placement: bool) {
        let mut others = self.placed_otherwise.lock().unwrap_or_else(PoisonError::into_inner);
        if !has_other_placement {
            others.remove(&peer);
            return;
        }
        others.insert(peer);
        let all = self.map.servers().count();
        if others.len() * 2 >= all {
            let names: Vec<String> = others.iter().map(NodeId::to_string).collect();
            drop(others);
            self.fail(&format!(
                "the placement of partitions in this node's file is not that of {}; give all nodes the same \
                 `map_epoch`, topology, nodes and placement",
                names.join(", ")
            ));
        }
    }

    fn end(&self) {
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

    fn links(&self) -> Vec<LinkStatus> {
        self.transport.get().map(Transport::status).unwrap_or_default()
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

    fn pending(&self) -> oneshot::Receiver<PendingTxns> {
        let (reply, pending) = oneshot::channel();
        self.put(Tag::Gateway, Event::Pending(reply));
        pending
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
            self.clients.first.fetch_min(number, Ordering::Relaxed);
            self.clients.next.store(block.0, Ordering::Relaxed);
            // Ids are counters within a gateway, so no two gateways can give the same.
            Ok(ClientId::registered(self.me.gateway, number))
        })
    }

    fn subscribe(&self) -> Result<Subscription, ScanFailed> {
        if !P::SCANS {
            return Err(ScanFailed::Unsupported);
        }
        // Servers of some protocols write something down for a scan, and all must do the same.
        if let Some(older) = self.transport.get().and_then(Transport::without_names) {
            return Err(ScanFailed::Older(older));
        }
        let home = self.map.region_of(self.me.node);
        let (number, answers) = self.scans.begin();
        let (cluster, has_shares) = (self.map.clone(), P::SHARES);
        Ok(Subscription { number, cluster, has_shares, home, answers })
    }

    fn ask(&self, number: u64, to: NodeId, ask: Ask) {
        Self::ask(self, number, to, ask);
    }

    fn unsubscribe(&self, number: u64) {
        self.scans.end(number);
    }

    fn home(&self) -> RegionId {
        self.map.region_of(self.me.node)
    }

    fn ends(&self, lease: LeaseId) -> bool {
        lease.gateway(&self.map) == Some(self.me.gateway)
    }

    fn clock(&self) -> Result<Clock, ClockError> {
        self.clock.read().map(|(_, clock)| clock)
    }

    fn is_registered(&self, client: ClientId) -> bool {
        let Clients { first, next, .. } = &self.clients;
        let given = first.load(Ordering::Relaxed)..next.load(Ordering::Relaxed);
        client.number_at(self.me.gateway).is_some_and(|number| given.contains(&number))
    }
}

struct Receiver<P: WireProtocol> {
    shared: Arc<Shared<P>>,
    /// The remaining bytes of the queues of the server machine and of the gateway machine.
    room: [Arc<Semaphore>; 2],
}

impl<P: WireProtocol> Receiver<P> {
    fn new(shared: Arc<Shared<P>>) -> Self {
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

    async fn names(
        &self,
        from: NodeId,
        to: NodeId,
        is_answer: bool,
        bytes: Bytes,
    ) -> Result<(), String> {
        self.shared.on_names(from, to, is_answer, bytes).await
    }

    fn delivered(&self) {
        self.shared.tick();
    }

    fn met(&self, peer: NodeId, has_other_placement: bool) {
        self.shared.met(peer, has_other_placement);
    }

    fn runs_elsewhere(&self, peer: NodeId) {
        let me = self.shared.me.node;
        self.shared.fail(&format!(
            "{peer} is connected to another process that runs as {me}; find and stop that process: one node id \
             must have one process, and a copy of a data directory must not run beside the original"
        ));
    }
}

/// A running node. Dropping it ends the node at once, as a crash would, except that its data
/// directory may stay locked a moment longer. [`NodeHandle::kill`] waits for that.
#[derive(Debug)]
pub struct NodeHandle {
    gateway: Gateway,
    parts: Arc<dyn Parts>,
    in_flight: Arc<InFlight>,
    failure: watch::Receiver<Option<String>>,
    threads: Vec<JoinHandle<()>>,
    writer: Option<Writer>,
}

/// The part of the node that a handle needs, independent of the protocol.
trait Parts: Send + Sync + std::fmt::Debug {
    fn stop_accepting(&self);
    /// Time limit for handing leadership to another node, in addition to network delays.
    fn hand_over_within(&self) -> Duration;
    /// Asks the server machine to hand over its leaderships, and returns the number of groups that
    /// it leads. None if it does not answer.
    fn hand_over(&self) -> Pin<Box<dyn Future<Output = Option<usize>> + Send + '_>>;
    fn close_inboxes(&self);
    fn end(&self);
    fn transport(&self) -> Option<&Transport>;
    fn describe(&self, tag: Tag, reply: oneshot::Sender<String>);
    fn machine_status(&self, tag: Tag) -> MachineStatus;
}

impl<P: WireProtocol> std::fmt::Debug for Shared<P> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Node").field("me", &self.me).finish_non_exhaustive()
    }
}

impl<P: WireProtocol> Parts for Shared<P> {
    fn stop_accepting(&self) {
        let mut health = self.health();
        if *health == Health::Serving {
            *health = Health::Stopping;
        }
    }

    fn hand_over_within(&self) -> Duration {
        // Two round trips, and some time for a busy machine.
        self.map.topology.rtt_max() * 2 + HAND_OVER_EXTRA
    }

    fn hand_over(&self) -> Pin<Box<dyn Future<Output = Option<usize>> + Send + '_>> {
        Box::pin(async {
            let groups = Backend::groups(self).await.ok()?;
            let led = groups.iter().filter(|group| group.leader == Some(self.me.node));
            let successors = led.filter_map(|group| Some((group.partition, group.successor?)));
            let successors: Vec<_> = successors.collect();
            for &(partition, to) in &successors {
                // A group that is already being handed over refuses.
                drop(Backend::admin(self, Admin::TransferLeader { partition, to }));
            }
            Some(successors.len())
        })
    }

    fn close_inboxes(&self) {
        self.gateway.close();
        self.server.close();
    }

    fn end(&self) {
        Shared::end(self);
    }

    fn transport(&self) -> Option<&Transport> {
        self.transport.get()
    }

    fn describe(&self, tag: Tag, reply: oneshot::Sender<String>) {
        self.put(tag, Event::Describe(reply));
    }

    fn machine_status(&self, tag: Tag) -> MachineStatus {
        let counters = self.counters(tag);
        let get = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        MachineStatus {
            state: String::new(),
            waiting: self.inbox(tag).len(),
            inputs: get(&counters.inputs),
            timers: get(&counters.timers),
            batches: get(&counters.batches),
            records: get(&counters.records),
            checkpoints: get(&counters.checkpoints),
            notes: counters.notes.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        }
    }
}

/// Statistics of one machine since the node started.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MachineStatus {
    /// Its state in one line; empty if it does not answer.
    pub state: String,
    /// Number of queued inputs.
    pub waiting: usize,
    /// Number of inputs taken.
    pub inputs: u64,
    /// Number of timers fired.
    pub timers: u64,
    /// Number of turns.
    pub batches: u64,
    /// Number of records persisted.
    pub records: u64,
    /// Number of checkpoints.
    pub checkpoints: u64,
    /// Rare events by name.
    pub notes: OrdMap<String, u64>,
}

/// Statistics of a node since it started.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Status {
    /// Its server machine.
    pub server: MachineStatus,
    /// Its gateway machine.
    pub gateway: MachineStatus,
    /// Its links.
    pub links: Vec<LinkStatus>,
    /// Amount of work queued for the disk.
    pub storage_backlog: usize,
}

impl NodeHandle {
    /// The node's gateway.
    #[must_use]
    pub fn gateway(&self) -> Gateway {
        self.gateway.clone()
    }

    /// Waits until the node fails because of an internal failure, and returns the reason.
    pub async fn failed(&self) -> String {
        let mut failure = self.failure.clone();
        let found = failure.wait_for(Option::is_some).await;
        match found.ok().and_then(|why| why.clone()) {
            Some(why) => why,
            None => std::future::pending().await,
        }
    }

    /// The node's statistics so far.
    pub async fn status(&self) -> Status {
        let mut status = Status {
            server: self.parts.machine_status(Tag::Server),
            gateway: self.parts.machine_status(Tag::Gateway),
            links: self.parts.transport().map(Transport::status).unwrap_or_default(),
            storage_backlog: self.writer.as_ref().map_or(0, Writer::backlog),
        };
        for (tag, machine) in
            [(Tag::Server, &mut status.server), (Tag::Gateway, &mut status.gateway)]
        {
            let (reply, state) = oneshot::channel();
            self.parts.describe(tag, reply);
            if let Ok(Ok(state)) = tokio::time::timeout(Duration::from_secs(1), state).await {
                machine.state = state;
            }
        }
        status
    }

    /// Shuts the node down in an orderly way: accepts no new transactions, finishes those in flight,
    /// waits for nodes that stop too, and hands over leaderships (all until `within` has passed at
    /// most), makes everything durable, and ends. A node that is told to stop up to `together` later
    /// counts as one that stops too.
    pub async fn shutdown(mut self, within: Duration, together: Duration) {
        self.parts.stop_accepting();
        let deadline = tokio::time::Instant::now() + within;
        let transport = || self.parts.transport();
        if let Some(transport) = transport() {
            transport.say_leaving(true);
        }
        if tokio::time::timeout_at(deadline, self.in_flight.none()).await.is_err() {
            warn!("shutting down with pending transactions; their clients learn no outcome");
        }
        // If all nodes stop at once, the last ones need a majority for what is pending.
        if let Some(transport) = transport() {
            transport.say_leaving(false);
            // The others have a time limit too.
            let ended = transport.others_have_ended(together);
            let _ = tokio::time::timeout_at(deadline, ended).await;
        }
        self.hand_over(deadline).await;
        self.parts.close_inboxes();
        let threads = std::mem::take(&mut self.threads);
        let writer = self.writer.take();
        let stopped = tokio::task::spawn_blocking(move || {
            join(threads);
            if let Some(writer) = writer {
                writer.stop();
            }
        });
        // A panic of these threads was reported when it happened.
        let _ = stopped.await;
        self.parts.end();
        if let Some(transport) = self.parts.transport() {
            transport.stop().await;
        }
    }

    /// Hands leaderships to other nodes, and waits until this node leads no group that another
    /// could lead. Gives up at `deadline`, or earlier if no node accepts.
    async fn hand_over(&self, deadline: tokio::time::Instant) {
        let until = tokio::time::Instant::now() + self.parts.hand_over_within();
        let until = until.min(deadline);
        let handed = async {
            while self.parts.hand_over().await.is_some_and(|left| left > 0) {
                tokio::time::sleep(HAND_OVER_LOOK).await;
            }
        };
        // The remaining groups will elect a leader.
        let _ = tokio::time::timeout_at(until, handed).await;
    }

    /// Ends the node at once, without writing or sending anything more, as `kill -9` would. Returns
    /// when its address and data directory are free.
    pub async fn kill(mut self) {
        self.parts.end();
        let threads = std::mem::take(&mut self.threads);
        let writer = self.writer.take();
        let ended = tokio::task::spawn_blocking(move || {
            drop(writer);
            join(threads);
        });
        let _ = ended.await;
        if let Some(transport) = self.parts.transport() {
            transport.stop().await;
        }
    }
}

impl Drop for NodeHandle {
    fn drop(&mut self) {
        self.parts.end();
    }
}

fn join(threads: Vec<JoinHandle<()>>) {
    for thread in threads {
        let _ = thread.join();
    }
}

/// Starts a node on the current tokio runtime. `listener` is bound to the node's address in
/// `settings`.
///
/// # Errors
/// See [`StartError`].
pub async fn start<P: WireProtocol>(
    mut settings: Settings,
    config: P::Config,
    listener: TcpListener,
) -> Result<NodeHandle, StartError> {
    let protocol = P::name(&config);
    let mut introduction = introduce(protocol, &settings)?;
    let mut data = open::<P>(protocol, &settings).await?;
    let founders = std::mem::take(&mut data.founders);
    if !founders.is_empty() {
        settings.map = Arc::new((*settings.map).clone().founded(founders));
    }
    let floor = data.clock;
    let system = NodeClock::system(&settings.clock_skew);
    // Readings may exceed the system clock by up to twice the bound.
    if system + settings.clock_error * 3 < floor {
        let behind_ms = (floor.0 - system.0) / 1_000_000;
        return Err(StartError::ClockBehind { behind_ms });
    }
    let (error, skew) = (settings.clock_error, settings.clock_skew.clone());
    if settings.shared_clock {
        let peers = introduction.others.keys().copied();
        introduction.shared_clock = NodeClock::share(error, &skew, peers);
    }
    let clock = NodeClock::start(error, floor, skew, introduction.shared_clock.clone());
    let (failure, failed) = watch::channel(None);
    let shared = Arc::new(Shared::<P>::new(
        protocol,
        &settings,
        &introduction.me,
        clock,
        failure,
        data.clients,
    ));
    let writer = match data.storage {
        Some(storage) => {
            let to = shared.clone();
            let writer = storage.start(move |report| to.report(report))?;
            let _ = shared.clients.writer.set(writer.inbox());
            Some(writer)
        }
        None => None,
    };
    let links = links(&settings, introduction);
    let transport = Transport::start(links, listener, Arc::new(Receiver::new(shared.clone())))?;
    let _ = shared.transport.set(transport);
    let persistence = match &writer {
        Some(writer) => Persistence::Disk(writer.inbox()),
        None => Persistence::Memory(data.memory),
    };
    let config = Arc::new(config);
    let incarnation = data.incarnation;
    let is_replacement = data.is_replacement;
    let was_lost = is_replacement && data.server.is_empty();
    let node = Start {
        shared: &shared,
        settings: &settings,
        config,
        incarnation,
        persistence,
        is_replacement,
    };
    let mut threads = Vec::new();
    let no_engine = Box::new(MemoryEngine::default());
    for thread in [
        node.machine::<P::Server>(Tag::Server, data.engine, data.server),
        node.machine::<P::Client>(Tag::Gateway, no_engine, data.gateway),
    ] {
        threads.push(thread.inspect_err(|_| shared.end())?);
    }
    tokio::spawn(shared.clone().run_on_ticks());
    tokio::spawn(watch_clock(shared.clone(), writer.as_ref().map(Writer::inbox)));
    let clock = shared.clock.describe();
    info!(node = %shared.me.node, cluster = settings.cluster, protocol, clock, "serving");
    if was_lost {
        warn!(
            node = %shared.me.node,
            "this node has lost its data and copies it from others; keep them running until `status` says that \
             0 are incomplete here"
        );
    }
    let in_flight: Arc<InFlight> = Arc::default();
    let max = InFlightMax { count: settings.in_flight_max, bytes: settings.bytes_in_flight_max };
    let gateway = Gateway::new(shared.clone(), in_flight.clone(), max);
    Ok(NodeHandle { gateway, parts: shared, in_flight, failure: failed, threads, writer })
}

/// Checks the clock and makes its reading durable, once a second, until the node ends.
async fn watch_clock<P: WireProtocol>(shared: Arc<Shared<P>>, writer: Option<Arc<Inbox<Work>>>) {
    let mut tick = tokio::time::interval(CLOCK_EVERY);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = tick.tick() => {}
            () = shared.ended.cancelled() => return,
        }
        match shared.clock.follow() {
            Ok(reading) => {
                if let Some(writer) = &writer {
                    writer.push(Work::Clock(reading));
                }
            }
            Err(error) => shared.fail(&error.to_string()),
        }
    }
}

/// The common inputs for the start of both machines.
struct Start<'a, P: WireProtocol> {
    shared: &'a Arc<Shared<P>>,
    settings: &'a Settings,
    config: Arc<P::Config>,
    incarnation: u64,
    persistence: Persistence,
    is_replacement: bool,
}

impl<P: WireProtocol> Start<'_, P> {
    fn machine<M: orthodrome_core::Machine<P>>(
        &self,
        tag: Tag,
        engine: Box<dyn StateEngine>,
        recovered: Vec<P::Record>,
    ) -> Result<JoinHandle<()>, StartError> {
        let persistence = self.persistence.clone();
        let (node, name) = match tag {
            Tag::Server => (self.shared.me.node, "server"),
            Tag::Gateway => (self.shared.me.gateway, "gateway"),
        };
        let (cluster, config) = (self.settings.map.clone(), self.config.clone());
        let workers = Arc::new(Threads::new(self.settings.workers));
        let is_replacement = self.is_replacement;
        let setup = Setup { node, cluster, config, engine, workers, is_replacement };
        // Each machine in each incarnation has its own random stream.
        let rng = Rng::stream(self.incarnation, name, node.0.into());
        let shared = self.shared.clone();
        let begin = shared.clock.read()?;
        let thread =
            std::thread::Builder::new().name(format!("{name} {node}")).spawn(move || {
                let life = Life { shared: &*shared, tag };
                let guard = Guard { shared: &*shared, name };
                let to = shared.clone();
                let driver =
                    Driver::<P, M>::new(tag, setup, recovered, rng, to, persistence, begin);
                let mut driver = Box::new(driver);
                match driver.begin() {
                    Ok(()) => shared.own(tag, driver),
                    Err(error) => shared.fail(&error.to_string()),
                }
                drop((guard, life));
            })?;
        Ok(thread)
    }
}

/// Ends the node if a machine panics, because its state is inconsistent.
struct Guard<'a, P: WireProtocol> {
    shared: &'a Shared<P>,
    name: &'static str,
}

impl<P: WireProtocol> Drop for Guard<'_, P> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let name = self.name;
            self.shared.fail(&format!(
                "an assertion failed in its {name} (see the panic on standard error); restart the \
                 node, and report this"
            ));
        }
    }
}

fn introduce(protocol: &str, settings: &Settings) -> Result<Introduction, StartError> {
    let region = |node| settings.map.topology.name_of(settings.map.region_of(node)).to_owned();
    let mut processes: OrdMap<NodeId, Process> = OrdMap::new();
    for Endpoint { node, gateway, .. } in &settings.endpoints {
        for id in [node, gateway] {
            if settings.map.node(*id).is_none() {
                return Err(StartError::Settings(format!(
                    "{id} is in `nodes`, but not in the cluster"
                )));
            }
        }
        let process = Process { node: *node, gateway: *gateway, region: region(*node) };
        processes.insert(*node, process);
    }
    let me = processes.remove(&settings.node);
    let me = me.ok_or_else(|| {
        StartError::Settings(format!("node {} is not in `nodes`; add it", settings.node))
    })?;
    Ok(Introduction {
        cluster: settings.cluster.clone(),
        me,
        instance: draw_instance(),
        others: processes,
        map_epoch: settings.map.epoch,
        map_digest: map_digest(&settings.map),
        protocol: protocol.into(),
        shared_clock: None,
    })
}

fn links(settings: &Settings, introduction: Introduction) -> transport::Settings {
    let here = settings.map.region_of(settings.node);
    let peers = settings.endpoints.iter().filter_map(|endpoint| {
        let process = introduction.others.get(&endpoint.node)?.clone();
        let rtt = settings.map.topology.rtt(here, settings.map.region_of(endpoint.node));
        let delay = if settings.emulate_wan { rtt / 2 } else { Duration::ZERO };
        Some(Peer { process, address: endpoint.address.clone(), delay })
    });
    transport::Settings {
        peers: peers.collect(),
        introduction,
        tls: settings.tls.clone(),
        queue_bytes_max: settings.queue_bytes_max,
    }
}

/// A node's data, for any durability.
struct Data<P: WireProtocol> {
    storage: Option<Storage>,
    engine: Box<dyn StateEngine>,
    /// The engine, if it is in memory.
    memory: MemoryEngine,
    server: Vec<P::Record>,
    gateway: Vec<P::Record>,
    incarnation: u64,
    clients: (u64, u64),
    clock: Timestamp,
    founders: Founders,
    is_replacement: bool,
}

/// What an operator can do about lost data of which there is no copy, if anything.
fn without_a_copy<P: WireProtocol>(settings: &Settings) -> Option<&'static str> {
    let (map, node) = (&settings.map, settings.node);
    if P::replaceable(map).contains(&node) {
        return Some(
            "If there is no such copy, start the node once with an empty directory and `--replace`",
        );
    }
    let mut own = map.partitions().filter(|partition| partition.replicas.contains(&node));
    // The others of a group must still be able to choose an entry.
    let is_outvoted = own.all(|partition| partition.replicas.len() > 2);
    (P::MEMBERS && is_outvoted).then_some(
        "If there is no such copy, give the node's partitions to other nodes: `change-members` in `orthodrome shell`",
    )
}

/// Refuses to replace a node that the protocol cannot replace.
fn check_replacement<P: WireProtocol>(
    protocol: &str,
    settings: &Settings,
) -> Result<(), StartError> {
    let node = settings.node;
    if settings.expected != Expected::Replacement || P::replaceable(&settings.map).contains(&node) {
        return Ok(());
    }
    let mut partitions = settings.map.partitions();
    if let Some(only) = partitions.find(|partition| partition.replicas == [node]) {
        return Err(StartError::Settings(format!(
            "{node} cannot be replaced: it had the only replica of {}. Restore a copy of its data \
             directory that was made after it last ran",
            only.id
        )));
    }
    let instead = if P::MEMBERS {
        ", or give its partitions to other nodes: `change-members` in `orthodrome shell`"
    } else {
        "; this protocol cannot give its partitions to other nodes"
    };
    Err(StartError::Settings(format!(
        "{protocol} cannot replace {node} while the cluster runs: other nodes rely on votes that were in its data. \
         Restore a copy of its data directory that was made after it last ran{instead}"
    )))
}

async fn open<P: WireProtocol>(
    protocol: &'static str,
    settings: &Settings,
) -> Result<Data<P>, StartError> {
    let identity = Identity { cluster: settings.cluster.clone(), node: settings.node };
    identity.check()?;
    check_replacement::<P>(protocol, settings)?;
    let memory = MemoryEngine::default();
    let sync = match settings.durability {
        Durability::Sync => true,
        Durability::NoSync => false,
        Durability::None => {
            let first = storage::draw_client(storage::first_client());
            let clients = (first, 1 << ClientId::NUMBER_BITS);
            return Ok(Data {
                storage: None,
                engine: Box::new(memory.clone()),
                memory,
                server: Vec::new(),
                gateway: Vec::new(),
                incarnation: NodeClock::system(&settings.clock_skew).0,
                clients,
                clock: Timestamp::ZERO,
                founders: Founders::new(),
                is_replacement: false,
            });
        }
    };
    let options = storage::Settings {
        data_dir: settings.data_dir.clone(),
        identity: identity.clone(),
        protocol,
        expected: settings.expected,
        placement: (Placement::of(&settings.map, protocol), P::MEMBERS),
        sync,
        segment_bytes: 64 << 20,
        verify: settings.verify_state,
        hook: None,
    };
    let opened = tokio::task::spawn_blocking(move || Storage::open(options)).await;
    let opened = opened.map_err(|error| StartError::Settings(error.to_string()))?;
    let (storage, recovered) = opened.map_err(|error| match without_a_copy::<P>(settings) {
        Some(otherwise) if error.is_loss() => StartError::Lost { error, otherwise },
        Some(_) | None => StartError::Storage(error),
    })?;
    if let Some(torn) = &recovered.torn {
        warn!(node = %settings.node, "the log ended in an incomplete write, as after a crash: {torn}");
    }
    let decode = |records: Vec<Bytes>| -> Result<Vec<P::Record>, StorageError> {
        let bad = |why: String| StorageError::Record { node: identity.node, why };
        let decoded = records.iter().map(wire::decode::<P::Record>);
        decoded.map(|record| record.map_err(|error| bad(error.to_string()))).collect()
    };
    Ok(Data {
        storage: Some(storage),
        engine: Box::new(recovered.engine),
        memory,
        server: decode(recovered.server)?,
        gateway: decode(recovered.gateway)?,
        incarnation: recovered.values.incarnation,
        // No ids are reserved yet: the first client causes a reservation.
        clients: (0, 0),
        clock: recovered.values.clock,
        founders: recovered.founders,
        is_replacement: recovered.is_replacement,
    })
}

#[cfg(test)]
mod tests;
