//! Mutations of Natto (ADR 35). `docs/pitfalls.md` explains their codes.

use super::{CP, Config, RECSF};
use crate::mutation::{compiled, mutations};

mutations! {
    /// N1: a late transaction waits for conflicting later ones.
    late_waits_for_later: "N1";
    /// N2: a lock is free though an earlier transaction waits for it.
    waiters_are_bypassed: "N2";
    /// N3: conditions hold if nobody says otherwise.
    conditions_are_trusted: "N3";
    /// N4: a priority abort is in the leader's memory alone.
    refusals_are_volatile: "N4";
    /// N5, N8: what was computed from provisional reads is committed, whatever was prepared.
    provisional_reads_count: "N5", "N8";
    /// N8: reads are forwarded when a transaction arrives, though others may yet come before it.
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
