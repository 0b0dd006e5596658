//! TAPIR: transactions that are consistent over replication that is not.
//!
//! Irene Zhang, Naveen Kr. Sharma, Adriana Szekeres, Arvind Krishnamurthy, Dan R. K. Ports:
//! *Building Consistent Transactions with Inconsistent Replication*, SOSP 2015,
//! <https://doi.org/10.1145/2815400.2815404>; extended in TOCS 35(4), 2018. Section numbers are
//! those of the SOSP paper. Built from what the papers describe; no code of theirs was used
//! (`protocol-pitfalls` T2).
//!
//! # The idea
//! Two-phase commit over replicated participants agrees twice on an order: within each group, and
//! between transactions. The second is enough. Replicas of a partition therefore need not agree on
//! an order, only on *results* ([`crate::ir`]): each validates a transaction optimistically at a
//! timestamp that the client proposes, and if enough of them say `PrepareOk`, any two transactions
//! that conflict were seen by one replica that would have refused one of them. The client reads
//! from the nearest replica, proposes to all replicas of all participants at once, and knows the
//! outcome one wide-area round trip later if they agree (fast path); if they do not, it settles the
//! result in one more (slow path), which begins as soon as the fast path has failed. Commits and
//! aborts are executed by replicas in any order: versions are ordered by timestamp.
//!
//! # Messages
//! | message | from → to | when | § |
//! |---|---|---|---|
//! | `Read`, `ReadResult` | client ↔ nearest replica | a transaction begins | 5.2 |
//! | `ProposeConsensus` | client → all replicas of all participants | its caller decided | 3.1, 5.2 |
//! | `ReplyConsensus` | replica → client | its vote is durable | 3.1, 5.2 |
//! | `FinalizeConsensus`, `Confirm` | coordinator ↔ all replicas of a participant | slow path; recovery | 3.1 |
//! | `ProposeInconsistent`, `ReplyInconsistent` | coordinator ↔ all replicas | it is decided | 3.1, 5.2 |
//! | `FinalizeInconsistent` | coordinator → all replicas | all have executed it, and the caller knows | 3.1 |
//! | `CoordinatorChange`, `CoordinatorChangeReply` | whoever takes over ↔ all replicas | the client is gone | 5.2.3 |
//! | `ReadOnly`, `ReadOnlyResult` | client ↔ all replicas | a read-only transaction | – |
//! | `DoViewChange`, `StartView` | replica ↔ the view's leader | a replica comes back; recovery | 3.2.2 |
//! | `Gossip` | replica → its peers | now and then | – |
//! | `FetchState`, `StateChunk` | replica without data ↔ the view's leader | it has to copy | – |
//! | `NotNormal` | replica → whoever asked | it cannot answer now | 3.2 |
//!
//! # Deviations
//! - **Commit-wait** (T1): a commit is told once its timestamp has passed on every clock, so that
//!   timestamp order agrees with real time and the guarantee is *strict* serializability; see
//!   ADR 7. Preparing takes a wide-area round trip anyway, which is longer than the wait.
//! - **f + 1 `PrepareOk` are a commit, whatever the others say.** The paper's decide function lets
//!   one `Abort` win; but whoever takes over may see the others only, and must come to the same
//!   result (R2). For the same reason an abort is told only when no f + 1 replicas can still make
//!   a commit of it: enough refused, or f + 1 accepted the refusal.
//! - **A merge refuses what too few replicas had prepared**, where the paper validates it afresh.
//! - **The check knows reads that are over**, not only those that are prepared: a write must come
//!   after them. After a restart a ceiling stands for them (R8).
//! - **Commit and Abort are executed when they are proposed**: they follow from durable facts. What
//!   IR calls finalizing an inconsistent operation is what lets it leave the record (R6).
//! - **Taking over** is one instance of Paxos per participant, with ballots; the client has the
//!   lowest, and the later timestamps that it tries are rounds of it. It never prepares afresh
//!   (R1). Any replica of a participant can take over, the first participant's first.
//! - **A later attempt ends an earlier one**: it shows that the client knows the earlier to have
//!   aborted.
//! - **Read-only transactions** read at the client's time from so many replicas that whatever could
//!   commit by then is seen ([`crate::ir::Quorums::settled`]), and the replicas let nobody write
//!   below that time. Where too many replicas are gone for that (f ≥ 2), the reads are validated by
//!   a `Prepare`, like any other transaction's.
//! - **A failed guard of a procedure is checked against a snapshot**: the nearest replica may be
//!   behind.
//!
//! # Not implemented
//! - Changes of a group's members, and transfers of leadership: the paper has none, and no replica
//!   leads beyond a view change. An operator's order is refused. A replica that lost its disk, or
//!   was away for too long, copies the state and takes part again.
//! - Read-only transactions at one replica that knows its version to be current (TOCS): they take
//!   a round trip to a quorum here.

mod client;
mod coordinator;
mod decide;
mod message;
mod mutations;
mod occ;
mod replica;
mod server;
mod state;

pub use client::Client;
pub use decide::{Tally, decide, merge, recover, settle};
pub use message::{Answer, Ballot, Cast, Change, Image, Msg, Part, Record, Vote};
pub use mutations::Mutations;
pub use occ::Validator;
pub use server::Server;
pub use state::{Entry, State};

use std::time::Duration;

use orthodrome_core::Wire as _;
use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{PartitionId, TxnId};
use orthodrome_core::limits::Limits;
use orthodrome_core::machine::Protocol;

use crate::registry::{Guarantee, Registered, Row};

/// TAPIR.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tapir;

/// Settings of TAPIR.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// A client gives up on the fast path when the furthest replica is late by this much and a
    /// quarter of its round trip.
    pub slack: Duration,
    /// Whoever asked asks again after this time without an answer, then after twice, …
    pub resend_after: Duration,
    /// A replica takes a transaction over that has not ended this long after it was prepared.
    pub takeover_after: Duration,
    /// Replicas take turns at it, this far apart.
    pub takeover_step: Duration,
    /// How often a replica looks for work that is overdue.
    pub sweep_interval: Duration,
    /// How often replicas tell each other that they are there.
    pub gossip_interval: Duration,
    /// A view that has not begun after this time is given up for the next.
    pub view_timeout: Duration,
    /// A replica that was silent for so long is not waited for any more.
    pub absence_after: Duration,
    /// Gateways collect for so long what may leave the records.
    pub flush_interval: Duration,
    /// Timestamps further ahead of a replica's clock are refused (R8).
    pub clock_ahead_max: Duration,
    /// How far ahead of a read's timestamp a replica reserves (R8).
    pub ceiling_ahead: Duration,
    /// Outcomes are kept this long for a client that acknowledges nothing any more.
    pub retention: Duration,
    /// Bytes of a partition's record, with all that its transactions write, over which outcomes are not kept for
    /// clients that may ask.
    pub kept_bytes: usize,
    /// A node makes a checkpoint after this many bytes of records, or after as many as its last
    /// checkpoint took if those are more.
    pub checkpoint_bytes: usize,
    /// Versions that are not the newest of their key are kept for this long.
    pub version_retention: Duration,
    /// Keys per piece of a copy.
    pub chunk_keys: usize,
    /// Bytes per piece of a copy, and per part of a record: in a view change, and at a checkpoint.
    pub piece_bytes: usize,
    /// Deliberate mistakes, for tests (ADR 35).
    pub mutations: Mutations,
}

/// Rare events.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Note {
    /// A replica answered with less than the client knew (R11), and was not listened to.
    BehindClient,
    /// A replica voted `Abort`.
    VoteAbort,
    /// A replica voted `Abstain`.
    VoteAbstain,
    /// A replica voted `Retry`.
    VoteRetry,
    /// A timestamp too far ahead was refused.
    FarFuture,
    /// A client tried a later timestamp.
    LaterRound,
    /// A prepare came twice.
    RepeatedPrepare,
    /// A prepare came after its client knew the outcome.
    LatePrepare,
    /// A later attempt ended an earlier one.
    AttemptSuperseded,
    /// A result came from another view.
    FinalizeOfOtherView,
    /// A decision came before the prepare.
    EndBeforePrepare,
    /// A replica promised to listen to whoever took over.
    Promised,
    /// A replica was asked about a transaction that it had never heard of.
    Tombstone,
    /// A replica took a transaction over.
    Takeover,
    /// Somebody else took over from a client that was alive.
    Preempted,
    /// A client asked again for an outcome.
    Resolved,
    /// What became of a transaction was forgotten.
    Forgotten,
    /// What a read-only transaction read was not what was validated in its name.
    OtherReads,
    /// Only a view change could tell what was agreed.
    Uncertain,
    /// A commit waited for its timestamp to pass.
    CommitWait,
    /// A request was sent again.
    Resent,
    /// A replica left its view.
    ViewChange,
    /// A view does not count on a replica that was silent.
    LeftBehind,
    /// A replica copied the state.
    Copy,
    /// An operator's order was refused.
    OrderRefused,
    /// A node made a checkpoint.
    Checkpoint,
}

/// Names of timers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Timer {
    /// A replica looks for overdue work.
    Sweep(PartitionId),
    /// A view has not begun.
    View(PartitionId),
    /// A client waits for reads, or for a timestamp to pass.
    Open(TxnId),
    /// A client waits for votes and acknowledgements.
    Drive(TxnId),
    /// A client says what may leave the records.
    Flush,
}

/// Its name.
pub const NAME: &str = "tapir";

impl Registered for Tapir {
    const CAUGHT_WITHIN: &'static [(&'static str, &'static str, u64)] =
        &[(NAME, "T1", 100), (NAME, "T2", 40), (NAME, "T3", 20)];
    const ROWS: &'static [Row] = &[Row {
        name: NAME,
        paper: "TAPIR (SOSP 2015; TOCS 2018) §3, §5",
        guarantee: Guarantee::StrictSerializable,
        conditions: "serializable always; strictly so while clocks keep their stated error bound",
        model: "interactive with fixed sets (2FI), procedures, read-only",
        round_trips: "1 (fast path) or 2, and 1 more to read where no replica is near; read-only 1",
    }];
}

impl Protocol for Tapir {
    const NAMES: &'static [&'static str] = &[NAME];

    type Config = Config;
    type Msg = Msg;
    type Timer = Timer;
    type Record = Record;
    type Note = Note;
    type Client = Client;
    type Server = Server;

    fn name(_: &Config) -> &'static str {
        NAME
    }

    fn mutations(name: &str) -> &'static [&'static str] {
        mutations::names(name)
    }

    fn configure(cluster: &Cluster, _: &str) -> Config {
        let round_trip = cluster.topology.rtt_max().max(Duration::from_millis(20));
        Config {
            slack: Duration::from_millis(30),
            resend_after: round_trip * 3 + Duration::from_millis(200),
            takeover_after: round_trip * 6 + Duration::from_millis(1_000),
            takeover_step: round_trip * 2 + Duration::from_millis(200),
            sweep_interval: Duration::from_millis(200),
            gossip_interval: Duration::from_secs(1),
            view_timeout: round_trip * 4 + Duration::from_millis(200),
            absence_after: Duration::from_secs(60),
            flush_interval: Duration::from_millis(200),
            clock_ahead_max: Duration::from_secs(3),
            ceiling_ahead: Duration::from_secs(1),
            retention: Duration::from_secs(600),
            kept_bytes: Limits::SERVER.record_bytes,
            checkpoint_bytes: 16 << 20,
            version_retention: Duration::from_secs(10),
            chunk_keys: 1_000,
            piece_bytes: Limits::SERVER.piece_bytes(),
            mutations: Mutations::default(),
        }
    }

    fn enable_mutation(config: &mut Config, mutation: &str) {
        mutations::enable(config, mutation);
    }

    fn record_size(record: &Record) -> usize {
        record.size()
    }

    fn limit(config: &mut Config, limits: Limits) -> bool {
        config.piece_bytes = limits.piece_bytes();
        true
    }
}
