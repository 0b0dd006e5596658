//! The messages between Natto's machines, the commands that they replicate, and their durable
//! records.
//!
//! Every message that names a transaction names one attempt of it (`protocol-pitfalls` R3). A
//! message to a partition may reach a node that does not lead it any more. That node answers
//! [`Msg::NotLeader`], and the sender sends the message again to the leader.

use std::mem::size_of;
use std::sync::Arc;

use orthodrome_core::Wire;
use orthodrome_core::id::{ClientId, NodeId, PartitionId, TxnId};
use orthodrome_core::machine::Message;
use orthodrome_core::time::{Duration, Timestamp};
use orthodrome_core::txn::{AbortReason, Key, Outcome, Priority, Read, Version, Writes};

use super::state::State;
use crate::commit::Verdict;
use crate::gateway::{Participant, Snapshot};
use crate::hosting::{self, Chunk, Cursor};
use crate::replication::{self, Index, Replicated};

/// Durable records of a server.
pub type Record = hosting::Record<Log, State>;

/// When a transaction is processed, and its priority (§3.2).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Wire)]
pub struct Turn {
    /// When it should have arrived everywhere, by the participants' clocks. The same at each of
    /// them, and for all requests of one attempt.
    pub timestamp: Timestamp,
    /// Its priority: [`Priority::LOW`] gives way, all others wait in line.
    pub priority: Priority,
}

/// A transaction's keys at another participant, and when it should arrive there, by that
/// participant's clock: enough to predict whether it is aborted there (§3.3.2).
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Elsewhere {
    /// The other participant's part.
    pub participant: Participant,
    /// When it should have arrived.
    pub arrives: Timestamp,
}

/// A participant's answer to a prepare request. It is sent only once it is replicated in the
/// participant's group, so that every later leader gives the same answer.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Vote {
    /// The partition can commit the transaction, and stays able to until it learns the decision.
    Prepared {
        /// The version of each key read, as prepared (R3).
        versions: Vec<(Key, Version)>,
        /// The commit timestamp must not be smaller (C11).
        proposal: Timestamp,
        /// The vote is valid only if none of these transactions commits (§3.3.2). If empty, it is
        /// unconditional.
        unless: Vec<TxnId>,
        /// Transactions that the partition has refused in favour of this one. They can never
        /// commit, which proves conditions elsewhere (N3).
        refused: Vec<TxnId>,
    },
    /// The partition can never commit it.
    Refused(AbortReason),
    /// The partition has committed it already, at this timestamp. An earlier leader of the
    /// coordinator's group decided so and informed all, but failed before its own group knew.
    Committed(Timestamp),
}

/// A message.
#[derive(Clone, PartialEq, Eq, Debug, Wire, Message)]
pub enum Msg {
    /// Client → participant leader: when its turn has come, read and prepare at the same time
    /// (§3.2).
    #[message(to = participant.partition, keys = participant.keys())]
    ReadAndPrepare {
        /// The transaction.
        txn: TxnId,
        /// The keys that it accesses here.
        participant: Participant,
        /// The group that decides; participants ask the group, not a node (C10).
        coordinator: PartitionId,
        /// Its turn.
        turn: Turn,
        /// How long after its turn it will need its keys here, if it meets no conflict (§3.3.1).
        lasts: Duration,
        /// Its keys at the other participants; empty if the protocol does not use them (§3.3.2).
        elsewhere: Vec<Elsewhere>,
        /// [`orthodrome_core::Txn::acknowledged_below`].
        acknowledged_below: u64,
    },
    /// Participant leader → client: the values as prepared. Sent before the prepare is replicated;
    /// the version check at the coordinator makes that safe.
    #[message(led = partition)]
    ReadResult {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
        /// Every key read here.
        reads: Vec<(Key, Read)>,
        /// True if other values may follow: the prepare depends on a condition (§3.3.2).
        is_provisional: bool,
    },
    /// Participant leader → coordinator of the transaction for which this one waits: if that one
    /// commits, send this one's client the values that it reads (§3.4, RECSF).
    #[message(to = coordinator, led = partition, keys = reads.len())]
    ForwardRead {
        /// The transaction that waits.
        txn: TxnId,
        /// Its gateway.
        client: NodeId,
        /// The partition where it waits.
        partition: PartitionId,
        /// The only transaction for which it waits.
        of: TxnId,
        /// The coordinator's group of that transaction.
        coordinator: PartitionId,
        /// Every key that it reads there, without that transaction's writes.
        reads: Vec<(Key, Read)>,
    },
    /// Coordinator of another transaction → client: the values that it reads at a participant, now
    /// that the other transaction has committed. Provisional: the participant decides (N8).
    ForwardedRead {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
        /// Every key read there.
        reads: Vec<(Key, Read)>,
    },
    /// Participant leader → client, in answer to a repeated request: its turn has not come yet, or
    /// it waits for a lock.
    #[message(led = partition)]
    Waiting {
        /// The transaction.
        txn: TxnId,
        /// The partition where it waits.
        partition: PartitionId,
    },
    /// Client → coordinator, together with `ReadAndPrepare`: the participants. Replicated, so that
    /// a new coordinator knows them.
    #[message(to = coordinator)]
    CoordinatorPrepare {
        /// The transaction.
        txn: TxnId,
        /// The coordinator's group.
        coordinator: PartitionId,
        /// All participants.
        participants: Arc<Vec<PartitionId>>,
        /// [`orthodrome_core::Txn::acknowledged_below`].
        acknowledged_below: u64,
    },
    /// Client → coordinator: commit these writes. Repeated until it is answered. It contains
    /// everything that a coordinator without a record of the transaction needs (C14).
    #[message(to = coordinator)]
    Commit {
        /// The transaction.
        txn: TxnId,
        /// The coordinator's group.
        coordinator: PartitionId,
        /// The participants.
        participants: Vec<PartitionId>,
        /// The writes.
        writes: Writes,
        /// The version of each key that the client read (R3).
        versions: Vec<(Key, Version)>,
        /// The number of the client's request, from 1: a later one is based on later reads (N5).
        round: u32,
        /// True if some of its reads are provisional, so that a later request may follow.
        is_provisional: bool,
    },
    /// Client → coordinator: the application aborted.
    #[message(to = coordinator)]
    Abort {
        /// The transaction.
        txn: TxnId,
        /// The coordinator's group.
        coordinator: PartitionId,
        /// The participants.
        participants: Vec<PartitionId>,
        /// The number of the client's commit requests so far, on reads that were wrong.
        round: u32,
        /// True if the client aborts because its reads were wrong, and not because of the
        /// application.
        is_stale: bool,
    },
    /// Client → coordinator: the clients of these transactions are alive and have not decided.
    #[message(to = coordinator)]
    Heartbeat {
        /// The coordinator's group.
        coordinator: PartitionId,
        /// The transactions.
        txns: Vec<TxnId>,
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
    /// Coordinator → client: the outcome. A function of durable facts (R2).
    Decided {
        /// The transaction.
        txn: TxnId,
        /// The outcome.
        outcome: Outcome,
    },
    /// Participant leader → coordinator: the participant's vote.
    #[message(to = coordinator, led = partition)]
    PrepareResult {
        /// The transaction.
        txn: TxnId,
        /// The coordinator's group.
        coordinator: PartitionId,
        /// The participant.
        partition: PartitionId,
        /// Its vote.
        vote: Vote,
    },
    /// Coordinator → participant leader: the decision. Repeated until acknowledged.
    #[message(to = partition, led = coordinator, keys = verdict.writes())]
    Writeback {
        /// The transaction.
        txn: TxnId,
        /// The participant.
        partition: PartitionId,
        /// The coordinator's group.
        coordinator: PartitionId,
        /// The decision.
        verdict: Verdict,
    },
    /// Participant leader → coordinator: the decision is replicated here.
    #[message(to = coordinator, led = partition)]
    WritebackAck {
        /// The transaction.
        txn: TxnId,
        /// The coordinator's group.
        coordinator: PartitionId,
        /// The participant.
        partition: PartitionId,
    },
    /// Coordinator → participant leader, in recovery: asks for its vote. A participant without a
    /// record of the transaction refuses it for ever and then answers; it never prepares (R1). A
    /// participant where the transaction still waits does not answer yet.
    #[message(to = partition, led = coordinator)]
    QueryPrepare {
        /// The transaction.
        txn: TxnId,
        /// The participant.
        partition: PartitionId,
        /// The coordinator's group.
        coordinator: PartitionId,
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
        vote: Vote,
    },
    /// Participant leader → coordinator: asks which of these outcomes it may forget (R6).
    #[message(to = coordinator, led = partition)]
    MayForget {
        /// The coordinator's group.
        coordinator: PartitionId,
        /// The participant.
        partition: PartitionId,
        /// The transactions.
        txns: Vec<TxnId>,
    },
    /// Coordinator → participant leader: these transactions ended, all participants know it, and
    /// the coordinator's group will not ask again.
    #[message(to = partition, led = coordinator)]
    Forget {
        /// The participant.
        partition: PartitionId,
        /// The coordinator's group.
        coordinator: PartitionId,
        /// The transactions.
        txns: Vec<TxnId>,
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
    /// Client → a server that leads something: measures how long a message takes (§2.2).
    Probe {
        /// The sender's clock.
        clock: Timestamp,
    },
    /// Server → client: the measured delay, which includes the difference between the clocks, as
    /// intended.
    ProbeReply {
        /// The server's clock when the probe arrived, minus the clock in the probe, in nanoseconds.
        delay: i64,
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
    /// As participant: this partition prepared the transaction.
    Prepare {
        /// The transaction.
        txn: TxnId,
        /// The group that decides.
        coordinator: PartitionId,
        /// Its turn: a late transaction must not pass it (N1).
        turn: Turn,
        /// Keys read, with the versions read.
        versions: Vec<(Key, Version)>,
        /// Keys it may write.
        writes: Vec<Key>,
        /// The commit timestamp must not be smaller.
        proposal: Timestamp,
        /// The prepare is valid only if none of these commits; they are themselves prepared here.
        unless: Vec<TxnId>,
        /// Transactions refused in its favour, by earlier entries (N4).
        refused: Vec<TxnId>,
        /// [`orthodrome_core::Txn::acknowledged_below`].
        acknowledged_below: u64,
    },
    /// As participant: this partition will never prepare the transaction.
    Refuse {
        /// The transaction.
        txn: TxnId,
        /// The group that decides.
        coordinator: PartitionId,
        /// The reason.
        reason: AbortReason,
    },
    /// As participant: the decision.
    End {
        /// The transaction.
        txn: TxnId,
        /// The group that decided.
        coordinator: PartitionId,
        /// The decision.
        verdict: Verdict,
    },
    /// As coordinator: the participants.
    Coordinate {
        /// The transaction.
        txn: TxnId,
        /// The participants.
        participants: Arc<Vec<PartitionId>>,
        /// [`orthodrome_core::Txn::acknowledged_below`].
        acknowledged_below: u64,
    },
    /// As coordinator: the client asked to commit.
    RequestCommit {
        /// The transaction.
        txn: TxnId,
        /// The participants.
        participants: Vec<PartitionId>,
        /// The writes.
        writes: Writes,
        /// The versions the client read (R3, C4).
        versions: Vec<(Key, Version)>,
        /// The number of the client's request. It replaces an earlier provisional one, as long as
        /// nothing is decided (N5).
        round: u32,
        /// True if another request may follow, on other reads.
        is_provisional: bool,
    },
    /// As coordinator: the decision. With `only_after`, the entry itself makes the decision: an
    /// abort that counts only if the last commit request before it in the log is of that round, or
    /// if there is none and the round is 0 (R2).
    Decide {
        /// The transaction.
        txn: TxnId,
        /// The decision.
        outcome: Outcome,
        /// Present if this entry makes the decision.
        only_after: Option<u32>,
        /// The participants, as far as they are known; used if none are recorded yet.
        participants: Vec<PartitionId>,
    },
    /// As coordinator: every participant has acknowledged these decisions.
    Settle(Vec<TxnId>),
    /// As participant: these may be forgotten once their clients have acknowledged them (R6).
    Forget(Vec<TxnId>),
    /// For each client, the counter below which it knows all outcomes.
    Acknowledge(Vec<(ClientId, u64)>),
    /// No timestamp above this may be promised before a later ceiling is chosen (R8).
    Ceiling(Timestamp),
}

/// The log of one partition's group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Log;

crate::commit::core_messages!(PartitionId, partition);

impl Replicated for Log {
    type Command = Command;
    type Chunk = Chunk<State>;
    type Cursor = Cursor;
}

const _: () =
    assert!(size_of::<Msg>() <= 200, "messages are moved through queues; keep them small");
