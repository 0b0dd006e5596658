//! Between processes: length-prefixed messages over TCP, a one-way delay emulated where wanted.

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

/// How long to wait before another call.
const AGAIN: Duration = Duration::from_millis(100);

/// How long a caller may take to say who it is.
const HELLO: Duration = Duration::from_secs(5);

/// Messages that may wait for a partner that is away.
const QUEUE_MAX: usize = 100_000;

/// A way to send; what waits too long is dropped, and the machines send it again.
#[derive(Clone)]
pub(super) struct Sender(mpsc::Sender<(Instant, Link)>);

impl Sender {
    pub(super) fn send(&self, link: Link) {
        // Full: the partner has been away for long; what is lost is asked for again.
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

/// Reads one message of a partner that has said who it is. Statements of a client and rows of a source are as long as they are:
/// one that was refused here would be sent again for ever.
async fn read_one(stream: &mut Stream) -> io::Result<Link> {
    stream.fill(4).await?;
    let length = match stream.peeked() {
        [a, b, c, d, ..] => u32::from_be_bytes([*a, *b, *c, *d]) as usize,
        _ => return Err(malformed("a frame is cut off")),
    };
    stream.fill(4 + length).await?;
    stream.skip(4);
    decode(&stream.take(length)).ok_or_else(|| malformed("a frame cannot be read"))
}

/// Calls a partner for ever; `hear` gets what it says.
pub(super) fn call(
    address: String,
    hello: Link,
    trust: Option<Trust>,
    one_way: Duration,
    hear: impl Fn(Link) + Send + Sync + 'static,
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
            // What waited for a partner that was away is stale.
            while queue.try_recv().is_ok() {}
        }
    });
    Sender(sender)
}

/// Both directions of a connection, until it breaks; nothing once nobody sends any more.
async fn talk(
    pipe: Box<dyn Pipe>,
    hello: Option<&Link>,
    queue: &mut mpsc::Receiver<(Instant, Link)>,
    one_way: Duration,
    hear: Arc<impl Fn(Link) + Send + Sync + 'static>,
) -> Option<()> {
    let (read, mut write) = tokio::io::split(pipe);
    let (late, mut due) = mpsc::unbounded_channel::<(Instant, Link)>();
    let mut reader = tokio::spawn(async move {
        let mut stream = Stream::new(tokio::io::join(read, tokio::io::sink()));
        while let Ok(link) = read_one(&mut stream).await {
            if late.send((Instant::now() + one_way, link)).is_err() {
                return;
            }
        }
    });
    let listener = tokio::spawn(async move {
        while let Some((at, link)) = due.recv().await {
            tokio::time::sleep_until(at).await;
            hear(link);
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

/// Takes one call: reads its greeting, and gives back who it is and the way to answer. What it says
/// goes to `hear` from then on.
pub(super) async fn answer(
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
    // Another agent only speaks; its connection must not end because nobody answers.
    let kept = (node == NodeId(0)).then(|| sender.clone());
    tokio::spawn(async move {
        let _kept = kept;
        let _ =
            talk(pipe, None, &mut queue, Duration::ZERO, Arc::new(move |link| hear(node, link)))
                .await;
    });
    Ok((node, Sender(sender)))
}

/// Reads exactly the greeting, and nothing of what follows.
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
