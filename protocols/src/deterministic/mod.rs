//! Deterministic transactions, which are ordered first and then run everywhere: `calvin`, `slog`,
//! `slog-consensus`, `sloth`.
//!
//! - Joshua Hildred: *Efficient Geo-Distributed Transaction Processing*, MMath thesis, University
//!   of Waterloo 2023; cited as "Sloth".
//! - Alexander Thomson et al.: *Calvin: Fast Distributed Transactions for Partitioned Database
//!   Systems*, SIGMOD 2012, <https://doi.org/10.1145/2213836.2213838>.
//! - Kun Ren, Dennis Li, Daniel J. Abadi: *SLOG: Serializable, Low-latency, Geo-replicated
//!   Transactions*, PVLDB 12(11) 2019, <https://doi.org/10.14778/3342263.3342647>.
//!
//! # The idea
//!
//! If a transaction declares its reads and writes, and its writes are a function of its reads, then
//! it has the same result wherever it runs, as long as the same transactions go before it. So it is
//! put into a log, and every region runs the log by itself. There are no votes and no rollbacks,
//! and the outcome is known near the client as soon as the transaction has run there.
//!
//! With `calvin` there is one log for all. The other protocols have one *stream* for each region,
//! which orders accesses to the keys that have their primary there. A transaction is in the streams
//! of all its *homes*, and every region merges the streams into one order ([`merge`]). A
//! transaction with one home waits only for that stream. If a transaction has several homes, the
//! streams of `sloth` order it independently, and the merge resolves the differences. With `slog`
//! one stream orders it first (a region's own, or with `slog-consensus` a separate one). The homes
//! then take *pieces* of it from that stream, in the same order, so that they cannot differ.
//!
//! All of them are one machine ([`Ordering`]): `calvin` is `sloth` with one home for every key.
//!
//! # Messages
//! | message | from → to | when | § |
//! |---|---|---|---|
//! | `Submit`, `Answer`, `TooOld` | gateway ↔ server | a transaction begins; it has run; it ran too long ago | 4.2.1 |
//! | `Look`, `Found` | gateway ↔ server | a client reads before it decides | – |
//! | `Sequence` | server → sequencers | a transaction must be ordered; it is in one stream and not in another | 4.2.1 |
//! | `AppendEntries`, … | sequencer ↔ all servers | a stream's log | 4.2.7 |
//! | `NotLeader` | server → sender | another server leads the stream | – |
//! | `RemoteReads`, `WantReads`, `ReadsGone`, `Covered` | servers of different shares | a transaction's reads in another share; they have not arrived; they are forgotten; they may be forgotten | Calvin 3.2 |
//! | `WantState`, `StatePiece` | servers of one share | one lags too far behind for logs and reads | – |
//! | `Digests` | servers of one share | sums of spans | – |
//!
//! # Why it is correct
//! - **Only chosen entries are merged** (R9, S2, S3). A stream is a replicated log
//!   ([`crate::replication`]) with a leader, its *sequencer*, with voters, and with all other
//!   servers as learners. The transactions that a server has run are a function of prefixes that
//!   never change (S4), whichever server fails. Servers that know longer prefixes have run more.
//! - **A transaction runs once** under its name. A stream ignores a transaction that it already
//!   has, until its client has acknowledged the outcome, and for ever after (R6). So any node may
//!   submit it again: its gateway, another gateway that resolves it (R1), a server that waits for
//!   it, and a home that sees it in one stream and not in another (S6).
//! - **Timestamps** follow from positions in streams and from the versions accessed. So all regions
//!   compute the same timestamps, and they grow along every key. No clock is trusted: timestamps
//!   promise nothing about real time.
//! - **Strict serializability**: a transaction that begins after another was acknowledged comes
//!   after it in each stream that they share, and after everything that had to run before it,
//!   because all of that was chosen. Read-only transactions are ordered like others.
//! - **States can be joined** (S3, S8). The transactions that a server has run include all that *go
//!   before* any of them. So if each of two servers is ahead in some stream, either can take over
//!   what the other knows (`state.rs`). A server that lags behind by more than the logs keep takes
//!   the state of that stream's leader, however far the leader lags behind in other streams.
//! - **Stale reads** ([`orthodrome_core::txn::Kind::StaleReadOnly`]) read the state of the nearest
//!   server, which includes everything that *goes before* any visible transaction. They are not
//!   part of strict serializability.
//! - **Interactive and general transactions** read the state of the nearest server, however old,
//!   and are submitted in the form *if these versions are still current, write this*.
//!
//! # Bounded merge (S1)
//!
//! The thesis's merge runs a cycle when it is closed; under contention it may never be closed. Here
//! a sequencer holds a transaction with several homes until about the time when all homes have it,
//! and takes such transactions in the order of those times. So only late ones close cycles. And
//! while a transaction on one of its keys has waited for long, a new transaction is not admitted to
//! the graph, unless it is in another stream already. Both rules concern only the sequencers; the
//! merge does not depend on them.
//!
//! In addition, no stream accepts more than a fixed number of transactions that have not run. This
//! is a hard bound on the size of a component, and every server asserts it.
//!
//! # Deviations
//! - **SLOG's orderer** is a replicated log like any stream, so that the loss of a region loses no
//!   transaction; in SLOG's own implementation it is not. Pieces wait until the orderer's entry is
//!   chosen, and are then chosen themselves: four trips more than `sloth`.
//! - **The move of a key** (SLOG's remastering) is a transaction of both homes. SLOG puts it only
//!   into the old home's log, and delays transactions that come too early.
//! - **Every server keeps the whole order**: all streams and their merge. Unless the placement
//!   divides copies into shares ([`orthodrome_core::Cluster::divided`], ADR 18), it also has every
//!   value, and runs everything on as many threads as it has workers (ADR 17). The papers partition
//!   each region's copy over machines, and so do shares: [`shares`].
//! - **Every server that takes part in a transaction reads and computes all of it**, even if the
//!   transaction only reads in its share: any of them may have to answer. Calvin's passive
//!   participants do not.
//! - **A stream's voters** are the replicas of one partition, with majorities or with quorum sizes
//!   that the operator sets ([`crate::replication::Quorums`]). In the thesis all regions vote, and
//!   K + 1 of them write. Here machine failures and region failures are not distinguished.
//! - **Servers learn from the sequencer that an entry is durable**, a round trip to the nearest
//!   voters later than the entry. In the thesis, regions acknowledge to all.
//! - **Inside a component** the order follows from names and positions (S7).
//! - Calvin's sequencers in every region collect transactions for 10 ms and take turns. Here one
//!   leader orders them as they arrive.
//!
//! # Not implemented
//! - A change of the placement: streams and homes are fixed for a cluster's epoch, except for moves
//!   of single keys.
//! - Streams remember for every client that ever existed the counter below which it knows the
//!   outcomes. The outcomes themselves are bounded ([`outcomes`]).

pub mod checks;
mod client;
mod fences;
pub mod merge;
mod message;
mod mutations;
pub mod outcomes;
mod placement;
pub mod scheduler;
mod sequencer;
mod server;
pub mod shares;
pub mod state;

use std::time::Duration;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{PartitionId, TxnId};
use orthodrome_core::machine::{self, Protocol};
use orthodrome_core::rng::Rng;
use orthodrome_core::{Limits, Wire as _};

use crate::hosting::{self, size, vary};
use crate::registry::{Guarantee, Registered, Row, protocol_items};
use crate::replication;
pub use client::Client;
pub use message::{
    Chunk, Command, Due, Ended, Home, Image, Log, Msg, Name, Part, Record, Sequenced, StreamImage,
    Turn,
};
pub use mutations::Mutations;
pub use placement::Placement;
pub use server::Server;

/// The deterministic protocols: [`Config::ordering`] decides which.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Deterministic;

/// One log for all transactions.
pub const CALVIN: &str = "calvin";
/// One stream for each region.
pub const SLOTH: &str = "sloth";

/// A stream for each region; one region orders transactions with several homes.
pub const SLOG: &str = "slog";
/// The same, but a separate stream orders transactions with several homes by consensus.
pub const SLOG_CONSENSUS: &str = "slog-consensus";

/// The context of a machine.
type Cx<'a> = machine::Cx<'a, Deterministic>;

/// The streams of a cluster.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ordering {
    /// One stream.
    Global,
    /// One stream for each region that is the primary of any key.
    Regional,
    /// The same, and an orderer orders transactions with several homes before those homes take
    /// them.
    Ordered(Orderer),
}

/// The orderer of transactions with several homes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Orderer {
    /// One of the regions, in its own stream.
    Region,
    /// A separate stream, led where it is near to all.
    Consensus,
}

/// Settings.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// The streams of the cluster.
    pub ordering: Ordering,
    /// The replicated logs, checkpoints and snapshots.
    pub hosting: hosting::Config,
    /// A gateway waits this long for an answer before it asks another server, then twice as long,
    /// and so on.
    pub answer_after: Duration,
    /// A server asks sequencers again for a transaction for which a gateway waits after this time,
    /// then after twice as long, and so on.
    pub resend_after: Duration,
    /// A home forwards a transaction to homes in whose streams it has not appeared for this long
    /// (S6).
    pub forward_after: Duration,
    /// The longest time for which a sequencer holds a transaction with several homes, whatever
    /// clocks say (S1).
    pub hold_max: Duration,
    /// A key is closed to new transactions with several homes while a transaction on it has waited
    /// longer than this (S1).
    pub close_after: Duration,
    /// The most transactions in a stream that have not run. Beyond it, new ones are not admitted,
    /// unless they are in another stream (S1).
    pub waiting_max: usize,
    /// A key moves to a region after this many consecutive transactions on it from that region, the
    /// next time after twice as many, and so on; never if none.
    pub migrate_after: Option<u32>,
    /// A server asks for another share's part of a transaction's reads if it has not arrived after
    /// this time, then after twice as long, and so on.
    pub ask_after: Duration,
    /// The most bytes of parts kept for other servers. Parts that a majority of a share's servers
    /// still needs are kept beyond it.
    pub kept_bytes: usize,
    /// The interval at which a server looks for overdue work.
    pub sweep_interval: Duration,
    /// The most transactions that a server accepts from gateways at a time, and that a sequencer
    /// accepts from servers.
    pub in_flight_max: usize,
    /// The most bytes of these transactions.
    pub in_flight_bytes: usize,
    /// The most bytes of pending transactions at a gateway; beyond it, new ones are refused.
    pub open_bytes: usize,
    /// The most transactions in one entry of a stream.
    pub batch_max: usize,
    /// The most bytes in an entry of a stream, a record of a checkpoint, and a message with several
    /// parts, unless a single transaction has more.
    pub piece_bytes: usize,
    /// How much is remembered of transactions that have run.
    pub outcomes: outcomes::Bounds,
    /// The interval at which servers exchange sums.
    pub compare_interval: Duration,
    /// The number of entries of a stream that are compared together.
    pub compared_entries: u64,
    /// The most entries of a stream that are kept for servers that lag behind.
    pub log_kept: usize,
    /// Mutations, for tests (ADR 35).
    pub mutations: Mutations,
}

/// Rare events.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Note {
    /// A replica answered with older versions than the client knew (R11), and its answer was
    /// ignored.
    BehindClient,
    /// A transaction was submitted twice to one server.
    RepeatedSubmit,
    /// A sequencer received a transaction that it already had.
    RepeatedSequence,
    /// A transaction was twice in one stream; it ran once.
    RepeatedEntry,
    /// A key moved to another region.
    Relocated,
    /// A transaction's turn came when its keys had other homes than it assumed.
    Void,
    /// A transaction had run before this server was asked for it.
    AlreadyRan,
    /// Several transactions waited for each other.
    Component,
    /// A sequencer held a transaction until its time came.
    Held,
    /// A sequencer delayed a transaction because of waiting transactions on its keys.
    Closed,
    /// A home forwarded a transaction.
    Forwarded,
    /// A server asked a sequencer again.
    AskedAgain,
    /// A gateway asked again.
    Resent,
    /// A gateway was asked for the outcome of a transaction.
    Resolved,
    /// Streams exchanged the counters that clients have acknowledged.
    Acknowledged,
    /// A server, a sequencer or a gateway was overloaded.
    Shed,
    /// A client asked for an outcome, or for reads, that are forgotten.
    TooOld,
    /// A server lost the leadership of a stream, and the transactions that it had not proposed.
    Deposed,
    /// Another share's part of a transaction has not arrived, and was requested.
    WantedReads,
    /// A part that another share requested was sent again.
    SentReadsAgain,
    /// A server took another's state.
    SnapshotInstalled,
    /// A server requested the state of another one of its share.
    WantedState,
    /// A piece of that state did not arrive, and was requested again.
    WantedPieceAgain,
    /// A server started from an image whose checkpoint was interrupted.
    CheckpointCutShort,
    /// A membership change was refused.
    ChangeRefused,
    /// A server made a checkpoint.
    Checkpoint,
}

/// Names of timers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Timer {
    /// A timer of a stream's log.
    Replication(PartitionId, replication::Timer),
    /// A sequencer releases a transaction that it held.
    Release(PartitionId),
    /// A server looks for overdue work.
    Sweep,
    /// A gateway waits for an answer.
    Open(TxnId),
}

impl Registered for Deterministic {
    const ROWS: &'static [Row] = &[
        row(
            CALVIN,
            "Calvin (SIGMOD 2012) §2, §3.1, §3.2; as Sloth (Hildred 2023) uses it",
            "2: to the leader of the log, and from there to a majority; read-only the same",
        ),
        row(
            SLOG,
            "SLOG (VLDB 2019) §3, one region orders what has several homes; as Sloth (Hildred 2023) uses it",
            "1 if there is one home and it is near, else up to 4: to the region that orders and to a majority, \
             then to the homes and to a majority; read-only the same",
        ),
        row(
            SLOG_CONSENSUS,
            "SLOG (VLDB 2019) §3, consensus on the order of what has several homes; Sloth §4.1",
            "1 if there is one home and it is near, else up to 4: to the leader of the order and to a majority, \
             then to the homes and to a majority; read-only the same",
        ),
        row(
            SLOTH,
            "Sloth (Hildred 2023) §4",
            "1 if all homes are near, else 2: to the furthest home, and from there to a majority; \
             read-only the same",
        ),
    ];
}

const fn row(name: &'static str, paper: &'static str, round_trips: &'static str) -> Row {
    Row {
        name,
        paper,
        guarantee: Guarantee::StrictSerializable,
        conditions: "strictly serializable always",
        model: "procedures natively; interactive and general by reconnaissance; read-only",
        round_trips,
    }
}

impl Protocol for Deterministic {
    const NAMES: &'static [&'static str] = &[CALVIN, SLOG, SLOG_CONSENSUS, SLOTH];
    const GENERAL: bool = true;
    const STALE_READS: bool = true;
    const SHARES: bool = true;
    const SCANS: bool = true;
    // The order of transactions is the order of logs.
    const NEEDS_CLOCKS: bool = false;
    const MEMBERS: bool = true;

    protocol_items!();

    fn name(config: &Config) -> &'static str {
        match config.ordering {
            Ordering::Global => CALVIN,
            Ordering::Regional => SLOTH,
            Ordering::Ordered(Orderer::Region) => SLOG,
            Ordering::Ordered(Orderer::Consensus) => SLOG_CONSENSUS,
        }
    }

    fn configure(cluster: &Cluster, name: &str) -> Config {
        let round_trip = cluster.topology.rtt_assumed();
        let mut hosting = hosting::Config::for_round_trip(round_trip);
        hosting.replication.followers_act = true;
        Config {
            ordering: match name {
                CALVIN => Ordering::Global,
                SLOG => Ordering::Ordered(Orderer::Region),
                SLOG_CONSENSUS => Ordering::Ordered(Orderer::Consensus),
                _ => Ordering::Regional,
            },
            hosting,
            answer_after: round_trip * 6 + Duration::from_millis(500),
            resend_after: round_trip * 3 + Duration::from_millis(100),
            forward_after: round_trip * 2 + Duration::from_millis(50),
            hold_max: round_trip,
            close_after: round_trip * 3 + Duration::from_millis(50),
            waiting_max: 8_192,
            migrate_after: Some(16),
            ask_after: Duration::from_millis(100),
            kept_bytes: 32 << 20,
            sweep_interval: Duration::from_millis(50),
            in_flight_max: 65_536,
            in_flight_bytes: 128 << 20,
            open_bytes: 64 << 20,
            batch_max: 1_024,
            piece_bytes: 4 << 20,
            outcomes: outcomes::Bounds::default(),
            compare_interval: Duration::from_secs(5),
            compared_entries: 64,
            log_kept: 10_000,
            mutations: Mutations::default(),
        }
    }

    fn limit(config: &mut Config, limits: Limits) -> bool {
        config.piece_bytes = config.piece_bytes.min(limits.batch_bytes() / 2);
        config.hosting.limit(limits);
        true
    }

    fn vary(config: &mut Config, rng: &mut Rng) {
        // A hundredth of the suitable value is less than a round trip: every request is sent more
        // than once.
        let (low, high) = if rng.chance(1, 2) { (1, 20) } else { (20, 150) };
        config.resend_after = vary(config.resend_after, low, high, rng);
        config.forward_after = vary(config.forward_after, low, high, rng);
        let (low, high) = if rng.chance(1, 4) { (1, 20) } else { (20, 150) };
        config.answer_after = vary(config.answer_after, low, high, rng);
        config.hold_max = vary(config.hold_max, 0, 200, rng);
        config.close_after = vary(config.close_after, 5, 200, rng);
        if rng.chance(1, 3) {
            config.waiting_max = size(16, 64, rng);
        }
        config.sweep_interval = vary(config.sweep_interval, 20, 300, rng);
        config.batch_max = size(1, 1_024, rng);
        if rng.chance(1, 8) {
            config.in_flight_max = size(16, 256, rng);
        }
        config.hosting.vary(rng);
        // Workloads of seeds favour no region, so keys move only if few consecutive transactions
        // suffice. A move causes the pending transactions on its key to be sequenced again. With an
        // even smaller number, links that lose packets could not sustain the load.
        if rng.chance(1, 2) {
            config.migrate_after = u32::try_from(size(4, 32, rng)).ok();
        }
        config.ask_after = vary(config.ask_after, 5, 300, rng);
        if rng.chance(1, 3) {
            config.kept_bytes = size(1_000, 100_000, rng);
        }
        if rng.chance(1, 2) {
            config.piece_bytes = size(100, 100_000, rng);
        }
        if rng.chance(1, 8) {
            config.in_flight_bytes = size(10_000, 100_000, rng);
            config.open_bytes = size(1_000, 10_000, rng);
        }
        if rng.chance(1, 8) {
            config.outcomes.reads_bytes = size(100, 10_000, rng);
            config.outcomes.outcomes = size(16, 1_024, rng);
        }
        config.compare_interval = vary(config.compare_interval, 2, 100, rng);
        config.compared_entries = rng.range(1, 64);
    }

    fn record_size(record: &Record) -> usize {
        match record {
            Record::Image(image) => 4 + image.size(),
            Record::Replication(_, record) => 4 + record.size(),
        }
    }
}
