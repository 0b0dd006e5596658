//! Ordered maps and sets, with the functions of the standard library's that this project uses.
//!
//! A map of the standard library is a tree, and the compiler writes some thousands of lines for each pair
//! of types that one is used with: that was half of the crate of the protocols. A map here is a list of
//! short sorted lists, which takes a third of that (ADR 61).

#![allow(clippy::indexing_slicing, reason = "places come from a search of the same lists")]

mod entry;
mod iter;
mod set;
#[cfg(test)]
mod tests;

use std::borrow::Borrow;
use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::{Bound, Index, RangeBounds};

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde::ser::{Serialize, Serializer};

pub use self::entry::{Entry, OccupiedEntry, VacantEntry};
pub use self::iter::{IntoIter, Iter, IterMut, Keys, Values};
pub use self::set::OrdSet;

/// A map whose entries are ordered by their keys.
///
/// Finding an entry takes logarithmic time. Inserting or removing one moves at most 2 KiB of other
/// entries (seven of them if they are larger) and, for large maps, three words for each list now and
/// then.
#[derive(Clone)]
pub struct OrdMap<K, V>(Lists<K, V>);

/// The entries in order: sorted lists, of which each ends before the next one begins. None has more than
/// [`OrdMap::MOST`] entries.
#[derive(Clone)]
enum Lists<K, V> {
    /// Few entries, perhaps none.
    One(Vec<(K, V)>),
    /// Several lists. None is empty.
    Many(Box<Many<K, V>>),
}

#[derive(Clone)]
struct Many<K, V> {
    lists: Vec<Vec<(K, V)>>,
    /// The number of all entries.
    len: usize,
}

/// The most bytes of a list, unless it has [`FEWEST`] entries.
const BYTES: usize = 2_048;

/// However large entries are, a list may have so many.
const FEWEST: usize = 8;

/// However small entries are, a list has no more.
const MOST: usize = 128;

/// Where an entry is, or belongs: the list, and the place in it.
type Place = (usize, usize);

impl<K, V> OrdMap<K, V> {
    /// The most entries of a list.
    const MOST: usize = {
        let fit = match BYTES.checked_div(size_of::<(K, V)>()) {
            Some(fit) => fit,
            None => MOST,
        };
        if fit < FEWEST {
            FEWEST
        } else if fit > MOST {
            MOST
        } else {
            fit
        }
    };

    /// An empty map.
    #[must_use]
    pub const fn new() -> Self {
        Self(Lists::One(Vec::new()))
    }

    /// The number of entries.
    #[must_use]
    pub const fn len(&self) -> usize {
        match &self.0 {
            Lists::One(list) => list.len(),
            Lists::Many(many) => many.len,
        }
    }

    /// Whether there are no entries.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Removes all entries.
    pub fn clear(&mut self) {
        *self = Self::new();
    }

    /// The lists; one that is empty for an empty map.
    const fn lists(&self) -> &[Vec<(K, V)>] {
        match &self.0 {
            Lists::One(list) => std::slice::from_ref(list),
            Lists::Many(many) => many.lists.as_slice(),
        }
    }

    const fn lists_mut(&mut self) -> &mut [Vec<(K, V)>] {
        match &mut self.0 {
            Lists::One(list) => std::slice::from_mut(list),
            Lists::Many(many) => many.lists.as_mut_slice(),
        }
    }

    /// Whether several lists are less than a quarter full on average. After a merge they are full, so
    /// three of four entries go before the next one.
    const fn is_sparse(len: usize, lists: usize) -> bool {
        lists > 1 && len < lists * (Self::MOST / 4)
    }

    /// Puts the map together again from lists that may be empty, or nearly.
    fn rebuild(&mut self, mut lists: Vec<Vec<(K, V)>>) {
        lists.retain(|list| !list.is_empty());
        let mut len = 0;
        for list in &lists {
            len += list.len();
        }
        if Self::is_sparse(len, lists.len()) {
            let mut full = Vec::with_capacity(len.div_ceil(Self::MOST));
            for list in lists {
                for entry in list {
                    Self::push(&mut full, entry);
                }
            }
            lists = full;
        }
        self.0 = match lists.len() {
            0 | 1 => Lists::One(lists.pop().unwrap_or_default()),
            _ => Lists::Many(Box::new(Many { lists, len })),
        };
    }

    /// Takes all lists out.
    fn take(&mut self) -> Vec<Vec<(K, V)>> {
        match std::mem::replace(&mut self.0, Lists::One(Vec::new())) {
            Lists::One(list) => vec![list],
            Lists::Many(many) => many.lists,
        }
    }

    /// All entries, in ascending order of keys.
    #[must_use]
    pub fn iter(&self) -> Iter<'_, K, V> {
        Iter { front: [].iter(), lists: self.lists().iter(), back: [].iter() }
    }

    /// All entries, in ascending order of keys; the values can be changed.
    pub fn iter_mut(&mut self) -> IterMut<'_, K, V> {
        IterMut { front: [].iter_mut(), lists: self.lists_mut().iter_mut(), back: [].iter_mut() }
    }

    /// All keys, in ascending order.
    #[must_use]
    pub fn keys(&self) -> Keys<'_, K, V> {
        Keys(self.iter())
    }

    /// All values, in ascending order of their keys.
    #[must_use]
    pub fn values(&self) -> Values<'_, K, V> {
        Values(self.iter())
    }

    /// All values, in ascending order of their keys; they can be changed.
    pub fn values_mut(&mut self) -> impl DoubleEndedIterator<Item = &mut V> {
        self.iter_mut().map(|(_, value)| value)
    }

    /// All keys, in ascending order.
    pub fn into_keys(self) -> impl DoubleEndedIterator<Item = K> + ExactSizeIterator {
        self.into_iter().map(|(key, _)| key)
    }

    /// All values, in ascending order of their keys.
    pub fn into_values(self) -> impl DoubleEndedIterator<Item = V> + ExactSizeIterator {
        self.into_iter().map(|(_, value)| value)
    }

    /// The entry with the smallest key.
    #[must_use]
    pub fn first_key_value(&self) -> Option<(&K, &V)> {
        let (key, value) = self.lists().first()?.first()?;
        Some((key, value))
    }

    /// The entry with the largest key.
    #[must_use]
    pub fn last_key_value(&self) -> Option<(&K, &V)> {
        let (key, value) = self.lists().last()?.last()?;
        Some((key, value))
    }

    /// Removes the entry with the smallest key.
    pub fn pop_first(&mut self) -> Option<(K, V)> {
        (!self.is_empty()).then(|| self.remove_at((0, 0)))
    }

    /// Removes the entry with the largest key.
    pub fn pop_last(&mut self) -> Option<(K, V)> {
        let lists = self.lists();
        let list = lists.len() - 1;
        let place = lists[list].len().checked_sub(1)?;
        Some(self.remove_at((list, place)))
    }

    /// The entry with the smallest key, to change or remove it.
    pub fn first_entry(&mut self) -> Option<OccupiedEntry<'_, K, V>> {
        if self.is_empty() { None } else { Some(OccupiedEntry { map: self, at: (0, 0) }) }
    }

    /// Keeps the entries of which `keeps` is true, and removes the others.
    pub fn retain(&mut self, mut keeps: impl FnMut(&K, &mut V) -> bool) {
        match &mut self.0 {
            Lists::One(list) => list.retain_mut(|(key, value)| keeps(key, value)),
            Lists::Many(many) => {
                for list in &mut many.lists {
                    list.retain_mut(|(key, value)| keeps(key, value));
                }
                let lists = self.take();
                self.rebuild(lists);
            }
        }
    }

    fn remove_at(&mut self, (list, place): Place) -> (K, V) {
        match &mut self.0 {
            Lists::One(entries) => entries.remove(place),
            Lists::Many(many) => {
                many.len -= 1;
                let entry = many.lists[list].remove(place);
                if many.lists[list].is_empty() {
                    many.lists.remove(list);
                }
                if many.lists.len() < 2 || Self::is_sparse(many.len, many.lists.len()) {
                    let lists = self.take();
                    self.rebuild(lists);
                }
                entry
            }
        }
    }

    /// Adds an entry after all others.
    fn push(lists: &mut Vec<Vec<(K, V)>>, entry: (K, V)) {
        match lists.last_mut() {
            Some(list) if list.len() < Self::MOST => list.push(entry),
            Some(_) | None => lists.push(vec![entry]),
        }
    }

    /// Adds an entry where a search said that it belongs, and returns where it is now.
    fn insert_at(&mut self, (list, place): Place, entry: (K, V)) -> Place {
        if let Lists::One(entries) = &mut self.0 {
            if entries.len() < Self::MOST {
                entries.insert(place, entry);
                return (list, place);
            }
            let lists = vec![std::mem::take(entries)];
            self.0 = Lists::Many(Box::new(Many { len: Self::MOST, lists }));
        }
        let Lists::Many(many) = &mut self.0 else { unreachable!("it was just made") };
        many.insert_at((list, place), entry)
    }

    /// The entries from one place up to before another.
    fn between(&self, from: Place, to: Place) -> Iter<'_, K, V> {
        let lists = self.lists();
        let mut found = Iter { front: [].iter(), lists: [].iter(), back: [].iter() };
        let Some(first) = lists.get(from.0) else { return found };
        if from.0 == to.0 {
            found.front = first[from.1..to.1].iter();
            return found;
        }
        found.front = first[from.1..].iter();
        found.lists = lists[from.0 + 1..to.0].iter();
        if let Some(last) = lists.get(to.0) {
            found.back = last[..to.1].iter();
        }
        found
    }
}

impl<K, V> Many<K, V> {
    fn insert_at(&mut self, (mut list, mut place): Place, entry: (K, V)) -> Place {
        self.len += 1;
        let most = OrdMap::<K, V>::MOST;
        if self.lists[list].len() == most {
            // Lists that only grow at one end stay full.
            if list + 1 == self.lists.len() && place == most {
                self.lists.push(vec![entry]);
                return (list + 1, 0);
            }
            let rest = self.lists[list].split_off(most / 2);
            self.lists.insert(list + 1, rest);
            if place > most / 2 {
                (list, place) = (list + 1, place - most / 2);
            }
        }
        self.lists[list].insert(place, entry);
        (list, place)
    }
}

impl<K: Ord, V> OrdMap<K, V> {
    /// Where `key` is, or where it belongs.
    fn find<Q: Ord + ?Sized>(&self, key: &Q) -> Result<Place, Place>
    where
        K: Borrow<Q>,
    {
        // Searches that branch: the processor fetches what it expects to need next, which a search
        // without branches would wait for.
        let lists = self.lists();
        let (mut low, mut high) = (1, lists.len());
        while low < high {
            let middle = usize::midpoint(low, high);
            if lists[middle][0].0.borrow() <= key {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        let list = low - 1;
        let entries = lists[list].as_slice();
        let (mut low, mut high) = (0, entries.len());
        while low < high {
            let middle = usize::midpoint(low, high);
            match key.cmp(entries[middle].0.borrow()) {
                Ordering::Equal => return Ok((list, middle)),
                Ordering::Greater => low = middle + 1,
                Ordering::Less => high = middle,
            }
        }
        Err((list, low))
    }

    /// The value of `key`.
    #[must_use]
    pub fn get<Q: Ord + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        let (list, place) = self.find(key).ok()?;
        Some(&self.lists()[list][place].1)
    }

    /// The entry of `key`.
    #[must_use]
    pub fn get_key_value<Q: Ord + ?Sized>(&self, key: &Q) -> Option<(&K, &V)>
    where
        K: Borrow<Q>,
    {
        let (list, place) = self.find(key).ok()?;
        let (key, value) = &self.lists()[list][place];
        Some((key, value))
    }

    /// The value of `key`, to change it.
    pub fn get_mut<Q: Ord + ?Sized>(&mut self, key: &Q) -> Option<&mut V>
    where
        K: Borrow<Q>,
    {
        let (list, place) = self.find(key).ok()?;
        Some(&mut self.lists_mut()[list][place].1)
    }

    /// Whether there is an entry for `key`.
    #[must_use]
    pub fn contains_key<Q: Ord + ?Sized>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
    {
        self.find(key).is_ok()
    }

    /// Sets the value of `key`, and returns the one that it had. An equal key that is there stays.
    pub fn insert(&mut self, key: K, value: V) -> Option<V> {
        match self.find(&key) {
            Ok((list, place)) => {
                Some(std::mem::replace(&mut self.lists_mut()[list][place].1, value))
            }
            Err(at) => {
                self.insert_at(at, (key, value));
                None
            }
        }
    }

    /// Removes the entry of `key`, and returns its value.
    pub fn remove<Q: Ord + ?Sized>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        let at = self.find(key).ok()?;
        Some(self.remove_at(at).1)
    }

    /// Removes the entry of `key`.
    pub fn remove_entry<Q: Ord + ?Sized>(&mut self, key: &Q) -> Option<(K, V)>
    where
        K: Borrow<Q>,
    {
        let at = self.find(key).ok()?;
        Some(self.remove_at(at))
    }

    /// The entry of `key`, or the place for it.
    pub fn entry(&mut self, key: K) -> Entry<'_, K, V> {
        match self.find(&key) {
            Ok(at) => Entry::Occupied(OccupiedEntry { map: self, at }),
            Err(at) => Entry::Vacant(VacantEntry { map: self, at, key }),
        }
    }

    /// Where the first entry is that is in a range with this beginning.
    fn start<Q: Ord + ?Sized>(&self, bound: Bound<&Q>) -> Place
    where
        K: Borrow<Q>,
    {
        let (list, place) = match bound {
            Bound::Unbounded => return (0, 0),
            Bound::Included(key) => self.find(key).unwrap_or_else(|place| place),
            Bound::Excluded(key) => match self.find(key) {
                Ok((list, place)) => (list, place + 1),
                Err(place) => place,
            },
        };
        // The place after a list is the beginning of the next one.
        match self.lists().get(list) {
            Some(entries) if place == entries.len() => (list + 1, 0),
            Some(_) | None => (list, place),
        }
    }

    /// Where the first entry is that is no longer in a range with this end.
    fn end<Q: Ord + ?Sized>(&self, bound: Bound<&Q>) -> Place
    where
        K: Borrow<Q>,
    {
        match bound {
            Bound::Unbounded => (self.lists().len(), 0),
            Bound::Included(key) => self.start(Bound::Excluded(key)),
            Bound::Excluded(key) => self.start(Bound::Included(key)),
        }
    }

    /// The entries whose keys are in `range`; none if it ends before it begins.
    pub fn range<Q: Ord + ?Sized, R: RangeBounds<Q>>(&self, range: R) -> Iter<'_, K, V>
    where
        K: Borrow<Q>,
    {
        let from = self.start(range.start_bound());
        self.between(from, self.end(range.end_bound()).max(from))
    }

    /// The entries whose keys are in `range`, to change the values.
    pub fn range_mut<Q: Ord + ?Sized, R: RangeBounds<Q>>(&mut self, range: R) -> IterMut<'_, K, V>
    where
        K: Borrow<Q>,
    {
        let from = self.start(range.start_bound());
        let to = self.end(range.end_bound()).max(from);
        let mut lists = self.lists_mut().iter_mut();
        let (mut front, mut back) = ([].iter_mut(), [].iter_mut());
        if from.0 < to.0 {
            if let Some(list) = lists.nth(from.0) {
                front = list[from.1..].iter_mut();
            }
            let mut rest = lists.into_slice().split_at_mut(to.0 - from.0 - 1);
            if let Some(list) = rest.1.first_mut() {
                back = list[..to.1].iter_mut();
            }
            let lists = std::mem::take(&mut rest.0).iter_mut();
            return IterMut { front, lists, back };
        }
        if let Some(list) = lists.nth(from.0) {
            front = list[from.1..to.1].iter_mut();
        }
        IterMut { front, lists: [].iter_mut(), back }
    }

    /// Removes the entries from `key` on, and returns them.
    pub fn split_off<Q: Ord + ?Sized>(&mut self, key: &Q) -> Self
    where
        K: Borrow<Q>,
    {
        let (list, place) = self.start(Bound::Included(key));
        let mut lists = self.take();
        let mut rest = Vec::new();
        if let Some(entries) = lists.get_mut(list) {
            rest.push(entries.split_off(place));
            rest.extend(lists.drain(list + 1..));
        }
        self.rebuild(lists);
        let mut later = Self::new();
        later.rebuild(rest);
        later
    }

    /// Moves all entries of `other` into this map.
    pub fn append(&mut self, other: &mut Self) {
        self.extend(std::mem::take(other));
    }

    /// Removes the entries whose keys are in `range` and of which `takes` is true, and returns them.
    pub fn extract_if<Q: Ord + ?Sized>(
        &mut self,
        range: impl RangeBounds<Q>,
        mut takes: impl FnMut(&K, &mut V) -> bool,
    ) -> std::vec::IntoIter<(K, V)>
    where
        K: Borrow<Q>,
    {
        let (start, end) = (self.start(range.start_bound()), self.end(range.end_bound()));
        let mut taken = Vec::new();
        let mut lists = self.take();
        for (number, list) in lists.iter_mut().enumerate() {
            let from = match number.cmp(&start.0) {
                Ordering::Less => continue,
                Ordering::Equal => start.1,
                Ordering::Greater => 0,
            };
            let to = match number.cmp(&end.0) {
                Ordering::Less => list.len(),
                Ordering::Equal => end.1,
                Ordering::Greater => break,
            };
            let taking = |(key, value): &mut (K, V)| takes(key, value);
            taken.extend(list.extract_if(from..to.max(from), taking));
        }
        self.rebuild(lists);
        taken.into_iter()
    }
}

impl<K, V> Default for OrdMap<K, V> {
    fn default() -> Self {
        Self::new()
    }
}

impl<K: fmt::Debug, V: fmt::Debug> fmt::Debug for OrdMap<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self).finish()
    }
}

impl<K: PartialEq, V: PartialEq> PartialEq for OrdMap<K, V> {
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len() && self.iter().eq(other)
    }
}

impl<K: Eq, V: Eq> Eq for OrdMap<K, V> {}

impl<K: PartialOrd, V: PartialOrd> PartialOrd for OrdMap<K, V> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        self.iter().partial_cmp(other)
    }
}

impl<K: Ord, V: Ord> Ord for OrdMap<K, V> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.iter().cmp(other)
    }
}

impl<K: Hash, V: Hash> Hash for OrdMap<K, V> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.len().hash(state);
        for entry in self {
            entry.hash(state);
        }
    }
}

impl<K: Borrow<Q> + Ord, Q: Ord + ?Sized, V> Index<&Q> for OrdMap<K, V> {
    type Output = V;

    fn index(&self, key: &Q) -> &V {
        match self.find(key) {
            Ok((list, place)) => &self.lists()[list][place].1,
            Err(_) => panic!("the map has no entry for this key"),
        }
    }
}

impl<K: Serialize, V: Serialize> Serialize for OrdMap<K, V> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self)
    }
}

impl<'de, K: Deserialize<'de> + Ord, V: Deserialize<'de>> Deserialize<'de> for OrdMap<K, V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries<K, V>(OrdMap<K, V>);

        impl<'de, K: Deserialize<'de> + Ord, V: Deserialize<'de>> Visitor<'de> for Entries<K, V> {
            type Value = OrdMap<K, V>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map")
            }

            fn visit_map<A: MapAccess<'de>>(
                mut self,
                mut map: A,
            ) -> Result<OrdMap<K, V>, A::Error> {
                while let Some((key, value)) = map.next_entry()? {
                    self.0.insert(key, value);
                }
                Ok(self.0)
            }
        }

        deserializer.deserialize_map(Entries(Self::new()))
    }
}

impl<K: Ord, V> Extend<(K, V)> for OrdMap<K, V> {
    fn extend<I: IntoIterator<Item = (K, V)>>(&mut self, entries: I) {
        for (key, value) in entries {
            let lists = self.lists();
            let last = lists.len() - 1;
            match lists[last].last() {
                Some((above, _)) if *above >= key => {
                    self.insert(key, value);
                }
                Some(_) | None => {
                    self.insert_at((last, lists[last].len()), (key, value));
                }
            }
        }
    }
}

impl<'a, K: Ord + Copy, V: Copy> Extend<(&'a K, &'a V)> for OrdMap<K, V> {
    fn extend<I: IntoIterator<Item = (&'a K, &'a V)>>(&mut self, entries: I) {
        self.extend(entries.into_iter().map(|(key, value)| (*key, *value)));
    }
}

impl<K: Ord, V> FromIterator<(K, V)> for OrdMap<K, V> {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(entries: I) -> Self {
        let mut map = Self::new();
        map.extend(entries);
        map
    }
}

impl<K: Ord, V, const N: usize> From<[(K, V); N]> for OrdMap<K, V> {
    fn from(entries: [(K, V); N]) -> Self {
        Self::from_iter(entries)
    }
}

impl<K, V> IntoIterator for OrdMap<K, V> {
    type Item = (K, V);
    type IntoIter = IntoIter<K, V>;

    fn into_iter(self) -> IntoIter<K, V> {
        let len = self.len();
        let (front, lists) = match self.0 {
            Lists::One(list) => (list, Vec::new()),
            Lists::Many(many) => (Vec::new(), many.lists),
        };
        let back = Vec::new().into_iter();
        IntoIter { len, front: front.into_iter(), lists: lists.into_iter(), back }
    }
}

impl<'a, K, V> IntoIterator for &'a OrdMap<K, V> {
    type Item = (&'a K, &'a V);
    type IntoIter = Iter<'a, K, V>;

    fn into_iter(self) -> Iter<'a, K, V> {
        self.iter()
    }
}

impl<'a, K, V> IntoIterator for &'a mut OrdMap<K, V> {
    type Item = (&'a K, &'a mut V);
    type IntoIter = IterMut<'a, K, V>;

    fn into_iter(self) -> IterMut<'a, K, V> {
        self.iter_mut()
    }
}
