//! The replication core under golden scripts and under random faults.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::wildcard_enum_match_arm,
    missing_docs,
    reason = "tests: a failed assumption should stop the test where it is made"
)]

mod golden;
mod late;
mod node;
mod random;
mod world;
