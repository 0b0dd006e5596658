//! Messages between machines of Ocean Vista, and records of servers.

use std::sync::Arc;

use orthodrome_core::id::{ClientId, PartitionId, TxnId};
use orthodrome_core::machine::Message;
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::store::{Versions, check_versions, sample_versions};
use orthodrome_core::time::{Time, Timestamp};
use orthodrome_core::txn::{Key, Outcome, Read, Reads, Value};
use orthodrome_core::{Rng, Wire, WireError};

use super::checks::Sum;
use super::state::{Image, Name, Named, State};
use super::{directory, gossiper, takeover};
pub use crate::functor::{Body, Functor, Output};

/// How a transaction was processed, for reports.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Wire)]
pub enum Path {
    /// Every partition answered with a super quorum (§4.1).
    Fast,
    /// Some partition needed confirmations (§4.1).
    Slow,
    /// Only its final values were stored (§3.4).
    WriteOnly,
    /// Nothing was stored (§3.4).
    ReadOnly,
    /// Its coordinator was lost, or abandoned it.
    Recovered,
}

impl Path {
    /// The name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Fast => "fast",
            Self::Slow => "slow",
            Self::WriteOnly => "write-only",
            Self::ReadOnly => "read-only",
            Self::Recovered => "recovered",
        }
    }
}

/// Why a server declines a request for now.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Wire)]
pub enum Reason {
    /// The server does not participate at the moment: it has no lease, or has to catch up.
    Inactive,
    /// The server is overloaded.
    Busy,
    /// The requested snapshot has been garbage-collected.
    Collected,
    /// The requested data is larger than one transaction may read.
    TooLarge,
}

/// Why a replica does not store a transaction.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Wire)]
pub enum Refusal {
    /// The version number is too far ahead of the replica's clock (R8).
    Ahead,
    /// The transaction is known under another version number, or refused, or its client has
    /// finished it (R1, R6).
    Known,
    /// The version number is below the replica's watermark (V9).
    Below,
    /// It is aborted, or the replica has promised a later ballot (V5).
    Outvoted,
    /// It was never stored, and never may be: f + 1 replicas have refused it, or it has ended under
    /// another version number.
    Final,
}

/// A request to read one key.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Ask {
    /// The key.
    pub key: Key,
    /// The newest version below this number is wanted.
    pub below: Timestamp,
    /// This version exists and must be computed first.
    pub resolve: Option<Timestamp>,
}

/// A version above a replica's Rwatermark, as the replica shows it to readers.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Shown {
    /// Its number.
    pub ts: Timestamp,
    /// The ballot in which it was stored or aborted.
    pub ballot: u64,
    /// The transaction.
    pub txn: TxnId,
    /// True if it was finalized. That proves nothing (V1); mutations rely on it.
    pub is_finalized: bool,
    /// The contents.
    pub what: What,
}

/// The contents of a version.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum What {
    /// The version is aborted, and will never have a value.
    Aborted,
    /// The transaction aborted by its own logic, or in the end did not write this key.
    Void,
    /// A functor that has not been computed.
    Functor,
    /// A value, or a deletion.
    Final(Option<Value>),
}

/// One replica's versions of one key.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
#[wire(check = "View::check", sample = "View::draw")]
pub struct View {
    /// The unsettled versions, newest first.
    pub versions: Vec<Shown>,
    /// Below this, there may be more versions that are not shown.
    pub complete_from: Timestamp,
    /// The newest settled version, if no version was left out.
    pub settled: Read,
}

impl View {
    fn check(&self) -> Result<(), WireError> {
        if self.versions.is_sorted_by(|a, b| a.ts > b.ts) {
            return Ok(());
        }
        let (field, found) = ("View.versions", "versions out of order".into());
        Err(WireError::Value { field, found, wanted: "newest first, each once" })
    }

    /// A random view, for tests of the encoding.
    fn draw(rng: &mut Rng) -> Self {
        let mut versions = Vec::<Shown>::sample(rng);
        versions.sort_by_key(|shown| std::cmp::Reverse(shown.ts));
        versions.dedup_by_key(|shown| shown.ts);
        Self { versions, complete_from: Wire::sample(rng), settled: Wire::sample(rng) }
    }
}

/// A replica's answer about one key.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Seen {
    /// The key.
    pub key: Key,
    /// The requested bound.
    pub below: Timestamp,
    /// The versions.
    pub view: View,
}

/// A replica's knowledge of a transaction, by the transaction's id.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
#[wire(check = "Knowledge::check")]
pub enum Knowledge {
    /// The replica does not know it, and will not store it for its coordinator (R1); if final, for
    /// no server.
    Refused {
        /// True if the asking server has f + 1 refusals.
        is_final: bool,
    },
    /// It is stored or aborted here, under at least one version number: copies of it may have gone
    /// to several coordinators.
    Stored(Vec<Holding>),
    /// It has ended everywhere.
    Ended(Outcome),
    /// It ended longer ago than the retention, or its client had acknowledged it. Its outcome is
    /// forgotten here, and it will not be stored again.
    Forgotten,
}

impl Knowledge {
    fn check(&self) -> Result<(), WireError> {
        match self {
            Self::Stored(held) if held.is_empty() => {
                let (field, found) = ("Stored.held", "nothing".into());
                Err(WireError::Value { field, found, wanted: "what is stored" })
            }
            Self::Ended(outcome) => outcome.check_decided(),
            Self::Stored(_) | Self::Refused { .. } | Self::Forgotten => Ok(()),
        }
    }
}

/// A replica's state of a transaction under one version number.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Holding {
    /// The version number.
    pub ts: Timestamp,
    /// The ballot in which it was stored or aborted.
    pub ballot: u64,
    /// True if it is aborted in that ballot.
    pub is_aborted: bool,
    /// The transaction's functor.
    pub functor: Arc<Functor>,
}

/// The rest of a long answer, which is sent in pieces and shows one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Wire)]
pub struct Rest {
    /// When the answer was made, by the sender's clock.
    pub as_of: Timestamp,
    /// Number of its entries and names that have been sent.
    pub skip: u64,
}

/// Messages of Ocean Vista.
#[derive(Clone, PartialEq, Eq, Debug, Wire, Message)]
pub enum Msg {
    /// Gateway → a coordinator of its region: run this transaction.
    #[message(txn = functor.txn)]
    Submit {
        /// The transaction.
        functor: Arc<Functor>,
    },
    /// Coordinator → gateway: the outcome of a transaction.
    Answer {
        /// The transaction.
        txn: TxnId,
        /// Its outcome.
        outcome: Outcome,
        /// Its reads, if they are known.
        reads: Option<Reads>,
        /// How it was processed.
        path: Path,
    },
    /// Gateway → coordinator: read these keys as of one time, for a transaction whose caller
    /// decides afterwards (reconnaissance, §3.4).
    Look {
        /// The transaction.
        txn: TxnId,
        /// The round of the transaction.
        round: u32,
        /// The keys.
        keys: Vec<Key>,
        /// The time of the reads; none in the first round, in which the coordinator chooses.
        at: Option<Timestamp>,
    },
    /// Coordinator → gateway: the reads.
    Found {
        /// The transaction.
        txn: TxnId,
        /// The round.
        round: u32,
        /// The time of the reads.
        at: Timestamp,
        /// The reads.
        reads: Reads,
    },
    /// Coordinator → gateway: the request was declined.
    Declined {
        /// The transaction.
        txn: TxnId,
        /// The reason.
        reason: Reason,
    },
    /// Gateway → another coordinator: find out the outcome of a transaction whose coordinator does
    /// not answer.
    #[message(txn = functor.txn)]
    Inquire {
        /// The transaction, which writes something.
        functor: Arc<Functor>,
    },
    /// Coordinator → all replicas of all partitions that are written: store this (§4.1).
    #[message(
        txn = functor.txn,
        keys = functor.writes.len(),
        held = functor.writes.iter().filter(|key| holds(key)).count()
    )]
    Write {
        /// The version number.
        ts: Timestamp,
        /// The ballot: 0 from its own coordinator, higher from a server that takes over.
        ballot: u64,
        /// The incarnation of the coordinator that created the number.
        incarnation: u32,
        /// The transaction.
        functor: Arc<Functor>,
    },
    /// Replica → coordinator: it is stored durably.
    Written {
        /// The version number.
        ts: Timestamp,
        /// The ballot.
        ballot: u64,
        /// The disk of the replica ([`super::watermark::Member::disk`]).
        disk: u32,
    },
    /// Replica → coordinator: it is not stored, and will not be unless something changes.
    Refused {
        /// The version number.
        ts: Timestamp,
        /// The ballot.
        ballot: u64,
        /// The reason.
        refusal: Refusal,
    },
    /// Coordinator → replicas: a majority of each partition has stored it (§4.1).
    Finalize {
        /// The version number.
        ts: Timestamp,
        /// The ballot.
        ballot: u64,
    },
    /// Replica → coordinator: it is marked durably; or it is not stored here (V5).
    Confirm {
        /// The version number.
        ts: Timestamp,
        /// The ballot.
        ballot: u64,
        /// True if it is stored and marked.
        is_held: bool,
        /// The disk of the replica ([`super::watermark::Member::disk`]).
        disk: u32,
    },
    /// Coordinator → replicas: it is aborted; promise never to accept it (§4.1).
    #[message(
        txn = functor.txn,
        keys = functor.writes.len(),
        held = functor.writes.iter().filter(|key| holds(key)).count()
    )]
    Abort {
        /// The version number.
        ts: Timestamp,
        /// The ballot.
        ballot: u64,
        /// The incarnation of the coordinator that created the number.
        incarnation: u32,
        /// The transaction.
        functor: Arc<Functor>,
    },
    /// Replica → coordinator: the promise is durable.
    Aborted {
        /// The version number.
        ts: Timestamp,
        /// The ballot.
        ballot: u64,
        /// The disk of the replica ([`super::watermark::Member::disk`]).
        disk: u32,
    },
    /// Executor → replica: read these keys (§4.3).
    #[message(keys = asks.len())]
    Get {
        /// The executor's number of the request.
        query: u64,
        /// The partition.
        partition: PartitionId,
        /// The keys.
        asks: Vec<Ask>,
        /// The partition's Rwatermark, as far as the executor knows it.
        replicated: Timestamp,
        /// The epoch of the executor's watermarks; the replica must know its members.
        epoch: u64,
    },
    /// Replica → executor: the versions of the keys.
    Got {
        /// The executor's number of the request.
        query: u64,
        /// The replica's Rwatermark: below it, this answer alone suffices.
        replicated: Timestamp,
        /// The versions.
        seen: Vec<Seen>,
        /// True if keys are missing because the message would have been too long; they must be
        /// requested again.
        is_cut: bool,
    },
    /// Replica → executor: it cannot answer now.
    NotReady {
        /// The executor's number of the request.
        query: u64,
        /// The reason.
        reason: Reason,
    },
    /// Executor → replicas: the final values of a functor (§3.1).
    #[message(
        keys = output.as_ref().as_ref().map_or(0, OrdMap::len),
        held = held(output, holds)
    )]
    Put {
        /// The version number.
        ts: Timestamp,
        /// The result of the functor.
        output: Arc<Output>,
    },
    /// Executor → coordinator: the result of the transaction (§3.1, circled 3).
    Executed {
        /// The version number.
        ts: Timestamp,
        /// The result.
        output: Arc<Output>,
        /// Its reads.
        reads: Reads,
    },
    /// Coordinator → replica: do you know this transaction? If not, do not accept it from its
    /// coordinator (R1). Once f + 1 replicas have refused it in this way, it was never stored. Then
    /// all replicas are asked to refuse it finally: a server that takes over for its coordinator
    /// may still write a transaction that was only refused, but not one that was finally refused.
    Query {
        /// The transaction.
        txn: TxnId,
        /// True for a final refusal.
        is_final: bool,
        /// The coordinator's number of the question.
        round: u32,
        /// The epoch: a replica must know the results of all incarnations that ended before it.
        epoch: u64,
    },
    /// Replica → coordinator: its knowledge, which is durable.
    Known {
        /// The transaction.
        txn: TxnId,
        /// The question that this answers.
        round: u32,
        /// The replica has settled all versions up to this: unknown ones below are void.
        settled: Timestamp,
        /// The knowledge.
        knowledge: Knowledge,
    },
    /// Coordinator → replica: you have not confirmed all of my versions in this range, which are
    /// visible. Pull them.
    Missing {
        /// The first version.
        from: Timestamp,
        /// The last version.
        to: Timestamp,
    },
    /// Replica → coordinator: I have, or have discarded, all versions in this range.
    Have {
        /// The first version.
        from: Timestamp,
        /// The last version.
        to: Timestamp,
    },
    /// Replica → its peers: send your unsettled versions of this partition in this range.
    Pull {
        /// The partition.
        partition: PartitionId,
        /// The node's number of the question.
        round: u64,
        /// The first version.
        from: Timestamp,
        /// The last version.
        to: Timestamp,
        /// The piece of an earlier answer that is wanted.
        rest: Option<Rest>,
        /// When the node asked, by its own clock for time-outs.
        asked: Option<Time>,
    },
    /// Peer → replica: the requested data.
    Pulled {
        /// The partition.
        partition: PartitionId,
        /// The question that this answers.
        round: u64,
        /// The answer to which this piece belongs, and what was sent of it before.
        piece: Rest,
        /// What will have been sent with this piece, if more remains.
        next: Option<u64>,
        /// The peer has settled all versions below this.
        settled: Timestamp,
        /// The unsettled versions.
        entries: Vec<(Timestamp, Image)>,
        /// Ids of transactions from the first version on.
        names: Vec<(Named, Name)>,
        /// For clients, the counters below which it has forgotten transactions.
        forgotten: Vec<(ClientId, u64)>,
        /// In the first piece: its promises, and its knowledge of what survives of lost servers.
        promises: Vec<takeover::Record>,
        /// When the replica asked, as it said: it may have asked several times.
        asked: Option<Time>,
    },
    /// Replica → peer: send the next piece of your settled versions of this partition.
    Scan {
        /// The partition.
        partition: PartitionId,
        /// The number of the question.
        round: u64,
        /// The first version.
        from: Timestamp,
        /// Keys after this one; none to begin with the first.
        after: Option<Key>,
        /// When the node asked, by its own clock for time-outs.
        asked: Option<Time>,
    },
    /// Peer → replica: the requested data.
    Scanned {
        /// The partition.
        partition: PartitionId,
        /// The question that this answers.
        round: u64,
        /// Keys with their versions.
        #[wire(check = "check_versions", sample = "sample_versions")]
        keys: Vec<(Key, Versions)>,
        /// The last key of this piece, if more remain.
        next: Option<Key>,
        /// Versions that newer ones at or below this replace are not included.
        collected: Timestamp,
        /// The peer has settled all versions below this. After a restart it may be less than
        /// before.
        settled: Timestamp,
        /// When the replica asked, as it said: it may have asked several times.
        asked: Option<Time>,
    },
    /// Coordinator → its backup: this transaction is open, or has ended if there is no functor
    /// (§5.2).
    Intent {
        /// The version number.
        ts: Timestamp,
        /// The incarnation of the coordinator.
        incarnation: u32,
        /// The transaction.
        functor: Option<Arc<Functor>>,
    },
    /// A message to or from the directory.
    #[message(kind = f0.kind(), control)]
    Directory(Box<directory::Message>),
    /// A message between a server that takes over and replicas.
    #[message(kind = f0.kind())]
    Takeover(Box<takeover::Message<Arc<Functor>>>),
    /// A message between servers and gossipers; see [`gossiper`].
    #[message(kind = f0.kind(), control)]
    Gossip(Box<gossiper::Message>),
    /// Replica → its peers: digests of its settled versions; see [`super::checks`].
    Digests {
        /// Digests of spans of versions.
        sums: Vec<Sum>,
    },
}

/// A durable change of a node's replicas; see [`State::apply`].
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Change {
    /// A transaction is stored.
    Write {
        /// The version number.
        ts: Timestamp,
        /// The ballot.
        ballot: u64,
        /// The incarnation of the coordinator.
        incarnation: u32,
        /// The transaction.
        functor: Arc<Functor>,
    },
    /// It is finalized.
    Finalize(Timestamp),
    /// It is aborted.
    Abort {
        /// The version number.
        ts: Timestamp,
        /// The ballot.
        ballot: u64,
        /// The incarnation of the coordinator.
        incarnation: u32,
        /// The transaction.
        functor: Arc<Functor>,
    },
    /// It gets its final values.
    Resolve {
        /// The version number.
        ts: Timestamp,
        /// Its final values.
        output: Arc<Output>,
    },
    /// A transaction is refused to its coordinator.
    Refuse {
        /// The transaction.
        txn: TxnId,
        /// True if it is refused to all servers.
        is_final: bool,
        /// When, by the replica's clock. The refusal is forgotten after the retention.
        at: Timestamp,
    },
    /// Transaction ids from a peer.
    Names(Vec<(Named, Name)>),
    /// A version that existed at other replicas is added here (V9).
    Adopt {
        /// The version number.
        ts: Timestamp,
        /// Its state at the other replicas.
        image: Image,
    },
    /// A peer has forgotten transactions of these clients below these counters.
    Forget(Vec<(ClientId, u64)>),
}

/// A durable record of a server.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Record {
    /// The state of the replicas at a checkpoint, or a piece of it; settled versions are in the
    /// state engine.
    State(Box<State>),
    /// A change of it.
    Change(Change),
    /// The disk has all promises of this node. Without this record it may be a new disk.
    Intact,
    /// A promise of a partition's replica to a server that takes over.
    Takeover(PartitionId, takeover::Record),
    /// A record of a directory voter.
    Directory(directory::Record),
}

/// Approximate size of a transaction id with its state, in bytes.
pub(super) const NAME: usize = 48;

/// Approximate size of a counter below which a client's transactions are forgotten, in bytes.
pub(super) const FLOOR: usize = 14;

/// The number of keys of an output that a replica holds: it stores a transaction whole, but only
/// under the keys that it holds.
fn held(output: &Arc<Output>, holds: &dyn Fn(&Key) -> bool) -> usize {
    let writes = output.as_ref().as_ref();
    writes.map_or(0, |writes| writes.keys().filter(|key| holds(key)).count())
}

const _: () =
    assert!(size_of::<Msg>() <= 200, "messages are moved through queues; keep them small");
