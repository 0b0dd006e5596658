//! The proxy and agents over private PostgreSQL and MariaDB servers, with real clients. The tests
//! share the servers, and run one at a time.

#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    missing_docs,
    reason = "tests of real processes, which may fail loudly"
)]

mod by_key;
mod catalogue;
mod clients;
mod deadlocks;
mod errors;
mod extended;
mod gather;
mod keys;
mod kills;
mod lists;
mod near;
mod numbers;
mod rig;
mod savepoints;
mod schemas;
mod sessions;
mod skew;
mod steps;
mod tools;
mod values;
mod wires;
