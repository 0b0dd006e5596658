//! A whole cluster in one thread: any protocol's machines under simulated time, network, disks,
//! clocks, CPUs, clients and faults. One seed gives one run, byte for byte.
//!
//! This crate is generic over the protocol and cannot name any. Reading order: [`simulation`], then
//! the models [`network`], [`disk`], [`clock`], [`cpu`] and [`load`], then [`fault`].
//! `docs/simulator.md` says what the models leave out.

pub mod clock;
pub mod cpu;
pub mod disk;
pub mod fault;
pub mod floor;
#[cfg(feature = "golden")]
pub mod golden;
pub mod load;
pub mod network;
pub mod oracle;
pub mod orders;
pub mod promise;
pub mod queue;
pub mod shrink;
pub mod simulation;
pub mod swarm;
pub mod traffic;
mod unusual;
pub mod watch;

pub use fault::{Fault, Schedule, ScheduleError};
pub use simulation::{Failure, FailureKind, Options, Report, Simulation};
