//! Links between processes: length-prefixed messages over TCP, with an emulated one-way delay if
//! configured.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::BufMut as _;
use orthodrome_core::NodeId;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;
use tracing::warn;

use super::messages::{Link, decode, encode};
use super::stream::{Pipe, Stream, malformed};
use super::trust::Trust;

/// Pause before the next attempt to connect.
const AGAIN: Duration = Duration::from_millis(100);

/// Time limit for the greeting of an incoming connection.
const HELLO: Duration = Duration::from_secs(5);

/// Maximum number of messages that wait for an unreachable partner.
const QUEUE_MAX: usize = 100_000;

/// Length of the parts of a long message whose arrival is reported.
const PART_BYTES: usize = 1 << 20;

/// Something that arrived from a partner.
pub(crate) enum Arrival {
    /// A part of a long message. What the partner sends after that message waits for it.
    Part,
    /// A whole message.
    Message(Link),
}

/// A sender of messages. Messages that wait too long are dropped, and the machines send them again.
#[derive(Clone)]
pub(crate) struct Sender(mpsc::Sender<(Instant, Link)>);

impl Sender {
    pub(crate) fn send(&self, link: Link) {
        // Full: the partner has been unreachable for long. Lost messages are sent again on request.
        let _ = self.0.try_send((Instant::now(), link));
    }
}

async fn write_one(
    write: &mut (impl tokio::io::AsyncWrite + Unpin),
    link: &Link,
) -> io::Result<()> {
    use tokio::io::AsyncWriteExt as _;
    let body = encode(link);
    let mut frame = Vec::with_capacity(body.len() + 4);
    frame.put_u32(body.len() as u32);
    frame.extend_from_slice(&body);
    write.write_all(&frame).await
}

/// Reads one message of an authenticated partner. Its length is not bounded, because statements and
/// rows have any length, and a refused message would be sent again for ever. `part` is called for
/// each part of a long message.
async fn read_one(stream: &mut Stream, part: impl Fn()) -> io::Result<Link> {
    stream.fill(4).await?;
    let length = match stream.peeked() {
        [a, b, c, d, ..] => u32::from_be_bytes([*a, *b, *c, *d]) as usize,
        _ => return Err(malformed("a frame is cut off")),
    };
    while stream.peeked().len() < 4 + length {
        let next = stream.peeked().len() + PART_BYTES;
        stream.fill(next.min(4 + length)).await?;
        if next < 4 + length {
            part();
        }
    }
    stream.skip(4);
    decode(&stream.take(length)).ok_or_else(|| malformed("a frame cannot be read"))
}

/// Keeps connecting to a partner; `hear` gets what arrives from it.
pub(crate) fn call(
    address: String,
    hello: Link,
    trust: Option<Trust>,
    one_way: Duration,
    hear: impl Fn(Arrival) + Send + Sync + 'static,
) -> Sender {
    let (sender, mut queue) = mpsc::channel::<(Instant, Link)>(QUEUE_MAX);
    let hear = Arc::new(hear);
    tokio::spawn(async move {
        loop {
            if let Ok(tcp) = TcpStream::connect(&address).await {
                let _ = tcp.set_nodelay(true);
                let pipe: io::Result<Box<dyn Pipe>> = match &trust {
                    None => Ok(Box::new(tcp)),
                    Some(trust) => trust.wrap(Box::new(tcp)).await,
                };
                match pipe {
                    Ok(pipe) => {
                        let talked = talk(pipe, Some(&hello), &mut queue, one_way, hear.clone());
                        if talked.await.is_none() {
                            return;
                        }
                    }
                    Err(error) => warn!(%address, "the agent failed authentication: {error}"),
                }
            }
            tokio::time::sleep(AGAIN).await;
            // Messages that waited for an unreachable partner are out of date.
            while queue.try_recv().is_ok() {}
        }
    });
    Sender(sender)
}

/// Runs both directions of a connection until it breaks, or until all senders are dropped.
async fn talk(
    pipe: Box<dyn Pipe>,
    hello: Option<&Link>,
    queue: &mut mpsc::Receiver<(Instant, Link)>,
    one_way: Duration,
    hear: Arc<impl Fn(Arrival) + Send + Sync + 'static>,
) -> Option<()> {
    let (read, mut write) = tokio::io::split(pipe);
    let (late, mut due) = mpsc::unbounded_channel::<(Instant, Arrival)>();
    let mut reader = tokio::spawn(async move {
        let mut stream = Stream::new(tokio::io::join(read, tokio::io::sink()));
        // The listener has ended only if the connection has.
        let arrives = |arrival| late.send((Instant::now() + one_way, arrival)).is_ok();
        let part = || {
            let _ = arrives(Arrival::Part);
        };
        while let Ok(link) = read_one(&mut stream, part).await {
            if !arrives(Arrival::Message(link)) {
                return;
            }
        }
    });
    let listener = tokio::spawn(async move {
        while let Some((at, arrival)) = due.recv().await {
            tokio::time::sleep_until(at).await;
            hear(arrival);
        }
    });
    if let Some(hello) = hello
        && write_one(&mut write, hello).await.is_err()
    {
        return Some(());
    }
    let outcome = loop {
        tokio::select! {
            next = queue.recv() => {
                let Some((at, link)) = next else { break None };
                tokio::time::sleep_until(at + one_way).await;
                if write_one(&mut write, &link).await.is_err() {
                    break Some(());
                }
            }
            _ = &mut reader => break Some(()),
        }
    };
    reader.abort();
    listener.abort();
    outcome
}

/// Accepts one connection: reads its greeting, and returns the partner and a sender for answers.
/// Later messages of the partner go to `hear`.
pub(crate) async fn answer(
    tcp: TcpStream,
    tls: Option<TlsAcceptor>,
    secret: &str,
    hear: impl Fn(NodeId, Link) + Send + Sync + 'static,
) -> io::Result<(NodeId, Sender)> {
    use subtle::ConstantTimeEq as _;
    tcp.set_nodelay(true)?;
    let begun = tokio::time::timeout(HELLO, async {
        let mut pipe: Box<dyn Pipe> = match tls {
            None => Box::new(tcp),
            Some(tls) => Box::new(tls.accept(tcp).await?),
        };
        let hello = hello(&mut pipe).await?;
        io::Result::Ok((pipe, hello))
    });
    let begun = begun.await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?;
    let (pipe, hello) = begun?;
    let Link::Hello { node, secret: given } = hello else {
        return Err(malformed("a call began without a greeting"));
    };
    if !bool::from(given.as_bytes().ct_eq(secret.as_bytes())) {
        return Err(malformed("the other end has another `secret`"));
    }
    let (sender, mut queue) = mpsc::channel(QUEUE_MAX);
    // Another agent only sends; its connection must not end because nothing is sent to it.
    let kept = (node == NodeId(0)).then(|| sender.clone());
    tokio::spawn(async move {
        let _kept = kept;
        let hear = move |arrival| match arrival {
            Arrival::Message(link) => hear(node, link),
            Arrival::Part => {}
        };
        let _ = talk(pipe, None, &mut queue, Duration::ZERO, Arc::new(hear)).await;
    });
    Ok((node, Sender(sender)))
}

/// Reads exactly the greeting and no byte after it.
async fn hello(pipe: &mut Box<dyn Pipe>) -> io::Result<Link> {
    use tokio::io::AsyncReadExt as _;
    let length = pipe.read_u32().await? as usize;
    if length > 4096 {
        return Err(malformed("a greeting is too long"));
    }
    let mut body = vec![0; length];
    pipe.read_exact(&mut body).await?;
    decode(&body).ok_or_else(|| malformed("a greeting cannot be read"))
}
