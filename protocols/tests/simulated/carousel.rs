//! Carousel's basic protocol.

use orthodrome_core::machine::Protocol as _;
use orthodrome_core::time::Duration;
use orthodrome_protocols::carousel::{BASIC, Carousel};
use orthodrome_sim::FailureKind;
use orthodrome_sim::swarm::FaultProfile;

use super::support::{catch, expect, first_failure, hold_every_promise, seeds};

#[test]
fn seeds_with_faults_hold_every_promise_twice() {
    let notes = hold_every_promise(BASIC, 0..seeds(200), 1);
    expect(&notes, &["CoordinatorTakeover", "ParticipantTakeover", "QueryRefused", "Tombstone"]);
}

/// Unsafe variants, the profile of the seeds that is hardest on them, and within how many such
/// seeds they are caught. `docs/protocols/carousel.md` has the medians over seeds of every profile.
const CAUGHT_WITHIN: [(&str, FaultProfile, u64); 6] = [
    ("C1", FaultProfile::Mixed, 50),
    ("C4", FaultProfile::LeaderChurn, 150),
    ("C9", FaultProfile::Mixed, 50),
    ("C11", FaultProfile::ClockSkew, 150),
    ("C12", FaultProfile::Partitions, 50),
    ("R11", FaultProfile::Mixed, 50),
];

#[test]
fn mutations_are_caught_by_the_swarm() {
    assert_eq!(CAUGHT_WITHIN.map(|(mutation, ..)| mutation), Carousel::mutations(BASIC));
    for (mutation, profile, within) in CAUGHT_WITHIN {
        catch(BASIC, mutation, Some(profile), within);
    }
}

#[test]
fn leaks_are_reported() {
    // Participants that never ask what they may forget.
    first_failure::<Carousel>(BASIC, FailureKind::Stuck, "unforgotten endings", |config| {
        config.timeouts.query_after = Duration::from_secs(3_600);
    });
}

#[test]
fn a_log_that_contradicts_itself_is_noticed() {
    first_failure::<Carousel>(BASIC, FailureKind::Claim, "was chosen in term", |config| {
        config.hosting.replication.mutations.enable("ack_not_durable");
    });
}
