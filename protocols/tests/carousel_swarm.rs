//! Carousel under the swarm: seeds with faults hold every promise, the same seed twice gives the same
//! run, and every unsafe variant is caught. `ORTHODROME_SEEDS` says how many seeds (200); the
//! command `orthodrome swarm` runs as many as one likes.

#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

use orthodrome_core::machine::Protocol;
use orthodrome_core::time::Duration;
use orthodrome_protocols::carousel::{CarouselBasic, Config};
use orthodrome_protocols::replication::Tooth;
use orthodrome_sim::FailureKind;
use orthodrome_sim::swarm::{SwarmOptions, Temper, run_seed};

fn seeds() -> u64 {
    std::env::var("ORTHODROME_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(200)
}

#[test]
fn seeds_with_faults_hold_every_promise_twice() {
    let options = SwarmOptions::<CarouselBasic> { twins: true, ..SwarmOptions::default() };
    let mut notes = std::collections::BTreeMap::new();
    for seed in 0..seeds() {
        let result = run_seed(seed, &options).unwrap();
        for (note, count) in result.notes {
            *notes.entry(note).or_insert(0) += count;
        }
        if let Some(found) = result.found {
            panic!(
                "seed {seed}: {}\northodrome swarm --protocol carousel-basic --seeds {seed}..{}\n{}",
                found.failure,
                seed + 1,
                found.scenario.schedule.to_toml()
            );
        }
    }
    println!("{notes:?}");
    for expected in ["CoordinatorTakeover", "ParticipantTakeover", "QueryRefused", "Tombstone"] {
        assert!(notes.contains_key(expected), "no seed ever saw {expected}");
    }
}

/// Unsafe variants, the temper of the seeds that is hardest on them, and within how many such seeds
/// they are caught. `docs/protocols/carousel.md` has the medians over seeds of every temper.
const CAUGHT_WITHIN: [(&str, Temper, u64); 5] = [
    ("C1", Temper::Mixed, 50),
    ("C4", Temper::Chairs, 150),
    ("C9", Temper::Mixed, 50),
    ("C11", Temper::Clocks, 150),
    ("C12", Temper::Islands, 50),
];

#[test]
fn unsafe_variants_are_caught() {
    assert_eq!(CAUGHT_WITHIN.map(|(tooth, ..)| tooth), CarouselBasic::TEETH);
    for (tooth, temper, within) in CAUGHT_WITHIN {
        let (temper, shrink_budget) = (Some(temper), 0);
        let sound =
            SwarmOptions { temper, shrink_budget, ..SwarmOptions::<CarouselBasic>::default() };
        let options = SwarmOptions { tooth: Some(tooth.into()), ..sound.clone() };
        let caught = (FIRST..FIRST + within).find_map(|seed| {
            let found = run_seed(seed, &options).unwrap().found?;
            run_seed(seed, &sound).unwrap().found.is_none().then_some((seed, found))
        });
        let Some((seed, found)) = caught else {
            panic!("{tooth} was not caught in {within} seeds")
        };
        println!("{tooth}: seed {seed}, the {}th: {}", seed - FIRST + 1, found.failure);
    }
}

/// Where the seeds for deliberate mistakes begin.
const FIRST: u64 = 10_000;

/// The first failure of `kind` whose text has `detail` in it, with settings changed by `settings`.
fn first_failure(kind: FailureKind, detail: &str, settings: fn(&mut Config)) {
    let options = SwarmOptions::<CarouselBasic> {
        settings: Some(settings),
        shrink_budget: 0,
        ..SwarmOptions::default()
    };
    let found = (FIRST..FIRST + 40).find_map(|seed| {
        let failure = run_seed(seed, &options).unwrap().found?.failure;
        (failure.kind == kind && failure.detail.contains(detail)).then_some((seed, failure))
    });
    let Some((seed, failure)) = found else { panic!("no seed failed with {detail:?}") };
    println!("seed {seed}: {failure}");
}

#[test]
fn what_is_left_over_is_noticed() {
    // Participants that never ask what they may forget.
    first_failure(FailureKind::Stuck, "unforgotten endings", |config| {
        config.query_after = Duration::from_secs(3_600);
    });
}

#[test]
fn a_log_that_contradicts_itself_is_noticed() {
    first_failure(FailureKind::Claim, "was chosen in term", |config| {
        config.replication.tooth = Some(Tooth::AckNotDurable);
    });
}
