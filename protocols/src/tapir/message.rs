//! The messages between TAPIR's machines, and a replica's durable records.
//!
//! Every message that names a transaction names one attempt of it (`protocol-pitfalls` R3). A
//! replica that cannot answer in its present state answers [`Msg::NotNormal`].

use std::fmt;
use std::mem::size_of;

use orthodrome_core::Wire;
use orthodrome_core::id::{ClientId, NodeId, PartitionId, TxnId};
use orthodrome_core::limits::Pieces;
use orthodrome_core::machine::Message;
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::store::{Start, Versions, check_versions, sample_versions};
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::{AbortReason, Key, Outcome, Read, Version, Writes};

use super::state::{Entry, State};
use crate::ir::{Offer, View};
use crate::portions::Portion;

/// The right to settle a transaction at its participants: they follow the highest ballot that they
/// have received. A gateway has takeover 0 and counts its own rounds. A node that takes over
/// chooses a higher number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Wire)]
pub struct Ballot {
    /// 0 for the gateway; increased by each takeover.
    pub takeover: u32,
    /// The node that took over; no node for the gateway.
    pub node: NodeId,
    /// The gateway's round: 0, and one more each time it tries a later timestamp.
    pub round: u32,
}

impl Ballot {
    /// The gateway's own ballot in that round.
    #[must_use]
    pub fn client(round: u32) -> Self {
        Self { takeover: 0, node: NodeId(0), round }
    }
}

impl fmt::Display for Ballot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.takeover {
            0 => write!(f, "b{}", self.round),
            takeover => write!(f, "b{takeover}{}", self.node),
        }
    }
}

impl fmt::Debug for Ballot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// One partition's part of a transaction.
#[derive(Clone, PartialEq, Eq, Debug, Default, Wire)]
pub struct Part {
    /// Keys read here, with the versions read.
    pub reads: Vec<(Key, Version)>,
    /// The writes here.
    pub writes: Writes,
}

/// A replica's result of the consensus operation `Prepare` (§5.2, Fig. 9).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Wire)]
pub enum Vote {
    /// The transaction can commit at this timestamp.
    PrepareOk(Timestamp),
    /// It read a version that has been overwritten.
    Abort,
    /// It read a key that another prepared transaction writes.
    Abstain,
    /// It could commit at this timestamp or later.
    Retry(Timestamp),
    /// A node that took over ended it.
    Refused(AbortReason),
}

impl Vote {
    /// The reason for the client, if this result stands.
    #[must_use]
    pub fn reason(self) -> AbortReason {
        match self {
            Self::Abort => AbortReason::StaleRead,
            Self::PrepareOk(_) | Self::Abstain | Self::Retry(_) => AbortReason::Conflict,
            Self::Refused(reason) => reason,
        }
    }

    /// True if the transaction can commit.
    #[must_use]
    pub fn is_ok(self) -> bool {
        matches!(self, Self::PrepareOk(_))
    }
}

/// A vote as a replica holds it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Wire)]
pub struct Cast {
    /// The ballot of the request.
    pub ballot: Ballot,
    /// The vote.
    pub vote: Vote,
    /// True if it is the settled result, by `FinalizeConsensus` or by a view change, and not only
    /// the replica's own vote.
    pub is_final: bool,
}

/// A replica's answer about a transaction. It counts only together with answers of the same view
/// (R5).
#[derive(Clone, PartialEq, Eq, Wire)]
pub struct Answer {
    /// The replica's view.
    pub view: View,
    /// The highest ballot received. The replica refuses lower ones.
    pub promised: Ballot,
    /// Its vote, if it has one.
    pub cast: Option<Cast>,
    /// The outcome of the transaction, if it knows.
    pub ended: Option<Outcome>,
    /// Replicas that the view does not count.
    pub absent: Vec<NodeId>,
    /// True if the transaction ended longer ago than the retention, or its client had acknowledged
    /// it. The replica does not know its outcome, and never votes for it.
    pub is_forgotten: bool,
}

impl fmt::Debug for Answer {
    /// Shows `is_forgotten` only if it is true.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { view, promised, cast, ended, absent, is_forgotten } = self;
        let mut answer = f.debug_struct("Answer");
        answer.field("view", view).field("promised", promised).field("cast", cast);
        answer.field("ended", ended).field("absent", absent);
        if *is_forgotten {
            answer.field("is_forgotten", is_forgotten);
        }
        answer.finish()
    }
}

/// A message.
#[derive(Clone, PartialEq, Eq, Debug, Wire, Message)]
pub enum Msg {
    /// Gateway → nearest replica: read these keys (§5.2 "Read").
    #[message(to = partition, keys = keys.len())]
    Read {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
        /// The keys.
        keys: Vec<Key>,
    },
    /// Replica → gateway: the latest versions that it knows to be committed.
    ReadResult {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
        /// Every key of the request.
        reads: Vec<(Key, Read)>,
        /// The values exceed the size of an answer, so there are none.
        is_too_much: bool,
    },
    /// Gateway → every replica of a participant: the consensus operation `Prepare(txn, timestamp)`.
    #[message(to = partition, keys = part.reads.len() + part.writes.len())]
    ProposeConsensus {
        /// The transaction.
        txn: TxnId,
        /// The participant.
        partition: PartitionId,
        /// The gateway's round.
        ballot: Ballot,
        /// The timestamp at which it would commit.
        timestamp: Timestamp,
        /// Its part here.
        part: Part,
        /// All participants.
        participants: Vec<PartitionId>,
    },
    /// Replica → gateway: its vote, once it is durable.
    ReplyConsensus {
        /// The transaction.
        txn: TxnId,
        /// The participant.
        partition: PartitionId,
        /// Its answer.
        answer: Answer,
    },
    /// Coordinator → every replica of a participant: this is the result (slow path; recovery).
    /// Accepted only in the view of the votes.
    #[message(to = partition)]
    FinalizeConsensus {
        /// The transaction.
        txn: TxnId,
        /// The participant.
        partition: PartitionId,
        /// The view of the votes.
        view: View,
        /// The coordinator's ballot.
        ballot: Ballot,
        /// The result.
        vote: Vote,
        /// The transaction's part here, for replicas that do not know it; not needed for a refusal.
        part: Option<Part>,
        /// All participants.
        participants: Vec<PartitionId>,
    },
    /// Replica → coordinator: the result is durable here.
    Confirm {
        /// The transaction.
        txn: TxnId,
        /// The participant.
        partition: PartitionId,
        /// Its answer.
        answer: Answer,
    },
    /// Coordinator → every replica of every participant: the inconsistent operations `Commit` and
    /// `Abort`. The decision already follows from durable facts, so it is executed at once.
    #[message(to = partition, keys = part.as_ref().map_or(0, |part| part.writes.len()))]
    ProposeInconsistent {
        /// The transaction.
        txn: TxnId,
        /// The participant.
        partition: PartitionId,
        /// The decision.
        #[wire(check = "Outcome::check_decided")]
        outcome: Outcome,
        /// Its part here; none for an abort, and for a replica that has executed it before.
        part: Option<Part>,
        /// All participants.
        participants: Vec<PartitionId>,
    },
    /// Replica → coordinator: the decision is durable here.
    ReplyInconsistent {
        /// The transaction.
        txn: TxnId,
        /// The participant.
        partition: PartitionId,
        /// Replicas that the view does not count.
        absent: Vec<NodeId>,
    },
    /// Coordinator → every replica of a participant: every replica of every participant has
    /// executed these transactions, and their clients know the outcomes; they may leave the record
    /// (R6).
    #[message(to = partition)]
    FinalizeInconsistent {
        /// The participant.
        partition: PartitionId,
        /// The transactions.
        txns: Vec<TxnId>,
        /// For each client, the counter below which it knows all outcomes.
        acknowledged: Vec<(ClientId, u64)>,
    },
    /// Node that takes over → every replica of every participant: follow only this ballot from now
    /// on, and report what you know. A replica that does not know the transaction remembers the
    /// ballot, and so refuses the gateway from then on (R1).
    #[message(to = partition)]
    CoordinatorChange {
        /// The transaction.
        txn: TxnId,
        /// The participant.
        partition: PartitionId,
        /// The ballot.
        ballot: Ballot,
        /// All participants.
        participants: Vec<PartitionId>,
    },
    /// Replica → node that takes over: what it knows, once its promise is durable.
    CoordinatorChangeReply {
        /// The transaction.
        txn: TxnId,
        /// The participant.
        partition: PartitionId,
        /// Its answer.
        answer: Answer,
        /// The transaction's part here, if the replica knows it.
        part: Option<Part>,
    },
    /// Gateway → every replica: read these keys at this timestamp, and accept no write of them
    /// below it.
    #[message(to = partition, keys = keys.len())]
    ReadOnly {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
        /// The keys.
        keys: Vec<Key>,
        /// The timestamp.
        timestamp: Timestamp,
    },
    /// Replica → gateway: the versions that it knows to be committed at that timestamp; none if a
    /// pending transaction may still commit a write to one of the keys at or below it, or if the
    /// replica may have dropped the versions of then.
    ReadOnlyResult {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
        /// The timestamp of the request. A gateway that restarted asks with another timestamp, and
        /// answers for two timestamps together are no snapshot. Zero if an older version of a
        /// replica does not set it.
        timestamp: Timestamp,
        /// Every key of the request.
        reads: Option<Vec<(Key, Read)>>,
        /// The values exceed the size of an answer, so there are none.
        is_too_much: bool,
    },
    /// Replica → sender: not now. The group is changing its view, or this replica has no complete
    /// state.
    NotNormal {
        /// The partition.
        partition: PartitionId,
        /// The transaction.
        txn: TxnId,
    },
    /// Replica → the view's leader with its record, and → the others without it: change to this
    /// view (§3.2.2).
    #[message(to = partition)]
    DoViewChange {
        /// The partition.
        partition: PartitionId,
        /// The new view.
        view: View,
        /// The record, for the leader.
        offer: Option<Box<Offer<Image>>>,
        /// The part of the record.
        portion: Portion,
    },
    /// The view's leader → every other replica: the merged record.
    #[message(to = partition)]
    StartView {
        /// The partition.
        partition: PartitionId,
        /// The view.
        view: View,
        /// The replicas that it counts, each with the view since which it counts.
        synced: OrdMap<NodeId, View>,
        /// True if the group begins with this view, so that there is no state to copy.
        is_new_group: bool,
        /// Everything that is settled, and nothing else.
        image: Box<Image>,
        /// The part of that record.
        portion: Portion,
        /// The replicas with whose records the group began; see [`Offer::founders`].
        founders: OrdMap<NodeId, Timestamp>,
    },
    /// Replica → replica, at intervals: it is alive, and in this view.
    #[message(to = partition)]
    Gossip {
        /// The partition.
        partition: PartitionId,
        /// The sender's view.
        view: View,
        /// True if it takes part in that view.
        is_normal: bool,
    },
    /// Replica without a state → the view's leader: request for the next piece.
    #[message(to = partition)]
    FetchState {
        /// The partition.
        partition: PartitionId,
        /// The view.
        view: View,
        /// The start of the piece.
        start: Start,
    },
    /// The view's leader → replica without a state: a piece of the data.
    #[message(to = partition)]
    StateChunk {
        /// The partition.
        partition: PartitionId,
        /// The view.
        view: View,
        /// The start of the piece.
        start: Start,
        /// Keys with their versions.
        #[wire(check = "check_versions", sample = "sample_versions")]
        keys: Vec<(Key, Versions)>,
        /// True if the last key has more versions than these.
        is_cut: bool,
        /// True if no more pieces follow.
        is_last: bool,
    },
}

/// A record in a view change.
#[derive(Clone, PartialEq, Eq, Debug, Default, Wire)]
pub struct Image {
    /// The operations.
    pub entries: Vec<(TxnId, Entry)>,
    /// For each client, the counter below which it knows all outcomes.
    pub acknowledged: Vec<(ClientId, u64)>,
    /// At or above every timestamp at which the replicas of these records were read. A replica that
    /// has lost its promises to readers follows this.
    pub ceiling: Timestamp,
}

/// A durable change of a replica's state; see [`State::apply`].
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Change {
    /// A vote: the replica's own, or a settled one.
    Cast {
        /// The transaction.
        txn: TxnId,
        /// All participants.
        participants: Vec<PartitionId>,
        /// The transaction's part here, if it was not known.
        part: Option<Part>,
        /// The vote.
        cast: Cast,
    },
    /// A promise to follow only this ballot.
    Promise {
        /// The transaction.
        txn: TxnId,
        /// All participants.
        participants: Vec<PartitionId>,
        /// The ballot.
        ballot: Ballot,
    },
    /// A decision.
    End {
        /// The transaction.
        txn: TxnId,
        /// All participants.
        participants: Vec<PartitionId>,
        /// The transaction's part here, if it was not known.
        part: Option<Part>,
        /// The decision.
        #[wire(check = "Outcome::check_decided")]
        outcome: Outcome,
    },
    /// These transactions leave the record.
    Forget(Vec<TxnId>),
    /// For each client, the counter below which it knows all outcomes.
    Acknowledge(Vec<(ClientId, u64)>),
    /// No timestamp above this is served before a later ceiling is durable (R8).
    Ceiling(Timestamp),
    /// The replica left its view and waits for this one.
    Enter(View),
    /// The replica takes part in this view.
    Install {
        /// The view.
        view: View,
        /// The replicas that it counts, each with the view since which it counts.
        synced: OrdMap<NodeId, View>,
        /// The record.
        image: Box<Image>,
        /// False if the replica still needs a copy of the data.
        is_whole: bool,
        /// The replicas with whose records the group began; see [`Offer::founders`].
        founders: OrdMap<NodeId, Timestamp>,
    },
    /// A part of the record of the [`Change::Install`] that follows: an installation is one change,
    /// but may need several records.
    Gather {
        /// The view.
        view: View,
        /// The number of the part, from 0. The first part replaces the parts of an installation
        /// that a crash interrupted.
        number: u32,
        /// The part.
        image: Box<Image>,
    },
    /// The copy of the data is complete.
    Whole,
    /// The replica uses its disk for the first time, at this time.
    Born(Timestamp),
}

/// Durable records of a server.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Record {
    /// A partition's state at a checkpoint; the data is in the state engine.
    State(PartitionId, Box<State>),
    /// A change of it.
    Change(PartitionId, Change),
}

/// Encoded size of one client's acknowledgement.
pub(super) const ACKNOWLEDGED: usize = 15;

impl Image {
    /// Splits the record into parts. Each has at most `bytes_max` bytes, unless a single
    /// transaction has more.
    #[must_use]
    pub fn divide(self, bytes_max: usize) -> Vec<Self> {
        let ceiling = self.ceiling;
        let mut parts = Pieces::new(Self { ceiling, ..Self::default() }, bytes_max);
        for (txn, entry) in self.entries {
            parts.of(entry.size()).entries.push((txn, entry));
        }
        for client in self.acknowledged {
            parts.of(ACKNOWLEDGED).acknowledged.push(client);
        }
        parts.finish()
    }

    /// Combines parts, in order.
    #[must_use]
    pub fn join(parts: impl IntoIterator<Item = Self>) -> Self {
        let mut whole = Self::default();
        for part in parts {
            whole.entries.extend(part.entries);
            whole.acknowledged.extend(part.acknowledged);
            whole.ceiling = whole.ceiling.max(part.ceiling);
        }
        whole
    }
}

impl Change {
    /// Splits a change into several records. Each has at most `bytes_max` bytes, unless a single
    /// transaction has more.
    pub(super) fn divide(self, bytes_max: usize) -> Vec<Self> {
        let Self::Install { view, synced, image, is_whole, founders } = self else {
            return vec![self];
        };
        let mut parts = image.divide(bytes_max);
        let last = Box::new(parts.pop().unwrap_or_default());
        let gather = |(number, part)| Self::Gather { view, number, image: Box::new(part) };
        let mut records: Vec<Self> = (0..).zip(parts).map(gather).collect();
        records.push(Self::Install { view, synced, image: last, is_whole, founders });
        records
    }
}

const _: () =
    assert!(size_of::<Msg>() <= 200, "messages are moved through queues; keep them small");
