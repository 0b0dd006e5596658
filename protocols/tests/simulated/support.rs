//! The two things that every protocol has to show.

use std::ops::Range;
use std::sync::Mutex;

use orthodrome_core::machine::Protocol;
use orthodrome_core::ordered::{OrdMap, OrdSet};
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
pub type Notes = OrdMap<String, u64>;

/// Runs these seeds, each of which must hold every promise; every `twins`-th one twice, for the
/// same seed gives the same run. They do not scan: many were kept for what they draw instead, and
/// `scans.rs` has seeds that do.
pub fn hold_every_promise(name: &'static str, seeds: Range<u64>, twins: u64) -> Notes {
    let subject = orthodrome_lab::find(name).unwrap();
    let mut notes = Notes::new();
    for seed in seeds {
        let twins = seed % twins == twins - 1;
        let without = OrdSet::from([Unusual::Scans]);
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

/// The unsafe variant `mutation` is caught by a seed (of this profile, if one is named) that fails with
/// it and passes without: by the one that caught it last, or else within so many seeds. Among seeds
/// that draw unusual sizes, links or disks the search would take too long for a test.
pub fn catch(name: &'static str, mutation: &str, profile: Option<FaultProfile>, within: u64) {
    let sound = SwarmOptions { shrink_budget: 0, profile, ..plain(name) };
    let subject = orthodrome_lab::find(name).unwrap();
    assert!(subject.mutations.contains(&mutation));
    let options = SwarmOptions { mutation: Some(mutation.into()), ..sound.clone() };
    let variant = match profile {
        Some(profile) => format!("{name} {mutation} {profile:?}"),
        None => format!("{name} {mutation}"),
    };
    let last = Caught::last(&variant);
    let caught = last.into_iter().chain(FIRST..FIRST + within).find_map(|seed| {
        let found = subject.run_seed(seed, &options).unwrap().found?;
        subject.run_seed(seed, &sound).unwrap().found.is_none().then_some((seed, found))
    });
    let Some((seed, found)) = caught else {
        panic!("{variant} was not caught by {last:?}, nor within {within} seeds from {FIRST} on")
    };
    println!("{variant}: seed {seed}: {}", found.failure);
    if last != Some(seed) {
        Caught::note(variant, seed);
    }
}

/// Tests run in parallel, and write one file.
static CAUGHT: Mutex<()> = Mutex::new(());

/// The seeds that caught mutations last, so that not every test has to search for one.
/// `UPDATE_GOLDENFILES=1` writes them again. A seed catches another mutation after most changes of a
/// protocol, and then the search takes the time that it took before.
struct Caught {
    seeds: OrdMap<String, u64>,
}

impl Caught {
    const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/simulated/caught.txt");

    fn read() -> Self {
        let text = std::fs::read_to_string(Self::FILE).unwrap();
        let of = |line: &str| {
            let (variant, seed) = line.rsplit_once(' ')?;
            Some((variant.to_owned(), seed.parse().ok()?))
        };
        let of = |line| of(line).unwrap_or_else(|| panic!("{line:?} in {}", Self::FILE));
        Self { seeds: text.lines().map(of).collect() }
    }

    fn last(variant: &str) -> Option<u64> {
        let _file = CAUGHT.lock().unwrap();
        Self::read().seeds.get(variant).copied()
    }

    fn note(variant: String, seed: u64) {
        if std::env::var_os("UPDATE_GOLDENFILES").is_none() {
            println!("`cargo xtask golden` notes that seed {seed} catches {variant}");
            return;
        }
        let _file = CAUGHT.lock().unwrap();
        let mut all = Self::read().seeds;
        all.insert(variant, seed);
        let lines: String =
            all.iter().map(|(variant, seed)| format!("{variant} {seed}\n")).collect();
        std::fs::write(Self::FILE, lines).unwrap();
    }
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
