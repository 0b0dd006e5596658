//! One process of a cluster: a server machine and a gateway machine, each owned by a thread of its
//! own, with the storage, the transport and the clocks they need.
//!
//! [`start`] recovers the node's data, starts its threads and returns a [`NodeHandle`]. A fault of
//! the node itself (its disk, its clock, a machine that contradicts itself) ends all of it at once
//! and is reported by [`NodeHandle::failed`]: half a node serves nobody.

mod callers;
mod clock;
mod driver;
// Unit tests run no nodes, and every protocol would be compiled once more for them.
#[cfg(not(test))]
pub mod embedded;
#[cfg(not(test))]
pub mod run;
mod workers;

use std::collections::BTreeMap;
use std::num::NonZero;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use orthodrome_core::machine::{
    Admin, Gauge, GroupView, Lane, MembershipOrder, Message as _, Refusal,
};
use orthodrome_core::store::{MemoryEngine, StateEngine};
use orthodrome_core::wire::{self, Wire as _};
use orthodrome_core::{ClientId, Cluster, NodeId, Rng, Setup, Time, Timestamp};
use orthodrome_protocols::registry;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, oneshot, watch};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

pub use self::clock::ClockError;
use self::clock::NodeClock;
use self::driver::{Counters, Driver, Event, Persistence};
use self::workers::Threads;
use crate::gateway::{
    Backend, Command, Description, Gateway, GatewayError, Health, InFlight, InFlightMax,
};
use crate::inbox::Inbox;
use crate::storage::{self, Expected, Identity, Report, Storage, StorageError, Tag, Work, Writer};
use crate::tls::Tls;
use crate::transport::handshake::{Introduction, Process, map_digest};
use crate::transport::{self, Deliver, LinkStatus, Peer, Transport};
use crate::wire::WireProtocol;

/// Messages that wait for a machine before its connections stop reading.
const BACKLOG_MAX: usize = 16_384;
/// Bytes of messages that wait for a machine before its connections stop reading.
const BACKLOG_BYTES_MAX: usize = 64 << 20;
/// How often the clock is checked, and its reading made durable.
const CLOCK_EVERY: Duration = Duration::from_secs(1);
/// How long leadership may take to go to another node, beside what the distances say.
const HAND_OVER_EXTRA: Duration = Duration::from_millis(500);
/// How often a node that ends looks whether it has handed its leadership over.
const HAND_OVER_LOOK: Duration = Duration::from_millis(10);

/// What survives what.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Durability {
    /// Everything acknowledged survives a power failure.
    Sync,
    /// Everything acknowledged survives the death of the process, not of the machine.
    NoSync,
    /// Nothing survives: for benchmarks.
    None,
}

/// Where a process of the cluster listens.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Endpoint {
    /// Its server machine; also the name of the process.
    pub node: NodeId,
    /// Its gateway machine.
    pub gateway: NodeId,
    /// `host:port` for other nodes.
    pub address: String,
}

/// How to start a node.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The cluster's id.
    pub cluster: String,
    /// The map. Every node has the same.
    pub map: Arc<Cluster>,
    /// Which of `endpoints` this is.
    pub node: NodeId,
    /// Every process of the cluster, this one included.
    pub endpoints: Vec<Endpoint>,
    /// Where its data is. Not used without durability.
    pub data_dir: PathBuf,
    /// What is to be found there.
    pub expected: Expected,
    /// What survives what.
    pub durability: Durability,
    /// Whether to check every page of the state engine before starting.
    pub verify_state: bool,
    /// None: plain TCP, for loopback only.
    pub tls: Option<Tls>,
    /// Whether messages to other processes wait for the one-way delay that the map gives.
    pub emulate_wan: bool,
    /// How far the system clock may be from true time.
    pub clock_error: Duration,
    /// Added to the system clock, in nanoseconds; for tests of clock faults within one process.
    pub clock_skew: Arc<AtomicI64>,
    /// Transactions in flight at this gateway at once.
    pub in_flight_max: usize,
    /// Bytes of their requests at once.
    pub bytes_in_flight_max: usize,
    /// Threads that run what does not depend on each other; none: one for each processor.
    pub workers: Option<NonZero<usize>>,
    /// Bytes that may wait for each other process.
    pub queue_bytes_max: usize,
}

/// Why a node cannot start. Nothing was served.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The settings contradict themselves.
    #[error("{0}")]
    Settings(String),
    /// Its data cannot be used.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// The clock is behind what this node has already used.
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
    /// The operating system refused.
    #[error("cannot start a thread: {0}")]
    Io(#[from] std::io::Error),
}

/// What a node's threads share.
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
    counters: [Counters; 2],
    health: Mutex<Health>,
    /// Why the node failed, once it has.
    failure: watch::Sender<Option<String>>,
    /// Cancelled when the node ends, for whatever reason.
    ended: CancellationToken,
    transport: OnceLock<Transport>,
    clients: Clients,
}

/// The numbers that new client ids are taken from.
struct Clients {
    /// The next free number, and the first that is not reserved.
    block: tokio::sync::Mutex<(u64, u64)>,
    /// Not set: nothing survives, so nothing needs to be reserved.
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
            counters: Default::default(),
            health: Mutex::new(Health::Serving),
            failure,
            ended: CancellationToken::new(),
            transport: OnceLock::new(),
            clients: Clients { block, writer: OnceLock::new() },
        }
    }

    /// What the storage thread says.
    fn report(&self, report: Report) {
        match report {
            Report::Durable(tag, ticket) => drop(self.inbox(tag).push(Event::Durable(ticket))),
            Report::Failed(error) => self.fail(&error.to_string()),
        }
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

    /// The machine of that id in this process.
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
            // Machines of one process need no bytes.
            (Some(inbox), _) => {
                let lane = msg.lane();
                let event = Event::Message { from, msg, room: None };
                match lane {
                    Lane::Control => inbox.push_urgent(event),
                    Lane::Data => inbox.push(event),
                };
            }
            (None, Some(transport)) => {
                let lane = msg.lane();
                transport.send_in(lane, from, to, |out| msg.put(out));
            }
            // Before the transport has started: as lost as on a network.
            (None, None) => {}
        }
    }

    fn health(&self) -> MutexGuard<'_, Health> {
        self.health.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the node because of a fault of its own. Only the first reason counts.
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

    fn end(&self) {
        self.ended.cancel();
        self.server.close();
        self.gateway.close();
        if let Some(transport) = self.transport.get() {
            transport.cancel();
        }
    }
}

impl<P: WireProtocol> Backend for Shared<P> {
    fn submit(&self, command: Command) -> bool {
        self.gateway.push(Event::Command(command))
    }

    fn admin(&self, order: Admin) -> oneshot::Receiver<Result<(), Refusal>> {
        let (reply, answer) = oneshot::channel();
        self.server.push(Event::Admin(order, reply));
        answer
    }

    fn groups(&self) -> oneshot::Receiver<Vec<GroupView>> {
        let (reply, groups) = oneshot::channel();
        self.server.push(Event::Groups(reply));
        groups
    }

    fn gauges(&self) -> [oneshot::Receiver<Vec<Gauge>>; 2] {
        let (reply, of_gateway) = oneshot::channel();
        self.gateway.push(Event::Gauges(reply));
        let (reply, of_server) = oneshot::channel();
        self.server.push(Event::Gauges(reply));
        [of_gateway, of_server]
    }

    fn orders(&self) -> oneshot::Receiver<(Time, Vec<MembershipOrder>)> {
        let (reply, orders) = oneshot::channel();
        self.server.push(Event::Orders(reply));
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

struct Receiver<P: WireProtocol> {
    shared: Arc<Shared<P>>,
    /// What is left of the bytes that may wait for the server machine, and for the gateway machine.
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
        match msg.lane() {
            // Few and short. Leases must not run out behind what waits.
            Lane::Control => inbox.push_urgent(Event::Message { from, msg, room: None }),
            Lane::Data => {
                // Never closed.
                let room = room.clone().acquire_many_owned(bytes_of).await.ok();
                inbox.push_when_room(Event::Message { from, msg, room }, BACKLOG_MAX).await
            }
        };
        Ok(())
    }
}

/// A running node. Dropping it ends the node at once, as a crash would; only its data directory may
/// stay locked a moment longer. [`NodeHandle::kill`] waits for that.
#[derive(Debug)]
pub struct NodeHandle {
    gateway: Gateway,
    parts: Arc<dyn Parts>,
    in_flight: Arc<InFlight>,
    failure: watch::Receiver<Option<String>>,
    threads: Vec<JoinHandle<()>>,
    writer: Option<Writer>,
}

/// What a handle needs of the node, whatever its protocol.
trait Parts: Send + Sync + std::fmt::Debug {
    fn stop_accepting(&self);
    /// How long leadership may take to go to another node.
    fn hand_over_within(&self) -> Duration;
    /// Asks the server machine to hand on whatever it leads; how many groups those are. None if it
    /// does not answer.
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
        // A round trip or two, and what a busy machine adds.
        self.map.topology.rtt_max() * 2 + HAND_OVER_EXTRA
    }

    fn hand_over(&self) -> Pin<Box<dyn Future<Output = Option<usize>> + Send + '_>> {
        Box::pin(async {
            let groups = Backend::groups(self).await.ok()?;
            let led = groups.iter().filter(|group| group.leader == Some(self.me.node));
            let successors = led.filter_map(|group| Some((group.partition, group.successor?)));
            let successors: Vec<_> = successors.collect();
            for &(partition, to) in &successors {
                // One that is being handed over already refuses.
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
        self.inbox(tag).push(Event::Describe(reply));
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

/// One machine's work since the node started.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MachineStatus {
    /// Its state in one line; empty if it does not answer.
    pub state: String,
    /// Inputs that wait.
    pub waiting: usize,
    /// Inputs taken.
    pub inputs: u64,
    /// Timers fired.
    pub timers: u64,
    /// How often it woke.
    pub batches: u64,
    /// Records persisted.
    pub records: u64,
    /// Checkpoints made.
    pub checkpoints: u64,
    /// Rare events by name.
    pub notes: BTreeMap<String, u64>,
}

/// A node's work since it started.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Status {
    /// Its server machine.
    pub server: MachineStatus,
    /// Its gateway machine.
    pub gateway: MachineStatus,
    /// Its links.
    pub links: Vec<LinkStatus>,
    /// Work that waits for the disk.
    pub storage_backlog: usize,
}

impl NodeHandle {
    /// The door to the node's client side.
    #[must_use]
    pub fn gateway(&self) -> Gateway {
        self.gateway.clone()
    }

    /// Waits until the node fails of itself, and returns why. Never ready for a node that does not.
    pub async fn failed(&self) -> String {
        let mut failure = self.failure.clone();
        let found = failure.wait_for(Option::is_some).await;
        match found.ok().and_then(|why| why.clone()) {
            Some(why) => why,
            None => std::future::pending().await,
        }
    }

    /// What the node has done so far.
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

    /// Ends the node in good order: takes nothing new, finishes what is in flight and hands over
    /// leadership (both at most until `within` has passed), makes everything durable, ends.
    pub async fn shutdown(mut self, within: Duration) {
        self.parts.stop_accepting();
        let deadline = tokio::time::Instant::now() + within;
        if tokio::time::timeout_at(deadline, self.in_flight.none()).await.is_err() {
            warn!("shutting down with pending transactions; their clients learn no outcome");
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
        // A panic of those threads was reported when it happened.
        let _ = stopped.await;
        self.parts.end();
        if let Some(transport) = self.parts.transport() {
            transport.stop().await;
        }
    }

    /// Hands leadership to other nodes, and waits until this one leads nothing that another could
    /// lead. Gives up at `deadline`, or sooner if nobody takes it.
    async fn hand_over(&self, deadline: tokio::time::Instant) {
        let until = tokio::time::Instant::now() + self.parts.hand_over_within();
        let until = until.min(deadline);
        let handed = async {
            while self.parts.hand_over().await.is_some_and(|left| left > 0) {
                tokio::time::sleep(HAND_OVER_LOOK).await;
            }
        };
        // Those that did not take it elect a leader in time.
        let _ = tokio::time::timeout_at(until, handed).await;
    }

    /// Ends the node at once, writing and sending nothing more, as `kill -9` would; returns when
    /// its address and data directory are free.
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

/// Starts a node on the current tokio runtime. `listener` is bound to the address that `settings`
/// gives for it.
///
/// # Errors
/// See [`StartError`].
pub async fn start<P: WireProtocol>(
    settings: Settings,
    config: P::Config,
    listener: TcpListener,
) -> Result<NodeHandle, StartError> {
    let protocol = P::name(&config);
    let introduction = introduce(protocol, &settings)?;
    let data = open::<P>(protocol, &settings).await?;
    let floor = data.clock;
    let system = NodeClock::system(&settings.clock_skew);
    if system + settings.clock_error < floor {
        let behind_ms = (floor.0 - system.0) / 1_000_000;
        return Err(StartError::ClockBehind { behind_ms });
    }
    let clock = NodeClock::start(settings.clock_error, floor, settings.clock_skew.clone());
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
    let node = Start { shared: &shared, settings: &settings, config, incarnation, persistence };
    let mut threads = Vec::new();
    let no_engine = Box::new(MemoryEngine::default());
    for thread in [
        node.machine::<P::Server>(Tag::Server, data.engine, data.server),
        node.machine::<P::Client>(Tag::Gateway, no_engine, data.gateway),
    ] {
        threads.push(thread.inspect_err(|_| shared.end())?);
    }
    tokio::spawn(watch_clock(shared.clone(), writer.as_ref().map(Writer::inbox)));
    info!(node = %shared.me.node, cluster = settings.cluster, protocol, "serving");
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

/// What both machines of a node start from.
struct Start<'a, P: WireProtocol> {
    shared: &'a Arc<Shared<P>>,
    settings: &'a Settings,
    config: Arc<P::Config>,
    incarnation: u64,
    persistence: Persistence,
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
        let setup = Setup { node, cluster, config, engine, workers };
        // A stream of its own for each machine and each of its lives.
        let rng = Rng::stream(self.incarnation, name, node.0.into());
        let shared = self.shared.clone();
        let begin = shared.clock.read()?;
        let thread =
            std::thread::Builder::new().name(format!("{name} {node}")).spawn(move || {
                let guard = Guard { shared: shared.clone(), name };
                Driver::<P, M>::new(tag, setup, recovered, rng, shared, persistence, begin).run();
                drop(guard);
            })?;
        Ok(thread)
    }
}

/// Ends the node if a machine's thread panics: the machine found itself in contradiction.
struct Guard<P: WireProtocol> {
    shared: Arc<Shared<P>>,
    name: &'static str,
}

impl<P: WireProtocol> Drop for Guard<P> {
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
    let mut processes: BTreeMap<NodeId, Process> = BTreeMap::new();
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
        others: processes,
        map_epoch: settings.map.epoch,
        map_digest: map_digest(&settings.map),
        protocol: protocol.into(),
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

/// A node's data, whatever its durability.
struct Data<P: WireProtocol> {
    storage: Option<Storage>,
    engine: Box<dyn StateEngine>,
    /// The engine again, if it is in memory.
    memory: MemoryEngine,
    server: Vec<P::Record>,
    gateway: Vec<P::Record>,
    incarnation: u64,
    clients: (u64, u64),
    clock: Timestamp,
}

async fn open<P: WireProtocol>(
    protocol: &'static str,
    settings: &Settings,
) -> Result<Data<P>, StartError> {
    let identity = Identity { cluster: settings.cluster.clone(), node: settings.node };
    identity.check()?;
    let node = settings.node;
    if settings.expected == Expected::Replacement && !P::replaceable(&settings.map).contains(&node)
    {
        let instead = if P::MEMBERS {
            ", or give its partitions to other nodes: `change-members` in `orthodrome shell`"
        } else {
            "; this protocol cannot give its partitions to other nodes"
        };
        return Err(StartError::Settings(format!(
            "{protocol} cannot replace {node} while the cluster runs: other nodes rely on votes that were in its data. \
             Restore its data directory{instead}"
        )));
    }
    let memory = MemoryEngine::default();
    let sync = match settings.durability {
        Durability::Sync => true,
        Durability::NoSync => false,
        Durability::None => {
            // No file remembers which ids were used: seconds since the epoch go first in each id,
            // so lives of one node differ as long as they last a second for every 256 clients.
            let seconds = NodeClock::system(&settings.clock_skew).0 / 1_000_000_000;
            let clients = (seconds << 8, 1 << ClientId::NUMBER_BITS);
            return Ok(Data {
                storage: None,
                engine: Box::new(memory.clone()),
                memory,
                server: Vec::new(),
                gateway: Vec::new(),
                incarnation: NodeClock::system(&settings.clock_skew).0,
                clients,
                clock: Timestamp::ZERO,
            });
        }
    };
    let options = storage::Settings {
        data_dir: settings.data_dir.clone(),
        identity: identity.clone(),
        protocol,
        expected: settings.expected,
        sync,
        segment_bytes: 64 << 20,
        verify: settings.verify_state,
        hook: None,
    };
    let opened = tokio::task::spawn_blocking(move || Storage::open(options)).await;
    let (storage, recovered) =
        opened.map_err(|error| StartError::Settings(error.to_string()))??;
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
        // Nothing is reserved yet: the first client makes a reservation.
        clients: (0, 0),
        clock: recovered.values.clock,
    })
}
