//! A planet in one thread: any protocol's machines under simulated time, network, disks, clocks,
//! CPUs, clients and faults. One seed, one run, byte for byte.
//!
//! This crate is generic over the protocol and can name none. Reading order: [`simulation`], then
//! the models [`network`], [`disk`], [`clock`], [`cpu`] and [`load`], then [`fault`]. What the
//! models leave out is said in `docs/simulator.md`.

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
