//! The promises of the client library, tested against gateways that refuse, stall, lose answers and
//! vanish.

#![allow(
    clippy::disallowed_types,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    missing_docs,
    reason = "tests of real sockets and deadlines; an unmet expectation is a failed test"
)]

mod gateways;
/// Tests the example against its description.
#[allow(dead_code, reason = "its `main` runs elsewhere")]
#[path = "../examples/queue.rs"]
mod queue;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use gateways::{Call, Node, Store, Twist};
use orthodrome_client::{
    Abort, AbortReason, Aborted, Begun, Client, Committed, Config, Error, GeneralTxn, Op, Outcome,
    Priority, Reads, Timestamp, Writes,
};
use orthodrome_core::NodeId;
use orthodrome_core::txn::AbortReason as Why;
use orthodrome_server::service::{Access, Credential, Limits, Principal, Role};

async fn one() -> (Arc<Node>, Client) {
    let node = Node::start(&Arc::default(), 0).await;
    let client = Client::connect(Config::new([&node.address])).await.unwrap();
    (node, client)
}

/// Two gateways of one cluster; the client is at the first.
async fn two() -> (Arc<Node>, Arc<Node>, Client) {
    let store: Arc<Store> = Arc::default();
    let (near, far) = (Node::start(&store, 0).await, Node::start(&store, 1).await);
    let config = Config::new([&near.address, &far.address])
        .deadline(Duration::from_secs(60))
        // Longer than any pause of a busy machine, so that the library only repeats requests that a
        // test has lost.
        .attempt_timeout(Duration::from_secs(3));
    (near, far, Client::connect(config).await.unwrap())
}

fn increment(reads: &Reads) -> Result<Writes, Abort> {
    let count: u32 = reads.text("n").unwrap_or("0").parse()?;
    Ok(Writes::new().put("n", (count + 1).to_string()))
}

async fn run(client: &Client) -> Result<Outcome, Error> {
    client.transaction().read("n").write("n").run(increment).await
}

fn committed(outcome: Result<Outcome, Error>) -> Committed {
    match outcome.unwrap() {
        Outcome::Committed(committed) => committed,
        other @ (Outcome::Aborted(_) | Outcome::Unknown(_)) => panic!("{other:?}"),
    }
}

fn aborted(outcome: Result<Outcome, Error>) -> Aborted {
    match outcome.unwrap() {
        Outcome::Aborted(aborted) => aborted,
        other @ (Outcome::Committed(_) | Outcome::Unknown(_)) => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_closure_reads_computes_and_writes() {
    let (node, client) = one().await;
    for expected in ["1", "2", "3"] {
        let committed = committed(run(&client).await);
        assert!(committed.timestamp > Timestamp::ZERO);
        assert_eq!(node.store.text("n").unwrap(), expected);
    }
    assert_eq!(committed(run(&client).await).reads.unwrap().text("n"), Some("3"));
}

/// Gateways may lag behind. The library asks again, and does not show old data.
#[tokio::test]
async fn reads_older_than_the_client_knows_are_retried() {
    let (node, client) = one().await;
    committed(client.execute([Op::Put("n".into(), "1".into())]).await);
    // Its own writes: in a transaction, in a closure, in a later round, in a stale read.
    node.twist(Call::Begin, [Twist::Old, Twist::Old]);
    let begun = client.transaction().read("n").write("n").begin().await.unwrap();
    let Begun::Open(open) = begun else { panic!("{begun:?}") };
    assert_eq!(open.reads().text("n"), Some("1"));
    assert_eq!(node.store.calls(Call::Begin).len(), 4);
    open.abort().await;
    node.twist(Call::Begin, [Twist::Old]);
    committed(run(&client).await);
    assert_eq!(node.store.text("n").as_deref(), Some("2"));
    node.twist(Call::Read, [Twist::Old]);
    let mut general = client.general().begin();
    general.read(["other"]).await.unwrap();
    let behind = general.read(["n"]).await.unwrap_err();
    assert_eq!(behind, Error::Aborted(AbortReason::StaleRead));
    node.twist(Call::Begin, [Twist::Old]);
    let snapshot = client.read(["n"]).stale().await.unwrap();
    assert_eq!(snapshot.reads.text("n"), Some("2"));
    // Another client does not know of that write, so any state may be shown to it.
    let other = Client::connect(Config::new([&node.address])).await.unwrap();
    node.twist(Call::Begin, [Twist::Old]);
    let begun = other.transaction().read("n").begin().await.unwrap();
    let Begun::Open(open) = begun else { panic!("{begun:?}") };
    assert_eq!(open.reads().get("n"), None);
    open.abort().await;
    // After it has read a version in a transaction that committed, no older version is shown to it.
    assert_eq!(other.read(["n"]).await.unwrap().reads.text("n"), Some("2"));
    node.twist(Call::Begin, [Twist::Old]);
    let begun = other.transaction().read("n").begin().await.unwrap();
    let Begun::Open(open) = begun else { panic!("{begun:?}") };
    assert_eq!(open.reads().text("n"), Some("2"));
    open.abort().await;
}

#[tokio::test]
async fn a_procedure_and_a_snapshot_see_each_other() {
    let (_node, client) = one().await;
    let ops =
        [Op::Compare("a".into(), None), Op::Put("a".into(), "x".into()), Op::Add("n".into(), 5)];
    let done = committed(client.execute(ops.clone()).priority(Priority::HIGH).await);
    assert_eq!(done.reads.unwrap().get("a"), None, "reads come before the writes");
    let snapshot = client.read(["a", "n", "a", "none"]).await.unwrap();
    assert_eq!((snapshot.reads.text("a"), snapshot.reads.text("n")), (Some("x"), Some("5")));
    assert_eq!(snapshot.reads.iter().len(), 3);
    let guard = aborted(client.execute(ops).await);
    assert_eq!((guard.reason, guard.retryable), (AbortReason::Guard, false));
}

#[tokio::test]
async fn temporary_aborts_are_retried_under_the_next_attempt() {
    let (node, client) = one().await;
    node.twist(Call::Begin, [Twist::Abort(Why::Conflict), Twist::Do, Twist::Busy, Twist::Do]);
    node.twist(Call::Decide, [Twist::Abort(Why::StaleRead), Twist::Busy]);
    committed(run(&client).await);
    assert_eq!(node.store.text("n").unwrap(), "1");
    let attempts: Vec<u32> =
        node.store.calls(Call::Begin).into_iter().map(|id| id.attempt).collect();
    assert_eq!(attempts, [0, 1, 2, 2], "a refusal keeps the name; an abort takes the next");
}

#[tokio::test]
async fn permanent_aborts_are_reported_at_once() {
    let (node, client) = one().await;
    node.twist(Call::Begin, [Twist::Abort(Why::Invalid)]);
    assert_eq!(aborted(run(&client).await).reason, AbortReason::Invalid);
    let giving_up = client.transaction().read("n").run(|_| Err(Abort::because("no funds"))).await;
    let giving_up = aborted(giving_up);
    assert_eq!(giving_up.reason, AbortReason::Client);
    assert_eq!(giving_up.because.as_deref(), Some("no funds"));
    assert_eq!(node.store.open(), 0, "the gateway has ended it");
}

#[tokio::test]
async fn a_lasting_conflict_is_reported_as_an_abort_at_the_deadline() {
    let (node, client) = one().await;
    node.twist(Call::Begin, [Twist::Abort(Why::Conflict); 1_000]);
    let start = Instant::now();
    let hopeless = client.transaction().read("n").deadline(Duration::from_secs(3));
    let hopeless = aborted(hopeless.run(increment).await);
    assert_eq!((hopeless.reason, hopeless.retryable), (AbortReason::Conflict, true));
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
    let tries = node.store.calls(Call::Begin).len();
    assert!((3..900).contains(&tries), "{tries} tries in three seconds");
}

#[tokio::test]
async fn a_deadline_in_the_middle_of_an_attempt_reports_the_abort_of_the_previous_one() {
    let (node, client) = one().await;
    for call in [Call::Begin, Call::Decide] {
        node.twist(call, [Twist::Abort(Why::Conflict)]);
        node.twist(Call::Begin, [Twist::Do].repeat(usize::from(call == Call::Decide)));
        node.twist(Call::Begin, [Twist::Hang]);
        node.twist(Call::Resolve, [Twist::Unknown; 1_000]);
        let txn = client.transaction().read("n").write("n").deadline(Duration::from_secs(3));
        let ended = aborted(txn.run(increment).await);
        assert_eq!((ended.reason, ended.retryable), (AbortReason::Conflict, true));
        while node.untwist(Call::Resolve) {}
    }
}

#[tokio::test]
async fn a_commit_whose_answer_is_lost_is_found_committed_and_not_applied_twice() {
    let (near, _far, client) = two().await;
    near.twist(Call::Decide, [Twist::DoAndCut]);
    let committed = committed(run(&client).await);
    assert_eq!(near.store.text("n").unwrap(), "1");
    assert_eq!(near.store.applied_max(), 1);
    assert_eq!(near.store.calls(Call::Begin).len(), 1, "it was not run again");
    assert!(committed.reads.is_some(), "the reads were known");
}

#[tokio::test]
async fn a_commit_that_never_arrived_is_completed_by_another_gateway() {
    for twist in [Twist::Cut, Twist::Hang, Twist::Unknown, Twist::Stopping] {
        let (near, _far, client) = two().await;
        near.twist(Call::Decide, [twist]);
        committed(run(&client).await);
        assert_eq!(near.store.text("n").unwrap(), "1", "{twist:?}");
        assert_eq!(near.store.applied_max(), 1, "{twist:?}");
        assert_eq!(near.store.calls(Call::Begin).len(), 1, "{twist:?}");
    }
}

#[tokio::test]
async fn a_lost_procedure_is_not_applied_twice() {
    for twist in [Twist::DoAndCut, Twist::Cut, Twist::Hang, Twist::Unknown] {
        let (near, _far, client) = two().await;
        near.twist(Call::Begin, [twist]);
        committed(client.execute([Op::Add("n".into(), 1)]).await);
        assert_eq!(near.store.text("n").unwrap(), "1", "{twist:?}");
        assert_eq!(near.store.applied_max(), 1, "{twist:?}");
    }
}

#[tokio::test]
async fn an_outcome_that_no_gateway_knows_is_unknown_and_can_be_resolved_later() {
    for twist in [Twist::DoAndCut, Twist::Cut] {
        let (near, far, client) = two().await;
        near.twist(Call::Decide, [twist]);
        for node in [&near, &far] {
            node.twist(Call::Resolve, [Twist::Unknown; 1_000]);
        }
        let txn = client.transaction().read("n").write("n").deadline(Duration::from_secs(10));
        let doubt = match txn.run(increment).await.unwrap() {
            Outcome::Unknown(doubt) => doubt,
            other @ (Outcome::Committed(_) | Outcome::Aborted(_)) => panic!("{other:?}"),
        };
        assert!(doubt.trouble().contains("does not know the outcome"), "{}", doubt.trouble());
        // Meanwhile it is not acknowledged, even after many later transactions.
        let after = committed(client.execute([Op::Put("b".into(), "1".into())]).await);
        assert!(after.timestamp > Timestamp::ZERO);
        assert_eq!(near.store.acknowledged_below(), doubt.txn().counter);
        for node in [&near, &far] {
            // The gateways know the outcome again.
            while node.untwist(Call::Resolve) {}
        }
        let outcome = doubt.resolve().await;
        assert!(matches!(outcome, Outcome::Committed(_)), "{outcome:?}");
        assert_eq!(near.store.applied_max(), 1);
        committed(client.execute([Op::Put("b".into(), "2".into())]).await);
        assert_eq!(near.store.acknowledged_below(), 3, "now it is");
    }
}

#[tokio::test]
async fn an_outcome_that_the_cluster_has_forgotten_is_asked_for_once_at_each_gateway() {
    let (near, far, client) = two().await;
    near.twist(Call::Decide, [Twist::DoAndCut]);
    far.twist(Call::Resolve, [Twist::Forgotten]);
    near.twist(Call::Resolve, [Twist::Unknown]);
    let txn = client.transaction().read("n").write("n").deadline(Duration::from_secs(600));
    let doubt = match txn.run(increment).await.unwrap() {
        Outcome::Unknown(doubt) => doubt,
        other @ (Outcome::Committed(_) | Outcome::Aborted(_)) => panic!("{other:?}"),
    };
    assert!(doubt.trouble().contains("forgotten"), "{}", doubt.trouble());
    // The one that asks first, and then another one that may know it, is enough.
    far.twist(Call::Resolve, [Twist::Forgotten]);
    near.twist(Call::Resolve, [Twist::Do]);
    let outcome = doubt.resolve().await;
    assert!(matches!(outcome, Outcome::Committed(_)), "{outcome:?}");
}

#[tokio::test]
async fn a_lost_begin_is_ended_and_retried() {
    for twist in [Twist::DoAndCut, Twist::Cut, Twist::Hang] {
        let (near, _far, client) = two().await;
        near.twist(Call::Begin, [twist]);
        committed(run(&client).await);
        assert_eq!(near.store.open(), 0, "{twist:?} left a transaction open");
        assert_eq!(near.store.calls(Call::Resolve).len(), 1, "{twist:?}");
    }
}

#[tokio::test]
async fn a_retry_keeps_its_home_and_a_retry_in_another_region_is_a_new_transaction() {
    for is_procedure in [false, true] {
        let (near, _far, client) = two().await;
        // The first attempt never arrives, the far gateway ends it, and the library retries it
        // there.
        near.twist(Call::Begin, [Twist::Cut]);
        let outcome = if is_procedure {
            client.execute([Op::Add("n".into(), 1)]).await
        } else {
            run(&client).await
        };
        committed(outcome);
        assert_eq!(near.store.text("n").unwrap(), "1");
        let names = near.store.calls(Call::Begin);
        // The far gateway has registered the client anew.
        assert_ne!(names.first().unwrap().client, names.last().unwrap().client, "{names:?}");
        assert_eq!(near.store.moves(), 0, "a transaction changed its home");
    }
}

#[tokio::test]
async fn the_next_gateway_serves_while_the_nearest_is_unreachable() {
    let (near, far, client) = two().await;
    committed(run(&client).await);
    near.go_away();
    committed(run(&client).await);
    assert_eq!(client.describe().await.unwrap().region.0, 1);
    far.go_away();
    let lost = client.transaction().read("n").deadline(Duration::from_millis(300)).run(increment);
    assert!(matches!(lost.await, Err(Error::Unreachable(_) | Error::Deadline(_))));
    near.come_back();
    committed(run(&client).await);
    assert_eq!(near.store.text("n").unwrap(), "3");
}

#[tokio::test]
async fn connect_uses_the_first_gateway_that_answers_and_fails_at_the_deadline() {
    let node = Node::start(&Arc::default(), 1).await;
    let client = Client::connect(Config::new(["127.0.0.1:1", &node.address])).await.unwrap();
    assert_eq!(client.describe().await.unwrap().region.0, 1);
    node.go_away();
    let config = Config::new([&node.address]).deadline(Duration::from_millis(200));
    assert!(matches!(Client::connect(config).await, Err(Error::Unreachable(_))));
}

#[tokio::test]
async fn gateways_of_two_clusters_are_rejected() {
    let store: Arc<Store> = Arc::default();
    let near = Node::start(&store, 0).await;
    let other = Node::start_with(&store, 1, "other", Access::open(), Limits::default()).await;
    let client = Client::connect(Config::new([&near.address, &other.address])).await.unwrap();
    near.go_away();
    let error = client.read(["n"]).await.unwrap_err();
    assert!(error.to_string().contains("other"), "{error}");
}

#[tokio::test]
async fn a_dropped_transaction_is_aborted() {
    let (node, client) = one().await;
    let begun = client.transaction().read("n").write("n").begin().await.unwrap();
    let Begun::Open(open) = begun else { panic!("{begun:?}") };
    assert_eq!(node.store.open(), 1);
    drop(open);
    gone(&node).await;
    // The same holds for a transaction whose future is dropped while it waits for its reads.
    node.twist(Call::Begin, [Twist::Hang]);
    let waiting = client.transaction().read("n").begin();
    assert!(tokio::time::timeout(Duration::from_millis(50), waiting).await.is_err());
    gone(&node).await;
}

async fn gone(node: &Node) {
    let start = Instant::now();
    while node.store.open() > 0 {
        assert!(start.elapsed() < Duration::from_secs(60), "a transaction stays open");
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn an_open_transaction_keeps_its_lease_while_its_client_lives() {
    // Longer than any pause of a busy machine between two extensions.
    let limits = Limits { lease: Duration::from_secs(2), ..Limits::default() };
    let node = Node::start_with(&Arc::default(), 0, "test", Access::open(), limits).await;
    let client = Client::connect(Config::new([&node.address])).await.unwrap();
    let begun = client.transaction().read("n").write("n").begin().await.unwrap();
    let Begun::Open(open) = begun else { panic!("{begun:?}") };
    tokio::time::sleep(Duration::from_secs(5)).await;
    committed(open.commit(Writes::new().put("n", "1")).await);
    // Cut off from its gateway, it loses its lease, and its commit is known to have failed.
    let begun = client.transaction().read("n").write("n").begin().await.unwrap();
    let Begun::Open(open) = begun else { panic!("{begun:?}") };
    node.go_away();
    gone(&node).await;
    node.come_back();
    let late = aborted(open.commit(Writes::new().put("n", "2")).await);
    assert_eq!(late.reason, AbortReason::Abandoned);
    assert_eq!(node.store.text("n").unwrap(), "1");
}

#[tokio::test]
async fn an_invalid_request_is_an_error_and_leaves_nothing_open() {
    let (node, client) = one().await;
    let stray = client.transaction().read("n").run(increment).await.unwrap_err();
    assert!(stray.to_string().contains("not declared"), "{stray}");
    let empty = client.transaction().run(|_| Ok(Writes::new())).await.unwrap_err();
    assert!(empty.to_string().contains("read_keys"), "{empty}");
    let key = client.execute([Op::Put("".into(), "v".into())]).await.unwrap_err();
    assert!(key.to_string().contains("ops[0]"), "{key}");
    let large = vec![0_u8; 2 << 20];
    let value = client.transaction().write("n").run(|_| Ok(Writes::new().put("n", large.clone())));
    let value = value.await.unwrap_err();
    assert!(value.to_string().contains("writes[0]"), "{value}");
    let huge =
        client.execute((0..9).map(|_| Op::Append("n".into(), large[1..1 << 20].to_vec().into())));
    assert!(matches!(huge.await, Err(Error::Invalid(_))));
    gone(&node).await;
    assert_eq!(node.store.text("n"), None);
}

#[tokio::test]
async fn a_call_beyond_the_clients_role_is_refused() {
    let token = |name: &str, role| {
        (
            Credential::token(&format!("{name}-token-of-sixteen")).unwrap(),
            Principal::new(name, role),
        )
    };
    let access = Access::only([
        token("reader", Role::Read),
        token("writer", Role::Write),
        token("admin", Role::Admin),
    ]);
    let limits = Limits::default();
    let node = Node::start_with(&Arc::default(), 0, "test", access.unwrap(), limits).await;
    let connect = |token: Option<String>| {
        let config = Config::new([&node.address]);
        Client::connect(match token {
            Some(token) => config.token(token),
            None => config,
        })
    };
    for wrong in [None, Some(String::new()), Some("wrong-token-of-sixteen".into())] {
        assert!(matches!(connect(wrong).await, Err(Error::Unauthenticated(_))));
    }
    let reader = connect(Some("reader-token-of-sixteen".into())).await.unwrap();
    assert!(reader.read(["n"]).await.is_ok());
    assert!(matches!(run(&reader).await, Err(Error::PermissionDenied(_))));
    let put = [Op::Put("n".into(), "1".into())];
    assert!(matches!(reader.execute(put).await, Err(Error::PermissionDenied(_))));
    let writer = connect(Some("writer-token-of-sixteen".into())).await.unwrap();
    committed(run(&writer).await);
    let partition = writer.describe().await.unwrap().partitions[0].clone();
    let (partition, leader) = (partition.id, partition.placed);
    let denied = writer.transfer_leader(partition, leader[1]).await;
    assert!(matches!(denied, Err(Error::PermissionDenied(_))));
    let admin = connect(Some("admin-token-of-sixteen".into())).await.unwrap();
    *node.store.leader.lock().unwrap() = 1;
    assert_eq!(admin.transfer_leader(partition, leader[1]).await, Ok(NodeId(1)));
    let even = admin.change_members(partition, &leader[..2], &[]).await;
    assert!(matches!(even, Err(Error::Invalid(_))));
}

#[tokio::test]
async fn an_order_is_sent_to_the_leader_that_a_refusal_names() {
    let (near, _far, client) = two().await;
    let partition = client.describe().await.unwrap().partitions[0].id;
    let lead = |node: u32| *near.store.leader.lock().unwrap() = node;
    for leader in [1, 2, 1] {
        lead(leader);
        let taken = client.change_members(partition, &[NodeId(1)], &[]).await;
        assert_eq!(taken, Ok(NodeId(leader)));
    }
    // The first node names one that does not lead any more, and that belongs to no endpoint.
    lead(2);
    near.store.stale.lock().unwrap().insert(NodeId(1), 3);
    let taken = client.change_members(partition, &[NodeId(1)], &[]).await;
    assert_eq!(taken, Ok(NodeId(2)));
    near.store.stale.lock().unwrap().clear();
    // The error names a leading node that belongs to no endpoint.
    lead(3);
    let error = client.change_members(partition, &[NodeId(1)], &[]).await.unwrap_err();
    assert!(matches!(error, Error::Refused(_)), "{error}");
    assert!(error.to_string().contains("none of the endpoints is the gateway of n3"), "{error}");
    // While no node leads, the library retries.
    lead(0);
    let order = client.transfer_leader(partition, NodeId(2));
    let elected = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        lead(2);
    };
    let (taken, ()) = tokio::join!(order, elected);
    assert_eq!(taken, Ok(NodeId(2)));
}

#[tokio::test]
async fn many_transactions_of_one_client_run_at_once() {
    let (node, client) = one().await;
    let runs = (0..50).map(|_| {
        let client = client.clone();
        tokio::spawn(async move { committed(run(&client).await).timestamp })
    });
    let mut timestamps = Vec::new();
    for done in runs.collect::<Vec<_>>() {
        timestamps.push(done.await.unwrap());
    }
    timestamps.sort_unstable();
    timestamps.dedup();
    assert_eq!(timestamps.len(), 50);
    assert_eq!(node.store.text("n").unwrap(), "50", "an update was lost");
}

/// A gateway that runs general transactions, and one that does not, with a client of each.
async fn both() -> [(Arc<Node>, Client); 2] {
    let plain = Node::start_plain(&Arc::default(), 0).await;
    let client = Client::connect(Config::new([&plain.address])).await.unwrap();
    [one().await, (plain, client)]
}

async fn set(client: &Client, pairs: &[(&str, &str)]) {
    let puts = pairs.iter().map(|&(key, value)| Op::Put(key.into(), value.into()));
    committed(client.execute(puts).await);
}

/// Reads the key that `a` names, and writes its value to `c`.
async fn follow(txn: GeneralTxn) -> Result<(), Abort> {
    let next = txn.text("a").await?.unwrap_or_default();
    let found = txn.text(next).await?.unwrap_or_default();
    txn.put("c", found);
    Ok(())
}

#[tokio::test]
async fn a_general_transaction_reads_keys_found_by_its_reads() {
    for (node, client) in both().await {
        set(&client, &[("a", "b"), ("b", "treasure"), ("z", "0")]).await;
        let done = committed(client.general().priority(Priority::HIGH).run(follow).await);
        assert_eq!(node.store.text("c").unwrap(), "treasure");
        let reads = done.reads.unwrap();
        assert_eq!((reads.text("a"), reads.text("b")), (Some("b"), Some("treasure")));
        let own = client.general().run(|txn| async move {
            txn.put("a", "mine");
            txn.delete("b");
            let seen = txn.get_all(["a", "z", "b", "a"]).await?;
            let seen: Vec<_> = seen.iter().map(|v| v.as_ref().map(ToString::to_string)).collect();
            let mine = Some("mine".to_owned());
            assert_eq!(seen, [mine.clone(), Some("0".into()), None, mine], "its own writes");
            Ok(())
        });
        assert_eq!(committed(own.await).reads.unwrap().iter().len(), 1);
        assert_eq!((node.store.text("a").as_deref(), node.store.text("b")), (Some("mine"), None));
        // A transaction that only reads, in two rounds; and one without any operation.
        let two = |txn: GeneralTxn| async move {
            txn.get("z").await?;
            txn.get("a").await.map(drop)
        };
        assert_eq!(committed(client.general().run(two).await).reads.unwrap().iter().len(), 2);
        committed(client.general().run(|_| async { Ok(()) }).await);
        assert_eq!(node.store.open(), 0);
    }
}

#[tokio::test]
async fn a_change_between_rounds_makes_a_general_transaction_retry() {
    for (node, client) in both().await {
        set(&client, &[("a", "b"), ("b", "old"), ("d", "new")]).await;
        let calls = AtomicU32::new(0);
        let step = |txn: GeneralTxn| {
            let is_first = calls.fetch_add(1, Ordering::Relaxed) == 0;
            let other = client.clone();
            async move {
                let next = txn.text("a").await?.unwrap_or_default();
                if is_first {
                    set(&other, &[("a", "d")]).await;
                }
                let found = txn.text(next).await?.unwrap_or_default();
                txn.put("c", found);
                Ok(())
            }
        };
        committed(client.general().run(step).await);
        assert_eq!(calls.load(Ordering::Relaxed), 2);
        assert_eq!(node.store.text("c").unwrap(), "new");
    }
}

#[tokio::test]
async fn an_attempt_after_a_change_declares_its_keys_before_it_reads() {
    let node = Node::start_plain(&Arc::default(), 0).await;
    let client = Client::connect(Config::new([&node.address])).await.unwrap();
    // With the keys of the attempt before, with another key to read, and with another to write.
    for (other_read, other_write, more) in [(None, "c", 0), (Some("f"), "c", 2), (None, "e", 1)] {
        set(&client, &[("a", "old"), ("d", "more")]).await;
        let before = node.store.calls(Call::Begin).len();
        let calls = AtomicU32::new(0);
        let open = AtomicU32::new(0);
        let step = |txn: GeneralTxn| {
            let is_first = calls.fetch_add(1, Ordering::Relaxed) == 0;
            open.store(u32::try_from(node.store.open()).unwrap(), Ordering::Relaxed);
            let other = client.clone();
            async move {
                let seen = txn.text("a").await?.unwrap_or_default();
                if is_first {
                    txn.get("d").await?;
                    set(&other, &[("a", "new")]).await;
                } else if let Some(key) = other_read {
                    txn.get(key).await?;
                }
                txn.put(if is_first { "c" } else { other_write }, seen);
                Ok(())
            }
        };
        let reads = committed(client.general().run(step).await).reads.unwrap();
        let has_read: Vec<String> = reads.iter().map(|(key, _)| key.to_string()).collect();
        let asked = if other_read.is_some() { &["a", "f"][..] } else { &["a"] };
        assert_eq!(has_read, asked, "not what only the first attempt has read");
        assert_eq!(calls.load(Ordering::Relaxed), 2);
        assert_eq!(open.load(Ordering::Relaxed), 1, "the second attempt had begun before it read");
        // Look twice, the other client's change, declare; declare at once. Then look and declare.
        assert_eq!(node.store.calls(Call::Begin).len() - before, 5 + more);
        assert_eq!(node.store.text(other_write).unwrap(), "new");
        gone(&node).await;
    }
}

#[tokio::test]
async fn a_closure_that_gave_up_on_inconsistent_reads_is_called_again() {
    let node = Node::start_plain(&Arc::default(), 0).await;
    let client = Client::connect(Config::new([&node.address])).await.unwrap();
    set(&client, &[("a", "1"), ("b", "1")]).await;
    let calls = AtomicU32::new(0);
    // The two values are always equal; reads of different snapshots may differ.
    let step = |writes: bool| {
        let (calls, client) = (&calls, &client);
        move |txn: GeneralTxn| {
            let call = calls.fetch_add(1, Ordering::Relaxed);
            let other = client.clone();
            async move {
                let a = txn.text("a").await?;
                if call == 0 {
                    set(&other, &[("a", "2"), ("b", "2")]).await;
                }
                let b = txn.text("b").await?;
                if writes && a != b {
                    return Err(Abort::because("torn"));
                }
                Ok(())
            }
        }
    };
    for writes in [true, false] {
        calls.store(0, Ordering::Relaxed);
        let done = committed(client.general().run(step(writes)).await).reads.unwrap();
        assert_eq!(done.text("a"), done.text("b"));
        assert_eq!(calls.load(Ordering::Relaxed), 2);
    }
    // A closure whose reads are consistent may give up at once.
    let giving_up = |txn: GeneralTxn| async move {
        txn.get("a").await?;
        txn.get("b").await?;
        Err(Abort::because("enough"))
    };
    let gave_up = aborted(client.general().run(giving_up).await);
    assert_eq!(gave_up.because.as_deref(), Some("enough"));
}

#[tokio::test]
async fn aborted_rounds_are_retried_and_busy_rounds_keep_their_name() {
    let (node, client) = one().await;
    set(&client, &[("a", "b"), ("b", "found")]).await;
    node.twist(Call::Read, [Twist::Busy, Twist::Abort(Why::Conflict), Twist::Do]);
    committed(client.general().run(follow).await);
    let attempts: Vec<u32> =
        node.store.calls(Call::Read).into_iter().map(|id| id.attempt).collect();
    assert_eq!(attempts, [0, 0, 1]);
    node.twist(Call::Read, [Twist::Abort(Why::Invalid)]);
    assert_eq!(aborted(client.general().run(follow).await).reason, AbortReason::Invalid);
    let giving_up = |txn: GeneralTxn| async move {
        txn.get("a").await?;
        Err(Abort::because("no funds"))
    };
    assert_eq!(aborted(client.general().run(giving_up).await).because.as_deref(), Some("no funds"));
    assert_eq!(node.store.open(), 0, "the gateway has ended it");
}

#[tokio::test]
async fn a_lost_round_ends_the_attempt_and_the_closure_is_called_again() {
    for twist in [Twist::DoAndCut, Twist::Cut, Twist::Hang] {
        let (near, _far, client) = two().await;
        set(&client, &[("a", "b"), ("b", "found")]).await;
        near.twist(Call::Read, [twist]);
        committed(client.general().run(follow).await);
        assert_eq!(near.store.text("c").unwrap(), "found");
        assert_eq!(near.store.open(), 0, "{twist:?} left a transaction open");
        assert_eq!(near.store.calls(Call::Resolve).len(), 1, "{twist:?}");
    }
}

#[tokio::test]
async fn a_lost_general_commit_is_found_or_completed_and_not_applied_twice() {
    for twist in [Twist::DoAndCut, Twist::Cut, Twist::Hang, Twist::Unknown, Twist::Stopping] {
        let (near, _far, client) = two().await;
        set(&client, &[("a", "b"), ("b", "found")]).await;
        near.twist(Call::Decide, [twist]);
        committed(client.general().run(follow).await);
        assert_eq!(near.store.text("c").unwrap(), "found", "{twist:?}");
        assert_eq!(near.store.applied_max(), 1, "{twist:?}");
        let begun = near.store.calls(Call::Begin);
        assert_eq!(begun.len(), 2, "{twist:?}: {begun:?}: one is the setting up");
    }
}

#[tokio::test]
async fn an_open_general_transaction_reads_more_rounds_and_aborts_when_dropped() {
    for (node, client) in both().await {
        set(&client, &[("a", "b"), ("b", "found")]).await;
        let mut open = client.general().begin();
        open.read(["a"]).await.unwrap();
        let next = open.reads().text("a").unwrap().to_owned();
        open.read([next.as_str(), "a"]).await.unwrap();
        assert_eq!(open.reads().text("b"), Some("found"));
        committed(open.commit(Writes::new().put("c", "1")).await);
        assert_eq!(node.store.text("c").unwrap(), "1");
        let mut open = client.general().begin();
        open.read(["a"]).await.unwrap();
        set(&client, &[("a", "d")]).await;
        let late = aborted(open.commit(Writes::new().put("c", "2")).await);
        assert_eq!((late.reason, late.retryable), (AbortReason::StaleRead, true));
        let mut open = client.general().begin();
        open.read(["a"]).await.unwrap();
        open.abort().await;
        let mut open = client.general().begin();
        open.read(["a"]).await.unwrap();
        drop(open);
        gone(&node).await;
        assert_eq!(node.store.text("c").unwrap(), "1");
    }
}

#[tokio::test]
async fn the_queue_of_the_example_serves_in_order() {
    for (node, client) in both().await {
        for name in ["ada", "bob", "cy"] {
            committed(queue::join(&client, name).await);
        }
        let twice = aborted(queue::join(&client, "cy").await);
        assert_eq!(twice.because.as_deref(), Some("cy cannot stand behind cy"));
        for name in ["ada", "bob", "cy"] {
            assert_eq!(node.store.text("line/first").unwrap(), name);
            committed(queue::next(&client).await);
        }
        assert_eq!((node.store.text("line/first"), node.store.text("line/last")), (None, None));
        let nobody = aborted(queue::next(&client).await);
        assert_eq!(nobody.because.as_deref(), Some("nobody waits"));
    }
}
