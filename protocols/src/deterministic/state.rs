//! What a server knows: a function of the prefixes of the streams that it has merged.

mod acknowledged;
mod execution;
mod join;
mod leaving;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use orthodrome_core::digest::Digest;
use orthodrome_core::id::{ClientId, PartitionId, RegionId, ShareId, TxnId};
use orthodrome_core::store::Store;
use orthodrome_core::time::{Time, Timestamp};
use orthodrome_core::txn::Key;
use orthodrome_core::workers::Workers;

use self::acknowledged::acknowledged;
pub use self::execution::visible;
pub use self::leaving::Leaving;
use super::Mutations;
use super::checks::Checks;
use super::merge::{Merge, Place};
use super::message::{Command, Ended, Home, Image, Name, Part, Sequenced, StreamImage, Turn};
use super::outcomes::{Bounds, Outcomes};
use super::placement::Placement;
use super::shares::Shares;
use crate::functor::Functor;
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
    pub ended: Outcomes,
    /// What entries of streams came to here.
    pub checks: Checks,
    /// Keys that have moved.
    moved: BTreeMap<Key, Home>,
    /// How many of them are not where they were placed.
    away: usize,
    /// Transactions that have run, until every stream knows that their clients know it: they may come
    /// again under another name.
    ran: BTreeSet<TxnId>,
    /// Of what this server holds only a share: what is due, and what others may ask for.
    pub shares: Shares,
    /// Counts checkpoints.
    pub number: u64,
    /// Who runs transactions that do not conflict.
    workers: Arc<dyn Workers>,
    mutations: Mutations,
    loses_writes: bool,
}

/// What of the protocol's settings concerns a state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Settings {
    /// What is remembered of transactions that have run.
    pub outcomes: Bounds,
    /// Entries of a stream that are compared together.
    pub compared_entries: u64,
    /// Deliberate mistakes, for tests.
    pub mutations: Mutations,
    /// One of them, which only the first server makes.
    pub loses_writes: bool,
}

impl Default for Settings {
    fn default() -> Self {
        let (outcomes, mutations) = (Bounds::default(), Mutations::default());
        Self { outcomes, compared_entries: 64, mutations, loses_writes: false }
    }
}

/// How many keys have moved.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MovedCounts {
    /// And are not where they were placed now.
    pub away: usize,
    /// Whether they came back or not.
    pub ever: usize,
}

/// What an entry of a stream brought about.
#[derive(Debug, Default)]
pub struct Applied {
    /// What ran, in order.
    pub ran: Vec<(TxnId, Ended)>,
    /// Transactions that were in the stream before.
    pub repeated: usize,
    /// Transactions whose turn came when a key of theirs was elsewhere than they supposed.
    pub void: Vec<Name>,
    /// Keys that moved.
    pub relocated: usize,
    /// Parts of this share that were taken, and the shares that need them.
    pub taken: Vec<(Turn, BTreeSet<ShareId>, Arc<Part>)>,
    /// What is due now, and waits for parts of other shares.
    pub due: Vec<Turn>,
}

impl State {
    /// A server's state at a checkpoint; the data is in its store.
    #[must_use]
    pub fn new(
        image: &Image,
        placement: &Placement,
        settings: Settings,
        workers: Arc<dyn Workers>,
        now: Time,
    ) -> Self {
        let Settings { outcomes, compared_entries, mutations, loses_writes } = settings;
        let mut streams: BTreeMap<PartitionId, StreamImage> =
            placement.streams().into_iter().map(|id| (id, StreamImage::default())).collect();
        streams.extend(image.streams.clone());
        let acknowledged = acknowledged(&streams);
        let mut merge = Merge::new(placement.orderer(), mutations.waits_for_itself());
        for (stream, place, entry) in &image.pending {
            merge.insert(*stream, *place, entry, |key| placement.stream_of(key), now);
        }
        let mut ended = Outcomes::new(outcomes);
        image.ended.iter().for_each(|(&txn, known)| ended.insert(txn, known.clone()));
        let mut checks = Checks::new(compared_entries);
        streams.iter().for_each(|(&id, stream)| checks.begin(id, stream.applied));
        let mut shares = Shares::new(mutations.reads_early());
        shares.restore(image.due.iter().cloned(), &image.kept, placement);
        Self {
            streams,
            acknowledged,
            merge,
            ended,
            checks,
            moved: image.moved.clone(),
            away: away(&image.moved, placement),
            ran: image.ran.clone(),
            shares,
            number: image.number,
            workers,
            mutations,
            loses_writes,
        }
    }

    /// Everything, to go on from later.
    #[must_use]
    pub fn image(&self, placement: &Placement) -> Image {
        Image {
            number: self.number,
            piece: 0,
            pieces: 0,
            streams: self.streams.clone(),
            pending: self.merge.pending(),
            ended: self.ended.all().clone(),
            moved: self.moved.clone(),
            ran: self.ran.clone(),
            shares: placement.share_count(),
            due: self.shares.due().cloned().collect(),
            kept: self.shares.kept().clone(),
        }
    }

    /// Where `key` is, as of what has run here.
    #[must_use]
    pub fn home(&self, key: &Key, placement: &Placement) -> Home {
        let placed = || Home { stream: placement.stream_of(key), ..Home::default() };
        self.moved.get(key).copied().unwrap_or_else(placed)
    }

    /// How many keys have moved.
    #[must_use]
    pub fn moved_counts(&self) -> MovedCounts {
        MovedCounts { away: self.away, ever: self.moved.len() }
    }

    /// True if `key` has ever moved.
    #[must_use]
    pub fn has_moved(&self, key: &Key) -> bool {
        self.moved.contains_key(key)
    }

    /// How a transaction is to be sequenced, as of what has run here.
    #[must_use]
    pub fn plan(
        &self,
        functor: Arc<Functor>,
        origin: RegionId,
        placement: &Placement,
    ) -> Sequenced {
        let keys: BTreeSet<&Key> = functor.reads.iter().chain(&functor.writes).collect();
        let homes = placement.homes(keys.iter().map(|key| self.home(key, placement).stream));
        let moved = keys.into_iter().filter_map(|key| Some((key.clone(), *self.moved.get(key)?)));
        let moved = moved.collect();
        Sequenced::new(functor, homes, moved, origin)
    }

    /// True if the keys of `entry` are where it supposes.
    fn is_right(&self, entry: &Sequenced) -> bool {
        let keys = entry.functor.reads.iter().chain(&entry.functor.writes);
        keys.into_iter().all(|key| {
            let supposed = entry.moved.iter().find(|(moved, _)| moved == key);
            let counter = self.moved.get(key).map_or(0, |home| home.counter);
            supposed.map_or(0, |(_, home)| home.counter) == counter
        })
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
                    let place = Place { index, offset, stamp, is_late: false };
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
            Some(Command::Forget(clients)) => {
                for &(client, below) in clients {
                    self.forget(stream, client, below);
                }
            }
            None => {}
        }
        self.run_ready(&mut applied, placement, store);
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
        if let Some((key, from)) = entry.relocates() {
            // A key moves once from each home; the first who says where to is heard.
            let Some(state) = self.streams.get_mut(&stream) else { return false };
            if state.moves.get(key).is_some_and(|&moves| from.counter < moves) {
                return false;
            }
            state.moves.insert(key.clone(), from.counter + 1);
            self.merge.insert(stream, place, entry, |key| placement.stream_of(key), now);
            return true;
        }
        self.acknowledge(stream, txn.client, entry.functor.acknowledged_below);
        let Some(state) = self.streams.get_mut(&stream) else { return false };
        let is_below = |known: &BTreeMap<ClientId, u64>| {
            known.get(&txn.client).is_some_and(|&below| txn.counter < below)
        };
        // One that ran under another name may be in another stream under this, where all wait for it.
        let is_late = is_below(&state.acknowledged);
        let is_repeated = is_below(&state.forgotten) || !state.seen.insert(entry.name());
        let place = Place { is_late, ..place };
        if is_repeated && !self.mutations.runs_repeated() {
            return false;
        }
        self.merge.insert(stream, place, entry, |key| placement.stream_of(key), now);
        !is_repeated
    }

    /// True if `entry` need not be put into `stream` again.
    #[must_use]
    pub fn is_sequenced(&self, stream: PartitionId, entry: &Sequenced) -> bool {
        let Some(stream) = self.streams.get(&stream) else { return false };
        entry.relocates().map_or_else(
            || stream.seen.contains(&entry.name()),
            |(key, from)| stream.moves.get(key).is_some_and(|&moves| from.counter < moves),
        )
    }

    /// Versions of the keys of `stream` older than this may go, but for the newest of each key: whatever
    /// comes later gets a larger timestamp, also where the newest was a deletion and is gone.
    #[must_use]
    pub fn collectable(&self, stream: PartitionId) -> Timestamp {
        let stamp = self.streams.get(&stream).map(|state| state.stamp).unwrap_or_default();
        let waiting = self.merge.earliest(stream).into_iter().chain(self.shares.earliest(stream));
        waiting.min().map_or(stamp, |earliest| earliest.min(stamp))
    }

    /// Below which timestamps old versions of each partition may go.
    #[must_use]
    pub fn collectables(&self, placement: &Placement) -> Vec<(PartitionId, Timestamp)> {
        let of = |stream| self.collectable(stream);
        let mut below: BTreeMap<PartitionId, Timestamp> =
            placement.partitions().map(|(partition, stream)| (partition, of(stream))).collect();
        let streams: BTreeSet<(PartitionId, PartitionId)> = self
            .moved
            .iter()
            .map(|(key, home)| (placement.partition_of(key), home.stream))
            .collect();
        for (partition, stream) in streams {
            if let Some(below) = below.get_mut(&partition) {
                *below = (*below).min(of(stream));
            }
        }
        // A key may have moved while transactions that the old home has ordered are due.
        for due in self.shares.due() {
            for key in due.keys().filter(|key| placement.holds(key)) {
                if let Some(below) = below.get_mut(&placement.partition_of(key)) {
                    *below = (*below).min(due.earliest());
                }
            }
        }
        below.into_iter().collect()
    }

    /// Up to where everything in each stream has run.
    #[must_use]
    pub fn covered(&self) -> BTreeMap<PartitionId, Index> {
        let streams = self.streams.iter();
        let mut covered: BTreeMap<_, _> = streams.map(|(&id, held)| (id, held.applied)).collect();
        let due = self.shares.due().flat_map(|due| due.places.iter().copied());
        for (stream, place) in self.merge.places().chain(due) {
            if let Some(covered) = covered.get_mut(&stream) {
                *covered = (*covered).min(Index(place.index.0.saturating_sub(1)));
            }
        }
        covered
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
        self.add_ended_to(digest);
        digest.add_debug(&self.moved);
        digest.add_debug(&self.merge.pending());
    }

    /// Adds what became of transactions. Which of it is forgotten and when is each server's own affair: so it is left out if so
    /// little is remembered that some may be.
    pub fn add_ended_to(&self, digest: &mut Digest) {
        if self.ended.bounds() == Bounds::default() {
            digest.add_debug(self.ended.all());
        }
    }

    /// Of that, what must be equal on servers of all shares.
    pub fn add_order_to(&self, digest: &mut Digest) {
        digest.add_debug(&self.streams);
        digest.add_debug(&self.moved);
        digest.add_debug(&self.merge.pending());
    }
}

/// How many of these keys are not where they were placed.
fn away(moved: &BTreeMap<Key, Home>, placement: &Placement) -> usize {
    moved.iter().filter(|(key, home)| home.stream != placement.stream_of(key)).count()
}

#[cfg(test)]
mod tests;
