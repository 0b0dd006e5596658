//! Random clusters, loads and faults.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may stop at the first surprise")]

use std::ops::Range;

use orthodrome_core::machine::Protocol;
use orthodrome_core::ordered::OrdMap;
use orthodrome_geotp::scalardb::{SCALARDB, SCALARDB_PLUS, ScalarDb};
use orthodrome_geotp::simulated::{CHILLER, GeoTp, NEAR, O1, O2, O3, QURO, XA};
use orthodrome_sim::swarm::{SwarmOptions, run_seed};

fn seeds(default: u64) -> u64 {
    std::env::var("ORTHODROME_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// The seeds to run: `ORTHODROME_SEEDS` is their number, and `ORTHODROME_FIRST_SEED` the first one.
fn from(first: u64, default: u64) -> Range<u64> {
    let other = std::env::var("ORTHODROME_FIRST_SEED").ok().and_then(|text| text.parse().ok());
    let first = other.unwrap_or(first);
    first..first + seeds(default)
}

/// Runs these seeds, each of which must hold every promise; every fourth one twice, for the same seed gives the same run.
fn hold_every_promise<P: Protocol>(name: &'static str, seeds: Range<u64>) -> OrdMap<String, u64> {
    let mut notes = OrdMap::new();
    for seed in seeds {
        let options = SwarmOptions { twins: seed % 4 == 0, ..SwarmOptions::of(name) };
        let result = run_seed::<P>(seed, &options).unwrap();
        for (note, count) in result.first.notes {
            *notes.entry(note).or_insert(0) += count;
        }
        if let Some(found) = result.found {
            panic!(
                "seed {seed}: {}\northodrome swarm --protocol {name} --seeds {seed}..{}\n{}",
                found.failure,
                seed + 1,
                found.scenario.schedule.to_toml()
            );
        }
    }
    println!("{name}: {notes:?}");
    notes
}

fn expect(notes: &OrdMap<String, u64>, expected: &[&str]) {
    for name in expected {
        assert!(notes.contains_key(*name), "no seed ever saw {name}: {notes:?}");
    }
}

/// A row that was deleted and inserted again had an earlier version than its deletion, because the
/// simulated source forgot the deletion.
#[test]
fn a_row_that_is_inserted_again_follows_its_deletion() {
    hold_every_promise::<GeoTp>(O3, 910_000_006..910_000_007);
    hold_every_promise::<GeoTp>(O1, 910_000_019..910_000_020);
    hold_every_promise::<GeoTp>(NEAR, 910_000_082..910_000_083);
    hold_every_promise::<ScalarDb>(SCALARDB_PLUS, 1_000_002_584..1_000_002_585);
}

#[test]
fn seeds_with_faults_hold_every_promise() {
    let notes = hold_every_promise::<GeoTp>(O3, 0..seeds(120));
    expect(
        &notes,
        &["DecentralizedPrepare", "Postponed", "HeldBack", "EarlyAbort", "Tombstone", "Orphan"],
    );
    expect(
        &notes,
        &[
            "Deadlock",
            "LockTimeout",
            "FenceBroken",
            "MasterLost",
            "Unknowable",
            "Checkpoint",
            "WentBack",
        ],
    );
}

#[test]
fn seeds_with_faults_hold_every_promise_of_the_stages() {
    for (name, first) in
        [(O1, 100_000), (O2, 200_000), (XA, 300_000), (QURO, 400_000), (CHILLER, 500_000)]
    {
        hold_every_promise::<GeoTp>(name, first..first + seeds(150) / 5);
    }
}

#[test]
fn seeds_with_faults_hold_every_promise_of_near() {
    let notes = hold_every_promise::<GeoTp>(NEAR, from(800_000, 150));
    expect(&notes, &["DecentralizedPrepare", "SentEarly"]);
}

#[test]
fn unsafe_variants_of_near_are_caught() {
    // `unchecked-count` shows only if a row is deleted between the copy's answer and the commit, and
    // no workload that a seed draws deletes rows.
    catch::<GeoTp>(NEAR, "unchecked-read", 10_000..10_020);
}

#[test]
fn seeds_with_faults_hold_every_promise_of_scalardb() {
    let notes = hold_every_promise::<ScalarDb>(SCALARDB, 600_000..600_000 + seeds(150) / 3);
    expect(
        &notes,
        &["PreparedFound", "RolledForward", "RolledBack", "Expired", "Overruled", "Resent"],
    );
    expect(&notes, &["PrepareRefused", "ValidationFailed", "GivenUp"]);
    let notes = hold_every_promise::<ScalarDb>(SCALARDB_PLUS, 700_000..700_000 + seeds(150) / 3);
    expect(&notes, &["Postponed", "HeldBack", "Refused"]);
}

/// The unsafe variant `mutation` is caught by one of these seeds, one that fails with it and passes without.
fn catch<P: Protocol>(name: &'static str, mutation: &str, seeds: Range<u64>) {
    let sound = SwarmOptions { shrink_budget: 0, ..SwarmOptions::of(name) };
    let options = SwarmOptions { mutation: Some(mutation.into()), ..sound.clone() };
    let caught = seeds.clone().find(|&seed| {
        run_seed::<P>(seed, &options).unwrap().found.is_some()
            && run_seed::<P>(seed, &sound).unwrap().found.is_none()
    });
    assert!(caught.is_some(), "{mutation} was not caught in seeds {seeds:?}");
}

#[test]
fn mutations_are_caught_by_the_swarm() {
    for (mutation, within) in CAUGHT_WITHIN {
        catch::<GeoTp>(O3, mutation, 10_000..10_000 + within);
    }
}

/// `early-state` is rare: a golden trace shows what it does.
#[test]
fn unsafe_variants_of_scalardb_are_caught() {
    for (mutation, seeds) in [
        ("skipped-validation", 10_000..10_010),
        ("ignored-state", 10_000..10_010),
        ("before-image", 10_000..10_010),
        ("blind-prepare", 10_000..10_010),
    ] {
        catch::<ScalarDb>(SCALARDB, mutation, seeds);
    }
}

const CAUGHT_WITHIN: [(&str, u64); 11] = [
    ("G1", 10),
    ("G2", 10),
    ("G4", 20),
    ("G5", 30),
    ("G6", 30),
    ("early-vote", 20),
    ("early-answer", 10),
    ("forgotten-decision", 10),
    ("skipped-vote", 20),
    ("forgotten-savepoint", 20),
    ("unlocking-savepoint", 30),
];
