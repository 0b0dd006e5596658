//! The data directory: one lock, one identity, and the numbers that must never go back.
//!
//! ```text
//! LOCK            held while a process uses the directory
//! NEW             made with the files of a new cluster: that there is no data yet is no loss
//! placement.toml  the placement of partitions with which the data was made
//! identity.toml   whose data this is; written last when the directory is made
//! ceilings        two copies of the numbers that must never go back
//! log/            the log
//! state.redb      the state engine
//! ```

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use bytes::{Buf as _, BufMut as _};
use orthodrome_core::{NodeId, Timestamp};
use serde::{Deserialize, Serialize};

use super::log::{Position, sync_dir};
use super::{Expected, Identity, StorageError};

/// The format of a directory that has a copy of the placement.
const FORMAT: u16 = 3;
/// The format of an earlier version, which may have made no copy.
const WITHOUT_PLACEMENT: u16 = 2;
/// The format of the file of [`Ceilings`].
const CEILINGS_FORMAT: u16 = 2;
const MARK: &str = "NEW";
const NOT_AN_IDENTITY: &str = "this is not an identity file";

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct IdentityFile {
    format: u16,
    cluster: String,
    node: NodeId,
    protocol: String,
    /// The directory began empty because the node had lost its data.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    replacement: bool,
}

/// A data directory that this process uses.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    /// Held until this value is dropped, or the process ends.
    _lock: File,
    is_new: bool,
    has_placement: bool,
    is_replacement: bool,
    identity: Identity,
    protocol: &'static str,
}

impl Directory {
    /// Makes a directory for a node of a new cluster; [`Directory::open`] recognizes it.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub fn mark_new(path: &Path) -> Result<(), StorageError> {
        fs::create_dir_all(path).map_err(|e| StorageError::io("create", path, e))?;
        let mark = path.join(MARK);
        fs::write(&mark, "").map_err(|e| StorageError::io("write", &mark, e))
    }

    /// As [`Directory::mark_new`], for a directory that an operator names.
    ///
    /// # Errors
    /// The directory holds data of a node, or of another program.
    pub fn mark_unused(path: &Path, node: NodeId) -> Result<(), StorageError> {
        refuse_foreign(path)?;
        if path.join("identity.toml").exists() {
            return Err(StorageError::NotEmpty { path: path.to_owned(), node });
        }
        Self::mark_new(path)
    }

    /// Opens and locks the directory, or makes it if it does not exist.
    ///
    /// # Errors
    /// Another process uses it; it holds data of another node, of another protocol or of another
    /// program; or it does not match `expected`. In these cases only the lock file was changed.
    pub fn open(
        path: &Path,
        identity: &Identity,
        protocol: &'static str,
        expected: Expected,
    ) -> Result<Self, StorageError> {
        identity.check()?;
        refuse_foreign(path)?;
        let has_data = path.join("identity.toml").exists();
        match expected {
            Expected::Data if !has_data && !path.join(MARK).exists() => {
                return Err(StorageError::Empty { path: path.to_owned(), node: identity.node });
            }
            Expected::NewCluster | Expected::Replacement if has_data => {
                return Err(StorageError::NotEmpty { path: path.to_owned(), node: identity.node });
            }
            Expected::Data | Expected::NewCluster | Expected::Replacement | Expected::Either => {}
        }
        fs::create_dir_all(path).map_err(|e| StorageError::io("create", path, e))?;
        let lock = lock(&path.join("LOCK"))?;
        let file = path.join("identity.toml");
        let (is_new, has_placement, is_replacement) = match read_text(&file, NOT_AN_IDENTITY)? {
            Some(text) => {
                let found = check_identity(&file, &text, identity, protocol)?;
                (false, found.format == FORMAT, found.replacement)
            }
            None => (true, false, expected == Expected::Replacement),
        };
        let directory = Self {
            path: path.to_owned(),
            _lock: lock,
            is_new,
            has_placement,
            is_replacement,
            identity: identity.clone(),
            protocol,
        };
        if is_new {
            directory.wipe()?;
        } else {
            // A crash just after the identity was written leaves this file.
            remove(&directory.path.join(MARK))?;
        }
        Ok(directory)
    }

    /// True if the directory has never held data: [`Directory::finish`] has not been called on it.
    #[must_use]
    pub fn is_new(&self) -> bool {
        self.is_new
    }

    /// True if its data was stored together with a copy of the placement, so that the copy cannot be
    /// missing unless somebody has removed it.
    #[must_use]
    pub fn has_placement(&self) -> bool {
        self.has_placement
    }

    /// True if the directory was made because the node had lost its data ([`Expected::Replacement`]).
    #[must_use]
    pub fn is_replacement(&self) -> bool {
        self.is_replacement
    }

    /// The directory itself.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The directory of the log.
    #[must_use]
    pub fn log(&self) -> PathBuf {
        self.path.join("log")
    }

    /// The file of the state engine.
    #[must_use]
    pub fn state(&self) -> PathBuf {
        self.path.join("state.redb")
    }

    /// The file of [`Ceilings`].
    #[must_use]
    pub fn ceilings(&self) -> PathBuf {
        self.path.join("ceilings")
    }

    /// Removes the files of a process that died while it made the directory. None of them was ever
    /// used: the identity is written last.
    fn wipe(&self) -> Result<(), StorageError> {
        for file in [self.ceilings(), self.state()] {
            remove(&file)?;
        }
        let log = self.log();
        if log.exists() {
            fs::remove_dir_all(&log).map_err(|e| StorageError::io("delete", &log, e))?;
        }
        fs::create_dir(&log).map_err(|e| StorageError::io("create", &log, e))
    }

    /// Marks the directory as complete: from now on it belongs to this node, and has a copy of the
    /// placement.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub fn finish(&mut self) -> Result<(), StorageError> {
        let file = IdentityFile {
            format: FORMAT,
            cluster: self.identity.cluster.clone(),
            node: self.identity.node,
            protocol: self.protocol.into(),
            replacement: self.is_replacement,
        };
        let path = self.path.join("identity.toml");
        let text = toml::to_string(&file).map_err(|error| StorageError::Io {
            action: "write",
            path: path.clone(),
            source: std::io::Error::other(error),
        })?;
        replace(&path, &text)?;
        remove(&self.path.join(MARK))?;
        sync_dir(&self.log())?;
        sync_dir(&self.path)?;
        if let Some(parent) = self.path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            sync_dir(parent)?;
        }
        (self.is_new, self.has_placement) = (false, true);
        Ok(())
    }
}

/// The contents of a small file; none if it does not exist. `why` says what it is if it is not text.
pub(super) fn read_text(path: &Path, why: &'static str) -> Result<Option<String>, StorageError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) if error.kind() == ErrorKind::InvalidData => {
            Err(StorageError::Corrupt { path: path.to_owned(), offset: 0, why })
        }
        Err(error) => Err(StorageError::io("read", path, error)),
    }
}

/// Replaces the contents of a small file, durably, and never by a part of the new contents.
pub(super) fn replace(path: &Path, text: &str) -> Result<(), StorageError> {
    let draft = path.with_added_extension("tmp");
    File::create(&draft)
        .and_then(|mut file| file.write_all(text.as_bytes()).and_then(|()| file.sync_all()))
        .and_then(|()| fs::rename(&draft, path))
        .map_err(|e| StorageError::io("write", path, e))?;
    path.parent().map_or(Ok(()), sync_dir)
}

/// Removes a file if it exists.
fn remove(file: &Path) -> Result<(), StorageError> {
    match fs::remove_file(file) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(StorageError::io("delete", file, error))
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Refuses a directory with files none of which are ours: it is probably used for something else.
fn refuse_foreign(path: &Path) -> Result<(), StorageError> {
    let entries = match fs::read_dir(path) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(StorageError::io("list", path, error)),
    };
    let mut is_empty = true;
    for entry in entries {
        let name = entry.map_err(|e| StorageError::io("list", path, e))?.file_name();
        if name == "LOCK" || name == "identity.toml" || name == MARK {
            return Ok(());
        }
        is_empty = false;
    }
    if is_empty { Ok(()) } else { Err(StorageError::NotOurs { path: path.to_owned() }) }
}

fn lock(path: &Path) -> Result<File, StorageError> {
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
        .map_err(|e| StorageError::io("open", path, e))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut holder = String::new();
            // The holder's name only improves the message, so a failure to read it is ignored.
            let _ = file.read_to_string(&mut holder);
            return Err(StorageError::Locked {
                path: path.to_owned(),
                holder: holder.trim().into(),
            });
        }
        Err(TryLockError::Error(error)) => return Err(StorageError::io("lock", path, error)),
    }
    let text = format!("process {}\n", std::process::id());
    file.set_len(0)
        .and_then(|()| file.write_all_at(text.as_bytes(), 0))
        .map_err(|e| StorageError::io("write", path, e))?;
    Ok(file)
}

/// Returns the format of the directory.
fn check_identity(
    path: &Path,
    text: &str,
    me: &Identity,
    protocol: &str,
) -> Result<IdentityFile, StorageError> {
    let corrupt = |why| StorageError::Corrupt { path: path.to_owned(), offset: 0, why };
    let file: IdentityFile = toml::from_str(text).map_err(|_| corrupt(NOT_AN_IDENTITY))?;
    if ![WITHOUT_PLACEMENT, FORMAT].contains(&file.format) {
        let path = path.to_owned();
        return Err(StorageError::Format { path, found: file.format, known: FORMAT });
    }
    if file.cluster != me.cluster || file.node != me.node {
        return Err(StorageError::WrongIdentity {
            path: path.to_owned(),
            found: format!("{} of cluster {:?}", file.node, file.cluster),
            expected: me.to_string(),
        });
    }
    if file.protocol != protocol {
        return Err(StorageError::WrongProtocol {
            path: path.to_owned(),
            found: file.protocol,
            expected: protocol.into(),
        });
    }
    Ok(file)
}

/// Numbers that must never decrease. They are kept outside of the log because they belong to the
/// process and not to the protocol.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Values {
    /// Number of starts of this node.
    pub incarnation: u64,
    /// No client id at or above this one was assigned.
    pub clients: u64,
    /// The latest stored reading of this node's clock.
    pub clock: Timestamp,
    /// A position up to which the log is known to be durable.
    pub durable: Position,
}

/// The file of [`Values`]: two copies, written one after the other. A crash or a fault damages at
/// most one copy. The other one holds the same values, or the previous ones if nothing has relied
/// on the new ones yet.
#[derive(Debug)]
pub struct Ceilings {
    file: File,
    path: PathBuf,
    identity: Identity,
    values: Values,
    sync: bool,
}

const CEILINGS_MAGIC: &[u8; 8] = b"ORTHOCEL";
const SLOT: usize = 256;
/// The offsets of the copies, far enough apart that no sector and no page holds both.
const SLOTS: [u64; 2] = [0, 8192];

impl Ceilings {
    /// Makes the file, with all values zero.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn create(path: &Path, identity: &Identity, sync: bool) -> Result<Self, StorageError> {
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path);
        let file = file.map_err(|e| StorageError::io("create", path, e))?;
        let (path, identity) = (path.to_owned(), identity.clone());
        let mut ceilings = Self { file, path, identity, values: Values::default(), sync };
        ceilings.write(Values::default())?;
        Ok(ceilings)
    }

    /// Opens the file.
    ///
    /// # Errors
    /// It is missing, belongs to another node, or both copies are damaged.
    pub fn open(path: &Path, identity: &Identity, sync: bool) -> Result<Self, StorageError> {
        let file = match OpenOptions::new().read(true).write(true).open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(StorageError::Missing { path: path.to_owned() });
            }
            Err(error) => return Err(StorageError::io("open", path, error)),
        };
        let mut best: Option<Values> = None;
        for slot in SLOTS {
            if let Some(values) = read_slot(path, &file, slot, identity)? {
                // Values only increase, so the larger value of the two copies is the later one.
                best = Some(best.map_or(values, |best| Values {
                    incarnation: best.incarnation.max(values.incarnation),
                    clients: best.clients.max(values.clients),
                    clock: best.clock.max(values.clock),
                    durable: best.durable.max(values.durable),
                }));
            }
        }
        let Some(values) = best else {
            let why = "both copies are damaged";
            return Err(StorageError::Corrupt { path: path.to_owned(), offset: 0, why });
        };
        Ok(Self { file, path: path.to_owned(), identity: identity.clone(), values, sync })
    }

    /// The current values.
    #[must_use]
    pub fn values(&self) -> Values {
        self.values
    }

    /// Replaces the values; durable when it returns.
    ///
    /// # Errors
    /// Writing or syncing failed: fatal, as for the log.
    pub fn write(&mut self, values: Values) -> Result<(), StorageError> {
        let mut slot = Vec::with_capacity(SLOT);
        slot.put_slice(CEILINGS_MAGIC);
        slot.put_u16_le(CEILINGS_FORMAT);
        slot.put_u8(self.identity.cluster.len() as u8);
        slot.put_u32_le(self.identity.node.0);
        slot.put_slice(self.identity.cluster.as_bytes());
        slot.resize(128, 0);
        slot.put_u64_le(values.incarnation);
        slot.put_u64_le(values.clients);
        slot.put_u64_le(values.clock.0);
        slot.put_u64_le(values.durable.segment);
        slot.put_u64_le(values.durable.offset);
        slot.resize(SLOT - 4, 0);
        let crc = crc32c::crc32c(&slot);
        slot.put_u32_le(crc);
        for offset in SLOTS {
            self.file
                .write_all_at(&slot, offset)
                .and_then(|()| if self.sync { self.file.sync_data() } else { Ok(()) })
                .map_err(|e| StorageError::io("write and sync", &self.path, e))?;
        }
        self.values = values;
        Ok(())
    }
}

/// Reads one copy; none if it is damaged.
fn read_slot(
    path: &Path,
    file: &File,
    offset: u64,
    me: &Identity,
) -> Result<Option<Values>, StorageError> {
    let mut bytes = [0; SLOT];
    match file.read_exact_at(&mut bytes, offset) {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(StorageError::io("read", path, error)),
    }
    let (covered, mut crc) = bytes.split_at(SLOT - 4);
    if crc.get_u32_le() != crc32c::crc32c(covered) || !covered.starts_with(CEILINGS_MAGIC) {
        return Ok(None);
    }
    let (mut head, mut values) = covered.split_at(128);
    head.advance(8);
    let format = head.get_u16_le();
    if format != CEILINGS_FORMAT {
        return Err(StorageError::Format {
            path: path.to_owned(),
            found: format,
            known: CEILINGS_FORMAT,
        });
    }
    let length = usize::from(head.get_u8());
    let node = NodeId(head.get_u32_le());
    let cluster = head.get(..length).unwrap_or_default();
    if cluster != me.cluster.as_bytes() || node != me.node {
        return Err(StorageError::WrongIdentity {
            path: path.to_owned(),
            found: format!("{node} of cluster {:?}", String::from_utf8_lossy(cluster)),
            expected: me.to_string(),
        });
    }
    Ok(Some(Values {
        incarnation: values.get_u64_le(),
        clients: values.get_u64_le(),
        clock: Timestamp(values.get_u64_le()),
        durable: Position { segment: values.get_u64_le(), offset: values.get_u64_le() },
    }))
}
