//! What clients know of their transactions, and what may be forgotten because they do.

use std::collections::BTreeMap;

use orthodrome_core::id::{ClientId, PartitionId, TxnId};

use super::super::message::{Name, StreamImage};
use super::State;
use crate::acknowledged::advance_one;

impl State {
    /// A stream says below which counter a client knows the outcomes of its transactions.
    pub(super) fn acknowledge(&mut self, stream: PartitionId, client: ClientId, below: u64) {
        let Some(state) = self.streams.get_mut(&stream) else { return };
        let is_news = advance_one(&mut state.acknowledged, client, below).is_some();
        if is_news && self.streams.len() == 1 {
            self.forget(stream, client, below);
        }
        self.forget_ran(client);
        if let Some(over) = advance_one(&mut self.acknowledged, client, below) {
            self.ended.acknowledge(over);
        }
    }

    /// A stream need not remember which transactions below this counter it holds.
    pub(super) fn forget(&mut self, stream: PartitionId, client: ClientId, below: u64) {
        let Some(state) = self.streams.get_mut(&stream) else { return };
        if let Some(over) = advance_one(&mut state.forgotten, client, below) {
            let named = |txn| Name { txn, map: 0 };
            let over = state.seen.range(named(over.start)..named(over.end));
            for name in over.copied().collect::<Vec<_>>() {
                state.seen.remove(&name);
            }
        }
    }

    /// Forgets that transactions of `client` ran that no stream lets in again under any name.
    fn forget_ran(&mut self, client: ClientId) {
        let below = self.acknowledged_by_all(client);
        let over = self.ran.range(TxnId::new(client, 0)..TxnId::new(client, below));
        for txn in over.copied().collect::<Vec<_>>() {
            if !self.merge.contains_any(txn) {
                self.ran.remove(&txn);
            }
        }
    }

    /// True if the client of `txn` knows what became of it.
    #[must_use]
    pub fn is_acknowledged(&self, txn: TxnId) -> bool {
        self.acknowledged.get(&txn.client).is_some_and(|&below| txn.counter < below)
    }

    /// True if `txn`, which touches what is held here, has run so long ago that it is forgotten what became of it.
    #[must_use]
    pub fn has_forgotten(&self, txn: TxnId) -> bool {
        let mut streams = self.streams.values();
        let has_run = match (streams.next(), streams.next()) {
            // Nothing moves: it has one name, and runs when it is seen.
            (Some(only), None) => only.seen.contains(&Name { txn, map: 0 }),
            _ => self.ran.contains(&txn),
        };
        let waits = || self.merge.contains_any(txn) || self.shares.is_any_due(txn);
        has_run && self.ended.get(txn).is_none() && !waits()
    }

    /// What other streams say of clients and `stream` does not know.
    #[must_use]
    pub fn unacknowledged(&self, stream: PartitionId) -> Vec<(ClientId, u64)> {
        let Some(state) = self.streams.get(&stream) else { return Vec::new() };
        let known = |client| state.acknowledged.get(client).copied().unwrap_or_default();
        let news = self.acknowledged.iter().filter(|&(client, &below)| below > known(client));
        news.map(|(&client, &below)| (client, below)).collect()
    }

    /// What every stream says that `client` knows.
    fn acknowledged_by_all(&self, client: ClientId) -> u64 {
        let below = self.streams.values().map(|stream| stream.acknowledged.get(&client).copied());
        below.map(Option::unwrap_or_default).min().unwrap_or_default()
    }

    /// What `stream` need not remember any more: who comes so late is refused by all streams, and
    /// nobody waits anywhere for what is not everywhere.
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

    /// True if `stream` holds that the client of `txn` knows what became of it.
    #[must_use]
    pub fn is_over(&self, stream: PartitionId, txn: TxnId) -> bool {
        let known = self.streams.get(&stream).and_then(|s| s.acknowledged.get(&txn.client));
        known.is_some_and(|&below| txn.counter < below)
    }
}

/// Below which counters clients know the outcomes, as any stream says.
pub(super) fn acknowledged(
    streams: &BTreeMap<PartitionId, StreamImage>,
) -> BTreeMap<ClientId, u64> {
    let mut acknowledged: BTreeMap<ClientId, u64> = BTreeMap::new();
    for (&client, &below) in streams.values().flat_map(|stream| &stream.acknowledged) {
        let known = acknowledged.entry(client).or_default();
        *known = (*known).max(below);
    }
    acknowledged
}
