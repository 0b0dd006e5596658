//! The command line as users see it: where output goes, and the exit status.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    missing_docs,
    reason = "tests may panic, and are their own documentation"
)]

mod processes;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

const PROTOCOL: &str = "carousel-basic";

fn run(arguments: &[&str]) -> Output {
    processes::output(Command::new(env!("CARGO_BIN_EXE_orthodrome")).args(arguments))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Runs a command that ends with `status`, and parses the JSON object that it prints.
fn json(status: i32, arguments: &[&str]) -> Value {
    let output = run(arguments);
    assert_eq!(output.status.code(), Some(status), "{arguments:?}: {}", text(&output.stderr));
    assert_eq!(text(&output.stderr), "", "{arguments:?}: no progress without a terminal");
    assert_eq!(text(&output.stdout).lines().count(), 1, "{arguments:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Runs a command that is refused with one line, and returns this line.
fn refused(arguments: &[&str]) -> String {
    let output = run(arguments);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}");
    assert_eq!(text(&output.stdout), "", "{arguments:?}");
    let line = text(&output.stderr);
    assert!(line.starts_with("error: ") && line.lines().count() == 1, "{arguments:?}: {line}");
    line
}

fn sim<'a>(more: &[&'a str]) -> Vec<&'a str> {
    let base = ["sim", "--protocol", PROTOCOL, "--topology", "azure5", "--duration", "3s"];
    [base.as_slice(), more].concat()
}

/// As `… | head -1` does, with standard output and with standard error.
#[test]
fn closed_standard_output_is_not_an_error() {
    let history = tempfile::tempdir().unwrap();
    let history = history.path().join("h.jsonl");
    let history = history.to_str().unwrap();
    assert_eq!(run(&sim(&["--workload", "bank", "--history", history])).status.code(), Some(0));
    for arguments in [
        vec![],
        vec!["--help"],
        vec!["--version"],
        vec!["sim", "--help"],
        sim(&["--workload", "bank"]),
        sim(&["--workload", "bank", "--json"]),
        vec!["check", history],
        vec!["completions", "bash"],
        vec!["reproduce", "list"],
        vec!["topology", "--help"],
        vec!["sim", "--protocol", "none"],
        vec!["no-such-verb"],
    ] {
        let (out, err) = (std::io::pipe().unwrap(), std::io::pipe().unwrap());
        drop((out.0, err.0));
        let mut command = Command::new(env!("CARGO_BIN_EXE_orthodrome"));
        let status = command.args(&arguments).stdout(out.1).stderr(err.1).status().unwrap();
        let expected = run(&arguments).status;
        assert_eq!(status.code(), expected.code(), "{arguments:?}: {status}");
    }
}

#[test]
fn a_file_without_its_directory_is_refused_before_anything_runs() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("none/file");
    let file = file.to_str().unwrap();
    let compare =
        ["compare", "--protocols", PROTOCOL, "--topology", "azure5", "--workload", "bank"];
    // The run would take far longer than a test may.
    let long = ["--duration", "10h", "--rate", "10000"];
    for (option, arguments) in [
        ("--html", [compare.as_slice(), &long, &["--html", file]].concat()),
        ("--html", vec!["reproduce", "all", "--html", file]),
        ("--history", sim(&["--workload", "bank", "--history", file])),
        ("--trace", sim(&["--workload", "bank", "--trace", file])),
        ("--history", vec!["load", "--workload", "bank", "--history", file]),
    ] {
        let line = refused(&arguments);
        assert!(line.starts_with(&format!("error: {option} {file}: ")), "{line}");
        assert!(line.ends_with("create it first\n"), "{line}");
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn an_init_that_fails_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let inside = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    fs::create_dir(inside("empty")).unwrap();
    for name in ["new", "new/in/new", "empty"] {
        let dir = inside(name);
        for wrong in [["--topology", "none"], ["--base-port", "65530"], ["--replicas", "99"]] {
            refused(&[["serve", "--init", &dir].as_slice(), &wrong].concat());
            assert!(!Path::new(&inside("new")).exists(), "{name} {wrong:?}");
            assert_eq!(fs::read_dir(inside("empty")).unwrap().count(), 0, "{name} {wrong:?}");
        }
    }
    // Two listeners at one port would fail at the start.
    let line = refused(&["serve", "--init", &inside("new"), "--redis", "--base-port", "6378"]);
    assert!(line.contains("clients of Redis at ports 6379 to"), "{line}");
    assert!(!Path::new(&inside("new")).exists());
    // Existing files remain.
    fs::write(folder.path().join("empty/mine"), "mine").unwrap();
    let line = refused(&["serve", "--init", &inside("empty")]);
    assert!(line.contains("not empty"), "{line}");
    assert!(folder.path().join("empty/mine").exists());
}

#[test]
fn measurements_that_cannot_be_are_refused_before_servers_start() {
    for (option, value) in [("--zipf", "NaN"), ("--distributed", "2")] {
        let output = run(&["measure", option, value]);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(option) && said.contains("a number from 0 to"), "{said}");
    }
}

#[test]
fn without_arguments_the_program_prints_its_help() {
    let output = run(&[]);
    assert_eq!(output.status.code(), Some(0));
    let help = text(&output.stdout).split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(!help.contains('\x1b'), "colours without a terminal: {help}");
    for part in ["fewest wide-area round trips", "sim", "swarm", "check", "trace", "completions"] {
        assert!(help.contains(part), "{part}: {help}");
    }
}

#[test]
fn sim_prints_the_published_fields_and_equal_seeds_give_equal_runs() {
    let arguments = sim(&["--workload", "ycsbt:4", "--rate", "60", "--seed", "7", "--json"]);
    let mut first = json(0, &arguments);
    for field in [
        "protocol",
        "topology",
        "workload",
        "seed",
        "simulated_seconds",
        "wall_seconds",
        "events",
        "offered_tps",
        "committed_tps",
        "committed",
        "aborted_attempts",
        "failed",
        "commit_rate",
        "latency_ms",
        "floor_ratio",
        "wan_round_trips",
        "bytes_per_txn",
        "messages_per_txn",
        "path",
        "commit",
        "figures",
        "trace_hash",
    ] {
        assert!(!first[field].is_null(), "{field} is missing: {first}");
    }
    for group in ["all", "high", "low"] {
        for field in ["n", "mean", "p50", "p90", "p95", "p99", "p999", "max"] {
            assert!(first["latency_ms"][group][field].is_number(), "latency_ms.{group}.{field}");
        }
    }
    assert!(first.get("check").is_none(), "no history was kept");
    assert_eq!(first["figures"], "simulated");
    assert!(first["committed"].as_u64().unwrap() > 50, "{first}");

    let mut again = json(0, &arguments);
    for result in [&mut first, &mut again] {
        result.as_object_mut().unwrap().remove("wall_seconds");
    }
    assert_eq!(first, again);
    let other = json(0, &sim(&["--workload", "ycsbt:4", "--rate", "60", "--seed", "8", "--json"]));
    assert_ne!(first["trace_hash"], other["trace_hash"]);
}

#[test]
fn dependent_transactions_are_simulated_natively_and_by_reconnaissance() {
    let directory = tempfile::tempdir().unwrap();
    let history = directory.path().join("history.jsonl");
    let history = history.to_str().unwrap();
    let map = ["sim", "--topology", "azure5", "--duration", "3s", "--workload"];
    let load = ["list-append:dependent", "--rate", "60", "--verify", "--json"];
    let kept = ["--protocol", "2pl-pow", "--history", history];
    let result = json(0, &[&map[..], &load, &kept].concat());
    assert_eq!(result["workload"], "list-append:dependent");
    assert_eq!(result["check"]["ok"], true, "{result}");
    assert!(result["notes"]["LaterRound"].as_u64().unwrap() > 20, "upgrades: {result}");
    let other = ["--protocol", "tapir", "--history", history];
    let result = json(0, &[&map[..], &load, &other].concat());
    assert_eq!(result["check"]["ok"], true, "{result}");
    assert!(result["kinds"]["follow"]["latency_ms"]["n"].as_u64().unwrap() > 10, "{result}");
    let line = refused(&sim(&["--workload", "list-append:independent"]));
    assert!(line.contains("list-append:dependent"), "{line}");
}

#[test]
fn sim_keeps_a_history_that_check_accepts_and_a_trace_that_diagrams() {
    let folder = tempfile::tempdir().unwrap();
    let history = folder.path().join("run.jsonl").display().to_string();
    let trace = folder.path().join("run.trace").display().to_string();
    let more = [
        "--workload",
        "list-append",
        "--rate",
        "10",
        "--history",
        &history,
        "--trace",
        &trace,
        "--verify",
        "--json",
    ];
    let result = json(0, &sim(&more));
    assert_eq!(result["check"]["ok"], true);
    assert_eq!(result["check"]["model"], "strict-serializable");
    assert_eq!(result["check"]["anomaly"], Value::Null);

    let verdict = json(0, &["check", &history, "--json"]);
    assert_eq!(verdict["ok"], true);
    assert!(verdict["transactions"]["ok"].as_u64().unwrap() > 10, "{verdict}");

    let content = fs::read_to_string(&trace).unwrap();
    let begin = content.lines().find(|line| line.contains(" begin ")).unwrap();
    let txn = begin.split(' ').nth(5).unwrap();
    let output = run(&["trace", "diagram", &trace, "--txn", txn]);
    assert_eq!(output.status.code(), Some(0));
    let diagram = text(&output.stdout);
    assert!(diagram.starts_with("sequenceDiagram\n"), "{diagram}");
    assert!(diagram.contains("gateway") && diagram.contains("->>"), "{diagram}");

    let listed = json(0, &["trace", "list", &trace, "--json"]);
    let all = listed["transactions"].as_array().unwrap();
    assert_eq!(all[0]["txn"], txn);
    let begun: orthodrome_core::ordered::OrdSet<&str> = content
        .lines()
        .filter(|line| !line.starts_with('#') && line.split(' ').nth(2) == Some("begin"))
        .filter_map(|line| line.split(' ').nth(5)?.split('#').next())
        .collect();
    let names = all.iter().filter(|row| row["gateway"] != "");
    let names: orthodrome_core::ordered::OrdSet<&str> =
        names.map(|row| row["txn"].as_str().unwrap()).collect();
    assert_eq!(names, begun, "every transaction is listed once");
    let slow =
        json(0, &["trace", "list", &trace, "--slowest", "2", "--outcome", "committed", "--json"]);
    let slow = slow["transactions"].as_array().unwrap();
    let latency = |row: &Value| row["latency_ms"].as_f64().unwrap();
    assert_eq!(slow.len(), 2);
    let committed =
        all.iter().filter(|row| row["outcome"].as_str().unwrap().starts_with("committed@"));
    let slowest = committed.map(latency).fold(0.0, f64::max);
    assert_eq!(latency(&slow[0]), slowest);
    assert!(latency(&slow[1]) <= slowest);
    let one = ["trace", "list", &trace, "--slowest", "1", "--outcome", "committed"];
    let table = text(&run(&one).stdout);
    for part in ["transaction", "latency", "committed", "attempts"] {
        assert!(table.contains(part), "{part} is not in {table}");
    }
    assert!(refused(&["trace", "list", &history]).contains("run.jsonl:1: "));

    let line = refused(&["trace", "diagram", &trace, "--txn", "c99999.1"]);
    assert!(line.contains("--txn c99999.1") && line.contains("no event"), "{line}");
    assert!(refused(&["trace", "diagram", &trace, "--txn", "x"]).contains("c4.19"));
    assert!(refused(&["trace", "diagram", &history, "--txn", txn]).contains("run.jsonl:1: "));
}

fn history(folder: &Path, name: &str, lines: &[&str]) -> String {
    let path = folder.join(name);
    let rows = lines.iter().enumerate().map(|(number, line)| {
        let id = number + 1;
        format!(r#"{{"txn":"c{id}.1","process":{id},"region":"VA","priority":"low",{line}}}"#)
            + "\n"
    });
    fs::write(&path, rows.collect::<String>()).unwrap();
    path.display().to_string()
}

#[test]
fn check_distinguishes_correct_anomalous_and_unreadable_histories() {
    let folder = tempfile::tempdir().unwrap();
    let write = |at: u64, ops: &str| {
        format!(r#""invoke_us":{at},"complete_us":{},"status":"ok","ops":{ops}"#, at + 5)
    };
    let first = write(10, r#"[["append","k",1]]"#);
    // The second transaction began when the first had ended, and does not see it: not strictly
    // serializable, but serializable.
    let stale = write(20, r#"[["r","k",[]]]"#);
    let fresh = write(30, r#"[["r","k",[1]]]"#);
    let good = history(folder.path(), "good.jsonl", &[&first, &fresh]);
    let late = history(folder.path(), "late.jsonl", &[&first, &stale, &fresh]);
    assert_eq!(json(0, &["check", &good, "--json"])["ok"], true);
    assert_eq!(json(0, &["check", &late, "--model", "serializable", "--json"])["ok"], true);
    let verdict = json(1, &["check", &late, "--json"]);
    assert_eq!(verdict["ok"], false);
    assert!(verdict["anomalies"][0]["cycle"].as_array().unwrap().len() >= 2, "{verdict}");
    let shown = text(&run(&["check", &late]).stdout);
    assert!(shown.contains("FAILED") && shown.contains("c2.1 before c1.1"), "{shown}");

    let broken = history(folder.path(), "broken.jsonl", &[&first, r#""invoke_us":-1"#]);
    let line = refused(&["check", &broken]);
    assert!(line.contains("broken.jsonl:2: field `invoke_us`"), "{line}");
    let empty = history(folder.path(), "empty.jsonl", &[]);
    assert!(refused(&["check", &empty]).contains("no transactions"));
    assert!(refused(&["check", "nowhere.jsonl"]).contains("nowhere.jsonl"));
}

#[test]
fn bad_input_is_refused_with_its_place_and_a_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, content: &str| {
        let path = folder.path().join(name);
        fs::write(&path, content).unwrap();
        path.display().to_string()
    };
    let map = file("map.toml", "name = 3\n");
    let faults =
        file("faults.toml", "[[faults]]\nat_ms = 1\nfault.crash = { nodes = [\"n99\"] }\n");
    let typo = file("typo.toml", "[[faults]]\nat = 1\n");
    let load = file("load.toml", "workload = \"bank\"\n[options]\nkyes = 4\n");
    let bank = ["--workload", "bank"];
    let cases: [(Vec<&str>, &[&str]); 12] = [
        (
            vec!["sim", "--protocol", "x", "--topology", "azure5", "--workload", "bank"],
            &["--protocol", "\"x\"", PROTOCOL],
        ),
        (
            vec!["sim", "--protocol", PROTOCOL, "--topology", "mars", "--workload", "bank"],
            &["--topology mars", "azure5"],
        ),
        (
            vec!["sim", "--protocol", PROTOCOL, "--topology", &map, "--workload", "bank"],
            &["map.toml:1:8: "],
        ),
        (sim(&["--workload", "bnak"]), &["--workload", "bnak", "list-append"]),
        (sim(&["--workload", &load]), &["load.toml:3:1: ", "kyes"]),
        (sim(&["--workload", "bank", "--zipf", "11"]), &["zipf", "11"]),
        (sim(&[&bank[..], &["--faults", &faults]].concat()), &["faults.toml", "n99"]),
        (sim(&[&bank[..], &["--faults", &typo]].concat()), &["typo.toml:2:1: ", "at"]),
        (sim(&[&bank[..], &["--warmup", "3s"]].concat()), &["--warmup 3s", "shorter"]),
        (
            vec!["compare", "--topology", "local3", "--workload", "bank", "--duration", "0s"],
            &["--duration", "above 0"],
        ),
        (
            vec![
                "compare",
                "--protocols",
                "2pl,tapir,2pl",
                "--topology",
                "local3",
                "--workload",
                "bank",
            ],
            &["--protocols", "2pl twice"],
        ),
        (
            vec!["swarm", "--protocol", PROTOCOL, "--seeds", "1..2", "--schedule", "nope.toml"],
            &["--schedule nope.toml"],
        ),
    ];
    for (arguments, parts) in cases {
        let line = refused(&arguments);
        for part in parts {
            assert!(line.contains(part), "{line:?} does not contain {part:?}");
        }
    }
    let usage: [&[&str]; 6] = [
        &["sim", "--workload", "bank", "--rate", "5", "--clients", "5"],
        &["sim", "--workload", "bank", "--replicas", "2"],
        &["sim", "--workload", "bank", "--duration", "60"],
        &["swarm", "--seeds", "5..5"],
        &["sim", "--workload", "bank", "--rate", "-5"],
        &["nonsense"],
    ];
    for arguments in usage {
        assert_eq!(run(arguments).status.code(), Some(2), "{arguments:?}");
    }
}

#[test]
fn swarm_counts_seeds_faults_and_failures() {
    let folder = tempfile::tempdir().unwrap();
    let failures = folder.path().display().to_string();
    let result = json(
        0,
        &[
            "swarm",
            "--protocol",
            PROTOCOL,
            "--seeds",
            "1..4",
            "--twice",
            "--failures",
            &failures,
            "--json",
        ],
    );
    let tally = &result["protocols"][0];
    assert_eq!((&tally["protocol"], &tally["seeds"]), (&PROTOCOL.into(), &3.into()));
    assert!(tally["transactions_checked"].as_u64().unwrap() > 100, "{tally}");
    assert!(tally["simulated_hours"].as_f64().unwrap() > 0.005, "{tally}");
    let line = refused(&["swarm", "--protocol", PROTOCOL, "--mutation", "wisdom"]);
    assert!(line.contains("--mutation wisdom: carousel-basic has no such mutation"), "{line}");
}

#[test]
fn completions_contain_every_command() {
    for shell in ["bash", "zsh", "fish"] {
        let output = run(&["completions", shell]);
        assert_eq!(output.status.code(), Some(0));
        let script = text(&output.stdout);
        assert!(script.contains("swarm") && script.contains("--high-priority") || shell == "fish");
        assert!(script.contains("high-priority"), "{shell}");
    }
}

#[test]
fn reproduce_lists_its_figures() {
    let output = run(&["reproduce"]);
    assert_eq!(output.status.code(), Some(0));
    let listed = text(&output.stdout);
    assert!(listed.contains("N7a") && listed.contains("Carousel, Fig. 4"), "{listed}");
    assert!(refused(&["reproduce", "N99"]).contains("N99: unknown figure"));
}

#[test]
fn a_comparison_page_loads_nothing_from_the_network() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("report.html");
    let base = ["compare", "--topology", "azure5", "--workload", "retwis", "--duration", "3s"];
    let base =
        [&base[..], &["--protocols", "2pl,ocean-vista", "--html", path.to_str().unwrap()]].concat();
    let output = run(&[&base[..], &["--loads", "0.5,2"]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let page = std::fs::read_to_string(&path).unwrap();
    for part in
        ["--loads 0.5,2", "p95 ms", "<svg class=\"map\"", "By offered load", "retwis on azure5"]
    {
        assert!(page.contains(part), "{part} is not on the page");
    }
    // The name of a namespace is not an address.
    let links = page.replace("http://www.w3.org/2000/svg", "");
    for loaded in ["http:", "https:", "src=", "<link", "@import", "url("] {
        assert!(!links.contains(loaded), "the page has {loaded}");
    }
    // One transaction of each protocol; every message was sent before it arrived, and during the
    // transaction.
    let (_, rest) = page.split_once("const journeys=").unwrap();
    let (data, _) = rest.split_once(";</script>").unwrap();
    let journeys: Value = serde_json::from_str(data).unwrap();
    let journeys = journeys.as_array().unwrap();
    let names: Vec<_> =
        journeys.iter().map(|journey| journey["protocol"].as_str().unwrap()).collect();
    assert_eq!(names, ["ocean-vista", "2pl"]);
    for journey in journeys {
        let took = journey["took_ms"].as_f64().unwrap();
        let steps = journey["steps"].as_array().unwrap();
        assert!(took > 50.0 && steps.len() > 3, "{journey}");
        assert!(steps.iter().any(|step| step["own"] == true), "{journey}");
        for step in steps {
            let (sent, at) = (step["sent_ms"].as_f64().unwrap(), step["at_ms"].as_f64().unwrap());
            assert!(0.0 <= sent && sent < at && at <= took, "{step} of {took}");
        }
    }
    for bad in ["0", "many"] {
        let output = run(&[&base[..], &["--loads", bad]].concat());
        assert_eq!(output.status.code(), Some(2));
        assert!(text(&output.stderr).contains("--loads"), "{}", text(&output.stderr));
    }
}

#[test]
fn compare_puts_protocols_side_by_side() {
    let base = ["compare", "--topology", "azure5", "--workload", "retwis", "--duration", "3s"];
    let with = |more: &[&'static str]| [base.as_slice(), more].concat();
    let result = json(0, &with(&["--protocols", "tapir,carousel-basic", "--seeds", "2", "--json"]));
    let compared = result["protocols"].as_array().unwrap();
    let names: Vec<&str> = compared.iter().map(|one| one["protocol"].as_str().unwrap()).collect();
    assert_eq!(names, ["carousel-basic", "tapir"], "the order of the registry");
    for one in compared {
        let runs = one["runs"].as_array().unwrap();
        let seeds: Vec<u64> = runs.iter().map(|run| run["seed"].as_u64().unwrap()).collect();
        assert_eq!(seeds, [1, 2]);
        for run in runs {
            assert_eq!(run["protocol"], one["protocol"]);
            assert!(run["committed"].as_u64().unwrap() > 100, "{run}");
            assert_eq!(run["failure"], Value::Null);
        }
    }
    // The same result as in a run alone.
    let alone = json(0, &sim(&["--workload", "retwis", "--seed", "2", "--json"]));
    let paired = &compared[0]["runs"][1];
    for field in ["events", "committed", "latency_ms", "bytes_per_txn"] {
        assert_eq!(paired[field], alone[field], "{field}");
    }

    let output = run(&with(&["--protocols", "carousel-basic,2pl", "--high-priority", "0.5"]));
    assert_eq!(output.status.code(), Some(0));
    let table = text(&output.stdout);
    for part in ["Simulated", "carousel-basic", "2pl", "committed/s", "p95 high"] {
        assert!(table.contains(part), "{part}: {table}");
    }
    assert!(!table.contains("tapir"), "{table}");

    for (bad, names) in [
        (with(&["--protocols", "tapir,paxos"]), "--protocols paxos"),
        (with(&["--warmup", "4s"]), "--warmup"),
        (with(&["--zipf=-1"]), "--workload"),
        (with(&["--keys", "3"]), "--workload"),
        (with(&["--keys-per-rank", "3"]), "--workload"),
    ] {
        let line = refused(&bad);
        assert!(line.contains(names), "{line}");
    }
    for bad in [["--seeds", "0"], ["--read-only-as", "snapshot"]] {
        let output = run(&with(&bad));
        assert_eq!(output.status.code(), Some(2), "{bad:?}");
    }
}

#[test]
fn transactions_begin_in_the_given_regions() {
    let base = ["--workload", "ycsbt:2", "--json"];
    for load in [["--rate", "50"], ["--clients", "40"]] {
        let more = ["--origins", "VA=3,SG=1"];
        let result = json(0, &sim(&[base.as_slice(), &load, &more].concat()));
        let regions = result["regions"].as_object().unwrap();
        let n = |name: &str| regions.get(name).map_or(0, |summary| summary["n"].as_u64().unwrap());
        assert_eq!(n("WA") + n("PR") + n("NSW"), 0, "{regions:?}");
        // Clients in Singapore wait longer for each transaction.
        assert!(n("SG") > 10 && n("VA") > 2 * n("SG"), "{regions:?}");
    }
    for (bad, names) in [
        ("LA=1", "\"LA\" has no gateway; use some of VA, WA, PR, NSW, SG"),
        ("VA=0", "no region has a share above 0"),
    ] {
        let line = refused(&sim(&["--workload", "ycsbt:2", "--origins", bad]));
        assert!(line.contains(names), "{line}");
    }
}

#[test]
fn own_workloads_and_topologies_are_simulated() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, content: &str| {
        let path = folder.path().join(name);
        fs::write(&path, content).unwrap();
        path.to_str().unwrap().to_owned()
    };
    // A trace, the history of a run, and YCSB's properties.
    let trace = "{\"region\":\"VA\",\"reads\":[\"a\"]}\n{\"region\":\"SG\",\"reads\":[\"a\"],\"writes\":[\"b\"]}\n";
    let trace = file("shop.jsonl", trace);
    let history = folder.path().join("run.jsonl").to_str().unwrap().to_owned();
    json(0, &sim(&["--workload", "list-append", "--rate", "30", "--json", "--history", &history]));
    let properties =
        file("a.properties", "recordcount=100\nreadproportion=0.5\nupdateproportion=0.5\n");
    for (workload, kinds) in [
        (&trace, &["read", "update"][..]),
        (&history, &["read", "update"]),
        (&properties, &["centralized"]),
    ] {
        let result = json(0, &sim(&["--workload", workload, "--rate", "50", "--verify", "--json"]));
        assert!(result["committed"].as_u64().unwrap() > 50, "{workload}: {result}");
        assert!(kinds.iter().all(|kind| result["kinds"][kind].is_object()), "{workload}: {result}");
    }
    let bad = file("bad.jsonl", "{\"reads\":[\"a\"]}\n{}\n");
    let line = refused(&sim(&["--workload", &bad]));
    assert!(line.contains("bad.jsonl") && line.contains("line 2"), "{line}");

    // `topology measure` needs an address that listens.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let to = format!("Far={}", listener.local_addr().unwrap());
    let output = run(&["topology", "measure", "--region", "Here", "--to", &to, "--count", "3"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let lines = text(&output.stdout);
    assert_eq!(lines.lines().filter(|line| line.starts_with("Here Far ")).count(), 3, "{lines}");
    let measured = file("here.rtt", &lines);
    let third = file("third.rtt", "Third Here 80\nThird Far 81.5\n");
    let output = run(&["topology", "join", "--name", "ours", &measured, &third]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let map = file("ours.toml", &text(&output.stdout));
    let base = ["sim", "--protocol", PROTOCOL, "--topology", &map, "--workload", "ycsbt:2"];
    let result = json(0, &[base.as_slice(), &["--duration", "3s", "--json"]].concat());
    assert_eq!(result["topology"], "ours");
    let line = refused(&["topology", "join", &measured, &file("x.rtt", "Third Here 80\n")]);
    assert!(line.contains("no measurement between Far and Third"), "{line}");
}

#[test]
fn egress_has_a_price_where_one_is_given() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("shop.toml");
    let plan = |price: &str, more: &[&str]| {
        let goal = "workload = \"ycsbt:2\"\n[goal]\nobjective = \"egress\"\n";
        fs::write(&path, format!("{goal}{price}\n")).unwrap();
        let workload = path.to_str().unwrap();
        let base = ["plan", "--topology", "ec2-3", "--workload", workload, "--rate", "20"];
        let short = ["--protocols", "carousel-basic", "--duration", "6s", "--seeds", "1"];
        run(&[base.as_slice(), &short, more].concat())
    };
    let figure = |output: &Output| {
        let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
        let best = plan["recommended"].clone();
        let runs = best["runs"][0].clone();
        (plan["unit"].clone(), best["figure"].as_f64().unwrap(), runs)
    };
    let (unit, bytes, run) = figure(&plan("", &["--json"]));
    assert_eq!(unit, "bytes between regions per transaction");
    assert_eq!(run["egress_dollars"], Value::Null);
    // A dollar for ten gigabytes everywhere: the price of a million transactions is a ten
    // thousandth of the bytes of one.
    let price = "egress_price = { Virginia = 0.1, Frankfurt = 0.1, Seoul = 0.1 }";
    let (unit, dollars, run) = figure(&plan(price, &["--json"]));
    assert_eq!(unit, "dollars per million transactions");
    assert!((dollars - bytes * 1e-4).abs() < 1e-6, "{dollars} for {bytes}");
    assert_eq!(run["egress_bytes_per_txn"].as_f64(), Some(bytes));
    for (price, problem) in [
        ("egress_price = { Virginia = 0.1 }", "Frankfurt has no price"),
        ("egress_price = { Moon = 0.1 }", "Moon: the topology has no such region"),
        ("egress_price = { Virginia = -1 }", "use dollars per gigabyte"),
    ] {
        let output = plan(price, &[]);
        assert_eq!(output.status.code(), Some(2));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains(problem), "{said}");
    }
}

#[test]
fn sources_are_of_the_middleware_alone_and_change_what_it_does() {
    let base = ["--workload", "ycsb:2", "--rate", "20", "--duration", "6s", "--json"];
    let of = |protocol: &str, kind: &str| {
        let place = ["sim", "--protocol", protocol, "--topology", "geotp4", "--partitions", "4"];
        let sources = ["--gateways", "Beijing", "--sources", kind];
        [&place[..], &base, &sources].concat().iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    let hash = |kind: &str| {
        let words = of("geotp", kind);
        json(0, &words.iter().map(String::as_str).collect::<Vec<_>>())["trace_hash"].clone()
    };
    let hashes = [hash("mariadb"), hash("mixed"), hash("postgres")];
    assert!(hashes[0] != hashes[1] && hashes[1] != hashes[2], "{hashes:?}");
    let words = of("2pl", "mixed");
    let line = refused(&words.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(line.contains("2pl is not a protocol of the middleware"), "{line}");
}

#[test]
fn a_plan_beats_the_naive_placement_and_its_files_are_right() {
    let folder = tempfile::tempdir().unwrap();
    let workload = folder.path().join("shop.toml");
    let goal = "workload = \"ycsbt:2\"\norigins = { VA = 3, WA = 1 }\n[goal]\nobjective = \"p50\"\nsurvive = 1\n";
    fs::write(&workload, goal).unwrap();
    let workload = workload.to_str().unwrap();
    let base = ["plan", "--topology", "azure5", "--workload", workload, "--rate", "20"];
    let with = |more: &[&'static str]| [base.as_slice(), more].concat();
    let short = ["--protocols", "carousel-basic,2pl", "--duration", "6s", "--seeds", "2"];
    let plan = json(0, &with(&[short.as_slice(), &["--json"]].concat()));
    assert_eq!((&plan["objective"], &plan["survive"]), (&"p50".into(), &1.into()));
    let best = &plan["recommended"];
    let figure = |pair: &Value| pair["figure"].as_f64().unwrap();
    // Half of the naive placement's latency: the naive placement has its leaders where no users
    // are.
    for naive in ["same_protocol_naive", "best_naive"] {
        assert_eq!(plan[naive]["placement"], "naive");
        assert!(figure(best) < 0.7 * figure(&plan[naive]), "{plan}");
    }
    for other in plan["runners_up"].as_array().unwrap() {
        assert!(figure(other) >= figure(best));
    }
    let partitions = best["partitions"].as_array().unwrap();
    assert_eq!((partitions.len(), best["runs"].as_array().unwrap().len()), (5, 2));
    for partition in partitions {
        let leader = partition["leader"].as_str().unwrap();
        assert!(["VA", "WA"].contains(&leader), "{partition}");
        assert_eq!(partition["replicas"].as_array().unwrap().len(), 3);
    }
    // Whichever region dies, the others continue.
    let deaths = plan["deaths"].as_array().unwrap();
    assert!(deaths.len() >= 3);
    for death in deaths {
        assert!(death["failure"].is_null() && death["committed"].as_u64().unwrap() > 30, "{death}");
    }

    let dir = folder.path().join("cluster");
    let output = run(&[with(&short).as_slice(), &["--init", dir.to_str().unwrap()]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let said = text(&output.stdout);
    let parts =
        ["Recommended: ", "Runner-up: ", "naively: ", "nodes of a region fail", "Start the nodes:"];
    for part in parts {
        assert!(said.contains(part), "{part}: {said}");
    }
    let checked = run(&["serve", "--check", "--config", dir.join("n1.toml").to_str().unwrap()]);
    assert_eq!(checked.status.code(), Some(0), "{}", text(&checked.stderr));
    // The placement of the first node is the recommended one for its region.
    let led = partitions.iter().filter(|partition| partition["leader"] == "VA").count();
    assert_eq!(text(&checked.stdout).matches("(leads)").count(), led);

    for (bad, names) in [
        (&["--survive", "3"], "--survive 3: needs 7 regions"),
        (&["--objective", "throughput"], "needs --clients"),
        (&["--protocols", "xa"], "--protocols xa: servers do not run"),
        (&["--origins", "LA=1"], "--origins"),
        (&["--faults", "none.toml"], "--faults: not used by plan"),
        (&["--mutation", "S2"], "--mutation: not used by plan"),
    ] {
        let line = refused(&with(bad));
        assert!(line.contains(names), "{line}");
    }
    let output = run(&with(&["--objective", "p90"]));
    assert_eq!(output.status.code(), Some(2));
}

/// Half of Retwis only reads. If such transactions are prepared too, they take a round trip to all
/// replicas that they read.
#[test]
fn reads_that_are_prepared_take_another_round_trip() {
    let trips = |how: &'static str| {
        let args = ["compare", "--topology", "ec2-5", "--workload", "retwis", "--zipf", "0"];
        let more = ["--protocols", "tapir", "--duration", "5s", "--read-only-as", how, "--json"];
        let result = json(0, &[args.as_slice(), more.as_slice()].concat());
        let run = &result["protocols"][0]["runs"][0];
        (run["wan_round_trips"]["mean"].as_f64().unwrap(), run["latency_ms"]["all"]["p50"].as_f64())
    };
    let (short, long) = (trips("read-only"), trips("read-write"));
    assert!(long.0 > short.0 + 0.3 && long.1 > short.1, "{short:?} {long:?}");
}
