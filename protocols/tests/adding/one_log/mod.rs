//! One log: the example of `docs/adding-a-protocol.md`. It is a whole protocol, as small as one can
//! be that recovers and keeps a promise. No program ships it.
//!
//! # The idea
//!
//! All data belongs to the group of partition 0, whatever the placement says. A gateway reads at
//! the group's leader, runs the transaction, and asks the leader to commit its writes, with the
//! versions that it read. If every version is still the newest and no pending entry writes one of
//! the keys, the leader appends the writes to the log, and otherwise an abort. The transaction
//! takes effect when its entry is applied. So the order of the log is the serial order.
//!
//! # Messages
//! | message | from → to | when |
//! |---|---|---|
//! | `Read`, `Values` | gateway ↔ leader | a transaction begins |
//! | `Commit` | gateway → leader | the gateway has run it |
//! | `Resolve` | gateway → leader | its caller does not know its outcome |
//! | `Ended` | leader → gateway | its entry is chosen |
//! | `NotLeader`, `Members` | server → sender | leadership has moved; others vote than at first |
//! | `Log` | between replicas | the replicated log |
//!
//! # Why it is correct
//! - **The first entry of a transaction is the decision.** Later ones find its outcome, which is
//!   kept until its client acknowledges it (R6). So retries and new leaders cannot run it twice. A
//!   read-only transaction may run twice, and no outcome of it is kept.
//! - **The leader knows every entry before its own:** it serves when all of earlier leaders are
//!   applied, and its own are applied or pending. A leader that was deposed gets no entry chosen,
//!   so what it reads and decides does no harm.
//! - **The decision is in the entry, not computed from the data when it is applied:** the data of a
//!   snapshot may be newer than its state, so replicas would decide differently.
//! - **Nobody hears of an outcome whose entry is not chosen**, also not of an abort: the request
//!   may arrive once more.
//! - **An unknown transaction is refused by an entry** before anybody hears that it has aborted
//!   (R1): a commit request that is still on its way comes too late.
//! - Entries of one log are applied one after the other, so real time agrees with their order.
//!
//! # Not implemented
//! - Guards of procedures are judged by the values read, without an entry: a deposed leader's old
//!   values may make one fail that would hold.
//! - Outcomes of clients that never acknowledge stay for ever.

mod client;
mod message;
mod server;

use std::time::Duration;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{PartitionId, TxnId};
use orthodrome_core::limits::Limits;
use orthodrome_core::machine::Protocol;
use orthodrome_core::rng::Rng;
use orthodrome_core::wire::Wire;
use orthodrome_protocols::registry::{Guarantee, Registered, Row};
use orthodrome_protocols::{hosting, replication};

pub use client::Client;
pub use message::{Msg, Record};
pub use server::Server;

/// The name of the protocol.
pub const NAME: &str = "one-log";

/// The group that has everything.
const GROUP: PartitionId = PartitionId(0);

/// One log for everything.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OneLog;

/// Settings.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// The replicated log, checkpoints and snapshots.
    pub hosting: hosting::Config,
    /// A gateway asks again after this long without an answer.
    pub resend_after: Duration,
    /// Tests only: an unsafe variant, one of [`MUTATIONS`].
    pub mutation: Option<&'static str>,
}

/// Unsafe variants: versions are not compared (R3); outcomes are not remembered (R6).
const MUTATIONS: &[&str] = &["R3", "R6"];

/// Rare events.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Note {
    /// A gateway asked again.
    Resent,
    /// A leader was asked to commit what is in the log already.
    Repeated,
    /// An unknown transaction was refused.
    Refused,
    /// A leader answered with less than the client knew (R11).
    BehindClient,
    /// Of the replicas.
    Hosting(hosting::Note),
}

impl From<hosting::Note> for Note {
    fn from(note: hosting::Note) -> Self {
        Self::Hosting(note)
    }
}

/// Names of timers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Timer {
    /// Of a partition's replicated log.
    Log(PartitionId, replication::Timer),
    /// A gateway asks again about a transaction.
    Resend(TxnId),
}

impl Registered for OneLog {
    const CAUGHT_WITHIN: &'static [(&'static str, &'static str, u64)] =
        &[(NAME, "R3", 50), (NAME, "R6", 50)];
    const ROWS: &'static [Row] = &[Row {
        name: NAME,
        paper: "none: the example of docs/adding-a-protocol.md",
        guarantee: Guarantee::StrictSerializable,
        conditions: "always",
        model: "interactive with fixed sets (2FI), procedures, read-only",
        round_trips: "3",
    }];
}

impl Protocol for OneLog {
    const NAMES: &'static [&'static str] = &[NAME];
    const NEEDS_CLOCKS: bool = false;
    const MEMBERS: bool = true;

    const FORGETS_DELETIONS: bool = true;
    type Config = Config;
    type Msg = Msg;
    type Timer = Timer;
    type Record = Record;
    type Note = Note;
    type Client = Client;
    type Server = Server;

    fn name(_: &Config) -> &'static str {
        NAME
    }

    fn mutations(_: &str) -> &'static [&'static str] {
        MUTATIONS
    }

    fn configure(cluster: &Cluster, _: &str) -> Config {
        let round_trip = cluster.topology.rtt_assumed();
        let mut hosting = hosting::Config::for_round_trip(round_trip);
        // Most groups have no traffic, and a follower that starts again hears nothing with the next
        // entry.
        hosting.replication.followers_act = true;
        Config { hosting, resend_after: round_trip * 4, mutation: None }
    }

    fn enable_mutation(config: &mut Config, mutation: &str) {
        config.mutation = MUTATIONS.iter().copied().find(|known| *known == mutation);
        assert!(config.mutation.is_some(), "{mutation} is none of {MUTATIONS:?}");
    }

    fn vary(config: &mut Config, rng: &mut Rng) {
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
