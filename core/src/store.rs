//! The multi-version store: versions of keys, by partition.
//!
//! A machine owns a [`Store`]: a [`Memtable`] with the versions since its last checkpoint, above a
//! [`StateEngine`] with the durable versions of earlier checkpoints. Reads are synchronous. Writes
//! go to the memtable, and reach the engine with [`crate::Effect::Checkpoint`]. A crash loses the
//! memtable, and replaying the log rebuilds it: putting the same version twice changes nothing.

use std::fmt::Debug;
use std::ops::Bound;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use smallvec::SmallVec;

use crate::Rng;
use crate::digest::Digest;
use crate::filter::KeyFilter;
use crate::id::PartitionId;
use crate::ordered::{Entry, OrdMap, OrdSet};
use crate::scan::KeyRange;
use crate::time::Timestamp;
use crate::txn::{Key, Read, Value, Version};
use crate::watch::Change;
use crate::wire::{Wire, WireError};

/// One version of a key. No value means that this version deleted the key.
pub type Versioned = (Version, Option<Value>);

/// All versions of one key, oldest first.
pub type Versions = SmallVec<[Versioned; 1]>;

/// Checks that the versions of each key are in order, oldest first. Tables rely on it.
///
/// # Errors
/// If they are not.
pub fn check_versions(keys: &[(Key, Versions)]) -> Result<(), WireError> {
    for (key, versions) in keys {
        if !versions.is_sorted_by(|(a, _), (b, _)| a < b) {
            let found = format!("versions of {key} out of order");
            let wanted = "oldest first, each once";
            return Err(WireError::Value { field: "versions", found, wanted });
        }
    }
    Ok(())
}

/// Random keys with versions that pass [`check_versions`].
pub fn sample_versions(rng: &mut Rng) -> Vec<(Key, Versions)> {
    let keys = Vec::<(Key, OrdMap<Version, Option<Value>>)>::sample(rng);
    keys.into_iter().map(|(key, versions)| (key, versions.into_iter().collect())).collect()
}

/// The durable versions. Only the driver writes them, when it carries out a checkpoint.
///
/// Reads cannot fail: an engine that cannot read its medium must stop the process and say why,
/// because a machine cannot continue safely without its state.
pub trait StateEngine: Debug + Send + Sync {
    /// The newest version of `key` that is not after `at`.
    fn read(&self, partition: PartitionId, key: &Key, at: Timestamp) -> Option<Versioned>;

    /// All versions of `key`.
    fn versions(&self, partition: PartitionId, key: &Key) -> Versions;

    /// The first `limit` keys after `after` (from the first key, if none), each with all its
    /// versions.
    fn scan(
        &self,
        partition: PartitionId,
        after: Option<&Key>,
        limit: usize,
    ) -> Vec<(Key, Versions)>;

    /// The first keys of `range` with their newest versions, in the given direction: at most `limit`,
    /// and about [`HEADS_BYTES_MAX`] bytes of values that had to be read for them.
    fn heads(
        &self,
        partition: PartitionId,
        range: &KeyRange,
        backwards: bool,
        limit: usize,
    ) -> Heads;

    /// The keys of `range` that have versions after `after`, with these versions. None if more than
    /// [`CHANGED_KEYS_MAX`] keys, or about [`HEADS_BYTES_MAX`] bytes, would have to be read for that.
    fn changed(
        &self,
        partition: PartitionId,
        range: &KeyRange,
        after: Timestamp,
    ) -> Option<Vec<(Key, Versions)>>;

    /// What is known of all versions of a partition.
    fn extent(&self, partition: PartitionId) -> Extent;
}

/// The number of keys that an engine reads at most for one call of [`StateEngine::changed`].
pub const CHANGED_KEYS_MAX: usize = 4_096;

/// What an engine knows of all versions of a partition.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Extent {
    /// All versions after this are there.
    pub kept_after: Timestamp,
    /// No version there is later.
    pub newest: Timestamp,
}

impl Extent {
    /// The extent after a checkpoint's table was merged.
    #[must_use]
    pub fn merged(self, above: &Table) -> Self {
        let below = if above.cleared { Self::default() } else { self };
        let versions = above.keys.values().filter_map(|versions| versions.last());
        let newest = versions.map(|(version, _)| version.timestamp).max().unwrap_or_default();
        Self {
            kept_after: below.kept_after.max(above.kept_after()),
            newest: below.newest.max(newest),
        }
    }
}

/// The size of the values that an engine reads at most for one call of [`StateEngine::heads`], in
/// bytes, besides the last one.
pub const HEADS_BYTES_MAX: usize = 4 << 20;

/// The newest version of a key, without its value.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Head {
    /// The key.
    pub key: Key,
    /// Its newest version.
    pub version: Version,
    /// True if that is a deletion.
    pub is_deletion: bool,
}

/// Keys of a range with their newest versions.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Heads {
    /// The first ones, in the direction asked for.
    pub heads: Vec<Head>,
    /// True if more may follow.
    pub has_more: bool,
}

impl Heads {
    /// The first heads of these keys; stops before the one that is over a limit.
    fn of<'a>(
        keys: &'a OrdMap<Key, Versions>,
        range: &KeyRange,
        backwards: bool,
        limit: usize,
    ) -> Self {
        if range.is_empty() {
            return Self::default();
        }
        let met = keys.range::<Key, _>(bounds(range));
        let met: Box<dyn Iterator<Item = (&'a Key, &'a Versions)>> =
            if backwards { Box::new(met.rev()) } else { Box::new(met) };
        let mut found = Self::default();
        for (key, versions) in met {
            let Some((version, value)) = versions.last() else { continue };
            if found.heads.len() >= limit {
                found.has_more = true;
                break;
            }
            let (key, is_deletion) = (key.clone(), value.is_none());
            found.heads.push(Head { key, version: *version, is_deletion });
        }
        found
    }
}

/// Versions of one partition.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// True if the layers below have no valid data for this partition.
    pub cleared: bool,
    /// Versions older than this may be dropped, except the newest of them for each key.
    pub collect_below: Timestamp,
    /// Deletions are not dropped: a reader that merges the answers of several replicas would take an
    /// older value of another replica for the newest.
    pub keeps_deletions: bool,
    /// The versions are copies of another replica's. It may have dropped older versions up to this.
    pub copied_until: Timestamp,
    /// The versions.
    keys: OrdMap<Key, Versions>,
    /// Says of most keys without versions that they have none.
    filter: KeyFilter,
}

impl Table {
    /// The versions of each key.
    #[must_use]
    pub fn keys(&self) -> &OrdMap<Key, Versions> {
        &self.keys
    }

    /// The versions of a key, if it has any.
    fn versions(&self, key: &Key) -> Option<&Versions> {
        if self.filter.may_have(key) { self.keys.get(key) } else { None }
    }

    /// The versions of a key, to add one.
    fn versions_mut(&mut self, key: Key) -> &mut Versions {
        if self.filter.is_full() {
            self.filter = KeyFilter::over(self.keys.keys());
        }
        match self.keys.entry(key) {
            Entry::Occupied(held) => held.into_mut(),
            Entry::Vacant(place) => {
                self.filter.add(place.key());
                place.insert(Versions::new())
            }
        }
    }

    /// No version after this is dropped when the table is merged, or was dropped before it was copied.
    #[must_use]
    pub fn kept_after(&self) -> Timestamp {
        Timestamp(self.collect_below.0.saturating_sub(1)).max(self.copied_until)
    }

    /// The versions of keys of `range` after `after`.
    fn changed<'a>(
        &'a self,
        range: &KeyRange,
        after: Timestamp,
    ) -> impl Iterator<Item = (&'a Key, &'a Versioned)> {
        let keys = (!range.is_empty()).then(|| self.keys.range::<Key, _>(bounds(range)));
        keys.into_iter().flatten().flat_map(move |(key, versions)| {
            let first = versions.partition_point(|(version, _)| version.timestamp <= after);
            versions.iter().skip(first).map(move |versioned| (key, versioned))
        })
    }
}

/// The bounds of a range that is not empty.
fn bounds(range: &KeyRange) -> (Bound<&Key>, Bound<&Key>) {
    let end = range.until.as_ref().map_or(Bound::Unbounded, Bound::Excluded);
    (Bound::Included(&range.from), end)
}

/// Versions in memory, by partition.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Memtable {
    /// The tables.
    pub tables: OrdMap<PartitionId, Table>,
    bytes: usize,
}

impl Memtable {
    /// The approximate size of its keys and values in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    fn put(&mut self, partition: PartitionId, key: Key, version: Version, value: Option<Value>) {
        let bytes = size(&key, value.as_ref());
        let versions = self.tables.entry(partition).or_default().versions_mut(key);
        let at = versions.partition_point(|(held, _)| *held < version);
        if versions.get(at).is_none_or(|(held, _)| *held != version) {
            versions.insert(at, (version, value));
            self.bytes += bytes;
        }
    }

    fn read(&self, partition: PartitionId, key: &Key, at: Timestamp) -> Option<&Versioned> {
        newest(self.tables.get(&partition)?.versions(key)?, at)
    }

    fn is_cleared(&self, partition: PartitionId) -> bool {
        self.tables.get(&partition).is_some_and(|table| table.cleared)
    }
}

/// Drops versions that no transaction can read any more: those older than the newest version below
/// `below`, and that one too if it is a deletion, unless deletions are kept.
pub fn collect(versions: &mut Versions, below: Timestamp, keeps_deletions: bool) {
    let old = versions.partition_point(|(version, _)| version.timestamp < below);
    let dead = match old.checked_sub(1).and_then(|last| versions.get(last)) {
        Some((_, None)) if !keeps_deletions => old,
        Some(_) => old - 1,
        None => 0,
    };
    versions.drain(..dead);
}

/// The time of the deletion of a key, if something of the key may be dropped once no transaction can
/// read before this time. An engine returns to such a key then. Otherwise the last value of a
/// deleted key would stay until somebody writes the key again.
#[must_use]
pub fn collectable_after(versions: &Versions, keeps_deletions: bool) -> Option<Timestamp> {
    let (version, value) = versions.last()?;
    let has_more = !keeps_deletions || versions.len() > 1;
    (value.is_none() && has_more).then_some(version.timestamp)
}

/// The newest of `versions` (oldest first) that is not after `at`.
#[must_use]
pub fn newest(versions: &[Versioned], at: Timestamp) -> Option<&Versioned> {
    let after = versions.partition_point(|(version, _)| version.timestamp <= at);
    after.checked_sub(1).and_then(|last| versions.get(last))
}

/// An engine in memory. The simulated disk uses it as the state that survives a crash, and a server
/// without a data directory uses it too. Clones share one state.
#[derive(Clone, Debug, Default)]
pub struct MemoryEngine(Arc<RwLock<Held>>);

/// The state of an engine in memory.
#[derive(Debug, Default)]
struct Held {
    versions: Memtable,
    /// Deleted keys of which something may be dropped, by the time of the deletion.
    deleted: OrdSet<(PartitionId, Timestamp, Key)>,
    extents: OrdMap<PartitionId, Extent>,
}

impl Held {
    fn merge(&mut self, above: &Memtable) {
        for (&partition, table) in &above.tables {
            let extent = self.extents.entry(partition).or_default();
            *extent = extent.merged(table);
            if table.cleared {
                let old = self.versions.tables.remove(&partition).unwrap_or_default();
                let bytes = &mut self.versions.bytes;
                *bytes = bytes.saturating_sub(old.keys.len() * 64);
                self.deleted.retain(|(owner, ..)| *owner != partition);
            }
            for (key, versions) in &table.keys {
                for (version, value) in versions {
                    self.versions.put(partition, key.clone(), *version, value.clone());
                }
            }
            let first = (partition, Timestamp::ZERO, Key::default());
            let end = (partition, table.collect_below, Key::default());
            let due: Vec<_> = self.deleted.range(first..end).cloned().collect();
            for entry in &due {
                self.deleted.remove(entry);
            }
            let Some(mine) = self.versions.tables.get_mut(&partition) else { continue };
            for key in table.keys.keys().chain(due.iter().map(|(.., key)| key)) {
                let Some(held) = mine.keys.get_mut(key) else { continue };
                collect(held, table.collect_below, table.keeps_deletions);
                if let Some(at) = collectable_after(held, table.keeps_deletions) {
                    self.deleted.insert((partition, at, key.clone()));
                }
                if held.is_empty() {
                    mine.keys.remove(key);
                }
            }
        }
    }
}

impl MemoryEngine {
    /// Merges a checkpoint's versions. It drops the versions that may be dropped of the keys that
    /// the checkpoint touches, and of those that were deleted.
    pub fn merge(&self, above: &Memtable) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).merge(above);
    }
}

impl StateEngine for MemoryEngine {
    fn read(&self, partition: PartitionId, key: &Key, at: Timestamp) -> Option<Versioned> {
        let state = self.0.read().unwrap_or_else(PoisonError::into_inner);
        state.versions.read(partition, key, at).cloned()
    }

    fn versions(&self, partition: PartitionId, key: &Key) -> Versions {
        let state = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let table = state.versions.tables.get(&partition);
        table.and_then(|table| table.versions(key)).cloned().unwrap_or_default()
    }

    fn scan(
        &self,
        partition: PartitionId,
        after: Option<&Key>,
        limit: usize,
    ) -> Vec<(Key, Versions)> {
        let state = self.0.read().unwrap_or_else(PoisonError::into_inner);
        state.versions.tables.get(&partition).map_or_else(Vec::new, |table| {
            let entries = table.keys.range::<Key, _>((from(after), Bound::Unbounded));
            entries.take(limit).map(|(key, versions)| (key.clone(), versions.clone())).collect()
        })
    }

    fn heads(
        &self,
        partition: PartitionId,
        range: &KeyRange,
        backwards: bool,
        limit: usize,
    ) -> Heads {
        let state = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let table = state.versions.tables.get(&partition);
        table.map_or_else(Heads::default, |table| Heads::of(&table.keys, range, backwards, limit))
    }

    fn changed(
        &self,
        partition: PartitionId,
        range: &KeyRange,
        after: Timestamp,
    ) -> Option<Vec<(Key, Versions)>> {
        let state = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let Some(table) = state.versions.tables.get(&partition) else { return Some(Vec::new()) };
        let keys = (!range.is_empty()).then(|| table.keys.range::<Key, _>(bounds(range)));
        if keys.into_iter().flatten().nth(CHANGED_KEYS_MAX).is_some() {
            return None;
        }
        let changed = table.changed(range, after).map(|(key, versioned)| {
            let versions: Versions = std::iter::once(versioned.clone()).collect();
            (key.clone(), versions)
        });
        Some(changed.collect())
    }

    fn extent(&self, partition: PartitionId) -> Extent {
        let state = self.0.read().unwrap_or_else(PoisonError::into_inner);
        state.extents.get(&partition).copied().unwrap_or_default()
    }
}

/// Adds versions of one key to others of it.
fn merge(held: &mut Versions, versions: Versions) {
    for versioned in versions {
        let at = held.partition_point(|(version, _)| *version < versioned.0);
        if held.get(at).is_none_or(|(version, _)| *version != versioned.0) {
            held.insert(at, versioned);
        }
    }
}

/// The approximate size of a version in bytes.
fn size(key: &Key, value: Option<&Value>) -> usize {
    key.len() + value.map_or(0, Value::len) + 64
}

fn from(after: Option<&Key>) -> Bound<&Key> {
    after.map_or(Bound::Unbounded, Bound::Excluded)
}

/// The size at which a piece of a partition's state ends, in bytes. It is far below the size of a
/// message, so that a piece with one more long value is, too.
pub const PIECE_BYTES: usize = 1 << 20;

/// The number of `keys`, from the first on, that together have about `bytes_max` bytes; at least
/// one if there are any.
#[must_use]
pub fn piece_len(keys: &[(Key, Versions)], bytes_max: usize) -> usize {
    let mut bytes = 0;
    let fits = keys.iter().take_while(|(key, versions)| {
        let is_over = bytes >= bytes_max;
        bytes += versions.iter().map(|(_, value)| size(key, value.as_ref())).sum::<usize>();
        !is_over
    });
    fits.count()
}

/// A piece of a partition's state, to copy to another replica.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Keys in order, each with all its versions.
    pub keys: Vec<(Key, Versions)>,
    /// The last key of the piece, if more follow.
    pub next: Option<Key>,
}

/// A position in a partition's state, possibly within the versions of a key.
#[derive(Clone, PartialEq, Eq, Debug, Default, Wire)]
pub struct Start {
    /// After this key; at the first key if none.
    pub after: Option<Key>,
    /// In this following key, after this version: earlier ones were sent already.
    pub within: Option<(Key, Version)>,
}

/// The number of keys that one scan of [`Store::cut`] requests. Values may be long.
const SCAN_KEYS: usize = 64;

/// A machine's versioned state: memory over the state engine.
#[derive(Debug)]
pub struct Store {
    active: Memtable,
    /// The versions that a pending checkpoint is making durable.
    frozen: Option<Arc<Memtable>>,
    engine: Box<dyn StateEngine>,
    /// The digest of the versions put since it was last taken.
    puts: Digest,
    /// See [`Store::forgets`].
    forgets: OrdMap<PartitionId, Timestamp>,
    /// The newest versions in the engine before the pending checkpoint, of the partitions in it.
    newest_before: OrdMap<PartitionId, Timestamp>,
    /// The versions of the last checkpoint, and the newest versions in the engine before it, if somebody
    /// watches. A watch is always a little behind, and would otherwise have to search the engine after
    /// each checkpoint.
    merged: Option<(Arc<Memtable>, OrdMap<PartitionId, Timestamp>)>,
    /// Changes were asked for since the last checkpoint.
    is_watched: AtomicBool,
}

impl Store {
    /// A store over what earlier checkpoints made durable.
    #[must_use]
    pub fn new(engine: Box<dyn StateEngine>) -> Self {
        Self {
            active: Memtable::default(),
            frozen: None,
            engine,
            puts: Digest::default(),
            forgets: OrdMap::new(),
            merged: None,
            newest_before: OrdMap::new(),
            is_watched: AtomicBool::new(false),
        }
    }

    /// The newest version of `key` that is not after `at`; [`Version::INITIAL`] and no value if
    /// there is none.
    #[must_use]
    pub fn read_at(&self, partition: PartitionId, key: &Key, at: Timestamp) -> Read {
        let mut best = self.active.read(partition, key, at);
        let mut hidden = self.active.is_cleared(partition);
        if let (false, Some(frozen)) = (hidden, &self.frozen) {
            best = newer(best, frozen.read(partition, key, at));
            hidden = frozen.is_cleared(partition);
        }
        let below = if hidden { None } else { self.engine.read(partition, key, at) };
        // A value is copied once, however many layers have one.
        let best = match (best, &below) {
            (Some(best), Some(below)) if best.0 >= below.0 => Some(best.clone()),
            (Some(best), None) => Some(best.clone()),
            (Some(_), Some(_)) | (None, _) => below,
        };
        best.map_or_else(Read::default, |(version, value)| Read { value, version })
    }

    /// The newest version of `key`.
    #[must_use]
    pub fn read(&self, partition: PartitionId, key: &Key) -> Read {
        self.read_at(partition, key, Timestamp::MAX)
    }

    /// The newest version of `key` that is before `end`; as [`Store::read_at`] if there is none.
    #[must_use]
    pub fn read_before(&self, partition: PartitionId, key: &Key, end: Version) -> Read {
        let before = |versions: &[Versioned]| {
            let after = versions.partition_point(|(version, _)| *version < end);
            after.checked_sub(1).and_then(|last| versions.get(last)).cloned()
        };
        let mut best: Option<Versioned> = None;
        let mut hidden = false;
        for layer in self.layers() {
            if let (false, Some(table)) = (hidden, layer.tables.get(&partition)) {
                let found = table.versions(key).and_then(|held| before(held));
                best = newer(best.as_ref(), found.as_ref()).cloned();
                hidden = table.cleared;
            }
        }
        if !hidden {
            let below = self.engine.read(partition, key, end.timestamp);
            let below = match below {
                // Two transactions may have one timestamp.
                Some((version, _)) if version >= end => {
                    before(&self.engine.versions(partition, key))
                }
                Some(_) | None => below,
            };
            best = newer(best.as_ref(), below.as_ref()).cloned();
        }
        best.map_or_else(Read::default, |(version, value)| Read { value, version })
    }

    /// All versions of `key`.
    #[must_use]
    pub fn versions(&self, partition: PartitionId, key: &Key) -> Versions {
        let mut merged = Versions::new();
        for layer in self.layers() {
            let Some(table) = layer.tables.get(&partition) else { continue };
            merge(&mut merged, table.versions(key).cloned().unwrap_or_default());
            if table.cleared {
                return merged;
            }
        }
        merge(&mut merged, self.engine.versions(partition, key));
        merged
    }

    /// The newest version of `key`, from a server that knows every version of it up to `known`. If the
    /// key is absent, and nothing here remembers whether it was deleted, the answer says so: a client
    /// that knows an older value of the key must see that its deletion is newer (R11). Only then
    /// `known` is called.
    #[must_use]
    pub fn read_known(
        &self,
        partition: PartitionId,
        key: &Key,
        known: impl FnOnce() -> Timestamp,
    ) -> Read {
        let mut read = self.read(partition, key);
        if read.value.is_none() && read.version.is_unwritten() {
            read.version.timestamp = known();
        }
        read
    }

    /// Adds a version of `key`. Adding a version that exists changes nothing.
    pub fn put(
        &mut self,
        partition: PartitionId,
        key: Key,
        version: Version,
        value: Option<Value>,
    ) {
        self.puts.add_bytes(key.bytes());
        self.puts.add(version.timestamp.0);
        if let Some(value) = &value {
            self.puts.add_bytes(&value.0);
        }
        self.active.put(partition, key, version, value);
    }

    /// A digest, in order, of all versions put since the last call.
    pub fn take_puts(&mut self) -> u64 {
        std::mem::take(&mut self.puts).value()
    }

    /// Drops all data of a partition, so that it can be filled again.
    pub fn clear(&mut self, partition: PartitionId) {
        let table = Table { cleared: true, ..Table::default() };
        self.active.tables.insert(partition, table);
    }

    /// Allows the next checkpoint to drop versions older than `below`, except the newest such
    /// version of each key.
    pub fn collect_below(&mut self, partition: PartitionId, below: Timestamp) {
        let table = self.active.tables.entry(partition).or_default();
        table.collect_below = table.collect_below.max(below);
        self.may_lack(partition, below);
    }

    /// No deletion is later that this store, or the one from which a partition was copied, has dropped.
    /// A key that is absent here, and of which nothing here remembers that it was deleted, may have
    /// had a value until then.
    #[must_use]
    pub fn forgets(&self, partition: PartitionId) -> Timestamp {
        self.forgets.get(&partition).copied().unwrap_or_default()
    }

    /// Deletions up to `at` may be missing: the data are those of an earlier incarnation, or of
    /// another replica, which had dropped some.
    pub fn may_lack(&mut self, partition: PartitionId, at: Timestamp) {
        let forgets = self.forgets.entry(partition).or_default();
        *forgets = at.max(*forgets);
    }

    /// Adds versions that another replica has sent. It may have dropped older versions of these keys.
    pub fn put_copies(&mut self, partition: PartitionId, keys: Vec<(Key, Versions)>) {
        let newest = keys.iter().filter_map(|(_, versions)| versions.last());
        let newest = newest.map(|(version, _)| version.timestamp).max();
        self.copied(partition, newest.unwrap_or_default());
        for (key, versions) in keys {
            for (version, value) in versions {
                self.put(partition, key.clone(), version, value);
            }
        }
    }

    /// The versions of a partition are, at least in part, copies of another replica's, which may have
    /// dropped older ones up to `at`.
    pub fn copied(&mut self, partition: PartitionId, at: Timestamp) {
        let table = self.active.tables.entry(partition).or_default();
        table.copied_until = table.copied_until.max(at);
    }

    /// All versions of a partition after this are here, of those that were ever put.
    #[must_use]
    pub fn kept_after(&self, partition: PartitionId) -> Timestamp {
        let mut kept = Timestamp::ZERO;
        for layer in self.layers() {
            let Some(table) = layer.tables.get(&partition) else { continue };
            kept = kept.max(table.kept_after());
            if table.cleared {
                return kept;
            }
        }
        kept.max(self.engine.extent(partition).kept_after)
    }

    /// The versions of keys of `range` after `after` and up to `until`, by timestamp, then by key.
    /// None if too much of the engine would have to be read for that.
    #[must_use]
    pub fn changes(
        &self,
        partition: PartitionId,
        range: &KeyRange,
        (after, until): (Timestamp, Timestamp),
    ) -> Option<Vec<Change>> {
        let mut found: OrdMap<(Version, Key), Option<Value>> = OrdMap::new();
        let mut add = |key: &Key, (version, value): &Versioned| {
            if version.timestamp <= until {
                found.insert((*version, key.clone()), value.clone());
            }
        };
        self.is_watched.store(true, Ordering::Relaxed);
        let mut hidden = false;
        for layer in self.layers().chain(self.merged.as_ref().map(|(merged, _)| &**merged)) {
            let Some(table) = layer.tables.get(&partition) else { continue };
            table.changed(range, after).for_each(|(key, versioned)| add(key, versioned));
            hidden = table.cleared;
            if hidden {
                break;
            }
        }
        if !hidden && self.newest_below(partition) > after {
            for (key, versions) in self.engine.changed(partition, range, after)? {
                versions.iter().for_each(|versioned| add(&key, versioned));
            }
        }
        let change = |((version, key), value)| Change { key, version, value };
        Some(found.into_iter().map(change).collect())
    }

    /// No version that is only in the engine is later.
    fn newest_below(&self, partition: PartitionId) -> Timestamp {
        let merged = self.merged.as_ref().and_then(|(_, before)| before.get(&partition));
        let before = merged.or_else(|| self.newest_before.get(&partition)).copied();
        before.unwrap_or_else(|| self.engine.extent(partition).newest)
    }

    /// The layers in memory, the newest first.
    fn layers(&self) -> impl Iterator<Item = &Memtable> {
        [Some(&self.active), self.frozen.as_deref()].into_iter().flatten()
    }

    /// As [`Store::collect_below`], but keeps the last deletion of each key.
    pub fn collect_values_below(&mut self, partition: PartitionId, below: Timestamp) {
        self.collect_below(partition, below);
        self.active.tables.entry(partition).or_default().keeps_deletions = true;
    }

    /// The first `limit` keys after `after`, each with all its versions.
    #[must_use]
    pub fn scan(
        &self,
        partition: PartitionId,
        after: Option<&Key>,
        limit: usize,
    ) -> Vec<(Key, Versions)> {
        let mut merged: OrdMap<Key, Versions> = OrdMap::new();
        let mut add = |entries: Vec<(Key, Versions)>| {
            for (key, versions) in entries {
                merge(merged.entry(key).or_default(), versions);
            }
        };
        let mut hidden = false;
        for layer in self.layers() {
            if let (false, Some(table)) = (hidden, layer.tables.get(&partition)) {
                let entries = table.keys.range::<Key, _>((from(after), Bound::Unbounded));
                add(entries.take(limit).map(|(k, v)| (k.clone(), v.clone())).collect());
                hidden = table.cleared;
            }
        }
        if !hidden {
            add(self.engine.scan(partition, after, limit));
        }
        // Each layer returned its first `limit` keys, so the first `limit` keys of their union are
        // complete.
        merged.into_iter().take(limit).collect()
    }

    /// The first keys of `range` with their newest versions, in the given direction: at most `limit`.
    #[must_use]
    pub fn heads(
        &self,
        partition: PartitionId,
        range: &KeyRange,
        backwards: bool,
        limit: usize,
    ) -> Heads {
        let mut layers = Vec::new();
        let mut hidden = false;
        for layer in self.layers() {
            if let (false, Some(table)) = (hidden, layer.tables.get(&partition)) {
                layers.push(Heads::of(&table.keys, range, backwards, limit));
                hidden = table.cleared;
            }
        }
        if !hidden {
            layers.push(self.engine.heads(partition, range, backwards, limit));
        }
        let is_after = |key: &Key, last: &Key| if backwards { key < last } else { key > last };
        // Beyond the end of a list that is not complete, the union is not complete either.
        let ends = layers.iter().filter(|layer| layer.has_more);
        let ends = ends.filter_map(|layer| layer.heads.last().map(|head| head.key.clone()));
        let end = if backwards { ends.max() } else { ends.min() };
        let mut merged: OrdMap<Key, Head> = OrdMap::new();
        let mut has_more = end.is_some();
        for head in layers.into_iter().flat_map(|layer| layer.heads) {
            if end.as_ref().is_some_and(|end| is_after(&head.key, end)) {
                continue;
            }
            match merged.get_mut(&head.key) {
                Some(held) if held.version >= head.version => {}
                Some(held) => *held = head,
                None => drop(merged.insert(head.key.clone(), head)),
            }
        }
        has_more |= merged.len() > limit;
        let heads = merged.into_values();
        let heads: Vec<Head> =
            if backwards { heads.rev().take(limit).collect() } else { heads.take(limit).collect() };
        Heads { heads, has_more }
    }

    /// The keys after `after` that fit into one message: at most `keys_max`, and about
    /// [`PIECE_BYTES`] bytes, but at least one if there are any.
    #[must_use]
    pub fn piece(&self, partition: PartitionId, after: Option<&Key>, keys_max: usize) -> Piece {
        self.piece_within(partition, after, (keys_max, PIECE_BYTES))
    }

    /// The keys after `after`: at most `keys_max`, and about `bytes_max` bytes, but at least one if
    /// there are any.
    #[must_use]
    pub fn piece_within(
        &self,
        partition: PartitionId,
        after: Option<&Key>,
        (keys_max, bytes_max): (usize, usize),
    ) -> Piece {
        let mut keys = self.scan(partition, after, keys_max);
        let fits = piece_len(&keys, bytes_max);
        let is_last = fits == keys.len() && keys.len() < keys_max;
        keys.truncate(fits);
        let next = if is_last { None } else { keys.last().map(|(key, _)| key.clone()) };
        Piece { keys, next }
    }

    /// The state from `start` on, and where the next piece begins, if there is more. At most
    /// `keys_max` keys. The size exceeds `bytes_max` by at most one version, because a key may have
    /// any number of versions.
    #[must_use]
    pub fn cut(
        &self,
        partition: PartitionId,
        start: &Start,
        (keys_max, bytes_max): (usize, usize),
    ) -> (Vec<(Key, Versions)>, Option<Start>) {
        let mut at = start.clone();
        let (mut keys, mut bytes) = (Vec::new(), 0);
        while keys.len() < keys_max && bytes < bytes_max {
            let limit = (keys_max - keys.len()).min(SCAN_KEYS);
            let found = self.scan(partition, at.after.as_ref(), limit);
            let is_end = found.len() < limit;
            for (key, mut versions) in found {
                if bytes >= bytes_max {
                    return (keys, Some(at));
                }
                if let Some((_, told)) = at.within.take_if(|(within, _)| *within == key) {
                    versions.retain(|(version, _)| *version > told);
                }
                let fits = versions.iter().take_while(|(_, value)| {
                    let is_over = bytes >= bytes_max;
                    bytes += if is_over { 0 } else { size(&key, value.as_ref()) };
                    !is_over
                });
                let fits = fits.count();
                if let Some((last, _)) =
                    versions.get(fits.saturating_sub(1)).filter(|_| fits < versions.len())
                {
                    at.within = Some((key.clone(), *last));
                    versions.truncate(fits);
                    keys.push((key, versions));
                    return (keys, Some(at));
                }
                at.after = Some(key.clone());
                if !versions.is_empty() {
                    keys.push((key, versions));
                }
            }
            if is_end {
                return (keys, None);
            }
        }
        (keys, Some(at))
    }

    /// The approximate size of the next checkpoint in bytes.
    #[must_use]
    pub fn active_bytes(&self) -> usize {
        self.active.bytes()
    }

    /// Begins a checkpoint of everything applied so far.
    ///
    /// # Panics
    /// If a checkpoint is already pending.
    pub fn freeze(&mut self) -> Arc<Memtable> {
        assert!(self.frozen.is_none(), "a second checkpoint began before the first was durable");
        let frozen = Arc::new(std::mem::take(&mut self.active));
        let newest = |&partition: &PartitionId| (partition, self.engine.extent(partition).newest);
        self.newest_before = frozen.tables.keys().map(newest).collect();
        self.frozen = Some(frozen.clone());
        frozen
    }

    /// Ends the checkpoint: the engine now has the frozen versions.
    pub fn thaw(&mut self) {
        let (frozen, before) = (self.frozen.take(), std::mem::take(&mut self.newest_before));
        let is_watched = self.is_watched.swap(false, Ordering::Relaxed);
        self.merged = frozen.filter(|_| is_watched).map(|frozen| (frozen, before));
    }

    /// True while a checkpoint is pending.
    #[must_use]
    pub fn is_frozen(&self) -> bool {
        self.frozen.is_some()
    }
}

/// The one with the larger version; the first if they are equal.
fn newer<'a>(a: Option<&'a Versioned>, b: Option<&'a Versioned>) -> Option<&'a Versioned> {
    match (a, b) {
        (Some(a), Some(b)) => Some(if b.0 > a.0 { b } else { a }),
        (a, b) => a.or(b),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{ClientId, TxnId};

    const P: PartitionId = PartitionId(0);

    fn version(timestamp: u64) -> Version {
        Version { timestamp: Timestamp(timestamp), writer: TxnId::new(ClientId(1), timestamp) }
    }

    fn value(read: &Read) -> Option<String> {
        read.value.as_ref().map(ToString::to_string)
    }

    #[test]
    fn reads_find_the_newest_version_in_any_layer() {
        let engine = MemoryEngine::default();
        let mut store = Store::new(Box::new(engine.clone()));
        let key = Key::from("k");
        store.put(P, key.clone(), version(10), Some("a".into()));
        let frozen = store.freeze();
        store.put(P, key.clone(), version(20), Some("b".into()));
        assert_eq!(value(&store.read(P, &key)).as_deref(), Some("b"));
        assert_eq!(value(&store.read_at(P, &key, Timestamp(19))).as_deref(), Some("a"));
        assert_eq!(store.read_at(P, &key, Timestamp(9)), Read::default());
        engine.merge(&frozen);
        store.thaw();
        assert_eq!(value(&store.read_at(P, &key, Timestamp(19))).as_deref(), Some("a"));
        // A replay puts the old version above the newer one. Reads still return the newer one.
        let mut replayed = Store::new(Box::new(engine.clone()));
        replayed.put(P, key.clone(), version(5), Some("old".into()));
        assert_eq!(value(&replayed.read(P, &key)).as_deref(), Some("a"));
    }

    #[test]
    fn a_cleared_partition_hides_what_lies_below() {
        let engine = MemoryEngine::default();
        let mut store = Store::new(Box::new(engine.clone()));
        store.put(P, "k".into(), version(10), Some("a".into()));
        engine.merge(&store.freeze());
        store.thaw();
        store.clear(P);
        assert_eq!(store.read(P, &"k".into()), Read::default());
        assert!(store.scan(P, None, 10).is_empty());
        store.put(P, "l".into(), version(11), Some("b".into()));
        engine.merge(&store.freeze());
        store.thaw();
        assert_eq!(store.read(P, &"k".into()), Read::default());
        assert_eq!(store.scan(P, None, 10).len(), 1);
    }

    #[test]
    fn collection_keeps_what_a_reader_at_the_bound_would_see() {
        let mut versions: Versions =
            [10, 20, 30].map(|t| (version(t), Some(Value::from("x")))).into_iter().collect();
        collect(&mut versions, Timestamp(25), false);
        assert_eq!(versions.iter().map(|(v, _)| v.timestamp.0).collect::<Vec<_>>(), [20, 30]);
        let mut deleted: Versions = [(version(10), None)].into_iter().collect();
        collect(&mut deleted, Timestamp(10), false);
        assert_eq!(deleted.len(), 1, "a deletion at the bound is still needed");
        collect(&mut deleted, Timestamp(11), true);
        assert_eq!(deleted.len(), 1, "deletions are kept");
        collect(&mut deleted, Timestamp(11), false);
        assert!(deleted.is_empty());
    }

    #[test]
    fn the_value_of_a_key_that_was_deleted_goes_away_by_itself() {
        for keeps_deletions in [false, true] {
            let engine = MemoryEngine::default();
            let mut store = Store::new(Box::new(engine.clone()));
            let checkpoint = |store: &mut Store, below| {
                if keeps_deletions {
                    store.collect_values_below(P, Timestamp(below));
                } else {
                    store.collect_below(P, Timestamp(below));
                }
                engine.merge(&store.freeze());
                store.thaw();
                let found = engine.scan(P, None, 10);
                found.first().map_or(0, |(_, versions)| versions.len())
            };
            store.put(P, "k".into(), version(10), Some("x".into()));
            assert_eq!(checkpoint(&mut store, 5), 1);
            store.put(P, "k".into(), version(20), None);
            assert_eq!(checkpoint(&mut store, 15), 2, "a transaction may still read at 15");
            assert_eq!(checkpoint(&mut store, 20), 2, "and at 19");
            assert_eq!(checkpoint(&mut store, 21), usize::from(keeps_deletions));
        }
    }

    #[test]
    fn a_deletion_that_is_kept_hides_an_older_value_that_comes_later() {
        let engine = MemoryEngine::default();
        let mut store = Store::new(Box::new(engine.clone()));
        store.put(P, "k".into(), version(10), Some("x".into()));
        store.put(P, "k".into(), version(20), None);
        store.collect_values_below(P, Timestamp(30));
        engine.merge(&store.freeze());
        store.thaw();
        store.put(P, "k".into(), version(10), Some("x".into()));
        let read = store.read(P, &"k".into());
        assert_eq!((read.value, read.version), (None, version(20)));
    }

    #[test]
    fn all_versions_of_a_key_are_found_wherever_they_are() {
        let engine = MemoryEngine::default();
        let mut store = Store::new(Box::new(engine.clone()));
        let key = Key::from("k");
        let of = |store: &Store| store.versions(P, &key).into_iter().map(|(version, _)| version);
        for at in [10, 20, 30] {
            assert!(of(&store).eq((1..at / 10).map(|number| version(number * 10))));
            store.put(P, "j".into(), version(at), Some("x".into()));
            store.put(P, key.clone(), version(at), Some("x".into()));
            if at == 10 {
                engine.merge(&store.freeze());
                store.thaw();
            } else if at == 20 {
                let _ = store.freeze();
            }
        }
        assert!(of(&store).eq([version(10), version(20), version(30)]));
        for at in [10, 11, 20, 21, 30, 31] {
            let before = store.read_before(P, &key, version(at)).version;
            assert_eq!(
                before,
                if at == 10 { Version::INITIAL } else { version((at - 1) / 10 * 10) }
            );
        }
        // Another transaction has the same timestamp.
        let end = Version { writer: version(21).writer, ..version(20) };
        assert_eq!(store.read_before(P, &key, end).version, version(20));
        let end = Version { writer: version(11).writer, ..version(10) };
        assert_eq!(store.read_before(P, &key, end).version, version(10));
        store.clear(P);
        assert_eq!(of(&store).count(), 0);
    }

    #[test]
    fn a_scan_in_pieces_sees_every_key_once() {
        let engine = MemoryEngine::default();
        let mut store = Store::new(Box::new(engine.clone()));
        for number in 0..50 {
            store.put(P, format!("k{number:02}").into(), version(1), Some("x".into()));
            if number == 20 {
                engine.merge(&store.freeze());
                store.thaw();
            }
            if number == 35 {
                let _ = store.freeze();
            }
        }
        let (seen, sizes) = pieces(&store, 7);
        assert_eq!(seen, (0..50).map(|n| Key::from(format!("k{n:02}"))).collect::<Vec<_>>());
        assert_eq!(sizes, [7, 7, 7, 7, 7, 7, 7, 1]);
    }

    fn pieces(store: &Store, keys_max: usize) -> (Vec<Key>, Vec<usize>) {
        let (mut seen, mut sizes, mut after) = (Vec::new(), Vec::new(), None);
        loop {
            let piece = store.piece(P, after.as_ref(), keys_max);
            sizes.push(piece.keys.len());
            seen.extend(piece.keys.into_iter().map(|(key, _)| key));
            after = piece.next;
            if after.is_none() {
                return (seen, sizes);
            }
        }
    }

    #[test]
    fn a_part_may_end_within_a_key_and_nothing_is_left_out() {
        let mut store = Store::new(Box::new(MemoryEngine::default()));
        for number in 0..200_u64 {
            // One key has most of the versions.
            let key = if number % 4 == 0 { format!("k{number:03}") } else { "k100".into() };
            store.put(P, key.into(), version(number + 1), Some("x".repeat(100).into()));
            if number == 90 {
                let _ = store.freeze();
            }
        }
        let whole = store.scan(P, None, usize::MAX);
        for (keys_max, bytes_max) in
            [(1_000, 1), (1_000, 1_000), (3, 100_000), (1, 500), (64, 9_000)]
        {
            let mut told: OrdMap<Key, Versions> = OrdMap::new();
            let mut start = Some(Start::default());
            while let Some(from) = start {
                let (keys, next) = store.cut(P, &from, (keys_max, bytes_max));
                assert!(keys.len() <= keys_max);
                let all = keys
                    .iter()
                    .flat_map(|(key, all)| all.iter().map(move |(_, value)| (key, value)));
                let bytes: usize = all.map(|(key, value)| size(key, value.as_ref())).sum();
                assert!(bytes < bytes_max + 200, "{bytes} of {bytes_max}");
                for (key, versions) in keys {
                    told.entry(key).or_default().extend(versions);
                }
                assert_ne!(next.as_ref(), Some(&from), "no progress");
                start = next;
            }
            assert_eq!(told.into_iter().collect::<Vec<_>>(), whole, "{keys_max} {bytes_max}");
        }
    }

    #[test]
    fn a_piece_ends_where_one_message_would_grow_too_long() {
        let mut store = Store::new(Box::new(MemoryEngine::default()));
        // Some short keys, one that is longer than a piece, and some of a third of a piece.
        let third = PIECE_BYTES / 3;
        let lengths = [1, 1, 2 * PIECE_BYTES, third, third, third, third, 1];
        for (number, length) in lengths.into_iter().enumerate() {
            let value = Value::from(vec![b'x'; length]);
            store.put(P, format!("k{number}").into(), version(1), Some(value));
        }
        let (seen, sizes) = pieces(&store, 100);
        assert_eq!(seen, (0..8).map(|n| Key::from(format!("k{n}"))).collect::<Vec<_>>());
        assert_eq!(sizes, [3, 3, 2], "cut behind what goes over it");
        assert_eq!(pieces(&store, 8).1, [3, 3, 2], "not known to be the last");
    }
}
