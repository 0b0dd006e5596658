//! The state that every replica of a partition has: a function of the partition's log alone.
//!
//! One partition plays two roles, and its one log serves both. It is *participant* in transactions
//! that access its keys, and *coordinator* of transactions whose clients are in its leader's
//! region. Locks of transactions that are not prepared are not part of this state: they belong to
//! the leader, and are lost with it.

use orthodrome_core::Wire;
use orthodrome_core::id::{ClientId, PartitionId, TxnId};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::store::Store;
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::{Key, Outcome, Writes};

use super::locks::Mode;
use super::message::{Command, Vote, modes};
use crate::acknowledged::advance;
use crate::commit::{self, Applied};

/// A transaction that this partition has prepared and whose decision it does not know. It holds its
/// locks under every leader.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Prepared {
    /// The group that decides.
    pub coordinator: PartitionId,
    /// Keys read.
    pub reads: Vec<Key>,
    /// Its writes.
    pub writes: Writes,
    /// The commit timestamp must not be smaller.
    pub proposal: Timestamp,
}

impl Prepared {
    /// Its locks.
    pub fn locks(&self) -> OrdMap<Key, Mode> {
        modes(&self.reads, self.writes.keys())
    }

    /// The vote for it.
    #[must_use]
    pub fn vote(&self) -> Vote {
        Vote::Prepared { proposal: self.proposal }
    }
}

/// A transaction that this group has decided and that some participant has not acknowledged.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Decided {
    /// The decision.
    #[wire(check = "Outcome::check_decided")]
    pub outcome: Outcome,
    /// The participants.
    pub participants: Vec<PartitionId>,
}

/// A partition's replicated state, without its data. How a transaction ended here is kept so that
/// no late message can revive it (R1, C9), until its client has acknowledged it (R6). `coordinated`
/// has the decisions made here that some participant has not acknowledged.
pub type State = commit::State<Prepared, Outcome, Decided>;

impl State {
    /// Applies one log entry. The same entries give the same state on every replica.
    pub fn apply(
        &mut self,
        partition: PartitionId,
        command: &Command,
        store: &mut Store,
    ) -> Applied {
        match command {
            Command::Prepare { txn, coordinator, reads, writes, proposal, acknowledged_below } => {
                self.acknowledge(txn.client, *acknowledged_below);
                self.prepare(*txn, || Prepared {
                    coordinator: *coordinator,
                    reads: reads.clone(),
                    writes: writes.clone(),
                    proposal: *proposal,
                })
            }
            Command::End { txn, coordinator: _, outcome } => {
                self.end(partition, *txn, *outcome, store);
                Applied::Ended(*txn)
            }
            Command::Decide { txn, outcome, participants, acknowledged_below } => {
                self.acknowledge(txn.client, *acknowledged_below);
                if self.settled.contains_key(txn) || self.coordinated.contains_key(txn) {
                    return Applied::Nothing;
                }
                let decided = Decided { outcome: *outcome, participants: participants.clone() };
                self.coordinated.insert(*txn, decided);
                Applied::Decided(*txn)
            }
            Command::Settle(txns) => {
                for txn in txns {
                    if let Some(Decided { outcome, .. }) = self.coordinated.remove(txn)
                        && !self.is_acknowledged(*txn)
                    {
                        self.settled.insert(*txn, outcome);
                    }
                }
                Applied::Settled
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

    fn end(&mut self, partition: PartitionId, txn: TxnId, outcome: Outcome, store: &mut Store) {
        let prepared = self.prepared.remove(&txn);
        if let Outcome::Committed(timestamp) = outcome {
            // It is not prepared: it committed here before, and the entry is a repetition by a
            // later leader.
            let Some(prepared) = prepared else { return };
            self.commit(partition, txn, (timestamp, &prepared.writes), store);
        }
        if !self.is_acknowledged(txn) {
            self.ended.insert_new(txn, outcome);
        }
    }

    fn acknowledge(&mut self, client: ClientId, below: u64) {
        // Else this was known.
        let Some(names) = advance(&mut self.acknowledged, client, below) else { return };
        for map in [&mut self.ended, &mut self.settled] {
            map.retain_within(&names, |_| false);
        }
    }

    /// The decision of this group as coordinator, as far as it remembers.
    #[must_use]
    pub fn decision(&self, txn: TxnId) -> Option<Outcome> {
        let settled = self.settled.get(&txn).copied();
        settled.or_else(|| Some(self.coordinated.get(&txn)?.outcome))
    }
}

/// The only decision function (R7): a function of votes alone. `vote` returns each participant's
/// vote, if it is known. The result becomes the decision when it is chosen in the coordinator's
/// log, unless another one was chosen before.
///
/// Returns none while the decision is open.
#[must_use]
pub fn decide(
    participants: impl IntoIterator<Item = PartitionId> + Clone,
    vote: impl Fn(PartitionId) -> Option<Vote>,
) -> Option<Outcome> {
    // One refusal suffices, whatever the other votes are.
    for partition in participants.clone() {
        if let Some(Vote::Refused(reason)) = vote(partition) {
            return Some(Outcome::Aborted(reason));
        }
    }
    let mut timestamp = Timestamp::ZERO;
    for partition in participants {
        let Some(Vote::Prepared { proposal }) = vote(partition) else { return None };
        timestamp = timestamp.max(proposal);
    }
    Some(Outcome::Committed(timestamp))
}
