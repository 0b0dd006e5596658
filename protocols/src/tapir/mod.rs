//! TAPIR: consistent transactions over inconsistent replication.
//!
//! Irene Zhang, Naveen Kr. Sharma, Adriana Szekeres, Arvind Krishnamurthy, Dan R. K. Ports:
//! *Building Consistent Transactions with Inconsistent Replication*, SOSP 2015,
//! <https://doi.org/10.1145/2815400.2815404>; extended in TOCS 35(4), 2018. Section numbers are
//! those of the SOSP paper. Built from the papers' descriptions; no code of the authors was used
//! (`protocol-pitfalls` T2).
//!
//! # The idea
//!
//! Two-phase commit over replicated participants agrees on an order twice: within each group, and
//! between transactions. The second agreement suffices. So the replicas of a partition need not
//! agree on an order, but only on *results* ([`crate::ir`]). Each replica validates a transaction
//! optimistically, at a timestamp that the gateway proposes. If enough replicas vote `PrepareOk`,
//! then of any two conflicting transactions at least one replica has seen both, and would have
//! refused one of them.
//!
//! The gateway reads from the nearest replica, and proposes to all replicas of all participants at
//! once. If they agree, it knows the outcome one wide-area round trip later (fast path). Otherwise
//! it settles the result in one more round trip (slow path), which begins as soon as the fast path
//! has failed. Replicas execute commits and aborts in any order, because versions are ordered by
//! timestamp.
//!
//! In this folder, *client* means the client side of the protocol, which runs at a gateway.
//!
//! # Messages
//! | message | from → to | when | § |
//! |---|---|---|---|
//! | `Read`, `ReadResult` | client ↔ nearest replica | a transaction begins | 5.2 |
//! | `ProposeConsensus` | client → all replicas of all participants | the transaction is decided | 3.1, 5.2 |
//! | `ReplyConsensus` | replica → client | its vote is durable | 3.1, 5.2 |
//! | `FinalizeConsensus`, `Confirm` | coordinator ↔ all replicas of a participant | slow path; recovery | 3.1 |
//! | `ProposeInconsistent`, `ReplyInconsistent` | coordinator ↔ all replicas | the outcome is decided | 3.1, 5.2 |
//! | `FinalizeInconsistent` | coordinator → all replicas | all have executed it, and the application knows | 3.1 |
//! | `CoordinatorChange`, `CoordinatorChangeReply` | node that takes over ↔ all replicas | the client is gone | 5.2.3 |
//! | `ReadOnly`, `ReadOnlyResult` | client ↔ all replicas | a read-only transaction | – |
//! | `DoViewChange`, `StartView` | replica ↔ the view's leader | a replica comes back; recovery | 3.2.2 |
//! | `Gossip` | replica → its peers | at intervals | – |
//! | `FetchState`, `StateChunk` | replica without data ↔ the view's leader | it copies the state | – |
//! | `NotNormal` | replica → sender | it cannot answer now | 3.2 |
//!
//! # Deviations
//! - **Commit-wait** (T1): a commit is acknowledged once its timestamp has passed on every clock.
//!   So the order of timestamps agrees with real time, and the guarantee is *strict*
//!   serializability; see ADR 7. A prepare takes a wide-area round trip in any case, which is
//!   longer than the wait.
//! - **f + 1 `PrepareOk` are a commit, whatever the other votes are.** The paper's decide function
//!   lets one `Abort` win. But a node that takes over may see only the other votes, and must get
//!   the same result (R2). For the same reason an abort is reported only when no f + 1 replicas can
//!   still make it a commit: enough refused, or f + 1 accepted the refusal.
//! - **A merge refuses what too few replicas had prepared**, where the paper validates it again.
//! - **The check knows reads of transactions that have ended**, not only of prepared ones: a write
//!   must come after them. After a restart a ceiling stands for them (R8).
//! - **Commit and Abort are executed when they are proposed**, because they follow from durable
//!   facts. IR's finalization of an inconsistent operation lets it leave the record (R6).
//! - **A takeover** is one instance of Paxos per participant, with ballots. The client has the
//!   lowest ballot, and the later timestamps that it tries are rounds of it. A takeover never
//!   prepares again (R1). Any replica of a participant can take over; those of the first
//!   participant try first.
//! - **A later attempt ends an earlier one**: it shows that the application knows the earlier one
//!   to have aborted.
//! - **Read-only transactions** read at a timestamp of the client, from so many replicas that every
//!   transaction which could commit by then is seen ([`crate::ir::Quorums::settled`]), and the
//!   replicas accept no write below that timestamp. If too many replicas are gone for that (f ≥ 2),
//!   the reads are validated by a `Prepare`, like those of any other transaction.
//! - **A failed guard of a procedure is checked against a snapshot**, because the nearest replica
//!   may lag behind.
//!
//! # Not implemented
//! - Changes of a group's members, and transfers of leadership: the paper has none, and no replica
//!   leads beyond a view change. An operator's order is refused. A replica that lost its disk, or
//!   was away for too long, copies the state and takes part again.
//! - Read-only transactions at one replica that knows its version to be current (TOCS): here they
//!   take a round trip to a quorum.

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

use crate::registry::{Guarantee, Registered, Row, protocol_items};

/// TAPIR.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tapir;

/// Settings of TAPIR.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// How much later than expected the farthest replica's answer may be before a client gives up
    /// the fast path, in addition to a quarter of its round trip.
    pub slack: Duration,
    /// A request without an answer is sent again after this time, then after twice as long, and so
    /// on.
    pub resend_after: Duration,
    /// A replica takes over a transaction that has not ended this long after it was prepared.
    pub takeover_after: Duration,
    /// The delay between the replicas' turns at a takeover.
    pub takeover_step: Duration,
    /// The interval at which a replica looks for overdue work.
    pub sweep_interval: Duration,
    /// The interval at which replicas tell each other that they are alive.
    pub gossip_interval: Duration,
    /// If a view has not begun after this time, the replicas try the next one.
    pub view_timeout: Duration,
    /// The group does not wait any more for a replica that was silent for this long.
    pub absence_after: Duration,
    /// How long gateways collect transactions that may leave the records.
    pub flush_interval: Duration,
    /// Timestamps further ahead of a replica's clock are refused (R8).
    pub clock_ahead_max: Duration,
    /// How far ahead of a read's timestamp a replica reserves (R8).
    pub ceiling_ahead: Duration,
    /// How long outcomes are kept for a client that has stopped acknowledging them.
    pub retention: Duration,
    /// If a partition's record, with the writes of its transactions, has more bytes than this,
    /// outcomes are not kept for clients that may ask.
    pub kept_bytes: usize,
    /// A node makes a checkpoint after this many bytes of records, or after as many as its last
    /// checkpoint had, if that is more.
    pub checkpoint_bytes: usize,
    /// How long versions are kept that are not the newest of their key.
    pub version_retention: Duration,
    /// The most keys in one piece of a copy.
    pub chunk_keys: usize,
    /// The most bytes in one piece of a copy, and in one part of a record in a view change or at a
    /// checkpoint.
    pub piece_bytes: usize,
    /// Mutations, for tests (ADR 35).
    pub mutations: Mutations,
}

/// Rare events.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Note {
    /// A replica answered with older versions than the client knew (R11), and its answer was
    /// ignored.
    BehindClient,
    /// A replica voted `Abort`.
    VoteAbort,
    /// A replica voted `Abstain`.
    VoteAbstain,
    /// A replica voted `Retry`.
    VoteRetry,
    /// A replica refused a timestamp too far in the future.
    FarFuture,
    /// A client tried a later timestamp.
    LaterRound,
    /// A prepare arrived twice.
    RepeatedPrepare,
    /// A prepare arrived after its client knew the outcome.
    LatePrepare,
    /// A later attempt ended an earlier one.
    AttemptSuperseded,
    /// A result from another view was refused.
    FinalizeOfOtherView,
    /// A decision arrived before the prepare.
    EndBeforePrepare,
    /// A replica promised to follow a node that took over.
    Promised,
    /// A replica was asked about a transaction that it did not know.
    Tombstone,
    /// A replica took over a transaction.
    Takeover,
    /// Another node took over from a client that was alive.
    Preempted,
    /// A client asked again for an outcome.
    Resolved,
    /// The outcome of a transaction was forgotten.
    Forgotten,
    /// A read-only transaction's reads differ from those that were validated in its name.
    OtherReads,
    /// Only a view change could find out what was agreed.
    Uncertain,
    /// A commit waited for its timestamp to pass.
    CommitWait,
    /// A request was sent again.
    Resent,
    /// A replica left its view.
    ViewChange,
    /// A view does not count a replica that was silent.
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
    /// A view has not begun in time.
    View(PartitionId),
    /// A client waits for reads, or for a timestamp to pass.
    Open(TxnId),
    /// A client waits for votes and acknowledgements.
    Drive(TxnId),
    /// A client reports which transactions may leave the records.
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
    const SCANS: bool = true;

    protocol_items!();

    fn name(_: &Config) -> &'static str {
        NAME
    }

    fn configure(cluster: &Cluster, _: &str) -> Config {
        let round_trip = cluster.topology.rtt_assumed();
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

    fn record_size(record: &Record) -> usize {
        record.size()
    }

    fn limit(config: &mut Config, limits: Limits) -> bool {
        config.piece_bytes = limits.piece_bytes();
        true
    }
}
