//! The acknowledgements of clients, and what may be forgotten because of them.

use orthodrome_core::id::{ClientId, PartitionId, TxnId};
use orthodrome_core::ordered::OrdMap;

use super::super::message::{Name, StreamImage};
use super::State;
use crate::acknowledged::advance;

impl State {
    /// A stream states the counter below which a client knows the outcomes of its transactions.
    pub(super) fn acknowledge(&mut self, stream: PartitionId, client: ClientId, below: u64) {
        let Some(state) = self.streams.get_mut(&stream) else { return };
        let is_news = advance(&mut state.acknowledged, client, below).is_some();
        if is_news && self.streams.len() == 1 {
            self.forget(stream, client, below);
        }
        self.forget_ran(client);
        if let Some(over) = advance(&mut self.acknowledged, client, below) {
            self.ended.acknowledge(over);
        }
    }

    /// A stream need not remember its transactions below this counter any more.
    pub(super) fn forget(&mut self, stream: PartitionId, client: ClientId, below: u64) {
        let Some(state) = self.streams.get_mut(&stream) else { return };
        if let Some(over) = advance(&mut state.forgotten, client, below) {
            let named = |txn| Name { txn, map: 0 };
            let over = state.seen.range(named(over.start)..named(over.end));
            for name in over.copied().collect::<Vec<_>>() {
                state.seen.remove(&name);
            }
        }
    }

    /// Forgets transactions of `client` that have run and that no stream accepts again under any
    /// name.
    fn forget_ran(&mut self, client: ClientId) {
        let below = self.acknowledged_by_all(client);
        let over = self.ran.range(TxnId::new(client, 0)..TxnId::new(client, below));
        for txn in over.copied().collect::<Vec<_>>() {
            if !self.merge.contains_any(txn) {
                self.ran.remove(&txn);
            }
        }
    }

    /// True if the client of `txn` knows its outcome.
    #[must_use]
    pub fn is_acknowledged(&self, txn: TxnId) -> bool {
        self.acknowledged.get(&txn.client).is_some_and(|&below| txn.counter < below)
    }

    /// True if `txn`, which accesses values held here, ran so long ago that its outcome is
    /// forgotten.
    #[must_use]
    pub fn has_forgotten(&self, txn: TxnId) -> bool {
        let mut streams = self.streams.values();
        let has_run = match (streams.next(), streams.next()) {
            // No key moves: the transaction has one name, and runs when it is seen.
            (Some(only), None) => only.seen.contains(&Name { txn, map: 0 }),
            _ => self.ran.contains(&txn),
        };
        let waits = || self.merge.contains_any(txn) || self.shares.is_any_due(txn);
        has_run && self.ended.get(txn).is_none() && !waits()
    }

    /// Acknowledgements in other streams that `stream` does not have.
    #[must_use]
    pub fn unacknowledged(&self, stream: PartitionId) -> Vec<(ClientId, u64)> {
        let Some(state) = self.streams.get(&stream) else { return Vec::new() };
        let known = |client| state.acknowledged.get(client).copied().unwrap_or_default();
        let news = self.acknowledged.iter().filter(|&(client, &below)| below > known(client));
        news.map(|(&client, &below)| (client, below)).collect()
    }

    /// The counter of `client` that every stream has.
    fn acknowledged_by_all(&self, client: ClientId) -> u64 {
        let below = self.streams.values().map(|stream| stream.acknowledged.get(&client).copied());
        below.map(Option::unwrap_or_default).min().unwrap_or_default()
    }

    /// The counters below which `stream` need not remember transactions any more: all streams
    /// refuse such late transactions, and no transaction below them is missing in some stream.
    #[must_use]
    pub fn forgettable(&self, stream: PartitionId) -> Vec<(ClientId, u64)> {
        let Some(state) = self.streams.get(&stream) else { return Vec::new() };
        let mut news = Vec::new();
        for &client in state.acknowledged.keys() {
            let below = self.acknowledged_by_all(client);
            let waits = self.merge.first_of(client).map_or(below, |first| first.min(below));
            if waits > state.forgotten.get(&client).copied().unwrap_or_default() {
                news.push((client, waits));
            }
        }
        news
    }

    /// True if `stream` says that the client of `txn` knows its outcome.
    #[must_use]
    pub fn is_over(&self, stream: PartitionId, txn: TxnId) -> bool {
        let known = self.streams.get(&stream).and_then(|s| s.acknowledged.get(&txn.client));
        known.is_some_and(|&below| txn.counter < below)
    }
}

/// For each client, the counter below which it knows all outcomes, according to any stream.
pub(super) fn acknowledged(streams: &OrdMap<PartitionId, StreamImage>) -> OrdMap<ClientId, u64> {
    let mut acknowledged: OrdMap<ClientId, u64> = OrdMap::new();
    for (&client, &below) in streams.values().flat_map(|stream| &stream.acknowledged) {
        let known = acknowledged.entry(client).or_default();
        *known = (*known).max(below);
    }
    acknowledged
}
