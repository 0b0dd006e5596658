//! Clients say below which counter they know the outcomes of all their transactions; nobody need
//! remember those any more (R6).

use std::collections::BTreeMap;
use std::ops::Range;

use orthodrome_core::id::{ClientId, TxnId};
use orthodrome_core::time::{Duration, Time};

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

/// The clients that have let outcomes lie for so long that a leader acknowledges in their stead, and
/// below which counters. `since` says when outcomes were first seen; those that are not kept any more go.
pub(crate) fn overdue(
    since: &mut BTreeMap<TxnId, Time>,
    is_kept: impl Fn(&TxnId) -> bool,
    retention: Duration,
    now: Time,
) -> Vec<(ClientId, u64)> {
    let mut silent: BTreeMap<ClientId, u64> = BTreeMap::new();
    since.retain(|txn, since| {
        let is_kept = is_kept(txn);
        if is_kept && now.since(*since) >= retention {
            let below = silent.entry(txn.client).or_default();
            *below = (*below).max(txn.counter.saturating_add(1));
        }
        is_kept
    });
    silent.into_iter().collect()
}
