//! The durable state engine: versions of keys in one `redb` file, written only by checkpoints.

use std::ops::Bound;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::scan::KeyRange;
use orthodrome_core::store::{
    CHANGED_KEYS_MAX, Extent, HEADS_BYTES_MAX, Head, Heads, Memtable, StateEngine, Table,
    Versioned, Versions, collect, collectable_after,
};
use orthodrome_core::wire::{self, Wire as _};
use orthodrome_core::{Key, PartitionId, Timestamp};
use redb::{
    Database, ReadOnlyTable, ReadableDatabase as _, ReadableTable as _, TableDefinition,
    TableError, WriteTransaction,
};
use smallvec::SmallVec;

use super::{Identity, StorageError, fatal};

/// Maps the partition (four bytes, big-endian) and the key to a checksum and the key's versions.
const VERSIONS: TableDefinition<'static, &[u8], &[u8]> = TableDefinition::new("versions");
/// Deleted keys of which something may be dropped later: the partition, the time of the deletion
/// (eight bytes, big-endian) and the key. A merge returns to them.
const DELETED: TableDefinition<'static, &[u8], &[u8]> = TableDefinition::new("deleted");
/// Of each partition: all versions after the first timestamp are there, and none is later than the
/// second ([`Extent`]).
const EXTENTS: TableDefinition<'static, u32, (u64, u64)> = TableDefinition::new("extents");
const META: TableDefinition<'static, &str, &[u8]> = TableDefinition::new("meta");

/// Size of the page cache of one node, in bytes. The page cache of the operating system holds more.
/// Without this bound, `redb` would use up to 1 GiB, its default.
const CACHE_BYTES: usize = 64 << 20;

/// The settings with which the file is made and opened.
fn builder() -> redb::Builder {
    let mut builder = Database::builder();
    builder.set_cache_size(CACHE_BYTES);
    builder
}

/// The engine of one node. Clones share one file; the driver keeps one to merge checkpoints into,
/// and the machine's store reads through another.
#[derive(Clone)]
pub struct Engine(Arc<Shared>);

struct Shared {
    path: PathBuf,
    database: Database,
    /// The state after the last merge, so that reads need no transaction of their own.
    snapshot: RwLock<Arc<Snapshot>>,
}

/// The state after a merge.
struct Snapshot {
    versions: ReadOnlyTable<&'static [u8], &'static [u8]>,
    extents: OrdMap<PartitionId, Extent>,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("path", &self.0.path).finish_non_exhaustive()
    }
}

impl Engine {
    /// Makes an empty engine.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn create(path: &Path, identity: &Identity) -> Result<Self, StorageError> {
        let open = || -> Result<Database, redb::Error> {
            let database = builder().create(path)?;
            let write = database.begin_write()?;
            write.open_table(VERSIONS)?;
            write.open_table(DELETED)?;
            write.open_table(EXTENTS)?;
            let owner = identity.to_string();
            write.open_table(META)?.insert("owner", owner.as_bytes())?;
            write.open_table(META)?.insert("checkpoint", 0_u64.to_le_bytes().as_slice())?;
            write.commit()?;
            Ok(database)
        };
        Self::share(path, open().map_err(|e| StorageError::engine("create", path, e))?)
    }

    /// Opens an engine, and verifies every page of it if `verify`. Also returns the number of the
    /// last merged checkpoint.
    ///
    /// # Errors
    /// It is missing, damaged, or another node's.
    pub fn open(
        path: &Path,
        identity: &Identity,
        verify: bool,
    ) -> Result<(Self, u64), StorageError> {
        if !path.exists() {
            return Err(StorageError::Missing { path: path.to_owned() });
        }
        let broken = |e| StorageError::engine("open", path, e);
        let mut database = builder().open(path).map_err(|e| broken(e.into()))?;
        if verify {
            // The effects of a crash are repaired when the file is opened, so what this finds is
            // damage.
            let is_sound = database.check_integrity().map_err(|e| broken(e.into()))?;
            if !is_sound {
                let why = "a page has a wrong checksum";
                return Err(StorageError::Corrupt { path: path.to_owned(), offset: 0, why });
            }
        }
        let (owner, checkpoint) = read_meta(&database).map_err(broken)?;
        if owner != identity.to_string().as_bytes() {
            return Err(StorageError::WrongIdentity {
                path: path.to_owned(),
                found: String::from_utf8_lossy(&owner).into_owned(),
                expected: identity.to_string(),
            });
        }
        if !has_table(&database, DELETED).map_err(broken)? {
            list_deleted(&database, path).map_err(broken)?;
        }
        if !has_table(&database, EXTENTS).map_err(broken)? {
            find_extents(&database, path).map_err(broken)?;
        }
        Ok((Self::share(path, database)?, checkpoint))
    }

    fn share(path: &Path, database: Database) -> Result<Self, StorageError> {
        let snapshot =
            snapshot(&database).map_err(|error| StorageError::engine("read", path, error))?;
        let snapshot = RwLock::new(Arc::new(snapshot));
        Ok(Self(Arc::new(Shared { path: path.to_owned(), database, snapshot })))
    }

    /// Merges a checkpoint's versions in one durable transaction, and stores its number.
    ///
    /// # Errors
    /// Writing failed. This is fatal, as for the log.
    pub fn merge(&self, above: &Memtable, checkpoint: u64) -> Result<(), StorageError> {
        let Shared { path, database, snapshot } = &*self.0;
        let merge = || -> Result<_, redb::Error> {
            let write = database.begin_write()?;
            for (&partition, table) in &above.tables {
                merge_table(&write, path, partition, table)?;
            }
            let number = checkpoint.to_le_bytes();
            write.open_table(META)?.insert("checkpoint", number.as_slice())?;
            write.commit()?;
            self::snapshot(database)
        };
        let merged = merge().map_err(|error| StorageError::engine("write", path, error))?;
        *snapshot.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(merged);
        Ok(())
    }

    fn snapshot(&self) -> Arc<Snapshot> {
        self.0.snapshot.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The rows of a range of keys; none if no key can be in it.
    fn rows(
        &self,
        partition: PartitionId,
        range: &KeyRange,
    ) -> Option<redb::Range<'static, &'static [u8], &'static [u8]>> {
        let first = row(partition, range.from.bytes());
        let end = match &range.until {
            Some(until) => Some(row(partition, until.bytes())),
            None => partition.0.checked_add(1).map(|next| row(PartitionId(next), &[])),
        };
        if end.as_ref().is_some_and(|end| *end <= first) {
            return None;
        }
        let end = end.as_ref().map_or(Bound::Unbounded, |end| Bound::Excluded(&end[..]));
        let rows = self.snapshot().versions.range::<&[u8]>((Bound::Included(&first[..]), end));
        Some(rows.unwrap_or_else(|error| self.broken(&error)))
    }

    /// Stops the process, because a machine cannot continue safely without its state.
    fn broken(&self, error: &dyn std::fmt::Display) -> ! {
        fatal(&format!(
            "cannot read the state engine {}: {error}; start the node again. If that fails, {}, \
             or replace the node with an empty one",
            self.0.path.display(),
            super::RESTORE
        ))
    }
}

fn snapshot(database: &Database) -> Result<Snapshot, redb::Error> {
    let read = database.begin_read()?;
    let mut extents = OrdMap::new();
    for entry in read.open_table(EXTENTS)?.iter()? {
        let (partition, extent) = entry?;
        let (kept_after, newest) = extent.value();
        let extent = Extent { kept_after: Timestamp(kept_after), newest: Timestamp(newest) };
        extents.insert(PartitionId(partition.value()), extent);
    }
    Ok(Snapshot { versions: read.open_table(VERSIONS)?, extents })
}

fn read_meta(database: &Database) -> Result<(Vec<u8>, u64), redb::Error> {
    let meta = database.begin_read()?.open_table(META)?;
    let owner = meta.get("owner")?.map(|value| value.value().to_vec()).unwrap_or_default();
    let number = meta.get("checkpoint")?.map_or(0, |value| {
        let mut bytes = value.value();
        if bytes.len() == 8 { bytes.get_u64_le() } else { 0 }
    });
    Ok((owner, number))
}

fn has_table<K: redb::Key + 'static, V: redb::Value + 'static>(
    database: &Database,
    table: TableDefinition<'static, K, V>,
) -> Result<bool, redb::Error> {
    match database.begin_read()?.open_table(table) {
        Ok(_) => Ok(true),
        Err(TableError::TableDoesNotExist(_)) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Lists the deleted keys in a file of a version that did not list them.
fn list_deleted(database: &Database, path: &Path) -> Result<(), redb::Error> {
    let write = database.begin_write()?;
    {
        let (table, mut deleted) = (write.open_table(VERSIONS)?, write.open_table(DELETED)?);
        for entry in table.iter()? {
            let (row, value) = entry?;
            let row = row.value();
            let versions = decode(row, value.value()).map_err(|why| corrupted(path, row, &why))?;
            if let Some(at) = collectable_after(&versions, false) {
                deleted.insert(&deletion(row, at)[..], &[][..])?;
            }
        }
    }
    Ok(write.commit()?)
}

/// Finds the newest version of each partition in a file of a version that did not keep extents. Nobody
/// knows which older ones were dropped.
fn find_extents(database: &Database, path: &Path) -> Result<(), redb::Error> {
    let write = database.begin_write()?;
    {
        let (table, mut extents) = (write.open_table(VERSIONS)?, write.open_table(EXTENTS)?);
        let mut newest: OrdMap<u32, u64> = OrdMap::new();
        for entry in table.iter()? {
            let (row, value) = entry?;
            let mut row = row.value();
            let versions = decode(row, value.value()).map_err(|why| corrupted(path, row, &why))?;
            let last = versions.last().map_or(0, |(version, _)| version.timestamp.0);
            let known = newest.entry(if row.len() < 4 { 0 } else { row.get_u32() }).or_default();
            *known = last.max(*known);
        }
        for (partition, newest) in newest {
            extents.insert(partition, (newest, newest))?;
        }
    }
    Ok(write.commit()?)
}

fn corrupted(path: &Path, row: &[u8], why: &str) -> redb::Error {
    let key = row.get(4..).unwrap_or_default().escape_ascii();
    redb::Error::Corrupted(format!("{} at {key}: {why}", path.display()))
}

type Row = SmallVec<[u8; 64]>;

fn row(partition: PartitionId, key: &[u8]) -> Row {
    let mut row = Row::from_slice(&partition.0.to_be_bytes());
    row.extend_from_slice(key);
    row
}

/// The entry of a row in [`DELETED`].
fn deletion(row: &[u8], at: Timestamp) -> Row {
    let (partition, key) = row.split_at_checked(4).unwrap_or((row, &[]));
    let mut entry = Row::from_slice(partition);
    entry.extend_from_slice(&at.0.to_be_bytes());
    entry.extend_from_slice(key);
    entry
}

type Rows<'a> = redb::Table<'a, &'static [u8], &'static [u8]>;

/// Removes all rows of a partition.
fn clear(table: &mut Rows<'_>, partition: PartitionId) -> Result<(), redb::Error> {
    let first = row(partition, &[]);
    match partition.0.checked_add(1).map(|next| row(PartitionId(next), &[])) {
        Some(end) => table.retain_in::<&[u8], _>(&first[..]..&end[..], |_, _| false)?,
        None => table.retain_in::<&[u8], _>(&first[..].., |_, _| false)?,
    }
    Ok(())
}

/// Takes the rows of keys that were deleted before `below`.
fn take_deleted(
    deleted: &mut Rows<'_>,
    partition: PartitionId,
    below: Timestamp,
) -> Result<Vec<Row>, redb::Error> {
    let first = row(partition, &[]);
    let end = deletion(&first, below);
    let mut rows = Vec::new();
    for entry in deleted.extract_from_if::<&[u8], _>(&first[..]..&end[..], |_, _| true)? {
        let (entry, _) = entry?;
        rows.push(row(partition, entry.value().get(12..).unwrap_or_default()));
    }
    Ok(rows)
}

fn merge_table(
    write: &WriteTransaction,
    path: &Path,
    partition: PartitionId,
    above: &Table,
) -> Result<(), redb::Error> {
    {
        let mut extents = write.open_table(EXTENTS)?;
        let held = extents.get(partition.0)?.map(|extent| extent.value()).unwrap_or_default();
        let held = Extent { kept_after: Timestamp(held.0), newest: Timestamp(held.1) };
        let Extent { kept_after, newest } = held.merged(above);
        extents.insert(partition.0, (kept_after.0, newest.0))?;
    }
    let (mut table, mut deleted) = (write.open_table(VERSIONS)?, write.open_table(DELETED)?);
    if above.cleared {
        clear(&mut table, partition)?;
        clear(&mut deleted, partition)?;
    }
    let due = take_deleted(&mut deleted, partition, above.collect_below)?;
    let none = Versions::new();
    let written =
        above.keys().iter().map(|(key, versions)| (row(partition, key.bytes()), versions));
    for (row, versions) in written.chain(due.into_iter().map(|row| (row, &none))) {
        let mut held = match table.get(&row[..])? {
            Some(value) => {
                decode(&row, value.value()).map_err(|why| corrupted(path, &row, &why))?
            }
            None => Versions::new(),
        };
        for (version, value) in versions {
            let at = held.partition_point(|(existing, _)| existing < version);
            if held.get(at).is_none_or(|(existing, _)| existing != version) {
                held.insert(at, (*version, value.clone()));
            }
        }
        collect(&mut held, above.collect_below, above.keeps_deletions);
        if let Some(at) = collectable_after(&held, above.keeps_deletions) {
            deleted.insert(&deletion(&row, at)[..], &[][..])?;
        }
        if held.is_empty() {
            table.remove(&row[..])?;
        } else {
            table.insert(&row[..], &encode(&row, &held)[..])?;
        }
    }
    Ok(())
}

/// The checksum also covers the key, so that a value in the wrong row is invalid.
fn encode(row: &[u8], versions: &Versions) -> Bytes {
    let mut out = BytesMut::with_capacity(4 + versions.size());
    out.put_u32_le(0);
    versions.put(&mut out);
    let crc = checksum(row, out.get(4..).unwrap_or_default());
    if let Some(mut head) = out.get_mut(..4) {
        head.put_u32_le(crc);
    }
    out.freeze()
}

fn checksum(row: &[u8], value: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(row), value)
}

fn decode(row: &[u8], mut value: &[u8]) -> Result<Versions, String> {
    if value.len() < 4 {
        return Err("a value is too short".into());
    }
    let crc = value.get_u32_le();
    if crc != checksum(row, value) {
        return Err("a value has a wrong checksum".into());
    }
    // Values decoded from a `Bytes` share its buffer.
    wire::decode(&Bytes::copy_from_slice(value)).map_err(|error| error.to_string())
}

impl StateEngine for Engine {
    fn read(&self, partition: PartitionId, key: &Key, at: Timestamp) -> Option<Versioned> {
        let row = row(partition, key.bytes());
        let found = self.snapshot().versions.get(&row[..]);
        let value = found.unwrap_or_else(|error| self.broken(&error))?;
        let mut versions = decode(&row, value.value()).unwrap_or_else(|why| self.broken(&why));
        let after = versions.partition_point(|(version, _)| version.timestamp <= at);
        let last = after.checked_sub(1)?;
        Some(versions.swap_remove(last))
    }

    fn versions(&self, partition: PartitionId, key: &Key) -> Versions {
        let row = row(partition, key.bytes());
        let found = self.snapshot().versions.get(&row[..]);
        found.unwrap_or_else(|error| self.broken(&error)).map_or_else(Versions::new, |value| {
            decode(&row, value.value()).unwrap_or_else(|why| self.broken(&why))
        })
    }

    fn scan(
        &self,
        partition: PartitionId,
        after: Option<&Key>,
        limit: usize,
    ) -> Vec<(Key, Versions)> {
        let first = row(partition, after.map_or(&[][..], |key| key.bytes()));
        let from =
            if after.is_some() { Bound::Excluded(&first[..]) } else { Bound::Included(&first[..]) };
        let snapshot = self.snapshot();
        let rows = snapshot.versions.range::<&[u8]>((from, Bound::Unbounded));
        let mut found = Vec::new();
        for entry in rows.unwrap_or_else(|error| self.broken(&error)).take(limit) {
            let (row, value) = entry.unwrap_or_else(|error| self.broken(&error));
            let row = row.value();
            let Some((owner, key)) = row.split_at_checked(4) else {
                self.broken(&"a row has no partition")
            };
            if owner != partition.0.to_be_bytes() {
                break;
            }
            let versions = decode(row, value.value()).unwrap_or_else(|why| self.broken(&why));
            found.push((Key::from(key), versions));
        }
        found
    }

    fn heads(
        &self,
        partition: PartitionId,
        range: &KeyRange,
        backwards: bool,
        limit: usize,
    ) -> Heads {
        let mut found = Heads::default();
        let Some(mut rows) = self.rows(partition, range) else { return found };
        let mut bytes = 0;
        while let Some(entry) = if backwards { rows.next_back() } else { rows.next() } {
            if found.heads.len() >= limit || bytes >= HEADS_BYTES_MAX {
                found.has_more = true;
                break;
            }
            let (row, value) = entry.unwrap_or_else(|error| self.broken(&error));
            let (row, value) = (row.value(), value.value());
            bytes += value.len();
            let key = Key::from(row.get(4..).unwrap_or_default());
            let versions = decode(row, value).unwrap_or_else(|why| self.broken(&why));
            if let Some((version, value)) = versions.last() {
                found.heads.push(Head { key, version: *version, is_deletion: value.is_none() });
            }
        }
        found
    }
    fn changed(
        &self,
        partition: PartitionId,
        range: &KeyRange,
        after: Timestamp,
    ) -> Option<Vec<(Key, Versions)>> {
        let mut changed = Vec::new();
        let Some(rows) = self.rows(partition, range) else { return Some(changed) };
        let mut bytes = 0;
        for (number, entry) in rows.enumerate() {
            if number >= CHANGED_KEYS_MAX || bytes >= HEADS_BYTES_MAX {
                return None;
            }
            let (row, value) = entry.unwrap_or_else(|error| self.broken(&error));
            let (row, value) = (row.value(), value.value());
            bytes += value.len();
            let mut versions = decode(row, value).unwrap_or_else(|why| self.broken(&why));
            versions.retain(|(version, _)| version.timestamp > after);
            if !versions.is_empty() {
                changed.push((Key::from(row.get(4..).unwrap_or_default()), versions));
            }
        }
        Some(changed)
    }

    fn extent(&self, partition: PartitionId) -> Extent {
        self.snapshot().extents.get(&partition).copied().unwrap_or_default()
    }
}
