//! Each client sends the counter below which it knows the outcomes of all its transactions. No node
//! needs to remember those outcomes any more (R6).

use std::collections::VecDeque;
use std::ops::Range;

use orthodrome_core::id::{ClientId, TxnId};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::time::{Duration, Time};

use crate::waiting::BATCH;

/// Below which counters clients know the outcomes of their transactions. It has an entry for each
/// client that ever registered: nobody can know that a client without a transaction is gone. To drop
/// an entry is not safe while a transaction of that client may be pending somewhere: its votes, which
/// may have been counted already, would pass for those of a transaction that has ended everywhere.
pub(crate) type Acknowledged = OrdMap<ClientId, u64>;

/// Notes that `client` knows the outcomes of its transactions below a counter. Returns the names of
/// those that were not known to be acknowledged before.
pub(crate) fn advance(
    acknowledged: &mut Acknowledged,
    client: ClientId,
    below: u64,
) -> Option<Range<TxnId>> {
    let known = acknowledged.entry(client).or_default();
    if *known >= below {
        return None;
    }
    let first = TxnId::new(client, std::mem::replace(known, below));
    Some(first..TxnId::new(client, below))
}

/// Below which counter `client` knows the outcomes.
pub(crate) fn below(acknowledged: &Acknowledged, client: ClientId) -> u64 {
    acknowledged.get(&client).copied().unwrap_or(0)
}

/// True if the client of `txn` knows its outcome.
pub(crate) fn is_acknowledged(acknowledged: &Acknowledged, txn: TxnId) -> bool {
    txn.counter < below(acknowledged, txn.client)
}

/// Outcomes that a group keeps for clients that have not acknowledged them: with their names some 30 MiB.
const OUTCOMES_MAX: usize = 1 << 20;

/// Outcomes that a leader keeps for clients to acknowledge, in the order in which it first saw them.
#[derive(Debug, Default)]
pub struct Kept {
    /// Oldest first. Some are not kept any more: they go when they come to the front, or when there are as
    /// many as those that are kept, so that a look at what is overdue does not look at everything.
    since: VecDeque<(Time, TxnId)>,
    /// How many were kept when all were last looked at.
    looked: usize,
}

impl Kept {
    /// A new leader finds these.
    pub(crate) fn new(kept: impl IntoIterator<Item = TxnId>, now: Time) -> Self {
        let since: VecDeque<_> = kept.into_iter().map(|txn| (now, txn)).collect();
        Self { looked: since.len(), since }
    }

    /// An outcome is kept from now on.
    pub(crate) fn insert(&mut self, txn: TxnId, now: Time) {
        self.since.push_back((now, txn));
    }

    /// The clients that have let outcomes lie for so long that a leader acknowledges in their stead, and
    /// below which counters. If there are more than [`OUTCOMES_MAX`], the oldest have lain for too long,
    /// whatever the time.
    pub(crate) fn overdue(
        &mut self,
        is_kept: impl Fn(&TxnId) -> bool,
        retention: Duration,
        now: Time,
    ) -> Vec<(ClientId, u64)> {
        self.overdue_among(OUTCOMES_MAX, is_kept, retention, now)
    }

    fn overdue_among(
        &mut self,
        most: usize,
        is_kept: impl Fn(&TxnId) -> bool,
        retention: Duration,
        now: Time,
    ) -> Vec<(ClientId, u64)> {
        if self.since.len() > most || self.since.len() > self.looked.saturating_mul(2) + BATCH {
            self.since.retain(|(_, txn)| is_kept(txn));
            self.looked = self.since.len();
        }
        while self.since.front().is_some_and(|(_, txn)| !is_kept(txn)) {
            self.since.pop_front();
        }
        let too_many = self.since.len().checked_sub(most + 1);
        let newest_too_many = too_many.and_then(|nth| self.since.get(nth)).map(|(at, _)| *at);
        let mut silent: OrdMap<ClientId, u64> = OrdMap::new();
        for (since, txn) in &self.since {
            let is_too_many = newest_too_many.is_some_and(|newest| *since <= newest);
            if !is_too_many && now.since(*since) < retention {
                break;
            }
            if is_kept(txn) {
                let below = silent.entry(txn.client).or_default();
                *below = (*below).max(txn.counter.saturating_add(1));
            }
        }
        // The others are overdue next time, too.
        silent.into_iter().take(BATCH).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Entries of clients that were older than the newest 49 152 were dropped, and all that such a
    /// client did counted as acknowledged: also what it had pending.
    #[test]
    fn nothing_that_other_clients_do_acknowledges_a_transaction() {
        let of = |number: u64| ClientId(2 << ClientId::NUMBER_BITS | number);
        let mut acknowledged = Acknowledged::new();
        let pending = TxnId::new(of(0), 7);
        advance(&mut acknowledged, of(0), 7);
        for number in 2..100_000 {
            assert!(advance(&mut acknowledged, of(number), 3).is_some());
        }
        assert!(!is_acknowledged(&acknowledged, pending));
        assert!(is_acknowledged(&acknowledged, TxnId::new(of(0), 6)));
        assert!(
            !is_acknowledged(&acknowledged, TxnId::new(of(1), 0)),
            "its first transaction here"
        );
    }

    #[test]
    fn outcomes_are_kept_for_a_time_and_up_to_a_number() {
        let name = |client, counter| TxnId::new(ClientId(client), counter);
        let mut kept = Kept::default();
        (0..10).for_each(|n| kept.insert(name(n % 2, n), Time(1_000 + n)));
        let retention = Duration::from_nanos(100);
        let is_kept = |txn: &TxnId| txn.counter != 9;
        let mut ask = |most, now| kept.overdue_among(most, is_kept, retention, Time(now));
        assert_eq!(ask(9, 1_010), [], "9 are as many as may be");
        assert_eq!(ask(6, 1_010), [(ClientId(0), 3), (ClientId(1), 2)], "the three oldest");
        assert_eq!(ask(9, 1_101), [(ClientId(0), 1), (ClientId(1), 2)], "those of long ago");
        assert_eq!(kept.since.len(), 9, "what is not kept any more has gone");
    }
}
