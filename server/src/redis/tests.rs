//! The listener on a real socket, in front of a store in memory whose answers can be scripted.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Mutex;

use orthodrome_core::machine::{Admin, Gauge, GroupView, MembershipOrder};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::scan::{KeyRange, Page, Scan, ScanError};
use orthodrome_core::topology::Topology;
use orthodrome_core::txn::{AbortReason, Kind, Priority, Read, Reads, Value, Version, Writes};
use orthodrome_core::watch::{Batch, Change};
use orthodrome_core::{ClientId, Cluster, Decision, Key, NodeId, Outcome, Timestamp, Txn, TxnId};
use tokio::io::AsyncReadExt as _;
use tokio::sync::mpsc;

use super::*;
use crate::gateway::{Begun, Description, Finished, GatewayError, Health, OrderError, PendingTxns};
use crate::scan::{Batches, ScanFailed};
use crate::service::{
    Access, Credential, Limits, Listeners, Role, ServiceConfig, Transactions, serve,
};
use crate::transport::LinkStatus;

mod blocking;
mod messages;

/// What happens to the next transaction.
#[derive(Clone, Copy, Debug)]
enum Twist {
    /// It aborts for this reason.
    Abort(AbortReason),
    /// It commits, and the answer is lost.
    LostCommit,
    /// It does not begin, and the answer is lost.
    LostAbort,
    /// It commits, and its outcome is never known.
    Unknown,
    /// The node refuses it for lack of room.
    Busy,
    /// It begins, and never ends.
    Hang,
}

#[derive(Default)]
struct State {
    values: OrdMap<Key, Value>,
    twists: VecDeque<Twist>,
    /// The outcomes of lost transactions.
    lost: OrdMap<TxnId, Outcome>,
    /// Every transaction that began: its id, and whether it is read-only.
    begun: Vec<(TxnId, bool)>,
    /// What the last transaction acknowledged.
    acknowledged_below: u64,
    clock: u64,
    /// The next scans fail like this.
    failed_scans: VecDeque<ScanFailed>,
    /// Every scan that began.
    scans: Vec<Scan>,
    /// The next watches do not begin, like this.
    failed_watches: VecDeque<ScanFailed>,
    /// True if watches wait before their first batch, until [`Rig::begin_watches`].
    is_watch_held: bool,
    /// The watches that nobody has ended.
    watches: Vec<(KeyRange, mpsc::Sender<Result<Batch, ScanFailed>>)>,
    /// The number of watches that began.
    watches_begun: usize,
}

#[derive(Default)]
struct Memory(Mutex<State>);

impl State {
    /// Runs a transaction.
    fn commit(&mut self, txn: &Txn) -> Finished {
        let read = |key: &Key| {
            let value = self.values.get(key).cloned();
            (key.clone(), Read { value, version: Version::INITIAL })
        };
        let reads: Reads = txn.reads.iter().map(read).collect();
        let writes = match &txn.kind {
            Kind::Procedure(ops) => Txn::execute(ops, &reads),
            Kind::ReadOnly => Ok(Writes::new()),
            Kind::Interactive | Kind::General | Kind::StaleReadOnly => {
                panic!("the listener runs no transaction of several rounds")
            }
        };
        self.clock += 1;
        let outcome = match writes {
            Ok(writes) => {
                self.tell_watches(txn.id, &writes);
                for (key, value) in writes {
                    match value {
                        Some(value) => drop(self.values.insert(key, value)),
                        None => drop(self.values.remove(&key)),
                    }
                }
                Outcome::Committed(Timestamp(self.clock))
            }
            Err(reason) => Outcome::Aborted(reason),
        };
        Finished { outcome, reads: Some(reads), path: "memory" }
    }
}

impl State {
    /// Each transaction is one batch.
    fn tell_watches(&mut self, writer: TxnId, writes: &Writes) {
        let through = Timestamp(self.clock);
        let version = Version { timestamp: through, writer };
        self.watches.retain(|(range, batches)| {
            let changes = writes.iter().filter(|(key, _)| range.contains(key));
            let change = |(key, value): (&Key, &Option<Value>)| Change {
                key: key.clone(),
                version,
                value: value.clone(),
            };
            let changes = changes.map(change).collect();
            batches.try_send(Ok(Batch { changes, through })).is_ok()
        });
    }
}

#[tonic::async_trait]
impl Transactions for Memory {
    async fn register(&self) -> Result<ClientId, GatewayError> {
        Ok(ClientId(7))
    }

    async fn begin(&self, txn: Txn) -> Result<Begun, GatewayError> {
        let twist = {
            let mut state = self.0.lock().unwrap();
            assert!(txn.acknowledged_below <= txn.id.counter);
            state.begun.push((txn.id, txn.is_read_only()));
            state.acknowledged_below = txn.acknowledged_below;
            state.twists.pop_front()
        };
        if matches!(twist, Some(Twist::Hang)) {
            return std::future::pending().await;
        }
        let mut state = self.0.lock().unwrap();
        let finished = |outcome| Finished { outcome, reads: None, path: "memory" };
        Ok(Begun::Finished(match twist {
            None | Some(Twist::Hang) => state.commit(&txn),
            Some(Twist::Abort(reason)) => finished(Outcome::Aborted(reason)),
            Some(Twist::LostCommit) => {
                let outcome = state.commit(&txn).outcome;
                state.lost.insert(txn.id, outcome);
                finished(Outcome::Unknown)
            }
            Some(Twist::LostAbort) => {
                state.lost.insert(txn.id, Outcome::Aborted(AbortReason::Recovery));
                return Err(GatewayError::Lost(txn.id));
            }
            Some(Twist::Unknown) => {
                state.commit(&txn);
                finished(Outcome::Unknown)
            }
            Some(Twist::Busy) => return Err(GatewayError::Overloaded { limit: 1 }),
        }))
    }

    async fn read(&self, txn: TxnId, _keys: Vec<Key>) -> Result<Begun, GatewayError> {
        Err(GatewayError::UnknownTransaction(txn))
    }

    async fn decide(&self, txn: TxnId, _decision: Decision) -> Result<Finished, GatewayError> {
        Err(GatewayError::UnknownTransaction(txn))
    }

    async fn resolve(
        &self,
        txn: Txn,
        _reads: Reads,
        _decision: Option<Decision>,
    ) -> Result<Finished, GatewayError> {
        let state = self.0.lock().unwrap();
        let outcome = state.lost.get(&txn.id).copied().unwrap_or(Outcome::Unknown);
        Ok(Finished { outcome, reads: None, path: "memory" })
    }

    async fn admin(&self, _order: Admin) -> Result<(), OrderError> {
        Err(OrderError::Lost)
    }

    async fn groups(&self) -> Vec<GroupView> {
        Vec::new()
    }

    fn describe(&self) -> Description {
        Description {
            cluster: "test".into(),
            protocol: "memory",
            guarantee: "strict-serializable",
            general: false,
            node: NodeId(1),
            gateway: NodeId(4),
            region: "R1".into(),
            leaders: OrdMap::new(),
            health: Health::Serving,
            in_flight: 0,
            in_flight_max: 10,
        }
    }

    fn links(&self) -> Vec<LinkStatus> {
        Vec::new()
    }

    async fn gauges(&self) -> Vec<Gauge> {
        Vec::new()
    }

    async fn pending(&self) -> Option<PendingTxns> {
        None
    }

    async fn orders(&self) -> Vec<(MembershipOrder, Duration)> {
        Vec::new()
    }

    fn watch(&self, range: KeyRange, after: Option<Timestamp>) -> Result<Batches, ScanFailed> {
        assert_eq!(after, None);
        let mut state = self.0.lock().unwrap();
        if let Some(failed) = state.failed_watches.pop_front() {
            return Err(failed);
        }
        let (batches, receiver) = mpsc::channel(1_024);
        if !state.is_watch_held {
            let first = Batch { changes: Vec::new(), through: Timestamp(state.clock) };
            batches.try_send(Ok(first)).unwrap();
        }
        state.watches.push((range, batches));
        state.watches_begun += 1;
        Ok(receiver)
    }

    async fn scan(&self, scan: Scan, _priority: Priority) -> Result<Page, ScanFailed> {
        let mut state = self.0.lock().unwrap();
        state.scans.push(scan.clone());
        if let Some(failed) = state.failed_scans.pop_front() {
            return Err(failed);
        }
        let Scan { range, backwards, limit } = scan;
        let held = state.values.iter().filter(|(key, _)| range.contains(key));
        let mut rows: Vec<(Key, Read)> = held
            .map(|(key, value)| {
                (key.clone(), Read { value: Some(value.clone()), version: Version::INITIAL })
            })
            .collect();
        if backwards {
            rows.reverse();
        }
        let has_more = rows.len() > limit;
        rows.truncate(limit);
        let last = rows.last().filter(|_| has_more).map(|(key, _)| key.clone());
        let rest = last.map(|last| range.after(&last, backwards));
        Ok(Page { rows, rest, timestamp: Timestamp(state.clock) })
    }
}

/// A running service.
struct Rig {
    memory: Arc<Memory>,
    clients: SocketAddr,
    redis: SocketAddr,
    stop: CancellationToken,
    served: tokio::task::JoinHandle<()>,
}

async fn rig(access: Access, limits: Limits) -> Rig {
    let topology = Topology::uniform(3, Duration::from_micros(500), Duration::from_millis(50));
    let cluster = Arc::new(Cluster::spread(topology, 1, 1, 3, 3).unwrap());
    let memory = Arc::new(Memory::default());
    let clients = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let redis = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let places = (clients.local_addr().unwrap(), redis.local_addr().unwrap());
    let listeners = Listeners { clients, redis: Some(redis) };
    let config = ServiceConfig { access, tls: None, limits, audit: None };
    let stop = CancellationToken::new();
    let (handle, stopped) = (Arc::clone(&memory), stop.clone().cancelled_owned());
    let served = tokio::spawn(async move {
        serve(handle, cluster, listeners, config, Box::pin(stopped)).await.unwrap();
    });
    Rig { memory, clients: places.0, redis: places.1, stop, served }
}

async fn open() -> Rig {
    rig(Access::open(), Limits::default()).await
}

impl Rig {
    async fn client(&self) -> TcpStream {
        TcpStream::connect(self.redis).await.unwrap()
    }

    /// A client that has a place. The place of one that has left may not be free yet.
    async fn admitted(&self) -> TcpStream {
        let admitted = async {
            loop {
                let mut client = self.client().await;
                client.write_all(b"PING\r\n").await.unwrap();
                let mut answer = [0; 7];
                if client.read_exact(&mut answer).await.is_ok() && answer == *b"+PONG\r\n" {
                    return client;
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(30), admitted).await.expect("a place is free")
    }

    fn twist(&self, twists: impl IntoIterator<Item = Twist>) {
        self.memory.0.lock().unwrap().twists.extend(twists);
    }

    fn begun(&self) -> Vec<(TxnId, bool)> {
        std::mem::take(&mut self.memory.0.lock().unwrap().begun)
    }
}

/// Watches.
impl Rig {
    /// Sends the first batch of watches that were held.
    fn begin_watches(&self) {
        let mut state = self.memory.0.lock().unwrap();
        state.is_watch_held = false;
        let through = Timestamp(state.clock);
        for (_, batches) in &state.watches {
            batches.try_send(Ok(Batch { changes: Vec::new(), through })).unwrap();
        }
    }

    fn hold_watches(&self) {
        self.memory.0.lock().unwrap().is_watch_held = true;
    }

    fn fail_watches(&self, failed: &ScanFailed) {
        for (_, batches) in std::mem::take(&mut self.memory.0.lock().unwrap().watches) {
            batches.try_send(Err(failed.clone())).unwrap();
        }
    }

    fn watches_begun(&self) -> usize {
        self.memory.0.lock().unwrap().watches_begun
    }

    /// Waits until the node has ended its watch.
    async fn no_watch(&self) {
        let ended = async {
            let watches = std::mem::take(&mut self.memory.0.lock().unwrap().watches);
            for (_, batches) in watches {
                batches.closed().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), ended).await.expect("the watch ends");
    }
}

/// Sends lines, and checks that exactly these bytes come back.
async fn talk(client: &mut TcpStream, lines: &str, answers: &str) {
    client.write_all(lines.as_bytes()).await.unwrap();
    let mut got = vec![0; answers.len()];
    let read = tokio::time::timeout(Duration::from_secs(30), client.read_exact(&mut got)).await;
    read.expect("the answers arrive").unwrap_or_else(|error| {
        panic!("{lines}: {error}: {}", String::from_utf8_lossy(&got));
    });
    assert_eq!(String::from_utf8_lossy(&got), answers, "{lines}");
}

#[tokio::test]
async fn commands_that_arrive_together_are_one_transaction() {
    let rig = open().await;
    let mut client = rig.client().await;
    let lines = "SET a 1\r\nINCR a\r\nGET b\r\nnonsense\r\nHGET a f\r\nPING\r\nINCR a\r\n";
    let wrong = "-WRONGTYPE Operation against a key holding the wrong kind of value";
    let unknown = "-ERR unknown command 'nonsense', with args beginning with: ";
    let answers = format!("+OK\r\n:2\r\n$-1\r\n{unknown}\r\n{wrong}\r\n+PONG\r\n:3\r\n");
    talk(&mut client, lines, &answers).await;
    assert_eq!(rig.begun().len(), 1);
    talk(&mut client, "GET a\r\n", "$1\r\n3\r\n").await;
    let begun = rig.begun();
    assert_eq!(begun.len(), 1);
    assert!(begun[0].1, "a read is a read-only transaction");
    let values = &rig.memory.0.lock().unwrap().values;
    assert_eq!(values.keys().next(), Some(&Key::from("redis/0/a")));
}

#[tokio::test]
async fn exec_is_one_transaction_and_watch_compares() {
    let rig = open().await;
    let (mut one, mut other) = (rig.client().await, rig.client().await);
    let queued = "+OK\r\n+QUEUED\r\n+QUEUED\r\n";
    talk(&mut one, "MULTI\r\nSET {a} 1\r\nINCR {b}\r\n", queued).await;
    assert_eq!(rig.begun(), []);
    talk(&mut one, "EXEC\r\n", "*2\r\n+OK\r\n:1\r\n").await;
    assert_eq!(rig.begun().len(), 1);
    // A watched key that another client changes, also to the same value.
    talk(&mut one, "WATCH {a}\r\nGET {a}\r\n", "+OK\r\n$1\r\n1\r\n").await;
    talk(&mut other, "SET {a} 1\r\n", "+OK\r\n").await;
    talk(&mut one, "MULTI\r\nINCR {b}\r\nEXEC\r\n", "+OK\r\n+QUEUED\r\n*-1\r\n").await;
    // EXEC has ended the watch.
    talk(&mut one, "MULTI\r\nINCR {b}\r\nEXEC\r\n", "+OK\r\n+QUEUED\r\n*1\r\n:2\r\n").await;
    // A key that appears, is read, and is gone again.
    talk(&mut one, "WATCH {c}\r\n", "+OK\r\n").await;
    talk(&mut other, "SET {c} 1\r\n", "+OK\r\n").await;
    talk(&mut one, "GET {c}\r\n", "$1\r\n1\r\n").await;
    talk(&mut other, "DEL {c}\r\n", ":1\r\n").await;
    talk(&mut one, "MULTI\r\nEXEC\r\n", "+OK\r\n*-1\r\n").await;
    // A key that is made and removed, and nobody looks in between. A second watch changes nothing.
    let lines = "WATCH {d}\r\nWATCH {d}\r\nEXISTS {d}\r\n";
    talk(&mut one, lines, "+OK\r\n+OK\r\n:0\r\n").await;
    talk(&mut other, "WATCH {d} {a}\r\nSET {d} 1\r\nDEL {d}\r\n", "+OK\r\n+OK\r\n:1\r\n").await;
    talk(&mut one, "MULTI\r\nEXEC\r\n", "+OK\r\n*-1\r\n").await;
    talk(&mut other, "MULTI\r\nEXEC\r\n", "+OK\r\n*-1\r\n").await;
    // A key that does not exist all the time.
    talk(&mut one, "WATCH {d}\r\nMULTI\r\nGET {d}\r\n", "+OK\r\n+OK\r\n+QUEUED\r\n").await;
    talk(&mut other, "WATCH {d}\r\nMULTI\r\nEXEC\r\n", "+OK\r\n+OK\r\n*0\r\n").await;
    talk(&mut one, "EXEC\r\n", "*1\r\n$-1\r\n").await;
    // Watched keys without changes.
    let lines = "WATCH {a}\r\nMULTI\r\nGET {a}\r\nPING\r\nEXEC\r\n";
    let answers = "+OK\r\n+OK\r\n+QUEUED\r\n+QUEUED\r\n*2\r\n$1\r\n1\r\n+PONG\r\n";
    talk(&mut one, lines, answers).await;
    // UNWATCH and DISCARD end the watch.
    talk(&mut one, "WATCH {a}\r\n", "+OK\r\n").await;
    talk(&mut other, "SET {a} 5\r\n", "+OK\r\n").await;
    let lines = "UNWATCH\r\nMULTI\r\nDISCARD\r\nMULTI\r\nEXEC\r\n";
    talk(&mut one, lines, "+OK\r\n+OK\r\n+OK\r\n+OK\r\n*0\r\n").await;
}

#[tokio::test]
async fn a_transaction_with_a_refused_command_is_discarded() {
    let rig = open().await;
    let mut client = rig.client().await;
    talk(&mut client, "EXEC\r\n", "-ERR EXEC without MULTI\r\n").await;
    talk(&mut client, "DISCARD\r\n", "-ERR DISCARD without MULTI\r\n").await;
    let arity = "-ERR wrong number of arguments for 'get' command\r\n";
    let abort = "-EXECABORT Transaction discarded because of previous errors.\r\n";
    let answers = format!("+OK\r\n+QUEUED\r\n{arity}{abort}");
    talk(&mut client, "MULTI\r\nSET a 1\r\nGET\r\nEXEC\r\n", &answers).await;
    talk(&mut client, "GET a\r\n", "$-1\r\n").await;
    let bits = "-ERR command 'bitop' is not available here: other commands on bits, estimates and \
                places are not supported\r\n";
    let answers = format!("+OK\r\n{bits}{abort}");
    talk(&mut client, "MULTI\r\nBITOP NOT x y\r\nEXEC\r\n", &answers).await;
    // Other mistakes are answers of the command, and the other commands take effect.
    let answers = "+OK\r\n+QUEUED\r\n+QUEUED\r\n*2\r\n-ERR syntax error\r\n:1\r\n";
    talk(&mut client, "MULTI\r\nSET a 1 NX XX\r\nINCR n\r\nEXEC\r\n", answers).await;
    let nested = "-ERR MULTI calls can not be nested\r\n";
    let watch = "-ERR WATCH inside MULTI is not allowed\r\n";
    let answers = format!("+OK\r\n{nested}{watch}*0\r\n");
    talk(&mut client, "MULTI\r\nMULTI\r\nWATCH a\r\nEXEC\r\n", &answers).await;
}

#[tokio::test]
async fn contention_is_retried_and_an_unknown_outcome_is_said() {
    let limits = Limits { request_timeout: Duration::from_millis(300), ..Limits::default() };
    let rig = rig(Access::open(), limits).await;
    let mut client = rig.client().await;
    let reasons = [AbortReason::Conflict, AbortReason::StaleRead, AbortReason::Recovery];
    rig.twist(reasons.map(Twist::Abort).into_iter().chain([Twist::Busy, Twist::LostAbort]));
    talk(&mut client, "INCR a\r\n", ":1\r\n").await;
    let begun = rig.begun();
    let attempts: Vec<u32> = begun.iter().map(|(id, _)| id.attempt).collect();
    assert_eq!(attempts, [0, 1, 2, 3, 3, 4], "an id is used again only if it had no effect");
    // A commit whose answer is lost is found out. What it answered is computed if it can be.
    rig.twist([Twist::LostCommit]);
    talk(&mut client, "SET a 7\r\n", "+OK\r\n").await;
    rig.twist([Twist::LostCommit]);
    let text = "-COMMITTED this transaction took effect, but its answers were lost; read the keys instead\r\n";
    talk(&mut client, "INCR a\r\n", text).await;
    talk(&mut client, "GET a\r\n", "$1\r\n8\r\n").await;
    rig.twist([Twist::Unknown]);
    client.write_all(b"INCR a\r\n").await.unwrap();
    let mut answer = vec![0; 8];
    client.read_exact(&mut answer).await.unwrap();
    assert_eq!(answer, b"-UNKNOWN");
}

#[tokio::test]
async fn a_transaction_that_does_not_end_is_unknown_in_time_and_stays_pending() {
    let limits = Limits { request_timeout: Duration::from_secs(2), ..Limits::default() };
    let rig = rig(Access::open(), limits).await;
    let mut client = rig.client().await;
    talk(&mut client, "INCR a\r\n", ":1\r\n").await;
    rig.twist([Twist::Hang]);
    client.write_all(b"INCR a\r\n").await.unwrap();
    let mut answer = vec![0; 1_000];
    let read = client.read(&mut answer).await.unwrap();
    assert!(answer[..read].starts_with(b"-UNKNOWN"), "{}", String::from_utf8_lossy(&answer));
    let hung = rig.begun().last().unwrap().0.counter;
    for _ in 0..3 {
        talk(&mut client, "GET a\r\n", "$1\r\n1\r\n").await;
    }
    let acknowledged = rig.memory.0.lock().unwrap().acknowledged_below;
    assert!(acknowledged <= hung, "{hung} is pending, and {acknowledged} is acknowledged");
}

#[tokio::test]
async fn unwatch_is_queued_within_a_transaction() {
    let rig = open().await;
    let mut client = rig.client().await;
    let lines = "MULTI\r\nUNWATCH\r\nGET a\r\nEXEC\r\n";
    talk(&mut client, lines, "+OK\r\n+QUEUED\r\n+QUEUED\r\n*2\r\n+OK\r\n$-1\r\n").await;
}

#[tokio::test]
async fn contention_that_lasts_is_an_error_that_had_no_effect() {
    let limits = Limits { request_timeout: Duration::from_secs(1), ..Limits::default() };
    let rig = rig(Access::open(), limits).await;
    let mut client = rig.client().await;
    rig.twist([Twist::Abort(AbortReason::Conflict); 1_000]);
    let text = "-ERR the transaction aborted (conflict) until limits.request_timeout_ms had passed; \
                it had no effect\r\n";
    talk(&mut client, "INCR a\r\n", text).await;
}

#[tokio::test]
async fn a_group_that_is_too_large_runs_command_by_command() {
    let rig = open().await;
    let mut client = rig.client().await;
    rig.twist([Twist::Abort(AbortReason::TooLarge)]);
    talk(&mut client, "INCR a\r\nINCR b\r\n", ":1\r\n:1\r\n").await;
    assert_eq!(rig.begun().len(), 3);
}

#[tokio::test]
async fn a_key_that_has_expired_is_removed_by_a_read() {
    let rig = open().await;
    let mut client = rig.client().await;
    talk(&mut client, "SET a 1 PX 1\r\n", "+OK\r\n").await;
    tokio::time::sleep(Duration::from_millis(5)).await;
    talk(&mut client, "GET a\r\n", "$-1\r\n").await;
    assert!(rig.memory.0.lock().unwrap().values.is_empty());
    talk(&mut client, "SET a 1 PX 1\r\n", "+OK\r\n").await;
    tokio::time::sleep(Duration::from_millis(5)).await;
    talk(
        &mut client,
        "MULTI\r\nGET a\r\nSET b 1\r\nEXEC\r\n",
        "+OK\r\n+QUEUED\r\n+QUEUED\r\n*2\r\n$-1\r\n+OK\r\n",
    )
    .await;
    assert_eq!(rig.memory.0.lock().unwrap().values.len(), 1);
}

#[tokio::test]
async fn hello_changes_the_version_and_reset_changes_it_back() {
    let rig = open().await;
    let mut client = rig.client().await;
    client.write_all(b"HELLO 3\r\n").await.unwrap();
    let mut head = [0; 4];
    client.read_exact(&mut head).await.unwrap();
    assert_eq!(&head, b"%7\r\n");
    let mut rest = vec![0; 4 << 10];
    let read = client.read(&mut rest).await.unwrap();
    assert!(rest[..read].ends_with(b"$7\r\nmodules\r\n*0\r\n"));
    talk(&mut client, "GET a\r\nSADD s m\r\nSMEMBERS s\r\n", "_\r\n:1\r\n~1\r\n$1\r\nm\r\n").await;
    talk(&mut client, "RESET\r\nGET a\r\n", "+RESET\r\n$-1\r\n").await;
    talk(&mut client, "HELLO 4\r\n", "-NOPROTO unsupported protocol version\r\n").await;
    talk(
        &mut client,
        "SELECT 3\r\nSET a 1\r\nSELECT 0\r\nGET a\r\n",
        "+OK\r\n+OK\r\n+OK\r\n$-1\r\n",
    )
    .await;
    talk(&mut client, "SELECT 16\r\n", "-ERR DB index is out of range\r\n").await;
    talk(&mut client, "QUIT\r\n", "+OK\r\n").await;
    assert_eq!(client.read(&mut rest).await.unwrap(), 0, "the connection ends");
}

const READER: &str = "reader-reader-reader";
const WRITER: &str = "writer-writer-writer";

/// Access for two principals, by their tokens.
fn reader_and_writer() -> Access {
    let token = |text| Credential::token(text).unwrap();
    Access::only([
        (token(READER), Principal::new("reader", Role::Read)),
        (token(WRITER), Principal::new("writer", Role::Write)),
    ])
    .unwrap()
}

#[tokio::test]
async fn clients_need_the_credentials_of_the_api() {
    let rig = rig(reader_and_writer(), Limits::default()).await;
    let mut client = rig.client().await;
    talk(&mut client, "GET a\r\n", "-NOAUTH Authentication required.\r\n").await;
    let wrong = "-WRONGPASS invalid username-password pair or user is disabled.\r\n";
    talk(&mut client, "AUTH nonsense\r\n", wrong).await;
    talk(&mut client, &format!("AUTH writer {READER}\r\n"), wrong).await;
    talk(&mut client, &format!("AUTH {READER}\r\nGET a\r\n"), "+OK\r\n$-1\r\n").await;
    let denied = "-NOPERM this user has no permissions to run the 'set' command\r\n";
    talk(&mut client, "SET a 1\r\nGET a\r\n", &format!("{denied}$-1\r\n")).await;
    talk(&mut client, &format!("AUTH default {WRITER}\r\nSET a 1\r\n"), "+OK\r\n+OK\r\n").await;
    // Who may only read also reads a key that has expired, which removes it.
    talk(&mut client, "SET b 1 PX 1\r\n", "+OK\r\n").await;
    tokio::time::sleep(Duration::from_millis(5)).await;
    talk(&mut client, &format!("AUTH {READER}\r\nGET b\r\nGET a\r\n"), "+OK\r\n$-1\r\n$1\r\n1\r\n")
        .await;
    assert!(!rig.memory.0.lock().unwrap().values.contains_key(&Key::from("redis/0/b")));
    talk(&mut client, "RESET\r\nGET a\r\n", "+RESET\r\n-NOAUTH Authentication required.\r\n").await;
    // A stranger may not send much.
    let mut stranger = rig.client().await;
    let text = "-ERR Protocol error: invalid bulk length\r\n";
    talk(&mut stranger, "*2\r\n$4\r\nAUTH\r\n$100000\r\n", text).await;
    // Guessing ends the connection.
    let mut guesser = rig.client().await;
    talk(&mut guesser, &"AUTH nonsense\r\n".repeat(10), &wrong.repeat(10)).await;
    assert_eq!(guesser.read(&mut [0; 10]).await.unwrap(), 0);
}

#[tokio::test]
async fn bounds_are_those_of_the_file() {
    let limits = Limits {
        key_bytes_max: 20,
        value_bytes_max: 1_000,
        keys_max: 3,
        ops_max: 2,
        request_bytes_max: 4 << 10,
        response_bytes_max: 4 << 10,
        request_bytes_in_flight_max: 16 << 10,
        connections_max: 2,
        ..Limits::default()
    };
    let rig = rig(Access::open(), limits).await;
    let mut client = rig.client().await;
    let text = "-ERR a key of 13 bytes; at most 12 are allowed\r\n";
    talk(&mut client, "GET abcdefghijklm\r\n", text).await;
    let text = "-ERR a transaction accesses at most 3 different keys\r\n";
    talk(
        &mut client,
        "MGET a b c d\r\nMGET a b c\r\n",
        &format!("{text}*3\r\n$-1\r\n$-1\r\n$-1\r\n"),
    )
    .await;
    let text = "-ERR the transaction would have more than 2 commands, which is limits.ops_max\r\n";
    let abort = "-EXECABORT Transaction discarded because of previous errors.\r\n";
    let answers = format!("+OK\r\n+QUEUED\r\n+QUEUED\r\n{text}{abort}");
    talk(&mut client, "MULTI\r\nGET a\r\nGET a\r\nGET a\r\nEXEC\r\n", &answers).await;
    let text = "-ERR Protocol error: invalid bulk length\r\n";
    talk(&mut client, "*3\r\n$3\r\nSET\r\n$1\r\na\r\n$1001\r\n", text).await;
    assert_eq!(client.read(&mut [0; 10]).await.unwrap(), 0, "the connection ends");
    drop(client);
    let (_first, _second) = (rig.admitted().await, rig.admitted().await);
    let mut third = rig.client().await;
    talk(&mut third, "", "-ERR max number of clients reached\r\n").await;
}

#[tokio::test]
async fn who_sends_a_request_that_is_too_large_can_read_why() {
    let rig = open().await;
    let mut client = rig.client().await;
    let text = "-ERR Protocol error: invalid bulk length\r\n";
    // The whole request is sent before anything is read.
    let value = "x".repeat(20_000_000);
    talk(&mut client, &format!("*3\r\n$3\r\nSET\r\n$1\r\na\r\n$20000000\r\n{value}\r\n"), text)
        .await;
    assert_eq!(client.read(&mut [0; 10]).await.unwrap(), 0, "the connection ends");
}

#[tokio::test]
async fn bytes_that_wait_are_counted_among_those_of_the_node() {
    let limits = Limits {
        key_bytes_max: 1 << 10,
        value_bytes_max: 60 << 10,
        request_bytes_max: 64 << 10,
        response_bytes_max: 64 << 10,
        request_bytes_in_flight_max: 64 << 10,
        ..Limits::default()
    };
    let rig = rig(Access::open(), limits).await;
    let part = format!("*3\r\n$3\r\nSET\r\n$1\r\na\r\n$50000\r\n{}", "x".repeat(40_000));
    let mut first = rig.client().await;
    first.write_all(part.as_bytes()).await.unwrap();
    // The first client's bytes are counted once it sees an answer to nothing else; so the second
    // one tries until it is refused.
    let mut refused = false;
    for _ in 0..100 {
        let mut second = rig.client().await;
        second.write_all(part.as_bytes()).await.unwrap();
        let mut answer = vec![0; 9];
        let read = tokio::time::timeout(Duration::from_millis(200), second.read_exact(&mut answer));
        if read.await.is_ok_and(|read| read.is_ok()) {
            assert_eq!(answer, b"-ERR busy");
            refused = true;
            break;
        }
    }
    assert!(refused);
    // The first one goes on.
    talk(&mut first, &format!("{}\r\n", "x".repeat(10_000)), "+OK\r\n").await;
}

#[tokio::test]
async fn select_and_client_within_a_transaction_run_at_exec() {
    let rig = open().await;
    let mut client = rig.client().await;
    let lines = "WATCH a\r\nMULTI\r\nSET a 0\r\nSELECT 3\r\nSET a 3\r\nSELECT 99\r\nSELECT x\r\n\
                 CLIENT GETNAME\r\nCLIENT SETNAME x\r\nCLIENT GETNAME\r\nINCR a\r\n";
    let queued = format!("+OK\r\n+OK\r\n{}", "+QUEUED\r\n".repeat(9));
    talk(&mut client, lines, &queued).await;
    let (range, integer) =
        ("-ERR DB index is out of range", "-ERR value is not an integer or out of range");
    let answers = format!(
        "*9\r\n+OK\r\n+OK\r\n+OK\r\n{range}\r\n{integer}\r\n$-1\r\n+OK\r\n$1\r\nx\r\n:4\r\n"
    );
    talk(&mut client, "EXEC\r\nGET a\r\n", &format!("{answers}$1\r\n4\r\n")).await;
    assert_eq!(rig.begun().len(), 4, "two of WATCH, EXEC, GET");
    // The keys of two databases are different keys, watched or not.
    talk(&mut client, "SELECT 0\r\nGET a\r\nWATCH a\r\n", "+OK\r\n$1\r\n0\r\n+OK\r\n").await;
    talk(&mut client, "SELECT 3\r\nSET a 5\r\nMULTI\r\n", "+OK\r\n+OK\r\n+OK\r\n").await;
    talk(&mut client, "GET a\r\nEXEC\r\n", "+QUEUED\r\n*1\r\n$1\r\n5\r\n").await;
    // What is discarded has no effect.
    talk(&mut client, "MULTI\r\nSELECT 0\r\nCLIENT SETNAME y\r\n", "+OK\r\n+QUEUED\r\n+QUEUED\r\n")
        .await;
    let lines = "DISCARD\r\nGET a\r\nCLIENT GETNAME\r\n";
    talk(&mut client, lines, "+OK\r\n$1\r\n5\r\n$1\r\nx\r\n").await;
    // Mistakes that are seen at once discard the transaction.
    let abort = "-EXECABORT Transaction discarded because of previous errors.\r\n";
    for (line, error) in [
        ("CLIENT GETNAME a", "wrong number of arguments for 'client|getname' command"),
        ("SELECT", "wrong number of arguments for 'select' command"),
        (
            "CLIENT fly",
            "unknown subcommand 'fly'. 'client' has fewer subcommands here than in Redis.",
        ),
    ] {
        let lines = format!("MULTI\r\n{line}\r\nEXEC\r\n");
        talk(&mut client, &lines, &format!("+OK\r\n-ERR {error}\r\n{abort}")).await;
    }
}

#[tokio::test]
async fn a_transaction_of_too_much_work_has_no_effect() {
    let rig = open().await;
    let mut client = rig.client().await;
    let members: Vec<String> = (0..2_000).map(|number| format!("{number:04}")).collect();
    for _ in 0..20 {
        // One line is short, and the set is long.
        let line = format!("SADD s{{s}} {}\r\n", members.join(" "));
        client.write_all(line.as_bytes()).await.unwrap();
        let mut answer = [0; 7];
        let length = client.read(&mut answer).await.unwrap();
        assert!(answer[..length].starts_with(b":"));
    }
    let work = "SUNIONSTORE u{s} s{s} s{s} s{s} s{s}\r\n";
    let all = 1 + orthodrome_core::procedure::redis::WORK_BYTES_MAX / (4 * 2_000 * 20);
    let queued = "+QUEUED\r\n".repeat(all + 1);
    let lines = format!("MULTI\r\nINCR n{{s}}\r\n{}", work.repeat(all));
    talk(&mut client, &lines, &format!("+OK\r\n{queued}")).await;
    let error = "-ERR the transaction is too large: it may write 8388608 bytes, read 15728640 bytes \
                 of one partition, and pass over 67108864 bytes of values (each instruction of a \
                 script counts 4); it had no effect\r\n";
    talk(&mut client, "EXEC\r\nEXISTS n{s}\r\n", &format!("{error}:0\r\n")).await;
    // A transaction that only reads, too.
    let work = "SINTER s{s} s{s} s{s} s{s} nothing{s}\r\n";
    let queued = "+QUEUED\r\n".repeat(all);
    let lines = format!("MULTI\r\n{}", work.repeat(all));
    talk(&mut client, &lines, &format!("+OK\r\n{queued}")).await;
    talk(&mut client, "EXEC\r\n", error).await;
    // Commands that only arrived together run one by one.
    talk(&mut client, &work.repeat(all), &"*0\r\n".repeat(all)).await;
}

/// Requests with words of any bytes.
fn requests(lines: &[&[&str]]) -> String {
    let request = |words: &&[&str]| {
        let words = words.iter().map(|word| format!("${}\r\n{word}\r\n", word.len()));
        words.fold(String::new(), |all, word| all + &word)
    };
    lines.iter().map(|words| format!("*{}\r\n{}", words.len(), request(words))).collect()
}

const COUNT: &str = "return redis.call('INCRBY', KEYS[1], ARGV[1])";
const NO_SCRIPT: &str = "-NOSCRIPT No matching script. Please use EVAL.\r\n";

#[tokio::test]
async fn scripts_are_known_by_their_digests() {
    let rig = open().await;
    let mut client = rig.client().await;
    let digest = orthodrome_core::procedure::redis::script::digest(COUNT.as_bytes());
    let bulk = |text: &str| format!("${}\r\n{text}\r\n", text.len());
    let by_digest: &[&str] = &["EVALSHA", &digest, "1", "n", "5"];
    talk(&mut client, &requests(&[by_digest]), NO_SCRIPT).await;
    assert!(rig.begun().is_empty());
    let exists: &[&str] = &["SCRIPT", "EXISTS", &digest, "abc"];
    talk(&mut client, &requests(&[exists]), "*2\r\n:0\r\n:0\r\n").await;
    // Loaded and used in one pipeline; the digest in capitals; another connection.
    let load: &[&str] = &["SCRIPT", "LOAD", COUNT];
    let capitals = digest.to_uppercase();
    let lines = requests(&[load, by_digest, &["evalsha", &capitals, "1", "n", "2"], exists]);
    let answers = format!("{}:5\r\n:7\r\n*2\r\n:1\r\n:0\r\n", bulk(&digest));
    talk(&mut client, &lines, &answers).await;
    assert_eq!(rig.begun().len(), 1, "what arrives together is one transaction");
    talk(&mut rig.client().await, &requests(&[by_digest]), ":12\r\n").await;
    talk(
        &mut client,
        &requests(&[&["SCRIPT", "FLUSH", "ASYNC"], by_digest]),
        &format!("+OK\r\n{NO_SCRIPT}"),
    )
    .await;
    // EVAL makes it known, too, unless it is no script.
    let eval: &[&str] = &["EVAL", COUNT, "1", "n", "1"];
    talk(&mut client, &requests(&[eval, by_digest]), ":13\r\n:18\r\n").await;
    let error =
        "-ERR Error compiling script (new function): user_script:1: '=' expected near 'y'\r\n";
    talk(
        &mut client,
        &requests(&[&["EVAL", "x y", "0"], &["SCRIPT", "LOAD", "x y"]]),
        &error.repeat(2),
    )
    .await;
    for (words, answer) in [
        (&["SCRIPT", "KILL"][..], "-NOTBUSY No scripts in execution right now.\r\n"),
        (&["SCRIPT", "FLUSH", "x"], "-ERR SCRIPT FLUSH only support SYNC|ASYNC option\r\n"),
        (&["SCRIPT", "LOAD"], "-ERR wrong number of arguments for 'script|load' command\r\n"),
        (&["SCRIPT"], "-ERR wrong number of arguments for 'script' command\r\n"),
        (
            &["SCRIPT", "debug", "yes"],
            "-ERR unknown subcommand 'debug'. 'script' has fewer \
                                        subcommands here than in Redis.\r\n",
        ),
    ] {
        talk(&mut client, &requests(&[words]), answer).await;
    }
}

#[tokio::test]
async fn scripts_run_in_transactions_with_other_commands() {
    let rig = open().await;
    let mut client = rig.client().await;
    let digest = orthodrome_core::procedure::redis::script::digest(COUNT.as_bytes());
    let (multi, exec): (&[&str], &[&str]) = (&["MULTI"], &["EXEC"]);
    let by_digest: &[&str] = &["EVALSHA", &digest, "1", "n", "5"];
    // An unknown script fails when the transaction runs, and the others run.
    let lines = requests(&[multi, by_digest, &["INCR", "n"], exec]);
    let answers = format!("+OK\r\n+QUEUED\r\n+QUEUED\r\n*2\r\n{NO_SCRIPT}:1\r\n");
    talk(&mut client, &lines, &answers).await;
    let eval: &[&str] = &["EVAL", COUNT, "1", "n", "5"];
    let lines = requests(&[multi, eval, &["INCR", "n"], by_digest, exec]);
    let queued = "+QUEUED\r\n".repeat(3);
    talk(&mut client, &lines, &format!("+OK\r\n{queued}*3\r\n:6\r\n:7\r\n:12\r\n")).await;
    // A watched key that changed.
    talk(&mut client, &requests(&[&["WATCH", "n"]]), "+OK\r\n").await;
    talk(&mut rig.client().await, &requests(&[by_digest]), ":17\r\n").await;
    let lines = requests(&[multi, by_digest, exec]);
    talk(&mut client, &lines, "+OK\r\n+QUEUED\r\n*-1\r\n").await;
    // SCRIPT is no part of a transaction.
    let lines = requests(&[multi, &["SCRIPT", "LOAD", COUNT], exec]);
    let refused = "-ERR SCRIPT is not allowed in transactions\r\n";
    let abort = "-EXECABORT Transaction discarded because of previous errors.\r\n";
    talk(&mut client, &lines, &format!("+OK\r\n{refused}{abort}")).await;
    rig.begun();
    // Without keys, nothing of the database takes part.
    let lines = requests(&[&["EVAL", "return {1, 'x', ARGV[1]}", "0", "y"]]);
    talk(&mut client, &lines, "*3\r\n:1\r\n$1\r\nx\r\n$1\r\ny\r\n").await;
    let endless: &[&str] = &["EVAL", "while true do end", "0"];
    let error = "-ERR the transaction is too large: it may write 8388608 bytes, read 15728640 bytes \
                 of one partition, and pass over 67108864 bytes of values (each instruction of a \
                 script counts 4); it had no effect\r\n";
    talk(&mut client, &requests(&[endless]), error).await;
    assert!(rig.begun().is_empty());
    let endless: &[&str] = &["EVAL", "while true do redis.call('INCR', KEYS[1]) end", "1", "n"];
    talk(&mut client, &requests(&[endless, &["GET", "n"]]), &format!("{error}$2\r\n17\r\n")).await;
}

#[tokio::test]
async fn the_text_of_a_script_counts_for_every_use() {
    let limits =
        Limits { value_bytes_max: 4_000, request_bytes_max: 10 << 10, ..Limits::default() };
    let rig = rig(Access::open(), limits).await;
    let mut client = rig.client().await;
    let text = format!("return '{}'", "x".repeat(3_500));
    let digest = orthodrome_core::procedure::redis::script::digest(text.as_bytes());
    let by_digest: &[&str] = &["EVALSHA", &digest, "1", "n"];
    let answer = format!("${}\r\n{digest}\r\n", digest.len());
    talk(&mut client, &requests(&[&["SCRIPT", "LOAD", &text]]), &answer).await;
    let lines = requests(&[&["MULTI"], by_digest, by_digest, by_digest, &["EXEC"]]);
    let refused = "-ERR the transaction would have more than 10240 bytes, which is \
                   limits.request_bytes_max\r\n";
    let abort = "-EXECABORT Transaction discarded because of previous errors.\r\n";
    let answers = format!("+OK\r\n+QUEUED\r\n+QUEUED\r\n{refused}{abort}");
    talk(&mut client, &lines, &answers).await;
}

#[tokio::test]
async fn who_may_only_read_runs_scripts_that_only_read() {
    let rig = rig(reader_and_writer(), Limits::default()).await;
    let mut client = rig.client().await;
    let read = "return redis.call('GET', KEYS[1])";
    let denied = "-NOAUTH Authentication required.\r\n";
    talk(&mut client, &requests(&[&["SCRIPT", "LOAD", read]]), denied).await;
    let lines = requests(&[&["AUTH", READER], &["EVAL", read, "1", "a"]]);
    let denied = "-NOPERM this user has no permissions to run the 'eval' command\r\n";
    talk(&mut client, &lines, &format!("+OK\r\n{denied}")).await;
    talk(&mut client, &requests(&[&["EVAL_RO", read, "1", "a"]]), "$-1\r\n").await;
    let digest = orthodrome_core::procedure::redis::script::digest(read.as_bytes());
    talk(&mut client, &requests(&[&["EVALSHA_RO", &digest, "1", "a"]]), "$-1\r\n").await;
    assert!(rig.begun().iter().all(|(_, is_read_only)| *is_read_only));
}

#[tokio::test]
async fn the_commands_for_scripts_are_listed() {
    let rig = open().await;
    let mut client = rig.client().await;
    let lines = requests(&[&["COMMAND", "INFO", "eval", "EVALSHA_RO", "script"]]);
    let line = |name: &str, arity: &str, flags: &str| {
        let keys = ":0\r\n".repeat(3);
        format!("*6\r\n${}\r\n{name}\r\n:{arity}\r\n{flags}{keys}", name.len())
    };
    let answers = [
        "*3\r\n".to_owned(),
        line("eval", "-3", "*2\r\n+noscript\r\n+movablekeys\r\n"),
        line("evalsha_ro", "-3", "*3\r\n+readonly\r\n+noscript\r\n+movablekeys\r\n"),
        line("script", "-2", "*1\r\n+fast\r\n"),
    ];
    talk(&mut client, &lines, &answers.concat()).await;
    let found = requests(&[&["FCALL", "f", "0"]]);
    let refused = "-ERR command 'fcall' is not available here: functions are not supported; scripts \
                   are (EVAL, EVALSHA)\r\n";
    talk(&mut client, &found, refused).await;
}

/// The answers to commands that arrive together are bounded together, also if they run as several
/// transactions because one would be too large.
#[tokio::test]
async fn answers_of_commands_that_arrive_together_are_bounded() {
    let limits = Limits {
        key_bytes_max: 20,
        value_bytes_max: 1_000,
        request_bytes_max: 4 << 10,
        response_bytes_max: 4 << 10,
        ..Limits::default()
    };
    let rig = rig(Access::open(), limits).await;
    let mut client = rig.client().await;
    let value = "x".repeat(900);
    talk(&mut client, &format!("SET a {value}\r\n"), "+OK\r\n").await;
    for is_split in [false, true] {
        if is_split {
            rig.twist([Twist::Abort(AbortReason::TooLarge)]);
        }
        client.write_all(&b"GET a\r\n".repeat(30)).await.unwrap();
        client.write_all(b"INCR n\r\nECHO end\r\n").await.unwrap();
        let mut got = Vec::new();
        while !got.ends_with(b"$3\r\nend\r\n") {
            let read = tokio::time::timeout(Duration::from_secs(30), client.read_buf(&mut got));
            assert!(read.await.expect("the answers arrive").unwrap() > 0);
        }
        let text = String::from_utf8(got).unwrap();
        let values = text.matches(&value).count();
        let left_out = text.matches("-ERR the answers of th").count();
        assert_eq!(values + left_out, 30, "split {is_split}: {text}");
        assert!((1..=4).contains(&values), "split {is_split}: {values} answers");
    }
    talk(&mut client, "GET n\r\n", "$1\r\n2\r\n").await;
}

/// Sends lines, and returns what comes back.
async fn ask(client: &mut TcpStream, lines: &str) -> String {
    client.write_all(format!("{lines}\r\nECHO end\r\n").as_bytes()).await.unwrap();
    let mut got = Vec::new();
    while !got.ends_with(b"$3\r\nend\r\n") {
        let read = tokio::time::timeout(Duration::from_secs(30), client.read_buf(&mut got));
        assert!(read.await.expect("the answers arrive").unwrap() > 0, "{lines}");
    }
    String::from_utf8(got).unwrap().strip_suffix("$3\r\nend\r\n").unwrap().to_owned()
}

/// The strings in the answer to a line.
async fn strings(client: &mut TcpStream, line: &str) -> Vec<String> {
    let answer = ask(client, line).await;
    let is_head = |line: &&str| line.starts_with(['*', '$']);
    answer.lines().filter(|line| !is_head(line)).map(str::to_owned).collect()
}

/// The names that `SCAN` finds with these options, and the number of calls.
async fn iterate(client: &mut TcpStream, options: &str) -> (Vec<String>, usize) {
    let (mut found, mut calls, mut cursor) = (Vec::new(), 0, "0".to_owned());
    loop {
        let mut answer = strings(client, &format!("SCAN {cursor} {options}")).await;
        calls += 1;
        cursor = answer.remove(0);
        found.extend(answer);
        if cursor == "0" {
            return (found, calls);
        }
    }
}

impl Rig {
    fn fail_scans(&self, failed: impl IntoIterator<Item = ScanFailed>) {
        self.memory.0.lock().unwrap().failed_scans.extend(failed);
    }

    fn scans(&self) -> Vec<Scan> {
        std::mem::take(&mut self.memory.0.lock().unwrap().scans)
    }

    /// A key that another client of the database wrote.
    fn write(&self, key: &str, value: &str) {
        self.memory.0.lock().unwrap().values.insert(key.into(), value.into());
    }

    fn keys(&self) -> Vec<String> {
        let state = self.memory.0.lock().unwrap();
        state.values.keys().map(|key| key.to_string()).collect()
    }
}

#[tokio::test]
async fn a_scan_returns_every_key_once() {
    let rig = open().await;
    let mut client = rig.client().await;
    let names: Vec<String> = (0..25).map(|number| format!("k{number:02}")).collect();
    let all: String = names.iter().map(|name| format!(" {name} 1")).collect();
    ask(&mut client, &format!("MSET{all}\r\nSADD s m\r\nSET gone 1 PX 1")).await;
    ask(&mut client, "SELECT 1\r\nSET elsewhere 1\r\nSELECT 0").await;
    rig.write("redis/0/zz", "written by another client");
    rig.write("redis/00", "no key of Redis");
    tokio::time::sleep(Duration::from_millis(5)).await;
    let expected: Vec<String> = names.iter().cloned().chain(["s".into(), "zz".into()]).collect();
    assert_eq!(iterate(&mut client, "").await, (expected.clone(), 3));
    assert!(rig.scans().iter().all(|scan| scan.limit == 10));
    assert_eq!(iterate(&mut client, "COUNT 5000").await, (expected.clone(), 1));
    assert_eq!(rig.scans()[0].limit, 1_000, "what one transaction may read");
    // The range is as narrow as the pattern allows.
    let (found, calls) = iterate(&mut client, "match k1[0-4]* count 4").await;
    assert_eq!((found.as_slice(), calls), (&names[10..15], 3));
    assert_eq!(rig.scans()[0].range, KeyRange::prefix(b"redis/0/k1"));
    assert_eq!(iterate(&mut client, "MATCH k07").await, (vec!["k07".to_owned()], 1));
    assert_eq!(iterate(&mut client, "TYPE SET").await.0, ["s"]);
    assert_eq!(iterate(&mut client, "TYPE foreign").await.0, ["zz"]);
    assert_eq!(strings(&mut client, "TYPE zz").await, ["+foreign"]);
    // A cursor belongs to the node and not to the connection, and may be used again.
    let first = strings(&mut client, "SCAN 0").await;
    let mut other = rig.client().await;
    for _ in 0..2 {
        assert_eq!(strings(&mut other, &format!("SCAN {}", first[0])).await[1..], expected[9..19]);
    }
    // With another pattern, what is left of the first one is scanned.
    let line = format!("SCAN {} MATCH k0* COUNT 100", first[0]);
    assert_eq!(strings(&mut other, &line).await, ["0", "k09"]);
    rig.scans();
    let line = format!("SCAN {} MATCH a*", first[0]);
    talk(&mut other, &format!("{line}\r\n"), "*2\r\n$1\r\n0\r\n*0\r\n").await;
    assert!(rig.scans().is_empty(), "no key is left for this pattern");
    let unknown = "-ERR this node does not know the cursor in this database";
    let line = format!("SELECT 1\r\nSCAN {}", first[0]);
    assert!(ask(&mut other, &line).await.starts_with(&format!("+OK\r\n{unknown}")));
    for line in ["SCAN 1", "SCAN 18446744073709551615"] {
        assert!(ask(&mut client, line).await.starts_with(unknown), "{line}");
    }
    for (line, error) in [
        ("SCAN x", "invalid cursor"),
        ("SCAN +1", "invalid cursor"),
        ("SCAN 18446744073709551616", "invalid cursor"),
        ("SCAN 0 COUNT 0", "syntax error"),
        ("SCAN 0 COUNT x", "value is not an integer or out of range"),
        ("SCAN 0 MATCH", "syntax error"),
        ("SCAN 0 NOVALUES", "syntax error"),
        ("SCAN", "wrong number of arguments for 'scan' command"),
    ] {
        assert_eq!(ask(&mut client, line).await, format!("-ERR {error}\r\n"), "{line}");
    }
    let long = "a".repeat(1_025);
    let error = "-ERR a pattern has at most 1024 bytes\r\n";
    talk(&mut client, &format!("KEYS {long}\r\n"), error).await;
}

#[tokio::test]
async fn keys_are_listed_and_counted_page_by_page() {
    let limits = Limits { keys_max: 4, ..Limits::default() };
    let rig = rig(Access::open(), limits).await;
    let mut client = rig.client().await;
    talk(&mut client, "KEYS *\r\nDBSIZE\r\nRANDOMKEY\r\n", "*0\r\n:0\r\n$-1\r\n").await;
    for number in 0..11 {
        ask(&mut client, &format!("SET k{number:02} 1\r\nSET gone{number:02} 1 PX 1")).await;
    }
    tokio::time::sleep(Duration::from_millis(5)).await;
    rig.scans();
    talk(&mut client, "DBSIZE\r\n", ":11\r\n").await;
    assert_eq!(rig.scans().len(), 6, "22 keys in pages of 4");
    let all = strings(&mut client, "KEYS *").await;
    assert_eq!(all.len(), 11);
    talk(&mut client, "KEYS k*3\r\n", "*1\r\n$3\r\nk03\r\n").await;
    assert!(all.contains(&strings(&mut client, "RANDOMKEY").await[0]));
    // What was sent before is in the answer.
    let answers = "+OK\r\n:12\r\n*1\r\n$1\r\nx\r\n:1\r\n:11\r\n";
    talk(&mut client, "SET x 1\r\nDBSIZE\r\nKEYS x\r\nDEL x\r\nDBSIZE\r\n", answers).await;
    let many = "KEYS k*\r\n".repeat(10);
    let count = ask(&mut client, &many).await.matches("k03").count();
    assert_eq!(count, 10, "several answers wait for one client");
}

#[tokio::test]
async fn random_keys_are_from_everywhere() {
    let rig = open().await;
    let mut client = rig.client().await;
    for part in ["a", "b"] {
        let all: String = (0..500).map(|number| format!(" {part}{number:03} 1")).collect();
        ask(&mut client, &format!("MSET{all}")).await;
    }
    let mut seen = orthodrome_core::ordered::OrdSet::new();
    for _ in 0..200 {
        seen.insert(strings(&mut client, "RANDOMKEY").await.remove(0));
    }
    assert!(seen.iter().any(|name| name.starts_with('a')), "{seen:?}");
    assert!(seen.iter().any(|name| name.starts_with('b')), "{seen:?}");
    assert!(seen.len() > 50, "{seen:?}");
}

#[tokio::test]
async fn a_database_is_emptied_page_by_page() {
    let limits = Limits { keys_max: 4, ..Limits::default() };
    let rig = rig(Access::open(), limits).await;
    let mut client = rig.client().await;
    for number in 0..10 {
        ask(&mut client, &format!("SET k{number} 1")).await;
    }
    ask(&mut client, "SET gone 1 PX 1\r\nSELECT 2\r\nSET other 1\r\nSELECT 0").await;
    rig.write("redis/0/zz", "written by another client");
    rig.write("redis/settings", "no key of Redis");
    tokio::time::sleep(Duration::from_millis(5)).await;
    rig.begun();
    // A page that is too large at once is deleted in parts.
    rig.twist([Twist::Abort(AbortReason::TooLarge)]);
    talk(&mut client, "FLUSHDB\r\n", "+OK\r\n").await;
    assert_eq!(rig.begun().len(), 5, "12 keys in pages of 4");
    assert_eq!(rig.keys(), ["redis/2/other", "redis/settings"]);
    talk(&mut client, "FLUSHALL ASYNC\r\nFLUSHALL\r\n", "+OK\r\n+OK\r\n").await;
    assert_eq!(rig.keys(), ["redis/settings"]);
    talk(&mut client, "FLUSHDB x\r\n", "-ERR syntax error\r\n").await;
    talk(&mut client, "FLUSHDB SYNC ASYNC\r\n", "-ERR syntax error\r\n").await;
    // A watched key that is removed has changed.
    talk(&mut client, "SET a 1\r\nWATCH a\r\nMULTI\r\n", "+OK\r\n+OK\r\n+OK\r\n").await;
    talk(&mut rig.client().await, "FLUSHDB\r\n", "+OK\r\n").await;
    talk(&mut client, "PING\r\nEXEC\r\n", "+QUEUED\r\n*-1\r\n").await;
    // A key that does not exist, and is watched, has not.
    talk(&mut client, "WATCH a\r\nFLUSHDB\r\n", "+OK\r\n+OK\r\n").await;
    talk(&mut client, "MULTI\r\nPING\r\nEXEC\r\n", "+OK\r\n+QUEUED\r\n*1\r\n+PONG\r\n").await;
    // It fails after the first page.
    for number in 0..10 {
        ask(&mut client, &format!("SET k{number} 1")).await;
    }
    rig.twist([Twist::LostCommit, Twist::Abort(AbortReason::Invalid)]);
    let failed = ask(&mut client, "FLUSHDB").await;
    let start = "-UNKNOWN FLUSHDB deleted 4 keys and did not finish; give it again: ERR the trans";
    assert!(failed.starts_with(start), "{failed}");
    rig.twist([Twist::Abort(AbortReason::Invalid)]);
    let failed = ask(&mut client, "FLUSHDB").await;
    assert!(failed.starts_with("-ERR the transaction aborted"), "{failed}");
}

#[tokio::test]
async fn elements_of_one_key_are_answered_at_once() {
    let rig = open().await;
    let mut client = rig.client().await;
    ask(&mut client, "HSET h a 1 b 2 ab 3\r\nSADD s m n\r\nZADD z 1 low 2.5 high").await;
    for (line, expected) in [
        ("HSCAN h 0", &["0", "a", "1", "ab", "3", "b", "2"][..]),
        ("HSCAN h 17 MATCH a* COUNT 1", &["0", "a", "1", "ab", "3"]),
        ("HSCAN h 0 NOVALUES", &["0", "a", "ab", "b"]),
        ("SSCAN s 0", &["0", "m", "n"]),
        ("SSCAN s 0 MATCH n", &["0", "n"]),
        ("ZSCAN z 0", &["0", "low", "1", "high", "2.5"]),
        ("ZSCAN z 0 MATCH h*", &["0", "high", "2.5"]),
        ("ZSCAN none 0", &["0"]),
    ] {
        assert_eq!(strings(&mut client, line).await, expected, "{line}");
    }
    talk(&mut client, "HSCAN none 0\r\n", "*2\r\n$1\r\n0\r\n*0\r\n").await;
    ask(&mut client, "HELLO 3").await;
    let answer = "*2\r\n$1\r\n0\r\n*4\r\n$3\r\nlow\r\n$1\r\n1\r\n$4\r\nhigh\r\n$3\r\n2.5\r\n";
    talk(&mut client, "ZSCAN z 0\r\n", answer).await;
    let wrong = "-WRONGTYPE Operation against a key holding the wrong kind of value\r\n";
    talk(&mut client, "SSCAN h 0\r\nHSCAN h x\r\n", &format!("{wrong}-ERR invalid cursor\r\n"))
        .await;
    let error = "-ERR NOVALUES option can only be used in HSCAN\r\n";
    talk(&mut client, "SSCAN s 0 NOVALUES\r\n", error).await;
    talk(&mut client, "HSCAN h 0 TYPE x\r\n", "-ERR syntax error\r\n").await;
    assert!(rig.scans().is_empty());
}

#[tokio::test]
async fn listing_commands_are_refused_where_they_cannot_run() {
    let rig = open().await;
    let mut client = rig.client().await;
    let abort = "-EXECABORT Transaction discarded because of previous errors.\r\n";
    for name in ["SCAN 0", "KEYS *", "DBSIZE", "RANDOMKEY", "FLUSHDB", "FLUSHALL", "HSCAN h 0"] {
        let word = name.split(' ').next().unwrap();
        let refused = format!("-ERR {word} is not allowed in transactions\r\n");
        let answers = format!("+OK\r\n{refused}{abort}");
        talk(&mut client, &format!("MULTI\r\n{name}\r\nEXEC\r\n"), &answers).await;
    }
    let script: &[&str] = &["EVAL", "return redis.call('SCAN', 0)", "0"];
    let failed = ask(&mut client, requests(&[script]).trim_end()).await;
    assert!(failed.starts_with("-ERR Unknown Redis command called from script"), "{failed}");
    rig.fail_scans([ScanFailed::Unsupported]);
    let text = "-ERR command 'keys' is not available with this cluster's protocol\r\n";
    talk(&mut client, "KEYS *\r\n", text).await;
    rig.fail_scans([ScanFailed::Late]);
    assert!(ask(&mut client, "SCAN 0").await.starts_with("-ERR too few servers listed their keys"));
    // A key that only scans may use.
    let refused = "-ERR a key must not end with a zero byte, `fence` and a number; scans use such \
                   keys themselves\r\n";
    let fence: &[&str] = &["SET", "x\0fence7", "1"];
    talk(&mut client, &requests(&[fence]), refused).await;
    talk(&mut client, &requests(&[&["SET", "fence7", "1"]]), "+OK\r\n").await;
    // As COMMAND lists them.
    let lines = "COMMAND INFO scan hscan flushdb";
    let line = |name: &str, arity: &str, flag: &str, key: &str| {
        let keys = format!(":{key}\r\n").repeat(3);
        format!("*6\r\n${}\r\n{name}\r\n:{arity}\r\n*1\r\n+{flag}\r\n{keys}", name.len())
    };
    let answers = [
        "*3\r\n".to_owned(),
        line("scan", "-2", "readonly", "0"),
        line("hscan", "-3", "readonly", "1"),
        line("flushdb", "-1", "write", "0"),
    ];
    assert_eq!(ask(&mut client, lines).await, answers.concat());
}

#[tokio::test]
async fn busy_scans_are_repeated_with_fewer_keys() {
    let limits = Limits { request_timeout: Duration::from_millis(300), ..Limits::default() };
    let rig = rig(Access::open(), limits).await;
    let mut client = rig.client().await;
    rig.fail_scans([ScanFailed::Overloaded, ScanFailed::Scan(ScanError::Busy)]);
    talk(&mut client, "SCAN 0 COUNT 100\r\n", "*2\r\n$1\r\n0\r\n*0\r\n").await;
    let limits: Vec<usize> = rig.scans().iter().map(|scan| scan.limit).collect();
    assert_eq!(limits, [100, 100, 50]);
    rig.fail_scans(vec![ScanFailed::Overloaded; 1_000]);
    let failed = ask(&mut client, "DBSIZE").await;
    assert!(failed.starts_with("-ERR 64 scans run at this gateway"), "{failed}");
}

#[tokio::test]
async fn who_may_only_read_lists_keys_and_flushes_nothing() {
    let rig = rig(reader_and_writer(), Limits::default()).await;
    let mut client = rig.client().await;
    talk(&mut client, "KEYS *\r\n", "-NOAUTH Authentication required.\r\n").await;
    let lines = format!("AUTH {READER}\r\nKEYS *\r\nDBSIZE\r\nSCAN 0\r\nHSCAN h 0\r\n");
    let nothing = "*2\r\n$1\r\n0\r\n*0\r\n";
    talk(&mut client, &lines, &format!("+OK\r\n*0\r\n:0\r\n{nothing}{nothing}")).await;
    for name in ["flushdb", "flushall"] {
        let denied = format!("-NOPERM this user has no permissions to run the '{name}' command");
        talk(&mut client, &format!("{name}\r\n"), &format!("{denied}\r\n")).await;
    }
    talk(&mut client, &format!("AUTH {WRITER}\r\nFLUSHDB\r\n"), "+OK\r\n+OK\r\n").await;
}

/// True if the operating system will ask the peer of a connection whether it is there.
#[cfg(target_os = "linux")]
fn is_kept_alive(server: SocketAddr, client: SocketAddr) -> bool {
    let (server, client) = (format!(":{:04X}", server.port()), format!(":{:04X}", client.port()));
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    // The columns: number, own address, peer, state, queues, and which timer runs.
    table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()).any(|columns| {
        columns.len() > 5
            && columns[1].ends_with(&server)
            && columns[2].ends_with(&client)
            && columns[5].starts_with("02:")
    })
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn listeners_notice_clients_that_vanished() {
    let rig = open().await;
    for listener in [rig.redis, rig.clients] {
        let client = TcpStream::connect(listener).await.unwrap();
        let own = client.local_addr().unwrap();
        let deadline = std::time::Instant::now() + Duration::from_secs(30);
        while !is_kept_alive(listener, own) {
            assert!(std::time::Instant::now() < deadline, "no timer for {listener}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

#[tokio::test]
async fn a_shutdown_ends_idle_connections() {
    let rig = open().await;
    let mut client = rig.client().await;
    talk(&mut client, "SET a 1\r\n", "+OK\r\n").await;
    rig.stop.cancel();
    assert_eq!(client.read(&mut [0; 10]).await.unwrap(), 0);
    rig.served.await.unwrap();
}
