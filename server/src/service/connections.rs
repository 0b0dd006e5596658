//! Bounds the number of connections: one too many is closed at once, before it costs more than a
//! socket. So is one that says nothing.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Sleep;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_stream::{Stream, StreamExt};
use tonic::transport::server::Connected;

/// A client must begin to speak within this time.
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// A connection, and its permits.
pub(super) struct Connection {
    stream: TcpStream,
    /// When the connection ends, unless the client has spoken. None once it has.
    speaks_until: Option<Pin<Box<Sleep>>>,
    _places: [OwnedSemaphorePermit; 2],
}

/// The incoming connections of `listener`, at most `most` at a time.
pub(super) fn accept(
    listener: TcpListener,
    most: usize,
) -> impl Stream<Item = io::Result<Connection>> {
    let places = Arc::new(Semaphore::new(most));
    let paused = TcpListenerStream::new(listener).then(async |accepted| {
        if accepted.is_err() {
            tokio::time::sleep(crate::socket::ACCEPT_PAUSE).await;
        }
        accepted
    });
    paused.filter_map(move |accepted| match accepted {
        Ok(stream) => {
            let place = Arc::clone(&places).try_acquire_owned().ok()?;
            let places = [place, crate::socket::admit()?];
            crate::socket::prepare(&stream);
            let speaks_until = Some(Box::pin(tokio::time::sleep(SILENCE_MAX)));
            Some(Ok(Connection { stream, speaks_until, _places: places }))
        }
        Err(error) => Some(Err(error)),
    })
}

impl Connected for Connection {
    type ConnectInfo = <TcpStream as Connected>::ConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.stream.connect_info()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.stream).poll_read(cx, buf);
        if read.is_ready() {
            self.speaks_until = None;
        }
        match &mut self.speaks_until {
            Some(until) => until.as_mut().poll(cx).map(|()| Err(io::ErrorKind::TimedOut.into())),
            None => read,
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
