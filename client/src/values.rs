//! The values that transactions read and write.

use orthodrome_core::ordered::OrdMap;
use orthodrome_core::txn::{Key, Read, Value, Version};

/// What a transaction read: one entry for each read key.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Reads(pub(crate) orthodrome_core::txn::Reads);

impl Reads {
    /// The value of the key; none if the key was absent or was not read.
    #[must_use]
    pub fn get(&self, key: impl Into<Key>) -> Option<&[u8]> {
        self.0.get(&key.into())?.value.as_ref().map(|value| value.0.as_ref())
    }

    /// The value of the key as text; none if the key was absent, was not read, or is not UTF-8.
    #[must_use]
    pub fn text(&self, key: impl Into<Key>) -> Option<&str> {
        std::str::from_utf8(self.get(key)?).ok()
    }

    /// The version that was read; none if the key was not read.
    #[must_use]
    pub fn version(&self, key: impl Into<Key>) -> Option<Version> {
        self.0.get(&key.into()).map(|read| read.version)
    }

    /// Every key that was read, with its value and version.
    #[must_use]
    pub fn as_map(&self) -> &OrdMap<Key, Read> {
        &self.0
    }

    /// Every key that was read, in order, with its value.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&Key, Option<&Value>)> {
        self.0.iter().map(|(key, read)| (key, read.value.as_ref()))
    }
}

/// The writes of a transaction. If it writes a key twice, the second write counts.
///
/// ```
/// let writes = orthodrome_client::Writes::new().put("a", "1").delete("b");
/// # assert_eq!(writes.len(), 2);
/// ```
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Writes(pub(crate) OrdMap<Key, Option<Value>>);

impl Writes {
    /// No writes.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets a key.
    #[must_use]
    pub fn put(mut self, key: impl Into<Key>, value: impl Into<Value>) -> Self {
        self.0.insert(key.into(), Some(value.into()));
        self
    }

    /// Removes a key.
    #[must_use]
    pub fn delete(mut self, key: impl Into<Key>) -> Self {
        self.0.insert(key.into(), None);
        self
    }

    /// The number of keys written.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// True if nothing is written.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl FromIterator<(Key, Option<Value>)> for Writes {
    fn from_iter<I: IntoIterator<Item = (Key, Option<Value>)>>(writes: I) -> Self {
        Self(writes.into_iter().collect())
    }
}
