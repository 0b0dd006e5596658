//! Many large requests at once, over gRPC to real processes. Each is within every limit, and
//! together they far exceed the bytes that a node may have in progress. No node may end because of
//! them, every answer must state the outcome of the request, and the data must be there after a
//! restart. Then reads that are too large for one answer.

#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    missing_docs,
    reason = "tests of real processes; an unmet expectation is a failed test"
)]

#[path = "../../server/tests/flooding/mod.rs"]
mod flooding;
mod processes;

use std::time::{Duration, Instant};

use flooding::{CALLERS, VALUES, key, protocols, writes};
use orthodrome_core::txn::VALUE_BYTES_MAX;
use processes::{Cluster, must_end_within};
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};
use tonic_prost::ProstCodec;

use api::{Answer, Read, reason};

/// Time limit of one test: many times what it takes on an idle machine.
const LIMIT: Duration = Duration::from_secs(500);
/// Time limit of one answer on a machine that is busy with other work.
const PATIENCE: Duration = Duration::from_secs(120);
/// Connections that share the requests.
const CONNECTIONS: usize = 6;
/// Number of values of maximum size that exceed one answer.
const TOO_MANY: usize = 18;

/// The needed parts of `proto/orthodrome.proto`. The test uses no client library, which would hide
/// the statuses.
mod api {
    #[derive(Clone, PartialEq, prost::Message)]
    pub struct TxnId {
        #[prost(uint64, tag = "1")]
        pub client: u64,
        #[prost(uint64, tag = "2")]
        pub counter: u64,
        #[prost(uint32, tag = "3")]
        pub attempt: u32,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub struct Empty {}

    #[derive(Clone, PartialEq, prost::Message)]
    pub struct Registered {
        #[prost(uint64, tag = "1")]
        pub client: u64,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub struct Op {
        #[prost(bytes = "vec", tag = "1")]
        pub key: Vec<u8>,
        #[prost(oneof = "Do", tags = "2, 4")]
        pub op: Option<Do>,
    }

    #[derive(Clone, PartialEq, prost::Oneof)]
    pub enum Do {
        #[prost(message, tag = "2")]
        Get(Empty),
        #[prost(bytes = "vec", tag = "4")]
        Put(Vec<u8>),
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub struct Execute {
        #[prost(message, optional, tag = "1")]
        pub txn: Option<TxnId>,
        #[prost(message, repeated, tag = "3")]
        pub ops: Vec<Op>,
    }

    /// `ReadRequest` and, with other tags, `BeginRequest`.
    #[derive(Clone, PartialEq, prost::Message)]
    pub struct Read {
        #[prost(message, optional, tag = "1")]
        pub txn: Option<TxnId>,
        #[prost(bytes = "vec", repeated, tag = "3")]
        pub keys: Vec<Vec<u8>>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub struct Aborted {
        #[prost(int32, tag = "1")]
        pub reason: i32,
        #[prost(bool, tag = "2")]
        pub retryable: bool,
    }

    /// Numbers of `AbortReason`.
    pub mod reason {
        pub const TOO_LARGE: i32 = 9;
    }

    #[derive(Clone, PartialEq, prost::Oneof)]
    pub enum Ended {
        #[prost(message, tag = "1")]
        Committed(Empty),
        #[prost(message, tag = "2")]
        Aborted(Aborted),
        #[prost(message, tag = "3")]
        Unknown(Empty),
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub struct Outcome {
        #[prost(oneof = "Ended", tags = "1, 2, 3")]
        pub result: Option<Ended>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub struct KeyRead {
        #[prost(bytes = "vec", tag = "1")]
        pub key: Vec<u8>,
        #[prost(bytes = "vec", optional, tag = "2")]
        pub value: Option<Vec<u8>>,
    }

    /// `ExecuteResponse` and `ReadResponse`.
    #[derive(Clone, PartialEq, prost::Message)]
    pub struct Answer {
        #[prost(message, optional, tag = "1")]
        pub outcome: Option<Outcome>,
        #[prost(message, repeated, tag = "2")]
        pub reads: Vec<KeyRead>,
        #[prost(bool, tag = "3")]
        pub reads_omitted: bool,
    }

    /// `BeginResponse`.
    #[derive(Clone, PartialEq, prost::Message)]
    pub struct Begun {
        #[prost(message, optional, tag = "1")]
        pub opened: Option<Empty>,
        #[prost(message, optional, tag = "2")]
        pub finished: Option<Outcome>,
    }
}

/// The result of a request.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Told {
    Committed,
    /// It had no effect, for this reason.
    Aborted(i32),
    /// It had no effect, because the node was overloaded.
    Busy,
}

/// A client of one gateway.
#[derive(Clone)]
struct Caller {
    channel: Channel,
    client: u64,
    counter: u64,
}

impl Caller {
    async fn at(address: &str) -> Self {
        let channel = Endpoint::from_shared(format!("http://{address}")).unwrap().connect_lazy();
        let mut caller = Self { channel, client: 0, counter: 0 };
        let registered: api::Registered = caller.call("Register", api::Empty {}).await.unwrap();
        caller.client = registered.client;
        caller
    }

    async fn call<Q, A>(&mut self, method: &str, message: Q) -> Result<A, Status>
    where
        Q: prost::Message + Send + Sync + 'static,
        A: prost::Message + Default + Send + Sync + 'static,
    {
        let mut grpc = Grpc::new(self.channel.clone()).max_decoding_message_size(64 << 20);
        grpc.ready().await.unwrap();
        let path = PathAndQuery::try_from(format!("/orthodrome.v1.Orthodrome/{method}")).unwrap();
        let answer = grpc.unary(Request::new(message), path, ProstCodec::<Q, A>::default());
        let answer = tokio::time::timeout(PATIENCE, answer).await;
        let answer = answer.unwrap_or_else(|_| panic!("no answer to {method} for {PATIENCE:?}"));
        answer.map(tonic::Response::into_inner)
    }

    fn next(&mut self) -> Option<api::TxnId> {
        self.counter += 1;
        Some(api::TxnId { client: self.client, counter: self.counter, attempt: 0 })
    }

    async fn execute(&mut self, ops: Vec<(String, api::Do)>) -> Result<Answer, Status> {
        let op = |(key, op): (String, api::Do)| api::Op { key: key.into(), op: Some(op) };
        let ops = ops.into_iter().map(op).collect();
        let request = api::Execute { txn: self.next(), ops };
        self.call("Execute", request).await
    }

    /// Writes the values of caller `number`.
    async fn write(&mut self, number: usize) -> Told {
        let puts = writes(number).map(|(key, value)| (key, api::Do::Put(value))).collect();
        told(self.execute(puts).await)
    }

    async fn read(&mut self, keys: &[String]) -> Result<Answer, Status> {
        let keys = keys.iter().map(|key| key.clone().into_bytes()).collect();
        let request = Read { txn: self.next(), keys };
        self.call("Read", request).await
    }
}

/// The result in an answer; fails if that is neither an outcome nor a refusal with a reason.
fn told(answer: Result<Answer, Status>) -> Told {
    match answer {
        Ok(answer) => ended(answer.outcome),
        Err(status) => {
            assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
            let effect = status.metadata().get("orthodrome-effect").expect("nothing happened");
            assert_eq!(effect, "none", "{status:?}");
            let said = status.message();
            assert!(said.starts_with("busy: ") && said.contains("try again"), "{status:?}");
            Told::Busy
        }
    }
}

fn ended(outcome: Option<api::Outcome>) -> Told {
    match outcome.and_then(|outcome| outcome.result) {
        Some(api::Ended::Committed(_)) => Told::Committed,
        Some(api::Ended::Aborted(aborted)) => Told::Aborted(aborted.reason),
        Some(api::Ended::Unknown(_)) | None => panic!("nobody can tell what became of it"),
    }
}

/// Writes the values of caller `number` until they are committed.
async fn write_at_last(caller: &mut Caller, number: usize) {
    let end = Instant::now() + PATIENCE;
    loop {
        let told = caller.write(number).await;
        if told == Told::Committed {
            return;
        }
        assert!(Instant::now() < end, "in vain for {PATIENCE:?}, at last {told:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Writes the values of caller `number`; again if the transaction aborts, as when a leader is replaced
/// on a busy machine. So whoever finds room commits in the end.
async fn write_or_busy(caller: &mut Caller, number: usize) -> Told {
    let end = Instant::now() + PATIENCE;
    loop {
        let told = caller.write(number).await;
        if !matches!(told, Told::Aborted(_)) || Instant::now() >= end {
            return told;
        }
    }
}

fn topology(regions: u32) -> String {
    let names = ["A", "B", "C"];
    let names = &names[..regions as usize];
    let mut text = String::from("name = \"flood\"\nsource = \"a test\"\nlocal_rtt_ms = 0.5\n");
    text += &format!("regions = {names:?}\n[rtt_ms]\n");
    if regions == 3 {
        text += "A = { B = 1, C = 1 }\nB = { C = 1 }\n";
    }
    text
}

fn cluster(protocol: &str, regions: u32) -> Cluster {
    let directory = tempfile::tempdir().unwrap();
    let map = directory.path().join("flood.toml");
    std::fs::write(&map, topology(regions)).unwrap();
    let count = regions.to_string();
    let arguments = ["--topology", map.to_str().unwrap(), "--protocol", protocol];
    let arguments = [&arguments[..], &["--partitions", "1", "--replicas", &count]].concat();
    // The test is about written data, not about durability or distances.
    let changes = [
        ("#durability = \"sync\"", "durability = \"process\""),
        ("emulate_wan = true", "emulate_wan = false"),
    ];
    Cluster::init(regions, &arguments, &changes)
}

async fn flood(protocol: &str, regions: u32) {
    let began = Instant::now();
    let mut cluster = cluster(protocol, regions);
    cluster.start(cluster.numbers());
    let address = cluster.endpoint(1);
    let mut first = Caller::at(&address).await;
    // Waits for leaders, because elections are not tested here.
    write_at_last(&mut first, CALLERS).await;
    let mut callers = Vec::new();
    for _ in 0..CONNECTIONS {
        callers.push(Caller::at(&address).await);
    }
    let answers: Vec<_> = (0..CALLERS)
        .map(|number| {
            let mut caller = callers[number % CONNECTIONS].clone();
            // Names for a thousand attempts each.
            caller.counter = (number as u64 + 1) * 1_000;
            tokio::spawn(async move { write_or_busy(&mut caller, number).await })
        })
        .collect();
    let (mut committed, mut busy) = (vec![CALLERS], 0);
    for (number, answer) in answers.into_iter().enumerate() {
        match answer.await.unwrap_or_else(|error| panic!("{protocol} with {regions}: {error}")) {
            Told::Committed => committed.push(number),
            Told::Busy => busy += 1,
            Told::Aborted(reason) => panic!("{protocol} with {regions}: in vain, {reason:?}"),
        }
    }
    let answered = began.elapsed();
    assert!(committed.len() > 1, "{protocol} with {regions}: nobody found room");
    // A client that comes back later succeeds.
    for number in 0..TOO_MANY / VALUES {
        write_at_last(&mut first, number).await;
        committed.push(number);
    }
    // Fails if a node has ended by itself.
    cluster.kill(cluster.numbers());
    cluster.start(cluster.numbers());
    let mut after = Caller::at(&address).await;
    for number in committed.iter().copied() {
        assert_eq!(length(&mut after, &key(number, VALUES - 1)).await, VALUE_BYTES_MAX);
    }
    read_too_much(&mut after, &format!("{protocol} with {regions}")).await;
    write_at_last(&mut after, 0).await;
    cluster.end();
    let (count, all) = (committed.len() - 1 - TOO_MANY / VALUES, began.elapsed());
    println!(
        "{protocol} with {regions}: {count} of {CALLERS} and {busy} busy after {answered:.1?}, {all:.1?}"
    );
}

/// The length of a key's value, once no transaction is writing it.
async fn length(caller: &mut Caller, key: &str) -> usize {
    let end = Instant::now() + PATIENCE;
    loop {
        let answer = caller.read(&[key.to_owned()]).await;
        let read = answer.as_ref().ok().and_then(|answer| answer.reads.first()).cloned();
        if told(answer) == Told::Committed {
            return read.unwrap().value.map_or(0, |value| value.len());
        }
        assert!(Instant::now() < end, "{key} cannot be read");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Reads that exceed an answer are refused with a reason, in every kind of request.
async fn read_too_much(caller: &mut Caller, of: &str) {
    let keys: Vec<String> = (0..TOO_MANY).map(|at| key(at / VALUES, at % VALUES)).collect();
    let is_refused = |status: &Status| {
        let effect =
            status.metadata().get("orthodrome-effect").is_some_and(|effect| effect == "none");
        let says_why = status.message().contains("an answer holds at most");
        status.code() == Code::InvalidArgument && effect && says_why
    };
    let end = Instant::now() + PATIENCE;
    loop {
        assert!(Instant::now() < end, "{of}: too much is not refused for good");
        let read = caller.read(&keys).await;
        match read {
            Err(status) if is_refused(&status) => break,
            // It conflicted with a pending write.
            other => match told(other) {
                Told::Aborted(reason::TOO_LARGE) => break,
                Told::Aborted(_) | Told::Busy => {}
                Told::Committed => panic!("{of}: an answer of {TOO_MANY} MiB"),
            },
        }
    }
    loop {
        assert!(Instant::now() < end, "{of}: too much is not refused for good");
        let gets = keys.iter().map(|key| (key.clone(), api::Do::Get(api::Empty {}))).collect();
        let answer = caller.execute(gets).await;
        let omits = answer.as_ref().is_ok_and(|a| a.reads_omitted && a.reads.is_empty());
        match told(answer) {
            Told::Committed => {
                assert!(omits, "{of}: an answer of {TOO_MANY} MiB");
                break;
            }
            Told::Aborted(reason::TOO_LARGE) => break,
            Told::Aborted(_) | Told::Busy => {}
        }
    }
    loop {
        assert!(Instant::now() < end, "{of}: too much is not refused for good");
        let keys = keys.iter().map(|key| key.clone().into_bytes()).collect();
        let begin = Read { txn: caller.next(), keys };
        let begun: Result<api::Begun, Status> = caller.call("Begin", begin).await;
        match begun {
            Err(status) if is_refused(&status) => break,
            Err(status) => assert_eq!(told(Err(status)), Told::Busy),
            Ok(api::Begun { opened: Some(_), .. }) => panic!("{of}: {TOO_MANY} MiB are told"),
            Ok(api::Begun { finished, .. })
                if ended(finished.clone()) == Told::Aborted(reason::TOO_LARGE) =>
            {
                break;
            }
            Ok(api::Begun { finished, .. }) => drop(ended(finished)),
        }
    }
    // A smaller read succeeds.
    assert_eq!(length(caller, &keys[0]).await, VALUE_BYTES_MAX, "{of}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_flood_ends_one_process() {
    must_end_within(LIMIT);
    for protocol in protocols() {
        flood(protocol, 1).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_flood_ends_one_of_three_processes() {
    must_end_within(LIMIT);
    for protocol in protocols() {
        flood(protocol, 3).await;
    }
}
