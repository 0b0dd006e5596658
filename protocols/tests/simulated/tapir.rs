//! TAPIR. `ORTHODROME_FIRST_SEED` says where its seeds begin (0).

use orthodrome_protocols::tapir::NAME;

use super::support::{expect, from_environment, hold_every_promise, seeds};

#[test]
fn seeds_with_faults_hold_every_promise() {
    let first = from_environment("ORTHODROME_FIRST_SEED").unwrap_or(0);
    let notes = hold_every_promise(NAME, first..first + seeds(200), 4);
    let expected = ["Takeover", "ViewChange", "LaterRound", "Tombstone", "Promised", "CommitWait"];
    expect(&notes, &expected);
}

/// Links that deliver messages twice made two reads of one answer that a replica could not serve,
/// and the same replica was asked each time: a storm that never ended.
#[test]
fn repeated_refusals_of_a_replica_cause_one_read() {
    for seed in [31_000_011, 31_000_096] {
        hold_every_promise(NAME, seed..seed + 1, 1);
    }
}
