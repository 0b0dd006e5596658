//! Mutations of Carousel (ADR 35). `docs/pitfalls.md` explains their codes.

use orthodrome_core::machine::NO_SESSIONS;

use super::{Config, FAST};
use crate::mutation::{compiled, mutations};

mutations! {
    /// C1: recovery prepares afresh; versions are not compared; heartbeat aborts are not logged.
    recovery_prepares: "C1";
    /// C2: a supermajority's refusal is told at once, and recovery prepares afresh.
    abort_told_at_once: "C2";
    /// C3: so is a refusal of the leader alone.
    leader_abort_acts: "C3";
    /// C4: the read versions are not in the replicated commit request, so that whoever decides from
    /// what is replicated cannot compare them.
    versions_not_replicated: "C4";
    /// C5: votes of the fast path are sent before they are durable, and forgotten by a restart.
    votes_volatile: "C5";
    /// C6: votes of different terms count together, and frozen ones are sent.
    terms_ignored: "C6";
    /// C8: lists keep transactions that ended here without a write, a new leader takes those that were
    /// forgotten for pending, whatever their timestamps, and does not ask what became of them.
    lists_keep_the_ended: "C8";
    /// C9: an abort of an unknown transaction is ignored.
    no_tombstones: "C9";
    /// C11: proposals exceed only the versions read, and commits do not wait.
    no_floor: "C11";
    /// C12: read-only transactions are served without a lease, below whatever a predecessor
    /// promised; and a leader that hears no quorum goes on leading.
    no_lease: "C12";
}

/// Names of the mutations of a variant.
pub(super) fn names(variant: &str) -> &'static [&'static str] {
    compiled(if variant == FAST {
        &["C1", "C2", "C3", "C4", "C5", "C6", "C8", "C9", "C11", "C12", "R11"]
    } else {
        &["C1", "C4", "C9", "C11", "C12", "R11"]
    })
}

/// Enables a mutation by its name.
pub(super) fn enable(config: &mut Config, name: &str) {
    // Callers bring that about, not this protocol.
    if name != NO_SESSIONS {
        config.mutations.enable(name);
    }
    if config.mutations.no_lease() {
        config.hosting.replication.mutations.enable("lead_without_quorum");
    }
}
