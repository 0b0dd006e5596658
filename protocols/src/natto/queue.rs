//! The order in which transactions access the keys of one partition: the transaction queue, the
//! holders of locks, and the transactions that wait for locks (§3.2). It is plain data: it decides
//! which transaction may continue, and its callers send the messages.
//!
//! # Why nobody waits for ever
//! A transaction has one position in one order, its timestamp and its name, which is the same at
//! every participant. It waits only for conflicting transactions with earlier positions: one that
//! arrives so late that it would have to wait for a later one is refused (N1), and no transaction
//! takes a lock for which an earlier one waits (N2). So every transaction that waits, at any
//! participant, waits for an earlier one.

use orthodrome_core::id::TxnId;
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::Key;

use super::Mutations;
use super::message::Turn;

/// A position in the order of all transactions.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Place {
    /// The time at which it should have arrived everywhere.
    pub timestamp: Timestamp,
    /// Its name, which orders transactions with equal timestamps.
    pub txn: TxnId,
}

/// The stage of a transaction at this participant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stage {
    /// Its timestamp has not passed.
    Queued,
    /// Its timestamp has passed, and earlier transactions block it.
    Waiting,
    /// It waits for others, and is prepared on the condition that they do not commit (§3.3.2).
    Conditional,
    /// It holds its keys.
    Prepared,
}

impl Stage {
    /// Its turn has come, and it does not hold its keys yet.
    fn is_waiting(self) -> bool {
        matches!(self, Self::Waiting | Self::Conditional)
    }
}

/// What a transaction does when its turn has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Nothing blocks it.
    Free,
    /// Only earlier transactions block it.
    Behind,
    /// A later conflicting transaction was here first.
    Overtaken,
}

#[derive(Clone, Debug)]
struct Entry {
    turn: Turn,
    stage: Stage,
    /// True for keys that it writes.
    keys: OrdMap<Key, bool>,
}

/// The transactions of one partition's leader, by key and by position.
#[derive(Clone, Debug, Default)]
pub struct Queue {
    mutations: Mutations,
    entries: OrdMap<TxnId, Entry>,
    /// The transactions that access a key; true for those that write it.
    keys: OrdMap<Key, OrdMap<Place, bool>>,
    queued: OrdSet<Place>,
}

impl Queue {
    /// An empty queue.
    #[must_use]
    pub fn new(mutations: Mutations) -> Self {
        Self { mutations, ..Self::default() }
    }

    /// A transaction has arrived.
    pub fn enqueue(&mut self, txn: TxnId, turn: Turn, reads: &[Key], writes: &[Key]) {
        self.insert(txn, turn, reads, writes, Stage::Queued);
        self.queued.insert(Place { timestamp: turn.timestamp, txn });
    }

    /// A transaction that an earlier leader prepared.
    pub fn hold<'a>(
        &mut self,
        txn: TxnId,
        turn: Turn,
        reads: impl IntoIterator<Item = &'a Key>,
        writes: impl IntoIterator<Item = &'a Key>,
    ) {
        self.insert(txn, turn, reads, writes, Stage::Prepared);
    }

    fn insert<'a>(
        &mut self,
        txn: TxnId,
        turn: Turn,
        reads: impl IntoIterator<Item = &'a Key>,
        writes: impl IntoIterator<Item = &'a Key>,
        stage: Stage,
    ) {
        let mut keys: OrdMap<Key, bool> =
            reads.into_iter().map(|key| (key.clone(), false)).collect();
        keys.extend(writes.into_iter().map(|key| (key.clone(), true)));
        let place = Place { timestamp: turn.timestamp, txn };
        for (key, &writes) in &keys {
            self.keys.entry(key.clone()).or_default().insert(place, writes);
        }
        let before = self.entries.insert(txn, Entry { turn, stage, keys });
        assert!(before.is_none(), "{txn} came twice");
    }

    /// The first transaction in the queue whose timestamp has passed.
    #[must_use]
    pub fn due(&self, now: Timestamp) -> Option<TxnId> {
        self.queued.first().filter(|place| place.timestamp <= now).map(|place| place.txn)
    }

    /// The turn of the first transaction in the queue.
    #[must_use]
    pub fn next(&self) -> Option<Timestamp> {
        self.queued.first().map(|place| place.timestamp)
    }

    /// The stage of `txn`; none if it is not here.
    #[must_use]
    pub fn stage(&self, txn: TxnId) -> Option<Stage> {
        self.entries.get(&txn).map(|entry| entry.stage)
    }

    /// Its turn.
    #[must_use]
    pub fn turn(&self, txn: TxnId) -> Option<Turn> {
        self.entries.get(&txn).map(|entry| entry.turn)
    }

    /// All transactions here.
    pub fn transactions(&self) -> impl Iterator<Item = TxnId> + '_ {
        self.entries.keys().copied()
    }

    /// The number of transactions here.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// All other transactions that conflict with `txn`, key by key.
    fn conflicts<'a>(
        &'a self,
        txn: TxnId,
        entry: &'a Entry,
    ) -> impl Iterator<Item = (Place, Stage)> + 'a {
        let of_key = move |(key, &writes): (&'a Key, &'a bool)| {
            let others = self.keys.get(key).into_iter().flatten();
            let hits = others.filter(move |(place, other)| (writes || **other) && place.txn != txn);
            hits.filter_map(|(place, _)| Some((*place, self.stage(place.txn)?)))
        };
        entry.keys.iter().flat_map(of_key)
    }

    /// A transaction that is in the queue.
    fn entry(&self, txn: TxnId) -> &Entry {
        let Some(entry) = self.entries.get(&txn) else { unreachable!("{txn} is not in the queue") };
        entry
    }

    /// Whether a transaction whose turn has come may continue.
    #[must_use]
    pub fn judge(&self, txn: TxnId) -> Verdict {
        let entry = self.entry(txn);
        let mine = Place { timestamp: entry.turn.timestamp, txn };
        let mut verdict = Verdict::Free;
        for (place, stage) in self.conflicts(txn, entry) {
            let counts = match stage {
                Stage::Queued => false,
                Stage::Waiting | Stage::Conditional if place > mine => {
                    !self.mutations.late_waits_for_later()
                }
                Stage::Waiting => !self.mutations.waiters_are_bypassed(),
                Stage::Conditional => true,
                Stage::Prepared => true,
            };
            if counts && place > mine && !self.mutations.late_waits_for_later() {
                return Verdict::Overtaken;
            }
            if counts {
                verdict = Verdict::Behind;
            }
        }
        verdict
    }

    /// Its turn has come, and it does not hold its keys yet.
    #[must_use]
    pub fn is_waiting(&self, txn: TxnId) -> bool {
        self.stage(txn).is_some_and(Stage::is_waiting)
    }

    /// Whether a transaction that waits may continue now: no other holds its keys, and no earlier
    /// one waits for them.
    #[must_use]
    pub fn is_free(&self, txn: TxnId) -> bool {
        let entry = self.entry(txn);
        let mine = Place { timestamp: entry.turn.timestamp, txn };
        self.conflicts(txn, entry).all(|(place, stage)| match stage {
            Stage::Queued => true,
            Stage::Waiting => place > mine || self.mutations.waiters_are_bypassed(),
            Stage::Conditional => place > mine,
            Stage::Prepared => false,
        })
    }

    /// Pairs of a transaction and a conflicting one of higher priority behind it, which would have
    /// to wait for it. `txn` is one of each pair. Prepared transactions are not included.
    #[must_use]
    pub fn out_of_rank(&self, txn: TxnId) -> OrdSet<(TxnId, TxnId)> {
        let entry = self.entry(txn);
        let mine = Place { timestamp: entry.turn.timestamp, txn };
        let mut pairs = OrdSet::new();
        for (place, stage) in self.conflicts(txn, entry) {
            let other = self.entry(place.txn);
            let (first, second) = (other.turn.priority, entry.turn.priority);
            if matches!(stage, Stage::Prepared | Stage::Conditional) {
                continue;
            }
            if place < mine && first < second {
                pairs.insert((place.txn, txn));
            } else if place > mine && first > second {
                pairs.insert((txn, place.txn));
            }
        }
        pairs
    }

    /// The transactions for which `txn` waits, if all of them are prepared; none if another one
    /// waits before it.
    #[must_use]
    pub fn holders_before(&self, txn: TxnId) -> Option<OrdSet<TxnId>> {
        let entry = self.entries.get(&txn)?;
        let mine = Place { timestamp: entry.turn.timestamp, txn };
        let mut holders = OrdSet::new();
        for (place, stage) in self.conflicts(txn, entry) {
            match stage {
                Stage::Prepared => drop(holders.insert(place.txn)),
                Stage::Waiting | Stage::Conditional if place < mine => return None,
                Stage::Waiting | Stage::Conditional | Stage::Queued => {}
            }
        }
        Some(holders)
    }

    /// The keys among these that `txn` may write.
    pub fn written<'a>(&'a self, txn: TxnId, keys: &'a [Key]) -> impl Iterator<Item = &'a Key> {
        let entry = self.entries.get(&txn);
        keys.iter().filter(move |key| entry.is_some_and(|e| e.keys.get(*key) == Some(&true)))
    }

    /// `txn` is prepared on a condition, and waits.
    pub fn prepare_conditionally(&mut self, txn: TxnId) {
        self.move_on(txn, Stage::Conditional);
    }

    /// `txn` has to wait.
    pub fn wait(&mut self, txn: TxnId) {
        self.move_on(txn, Stage::Waiting);
    }

    /// `txn` holds its keys from now on.
    ///
    /// # Panics
    /// If another transaction holds one of them.
    pub fn prepare(&mut self, txn: TxnId) {
        self.move_on(txn, Stage::Prepared);
        let holder =
            self.conflicts(txn, self.entry(txn)).find(|(_, stage)| *stage == Stage::Prepared);
        assert!(holder.is_none(), "{txn} takes the keys of {holder:?}");
    }

    fn move_on(&mut self, txn: TxnId, stage: Stage) {
        if let Some(entry) = self.entries.get_mut(&txn) {
            entry.stage = stage;
            self.queued.remove(&Place { timestamp: entry.turn.timestamp, txn });
        }
    }

    /// Removes `txn`. Returns the transactions that wait for one of its keys, in their order: some
    /// of them may continue now.
    pub fn remove(&mut self, txn: TxnId) -> Vec<TxnId> {
        // It never arrived here: only its abort did.
        let Some(Entry { turn, keys, .. }) = self.entries.remove(&txn) else { return Vec::new() };
        let place = Place { timestamp: turn.timestamp, txn };
        self.queued.remove(&place);
        let mut waiters = OrdSet::new();
        for key in keys.keys() {
            let Some(others) = self.keys.get_mut(key) else {
                unreachable!("{txn} touches {key}, and nobody does");
            };
            others.remove(&place);
            let waits = |place: &&Place| {
                self.entries.get(&place.txn).is_some_and(|entry| entry.stage.is_waiting())
            };
            waiters.extend(others.keys().filter(waits).copied());
            if others.is_empty() {
                self.keys.remove(key);
            }
        }
        waiters.into_iter().map(|place| place.txn).collect()
    }

    /// Holders that may write one of these keys.
    #[must_use]
    pub fn writers(&self, keys: &[Key]) -> OrdSet<TxnId> {
        let touching = keys.iter().filter_map(|key| self.keys.get(key)).flatten();
        touching
            .filter(|&(place, writes)| {
                let stage = self.stage(place.txn);
                *writes && matches!(stage, Some(Stage::Prepared | Stage::Conditional))
            })
            .map(|(place, _)| place.txn)
            .collect()
    }

    /// The keys that the transactions here may write.
    pub fn written_keys(&self) -> impl Iterator<Item = &Key> {
        let keys = self.entries.values().flat_map(|entry| &entry.keys);
        keys.filter(|(_, writes)| **writes).map(|(key, _)| key)
    }

    /// Panics if the queue contradicts itself, or a transaction waits that should not.
    ///
    /// # Panics
    /// If it does.
    pub fn assert_invariants(&self) {
        let Self { mutations, .. } = self;
        let is_sound = !mutations.late_waits_for_later() && !mutations.waiters_are_bypassed();
        for (&txn, entry) in &self.entries {
            let place = Place { timestamp: entry.turn.timestamp, txn };
            assert_eq!(self.queued.contains(&place), entry.stage == Stage::Queued, "{txn}");
            match entry.stage {
                Stage::Queued => {}
                Stage::Waiting | Stage::Conditional => {
                    assert!(!self.is_free(txn), "{txn} waits for nobody");
                }
                Stage::Prepared => {}
            }
        }
        for (key, others) in &self.keys {
            assert!(!others.is_empty(), "{key} is touched by nobody");
            // The holders after the current one, last to first: their number, and the number of
            // writers.
            let (mut holders, mut writers) = (0, 0);
            for (place, &writes) in others.iter().rev() {
                let entry = self.entries.get(&place.txn);
                assert!(entry.is_some_and(|entry| entry.keys.get(key) == Some(&writes)), "{key}");
                match entry.map(|entry| entry.stage) {
                    Some(Stage::Prepared) => {
                        holders += 1;
                        writers += usize::from(writes);
                    }
                    Some(Stage::Waiting | Stage::Conditional) => {
                        let waits_for_later = writers > 0 || (writes && holders > 0);
                        assert!(
                            !waits_for_later || !is_sound,
                            "{} waits for a later one",
                            place.txn
                        );
                    }
                    Some(Stage::Queued) | None => {}
                }
            }
            assert!(writers == 0 || holders == 1, "{key} is held by {holders}");
        }
    }
}
