//! Checks a node's file, field by field.

use std::fs;
use std::net::SocketAddr;
use std::num::NonZero;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use orthodrome_core::cluster::{Node, Partition, Partitioning, Role};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::spelling::did_you_mean;
use orthodrome_core::topology::Topology;
use orthodrome_core::txn::VALUE_BYTES_MAX;
use orthodrome_core::{Cluster, Key, NodeId};
use orthodrome_protocols::registry;

use super::{
    DurabilityName, File, GATEWAY_OFFSET, NodeConfig, NodeEntry, NodeName, PartitionEntry,
    Placement, PrincipalEntry, RoleName, TlsEntry, TopologySource,
};
use crate::node::{self, Durability, Endpoint};
use crate::service::{self, Access, Credential, Limits, Principal, ServiceConfig};
use crate::storage::{Expected, Identity};
use crate::tls::{self, Tls, TlsFiles};

/// Maximum time that a node may wait for pending transactions at its shutdown, in seconds: a day.
const SHUTDOWN_S_MAX: u64 = 24 * 60 * 60;

/// The most bytes that may wait for the connection to one node: more than a node has.
const QUEUE_BYTES_MAX: usize = 1 << 40;

/// Checks a parsed file. Paths in it are relative to `base`.
///
/// # Errors
/// A text that begins with the field: `nodes.n2.peer: …`.
pub(super) fn check(base: &Path, file: &File) -> Result<NodeConfig, String> {
    Checker { base, file }.check()
}

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
        let shared_clock = self.shares_clock()?;
        if file.shutdown_s > SHUTDOWN_S_MAX {
            let value = file.shutdown_s;
            return Err(format!("shutdown_s: {value} is out of range; use 0 to {SHUTDOWN_S_MAX}"));
        }
        let (limits, in_flight_max, queue_bytes_max) = self.limits()?;
        let listen_peer = file.listen.peer.clone().unwrap_or_else(|| own.peer.clone());
        let listen_client = file.listen.client.clone().unwrap_or_else(|| own.client.clone());
        check_address("listen.peer", &listen_peer)?;
        let client_field = if file.listen.client.is_some() {
            "listen.client"
        } else {
            &format!("nodes.{me}.client")
        };
        check_address(client_field, &listen_client)?;
        let tls = self.tls(me, &listen_peer)?;
        let bytes_in_flight_max = limits.request_bytes_in_flight_max;
        let (access, tls_to_clients) = (self.access()?, self.client_tls()?);
        let service = ServiceConfig { access, tls: tls_to_clients, limits, audit: None };
        check_exposure(client_field, &listen_client, &service)?;
        let listen_redis = file.redis.as_ref().map(|entry| entry.listen.clone());
        if let Some(address) = &listen_redis {
            check_address("redis.listen", address)?;
            check_exposure("redis.listen", address, &service)?;
            if [&listen_client, &listen_peer].contains(&address) {
                return Err(format!("redis.listen: {address} is used already; use another port"));
            }
        }
        let node = node::Settings {
            cluster: file.cluster.clone(),
            map,
            node: me,
            endpoints,
            data_dir: self.base.join(&file.data_dir),
            expected: Expected::Data,
            durability: match file.durability {
                DurabilityName::Sync => Durability::Sync,
                DurabilityName::Process => Durability::NoSync,
                DurabilityName::None => Durability::None,
            },
            verify_state: file.verify_state,
            tls,
            emulate_wan: file.emulate_wan,
            clock_error: Duration::from_millis(file.clock_error_ms),
            shared_clock,
            clock_skew: Arc::default(),
            in_flight_max,
            bytes_in_flight_max,
            workers: NonZero::new(usize::from(file.workers)),
            queue_bytes_max,
        };
        // Not in the data directory: it remains when the data is removed.
        let audit_log = match &file.audit_log {
            Some(path) => self.base.join(path),
            None => {
                let mut path = node.data_dir.clone().into_os_string();
                path.push(".audit.jsonl");
                path.into()
            }
        };
        if audit_log.starts_with(&node.data_dir) {
            return Err(format!(
                "audit_log: {} is in `data_dir`; use a file elsewhere, which remains when the data is removed",
                audit_log.display()
            ));
        }
        Ok(NodeConfig {
            node,
            protocol: row.name,
            listen_peer,
            listen_client,
            listen_redis,
            service,
            audit_log,
            shutdown_within: Duration::from_secs(file.shutdown_s),
        })
    }

    /// Whether all nodes run on this machine.
    fn shares_clock(&self) -> Result<bool, String> {
        let far = self.file.nodes.iter().find(|entry| !is_loopback(&entry.peer));
        match (self.file.shared_clock, far) {
            (Some(true), Some(NodeEntry { id: NodeName(id), peer, .. })) => Err(format!(
                "shared_clock: {peer} of {id} is not a loopback address; use false, or leave it out"
            )),
            (shared, far) => Ok(shared.unwrap_or(far.is_none())),
        }
    }

    fn endpoints(&self) -> Result<Vec<Endpoint>, String> {
        let mut seen: OrdMap<&str, NodeId> = OrdMap::new();
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
                        "nodes.{id}.{field}: {address} is already an address of {other}; use another one"
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
                let hint = did_you_mean(name, known.iter().copied());
                format!(
                    "topology: {name:?} is neither a file (\"….toml\") nor one of {}{hint}",
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
                    "nodes.{id}.region: {:?} is not a region of topology {:?}, which has {}",
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
        let Placement { partitions, replicas, shares, explicit } = &self.file.placement;
        let map = match (partitions, replicas, explicit.is_empty()) {
            (Some(partitions), Some(replicas), true) => {
                if *partitions == 0 || *partitions > 10_000 {
                    return Err(format!(
                        "placement.partitions: {partitions} is out of range; use 1 to 10000"
                    ));
                }
                let map = Cluster::spread_over(topology, epoch, nodes, *partitions, *replicas);
                map.map_err(|error| format!("placement: {error}"))?
            }
            (None, None, false) => self.explicit(topology, epoch, nodes)?,
            _ => {
                return Err(
                    "placement: give either `partitions` and `replicas`, or a list `explicit`"
                        .into(),
                );
            }
        };
        let shares = shares.unwrap_or(1);
        let name = &self.file.protocol;
        if shares > 1 && !registry::has_shares(name).map_err(|error| error.to_string())? {
            return Err(format!(
                "placement.shares: {name} does not support sharding within a region; use 1, or {}",
                registry::names_with_shares()
            ));
        }
        map.divided(shares).map_err(|error| format!("placement.shares: {error}"))
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
                    "tls: missing, but {address} is not a loopback address; add `[tls]` with \
                     certificates"
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
            // The node's own certificate serves clients too, and its authority may sign theirs.
            (None, Some(entry)) => (&entry.certificate, &entry.key, Some(&entry.authority)),
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
        for entry in &self.file.principals {
            let role = match entry.role {
                RoleName::Read => service::Role::Read,
                RoleName::Write => service::Role::Write,
                RoleName::Admin => service::Role::Admin,
            };
            let principal = Principal {
                high_priority_per_second: entry.high_priority_per_second,
                ..Principal::new(&entry.name, role)
            };
            all.push((self.credential(entry)?, principal));
        }
        Access::only(all).map_err(|error| format!("principals: {error}"))
    }

    fn credential(&self, entry: &PrincipalEntry) -> Result<Credential, String> {
        let PrincipalEntry { name, token, token_file, token_sha256, certificate_file, .. } = entry;
        let given = [
            token.is_some(),
            token_file.is_some(),
            token_sha256.is_some(),
            certificate_file.is_some(),
        ];
        if given.iter().filter(|given| **given).count() != 1 {
            return Err(format!(
                "principals.{name}: give one of `token_file`, `token_sha256`, `certificate_file` and \
                 `token`"
            ));
        }
        if let Some(digest) = token_sha256 {
            return Credential::token_sha256(digest)
                .map_err(|why| format!("principals.{name}.token_sha256: {why}"));
        }
        if let Some(path) = certificate_file {
            let leaf = tls::leaf(&self.base.join(path))
                .map_err(|error| format!("principals.{name}.certificate_file: {error}"))?;
            if self.client_tls()?.is_none_or(|tls| tls.client_authority.is_none()) {
                return Err(format!(
                    "principals.{name}.certificate_file: this node asks clients for no certificate; set \
                     `client_tls.client_authority` to the authority that signed this one, or use a token"
                ));
            }
            return Ok(Credential::Certificate(leaf));
        }
        let (field, token) = match (token, token_file) {
            (None, Some(path)) => {
                let path = self.base.join(path);
                let text = fs::read_to_string(&path).map_err(|error| {
                    let path = path.display();
                    format!("principals.{name}.token_file: cannot read {path}: {error}")
                })?;
                ("token_file", text.trim_end().to_owned())
            }
            (token, _) => ("token", token.clone().unwrap_or_default()),
        };
        Credential::token(&token).map_err(|why| format!("principals.{name}.{field}: {why}"))
    }

    /// The service's limits, transactions in flight, and bytes queued for each peer.
    fn limits(&self) -> Result<(Limits, usize, usize), String> {
        let given = &self.file.limits;
        let mut limits = Limits::default();
        let set = |value: Option<u32>, field: &mut u32| *field = value.unwrap_or(*field);
        set(given.key_bytes_max, &mut limits.key_bytes_max);
        set(given.value_bytes_max, &mut limits.value_bytes_max);
        set(given.keys_max, &mut limits.keys_max);
        set(given.ops_max, &mut limits.ops_max);
        set(given.request_bytes_max, &mut limits.request_bytes_max);
        set(given.response_bytes_max, &mut limits.response_bytes_max);
        let set = |value: Option<usize>, field: &mut usize| *field = value.unwrap_or(*field);
        set(given.requests_max, &mut limits.requests_max);
        set(given.request_bytes_in_flight_max, &mut limits.request_bytes_in_flight_max);
        set(given.connections_max, &mut limits.connections_max);
        set(given.txns_open_max, &mut limits.txns_open_max);
        let set = |value: Option<u64>, field: &mut Duration| {
            *field = value.map_or(*field, Duration::from_millis);
        };
        set(given.request_timeout_ms, &mut limits.request_timeout);
        set(given.lease_ms, &mut limits.lease);
        limits.check().map_err(|error| error.to_string())?;
        if limits.value_bytes_max as usize > VALUE_BYTES_MAX {
            return Err(format!(
                "limits.value_bytes_max: {} is out of range; it must be at most {VALUE_BYTES_MAX}",
                limits.value_bytes_max
            ));
        }
        let in_flight = given.txns_in_flight_max.unwrap_or(10_000);
        let queue = given.peer_queue_bytes_max.unwrap_or(64 << 20);
        // The largest transaction's writes, with the keys and versions of its reads, must fit into
        // one message between nodes, with room for what a protocol adds.
        let largest = crate::transport::frame::MESSAGE_BYTES_MAX;
        let request = limits.request_bytes_max as usize;
        let most = largest / 8 * 3;
        if request > most {
            return Err(format!(
                "limits.request_bytes_max: {request} is above {most}, which is three eighths of the \
                 largest message between nodes"
            ));
        }
        if in_flight == 0 {
            return Err("limits.txns_in_flight_max: 0 is out of range; use at least 1".into());
        }
        if queue < largest + 1_024 {
            return Err(format!(
                "limits.peer_queue_bytes_max: {queue} is smaller than one message; use at least {}",
                largest + 1_024
            ));
        }
        if queue > QUEUE_BYTES_MAX {
            return Err(format!(
                "limits.peer_queue_bytes_max: {queue} is out of range; it must be at most \
                 {QUEUE_BYTES_MAX}"
            ));
        }
        Ok((limits, in_flight, queue))
    }
}

/// Refuses an address where credentials or data would be open to others.
fn check_exposure(field: &str, address: &str, service: &ServiceConfig) -> Result<(), String> {
    if is_loopback(address) {
        return Ok(());
    }
    if service.access.is_open() {
        return Err(format!(
            "{field}: {address} is not a loopback address, and clients need no credential; add \
             `[[principals]]`, or use 127.0.0.1"
        ));
    }
    if service.tls.is_none() {
        return Err(format!(
            "{field}: {address} is not a loopback address, and there is no TLS; add `[tls]` or \
             `[client_tls]`, or use 127.0.0.1"
        ));
    }
    Ok(())
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
