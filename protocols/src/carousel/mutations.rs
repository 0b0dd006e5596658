//! Mutations of Carousel (ADR 35). `docs/pitfalls.md` explains their codes.

use orthodrome_core::machine::NO_SESSIONS;

use super::{Config, FAST};
use crate::mutation::{compiled, mutations};

mutations! {
    /// C1: recovery prepares again; versions are not compared; heartbeat aborts are not logged.
    recovery_prepares: "C1";
    /// C2: a supermajority's refusal is announced at once, and recovery prepares again.
    abort_told_at_once: "C2";
    /// C3: the same for a refusal by the leader alone.
    leader_abort_acts: "C3";
    /// C4: the replicated commit request lacks the versions read, so they cannot be compared by a
    /// node that decides from replicated data.
    versions_not_replicated: "C4";
    /// C5: votes of the fast path are sent before they are durable, and a restart forgets them.
    votes_volatile: "C5";
    /// C6: votes of different terms count together, and frozen ones are sent.
    terms_ignored: "C6";
    /// C8: lists keep transactions that ended here without a write. A new leader treats forgotten
    /// transactions as pending, whatever their timestamps, and does not ask for their outcomes.
    lists_keep_the_ended: "C8";
    /// C9: an abort of an unknown transaction is ignored.
    no_tombstones: "C9";
    /// C11: proposals only exceed the versions read, and commits do not wait.
    no_floor: "C11";
    /// C12: read-only transactions are served without a lease, even below the promises of an
    /// earlier leader; and a leader that receives no answer of a quorum continues to lead.
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
    // The mutation is in the clients, not in this protocol.
    if name != NO_SESSIONS {
        config.mutations.enable(name);
    }
    if config.mutations.no_lease() {
        config.hosting.replication.mutations.enable("lead_without_quorum");
    }
}
