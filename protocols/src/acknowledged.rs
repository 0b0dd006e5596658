//! Each client sends the counter below which it knows the outcomes of all its transactions. No node
//! needs to remember those outcomes any more (R6).

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use orthodrome_core::id::{ClientId, TxnId};
use orthodrome_core::time::{Duration, Time};

use crate::waiting::BATCH;

/// Below which counters clients know the outcomes of their transactions, for so many clients at most: as
/// many as there are, or the newest of each gateway. What an older one did is too old to tell, so it counts as
/// acknowledged, and a client that is still there has to register again. A function of the calls
/// of [`advance`] alone, as replicated state must be.
pub(crate) type Acknowledged = BTreeMap<ClientId, u64>;

/// Clients that are remembered, at most; some 2 MiB.
const CLIENTS_MAX: usize = 1 << 16;

/// If there are more, so many are kept.
const CLIENTS_KEPT: usize = CLIENTS_MAX / 4 * 3;

/// Notes that `client` knows what became of its transactions below a counter. Returns the names of
/// those that were not known to be acknowledged before: of this client, and of those that are remembered
/// no more.
pub(crate) fn advance(
    acknowledged: &mut Acknowledged,
    client: ClientId,
    below: u64,
) -> Vec<Range<TxnId>> {
    if is_retired(acknowledged, client) {
        return Vec::new();
    }
    let mut over = Vec::from_iter(advance_one(acknowledged, client, below));
    if acknowledged.len() > CLIENTS_MAX {
        over.extend(retire(acknowledged, CLIENTS_KEPT));
    }
    over
}

/// The same without a bound on the number of clients.
pub(crate) fn advance_one(
    acknowledged: &mut Acknowledged,
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

/// Below which counter `client` knows the outcomes, or is too old to be told.
pub(crate) fn below(acknowledged: &Acknowledged, client: ClientId) -> u64 {
    let known = acknowledged.get(&client).copied();
    known.unwrap_or(if is_retired(acknowledged, client) { u64::MAX } else { 0 })
}

/// True if the client of `txn` knows what became of it, or is too old to be told.
pub(crate) fn is_acknowledged(acknowledged: &Acknowledged, txn: TxnId) -> bool {
    txn.counter < below(acknowledged, txn.client)
}

/// True if a client is older than all that are remembered of its gateway, and so many are remembered that
/// some may have been dropped.
fn is_retired(acknowledged: &Acknowledged, client: ClientId) -> bool {
    if acknowledged.len() < CLIENTS_KEPT {
        return false;
    }
    let (first, last) = client.of_same_gateway();
    acknowledged.range(first..=client).next().is_none()
        && acknowledged.range(client..=last).next().is_some()
}

/// Drops the oldest clients of the gateways that have most, until so many are left. One of each gateway
/// stays.
fn retire(acknowledged: &mut Acknowledged, kept: usize) -> Vec<Range<TxnId>> {
    let mut gateways: BTreeMap<ClientId, usize> = BTreeMap::new();
    for client in acknowledged.keys() {
        *gateways.entry(client.of_same_gateway().0).or_default() += 1;
    }
    let mut over = Vec::new();
    while acknowledged.len() > kept
        && let Some((&first, count)) = gateways.iter_mut().max_by_key(|(_, count)| **count)
        && *count > 1
        && let Some((&client, &known)) = acknowledged.range(first..).next()
    {
        *count -= 1;
        acknowledged.remove(&client);
        over.push(
            TxnId { client, counter: known, attempt: 0 }..TxnId {
                client,
                counter: u64::MAX,
                attempt: u32::MAX,
            },
        );
    }
    over
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

    /// With one entry for each client that ever registered, the state grew for ever.
    #[test]
    fn clients_are_remembered_up_to_a_number_and_older_ones_are_too_old() {
        let of = |gateway: u64, number: u64| ClientId(gateway << ClientId::NUMBER_BITS | number);
        let mut acknowledged = Acknowledged::new();
        advance(&mut acknowledged, of(1, 5), 7);
        let mut dropped = Vec::new();
        for number in 10..10 + 4 * CLIENTS_MAX as u64 {
            let over = advance(&mut acknowledged, of(2, number), 3);
            assert_eq!(over[0], TxnId::new(of(2, number), 0)..TxnId::new(of(2, number), 3));
            dropped.extend(over.into_iter().skip(1));
            assert!(acknowledged.len() <= CLIENTS_MAX);
        }
        let oldest = of(2, 10);
        assert_eq!(dropped[0].start, TxnId::new(oldest, 3));
        assert!(dropped[0].contains(&TxnId::new(oldest, 1 << 40)));
        let is_over = |acknowledged: &_, client, counter| {
            is_acknowledged(acknowledged, TxnId::new(client, counter))
        };
        assert!(is_over(&acknowledged, oldest, 1_000), "it is too old to tell");
        let newest = of(2, 9 + 4 * CLIENTS_MAX as u64);
        assert!(is_over(&acknowledged, newest, 2) && !is_over(&acknowledged, newest, 3));
        let next = of(2, 10 + 4 * CLIENTS_MAX as u64);
        assert!(!is_over(&acknowledged, next, 0), "it is new");
        assert!(!is_over(&acknowledged, of(1, 5), 7), "others register elsewhere");
        assert!(!is_over(&acknowledged, of(3, 1), 0), "nothing is known of its gateway");
        assert_eq!(advance(&mut acknowledged, oldest, 9), [], "nothing brings it back");
        assert!(!acknowledged.contains_key(&oldest));
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
