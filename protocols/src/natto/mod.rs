//! Natto: transactions are ordered by the time at which they should have arrived everywhere. So
//! transactions of high priority wait for few others, and for the same ones at every participant.
//!
//! Linguan Yang, Xinan Yan, Bernard Wong: *Natto: Providing Distributed Transaction Prioritization
//! for High-Contention Workloads*, SIGMOD 2022, <https://doi.org/10.1145/3514221.3526161>. It
//! builds on Carousel's basic protocol ([`crate::carousel`]), including its corrections here.
//!
//! # The idea
//!
//! A transaction is as slow as its farthest participant, so nothing is lost if the nearer ones wait
//! too. The client knows how long messages take, and gives the transaction a *timestamp*: the time
//! at which it should have arrived at the farthest participant. No participant processes it
//! earlier, and each processes transactions in the order of timestamps. So all agree on an order
//! without exchanging messages. A transaction of low priority that finds its keys taken aborts, as
//! in Carousel. A transaction of high priority waits for earlier ones, and because all participants
//! have the same order, there is no cycle of waits.
//!
//! Each further protocol adds something ([`Level`]):
//! - `natto-lecsf`: a participant that learns of a commit passes its values on before its own group
//!   has applied it (*local early committed state forwarding*, §3.4).
//! - `natto-pa`: while transactions wait for their turn, a transaction of low priority is aborted
//!   if one of higher priority behind it would have to wait for it (*priority abort*, §3.3.1),
//!   unless it will have ended by then.
//!
//! In this folder, *client* means the client side of the protocol, which runs at a gateway.
//!
//! # Messages
//! | message | from → to | when | § |
//! |---|---|---|---|
//! | `Probe`, `ProbeReply` | client ↔ servers that lead | all the time | 2.2, 4 |
//! | `ReadAndPrepare` | client → participant leaders | a transaction begins | 3.2 |
//! | `CoordinatorPrepare` | client → coordinator | a transaction begins | – |
//! | `ReadResult` | participant leader → client | its turn has come, and its keys are free | 3.2 |
//! | `Waiting` | participant leader → client | a request is repeated before that | – |
//! | `PrepareResult` | participant leader → coordinator | the vote is replicated | – |
//! | `Heartbeat` | client → coordinator | while the application decides, or the transaction waits | – |
//! | `Commit`, `Abort` | client → coordinator | the application has decided | – |
//! | `Decided` | coordinator → client | the durable facts decide | – |
//! | `Writeback`, `WritebackAck` | coordinator ↔ participant leaders | after the decision | – |
//! | `ReadOnly`, `ReadOnlyResult` | client ↔ participant leaders | a read-only transaction | – |
//! | `QueryPrepare`, `QueryDecision` | coordinator ↔ participant leaders | recovery | – |
//! | `Resolve` | client → coordinator | an application asks for an outcome | – |
//! | `MayForget`, `Forget` | participant leader ↔ coordinator | housekeeping | – |
//! | `NotLeader` | server → sender | another node leads | – |
//! | `Members` | server → sender | the voters differ from the placement | – |
//!
//! Those without a section are Carousel's.
//!
//! # Why it is correct
//! - **Timestamps are advice.** Whether a transaction commits is decided as in Carousel: votes
//!   contain the versions on which they are based, the replicated commit request contains those
//!   that the client read, and the decision is a function of both (R3, R7). A wrong timestamp only
//!   costs time.
//! - **No transaction waits for ever.** A transaction waits only for conflicting ones before it in
//!   the order, which is the same at every participant. If it arrives so late that a conflicting
//!   later one is prepared or waits already, it would have to wait for that one: it is refused
//!   (N1). A lock for which an earlier transaction waits is not free (N2). A transaction that holds
//!   locks is prepared, and waits for nothing.
//! - **The queue is only in the leader's memory** and is lost with it. Clients send their requests
//!   to the next leader, with the same timestamp, so late. It applies the same rule to them,
//!   against the prepared transactions, whose turns are in the log. A refused transaction begins
//!   again as another attempt with a fresh timestamp (N10).
//! - **Clocks cannot be pushed ahead** (R8, N10): a timestamp further ahead than
//!   [`Config::ahead_max`] is refused. Commit timestamps, which determine what snapshots see, are
//!   those of Carousel and do not depend on it.
//! - **Forwarded values are final.** A leader passes a commit's values on only when its coordinator
//!   has announced the commit. It puts the commit into its log before the prepare of any
//!   transaction that reads them (N7). So if that prepare is durable, the commit is too; and if the
//!   leader fails before, neither remains. The vote names the version that was read, so any other
//!   case is detected (R3). Read-only transactions receive only applied values, and wait for
//!   others.
//! - **A priority abort is a refusal** like any other: it is in the log before it is announced
//!   (R2).
//! - **Read-only transactions** are those of two-phase locking here ([`crate::two_phase_locking`]):
//!   the newest values with a promise of how long they are valid, after the transactions have ended
//!   that were prepared when the request arrived.
//!
//! # Deviations
//! - **The gateway is the proxy** that measures delays for its region (§4). It assigns the
//!   timestamps, so the differences must be from its own clock. It probes the *nodes* that lead,
//!   not each partition, because delays and clocks are those of a node. It measures while it has
//!   transactions; before the first measurement it uses the topology.
//! - **Every conflict with a later transaction refuses a late one**, of whatever priority (N1).
//! - **Priorities are numbers**, [`Config::levels`] of them, two by default. The lowest gives way,
//!   all others wait in line.
//! - **Promotion**: an attempt's priority rises by one for each [`Config::promote_after`] attempts
//!   before it; its name contains their number. At most [`Config::promoted_max`] transactions of a
//!   gateway are promoted at once.
//! - **A query for a vote is not answered with a refusal while the transaction waits**: it is
//!   known, and its vote will follow (R1 is about unknown transactions).

mod client;
mod coordinator;
mod leader;
mod message;
mod mutations;
mod participant;
mod queue;
mod state;

use std::time::Duration;

pub use crate::commit::Ended;
pub use crate::hosting::{Chunk, Config as HostingConfig, Note as HostingNote};
pub use client::Client;
pub use leader::Server;
pub use message::{Command, Elsewhere, Log, Msg, Record, Turn, Vote};
pub use mutations::Mutations;
use orthodrome_core::Wire as _;
use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{PartitionId, TxnId};
use orthodrome_core::limits::Limits;
use orthodrome_core::machine::Protocol;
use orthodrome_core::rng::Rng;
pub use state::{Coordinated, Prepared, Request, State, decide, is_refuted};

use crate::registry::{Guarantee, Registered, Row, protocol_items};
use crate::{commit, hosting, replication};

/// The parts of the paper in a protocol: each level includes the earlier ones (§5.1).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Level {
    /// Order by timestamps (§3.2).
    Timestamps,
    /// A commit's values are passed on before it is applied: local early committed state forwarding
    /// (§3.4).
    LocalForwarding,
    /// Transactions of low priority leave the queue if they block one of higher priority (§3.3.1).
    PriorityAbort,
    /// Transactions of high priority are prepared on the condition that blocking ones of low
    /// priority do not commit, where that is likely (§3.3.2).
    ConditionalPrepare,
    /// The coordinator of the transaction that a reader waits for answers the reader: remote early
    /// committed state forwarding (§3.4).
    RemoteForwarding,
}

/// Natto, in one of five protocols, each of which includes the earlier ones: [`Config::level`]
/// decides.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Natto;

/// Order by timestamps.
pub const TS: &str = "natto-ts";

/// Adds local early committed state forwarding.
pub const LECSF: &str = "natto-lecsf";

/// Adds priority abort.
pub const PA: &str = "natto-pa";

/// Adds conditional prepare.
pub const CP: &str = "natto-cp";

/// Adds remote early committed state forwarding.
pub const RECSF: &str = "natto-recsf";

/// Settings of Natto.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// The level.
    pub level: Level,
    /// The replicated logs, checkpoints and snapshots.
    pub hosting: hosting::Config,
    /// The number of priorities.
    pub levels: u8,
    /// A transaction's priority rises by one after this many aborted attempts.
    pub promote_after: u32,
    /// The most transactions of a gateway that are promoted at once. Each waits in line with those
    /// of high priority. On keys with more requests than the keys can serve, nearly every
    /// transaction is tried often, and all of them would be promoted.
    pub promoted_max: usize,
    /// How far ahead of its clock, plus the largest difference between clocks, a leader accepts a
    /// transaction's timestamp (R8, N10).
    pub ahead_max: Duration,
    /// A participant assumes that another has aborted a transaction in favour of one of higher
    /// priority, if that one arrived there at most this long after the first one's turn (§3.3.2). A
    /// larger value makes more guesses, and more wrong ones.
    pub guess_slack: Duration,
    /// The interval at which a client probes leaders (§4).
    pub probe_interval: Duration,
    /// How long measurements count (§5.1).
    pub probe_window: Duration,
    /// How long an estimate is used before it is computed again (§5.1).
    pub probe_refresh: Duration,
    /// A client stops probing when it has begun no transaction for this long.
    pub probe_idle: Duration,
    /// Time-outs of gateways, coordinators and participants.
    pub timeouts: commit::Timeouts,
    /// Mutations, for tests (ADR 35).
    pub mutations: Mutations,
}

/// Rare events.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Note {
    /// A replica answered with older versions than the client knew (R11), and its answer was
    /// ignored.
    BehindClient,
    /// A transaction arrived after its timestamp had passed.
    Late,
    /// A late transaction was refused because a later one was there first (N1).
    Overtaken,
    /// A timestamp was too far ahead (N10).
    FarAhead,
    /// A transaction had to wait for a lock.
    LockWait,
    /// A transaction read a value that was committed and not applied (§3.4).
    Forwarded,
    /// A transaction of low priority left the queue because of one of higher priority behind it
    /// (§3.3.1).
    PriorityAbort,
    /// A transaction of low priority stayed, because it will have ended in time.
    Spared,
    /// A transaction was prepared on a condition (§3.3.2).
    Conditional,
    /// The participant that prepared it learned that the condition is true.
    ConditionHeld,
    /// It learned that the condition is false.
    ConditionFailed,
    /// The coordinator decided before that, by the evidence of another participant (N3).
    ConditionProved,
    /// A transaction's reads were sent to the coordinator of the transaction for which it waits
    /// (§3.4).
    ReadForwarded,
    /// A client used a provisional answer.
    Provisional,
    /// The answer was wrong.
    ReadsChanged,
    /// A transaction received a higher priority than its client requested, because it had aborted
    /// often.
    Promoted,
    /// A timestamp was computed from the topology, because there was no measurement.
    Unmeasured,
    /// A prepare arrived after the transaction had ended here.
    LatePrepare,
    /// A prepare arrived twice.
    RepeatedPrepare,
    /// A later attempt ended an earlier one.
    AttemptSuperseded,
    /// An abort of a transaction that was not prepared left a tombstone.
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
    /// A read-only transaction waited for a prepared writer.
    ReadWait,
    /// The versions that a client read differ from those that were prepared.
    StaleVersions,
    /// A request was sent again.
    Resent,
    /// A rare event of hosting.
    Hosting(hosting::Note),
}

/// Names of timers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Timer {
    /// A timer of a partition's replicated log.
    Replication(PartitionId, replication::Timer),
    /// The turn of the first transaction in a partition's queue comes.
    Turn(PartitionId),
    /// A leader looks for overdue work.
    Sweep(PartitionId),
    /// A commit's timestamp passes.
    CommitWait(PartitionId),
    /// A client sends a transaction's unanswered requests again.
    Resend(TxnId),
    /// A client sends heartbeats.
    Heartbeat,
    /// A client probes leaders.
    Probe,
}

commit::core_events!();

impl Registered for Natto {
    const REPRESENTATIVES: &'static [&'static str] = &[RECSF];
    /// Golden traces catch the other mutations.
    const CAUGHT_WITHIN: &'static [(&'static str, &'static str, u64)] =
        &[(TS, "N1", 50), (TS, "N2", 50), (CP, "N3", 300)];
    const ROWS: &'static [Row] = &[
        row(TS, "Natto (SIGMOD 2022) §2.2, §3.1, §3.2"),
        row(LECSF, "Natto (SIGMOD 2022) §3.2, §3.4: local early committed state forwarding"),
        row(PA, "Natto (SIGMOD 2022) §3.2, §3.3.1, §3.4 (local)"),
        row(CP, "Natto (SIGMOD 2022) §3.2, §3.3, §3.4 (local)"),
        row(RECSF, "Natto (SIGMOD 2022) §3"),
    ];
}

const fn row(name: &'static str, paper: &'static str) -> Row {
    Row {
        name,
        paper,
        guarantee: Guarantee::StrictSerializable,
        conditions: "serializable always; strictly so while clocks keep their stated error bound",
        model: "interactive with fixed sets (2FI), procedures, read-only",
        round_trips: "at most 2; read-only 1",
    }
}

impl Protocol for Natto {
    const NAMES: &'static [&'static str] = &[TS, LECSF, PA, CP, RECSF];
    const QUEUES: bool = true;
    const SCANS: bool = true;
    const RANKS: bool = true;
    const MEMBERS: bool = true;

    protocol_items!();

    fn name(config: &Config) -> &'static str {
        match config.level {
            Level::Timestamps => TS,
            Level::LocalForwarding => LECSF,
            Level::PriorityAbort => PA,
            Level::ConditionalPrepare => CP,
            Level::RemoteForwarding => RECSF,
        }
    }

    fn configure(cluster: &Cluster, name: &str) -> Config {
        let round_trip = cluster.topology.rtt_assumed();
        Config {
            level: match name {
                LECSF => Level::LocalForwarding,
                PA => Level::PriorityAbort,
                CP => Level::ConditionalPrepare,
                RECSF => Level::RemoteForwarding,
                _ => Level::Timestamps,
            },
            hosting: hosting::Config::for_round_trip(round_trip),
            levels: 2,
            promote_after: 64,
            promoted_max: 1,
            ahead_max: round_trip * 2 + Duration::from_millis(500),
            guess_slack: Duration::ZERO,
            probe_interval: Duration::from_millis(10),
            probe_window: Duration::from_secs(1),
            probe_refresh: Duration::from_millis(100),
            probe_idle: Duration::from_secs(5),
            timeouts: commit::Timeouts::for_round_trip(round_trip),
            mutations: Mutations::default(),
        }
    }

    fn vary(config: &mut Config, rng: &mut Rng) {
        config.timeouts.vary(rng);
        // From the frequency in the paper to very few.
        config.probe_interval = hosting::vary(config.probe_interval, 100, 12_000, rng);
        config.ahead_max = hosting::vary(config.ahead_max, 40, 150, rng);
        // Guesses may be arbitrarily wrong.
        config.guess_slack = Duration::from_millis(rng.below(200));
        config.promote_after = u32::try_from(rng.range(1, 6)).unwrap_or(1);
        config.levels = u8::try_from(rng.range(1, 3)).unwrap_or(2);
        config.promoted_max = 1 + usize::try_from(rng.below(8)).unwrap_or(0);
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
