//! Edges from time: an attempt that completed precedes each attempt that was invoked later.
//!
//! Storing every such pair takes quadratic space. Instead, a chain of junctions follows the clock.
//! It has one junction for each invocation that has new completions before it. Attempts lead into
//! the first junction after they complete. The last junction before an attempt's invocation leads
//! to the attempt. So there is a path through junctions from one attempt to another exactly if the
//! first completed before the second was invoked, and there are at most three edges an attempt.

use super::graph::{Builder, Label, Reason};
use crate::history::{History, NEVER};

/// Adds the real-time order of `attempts`, all of which took effect.
pub(super) fn real_time(history: &History, attempts: &[u32], builder: &mut Builder) {
    sweep(history, attempts.to_vec(), Reason::RealTime, builder);
}

/// Adds the real-time order among those of `attempts` that belong to the same process. A client may
/// have several pending transactions, so invocations alone give no order.
pub(super) fn process(history: &History, attempts: &[u32], builder: &mut Builder) {
    let mut attempts = attempts.to_vec();
    attempts.sort_by_key(|attempt| history.process(*attempt));
    for group in attempts.chunk_by(|a, b| history.process(*a) == history.process(*b)) {
        sweep(history, group.to_vec(), Reason::Process, builder);
    }
}

fn sweep(history: &History, attempts: Vec<u32>, reason: Reason, builder: &mut Builder) {
    let mut completed: Vec<u32> =
        attempts.iter().copied().filter(|a| history.complete_us(*a) != NEVER).collect();
    completed.sort_by_key(|attempt| (history.complete_us(*attempt), *attempt));
    let mut invoked = attempts;
    invoked.sort_by_key(|attempt| (history.invoke_us(*attempt), *attempt));

    let mut completed = completed.into_iter().peekable();
    let mut junction = None;
    for attempt in invoked {
        let now = history.invoke_us(attempt);
        let mut is_new = false;
        while let Some(earlier) = completed.next_if(|a| history.complete_us(*a) < now) {
            if !is_new {
                is_new = true;
                let next = builder.junction();
                if let Some(previous) = junction {
                    builder.edge(previous, next, Label::JUNCTION);
                }
                junction = Some(next);
            }
            if let Some(junction) = junction {
                builder.edge(earlier, junction, Label::new(reason, 0));
            }
        }
        if let Some(junction) = junction {
            builder.edge(junction, attempt, Label::JUNCTION);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::{Entry, Status};

    /// Reachability through the chain must equal the definition, for every pair.
    #[test]
    fn junctions_order_exactly_the_pairs_that_time_orders() {
        let mut rng = orthodrome_core::rng::Rng::stream(1, "order", 0);
        for _ in 0..2_000 {
            let mut history = History::new();
            let count = 1 + rng.below(7) as u32;
            for number in 0..count {
                let invoke_us = rng.below(12);
                let status = if rng.chance(4, 5) { Status::Ok } else { Status::Info };
                let entry = Entry {
                    txn: format!("c1.{}", number + 1),
                    process: rng.below(2),
                    region: "VA".into(),
                    priority: "low".into(),
                    stale: false,
                    invoke_us,
                    complete_us: Some(invoke_us + rng.below(6)),
                    status,
                    ops: vec![],
                };
                history.push(&entry).unwrap();
            }
            let attempts: Vec<u32> = history.attempts().collect();
            for is_process in [false, true] {
                let mut builder = Builder::new(count);
                let add = if is_process { process } else { real_time };
                add(&history, &attempts, &mut builder);
                let graph = builder.build();
                assert!(graph.len() <= 2 * count);
                for &from in &attempts {
                    let mut seen = vec![false; graph.len() as usize];
                    let mut todo: Vec<u32> = graph.edges(from).iter().map(|edge| edge.to).collect();
                    while let Some(node) = todo.pop() {
                        // Time is transitive: passing through attempts must add nothing.
                        if !std::mem::replace(&mut seen[node as usize], true) {
                            todo.extend(graph.edges(node).iter().map(|edge| edge.to));
                        }
                    }
                    for &to in &attempts {
                        let is_same = history.process(from) == history.process(to);
                        let is_before = history.complete_us(from) < history.invoke_us(to);
                        let expected = is_before && (is_same || !is_process);
                        assert_eq!(seen[to as usize], expected, "{from} {to}");
                    }
                }
            }
        }
    }
}
