//! `measure`: the real program with real servers. The test does not check durations.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    missing_docs,
    reason = "tests of real processes; an unmet expectation is a failed test"
)]

mod processes;

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

/// Runs `measure` with a folder of its own for temporary files.
fn measure(temporary: &Path, arguments: &[&str]) -> Output {
    let mut measure = Command::new(env!("CARGO_BIN_EXE_orthodrome"));
    processes::output(measure.arg("measure").args(arguments).env("TMPDIR", temporary))
}

/// The result of a successful run.
fn measured(temporary: &Path, arguments: &[&str]) -> Value {
    let output = measure(temporary, arguments);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    let printed: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: no JSON object alone; {stderr}"));
    assert_eq!(printed["measured"], true, "{printed}");
    assert!(printed["commit"].as_str().is_some_and(|commit| !commit.is_empty()), "{printed}");
    printed
}

fn figure(of: &Value, name: &str) -> f64 {
    of[name].as_f64().unwrap_or_else(|| panic!("{name} is missing: {of}"))
}

#[test]
fn a_mode_is_measured_over_four_servers_in_the_directory_that_was_named() {
    let temporary = tempfile::tempdir().unwrap();
    let dir = temporary.path().join("named");
    // In one second, few transactions end that reach the farthest server.
    let rest = "--seconds 4 --warmup 0 --rows 100 --terminals 4 --modes geotp --json --dir";
    let mut arguments: Vec<&str> = rest.split(' ').collect();
    arguments.push(dir.to_str().unwrap());
    let printed = measured(temporary.path(), &arguments);
    let runs = printed["runs"].as_array().unwrap();
    let [run] = runs.as_slice() else { panic!("not one run: {printed}") };
    assert_eq!((&run["mode"], &run["sources"]), (&"geotp".into(), &"PostgreSQL".into()), "{run}");
    assert!(figure(run, "throughput") > 0.0, "{run}");
    for name in ["mean", "p50", "p99"] {
        assert!(figure(&run["latency_ms"], name) > 0.0, "{name}: {run}");
    }
    let counts = ["centralized_ms", "distributed_ms"].map(|kind| figure(&run[kind], "n"));
    assert_eq!(figure(&run["latency_ms"], "n"), counts.iter().sum::<f64>(), "{run}");
    assert!((0.0..=100.0).contains(&figure(run, "abort_percent")), "{run}");
    // The folder is kept, with a file for the proxy and for each agent.
    for name in ["proxy.toml", "agent1.toml", "agent4.toml"] {
        assert!(dir.join("0").join(name).is_file(), "{name} is missing");
    }
}

#[test]
fn a_statement_is_measured_at_servers_of_both_kinds_and_nothing_is_left() {
    let temporary = tempfile::tempdir().unwrap();
    // Each statement is repeated for an eighth of that time, at least once.
    let arguments = ["--overhead", "--seconds", "1", "--rows", "100", "--json"];
    let printed = measured(temporary.path(), &arguments);
    let statements = printed["statements"].as_array().unwrap();
    for kind in ["postgresql", "mariadb"] {
        let own = statements.iter().filter(|one| one["source"] == kind);
        assert_eq!(own.count(), 6, "three query batches, by one and by eight clients: {printed}");
    }
    for one in statements {
        for at in ["server", "proxy"] {
            assert!(figure(&one[&format!("{at}_ms")], "p50") > 0.0, "{one}");
            assert!(figure(one, &format!("{at}_a_second")) > 0.0, "{one}");
        }
    }
    let left: Vec<_> = std::fs::read_dir(temporary.path()).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_directory_that_is_not_empty_is_refused_with_status_2() {
    let used = tempfile::tempdir().unwrap();
    std::fs::write(used.path().join("precious"), "data").unwrap();
    let name = used.path().to_str().unwrap();
    let output = measure(used.path(), &["--dir", name]);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains(name) && stderr.contains("not empty"), "{stderr}");
    assert!(output.stdout.is_empty());
    assert!(used.path().join("precious").is_file());
}
