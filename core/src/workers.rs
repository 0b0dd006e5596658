//! Runs independent parts of a machine's work in parallel, if the host has threads for it.

use std::fmt::Debug;
use std::sync::OnceLock;

/// Runs parts of a machine's work during a step. The machine waits for all of them. The result of a
/// step does not depend on the number of workers.
pub trait Workers: Debug + Send + Sync {
    /// Runs `work` once for each of `0..costs.len()`, in any order and several at once. `costs` has
    /// the number of keys that each touches.
    fn each(&self, costs: &[usize], work: &(dyn Fn(usize) + Sync));
}

/// Runs one part after the other, on the machine's own thread.
#[derive(Clone, Copy, Debug, Default)]
pub struct Alone;

impl Workers for Alone {
    fn each(&self, costs: &[usize], work: &(dyn Fn(usize) + Sync)) {
        (0..costs.len()).for_each(work);
    }
}

/// The results of `work` for each of `items`, in their order. `cost` is the number of keys that an
/// item touches.
///
/// # Panics
/// If `workers` skip an item.
pub fn each<T: Sync, R: Send + Sync>(
    workers: &dyn Workers,
    items: &[T],
    cost: impl Fn(&T) -> usize,
    work: impl Fn(&T) -> R + Sync,
) -> Vec<R> {
    let costs: Vec<usize> = items.iter().map(cost).collect();
    let done: Vec<OnceLock<R>> = items.iter().map(|_| OnceLock::new()).collect();
    workers.each(&costs, &|at| {
        if let (Some(item), Some(slot)) = (items.get(at), done.get(at)) {
            slot.get_or_init(|| work(item));
        }
    });
    let done: Vec<R> = done.into_iter().filter_map(OnceLock::into_inner).collect();
    assert_eq!(done.len(), items.len(), "{workers:?} left something out");
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_come_in_the_order_of_the_items() {
        let items: Vec<usize> = (0..10).collect();
        let squares = each(&Alone, &items, |_| 1, |item| item * item);
        assert_eq!(squares, [0, 1, 4, 9, 16, 25, 36, 49, 64, 81]);
    }
}
