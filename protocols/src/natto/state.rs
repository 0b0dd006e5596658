//! What every replica of a partition knows, beside what [`commit::State`] says: how the log's commands
//! change it, and when votes decide.

use std::collections::BTreeSet;

use orthodrome_core::Wire;
use orthodrome_core::id::{PartitionId, TxnId};
use orthodrome_core::store::Store;
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::{AbortReason, Key, Outcome, Version, Writes};

use super::Mutations;
use super::message::{Command, Turn, Vote};
use crate::commit::{self, Applied, Verdict};

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

/// A partition's replicated state, data apart.
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
                    // Committed here before; the entry is a repetition by a later leader.
                    return Applied::Ended(*txn);
                };
                // N6: that it commits is that these have aborted.
                for other in prepared.unless {
                    if let Some(Prepared { coordinator, .. }) = self.prepared.remove(&other) {
                        self.abort(other, coordinator, AbortReason::Conflict);
                    }
                }
                // And whatever stood on the condition that it does not is void.
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

    /// A transaction that is not prepared here aborts: nobody's prepare stands on that any more.
    fn abort(&mut self, txn: TxnId, coordinator: PartitionId, reason: AbortReason) -> Applied {
        let applied = self.end(txn, coordinator, Outcome::Aborted(reason));
        if applied != Applied::Nothing {
            for prepared in self.prepared.values_mut() {
                prepared.unless.retain(|other| *other != txn);
            }
        }
        applied
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
    if !conditions.is_subset(&evidence) && !mutations.conditions_are_trusted() {
        return None;
    }
    let is_contradicted =
        participants.into_iter().filter_map(vote).any(|vote| contradicts(vote, request));
    match request.is_provisional {
        _ if !is_contradicted => Some(Outcome::Committed(timestamp)),
        true if mutations.provisional_reads_count() => Some(Outcome::Committed(timestamp)),
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
