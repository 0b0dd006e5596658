//! A cluster of real processes on loopback, made by `serve --init`, and load on it. Shared by tests
//! and benchmarks of whole clusters.

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

use std::cell::Cell;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use orthodrome_core::ordered::OrdMap;

/// Time limit of one step on a machine that is busy with other work.
pub const PATIENCE: Duration = Duration::from_secs(120);
/// Time limit of a command that computes or measures.
const COMMAND_PATIENCE: Duration = Duration::from_secs(600);
/// Interval of polling.
const LOOK_EVERY: Duration = Duration::from_millis(20);

thread_local! {
    /// The deadline of this thread's test.
    static END: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Sets a deadline for the calling test: any later wait fails then, and says what it waited for.
pub fn must_end_within(span: Duration) {
    END.set(Some(Instant::now() + span));
}

/// The end of a wait that begins now and lasts at most `patience`.
fn give_up_at(patience: Duration) -> Instant {
    let own = Instant::now() + patience;
    END.get().map_or(own, |end| end.min(own))
}

/// Waits until a condition is true; fails with `awaited` in the message.
pub fn until(awaited: &str, mut is_so: impl FnMut() -> bool) {
    let (began, end) = (Instant::now(), give_up_at(PATIENCE));
    while !is_so() {
        assert!(Instant::now() < end, "awaited for {:.1?} in vain: {awaited}", began.elapsed());
        std::thread::sleep(LOOK_EVERY);
    }
}

/// The exit status of a process; none if it does not end in time, and then it is killed.
fn ended(process: &mut Child, patience: Duration) -> Option<ExitStatus> {
    let end = give_up_at(patience);
    loop {
        if let Some(status) = process.try_wait().unwrap() {
            return Some(status);
        }
        if Instant::now() > end {
            // It may end by itself at this moment.
            let _ = process.kill();
            let _ = process.wait();
            return None;
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Reads everything from a pipe in a thread.
fn collect(mut from: impl std::io::Read + Send + 'static) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        from.read_to_end(&mut bytes).unwrap();
        bytes
    })
}

/// The output and exit status of a command; fails if it does not end in time.
pub fn output(command: &mut Command) -> Output {
    let named = format!("{command:?}");
    let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut process = command.spawn().unwrap();
    let stdout = collect(process.stdout.take().unwrap());
    let stderr = collect(process.stderr.take().unwrap());
    let status = ended(&mut process, COMMAND_PATIENCE);
    let (stdout, stderr) = (stdout.join().unwrap(), stderr.join().unwrap());
    let Some(status) = status else {
        let said = [&stdout, &stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
        panic!("it did not end in time and was killed: {named}: {}", said.join("\n"));
    };
    Output { status, stdout, stderr }
}

pub fn orthodrome<A: AsRef<std::ffi::OsStr>>(arguments: &[A]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_orthodrome"));
    command.args(arguments);
    for name in ["ORTHODROME_CONNECT", "ORTHODROME_TOKEN_FILE", "ORTHODROME_TLS_CA"] {
        command.env_remove(name);
    }
    command
}

pub fn run<A: AsRef<std::ffi::OsStr>>(arguments: &[A]) -> Output {
    output(&mut orthodrome(arguments))
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// The JSON that a command printed, and its exit status.
pub fn json(output: &Output) -> (serde_json::Value, Option<i32>) {
    let value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", text(&output.stderr)));
    (value, output.status.code())
}

/// Microseconds since the Unix epoch.
pub fn unix_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros() as u64
}

/// A range of free ports. They stay free until they are used, and while their node is down: they
/// are below the range for outgoing connections, and other test processes search from other
/// starting points.
pub fn free_ports(count: u16) -> u16 {
    const RANGE: u16 = 50;
    const RANGES: u16 = 400;
    const FIRST: u16 = 12_000;
    static TAKEN: Mutex<u16> = Mutex::new(0);
    let mut taken = TAKEN.lock().unwrap();
    assert!(count <= RANGE, "{count} ports do not fit into a range");
    let own = (std::process::id() % u32::from(RANGES)) as u16;
    let is_free = |port| TcpListener::bind(("127.0.0.1", port)).is_ok();
    let (turn, base) = (*taken..RANGES)
        .map(|turn| (turn, FIRST + (own + turn) % RANGES * RANGE))
        .find(|(_, base)| (*base..base + count).all(is_free))
        .expect("no range of ports is free");
    *taken = turn + 1;
    base
}

/// The first digits of three free ports, which end with 79, 80 and 81, for
/// listeners of Redis. They are below those of the nodes' other addresses.
pub fn free_redis_prefix() -> u16 {
    static TAKEN: Mutex<u16> = Mutex::new(0);
    let mut taken = TAKEN.lock().unwrap();
    let own = u16::try_from(std::process::id() % 40).unwrap();
    let is_free = |port| TcpListener::bind(("127.0.0.1", port)).is_ok();
    let turns = *taken..40;
    let found = turns
        .map(|turn| (turn, 70 + (own + turn) % 40))
        .find(|(_, prefix)| (79..82).all(|last| is_free(prefix * 100 + last)));
    let (turn, prefix) = found.expect("no ports are free");
    *taken = turn + 1;
    prefix
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

    /// Waits until the node reports that it serves.
    fn ready(&self, name: &str) {
        let left = give_up_at(PATIENCE).saturating_duration_since(Instant::now());
        let line = self.lines.recv_timeout(left);
        let is_ready = line.as_ref().is_ok_and(|line| line.starts_with(&format!("ready: {name} ")));
        assert!(is_ready, "{name} does not say that it serves: {line:?}; {}", self.log());
    }

    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap()
    }

    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// Sends SIGTERM, and returns the exit status.
    pub fn terminate(&mut self) -> Option<i32> {
        signal(self.process.id(), "TERM");
        let status = ended(&mut self.process, PATIENCE);
        let status = status.unwrap_or_else(|| panic!("SIGTERM does not end it: {}", self.log()));
        let rest: Vec<String> = self.lines.iter().collect();
        assert!(rest.is_empty(), "nothing else goes to standard output: {rest:?}");
        status.code()
    }

    fn proc_file(&self, name: &str) -> String {
        fs::read_to_string(format!("/proc/{}/{name}", self.process.id())).unwrap()
    }

    /// Resident memory, in KiB.
    fn rss_kib(&self) -> u64 {
        let status = self.proc_file("status");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        // A process that is ending has none.
        line.map_or(0, |line| line.trim().trim_end_matches(" kB").parse().unwrap())
    }

    /// Processor time of all its threads.
    fn cpu(&self) -> Duration {
        let stat = self.proc_file("stat");
        // Fields are counted after the name, which is in parentheses and may contain any character.
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

/// A cluster's files and running nodes.
pub struct Cluster {
    directory: tempfile::TempDir,
    base: u16,
    servers_per_region: u32,
    count: u32,
    pub nodes: OrdMap<u32, Node>,
}

impl Cluster {
    /// Makes the files, and applies `changes` to each (from, to).
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
        let cluster = Self { directory, base, servers_per_region, count, nodes: OrdMap::new() };
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

    /// The directory of the files.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    pub fn dir(&self) -> PathBuf {
        self.path().join("dev")
    }

    pub fn config(&self, number: u32) -> PathBuf {
        self.dir().join(format!("n{number}.toml"))
    }

    /// The numbers of all nodes.
    pub fn numbers(&self) -> impl Iterator<Item = u32> + use<> {
        1..=self.count
    }

    /// The nodes of a region; regions are numbered from 0.
    pub fn region(&self, region: u32) -> impl Iterator<Item = u32> + use<> {
        let first = region * self.servers_per_region + 1;
        first..first + self.servers_per_region
    }

    /// The address of a node for clients.
    pub fn endpoint(&self, number: u32) -> String {
        format!("127.0.0.1:{}", u32::from(self.base) + number - 1)
    }

    /// The addresses of these nodes for clients, in the form of `--connect`.
    pub fn endpoints(&self, numbers: impl IntoIterator<Item = u32>) -> String {
        numbers.into_iter().map(|number| self.endpoint(number)).collect::<Vec<_>>().join(",")
    }

    /// Starts nodes, and waits until they serve.
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

    /// Kills nodes as `kill -9` does. Fails if a node has ended by itself.
    pub fn kill(&mut self, numbers: impl IntoIterator<Item = u32>) {
        // All at once, without waiting for each.
        let mut killed: Vec<Node> = Vec::new();
        for number in numbers {
            let mut node = self.nodes.remove(&number).expect("it does not run");
            let ended = node.process.try_wait().unwrap();
            assert!(ended.is_none(), "n{number} ended by itself ({ended:?}): {}", node.log());
            node.process.kill().unwrap();
            killed.push(node);
        }
    }

    /// Asks all running nodes to end; fails unless each is running and exits with success.
    pub fn end(&mut self) {
        for (number, node) in &mut self.nodes {
            let ended = node.process.try_wait().unwrap();
            assert!(ended.is_none(), "n{number} ended by itself ({ended:?}): {}", node.log());
            signal(node.process.id(), "TERM");
        }
        for (number, mut node) in std::mem::take(&mut self.nodes) {
            let status = ended(&mut node.process, PATIENCE).map(|status| status.code());
            assert_eq!(status, Some(Some(0)), "n{number} does not end well: {}", node.log());
        }
    }

    /// Resident memory of each running node, in KiB.
    pub fn rss_kib(&self) -> OrdMap<u32, u64> {
        self.nodes.iter().map(|(&number, node)| (number, node.rss_kib())).collect()
    }

    /// Processor time of all running nodes together.
    pub fn cpu(&self) -> Duration {
        self.nodes.values().map(Node::cpu).sum()
    }
}

/// A running load.
pub struct Load {
    process: Child,
    progress: Arc<(Mutex<Progress>, Condvar)>,
    /// The readers of its progress messages and of its result.
    readers: Option<(JoinHandle<()>, JoinHandle<Vec<u8>>)>,
}

#[derive(Default)]
struct Progress {
    committed: u64,
    has_ended: bool,
    said: String,
}

impl Load {
    /// Starts `load --json` with these arguments. It runs until [`Load::stop`], or as long as the
    /// arguments say.
    pub fn start(arguments: &[&str]) -> Self {
        let mut process = orthodrome(&[&["load", "--json"], arguments].concat())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = collect(process.stdout.take().unwrap());
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
        Self { process, progress, readers: Some((reader, stdout)) }
    }

    /// Number of commits so far, at most a second old.
    pub fn committed(&self) -> u64 {
        self.progress.0.lock().unwrap().committed
    }

    /// Waits until this number of further transactions has committed.
    pub fn commits(&self, more: u64) {
        let wanted = self.committed() + more;
        let (committed, said) = self.commits_until(wanted, give_up_at(PATIENCE));
        assert!(committed >= wanted, "only {committed} commits, awaited {wanted}:\n{said}");
    }

    /// Waits for `wanted` commits, until `end` or the end of the load. Returns their number, and
    /// the load's messages.
    fn commits_until(&self, wanted: u64, end: Instant) -> (u64, String) {
        let (progress, changed) = &*self.progress;
        let mut progress = progress.lock().unwrap();
        while progress.committed < wanted && !progress.has_ended {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            progress = changed.wait_timeout(progress, left).unwrap().0;
        }
        (progress.committed, progress.said.clone())
    }

    /// Stops the load, waits for the last answers, and returns the result, the exit status, and the
    /// messages.
    pub fn stop(self) -> (serde_json::Value, Option<i32>, String) {
        signal(self.process.id(), "INT");
        self.finish()
    }

    /// Waits for the end of the load.
    pub fn finish(mut self) -> (serde_json::Value, Option<i32>, String) {
        let status = ended(&mut self.process, COMMAND_PATIENCE);
        let (reader, stdout) = self.readers.take().unwrap();
        reader.join().unwrap();
        let stdout = stdout.join().unwrap();
        let said = self.progress.0.lock().unwrap().said.clone();
        let status =
            status.unwrap_or_else(|| panic!("the load did not end in time:\n{said}")).code();
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
