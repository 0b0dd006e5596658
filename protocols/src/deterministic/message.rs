//! What machines of the deterministic protocols say to each other, and what servers remember.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use orthodrome_core::id::{ClientId, NodeId, PartitionId, TxnId};
use orthodrome_core::machine::Message;
use orthodrome_core::store::Versions;
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::{Key, Outcome, Reads};

use super::merge::Place;
use crate::functor::Functor;
use crate::replication::{self, Index, Replicated};
use crate::sizes::{TXN, VERSION, data_size, keys_size, value_size};

/// A transaction as it is sequenced: all of it, in every stream that it is in (S6).
#[derive(Clone, PartialEq, Eq)]
pub struct Sequenced {
    /// What it does.
    pub functor: Arc<Functor>,
    /// The streams that it must be in, in order. It names them itself, so that what is complete does not
    /// depend on who looks (S5).
    pub homes: Vec<PartitionId>,
    /// When sequencers take it, by their clocks: about when all of them have it (S1).
    pub due: Timestamp,
}

impl Sequenced {
    /// True if the order of one stream is not enough.
    #[must_use]
    pub fn is_multi_home(&self) -> bool {
        self.homes.len() > 1
    }

    fn size(&self) -> usize {
        self.functor.size() + 3 * self.homes.len() + 10
    }
}

impl fmt::Debug for Sequenced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} in {:?}", self.functor, self.homes)
    }
}

/// One entry of a stream.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Command {
    /// Transactions in their order.
    Batch {
        /// The sequencer's clock.
        stamp: Timestamp,
        /// The transactions.
        entries: Vec<Arc<Sequenced>>,
    },
    /// Clients know the outcomes of everything below these counters (R6), as other streams say.
    Acknowledge(Vec<(ClientId, u64)>),
}

/// The log of one stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Log;

impl Replicated for Log {
    type Command = Command;
    type Chunk = Chunk;
    type Cursor = usize;

    fn command_size(command: &Command) -> usize {
        match command {
            Command::Batch { entries, .. } => {
                12 + entries.iter().map(|entry| entry.size()).sum::<usize>()
            }
            Command::Acknowledge(clients) => 4 + 12 * clients.len(),
        }
    }

    fn chunk_size(chunk: &Chunk) -> usize {
        let image = chunk.image.as_ref().map_or(0, |image| image.size());
        8 + image + data_size(&chunk.keys)
    }
}

/// What follows from the prefixes of the streams that a server has merged, data apart (S8).
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Image {
    /// Counts the checkpoints of a server.
    pub number: u64,
    /// Each stream.
    pub streams: BTreeMap<PartitionId, StreamImage>,
    /// What was merged and has not run.
    pub pending: Vec<(PartitionId, Place, Arc<Sequenced>)>,
    /// What became of transactions whose clients may ask.
    pub ended: BTreeMap<TxnId, Ended>,
}

/// What came of a transaction.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ended {
    /// What became of it.
    pub outcome: Outcome,
    /// What it read; nothing if its caller had read before it was submitted. Another server than the
    /// one that was asked first may have to tell, and to read again would be to read at another place in
    /// the order.
    pub reads: Reads,
}

impl Image {
    fn size(&self) -> usize {
        let of = |stream: &StreamImage| 24 + TXN * (stream.seen.len() + stream.acknowledged.len());
        let pending = self.pending.iter().map(|(_, _, entry)| 24 + entry.size()).sum::<usize>();
        let ended = self.ended.values().map(|ended| 24 + reads_size(&ended.reads)).sum::<usize>();
        self.streams.values().map(of).sum::<usize>() + pending + ended
    }
}

/// What follows from a prefix of one stream.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct StreamImage {
    /// The end of the prefix.
    pub applied: Index,
    /// The time of the last batch; grows along the stream whatever clocks do.
    pub stamp: Timestamp,
    /// Transactions in it whose clients may send them again.
    pub seen: BTreeSet<TxnId>,
    /// Clients know the outcomes of everything below.
    pub acknowledged: BTreeMap<ClientId, u64>,
}

/// A piece of a server's state, for one that fell too far behind.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Chunk {
    /// The first piece: everything but the data.
    pub image: Option<Arc<Image>>,
    /// Keys with their newest versions.
    pub keys: Vec<(Key, Versions)>,
}

/// What a server remembers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Record {
    /// Its state at a checkpoint; the data is in the state engine. Written before the checkpoint as
    /// well as with it: a crash in between leaves new data, and then this image counts.
    Image(Arc<Image>),
    /// A record of a stream's log.
    Replication(PartitionId, replication::Record<Log>),
}

/// What machines say to each other.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Msg {
    /// Gateway → server: run this, and say what came of it. Sent again to anybody at any time; it
    /// runs once.
    Submit {
        /// The transaction.
        functor: Arc<Functor>,
    },
    /// Server → gateway: what came of a transaction, once it ran here.
    Answer {
        /// Which.
        txn: TxnId,
        /// What became of it.
        outcome: Outcome,
        /// What it read; nothing if its caller knows that.
        reads: Reads,
    },
    /// Gateway → server: a caller wants to see keys before it decides (reconnaissance).
    Look {
        /// Whose.
        txn: TxnId,
        /// Which round.
        round: u32,
        /// Which keys.
        keys: Vec<Key>,
    },
    /// Server → gateway: what the keys hold here; may be old.
    Found {
        /// Whose.
        txn: TxnId,
        /// Which round.
        round: u32,
        /// What there is.
        reads: Reads,
    },
    /// Server → sequencer: put this into the stream. From the server that was asked, and from any home
    /// that saw it in one stream and not in another (S6).
    Sequence {
        /// Which stream.
        stream: PartitionId,
        /// The transaction.
        entry: Arc<Sequenced>,
    },
    /// Server → whoever took it for the stream's sequencer.
    NotLeader {
        /// Which stream.
        partition: PartitionId,
        /// Who is, if it knows.
        leader: Option<NodeId>,
        /// What it was asked about.
        txn: Option<TxnId>,
    },
    /// Of a stream's log.
    Replication {
        /// Which stream.
        partition: PartitionId,
        /// What.
        message: replication::Message<Log>,
    },
}

impl Message for Msg {
    fn kind(&self) -> &'static str {
        match self {
            Self::Submit { .. } => "Submit",
            Self::Answer { .. } => "Answer",
            Self::Look { .. } => "Look",
            Self::Found { .. } => "Found",
            Self::Sequence { .. } => "Sequence",
            Self::NotLeader { .. } => "NotLeader",
            Self::Replication { message, .. } => message.kind(),
        }
    }

    fn txn(&self) -> Option<TxnId> {
        match self {
            Self::Submit { functor } => Some(functor.txn),
            Self::Sequence { entry, .. } => Some(entry.functor.txn),
            Self::Answer { txn, .. } | Self::Look { txn, .. } | Self::Found { txn, .. } => {
                Some(*txn)
            }
            Self::NotLeader { txn, .. } => *txn,
            Self::Replication { .. } => None,
        }
    }

    fn wire_size(&self) -> usize {
        4 + match self {
            Self::Submit { functor } => functor.size(),
            Self::Answer { reads, .. } => TXN + 12 + reads_size(reads),
            Self::Look { keys, .. } => TXN + 2 + keys_size(keys),
            Self::Found { reads, .. } => TXN + 2 + reads_size(reads),
            Self::Sequence { entry, .. } => 4 + entry.size(),
            Self::NotLeader { txn, .. } => 6 + txn.map_or(0, |_| TXN),
            Self::Replication { message, .. } => 3 + message.wire_size(),
        }
    }

    fn keys(&self) -> usize {
        match self {
            Self::Submit { functor } => functor.reads.len() + functor.writes.len(),
            Self::Sequence { entry, .. } => entry.functor.reads.len() + entry.functor.writes.len(),
            Self::Look { keys, .. } => keys.len(),
            Self::Found { reads, .. } => reads.len(),
            Self::Answer { .. } | Self::NotLeader { .. } | Self::Replication { .. } => 0,
        }
    }
}

fn reads_size(reads: &Reads) -> usize {
    reads.iter().map(|(key, read)| 8 + key.len() + VERSION + value_size(&read.value)).sum()
}
