//! Carousel: transactions in at most two wide-area round trips, or in one, because reads, two-phase
//! commit and replication overlap.
//!
//! Xinan Yan, Linguan Yang, Hongbo Zhang, Xiayue Charles Lin, Bernard Wong, Kenneth Salem, Tim
//! Brecht: *Carousel: Low-Latency Transaction Processing for Globally-Distributed Data*, SIGMOD
//! 2018, <https://doi.org/10.1145/3183713.3196912>.
//!
//! # The idea
//!
//! A transaction declares the keys that it reads and writes (2FI, §3.2). So the request that reads
//! a key can also prepare the transaction. The participant leader checks for conflicts, answers
//! with the value at once, and replicates its prepare while the client computes. When the client
//! asks to commit, its coordinator, a group led in the client's own region, replicates the writes;
//! meanwhile the participants' votes arrive. Once the writes are replicated and all votes have
//! arrived, the outcome is a function of durable facts, and the client receives it before anything
//! else is written. One round trip reads and prepares, one replicates. The client does not wait for
//! anything later.
//!
//! *Carousel Fast* (§4.2, §4.4.1) asks every replica of a participant to prepare independently, in
//! addition to the slow path through its leader. If a supermajority that includes the leader votes
//! the same, that is the partition's vote, one round trip after the start. Carousel Fast also reads
//! from the closest replica; the versions show whether that replica was up to date. Otherwise it is
//! the same protocol and the same code: [`Config::is_fast`] is the difference.
//!
//! In this folder, *client* means the client side of the protocol, which runs at a gateway.
//!
//! # Messages
//! | message | from → to | when | § |
//! |---|---|---|---|
//! | `ReadAndPrepare` | client → participant leaders | a transaction begins | 4.1.1, 4.1.4 |
//! | `CoordinatorPrepare` | client → coordinator | a transaction begins | 4.1.4 |
//! | `ReadResult` | participant leader → client | at once | 4.1.1 |
//! | `PrepareResult` | participant leader → coordinator | the vote is replicated | 4.1.4 |
//! | `Heartbeat` | client → coordinator | while the application decides | 4.3.1 |
//! | `Commit`, `Abort` | client → coordinator | the application has decided | 4.1.2 |
//! | `Decided` | coordinator → client | the durable facts decide | 4.1.2 |
//! | `Writeback`, `WritebackAck` | coordinator ↔ participant leaders | after the decision | 4.1.3 |
//! | `ReadOnly`, `ReadOnlyResult` | client ↔ participant leaders | a read-only transaction | 4.4.2 |
//! | `QueryPrepare`, `QueryDecision` | coordinator ↔ participant leaders | recovery | 4.3.3 |
//! | `Resolve` | client → coordinator | an application asks for an outcome | – |
//! | `MayForget`, `Forget` | participant leader ↔ coordinator | housekeeping | – |
//! | `NotLeader` | server → sender | another node leads | – |
//! | `Members` | server → sender | the voters differ from the placement | – |
//! | *Carousel Fast:* `FastPrepare` | client → all replicas of participants | instead of `ReadAndPrepare` | 4.2 |
//! | `FollowerReadResult` | closest replica → client | at once | 4.4.1 |
//! | `FastPrepareResult` | replica → coordinator | its vote is on its disk | 4.2 |
//! | `FastDecided` | coordinator → client | as `Decided`, and all votes were fast | 4.2 |
//! | `CollectPending`, `PendingList` | new leader ↔ voters | after an election | 4.3.3 |
//! | `QueryPending` | follower → leader | its list has an entry for long | – |
//!
//! # The fast path
//!
//! *Votes.* A replica that prepares a transaction writes it to its *pending-transaction list*
//! (term, versions, keys, timestamp). It votes when the entry is on its disk (R4), unless its term
//! has changed meanwhile (R5). Entries of a list never conflict. An entry leaves the list when the
//! log settles the transaction: every later leader knows what the log says. The leader votes only
//! for transactions that it has also put into its log, and names the voters with which its vote
//! counts.
//!
//! *Decision.* [`agreed`]: the partition has voted if [`supermajority`] of the voters that the
//! leader names, the leader among them, have cast the same vote (versions and timestamp) in the
//! same term. Such a vote is as good as one that is replicated, and [`decide`] accepts either. A
//! supermajority's *refusal* is in no list. It lets the coordinator abort through its own group's
//! log, if no commit request is there yet (C2, R2). A refusal by the leader alone has no effect
//! before it is chosen (C3).
//!
//! *Timestamps.* A node that takes over must find the commit timestamp that was announced, so all
//! replicas must propose the same one: the client's. It lies so far ahead that it reaches every
//! leader before it has passed. That costs nothing, because the votes need as long again to come
//! back. The leader checks it.
//!
//! *Recovery* (§4.3.3) has five steps. (1) A new leader asks the voters of its group for the frozen
//! part of their lists; only voters that have reached its term answer. (2) Meanwhile its first
//! entry is chosen, and with it everything in the log. (3) Of L ≥ f + 1 lists, [`threshold`] of L
//! must contain the same entry. (4) The transaction must not have ended (C8), must not conflict
//! with what the log has prepared, and must be based on the latest versions there. Its timestamp
//! must be above every commit and ceiling there. This last rule is new. Without it, a transaction
//! that the old leader never saw could commit below a read that the old leader has answered. The
//! rule excludes no transaction for which the leader voted: it voted only above everything that it
//! had put into its log, and a log with any later entry of that leader also has the prepare. (5)
//! The remaining transactions are put into the log before anything else; the others are refused.
//! When all that is chosen, the leader serves the waiting requests.
//!
//! *Two further rules.* A leader that has put an abort into the log may give its keys to the next
//! transaction at once, but votes for that one only on the slow path until the abort is chosen. And
//! the fast path works only in a settled membership: members change only after recovery, behind
//! every prepare that had votes.
//!
//! # Deviations
//! - **Recovery never prepares** (`protocol-pitfalls` C1, R1). The paper's new coordinator
//!   "reacquires" votes. Here it asks for them, and a participant without a record first refuses
//!   for ever.
//! - **Votes and the replicated commit request contain the versions on which they are based** (R3,
//!   C4). The coordinator compares them.
//! - **An abort that only the coordinator or the client wants is replicated before it is
//!   announced** (R2). An abort that follows from a replicated refusal is announced at once: it is
//!   a function of durable facts.
//! - **Tombstones** (C9, R6): an abort of an unknown transaction is remembered.
//! - **The coordinator's group is a function of the transaction** (its keys and home region), and
//!   does not depend on the current leaders. So every node that resolves a transaction asks the
//!   same group.
//! - **Read-only transactions read the latest values with an interval of validity**, instead of a
//!   timestamp chosen by the client. Each leader returns its latest committed values and promises
//!   that they are valid up to some timestamp. If one timestamp lies in every interval, the values
//!   are the snapshot; otherwise the leaders whose promises fall short are asked once more. This
//!   needs no clock to be correct, and is never stale (C11–C13).
//! - **Commit-wait** (C13): a commit is acknowledged once its timestamp has passed on every clock.
//!   So the order of timestamps agrees with real time, and the guarantee is *strict*
//!   serializability. The prepare phase takes a wide-area round trip in any case, so the wait is
//!   zero unless clocks are worse than that. If a clock breaks its bound, serializability remains.
//! - **Lists are collected after the election** (C7). In the paper they are part of votes for a
//!   leader, but pre-votes and leadership transfers would not contain them.
//! - **A client proposes the timestamp** on the fast path (see above); in the paper each replica
//!   chooses one.
//! - **Ceilings do not run ahead** in Carousel Fast: a leader raises its own as time passes, and
//!   promises no more than that to read-only transactions. So a second round is more frequent: it
//!   is needed if another part of the snapshot was written within about a sweep and a round trip.
//! - **A follower asks about old entries of its list**; the paper's lists may keep orphans for
//!   ever.
//! - **A later attempt ends an earlier one**: a prepare of attempt n + 1 shows that the client
//!   knows attempt n to have aborted, so its locks are released at once.
//!
//! # Not implemented
//! - Coordinator groups that hold no data (§3.3, last paragraph): a placement, not a protocol, can
//!   provide them.

mod client;
mod coordinator;
mod cpc;
mod fast;
mod leader;
mod message;
mod mutations;
mod participant;
mod state;

pub use crate::commit::{Ended, Verdict};
pub use crate::hosting::{Chunk, Config as HostingConfig, Note as HostingNote};
pub use client::Client;
pub use cpc::{FastVote, Listed, agreed, supermajority, threshold};
pub use leader::Server;
pub use message::{Command, Log, Msg, Record, Vote};
pub use mutations::Mutations;
pub use state::{Coordinated, Prepared, Request, State, decide};

use std::time::Duration;

use orthodrome_core::Wire as _;
use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{PartitionId, TxnId};
use orthodrome_core::limits::Limits;
use orthodrome_core::machine::Protocol;
use orthodrome_core::rng::Rng;

use crate::registry::{Guarantee, Registered, Row, protocol_items};
use crate::{commit, hosting, replication};

/// Carousel: its basic protocol, or the fast one. They differ only where [`Config::is_fast`]
/// decides.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Carousel;

/// Carousel's basic protocol (§4.1).
pub const BASIC: &str = "carousel-basic";

/// The basic protocol with Carousel's Prepare Consensus (§4.2) and reads from the closest replica
/// (§4.4.1).
pub const FAST: &str = "carousel-fast";

/// Settings of Carousel.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// True for Carousel Fast: the fast path in addition to the slow one, and reads from the
    /// closest replica.
    pub is_fast: bool,
    /// The replicated logs, checkpoints and snapshots.
    pub hosting: hosting::Config,
    /// Time-outs of gateways, coordinators and participants. On the fast path `ceiling_ahead` is
    /// zero, because the fast path cannot use timestamps that a leader has reserved.
    pub timeouts: commit::Timeouts,
    /// How far ahead of its clock a leader accepts a client's timestamp (R8).
    pub ahead_max: Duration,
    /// Mutations, for tests (ADR 35).
    pub mutations: Mutations,
}

/// Rare events.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Note {
    /// A prepare arrived after the transaction had ended here.
    LatePrepare,
    /// A prepare arrived twice.
    RepeatedPrepare,
    /// A later attempt ended an earlier one.
    AttemptSuperseded,
    /// An abort of an unknown transaction left a tombstone.
    Tombstone,
    /// A recovery query found no record, so the participant refused the transaction.
    QueryRefused,
    /// A recovery query found no record of a decision, so the transaction was aborted.
    QueryAborted,
    /// A coordinator aborted a transaction because its client was silent.
    Abandoned,
    /// A new leader took over unfinished transactions as their coordinator.
    CoordinatorTakeover,
    /// A new leader took over prepared transactions as their participant.
    ParticipantTakeover,
    /// A client asked again for an outcome.
    Resolved,
    /// A node asked about a transaction whose outcome was forgotten.
    Forgotten,
    /// A commit waited for its timestamp to pass.
    CommitWait,
    /// A read-only transaction needed a second round.
    SecondRound,
    /// A read-only transaction waited for a leadership check.
    ReadIndex,
    /// The versions that a client read differ from those that were prepared.
    StaleVersions,
    /// A replica answered with older versions than the client knew (R11), and its answer was
    /// ignored.
    BehindClient,
    /// A prepare waited for a commit that its client knew (R11).
    WaitedForKnown,
    /// A request was sent again.
    Resent,
    /// The fast path gave a partition's vote.
    FastVote,
    /// The fast path gave a refusal.
    FastRefusal,
    /// A new leader took over a transaction from the lists (§4.3.3 step 5).
    FastRecovered,
    /// A new leader refused a transaction in the lists that no supermajority can have prepared.
    FastNotRecovered,
    /// A new leader refused a transaction that enough lists had, because its leader cannot have
    /// prepared it (§4.3.3 step 4).
    FastExcluded,
    /// A follower had a transaction that its leader did not know.
    Orphan,
    /// A rare event of hosting.
    Hosting(hosting::Note),
}

/// Names of timers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Timer {
    /// A timer of a partition's replicated log.
    Replication(PartitionId, replication::Timer),
    /// A leader looks for overdue work.
    Sweep(PartitionId),
    /// A commit's timestamp passes.
    CommitWait(PartitionId),
    /// A client sends a transaction's unanswered requests again.
    Resend(TxnId),
    /// A client sends heartbeats.
    Heartbeat,
}

commit::core_events!();

impl Registered for Carousel {
    const ROWS: &'static [Row] = &[
        Row {
            name: BASIC,
            paper: "Carousel (SIGMOD 2018) §4.1, §4.3, §4.4.2",
            guarantee: Guarantee::StrictSerializable,
            conditions: "serializable always; strictly so while clocks keep their stated error bound",
            model: "interactive with fixed sets (2FI), procedures, read-only",
            round_trips: "at most 2; read-only 1",
        },
        Row {
            name: FAST,
            paper: "Carousel (SIGMOD 2018) §4.1–§4.4",
            guarantee: Guarantee::StrictSerializable,
            conditions: "serializable always; strictly so while clocks keep their stated error bound",
            model: "interactive with fixed sets (2FI), procedures, read-only",
            round_trips: "1 if every partition has a replica nearby; at most 2; read-only 1",
        },
    ];
}

impl Protocol for Carousel {
    const NAMES: &'static [&'static str] = &[BASIC, FAST];
    const MEMBERS: bool = true;
    const SCANS: bool = true;

    protocol_items!();

    fn name(config: &Config) -> &'static str {
        if config.is_fast { FAST } else { BASIC }
    }

    fn promises_alone(name: &str) -> bool {
        name == FAST
    }

    fn configure(cluster: &Cluster, name: &str) -> Config {
        let is_fast = name == FAST;
        let round_trip = cluster.topology.rtt_assumed();
        let mut timeouts = commit::Timeouts::for_round_trip(round_trip);
        if is_fast {
            timeouts.ceiling_ahead = Duration::ZERO;
        }
        Config {
            is_fast,
            hosting: hosting::Config::for_round_trip(round_trip),
            timeouts,
            ahead_max: round_trip * 2 + Duration::from_millis(500),
            mutations: Mutations::default(),
        }
    }

    fn vary(config: &mut Config, rng: &mut Rng) {
        config.timeouts.vary(rng);
        config.hosting.vary(rng);
    }

    fn record_size(record: &Record) -> usize {
        record.size()
    }

    fn limit(config: &mut Config, limits: Limits) -> bool {
        config.hosting.limit(limits);
        true
    }
}
