//! Mutations of TAPIR (ADR 35). `docs/pitfalls.md` explains their codes.

use orthodrome_core::machine::NO_SESSIONS;

use super::Config;
use crate::mutation::{compiled, mutations};

mutations! {
    /// T1: commits are told at once.
    no_commit_wait: "T1";
    /// T2: a replica that restarts has lost its record, and takes part in view changes all the
    /// same.
    recovering_replicas_join: "T2";
    /// T3: whoever takes over aborts, without asking what the participants agreed on.
    takeover_aborts: "T3";
    /// R4: votes are sent before they are durable, and lost by a crash.
    votes_before_fsync: "R4";
}

/// Names of the mutations of a variant.
pub(super) fn names(_: &str) -> &'static [&'static str] {
    compiled(&["T1", "T2", "T3", "R4", "R11"])
}

/// Enables a mutation by its name.
pub(super) fn enable(config: &mut Config, name: &str) {
    // Callers bring that about, not this protocol.
    if name != NO_SESSIONS {
        config.mutations.enable(name);
    }
}
