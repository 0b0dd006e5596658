//! Runs the checker and prints the result.

use std::fmt::{Display, Write as _};
use std::hash::Hash;
use std::time::{Duration, Instant};

use stateright::{Checker, HasDiscoveries, Model};

/// The result of one run.
#[derive(Clone, Debug)]
pub struct Report {
    /// Distinct states.
    pub states: usize,
    /// Steps between them.
    pub steps: usize,
    /// Length of the longest shortest path.
    pub depth: usize,
    /// Time of the run.
    pub took: Duration,
    /// Whether every reachable state was seen.
    pub is_complete: bool,
    /// The property that failed first, and the path to it, one line for each step.
    pub failure: Option<(&'static str, String)>,
}

/// Checks `model` on one thread, breadth first, until a property fails, all states are seen, or
/// `states` steps were taken.
///
/// # Panics
///
/// If the thread of the checker panics.
pub fn check<M>(model: M, steps: Option<usize>) -> Report
where
    M: Model + Clone + Send + Sync + 'static,
    M::State: Clone + PartialEq + Hash + Display + Send + Sync,
    M::Action: Clone + PartialEq + Display + Send + Sync,
{
    let start = Instant::now();
    let mut builder = model.checker().threads(1).finish_when(HasDiscoveries::AnyFailures);
    if let Some(steps) = steps {
        builder = builder.target_state_count(steps);
    }
    let checker = builder.spawn_bfs().join();
    let mut found: Vec<_> = checker.discoveries().into_iter().collect();
    found.sort_by_key(|(name, path)| (path.clone().into_actions().len(), *name));
    let failure = found.into_iter().next().map(|(name, path)| {
        let mut text = String::new();
        for (number, (state, action)) in path.into_vec().into_iter().enumerate() {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "     {state}");
            if let Some(action) = action {
                let _ = writeln!(text, "{:>3}. {action}", number + 1);
            }
        }
        (name, text)
    });
    Report {
        states: checker.unique_state_count(),
        steps: checker.state_count(),
        depth: checker.max_depth(),
        took: start.elapsed(),
        is_complete: failure.is_none() && steps.is_none_or(|most| checker.state_count() < most),
        failure,
    }
}
