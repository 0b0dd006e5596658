//! A node from its file: the process that `serve` runs.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use orthodrome_protocols::registry::{self, Registered, Row, UnknownProtocol, Visitor};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{NodeHandle, Settings, StartError, start};
use crate::config::NodeConfig;
use crate::service::{self, ServiceError};

/// Why a node's process ended, or never began.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// An address cannot be listened on.
    #[error("{field}: cannot listen on {address}: {source}; is another process using it?")]
    Listen {
        /// Which field of the file gives it.
        field: &'static str,
        /// The address.
        address: String,
        /// Why.
        source: io::Error,
    },
    /// The protocol cannot be served.
    #[error(transparent)]
    Protocol(#[from] UnknownProtocol),
    /// The node cannot start.
    #[error(transparent)]
    Start(#[from] StartError),
    /// Clients cannot be served.
    #[error(transparent)]
    Service(#[from] ServiceError),
    /// The node stopped because of a fault of its own.
    #[error("this node has stopped: {0}")]
    Failed(String),
}

/// How long answers that are ready may take to reach their clients when the node ends.
const LAST_ANSWERS: Duration = Duration::from_secs(2);

/// Something that goes on elsewhere. Boxed, so that every protocol is compiled into this crate once, and
/// not again into each program and test that runs nodes.
type Going<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Starts a node that speaks the protocol called `name`, with the protocol's settings for its map.
///
/// # Errors
/// There is no such protocol; the node itself may fail to start as [`start`] says.
pub fn start_by_name(
    name: &str,
    settings: Settings,
    listener: TcpListener,
) -> Result<Going<Result<NodeHandle, StartError>>, UnknownProtocol> {
    registry::with(name, Starter { name, settings, listener })
}

/// Runs a node until `stop` is ready, then ends it in good order; or until it fails. `ready` is told
/// where clients are served, once they are.
///
/// # Errors
/// [`RunError::Failed`] if the node ended because of a fault of its own; otherwise it never served.
pub fn run(
    config: NodeConfig,
    ready: impl FnOnce(SocketAddr) + Send + 'static,
    stop: impl Future<Output = ()> + Send + 'static,
) -> Going<Result<(), RunError>> {
    Box::pin(run_until(config, Box::new(ready), Box::pin(stop)))
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
    let place = clients.local_addr().map_err(ServiceError::from)?;
    let node = start_by_name(config.protocol, config.node.clone(), peers)?.await?;
    let gateway = Arc::new(node.gateway());
    let ending = CancellationToken::new();
    let ended = ending.clone().cancelled_owned();
    let map = config.node.map.clone();
    let mut serving =
        tokio::spawn(service::serve(gateway, map, clients, config.service.clone(), ended));
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
        // The node first: it answers what is in flight, through the service.
        node.shutdown(config.shutdown_within).await;
    } else {
        node.kill().await;
    }
    ending.cancel();
    if !serving.is_finished() {
        // Who does not take its answer in time does not get it.
        let _ = tokio::time::timeout(LAST_ANSWERS, serving).await;
    }
    outcome
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

async fn listen(field: &'static str, address: &str) -> Result<TcpListener, RunError> {
    let address = address.to_owned();
    TcpListener::bind(&address).await.map_err(|source| RunError::Listen { field, address, source })
}
