//! GeoTP and its baselines in the simulator: the same [`Middleware`](crate::middleware::Middleware)
//! and [`Agent`](crate::agent::Agent) that stand in front of real servers, over [modelled
//! sources](crate::source).
//!
//! - Qiyu Zhuang, Xinyue Shi, Shuang Liu, Wei Lu, Zhanhao Zhao, Yuxing Chen, Tong Li, Anqun Pan,
//!   Xiaoyong Du: *GeoTP: Latency-aware Geo-Distributed Transaction Processing in Database
//!   Middlewares (Extended Version)*, 2025.
//!
//! # The idea
//!
//! The data already lies in databases in several regions. A middleware coordinates: it sends each
//! source its statements, and commits with XA. An agent beside each source prepares right after the
//! last statement, which saves the round trip of the prepare phase (O1); statements of near sources
//! start later, so that their locks are not held while far ones travel (O2); and on hot records the
//! wait is forecast, or a transaction is held back (O3).
//!
//! # Messages
//! | message | from → to | when |
//! |---|---|---|
//! | `Attach`, `Attached` | middleware ↔ agent | the middleware has started, or the agent has |
//! | `Ping`, `Pong` | middleware ↔ agent | every now and then: distance, incarnation, what may be forgotten |
//! | `Execute`, `Answered` | middleware ↔ agent | statements of a round (§III-A) |
//! | `After` | middleware → agent | the first statements at a source that has not committed the session's earlier transactions |
//! | `StatementFailed` | agent → middleware | a statement failed and the transaction continues there |
//! | `Prepare`, `Prepared` | middleware ↔ agent | 2PC, first phase; with O1 the vote comes unasked (§IV-A, Alg. 1 l. 1-16) |
//! | `Failed` | agent → middleware | the branch has failed and is rolled back |
//! | `PeerRollback` | agent → agents | the same, for the other branches (§IV-A, Alg. 1 l. 31-36) |
//! | `Commit`, `Committed` | middleware ↔ agent | 2PC, second phase; or the only branch |
//! | `Lost` | agent → middleware | whether the only branch committed is not known |
//! | `Rollback`, `RolledBack` | middleware ↔ agent | the transaction is over |
//! | `Scan`, `Scanned` | middleware ↔ agent | prepared branches at the source that have not been ended (§V-A), in one or several messages |
//! | `Waits` | agent → middleware | the lock waits at the source have changed, in one or several messages |
//! | `Look`, `Seen` | middleware ↔ source | `near`: rows without locks, as a replica shows them |
//! | `Ask`, `Told` | middleware ↔ middleware | a client asks for the outcome of a transaction that it began elsewhere |
//!
//! # Deviations
//! - **Reads lock, everywhere** (G1, G2, G7), and the sources run at the level that keeps what they
//!   lock.
//! - **A vote carries the incarnation of its source**, and no decision is made while locks may have
//!   been lost (G3): the paper has no such thing.
//! - **Agents leave tombstones** (G5), know incarnations of middlewares, and roll back what a lost
//!   one left (G6).
//! - **The client learns of an abort as soon as the transaction cannot commit**; the paper waits
//!   for its sources to say that they have rolled back. There is no commit record and never will be
//!   one, so it cannot be otherwise.
//! - **The client learns of a commit when the decision is durable**; the paper waits for its
//!   sources to say that they have committed. They can only commit, and what they hold stays locked
//!   until they have. The baselines wait.
//! - **A forecast counts for a quarter** (the paper leaves the factor open): with all of it, in the
//!   simulator, transactions hold locks while they wait for what was forecast, which makes the next
//!   forecast longer.
//! - **A transaction of one source whose text ends in `COMMIT` takes one round trip** with O1: the
//!   commit goes in the same text.
//! - **Deadlocks across sources are found** (O1 to O3): agents report who waits for whom, and the
//!   middleware ends the youngest of a cycle. In the paper, and with the baselines, they end by the
//!   sources' lock time-out.
//! - **`near` is ours** (docs/adr/0042): a transaction of several rounds reads without locks, and its
//!   statements execute when it commits, if they have the same answers as before.
//! - **Weights of records of which nothing is known are equal**: Eq. 4 gives them 0/0. Counts of
//!   Eq. 9 fade.
//! - **A transaction that is held back is looked at again after a while**, not at once as Alg. 2 l.
//!   19 has it: nothing would have changed.
//!
//! # Not implemented
//! - `scalardb` and `scalardb+`, which share none of these machines, are [a protocol of their
//!   own](crate::scalardb).

mod client;
mod message;
mod server;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{NodeId, TxnId};
use orthodrome_core::limits::Limits;
use orthodrome_core::machine::Protocol;
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::rng::Rng;
use orthodrome_core::time::Duration;

pub use client::Client;
pub use message::Msg;
pub use server::Server;

use crate::contract::{AgentTimer, Kind, Note, Record as LogRecord, Timer as DmTimer};
use crate::middleware::{Commit, Optimizations};
use crate::{agent, middleware, source};

/// GeoTP, its stages, and its baselines.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GeoTp;

/// XA, as in ShardingSphere-Proxy.
pub const XA: &str = "xa";
/// Each branch commits by itself: not atomic.
pub const XA_LOCAL: &str = "xa-local";
/// XA, with writes after reads (Yan and Cheung, PVLDB 9(5), 2016).
pub const QURO: &str = "quro";
/// Prepare with the last statement; near sources after far ones (Zamanian et al., SIGMOD 2020).
pub const CHILLER: &str = "chiller";
/// Decentralized prepare and early abort.
pub const O1: &str = "geotp-o1";
/// Adds latency-aware scheduling.
pub const O2: &str = "geotp-o2";
/// Adds forecasts, and late scheduling on hot records.
pub const O3: &str = "geotp";
/// GeoTP, where transactions of several rounds are answered from copies, and execute when they
/// commit.
pub const NEAR: &str = "near";

/// Settings.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// The variant.
    pub name: &'static str,
    /// Settings of middlewares.
    pub middleware: middleware::Config,
    /// Settings of agents.
    pub agent: agent::Config,
    /// Settings of sources.
    pub source: source::Config,
    /// True if reading statements of a round precede writing ones (QURO).
    pub writes_last: bool,
    /// True if a client's statements at a source wait for the client's own earlier transactions
    /// there, as with real servers. The paper does not have this; the swarm enables it.
    pub follows: bool,
    /// True if clients set savepoints and roll back to them: what they read before stays locked,
    /// and what they wrote is undone. The paper has no savepoints; the swarm enables them.
    pub savepoints: bool,
    /// True if transactions of several rounds read rows without locks, and execute when they commit.
    pub is_near: bool,
    /// A question to a silent middleware is repeated after this time.
    pub ask_after: Duration,
}

/// Names of timers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Timer {
    /// A timer of a middleware.
    Middleware(DmTimer),
    /// A timer of an agent.
    Agent(AgentTimer),
    /// A timer of a source.
    Source(source::Timer),
    /// Repeat the questions to other middlewares.
    Ask(TxnId),
    /// Repeat the questions to copies.
    Look(TxnId),
}

/// Durable records.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Record {
    /// A record of a middleware.
    Middleware(LogRecord),
    /// A record of a source.
    Source(source::Record),
}

impl Protocol for GeoTp {
    const NAMES: &'static [&'static str] = &[XA, XA_LOCAL, QURO, CHILLER, O1, O2, O3, NEAR];
    const QUEUES: bool = true;
    const GENERAL: bool = true;
    const REPLICATED: bool = false;
    // A prepared branch waits for its middleware, because only that knows the decision.
    const OUTLIVES_GATEWAYS: bool = false;
    // Locks order transactions; clocks only schedule subtransactions.
    const NEEDS_CLOCKS: bool = false;

    type Config = Config;
    type Msg = Msg;
    type Timer = Timer;
    type Record = Record;
    type Note = Note;
    type Client = Client;
    type Server = Server;

    fn name(config: &Config) -> &'static str {
        config.name
    }

    fn mutations(name: &str) -> &'static [&'static str] {
        if name == NEAR {
            return &["unchecked-read", "unchecked-count"];
        }
        &[
            "G1",
            "G2",
            "G3",
            "G4",
            "G5",
            "G6",
            "early-vote",
            "early-answer",
            "forgotten-decision",
            "skipped-vote",
            "forgotten-savepoint",
            "unlocking-savepoint",
        ]
    }

    fn configure(cluster: &Cluster, name: &str) -> Config {
        let round_trip = cluster.topology.rtt_assumed();
        let name = Self::NAMES.iter().copied().find(|known| *known == name).unwrap_or(O3);
        // What the paper's data nodes are, unless it says otherwise (§VII-A3).
        let sources: OrdMap<NodeId, Kind> =
            cluster.servers().map(|node| (node.id, Kind::MariaDb)).collect();
        let optimizations = Optimizations {
            decentralized_prepare: [CHILLER, O1, O2, O3, NEAR].contains(&name),
            latency_aware: [O2, O3, NEAR].contains(&name),
            high_contention: [O3, NEAR].contains(&name),
        };
        let lock_timeout = Duration::from_secs(5);
        let finds_deadlocks = [O1, O2, O3, NEAR].contains(&name);
        let quarantine = (round_trip * 4).max(Duration::from_secs(1));
        Config {
            name,
            middleware: middleware::Config {
                sources,
                optimizations,
                commit: if name == XA_LOCAL { Commit::Local } else { Commit::TwoPhase },
                inner_below: (name == CHILLER).then_some(Duration::from_millis(10)),
                answers_at_decision: [O1, O2, O3, NEAR].contains(&name),
                commit_in_text: [O1, O2, O3, NEAR].contains(&name),
                ping_interval: Duration::from_millis(100),
                rtt_weight_percent: 10,
                hot_records: 10_000,
                hot_keep_percent: 80,
                forecast_percent: 25,
                forecast_max: Duration::from_secs(2),
                admission_wait: round_trip,
                admission_tries: 10,
                resend_after: round_trip * 3 + Duration::from_millis(500),
                give_up_after: lock_timeout + round_trip * 4 + Duration::from_secs(5),
                scan_interval: Duration::from_secs(2),
                quarantine,
                checkpoint_records: 2_000,
                finds_deadlocks,
                mutations: middleware::Mutations::default(),
            },
            agent: agent::Config {
                master_timeout: round_trip * 5 + Duration::from_secs(3),
                quarantine,
                limits: Limits::SERVER,
                mutations: agent::Mutations::default(),
            },
            source: source::Config {
                lock_timeout,
                deadlock_after: Duration::from_secs(1),
                look_every: finds_deadlocks.then_some(Duration::from_millis(100)),
                checkpoint_records: 5_000,
                lag: Duration::ZERO,
                mutations: source::Mutations::default(),
            },
            writes_last: name == QURO,
            follows: false,
            savepoints: false,
            is_near: name == NEAR,
            ask_after: round_trip * 2 + Duration::from_millis(200),
        }
    }

    fn enable_mutation(config: &mut Config, mutation: &str) {
        match mutation {
            "G1" => {
                config.source.mutations.plain_reads = true;
                for kind in config.middleware.sources.values_mut() {
                    *kind = Kind::Postgres;
                }
            }
            "G2" => {
                config.source.mutations.drops_read_locks = true;
                for kind in config.middleware.sources.values_mut() {
                    *kind = Kind::MariaDb;
                }
            }
            "G3" => config.middleware.mutations.no_fence = true,
            "G4" => {
                config.agent.mutations.waits_for_vanished = true;
                for kind in config.middleware.sources.values_mut() {
                    *kind = Kind::MariaDb;
                }
            }
            "G5" => config.agent.mutations.no_tombstones = true,
            "G6" => config.agent.mutations.ignores_epochs = true,
            "early-vote" => config.agent.mutations.votes_early = true,
            "early-answer" => config.middleware.mutations.tells_early = true,
            "forgotten-decision" => config.middleware.mutations.forgets_decisions = true,
            "skipped-vote" => config.middleware.mutations.skips_vote = true,
            "forgotten-savepoint" => config.middleware.mutations.forgets_savepoints = true,
            "unlocking-savepoint" => config.source.mutations.unlocks_going_back = true,
            "unchecked-read" => config.source.mutations.unchecked_reads = true,
            "unchecked-count" => config.source.mutations.unchecked_counts = true,
            other => panic!("{other} is none of {:?}", Self::mutations(O3)),
        }
    }

    fn vary(config: &mut Config, rng: &mut Rng) {
        let dm = &mut config.middleware;
        for kind in dm.sources.values_mut() {
            *kind = if rng.chance(1, 2) { Kind::Postgres } else { Kind::MariaDb };
        }
        dm.ping_interval = Duration::from_millis(rng.range(10, 400));
        dm.resend_after = Duration::from_millis(rng.range(50, 2_000));
        dm.hot_records = usize::try_from(rng.range(1, 50)).unwrap_or(1);
        dm.forecast_percent = u32::try_from(rng.range(0, 200)).unwrap_or(100);
        dm.forecast_max = Duration::from_millis(rng.range(0, 5_000));
        dm.admission_wait = Duration::from_millis(rng.range(1, 50));
        dm.admission_tries = u32::try_from(rng.range(0, 20)).unwrap_or(10);
        dm.checkpoint_records = u32::try_from(rng.range(5, 500)).unwrap_or(500);
        config.source.lock_timeout = Duration::from_millis(rng.range(100, 5_000));
        config.source.deadlock_after = Duration::from_millis(rng.range(10, 1_000));
        if config.source.look_every.is_some() {
            config.source.look_every = Some(Duration::from_millis(rng.range(5, 500)));
        }
        config.source.checkpoint_records = u32::try_from(rng.range(5, 500)).unwrap_or(500);
        config.agent.master_timeout = Duration::from_millis(rng.range(300, 5_000));
        config.follows = rng.chance(1, 2);
        config.savepoints = rng.chance(1, 2);
        if config.is_near {
            // A savepoint sends what is remembered to the sources, as in `geotp`.
            config.savepoints = false;
            config.source.lag = Duration::from_millis(rng.range(0, 1_000));
        }
    }

    fn limit(config: &mut Config, limits: Limits) -> bool {
        config.agent.limits = limits;
        true
    }

    fn record_size(record: &Record) -> usize {
        match record {
            Record::Middleware(LogRecord::Commit { branches, .. }) => 64 + 8 * branches.len(),
            Record::Middleware(LogRecord::Epoch(_) | LogRecord::Ended(_)) => 32,
            Record::Source(record) => record.size(),
        }
    }
}
