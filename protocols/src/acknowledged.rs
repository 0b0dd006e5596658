//! Each client sends the counter below which it knows the outcomes of all its transactions. No node
//! needs to remember those outcomes any more (R6).

use std::collections::BTreeMap;
use std::ops::Range;

use orthodrome_core::id::{ClientId, TxnId};
use orthodrome_core::time::{Duration, Time};

use crate::waiting::BATCH;

/// Records that `client` knows the outcomes of its transactions below a counter. Returns the names
/// that were not known to be acknowledged before.
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

/// The most outcomes that a group keeps for clients that have not acknowledged them; with their
/// names some 30 MiB.
const OUTCOMES_MAX: usize = 1 << 20;

/// The clients that have not acknowledged outcomes for so long that a leader does it for them, with
/// the counters. `since` has the time when each outcome was first seen; outcomes that are not kept
/// any more are removed from it. If there are more than [`OUTCOMES_MAX`], the oldest are overdue,
/// whatever their age.
pub(crate) fn overdue(
    since: &mut BTreeMap<TxnId, Time>,
    is_kept: impl Fn(&TxnId) -> bool,
    retention: Duration,
    now: Time,
) -> Vec<(ClientId, u64)> {
    overdue_among(OUTCOMES_MAX, since, is_kept, retention, now)
}

fn overdue_among(
    most: usize,
    since: &mut BTreeMap<TxnId, Time>,
    is_kept: impl Fn(&TxnId) -> bool,
    retention: Duration,
    now: Time,
) -> Vec<(ClientId, u64)> {
    since.retain(|txn, _| is_kept(txn));
    let newest_too_many = since.len().checked_sub(most + 1).map(|nth| {
        let mut times: Vec<Time> = since.values().copied().collect();
        *times.select_nth_unstable(nth).1
    });
    let mut silent: BTreeMap<ClientId, u64> = BTreeMap::new();
    for (txn, since) in since {
        let is_too_many = newest_too_many.is_some_and(|newest| *since <= newest);
        if is_too_many || now.since(*since) >= retention {
            let below = silent.entry(txn.client).or_default();
            *below = (*below).max(txn.counter.saturating_add(1));
        }
    }
    // The others are overdue next time, too.
    silent.into_iter().take(BATCH).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_are_kept_for_a_time_and_up_to_a_number() {
        let name = |client, counter| TxnId::new(ClientId(client), counter);
        let mut since: BTreeMap<TxnId, Time> =
            (0..10).map(|n| (name(n % 2, n), Time(1_000 + n))).collect();
        let retention = Duration::from_nanos(100);
        let is_kept = |txn: &TxnId| txn.counter != 9;
        let mut ask = |most, now| overdue_among(most, &mut since, is_kept, retention, Time(now));
        assert_eq!(ask(9, 1_010), [], "9 are as many as may be");
        assert_eq!(ask(6, 1_010), [(ClientId(0), 3), (ClientId(1), 2)], "the three oldest");
        assert_eq!(ask(9, 1_101), [(ClientId(0), 1), (ClientId(1), 2)], "those of long ago");
        assert_eq!(since.len(), 9, "what is not kept any more has gone");
    }
}
