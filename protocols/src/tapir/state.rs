//! A replica's durable state: a function of the changes that it made durable.

use orthodrome_core::Wire;
use orthodrome_core::id::{ClientId, NodeId, PartitionId, TxnId};
use orthodrome_core::limits::Pieces;
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::store::Store;
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::{Outcome, Version};

use super::message::{ACKNOWLEDGED, Ballot, Cast, Change, Image, Part, Vote};
use crate::acknowledged::{advance, is_acknowledged};
use crate::ir::View;

/// One transaction in a replica's record.
#[derive(Clone, PartialEq, Eq, Debug, Default, Wire)]
pub struct Entry {
    /// All participants.
    pub participants: Vec<PartitionId>,
    /// Its part here; none if the replica knows of it only from others.
    pub part: Option<Part>,
    /// The highest ballot received.
    pub promised: Ballot,
    /// The replica's vote.
    pub cast: Option<Cast>,
    /// How it ended.
    pub ended: Option<Outcome>,
    /// The timestamp at which it was prepared here, if the replica has accepted its refusal since.
    pub prepared_before: Option<Timestamp>,
}

impl Entry {
    /// The timestamp at which the transaction is prepared, if it is and has not ended.
    #[must_use]
    pub fn prepared_at(&self) -> Option<Timestamp> {
        match (self.ended, self.cast) {
            (None, Some(Cast { vote: Vote::PrepareOk(timestamp), .. })) => Some(timestamp),
            (Some(_), _) | (None, _) => None,
        }
    }

    /// The timestamp at which it conflicts with other transactions, until it has ended. If a
    /// replica accepts a refusal, that decides nothing: a node that takes over later may find the
    /// commit at another replica, because of this one's earlier vote.
    #[must_use]
    pub fn held_at(&self) -> Option<Timestamp> {
        self.prepared_at().or(self.prepared_before.filter(|_| self.ended.is_none()))
    }

    /// True if its result is settled, and not only one replica's vote.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.ended.is_some() || self.cast.is_some_and(|cast| cast.is_final)
    }
}

/// A replica's durable state, without the data.
#[derive(Clone, PartialEq, Eq, Debug, Default, Wire)]
pub struct State {
    /// The latest view it has entered.
    pub view: View,
    /// The latest view it has taken part in.
    pub normal_view: View,
    /// The replicas that this view counts, each with the view since which it counts.
    pub synced: OrdMap<NodeId, View>,
    /// False if it has no complete data.
    pub is_whole: bool,
    /// The record.
    pub entries: OrdMap<TxnId, Entry>,
    /// For each client, the counter below which it knows all outcomes.
    pub acknowledged: OrdMap<ClientId, u64>,
    /// At or above every timestamp at which this replica was read (R8).
    pub ceiling: Timestamp,
    /// When it first used its disk.
    pub born: Timestamp,
    /// The replicas with whose records the group began; see [`crate::ir::Offer::founders`].
    pub founders: OrdMap<NodeId, Timestamp>,
}

impl State {
    /// Applies a change. The same changes give the same state after a restart.
    pub fn apply(&mut self, partition: PartitionId, change: &Change, store: &mut Store) {
        match change {
            Change::Cast { txn, participants, part, cast } => {
                let entry = self.entry(*txn, participants, part.as_ref());
                entry.promised = entry.promised.max(cast.ballot);
                entry.prepared_before = entry.held_at().filter(|_| !cast.vote.is_ok());
                entry.cast = Some(*cast);
            }
            Change::Promise { txn, participants, ballot } => {
                let entry = self.entry(*txn, participants, None);
                entry.promised = entry.promised.max(*ballot);
            }
            Change::End { txn, participants, part, outcome } => {
                self.end(partition, *txn, (participants, part.as_ref(), *outcome), store);
            }
            Change::Forget(txns) => {
                for txn in txns {
                    self.entries.remove(txn);
                }
            }
            Change::Acknowledge(clients) => self.acknowledge(clients),
            Change::Ceiling(ceiling) => self.ceiling = self.ceiling.max(*ceiling),
            Change::Enter(view) => self.view = self.view.max(*view),
            Change::Install { view, synced, image, is_whole, founders } => {
                (self.view, self.normal_view) = (*view, *view);
                self.synced.clone_from(synced);
                self.founders.clone_from(founders);
                self.is_whole = *is_whole;
                self.install(partition, image, store);
            }
            // It counts as part of the installation.
            Change::Gather { .. } => {}
            Change::Whole => self.is_whole = true,
            Change::Born(at) => self.born = *at,
        }
    }

    fn entry(
        &mut self,
        txn: TxnId,
        participants: &[PartitionId],
        part: Option<&Part>,
    ) -> &mut Entry {
        let entry = self.entries.entry(txn).or_default();
        if entry.participants.is_empty() {
            entry.participants = participants.to_vec();
        }
        if entry.part.is_none() {
            entry.part = part.cloned();
        }
        entry
    }

    fn end(
        &mut self,
        partition: PartitionId,
        txn: TxnId,
        (participants, part, outcome): (&[PartitionId], Option<&Part>, Outcome),
        store: &mut Store,
    ) {
        let entry = self.entry(txn, participants, part);
        if entry.ended.is_some() {
            return;
        }
        entry.ended = Some(outcome);
        if !matches!(outcome, Outcome::Committed(_)) {
            entry.part = None;
        }
        let Some(part) = &entry.part else { return };
        if let Outcome::Committed(timestamp) = outcome {
            let version = Version { timestamp, writer: txn.name() };
            for (key, value) in &part.writes {
                store.put(partition, key.clone(), version, value.clone());
            }
            // The reads happened at that timestamp; after a restart only this says so.
            if !part.reads.is_empty() {
                self.ceiling = self.ceiling.max(timestamp);
            }
        }
    }

    /// Installs the merged record of a view (§3.2.2 "Sync"). A transaction that is not in it and
    /// has not ended was never agreed, and is dropped.
    fn install(&mut self, partition: PartitionId, image: &Image, store: &mut Store) {
        let before = std::mem::take(&mut self.entries);
        let gone: OrdSet<TxnId> = image
            .entries
            .iter()
            .map(|(txn, _)| *txn)
            .filter(|txn| self.is_acknowledged(*txn) && !before.contains_key(txn))
            .collect();
        self.entries = before.into_iter().filter(|(_, entry)| entry.ended.is_some()).collect();
        for (txn, theirs) in &image.entries {
            let is_commit = matches!(theirs.ended, Some(Outcome::Committed(_)));
            if gone.contains(txn) && !is_commit {
                // The record was collected before this replica had executed the transaction and
                // dropped it.
                continue;
            }
            if let Some(outcome) = theirs.ended {
                let facts = (theirs.participants.as_slice(), theirs.part.as_ref(), outcome);
                self.end(partition, *txn, facts, store);
                continue;
            }
            let entry = self.entry(*txn, &theirs.participants, theirs.part.as_ref());
            if entry.ended.is_none() {
                entry.promised = theirs.promised;
                entry.cast = theirs.cast;
                // What a view change settles is the result: whoever asks later follows it.
                entry.prepared_before = None;
            }
        }
        self.acknowledge(&image.acknowledged);
        self.ceiling = self.ceiling.max(image.ceiling);
    }

    fn acknowledge(&mut self, clients: &[(ClientId, u64)]) {
        // What has ended leaves the record when its coordinator says so, and not because of this.
        for &(client, below) in clients {
            advance(&mut self.acknowledged, client, below);
        }
    }

    /// True if the transaction's client knows its outcome.
    #[must_use]
    pub fn is_acknowledged(&self, txn: TxnId) -> bool {
        is_acknowledged(&self.acknowledged, txn)
    }

    /// Splits the state into parts. Each has at most `bytes_max` bytes, unless a single transaction
    /// has more.
    #[must_use]
    pub fn divide(self, bytes_max: usize) -> Vec<Self> {
        let Self { entries, acknowledged, .. } = self;
        let (entries_of_none, nobody) = (OrdMap::new(), OrdMap::new());
        let empty = Self { entries: entries_of_none, acknowledged: nobody, ..self };
        let mut parts = Pieces::new(empty, bytes_max);
        for (txn, entry) in entries {
            parts.of(entry.size()).entries.insert(txn, entry);
        }
        for (client, below) in acknowledged {
            parts.of(ACKNOWLEDGED).acknowledged.insert(client, below);
        }
        parts.finish()
    }

    /// Adds another part of the same state.
    pub fn join(&mut self, part: Self) {
        self.entries.extend(part.entries);
        self.acknowledged.extend(part.acknowledged);
    }

    /// The record to send: everything, or only what is settled.
    #[must_use]
    pub fn image(&self, is_settled_only: bool) -> Image {
        let wanted = self.entries.iter().filter(|(_, e)| !is_settled_only || e.is_settled());
        Image {
            entries: wanted.map(|(txn, entry)| (*txn, entry.clone())).collect(),
            acknowledged: self.acknowledged.iter().map(|(&c, &below)| (c, below)).collect(),
            ceiling: self.ceiling,
        }
    }
}

#[cfg(test)]
mod tests {
    use orthodrome_core::txn::Value;

    use super::*;
    use orthodrome_core::store::MemoryEngine;
    use orthodrome_core::txn::AbortReason;

    /// Two replicas had voted for a transaction. One of them accepted that it is refused, and
    /// prepared another one that had read what the first overwrites. But a node that took over
    /// found at the other replica that the first commits: both did (seed 997000416).
    #[test]
    fn what_one_replica_refused_stays_prepared_until_it_has_ended() {
        let partition = PartitionId(0);
        let mut store = Store::new(Box::new(MemoryEngine::default()));
        let mut state = State::default();
        let txn = TxnId::new(ClientId(1), 1);
        let mut apply = |state: &mut State, change: Change| {
            state.apply(partition, &change, &mut store);
            state.entries.get(&txn).and_then(Entry::held_at)
        };
        let cast = |vote| Change::Cast {
            txn,
            participants: vec![partition],
            part: Some(Part { reads: vec![], writes: OrdMap::new() }),
            cast: Cast { ballot: Ballot::default(), vote, is_final: true },
        };
        let refused = Vote::Refused(AbortReason::Recovery);
        let at = Timestamp(7);
        assert_eq!(apply(&mut state, cast(refused)), None);
        assert_eq!(apply(&mut state, cast(Vote::PrepareOk(at))), Some(at));
        assert_eq!(apply(&mut state, cast(refused)), Some(at));
        assert_eq!(apply(&mut state, cast(refused)), Some(at));
        assert_eq!(state.entries.get(&txn).and_then(Entry::prepared_at), None);
        let outcome = Outcome::Aborted(AbortReason::Recovery);
        let end = Change::End { txn, participants: vec![partition], part: None, outcome };
        assert_eq!(apply(&mut state, end), None);
    }

    /// The writes of sixty transactions, 3 MiB each. They used to be one record at a checkpoint,
    /// and one message and one record of every view change.
    #[test]
    fn a_record_of_large_writes_is_many_parts_that_are_the_same_together() {
        let value = Some(Value::from(vec![b'x'; 1 << 20]));
        let mut state = State { view: View(4), is_whole: true, ..State::default() };
        for counter in 0..60 {
            let txn = TxnId::new(ClientId(counter % 7), counter);
            let writes = (0..3).map(|n| (format!("{counter}-{n}").into(), value.clone()));
            let part = Part { reads: vec![], writes: writes.collect() };
            state.entries.insert(txn, Entry { part: Some(part), ..Entry::default() });
            state.acknowledged.insert(txn.client, counter);
        }
        assert!(state.size() > 180 << 20);
        let mut parts = state.clone().divide(4 << 20).into_iter();
        assert_eq!(parts.len(), 60);
        let mut joined = parts.next().unwrap();
        for part in parts {
            assert!(part.size() <= 4 << 20, "{}", part.size());
            joined.join(part);
        }
        assert_eq!(joined, state);
        let image = state.image(false);
        assert_eq!(Image::join(image.clone().divide(4 << 20)), image);
        let (synced, founders, is_whole) = (OrdMap::new(), OrdMap::new(), true);
        let (view, image) = (View(5), Box::new(image));
        let install = Change::Install { view, synced, image, is_whole, founders };
        let records = install.divide(4 << 20);
        assert_eq!(records.len(), 60);
        let is_last = |change: &Change| matches!(change, Change::Install { .. });
        assert_eq!(records.iter().position(is_last), Some(59), "it counts once all is there");
    }
}
