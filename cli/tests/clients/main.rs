//! The commands that are clients of a cluster, against the real client service in front of a small
//! serial store. They are one program because the service is compiled into it for this store.

#![allow(
    clippy::disallowed_types,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    missing_docs,
    reason = "tests of real sockets and processes; an unmet expectation is a failed test"
)]

// The test gateways of the client library, of which only a part is used here.
#[allow(dead_code)]
#[path = "../../../client/tests/gateways/mod.rs"]
mod gateways;
#[path = "../processes/mod.rs"]
mod processes;

mod load;
mod shell;
