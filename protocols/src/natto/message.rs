//! What Natto's machines say to each other, replicate, and remember.
//!
//! Every message that names a transaction names one attempt of it (`protocol-pitfalls` R3), and
//! every message to a partition may reach a node that no longer leads it: the answer is then
//! [`Msg::NotLeader`], and the sender sends again to whoever leads.

use std::mem::size_of;

use orthodrome_core::Wire;
use orthodrome_core::id::{ClientId, NodeId, PartitionId, TxnId};
use orthodrome_core::machine::Message;
use orthodrome_core::time::{Duration, Timestamp};
use orthodrome_core::txn::{AbortReason, Key, Outcome, Priority, Read, Version, Writes};

use super::state::State;
use crate::commit::{ToCoordinator, ToParticipant, Verdict};
use crate::gateway::{Participant, Snapshot};
use crate::hosting::{self, Chunk, Cursor};
use crate::replication::{self, Index, Replicated};

/// What a server remembers.
pub type Record = hosting::Record<Log, State>;

/// When a transaction is to be processed, and how much it matters (§3.2).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Wire)]
pub struct Turn {
    /// When it should have arrived everywhere, by the participants' clocks. The same at each of
    /// them, and for all requests of one attempt.
    pub timestamp: Timestamp,
    /// How much it matters: [`Priority::LOW`] gives way, every other waits in line.
    pub priority: Priority,
}

/// What a transaction touches at another participant, and when it should be there, by that one's clock:
/// enough to guess what becomes of it there (§3.3.2).
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Elsewhere {
    /// The other participant's part.
    pub participant: Participant,
    /// When it should have arrived.
    pub arrives: Timestamp,
}

/// A participant's answer to a prepare request. Sent only once it is replicated in the
/// participant's group, so that every later leader answers the same.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Vote {
    /// The partition can commit the transaction, and will until it is told the decision.
    Prepared {
        /// The version of each key read, as prepared (R3).
        versions: Vec<(Key, Version)>,
        /// The commit timestamp must not be smaller (C11).
        proposal: Timestamp,
        /// All that stands only if none of these commits (§3.3.2). Empty: it stands.
        unless: Vec<TxnId>,
        /// These the partition has refused for the sake of this one. They can never commit: it is what
        /// shows a condition to hold (N3).
        refused: Vec<TxnId>,
    },
    /// The partition cannot commit it, ever.
    Refused(AbortReason),
    /// The partition has committed it already, at this timestamp: an earlier leader of the
    /// coordinator's group decided so, told everybody, and was gone before its own group knew.
    Committed(Timestamp),
}

/// A message.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Msg {
    /// Client → participant leader: when its turn has come, read, and prepare in the same breath
    /// (§3.2).
    ReadAndPrepare {
        /// The transaction.
        txn: TxnId,
        /// What it touches here.
        participant: Participant,
        /// The group that decides; participants ask the group, not a node (C10).
        coordinator: PartitionId,
        /// When it is its turn, and how much it matters.
        turn: Turn,
        /// How long after its turn it will need its keys here, if nothing is in its way (§3.3.1).
        lasts: Duration,
        /// What it touches at the other participants; empty where nobody asks (§3.3.2).
        elsewhere: Vec<Elsewhere>,
        /// [`orthodrome_core::Txn::acknowledged_below`].
        acknowledged_below: u64,
    },
    /// Participant leader → client: the values as prepared. Sent before the prepare is replicated;
    /// what makes it safe is the version check at the coordinator.
    ReadResult {
        /// The transaction.
        txn: TxnId,
        /// Whose keys these are.
        partition: PartitionId,
        /// Every key read here.
        reads: Vec<(Key, Read)>,
        /// Others may yet follow: what was prepared stands on a condition (§3.3.2).
        is_provisional: bool,
    },
    /// Participant leader → coordinator of the transaction that this one waits for: if that commits,
    /// tell its client what it reads (§3.4, RECSF).
    ForwardRead {
        /// The transaction that waits.
        txn: TxnId,
        /// Its gateway.
        client: NodeId,
        /// Where it waits.
        partition: PartitionId,
        /// The one that it waits for, and for nobody else.
        of: TxnId,
        /// The group that decides that one.
        coordinator: PartitionId,
        /// Every key it reads there, as it is without that one's writes.
        reads: Vec<(Key, Read)>,
    },
    /// Coordinator of another transaction → client: what it reads at a participant, now that the other
    /// has committed. Provisional: the participant has the last word (N8).
    ForwardedRead {
        /// The transaction.
        txn: TxnId,
        /// Whose keys these are.
        partition: PartitionId,
        /// Every key read there.
        reads: Vec<(Key, Read)>,
    },
    /// Participant leader → client, who asked again: it is not its turn yet, or it waits for a lock.
    Waiting {
        /// The transaction.
        txn: TxnId,
        /// Where it waits.
        partition: PartitionId,
    },
    /// Client → coordinator, beside `ReadAndPrepare`: who takes part. Replicated, so that a new
    /// coordinator knows.
    CoordinatorPrepare {
        /// The transaction.
        txn: TxnId,
        /// The coordinator's group.
        coordinator: PartitionId,
        /// Everybody who takes part.
        participants: Vec<PartitionId>,
        /// [`orthodrome_core::Txn::acknowledged_below`].
        acknowledged_below: u64,
    },
    /// Client → coordinator: commit these writes. Repeated until it is answered; carries all that
    /// a coordinator without any record of the transaction needs (C14).
    Commit {
        /// The transaction.
        txn: TxnId,
        /// The coordinator's group.
        coordinator: PartitionId,
        /// The partitions that take part.
        participants: Vec<PartitionId>,
        /// What to write.
        writes: Writes,
        /// The version of each key that the client read (R3).
        versions: Vec<(Key, Version)>,
        /// Counts the client's requests, from 1: a later one rests on later reads (N5).
        round: u32,
        /// Some of its reads are provisional, so that a later request may come.
        is_provisional: bool,
    },
    /// Client → coordinator: the application gave up.
    Abort {
        /// The transaction.
        txn: TxnId,
        /// The coordinator's group.
        coordinator: PartitionId,
        /// The partitions that take part.
        participants: Vec<PartitionId>,
        /// How often the client has asked to commit, on reads that did not hold.
        round: u32,
        /// It is that they did not hold, not its caller, that makes it give up.
        is_stale: bool,
    },
    /// Client → coordinator: these transactions' callers are alive and undecided.
    Heartbeat {
        /// The coordinator's group.
        coordinator: PartitionId,
        /// The transactions.
        txns: Vec<TxnId>,
    },
    /// Client → coordinator: what became of this transaction? One that was never asked to commit is
    /// ended (R1).
    Resolve {
        /// The transaction.
        txn: TxnId,
        /// The coordinator's group.
        coordinator: PartitionId,
        /// The partitions that take part.
        participants: Vec<PartitionId>,
    },
    /// Coordinator → client: what became of it. A function of durable facts (R2).
    Decided {
        /// The transaction.
        txn: TxnId,
        /// What became of it.
        outcome: Outcome,
    },
    /// Participant leader → coordinator: the participant's vote.
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
    WritebackAck {
        /// The transaction.
        txn: TxnId,
        /// The coordinator's group.
        coordinator: PartitionId,
        /// The participant.
        partition: PartitionId,
    },
    /// Coordinator → participant leader, in recovery: how did you vote? A participant without a
    /// record of the transaction refuses it for ever, then says so; it never prepares (R1). One where
    /// the transaction still waits says nothing yet.
    QueryPrepare {
        /// The transaction.
        txn: TxnId,
        /// The participant.
        partition: PartitionId,
        /// The coordinator's group.
        coordinator: PartitionId,
    },
    /// Participant leader → coordinator, in recovery: I prepared this long ago; what was decided? A
    /// coordinator without a record of the transaction aborts it, then says so (R1, C10).
    QueryDecision {
        /// The transaction.
        txn: TxnId,
        /// The coordinator's group.
        coordinator: PartitionId,
        /// The participant.
        partition: PartitionId,
        /// Its vote, in case it was lost.
        vote: Vote,
    },
    /// Participant leader → coordinator: may I forget how these ended? (R6)
    MayForget {
        /// The coordinator's group.
        coordinator: PartitionId,
        /// The participant.
        partition: PartitionId,
        /// The transactions.
        txns: Vec<TxnId>,
    },
    /// Coordinator → participant leader: these ended, everybody who took part knows, and the
    /// coordinator's group will not ask again.
    Forget {
        /// The participant.
        partition: PartitionId,
        /// The coordinator's group.
        coordinator: PartitionId,
        /// The transactions.
        txns: Vec<TxnId>,
    },
    /// Client → participant leader: read these in a read-only transaction.
    ReadOnly {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
        /// The keys.
        keys: Vec<Key>,
        /// The answer must hold at this timestamp at least.
        at_least: Timestamp,
    },
    /// Participant leader → client: what they hold, and until when.
    ReadOnlyResult {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
        /// The answer.
        snapshot: Snapshot,
        /// These keys hold more than one answer may tell, so it tells nothing.
        is_too_much: bool,
    },
    /// Client → a server that leads something: how long does a message to you take? (§2.2)
    Probe {
        /// What the sender's clock says.
        clock: Timestamp,
    },
    /// Server → client: by the difference of our clocks, so long; the clocks' own difference is in
    /// it, as it should be.
    ProbeReply {
        /// The server's clock when the probe came, less what the probe said, in nanoseconds.
        delay: i64,
    },
    /// Any server → whoever asked: I do not lead this partition.
    NotLeader {
        /// The partition.
        partition: PartitionId,
        /// Who does, if known.
        leader: Option<NodeId>,
        /// The transaction it was about, if it was about one.
        txn: Option<TxnId>,
    },
    /// Any replica → whoever sends to the partition: these vote there now. The placement that
    /// gateways start with says otherwise.
    Members {
        /// The partition.
        partition: PartitionId,
        /// The entry of its log that named them.
        since: Index,
        /// The voters.
        voters: Vec<NodeId>,
    },
    /// Between replicas of one partition.
    Replication {
        /// The partition.
        partition: PartitionId,
        /// The log's message.
        message: replication::Message<Log>,
    },
}

/// What a partition's group replicates.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Command {
    /// As participant: this partition prepared the transaction.
    Prepare {
        /// The transaction.
        txn: TxnId,
        /// The group that decides.
        coordinator: PartitionId,
        /// When its turn was: whoever comes late must not pass it (N1).
        turn: Turn,
        /// Keys read, with the versions read.
        versions: Vec<(Key, Version)>,
        /// Keys it may write.
        writes: Vec<Key>,
        /// The commit timestamp must not be smaller.
        proposal: Timestamp,
        /// All that stands only if none of these commits; they are prepared here themselves.
        unless: Vec<TxnId>,
        /// Refused for its sake, by entries before this one (N4).
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
        /// Why.
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
    /// As coordinator: who takes part.
    Coordinate {
        /// The transaction.
        txn: TxnId,
        /// Who takes part.
        participants: Vec<PartitionId>,
        /// [`orthodrome_core::Txn::acknowledged_below`].
        acknowledged_below: u64,
    },
    /// As coordinator: the client asked to commit.
    RequestCommit {
        /// The transaction.
        txn: TxnId,
        /// Who takes part.
        participants: Vec<PartitionId>,
        /// What to write.
        writes: Writes,
        /// The versions the client read (R3, C4).
        versions: Vec<(Key, Version)>,
        /// Which of the client's requests. It takes the place of an earlier one that was provisional, as
        /// long as nothing is decided (N5).
        round: u32,
        /// Another may come, on other reads.
        is_provisional: bool,
    },
    /// As coordinator: the decision, after it was taken; or, if `only_after` is there, to take it: an
    /// abort that counts only if the last commit request before it in the log is of that round, or there is
    /// none and the round is 0 (R2).
    Decide {
        /// The transaction.
        txn: TxnId,
        /// The decision.
        outcome: Outcome,
        /// There if this entry is what decides.
        only_after: Option<u32>,
        /// Who takes part, as far as is known: used if nothing is recorded yet.
        participants: Vec<PartitionId>,
    },
    /// As coordinator: every participant has acknowledged these decisions.
    Settle(Vec<TxnId>),
    /// As participant: these may be forgotten once their clients have acknowledged them (R6).
    Forget(Vec<TxnId>),
    /// Clients know the outcomes of all their transactions below these counters.
    Acknowledge(Vec<(ClientId, u64)>),
    /// No timestamp above this may be promised before a later ceiling is chosen (R8).
    Ceiling(Timestamp),
}

/// The log of one partition's group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Log;

impl Msg {
    /// The partition whose leader the message is meant for; none if it is not for a leader.
    #[must_use]
    pub fn partition(&self) -> Option<PartitionId> {
        match self {
            Self::ReadAndPrepare { participant, .. } => Some(participant.partition),
            Self::CoordinatorPrepare { coordinator, .. }
            | Self::Commit { coordinator, .. }
            | Self::Abort { coordinator, .. }
            | Self::Heartbeat { coordinator, .. }
            | Self::Resolve { coordinator, .. }
            | Self::PrepareResult { coordinator, .. }
            | Self::WritebackAck { coordinator, .. }
            | Self::QueryDecision { coordinator, .. }
            | Self::ForwardRead { coordinator, .. }
            | Self::MayForget { coordinator, .. } => Some(*coordinator),
            Self::Writeback { partition, .. }
            | Self::QueryPrepare { partition, .. }
            | Self::Forget { partition, .. }
            | Self::ReadOnly { partition, .. } => Some(*partition),
            Self::ReadResult { .. }
            | Self::ForwardedRead { .. }
            | Self::Waiting { .. }
            | Self::Decided { .. }
            | Self::ReadOnlyResult { .. }
            | Self::Probe { .. }
            | Self::ProbeReply { .. }
            | Self::NotLeader { .. }
            | Self::Members { .. }
            | Self::Replication { .. } => None,
        }
    }

    /// The partition that only its leader speaks for in this message: whoever receives it knows who
    /// leads.
    #[must_use]
    pub fn led_by_sender(&self) -> Option<PartitionId> {
        match self {
            Self::PrepareResult { partition, .. }
            | Self::WritebackAck { partition, .. }
            | Self::QueryDecision { partition, .. }
            | Self::MayForget { partition, .. }
            | Self::ForwardRead { partition, .. }
            | Self::ReadResult { partition, .. }
            | Self::Waiting { partition, .. }
            | Self::ReadOnlyResult { partition, .. } => Some(*partition),
            Self::QueryPrepare { coordinator, .. }
            | Self::Writeback { coordinator, .. }
            | Self::Forget { coordinator, .. } => Some(*coordinator),
            Self::ReadAndPrepare { .. }
            | Self::ForwardedRead { .. }
            | Self::CoordinatorPrepare { .. }
            | Self::Commit { .. }
            | Self::Abort { .. }
            | Self::Heartbeat { .. }
            | Self::Resolve { .. }
            | Self::Decided { .. }
            | Self::ReadOnly { .. }
            | Self::Probe { .. }
            | Self::ProbeReply { .. }
            | Self::NotLeader { .. }
            | Self::Members { .. }
            | Self::Replication { .. } => None,
        }
    }
}

impl From<ToCoordinator<Vote>> for Msg {
    fn from(msg: ToCoordinator<Vote>) -> Self {
        match msg {
            ToCoordinator::Vote { txn, coordinator, partition, vote } => {
                Self::PrepareResult { txn, coordinator, partition, vote }
            }
            ToCoordinator::QueryDecision { txn, coordinator, partition, vote } => {
                Self::QueryDecision { txn, coordinator, partition, vote }
            }
            ToCoordinator::Ack { txn, coordinator, partition } => {
                Self::WritebackAck { txn, coordinator, partition }
            }
            ToCoordinator::MayForget { coordinator, partition, txns } => {
                Self::MayForget { coordinator, partition, txns }
            }
        }
    }
}

impl From<ToParticipant<PartitionId>> for Msg {
    fn from(msg: ToParticipant<PartitionId>) -> Self {
        match msg {
            ToParticipant::QueryPrepare { txn, participant, coordinator } => {
                Self::QueryPrepare { txn, partition: participant, coordinator }
            }
            ToParticipant::Forget { partition, coordinator, txns } => {
                Self::Forget { partition, coordinator, txns }
            }
        }
    }
}

impl Message for Msg {
    fn kind(&self) -> &'static str {
        match self {
            Self::ReadAndPrepare { .. } => "ReadAndPrepare",
            Self::ReadResult { .. } => "ReadResult",
            Self::ForwardRead { .. } => "ForwardRead",
            Self::ForwardedRead { .. } => "ForwardedRead",
            Self::Waiting { .. } => "Waiting",
            Self::CoordinatorPrepare { .. } => "CoordinatorPrepare",
            Self::Commit { .. } => "Commit",
            Self::Abort { .. } => "Abort",
            Self::Heartbeat { .. } => "Heartbeat",
            Self::Resolve { .. } => "Resolve",
            Self::Decided { .. } => "Decided",
            Self::PrepareResult { .. } => "PrepareResult",
            Self::Writeback { .. } => "Writeback",
            Self::WritebackAck { .. } => "WritebackAck",
            Self::QueryPrepare { .. } => "QueryPrepare",
            Self::QueryDecision { .. } => "QueryDecision",
            Self::MayForget { .. } => "MayForget",
            Self::Forget { .. } => "Forget",
            Self::ReadOnly { .. } => "ReadOnly",
            Self::ReadOnlyResult { .. } => "ReadOnlyResult",
            Self::Probe { .. } => "Probe",
            Self::ProbeReply { .. } => "ProbeReply",
            Self::NotLeader { .. } => "NotLeader",
            Self::Members { .. } => "Members",
            Self::Replication { message, .. } => message.kind(),
        }
    }

    fn txn(&self) -> Option<TxnId> {
        match self {
            Self::ReadAndPrepare { txn, .. }
            | Self::ReadResult { txn, .. }
            | Self::ForwardRead { txn, .. }
            | Self::ForwardedRead { txn, .. }
            | Self::Waiting { txn, .. }
            | Self::CoordinatorPrepare { txn, .. }
            | Self::Commit { txn, .. }
            | Self::Abort { txn, .. }
            | Self::Resolve { txn, .. }
            | Self::Decided { txn, .. }
            | Self::PrepareResult { txn, .. }
            | Self::Writeback { txn, .. }
            | Self::WritebackAck { txn, .. }
            | Self::QueryPrepare { txn, .. }
            | Self::QueryDecision { txn, .. }
            | Self::ReadOnly { txn, .. }
            | Self::ReadOnlyResult { txn, .. } => Some(*txn),
            Self::NotLeader { txn, .. } => *txn,
            Self::Heartbeat { .. }
            | Self::MayForget { .. }
            | Self::Forget { .. }
            | Self::Probe { .. }
            | Self::ProbeReply { .. }
            | Self::Members { .. }
            | Self::Replication { .. } => None,
        }
    }

    fn wire_size(&self) -> usize {
        self.size()
    }

    fn keys(&self) -> usize {
        match self {
            Self::ReadAndPrepare { participant, .. } => {
                participant.reads.len() + participant.writes.len()
            }
            Self::Writeback { verdict: Verdict::Commit(_, writes), .. } => writes.len(),
            Self::ReadOnly { keys, .. } => keys.len(),
            Self::ForwardRead { reads, .. } => reads.len(),
            Self::ReadResult { .. }
            | Self::ForwardedRead { .. }
            | Self::Waiting { .. }
            | Self::CoordinatorPrepare { .. }
            | Self::Commit { .. }
            | Self::Abort { .. }
            | Self::Heartbeat { .. }
            | Self::Resolve { .. }
            | Self::Decided { .. }
            | Self::PrepareResult { .. }
            | Self::Writeback { .. }
            | Self::WritebackAck { .. }
            | Self::QueryPrepare { .. }
            | Self::QueryDecision { .. }
            | Self::MayForget { .. }
            | Self::Forget { .. }
            | Self::ReadOnlyResult { .. }
            | Self::Probe { .. }
            | Self::ProbeReply { .. }
            | Self::NotLeader { .. }
            | Self::Members { .. }
            | Self::Replication { .. } => 0,
        }
    }
}

impl Replicated for Log {
    type Command = Command;
    type Chunk = Chunk<State>;
    type Cursor = Cursor;
}

const _: () =
    assert!(size_of::<Msg>() <= 200, "messages are moved through queues; keep them small");
