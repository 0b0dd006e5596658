//! Runs a node from its configuration file: the process of `serve`.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use orthodrome_protocols::registry::{self, Registered, Row, UnknownProtocol, Visitor};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{NodeHandle, Settings, StartError, check_replacement, start};
use crate::Going;
use crate::audit::{AuditLog, Event};
use crate::config::NodeConfig;
use crate::service::{self, Listeners, ServiceConfig, ServiceError};
use crate::storage::Expected;

/// Why a node's process ended, or did not start.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The process cannot listen at an address.
    #[error("{field}: cannot listen on {address}: {source}; is another process using it?")]
    Listen {
        /// The field of the file that contains the address.
        field: &'static str,
        /// The address.
        address: String,
        /// The cause.
        source: io::Error,
    },
    /// The protocol is unknown.
    #[error(transparent)]
    Protocol(#[from] UnknownProtocol),
    /// The node cannot start.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The audit log cannot be opened.
    #[error("audit_log: cannot open {}: {source}; use a file that the node may write", path.display())]
    Audit {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The client service cannot start.
    #[error(transparent)]
    Service(#[from] ServiceError),
    /// The node stopped because of an internal failure.
    #[error("this node has stopped: {0}")]
    Failed(String),
}

/// Nodes that are told to stop within this time stop together: orders reach them at different times.
const TOGETHER: Duration = Duration::from_secs(1);

/// Time limit for the delivery of ready answers when the node ends.
const LAST_ANSWERS: Duration = Duration::from_secs(2);

/// Starts a node with the protocol called `name`, and with the protocol's settings for its
/// placement.
///
/// # Errors
/// There is no such protocol; or the node fails to start, as [`start`] says.
pub fn start_by_name(
    name: &str,
    settings: Settings,
    listener: TcpListener,
) -> Result<Going<Result<NodeHandle, StartError>>, UnknownProtocol> {
    registry::with(name, Starter { name, settings, listener })
}

/// Checks what is expected of the data against the protocol, without a look at the data.
///
/// # Errors
/// The node would not start.
pub fn check(config: &NodeConfig) -> Result<(), RunError> {
    let (protocol, settings) = (config.protocol, &config.node);
    Ok(registry::with(protocol, Checker { protocol, settings })??)
}

/// Runs a node until `stop` resolves, and then shuts it down in an orderly way; or until it fails.
/// `ready` is called with the address for clients when the node serves.
///
/// # Errors
/// [`RunError::Failed`] if the node ended because of an internal failure; otherwise it never
/// served.
pub fn run(
    config: NodeConfig,
    ready: impl FnOnce(SocketAddr) + Send + 'static,
    stop: impl Future<Output = ()> + Send + 'static,
) -> Going<Result<(), RunError>> {
    going(config, Box::new(ready), Box::pin(stop))
}

/// Without type parameters, so that everything that a node does is compiled here and once, and not
/// in every program that calls [`run`].
fn going(
    config: NodeConfig,
    ready: Box<dyn FnOnce(SocketAddr) + Send>,
    stop: Going<()>,
) -> Going<Result<(), RunError>> {
    Box::pin(run_until(config, ready, stop))
}

async fn run_until(
    config: NodeConfig,
    ready: Box<dyn FnOnce(SocketAddr) + Send>,
    stop: Going<()>,
) -> Result<(), RunError> {
    if config.node.tls.is_none() {
        warn!("no `tls`: nodes communicate without encryption, on loopback only");
    }
    let peers = listen("listen.peer", &config.listen_peer).await?;
    let clients = listen("listen.client", &config.listen_client).await?;
    let redis = match &config.listen_redis {
        Some(address) => Some(listen("redis.listen", address).await?),
        None => None,
    };
    let place = clients.local_addr().map_err(ServiceError::from)?;
    let audit = open_audit_log(&config)?;
    let node = start_by_name(config.protocol, config.node.clone(), peers)?.await?;
    let gateway = Arc::new(node.gateway());
    let ending = CancellationToken::new();
    let ended = ending.clone().cancelled_owned();
    let map = config.node.map.clone();
    if let Some(redis) = &redis {
        let place = redis.local_addr().map_err(ServiceError::from)?;
        info!(address = %place, "serving clients of Redis");
    }
    let listeners = Listeners { clients, redis };
    let service = ServiceConfig { audit: Some(audit.clone()), ..config.service.clone() };
    let data = match config.node.expected {
        Expected::Data | Expected::Either => "existing",
        Expected::NewCluster => "new-cluster",
        Expected::Replacement => "replace",
    };
    audit.note(Event::Start { version: env!("CARGO_PKG_VERSION"), data }).await;
    let mut serving =
        tokio::spawn(service::serve(gateway, map, listeners, service, Box::pin(ended)));
    info!(address = %place, "serving clients");
    ready(place);
    let outcome = tokio::select! {
        () = stop => Ok(()),
        why = node.failed() => Err(RunError::Failed(why)),
        served = &mut serving => Err(match served {
            Ok(Ok(())) => RunError::Failed("the service for clients stopped unexpectedly".into()),
            Ok(Err(error)) => RunError::Failed(error.to_string()),
            Err(panicked) => RunError::Failed(panicked.to_string()),
        }),
    };
    if outcome.is_ok() {
        info!("shutting down");
        // The node stops first: it answers pending requests through the service.
        node.shutdown(config.shutdown_within, TOGETHER).await;
    } else {
        node.kill().await;
    }
    ending.cancel();
    if !serving.is_finished() {
        // A client that does not take its answer in time does not get it.
        let _ = tokio::time::timeout(LAST_ANSWERS, serving).await;
    }
    let why = match &outcome {
        Ok(()) => "a signal asked for it".into(),
        Err(error) => error.to_string(),
    };
    audit.note(Event::Stop { why }).await;
    outcome
}

/// Opens the audit log before anything starts. Its directory may be that of the data, which the
/// first start creates.
fn open_audit_log(config: &NodeConfig) -> Result<AuditLog, RunError> {
    let path = &config.audit_log;
    let opened = path.parent().map_or(Ok(()), std::fs::create_dir_all);
    opened
        .and_then(|()| AuditLog::open(path, config.node.node))
        .map_err(|source| RunError::Audit { path: path.clone(), source })
}

struct Starter<'a> {
    name: &'a str,
    settings: Settings,
    listener: TcpListener,
}

impl Visitor for Starter<'_> {
    type Out = Going<Result<NodeHandle, StartError>>;

    fn visit<P: Registered>(self, _: &'static Row) -> Self::Out {
        let protocol = P::configure(&self.settings.map, self.name);
        Box::pin(start::<P>(self.settings, protocol, self.listener))
    }
}

struct Checker<'a> {
    protocol: &'a str,
    settings: &'a Settings,
}

impl Visitor for Checker<'_> {
    type Out = Result<(), StartError>;

    fn visit<P: Registered>(self, _: &'static Row) -> Self::Out {
        check_replacement::<P>(self.protocol, self.settings)
    }
}

async fn listen(field: &'static str, address: &str) -> Result<TcpListener, RunError> {
    let address = address.to_owned();
    TcpListener::bind(&address).await.map_err(|source| RunError::Listen { field, address, source })
}
