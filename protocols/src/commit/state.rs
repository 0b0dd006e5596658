//! The state that every replica of a partition has: a function of the partition's log alone.
//!
//! One partition plays two roles, and its one log serves both. It is *participant* in transactions
//! that access its keys, and *coordinator* of transactions whose clients are in its leader's
//! region.

use std::sync::Arc;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::digest::Digest;
use orthodrome_core::id::{ClientId, PartitionId, TxnId};
use orthodrome_core::limits::Pieces;
use orthodrome_core::machine::{Claim, Leak};
use orthodrome_core::ordered::{Entry, OrdMap};
use orthodrome_core::store::Store;
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::{AbortReason, Outcome, Version, Writes};
use orthodrome_core::{TxnMap, Wire};

use super::coordinator::Outcomes;
use crate::acknowledged::{advance, is_acknowledged};
use crate::gateway::Participant;
use crate::hosting::Divisible;
use crate::replication::Index;
use crate::sizes::TXN;

/// A participant, as the coordinator's group knows it.
pub trait Part: Clone {
    /// Its partition.
    fn partition(&self) -> PartitionId;
    /// A participant of which only the partition is known.
    fn bare(partition: PartitionId) -> Self;
}

impl Part for PartitionId {
    fn partition(&self) -> PartitionId {
        *self
    }

    fn bare(partition: PartitionId) -> Self {
        partition
    }
}

impl Part for Participant {
    fn partition(&self) -> PartitionId {
        self.partition
    }

    fn bare(partition: PartitionId) -> Self {
        Self::bare(partition)
    }
}

/// A commit request, as it is replicated in the coordinator's group.
pub trait Request {
    /// The number of the client's request, from 1.
    fn round(&self) -> u32;
    /// True if it replaces one that is already in the log.
    fn supersedes(&self, known: &Self) -> bool;
    /// The client's writes.
    fn writes(&self) -> &Writes;
}

/// The coordinator's decision, as it is sent to a participant.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Verdict {
    /// Commit at this timestamp, with these writes of the participant's keys.
    Commit(Timestamp, Writes),
    /// Abort, for this reason.
    Abort(AbortReason),
}

impl Verdict {
    /// The number of keys that it writes.
    #[must_use]
    pub fn writes(&self) -> usize {
        match self {
            Self::Commit(_, writes) => writes.len(),
            Self::Abort(_) => 0,
        }
    }
}

/// How a transaction ended at this participant. It is kept so that no late message can revive the
/// transaction (R1, C9), until all parties know the outcome *and* its client has acknowledged it
/// (R6).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Wire)]
pub struct Ended {
    /// The group that decided.
    pub coordinator: PartitionId,
    /// The decision.
    pub outcome: Outcome,
    /// True if the coordinator's group has said that it will not ask again.
    pub is_forgettable: bool,
}

/// A transaction that this group coordinates and that some participant has not acknowledged. `A` is
/// a participant, `Q` a commit request.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Coordinated<A, Q> {
    /// The participants. The replicas share them with the log.
    pub participants: Arc<Vec<A>>,
    /// The commit request, once it is replicated.
    pub request: Option<Q>,
    /// The decision, once it is replicated.
    pub decision: Option<Outcome>,
}

impl<A, Q> Default for Coordinated<A, Q> {
    fn default() -> Self {
        Self { participants: Arc::default(), request: None, decision: None }
    }
}

impl<A: Part, Q: Request> Coordinated<A, Q> {
    /// The number of the client's last request; 0 if there is none.
    #[must_use]
    pub fn round(&self) -> u32 {
        self.request.as_ref().map_or(0, Q::round)
    }

    /// The participating partitions.
    pub fn partitions(&self) -> impl Iterator<Item = PartitionId> {
        self.participants.iter().map(A::partition)
    }

    /// Stores the participants' partitions, if they were not known.
    fn know(&mut self, participants: &[PartitionId]) {
        if self.participants.is_empty() {
            self.participants = Arc::new(participants.iter().copied().map(A::bare).collect());
        }
    }
}

/// A partition's replicated state, except its data. `P` is a transaction that this partition has
/// prepared, `E` one that has ended at this participant, and `C` one that this group coordinates.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct State<P, E, C> {
    /// Index of the last log entry applied.
    pub applied: Index,
    /// Prepared; the decision is not known.
    pub prepared: OrdMap<TxnId, P>,
    /// Ended at this participant.
    pub ended: TxnMap<E>,
    /// Coordinated here, and not acknowledged by all participants.
    pub coordinated: OrdMap<TxnId, C>,
    /// Coordinated here and acknowledged by all participants; kept for clients that ask again.
    pub settled: TxnMap<Outcome>,
    /// At or above every commit timestamp applied here, of reads and of writes (C11).
    pub floor: Timestamp,
    /// At or above every timestamp that any leader has promised (R8).
    pub ceiling: Timestamp,
    /// Clients know the outcomes of their transactions below these counters.
    pub acknowledged: OrdMap<ClientId, u64>,
}

impl<P, E, C> Default for State<P, E, C> {
    fn default() -> Self {
        Self {
            applied: Index::default(),
            prepared: OrdMap::new(),
            ended: TxnMap::default(),
            coordinated: OrdMap::new(),
            settled: TxnMap::default(),
            floor: Timestamp::ZERO,
            ceiling: Timestamp::ZERO,
            acknowledged: OrdMap::new(),
        }
    }
}

/// The change that an applied command made, for the leader to act on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Applied {
    /// No change that anybody waits for.
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

impl Applied {
    /// Adds the change to a digest that replicas compare. The digest is that of the `Debug` form,
    /// which earlier versions formatted for each entry at each replica.
    pub(crate) fn add_to(self, digest: &mut Digest) {
        let (name, txn) = match self {
            Self::Nothing => ("Nothing", None),
            Self::Prepared(txn) => ("Prepared", Some(txn)),
            Self::Ended(txn) => ("Ended", Some(txn)),
            Self::Requested(txn) => ("Requested", Some(txn)),
            Self::Decided(txn) => ("Decided", Some(txn)),
            Self::Settled => ("Settled", None),
            Self::Ceiling => ("Ceiling", None),
        };
        digest.add_text(name);
        if let Some(TxnId { client, counter, attempt, content: _ }) = txn {
            digest.add_text("(");
            digest.add_text("c");
            digest.add_number(client.0);
            digest.add_text(".");
            digest.add_number(counter);
            if attempt > 0 {
                digest.add_text("#");
                digest.add_number(u64::from(attempt));
            }
            digest.add_text(")");
        }
        digest.add_text(";");
    }
}

/// For both roles.
impl<P, E, C> State<P, E, C> {
    /// The partition has prepared a transaction.
    pub(crate) fn prepare(&mut self, txn: TxnId, prepared: impl FnOnce() -> P) -> Applied {
        if self.ended.contains_key(&txn) {
            return Applied::Nothing;
        }
        let Entry::Vacant(place) = self.prepared.entry(txn) else { return Applied::Nothing };
        place.insert(prepared());
        Applied::Prepared(txn)
    }

    /// A transaction that was prepared here commits: its writes are put into the store.
    pub(crate) fn commit(
        &mut self,
        partition: PartitionId,
        txn: TxnId,
        (timestamp, writes): (Timestamp, &Writes),
        store: &mut Store,
    ) {
        let version = Version { timestamp, writer: txn.name() };
        for (key, value) in writes {
            store.put(partition, key.clone(), version, value.clone());
        }
        // This also holds for a transaction that only read here. A later writer of a key that it
        // read must get a larger timestamp; otherwise a snapshot could see that writer and not this
        // transaction (C11).
        self.floor = self.floor.max(timestamp);
        self.ceiling = self.ceiling.max(timestamp);
    }

    /// True if the transaction's client knows its outcome.
    #[must_use]
    pub fn is_acknowledged(&self, txn: TxnId) -> bool {
        is_acknowledged(&self.acknowledged, txn)
    }

    /// True if the transaction has ended here, or its client knows its outcome: no late message may
    /// prepare it.
    #[must_use]
    pub fn is_over(&self, txn: TxnId) -> bool {
        self.ended.contains_key(&txn) || self.is_acknowledged(txn)
    }

    /// True if this group knows nothing of a transaction, because its client has acknowledged it,
    /// or was silent for so long that the group acknowledged it.
    pub(crate) fn has_forgotten(&self, txn: TxnId) -> bool {
        self.is_acknowledged(txn)
            && !self.prepared.contains_key(&txn)
            && !self.ended.contains_key(&txn)
    }

    /// Every version up to this timestamp is in the store, according to a leader that prepares
    /// nothing at or below `floor` from now on, and has prepared transactions with these proposals. It
    /// holds even if the leader was deposed without knowing it: the next one prepares nothing at or below
    /// the ceiling, which is in the log, nor below a commit that is chosen.
    pub(crate) fn closed(
        &self,
        floor: Timestamp,
        proposals: impl Iterator<Item = Timestamp>,
    ) -> Timestamp {
        let promised = floor.min(self.ceiling).max(self.floor);
        proposals.map(|at| Timestamp(at.0.saturating_sub(1))).fold(promised, Timestamp::min)
    }

    /// Allows later timestamps to be promised.
    pub(crate) fn raise_ceiling(&mut self, ceiling: Timestamp) -> Applied {
        self.ceiling = self.ceiling.max(ceiling);
        Applied::Ceiling
    }
}

/// For checks of both roles.
impl<P, E, C> State<P, E, C> {
    /// State that must disappear when nothing is pending. R6 allows endings and outcomes to stay
    /// only above the counters that their clients are known here to have acknowledged.
    pub(crate) fn leaks(&self) -> Vec<Leak> {
        let is_acknowledged = |txn: &&TxnId| self.is_acknowledged(**txn);
        vec![
            ("prepared transactions", self.prepared.len()),
            ("coordinated transactions", self.coordinated.len()),
            ("acknowledged endings", self.ended.keys().filter(is_acknowledged).count()),
            ("acknowledged outcomes", self.settled.keys().filter(is_acknowledged).count()),
        ]
    }

    /// Panics if the state of partition `id` contradicts itself.
    pub(crate) fn assert_invariants(&self, id: PartitionId) {
        assert!(self.floor <= self.ceiling, "{id}: floor above ceiling");
        for txn in self.prepared.keys() {
            assert!(!self.ended.contains_key(txn), "{txn} prepared and ended at {id}");
        }
    }
}

/// For the role of participant: transactions that all parties forget together.
impl<P, C> State<P, Ended, C> {
    /// Endings about which a coordinator's group may still ask must disappear too.
    pub(crate) fn unforgettable(&self) -> Leak {
        let has_questioner = |ended: &&Ended| !ended.is_forgettable;
        ("endings with a questioner", self.ended.values().filter(has_questioner).count())
    }

    /// Ends a transaction that is not prepared here, or not any more.
    pub(crate) fn end(
        &mut self,
        txn: TxnId,
        coordinator: PartitionId,
        outcome: Outcome,
    ) -> Applied {
        if self.prepared.contains_key(&txn) {
            return Applied::Nothing;
        }
        self.end_unprepared(txn, coordinator, outcome)
    }

    /// Ends a transaction that is not prepared here any more.
    pub(crate) fn end_unprepared(
        &mut self,
        txn: TxnId,
        coordinator: PartitionId,
        outcome: Outcome,
    ) -> Applied {
        let ended = Ended { coordinator, outcome, is_forgettable: false };
        self.ended.insert_new(txn, ended);
        Applied::Ended(txn)
    }

    /// The coordinators' groups will not ask about these outcomes again (R6).
    pub(crate) fn forget(&mut self, txns: &[TxnId]) {
        for txn in txns {
            let is_acknowledged = self.is_acknowledged(*txn);
            if let Some(ended) = self.ended.get_mut(txn) {
                ended.is_forgettable = true;
                if is_acknowledged {
                    self.ended.remove(txn);
                }
            }
        }
    }
}

/// For the role of coordinator.
impl<P, A: Part, Q: Request> State<P, Ended, Coordinated<A, Q>> {
    /// Stores the participants of a client's transaction.
    pub(crate) fn coordinate(&mut self, txn: TxnId, participants: &Arc<Vec<A>>) {
        if self.is_acknowledged(txn) || self.settled.contains_key(&txn) {
            return;
        }
        let known = self.coordinated.entry(txn).or_default();
        if known.participants.is_empty() {
            known.participants = participants.clone();
        }
    }

    /// A client has asked to commit.
    pub(crate) fn request(
        &mut self,
        txn: TxnId,
        participants: &[PartitionId],
        request: Q,
    ) -> Applied {
        if self.settled.contains_key(&txn) || self.is_acknowledged(txn) {
            return Applied::Nothing;
        }
        let entry = self.coordinated.entry(txn).or_default();
        let is_new = entry.request.as_ref().is_none_or(|known| request.supersedes(known));
        if entry.decision.is_some() || !is_new {
            return Applied::Nothing;
        }
        entry.know(participants);
        entry.request = Some(request);
        Applied::Requested(txn)
    }

    /// Stores a decision. An abort with `only_after` counts only if that request of the client is
    /// the last one in the log (R2).
    pub(crate) fn decide(
        &mut self,
        txn: TxnId,
        outcome: Outcome,
        only_after: Option<u32>,
        participants: &[PartitionId],
    ) -> Applied {
        if self.settled.contains_key(&txn) {
            return Applied::Nothing;
        }
        let entry = self.coordinated.entry(txn).or_default();
        entry.know(participants);
        let round = entry.round();
        if entry.decision.is_some() || only_after.is_some_and(|after| after != round) {
            return Applied::Nothing;
        }
        entry.decision = Some(outcome);
        Applied::Decided(txn)
    }

    /// Every participant has acknowledged these decisions.
    pub(crate) fn settle(&mut self, txns: &[TxnId]) -> Applied {
        for txn in txns {
            if let Some(Coordinated { decision: Some(outcome), .. }) = self.coordinated.remove(txn)
                && !self.is_acknowledged(*txn)
            {
                self.settled.insert(*txn, outcome);
            }
        }
        Applied::Settled
    }

    /// The message to `partition`: the decision, with the writes of the partition's keys.
    pub(crate) fn verdict(
        &self,
        (txn, partition): (TxnId, PartitionId),
        outcome: Outcome,
        cluster: &Cluster,
    ) -> Verdict {
        match outcome {
            Outcome::Committed(timestamp) => {
                let known = self.coordinated.get(&txn).and_then(|known| known.request.as_ref());
                let all = known.into_iter().flat_map(|request| request.writes());
                let mine = all.filter(|(key, _)| cluster.partition_of(key) == partition);
                let writes = mine.map(|(key, value)| (key.clone(), value.clone())).collect();
                Verdict::Commit(timestamp, writes)
            }
            Outcome::Aborted(reason) => Verdict::Abort(reason),
            Outcome::Unknown => unreachable!("a decision is a commit or an abort"),
        }
    }

    /// The outcome of a transaction, if the applied entry states one.
    pub(crate) fn told_by(&self, applied: Applied) -> Option<Claim> {
        let (txn, outcome) = match applied {
            Applied::Ended(txn) => (txn, self.ended.get(&txn)?.outcome),
            Applied::Decided(txn) => (txn, self.decision(txn)?),
            Applied::Nothing
            | Applied::Prepared(_)
            | Applied::Requested(_)
            | Applied::Settled
            | Applied::Ceiling => return None,
        };
        Some(Claim::Decided { txn, outcome })
    }

    /// The outcome of a transaction, as its coordinator's group knows it.
    #[must_use]
    pub fn decision(&self, txn: TxnId) -> Option<Outcome> {
        self.settled.get(&txn).copied().or_else(|| self.coordinated.get(&txn)?.decision)
    }
}

impl<P, A: Part, Q: Request> Outcomes for State<P, Ended, Coordinated<A, Q>> {
    fn decision(&self, txn: TxnId) -> Option<Outcome> {
        self.decision(txn)
    }

    fn participants(&self, txn: TxnId) -> Option<Vec<PartitionId>> {
        self.coordinated.get(&txn).map(|known| known.partitions().collect())
    }

    fn is_kept(&self, txn: TxnId) -> bool {
        self.settled.contains_key(&txn)
    }

    fn is_acknowledged(&self, txn: TxnId) -> bool {
        self.is_acknowledged(txn)
    }
}

/// For both roles.
impl<P, C> State<P, Ended, C> {
    /// `client` knows the outcomes of its transactions below a counter (R6).
    pub(crate) fn acknowledge(&mut self, client: ClientId, below: u64) {
        // Else this was known.
        let Some(names) = advance(&mut self.acknowledged, client, below) else { return };
        self.ended.retain_within(&names, |ended| !ended.is_forgettable);
        self.settled.retain_within(&names, |_| false);
    }
}

/// Encoded size of an outcome with its transaction's name.
const OUTCOME: usize = TXN + 16;
/// Encoded size of a client's acknowledgement.
const ACKNOWLEDGED: usize = 16;

impl<P, E, C> Divisible for State<P, E, C>
where
    P: Wire + Clone,
    E: Wire + Clone,
    C: Wire + Clone,
{
    fn divide(self, bytes_max: usize) -> Vec<Self> {
        let State { applied, prepared, ended, coordinated, .. } = self;
        let State { settled, floor, ceiling, acknowledged, .. } = self;
        let mut parts = Pieces::new(Self { applied, floor, ceiling, ..Self::default() }, bytes_max);
        for (txn, prepared) in prepared {
            parts.of(prepared.size()).prepared.insert(txn, prepared);
        }
        for (txn, ended) in ended.into_entries() {
            parts.of(OUTCOME).ended.insert(txn, ended);
        }
        for (txn, coordinated) in coordinated {
            parts.of(coordinated.size()).coordinated.insert(txn, coordinated);
        }
        for (txn, outcome) in settled.into_entries() {
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
        self.ended.extend(ended.into_entries());
        self.coordinated.extend(coordinated);
        self.settled.extend(settled.into_entries());
        self.acknowledged.extend(acknowledged);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(counter: u64, attempt: u32) -> TxnId {
        TxnId { attempt, ..TxnId::new(ClientId(7), counter) }
    }

    /// Replicas of an earlier version compare their digests with those of this one.
    #[test]
    fn the_digest_of_a_change_is_that_of_its_debug_form() {
        for txn in [name(0, 0), name(9, 1), name(10, 0), name(u64::MAX, u32::MAX)] {
            for applied in [
                Applied::Nothing,
                Applied::Prepared(txn),
                Applied::Ended(txn),
                Applied::Requested(txn),
                Applied::Decided(txn),
                Applied::Settled,
                Applied::Ceiling,
            ] {
                let (mut short, mut formatted) = (Digest::default(), Digest::default());
                applied.add_to(&mut short);
                formatted.add_debug(&applied);
                assert_eq!(short, formatted, "{applied:?}");
            }
        }
    }
}
