//! Read replicas near the proxy, which follow their servers over an emulated distance.

use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use orthodrome_middleware::local::LocalServer;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::private::PLACES;

/// Maximum number of chunks on their way in one direction of a connection.
const CHUNKS: usize = 4_096;

/// The replicas of some servers, and the connections through which they follow.
pub struct Replicas {
    /// The replicas, with the places of their servers.
    pub servers: Vec<(usize, LocalServer)>,
    _lines: JoinSet<()>,
}

impl Replicas {
    /// Starts a replica of each server that is not near the proxy.
    pub async fn start(servers: &[LocalServer], dir: &Path) -> anyhow::Result<Self> {
        let (mut found, mut lines) = (Vec::new(), JoinSet::new());
        for (place, (server, (_, rtt))) in servers.iter().zip(PLACES).enumerate() {
            if rtt == 0 {
                continue;
            }
            let listener = TcpListener::bind("127.0.0.1:0").await?;
            let through = listener.local_addr()?.port();
            let one_way = Duration::from_millis(u64::from(rtt)) / 2;
            lines.spawn(pass_on(listener, server.port, one_way));
            let directory = dir.join(format!("replica{}", place + 1));
            let replica = tokio::task::block_in_place(|| server.start_replica(&directory, through));
            found.push((place, replica.context("a replica did not start")?));
        }
        Ok(Self { servers: found, _lines: lines })
    }
}

/// Passes connections on to another port, and delays what goes through them.
async fn pass_on(listener: TcpListener, to: u16, one_way: Duration) {
    let mut open = JoinSet::new();
    while let Ok((near, _)) = listener.accept().await {
        let Ok(far) = TcpStream::connect(("127.0.0.1", to)).await else { continue };
        let _ = (near.set_nodelay(true), far.set_nodelay(true));
        let ((near_in, near_out), (far_in, far_out)) = (near.into_split(), far.into_split());
        open.spawn(delay(near_in, far_out, one_way));
        open.spawn(delay(far_in, near_out, one_way));
    }
}

/// Copies bytes; each arrives a while after it was sent.
async fn delay(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, one_way: Duration) {
    let (sender, mut sent) = mpsc::channel::<(Instant, Vec<u8>)>(CHUNKS);
    let reads = async move {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(count @ 1..) = from.read(&mut buffer).await {
            let chunk = buffer.get(..count).unwrap_or_default().to_vec();
            if sender.send((Instant::now() + one_way, chunk)).await.is_err() {
                return;
            }
        }
    };
    let writes = async move {
        while let Some((at, chunk)) = sent.recv().await {
            tokio::time::sleep_until(at).await;
            if to.write_all(&chunk).await.is_err() {
                return;
            }
        }
    };
    tokio::join!(reads, writes);
}
