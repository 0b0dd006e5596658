//! Keys.

use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use bytes::{BufMut as _, Bytes};
use smallvec::SmallVec;

use crate::Rng;
use crate::scan;
use crate::wire::{Out, Raw, Schema, Shape, Wire, WireError};

/// A key: any bytes. The service that accepts it bounds its length.
///
/// A message, the log, the store and the locks each have copies of a transaction's keys. So a copy
/// is one pointer, and all copies share the bytes.
#[derive(Clone)]
pub struct Key(Arc<Content>);

/// The shared part of a key.
struct Content {
    /// See [`Key::place`].
    place: u64,
    /// See [`crate::scan::is_fence`]: every server that serves a read asks for it.
    is_fence: bool,
    /// A short key lies in one piece of memory with its place and the count of its copies.
    bytes: SmallVec<[u8; 64]>,
}

impl Key {
    /// The bytes.
    #[inline]
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.0.bytes
    }

    /// A copy of the bytes that does not share them.
    #[must_use]
    pub fn to_bytes(&self) -> Bytes {
        Bytes::copy_from_slice(self.bytes())
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes().len()
    }

    /// True if there are no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes().is_empty()
    }

    /// Its place on the ring of [`crate::cluster::Partitioning::Hash`]. It is computed once, when
    /// the key is made: every node that a transaction passes asks for it.
    #[inline]
    #[must_use]
    pub fn place(&self) -> u64 {
        self.0.place
    }

    /// See [`crate::scan::is_fence`].
    #[inline]
    pub(crate) fn is_fence(&self) -> bool {
        self.0.is_fence
    }

    /// True if both are copies of one key, so that their bytes need not be read.
    #[inline]
    fn is_shared_with(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl From<&[u8]> for Key {
    fn from(bytes: &[u8]) -> Self {
        let (place, is_fence) = (place(bytes), scan::has_form_of_fence(bytes));
        Self(Arc::new(Content { place, is_fence, bytes: SmallVec::from_slice(bytes) }))
    }
}

impl From<&str> for Key {
    fn from(text: &str) -> Self {
        text.as_bytes().into()
    }
}

impl From<String> for Key {
    fn from(text: String) -> Self {
        text.as_bytes().into()
    }
}

impl From<Vec<u8>> for Key {
    fn from(bytes: Vec<u8>) -> Self {
        bytes.as_slice().into()
    }
}

impl From<Bytes> for Key {
    fn from(bytes: Bytes) -> Self {
        bytes.as_ref().into()
    }
}

impl From<&Bytes> for Key {
    fn from(bytes: &Bytes) -> Self {
        bytes.as_ref().into()
    }
}

impl Default for Key {
    fn default() -> Self {
        "".into()
    }
}

impl PartialEq for Key {
    #[inline]
    fn eq(&self, other: &Self) -> bool {
        self.is_shared_with(other)
            || (self.place() == other.place() && self.bytes() == other.bytes())
    }
}

impl Eq for Key {}

impl PartialOrd for Key {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Key {
    #[inline]
    fn cmp(&self, other: &Self) -> Ordering {
        match self.is_shared_with(other) {
            true => Ordering::Equal,
            false => self.bytes().cmp(other.bytes()),
        }
    }
}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.bytes().hash(state);
    }
}

impl fmt::Display for Key {
    /// Printable ASCII as it is, any other byte as `\xNN`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.bytes().escape_ascii().fmt(f)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The encoding is that of its bytes.
impl Wire for Key {
    const SHAPE: Shape = Bytes::SHAPE;

    fn size(&self) -> usize {
        self.len()
    }

    fn put(&self, out: &mut Out) {
        out.put_slice(self.bytes());
    }

    fn take(raw: Raw<'_>) -> Result<Self, WireError> {
        Bytes::take(raw).map(Self::from)
    }

    fn sample(rng: &mut Rng) -> Self {
        Bytes::sample(rng).into()
    }

    fn schema(schema: &mut Schema) -> String {
        Bytes::schema(schema)
    }

    fn is_absent(&self) -> bool {
        self.is_empty()
    }

    fn absent() -> Option<Self> {
        Some(Self::default())
    }
}

/// A key after its [`Key::place`], for maps in which nobody asks for the keys in their own order. To
/// compare places, the bytes of the keys, which lie elsewhere in memory, need not be read.
pub(crate) type Placed = (u64, Key);

/// A key after its place.
pub(crate) fn placed(key: &Key) -> Placed {
    (key.place(), key.clone())
}

/// The part of a key that is hashed under [`crate::cluster::Partitioning::Hash`]: the text between
/// its first `{` and the next `}`, or the whole key if there is none. Keys with the same part are in
/// the same partition.
fn tag(key: &[u8]) -> &[u8] {
    let inner = key.iter().position(|&byte| byte == b'{').and_then(|open| key.get(open + 1..));
    let tag = inner.and_then(|inner| inner.split(|&byte| byte == b'}').next());
    let is_closed = |tag: &&[u8]| inner.is_some_and(|inner| tag.len() < inner.len());
    tag.filter(|tag| !tag.is_empty()).filter(is_closed).unwrap_or(key)
}

/// FNV-1a with a final mix. It must never change, because it decides where data is stored.
fn place(key: &[u8]) -> u64 {
    let fnv = |bytes: &[u8]| {
        bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, &byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        })
    };
    // Most keys have no braces, which costs less to see over all bytes at once than byte by byte.
    let has_brace = key.iter().fold(false, |has, &byte| has | (byte == b'{'));
    mix(fnv(if has_brace { tag(key) } else { key }))
}

/// The finalizer of SplitMix64: every input bit affects every output bit.
pub(crate) fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{decode, encode};

    #[test]
    fn keys_are_compared_by_their_bytes_at_any_length() {
        let texts = ["", "a", "a{b}", "ab", &"x".repeat(64), &"x".repeat(65), &"x".repeat(200)];
        for left in texts {
            for right in texts {
                let (a, b) = (Key::from(left), Key::from(right));
                assert_eq!(a.cmp(&b), left.cmp(right), "{left} and {right}");
                assert_eq!(a == b, left == right, "{left} and {right}");
            }
            let key = Key::from(left);
            assert_eq!((key.len(), key.bytes()), (left.len(), left.as_bytes()));
            assert_eq!(encode(&key), Bytes::copy_from_slice(left.as_bytes()));
            assert_eq!(decode::<Key>(&encode(&key)), Ok(key));
        }
    }

    #[test]
    fn the_part_in_braces_decides_the_place() {
        let cases = [
            ("savings{17}", "17"),
            ("{17}checking{18}", "17"),
            ("a{{b}c", "{b"),
            ("plain", "plain"),
            ("open{17", "open{17"),
            ("empty{}x{y}", "empty{}x{y}"),
            ("shut}17{", "shut}17{"),
            ("", ""),
        ];
        for (key, expected) in cases {
            assert_eq!(tag(key.as_bytes()), expected.as_bytes(), "{key}");
            assert_eq!(Key::from(key).place(), Key::from(expected).place(), "{key}");
        }
    }

    #[test]
    fn a_key_is_one_pointer() {
        assert_eq!(size_of::<Key>(), size_of::<usize>());
    }
}
