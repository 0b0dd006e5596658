//! A transaction as a function of its reads, for protocols that order it before they run it. Every
//! replica that runs it at the same position in the order gets the same result (R10).

use std::fmt;
use std::sync::Arc;

use orthodrome_core::Wire;
use orthodrome_core::id::TxnId;
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::{
    AbortReason, Key, Op, Outcome, Reads, Txn, VALUE_BYTES_MAX, Version, Writes,
};

use crate::sizes::READ_BYTES_MAX;

/// A transaction with everything needed to compute its writes. Ocean Vista stores it in place of
/// the values (§3.1); the deterministic protocols keep it in their logs.
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
    /// How its writes follow from its reads.
    pub body: Body,
    /// Its client knows the outcomes of all its transactions below this counter (R6).
    pub acknowledged_below: u64,
}

/// How a transaction's writes follow from its reads, and from nothing else (R10).
#[derive(Clone, PartialEq, Eq, Wire)]
pub enum Body {
    /// A procedure.
    Ops(Vec<Op>),
    /// The client decided after reading (Ocean Vista §3.4; reconnaissance). If the versions that it
    /// read are still the current ones, these writes take effect; otherwise nothing does.
    Validate {
        /// The versions that it read.
        expected: Vec<(Key, Version)>,
        /// Its writes.
        writes: Writes,
    },
}

/// The result of a functor: final values, or a logic abort, which is final too (V12).
pub type Output = Result<Writes, AbortReason>;

impl Functor {
    /// A procedure, as its caller declared it.
    #[must_use]
    pub fn procedure(txn: &Txn, ops: Vec<Op>) -> Arc<Self> {
        let (reads, writes) = (txn.reads.clone(), txn.writes.clone());
        let acknowledged_below = txn.acknowledged_below;
        Arc::new(Self { txn: txn.id, reads, writes, body: Body::Ops(ops), acknowledged_below })
    }

    /// Writes that commit if the versions seen are still current.
    #[must_use]
    pub fn validation(txn: &Txn, seen: &Reads, writes: Writes) -> Arc<Self> {
        let expected = seen.iter().map(|(key, read)| (key.clone(), read.compared())).collect();
        Arc::new(Self {
            txn: txn.id,
            reads: seen.keys().cloned().collect(),
            writes: writes.keys().cloned().collect(),
            body: Body::Validate { expected, writes },
            acknowledged_below: txn.acknowledged_below,
        })
    }

    /// Computes the transaction's writes.
    ///
    /// # Errors
    /// The reason why it aborts.
    pub fn execute(&self, reads: &Reads) -> Output {
        match &self.body {
            Body::Ops(ops) => Txn::execute(ops, reads),
            Body::Validate { expected, writes } => {
                let is_as_seen = |(key, version): &(Key, Version)| {
                    reads.get(key).is_some_and(|read| read.compared() == *version)
                };
                let is_valid = expected.iter().all(is_as_seen);
                if is_valid { Ok(writes.clone()) } else { Err(AbortReason::StaleRead) }
            }
        }
    }

    /// What it writes, if that does not depend on its reads and it cannot abort: it only gets, puts
    /// and deletes, and whatever it gets fits into an answer.
    #[must_use]
    pub fn fixed_writes(&self) -> Option<Writes> {
        let Body::Ops(ops) = &self.body else { return None };
        let is_fixed = |op: &Op| matches!(op, Op::Get(_) | Op::Put(..) | Op::Delete(_));
        let is_small = self.reads.len() < READ_BYTES_MAX / VALUE_BYTES_MAX;
        let is_fixed = is_small && ops.iter().all(is_fixed);
        is_fixed.then(|| Txn::execute(ops, &Reads::new()).ok()).flatten()
    }

    /// The outcome of one that has no keys, and so needs no server: an operation may still refuse its
    /// arguments.
    #[must_use]
    pub fn outcome_without_keys(&self, now: Timestamp) -> Outcome {
        match self.execute(&Reads::new()) {
            Ok(_) => Outcome::Committed(now),
            Err(reason) => Outcome::Aborted(reason),
        }
    }

    /// True if it writes nothing, so that a snapshot would suffice.
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
    /// A short form for goldens: name, keys, body.
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

#[cfg(test)]
mod tests {
    use orthodrome_core::id::ClientId;
    use orthodrome_core::procedure::{Call, Procedure};
    use orthodrome_core::txn::Read;

    use super::*;

    #[test]
    fn a_key_that_was_deleted_is_as_absent_as_one_that_never_was() {
        let id = |counter| TxnId::new(ClientId(1), counter);
        let version = Version { timestamp: Timestamp(5), writer: id(1) };
        let key = Key::from("a");
        let of = |read: Read| Reads::from([(key.clone(), read)]);
        let (deleted, never) = (of(Read { value: None, version }), of(Read::default()));
        let there = of(Read { value: Some("1".into()), version });
        let txn =
            Txn::interactive(id(2), orthodrome_core::id::RegionId(0), vec![key.clone()], vec![]);
        for seen in [&deleted, &never] {
            let functor = Functor::validation(&txn, seen, Writes::new());
            assert!(functor.execute(&deleted).is_ok() && functor.execute(&never).is_ok());
            assert_eq!(functor.execute(&there), Err(AbortReason::StaleRead));
        }
        // A client that asks for the outcome does not send the value again.
        for seen in [there.clone(), of(Read::without_value(version))] {
            let functor = Functor::validation(&txn, &seen, Writes::new());
            assert!(functor.execute(&there).is_ok());
            assert_eq!(functor.execute(&deleted), Err(AbortReason::StaleRead));
        }
    }

    #[test]
    fn a_procedure_without_keys_may_refuse_its_arguments() {
        let id = TxnId::new(ClientId(1), 1);
        let outcome = |ops: Vec<Op>| {
            let txn = Txn::procedure(id, orthodrome_core::id::RegionId(0), ops.clone());
            Functor::procedure(&txn, ops).outcome_without_keys(Timestamp(7))
        };
        assert_eq!(outcome(Vec::new()), Outcome::Committed(Timestamp(7)));
        let (reads, writes, arguments) = (Vec::new(), Vec::new(), "nonsense".into());
        let call = Call { procedure: Procedure::RedisBatch, reads, writes, arguments };
        assert_eq!(outcome(vec![Op::Call(call)]), Outcome::Aborted(AbortReason::Guard));
    }
}
