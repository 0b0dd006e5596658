//! Clients say below which counter they know the outcomes of all their transactions; nobody need
//! remember those any more (R6).

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use orthodrome_core::id::{ClientId, TxnId};
use orthodrome_core::time::{Duration, Time};

use crate::waiting::BATCH;

/// Notes that `client` knows what became of its transactions below a counter. Returns the names of
/// those that were not known to be acknowledged before.
pub(crate) fn advance(
    acknowledged: &mut BTreeMap<ClientId, u64>,
    client: ClientId,
    below: u64,
) -> Option<Range<TxnId>> {
    let known = acknowledged.entry(client).or_default();
    if *known >= below {
        return None;
    }
    let first = TxnId { client, counter: std::mem::replace(known, below), attempt: 0 };
    Some(first..TxnId { client, counter: below, attempt: 0 })
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
        let mut silent: BTreeMap<ClientId, u64> = BTreeMap::new();
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
