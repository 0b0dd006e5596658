//! The two files that describe a node: the cluster's, which all nodes share, and its own.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use orthodrome_core::{Cluster, NodeId};
use orthodrome_server::node::{Durability, Endpoint, Settings};
use orthodrome_server::service::{Access, Credential, Limits, Principal, Role, ServiceConfig, Tls};
use orthodrome_server::tls::{self, TlsFiles};
use serde::{Deserialize, Serialize};

use crate::common::{self, toml_error};

/// `cluster.toml`: what every node must know alike.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct ClusterFile {
    /// Names the cluster, for ever: lower-case letters, digits and dashes.
    pub cluster: String,
    /// The protocol that commits its transactions.
    pub protocol: String,
    /// A built-in map, or a file of that form beside this one.
    pub topology: String,
    /// Nodes in each region.
    pub servers_per_region: u32,
    /// Partitions of the key space.
    pub partitions: u32,
    /// Replicas of each partition.
    pub replicas: u32,
    /// Whether messages wait as long as they would travel on the map: for several regions on one
    /// machine.
    #[serde(default)]
    pub emulate_wan: bool,
    /// How far every node's clock may be from true time.
    #[serde(default = "clock_error_ms")]
    pub clock_error_ms: u64,
    /// Where each node listens for the others: `n1 = "host:port"`.
    pub nodes: BTreeMap<String, String>,
}

fn clock_error_ms() -> u64 {
    10
}

/// `n1.toml`: what is one node's own. Paths are relative to the file.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct NodeFile {
    /// The cluster's file.
    pub cluster_file: PathBuf,
    /// Which node this is: `n1`.
    pub node: String,
    /// Where its data is. It is made if it does not exist.
    pub data_dir: PathBuf,
    /// `sync`: survives a power failure. `no-sync`: survives the death of the process. `none`: nothing
    /// survives.
    #[serde(default)]
    pub durability: DurabilityName,
    /// Transactions in flight at once.
    #[serde(default = "in_flight_max")]
    pub in_flight_max: usize,
    /// Its door for clients.
    pub clients: ClientsTable,
    /// TLS, between nodes and to clients. Without it, only loopback addresses are allowed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsTable>,
}

fn in_flight_max() -> usize {
    10_000
}

/// How much is survived.
#[derive(Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, Debug)]
#[serde(rename_all = "kebab-case")]
pub enum DurabilityName {
    /// See [`Durability::Sync`].
    #[default]
    Sync,
    /// See [`Durability::NoSync`].
    NoSync,
    /// See [`Durability::None`].
    None,
}

/// `[clients]`.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct ClientsTable {
    /// `host:port`.
    pub listen: String,
    /// Who may do what. Without anybody, everybody may do everything: on loopback only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub principals: Vec<PrincipalTable>,
}

/// `[[clients.principals]]`.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct PrincipalTable {
    /// What logs call it.
    pub name: String,
    /// `read`, `write` or `admin`.
    pub role: RoleName,
    /// File with its token.
    pub token_file: PathBuf,
}

/// A role by name.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
#[serde(rename_all = "kebab-case")]
pub enum RoleName {
    /// See [`Role::Read`].
    Read,
    /// See [`Role::Write`].
    Write,
    /// See [`Role::Admin`].
    Admin,
}

/// `[tls]`.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct TlsTable {
    /// This node's certificate chain, PEM.
    pub certificate: PathBuf,
    /// Its private key, PEM.
    pub key: PathBuf,
    /// The cluster's authority, PEM.
    pub authority: PathBuf,
}

/// Everything that a node needs, checked.
#[derive(Debug)]
pub struct Node {
    /// The protocol's name.
    pub protocol: String,
    /// For the node itself.
    pub settings: Settings,
    /// Where it listens for other nodes.
    pub address: SocketAddr,
    /// Where it listens for clients.
    pub clients: SocketAddr,
    /// How it serves them.
    pub service: ServiceConfig,
}

/// Reads and checks a node's file and all that it names.
///
/// # Errors
/// File and field of the first mistake, and what to write instead.
pub fn load(path: &Path) -> anyhow::Result<Node> {
    let base = path.parent().unwrap_or(Path::new(""));
    let file: NodeFile = parse(path)?;
    let cluster_path = base.join(&file.cluster_file);
    let shared: ClusterFile = parse(&cluster_path)?;
    let at = |field: &str| format!("{}: `{field}`", path.display());
    let map = map(&shared, &cluster_path)?;
    let endpoints = endpoints(&shared, &map, &cluster_path)?;
    let node: NodeId = file.node.parse().with_context(|| at("node"))?;
    let own = endpoints.iter().find(|endpoint| endpoint.node == node).ok_or_else(|| {
        anyhow!("{}: {node} is none of the nodes of {}", at("node"), cluster_path.display())
    })?;
    let address = resolve(&own.address).with_context(|| {
        format!("{}: `nodes.{node}`: {:?}", cluster_path.display(), own.address)
    })?;
    let clients = resolve(&file.clients.listen)
        .with_context(|| format!("{}: {:?}", at("clients.listen"), file.clients.listen))?;
    let mut service = ServiceConfig {
        access: access(&file.clients, base, &at)?,
        tls: None,
        limits: Limits::default(),
    };
    let mut node_tls = None;
    if let Some(table) = &file.tls {
        let files = TlsFiles {
            certificate: base.join(&table.certificate),
            key: base.join(&table.key),
            authority: base.join(&table.authority),
        };
        let loaded = tls::Tls::load(&files, &shared.cluster, node);
        node_tls = Some(loaded.with_context(|| at("tls"))?);
        service.tls = Some(Tls {
            certificate: read(&files.certificate, &at("tls.certificate"))?,
            key: read(&files.key, &at("tls.key"))?,
            client_authority: Some(read(&files.authority, &at("tls.authority"))?),
        });
    } else if !address.ip().is_loopback() || !clients.ip().is_loopback() {
        bail!("{}: it is missing; without TLS, listen on 127.0.0.1 only", at("tls"));
    }
    if service.access.is_open() && !clients.ip().is_loopback() {
        bail!("{}: list who may come in, or listen on 127.0.0.1", at("clients.principals"));
    }
    if file.in_flight_max == 0 {
        bail!("{}: 0 transactions would serve nobody; use 1 or more", at("in_flight_max"));
    }
    Ok(Node {
        protocol: shared.protocol,
        settings: Settings {
            cluster: shared.cluster,
            map: Arc::new(map),
            node,
            endpoints,
            data_dir: base.join(&file.data_dir),
            durability: match file.durability {
                DurabilityName::Sync => Durability::Sync,
                DurabilityName::NoSync => Durability::NoSync,
                DurabilityName::None => Durability::None,
            },
            verify_state: false,
            tls: node_tls,
            emulate_wan: shared.emulate_wan,
            clock_error: Duration::from_millis(shared.clock_error_ms),
            clock_skew: Arc::default(),
            in_flight_max: file.in_flight_max,
            queue_bytes_max: 64 << 20,
        },
        address,
        clients,
        service,
    })
}

fn parse<T: for<'a> Deserialize<'a>>(path: &Path) -> anyhow::Result<T> {
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    toml::from_str(&text).map_err(|error| toml_error(path.display(), &error.to_string()))
}

fn read(path: &Path, place: &str) -> anyhow::Result<Vec<u8>> {
    std::fs::read(path).with_context(|| format!("{place}: {}", path.display()))
}

fn resolve(address: &str) -> anyhow::Result<SocketAddr> {
    use std::net::ToSocketAddrs as _;
    let mut found = address.to_socket_addrs().context("not an address of this form: host:port")?;
    found.next().context("this name has no address")
}

/// The map that a cluster's file describes.
pub fn map(file: &ClusterFile, path: &Path) -> anyhow::Result<Cluster> {
    let place = path.display();
    let is_name = |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit();
    if file.cluster.is_empty()
        || file.cluster.len() > 40
        || !file.cluster.chars().all(|letter| is_name(letter) || letter == '-')
    {
        bail!("{place}: `cluster`: use 1 to 40 lower-case letters, digits and dashes");
    }
    // A topology in a file lies beside the cluster's file.
    let beside = path.parent().unwrap_or(Path::new("")).join(&file.topology);
    let name = if beside.is_file() { beside.display().to_string() } else { file.topology.clone() };
    let topology = common::topology(&name).with_context(|| format!("{place}: `topology`"))?;
    Cluster::spread(
        topology,
        file.servers_per_region,
        file.servers_per_region,
        file.partitions,
        file.replicas,
    )
    .with_context(|| place.to_string())
}

/// Every process: a server of the map with a gateway of its region.
pub fn endpoints(file: &ClusterFile, map: &Cluster, path: &Path) -> anyhow::Result<Vec<Endpoint>> {
    let place = path.display();
    let mut gateways: Vec<_> = map.gateways().copied().collect();
    let mut endpoints = Vec::new();
    for server in map.servers() {
        let at = gateways.iter().position(|gateway| gateway.region == server.region);
        let at = at.with_context(|| format!("{place}: there is no gateway for {}", server.id))?;
        let gateway = gateways.remove(at).id;
        let address = file.nodes.get(&server.id.to_string()).with_context(|| {
            let region = map.topology.name_of(server.region);
            format!("{place}: `nodes`: {} (in {region}) has no address", server.id)
        })?;
        endpoints.push(Endpoint { node: server.id, gateway, address: address.clone() });
    }
    for (name, address) in &file.nodes {
        if !endpoints.iter().any(|endpoint| endpoint.node.to_string() == *name) {
            bail!("{place}: `nodes.{name}`: the map has no such node; it has {}", endpoints.len());
        }
        if file.nodes.values().filter(|other| *other == address).count() > 1 {
            bail!("{place}: `nodes.{name}`: another node has the address {address} too");
        }
    }
    Ok(endpoints)
}

fn access(
    table: &ClientsTable,
    base: &Path,
    at: &impl Fn(&str) -> String,
) -> anyhow::Result<Access> {
    if table.principals.is_empty() {
        return Ok(Access::open());
    }
    let mut list = Vec::new();
    for PrincipalTable { name, role, token_file } in &table.principals {
        let place = format!("{} of {name:?}", at("clients.principals"));
        let token = String::from_utf8(read(&base.join(token_file), &place)?)
            .map_err(|_| anyhow!("{place}: {}: not a text", token_file.display()))?;
        let role = match role {
            RoleName::Read => Role::Read,
            RoleName::Write => Role::Write,
            RoleName::Admin => Role::Admin,
        };
        list.push((Credential::Token(token.trim().to_owned()), Principal::new(name, role)));
    }
    Access::only(list).with_context(|| at("clients.principals"))
}
