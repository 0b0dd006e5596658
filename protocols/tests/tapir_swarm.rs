//! TAPIR under the swarm: seeds with faults hold every promise, the same seed twice gives the same
//! run, nothing stays prepared for ever, and every unsafe variant is caught. `ORTHODROME_SEEDS` says
//! how many seeds (200); the command `orthodrome swarm` runs as many as one likes.

#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

use orthodrome_protocols::tapir::Tapir;
use orthodrome_sim::swarm::{SwarmOptions, run_seed};

fn seeds() -> u64 {
    std::env::var("ORTHODROME_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(200)
}

fn first() -> u64 {
    std::env::var("ORTHODROME_FIRST_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(0)
}

#[test]
fn seeds_with_faults_hold_every_promise() {
    let mut notes = std::collections::BTreeMap::new();
    for seed in first()..first() + seeds() {
        let twins = seed % 4 == 0;
        let result =
            run_seed(seed, &SwarmOptions::<Tapir> { twins, ..SwarmOptions::default() }).unwrap();
        for (note, count) in result.notes {
            *notes.entry(note).or_insert(0) += count;
        }
        if let Some(found) = result.found {
            panic!(
                "seed {seed}: {}\northodrome swarm --protocol tapir --seeds {seed}..{}\n{}",
                found.failure,
                seed + 1,
                found.scenario.schedule.to_toml()
            );
        }
    }
    println!("{notes:?}");
    for expected in ["Takeover", "ViewChange", "LaterRound", "Tombstone", "Promised", "CommitWait"]
    {
        assert!(notes.contains_key(expected), "no seed ever saw {expected}");
    }
}

/// Unsafe variants that random seeds catch, and within how many.
const CAUGHT_WITHIN: [(&str, u64); 3] = [("T2", 40), ("T3", 20), ("T1", 100)];

#[test]
fn unsafe_variants_are_caught() {
    let sound = SwarmOptions::<Tapir> { shrink_budget: 0, ..SwarmOptions::default() };
    for (tooth, within) in CAUGHT_WITHIN {
        let options = SwarmOptions { tooth: Some(tooth.into()), ..sound.clone() };
        let caught = (10_000..10_000 + within).find(|&seed| {
            run_seed(seed, &options).unwrap().found.is_some()
                && run_seed(seed, &sound).unwrap().found.is_none()
        });
        let Some(seed) = caught else { panic!("{tooth} was not caught in {within} seeds") };
        println!("{tooth} caught by seed {seed}, the {}th", seed - 10_000 + 1);
    }
}
