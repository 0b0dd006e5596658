//! Ocean Vista. `ORTHODROME_FIRST_SEED` says where its seeds begin (0).

use orthodrome_protocols::ocean_vista::NAME;
use orthodrome_sim::swarm::Temper;

use super::support::{catch, expect, from_environment, hold_every_promise, seeds};

#[test]
fn seeds_with_faults_hold_every_promise() {
    let first = from_environment("ORTHODROME_FIRST_SEED").unwrap_or(0);
    let notes = hold_every_promise(NAME, first..first + seeds(200), 4);
    let expected = [
        "Takeover",
        "Rewritten",
        "Straggler",
        "Adopted",
        "Inquired",
        "CaughtUp",
        "Shed",
        "AbortedStoring",
        "Collected",
        "LateWrite",
    ];
    expect(&notes, &expected);
}

/// Unsafe variants that random seeds catch, the temper of the seeds that is hardest on them, and
/// within how many. Tests of the reading rule show the others (`docs/protocols/ocean-vista.md`).
const CAUGHT_WITHIN: [(&str, Option<Temper>, u64); 5] = [
    ("V4", None, 50),
    ("V6", Some(Temper::Clocks), 50),
    ("V9", Some(Temper::Islands), 20),
    ("V11", Some(Temper::Mixed), 20),
    ("R4", None, 100),
];

#[test]
fn unsafe_variants_are_caught() {
    for (tooth, temper, within) in CAUGHT_WITHIN {
        catch(NAME, tooth, temper, within);
    }
}
