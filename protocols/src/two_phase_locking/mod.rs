//! Two-phase locking and two-phase commit over replicated partitions, as in Spanner: the baseline
//! that Natto (§4) measures itself against, with recovery. Three protocols: `2pl`, `2pl-p`,
//! `2pl-pow`.
//!
//! - Linguan Yang, Xinan Yan, Bernard Wong: *Natto: Providing Distributed Transaction
//!   Prioritization for High-Contention Workloads*, SIGMOD 2022,
//!   <https://doi.org/10.1145/3514221.3526161>, §4.
//! - James C. Corbett et al.: *Spanner: Google's Globally-Distributed Database*, OSDI 2012, §4.2.
//! - Daniel J. Rosenkrantz, Richard E. Stearns, Philip M. Lewis: *System Level Concurrency Control
//!   for Distributed Database Systems*, TODS 3(2), 1978 (wound-wait).
//! - David T. McWherter, Bianca Schroeder, Anastassia Ailamaki, Mor Harchol-Balter: *Improving
//!   Preemptive Prioritization via Statistical Characterization of OLTP Locking*, ICDE 2005
//!   (preempt-on-wait).
//!
//! # The idea
//! A transaction first locks everything that it declared, at the leaders of its partitions, and
//! reads under those locks. An older transaction *wounds* a younger one that is in its way; a younger
//! one waits for an older. When every lock is held, the client asks a coordinator, a group led in its
//! own region, to commit; that asks every participant to prepare, each replicates its prepare, the
//! coordinator replicates the decision, and tells. Reads, prepare and decision come one after the
//! other, which costs a wide-area round trip more than Carousel does, and no transaction ever aborts
//! for a conflict with an older one that finishes.
//!
//! A *general* transaction declares nothing: it locks and reads in as many rounds as its caller likes,
//! and what it writes in one more, before the coordinator is asked.
//!
//! With `2pl-p`, a transaction of high priority takes locks from all of low priority that are not
//! prepared, and turns away older ones that wait where it wants a lock. With `2pl-pow`, it takes them
//! only from those that themselves wait for a lock, here or elsewhere. In both, one of low priority
//! never wounds one of high priority.
//!
//! # Messages
//! | message | from → to | when |
//! |---|---|---|
//! | `Lock` | client → participant leaders | a transaction begins; a general one reads on, or is decided |
//! | `Locked` | participant leader → client | every lock there is held; with the values |
//! | `Waiting` | participant leader → client | asked again; or at once, for preempt-on-wait |
//! | `Wounded` | participant leader → client | the locks there are lost |
//! | `KeepAlive` | client → participant leaders | while its caller thinks, or it waits |
//! | `Release` | client → participant leaders | it gives up, or needs no lock there |
//! | `Commit` | client → coordinator | its caller decided |
//! | `Prepare`, `Vote` | coordinator ↔ participant leaders | 2PC, first phase |
//! | `Decided` | coordinator → client | the decision is in the log |
//! | `Decision`, `DecisionAck` | coordinator ↔ participant leaders | 2PC, second phase |
//! | `QueryDecision` | participant leader → coordinator | prepared for long |
//! | `Resolve` | client → coordinator | a caller lost track |
//! | `ReadOnly`, `ReadOnlyResult` | client ↔ participant leaders | a read-only transaction |
//! | `NotLeader` | server → sender | leadership has moved |
//! | `Members` | server → sender | others vote than the placement says |
//!
//! # Why it is correct
//! - **Locks of prepared transactions are replicated, all others are only in a leader's memory** and
//!   die with its leadership. So every participant, also one that is only read, is asked to prepare
//!   (T4), and prepares only if it still holds the locks, or can have them at once, *and* every value
//!   read is still the newest (R3). At the moment of the last vote all locks are held and all values
//!   are current: that moment is the transaction's place in the serial order.
//! - **A prepared transaction is neither wounded nor timed out by its participants** (T5). Locks go
//!   when a commit is applied. A transaction is asked to prepare only once it has every lock, so a
//!   prepared one waits for nobody, and waiting for it is no deadlock. For that, general transactions
//!   lock what they write, upgrades included, before and not at the prepare.
//! - **The first decision in the coordinator's log is the decision** (R2, R7), and nobody hears of
//!   one that is not chosen. A new coordinator that finds none has told nobody anything. It never
//!   asks participants how they voted (C1): the client asks to commit again, or a participant asks,
//!   and then a transaction without a record is aborted (R1).
//! - **What the client alone ends needs no log.** Until it sends `Commit` nobody can commit the
//!   transaction, so a client that is wounded, or whose caller gives up, may say so at once.
//! - **Read-only transactions take no locks.** Each leader returns its newest values with a promise
//!   of how long they stay the newest, under a lease, after those have ended that were prepared when
//!   the request came; if one timestamp lies within every promise, that is the snapshot, else those
//!   that fall short are asked once more. Locking reads would need no timestamps, but a second round
//!   trip to see that no lock was lost meanwhile, and would make writers wait. The price is
//!   *commit-wait*: a commit is told when its timestamp has passed on every clock (C13); 2PC takes so
//!   long that this costs nothing.
//!
//! # Deviations
//! Natto gives the system one paragraph and no recovery.
//! - **A key that is read and written is locked for writing at once**, and written keys are locked
//!   with the reads, not at the prepare as in Spanner: where the sets are declared, upgrades, which make
//!   two readers of one key wound each other, and prepared transactions that wait are both needless.
//! - **The coordinator of a general transaction follows from its name alone**, for another gateway that
//!   is asked what became of it may know none of its keys.
//! - **Ages survive retries** (T5): the gateway remembers when a transaction's first attempt began. A
//!   caller that goes on at another gateway starts young again; only fairness rests on it.
//! - **Low never wounds high** under `2pl-p` and `2pl-pow`, where wound-wait by age alone would let
//!   an older low one abort what preemption was to protect.
//! - **Preempt-on-wait knows of waits elsewhere**: a low-priority transaction's client hears that it
//!   waits, and tells the other partitions. Without that, a high-priority one could wait for a low
//!   one that waits for it.
//!
//! # Not implemented
//! - Reads that lock for writing at once, in a general transaction. The lock table would grant them.
//! - One-phase commit of transactions with one participant.

mod client;
mod coordinator;
mod leader;
mod locks;
mod message;
mod mutations;
mod participant;
mod state;

use std::time::Duration;

pub use crate::hosting::{Chunk, Config as HostingConfig, Note as HostingNote};
pub use client::Client;
pub use leader::Server;
pub use locks::{LockTable, Loss, Mode, Preemption, Rank};
pub use message::{Command, Log, Msg, Record, Vote};
pub use mutations::Mutations;
use orthodrome_core::Wire as _;
use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{PartitionId, TxnId};
use orthodrome_core::limits::Limits;
use orthodrome_core::machine::Protocol;
use orthodrome_core::rng::Rng;
pub use state::{Decided, Prepared, State, decide};

use crate::registry::{Guarantee, Registered, Row};
use crate::{commit, hosting, replication};

/// Two-phase locking, in one of three variants: [`Config::preemption`] decides.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Locking;

/// Wound-wait by age.
pub const BY_AGE: &str = "2pl";

/// High priority preempts low.
pub const PREEMPT: &str = "2pl-p";

/// High priority preempts low that waits.
pub const PREEMPT_ON_WAIT: &str = "2pl-pow";

/// Settings.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// The replicated logs, checkpoints and snapshots.
    pub hosting: hosting::Config,
    /// What priorities do.
    pub preemption: Preemption,
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
    /// A transaction had to wait for a lock.
    LockWait,
    /// A transaction lost its locks to an older one.
    Wounded,
    /// A transaction lost its locks, or its place in a queue, to a more important one.
    Preempted,
    /// A transaction lost its locks to a more important one because it waited elsewhere.
    PreemptedOnWait,
    /// A lock request came after the transaction had gone further.
    LateLock,
    /// A lock request came twice.
    RepeatedLock,
    /// A general transaction asked for more where it had locks already.
    LaterRound,
    /// A prepare came after the transaction had ended here.
    LatePrepare,
    /// A prepare came twice.
    RepeatedPrepare,
    /// The leader that gave the locks is gone; they were free, and nothing had changed.
    LocksRegained,
    /// The locks are gone, and others have them.
    LocksLost,
    /// Something that the client read has changed.
    StaleVersions,
    /// A later attempt ended an earlier one.
    AttemptSuperseded,
    /// An abort of an unknown transaction left a tombstone.
    Tombstone,
    /// A recovery query found no record of a transaction, and made an abort.
    QueryAborted,
    /// A participant gave up a client.
    Abandoned,
    /// A coordinator gave up waiting for votes.
    Hopeless,
    /// A new leader took over decisions as their coordinator.
    CoordinatorTakeover,
    /// A new leader took over prepared transactions as their participant.
    ParticipantTakeover,
    /// A client asked for an outcome.
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
    /// A transaction reads more than one answer may tell.
    TooMuch,
    /// A request was sent again.
    Resent,
    /// Outcomes were forgotten for a client that acknowledges nothing any more.
    Retired,
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
    /// A leader looks for overdue work.
    Sweep(PartitionId),
    /// A commit's timestamp passes.
    CommitWait(PartitionId),
    /// A client sends a transaction's unanswered requests again.
    Resend(TxnId),
    /// A client sends heartbeats.
    Heartbeat,
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

impl Registered for Locking {
    const REPRESENTATIVES: &'static [&'static str] = &[BY_AGE];
    /// The others need rarer coincidences: `docs/protocols/2pl.md` says what it took.
    const CAUGHT_WITHIN: &'static [(&'static str, &'static str, u64)] = &[
        (BY_AGE, "T4", 50),
        (BY_AGE, "T4-rounds", 400),
        (BY_AGE, "T5", 10),
        (BY_AGE, "T5-early", 10),
        (BY_AGE, "R3", 20),
        (BY_AGE, "C13", 10),
    ];
    const ROWS: &'static [Row] = &[
        row(BY_AGE, "Natto (SIGMOD 2022) §4: 2PL+2PC, wound-wait"),
        row(PREEMPT, "Natto (SIGMOD 2022) §4: 2PL+2PC with priority preemption"),
        row(PREEMPT_ON_WAIT, "Natto (SIGMOD 2022) §4: 2PL+2PC with preempt-on-wait"),
    ];
}

const fn row(name: &'static str, paper: &'static str) -> Row {
    Row {
        name,
        paper,
        guarantee: Guarantee::StrictSerializable,
        conditions: "serializable always; strictly so while clocks keep their stated error bound",
        model: "interactive with fixed sets (2FI) and general, procedures, read-only",
        round_trips: "at most 4; read-only 1",
    }
}

impl Protocol for Locking {
    const NAMES: &'static [&'static str] = &[BY_AGE, PREEMPT, PREEMPT_ON_WAIT];
    const QUEUES: bool = true;
    const GENERAL: bool = true;
    const MEMBERS: bool = true;

    type Config = Config;
    type Msg = Msg;
    type Timer = Timer;
    type Record = Record;
    type Note = Note;
    type Client = Client;
    type Server = Server;

    fn name(config: &Config) -> &'static str {
        match config.preemption {
            Preemption::Never => BY_AGE,
            Preemption::Always => PREEMPT,
            Preemption::OnWait => PREEMPT_ON_WAIT,
        }
    }

    fn mutations(name: &str) -> &'static [&'static str] {
        mutations::names(name)
    }

    fn configure(cluster: &Cluster, name: &str) -> Config {
        let round_trip = cluster.topology.rtt_max().max(Duration::from_millis(20));
        Config {
            hosting: hosting::Config::for_round_trip(round_trip),
            preemption: match name {
                PREEMPT => Preemption::Always,
                PREEMPT_ON_WAIT => Preemption::OnWait,
                _ => Preemption::Never,
            },
            timeouts: commit::Timeouts::for_round_trip(round_trip),
            mutations: Mutations::default(),
        }
    }

    fn enable_mutation(config: &mut Config, mutation: &str) {
        mutations::enable(config, mutation);
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
