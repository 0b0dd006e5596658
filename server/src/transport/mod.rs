//! Messages between processes: framed TCP, with TLS, in both directions.
//!
//! Each process connects to every other one, and sends only on connections that it opened. So each
//! direction has its own connection, queue and emulated delay. A queue is bounded in bytes:
//! messages beyond the bound are dropped, and so is everything queued when a connection cannot be
//! made, because protocols tolerate loss and repeat what matters. Queued messages stay, because the
//! receiver can use the beginning of a series but not its end. Frames of one lane of a connection
//! arrive in order or not at all; control frames go before queued data.

mod delay;
pub mod frame;
pub mod handshake;
mod incoming;

use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::{Buf as _, Bytes, BytesMut};
use orthodrome_core::limits::Limits;
use orthodrome_core::machine::Lane;
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::{NodeId, Rng};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, Semaphore};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{debug, info, warn};

use self::delay::DelayLine;
use self::frame::Frame;
use self::handshake::{Abilities, HandshakeError, Introduction, Process};
use self::incoming::{Connections, Place};
use crate::tls::{self, Tls};

/// Time limit for connecting and for the handshake.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);
/// Interval of pings.
const PING_EVERY: Duration = Duration::from_secs(1);
/// Silence after which a connection counts as dead.
const SILENCE_MAX: Duration = Duration::from_secs(10);
/// First and longest pause between attempts to connect; each is drawn from its upper half.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(2));
/// Maximum number of connections without a completed handshake; further ones are closed at once.
const STRANGERS_MAX: usize = 256;
/// Frames are gathered into writes of about this size.
const WRITE_BYTES: usize = 256 << 10;

/// The receiver of messages that arrive.
pub trait Deliver: Send + Sync + 'static {
    /// Handles a message from a machine of another process; waits while the receiving machine is
    /// behind. `bytes` are the sender's encoding.
    ///
    /// # Errors
    /// The bytes are not a message, or not for a machine here; the connection is closed for this
    /// reason.
    fn deliver(
        &self,
        from: NodeId,
        to: NodeId,
        bytes: Bytes,
    ) -> impl Future<Output = Result<(), String>> + Send;

    /// Handles a request for names, or the answer to one, as [`Deliver::deliver`] does a message.
    ///
    /// # Errors
    /// As there.
    fn names(
        &self,
        from: NodeId,
        to: NodeId,
        is_answer: bool,
        bytes: Bytes,
    ) -> impl Future<Output = Result<(), String>> + Send;

    /// Called when all messages of one read of a connection have been delivered.
    fn delivered(&self);

    /// Called when another process has connected, or was refused because it has another placement of
    /// partitions.
    fn met(&self, peer: NodeId, has_other_placement: bool);

    /// Called when another process refuses this one, because another one with the same id is
    /// connected to it.
    fn runs_elsewhere(&self, peer: NodeId);
}

/// Another process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Peer {
    /// Its identity.
    pub process: Process,
    /// `host:port`.
    pub address: String,
    /// Emulated one-way delay from here to there; zero for none.
    pub delay: Duration,
}

/// The settings of a transport.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The introduction of this process, and the expected other processes.
    pub introduction: Introduction,
    /// Every other process.
    pub peers: Vec<Peer>,
    /// TLS; none for plain TCP.
    pub tls: Option<Tls>,
    /// Bound of each peer's queue, in bytes.
    pub queue_bytes_max: usize,
}

/// Counts since the transport started.
#[derive(Debug, Default)]
struct Counters {
    sent: AtomicU64,
    sent_bytes: AtomicU64,
    lost: AtomicU64,
    received: AtomicU64,
    received_bytes: AtomicU64,
    connects: AtomicU64,
    rtt_us: AtomicU64,
}

/// The link to and from one peer, for status reports.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LinkStatus {
    /// The peer.
    pub peer: NodeId,
    /// Whether frames can be sent to it now.
    pub is_connected: bool,
    /// How long that has been so. A peer that was never connected counts from the start of the
    /// transport.
    pub since: Duration,
    /// Messages written to its connections.
    pub sent: u64,
    /// Their bytes, heads included.
    pub sent_bytes: u64,
    /// Messages dropped because the queue was full or no connection could be made.
    pub lost: u64,
    /// Messages received from it.
    pub received: u64,
    /// Their bytes, heads included.
    pub received_bytes: u64,
    /// Number of connections to it so far.
    pub connects: u64,
    /// Round-trip time of the last ping, without emulated delay, in microseconds.
    pub rtt_us: u64,
    /// Emulated one-way delay of messages from here to there.
    pub delay: Duration,
    /// Queued bytes.
    pub queued_bytes: usize,
}

/// Whether a link is connected, and the time of the last change.
#[derive(Clone, Copy, Debug)]
struct State {
    is_connected: bool,
    since: Instant,
}

/// The state that one peer's tasks share.
struct Link {
    peer: Peer,
    state: Mutex<State>,
    queue: Mutex<Queue>,
    /// The connection, if any thread may write to it: one without TLS.
    socket: Mutex<Option<Socket>>,
    /// It is among [`Transport::unflushed`].
    is_unflushed: AtomicBool,
    /// The peer understands requests for names, as it said when the connection began.
    lists_names: AtomicBool,
    /// It understands that this process is stopping.
    knows_leaving: AtomicBool,
    /// What it has said of its own end.
    end: Mutex<End>,
    ready: Notify,
    limits: Limits,
    counters: Counters,
}

/// A connection that a thread with something to send writes to itself.
struct Socket {
    stream: Arc<TcpStream>,
    /// The bytes that the system has not accepted yet.
    rest: BytesMut,
    /// The time since which the system has accepted nothing.
    blocked: Option<Instant>,
}

impl Socket {
    /// A large message must not hold its memory for ever.
    fn tidy(&mut self) {
        if self.rest.capacity() > 2 * WRITE_BYTES {
            self.rest = BytesMut::new();
        }
    }
}

/// What a peer has said of its end.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum End {
    /// Nothing.
    #[default]
    None,
    /// It is stopping, and transactions of its clients are pending.
    Pending,
    /// It is stopping, and has nothing pending.
    Done,
}

/// The result of an attempt to write everything that is queued.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flushed {
    All,
    /// The system accepts no more at the moment, or another thread is writing.
    Blocked,
    /// There is no connection that any thread may write to.
    NoSocket,
}

#[derive(Default)]
struct Queue {
    /// Frames that go first.
    control: VecDeque<Bytes>,
    data: VecDeque<Bytes>,
    bytes: usize,
}

impl Queue {
    fn lane(&mut self, lane: Lane) -> &mut VecDeque<Bytes> {
        match lane {
            Lane::Control => &mut self.control,
            Lane::Data => &mut self.data,
        }
    }
}

impl Link {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes what the peer understands.
    fn learn(&self, abilities: Abilities) {
        let Abilities { lists_names, knows_leaving } = abilities;
        self.lists_names.store(lists_names, Ordering::Relaxed);
        self.knows_leaving.store(knows_leaving, Ordering::Relaxed);
    }

    /// Tells the peer that this process is stopping, if it is connected and understands that.
    fn say_leaving(&self, has_pending: bool) {
        if self.state().is_connected && self.knows_leaving.load(Ordering::Relaxed) {
            self.push(Lane::Control, frame::leaving(has_pending));
            self.flush();
        }
    }

    fn end(&self) -> MutexGuard<'_, End> {
        self.end.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that the link is connected or is not. The time changes only if this is new.
    fn set_connected(&self, is_connected: bool) {
        let mut state = self.state();
        if state.is_connected != is_connected {
            *state = State { is_connected, since: Instant::now() };
        }
    }

    /// Writes what waits, if the connection lets any thread do that and the system takes it at once.
    /// The rest is the connection's task's.
    fn flush(&self) {
        match self.try_flush() {
            Ok(Flushed::All) => {}
            // The task will get the same error and report it.
            Ok(Flushed::Blocked | Flushed::NoSocket) | Err(_) => self.ready.notify_one(),
        }
    }

    fn try_flush(&self) -> io::Result<Flushed> {
        let Ok(mut socket) = self.socket.try_lock() else {
            // The thread that is writing may have read the queue before this frame was added.
            return Ok(Flushed::Blocked);
        };
        let Some(socket) = socket.as_mut() else {
            return Ok(Flushed::NoSocket);
        };
        let mut frames = Vec::new();
        loop {
            if socket.rest.is_empty() {
                self.take(&mut frames);
                let count = frames.len() as u64;
                for frame in frames.drain(..) {
                    socket.rest.extend_from_slice(&frame);
                }
                if socket.rest.is_empty() {
                    socket.tidy();
                    return Ok(Flushed::All);
                }
                self.counters.sent.fetch_add(count, Ordering::Relaxed);
                let bytes = socket.rest.len() as u64;
                self.counters.sent_bytes.fetch_add(bytes, Ordering::Relaxed);
            }
            match socket.stream.try_write(&socket.rest) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => {
                    socket.rest.advance(written);
                    socket.blocked = None;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    socket.blocked.get_or_insert_with(Instant::now);
                    return Ok(Flushed::Blocked);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// True if the system has accepted nothing for so long that the connection counts as dead.
    fn is_stuck(&self) -> bool {
        let socket = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        let since = socket.as_ref().and_then(|socket| socket.blocked);
        since.is_some_and(|since| since.elapsed() > SILENCE_MAX)
    }

    /// Queues a frame if there is room. Nobody is woken; see [`Link::flush`].
    fn push(&self, lane: Lane, frame: Bytes) {
        let mut queue = self.queue();
        let has_room = self.limits.has_room(lane, queue.bytes, frame.len());
        if has_room {
            queue.bytes += frame.len();
            queue.lane(lane).push_back(frame);
        }
        drop(queue);
        if !has_room {
            self.counters.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Takes frames for about one write; none if nothing is queued.
    fn take(&self, into: &mut Vec<Bytes>) {
        let mut queue = self.queue();
        let mut taken = 0;
        while taken < WRITE_BYTES {
            let next = queue.control.pop_front().or_else(|| queue.data.pop_front());
            let Some(frame) = next else { break };
            taken += frame.len();
            into.push(frame);
        }
        queue.bytes -= taken;
    }

    fn clear(&self) {
        let queue = std::mem::take(&mut *self.queue());
        let lost = queue.control.len() + queue.data.len();
        self.counters.lost.fetch_add(lost as u64, Ordering::Relaxed);
    }

    fn status(&self) -> LinkStatus {
        let Counters { sent, sent_bytes, lost, received, received_bytes, connects, rtt_us } =
            &self.counters;
        let state = *self.state();
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        LinkStatus {
            peer: self.peer.process.node,
            is_connected: state.is_connected,
            since: state.since.elapsed(),
            sent: get(sent),
            sent_bytes: get(sent_bytes),
            lost: get(lost),
            received: get(received),
            received_bytes: get(received_bytes),
            connects: get(connects),
            rtt_us: get(rtt_us),
            delay: self.peer.delay,
            queued_bytes: self.queue().bytes,
        }
    }
}

/// A running transport. Dropping it ends its connections at once.
pub struct Transport {
    /// By server and by gateway.
    links: OrdMap<NodeId, Arc<Link>>,
    delay: Option<DelayLine<(Arc<Link>, Lane, Bytes)>>,
    /// Links with frames that wait for [`Transport::flush`].
    unflushed: Mutex<Vec<Arc<Link>>>,
    stop: CancellationToken,
    tasks: TaskTracker,
    leaving: Arc<Leaving>,
}

/// The end of this process and of others, if they stop together.
#[derive(Debug, Default)]
struct Leaving {
    /// What peers are told: this process is stopping, and has pending transactions or not.
    mine: Mutex<Option<bool>>,
    /// A peer has said something, or is gone.
    changed: Notify,
}

impl std::fmt::Debug for Transport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Transport").field("links", &self.links.keys()).finish_non_exhaustive()
    }
}

impl Transport {
    /// Starts to listen and to connect, on the current tokio runtime.
    ///
    /// # Errors
    /// The operating system has no more threads.
    pub fn start<D: Deliver>(
        settings: Settings,
        listener: TcpListener,
        deliver: Arc<D>,
    ) -> io::Result<Self> {
        let Settings { introduction, peers, tls, queue_bytes_max } = settings;
        let mut links = OrdMap::new();
        let mut own = Vec::new();
        for peer in peers {
            let ids = [peer.process.node, peer.process.gateway];
            let link = Arc::new(Link {
                peer,
                state: Mutex::new(State { is_connected: false, since: Instant::now() }),
                queue: Mutex::default(),
                socket: Mutex::default(),
                is_unflushed: AtomicBool::new(false),
                lists_names: AtomicBool::new(false),
                knows_leaving: AtomicBool::new(false),
                end: Mutex::default(),
                ready: Notify::new(),
                limits: Limits { queue_bytes: queue_bytes_max, ..Limits::SERVER },
                counters: Counters::default(),
            });
            for id in ids {
                links.insert(id, link.clone());
            }
            own.push(link);
        }
        let delay = if own.iter().any(|link| !link.peer.delay.is_zero()) {
            Some(DelayLine::start(|(link, lane, frame): (Arc<Link>, Lane, Bytes)| {
                link.push(lane, frame);
                link.ready.notify_one();
            })?)
        } else {
            None
        };
        let (stop, tasks) = (CancellationToken::new(), TaskTracker::new());
        let leaving = Arc::new(Leaving::default());
        let (stopping, ends) = (stop.clone(), leaving.clone());
        let shared = Arc::new(Shared { introduction, tls, stop: stopping, leaving: ends });
        for link in &own {
            let (link, shared, deliver) = (link.clone(), shared.clone(), deliver.clone());
            let cancelled = stop.clone().cancelled_owned();
            tasks.spawn(async move {
                let mut dialing = pin!(shared.dial(&link, &*deliver));
                tokio::select! { () = &mut dialing => {} () = cancelled => {} }
                link.set_connected(false);
            });
        }
        let acceptor = Acceptor {
            shared,
            links: links.clone(),
            deliver,
            current: Connections::default(),
            tasks: tasks.clone(),
        };
        let accepting = Arc::new(acceptor).listen(listener);
        let cancelled = stop.clone().cancelled_owned();
        tasks.spawn(async move {
            tokio::select! { () = accepting => {} () = cancelled => {} }
        });
        Ok(Self { links, delay, unflushed: Mutex::default(), stop, tasks, leaving })
    }

    /// Sends a message of machine `from` to machine `to`, which must be in another process; `encode`
    /// appends its bytes. Returns at once; the message may be lost.
    pub fn send(&self, from: NodeId, to: NodeId, encode: impl FnOnce(&mut BytesMut)) {
        self.queue(Lane::Data, from, to, encode);
        self.flush();
    }

    /// Writes whatever [`Transport::queue`] has queued, what goes to one process at once.
    pub fn flush(&self) {
        let mut unflushed = self.unflushed.lock().unwrap_or_else(PoisonError::into_inner);
        if unflushed.is_empty() {
            return;
        }
        let links = std::mem::take(&mut *unflushed);
        drop(unflushed);
        for link in links {
            link.is_unflushed.store(false, Ordering::SeqCst);
            link.flush();
        }
    }

    /// Queues a message as [`Transport::send`] does, for the next [`Transport::flush`], in a lane:
    /// control goes before whatever data waits to be written.
    pub fn queue(&self, lane: Lane, from: NodeId, to: NodeId, encode: impl FnOnce(&mut BytesMut)) {
        if let Some(link) = self.link(from, to) {
            self.queue_frame(link, lane, (from, to), frame::message(from, to, encode));
        }
    }

    /// Sends a request for names, or the answer to one, as [`Transport::send`] does a message. A peer
    /// of an earlier version gets none.
    pub fn send_names(
        &self,
        from: NodeId,
        to: NodeId,
        is_answer: bool,
        encode: impl FnOnce(&mut BytesMut),
    ) {
        let link = self.link(from, to);
        if let Some(link) = link.filter(|link| link.lists_names.load(Ordering::Relaxed)) {
            let frame = frame::names(from, to, is_answer, encode);
            self.queue_frame(link, Lane::Data, (from, to), frame);
            self.flush();
        }
    }

    /// A connected peer that does not understand requests for names, because its version is an
    /// earlier one.
    #[must_use]
    pub fn without_names(&self) -> Option<NodeId> {
        let is_old = |link: &&Arc<Link>| {
            link.state().is_connected && !link.lists_names.load(Ordering::Relaxed)
        };
        self.links.values().find(is_old).map(|link| link.peer.process.node)
    }

    fn link(&self, from: NodeId, to: NodeId) -> Option<&Arc<Link>> {
        let link = self.links.get(&to);
        if link.is_none() {
            warn!(%from, %to, "dropped a message to a node that is not in the cluster");
        }
        link
    }

    fn queue_frame(
        &self,
        link: &Arc<Link>,
        lane: Lane,
        (from, to): (NodeId, NodeId),
        frame: Result<Bytes, frame::FrameError>,
    ) {
        let frame = match frame {
            Ok(frame) => frame,
            Err(error) => {
                tracing::error!(%from, %to, %error, "dropped a message");
                link.counters.lost.fetch_add(1, Ordering::Relaxed);
                return;
            }
        };
        match &self.delay {
            Some(line) if !link.peer.delay.is_zero() => {
                line.push(Instant::now() + link.peer.delay, (link.clone(), lane, frame));
            }
            Some(_) | None => {
                link.push(lane, frame);
                if !link.is_unflushed.swap(true, Ordering::SeqCst) {
                    let unflushed = self.unflushed.lock();
                    unflushed.unwrap_or_else(PoisonError::into_inner).push(link.clone());
                }
            }
        }
    }

    /// The links, each once.
    fn peers(&self) -> impl Iterator<Item = &Arc<Link>> {
        let links = self.links.iter().filter(|(id, link)| **id == link.peer.process.node);
        links.map(|(_, link)| link)
    }

    /// Tells all peers that this process is stopping, and whether transactions of its clients are
    /// pending.
    pub fn say_leaving(&self, has_pending: bool) {
        *self.leaving.mine.lock().unwrap_or_else(PoisonError::into_inner) = Some(has_pending);
        for link in self.peers() {
            link.say_leaving(has_pending);
        }
    }

    /// Waits until no peer has said that it is stopping and has pending transactions: they may need
    /// this process. Connected peers that have said nothing have up to `together` to say something,
    /// because all processes may be told to stop at nearly the same time.
    pub async fn others_have_ended(&self, together: Duration) {
        let mut late = pin!(tokio::time::sleep(together));
        let mut is_late = together.is_zero();
        loop {
            let mut changed = pin!(self.leaving.changed.notified());
            // What changes from here on is noticed.
            changed.as_mut().enable();
            let awaits = |link: &Arc<Link>| match *link.end() {
                End::Pending => true,
                End::None => !is_late && link.state().is_connected,
                End::Done => false,
            };
            if !self.peers().any(awaits) {
                return;
            }
            tokio::select! {
                () = changed => {}
                () = &mut late, if !is_late => is_late = true,
            }
        }
    }

    /// Every link, by peer.
    #[must_use]
    pub fn status(&self) -> Vec<LinkStatus> {
        self.peers().map(|link| link.status()).collect()
    }

    /// Ends all connections soon.
    pub fn cancel(&self) {
        self.stop.cancel();
    }

    /// Ends all connections and waits for their tasks.
    pub async fn stop(&self) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }
}

impl Drop for Transport {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

struct Shared {
    introduction: Introduction,
    tls: Option<Tls>,
    stop: CancellationToken,
    leaving: Arc<Leaving>,
}

impl Shared {
    /// Keeps a connection to one peer. It ends only when it is dropped.
    async fn dial(&self, link: &Link, deliver: &impl Deliver) {
        let me = self.introduction.me.node;
        let peer = link.peer.process.node;
        let mut rng = Rng::stream(u64::from(std::process::id()), "dial", peer.0.into());
        let mut pause = BACKOFF.0;
        let mut last_error = String::new();
        loop {
            let connected = timeout(CONNECT_WITHIN, self.connect(link)).await;
            let error = match connected.unwrap_or(Err(HandshakeError::Timeout)) {
                Ok(connection) => {
                    info!(%me, %peer, address = link.peer.address, "connected");
                    link.counters.connects.fetch_add(1, Ordering::Relaxed);
                    link.set_connected(true);
                    let mine = *self.leaving.mine.lock().unwrap_or_else(PoisonError::into_inner);
                    if let Some(has_pending) = mine {
                        link.say_leaving(has_pending);
                    }
                    (pause, last_error) = (BACKOFF.0, String::new());
                    let error = match connection {
                        Connection::Plain(stream) => send_plain(stream, link).await,
                        Connection::Tls(stream) => send_frames(stream, link).await,
                    };
                    link.set_connected(false);
                    self.leaving.changed.notify_waiters();
                    info!(%me, %peer, %error, "connection lost");
                    continue;
                }
                Err(error) => {
                    if let HandshakeError::RunsElsewhere { .. } = error {
                        deliver.runs_elsewhere(peer);
                    }
                    error.to_string()
                }
            };
            // Messages for an unreachable peer are lost, as on a real network.
            link.clear();
            if error != last_error {
                warn!(%me, %peer, address = link.peer.address, error, "cannot connect; will retry");
                last_error = error;
            }
            let half = pause / 2;
            let jitter = rng.below(u64::try_from(half.as_micros()).unwrap_or(u64::MAX));
            tokio::time::sleep(half + Duration::from_micros(jitter)).await;
            pause = (pause * 2).min(BACKOFF.1);
        }
    }

    async fn connect(&self, link: &Link) -> Result<Connection, HandshakeError> {
        let peer = link.peer.process.node;
        let stream = TcpStream::connect(&link.peer.address).await.inspect_err(|error| {
            if let (io::ErrorKind::ConnectionRefused, Some(clock)) =
                (error.kind(), &self.introduction.shared_clock)
            {
                clock.absent(peer);
            }
        })?;
        stream.set_nodelay(true)?;
        let Some(tls) = &self.tls else {
            let mut stream = stream;
            link.learn(handshake::dial(&mut stream, &self.introduction, peer).await?);
            return Ok(Connection::Plain(stream));
        };
        let name = tls::server_name(&self.introduction.cluster, peer).map_err(io::Error::other)?;
        let mut stream: Box<dyn Stream> = Box::new(tls.connector.connect(name, stream).await?);
        link.learn(handshake::dial(&mut stream, &self.introduction, peer).await?);
        Ok(Connection::Tls(stream))
    }
}

/// A connection that this process opened, after its handshake.
enum Connection {
    Plain(TcpStream),
    Tls(Box<dyn Stream>),
}

trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<S: AsyncRead + AsyncWrite + Unpin + Send> Stream for S {}

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
enum Ended {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("the other end closed it")]
    Closed,
    #[error("no message for {SILENCE_MAX:?}")]
    Silence,
    #[error("malformed input: {0}")]
    Frame(#[from] frame::FrameError),
    #[error("the other end sent {0}")]
    Unexpected(&'static str),
    #[error("rejected input: {0}")]
    Rejected(String),
}

/// Lets every thread write to a connection without TLS, and does what they cannot: waits until the
/// system takes more, and gives signs of life.
async fn send_plain(stream: TcpStream, link: &Link) -> Ended {
    /// The link must not keep a connection that has ended.
    struct Lent<'a>(&'a Link);
    impl Drop for Lent<'_> {
        fn drop(&mut self) {
            *self.0.socket.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
    }
    let stream = Arc::new(stream);
    let socket = Socket { stream: stream.clone(), rest: BytesMut::new(), blocked: None };
    *link.socket.lock().unwrap_or_else(PoisonError::into_inner) = Some(socket);
    let _lent = Lent(link);
    let start = Instant::now();
    let mut heard = Instant::now();
    let mut ping = tokio::time::interval(PING_EVERY);
    ping.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut input = BytesMut::new();
    loop {
        let is_blocked = match link.try_flush() {
            Ok(flushed) => flushed == Flushed::Blocked,
            Err(error) => return error.into(),
        };
        // Each branch can be dropped at any point without losing anything.
        tokio::select! {
            () = link.ready.notified() => {}
            writable = stream.writable(), if is_blocked => {
                if let Err(error) = writable {
                    return error.into();
                }
            }
            readable = stream.readable() => {
                let read = match readable {
                    Ok(()) => stream.try_read_buf(&mut input),
                    Err(error) => Err(error),
                };
                match read {
                    Ok(0) => return Ended::Closed,
                    Ok(_) => heard = Instant::now(),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                    Err(error) => return error.into(),
                }
                if let Err(ended) = hear(&mut input, start, link) {
                    return ended;
                }
            }
            _ = ping.tick() => {
                if heard.elapsed() > SILENCE_MAX || link.is_stuck() {
                    return Ended::Silence;
                }
                let now = u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX);
                link.push(Lane::Control, frame::signal(false, now));
            }
        }
    }
}

/// Writes queued frames and pings until the connection ends.
async fn send_frames(stream: Box<dyn Stream>, link: &Link) -> Ended {
    let (mut reader, mut writer) = tokio::io::split(stream);
    let start = Instant::now();
    let mut heard = Instant::now();
    let mut ping = tokio::time::interval(PING_EVERY);
    ping.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut input = BytesMut::new();
    let mut frames = Vec::new();
    let mut gathered = BytesMut::new();
    loop {
        link.take(&mut frames);
        if frames.is_empty() {
            // Each branch can be dropped at any point without losing anything.
            tokio::select! {
                () = link.ready.notified() => {}
                read = reader.read_buf(&mut input) => {
                    match read {
                        Ok(0) => return Ended::Closed,
                        Ok(_) => heard = Instant::now(),
                        Err(error) => return error.into(),
                    }
                    if let Err(ended) = hear(&mut input, start, link) {
                        return ended;
                    }
                }
                _ = ping.tick() => {
                    if heard.elapsed() > SILENCE_MAX {
                        return Ended::Silence;
                    }
                    let now = u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX);
                    frames.push(frame::signal(false, now));
                }
            }
        }
        if frames.is_empty() {
            continue;
        }
        let written = timeout(SILENCE_MAX, write(&mut writer, &mut frames, &mut gathered, link));
        match written.await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return error.into(),
            Err(_) => return Ended::Silence,
        }
    }
}

/// Handles answers to pings.
fn hear(input: &mut BytesMut, start: Instant, link: &Link) -> Result<(), Ended> {
    while let Some(frame) = frame::take(input)? {
        match frame {
            Frame::Pong(sent) => {
                let now = u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX);
                link.counters.rtt_us.store(now.saturating_sub(sent), Ordering::Relaxed);
            }
            Frame::Ping(_) => return Err(Ended::Unexpected("a ping on a connection it accepted")),
            Frame::Message { .. } | Frame::Names { .. } | Frame::Leaving { .. } => {
                return Err(Ended::Unexpected("a message on a connection it accepted"));
            }
        }
    }
    Ok(())
}

async fn write(
    writer: &mut (impl AsyncWrite + Unpin),
    frames: &mut Vec<Bytes>,
    gathered: &mut BytesMut,
    link: &Link,
) -> io::Result<()> {
    let (mut count, mut bytes) = (0, 0);
    for frame in frames.drain(..) {
        count += 1;
        bytes += frame.len() as u64;
        // A large frame goes out by itself; small ones share a write.
        if frame.len() >= WRITE_BYTES / 4 {
            writer.write_all_buf(gathered).await?;
            writer.write_all(&frame).await?;
        } else {
            gathered.extend_from_slice(&frame);
        }
    }
    writer.write_all_buf(gathered).await?;
    writer.flush().await?;
    link.counters.sent.fetch_add(count, Ordering::Relaxed);
    link.counters.sent_bytes.fetch_add(bytes, Ordering::Relaxed);
    Ok(())
}

/// The accepting side.
struct Acceptor<D> {
    shared: Arc<Shared>,
    links: OrdMap<NodeId, Arc<Link>>,
    deliver: Arc<D>,
    current: Connections,
    tasks: TaskTracker,
}

impl<D: Deliver> Acceptor<D> {
    /// Accepts connections. It ends only when it is dropped.
    async fn listen(self: Arc<Self>, listener: TcpListener) {
        let me = self.shared.introduction.me.node;
        let strangers = Arc::new(Semaphore::new(STRANGERS_MAX));
        loop {
            let (stream, address) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Probably there are no more file descriptors; others may be closed in the
                    // meantime.
                    warn!(%me, %error, "cannot accept a connection");
                    tokio::time::sleep(crate::socket::ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let Ok(place) = strangers.clone().try_acquire_owned() else {
                debug!(%me, %address, "closed a connection: too many connections before their handshake");
                continue;
            };
            let acceptor = self.clone();
            let stop = self.shared.stop.clone();
            self.tasks.spawn(async move {
                let greeted = tokio::select! {
                    greeted = timeout(CONNECT_WITHIN, acceptor.greet(stream)) => greeted,
                    () = stop.cancelled() => return,
                };
                drop(place);
                match greeted.unwrap_or(Err(HandshakeError::Timeout)) {
                    Ok((stream, peer, place)) => {
                        acceptor.deliver.met(peer.node, false);
                        acceptor.receive(stream, peer, place).await;
                    }
                    Err(error) => {
                        warn!(%me, %address, %error, "refused a connection");
                        if let HandshakeError::OtherPlacement { node, .. } = error {
                            acceptor.deliver.met(node, true);
                        }
                    }
                }
            });
        }
    }

    /// Passes a frame on to its receiver.
    async fn hand_over(&self, frame: Frame) -> Result<(), String> {
        match frame {
            Frame::Message { from, to, bytes } => self.deliver.deliver(from, to, bytes).await,
            Frame::Names { from, to, is_answer, bytes } => {
                self.deliver.names(from, to, is_answer, bytes).await
            }
            Frame::Ping(_) | Frame::Pong(_) | Frame::Leaving { .. } => Ok(()),
        }
    }

    async fn greet(
        &self,
        stream: TcpStream,
    ) -> Result<(Box<dyn Stream>, Process, Place), HandshakeError> {
        stream.set_nodelay(true)?;
        let mine = &self.shared.introduction;
        let admit = |peer, instance| {
            self.current.admit(mine.me.node, peer, instance, self.shared.stop.clone())
        };
        let Some(tls) = &self.shared.tls else {
            let mut stream: Box<dyn Stream> = Box::new(stream);
            let (peer, place) = handshake::accept(&mut stream, mine, |_| Ok(()), admit).await?;
            return Ok((stream, peer, place));
        };
        let stream = tls.acceptor.accept(stream).await?;
        let (_, connection) = stream.get_ref();
        let certificate = connection.peer_certificates().and_then(|chain| chain.first()).cloned();
        let mut stream: Box<dyn Stream> = Box::new(stream);
        let certified = |process: &Process| match &certificate {
            Some(certificate) => tls::is_for(certificate, &mine.cluster, process.node),
            None => Err("none".into()),
        };
        let (peer, place) = handshake::accept(&mut stream, mine, certified, admit).await?;
        Ok((stream, peer, place))
    }

    /// A peer has said something of its end, or is gone.
    fn on_end(&self, link: &Link, end: End) {
        *link.end() = end;
        self.shared.leaving.changed.notify_waiters();
    }

    async fn receive(&self, stream: Box<dyn Stream>, peer: Process, place: Place) {
        let me = self.shared.introduction.me.node;
        let Some(link) = self.links.get(&peer.node) else { return };
        let ended = tokio::select! {
            ended = self.read_frames(stream, &peer, link, &place) => ended,
            () = place.incoming.ended.cancelled() => return,
        };
        // Nobody waits for a peer that is gone. Another connection of it says the same again.
        self.on_end(link, End::None);
        match ended {
            Ended::Closed | Ended::Io(_) => {
                debug!(%me, peer = %peer.node, %ended, "peer disconnected")
            }
            Ended::Silence | Ended::Frame(_) | Ended::Unexpected(_) | Ended::Rejected(_) => {
                warn!(%me, peer = %peer.node, %ended, "closed a connection");
            }
        }
    }

    async fn read_frames(
        &self,
        stream: Box<dyn Stream>,
        peer: &Process,
        link: &Link,
        place: &Place,
    ) -> Ended {
        let (mut reader, mut writer) = tokio::io::split(stream);
        let mut input = BytesMut::with_capacity(64 << 10);
        loop {
            loop {
                let before = input.len();
                let frame = match frame::take(&mut input) {
                    Ok(Some(frame)) => frame,
                    Ok(None) => break,
                    Err(error) => return error.into(),
                };
                match frame {
                    Frame::Ping(number) => {
                        place.incoming.pinged(number);
                        let answer = frame::signal(true, number);
                        let answered = timeout(SILENCE_MAX, async {
                            writer.write_all(&answer).await?;
                            writer.flush().await
                        });
                        match answered.await {
                            Ok(Ok(())) => {}
                            Ok(Err(error)) => return error.into(),
                            Err(_) => return Ended::Silence,
                        }
                    }
                    Frame::Pong(_) => return Ended::Unexpected("an answer that nobody asked for"),
                    Frame::Leaving { has_pending: true } => self.on_end(link, End::Pending),
                    Frame::Leaving { has_pending: false } => self.on_end(link, End::Done),
                    Frame::Message { from, .. } | Frame::Names { from, .. }
                        if from != peer.node && from != peer.gateway =>
                    {
                        return Ended::Rejected(format!("a message in the name of {from}"));
                    }
                    message @ (Frame::Message { .. } | Frame::Names { .. }) => {
                        let length = (before - input.len()) as u64;
                        link.counters.received.fetch_add(1, Ordering::Relaxed);
                        link.counters.received_bytes.fetch_add(length, Ordering::Relaxed);
                        if let Err(why) = self.hand_over(message).await {
                            return Ended::Rejected(why);
                        }
                    }
                }
            }
            self.deliver.delivered();
            input.reserve(16 << 10);
            match timeout(SILENCE_MAX, reader.read_buf(&mut input)).await {
                Ok(Ok(0)) => return Ended::Closed,
                Ok(Ok(_)) => place.incoming.heard(),
                Ok(Err(error)) => return error.into(),
                Err(_) => return Ended::Silence,
            }
        }
    }
}

#[cfg(test)]
mod tests;
