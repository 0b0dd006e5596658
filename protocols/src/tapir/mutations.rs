//! Mutations of TAPIR (ADR 35). `docs/pitfalls.md` explains their codes.

use orthodrome_core::machine::NO_SESSIONS;

use super::Config;
use crate::mutation::{compiled, mutations};

mutations! {
    /// T1: commits are acknowledged at once.
    no_commit_wait: "T1";
    /// T2: a replica that restarts has lost its record, but still takes part in view changes.
    recovering_replicas_join: "T2";
    /// T3: a node that takes over aborts without asking what the participants agreed on.
    takeover_aborts: "T3";
    /// R4: votes are sent before they are durable, and a crash loses them.
    votes_before_fsync: "R4";
}

/// Names of the mutations of a variant.
pub(super) fn names(_: &str) -> &'static [&'static str] {
    compiled(&["T1", "T2", "T3", "R4", "R11"])
}

/// Enables a mutation by its name.
pub(super) fn enable(config: &mut Config, name: &str) {
    // The mutation is in the clients, not in this protocol.
    if name != NO_SESSIONS {
        config.mutations.enable(name);
    }
}
