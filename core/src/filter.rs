//! A filter over the keys of a table: it says of most other keys that they are not in the table.

use std::fmt;

use crate::txn::Key;

/// Bits of the filter for each key. Then it is wrong about one or two of a hundred absent keys.
const BITS_PER_KEY: usize = 16;

/// Bits that a key sets. All of them are in one word, so a question reads one word of memory.
const BITS_SET: u32 = 4;

/// Says whether a key may be in a table, from its [`Key::place`]: a Bloom filter whose blocks are
/// words. A search for a key compares it with keys that lie anywhere in memory, and most tables do
/// not have the key that is read.
///
/// If many keys have one place, it answers that they may be there, and they are searched for.
#[derive(Clone, Default)]
pub(crate) struct KeyFilter {
    /// A power of two of them, or none.
    words: Vec<u64>,
    /// The number of keys for which there is room.
    room: usize,
    /// The number of keys added.
    added: usize,
}

impl KeyFilter {
    /// False if `key` was never added.
    #[inline]
    pub(crate) fn may_have(&self, key: &Key) -> bool {
        let (at, bits) = self.bits(key.place());
        self.words.get(at).is_some_and(|word| word & bits == bits)
    }

    /// True if it must be made anew before another key is added.
    pub(crate) fn is_full(&self) -> bool {
        self.added >= self.room
    }

    /// Adds a key. The filter must not be full.
    pub(crate) fn add(&mut self, key: &Key) {
        let (at, bits) = self.bits(key.place());
        let Some(word) = self.words.get_mut(at) else {
            unreachable!("a filter that is not full has words");
        };
        *word |= bits;
        self.added += 1;
    }

    /// A filter for these keys, with room for about as many more.
    pub(crate) fn over<'a>(keys: impl ExactSizeIterator<Item = &'a Key>) -> Self {
        let words = (keys.len() * 2 * BITS_PER_KEY / 64).next_power_of_two().max(4);
        let room = words * 64 / BITS_PER_KEY;
        let mut filter = Self { words: vec![0; words], room, added: 0 };
        for key in keys {
            filter.add(key);
        }
        filter
    }

    /// The word of a place, and its bits there.
    #[inline]
    fn bits(&self, place: u64) -> (usize, u64) {
        let bits = (0..BITS_SET).fold(0, |bits, nth| bits | 1 << ((place >> (6 * nth)) & 63));
        // The lower bits chose the bits of the word.
        let at = (place >> 32) as usize & self.words.len().wrapping_sub(1);
        (at, bits)
    }
}

/// Which keys it may have follows from the table that it is part of.
impl PartialEq for KeyFilter {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for KeyFilter {}

impl fmt::Debug for KeyFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "filter of {} keys", self.added)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_key_is_missed_and_few_others_are_taken_for_present() {
        let key = |number: usize| Key::from(format!("k{number:063}"));
        let (mut filter, mut keys) = (KeyFilter::default(), Vec::new());
        assert!(!filter.may_have(&key(0)));
        for number in 0..20_000 {
            if filter.is_full() {
                filter = KeyFilter::over(keys.iter());
            }
            keys.push(key(number));
            filter.add(&keys[number]);
            assert!(filter.may_have(&keys[number]));
        }
        assert!(keys.iter().all(|key| filter.may_have(key)));
        let wrong = (20_000..120_000).filter(|&number| filter.may_have(&key(number))).count();
        assert!(wrong < 3_000, "{wrong} of 100 000");
    }

    #[test]
    fn keys_of_one_place_may_all_be_there() {
        let keys: Vec<Key> = (0..100).map(|number| Key::from(format!("{{a}}{number}"))).collect();
        let filter = KeyFilter::over(keys.iter().take(1));
        assert!(keys.iter().all(|key| filter.may_have(key)));
    }
}
