//! The example file of a node, with every setting explained, which `serve --init` writes.

use std::fmt::{self, Display};

use orthodrome_core::NodeId;

/// One node's file. Its `Display` form is the contents: a setting that is commented out without a
/// space (`#name = value`) shows its default.
#[derive(Clone, Debug)]
pub struct Example {
    /// The cluster's id.
    pub cluster: String,
    /// The node of the file.
    pub node: NodeId,
    /// The data directory, relative to the file.
    pub data_dir: String,
    /// The protocol.
    pub protocol: String,
    /// A built-in topology, or a file in the same folder.
    pub topology: String,
    /// Every node of the cluster.
    pub nodes: Vec<ExampleNode>,
    /// Partitions of the key space.
    pub partitions: u32,
    /// Replicas of each partition.
    pub replicas: u32,
    /// Instead of a default placement: the servers of each partition's replicas, the leader's
    /// first; empty for the default placement.
    pub explicit: Vec<Vec<NodeId>>,
    /// Whether messages are delayed according to the topology.
    pub emulate_wan: bool,
    /// Certificate, key and authority of the node, relative to the file.
    pub tls: Option<[String; 3]>,
    /// The principals: name, role, and the file with the token.
    pub principals: Vec<[String; 3]>,
}

/// One line of the list of nodes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExampleNode {
    /// Its id.
    pub id: NodeId,
    /// Its region's name.
    pub region: String,
    /// Its address for other nodes.
    pub peer: String,
    /// Its address for clients.
    pub client: String,
}

/// A text as a TOML value.
fn quoted(text: &str) -> toml::Value {
    toml::Value::from(text)
}

impl Display for Example {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write(f, false)
    }
}

/// An example whose node listens for clients of Redis.
struct WithRedis<'a>(&'a Example);

impl Display for WithRedis<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.write(f, true)
    }
}

/// Redis's own port, for the first node; the others have the next ones.
pub const REDIS_PORT: usize = 6_379;

impl Example {
    /// The contents of the file of a node that listens for clients of Redis. Otherwise the lines
    /// that turn this on are comments.
    #[must_use]
    pub fn with_redis(&self) -> String {
        WithRedis(self).to_string()
    }

    fn write(&self, f: &mut fmt::Formatter<'_>, has_redis: bool) -> fmt::Result {
        self.head(f)?;
        self.placement(f)?;
        self.redis(f, has_redis)?;
        f.write_str(LIMITS)?;
        self.security(f)
    }

    fn redis(&self, f: &mut fmt::Formatter<'_>, is_on: bool) -> fmt::Result {
        let place = self.nodes.iter().position(|node| node.id == self.node).unwrap_or(0);
        let (off, port) = (if is_on { "" } else { "# " }, REDIS_PORT + place);
        write!(
            f,
            "# Listener for clients of Redis (docs/redis.md), with the principals and the TLS of the other clients.\n\
             {off}[redis]\n{off}listen = \"127.0.0.1:{port}\"\n\n"
        )
    }

    fn head(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { node, emulate_wan, .. } = self;
        let region = self.nodes.iter().find(|other| other.id == *node);
        let region = region.map_or("no region", |found| &found.region);
        let audit = quoted(&format!("{}.audit.jsonl", self.data_dir));
        let [cluster, name, data, protocol, topology] =
            [&self.cluster, &node.to_string(), &self.data_dir, &self.protocol, &self.topology]
                .map(|text| quoted(text));
        write!(
            f,
            r#"# Node {node}, in {region}. `orthodrome serve --config FILE --check` checks this file.
# A line `#name = value` shows a setting and its default. Paths are relative to this file.
# All settings are the same on every node of a cluster, except `node`, `data_dir`, `[listen]`, `[redis]`,
# `[tls]` and `[client_tls]`.

# Name of the cluster: lower-case letters, digits and hyphens. It cannot be changed later.
cluster = {cluster}
# Id of this node in `[[nodes]]` below.
node = {name}
# Directory for the data of this node; created if it does not exist.
data_dir = {data}
# Protocol that commits transactions.
protocol = {protocol}
# Topology, the regions and the round-trip times between them: a built-in name (azure5, azure6, ec2-3, ec2-5, geotp4,
# local3, local5), a TOML file ("….toml"), or a table with the same fields.
topology = {topology}
# Delay messages between nodes by the round-trip times of the topology. For clusters on one machine; use false
# on real machines.
emulate_wan = {emulate_wan}
# Durability of acknowledged transactions: "sync" survives a power failure, "process" a crash of the process,
# "none" neither.
#durability = "sync"
# Maximum clock error in milliseconds; a smaller bound that the kernel states counts instead. The node stops if its
# clock steps by more.
#clock_error_ms = 10
# All nodes run on this machine and read one clock without error. The default is true if all `peer` addresses are
# loopback addresses; use false if such an address leads to another machine, as a tunnel does.
#shared_clock = true
# Threads that run transactions without conflicts in parallel, for deterministic protocols; 0: one per processor.
#workers = 0
# Check every page of the data before the node starts.
#verify_state = true
# Time limit in seconds for pending transactions at shutdown, at most 86400.
#shutdown_s = 30
# File of the audit log: a JSON object for each order of an operator. The default is `data_dir` with .audit.jsonl at
# the end.
#audit_log = {audit}
# Increase this number with each change of `[[nodes]]` or `[placement]`; nodes with different numbers do not connect.
#map_epoch = 1

"#
        )
    }

    fn placement(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { partitions, replicas, .. } = self;
        f.write_str("[placement]\n")?;
        if self.explicit.is_empty() {
            write!(
                f,
                r#"# The preferred leader of partition i is in region i (modulo the number of regions), its other replicas are in the
# regions after it.
partitions = {partitions}
# Replicas of each partition, an odd number: 2f + 1 replicas tolerate f failures.
replicas = {replicas}
"#
            )?;
        } else {
            f.write_str("# The nodes with replicas of each partition, and its preferred leader. Keys are hashed over the partitions.\nexplicit = [\n")?;
            for (at, replicas) in self.explicit.iter().enumerate() {
                let names: Vec<String> =
                    replicas.iter().map(|node| quoted(&node.to_string()).to_string()).collect();
                let leader = names.first().map_or("", String::as_str);
                let names = names.join(", ");
                writeln!(f, "  {{ id = \"p{at}\", replicas = [{names}], leader = {leader} }},")?;
            }
            f.write_str("]\n")?;
        }
        f.write_str(
            r#"# Number of shares into which each region's copy of the data is split, for deterministic protocols. It cannot be
# changed later.
#shares = 1
# Instead of `partitions` and `replicas`, a list of all partitions. Without `start`, keys are hashed over the partitions:
#   explicit = [
#     { id = "p0", replicas = ["n1", "n2", "n3"], leader = "n1", start = "" },
#     { id = "p1", replicas = ["n2", "n3", "n1"], leader = "n2", start = "m" },
#   ]

# All nodes, with their addresses for other nodes (peer) and for clients (client).
"#,
        )?;
        for ExampleNode { id, region, peer, client } in &self.nodes {
            let [id, region, peer, client] =
                [&id.to_string(), region, peer, client].map(|text| quoted(text));
            writeln!(
                f,
                "[[nodes]]\nid = {id}\nregion = {region}\npeer = {peer}\nclient = {client}\n"
            )?;
        }
        f.write_str(
            "# Addresses on which this node listens, if they differ from `[[nodes]]` (address translation).\n\
             # [listen]\n# peer = \"0.0.0.0:7401\"\n# client = \"0.0.0.0:7400\"\n\n",
        )
    }

    fn security(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "# TLS between nodes, and to clients unless there is `[client_tls]`. The certificate has the name\n\
             # <node>.<cluster>.orthodrome. Without TLS, only loopback addresses are allowed.\n",
        )?;
        match &self.tls {
            Some(files) => {
                let [certificate, key, authority] = files.each_ref().map(|text| quoted(text));
                writeln!(
                    f,
                    "[tls]\ncertificate = {certificate}\nkey = {key}\nauthority = {authority}"
                )?;
            }
            None => f.write_str(
                "# [tls]\n# certificate = \"n1.pem\"\n# key = \"n1.key\"\n# authority = \"ca.pem\"\n",
            )?,
        }
        f.write_str(
            r#"
# Certificate for client connections, and the authority that signs client certificates.
# [client_tls]
# certificate = "public.pem"
# key = "public.key"
# client_authority = "clients-ca.pem"

# Clients and their roles: `read`, `write` or `admin`. The credential is a token in a file (`token_file`), in this file
# (`token`), or as the 64 hexadecimal digits of its SHA-256 (`token_sha256`: printf %s TOKEN | sha256sum), or a
# client certificate (`certificate_file`). `high_priority_per_second` limits the attempts at transactions of high
# priority at this gateway; further attempts run with low priority. Without principals every client has every
# permission, and clients must be on loopback.
"#,
        )?;
        for principal in &self.principals {
            let [name, role, file] = principal.each_ref().map(|text| quoted(text));
            writeln!(f, "[[principals]]\nname = {name}\nrole = {role}\ntoken_file = {file}\n")?;
        }
        if self.principals.is_empty() {
            f.write_str(
                "# [[principals]]\n# name = \"shop\"\n# role = \"write\"\n# token_file = \"shop.token\"\n",
            )?;
        }
        Ok(())
    }
}

const LIMITS: &str = r#"# Limits. A request that exceeds a limit is refused with an error that names it.
[limits]
# Maximum length of a key and of a value, in bytes.
#key_bytes_max = 4096
#value_bytes_max = 1048576
# Maximum number of keys of a transaction, and of operations of a procedure.
#keys_max = 1000
#ops_max = 1000
# Maximum size of a request as sent, and of the keys and values in an answer, in bytes.
#request_bytes_max = 4194304
#response_bytes_max = 16777216
# Maximum number of pending requests, and their total size in bytes; a request counts until its transaction has ended.
#requests_max = 10000
#request_bytes_in_flight_max = 67108864
# Time limit of one request, in milliseconds.
#request_timeout_ms = 60000
# Maximum number of client connections.
#connections_max = 10000
# Maximum number of interactive transactions that wait for their client, and how long one waits for a message from
# its client, in milliseconds.
#txns_open_max = 10000
#lease_ms = 10000
# Maximum number of pending transactions at this node.
#txns_in_flight_max = 10000
# Maximum size of the send queue to each other node, in bytes.
#peer_queue_bytes_max = 67108864

"#;
