//! What every replica of a partition knows: a function of the partition's log alone.
//!
//! One partition plays two roles, and its one log serves both: *participant* in transactions that
//! touch its keys, and *coordinator* of transactions that clients in its leader's region began.

use std::collections::{BTreeMap, BTreeSet};

use orthodrome_core::Wire;
use orthodrome_core::id::{ClientId, PartitionId, TxnId};
use orthodrome_core::limits::Pieces;
use orthodrome_core::store::Store;
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::{AbortReason, Key, Outcome, Version, Writes};

use super::Mutations;
use super::message::{Command, Turn, Vote};
use crate::acknowledged::advance;
use crate::carousel::Verdict;
use crate::hosting::Divisible;
use crate::replication::Index;
use crate::sizes::TXN;

/// A transaction that this partition prepared and whose decision it does not know.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Prepared {
    /// The group that decides.
    pub coordinator: PartitionId,
    /// When its turn was.
    pub turn: Turn,
    /// Keys read, with the versions read.
    pub versions: Vec<(Key, Version)>,
    /// Keys it may write.
    pub writes: Vec<Key>,
    /// The commit timestamp must not be smaller.
    pub proposal: Timestamp,
    /// It stands only if none of these commits (N6): each is prepared here too, and was before.
    pub unless: Vec<TxnId>,
    /// Refused for its sake.
    pub refused: Vec<TxnId>,
}

impl Prepared {
    /// The keys that it read.
    pub fn reads(&self) -> impl Iterator<Item = &Key> {
        self.versions.iter().map(|(key, _)| key)
    }

    /// The vote that this stands for.
    #[must_use]
    pub fn vote(&self) -> Vote {
        Vote::Prepared {
            versions: self.versions.clone(),
            proposal: self.proposal,
            unless: self.unless.clone(),
            refused: self.refused.clone(),
        }
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
    /// Which of the client's requests.
    pub round: u32,
    /// Another may come, on other reads.
    pub is_provisional: bool,
}

/// A transaction that this partition's group coordinates and that has not been acknowledged by
/// every participant.
#[derive(Clone, PartialEq, Eq, Debug, Default, Wire)]
pub struct Coordinated {
    /// Who takes part.
    pub participants: Vec<PartitionId>,
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
                    self.coordinated.entry(*txn).or_default().know(participants);
                }
                Applied::Nothing
            }
            Command::RequestCommit {
                txn,
                participants,
                writes,
                versions,
                round,
                is_provisional,
            } => {
                if self.settled.contains_key(txn) || self.is_acknowledged(*txn) {
                    return Applied::Nothing;
                }
                let entry = self.coordinated.entry(*txn).or_default();
                let is_superseded = |known: &Request| known.is_provisional && known.round < *round;
                if entry.decision.is_some() || !entry.request.as_ref().is_none_or(is_superseded) {
                    return Applied::Nothing;
                }
                entry.know(participants);
                entry.request = Some(Request {
                    writes: writes.clone(),
                    versions: versions.clone(),
                    round: *round,
                    is_provisional: *is_provisional,
                });
                Applied::Requested(*txn)
            }
            Command::Decide { txn, outcome, only_after, participants } => {
                if self.settled.contains_key(txn) {
                    return Applied::Nothing;
                }
                let entry = self.coordinated.entry(*txn).or_default();
                entry.know(participants);
                let round = entry.round();
                if entry.decision.is_some() || only_after.is_some_and(|after| after != round) {
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
        let Command::Prepare {
            coordinator, turn, versions, writes, proposal, unless, refused, ..
        } = command
        else {
            return Applied::Nothing;
        };
        if self.ended.contains_key(&txn) || self.prepared.contains_key(&txn) {
            return Applied::Nothing;
        }
        let prepared = Prepared {
            coordinator: *coordinator,
            turn: *turn,
            versions: versions.clone(),
            writes: writes.clone(),
            proposal: *proposal,
            unless: unless.clone(),
            refused: refused.clone(),
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
                let Some(prepared) = self.prepared.remove(&txn) else {
                    // Committed here before; the entry is a repetition by a later leader.
                    return Applied::Ended(txn);
                };
                // N6: that it commits is that these have aborted.
                for other in prepared.unless {
                    if let Some(Prepared { coordinator, .. }) = self.prepared.remove(&other) {
                        let outcome = Outcome::Aborted(AbortReason::Conflict);
                        self.end(other, coordinator, outcome);
                    }
                }
                // And whatever stood on the condition that it does not is void.
                self.prepared.retain(|_, prepared| !prepared.unless.contains(&txn));
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
        if let Outcome::Aborted(_) = outcome {
            for prepared in self.prepared.values_mut() {
                prepared.unless.retain(|other| *other != txn);
            }
        }
        let ended = Ended { coordinator, outcome, is_forgettable: false };
        self.ended.entry(txn).or_insert(ended);
        Applied::Ended(txn)
    }

    /// Those that `command` aborts beside what it says: one that commits on their not doing so is in
    /// their way for ever (N6).
    #[must_use]
    pub fn aborted_by(&self, command: &Command) -> Vec<TxnId> {
        let Command::End { txn, verdict: Verdict::Commit(..), .. } = command else { return vec![] };
        self.prepared.get(txn).map_or_else(Vec::new, |prepared| prepared.unless.clone())
    }

    /// Those prepared on the condition that `txn` does not commit, with their coordinators' groups.
    #[must_use]
    pub fn dependents(&self, txn: TxnId) -> Vec<(TxnId, PartitionId)> {
        let depends = self.prepared.iter().filter(|(_, prepared)| prepared.unless.contains(&txn));
        depends.map(|(txn, prepared)| (*txn, prepared.coordinator)).collect()
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
    /// Which of the client's requests is the last; 0 if there is none.
    #[must_use]
    pub fn round(&self) -> u32 {
        self.request.as_ref().map_or(0, |request| request.round)
    }

    /// Learns who takes part, if nothing was known.
    fn know(&mut self, participants: &[PartitionId]) {
        if self.participants.is_empty() {
            self.participants = participants.to_vec();
        }
    }
}

/// The one decision function (R7): of durable facts alone, so that every coordinator that has them
/// decides the same. `vote` gives each participant's vote, if it is known. Two unsafe variants are for
/// tests.
///
/// Returns none while the facts leave it open.
#[must_use]
pub fn decide<'a>(
    participants: impl IntoIterator<Item = PartitionId> + Clone,
    request: Option<&Request>,
    vote: impl Fn(PartitionId) -> Option<&'a Vote>,
    mutations: Mutations,
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
    let (mut conditions, mut evidence) = (BTreeSet::<TxnId>::new(), BTreeSet::<TxnId>::new());
    for partition in participants.clone() {
        let Some(Vote::Prepared { proposal, unless, refused, .. }) = vote(partition) else {
            return None;
        };
        timestamp = timestamp.max(*proposal);
        conditions.extend(unless);
        evidence.extend(refused);
    }
    // N3: a condition holds if some participant has refused that transaction for ever, and not because
    // nobody has said anything to the contrary.
    if !conditions.is_subset(&evidence) && !mutations.conditions_are_trusted {
        return None;
    }
    let is_contradicted =
        participants.into_iter().filter_map(vote).any(|vote| contradicts(vote, request));
    match request.is_provisional {
        _ if !is_contradicted => Some(Outcome::Committed(timestamp)),
        true if mutations.provisional_reads_count => Some(Outcome::Committed(timestamp)),
        // Its client will ask again, or give up.
        true => None,
        false => Some(Outcome::Aborted(AbortReason::StaleRead)),
    }
}

/// R3: true if the client computed from something else than the participant holds.
fn contradicts(vote: &Vote, request: &Request) -> bool {
    let Vote::Prepared { versions, .. } = vote else { return false };
    versions.iter().any(|(key, version)| {
        let read = request.versions.iter().find(|(read, _)| read == key);
        read.is_some_and(|(_, read)| read != version)
    })
}

/// True if this request can never be committed: a vote that stands without a condition contradicts it.
/// Then, and only then, may the coordinator's group abort what was asked to commit.
#[must_use]
pub fn is_refuted<'a>(request: &Request, mut votes: impl Iterator<Item = &'a Vote>) -> bool {
    votes.any(|vote| {
        let stands = matches!(vote, Vote::Prepared { unless, .. } if unless.is_empty());
        stands && contradicts(vote, request)
    })
}
