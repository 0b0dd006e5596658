//! A cluster of real processes: made by `serve --init`, put under load, one killed, one asked to end.

#![allow(
    clippy::disallowed_types,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    missing_docs,
    reason = "tests of real processes; an unmet expectation is a failed test"
)]

use std::io::{BufRead as _, BufReader, Read as _};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Output, Stdio};

fn orthodrome(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_orthodrome"));
    command.args(arguments);
    for name in ["ORTHODROME_CONNECT", "ORTHODROME_TOKEN_FILE", "ORTHODROME_TLS_CA"] {
        command.env_remove(name);
    }
    command
}

fn run(arguments: &[&str]) -> Output {
    orthodrome(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// A range of free ports. Another process may take one before it is used; the ranges start far
/// apart, so that tests do not meet.
fn free_ports(count: u16) -> u16 {
    let start = 20_000 + (std::process::id() % 400) as u16 * 50;
    let is_free = |port| TcpListener::bind(("127.0.0.1", port)).is_ok();
    (start..60_000)
        .step_by(50)
        .find(|base| (*base..base + count).all(is_free))
        .expect("no range of ports is free")
}

/// A node's process; killed when dropped.
struct Node {
    process: Child,
    stdout: BufReader<ChildStdout>,
}

impl Node {
    fn spawn(dir: &Path, name: &str) -> Self {
        let config = dir.join(format!("{name}.toml"));
        let log = std::fs::File::create(dir.join(format!("{name}.log"))).unwrap();
        let mut process = orthodrome(&["serve", "--config", config.to_str().unwrap()])
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .unwrap();
        let stdout = BufReader::new(process.stdout.take().unwrap());
        Self { process, stdout }
    }

    /// Waits until it says that it serves.
    fn ready(&mut self, dir: &Path, name: &str) {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        let log = || std::fs::read_to_string(dir.join(format!("{name}.log"))).unwrap();
        assert!(line.starts_with(&format!("ready: {name} ")), "{line:?}; {}", log());
    }

    fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Asks it to end by SIGTERM, and returns its exit status.
    fn terminate(&mut self) -> Option<i32> {
        let id = self.process.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
        let status = self.process.wait().unwrap().code();
        let mut rest = String::new();
        self.stdout.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "", "nothing else goes to standard output");
        status
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn start(dir: &Path, names: &[&str]) -> Vec<Node> {
    let mut nodes: Vec<Node> = names.iter().map(|name| Node::spawn(dir, name)).collect();
    for (node, name) in nodes.iter_mut().zip(names) {
        node.ready(dir, name);
    }
    nodes
}

const NAMES: [&str; 5] = ["n1", "n2", "n3", "n4", "n5"];

#[test]
fn five_processes_survive_the_death_of_one_and_end_in_good_order() {
    let directory = tempfile::tempdir().unwrap();
    let dir = directory.path().join("dev");
    let base = free_ports(10);
    let port = base.to_string();
    let made = run(&[
        "serve",
        "--init",
        dir.to_str().unwrap(),
        "--topology",
        "local5",
        "--base-port",
        &port,
    ]);
    assert_eq!(made.status.code(), Some(0), "{}", text(&made.stderr));
    let instructions = text(&made.stdout);
    assert!(instructions.contains("n5.toml"), "{instructions}");
    let config = dir.join("n1.toml");
    let checked = run(&["serve", "--check", "--config", config.to_str().unwrap()]);
    assert_eq!(checked.status.code(), Some(0), "{}", text(&checked.stderr));
    assert!(text(&checked.stdout).contains("TLS         off (loopback only)"));

    let mut nodes = start(&dir, &NAMES);
    let endpoints: Vec<String> = (base..base + 5).map(|port| format!("127.0.0.1:{port}")).collect();
    let put = ["shell", "--deadline", "20s", "--connect", &endpoints[0], "-e", "put kept 1"];
    let output = run(&put);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));

    let history = directory.path().join("history.jsonl");
    let mut load = orthodrome(&[
        "load",
        "--connect",
        &endpoints.join(","),
        "--workload",
        "bank",
        "--clients",
        "10",
        "--duration",
        "6s",
        "--json",
        "--history",
        history.to_str().unwrap(),
    ])
    .stdout(Stdio::piped())
    .stderr(Stdio::piped())
    .spawn()
    .unwrap();
    // The load says every second what it did; it is well under way when it has committed something.
    let mut progress = BufReader::new(load.stderr.take().unwrap());
    let mut line = String::new();
    while progress.read_line(&mut line).unwrap() > 0 && !line.contains("commits/s") {
        line.clear();
    }
    nodes[0].kill();
    let mut said = line;
    progress.read_to_string(&mut said).unwrap();
    let output = load.wait_with_output().unwrap();
    let result: serde_json::Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {said}"));
    assert_eq!(output.status.code(), Some(0), "{result}\n{said}");
    assert!(result["committed"].as_u64().unwrap() > 0, "{result}");
    assert_eq!(result["check"]["ok"], true, "{result}");
    assert_eq!(result["total_ok"], true, "{result}");

    // What was committed before is still there, with and without the node that died.
    let others = endpoints[1..].join(",");
    let get = |endpoints: &str| {
        run(&["shell", "--deadline", "20s", "--connect", endpoints, "-e", "get kept"])
    };
    let output = get(&others);
    assert_eq!(text(&output.stdout), "kept = 1\n", "{}", text(&output.stderr));
    nodes[0] = Node::spawn(&dir, "n1");
    nodes[0].ready(&dir, "n1");
    let output = get(&endpoints[0]);
    assert_eq!(text(&output.stdout), "kept = 1\n", "{}", text(&output.stderr));

    assert_eq!(nodes[4].terminate(), Some(0));
    let log = std::fs::read_to_string(dir.join("n5.log")).unwrap();
    assert!(log.contains("SIGTERM") && log.contains("ended in good order"), "{log}");
}

#[test]
fn with_tls_only_who_has_the_token_comes_in() {
    let directory = tempfile::tempdir().unwrap();
    let dir = directory.path().join("dev");
    let base = free_ports(40) + 20;
    let port = base.to_string();
    let made = run(&[
        "serve",
        "--init",
        dir.to_str().unwrap(),
        "--topology",
        "local3",
        "--partitions",
        "3",
        "--base-port",
        &port,
        "--tls",
    ]);
    assert_eq!(made.status.code(), Some(0), "{}", text(&made.stderr));
    let token = std::fs::read_to_string(dir.join("admin.token")).unwrap();
    assert!(!text(&made.stdout).contains(token.trim()), "a secret is not printed");
    let _nodes = start(&dir, &NAMES[..3]);
    let endpoint = format!("127.0.0.1:{base}");
    let (authority, token) = (dir.join("tls/ca.pem"), dir.join("admin.token"));
    let secure = ["--tls-ca", authority.to_str().unwrap()];
    let known = ["--token-file", token.to_str().unwrap()];
    let shell = ["shell", "--deadline", "20s", "--connect", &endpoint, "-e", "add n 1"];
    let output = run(&[&shell[..], &secure, &known].concat());
    assert_eq!(text(&output.stdout), "committed\n", "{}", text(&output.stderr));
    let output = run(&[&shell[..], &secure].concat());
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("not authenticated"), "{}", text(&output.stderr));
}

#[test]
fn mistakes_in_the_files_are_named_before_anything_starts() {
    let directory = tempfile::tempdir().unwrap();
    let dir = directory.path().join("dev");
    let made = run(&["serve", "--init", dir.to_str().unwrap()]);
    assert_eq!(made.status.code(), Some(0), "{}", text(&made.stderr));
    let again = run(&["serve", "--init", dir.to_str().unwrap()]);
    assert_eq!(again.status.code(), Some(2));
    assert!(text(&again.stderr).contains("not empty"));
    for (file, from, to, expected) in [
        ("n1.toml", "node = \"n1\"", "node = \"n9\"", "`node`: n9 is none"),
        ("n1.toml", "node = \"n1\"", "nod = \"n1\"", "n1.toml:3:1: unknown field `nod`"),
        ("n1.toml", "127.0.0.1", "0.0.0.0", "`tls`: it is missing"),
        ("n1.toml", "durability = \"sync\"", "durability = \"some\"", "unknown variant `some`"),
        ("n1.toml", "cluster.toml", "cluster.tomb", "cluster.tomb"),
        ("cluster.toml", "carousel-basic", "carousal", "there is no protocol \"carousal\""),
        ("cluster.toml", "azure5", "azure9", "azure9"),
        ("cluster.toml", "replicas = 3", "replicas = 2", "2 replicas"),
        ("cluster.toml", "n5 = ", "n6 = ", "n5 (in SG) has no address"),
        ("cluster.toml", ":7409", ":7408", "another node has the address"),
        ("cluster.toml", "cluster = \"dev\"", "cluster = \"D E\"", "`cluster`"),
    ] {
        let path = dir.join(file);
        let right = std::fs::read_to_string(&path).unwrap();
        let wrong = right.replace(from, to);
        assert_ne!(right, wrong, "{from} is not in {file}");
        std::fs::write(&path, wrong).unwrap();
        let config = dir.join("n1.toml");
        for check in [&["--check"][..], &[]] {
            let arguments = ["serve", "--config", config.to_str().unwrap()];
            let output = run(&[&arguments[..], check].concat());
            let stderr = text(&output.stderr);
            assert!(stderr.contains(expected), "{file}: {to}: {stderr}");
            assert_eq!(output.status.code(), Some(2), "{stderr}");
        }
        std::fs::write(&path, right).unwrap();
    }
    assert!(!dir.join("data").exists(), "nothing was started");
}
