//! A cluster of real processes on loopback, made by `serve --init`, and loads put to it: what tests
//! and benchmarks of the whole thing have in common.

#![allow(
    dead_code,
    clippy::disallowed_types,
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    missing_docs,
    reason = "helpers of tests of real processes, which do not all need all of them; an unmet \
              expectation is a failed test"
)]

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead as _, BufReader, Read as _};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How long anything may take on a machine that is busy with other work.
pub const PATIENCE: Duration = Duration::from_secs(120);

pub fn orthodrome<A: AsRef<std::ffi::OsStr>>(arguments: &[A]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_orthodrome"));
    command.args(arguments);
    for name in ["ORTHODROME_CONNECT", "ORTHODROME_TOKEN_FILE", "ORTHODROME_TLS_CA"] {
        command.env_remove(name);
    }
    command
}

pub fn run<A: AsRef<std::ffi::OsStr>>(arguments: &[A]) -> Output {
    orthodrome(arguments).output().unwrap()
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// What a command printed as JSON, and its exit status.
pub fn json(output: &Output) -> (serde_json::Value, Option<i32>) {
    let value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", text(&output.stderr)));
    (value, output.status.code())
}

/// Microseconds since the Unix epoch.
pub fn unix_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros() as u64
}

/// A range of free ports. Another process may take one before it is used; the ranges start far
/// apart, so that tests do not meet.
fn free_ports(count: u16) -> u16 {
    const RANGE: u16 = 50;
    static TAKEN: Mutex<u16> = Mutex::new(0);
    let mut taken = TAKEN.lock().unwrap();
    let start = 20_000 + (std::process::id() % 400) as u16 * RANGE + *taken * RANGE;
    let is_free = |port| TcpListener::bind(("127.0.0.1", port)).is_ok();
    let bases = (start..60_000).step_by(RANGE.into());
    let (skipped, base) = (0..)
        .zip(bases)
        .find(|(_, base)| (*base..base + count).all(is_free))
        .expect("no range of ports is free");
    *taken += skipped + 1;
    base
}

pub fn signal(process: u32, name: &str) {
    let status = Command::new("kill").args([&format!("-{name}"), &process.to_string()]).status();
    assert!(status.unwrap().success(), "cannot send {name} to {process}");
}

/// A node's process; killed when dropped.
pub struct Node {
    process: Child,
    lines: Receiver<String>,
    log: PathBuf,
}

impl Node {
    fn spawn(config: &Path, more: &[&str]) -> Self {
        let log = config.with_extension("log");
        let file = fs::File::options().create(true).append(true).open(&log).unwrap();
        let mut process =
            orthodrome(&[&["serve", "--config", config.to_str().unwrap()], more].concat())
                .stdout(Stdio::piped())
                .stderr(file)
                .spawn()
                .unwrap();
        let stdout = BufReader::new(process.stdout.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Self { process, lines, log }
    }

    /// Waits until it says that it serves.
    fn ready(&self, name: &str) {
        let line = self.lines.recv_timeout(PATIENCE).unwrap_or_default();
        assert!(line.starts_with(&format!("ready: {name} ")), "{line:?}; {}", self.log());
    }

    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap()
    }

    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// Asks it to end by SIGTERM, and returns its exit status.
    pub fn terminate(&mut self) -> Option<i32> {
        signal(self.process.id(), "TERM");
        let status = self.process.wait().unwrap().code();
        let rest: Vec<String> = self.lines.iter().collect();
        assert!(rest.is_empty(), "nothing else goes to standard output: {rest:?}");
        status
    }

    fn proc_file(&self, name: &str) -> String {
        fs::read_to_string(format!("/proc/{}/{name}", self.process.id())).unwrap()
    }

    /// Resident memory, in KiB.
    fn rss_kib(&self) -> u64 {
        let status = self.proc_file("status");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        // A process that is just ending has none.
        line.map_or(0, |line| line.trim().trim_end_matches(" kB").parse().unwrap())
    }

    /// Processor time of all its threads so far.
    fn cpu(&self) -> Duration {
        let stat = self.proc_file("stat");
        // Fields are counted after the name, which is in parentheses and may hold anything.
        let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
        let ticks: u64 = [fields[11], fields[12]].map(|f| f.parse::<u64>().unwrap()).iter().sum();
        // USER_HZ is 100 on every Linux.
        Duration::from_millis(ticks * 10)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A cluster's files, and those of its nodes that run.
pub struct Cluster {
    directory: tempfile::TempDir,
    base: u16,
    servers_per_region: u32,
    count: u32,
    pub nodes: BTreeMap<u32, Node>,
}

impl Cluster {
    /// Makes the files; `changes` are made in each (from, to).
    pub fn init(regions: u32, arguments: &[&str], changes: &[(&str, &str)]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let value = |name: &str| {
            let at = arguments.iter().position(|argument| *argument == name)?;
            arguments[at + 1].parse().ok()
        };
        let servers_per_region: u32 = value("--servers-per-region").unwrap_or(1);
        let count = regions * servers_per_region;
        let base = free_ports(2 * count as u16);
        let dir = directory.path().join("dev");
        let port = base.to_string();
        let fixed = ["serve", "--init", dir.to_str().unwrap(), "--base-port", &port];
        let made = run(&[&fixed[..], arguments].concat());
        assert_eq!(made.status.code(), Some(0), "{}", text(&made.stderr));
        let cluster = Self { directory, base, servers_per_region, count, nodes: BTreeMap::new() };
        for number in 1..=count {
            let path = cluster.config(number);
            let mut file = fs::read_to_string(&path).unwrap();
            for (from, to) in changes {
                assert!(file.contains(from), "{from:?} is not in {}", path.display());
                file = file.replace(from, to);
            }
            fs::write(&path, file).unwrap();
        }
        cluster
    }

    /// A directory for whatever a test needs.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    pub fn dir(&self) -> PathBuf {
        self.path().join("dev")
    }

    pub fn config(&self, number: u32) -> PathBuf {
        self.dir().join(format!("n{number}.toml"))
    }

    /// Every node's number.
    pub fn numbers(&self) -> impl Iterator<Item = u32> + use<> {
        1..=self.count
    }

    /// The nodes of a region, from 0.
    pub fn region(&self, region: u32) -> impl Iterator<Item = u32> + use<> {
        let first = region * self.servers_per_region + 1;
        first..first + self.servers_per_region
    }

    /// Where clients reach a node.
    pub fn endpoint(&self, number: u32) -> String {
        format!("127.0.0.1:{}", u32::from(self.base) + number - 1)
    }

    /// Where clients reach these nodes, in the form of `--connect`.
    pub fn endpoints(&self, numbers: impl IntoIterator<Item = u32>) -> String {
        numbers.into_iter().map(|number| self.endpoint(number)).collect::<Vec<_>>().join(",")
    }

    /// Starts nodes and waits until they serve.
    pub fn start(&mut self, numbers: impl IntoIterator<Item = u32>) {
        self.start_with(numbers, &[]);
    }

    /// As [`Cluster::start`], with more arguments.
    pub fn start_with(&mut self, numbers: impl IntoIterator<Item = u32>, more: &[&str]) {
        let numbers: Vec<u32> = numbers.into_iter().collect();
        for &number in &numbers {
            let node = Node::spawn(&self.config(number), more);
            assert!(self.nodes.insert(number, node).is_none(), "n{number} runs already");
        }
        for number in numbers {
            self.nodes[&number].ready(&format!("n{number}"));
        }
    }

    /// `kill -9`.
    pub fn kill(&mut self, numbers: impl IntoIterator<Item = u32>) {
        // All at once, not one after the other has ended.
        let mut killed: Vec<Node> = Vec::new();
        for number in numbers {
            let mut node = self.nodes.remove(&number).expect("it does not run");
            node.process.kill().unwrap();
            killed.push(node);
        }
    }

    /// Resident memory of each running node, in KiB.
    pub fn rss_kib(&self) -> BTreeMap<u32, u64> {
        self.nodes.iter().map(|(&number, node)| (number, node.rss_kib())).collect()
    }

    /// Processor time of all running nodes together.
    pub fn cpu(&self) -> Duration {
        self.nodes.values().map(Node::cpu).sum()
    }
}

/// A load under way.
pub struct Load {
    process: Child,
    progress: Arc<(Mutex<Progress>, Condvar)>,
    reader: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Progress {
    committed: u64,
    has_ended: bool,
    said: String,
}

impl Load {
    /// Starts `load --json` with these arguments. It runs until [`Load::stop`], or as they say.
    pub fn start(arguments: &[&str]) -> Self {
        let mut process = orthodrome(&[&["load", "--json"], arguments].concat())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stderr = BufReader::new(process.stderr.take().unwrap());
        let progress: Arc<(Mutex<Progress>, Condvar)> = Arc::default();
        let shared = progress.clone();
        let reader = std::thread::spawn(move || {
            let (progress, changed) = &*shared;
            for line in stderr.lines().map_while(Result::ok) {
                let mut progress = progress.lock().unwrap();
                // "…  12 345 committed, 6 aborted attempts, …"
                if let Some((before, _)) = line.split_once(" committed, ") {
                    let number = before.rsplit("  ").next().unwrap_or_default();
                    progress.committed = number.replace(' ', "").parse().unwrap_or(0);
                }
                progress.said += &line;
                progress.said.push('\n');
                changed.notify_all();
            }
            progress.lock().unwrap().has_ended = true;
            changed.notify_all();
        });
        Self { process, progress, reader: Some(reader) }
    }

    /// Commits so far; at most a second old.
    pub fn committed(&self) -> u64 {
        self.progress.0.lock().unwrap().committed
    }

    /// Waits until so many more transactions have committed.
    pub fn commits(&self, more: u64) {
        let deadline = Instant::now() + PATIENCE;
        let (progress, changed) = &*self.progress;
        let mut progress = progress.lock().unwrap();
        let wanted = progress.committed + more;
        while progress.committed < wanted {
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(
                !progress.has_ended && !left.is_zero(),
                "{} of {wanted} commits:\n{}",
                progress.committed,
                progress.said
            );
            progress = changed.wait_timeout(progress, left).unwrap().0;
        }
    }

    /// Begins no more transactions, waits for the last answers, and returns the result, the exit
    /// status, and what was said on the way.
    pub fn stop(self) -> (serde_json::Value, Option<i32>, String) {
        signal(self.process.id(), "INT");
        self.finish()
    }

    /// Waits for its end.
    pub fn finish(mut self) -> (serde_json::Value, Option<i32>, String) {
        let mut stdout = Vec::new();
        self.process.stdout.take().unwrap().read_to_end(&mut stdout).unwrap();
        let status = self.process.wait().unwrap().code();
        self.reader.take().unwrap().join().unwrap();
        let said = self.progress.0.lock().unwrap().said.clone();
        let result = serde_json::from_slice(&stdout)
            .unwrap_or_else(|error| panic!("{error}: no JSON object alone; {said}"));
        (result, status, said)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
