//! Leases on real nodes, with every family of protocols.

use orthodrome_core::lease::{LeaseId, TTL_MIN};
use orthodrome_core::ordered::OrdSet;
use orthodrome_server::leases::LeaseError;

use super::*;

fn ttl(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Lets these nodes look for leases that are due until the key is gone.
async fn until_gone(cluster: &EmbeddedCluster, nodes: &[u32], client: &mut Client, key: &str) {
    let looking = async {
        while client.read(key).await.is_some() {
            for node in nodes {
                let gateway = cluster.gateway(NodeId(*node)).unwrap();
                gateway.end_due_leases().await.unwrap();
            }
        }
    };
    within(&format!("{key} goes with its lease"), looking).await;
}

/// The keys of leases.
async fn keys_of_leases(gateway: &Gateway) -> Vec<String> {
    scanned(gateway, "orthodrome/", false, 1_000).await
}

/// Lets this gateway look for leases that are due until no key of any lease exists.
async fn until_no_lease_exists(gateway: &Gateway) {
    let looking = async {
        while !keys_of_leases(gateway).await.is_empty() {
            gateway.end_due_leases().await.unwrap();
        }
    };
    within("all keys of leases are deleted", looking).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_go_with_their_lease_in_every_protocol() {
    for protocol in registry::representatives() {
        within(&format!("{protocol}: leases"), keys_go_with_their_lease(protocol)).await;
    }
}

async fn keys_go_with_their_lease(protocol: &'static str) {
    let dir = tempfile::tempdir().unwrap();
    let plan = plan(dir.path(), map(3, Duration::from_millis(1)));
    let cluster = cluster(Plan { protocol, durability: Durability::None, ..plan }).await;
    let mut client = Client::at(&cluster, 1).await;
    let gateway = cluster.gateway(NodeId(1)).unwrap();
    let began = Instant::now();
    let (id, _) = gateway.grant_lease(TTL_MIN).await.unwrap();
    for key in ["a", "b", "overwritten"] {
        client.run(&id.put(key.into(), "attached".into())).await;
    }
    client.run(&[Op::Put("overwritten".into(), "free".into())]).await;
    let lease = cluster.gateway(NodeId(2)).unwrap().lease(id).await.unwrap();
    assert!(lease.left <= TTL_MIN * 2 && !lease.has_more, "{protocol}: {lease:?}");
    assert_eq!(lease.keys, ["a", "b"].map(Key::from), "{protocol}");
    let renewed = Instant::now();
    gateway.renew_lease(id).await.unwrap();
    // Before its time it does not end, and the due entry of before the renewal does not count.
    while began.elapsed() < TTL_MIN || renewed.elapsed() < TTL_MIN / 2 {
        gateway.end_due_leases().await.unwrap();
        let read = client.read("a").await;
        assert!(read.is_some() || renewed.elapsed() >= TTL_MIN, "{protocol}: too early");
    }
    until_gone(&cluster, &[1, 2, 3], &mut client, "a").await;
    assert!(renewed.elapsed() >= TTL_MIN, "{protocol}: too early");
    until_gone(&cluster, &[1, 2, 3], &mut client, "b").await;
    assert_eq!(client.read("overwritten").await.as_deref(), Some("free"), "{protocol}");
    let ended = Err(LeaseError::Ended(id));
    assert_eq!(gateway.renew_lease(id).await, ended.clone(), "{protocol}");
    assert_eq!(gateway.lease(id).await.map(drop), ended.map(drop), "{protocol}");
    // Nothing can be attached any more.
    let txn = Txn::procedure(client.next(), RegionId(0), id.put("late".into(), "v".into()));
    let Begun::Finished(late) = gateway.begin(txn).await.unwrap() else { panic!("one round") };
    assert_eq!(late.outcome, Outcome::Aborted(AbortReason::Guard), "{protocol}");
    until_no_lease_exists(&gateway).await;
    cluster.shutdown(Duration::from_secs(5)).await;
}

/// The gateway that should end a lease dies, and so does everybody once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_end_although_their_gateway_died_and_all_nodes_restarted() {
    let dir = tempfile::tempdir().unwrap();
    let map = map(3, Duration::from_millis(1));
    let mut cluster = cluster(plan(dir.path(), map.clone())).await;
    let gateway_of = |node: u32| {
        let region = map.region_of(NodeId(node));
        map.gateways().find(|gateway| gateway.region == region).unwrap().id
    };
    let gateway = cluster.gateway(NodeId(1)).unwrap();
    // Some leases that n3 should end, and some of others.
    let mut ids: Vec<LeaseId> = Vec::new();
    let mut client = Client::at(&cluster, 1).await;
    while ids.iter().filter(|id| id.gateway(&map) == Some(gateway_of(3))).count() < 2 {
        let (id, _) = gateway.grant_lease(ttl(2)).await.unwrap();
        let key = format!("k{}", ids.len());
        client.run(&id.put(key.as_str().into(), "v".into())).await;
        ids.push(id);
    }
    for node in 1..=3 {
        cluster.kill(NodeId(node)).await;
    }
    for node in 1..=2 {
        cluster.restart(NodeId(node)).await.unwrap();
    }
    let mut client = Client::at(&cluster, 2).await;
    for number in 0..ids.len() {
        until_gone(&cluster, &[1, 2], &mut client, &format!("k{number}")).await;
    }
    cluster.restart(NodeId(3)).await.unwrap();
    let gateway = cluster.gateway(NodeId(3)).unwrap();
    until_no_lease_exists(&gateway).await;
    cluster.shutdown(Duration::from_secs(5)).await;
}

/// More keys than one transaction deletes, with values of which few fit into a message; revoked at two
/// gateways at once, while others attach more and renew it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_with_many_keys_and_large_values_ends() {
    let dir = tempfile::tempdir().unwrap();
    let plan = plan(dir.path(), map(3, Duration::from_millis(1)));
    let cluster = cluster(Plan { durability: Durability::None, ..plan }).await;
    let gateway = cluster.gateway(NodeId(1)).unwrap();
    let mut client = Client::at(&cluster, 1).await;
    let (id, _) = gateway.grant_lease(ttl(3_600)).await.unwrap();
    for number in 0..150 {
        let key = Key::from(format!("many/{number:03}"));
        client.run(&id.put(key, Value::default())).await;
    }
    for number in 0..12 {
        let key = Key::from(format!("large/{number:02}"));
        client.run(&id.put(key, vec![b'x'; 1 << 20].into())).await;
    }
    let lease = gateway.lease(id).await.unwrap();
    assert!(lease.has_more && lease.keys.len() == orthodrome_server::leases::KEYS_SHOWN);
    let mut other = Client::at(&cluster, 2).await;
    let attaching = tokio::spawn(async move {
        let mut attached = OrdSet::new();
        for number in 0.. {
            let key = format!("late/{number}");
            let ops = id.put(key.as_str().into(), "v".into());
            let txn = Txn::procedure(other.next(), RegionId(0), ops);
            let Begun::Finished(ended) = other.gateway.begin(txn).await.unwrap() else {
                panic!("a procedure has one round")
            };
            match ended.outcome {
                Outcome::Committed(_) => drop(attached.insert(key)),
                Outcome::Aborted(AbortReason::Guard) => break,
                Outcome::Aborted(_) | Outcome::Unknown => {}
            }
        }
        attached
    });
    // So is who renews it.
    let second = cluster.gateway(NodeId(2)).unwrap();
    let renewing = tokio::spawn(async move { while second.renew_lease(id).await.is_ok() {} });
    let third = cluster.gateway(NodeId(3)).unwrap();
    let (first, second) = tokio::join!(gateway.revoke_lease(id), third.revoke_lease(id));
    let attached = within("nothing can be attached any more", attaching).await.unwrap();
    assert!(first.is_ok() && second.is_ok(), "{first:?} {second:?}");
    within("the lease is renewed no more", renewing).await.unwrap();
    println!("{first:?} and {second:?} keys deleted, {} attached meanwhile", attached.len());
    for prefix in ["many/", "large/", "late/"] {
        assert_eq!(scanned(&gateway, prefix, false, 1_000).await, Vec::<String>::new());
    }
    assert_eq!(gateway.revoke_lease(id).await, Ok(0));
    // Some entries of the renewals are there until their time.
    let left = keys_of_leases(&gateway).await;
    assert!(left.len() <= 10 && left.iter().all(|key| key.contains("/due/")), "{left:?}");
    cluster.shutdown(Duration::from_secs(5)).await;
}
