//! Carousel Fast.

use orthodrome_protocols::carousel::{Carousel, FAST};
use orthodrome_sim::FailureKind;
use orthodrome_sim::swarm::FaultProfile;

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

/// Mutations, and within how many seeds they are caught. C3 needs rarer coincidences: a golden
/// trace shows what it does (`docs/protocols/carousel.md`).
const CAUGHT_WITHIN: [(&str, u64); 5] =
    [("C1", 50), ("C2", 50), ("C4", 50), ("C8", 50), ("C9", 50)];

#[test]
fn mutations_are_caught_by_the_swarm() {
    for (mutation, within) in CAUGHT_WITHIN {
        catch(FAST, mutation, None, within);
    }
    // Votes that are not on disk are forgotten in a power cut. The third seed of the profile.
    catch(FAST, "C5", Some(FaultProfile::PowerCuts), 30);
}

#[test]
fn leaks_of_followers_are_reported() {
    // Lists that go on holding what has ended (C8): whoever leads, its followers hold them too.
    first_failure::<Carousel>(FAST, FailureKind::Stuck, "listed transactions", |config| {
        config.mutations.enable("lists_keep_the_ended");
    });
}
