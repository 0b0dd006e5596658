//! The host of machines in real processes: runs the machines of any protocol on sockets, files and
//! clocks.
//!
//! Reading order: [`node`] (one process: a server machine and a gateway machine), [`gateway`] (the
//! interface of the gateway machine), [`transport`] (messages between processes), [`storage`]
//! (durable data), [`wire`] (encoding of messages and records), [`config`] (the configuration file
//! of a node), [`service`] (the API for clients of any language), `redis` (the listener for clients
//! of Redis). The middleware has a crate of its own, which uses the storage, the queues and the sockets
//! of this one.

#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "this crate exists to touch clocks and threads, so that no other has to"
)]

pub mod audit;
mod backoff;
pub mod config;
pub mod gateway;
pub mod inbox;
mod kernel;
pub mod leases;
pub mod node;
mod own_txns;
pub mod plane;
mod redis;
pub mod scan;
pub mod service;
pub mod shared_clock;
pub mod socket;
pub mod storage;
pub mod tls;
pub mod transport;
pub mod wire;

/// A future. It is boxed so that what it runs is compiled once into this crate, and not again into each
/// program and test that calls it.
pub type Going<T> = std::pin::Pin<Box<dyn Future<Output = T> + Send>>;

/// The number of cases of property tests that decode arbitrary bytes: 256, or the value of the
/// environment variable `ORTHODROME_FUZZ_CASES`.
#[cfg(test)]
pub(crate) fn fuzz_config() -> proptest::test_runner::Config {
    let cases = std::env::var("ORTHODROME_FUZZ_CASES").ok().and_then(|text| text.parse().ok());
    proptest::test_runner::Config {
        cases: cases.unwrap_or(256),
        failure_persistence: None,
        ..proptest::test_runner::Config::default()
    }
}
