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
    // A transaction that waits for none is in no cycle, and neither is one that waits only for such
    // transactions.
    loop {
        let before = holders.len();
        let waiting: BTreeSet<Xid> = holders.keys().copied().collect();
        holders.retain(|_, of| {
            of.retain(|holder| waiting.contains(holder));
            !of.is_empty()
        });
        if holders.len() == before {
            break;
        }
    }
    // From any remaining transaction, a walk returns to a transaction that it has visited.
    let mut walk: Vec<Xid> = Vec::new();
    let mut at = holders.keys().next().copied()?;
    loop {
        if let Some(from) = walk.iter().position(|xid| *xid == at) {
            return Some(walk.split_off(from));
        }
        walk.push(at);
        at = holders.get(&at)?.first().copied()?;
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
