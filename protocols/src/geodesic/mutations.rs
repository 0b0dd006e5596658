//! Mutations of Geodesic (ADR 35). `docs/pitfalls.md` explains the codes of the rules that they drop.

use orthodrome_core::machine::NO_SESSIONS;

use super::Config;
use crate::mutation::{compiled, mutations};

mutations! {
    /// D1: what depends on a record is sent before the record is durable.
    sends_before_fsync: "D1";
    /// D2: a writer may get a stamp at or below a closing.
    closings_are_ignored: "D2";
    /// D5: h records a decision after it has promised a recovery ballot.
    record_after_promise: "D5";
    /// D6: a replica without a stamp promises without one.
    no_recovery_stamp: "D6";
    /// D6: recovery takes a recovery stamp for one of ballot 0.
    recovery_stamp_counts;
    /// D7: of accepted values the one of the lowest ballot wins.
    lowest_accepted: "D7";
    /// D8: recovery ignores what h may have recorded.
    second_is_ignored: "D8";
    /// D8: recovery ignores that all answers have the same stamp of ballot 0.
    equal_stamps_are_ignored;
    /// D8: recovery takes the stamp of y that does not know that of h for one that h may have recorded.
    direct_stamp_counts;
    /// D9: two equal stamps are enough.
    two_equal_stamps: "D9";
    /// D9: y acknowledges before it knows the stamp of h.
    direct_stamp_is_acknowledged;
    /// D9: y confirms its stamp without raising it to that of h.
    confirmed_as_it_is;
    /// D12: nobody waits for predecessors.
    no_predecessors: "D12";
    /// D12: one report is enough.
    one_report;
    /// D12: a partition that decided less than F is not closed again.
    no_second_closing;
    /// D16: what a predecessor will probably write counts as what it wrote.
    foretold_is_certain;
    /// D12: what a transaction writes is certain before F is.
    foretold_before_final;
    /// D13: writes are told at once.
    no_clock_wait: "D13";
    /// D14: a read-only transaction closes nothing.
    read_closes_nothing: "D14";
    /// D14: a scan waits for nobody who may create a key in its range.
    fences_stand_for_nothing;
    /// D19: a replica whose disk was lost takes part at once.
    replacement_takes_part;
    /// D19: it reads while transactions from before are pending.
    replacement_reads_early;
    /// D19: its peers give stamps to older transactions that they do not know.
    no_seal;
    /// D20: what has one partition is answered early, whatever is before it.
    early_always: "D20";
    /// D20: what was written is not closed to those who read it.
    written_is_open;
    /// D20: a read at a time before a write that was answered does not see it.
    missed_is_missed;
    /// D20: what only reads leaves no trace.
    reads_leave_no_trace;
    /// D17: a replica takes messages of an earlier epoch.
    epochs_are_ignored: "D17";
    /// D17: a new member copies before the others refuse messages of the epoch before.
    no_fence;
}

/// Names of the mutations of a variant.
pub(super) fn names(_: &str) -> &'static [&'static str] {
    compiled(&[
        "D1",
        "D2",
        "D5",
        "D6",
        "recovery_stamp_counts",
        "D7",
        "D8",
        "equal_stamps_are_ignored",
        "direct_stamp_counts",
        "D9",
        "direct_stamp_is_acknowledged",
        "confirmed_as_it_is",
        "D12",
        "one_report",
        "no_second_closing",
        "foretold_is_certain",
        "foretold_before_final",
        "D13",
        "D14",
        "fences_stand_for_nothing",
        "replacement_takes_part",
        "replacement_reads_early",
        "no_seal",
        "D20",
        "written_is_open",
        "missed_is_missed",
        "reads_leave_no_trace",
        "D17",
        "no_fence",
        "R11",
    ])
}

/// Enables a mutation by its name.
pub(super) fn enable(config: &mut Config, name: &str) {
    // Callers bring that about, not this protocol.
    if name != NO_SESSIONS {
        config.mutations.enable(name);
    }
}
