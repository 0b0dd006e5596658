//! Ocean Vista: visibility by gossip.
//!
//! Hua Fan, Wojciech Golab: *Ocean Vista: Gossip-Based Visibility Control for Speedy
//! Geo-Distributed Transactions*, PVLDB 12(11), 2019, <https://doi.org/10.14778/3342263.3342627>.
//!
//! # The idea
//!
//! A transaction that says beforehand what it writes need not wait for others: it is stored whole,
//! as a *functor*, under a version number of its own at every replica of what it writes (S-phase),
//! and its place in the order is its number. Nobody looks at it before everything with a lower
//! number is stored or given up as well. Which number that holds of, the *Vwatermark*, is gossiped:
//! each server says below which number everything that it coordinates is decided, gossipers take
//! the least of their region, exchange that with other regions, and take the least of all. Below
//! the Vwatermark functors are computed from what lies just below them, on any server, all with the
//! same result (E-phase). The *Rwatermark* of a partition is the same for "every replica has it":
//! below it, one replica is asked.
//!
//! # Messages
//! | message | from → to | when | § |
//! |---|---|---|---|
//! | `Submit`, `Answer`, `Declined` | gateway ↔ coordinator | a transaction begins, and ends | 3.1 |
//! | `Look`, `Found` | gateway ↔ coordinator | a caller wants to read before it decides | 3.4 |
//! | `Write`, `Written`, `Refused` | coordinator ↔ replicas | S-phase | 3.1, 4.1 |
//! | `Finalize`, `Confirm` | coordinator ↔ replicas | f + 1 have stored it | 4.1 |
//! | `Abort`, `Aborted` | coordinator ↔ replicas | it cannot be stored | 4.1 |
//! | `Get`, `Got`, `NotReady` | executor ↔ replicas | E-phase, looks | 4.3 |
//! | `Put`, `Executed` | executor → replicas, coordinator | it is computed | 3.1 |
//! | `Gossip` | server ↔ gossipers | every 25 ms, or sooner | 3.3, 4.2 |
//! | `Directory` | server ↔ voters of the directory | leases, members | 5.1 |
//! | `Takeover`, `Intent` | whoever takes over ↔ replicas; coordinator → backup | a coordinator is gone | 5.2, 5.4 |
//! | `Missing`, `Have`, `Pull`, `Pulled`, `Scan`, `Scanned` | coordinator, peers ↔ replica | it lacks something | 5.3 |
//! | `Inquire`, `Query`, `Known` | gateway → coordinator ↔ replicas | a gateway lost track | – |
//! | `Digests` | replica → replica | what settled versions came to ([`checks`]) | – |
//!
//! # Deviations
//! - **Reading above the Rwatermark** is by any f + 1 replicas that show tombstones (V1–V3).
//! - **Membership is a replicated log** among the servers of the first partition ([`directory`]),
//!   with leases: nobody assigns a number without one, and nobody is replaced before it has run out
//!   (V6). Its epochs keep reports of different members apart (V8).
//! - **One way to take over** whatever failed ([`takeover`]): promises of f + 1 replicas of every
//!   partition, one pure decision (V10). A restarted coordinator is a failed one. The backup (§5.2)
//!   only keeps what was under way from being given up; see ADR 12.
//! - **A node answers for its replicas with one voice**: one `Write` and one answer, whatever it
//!   holds.
//! - **Both paths of a write race**: FINALIZE goes out once f + 1 have stored it.
//! - **A transaction's name belongs to one number**: a replica that knows it under one refuses
//!   others (R1, R6).
//! - **Versions are collected below what every server has computed** (V11).
//!
//! # Not implemented
//! - Version ranges with members of their own (§5.3): a new machine with an empty disk takes the
//!   place of one that is gone, see ADR 15; an operator's order to place a partition elsewhere is
//!   refused.

mod admission;
pub mod checks;
mod client;
mod control;
mod coordinator;
pub mod directory;
#[cfg(test)]
mod directory_tests;
mod execution;
pub mod gossiper;
mod inquiry;
mod message;
#[cfg(test)]
mod model;
mod mutations;
pub mod reading;
mod recovery;
mod replica;
mod server;
mod state;
mod sync;
pub mod takeover;
#[cfg(test)]
mod takeover_model;
mod tid;
pub mod watermark;

pub use client::Client;
pub use coordinator::RECENT_BYTES;
pub use message::{
    Ask, Body, Change, Functor, Holding, Knowledge, Msg, Output, Path, Reason, Record, Refusal,
    Rest, Seen, Shown, View, What,
};
pub use mutations::Mutations;
pub use server::Server;
pub use state::{Fate, Image, Name, Phase, State};
pub use tid::Tids;

use crate::hosting::{size, vary};
use crate::registry::{Guarantee, Registered, Row, protocol_items};

use std::time::Duration;

use orthodrome_core::Wire as _;
use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{NodeId, TxnId};
use orthodrome_core::limits::Limits;
use orthodrome_core::machine::Protocol;
use orthodrome_core::rng::Rng;
use orthodrome_core::store::PIECE_BYTES;

/// Ocean Vista.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OceanVista;

/// Settings of Ocean Vista.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// Reports and gossip are at most this far apart (§6.1: 25 ms).
    pub gossip_interval: Duration,
    /// So many servers of each region are gossipers.
    pub gossipers: usize,
    /// A gateway waits this long for an answer before it asks again, then twice as long, …
    pub answer_after: Duration,
    /// Servers ask each other again after this time without an answer, then after twice, …
    pub resend_after: Duration,
    /// How often a server looks for work that is overdue.
    pub sweep_interval: Duration,
    /// A functor that was visible for so long is computed by whoever holds it.
    pub resolve_after: Duration,
    /// Version numbers further ahead of a replica's clock are refused (R8).
    pub clock_ahead_max: Duration,
    /// What an interactive transaction sees first is at most this much older than what is visible.
    pub recon_staleness: Duration,
    /// While a transaction takes longer to be stored, its coordinator takes fewer at once.
    pub storing_max: Duration,
    /// A coordinator takes no more transactions at once.
    pub in_flight_max: usize,
    /// Nor while what it took is so long that is not visible yet: whoever takes over from it has to
    /// be told all of that, and tells which of it survives in one message.
    pub in_flight_bytes_max: usize,
    /// A coordinator takes no transactions while the Vwatermark is further behind its clock (§3.6,
    /// §5.2): what it took would wait even longer.
    pub lag_max: Duration,
    /// Outcomes are kept this long for a client that acknowledges nothing any more.
    pub retention: Duration,
    /// A node makes a checkpoint after this many bytes of records, or after as many as its last
    /// checkpoint took if those are more.
    pub checkpoint_bytes: usize,
    /// Versions are kept for so long after they were replaced, for callers that think.
    pub version_retention: Duration,
    /// Keys per piece of a copy of what is settled.
    pub chunk_keys: usize,
    /// Bytes per piece of a copy, at most: over slow links it has fewer.
    pub piece_bytes: usize,
    /// A record of names, or of a checkpoint, has about so many bytes at most.
    pub batch_bytes: usize,
    /// A transaction that reads more than this, or reads and writes more, aborts: what it comes to
    /// has to fit into one message.
    pub read_bytes_max: usize,
    /// How often replicas exchange digests of their settled versions.
    pub compare_interval: Duration,
    /// Versions of so long a time are compared at once.
    pub compared_span: Duration,
    /// Settings of the directory.
    pub directory: directory::Config,
    /// Deliberate mistakes, for tests (ADR 35).
    pub mutations: Mutations,
}

/// Rare events.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Note {
    /// A replica answered with less than the client knew (R11), and was not listened to.
    BehindClient,
    /// A version number too far ahead was refused.
    FarFuture,
    /// A transaction was refused whose name is known.
    KnownName,
    /// A Write came below the watermark.
    LateWrite,
    /// A message came of a ballot that is over.
    Outvoted,
    /// A FINALIZE came to a replica that does not hold the transaction.
    FinalizeUnheld,
    /// A replica promised never to accept a transaction.
    Tombstone,
    /// A replica was asked about a transaction that it had never heard of.
    RefusedUnknown,
    /// A replica was asked about a transaction whose outcome it had forgotten.
    Forgotten,
    /// A replica was asked for what it had collected.
    Collected,
    /// A replica's answer went in pieces.
    AnswerCut,
    /// A transaction was to read more than one may.
    ReadTooLarge,
    /// A reader had to look further down.
    ReadLower,
    /// A functor was visible for too long and is computed by its holder.
    Overdue,
    /// A transaction was submitted twice to one coordinator.
    RepeatedSubmit,
    /// A coordinator had too much to do.
    Shed,
    /// A coordinator aborted what it could not store.
    AbortedStoring,
    /// A replica was told that it lacks visible versions.
    Straggler,
    /// A replica pulled what it lacked.
    Pulled,
    /// A server joined.
    Joined,
    /// A life of a server was ended.
    Ended,
    /// A server set out to be complete.
    CaughtUp,
    /// What a server needs of a partition it had copied in an earlier attempt.
    CopyResumed,
    /// A server took over from another.
    Takeover,
    /// A transaction was written in the name of a coordinator that is gone.
    Rewritten,
    /// A replica dropped what did not survive its coordinator.
    Void,
    /// A replica took in a decided transaction from its peers.
    Adopted,
    /// A server asked what became of a transaction.
    Inquired,
    /// A gateway was asked again for an outcome.
    Resolved,
    /// A server declined what a gateway wanted.
    Declined,
    /// A request was sent again.
    Resent,
    /// An operator's order was refused.
    OrderRefused,
    /// A node made a checkpoint.
    Checkpoint,
}

/// Names of timers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Timer {
    /// A server reports.
    Report,
    /// A gossiper exchanges watermarks.
    Gossip,
    /// A server looks for overdue work.
    Sweep,
    /// A server asks for its lease.
    Ask,
    /// A voter of the directory has something to do.
    Directory(directory::Timer),
    /// A gateway waits for an answer.
    Open(TxnId),
}

/// Its name.
pub const NAME: &str = "ocean-vista";

impl Registered for OceanVista {
    const ROWS: &'static [Row] = &[Row {
        name: NAME,
        paper: "Ocean Vista (VLDB 2019) §3, §4, §5",
        guarantee: Guarantee::StrictSerializable,
        conditions: "strictly serializable always",
        model: "procedures natively; interactive and general by reconnaissance; read-only",
        round_trips: "1 to store, and up to 1 more for watermarks; read-only at most 1",
    }];
}

impl Protocol for OceanVista {
    const SCANS: bool = true;
    const NAMES: &'static [&'static str] = &[NAME];
    const GENERAL: bool = true;
    // Versions of a key are computed one after another, each from the last, over the wide area.
    const QUEUES: bool = true;
    const LAGS: bool = true;
    // Watermarks decide what is visible; clocks only choose timestamps near each other.
    const NEEDS_CLOCKS: bool = false;

    protocol_items!();

    fn name(_: &Config) -> &'static str {
        NAME
    }

    fn replaceable(cluster: &Cluster) -> Vec<NodeId> {
        // What voters of the directory promised nobody else knows.
        let voters = directory::voters(cluster);
        let servers = cluster.servers().map(|server| server.id);
        servers.filter(|server| !voters.contains(server)).collect()
    }

    fn configure(cluster: &Cluster, _: &str) -> Config {
        let round_trip = cluster.topology.rtt_assumed();
        Config {
            gossip_interval: Duration::from_millis(25),
            gossipers: 2,
            answer_after: round_trip * 6 + Duration::from_millis(500),
            resend_after: round_trip * 2 + Duration::from_millis(100),
            sweep_interval: Duration::from_millis(100),
            resolve_after: round_trip * 3 + Duration::from_millis(200),
            clock_ahead_max: Duration::from_secs(3),
            recon_staleness: Duration::from_secs(1),
            storing_max: round_trip * 3 + Duration::from_millis(250),
            in_flight_max: 65_536,
            in_flight_bytes_max: 48 << 20,
            // Longer than it takes to replace a server, even the one that leads the directory.
            lag_max: round_trip * 32 + Duration::from_secs(1),
            retention: Duration::from_secs(600),
            checkpoint_bytes: 16 << 20,
            version_retention: Duration::from_secs(10),
            chunk_keys: 1_000,
            piece_bytes: PIECE_BYTES,
            batch_bytes: 1 << 20,
            read_bytes_max: 12 << 20,
            compare_interval: Duration::from_secs(5),
            compared_span: Duration::from_secs(1),
            directory: directory::Config::for_round_trip(round_trip),
            mutations: Mutations::default(),
        }
    }

    fn vary(config: &mut Config, rng: &mut Rng) {
        // A hundredth of what suits is less than a round trip: everything is asked more than once,
        // and gateways inquire about what is being stored.
        let (low, high) = if rng.chance(1, 2) { (1, 20) } else { (20, 150) };
        config.resend_after = vary(config.resend_after, low, high, rng);
        let (low, high) = if rng.chance(1, 4) { (1, 20) } else { (20, 150) };
        config.answer_after = vary(config.answer_after, low, high, rng);
        config.gossip_interval = vary(config.gossip_interval, 20, 300, rng);
        config.gossipers = size(1, 3, rng);
        config.sweep_interval = vary(config.sweep_interval, 10, 150, rng);
        config.resolve_after = vary(config.resolve_after, 5, 150, rng);
        config.recon_staleness = vary(config.recon_staleness, 1, 150, rng);
        config.lag_max = vary(config.lag_max, 20, 150, rng);
        config.version_retention = vary(config.version_retention, 1, 100, rng);
        config.checkpoint_bytes = size(10_000, 16 << 20, rng);
        // One key a piece would take minutes for some hundred keys, at a round trip each.
        config.chunk_keys = size(8, 1_000, rng);
        if rng.chance(1, 4) {
            // Clocks that are a little fast abort.
            config.clock_ahead_max = Duration::from_millis(rng.range(1, 200));
        }
        if rng.chance(1, 8) {
            config.in_flight_max = size(1, 64, rng);
        }
        let lease = vary(config.directory.lease, 75, 150, rng);
        config.directory = directory::Config::for_round_trip(lease / 6);
        config.piece_bytes = size(32_000, 1 << 20, rng);
        if rng.chance(1, 8) {
            config.in_flight_bytes_max = size(1_000, 100_000, rng);
        }
        config.compare_interval = vary(config.compare_interval, 2, 100, rng);
        config.compared_span = vary(config.compared_span, 5, 100, rng);
    }

    fn limit(config: &mut Config, limits: Limits) -> bool {
        let Limits { message_bytes, .. } = limits;
        config.piece_bytes = config.piece_bytes.min(limits.piece_bytes());
        config.batch_bytes = config.batch_bytes.min(limits.batch_bytes());
        // Beside what it read, such a message has little.
        config.read_bytes_max = config.read_bytes_max.min(message_bytes - message_bytes / 8);
        // What of it survives is told in one message, at a third of the size or less.
        config.in_flight_bytes_max = config.in_flight_bytes_max.min(message_bytes * 3);
        config.directory.replication.limit(limits);
        true
    }

    fn record_size(record: &Record) -> usize {
        record.size()
    }
}
