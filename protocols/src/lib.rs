//! The transaction protocols of Orthodrome, each a folder of pure state machines, and the
//! replicated log that they embed. [`registry`] lists them.

#![deny(clippy::float_arithmetic)]

pub mod carousel;
mod hosting;
pub mod registry;
pub mod replication;
mod routes;
pub mod two_phase_locking;
