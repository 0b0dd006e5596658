//! Shrinking: finds a smaller list that still causes a failure, and a simpler scenario that still
//! fails.

use orthodrome_core::ordered::OrdSet;

use crate::fault::{self, Fault};
use crate::simulation::{Failure, FailureKind};
use crate::swarm::{Found, Scenario, ScenarioResult, SwarmError};
use crate::unusual::Unusual;

/// Shrinks a failing scenario while it fails in the same way. It leaves out unusual draws one by
/// one, then faults, then more draws with the remaining faults fixed, then transactions. `draw`
/// draws the seed again without some of its draws. If a scenario cannot be drawn or set up, it is
/// not simpler: its error says nothing about the failure.
pub(crate) fn shrink(
    scenario: &Scenario,
    original: Failure,
    budget: u32,
    draw: impl Fn(&OrdSet<Unusual>) -> Result<Scenario, SwarmError>,
    run: impl Fn(&Scenario) -> Result<ScenarioResult, SwarmError>,
) -> Found {
    let kind = original.kind;
    let fails =
        |candidate: &Scenario| run(candidate).ok()?.failure.filter(|failure| failure.kind == kind);
    let mut left = budget;
    let mut found =
        Found { failure: original.clone(), original, scenario: scenario.clone(), trials: 0 };
    // Two runs that differ cannot be compared with a third.
    if kind == FailureKind::Twins {
        return found;
    }
    leave_out(&mut found, &mut left, &draw, &fails, |_| true);
    let mut failure = found.failure.clone();
    let faults = minimize(&found.scenario.schedule.faults, &mut left, |faults| {
        let mut candidate = found.scenario.clone();
        candidate.schedule.faults = faults.to_vec();
        let smaller = fails(&candidate);
        failure = smaller.clone().unwrap_or_else(|| failure.clone());
        smaller.is_some()
    });
    (found.scenario.schedule.faults, found.failure) = (faults, failure);
    let schedule = found.scenario.schedule.clone();
    let draw =
        |without: &OrdSet<Unusual>| Ok(Scenario { schedule: schedule.clone(), ..draw(without)? });
    // The draw of lost disks decides which other servers may die.
    let is_replaced = |entry: &fault::Entry| matches!(entry.fault, Fault::Replace { .. });
    let loses_disks = schedule.faults.iter().any(is_replaced);
    let may_go = |unusual| unusual != Unusual::Replaced || !loses_disks;
    leave_out(&mut found, &mut left, &draw, &fails, may_go);
    let mut transactions = found.scenario.options.load.transactions_max;
    while transactions > 1 && left > 0 {
        left -= 1;
        let mut candidate = found.scenario.clone();
        candidate.options.load.transactions_max = transactions / 2;
        let Some(failure) = fails(&candidate) else { break };
        (found.scenario, found.failure) = (candidate, failure);
        transactions /= 2;
    }
    found.scenario.schedule.about = format!("seed {}: {}", scenario.seed, found.failure);
    found.trials = budget - left;
    found
}

/// Leaves out each unusual draw that `may_go` and without which the scenario still fails.
fn leave_out(
    found: &mut Found,
    left: &mut u32,
    draw: &impl Fn(&OrdSet<Unusual>) -> Result<Scenario, SwarmError>,
    fails: &impl Fn(&Scenario) -> Option<Failure>,
    may_go: impl Fn(Unusual) -> bool,
) {
    let unusual = found.scenario.unusual.clone();
    for unusual in unusual.into_iter().filter(|&unusual| may_go(unusual)) {
        let mut without = found.scenario.without.clone();
        without.insert(unusual);
        let Ok(candidate) = draw(&without) else { continue };
        if *left == 0 {
            return;
        }
        *left -= 1;
        if let Some(failure) = fails(&candidate) {
            (found.scenario, found.failure) = (candidate, failure);
        }
    }
}

/// Shrinks `items` while `fails` returns true for the rest, in at most `budget` trials: delta
/// debugging (Zeller, Hildebrandt: "Simplifying and Isolating Failure-Inducing Input", 2002, fig.
/// 7). If the budget suffices, no single item of the result can be left out.
pub fn minimize<T: Clone>(
    items: &[T],
    budget: &mut u32,
    mut fails: impl FnMut(&[T]) -> bool,
) -> Vec<T> {
    let mut kept = items.to_vec();
    let mut parts = 2;
    let mut test = |candidate: &[T], budget: &mut u32| {
        *budget = budget.saturating_sub(1);
        fails(candidate)
    };
    // Most failures need no item, or only one: try that first.
    if !kept.is_empty() && *budget > 0 && test(&[], budget) {
        return Vec::new();
    }
    while kept.len() >= 2 && *budget > 0 {
        let size = kept.len().div_ceil(parts);
        let starts = (0..kept.len()).step_by(size);
        let mut smaller = None;
        for start in starts {
            if *budget == 0 {
                break;
            }
            let part: Vec<T> = kept.iter().skip(start).take(size).cloned().collect();
            let rest: Vec<T> =
                kept.iter().take(start).chain(kept.iter().skip(start + size)).cloned().collect();
            // With two parts, each is the other's complement.
            if parts > 2 && test(&part, budget) {
                smaller = Some((part, 2));
                break;
            }
            if *budget > 0 && test(&rest, budget) {
                smaller = Some((rest, (parts - 1).max(2)));
                break;
            }
        }
        match smaller {
            Some((list, next)) => {
                kept = list;
                parts = next;
            }
            None if parts >= kept.len() => break,
            None => parts = (parts * 2).min(kept.len()),
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_needed_is_found_and_nothing_else(
            needed in proptest::collection::btree_set(0_u32..40, 0..4),
            count in 40_u32..60,
        ) {
            let items: Vec<u32> = (0..count).collect();
            let mut budget = 2_000;
            let fails = |list: &[u32]| needed.iter().all(|item| list.contains(item));
            let found = minimize(&items, &mut budget, fails);
            prop_assert_eq!(found, needed.into_iter().collect::<Vec<_>>());
        }
    }

    #[test]
    fn the_budget_holds_and_the_result_still_fails() {
        let items: Vec<u32> = (0..1_000).collect();
        let (mut budget, mut trials) = (15, 0);
        let found = minimize(&items, &mut budget, |list| {
            trials += 1;
            list.contains(&3) && list.contains(&997)
        });
        assert!(trials <= 15 && found.contains(&3) && found.contains(&997));
        assert!(found.len() < 1_000);
    }
}
