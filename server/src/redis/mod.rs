//! The listener for clients of Redis: RESP2 and RESP3 in front of the transaction API.
//!
//! `request` reads requests, `reply` writes answers. `connection` is one client: it collects the
//! commands that arrived together, or between `MULTI` and `EXEC`, into one list. `run` runs such a
//! list as one transaction, and tries again after conflicts. `scripts` knows the texts of scripts.
//! `listing` answers commands that list keys, with scans; `glob` has their patterns. `subscribe`
//! answers commands of clients that receive messages, which `messages` finds. `blocking` answers
//! commands that block their clients until a list or sorted set has an element. What the other
//! commands do to data is in `orthodrome_core::procedure::redis`. `local` answers commands that touch
//! no data.
//!
//! Clients need the credentials of the gRPC API, and the bounds are those of that API
//! (`docs/redis.md`).

use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use crate::service::{Front, Principal, Tls};

mod blocking;
mod connection;
mod glob;
mod listing;
mod local;
mod messages;
mod names;
mod reply;
mod request;
mod run;
mod scripts;
mod subscribe;
#[cfg(test)]
mod tests;

use connection::Connection;
use listing::Listings;
use names::Names;
use run::Runner;

/// How long a TLS handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// The server's side of TLS with the settings of the gRPC API.
///
/// # Errors
/// What is wrong with the certificate or the key.
pub(crate) fn acceptor(tls: &Tls) -> Result<TlsAcceptor, String> {
    let certificates = |pem: &[u8]| {
        CertificateDer::pem_slice_iter(pem)
            .collect::<Result<Vec<_>, _>>()
            .map_err(|error| format!("a certificate for Redis clients: {error}"))
    };
    let chain = certificates(&tls.certificate)?;
    let key = PrivateKeyDer::from_pem_slice(&tls.key)
        .map_err(|error| format!("the key for Redis clients: {error}"))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?;
    let builder = match &tls.client_authority {
        None => builder.with_no_client_auth(),
        Some(authority) => {
            let mut roots = RootCertStore::empty();
            for certificate in certificates(authority)? {
                roots.add(certificate).map_err(|error| error.to_string())?;
            }
            // Optional, because a token is enough.
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
                .allow_unauthenticated()
                .build()
                .map_err(|error| error.to_string())?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let config = builder.with_single_cert(chain, key).map_err(|error| error.to_string())?;
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// Serves clients of Redis until `ending`; then finishes the commands that run, and returns.
pub(crate) async fn serve(
    front: Arc<Front>,
    listener: TcpListener,
    acceptor: Option<TlsAcceptor>,
    ending: CancellationToken,
) {
    let places = Arc::new(Semaphore::new(front.limits().connections_max));
    let listings = Listings::new(ending.clone());
    let runner = Arc::new(Runner::new(Arc::clone(&front), Names::default(), listings));
    let mut connections = JoinSet::new();
    let mut number = 0_u64;
    loop {
        let accepted = tokio::select! {
            () = ending.cancelled() => break,
            Some(_) = connections.join_next() => continue,
            accepted = listener.accept() => accepted,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a Redis client");
                tokio::time::sleep(crate::socket::ACCEPT_PAUSE).await;
                continue;
            }
        };
        number += 1;
        let place = Arc::clone(&places).try_acquire_owned().ok().zip(crate::socket::admit());
        let Some(place) = place else {
            // The text that Redis uses; a client that does not read it sees the end.
            let mut stream = stream;
            let _ = stream.try_write(b"-ERR max number of clients reached\r\n");
            let _ = stream.shutdown().await;
            continue;
        };
        let (runner, acceptor, ending) = (Arc::clone(&runner), acceptor.clone(), ending.clone());
        connections.spawn(async move {
            runner.front().redis_connections().inc();
            let ended = welcome(stream, acceptor, &runner, number, ending).await;
            runner.front().redis_connections().dec();
            if let Err(error) = ended {
                tracing::debug!(%error, number, "a Redis client's connection ended");
            }
            drop(place);
        });
    }
    while connections.join_next().await.is_some() {}
}

/// Serves one client.
async fn welcome(
    stream: TcpStream,
    acceptor: Option<TlsAcceptor>,
    runner: &Arc<Runner>,
    number: u64,
    ending: CancellationToken,
) -> std::io::Result<()> {
    crate::socket::prepare(&stream);
    let anybody = runner.front().anybody();
    let Some(acceptor) = acceptor else {
        return talk(stream, anybody, runner, number, ending).await;
    };
    let stream = tokio::time::timeout(HANDSHAKE, acceptor.accept(stream))
        .await
        .map_err(|_| std::io::Error::from(std::io::ErrorKind::TimedOut))??;
    let leaf = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
    let holder = leaf.and_then(|leaf| runner.front().by_certificate(leaf));
    talk(stream, holder.or(anybody), runner, number, ending).await
}

async fn talk(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    caller: Option<Arc<Principal>>,
    runner: &Arc<Runner>,
    number: u64,
    ending: CancellationToken,
) -> std::io::Result<()> {
    Connection::new(Arc::clone(runner), caller, number).run(stream, ending).await
}
