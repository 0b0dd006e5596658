//! The file that describes a node.
//!
//! Everything is checked before anything is started or written; an error names the line or the
//! field, what is wrong there, and what would be right. All nodes of a cluster share all but `node`,
//! `data_dir`, `listen` and `tls`.
//!
//! ```toml
//! cluster = "planet"              # lower-case letters, digits, hyphens
//! node = "n1"                     # which of `nodes` this is
//! data_dir = "/var/lib/orthodrome"
//! protocol = "carousel-basic"
//! topology = "azure5"             # a built-in map, or a file beside this one
//!
//! [[nodes]]
//! id = "n1"
//! region = "VA"
//! peer = "10.0.0.1:7001"          # where other nodes reach it
//! client = "10.0.0.1:7101"        # where clients reach it
//! # … one for each node
//!
//! [placement]
//! partitions = 5
//! replicas = 3
//!
//! [tls]
//! certificate = "n1.pem"
//! key = "n1.key"
//! authority = "ca.pem"
//!
//! [[principals]]
//! name = "shop"
//! token_file = "shop.token"
//! role = "write"
//! ```

use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use orthodrome_core::cluster::{Node, Partition, Partitioning, Role};
use orthodrome_core::topology::Topology;
use orthodrome_core::{Cluster, Key, NodeId, PartitionId};
use orthodrome_protocols::registry;
use serde::Deserialize;

use crate::node::{self, Durability, Endpoint};
use crate::service::{self, Access, Credential, Limits, Principal, ServiceConfig};
use crate::storage::Identity;
use crate::tls::{Tls, TlsFiles};

/// A node's gateway is called this much more than its server, so that a node that joins never
/// renames another's gateway: `n3` and `n1003`.
pub const GATEWAY_OFFSET: u32 = 1_000;

/// Everything a node is started from.
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// The node.
    pub node: node::Settings,
    /// The keyspace's protocol, a name of the registry.
    pub protocol: &'static str,
    /// Where to listen for other nodes.
    pub listen_peer: String,
    /// Where to listen for clients.
    pub listen_client: String,
    /// How to serve clients.
    pub service: ServiceConfig,
    /// How long a shutdown may wait for transactions in flight.
    pub shutdown_within: Duration,
}

/// What is wrong with a node's file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}{}: {}", file.display(), line.map_or_else(String::new, |line| format!(":{line}")), what)]
pub struct ConfigError {
    /// The file.
    pub file: PathBuf,
    /// The line, where the fault has one.
    pub line: Option<usize>,
    /// The field, what is wrong with it, and what would be right.
    pub what: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    cluster: String,
    node: NodeName,
    data_dir: PathBuf,
    protocol: String,
    topology: TopologySource,
    #[serde(default = "sync")]
    durability: DurabilityName,
    #[serde(default)]
    emulate_wan: bool,
    #[serde(default = "ten")]
    clock_error_ms: u64,
    #[serde(default = "yes")]
    verify_state: bool,
    #[serde(default = "thirty")]
    shutdown_s: u64,
    #[serde(default)]
    map_epoch: Option<u64>,
    nodes: Vec<NodeEntry>,
    placement: Placement,
    #[serde(default)]
    listen: Listen,
    tls: Option<TlsEntry>,
    client_tls: Option<ClientTlsEntry>,
    #[serde(default)]
    principals: Vec<PrincipalEntry>,
    #[serde(default)]
    limits: LimitsEntry,
}

fn sync() -> DurabilityName {
    DurabilityName::Sync
}

fn ten() -> u64 {
    10
}

fn thirty() -> u64 {
    30
}

fn yes() -> bool {
    true
}

/// `n3`, as everywhere.
#[derive(Clone, Copy)]
struct NodeName(NodeId);

impl<'de> Deserialize<'de> for NodeName {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map(Self).map_err(serde::de::Error::custom)
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum TopologySource {
    Name(String),
    Inline(toml::Table),
}

#[derive(Deserialize, Clone, Copy)]
#[serde(rename_all = "lowercase")]
enum DurabilityName {
    Sync,
    Process,
    None,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NodeEntry {
    id: NodeName,
    region: String,
    peer: String,
    #[serde(default)]
    client: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Placement {
    partitions: Option<u32>,
    replicas: Option<u32>,
    #[serde(default)]
    explicit: Vec<PartitionEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PartitionEntry {
    id: PartitionName,
    replicas: Vec<NodeName>,
    leader: NodeName,
    start: Option<String>,
}

#[derive(Clone, Copy)]
struct PartitionName(PartitionId);

impl<'de> Deserialize<'de> for PartitionName {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map(Self).map_err(serde::de::Error::custom)
    }
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct Listen {
    peer: Option<String>,
    client: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TlsEntry {
    certificate: PathBuf,
    key: PathBuf,
    authority: PathBuf,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ClientTlsEntry {
    certificate: PathBuf,
    key: PathBuf,
    client_authority: Option<PathBuf>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PrincipalEntry {
    name: String,
    token: Option<String>,
    token_file: Option<PathBuf>,
    role: RoleName,
}

#[derive(Deserialize, Clone, Copy)]
#[serde(rename_all = "lowercase")]
enum RoleName {
    Read,
    Write,
    Admin,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct LimitsEntry {
    key_bytes: Option<u32>,
    value_bytes: Option<u32>,
    keys: Option<u32>,
    ops: Option<u32>,
    request_bytes: Option<u32>,
    response_bytes: Option<u32>,
    request_bytes_in_flight: Option<usize>,
    requests: Option<usize>,
    transactions_open: Option<usize>,
    transactions_in_flight: Option<usize>,
    lease_ms: Option<u64>,
    peer_queue_bytes: Option<usize>,
}

impl NodeConfig {
    /// Reads and checks a node's file, and every file it names. Paths in it are relative to it.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = fs::read_to_string(path).map_err(|error| ConfigError {
            file: path.to_owned(),
            line: None,
            what: format!("cannot read the file: {error}"),
        })?;
        Self::parse(path, &text)
    }

    /// As [`NodeConfig::load`], with the text at hand; `path` says what to call it and where
    /// relative paths begin.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        let file: File = toml::from_str(text).map_err(|error| ConfigError {
            file: path.to_owned(),
            line: error.span().map(|span| line_of(text, span.start)),
            what: error.message().replace('\n', " "),
        })?;
        let base = path.parent().unwrap_or(Path::new("")).to_owned();
        Checker { base: &base, file: &file }.check().map_err(|what| ConfigError {
            file: path.to_owned(),
            line: None,
            what,
        })
    }
}

fn line_of(text: &str, offset: usize) -> usize {
    1 + text.bytes().take(offset).filter(|&byte| byte == b'\n').count()
}

/// Checks a file whose form is right; errors are texts that name the field.
struct Checker<'a> {
    base: &'a Path,
    file: &'a File,
}

impl Checker<'_> {
    fn check(&self) -> Result<NodeConfig, String> {
        let file = self.file;
        let me = file.node.0;
        let identity = Identity { cluster: file.cluster.clone(), node: me };
        identity.check().map_err(|error| format!("cluster: {error}"))?;
        let row = registry::find(&file.protocol).map_err(|error| format!("protocol: {error}"))?;
        let endpoints = self.endpoints()?;
        let own = file.nodes.iter().find(|entry| entry.id.0 == me);
        let own =
            own.ok_or_else(|| format!("node: {me} is not in `nodes`; add it, or correct `node`"))?;
        let map = Arc::new(self.map()?);
        if file.clock_error_ms == 0 || file.clock_error_ms > 10_000 {
            let value = file.clock_error_ms;
            return Err(format!("clock_error_ms: {value} is out of range; use 1 to 10000"));
        }
        let (limits, in_flight_max, queue_bytes_max) = self.limits()?;
        let listen_peer = file.listen.peer.clone().unwrap_or_else(|| own.peer.clone());
        let listen_client = file.listen.client.clone().unwrap_or_else(|| own.client.clone());
        check_address("listen.peer", &listen_peer)?;
        check_address(&format!("nodes.{me}.client (or listen.client)"), &listen_client)?;
        let tls = self.tls(me, &listen_peer)?;
        let service = ServiceConfig { access: self.access()?, tls: self.client_tls()?, limits };
        let node = node::Settings {
            cluster: file.cluster.clone(),
            map,
            node: me,
            endpoints,
            data_dir: self.base.join(&file.data_dir),
            durability: match file.durability {
                DurabilityName::Sync => Durability::Sync,
                DurabilityName::Process => Durability::NoSync,
                DurabilityName::None => Durability::None,
            },
            verify_state: file.verify_state,
            tls,
            emulate_wan: file.emulate_wan,
            clock_error: Duration::from_millis(file.clock_error_ms),
            clock_skew: Arc::default(),
            in_flight_max,
            queue_bytes_max,
        };
        Ok(NodeConfig {
            node,
            protocol: row.name,
            listen_peer,
            listen_client,
            service,
            shutdown_within: Duration::from_secs(file.shutdown_s),
        })
    }

    fn endpoints(&self) -> Result<Vec<Endpoint>, String> {
        let mut seen: BTreeMap<&str, NodeId> = BTreeMap::new();
        let mut endpoints: Vec<Endpoint> = Vec::new();
        for NodeEntry { id: NodeName(id), peer, client, .. } in &self.file.nodes {
            if id.0 == 0 || id.0 >= GATEWAY_OFFSET {
                return Err(format!("nodes: {id} is out of range; number nodes from n1 to n999"));
            }
            if endpoints.iter().any(|other| other.node == *id) {
                return Err(format!("nodes: {id} is listed twice; give each node its own id"));
            }
            for (field, address) in [("peer", peer), ("client", client)] {
                if address.is_empty() && field == "client" {
                    continue;
                }
                check_address(&format!("nodes.{id}.{field}"), address)?;
                if let Some(other) = seen.insert(address, *id) {
                    return Err(format!(
                        "nodes.{id}.{field}: {address} is an address of {other} already; give each its own"
                    ));
                }
            }
            let gateway = NodeId(id.0 + GATEWAY_OFFSET);
            endpoints.push(Endpoint { node: *id, gateway, address: peer.clone() });
        }
        Ok(endpoints)
    }

    fn topology(&self) -> Result<Topology, String> {
        let named = |error: orthodrome_core::topology::TopologyError| format!("topology: {error}");
        match &self.file.topology {
            TopologySource::Inline(table) => {
                let text = toml::to_string(table).map_err(|error| format!("topology: {error}"))?;
                Topology::parse(&text).map_err(named)
            }
            TopologySource::Name(name) if name.ends_with(".toml") => {
                let path = self.base.join(name);
                let text = fs::read_to_string(&path).map_err(|error| {
                    format!("topology: cannot read {}: {error}", path.display())
                })?;
                Topology::parse(&text).map_err(named)
            }
            TopologySource::Name(name) => Topology::built_in(name).ok_or_else(|| {
                let known: Vec<_> = Topology::built_in_names().collect();
                format!(
                    "topology: {name:?} is neither a file (\"….toml\") nor one of {}",
                    known.join(", ")
                )
            }),
        }
    }

    fn map(&self) -> Result<Cluster, String> {
        let topology = self.topology()?;
        let mut nodes = Vec::new();
        for entry in &self.file.nodes {
            let id = entry.id.0;
            let region = topology.region_named(&entry.region).ok_or_else(|| {
                let known: Vec<_> =
                    topology.regions().map(|r| topology.name_of(r).to_owned()).collect();
                format!(
                    "nodes.{id}.region: {:?} is not on the map {:?}, which has {}",
                    entry.region,
                    topology.name,
                    known.join(", ")
                )
            })?;
            nodes.push(Node { id, region, role: Role::Server });
            let gateway = NodeId(id.0 + GATEWAY_OFFSET);
            nodes.push(Node { id: gateway, region, role: Role::Gateway });
        }
        let epoch = self.file.map_epoch.unwrap_or(1);
        let Placement { partitions, replicas, explicit } = &self.file.placement;
        match (partitions, replicas, explicit.is_empty()) {
            (Some(partitions), Some(replicas), true) => {
                if *partitions == 0 || *partitions > 10_000 {
                    return Err(format!(
                        "placement.partitions: {partitions} is out of range; use 1 to 10000"
                    ));
                }
                let map = Cluster::spread_over(topology, epoch, nodes, *partitions, *replicas);
                map.map_err(|error| format!("placement: {error}"))
            }
            (None, None, false) => self.explicit(topology, epoch, nodes),
            _ => {
                Err("placement: give either `partitions` and `replicas`, or a list `explicit`"
                    .into())
            }
        }
    }

    fn explicit(
        &self,
        topology: Topology,
        epoch: u64,
        nodes: Vec<Node>,
    ) -> Result<Cluster, String> {
        let entries = &self.file.placement.explicit;
        let partitions = entries.iter().map(|entry| Partition {
            id: entry.id.0,
            replicas: entry.replicas.iter().map(|name| name.0).collect(),
            preferred_leader: entry.leader.0,
        });
        let starts: Vec<_> = entries.iter().filter_map(|entry| entry.start.as_ref()).collect();
        let partitioning = if starts.is_empty() {
            Partitioning::hash(entries.iter().map(|entry| entry.id.0))
        } else if starts.len() == entries.len() {
            let start = |entry: &PartitionEntry| {
                (Key::from(entry.start.clone().unwrap_or_default()), entry.id.0)
            };
            Partitioning::Range { starts: entries.iter().map(start).collect() }
        } else {
            return Err("placement.explicit: give `start` to every partition (ranges) or to none \
                        (hashing)"
                .into());
        };
        Cluster::new(topology, epoch, nodes, partitions, partitioning)
            .map_err(|error| format!("placement: {error}"))
    }

    fn tls(&self, me: NodeId, listen: &str) -> Result<Option<Tls>, String> {
        if let Some(TlsEntry { certificate, key, authority }) = &self.file.tls {
            let files = TlsFiles {
                certificate: self.base.join(certificate),
                key: self.base.join(key),
                authority: self.base.join(authority),
            };
            let tls = Tls::load(&files, &self.file.cluster, me);
            return tls.map(Some).map_err(|error| format!("tls: {error}"));
        }
        let addresses = self.file.nodes.iter().map(|entry| entry.peer.as_str());
        for address in addresses.chain([listen]) {
            if !is_loopback(address) {
                return Err(format!(
                    "tls: missing, and {address} is not an address of loopback; nodes that talk over \
                     a network need certificates"
                ));
            }
        }
        Ok(None)
    }

    fn client_tls(&self) -> Result<Option<service::Tls>, String> {
        let read = |field: &str, path: &Path| {
            let path = self.base.join(path);
            fs::read(&path)
                .map_err(|error| format!("{field}: cannot read {}: {error}", path.display()))
        };
        let (certificate, key, client_authority) = match (&self.file.client_tls, &self.file.tls) {
            (Some(entry), _) => (&entry.certificate, &entry.key, entry.client_authority.as_ref()),
            // The node's own certificate serves clients too.
            (None, Some(entry)) => (&entry.certificate, &entry.key, None),
            (None, None) => return Ok(None),
        };
        let authority = client_authority.map(|path| read("client_tls.client_authority", path));
        Ok(Some(service::Tls {
            certificate: read("client_tls.certificate", certificate)?,
            key: read("client_tls.key", key)?,
            client_authority: authority.transpose()?,
        }))
    }

    fn access(&self) -> Result<Access, String> {
        if self.file.principals.is_empty() {
            return Ok(Access::open());
        }
        let mut all = Vec::new();
        for PrincipalEntry { name, token, token_file, role } in &self.file.principals {
            let token = match (token, token_file) {
                (Some(token), None) => token.clone(),
                (None, Some(path)) => {
                    let path = self.base.join(path);
                    let text = fs::read_to_string(&path).map_err(|error| {
                        format!(
                            "principals.{name}.token_file: cannot read {}: {error}",
                            path.display()
                        )
                    })?;
                    text.trim_end().to_owned()
                }
                _ => {
                    return Err(format!("principals.{name}: give either `token` or `token_file`"));
                }
            };
            let role = match role {
                RoleName::Read => service::Role::Read,
                RoleName::Write => service::Role::Write,
                RoleName::Admin => service::Role::Admin,
            };
            all.push((Credential::Token(token), Principal::new(name, role)));
        }
        Access::only(all).map_err(|error| format!("principals: {error}"))
    }

    /// The service's limits, transactions in flight, and bytes queued for each peer.
    fn limits(&self) -> Result<(Limits, usize, usize), String> {
        let given = &self.file.limits;
        let mut limits = Limits::default();
        let set = |value: Option<u32>, field: &mut u32| *field = value.unwrap_or(*field);
        set(given.key_bytes, &mut limits.key_bytes_max);
        set(given.value_bytes, &mut limits.value_bytes_max);
        set(given.keys, &mut limits.keys_max);
        set(given.ops, &mut limits.ops_max);
        set(given.request_bytes, &mut limits.request_bytes_max);
        set(given.response_bytes, &mut limits.response_bytes_max);
        let set = |value: Option<usize>, field: &mut usize| *field = value.unwrap_or(*field);
        set(given.request_bytes_in_flight, &mut limits.request_bytes_in_flight_max);
        set(given.requests, &mut limits.requests_max);
        set(given.transactions_open, &mut limits.txns_open_max);
        limits.lease = given.lease_ms.map_or(limits.lease, Duration::from_millis);
        limits.check().map_err(|error| error.to_string())?;
        let in_flight = given.transactions_in_flight.unwrap_or(10_000);
        let queue = given.peer_queue_bytes.unwrap_or(64 << 20);
        // One transaction's writes, or one message, must fit into what nodes send each other.
        let largest = crate::transport::frame::MESSAGE_BYTES_MAX;
        let request = limits.request_bytes_max as usize;
        if request > largest / 2 {
            return Err(format!(
                "limits.request_bytes: {request} is over {}, half of the largest message between nodes",
                largest / 2
            ));
        }
        if in_flight == 0 {
            return Err("limits.transactions_in_flight: 0 serves nobody; use at least 1".into());
        }
        if queue < largest + 1_024 {
            return Err(format!(
                "limits.peer_queue_bytes: {queue} is less than one message; use at least {}",
                largest + 1_024
            ));
        }
        Ok((limits, in_flight, queue))
    }
}

fn check_address(field: &str, address: &str) -> Result<(), String> {
    let port = address.rsplit_once(':').filter(|(host, _)| !host.is_empty()).map(|(_, port)| port);
    match port.map(str::parse::<u16>) {
        Some(Ok(port)) if port > 0 => Ok(()),
        Some(_) | None => {
            Err(format!("{field}: {address:?} is not an address of the form \"host:port\""))
        }
    }
}

fn is_loopback(address: &str) -> bool {
    match address.parse::<SocketAddr>() {
        Ok(address) => address.ip().is_loopback(),
        Err(_) => address.rsplit_once(':').is_some_and(|(host, _)| host == "localhost"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GOOD: &str = r#"
cluster = "planet"
node = "n1"
data_dir = "data"
protocol = "carousel-basic"
topology = "local3"

[[nodes]]
id = "n1"
region = "A"
peer = "127.0.0.1:7001"
client = "127.0.0.1:7101"

[[nodes]]
id = "n2"
region = "B"
peer = "127.0.0.1:7002"
client = "127.0.0.1:7102"

[[nodes]]
id = "n3"
region = "C"
peer = "localhost:7003"

[placement]
partitions = 3
replicas = 3
"#;

    fn parse(text: &str) -> Result<NodeConfig, String> {
        NodeConfig::parse(Path::new("/etc/node.toml"), text).map_err(|error| error.to_string())
    }

    #[test]
    fn a_file_gives_a_node() {
        let config = parse(GOOD).unwrap();
        assert_eq!(config.node.data_dir, Path::new("/etc/data"));
        assert_eq!(config.listen_peer, "127.0.0.1:7001");
        assert_eq!(config.protocol, "carousel-basic");
        assert_eq!(config.node.endpoints.len(), 3);
        let gateways: Vec<u32> = config.node.map.gateways().map(|node| node.id.0).collect();
        assert_eq!(gateways, [1_001, 1_002, 1_003]);
        assert_eq!(config.node.durability, Durability::Sync);
        let ranges = GOOD.replace(
            "partitions = 3\nreplicas = 3\n",
            r#"explicit = [
                { id = "p0", replicas = ["n1", "n2", "n3"], leader = "n1", start = "" },
                { id = "p1", replicas = ["n2"], leader = "n2", start = "m" },
            ]"#,
        );
        let map = parse(&ranges).unwrap().node.map;
        assert_eq!(map.partition_of(&"z".into()), PartitionId(1));
        assert_eq!(map.partitions().count(), 2);
    }

    #[test]
    fn errors_name_the_place_and_the_remedy() {
        let inline =
            r#"{ name = "two", source = "x", local_rtt_ms = 1.0, regions = ["A"], rtt_ms = {} }"#;
        let cases: &[(&str, &str, &[&str])] = &[
            ("data_dir", "data_dri", &["/etc/node.toml:4:", "data_dri", "data_dir"]),
            ("\"n1\"\ndata", "\"x1\"\ndata", &["node.toml:3:", "x1"]),
            ("\"planet\"", "\"Planet!\"", &["cluster", "lower-case"]),
            ("node = \"n1\"", "node = \"n9\"", &["node:", "n9"]),
            ("carousel-basic", "carrousel", &["protocol", "carousel-basic"]),
            ("\"local3\"", "\"atlantis\"", &["topology", "atlantis", "azure5"]),
            ("\"local3\"", "\"absent.toml\"", &["topology", "/etc/absent.toml"]),
            ("\"local3\"", inline, &["nodes.n2.region", "\"B\""]),
            ("id = \"n2\"", "id = \"n1\"", &["n1", "twice"]),
            ("id = \"n2\"", "id = \"n1000\"", &["n1000", "n999"]),
            ("127.0.0.1:7002", "127.0.0.1:7001", &["nodes.n2.peer", "address of n1"]),
            ("127.0.0.1:7002", "127.0.0.1", &["nodes.n2.peer", "host:port"]),
            ("127.0.0.1:7002", "127.0.0.1:99999", &["nodes.n2.peer", "host:port"]),
            ("127.0.0.1:7002", "10.1.1.1:7002", &["tls", "10.1.1.1", "certificates"]),
            ("region = \"B\"", "region = \"X\"", &["nodes.n2.region", "A, B, C"]),
            ("replicas = 3", "replicas = 5", &["placement", "5"]),
            ("replicas = 3", "replicas = 2", &["placement", "odd"]),
            ("partitions = 3\n", "", &["placement", "explicit"]),
            ("partitions = 3", "partitions = 0", &["placement.partitions", "1 to 10000"]),
            ("[placement]", "[limits]\nkey_bytes = 0\n[placement]", &["key_bytes"]),
            ("[placement]", "[limits]\nrequest_bytes = 16777216\n[placement]", &["request_bytes"]),
            ("[placement]", "[limits]\ntransactions_in_flight = 0\n[placement]", &["in_flight"]),
            (
                "[placement]",
                "[[principals]]\nname = \"a\"\nrole = \"read\"\n[placement]",
                &["principals.a", "token_file"],
            ),
            (
                "[placement]",
                "[[principals]]\nname = \"a\"\nrole = \"god\"\ntoken = \"x\"\n[placement]",
                &["god", "admin"],
            ),
            (
                "[placement]",
                "[[principals]]\nname = \"a\"\nrole = \"read\"\ntoken = \"x\"\n[placement]",
                &["principals", "16"],
            ),
            (
                "[placement]",
                "[tls]\ncertificate = \"a\"\nkey = \"b\"\nauthority = \"c\"\n[placement]",
                &["tls", "/etc/a"],
            ),
            ("protocol", "clock_error_ms = 0\nprotocol", &["clock_error_ms", "1 to 10000"]),
            ("protocol", "durability = \"maybe\"\nprotocol", &["maybe", "sync"]),
        ];
        for (from, to, wanted) in cases {
            let text = GOOD.replacen(from, to, 1);
            assert_ne!(text, GOOD, "{from:?} is not in the file");
            let message = parse(&text).map(|_| ()).unwrap_err();
            assert!(!message.contains('\n'), "more than one line: {message}");
            for part in *wanted {
                assert!(message.contains(part), "{message:?} does not name {part:?}");
            }
        }
        assert!(parse("").unwrap_err().contains("cluster"));
    }

    proptest! {
        #![proptest_config(crate::fuzz_config())]

        #[test]
        fn arbitrary_text_never_panics(text in "\\PC{0,200}") {
            let _ = parse(&text);
        }

        #[test]
        fn damaged_files_never_panic(
            damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        ) {
            let mut bytes = GOOD.as_bytes().to_vec();
            for (at, byte) in damage {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            if let Ok(text) = String::from_utf8(bytes) {
                let _ = parse(&text);
            }
        }
    }
}
