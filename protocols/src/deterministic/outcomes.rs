//! The results that a server remembers of transactions that have run, for clients that may ask.
//!
//! A client that continues acknowledges its outcomes itself. The outcomes of a client that has left
//! would stay for ever, so both reads and outcomes are bounded. First the reads of a transaction
//! are forgotten, then its outcome, the oldest first. A later request is answered with "too old".

use std::ops::Range;

use orthodrome_core::id::TxnId;
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::time::Timestamp;

use super::message::Ended;

/// The bounds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bounds {
    /// The most bytes of reads.
    pub reads_bytes: usize,
    /// The most transactions.
    pub outcomes: usize,
}

impl Default for Bounds {
    fn default() -> Self {
        Self { reads_bytes: 32 << 20, outcomes: 262_144 }
    }
}

/// The outcomes of transactions.
#[derive(Debug, Default)]
pub struct Outcomes {
    ended: OrdMap<TxnId, Ended>,
    /// Transactions by the timestamps of their positions.
    order: OrdSet<(Timestamp, TxnId)>,
    /// Transactions whose reads are remembered.
    read: OrdSet<(Timestamp, TxnId)>,
    /// The size of those reads in bytes.
    bytes: usize,
    bounds: Bounds,
}

impl Outcomes {
    /// No outcomes.
    #[must_use]
    pub fn new(bounds: Bounds) -> Self {
        Self { bounds, ..Self::default() }
    }

    /// The bounds.
    #[must_use]
    pub fn bounds(&self) -> Bounds {
        self.bounds
    }

    /// A transaction has run.
    pub fn insert(&mut self, txn: TxnId, ended: Ended) {
        self.remove(txn);
        let at = (ended.stamp, txn);
        self.order.insert(at);
        if ended.reads_size() > 0 {
            self.bytes += ended.reads_size();
            self.read.insert(at);
        }
        self.ended.insert(txn, ended);
        self.forget();
    }

    /// Forgets the oldest results while a bound is exceeded.
    fn forget(&mut self) {
        while self.bytes > self.bounds.reads_bytes
            && let Some((_, txn)) = self.read.pop_first()
            && let Some(ended) = self.ended.get_mut(&txn)
        {
            self.bytes = self.bytes.saturating_sub(ended.reads_size());
            ended.reads = None;
        }
        while self.order.len() > self.bounds.outcomes
            && let Some(&(_, txn)) = self.order.first()
        {
            self.remove(txn);
        }
    }

    fn remove(&mut self, txn: TxnId) {
        if let Some(ended) = self.ended.remove(&txn) {
            self.order.remove(&(ended.stamp, txn));
            if self.read.remove(&(ended.stamp, txn)) {
                self.bytes = self.bytes.saturating_sub(ended.reads_size());
            }
        }
    }

    /// The clients of these transactions know their outcomes.
    pub fn acknowledge(&mut self, over: Range<TxnId>) {
        let over: Vec<TxnId> = self.ended.range(over).map(|(&txn, _)| txn).collect();
        over.into_iter().for_each(|txn| self.remove(txn));
    }

    /// The result of `txn`, if it is remembered.
    #[must_use]
    pub fn get(&self, txn: TxnId) -> Option<&Ended> {
        self.ended.get(&txn)
    }

    /// All results.
    #[must_use]
    pub fn all(&self) -> &OrdMap<TxnId, Ended> {
        &self.ended
    }

    /// Panics if the state contradicts itself.
    ///
    /// # Panics
    /// If it does; the message names the contradiction.
    pub fn assert_invariants(&self) {
        let Self { ended, order, read, bytes, bounds } = self;
        let held: usize =
            read.iter().filter_map(|(_, txn)| Some(ended.get(txn)?.reads_size())).sum();
        assert_eq!(held, *bytes, "what transactions read is not counted");
        assert_eq!(order.len(), ended.len(), "outcomes are not in order");
        assert!(*bytes <= bounds.reads_bytes && ended.len() <= bounds.outcomes, "too much is kept");
    }
}

#[cfg(test)]
mod tests {
    use orthodrome_core::id::ClientId;
    use orthodrome_core::txn::{Key, Outcome, Read, Reads, Version};

    use super::*;

    fn txn(client: u64) -> TxnId {
        TxnId::new(ClientId(client), 1)
    }

    fn ended(stamp: u64, bytes: usize) -> Ended {
        let read = Read { value: Some(vec![b'x'; bytes].into()), version: Version::INITIAL };
        let reads = Reads::from([(Key::from("k"), read)]);
        let stamp = Timestamp(stamp);
        Ended { outcome: Outcome::Committed(stamp), reads: Some(reads), stamp }
    }

    #[test]
    fn reads_of_clients_that_left_are_bounded() {
        let mut outcomes = Outcomes::new(Bounds { reads_bytes: 2_500, outcomes: 5 });
        // The third is the oldest.
        for (client, stamp) in [(1, 11), (2, 12), (3, 10), (4, 13)] {
            outcomes.insert(txn(client), ended(stamp, 1_000));
            outcomes.assert_invariants();
        }
        let is_whole = |client| outcomes.get(txn(client)).unwrap().reads.is_some();
        assert_eq!([1, 2, 3, 4].map(is_whole), [false, true, false, true]);
        // Their outcomes are remembered until there are too many.
        for (client, stamp) in [(5, 14), (6, 15)] {
            outcomes.insert(txn(client), ended(stamp, 0));
            outcomes.assert_invariants();
        }
        let known: Vec<u64> = outcomes.all().keys().map(|txn| txn.client.0).collect();
        assert_eq!(known, [1, 2, 4, 5, 6]);
        // Its client continues.
        outcomes.acknowledge(txn(4)..TxnId::new(ClientId(4), 9));
        outcomes.assert_invariants();
        assert!(outcomes.get(txn(4)).is_none());
    }

    #[test]
    fn a_result_with_too_many_reads_keeps_its_outcome() {
        let mut outcomes = Outcomes::new(Bounds { reads_bytes: 100, outcomes: 5 });
        outcomes.insert(txn(1), ended(1, 1_000));
        outcomes.assert_invariants();
        let Ended { outcome, reads, .. } = outcomes.get(txn(1)).unwrap();
        assert_eq!((*outcome, reads), (Outcome::Committed(Timestamp(1)), &None));
    }
}
