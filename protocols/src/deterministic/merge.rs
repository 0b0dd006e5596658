//! The deterministic merge of streams (Sloth §4.2.2–4.2.5, Alg. 1 and 2): which transactions may
//! run, and in which order.
//!
//! Every transaction is in the stream of each of its homes. Conflicts on a key are ordered by the
//! stream to which the key belongs. A transaction is *complete* when it has been seen in all its
//! streams: only then are all transactions known that go before it. A complete transaction runs
//! after those that go before it, if all of these are complete too. If they form a cycle, the whole
//! cycle (a strongly connected component) runs together, in an order that follows from the
//! positions of its transactions. So regions that merge the same streams differ at most in the
//! order of transactions that do not conflict.
//!
//! # Incremental
//! The thesis runs Tarjan's algorithm over the whole graph again and again. Here a complete
//! transaction that cannot run *watches* one that must go before it, and is not examined again
//! until that one runs. The watch relation is a forest whose roots are incomplete. Only when a root
//! becomes complete can a cycle close: the merge follows the path from the transaction that the
//! root would watch. If the path leads back, all transactions on it become one *group*, for good.
//! Each conflict is examined once, and each transaction is grouped once. Only following that path
//! can cost more, once for each transaction with several homes.

use std::collections::VecDeque;
use std::mem::take;
use std::ops::Bound;
use std::sync::Arc;

use orthodrome_core::Wire;
use orthodrome_core::digest::Digest;
use orthodrome_core::id::{ClientId, PartitionId, TxnId};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::scan::is_fence;
use orthodrome_core::time::{Time, Timestamp};
use orthodrome_core::txn::Key;

use super::message::{Name, Sequenced};
use crate::replication::Index;

/// The position of a transaction in a stream.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Wire)]
pub struct Place {
    /// Its batch.
    pub index: Index,
    /// Its position in that batch.
    pub offset: u32,
    /// The batch's timestamp, which grows along the stream.
    pub stamp: Timestamp,
    /// True if its client already knew the outcome of the transaction before this position: it has
    /// run under another name.
    pub is_late: bool,
}

/// A transaction whose turn has come.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Merged {
    /// The transaction.
    pub entry: Arc<Sequenced>,
    /// The latest timestamp of its positions.
    pub stamp: Timestamp,
    /// True if it was late in some stream, and does not run.
    pub is_late: bool,
    /// Its positions.
    pub places: Vec<(PartitionId, Place)>,
}

/// The merge of streams.
#[derive(Debug, Default)]
pub struct Merge {
    /// Transactions that have not run.
    vertices: OrdMap<Name, Vertex>,
    /// For each stream and key that it orders, the last of those that access the key.
    tails: OrdMap<PartitionId, OrdMap<Key, Tail>>,
    /// Incomplete transactions, by the time when they were first seen.
    incomplete: OrdSet<(Time, Name)>,
    /// Transactions that may run, in this order.
    ready: VecDeque<Merged>,
    /// The size of the largest component so far.
    largest: usize,
    /// The stream that orders transactions with several homes, if there is one (`slog`).
    orderer: Option<PartitionId>,
    /// Transactions that the orderer has ordered and a home has not, by home, in the orderer's
    /// order.
    ordered: OrdMap<PartitionId, OrdMap<Place, Name>>,
    /// The number of transactions seen in each stream that have not run.
    waiting: OrdMap<PartitionId, usize>,
    /// Tests only (S7): a transaction that reads and writes a key waits for itself.
    waits_for_itself: bool,
}

#[derive(Debug)]
struct Vertex {
    /// The whole transaction, if it was seen; otherwise one of its pieces.
    entry: Arc<Sequenced>,
    /// The positions at which it was seen, and what was seen there.
    places: Vec<(PartitionId, Place, Arc<Sequenced>)>,
    /// When it was first seen here; in a group's head, the first of the group.
    since: Time,
    /// Transactions that go before it and were not examined yet; in a group's head, those of the
    /// whole group.
    before: Vec<Name>,
    /// A transaction for which it waits. None if it is incomplete, or about to be examined.
    watches: Option<Name>,
    /// The transactions that watch it.
    watchers: Vec<Name>,
    /// The head of its group.
    head: Option<Name>,
    /// The other members of its group, if it is the head.
    members: Vec<Name>,
}

/// The last transactions that access a key.
#[derive(Debug, Default)]
struct Tail {
    writer: Option<Name>,
    /// Transactions that have read it since.
    readers: OrdSet<Name>,
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
    /// No streams yet. `waits_for_itself` is a mutation that tests must catch (S7).
    #[must_use]
    pub fn new(orderer: Option<PartitionId>, waits_for_itself: bool) -> Self {
        Self { orderer, waits_for_itself, ..Self::default() }
    }

    /// Alg. 1: `entry` is at position `place` of `stream`. Entries of a stream arrive in order,
    /// each transaction once.
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

    /// With an orderer: updates which homes must follow it, now that `txn` was seen in `stream`.
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

    /// The transactions that the orderer has ordered and `home` has not, after position `after`, in
    /// the orderer's order.
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

    /// The number of transactions seen in `stream` that have not run.
    #[must_use]
    pub fn waiting(&self, stream: PartitionId) -> usize {
        self.waiting.get(&stream).copied().unwrap_or(0)
    }

    /// The transactions that go before `entry` in `stream` and have not run. `entry` becomes the
    /// last one on its keys.
    fn order(
        &mut self,
        stream: PartitionId,
        entry: &Sequenced,
        home: impl Fn(&Key) -> PartitionId,
    ) -> OrdSet<Name> {
        let txn = entry.name();
        let mut before = OrdSet::new();
        let here = |key: &&Key| entry.is_ordered_by(stream, key, &home);
        let tails = self.tails.entry(stream).or_default();
        for key in entry.functor.reads.iter().filter(here) {
            let tail = tails.entry(key.clone()).or_default();
            if is_fence(key) {
                // It leaves a mark there.
                before.extend(tail.writer.replace(txn));
                before.append(&mut tail.readers);
                continue;
            }
            before.extend(tail.writer);
            tail.readers.insert(txn);
        }
        for key in entry.functor.writes.iter().filter(here) {
            let tail = tails.entry(key.clone()).or_default();
            before.extend(tail.writer.replace(txn));
            before.append(&mut tail.readers);
        }
        if !self.waits_for_itself {
            before.remove(&txn);
        }
        before
    }

    /// Alg. 2: examines the complete transaction `txn`, and every transaction that can run if it
    /// does.
    fn settle(&mut self, txn: Name) {
        let mut work = VecDeque::from([txn]);
        while let Some(next) = work.pop_front() {
            if let Some(head) = self.head(next) {
                self.look(head, &mut work);
            }
        }
    }

    /// Lets a group run, or watch another group.
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

    /// Another group that goes before that of `head`; removes those that have run.
    fn next_before(&mut self, head: Name) -> Option<Name> {
        while let Some(&last) = self.vertices.get(&head)?.before.last() {
            let other = self.head(last);
            match other {
                Some(other) if other != head => return Some(other),
                // A transaction never waits for itself, except with the mutation.
                Some(_) if self.waits_for_itself && last == head => return Some(head),
                Some(_) | None => {}
            }
            self.vertices.get_mut(&head)?.before.pop();
        }
        None
    }

    /// The groups on the path of watched groups from `from`, if it leads to `to`.
    fn path_back(&mut self, from: Name, to: Name) -> Option<Vec<Name>> {
        let mut path = Vec::new();
        let mut at = from;
        while at != to {
            path.push(at);
            let watched = self.vertices.get(&at)?.watches?;
            // It watches itself: the mutation.
            at = self.head(watched).filter(|&next| next != at)?;
        }
        (!path.is_empty()).then_some(path)
    }

    /// Merges the group of `head` and those on a path back to it. The largest of them provides the
    /// head.
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

    /// Runs the group of `head`. Returns the transactions that watched it.
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
        // S7: clients choose names, but not positions.
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
            let Some(tails) = self.tails.get_mut(stream) else { continue };
            let reads = &entry.functor.reads;
            let only_written = entry.functor.writes.iter().filter(|key| !reads.contains(key));
            for key in reads.iter().chain(only_written) {
                let Some(tail) = tails.get_mut(key) else { continue };
                tail.readers.remove(&txn);
                tail.writer.take_if(|writer| *writer == txn);
                if tail.writer.is_none() && tail.readers.is_empty() {
                    tails.remove(key);
                }
            }
            if tails.is_empty() {
                self.tails.remove(stream);
            }
        }
    }

    /// The head of `txn`'s group; none if it has run. Shortens the path for later calls.
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

    /// Drops everything that has not run.
    pub fn clear(&mut self) {
        let Self { largest, orderer, waits_for_itself, .. } = *self;
        *self = Self { largest, orderer, waits_for_itself, ..Self::default() };
    }

    /// The next transaction that may run.
    pub fn pop(&mut self) -> Option<Merged> {
        self.ready.pop_front()
    }

    /// The number of transactions that have not run.
    #[must_use]
    pub fn len(&self) -> usize {
        self.vertices.len()
    }

    /// True if every transaction has run.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.vertices.is_empty()
    }

    /// The size of the largest component so far.
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
            || self.ready.iter().any(|merged| merged.entry.functor.txn == txn)
    }

    /// The first counter of the transactions of `client` that have not run.
    #[must_use]
    pub fn first_of(&self, client: ClientId) -> Option<u64> {
        let first = Name { txn: TxnId::new(client, 0), map: 0 };
        let (next, _) = self.vertices.range(first..).next()?;
        (next.txn.client == client).then_some(next.txn.counter)
    }

    /// The homes in whose streams `txn` was not seen; none if it is not here.
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

    /// When the oldest transaction was first seen that blocks a transaction on one of these keys of
    /// `stream`, following one path; none if all transactions on them have run (S1).
    #[must_use]
    pub fn waits_since<'a>(
        &self,
        stream: PartitionId,
        keys: impl Iterator<Item = &'a Key>,
    ) -> Option<Time> {
        let tails = self.tails.get(&stream);
        let tails = keys.filter_map(|key| tails?.get(key));
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

    /// The earliest timestamp in `stream` of its transactions that have not run.
    #[must_use]
    pub fn earliest(&self, stream: PartitionId) -> Option<Timestamp> {
        let places = self.vertices.values().flat_map(|vertex| &vertex.places);
        places.filter(|(at, ..)| *at == stream).map(|(_, place, _)| place.stamp).min()
    }

    /// The positions of all transactions that have not run.
    pub fn places(&self) -> impl Iterator<Item = (PartitionId, Place)> + '_ {
        let places = self.vertices.values().flat_map(|vertex| &vertex.places);
        places.map(|(stream, place, _)| (*stream, *place))
    }

    /// The keys that transactions which have not run may write, some of them several times.
    pub fn writes(&self) -> impl Iterator<Item = &Key> {
        let places = self.vertices.values().flat_map(|vertex| &vertex.places);
        places.flat_map(|(.., entry)| &entry.functor.writes)
    }

    /// All transactions that have not run, by stream and position: inserted again in this order,
    /// they give the same merge (S8).
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

/// A number that follows from a transaction's name and positions.
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
