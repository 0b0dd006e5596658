//! The node's process, from its file.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "a test")]

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::time::Duration;

use orthodrome_core::NodeId;
use orthodrome_server::config::NodeConfig;
use orthodrome_server::node::run::{RunError, run};
use orthodrome_server::tls::Authority;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Ports that were free a moment ago.
fn ports(count: usize) -> Vec<u16> {
    let listeners: Vec<_> = (0..count).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    listeners.iter().map(|listener| listener.local_addr().unwrap().port()).collect()
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
    NodeConfig::load(&path).unwrap()
}

struct Process {
    stop: oneshot::Sender<()>,
    ended: JoinHandle<Result<(), RunError>>,
}

fn start(config: NodeConfig) -> Process {
    let (stop, stopped) = oneshot::channel();
    let ended = tokio::spawn(run(config, async { drop(stopped.await) }));
    Process { stop, ended }
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
    let processes: Vec<Process> = configs.iter().cloned().map(start).collect();
    // Each answers at its client address.
    for port in &ports[3..] {
        loop {
            match tokio::net::TcpStream::connect(("127.0.0.1", *port)).await {
                Ok(_) => break,
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    }
    // The same file again: the address is taken, and if it were not, the data would be.
    let error = run(configs[0].clone(), std::future::pending()).await.unwrap_err().to_string();
    assert!(error.contains("listen.peer") && error.contains("in use"), "{error}");
    let mut elsewhere = configs[0].clone();
    elsewhere.listen_peer = "127.0.0.1:0".into();
    elsewhere.listen_client = "127.0.0.1:0".into();
    let error = run(elsewhere, std::future::pending()).await.unwrap_err().to_string();
    assert!(error.contains("LOCK") && error.contains("another process"), "{error}");
    for process in processes {
        process.stop.send(()).unwrap();
        process.ended.await.unwrap().unwrap();
    }
    // Another node with this one's data.
    let mut swapped = configs[1].clone();
    swapped.node.data_dir = configs[0].node.data_dir.clone();
    let error = run(swapped, std::future::pending()).await.unwrap_err().to_string();
    assert!(error.contains("belongs to n1") && error.contains("data_dir"), "{error}");
}
