//! The common parts of both listeners: login, cancellation, and bounds.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use orthodrome_core::ordered::OrdMap;

use tokio::net::TcpListener;
use tokio::sync::{Notify, Semaphore};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use super::auth::random_bytes;
use super::session::Proxy;
use super::stream::{LOGIN_BYTES_MAX, MESSAGE_BYTES_MAX, Stream, malformed};

/// Maximum number of connections of both kinds, including those of clients that have not logged in.
const CONNECTIONS_MAX: usize = 10_000;
/// Time limit of a login.
const LOGIN_TIME: Duration = Duration::from_secs(60);

/// The clients' side of a proxy.
pub(crate) struct Front {
    pub(crate) proxy: Arc<Proxy>,
    pub(crate) tls: Option<TlsAcceptor>,
    users: OrdMap<String, String>,
    clients: Mutex<Clients>,
    connections: Arc<Semaphore>,
}

#[derive(Default)]
struct Clients {
    last: u32,
    running: OrdMap<u32, (u32, Arc<Notify>)>,
}

/// The protocol of a listener.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Speaks {
    Postgres,
    Mysql,
}

/// Lets a client log in within a time limit. Before it has, its messages must be short. `login`
/// returns the stream, and what it has learned.
pub(crate) async fn log_in<T, R>(
    stream: Stream,
    login: impl FnOnce(Stream) -> R,
) -> io::Result<Option<(Stream, T)>>
where
    R: Future<Output = io::Result<Option<(Stream, T)>>>,
{
    log_in_within(LOGIN_TIME, stream, login).await
}

async fn log_in_within<T, R>(
    time: Duration,
    mut stream: Stream,
    login: impl FnOnce(Stream) -> R,
) -> io::Result<Option<(Stream, T)>>
where
    R: Future<Output = io::Result<Option<(Stream, T)>>>,
{
    stream.longest = LOGIN_BYTES_MAX;
    let late = |_| malformed("the client has not logged in within the time limit");
    let found = tokio::time::timeout(time, login(stream)).await.map_err(late)??;
    Ok(found.map(|(mut stream, found)| {
        stream.longest = MESSAGE_BYTES_MAX;
        (stream, found)
    }))
}

/// The place of a client among those that are served; given back when dropped, also by a panic.
pub(crate) struct Place {
    front: Arc<Front>,
    client: u32,
}

impl Place {
    /// The place that [`Front::enter`] gave.
    pub(crate) fn of(front: &Arc<Front>, client: u32) -> Self {
        Self { front: Arc::clone(front), client }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.front.leave(self.client);
    }
}

impl Front {
    pub(crate) fn new(
        proxy: Arc<Proxy>,
        tls: Option<TlsAcceptor>,
        users: OrdMap<String, String>,
    ) -> Self {
        let connections = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        Self { proxy, tls, users, clients: Mutex::default(), connections }
    }

    pub(crate) fn password(&self, user: &str) -> Option<&str> {
        self.users.get(user).map(String::as_str)
    }

    fn clients(&self) -> std::sync::MutexGuard<'_, Clients> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a client, and returns its number and its secret.
    pub(crate) fn enter(&self, cancelled: Arc<Notify>) -> (u32, u32) {
        let secret =
            random_bytes::<4>().iter().fold(0_u32, |secret, byte| secret << 8 | u32::from(*byte));
        let mut clients = self.clients();
        clients.last = clients.last.wrapping_add(1).max(1);
        let id = clients.last;
        clients.running.insert(id, (secret, cancelled));
        (id, secret)
    }

    pub(crate) fn leave(&self, id: u32) {
        self.clients().running.remove(&id);
    }

    pub(crate) fn cancel(&self, id: u32, secret: u32) {
        if let Some((known, cancelled)) = self.clients().running.get(&id)
            && *known == secret
        {
            // This cancels only the running statement; a later one must not be affected.
            cancelled.notify_waiters();
        }
    }

    /// Cancels by number without a secret: MySQL's KILL, which needs a login.
    pub(crate) fn kill(&self, id: u32) -> bool {
        let clients = self.clients();
        let found = clients.running.get(&id);
        found.inspect(|(_, cancelled)| cancelled.notify_waiters()).is_some()
    }

    /// Serves clients until the shutdown.
    pub(crate) async fn listen(
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
                    tokio::time::sleep(orthodrome_server::socket::ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let Ok(connection) = self.connections.clone().try_acquire_owned() else {
                warn!("too many clients; refused a connection");
                continue;
            };
            let Some(files) = orthodrome_server::socket::admit() else { continue };
            orthodrome_server::socket::prepare(&tcp);
            let (front, ending) = (self.clone(), ending.clone());
            tokio::spawn(async move {
                let _places = (connection, files);
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

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt as _;

    use super::*;

    /// A login that reads one message of PostgreSQL's protocol.
    async fn login(mut stream: Stream) -> io::Result<Option<(Stream, usize)>> {
        let message = super::super::postgres_wire::read(&mut stream).await?;
        Ok(Some((stream, message.body.len())))
    }

    #[tokio::test]
    async fn a_login_has_a_deadline() {
        let (_client, server) = tokio::io::duplex(64);
        let silent = log_in_within(Duration::from_millis(1), Stream::new(server), login).await;
        assert!(silent.is_err_and(|error| error.to_string().contains("time limit")));
    }

    #[tokio::test]
    async fn messages_are_short_before_a_login_and_may_be_long_after_it() {
        for (length, is_in) in [(100, true), (LOGIN_BYTES_MAX, true), (LOGIN_BYTES_MAX + 1, false)]
        {
            let (mut client, server) = tokio::io::duplex(1 << 20);
            client.write_u8(b'p').await.unwrap();
            client.write_u32(u32::try_from(length).unwrap()).await.unwrap();
            client.write_all(&vec![b'x'; length - 4]).await.unwrap();
            let found = log_in(Stream::new(server), login).await;
            assert_eq!(found.is_ok(), is_in, "{length}");
            if let Ok(Some((stream, read))) = found {
                assert_eq!((stream.longest, read), (MESSAGE_BYTES_MAX, length - 4));
            }
        }
    }
}
