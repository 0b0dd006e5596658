//! What survives a crash: one log for everything a node persists, synced once for many records, and
//! a state engine that checkpoints are merged into.
//!
//! [`Storage::open`] takes the data directory and recovers; `Storage::run` is the loop of the one
//! thread that writes. A write that fails is never tried again: what is on disk is then unknown, so
//! the thread reports why and ends, and the node stops. Starting again recovers what is there.

pub mod directory;
pub mod engine;
pub mod log;
mod writer;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use orthodrome_core::NodeId;

pub use writer::{Recovered, Report, Settings, Storage, Tag, Work, Writer};

/// Whose data this is. In the header of every file.
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

/// What is expected of a data directory when a node starts.
///
/// A node that has lost its data has forgotten what it promised to others: votes, entries that count as
/// durable because it holds them. If it starts as if it were new, what was committed can be lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Expected {
    /// It holds the node's data, or was made for a node of a new cluster ([`directory::Directory::mark_new`]).
    Data,
    /// It is empty: the node has never been part of its cluster.
    NewCluster,
    /// It is empty: the node has lost its data, and takes its old place without it.
    Replacement,
    /// Whatever it holds is right. For clusters that live and end with one process.
    Either,
}

/// Why a node's data cannot be opened or written. Each message says what to do.
#[derive(Debug, thiserror::Error)]
pub enum StorageError {
    /// The operating system refused.
    #[error("cannot {action} {}: {source}; check the disk, its free space and the permissions, then start the node again", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
    /// An earlier write failed, so nothing more is written.
    #[error("an earlier write to the log failed; start the node again to recover what is on disk")]
    Broken,
    /// Bytes that no crash can have left.
    #[error("{} is damaged at offset {offset}: {why}; restore this node's data directory from a good copy, or replace the node (`serve --replace`)", path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// Where in it.
        offset: u64,
        /// What is wrong there.
        why: &'static str,
    },
    /// A file that must be there is not.
    #[error("{} is missing; restore this node's data directory from a good copy, or replace the node (`serve --replace`)", path.display())]
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
    /// The data directory holds something else.
    #[error("{} is not empty and holds no data of Orthodrome; give `data_dir` an empty or a new directory", path.display())]
    NotOurs {
        /// The directory.
        path: PathBuf,
    },
    /// There should be data, and there is none.
    #[error(
        "{} holds no data of {node}. If `data_dir` is wrong, correct it. If the data is lost, restore it or see \
         `serve --replace`. If the cluster is new and {node} has never run, start it once with `--new-cluster`",
        path.display()
    )]
    Empty {
        /// The directory.
        path: PathBuf,
        /// Whose data it should hold.
        node: NodeId,
    },
    /// There should be no data, and there is.
    #[error(
        "{} holds data of {node} already; start it without `--new-cluster` and `--replace`, or move \
         the data away if you do not need it",
        path.display()
    )]
    NotEmpty {
        /// The directory.
        path: PathBuf,
        /// Whose data it should not hold.
        node: NodeId,
    },
    /// Another process uses the data directory.
    #[error("{} is in use by another process ({holder}); stop it, or use another `data_dir` for this node", path.display())]
    Locked {
        /// The lock file.
        path: PathBuf,
        /// What the lock file says.
        holder: String,
    },
    /// Another node's data.
    #[error("{} holds data of {found}, but this is {expected}; check `cluster`, `node` and `data_dir`", path.display())]
    WrongIdentity {
        /// The file.
        path: PathBuf,
        /// Whose it is.
        found: String,
        /// Who asks.
        expected: String,
    },
    /// Another protocol's data.
    #[error("{}: protocol {found:?} wrote this data, but `protocol` is {expected:?}; set `protocol` back, or use a new `data_dir`", path.display())]
    WrongProtocol {
        /// The file.
        path: PathBuf,
        /// Who wrote it.
        found: String,
        /// Who asks.
        expected: String,
    },
    /// A format this version does not know.
    #[error("{} has format {found}, and this version reads {known}; use the version that wrote it", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// Its format.
        found: u16,
        /// What is known.
        known: u16,
    },
    /// A record over the bound.
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
        /// Whose log.
        node: NodeId,
        /// What is wrong.
        why: String,
    },
    /// A cluster id of the wrong form.
    #[error(
        "cluster id {0:?} must be 1 to 63 lower-case letters, digits or hyphens, no hyphen first or last"
    )]
    ClusterId(String),
    /// The state engine refused.
    #[error("cannot {action} the state engine {}: {source}; check the disk, or restore this node's data directory from a good copy", path.display())]
    Engine {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// What the engine said.
        source: Box<redb::Error>,
    },
    /// The state engine is older than the log that builds on it.
    #[error("the state engine {} is at checkpoint {engine}, but the log begins at checkpoint {log}; restore both from one copy of the data directory", path.display())]
    EngineBehind {
        /// The engine's file.
        path: PathBuf,
        /// Its last checkpoint.
        engine: u64,
        /// The log's.
        log: u64,
    },
}

impl StorageError {
    fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { action, path: path.to_owned(), source }
    }

    fn engine(action: &'static str, path: &Path, source: redb::Error) -> Self {
        Self::Engine { action, path: path.to_owned(), source: Box::new(source) }
    }
}

/// Says why on standard error and in the log, then stops the process at once: for faults after
/// which nothing this process does can be trusted.
pub(crate) fn fatal(why: &str) -> ! {
    tracing::error!("{why}");
    eprintln!("orthodrome: {why}");
    std::process::abort()
}

#[cfg(test)]
mod tests;
