//! The node's process, from its file.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "a test")]

use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;

use orthodrome_core::NodeId;
use orthodrome_server::config::NodeConfig;
use orthodrome_server::node::run::{RunError, run};
use orthodrome_server::storage::directory::Directory;
use orthodrome_server::tls::Authority;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Free ports. They are below those that systems give to outgoing connections, so that nothing takes
/// them before they are used.
fn ports(count: usize) -> Vec<u16> {
    let first = 10_000 + (std::process::id() % 100) as u16 * 20;
    let is_free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    let ports: Vec<u16> = (first..12_000).filter(is_free).take(count).collect();
    assert_eq!(ports.len(), count, "too few ports from {first} on are free");
    ports
}

fn file(dir: &Path, node: u32, ports: &[u16]) -> NodeConfig {
    let mut nodes = String::new();
    for n in 1..=3 {
        let region = ["A", "B", "C"][n - 1];
        let (peer, client) = (ports[n - 1], ports[n + 2]);
        nodes += &format!(
            "[[nodes]]\nid = \"n{n}\"\nregion = \"{region}\"\npeer = \"127.0.0.1:{peer}\"\n\
             client = \"127.0.0.1:{client}\"\n"
        );
    }
    let text = format!(
        "cluster = \"planet\"\nnode = \"n{node}\"\ndata_dir = \"data{node}\"\n\
         protocol = \"carousel-basic\"\ntopology = \"local3\"\n{nodes}\
         [placement]\npartitions = 3\nreplicas = 3\n\
         [tls]\ncertificate = \"n{node}.pem\"\nkey = \"n{node}.key\"\nauthority = \"ca.pem\"\n"
    );
    let path = dir.join(format!("n{node}.toml"));
    fs::write(&path, text).unwrap();
    let config = NodeConfig::load(&path).unwrap();
    Directory::mark_new(&config.node.data_dir).unwrap();
    config
}

struct Process {
    ready: oneshot::Receiver<SocketAddr>,
    stop: oneshot::Sender<()>,
    ended: JoinHandle<Result<(), RunError>>,
}

fn start(config: NodeConfig) -> Process {
    let (stop, stopped) = oneshot::channel();
    let (tell, ready) = oneshot::channel();
    let ended =
        tokio::spawn(run(config, |place| tell.send(place).unwrap(), async { drop(stopped.await) }));
    Process { ready, stop, ended }
}

async fn never_served(config: NodeConfig) -> String {
    let ready = |place| panic!("it serves on {place}");
    run(config, ready, std::future::pending()).await.unwrap_err().to_string()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_runs_from_its_files_and_ends_in_good_order() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::new("planet").unwrap();
    for node in 1..=3 {
        authority.issue(dir.path(), NodeId(node), &["127.0.0.1".into()]).unwrap();
    }
    let ports = ports(6);
    let configs: Vec<NodeConfig> = (1..=3).map(|node| file(dir.path(), node, &ports)).collect();
    let mut processes: Vec<Process> = configs.iter().cloned().map(start).collect();
    // Each answers at its client address.
    for (process, port) in processes.iter_mut().zip(&ports[3..]) {
        let place = (&mut process.ready).await.unwrap();
        assert_eq!(place.port(), *port);
        tokio::net::TcpStream::connect(place).await.unwrap();
    }
    // The same file again: the address is taken, and if it were not, the data would be.
    let error = never_served(configs[0].clone()).await;
    assert!(error.contains("listen.peer") && error.contains("in use"), "{error}");
    let mut elsewhere = configs[0].clone();
    elsewhere.listen_peer = "127.0.0.1:0".into();
    elsewhere.listen_client = "127.0.0.1:0".into();
    let error = never_served(elsewhere).await;
    assert!(error.contains("LOCK") && error.contains("another process"), "{error}");
    for process in processes {
        process.stop.send(()).unwrap();
        process.ended.await.unwrap().unwrap();
    }
    // Another node with this one's data.
    let mut swapped = configs[1].clone();
    swapped.node.data_dir = configs[0].node.data_dir.clone();
    let error = never_served(swapped).await;
    assert!(error.contains("holds data of n1") && error.contains("data_dir"), "{error}");
}
