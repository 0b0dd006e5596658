//! A cluster of real processes: made by `serve --init`, put under load; one node is killed, and one
//! is asked to end.

#![allow(
    clippy::disallowed_types,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    missing_docs,
    reason = "tests of real processes; an unmet expectation is a failed test"
)]

mod processes;

use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use orthodrome_core::NodeId;
use orthodrome_server::tls::Authority;
use processes::{Cluster, Load, must_end_within, orthodrome, run, text, until};

/// Time limit of one test: many times what it takes on an idle machine.
const LIMIT: Duration = Duration::from_secs(400);

/// A client sees its own commits as soon as they are acknowledged; and an append that would make a
/// value too long is refused for that reason.
#[test]
fn a_shell_reads_its_own_writes() {
    for protocol in ["carousel-basic", "carousel-fast"] {
        let mut cluster = Cluster::init(3, &["--topology", "local3", "--protocol", protocol], &[]);
        cluster.start(1..=3);
        let mut script = String::new();
        let mut expected = String::new();
        for number in 0..20 {
            let key = format!("rr{number}");
            script += &format!("put {key} 1\nbegin {key} -> {key}\nput {key} 2\ncommit\n");
            expected += &format!("committed\n{key} = 1\ncommitted\n");
        }
        let half = "x".repeat(600 << 10);
        script += &format!("put long {half}\nappend long {half}\n");
        expected += "committed\n";
        let path = cluster.path().join("script");
        std::fs::write(&path, script).unwrap();
        let first = cluster.endpoint(1);
        let mut shell = orthodrome(&["shell", "--deadline", "20s", "--connect", &first]);
        let output = shell.stdin(std::fs::File::open(path).unwrap()).output().unwrap();
        let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(stdout, expected, "{protocol}: {stderr}");
        assert!(stderr.contains("aborted: too-large"), "{protocol}: {stderr}");
    }
}

/// Once by rounds at the gateway, and once by reconnaissance: the same shell script, and dependent
/// transactions under load while a node dies.
#[test]
fn transactions_that_find_their_keys_by_reading_run_on_every_protocol() {
    must_end_within(LIMIT);
    let ordered_first = ["calvin", "slog", "slog-consensus", "sloth"];
    for protocol in ["2pl", "carousel-basic", "ocean-vista"].into_iter().chain(ordered_first) {
        let arguments = ["--topology", "local3", "--protocol", protocol];
        let mut cluster = Cluster::init(3, &arguments, &[]);
        cluster.start(1..=3);
        let first = cluster.endpoint(1);
        let shell = ["shell", "--deadline", "60s", "--connect", &first];
        let script =
            "-e|put a b b 5|-e|begin|-e|get a|-e|get b|-e|add b 1|-e|put c d|-e|commit|-e|get b c";
        let script: Vec<&str> = script.split('|').collect();
        let output = run(&[&shell[..], &script].concat());
        assert_eq!(output.status.code(), Some(0), "{protocol}: {}", text(&output.stderr));
        let expected = "committed\nopen\na = b\nb = 5\ncommitted\nb = 6\nc = d\n";
        assert_eq!(text(&output.stdout), expected, "{protocol}");

        let all = cluster.endpoints(1..=3);
        let arguments =
            ["--workload", "list-append:dependent", "--clients", "6", "--duration", "1h"];
        let load = Load::start(&[&["--connect", &all], &arguments[..]].concat());
        load.commits(20);
        cluster.kill([3]);
        load.commits(20);
        let (result, status, said) = load.stop();
        assert_eq!(status, Some(0), "{protocol}: {result}\n{said}");
        assert_eq!(result["check"]["ok"], true, "{protocol}: {result}");
    }
}

/// Each region has two servers with half of its values each. One dies under load, with transactions
/// in progress between the halves. When it is back, what it needs is sent again; and it is needed
/// again when the servers with the same half elsewhere die.
#[test]
fn a_server_that_holds_a_share_dies_and_comes_back() {
    must_end_within(LIMIT);
    for protocol in ["calvin", "slog", "sloth"] {
        let arguments =
            ["--topology", "local3", "--protocol", protocol, "--servers-per-region", "2"];
        let mut cluster = Cluster::init(3, &arguments, &[("#shares = 1", "shares = 2")]);
        cluster.start(1..=6);
        let all = cluster.endpoints(1..=6);
        let arguments = ["--workload", "list-append", "--clients", "8", "--duration", "1h"];
        let load = Load::start(&[&["--connect", &all], &arguments[..]].concat());
        load.commits(40);
        // The first server of each region holds one share, the second the other.
        cluster.kill([2]);
        let pairs: Vec<String> = (0..20).map(|number| format!("k{number} {number}")).collect();
        let keys: Vec<String> = (0..20).map(|number| format!("k{number}")).collect();
        let ask = |cluster: &Cluster, number: u32, line: String| {
            let at = cluster.endpoint(number);
            let output = run(&["shell", "--deadline", "30s", "--connect", &at, "-e", &line]);
            assert_eq!(output.status.code(), Some(0), "{protocol}: {}", text(&output.stderr));
            text(&output.stdout)
        };
        ask(&cluster, 1, format!("put {}", pairs.join(" ")));
        load.commits(40);
        cluster.start([2]);
        // Another of the three servers with the same share.
        cluster.kill([4]);
        load.commits(40);
        let (result, status, said) = load.stop();
        assert_eq!(status, Some(0), "{protocol}: {result}\n{said}");
        assert_eq!(result["check"]["ok"], true, "{protocol}: {result}");
        // All at once: kept parts are on disk.
        cluster.kill([1, 2, 3, 5, 6]);
        cluster.start(1..=6);
        let kept: String = (0..20).map(|number| format!("k{number} = {number}\n")).collect();
        for number in [2, 4] {
            let told = ask(&cluster, number, format!("get {}", keys.join(" ")));
            assert_eq!(told, kept, "{protocol}, n{number}");
        }
    }
}

/// Two of three regions are dead, so that no transaction can be ordered. The third region still
/// serves reads of old states.
#[test]
fn a_region_that_is_alone_tells_what_it_has() {
    must_end_within(LIMIT);
    for protocol in ["calvin", "slog", "slog-consensus", "sloth"] {
        let mut cluster = Cluster::init(3, &["--topology", "local3", "--protocol", protocol], &[]);
        cluster.start(1..=3);
        let ask = |cluster: &Cluster, number: u32, deadline: &str, line: &str| {
            let at = cluster.endpoint(number);
            let output = run(&["shell", "--deadline", deadline, "--connect", &at, "-e", line]);
            (output.status.code(), text(&output.stdout), text(&output.stderr))
        };
        let (status, _, said) = ask(&cluster, 1, "60s", "put a 1 b 1");
        assert_eq!(status, Some(0), "{protocol}: {said}");
        let (none, all) = ("a: nothing\nb: nothing\n", "a = 1\nb = 1\n");
        until(&format!("{protocol}: the third region has what the first has written"), || {
            let (status, told, said) = ask(&cluster, 3, "60s", "get-stale a b");
            assert_eq!(status, Some(0), "{protocol}: {said}");
            assert!([none, all].contains(&&*told), "{protocol}: half a transaction: {told}");
            told == all
        });
        cluster.kill([1, 2]);
        let (status, told, _) = ask(&cluster, 3, "1s", "get a b");
        assert_eq!(
            (status, &*told),
            (Some(1), ""),
            "{protocol}: it cannot know whether that is new"
        );
        let (status, told, said) = ask(&cluster, 3, "60s", "get-stale a b");
        assert_eq!((status, &*told), (Some(0), all), "{protocol}: {said}");
    }
}

/// A server is lost with its disk, and an empty one replaces it under load. Soon the new server is
/// needed: of two partitions, only it and one other server remain.
#[test]
fn an_empty_server_of_ocean_vista_takes_the_place_of_a_lost_one() {
    must_end_within(LIMIT);
    let arguments = ["--topology", "local5", "--protocol", "ocean-vista", "--partitions", "5"];
    let mut cluster = Cluster::init(5, &arguments, &[]);
    cluster.start(1..=5);
    let all = cluster.endpoints(1..=5);
    let load = Load::start(&[
        "--connect",
        &all,
        "--workload",
        "list-append",
        "--clients",
        "6",
        "--duration",
        "1h",
    ]);
    load.commits(40);
    cluster.kill([4]);
    std::fs::remove_dir_all(cluster.dir().join("data/n4")).unwrap();
    load.commits(20);
    cluster.start_with([4], &["--replace"]);
    let new = cluster.endpoint(4);
    let is_complete = || {
        let output = run(&["shell", "--deadline", "60s", "--connect", &new, "-e", "status"]);
        text(&output.stdout)
            .lines()
            .any(|line| line.split_whitespace().collect::<Vec<_>>() == ["n4", "incomplete", "0"])
    };
    until("the new server has copied everything", is_complete);
    cluster.kill([5]);
    load.commits(20);
    let (result, status, said) = load.stop();
    assert_eq!(status, Some(0), "{result}\n{said}");
    assert_eq!(result["check"]["ok"], true, "{result}");
}

#[test]
fn empty_directory_is_rejected_for_a_member() {
    must_end_within(LIMIT);
    let arguments = ["--topology", "local3", "--protocol", "ocean-vista"];
    let mut cluster = Cluster::init(3, &arguments, &[]);
    let data = cluster.dir().join("data/n1");
    let config = cluster.config(1);
    let config = config.to_str().unwrap();
    let refusal = |more: &[&str]| {
        let output = run(&[&["serve", "--config", config], more].concat());
        assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
        text(&output.stderr)
    };
    std::fs::remove_dir_all(&data).unwrap();
    let said = refusal(&[]);
    assert!(said.contains("holds no data of n1") && said.contains("--new-cluster"), "{said}");
    assert!(said.contains("made after the node last ran"), "an older copy loses commits: {said}");
    // Its votes in the directory are known to no other server.
    let said = refusal(&["--replace", "--check"]);
    assert!(said.contains("cannot replace n1"), "{said}");
    let said = refusal(&["--replace"]);
    assert!(said.contains("cannot replace n1"), "{said}");
    assert!(!said.contains("change-members"), "the protocol has no such orders: {said}");
    assert!(!data.exists(), "it was refused and made a data directory");
    let said = refusal(&["--replace", "--new-cluster"]);
    assert!(said.contains("cannot be used with"), "{said}");

    let arguments = ["--topology", "local3", "--protocol", "geodesic", "--replicas", "1"];
    let alone = Cluster::init(3, &arguments, &[]);
    std::fs::remove_dir_all(alone.dir().join("data/n1")).unwrap();
    let config = alone.config(1);
    let output = run(&["serve", "--config", config.to_str().unwrap(), "--replace"]);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("the only replica of p"), "{said}");

    cluster.start_with([1], &["--new-cluster"]);
    let marked = |number: u32| {
        let config = cluster.config(number);
        run(&["serve", "--mark-new", "--config", config.to_str().unwrap()])
    };
    let said = text(&marked(1).stderr);
    assert!(said.contains("holds data of n1 already"), "{said}");
    std::fs::remove_dir_all(cluster.dir().join("data/n2")).unwrap();
    let done = marked(2);
    assert_eq!(done.status.code(), Some(0), "{}", text(&done.stderr));
    assert!(text(&done.stdout).contains("is ready for the first start of n2"));
    cluster.start(2..=3);
    let first = cluster.endpoint(1);
    let output = run(&["shell", "--deadline", "60s", "--connect", &first, "-e", "put kept 1"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    cluster.kill([1]);
    let said = refusal(&["--new-cluster"]);
    assert!(said.contains("holds data of n1 already"), "{said}");
    cluster.start([1]);
    let output = run(&["shell", "--deadline", "60s", "--connect", &first, "-e", "get kept"]);
    assert_eq!(text(&output.stdout), "kept = 1\n", "{}", text(&output.stderr));
}

/// With `replicas = 1` in its file, a node would count its own vote as a majority, and acknowledge what
/// the others do not have.
#[test]
fn a_node_whose_file_places_partitions_otherwise_does_not_serve() {
    must_end_within(LIMIT);
    let arguments = ["--topology", "local3", "--protocol", "tapir"];
    let mut cluster = Cluster::init(3, &arguments, &[]);
    let file = cluster.config(3);
    let right = std::fs::read_to_string(&file).unwrap();
    let changed = |from: &str, to: &str| {
        assert!(right.contains(from), "{from} is not in {right}");
        std::fs::write(&file, right.replace(from, to)).unwrap();
    };
    let serve = |code: i32| {
        let output = run(&["serve", "--config", file.to_str().unwrap()]);
        assert_eq!(output.status.code(), Some(code), "{}", text(&output.stderr));
        text(&output.stderr)
    };
    // A new cluster: no data contradicts the file, but the other nodes do.
    cluster.start(1..=2);
    changed("replicas = 3", "replicas = 1");
    let said = serve(1);
    assert!(said.contains("is not that of n1, n2") || said.contains("is not that of n2"), "{said}");
    // The directory has the placement of the wrong file, and no data.
    std::fs::remove_dir_all(cluster.dir().join("data/n3")).unwrap();
    std::fs::write(&file, &right).unwrap();
    cluster.start_with([3], &["--new-cluster"]);
    let first = cluster.endpoint(1);
    let shell = |command: &str| {
        let output = run(&["shell", "--deadline", "60s", "--connect", &first, "-e", command]);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        text(&output.stdout)
    };
    shell("put kept 1");
    // With data, it does not even start, whether the others run or not.
    cluster.kill(1..=3);
    changed("replicas = 3", "replicas = 1");
    let said = serve(2);
    assert!(said.contains("was made with p0 on n1 n2 n3"), "{said}");
    let file_of_next = right.replace("replicas = 3", "replicas = 1");
    std::fs::write(&file, format!("map_epoch = 2\n{file_of_next}")).unwrap();
    let said = serve(2);
    assert!(said.contains("this protocol cannot move partitions"), "{said}");
    std::fs::write(&file, &right).unwrap();
    cluster.start(1..=3);
    assert_eq!(shell("get kept"), "kept = 1\n");
}

#[test]
fn five_processes_survive_the_death_of_one_and_end_in_good_order() {
    must_end_within(LIMIT);
    let mut cluster = Cluster::init(5, &["--topology", "local5"], &[]);
    let config = cluster.config(1);
    let checked = run(&["serve", "--check", "--config", config.to_str().unwrap()]);
    assert_eq!(checked.status.code(), Some(0), "{}", text(&checked.stderr));
    assert!(text(&checked.stdout).contains("TLS         off (loopback only)"));

    cluster.start(1..=5);
    let first = cluster.endpoint(1);
    let put = ["shell", "--deadline", "60s", "--connect", &first, "-e", "put kept 1"];
    let output = run(&put);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));

    let history = cluster.path().join("history.jsonl");
    let all = cluster.endpoints(1..=5);
    let history = history.to_str().unwrap();
    let arguments = ["--workload", "bank", "--clients", "10", "--duration", "1h"];
    let load = Load::start(&[&["--connect", &all, "--history", history], &arguments[..]].concat());
    load.commits(20);
    cluster.kill([1]);
    load.commits(20);
    let (result, status, said) = load.stop();
    assert_eq!(status, Some(0), "{result}\n{said}");
    assert_eq!(result["check"]["ok"], true, "{result}");
    assert_eq!(result["total_ok"], true, "{result}");

    // Earlier commits are still there, with and without the node that died.
    let get = |endpoints: &str| {
        run(&["shell", "--deadline", "60s", "--connect", endpoints, "-e", "get kept"])
    };
    let output = get(&cluster.endpoints(2..=5));
    assert_eq!(text(&output.stdout), "kept = 1\n", "{}", text(&output.stderr));
    cluster.start([1]);
    let output = get(&first);
    assert_eq!(text(&output.stdout), "kept = 1\n", "{}", text(&output.stderr));

    let last = cluster.nodes.get_mut(&5).unwrap();
    assert_eq!(last.terminate(), Some(0));
    let log = last.log();
    assert!(log.contains("SIGTERM") && log.contains("n5 has shut down"), "{log}");
}

/// A process has a limited number of file descriptors, for its log as well as for its clients.
#[test]
fn connections_that_say_nothing_keep_no_client_out_for_long() {
    must_end_within(LIMIT);
    let mut cluster = Cluster::init(3, &["--topology", "local3"], &[]);
    cluster.start(1..=3);
    let id = cluster.nodes[&1].id().to_string();
    let limited = Command::new("prlimit").args(["--nofile=200:200", "--pid", &id]).status();
    assert!(limited.unwrap().success());
    let endpoint = cluster.endpoint(1);
    // The system accepts those for which the node has no place.
    let silent: Vec<_> = (0..300).map(|_| TcpStream::connect(&endpoint).unwrap()).collect();
    let log = |cluster: &Cluster| cluster.nodes[&1].log();
    until("the node refuses some of them", || log(&cluster).contains("closed a client's"));
    let put = ["shell", "--deadline", "60s", "--connect", &endpoint, "-e", "put a 1"];
    until("a client is served", || text(&run(&put).stdout) == "committed\n");
    assert!(!log(&cluster).contains("Too many open files"), "{}", log(&cluster));
    drop(silent);
    cluster.end();
}

#[test]
fn with_tls_a_client_needs_the_token() {
    must_end_within(LIMIT);
    let mut cluster =
        Cluster::init(3, &["--topology", "local3", "--partitions", "3", "--tls"], &[]);
    let (authority, token) = (cluster.dir().join("tls/ca.pem"), cluster.dir().join("admin.token"));
    cluster.start(1..=3);
    let endpoint = cluster.endpoint(1);
    let secure = ["--tls-ca", authority.to_str().unwrap()];
    let known = ["--token-file", token.to_str().unwrap()];
    let shell = ["shell", "--deadline", "60s", "--connect", &endpoint, "-e", "add n 1"];
    let output = run(&[&shell[..], &secure, &known].concat());
    assert_eq!(text(&output.stdout), "committed\n", "{}", text(&output.stderr));
    let output = run(&[&shell[..], &secure].concat());
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("not authenticated"), "{}", text(&output.stderr));
}

#[test]
fn a_client_certificate_lets_in_whom_the_file_lists_and_nobody_else() {
    must_end_within(LIMIT);
    let mut cluster = Cluster::init(
        3,
        &["--topology", "local3", "--partitions", "3", "--tls"],
        &[("token_file = \"admin.token\"", "certificate_file = \"tls/n2.pem\"")],
    );
    cluster.start(1..=3);
    let tls = cluster.dir().join("tls");
    // A certificate with the right name by an unknown authority.
    let stranger = cluster.path().join("stranger");
    std::fs::create_dir(&stranger).unwrap();
    let authority = Authority::new("dev").unwrap();
    authority.issue(&stranger, NodeId(2), &["localhost".into()]).unwrap();
    let endpoint = cluster.endpoint(1);
    let ask = |dir: Option<&Path>, node: u32| {
        let ca = tls.join("ca.pem");
        let base = ["shell", "--deadline", "60s", "--connect", &endpoint, "-e", "add n 1"];
        let mut arguments: Vec<String> = base.map(String::from).into();
        arguments.extend(["--tls-ca".into(), ca.display().to_string()]);
        if let Some(dir) = dir {
            for (option, kind) in [("--tls-cert", "pem"), ("--tls-key", "key")] {
                let file = dir.join(format!("n{node}.{kind}"));
                arguments.extend([option.into(), file.display().to_string()]);
            }
        }
        let output = run(&arguments);
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    assert_eq!(ask(Some(&tls), 2), (Some(0), "committed\n".into(), String::new()));
    // A certificate that the authority signed but that is not listed; and no certificate.
    for (dir, node) in [(Some(&*tls), 3), (None, 0)] {
        let (status, stdout, stderr) = ask(dir, node);
        assert_eq!((status, &*stdout), (Some(2), ""), "{stderr}");
        assert!(stderr.contains("not authenticated"), "{stderr}");
    }
    let (status, stdout, stderr) = ask(Some(&stranger), 2);
    assert_eq!((status, &*stdout), (Some(2), ""), "{stderr}");
}

#[test]
fn mistakes_in_configuration_files_are_named_before_the_start() {
    must_end_within(LIMIT);
    let directory = tempfile::tempdir().unwrap();
    let dir = directory.path().join("dev");
    let made = run(&["serve", "--init", dir.to_str().unwrap()]);
    assert_eq!(made.status.code(), Some(0), "{}", text(&made.stderr));
    let instructions = text(&made.stdout);
    assert!(instructions.contains("n5.toml"), "{instructions}");
    let again = run(&["serve", "--init", dir.to_str().unwrap()]);
    assert_eq!(again.status.code(), Some(2));
    assert!(text(&again.stderr).contains("not empty"));
    let path = dir.join("n1.toml");
    let right = std::fs::read_to_string(&path).unwrap();
    for (from, to, expected) in [
        ("node = \"n1\"", "node = \"n9\"", "n1.toml:9: node: n9 is not in `nodes`"),
        ("node = \"n1\"", "nod = \"n1\"", "n1.toml:9: unknown field `nod`"),
        ("127.0.0.1", "0.0.0.0", "tls: missing, but 0.0.0.0:"),
        ("#durability = \"sync\"", "durability = \"some\"", "unknown variant `some`"),
        ("geodesic", "geodesik", "unknown protocol \"geodesik\""),
        ("\"azure5\"", "\"azure9\"", "topology: \"azure9\""),
        ("replicas = 3", "replicas = 2", "placement: partition p0 has 2 replicas"),
        ("id = \"n5\"", "id = \"n4\"", "nodes: n4 is listed twice"),
        (":7409", ":7408", "is already an address of n4"),
        ("cluster = \"dev\"", "cluster = \"D E\"", "n1.toml:7: cluster: "),
        ("#keys_max = 1000", "keys_max = 0", "limits.keys_max: 0 is out of range"),
    ] {
        let wrong = right.replace(from, to);
        assert_ne!(right, wrong, "{from} is not in the file");
        std::fs::write(&path, wrong).unwrap();
        for check in [&["--check"][..], &[]] {
            let arguments = ["serve", "--config", path.to_str().unwrap()];
            let output = run(&[&arguments[..], check].concat());
            let stderr = text(&output.stderr);
            assert!(stderr.contains(expected), "{to}: {stderr}");
            assert_eq!(output.status.code(), Some(2), "{stderr}");
        }
    }
    for node in std::fs::read_dir(dir.join("data")).unwrap() {
        let files = std::fs::read_dir(node.unwrap().path()).unwrap();
        let names: Vec<_> = files.map(|file| file.unwrap().file_name()).collect();
        assert_eq!(names, ["NEW"], "nothing was started");
    }
}

#[test]
fn no_secret_is_printed() {
    must_end_within(LIMIT);
    let directory = tempfile::tempdir().unwrap();
    let dir = directory.path().join("dev");
    let made = run(&["serve", "--init", dir.to_str().unwrap(), "--tls"]);
    assert_eq!(made.status.code(), Some(0), "{}", text(&made.stderr));
    let token = std::fs::read_to_string(dir.join("admin.token")).unwrap();
    assert!(!text(&made.stdout).contains(token.trim()));
}

/// Keys are created all the time. Each scan is a transaction that has also read the keys that it did not
/// find, and each watch has shown every acknowledged change; while a node dies and comes back.
#[test]
fn scans_and_watches_under_load_are_checked() {
    must_end_within(LIMIT);
    for protocol in ["natto-recsf", "tapir", "sloth", "geodesic"] {
        let arguments = ["--topology", "local3", "--protocol", protocol];
        let mut cluster = Cluster::init(3, &arguments, &[]);
        cluster.start(1..=3);
        let all = cluster.endpoints(1..=3);
        let arguments = ["--workload", "ranges", "--clients", "6", "--duration", "1h"];
        let load = Load::start(&[&["--connect", &all], &arguments[..]].concat());
        load.commits(60);
        cluster.kill([3]);
        load.commits(60);
        cluster.start([3]);
        load.commits(60);
        let (result, status, said) = load.stop();
        assert_eq!(status, Some(0), "{protocol}: {result}\n{said}");
        assert_eq!(result["check"]["ok"], true, "{protocol}: {result}");
        assert_eq!(result["total_ok"], true, "{protocol}: {result}");
    }
}

/// A file of changes has everything once, in order, although the command that writes it is killed, and
/// so is the node that it asks.
#[test]
fn a_file_of_changes_goes_on_where_a_killed_watch_stopped() {
    must_end_within(LIMIT);
    let arguments = ["--topology", "local3", "--protocol", "geodesic"];
    let mut cluster = Cluster::init(3, &arguments, &[]);
    cluster.start(1..=3);
    let all = cluster.endpoints(1..=3);
    let file = cluster.path().join("changes.jsonl");
    let output = file.to_str().unwrap();
    let watch = || {
        let arguments = ["watch", "n/", "--connect", &all, "--output", output];
        let mut watch = orthodrome(&arguments);
        watch.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    };
    let lines = || -> Vec<serde_json::Value> {
        let text = std::fs::read_to_string(&file).unwrap_or_default();
        let whole = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
        whole.map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let values = |lines: &[serde_json::Value]| -> Vec<String> {
        let value = lines.iter().filter_map(|line| line.get("value")?.as_str());
        value.map(str::to_owned).collect()
    };
    let mut watching = watch();
    until("the watch begins", || lines().iter().any(|line| line.get("through").is_some()));
    let mut expected = Vec::new();
    let mut put = |numbers: std::ops::Range<u32>, at: &str| {
        for number in numbers {
            let command = format!("put n/{} {number}", number % 3);
            let done = run(&["shell", "--deadline", "60s", "--connect", at, "-e", &command]);
            assert_eq!(done.status.code(), Some(0), "{}", text(&done.stderr));
            expected.push(number.to_string());
        }
        expected.clone()
    };
    let third = cluster.endpoint(3);
    let so_far = put(0..8, &third);
    until("the watch shows them", || values(&lines()) == so_far);
    watching.kill().unwrap();
    watching.wait().unwrap();
    let so_far = put(8..16, &third);
    let mut watching = watch();
    until("the next watch shows the rest", || values(&lines()) == so_far);
    cluster.kill([1]);
    let so_far = put(16..24, &third);
    until("another node shows what follows", || values(&lines()) == so_far);
    watching.kill().unwrap();
    watching.wait().unwrap();
    let stamps: Vec<u64> =
        lines().iter().filter_map(|line| line.get("timestamp")?.as_u64()).collect();
    assert!(stamps.is_sorted(), "{stamps:?}");
}

/// A shell attaches keys to leases. They go by themselves when nobody renews the lease, also if the node
/// that granted it is dead, and at once when it is revoked.
#[test]
fn keys_of_a_shell_go_with_their_lease() {
    must_end_within(LIMIT);
    let mut cluster = Cluster::init(3, &["--topology", "local3", "--protocol", "geodesic"], &[]);
    cluster.start(1..=3);
    let (first, second) = (cluster.endpoint(1), cluster.endpoint(2));
    let shell = |at: &str, command: &str| {
        let done = run(&["shell", "--deadline", "60s", "--connect", at, "-e", command]);
        (done.status.code(), text(&done.stdout).trim().to_owned(), text(&done.stderr))
    };
    let ok = |at: &str, command: &str| {
        let (code, stdout, stderr) = shell(at, command);
        assert_eq!(code, Some(0), "{command}: {stderr}");
        stdout
    };
    let short = ok(&first, "lease 3");
    let long = ok(&first, "lease 3600");
    ok(&first, &format!("put-leased {short} session/ada online session/bob away"));
    ok(&second, &format!("put-leased {long} lock me"));
    ok(&second, "put session/bob stays");
    let shown = ok(&second, &format!("show-lease {long}"));
    assert!(shown.starts_with("ends in 40") && shown.ends_with("s\nlock"), "{shown}");
    cluster.kill([1]);
    until("the key goes with its lease", || ok(&second, "get session/ada").ends_with("nothing"));
    assert_eq!(ok(&second, "get session/bob"), "session/bob = stays");
    let (code, _, stderr) = shell(&second, &format!("renew {short}"));
    assert!(code != Some(0) && stderr.contains("has ended"), "{stderr}");
    assert_eq!(ok(&second, &format!("renew {long}")), "renewed");
    assert_eq!(ok(&second, &format!("revoke {long}")), "revoked");
    assert_eq!(ok(&second, "get lock"), "lock: nothing");
    let (code, _, stderr) = shell(&second, &format!("put-leased {long} lock you"));
    assert!(code != Some(0) && stderr.contains("has ended"), "{stderr}");
    cluster.start([1]);
    until("nothing is left of the leases", || ok(&first, "count orthodrome/lease/") == "0 keys");
}
