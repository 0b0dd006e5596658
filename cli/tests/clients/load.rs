//! `load` against the real client service in front of a small serial store. So its verdicts on a
//! correct cluster, and on an incorrect one, are known in advance.

use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;

use crate::gateways::{Call, Node, Store, Twist};
use orthodrome_client::{Client, Config};
use orthodrome_core::txn::AbortReason;

async fn run(arguments: Vec<String>) -> Output {
    tokio::task::spawn_blocking(move || {
        crate::processes::output(Command::new(env!("CARGO_BIN_EXE_orthodrome")).args(arguments))
    })
    .await
    .unwrap()
}

/// Runs `load`, and returns its result, its exit status and its messages.
async fn load(nodes: &[Arc<Node>], arguments: &[&str]) -> (serde_json::Value, i32, String) {
    let endpoints: Vec<&str> = nodes.iter().map(|node| node.address.as_str()).collect();
    let endpoints = endpoints.join(",");
    let fixed = ["load", "--json", "--connect", &endpoints, "--duration", "1500ms"];
    let output = run(fixed.iter().chain(arguments).map(ToString::to_string).collect()).await;
    let stderr = String::from_utf8(output.stderr).unwrap();
    let result = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: no JSON object alone; {stderr}"));
    (result, output.status.code().unwrap(), stderr)
}

async fn three(store: &Arc<Store>) -> Vec<Arc<Node>> {
    vec![Node::start(store, 0).await, Node::start(store, 1).await, Node::start(store, 2).await]
}

async fn check(history: &Path) -> Option<i32> {
    run(vec!["check".into(), history.display().to_string()]).await.status.code()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_serial_store_keeps_its_promises() {
    let store = Arc::<Store>::default();
    let nodes = three(&store).await;
    let directory = tempfile::tempdir().unwrap();
    for (number, arguments) in [
        vec!["--workload", "bank", "--clients", "6"],
        vec!["--workload", "list-append", "--rate", "200"],
        vec!["--workload", "ycsbt:2", "--clients", "6", "--high-priority", "0.5"],
        vec!["--workload", "list-append:dependent", "--clients", "6"],
    ]
    .into_iter()
    .enumerate()
    {
        let path = directory.path().join(format!("{number}.jsonl"));
        let history = ["--history", path.to_str().unwrap()];
        let (result, status, stderr) = load(&nodes, &[&arguments[..], &history].concat()).await;
        assert_eq!(status, 0, "{arguments:?}: {result}\n{stderr}");
        assert!(result["committed"].as_u64().unwrap() > 0, "{result}");
        assert_eq!(result["check"]["ok"], true, "{result}");
        assert_eq!(result["check"]["model"], "strict-serializable", "{result}");
        assert_eq!(result["total_ok"], true, "{result}");
        assert_eq!(result["protocol"], "test");
        let regions: Vec<&String> = result["regions"].as_object().unwrap().keys().collect();
        assert_eq!(regions, ["R0", "R1", "R2"], "clients are spread over the gateways");
        assert_eq!(check(&path).await, Some(0));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn load_submits_transactions_in_the_given_regions() {
    let store = Arc::<Store>::default();
    let nodes = three(&store).await;
    for how in [["--rate", "200"], ["--clients", "8"]] {
        let arguments = [&["--workload", "ycsbt:2", "--origins", "R0=3,R2=1"], &how[..]].concat();
        let (result, status, stderr) = load(&nodes, &arguments).await;
        assert_eq!(status, 0, "{result}\n{stderr}");
        let begun = |region: &str| result["regions"][region]["n"].as_u64().unwrap_or(0);
        assert_eq!(begun("R1"), 0, "{result}");
        let (more, less) = (begun("R0"), begun("R2"));
        assert!(less > 10 && more > 2 * less && more < 5 * less, "{result}");
    }
    let endpoints = nodes.iter().map(|node| node.address.clone()).collect::<Vec<_>>().join(",");
    let arguments =
        ["load", "--connect", &endpoints, "--workload", "ycsbt:2", "--origins", "Moon=1"];
    let output = run(arguments.map(str::to_owned).to_vec()).await;
    assert_eq!(output.status.code(), Some(2));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("\"Moon\" has no gateway; use some of R0, R1, R2"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn dependent_transactions_go_by_reconnaissance_where_they_must() {
    let store = Arc::<Store>::default();
    let nodes = [Node::start_plain(&store, 0).await, Node::start_plain(&store, 1).await];
    // With one list, a transaction's first read is its only one.
    let one = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&one, "workload = \"list-append:dependent\"\noptions = { keys = 1 }\n").unwrap();
    for workload in ["list-append:dependent", one.path().to_str().unwrap()] {
        let arguments = ["--workload", workload, "--clients", "6", "--deadline", "5s"];
        let (result, status, stderr) = load(&nodes, &arguments).await;
        assert_eq!(status, 0, "{result}\n{stderr}");
        assert!(result["committed"].as_u64().unwrap() > 0, "{result}");
        assert_eq!(result["check"]["ok"], true, "{result}");
        assert_eq!(store.calls(Call::Read), [], "nobody asked for a round");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_answers_aborts_and_lost_gateways_are_no_anomalies() {
    let store = Arc::<Store>::default();
    let nodes = three(&store).await;
    for (number, node) in nodes.iter().enumerate() {
        let twists = [
            Twist::Do,
            Twist::DoAndCut,
            Twist::Abort(AbortReason::Conflict),
            Twist::Unknown,
            Twist::Busy,
            Twist::Do,
            Twist::Cut,
        ];
        let turned = twists.iter().cycle().skip(number).take(70).copied();
        node.twist(Call::Begin, turned.clone());
        node.twist(Call::Decide, turned);
        node.twist(Call::Resolve, [Twist::Unknown, Twist::Do, Twist::DoAndCut, Twist::Do]);
    }
    let going = {
        let node = Arc::clone(&nodes[1]);
        async move {
            let enough = async {
                while node.store.calls(Call::Begin).len() < 20 {
                    tokio::time::sleep(std::time::Duration::from_millis(5)).await;
                }
            };
            let awaited = tokio::time::timeout(crate::processes::PATIENCE, enough).await;
            awaited.expect("twenty transactions are begun");
            node.go_away();
        }
    };
    let arguments = ["--workload", "list-append", "--clients", "9", "--deadline", "2s"];
    let ((result, status, stderr), ()) = tokio::join!(load(&nodes, &arguments), going);
    assert_eq!(status, 0, "{result}\n{stderr}");
    assert!(result["aborted_attempts"].as_u64().unwrap() > 0, "{result}");
    assert_eq!(result["check"]["ok"], true, "{result}");
}

#[tokio::test(flavor = "multi_thread")]
async fn two_stores_behind_one_cluster_are_reported_as_an_anomaly() {
    let nodes = [Node::start(&Arc::default(), 0).await, Node::start(&Arc::default(), 1).await];
    // Both stores assign the same client ids; in one history no id may occur twice.
    for _ in 0..40 {
        Client::connect(Config::new([&nodes[1].address])).await.unwrap();
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("history.jsonl");
    let arguments =
        ["--workload", "list-append", "--clients", "4", "--history", path.to_str().unwrap()];
    let (result, status, stderr) = load(&nodes, &arguments).await;
    assert_eq!(status, 1, "{result}\n{stderr}");
    assert_eq!(result["check"]["ok"], false, "{result}");
    assert!(result["check"]["anomaly"].is_string(), "{result}");
    assert_eq!(check(&path).await, Some(1));
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_requests_are_refused_with_status_2() {
    let node = Node::start(&Arc::<Store>::default(), 0).await;
    for (arguments, expected) in [
        (vec!["load", "--connect", &node.address, "--workload", "nothing"], "\"nothing\""),
        (vec!["load", "--connect", "127.0.0.1:1", "--workload", "bank"], "no gateway answers"),
        (
            vec![
                "load",
                "--connect",
                &node.address,
                "--workload",
                "bank",
                "--history",
                "/no/such/dir/history.jsonl",
            ],
            "--history /no/such/dir/history.jsonl",
        ),
    ] {
        let output = run(arguments.iter().map(ToString::to_string).collect()).await;
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(stderr.contains(expected), "{stderr}");
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(output.stdout.is_empty());
    }
}
