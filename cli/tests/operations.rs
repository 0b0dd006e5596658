//! What `operations/` offers for Prometheus and Grafana, beside what a running cluster exports.

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
#[path = "middleware/tools.rs"]
mod tools;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use orthodrome_core::ordered::{OrdMap, OrdSet};

use processes::{Cluster, free_ports, free_redis_prefix, must_end_within, run, text, until};
use serde_json::Value;
use tools::{is_here, skipped};

const LIMIT: Duration = Duration::from_secs(300);

/// Debian's package of Prometheus and of its tool.
const NO_PROMETHEUS: &str = "Prometheus cannot be installed (Debian's package prometheus)";

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("operations")
}

fn file(name: &str) -> String {
    std::fs::read_to_string(folder().join(name)).unwrap()
}

/// The body of a page, which the server must answer with 200.
fn page(address: &str, path: &str) -> Result<String, String> {
    let fail = |error: std::io::Error| format!("{address}{path}: {error}");
    let mut stream = TcpStream::connect(address).map_err(fail)?;
    // HTTP/1.0, so that the body is not sent in chunks.
    write!(stream, "GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n").map_err(fail)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).map_err(fail)?;
    let (head, body) = answer.split_once("\r\n\r\n").ok_or("no end of the head")?;
    match head.split_whitespace().nth(1) {
        Some("200") => Ok(body.to_owned()),
        _ => Err(format!("{address}{path}: {head}\n{body}")),
    }
}

/// A transaction at each node.
fn write_a_key(cluster: &Cluster) {
    let place = cluster.path().join("one");
    std::fs::write(&place, "put a 3\n").unwrap();
    for number in cluster.numbers() {
        let endpoint = cluster.endpoint(number);
        let mut shell = processes::orthodrome(&["shell", "--connect", &endpoint]);
        let output = shell.stdin(std::fs::File::open(&place).unwrap()).output().unwrap();
        assert!(output.status.success(), "n{number}: {}", text(&output.stderr));
    }
}

/// Three nodes that have done something of everything: every metric has a value.
fn busy_cluster() -> Cluster {
    let prefix = free_redis_prefix();
    let own = format!("listen = \"127.0.0.1:{prefix}");
    let changes = [("listen = \"127.0.0.1:63", own.as_str())];
    // A protocol with leaders that also measures something itself.
    let arguments = ["--topology", "local3", "--protocol", "natto-recsf", "--redis"];
    let mut cluster = Cluster::init(3, &arguments, &changes);
    cluster.start(1..=3);
    let half = "x".repeat(600 << 10);
    let script = format!(
        "put a 1\nbegin a -> a\nput a 2\ncommit\nbegin\nget a\nput b 1\ncommit\nput long {half}\nappend long {half}\n"
    );
    let place = cluster.path().join("script");
    std::fs::write(&place, script).unwrap();
    for number in 1..=3 {
        let endpoint = cluster.endpoint(number);
        let mut shell =
            processes::orthodrome(&["shell", "--deadline", "60s", "--connect", &endpoint]);
        let output = shell.stdin(std::fs::File::open(&place).unwrap()).output().unwrap();
        let said = text(&output.stderr);
        assert_eq!(text(&output.stdout).matches("committed").count(), 4, "n{number}: {said}");
        assert!(said.contains("aborted: too-large"), "n{number}: {said}");
        let mut redis =
            TcpStream::connect(("127.0.0.1", prefix * 100 + 78 + number as u16)).unwrap();
        // A command that works, and one that does not.
        let commands = [&["SET", "word", "tea"][..], &["INCR", "word"], &["QUIT"]];
        redis.write_all(commands.map(redis_command).concat().as_bytes()).unwrap();
        let mut answers = String::new();
        redis.read_to_string(&mut answers).unwrap();
        assert!(answers.contains("+OK\r\n-ERR"), "{answers}");
        until("every link has measured a round trip", || {
            let page = page(&endpoint, "/metrics").unwrap();
            page.matches("orthodrome_peer_round_trip_seconds{").count() == 2
        });
    }
    cluster
}

/// A command in the protocol of Redis.
fn redis_command(words: &[&str]) -> String {
    let words: Vec<String> =
        words.iter().map(|word| format!("${}\r\n{word}\r\n", word.len())).collect();
    format!("*{}\r\n{}", words.len(), words.concat())
}

/// The labels of each metric on a page of `/metrics`.
fn exported(page: &str) -> OrdMap<String, OrdSet<String>> {
    let mut all = OrdMap::<String, OrdSet<String>>::new();
    for line in page.lines().filter(|line| !line.starts_with('#')) {
        let (name, labels) = line.split_once('{').unwrap();
        let labels = labels.rsplit_once('}').unwrap().0;
        let names = labels.split("\",").map(|label| label.split_once('=').unwrap().0.to_owned());
        all.entry(name.to_owned()).or_default().extend(names);
    }
    all
}

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// The metrics of a query, each with the labels that select among its series.
fn selected(query: &str) -> Vec<(String, Vec<String>)> {
    let mut found = Vec::new();
    let mut rest = query;
    while let Some(at) = rest.find("orthodrome_") {
        let end = rest[at..].find(|c| !is_word(c)).map_or(rest.len(), |length| at + length);
        let name = rest[at..end].to_owned();
        rest = &rest[end..];
        let mut labels = Vec::new();
        if let Some((inside, after)) = rest.strip_prefix('{').and_then(|rest| rest.split_once('}'))
        {
            let names = inside.split(',').filter_map(|label| label.split(['=', '!']).next());
            labels = names.map(str::to_owned).collect();
            rest = after;
        }
        found.push((name, labels));
    }
    found
}

/// The labels by which a query groups or matches.
fn grouped(query: &str) -> Vec<String> {
    let parts = ["by (", "on ("].into_iter().flat_map(|word| query.split(word).skip(1));
    parts
        .flat_map(|part| part.split(')').next().unwrap().split(','))
        .map(|label| label.trim().to_owned())
        // These are added by Prometheus, or belong to every histogram.
        .filter(|label| !["instance", "job", "le"].contains(&label.as_str()))
        .collect()
}

/// The queries of the dashboard: each with the title of its panel.
fn dashboard() -> Vec<(String, String)> {
    let dashboard: Value = serde_json::from_str(&file("grafana.json")).unwrap();
    let mut queries = Vec::new();
    let mut ids = OrdSet::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        let title = panel["title"].as_str().unwrap();
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "{title}: the id is used twice");
        if panel["type"] == "row" {
            continue;
        }
        assert!(!panel["description"].as_str().unwrap().is_empty(), "{title} is not explained");
        let targets = panel["targets"].as_array().unwrap();
        assert!(!targets.is_empty(), "{title} shows nothing");
        for target in targets {
            queries.push((title.to_owned(), target["expr"].as_str().unwrap().to_owned()));
        }
    }
    for variable in dashboard["templating"]["list"].as_array().unwrap() {
        if variable["type"] == "query" {
            let query = variable["definition"].as_str().unwrap();
            let inside = query.strip_prefix("label_values(").unwrap().trim_end_matches(')');
            let (metric, label) = inside.split_once(", ").unwrap();
            queries.push((query.to_owned(), format!("count by ({label}) ({metric})")));
        }
    }
    queries
}

/// The values of a key in a file of rules: `alert: NAME`, and expressions of one or several lines.
fn rules(text: &str, key: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        let words = line.trim_start().trim_start_matches("- ");
        let Some(value) = words.strip_prefix(key).and_then(|rest| rest.strip_prefix(": ")) else {
            continue;
        };
        if value != "|" {
            found.push(value.trim_matches('"').to_owned());
            continue;
        }
        let depth = |line: &str| line.len() - line.trim_start().len();
        let mut block = String::new();
        while let Some(next) = lines.next_if(|next| depth(next) > depth(line)) {
            block += next.trim_start();
            block.push(' ');
        }
        found.push(block);
    }
    found
}

#[test]
fn every_metric_of_the_dashboard_the_alerts_and_the_page_is_exported() {
    must_end_within(LIMIT);
    let cluster = busy_cluster();
    let exported = exported(&page(&cluster.endpoint(1), "/metrics").unwrap());
    let alerts = rules(&file("alerts.yml"), "expr").into_iter();
    let mut queries: Vec<_> = alerts.map(|query| ("alerts.yml".to_owned(), query)).collect();
    assert!(queries.len() > 5, "only {} alerts found: is the search broken?", queries.len());
    queries.extend(dashboard());
    assert!(queries.len() > 30, "only {} queries found: is the search broken?", queries.len());
    for (place, query) in &queries {
        let metrics = selected(query);
        assert!(query.contains("orthodrome_") || query.contains("up{"), "{place}: {query}");
        for (metric, labels) in &metrics {
            let known = exported.get(metric);
            let known = known.unwrap_or_else(|| panic!("{place}: no node exports {metric}"));
            for label in labels {
                assert!(known.contains(label), "{place}: {metric} has no label {label}");
            }
        }
        for label in grouped(query) {
            let has = |(metric, _): &(String, _)| exported[metric].contains(&label);
            assert!(metrics.iter().any(has), "{place}: {query}: no label {label}");
        }
    }
    // A family of metrics in the documentation, such as a histogram, has a common beginning.
    let documentation =
        std::fs::read_to_string(folder().parent().unwrap().join("docs/database.md")).unwrap();
    let table = documentation.lines().filter(|line| line.starts_with("| `orthodrome_"));
    let named: OrdSet<_> = table.flat_map(selected).map(|(name, _)| name).collect();
    assert!(named.len() > 15, "only {named:?} found: is the search broken?");
    for name in &named {
        let of_family = ["", "_count"].map(|end| format!("{name}{end}"));
        assert!(of_family.iter().any(|name| exported.contains_key(name)), "{name} is not exported");
    }
    // Whatever is exported is explained.
    for name in exported.keys() {
        let family =
            ["_bucket", "_sum", "_count", "_limit"].iter().find_map(|end| name.strip_suffix(end));
        let family = family.unwrap_or(name);
        assert!(named.contains(family), "docs/database.md does not name {family}");
    }
}

/// The parts of the page in the next event.
fn event(events: &mut BufReader<TcpStream>) -> OrdMap<String, String> {
    loop {
        let mut line = String::new();
        let read = events.read_line(&mut line).unwrap();
        assert!(read > 0, "the events ended");
        if let Some(data) = line.strip_prefix("data: ") {
            return serde_json::from_str(data).unwrap();
        }
    }
}

#[test]
fn the_console_of_a_node_shows_its_cluster_and_follows_its_transactions() {
    must_end_within(LIMIT);
    let cluster = busy_cluster();
    let endpoint = cluster.endpoint(1);
    let console = page(&endpoint, "/console").unwrap();
    // One pill for each region, and one row for each node.
    assert_eq!(console.matches("1/1 up").count(), 3, "{console}");
    assert_eq!(console.matches(">up<").count(), 2, "{console}");
    // A reason without aborts has another class.
    until("the abort is counted", || {
        page(&endpoint, "/console").unwrap().contains("<tr><td>too-large</td>")
    });

    let mut stream = TcpStream::connect(&endpoint).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    write!(stream, "GET /console/events HTTP/1.0\r\nHost: {endpoint}\r\n\r\n").unwrap();
    let mut events = BufReader::new(stream);
    let first = event(&mut events);
    assert!(first["round-trips"].contains("<td"), "{first:?}");
    assert!(!first["keys"].contains("busy-key"), "{first:?}");
    let place = cluster.path().join("more");
    std::fs::write(&place, "put busy-key 1\nput busy-key 2\nput busy-key 3\n").unwrap();
    let mut shell = processes::orthodrome(&["shell", "--deadline", "60s", "--connect", &endpoint]);
    let output = shell.stdin(std::fs::File::open(&place).unwrap()).output().unwrap();
    assert_eq!(text(&output.stdout).matches("committed").count(), 3);
    until("the key is shown", || {
        event(&mut events).get("keys").is_some_and(|keys| keys.contains("busy-key"))
    });
}

#[test]
fn the_example_for_prometheus_names_the_nodes_of_an_example_cluster() {
    let directory = tempfile::tempdir().unwrap();
    let dir = directory.path().join("planet");
    let made = run(&["serve", "--init", dir.to_str().unwrap(), "--topology", "local3"]);
    assert_eq!(made.status.code(), Some(0), "{}", text(&made.stderr));
    let node = std::fs::read_to_string(dir.join("n1.toml")).unwrap();
    let clients = rules(&node.replace(" = ", ": "), "client");
    assert_eq!(clients.len(), 3, "{clients:?}");
    let targets: Vec<String> = clients.iter().map(|client| format!("\"{client}\"")).collect();
    let line = format!("targets: [{}]", targets.join(", "));
    assert!(file("prometheus.yml").contains(&line), "operations/prometheus.yml lacks {line}");
}

#[test]
fn alerts_are_valid_and_fire_when_their_tests_say_so() {
    let alerts: OrdSet<String> = rules(&file("alerts.yml"), "alert").into_iter().collect();
    let tested: OrdSet<String> = rules(&file("alerts_test.yml"), "alertname").into_iter().collect();
    assert_eq!(alerts, tested, "each alert has a test in operations/alerts_test.yml");
    if !is_here("promtool", "--version") {
        return skipped(NO_PROMETHEUS);
    }
    for arguments in [["check", "config", "prometheus.yml"], ["test", "rules", "alerts_test.yml"]] {
        let mut promtool = Command::new("promtool");
        let output = processes::output(promtool.args(arguments).current_dir(folder()));
        let said = [output.stdout, output.stderr].map(|bytes| text(&bytes)).concat();
        assert!(output.status.success(), "promtool {}: {said}", arguments.join(" "));
        assert!(said.contains("SUCCESS"), "{said}");
    }
}

/// A Prometheus of its own; killed when dropped.
struct Prometheus {
    process: Child,
    address: String,
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Prometheus {
    /// Starts it with the committed file, but for the nodes at `targets`, and scrapes often.
    fn start(dir: &Path, targets: &[String]) -> Self {
        let config = file("prometheus.yml");
        let (head, _) = config.split_once("      - targets: [").unwrap();
        let list: Vec<String> = targets.iter().map(|target| format!("\"{target}\"")).collect();
        let config = format!("{head}      - targets: [{}]\n", list.join(", "));
        let often = "scrape_interval: 1s\n  evaluation_interval: 1s";
        let config = config.replace("scrape_interval: 15s", often);
        std::fs::write(dir.join("prometheus.yml"), config).unwrap();
        std::fs::copy(folder().join("alerts.yml"), dir.join("alerts.yml")).unwrap();
        let address = format!("127.0.0.1:{}", free_ports(1));
        let mut command = Command::new("prometheus");
        command.arg(format!("--web.listen-address={address}"));
        command.arg(format!("--storage.tsdb.path={}", dir.join("data").display()));
        command.arg(format!("--config.file={}", dir.join("prometheus.yml").display()));
        let log = std::fs::File::create(dir.join("log")).unwrap();
        let process = command.stdout(Stdio::null()).stderr(log).spawn().unwrap();
        Self { process, address }
    }

    fn get(&self, path: &str) -> Result<Value, String> {
        let answer = page(&self.address, path)?;
        serde_json::from_str(&answer).map_err(|error| format!("{error}: {answer}"))
    }

    /// The series that a query returns.
    fn query(&self, query: &str) -> Result<Vec<Value>, String> {
        let byte = |byte: u8| match byte.is_ascii_alphanumeric() {
            true => char::from(byte).to_string(),
            false => format!("%{byte:02X}"),
        };
        let encoded: String = query.bytes().map(byte).collect();
        let answer = self.get(&format!("/api/v1/query?query={encoded}"))?;
        let result = answer["data"]["result"].as_array();
        Ok(result.ok_or_else(|| format!("{query}: {answer}"))?.clone())
    }
}

#[test]
fn prometheus_scrapes_a_cluster_and_every_panel_shows_something() {
    if !is_here("prometheus", "--version") {
        return skipped(NO_PROMETHEUS);
    }
    must_end_within(LIMIT);
    let mut cluster = busy_cluster();
    let directory = tempfile::tempdir().unwrap();
    let targets: Vec<String> = cluster.numbers().map(|number| cluster.endpoint(number)).collect();
    let prometheus = Prometheus::start(directory.path(), &targets);
    // A rate needs two scrapes.
    until("Prometheus has scraped each node twice", || {
        let twice = "count_over_time(orthodrome_build_info[5m]) >= 2";
        prometheus.query(twice).is_ok_and(|series| series.len() == 3)
    });
    for (panel, query) in dashboard() {
        let query = query.replace("$region", ".*").replace("$__rate_interval", "5m");
        // What a protocol measures is forgotten while nothing happens.
        let mut is_first = true;
        until(&format!("{panel} is not empty: {query}"), || {
            if !std::mem::take(&mut is_first) {
                write_a_key(&cluster);
            }
            let series = prometheus.query(&query);
            !series.unwrap_or_else(|error| panic!("{panel}: {error}")).is_empty()
        });
    }
    for query in rules(&file("alerts.yml"), "expr") {
        prometheus.query(&query).unwrap();
    }
    cluster.kill([3]);
    let dead = cluster.endpoint(3);
    until("the alert about the dead node is pending", || {
        let alerts = prometheus.get("/api/v1/alerts").unwrap();
        alerts["data"]["alerts"].as_array().unwrap().iter().any(|alert| {
            let labels = &alert["labels"];
            labels["alertname"] == "OrthodromeNodeDown" && labels["instance"] == *dead
        })
    });
}
