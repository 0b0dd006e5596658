//! Who touches which key of one partition, in which order: the transaction queue, the holders of
//! locks, and those that wait for locks (§3.2). Plain data: it decides who may go; others tell them.
//!
//! # Why nobody waits for ever
//! A transaction has one place in one order, its timestamp and its name, and the same at every
//! participant. It waits for conflicting ones with earlier places only: one that comes so late that it
//! would have to wait for a later one is refused (N1), and nobody takes a lock that an earlier one waits
//! for (N2). So whoever waits, anywhere, waits for somebody earlier.

use std::collections::{BTreeMap, BTreeSet};

use orthodrome_core::id::TxnId;
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::Key;

use super::Mutations;
use super::message::Turn;

/// A place in the order of all transactions.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Place {
    /// When it should have arrived everywhere.
    pub timestamp: Timestamp,
    /// Its name, for those of equal timestamps.
    pub txn: TxnId,
}

/// How far a transaction has come here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stage {
    /// Its timestamp has not passed.
    Queued,
    /// Its timestamp has passed, and others are before it.
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

/// What becomes of a transaction whose turn has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Nobody is in its way.
    Free,
    /// Only earlier ones are in its way.
    Behind,
    /// A later one that conflicts was here first.
    Overtaken,
}

#[derive(Clone, Debug)]
struct Entry {
    turn: Turn,
    stage: Stage,
    /// True for those it writes.
    keys: BTreeMap<Key, bool>,
}

/// The transactions of one partition's leader, by key and by place.
#[derive(Clone, Debug, Default)]
pub struct Queue {
    mutations: Mutations,
    entries: BTreeMap<TxnId, Entry>,
    /// Who touches a key; true for those that write it.
    keys: BTreeMap<Key, BTreeMap<Place, bool>>,
    queued: BTreeSet<Place>,
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
        let mut keys: BTreeMap<Key, bool> =
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

    /// When the turn of the first in the queue comes.
    #[must_use]
    pub fn next(&self) -> Option<Timestamp> {
        self.queued.first().map(|place| place.timestamp)
    }

    /// How far `txn` has come; none if it is not here.
    #[must_use]
    pub fn stage(&self, txn: TxnId) -> Option<Stage> {
        self.entries.get(&txn).map(|entry| entry.stage)
    }

    /// When its turn is, and how much it matters.
    #[must_use]
    pub fn turn(&self, txn: TxnId) -> Option<Turn> {
        self.entries.get(&txn).map(|entry| entry.turn)
    }

    /// Everybody here.
    pub fn transactions(&self) -> impl Iterator<Item = TxnId> + '_ {
        self.entries.keys().copied()
    }

    /// How many are here.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Everybody else who touches a key of `txn` that one of the two writes, key by key.
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

    /// Whether a transaction whose turn has come may go.
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

    /// Whether a transaction that waits may go now: nobody holds its keys, and nobody earlier waits
    /// for one of them.
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

    /// Pairs of a transaction and a more important one that stands behind it, conflicts with it, and
    /// would have to wait for it: `txn` is one of each pair. Those that are prepared stay.
    #[must_use]
    pub fn out_of_rank(&self, txn: TxnId) -> BTreeSet<(TxnId, TxnId)> {
        let entry = self.entry(txn);
        let mine = Place { timestamp: entry.turn.timestamp, txn };
        let mut pairs = BTreeSet::new();
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

    /// Those that `txn` waits for, if all of them are prepared; none if somebody else waits before it.
    #[must_use]
    pub fn holders_before(&self, txn: TxnId) -> Option<BTreeSet<TxnId>> {
        let entry = self.entries.get(&txn)?;
        let mine = Place { timestamp: entry.turn.timestamp, txn };
        let mut holders = BTreeSet::new();
        for (place, stage) in self.conflicts(txn, entry) {
            match stage {
                Stage::Prepared => drop(holders.insert(place.txn)),
                Stage::Waiting | Stage::Conditional if place < mine => return None,
                Stage::Waiting | Stage::Conditional | Stage::Queued => {}
            }
        }
        Some(holders)
    }

    /// Those of the keys that `txn` may write.
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
    /// If somebody else holds one of them.
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

    /// `txn` leaves. Returns those that wait for a key that it touched, in their order: some of them
    /// may go now.
    pub fn remove(&mut self, txn: TxnId) -> Vec<TxnId> {
        // It never came here: its abort was all that did.
        let Some(Entry { turn, keys, .. }) = self.entries.remove(&txn) else { return Vec::new() };
        let place = Place { timestamp: turn.timestamp, txn };
        self.queued.remove(&place);
        let mut waiters = BTreeSet::new();
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
    pub fn writers(&self, keys: &[Key]) -> BTreeSet<TxnId> {
        let touching = keys.iter().filter_map(|key| self.keys.get(key)).flatten();
        touching
            .filter(|&(place, writes)| {
                let stage = self.stage(place.txn);
                *writes && matches!(stage, Some(Stage::Prepared | Stage::Conditional))
            })
            .map(|(place, _)| place.txn)
            .collect()
    }

    /// Panics if the queue contradicts itself, or somebody waits who should not.
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
            // Holders after the one that is looked at, last to first: how many, and how many write.
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
