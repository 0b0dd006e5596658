//! The foundation that all crates of Orthodrome share: ids, time, random numbers, transactions, the
//! placement of the cluster, and the contract between a protocol and its host.
//!
//! This crate is *pure*: it has no clock, no I/O, no threads and no global state. A protocol is a
//! pair of [`Machine`]s. A [`Host`] drives one machine. The simulator and the server each drive
//! hosts. Reading order: [`id`], [`time`], [`txn`], [`cluster`], [`machine`], [`host`], [`store`].

#![deny(clippy::float_arithmetic)]

// The code that `#[derive(Wire)]` generates names this crate.
extern crate self as orthodrome_core;

pub mod cluster;
pub mod digest;
mod filter;
pub mod host;
pub mod id;
mod key;
pub mod lease;
pub mod limits;
pub mod locks;
pub mod machine;
pub mod ordered;
pub mod procedure;
pub mod rng;
pub mod scan;
pub mod session;
pub mod spelling;
pub mod store;
pub mod time;
pub mod topology;
pub mod trace;
pub mod txn;
mod txn_map;
pub mod watch;
pub mod wire;
pub mod workers;

pub use cluster::Cluster;
pub use host::{Host, Output};
pub use id::{ClientId, Content, NodeId, PartitionId, RegionId, Ticket, TxnId};
pub use limits::Limits;
pub use machine::{Claim, Cx, Effect, Input, Machine, Message, Protocol, Setup};
pub use rng::Rng;
pub use time::{Clock, Duration, Time, Timestamp};
pub use txn::{Decision, Key, Outcome, Txn, Value};
pub use txn_map::TxnMap;
pub use wire::{Wire, WireError};
