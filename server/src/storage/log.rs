//! The append-only log of one node: batches of records in numbered segment files, and checkpoints
//! that replace the segments before them.
//!
//! # On disk
//!
//! `N.log` is segment `N`; `N.checkpoint` holds the records that replace every segment below `N`.
//! Recovery reads the newest checkpoint and the segments from its number on. Each file opens with a
//! header (magic, format version, kind, number, cluster, node, first batch, checksum), then batches.
//! A batch is what one sync makes durable: a 32-byte head with a checksum of its own, and records.
//! Every checksum covers the file's number and the offset too, so that bytes in the wrong place are
//! as invalid as wrong bytes. Batches are numbered without gaps across segments. A segment that has
//! a successor ends with a *seal*.
//!
//! # What a bad batch means
//!
//! A batch is written only after the one before it is durable. So a bad batch with nothing valid
//! after it was being written when the node died, was never acknowledged, and is cut off; a bad
//! batch with a valid one after it (or before a position known to be durable) was damaged later,
//! and the log refuses to open.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::{Limits, NodeId};

use super::{Identity, StorageError};

const MAGIC: &[u8; 8] = b"ORTHOLOG";
const FORMAT: u16 = 1;
/// Length of a file's header.
pub(super) const HEADER: usize = 128;
const BATCH_MAGIC: u32 = 0xB7A0_C4E5;
/// Length of a batch's head.
pub(super) const BATCH_HEAD: usize = 32;
/// Maximum size of a record.
pub const RECORD_BYTES_MAX: usize = Limits::SERVER.record_bytes;
/// A batch is closed at this size, so it exceeds it by at most one record.
pub const BATCH_BYTES: usize = 4 << 20;
/// Maximum size of a valid batch; a head with a larger size is damaged.
const BATCH_BYTES_MAX: usize = BATCH_BYTES + RECORD_BYTES_MAX + 16;

const BATCH_DATA: u8 = 1;
const BATCH_SEAL: u8 = 2;

/// One record: a tag, which names its owner and which the log does not interpret, and its bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Record {
    /// The writer's tag.
    pub tag: u8,
    /// The writer's bytes.
    pub bytes: Bytes,
}

/// A position in the log: everything before it is durable.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
pub struct Position {
    /// Number of the segment.
    pub segment: u64,
    /// Offset in the segment, in bytes.
    pub offset: u64,
}

/// Called with the name of each durable step just before the step. Tests stop the log there, copy
/// its directory, or make the step fail; a server installs no hook.
pub type Hook = Box<dyn FnMut(&'static str) -> io::Result<()> + Send>;

/// Options of a log.
pub struct Options {
    /// If false, syncs are skipped: the log then survives the death of the process, but not of the
    /// machine.
    pub sync: bool,
    /// Size in bytes after which a new segment begins.
    pub segment_bytes: u64,
    /// A position known to be durable from another source: if the log ends before it, data was
    /// lost.
    pub durable: Position,
    /// See [`Hook`].
    pub hook: Option<Hook>,
}

impl Default for Options {
    fn default() -> Self {
        Self { sync: true, segment_bytes: 64 << 20, durable: Position::default(), hook: None }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Segment = 1,
    Checkpoint = 2,
}

/// An open log: appends go to the newest segment.
pub struct Log {
    dir: PathBuf,
    identity: Identity,
    options: Options,
    file: File,
    end: Position,
    /// Number of the next batch.
    sequence: u64,
    /// The open batch, its head included.
    batch: BytesMut,
    /// True if a write failed: the contents of the disk are unknown, and nothing more is written.
    broken: bool,
}

impl std::fmt::Debug for Log {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Log").field("dir", &self.dir).field("end", &self.end).finish()
    }
}

/// The recovered contents of a log.
#[derive(Debug)]
pub struct Recovered {
    /// The records of the newest checkpoint, then those after it, in order.
    pub records: Vec<Record>,
    /// Number of the newest checkpoint; 0 if there is none.
    pub checkpoint: u64,
    /// The place where a torn batch was cut off, and the reason.
    pub torn: Option<(PathBuf, u64, &'static str)>,
}

impl Log {
    /// Makes an empty log in the empty directory `dir`.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub fn create(dir: &Path, identity: &Identity, options: Options) -> Result<Self, StorageError> {
        let mut steps = Steps { sync: options.sync, hook: options.hook };
        steps.publish(dir, &path(dir, 1, Kind::Segment), &header(Kind::Segment, 1, 1, identity))?;
        let options = Options { hook: steps.hook, ..options };
        Self::resume(dir, identity, options, Position { segment: 1, offset: HEADER as u64 }, 1)
    }

    /// Opens a log and reads everything in it that is durable.
    ///
    /// # Errors
    /// It belongs to another node or has another format; a file is damaged or missing in a way that
    /// a crash cannot cause; or it cannot be read. In these cases nothing was changed.
    pub fn open(
        dir: &Path,
        identity: &Identity,
        options: Options,
    ) -> Result<(Self, Recovered), StorageError> {
        let found = Found::read(dir, identity, options.durable)?;
        let Found { records, checkpoint, torn, end, sequence, obsolete, sealed } = found;
        for path in &obsolete {
            fs::remove_file(path).map_err(|e| StorageError::io("delete", path, e))?;
        }
        let from = options.durable;
        let sync = options.sync;
        let mut log = Self::resume(dir, identity, options, end, sequence)?;
        if sync {
            // A seal is durable before the first batch after it, unless the process died between.
            if let Some(seal) = sealed.filter(|_| from.segment < end.segment) {
                log.settle("settle seal", seal.offset.saturating_sub(BATCH_HEAD as u64), seal)?;
            }
            let offset = if from.segment == end.segment { from.offset } else { 0 };
            log.settle("settle end", offset, end)?;
            sync_dir(dir)?;
        }
        Ok((log, Recovered { records, checkpoint, torn }))
    }

    fn resume(
        dir: &Path,
        identity: &Identity,
        options: Options,
        end: Position,
        sequence: u64,
    ) -> Result<Self, StorageError> {
        let path = path(dir, end.segment, Kind::Segment);
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(&path)
            .map_err(|e| StorageError::io("open", &path, e))?;
        let length = file.metadata().map_err(|e| StorageError::io("inspect", &path, e))?.len();
        if length != end.offset {
            file.set_len(end.offset).map_err(|e| StorageError::io("truncate", &path, e))?;
        }
        file.seek(SeekFrom::Start(end.offset)).map_err(|e| StorageError::io("seek", &path, e))?;
        let mut batch = BytesMut::new();
        batch.put_bytes(0, BATCH_HEAD);
        let identity = identity.clone();
        let dir = dir.to_owned();
        Ok(Self { dir, identity, options, file, end, sequence, batch, broken: false })
    }

    /// Makes the bytes from `from` to `to` in the segment of `to` durable before they are used. A
    /// process that died between a write and its sync leaves bytes in the page cache only, and after
    /// a failed sync the cache marks them as clean. Writing and syncing them again solves both.
    fn settle(&mut self, name: &'static str, from: u64, to: Position) -> Result<(), StorageError> {
        use std::os::unix::fs::FileExt as _;
        let path = path(&self.dir, to.segment, Kind::Segment);
        step(&mut self.options.hook, name, &path)?;
        let length = usize::try_from(to.offset.saturating_sub(from)).unwrap_or(0);
        let mut bytes = vec![0; length];
        let file = OpenOptions::new().read(true).write(true).open(&path);
        let file = file.map_err(|e| StorageError::io("open", &path, e))?;
        file.read_exact_at(&mut bytes, from)
            .and_then(|()| file.write_all_at(&bytes, from))
            .and_then(|()| file.sync_all())
            .map_err(|e| StorageError::io("rewrite and sync", &path, e))
    }

    /// Adds a record to the open batch.
    ///
    /// # Errors
    /// The record is larger than [`RECORD_BYTES_MAX`].
    pub fn add(&mut self, tag: u8, bytes: &[u8]) -> Result<(), StorageError> {
        add(&mut self.batch, tag, bytes)
    }

    /// True if the open batch has reached [`BATCH_BYTES`] and should be committed.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.batch.len() >= BATCH_BYTES
    }

    /// Writes the open batch and makes it durable. Does nothing if the batch is empty.
    ///
    /// # Errors
    /// Writing or syncing failed. The contents of the disk are then unknown, and every later call
    /// fails too: the node must stop, and recover by opening the log again.
    pub fn commit(&mut self) -> Result<Position, StorageError> {
        if self.batch.len() > BATCH_HEAD {
            self.write_batch(BATCH_DATA)?;
            if self.end.offset >= self.options.segment_bytes {
                self.rotate()?;
            }
        }
        Ok(self.end)
    }

    fn write_batch(&mut self, kind: u8) -> Result<(), StorageError> {
        if self.broken {
            return Err(StorageError::Broken);
        }
        // If this function returns early, the log stays broken.
        self.broken = true;
        let place = (self.end.segment, self.end.offset);
        finish(&mut self.batch, kind, self.sequence, place);
        let path = path(&self.dir, self.end.segment, Kind::Segment);
        step(&mut self.options.hook, "write batch", &path)?;
        self.file.write_all(&self.batch).map_err(|e| StorageError::io("append to", &path, e))?;
        step(&mut self.options.hook, "sync batch", &path)?;
        if self.options.sync {
            self.file.sync_data().map_err(|e| StorageError::io("sync", &path, e))?;
        }
        self.end.offset += self.batch.len() as u64;
        self.sequence += 1;
        self.batch.clear();
        if self.batch.capacity() > 2 * BATCH_BYTES {
            self.batch = BytesMut::new();
        }
        self.batch.put_bytes(0, BATCH_HEAD);
        self.broken = false;
        Ok(())
    }

    /// Starts a new segment and returns its number: later records are in it or after it.
    ///
    /// # Errors
    /// As [`Log::commit`].
    ///
    /// # Panics
    /// If the open batch is not empty: its records would move to the new segment.
    pub fn rotate(&mut self) -> Result<u64, StorageError> {
        assert!(self.batch.len() == BATCH_HEAD, "a segment was closed with records uncommitted");
        let next = self.end.segment + 1;
        let target = path(&self.dir, next, Kind::Segment);
        // The successor is made first, because a seal states that it exists. Its first batch comes
        // after the seal.
        let head = header(Kind::Segment, next, self.sequence + 1, &self.identity);
        let mut steps = Steps { sync: self.options.sync, hook: self.options.hook.take() };
        let published = steps.publish(&self.dir, &target, &head);
        self.options.hook = steps.hook;
        if published.is_err() {
            self.broken = true;
        }
        published?;
        self.write_batch(BATCH_SEAL)?;
        let file = OpenOptions::new().read(true).write(true).open(&target);
        self.file = file.map_err(|e| StorageError::io("open", &target, e))?;
        let start = SeekFrom::Start(HEADER as u64);
        self.file.seek(start).map_err(|e| StorageError::io("seek", &target, e))?;
        self.end = Position { segment: next, offset: HEADER as u64 };
        Ok(next)
    }

    /// Replaces every segment below `number`, which [`Log::rotate`] returned, by `records`, and
    /// deletes those segments. A crash in between leaves the old log or the new one.
    ///
    /// `first` is the number of the first batch of segment `number`, from [`Log::sequence`] just
    /// after that `rotate`.
    ///
    /// # Errors
    /// As [`Log::commit`].
    pub fn checkpoint(
        &mut self,
        number: u64,
        first: u64,
        records: &[Record],
    ) -> Result<(), StorageError> {
        let image = checkpoint_image(number, first, records, &self.identity)?;
        let target = path(&self.dir, number, Kind::Checkpoint);
        let mut steps = Steps { sync: self.options.sync, hook: self.options.hook.take() };
        let result = steps
            .publish(&self.dir, &target, &image)
            .and_then(|()| steps.delete_below(&self.dir, number));
        self.options.hook = steps.hook;
        self.broken |= result.is_err();
        result
    }

    /// Number of the next batch.
    #[must_use]
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// False if syncs are skipped: then no data is known to survive the death of the machine.
    #[must_use]
    pub fn is_synced(&self) -> bool {
        self.options.sync
    }

    /// The end of the log: everything before it is durable.
    #[must_use]
    pub fn end(&self) -> Position {
        self.end
    }
}

fn add(batch: &mut BytesMut, tag: u8, bytes: &[u8]) -> Result<(), StorageError> {
    if bytes.len() > RECORD_BYTES_MAX {
        return Err(StorageError::RecordTooLarge { bytes: bytes.len(), limit: RECORD_BYTES_MAX });
    }
    batch.put_u32_le(bytes.len() as u32);
    batch.put_u8(tag);
    batch.put_slice(bytes);
    Ok(())
}

/// Fills in the head of a batch.
fn finish(batch: &mut [u8], kind: u8, sequence: u64, place: (u64, u64)) {
    let Some((head, payload)) = batch.split_at_mut_checked(BATCH_HEAD) else { return };
    let mut out = &mut *head;
    out.put_u32_le(BATCH_MAGIC);
    out.put_u8(kind);
    out.put_bytes(0, 3);
    out.put_u64_le(sequence);
    out.put_u32_le(payload.len() as u32);
    out.put_u32_le(0);
    out.put_u32_le(crc32c::crc32c_append(seed(place), payload));
    let crc = crc32c::crc32c_append(seed(place), head.get(..28).unwrap_or_default());
    if let Some(mut tail) = head.get_mut(28..) {
        tail.put_u32_le(crc);
    }
}

/// The seed of a checksum, which depends on the position in the files.
fn seed((number, offset): (u64, u64)) -> u32 {
    let mut place = [0; 16];
    let mut out = place.as_mut_slice();
    out.put_u64_le(number);
    out.put_u64_le(offset);
    crc32c::crc32c(&place)
}

fn header(kind: Kind, number: u64, first: u64, identity: &Identity) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER);
    out.put_slice(MAGIC);
    out.put_u16_le(FORMAT);
    out.put_u8(kind as u8);
    out.put_u8(identity.cluster.len() as u8);
    out.put_u32_le(identity.node.0);
    out.put_u64_le(number);
    out.put_u64_le(first);
    out.put_slice(identity.cluster.as_bytes());
    out.resize(HEADER - 4, 0);
    let crc = crc32c::crc32c(&out);
    out.put_u32_le(crc);
    out
}

fn checkpoint_image(
    number: u64,
    first: u64,
    records: &[Record],
    identity: &Identity,
) -> Result<Vec<u8>, StorageError> {
    let mut image = header(Kind::Checkpoint, number, first, identity);
    let mut batch = BytesMut::new();
    batch.put_bytes(0, BATCH_HEAD);
    let mut sequence = 1;
    for record in records {
        add(&mut batch, record.tag, &record.bytes)?;
        if batch.len() >= BATCH_BYTES {
            finish(&mut batch, BATCH_DATA, sequence, (number, image.len() as u64));
            image.extend_from_slice(&batch);
            batch.truncate(BATCH_HEAD);
            sequence += 1;
        }
    }
    if batch.len() > BATCH_HEAD {
        finish(&mut batch, BATCH_DATA, sequence, (number, image.len() as u64));
        image.extend_from_slice(&batch);
        batch.truncate(BATCH_HEAD);
        sequence += 1;
    }
    finish(&mut batch, BATCH_SEAL, sequence, (number, image.len() as u64));
    image.extend_from_slice(&batch);
    Ok(image)
}

fn path(dir: &Path, number: u64, kind: Kind) -> PathBuf {
    let ending = match kind {
        Kind::Segment => "log",
        Kind::Checkpoint => "checkpoint",
    };
    dir.join(format!("{number:016}.{ending}"))
}

/// Number and kind from a file's name.
fn parse_name(name: &str) -> Option<(u64, Kind)> {
    let (number, ending) = name.split_once('.')?;
    let kind = match ending {
        "log" => Kind::Segment,
        "checkpoint" => Kind::Checkpoint,
        _ => return None,
    };
    (number.len() == 16).then_some((number.parse().ok()?, kind))
}

fn step(hook: &mut Option<Hook>, name: &'static str, path: &Path) -> Result<(), StorageError> {
    match hook {
        Some(hook) => hook(name).map_err(|e| StorageError::io(name, path, e)),
        None => Ok(()),
    }
}

pub(super) fn sync_dir(dir: &Path) -> Result<(), StorageError> {
    File::open(dir)
        .and_then(|dir| dir.sync_all())
        .map_err(|e| StorageError::io("sync directory", dir, e))
}

/// Changes to the directory, each atomic, and durable when it returns.
struct Steps {
    sync: bool,
    hook: Option<Hook>,
}

impl Steps {
    /// Creates a file with all its bytes, or not at all.
    fn publish(&mut self, dir: &Path, target: &Path, bytes: &[u8]) -> Result<(), StorageError> {
        let mut draft = target.as_os_str().to_owned();
        draft.push(".tmp");
        let draft = PathBuf::from(draft);
        step(&mut self.hook, "write draft", &draft)?;
        let mut file = File::create(&draft).map_err(|e| StorageError::io("create", &draft, e))?;
        file.write_all(bytes).map_err(|e| StorageError::io("write", &draft, e))?;
        step(&mut self.hook, "sync draft", &draft)?;
        if self.sync {
            file.sync_all().map_err(|e| StorageError::io("sync", &draft, e))?;
        }
        step(&mut self.hook, "rename draft", target)?;
        fs::rename(&draft, target).map_err(|e| StorageError::io("rename", &draft, e))?;
        step(&mut self.hook, "sync directory", dir)?;
        if self.sync { sync_dir(dir) } else { Ok(()) }
    }

    /// Deletes every segment and checkpoint below `number`, oldest first, so that a crash in
    /// between leaves no gap.
    fn delete_below(&mut self, dir: &Path, number: u64) -> Result<(), StorageError> {
        for (&(old, _), path) in list(dir)?.files.iter() {
            if old < number {
                step(&mut self.hook, "delete old", path)?;
                fs::remove_file(path).map_err(|e| StorageError::io("delete", path, e))?;
            }
        }
        step(&mut self.hook, "end checkpoint", dir)
    }
}

/// The files of a log, by number; for each number, the segment first.
struct Listing {
    files: OrdMap<(u64, bool), PathBuf>,
    drafts: Vec<PathBuf>,
}

fn list(dir: &Path) -> Result<Listing, StorageError> {
    let mut listing = Listing { files: OrdMap::new(), drafts: Vec::new() };
    let entries = fs::read_dir(dir).map_err(|e| StorageError::io("list", dir, e))?;
    for entry in entries {
        let path = entry.map_err(|e| StorageError::io("list", dir, e))?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or("");
        if name.ends_with(".tmp") {
            listing.drafts.push(path);
        } else if let Some((number, kind)) = parse_name(name) {
            listing.files.insert((number, kind == Kind::Checkpoint), path);
        } else {
            return Err(StorageError::Foreign { path });
        }
    }
    Ok(listing)
}

/// One file, split into its batches.
struct Scan {
    first: u64,
    records: Vec<Record>,
    /// Number of the batch after the last valid one.
    next: u64,
    is_sealed: bool,
    /// End of the last valid batch.
    end: u64,
    /// The fault at that place, if the file does not end there.
    fault: Option<&'static str>,
    /// The offset of a valid batch after the fault.
    later: Option<u64>,
}

impl Scan {
    fn has_batches(&self) -> bool {
        self.end > HEADER as u64
    }
}

fn scan(path: &Path, number: u64, kind: Kind, me: &Identity) -> Result<Scan, StorageError> {
    let bytes = Bytes::from(fs::read(path).map_err(|e| StorageError::io("read", path, e))?);
    let first = check_header(path, &bytes, number, kind, me)?;
    let start = if kind == Kind::Checkpoint { 1 } else { first };
    let mut scan = Scan {
        first,
        records: Vec::new(),
        next: start,
        is_sealed: false,
        end: HEADER as u64,
        fault: None,
        later: None,
    };
    let mut rest = bytes.slice(HEADER..);
    while !rest.is_empty() {
        if scan.is_sealed {
            scan.fault = Some("there are bytes after the end of the file's last batch");
            break;
        }
        match batch(&rest, (number, scan.end)) {
            Ok(found) if found.sequence == scan.next => {
                if records(&found.payload, &mut scan.records).is_none() {
                    scan.fault = Some("a batch with a valid checksum holds no whole records");
                    break;
                }
                scan.is_sealed = found.kind == BATCH_SEAL;
                scan.next += 1;
                let length = BATCH_HEAD + found.payload.len();
                scan.end += length as u64;
                rest.advance(length);
            }
            Ok(_) => {
                scan.fault = Some("a batch has the wrong number");
                break;
            }
            Err(why) => {
                scan.fault = Some(why);
                break;
            }
        }
    }
    if scan.fault.is_some() {
        scan.later = later_batch(&rest, number, scan.end, scan.next);
    }
    Ok(scan)
}

struct Batch {
    kind: u8,
    sequence: u64,
    payload: Bytes,
}

/// Reads the batch at the start of `bytes`, which begin at `place`.
fn batch(bytes: &Bytes, place: (u64, u64)) -> Result<Batch, &'static str> {
    let head = bytes.get(..BATCH_HEAD).ok_or("the head of a batch is cut off")?;
    let mut fields = head;
    let magic = fields.get_u32_le();
    let kind = fields.get_u8();
    fields.advance(3);
    let sequence = fields.get_u64_le();
    let length = fields.get_u32_le() as usize;
    fields.advance(4);
    let payload_crc = fields.get_u32_le();
    let head_crc = fields.get_u32_le();
    let covered = head.get(..28).unwrap_or_default();
    if magic != BATCH_MAGIC || head_crc != crc32c::crc32c_append(seed(place), covered) {
        return Err("the head of a batch has a wrong checksum");
    }
    if length > BATCH_BYTES_MAX || !(kind == BATCH_DATA || kind == BATCH_SEAL) {
        return Err("the head of a batch makes no sense");
    }
    if bytes.len() - BATCH_HEAD < length {
        return Err("a batch is cut off");
    }
    let payload = bytes.slice(BATCH_HEAD..BATCH_HEAD + length);
    if payload_crc != crc32c::crc32c_append(seed(place), &payload) {
        return Err("the records of a batch have a wrong checksum");
    }
    Ok(Batch { kind, sequence, payload })
}

fn records(payload: &Bytes, into: &mut Vec<Record>) -> Option<()> {
    let mut rest = payload.clone();
    while !rest.is_empty() {
        if rest.len() < 5 {
            return None;
        }
        let length = rest.get_u32_le() as usize;
        let tag = rest.get_u8();
        if length > rest.len() {
            return None;
        }
        into.push(Record { tag, bytes: rest.split_to(length) });
    }
    Some(())
}

/// The offset of a valid batch after the bad one at `offset`, where `bytes` begin. A head is valid
/// only at its own offset and with a number that fits, so data that looks like one does not count.
fn later_batch(bytes: &Bytes, number: u64, offset: u64, expected: u64) -> Option<u64> {
    let magic = BATCH_MAGIC.to_le_bytes();
    (1..bytes.len()).find_map(|skip| {
        let candidate = bytes.get(skip..)?;
        if !candidate.starts_with(&magic) {
            return None;
        }
        let place = offset + skip as u64;
        let found = batch(&bytes.slice(skip..), (number, place)).ok()?;
        (found.sequence >= expected).then_some(place)
    })
}

fn check_header(
    path: &Path,
    bytes: &[u8],
    number: u64,
    kind: Kind,
    me: &Identity,
) -> Result<u64, StorageError> {
    let corrupt = |why| StorageError::Corrupt { path: path.to_owned(), offset: 0, why };
    let header = bytes.get(..HEADER).ok_or_else(|| corrupt("the file's header is cut off"))?;
    let mut fields = header;
    if fields.split_at_checked(8).is_none_or(|(magic, _)| magic != MAGIC) {
        return Err(corrupt("this is not a log file"));
    }
    fields.advance(8);
    let (covered, mut crc) = header.split_at(HEADER - 4);
    if crc.get_u32_le() != crc32c::crc32c(covered) {
        return Err(corrupt("the file's header has a wrong checksum"));
    }
    let format = fields.get_u16_le();
    if format != FORMAT {
        return Err(StorageError::Format { path: path.to_owned(), found: format, known: FORMAT });
    }
    let found_kind = fields.get_u8();
    let cluster_length = usize::from(fields.get_u8());
    let node = NodeId(fields.get_u32_le());
    let found_number = fields.get_u64_le();
    let first = fields.get_u64_le();
    let cluster = fields.get(..cluster_length).unwrap_or_default();
    if cluster != me.cluster.as_bytes() || node != me.node {
        return Err(StorageError::WrongIdentity {
            path: path.to_owned(),
            found: format!("{node} of cluster {:?}", String::from_utf8_lossy(cluster)),
            expected: me.to_string(),
        });
    }
    if found_number != number || found_kind != kind as u8 {
        return Err(corrupt("the file's header does not match its name; was it renamed?"));
    }
    Ok(first)
}

/// The contents of a log's files, before any is changed.
struct Found {
    records: Vec<Record>,
    checkpoint: u64,
    torn: Option<(PathBuf, u64, &'static str)>,
    end: Position,
    sequence: u64,
    obsolete: Vec<PathBuf>,
    /// The end of the last sealed segment.
    sealed: Option<Position>,
}

impl Found {
    fn read(dir: &Path, me: &Identity, durable: Position) -> Result<Self, StorageError> {
        let Listing { files, drafts } = list(dir)?;
        let checkpoint = files.keys().filter(|(_, is)| *is).map(|&(n, _)| n).max().unwrap_or(0);
        let mut found = Self {
            records: Vec::new(),
            checkpoint,
            torn: None,
            end: Position::default(),
            sequence: 1,
            obsolete: drafts,
            sealed: None,
        };
        let mut segments = Vec::new();
        let mut first = None;
        for (&(number, is_checkpoint), path) in &files {
            if number < checkpoint {
                found.obsolete.push(path.clone());
            } else if is_checkpoint {
                let scan = scan(path, number, Kind::Checkpoint, me)?;
                whole(path, &scan)?;
                first = Some(scan.first);
                found.records = scan.records;
            } else {
                segments.push((number, path));
            }
        }
        found.read_segments(dir, me, &segments, first)?;
        if found.end < durable {
            let path = path(dir, durable.segment, Kind::Segment);
            let (offset, why) =
                (durable.offset, "the log ends before what was known to be durable");
            return Err(StorageError::Corrupt { path, offset, why });
        }
        Ok(found)
    }

    fn read_segments(
        &mut self,
        dir: &Path,
        me: &Identity,
        segments: &[(u64, &PathBuf)],
        first: Option<u64>,
    ) -> Result<(), StorageError> {
        let mut expected = self.checkpoint.max(1);
        self.sequence = first.unwrap_or(1);
        let mut open: Option<(u64, &PathBuf, Scan)> = None;
        for &(number, path) in segments {
            if number != expected {
                break;
            }
            expected += 1;
            let scan = scan(path, number, Kind::Segment, me)?;
            if let Some((_, before, unsealed)) = &open {
                // A crash between creating a segment and sealing its predecessor leaves it empty.
                // It is created when everything before its predecessor's seal is durable.
                let is_next = scan.first == unsealed.next + 1;
                if scan.has_batches() || scan.fault.is_some() || !is_next {
                    let why = unsealed.fault.unwrap_or("the segment has a successor but no seal");
                    let offset = unsealed.end;
                    return Err(StorageError::Corrupt { path: (*before).clone(), offset, why });
                }
                self.obsolete.push(path.clone());
                continue;
            }
            if scan.first != self.sequence {
                let why = "the segment does not follow the one before it";
                return Err(StorageError::Corrupt { path: path.clone(), offset: 0, why });
            }
            self.sequence = scan.next;
            if scan.is_sealed {
                whole(path, &scan)?;
                self.sealed = Some(Position { segment: number, offset: scan.end });
                self.records.extend(scan.records);
            } else {
                open = Some((number, path, scan));
            }
        }
        let is_complete = segments.last().is_some_and(|&(last, _)| last + 1 == expected);
        let Some((number, path, scan)) = open.filter(|_| is_complete) else {
            return Err(StorageError::Missing { path: self::path(dir, expected, Kind::Segment) });
        };
        if let Some(why) = scan.fault {
            if scan.later.is_some() {
                let (path, offset) = (path.clone(), scan.end);
                return Err(StorageError::Corrupt { path, offset, why });
            }
            self.torn = Some((path.clone(), scan.end, why));
        }
        self.records.extend(scan.records);
        self.end = Position { segment: number, offset: scan.end };
        Ok(())
    }
}

/// Returns an error if a file that must be complete is not.
fn whole(path: &Path, scan: &Scan) -> Result<(), StorageError> {
    let why = match scan.fault {
        Some(why) => why,
        None if !scan.is_sealed => "the file's end is missing",
        None => return Ok(()),
    };
    Err(StorageError::Corrupt { path: path.to_owned(), offset: scan.end, why })
}
