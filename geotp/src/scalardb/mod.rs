//! ScalarDB's *consensus commit*, the baseline of GeoTP §VII-A1 that asks nothing of its sources
//! but reads and conditional writes of single records, and `scalardb+`, the same with GeoTP's
//! scheduling.
//!
//! - Hiroyuki Yamada, Toshihiro Suzuki, Yuji Ito, Jun Nemoto: *ScalarDB: Universal Transaction
//!   Manager for Polystores*, PVLDB 16(12), 2023; and the description of consensus commit in
//!   ScalarDB's own documents.
//!
//! # The idea
//!
//! All concurrency control is the middleware's, and optimistic. A record contains the transaction
//! that wrote it, a state (prepared or committed) and its before-image. A transaction reads without
//! locks, and aborts if it meets a prepared record. To commit, it *prepares* every record that it
//! writes, on the condition that the record is unchanged since it was read. Then it *validates*: it
//! reads again the records that it only read. Then it writes its *state* into the coordinator
//! table, if there is none yet: that is the decision. Then the records are marked as committed. The
//! middleware keeps nothing. A transaction that meets a prepared record looks up the state, and
//! rolls the record forward or back. If there is no state for too long, it writes *aborted* there,
//! and the preparing transaction cannot commit any more.
//!
//! # Why it is strictly serializable
//!
//! Between its last prepare and its first validating read, no other transaction can change a record
//! that a transaction has read or will write: its writes are prepared, and its reads are found
//! unchanged later. That moment is its position in the order. Once its client has the outcome, no
//! transaction reads the old value of a record that it wrote, because the record stays prepared
//! until it is committed.
//!
//! # Messages
//! | message | from → to | when |
//! |---|---|---|
//! | `Read`, `Records` | middleware ↔ source | read phase; validation |
//! | `Prepare`, `Prepared` | middleware ↔ source | all writes are known |
//! | `PutState`, `StateIs` | middleware ↔ coordinator table | the decision; also the abort of a transaction whose prepared record is too old |
//! | `GetState`, `StateIs` | middleware ↔ coordinator table | a prepared record was found |
//! | `Commit`, `Rollback`, `Ended` | middleware ↔ source | the state is known |
//!
//! # What is parallel
//!
//! Prepare, validation, commit and rollback go to all sources at once, one message each, as
//! ScalarDB's defaults have it, and the client gets its answer after the records have been
//! committed (its asynchronous commit is off by default). Reads of `scalardb` go one record after
//! the other, because in its interface an operation is a call that returns before the next is made;
//! a round of more than 32 records is taken for a scan, and goes as one message to each source. To
//! schedule by latency one must have the requests together, so `scalardb+` sends the reads of a
//! round at once, one message to each source.
//!
//! # What `scalardb+` schedules
//!
//! Reads and prepares of nearer sources start later (GeoTP Eq. 3), so that near records are
//! prepared no longer than far ones. Validation and the end start at once: they give records free.
//! A request never waits at a source, so there is nothing to forecast (Eq. 8 is Eq. 3). Late
//! scheduling (Eq. 9) holds back transactions on hot records.
//!
//! # Deviations
//! - **The coordinator table has a part at each source**: a transaction's state is at the source
//!   nearest to its client's region, and its prepared records say where. With one middleware this
//!   is one table at the nearest source.
//! - **A transaction's name is its client's name for it**, so any client or proxy can find its
//!   state.
//! - **Records of one source are prepared together or not at all.**
//! - **Every write follows a read** of the record (ScalarDB calls it implicit pre-read): it is the
//!   condition.
//! - **A deleted record** stays as a version without a value until its source forgets old versions.
//! - **A failed guard is validated** before the client gets the answer, because its reads may be
//!   inconsistent.
//! - Unanswered messages are sent again, ten times; then the transaction is aborted, or its records
//!   are left to the transactions that find them.
//!
//! # Not implemented
//! - Weaker isolation levels, scans, group commit of states, the one-phase commit of newer versions
//!   (off by default).
//! - States are never forgotten, as in ScalarDB.

mod client;
mod message;
mod server;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::TxnId;
use orthodrome_core::machine::Protocol;
use orthodrome_core::rng::Rng;
use orthodrome_core::time::{Duration, Timestamp};
use orthodrome_core::txn::{Key, Value};

pub use client::Client;
pub use message::{Image, Mark, Msg, Record, State};
pub use server::Server;

/// ScalarDB, with or without GeoTP's scheduling.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ScalarDb;

/// Consensus commit, serializable.
pub const SCALARDB: &str = "scalardb";
/// Adds latency-aware and late scheduling.
pub const SCALARDB_PLUS: &str = "scalardb+";

/// Settings.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// True if reads of a round are sent together, requests to nearer sources are sent later, and
    /// transactions on hot records are held back.
    pub is_scheduled: bool,
    /// Otherwise reads of a round are sent one after the other. A round with more reads than this
    /// counts as a scan, and is sent together.
    pub scan_above: usize,
    /// A record that has been prepared for this long, and whose transaction has no state, causes
    /// the transaction to be aborted.
    pub expire_after: Duration,
    /// A request without an answer is sent again after this time.
    pub resend_after: Duration,
    /// The number of repetitions before the request is given up.
    pub resend_tries: u32,
    /// The weight of one measurement in the average distance, in per cent.
    pub rtt_weight_percent: u64,
    /// The number of records with statistics.
    pub hot_records: usize,
    /// α of Eq. 4, in per cent.
    pub hot_keep_percent: u64,
    /// A transaction that is held back is reconsidered after this time.
    pub admission_wait: Duration,
    /// A transaction that has been held back this often is refused.
    pub admission_tries: u32,
    /// The number of records after which a source makes a checkpoint.
    pub checkpoint_records: u32,
    /// Mutations, for tests.
    pub mutations: Mutations,
}

/// Mutations: unsafe variants that the tests must catch. None is enabled in real use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Mutations {
    /// Records that were only read are not validated.
    pub skipped_validation: bool,
    /// A transaction that finds a prepared record rolls it back, whatever the outcome of the
    /// preparing transaction.
    pub ignored_state: bool,
    /// The before-image of a prepared record is returned as its value.
    pub before_image: bool,
    /// Records are prepared even if they have changed since they were read.
    pub blind_prepare: bool,
    /// The state is announced before it is durable.
    pub early_state: bool,
}

/// Names of timers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Timer {
    /// Send a postponed request, or repeat one.
    Request(u64),
    /// Reconsider a transaction that was held back.
    Admit(TxnId),
}

/// Durable records of a source. Middlewares have none.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Stored {
    /// Records are prepared.
    Prepared {
        /// The transaction.
        mark: Mark,
        /// Their new values.
        images: Vec<(Key, Option<Value>)>,
    },
    /// They are committed.
    Committed {
        /// The transaction.
        txn: TxnId,
        /// The commit timestamp.
        at: Timestamp,
        /// Which.
        keys: Vec<Key>,
    },
    /// Records are restored.
    RolledBack {
        /// The transaction.
        txn: TxnId,
        /// Which.
        keys: Vec<Key>,
    },
    /// A transaction has its state.
    State {
        /// The transaction.
        txn: TxnId,
        /// The state.
        state: State,
    },
}

/// Rare events.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Note {
    /// A record was prepared by another transaction.
    PreparedFound,
    /// It was rolled forward.
    RolledForward,
    /// It was rolled back.
    RolledBack,
    /// It was too old, so its transaction was aborted if it had no state.
    Expired,
    /// A source refused to prepare a record that had changed.
    PrepareRefused,
    /// A record had changed between its read and its validation.
    ValidationFailed,
    /// Another middleware aborted a transaction before it could commit.
    Overruled,
    /// A request was postponed (`scalardb+`).
    Postponed,
    /// A transaction was held back (`scalardb+`).
    HeldBack,
    /// A transaction was refused (`scalardb+`).
    Refused,
    /// A request was sent again.
    Resent,
    /// A request was given up.
    GivenUp,
}

impl Protocol for ScalarDb {
    const NAMES: &'static [&'static str] = &[SCALARDB, SCALARDB_PLUS];
    const GENERAL: bool = true;
    const REPLICATED: bool = false;
    // Validation orders transactions; clocks only schedule requests.
    const NEEDS_CLOCKS: bool = false;

    type Config = Config;
    type Msg = Msg;
    type Timer = Timer;
    type Record = Stored;
    type Note = Note;
    type Client = Client;
    type Server = Server;

    fn name(config: &Config) -> &'static str {
        if config.is_scheduled { SCALARDB_PLUS } else { SCALARDB }
    }

    fn mutations(_: &str) -> &'static [&'static str] {
        &["skipped-validation", "ignored-state", "before-image", "blind-prepare", "early-state"]
    }

    fn configure(cluster: &Cluster, name: &str) -> Config {
        let round_trip = cluster.topology.rtt_assumed();
        Config {
            is_scheduled: name == SCALARDB_PLUS,
            scan_above: 32,
            // ScalarDB's own.
            expire_after: Duration::from_secs(15),
            resend_after: round_trip * 3 + Duration::from_millis(500),
            resend_tries: 10,
            rtt_weight_percent: 10,
            hot_records: 10_000,
            hot_keep_percent: 80,
            admission_wait: round_trip,
            admission_tries: 10,
            checkpoint_records: 5_000,
            mutations: Mutations::default(),
        }
    }

    fn enable_mutation(config: &mut Config, mutation: &str) {
        let mutations = &mut config.mutations;
        match mutation {
            "skipped-validation" => mutations.skipped_validation = true,
            "ignored-state" => mutations.ignored_state = true,
            "before-image" => mutations.before_image = true,
            "blind-prepare" => mutations.blind_prepare = true,
            "early-state" => mutations.early_state = true,
            other => panic!("{other} is none of {:?}", Self::mutations(SCALARDB)),
        }
    }

    fn vary(config: &mut Config, rng: &mut Rng) {
        config.scan_above = usize::try_from(rng.range(0, 32)).unwrap_or(32);
        config.expire_after = Duration::from_millis(rng.range(10, 20_000));
        config.resend_after = Duration::from_millis(rng.range(50, 2_000));
        config.resend_tries = u32::try_from(rng.range(2, 20)).unwrap_or(10);
        config.hot_records = usize::try_from(rng.range(1, 50)).unwrap_or(1);
        config.admission_wait = Duration::from_millis(rng.range(1, 50));
        config.admission_tries = u32::try_from(rng.range(0, 20)).unwrap_or(10);
        config.checkpoint_records = u32::try_from(rng.range(5, 500)).unwrap_or(500);
    }

    fn record_size(record: &Stored) -> usize {
        let keys = |keys: &[Key]| keys.iter().map(|key| 2 + key.len()).sum::<usize>();
        64 + match record {
            Stored::Prepared { images, .. } => images
                .iter()
                .map(|(key, value)| 8 + key.len() + value.as_ref().map_or(0, Value::len))
                .sum(),
            Stored::Committed { keys: all, .. } | Stored::RolledBack { keys: all, .. } => keys(all),
            Stored::State { .. } => 0,
        }
    }
}
