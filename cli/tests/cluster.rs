//! `cluster start`, `status` and `stop`, as an operator uses them.

#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    missing_docs,
    reason = "tests of real processes; an unmet expectation is a failed test"
)]

mod processes;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use processes::{Load, free_ports, json, must_end_within, orthodrome, run, signal, text, until};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(200);

/// A cluster of three nodes. Its nodes are stopped, however the test ends.
struct Planet {
    _directory: tempfile::TempDir,
    dir: PathBuf,
    port: u16,
}

impl Planet {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let (dir, port) = (directory.path().join("planet"), free_ports(6));
        let base = port.to_string();
        let init = ["serve", "--init", dir.to_str().unwrap(), "--topology", "local3"];
        let made = run(&[&init[..], &["--base-port", &base]].concat());
        assert_eq!(made.status.code(), Some(0), "{}", text(&made.stderr));
        Self { _directory: directory, dir, port }
    }

    fn name(&self) -> &str {
        self.dir.to_str().unwrap()
    }

    /// Starts all nodes, and returns what was said of those that ran already.
    fn start(&self) -> String {
        let started = run(&["cluster", "start", self.name()]);
        assert_eq!(started.status.code(), Some(0), "{}", text(&started.stderr));
        text(&started.stderr)
    }

    /// Stops all three nodes.
    fn stop(&self) {
        let stopped = run(&["cluster", "stop", self.name()]);
        assert_eq!(text(&stopped.stdout), "3 nodes have ended\n", "{}", text(&stopped.stderr));
    }
}

impl Drop for Planet {
    fn drop(&mut self) {
        let _ = run(&["cluster", "stop", self.name()]);
    }
}

fn row<'a>(report: &'a Value, node: &str) -> &'a Value {
    report["nodes"].as_array().unwrap().iter().find(|row| row["node"] == node).unwrap()
}

#[test]
fn status_shows_which_node_is_down_since_when_and_the_version_of_the_others() {
    must_end_within(LIMIT);
    let planet = Planet::new();
    let (dir, name, port) = (&planet.dir, planet.name(), planet.port);
    let status = || json(&run(&["cluster", "status", name, "--json"]));
    let (report, code) = status();
    assert_eq!(code, Some(1), "nothing runs: {report}");
    for node in ["n1", "n2", "n3"] {
        let row = row(&report, node);
        assert_eq!(row["state"], "down");
        assert!(row["down_s"].is_null() && row["version"].is_null(), "nobody knows more: {row}");
    }

    planet.start();
    let (report, code) = status();
    assert_eq!(code, Some(0), "{report}");
    for node in ["n1", "n2", "n3"] {
        let row = row(&report, node);
        assert_eq!(
            (&row["state"], &row["version"]),
            (&"serving".into(), &env!("CARGO_PKG_VERSION").into())
        );
        assert!(row["up_s"].as_f64().unwrap() >= 0.0 && row["down_s"].is_null(), "{row}");
    }
    until("all nodes are connected", || {
        let (report, _) = status();
        let nodes = report["nodes"].as_array().unwrap();
        nodes.iter().all(|row| row["cannot_reach"].as_array().unwrap().is_empty())
    });

    // A person watches meanwhile.
    let mut watch = orthodrome(&["cluster", "status", name, "--watch"]);
    let mut watch = watch.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines().map_while(Result::ok);
    let mut sees = |what: &str, is_so: &dyn Fn(&str) -> bool| {
        let mut seen = Vec::new();
        for line in lines.by_ref() {
            if is_so(&line) {
                return;
            }
            seen.push(line);
        }
        panic!("--watch ended before it showed {what}: {}", seen.join("\n"));
    };
    sees("that all serve", &|line| line.contains("3 of 3 nodes serve"));
    let pid = row(&report, "n2")["process"].as_u64().unwrap();
    signal(u32::try_from(pid).unwrap(), "KILL");
    sees("the dead node", &|line| line.contains("2 of 3 nodes serve"));
    sees("since when", &|line| {
        line.contains(" n2 ") && line.contains(" down ") && line.contains(" s ")
    });

    until("the others know since when n2 is down", || {
        let (report, code) = status();
        assert_eq!(code, Some(1), "{report}");
        row(&report, "n2")["down_s"].as_f64().is_some_and(|seconds| seconds > 1.0)
    });
    let (report, _) = status();
    assert_eq!(row(&report, "n2")["state"], "down");
    assert!(
        row(&report, "n2")["down_s"].as_f64().unwrap()
            < row(&report, "n1")["up_s"].as_f64().unwrap()
    );
    let shell = run(&["shell", "--connect", &format!("127.0.0.1:{port}"), "-e", "status"]);
    let said = text(&shell.stdout);
    let line = |begin: &str| said.lines().find(|line| line.starts_with(begin)).unwrap_or_default();
    assert!(line("n2 is").contains("not connected for "), "{said}");
    assert!(
        line("n3 is").contains("connected for ") && line("n3 is").contains("round trip"),
        "{said}"
    );
    assert!(line("version").ends_with(env!("CARGO_PKG_VERSION")), "{said}");

    let said = planet.start();
    assert!(said.contains("n1 runs already"), "{said}");
    // What the killed process said is kept.
    let before = std::fs::read_to_string(dir.join("n2.log.before")).unwrap();
    assert!(before.contains("serving clients") && !before.contains("has shut down"), "{before}");
    sees("that all serve again", &|line| line.contains("3 of 3 nodes serve"));
    watch.kill().unwrap();
    watch.wait().unwrap();
    planet.stop();
}

/// Transactions that are pending at one node need the others.
#[test]
fn nodes_that_stop_together_finish_what_is_pending() {
    must_end_within(LIMIT);
    let planet = Planet::new();
    let (dir, port) = (&planet.dir, planet.port);
    let all: Vec<String> = (port..port + 3).map(|port| format!("127.0.0.1:{port}")).collect();
    for _ in 0..4 {
        planet.start();
        let workload = ["--workload", "ycsbt:2", "--keys", "20", "--clients", "24"];
        let often = ["--duration", "1h", "--no-check"];
        let load = Load::start(&[&["--connect", &all.join(",")], &workload[..], &often].concat());
        load.commits(200);
        planet.stop();
        for node in ["n1", "n2", "n3"] {
            let log = std::fs::read_to_string(dir.join(format!("{node}.log"))).unwrap();
            assert!(log.contains("has shut down"), "{node}: {log}");
            assert!(!log.contains("shutting down with pending transactions"), "{node}: {log}");
        }
    }
}

/// Two of three disks are lost, and nobody has what was on both.
#[test]
fn status_says_that_a_node_does_not_have_its_data_yet() {
    must_end_within(LIMIT);
    let planet = Planet::new();
    let (dir, name) = (&planet.dir, planet.name());
    planet.start();
    planet.stop();
    let serve = |more: &[&str]| {
        let mut command = orthodrome(&[&["serve", "--config"], more].concat());
        command.current_dir(dir).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    };
    let mut nodes = vec![serve(&["n1.toml"])];
    for node in ["n2", "n3"] {
        std::fs::remove_dir_all(dir.join("data").join(node)).unwrap();
        nodes.push(serve(&[&format!("{node}.toml"), "--replace"]));
    }
    until("the status says what is missing", || {
        let said = text(&run(&["cluster", "status", name]).stdout);
        ["n2", "n3"].iter().all(|node| {
            let begin = format!("{node} does not have all of its data yet; 1 of the nodes");
            said.lines().any(|line| line.starts_with(&begin))
        })
    });
    let (report, _) = json(&run(&["cluster", "status", name, "--json"]));
    assert_eq!(row(&report, "n1")["incomplete"], 0, "{report}");
    assert_eq!(row(&report, "n2")["incomplete"], 5, "{report}");
    planet.stop();
    for mut node in nodes {
        node.wait().unwrap();
    }
}

#[test]
fn nodes_that_were_started_one_by_one_are_shown_and_stopped() {
    must_end_within(LIMIT);
    let planet = Planet::new();
    let name = planet.name();
    let serve = |config: &str| {
        let mut command = orthodrome(&["serve", config]);
        command.current_dir(name);
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    };
    let mut nodes: Vec<_> =
        ["--config=n1.toml", "--config=./n2.toml", "--config=n3.toml"].map(serve).into();
    until("all nodes serve", || run(&["cluster", "status", name]).status.code() == Some(0));
    let (report, _) = json(&run(&["cluster", "status", name, "--json"]));
    assert_eq!(row(&report, "n2")["process"], nodes[1].id());
    let again = run(&["cluster", "start", name]);
    assert!(text(&again.stderr).contains("n2 runs already"), "{}", text(&again.stderr));
    let stopped = run(&["cluster", "stop", name]);
    assert!(text(&stopped.stdout).contains("3 nodes have ended"), "{}", text(&stopped.stdout));
    for node in &mut nodes {
        assert!(node.wait().unwrap().success());
    }
}

#[test]
fn two_starts_at_once_start_each_node_once() {
    must_end_within(LIMIT);
    let planet = Planet::new();
    let name = planet.name();
    let starts = [(); 2].map(|()| {
        let mut start = orthodrome(&["cluster", "start", name]);
        start.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    });
    let ended = starts.map(|start| start.wait_with_output().unwrap());
    let said = ended.each_ref().map(|output| text(&output.stderr));
    assert!(ended.iter().all(|output| output.status.success()), "{said:?}");
    let already = |said: &String| said.matches("runs already").count();
    assert_eq!(said.iter().map(already).sum::<usize>(), 3, "{said:?}");
    let (report, code) = json(&run(&["cluster", "status", name, "--json"]));
    assert_eq!(code, Some(0), "{report}");
    planet.stop();
}

#[test]
fn a_node_that_is_stopping_is_started_again_when_it_has_ended() {
    must_end_within(LIMIT);
    let planet = Planet::new();
    let (dir, name, port) = (&planet.dir, planet.name(), planet.port);
    planet.start();
    // An open transaction keeps the node from ending at once.
    let endpoint = format!("127.0.0.1:{port}");
    let mut shell = orthodrome(&["shell", "--connect", &endpoint]);
    let mut shell = shell.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    shell.stdin.as_mut().unwrap().write_all(b"begin b -> b\n").unwrap();
    let mut answer = [0];
    shell.stdout.as_mut().unwrap().read_exact(&mut answer).unwrap();
    let process: u32 = std::fs::read_to_string(dir.join("n1.pid")).unwrap().trim().parse().unwrap();
    signal(process, "TERM");
    // A busy machine may take a while to deliver the signal.
    let is_whole = || json(&run(&["cluster", "status", name, "--json"])).1 == Some(0);
    until("n1 stops serving", || !is_whole());
    let said = planet.start();
    assert!(!said.contains("n1 runs already"), "{said}");
    let (report, code) = json(&run(&["cluster", "status", name, "--json"]));
    assert_eq!(code, Some(0), "{report}");
    assert_ne!(row(&report, "n1")["process"], process);
    drop(shell.stdin.take());
    shell.wait().unwrap();
    planet.stop();
}
