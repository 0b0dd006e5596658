//! Carousel's basic protocol.

use orthodrome_core::machine::Protocol as _;
use orthodrome_core::time::Duration;
use orthodrome_protocols::carousel::{BASIC, Carousel};
use orthodrome_protocols::replication::Tooth;
use orthodrome_sim::FailureKind;
use orthodrome_sim::swarm::Temper;

use super::support::{catch, expect, first_failure, hold_every_promise, seeds};

#[test]
fn seeds_with_faults_hold_every_promise_twice() {
    let notes = hold_every_promise(BASIC, 0..seeds(200), 1);
    expect(&notes, &["CoordinatorTakeover", "ParticipantTakeover", "QueryRefused", "Tombstone"]);
}

/// Unsafe variants, the temper of the seeds that is hardest on them, and within how many such seeds
/// they are caught. `docs/protocols/carousel.md` has the medians over seeds of every temper.
const CAUGHT_WITHIN: [(&str, Temper, u64); 6] = [
    ("C1", Temper::Mixed, 50),
    ("C4", Temper::Chairs, 150),
    ("C9", Temper::Mixed, 50),
    ("C11", Temper::Clocks, 150),
    ("C12", Temper::Islands, 50),
    ("R11", Temper::Mixed, 50),
];

#[test]
fn unsafe_variants_are_caught() {
    assert_eq!(CAUGHT_WITHIN.map(|(tooth, ..)| tooth), Carousel::teeth(BASIC));
    for (tooth, temper, within) in CAUGHT_WITHIN {
        catch(BASIC, tooth, Some(temper), within);
    }
}

#[test]
fn what_is_left_over_is_noticed() {
    // Participants that never ask what they may forget.
    first_failure::<Carousel>(BASIC, FailureKind::Stuck, "unforgotten endings", |config| {
        config.query_after = Duration::from_secs(3_600);
    });
}

#[test]
fn a_log_that_contradicts_itself_is_noticed() {
    first_failure::<Carousel>(BASIC, FailureKind::Claim, "was chosen in term", |config| {
        config.hosting.replication.tooth = Some(Tooth::AckNotDurable);
    });
}
