//! Which names of transactions were used at a gateway.
//!
//! Protocols rely on it that one gateway submits a transaction, once, and that a client makes its next
//! attempt when the one before has aborted (ADR 46). A gateway checks both: an id that it takes belongs
//! to a client that it registered in this run, and was not used before.

use std::collections::BTreeMap;

use orthodrome_core::txn::AbortReason;
use orthodrome_core::{ClientId, Outcome, Txn, TxnId};

/// So many counters of one client are remembered one by one.
const COUNTERS_MAX: usize = 4_096;
/// The same once the gateway remembers many.
const COUNTERS_FEW: usize = 16;
/// So many are many.
const MANY: usize = 1 << 20;

/// The names that clients of this gateway have used.
#[derive(Debug, Default)]
pub(super) struct Used {
    clients: BTreeMap<ClientId, Counters>,
    /// Counters of all clients together.
    counters: usize,
}

/// The names that one client has used.
#[derive(Debug, Default)]
struct Counters {
    /// All below count as used.
    below: u64,
    /// The last attempt of each, from there on.
    last: BTreeMap<u64, Attempt>,
}

/// The last attempt at a transaction.
#[derive(Clone, Copy, Debug)]
struct Attempt {
    number: u32,
    /// True if this gateway has said that it aborted, or it only reads.
    is_aborted: bool,
}

impl Used {
    /// Uses the name of a transaction. False if it cannot be used any more.
    pub(super) fn take(&mut self, txn: &Txn) -> bool {
        let TxnId { client, counter, attempt, .. } = txn.id;
        let Self { clients, counters } = self;
        let used = clients.entry(client).or_default();
        let before = used.last.len();
        if used.below < txn.acknowledged_below {
            used.below = txn.acknowledged_below;
            used.last = used.last.split_off(&used.below);
        }
        let is_new = counter >= used.below
            && used.last.get(&counter).is_none_or(|last| last.is_aborted && last.number < attempt);
        if is_new {
            let is_aborted = txn.is_read_only();
            used.last.insert(counter, Attempt { number: attempt, is_aborted });
        }
        let most = if *counters < MANY { COUNTERS_MAX } else { COUNTERS_FEW };
        while used.last.len() > most {
            let Some((oldest, _)) = used.last.pop_first() else { break };
            used.below = oldest + 1;
        }
        *counters = (*counters + used.last.len()).saturating_sub(before);
        // It may have been older than all that are remembered.
        is_new && counter >= used.below
    }

    /// This gateway says how an attempt ended.
    pub(super) fn finish(&mut self, txn: TxnId, outcome: Outcome) {
        let Outcome::Aborted(reason) = outcome else { return };
        let Some(used) = self.clients.get_mut(&txn.client) else { return };
        let Some(last) = used.last.get_mut(&txn.counter) else { return };
        if last.number != txn.attempt {
            return;
        }
        last.is_aborted = true;
        // A client repeats what had no effect because the cluster was busy.
        if reason == AbortReason::Overload {
            match last.number.checked_sub(1) {
                Some(before) => last.number = before,
                None => {
                    used.last.remove(&txn.counter);
                    self.counters = self.counters.saturating_sub(1);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use orthodrome_core::id::RegionId;
    use orthodrome_core::{Key, Timestamp};

    use super::*;

    fn txn(counter: u64, attempt: u32, acknowledged_below: u64) -> Txn {
        let id = TxnId { attempt, ..TxnId::new(ClientId(7), counter) };
        let keys = vec![Key::from("a")];
        let txn = Txn::interactive(id, RegionId(0), keys.clone(), keys);
        Txn { acknowledged_below, ..txn }
    }

    #[test]
    fn a_read_is_repeated_under_the_next_attempt() {
        let mut used = Used::default();
        let read = |attempt| {
            let id = TxnId { attempt, ..TxnId::new(ClientId(7), 1) };
            Txn::read_only(id, RegionId(0), vec![Key::from("a")])
        };
        assert!(used.take(&read(0)) && used.take(&read(1)) && !used.take(&read(1)));
        assert!(used.take(&txn(1, 2, 0)) && !used.take(&read(3)), "it may write");
    }

    #[test]
    fn a_name_is_used_once() {
        let mut used = Used::default();
        assert!(used.take(&txn(2, 0, 0)) && used.take(&txn(1, 0, 0)));
        assert!(!used.take(&txn(2, 0, 0)) && !used.take(&txn(1, 0, 0)));
        used.finish(txn(1, 0, 0).id, Outcome::Committed(Timestamp(1)));
        used.finish(txn(2, 0, 0).id, Outcome::Unknown);
        assert!(!used.take(&txn(2, 0, 0)) && !used.take(&txn(1, 0, 0)));
    }

    #[test]
    fn the_next_attempt_follows_an_abort() {
        let mut used = Used::default();
        let aborted = Outcome::Aborted(AbortReason::Conflict);
        assert!(used.take(&txn(1, 0, 0)));
        assert!(!used.take(&txn(1, 1, 0)), "the first is pending");
        used.finish(txn(1, 0, 0).id, aborted);
        assert!(!used.take(&txn(1, 0, 0)), "it was used");
        assert!(used.take(&txn(1, 3, 0)), "numbers may be left out");
        used.finish(txn(1, 0, 0).id, aborted);
        assert!(!used.take(&txn(1, 4, 0)), "an old answer says nothing of the last attempt");
        used.finish(txn(1, 3, 0).id, Outcome::Committed(Timestamp(1)));
        assert!(!used.take(&txn(1, 4, 0)), "it committed");
    }

    #[test]
    fn what_was_shed_is_repeated_under_its_name() {
        let mut used = Used::default();
        let shed = Outcome::Aborted(AbortReason::Overload);
        for _ in 0..3 {
            assert!(used.take(&txn(1, 0, 0)));
            used.finish(txn(1, 0, 0).id, shed);
        }
        assert!(used.take(&txn(1, 1, 0)));
        used.finish(txn(1, 1, 0).id, shed);
        assert!(!used.take(&txn(1, 0, 0)) && used.take(&txn(1, 1, 0)));
    }

    #[test]
    fn acknowledged_counters_and_too_many_are_remembered_together() {
        let mut used = Used::default();
        assert!(used.take(&txn(1, 0, 0)) && used.take(&txn(9, 0, 5)));
        assert!(!used.take(&txn(4, 0, 0)) && used.take(&txn(5, 0, 0)));
        assert_eq!(used.counters, 2);
        for counter in 10..=10_000 {
            assert!(used.take(&txn(counter, 0, 5)));
        }
        assert_eq!(used.counters, COUNTERS_MAX);
        assert!(!used.take(&txn(9, 0, 5)) && !used.take(&txn(6, 0, 5)), "they are too old");
        assert_eq!(used.counters, COUNTERS_MAX);
    }
}
