//! Joins the states of two servers: afterwards one knows what both knew (S3, S8).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use orthodrome_core::id::{PartitionId, TxnId};
use orthodrome_core::store::{Store, Versions};
use orthodrome_core::time::{Time, Timestamp};
use orthodrome_core::txn::{Key, Version};

use super::super::merge::Place;
use super::super::message::{Due, Ended, Home, Image, Sequenced, Turn};
use super::super::placement::Placement;
use super::{Applied, State, acknowledged, away};
use crate::replication::Index;

impl State {
    /// Learns what another server's state knows and this one does not (S3, S8): afterwards this is the
    /// state that follows from the longer prefix of each stream. Neither has to know more than the other, so
    /// it does not matter how much of their logs they have forgotten. Returns what ran of it that neither
    /// had run.
    ///
    /// It can be done because what a state has run is closed under *goes before*: of those that touch
    /// a key, one state has run the first few, the other the first few, and the same.
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
        let mut pending: BTreeMap<(PartitionId, Place), Arc<Sequenced>> = BTreeMap::new();
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
        // One that only one of them knows to be due comes after whatever it has to wait for, in both.
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

    /// Of every key, the newest version counts: timestamps grow along it. Where one state has no version
    /// at all, it may have forgotten a deletion; that has happened if what the other has is older than
    /// everything that has not run in the first.
    fn join_data(
        (ours, theirs): (&Image, &Image),
        data: Vec<(Key, Versions)>,
        placement: &Placement,
        store: &mut Store,
    ) {
        let floors = Floors::of(ours, placement);
        let mut seen = BTreeSet::new();
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
                store.put(partition, key, version, value);
            }
        }
        let floors = Floors::of(theirs, placement);
        for (partition, _) in placement.partitions() {
            for (key, versions) in store.scan(partition, None, usize::MAX) {
                let floor = floors.at(&key);
                let is_old = versions.last().is_some_and(|(held, _)| held.timestamp < floor);
                if is_old && !seen.contains(&key) {
                    // Whatever comes later gets a larger timestamp than this.
                    let timestamp = Timestamp(floor.0.saturating_sub(1));
                    store.put(partition, key, Version { timestamp, ..Version::INITIAL }, None);
                }
            }
        }
    }

    /// After a state was taken: parts that came for what has run are not needed.
    fn forget_arrived(&mut self) {
        let Self { merge, shares, streams, .. } = self;
        shares.forget_arrived(|Turn { stream, index, name }| {
            let applied = streams.get(&stream).map_or(Index(0), |stream| stream.applied);
            index > applied || merge.contains(name)
        });
    }
}

/// Bounds of the timestamps that transactions get on each key if they have not run in a state. What the state
/// has forgotten of a key is older.
struct Floors<'a> {
    placement: &'a Placement,
    moved: &'a BTreeMap<Key, Home>,
    streams: BTreeMap<PartitionId, Timestamp>,
    /// Of keys that transactions touch that are due. The key may have moved since their turn came: what its new home
    /// orders is later, these need not be.
    due: BTreeMap<&'a Key, Timestamp>,
}

impl<'a> Floors<'a> {
    fn of(image: &'a Image, placement: &'a Placement) -> Self {
        let streams = placement.streams().into_iter();
        let streams = streams.map(|stream| (stream, image.collectable(stream))).collect();
        let mut due: BTreeMap<&Key, Timestamp> = BTreeMap::new();
        for waiting in &image.due {
            for key in waiting.keys() {
                let floor = due.entry(key).or_insert(Timestamp::MAX);
                *floor = (*floor).min(waiting.earliest());
            }
        }
        Self { placement, moved: &image.moved, streams, due }
    }

    /// Whatever has not run and touches `key` gets a timestamp that is not below this.
    fn at(&self, key: &Key) -> Timestamp {
        let placed = || Home { stream: self.placement.stream_of(key), ..Home::default() };
        let home = self.moved.get(key).copied().unwrap_or_else(placed);
        let floor = self.streams.get(&home.stream).copied().unwrap_or_default().max(home.since);
        self.due.get(key).map_or(floor, |due| floor.min(*due))
    }
}
