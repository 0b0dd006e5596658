//! `serve --init`: everything for a cluster on this machine, ready to run.

use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::{Cluster, NodeId};
use orthodrome_server::config::{Example, ExampleNode, NodeConfig, REDIS_PORT};
use orthodrome_server::storage::directory::Directory;
use orthodrome_server::tls::Authority;

use crate::common;

/// The options of `--init`.
pub struct Wish {
    /// The directory of the files.
    pub dir: PathBuf,
    /// The topology.
    pub topology: String,
    /// Nodes in each region.
    pub servers_per_region: u32,
    /// Partitions of the key space.
    pub partitions: u32,
    /// Replicas of each partition.
    pub replicas: u32,
    /// Instead of a default placement: the servers of each partition's replicas, the leader's
    /// first; empty for the default placement.
    pub explicit: Vec<Vec<NodeId>>,
    /// The protocol.
    pub protocol: String,
    /// Whether the nodes listen for clients of Redis.
    pub redis: bool,
    /// Whether to enable TLS and to require a token from clients.
    pub tls: bool,
    /// The first port for clients; the ports for nodes follow after the last of these.
    pub base_port: u16,
    /// The name of the cluster.
    pub cluster: String,
    /// More names and addresses of the nodes, for their certificates.
    pub hosts: Vec<String>,
}

/// The names in every certificate, besides the node's own.
const HOSTS: [&str; 2] = ["localhost", "127.0.0.1"];
/// The name of a cluster that its owner has not named.
pub const CLUSTER: &str = "dev";
/// The file with the token of the administrator.
pub const TOKEN_FILE: &str = "admin.token";
/// The file with the certificate of the cluster's authority.
pub const AUTHORITY_FILE: &str = "tls/ca.pem";

/// Writes the files, and returns the text that explains the next steps.
///
/// # Errors
/// The options are invalid, or a file could not be written. Then existing files are unchanged, and
/// no new file remains.
pub fn init(wish: &Wish) -> anyhow::Result<String> {
    let place = format!("--init {}", wish.dir.display());
    // The topmost directory that does not exist yet.
    let made = wish.dir.ancestors().take_while(|path| !path.as_os_str().is_empty());
    let made = made.take_while(|path| !path.exists()).last();
    if made.is_none() && fs::read_dir(&wish.dir).with_context(|| place.clone())?.next().is_some() {
        bail!("{place}: the directory is not empty; use a new directory");
    }
    let written = fs::create_dir_all(&wish.dir).with_context(|| place.clone());
    let written = written.and_then(|()| write(wish, &place));
    if written.is_err() {
        // The directory was empty or did not exist before. A failure to clean up is ignored,
        // because the first error matters.
        let _ = match made {
            Some(made) => fs::remove_dir_all(made),
            None => clear(&wish.dir),
        };
    }
    written
}

/// Removes everything in a directory.
fn clear(dir: &Path) -> std::io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
        removed?;
    }
    Ok(())
}

/// Writes the files into an empty directory.
fn write(wish: &Wish, place: &str) -> anyhow::Result<String> {
    let map = common::topology(&wish.topology)?;
    let count = map.len() * wish.servers_per_region as usize;
    let last = usize::from(wish.base_port) + 2 * count;
    if last > usize::from(u16::MAX) {
        bail!(
            "--base-port {}: {count} nodes need ports up to {last}; use a lower base port",
            wish.base_port
        );
    }
    let first = usize::from(wish.base_port);
    if wish.redis && first < REDIS_PORT + count && REDIS_PORT < last {
        bail!(
            "--base-port {first}: the nodes listen for clients of Redis at ports {REDIS_PORT} to {}, and {first} to {} \
             are among these; use another base port",
            REDIS_PORT + count - 1,
            last - 1
        );
    }
    let port = |at: usize| format!("127.0.0.1:{}", first + at);
    let regions = map.regions().flat_map(|region| {
        std::iter::repeat_n(map.name_of(region), wish.servers_per_region as usize)
    });
    let nodes: Vec<ExampleNode> = (1..)
        .map(NodeId)
        .zip(regions)
        .enumerate()
        .map(|(at, (id, region))| ExampleNode {
            id,
            region: region.into(),
            client: port(at),
            peer: port(count + at),
        })
        .collect();
    let mut example = Example {
        cluster: wish.cluster.clone(),
        node: NodeId(1),
        data_dir: "data".into(),
        protocol: wish.protocol.clone(),
        topology: topology(wish)?,
        nodes: nodes.clone(),
        partitions: wish.partitions,
        replicas: wish.replicas,
        explicit: wish.explicit.clone(),
        emulate_wan: true,
        tls: None,
        principals: Vec::new(),
    };
    let text = |example: &Example| {
        if wish.redis { example.with_redis() } else { example.to_string() }
    };
    // The configuration is checked before anything else is written.
    let path_of = |node: NodeId| wish.dir.join(format!("{node}.toml"));
    let checked = NodeConfig::parse(&path_of(example.node), &text(&example))
        .with_context(|| place.to_owned())?;
    if wish.tls {
        administrator(&wish.dir)?;
        example.principals = vec![["admin", "admin", TOKEN_FILE].map(String::from)];
    }
    let authority = wish.tls.then(|| Authority::new(&example.cluster)).transpose()?;
    for ExampleNode { id, .. } in &nodes {
        example.node = *id;
        example.data_dir = format!("data/{id}");
        if let Some(authority) = &authority {
            let dir = wish.dir.join("tls");
            fs::create_dir_all(&dir).with_context(|| dir.display().to_string())?;
            let hosts = HOSTS.map(String::from).into_iter().chain(wish.hosts.iter().cloned());
            authority
                .issue(&dir, *id, &hosts.collect::<Vec<_>>())
                .with_context(|| format!("--host {}", wish.hosts.join(",")))?;
            let (certificate, key) = (format!("tls/{id}.pem"), format!("tls/{id}.key"));
            example.tls = Some([certificate, key, AUTHORITY_FILE.into()]);
        }
        Directory::mark_new(&wish.dir.join(&example.data_dir))?;
        let path = path_of(*id);
        fs::write(&path, text(&example)).with_context(|| path.display().to_string())?;
    }
    Ok(instructions(wish, &checked.node.map, &(0..count).map(port).collect::<Vec<_>>()))
}

/// The topology as the files name it: by its name, or as a copy of its file in the same directory.
fn topology(wish: &Wish) -> anyhow::Result<String> {
    let source = Path::new(&wish.topology);
    if !source.is_file() {
        return Ok(wish.topology.clone());
    }
    let name = "topology.toml";
    fs::copy(source, wish.dir.join(name)).with_context(|| wish.topology.clone())?;
    Ok(name.into())
}

/// Writes a new token, readable by its owner only.
fn administrator(dir: &Path) -> anyhow::Result<()> {
    let path = dir.join(TOKEN_FILE);
    let mut bytes = [0; 24];
    let provider = rustls::crypto::ring::default_provider();
    if provider.secure_random.fill(&mut bytes).is_err() {
        bail!("the operating system has no random bytes for a token; try again");
    }
    let token: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let mut options = fs::OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options
        .open(&path)
        .and_then(|mut file| writeln!(file, "{token}"))
        .with_context(|| path.display().to_string())
}

fn instructions(wish: &Wish, map: &Cluster, clients: &[String]) -> String {
    let dir = wish.dir.display();
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(
        text,
        "{} nodes in {} regions of {}, {} partitions × {} replicas, {}.\n\nStart the nodes:\n  orthodrome cluster start {dir}\nor each by itself:",
        clients.len(),
        map.topology.len(),
        map.topology.name,
        wish.partitions,
        wish.replicas,
        wish.protocol
    );
    for (server, listen) in map.servers().zip(clients) {
        let region = map.topology.name_of(server.region);
        let _ = writeln!(
            text,
            "  orthodrome serve --config {dir}/{}.toml &   # {region}, clients on {listen}",
            server.id
        );
    }
    let secure = if wish.tls {
        format!(" --tls-ca {dir}/{AUTHORITY_FILE} --token-file {dir}/{TOKEN_FILE}")
    } else {
        String::new()
    };
    // One gateway of each region.
    let mut near = OrdMap::new();
    for (server, listen) in map.servers().zip(clients) {
        near.entry(server.region).or_insert_with(|| listen.clone());
    }
    let near: Vec<String> = near.into_values().collect();
    let first = near.first().cloned().unwrap_or_default();
    let _ = writeln!(
        text,
        "\nThen use the cluster:\n  orthodrome shell --connect {first}{secure}\n  orthodrome load --connect \
         {}{secure} --workload bank --clients 20",
        near.join(",")
    );
    text
}
