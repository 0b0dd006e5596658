//! The Python client on clusters of real processes: its wheel, its types, its calls while a node
//! fails, its examples, and TLS.

#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::wildcard_enum_match_arm,
    missing_docs,
    reason = "tests of real processes; an unmet expectation is a failed test"
)]

mod processes;
#[path = "middleware/tools.rs"]
mod tools;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use processes::{Cluster, must_end_within, text};
use tools::skipped;

const LIMIT: Duration = Duration::from_secs(600);

fn source() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("clients/python")
}

/// Runs a program of the client's folder, and returns what it printed.
fn python(python: &Path, program: &str, arguments: &[&str]) -> String {
    let mut command = Command::new(python);
    // The installed package counts, not the sources.
    command.current_dir(source().join("tests")).arg(source().join(program)).args(arguments);
    let output = processes::output(&mut command);
    let said = text(&output.stderr);
    assert!(output.status.success(), "{program}: {}{said}", text(&output.stdout));
    text(&output.stdout)
}

#[test]
fn python_client_keeps_its_promises_while_a_node_fails() {
    must_end_within(LIMIT);
    let interpreter = match tools::python_client(&source()) {
        Ok(interpreter) => interpreter,
        Err(why) => return skipped(&format!("no Python client: {why}")),
    };
    python(&interpreter, "tests/test_engine.py", &[]);
    let mut types = Command::new(&interpreter);
    types.current_dir(source()).args(["-m", "mypy", "--cache-dir"]);
    let output = processes::output(types.arg(std::env::temp_dir().join("orthodrome-mypy")));
    assert!(output.status.success(), "mypy: {}", text(&output.stdout));

    // The client runs transactions without declared keys by reconnaissance here.
    let mut cluster = Cluster::init(3, &["--topology", "local3", "--partitions", "3"], &[]);
    cluster.start(1..=3);
    let endpoints = cluster.endpoints(1..=3);
    let balance = ["shell", "--connect", &cluster.endpoint(1), "-e", "put account/ada 15"];
    assert!(processes::run(&balance).status.success());
    let example = [endpoints.as_str(), "ada", "bob", "10"];
    let printed = python(&interpreter, "examples/transfer.py", &example);
    assert_eq!(printed, "ada has 5 left\n");
    let mut served: Vec<String> =
        python(&interpreter, "examples/waiting_line.py", &[&endpoints, "ada", "bob", "cleo"])
            .lines()
            .map(String::from)
            .collect();
    served.sort();
    assert_eq!(served, ["ada", "bob", "cleo"]);
    let process = cluster.nodes[&1].id().to_string();
    let printed = python(&interpreter, "tests/cluster.py", &[&endpoints, &process]);
    assert_eq!(printed, "done\n");
    // The test has killed it.
    drop(cluster.nodes.remove(&1));
    cluster.end();

    // Here the gateway runs them in rounds.
    let arguments = ["--topology", "local3", "--partitions", "3", "--protocol", "2pl", "--tls"];
    let mut secure = Cluster::init(3, &arguments, &[]);
    secure.start(1..=3);
    let (authority, token) = (secure.dir().join("tls/ca.pem"), secure.dir().join("admin.token"));
    let files = [authority.to_str().unwrap(), token.to_str().unwrap()];
    let printed =
        python(&interpreter, "tests/secure.py", &[&secure.endpoint(1), files[0], files[1]]);
    assert_eq!(printed, "done\n");
    secure.end();
}
