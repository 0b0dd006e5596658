//! The two things that every protocol has to show.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use orthodrome_core::machine::Protocol;
use orthodrome_sim::FailureKind;
use orthodrome_sim::swarm::{FaultProfile, SwarmOptions, Unusual, run_seed_with};

/// How many seeds to run.
pub fn seeds(default: u64) -> u64 {
    from_environment("ORTHODROME_SEEDS").unwrap_or(default)
}

/// A number that whoever runs the tests has set.
pub fn from_environment(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

/// How often each rare event was seen.
pub type Notes = BTreeMap<String, u64>;

/// Runs these seeds, each of which must hold every promise; every `twins`-th one twice, for the
/// same seed gives the same run. They do not scan: many were kept for what they draw instead, and
/// `scans.rs` has seeds that do.
pub fn hold_every_promise(name: &'static str, seeds: Range<u64>, twins: u64) -> Notes {
    let subject = orthodrome_lab::find(name).unwrap();
    let mut notes = Notes::new();
    for seed in seeds {
        let twins = seed.is_multiple_of(twins);
        let without = BTreeSet::from([Unusual::Scans]);
        let options = SwarmOptions { twins, without, ..SwarmOptions::of(name) };
        let result = subject.run_seed(seed, &options).unwrap();
        for (note, count) in result.first.notes {
            *notes.entry(note).or_insert(0) += count;
        }
        if let Some(found) = result.found {
            panic!(
                "seed {seed}: {}\northodrome swarm --protocol {} --seeds {seed}..{}\n{}",
                found.failure,
                name,
                seed + 1,
                found.scenario.schedule.to_toml()
            );
        }
    }
    println!("{name}: {notes:?}");
    notes
}

/// Without unusual sizes, links and disks.
pub fn plain(name: &'static str) -> SwarmOptions {
    let (unordered, bad_disks, unusual) = (false, false, false);
    SwarmOptions { unordered, bad_disks, unusual, ..SwarmOptions::of(name) }
}

/// Some seed must have seen each of these.
pub fn expect(notes: &Notes, expected: &[&str]) {
    for name in expected {
        assert!(notes.contains_key(*name), "no seed ever saw {name}: {notes:?}");
    }
}

/// Where the seeds for deliberate mistakes begin.
const FIRST: u64 = 10_000;

/// The unsafe variant `mutation` is caught within so many seeds (of this profile, if one is named):
/// by one that fails with it and passes without. Among seeds that draw unusual sizes, links or
/// disks the search would take too long for a test.
pub fn catch(name: &'static str, mutation: &str, profile: Option<FaultProfile>, within: u64) {
    catch_with(SwarmOptions { profile, ..plain(name) }, mutation, FIRST..FIRST + within);
}

fn catch_with(options: SwarmOptions, mutation: &str, seeds: Range<u64>) {
    let subject = orthodrome_lab::find(options.name).unwrap();
    assert!(subject.mutations.contains(&mutation));
    let sound = SwarmOptions { shrink_budget: 0, ..options };
    let options = SwarmOptions { mutation: Some(mutation.into()), ..sound.clone() };
    let caught = seeds.clone().find_map(|seed| {
        let found = subject.run_seed(seed, &options).unwrap().found?;
        subject.run_seed(seed, &sound).unwrap().found.is_none().then_some((seed, found))
    });
    let Some((seed, found)) = caught else { panic!("{mutation} was not caught by {seeds:?}") };
    println!("{mutation}: seed {seed}, the {}th: {}", seed - seeds.start + 1, found.failure);
}

/// The first failure of `kind` whose text has `detail` in it, with settings changed by `settings`.
pub fn first_failure<P: Protocol>(
    name: &'static str,
    kind: FailureKind,
    detail: &str,
    settings: fn(&mut P::Config),
) {
    let options = SwarmOptions { shrink_budget: 0, ..SwarmOptions::of(name) };
    let found = (FIRST..FIRST + 200).find_map(|seed| {
        let failure = run_seed_with::<P>(seed, &options, Some(settings)).unwrap().found?.failure;
        (failure.kind == kind && failure.detail.contains(detail)).then_some((seed, failure))
    });
    let Some((seed, failure)) = found else { panic!("no seed failed with {detail:?}") };
    println!("seed {seed}: {failure}");
}
