//! What every replica of a partition knows: a function of the partition's log alone.
//!
//! One partition plays two roles, and its one log serves both: *participant* in transactions that
//! touch its keys, and *coordinator* of transactions that clients in its leader's region began.

use std::collections::BTreeMap;

use orthodrome_core::Wire;
use orthodrome_core::id::{ClientId, PartitionId, TxnId};
use orthodrome_core::limits::Pieces;
use orthodrome_core::store::Store;
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::{AbortReason, Key, Outcome, Version, Writes};

use super::message::{Command, Verdict, Vote};
use crate::acknowledged::advance;
use crate::gateway::Participant;
use crate::hosting::Divisible;
use crate::replication::Index;
use crate::sizes::TXN;

/// A transaction that this partition prepared and whose decision it does not know.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Prepared {
    /// The group that decides.
    pub coordinator: PartitionId,
    /// Keys read, with the versions read.
    pub versions: Vec<(Key, Version)>,
    /// Keys it may write.
    pub writes: Vec<Key>,
    /// The commit timestamp must not be smaller.
    pub proposal: Timestamp,
}

impl Prepared {
    /// Every key it holds; one that is read and written comes twice.
    pub fn keys(&self) -> impl Iterator<Item = &Key> {
        self.versions.iter().map(|(key, _)| key).chain(&self.writes)
    }

    /// The vote that this stands for.
    #[must_use]
    pub fn vote(&self) -> Vote {
        Vote::Prepared { versions: self.versions.clone(), proposal: self.proposal }
    }
}

/// How a transaction ended at this participant. Kept so that nothing late can revive it (R1, C9)
/// until everybody who took part knows *and* its client has acknowledged it (R6).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Wire)]
pub struct Ended {
    /// The group that decided.
    pub coordinator: PartitionId,
    /// The decision.
    pub outcome: Outcome,
    /// The coordinator's group has said that it will not ask again.
    pub is_forgettable: bool,
}

/// A commit request: what the client wants written, and on the strength of which reads.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Request {
    /// What to write.
    pub writes: Writes,
    /// The version of each key that the client read.
    pub versions: Vec<(Key, Version)>,
}

/// A transaction that this partition's group coordinates and that has not been acknowledged by
/// every participant.
#[derive(Clone, PartialEq, Eq, Debug, Default, Wire)]
pub struct Coordinated {
    /// Who takes part.
    pub participants: Vec<Participant>,
    /// The commit request, once it is replicated.
    pub request: Option<Request>,
    /// The decision, once it is replicated.
    pub decision: Option<Outcome>,
}

/// A partition's replicated state, data apart.
#[derive(Clone, PartialEq, Eq, Debug, Default, Wire)]
pub struct State {
    /// Index of the last log entry applied.
    pub applied: Index,
    /// Prepared, decision unknown.
    pub prepared: BTreeMap<TxnId, Prepared>,
    /// Ended here as participant.
    pub ended: BTreeMap<TxnId, Ended>,
    /// Coordinated here, not yet acknowledged by all.
    pub coordinated: BTreeMap<TxnId, Coordinated>,
    /// Coordinated here and acknowledged by all; kept for clients that ask again.
    pub settled: BTreeMap<TxnId, Outcome>,
    /// At or above every commit timestamp applied here, for reads and for writes (C11).
    pub floor: Timestamp,
    /// At or above every timestamp that any leader promised (R8).
    pub ceiling: Timestamp,
    /// Clients know the outcomes of their transactions below these counters.
    pub acknowledged: BTreeMap<ClientId, u64>,
}

/// What an applied command changed, for the leader to act on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Applied {
    /// Nothing that anybody waits for.
    Nothing,
    /// The transaction is prepared here.
    Prepared(TxnId),
    /// The transaction has ended here.
    Ended(TxnId),
    /// A commit request is replicated.
    Requested(TxnId),
    /// A decision is replicated.
    Decided(TxnId),
    /// Decisions are settled.
    Settled,
    /// Later timestamps may be promised.
    Ceiling,
}

impl State {
    /// Applies one log entry. The same entries give the same state on every replica.
    pub fn apply(
        &mut self,
        partition: PartitionId,
        command: &Command,
        store: &mut Store,
    ) -> Applied {
        match command {
            Command::Prepare { txn, acknowledged_below, .. } => {
                self.acknowledge(txn.client, *acknowledged_below);
                self.apply_prepare(*txn, command)
            }
            Command::Refuse { txn, coordinator, reason } => {
                self.end(*txn, *coordinator, Outcome::Aborted(*reason))
            }
            Command::End { txn, coordinator, verdict } => {
                self.apply_end(partition, *txn, *coordinator, verdict, store)
            }
            Command::Coordinate { txn, participants, acknowledged_below } => {
                self.acknowledge(txn.client, *acknowledged_below);
                if !self.is_acknowledged(*txn) && !self.settled.contains_key(txn) {
                    let entry = self.coordinated.entry(*txn).or_default();
                    if entry.participants.is_empty() {
                        entry.participants.clone_from(participants);
                    }
                }
                Applied::Nothing
            }
            Command::RequestCommit { txn, participants, writes, versions } => {
                if self.settled.contains_key(txn) || self.is_acknowledged(*txn) {
                    return Applied::Nothing;
                }
                let entry = self.coordinated.entry(*txn).or_default();
                if entry.decision.is_some() || entry.request.is_some() {
                    return Applied::Nothing;
                }
                entry.know(participants);
                entry.request =
                    Some(Request { writes: writes.clone(), versions: versions.clone() });
                Applied::Requested(*txn)
            }
            Command::Decide { txn, outcome, unilateral, participants } => {
                if self.settled.contains_key(txn) {
                    return Applied::Nothing;
                }
                let entry = self.coordinated.entry(*txn).or_default();
                entry.know(participants);
                if entry.decision.is_some() || (*unilateral && entry.request.is_some()) {
                    return Applied::Nothing;
                }
                entry.decision = Some(*outcome);
                Applied::Decided(*txn)
            }
            Command::Settle(txns) => {
                for txn in txns {
                    if let Some(Coordinated { decision: Some(outcome), .. }) =
                        self.coordinated.remove(txn)
                        && !self.is_acknowledged(*txn)
                    {
                        self.settled.insert(*txn, outcome);
                    }
                }
                Applied::Settled
            }
            Command::Forget(txns) => {
                for txn in txns {
                    self.forget(*txn);
                }
                Applied::Nothing
            }
            Command::Acknowledge(clients) => {
                for &(client, below) in clients {
                    self.acknowledge(client, below);
                }
                Applied::Nothing
            }
            Command::Ceiling(ceiling) => {
                self.ceiling = self.ceiling.max(*ceiling);
                Applied::Ceiling
            }
        }
    }

    fn apply_prepare(&mut self, txn: TxnId, command: &Command) -> Applied {
        let Command::Prepare { coordinator, versions, writes, proposal, .. } = command else {
            return Applied::Nothing;
        };
        if self.ended.contains_key(&txn) || self.prepared.contains_key(&txn) {
            return Applied::Nothing;
        }
        let prepared = Prepared {
            coordinator: *coordinator,
            versions: versions.clone(),
            writes: writes.clone(),
            proposal: *proposal,
        };
        self.prepared.insert(txn, prepared);
        Applied::Prepared(txn)
    }

    fn apply_end(
        &mut self,
        partition: PartitionId,
        txn: TxnId,
        coordinator: PartitionId,
        verdict: &Verdict,
        store: &mut Store,
    ) -> Applied {
        match verdict {
            Verdict::Commit(timestamp, writes) => {
                if self.prepared.remove(&txn).is_none() {
                    // Committed here before; the entry is a repetition by a later leader.
                    return Applied::Ended(txn);
                }
                let version = Version { timestamp: *timestamp, writer: txn };
                for (key, value) in writes {
                    store.put(partition, key.clone(), version, value.clone());
                }
                // Also for a transaction that only read here: a later writer of what it read must
                // get a larger timestamp, or a snapshot could see that writer and not this (C11).
                self.floor = self.floor.max(*timestamp);
                self.ceiling = self.ceiling.max(*timestamp);
                self.end(txn, coordinator, Outcome::Committed(*timestamp))
            }
            Verdict::Abort(reason) => {
                self.prepared.remove(&txn);
                self.end(txn, coordinator, Outcome::Aborted(*reason))
            }
        }
    }

    fn end(&mut self, txn: TxnId, coordinator: PartitionId, outcome: Outcome) -> Applied {
        if self.prepared.contains_key(&txn) {
            return Applied::Nothing;
        }
        let ended = Ended { coordinator, outcome, is_forgettable: false };
        self.ended.entry(txn).or_insert(ended);
        Applied::Ended(txn)
    }

    fn forget(&mut self, txn: TxnId) {
        let is_acknowledged = self.is_acknowledged(txn);
        if let Some(ended) = self.ended.get_mut(&txn) {
            ended.is_forgettable = true;
            if is_acknowledged {
                self.ended.remove(&txn);
            }
        }
    }

    /// True if the transaction's client knows its outcome.
    #[must_use]
    pub fn is_acknowledged(&self, txn: TxnId) -> bool {
        self.acknowledged.get(&txn.client).is_some_and(|&below| txn.counter < below)
    }

    /// True if the transaction has ended here, or its client knows its outcome: nothing late may
    /// prepare it.
    #[must_use]
    pub fn is_over(&self, txn: TxnId) -> bool {
        self.ended.contains_key(&txn) || self.is_acknowledged(txn)
    }

    fn acknowledge(&mut self, client: ClientId, below: u64) {
        let Some(names) = advance(&mut self.acknowledged, client, below) else { return };
        let gone: Vec<TxnId> = self
            .ended
            .range(names.clone())
            .filter_map(|(txn, ended)| ended.is_forgettable.then_some(*txn))
            .collect();
        for txn in gone {
            self.ended.remove(&txn);
        }
        let gone: Vec<TxnId> = self.settled.range(names).map(|(txn, _)| *txn).collect();
        for txn in gone {
            self.settled.remove(&txn);
        }
    }

    /// What this group knows of a transaction's outcome, as its coordinator.
    #[must_use]
    pub fn decision(&self, txn: TxnId) -> Option<Outcome> {
        self.settled.get(&txn).copied().or_else(|| self.coordinated.get(&txn)?.decision)
    }
}

/// Encoded size of an outcome with its transaction's name.
const OUTCOME: usize = TXN + 16;
/// Encoded size of what a client has acknowledged.
const ACKNOWLEDGED: usize = 16;

impl Divisible for State {
    fn divide(self, bytes_max: usize) -> Vec<Self> {
        let State { applied, prepared, ended, coordinated, .. } = self;
        let State { settled, floor, ceiling, acknowledged, .. } = self;
        let mut parts = Pieces::new(Self { applied, floor, ceiling, ..Self::default() }, bytes_max);
        for (txn, prepared) in prepared {
            parts.of(prepared.size()).prepared.insert(txn, prepared);
        }
        for (txn, ended) in ended {
            parts.of(OUTCOME).ended.insert(txn, ended);
        }
        for (txn, coordinated) in coordinated {
            parts.of(coordinated.size()).coordinated.insert(txn, coordinated);
        }
        for (txn, outcome) in settled {
            parts.of(OUTCOME).settled.insert(txn, outcome);
        }
        for (client, below) in acknowledged {
            parts.of(ACKNOWLEDGED).acknowledged.insert(client, below);
        }
        parts.finish()
    }

    fn join(&mut self, part: Self) {
        let State { applied, prepared, ended, coordinated, .. } = part;
        let State { settled, floor, ceiling, acknowledged, .. } = part;
        assert_eq!(self.applied, applied, "parts of two states");
        self.floor = self.floor.max(floor);
        self.ceiling = self.ceiling.max(ceiling);
        self.prepared.extend(prepared);
        self.ended.extend(ended);
        self.coordinated.extend(coordinated);
        self.settled.extend(settled);
        self.acknowledged.extend(acknowledged);
    }
}

impl Coordinated {
    /// Learns who takes part, if nothing was known.
    fn know(&mut self, participants: &[PartitionId]) {
        if self.participants.is_empty() {
            self.participants = participants.iter().copied().map(Participant::bare).collect();
        }
    }
}

/// The one decision function (R7): of durable facts alone, so that every coordinator that has them
/// decides the same. `vote` gives each participant's vote, if it is known (§4.1.2).
///
/// Returns none while the facts leave it open.
#[must_use]
pub fn decide<'a>(
    participants: impl IntoIterator<Item = PartitionId> + Clone,
    request: Option<&Request>,
    vote: impl Fn(PartitionId) -> Option<&'a Vote>,
) -> Option<Outcome> {
    // Somebody was told to commit: it is decided.
    for partition in participants.clone() {
        if let Some(Vote::Committed(timestamp)) = vote(partition) {
            return Some(Outcome::Committed(*timestamp));
        }
    }
    // One refusal is enough, whatever the others say.
    for partition in participants.clone() {
        if let Some(Vote::Refused(reason)) = vote(partition) {
            return Some(Outcome::Aborted(*reason));
        }
    }
    let request = request?;
    let mut timestamp = Timestamp::ZERO;
    for partition in participants {
        let Some(Vote::Prepared { versions, proposal }) = vote(partition) else { return None };
        timestamp = timestamp.max(*proposal);
        // R3: what the client computed from must be what the participant holds still.
        for (key, version) in versions {
            let read = request.versions.iter().find(|(read, _)| read == key);
            if read.is_some_and(|(_, read)| read != version) {
                return Some(Outcome::Aborted(AbortReason::StaleRead));
            }
        }
    }
    Some(Outcome::Committed(timestamp))
}

#[cfg(test)]
mod tests {
    use orthodrome_core::txn::Value;

    use super::*;

    /// Sixty transactions that each want to write 3 MiB were one record of 180 MiB at the next checkpoint, over what
    /// a log takes.
    #[test]
    fn a_state_of_large_requests_is_many_parts_that_are_the_same_together() {
        let value = Some(Value::from(vec![b'x'; 1 << 20]));
        let mut state = State { applied: Index(9), floor: Timestamp(3), ..State::default() };
        for counter in 0..60 {
            let txn = TxnId::new(ClientId(counter % 7), counter);
            let writes = (0..3).map(|n| (Key::from(format!("{counter}-{n}")), value.clone()));
            let request = Some(Request { writes: writes.collect(), versions: vec![] });
            state.coordinated.insert(txn, Coordinated { request, ..Coordinated::default() });
            state.settled.insert(txn.retry(), Outcome::Committed(Timestamp(counter)));
            state.acknowledged.insert(txn.client, counter);
        }
        let whole = state.size();
        assert!(whole > 180 << 20, "{whole}");
        let mut parts = state.clone().divide(4 << 20).into_iter();
        assert_eq!(parts.len(), 60, "one large transaction each");
        let mut joined = parts.next().unwrap();
        for part in parts {
            assert!(part.size() <= 4 << 20, "{}", part.size());
            joined.join(part);
        }
        assert_eq!(joined, state);
    }
}
