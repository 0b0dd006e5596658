//! Whole clusters in this process, with real sockets and files.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "a test")]
#![allow(clippy::disallowed_types, reason = "tests of a real clock measure with one")]

mod leases;
mod misuse;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use orthodrome_core::cluster::Partition;
use orthodrome_core::machine::{Admin, GroupView, OrderState, Refusal};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::scan::{KeyRange, Scan};
use orthodrome_core::topology::Topology;
use orthodrome_core::txn::{AbortReason, Op, Priority, Reads, Writes};
use orthodrome_core::{
    ClientId, Cluster, Decision, Key, NodeId, Outcome, PartitionId, RegionId, Timestamp, Txn,
    TxnId, Value,
};
use orthodrome_protocols::{
    carousel, deterministic, natto, ocean_vista, registry, tapir, two_phase_locking,
};
use orthodrome_server::gateway::{Begun, Finished, Gateway, GatewayError, OrderError};
use orthodrome_server::node::embedded::{EmbeddedCluster, Plan};
use orthodrome_server::node::{Durability, StartError};
use orthodrome_server::scan::ScanFailed;

/// How long anything may take on a machine that is busy with other work.
const PATIENCE: Duration = Duration::from_secs(120);

/// What comes of `work`; fails, with what was awaited, if it takes too long.
async fn within<T>(awaited: &str, work: impl Future<Output = T>) -> T {
    let worked = tokio::time::timeout(PATIENCE, work).await;
    worked.unwrap_or_else(|_| panic!("awaited for {PATIENCE:?} in vain: {awaited}"))
}

fn map(regions: u16, rtt: Duration) -> Arc<Cluster> {
    let topology = Topology::uniform(regions, Duration::from_micros(100), rtt);
    Arc::new(Cluster::spread(topology, 1, 1, u32::from(regions), 3).unwrap())
}

fn plan(dir: &Path, map: Arc<Cluster>) -> Plan {
    Plan {
        protocol: carousel::BASIC,
        map,
        dir: dir.to_owned(),
        durability: Durability::Sync,
        emulate_wan: false,
        tls: false,
        in_flight_max: 1_000,
        bytes_in_flight_max: 64 << 20,
    }
}

async fn cluster(plan: Plan) -> EmbeddedCluster {
    // Shown with a failure, or with `--nocapture`; `RUST_LOG` says how much.
    let filter = tracing_subscriber::EnvFilter::from_default_env();
    let _ = tracing_subscriber::fmt().with_env_filter(filter).with_test_writer().try_init();
    EmbeddedCluster::start(plan).await.unwrap()
}

/// One partition on these three of five servers.
fn placed(epoch: u64, on: [u32; 3]) -> Arc<Cluster> {
    let rtt = Duration::from_millis(1);
    let topology = Topology::uniform(5, Duration::from_micros(100), rtt);
    let spread = Cluster::spread(topology.clone(), 1, 1, 1, 3).unwrap();
    let partition = Partition {
        id: PartitionId(0),
        replicas: on.map(NodeId).into(),
        preferred_leader: NodeId(on[0]),
    };
    let (nodes, keys) = (spread.nodes().copied(), spread.partitioning().clone());
    Arc::new(Cluster::new(topology, epoch, nodes, [partition], keys).unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn partitions_begin_on_the_servers_that_the_cluster_says() {
    for protocol in [carousel::FAST, two_phase_locking::BY_AGE] {
        let dir = tempfile::tempdir().unwrap();
        let placed = |epoch, on| Plan { protocol, ..plan(dir.path(), placed(epoch, on)) };
        let before = cluster(placed(1, [1, 2, 3])).await;
        Client::at(&before, 5).await.run(&[Op::Put("k".into(), "told".into())]).await;
        before.shutdown(Duration::from_secs(5)).await;
        // Nobody has moved the partition.
        let after = cluster(placed(2, [3, 4, 5])).await;
        for node in [1, 4] {
            let mut client = Client::at(&after, node).await;
            assert_eq!(client.read("k").await.as_deref(), Some("told"), "{protocol} at n{node}");
            client.run(&[Op::Put(format!("at n{node}").into(), "v".into())]).await;
        }
        after.shutdown(Duration::from_secs(5)).await;
    }
}

/// A client of one gateway.
struct Client {
    gateway: Gateway,
    id: ClientId,
    counter: u64,
}

impl Client {
    async fn at(cluster: &EmbeddedCluster, node: u32) -> Self {
        let gateway = cluster.gateway(NodeId(node)).unwrap();
        let id = gateway.register().await.unwrap();
        Self { gateway, id, counter: 0 }
    }

    fn next(&mut self) -> TxnId {
        self.counter += 1;
        TxnId::new(self.id, self.counter)
    }

    /// Runs operations, again and again until they commit.
    async fn run(&mut self, ops: &[Op]) -> Finished {
        let tries = async {
            loop {
                let txn = Txn::procedure(self.next(), RegionId(0), ops.to_vec());
                match self.gateway.begin(txn).await.unwrap() {
                    Begun::Finished(finished) => match finished.outcome {
                        Outcome::Committed(_) => return finished,
                        Outcome::Aborted(_) => {}
                        Outcome::Unknown => panic!("no answer in a healthy cluster"),
                    },
                    Begun::Reads(_) => panic!("a procedure has one round"),
                }
            }
        };
        within(&format!("{ops:?} commits"), tries).await
    }

    /// The same where a node is dead: an outcome may stay unknown, and whoever tries again writes the same.
    async fn run_whatever_happens(&mut self, ops: &[Op]) {
        loop {
            let txn = Txn::procedure(self.next(), RegionId(0), ops.to_vec());
            let Begun::Finished(finished) = self.gateway.begin(txn).await.unwrap() else {
                panic!("a procedure has one round")
            };
            if let Outcome::Committed(_) = finished.outcome {
                return;
            }
        }
    }

    /// Reads a key, again and again until nobody is writing it.
    async fn read(&mut self, key: &str) -> Option<String> {
        let tries = async {
            loop {
                let txn = Txn::read_only(self.next(), RegionId(0), vec![key.into()]);
                let Begun::Finished(finished) = self.gateway.begin(txn).await.unwrap() else {
                    panic!("a read-only transaction has one round")
                };
                if let Outcome::Committed(_) = finished.outcome {
                    let read = finished.reads.unwrap().remove(&Key::from(key)).unwrap();
                    return read.value.map(|value| value.to_string());
                }
            }
        };
        within(&format!("{key} is read"), tries).await
    }

    /// Begins a transaction that reads and may write `key`, again and again until it has read.
    async fn open(&mut self, key: &str) -> (Txn, Reads) {
        let tries = async {
            loop {
                let keys = vec![Key::from(key)];
                let txn = Txn::interactive(self.next(), RegionId(0), keys.clone(), keys);
                if let Begun::Reads(reads) = self.gateway.begin(txn.clone()).await.unwrap() {
                    return (txn, reads);
                }
            }
        };
        within(&format!("a transaction has read {key}"), tries).await
    }

    /// Commits one more than was read, from the beginning if it must.
    async fn add_one(&mut self, key: &str) -> (Txn, Reads, Finished) {
        let tries = async {
            loop {
                let (txn, reads) = self.open(key).await;
                let decision = Decision::Commit(plus_one(&reads));
                let finished = self.gateway.decide(txn.id, decision).await.unwrap();
                if let Outcome::Committed(_) = finished.outcome {
                    return (txn, reads, finished);
                }
            }
        };
        within(&format!("one is added to {key}"), tries).await
    }

    /// Adds one to a key interactively, once.
    async fn increment(&mut self, key: &str) -> Result<Outcome, GatewayError> {
        let id = self.next();
        let keys = vec![Key::from(key)];
        let txn = Txn::interactive(id, RegionId(0), keys.clone(), keys);
        match self.gateway.begin(txn).await? {
            Begun::Finished(finished) => Ok(finished.outcome),
            Begun::Reads(reads) => {
                let writes = plus_one(&reads);
                Ok(self.gateway.decide(id, Decision::Commit(writes)).await?.outcome)
            }
        }
    }
}

fn plus_one(reads: &Reads) -> Writes {
    let next = |value: Option<&Value>| {
        let number: u64 = value.map_or(0, |value| value.to_string().parse().unwrap());
        Some(Value::from((number + 1).to_string()))
    };
    reads.iter().map(|(key, read)| (key.clone(), next(read.value.as_ref()))).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transactions_commit_at_one_gateway_and_are_read_at_another() {
    let dir = tempfile::tempdir().unwrap();
    let mut plan = plan(dir.path(), map(3, Duration::from_millis(1)));
    plan.tls = true;
    let cluster = cluster(plan).await;
    let mut writer = Client::at(&cluster, 1).await;
    let mut reader = Client::at(&cluster, 3).await;
    assert_ne!(writer.id, reader.id);
    for round in 0..20 {
        writer
            .run(&[Op::Put(format!("k{round}").into(), "v".into()), Op::Add("n".into(), 1)])
            .await;
    }
    for _ in 0..20 {
        reader.add_one("n").await;
    }
    assert_eq!(reader.read("n").await.as_deref(), Some("40"));
    assert_eq!(writer.read("k19").await.as_deref(), Some("v"));
    assert_eq!(reader.read("absent").await, None);
    let status = cluster.node(NodeId(1)).unwrap().status().await;
    assert!(status.server.records > 0 && status.links.iter().all(|l| l.is_connected), "{status:?}");
    assert!(!status.server.state.is_empty());
    cluster.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_protocol_of_the_registry_is_served() {
    for row in registry::rows() {
        let dir = tempfile::tempdir().unwrap();
        let plan = plan(dir.path(), map(3, Duration::from_millis(1)));
        let cluster = cluster(Plan { protocol: row.name, ..plan }).await;
        let mut client = Client::at(&cluster, 1).await;
        client.run(&[Op::Add("n".into(), 1)]).await;
        assert_eq!(client.read("n").await.as_deref(), Some("1"), "{}", row.name);
        cluster.shutdown(Duration::from_secs(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn everything_acknowledged_survives_the_death_of_every_process() {
    for protocol in registry::representatives() {
        acknowledged_survives(protocol).await;
    }
}

/// How often all of them die.
const DEATHS: u32 = 5;

async fn acknowledged_survives(protocol: &'static str) {
    let dir = tempfile::tempdir().unwrap();
    let plan = plan(dir.path(), map(3, Duration::from_millis(1)));
    let mut cluster = cluster(Plan { protocol, ..plan }).await;
    let nodes: Vec<NodeId> = cluster.nodes().collect();
    let mut acknowledged: OrdMap<String, u64> = OrdMap::new();
    let mut asked: OrdMap<String, u64> = OrdMap::new();
    for round in 0..DEATHS {
        let mut tasks = Vec::new();
        let enough = Arc::new(tokio::sync::Semaphore::new(0));
        for node in 1..=3 {
            let mut client = Client::at(&cluster, node).await;
            let enough = enough.clone();
            tasks.push(tokio::spawn(async move {
                let key = format!("counter{node}");
                let (mut committed, mut tried) = (0, 0);
                // Until the node is killed under it.
                loop {
                    tried += 1;
                    match client.increment(&key).await {
                        Ok(Outcome::Committed(_)) => {
                            committed += 1;
                            enough.add_permits(1);
                        }
                        Ok(Outcome::Aborted(_) | Outcome::Unknown) => {}
                        Err(_) => return (key, committed, tried),
                    }
                }
            }));
        }
        let commits = enough.acquire_many(20 + 7 * round);
        let _ = within(&format!("{protocol}: enough commits in round {round}"), commits).await;
        for node in &nodes {
            cluster.kill(*node).await;
        }
        for task in tasks {
            let (key, committed, tried) = task.await.unwrap();
            *acknowledged.entry(key.clone()).or_default() += committed;
            *asked.entry(key).or_default() += tried;
        }
        for node in &nodes {
            cluster.restart(*node).await.unwrap();
        }
        let mut reader = Client::at(&cluster, 1 + round % 3).await;
        for (key, told) in &acknowledged {
            let found: u64 = reader.read(key).await.map_or(0, |text| text.parse().unwrap());
            assert!(found >= *told, "{protocol}, {key}: {told} acknowledged, {found} found");
            let tried = asked[key];
            assert!(found <= tried, "{protocol}, {key}: {tried} tried, {found} found");
        }
    }
    let total: u64 = acknowledged.values().sum();
    println!("{protocol}: {total} acknowledged increments over {DEATHS} deaths of all processes");
    cluster.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_dead_node_of_three_does_not_stop_the_others() {
    for protocol in registry::representatives() {
        others_go_on(protocol).await;
    }
}

async fn others_go_on(protocol: &'static str) {
    let dir = tempfile::tempdir().unwrap();
    let plan = plan(dir.path(), map(3, Duration::from_millis(1)));
    let mut cluster = cluster(Plan { protocol, ..plan }).await;
    let mut client = Client::at(&cluster, 1).await;
    let keys: Vec<String> = (0..10).map(|n| format!("key{n}")).collect();
    for key in &keys {
        client.run(&[Op::Put(key.as_str().into(), "before".into())]).await;
    }
    cluster.kill(NodeId(2)).await;
    let others = async {
        for key in &keys {
            client.run_whatever_happens(&[Op::Put(key.as_str().into(), "after".into())]).await;
        }
    };
    within(&format!("{protocol}: every partition commits without the dead node"), others).await;
    for key in &keys {
        assert_eq!(client.read(key).await.as_deref(), Some("after"), "{protocol}, {key}");
    }
    cluster.restart(NodeId(2)).await.unwrap();
    let mut other = Client::at(&cluster, 2).await;
    for key in &keys {
        assert_eq!(other.read(key).await.as_deref(), Some("after"), "{protocol}, {key}");
    }
    // Those that went on without it do without another now.
    cluster.kill(NodeId(3)).await;
    for key in &keys {
        let op = [Op::Put(key.as_str().into(), "again".into())];
        let awaited = format!("{protocol}: {key} is written with the node that came back");
        within(&awaited, client.run_whatever_happens(&op)).await;
    }
    cluster.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_procedure_that_is_sent_again_is_told_its_outcome() {
    for protocol in registry::rows().map(|row| row.name) {
        let dir = tempfile::tempdir().unwrap();
        let plan = plan(dir.path(), map(3, Duration::from_millis(1)));
        let cluster = cluster(Plan { protocol, durability: Durability::None, ..plan }).await;
        let mut client = Client::at(&cluster, 1).await;
        let add = Txn::procedure(client.next(), RegionId(0), vec![Op::Add("n".into(), 1)]);
        let mut told = Vec::new();
        for _ in 0..3 {
            match within(protocol, client.gateway.begin(add.clone())).await.unwrap() {
                Begun::Finished(finished) => told.push(finished.outcome),
                Begun::Reads(_) => panic!("a procedure has one round"),
            }
        }
        assert!(told.iter().all(|outcome| *outcome == told[0]), "{protocol}: {told:?}");
        let other = Txn::procedure(add.id, RegionId(0), vec![Op::Add("n".into(), 2)]);
        let refused = within(protocol, client.gateway.begin(other)).await;
        assert_eq!(refused, Err(GatewayError::Used(add.id)), "{protocol}");
        let count = u64::from(matches!(told[0], Outcome::Committed(_)));
        let found = client.read("n").await.map_or(0, |text| text.parse().unwrap());
        assert_eq!(found, count, "{protocol}: {told:?}");
        cluster.shutdown(Duration::from_secs(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_that_goes_away_leaves_nothing_locked() {
    let dir = tempfile::tempdir().unwrap();
    let cluster = cluster(plan(dir.path(), map(3, Duration::from_millis(1)))).await;
    let mut client = Client::at(&cluster, 1).await;
    client.run(&[Op::Put("k".into(), "1".into())]).await;
    // Gone before its reads came.
    let txn = Txn::interactive(client.next(), RegionId(0), vec!["k".into()], vec!["k".into()]);
    let gateway = client.gateway.clone();
    let begin = tokio::spawn(async move { gateway.begin(txn).await });
    tokio::task::yield_now().await;
    begin.abort();
    let _ = begin.await;
    client.run(&[Op::Add("k".into(), 1)]).await;
    // Names: used twice, decided twice, unknown.
    let (txn, _) = client.open("k").await;
    let again = client.gateway.begin(txn.clone()).await;
    assert_eq!(again, Err(GatewayError::AlreadyBegun(txn.id)));
    client.gateway.decide(txn.id, Decision::Abort).await.unwrap();
    let (txn, reads, finished) = client.add_one("k").await;
    let (id, decision) = (txn.id, Decision::Commit(plus_one(&reads)));
    let again = client.gateway.decide(id, decision.clone()).await;
    assert_eq!(again, Err(GatewayError::UnknownTransaction(id)));
    // Asking gives the same outcome as it was told.
    let asked = client.gateway.resolve(txn, reads, Some(decision)).await.unwrap();
    assert_eq!(asked.outcome, finished.outcome);
    assert_eq!(client.read("k").await.as_deref(), Some("3"));
    cluster.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_over_its_limit_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let mut plan = plan(dir.path(), map(3, Duration::from_millis(1)));
    plan.in_flight_max = 3;
    let cluster = cluster(plan).await;
    let mut client = Client::at(&cluster, 1).await;
    let mut open = Vec::new();
    for n in 0..3 {
        let key = vec![Key::from(format!("k{n}"))];
        let txn = Txn::interactive(client.next(), RegionId(0), key.clone(), key);
        open.push(txn.id);
        assert!(matches!(client.gateway.begin(txn).await, Ok(Begun::Reads(_))));
    }
    let error = client.increment("k9").await.unwrap_err();
    assert_eq!(error, GatewayError::Overloaded { limit: 3 });
    assert!(error.is_retryable());
    assert_eq!(client.gateway.describe().in_flight, 3);
    for id in open {
        let finished = client.gateway.decide(id, Decision::Abort).await.unwrap();
        assert!(matches!(finished.outcome, Outcome::Aborted(_)));
    }
    client.run(&[Op::Put("k9".into(), "1".into())]).await;
    cluster.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_bytes_of_transactions_in_flight_are_bounded_and_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let cluster = cluster(plan(dir.path(), map(3, Duration::from_millis(1)))).await;
    let mut client = Client::at(&cluster, 1).await;
    client.run(&[Op::Put("k".into(), "1".into())]).await;
    let value = Value::from(vec![b'x'; 1 << 20]);
    for _ in 0..3 {
        let mut callers = Vec::new();
        for number in 0..100 {
            let puts = vec![Op::Put(format!("k{number}").into(), value.clone())];
            let txn = Txn::procedure(client.next(), RegionId(0), puts);
            let gateway = client.gateway.clone();
            // The first step of each takes its place before the next one's.
            let mut caller = Box::pin(async move { gateway.begin(txn).await });
            let first = std::future::poll_fn(|cx| std::task::Poll::Ready(caller.as_mut().poll(cx)));
            match first.await {
                std::task::Poll::Ready(answer) => callers.push(tokio::spawn(async { answer })),
                std::task::Poll::Pending => callers.push(tokio::spawn(caller)),
            }
        }
        let mut refused = 0;
        for caller in callers {
            match within("every caller has an answer", caller).await.unwrap() {
                Ok(Begun::Finished(finished)) => assert_ne!(finished.outcome, Outcome::Unknown),
                Err(GatewayError::OverloadedBytes { bytes, limit }) => {
                    refused += 1;
                    assert!(bytes > value.len() && limit == 64 << 20);
                }
                other => panic!("{other:?}"),
            }
        }
        println!("{refused} of 100 were refused");
        assert!(refused > 0, "100 MiB were in flight at once");
    }
    client.run(&[Op::Put("k".into(), value)]).await;
    cluster.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shutdown_finishes_what_is_in_flight() {
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = cluster(plan(dir.path(), map(3, Duration::from_millis(1)))).await;
    let mut client = Client::at(&cluster, 1).await;
    client.run(&[Op::Put("k".into(), "1".into())]).await;
    client.add_one("k").await;
    let (txn, reads) = client.open("k").await;
    let (id, gateway) = (txn.id, client.gateway.clone());
    let decide = async {
        while client.gateway.describe().health == orthodrome_server::gateway::Health::Serving {
            tokio::task::yield_now().await;
        }
        let refused = client.gateway.register().await;
        assert_eq!(refused, Err(GatewayError::Stopping));
        gateway.decide(id, Decision::Commit(plus_one(&reads))).await
    };
    let (finished, ()) = tokio::join!(decide, async {
        cluster.shutdown_node(NodeId(1), Duration::from_secs(10)).await;
    });
    // The one before may hold the key still, and then this one aborts; it has an outcome.
    let expected = match finished.unwrap().outcome {
        Outcome::Committed(_) => "3",
        Outcome::Aborted(_) => "2",
        Outcome::Unknown => panic!("a shutdown left a caller without an outcome"),
    };
    cluster.restart(NodeId(1)).await.unwrap();
    let mut client = Client::at(&cluster, 1).await;
    assert_eq!(client.read("k").await.as_deref(), Some(expected));
    cluster.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clock_that_jumps_stops_its_node_until_it_is_right_again() {
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = cluster(plan(dir.path(), map(3, Duration::from_millis(1)))).await;
    let mut client = Client::at(&cluster, 1).await;
    client.run(&[Op::Put("k".into(), "1".into())]).await;
    let skew = cluster.skew(NodeId(1));
    skew.store(-3_600_000_000_000, Ordering::Relaxed);
    let node = cluster.node(NodeId(1)).unwrap();
    let why = within("a node whose clock has jumped stops", node.failed()).await;
    assert!(why.contains("clock") && why.contains("moved by -3"), "{why}");
    assert!(matches!(client.increment("k").await, Err(GatewayError::Failed(_))));
    cluster.kill(NodeId(1)).await;
    let error = cluster.restart(NodeId(1)).await.unwrap_err();
    assert!(
        matches!(error, StartError::ClockBehind { behind_ms } if behind_ms > 3_500_000),
        "{error}"
    );
    skew.store(0, Ordering::Relaxed);
    cluster.restart(NodeId(1)).await.unwrap();
    let mut client = Client::at(&cluster, 1).await;
    assert_eq!(client.read("k").await.as_deref(), Some("1"));
    cluster.shutdown(Duration::from_secs(5)).await;
}

/// The groups of partition 0 as the server side of `node` sees them.
async fn group_at(cluster: &EmbeddedCluster, node: NodeId) -> Option<GroupView> {
    let groups = cluster.gateway(node)?.groups().await;
    groups.into_iter().find(|group| group.partition == PartitionId(0))
}

/// Gives an order to one server after the other until one takes it, and returns that one. A server
/// that does not lead names one that it takes for the leader, or says that it knows none.
async fn taken(cluster: &EmbeddedCluster, order: &Admin) -> NodeId {
    let nodes: Vec<NodeId> = cluster.nodes().collect();
    let tries = async {
        let mut at = nodes[0];
        for turn in 0.. {
            match cluster.gateway(at).unwrap().admin(order.clone()).await {
                Ok(()) => return at,
                Err(OrderError::Refused(Refusal::NotLeader(Some(leader)))) => {
                    assert_ne!(leader, at, "who refuses does not lead");
                    at = leader;
                }
                Err(OrderError::Refused(Refusal::NotLeader(None) | Refusal::NotNow(_))) => {
                    at = nodes[turn % nodes.len()];
                }
                Err(error) => panic!("{error}"),
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        unreachable!("the turns do not end")
    };
    within(&format!("a server takes {order:?}"), tries).await
}

/// Makes these the voters, and waits until that is so. An order fails if the leader changes before its
/// new voters have caught up; then it is given again.
async fn change_members(cluster: &EmbeddedCluster, voters: &[NodeId]) {
    let (partition, voters) = (PartitionId(0), voters.to_vec());
    let order = Admin::ChangeMembers { partition, voters: voters.clone(), learners: vec![] };
    let changed = async {
        loop {
            let at = cluster.gateway(taken(cluster, &order).await).unwrap();
            loop {
                let mut orders = at.orders().await.into_iter().map(|(order, _)| order);
                match orders.rfind(|order| order.voters == voters).unwrap().state {
                    OrderState::Finished => return,
                    OrderState::Failed(why) => {
                        println!("given again: {why}");
                        break;
                    }
                    OrderState::Pending(_) => tokio::time::sleep(Duration::from_millis(5)).await,
                    OrderState::NotLeader(_) => panic!("it said that it takes the order"),
                }
            }
        }
    };
    within(&format!("{voters:?} are the voters"), changed).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_order_to_a_server_that_does_not_lead_is_refused_and_names_the_leader() {
    let members = [carousel::BASIC, two_phase_locking::BY_AGE, natto::RECSF, deterministic::CALVIN];
    for protocol in members {
        let dir = tempfile::tempdir().unwrap();
        let plan = plan(dir.path(), map(4, Duration::from_millis(1)));
        let cluster = cluster(Plan { protocol, ..plan }).await;
        let (partition, first) = (PartitionId(0), NodeId(1));
        let mut client = Client::at(&cluster, 1).await;
        client.run(&[Op::Put("k".into(), "1".into())]).await;
        // Leadership goes where it is ordered to, whoever is told first.
        for to in [2, 3, 2].map(NodeId) {
            let order = Admin::TransferLeader { partition, to };
            taken(&cluster, &order).await;
            let leads = async {
                while group_at(&cluster, to).await.and_then(|group| group.leader) != Some(to) {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            // The preferred leader may take it back at once.
            let _ = tokio::time::timeout(Duration::from_secs(2), leads).await;
        }
        let nobody = Admin::TransferLeader { partition, to: NodeId(4) };
        let refused = async {
            loop {
                let leader = group_at(&cluster, first).await.and_then(|group| group.leader);
                let Some(leader) = leader else { continue };
                let answer = cluster.gateway(leader).unwrap().admin(nobody.clone()).await;
                if let Err(OrderError::Refused(Refusal::Invalid(why))) = answer {
                    return why;
                }
            }
        };
        let why = within("a server that does not vote is refused", refused).await;
        assert!(why.contains("n4 does not vote"), "{protocol}: {why}");
        change_members(&cluster, &[2, 3, 4].map(NodeId)).await;
        client.run(&[Op::Add("k".into(), 1)]).await;
        assert_eq!(client.read("k").await.as_deref(), Some("2"), "{protocol}");
        // Those who vote know it, and the one that does not hears of it.
        let is_known = async {
            for node in cluster.nodes() {
                while group_at(&cluster, node).await.is_none_or(|group| {
                    let mut voters = group.voters;
                    voters.sort();
                    voters != [2, 3, 4].map(NodeId)
                }) {
                    client.run(&[Op::Add("k".into(), 1)]).await;
                }
            }
        };
        within(&format!("{protocol}: every node knows the voters"), is_known).await;
        cluster.shutdown(Duration::from_secs(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_protocol_whose_members_never_change_says_so() {
    for protocol in [tapir::NAME, ocean_vista::NAME] {
        let dir = tempfile::tempdir().unwrap();
        let plan = plan(dir.path(), map(3, Duration::from_millis(1)));
        let cluster = cluster(Plan { protocol, ..plan }).await;
        let (partition, voters) = (PartitionId(0), vec![NodeId(1)]);
        let orders = [
            Admin::TransferLeader { partition, to: NodeId(2) },
            Admin::ChangeMembers { partition, voters, learners: vec![] },
        ];
        for order in orders {
            let answer = cluster.gateway(NodeId(1)).unwrap().admin(order).await;
            let Err(OrderError::Refused(Refusal::Never(why))) = answer else {
                panic!("{answer:?}")
            };
            assert!(why.contains("none of them leads"), "{why}");
        }
        cluster.shutdown(Duration::from_secs(5)).await;
    }
}

/// The members of now are none of the placement's but one. The leader ends in good order: another one
/// leads when it has ended, long before an election would have made one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_that_ends_hands_over_to_a_member_of_now() {
    let dir = tempfile::tempdir().unwrap();
    // Elections take four times as long as the longest round trip of the map.
    let rtt = Duration::from_secs(2);
    let topology = Topology::uniform(5, Duration::from_micros(100), rtt);
    let map = Arc::new(Cluster::spread(topology, 1, 1, 1, 3).unwrap());
    let mut cluster = cluster(plan(dir.path(), map)).await;
    let mut client = Client::at(&cluster, 1).await;
    client.run(&[Op::Put("k".into(), "1".into())]).await;
    let voters = [3, 4, 5].map(NodeId);
    change_members(&cluster, &voters).await;
    taken(&cluster, &Admin::TransferLeader { partition: PartitionId(0), to: NodeId(5) }).await;
    let leads = async {
        while group_at(&cluster, NodeId(5)).await.and_then(|group| group.leader) != Some(NodeId(5))
        {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    within("n5 leads", leads).await;
    cluster.shutdown_node(NodeId(5), Duration::from_secs(60)).await;
    let others = [3, 4].map(NodeId);
    let is_handed_over = async {
        loop {
            for node in others {
                let leader = group_at(&cluster, node).await.and_then(|group| group.leader);
                if leader.is_some_and(|leader| others.contains(&leader)) {
                    return;
                }
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    // The vote may still be under way on a busy machine; no election can begin within this time.
    let handed_over = tokio::time::timeout(rtt * 3, is_handed_over).await;
    assert!(handed_over.is_ok(), "nobody else leads");
    assert_eq!(client.read("k").await.as_deref(), Some("1"));
    cluster.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_machine_is_a_planet() {
    let dir = tempfile::tempdir().unwrap();
    let rtt = Duration::from_millis(40);
    let mut plan = plan(dir.path(), map(3, rtt));
    plan.emulate_wan = true;
    plan.durability = Durability::None;
    let cluster = cluster(plan).await;
    let mut client = Client::at(&cluster, 1).await;
    for n in 0..10 {
        client.run(&[Op::Put(format!("k{n}").into(), "1".into())]).await;
    }
    // A read-only transaction takes one round trip to each leader; one of three is at home.
    let mut spans = Vec::new();
    for n in 0..10 {
        let start = Instant::now();
        client.read(&format!("k{n}")).await;
        spans.push(start.elapsed());
    }
    spans.sort();
    println!("read-only latencies over {rtt:?}: {spans:?}");
    let far = spans.iter().filter(|span| **span >= rtt).count();
    assert!(far > 0 && far < 10, "{spans:?}");
    cluster.shutdown(Duration::from_secs(5)).await;
}

/// Two-phase locking on real sockets: rounds that depend on each other, a conflict between two of
/// them, callers that go away between and within rounds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn general_transactions_read_as_they_go_along() {
    let dir = tempfile::tempdir().unwrap();
    let plan = plan(dir.path(), map(3, Duration::from_millis(1)));
    let plan = Plan { protocol: two_phase_locking::BY_AGE, ..plan };
    let cluster = EmbeddedCluster::start(plan).await.unwrap();
    let gateway = cluster.gateway(NodeId(1)).unwrap();
    assert!(gateway.describe().general);
    let mut client = Client { id: gateway.register().await.unwrap(), gateway, counter: 0 };
    client.run(&[Op::Put("a".into(), "b".into()), Op::Put("b".into(), "treasure".into())]).await;
    let reads = |begun: Begun| match begun {
        Begun::Reads(reads) => reads,
        Begun::Finished(finished) => panic!("{finished:?}"),
    };

    let id = client.next();
    let first = vec![Key::from("a")];
    let begun = client.gateway.begin(Txn::general(id, RegionId(0), first)).await.unwrap();
    let next = reads(begun).remove(&Key::from("a")).unwrap().value.unwrap();
    let next = Key::from(next.0);
    let round = client.gateway.read(id, vec![next.clone(), "a".into()]).await.unwrap();
    let found = reads(round);
    assert_eq!(found.len(), 2);
    let found = found[&next].value.clone();
    let decision = Decision::Commit(Writes::from([("c".into(), found)]));
    let ended = client.gateway.decide(id, decision).await.unwrap();
    assert!(matches!(ended.outcome, Outcome::Committed(_)), "{ended:?}");
    assert_eq!(ended.reads.unwrap().len(), 2, "all rounds together");
    assert_eq!(client.read("c").await.as_deref(), Some("treasure"));
    let over = client.gateway.read(id, vec!["a".into()]).await.unwrap_err();
    assert_eq!(over, GatewayError::UnknownTransaction(id));

    // One that reads what an older one then writes hears of its end when it reads on.
    let (old, young) = (client.next(), client.next());
    for id in [old, young] {
        let general = Txn::general(id, RegionId(0), Vec::new());
        assert_eq!(reads(client.gateway.begin(general).await.unwrap()), Reads::new());
        // Ages are those of the gateway's clock.
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    reads(client.gateway.read(young, vec!["a".into()]).await.unwrap());
    let decision = Decision::Commit(Writes::from([("a".into(), Some("d".into()))]));
    let ended = client.gateway.decide(old, decision).await.unwrap();
    assert!(matches!(ended.outcome, Outcome::Committed(_)), "{ended:?}");
    let wounded = client.gateway.read(young, vec!["b".into()]).await.unwrap();
    let Begun::Finished(finished) = wounded else { panic!("{wounded:?}") };
    assert_eq!(finished.outcome, Outcome::Aborted(AbortReason::Conflict));

    // A caller that goes away while it waits in a round frees what it holds.
    let (holder, waiter) = (client.open("a").await.0, client.next());
    let general = Txn::general(waiter, RegionId(0), vec!["b".into()]);
    reads(client.gateway.begin(general).await.unwrap());
    let waiting = client.gateway.read(waiter, vec!["a".into()]);
    assert!(tokio::time::timeout(Duration::from_millis(50), waiting).await.is_err());
    client.gateway.decide(holder.id, Decision::Abort).await.unwrap();
    let writer = client.run(&[Op::Put("b".into(), "new".into())]).await;
    assert!(matches!(writer.outcome, Outcome::Committed(_)));
    cluster.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_protocol_without_general_transactions_refuses_them() {
    let dir = tempfile::tempdir().unwrap();
    let cluster = cluster(plan(dir.path(), map(3, Duration::from_millis(1)))).await;
    let mut client = Client::at(&cluster, 1).await;
    assert!(!client.gateway.describe().general);
    let txn = Txn::general(client.next(), RegionId(0), vec!["a".into()]);
    let begun = client.gateway.begin(txn).await.unwrap();
    let Begun::Finished(finished) = begun else { panic!("{begun:?}") };
    assert_eq!(finished.outcome, Outcome::Aborted(AbortReason::Invalid));
    cluster.shutdown(Duration::from_secs(5)).await;
}

/// Scans a prefix page by page, at this gateway.
async fn scanned(gateway: &Gateway, prefix: &str, backwards: bool, limit: usize) -> Vec<String> {
    let (mut keys, mut rest) = (Vec::new(), Some(KeyRange::prefix(prefix.as_bytes())));
    while let Some(range) = rest {
        let scan = Scan { range, backwards, limit };
        let page = loop {
            match gateway.scan(scan.clone(), Priority::LOW).await {
                Ok(page) => break page,
                // Leaders may change after a death.
                Err(ScanFailed::Scan(_) | ScanFailed::Late) => {}
                Err(error) => panic!("{error}"),
            }
        };
        keys.extend(page.rows.into_iter().map(|(key, _)| key.to_string()));
        rest = page.rest;
    }
    keys
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_scan_shows_whole_transactions_while_others_create_and_delete_keys() {
    for protocol in registry::representatives() {
        within(&format!("{protocol}: scans beside writes"), scans_beside_writes(protocol)).await;
    }
}

/// The pairs of keys that are created, and how many exist at once.
const PAIRS: u64 = 60;
const KEPT: u64 = 12;

async fn scans_beside_writes(protocol: &'static str) {
    let dir = tempfile::tempdir().unwrap();
    let plan = plan(dir.path(), map(3, Duration::from_millis(1)));
    let cluster = cluster(Plan { protocol, durability: Durability::None, ..plan }).await;
    let (created, asked) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let mut writer = Client::at(&cluster, 2).await;
    let (acknowledged, deleting) = (created.clone(), asked.clone());
    let writing = tokio::spawn(async move {
        let pair =
            |number: u64| ["a", "b"].map(|half| Key::from(format!("pair/{number:03}/{half}")));
        for number in 0..PAIRS {
            let puts = pair(number).map(|key| Op::Put(key, "v".into()));
            let mut ops = puts.to_vec();
            if number >= KEPT {
                deleting.store(number - KEPT + 1, Ordering::SeqCst);
                ops.extend(pair(number - KEPT).map(Op::Delete));
            }
            writer.run_whatever_happens(&ops).await;
            acknowledged.store(number + 1, Ordering::SeqCst);
        }
    });
    let gateway = cluster.node(NodeId(1)).unwrap().gateway();
    let scan = Scan { range: KeyRange::prefix(b"pair/"), backwards: false, limit: 1_000 };
    let mut scans = 0;
    loop {
        let is_over = writing.is_finished();
        let before = created.load(Ordering::SeqCst);
        let page = gateway.scan(scan.clone(), Priority::LOW).await.unwrap();
        let deleted = asked.load(Ordering::SeqCst);
        scans += 1;
        let mut keys: Vec<String> = page.rows.iter().map(|(key, _)| key.to_string()).collect();
        // A page ends early where keys are created all the time, perhaps within a pair.
        let end = page.rest.map(|rest| rest.from.to_string()).unwrap_or_else(|| "pair/999".into());
        keys.retain(|key| key[..8] < end[..8]);
        assert!(keys.is_sorted_by(|a, b| a < b), "{protocol}: {keys:?}");
        let numbers: Vec<u64> = keys.iter().map(|key| key[5..8].parse().unwrap()).collect();
        let (pairs, alone) = numbers.as_chunks::<2>();
        assert!(
            alone.is_empty() && pairs.iter().all(|[a, b]| a == b),
            "{protocol}: half of a transaction in {keys:?}"
        );
        assert!(pairs.len() as u64 <= KEPT, "{protocol}: two moments in {keys:?}");
        let end: u64 = end[5..8].parse().unwrap();
        for number in (deleted..before).filter(|number| *number < end) {
            let is_there = pairs.iter().any(|[a, _]| *a == number);
            assert!(is_there, "{protocol}: pair {number} was acknowledged, and is not in {keys:?}");
        }
        if is_over {
            break;
        }
    }
    println!("{protocol}: {scans} scans beside {PAIRS} transactions");
    writing.await.unwrap();
    cluster.shutdown(Duration::from_secs(5)).await;
}

/// An open transaction may create any key that it has declared, and no other one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_scan_does_not_wait_for_an_open_transaction_with_keys_elsewhere() {
    for protocol in registry::representatives() {
        within(&format!("{protocol}: a scan"), scan_beside_open_transaction(protocol)).await;
    }
}

async fn scan_beside_open_transaction(protocol: &'static str) {
    let dir = tempfile::tempdir().unwrap();
    let plan = plan(dir.path(), map(3, Duration::from_millis(1)));
    let cluster = cluster(Plan { protocol, durability: Durability::None, ..plan }).await;
    let mut client = Client::at(&cluster, 1).await;
    client.run_whatever_happens(&[Op::Put("key/1".into(), "v".into())]).await;
    let mut holder = Client::at(&cluster, 2).await;
    let (open, _) = holder.open("other").await;
    assert_eq!(scanned(&client.gateway, "key/", false, 10).await, ["key/1"], "{protocol}");
    // It was still pending: it commits.
    let decision = Decision::Commit(Writes::from([("other".into(), Some("v".into()))]));
    let ended = holder.gateway.decide(open.id, decision).await.unwrap();
    assert!(matches!(ended.outcome, Outcome::Committed(_)), "{protocol}: {ended:?}");
    assert_eq!(scanned(&client.gateway, "other", false, 10).await, ["other"], "{protocol}");
    cluster.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranges_are_scanned_without_a_dead_node_and_after_the_death_of_all() {
    for protocol in registry::representatives() {
        within(&format!("{protocol}: scans after deaths"), scans_after_deaths(protocol)).await;
    }
}

async fn scans_after_deaths(protocol: &'static str) {
    let dir = tempfile::tempdir().unwrap();
    let plan = plan(dir.path(), map(3, Duration::from_millis(1)));
    let mut cluster = cluster(Plan { protocol, ..plan }).await;
    let mut client = Client::at(&cluster, 1).await;
    let mut expected = Vec::new();
    for number in 0..25 {
        let key = format!("key/{number:02}");
        client.run_whatever_happens(&[Op::Put(key.as_str().into(), "v".into())]).await;
        expected.push(key);
    }
    client
        .run_whatever_happens(&[Op::Delete("key/07".into()), Op::Put("other".into(), "v".into())])
        .await;
    expected.remove(7);
    let gateway = cluster.node(NodeId(1)).unwrap().gateway();
    assert_eq!(scanned(&gateway, "key/", false, 1_000).await, expected, "{protocol}");
    cluster.kill(NodeId(2)).await;
    assert_eq!(scanned(&gateway, "key/", false, 10).await, expected, "{protocol}");
    for node in [1, 3] {
        cluster.kill(NodeId(node)).await;
    }
    for node in 1..=3 {
        cluster.restart(NodeId(node)).await.unwrap();
    }
    let gateway = cluster.node(NodeId(3)).unwrap().gateway();
    expected.reverse();
    assert_eq!(scanned(&gateway, "key/", true, 7).await, expected, "{protocol}");
    assert_eq!(scanned(&gateway, "nothing/", true, 7).await, Vec::<String>::new(), "{protocol}");
    cluster.shutdown(Duration::from_secs(5)).await;
}

/// Two gateways watch while nodes die and come back; then one watch goes on at another gateway.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watches_show_every_change_once_while_nodes_die_and_return() {
    for protocol in registry::representatives() {
        within(&format!("{protocol}: watches beside deaths"), watches_beside_deaths(protocol))
            .await;
    }
}

/// The changes of a watch up to a timestamp, by key: the timestamps and the values.
type Seen = OrdMap<(Key, u64), Option<Value>>;

/// Watches until everything up to `until` was shown. A watch that breaks off goes on at the next gateway.
async fn watched(
    cluster: &EmbeddedCluster,
    nodes: &[u32],
    mut after: Timestamp,
    until: Timestamp,
) -> (Seen, Timestamp) {
    let mut seen = Seen::new();
    let mut last = None;
    for node in nodes.iter().cycle() {
        let range = KeyRange::prefix(b"key/");
        let gateway = cluster.node(NodeId(*node)).map(|node| node.gateway());
        let Some(Ok(mut batches)) = gateway.map(|gateway| gateway.watch(range, Some(after))) else {
            tokio::time::sleep(Duration::from_millis(20)).await;
            continue;
        };
        while let Some(Ok(batch)) = batches.recv().await {
            for change in batch.changes {
                let at = change.version.timestamp;
                assert!(after < at && at <= batch.through, "{at} of {after}..={}", batch.through);
                let place = (at, change.key.clone());
                assert!(last.as_ref().is_none_or(|last| *last < place), "{last:?} {place:?}");
                last = Some(place);
                seen.insert((change.key, at.0), change.value);
            }
            after = batch.through;
            if after >= until {
                return (seen, after);
            }
        }
    }
    (seen, after)
}

async fn watches_beside_deaths(protocol: &'static str) {
    let dir = tempfile::tempdir().unwrap();
    let plan = plan(dir.path(), map(3, Duration::from_millis(1)));
    let mut cluster = cluster(Plan { protocol, ..plan }).await;
    let mut client = Client::at(&cluster, 1).await;
    let put =
        |number: usize| Op::Put(format!("key/{}", number % 7).into(), format!("{number}").into());
    let gateway = cluster.node(NodeId(1)).unwrap().gateway();
    let mut begun = gateway.watch(KeyRange::prefix(b"key/"), None).unwrap();
    // From here on, everything is shown.
    let start = begun.recv().await.unwrap().unwrap().through;
    let mut told: OrdMap<(Key, u64), Option<Value>> = OrdMap::new();
    let mut end = start;
    let mut commit = async |client: &mut Client, op: Op| {
        let (key, value) = match &op {
            Op::Put(key, value) => (key.clone(), Some(value.clone())),
            Op::Delete(key) => (key.clone(), None),
            Op::Get(_) | Op::Compare(..) | Op::Add(..) | Op::Append(..) | Op::Call(_) => {
                unreachable!("the test puts and deletes")
            }
        };
        let txn = Txn::procedure(client.next(), RegionId(0), vec![op]);
        let Ok(Begun::Finished(finished)) = client.gateway.begin(txn).await else { return };
        if let Outcome::Committed(at) = finished.outcome {
            told.insert((key, at.0), value);
            end = end.max(at);
        }
    };
    for number in 1..40 {
        commit(&mut client, put(number)).await;
        if number % 5 == 0 {
            commit(&mut client, Op::Delete(format!("key/{}", number % 7).into())).await;
        }
        match number {
            12 => cluster.kill(NodeId(3)).await,
            24 => cluster.restart(NodeId(3)).await.unwrap(),
            _ => {}
        }
    }
    assert!(told.len() > 20, "{protocol}: {} commits", told.len());
    let (whole, _) = watched(&cluster, &[1, 2, 3], start, end).await;
    // The same again, where all nodes have restarted in the middle.
    let middle = Timestamp(told.keys().map(|(_, at)| *at).nth(told.len() / 2).unwrap());
    let (mut parts, from) = watched(&cluster, &[2], start, middle).await;
    for node in [1, 2, 3] {
        cluster.kill(NodeId(node)).await;
    }
    for node in [1, 2, 3] {
        cluster.restart(NodeId(node)).await.unwrap();
    }
    parts.extend(watched(&cluster, &[3, 1], from, end).await.0);
    let shown = |seen: &Seen| -> Seen {
        seen.iter()
            .filter(|(place, _)| told.contains_key(*place))
            .map(|(k, v)| (k.clone(), v.clone()))
            .collect()
    };
    assert_eq!(shown(&whole), told, "{protocol}");
    assert_eq!(shown(&parts), told, "{protocol}: in two parts");
    cluster.shutdown(Duration::from_secs(5)).await;
}
