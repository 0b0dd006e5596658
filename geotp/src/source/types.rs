//! What goes into a modelled source and comes out of it: statements, settings, records and orders.

use std::sync::Arc;

use orthodrome_core::id::TxnId;
use orthodrome_core::limits::bytes_of;
use orthodrome_core::store::Memtable;
use orthodrome_core::time::{Duration, Time, Timestamp};
use orthodrome_core::txn::{Key, Op, Read, Value, Writes};

use crate::contract::{FromSource, Note, Work, Xid};

/// The statements of the modelled source.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Model;

impl Work for Model {
    type Statement = Statement;
    type Answer = Answer;
    /// The reason suffices.
    type Fault = ();
}

/// One statement, on one row.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Statement {
    /// The transaction: the writer in versions.
    pub txn: TxnId,
    /// The action.
    pub action: Action,
}

/// The action of a statement.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action {
    /// `SELECT … FOR SHARE`, or `FOR UPDATE`.
    Read {
        /// The row.
        key: Key,
        /// True if it will be written.
        for_update: bool,
    },
    /// `UPDATE`, or `INSERT`, or `DELETE`.
    Write {
        /// The row.
        key: Key,
        /// The new value; none deletes the row.
        value: Option<Value>,
    },
    /// An update that depends on the current value, such as `SET n = n + 1`; or a read.
    Apply(Op),
    /// A read that fails if its result differs from one that a copy gave before.
    Expect {
        /// The row.
        key: Key,
        /// What the copy had.
        read: Read,
        /// True if it will be written.
        for_update: bool,
    },
    /// A write that fails unless it meets as many rows as it would have met at a copy: an `UPDATE`
    /// or `DELETE` of a row that existed there, or an `INSERT` of one that did not.
    Counted {
        /// The row.
        key: Key,
        /// The new value; none deletes the row.
        value: Option<Value>,
        /// True if the copy had the row.
        existed: bool,
    },
}

impl Action {
    /// The row.
    #[must_use]
    pub fn key(&self) -> Option<&Key> {
        match self {
            Self::Read { key, .. }
            | Self::Write { key, .. }
            | Self::Expect { key, .. }
            | Self::Counted { key, .. } => Some(key),
            Self::Apply(op) => op.reads().first().or_else(|| op.writes().first()),
        }
    }

    /// True if it changes the row.
    #[must_use]
    pub fn writes(&self) -> bool {
        match self {
            Self::Read { .. } | Self::Expect { .. } => false,
            Self::Write { .. } | Self::Counted { .. } => true,
            Self::Apply(op) => !op.writes().is_empty(),
        }
    }

    pub(super) fn mode(&self) -> Mode {
        match self {
            Self::Read { for_update: false, .. } | Self::Expect { for_update: false, .. } => {
                Mode::Shared
            }
            Self::Read { .. } | Self::Write { .. } | Self::Expect { .. } | Self::Counted { .. } => {
                Mode::Exclusive
            }
            Self::Apply(op) if op.writes().is_empty() && matches!(op, Op::Get(_)) => Mode::Shared,
            Self::Apply(_) => Mode::Exclusive,
        }
    }
}

/// The value before the transaction.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Answer {
    /// The row.
    pub key: Key,
    /// Its committed value.
    pub read: Read,
}

/// Settings.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// How long a statement waits for a lock.
    pub lock_timeout: Duration,
    /// PostgreSQL looks for a cycle after a wait of this length, MariaDB at once.
    pub deadlock_after: Duration,
    /// The interval at which the agent looks at the waits, while there are any; none: never.
    pub look_every: Option<Duration>,
    /// The number of records after which a checkpoint is made.
    pub checkpoint_records: u32,
    /// How old the rows are that a read without locks shows, as at a replica.
    pub lag: Duration,
    /// Mutations, for tests.
    pub mutations: Mutations,
}

/// Mutations: the behaviour of sources that are not used as the rules say. None is enabled in real
/// use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Mutations {
    /// G1: reads at PostgreSQL do not lock.
    pub plain_reads: bool,
    /// G2: MariaDB runs at less than SERIALIZABLE, and drops read locks when it prepares.
    pub drops_read_locks: bool,
    /// A branch that goes back to a savepoint loses the locks that it took since, as PostgreSQL
    /// does if its driver does not take them again.
    pub unlocks_going_back: bool,
    /// Reads are not compared with what a copy gave.
    pub unchecked_reads: bool,
    /// The rows that a write meets are not counted.
    pub unchecked_counts: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Mode {
    Shared,
    Exclusive,
}

/// Durable records of a source.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Record {
    /// A branch is prepared.
    Prepared {
        /// Its name.
        xid: Xid,
        /// The transaction.
        txn: TxnId,
        /// Its writes.
        writes: Writes,
        /// The keys that it only read (PostgreSQL).
        reads: Vec<Key>,
        /// The commit timestamp must be above this.
        floor: Timestamp,
    },
    /// A prepared branch commits.
    Committed {
        /// Its name.
        xid: Xid,
        /// The commit timestamp.
        at: Timestamp,
    },
    /// A prepared branch is rolled back.
    RolledBack {
        /// Its name.
        xid: Xid,
    },
    /// A transaction that was not prepared commits.
    OnePhase {
        /// The transaction.
        txn: TxnId,
        /// Its writes.
        writes: Writes,
        /// The commit timestamp.
        at: Timestamp,
    },
}

impl Record {
    /// Its approximate size in bytes.
    #[must_use]
    pub fn size(&self) -> usize {
        64 + match self {
            Self::Prepared { writes, reads, .. } => {
                let reads: usize = reads.iter().map(|key| 2 + key.len()).sum();
                reads + 8 * writes.len() + bytes_of(writes)
            }
            Self::OnePhase { writes, .. } => 8 * writes.len() + bytes_of(writes),
            Self::Committed { .. } | Self::RolledBack { .. } => 0,
        }
    }
}

/// Timers of a source.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Timer {
    /// A wait for a lock has timed out.
    Lock(Xid),
    /// Look for a cycle.
    Deadlock(Xid),
    /// Look at the current waits.
    Look,
}

/// The effects that a source requests.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Order {
    /// Make a record durable; tickets count from 1 in the order of these and of checkpoints.
    Persist(Record),
    /// Make these versions durable, and replace all earlier records by these.
    Checkpoint(Arc<Memtable>, Vec<Record>),
    /// Set a timer.
    SetTimer(Timer, Time),
    /// Stop a timer.
    CancelTimer(Timer),
    /// Count a rare event.
    Note(Note),
}

/// The results of a source's step.
#[derive(Debug, Default)]
pub struct Desk {
    /// For the agent.
    pub answers: Vec<FromSource<Model>>,
    /// For the host.
    pub orders: Vec<Order>,
}
