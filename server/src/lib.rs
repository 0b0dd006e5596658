//! The impure host: the machines of any protocol on sockets, files and clocks.
//!
//! Reading order: [`node`] (one process: a server machine and a gateway machine, each on its own
//! thread), [`gateway`] (how callers reach the gateway machine), [`transport`] (messages between
//! processes), [`storage`] (what survives a crash), [`wire`] (bytes of messages and records),
//! [`config`] (the file that describes a node), [`service`] (the API for clients of any language).

#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "this crate exists to touch clocks and threads, so that no other has to"
)]

pub mod gateway;
mod inbox;
pub mod service;
pub mod storage;
pub mod wire;
