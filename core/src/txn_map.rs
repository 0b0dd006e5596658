//! A map by transaction in which each client's transactions lie together.

use std::cmp::Ordering;
use std::fmt;
use std::ops::Range;

use crate::id::{ClientId, TxnId};
use crate::ordered::OrdMap;

/// An ordered map by transaction, for many transactions of few clients.
///
/// A client's transactions are a sorted list. New ones mostly belong at its end, and most questions
/// are about transactions behind it, which are answered without reading the list. In one tree of all
/// transactions they would read a path of nodes, each of which has several of these long names.
#[derive(Clone)]
pub struct TxnMap<V> {
    clients: OrdMap<ClientId, List<V>>,
    len: usize,
}

impl<V> Default for TxnMap<V> {
    fn default() -> Self {
        Self { clients: OrdMap::new(), len: 0 }
    }
}

/// The entries of one client.
#[derive(Clone)]
struct List<V> {
    /// No entry has a later counter and attempt.
    newest: (u64, u32),
    entries: Vec<(TxnId, V)>,
}

impl<V> Default for List<V> {
    fn default() -> Self {
        Self { newest: (0, 0), entries: Vec::new() }
    }
}

impl<V> List<V> {
    /// Where a transaction is, or where it belongs. It searches from the end, because that is where
    /// most are, and each look at a long list may wait for memory.
    fn place(&self, txn: &TxnId) -> Result<usize, usize> {
        let mut end = self.entries.len();
        if (txn.counter, txn.attempt) > self.newest {
            return Err(end);
        }
        let mut step = 1;
        let start = loop {
            let Some(last) = end.checked_sub(1) else { return Err(0) };
            let at = end.saturating_sub(step).min(last);
            match self.entries.get(at).map(|(held, _)| held.cmp(txn)) {
                Some(Ordering::Less) => break at + 1,
                Some(Ordering::Equal) => return Ok(at),
                Some(Ordering::Greater) | None => (end, step) = (at, step * 2),
            }
        };
        let between = self.entries.get(start..end).unwrap_or_default();
        match between.binary_search_by(|(held, _)| held.cmp(txn)) {
            Ok(at) => Ok(start + at),
            Err(at) => Err(start + at),
        }
    }

    /// The places of these transactions.
    fn within(&self, names: &Range<TxnId>) -> Range<usize> {
        let place = |txn| self.place(txn).unwrap_or_else(|place| place);
        let has_first = self.entries.first().is_none_or(|(first, _)| names.start <= *first);
        let start = if has_first { 0 } else { place(&names.start) };
        start..place(&names.end).max(start)
    }

    fn insert(&mut self, at: usize, txn: TxnId, value: V) {
        self.newest = self.newest.max((txn.counter, txn.attempt));
        self.entries.insert(at, (txn, value));
    }
}

impl<V> TxnMap<V> {
    /// The number of entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if there is no entry.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The value of a transaction.
    #[must_use]
    pub fn get(&self, txn: &TxnId) -> Option<&V> {
        let list = self.clients.get(&txn.client)?;
        list.entries.get(list.place(txn).ok()?).map(|(_, value)| value)
    }

    /// The value of a transaction, to change it.
    pub fn get_mut(&mut self, txn: &TxnId) -> Option<&mut V> {
        let list = self.clients.get_mut(&txn.client)?;
        let at = list.place(txn).ok()?;
        list.entries.get_mut(at).map(|(_, value)| value)
    }

    /// True if the transaction has a value.
    #[must_use]
    pub fn contains_key(&self, txn: &TxnId) -> bool {
        let list = self.clients.get(&txn.client);
        list.is_some_and(|list| list.place(txn).is_ok())
    }

    /// Sets the value of a transaction. Returns the old one.
    pub fn insert(&mut self, txn: TxnId, value: V) -> Option<V> {
        let list = self.clients.entry(txn.client).or_default();
        match list.place(&txn) {
            Ok(at) => {
                let held = list.entries.get_mut(at)?;
                Some(std::mem::replace(&mut held.1, value))
            }
            Err(at) => {
                list.insert(at, txn, value);
                self.len += 1;
                None
            }
        }
    }

    /// Sets the value of a transaction that has none.
    pub fn insert_new(&mut self, txn: TxnId, value: V) {
        let list = self.clients.entry(txn.client).or_default();
        if let Err(at) = list.place(&txn) {
            list.insert(at, txn, value);
            self.len += 1;
        }
    }

    /// Removes a transaction.
    pub fn remove(&mut self, txn: &TxnId) -> Option<V> {
        let list = self.clients.get_mut(&txn.client)?;
        let at = list.place(txn).ok()?;
        self.len -= 1;
        let (_, value) = list.entries.remove(at);
        self.drop_empty(txn.client);
        Some(value)
    }

    /// Clients leave, and others come.
    fn drop_empty(&mut self, client: ClientId) {
        if self.clients.get(&client).is_some_and(|list| list.entries.is_empty()) {
            self.clients.remove(&client);
        }
    }

    /// Removes those of these transactions of one client that `keeps` does not keep.
    pub fn retain_within(&mut self, names: &Range<TxnId>, mut keeps: impl FnMut(&V) -> bool) {
        let Some(list) = self.clients.get_mut(&names.start.client) else { return };
        let places = list.within(names);
        self.len -= list.entries.extract_if(places, |(_, value)| !keeps(value)).count();
        self.drop_empty(names.start.client);
    }

    /// The entries, in the order of the transactions.
    pub fn iter(&self) -> impl Iterator<Item = (&TxnId, &V)> {
        let lists = self.clients.values();
        lists.flat_map(|list| &list.entries).map(|(txn, value)| (txn, value))
    }

    /// The transactions, in order.
    pub fn keys(&self) -> impl Iterator<Item = &TxnId> {
        self.iter().map(|(txn, _)| txn)
    }

    /// The values, in the order of the transactions.
    pub fn values(&self) -> impl Iterator<Item = &V> {
        self.iter().map(|(_, value)| value)
    }
}

impl<V> TxnMap<V> {
    /// The entries, in the order of the transactions.
    pub fn into_entries(self) -> impl Iterator<Item = (TxnId, V)> {
        self.clients.into_values().flat_map(|list| list.entries)
    }
}

impl<V> Extend<(TxnId, V)> for TxnMap<V> {
    fn extend<I: IntoIterator<Item = (TxnId, V)>>(&mut self, entries: I) {
        for (txn, value) in entries {
            self.insert(txn, value);
        }
    }
}

impl<V> FromIterator<(TxnId, V)> for TxnMap<V> {
    fn from_iter<I: IntoIterator<Item = (TxnId, V)>>(entries: I) -> Self {
        let mut map = Self::default();
        map.extend(entries);
        map
    }
}

impl<V: PartialEq> PartialEq for TxnMap<V> {
    fn eq(&self, other: &Self) -> bool {
        self.len == other.len && self.iter().eq(other.iter())
    }
}

impl<V: Eq> Eq for TxnMap<V> {}

impl<V: fmt::Debug> fmt::Debug for TxnMap<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;
    use crate::wire::{decode, encode};

    /// Compares it with a tree, over random steps.
    #[test]
    fn behaves_like_a_tree() {
        let mut rng = Rng::stream(7, "txn map", 0);
        let (mut map, mut tree) = (TxnMap::default(), OrdMap::new());
        for value in 0..20_000_u64 {
            let name = |client: u64, counter: u64| TxnId::new(ClientId(client), counter);
            let client = rng.below(5);
            let attempt = rng.below(3) as u32;
            let txn = TxnId { attempt, ..name(client, rng.below(20)) };
            match rng.below(6) {
                0 | 1 => assert_eq!(map.insert(txn, value), tree.insert(txn, value)),
                2 => {
                    map.insert_new(txn, value);
                    tree.entry(txn).or_insert(value);
                }
                3 => assert_eq!(map.remove(&txn), tree.remove(&txn)),
                4 => {
                    let names = name(client, rng.below(20))..name(client, rng.below(20));
                    map.retain_within(&names, |value| value % 3 == 0);
                    tree.retain(|txn, value| !names.contains(txn) || *value % 3 == 0);
                }
                _ => {
                    assert_eq!(map.get(&txn), tree.get(&txn));
                    assert_eq!(map.get_mut(&txn), tree.get_mut(&txn));
                    assert_eq!(map.contains_key(&txn), tree.contains_key(&txn));
                }
            }
            assert_eq!((map.len(), map.is_empty()), (tree.len(), tree.is_empty()));
            if value % 100 == 0 {
                assert!(map.iter().eq(tree.iter()) && map.values().eq(tree.values()));
                assert_eq!(format!("{map:?}"), format!("{tree:?}"));
                assert!(map.clients.values().all(|list| !list.entries.is_empty()));
                assert_eq!(encode(&map), encode(&tree));
                assert_eq!(decode::<TxnMap<u64>>(&encode(&tree)), Ok(map.clone()));
                let again: TxnMap<u64> = map.clone().into_entries().collect();
                assert_eq!(again, map);
            }
        }
    }
}
