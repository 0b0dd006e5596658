//! Every protocol on real processes under load: a server is killed, one is paused, one loses its
//! disk, and at last all are killed at once. Afterwards the history is checked, and everything that
//! was written is read back.

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

use std::fs;
use std::time::{Duration, Instant};

use orthodrome_client::{Client, Config, OrderState};
use orthodrome_core::topology::Topology;
use orthodrome_core::{NodeId, PartitionId, Protocol};
use orthodrome_protocols::registry::{self, Registered, Row, Visitor};
use processes::{Cluster, Load, must_end_within, run, signal, text, until};

/// Time limit of one test: many times what it takes on an idle machine.
const LIMIT: Duration = Duration::from_secs(400);
/// Length of a pause: longer than every lease and every election time-out on local3.
const PAUSE: Duration = Duration::from_secs(3);
/// Number of commits before, during and after each fault.
const COMMITS: u64 = 15;
const REGIONS: u32 = 3;
/// Number of keys: enough that every partition has some.
const KEYS: u32 = 20;

/// An operator's remedy for a server that has lost its data directory (ADR 19).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Remedy {
    /// A new machine takes its place: `--replace`.
    Replace,
    /// Its partitions move to other servers: `ChangeMembers`. It does not return.
    Move,
    /// Only its data brings it back: the disk is mounted again.
    Mount,
}

struct Trial {
    protocol: &'static str,
    cluster: Cluster,
    load: Load,
    /// Number of successful calls of [`Trial::write`].
    writes: u32,
    /// The initial placement: partitions and their servers.
    placement: Vec<(PartitionId, Vec<NodeId>)>,
}

impl Trial {
    fn begin(protocol: &'static str, remedy: Remedy) -> Self {
        let servers = if remedy == Remedy::Mount { "1" } else { "2" };
        let map = ["--topology", "local3", "--protocol", protocol, "--partitions", "3"];
        let arguments = [&map[..], &["--servers-per-region", servers]].concat();
        let mut cluster = Cluster::init(REGIONS, &arguments, &[]);
        cluster.start(cluster.numbers());
        let all = cluster.endpoints(cluster.numbers());
        let arguments = ["--workload", "list-append", "--clients", "6", "--duration", "1h"];
        let load = Load::start(&[&["--connect", &all], &arguments[..]].concat());
        let about = asked(&cluster, 1, async |client| client.describe().await);
        let placement = about.partitions.into_iter().map(|p| (p.id, p.placed)).collect();
        let mut trial = Self { protocol, cluster, load, writes: 0, placement };
        trial.goes_on("it has started");
        trial
    }

    /// Checks that transactions commit, including one that writes to every partition.
    fn goes_on(&mut self, after: &str) {
        self.load.commits(COMMITS);
        until(&format!("{}: every partition takes writes after {after}", self.protocol), || {
            self.write()
        });
    }

    /// Writes the same number to every key; true if that was committed.
    fn write(&mut self) -> bool {
        let round = self.writes + 1;
        let pairs: Vec<String> = (0..KEYS).map(|key| format!("k{key} {round}")).collect();
        let all = self.cluster.endpoints(self.cluster.nodes.keys().copied());
        let line = format!("put {}", pairs.join(" "));
        let output = run(&["shell", "--deadline", "10s", "--connect", &all, "-e", &line]);
        let is_committed = output.status.code() == Some(0);
        if !is_committed {
            // Printed if the test fails.
            println!("{}: round {round}: {}", self.protocol, text(&output.stderr));
        }
        self.writes += u32::from(is_committed);
        is_committed
    }

    fn kill(&mut self) {
        let server = self.cluster.region(2).next().unwrap();
        self.cluster.kill([server]);
        self.goes_on("a server was killed");
        self.cluster.start([server]);
        self.goes_on("a killed server has started again");
    }

    fn pause(&mut self) {
        let server = self.cluster.region(1).next().unwrap();
        let process = self.cluster.nodes[&server].id();
        let began = Instant::now();
        signal(process, "STOP");
        self.load.commits(COMMITS);
        std::thread::sleep(PAUSE.saturating_sub(began.elapsed()));
        signal(process, "CONT");
        self.goes_on("a server was paused");
    }

    /// Kills a server and deletes its data directory.
    fn wipe(&mut self, remedy: Remedy) {
        let first = &self.placement[0].1;
        let server = match remedy {
            // Voters of the directory hold the first partition, and cannot be replaced.
            Remedy::Replace => {
                self.cluster.numbers().find(|number| !first.contains(&NodeId(*number))).unwrap()
            }
            Remedy::Move | Remedy::Mount => first[0].0,
        };
        self.cluster.kill([server]);
        let data = self.cluster.dir().join(format!("data/n{server}"));
        let disk = self.cluster.path().join("disk");
        fs::rename(&data, &disk).unwrap();
        self.goes_on("a server was lost with its disk");
        self.refuses(server, &[], "holds no data of");
        match remedy {
            Remedy::Replace => {
                self.cluster.start_with([server], &["--replace"]);
                let new = self.cluster.endpoint(server);
                let name = format!("n{server}");
                until("the new server has copied everything", || {
                    let status = ["shell", "--deadline", "60s", "--connect", &new, "-e", "status"];
                    text(&run(&status).stdout).lines().any(|line| {
                        let words: Vec<&str> = line.split_whitespace().collect();
                        words == [&name, "incomplete", "0"]
                    })
                });
                self.goes_on("an empty server has taken its place");
            }
            Remedy::Move => {
                if registry::with(self.protocol, Best).unwrap() != Remedy::Replace {
                    self.refuses(server, &["--replace"], "cannot replace");
                }
                self.move_partitions_off(server);
            }
            Remedy::Mount => {
                self.refuses(server, &["--replace"], "cannot replace");
                fs::rename(&disk, &data).unwrap();
                self.cluster.start([server]);
                self.goes_on("its disk is back");
            }
        }
        if remedy != Remedy::Move {
            // Kills a server with the same partitions, so that the returned one is needed.
            let holds = self.placement.iter().find(|(_, at)| at.contains(&NodeId(server)));
            let other = holds.unwrap().1.iter().find(|other| other.0 != server).unwrap().0;
            self.cluster.kill([other]);
            self.goes_on("another replica was killed");
            self.cluster.start([other]);
        }
    }

    fn refuses(&self, server: u32, more: &[&str], because: &str) {
        let config = self.cluster.config(server);
        let output = run(&[&["serve", "--config", config.to_str().unwrap()], more].concat());
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{}: {said}", self.protocol);
        assert!(said.contains(because), "{}: {said}", self.protocol);
    }

    /// Moves each partition of the lost server to another server of the same region. Afterwards one
    /// of the partition's old servers is killed too.
    fn move_partitions_off(&mut self, lost: u32) {
        let region = (0..REGIONS).find(|r| self.cluster.region(*r).any(|n| n == lost)).unwrap();
        let spare = self.cluster.region(region).find(|number| *number != lost).unwrap();
        let mut orders = Vec::new();
        for (partition, at) in &self.placement {
            if at.contains(&NodeId(lost)) {
                assert!(!at.contains(&NodeId(spare)), "n{spare} holds {partition} already");
                let mut voters: Vec<NodeId> =
                    at.iter().map(|n| if n.0 == lost { NodeId(spare) } else { *n }).collect();
                voters.sort();
                orders.push((*partition, voters));
            }
        }
        for (partition, voters) in &orders {
            let awaited = format!("{}: {partition} has moved to {voters:?}", self.protocol);
            until(&awaited, || self.is_moved(*partition, voters));
        }
        let other = self.placement[0].1.iter().find(|other| other.0 != lost).unwrap().0;
        self.cluster.kill([other]);
        self.goes_on("partitions have moved and another replica was killed");
        self.cluster.start([other]);
        self.goes_on("partitions have moved to another server");
    }

    /// Orders a change to these voters, and waits until it has happened. False if the order fails,
    /// because the leader may change before the new voters have caught up; then it must be
    /// repeated.
    fn is_moved(&self, partition: PartitionId, voters: &[NodeId]) -> bool {
        let all: Vec<String> =
            self.cluster.nodes.keys().map(|number| self.cluster.endpoint(*number)).collect();
        let config = Config::new(all).deadline(Duration::from_secs(60));
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let taken = runtime.block_on(async {
            let client = Client::connect(config).await.unwrap();
            client.change_members(partition, voters, &[]).await
        });
        let node = match taken {
            Ok(node) => node,
            Err(error) => {
                println!("{}: {partition}: {error}", self.protocol);
                return false;
            }
        };
        let mut state = OrderState::Pending;
        let awaited = format!("{}: {node} carries its order for {partition} out", self.protocol);
        until(&awaited, || {
            let status = asked(&self.cluster, node.0, async |client| client.status().await);
            let order = status.orders.into_iter().rfind(|order| order.partition == partition);
            let order = order.unwrap_or_else(|| panic!("{node} has forgotten its order"));
            assert_eq!(order.voters, voters, "{}: nobody else gives orders", self.protocol);
            println!(
                "{}: {partition} at {node}: {:?} {}",
                self.protocol, order.state, order.detail
            );
            state = order.state;
            state != OrderState::Pending
        });
        state == OrderState::Finished
    }

    fn lose_everything(&mut self) {
        let all: Vec<u32> = self.cluster.nodes.keys().copied().collect();
        self.cluster.kill(all.clone());
        self.cluster.start(all);
        self.goes_on("everything was killed");
    }

    fn judge(mut self) {
        let (result, status, said) = self.load.stop();
        let protocol = self.protocol;
        assert_eq!(status, Some(0), "{protocol}: {result}\n{said}");
        assert_eq!(result["check"]["ok"], true, "{protocol}: {result}");
        assert_eq!(result["check"]["model"], "strict-serializable", "{protocol}: {result}");
        assert_eq!(result["total_ok"], true, "{protocol}: {result}");
        let keys: Vec<String> = (0..KEYS).map(|key| format!("k{key}")).collect();
        let line = format!("get {}", keys.join(" "));
        // A write of unknown outcome may have been committed too.
        let written =
            |round: u32| -> String { (0..KEYS).map(|key| format!("k{key} = {round}\n")).collect() };
        let expected = [written(self.writes), written(self.writes + 1)];
        for number in self.cluster.nodes.keys() {
            let at = self.cluster.endpoint(*number);
            let output = run(&["shell", "--deadline", "30s", "--connect", &at, "-e", &line]);
            let found = text(&output.stdout);
            assert!(
                expected.contains(&found),
                "{protocol}, n{number}: round {} was acknowledged: {found}{}",
                self.writes,
                text(&output.stderr)
            );
        }
        println!("{protocol}: {} commits", result["committed"]);
        self.cluster.end();
    }
}

/// Runs a request as a client of this node's gateway.
fn asked<T>(
    cluster: &Cluster,
    number: u32,
    ask: impl AsyncFn(&Client) -> Result<T, orthodrome_client::Error>,
) -> T {
    let config = Config::new([cluster.endpoint(number)]).deadline(Duration::from_secs(60));
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async { ask(&Client::connect(config).await.unwrap()).await.unwrap() })
}

fn survives(protocol: &'static str, remedy: Remedy) {
    must_end_within(LIMIT);
    let mut trial = Trial::begin(protocol, remedy);
    trial.kill();
    trial.pause();
    trial.wipe(remedy);
    trial.lose_everything();
    trial.judge();
}

/// Protocols with a test of their own below, so that tests run in parallel; `slog-consensus` is
/// similar to `slog`.
const NAMED: [&str; 10] = [
    "carousel-basic",
    "carousel-fast",
    "2pl",
    "natto-recsf",
    "tapir",
    "ocean-vista",
    "calvin",
    "slog",
    "slog-consensus",
    "sloth",
];

impl Remedy {
    /// The remedy that a protocol supports.
    fn of<P: Protocol>() -> Self {
        let topology = Topology::built_in("local3").unwrap();
        let cluster = orthodrome_core::Cluster::spread(topology, 2, 1, 3, 3).unwrap();
        if !P::replaceable(&cluster).is_empty() {
            Self::Replace
        } else if P::MEMBERS {
            Self::Move
        } else {
            Self::Mount
        }
    }
}

/// The remedy that is least work.
struct Best;

impl Visitor for Best {
    type Out = Remedy;

    fn visit<P: Registered>(self, _: &'static Row) -> Remedy {
        Remedy::of::<P>()
    }
}

struct Survives;

impl Visitor for Survives {
    type Out = ();

    fn visit<P: Registered>(self, row: &'static Row) {
        survives(row.name, Remedy::of::<P>());
    }
}

#[test]
fn protocols_without_a_test_of_their_own_survive_kill_pause_and_lost_disk() {
    for name in registry::representatives().filter(|name| !NAMED.contains(name)) {
        registry::with(name, Survives).unwrap();
    }
}

/// Its partitions move although another machine could take the place of the lost one.
#[test]
fn geodesic_survives_a_server_that_is_gone_for_good() {
    survives("geodesic", Remedy::Move);
}

#[test]
fn carousel_basic_survives_kill_pause_and_lost_disk() {
    survives("carousel-basic", Remedy::Move);
}

#[test]
fn carousel_fast_survives_kill_pause_and_lost_disk() {
    survives("carousel-fast", Remedy::Move);
}

#[test]
fn two_phase_locking_survives_kill_pause_and_lost_disk() {
    survives("2pl", Remedy::Move);
}

#[test]
fn natto_survives_kill_pause_and_lost_disk() {
    survives("natto-recsf", Remedy::Move);
}

#[test]
fn tapir_survives_kill_pause_and_lost_disk() {
    survives("tapir", Remedy::Mount);
}

#[test]
fn ocean_vista_survives_kill_pause_and_lost_disk() {
    survives("ocean-vista", Remedy::Replace);
}

#[test]
fn calvin_survives_kill_pause_and_lost_disk() {
    survives("calvin", Remedy::Mount);
}

#[test]
fn slog_survives_kill_pause_and_lost_disk() {
    survives("slog", Remedy::Mount);
}

#[test]
fn sloth_survives_kill_pause_and_lost_disk() {
    survives("sloth", Remedy::Mount);
}
