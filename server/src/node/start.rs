//! Starting a node: its data is recovered, then its threads and its transport start.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use orthodrome_core::store::{MemoryEngine, StateEngine};
use orthodrome_core::{ClientId, NodeId, Rng, Setup, Timestamp, wire};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tracing::{info, warn};

use super::clock::NodeClock;
use super::driver::{Driver, Persistence};
use super::shared::{Receiver, Shared};
use super::turns::Life;
use super::workers::Threads;
use super::{Durability, Endpoint, NodeHandle, Settings, StartError};
use crate::gateway::{Gateway, InFlight, InFlightMax};
use crate::inbox::Inbox;
use crate::storage::{self, Expected, Identity, Storage, StorageError, Tag, Work, Writer};
use crate::transport::handshake::{Introduction, Process, map_digest};
use crate::transport::{self, Peer, Transport};
use crate::wire::WireProtocol;

/// Interval at which the clock is checked and its reading made durable.
const CLOCK_EVERY: Duration = Duration::from_secs(1);

/// Starts a node on the current tokio runtime. `listener` is bound to the node's address in
/// `settings`.
///
/// # Errors
/// See [`StartError`].
pub async fn start<P: WireProtocol>(
    settings: Settings,
    config: P::Config,
    listener: TcpListener,
) -> Result<NodeHandle, StartError> {
    let protocol = P::name(&config);
    let mut introduction = introduce(protocol, &settings)?;
    let data = open::<P>(protocol, &settings).await?;
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
    let node = Start { shared: &shared, settings: &settings, config, incarnation, persistence };
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
pub(super) struct Guard<'a, P: WireProtocol> {
    pub(super) shared: &'a Shared<P>,
    pub(super) name: &'static str,
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
            // No file stores the used ids. So ids begin with the seconds since the epoch;
            // incarnations of one node differ if each lasts a second for every 256 clients.
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
        // No ids are reserved yet: the first client causes a reservation.
        clients: (0, 0),
        clock: recovered.values.clock,
    })
}
