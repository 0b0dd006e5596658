//! The client API over gRPC: `proto/orthodrome.proto` in front of a [`Gateway`].
//!
//! A request passes, in this order: the bound on connections (`connections`), the bound on requests in
//! flight (`admission`), who sent it (`access`), the bound on its bytes as they arrive (`admission`),
//! the bound on its parts (`codec`), the check of every field (`request`), what its sender may do
//! (`access`). Only then does it reach the gateway. Interactive transactions that wait for their
//! client are kept, each on a lease, in `open`; when the lease runs out the transaction is aborted.
//!
//! A caller that goes away drops its handler, and with it the call on the gateway, which aborts what
//! was not decided.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use orthodrome_core::lease::LeaseId;
use orthodrome_core::machine::{Admin, FAR_FUTURE, Gauge, GroupView, MembershipOrder};
use orthodrome_core::scan::{KeyRange, Page, Scan};
use orthodrome_core::txn::{AbortReason, Kind, Priority, Reads, Writes};
use orthodrome_core::{ClientId, Cluster, Decision, Key, Outcome, Timestamp, Txn, TxnId};
use tokio::net::TcpListener;
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, MissedTickBehavior};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Certificate, Identity, Server, ServerTlsConfig};
use tonic::{Request, Response, Status};
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use crate::Going;
use crate::audit::{AuditLog, By, Event};
use crate::gateway::{
    Begun, Description, Finished, Gateway, GatewayError, Health, OrderError, PendingTxns,
};
use crate::leases::{Lease, LeaseError, Swept};
use crate::redis;
use crate::scan::{Batches, ScanFailed};
use crate::transport::LinkStatus;

mod access;
mod admission;
mod answer;
mod codec;
mod connections;
mod console;
mod front;
mod http;
mod limits;
mod live;
mod metrics;
mod open;
mod quota;
mod request;
mod sessions;
#[cfg(test)]
mod tests;

pub use access::{Access, AccessError, Credential, DEFAULT_KEYSPACE, Principal, Role};
pub use limits::{Limits, LimitsError};

pub(crate) use front::{Front, HeldBytes, Refusal};

use admission::{Admission, Admitted};
use metrics::{Metrics, Phase, Timing};
use open::{OpenTxns, Scope};
use quota::Quotas;
use request::{Checker, Resolve};
use sessions::{Did, Sessions};

mod api {
    #![allow(missing_docs, clippy::all, clippy::pedantic, reason = "generated")]
    tonic::include_proto!("orthodrome.v1");
}

/// The trailer of a status that refuses a request.
const EFFECT: &str = "orthodrome-effect";
/// The trailer of a status that refuses an order: the node that takes it.
const LEADER: &str = "orthodrome-leader";
/// The trailer of a status that refuses a transaction whose client is not registered at this gateway.
const REGISTER: &str = "orthodrome-register";

/// Marks a status as a refusal: the request had no effect and never will. A request with an
/// unmarked status may have had any effect.
fn refuse(mut status: Status) -> Status {
    status.metadata_mut().insert(EFFECT, tonic::metadata::MetadataValue::from_static("none"));
    status
}

/// The part of a [`Gateway`] that the service needs; the methods mean the same. It is a trait so
/// that the service and its clients can be tested against scripted outcomes: a lost answer, an
/// overloaded node, an unknown outcome.
#[tonic::async_trait]
pub trait Transactions: Send + Sync + 'static {
    /// See [`Gateway::register`].
    async fn register(&self) -> Result<ClientId, GatewayError>;
    /// See [`Gateway::begin`].
    async fn begin(&self, txn: Txn) -> Result<Begun, GatewayError>;
    /// See [`Gateway::read`].
    async fn read(&self, txn: TxnId, keys: Vec<Key>) -> Result<Begun, GatewayError>;
    /// See [`Gateway::decide`].
    async fn decide(&self, txn: TxnId, decision: Decision) -> Result<Finished, GatewayError>;
    /// See [`Gateway::resolve`].
    async fn resolve(
        &self,
        txn: Txn,
        reads: Reads,
        decision: Option<Decision>,
    ) -> Result<Finished, GatewayError>;
    /// See [`Gateway::admin`].
    async fn admin(&self, order: Admin) -> Result<(), OrderError>;
    /// See [`Gateway::describe`].
    fn describe(&self) -> Description;
    /// See [`Gateway::links`].
    fn links(&self) -> Vec<LinkStatus>;
    /// See [`Gateway::groups`].
    async fn groups(&self) -> Vec<GroupView>;
    /// See [`Gateway::gauges`].
    async fn gauges(&self) -> Vec<Gauge>;
    /// See [`Gateway::pending`].
    async fn pending(&self) -> Option<PendingTxns>;
    /// See [`Gateway::orders`].
    async fn orders(&self) -> Vec<(MembershipOrder, Duration)>;
    /// See [`Gateway::scan`].
    async fn scan(&self, _scan: Scan, _priority: Priority) -> Result<Page, ScanFailed> {
        Err(ScanFailed::Unsupported)
    }
    /// See [`Gateway::watch`].
    ///
    /// # Errors
    /// See [`ScanFailed`].
    fn watch(&self, _range: KeyRange, _after: Option<Timestamp>) -> Result<Batches, ScanFailed> {
        Err(ScanFailed::Unsupported)
    }
    /// See [`Gateway::grant_lease`].
    async fn grant_lease(&self, _ttl: Duration) -> Result<(LeaseId, Timestamp), LeaseError> {
        Err(ScanFailed::Unsupported.into())
    }
    /// See [`Gateway::renew_lease`].
    async fn renew_lease(&self, _id: LeaseId) -> Result<Timestamp, LeaseError> {
        Err(ScanFailed::Unsupported.into())
    }
    /// See [`Gateway::revoke_lease`].
    async fn revoke_lease(&self, _id: LeaseId) -> Result<u64, LeaseError> {
        Err(ScanFailed::Unsupported.into())
    }
    /// See [`Gateway::lease`].
    async fn lease(&self, _id: LeaseId) -> Result<Lease, LeaseError> {
        Err(ScanFailed::Unsupported.into())
    }
    /// See [`Gateway::end_due_leases`].
    async fn end_due_leases(&self) -> Result<Swept, LeaseError> {
        Err(ScanFailed::Unsupported.into())
    }
}

#[tonic::async_trait]
impl Transactions for Gateway {
    async fn register(&self) -> Result<ClientId, GatewayError> {
        Self::register(self).await
    }

    async fn begin(&self, txn: Txn) -> Result<Begun, GatewayError> {
        Self::begin(self, txn).await
    }

    async fn read(&self, txn: TxnId, keys: Vec<Key>) -> Result<Begun, GatewayError> {
        Self::read(self, txn, keys).await
    }

    async fn decide(&self, txn: TxnId, decision: Decision) -> Result<Finished, GatewayError> {
        Self::decide(self, txn, decision).await
    }

    async fn resolve(
        &self,
        txn: Txn,
        reads: Reads,
        decision: Option<Decision>,
    ) -> Result<Finished, GatewayError> {
        Self::resolve(self, txn, reads, decision).await
    }

    async fn admin(&self, order: Admin) -> Result<(), OrderError> {
        Self::admin(self, order).await
    }

    async fn groups(&self) -> Vec<GroupView> {
        Self::groups(self).await
    }

    fn describe(&self) -> Description {
        Self::describe(self)
    }

    fn links(&self) -> Vec<LinkStatus> {
        Self::links(self)
    }

    async fn gauges(&self) -> Vec<Gauge> {
        Self::gauges(self).await
    }

    async fn pending(&self) -> Option<PendingTxns> {
        Self::pending(self).await
    }

    async fn orders(&self) -> Vec<(MembershipOrder, Duration)> {
        Self::orders(self).await
    }

    async fn scan(&self, scan: Scan, priority: Priority) -> Result<Page, ScanFailed> {
        Self::scan(self, scan, priority).await
    }

    fn watch(&self, range: KeyRange, after: Option<Timestamp>) -> Result<Batches, ScanFailed> {
        Self::watch(self, range, after)
    }

    async fn grant_lease(&self, ttl: Duration) -> Result<(LeaseId, Timestamp), LeaseError> {
        Self::grant_lease(self, ttl).await
    }

    async fn renew_lease(&self, id: LeaseId) -> Result<Timestamp, LeaseError> {
        Self::renew_lease(self, id).await
    }

    async fn revoke_lease(&self, id: LeaseId) -> Result<u64, LeaseError> {
        Self::revoke_lease(self, id).await
    }

    async fn lease(&self, id: LeaseId) -> Result<Lease, LeaseError> {
        Self::lease(self, id).await
    }

    async fn end_due_leases(&self) -> Result<Swept, LeaseError> {
        Self::end_due_leases(self).await
    }
}

/// The server's side of TLS to clients. Its debug form shows no key.
#[derive(Clone)]
pub struct Tls {
    /// The server's certificate chain, PEM.
    pub certificate: Vec<u8>,
    /// Its private key, PEM.
    pub key: Vec<u8>,
    /// The authority of client certificates, PEM. If it is set, clients may show a certificate; one
    /// that it did not sign ends the handshake.
    pub client_authority: Option<Vec<u8>>,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tls").finish_non_exhaustive()
    }
}

/// The settings of the client service.
#[derive(Clone, Debug)]
pub struct ServiceConfig {
    /// The principals and their roles.
    pub access: Access,
    /// TLS; none is allowed on loopback addresses only.
    pub tls: Option<Tls>,
    /// Bounds.
    pub limits: Limits,
    /// Where orders of operators are written down; none for nodes of tests and demonstrations.
    pub audit: Option<AuditLog>,
}

/// Why the service cannot start.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// Access is open to every client, and the address is not a loopback address.
    #[error(
        "clients: access is open on {0}; configure tokens or certificates, or listen on 127.0.0.1"
    )]
    OpenAccess(SocketAddr),
    /// Tokens and data would cross a network without encryption.
    #[error("clients: no TLS on {0}; configure a certificate and key, or listen on 127.0.0.1")]
    NoTls(SocketAddr),
    /// The limits are inconsistent.
    #[error(transparent)]
    Limits(#[from] LimitsError),
    /// The listener has no address.
    #[error("clients: the listening socket has no address: {0}")]
    Listener(#[from] std::io::Error),
    /// The certificate or key is unusable, or the transport failed.
    #[error("clients: {0}")]
    Transport(String),
}

impl From<tonic::transport::Error> for ServiceError {
    fn from(error: tonic::transport::Error) -> Self {
        let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}"));
        Self::Transport(format!("{error}{}", cause.unwrap_or_default()))
    }
}

/// The sockets on which a node serves clients.
#[derive(Debug)]
pub struct Listeners {
    /// For the gRPC API and the pages.
    pub clients: TcpListener,
    /// For the Redis protocol, with the same credentials and bounds.
    pub redis: Option<TcpListener>,
}

/// Serves clients on `listeners` until `shutdown` resolves; then accepts no more requests, finishes
/// pending ones, and returns. The standard gRPC health service needs no credential.
///
/// # Errors
/// [`ServiceError`]: before anything is served, except for a failure of the transport.
pub fn serve(
    transactions: Arc<dyn Transactions>,
    cluster: Arc<Cluster>,
    listeners: Listeners,
    config: ServiceConfig,
    shutdown: Going<()>,
) -> Going<Result<(), ServiceError>> {
    Box::pin(serve_until(transactions, cluster, listeners, config, shutdown))
}

async fn serve_until(
    transactions: Arc<dyn Transactions>,
    cluster: Arc<Cluster>,
    listeners: Listeners,
    config: ServiceConfig,
    shutdown: Going<()>,
) -> Result<(), ServiceError> {
    let ServiceConfig { access, tls, limits, audit } = config;
    let Listeners { clients: listener, redis } = listeners;
    limits.check()?;
    check_address(listener.local_addr()?, &access, tls.as_ref())?;
    let acceptor = match (&redis, &tls) {
        (Some(_), Some(tls)) => Some(redis::acceptor(tls).map_err(ServiceError::Transport)?),
        (Some(_) | None, _) => None,
    };
    if let Some(redis) = &redis {
        check_address(redis.local_addr()?, &access, tls.as_ref())?;
    }
    let (mut server, is_tls) = (builder(&limits), tls.is_some());
    if let Some(tls) = tls {
        server = server.tls_config(tls_config(tls))?;
    }
    let admission = Admission::new(&limits);
    let message_max = limits.request_bytes_max as usize;
    let connections_max = limits.connections_max;
    let service = Service::new(transactions, cluster, admission.clone(), limits, audit);
    let sweeper = AbortOnDrop(tokio::spawn(service.clone().sweep()));
    let seconds = AbortOnDrop(tokio::spawn(service.clone().count_seconds()));
    let leases = AbortOnDrop(tokio::spawn(service.clone().end_leases()));
    let (ending, front) = (CancellationToken::new(), Front::new(service.clone(), access.clone()));
    let ended = ending.clone();
    let redis = redis.map(|listener| {
        AbortOnDrop(tokio::spawn(redis::serve(Arc::new(front), listener, acceptor, ended)))
    });
    let console = console::routes(service.clone(), access.clone(), is_tls, ending.clone());
    let shutdown = async move {
        shutdown.await;
        ending.cancel();
    };

    let pages = http::pages(service.clone(), access.clone()).merge(console);
    let identify = move |mut request: Request<()>| {
        let principal = access.identify(&request)?;
        request.extensions_mut().insert(principal);
        Ok(request)
    };
    let txns = api::orthodrome_server::OrthodromeServer::new(service.clone())
        .max_decoding_message_size(message_max)
        .max_encoding_message_size(usize::MAX);
    let admin =
        api::admin_server::AdminServer::new(service.clone()).max_decoding_message_size(message_max);
    let (reporter, health) = tonic_health::server::health_reporter();
    let health = health.max_decoding_message_size(4 << 10);
    // Once before the first request, then at every change.
    service.report_health(&reporter).await;
    let watch = AbortOnDrop(tokio::spawn(service.watch_health(reporter)));

    let grpc = Routes::default()
        .add_service(admission.guard(InterceptedService::new(txns, identify.clone())))
        .add_service(admission.guard(InterceptedService::new(admin, identify)))
        .add_service(admission.guard(health));
    // Scrapers and probes speak HTTP/1.1.
    server
        .accept_http1(true)
        .add_routes(
            Routes::from(grpc.into_axum_router().merge(pages).fallback(http::unknown)).prepare(),
        )
        .serve_with_incoming_shutdown(connections::accept(listener, connections_max), shutdown)
        .await?;
    if let Some(mut redis) = redis {
        // It ends soon after the shutdown, and by itself if its connections fail.
        let _ = (&mut redis.0).await;
    }
    drop((sweeper, seconds, leases, watch));
    Ok(())
}

/// Refuses an address where credentials or data would be open to others.
fn check_address(
    address: SocketAddr,
    access: &Access,
    tls: Option<&Tls>,
) -> Result<(), ServiceError> {
    if address.ip().is_loopback() {
        return Ok(());
    }
    if access.is_open() {
        return Err(ServiceError::OpenAccess(address));
    }
    if tls.is_none() {
        return Err(ServiceError::NoTls(address));
    }
    Ok(())
}

/// A watch without changes says so often how far it has come, also if that is no further than before:
/// then the client knows that its gateway lives.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

/// Sends the batches of a watch until it ends or the client leaves.
async fn forward(
    mut batches: Batches,
    answers: &mpsc::Sender<Result<api::WatchResponse, Status>>,
    (keys_only, bytes_max): (bool, usize),
    after: Option<Timestamp>,
) {
    let mut through = after.map(|after| after.0);
    let mut has_begun = false;
    let mut progress = tokio::time::interval(PROGRESS_INTERVAL);
    loop {
        let batch = tokio::select! {
            batch = batches.recv() => batch,
            _ = progress.tick() => {
                if let Some(through) = through {
                    let answer = api::WatchResponse { changes: Vec::new(), through };
                    // If an answer waits for the client, it needs no further one.
                    let _ = answers.try_send(Ok(answer));
                }
                continue;
            }
            () = answers.closed() => return,
        };
        if let Some(Ok(batch)) = &batch {
            through = Some(batch.through.0);
            if batch.changes.is_empty() && std::mem::replace(&mut has_begun, true) {
                continue;
            }
            progress.reset();
        }
        let next: Vec<Result<_, Status>> = match batch {
            None => return,
            Some(Err(failed)) => vec![Err(answer::scan_failed(&failed))],
            Some(Ok(batch)) => {
                answer::batch(batch, keys_only, bytes_max).into_iter().map(Ok).collect()
            }
        };
        for answer in next {
            if answers.send(answer).await.is_err() {
                return;
            }
        }
    }
}

/// The time between two lists of due entries, while there are leases.
const LEASE_INTERVAL: Duration = Duration::from_secs(2);
/// The same while there are none.
const LEASE_INTERVAL_UNUSED: Duration = Duration::from_secs(10);

/// A task that is aborted when its owner is dropped.
struct AbortOnDrop(tokio::task::JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn builder(limits: &Limits) -> Server {
    Server::builder()
        .timeout(limits.request_timeout)
        // A client that answers no ping is gone; its requests are dropped and their capacity is
        // released.
        .http2_keepalive_interval(Some(Duration::from_secs(10)))
        .http2_keepalive_timeout(Some(Duration::from_secs(10)))
        .http2_max_header_list_size(16 << 10)
        .max_concurrent_streams(1_000)
}

fn tls_config(tls: Tls) -> ServerTlsConfig {
    let config = ServerTlsConfig::new()
        .identity(Identity::from_pem(tls.certificate, tls.key))
        .timeout(Duration::from_secs(10));
    match tls.client_authority {
        // Optional, because a token is enough; `access` refuses a client that has neither.
        Some(authority) => {
            config.client_ca_root(Certificate::from_pem(authority)).client_auth_optional(true)
        }
        None => config,
    }
}

/// The service. Clones are handles on the same one.
#[derive(Clone)]
struct Service {
    inner: Arc<Inner>,
}

struct Inner {
    transactions: Arc<dyn Transactions>,
    cluster: Arc<Cluster>,
    /// Whether the protocol runs general transactions.
    general: bool,
    limits: Limits,
    admission: Admission,
    open: OpenTxns,
    quotas: Quotas,
    sessions: Sessions,
    metrics: Metrics,
    /// A lease was granted here.
    granted: Notify,
    started: Instant,
    audit: Option<AuditLog>,
}

impl Service {
    fn new(
        transactions: Arc<dyn Transactions>,
        cluster: Arc<Cluster>,
        admission: Admission,
        limits: Limits,
        audit: Option<AuditLog>,
    ) -> Self {
        let open = OpenTxns::new(limits.txns_open_max, limits.lease);
        let metrics = Metrics::default();
        let started = Instant::now();
        let (quotas, sessions) = (Quotas::default(), Sessions::default());
        // Read once, because a description contains every partition.
        let general = transactions.describe().general;
        let inner = Inner {
            transactions,
            cluster,
            general,
            limits,
            admission,
            open,
            quotas,
            sessions,
            metrics,
            granted: Notify::new(),
            started,
            audit,
        };
        Self { inner: Arc::new(inner) }
    }

    fn check(&self) -> Checker<'_> {
        let Inner { limits, cluster, general, .. } = &*self.inner;
        Checker { limits, cluster, general: *general }
    }

    /// The sender of the request, which the interceptor has stored in it.
    fn caller<R>(request: &Request<R>) -> Result<Arc<Principal>, Status> {
        if let Some(admitted) = request.extensions().get::<Admitted>() {
            admitted.reach();
        }
        let principal = request.extensions().get::<Arc<Principal>>().cloned();
        principal.ok_or_else(|| refuse(Status::internal("the request was not authenticated")))
    }

    /// Checks a transaction before it begins: refuses it if its sender may not run it, and lowers
    /// its priority if the sender's quota is used up.
    fn enter(&self, caller: &Principal, txn: Txn) -> Result<Txn, Status> {
        let wanted = if txn.writes.is_empty() { Role::Read } else { Role::Write };
        self.enter_as(caller, txn, wanted)
    }

    /// As [`Service::enter`], for a sender who needs this role.
    fn enter_as(&self, caller: &Principal, mut txn: Txn, wanted: Role) -> Result<Txn, Status> {
        caller.require(DEFAULT_KEYSPACE, wanted)?;
        if txn.priority > Priority::LOW && !self.inner.quotas.take(caller, Instant::now()) {
            txn.priority = Priority::LOW;
            self.inner.metrics.demoted.inc();
        }
        // Reads of other kinds are ordered with all transactions.
        if matches!(txn.kind, Kind::Interactive | Kind::General | Kind::StaleReadOnly) {
            txn.floors = self.inner.sessions.floors_of(&txn);
        }
        self.inner.metrics.live.begin(&txn);
        Ok(txn)
    }

    /// Records that a client learns the outcome of its transaction, and so the effects.
    fn learn(&self, client: ClientId, finished: &Finished, did: Did<'_>) {
        if let Outcome::Committed(at) = finished.outcome {
            self.inner.sessions.told(client, at, finished.reads.as_ref(), did);
        }
    }

    /// Checks that these writes were declared; or, for a general transaction, that the sender may
    /// write them and that there are not too many keys.
    fn check_commit(
        &self,
        caller: &Principal,
        scope: &Scope,
        writes: &Writes,
    ) -> Result<(), Status> {
        match scope {
            Scope::Declared(keys) => request::check_declared("writes", writes, keys),
            Scope::General { keys, .. } => {
                if !writes.is_empty() {
                    caller.require(DEFAULT_KEYSPACE, Role::Write)?;
                }
                let unread = writes.keys().filter(|key| !keys.contains(*key)).count();
                self.check().count("writes", keys.len() + unread, self.inner.limits.keys_max)
            }
        }
    }

    /// The outcome in the form of the API; also counts it.
    fn tell(&self, timing: Timing, finished: &Finished) -> Option<api::Outcome> {
        self.inner.metrics.end(timing, finished.path, finished.outcome);
        answer::outcome(finished)
    }

    /// The outcome of a call that may have ended the transaction. A lost answer is an unknown
    /// outcome and not an error.
    fn finished(result: Result<Finished, GatewayError>) -> Result<Finished, Status> {
        match result {
            Ok(finished) => Ok(finished),
            Err(GatewayError::Lost(_)) => {
                Ok(Finished { outcome: Outcome::Unknown, reads: None, path: "lost" })
            }
            Err(error) => Err(answer::status(&error)),
        }
    }

    /// Runs a transaction with a single round.
    async fn run(&self, txn: Txn) -> Result<Finished, Status> {
        let id = txn.id;
        match self.inner.transactions.begin(txn).await {
            Ok(Begun::Finished(finished)) => {
                self.check_shed(&finished)?;
                Ok(finished)
            }
            Err(error) => Self::finished(Err(error)),
            Ok(Begun::Reads(_)) => {
                // This is a defect of the gateway, which must not leave the transaction open.
                tracing::error!(txn = %id, "a transaction of one round requested a decision");
                Self::finished(self.inner.transactions.decide(id, Decision::Abort).await)
            }
        }
    }

    /// Refuses a request whose transaction was rejected because the cluster was overloaded, or because
    /// of what its session says. The transaction had one request, so the client may repeat it.
    fn check_shed(&self, finished: &Finished) -> Result<(), Status> {
        if finished.path == FAR_FUTURE {
            return Err(refuse(Status::invalid_argument(
                "session: a timestamp is farther ahead of this node's clock than any commit can be; \
                 send the timestamps of this cluster's answers",
            )));
        }
        match finished.outcome {
            Outcome::Aborted(AbortReason::Overload) => Err(self
                .inner
                .admission
                .busy("the protocol has as many bytes or transactions under way as it can take")),
            Outcome::Committed(_) | Outcome::Aborted(_) | Outcome::Unknown => Ok(()),
        }
    }

    fn too_large(&self, field: &str, bytes: usize) -> Status {
        let most = self.inner.limits.response_bytes_max;
        refuse(Status::invalid_argument(format!(
            "{field}: these keys and their values take {bytes} bytes; an answer holds at most \
             {most}; read fewer at a time"
        )))
    }

    fn over(&self, reads: &Reads) -> Option<usize> {
        let bytes = answer::reads_bytes(reads);
        (bytes > self.inner.limits.response_bytes_max as usize).then_some(bytes)
    }

    /// Measures each second, for the console; runs for ever.
    async fn count_seconds(self) {
        let mut ticks = tokio::time::interval(Duration::from_secs(1));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // The first tick comes at once.
        ticks.tick().await;
        loop {
            ticks.tick().await;
            self.inner.metrics.live.tick(Instant::now());
        }
    }

    /// Aborts transactions whose lease has expired, or whose client is idle while the node stops; runs
    /// for ever.
    async fn sweep(self) {
        let mut ticks = tokio::time::interval(self.inner.open.sweep_interval());
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let is_stopping = self.inner.transactions.describe().health == Health::Stopping;
            for id in self.inner.open.take_expired(Instant::now(), is_stopping) {
                self.inner.metrics.leases_expired.inc();
                let service = self.clone();
                // Each in its own task, so that a slow one does not delay the others.
                tokio::spawn(async move {
                    let ended = service.inner.transactions.decide(id, Decision::Abort).await;
                    if let Err(error) = ended {
                        tracing::warn!(txn = %id, %error, "cannot abort it after its lease expired");
                    }
                });
            }
        }
    }

    /// Ends leases that are due; runs for ever.
    async fn end_leases(self) {
        let mut pause = LEASE_INTERVAL_UNUSED;
        loop {
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.inner.granted.notified() => pause = LEASE_INTERVAL,
            }
            if self.inner.transactions.describe().health != Health::Serving {
                continue;
            }
            match self.inner.transactions.end_due_leases().await {
                Ok(swept) => {
                    pause = if swept.entries > 0 { LEASE_INTERVAL } else { LEASE_INTERVAL_UNUSED };
                    self.inner.metrics.leases_ended.inc_by(swept.ended);
                    self.inner.metrics.lease_keys_deleted.inc_by(swept.keys);
                }
                Err(LeaseError::Scan(ScanFailed::Unsupported)) => return,
                Err(error) => tracing::info!(%error, "cannot look for leases that are due"),
            }
        }
    }

    /// The lease that a request names, if its sender may do that.
    fn lease_of(
        caller: &Principal,
        (lease, keyspace): (&str, &str),
        wanted: Role,
    ) -> Result<LeaseId, Status> {
        request::check_keyspace(keyspace)?;
        caller.require(DEFAULT_KEYSPACE, wanted)?;
        request::lease_id(lease)
    }

    /// Gives an operator's order to the node, if its sender may give it and it makes sense, and
    /// returns the node's id if it accepts the order. The audit log has the order before the node.
    async fn order(
        &self,
        caller: &Principal,
        address: Option<SocketAddr>,
        name: &'static str,
        order: Result<Admin, Status>,
    ) -> Result<u32, Status> {
        let by = By { principal: caller.name.clone(), address };
        let order = match caller.require(DEFAULT_KEYSPACE, Role::Admin).and(order) {
            Ok(order) => order,
            Err(status) => {
                if let Some(log) = &self.inner.audit {
                    let why = status.message().to_owned();
                    log.note(Event::Denied { by, order: name, why }).await;
                }
                return Err(status);
            }
        };
        let mut number = 0;
        if let Some(log) = &self.inner.audit {
            number = log.number();
            let written = log.write(Event::Order { number, by, order: (&order).into() }).await;
            written.map_err(|error| {
                refuse(Status::failed_precondition(format!(
                    "the audit log cannot be written, so the order is not carried out: {error}; make room for it, or \
                     correct `audit_log` in the node's file"
                )))
            })?;
        }
        let about = self.inner.transactions.describe();
        let answer = self.inner.transactions.admin(order.clone()).await;
        tracing::info!(by = caller.name, ?order, ?answer, "operator's order");
        if let Some(log) = &self.inner.audit {
            log.note(match &answer {
                Ok(()) => Event::Accepted { number },
                Err(error @ OrderError::Lost) => Event::Unknown { number, why: error.to_string() },
                Err(error) => Event::Rejected { number, why: error.to_string() },
            })
            .await;
        }
        answer.map(|()| about.node.0).map_err(|error| answer::order_status(&about, &error))
    }

    /// Keeps the health service up to date; runs for ever.
    async fn watch_health(self, reporter: HealthReporter) {
        let mut ticks = tokio::time::interval(Duration::from_secs(1));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            self.report_health(&reporter).await;
        }
    }

    async fn report_health(&self, reporter: &HealthReporter) {
        let status = match self.inner.transactions.describe().health {
            Health::Serving => ServingStatus::Serving,
            Health::Stopping | Health::Failed(_) => ServingStatus::NotServing,
        };
        // The empty name stands for the whole process.
        for service in ["", api::orthodrome_server::SERVICE_NAME] {
            reporter.set_service_status(service, status).await;
        }
    }
}

#[tonic::async_trait]
impl api::orthodrome_server::Orthodrome for Service {
    async fn register(
        &self,
        request: Request<api::RegisterRequest>,
    ) -> Result<Response<api::RegisterResponse>, Status> {
        Self::caller(&request)?.require(DEFAULT_KEYSPACE, Role::Read)?;
        let about = self.inner.transactions.describe();
        let client = self.inner.transactions.register().await;
        let client = client.map_err(|error| answer::status(&error))?;
        Ok(Response::new(api::RegisterResponse {
            client: client.0,
            limits: Some(self.inner.limits.to_api()),
            // Without the current groups, so that a client's first request does not wait for them.
            cluster: Some(answer::description(&about, &self.inner.cluster, &[])),
        }))
    }

    async fn begin(
        &self,
        request: Request<api::BeginRequest>,
    ) -> Result<Response<api::BeginResponse>, Status> {
        use api::begin_response::Result as Answer;
        let caller = Self::caller(&request)?;
        let admitted = Admitted::of(&request);
        let txn = self.enter(&caller, self.check().begin(request.into_inner())?)?;
        let (room, timing) = (self.inner.open.room()?, Timing::start(&txn));
        let (id, is_general) = (txn.id, matches!(txn.kind, Kind::General));
        let (read_keys, write_keys) = (txn.reads.clone(), txn.writes.clone());
        let started = Instant::now();
        let begun = self.inner.transactions.begin(txn).await;
        let answer = match begun {
            Ok(Begun::Reads(reads)) => {
                if let Some(bytes) = self.over(&reads) {
                    let ended = self.inner.transactions.decide(id, Decision::Abort).await;
                    Self::finished(ended)?;
                    return Err(self.too_large("read_keys", bytes));
                }
                let held = admitted.as_ref().map(Admitted::bytes);
                let timing = Timing { reads_answered: Some(Instant::now()), ..timing };
                let scope = if is_general {
                    let keys = read_keys.into_iter().collect();
                    Scope::General { keys, bytes: answer::reads_bytes(&reads) }
                } else {
                    Scope::Declared(write_keys)
                };
                room.open(id, caller, scope, timing, held);
                self.inner.metrics.round(Phase::Begin, timing, started);
                Answer::Opened(api::Opened { reads: answer::reads(reads) })
            }
            Ok(Begun::Finished(finished)) => {
                self.check_shed(&finished)?;
                Answer::Finished(self.tell(timing, &finished).unwrap_or_default())
            }
            Err(error) => {
                let finished = Self::finished(Err(error))?;
                Answer::Finished(self.tell(timing, &finished).unwrap_or_default())
            }
        };
        Ok(Response::new(api::BeginResponse { result: Some(answer) }))
    }

    async fn read_round(
        &self,
        request: Request<api::ReadRoundRequest>,
    ) -> Result<Response<api::ReadRoundResponse>, Status> {
        use api::read_round_response::Result as Answer;
        let caller = Self::caller(&request)?;
        let admitted = Admitted::of(&request);
        let api::ReadRoundRequest { txn, keys } = request.into_inner();
        let id = request::txn_id("txn", txn.as_ref())?;
        let keys = self.check().read_round(keys)?;
        let round = self.inner.open.read(id, &caller, |open| match &open.scope {
            Scope::Declared(_) => Err(refuse(Status::failed_precondition(format!(
                "transaction {id} declared its keys when it began; only a general transaction can read more"
            )))),
            Scope::General { keys: before, .. } => {
                let new = keys.iter().filter(|key| !before.contains(*key)).count();
                self.check().count("keys", before.len() + new, self.inner.limits.keys_max)
            }
        })?;
        let (timing, started) = (round.timing, Instant::now());
        self.inner.metrics.live.read(&keys);
        let answer = match self.inner.transactions.read(id, keys).await {
            Ok(Begun::Reads(reads)) => {
                let held = admitted.as_ref().map(Admitted::bytes);
                let (names, more) = (reads.keys().cloned(), answer::reads_bytes(&reads));
                let bytes = round.complete(names, more, held);
                if bytes > self.inner.limits.response_bytes_max as usize {
                    self.inner.open.take(id, &caller, |_| Ok(()))?;
                    let ended = self.inner.transactions.decide(id, Decision::Abort).await;
                    Self::finished(ended)?;
                    return Err(self.too_large("keys", bytes));
                }
                self.inner.metrics.round(Phase::Read, timing, started);
                Answer::Opened(api::Opened { reads: answer::reads(reads) })
            }
            Ok(Begun::Finished(finished)) => {
                Answer::Finished(self.tell(timing, &finished).unwrap_or_default())
            }
            Err(error) if error.is_retryable() => {
                // Nothing was done, and the transaction is unchanged.
                round.complete([], 0, None);
                return Err(answer::status(&error));
            }
            Err(error) => {
                let finished = Self::finished(Err(error))?;
                Answer::Finished(self.tell(timing, &finished).unwrap_or_default())
            }
        };
        Ok(Response::new(api::ReadRoundResponse { result: Some(answer) }))
    }

    async fn commit(
        &self,
        request: Request<api::CommitRequest>,
    ) -> Result<Response<api::CommitResponse>, Status> {
        let caller = Self::caller(&request)?;
        let _admitted = Admitted::of(&request);
        let api::CommitRequest { txn, writes } = request.into_inner();
        let id = request::txn_id("txn", txn.as_ref())?;
        let writes = self.check().writes("writes", writes)?;
        let check = |open: &open::Open| self.check_commit(&caller, &open.scope, &writes);
        let timing = self.inner.open.take(id, &caller, check)?;
        let started = Instant::now();
        let timing = Timing { decided: Some(started), ..timing };
        let decision = Decision::Commit(writes.clone());
        let finished = Self::finished(self.inner.transactions.decide(id, decision).await)?;
        self.learn(id.client, &finished, Did::Wrote(&writes));
        self.inner.metrics.round(Phase::Commit, timing, started);
        let outcome = self.tell(timing, &finished);
        Ok(Response::new(api::CommitResponse { outcome }))
    }

    async fn abort(
        &self,
        request: Request<api::AbortRequest>,
    ) -> Result<Response<api::AbortResponse>, Status> {
        let caller = Self::caller(&request)?;
        let id = request::txn_id("txn", request.get_ref().txn.as_ref())?;
        let timing = self.inner.open.take(id, &caller, |_| Ok(()))?;
        let timing = Timing { decided: Some(Instant::now()), ..timing };
        let ended = self.inner.transactions.decide(id, Decision::Abort).await;
        let outcome = self.tell(timing, &Self::finished(ended)?);
        Ok(Response::new(api::AbortResponse { outcome }))
    }

    async fn keep_alive(
        &self,
        request: Request<api::KeepAliveRequest>,
    ) -> Result<Response<api::KeepAliveResponse>, Status> {
        let caller = Self::caller(&request)?;
        let most = u32::try_from(self.inner.limits.txns_open_max).unwrap_or(u32::MAX);
        self.check().count("txns", request.get_ref().txns.len(), most)?;
        let mut not_open = Vec::new();
        for (at, id) in request.get_ref().txns.iter().enumerate() {
            let id = request::txn_id(&format!("txns[{at}]"), Some(id))?;
            if !self.inner.open.keep(id, &caller) {
                not_open.push(answer::txn_id(id));
            }
        }
        Ok(Response::new(api::KeepAliveResponse { not_open }))
    }

    async fn execute(
        &self,
        request: Request<api::ExecuteRequest>,
    ) -> Result<Response<api::ExecuteResponse>, Status> {
        let caller = Self::caller(&request)?;
        let _admitted = Admitted::of(&request);
        let txn = self.enter(&caller, self.check().execute(request.into_inner())?)?;
        let (client, kind, timing) = (txn.id.client, txn.kind.clone(), Timing::start(&txn));
        let finished = self.run(txn).await?;
        if let Kind::Procedure(ops) = &kind {
            self.learn(client, &finished, Did::Ran(ops));
        }
        let outcome = self.tell(timing, &finished);
        // Only the outcome is known of a transaction that was sent again.
        let is_told =
            finished.reads.is_some() || !matches!(finished.outcome, Outcome::Committed(_));
        let reads = finished.reads.unwrap_or_default();
        let reads_omitted = !is_told || self.over(&reads).is_some();
        Ok(Response::new(api::ExecuteResponse {
            outcome,
            reads: if reads_omitted { Vec::new() } else { answer::reads(reads) },
            reads_omitted,
        }))
    }

    async fn read(
        &self,
        request: Request<api::ReadRequest>,
    ) -> Result<Response<api::ReadResponse>, Status> {
        let caller = Self::caller(&request)?;
        let _admitted = Admitted::of(&request);
        let txn = self.enter(&caller, self.check().read(request.into_inner())?)?;
        let (client, timing) = (txn.id.client, Timing::start(&txn));
        let finished = self.run(txn).await?;
        self.learn(client, &finished, Did::Ran(&[]));
        let outcome = self.tell(timing, &finished);
        let reads = finished.reads.unwrap_or_default();
        if let Some(bytes) = self.over(&reads) {
            return Err(self.too_large("keys", bytes));
        }
        Ok(Response::new(api::ReadResponse { outcome, reads: answer::reads(reads) }))
    }

    async fn scan(
        &self,
        request: Request<api::ScanRequest>,
    ) -> Result<Response<api::ScanResponse>, Status> {
        let caller = Self::caller(&request)?;
        let _admitted = Admitted::of(&request);
        let (scan, keys_only, mut priority) = self.check().scan(request.into_inner())?;
        caller.require(DEFAULT_KEYSPACE, Role::Read)?;
        if priority > Priority::LOW && !self.inner.quotas.take(&caller, Instant::now()) {
            priority = Priority::LOW;
            self.inner.metrics.demoted.inc();
        }
        let began = Instant::now();
        let (range, backwards) = (scan.range.clone(), scan.backwards);
        let scanned = self.inner.transactions.scan(scan, priority).await;
        self.inner.metrics.scanned(began.elapsed(), priority, scanned.is_ok());
        let page = scanned.map_err(|failed| answer::scan_failed(&failed))?;
        let bytes_max = self.inner.limits.response_bytes_max as usize;
        Ok(Response::new(answer::page(page, range, backwards, keys_only, bytes_max)))
    }

    type WatchStream = ReceiverStream<Result<api::WatchResponse, Status>>;

    async fn watch(
        &self,
        request: Request<api::WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let caller = Self::caller(&request)?;
        let request = request.into_inner();
        let (range, after) = self.check().watch(&request)?;
        caller.require(DEFAULT_KEYSPACE, Role::Read)?;
        let begun = self.inner.transactions.watch(range, after);
        let batches = begun.map_err(|failed| answer::scan_failed(&failed))?;
        let bytes_max = self.inner.limits.response_bytes_max as usize;
        let keys_only = request.keys_only;
        let (answers, stream) = mpsc::channel(1);
        let watches = self.inner.metrics.watches.clone();
        tokio::spawn(async move {
            watches.inc();
            forward(batches, &answers, (keys_only, bytes_max), after).await;
            watches.dec();
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn grant_lease(
        &self,
        request: Request<api::GrantLeaseRequest>,
    ) -> Result<Response<api::GrantLeaseResponse>, Status> {
        let caller = Self::caller(&request)?;
        let api::GrantLeaseRequest { ttl_ms, keyspace } = request.into_inner();
        request::check_keyspace(&keyspace)?;
        caller.require(DEFAULT_KEYSPACE, Role::Write)?;
        let granted = self.inner.transactions.grant_lease(Duration::from_millis(ttl_ms)).await;
        let (id, at) = granted.map_err(|error| answer::lease_failed(&error))?;
        self.inner.metrics.leases_granted.inc();
        self.inner.granted.notify_one();
        Ok(Response::new(api::GrantLeaseResponse { lease: id.to_string(), timestamp: at.0 }))
    }

    async fn renew_lease(
        &self,
        request: Request<api::RenewLeaseRequest>,
    ) -> Result<Response<api::RenewLeaseResponse>, Status> {
        let caller = Self::caller(&request)?;
        let api::RenewLeaseRequest { lease, keyspace } = request.into_inner();
        let id = Self::lease_of(&caller, (&lease, &keyspace), Role::Write)?;
        let renewed = self.inner.transactions.renew_lease(id).await;
        let at = renewed.map_err(|error| answer::lease_failed(&error))?;
        Ok(Response::new(api::RenewLeaseResponse { timestamp: at.0 }))
    }

    async fn revoke_lease(
        &self,
        request: Request<api::RevokeLeaseRequest>,
    ) -> Result<Response<api::RevokeLeaseResponse>, Status> {
        let caller = Self::caller(&request)?;
        let api::RevokeLeaseRequest { lease, keyspace } = request.into_inner();
        let id = Self::lease_of(&caller, (&lease, &keyspace), Role::Write)?;
        let revoked = self.inner.transactions.revoke_lease(id).await;
        let keys = revoked.map_err(|error| answer::lease_failed(&error))?;
        self.inner.metrics.leases_ended.inc();
        self.inner.metrics.lease_keys_deleted.inc_by(keys);
        Ok(Response::new(api::RevokeLeaseResponse { keys }))
    }

    async fn describe_lease(
        &self,
        request: Request<api::DescribeLeaseRequest>,
    ) -> Result<Response<api::DescribeLeaseResponse>, Status> {
        let caller = Self::caller(&request)?;
        let api::DescribeLeaseRequest { lease, keyspace } = request.into_inner();
        let id = Self::lease_of(&caller, (&lease, &keyspace), Role::Read)?;
        let lease = self.inner.transactions.lease(id).await;
        let Lease { left, keys, has_more } = lease.map_err(|error| answer::lease_failed(&error))?;
        let left_ms = u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
        let keys = keys.iter().map(|key| key.bytes().to_vec()).collect();
        Ok(Response::new(api::DescribeLeaseResponse { left_ms, keys, has_more }))
    }

    async fn resolve(
        &self,
        request: Request<api::ResolveRequest>,
    ) -> Result<Response<api::ResolveResponse>, Status> {
        let caller = Self::caller(&request)?;
        let _admitted = Admitted::of(&request);
        let Resolve { txn, reads, decision } = self.check().resolve(request.into_inner())?;
        let wanted = if txn.writes.is_empty() { Role::Read } else { Role::Write };
        caller.require(DEFAULT_KEYSPACE, wanted)?;
        if let Some(Decision::Commit(writes)) = &decision
            && !writes.is_empty()
        {
            caller.require(DEFAULT_KEYSPACE, Role::Write)?;
        }
        self.inner.open.check_owner(txn.id, &caller)?;
        let (client, kind, timing) = (txn.id.client, txn.kind.clone(), Timing::resolve(&txn));
        let wanted = decision.clone();
        let ended = self.inner.transactions.resolve(txn, reads, decision).await;
        // The client gets only the versions of the reads here.
        let mut finished = Finished { reads: None, ..Self::finished(ended)? };
        if finished.outcome == Outcome::Aborted(AbortReason::Client)
            && wanted != Some(Decision::Abort)
        {
            // Its gateway gave it up: the lease had expired, or the node was stopping.
            finished.outcome = Outcome::Aborted(AbortReason::Abandoned);
        }
        match (&kind, &wanted) {
            (Kind::Procedure(ops), _) => self.learn(client, &finished, Did::Ran(ops)),
            (_, Some(Decision::Commit(writes))) => {
                self.learn(client, &finished, Did::Wrote(writes));
            }
            (_, Some(Decision::Abort) | None) => {}
        }
        let outcome = self.tell(timing, &finished);
        Ok(Response::new(api::ResolveResponse { outcome }))
    }

    async fn describe(
        &self,
        request: Request<api::DescribeRequest>,
    ) -> Result<Response<api::DescribeResponse>, Status> {
        Self::caller(&request)?.require(DEFAULT_KEYSPACE, Role::Read)?;
        let about = self.inner.transactions.describe();
        let groups = self.inner.transactions.groups().await;
        Ok(Response::new(answer::description(&about, &self.inner.cluster, &groups)))
    }

    async fn status(
        &self,
        request: Request<api::StatusRequest>,
    ) -> Result<Response<api::StatusResponse>, Status> {
        Self::caller(&request)?.require(DEFAULT_KEYSPACE, Role::Read)?;
        let about = self.inner.transactions.describe();
        let transactions = &self.inner.transactions;
        let (gauges, orders) = tokio::join!(transactions.gauges(), transactions.orders());
        let Inner { limits, admission, open, metrics, started, .. } = &*self.inner;
        Ok(Response::new(api::StatusResponse {
            node: about.node.0,
            trouble: match about.health {
                Health::Serving => String::new(),
                Health::Stopping => "stopping".into(),
                Health::Failed(why) => why,
            },
            requests: admission.requests() as u64,
            requests_max: limits.requests_max as u64,
            txns_in_flight: about.in_flight as u64,
            txns_in_flight_max: about.in_flight_max as u64,
            txns_open: open.len() as u64,
            txns_open_max: limits.txns_open_max as u64,
            committed: metrics.committed.get(),
            aborted: metrics.aborted.get(),
            unknown: metrics.unknown.get(),
            refused: admission.refused(),
            leases_expired: metrics.leases_expired.get(),
            demoted: metrics.demoted.get(),
            gauges: gauges.into_iter().map(answer::gauge).collect(),
            orders: orders.into_iter().map(answer::order).collect(),
            uptime_ms: u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX),
            version: env!("CARGO_PKG_VERSION").into(),
            links: transactions.links().iter().map(answer::link).collect(),
        }))
    }
}

#[tonic::async_trait]
impl api::admin_server::Admin for Service {
    async fn transfer_leader(
        &self,
        request: Request<api::TransferLeaderRequest>,
    ) -> Result<Response<api::TransferLeaderResponse>, Status> {
        let (caller, from) = (Self::caller(&request)?, request.remote_addr());
        let order = self.check().transfer_leader(request.get_ref());
        let node = self.order(&caller, from, "transfer-leader", order).await?;
        Ok(Response::new(api::TransferLeaderResponse { node }))
    }

    async fn change_members(
        &self,
        request: Request<api::ChangeMembersRequest>,
    ) -> Result<Response<api::ChangeMembersResponse>, Status> {
        let (caller, from) = (Self::caller(&request)?, request.remote_addr());
        let order = self.check().change_members(request.get_ref());
        let node = self.order(&caller, from, "change-members", order).await?;
        Ok(Response::new(api::ChangeMembersResponse { node }))
    }
}
