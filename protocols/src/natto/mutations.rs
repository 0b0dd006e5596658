//! Mutations of Natto (ADR 35). `docs/pitfalls.md` explains their codes.

use super::{CP, Config, RECSF};
use crate::mutation::{compiled, mutations};

mutations! {
    /// N1: a late transaction waits for conflicting later ones.
    late_waits_for_later: "N1";
    /// N2: a lock counts as free although an earlier transaction waits for it.
    waiters_are_bypassed: "N2";
    /// N3: a condition counts as true if no participant contradicts it.
    conditions_are_trusted: "N3";
    /// N4: a priority abort is only in the leader's memory.
    refusals_are_volatile: "N4";
    /// N5, N8: the result of provisional reads is committed, whatever was prepared.
    provisional_reads_count: "N5", "N8";
    /// N8: reads are forwarded when a transaction arrives, although earlier ones may still arrive.
    forwards_on_arrival: "N8";
}

/// Names of the mutations of a variant.
pub(super) fn names(variant: &str) -> &'static [&'static str] {
    compiled(match variant {
        RECSF => &["N1", "N2", "N3", "N4", "N5", "N8"],
        CP => &["N1", "N2", "N3", "N4", "N5"],
        _ => &["N1", "N2"],
    })
}

/// Enables a mutation by its name.
pub(super) fn enable(config: &mut Config, name: &str) {
    config.mutations.enable(name);
}
