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
#[derive(Clone, PartialEq, Eq, Debug, Wire, Message)]
pub enum Msg {
    /// Gateway → leader: what do these keys hold?
    #[message(keys = keys.len())]
    Read {
        /// The transaction.
        txn: TxnId,
        /// The keys.
        keys: Vec<Key>,
    },
    /// Leader → gateway: what the keys hold.
    Values {
        /// The transaction.
        txn: TxnId,
        /// Every key; none if they hold more than one message may hold.
        reads: Option<Vec<(Key, Read)>>,
    },
    /// Gateway → leader: commit this. Repeated until it is answered.
    #[message(keys = request.seen.len() + request.writes.len())]
    Commit {
        /// The transaction.
        txn: TxnId,
        /// When the gateway asked first, by its own time: names the request.
        asked: Time,
        /// What to commit.
        request: Request,
    },
    /// Gateway → leader: what became of this? It is refused if nothing has.
    Resolve {
        /// The transaction.
        txn: TxnId,
        /// Names the request.
        asked: Time,
    },
    /// Leader → gateway: the entry is chosen.
    Ended {
        /// The transaction.
        txn: TxnId,
        /// Which request this answers.
        asked: Time,
        /// What became of it.
        outcome: Outcome,
    },
    /// Server → sender: this server does not lead.
    NotLeader {
        /// Which group.
        partition: PartitionId,
        /// Who leads, if it is known.
        leader: Option<NodeId>,
        /// The transaction that it was about.
        txn: Option<TxnId>,
    },
    /// Server → sender: others vote than the placement says.
    Members {
        /// Which group.
        partition: PartitionId,
        /// The entry of the log that named them.
        since: Index,
        /// The voters.
        voters: Vec<NodeId>,
    },
    /// Between replicas.
    #[message(kind = message.kind())]
    Log {
        /// Which group.
        partition: PartitionId,
        /// The log's message.
        message: replication::Message<Log>,
    },
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
