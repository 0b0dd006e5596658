//! Durable storage: one log for all records of a node, in which many records share a sync, and a
//! state engine into which checkpoints are merged.
//!
//! [`Storage::open`] locks the data directory and recovers its contents. `Storage::run` is the loop
//! of the only thread that writes. A failed write is never repeated, because the contents of the
//! disk are then unknown: the thread reports the cause and ends, and the node stops. The next start
//! recovers the data.

pub mod directory;
pub mod engine;
pub mod log;
mod placement;
mod writer;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use orthodrome_core::NodeId;

pub use placement::{Founders, Placement};
pub use writer::{Recovered, Report, Settings, Storage, Tag, Work, Writer};
pub(crate) use writer::{draw_client, first_client};

/// What to do about lost data. A copy that was made earlier lacks what the node has acknowledged since,
/// and other nodes cannot tell.
const RESTORE: &str = "restore a copy of this node's data directory that was made after the node last \
                       ran; an older copy loses acknowledged commits";

/// The owner of the data. It is in the header of every file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Identity {
    /// The cluster's id: 1 to 63 lower-case letters, digits and hyphens.
    pub cluster: String,
    /// The node's server side.
    pub node: NodeId,
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of cluster {:?}", self.node, self.cluster)
    }
}

impl Identity {
    /// # Errors
    /// The cluster's id has another form than it must.
    pub fn check(&self) -> Result<(), StorageError> {
        let is_plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
        let id = &self.cluster;
        let is_valid = (1..=63).contains(&id.len())
            && id.bytes().all(is_plain)
            && !id.starts_with('-')
            && !id.ends_with('-');
        if is_valid { Ok(()) } else { Err(StorageError::ClusterId(id.clone())) }
    }
}

/// The expected contents of a data directory when a node starts.
///
/// A node that has lost its data has forgotten its promises to other nodes: votes, and entries that
/// count as durable because it holds them. If it started as a new node, committed data could be
/// lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Expected {
    /// The directory holds the node's data, or was made for a node of a new cluster
    /// ([`directory::Directory::mark_new`]).
    Data,
    /// The directory is empty: the node has never been part of its cluster.
    NewCluster,
    /// The directory is empty: the node has lost its data, and takes its old place without it.
    Replacement,
    /// Any contents are accepted. For clusters that exist only within one process.
    Either,
}

/// Why a node's data cannot be opened or written. Each message says what to do.
#[derive(Debug, thiserror::Error)]
pub enum StorageError {
    /// An operation of the operating system failed.
    #[error("cannot {action} {}: {source}; check the disk, its free space and the permissions, then start the node again", path.display())]
    Io {
        /// The operation.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// An earlier write failed, so nothing more is written.
    #[error("an earlier write to the log failed; start the node again to recover what is on disk")]
    Broken,
    /// A file has contents that no crash can cause.
    #[error("{} is damaged at offset {offset}: {why}; {RESTORE}", path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// The offset in the file.
        offset: u64,
        /// The problem.
        why: &'static str,
    },
    /// A required file is missing.
    #[error("{} is missing; {RESTORE}", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// A file that does not belong in the log's directory.
    #[error("{} is not a file of the log; move it away", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
    },
    /// The directory holds files of another program.
    #[error("{} is not empty and holds no data of Orthodrome; give `data_dir` an empty or a new directory", path.display())]
    NotOurs {
        /// The directory.
        path: PathBuf,
    },
    /// The directory should hold data, and is empty.
    #[error(
        "{} holds no data of {node}. If `data_dir` is wrong, correct it. If the data is lost, {RESTORE}. \
         If the cluster is new and {node} has never run, start it once with `--new-cluster`",
        path.display()
    )]
    Empty {
        /// The directory.
        path: PathBuf,
        /// The node whose data it should hold.
        node: NodeId,
    },
    /// The directory should be empty, and holds data.
    #[error(
        "{} holds data of {node} already; start it without `--new-cluster` and `--replace`, or move \
         the data away if you do not need it",
        path.display()
    )]
    NotEmpty {
        /// The directory.
        path: PathBuf,
        /// The node whose data it holds.
        node: NodeId,
    },
    /// Another process uses the data directory.
    #[error("{} is in use by another process ({holder}); stop it, or use another `data_dir` for this node", path.display())]
    Locked {
        /// The lock file.
        path: PathBuf,
        /// The contents of the lock file.
        holder: String,
    },
    /// The data is another node's.
    #[error("{} holds data of {found}, but this is {expected}; check `cluster`, `node` and `data_dir`", path.display())]
    WrongIdentity {
        /// The file.
        path: PathBuf,
        /// The owner of the data.
        found: String,
        /// The node or protocol that opens it.
        expected: String,
    },
    /// The data is another protocol's.
    #[error("{}: protocol {found:?} wrote this data, but `protocol` is {expected:?}; set `protocol` back, or use a new `data_dir`", path.display())]
    WrongProtocol {
        /// The file.
        path: PathBuf,
        /// The protocol that wrote it.
        found: String,
        /// The node or protocol that opens it.
        expected: String,
    },
    /// The data was made with another placement of partitions.
    #[error("{}: this data was made with {found}, and the node's file says {expected}; {remedy}", path.display())]
    WrongPlacement {
        /// The file.
        path: PathBuf,
        /// What differs, of the data.
        found: String,
        /// What differs, of the node's file.
        expected: String,
        /// The remedy.
        remedy: &'static str,
    },
    /// The copy of the placement is missing.
    #[error(
        "{} is missing, and without it nobody knows on which servers this data belongs; put it back, from a backup \
         or from another node of the cluster, or replace the node's data as for a lost disk (`--replace` or \
         `change-members`)",
        path.display()
    )]
    NoPlacement {
        /// The file.
        path: PathBuf,
    },
    /// The format is unknown to this version.
    #[error("{} has format {found}, and this version reads {known}; use the version that wrote it", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// Its format.
        found: u16,
        /// The known format.
        known: u16,
    },
    /// A record is larger than the bound.
    #[error("a record of {bytes} bytes is over the limit of {limit}")]
    RecordTooLarge {
        /// Its size.
        bytes: usize,
        /// The bound.
        limit: usize,
    },
    /// A record that this version cannot read.
    #[error(
        "the log of {node} holds a record that this version cannot read: {why}; use the version that wrote it"
    )]
    Record {
        /// The owner of the log.
        node: NodeId,
        /// The problem.
        why: String,
    },
    /// A thread that writes panicked.
    #[error(
        "the thread {thread:?} failed, so nothing more becomes durable: {why}; start the node again, and \
         report this defect"
    )]
    Panic {
        /// Its name.
        thread: &'static str,
        /// The message of the panic.
        why: String,
    },
    /// A cluster id is malformed.
    #[error(
        "cluster id {0:?} must be 1 to 63 lower-case letters, digits or hyphens, no hyphen first or last"
    )]
    ClusterId(String),
    /// An operation of the state engine failed.
    #[error("cannot {action} the state engine {}: {source}; check the disk, its free space and the permissions, then start the node again", path.display())]
    Engine {
        /// The operation.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The error.
        source: Box<redb::Error>,
    },
    /// The state engine is older than the log that builds on it.
    #[error("the state engine {} is at checkpoint {engine}, but the log begins at checkpoint {log}; restore both from one copy of the data directory, made after the node last ran", path.display())]
    EngineBehind {
        /// The engine's file.
        path: PathBuf,
        /// Its last checkpoint.
        engine: u64,
        /// The log's last checkpoint.
        log: u64,
    },
}

impl StorageError {
    fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { action, path: path.to_owned(), source }
    }

    /// True if the node's data is lost, at least in part.
    #[must_use]
    pub fn is_loss(&self) -> bool {
        matches!(
            self,
            Self::Corrupt { .. } | Self::Missing { .. } | Self::Empty { .. } | Self::Engine { .. }
        )
    }

    fn engine(action: &'static str, path: &Path, source: redb::Error) -> Self {
        Self::Engine { action, path: path.to_owned(), source: Box::new(source) }
    }
}

/// Writes the reason to standard error and to the log, then stops the process at once. For faults
/// after which no action of this process can be trusted.
pub(crate) fn fatal(why: &str) -> ! {
    tracing::error!("{why}");
    eprintln!("orthodrome: {why}");
    std::process::abort()
}

#[cfg(test)]
mod tests;
