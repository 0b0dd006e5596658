//! The state that every replica of a partition has, in addition to [`commit::State`]: how the log's
//! commands change it, and how votes decide.

use orthodrome_core::Wire;
use orthodrome_core::id::{PartitionId, TxnId};
use orthodrome_core::ordered::OrdSet;
use orthodrome_core::store::Store;
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::{AbortReason, Key, Outcome, Version, Writes};

use super::Mutations;
use super::message::{Command, Turn, Vote};
use crate::commit::{self, Applied, Verdict};

/// A transaction that this partition has prepared and whose decision it does not know.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Prepared {
    /// The group that decides.
    pub coordinator: PartitionId,
    /// Its turn.
    pub turn: Turn,
    /// Keys read, with the versions read.
    pub versions: Vec<(Key, Version)>,
    /// Keys it may write.
    pub writes: Vec<Key>,
    /// The commit timestamp must not be smaller.
    pub proposal: Timestamp,
    /// The prepare is valid only if none of these commits (N6): each is prepared here too, and was
    /// before.
    pub unless: Vec<TxnId>,
    /// Transactions refused in its favour.
    pub refused: Vec<TxnId>,
}

impl Prepared {
    /// The keys that it read.
    pub fn reads(&self) -> impl Iterator<Item = &Key> {
        self.versions.iter().map(|(key, _)| key)
    }

    /// The vote for it.
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

/// A commit request: the client's writes, and the versions of its reads.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Request {
    /// The writes.
    pub writes: Writes,
    /// The version of each key that the client read.
    pub versions: Vec<(Key, Version)>,
    /// The number of the client's request.
    pub round: u32,
    /// True if another request may follow, on other reads.
    pub is_provisional: bool,
}

impl commit::Request for Request {
    fn round(&self) -> u32 {
        self.round
    }

    fn supersedes(&self, known: &Self) -> bool {
        known.is_provisional && known.round < self.round
    }

    fn writes(&self) -> &Writes {
        &self.writes
    }
}

/// A transaction that this partition's group coordinates.
pub type Coordinated = commit::Coordinated<PartitionId, Request>;

/// A partition's replicated state, without its data.
pub type State = commit::State<Prepared, commit::Ended, Coordinated>;

impl State {
    /// Applies one log entry. The same entries give the same state on every replica.
    pub fn apply(
        &mut self,
        partition: PartitionId,
        command: &Command,
        store: &mut Store,
    ) -> Applied {
        match command {
            Command::Prepare {
                txn,
                coordinator,
                turn,
                versions,
                writes,
                proposal,
                unless,
                refused,
                acknowledged_below,
            } => {
                self.acknowledge(txn.client, *acknowledged_below);
                self.prepare(*txn, || Prepared {
                    coordinator: *coordinator,
                    turn: *turn,
                    versions: versions.clone(),
                    writes: writes.clone(),
                    proposal: *proposal,
                    unless: unless.clone(),
                    refused: refused.clone(),
                })
            }
            Command::Refuse { txn, coordinator, reason } => self.abort(*txn, *coordinator, *reason),
            Command::End { txn, coordinator, verdict: Verdict::Commit(timestamp, writes) } => {
                let Some(prepared) = self.prepared.remove(txn) else {
                    // It committed here before; the entry is a repetition by a later leader.
                    return Applied::Ended(*txn);
                };
                // N6: its commit means that these have aborted.
                for other in prepared.unless {
                    if let Some(Prepared { coordinator, .. }) = self.prepared.remove(&other) {
                        self.abort(other, coordinator, AbortReason::Conflict);
                    }
                }
                // And prepares on the condition that it does not commit are void.
                self.prepared.retain(|_, prepared| !prepared.unless.contains(txn));
                self.commit(partition, *txn, (*timestamp, writes), store);
                self.end(*txn, *coordinator, Outcome::Committed(*timestamp))
            }
            Command::End { txn, coordinator, verdict: Verdict::Abort(reason) } => {
                self.prepared.remove(txn);
                self.abort(*txn, *coordinator, *reason)
            }
            Command::Coordinate { txn, participants, acknowledged_below } => {
                self.acknowledge(txn.client, *acknowledged_below);
                self.coordinate(*txn, participants);
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
                let request = Request {
                    writes: writes.clone(),
                    versions: versions.clone(),
                    round: *round,
                    is_provisional: *is_provisional,
                };
                self.request(*txn, participants, request)
            }
            Command::Decide { txn, outcome, only_after, participants } => {
                self.decide(*txn, *outcome, *only_after, participants)
            }
            Command::Settle(txns) => self.settle(txns),
            Command::Forget(txns) => {
                self.forget(txns);
                Applied::Nothing
            }
            Command::Acknowledge(clients) => {
                for &(client, below) in clients {
                    self.acknowledge(client, below);
                }
                Applied::Nothing
            }
            Command::Ceiling(ceiling) => self.raise_ceiling(*ceiling),
        }
    }

    /// A transaction that is not prepared here aborts: no prepare depends on it any more.
    fn abort(&mut self, txn: TxnId, coordinator: PartitionId, reason: AbortReason) -> Applied {
        let applied = self.end(txn, coordinator, Outcome::Aborted(reason));
        if applied != Applied::Nothing {
            for prepared in self.prepared.values_mut() {
                prepared.unless.retain(|other| *other != txn);
            }
        }
        applied
    }

    /// The transactions that `command` aborts in addition: a transaction that commits on the
    /// condition that they do not excludes them for ever (N6).
    #[must_use]
    pub fn aborted_by(&self, command: &Command) -> Vec<TxnId> {
        let Command::End { txn, verdict: Verdict::Commit(..), .. } = command else { return vec![] };
        self.prepared.get(txn).map_or_else(Vec::new, |prepared| prepared.unless.clone())
    }

    /// Transactions prepared on the condition that `txn` does not commit, with their coordinators'
    /// groups.
    #[must_use]
    pub fn dependents(&self, txn: TxnId) -> Vec<(TxnId, PartitionId)> {
        let depends = self.prepared.iter().filter(|(_, prepared)| prepared.unless.contains(&txn));
        depends.map(|(txn, prepared)| (*txn, prepared.coordinator)).collect()
    }
}

/// The only decision function (R7): a function of durable facts alone, so that every coordinator
/// with these facts makes the same decision. `vote` returns each participant's vote, if it is
/// known. Two mutations change it, for tests.
///
/// Returns none while the decision is open.
#[must_use]
pub fn decide<'a>(
    participants: impl IntoIterator<Item = PartitionId> + Clone,
    request: Option<&Request>,
    vote: impl Fn(PartitionId) -> Option<&'a Vote>,
    mutations: Mutations,
) -> Option<Outcome> {
    // A participant has committed it: it is decided.
    for partition in participants.clone() {
        if let Some(Vote::Committed(timestamp)) = vote(partition) {
            return Some(Outcome::Committed(*timestamp));
        }
    }
    // One refusal suffices, whatever the other votes are.
    for partition in participants.clone() {
        if let Some(Vote::Refused(reason)) = vote(partition) {
            return Some(Outcome::Aborted(*reason));
        }
    }
    let request = request?;
    let mut timestamp = Timestamp::ZERO;
    let (mut conditions, mut evidence) = (OrdSet::<TxnId>::new(), OrdSet::<TxnId>::new());
    for partition in participants.clone() {
        let Some(Vote::Prepared { proposal, unless, refused, .. }) = vote(partition) else {
            return None;
        };
        timestamp = timestamp.max(*proposal);
        conditions.extend(unless);
        evidence.extend(refused);
    }
    // N3: a condition is true only if some participant has refused that transaction for ever. It is
    // not enough that no participant contradicts it.
    if !conditions.is_subset(&evidence) && !mutations.conditions_are_trusted() {
        return None;
    }
    let is_contradicted =
        participants.into_iter().filter_map(vote).any(|vote| contradicts(vote, request));
    match request.is_provisional {
        _ if !is_contradicted => Some(Outcome::Committed(timestamp)),
        true if mutations.provisional_reads_count() => Some(Outcome::Committed(timestamp)),
        // Its client will ask again, or abort.
        true => None,
        false => Some(Outcome::Aborted(AbortReason::StaleRead)),
    }
}

/// R3: true if the client computed from other versions than the participant has.
fn contradicts(vote: &Vote, request: &Request) -> bool {
    let Vote::Prepared { versions, .. } = vote else { return false };
    versions.iter().any(|(key, version)| {
        let read = request.versions.iter().find(|(read, _)| read == key);
        read.is_some_and(|(_, read)| read != version)
    })
}

/// True if this request can never be committed, because an unconditional vote contradicts it. Only
/// then may the coordinator's group abort a transaction that its client asked to commit.
#[must_use]
pub fn is_refuted<'a>(request: &Request, mut votes: impl Iterator<Item = &'a Vote>) -> bool {
    votes.any(|vote| {
        let stands = matches!(vote, Vote::Prepared { unless, .. } if unless.is_empty());
        stands && contradicts(vote, request)
    })
}
