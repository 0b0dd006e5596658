//! Deadlocks across sources. Each source looks for cycles among the transactions that wait there,
//! but only the middleware can see cycles that span several sources.
//!
//! Agents report the waits at their sources. Locks are held until their transaction ends. So while
//! both transactions of a reported wait are open, the wait still exists, and a cycle of such waits
//! is a deadlock, however old the reports are.

use crate::contract::{Wait, Xid};

/// Transactions that wait for each other in a cycle; none if there is no such cycle. Waits of
/// transactions that are not open, or for such transactions, are over.
#[must_use]
pub fn cycle<'a>(
    waits: impl Iterator<Item = &'a Wait> + Clone,
    is_open: impl Fn(&Xid) -> bool,
) -> Option<Vec<Xid>> {
    // A queue has many waits, and few transactions: each is looked up once.
    let mut waiters: Vec<Xid> = waits.clone().map(|wait| wait.waiter).collect();
    waiters.sort_unstable();
    waiters.dedup();
    waiters.retain(is_open);
    // Whoever waits for none of these is in no cycle. By waiter, then by holder.
    let place = |xid: &Xid| waiters.binary_search(xid).ok();
    let mut last = None;
    let mut edges: Vec<(usize, usize)> = Vec::new();
    for wait in waits {
        // The waits of one transaction follow each other.
        let waiter = match last {
            Some((xid, waiter)) if xid == wait.waiter => waiter,
            Some(_) | None => place(&wait.waiter),
        };
        last = Some((wait.waiter, waiter));
        if let (Some(waiter), Some(holder)) = (waiter, place(&wait.holder)) {
            edges.push((waiter, holder));
        }
    }
    edges.sort_unstable();
    edges.dedup();
    let holders = Lists::new(waiters.len(), &edges);
    let mut turned: Vec<(usize, usize)> = edges.iter().map(|&(from, to)| (to, from)).collect();
    turned.sort_unstable();
    let waiting = Lists::new(waiters.len(), &turned);
    // For each transaction: how many of those that it waits for wait themselves. A transaction that
    // waits for none is in no cycle, and neither is one that waits only for such transactions. Each
    // wait is looked at once, however long the queues are.
    let mut blocked: Vec<usize> = (0..waiters.len()).map(|at| holders.of(at).len()).collect();
    let mut free: Vec<usize> = (0..waiters.len()).filter(|&at| holders.of(at).is_empty()).collect();
    while let Some(ends) = free.pop() {
        for &(_, waiter) in waiting.of(ends) {
            let Some(count) = blocked.get_mut(waiter) else { continue };
            *count -= 1;
            if *count == 0 {
                free.push(waiter);
            }
        }
    }
    // From any remaining transaction, a walk returns to a transaction that it has visited.
    let is_blocked = |at: usize| blocked.get(at).is_some_and(|count| *count > 0);
    let mut walk: Vec<usize> = Vec::new();
    let mut visited: Vec<Option<usize>> = vec![None; waiters.len()];
    let mut at = (0..waiters.len()).find(|&at| is_blocked(at))?;
    let found = loop {
        let visit = visited.get_mut(at)?;
        if let Some(from) = *visit {
            break walk.split_off(from);
        }
        *visit = Some(walk.len());
        walk.push(at);
        at = holders.of(at).iter().map(|(_, holder)| *holder).find(|&holder| is_blocked(holder))?;
    };
    Some(found.into_iter().filter_map(|at| waiters.get(at).copied()).collect())
}

/// Sorted pairs, by their first.
struct Lists<'a> {
    pairs: &'a [(usize, usize)],
    /// Where the pairs of each begin, and the end.
    starts: Vec<usize>,
}

impl<'a> Lists<'a> {
    /// For firsts below `count`.
    fn new(count: usize, pairs: &'a [(usize, usize)]) -> Self {
        let mut starts = Vec::with_capacity(count + 1);
        for (at, (first, _)) in pairs.iter().enumerate() {
            starts.resize((first + 1).max(starts.len()), at);
        }
        starts.resize(count + 1, pairs.len());
        Self { pairs, starts }
    }

    fn of(&self, first: usize) -> &'a [(usize, usize)] {
        let start = self.starts.get(first).copied().unwrap_or_default();
        let end = self.starts.get(first + 1).copied().unwrap_or_default();
        self.pairs.get(start..end).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {

    use orthodrome_core::id::NodeId;
    use orthodrome_core::ordered::OrdSet;
    use proptest::prelude::*;

    use super::*;

    fn cycle(waits: &[Wait]) -> Option<Vec<Xid>> {
        super::cycle(waits.iter(), |_| true)
    }

    fn xid(number: u64) -> Xid {
        Xid { middleware: NodeId(1), epoch: 1, number }
    }

    fn waits(of: &[(u64, u64)]) -> Vec<Wait> {
        of.iter()
            .map(|&(waiter, holder)| Wait { waiter: xid(waiter), holder: xid(holder) })
            .collect()
    }

    #[test]
    fn cycles_are_found_and_queues_are_not() {
        assert_eq!(cycle(&[]), None);
        assert_eq!(cycle(&waits(&[(1, 2), (2, 3), (1, 3), (4, 3)])), None);
        assert_eq!(cycle(&waits(&[(1, 2), (2, 1)])), Some(vec![xid(1), xid(2)]));
        let found = cycle(&waits(&[(1, 2), (2, 3), (3, 4), (4, 2), (3, 9)])).unwrap();
        assert_eq!(found.into_iter().collect::<OrdSet<_>>(), [xid(2), xid(3), xid(4)].into());
    }

    #[test]
    fn waits_of_what_is_not_open_are_over() {
        let of = waits(&[(1, 2), (2, 1), (3, 4), (4, 3)]);
        let open = |ended: u64| super::cycle(of.iter(), |xid| xid.number != ended);
        assert_eq!(open(1), Some(vec![xid(3), xid(4)]));
        assert_eq!(open(4), Some(vec![xid(1), xid(2)]));
    }

    /// The time for a queue grew with the square of its length, and with the cube if each transaction
    /// waits for all before it: a middleware with hundreds of waits did nothing else.
    #[test]
    fn long_queues_are_searched_once() {
        let queue: Vec<_> = (0..50_000).map(|number| (number + 1, number)).collect();
        assert_eq!(cycle(&waits(&queue)), None);
        let closed = [&queue[..], &[(0, 50_000)]].concat();
        assert_eq!(cycle(&waits(&closed)).map(|found| found.len()), Some(50_001));
        let all = (0..300).flat_map(|waiter| (0..waiter).map(move |holder| (waiter, holder)));
        assert_eq!(cycle(&waits(&all.collect::<Vec<_>>())), None);
    }

    proptest! {
        /// Each transaction of a cycle waits for the next. If no cycle is found, the transactions
        /// can end one after the other.
        #[test]
        fn a_cycle_is_one_and_none_is_overlooked(of in prop::collection::vec((0..8_u64, 0..8_u64), 0..20)) {
            let of: Vec<_> = of.into_iter().filter(|(waiter, holder)| waiter != holder).collect();
            match cycle(&waits(&of)) {
                Some(found) => {
                    for (at, waiter) in found.iter().enumerate() {
                        let next = found[(at + 1) % found.len()];
                        prop_assert!(of.contains(&(waiter.number, next.number)));
                    }
                }
                None => {
                    let mut left = of.clone();
                    while !left.is_empty() {
                        let waiting: OrdSet<u64> = left.iter().map(|(waiter, _)| *waiter).collect();
                        let before = left.len();
                        left.retain(|(_, holder)| waiting.contains(holder));
                        prop_assert!(left.len() < before, "{left:?} is stuck");
                    }
                }
            }
        }
    }
}
