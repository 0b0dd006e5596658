//! The connections that other processes have opened: one from each node.
//!
//! Two processes with one node id must not both take part in the cluster: each would acknowledge what
//! the other does not know. So a connection is refused while another process with the same id is
//! connected and lives. A process that has ended closes its connection. A connection whose machine is
//! gone is silent. And a ping that was sent after the new process introduced itself proves that the
//! old process lives; its number is the sender's clock.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use orthodrome_core::NodeId;
use orthodrome_core::ordered::OrdMap;
use tokio_util::sync::CancellationToken;

use super::handshake::HandshakeError;

/// A connection that was silent for this long may be replaced: three pings are missing.
const SILENT: Duration = Duration::from_secs(3);
/// A ping must have been sent so long after the introduction of another process to prove life: more
/// than messages travel.
const LATER: Duration = Duration::from_secs(1);
/// Interval at which a new process looks at the old connection.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Number of pings after which the reference of their times is renewed, because clocks drift.
const PINGS: u32 = 64;

/// One connection.
#[derive(Debug)]
pub(super) struct Incoming {
    /// The process that opened it; 0 for one of an earlier version.
    instance: u64,
    /// Cancelled when it has ended, or must end.
    pub(super) ended: CancellationToken,
    signs: Mutex<Signs>,
    begun: Instant,
}

/// The signs of life of a connection. Times are microseconds since it began.
#[derive(Debug)]
struct Signs {
    heard: Instant,
    /// When the last ping was sent, at the latest.
    sent: Option<i64>,
    /// The least difference between the time here and the number of a ping, of this and of the
    /// previous [`PINGS`] pings: that of the ping that travelled fastest.
    least: [i64; 2],
    pings: u32,
}

impl Incoming {
    fn new(instance: u64, ended: CancellationToken) -> Self {
        let now = Instant::now();
        let signs = Signs { heard: now, sent: None, least: [i64::MAX; 2], pings: 0 };
        Self { instance, ended, signs: Mutex::new(signs), begun: now }
    }

    fn signs(&self) -> MutexGuard<'_, Signs> {
        self.signs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn since_begun(&self, time: Instant) -> i64 {
        let since = time.saturating_duration_since(self.begun);
        i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
    }

    /// Something has arrived.
    pub(super) fn heard(&self) {
        self.signs().heard = Instant::now();
    }

    /// A ping has arrived.
    pub(super) fn pinged(&self, number: u64) {
        let number = i64::try_from(number).unwrap_or(i64::MAX);
        let here = self.since_begun(Instant::now());
        let mut signs = self.signs();
        let [least, before] = signs.least;
        let least = least.min(here.saturating_sub(number));
        signs.sent = Some(number.saturating_add(least.min(before)));
        signs.pings += 1;
        signs.least = match signs.pings % PINGS {
            0 => [i64::MAX, least],
            _ => [least, before],
        };
    }

    fn is_silent(&self) -> bool {
        self.signs().heard.elapsed() > SILENT
    }

    fn has_sent_after(&self, time: Instant) -> bool {
        let time = self.since_begun(time);
        self.signs().sent.is_some_and(|sent| sent >= time)
    }
}

type Current = Arc<Mutex<OrdMap<NodeId, Arc<Incoming>>>>;

/// The newest connection from each peer.
#[derive(Clone, Debug, Default)]
pub(super) struct Connections(Current);

/// The place of a connection among [`Connections`], given back when it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    peer: NodeId,
    pub(super) incoming: Arc<Incoming>,
    of: Connections,
}

impl Connections {
    fn all(&self) -> MutexGuard<'_, OrdMap<NodeId, Arc<Incoming>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Admits a process. Its own earlier connection ends. If another process is connected as `peer`,
    /// waits until that has ended, is silent, or has proved that it lives.
    ///
    /// # Errors
    /// The other process lives. `me` is the node that says so.
    pub(super) async fn admit(
        &self,
        me: NodeId,
        peer: NodeId,
        instance: u64,
        stop: CancellationToken,
    ) -> Result<Place, HandshakeError> {
        let arrived = Instant::now();
        loop {
            let older = {
                let mut all = self.all();
                let older = all.get(&peer).filter(|older| {
                    let is_other = ![0, older.instance].contains(&instance) && older.instance != 0;
                    is_other && !older.ended.is_cancelled() && !older.is_silent()
                });
                let Some(older) = older.cloned() else {
                    let incoming = Arc::new(Incoming::new(instance, stop.child_token()));
                    if let Some(older) = all.insert(peer, incoming.clone()) {
                        older.ended.cancel();
                    }
                    return Ok(Place { peer, incoming, of: self.clone() });
                };
                older
            };
            if older.has_sent_after(arrived + LATER) {
                return Err(HandshakeError::RunsElsewhere { node: peer, to: me });
            }
            tokio::select! {
                () = older.ended.cancelled() => {}
                () = tokio::time::sleep(LOOK_EVERY) => {}
            }
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.incoming.ended.cancel();
        let mut all = self.of.all();
        if all.get(&self.peer).is_some_and(|newest| Arc::ptr_eq(newest, &self.incoming)) {
            all.remove(&self.peer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ME: NodeId = NodeId(2);
    const PEER: NodeId = NodeId(1);

    async fn admit(of: &Connections, instance: u64) -> Result<Place, HandshakeError> {
        of.admit(ME, PEER, instance, CancellationToken::new()).await
    }

    /// Pings as a process does that began to count with the connection, until it is dropped.
    fn alive(place: &Place) -> tokio::task::JoinHandle<()> {
        let incoming = place.incoming.clone();
        tokio::spawn(async move {
            loop {
                incoming.heard();
                let since = incoming.begun.elapsed();
                incoming.pinged(u64::try_from(since.as_micros()).unwrap());
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        })
    }

    #[tokio::test]
    async fn another_process_with_the_same_id_is_refused_while_the_first_lives() {
        let of = Connections::default();
        let first = admit(&of, 7).await.unwrap();
        let pings = alive(&first);
        let error = admit(&of, 8).await.unwrap_err();
        assert!(matches!(error, HandshakeError::RunsElsewhere { node: PEER, to: ME }), "{error}");
        assert!(!first.incoming.ended.is_cancelled());
        // The first may connect again, and a process of an earlier version is not distinguished.
        let again = admit(&of, 7).await.unwrap();
        assert!(first.incoming.ended.is_cancelled());
        drop(admit(&of, 0).await.unwrap());
        drop((again, first));
        pings.abort();
        assert!(of.all().is_empty());
    }

    #[tokio::test]
    async fn a_restart_is_admitted_as_soon_as_the_old_connection_has_ended() {
        let of = Connections::default();
        let first = admit(&of, 7).await.unwrap();
        let pings = alive(&first);
        let began = Instant::now();
        let (second, ()) = tokio::join!(admit(&of, 8), async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            drop(first);
        });
        let took = began.elapsed();
        assert!(second.is_ok() && took < Duration::from_secs(1), "{took:?}");
        pings.abort();
    }

    #[tokio::test]
    async fn a_silent_connection_is_replaced_and_what_was_under_way_proves_nothing() {
        let of = Connections::default();
        let first = admit(&of, 7).await.unwrap();
        first.incoming.pinged(0);
        let incoming = first.incoming.clone();
        // What the machine sent before it was lost arrives late, for a while.
        let rest = tokio::spawn(async move {
            for number in 1..15_u64 {
                tokio::time::sleep(Duration::from_millis(100)).await;
                incoming.heard();
                incoming.pinged(number * 1_000);
            }
        });
        let second = admit(&of, 8).await.unwrap();
        assert!(rest.is_finished() && first.incoming.ended.is_cancelled());
        drop(first);
        assert!(Arc::ptr_eq(&of.all()[&PEER], &second.incoming));
    }
}
