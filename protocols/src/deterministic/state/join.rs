//! Joins the states of two servers: the result contains what either knew (S3, S8).

use std::sync::Arc;

use orthodrome_core::id::{PartitionId, TxnId};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::store::{Store, Versions};
use orthodrome_core::time::{Time, Timestamp};
use orthodrome_core::txn::{Key, Version};

use super::super::merge::Place;
use super::super::message::{Due, Ended, Home, Image, Sequenced, Turn};
use super::super::placement::Placement;
use super::{Applied, State, acknowledged, away};
use crate::replication::Index;

impl State {
    /// Adds what another server's state knows and this one does not (S3, S8). Afterwards this is
    /// the state that follows from the longer prefix of each stream. Neither server has to be ahead
    /// in all streams, so it does not matter how much of their logs they have dropped. Returns the
    /// transactions that ran now because neither had run them.
    ///
    /// It is possible because the transactions that a state has run include all that *go before*
    /// any of them. Of the transactions on one key, each state has run a prefix of the same
    /// sequence.
    pub fn join(
        &mut self,
        image: &Image,
        data: Vec<(Key, Versions)>,
        placement: &Placement,
        store: &mut Store,
        now: Time,
    ) -> Applied {
        let ours = self.image(placement);
        Self::join_data((&ours, image), data, placement, store);
        let mut pending: OrdMap<(PartitionId, Place), Arc<Sequenced>> = OrdMap::new();
        for (one, other) in [(&ours, image), (image, &ours)] {
            let has_run = other.has_run(&one.pending);
            for (stream, place, entry) in &one.pending {
                if !has_run.contains(&entry.name()) {
                    pending.insert((*stream, *place), entry.clone());
                }
            }
        }
        for (&stream, theirs) in &image.streams {
            let held = self.streams.entry(stream).or_default();
            if theirs.applied > held.applied {
                *held = theirs.clone();
            }
        }
        self.acknowledged = acknowledged(&self.streams);
        for (key, theirs) in &image.moved {
            let held = self.moved.entry(key.clone()).or_default();
            *held = (*held).max(*theirs);
        }
        self.away = away(&self.moved, placement);
        for (&txn, theirs) in &image.ended {
            let is_better = |ours: &Ended| ours.reads.is_none() && theirs.reads.is_some();
            if self.ended.get(txn).is_none_or(is_better) {
                self.ended.insert(txn, theirs.clone());
            }
        }
        for (&client, &below) in &self.acknowledged {
            self.ended.acknowledge(TxnId::new(client, 0)..TxnId::new(client, below));
        }
        for (&stream, held) in &self.streams {
            self.checks.begin(stream, held.applied);
        }
        self.ran.extend(image.ran.iter().copied());
        // A transaction that only one of them has as due comes after everything for which it waits,
        // in both.
        let (waits, theirs) = (ours.waits(), image.waits());
        let mine = ours.due.iter().filter(|due| !image.has_run_due(due, &theirs));
        let new = image
            .due
            .iter()
            .filter(|due| !self.shares.is_due(due.entry.name()) && !ours.has_run_due(due, &waits));
        let due: Vec<Due> = mine.chain(new).cloned().collect();
        self.shares.restore(due, &image.kept, placement);
        self.merge.clear();
        for ((stream, place), entry) in &pending {
            self.merge.insert(*stream, *place, entry, |key| placement.stream_of(key), now);
        }
        let mut applied = Applied::default();
        self.run_ready(&mut applied, placement, store);
        self.forget_arrived();
        applied
    }

    /// The newest version of every key counts, because timestamps grow along a key. If one state
    /// has no version of a key, it may have forgotten a deletion. That is the case if the other
    /// state's version is older than everything that has not run in the first.
    fn join_data(
        (ours, theirs): (&Image, &Image),
        data: Vec<(Key, Versions)>,
        placement: &Placement,
        store: &mut Store,
    ) {
        let floors = Floors::of(ours, placement);
        let mut seen = OrdSet::new();
        for (key, mut versions) in data {
            let partition = placement.partition_of(&key);
            let Some((version, value)) = versions.pop() else { continue };
            seen.insert(key.clone());
            let held = store.read(partition, &key).version;
            let is_known = if held == Version::INITIAL {
                version.timestamp < floors.at(&key)
            } else {
                version <= held
            };
            if !is_known {
                store.copied(partition, version.timestamp);
                store.put(partition, key, version, value);
            }
        }
        let floors = Floors::of(theirs, placement);
        for (partition, _) in placement.partitions() {
            for (key, versions) in store.scan(partition, None, usize::MAX) {
                let floor = floors.at(&key);
                let is_old = versions.last().is_some_and(|(held, _)| held.timestamp < floor);
                if is_old && !seen.contains(&key) {
                    // Every later version gets a larger timestamp than this.
                    let timestamp = Timestamp(floor.0.saturating_sub(1));
                    store.copied(partition, timestamp);
                    store.put(partition, key, Version { timestamp, ..Version::INITIAL }, None);
                }
            }
        }
    }

    /// After a state was joined: parts that arrived for transactions which have run are not needed.
    fn forget_arrived(&mut self) {
        let Self { merge, shares, streams, .. } = self;
        shares.forget_arrived(|Turn { stream, index, name }| {
            let applied = streams.get(&stream).map_or(Index(0), |stream| stream.applied);
            index > applied || merge.contains(name)
        });
    }
}

/// Lower bounds of the timestamps that transactions get on each key if they have not run in a
/// state. Versions that the state has forgotten are older.
struct Floors<'a> {
    placement: &'a Placement,
    moved: &'a OrdMap<Key, Home>,
    streams: OrdMap<PartitionId, Timestamp>,
    /// For keys of due transactions. The key may have moved since their turn came: transactions
    /// ordered by its new home are later, but these need not be.
    due: OrdMap<&'a Key, Timestamp>,
}

impl<'a> Floors<'a> {
    fn of(image: &'a Image, placement: &'a Placement) -> Self {
        let streams = placement.streams().into_iter();
        let streams = streams.map(|stream| (stream, image.collectable(stream))).collect();
        let mut due: OrdMap<&Key, Timestamp> = OrdMap::new();
        for waiting in &image.due {
            for key in waiting.keys() {
                let floor = due.entry(key).or_insert(Timestamp::MAX);
                *floor = (*floor).min(waiting.earliest());
            }
        }
        Self { placement, moved: &image.moved, streams, due }
    }

    /// Every transaction that accesses `key` and has not run gets a timestamp that is not below
    /// this.
    fn at(&self, key: &Key) -> Timestamp {
        let placed = || Home { stream: self.placement.stream_of(key), ..Home::default() };
        let home = self.moved.get(key).copied().unwrap_or_else(placed);
        let floor = self.streams.get(&home.stream).copied().unwrap_or_default().max(home.since);
        self.due.get(key).map_or(floor, |due| floor.min(*due))
    }
}
