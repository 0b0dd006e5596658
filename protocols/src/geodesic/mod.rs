//! Geodesic: one wide-area round trip to a majority, and waiting in place of aborts.
//!
//! A protocol of this project; there is no paper. `docs/protocols/geodesic.md` argues why it is
//! correct, the crate `model/` checks the argument, and `docs/pitfalls.md` lists its rules, D1 to D18.
//!
//! # The idea
//! All transactions take effect in the order of (F, id). The gateway gives a transaction a timestamp
//! t: its clock plus the largest predicted delay. For each partition it names a pair of replicas: h,
//! which is near, and y. h stamps the transaction and forwards it to y; y stamps it and, when its
//! clock has passed the stamp, closes what the transaction reads: no writer gets a stamp at or below
//! any more. h records the stamp of y as the decision. F is the largest decision of all partitions.
//! A replica that has closed up to F tells what the transaction reads as soon as every predecessor
//! that it knows of has ended, or proved to be none. With the answers of f + 1 replicas, everybody who
//! asks computes the same result from the same text. So contention makes transactions wait, and a
//! predecessor's finality depends on its own partitions only: nobody waits in a cycle.
//!
//! # Messages
//! | message | from → to | when |
//! |---|---|---|
//! | `Begin` | gateway → h of each participant; in direct mode all replicas | a transaction begins |
//! | `Stamped` | replica → gateway | in direct mode: its stamp is durable |
//! | `Forward`, `Ack` | h ↔ y | the stamp of h is durable; y has closed |
//! | `Settle`, `Settled` | h ↔ all replicas | f ≥ 2: too few gave the largest stamp (D11) |
//! | `Decided` | h → gateway | the decision is durable |
//! | `Observed` | h, y → gateway; later also others | closed up to F, and no predecessor is open |
//! | `Store`, `Stored` | coordinator ↔ replicas of the register | an interactive transaction's caller has decided (D16) |
//! | `Commit` | coordinator → replicas | F is known, and a partition decided less or was recovered |
//! | `Apply`, `Applied` | coordinator ↔ all replicas | what came of it |
//! | `Forget` | coordinator → all replicas | enough have applied it, and the client knows |
//! | `Fetch`, `Fetched` | replica ↔ its peers | it missed an end that everybody has forgotten |
//! | `Recover`, `Promised` | recovery coordinator ↔ all replicas | somebody waited for too long |
//! | `Propose`, `Accepted` | recovery coordinator ↔ all replicas | it has chosen |
//! | `Read`, `ReadResult` | gateway ↔ nearest replica | an interactive transaction begins |
//! | `ReadOnly`, `ReadOnlyResult` | gateway ↔ f + 1 replicas | a read-only transaction |
//! | `Inquire`, `Driving` | replica ↔ gateway | a transaction is old: does anybody look after it? |
//! | `Gossip` | replica → its peers | now and then: what is settled |
//! | `Hint` | h → replicas that are not named | what a transaction may write |
//! | `Blocked` | h, y → gateway | closed up to F, and predecessors are open |
//! | `Follow`, `Foretold` | gateway ↔ gateway of a predecessor | what does it write? |
//! | `Ping`, `Pong` | gateway ↔ server that did not answer | until it answers |
//! | `Rejoin`, `Known` | replica with a new disk ↔ its peers | it asks what they know of transactions |
//! | `Copy`, `Copied` | replica with a new disk ↔ its peers | it copies their data |
//! | `Several` | any → any | one node has more than one message for another one within one step |
//!
//! # Direct mode
//! Where all three replicas of a partition are nearer than the way through h and y and back, the gateway
//! gives the transaction to all of them. If they stamp it alike, that is the decision, and nobody waits
//! for h (D9). The rest goes on as without: h decides the same, or what the stamps left open. This takes
//! more messages. So where replicas are at hand h is *patient*: it does nothing unless a stamp was above
//! the timestamp, or the gateway asks again. Elsewhere gateways that begin many transactions do without.
//!
//! # What is sharper here than in the argument
//! - **Only what is read is closed, and only writers are raised.** The argument lets all transactions
//!   of a partition conflict. Versions are ordered by (F, id), so a blind write needs no predecessors,
//!   and two readers do not conflict.
//! - **A closer tells values, not names of predecessors.** It answers when all predecessors that it
//!   knows of have ended or turned out to be none. The newest versions of f + 1 such answers are what
//!   D12 wants: a predecessor is known to one of them.
//! - **Closings are not written one by one.** They lie below a ceiling that is on disk; after a restart
//!   everything is closed up to the ceiling (D1).
//! - **Large transactions wait in line.** A gateway begins so many bytes of them at once, and no more:
//!   what overflows the queue of a link is lost, and what is sent again lengthens it. One that waits
//!   has no timestamp yet, so nobody waits for it. Whoever takes over what is large does the same, and
//!   all wait for answers as long as what is under way may take.
//! - **A recovery without the text refuses** unless an answer has the text. A gateway that is asked
//!   what became of a transaction, and knows only its keys, recovers so.
//!
//! # State
//! A replica keeps for each transaction: its text, its stamp, the highest promise, the accepted value
//! with its ballot (the record of h has ballot 0), F, and how it ended. When f + 1 replicas of every
//! participant have applied it and its client knows, all forget it (R6). Old versions go below the
//! least *mark* of the replicas: nothing unfinished is, or ever will be, below a replica's mark.
//!
//! # Interactive transactions
//! Their place is agreed on while the caller reads nearby and decides. What it writes goes to a
//! *register*: the replicas of the participant whose majority is nearest. It counts if the caller had
//! seen the versions that are there at (F, id), and f + 1 replicas have stored it; otherwise the attempt
//! aborts. The next attempt does not read ahead of its turn, so contention aborts at most one attempt.
//! The ballots of the register are those of the slot at the same partition.
//!
//! # Timestamps
//! Two transactions that write one key never have one timestamp: whoever makes a timestamp puts its node
//! into the lowest twelve bits, and makes none twice. (F, id) is therefore the order of F.
//!
//! # Not implemented
//! - Read leases; raises by priority: instead, low priority waits at its gateway for most of
//!   the time that others stand in line for its keys (`lines`).
//! - Repair of a stale interactive value within its attempt: callers are told what they read once.
//! - General transactions, whose keys are not declared; changes of members.

mod choose;
mod client;
mod direct;
mod drive;
mod early;
mod excess;
mod lines;
mod members;
mod message;
mod mutations;
mod naming;
mod outbox;
mod pending;
mod per_second;
mod replica;
mod server;
mod state;
mod under_way;

pub use choose::{Choice, choose};
pub use client::Client;
pub use message::{
    Answer, Ballot, Change, Foretold, Kind, Msg, Output, Predecessor, Record, Side, Stamp, Text,
    Value,
};
pub use mutations::Mutations;
pub use server::Server;
pub use state::{Entry, State};

use std::time::Duration;

use orthodrome_core::Wire as _;
use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{NodeId, PartitionId, TxnId};
use orthodrome_core::limits::Limits;
use orthodrome_core::machine::Protocol;
use orthodrome_core::rng::Rng;

use crate::registry::{Guarantee, Registered, Row};

/// Geodesic.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geodesic;

/// Settings of Geodesic.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// A gateway recovers a slot that is not decided this long after one and a half of its round trips.
    pub slack: Duration,
    /// Whoever asked asks again after this time without an answer, then after twice, …
    pub resend_after: Duration,
    /// A replica asks the gateway of a transaction that has not ended after this time.
    pub takeover_after: Duration,
    /// A gateway that does not answer within this time has lost it; replicas take turns, this far apart.
    pub takeover_step: Duration,
    /// How often a replica looks for work that is overdue.
    pub sweep_interval: Duration,
    /// How often replicas tell each other their marks.
    pub gossip_interval: Duration,
    /// Marks of a replica that was silent for so long are not waited for.
    pub absence_after: Duration,
    /// How often a gateway asks a server that did not answer whether it is there.
    pub ping_interval: Duration,
    /// Gateways collect for so long what may be forgotten.
    pub flush_interval: Duration,
    /// How often an end is sent again before f + 1 replicas of each participant are enough.
    pub spread_tries: u32,
    /// Timestamps further ahead of a replica's clock are refused (R8).
    pub clock_ahead_max: Duration,
    /// How far ahead of a closing the ceiling is.
    pub ceiling_ahead: Duration,
    /// Delays measured within this time count.
    pub delay_window: Duration,
    /// An estimate of a delay is made anew after this time.
    pub delay_refresh: Duration,
    /// Outcomes are kept this long for a client that acknowledges nothing any more.
    pub retention: Duration,
    /// Bytes of a partition's transactions over which only the outcomes are kept for clients that may
    /// ask, and again so many bytes of outcomes.
    pub kept_bytes: usize,
    /// Transactions that callers of one gateway may have open.
    pub open_max: usize,
    /// How many transactions of other gateways may follow one transaction. Further ones wait for the
    /// replicas.
    pub followers_max: usize,
    /// Bytes of large transactions that one node may begin or recover at once, for one receiver.
    /// Further large ones wait.
    pub under_way_bytes_max: usize,
    /// So long a mebibyte may be on its way before anybody takes it for lost.
    pub per_mebibyte: Duration,
    /// A node makes a checkpoint after this many bytes of records, or after as many as its last
    /// checkpoint took if those are more.
    pub checkpoint_bytes: usize,
    /// Versions that are not the newest of their key are kept for this long, at least.
    pub version_retention: Duration,
    /// Bytes per part of an answer or of a checkpoint.
    pub piece_bytes: usize,
    /// Bytes that one transaction may read.
    pub read_bytes_max: usize,
    /// When gateways give transactions to all replicas of a partition themselves.
    pub direct: DirectUse,
    /// A gateway that begins more transactions than this in a second does not, unless h is patient.
    pub direct_rate_max: u32,
    /// h is patient where all replicas answer within this time.
    pub patience_max: Duration,
    /// A server that sends a gateway more messages than this in a second keeps back those that nobody waits
    /// for, until it sends others.
    pub late_from: u32,
    /// For so long at most.
    pub late_max: Duration,
    /// Deliberate mistakes, for tests (ADR 35).
    pub mutations: Mutations,
}

/// When gateways use direct mode (D9).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DirectUse {
    /// Where that is faster.
    Nearer,
    /// Wherever three replicas are well: for tests.
    Always {
        /// h waits until a stamp is above the timestamp, or until it is asked again.
        is_patient: bool,
    },
}

impl Config {
    /// How long so many bytes may be on their way.
    fn span_of(&self, bytes: usize) -> Duration {
        self.per_mebibyte * u32::try_from(bytes >> 20).unwrap_or(u32::MAX)
    }
}

/// Rare events.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Note {
    /// A replica answered with less than the client knew (R11), and was not listened to.
    BehindClient,
    /// h gave a stamp above the timestamp.
    Raised,
    /// y gave a stamp above that of h.
    RaisedAtSecond,
    /// y had passed the stamp when the forward came.
    LateForward,
    /// f ≥ 2: h proposed the largest stamp at ballot 0.
    Settle,
    /// An observation waited for predecessors.
    Waited,
    /// An interactive transaction was decided on what is not true at its place.
    Stale,
    /// A caller read what a pending predecessor will probably write.
    Foreseen,
    /// A timestamp too far ahead was refused.
    FarFuture,
    /// A replica that started again gave no stamp, because it would have been ahead.
    Ahead,
    /// A message came after the end, or after a promise.
    LateMessage,
    /// A replica heard of a transaction for the first time when its client knew the outcome.
    CaughtUp,
    /// A replica without a stamp gave one with its promise.
    RecoveryStamp,
    /// A replica promised.
    Promised,
    /// A replica took a transaction over.
    Takeover,
    /// Somebody else recovered too.
    Preempted,
    /// Too few replicas are well for ballot 0.
    TooFewForBallotZero,
    /// A gateway has reason to believe that a server is gone.
    Suspected,
    /// A client asked again for an outcome.
    Resolved,
    /// What became of a transaction was forgotten.
    Forgotten,
    /// A replica keeps only the outcome of some transactions.
    Shortened,
    /// A replica fetched what a transaction wrote that all others had forgotten.
    Fetched,
    /// A question was about versions that are gone.
    Collected,
    /// A client was told later because its timestamp had not passed.
    ClockWait,
    /// A read-only transaction read again at a later time, because a write may have been answered that it
    /// would not see.
    ReadAgain,
    /// A request was sent again.
    Resent,
    /// A large transaction waited for others.
    InLine,
    /// One of low priority waited before it got its place, because others stand in line for its keys.
    Held,
    /// An operator's order was refused.
    OrderRefused,
    /// A node made a checkpoint.
    Checkpoint,
    /// A replica found that its disk was lost.
    Rejoining,
    /// It has all that it needs to take part again.
    Rejoined,
    /// A node learned that a partition has other members.
    Moved,
    /// A message of an earlier epoch was refused.
    Outdated,
    /// A member proposed the next members, or what another member had proposed.
    Elected,
    /// A message came for which a replica with a new disk has no answer.
    Barred,
    /// A transaction is not known, and is older than the new disk of this replica or of a peer.
    TooOld,
}

/// Names of timers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Timer {
    /// A replica looks for overdue work.
    Sweep(PartitionId),
    /// The clock of y passes a stamp.
    Close(PartitionId),
    /// A gateway waits for reads, or for a timestamp to pass.
    Open(TxnId),
    /// A gateway waits for decisions, observations and acknowledgements.
    Drive(TxnId),
    /// A gateway says what may be forgotten.
    Flush,
    /// A gateway asks servers that did not answer whether they are there.
    Ping,
    /// A server sends what it has kept back for others.
    Late,
}

/// By how much the pause after so many time-outs is longer than the first one: answers may take much
/// longer than usual, and what is asked too often makes them slower.
const fn backoff(times: u32) -> u32 {
    1 << if times < 4 { times } else { 4 }
}

/// Its name.
pub const NAME: &str = "geodesic";

impl Registered for Geodesic {
    const CAUGHT_WITHIN: &'static [(&'static str, &'static str, u64)] = &[
        (NAME, "D2", 50),
        (NAME, "D5", 400),
        (NAME, "D6", 100),
        (NAME, "D8", 200),
        (NAME, "D9", 100),
        (NAME, "D12", 50),
        (NAME, "one_report", 50),
        (NAME, "no_second_closing", 100),
        (NAME, "foretold_is_certain", 300),
        (NAME, "foretold_before_final", 100),
        (NAME, "D13", 50),
        (NAME, "D14", 100),
        (NAME, "D17", 2_000),
        (NAME, "replacement_takes_part", 400),
    ];
    const ROWS: &'static [Row] = &[Row {
        name: NAME,
        paper: "none: a protocol of this project",
        guarantee: Guarantee::StrictSerializable,
        conditions: "serializable always; strictly so while clocks keep their stated error bound",
        model: "procedures, interactive with fixed sets (2FI), read-only",
        round_trips: "1 to a majority, in which an interactive one also reads and stores; read-only 1",
    }];
}

impl Protocol for Geodesic {
    const NAMES: &'static [&'static str] = &[NAME];
    const QUEUES: bool = true;
    const SCANS: bool = true;
    const MEMBERS: bool = true;

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

    fn mutations(name: &str) -> &'static [&'static str] {
        mutations::names(name)
    }

    fn replaceable(cluster: &Cluster) -> Vec<NodeId> {
        let is_alone = |node: NodeId| {
            let mut own = cluster.partitions().filter(|it| it.replicas.contains(&node));
            own.any(|partition| partition.replicas.len() == 1)
        };
        cluster.servers().map(|server| server.id).filter(|&node| !is_alone(node)).collect()
    }

    fn configure(cluster: &Cluster, _: &str) -> Config {
        let round_trip = cluster.topology.rtt_assumed();
        Config {
            slack: Duration::from_millis(50),
            resend_after: round_trip * 3 + Duration::from_millis(200),
            takeover_after: round_trip * 6 + Duration::from_millis(1_000),
            takeover_step: round_trip * 2 + Duration::from_millis(200),
            sweep_interval: Duration::from_millis(200),
            gossip_interval: Duration::from_secs(1),
            absence_after: Duration::from_secs(60),
            ping_interval: Duration::from_secs(1),
            flush_interval: Duration::from_millis(200),
            spread_tries: 5,
            clock_ahead_max: Duration::from_secs(3),
            ceiling_ahead: Duration::from_secs(1),
            delay_window: Duration::from_secs(10),
            delay_refresh: Duration::from_millis(100),
            retention: Duration::from_secs(600),
            kept_bytes: Limits::SERVER.record_bytes,
            open_max: 100_000,
            followers_max: 10_000,
            under_way_bytes_max: Limits::SERVER.message_bytes * 2,
            per_mebibyte: Duration::from_millis(100),
            checkpoint_bytes: 16 << 20,
            version_retention: Duration::from_secs(10),
            piece_bytes: Limits::SERVER.piece_bytes(),
            read_bytes_max: crate::sizes::READ_BYTES_MAX,
            direct: DirectUse::Nearer,
            direct_rate_max: 1_000,
            patience_max: Duration::from_millis(10),
            late_from: 1_000,
            late_max: Duration::from_millis(2),
            mutations: Mutations::default(),
        }
    }

    fn enable_mutation(config: &mut Config, mutation: &str) {
        mutations::enable(config, mutation);
    }

    fn record_size(record: &Record) -> usize {
        record.size()
    }

    fn limit(config: &mut Config, limits: Limits) -> bool {
        config.piece_bytes = limits.piece_bytes();
        true
    }

    fn vary(config: &mut Config, rng: &mut Rng) {
        let mut vary = |span: Duration, low: u64, high: u64| {
            let percent = u32::try_from(rng.range(low, high)).unwrap_or(100);
            (span * percent / 100).max(Duration::from_millis(1))
        };
        config.slack = vary(config.slack, 0, 200);
        config.resend_after = vary(config.resend_after, 10, 150);
        config.takeover_after = vary(config.takeover_after, 5, 150);
        config.takeover_step = vary(config.takeover_step, 5, 150);
        config.sweep_interval = vary(config.sweep_interval, 10, 150);
        config.gossip_interval = vary(config.gossip_interval, 10, 300);
        config.ceiling_ahead = vary(config.ceiling_ahead, 1, 150);
        config.version_retention = vary(config.version_retention, 1, 100);
        config.flush_interval = vary(config.flush_interval, 10, 200);
        config.checkpoint_bytes =
            usize::try_from(rng.range(10_000, 16 << 20)).unwrap_or(config.checkpoint_bytes);
        config.under_way_bytes_max =
            usize::try_from(rng.range(1_000, 100_000)).unwrap_or(config.under_way_bytes_max);
        // Whether outcomes outlive their transactions shows only where little is kept.
        if rng.below(4) == 0 {
            config.kept_bytes =
                usize::try_from(rng.range(1_000, 100_000)).unwrap_or(config.kept_bytes);
        }
        config.direct = match rng.below(3) {
            0 => DirectUse::Nearer,
            1 => DirectUse::Always { is_patient: false },
            _ => DirectUse::Always { is_patient: true },
        };
        if rng.chance(1, 2) {
            config.late_from = 0;
        }
    }
}
