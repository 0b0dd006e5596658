//! The keys that transactions access most often, estimated from a sample by the algorithm
//! Space-Saving (Metwally, Agrawal, El Abbadi: Efficient Computation of Frequent and Top-k Elements
//! in Data Streams, ICDT 2005).

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use orthodrome_core::Key;

use super::locked;

/// Number of keys that are counted.
const COUNTED: usize = 64;
/// Number of keys that are shown.
pub(in crate::service) const SHOWN: usize = 10;
/// Number of bytes of a key that are kept. Keys with the same beginning are still distinguished.
const BYTES_KEPT: usize = 96;
/// Number of transactions in the sample of a second, roughly.
const SAMPLED: u64 = 200;
/// Number of keys of one transaction that are counted, reads and writes each.
const KEYS_OF_ONE: usize = 16;
/// After this number of seconds, all counts are halved, so that a key that was hot is forgotten.
const HALF_LIFE: u64 = 10;

/// A key that is accessed often.
#[derive(Clone, PartialEq, Debug)]
pub(in crate::service) struct HotKey {
    /// Its first bytes.
    pub(in crate::service) bytes: Box<[u8]>,
    /// Its length.
    pub(in crate::service) length: usize,
    /// Its part of all accesses in the sample, from 0 to 1.
    pub(in crate::service) share: f64,
    /// The part of writes in its own accesses, from 0 to 1.
    pub(in crate::service) writes: f64,
}

#[derive(Debug)]
struct Entry {
    /// Identifies the key.
    hash: u64,
    bytes: Box<[u8]>,
    length: usize,
    /// Accesses, at most `error` too many.
    count: u64,
    /// The count of the key that this one replaced.
    error: u64,
    reads: u64,
    writes: u64,
}

#[derive(Debug, Default)]
struct Sketch {
    entries: Vec<Entry>,
    /// All accesses.
    total: u64,
    /// Seconds since counts were halved.
    age: u64,
}

impl Sketch {
    fn add(&mut self, key: &Key, is_write: bool) {
        let mut hasher = DefaultHasher::new();
        key.bytes().hash(&mut hasher);
        let hash = hasher.finish();
        self.total += 1;
        let (reads, writes) = (u64::from(!is_write), u64::from(is_write));
        if let Some(entry) = self.entries.iter_mut().find(|entry| entry.hash == hash) {
            entry.count += 1;
            entry.reads += reads;
            entry.writes += writes;
            return;
        }
        let kept = key.bytes().iter().take(BYTES_KEPT).copied().collect();
        let length = key.bytes().len();
        let new = Entry { hash, bytes: kept, length, count: 1, error: 0, reads, writes };
        if self.entries.len() < COUNTED {
            self.entries.push(new);
        } else if let Some(least) = self.entries.iter_mut().min_by_key(|entry| entry.count) {
            let error = least.count;
            *least = Entry { count: error + 1, error, ..new };
        }
    }

    fn halve(&mut self) {
        self.total /= 2;
        for entry in &mut self.entries {
            for count in [&mut entry.count, &mut entry.error, &mut entry.reads, &mut entry.writes] {
                *count /= 2;
            }
        }
        self.entries.retain(|entry| entry.count > 0);
    }

    /// The keys that are certainly accessed often: most of the count is their own.
    fn seen(&self) -> Vec<HotKey> {
        let sure = |entry: &Entry| entry.count - entry.error.min(entry.count);
        let mut found: Vec<&Entry> = self
            .entries
            .iter()
            .filter(|entry| sure(entry) >= 2 && sure(entry) >= entry.error)
            .collect();
        found.sort_by_key(|entry| (std::cmp::Reverse(sure(entry)), entry.hash));
        let hot = |entry: &Entry| HotKey {
            bytes: entry.bytes.clone(),
            length: entry.length,
            share: sure(entry) as f64 / self.total.max(1) as f64,
            writes: entry.writes as f64 / (entry.reads + entry.writes).max(1) as f64,
        };
        found.into_iter().take(SHOWN).map(hot).collect()
    }
}

/// The estimate of one gateway.
#[derive(Debug)]
pub(super) struct HotKeys {
    /// Transactions so far.
    seen: AtomicU64,
    /// One of this number of transactions is in the sample.
    stride: AtomicU64,
    sketch: Mutex<Sketch>,
}

impl Default for HotKeys {
    fn default() -> Self {
        Self { seen: AtomicU64::new(0), stride: AtomicU64::new(1), sketch: Mutex::default() }
    }
}

impl HotKeys {
    /// Counts keys, if it is their turn. If another thread is counting, these are not counted.
    pub(super) fn sample(&self, reads: &[Key], writes: &[Key]) {
        let relaxed = Ordering::Relaxed;
        let number = self.seen.fetch_add(1, relaxed);
        if !number.is_multiple_of(self.stride.load(relaxed).max(1)) {
            return;
        }
        let Ok(mut sketch) = self.sketch.try_lock() else { return };
        for (keys, is_write) in [(reads, false), (writes, true)] {
            for key in keys.iter().take(KEYS_OF_ONE) {
                sketch.add(key, is_write);
            }
        }
    }

    /// Ends a second in which this number of transactions ended.
    pub(super) fn tick(&self, ended: u64) {
        self.stride.store((ended / SAMPLED).max(1), Ordering::Relaxed);
        let mut sketch = locked(&self.sketch);
        sketch.age += 1;
        if sketch.age >= HALF_LIFE {
            sketch.age = 0;
            sketch.halve();
        }
    }

    pub(super) fn seen(&self) -> Vec<HotKey> {
        locked(&self.sketch).seen()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(text: String) -> Vec<Key> {
        vec![text.into()]
    }

    #[test]
    fn a_hot_key_is_found_among_many_and_memory_is_bounded() {
        let keys = HotKeys::default();
        let hot = format!("hot{}", "x".repeat(4_000));
        for number in 0..10_000 {
            keys.sample(&key(format!("cold{number}")), &[]);
            if number % 4 == 0 {
                keys.sample(&[], &key(hot.clone()));
            }
        }
        let seen = keys.seen();
        assert_eq!(seen.len(), 1, "{seen:?}");
        let found = &seen[0];
        assert!(found.bytes.starts_with(b"hot") && found.bytes.len() == BYTES_KEPT);
        assert_eq!((found.length, found.writes), (hot.len(), 1.0));
        assert!((found.share - 0.2).abs() < 0.01, "{}", found.share);
        let sketch = keys.sketch.lock().unwrap();
        let bytes: usize = sketch.entries.iter().map(|entry| entry.bytes.len()).sum();
        assert!(sketch.entries.len() == COUNTED && bytes <= COUNTED * BYTES_KEPT);
    }

    #[test]
    fn keys_with_the_same_beginning_are_two_keys() {
        let keys = HotKeys::default();
        for end in ["a", "b"] {
            for _ in 0..10 {
                keys.sample(&key(format!("{}{end}", "x".repeat(200))), &[]);
            }
        }
        assert_eq!(keys.seen().len(), 2);
    }

    #[test]
    fn a_key_that_was_hot_is_forgotten() {
        let keys = HotKeys::default();
        for _ in 0..100 {
            keys.sample(&key("k".into()), &[]);
        }
        assert_eq!(keys.seen().len(), 1);
        for _ in 0..HALF_LIFE * 8 {
            keys.tick(0);
        }
        assert_eq!(keys.seen(), []);
    }

    #[test]
    fn a_busy_gateway_samples_few_transactions() {
        let keys = HotKeys::default();
        keys.tick(100 * SAMPLED);
        for _ in 0..1_000 {
            keys.sample(&key("k".into()), &[]);
        }
        assert_eq!(keys.sketch.lock().unwrap().total, 10);
    }
}
