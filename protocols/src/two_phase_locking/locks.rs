//! The lock table of one partition's leader: shared and exclusive locks, one queue for each key,
//! wound-wait, and the two kinds of preemption. It is plain data: it decides who holds, who waits
//! and who loses locks, and its callers send the messages.
//!
//! # Why nobody waits for ever
//! Transactions are ranked. A transaction waits only for transactions ranked before it, or for a
//! prepared transaction, which waits for nobody. With [`Preemption::OnWait`] it may also wait for
//! one that is not known here to wait; that one loses its locks as soon as it is known to wait. So
//! no cycle of the waits-for graph lasts.

use orthodrome_core::Wire;
use orthodrome_core::id::TxnId;
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::{Key, Priority};

/// The effect of priorities (Natto §4).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Preemption {
    /// None: wound-wait by age alone.
    #[default]
    Never,
    /// A transaction takes locks from every conflicting one of lower priority. It also removes
    /// older ones of lower priority from the queues in which it waits.
    Always,
    /// A transaction takes locks from a conflicting one of lower priority that is younger, or that
    /// itself waits for another lock (preempt-on-wait).
    OnWait,
}

/// The rank of a transaction.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Wire)]
pub struct Rank {
    /// Its priority.
    pub priority: Priority,
    /// When its first attempt began, by its gateway's clock. A retry keeps it, so that a victim
    /// grows old and no transaction starves (`protocol-pitfalls` T5). Only fairness depends on it.
    pub age: Timestamp,
}

/// The mode of a lock.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Mode {
    /// For reading.
    Shared,
    /// For writing, and for reading a key that will be written.
    Exclusive,
}

impl Mode {
    fn conflicts(self, other: Self) -> bool {
        self == Self::Exclusive || other == Self::Exclusive
    }
}

/// Why a transaction lost its locks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Loss {
    /// To an older transaction.
    Wounded,
    /// To a transaction of higher priority.
    Preempted,
    /// To a transaction of higher priority, while it waited for a lock elsewhere.
    PreemptedOnWait,
}

/// A position in a queue: the first in this order is served first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Place(std::cmp::Reverse<Priority>, Timestamp, TxnId);

/// One key.
#[derive(Clone, Debug, Default)]
struct Lock {
    holders: OrdMap<TxnId, Mode>,
    waiters: OrdMap<Place, Mode>,
}

impl Lock {
    /// True if another transaction than `txn` holds it in a conflicting mode.
    fn is_held_against(&self, txn: TxnId, mode: Mode) -> bool {
        self.holders.iter().any(|(&holder, &held)| holder != txn && held.conflicts(mode))
    }
}

/// One transaction.
#[derive(Clone, Debug)]
struct Owner {
    rank: Rank,
    keys: OrdMap<Key, Mode>,
    /// Keys that it waits for here.
    waits: OrdSet<Key>,
    waits_elsewhere: bool,
    /// True if it keeps its locks until its end is applied.
    is_prepared: bool,
}

/// The locks of one partition.
#[derive(Clone, Debug, Default)]
pub struct LockTable {
    preemption: Preemption,
    /// T5, for tests: prepared transactions lose their locks like others.
    wounds_prepared: bool,
    locks: OrdMap<Key, Lock>,
    owners: OrdMap<TxnId, Owner>,
    granted: Vec<TxnId>,
}

impl LockTable {
    /// An empty table.
    #[must_use]
    pub fn new(preemption: Preemption, wounds_prepared: bool) -> Self {
        Self { preemption, wounds_prepared, ..Self::default() }
    }

    /// `txn` requests these locks in addition to those that it has. It keeps the rank of its first
    /// request, because a gateway that restarted assigns another age. Returns the transactions that
    /// lose all locks here because of it, perhaps `txn` itself. [`LockTable::take_granted`] returns
    /// the transactions all of whose requests are granted.
    pub fn request(
        &mut self,
        txn: TxnId,
        rank: Rank,
        keys: impl IntoIterator<Item = (Key, Mode)>,
    ) -> Vec<(TxnId, Loss)> {
        let rank = self.owners.get(&txn).map_or(rank, |owner| owner.rank);
        let place = self.place(txn, rank);
        let owner = self.owners.entry(txn).or_insert_with(|| Owner {
            rank,
            keys: OrdMap::new(),
            waits: OrdSet::new(),
            waits_elsewhere: false,
            is_prepared: false,
        });
        for (key, mode) in keys {
            let lock = self.locks.entry(key.clone()).or_default();
            if lock.holders.get(&txn).is_some_and(|&held| held >= mode) {
                continue;
            }
            let wanted = lock.waiters.entry(place).or_insert(mode);
            *wanted = mode.max(*wanted);
            owner.waits.insert(key.clone());
            owner.keys.insert(key, mode);
        }
        let wanted = owner.waits.clone();
        if wanted.is_empty() {
            self.granted.push(txn);
            return Vec::new();
        }
        let mut lost: OrdMap<TxnId, Loss> = OrdMap::new();
        for key in &wanted {
            self.victims(txn, key, &mut lost);
        }
        for &victim in lost.keys() {
            self.release(victim);
        }
        for key in &wanted {
            self.promote(key);
        }
        let mut lost: Vec<(TxnId, Loss)> = lost.into_iter().collect();
        lost.extend(self.lose_if_waiting(txn));
        lost
    }

    /// `txn` is known to wait, or not to wait any more, for a lock in another partition. Returns
    /// its loss, if a transaction of higher priority waits for it here.
    pub fn set_waits_elsewhere(&mut self, txn: TxnId, waits: bool) -> Option<(TxnId, Loss)> {
        self.owners.get_mut(&txn)?.waits_elsewhere = waits;
        self.lose_if_waiting(txn)
    }

    /// Preempt-on-wait for a transaction that waits: it must not block a transaction of higher
    /// priority.
    fn lose_if_waiting(&mut self, txn: TxnId) -> Option<(TxnId, Loss)> {
        let owner = self.owners.get(&txn)?;
        if self.preemption != Preemption::OnWait || owner.is_prepared || !owner.is_waiting() {
            return None;
        }
        let is_in_the_way = owner.keys.keys().any(|key| {
            let Some(lock) = self.locks.get(key) else {
                unreachable!("{txn} holds {key} or waits for it, and nobody does");
            };
            // It waits for this lock itself.
            let Some(&held) = lock.holders.get(&txn) else { return false };
            lock.waiters.iter().any(|(&Place(std::cmp::Reverse(priority), ..), &mode)| {
                priority > owner.rank.priority && held.conflicts(mode)
            })
        });
        is_in_the_way.then(|| {
            self.release(txn);
            (txn, Loss::PreemptedOnWait)
        })
    }

    fn place(&self, txn: TxnId, rank: Rank) -> Place {
        let priority = match self.preemption {
            Preemption::Never => Priority::LOW,
            Preemption::Always | Preemption::OnWait => rank.priority,
        };
        Place(std::cmp::Reverse(priority), rank.age, txn)
    }

    /// The transactions that must give way to `txn`, which waits for `key`.
    fn victims(&self, txn: TxnId, key: &Key, lost: &mut OrdMap<TxnId, Loss>) {
        let (Some(lock), Some(me)) = (self.locks.get(key), self.owners.get(&txn)) else {
            unreachable!("{txn} does not wait for {key}");
        };
        let Some(&mode) = lock.waiters.get(&self.place(txn, me.rank)) else {
            unreachable!("{txn} is not in the queue of {key}");
        };
        for (&holder, &held) in &lock.holders {
            if holder != txn
                && held.conflicts(mode)
                && let Some(loss) = self.loss(txn, holder)
            {
                lost.insert(holder, loss);
            }
        }
        if self.preemption != Preemption::Always {
            return;
        }
        // Natto §4: transactions of low priority that are older and wait for the lock are removed
        // from the queue too.
        for (&Place(_, age, waiter), &wanted) in &lock.waiters {
            let Some(other) = self.owners.get(&waiter) else {
                unreachable!("{waiter} waits for {key} and is unknown");
            };
            let is_older = (age, waiter) < (me.rank.age, txn);
            if other.rank.priority < me.rank.priority && is_older && wanted.conflicts(mode) {
                lost.insert(waiter, Loss::Preempted);
            }
        }
    }

    /// The loss of `holder`, which blocks `txn`; none if `txn` has to wait.
    fn loss(&self, txn: TxnId, holder: TxnId) -> Option<Loss> {
        let (me, other) = (self.owners.get(&txn)?, self.owners.get(&holder)?);
        if other.is_prepared && !self.wounds_prepared {
            return None;
        }
        let is_older = (me.rank.age, txn) < (other.rank.age, holder);
        let is_higher = me.rank.priority > other.rank.priority;
        let is_lower = me.rank.priority < other.rank.priority;
        match self.preemption {
            Preemption::Never => is_older.then_some(Loss::Wounded),
            Preemption::Always if is_higher => Some(Loss::Preempted),
            Preemption::OnWait if is_higher && other.is_waiting() => Some(Loss::PreemptedOnWait),
            Preemption::Always | Preemption::OnWait => {
                (is_older && !is_lower).then_some(Loss::Wounded)
            }
        }
    }

    /// Grants requests for one key, strictly in order: no request overtakes one that waits.
    fn promote(&mut self, key: &Key) {
        // No transaction holds or requests it any more.
        let Some(lock) = self.locks.get_mut(key) else { return };
        while let Some((&place, &mode)) = lock.waiters.first_key_value() {
            let Place(_, _, txn) = place;
            if lock.is_held_against(txn, mode) {
                break;
            }
            lock.waiters.remove(&place);
            lock.holders.insert(txn, mode);
            if let Some(owner) = self.owners.get_mut(&txn) {
                owner.waits.remove(key);
                if owner.waits.is_empty() {
                    self.granted.push(txn);
                }
            }
        }
        if lock.holders.is_empty() && lock.waiters.is_empty() {
            self.locks.remove(key);
        }
    }

    /// Transactions that received their last requested lock since the last call.
    pub fn take_granted(&mut self) -> Vec<TxnId> {
        let mut granted = std::mem::take(&mut self.granted);
        granted.retain(|&txn| self.is_granted(txn));
        granted
    }

    /// Releases all locks of `txn`, and withdraws its requests.
    pub fn release(&mut self, txn: TxnId) {
        // It has no locks here.
        let Some(owner) = self.owners.remove(&txn) else { return };
        let place = self.place(txn, owner.rank);
        for key in owner.keys.keys() {
            if let Some(lock) = self.locks.get_mut(key) {
                lock.holders.remove(&txn);
                lock.waiters.remove(&place);
            }
            self.promote(key);
        }
    }

    /// From now on no other transaction takes the locks of `txn`, which holds all that it
    /// requested.
    pub fn prepare(&mut self, txn: TxnId) {
        if let Some(owner) = self.owners.get_mut(&txn) {
            assert!(owner.waits.is_empty(), "{txn} prepares while it waits");
            owner.is_prepared = true;
        }
    }

    /// Gives `txn`, which has no locks here, these locks for good, whoever waits for them. Returns
    /// false, and changes nothing, if another transaction holds one of them in a conflicting mode.
    pub fn seize(&mut self, txn: TxnId, keys: impl IntoIterator<Item = (Key, Mode)>) -> bool {
        let keys: OrdMap<Key, Mode> = keys.into_iter().collect();
        let is_held = |(key, &mode): (&Key, &Mode)| {
            self.locks.get(key).is_some_and(|lock| lock.is_held_against(txn, mode))
        };
        if keys.iter().any(is_held) {
            return false;
        }
        for (key, &mode) in &keys {
            self.locks.entry(key.clone()).or_default().holders.insert(txn, mode);
        }
        let owner = Owner {
            rank: Rank::default(),
            keys,
            waits: OrdSet::new(),
            waits_elsewhere: false,
            is_prepared: true,
        };
        self.owners.insert(txn, owner);
        true
    }

    /// True if `txn` holds every lock that it requested.
    #[must_use]
    pub fn is_granted(&self, txn: TxnId) -> bool {
        self.owners.get(&txn).is_some_and(|owner| owner.waits.is_empty())
    }

    /// True if `txn` waits for nothing and holds all these locks, or stronger ones. A transaction
    /// that waits for nothing may hold fewer locks than it believes, because another leader granted
    /// the rest.
    #[must_use]
    pub fn holds(&self, txn: TxnId, keys: &OrdMap<Key, Mode>) -> bool {
        self.owners.get(&txn).is_some_and(|owner| {
            let has = |(key, mode): (&Key, &Mode)| owner.keys.get(key).is_some_and(|h| h >= mode);
            owner.waits.is_empty() && keys.iter().all(has)
        })
    }

    /// Prepared transactions that hold one of these keys for writing.
    #[must_use]
    pub fn prepared_writers(&self, keys: &[Key]) -> OrdSet<TxnId> {
        let holders = keys.iter().filter_map(|key| self.locks.get(key)).flat_map(|l| &l.holders);
        holders
            .filter(|&(txn, mode)| {
                *mode == Mode::Exclusive && self.owners.get(txn).is_some_and(|o| o.is_prepared)
            })
            .map(|(&txn, _)| txn)
            .collect()
    }

    /// All transactions that hold or request a lock.
    pub fn owners(&self) -> impl Iterator<Item = TxnId> + '_ {
        self.owners.keys().copied()
    }

    /// Panics if the table contradicts itself, or lets a transaction wait for another that it must
    /// not wait for.
    ///
    /// # Panics
    /// If it does.
    pub fn assert_invariants(&self) {
        for (key, lock) in &self.locks {
            assert!(!lock.holders.is_empty(), "{key} is locked by nobody");
            for (txn, held) in &lock.holders {
                let is_alone = lock.holders.len() == 1 || *held == Mode::Shared;
                assert!(is_alone || self.wounds_prepared, "{key} is held by {:?}", lock.holders);
                let owner = self.owners.get(txn);
                assert!(owner.is_some_and(|o| o.keys.contains_key(key)), "{txn} holds {key}");
            }
            for (&Place(_, _, waiter), &mode) in &lock.waiters {
                let owner = self.owners.get(&waiter);
                assert!(owner.is_some_and(|o| o.waits.contains(key)), "{waiter} wants {key}");
                for (&holder, &held) in &lock.holders {
                    let waits_in_vain = holder != waiter
                        && held.conflicts(mode)
                        && self.loss(waiter, holder).is_some();
                    assert!(
                        !waits_in_vain || self.wounds_prepared,
                        "{waiter} waits for {holder} at {key}"
                    );
                }
            }
            let head = lock.waiters.first_key_value();
            let is_stuck =
                head.is_none_or(|(&Place(_, _, txn), &mode)| lock.is_held_against(txn, mode));
            assert!(is_stuck, "the first waiter for {key} could have it");
        }
    }
}

impl Owner {
    fn is_waiting(&self) -> bool {
        !self.waits.is_empty() || self.waits_elsewhere
    }
}

#[cfg(test)]
mod tests;
