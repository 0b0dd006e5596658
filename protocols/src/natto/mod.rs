//! Natto: transactions are ordered by when they should have arrived everywhere, so that those that
//! matter wait for few, and for the same ones everywhere.
//!
//! Linguan Yang, Xinan Yan, Bernard Wong: *Natto: Providing Distributed Transaction Prioritization for
//! High-Contention Workloads*, SIGMOD 2022, <https://doi.org/10.1145/3514221.3526161>. It stands on
//! Carousel's basic protocol ([`crate::carousel`]), whose corrections it inherits.
//!
//! # The idea
//! A transaction is as slow as its furthest participant, so nothing is lost if the nearer ones wait too.
//! The client, who knows how long messages take, gives the transaction a *timestamp*: when it should
//! have arrived at the furthest. No participant touches it earlier, and all process theirs in the order
//! of timestamps, so that they agree on an order without a word between them. One of low priority that
//! finds its keys taken aborts, as in Carousel; one of high priority waits for those before it, and since
//! everybody's order is the same, nobody waits in a cycle.
//!
//! Each further protocol adds something ([`Level`]):
//! - `natto-lecsf`: a participant that hears of a commit passes its values on before its own group has
//!   them (*local early committed state forwarding*, §3.4).
//! - `natto-pa`: while transactions wait for their turn, those of low priority that a more important one
//!   behind them would have to wait for are turned away (*priority abort*, §3.3.1), unless they will have
//!   ended by its turn.
//!
//! # Messages
//! | message | from → to | when | § |
//! |---|---|---|---|
//! | `Probe`, `ProbeReply` | client ↔ servers that lead | all the time | 2.2, 4 |
//! | `ReadAndPrepare` | client → participant leaders | a transaction begins | 3.2 |
//! | `CoordinatorPrepare` | client → coordinator | a transaction begins | – |
//! | `ReadResult` | participant leader → client | its turn has come, and its keys are free | 3.2 |
//! | `Waiting` | participant leader → client | asked again before that | – |
//! | `PrepareResult` | participant leader → coordinator | the vote is replicated | – |
//! | `Heartbeat` | client → coordinator | while its caller thinks, or it waits | – |
//! | `Commit`, `Abort` | client → coordinator | its caller decided | – |
//! | `Decided` | coordinator → client | the facts decide | – |
//! | `Writeback`, `WritebackAck` | coordinator ↔ participant leaders | after the decision | – |
//! | `ReadOnly`, `ReadOnlyResult` | client ↔ participant leaders | a read-only transaction | – |
//! | `QueryPrepare`, `QueryDecision` | coordinator ↔ participant leaders | recovery | – |
//! | `Resolve` | client → coordinator | a caller lost track | – |
//! | `MayForget`, `Forget` | participant leader ↔ coordinator | housekeeping | – |
//! | `NotLeader` | server → sender | leadership has moved | – |
//! | `Members` | server → sender | others vote than the placement says | – |
//!
//! Those without a section are Carousel's.
//!
//! # Why it is correct
//! - **Timestamps are advice.** Whether a transaction commits is decided as in Carousel: votes carry
//!   the versions they are based on, the replicated commit request carries those that the client read,
//!   and the decision is a function of both (R3, R7). A wrong timestamp costs time, nothing else.
//! - **Nobody waits for ever.** A transaction waits only for conflicting ones before it in the order,
//!   which is the same at every participant. One that arrives so late that a conflicting later one is
//!   prepared or waits already would have to wait for it: it is refused (N1). A lock for which somebody
//!   earlier waits is not free (N2); whoever holds locks is prepared, and waits for nobody.
//! - **The queue is the leader's alone** and goes with it. Clients ask the next leader again, with the
//!   same timestamp, so late; it judges them by the same rule against what is prepared, whose turns are
//!   in the log. A transaction that is refused begins again as another attempt with a fresh timestamp
//!   (N10).
//! - **Clocks cannot be run ahead** (R8, N10): a timestamp further ahead than [`Config::ahead_max`] is
//!   refused. Commit timestamps, which decide what snapshots see, are Carousel's and do not depend on it.
//! - **What is forwarded is final.** A leader passes a commit's values on only when its coordinator has
//!   told it, and puts the commit into its log before the prepare of whoever read them (N7). So if that
//!   prepare is durable the commit is, and a leader that dies before either leaves neither. The vote names
//!   the version that was read, so whatever else happens shows (R3). Read-only transactions get only what
//!   is applied, and wait for what is not.
//! - **A priority abort is a refusal** like any other, in the log before anybody hears of it (R2).
//! - **Read-only transactions** are those of two-phase locking here ([`crate::two_phase_locking`]): the
//!   newest values with a promise of how long they hold, after those have ended that were prepared when
//!   the request came.
//!
//! # Deviations
//! - **The gateway is the proxy** that measures delays for its region (§4): it gives the timestamps, so
//!   it is its own clock that the differences must be from. It probes the *nodes* that lead, not each
//!   partition: delays and clocks are a node's. It measures while it has transactions; before anything is
//!   measured it goes by the map.
//! - **Every conflict with a later one refuses a late transaction**, of whatever priority (N1).
//! - **Priorities are numbers**, [`Config::levels`] of them, two unless said otherwise. The lowest gives
//!   way, all others wait in line.
//! - **Promotion**: an attempt's priority rises by one for each [`Config::promote_after`] attempts before
//!   it, the number of which is in its name; of [`Config::promoted_max`] transactions of a gateway at once.
//! - **A query for a vote is not answered with a refusal while the transaction waits**: it is known, and
//!   its vote will follow (R1 is about those that are unknown).

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

use crate::registry::{Guarantee, Registered, Row};
use crate::{commit, hosting, replication};

/// How much of the paper a protocol does: each includes those before it (§5.1).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Level {
    /// Order by timestamps (§3.2).
    Timestamps,
    /// Values are passed on when their commit is known, before it is applied: local early committed
    /// state forwarding (§3.4).
    LocalForwarding,
    /// Those of low priority leave the queue if they are in the way (§3.3.1).
    PriorityAbort,
    /// Those of high priority are prepared on the condition that those of low priority before them do not
    /// commit, where that is likely (§3.3.2).
    ConditionalPrepare,
    /// Reads are answered by the coordinator of the transaction that is waited for: remote early committed
    /// state forwarding (§3.4).
    RemoteForwarding,
}

/// Natto, in one of five protocols, each of which includes those before it: [`Config::level`] decides.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Natto;

/// Order by timestamps.
pub const TS: &str = "natto-ts";

/// And local early committed state forwarding.
pub const LECSF: &str = "natto-lecsf";

/// And priority abort.
pub const PA: &str = "natto-pa";

/// And conditional prepare.
pub const CP: &str = "natto-cp";

/// And remote early committed state forwarding.
pub const RECSF: &str = "natto-recsf";

/// Settings of Natto.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// How much of the paper.
    pub level: Level,
    /// The replicated logs, checkpoints and snapshots.
    pub hosting: hosting::Config,
    /// How many priorities there are.
    pub levels: u8,
    /// A transaction's priority rises by one after so many aborted attempts.
    pub promote_after: u32,
    /// So many of a gateway's transactions are promoted at once. Each waits in line with those of high
    /// priority: where keys are asked for more often than they can be written, nearly everything is tried
    /// often, and all of it would.
    pub promoted_max: usize,
    /// How far ahead of its clock, and of what clocks may differ, a leader accepts a transaction's
    /// timestamp (R8, N10).
    pub ahead_max: Duration,
    /// A participant presumes that another has turned one transaction away for the sake of a more
    /// important one if that arrived there so long after the first one's turn at most (§3.3.2). More
    /// makes more guesses, and more wrong ones.
    pub guess_slack: Duration,
    /// A client probes those who lead this often (§4).
    pub probe_interval: Duration,
    /// Measurements count for this long (§5.1).
    pub probe_window: Duration,
    /// Estimates are used for this long before they are made anew (§5.1).
    pub probe_refresh: Duration,
    /// A client stops probing when it has begun no transaction for this long.
    pub probe_idle: Duration,
    /// Time-outs of gateways, coordinators and participants.
    pub timeouts: commit::Timeouts,
    /// Deliberate mistakes, for tests (ADR 35).
    pub mutations: Mutations,
}

/// Rare events.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Note {
    /// A replica answered with less than the client knew (R11), and was not listened to.
    BehindClient,
    /// A transaction arrived after its timestamp had passed.
    Late,
    /// A late transaction was refused for the sake of a later one that was there first (N1).
    Overtaken,
    /// A timestamp lay too far ahead (N10).
    FarAhead,
    /// A transaction had to wait for a lock.
    LockWait,
    /// A transaction read what was committed and not applied (§3.4).
    Forwarded,
    /// A transaction of low priority left the queue for a more important one behind it (§3.3.1).
    PriorityAbort,
    /// One of low priority did not, for it will have ended by then.
    Spared,
    /// A transaction was prepared on a condition (§3.3.2).
    Conditional,
    /// The participant that prepared it learned that the condition holds.
    ConditionHeld,
    /// It learned that it does not.
    ConditionFailed,
    /// The coordinator decided by the evidence of another participant, before that (N3).
    ConditionProved,
    /// A transaction's reads were put to the coordinator of the one that it waits for (§3.4).
    ReadForwarded,
    /// A client used an answer that may not hold.
    Provisional,
    /// It did not hold.
    ReadsChanged,
    /// A transaction was given a higher priority than it asked for, because it had aborted often.
    Promoted,
    /// A timestamp was made from the map, for lack of a measurement.
    Unmeasured,
    /// A prepare came after the transaction had ended here.
    LatePrepare,
    /// A prepare came twice.
    RepeatedPrepare,
    /// A later attempt ended an earlier one.
    AttemptSuperseded,
    /// An abort of a transaction that was not prepared left a tombstone.
    Tombstone,
    /// A recovery query found no record, and made a refusal.
    QueryRefused,
    /// A recovery query found no record of a decision, and made an abort.
    QueryAborted,
    /// A coordinator gave up a client.
    Abandoned,
    /// A new leader took over unfinished transactions as their coordinator.
    CoordinatorTakeover,
    /// A new leader took over prepared transactions as their participant.
    ParticipantTakeover,
    /// A client asked again for an outcome.
    Resolved,
    /// Somebody asked about a transaction whose outcome was forgotten.
    Forgotten,
    /// A commit waited for its timestamp to pass.
    CommitWait,
    /// A read-only transaction needed a second round.
    SecondRound,
    /// A read-only transaction waited for a leadership check.
    ReadIndex,
    /// A read-only transaction waited for a prepared writer.
    ReadWait,
    /// The versions that a client read are not those that were prepared.
    StaleVersions,
    /// A request was sent again.
    Resent,
    /// Of the replicas.
    Hosting(hosting::Note),
}

impl From<hosting::Note> for Note {
    fn from(note: hosting::Note) -> Self {
        Self::Hosting(note)
    }
}

impl From<commit::Note> for Note {
    fn from(note: commit::Note) -> Self {
        match note {
            commit::Note::QueryAborted => Self::QueryAborted,
            commit::Note::Abandoned => Self::Abandoned,
            commit::Note::CoordinatorTakeover => Self::CoordinatorTakeover,
            commit::Note::Resolved => Self::Resolved,
            commit::Note::Forgotten => Self::Forgotten,
            commit::Note::CommitWait => Self::CommitWait,
            commit::Note::StaleVersions => Self::StaleVersions,
            commit::Note::SecondRound => Self::SecondRound,
            commit::Note::Resent => Self::Resent,
        }
    }
}

/// Names of timers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Timer {
    /// Of a partition's replicated log.
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
    /// A client probes those who lead.
    Probe,
}

impl From<commit::Timer> for Timer {
    fn from(timer: commit::Timer) -> Self {
        match timer {
            commit::Timer::CommitWait(partition) => Self::CommitWait(partition),
            commit::Timer::Resend(txn) => Self::Resend(txn),
            commit::Timer::Heartbeat => Self::Heartbeat,
        }
    }
}

impl Registered for Natto {
    const REPRESENTATIVES: &'static [&'static str] = &[RECSF];
    /// Golden traces show the others.
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
    const RANKS: bool = true;
    const MEMBERS: bool = true;

    type Config = Config;
    type Msg = Msg;
    type Timer = Timer;
    type Record = Record;
    type Note = Note;
    type Client = Client;
    type Server = Server;

    fn name(config: &Config) -> &'static str {
        match config.level {
            Level::Timestamps => TS,
            Level::LocalForwarding => LECSF,
            Level::PriorityAbort => PA,
            Level::ConditionalPrepare => CP,
            Level::RemoteForwarding => RECSF,
        }
    }

    fn mutations(name: &str) -> &'static [&'static str] {
        mutations::names(name)
    }

    fn configure(cluster: &Cluster, name: &str) -> Config {
        let round_trip = cluster.topology.rtt_max().max(Duration::from_millis(20));
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

    fn enable_mutation(config: &mut Config, mutation: &str) {
        mutations::enable(config, mutation);
    }

    fn vary(config: &mut Config, rng: &mut Rng) {
        config.timeouts.vary(rng);
        // From the paper's measurements to hardly any.
        config.probe_interval = hosting::vary(config.probe_interval, 100, 12_000, rng);
        config.ahead_max = hosting::vary(config.ahead_max, 40, 150, rng);
        // Guesses may be as wrong as they like.
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
