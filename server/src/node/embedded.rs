//! A whole cluster in one process, with real sockets and real files: for `demo` and for tests.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};
use std::time::Duration;

use orthodrome_core::ordered::OrdMap;
use orthodrome_core::{Cluster, NodeId};
use tokio::net::TcpListener;

use super::run::start_by_name;
use super::{Durability, Endpoint, NodeHandle, Settings, StartError};
use crate::gateway::Gateway;
use crate::storage::Expected;
use crate::tls::{Authority, Tls};

/// The settings of an embedded cluster.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The protocol, by name.
    pub protocol: &'static str,
    /// The placement; each server shares a process with one gateway of its region.
    pub map: Arc<Cluster>,
    /// The directory that contains each node's data directory.
    pub dir: PathBuf,
    /// The durability of the data.
    pub durability: Durability,
    /// Whether messages are delayed according to the topology.
    pub emulate_wan: bool,
    /// Whether nodes use TLS, with an authority made for this run.
    pub tls: bool,
    /// Maximum number of transactions in flight at each gateway.
    pub in_flight_max: usize,
    /// Maximum number of bytes of their requests.
    pub bytes_in_flight_max: usize,
}

/// A running cluster.
#[derive(Debug)]
pub struct EmbeddedCluster {
    plan: Plan,
    endpoints: Vec<Endpoint>,
    tls: OrdMap<NodeId, Tls>,
    skews: OrdMap<NodeId, Arc<AtomicI64>>,
    nodes: OrdMap<NodeId, NodeHandle>,
}

impl EmbeddedCluster {
    /// Starts every node, on ports of loopback that the system chooses.
    ///
    /// # Errors
    /// The first node that cannot start.
    pub async fn start(plan: Plan) -> Result<Self, StartError> {
        let mut gateways: Vec<_> = plan.map.gateways().copied().collect();
        let mut endpoints = Vec::new();
        let mut listeners = Vec::new();
        for server in plan.map.servers() {
            let at = gateways.iter().position(|gateway| gateway.region == server.region);
            let Some(at) = at else {
                let why = format!("the region of {} has no gateway; add one", server.id);
                return Err(StartError::Settings(why));
            };
            let gateway = gateways.remove(at).id;
            let listener = listen().await?;
            let address = listener.local_addr()?.to_string();
            endpoints.push(Endpoint { node: server.id, gateway, address });
            listeners.push((server.id, listener));
        }
        let tls = if plan.tls { certificates(&plan.dir, &endpoints)? } else { OrdMap::new() };
        let skews = endpoints.iter().map(|e| (e.node, Arc::default())).collect();
        let mut cluster = Self { plan, endpoints, tls, skews, nodes: OrdMap::new() };
        for (node, listener) in listeners {
            let handle = cluster.start_node(node, listener).await?;
            cluster.nodes.insert(node, handle);
        }
        Ok(cluster)
    }

    async fn start_node(
        &self,
        node: NodeId,
        listener: TcpListener,
    ) -> Result<NodeHandle, StartError> {
        let starting = start_by_name(self.plan.protocol, self.settings(node), listener);
        starting.map_err(|unknown| StartError::Settings(unknown.to_string()))?.await
    }

    fn settings(&self, node: NodeId) -> Settings {
        Settings {
            cluster: "embedded".into(),
            map: self.plan.map.clone(),
            node,
            endpoints: self.endpoints.clone(),
            data_dir: self.plan.dir.join(node.to_string()),
            expected: Expected::Either,
            durability: self.plan.durability,
            verify_state: true,
            tls: self.tls.get(&node).cloned(),
            emulate_wan: self.plan.emulate_wan,
            clock_error: Duration::from_millis(10),
            shared_clock: true,
            clock_skew: self.skew(node),
            in_flight_max: self.plan.in_flight_max,
            bytes_in_flight_max: self.plan.bytes_in_flight_max,
            workers: None,
            queue_bytes_max: 64 << 20,
        }
    }

    /// Every node's server, in order; whether running or not.
    pub fn nodes(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.endpoints.iter().map(|endpoint| endpoint.node)
    }

    /// The node, if it is running.
    #[must_use]
    pub fn node(&self, node: NodeId) -> Option<&NodeHandle> {
        self.nodes.get(&node)
    }

    /// The gateway of a node, if it is running.
    #[must_use]
    pub fn gateway(&self, node: NodeId) -> Option<Gateway> {
        self.nodes.get(&node).map(NodeHandle::gateway)
    }

    /// The offset that is added to the node's system clock, in nanoseconds, also across restarts.
    #[must_use]
    pub fn skew(&self, node: NodeId) -> Arc<AtomicI64> {
        self.skews.get(&node).cloned().unwrap_or_default()
    }

    /// Kills a node as `kill -9` does. Does nothing if it is not running.
    pub async fn kill(&mut self, node: NodeId) {
        if let Some(handle) = self.nodes.remove(&node) {
            handle.kill().await;
        }
    }

    /// Shuts a node down in an orderly way. Does nothing if it is not running.
    pub async fn shutdown_node(&mut self, node: NodeId, within: Duration) {
        if let Some(handle) = self.nodes.remove(&node) {
            handle.shutdown(within, Duration::ZERO).await;
        }
    }

    /// Starts a node again, at its old address, with its data.
    ///
    /// # Errors
    /// It cannot start; or it runs.
    pub async fn restart(&mut self, node: NodeId) -> Result<(), StartError> {
        if self.nodes.contains_key(&node) {
            return Err(StartError::Settings(format!("{node} is already running")));
        }
        let endpoint = self.endpoints.iter().find(|endpoint| endpoint.node == node);
        let address = endpoint.and_then(|endpoint| endpoint.address.parse::<SocketAddr>().ok());
        let address =
            address.ok_or_else(|| StartError::Settings(format!("{node} is not in the cluster")))?;
        let listener = TcpListener::bind(address).await?;
        let handle = self.start_node(node, listener).await?;
        self.nodes.insert(node, handle);
        Ok(())
    }

    /// Shuts every node down in an orderly way.
    pub async fn shutdown(self, within: Duration) {
        let ending = self
            .nodes
            .into_values()
            .map(|node| tokio::spawn(node.shutdown(within, Duration::ZERO)));
        for ended in ending.collect::<Vec<_>>() {
            // A panic of a node's task was reported when it happened.
            let _ = ended.await;
        }
    }
}

/// Listens on a loopback port that stays free while its node is down: it is below the range for
/// outgoing connections, and other test processes search from other starting points.
async fn listen() -> std::io::Result<TcpListener> {
    const FIRST: u16 = 3_000;
    const COUNT: u32 = 7_000;
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let own = std::process::id().wrapping_mul(61);
    for _ in 0..COUNT {
        let turn = own.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % COUNT;
        let port = FIRST + u16::try_from(turn).unwrap_or_default();
        match TcpListener::bind(("127.0.0.1", port)).await {
            Ok(listener) => return Ok(listener),
            Err(error) if error.kind() == ErrorKind::AddrInUse => {}
            Err(error) => return Err(error),
        }
    }
    TcpListener::bind(("127.0.0.1", 0)).await
}

fn certificates(dir: &Path, endpoints: &[Endpoint]) -> Result<OrdMap<NodeId, Tls>, StartError> {
    let wrong = |error: crate::tls::TlsError| StartError::Settings(error.to_string());
    std::fs::create_dir_all(dir)?;
    let authority = Authority::new("embedded").map_err(wrong)?;
    let mut all = OrdMap::new();
    for Endpoint { node, .. } in endpoints {
        let files = authority.issue(dir, *node, &["localhost".into()]).map_err(wrong)?;
        all.insert(*node, Tls::load(&files, "embedded", *node).map_err(wrong)?);
    }
    Ok(all)
}
