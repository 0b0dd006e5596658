//! The deterministic merge of streams (Sloth §4.2.2–4.2.5, Alg. 1 and 2): which transactions may run,
//! and in which order.
//!
//! Every transaction is in the stream of each of its homes, and conflicts on a key are ordered by the
//! stream that the key belongs to. A transaction is *complete* when it was seen in all of them: only
//! then are all that go before it known. One that is complete, and before which only such go, runs
//! after those; where that is a cycle, all in it (a strongly connected component) run next to each
//! other in an order that follows from their places. So regions that merge the same streams differ
//! at most in the order of transactions that do not conflict.
//!
//! # Incremental
//! The thesis runs Tarjan's algorithm over the whole graph again and again. Here a complete transaction that
//! cannot run *watches* one that must go before it, and nothing else looks at it until that one runs.
//! Who watches whom is a forest whose roots are incomplete. Only when a root becomes complete can a
//! cycle close: the path from whom it would watch is followed, and if it leads back, everything on it
//! becomes one *group*, for good. Each conflict is looked at once, each transaction grouped once; what can
//! cost more is following that path, once for each transaction with several homes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::mem::take;
use std::ops::Bound;
use std::sync::Arc;

use orthodrome_core::Wire;
use orthodrome_core::digest::Digest;
use orthodrome_core::id::{ClientId, PartitionId, TxnId};
use orthodrome_core::time::{Time, Timestamp};
use orthodrome_core::txn::Key;

use super::message::{Name, Sequenced};
use crate::replication::Index;

/// Where in a stream a transaction is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Wire)]
pub struct Place {
    /// Its batch.
    pub index: Index,
    /// Its place in that.
    pub offset: u32,
    /// The batch's time: grows along the stream.
    pub stamp: Timestamp,
    /// Its client knew what became of the transaction before it came there: it ran under another name.
    pub is_late: bool,
}

/// A transaction whose turn has come.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Merged {
    /// The transaction.
    pub entry: Arc<Sequenced>,
    /// The latest time of its places.
    pub stamp: Timestamp,
    /// It came late somewhere, and does not run.
    pub is_late: bool,
    /// Where it was.
    pub places: Vec<(PartitionId, Place)>,
}

/// Streams being merged.
#[derive(Debug, Default)]
pub struct Merge {
    /// Transactions that have not run.
    vertices: BTreeMap<Name, Vertex>,
    /// Who touched a key last, of those, by the stream that orders that.
    tails: BTreeMap<(PartitionId, Key), Tail>,
    /// Incomplete ones, by when they were first seen.
    incomplete: BTreeSet<(Time, Name)>,
    /// May run, in this order.
    ready: VecDeque<Merged>,
    /// The largest component so far.
    largest: usize,
    /// The stream that orders transactions with several homes, if one does (`slog`).
    orderer: Option<PartitionId>,
    /// What the orderer has ordered and each home not yet, in its order.
    ordered: BTreeMap<PartitionId, BTreeMap<Place, Name>>,
    /// How many that have not run were seen in each stream.
    waiting: BTreeMap<PartitionId, usize>,
    /// Tests only (S7): a transaction that reads and writes a key waits for itself.
    waits_for_itself: bool,
}

#[derive(Debug)]
struct Vertex {
    /// All of it, if that was seen; else one of its pieces.
    entry: Arc<Sequenced>,
    /// Where it was seen, and as what.
    places: Vec<(PartitionId, Place, Arc<Sequenced>)>,
    /// When it was first seen here; in a group's head, the first of the group.
    since: Time,
    /// Those that go before it, as far as nobody looked at them yet; in a group's head, of all.
    before: Vec<Name>,
    /// It waits for this one at least. None if it is incomplete, or about to be looked at.
    watches: Option<Name>,
    /// Those that watch it.
    watchers: Vec<Name>,
    /// It belongs to the group of this one.
    head: Option<Name>,
    /// The others of its group, if it is the head.
    members: Vec<Name>,
}

/// Who touched a key last.
#[derive(Debug, Default)]
struct Tail {
    writer: Option<Name>,
    /// Those that have read it since.
    readers: BTreeSet<Name>,
}

impl Vertex {
    fn is_complete(&self) -> bool {
        self.places.len() == self.entry.homes.len()
    }

    fn weight(&self) -> usize {
        self.members.len() + self.before.len() + self.watchers.len()
    }
}

impl Merge {
    /// Nothing yet. `waits_for_itself` is a mistake that tests must catch (S7).
    #[must_use]
    pub fn new(orderer: Option<PartitionId>, waits_for_itself: bool) -> Self {
        Self { orderer, waits_for_itself, ..Self::default() }
    }

    /// Alg. 1: `entry` is at `place` of `stream`. Streams are given in order, each transaction once.
    pub fn insert(
        &mut self,
        stream: PartitionId,
        place: Place,
        entry: &Arc<Sequenced>,
        home: impl Fn(&Key) -> PartitionId,
        now: Time,
    ) {
        let txn = entry.name();
        assert!(
            entry.homes.contains(&stream),
            "{txn} is in {stream}, which is no home of {entry:?}"
        );
        let before = self.order(stream, entry, home);
        let vertex = self.vertices.entry(txn).or_insert_with(|| Vertex {
            entry: entry.clone(),
            places: Vec::with_capacity(entry.homes.len()),
            since: now,
            before: Vec::new(),
            watches: None,
            watchers: Vec::new(),
            head: None,
            members: Vec::new(),
        });
        assert!(
            vertex.places.iter().all(|(at, ..)| *at != stream) && vertex.entry.homes == entry.homes,
            "{txn}: {entry:?} at {stream} {place:?}, after {:?} at {:?}",
            vertex.entry,
            vertex.places
        );
        vertex.before.extend(before);
        if !entry.is_piece {
            vertex.entry = entry.clone();
        }
        vertex.places.push((stream, place, entry.clone()));
        *self.waiting.entry(stream).or_default() += 1;
        self.expect(stream, txn);
        let Some(vertex) = self.vertices.get_mut(&txn) else { return };
        if vertex.is_complete() {
            self.incomplete.remove(&(vertex.since, txn));
            self.settle(txn);
        } else {
            self.incomplete.insert((vertex.since, txn));
        }
    }

    /// With an orderer: which homes have to follow it, now that `txn` was seen in `stream`.
    fn expect(&mut self, stream: PartitionId, txn: Name) {
        let (Some(orderer), Some(vertex)) = (self.orderer, self.vertices.get(&txn)) else { return };
        let at = |stream: PartitionId| vertex.places.iter().find(|(at, ..)| *at == stream);
        let Some(&(_, place, _)) = at(orderer).filter(|_| vertex.entry.is_multi_home()) else {
            return;
        };
        if stream == orderer {
            for &home in vertex.entry.homes.iter().filter(|&&home| at(home).is_none()) {
                self.ordered.entry(home).or_default().insert(place, txn);
            }
        } else if let Some(ordered) = self.ordered.get_mut(&stream) {
            ordered.remove(&place);
        }
    }

    /// What the orderer has ordered and `home` not yet, after `after`, in its order.
    pub fn ordered(
        &self,
        home: PartitionId,
        after: Option<Place>,
    ) -> impl Iterator<Item = (Place, &Arc<Sequenced>)> {
        let after = after.map_or(Bound::Unbounded, Bound::Excluded);
        let ordered = self.ordered.get(&home).into_iter();
        let ordered = ordered.flat_map(move |ordered| ordered.range((after, Bound::Unbounded)));
        ordered.filter_map(|(place, txn)| Some((*place, &self.vertices.get(txn)?.entry)))
    }

    /// How many transactions were seen in `stream` that have not run.
    #[must_use]
    pub fn waiting(&self, stream: PartitionId) -> usize {
        self.waiting.get(&stream).copied().unwrap_or(0)
    }

    /// Those that go before `entry` in `stream` and have not run; it is last on its keys from now on.
    fn order(
        &mut self,
        stream: PartitionId,
        entry: &Sequenced,
        home: impl Fn(&Key) -> PartitionId,
    ) -> BTreeSet<Name> {
        let txn = entry.name();
        let mut before = BTreeSet::new();
        let here = |key: &&Key| entry.is_ordered_by(stream, key, &home);
        for key in entry.functor.reads.iter().filter(here) {
            let tail = self.tails.entry((stream, key.clone())).or_default();
            before.extend(tail.writer);
            tail.readers.insert(txn);
        }
        for key in entry.functor.writes.iter().filter(here) {
            let tail = self.tails.entry((stream, key.clone())).or_default();
            before.extend(tail.writer.replace(txn));
            before.append(&mut tail.readers);
        }
        if !self.waits_for_itself {
            before.remove(&txn);
        }
        before
    }

    /// Alg. 2: looks at `txn`, which is complete, and at everything that runs if it does.
    fn settle(&mut self, txn: Name) {
        let mut work = VecDeque::from([txn]);
        while let Some(next) = work.pop_front() {
            if let Some(head) = self.head(next) {
                self.look(head, &mut work);
            }
        }
    }

    /// Lets a group run, or watch another.
    fn look(&mut self, mut head: Name, work: &mut VecDeque<Name>) {
        loop {
            let Some(other) = self.next_before(head) else {
                work.extend(self.emit(head));
                return;
            };
            let Some(path) = self.path_back(other, head) else {
                if let Some(vertex) = self.vertices.get_mut(&head) {
                    vertex.watches = Some(other);
                }
                if let Some(vertex) = self.vertices.get_mut(&other) {
                    vertex.watchers.push(head);
                }
                return;
            };
            head = self.group(head, path);
        }
    }

    /// Another group that goes before that of `head`; forgets those that have run.
    fn next_before(&mut self, head: Name) -> Option<Name> {
        while let Some(&last) = self.vertices.get(&head)?.before.last() {
            let other = self.head(last);
            match other {
                Some(other) if other != head => return Some(other),
                // A transaction is never in its own way, but for the mistake.
                Some(_) if self.waits_for_itself && last == head => return Some(head),
                Some(_) | None => {}
            }
            self.vertices.get_mut(&head)?.before.pop();
        }
        None
    }

    /// The groups from `from` on along those that watch, if that leads to `to`.
    fn path_back(&mut self, from: Name, to: Name) -> Option<Vec<Name>> {
        let mut path = Vec::new();
        let mut at = from;
        while at != to {
            path.push(at);
            let watched = self.vertices.get(&at)?.watches?;
            // It watches itself: the mistake.
            at = self.head(watched).filter(|&next| next != at)?;
        }
        (!path.is_empty()).then_some(path)
    }

    /// Makes one group of `head` and those on a path back to it. The largest of them leads it.
    fn group(&mut self, head: Name, path: Vec<Name>) -> Name {
        let weight = |txn: &Name| self.vertices.get(txn).map_or(0, Vertex::weight);
        let all = || path.iter().copied().chain([head]);
        let largest = all().max_by_key(|txn| (weight(txn), *txn)).unwrap_or(head);
        let rest: Vec<Name> = all().filter(|txn| *txn != largest).collect();
        let (mut before, mut watchers, mut members) = (Vec::new(), Vec::new(), Vec::new());
        let mut since = Time::MAX;
        for txn in rest {
            let Some(vertex) = self.vertices.get_mut(&txn) else { continue };
            vertex.head = Some(largest);
            vertex.watches = None;
            before.append(&mut vertex.before);
            watchers.append(&mut vertex.watchers);
            members.append(&mut vertex.members);
            members.push(txn);
            since = since.min(vertex.since);
        }
        if let Some(vertex) = self.vertices.get_mut(&largest) {
            vertex.watches = None;
            vertex.before.append(&mut before);
            vertex.watchers.append(&mut watchers);
            vertex.members.append(&mut members);
            vertex.since = vertex.since.min(since);
        }
        largest
    }

    /// The group of `head` runs. Returns those that watched it.
    fn emit(&mut self, head: Name) -> Vec<Name> {
        let Some(mut vertex) = self.vertices.remove(&head) else { return Vec::new() };
        let (watchers, members) = (take(&mut vertex.watchers), take(&mut vertex.members));
        let mut group = vec![vertex];
        group.extend(members.iter().filter_map(|txn| self.vertices.remove(txn)));
        self.largest = self.largest.max(group.len());
        assert!(
            self.orderer.is_none() || group.len() == 1,
            "a cycle though there is one order: {:?}",
            group.iter().map(|vertex| (vertex.entry.name(), &vertex.places)).collect::<Vec<_>>()
        );
        // S7: names are chosen by clients, places are not.
        group.sort_by_cached_key(|vertex| (shuffle(vertex), vertex.entry.name()));
        for vertex in group {
            self.forget(&vertex);
            for (stream, ..) in &vertex.places {
                if let Some(waiting) = self.waiting.get_mut(stream) {
                    *waiting = waiting.saturating_sub(1);
                }
            }
            let stamps = vertex.places.iter().map(|(_, place, _)| place.stamp);
            let stamp = stamps.max().unwrap_or_default();
            let is_late = vertex.places.iter().any(|(_, place, _)| place.is_late);
            let places = vertex.places.into_iter().map(|(stream, place, _)| (stream, place));
            let places = places.collect();
            self.ready.push_back(Merged { entry: vertex.entry, stamp, is_late, places });
        }
        watchers
    }

    fn forget(&mut self, vertex: &Vertex) {
        let txn = vertex.entry.name();
        for (stream, _, entry) in &vertex.places {
            for key in entry.functor.reads.iter().chain(&entry.functor.writes) {
                let at = (*stream, key.clone());
                let Some(tail) = self.tails.get_mut(&at) else { continue };
                tail.readers.remove(&txn);
                tail.writer.take_if(|writer| *writer == txn);
                if tail.writer.is_none() && tail.readers.is_empty() {
                    self.tails.remove(&at);
                }
            }
        }
    }

    /// Who leads the group of `txn`; none if it has run. Shortens the way for the next who asks.
    fn head(&mut self, mut txn: Name) -> Option<Name> {
        while let Some(above) = self.vertices.get(&txn)?.head {
            let further = self.vertices.get(&above)?.head;
            if let (Some(further), Some(vertex)) = (further, self.vertices.get_mut(&txn)) {
                vertex.head = Some(further);
            }
            txn = above;
        }
        Some(txn)
    }

    /// Forgets everything that has not run.
    pub fn clear(&mut self) {
        let Self { largest, orderer, waits_for_itself, .. } = *self;
        *self = Self { largest, orderer, waits_for_itself, ..Self::default() };
    }

    /// The next transaction that may run.
    pub fn pop(&mut self) -> Option<Merged> {
        self.ready.pop_front()
    }

    /// How many transactions have not run.
    #[must_use]
    pub fn len(&self) -> usize {
        self.vertices.len()
    }

    /// True if every transaction has run.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.vertices.is_empty()
    }

    /// How many transactions the largest component had so far.
    #[must_use]
    pub fn largest(&self) -> usize {
        self.largest
    }

    /// True if `txn` was seen and has not run.
    #[must_use]
    pub fn contains(&self, txn: Name) -> bool {
        self.vertices.contains_key(&txn)
    }

    /// True if `txn` was seen under any name and has not run.
    #[must_use]
    pub fn contains_any(&self, txn: TxnId) -> bool {
        let names = Name { txn, map: 0 }..=Name { txn, map: u64::MAX };
        self.vertices.range(names).next().is_some()
    }

    /// The first counter of the transactions of `client` that have not run.
    #[must_use]
    pub fn first_of(&self, client: ClientId) -> Option<u64> {
        let first = Name { txn: TxnId::new(client, 0), map: 0 };
        let (next, _) = self.vertices.range(first..).next()?;
        (next.txn.client == client).then_some(next.txn.counter)
    }

    /// The homes of `txn` in whose streams it was not seen; none if it is not here.
    #[must_use]
    pub fn missing(&self, txn: Name) -> Option<Vec<PartitionId>> {
        let vertex = self.vertices.get(&txn)?;
        let is_missing = |home: &PartitionId| vertex.places.iter().all(|(seen, ..)| seen != home);
        Some(vertex.entry.homes.iter().copied().filter(is_missing).collect())
    }

    /// Incomplete transactions that were first seen before `before`, oldest first.
    pub fn incomplete_since(&self, before: Time) -> impl Iterator<Item = &Arc<Sequenced>> {
        let old = self.incomplete.range(..(before, Name::default()));
        old.filter_map(|(_, txn)| Some(&self.vertices.get(txn)?.entry))
    }

    /// Since when the oldest waits that keeps something on one of these keys of `stream` from running, as far
    /// as one path shows; none if everything on them has run (S1).
    #[must_use]
    pub fn waits_since<'a>(
        &self,
        stream: PartitionId,
        keys: impl Iterator<Item = &'a Key>,
    ) -> Option<Time> {
        let tails = keys.filter_map(|key| self.tails.get(&(stream, key.clone())));
        let last = tails.flat_map(|tail| tail.writer.iter().chain(tail.readers.iter().next()));
        last.filter_map(|&txn| self.oldest_on_path(txn)).min()
    }

    fn oldest_on_path(&self, txn: Name) -> Option<Time> {
        let mut oldest = None::<Time>;
        let mut next = Some(txn);
        while let Some(vertex) = next.and_then(|txn| self.vertices.get(&txn)) {
            oldest = Some(oldest.map_or(vertex.since, |oldest| oldest.min(vertex.since)));
            next = vertex.head.or(vertex.watches).filter(|&then| Some(then) != next);
        }
        oldest
    }

    /// The earliest time, by its stream, of those of `stream` that have not run.
    #[must_use]
    pub fn earliest(&self, stream: PartitionId) -> Option<Timestamp> {
        let places = self.vertices.values().flat_map(|vertex| &vertex.places);
        places.filter(|(at, ..)| *at == stream).map(|(_, place, _)| place.stamp).min()
    }

    /// The places of everything that has not run.
    pub fn places(&self) -> impl Iterator<Item = (PartitionId, Place)> + '_ {
        let places = self.vertices.values().flat_map(|vertex| &vertex.places);
        places.map(|(stream, place, _)| (*stream, *place))
    }

    /// Everything that has not run, by stream and place: inserted again in this order, it gives the
    /// same merge (S8).
    #[must_use]
    pub fn pending(&self) -> Vec<(PartitionId, Place, Arc<Sequenced>)> {
        let places = self.vertices.values().flat_map(|vertex| &vertex.places);
        let mut pending: Vec<_> = places.cloned().collect();
        pending.sort_by_key(|&(stream, place, _)| (stream, place));
        pending
    }

    /// Panics if the state contradicts itself.
    ///
    /// # Panics
    /// If it does; the message names the contradiction.
    pub fn assert_invariants(&self) {
        assert!(self.ready.is_empty(), "transactions may run and do not");
        let places: usize = self.vertices.values().map(|vertex| vertex.places.len()).sum();
        let waiting: usize = self.waiting.values().sum();
        assert_eq!(waiting, places, "transactions that wait are not counted");
        for (txn, vertex) in &self.vertices {
            let waits = vertex.head.is_some() || vertex.watches.is_some();
            assert_eq!(
                waits,
                vertex.is_complete(),
                "{txn} is complete and waits for nothing, or not"
            );
            for other in vertex.head.iter().chain(&vertex.watches) {
                assert!(
                    self.vertices.contains_key(other),
                    "{txn} waits for {other}, which has run"
                );
            }
            let is_listed = self.incomplete.contains(&(vertex.since, *txn));
            assert!(is_listed != vertex.is_complete(), "{txn} is not where incomplete ones are");
        }
    }
}

/// A number that follows from a transaction's name and places.
fn shuffle(vertex: &Vertex) -> u64 {
    let mut digest = Digest::default();
    let Name { txn, map } = vertex.entry.name();
    digest.add(map);
    digest.add(txn.client.0);
    digest.add(txn.counter);
    digest.add(u64::from(txn.attempt));
    let mut places = vertex.places.clone();
    places.sort_by_key(|(stream, ..)| *stream);
    for (stream, place, _) in places {
        digest.add(u64::from(stream.0));
        digest.add(place.index.0);
        digest.add(u64::from(place.offset));
    }
    digest.value()
}

#[cfg(test)]
mod tests;
