//! A transaction as a function of what it reads, for protocols that order it before they run it:
//! every replica that runs it at the same place in the order comes to the same result (R10).

use std::fmt;
use std::sync::Arc;

use orthodrome_core::Wire;
use orthodrome_core::id::TxnId;
use orthodrome_core::txn::{AbortReason, Key, Op, Reads, Txn, Version, Writes};

/// A transaction with everything needed to compute what it writes. Ocean Vista stores it in the place
/// of those values (§3.1); the deterministic protocols keep it in their logs.
#[derive(Clone, PartialEq, Eq, Wire)]
pub struct Functor {
    /// Its name.
    pub txn: TxnId,
    /// Keys it reads; sorted.
    #[wire(ascending)]
    pub reads: Vec<Key>,
    /// Keys it writes; sorted.
    #[wire(ascending)]
    pub writes: Vec<Key>,
    /// How what it writes follows from what it reads.
    pub body: Body,
    /// Its client knows the outcome of everything below (R6).
    pub acknowledged_below: u64,
}

/// How a transaction's writes follow from its reads, and from nothing else (R10).
#[derive(Clone, PartialEq, Eq, Wire)]
pub enum Body {
    /// A procedure.
    Ops(Vec<Op>),
    /// The caller decided after a look at the database (Ocean Vista §3.4; reconnaissance): if what it saw still is what there
    /// is, its writes; else nothing.
    Validate {
        /// The versions it saw.
        expected: Vec<(Key, Version)>,
        /// What it wants to write.
        writes: Writes,
    },
}

/// What a functor comes to: final values, or a logic abort, which is final too (V12).
pub type Output = Result<Writes, AbortReason>;

impl Functor {
    /// A procedure, as its caller declared it.
    #[must_use]
    pub fn procedure(txn: &Txn, ops: Vec<Op>) -> Arc<Self> {
        let (reads, writes) = (txn.reads.clone(), txn.writes.clone());
        let acknowledged_below = txn.acknowledged_below;
        Arc::new(Self { txn: txn.id, reads, writes, body: Body::Ops(ops), acknowledged_below })
    }

    /// What commits if everything still is as it was seen.
    #[must_use]
    pub fn validation(txn: &Txn, seen: &Reads, writes: Writes) -> Arc<Self> {
        let expected = seen.iter().map(|(key, read)| (key.clone(), read.version)).collect();
        Arc::new(Self {
            txn: txn.id,
            reads: seen.keys().cloned().collect(),
            writes: writes.keys().cloned().collect(),
            body: Body::Validate { expected, writes },
            acknowledged_below: txn.acknowledged_below,
        })
    }

    /// Computes what the transaction writes.
    ///
    /// # Errors
    /// The reason for which it aborts instead.
    pub fn execute(&self, reads: &Reads) -> Output {
        match &self.body {
            Body::Ops(ops) => Txn::execute(ops, reads),
            Body::Validate { expected, writes } => {
                let is_as_seen = |(key, version): &(Key, Version)| {
                    reads.get(key).is_some_and(|read| read.version == *version)
                };
                let is_valid = expected.iter().all(is_as_seen);
                if is_valid { Ok(writes.clone()) } else { Err(AbortReason::StaleRead) }
            }
        }
    }

    /// True if it stores nothing, so that a snapshot would do.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.writes.is_empty()
    }

    /// True if its values are final from the start.
    #[must_use]
    pub fn is_write_only(&self) -> bool {
        self.reads.is_empty() && !self.writes.is_empty()
    }
}

impl fmt::Debug for Functor {
    /// Short, for goldens: name, keys, what it does.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}(", self.txn)?;
        match &self.body {
            Body::Ops(ops) => write!(f, "reads {:?}, {ops:?})", self.reads),
            Body::Validate { expected, writes } => {
                f.write_str("expects")?;
                for (key, version) in expected {
                    write!(f, " {key}={version}")?;
                }
                write!(f, ", writes {writes:?})")
            }
        }
    }
}

impl fmt::Debug for Body {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ops(ops) => write!(f, "{ops:?}"),
            Self::Validate { expected, writes } => write!(f, "{expected:?} {writes:?}"),
        }
    }
}
