//! What one key holds: a value of one of five types, when it expires, and who changed it last.

use std::collections::VecDeque;

use bytes::Bytes;

use super::number::Score;
use crate::ordered::{OrdMap, OrdSet};
use crate::txn::{VALUE_BYTES_MAX, Value};
use crate::wire::{self, Wire};

/// The transaction that changed a key last. Each changing transaction has its own, so two equal
/// stamps mean that the key has not changed in between.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug, Wire)]
pub struct Stamp {
    /// The client of the transaction.
    pub client: u64,
    /// Its counter.
    pub counter: u64,
}

/// The state of one key.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Entry {
    /// The transaction that changed it last.
    pub stamp: Stamp,
    /// Milliseconds since 1970 at which it expires; 0 if it does not.
    pub expires_ms: u64,
    /// Its value.
    pub content: Content,
}

/// A value.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Content {
    /// Bytes.
    String(Bytes),
    /// Fields with values.
    Hash(OrdMap<Bytes, Bytes>),
    /// Members.
    Set(OrdSet<Bytes>),
    /// Elements in order.
    List(VecDeque<Bytes>),
    /// Members with scores.
    Sorted(OrdMap<Bytes, Score>),
    /// No value: the key does not exist, and a client watches it. The stamp tells whether the key
    /// was made and removed since.
    Nothing,
}

/// What an element costs besides its bytes when the size of a value is counted. It is more than
/// the encoding adds, so a counted value is never larger than its bound.
pub(super) const ELEMENT_BYTES: usize = 16;

/// The most bytes that a value may have, as [`Content::cost`] counts them.
pub const COST_MAX: usize = VALUE_BYTES_MAX - 1_024;

/// What some elements of a value cost.
pub fn cost_of<'a>(elements: impl IntoIterator<Item = &'a Bytes>) -> usize {
    elements.into_iter().map(|element| element.len() + ELEMENT_BYTES).sum()
}

impl Content {
    /// The name of its type.
    #[must_use]
    pub fn type_name(&self) -> &'static str {
        match self {
            Self::String(_) => "string",
            Self::Hash(_) => "hash",
            Self::Set(_) => "set",
            Self::List(_) => "list",
            Self::Sorted(_) => "zset",
            Self::Nothing => "none",
        }
    }

    /// Its counted size.
    #[must_use]
    pub fn cost(&self) -> usize {
        match self {
            Self::String(text) => cost_of([text]),
            Self::Hash(fields) => cost_of(fields.keys()) + cost_of(fields.values()),
            Self::Set(members) => cost_of(members),
            Self::List(elements) => cost_of(elements),
            Self::Sorted(members) => cost_of(members.keys()),
            Self::Nothing => 0,
        }
    }

    /// True for a hash, a set, a list or a sorted set without elements, and for no value. Such a
    /// key does not exist.
    #[must_use]
    pub fn is_vacant(&self) -> bool {
        match self {
            Self::String(_) => false,
            Self::Nothing => true,
            Self::Hash(fields) => fields.is_empty(),
            Self::Set(members) => members.is_empty(),
            Self::List(elements) => elements.is_empty(),
            Self::Sorted(members) => members.is_empty(),
        }
    }
}

impl Entry {
    /// The entry that these bytes encode; none if Redis commands did not write them.
    #[must_use]
    pub fn decode(value: &Value) -> Option<Self> {
        wire::decode(&value.0).ok()
    }

    /// Its bytes.
    #[must_use]
    pub fn encode(&self) -> Value {
        Value(wire::encode(self))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Rng;

    #[test]
    fn entries_come_back_as_they_were_and_cost_more_than_they_take() {
        let mut rng = Rng::stream(1, "redis", 1);
        for _ in 0..500 {
            let entry = Entry::sample(&mut rng);
            let encoded = entry.encode();
            assert_eq!(Entry::decode(&encoded), Some(entry.clone()));
            assert!(encoded.len() <= entry.content.cost() + 64, "{entry:?}");
        }
        assert_eq!(Entry::decode(&"41".into()), None);
        assert_eq!(Entry::decode(&Value::default()), None);
    }

    #[test]
    fn the_longest_string_fits_into_a_value() {
        let text = Bytes::from(vec![0_u8; COST_MAX - ELEMENT_BYTES]);
        let stamp = Stamp { client: u64::MAX, counter: u64::MAX };
        let entry = Entry { stamp, expires_ms: u64::MAX, content: Content::String(text) };
        assert_eq!(entry.content.cost(), COST_MAX);
        assert!(entry.encode().len() <= VALUE_BYTES_MAX);
    }
}
