//! Five regions in one process: nodes with real sockets and files, and a gateway for clients in each.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use orthodrome_client::{Client, Config, Op, Outcome};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::{Cluster, Key, NodeId, RegionId};
use orthodrome_server::node::Durability;
use orthodrome_server::node::embedded::{EmbeddedCluster, Plan};
use orthodrome_server::service::{self, Access, Limits, Listeners, ServiceConfig};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

/// Transactions in flight at each gateway at once.
const IN_FLIGHT_MAX: usize = 10_000;
/// Bytes of all requests in flight at one gateway.
const BYTES_IN_FLIGHT_MAX: usize = 64 << 20;
/// Time limit for the regions to connect and elect leaders.
const READY_DEADLINE: Duration = Duration::from_secs(30);
/// Time limit for one answer of a gateway. It is longer than the slowest transaction of an
/// undisturbed run, about three times the longest round trip.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(2);
/// Time limit of one transaction, retries included.
const DEADLINE: Duration = Duration::from_secs(10);

/// The gRPC service of one region. It has its own runtime, so it can end as a killed process does:
/// at once, with every connection.
struct RegionService {
    region: RegionId,
    node: NodeId,
    address: SocketAddr,
    runtime: Option<Runtime>,
}

/// A running planet.
pub struct Planet {
    map: Arc<Cluster>,
    nodes: EmbeddedCluster,
    services: Vec<RegionService>,
}

impl Planet {
    /// Starts one node and one gateway in each region with `protocol`, and with data under `dir`.
    ///
    /// # Errors
    /// The operating system refused something.
    pub async fn start(protocol: &'static str, map: Cluster, dir: &Path) -> anyhow::Result<Self> {
        let map = Arc::new(map);
        let plan = Plan {
            protocol,
            map: Arc::clone(&map),
            dir: dir.to_owned(),
            durability: Durability::Sync,
            emulate_wan: true,
            // Everything stays on loopback.
            tls: false,
            in_flight_max: IN_FLIGHT_MAX,
            bytes_in_flight_max: BYTES_IN_FLIGHT_MAX,
        };
        let nodes = EmbeddedCluster::start(plan).await.context("cannot start the nodes")?;
        let mut planet = Self { map, nodes, services: Vec::new() };
        let servers: Vec<NodeId> = planet.nodes.nodes().collect();
        for node in servers {
            let region = planet.map.region_of(node);
            let address = SocketAddr::from(([127, 0, 0, 1], 0));
            let mut service = RegionService { region, node, address, runtime: None };
            planet.open(&mut service)?;
            planet.services.push(service);
        }
        Ok(planet)
    }

    /// Starts the service of a region.
    fn open(&self, service: &mut RegionService) -> anyhow::Result<()> {
        let gateway = self.nodes.gateway(service.node).context("the node is not running")?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .context("cannot start a runtime")?;
        let listener = std::net::TcpListener::bind(service.address)
            .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
            .with_context(|| format!("cannot listen on {}", service.address))?;
        service.address = listener.local_addr()?;
        let map = Arc::clone(&self.map);
        let (access, limits) = (Access::open(), Limits::default());
        let config = ServiceConfig { access, tls: None, limits, audit: None };
        runtime.spawn(async move {
            let served = match TcpListener::from_std(listener) {
                Ok(listener) => {
                    let never = Box::pin(std::future::pending());
                    let listeners = Listeners { clients: listener, redis: None };
                    service::serve(Arc::new(gateway), map, listeners, config, never).await
                }
                Err(error) => Err(error.into()),
            };
            if let Err(error) = served {
                note!("a gateway stopped: {error}");
            }
        });
        service.runtime = Some(runtime);
        Ok(())
    }

    /// The client configuration for `region`: its own gateway first, then the others by distance.
    pub fn config(&self, region: RegionId) -> Config {
        let mut services: Vec<&RegionService> = self.services.iter().collect();
        services.sort_by_key(|service| {
            (service.region != region, self.map.topology.rtt(region, service.region))
        });
        Config::new(services.iter().map(|service| service.address.to_string()))
            .attempt_timeout(ATTEMPT_TIMEOUT)
            .deadline(DEADLINE)
    }

    /// The regions with the addresses of their gateways, in the order of the topology.
    pub fn gateways(&self) -> impl Iterator<Item = (RegionId, SocketAddr)> {
        let of = |region| self.services.iter().find(move |service| service.region == region);
        self.map.topology.regions().filter_map(of).map(|service| (service.region, service.address))
    }

    /// Waits until each region has committed a transaction over every partition.
    ///
    /// # Errors
    /// A region did not in time.
    pub async fn ready(&self) -> anyhow::Result<()> {
        let one = |region: RegionId| {
            // Each region uses its own keys, so that regions do not wait for each other.
            let mut keys = OrdMap::new();
            for number in 0..10_000 {
                let key = Key::from(format!("ready-{region}-{number}"));
                keys.entry(self.map.partition_of(&key)).or_insert(key);
            }
            let config = self.config(region).deadline(READY_DEADLINE);
            async move {
                let client = Client::connect(config).await?;
                client.execute(keys.into_values().map(|key| Op::Add(key, 1))).await
            }
        };
        let waiting = self.map.topology.regions().map(|region| tokio::spawn(one(region)));
        for ended in waiting.collect::<Vec<_>>() {
            match ended
                .await
                .context("a client of the demonstration failed")?
                .context("the regions did not become ready")?
            {
                Outcome::Committed(_) => {}
                Outcome::Aborted(aborted) => {
                    return Err(anyhow!("the regions did not become ready: {}", aborted.reason));
                }
                Outcome::Unknown(doubt) => {
                    return Err(anyhow!("the regions did not become ready: {}", doubt.trouble()));
                }
            }
        }
        Ok(())
    }

    /// Kills everything in a region, as if its power had failed.
    pub async fn kill(&mut self, region: RegionId) {
        let mut nodes = Vec::new();
        for service in self.services.iter_mut().filter(|service| service.region == region) {
            if let Some(runtime) = service.runtime.take() {
                runtime.shutdown_background();
            }
            nodes.push(service.node);
        }
        for node in nodes {
            self.nodes.kill(node).await;
        }
    }

    /// Starts a killed region again, with the data on its disk.
    ///
    /// # Errors
    /// The operating system refused something.
    pub async fn restart(&mut self, region: RegionId) -> anyhow::Result<()> {
        let mut services = std::mem::take(&mut self.services);
        let mut outcome: anyhow::Result<()> = Ok(());
        for service in &mut services {
            if service.region != region || outcome.is_err() {
                continue;
            }
            outcome = match self.nodes.restart(service.node).await {
                Ok(()) => self.open(service),
                Err(error) => Err(error.into()),
            };
        }
        self.services = services;
        outcome
            .with_context(|| format!("cannot restart region {}", self.map.topology.name_of(region)))
    }

    /// Shuts all nodes down in an orderly way.
    pub async fn shutdown(self, within: Duration) {
        self.nodes.shutdown(within).await;
        for runtime in self.services.into_iter().filter_map(|service| service.runtime) {
            runtime.shutdown_background();
        }
    }
}
