//! What machines of Ocean Vista say to each other, and what servers remember.

use std::collections::BTreeMap;
use std::sync::Arc;

use orthodrome_core::id::{ClientId, PartitionId, TxnId};
use orthodrome_core::machine::{Lane, Message};
use orthodrome_core::store::{Versions, check_versions, sample_versions};
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::{Key, Outcome, Read, Reads, Value};
use orthodrome_core::{Rng, Wire, WireError};

use super::checks::Sum;
use super::state::{Image, Name, State};
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
    /// Its coordinator was lost, or gave it up.
    Recovered,
}

impl Path {
    /// Its name in reports.
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

/// Why a server does not do now what it is asked to.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Wire)]
pub enum Reason {
    /// It does not take part at the moment: it has no lease, or has to catch up.
    Inactive,
    /// It has too much to do.
    Busy,
    /// The snapshot asked for has been collected.
    Collected,
    /// What is asked for is larger than one transaction may read.
    TooLarge,
}

/// Why a replica does not store a transaction.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Wire)]
pub enum Refusal {
    /// Its version number is too far ahead of the replica's clock (R8).
    Ahead,
    /// The name is known under another version number, or refused, or its client has gone on
    /// (R1, R6).
    Known,
    /// The version number is below the replica's watermark (V9).
    Below,
    /// It is aborted, or the replica listens to a later ballot only (V5).
    Outvoted,
    /// It was never stored, and now nobody may: f + 1 replicas had refused it, or it is over under
    /// another version number.
    Final,
}

/// One key that is to be read.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Ask {
    /// The key.
    pub key: Key,
    /// Its newest version below this.
    pub below: Timestamp,
    /// This version is there and has to be computed first.
    pub resolve: Option<Timestamp>,
}

/// A version of a key that is above a replica's Rwatermark, as it shows it to readers.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Shown {
    /// Its number.
    pub ts: Timestamp,
    /// The ballot in which it was stored or aborted.
    pub ballot: u64,
    /// Whose it is.
    pub txn: TxnId,
    /// It was finalized. Proves nothing (V1); unsafe variants believe it.
    pub is_finalized: bool,
    /// What is there.
    pub what: What,
}

/// What a version holds.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum What {
    /// It is aborted, and never will hold anything.
    Aborted,
    /// Its transaction aborted by its own logic, or wrote something else after all.
    Void,
    /// Not computed yet.
    Functor,
    /// A value, or a deletion.
    Final(Option<Value>),
}

/// What one replica holds of one key.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
#[wire(check = "View::check", sample = "View::draw")]
pub struct View {
    /// Versions that are not settled, newest first.
    pub versions: Vec<Shown>,
    /// There may be more below this that are not shown.
    pub complete_from: Timestamp,
    /// The newest settled version, if nothing was cut.
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

    /// Any view, for tests of its bytes.
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
    /// What was asked for.
    pub below: Timestamp,
    /// What there is.
    pub view: View,
}

/// What a replica knows of a transaction by its name.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
#[wire(check = "Knowledge::check")]
pub enum Knowledge {
    /// Nothing, and it will not store it for its coordinator (R1); if final, for nobody.
    Refused {
        /// Whoever asked had heard from f + 1 replicas that they refuse it.
        is_final: bool,
    },
    /// It is stored or aborted here, under at least one version number: copies of it may have gone
    /// to several coordinators.
    Stored(Vec<Holding>),
    /// It is over everywhere.
    Ended(Outcome),
    /// It was over for longer than the retention, or its client had acknowledged it: nobody here
    /// can tell what became of it. Nor is it stored any more.
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

/// What a replica holds of a transaction under one version number.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Holding {
    /// The version number.
    pub ts: Timestamp,
    /// The ballot in which it was stored or aborted.
    pub ballot: u64,
    /// It is aborted in that ballot.
    pub is_aborted: bool,
    /// What it does.
    pub functor: Arc<Functor>,
}

/// What is left of a long answer, which goes in pieces and is all of one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Wire)]
pub struct Rest {
    /// When it was put together, by the clock of who answers.
    pub as_of: Timestamp,
    /// So many of its entries and names have been told.
    pub skip: u64,
}

/// Messages of Ocean Vista.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Msg {
    /// Gateway → a coordinator of its region: run this.
    Submit {
        /// The transaction.
        functor: Arc<Functor>,
    },
    /// Coordinator → gateway: this became of it.
    Answer {
        /// The transaction.
        txn: TxnId,
        /// Its outcome.
        outcome: Outcome,
        /// What it read, if that is known.
        reads: Option<Reads>,
        /// How it was processed.
        path: Path,
    },
    /// Gateway → coordinator: read these, all as of one time, for a transaction whose caller
    /// decides afterwards (reconnaissance, §3.4).
    Look {
        /// The transaction.
        txn: TxnId,
        /// The round of the transaction.
        round: u32,
        /// The keys.
        keys: Vec<Key>,
        /// As of when; in the first round the coordinator chooses.
        at: Option<Timestamp>,
    },
    /// Coordinator → gateway: what was there.
    Found {
        /// The transaction.
        txn: TxnId,
        /// The round.
        round: u32,
        /// As of when.
        at: Timestamp,
        /// What was there.
        reads: Reads,
    },
    /// Coordinator → gateway: it did not take it.
    Declined {
        /// The transaction.
        txn: TxnId,
        /// Why.
        reason: Reason,
    },
    /// Gateway → another coordinator: I lost track of it; find out what became of it.
    Inquire {
        /// The transaction, which writes something.
        functor: Arc<Functor>,
    },
    /// Coordinator → all replicas of all partitions written: store this (§4.1).
    Write {
        /// The version number.
        ts: Timestamp,
        /// 0 from its own coordinator, more from whoever took over.
        ballot: u64,
        /// The life of the coordinator that created the number.
        incarnation: u32,
        /// The transaction.
        functor: Arc<Functor>,
    },
    /// Replica → coordinator: it is stored, durably.
    Written {
        /// The version number.
        ts: Timestamp,
        /// The ballot.
        ballot: u64,
        /// On which disk of the replica ([`super::watermark::Member::disk`]).
        disk: u32,
    },
    /// Replica → coordinator: it is not stored, nor will be unless something changes.
    Refused {
        /// The version number.
        ts: Timestamp,
        /// The ballot.
        ballot: u64,
        /// Why.
        refusal: Refusal,
    },
    /// Coordinator → replicas: a majority of each partition has stored it (§4.1).
    Finalize {
        /// The version number.
        ts: Timestamp,
        /// The ballot.
        ballot: u64,
    },
    /// Replica → coordinator: marked, durably; or I do not hold it (V5).
    Confirm {
        /// The version number.
        ts: Timestamp,
        /// The ballot.
        ballot: u64,
        /// It is held and marked.
        is_held: bool,
        /// On which disk of the replica ([`super::watermark::Member::disk`]).
        disk: u32,
    },
    /// Coordinator → replicas: it is aborted; promise never to accept it (§4.1).
    Abort {
        /// The version number.
        ts: Timestamp,
        /// The ballot.
        ballot: u64,
        /// The life of the coordinator that created the number.
        incarnation: u32,
        /// The transaction.
        functor: Arc<Functor>,
    },
    /// Replica → coordinator: promised, durably.
    Aborted {
        /// The version number.
        ts: Timestamp,
        /// The ballot.
        ballot: u64,
        /// On which disk of the replica ([`super::watermark::Member::disk`]).
        disk: u32,
    },
    /// Executor → replica: what is there of these keys (§4.3)?
    Get {
        /// The executor's name for the question.
        query: u64,
        /// The partition.
        partition: PartitionId,
        /// The keys.
        asks: Vec<Ask>,
        /// The partition's Rwatermark as the executor knows it.
        replicated: Timestamp,
        /// The epoch of the executor's watermarks: who answers must know its members.
        epoch: u64,
    },
    /// Replica → executor: this.
    Got {
        /// The executor's name for the question.
        query: u64,
        /// Below this the replica's word alone is good: its Rwatermark.
        replicated: Timestamp,
        /// What there is.
        seen: Vec<Seen>,
        /// That is not all: the rest would have made the message too long, and has to be asked for
        /// again.
        is_cut: bool,
    },
    /// Replica → executor: it cannot say.
    NotReady {
        /// The executor's name for the question.
        query: u64,
        /// Why.
        reason: Reason,
    },
    /// Executor → replicas: final values in the place of a functor (§3.1).
    Put {
        /// The version number.
        ts: Timestamp,
        /// What the functor came to.
        output: Arc<Output>,
    },
    /// Executor → coordinator: what the transaction came to (§3.1, circled 3).
    Executed {
        /// The version number.
        ts: Timestamp,
        /// What it came to.
        output: Arc<Output>,
        /// What it read.
        reads: Reads,
    },
    /// Coordinator → replica: do you know this transaction? If not, do not accept it from its
    /// coordinator (R1). Once f + 1 replicas have refused it so, it was never stored, and everybody
    /// is asked to refuse it for good: whoever takes its coordinator over may still write what was
    /// only refused, but not that.
    Query {
        /// The transaction.
        txn: TxnId,
        /// For good.
        is_final: bool,
        /// The coordinator's count of its questions about it.
        round: u32,
        /// Whoever does not know what became of the lives that ended before it cannot tell what is
        /// there.
        epoch: u64,
    },
    /// Replica → coordinator: what it knows, durably.
    Known {
        /// The transaction.
        txn: TxnId,
        /// The question that this answers.
        round: u32,
        /// Up to here it has settled everything: what it does not know of below is void.
        settled: Timestamp,
        /// What it knows.
        knowledge: Knowledge,
    },
    /// Coordinator → replica: you have not said that you hold everything of mine from here to
    /// there, which is visible. Pull it.
    Missing {
        /// The first version.
        from: Timestamp,
        /// The last version.
        to: Timestamp,
    },
    /// Replica → coordinator: I hold or have discarded everything from here to there.
    Have {
        /// The first version.
        from: Timestamp,
        /// The last version.
        to: Timestamp,
    },
    /// Replica → its peers: what do you hold of this partition in this range, that is not settled?
    Pull {
        /// The partition.
        partition: PartitionId,
        /// The node's count of its questions.
        round: u64,
        /// The first version.
        from: Timestamp,
        /// The last version.
        to: Timestamp,
        /// The rest of an answer: which, and what of it.
        rest: Option<Rest>,
    },
    /// Peer → replica: this.
    Pulled {
        /// The partition.
        partition: PartitionId,
        /// The question that this answers.
        round: u64,
        /// Of which answer this is a piece, and what was told of that before.
        piece: Rest,
        /// So much will have been told of it, if that is not all.
        next: Option<u64>,
        /// Below this the peer has settled everything.
        settled: Timestamp,
        /// What is not settled.
        entries: Vec<(Timestamp, Image)>,
        /// Names of transactions from the first version on.
        names: Vec<((ClientId, u64), Name)>,
        /// Of clients, below which counters it has forgotten names.
        forgotten: Vec<(ClientId, u64)>,
        /// In the first piece: what it promised, and what it knows to survive of servers that are
        /// gone.
        promises: Vec<takeover::Record>,
    },
    /// Replica → peer: the next piece of what you have settled of this partition.
    Scan {
        /// The partition.
        partition: PartitionId,
        /// The question.
        round: u64,
        /// From this version on.
        from: Timestamp,
        /// Keys after this one; from the first, if none.
        after: Option<Key>,
    },
    /// Peer → replica: this.
    Scanned {
        /// The partition.
        partition: PartitionId,
        /// The question that this answers.
        round: u64,
        /// Keys with their versions.
        #[wire(check = "check_versions", sample = "sample_versions")]
        keys: Vec<(Key, Versions)>,
        /// The last key looked at, if there are more.
        next: Option<Key>,
        /// Versions that others at or below this replace are not among them.
        collected: Timestamp,
        /// Below this the peer has settled everything: less than it had said if it has restarted.
        settled: Timestamp,
    },
    /// Coordinator → its backup: this is under way, or over if nothing is told (§5.2).
    Intent {
        /// The version number.
        ts: Timestamp,
        /// The life of the coordinator.
        incarnation: u32,
        /// The transaction.
        functor: Option<Arc<Functor>>,
    },
    /// To and from the directory.
    Directory(Box<directory::Message>),
    /// Between whoever takes over and replicas.
    Takeover(Box<takeover::Message<Arc<Functor>>>),
    /// Between servers and gossipers; see [`gossiper`].
    Gossip(Box<gossiper::Message>),
    /// Replica → its peers: what its settled versions came to; see [`super::checks`].
    Digests {
        /// Of some spans of versions.
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
        /// The life of the coordinator.
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
        /// The life of the coordinator.
        incarnation: u32,
        /// The transaction.
        functor: Arc<Functor>,
    },
    /// It has its final values.
    Resolve {
        /// The version number.
        ts: Timestamp,
        /// Its final values.
        output: Arc<Output>,
    },
    /// A transaction is not accepted from its coordinator.
    Refuse {
        /// Which.
        txn: TxnId,
        /// Nor from anybody.
        is_final: bool,
        /// When, by the replica's clock: it is forgotten so long after that.
        at: Timestamp,
    },
    /// What a peer knows of names.
    Names(Vec<((ClientId, u64), Name)>),
    /// It was there all the time, but not here (V9).
    Adopt {
        /// The version number.
        ts: Timestamp,
        /// Its state at the others.
        image: Image,
    },
    /// A peer has forgotten names of these clients below these counters.
    Forget(Vec<(ClientId, u64)>),
}

/// What a server remembers.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Record {
    /// The state of the replicas at a checkpoint, or a piece of it; settled versions are in the
    /// state engine.
    State(Box<State>),
    /// A change of it.
    Change(Change),
    /// This disk remembers all that was ever promised from it. Without it, it may be a new one.
    Intact,
    /// What the replica of a partition promised to whoever takes over.
    Takeover(PartitionId, takeover::Record),
    /// What a voter of the directory remembers.
    Directory(directory::Record),
}

/// About how many bytes a name takes, and what it stands for.
pub(super) const NAME: usize = 30;

/// About how many bytes it takes to say below which counter a client's names are forgotten.
pub(super) const FLOOR: usize = 14;

impl Message for Msg {
    fn kind(&self) -> &'static str {
        match self {
            Self::Submit { .. } => "Submit",
            Self::Answer { .. } => "Answer",
            Self::Look { .. } => "Look",
            Self::Found { .. } => "Found",
            Self::Declined { .. } => "Declined",
            Self::Inquire { .. } => "Inquire",
            Self::Write { .. } => "Write",
            Self::Written { .. } => "Written",
            Self::Refused { .. } => "Refused",
            Self::Finalize { .. } => "Finalize",
            Self::Confirm { .. } => "Confirm",
            Self::Abort { .. } => "Abort",
            Self::Aborted { .. } => "Aborted",
            Self::Get { .. } => "Get",
            Self::Got { .. } => "Got",
            Self::NotReady { .. } => "NotReady",
            Self::Put { .. } => "Put",
            Self::Executed { .. } => "Executed",
            Self::Query { .. } => "Query",
            Self::Known { .. } => "Known",
            Self::Missing { .. } => "Missing",
            Self::Have { .. } => "Have",
            Self::Pull { .. } => "Pull",
            Self::Pulled { .. } => "Pulled",
            Self::Scan { .. } => "Scan",
            Self::Scanned { .. } => "Scanned",
            Self::Intent { .. } => "Intent",
            Self::Directory(msg) => msg.kind(),
            Self::Takeover(msg) => msg.kind(),
            Self::Gossip(msg) => msg.kind(),
            Self::Digests { .. } => "Digests",
        }
    }

    fn txn(&self) -> Option<TxnId> {
        match self {
            Self::Submit { functor }
            | Self::Inquire { functor }
            | Self::Write { functor, .. }
            | Self::Abort { functor, .. } => Some(functor.txn),
            Self::Answer { txn, .. }
            | Self::Look { txn, .. }
            | Self::Found { txn, .. }
            | Self::Declined { txn, .. }
            | Self::Query { txn, .. }
            | Self::Known { txn, .. } => Some(*txn),
            Self::Written { .. }
            | Self::Refused { .. }
            | Self::Finalize { .. }
            | Self::Confirm { .. }
            | Self::Aborted { .. }
            | Self::Get { .. }
            | Self::Got { .. }
            | Self::NotReady { .. }
            | Self::Put { .. }
            | Self::Executed { .. }
            | Self::Missing { .. }
            | Self::Have { .. }
            | Self::Pull { .. }
            | Self::Pulled { .. }
            | Self::Scan { .. }
            | Self::Scanned { .. }
            | Self::Intent { .. }
            | Self::Directory(_)
            | Self::Takeover(_)
            | Self::Gossip(_)
            | Self::Digests { .. } => None,
        }
    }

    fn lane(&self) -> Lane {
        // Without leases and watermarks nothing becomes visible, and nobody is let in.
        match self {
            Self::Directory(_) | Self::Gossip(_) => Lane::Control,
            Self::Submit { .. }
            | Self::Answer { .. }
            | Self::Look { .. }
            | Self::Found { .. }
            | Self::Declined { .. }
            | Self::Inquire { .. }
            | Self::Write { .. }
            | Self::Written { .. }
            | Self::Refused { .. }
            | Self::Finalize { .. }
            | Self::Confirm { .. }
            | Self::Abort { .. }
            | Self::Aborted { .. }
            | Self::Get { .. }
            | Self::Got { .. }
            | Self::NotReady { .. }
            | Self::Put { .. }
            | Self::Executed { .. }
            | Self::Query { .. }
            | Self::Known { .. }
            | Self::Missing { .. }
            | Self::Have { .. }
            | Self::Pull { .. }
            | Self::Pulled { .. }
            | Self::Scan { .. }
            | Self::Scanned { .. }
            | Self::Intent { .. }
            | Self::Takeover(_)
            | Self::Digests { .. } => Lane::Data,
        }
    }

    fn wire_size(&self) -> usize {
        self.size()
    }

    fn keys(&self) -> usize {
        match self {
            Self::Write { functor, .. } | Self::Abort { functor, .. } => functor.writes.len(),
            Self::Get { asks, .. } => asks.len(),
            Self::Put { output, .. } => output.as_ref().as_ref().map_or(0, BTreeMap::len),
            Self::Submit { .. }
            | Self::Answer { .. }
            | Self::Look { .. }
            | Self::Found { .. }
            | Self::Declined { .. }
            | Self::Inquire { .. }
            | Self::Written { .. }
            | Self::Refused { .. }
            | Self::Finalize { .. }
            | Self::Confirm { .. }
            | Self::Aborted { .. }
            | Self::Got { .. }
            | Self::NotReady { .. }
            | Self::Executed { .. }
            | Self::Query { .. }
            | Self::Known { .. }
            | Self::Missing { .. }
            | Self::Have { .. }
            | Self::Pull { .. }
            | Self::Pulled { .. }
            | Self::Scan { .. }
            | Self::Scanned { .. }
            | Self::Intent { .. }
            | Self::Directory(_)
            | Self::Takeover(_)
            | Self::Gossip(_)
            | Self::Digests { .. } => 0,
        }
    }
}

const _: () =
    assert!(size_of::<Msg>() <= 200, "messages are moved through queues; keep them small");
