//! The timestamps in use: those of transactions that a replica has prepared, and of reads that it
//! has served. The conflict check of §5.2 (Fig. 9).

use orthodrome_core::id::{PartitionId, TxnId};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::scan::is_fence;
use orthodrome_core::store::Store;
use orthodrome_core::time::{Duration, Timestamp};
use orthodrome_core::txn::{Key, Read, Version};

use super::message::{Part, Vote};

/// Timestamps by key, for the check. A replica rebuilds it when it starts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Validator {
    prepared: OrdMap<TxnId, (Timestamp, Part)>,
    readers: OrdMap<Key, OrdMap<TxnId, Timestamp>>,
    writers: OrdMap<Key, OrdMap<TxnId, Timestamp>>,
    /// When each key was last read by a transaction that has ended.
    read_at: OrdMap<Key, Timestamp>,
    /// Every key may have been read up to this timestamp.
    read_floor: Timestamp,
    read_newest: Timestamp,
}

/// Reads that are older than the newest one by more than this are merged into the floor.
const READS_KEPT: Duration = Duration::from_secs(5);

impl Validator {
    /// A validator that knows only that no key was read after `read_floor`.
    #[must_use]
    pub fn new(read_floor: Timestamp) -> Self {
        Self { read_floor, ..Self::default() }
    }

    /// TAPIR-OCC-CHECK: may `txn` commit at `timestamp`?
    ///
    /// Beyond the paper's figure, it knows when keys were read by transactions that have ended, and
    /// never gives two transactions that access the same key one timestamp.
    #[must_use]
    pub fn check(
        &self,
        (partition, store): (PartitionId, &Store),
        txn: TxnId,
        timestamp: Timestamp,
        part: &Part,
    ) -> Vote {
        let others = |of: &OrdMap<Key, OrdMap<TxnId, Timestamp>>, key: &Key| {
            let held = of.get(key).into_iter().flatten();
            held.filter(|(other, _)| **other != txn).map(|(_, at)| *at).max()
        };
        let is_taken = |key: &Key| {
            let mut held = self.writers.get(key).into_iter().flatten();
            held.any(|(other, at)| *other != txn && *at == timestamp)
        };
        let mut least = Timestamp::ZERO;
        let is_pending = |(other, (_, part)): (&TxnId, &(Timestamp, Part))| {
            *other != txn && !part.writes.is_empty()
        };
        if reads_fence(part) && self.prepared.iter().any(is_pending) {
            return Vote::Abstain;
        }
        for (key, version) in &part.reads {
            if *version < store.read(partition, key).version {
                return Vote::Abort;
            }
            if others(&self.writers, key).is_some() {
                return Vote::Abstain;
            }
            least = least.max(version.timestamp);
        }
        for key in part.writes.keys() {
            let taken = [
                others(&self.readers, key).unwrap_or_default(),
                if is_taken(key) { timestamp } else { Timestamp::ZERO },
                self.read_at.get(key).copied().unwrap_or_default().max(self.read_floor),
                store.read(partition, key).version.timestamp,
            ];
            least = least.max(taken.into_iter().max().unwrap_or_default());
        }
        if timestamp <= least { Vote::Retry(least.next()) } else { Vote::PrepareOk(timestamp) }
    }

    /// A transaction is prepared here.
    pub fn prepare(&mut self, txn: TxnId, timestamp: Timestamp, part: &Part) {
        self.release(txn);
        if reads_fence(part) {
            self.raise_floor(timestamp);
        }
        for (key, _) in &part.reads {
            self.readers.entry(key.clone()).or_default().insert(txn, timestamp);
        }
        for key in part.writes.keys() {
            self.writers.entry(key.clone()).or_default().insert(txn, timestamp);
        }
        self.prepared.insert(txn, (timestamp, part.clone()));
    }

    /// A transaction is not prepared here any more.
    pub fn release(&mut self, txn: TxnId) {
        let Some((_, part)) = self.prepared.remove(&txn) else { return };
        let drop_from = |of: &mut OrdMap<Key, OrdMap<TxnId, Timestamp>>, key: &Key| {
            if let Some(held) = of.get_mut(key) {
                held.remove(&txn);
                if held.is_empty() {
                    of.remove(key);
                }
            }
        };
        for (key, _) in &part.reads {
            drop_from(&mut self.readers, key);
        }
        for key in part.writes.keys() {
            drop_from(&mut self.writers, key);
        }
    }

    /// Transactions prepared here.
    pub fn prepared(&self) -> impl Iterator<Item = TxnId> + '_ {
        self.prepared.keys().copied()
    }

    /// A key was read at this timestamp, by a transaction that has ended.
    pub fn read(&mut self, key: &Key, at: Timestamp) {
        let known = self.read_at.entry(key.clone()).or_default();
        *known = (*known).max(at);
        self.read_newest = self.read_newest.max(at);
    }

    /// Every key may have been read up to `floor`: this replica does not know all its reads.
    pub fn raise_floor(&mut self, floor: Timestamp) {
        self.read_floor = self.read_floor.max(floor);
    }

    /// No transaction that is prepared now can write at or before this.
    #[must_use]
    pub fn written_until(&self) -> Timestamp {
        let writers = self.prepared.values().filter(|(_, part)| !part.writes.is_empty());
        let before = writers.map(|(at, _)| Timestamp(at.0.saturating_sub(1)));
        before.fold(Timestamp::MAX, Timestamp::min)
    }

    /// True if a prepared transaction may still write any key at or before `at`.
    #[must_use]
    pub fn is_any_pending(&self, at: Timestamp) -> bool {
        self.prepared.values().any(|(writes_at, part)| !part.writes.is_empty() && *writes_at <= at)
    }

    /// True if a prepared transaction may still write one of the keys at or before `at`.
    #[must_use]
    pub fn is_pending(&self, keys: &[Key], at: Timestamp) -> bool {
        keys.iter()
            .filter_map(|key| self.writers.get(key))
            .any(|held| held.values().any(|writes_at| *writes_at <= at))
    }

    /// Forgets the times of old reads, but keeps a floor for them.
    pub fn collect(&mut self) {
        let floor = self.read_newest - READS_KEPT;
        if floor > self.read_floor {
            self.read_floor = floor;
            self.read_at.retain(|_, at| *at > floor);
        }
    }
}

/// True if these reads are a scan's. A scan reads, in effect, all keys of the partition: those that
/// are absent too.
fn reads_fence(part: &Part) -> bool {
    part.reads.iter().any(|(key, _)| is_fence(key))
}

/// The newest versions of `keys` that are not after `at`. None if a key has only later ones: the
/// one of then may have been dropped, because nobody reads so late.
pub fn snapshot(
    (partition, store): (PartitionId, &Store),
    keys: Vec<Key>,
    at: Timestamp,
) -> Option<Vec<(Key, Read)>> {
    let read = |key: Key| {
        let read = store.read_at(partition, &key, at);
        let is_certain = read.value.is_some()
            || read.version != Version::INITIAL
            || store.read(partition, &key).version == Version::INITIAL;
        is_certain.then_some((key, read))
    };
    keys.into_iter().map(read).collect()
}

#[cfg(test)]
mod tests {
    use orthodrome_core::id::ClientId;
    use orthodrome_core::store::MemoryEngine;
    use orthodrome_core::txn::Value;

    use super::*;

    const P: PartitionId = PartitionId(0);

    fn txn(counter: u64) -> TxnId {
        TxnId::new(ClientId(1), counter)
    }

    fn version(at: u64, writer: u64) -> Version {
        Version { timestamp: Timestamp(at), writer: txn(writer) }
    }

    fn part(reads: &[(&str, Version)], writes: &[&str]) -> Part {
        Part {
            reads: reads.iter().map(|(key, version)| (Key::from(*key), *version)).collect(),
            writes: writes.iter().map(|key| (Key::from(*key), None)).collect(),
        }
    }

    fn store() -> Store {
        let mut store = Store::new(Box::new(MemoryEngine::default()));
        store.put(P, "x".into(), version(50, 1), Some(Value::from("v")));
        store
    }

    #[test]
    fn the_four_results_of_the_paper() {
        let (store, mut validator) = (store(), Validator::default());
        let check = |validator: &Validator, number, at, part: &Part| {
            validator.check((P, &store), txn(number), Timestamp(at), part)
        };
        let current = part(&[("x", version(50, 1))], &["x"]);
        assert_eq!(check(&validator, 2, 60, &current), Vote::PrepareOk(Timestamp(60)));
        // Its read is not the latest any more.
        let stale = part(&[("x", version(40, 9))], &[]);
        assert_eq!(check(&validator, 2, 60, &stale), Vote::Abort);
        // A write below a version, or below a read, could commit later.
        assert_eq!(check(&validator, 2, 50, &part(&[], &["x"])), Vote::Retry(Timestamp(51)));
        validator.prepare(txn(3), Timestamp(70), &part(&[("x", version(50, 1))], &[]));
        assert_eq!(check(&validator, 2, 70, &part(&[], &["x"])), Vote::Retry(Timestamp(71)));
        assert_eq!(check(&validator, 2, 71, &part(&[], &["x"])), Vote::PrepareOk(Timestamp(71)));
        // It read a key that another transaction is about to write.
        validator.prepare(txn(4), Timestamp(80), &part(&[], &["x"]));
        assert_eq!(check(&validator, 2, 90, &current), Vote::Abstain);
        assert!(validator.is_pending(&["x".into()], Timestamp(80)));
        assert!(!validator.is_pending(&["x".into()], Timestamp(79)));
        // Its own earlier round does not conflict with it, and neither does a transaction that was
        // released.
        assert_eq!(check(&validator, 4, 90, &current), Vote::PrepareOk(Timestamp(90)));
        validator.release(txn(4));
        assert_eq!(check(&validator, 2, 90, &current), Vote::PrepareOk(Timestamp(90)));
    }

    #[test]
    fn ended_reads_bind_writers_also_below_the_read_floor() {
        let (store, mut validator) = (store(), Validator::default());
        let writes = part(&[], &["x"]);
        let nanos = |secs: u64| secs * 1_000_000_000;
        validator.read(&"x".into(), Timestamp(nanos(7)));
        validator.read(&"y".into(), Timestamp(nanos(20)));
        let check = |validator: &Validator, at| {
            validator.check((P, &store), txn(2), Timestamp(at), &writes)
        };
        assert_eq!(check(&validator, nanos(7)), Vote::Retry(Timestamp(nanos(7) + 1)));
        assert_eq!(check(&validator, nanos(8)), Vote::PrepareOk(Timestamp(nanos(8))));
        validator.collect();
        assert_eq!(check(&validator, nanos(8)), Vote::Retry(Timestamp(nanos(15) + 1)));
    }

    /// Three transactions that only write may be prepared at once. Two got one timestamp, because the
    /// third one's was later.
    #[test]
    fn no_two_writers_of_a_key_have_one_timestamp() {
        let store = store();
        let mut validator = Validator::default();
        let writer = part(&[], &["k"]);
        validator.prepare(txn(1), Timestamp(70), &writer);
        validator.prepare(txn(2), Timestamp(90), &writer);
        let check = |at| validator.check((P, &store), txn(3), Timestamp(at), &writer);
        assert_eq!(check(70), Vote::Retry(Timestamp(71)));
        assert_eq!(check(90), Vote::Retry(Timestamp(91)));
        assert_eq!(check(80), Vote::PrepareOk(Timestamp(80)));
    }

    #[test]
    fn a_fence_stands_for_all_keys_of_the_partition() {
        let store = store();
        let vote = |validator: &Validator, counter, at, part: &Part| {
            validator.check((P, &store), txn(counter), Timestamp(at), part)
        };
        let fence = part(&[("\0fence7", Version::INITIAL)], &[]);
        let mut validator = Validator::default();
        validator.prepare(txn(2), Timestamp(60), &part(&[], &["new"]));
        assert_eq!(vote(&validator, 3, 70, &fence), Vote::Abstain);
        assert!(validator.is_any_pending(Timestamp(60)));
        assert!(!validator.is_any_pending(Timestamp(59)));
        validator.release(txn(2));
        assert_eq!(vote(&validator, 3, 70, &fence), Vote::PrepareOk(Timestamp(70)));
        validator.prepare(txn(3), Timestamp(70), &fence);
        let writer = part(&[], &["another"]);
        assert_eq!(vote(&validator, 4, 65, &writer), Vote::Retry(Timestamp(71)));
        assert_eq!(vote(&validator, 4, 71, &writer), Vote::PrepareOk(Timestamp(71)));
    }

    /// A read-only transaction that was repeated for more than ten seconds was told that a key is
    /// absent whose version of then had been dropped.
    #[test]
    fn a_read_below_all_versions_of_a_key_is_refused() {
        let mut store = store();
        store.put(P, "x".into(), version(60, 1), None);
        let read = |key: &str, at| {
            let keys = vec![Key::from(key)];
            snapshot((P, &store), keys, Timestamp(at)).map(|reads| reads[0].1.version)
        };
        assert_eq!(read("x", 59), Some(version(50, 1)));
        assert_eq!(read("x", 60), Some(version(60, 1)));
        assert_eq!(read("x", 49), None);
        assert_eq!(read("never written", 49), Some(Version::INITIAL));
        let keys = vec![Key::from("never written"), Key::from("x")];
        assert_eq!(snapshot((P, &store), keys, Timestamp(49)), None);
    }

    #[test]
    fn two_writers_of_a_key_never_share_a_timestamp() {
        let (store, mut validator) = (store(), Validator::default());
        let writes = part(&[], &["x"]);
        validator.prepare(txn(3), Timestamp(70), &writes);
        let check = |at| validator.check((P, &store), txn(2), Timestamp(at), &writes);
        assert_eq!(check(70), Vote::Retry(Timestamp(71)));
        assert!(check(69).is_ok() && check(71).is_ok());
    }
}
