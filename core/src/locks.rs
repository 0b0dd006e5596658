//! The keys that pending transactions read and write: the conflict check of optimistic protocols.

use smallvec::SmallVec;

use crate::id::TxnId;
use crate::key::{Placed, placed};
use crate::ordered::{Entry, OrdMap};
use crate::txn::Key;

/// The transactions that hold one key. Several may read it, or one may write it (and perhaps read
/// it too).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Holders {
    readers: SmallVec<[TxnId; 2]>,
    writer: Option<TxnId>,
}

/// The read and write sets of pending transactions, by key. Two transactions conflict if one
/// writes a key that the other reads or writes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PendingKeys(OrdMap<Placed, Holders>);

impl PendingKeys {
    /// A pending transaction, other than `txn`, that conflicts with these sets: the first one in
    /// the order of keys, reads before writes.
    #[must_use]
    pub fn conflict(&self, txn: TxnId, reads: &[Key], writes: &[Key]) -> Option<TxnId> {
        let not_me = |holder: &TxnId| *holder != txn;
        let on_read =
            reads.iter().filter_map(|key| self.0.get(&placed(key))?.writer.filter(not_me));
        let on_write = writes.iter().filter_map(|key| {
            let held = self.0.get(&placed(key))?;
            held.writer.filter(not_me).or_else(|| held.readers.iter().copied().find(not_me))
        });
        on_read.chain(on_write).next()
    }

    /// The pending transaction that writes this key.
    #[must_use]
    pub fn writer_of(&self, key: &Key) -> Option<TxnId> {
        self.0.get(&placed(key))?.writer
    }

    /// Adds a transaction's sets.
    ///
    /// # Panics
    /// If they conflict with a pending transaction: the caller must have checked.
    pub fn insert<'a>(
        &mut self,
        txn: TxnId,
        reads: impl IntoIterator<Item = &'a Key>,
        writes: impl IntoIterator<Item = &'a Key>,
    ) {
        for key in reads {
            let held = self.0.entry(placed(key)).or_default();
            assert!(held.writer.is_none_or(|w| w == txn), "{txn} reads {key} under a writer");
            if !held.readers.contains(&txn) {
                held.readers.push(txn);
            }
        }
        for key in writes {
            let held = self.0.entry(placed(key)).or_default();
            assert!(held.writer.is_none_or(|w| w == txn), "{txn} writes {key} under a writer");
            assert!(held.readers.iter().all(|&r| r == txn), "{txn} writes {key} under a reader");
            held.writer = Some(txn);
        }
    }

    /// Removes a transaction's sets.
    pub fn remove<'a>(&mut self, txn: TxnId, keys: impl IntoIterator<Item = &'a Key>) {
        for key in keys {
            if let Entry::Occupied(mut entry) = self.0.entry(placed(key)) {
                let held = entry.get_mut();
                held.readers.retain(|reader| *reader != txn);
                if held.writer == Some(txn) {
                    held.writer = None;
                }
                if held.readers.is_empty() && held.writer.is_none() {
                    entry.remove();
                }
            }
        }
    }

    /// The number of keys held.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// True if no key is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::ClientId;
    use crate::rng::Rng;

    fn txn(counter: u64) -> TxnId {
        TxnId::new(ClientId(1), counter)
    }

    /// Compares the table with the definition of a conflict, over random sets.
    #[test]
    fn agrees_with_the_definition_of_a_conflict() {
        let mut rng = Rng::stream(11, "locks", 0);
        let mut table = PendingKeys::default();
        let mut pending: OrdMap<TxnId, (Vec<Key>, Vec<Key>)> = OrdMap::new();
        let (mut accepted, mut refused) = (0, 0);
        for counter in 0..5_000 {
            let mut draw = || -> Vec<Key> {
                (0..rng.below(3)).map(|_| Key::from(format!("k{}", rng.below(12)))).collect()
            };
            let (reads, writes) = (draw(), draw());
            let id = txn(counter);
            let hits = |a: &[Key], b: &[Key]| a.iter().any(|key| b.contains(key));
            let expected = pending
                .values()
                .any(|(r, w)| hits(&writes, r) || hits(&writes, w) || hits(&reads, w));
            assert_eq!(table.conflict(id, &reads, &writes).is_some(), expected);
            if expected {
                refused += 1;
            } else {
                accepted += 1;
                table.insert(id, &reads, &writes);
                pending.insert(id, (reads, writes));
            }
            if pending.len() > 4 {
                let (id, (reads, writes)) = pending.pop_first().unwrap();
                table.remove(id, reads.iter().chain(&writes));
            }
        }
        assert!(accepted > 500 && refused > 500, "{accepted} accepted, {refused} refused");
        for (id, (reads, writes)) in pending {
            table.remove(id, reads.iter().chain(&writes));
        }
        assert!(table.is_empty());
    }
}
