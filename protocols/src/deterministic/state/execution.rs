//! Runs transactions whose turn has come.

use std::sync::Arc;

use orthodrome_core::digest::Digest;
use orthodrome_core::id::{PartitionId, ShareId, TxnId};
use orthodrome_core::scan::is_fence;
use orthodrome_core::store::Store;
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::{Outcome, Read, Reads, Version};
use orthodrome_core::workers;

use super::super::merge::{Merged, Place};
use super::super::message::{Due, Ended, Home, Name, Part, Sequenced, Turn};
use super::super::placement::Placement;
use super::super::scheduler;
use super::{Applied, State};
use crate::functor::{Body, Functor, Output};
use crate::replication::Index;

impl State {
    /// Runs all transactions that can run, those without conflicts in parallel.
    pub fn run_ready(&mut self, applied: &mut Applied, placement: &Placement, store: &mut Store) {
        let due: Vec<Merged> = std::iter::from_fn(|| self.merge.pop()).collect();
        if placement.is_divided() {
            for merged in due {
                if self.admit(&merged, applied, placement, store) {
                    self.ran.extend((self.streams.len() > 1).then_some(merged.entry.functor.txn));
                    let Merged { entry, stamp, places, .. } = merged;
                    let due = Due { entry, stamp, places };
                    applied.due.push(due.turn());
                    self.shares.insert(due, placement);
                }
            }
            self.run_due(applied, placement, store);
            return;
        }
        let keys = due.iter().map(|merged| {
            let Functor { reads, writes, .. } = &*merged.entry.functor;
            (reads.as_slice(), writes.as_slice())
        });
        for round in scheduler::rounds(keys) {
            let round = round.into_iter().filter_map(|place| due.get(place));
            self.run_round(round, applied, placement, store);
        }
    }

    /// Runs transactions of which none writes a key that another accesses: workers read and
    /// compute, and then all writes are stored.
    fn run_round<'a>(
        &mut self,
        round: impl Iterator<Item = &'a Merged>,
        applied: &mut Applied,
        placement: &Placement,
        store: &mut Store,
    ) {
        let mut granted: Vec<&Merged> = Vec::new();
        for merged in round {
            if self.admit(merged, applied, placement, store) {
                granted.push(merged);
            }
        }
        let held: &Store = store;
        let all = workers::each(
            &*self.workers,
            &granted,
            |merged| cost(&merged.entry),
            |merged| {
                let own = part(&merged.entry.functor, placement, held);
                execute(&merged.entry, (merged.stamp, &merged.places), &[Arc::new(own)])
            },
        );
        for (merged, executed) in granted.into_iter().zip(all) {
            if self.streams.len() > 1 {
                self.ran.insert(merged.entry.functor.txn);
            }
            applied.ran.push(self.finish(&merged.entry.functor, executed, placement, store));
        }
    }

    /// True if a transaction runs, now that its turn has come.
    fn admit(
        &mut self,
        merged: &Merged,
        applied: &mut Applied,
        placement: &Placement,
        store: &Store,
    ) -> bool {
        let (name, txn) = (merged.entry.name(), merged.entry.functor.txn);
        // S10: whether it is void follows from the transactions before it on its keys. If two names
        // of one transaction are not void, the same one comes first everywhere.
        let has_run = merged.is_late || (name.map != 0 && self.ran.contains(&txn));
        let is_checked = merged.entry.target.is_some() || !self.mutations.runs_void();
        if is_checked && !self.is_right(&merged.entry) {
            applied.void.push(name);
            return false;
        }
        if merged.entry.target.is_some() {
            self.relocate(merged, placement, store);
            applied.relocated += 1;
            return false;
        }
        !has_run || self.mutations.runs_repeated()
    }

    /// Takes the parts of transactions that have their locks, and runs those that miss nothing,
    /// until none is left.
    pub fn run_due(&mut self, applied: &mut Applied, placement: &Placement, store: &mut Store) {
        loop {
            while let Some((order, due)) = self.shares.next_granted() {
                let turn = due.turn();
                let own = Arc::new(part(&due.entry.functor, placement, store));
                let others = self.shares.take_part(order, own.clone());
                if !others.is_empty() {
                    applied.taken.push((turn, others, own));
                }
            }
            let ready = self.shares.take_ready();
            if ready.is_empty() {
                return;
            }
            // Other servers have read the other shares.
            let cost = |(_, due, _): &(_, Due, _)| {
                let Functor { reads, writes, .. } = &*due.entry.functor;
                reads.iter().chain(writes).filter(|key| placement.holds(key)).count()
            };
            let all = workers::each(&*self.workers, &ready, cost, |(_, due, parts)| {
                execute(&due.entry, (due.stamp, &due.places), parts)
            });
            for ((order, due, _), executed) in ready.into_iter().zip(all) {
                applied.ran.push(self.finish(&due.entry.functor, executed, placement, store));
                self.shares.release(order, placement);
            }
        }
    }

    /// The part of a transaction in another share has arrived. Nothing happens if the transaction
    /// has run.
    pub fn arrive(&mut self, turn: Turn, share: ShareId, part: Arc<Part>) {
        if !self.has_run(turn) {
            self.shares.arrive(turn, share, part);
        }
    }

    /// True if this transaction was seen and has run, or never will.
    #[must_use]
    pub fn has_run(&self, turn: Turn) -> bool {
        let is_seen = turn.index <= self.applied(turn.stream);
        is_seen && !self.merge.contains(turn.name) && !self.shares.is_due(turn.name)
    }

    /// A key moves.
    fn relocate(&mut self, merged: &Merged, placement: &Placement, store: &Store) {
        let (Some((key, from)), Some(stream)) = (merged.entry.relocates(), merged.entry.target)
        else {
            return;
        };
        let mut since = merged.stamp.max(from.since.next());
        if !placement.is_divided() {
            // The result must not depend on something that only some servers know.
            let held = store.read(placement.partition_of(key), key).version.timestamp;
            since = since.max(held.next());
        }
        let placed = placement.stream_of(key);
        let before = self.home(key, placement).stream;
        self.away += usize::from(stream != placed);
        self.away = self.away.saturating_sub(usize::from(before != placed));
        let home = Home { counter: from.counter + 1, stream, since };
        self.moved.insert(key.clone(), home);
        let mut digest = Digest::default();
        digest.add_debug(&(key, home));
        let (first, index) = first_of(&merged.places);
        self.checks.add(first, index, digest.value());
    }

    /// A transaction has run: stores its writes, and remembers its result.
    fn finish(
        &mut self,
        functor: &Functor,
        executed: Executed,
        placement: &Placement,
        store: &mut Store,
    ) -> (TxnId, Ended) {
        let Executed { timestamp, reads, writes, stamp, first: (stream, index), digest } = executed;
        let txn = functor.txn;
        self.checks.add(stream, index, digest);
        let outcome = match writes {
            Ok(_) if self.loses_writes && txn.counter.is_multiple_of(4) => {
                Outcome::Committed(timestamp)
            }
            Ok(writes) => {
                let version = Version { timestamp, writer: txn.name() };
                for (key, value) in writes.into_iter().filter(|(key, _)| placement.holds(key)) {
                    store.put(placement.partition_of(&key), key, version, value);
                }
                for (key, read) in reads.iter().filter(|(key, _)| is_fence(key)) {
                    // A mark, unless somebody uses the fence as a key like any other.
                    let is_free = read.value.is_none() && !functor.writes.contains(key);
                    if is_free && placement.holds(key) {
                        store.put(placement.partition_of(key), key.clone(), version, None);
                    }
                }
                Outcome::Committed(timestamp)
            }
            Err(reason) => Outcome::Aborted(reason),
        };
        let reads = match functor.body {
            Body::Ops(_) => reads,
            Body::Validate { .. } => Reads::new(),
        };
        let ended = Ended { outcome, reads: Some(reads), stamp };
        if !self.is_acknowledged(txn) {
            self.ended.insert(txn, ended.clone());
        }
        (txn, ended)
    }
}

/// The result of a transaction, before its writes are stored.
struct Executed {
    timestamp: Timestamp,
    reads: Reads,
    writes: Output,
    /// The latest timestamp of its positions.
    stamp: Timestamp,
    /// The first of its streams, and its entry in that.
    first: (PartitionId, Index),
    /// The digest of its name and its result.
    digest: u64,
}

/// The first position of a transaction.
fn first_of(places: &[(PartitionId, Place)]) -> (PartitionId, Index) {
    places.iter().map(|(stream, place)| (*stream, place.index)).min().unwrap_or_default()
}

/// A hash of a transaction's result.
fn digest_of(name: Name, timestamp: Timestamp, reads: &Reads, writes: &Output) -> u64 {
    let mut digest = Digest::default();
    let Name { txn, map } = name;
    for word in [txn.client.0, txn.counter, u64::from(txn.attempt), map, timestamp.0] {
        digest.add(word);
    }
    for (key, Read { value, version }) in reads {
        digest.add_bytes(key.bytes());
        digest.add(version.timestamp.0);
        digest.add_bytes(value.as_ref().map_or(&[], |value| &value.0));
    }
    match writes {
        Ok(writes) => {
            for (key, value) in writes {
                digest.add_bytes(key.bytes());
                digest.add(u64::from(value.is_some()));
                digest.add_bytes(value.as_ref().map_or(&[], |value| &value.0));
            }
        }
        Err(reason) => digest.add_debug(reason),
    }
    digest.value()
}

/// The number of keys that a transaction accesses.
fn cost(entry: &Sequenced) -> usize {
    entry.functor.reads.len() + entry.functor.writes.len()
}

/// The part of a transaction's keys that this server holds.
fn part(functor: &Functor, placement: &Placement, store: &Store) -> Part {
    let held = |key| store.read(placement.partition_of(key), key);
    let mut part = Part::default();
    for key in functor.reads.iter().filter(|key| placement.holds(key)) {
        let read = held(key);
        part.newest = part.newest.max(read.version.timestamp);
        part.reads.insert(key.clone(), visible(read));
    }
    for key in functor.writes.iter().filter(|key| placement.holds(key)) {
        part.newest = part.newest.max(held(key).version.timestamp);
    }
    part
}

/// Computes a transaction, on any thread. Its timestamp follows from its positions and from the
/// versions that it accesses. So it is the same in every region, and grows along each key.
fn execute(
    entry: &Sequenced,
    (stamp, places): (Timestamp, &[(PartitionId, Place)]),
    parts: &[Arc<Part>],
) -> Executed {
    let mut timestamp = stamp;
    for (_, home) in &entry.moved {
        timestamp = timestamp.max(home.since.next());
    }
    let mut reads = Reads::new();
    for part in parts {
        timestamp = timestamp.max(part.newest.next());
        reads.extend(part.reads.iter().map(|(key, read)| (key.clone(), read.clone())));
    }
    let writes = entry.functor.execute(&reads);
    let digest = digest_of(entry.name(), timestamp, &reads, &writes);
    Executed { timestamp, reads, writes, stamp, first: first_of(places), digest }
}

/// A transaction sees a deleted key as one that was never written, because servers forget deletions
/// independently of each other.
pub fn visible(read: Read) -> Read {
    if read.value.is_none() { Read::default() } else { read }
}
