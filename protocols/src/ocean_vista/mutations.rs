//! Mutations of Ocean Vista (ADR 35). `docs/pitfalls.md` explains their codes.

use orthodrome_core::machine::NO_SESSIONS;

use super::Config;
use crate::mutation::{compiled, mutations};

mutations! {
    /// V1: a version with one FINALIZED replica is taken for committed (Alg. 3).
    finalized_is_committed: "V1";
    /// V2: replicas show only the newest version, and readers go down from there (Alg. 3).
    newest_only: "V2";
    /// V4: whoever takes over gives up what cannot be written for a while.
    takeover_gives_up: "V4";
    /// V6: version numbers need no lease, and watermarks that were seen do not count.
    no_lease: "V6";
    /// V9: a Write below the Vwatermark is stored, and counts.
    late_writes_count: "V9";
    /// V11: versions are collected by age.
    collect_by_age: "V11";
    /// R4: answers are sent before what they say is durable, and lost by a crash.
    acks_before_fsync: "R4";
    /// The first server does not put every fourth transaction's values into its store.
    loses_writes;
}

/// Names of the mutations of a variant.
pub(super) fn names(_: &str) -> &'static [&'static str] {
    compiled(&["V1", "V2", "V4", "V6", "V9", "V11", "R4", "R11"])
}

/// Enables a mutation by its name.
pub(super) fn enable(config: &mut Config, name: &str) {
    // Callers bring that about, not this protocol.
    if name != NO_SESSIONS {
        config.mutations.enable(name);
    }
}
