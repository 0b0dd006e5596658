//! The file of a node, with every setting explained: what `serve --init` writes.

use std::fmt::{self, Display};

use orthodrome_core::NodeId;

/// One node's file. Its `Display` form is the file: a setting that is commented out without a space
/// (`#name = value`) shows its default.
#[derive(Clone, Debug)]
pub struct Example {
    /// Names the cluster.
    pub cluster: String,
    /// Which node the file is for.
    pub node: NodeId,
    /// Where its data goes, relative to the file.
    pub data_dir: String,
    /// The protocol.
    pub protocol: String,
    /// A built-in map, or a file beside this one.
    pub topology: String,
    /// Every node of the cluster.
    pub nodes: Vec<ExampleNode>,
    /// Partitions of the key space.
    pub partitions: u32,
    /// Replicas of each partition.
    pub replicas: u32,
    /// Instead, the servers of each partition's replicas, the leader's first; none to have them dealt out.
    pub explicit: Vec<Vec<NodeId>>,
    /// Whether messages wait as long as the map says.
    pub emulate_wan: bool,
    /// Certificate, key and authority of the node, relative to the file.
    pub tls: Option<[String; 3]>,
    /// Who may come in: name, role, and the file with the token.
    pub principals: Vec<[String; 3]>,
}

/// One line of the list of nodes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExampleNode {
    /// Its id.
    pub id: NodeId,
    /// Its region's name.
    pub region: String,
    /// Where other nodes reach it.
    pub peer: String,
    /// Where clients reach it.
    pub client: String,
}

/// A text as a value of TOML.
fn quoted(text: &str) -> toml::Value {
    toml::Value::from(text)
}

impl Display for Example {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.head(f)?;
        self.placement(f)?;
        f.write_str(LIMITS)?;
        self.security(f)
    }
}

impl Example {
    fn head(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { node, emulate_wan, .. } = self;
        let region = self.nodes.iter().find(|other| other.id == *node);
        let region = region.map_or("no region", |found| &found.region);
        let [cluster, name, data, protocol, topology] =
            [&self.cluster, &node.to_string(), &self.data_dir, &self.protocol, &self.topology]
                .map(|text| quoted(text));
        write!(
            f,
            r#"# Node {node}, in {region}. `orthodrome serve --config FILE --check` says whether this file is right.
# A line that begins with # and a name shows a setting's default. Paths are relative to this file.
# All nodes of a cluster share everything but `node`, `data_dir`, `[listen]`, `[tls]` and `[client_tls]`.

# Names the cluster, for ever: lower-case letters, digits and hyphens.
cluster = {cluster}
# Which of `[[nodes]]`, below, this is.
node = {name}
# Where its data is; made if it does not exist.
data_dir = {data}
# The protocol that commits transactions.
protocol = {protocol}
# Regions and distances: a built-in map (azure5, azure6, ec2-3, ec2-5, local3, local5), a file "….toml"
# of that form, or such a table in place.
topology = {topology}
# Whether messages between nodes wait as long as they would travel on the map: so that one machine can
# be a planet. Never on real distances.
emulate_wan = {emulate_wan}
# What acknowledged transactions survive: "sync" a power failure, "process" the death of the process,
# "none" nothing.
#durability = "sync"
# How far this machine's clock may be from true time; it stops the node if it steps further. The same on
# every node.
#clock_error_ms = 10
# Threads on which transactions run that do not conflict, with the protocols that order them first (calvin, slog,
# sloth); 0: one for each processor.
#workers = 0
# Whether every page of the data is checked before the node starts.
#verify_state = true
# How long a node that was asked to end goes on with what it has begun.
#shutdown_s = 30
# Counts changes of `[[nodes]]` and `[placement]`; nodes of different epochs do not talk.
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
                r#"# Partition i is led from region i (modulo the regions), its other replicas are in the regions after it.
partitions = {partitions}
# An odd number: 2f + 1 replicas survive f.
replicas = {replicas}
"#
            )?;
        } else {
            f.write_str("# Each partition by itself: who has a replica, and who leads. Keys are hashed over them.\nexplicit = [\n")?;
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
            r#"# With the protocols that order transactions first (calvin, slog, sloth): the servers of a region divide the
# values of its copy into so many shares. Kept by data directories: it cannot be changed later.
#shares = 1
# Instead of partitions and replicas, each partition by itself. Without `start`, keys are hashed over the partitions:
#   explicit = [
#     { id = "p0", replicas = ["n1", "n2", "n3"], leader = "n1", start = "" },
#     { id = "p1", replicas = ["n2", "n3", "n1"], leader = "n2", start = "m" },
#   ]

# Every node: where others (peer) and clients (client) reach it.
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
            "# Where this node listens, if not where others reach it: behind a translation of addresses.\n\
             # [listen]\n# peer = \"0.0.0.0:7401\"\n# client = \"0.0.0.0:7400\"\n\n",
        )
    }

    fn security(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "# TLS between nodes, and to clients unless `[client_tls]` says otherwise. The certificate is for\n\
             # the name <node>.<cluster>.orthodrome. Without it, only loopback addresses are allowed.\n",
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
# Another certificate towards clients, and the authority that signs theirs.
# [client_tls]
# certificate = "public.pem"
# key = "public.key"
# client_authority = "clients-ca.pem"

# Who may come in: `read`, `write` or `admin`. The credential is a token in a file (`token_file`), here
# (`token`), as the 64 hexadecimal digits of its SHA-256 (`token_sha256`: printf %s TOKEN | sha256sum), or
# a client certificate (`certificate_file`). `high_priority_per_second` bounds how many attempts at transactions
# of high priority it may begin at this gateway; what is more runs with low priority. Without anybody, everybody may do everything, and clients
# must be on loopback.
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

const LIMITS: &str = r#"# Bounds. What is over one is refused with an error that names it, before it costs memory.
[limits]
# Longest key and value.
#key_bytes_max = 4096
#value_bytes_max = 1048576
# Different keys of a transaction, and operations of a procedure.
#keys_max = 1000
#ops_max = 1000
# Largest request as sent, and most bytes of keys and values in an answer.
#request_bytes_max = 4194304
#response_bytes_max = 16777216
# Requests at once, and their bytes together, until their transactions have ended.
#requests_max = 10000
#request_bytes_in_flight_max = 67108864
# How long one request may take.
#request_timeout_ms = 60000
# Connections of clients at once.
#connections_max = 10000
# Interactive transactions that wait for their client, and how long one waits without a sign of life.
#txns_open_max = 10000
#lease_ms = 10000
# Transactions in flight at this node.
#txns_in_flight_max = 10000
# Bytes that may wait for each other node.
#peer_queue_bytes_max = 67108864

"#;
