//! The example of `docs/adding-a-protocol.md`: a protocol that is not shipped passes the checks
//! that every protocol of the registry passes. All that it is lies in the folder `one_log`.

#![allow(clippy::unwrap_used, missing_docs, reason = "a test may stop at the first surprise")]

#[path = "../checks/wire.rs"]
mod checks;
mod one_log;

use std::path::PathBuf;

use checks::{ComesBack, Each, IsNeverTakenForWhole, IsRefusedOrRead, keep_fields};
use one_log::{NAME, OneLog};
use orthodrome_protocols::registry::Registered as _;
use orthodrome_sim::golden::run_all;
use orthodrome_sim::swarm::{SeedResult, SwarmOptions, run_seed};

mod registry {
    orthodrome_protocols::protocols![super::one_log::OneLog];
}

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/adding/one_log")
}

#[test]
fn golden_traces_are_as_recorded() {
    run_all::<OneLog>(NAME, folder().join("testdata")).unwrap();
}

#[test]
fn messages_and_records_come_back_and_damage_is_noticed() {
    registry::with(NAME, Each(&ComesBack)).unwrap();
    registry::with(NAME, Each(&IsNeverTakenForWhole)).unwrap();
    registry::with(NAME, Each(&IsRefusedOrRead)).unwrap();
}

#[test]
fn fields_keep_their_numbers() {
    keep_fields(&folder().join("wire.txt"), |check| registry::with(NAME, Each(check)).unwrap());
}

fn seed(seed: u64, options: &SwarmOptions) -> SeedResult {
    run_seed::<OneLog>(seed, options).unwrap()
}

#[test]
fn seeds_with_faults_hold_every_promise() {
    let seeds = std::env::var("ORTHODROME_SEEDS").map_or(300, |count| count.parse().unwrap());
    let mut notes = orthodrome_core::ordered::OrdMap::new();
    for number in 0..seeds {
        let twins = number % 4 == 0;
        let result = seed(number, &SwarmOptions { twins, ..SwarmOptions::of(NAME) });
        if let Some(found) = result.found {
            panic!("seed {number}: {}\n{}", found.failure, found.scenario.schedule.to_toml());
        }
        for (note, count) in result.first.notes {
            *notes.entry(note).or_insert(0) += count;
        }
    }
    println!("{notes:?}");
    for note in ["Resent", "Repeated", "Refused"] {
        assert!(notes.contains_key(note), "no seed ever saw {note}: {notes:?}");
    }
}

#[test]
fn mutations_are_caught_within_as_many_seeds_as_the_protocol_says() {
    for &(name, mutation, within) in OneLog::CAUGHT_WITHIN {
        let (unordered, bad_disks, unusual) = (false, false, false);
        let sound = SwarmOptions {
            unordered,
            bad_disks,
            unusual,
            shrink_budget: 0,
            ..SwarmOptions::of(name)
        };
        let unsafe_one = SwarmOptions { mutation: Some(mutation.into()), ..sound.clone() };
        let caught = (10_000..10_000 + within).find_map(|number| {
            let found = seed(number, &unsafe_one).found?;
            seed(number, &sound).found.is_none().then_some((number, found.failure))
        });
        let (number, failure) = caught.unwrap_or_else(|| panic!("{mutation} was not caught"));
        println!("{mutation}: seed {number}: {failure}");
    }
}
