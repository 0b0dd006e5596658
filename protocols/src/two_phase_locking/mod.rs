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
//!
//! A transaction first locks all its declared keys at the leaders of their partitions, and reads
//! under those locks. If two transactions conflict, an older one *wounds* a younger one, and a
//! younger one waits for an older one. When every lock is held, the gateway asks a coordinator, a
//! group led in its own region, to commit. The coordinator asks every participant to prepare, each
//! participant replicates its prepare, and the coordinator replicates the decision and announces
//! it. Reads, prepare and decision come one after the other, which costs one more wide-area round
//! trip than Carousel. In return, no transaction aborts because of a conflict with an older one
//! that finishes.
//!
//! A *general* transaction declares no keys. It locks and reads in as many rounds as its client
//! likes, and locks its writes in one more round, before the coordinator is asked.
//!
//! With `2pl-p`, a transaction of high priority takes locks from all transactions of low priority
//! that are not prepared, and removes older ones from the queues in which it waits. With `2pl-pow`,
//! it takes locks only from those that themselves wait for a lock, here or elsewhere. In both, a
//! transaction of low priority never wounds one of high priority.
//!
//! In this folder, *client* means the client side of the protocol, which runs at a gateway.
//!
//! # Messages
//! | message | from → to | when |
//! |---|---|---|
//! | `Lock` | client → participant leaders | a transaction begins; a general one reads more, or is decided |
//! | `Locked` | participant leader → client | every lock there is held; with the values |
//! | `Waiting` | participant leader → client | a request is repeated; or at once, for preempt-on-wait |
//! | `Wounded` | participant leader → client | the locks there are lost |
//! | `KeepAlive` | client → participant leaders | while the application decides, or the transaction waits |
//! | `Release` | client → participant leaders | the transaction aborts, or needs no lock there |
//! | `Commit` | client → coordinator | the application has decided |
//! | `Prepare`, `Vote` | coordinator ↔ participant leaders | 2PC, first phase |
//! | `Decided` | coordinator → client | the decision is in the log |
//! | `Decision`, `DecisionAck` | coordinator ↔ participant leaders | 2PC, second phase |
//! | `QueryDecision` | participant leader → coordinator | prepared for long |
//! | `Resolve` | client → coordinator | an application asks for an outcome |
//! | `ReadOnly`, `ReadOnlyResult` | client ↔ participant leaders | a read-only transaction |
//! | `NotLeader` | server → sender | another node leads |
//! | `Members` | server → sender | the voters differ from the placement |
//!
//! # Why it is correct
//! - **Locks of prepared transactions are replicated. All others are only in a leader's memory**,
//!   and are lost with its leadership. So every participant, also one that is only read, is asked
//!   to prepare (T4). It prepares only if it still holds the locks, or can have them at once, *and*
//!   every value read is still the newest (R3). At the moment of the last vote all locks are held
//!   and all values are current: that moment is the transaction's position in the serial order.
//! - **Participants neither wound nor time out a prepared transaction** (T5). Locks are released
//!   when a commit is applied. A transaction is asked to prepare only once it has every lock. So a
//!   prepared one waits for nobody, and waiting for it is no deadlock. For the same reason, general
//!   transactions lock their writes, upgrades included, before the prepare and not during it.
//! - **The first decision in the coordinator's log is the decision** (R2, R7), and it is announced
//!   only once it is chosen. A new coordinator that finds none has announced nothing. It never asks
//!   participants for their votes (C1): the client asks to commit again, or a participant asks, and
//!   then a transaction without a record is aborted (R1).
//! - **An abort by the client alone needs no log.** Until the client sends `Commit`, nobody can
//!   commit the transaction. So a client that is wounded, or whose application gives up, may report
//!   the abort at once.
//! - **Read-only transactions take no locks.** Each leader returns its newest values, with a
//!   promise of how long they stay the newest. It does so under a lease, and after the transactions
//!   have ended that were prepared when the request arrived. If one timestamp lies within every
//!   promise, the values are the snapshot; otherwise the participants whose promises fall short are
//!   asked once more. Locking reads would need no timestamps, but a second round trip to verify
//!   that no lock was lost meanwhile, and writers would have to wait. The price is *commit-wait*: a
//!   commit is acknowledged when its timestamp has passed on every clock (C13). 2PC takes so long
//!   that this costs nothing.
//!
//! # Deviations
//!
//! Natto describes the system in one paragraph, without recovery.
//! - **A key that is read and written is locked for writing at once**, and keys that are only
//!   written are locked with the reads, not at the prepare as in Spanner. With declared sets this
//!   avoids upgrades, by which two readers of one key would wound each other, and prepared
//!   transactions that wait.
//! - **The coordinator of a general transaction follows from its name alone**, because another
//!   gateway that resolves it may know none of its keys.
//! - **Ages survive retries** (T5): the gateway remembers when a transaction's first attempt began.
//!   A transaction that continues at another gateway starts young again; only fairness depends on
//!   it.
//! - **Low never wounds high** under `2pl-p` and `2pl-pow`. With wound-wait by age alone, an older
//!   transaction of low priority could abort one that preemption should protect.
//! - **Preempt-on-wait knows of waits elsewhere**: the client of a low-priority transaction learns
//!   that it waits, and informs the other partitions. Otherwise a high-priority transaction could
//!   wait for a low-priority one that waits for it.
//!
//! # Not implemented
//! - Reads that lock for writing at once, in a general transaction. The lock table would grant
//!   them.
//! - One-phase commit of transactions with one participant.

mod client;
mod coordinator;
mod leader;
mod locks;
mod message;
mod mutations;
mod participant;
mod state;

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

use crate::registry::{Guarantee, Registered, Row, protocol_items};
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
    /// The effect of priorities.
    pub preemption: Preemption,
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
    /// A transaction had to wait for a lock.
    LockWait,
    /// A transaction lost its locks to an older one.
    Wounded,
    /// A transaction lost its locks, or its position in a queue, to one of higher priority.
    Preempted,
    /// A transaction lost its locks to one of higher priority because it waited elsewhere.
    PreemptedOnWait,
    /// A lock request arrived after the transaction had progressed further.
    LateLock,
    /// A lock request arrived twice.
    RepeatedLock,
    /// A general transaction requested more locks where it already had some.
    LaterRound,
    /// A prepare arrived after the transaction had ended here.
    LatePrepare,
    /// A prepare arrived twice.
    RepeatedPrepare,
    /// The leader that granted the locks is gone; the locks were free, and nothing had changed.
    LocksRegained,
    /// The locks are lost, and other transactions have them.
    LocksLost,
    /// A value that the client read has changed.
    StaleVersions,
    /// A later attempt ended an earlier one.
    AttemptSuperseded,
    /// An abort of an unknown transaction left a tombstone.
    Tombstone,
    /// A recovery query found no record of a transaction, so it was aborted.
    QueryAborted,
    /// A participant released the locks of a transaction whose client was silent.
    Abandoned,
    /// A coordinator stopped waiting for votes.
    Hopeless,
    /// A new leader took over decisions as their coordinator.
    CoordinatorTakeover,
    /// A new leader took over prepared transactions as their participant.
    ParticipantTakeover,
    /// A client asked for an outcome.
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
    /// The reads of a transaction exceed the size of an answer.
    TooMuch,
    /// A request was sent again.
    Resent,
    /// Outcomes were forgotten for a client that has stopped acknowledging them.
    Retired,
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

impl Registered for Locking {
    const REPRESENTATIVES: &'static [&'static str] = &[BY_AGE];
    /// The other mutations need rarer events: `docs/protocols/2pl.md` says what it took to catch
    /// them.
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
    const SCANS: bool = true;
    const GENERAL: bool = true;
    const MEMBERS: bool = true;

    protocol_items!();

    fn name(config: &Config) -> &'static str {
        match config.preemption {
            Preemption::Never => BY_AGE,
            Preemption::Always => PREEMPT,
            Preemption::OnWait => PREEMPT_ON_WAIT,
        }
    }

    fn configure(cluster: &Cluster, name: &str) -> Config {
        let round_trip = cluster.topology.rtt_assumed();
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
