//! What a server knows: a function of the prefixes of the streams that it has merged.

use std::collections::BTreeMap;
use std::sync::Arc;

use orthodrome_core::digest::Digest;
use orthodrome_core::id::{ClientId, PartitionId, TxnId};
use orthodrome_core::store::Store;
use orthodrome_core::time::{Time, Timestamp};
use orthodrome_core::txn::{Outcome, Read, Reads, Version};

use super::Teeth;
use super::merge::{Merge, Merged, Place};
use super::message::{Command, Ended, Image, Sequenced, StreamImage};
use super::placement::Placement;
use crate::acknowledged::advance;
use crate::functor::Body;
use crate::replication::Index;

/// Everything but the data.
#[derive(Debug)]
pub struct State {
    streams: BTreeMap<PartitionId, StreamImage>,
    /// Clients know the outcomes of everything below, as any stream says.
    acknowledged: BTreeMap<ClientId, u64>,
    /// What waits for its turn.
    pub merge: Merge,
    /// What became of transactions whose clients may ask.
    pub ended: BTreeMap<TxnId, Ended>,
    /// Counts checkpoints.
    pub number: u64,
    teeth: Teeth,
}

/// What an entry of a stream brought about.
#[derive(Debug, Default)]
pub struct Applied {
    /// What ran, in order.
    pub ran: Vec<(TxnId, Ended)>,
    /// Transactions that were in the stream before.
    pub repeated: usize,
}

impl State {
    /// A server's state at a checkpoint; the data is in its store.
    #[must_use]
    pub fn new(image: &Image, placement: &Placement, teeth: Teeth, now: Time) -> Self {
        let mut streams: BTreeMap<PartitionId, StreamImage> =
            placement.streams().into_iter().map(|id| (id, StreamImage::default())).collect();
        streams.extend(image.streams.clone());
        let mut acknowledged: BTreeMap<ClientId, u64> = BTreeMap::new();
        for stream in streams.values() {
            for (&client, &below) in &stream.acknowledged {
                let known = acknowledged.entry(client).or_default();
                *known = (*known).max(below);
            }
        }
        let mut merge = Merge::new(teeth.waits_for_itself);
        for (stream, place, entry) in &image.pending {
            merge.insert(*stream, *place, entry, |key| placement.stream_of(key), now);
        }
        let (ended, number) = (image.ended.clone(), image.number);
        Self { streams, acknowledged, merge, ended, number, teeth }
    }

    /// Everything, to go on from later.
    #[must_use]
    pub fn image(&self) -> Image {
        Image {
            number: self.number,
            streams: self.streams.clone(),
            pending: self.merge.pending(),
            ended: self.ended.clone(),
        }
    }

    /// The prefix of `stream` that this state covers.
    #[must_use]
    pub fn applied(&self, stream: PartitionId) -> Index {
        self.streams.get(&stream).map_or(Index(0), |stream| stream.applied)
    }

    /// The next entry of a stream is chosen; none if it is not for the merge. What has come so far
    /// and waits for nothing runs.
    pub fn apply(
        &mut self,
        (stream, index): (PartitionId, Index),
        command: Option<&Command>,
        placement: &Placement,
        store: &mut Store,
        now: Time,
    ) -> Applied {
        let mut applied = Applied::default();
        let Some(state) = self.streams.get_mut(&stream) else { return applied };
        if index <= state.applied {
            return applied;
        }
        assert!(
            index == state.applied.next(),
            "{stream} goes on at {index}, not after what is here"
        );
        state.applied = index;
        match command {
            Some(Command::Batch { stamp, entries }) => {
                let stamp = (*stamp).max(state.stamp.next());
                state.stamp = stamp;
                for (offset, entry) in (0..).zip(entries) {
                    let place = Place { index, offset, stamp };
                    if !self.sequence(stream, place, entry, placement, now) {
                        applied.repeated += 1;
                    }
                }
            }
            Some(Command::Acknowledge(clients)) => {
                for &(client, below) in clients {
                    self.acknowledge(stream, client, below);
                }
            }
            None => {}
        }
        while let Some(merged) = self.merge.pop() {
            applied.ran.push(self.run(&merged, placement, store));
        }
        applied
    }

    /// A transaction is at a place of a stream. False if it was in that stream before.
    fn sequence(
        &mut self,
        stream: PartitionId,
        place: Place,
        entry: &Arc<Sequenced>,
        placement: &Placement,
        now: Time,
    ) -> bool {
        let txn = entry.functor.txn;
        self.acknowledge(stream, txn.client, entry.functor.acknowledged_below);
        let Some(state) = self.streams.get_mut(&stream) else { return false };
        let is_over = state.acknowledged.get(&txn.client).is_some_and(|&below| txn.counter < below);
        let is_repeated = is_over || !state.seen.insert(txn);
        if is_repeated && !self.teeth.runs_repeated {
            return false;
        }
        self.merge.insert(stream, place, entry, |key| placement.stream_of(key), now);
        !is_repeated
    }

    /// A stream says below which counter a client knows the outcomes of its transactions.
    fn acknowledge(&mut self, stream: PartitionId, client: ClientId, below: u64) {
        let Some(state) = self.streams.get_mut(&stream) else { return };
        if let Some(over) = advance(&mut state.acknowledged, client, below) {
            let over: Vec<TxnId> = state.seen.range(over).copied().collect();
            for txn in over {
                state.seen.remove(&txn);
            }
        }
        if let Some(over) = advance(&mut self.acknowledged, client, below) {
            let over: Vec<TxnId> = self.ended.range(over).map(|(&txn, _)| txn).collect();
            for txn in over {
                self.ended.remove(&txn);
            }
        }
    }

    /// True if the client of `txn` knows what became of it.
    #[must_use]
    pub fn is_acknowledged(&self, txn: TxnId) -> bool {
        self.acknowledged.get(&txn.client).is_some_and(|&below| txn.counter < below)
    }

    /// True if `txn` need not be put into `stream` again.
    #[must_use]
    pub fn is_sequenced(&self, stream: PartitionId, txn: TxnId) -> bool {
        self.streams.get(&stream).is_some_and(|stream| stream.seen.contains(&txn))
    }

    /// What the other streams say of clients that have transactions in `stream` that it need not
    /// remember any more.
    #[must_use]
    pub fn unacknowledged(&self, stream: PartitionId) -> Vec<(ClientId, u64)> {
        let Some(state) = self.streams.get(&stream) else { return Vec::new() };
        let mut news = BTreeMap::new();
        for txn in state.seen.iter().filter(|&&txn| self.is_acknowledged(txn)) {
            if let Some(&below) = self.acknowledged.get(&txn.client) {
                news.insert(txn.client, below);
            }
        }
        news.into_iter().collect()
    }

    /// A transaction runs. Its timestamp follows from its places and from what it touches, so that it
    /// is the same in every region, and grows along each key.
    fn run(&mut self, merged: &Merged, placement: &Placement, store: &mut Store) -> (TxnId, Ended) {
        let functor = &merged.entry.functor;
        let txn = functor.txn;
        let held = |key| store.read(placement.partition_of(key), key);
        let mut timestamp = merged.stamp;
        let mut reads = Reads::new();
        for key in &functor.reads {
            let read = held(key);
            timestamp = timestamp.max(read.version.timestamp.next());
            reads.insert(key.clone(), visible(read));
        }
        for key in &functor.writes {
            timestamp = timestamp.max(held(key).version.timestamp.next());
        }
        let outcome = match functor.execute(&reads) {
            Ok(writes) => {
                let version = Version { timestamp, writer: txn };
                for (key, value) in writes {
                    store.put(placement.partition_of(&key), key, version, value);
                }
                Outcome::Committed(timestamp)
            }
            Err(reason) => Outcome::Aborted(reason),
        };
        let reads = match functor.body {
            Body::Ops(_) => reads,
            Body::Validate { .. } => Reads::new(),
        };
        let ended = Ended { outcome, reads };
        if !self.is_acknowledged(txn) {
            self.ended.insert(txn, ended.clone());
        }
        (txn, ended)
    }

    /// Versions of the keys of `stream` older than this may go, but for the newest of each key: whatever
    /// comes later gets a larger timestamp, also where the newest was a deletion and is gone.
    #[must_use]
    pub fn collectable(&self, stream: PartitionId) -> Timestamp {
        let stamp = self.streams.get(&stream).map(|state| state.stamp).unwrap_or_default();
        self.merge.earliest(stream).map_or(stamp, |earliest| earliest.min(stamp))
    }

    /// Names the prefixes that this state follows from.
    #[must_use]
    pub fn position(&self) -> u64 {
        let mut digest = Digest::default();
        for stream in self.streams.values() {
            digest.add(stream.applied.0);
        }
        digest.value()
    }

    /// Adds what must be equal on all servers at one position, data apart.
    pub fn add_to(&self, digest: &mut Digest) {
        digest.add_debug(&self.streams);
        digest.add_debug(&self.ended);
        digest.add_debug(&self.merge.pending());
    }
}

/// What a transaction sees: a key that was deleted is one that was never written, for servers forget
/// deletions each by itself.
pub fn visible(read: Read) -> Read {
    if read.value.is_none() { Read::default() } else { read }
}
