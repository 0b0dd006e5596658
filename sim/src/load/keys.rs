//! Shares the bytes of keys between transactions.

use orthodrome_core::digest::Digest;
use orthodrome_core::txn::Key;

/// Remembered keys; with their bytes some 2 MiB.
const SLOTS: usize = 1 << 14;

/// The keys that clients used last. Workloads make each key anew. A transaction whose key is here
/// takes this copy instead: most transactions use few keys, and so their bytes stay in the
/// processor's cache, and maps need not compare them.
#[derive(Debug, Default)]
pub(super) struct Keys(Vec<Key>);

impl Keys {
    /// Replaces keys by equal ones.
    pub(super) fn share<'a>(&mut self, keys: impl IntoIterator<Item = &'a mut Key>) {
        self.0.resize(SLOTS, Key::default());
        for key in keys {
            let mut digest = Digest::default();
            digest.add_bytes(key.bytes());
            let slot = usize::try_from(digest.value()).unwrap_or_default() % SLOTS;
            match self.0.get_mut(slot) {
                Some(known) if known == key => *key = known.clone(),
                Some(known) => *known = key.clone(),
                None => unreachable!("a remainder is below the number of slots"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_keys_share_their_bytes_and_all_keep_their_value() {
        let mut keys = Keys::default();
        let names: Vec<Key> =
            (0..100_000).map(|at| Key::from(format!("k{}", at % 50_000))).collect();
        let mut shared = names.clone();
        keys.share(&mut shared);
        assert_eq!(shared, names);
        let mut again = [Key::from("k49999"), Key::from("k49999")];
        keys.share(&mut again);
        assert!(std::ptr::eq(again[0].bytes(), again[1].bytes()));
    }
}
