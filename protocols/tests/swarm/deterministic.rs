//! The deterministic protocols. They are not in the registry yet, so their type is named here.
//! `ORTHODROME_FIRST_SEED` says where their seeds begin (0).

use std::collections::BTreeMap;
use std::ops::Range;

use orthodrome_core::machine::Protocol as _;
use orthodrome_protocols::deterministic::{CALVIN, Deterministic, SLOTH};
use orthodrome_sim::swarm::{SwarmOptions, Temper, run_seed};

use super::support::{Notes, expect, from_environment, seeds};

/// As [`super::support::hold_every_promise`].
fn hold_every_promise(name: &'static str, seeds: Range<u64>) -> Notes {
    let mut notes = BTreeMap::new();
    let mut failures = Vec::new();
    for seed in seeds {
        let options = SwarmOptions { twins: seed.is_multiple_of(4), ..SwarmOptions::of(name) };
        let result = run_seed::<Deterministic>(seed, &options).unwrap();
        for (note, count) in result.notes {
            *notes.entry(note).or_insert(0) += count;
        }
        if let Some(found) = result.found {
            let toml = found.scenario.schedule.to_toml();
            println!("seed {seed}: {}\n{toml}", found.failure);
            failures.push(format!("seed {seed}: {}", found.failure));
        }
    }
    println!("{name}: {notes:?}");
    assert!(failures.is_empty(), "{name}: {failures:#?}");
    notes
}

fn of(default: u64, share: u64) -> Range<u64> {
    let first = from_environment("ORTHODROME_FIRST_SEED").unwrap_or(0) + share * 100_000;
    first..first + seeds(default) / 2
}

#[test]
fn seeds_with_faults_hold_every_promise_with_one_log() {
    let notes = hold_every_promise(CALVIN, of(200, 0));
    expect(&notes, &["RepeatedEntry", "AlreadyRan", "Resolved", "AskedAgain", "Checkpoint"]);
}

#[test]
fn seeds_with_faults_hold_every_promise_with_a_stream_for_each_region() {
    let notes = hold_every_promise(SLOTH, of(200, 1));
    let expected = [
        "RepeatedEntry",
        "AlreadyRan",
        "Resolved",
        "AskedAgain",
        "Checkpoint",
        "Forwarded",
        "Component",
        "Held",
        "Closed",
        "Acknowledged",
    ];
    expect(&notes, &expected);
}

/// The unsafe variant `tooth` is caught within so many seeds, by one that passes without it.
fn catch(name: &'static str, tooth: &str, temper: Option<Temper>, within: u64) {
    let sound = SwarmOptions { temper, shrink_budget: 0, ..SwarmOptions::of(name) };
    let options = SwarmOptions { tooth: Some(tooth.into()), ..sound.clone() };
    let run = |seed, options| run_seed::<Deterministic>(seed, options).unwrap().found;
    let caught = (10_000..10_000 + within).find_map(|seed| {
        let found = run(seed, &options)?;
        run(seed, &sound).is_none().then_some((seed, found))
    });
    let Some((seed, found)) = caught else { panic!("{tooth} was not caught in {within} seeds") };
    println!("{name} {tooth}: seed {seed}, the {}th: {}", seed - 9_999, found.failure);
}

/// Unsafe variants, and within how many seeds they are caught.
const CAUGHT_WITHIN: [(&str, &str, Option<Temper>, u64); 4] = [
    (CALVIN, "S7", None, 10),
    (CALVIN, "S9", None, 100),
    (CALVIN, "R6", None, 30),
    (SLOTH, "S7", None, 10),
];

#[test]
fn unsafe_variants_are_caught() {
    for (name, tooth, temper, within) in CAUGHT_WITHIN {
        assert!(Deterministic::teeth(name).contains(&tooth));
        catch(name, tooth, temper, within);
    }
}
