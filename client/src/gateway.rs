//! The gateways of a cluster: which one to use, and what their errors mean.

use std::error::Error as StdError;
use std::pin::Pin;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use orthodrome_core::{NodeId, RegionId};
use tokio::time::Instant;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::Channel;
use tonic::{Code, Request, Response, Status, Streaming};

use crate::wire::api;
use crate::wire::api::admin_client::AdminClient;
use crate::wire::api::orthodrome_client::OrthodromeClient;
use crate::{Config, Error};

/// Why a request got no answer, or a refusal.
#[derive(Debug)]
pub(crate) enum Failure {
    /// It had no effect and never will. A retry may succeed after a pause.
    Busy(String),
    /// It had no effect and never will. Another gateway may accept it.
    Unavailable(String),
    /// It had no effect: the transaction is not open at this gateway in the required state.
    NotOpen(String),
    /// It had no effect: this gateway did not register the client, or has started again since.
    Unregistered(String),
    /// It had no effect, and a retry would not help.
    Never(Error),
    /// It may have had any effect.
    Lost(String),
}

impl Failure {
    /// The error of a call that ends with this failure and cannot have had an effect.
    pub(crate) fn into_error(self) -> Error {
        match self {
            Self::Busy(text) => Error::Busy(text),
            Self::Unavailable(text) | Self::Unregistered(text) => Error::Unreachable(text),
            Self::NotOpen(text) | Self::Lost(text) => Error::Deadline(text),
            Self::Never(error) => error,
        }
    }
}

/// The position of a node's gateway in the configuration.
pub(crate) enum Found {
    At(usize),
    /// Some gateways have not said yet which node they belong to.
    NotYet,
    Nowhere,
}

#[derive(Debug)]
struct Gateway {
    endpoint: String,
    channel: Channel,
    /// Known once the gateway has described itself, like `node`.
    region: OnceLock<RegionId>,
    /// The server in the same process.
    node: OnceLock<NodeId>,
}

/// All gateways of a configuration, in its order.
#[derive(Debug)]
pub(crate) struct Gateways {
    list: Vec<Gateway>,
    current: AtomicUsize,
    bearer: Option<MetadataValue<Ascii>>,
    attempt_timeout: Duration,
    answer_bytes_max: AtomicUsize,
    /// The cluster's name, once known: every gateway must agree on it.
    cluster: OnceLock<String>,
}

/// The services of one gateway.
pub(crate) struct Stubs {
    channel: Channel,
    answer_bytes_max: usize,
}

/// A request on its way. It is boxed so that the code of gRPC is compiled once into this crate, and
/// not again into each program that has a client.
pub(crate) type Answer<A> = Pin<Box<dyn Future<Output = Result<Response<A>, Status>> + Send>>;

/// Defines the functions that send one request to a service.
macro_rules! requests {
    ($($service:ident: $($name:ident($request:ident) -> $response:ident),+;)+) => { $($(
        pub(crate) fn $name(self, request: Request<api::$request>) -> Answer<api::$response> {
            Box::pin(async move { self.$service().$name(request).await })
        }
    )+)+ };
}

impl Stubs {
    fn txns(self) -> OrthodromeClient<Channel> {
        OrthodromeClient::new(self.channel)
            .max_decoding_message_size(self.answer_bytes_max)
            .max_encoding_message_size(usize::MAX)
    }

    fn admin(self) -> AdminClient<Channel> {
        AdminClient::new(self.channel)
    }

    /// A watch: its answers come until it ends.
    pub(crate) fn watch(
        self,
        request: Request<api::WatchRequest>,
    ) -> Answer<Streaming<api::WatchResponse>> {
        Box::pin(async move { self.txns().watch(request).await })
    }

    requests! {
        txns:
            abort(AbortRequest) -> AbortResponse,
            begin(BeginRequest) -> BeginResponse,
            commit(CommitRequest) -> CommitResponse,
            describe(DescribeRequest) -> DescribeResponse,
            describe_lease(DescribeLeaseRequest) -> DescribeLeaseResponse,
            execute(ExecuteRequest) -> ExecuteResponse,
            grant_lease(GrantLeaseRequest) -> GrantLeaseResponse,
            keep_alive(KeepAliveRequest) -> KeepAliveResponse,
            read(ReadRequest) -> ReadResponse,
            read_round(ReadRoundRequest) -> ReadRoundResponse,
            register(RegisterRequest) -> RegisterResponse,
            renew_lease(RenewLeaseRequest) -> RenewLeaseResponse,
            resolve(ResolveRequest) -> ResolveResponse,
            revoke_lease(RevokeLeaseRequest) -> RevokeLeaseResponse,
            scan(ScanRequest) -> ScanResponse,
            status(StatusRequest) -> StatusResponse;
        admin:
            change_members(ChangeMembersRequest) -> ChangeMembersResponse,
            transfer_leader(TransferLeaderRequest) -> TransferLeaderResponse;
    }
}

impl Gateways {
    pub(crate) fn new(config: &Config) -> Result<Self, Error> {
        let gateway = |(endpoint, at): (String, tonic::transport::Endpoint)| Gateway {
            endpoint,
            channel: at.connect_lazy(),
            region: OnceLock::new(),
            node: OnceLock::new(),
        };
        Ok(Self {
            list: config.endpoints()?.into_iter().map(gateway).collect(),
            current: AtomicUsize::new(0),
            bearer: config.bearer()?,
            attempt_timeout: config.attempt_timeout,
            answer_bytes_max: AtomicUsize::new(4 << 20),
            cluster: OnceLock::new(),
        })
    }

    pub(crate) fn len(&self) -> usize {
        self.list.len()
    }

    /// The index of the gateway to use now.
    pub(crate) fn current(&self) -> usize {
        self.current.load(Ordering::Relaxed)
    }

    /// The index after `at`.
    pub(crate) fn after(&self, at: usize) -> usize {
        (at + 1) % self.list.len().max(1)
    }

    /// Uses `at` from now on.
    pub(crate) fn prefer(&self, at: usize) {
        self.current.store(at, Ordering::Relaxed);
    }

    /// Stops using `at`, unless another task has already done so.
    pub(crate) fn leave(&self, at: usize) {
        let next = self.after(at);
        // If the exchange fails, another task has changed the gateway.
        let _ = self.current.compare_exchange(at, next, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Sets how large an answer can be.
    pub(crate) fn set_limits(&self, limits: &api::Limits) {
        // Besides keys and values, each entry has a version and a frame around it.
        let most =
            u64::from(limits.response_bytes_max) + 128 * u64::from(limits.keys_max) + (1 << 20);
        self.answer_bytes_max.store(usize::try_from(most).unwrap_or(usize::MAX), Ordering::Relaxed);
    }

    /// The region of gateway `at`. If it is not known yet, asks the gateway.
    pub(crate) async fn region(&self, at: usize, deadline: Instant) -> Result<RegionId, Failure> {
        if let Some(&region) = self.list.get(at).and_then(|gateway| gateway.region.get()) {
            return Ok(region);
        }
        let about = self.send(at, deadline, api::DescribeRequest {}, Stubs::describe).await?;
        self.met(at, &about)
    }

    /// The gateway in the same process as the server `node`. Asks every gateway that has not said
    /// yet which node it belongs to.
    pub(crate) async fn of_node(&self, node: NodeId, deadline: Instant) -> Found {
        let mut found = Found::Nowhere;
        for at in 0..self.list.len() {
            let has_answered = self.region(at, deadline).await.is_ok();
            if self.list.get(at).and_then(|gateway| gateway.node.get()) == Some(&node) {
                return Found::At(at);
            }
            if !has_answered {
                found = Found::NotYet;
            }
        }
        found
    }

    /// The endpoint of gateway `at` in the configuration.
    pub(crate) fn endpoint(&self, at: usize) -> &str {
        self.list.get(at).map_or("?", |gateway| gateway.endpoint.as_str())
    }

    /// Stores how gateway `at` describes itself.
    pub(crate) fn met(
        &self,
        at: usize,
        about: &api::DescribeResponse,
    ) -> Result<RegionId, Failure> {
        let known = self.cluster.get_or_init(|| about.cluster.clone());
        let endpoint = self.endpoint(at);
        if *known != about.cluster {
            return Err(Failure::Never(Error::Config(format!(
                "endpoint {endpoint:?} belongs to cluster {:?}, but the others to {known:?}; use gateways of one cluster",
                about.cluster
            ))));
        }
        let region = u16::try_from(about.region).map(RegionId).map_err(|_| {
            Failure::Never(Error::Unexpected(format!("{endpoint} is in region {}", about.region)))
        })?;
        if let Some(gateway) = self.list.get(at) {
            gateway.region.get_or_init(|| region);
            gateway.node.get_or_init(|| NodeId(about.node));
        }
        Ok(region)
    }

    /// Sends one request to gateway `at`, and waits until the deadline or for one attempt's
    /// time-out.
    pub(crate) async fn send<Q, A>(
        &self,
        at: usize,
        deadline: Instant,
        message: Q,
        rpc: fn(Stubs, Request<Q>) -> Answer<A>,
    ) -> Result<A, Failure> {
        self.ask(at, deadline, message, rpc).await.map_err(|trouble| match trouble {
            Some(status) => failure(self.endpoint(at), &status),
            None => Failure::Lost(format!("{} did not answer in time", self.endpoint(at))),
        })
    }

    /// The same, but returns the raw status of a failure; none if the time was up.
    pub(crate) async fn ask<Q, A>(
        &self,
        at: usize,
        deadline: Instant,
        message: Q,
        rpc: fn(Stubs, Request<Q>) -> Answer<A>,
    ) -> Result<A, Option<Status>> {
        let Some(gateway) = self.list.get(at) else {
            return Err(Some(Status::internal(format!("gateway {at} does not exist"))));
        };
        let mut request = Request::new(message);
        if let Some(bearer) = &self.bearer {
            request.metadata_mut().insert("authorization", bearer.clone());
        }
        let stubs = Stubs {
            channel: gateway.channel.clone(),
            answer_bytes_max: self.answer_bytes_max.load(Ordering::Relaxed),
        };
        let until = deadline.min(Instant::now() + self.attempt_timeout);
        match tokio::time::timeout_at(until, rpc(stubs, request)).await {
            Ok(Ok(answer)) => Ok(answer.into_inner()),
            Ok(Err(status)) => Err(Some(status)),
            Err(_) => Err(None),
        }
    }
}

/// The meaning of a status. A request is known to have had no effect only if the status has the
/// gateway's mark, or if the connection was never made.
pub(crate) fn failure(endpoint: &str, status: &Status) -> Failure {
    let text = format!("{endpoint}: {}", describe(status));
    if never_sent(status) {
        return Failure::Unavailable(text);
    }
    if status.metadata().get("orthodrome-effect").is_none_or(|effect| effect != "none") {
        return Failure::Lost(text);
    }
    if status.metadata().contains_key("orthodrome-register") {
        return Failure::Unregistered(text);
    }
    match status.code() {
        Code::ResourceExhausted => Failure::Busy(text),
        Code::Unavailable => Failure::Unavailable(text),
        Code::NotFound | Code::FailedPrecondition | Code::AlreadyExists => Failure::NotOpen(text),
        Code::InvalidArgument | Code::OutOfRange => Failure::Never(Error::Invalid(text)),
        Code::Unauthenticated => Failure::Never(Error::Unauthenticated(text)),
        Code::PermissionDenied => Failure::Never(Error::PermissionDenied(text)),
        Code::Unimplemented => Failure::Never(Error::Unsupported(text)),
        Code::Ok
        | Code::Cancelled
        | Code::Unknown
        | Code::DeadlineExceeded
        | Code::Aborted
        | Code::Internal
        | Code::DataLoss => Failure::Never(Error::Unexpected(text)),
    }
}

fn describe(status: &Status) -> String {
    let mut text = status.message().to_owned();
    if text.is_empty() {
        text = status.code().description().to_owned();
    }
    // The message of a transport error is only "transport error"; its causes say what happened.
    let mut cause = status.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

/// True if the connection could not be made, so that nothing was sent on it.
fn never_sent(status: &Status) -> bool {
    let mut cause = status.source();
    while let Some(error) = cause {
        if error.is::<tonic::ConnectError>() {
            return true;
        }
        cause = error.source();
    }
    false
}
