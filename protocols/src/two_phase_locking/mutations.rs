//! Mutations of two-phase locking (ADR 35). `docs/pitfalls.md` explains their codes.

use super::Config;
use crate::mutation::{compiled, mutations};

mutations! {
    /// T4: participants that are only read are not asked to prepare.
    skips_readers: "T4";
    /// T4: a transaction that waits for nothing is assumed to hold everything, although another
    /// leader may have granted the locks of its earlier rounds.
    trusts_rounds: "T4-rounds";
    /// T5: prepared transactions are wounded like others.
    wounds_prepared: "T5";
    /// T5: locks are released when a commit is proposed, not when it is applied.
    releases_early: "T5-early";
    /// R3: a prepare does not check whether the values read are still the newest.
    no_version_check: "R3";
    /// C12: read-only transactions are served without a lease, and a leader that receives no answer
    /// of a quorum continues to lead.
    no_lease: "C12";
    /// C13: read-only transactions do not wait for prepared writers.
    reads_do_not_wait: "C13";
}

/// Names of the mutations of a variant.
pub(super) fn names(_: &str) -> &'static [&'static str] {
    compiled(&["T4", "T4-rounds", "T5", "T5-early", "R3", "C12", "C13"])
}

/// Enables a mutation by its name.
pub(super) fn enable(config: &mut Config, name: &str) {
    config.mutations.enable(name);
    if config.mutations.no_lease() {
        config.hosting.replication.mutations.enable("lead_without_quorum");
    }
}
