//! The Rust client of Orthodrome, a geo-distributed transactional key-value store.
//!
//! ```no_run
//! use orthodrome_client::{Client, Config, Outcome, Writes};
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! // The nearest gateway first; the others are used when it cannot be reached.
//! let client = Client::connect(Config::new(["localhost:7400", "localhost:7401"])).await?;
//!
//! let outcome = client
//!     .transaction()
//!     .read("stock/tea")
//!     .write("stock/tea")
//!     .run(|reads| {
//!         let left: u32 = reads.text("stock/tea").unwrap_or("0").parse()?;
//!         Ok(Writes::new().put("stock/tea", left.saturating_sub(1).to_string()))
//!     })
//!     .await?;
//! match outcome {
//!     Outcome::Committed(committed) => println!("sold at {}", committed.timestamp),
//!     Outcome::Aborted(aborted) => println!("not sold: {}", aborted.reason),
//!     Outcome::Unknown(doubt) => println!("cannot tell yet: {}", doubt.trouble()),
//! }
//! # Ok(())
//! # }
//! ```
//!
//! **An outcome has three cases.** *Committed* is durable. *Aborted* had no effect. *Unknown* may
//! be either, and [`InDoubt::resolve`] asks again, as often as you like. The library asks every
//! gateway by itself until the deadline, so you see *unknown* only if none knew the outcome in
//! time.
//!
//! **An [`Error`] means that nothing was committed,** and that nothing will be.
//!
//! **Transactions declare their keys, if they can.** [`Client::transaction`] reads its read keys in
//! one round, computes in a closure, and writes some of its write keys in a second round.
//! [`Client::execute`] runs guarded operations in one call. [`Client::read`] reads one consistent
//! snapshot, and [`Client::scan`] one of all keys of a range. If a transaction finds its keys by reading, [`Client::general`] runs a closure that
//! reads step by step, and each step costs a round.
//!
//! **Cancellation** is dropping the future: an undecided transaction is aborted in the background.

#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a client lives by real deadlines"
)]

mod attempt;
mod client;
mod config;
mod error;
mod gateway;
mod general;
mod lease;
mod names;
mod orders;
mod outcome;
mod pace;
mod scan;
mod status;
mod txn;
mod values;
mod watch;
mod wire;

pub use attempt::Attempt;
pub use client::{
    Client, ClusterInfo, Execute, KeyspaceInfo, NodeInfo, PartitionInfo, Query, RegionInfo,
    Snapshot,
};
pub use config::{Config, Tls};
pub use error::Error;
pub use general::{General, GeneralTxn, OpenGeneral};
pub use lease::{KeptLease, LeaseInfo};
pub use orthodrome_core::lease::LeaseId;
pub use orthodrome_core::scan::KeyRange;
pub use outcome::{AbortReason, Aborted, Committed, InDoubt, Outcome};
pub use scan::{Page, Row, Scan};
pub use status::{Gauge, Link, MembershipOrder, OrderState, StatusInfo};
pub use txn::{Abort, Begun, OpenTransaction, Transaction};
pub use values::{Reads, Writes};
pub use watch::{Changes, Watch};

pub use orthodrome_core::procedure::{Call, Procedure};
pub use orthodrome_core::txn::{Key, Op, Priority, Value, Version};
pub use orthodrome_core::watch::Change;
pub use orthodrome_core::{ClientId, Timestamp, TxnId};
