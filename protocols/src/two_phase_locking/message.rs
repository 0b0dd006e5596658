//! The messages between the machines of two-phase locking, and the commands that they replicate.
//!
//! Every message that names a transaction names one attempt of it (`protocol-pitfalls` R3). A
//! message to a partition may reach a node that does not lead it any more. That node answers
//! [`Msg::NotLeader`], and the sender sends the message again to the leader.

use std::mem::size_of;

use orthodrome_core::Wire;
use orthodrome_core::id::{ClientId, NodeId, PartitionId, TxnId};
use orthodrome_core::machine::Message;
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::{AbortReason, Key, Outcome, Read, Version, Writes};

use super::locks::{Mode, Rank};
use super::state::State;
use crate::gateway::{Participant, Snapshot};
use crate::hosting::{self, Chunk, Cursor};
use crate::replication::{self, Index, Replicated};

/// Durable records of a server.
pub type Record = hosting::Record<Log, State>;

/// A participant's answer to [`Msg::Prepare`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Wire)]
pub enum Vote {
    /// It holds every lock, every value read is still the newest, and the prepare is replicated.
    /// The partition stays able to commit the transaction until it learns the decision.
    Prepared {
        /// The commit timestamp must not be smaller.
        proposal: Timestamp,
    },
    /// It cannot prepare, for this reason. This binds nobody: the coordinator's log decides.
    Refused(AbortReason),
}

/// A message.
#[derive(Clone, PartialEq, Eq, Debug, Wire, Message)]
pub enum Msg {
    /// Client → participant leader: lock these keys, and read. A general transaction sends one for
    /// each round that accesses the partition.
    #[message(to = participant.partition, keys = participant.keys())]
    Lock {
        /// The transaction.
        txn: TxnId,
        /// The number of its round, from 1; other transactions have only one round.
        round: u32,
        /// Its rank.
        rank: Rank,
        /// The keys that it accesses here in this round.
        participant: Participant,
    },
    /// Participant leader → client: every lock is held here, and these are the values. Valid until
    /// the leader changes or sends `Wounded`. Safety comes from the prepare, which checks again.
    #[message(led = partition)]
    Locked {
        /// The transaction.
        txn: TxnId,
        /// The number of the round that is complete here.
        round: u32,
        /// The partition.
        partition: PartitionId,
        /// Every key read here in this round.
        reads: Vec<(Key, Read)>,
    },
    /// Participant leader → client: the transaction waits for a lock here. Sent in answer to a
    /// repeated request; with preempt-on-wait, also at once for a transaction of low priority.
    #[message(led = partition)]
    Waiting {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
    },
    /// Participant leader → client: the transaction has lost its locks here.
    #[message(led = partition)]
    Wounded {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
        /// The reason.
        reason: AbortReason,
    },
    /// Client → participant leader: the clients of these transactions are alive and have not
    /// decided.
    #[message(to = partition)]
    KeepAlive {
        /// The partition.
        partition: PartitionId,
        /// The transactions.
        txns: Vec<TxnId>,
        /// Those of them that wait for a lock elsewhere (preempt-on-wait).
        waiting: Vec<TxnId>,
    },
    /// Client → participant leader: the transaction will not be committed, or not here; release its
    /// locks. It does not affect a prepared transaction.
    #[message(to = partition)]
    Release {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
    },
    /// Client → coordinator: commit this. Repeated until it is answered. It contains everything
    /// that a coordinator without a record of the transaction needs.
    #[message(to = coordinator)]
    Commit {
        /// The transaction.
        txn: TxnId,
        /// The coordinator's group.
        coordinator: PartitionId,
        /// The participants.
        participants: Vec<PartitionId>,
        /// The version of each key that the client read (R3).
        versions: Vec<(Key, Version)>,
        /// The writes.
        writes: Writes,
        /// [`orthodrome_core::Txn::acknowledged_below`].
        acknowledged_below: u64,
    },
    /// Coordinator → participant leader: can you commit this? Sent to every participant, also to
    /// those that are only read (T4).
    #[message(to = partition, led = coordinator, keys = versions.len() + writes.len())]
    Prepare {
        /// The transaction.
        txn: TxnId,
        /// The participant.
        partition: PartitionId,
        /// The group that decides; participants ask the group, not a node (C10).
        coordinator: PartitionId,
        /// The version of each key read here.
        versions: Vec<(Key, Version)>,
        /// The writes here.
        writes: Writes,
        /// [`orthodrome_core::Txn::acknowledged_below`].
        acknowledged_below: u64,
    },
    /// Participant leader → coordinator: the answer.
    #[message(to = coordinator, led = partition)]
    Vote {
        /// The transaction.
        txn: TxnId,
        /// The coordinator's group.
        coordinator: PartitionId,
        /// The participant.
        partition: PartitionId,
        /// Its vote.
        vote: Vote,
    },
    /// Coordinator → client: the outcome, which is in the coordinator's log (R2).
    Decided {
        /// The transaction.
        txn: TxnId,
        /// The outcome.
        outcome: Outcome,
    },
    /// Coordinator → participant leader: the decision. Repeated until acknowledged.
    #[message(to = partition, led = coordinator)]
    Decision {
        /// The transaction.
        txn: TxnId,
        /// The participant.
        partition: PartitionId,
        /// The coordinator's group.
        coordinator: PartitionId,
        /// A commit or an abort.
        #[wire(check = "Outcome::check_decided")]
        outcome: Outcome,
    },
    /// Participant leader → coordinator: the decision is replicated here.
    #[message(to = coordinator, led = partition)]
    DecisionAck {
        /// The transaction.
        txn: TxnId,
        /// The coordinator's group.
        coordinator: PartitionId,
        /// The participant.
        partition: PartitionId,
    },
    /// Participant leader → coordinator, in recovery: it prepared this transaction long ago, and
    /// asks for the decision. A coordinator without a record of the transaction aborts it and then
    /// answers (R1, C10).
    #[message(to = coordinator, led = partition)]
    QueryDecision {
        /// The transaction.
        txn: TxnId,
        /// The coordinator's group.
        coordinator: PartitionId,
        /// The participant.
        partition: PartitionId,
        /// Its vote, in case that was lost.
        proposal: Timestamp,
    },
    /// Client → coordinator: asks for the outcome of this transaction. If nobody asked to commit
    /// it, it is aborted (R1).
    #[message(to = coordinator)]
    Resolve {
        /// The transaction.
        txn: TxnId,
        /// The coordinator's group.
        coordinator: PartitionId,
        /// The participants.
        participants: Vec<PartitionId>,
    },
    /// Client → participant leader: read these in a read-only transaction.
    #[message(to = partition, keys = keys.len())]
    ReadOnly {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
        /// The keys.
        keys: Vec<Key>,
        /// The answer must be valid at least at this timestamp.
        at_least: Timestamp,
    },
    /// Participant leader → client: the values, and how long they are valid.
    #[message(led = partition)]
    ReadOnlyResult {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
        /// The answer.
        snapshot: Snapshot,
        /// The values exceed the size of an answer, so there are none.
        is_too_much: bool,
    },
    /// Any server → sender: this node does not lead this partition.
    NotLeader {
        /// The partition.
        partition: PartitionId,
        /// The leader, if known.
        leader: Option<NodeId>,
        /// The transaction of the request, if it had one.
        txn: Option<TxnId>,
    },
    /// Any replica → any node that sends to the partition: these nodes vote there now, other than
    /// the placement says.
    Members {
        /// The partition.
        partition: PartitionId,
        /// The entry of its log that named them.
        since: Index,
        /// The voters.
        voters: Vec<NodeId>,
    },
    /// Between replicas of one partition.
    #[message(kind = message.kind())]
    Replication {
        /// The partition.
        partition: PartitionId,
        /// The log's message.
        message: replication::Message<Log>,
    },
}

/// The commands that a partition's group replicates.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Command {
    /// As participant: this partition prepared the transaction, with its locks.
    Prepare {
        /// The transaction.
        txn: TxnId,
        /// The group that decides.
        coordinator: PartitionId,
        /// Keys read. Their values were the newest, and stay so while the locks are held.
        reads: Vec<Key>,
        /// The writes.
        writes: Writes,
        /// The commit timestamp must not be smaller.
        proposal: Timestamp,
        /// [`orthodrome_core::Txn::acknowledged_below`].
        acknowledged_below: u64,
    },
    /// As participant: the decision.
    End {
        /// The transaction.
        txn: TxnId,
        /// The group that decided.
        coordinator: PartitionId,
        /// The decision.
        #[wire(check = "Outcome::check_decided")]
        outcome: Outcome,
    },
    /// As coordinator: the decision. The first such entry of a transaction counts.
    Decide {
        /// The transaction.
        txn: TxnId,
        /// The decision.
        #[wire(check = "Outcome::check_decided")]
        outcome: Outcome,
        /// The participants, as far as they are known.
        participants: Vec<PartitionId>,
        /// [`orthodrome_core::Txn::acknowledged_below`]; 0 if it is not known.
        acknowledged_below: u64,
    },
    /// As coordinator: every participant has acknowledged these decisions.
    Settle(Vec<TxnId>),
    /// For each client, the counter below which it knows all outcomes.
    Acknowledge(Vec<(ClientId, u64)>),
    /// No timestamp above this may be promised before a later ceiling is chosen (R8).
    Ceiling(Timestamp),
}

/// The log of one partition's group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Log;

/// The locks for these reads and writes. A key that is written is locked only for writing.
pub fn modes<'a>(
    reads: impl IntoIterator<Item = &'a Key>,
    writes: impl IntoIterator<Item = &'a Key>,
) -> OrdMap<Key, Mode> {
    let mut all: OrdMap<Key, Mode> =
        reads.into_iter().map(|key| (key.clone(), Mode::Shared)).collect();
    all.extend(writes.into_iter().map(|key| (key.clone(), Mode::Exclusive)));
    all
}

impl Replicated for Log {
    type Command = Command;
    type Chunk = Chunk<State>;
    type Cursor = Cursor;
}

const _: () =
    assert!(size_of::<Msg>() <= 200, "messages are moved through queues; keep them small");
