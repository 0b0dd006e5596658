//! Many large transactions at once: each is within every limit, and together they are far above the size that
//! one record or one message may have. No node ends for it, every caller gets an answer, and the data is there after
//! a restart.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "a test")]

mod flooding;

use std::sync::Arc;
use std::time::Duration;

use flooding::{CALLERS, VALUES, key, protocols, writes};
use orthodrome_core::topology::Topology;
use orthodrome_core::txn::{Op, VALUE_BYTES_MAX};
use orthodrome_core::{Cluster, Key, NodeId, Outcome, RegionId, Txn, TxnId};
use orthodrome_server::gateway::{Begun, Gateway, GatewayError};
use orthodrome_server::node::Durability;
use orthodrome_server::node::embedded::{EmbeddedCluster, Plan};

/// How long anything may take on a machine that is busy with other work.
const PATIENCE: Duration = Duration::from_secs(240);

/// Runs one transaction at one gateway.
async fn run(gateway: &Gateway, txn: Txn) -> Result<Begun, GatewayError> {
    let name = txn.id;
    let answer = tokio::time::timeout(PATIENCE, gateway.begin(txn)).await;
    answer.unwrap_or_else(|_| panic!("no answer to {name} within {PATIENCE:?}"))
}

/// Writes three values of the largest size; true if that committed.
async fn write(gateway: Gateway, caller: usize) -> bool {
    let puts = writes(caller).map(|(key, value)| Op::Put(key.into(), value.into()));
    let ops = puts.collect();
    let client = gateway.register().await.unwrap();
    match run(&gateway, Txn::procedure(TxnId::new(client, 1), RegionId(0), ops)).await {
        Ok(Begun::Finished(finished)) => match finished.outcome {
            Outcome::Committed(_) => true,
            Outcome::Aborted(_) => false,
            Outcome::Unknown => panic!("nobody can tell what became of {caller}"),
        },
        Ok(Begun::Reads(_)) => panic!("a procedure has one round"),
        Err(error) => panic!("{caller}: {error}"),
    }
}

/// How long the value of a key is, once nobody is writing it.
async fn length(gateway: &Gateway, key: Key) -> Option<usize> {
    let client = gateway.register().await.unwrap();
    let deadline = tokio::time::Instant::now() + PATIENCE;
    for counter in 1.. {
        let txn = Txn::read_only(TxnId::new(client, counter), RegionId(0), vec![key.clone()]);
        let Ok(Begun::Finished(finished)) = run(gateway, txn).await else { panic!("{key}") };
        if let Outcome::Committed(_) = finished.outcome {
            let read = finished.reads.unwrap().remove(&key).unwrap();
            return read.value.map(|value| value.len());
        }
        assert!(tokio::time::Instant::now() < deadline, "{key}: {:?}", finished.outcome);
    }
    None
}

async fn flood(protocol: &'static str, regions: u16) {
    let dir = tempfile::tempdir().unwrap();
    let topology = Topology::uniform(regions, Duration::from_micros(100), Duration::from_millis(1));
    let map = Cluster::spread(topology, 1, 1, u32::from(regions), u32::from(regions)).unwrap();
    let mut cluster = EmbeddedCluster::start(Plan {
        protocol,
        map: Arc::new(map),
        dir: dir.path().to_owned(),
        // What is tested is what is written, not how safely.
        durability: Durability::NoSync,
        emulate_wan: false,
        tls: false,
        in_flight_max: 1_000,
        // All of them get to the machines.
        bytes_in_flight_max: usize::MAX,
    })
    .await
    .unwrap();
    let began = tokio::time::Instant::now();
    let gateway = cluster.gateway(NodeId(1)).unwrap();
    // Whether a group has a leader already is not what is tested.
    while !write(gateway.clone(), CALLERS).await {}
    let callers: Vec<_> =
        (0..CALLERS).map(|caller| tokio::spawn(write(gateway.clone(), caller))).collect();
    let mut committed = vec![CALLERS];
    for (caller, answer) in callers.into_iter().enumerate() {
        if answer.await.unwrap_or_else(|error| panic!("{protocol} with {regions}: {error}")) {
            committed.push(caller);
        }
    }
    let answered = began.elapsed();
    let nodes: Vec<NodeId> = cluster.nodes().collect();
    for &node in &nodes {
        cluster.kill(node).await;
    }
    for &node in &nodes {
        cluster.restart(node).await.unwrap_or_else(|e| panic!("{protocol} at {node}: {e}"));
    }
    let gateway = cluster.gateway(NodeId(1)).unwrap();
    for caller in [committed[0], committed[committed.len() - 1]] {
        let found = length(&gateway, key(caller, VALUES - 1).into()).await;
        assert_eq!(found, Some(VALUE_BYTES_MAX), "{protocol} with {regions}: of {caller}");
    }
    while !write(gateway.clone(), 0).await {}
    let (count, all) = (committed.len() - 1, began.elapsed());
    println!("{protocol} with {regions}: {count} of {CALLERS} after {answered:?}, {all:?} in all");
    cluster.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_protocol_ends_one_node() {
    for protocol in protocols() {
        flood(protocol, 1).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_protocol_ends_one_of_three_nodes() {
    for protocol in protocols() {
        flood(protocol, 3).await;
    }
}
