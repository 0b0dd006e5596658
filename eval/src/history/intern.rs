//! Numbers keys and names by hash. Iteration order never escapes: ids are given in order of first
//! sight.

use super::dense::Dense;

/// An open-addressing hash index to the ids of items that are stored elsewhere.
///
/// A file that is made to collide can make this slow, but never wrong.
#[derive(Clone, Debug, Default)]
pub(crate) struct HashIndex {
    /// Hash in the upper half, id + 1 in the lower; zero is an empty slot.
    slots: Dense<u64>,
    used: u32,
}

impl HashIndex {
    /// The id of the item with this hash for which `is_same(id)` holds.
    pub(crate) fn find(&self, hash: u32, is_same: impl Fn(u32) -> bool) -> Option<u32> {
        if self.used == 0 {
            return None;
        }
        let mask = self.slots.len() - 1;
        let mut at = hash & mask;
        loop {
            let slot = self.slots[at];
            if slot == 0 {
                return None;
            }
            let id = (slot as u32) - 1;
            if (slot >> 32) as u32 == hash && is_same(id) {
                return Some(id);
            }
            at = (at + 1) & mask;
        }
    }

    /// Adds an item that [`Self::find`] did not find.
    pub(crate) fn add(&mut self, hash: u32, id: u32) {
        if self.used >= self.slots.len() / 2 {
            self.grow();
        }
        self.place((u64::from(hash) << 32) | u64::from(id + 1));
        self.used += 1;
    }

    fn place(&mut self, slot: u64) {
        let mask = self.slots.len() - 1;
        let mut at = ((slot >> 32) as u32) & mask;
        while self.slots[at] != 0 {
            at = (at + 1) & mask;
        }
        self.slots[at] = slot;
    }

    fn grow(&mut self) {
        let doubled = Dense::filled(0, (self.slots.len() * 2).max(1 << 10));
        let old = std::mem::replace(&mut self.slots, doubled);
        for &slot in old.rows().iter().filter(|slot| **slot != 0) {
            self.place(slot);
        }
    }
}

/// A fixed hash of some bytes (FNV-1a, finished with a multiply and shift).
pub(crate) fn hash_bytes(bytes: &[u8]) -> u32 {
    let hash = bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    finish(hash)
}

/// A fixed hash of a few numbers.
pub(crate) fn hash_words(words: [u64; 3]) -> u32 {
    finish(words.iter().fold(0x9e37_79b9_7f4a_7c15_u64, |hash, word| {
        (hash ^ word).wrapping_mul(0xff51_afd7_ed55_8ccd).rotate_left(29)
    }))
}

fn finish(hash: u64) -> u32 {
    let mixed = (hash ^ (hash >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    (mixed >> 32) as u32
}

/// Key names, numbered in order of first sight and stored end to end.
#[derive(Clone, Debug, Default)]
pub(crate) struct Keys {
    text: String,
    /// Where each name ends in `text`.
    ends: Dense<usize>,
    index: HashIndex,
}

impl Keys {
    /// The number of names.
    pub(crate) fn len(&self) -> u32 {
        self.ends.len()
    }

    /// The name of a key.
    pub(crate) fn name(&self, key: u32) -> &str {
        let start = if key == 0 { 0 } else { self.ends[key - 1] };
        self.text.get(start..self.ends[key]).unwrap_or_default()
    }

    /// The id of a name, if it has been seen.
    pub(crate) fn find(&self, name: &str) -> Option<u32> {
        self.index.find(hash_bytes(name.as_bytes()), |key| self.name(key) == name)
    }

    /// The id of a name; a new id if the name is new.
    pub(crate) fn intern(&mut self, name: &str) -> u32 {
        if let Some(key) = self.find(name) {
            return key;
        }
        self.text.push_str(name);
        let key = self.ends.push(self.text.len());
        self.index.add(hash_bytes(name.as_bytes()), key);
        key
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_follow_first_sight_and_names_come_back() {
        let mut keys = Keys::default();
        for number in 0..5_000_u32 {
            assert_eq!(keys.intern(&format!("k{number}")), number);
        }
        for number in (0..5_000_u32).rev() {
            assert_eq!(keys.intern(&format!("k{number}")), number);
            assert_eq!(keys.name(number), format!("k{number}"));
        }
        assert_eq!(keys.len(), 5_000);
        assert_eq!(keys.find("k5000"), None);
    }

    #[test]
    fn equal_hashes_are_told_apart() {
        let mut index = HashIndex::default();
        index.add(7, 0);
        index.add(7, 1);
        assert_eq!(index.find(7, |id| id == 1), Some(1));
        assert_eq!(index.find(7, |id| id == 0), Some(0));
        assert_eq!(index.find(7, |_| false), None);
        assert_eq!(index.find(8, |_| true), None);
    }
}
