//! Swarms of a small protocol: the correct protocol passes, and each mutation is caught.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    missing_docs,
    reason = "tests may panic, and are their own documentation"
)]

mod toy;

use orthodrome_core::machine::Protocol as _;
use orthodrome_core::ordered::OrdMap;
use orthodrome_sim::FailureKind;
use orthodrome_sim::swarm::{Found, Scenario, SwarmOptions, run_scenario, run_seed};
use toy::Toy;

/// The toy protocol has one leader, so no server may stay down, and it takes no orders of
/// operators.
fn options(mutation: Option<&str>) -> SwarmOptions {
    SwarmOptions {
        mutation: mutation.map(Into::into),
        losses: false,
        transactions: 150,
        ..SwarmOptions::of(Toy::NAMES[0])
    }
}

#[test]
fn a_correct_protocol_survives_and_every_kind_of_fault_happens() {
    let options = SwarmOptions { twins: true, ..options(None) };
    let mut injected: OrdMap<&str, u64> = OrdMap::new();
    let mut notes: OrdMap<String, u64> = OrdMap::new();
    let (mut attempts, mut seconds) = (0, 0.0);
    for seed in 0..60 {
        let result = run_seed::<Toy>(seed, &options).unwrap();
        if let Some(found) = result.found {
            panic!("seed {seed}: {}\n{}", found.failure, found.scenario.schedule.to_toml());
        }
        let run = result.first;
        attempts += run.attempts.0;
        seconds += run.simulated.as_secs_f64();
        run.injected.iter().for_each(|(&kind, count)| *injected.entry(kind).or_default() += count);
        run.notes.into_iter().for_each(|(note, count)| *notes.entry(note).or_default() += count);
    }
    println!("{seconds} simulated seconds, {attempts} attempts, {injected:?}");
    assert!(attempts > 3_000, "only {attempts} attempts were checked");
    // Every kind, with refused starts and lost writes, except for orders: nobody takes them.
    assert_eq!(injected.len(), 20, "some kinds of fault never happened: {injected:?}");
    assert!(!injected.contains_key("transfer-leader") && !injected.contains_key("change-members"));
    assert_eq!(notes.len(), 3, "some rare events never happened: {notes:?}");
}

/// The first seed that catches a mutation; none within `seeds`.
fn seeds_to_find(mutation: &str, seeds: u64) -> Option<(u64, Found)> {
    seeds_to_find_as(mutation, seeds, |_| true)
}

/// The first seed whose shrunk failure satisfies a condition; none within `seeds`.
fn seeds_to_find_as(
    mutation: &str,
    seeds: u64,
    is_meant: impl Fn(&Found) -> bool,
) -> Option<(u64, Found)> {
    let options = options(Some(mutation));
    let first = (0..seeds).find_map(|seed| {
        let found = run_seed::<Toy>(seed, &options).unwrap().found?;
        is_meant(&found).then_some((seed, found))
    });
    if let Some((seed, found)) = &first {
        println!("{mutation}: seed {seed}, {} runs to shrink: {}", found.trials, found.failure);
    }
    first
}

#[test]
fn an_answer_before_it_is_durable_is_found_and_shrunk_to_one_crash() {
    // A lost write needs one crash; a cycle in the history may need more faults.
    let is_small = |found: &Found| {
        found.scenario.schedule.faults.len() <= 2
            && found.scenario.options.load.transactions_max < 150
    };
    let (_, found) = seeds_to_find_as("told-before-durable", 100, is_small).unwrap();
    // The shrunk scenario still fails, and its schedule survives being written to a file and read
    // back.
    let mut again = found.scenario.clone();
    let text = found.scenario.schedule.to_toml();
    again.schedule = orthodrome_sim::Schedule::parse(&text).unwrap();
    let result = run_scenario::<Toy>(&again, &options(Some("told-before-durable")), None).unwrap();
    assert_eq!(result.failure, Some(found.failure));
}

/// Draws that a failure does not need are left out, and the rest fails again by itself.
#[test]
fn a_failure_is_explained_without_the_draws_that_it_does_not_need() {
    let options = options(Some("no-validation"));
    let (mut drawn, mut needed) = (0, 0);
    for seed in 0..24 {
        let Some(found) = run_seed::<Toy>(seed, &options).unwrap().found else { continue };
        drawn += Scenario::draw::<Toy>(seed, &options).unwrap().unusual.len();
        needed += found.scenario.unusual.len();
        let again = SwarmOptions { without: found.scenario.without.clone(), ..options.clone() };
        let mut again = Scenario::draw::<Toy>(seed, &again).unwrap();
        assert_eq!(again.unusual, found.scenario.unusual, "seed {seed}");
        again.schedule = found.scenario.schedule.clone();
        again.options.load.transactions_max = found.scenario.options.load.transactions_max;
        let result = run_scenario::<Toy>(&again, &options, None).unwrap();
        assert_eq!(result.failure, Some(found.failure), "seed {seed}");
    }
    assert!(drawn > 10 && needed * 4 < drawn, "{needed} of {drawn} draws were kept");
}

/// Every seed scans, with faults.
#[test]
fn scans_are_snapshots_unless_they_list_names_only_once() {
    let sound = SwarmOptions { scans: true, twins: true, shrink_budget: 0, ..options(None) };
    let unsound = SwarmOptions { no_second_list: true, twins: false, ..sound.clone() };
    let mut caught = 0;
    for seed in 0..40 {
        if let Some(found) = run_seed::<Toy>(seed, &sound).unwrap().found {
            panic!("seed {seed}: {}\n{}", found.failure, found.scenario.schedule.to_toml());
        }
        let Some(found) = run_seed::<Toy>(seed, &unsound).unwrap().found else { continue };
        let kind = found.failure.kind;
        assert!(matches!(kind, FailureKind::History | FailureKind::Promise), "{}", found.failure);
        caught += 1;
    }
    println!("{caught} of 40 seeds");
    assert!(caught >= 10, "only {caught} seeds caught it");
}

#[test]
fn missing_validation_is_found() {
    let (_, found) = seeds_to_find("no-validation", 10).unwrap();
    assert!(found.scenario.schedule.faults.is_empty(), "it needs no fault");
}

#[test]
fn a_forgotten_outcome_is_found() {
    seeds_to_find("forgets-outcomes", 60).unwrap();
}

#[test]
fn a_transaction_that_never_ends_is_found_by_the_liveness_phase() {
    let (_, found) = seeds_to_find("gives-up", 30).unwrap();
    assert_eq!(found.failure.kind, FailureKind::Stuck, "{}", found.failure);
    assert!(found.scenario.schedule.faults.len() <= 2, "{}", found.scenario.schedule.to_toml());
}

#[test]
fn an_unknown_mutation_is_refused() {
    let error = run_seed::<Toy>(1, &options(Some("incisor"))).unwrap_err().to_string();
    assert!(error.contains("incisor") && error.contains("no-validation"), "{error}");
}

#[test]
fn a_run_beyond_its_event_limit_fails() {
    let options = SwarmOptions { events: 100, shrink_budget: 0, ..options(None) };
    let found = run_seed::<Toy>(0, &options).unwrap().found.unwrap();
    assert_eq!(found.failure.kind, FailureKind::Stuck);
    assert_eq!(found.failure.detail, "the run did not settle within 100 events");
}
