//! TAPIR. `ORTHODROME_FIRST_SEED` says where its seeds begin (0).

use orthodrome_protocols::tapir::NAME;

use super::support::{catch, expect, from_environment, hold_every_promise, seeds};

#[test]
fn seeds_with_faults_hold_every_promise() {
    let first = from_environment("ORTHODROME_FIRST_SEED").unwrap_or(0);
    let notes = hold_every_promise(NAME, first..first + seeds(200), 4);
    let expected = ["Takeover", "ViewChange", "LaterRound", "Tombstone", "Promised", "CommitWait"];
    expect(&notes, &expected);
}

/// Unsafe variants that random seeds catch, and within how many.
const CAUGHT_WITHIN: [(&str, u64); 3] = [("T2", 40), ("T3", 20), ("T1", 100)];

#[test]
fn unsafe_variants_are_caught() {
    for (mutation, within) in CAUGHT_WITHIN {
        catch(NAME, mutation, None, within);
    }
}
