//! The transaction protocols of Orthodrome, each a folder of pure state machines, and the
//! replication that they embed: a log, or inconsistent replication. [`registry`] lists them.

#![deny(clippy::float_arithmetic)]

mod acknowledged;
pub mod carousel;
mod checkpoint;
pub mod commit;
mod delays;
pub mod deterministic;
pub mod functor;
pub mod gateway;
pub mod geodesic;
pub mod hosting;
pub mod ir;
mod mutation;
pub mod natto;
pub mod ocean_vista;
mod portions;
pub mod registry;
pub mod replication;
pub mod routes;
mod sizes;
pub mod tapir;
pub mod two_phase_locking;
mod waiting;

pub use portions::Portion;
