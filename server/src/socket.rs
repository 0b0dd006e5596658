//! The settings of clients' connections, and how many there may be.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::kernel;

/// File descriptors that clients leave to the process: for its logs and other files, and for its
/// connections with other nodes. At most half of all.
const RESERVED: usize = 1_024;

/// A peer that says nothing for this time is asked by the operating system whether it is there.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
/// The time between two such questions.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// The number of questions without an answer after which the connection ends.
const KEEPALIVE_RETRIES: u32 = 3;

/// The pause after a failed accept, as when the process has no more file descriptors: trying at once
/// would cost a core.
pub const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The file descriptors that clients of this process may use.
fn descriptors() -> &'static Arc<Semaphore> {
    static DESCRIPTORS: OnceLock<Arc<Semaphore>> = OnceLock::new();
    DESCRIPTORS.get_or_init(|| {
        let all = kernel::open_files_max();
        let free = all - RESERVED.min(all / 2);
        Arc::new(Semaphore::new(free.min(Semaphore::MAX_PERMITS)))
    })
}

/// Takes the file descriptor of a client that has connected out of those that clients may use, until
/// the permit is dropped. None if clients use all of them; then the caller must close the connection.
/// Without this bound, clients could leave no descriptor for the next file of the log, and the node
/// would stop.
pub fn admit() -> Option<OwnedSemaphorePermit> {
    static IS_FULL: AtomicBool = AtomicBool::new(false);
    let place = Arc::clone(descriptors()).try_acquire_owned().ok();
    let is_full = place.is_none();
    if is_full && !IS_FULL.swap(is_full, Ordering::Relaxed) {
        let most = kernel::open_files_max();
        tracing::warn!(
            "closed a client's connection: clients use all the file descriptors that they may. The \
             process may have {most} (`ulimit -n`, or `LimitNOFILE` of systemd)"
        );
    } else if !is_full {
        IS_FULL.store(false, Ordering::Relaxed);
    }
    place
}

/// Prepares the connection of a client that was accepted. Answers leave at once, and the connection
/// of a peer that has vanished, for example with its power, ends within a minute. A connection
/// works without these settings too, so errors are not returned.
pub fn prepare(stream: &TcpStream) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "TCP_NODELAY");
    }
    if let Err(error) = keep_alive(stream) {
        tracing::debug!(%error, "SO_KEEPALIVE");
    }
}

fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    let settings = TcpKeepalive::new()
        .with_time(KEEPALIVE_IDLE)
        .with_interval(KEEPALIVE_INTERVAL)
        .with_retries(KEEPALIVE_RETRIES);
    let socket = SockRef::from(stream);
    socket.set_tcp_keepalive(&settings)?;
    // Nobody is asked while an answer is not acknowledged: without this, that takes a quarter of an
    // hour.
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(KEEPALIVE_IDLE + KEEPALIVE_INTERVAL * KEEPALIVE_RETRIES))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn peers_that_vanish_are_noticed_within_a_minute() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let _client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        let socket = SockRef::from(&stream);
        assert!(!socket.keepalive().unwrap());
        prepare(&stream);
        assert!(socket.keepalive().unwrap() && socket.tcp_nodelay().unwrap());
        let silence = socket.tcp_keepalive_time().unwrap()
            + socket.tcp_keepalive_interval().unwrap() * socket.tcp_keepalive_retries().unwrap();
        assert!(silence <= Duration::from_secs(60), "{silence:?}");
        #[cfg(target_os = "linux")]
        assert_eq!(socket.tcp_user_timeout().unwrap(), Some(silence), "with an answer on its way");
    }
}
