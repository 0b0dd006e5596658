//! What the machines say to each other and replicate.

use orthodrome_core::Wire;
use orthodrome_core::id::{NodeId, PartitionId, TxnId};
use orthodrome_core::machine::Message;
use orthodrome_core::time::Time;
use orthodrome_core::txn::{AbortReason, Key, Outcome, Read, Version, Writes};
use orthodrome_protocols::hosting::{self, Chunk, Cursor};
use orthodrome_protocols::replication::{self, Index, Replicated};

use super::server::State;

/// What a server remembers.
pub type Record = hosting::Record<Log, State>;

/// A message.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Msg {
    /// Gateway → leader: what do these keys hold?
    Read { txn: TxnId, keys: Vec<Key> },
    /// Leader → gateway: this; none if it is more than one message may hold.
    Values { txn: TxnId, reads: Option<Vec<(Key, Read)>> },
    /// Gateway → leader: append this. Repeated until it is answered.
    Commit { txn: TxnId, asked: Time, request: Request },
    /// Gateway → leader: what became of this? It is refused if nothing has.
    Resolve { txn: TxnId, asked: Time },
    /// Leader → gateway: the entry that was asked for then is chosen, and this is what became of it.
    Ended { txn: TxnId, asked: Time, outcome: Outcome },
    /// Server → sender: this server does not lead.
    NotLeader { partition: PartitionId, leader: Option<NodeId>, txn: Option<TxnId> },
    /// Server → sender: these vote since the entry `since`.
    Members { partition: PartitionId, since: Index, voters: Vec<NodeId> },
    /// Between replicas.
    Log { partition: PartitionId, message: replication::Message<Log> },
}

/// What a gateway asks to commit.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Request {
    /// The version of each key that was read.
    pub seen: Vec<(Key, Version)>,
    /// What to write.
    pub writes: Writes,
    /// It is read-only: it can be run again, so nobody remembers its outcome.
    pub is_read_only: bool,
    /// The client knows the outcomes of its transactions below this counter.
    pub acknowledged_below: u64,
}

/// An entry of the log: what the leader has decided about a transaction.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Command {
    /// Its name.
    pub txn: TxnId,
    /// When its gateway asked for it first, by the gateway's time: names the request.
    pub asked: Time,
    /// What it writes; none if it aborts.
    pub writes: Option<Writes>,
    /// Why it aborts, if it does.
    pub reason: AbortReason,
    /// See [`Request::is_read_only`].
    pub is_read_only: bool,
    /// See [`Request::acknowledged_below`].
    pub acknowledged_below: u64,
}

/// The log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Log;

impl Replicated for Log {
    type Command = Command;
    type Chunk = Chunk<State>;
    type Cursor = Cursor;
}

impl Message for Msg {
    fn kind(&self) -> &'static str {
        match self {
            Self::Read { .. } => "Read",
            Self::Values { .. } => "Values",
            Self::Commit { .. } => "Commit",
            Self::Resolve { .. } => "Resolve",
            Self::Ended { .. } => "Ended",
            Self::NotLeader { .. } => "NotLeader",
            Self::Members { .. } => "Members",
            Self::Log { message, .. } => message.kind(),
        }
    }

    fn txn(&self) -> Option<TxnId> {
        match self {
            Self::Read { txn, .. }
            | Self::Values { txn, .. }
            | Self::Commit { txn, .. }
            | Self::Resolve { txn, .. }
            | Self::Ended { txn, .. } => Some(*txn),
            Self::NotLeader { txn, .. } => *txn,
            Self::Members { .. } | Self::Log { .. } => None,
        }
    }

    fn wire_size(&self) -> usize {
        self.size()
    }

    fn keys(&self) -> usize {
        match self {
            Self::Read { keys, .. } => keys.len(),
            Self::Commit { request, .. } => request.seen.len() + request.writes.len(),
            Self::Values { .. }
            | Self::Resolve { .. }
            | Self::Ended { .. }
            | Self::NotLeader { .. }
            | Self::Members { .. }
            | Self::Log { .. } => 0,
        }
    }
}
