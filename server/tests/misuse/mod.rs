//! Clients that use one name for several transactions (ADR 46). They may get any answer, but no node
//! ends, no replicas differ, and nothing stays locked for others.

use std::time::Duration;

use orthodrome_core::txn::{Op, Read, Reads, Version, Writes};
use orthodrome_core::{Decision, Key, NodeId, Outcome, RegionId, Txn, TxnId, Value};
use orthodrome_protocols::registry;
use orthodrome_server::gateway::{Begun, Finished, Gateway, GatewayError, Health};
use orthodrome_server::node::embedded::{EmbeddedCluster, Plan};

use super::{Client, cluster, map, plan, within};

/// The keys that all transactions here fight for. They are in different partitions.
const KEYS: [&str; 4] = ["a", "s", "b", "k"];
/// So many names are used for several transactions each.
const ROUNDS: u64 = 12;

fn put(key: &str, value: u64) -> Op {
    Op::Put(key.into(), value.to_string().into())
}

/// Three contents for one name, which write different keys.
fn contents(round: u64) -> [Vec<Op>; 3] {
    [
        vec![put("a", round), Op::Add("k".into(), 1)],
        vec![Op::Add("s".into(), 1), Op::Add("a".into(), 1)],
        vec![put("b", round), Op::Add("s".into(), 2), Op::Delete("k".into())],
    ]
}

fn procedure(id: TxnId, home: u16, ops: Vec<Op>) -> Txn {
    Txn::procedure(id, RegionId(home), ops)
}

fn interactive(id: TxnId) -> Txn {
    let keys: Vec<Key> = KEYS.iter().map(|key| Key::from(*key)).collect();
    Txn::interactive(id, RegionId(0), keys.clone(), keys)
}

fn writes(keys: &[&str], value: u64) -> Writes {
    let write = |key: &&str| (Key::from(*key), Some(Value::from(value.to_string())));
    keys.iter().map(write).collect()
}

fn seen(reads: &Reads) -> Reads {
    let version = |(key, read): (&Key, &Read)| (key.clone(), Read::without_value(read.compared()));
    reads.iter().map(version).collect()
}

/// The outcome of a call that may be refused, but must be answered.
async fn answered(
    awaited: &str,
    call: impl Future<Output = Result<Finished, GatewayError>>,
) -> Option<Outcome> {
    match within(awaited, call).await {
        Ok(finished) => Some(finished.outcome),
        Err(
            GatewayError::AlreadyBegun(_)
            | GatewayError::Used(_)
            | GatewayError::Unregistered(_)
            | GatewayError::UnknownTransaction(_)
            | GatewayError::NotUndecided(..),
        ) => None,
        Err(error) => panic!("{awaited}: {error}"),
    }
}

async fn begin(gateway: &Gateway, txn: Txn) -> Result<Finished, GatewayError> {
    match gateway.begin(txn).await? {
        Begun::Finished(finished) => Ok(finished),
        Begun::Reads(_) => panic!("a procedure has one round"),
    }
}

fn gateways(cluster: &EmbeddedCluster) -> [Gateway; 3] {
    [1, 2, 3].map(|node| cluster.gateway(NodeId(node)).unwrap())
}

/// One name, and three contents at three gateways at once.
async fn procedures(protocol: &str, cluster: &EmbeddedCluster) {
    let [first, second, third] = gateways(cluster);
    let mut client = Client::at(cluster, 1).await;
    for round in 0..ROUNDS {
        let id = client.next();
        let [one, two, three] = contents(round);
        let (home, elsewhere) = (0, u16::try_from(round % 3).unwrap());
        let next = TxnId { attempt: 1, ..id };
        // A question about an attempt that never began is an attempt, too. Ocean Vista believes its
        // client that the one before has aborted, so no outcome is compared then.
        let asks_for_next = round % 2 == 0;
        let ask = |gateway: &Gateway, txn: Txn| {
            let gateway = gateway.clone();
            async move { gateway.resolve(txn, Reads::new(), None).await }
        };
        let awaited = format!("{protocol}: {id}");
        let (second_begins, third_begins) = tokio::join!(
            begin(&second, procedure(id, home, two.clone())),
            begin(&third, procedure(id, home, three.clone())),
        );
        let refused = Err(GatewayError::Unregistered(id.client));
        assert_eq!((second_begins, third_begins), (refused.clone(), refused), "{protocol}");
        let calls = tokio::join!(
            answered(&awaited, begin(&first, procedure(id, home, one.clone()))),
            answered(&awaited, begin(&first, procedure(id, home, two.clone()))),
            answered(&awaited, begin(&first, procedure(next, home, three.clone()))),
            answered(&awaited, ask(&second, procedure(id, home, one.clone()))),
            answered(&awaited, ask(&second, procedure(id, elsewhere, two.clone()))),
            answered(&awaited, ask(&third, procedure(id, elsewhere, three.clone()))),
            answered(&awaited, async {
                let asked = if asks_for_next { next } else { id };
                ask(&third, procedure(asked, home, one.clone())).await
            }),
        );
        // What was begun has one outcome, wherever one asks for it.
        if let Some(outcome @ (Outcome::Committed(_) | Outcome::Aborted(_))) = calls.0
            && !asks_for_next
        {
            let again = within(&awaited, ask(&third, procedure(id, home, one))).await;
            let again = again.unwrap().outcome;
            let are_commits =
                [outcome, again].map(|outcome| matches!(outcome, Outcome::Committed(_)));
            assert_eq!(are_commits[0], are_commits[1], "{awaited}: {outcome} and {again}");
        }
    }
}

/// One interactive transaction, and several decisions.
async fn decisions(protocol: &str, cluster: &EmbeddedCluster) {
    let [first, second, third] = gateways(cluster);
    let mut client = Client::at(cluster, 1).await;
    for round in 0..ROUNDS {
        let id = client.next();
        let awaited = format!("{protocol}: {id}");
        let begun = within(&awaited, first.begin(interactive(id))).await.unwrap();
        let Begun::Reads(reads) = begun else { continue };
        let known = seen(&reads);
        let ask = |gateway: &Gateway, decision: Option<Decision>| {
            let (gateway, known) = (gateway.clone(), known.clone());
            async move { gateway.resolve(interactive(id), known, decision).await }
        };
        let commit = |keys: &[&str]| Some(Decision::Commit(writes(keys, round)));
        let wrong = Reads::from([(Key::from("a"), Read::without_value(Version::INITIAL))]);
        let other = first.begin(interactive(TxnId { attempt: 1, ..id }));
        let stale = second.resolve(interactive(id), wrong, commit(&["a"]));
        let (decided, ..) = tokio::join!(
            answered(&awaited, first.decide(id, Decision::Commit(writes(&["a", "k"], round)))),
            answered(&awaited, ask(&second, commit(&["s"]))),
            answered(&awaited, ask(&third, commit(&["b", "k"]))),
            answered(&awaited, ask(&third, commit(&["a", "k"]))),
            answered(&awaited, stale),
            answered(&awaited, async {
                match other.await? {
                    Begun::Finished(finished) => Ok(finished),
                    Begun::Reads(_) => {
                        first.decide(TxnId { attempt: 1, ..id }, Decision::Abort).await
                    }
                }
            }),
        );
        // Nobody hears that a commit has aborted.
        if let Some(Outcome::Committed(_)) = decided {
            for decision in [commit(&["a", "k"]), None] {
                let again = within(&awaited, ask(&second, decision)).await.unwrap().outcome;
                assert!(!matches!(again, Outcome::Aborted(_)), "{awaited}: it committed, {again}");
            }
        }
    }
}

/// The values that clients of each gateway read.
async fn values(
    cluster: &EmbeddedCluster,
    at: impl IntoIterator<Item = u32>,
) -> Vec<Vec<Option<String>>> {
    let mut all = Vec::new();
    for node in at {
        let mut reader = Client::at(cluster, node).await;
        let mut values = Vec::new();
        for key in KEYS {
            values.push(reader.read(key).await);
        }
        all.push(values);
    }
    all
}

/// Every node serves, other clients commit on the same keys, and all replicas have the same values.
async fn unharmed(protocol: &str, cluster: &mut EmbeddedCluster) {
    for gateway in gateways(cluster) {
        assert_eq!(gateway.describe().health, Health::Serving, "{protocol}");
    }
    for node in 1..=3 {
        let mut other = Client::at(cluster, node).await;
        let all: Vec<Op> = KEYS.iter().map(|key| put(key, 7)).collect();
        other.run(&all).await;
        other.run(&[Op::Add("s".into(), 1), Op::Add("k".into(), i64::from(node))]).await;
    }
    let read = values(cluster, 1..=3).await;
    let expected: Vec<Option<String>> =
        ["7", "8", "7", "10"].iter().map(|value| Some((*value).to_owned())).collect();
    assert!(read.iter().all(|values| *values == expected), "{protocol}: {read:?}");
    if !registry::representatives().any(|name| name == protocol) {
        return;
    }
    // What any two nodes have is what all have.
    for dead in 1..=3 {
        cluster.kill(NodeId(dead)).await;
        let alive = (1..=3).filter(|node| *node != dead);
        let read = within(&format!("{protocol}: without n{dead}"), values(cluster, alive)).await;
        assert!(read.iter().all(|values| *values == expected), "{protocol}: {read:?}");
        cluster.restart(NodeId(dead)).await.unwrap();
    }
}

async fn survives(protocol: &'static str) {
    let dir = tempfile::tempdir().unwrap();
    let plan = plan(dir.path(), map(3, Duration::from_millis(1)));
    let mut cluster = cluster(Plan { protocol, ..plan }).await;
    let mut honest = Client::at(&cluster, 2).await;
    honest.run(&KEYS.map(|key| put(key, 1))).await;
    tokio::join!(procedures(protocol, &cluster), decisions(protocol, &cluster));
    unharmed(protocol, &mut cluster).await;
    cluster.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_name_with_several_contents_harms_nobody_else() {
    for row in registry::rows() {
        println!("{}", row.name);
        survives(row.name).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_hears_that_a_commit_has_aborted() {
    for protocol in registry::representatives() {
        let dir = tempfile::tempdir().unwrap();
        let plan = plan(dir.path(), map(3, Duration::from_millis(1)));
        let cluster = cluster(Plan { protocol, ..plan }).await;
        let mut client = Client::at(&cluster, 1).await;
        let (txn, _, _) = client.add_one("k").await;
        let other = cluster.gateway(NodeId(2)).unwrap();
        let asked = within("an answer", other.resolve(txn, Reads::new(), None)).await;
        let outcome = asked.unwrap().outcome;
        assert!(!matches!(outcome, Outcome::Aborted(_)), "{protocol}: {outcome}");
        // What nobody asked to commit is not committed.
        let (txn, _) = client.open("k").await;
        let asked = within("an answer", other.resolve(txn, Reads::new(), None)).await;
        let outcome = asked.unwrap().outcome;
        assert!(!matches!(outcome, Outcome::Committed(_)), "{protocol}: {outcome}");
        cluster.shutdown(Duration::from_secs(5)).await;
    }
}
