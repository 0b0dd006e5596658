//! One process of a cluster: a server machine and a gateway machine, with their storage, transport
//! and clocks.
//!
//! [`start()`] recovers the node's data, starts its threads and returns a [`NodeHandle`]. An internal
//! failure (of the disk, of the clock, or an inconsistent machine) ends the whole node at once and
//! is reported by [`NodeHandle::failed`], because half a node could serve no client.

mod callers;
mod clock;
mod driver;
// Unit tests run no nodes; with this module, every protocol would be compiled once more for them.
#[cfg(not(test))]
pub mod embedded;
mod handle;
#[cfg(not(test))]
pub mod run;
mod shared;
mod start;
mod turns;
mod workers;

use std::num::NonZero;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicI64;
use std::time::Duration;

use orthodrome_core::{Cluster, NodeId};

pub use self::clock::ClockError;
pub use self::handle::{MachineStatus, NodeHandle, Status};
use self::shared::Shared;
pub use self::start::start;
use crate::storage::{Expected, StorageError};
use crate::tls::Tls;

/// The durability of a node's data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Durability {
    /// Acknowledged data survives a power failure.
    Sync,
    /// Acknowledged data survives the death of the process, but not of the machine.
    NoSync,
    /// Data does not survive: for benchmarks.
    None,
}

/// The address of a process of the cluster.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Endpoint {
    /// Its server machine; also the id of the process.
    pub node: NodeId,
    /// Its gateway machine.
    pub gateway: NodeId,
    /// `host:port` for other nodes.
    pub address: String,
}

/// The settings of a node.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The cluster's id.
    pub cluster: String,
    /// The placement, equal at every node.
    pub map: Arc<Cluster>,
    /// This process, one of `endpoints`.
    pub node: NodeId,
    /// Every process of the cluster, this one included.
    pub endpoints: Vec<Endpoint>,
    /// Its data directory. Not used without durability.
    pub data_dir: PathBuf,
    /// The expected contents of the directory.
    pub expected: Expected,
    /// The durability of a node's data.
    pub durability: Durability,
    /// Whether to check every page of the state engine at the start.
    pub verify_state: bool,
    /// TLS; none for plain TCP, on loopback only.
    pub tls: Option<Tls>,
    /// Whether messages to other processes are delayed by the topology's one-way delays.
    pub emulate_wan: bool,
    /// The maximum error of the system clock.
    pub clock_error: Duration,
    /// True if all nodes run on this machine and share one clock. Then nodes of other machines are
    /// refused.
    pub shared_clock: bool,
    /// An offset added to the system clock, in nanoseconds; for tests of clock faults within one
    /// process.
    pub clock_skew: Arc<AtomicI64>,
    /// Maximum number of transactions in flight at this gateway.
    pub in_flight_max: usize,
    /// Maximum number of bytes of their requests.
    pub bytes_in_flight_max: usize,
    /// Number of threads for independent work; none: one for each processor.
    pub workers: Option<NonZero<usize>>,
    /// Maximum number of queued bytes for each other process.
    pub queue_bytes_max: usize,
}

/// Why a node cannot start. It has served no request.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The settings are inconsistent.
    #[error("{0}")]
    Settings(String),
    /// Its data cannot be used.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// The clock is behind a reading that this node has already used.
    #[error(
        "the system clock is {behind_ms} ms behind the newest time this node has used, more than \
         `clock_error_ms` allows; correct the clock, then start the node again"
    )]
    ClockBehind {
        /// By how much, in milliseconds.
        behind_ms: u64,
    },
    /// The clock was moved while the node was starting.
    #[error(transparent)]
    Clock(#[from] ClockError),
    /// An operation of the operating system failed.
    #[error("cannot start a thread: {0}")]
    Io(#[from] std::io::Error),
}

#[cfg(test)]
mod tests;
