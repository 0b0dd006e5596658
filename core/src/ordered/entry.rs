//! The entry of one key, or the place for it.

use super::{OrdMap, Place};

/// The entry of a key, or the place for it.
#[derive(Debug)]
pub enum Entry<'a, K, V> {
    /// There is none.
    Vacant(VacantEntry<'a, K, V>),
    /// There is one.
    Occupied(OccupiedEntry<'a, K, V>),
}

impl<'a, K, V> Entry<'a, K, V> {
    /// The value; `value` if there is no entry.
    pub fn or_insert(self, value: V) -> &'a mut V {
        match self {
            Self::Occupied(entry) => entry.into_mut(),
            Self::Vacant(entry) => entry.insert(value),
        }
    }

    /// The value; what `value` returns if there is no entry.
    pub fn or_insert_with(self, value: impl FnOnce() -> V) -> &'a mut V {
        match self {
            Self::Occupied(entry) => entry.into_mut(),
            Self::Vacant(entry) => entry.insert(value()),
        }
    }

    /// The value; the default value if there is no entry.
    pub fn or_default(self) -> &'a mut V
    where
        V: Default,
    {
        self.or_insert_with(V::default)
    }

    /// Changes the value if there is an entry.
    #[must_use]
    pub fn and_modify(mut self, change: impl FnOnce(&mut V)) -> Self {
        if let Self::Occupied(entry) = &mut self {
            change(entry.get_mut());
        }
        self
    }
}

/// The place for an entry.
#[derive(Debug)]
pub struct VacantEntry<'a, K, V> {
    pub(super) map: &'a mut OrdMap<K, V>,
    pub(super) at: Place,
    pub(super) key: K,
}

impl<'a, K, V> VacantEntry<'a, K, V> {
    /// The key.
    pub fn key(&self) -> &K {
        &self.key
    }

    /// Adds the entry.
    pub fn insert(self, value: V) -> &'a mut V {
        let (list, place) = self.map.insert_at(self.at, (self.key, value));
        &mut self.map.lists_mut()[list][place].1
    }
}

/// An entry of a map.
#[derive(Debug)]
pub struct OccupiedEntry<'a, K, V> {
    pub(super) map: &'a mut OrdMap<K, V>,
    pub(super) at: Place,
}

impl<'a, K, V> OccupiedEntry<'a, K, V> {
    /// The key.
    #[must_use]
    pub fn key(&self) -> &K {
        &self.map.lists()[self.at.0][self.at.1].0
    }

    /// The value.
    #[must_use]
    pub fn get(&self) -> &V {
        &self.map.lists()[self.at.0][self.at.1].1
    }

    /// The value, to change it.
    pub fn get_mut(&mut self) -> &mut V {
        &mut self.map.lists_mut()[self.at.0][self.at.1].1
    }

    /// The value, for as long as the map is borrowed.
    #[must_use]
    pub fn into_mut(self) -> &'a mut V {
        &mut self.map.lists_mut()[self.at.0][self.at.1].1
    }

    /// Sets the value, and returns the one before.
    pub fn insert(&mut self, value: V) -> V {
        std::mem::replace(self.get_mut(), value)
    }

    /// Removes the entry, and returns its value.
    pub fn remove(self) -> V {
        self.map.remove_at(self.at).1
    }

    /// Removes the entry.
    pub fn remove_entry(self) -> (K, V) {
        self.map.remove_at(self.at)
    }
}
