//! The service on a real socket, in front of a scripted gateway.

use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use orthodrome_core::machine::{
    FAR_FUTURE, Gauge, GroupView, MembershipOrder, OrderState, Refusal,
};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::session::{Floor, Floors};
use orthodrome_core::topology::Topology;
use orthodrome_core::txn::{AbortReason, Kind, Read, Value};
use orthodrome_core::{NodeId, PartitionId, Time, Timestamp};
use prost::Message;
use tokio::sync::Notify;
use tonic::Code;
use tonic::client::Grpc;
use tonic::transport::{Channel, Endpoint};
use tonic_prost::ProstCodec;

use super::*;

pub(super) fn map() -> Cluster {
    let topology = Topology::uniform(3, Duration::from_micros(500), Duration::from_millis(50));
    Cluster::spread(topology, 1, 1, 3, 3).unwrap()
}

/// Answers every call with what it was told to, and remembers the calls.
pub(super) struct Script {
    outcome: Mutex<Result<Outcome, GatewayError>>,
    value: Mutex<Vec<u8>>,
    decided: Mutex<Vec<(TxnId, Decision)>>,
    orders: Mutex<Vec<Admin>>,
    /// Why orders are refused; none if they are taken.
    refusal: Mutex<Option<Refusal>>,
    /// The priorities of the transactions begun.
    priorities: Mutex<Vec<Priority>>,
    /// What the clients of the transactions begun knew.
    floors: Mutex<Vec<Floors>>,
    /// The path of every outcome.
    path: Mutex<&'static str>,
    /// While set, calls wait for it.
    gate: Mutex<Option<Arc<Notify>>>,
    arrived: Notify,
    /// True while the node finishes what is in flight.
    is_stopping: AtomicBool,
    /// What is in flight.
    pub(super) pending: Mutex<PendingTxns>,
}

impl Script {
    fn new(outcome: Outcome) -> Arc<Self> {
        Arc::new(Self {
            outcome: Mutex::new(Ok(outcome)),
            value: Mutex::new(b"v".to_vec()),
            path: Mutex::new("script"),
            decided: Mutex::default(),
            orders: Mutex::default(),
            refusal: Mutex::default(),
            priorities: Mutex::default(),
            floors: Mutex::default(),
            gate: Mutex::default(),
            arrived: Notify::new(),
            is_stopping: AtomicBool::default(),
            pending: Mutex::default(),
        })
    }

    fn finished(&self) -> Result<Finished, GatewayError> {
        let outcome = self.outcome.lock().unwrap().clone()?;
        Ok(Finished { outcome, reads: None, path: *self.path.lock().unwrap() })
    }
}

#[tonic::async_trait]
impl Transactions for Script {
    async fn register(&self) -> Result<ClientId, GatewayError> {
        Ok(ClientId(7))
    }

    async fn begin(&self, txn: Txn) -> Result<Begun, GatewayError> {
        self.priorities.lock().unwrap().push(txn.priority);
        self.floors.lock().unwrap().push(txn.floors.clone());
        self.arrived.notify_one();
        let gate = self.gate.lock().unwrap().clone();
        if let Some(gate) = gate {
            gate.notified().await;
        }
        let value = Value::from(self.value.lock().unwrap().clone());
        let read = Read { value: Some(value), ..Read::default() };
        let reads: Reads = txn.reads.iter().map(|key| (key.clone(), read.clone())).collect();
        match txn.kind {
            Kind::Interactive | Kind::General => Ok(Begun::Reads(reads)),
            Kind::Procedure(_) | Kind::ReadOnly | Kind::StaleReadOnly => {
                Ok(Begun::Finished(Finished { reads: Some(reads), ..self.finished()? }))
            }
        }
    }

    async fn read(&self, _txn: TxnId, keys: Vec<Key>) -> Result<Begun, GatewayError> {
        self.arrived.notify_one();
        let gate = self.gate.lock().unwrap().clone();
        if let Some(gate) = gate {
            gate.notified().await;
        }
        let value = Value::from(self.value.lock().unwrap().clone());
        let read = Read { value: Some(value), ..Read::default() };
        Ok(Begun::Reads(keys.into_iter().map(|key| (key, read.clone())).collect()))
    }

    async fn decide(&self, txn: TxnId, decision: Decision) -> Result<Finished, GatewayError> {
        self.decided.lock().unwrap().push((txn, decision));
        self.finished()
    }

    async fn resolve(
        &self,
        _txn: Txn,
        _reads: Reads,
        _decision: Option<Decision>,
    ) -> Result<Finished, GatewayError> {
        self.finished()
    }

    async fn admin(&self, order: Admin) -> Result<(), OrderError> {
        self.orders.lock().unwrap().push(order);
        match self.refusal.lock().unwrap().clone() {
            Some(refusal) => Err(OrderError::Refused(refusal)),
            None => Ok(()),
        }
    }

    async fn groups(&self) -> Vec<GroupView> {
        vec![GroupView {
            partition: PartitionId(0),
            voters: vec![NodeId(2), NodeId(3), NodeId(4)],
            learners: vec![NodeId(1)],
            leader: Some(NodeId(3)),
            has_leaders: true,
            successor: None,
            behind: vec![(NodeId(2), 17), (NodeId(4), 0)],
        }]
    }

    fn describe(&self) -> Description {
        Description {
            cluster: "test".into(),
            protocol: "script",
            guarantee: "serializability",
            general: true,
            node: NodeId(1),
            gateway: NodeId(5),
            region: "R1".into(),
            leaders: OrdMap::new(),
            health: match self.is_stopping.load(Ordering::Relaxed) {
                true => Health::Stopping,
                false => Health::Serving,
            },
            in_flight: 0,
            in_flight_max: 1,
        }
    }

    fn links(&self) -> Vec<LinkStatus> {
        let link = |peer, is_connected, rtt_us| LinkStatus {
            peer: NodeId(peer),
            is_connected,
            since: Duration::from_millis(1_500),
            sent: 7,
            sent_bytes: 700,
            lost: 1,
            received: 5,
            received_bytes: 500,
            connects: 2,
            rtt_us,
            delay: Duration::from_millis(10),
            queued_bytes: 64,
        };
        vec![link(2, true, 250_000), link(3, false, 0)]
    }

    async fn gauges(&self) -> Vec<Gauge> {
        vec![Gauge { name: "depth_m", node: NodeId(3), value: -7 }]
    }

    async fn pending(&self) -> Option<PendingTxns> {
        Some(self.pending.lock().unwrap().clone())
    }

    async fn orders(&self) -> Vec<(MembershipOrder, Duration)> {
        let order = |state| MembershipOrder {
            partition: PartitionId(2),
            voters: vec![NodeId(1), NodeId(2), NodeId(4)],
            learners: vec![NodeId(3)],
            given: Time::ZERO,
            state,
        };
        let states = [
            OrderState::NotLeader(Some(NodeId(3))),
            OrderState::Finished,
            OrderState::Pending("n4 must catch up first".into()),
        ];
        states.map(|state| (order(state), Duration::from_millis(250))).into()
    }
}

pub(super) const TOKEN: &str = "a-token-of-the-writer";
pub(super) const OTHER: &str = "a-token-of-another-one";
const ROOT: &str = "a-token-of-an-operator";
const READER: &str = "a-token-of-a-reader";

pub(super) struct Running {
    pub(super) script: Arc<Script>,
    pub(super) address: SocketAddr,
    channel: Channel,
    pub(super) serving: Option<tokio::task::JoinHandle<()>>,
}

pub(super) async fn start(limits: Limits) -> Running {
    start_with(limits, None).await
}

async fn start_with(limits: Limits, audit: Option<AuditLog>) -> Running {
    start_until(limits, audit, CancellationToken::new()).await
}

pub(super) async fn start_until(
    limits: Limits,
    audit: Option<AuditLog>,
    stop: CancellationToken,
) -> Running {
    let script = Script::new(Outcome::Committed(Timestamp(42)));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let writer = |name| Principal::new(name, Role::Write);
    let access = Access::only([
        (Credential::token(TOKEN).unwrap(), writer("writer")),
        (
            Credential::token(OTHER).unwrap(),
            Principal { high_priority_per_second: Some(0), ..writer("other") },
        ),
        (Credential::token(ROOT).unwrap(), Principal::new("root", Role::Admin)),
        (Credential::token(READER).unwrap(), Principal::new("reader", Role::Read)),
    ]);
    let config = ServiceConfig { access: access.unwrap(), tls: None, limits, audit };
    let stopped = stop.cancelled_owned();
    let listeners = Listeners { clients: listener, redis: None };
    let serving = serve(script.clone(), Arc::new(map()), listeners, config, Box::pin(stopped));
    let serving = Some(tokio::spawn(async move { serving.await.unwrap() }));
    let channel = Endpoint::from_shared(format!("http://{address}")).unwrap().connect_lazy();
    Running { script, address, channel, serving }
}

impl Running {
    async fn call_as<Q, A>(
        &self,
        token: &str,
        method: &'static str,
        message: Q,
    ) -> Result<A, Status>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let mut grpc = Grpc::new(self.channel.clone());
        grpc.ready().await.unwrap();
        let mut request = Request::new(message);
        request.metadata_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
        let path = tonic::codegen::http::uri::PathAndQuery::from_static(method);
        grpc.unary(request, path, ProstCodec::<Q, A>::default()).await.map(Response::into_inner)
    }

    pub(super) async fn begin(&self, counter: u64) -> Result<api::BeginResponse, Status> {
        self.call_as(TOKEN, BEGIN, begin(counter)).await
    }

    /// Adds one to a key.
    pub(super) async fn add_to(&self, token: &str, key: &[u8]) {
        let ops = vec![api::Op { key: key.to_vec(), op: Some(api::op::Op::Add(1)) }];
        let add = api::ExecuteRequest { ops, ..add() };
        let _: api::ExecuteResponse = self.call_as(token, EXECUTE, add).await.unwrap();
    }

    pub(super) async fn commit(&self, counter: u64) -> Result<api::CommitResponse, Status> {
        let writes = vec![api::KeyWrite { key: b"k".to_vec(), value: None }];
        let commit = api::CommitRequest { txn: Some(name(counter)), writes };
        self.call_as(TOKEN, COMMIT, commit).await
    }
}

const BEGIN: &str = "/orthodrome.v1.Orthodrome/Begin";
const ROUND: &str = "/orthodrome.v1.Orthodrome/ReadRound";
const COMMIT: &str = "/orthodrome.v1.Orthodrome/Commit";
const EXECUTE: &str = "/orthodrome.v1.Orthodrome/Execute";
const RESOLVE: &str = "/orthodrome.v1.Orthodrome/Resolve";
const STATUS: &str = "/orthodrome.v1.Orthodrome/Status";

fn name(counter: u64) -> api::TxnId {
    api::TxnId { client: 7, counter, attempt: 0 }
}

fn begin(counter: u64) -> api::BeginRequest {
    api::BeginRequest {
        txn: Some(name(counter)),
        read_keys: vec![b"k".to_vec()],
        write_keys: vec![b"k".to_vec()],
        ..Default::default()
    }
}

fn add() -> api::ExecuteRequest {
    let ops = vec![api::Op { key: b"k".to_vec(), op: Some(api::op::Op::Add(1)) }];
    api::ExecuteRequest { txn: Some(name(1)), ops, ..Default::default() }
}

fn refused(status: &Status) -> bool {
    status.metadata().get(EFFECT).is_some_and(|effect| effect == "none")
}

#[tokio::test]
async fn an_outcome_has_three_cases_and_none_is_an_error() {
    use api::outcome::Result as Case;
    let running = start(Limits::default()).await;
    let aborted = api::Aborted { reason: api::AbortReason::Guard.into(), retryable: false };
    let cases = [
        (Ok(Outcome::Committed(Timestamp(9))), Case::Committed(api::Committed { timestamp: 9 })),
        (Ok(Outcome::Aborted(AbortReason::Guard)), Case::Aborted(aborted)),
        (Ok(Outcome::Unknown), Case::Unknown(api::Unknown::default())),
        // The node died under the call: anything may have happened.
        (Err(GatewayError::Lost(TxnId::default())), Case::Unknown(api::Unknown::default())),
    ];
    for (counter, (told, expected)) in (1..).zip(cases) {
        *running.script.outcome.lock().unwrap() = told;
        let expected = Some(api::Outcome { result: Some(expected) });
        running.begin(counter).await.unwrap();
        assert_eq!(running.commit(counter).await.unwrap().outcome, expected);
        let executed: api::ExecuteResponse = running.call_as(TOKEN, EXECUTE, add()).await.unwrap();
        assert_eq!(executed.outcome, expected);
        let begun = Some(api::resolve_request::Begun::Procedure(add()));
        let resolve = api::ResolveRequest { begun, ..Default::default() };
        let resolved: api::ResolveResponse =
            running.call_as(TOKEN, RESOLVE, resolve).await.unwrap();
        assert_eq!(resolved.outcome, expected);
    }
}

#[tokio::test]
async fn a_gateway_that_refuses_says_so_in_the_trailer() {
    let running = start(Limits::default()).await;
    for (error, code) in [
        (GatewayError::Overloaded { limit: 1 }, Code::ResourceExhausted),
        (GatewayError::OverloadedBytes { bytes: 9, limit: 1 }, Code::ResourceExhausted),
        (GatewayError::Stopping, Code::Unavailable),
        (GatewayError::AlreadyBegun(TxnId::default()), Code::AlreadyExists),
        (GatewayError::Used(TxnId::default()), Code::AlreadyExists),
        (GatewayError::Unregistered(ClientId(9)), Code::FailedPrecondition),
    ] {
        *running.script.outcome.lock().unwrap() = Err(error);
        let status = running.call_as::<_, api::ExecuteResponse>(TOKEN, EXECUTE, add()).await;
        let status = status.unwrap_err();
        assert_eq!(status.code(), code);
        assert!(refused(&status), "{status}");
    }
}

/// A protocol has no room for a transaction: for one call that is a refusal, which a client repeats.
#[tokio::test]
async fn what_a_protocol_has_no_room_for_is_refused() {
    let running = start(Limits::default()).await;
    *running.script.outcome.lock().unwrap() = Ok(Outcome::Aborted(AbortReason::Overload));
    let status = running.call_as::<_, api::ExecuteResponse>(TOKEN, EXECUTE, add()).await;
    let status = status.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert!(refused(&status) && status.message().starts_with("busy: the protocol"), "{status}");
    // The transaction of a commit has ended, and its client hears how.
    running.begin(1).await.unwrap();
    let outcome = running.commit(1).await.unwrap().outcome.unwrap().result.unwrap();
    let api::outcome::Result::Aborted(aborted) = outcome else { panic!("{outcome:?}") };
    assert_eq!(aborted.reason(), api::AbortReason::Overload);
}

#[tokio::test]
async fn a_session_that_is_ahead_of_all_clocks_is_refused_by_its_name() {
    let running = start(Limits::default()).await;
    *running.script.outcome.lock().unwrap() = Ok(Outcome::Aborted(AbortReason::Overload));
    *running.script.path.lock().unwrap() = FAR_FUTURE;
    let status = running.call_as::<_, api::ExecuteResponse>(TOKEN, EXECUTE, add()).await;
    let status = status.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(refused(&status) && status.message().starts_with("session: a timestamp"), "{status}");
}

#[tokio::test]
async fn high_priority_beyond_the_quota_is_low() {
    let running = start(Limits::default()).await;
    let urgent = |counter| api::ExecuteRequest {
        txn: Some(name(counter)),
        priority: api::Priority::High.into(),
        ..add()
    };
    for (token, expected) in [(OTHER, [Priority::LOW; 3]), (TOKEN, [Priority::HIGH; 3])] {
        for counter in 1..=3 {
            let _: api::ExecuteResponse =
                running.call_as(token, EXECUTE, urgent(counter)).await.unwrap();
        }
        let seen = std::mem::take(&mut *running.script.priorities.lock().unwrap());
        assert_eq!(seen, expected, "{token}");
    }
    let status: api::StatusResponse =
        running.call_as(TOKEN, STATUS, api::StatusRequest::default()).await.unwrap();
    assert_eq!(status.demoted, 3);
    assert_eq!(status.gauges, [api::Gauge { name: "depth_m".into(), node: 3, value: -7 }]);
    assert_eq!(status.version, env!("CARGO_PKG_VERSION"));
    let link = |node, connected, rtt_us| api::Link { node, connected, since_ms: 1_500, rtt_us };
    assert_eq!(status.links, [link(2, true, 250_000), link(3, false, 0)]);
}

/// The gateway remembers what it told a client, and believes what the client says of other gateways.
#[tokio::test]
async fn a_transaction_begins_with_what_its_client_knows() {
    let running = start(Limits::default()).await;
    let floors = || running.script.floors.lock().unwrap().pop().unwrap();
    let known = |timestamp, is_deletion| {
        Floors::from([("k".into(), Floor { timestamp: Timestamp(timestamp), is_deletion })])
    };
    running.begin(1).await.unwrap();
    assert_eq!(floors(), Floors::new());
    // It commits at 42, and deletes the key.
    running.commit(1).await.unwrap();
    running.begin(2).await.unwrap();
    assert_eq!(floors(), known(42, true));
    running.commit(2).await.unwrap();
    let session = |key: &str, timestamp| api::KnownKey {
        key: key.as_bytes().to_vec(),
        timestamp,
        deleted: false,
    };
    for (timestamp, expected) in [(41, known(42, true)), (43, known(43, false))] {
        let session = vec![session("k", timestamp), session("not touched", 50)];
        let begin = api::BeginRequest { session, ..begin(timestamp) };
        running.call_as::<_, api::BeginResponse>(TOKEN, BEGIN, begin).await.unwrap();
        assert_eq!(floors(), expected);
    }
    let twice = vec![session("k", 1), session("k", 1)];
    let twice = api::BeginRequest { session: twice, ..begin(9) };
    let status = running.call_as::<_, api::BeginResponse>(TOKEN, BEGIN, twice).await.unwrap_err();
    assert!(status.message().starts_with("session[1]"), "{status}");
}

#[tokio::test]
async fn orders_to_change_members_are_shown_with_what_became_of_them() {
    let running = start(Limits::default()).await;
    let status: api::StatusResponse =
        running.call_as(TOKEN, STATUS, api::StatusRequest::default()).await.unwrap();
    let shown: Vec<_> = status.orders.iter().map(|o| (o.state(), o.detail.as_str())).collect();
    use api::membership_order::State;
    let expected = [
        (State::Failed, "this node does not lead the partition; give the order to n3"),
        (State::Finished, ""),
        (State::Pending, "n4 must catch up first"),
    ];
    assert_eq!(shown, expected);
    let order = &status.orders[0];
    assert_eq!((order.partition, order.age_ms), (2, 250));
    assert_eq!((&order.voters, &order.learners), (&vec![1, 2, 4], &vec![3]));
}

#[tokio::test]
async fn a_commit_needs_an_open_transaction_of_its_own_and_declared_keys() {
    let running = start(Limits::default()).await;
    assert_eq!(running.commit(1).await.unwrap_err().code(), Code::NotFound);
    running.begin(1).await.unwrap();
    let stray = vec![api::KeyWrite { key: b"other".to_vec(), value: None }];
    let stray = api::CommitRequest { txn: Some(name(1)), writes: stray };
    let stray = running.call_as::<_, api::CommitResponse>(TOKEN, COMMIT, stray).await.unwrap_err();
    assert_eq!(stray.code(), Code::InvalidArgument);
    let theirs = api::CommitRequest { txn: Some(name(1)), writes: Vec::new() };
    let theirs = running.call_as::<_, api::CommitResponse>(OTHER, COMMIT, theirs).await;
    assert_eq!(theirs.unwrap_err().code(), Code::NotFound, "somebody else decided it");
    running.commit(1).await.unwrap();
    assert_eq!(running.commit(1).await.unwrap_err().code(), Code::NotFound, "twice");
    let decided = running.script.decided.lock().unwrap().len();
    assert_eq!(decided, 1);
}

#[tokio::test]
async fn nobody_resolves_what_another_principal_has_open() {
    let running = start(Limits::default()).await;
    running.begin(1).await.unwrap();
    let resolve = || {
        let begun = Some(api::resolve_request::Begun::Interactive(begin(1)));
        let writes = api::Writes { writes: Vec::new() };
        let decision = Some(api::resolve_request::Decision::Commit(writes));
        let version = Some(api::Version { timestamp: 1, writer: Some(name(1)) });
        let reads = vec![api::KeyVersion { key: b"k".to_vec(), version }];
        api::ResolveRequest { begun, decision, reads }
    };
    let theirs = running.call_as::<_, api::ResolveResponse>(OTHER, RESOLVE, resolve()).await;
    let theirs = theirs.unwrap_err();
    assert_eq!(theirs.code(), Code::PermissionDenied);
    assert!(refused(&theirs), "{theirs}");
    running.commit(1).await.unwrap();
    let _: api::ResolveResponse = running.call_as(TOKEN, RESOLVE, resolve()).await.unwrap();
}

#[tokio::test]
async fn who_wanted_to_commit_is_not_told_that_it_gave_up() {
    use api::resolve_request::Decision;
    let running = start(Limits::default()).await;
    *running.script.outcome.lock().unwrap() = Ok(Outcome::Aborted(AbortReason::Client));
    let commit = Decision::Commit(api::Writes { writes: Vec::new() });
    let gave_up = Decision::Abort(api::GiveUp {});
    for (decision, reason, retryable) in [
        (Some(commit), api::AbortReason::Abandoned, true),
        (None, api::AbortReason::Abandoned, true),
        (Some(gave_up), api::AbortReason::Client, false),
    ] {
        let begun = Some(api::resolve_request::Begun::Interactive(begin(1)));
        let version = Some(api::Version { timestamp: 1, writer: Some(name(1)) });
        let reads = vec![api::KeyVersion { key: b"k".to_vec(), version }];
        let request = api::ResolveRequest { begun, decision, reads };
        let answer: api::ResolveResponse = running.call_as(TOKEN, RESOLVE, request).await.unwrap();
        let aborted = api::Aborted { reason: reason.into(), retryable };
        let expected = api::outcome::Result::Aborted(aborted);
        assert_eq!(answer.outcome.and_then(|outcome| outcome.result), Some(expected));
    }
}

fn general(counter: u64) -> api::BeginRequest {
    api::BeginRequest { txn: Some(name(counter)), general: true, ..Default::default() }
}

fn round(counter: u64, keys: &[&str]) -> api::ReadRoundRequest {
    let keys = keys.iter().map(|key| key.as_bytes().to_vec()).collect();
    api::ReadRoundRequest { txn: Some(name(counter)), keys }
}

#[tokio::test]
async fn a_general_transaction_reads_on_within_its_bounds_and_writes_what_it_likes() {
    use api::read_round_response::Result as Answer;
    let limits = Limits { keys_max: 3, ..Limits::default() };
    let running = start(limits).await;
    let read = |token, request| running.call_as::<_, api::ReadRoundResponse>(token, ROUND, request);
    let begun: api::BeginResponse = running.call_as(TOKEN, BEGIN, general(1)).await.unwrap();
    let Some(api::begin_response::Result::Opened(opened)) = begun.result else { panic!("closed") };
    assert_eq!(opened.reads, []);
    for keys in [&["a"][..], &["b", "a"]] {
        let Some(Answer::Opened(opened)) = read(TOKEN, round(1, keys)).await.unwrap().result else {
            panic!("closed")
        };
        assert_eq!(opened.reads.len(), keys.len());
    }
    // Keys count over all rounds, and none of these refusals ends the transaction.
    for (token, request, code) in [
        (TOKEN, round(1, &["c", "d"]), Code::InvalidArgument),
        (TOKEN, round(1, &[]), Code::InvalidArgument),
        (TOKEN, round(1, &["c", "c"]), Code::InvalidArgument),
        (OTHER, round(1, &["c"]), Code::NotFound),
        (TOKEN, round(2, &["c"]), Code::NotFound),
    ] {
        let status = read(token, request).await.unwrap_err();
        assert_eq!(status.code(), code, "{status}");
        assert!(refused(&status));
    }
    let write = |key: &str| api::KeyWrite { key: key.as_bytes().to_vec(), value: None };
    let commit = |writes| {
        let commit = api::CommitRequest { txn: Some(name(1)), writes };
        running.call_as::<_, api::CommitResponse>(TOKEN, COMMIT, commit)
    };
    let too_many = commit(vec![write("c"), write("d")]).await.unwrap_err();
    assert_eq!(too_many.code(), Code::InvalidArgument);
    commit(vec![write("c")]).await.unwrap();
    assert_eq!(read(TOKEN, round(1, &["a"])).await.unwrap_err().code(), Code::NotFound);
    // One that declared its keys does not read on.
    running.begin(3).await.unwrap();
    let declared = read(TOKEN, round(3, &["a"])).await.unwrap_err();
    assert_eq!(declared.code(), Code::FailedPrecondition);
    running.commit(3).await.unwrap();
}

#[tokio::test]
async fn a_round_under_way_lets_nothing_else_in_and_holds_off_the_lease() {
    let limits = Limits { lease: Duration::from_secs(1), ..Limits::default() };
    let running = Arc::new(start(limits).await);
    running.call_as::<_, api::BeginResponse>(TOKEN, BEGIN, general(1)).await.unwrap();
    // The signal of the begin is still there.
    running.script.arrived.notified().await;
    let gate = Arc::new(Notify::new());
    *running.script.gate.lock().unwrap() = Some(Arc::clone(&gate));
    let reader = {
        let running = Arc::clone(&running);
        tokio::spawn(async move {
            running.call_as::<_, api::ReadRoundResponse>(TOKEN, ROUND, round(1, &["a"])).await
        })
    };
    running.script.arrived.notified().await;
    assert_eq!(running.commit(1).await.unwrap_err().code(), Code::FailedPrecondition);
    // Far longer than the lease, and the transaction is still there.
    tokio::time::sleep(Duration::from_secs(3)).await;
    gate.notify_one();
    assert!(reader.await.unwrap().is_ok());
    assert_eq!(running.script.decided.lock().unwrap().len(), 0);
    running.commit(1).await.unwrap();
}

#[tokio::test]
async fn a_general_transaction_that_reads_too_much_is_aborted() {
    let limits = Limits {
        value_bytes_max: 1_000,
        key_bytes_max: 100,
        response_bytes_max: 2_200,
        ..Limits::default()
    };
    let running = start(limits).await;
    *running.script.value.lock().unwrap() = vec![b'x'; 1_000];
    running.call_as::<_, api::BeginResponse>(TOKEN, BEGIN, general(1)).await.unwrap();
    let read = |key| running.call_as::<_, api::ReadRoundResponse>(TOKEN, ROUND, round(1, &[key]));
    read("a").await.unwrap();
    read("b").await.unwrap();
    let status = read("c").await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(refused(&status) && status.message().contains("3003 bytes"), "{status}");
    let decided = running.script.decided.lock().unwrap().clone();
    assert!(matches!(decided[..], [(_, Decision::Abort)]), "{decided:?}");
    assert_eq!(running.commit(1).await.unwrap_err().code(), Code::NotFound);
}

#[tokio::test]
async fn a_lease_that_runs_out_aborts_and_one_that_is_extended_does_not() {
    // Longer than any pause of a busy machine between two extensions.
    let limits = Limits { lease: Duration::from_secs(3), txns_open_max: 2, ..Limits::default() };
    let running = start(limits).await;
    running.begin(1).await.unwrap();
    running.begin(2).await.unwrap();
    assert_eq!(running.begin(3).await.unwrap_err().code(), Code::ResourceExhausted);
    let kept = TxnId::new(ClientId(7), 2);
    let lost = TxnId::new(ClientId(7), 1);
    // Extends the second until the first is aborted.
    while running.script.decided.lock().unwrap().is_empty() {
        let keep = api::KeepAliveRequest { txns: vec![name(2)] };
        let path = "/orthodrome.v1.Orthodrome/KeepAlive";
        let answer: api::KeepAliveResponse = running.call_as(TOKEN, path, keep).await.unwrap();
        assert_eq!(answer.not_open, []);
    }
    assert_eq!(*running.script.decided.lock().unwrap(), [(lost, Decision::Abort)]);
    running.commit(2).await.unwrap();
    let decided = running.script.decided.lock().unwrap().last().cloned();
    assert!(matches!(decided, Some((id, Decision::Commit(_))) if id == kept));
    let status: api::StatusResponse =
        running.call_as(TOKEN, STATUS, api::StatusRequest {}).await.unwrap();
    assert_eq!((status.leases_expired, status.txns_open), (1, 0));
}

#[tokio::test]
async fn a_node_that_stops_does_not_wait_for_idle_clients_that_extend_their_leases() {
    let running = start(Limits { lease: Duration::from_secs(600), ..Limits::default() }).await;
    running.begin(1).await.unwrap();
    running.script.is_stopping.store(true, Ordering::Relaxed);
    let path = "/orthodrome.v1.Orthodrome/KeepAlive";
    loop {
        let keep = api::KeepAliveRequest { txns: vec![name(1)] };
        let answer: api::KeepAliveResponse = running.call_as(TOKEN, path, keep).await.unwrap();
        if !answer.not_open.is_empty() {
            break;
        }
    }
    let status = running.commit(1).await.unwrap_err();
    assert!(status.message().contains("the node is stopping"), "{status}");
    while running.script.decided.lock().unwrap().is_empty() {
        tokio::task::yield_now().await;
    }
    let id = TxnId::new(ClientId(7), 1);
    assert_eq!(*running.script.decided.lock().unwrap(), [(id, Decision::Abort)]);
}

#[tokio::test]
async fn requests_over_the_bound_are_refused_and_their_room_is_given_back() {
    let running = start(Limits { requests_max: 1, ..Limits::default() }).await;
    let gate = Arc::new(Notify::new());
    *running.script.gate.lock().unwrap() = Some(Arc::clone(&gate));
    let first = running.begin(1);
    let second = async {
        running.script.arrived.notified().await;
        let status = running.begin(2).await.unwrap_err();
        gate.notify_one();
        status
    };
    let (first, second) = tokio::join!(first, second);
    first.unwrap();
    assert_eq!(second.code(), Code::ResourceExhausted);
    assert!(refused(&second), "{second}");
    *running.script.gate.lock().unwrap() = None;
    running.begin(3).await.unwrap();
}

#[tokio::test]
async fn bytes_over_the_bound_are_refused_while_an_open_transaction_holds_them() {
    let small = Limits {
        value_bytes_max: 1_000,
        key_bytes_max: 1_000,
        request_bytes_max: 4_000,
        request_bytes_in_flight_max: 4_000,
        ..Limits::default()
    };
    let running = start(small).await;
    let large = |counter| {
        let key = |at: u8| [vec![at; 800], vec![0]].concat();
        api::BeginRequest { write_keys: (1..4).map(key).collect(), ..begin(counter) }
    };
    let first: api::BeginResponse = running.call_as(TOKEN, BEGIN, large(1)).await.unwrap();
    assert!(first.result.is_some());
    let second = running.call_as::<_, api::BeginResponse>(TOKEN, BEGIN, large(2)).await;
    let second = second.unwrap_err();
    assert_eq!(second.code(), Code::ResourceExhausted, "{second}");
    assert!(refused(&second), "{second}");
    let abort = api::AbortRequest { txn: Some(name(1)) };
    let path = "/orthodrome.v1.Orthodrome/Abort";
    let _: api::AbortResponse = running.call_as(TOKEN, path, abort).await.unwrap();
    let _: api::BeginResponse = running.call_as(TOKEN, BEGIN, large(2)).await.unwrap();
}

#[tokio::test]
async fn a_message_over_the_bound_and_a_token_of_a_mebibyte_cost_nothing() {
    let running = start(Limits::default()).await;
    let value = Some(vec![0; 5 << 20]);
    let writes = vec![api::KeyWrite { key: b"k".to_vec(), value }];
    let commit = api::CommitRequest { txn: Some(name(1)), writes };
    let status =
        running.call_as::<_, api::CommitResponse>(TOKEN, COMMIT, commit).await.unwrap_err();
    assert_eq!(status.code(), Code::OutOfRange);
    // Nothing was done, and the answer says so.
    assert!(refused(&status), "{status:?}");
    let unknown = "/orthodrome.v1.Orthodrome/Jump";
    let status = running.call_as::<_, api::CommitResponse>(TOKEN, unknown, begin(1)).await;
    let status = status.unwrap_err();
    assert_eq!(status.code(), Code::Unimplemented);
    assert!(refused(&status), "{status:?}");
    let token = "x".repeat(1 << 20);
    assert!(running.call_as::<_, api::BeginResponse>(&token, BEGIN, begin(1)).await.is_err());
    for wrong in ["", "wrong", "a-token-of-the-writes"] {
        let status = running.call_as::<_, api::BeginResponse>(wrong, BEGIN, begin(1)).await;
        assert_eq!(status.unwrap_err().code(), Code::Unauthenticated);
    }
    running.begin(1).await.unwrap();
}

#[tokio::test]
async fn reads_too_large_for_an_answer_abort_the_transaction() {
    let limits = Limits { value_bytes_max: 1_000, response_bytes_max: 8_000, ..Limits::default() };
    let running = start(limits).await;
    *running.script.value.lock().unwrap() = vec![0; 9_000];
    let status = running.begin(1).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().starts_with("read_keys"), "{status}");
    let decided = running.script.decided.lock().unwrap().clone();
    assert_eq!(decided, [(TxnId::new(ClientId(7), 1), Decision::Abort)]);
    let executed: api::ExecuteResponse = running.call_as(TOKEN, EXECUTE, add()).await.unwrap();
    assert!(executed.reads_omitted && executed.reads.is_empty());
    assert!(executed.outcome.is_some(), "the outcome is told all the same");
}

#[tokio::test]
async fn an_administrators_order_needs_the_role() {
    let running = start(Limits::default()).await;
    let order = api::TransferLeaderRequest { partition: 0, to: 2 };
    let path = "/orthodrome.v1.Admin/TransferLeader";
    let denied = running.call_as::<_, api::TransferLeaderResponse>(TOKEN, path, order).await;
    assert_eq!(denied.unwrap_err().code(), Code::PermissionDenied);
    assert_eq!(*running.script.orders.lock().unwrap(), []);
}

#[tokio::test]
async fn calls_for_leases_need_a_role_and_the_id_of_a_lease() {
    const GRANT: &str = "/orthodrome.v1.Orthodrome/GrantLease";
    const RENEW: &str = "/orthodrome.v1.Orthodrome/RenewLease";
    const REVOKE: &str = "/orthodrome.v1.Orthodrome/RevokeLease";
    const DESCRIBE: &str = "/orthodrome.v1.Orthodrome/DescribeLease";
    let running = start(Limits::default()).await;
    let (running, keyspace) = (&running, String::new());
    let call = async |token: &str, path: &'static str, lease: &str| -> Status {
        let (lease, keyspace) = (lease.to_owned(), keyspace.clone());
        let failed = match path {
            GRANT => {
                let grant = api::GrantLeaseRequest { ttl_ms: 1_000, keyspace };
                running.call_as::<_, api::GrantLeaseResponse>(token, path, grant).await.err()
            }
            RENEW => {
                let renew = api::RenewLeaseRequest { lease, keyspace };
                running.call_as::<_, api::RenewLeaseResponse>(token, path, renew).await.err()
            }
            REVOKE => {
                let revoke = api::RevokeLeaseRequest { lease, keyspace };
                running.call_as::<_, api::RevokeLeaseResponse>(token, path, revoke).await.err()
            }
            _ => {
                let describe = api::DescribeLeaseRequest { lease, keyspace };
                running.call_as::<_, api::DescribeLeaseResponse>(token, path, describe).await.err()
            }
        };
        failed.unwrap()
    };
    let id = "1000-0000000000000007";
    for path in [GRANT, RENEW, REVOKE, DESCRIBE] {
        let expected = if path == DESCRIBE { Code::Unimplemented } else { Code::PermissionDenied };
        assert_eq!(call(READER, path, id).await.code(), expected, "{path}");
        // The script has no leases.
        let reached = call(TOKEN, path, id).await;
        assert_eq!(reached.code(), Code::Unimplemented, "{path}: {reached}");
    }
    for path in [RENEW, REVOKE, DESCRIBE] {
        let status = call(TOKEN, path, "1000-7").await;
        assert_eq!(status.code(), Code::InvalidArgument, "{path}: {status}");
        assert!(status.message().starts_with("lease: \"1000-7\" is not the id"), "{status}");
    }
}

#[tokio::test]
async fn keys_of_leases_are_attached_and_deleted_and_not_written_otherwise() {
    let running = start(Limits::default()).await;
    let record = "orthodrome/lease/{1000-0000000000000007}";
    let due = "orthodrome/due/00000000000000000001/{1000-0000000000000007}";
    let put = || Some(api::op::Op::Put(b"v".to_vec()));
    let add = || Some(api::op::Op::Add(1));
    let delete = || Some(api::op::Op::Delete(api::Delete {}));
    let cases = [
        (record.to_owned(), put(), false),
        (due.to_owned(), add(), false),
        (format!("{record}/until"), put(), false),
        (format!("{record}/key/{record}"), put(), false),
        (record.to_owned(), delete(), true),
        (format!("{record}/key/k"), put(), true),
    ];
    for (counter, (key, op, is_allowed)) in (1..).zip(cases) {
        let ops = vec![api::Op { key: key.clone().into_bytes(), op }];
        let execute = api::ExecuteRequest { txn: Some(name(counter)), ops, ..Default::default() };
        let answer = running.call_as::<_, api::ExecuteResponse>(TOKEN, EXECUTE, execute).await;
        match answer {
            Ok(_) => assert!(is_allowed, "{key}"),
            Err(status) => {
                assert!(!is_allowed && refused(&status), "{key}: {status}");
                assert_eq!(status.code(), Code::InvalidArgument, "{key}: {status}");
                assert!(status.message().contains("belongs to a lease"), "{status}");
            }
        }
    }
    // Writes of an interactive transaction.
    let value = Some(b"v".to_vec());
    let writes = vec![api::KeyWrite { key: due.as_bytes().to_vec(), value }];
    let commit = api::CommitRequest { txn: Some(name(1)), writes };
    let status =
        running.call_as::<_, api::CommitResponse>(TOKEN, COMMIT, commit).await.unwrap_err();
    assert!(status.message().starts_with("writes[0]: the key belongs to a lease"), "{status}");
}

#[tokio::test]
async fn a_refused_order_says_why_and_who_leads() {
    let running = start(Limits::default()).await;
    let refusals = [
        (Refusal::NotLeader(Some(NodeId(3))), Code::FailedPrecondition, Some("3"), "order to n3"),
        (Refusal::NotLeader(None), Code::FailedPrecondition, Some("unknown"), "does not know who"),
        (Refusal::NotNow("later".into()), Code::FailedPrecondition, None, "later"),
        (Refusal::Invalid("n4 does not vote".into()), Code::InvalidArgument, None, "n4 does not"),
        (Refusal::Never("nobody leads".into()), Code::Unimplemented, None, "script: n1: nobody"),
    ];
    for (refusal, code, leader, text) in refusals {
        *running.script.refusal.lock().unwrap() = Some(refusal);
        let order = api::ChangeMembersRequest { partition: 0, voters: vec![2], learners: vec![] };
        let path = "/orthodrome.v1.Admin/ChangeMembers";
        let answer = running.call_as::<_, api::ChangeMembersResponse>(ROOT, path, order).await;
        let status = answer.unwrap_err();
        assert_eq!(status.code(), code, "{status}");
        let trailer = |name| status.metadata().get(name).map(|value| value.to_str().unwrap());
        assert_eq!(trailer(LEADER), leader, "{status}");
        assert_eq!(trailer(EFFECT), Some("none"), "{status}");
        assert!(status.message().contains(text), "{status}");
    }
    *running.script.refusal.lock().unwrap() = None;
    let order = api::TransferLeaderRequest { partition: 0, to: 2 };
    let path = "/orthodrome.v1.Admin/TransferLeader";
    let taken: api::TransferLeaderResponse = running.call_as(ROOT, path, order).await.unwrap();
    assert_eq!(taken.node, 1, "who took it is told");
}

#[tokio::test]
async fn an_order_is_in_the_audit_log_with_its_sender_and_what_came_of_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("audit.jsonl");
    let log = AuditLog::open(&path, NodeId(1)).unwrap();
    let running = start_with(Limits::default(), Some(log)).await;
    let transfer = "/orthodrome.v1.Admin/TransferLeader";
    let give = async |token: &str, partition| {
        let order = api::TransferLeaderRequest { partition, to: 2 };
        running.call_as::<_, api::TransferLeaderResponse>(token, transfer, order).await
    };
    give(ROOT, 0).await.unwrap();
    *running.script.refusal.lock().unwrap() = Some(Refusal::NotNow("later".into()));
    give(ROOT, 0).await.unwrap_err();
    give(TOKEN, 0).await.unwrap_err();
    give(ROOT, 77).await.unwrap_err();
    let text = std::fs::read_to_string(&path).unwrap();
    let lines: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let seen: Vec<_> = lines
        .iter()
        .map(|line| {
            let text = |name: &str| line[name].as_str().unwrap_or_default().to_owned();
            (text("event"), line["number"].as_u64(), text("principal"), text("order"))
        })
        .collect();
    let line = |event: &str, number, principal: &str, order: &str| {
        (event.to_owned(), number, principal.to_owned(), order.to_owned())
    };
    assert_eq!(
        seen,
        [
            line("order", Some(1), "root", "transfer-leader"),
            line("accepted", Some(1), "", ""),
            line("order", Some(2), "root", "transfer-leader"),
            line("rejected", Some(2), "", ""),
            line("denied", None, "writer", "transfer-leader"),
            line("denied", None, "root", "transfer-leader"),
        ]
    );
    assert_eq!((&lines[0]["partition"], &lines[0]["to"]), (&"p0".into(), &"n2".into()));
    assert!(lines[0]["address"].as_str().unwrap().starts_with("127.0.0.1:"), "{text}");
    assert!(lines[3]["why"].as_str().unwrap().contains("later"), "{text}");
    assert!(lines[4]["why"].as_str().unwrap().contains("needs admin"), "{text}");
    assert!(lines[5]["why"].as_str().unwrap().contains("partition"), "{text}");
    assert_eq!(running.script.orders.lock().unwrap().len(), 2, "only two reached the node");
}

#[tokio::test]
async fn an_order_that_cannot_be_written_down_is_not_carried_out() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("logs/audit.jsonl");
    std::fs::create_dir(directory.path().join("logs")).unwrap();
    let log = AuditLog::open(&path, NodeId(1)).unwrap();
    std::fs::remove_dir_all(directory.path().join("logs")).unwrap();
    let running = start_with(Limits::default(), Some(log)).await;
    let order = api::TransferLeaderRequest { partition: 0, to: 2 };
    let path = "/orthodrome.v1.Admin/TransferLeader";
    let answer = running.call_as::<_, api::TransferLeaderResponse>(ROOT, path, order).await;
    let status = answer.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition);
    assert!(refused(&status), "{status:?}");
    assert!(status.message().contains("logs/audit.jsonl"), "{status}");
    assert_eq!(*running.script.orders.lock().unwrap(), []);
}

#[tokio::test]
async fn partitions_are_described_by_their_members_of_now() {
    let running = start(Limits::default()).await;
    let path = "/orthodrome.v1.Orthodrome/Describe";
    let about: api::DescribeResponse =
        running.call_as(TOKEN, path, api::DescribeRequest {}).await.unwrap();
    let [moved, placed, ..] = &about.partitions[..] else { panic!("{about:?}") };
    assert_eq!((&moved.voters, &moved.learners), (&vec![2, 3, 4], &vec![1]));
    assert_eq!((moved.leader, moved.preferred_leader), (Some(3), 1));
    assert_eq!((placed.voters.len(), placed.leader), (0, None), "nothing is known of it");
    assert_eq!(about.node, 1);
}

#[tokio::test]
async fn health_needs_no_credential() {
    let running = start(Limits::default()).await;
    let mut client = tonic_health::pb::health_client::HealthClient::new(running.channel.clone());
    let service = "orthodrome.v1.Orthodrome".into();
    let request = tonic_health::pb::HealthCheckRequest { service };
    let mut watch = client.watch(request).await.unwrap().into_inner();
    let serving = tonic_health::pb::health_check_response::ServingStatus::Serving;
    while watch.message().await.unwrap().unwrap().status() != serving {}
}

#[tokio::test]
async fn garbage_on_the_socket_harms_nobody() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let running = start(Limits::default()).await;
    // TLS where plain is expected, HTTP/1, a preface with a frame of 2^24 - 1 bytes, nothing at all.
    let preface = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".as_slice(), &[0xff; 64]].concat();
    for bytes in [&[0x16, 3, 1, 2, 0, 1, 0][..], b"GET / HTTP/1.1\r\n\r\n", &preface, &[]] {
        let mut socket = tokio::net::TcpStream::connect(running.address).await.unwrap();
        socket.write_all(bytes).await.unwrap();
        socket.shutdown().await.unwrap();
        // The server hangs up by itself; a reset is as good as an end.
        let _ = socket.read_to_end(&mut Vec::new()).await;
    }
    running.begin(1).await.unwrap();
}

#[tokio::test]
async fn a_connection_over_the_bound_is_closed_and_its_place_is_given_back() {
    use tokio::io::AsyncReadExt;
    let running = start(Limits { connections_max: 1, ..Limits::default() }).await;
    let idle = tokio::net::TcpStream::connect(running.address).await.unwrap();
    let mut more = tokio::net::TcpStream::connect(running.address).await.unwrap();
    let end = more.read(&mut [0]).await;
    assert!(end.is_err() || end.is_ok_and(|bytes| bytes == 0), "it was let in");
    drop(idle);
    // The place is free once the server has noticed.
    while running.begin(1).await.is_err() {}
}

#[tokio::test]
async fn open_access_and_plain_text_stay_on_loopback() {
    let access = |open: bool| {
        if open {
            return Access::open();
        }
        let principal = Principal::new("writer", Role::Write);
        Access::only([(Credential::token(TOKEN).unwrap(), principal)]).unwrap()
    };
    for (open, expected) in [(true, "access is open"), (false, "no TLS")] {
        let listener = TcpListener::bind("0.0.0.0:0").await.unwrap();
        let (access, limits) = (access(open), Limits::default());
        let config = ServiceConfig { access, tls: None, limits, audit: None };
        let script = Script::new(Outcome::Unknown);
        let listeners = Listeners { clients: listener, redis: None };
        let stopped = Box::pin(std::future::ready(()));
        let served = serve(script, Arc::new(map()), listeners, config, stopped);
        let message = served.await.unwrap_err().to_string();
        assert!(message.contains(expected), "{message:?} does not contain {expected:?}");
    }
}

/// A page as a scraper or a probe fetches it: over HTTP/1.1.
async fn page(running: &Running, path: &str, token: Option<&str>) -> String {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let mut stream = tokio::net::TcpStream::connect(running.address).await.unwrap();
    let token = token.map_or(String::new(), |token| format!("Authorization: Bearer {token}\r\n"));
    let request = format!("GET {path} HTTP/1.1\r\nHost: n1\r\n{token}Connection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

#[tokio::test]
async fn metrics_count_what_clients_received() {
    let running = start(Limits::default()).await;
    running.begin(1).await.unwrap();
    running.commit(1).await.unwrap();
    *running.script.outcome.lock().unwrap() = Ok(Outcome::Aborted(AbortReason::Guard));
    let _: api::ExecuteResponse = running.call_as(TOKEN, EXECUTE, add()).await.unwrap();
    let page = page(&running, "/metrics", Some(TOKEN)).await;
    assert!(page.starts_with("HTTP/1.1 200"), "{page}");
    let of_node = r#"protocol="script",region="R1",node="n1""#;
    for line in [
        format!(
            r#"orthodrome_transactions_total{{{of_node},kind="interactive",priority="low",outcome="committed",reason="",path="script"}} 1"#
        ),
        format!(
            r#"orthodrome_transactions_total{{{of_node},kind="procedure",priority="low",outcome="aborted",reason="guard",path="script"}} 1"#
        ),
        format!(
            r#"orthodrome_transaction_seconds_count{{{of_node},kind="interactive",priority="low",outcome="committed"}} 1"#
        ),
        format!(r#"orthodrome_round_seconds_count{{{of_node},phase="commit",priority="low"}} 1"#),
        format!(r#"orthodrome_transactions_open{{{of_node}}} 0"#),
        format!(r#"orthodrome_protocol{{{of_node},name="depth_m",about="n3"}} -7"#),
        format!(r#"orthodrome_partition_leads{{{of_node},partition="p0"}} 0"#),
        format!(r#"orthodrome_peer_connected{{{of_node},peer="n2"}} 1"#),
        format!(r#"orthodrome_peer_connected{{{of_node},peer="n3"}} 0"#),
        format!(r#"orthodrome_peer_round_trip_seconds{{{of_node},peer="n2"}} 0.25"#),
        format!(r#"orthodrome_peer_queue_bytes{{{of_node},peer="n2"}} 64"#),
        format!(r#"orthodrome_peer_sent_bytes_total{{{of_node},peer="n2"}} 700"#),
        format!(r#"orthodrome_peer_received_bytes_total{{{of_node},peer="n2"}} 500"#),
        format!(r#"orthodrome_peer_messages_lost_total{{{of_node},peer="n2"}} 1"#),
        "# EOF".into(),
    ] {
        assert!(page.lines().any(|found| found == line), "{line} is not in\n{page}");
    }
    // There is no round trip to a peer that is not connected.
    assert!(
        !page.contains(r#"round_trip_seconds{protocol="script",region="R1",node="n1",peer="n3""#)
    );
}

#[tokio::test]
async fn metrics_need_a_credential_and_probes_do_not() {
    let running = start(Limits::default()).await;
    for token in [None, Some("a-token-of-nobody-at-all")] {
        let page = page(&running, "/metrics", token).await;
        assert!(page.starts_with("HTTP/1.1 401") && !page.contains("orthodrome_"), "{page}");
    }
    for path in ["/livez", "/readyz"] {
        let page = page(&running, path, None).await;
        assert!(page.starts_with("HTTP/1.1 200") && page.ends_with("ok\n"), "{page}");
    }
    for path in ["/readyz/", "/healthz", "/x"] {
        let page = page(&running, path, None).await;
        assert!(page.starts_with("HTTP/1.1 404") && page.contains("/readyz"), "{page}");
    }
}

#[tokio::test]
async fn metrics_are_refused_while_the_node_is_busy() {
    let running = start(Limits { requests_max: 1, ..Limits::default() }).await;
    *running.script.gate.lock().unwrap() = Some(Arc::default());
    let channel = running.channel.clone();
    let waiting = tokio::spawn(async move {
        let mut grpc = Grpc::new(channel);
        grpc.ready().await.unwrap();
        let mut request = Request::new(begin(1));
        request.metadata_mut().insert("authorization", format!("Bearer {TOKEN}").parse().unwrap());
        let path = tonic::codegen::http::uri::PathAndQuery::from_static(BEGIN);
        let codec = ProstCodec::<api::BeginRequest, api::BeginResponse>::default();
        grpc.unary(request, path, codec).await.map(drop)
    });
    running.script.arrived.notified().await;
    let page = page(&running, "/metrics", Some(TOKEN)).await;
    assert!(page.starts_with("HTTP/1.1 503") && page.contains("limits.requests_max"), "{page}");
    waiting.abort();
}
