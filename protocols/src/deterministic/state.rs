//! A server's state: a function of the prefixes of the streams that it has merged.

mod acknowledged;
mod execution;
mod join;
mod leaving;

use std::sync::Arc;

use orthodrome_core::digest::Digest;
use orthodrome_core::id::{ClientId, PartitionId, RegionId, ShareId, TxnId};
use orthodrome_core::ordered::{OrdMap, OrdSet};
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

/// The state without its data.
#[derive(Debug)]
pub struct State {
    streams: OrdMap<PartitionId, StreamImage>,
    /// For each client, the counter below which it knows all outcomes, according to any stream.
    acknowledged: OrdMap<ClientId, u64>,
    /// Transactions that wait for their turn.
    pub merge: Merge,
    /// The outcomes of transactions whose clients may ask.
    pub ended: Outcomes,
    /// The sums of stream entries.
    pub checks: Checks,
    /// Keys that have moved.
    moved: OrdMap<Key, Home>,
    /// The number of keys that are away from their placement.
    away: usize,
    /// Transactions that have run, until every stream knows that their clients know it: they may
    /// arrive again under another name.
    ran: OrdSet<TxnId>,
    /// If this server holds only a share: the due transactions, and the parts that others may
    /// request.
    pub shares: Shares,
    /// The number of checkpoints.
    pub number: u64,
    /// Runs transactions without conflicts in parallel.
    workers: Arc<dyn Workers>,
    mutations: Mutations,
    loses_writes: bool,
}

/// The settings that concern a state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Settings {
    /// How much is remembered of transactions that have run.
    pub outcomes: Bounds,
    /// The number of entries of a stream that are compared together.
    pub compared_entries: u64,
    /// Mutations, for tests.
    pub mutations: Mutations,
    /// A mutation that only the first server has.
    pub loses_writes: bool,
}

impl Default for Settings {
    fn default() -> Self {
        let (outcomes, mutations) = (Bounds::default(), Mutations::default());
        Self { outcomes, compared_entries: 64, mutations, loses_writes: false }
    }
}

/// The number of keys that have moved.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MovedCounts {
    /// Keys that are away from their placement now.
    pub away: usize,
    /// Keys that have ever moved.
    pub ever: usize,
}

/// The effects of an entry of a stream.
#[derive(Debug, Default)]
pub struct Applied {
    /// The transactions that ran, in order.
    pub ran: Vec<(TxnId, Ended)>,
    /// The number of transactions that were in the stream before.
    pub repeated: usize,
    /// Transactions whose turn came when one of their keys had another home than they assumed.
    pub void: Vec<Name>,
    /// The number of keys that moved.
    pub relocated: usize,
    /// Parts of this share that were taken, and the shares that need them.
    pub taken: Vec<(Turn, OrdSet<ShareId>, Arc<Part>)>,
    /// Transactions that are due now, and wait for parts of other shares.
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
        let mut streams: OrdMap<PartitionId, StreamImage> =
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

    /// The whole state, for a restart.
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

    /// The home of `key`, according to the transactions that have run here.
    #[must_use]
    pub fn home(&self, key: &Key, placement: &Placement) -> Home {
        let placed = || Home { stream: placement.stream_of(key), ..Home::default() };
        self.moved.get(key).copied().unwrap_or_else(placed)
    }

    /// The number of keys that have moved.
    #[must_use]
    pub fn moved_counts(&self) -> MovedCounts {
        MovedCounts { away: self.away, ever: self.moved.len() }
    }

    /// True if `key` has ever moved.
    #[must_use]
    pub fn has_moved(&self, key: &Key) -> bool {
        self.moved.contains_key(key)
    }

    /// How to sequence a transaction, according to the transactions that have run here.
    #[must_use]
    pub fn plan(
        &self,
        functor: Arc<Functor>,
        origin: RegionId,
        placement: &Placement,
    ) -> Sequenced {
        let keys: OrdSet<&Key> = functor.reads.iter().chain(&functor.writes).collect();
        let homes = placement.homes(keys.iter().map(|key| self.home(key, placement).stream));
        let moved = keys.into_iter().filter_map(|key| Some((key.clone(), *self.moved.get(key)?)));
        let moved = moved.collect();
        Sequenced::new(functor, homes, moved, origin)
    }

    /// True if the keys of `entry` have the homes that it assumes.
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

    /// The next entry of a stream is chosen; none if it does not concern the merge. Runs all
    /// transactions that can run now.
    pub fn apply(
        &mut self,
        at: (PartitionId, Index),
        command: Option<&Command>,
        placement: &Placement,
        store: &mut Store,
        now: Time,
    ) -> Applied {
        let mut applied = Applied::default();
        self.enter(at, command, placement, now, &mut applied);
        self.run_ready(&mut applied, placement, store);
        applied
    }

    /// The next entry of a stream is chosen; none if it does not concern the merge. Its transactions
    /// run with [`State::run_ready`], together with those of the entries that follow.
    pub fn enter(
        &mut self,
        (stream, index): (PartitionId, Index),
        command: Option<&Command>,
        placement: &Placement,
        now: Time,
        applied: &mut Applied,
    ) {
        let Some(state) = self.streams.get_mut(&stream) else { return };
        if index <= state.applied {
            return;
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
    }

    /// A transaction is at a position of a stream. False if it was in that stream before.
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
            // A key moves once from each home; the first move counts.
            let Some(state) = self.streams.get_mut(&stream) else { return false };
            if state.moves.get(key).is_some_and(|&moves| from.counter < moves) {
                return false;
            }
            state.moves.insert(key.clone(), from.counter.saturating_add(1));
            self.merge.insert(stream, place, entry, |key| placement.stream_of(key), now);
            return true;
        }
        self.acknowledge(stream, txn.client, entry.functor.acknowledged_below);
        let Some(state) = self.streams.get_mut(&stream) else { return false };
        let is_below = |known: &OrdMap<ClientId, u64>| {
            known.get(&txn.client).is_some_and(|&below| txn.counter < below)
        };
        // A transaction that ran under another name may be in another stream under this one, where
        // others wait for it.
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

    /// Versions of the keys of `stream` older than this may be dropped, except the newest of each
    /// key. Every later version gets a larger timestamp, also if the newest was a deletion and has
    /// been dropped.
    #[must_use]
    pub fn collectable(&self, stream: PartitionId) -> Timestamp {
        let stamp = self.streams.get(&stream).map(|state| state.stamp).unwrap_or_default();
        let waiting = self.merge.earliest(stream).into_iter().chain(self.shares.earliest(stream));
        waiting.min().map_or(stamp, |earliest| earliest.min(stamp))
    }

    /// Every transaction that accesses `key` and has not run gets a timestamp that is not below this.
    /// So if the key is absent, a client that knows an older version knows one that was deleted.
    #[must_use]
    pub fn run_below(&self, key: &Key, placement: &Placement) -> Timestamp {
        let home = self.home(key, placement);
        let below = self.collectable(home.stream).max(home.since);
        // The key may have moved while transactions that the old home has ordered are due.
        let due = self.shares.due().filter(|due| due.keys().any(|other| other == key));
        due.map(|due| due.earliest()).fold(below, Timestamp::min)
    }

    /// For each partition, the timestamp below which old versions may be dropped.
    #[must_use]
    pub fn collectables(&self, placement: &Placement) -> Vec<(PartitionId, Timestamp)> {
        let of = |stream| self.collectable(stream);
        let mut below: OrdMap<PartitionId, Timestamp> =
            placement.partitions().map(|(partition, stream)| (partition, of(stream))).collect();
        let streams: OrdSet<(PartitionId, PartitionId)> = self
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

    /// For each stream, the entry up to which all transactions have run.
    #[must_use]
    pub fn covered(&self) -> OrdMap<PartitionId, Index> {
        let streams = self.streams.iter();
        let mut covered: OrdMap<_, _> = streams.map(|(&id, held)| (id, held.applied)).collect();
        let due = self.shares.due().flat_map(|due| due.places.iter().copied());
        for (stream, place) in self.merge.places().chain(due) {
            if let Some(covered) = covered.get_mut(&stream) {
                *covered = (*covered).min(Index(place.index.0.saturating_sub(1)));
            }
        }
        covered
    }

    /// A number for the prefixes from which this state follows.
    #[must_use]
    pub fn position(&self) -> u64 {
        let mut digest = Digest::default();
        for stream in self.streams.values() {
            digest.add(stream.applied.0);
        }
        digest.value()
    }

    /// Adds everything, except the data, that must be equal on all servers at one position.
    pub fn add_to(&self, digest: &mut Digest) {
        digest.add_debug(&self.streams);
        self.add_ended_to(digest);
        digest.add_debug(&self.moved);
        digest.add_debug(&self.merge.pending());
    }

    /// Adds the outcomes of transactions. Each server decides by itself which of them it forgets
    /// and when. So they are left out if the bounds are so low that some may be forgotten.
    pub fn add_ended_to(&self, digest: &mut Digest) {
        if self.ended.bounds() == Bounds::default() {
            digest.add_debug(self.ended.all());
        }
    }

    /// The part of it that must be equal on servers of all shares.
    pub fn add_order_to(&self, digest: &mut Digest) {
        digest.add_debug(&self.streams);
        digest.add_debug(&self.moved);
        digest.add_debug(&self.merge.pending());
    }
}

/// The number of these keys that are away from their placement.
fn away(moved: &OrdMap<Key, Home>, placement: &Placement) -> usize {
    moved.iter().filter(|(key, home)| home.stream != placement.stream_of(key)).count()
}

#[cfg(test)]
mod tests;
