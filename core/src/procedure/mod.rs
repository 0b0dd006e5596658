//! Stored procedures: named deterministic functions of a transaction's reads and of arguments.
//!
//! They are compiled in. So every node that runs a transaction (a gateway, or every replica of a
//! protocol that orders transactions before it runs them) runs the same code. A program that does
//! not know a name refuses the call at its gateway (ADR 16). A new procedure is a function of this
//! shape, a variant of [`Procedure`] and an arm in `Procedure::run`; the compiler lists the rest.

pub mod movr;
pub mod redis;
pub mod row;
pub mod tpcc;

use crate::wire::Wire;
use std::fmt;

use crate::txn::{AbortReason, Key, Value};

/// A stored procedure.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Procedure {
    /// [`tpcc::new_order`].
    TpccNewOrder,
    /// [`tpcc::payment`].
    TpccPayment,
    /// [`movr::begin_ride`].
    MovrBeginRide,
    /// [`movr::end_ride`].
    MovrEndRide,
    /// [`redis::batch`].
    RedisBatch,
}

/// The result of a procedure: a value for each key that its call writes, in their order (none
/// deletes the key), or the reason to abort.
pub type Results = Result<Vec<Option<Value>>, AbortReason>;

impl Procedure {
    /// All procedures.
    pub const ALL: [Self; 5] = [
        Self::TpccNewOrder,
        Self::TpccPayment,
        Self::MovrBeginRide,
        Self::MovrEndRide,
        Self::RedisBatch,
    ];

    /// Its name, on the wire and in interfaces. A name never changes its meaning.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::TpccNewOrder => "tpcc.new-order",
            Self::TpccPayment => "tpcc.payment",
            Self::MovrBeginRide => "movr.begin-ride",
            Self::MovrEndRide => "movr.end-ride",
            Self::RedisBatch => "redis.batch",
        }
    }

    /// The procedure called `name`.
    #[must_use]
    pub fn find(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|procedure| procedure.name() == name)
    }

    /// Runs it on the values of the keys that its call reads, in their order.
    ///
    /// # Errors
    /// The reason to abort: the values read or the arguments have the wrong form.
    fn run(self, reads: &[Option<Value>], arguments: &Value) -> Results {
        match self {
            Self::TpccNewOrder => tpcc::new_order(reads, arguments),
            Self::TpccPayment => tpcc::payment(reads, arguments),
            Self::MovrBeginRide => movr::begin_ride(reads, arguments),
            Self::MovrEndRide => movr::end_ride(reads, arguments),
            Self::RedisBatch => redis::batch(reads, arguments),
        }
    }
}

/// A call of a stored procedure, with every key that it may access.
#[derive(Clone, PartialEq, Eq, Wire)]
pub struct Call {
    /// The procedure.
    pub procedure: Procedure,
    /// The keys that it reads, in the order that it expects.
    pub reads: Vec<Key>,
    /// All keys that it sets or deletes, in the order in which it returns their values, each once.
    pub writes: Vec<Key>,
    /// Its other arguments.
    pub arguments: Value,
}

impl Call {
    /// Runs it on these values.
    ///
    /// # Errors
    /// The reason to abort. A call whose number of keys differs from the number of values that its
    /// procedure returns fails its guard.
    pub fn run(&self, reads: &[Option<Value>]) -> Results {
        let results = self.procedure.run(reads, &self.arguments)?;
        if results.len() == self.writes.len() { Ok(results) } else { Err(AbortReason::Guard) }
    }
}

impl fmt::Debug for Call {
    /// A short form for traces: procedure, arguments and keys written.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { procedure, reads, writes, arguments } = self;
        write!(f, "{}({arguments}, {reads:?}) -> {writes:?}", procedure.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_procedure_is_found_by_its_name_and_refuses_nonsense() {
        for procedure in Procedure::ALL {
            assert_eq!(Procedure::find(procedure.name()), Some(procedure));
            for (reads, arguments) in [(0, ""), (3, "x"), (9, "1 2 3 4 5 6 7 8 | 1 2 3")] {
                let garbage = vec![Some(Value::from("garbage")); reads];
                let result = procedure.run(&garbage, &arguments.into());
                assert_eq!(result, Err(AbortReason::Guard), "{procedure:?} {arguments:?}");
            }
        }
        assert_eq!(Procedure::find("tpcc.no-order"), None);
    }

    #[test]
    fn a_call_writes_every_key_that_it_names_or_fails() {
        let ride = |writes: &[&str]| Call {
            procedure: Procedure::MovrBeginRide,
            reads: vec!["u".into(), "v".into()],
            writes: writes.iter().map(|key| Key::from(*key)).collect(),
            arguments: "7 1 0 3 4".into(),
        };
        assert_eq!(ride(&["u", "v", "r"]).run(&[None, None]).unwrap().len(), 3);
        assert_eq!(ride(&["u", "v"]).run(&[None, None]), Err(AbortReason::Guard));
        assert_eq!(ride(&["u", "v", "r"]).run(&[None]), Err(AbortReason::Guard));
    }
}
