//! Mutations of Ocean Vista (ADR 35). `docs/pitfalls.md` explains their codes.

use orthodrome_core::machine::NO_SESSIONS;

use super::Config;
use crate::mutation::{compiled, mutations};

mutations! {
    /// V1: a version with one FINALIZED replica counts as committed (Alg. 3).
    finalized_is_committed: "V1";
    /// V2: replicas show only the newest version, and readers search downwards from it (Alg. 3).
    newest_only: "V2";
    /// V4: a server that takes over drops transactions that cannot be written for a while.
    takeover_gives_up: "V4";
    /// V6: version numbers need no lease, and seen watermarks are ignored.
    no_lease: "V6";
    /// V9: a Write below the Vwatermark is stored, and counts.
    late_writes_count: "V9";
    /// V11: versions are garbage-collected by age.
    collect_by_age: "V11";
    /// R4: answers are sent before they are durable, and a crash loses what they say.
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
    // This mutation is in the callers, not in the protocol.
    if name != NO_SESSIONS {
        config.mutations.enable(name);
    }
}
