//! Every protocol in the simulator. Golden traces are as recorded, and limits on bytes hold. Under
//! the swarm, seeds with faults hold every promise, the same seed twice gives the same run, and
//! unsafe variants are caught. `ORTHODROME_SEEDS` says how many seeds a protocol gets (about 200);
//! the command `orthodrome swarm` runs as many as one likes.
//!
//! They are one program, because a simulation of each protocol takes long to compile.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may stop at the first surprise")]

mod carousel;
mod carousel_fast;
mod checks;
mod deterministic;
mod every;
mod geodesic;
mod geodesic_early;
mod geodesic_members;
mod golden;
mod limits;
mod members;
mod natto;
mod ocean_vista;
mod scans;
mod sessions;
mod support;
mod tapir;
mod two_phase_locking;

/// That of the program: a tenth of a simulation is allocating.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;
