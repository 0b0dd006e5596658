//! Mutations of Calvin, SLOG and Sloth (ADR 35). `docs/pitfalls.md` explains their codes.

use super::{CALVIN, Config, SLOG, SLOG_CONSENSUS};
use crate::mutation::{compiled, mutations};

mutations! {
    /// S1: the thesis's merge: no transaction is held, and no key is closed.
    is_unbounded: "S1";
    /// S2: a sequencer's server runs what it has proposed before it is chosen.
    merges_unchosen: "S2";
    /// S6: a home that sees a transaction in one stream and not in another does nothing.
    forwards_nothing: "S6";
    /// S7: a transaction that reads and writes a key waits for itself.
    waits_for_itself: "S7";
    /// S10: a transaction runs without a check whether its keys are where it assumes.
    runs_void: "S10";
    /// S11: the part for other shares is read when the transaction is known, not when those before
    /// it have run.
    reads_early: "S11";
    /// R6: a transaction that arrives twice runs twice.
    runs_repeated: "R6";
    /// The first server loses some of its writes: its data differs from the others.
    loses_writes;
}

/// Names of the mutations of a variant.
pub(super) fn names(variant: &str) -> &'static [&'static str] {
    compiled(match variant {
        CALVIN => &["S2", "S4", "S7", "S9", "S11", "R6"],
        SLOG | SLOG_CONSENSUS => &["S2", "S4", "S7", "S9", "S10", "S11", "R6"],
        _ => &["S1", "S2", "S4", "S6", "S7", "S9", "S10", "S11", "R6"],
    })
}

/// Enables a mutation by its name.
pub(super) fn enable(config: &mut Config, name: &str) {
    let replication = &mut config.hosting.replication.mutations;
    match name {
        "S4" => replication.enable("longest_log"),
        "S9" => replication.enable("ack_not_durable"),
        _ => config.mutations.enable(name),
    }
}
