//! A connection of either protocol, with or without TLS.

use std::io;

use bytes::{Buf as _, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

/// Maximum length of an accepted message.
pub(crate) const MESSAGE_BYTES_MAX: usize = 64 << 20;
/// Maximum length of a message of a client that has not logged in.
pub(crate) const LOGIN_BYTES_MAX: usize = 64 << 10;

pub(crate) trait Pipe: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Pipe for T {}

/// Buffers around a pipe. Written data is sent by [`Stream::flush`].
pub(crate) struct Stream {
    pipe: Option<Box<dyn Pipe>>,
    input: BytesMut,
    pub(crate) output: BytesMut,
    /// Maximum length of a message from the other end.
    pub(crate) longest: usize,
}

pub(crate) fn closed() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "the connection was closed")
}

pub(crate) fn malformed(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

/// A message of a client is longer than it may be, and is still in the stream.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("a message is longer than {MESSAGE_BYTES_MAX} bytes")]
pub(crate) struct TooLong {
    /// The kind of the message.
    pub(crate) tag: u8,
    /// Its length according to its header.
    pub(crate) bytes: usize,
}

impl TooLong {
    /// The contents of an error, if it is this one.
    pub(crate) fn of(error: &io::Error) -> Option<Self> {
        error.get_ref().and_then(|inner| inner.downcast_ref::<Self>()).copied()
    }
}

impl Stream {
    pub(crate) fn new(pipe: impl Pipe + 'static) -> Self {
        Self {
            pipe: Some(Box::new(pipe)),
            input: BytesMut::new(),
            output: BytesMut::new(),
            longest: MESSAGE_BYTES_MAX,
        }
    }

    fn pipe(&mut self) -> io::Result<&mut Box<dyn Pipe>> {
        self.pipe.as_mut().ok_or_else(closed)
    }

    /// Replaces the pipe by the result of `wrap`, for TLS.
    pub(crate) async fn upgrade<F, R>(&mut self, wrap: F) -> io::Result<()>
    where
        F: FnOnce(Box<dyn Pipe>) -> R,
        R: Future<Output = io::Result<Box<dyn Pipe>>>,
    {
        if !self.input.is_empty() {
            // Bytes before the handshake are not authenticated.
            return Err(malformed("bytes came before TLS began"));
        }
        let pipe = self.pipe.take().ok_or_else(closed)?;
        self.pipe = Some(wrap(pipe).await?);
        Ok(())
    }

    /// As [`Stream::upgrade`], if the other end begins its handshake without waiting: bytes that
    /// have arrived belong to the handshake.
    pub(crate) async fn upgrade_at_once<F, R>(&mut self, wrap: F) -> io::Result<()>
    where
        F: FnOnce(Box<dyn Pipe>) -> R,
        R: Future<Output = io::Result<Box<dyn Pipe>>>,
    {
        let (read, write) = tokio::io::split(self.pipe.take().ok_or_else(closed)?);
        let begun = io::Cursor::new(std::mem::take(&mut self.input).freeze());
        self.pipe = Some(
            wrap(Box::new(tokio::io::join(tokio::io::AsyncReadExt::chain(begun, read), write)))
                .await?,
        );
        Ok(())
    }

    /// Waits until `count` bytes have arrived.
    pub(crate) async fn fill(&mut self, count: usize) -> io::Result<()> {
        while self.input.len() < count {
            self.input.reserve((count - self.input.len()).clamp(4096, 1 << 16));
            let pipe = self.pipe.as_mut().ok_or_else(closed)?;
            if pipe.read_buf(&mut self.input).await? == 0 {
                return Err(closed());
            }
        }
        Ok(())
    }

    /// Skips `count` bytes.
    pub(crate) async fn discard(&mut self, mut count: usize) -> io::Result<()> {
        while count > 0 {
            self.fill(1).await?;
            let part = count.min(self.input.len());
            self.skip(part);
            count -= part;
        }
        Ok(())
    }

    /// Waits until there is unread data, or the other end closes the connection.
    pub(crate) async fn stirs(&mut self) {
        // The next use of the stream reports the error.
        let _ = self.fill(1).await;
    }

    pub(crate) fn peeked(&self) -> &[u8] {
        &self.input
    }

    pub(crate) fn take(&mut self, count: usize) -> BytesMut {
        self.input.split_to(count.min(self.input.len()))
    }

    pub(crate) fn skip(&mut self, count: usize) {
        self.input.advance(count.min(self.input.len()));
    }

    pub(crate) async fn flush(&mut self) -> io::Result<()> {
        let mut output = std::mem::take(&mut self.output);
        let pipe = self.pipe()?;
        pipe.write_all(&output).await?;
        pipe.flush().await?;
        output.clear();
        self.output = output;
        Ok(())
    }
}
