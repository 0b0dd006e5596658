//! The protocols whose machines this crate runs: those whose messages and records have bytes.
//!
//! The bytes follow from the definitions of the types: see [`orthodrome_core::wire`].

use orthodrome_core::{Protocol, Wire};

/// A protocol whose messages and records have bytes.
pub trait WireProtocol: Protocol<Msg: Wire, Record: Wire> {}

impl<P: Protocol<Msg: Wire, Record: Wire>> WireProtocol for P {}
