//! Random faults, many seeds: safety while they last, liveness after.

use orthodrome_core::Duration;
use orthodrome_protocols::replication::Mutations;

use crate::world::{Report, World};

fn run(seed: u64, mutations: Mutations) -> Report {
    let mut world = World::new(seed, mutations);
    let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        world.run(Duration::from_secs(12));
        world.heal();
    }));
    if let Err(panic) = checked {
        if !mutations.is_any() || std::env::var("REPLICATION_VERBOSE").is_ok() {
            eprintln!("replication seed {seed}\n{}", world.describe());
        }
        std::panic::resume_unwind(panic);
    }
    world.report
}

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().map_or(default, |text| text.parse().expect("a number"))
}

/// `REPLICATION_SEED=n` runs one seed, `REPLICATION_SEEDS=n` that many from `REPLICATION_FROM`.
#[test]
fn safe_under_faults_and_live_after_them() {
    let from = number("REPLICATION_SEED", number("REPLICATION_FROM", 0));
    let is_single = std::env::var("REPLICATION_SEED").is_ok();
    let count = if is_single { 1 } else { number("REPLICATION_SEEDS", 1_000) };
    let mut total = Report::default();
    for seed in from..from + count {
        total.add(&run(seed, Mutations::default()));
    }
    eprintln!("{count} seeds: {total:?}");
    // A simulation in which nothing happens proves nothing.
    if count >= 1_000 {
        let seen = [
            total.acked,
            total.reads,
            total.lease_reads,
            total.leaders,
            total.crashes,
            total.partitions,
            total.pauses,
            total.snapshots,
            total.changes,
            total.transfers,
        ];
        assert!(seen.into_iter().all(|count| count >= 300), "too little happened: {total:?}");
    }
}

#[test]
fn the_same_seed_gives_the_same_run() {
    for seed in 0..50 {
        assert_eq!(run(seed, Mutations::default()), run(seed, Mutations::default()), "seed {seed}");
    }
}

/// The deliberate bug must be caught within `limit` seeds, by a check whose message has one of
/// `words`; that it also makes other checks fail is no proof of what it is.
fn bites(mutation: &str, limit: u64, words: &[&str]) {
    let mut mutations = Mutations::default();
    mutations.enable(mutation);
    let caught = (0..limit).find_map(|seed| {
        let run = std::panic::catch_unwind(|| run(seed, mutations));
        let panic = run.err()?;
        let fixed = panic.downcast_ref::<&str>().map(|&text| text.into());
        let text = panic.downcast_ref::<String>().cloned().or(fixed).unwrap_or_default();
        words.iter().any(|word| text.contains(word)).then_some((seed, text))
    });
    let (seed, text) = caught.unwrap_or_else(|| panic!("{mutation} survived {limit} seeds"));
    eprintln!("{mutation} caught by seed {seed}: {text}");
}

const SAFETY: [&str; 7] = [
    "safety",
    "completeness",
    "leads",
    "log matching",
    "which is chosen",
    "linearizability",
    "terms fall",
];

#[test]
fn votes_that_are_not_durable_are_caught() {
    bites("vote_not_durable", 3_000, &SAFETY);
}

#[test]
fn choosing_entries_of_older_terms_is_caught() {
    bites("choose_old_term", 20_000, &SAFETY);
}

#[test]
fn leases_that_pauses_are_not_charged_to_are_caught() {
    bites("lease_ignores_pauses", 3_000, &SAFETY);
}

#[test]
fn counting_votes_of_non_voters_is_caught() {
    bites("count_non_voters", 3_000, &SAFETY);
}

#[test]
fn forgetting_truncation_is_caught() {
    bites("forget_truncation", 3_000, &SAFETY);
}

#[test]
fn acknowledging_what_is_not_durable_is_caught() {
    bites("ack_not_durable", 3_000, &SAFETY);
}

#[test]
fn letting_the_longest_log_lead_is_caught() {
    bites("longest_log", 3_000, &SAFETY);
}

#[test]
fn reading_without_confirmation_is_caught() {
    bites("read_unconfirmed", 3_000, &["linearizability"]);
}
