//! Random faults, many seeds: safety while they last, liveness after.

use orthodrome_core::Duration;
use orthodrome_protocols::replication::Mutation;

use crate::world::{Report, World};

fn run(seed: u64, mutation: Option<Mutation>) -> Report {
    let mut world = World::new(seed, mutation);
    let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        world.run(Duration::from_secs(12));
        world.heal();
    }));
    if let Err(panic) = checked {
        if mutation.is_none() || std::env::var("REPLICATION_VERBOSE").is_ok() {
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
        total.add(&run(seed, None));
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
        assert_eq!(run(seed, None), run(seed, None), "seed {seed}");
    }
}

/// The deliberate bug must be caught within `limit` seeds, by a check whose message has one of
/// `words`; that it also makes other checks fail is no proof of what it is.
fn bites(mutation: Mutation, limit: u64, words: &[&str]) {
    let caught = (0..limit).find_map(|seed| {
        let run = std::panic::catch_unwind(|| run(seed, Some(mutation)));
        let panic = run.err()?;
        let fixed = panic.downcast_ref::<&str>().map(|&text| text.into());
        let text = panic.downcast_ref::<String>().cloned().or(fixed).unwrap_or_default();
        words.iter().any(|word| text.contains(word)).then_some((seed, text))
    });
    let (seed, text) = caught.unwrap_or_else(|| panic!("{mutation:?} survived {limit} seeds"));
    eprintln!("{mutation:?} caught by seed {seed}: {text}");
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
    bites(Mutation::VoteNotDurable, 3_000, &SAFETY);
}

#[test]
fn choosing_entries_of_older_terms_is_caught() {
    bites(Mutation::ChooseOldTerm, 20_000, &SAFETY);
}

#[test]
fn leases_that_pauses_are_not_charged_to_are_caught() {
    bites(Mutation::LeaseIgnoresPauses, 3_000, &SAFETY);
}

#[test]
fn counting_votes_of_non_voters_is_caught() {
    bites(Mutation::CountNonVoters, 3_000, &SAFETY);
}

#[test]
fn forgetting_truncation_is_caught() {
    bites(Mutation::ForgetTruncation, 3_000, &SAFETY);
}

#[test]
fn acknowledging_what_is_not_durable_is_caught() {
    bites(Mutation::AckNotDurable, 3_000, &SAFETY);
}

#[test]
fn letting_the_longest_log_lead_is_caught() {
    bites(Mutation::LongestLog, 3_000, &SAFETY);
}

#[test]
fn reading_without_confirmation_is_caught() {
    bites(Mutation::ReadUnconfirmed, 3_000, &["linearizability"]);
}
