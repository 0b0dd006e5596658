//! Scans of ranges in which other transactions create keys, under every protocol that lists names.

use std::thread;

use orthodrome_protocols::carousel::FAST;
use orthodrome_protocols::registry::{self, Registered, Row, Visitor};
use orthodrome_protocols::{natto, ocean_vista, tapir, two_phase_locking};
use orthodrome_sim::FailureKind;
use orthodrome_sim::swarm::SwarmOptions;

use super::support::{plain, seeds};

/// Where these seeds begin.
const FIRST: u64 = 900_000;

struct Scans;

impl Visitor for Scans {
    type Out = bool;

    fn visit<P: Registered>(self, _: &'static Row) -> bool {
        P::SCANS
    }
}

/// The protocols that scan.
fn able() -> impl Iterator<Item = &'static str> {
    registry::rows().map(|row| row.name).filter(|name| registry::with(name, Scans) == Ok(true))
}

/// Every seed holds every promise, and every fourth one runs twice.
fn hold(name: &'static str, count: u64) {
    let subject = orthodrome_lab::find(name).unwrap();
    for seed in FIRST..FIRST + count {
        let options =
            SwarmOptions { scans: true, twins: seed.is_multiple_of(4), ..SwarmOptions::of(name) };
        if let Some(found) = subject.run_seed(seed, &options).unwrap().found {
            panic!(
                "{name}: seed {seed}: {}; at first: {}; {:?}\n{}",
                found.failure,
                found.original,
                found.scenario.unusual,
                found.scenario.schedule.to_toml()
            );
        }
    }
}

#[test]
fn scans_of_every_protocol_are_snapshots() {
    thread::scope(|scope| {
        for name in able() {
            scope.spawn(move || hold(name, seeds(8)));
        }
    });
}

/// The number of seeds within which scans that list names only once are caught.
const CAUGHT_WITHIN: [(&str, u64); 5] = [
    (two_phase_locking::BY_AGE, 20),
    (FAST, 20),
    (natto::RECSF, 20),
    (tapir::NAME, 20),
    (ocean_vista::NAME, 20),
];

#[test]
fn scans_that_list_names_only_once_are_caught() {
    for (name, within) in CAUGHT_WITHIN {
        let subject = orthodrome_lab::find(name).unwrap();
        let sound = SwarmOptions { scans: true, shrink_budget: 0, ..plain(name) };
        let unsound = SwarmOptions { no_second_list: true, ..sound.clone() };
        let caught = (FIRST..FIRST + within).find_map(|seed| {
            let found = subject.run_seed(seed, &unsound).unwrap().found?;
            let is_anomaly = found.failure.kind == FailureKind::History;
            let passes = || subject.run_seed(seed, &sound).unwrap().found.is_none();
            (is_anomaly && passes()).then_some((seed, found.failure))
        });
        let Some((seed, failure)) = caught else { panic!("{name}: not caught within {within}") };
        println!("{name}: seed {seed}: {failure}");
    }
}

/// A watch that stops where the latest change is misses what commits below it later. From calvin to
/// geodesic, protocols have timestamps for which that happens.
#[test]
fn watches_that_do_not_wait_are_caught() {
    for name in
        [two_phase_locking::BY_AGE, FAST, tapir::NAME, ocean_vista::NAME, "sloth", "geodesic"]
    {
        let subject = orthodrome_lab::find(name).unwrap();
        let sound = SwarmOptions { scans: true, shrink_budget: 0, ..plain(name) };
        let unsound = SwarmOptions { hasty_watches: true, ..sound.clone() };
        let caught = (FIRST..FIRST + 40).find_map(|seed| {
            let found = subject.run_seed(seed, &unsound).unwrap().found?;
            let is_missing = found.failure.detail.contains("a watch from");
            let passes = || subject.run_seed(seed, &sound).unwrap().found.is_none();
            (is_missing && passes()).then_some((seed, found.failure))
        });
        let Some((seed, failure)) = caught else { panic!("{name}: not caught within 40") };
        println!("{name}: seed {seed}: {failure}");
    }
}
