//! The configuration file of a node.
//!
//! Everything is checked before anything is started or written. An error names the line or the
//! field, the problem, and a correct value. All nodes of a cluster have the same settings except
//! `node`, `data_dir`, `listen`, `redis` and `tls`.
//!
//! [`Example`] is such a file, with every setting explained; `orthodrome serve --init` writes it.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use orthodrome_core::{NodeId, PartitionId};
use serde::Deserialize;
use toml::de::{DeTable, DeValue};

use crate::node;
use crate::service::ServiceConfig;

mod check;
mod example;

pub use example::{Example, ExampleNode, REDIS_PORT};

/// The difference between the ids of a node's gateway and its server, such as `n1003` and `n3`. It
/// is large enough that a node that joins never changes another gateway's id.
pub const GATEWAY_OFFSET: u32 = 1_000;

/// The settings of a node.
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// The node.
    pub node: node::Settings,
    /// The keyspace's protocol, a name of the registry.
    pub protocol: &'static str,
    /// The address on which to listen for other nodes.
    pub listen_peer: String,
    /// The address on which to listen for clients.
    pub listen_client: String,
    /// The address on which to listen for clients of Redis; none if the node does not.
    pub listen_redis: Option<String>,
    /// The settings of the client service, without the audit log.
    pub service: ServiceConfig,
    /// The file of the audit log.
    pub audit_log: PathBuf,
    /// How long a shutdown waits for transactions in flight.
    pub shutdown_within: Duration,
}

/// An error in a node's file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}{}: {}", file.display(), line.map_or_else(String::new, |line| format!(":{line}")), what)]
pub struct ConfigError {
    /// The file.
    pub file: PathBuf,
    /// The line, if known.
    pub line: Option<usize>,
    /// The field, the problem, and a correct value.
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
    #[serde(default)]
    shared_clock: Option<bool>,
    #[serde(default)]
    workers: u16,
    #[serde(default = "yes")]
    verify_state: bool,
    #[serde(default = "thirty")]
    shutdown_s: u64,
    audit_log: Option<PathBuf>,
    #[serde(default)]
    map_epoch: Option<u64>,
    nodes: Vec<NodeEntry>,
    placement: Placement,
    #[serde(default)]
    listen: Listen,
    tls: Option<TlsEntry>,
    client_tls: Option<ClientTlsEntry>,
    redis: Option<RedisEntry>,
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
    shares: Option<u32>,
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
struct RedisEntry {
    listen: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PrincipalEntry {
    name: String,
    role: RoleName,
    token: Option<String>,
    token_file: Option<PathBuf>,
    token_sha256: Option<String>,
    certificate_file: Option<PathBuf>,
    high_priority_per_second: Option<u32>,
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
    key_bytes_max: Option<u32>,
    value_bytes_max: Option<u32>,
    keys_max: Option<u32>,
    ops_max: Option<u32>,
    request_bytes_max: Option<u32>,
    response_bytes_max: Option<u32>,
    requests_max: Option<usize>,
    request_bytes_in_flight_max: Option<usize>,
    request_timeout_ms: Option<u64>,
    connections_max: Option<usize>,
    txns_open_max: Option<usize>,
    lease_ms: Option<u64>,
    txns_in_flight_max: Option<usize>,
    peer_queue_bytes_max: Option<usize>,
}

impl NodeConfig {
    /// Reads and checks a node's file, and every file that it names. Paths in it are relative to
    /// it.
    ///
    /// # Errors
    /// The first error.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = fs::read_to_string(path).map_err(|error| ConfigError {
            file: path.to_owned(),
            line: None,
            what: format!("cannot read the file: {error}"),
        })?;
        Self::parse(path, &text)
    }

    /// As [`NodeConfig::load`], for a given text. `path` is used in messages, and relative paths
    /// begin at its folder.
    ///
    /// # Errors
    /// The first error.
    pub fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        let file: File = toml::from_str(text).map_err(|error| ConfigError {
            file: path.to_owned(),
            line: error.span().map(|span| line_of(text, span.start)),
            what: error.message().replace('\n', " "),
        })?;
        let base = path.parent().unwrap_or(Path::new(""));
        check::check(base, &file).map_err(|what| ConfigError {
            file: path.to_owned(),
            line: line_of_field(text, &what),
            what,
        })
    }
}

fn line_of(text: &str, offset: usize) -> usize {
    1 + text.bytes().take(offset).filter(|&byte| byte == b'\n').count()
}

/// The line of the field with which an error begins (`nodes.n2.peer: …`), as far as the file has
/// it. If the field itself is missing, it is the line of the list entry, identified by its id or
/// name, or of the table.
fn line_of_field(text: &str, error: &str) -> Option<usize> {
    let (field, _) = error.split_once(": ")?;
    let document = DeTable::parse(text).ok()?;
    let mut parts = field.split('.');
    let (key, mut value) = document.get_ref().get_key_value(parts.next()?)?;
    let mut offset = key.span().start;
    for part in parts {
        let found = match value.get_ref() {
            DeValue::Table(table) => {
                table.get_key_value(part).map(|(key, value)| (key.span().start, value))
            }
            DeValue::Array(entries) => {
                let is_named = |entry: &DeValue<'_>, field| {
                    entry.get(field).and_then(|name| name.get_ref().as_str()) == Some(part)
                };
                let named = entries.iter().find(|entry| {
                    is_named(entry.get_ref(), "id") || is_named(entry.get_ref(), "name")
                });
                named.map(|entry| (entry.span().start, entry))
            }
            DeValue::String(_)
            | DeValue::Integer(_)
            | DeValue::Float(_)
            | DeValue::Boolean(_)
            | DeValue::Datetime(_) => None,
        };
        let Some(found) = found else { break };
        (offset, value) = found;
    }
    Some(line_of(text, offset))
}

#[cfg(test)]
mod tests;
