//! The demonstration as a new user runs it: real sockets, real files, a region that dies.

#![allow(
    clippy::disallowed_types,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    missing_docs,
    reason = "tests of real processes; an unmet expectation is a failed test"
)]

mod processes;

use std::process::{Command, Output};

fn demo(arguments: &[&str]) -> Output {
    let mut demo = Command::new(env!("CARGO_BIN_EXE_orthodrome"));
    processes::output(demo.arg("demo").args(arguments).env_remove("NO_COLOR"))
}

#[test]
fn the_demo_keeps_every_guarantee_while_a_region_dies_and_returns() {
    let directory = tempfile::tempdir().unwrap();
    let dir = directory.path().join("demo");
    let output = demo(&["--seconds", "12", "--json", "--dir", dir.to_str().unwrap()]);
    let stderr = String::from_utf8(output.stderr).unwrap();
    let result: serde_json::Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: no JSON object alone; {stderr}"));
    assert_eq!(output.status.code(), Some(0), "{result}\n{stderr}");
    assert_eq!(result["protocol"], "geodesic");
    assert!(result["committed"].as_u64().unwrap() > 0, "{result}");
    assert!(result["committed_during_outage"].as_u64().unwrap() > 0, "{result}\n{stderr}");
    assert!(result["recovery_ms"].as_f64().unwrap() > 0.0, "{result}");
    assert_eq!(result["regions"].as_object().unwrap().len(), 5, "{result}");
    // No protocol beats the floor; the emulated distances hold.
    assert!(result["floor_ratio"]["p50"].as_f64().unwrap() >= 1.0, "{result}");
    let latencies = result["latency_ms"].as_object().unwrap();
    assert_eq!(latencies.keys().collect::<Vec<_>>(), ["all", "high", "low"]);
    assert_eq!(latencies["all"]["n"], result["committed"]);
    assert_eq!(result["total_ok"], true, "{result}");
    assert_eq!(result["check"]["ok"], true, "{result}");
    assert_eq!(result["check"]["model"], "strict-serializable");
    assert!(dir.join("data").is_dir());
    let check = Command::new(env!("CARGO_BIN_EXE_orthodrome"))
        .args(["check", dir.join("history.jsonl").to_str().unwrap()])
        .output()
        .unwrap();
    assert_eq!(check.status.code(), Some(0), "{check:?}");
}

#[test]
fn without_a_fault_no_outage_is_reported() {
    let directory = tempfile::tempdir().unwrap();
    let dir = directory.path().join("demo");
    let output =
        demo(&["--seconds", "3", "--no-fault", "--rising", "--dir", dir.to_str().unwrap()]);
    let stdout = String::from_utf8(output.stdout).unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{stdout}\n{stderr}");
    for expected in ["no money was created or lost", "attempts is strict-serializable", "history "]
    {
        assert!(stdout.contains(expected), "{expected:?} is not in {stdout}");
    }
    assert!(!stdout.contains("down"), "{stdout}");
    assert!(stderr.contains("commits/s"), "without a terminal there is a line a second: {stderr}");
    assert!(!stdout.contains('\x1b') && !stderr.contains('\x1b'), "no colours in a pipe");
}

/// The shell begins when the results are there, and the regions end with it.
#[test]
fn a_shell_is_open_on_the_regions_after_the_results() {
    let directory = tempfile::tempdir().unwrap();
    let script = directory.path().join("script");
    let last = "describe\nadd visits 2\nadd visits 3\nget visits\n";
    std::fs::write(&script, last).unwrap();
    let dir = directory.path().join("demo");
    let run = |script: &std::path::Path| {
        let dir = dir.to_str().unwrap();
        let mut demo = Command::new(env!("CARGO_BIN_EXE_orthodrome"));
        demo.args(["demo", "--seconds", "3", "--no-fault", "--shell", "--dir", dir]);
        demo.stdin(std::fs::File::open(script).unwrap()).output().unwrap()
    };
    let output = run(&script);
    let stdout = String::from_utf8(output.stdout).unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{stdout}\n{stderr}");
    let (results, shell) = stdout.split_once("The regions are still running").unwrap();
    assert!(results.contains("attempts is strict-serializable"), "{stdout}");
    for region in ["NSW", "PR", "SG", "VA", "WA"] {
        let gateway =
            |line: &str| line.starts_with(&format!("  {region} ")) && line.contains("127.0.0.1:");
        assert!(shell.lines().any(gateway), "{region} is not in {shell}");
    }
    assert!(shell.contains("keyspace   default: geodesic"), "{shell}");
    assert!(shell.ends_with("committed\ncommitted\nvisits = 5\n"), "{shell}");

    // A command that fails in a pipe makes the whole command fail.
    std::fs::write(&script, "fetch visits\n").unwrap();
    std::fs::remove_dir_all(&dir).unwrap();
    let output = run(&script);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8(output.stderr).unwrap().contains("error: line 1: "));
}

#[test]
fn invalid_arguments_are_refused_with_status_2() {
    let used = tempfile::tempdir().unwrap();
    std::fs::write(used.path().join("precious"), "data").unwrap();
    for (arguments, expected) in [
        (vec!["--protocol", "carousal"], "unknown protocol \"carousal\""),
        (vec!["--dir", used.path().to_str().unwrap()], "not empty"),
        (vec!["--seconds", "0"], "--seconds"),
        (vec!["--shell", "--json"], "--json"),
    ] {
        let output = demo(&arguments);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(stderr.contains(expected), "{stderr}");
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(output.stdout.is_empty());
    }
    assert!(used.path().join("precious").is_file());
}

#[test]
fn servers_of_other_kinds_are_one_database_and_none_of_the_money_is_lost() {
    let directory = tempfile::tempdir().unwrap();
    let dir = directory.path().join("demo");
    let output = demo(&[
        "--middleware",
        "--seconds",
        "12",
        "--clients",
        "4",
        "--json",
        "--dir",
        dir.to_str().unwrap(),
    ]);
    let stderr = String::from_utf8(output.stderr).unwrap();
    let result: serde_json::Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: no JSON object alone; {stderr}"));
    assert_eq!(output.status.code(), Some(0), "{result}\n{stderr}");
    assert_eq!(result["sources"].as_array().unwrap().len(), 4, "{result}");
    assert!(result["committed"].as_u64().unwrap() > 0, "{result}");
    assert_eq!(result["latency_ms"]["all"]["n"], result["committed"], "{result}");
    assert_eq!(result["killed"].as_array().unwrap().len(), 2, "{result}\n{stderr}");
    // The emulated distances hold.
    assert!(result["latency_ms"]["within London"]["p50"].as_f64().unwrap() > 250.0, "{result}");
    assert_eq!(result["total_ok"], true, "{result}");
    // The servers and their files are gone.
    let left: Vec<_> = std::fs::read_dir(&dir).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(left.iter().all(|name| !name.to_string_lossy().starts_with("server")), "{left:?}");
}
