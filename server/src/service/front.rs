//! What the listener of another protocol needs of the service: who a client is, room for requests,
//! and transactions of one round.

use std::sync::Arc;
use std::time::Duration;

use orthodrome_core::scan::{KeyRange, Page, Scan};
use orthodrome_core::txn::Priority;
use orthodrome_core::{ClientId, Outcome, Txn};
use prometheus_client::metrics::gauge::Gauge;
use tokio::time::Instant;
use tonic::{Code, Status};

use super::Service;
use super::access::{Access, DEFAULT_KEYSPACE, Principal, Role};
use super::admission::Held;
use super::limits::Limits;
use super::metrics::Timing;
use crate::gateway::{Description, Finished, GatewayError, Health};
use crate::scan::{Batches, ScanFailed};

/// A handle on the service for another listener of the same node.
pub(crate) struct Front {
    service: Service,
    access: Access,
}

/// Bytes of requests that count among those of the node until this is dropped.
#[derive(Debug)]
pub(crate) struct HeldBytes {
    held: Held,
    bytes: usize,
}

impl HeldBytes {
    /// How many.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

/// Why a transaction did not run. It had no effect.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// The node is busy. The same request may succeed after a pause.
    Busy(String),
    /// The caller may not do this.
    Denied(String),
    /// The same request will not succeed here.
    Never(String),
}

impl Front {
    pub(super) fn new(service: Service, access: Access) -> Self {
        Self { service, access }
    }

    /// The caller that needs no credential, if access is open to everybody.
    pub(crate) fn anybody(&self) -> Option<Arc<Principal>> {
        self.access.is_open().then(|| Arc::new(Principal::new("anybody", Role::Admin)))
    }

    /// The caller with this token, and with this name if one is given.
    pub(crate) fn by_token(&self, name: Option<&[u8]>, token: &[u8]) -> Option<Arc<Principal>> {
        let found = self.access.by_token(token)?;
        name.is_none_or(|name| name == found.name.as_bytes()).then_some(found)
    }

    /// The caller with this certificate, which the handshake has checked.
    pub(crate) fn by_certificate(&self, der: &[u8]) -> Option<Arc<Principal>> {
        self.access.by_certificate(der)
    }

    /// Whether a caller may read, and whether it may write.
    pub(crate) fn may(&self, caller: &Principal, is_write: bool) -> bool {
        let wanted = if is_write { Role::Write } else { Role::Read };
        caller.require(DEFAULT_KEYSPACE, wanted).is_ok()
    }

    /// The bounds of requests.
    pub(crate) fn limits(&self) -> &Limits {
        &self.service.inner.limits
    }

    /// The node's description of itself.
    pub(crate) fn describe(&self) -> Description {
        self.service.inner.transactions.describe()
    }

    /// The region of transactions that begin here.
    pub(crate) fn home(&self) -> orthodrome_core::RegionId {
        let gateway = self.describe().gateway;
        self.service.inner.cluster.region_of(gateway)
    }

    /// How long the node has been serving.
    pub(crate) fn uptime(&self) -> Duration {
        self.service.inner.started.elapsed()
    }

    /// Counts a command of the Redis protocol.
    pub(crate) fn count_redis(&self, command: &'static str, is_error: bool) {
        self.service.inner.metrics.redis_command(command, is_error);
    }

    /// The number of connections of the Redis protocol.
    pub(crate) fn redis_connections(&self) -> &Gauge {
        &self.service.inner.metrics.redis_connections
    }

    /// A new client id.
    pub(crate) async fn register(&self) -> Result<ClientId, GatewayError> {
        self.service.inner.transactions.register().await
    }

    /// Counts bytes of a request among those of the node.
    ///
    /// # Errors
    /// There is no room.
    pub(crate) fn hold(&self, bytes: usize) -> Result<HeldBytes, String> {
        let held = Held::default();
        let admission = &self.service.inner.admission;
        admission.charge(&held, bytes).map_err(|status| status.message().to_owned())?;
        Ok(HeldBytes { held, bytes })
    }

    /// Counts more bytes.
    ///
    /// # Errors
    /// There is no room.
    pub(crate) fn hold_more(&self, held: &mut HeldBytes, bytes: usize) -> Result<(), String> {
        let admission = &self.service.inner.admission;
        admission.charge(&held.held, bytes).map_err(|status| status.message().to_owned())?;
        held.bytes += bytes;
        Ok(())
    }

    /// Runs a transaction of one round.
    ///
    /// # Errors
    /// It had no effect.
    ///
    /// `is_write`: the caller changes something. A transaction that only removes what has expired
    /// declares writes, too, and needs no permission to write.
    pub(crate) async fn run(
        &self,
        caller: &Principal,
        txn: Txn,
        is_write: bool,
    ) -> Result<Finished, Refusal> {
        let service = &self.service;
        let wanted = if is_write { Role::Write } else { Role::Read };
        let _admitted = service.inner.admission.admit().map_err(|status| refusal(&status))?;
        let txn = service.enter_as(caller, txn, wanted).map_err(|status| refusal(&status))?;
        let timing = Timing::start(&txn);
        let finished = service.run(txn).await.map_err(|status| refusal(&status))?;
        service.inner.metrics.end(timing, finished.path, finished.outcome);
        Ok(finished)
    }

    /// Scans a range of keys: one page.
    ///
    /// # Errors
    /// The node did not begin the scan. The result inside says whether the scan failed.
    pub(crate) async fn scan(
        &self,
        caller: &Principal,
        scan: Scan,
    ) -> Result<Result<Page, ScanFailed>, Refusal> {
        let inner = &self.service.inner;
        let _admitted = inner.admission.admit().map_err(|status| refusal(&status))?;
        let may = caller.require(DEFAULT_KEYSPACE, Role::Read);
        may.map_err(|status| refusal(&status))?;
        let began = Instant::now();
        let scanned = inner.transactions.scan(scan, Priority::LOW).await;
        inner.metrics.scanned(began.elapsed(), Priority::LOW, scanned.is_ok());
        Ok(scanned)
    }

    /// Watches a range of keys from now on. Whoever drops the receiver ends the watch.
    ///
    /// # Errors
    /// The caller may not read. The result inside says whether the watch began.
    pub(crate) fn watch(
        &self,
        caller: &Principal,
        range: KeyRange,
    ) -> Result<Result<Batches, ScanFailed>, Refusal> {
        let may = caller.require(DEFAULT_KEYSPACE, Role::Read);
        may.map_err(|status| refusal(&status))?;
        Ok(self.service.inner.transactions.watch(range, None))
    }

    /// Asks for the outcome of a transaction of one round that began here, and ends it if it has
    /// none. The outcome stays unknown if the node cannot find it out.
    pub(crate) async fn resolve(&self, txn: Txn) -> Finished {
        let timing = Timing::resolve(&txn);
        let inner = &self.service.inner;
        let ended = inner.transactions.resolve(txn, Default::default(), None).await;
        let finished = ended.unwrap_or_else(|error| {
            tracing::debug!(%error, "cannot resolve a transaction of a Redis client yet");
            Finished { outcome: Outcome::Unknown, reads: None, path: "lost" }
        });
        inner.metrics.end(timing, finished.path, finished.outcome);
        finished
    }

    /// True if the node cannot serve now.
    pub(crate) fn is_ending(&self) -> bool {
        self.describe().health != Health::Serving
    }
}

fn refusal(status: &Status) -> Refusal {
    let text = status.message().to_owned();
    match status.code() {
        Code::ResourceExhausted => Refusal::Busy(text),
        Code::PermissionDenied | Code::Unauthenticated => Refusal::Denied(text),
        Code::Ok
        | Code::Cancelled
        | Code::Unknown
        | Code::InvalidArgument
        | Code::DeadlineExceeded
        | Code::NotFound
        | Code::AlreadyExists
        | Code::FailedPrecondition
        | Code::Aborted
        | Code::OutOfRange
        | Code::Unimplemented
        | Code::Internal
        | Code::Unavailable
        | Code::DataLoss => Refusal::Never(text),
    }
}
