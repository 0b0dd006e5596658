//! ScalarDB's *consensus commit*, the baseline of GeoTP §VII-A1 that asks nothing of its sources
//! but reads and conditional writes of single records, and `scalardb+`, the same with GeoTP's
//! scheduling.
//!
//! - Hiroyuki Yamada, Toshihiro Suzuki, Yuji Ito, Jun Nemoto: *ScalarDB: Universal Transaction
//!   Manager for Polystores*, PVLDB 16(12), 2023; and the description of consensus commit in
//!   ScalarDB's own documents.
//!
//! # The idea All concurrency control is the middleware's, and optimistic. A record carries who
//! wrote it, a state (prepared or committed) and what it held before. A transaction reads without
//! locks, and comes away with nothing if it meets a prepared record. To commit, it *prepares* every
//! record that it writes, each on condition that it is still what was read; then it *validates*: it
//! reads again what it has only read. Then it puts its *state* into the coordinator table, if there
//! is none: that is the decision. Then the records are marked as committed. The middleware keeps
//! nothing: whoever comes upon a prepared record looks for the state, and rolls the record forward
//! or back; if there is no state for too long, it puts *aborted* there, and the transaction can no
//! longer commit.
//!
//! # Why it is strictly serializable Between its last prepare and its first validating read,
//! nothing that a transaction has read or will write can be changed by anybody else: what it writes
//! is prepared, and what it has read is found unchanged later. That moment is its place in the
//! order. A record that it wrote is never read as it was before once its client was told, because
//! it is prepared until it is committed.
//!
//! # Messages
//! | message | from → to | when |
//! |---|---|---|
//! | `Read`, `Records` | middleware ↔ source | read phase; validation |
//! | `Prepare`, `Prepared` | middleware ↔ source | all writes are known |
//! | `PutState`, `StateIs` | middleware ↔ coordinator table | the decision; also the abort by whoever found a prepared record too old |
//! | `GetState`, `StateIs` | middleware ↔ coordinator table | a prepared record was found |
//! | `Commit`, `Rollback`, `Ended` | middleware ↔ source | the state is known |
//!
//! # What is parallel Prepare, validation, commit and rollback go to all sources at once, one
//! message each, as ScalarDB's defaults have it, and the client is told after the records have been
//! committed (its asynchronous commit is off by default). Reads of `scalardb` go one record after
//! the other, because in its interface an operation is a call that returns before the next is made;
//! a round of more than 32 records is taken for a scan, and goes as one message to each source. To
//! schedule by latency one must have the requests together, so `scalardb+` sends the reads of a
//! round at once, one message to each source.
//!
//! # What `scalardb+` schedules Reads and prepares of nearer sources start later (GeoTP Eq. 3), so
//! that near records are prepared no longer than far ones. Validation and the end start at once:
//! they give records free. A request never waits at a source, so there is nothing to forecast (Eq.
//! 8 is Eq. 3). Late scheduling (Eq. 9) holds back transactions on hot records.
//!
//! # Deviations
//! - **The coordinator table has a part at each source**: a transaction's state is at the source
//!   nearest to its client's region, and its prepared records say where. With one middleware this
//!   is one table at the nearest source.
//! - **A transaction's name is its client's name for it**, so whoever lost track of one finds its
//!   state.
//! - **Records of one source are prepared together or not at all.**
//! - **Every write follows a read** of the record (ScalarDB calls it implicit pre-read): it is the
//!   condition.
//! - **A deleted record** stays as a version without a value until its source forgets old versions.
//! - **A guard that failed is validated** before the client is told, for what it saw may be
//!   nonsense.
//! - What is not answered is sent again, ten times; then the transaction is aborted, or its records
//!   are left to whoever comes upon them.
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

/// ScalarDB, and with GeoTP's scheduling.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ScalarDb;

/// Consensus commit, serializable.
pub const SCALARDB: &str = "scalardb";
/// And latency-aware and late scheduling.
pub const SCALARDB_PLUS: &str = "scalardb+";

/// Settings.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// Reads of a round go together, nearer sources start later, and transactions on hot records
    /// are held back.
    pub is_scheduled: bool,
    /// Otherwise reads of a round go one after the other, unless there are more than this: that is
    /// a scan.
    pub scan_above: usize,
    /// A record that has been prepared for so long, without a state of its transaction, aborts it.
    pub expire_after: Duration,
    /// What is not answered is sent again after this.
    pub resend_after: Duration,
    /// How often, before it is given up.
    pub resend_tries: u32,
    /// How much one measurement counts in the average distance, in per cent.
    pub rtt_weight_percent: u64,
    /// How many records are watched.
    pub hot_records: usize,
    /// α of Eq. 4, in per cent.
    pub hot_keep_percent: u64,
    /// A transaction that is held back is looked at again after this.
    pub admission_wait: Duration,
    /// It is refused when it has been held back so often.
    pub admission_tries: u32,
    /// Records that a source logs before a checkpoint.
    pub checkpoint_records: u32,
    /// Unsafe variants, for tests.
    pub mutations: Mutations,
}

/// Unsafe variants that tests switch on to see that they are caught. All off in any real use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Mutations {
    /// What was only read is not read again.
    pub skipped_validation: bool,
    /// Whoever finds a prepared record rolls it back, whatever became of its transaction.
    pub ignored_state: bool,
    /// What a prepared record held before is taken for what it holds.
    pub before_image: bool,
    /// Records are prepared whatever they hold.
    pub blind_prepare: bool,
    /// The state is told before it is durable.
    pub early_state: bool,
}

/// Names of timers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Timer {
    /// A request is sent: at its time, or again.
    Request(u64),
    /// A transaction that was held back.
    Admit(TxnId),
}

/// What a source remembers. Middlewares remember nothing.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Stored {
    /// Records are prepared.
    Prepared {
        /// By whom.
        mark: Mark,
        /// What they will hold.
        images: Vec<(Key, Option<Value>)>,
    },
    /// They are committed.
    Committed {
        /// Whose they were.
        txn: TxnId,
        /// When it committed.
        at: Timestamp,
        /// Which.
        keys: Vec<Key>,
    },
    /// They hold what they held before.
    RolledBack {
        /// Whose they were.
        txn: TxnId,
        /// Which.
        keys: Vec<Key>,
    },
    /// A transaction has its state.
    State {
        /// Which transaction.
        txn: TxnId,
        /// Which state.
        state: State,
    },
}

/// Rare events.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Note {
    /// A record was prepared by somebody else.
    PreparedFound,
    /// It was rolled forward.
    RolledForward,
    /// It was rolled back.
    RolledBack,
    /// It was too old, and its transaction was aborted if it had no state.
    Expired,
    /// A source refused to prepare what had changed.
    PrepareRefused,
    /// What was read had changed before it was validated.
    ValidationFailed,
    /// A transaction was aborted by somebody else before it could commit.
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
        let round_trip = cluster.topology.rtt_max().max(Duration::from_millis(20));
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
