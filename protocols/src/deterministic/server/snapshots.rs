//! Snapshots of the state, for servers whose logs begin too late.

use std::sync::Arc;

use orthodrome_core::id::{NodeId, PartitionId};
use orthodrome_core::store::{PIECE_BYTES, Versions};
use orthodrome_core::txn::Key;

use super::super::message::{Chunk, Due, Image};
use super::super::state::Leaving;
use super::super::{Cx, Note};
use super::Server;
use crate::replication::Index;

impl Server {
    /// A server that lags too far behind needs the state. It will run transactions again and must
    /// read the same values, so all pieces are of one moment.
    pub(super) fn send_chunk(
        &mut self,
        stream: PartitionId,
        to: NodeId,
        cursor: Option<usize>,
        cx: &mut Cx<'_>,
    ) {
        if self.cluster.share_at(to).0 != self.placement.share() && self.placement.is_divided() {
            // It needs the values of its own share, and asks a server that has them.
            let empty = Chunk { image: None, keys: Vec::new() };
            self.with(stream, cx, |held, io| held.replica.send_chunk(to, empty, None, io));
            return;
        }
        let all = cursor.is_none().then(|| Arc::new(self.leaving(self.config.piece_bytes)));
        let bounds = (self.config.hosting.chunk_keys, PIECE_BYTES);
        self.with(stream, cx, |held, io| {
            if let Some(all) = all {
                held.leaving.insert(to, all);
            }
            // If it is not in the list, the snapshot has been given up meanwhile.
            let Some(all) = held.leaving.get(&to) else { return };
            let (chunk, next) = all.piece(cursor.unwrap_or(0), bounds);
            if next.is_none() {
                held.leaving.remove(&to);
            }
            held.replica.send_chunk(to, chunk, next, io);
        });
    }

    /// This server's state, to send in pieces. Those of the image have at most `bytes`, except for a
    /// single part of it that is larger.
    pub(super) fn leaving(&self, bytes: usize) -> Leaving {
        let image = self.state.image(&self.placement);
        Leaving::new(image.into_pieces(bytes.min(self.config.piece_bytes)), self.newest())
    }

    /// All values on this server.
    fn newest(&self) -> Vec<(Key, Versions)> {
        let scan = |(partition, _)| self.store.scan(partition, None, usize::MAX);
        let newest = |(key, mut versions): (Key, Versions)| {
            versions.drain(..versions.len().saturating_sub(1));
            (key, versions)
        };
        self.placement.partitions().flat_map(scan).map(newest).collect()
    }

    /// The log of a stream begins after `index`. The leader, which has dropped earlier entries,
    /// holds another share.
    pub(super) fn on_empty_chunk(&mut self, stream: PartitionId, index: Index, cx: &mut Cx<'_>) {
        if self.state.applied(stream) >= index {
            self.disk.installed.insert(stream);
        } else {
            self.open_gap(stream, index, cx);
        }
    }

    /// A piece of another server's state. That server may lag behind this one in other streams.
    pub(super) fn on_chunk(
        &mut self,
        stream: PartitionId,
        chunk: Chunk,
        last: bool,
        cx: &mut Cx<'_>,
    ) {
        let Some(held) = self.streams.get_mut(&stream) else { return };
        match &mut held.staged {
            Some(staged) if !chunk.is_first() => staged.add(chunk),
            staged => *staged = chunk.is_first().then_some(chunk),
        }
        if !last {
            return;
        }
        let Some(Chunk { image: Some(image), keys }) = held.staged.take() else { return };
        self.disk.installed.insert(stream);
        self.take_state(&image, keys, cx);
        self.close_gaps(cx);
    }

    /// Takes over what another server of this share knows.
    pub(super) fn take_state(
        &mut self,
        image: &Image,
        keys: Vec<(Key, Versions)>,
        cx: &mut Cx<'_>,
    ) {
        cx.note(Note::SnapshotInstalled);
        let (state, store) = (&mut self.state, &mut self.store);
        let mut applied = state.join(image, keys, &self.placement, store, cx.now());
        applied.due = state.shares.due().map(Due::turn).collect();
        self.answer(applied, cx);
    }
}
