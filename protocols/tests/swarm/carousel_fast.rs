//! Carousel Fast.

use orthodrome_protocols::carousel::{Carousel, FAST};
use orthodrome_sim::FailureKind;

use super::support::{catch, expect, first_failure, hold_every_promise, seeds};

#[test]
fn seeds_with_faults_hold_every_promise() {
    let notes = hold_every_promise(FAST, 0..seeds(200), 4);
    let expected = [
        "CoordinatorTakeover",
        "FastVote",
        "FastRefusal",
        "FastRecovered",
        "FastNotRecovered",
        "FastExcluded",
        "Orphan",
        "StaleVersions",
    ];
    expect(&notes, &expected);
}

/// Unsafe variants, and within how many seeds they are caught. C3 and C5 need rarer coincidences:
/// golden traces show what they do (`docs/protocols/carousel.md`).
const CAUGHT_WITHIN: [(&str, u64); 6] =
    [("C1", 50), ("C2", 50), ("C4", 50), ("C6", 150), ("C8", 50), ("C9", 50)];

#[test]
fn unsafe_variants_are_caught() {
    for (tooth, within) in CAUGHT_WITHIN {
        catch(FAST, tooth, None, within);
    }
}

#[test]
fn what_followers_leave_over_is_noticed() {
    // Lists that go on holding what has ended (C8): whoever leads, its followers hold them too.
    first_failure::<Carousel>(FAST, FailureKind::Stuck, "listed transactions", |config| {
        config.teeth.lists_keep_the_ended = true;
    });
}
