//! Deadlocks across sources. Each source looks for cycles among the transactions that wait there,
//! but only the middleware can see cycles that span several sources.
//!
//! Agents report the waits at their sources. Locks are held until their transaction ends. So while
//! both transactions of a reported wait are open, the wait still exists, and a cycle of such waits
//! is a deadlock, however old the reports are.

use std::collections::{BTreeMap, BTreeSet};

use crate::contract::{Wait, Xid};

/// Transactions that wait for each other in a cycle; none if there is no such cycle.
#[must_use]
pub fn cycle(waits: &[Wait]) -> Option<Vec<Xid>> {
    let mut holders: BTreeMap<Xid, BTreeSet<Xid>> = BTreeMap::new();
    for wait in waits {
        holders.entry(wait.waiter).or_default().insert(wait.holder);
    }
    let mut waiters: BTreeMap<Xid, Vec<Xid>> = BTreeMap::new();
    // For each transaction that waits: how many of those that it waits for wait themselves.
    let mut blocked: BTreeMap<Xid, usize> = BTreeMap::new();
    for (&waiter, of) in &holders {
        let waiting = of.iter().filter(|holder| holders.contains_key(holder));
        blocked.insert(waiter, waiting.clone().count());
        for &holder in waiting {
            waiters.entry(holder).or_default().push(waiter);
        }
    }
    // A transaction that waits for none is in no cycle, and neither is one that waits only for such
    // transactions. Each wait is looked at once, however long the queues are.
    let mut free: Vec<Xid> =
        blocked.iter().filter(|(_, count)| **count == 0).map(|(xid, _)| *xid).collect();
    while let Some(ends) = free.pop() {
        blocked.remove(&ends);
        for waiter in waiters.get(&ends).into_iter().flatten() {
            if let Some(count) = blocked.get_mut(waiter) {
                *count -= 1;
                if *count == 0 {
                    free.push(*waiter);
                }
            }
        }
    }
    // From any remaining transaction, a walk returns to a transaction that it has visited.
    let mut walk: Vec<Xid> = Vec::new();
    let mut visited: BTreeMap<Xid, usize> = BTreeMap::new();
    let mut at = blocked.keys().next().copied()?;
    loop {
        if let Some(&from) = visited.get(&at) {
            return Some(walk.split_off(from));
        }
        visited.insert(at, walk.len());
        walk.push(at);
        at = *holders.get(&at)?.iter().find(|holder| blocked.contains_key(holder))?;
    }
}

#[cfg(test)]
mod tests {
    use orthodrome_core::id::NodeId;
    use proptest::prelude::*;

    use super::*;

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
        assert_eq!(found.into_iter().collect::<BTreeSet<_>>(), [xid(2), xid(3), xid(4)].into());
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
                        let waiting: BTreeSet<u64> = left.iter().map(|(waiter, _)| *waiter).collect();
                        let before = left.len();
                        left.retain(|(_, holder)| waiting.contains(holder));
                        prop_assert!(left.len() < before, "{left:?} is stuck");
                    }
                }
            }
        }
    }
}
