//! The common parts of both listeners: login, cancellation, and bounds.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::net::TcpListener;
use tokio::sync::Notify;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use super::auth::random_bytes;
use super::session::Proxy;
use super::stream::Stream;

/// Maximum number of connections of both kinds.
const CONNECTIONS_MAX: usize = 10_000;

/// The clients' side of a proxy.
pub(super) struct Front {
    pub(super) proxy: Arc<Proxy>,
    pub(super) tls: Option<TlsAcceptor>,
    users: BTreeMap<String, String>,
    clients: Mutex<Clients>,
}

#[derive(Default)]
struct Clients {
    last: u32,
    running: BTreeMap<u32, (u32, Arc<Notify>)>,
}

/// The protocol of a listener.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Speaks {
    Postgres,
    Mysql,
}

/// The place of a client among those that are served; given back when dropped, also by a panic.
pub(super) struct Place {
    front: Arc<Front>,
    client: u32,
}

impl Place {
    /// The place that [`Front::enter`] gave.
    pub(super) fn of(front: &Arc<Front>, client: u32) -> Self {
        Self { front: Arc::clone(front), client }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.front.leave(self.client);
    }
}

impl Front {
    pub(super) fn new(
        proxy: Arc<Proxy>,
        tls: Option<TlsAcceptor>,
        users: BTreeMap<String, String>,
    ) -> Self {
        Self { proxy, tls, users, clients: Mutex::default() }
    }

    pub(super) fn password(&self, user: &str) -> Option<&str> {
        self.users.get(user).map(String::as_str)
    }

    fn clients(&self) -> std::sync::MutexGuard<'_, Clients> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a client, and returns its number and its secret.
    pub(super) fn enter(&self, cancelled: Arc<Notify>) -> (u32, u32) {
        let secret =
            random_bytes::<4>().iter().fold(0_u32, |secret, byte| secret << 8 | u32::from(*byte));
        let mut clients = self.clients();
        clients.last = clients.last.wrapping_add(1).max(1);
        let id = clients.last;
        clients.running.insert(id, (secret, cancelled));
        (id, secret)
    }

    pub(super) fn leave(&self, id: u32) {
        self.clients().running.remove(&id);
    }

    pub(super) fn cancel(&self, id: u32, secret: u32) {
        if let Some((known, cancelled)) = self.clients().running.get(&id)
            && *known == secret
        {
            // This cancels only the running statement; a later one must not be affected.
            cancelled.notify_waiters();
        }
    }

    /// Cancels by number without a secret: MySQL's KILL, which needs a login.
    pub(super) fn kill(&self, id: u32) -> bool {
        let clients = self.clients();
        let found = clients.running.get(&id);
        found.inspect(|(_, cancelled)| cancelled.notify_waiters()).is_some()
    }

    /// Serves clients until the shutdown.
    pub(super) async fn listen(
        self: Arc<Self>,
        listener: TcpListener,
        speaks: Speaks,
        ending: CancellationToken,
    ) -> io::Result<()> {
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = ending.cancelled() => return Ok(()),
            };
            let (tcp, from) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    warn!("cannot accept a client: {error}");
                    tokio::time::sleep(crate::socket::ACCEPT_PAUSE).await;
                    continue;
                }
            };
            if self.clients().running.len() >= CONNECTIONS_MAX {
                warn!("too many clients; refused a connection");
                continue;
            }
            crate::socket::prepare(&tcp);
            let (front, ending) = (self.clone(), ending.clone());
            tokio::spawn(async move {
                let stream = Stream::new(tcp);
                let served = async {
                    match speaks {
                        Speaks::Postgres => super::postgres_front::serve(front, stream).await,
                        Speaks::Mysql => super::mysql_front::serve(front, stream).await,
                    }
                };
                tokio::select! {
                    served = served => {
                        if let Err(error) = served {
                            debug!(%from, "a client disconnected: {error}");
                        }
                    }
                    () = ending.cancelled() => {}
                }
            });
        }
    }
}
