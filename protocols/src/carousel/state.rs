//! The state that every replica of a partition has, in addition to [`commit::State`]: how the log's
//! commands change it, and how votes decide.

use std::sync::Arc;

use orthodrome_core::Wire;
use orthodrome_core::id::PartitionId;
use orthodrome_core::store::Store;
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::{AbortReason, Key, Outcome, Version, Writes};

use super::message::{Command, Vote};
use crate::commit::{self, Applied, Verdict};
use crate::gateway::Participant;

/// A transaction that this partition has prepared and whose decision it does not know.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Prepared {
    /// The group that decides.
    pub coordinator: PartitionId,
    /// Keys read, with the versions read.
    pub versions: Arc<Vec<(Key, Version)>>,
    /// Keys it may write.
    pub writes: Arc<Vec<Key>>,
    /// The commit timestamp must not be smaller.
    pub proposal: Timestamp,
}

impl Prepared {
    /// Every key that it holds; a key that is read and written occurs twice.
    pub fn keys(&self) -> impl Iterator<Item = &Key> {
        self.versions.iter().map(|(key, _)| key).chain(self.writes.iter())
    }

    /// The vote for it.
    #[must_use]
    pub fn vote(&self) -> Vote {
        Vote::Prepared { versions: self.versions.clone(), proposal: self.proposal }
    }
}

/// A commit request: the client's writes, and the versions of its reads.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Request {
    /// The writes.
    pub writes: Arc<Writes>,
    /// The version of each key that the client read.
    pub versions: Arc<Vec<(Key, Version)>>,
}

impl commit::Request for Request {
    fn round(&self) -> u32 {
        1
    }

    /// The first request counts.
    fn supersedes(&self, _known: &Self) -> bool {
        false
    }

    fn writes(&self) -> &Writes {
        &self.writes
    }
}

/// A transaction that this partition's group coordinates.
pub type Coordinated = commit::Coordinated<Participant, Request>;

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
                versions,
                writes,
                proposal,
                acknowledged_below,
            } => {
                self.acknowledge(txn.client, *acknowledged_below);
                self.prepare(*txn, || Prepared {
                    coordinator: *coordinator,
                    versions: versions.clone(),
                    writes: writes.clone(),
                    proposal: *proposal,
                })
            }
            Command::Refuse { txn, coordinator, reason } => {
                self.end(*txn, *coordinator, Outcome::Aborted(*reason))
            }
            Command::End { txn, coordinator, verdict: Verdict::Commit(timestamp, writes) } => {
                if self.prepared.remove(txn).is_none() {
                    // It committed here before; the entry is a repetition by a later leader.
                    return Applied::Ended(*txn);
                }
                self.commit(partition, *txn, (*timestamp, writes), store);
                self.end_unprepared(*txn, *coordinator, Outcome::Committed(*timestamp))
            }
            Command::End { txn, coordinator, verdict: Verdict::Abort(reason) } => {
                self.prepared.remove(txn);
                self.end_unprepared(*txn, *coordinator, Outcome::Aborted(*reason))
            }
            Command::Coordinate { txn, participants, acknowledged_below } => {
                self.acknowledge(txn.client, *acknowledged_below);
                self.coordinate(*txn, participants);
                Applied::Nothing
            }
            Command::RequestCommit { txn, participants, writes, versions } => {
                let request = Request { writes: writes.clone(), versions: versions.clone() };
                self.request(*txn, participants, request)
            }
            Command::Decide { txn, outcome, unilateral, participants } => {
                self.decide(*txn, *outcome, unilateral.then_some(0), participants)
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
}

/// The only decision function (R7): a function of durable facts alone, so that every coordinator
/// with these facts makes the same decision. `vote` returns each participant's vote, if it is known
/// (§4.1.2).
///
/// Returns none while the decision is open.
#[must_use]
pub fn decide<'a>(
    participants: impl IntoIterator<Item = PartitionId> + Clone,
    request: Option<&Request>,
    vote: impl Fn(PartitionId) -> Option<&'a Vote>,
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
    for partition in participants {
        let Some(Vote::Prepared { versions, proposal }) = vote(partition) else { return None };
        timestamp = timestamp.max(*proposal);
        // R3: the participant must still hold the versions from which the client computed.
        for (key, version) in versions.iter() {
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
    use orthodrome_core::id::{ClientId, TxnId};
    use orthodrome_core::txn::Value;

    use super::*;
    use crate::hosting::Divisible as _;
    use crate::replication::Index;

    /// The writes of sixty transactions, 3 MiB each. They used to be one record of 180 MiB at the
    /// next checkpoint, more than a log accepts.
    #[test]
    fn a_state_of_large_requests_is_many_parts_that_are_the_same_together() {
        let value = Some(Value::from(vec![b'x'; 1 << 20]));
        let mut state = State { applied: Index(9), floor: Timestamp(3), ..State::default() };
        for counter in 0..60 {
            let txn = TxnId::new(ClientId(counter % 7), counter);
            let writes = (0..3).map(|n| (Key::from(format!("{counter}-{n}")), value.clone()));
            let request =
                Some(Request { writes: Arc::new(writes.collect()), versions: Arc::default() });
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
