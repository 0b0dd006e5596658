//! The messages between Carousel's machines, the commands that they replicate, and their durable
//! records.
//!
//! Every message that names a transaction names one attempt of it (`protocol-pitfalls` R3). A
//! message to a partition may reach a node that does not lead it any more. That node answers
//! [`Msg::NotLeader`], and the sender sends the message again to the leader.

use std::mem::size_of;
use std::sync::Arc;

use orthodrome_core::Wire;
use orthodrome_core::id::{NodeId, PartitionId, TxnId};
use orthodrome_core::machine::Message;
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::{AbortReason, Key, Outcome, Priority, Read, Version, Writes};

use super::cpc::{FastVote, Listed};
use super::state::State;
use crate::commit::Verdict;
use crate::gateway::{Participant, Snapshot};
use crate::hosting::{self, Chunk, Cursor};
use crate::portions::Portion;
use crate::replication::{self, Index, Replicated, Term};

/// A participant's answer to a prepare request. It is sent only once it is replicated in the
/// participant's group, so that every later leader gives the same answer (§4.1.4).
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Vote {
    /// The partition can commit the transaction, and stays able to until it learns the decision.
    Prepared {
        /// The version of each key read, as prepared (R3).
        versions: Arc<Vec<(Key, Version)>>,
        /// The commit timestamp must not be smaller (§4.4.2, C11).
        proposal: Timestamp,
    },
    /// The partition can never commit it.
    Refused(AbortReason),
    /// The partition has committed it already, at this timestamp. An earlier leader of the
    /// coordinator's group decided so and informed all, but failed before its own group knew.
    Committed(Timestamp),
}

/// A message. Circled numbers are those of Figure 2.
#[derive(Clone, PartialEq, Eq, Debug, Wire, Message)]
pub enum Msg {
    /// Client → participant leader ①: read, and prepare at the same time (§4.1.1, §4.1.4).
    #[message(to = participant.partition, keys = participant.keys())]
    ReadAndPrepare {
        /// The transaction.
        txn: TxnId,
        /// The keys that it accesses here.
        participant: Participant,
        /// The group that decides; participants ask the group, not a node (C10).
        coordinator: PartitionId,
        /// Its priority.
        priority: Priority,
        /// [`orthodrome_core::Txn::acknowledged_below`].
        acknowledged_below: u64,
    },
    /// Participant leader → client ③⑤: the latest committed values. Sent before the prepare is
    /// replicated; the version check at the coordinator makes that safe.
    ReadResult {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
        /// Every key read here.
        reads: Vec<(Key, Read)>,
    },
    /// Client → coordinator, together with ①: the participants. Replicated ② so that a new
    /// coordinator knows them (§4.1.4).
    #[message(to = coordinator)]
    CoordinatorPrepare {
        /// The transaction.
        txn: TxnId,
        /// The coordinator's group.
        coordinator: PartitionId,
        /// All participants.
        participants: Arc<Vec<Participant>>,
        /// [`orthodrome_core::Txn::acknowledged_below`].
        acknowledged_below: u64,
    },
    /// Client → coordinator ⑦: commit these writes. Repeated until it is answered. It contains
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
        writes: Arc<Writes>,
        /// The version of each key that the client read (R3).
        versions: Arc<Vec<(Key, Version)>>,
    },
    /// Client → coordinator: the application aborted (§4.1.2).
    #[message(to = coordinator)]
    Abort {
        /// The transaction.
        txn: TxnId,
        /// The coordinator's group.
        coordinator: PartitionId,
        /// The participants.
        participants: Vec<PartitionId>,
        /// True if a procedure refuses what it read. That counts only if all participants have
        /// prepared these versions; otherwise others were about to change the values.
        is_refusal: bool,
        /// Of a refusal: the version of each key that the procedure read.
        versions: Arc<Vec<(Key, Version)>>,
    },
    /// Client → coordinator: the clients of these transactions are alive and have not decided
    /// (§4.3.1).
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
    /// Coordinator → client ⑫: the outcome. A function of durable facts (R2).
    Decided {
        /// The transaction.
        txn: TxnId,
        /// The outcome.
        outcome: Outcome,
    },
    /// Participant leader → coordinator ⑨⑩: the participant's vote.
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
    /// Coordinator → participant leader ⑬: the decision. Repeated until acknowledged.
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
    /// record of the transaction refuses it for ever and then answers; it never prepares (R1).
    #[message(to = participant.partition, led = coordinator)]
    QueryPrepare {
        /// The transaction.
        txn: TxnId,
        /// The participant, with its keys as far as the coordinator knows them.
        participant: Participant,
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
    /// Client → participant leader: read these in a read-only transaction (§4.4.2).
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
    ReadOnlyResult {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
        /// The answer; none if a pending transaction writes one of the keys.
        snapshot: Option<Snapshot>,
        /// The values exceed the size of an answer, so there are none.
        is_too_much: bool,
    },
    /// Carousel Fast, client → every replica of each participant (§4.2): prepare and vote. The
    /// leader also starts the slow path, as for [`Msg::ReadAndPrepare`].
    #[message(to = participant.partition, keys = participant.keys())]
    FastPrepare {
        /// The transaction.
        txn: TxnId,
        /// The keys that it accesses here.
        participant: Participant,
        /// The group that decides.
        coordinator: PartitionId,
        /// Its priority.
        priority: Priority,
        /// [`orthodrome_core::Txn::acknowledged_below`].
        acknowledged_below: u64,
        /// The commit timestamp that every replica proposes, so that all propose the same. Only the
        /// leader checks it.
        timestamp: Timestamp,
        /// True if the replica should also return the values: asked of the leader and of the
        /// closest replica (§4.4.1).
        wants_reads: bool,
    },
    /// Follower → client: its values, which may be stale (§4.4.1). The coordinator compares their
    /// versions with those prepared (R3).
    FollowerReadResult {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
        /// Every key read here.
        reads: Vec<(Key, Read)>,
        /// The leader, as far as the follower knows.
        leader: Option<NodeId>,
    },
    /// Replica → coordinator: its own vote (§4.2). A vote to commit is on its disk, in its
    /// pending-transaction list (R4), and its term is still that of the vote (R5). A refusal
    /// promises nothing.
    #[message(to = coordinator, led = vote.voters.is_some().then_some(*partition))]
    FastPrepareResult {
        /// The transaction.
        txn: TxnId,
        /// The coordinator's group.
        coordinator: PartitionId,
        /// The participant.
        partition: PartitionId,
        /// The vote.
        vote: FastVote,
    },
    /// Coordinator → client: as [`Msg::Decided`], but all votes came by the fast path.
    FastDecided {
        /// The transaction.
        txn: TxnId,
        /// The outcome.
        outcome: Outcome,
    },
    /// New leader → the other voters: asks for the transactions that they prepared on the fast path
    /// (§4.3.3 step 1, C7).
    #[message(to = partition)]
    CollectPending {
        /// The partition.
        partition: PartitionId,
        /// The leader's term. A member answers only when it has reached this term, and then votes
        /// in no earlier term any more.
        term: Term,
    },
    /// Voter → new leader: the part of its list from earlier terms, all of it on disk.
    #[message(to = partition, keys = listed.len())]
    PendingList {
        /// The partition.
        partition: PartitionId,
        /// The leader's term.
        term: Term,
        /// The list.
        listed: Vec<(TxnId, Listed)>,
        /// The part of the list.
        portion: Portion,
    },
    /// Follower → leader: it has had these transactions for long, and the log says nothing about
    /// them (C9, C10). The leader refuses, in the log, those that it does not know.
    #[message(to = partition)]
    QueryPending {
        /// The partition.
        partition: PartitionId,
        /// The transactions, with their coordinators' groups.
        txns: Vec<(TxnId, PartitionId)>,
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
    /// As participant: this partition prepared the transaction ④⑥.
    Prepare {
        /// The transaction.
        txn: TxnId,
        /// The group that decides.
        coordinator: PartitionId,
        /// Keys read, with the versions read.
        versions: Arc<Vec<(Key, Version)>>,
        /// Keys it may write.
        writes: Arc<Vec<Key>>,
        /// The commit timestamp must not be smaller.
        proposal: Timestamp,
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
    /// As coordinator: the participants ②.
    Coordinate {
        /// The transaction.
        txn: TxnId,
        /// The participants.
        participants: Arc<Vec<Participant>>,
        /// [`orthodrome_core::Txn::acknowledged_below`].
        acknowledged_below: u64,
    },
    /// As coordinator: the client asked to commit ⑧.
    RequestCommit {
        /// The transaction.
        txn: TxnId,
        /// The participants.
        participants: Vec<PartitionId>,
        /// The writes.
        writes: Arc<Writes>,
        /// The versions the client read (R3, C4).
        versions: Arc<Vec<(Key, Version)>>,
    },
    /// As coordinator: the decision ⑪. If `unilateral`, the entry itself makes the decision: an
    /// abort that counts only if no commit request precedes it in the log (R2).
    Decide {
        /// The transaction.
        txn: TxnId,
        /// The decision.
        outcome: Outcome,
        /// True if this entry makes the decision.
        unilateral: bool,
        /// The participants, as far as they are known; used if none are recorded yet.
        participants: Vec<PartitionId>,
    },
    /// As coordinator: every participant has acknowledged these decisions.
    Settle(Vec<TxnId>),
    /// As participant: these may be forgotten once their clients have acknowledged them (R6).
    Forget(Vec<TxnId>),
    /// For each client, the counter below which it knows all outcomes.
    Acknowledge(Vec<(orthodrome_core::ClientId, u64)>),
    /// No timestamp above this may be promised before a later ceiling is chosen (R8).
    Ceiling(Timestamp),
}

/// The log of one partition's group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Log;

/// Durable records of a server, including the entries of its pending-transaction lists (§4.2).
pub type Record = hosting::Record<Log, State, (TxnId, Listed)>;

crate::commit::core_messages!(Participant, participant);

impl Replicated for Log {
    type Command = Command;
    type Chunk = Chunk<State>;
    type Cursor = Cursor;
}

const _: () =
    assert!(size_of::<Msg>() <= 200, "messages are moved through queues; keep them small");
