//! The argument for the protocol `geodesic`, checked by a program.
//!
//! Each module is one model in the sense of [`stateright`]: states, steps, and properties of every
//! reachable state. `docs/protocols/geodesic.md` explains the protocol and has the table of
//! configurations. The crate is for developers; the program `orthodrome` does not contain it.

// Model states are small arrays that replicas, partitions and transactions index; all indices come
// from loops over these arrays. A wrong one panics, which stops the check.
#![allow(clippy::indexing_slicing)]
// The checker's time is measured and printed.
#![allow(clippy::disallowed_types)]
// A mutation is compared by `==` or matched alone among many.
#![allow(clippy::wildcard_enum_match_arm)]

pub mod alone;
pub mod catalogue;
pub mod mutation;
pub mod order;
pub mod priority;
pub mod reads;
pub mod run;
pub mod slot;
pub mod stamp;
pub mod values;
