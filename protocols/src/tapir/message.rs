//! What TAPIR's machines say to each other, and what a replica remembers.
//!
//! Every message that names a transaction names one attempt of it (`protocol-pitfalls` R3). A
//! message to a replica that cannot answer in its present state is answered [`Msg::NotNormal`].

use std::collections::BTreeMap;
use std::fmt;
use std::mem::size_of;

use orthodrome_core::Wire;
use orthodrome_core::id::{ClientId, NodeId, PartitionId, TxnId};
use orthodrome_core::limits::Pieces;
use orthodrome_core::machine::Message;
use orthodrome_core::store::{Start, Versions, check_versions, sample_versions};
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::{AbortReason, Key, Outcome, Read, Version, Writes};

use super::state::{Entry, State};
use crate::ir::{Offer, View};
use crate::portions::Portion;

/// Who may settle a transaction at its participants: the highest they have heard of. The client
/// has takeover 0 and counts its own rounds; whoever takes over from it chooses a higher number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Wire)]
pub struct Ballot {
    /// 0 for the client; counts those who took over.
    pub takeover: u32,
    /// Who took over; no node for the client.
    pub node: NodeId,
    /// The client's round: 0, and one more each time it tries a later timestamp.
    pub round: u32,
}

impl Ballot {
    /// The client's own, in that round.
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

/// A partition's share of a transaction.
#[derive(Clone, PartialEq, Eq, Debug, Default, Wire)]
pub struct Part {
    /// Keys read here, with the versions read.
    pub reads: Vec<(Key, Version)>,
    /// What to write here.
    pub writes: Writes,
}

/// A replica's result of the consensus operation `Prepare` (§5.2, Fig. 9).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Wire)]
pub enum Vote {
    /// The transaction can commit at this timestamp.
    PrepareOk(Timestamp),
    /// It read a version that has been overwritten.
    Abort,
    /// It read what another prepared transaction writes.
    Abstain,
    /// It could commit at this timestamp or later.
    Retry(Timestamp),
    /// It was ended by somebody who took over.
    Refused(AbortReason),
}

impl Vote {
    /// What a caller is told if this result stands.
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
    /// In whose name it was asked for.
    pub ballot: Ballot,
    /// What it says.
    pub vote: Vote,
    /// True if it is no longer the replica's own opinion but what was settled: by
    /// `FinalizeConsensus`, or by a view change.
    pub is_final: bool,
}

/// What a replica has to say about a transaction. Counts together with answers of the same view
/// only (R5).
#[derive(Clone, PartialEq, Eq, Wire)]
pub struct Answer {
    /// The replica's view.
    pub view: View,
    /// The highest ballot it has heard of; it refuses lower ones.
    pub promised: Ballot,
    /// Its vote, if it has one.
    pub cast: Option<Cast>,
    /// How the transaction ended, if it knows.
    pub ended: Option<Outcome>,
    /// Replicas that the view does not count on.
    pub absent: Vec<NodeId>,
    /// It was over for longer than the retention, or its client had acknowledged it: the replica cannot tell
    /// what became of it, and never votes for it.
    pub is_forgotten: bool,
}

impl fmt::Debug for Answer {
    /// Says what it has forgotten only if it has.
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
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Msg {
    /// Client → nearest replica: what do these keys hold? (§5.2 "Read")
    Read {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
        /// The keys.
        keys: Vec<Key>,
    },
    /// Replica → client: the latest versions that it knows to be committed.
    ReadResult {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
        /// Every key asked for.
        reads: Vec<(Key, Read)>,
        /// These keys hold more than one answer may tell, so it tells nothing.
        is_too_much: bool,
    },
    /// Client → every replica of a participant: the consensus operation `Prepare(txn, timestamp)`.
    ProposeConsensus {
        /// The transaction.
        txn: TxnId,
        /// The participant.
        partition: PartitionId,
        /// The client's round.
        ballot: Ballot,
        /// When it would commit.
        timestamp: Timestamp,
        /// What it does here.
        part: Part,
        /// Everybody who takes part.
        participants: Vec<PartitionId>,
    },
    /// Replica → client: its vote, once it is durable.
    ReplyConsensus {
        /// The transaction.
        txn: TxnId,
        /// The participant.
        partition: PartitionId,
        /// Its answer.
        answer: Answer,
    },
    /// Coordinator → every replica of a participant: this is the result (slow path; recovery).
    /// Accepted only in the view that the votes come from.
    FinalizeConsensus {
        /// The transaction.
        txn: TxnId,
        /// The participant.
        partition: PartitionId,
        /// The view of the votes.
        view: View,
        /// In whose name.
        ballot: Ballot,
        /// The result.
        vote: Vote,
        /// What it does here, for those who have not heard of it; not needed for a refusal.
        part: Option<Part>,
        /// Everybody who takes part.
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
    /// `Abort`. The decision is a function of durable facts already, so it is executed at once.
    ProposeInconsistent {
        /// The transaction.
        txn: TxnId,
        /// The participant.
        partition: PartitionId,
        /// The decision.
        #[wire(check = "Outcome::check_decided")]
        outcome: Outcome,
        /// What it does here; none for an abort, and for a replica that has executed it before.
        part: Option<Part>,
        /// Everybody who takes part.
        participants: Vec<PartitionId>,
    },
    /// Replica → coordinator: the decision is durable here.
    ReplyInconsistent {
        /// The transaction.
        txn: TxnId,
        /// The participant.
        partition: PartitionId,
        /// Replicas that the view does not count on.
        absent: Vec<NodeId>,
    },
    /// Coordinator → every replica of a participant: every replica of every participant has
    /// executed these, and their client knows; they may leave the record (R6).
    FinalizeInconsistent {
        /// The participant.
        partition: PartitionId,
        /// The transactions.
        txns: Vec<TxnId>,
        /// Clients that know the outcome of everything below.
        acknowledged: Vec<(ClientId, u64)>,
    },
    /// Whoever takes over → every replica of every participant: from now on listen to me only, and
    /// say what you know. A replica that has never heard of the transaction remembers the ballot,
    /// and so refuses the client from then on (R1).
    CoordinatorChange {
        /// The transaction.
        txn: TxnId,
        /// The participant.
        partition: PartitionId,
        /// In whose name.
        ballot: Ballot,
        /// Everybody who takes part.
        participants: Vec<PartitionId>,
    },
    /// Replica → who takes over: what it knows, once the promise is durable.
    CoordinatorChangeReply {
        /// The transaction.
        txn: TxnId,
        /// The participant.
        partition: PartitionId,
        /// Its answer.
        answer: Answer,
        /// What the transaction does here, if it knows.
        part: Option<Part>,
    },
    /// Client → every replica: read these at that time, and let nobody write them before it.
    ReadOnly {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
        /// The keys.
        keys: Vec<Key>,
        /// When.
        timestamp: Timestamp,
    },
    /// Replica → client: what it knows to be committed by then; none if somebody may yet commit a
    /// write to one of the keys by then.
    ReadOnlyResult {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
        /// The time that was asked for. A client that was restarted asks for another one, and answers for
        /// two times together are no snapshot. Zero if a replica of an older version does not say.
        timestamp: Timestamp,
        /// Every key asked for.
        reads: Option<Vec<(Key, Read)>>,
        /// These keys hold more than one answer may tell, so it tells nothing.
        is_too_much: bool,
    },
    /// Replica → whoever asked: not now; the group is changing its view, or this replica has no
    /// state to answer from.
    NotNormal {
        /// The partition.
        partition: PartitionId,
        /// The transaction.
        txn: TxnId,
    },
    /// Replica → the view's leader with its record, and → the others without: let us change to this
    /// view (§3.2.2).
    DoViewChange {
        /// The partition.
        partition: PartitionId,
        /// The new view.
        view: View,
        /// The record, for the leader.
        offer: Option<Box<Offer<Image>>>,
        /// Which part of the record.
        portion: Portion,
    },
    /// The view's leader → every other replica: the merged record.
    StartView {
        /// The partition.
        partition: PartitionId,
        /// The view.
        view: View,
        /// Whom it counts on, and since which view.
        synced: BTreeMap<NodeId, View>,
        /// True if the group begins with this view: there is no state to copy.
        is_new_group: bool,
        /// Everything settled; nothing that is not.
        image: Box<Image>,
        /// Which part of that.
        portion: Portion,
    },
    /// Replica → replica, now and then: I am here, in this view.
    Gossip {
        /// The partition.
        partition: PartitionId,
        /// The sender's view.
        view: View,
        /// It takes part in that view.
        is_normal: bool,
    },
    /// Replica without a state → the view's leader: the next piece, please.
    FetchState {
        /// The partition.
        partition: PartitionId,
        /// The view.
        view: View,
        /// Where it begins.
        start: Start,
    },
    /// The view's leader → replica without a state: a piece of the data.
    StateChunk {
        /// The partition.
        partition: PartitionId,
        /// The view.
        view: View,
        /// Where the piece begins.
        start: Start,
        /// Keys with their versions.
        #[wire(check = "check_versions", sample = "sample_versions")]
        keys: Vec<(Key, Versions)>,
        /// The last of them has more versions than these.
        is_cut: bool,
        /// No more follow.
        is_last: bool,
    },
}

/// A record as it travels in a view change.
#[derive(Clone, PartialEq, Eq, Debug, Default, Wire)]
pub struct Image {
    /// The operations.
    pub entries: Vec<(TxnId, Entry)>,
    /// Clients that know the outcome of everything below.
    pub acknowledged: Vec<(ClientId, u64)>,
    /// At or above every timestamp that was read at by those whose records these are: a replica that
    /// lost what it promised to readers keeps to this.
    pub ceiling: Timestamp,
}

/// A durable change of a replica's state; see [`State::apply`].
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Change {
    /// A vote, the replica's own or a final one.
    Cast {
        /// The transaction.
        txn: TxnId,
        /// Everybody who takes part.
        participants: Vec<PartitionId>,
        /// What it does here, if that was not known.
        part: Option<Part>,
        /// The vote.
        cast: Cast,
    },
    /// A promise to listen to this ballot only.
    Promise {
        /// The transaction.
        txn: TxnId,
        /// Everybody who takes part.
        participants: Vec<PartitionId>,
        /// The ballot.
        ballot: Ballot,
    },
    /// A decision.
    End {
        /// The transaction.
        txn: TxnId,
        /// Everybody who takes part.
        participants: Vec<PartitionId>,
        /// What it does here, if that was not known.
        part: Option<Part>,
        /// The decision.
        #[wire(check = "Outcome::check_decided")]
        outcome: Outcome,
    },
    /// These leave the record.
    Forget(Vec<TxnId>),
    /// Clients know the outcome of everything below.
    Acknowledge(Vec<(ClientId, u64)>),
    /// No timestamp above this was served before a later ceiling is durable (R8).
    Ceiling(Timestamp),
    /// The replica left its view for this one.
    Enter(View),
    /// The replica takes part in this view.
    Install {
        /// The view.
        view: View,
        /// Whom it counts on, and since which view.
        synced: BTreeMap<NodeId, View>,
        /// The record.
        image: Box<Image>,
        /// False if the replica still needs a copy of the data.
        is_whole: bool,
    },
    /// A part of the record of the [`Change::Install`] that follows: an installation is one change, and may be
    /// several records.
    Gather {
        /// The view.
        view: View,
        /// Which of the parts, from 0: the first takes the place of parts whose installation a crash cut off.
        number: u32,
        /// The part.
        image: Box<Image>,
    },
    /// The copy of the data is complete.
    Whole,
}

/// What a server remembers.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Record {
    /// A partition's state at a checkpoint; the data is in the state engine.
    State(PartitionId, Box<State>),
    /// A change of it.
    Change(PartitionId, Change),
}

impl Msg {
    /// The partition whose replica the message is meant for; none if it is meant for a coordinator.
    #[must_use]
    pub fn replica_of(&self) -> Option<PartitionId> {
        match self {
            Self::Read { partition, .. }
            | Self::ProposeConsensus { partition, .. }
            | Self::FinalizeConsensus { partition, .. }
            | Self::ProposeInconsistent { partition, .. }
            | Self::FinalizeInconsistent { partition, .. }
            | Self::CoordinatorChange { partition, .. }
            | Self::ReadOnly { partition, .. }
            | Self::DoViewChange { partition, .. }
            | Self::StartView { partition, .. }
            | Self::Gossip { partition, .. }
            | Self::FetchState { partition, .. }
            | Self::StateChunk { partition, .. } => Some(*partition),
            Self::ReadResult { .. }
            | Self::ReplyConsensus { .. }
            | Self::Confirm { .. }
            | Self::ReplyInconsistent { .. }
            | Self::CoordinatorChangeReply { .. }
            | Self::ReadOnlyResult { .. }
            | Self::NotNormal { .. } => None,
        }
    }
}

impl Message for Msg {
    fn kind(&self) -> &'static str {
        match self {
            Self::Read { .. } => "Read",
            Self::ReadResult { .. } => "ReadResult",
            Self::ProposeConsensus { .. } => "ProposeConsensus",
            Self::ReplyConsensus { .. } => "ReplyConsensus",
            Self::FinalizeConsensus { .. } => "FinalizeConsensus",
            Self::Confirm { .. } => "Confirm",
            Self::ProposeInconsistent { .. } => "ProposeInconsistent",
            Self::ReplyInconsistent { .. } => "ReplyInconsistent",
            Self::FinalizeInconsistent { .. } => "FinalizeInconsistent",
            Self::CoordinatorChange { .. } => "CoordinatorChange",
            Self::CoordinatorChangeReply { .. } => "CoordinatorChangeReply",
            Self::ReadOnly { .. } => "ReadOnly",
            Self::ReadOnlyResult { .. } => "ReadOnlyResult",
            Self::NotNormal { .. } => "NotNormal",
            Self::DoViewChange { .. } => "DoViewChange",
            Self::StartView { .. } => "StartView",
            Self::Gossip { .. } => "Gossip",
            Self::FetchState { .. } => "FetchState",
            Self::StateChunk { .. } => "StateChunk",
        }
    }

    fn txn(&self) -> Option<TxnId> {
        match self {
            Self::Read { txn, .. }
            | Self::ReadResult { txn, .. }
            | Self::ProposeConsensus { txn, .. }
            | Self::ReplyConsensus { txn, .. }
            | Self::FinalizeConsensus { txn, .. }
            | Self::Confirm { txn, .. }
            | Self::ProposeInconsistent { txn, .. }
            | Self::ReplyInconsistent { txn, .. }
            | Self::CoordinatorChange { txn, .. }
            | Self::CoordinatorChangeReply { txn, .. }
            | Self::ReadOnly { txn, .. }
            | Self::ReadOnlyResult { txn, .. }
            | Self::NotNormal { txn, .. } => Some(*txn),
            Self::FinalizeInconsistent { .. }
            | Self::DoViewChange { .. }
            | Self::StartView { .. }
            | Self::Gossip { .. }
            | Self::FetchState { .. }
            | Self::StateChunk { .. } => None,
        }
    }

    fn wire_size(&self) -> usize {
        self.size()
    }

    fn keys(&self) -> usize {
        match self {
            Self::Read { keys, .. } | Self::ReadOnly { keys, .. } => keys.len(),
            Self::ProposeConsensus { part, .. } => part.reads.len() + part.writes.len(),
            Self::ProposeInconsistent { part, .. } => part.as_ref().map_or(0, |p| p.writes.len()),
            Self::ReadResult { .. }
            | Self::ReplyConsensus { .. }
            | Self::FinalizeConsensus { .. }
            | Self::Confirm { .. }
            | Self::ReplyInconsistent { .. }
            | Self::FinalizeInconsistent { .. }
            | Self::CoordinatorChange { .. }
            | Self::CoordinatorChangeReply { .. }
            | Self::ReadOnlyResult { .. }
            | Self::NotNormal { .. }
            | Self::DoViewChange { .. }
            | Self::StartView { .. }
            | Self::Gossip { .. }
            | Self::FetchState { .. }
            | Self::StateChunk { .. } => 0,
        }
    }
}

/// Encoded size of what a client has acknowledged.
pub(super) const ACKNOWLEDGED: usize = 15;

impl Image {
    /// The same in parts, each of at most so many bytes unless one transaction alone has more.
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

    /// Parts, in order, together.
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
    /// The same as records, each of at most so many bytes unless one transaction alone has more.
    pub(super) fn divide(self, bytes_max: usize) -> Vec<Self> {
        let Self::Install { view, synced, image, is_whole } = self else { return vec![self] };
        let mut parts = image.divide(bytes_max);
        let last = Box::new(parts.pop().unwrap_or_default());
        let gather = |(number, part)| Self::Gather { view, number, image: Box::new(part) };
        let mut records: Vec<Self> = (0..).zip(parts).map(gather).collect();
        records.push(Self::Install { view, synced, image: last, is_whole });
        records
    }
}

const _: () =
    assert!(size_of::<Msg>() <= 200, "messages are moved through queues; keep them small");
