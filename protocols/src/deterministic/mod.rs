//! Deterministic transactions: first ordered, then run everywhere. `calvin`, `slog`, `slog-consensus`, `sloth`.
//!
//! - Joshua Hildred: *Efficient Geo-Distributed Transaction Processing*, MMath thesis, University of
//!   Waterloo 2023; cited as "Sloth".
//! - Alexander Thomson et al.: *Calvin: Fast Distributed Transactions for Partitioned Database Systems*,
//!   SIGMOD 2012, <https://doi.org/10.1145/2213836.2213838>.
//! - Kun Ren, Dennis Li, Daniel J. Abadi: *SLOG: Serializable, Low-latency, Geo-replicated Transactions*,
//!   PVLDB 12(11) 2019, <https://doi.org/10.14778/3342263.3342647>.
//!
//! # The idea
//! A transaction that says beforehand what it reads and writes, and whose writes follow from what it reads,
//! comes to the same result wherever it runs, if what goes before it is the same. So it is put into a
//! log, and every region runs the log by itself; nobody votes, nothing is undone, and the outcome is
//! known where the client is as soon as the transaction has run there. With `calvin` there is one log for
//! all. With the others there is one *stream* for each region, which orders whoever touches keys that have their
//! primary there; a transaction is in the streams of all its *homes*, and every region merges the streams into one order
//! ([`merge`]). A transaction with one home waits for that one alone. What has several homes, the streams of `sloth`
//! order each by itself, and the merge sorts out where they differ. With `slog` one stream orders it first (a region's own, or with
//! `slog-consensus` one more), and the homes take *pieces* of it from there in that order, so that they cannot differ.
//!
//! All are one machine ([`Ordering`]): `calvin` is `sloth` with one home for every key.
//!
//! # Messages
//! | message | from → to | when | § |
//! |---|---|---|---|
//! | `Submit`, `Answer`, `TooOld` | gateway ↔ server | a transaction begins; it has run; it ran too long ago | 4.2.1 |
//! | `Look`, `Found` | gateway ↔ server | a client wants to read before it decides | – |
//! | `Sequence` | server → sequencers | a transaction is to be ordered; it is in one stream and not in another | 4.2.1 |
//! | `AppendEntries`, … | sequencer ↔ all servers | a stream's log | 4.2.7 |
//! | `NotLeader` | server → sender | the sequencer is another | – |
//! | `RemoteReads`, `WantReads`, `ReadsGone`, `Covered` | servers of different shares | what a transaction reads in another share; it has not come; it is forgotten; it may be | Calvin 3.2 |
//! | `WantState`, `StatePiece` | servers of one share | one is too far behind for logs and reads | – |
//! | `Digests` | servers of one share | what their copies came to | – |
//!
//! # Why it is correct
//! - **Only what is chosen is merged** (R9, S2, S3): a stream is a replicated log ([`crate::replication`])
//!   with a leader, its *sequencer*, voters, and all other servers as learners. What one server ran is a
//!   function of prefixes that never change (S4), whoever fails; servers that know more run more.
//! - **A transaction runs once** under its name: a stream ignores one that it holds, until its client
//!   has acknowledged the outcome, and for ever after (R6). So anybody may submit it again: its gateway, another
//!   that was asked what became of it (R1), a server that waits for it, and a home that sees it in one
//!   stream and not in another (S6).
//! - **Timestamps** follow from places in streams and from the versions touched, so that all regions give the
//!   same, and grow along every key. No clock is trusted: they carry no promise about real time.
//! - **Strict serializability**: who begins after a transaction was told comes after it in each stream that
//!   they share, and after whatever had to run before it, for all that was chosen. Read-only transactions
//!   are ordered like others.
//! - **States join** (S3, S8): what a server has run is closed under *goes before*, so that of two servers, each ahead of the
//!   other in some stream, either can take what the other knows (`state.rs`). A server that is behind
//!   by more than logs keep takes the state of whoever leads that stream, however far behind that one is elsewhere.
//! - **Reads of old states** ([`orthodrome_core::txn::Kind::StaleReadOnly`]) take what the nearest server has run, which is closed under *goes
//!   before*; they are no part of strict serializability.
//! - **Interactive and general transactions** look at what the nearest server holds, however old, and are
//!   submitted as *if all that was read still is so, write this*.
//!
//! # Bounded merge (S1)
//! The thesis's merge runs a cycle when it is closed; under contention it never is. Here a transaction with
//! several homes is held until about the time that all of them have it, and taken in the order of those
//! times, so that only late ones close cycles; and while something on one of its keys has waited for
//! long, it is not let into the graph at all, unless it is in another stream already. Both are the
//! sequencers' affair; the merge itself does not care.
//!
//! Besides, no stream takes more than so many transactions at a time that have not run, which bounds a component for certain;
//! every server asserts that bound.
//!
//! # Deviations
//! - **SLOG's orderer** is a replicated log as any stream, so that a region's loss costs no transaction; in SLOG's own
//!   implementation it is not. Pieces wait for it to be chosen, and are chosen themselves: four trips more than `sloth`.
//! - **A key's move** (SLOG's remastering) is a transaction of both homes; SLOG puts it into the old one's log alone and makes
//!   those wait that come too early.
//! - **Every server keeps the whole order**, all streams and their merge. Unless a map divides copies into shares
//!   ([`orthodrome_core::Cluster::divided`], ADR 18), it holds every value as well, and runs everything on as many threads as it has workers
//!   (ADR 17). The papers partition each region's copy over machines, and so do shares: [`shares`].
//! - **All that take part in a transaction read and compute all of it**, also those in whose share it only reads: any of them
//!   may have to answer. Calvin's passive participants do not.
//! - **A stream's voters** are the replicas of one partition, chosen by majority or by the sizes that the
//!   operator gives ([`crate::replication::Quorums`]); the thesis has all regions vote, K + 1 to write. Machine
//!   failures and region failures are the same to it.
//! - **That an entry is durable is learned from its sequencer**, a round trip to the nearest voters later than
//!   the entry; the thesis lets regions acknowledge to all.
//! - **Inside a component** the order follows from names and places (S7).
//! - Calvin's sequencers in every region gather transactions for 10 ms and take turns; here one leader
//!   orders them as they come.
//!
//! # Not implemented
//! - A change of the map: streams and homes are fixed for a cluster's epoch, but for moves of single keys.
//! - Of every client there ever was, streams remember below which counter it knows the outcomes; outcomes themselves are
//!   bounded ([`outcomes`]).

pub mod checks;
mod client;
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
use crate::registry::{Guarantee, Registered, Row};
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

/// A stream for each region, and one region orders transactions with several homes.
pub const SLOG: &str = "slog";
/// The same, ordered by consensus in a stream of its own.
pub const SLOG_CONSENSUS: &str = "slog-consensus";

/// The way out of a machine.
type Cx<'a> = machine::Cx<'a, Deterministic>;

/// Which streams there are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ordering {
    /// One.
    Global,
    /// One for each region that is the primary of anything.
    Regional,
    /// The same, and transactions with several homes are ordered by one before those homes take them.
    Ordered(Orderer),
}

/// Who orders transactions with several homes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Orderer {
    /// One of the regions, in its own stream.
    Region,
    /// A stream of its own, led where it is near to all.
    Consensus,
}

/// Settings.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// Which streams there are.
    pub ordering: Ordering,
    /// The replicated logs, checkpoints and snapshots.
    pub hosting: hosting::Config,
    /// A gateway waits this long for an answer before it asks another server, then twice as long, …
    pub answer_after: Duration,
    /// A server asks sequencers again for a transaction that a gateway waits for after this time, then
    /// after twice, …
    pub resend_after: Duration,
    /// A home forwards a transaction to those in whose streams it has not appeared for so long (S6).
    pub forward_after: Duration,
    /// A sequencer holds a transaction with several homes at most this long, whatever clocks say (S1).
    pub hold_max: Duration,
    /// A key is closed to new transactions with several homes while something on it waits longer (S1).
    pub close_after: Duration,
    /// No more transactions that have not run are let into a stream at a time, unless they are in
    /// another (S1).
    pub waiting_max: usize,
    /// A key moves to the region in which this many transactions in a row on it began, the next time after twice as
    /// many, and so on; never if none.
    pub migrate_after: Option<u32>,
    /// A server whose part of a transaction's reads has not come from another share asks for it after this time, then
    /// after twice, …
    pub ask_after: Duration,
    /// Parts that others may ask for are kept as long as they are no more bytes together, unless a majority of the servers
    /// of a share still needs them.
    pub kept_bytes: usize,
    /// How often a server looks for work that is overdue.
    pub sweep_interval: Duration,
    /// A server takes no more transactions of gateways at once, nor does a sequencer of servers.
    pub in_flight_max: usize,
    /// Nor more bytes of transactions than this.
    pub in_flight_bytes: usize,
    /// A gateway has no more bytes of transactions under way; it refuses what comes then.
    pub open_bytes: usize,
    /// Transactions in one entry of a stream.
    pub batch_max: usize,
    /// An entry of a stream, a record of a checkpoint, and a message of several parts have no more bytes than this,
    /// unless one transaction alone has.
    pub piece_bytes: usize,
    /// What is remembered of transactions that have run.
    pub outcomes: outcomes::Bounds,
    /// How often servers tell each other what their copies came to.
    pub compare_interval: Duration,
    /// Entries of a stream that are compared together.
    pub compared_entries: u64,
    /// Entries of a stream that are kept for servers that are behind.
    pub log_kept: usize,
    /// Deliberate mistakes, for tests (ADR 35).
    pub mutations: Mutations,
}

/// Rare events.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Note {
    /// A replica answered with less than the client knew (R11), and was not listened to.
    BehindClient,
    /// A transaction was submitted twice to one server.
    RepeatedSubmit,
    /// A sequencer was asked for what it has.
    RepeatedSequence,
    /// A transaction was twice in one stream; it runs once.
    RepeatedEntry,
    /// A key moved to another region.
    Relocated,
    /// A transaction's turn came when its keys were not where it supposed.
    Void,
    /// A transaction had run before this server was asked for it.
    AlreadyRan,
    /// Several transactions waited for each other.
    Component,
    /// A sequencer held a transaction until its time.
    Held,
    /// A sequencer kept a transaction out because of what waits on its keys.
    Closed,
    /// A home forwarded a transaction.
    Forwarded,
    /// A server asked a sequencer again.
    AskedAgain,
    /// A gateway asked again.
    Resent,
    /// A gateway was asked what became of a transaction.
    Resolved,
    /// Streams told each other what clients know.
    Acknowledged,
    /// A server, a sequencer or a gateway had too much to do.
    Shed,
    /// Somebody asked for an outcome that is forgotten, or what a transaction read.
    TooOld,
    /// A server lost the lead of a stream, and with it what it had not proposed.
    Deposed,
    /// What other shares hold of a transaction has not come, and was asked for.
    WantedReads,
    /// What another share wanted was sent again.
    SentReadsAgain,
    /// A server took another's state.
    SnapshotInstalled,
    /// A server started from an image whose checkpoint was cut short.
    CheckpointCutShort,
    /// A membership change was refused.
    ChangeRefused,
    /// A server made a checkpoint.
    Checkpoint,
}

/// Names of timers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Timer {
    /// Of a stream's log.
    Replication(PartitionId, replication::Timer),
    /// A sequencer takes what it held.
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
    // The order of transactions is the order of logs.
    const NEEDS_CLOCKS: bool = false;
    const MEMBERS: bool = true;

    type Config = Config;
    type Msg = Msg;
    type Timer = Timer;
    type Record = Record;
    type Note = Note;
    type Client = Client;
    type Server = Server;

    fn name(config: &Config) -> &'static str {
        match config.ordering {
            Ordering::Global => CALVIN,
            Ordering::Regional => SLOTH,
            Ordering::Ordered(Orderer::Region) => SLOG,
            Ordering::Ordered(Orderer::Consensus) => SLOG_CONSENSUS,
        }
    }

    fn mutations(name: &str) -> &'static [&'static str] {
        mutations::names(name)
    }

    fn configure(cluster: &Cluster, name: &str) -> Config {
        let round_trip = cluster.topology.rtt_max().max(Duration::from_millis(20));
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

    fn enable_mutation(config: &mut Config, mutation: &str) {
        mutations::enable(config, mutation);
    }

    fn vary(config: &mut Config, rng: &mut Rng) {
        // A hundredth of what suits is less than a round trip: everything is asked more than once.
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
        // Workloads of seeds favour no region: keys move only if few transactions in a row are enough. A move has what is
        // under way on its key sequenced again, so that fewer still are more than links can carry that lose packets.
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
