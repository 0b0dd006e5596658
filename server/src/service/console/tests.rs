//! The console on a real socket, in front of a scripted gateway.

use std::net::SocketAddr;
use std::time::Duration;

use orthodrome_core::txn::Priority;
use orthodrome_core::{ClientId, NodeId, TxnId};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use super::regions::Rtt;
use super::*;
use crate::gateway::{Pending, PendingTxns, Stage};
use crate::service::tests::{OTHER, Running, TOKEN, map, start, start_until};
use crate::service::{Limits, Listeners, ServiceConfig, serve};
use crate::transport::LinkStatus;

/// Sends a request over HTTP/1.1, and returns the whole answer.
async fn ask(address: SocketAddr, method: &str, path: &str, head: &str, body: &str) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let host = if head.contains("Host:") { String::new() } else { format!("Host: {address}\r\n") };
    let request = format!(
        "{method} {path} HTTP/1.1\r\n{host}Content-Length: {}\r\nConnection: close\r\n{head}\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

async fn get(running: &Running, path: &str, head: &str) -> String {
    ask(running.address, "GET", path, head, "").await
}

fn bearer(token: &str) -> String {
    format!("Authorization: Bearer {token}\r\n")
}

/// A viewer's stream of events.
struct Viewer {
    stream: TcpStream,
    text: String,
}

impl Viewer {
    async fn new(running: &Running) -> Self {
        let mut stream = TcpStream::connect(running.address).await.unwrap();
        let head = bearer(TOKEN);
        let request = format!("GET /console/events HTTP/1.1\r\nHost: n1\r\n{head}\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        Self { stream, text: String::new() }
    }

    /// The next text up to this mark; none if the stream ends before it.
    async fn until(&mut self, mark: &str) -> Option<String> {
        let mut buffer = [0; 4_096];
        loop {
            if let Some((before, after)) = self.text.split_once(mark) {
                let (before, after) = (before.to_owned(), after.to_owned());
                self.text = after;
                return Some(before);
            }
            match self.stream.read(&mut buffer).await.unwrap() {
                0 => return None,
                read => self.text.push_str(std::str::from_utf8(&buffer[..read]).unwrap()),
            }
        }
    }

    /// The parts of the next event.
    async fn event(&mut self) -> Option<OrdMap<String, String>> {
        self.until("data: ").await?;
        let data = self.until("\n\n").await?;
        // The parts are long, and arrive in one chunk for each event.
        Some(serde_json::from_str(&data).unwrap())
    }
}

#[tokio::test]
async fn the_page_and_its_events_need_a_credential() {
    let running = start(Limits::default()).await;
    let unknown = bearer("a-token-of-nobody-at-all");
    for path in ["/console", "/console/events"] {
        for head in ["", unknown.as_str(), "Cookie: orthodrome_token=YQ\r\n"] {
            let answer = get(&running, path, head).await;
            assert!(answer.starts_with("HTTP/1.1 401"), "{path} {head}: {answer}");
            assert!(!answer.contains("serving"), "{answer}");
        }
    }
    let form = get(&running, "/console", "").await;
    assert!(form.contains("action=\"/console/login\""), "{form}");
    let answer = get(&running, "/console", &bearer(TOKEN)).await;
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("serving"), "{answer}");
    // The files of the page contain nothing of the cluster.
    for file in ["console.css", "console.js", "icon.svg"] {
        let answer = get(&running, &format!("/console/{file}"), "").await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
}

#[tokio::test]
async fn a_browser_may_load_nothing_from_elsewhere() {
    let running = start(Limits::default()).await;
    for head in [String::new(), bearer(TOKEN)] {
        let answer = get(&running, "/console", &head).await.to_lowercase();
        let policy = format!("content-security-policy: {POLICY}\r\n").to_lowercase();
        assert!(answer.contains(&policy), "{answer}");
        // The policy forbids all of these, so that a page with one would be broken.
        for forbidden in [" style=", " onclick=", "<style", "http://", "https://", "//cdn"] {
            assert!(!answer.contains(forbidden), "{forbidden} is in {answer}");
        }
    }
    assert!(get(&running, "/", "").await.contains("location: /console\r\n"));
}

#[tokio::test]
async fn the_form_turns_a_token_into_a_cookie() {
    let running = start(Limits::default()).await;
    let post = async |head: &str, body: &str| {
        ask(running.address, "POST", "/console/login", head, body).await
    };
    let answer = post("", &format!("token={TOKEN}")).await;
    assert!(answer.starts_with("HTTP/1.1 303"), "{answer}");
    let line = answer.lines().find_map(|line| line.strip_prefix("set-cookie: ")).unwrap();
    assert!(line.contains("; HttpOnly; SameSite=Strict") && !line.contains(TOKEN), "{line}");
    let (pair, _) = line.split_once(';').unwrap();
    let page = get(&running, "/console", &format!("Cookie: {pair}\r\n")).await;
    assert!(page.starts_with("HTTP/1.1 200"), "{page}");

    let wrong = post("", "token=a-token-of-nobody-at-all").await;
    assert!(wrong.starts_with("HTTP/1.1 401") && wrong.contains("Max-Age=0"), "{wrong}");
    let foreign = post("Sec-Fetch-Site: cross-site\r\n", &format!("token={TOKEN}")).await;
    assert!(foreign.starts_with("HTTP/1.1 403") && !foreign.contains("set-cookie"), "{foreign}");
    let long = post("", &format!("token={}", "a".repeat(2_000))).await;
    assert!(long.starts_with("HTTP/1.1 413"), "{long}");
    let left = ask(running.address, "POST", "/console/logout", "", "").await;
    assert!(left.starts_with("HTTP/1.1 303") && left.contains("Max-Age=0"), "{left}");
}

#[tokio::test]
async fn hot_keys_are_escaped() {
    let running = start(Limits::default()).await;
    for _ in 0..3 {
        running.add_to(TOKEN, b"<script>alert(1)</script>").await;
        running.add_to(OTHER, b"\xff\x00").await;
    }
    let page = get(&running, "/console", &bearer(TOKEN)).await;
    assert!(page.contains("&lt;script&gt;alert(1)&lt;/script&gt;"), "{page}");
    assert!(page.contains("0xff00"), "{page}");
    assert!(!page.contains("<script>"), "{page}");
}

#[tokio::test]
async fn transactions_in_doubt_are_shown_and_measured() {
    let running = start(Limits::default()).await;
    let metric = async |name: &str| {
        let page = get(&running, "/metrics", &bearer(TOKEN)).await;
        let start = format!("orthodrome_{name}{{");
        let is_wanted = |line: &&str| line.starts_with(&start) && !line.contains("peer=\"n4\"");
        let line = page.lines().find(is_wanted).unwrap();
        line.rsplit_once(' ').unwrap().1.to_owned()
    };
    assert_eq!(metric("transactions_in_doubt").await, "0");
    assert_eq!(metric("transactions_in_doubt_age_seconds").await, "0.0");
    let txn = Pending {
        txn: TxnId::new(ClientId(7), 19),
        kind: "procedure",
        priority: Priority::HIGH,
        stage: Stage::Outcome,
        waits: Duration::from_millis(2_500),
        age: Duration::from_secs(90),
    };
    *running.script.pending.lock().unwrap() = PendingTxns {
        open: 2,
        open_age_max: Duration::from_millis(1_500),
        in_doubt: 1,
        in_doubt_age_max: Duration::from_millis(2_500),
        oldest: vec![txn.clone()],
    };
    assert_eq!(metric("transactions_in_doubt").await, "1");
    assert_eq!(metric("transactions_in_doubt_age_seconds").await, "2.5");
    assert_eq!(metric("transactions_open_age_seconds").await, "1.5");
    assert_eq!(metric("partition_behind_entries").await, "17");
    let page = get(&running, "/console", &bearer(TOKEN)).await;
    for text in [&*txn.txn.to_string(), "in doubt", "1 min 30 s", "n2: 17"] {
        assert!(page.contains(text), "{text} is not in {page}");
    }
}

#[tokio::test]
async fn a_journey_has_its_phases() {
    let running = start(Limits::default()).await;
    running.begin(19).await.unwrap();
    tokio::time::sleep(Duration::from_millis(30)).await;
    running.commit(19).await.unwrap();
    let page = get(&running, "/console", &bearer(TOKEN)).await;
    let (_, slow) = page.split_once("id=\"slow\"").unwrap();
    let (_, row) = slow.split_once("c7.19").unwrap();
    let (row, _) = row.split_once("</tr>").unwrap();
    let cells: Vec<&str> = row.split("<td class=\"n\">").skip(1).collect();
    let time = |at: usize| cells[at].split_once('<').unwrap().0.parse::<f64>().unwrap();
    let (reads, decided, outcome) = (time(0), time(1), time(2));
    assert!(reads < decided && decided >= 30.0 && decided <= outcome, "{row}");
    assert_eq!(row.matches("<rect").count(), 3, "{row}");
    assert!(row.contains("committed") && row.contains("script"), "{row}");
}

#[tokio::test]
async fn events_have_what_changed_and_end_when_the_node_stops() {
    let stop = CancellationToken::new();
    let mut running = start_until(Limits::default(), None, stop.clone()).await;
    let mut viewer = Viewer::new(&running).await;
    let first = viewer.event().await.unwrap();
    assert_eq!(first.len(), 14, "{:?}", first.keys());
    assert!(first["node"].contains("serving") && first["regions"].contains("<svg"));
    running.add_to(TOKEN, b"k").await;
    let mut seen: OrdMap<String, String> = OrdMap::new();
    while !seen.contains_key("now") {
        let event = viewer.event().await.unwrap();
        assert!(!event.contains_key("regions"), "it did not change: {event:?}");
        seen.extend(event);
    }
    assert!(seen["recent"].contains("c7.1"), "{seen:?}");
    stop.cancel();
    let over = tokio::time::timeout(Duration::from_secs(1), async {
        while viewer.event().await.is_some() {}
        running.serving.take().unwrap().await.unwrap();
    });
    over.await.expect("a viewer delays the node that stops");
}

#[tokio::test]
async fn one_viewer_too_many_is_refused_until_another_leaves() {
    let running = start(Limits::default()).await;
    let mut viewers = Vec::new();
    for _ in 0..VIEWERS_MAX {
        let mut viewer = Viewer::new(&running).await;
        viewer.event().await.unwrap();
        viewers.push(viewer);
    }
    let mut refused = Viewer::new(&running).await;
    let answer = refused.until("close one").await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
    viewers.pop();
    let admitted = async {
        loop {
            let mut viewer = Viewer::new(&running).await;
            if viewer.until("\r\n").await.unwrap().contains("200") {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), admitted).await.unwrap();
}

#[tokio::test]
async fn a_node_without_principals_is_reached_by_its_address_only() {
    let running = start(Limits::default()).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let limits = Limits::default();
    let config = ServiceConfig { access: Access::open(), tls: None, limits, audit: None };
    let script = Arc::clone(&running.script);
    let listeners = Listeners { clients: listener, redis: None };
    let never = Box::pin(std::future::pending());
    tokio::spawn(serve(script, Arc::new(map()), listeners, config, never));
    let page = ask(address, "GET", "/console", "", "").await;
    assert!(page.starts_with("HTTP/1.1 200") && !page.contains("Log out"), "{page}");
    let page = ask(address, "GET", "/console", "Host: evil.example\r\n", "").await;
    assert!(page.starts_with("HTTP/1.1 403") && !page.contains("serving"), "{page}");
}

#[test]
fn round_trips_of_other_regions_are_those_of_the_topology() {
    let cluster = map();
    let nodes: Vec<NodeId> = cluster.servers().map(|node| node.id).collect();
    let [here, near, far] = nodes[..] else { panic!("{nodes:?}") };
    let link = |peer, is_connected, rtt_us| LinkStatus {
        peer,
        is_connected,
        rtt_us,
        delay: Duration::from_millis(10),
        since: Duration::ZERO,
        sent: 0,
        sent_bytes: 0,
        lost: 0,
        received: 0,
        received_bytes: 0,
        connects: 0,
        queued_bytes: 0,
    };
    let links = vec![link(near, true, 2_000), link(far, false, 3_000)];
    let [a, b, c] = [here, near, far].map(|node| cluster.region_of(node));
    let ms = |from, to| view::rtt(&cluster, &links, a, from, to);
    // Two milliseconds were measured, and each direction is delayed by ten.
    assert_eq!(ms(a, b), Rtt { ms: 22.0, is_measured: true });
    assert_eq!(ms(b, a), ms(a, b));
    let planned = Rtt { ms: 50.0, is_measured: false };
    assert_eq!((ms(a, c), ms(b, c)), (planned, planned));
}
