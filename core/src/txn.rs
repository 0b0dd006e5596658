//! Transactions as every protocol sees them: what is read, what is written, and what became of it.

use std::collections::BTreeMap;
use std::fmt;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::id::{RegionId, TxnId};
use crate::limits::{TXN_BYTES_MAX, bytes_of};
use crate::procedure::Call;
use crate::session::Floors;
use crate::time::Timestamp;
use crate::wire::{Wire, WireError};

/// A key: any bytes. Bounds on its length belong to the service that accepts it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Wire)]
pub struct Key(pub Bytes);

/// A value: any bytes.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Wire)]
pub struct Value(pub Bytes);

macro_rules! bytes_like {
    ($name:ident) => {
        impl $name {
            /// Length in bytes.
            #[must_use]
            pub fn len(&self) -> usize {
                self.0.len()
            }

            /// True if there are no bytes.
            #[must_use]
            pub fn is_empty(&self) -> bool {
                self.0.is_empty()
            }
        }

        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                Self(Bytes::copy_from_slice(text.as_bytes()))
            }
        }

        impl From<String> for $name {
            fn from(text: String) -> Self {
                Self(Bytes::from(text))
            }
        }

        impl From<Vec<u8>> for $name {
            fn from(bytes: Vec<u8>) -> Self {
                Self(Bytes::from(bytes))
            }
        }

        impl fmt::Display for $name {
            /// Printable ASCII as it is, any other byte as `\xNN`.
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.escape_ascii().fmt(f)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }
    };
}

bytes_like!(Key);
bytes_like!(Value);

/// How much a transaction matters: higher is more important.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug, Serialize, Deserialize, Wire,
)]
#[serde(transparent)]
pub struct Priority(pub u8);

impl Priority {
    /// The default.
    pub const LOW: Self = Self(0);
    /// For the transactions whose tail matters.
    pub const HIGH: Self = Self(1);
}

impl fmt::Display for Priority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::LOW => f.write_str("low"),
            Self::HIGH => f.write_str("high"),
            Self(level) => write!(f, "level{level}"),
        }
    }
}

/// Which write a read saw: the commit timestamp and name of the transaction that wrote it.
///
/// Versions of one key are totally ordered, by timestamp. [`Version::INITIAL`] is the version of a
/// key that nobody wrote.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug, Wire)]
pub struct Version {
    /// Commit timestamp of the writer.
    pub timestamp: Timestamp,
    /// The writer.
    pub writer: TxnId,
}

impl Version {
    /// The version of a key that was never written.
    pub const INITIAL: Self = Self {
        timestamp: Timestamp::ZERO,
        writer: TxnId { client: crate::ClientId(0), counter: 0, attempt: 0 },
    };
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.writer, self.timestamp.0)
    }
}

/// What one key held: its value, if it has one, and the version of that value.
#[derive(Clone, PartialEq, Eq, Default, Debug, Wire)]
pub struct Read {
    /// None if the key was never written, or deleted.
    pub value: Option<Value>,
    /// Whose write this is.
    pub version: Version,
}

/// What a transaction read, by key.
pub type Reads = BTreeMap<Key, Read>;

/// What a transaction writes, by key; none deletes.
pub type Writes = BTreeMap<Key, Option<Value>>;

/// The end of a transaction's read round: write and commit, or give up.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Decision {
    /// Commit these writes: of keys declared to be written, or, in a general transaction, of any.
    Commit(Writes),
    /// Abort; nothing is written.
    Abort,
}

impl Outcome {
    /// For what holds only decisions.
    ///
    /// # Errors
    /// It is unknown.
    pub fn check_decided(&self) -> Result<(), WireError> {
        if *self == Self::Unknown {
            let (field, found) = ("Outcome", "unknown".into());
            return Err(WireError::Value { field, found, wanted: "a commit or an abort" });
        }
        Ok(())
    }
}

/// One guarded operation of a built-in procedure. Operations run in order; later ones see the
/// effects of earlier ones.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Op {
    /// Reads a key.
    Get(Key),
    /// Aborts the transaction unless the key holds exactly this (none: holds nothing).
    Compare(Key, Option<Value>),
    /// Sets the key.
    Put(Key, Value),
    /// Adds to the key's value, a decimal 64-bit integer; a missing key counts as 0. Aborts on a
    /// value that is not such a number, and on overflow.
    Add(Key, i64),
    /// Appends bytes to the key's value; a missing key counts as empty.
    Append(Key, Value),
    /// Removes the key.
    Delete(Key),
    /// Calls a stored procedure, which sees and sets several keys.
    Call(Call),
}

impl Op {
    /// The keys on which the operation's effect depends.
    #[must_use]
    pub fn reads(&self) -> &[Key] {
        match self {
            Self::Get(key) | Self::Compare(key, _) | Self::Add(key, _) | Self::Append(key, _) => {
                std::slice::from_ref(key)
            }
            Self::Put(..) | Self::Delete(_) => &[],
            Self::Call(call) => &call.reads,
        }
    }

    /// The keys that the operation changes.
    #[must_use]
    pub fn writes(&self) -> &[Key] {
        match self {
            Self::Put(key, _) | Self::Add(key, _) | Self::Append(key, _) | Self::Delete(key) => {
                std::slice::from_ref(key)
            }
            Self::Get(_) | Self::Compare(..) => &[],
            Self::Call(call) => &call.writes,
        }
    }
}

/// What kind of transaction this is, and so how its writes come about.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Kind {
    /// Two rounds, fixed sets: the reads go back to the caller, who answers with a [`Decision`]
    /// (Carousel §3.2).
    Interactive,
    /// As many rounds of reads as the caller likes, each of keys that it chose after the round before;
    /// then a [`Decision`], which may write any key. Not every protocol runs them
    /// ([`crate::Protocol::GENERAL`]); for the others the client library reads first and declares
    /// what it found (reconnaissance).
    General,
    /// A deterministic function of its reads: guarded operations.
    Procedure(Vec<Op>),
    /// Reads only; one consistent snapshot.
    ReadOnly,
    /// Reads only; one consistent snapshot that may be old: what the nearest copy has. It sees nothing of a transaction or all of
    /// it, and what that one saw; but what was told before it began may be missing, and two of them need not
    /// agree on which of two independent transactions came first. Protocols that have no shorter way for it treat it as
    /// [`Kind::ReadOnly`], which promises more.
    StaleReadOnly,
}

/// One attempt at a transaction, as its client declares it.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Txn {
    /// Its name, attempt included.
    pub id: TxnId,
    /// The region it began in. Fixed for all attempts and retries, so that whoever picks the
    /// transaction up again finds the same coordinator.
    pub home: RegionId,
    /// How much it matters.
    pub priority: Priority,
    /// How its writes come about.
    pub kind: Kind,
    /// Keys it reads, in a general transaction those of its first round, if any; sorted, without
    /// duplicates.
    #[wire(ascending)]
    pub reads: Vec<Key>,
    /// Keys it may write; sorted, without duplicates; may overlap `reads`. In a general transaction, which
    /// declares none, at most a hint: those of them that it reads are better locked for writing at once.
    #[wire(ascending)]
    pub writes: Vec<Key>,
    /// The client knows the outcome of every transaction of its own with a smaller counter, and
    /// will never ask again (`protocol-pitfalls` R6).
    pub acknowledged_below: u64,
    /// The oldest versions that its client may still be shown, of keys that it reads or writes
    /// (`docs/pitfalls.md`, R11). An older read is no answer.
    pub floors: Floors,
}

impl Txn {
    /// An interactive transaction.
    #[must_use]
    pub fn interactive(id: TxnId, home: RegionId, reads: Vec<Key>, writes: Vec<Key>) -> Self {
        Self::new(id, home, Kind::Interactive, reads, writes)
    }

    /// A general transaction, whose first round reads these keys.
    #[must_use]
    pub fn general(id: TxnId, home: RegionId, reads: Vec<Key>) -> Self {
        Self::new(id, home, Kind::General, reads, Vec::new())
    }

    /// A read-only transaction.
    #[must_use]
    pub fn read_only(id: TxnId, home: RegionId, reads: Vec<Key>) -> Self {
        Self::new(id, home, Kind::ReadOnly, reads, Vec::new())
    }

    /// A read-only transaction that takes what the nearest copy has ([`Kind::StaleReadOnly`]).
    #[must_use]
    pub fn stale_read_only(id: TxnId, home: RegionId, reads: Vec<Key>) -> Self {
        Self::new(id, home, Kind::StaleReadOnly, reads, Vec::new())
    }

    /// A procedure of guarded operations; its key sets follow from the operations. One that writes
    /// nothing is a read-only transaction whose comparisons the caller's host checks.
    #[must_use]
    pub fn procedure(id: TxnId, home: RegionId, ops: Vec<Op>) -> Self {
        let reads = ops.iter().flat_map(Op::reads).cloned().collect();
        let writes = ops.iter().flat_map(Op::writes).cloned().collect();
        Self::new(id, home, Kind::Procedure(ops), reads, writes)
    }

    fn new(id: TxnId, home: RegionId, kind: Kind, reads: Vec<Key>, writes: Vec<Key>) -> Self {
        let (priority, acknowledged_below, floors) = (Priority::LOW, 0, Floors::new());
        let mut txn = Self { id, home, priority, kind, reads, writes, acknowledged_below, floors };
        txn.reads.sort_unstable();
        txn.reads.dedup();
        txn.writes.sort_unstable();
        txn.writes.dedup();
        txn
    }

    /// True if it is known from the start that it writes nothing, so that a snapshot will do.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        match self.kind {
            Kind::Interactive | Kind::General => false,
            Kind::Procedure(_) | Kind::ReadOnly | Kind::StaleReadOnly => self.writes.is_empty(),
        }
    }

    /// True if it declared every key of these writes.
    #[must_use]
    pub fn declares(&self, writes: &Writes) -> bool {
        writes.keys().all(|key| self.writes.binary_search(key).is_ok())
    }

    /// Runs the transaction's procedure over what it read.
    ///
    /// # Errors
    /// The reason to abort, if a guard failed or an operand has the wrong form.
    pub fn execute(ops: &[Op], reads: &Reads) -> Result<Writes, AbortReason> {
        let mut writes = Writes::new();
        for op in ops {
            let current = |key: &Key| {
                let written = writes.get(key).cloned();
                written.unwrap_or_else(|| reads.get(key).and_then(|read| read.value.clone()))
            };
            match op {
                Op::Get(_) => {}
                Op::Compare(key, expected) if *expected == current(key) => {}
                Op::Compare(..) => return Err(AbortReason::Guard),
                Op::Put(key, value) => drop(writes.insert(key.clone(), Some(value.clone()))),
                Op::Add(key, amount) => {
                    let sum = number(current(key).as_ref())
                        .and_then(|number| number.checked_add(*amount))
                        .ok_or(AbortReason::Guard)?;
                    writes.insert(key.clone(), Some(Value::from(sum.to_string())));
                }
                Op::Append(key, suffix) => {
                    let mut bytes = current(key).map(|value| value.0.to_vec()).unwrap_or_default();
                    if bytes.len() + suffix.len() > VALUE_BYTES_MAX {
                        return Err(AbortReason::TooLarge);
                    }
                    bytes.extend_from_slice(&suffix.0);
                    writes.insert(key.clone(), Some(Value::from(bytes)));
                }
                Op::Delete(key) => drop(writes.insert(key.clone(), None)),
                Op::Call(call) => {
                    let values: Vec<_> = call.reads.iter().map(current).collect();
                    for (key, value) in call.writes.iter().zip(call.run(&values)?) {
                        if value.as_ref().is_some_and(|value| value.len() > VALUE_BYTES_MAX) {
                            return Err(AbortReason::TooLarge);
                        }
                        writes.insert(key.clone(), value);
                    }
                }
            }
        }
        // Few operations may make many long values a little longer.
        if bytes_of(&writes) > TXN_BYTES_MAX { Err(AbortReason::TooLarge) } else { Ok(writes) }
    }
}

/// A value as a decimal 64-bit integer; a missing one is 0.
fn number(value: Option<&Value>) -> Option<i64> {
    value.map_or(Some(0), |value| std::str::from_utf8(&value.0).ok()?.parse().ok())
}

/// The longest value that any transaction may write, in bytes; hosts may allow their callers less.
/// Procedures are held to it where they run, because a value may grow by [`Op::Append`].
pub const VALUE_BYTES_MAX: usize = 1 << 20;

/// Why a transaction aborted: definitely, with no effect, safe to try again.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize, Wire,
)]
#[serde(rename_all = "kebab-case")]
pub enum AbortReason {
    /// It ran into another transaction on the same keys. Try again.
    Conflict,
    /// What it read was overwritten before it could commit. Try again.
    StaleRead,
    /// The caller gave up.
    Client,
    /// A guard of its procedure failed, or an operand had the wrong form. Trying again helps only
    /// if the data changed.
    Guard,
    /// Recovery found it unfinished and ended it. Try again.
    Recovery,
    /// Its client stopped sending heartbeats before it asked to commit.
    Abandoned,
    /// The cluster was too busy to take it on. Try again later.
    Overload,
    /// The request itself can never succeed: unknown keys, wrong map epoch, reused name.
    Invalid,
    /// A value would have grown beyond [`VALUE_BYTES_MAX`], what it writes beyond [`TXN_BYTES_MAX`], or what it
    /// reads at one partition is more than one message may hold. Trying again helps only if the data changed.
    TooLarge,
}

impl fmt::Display for AbortReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Conflict => "conflict",
            Self::StaleRead => "stale-read",
            Self::Client => "client",
            Self::Guard => "guard",
            Self::Recovery => "recovery",
            Self::Abandoned => "abandoned",
            Self::Overload => "overload",
            Self::Invalid => "invalid",
            Self::TooLarge => "too-large",
        })
    }
}

/// What became of a transaction, as its client is told.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Wire)]
pub enum Outcome {
    /// Committed, durably, at this timestamp.
    Committed(Timestamp),
    /// Aborted, with no effect.
    Aborted(AbortReason),
    /// Nobody here can tell. Never reported as aborted; asking again with the same name is safe.
    Unknown,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Committed(timestamp) => write!(f, "committed{timestamp}"),
            Self::Aborted(reason) => write!(f, "aborted({reason})"),
            Self::Unknown => f.write_str("unknown"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reads(pairs: &[(&str, &str)]) -> Reads {
        pairs
            .iter()
            .map(|(key, value)| {
                let read = Read { value: Some(Value::from(*value)), version: Version::INITIAL };
                (Key::from(*key), read)
            })
            .collect()
    }

    #[test]
    fn operations_see_the_effects_of_those_before_them() {
        let ops = [
            Op::Compare("a".into(), Some("1".into())),
            Op::Add("a".into(), 41),
            Op::Compare("a".into(), Some("42".into())),
            Op::Append("log".into(), "x".into()),
            Op::Append("log".into(), "y".into()),
            Op::Delete("gone".into()),
            Op::Compare("gone".into(), None),
        ];
        let writes = Txn::execute(&ops, &reads(&[("a", "1"), ("gone", "z")])).unwrap();
        assert_eq!(writes.get(&Key::from("a")), Some(&Some("42".into())));
        assert_eq!(writes.get(&Key::from("log")), Some(&Some("xy".into())));
        assert_eq!(writes.get(&Key::from("gone")), Some(&None));
    }

    #[test]
    fn a_failed_guard_aborts() {
        let cases = [
            Op::Compare("a".into(), Some("2".into())),
            Op::Compare("a".into(), None),
            Op::Add("text".into(), 1),
            Op::Add("big".into(), 1),
        ];
        let reads = reads(&[("a", "1"), ("text", "no number"), ("big", "9223372036854775807")]);
        for op in cases {
            assert_eq!(
                Txn::execute(std::slice::from_ref(&op), &reads),
                Err(AbortReason::Guard),
                "{op:?}"
            );
        }
    }

    #[test]
    fn no_value_grows_beyond_the_bound() {
        let append = |bytes: usize| vec![Op::Append("a".into(), vec![b'x'; bytes].into())];
        let writes = Txn::execute(&append(VALUE_BYTES_MAX - 1), &reads(&[("a", "1")])).unwrap();
        let full = writes[&Key::from("a")].clone().unwrap();
        assert_eq!(full.len(), VALUE_BYTES_MAX);
        let held = Read { value: Some(full), version: Version::INITIAL };
        let reads = Reads::from([("a".into(), held)]);
        assert_eq!(Txn::execute(&append(0), &reads).unwrap().len(), 1);
        assert_eq!(Txn::execute(&append(1), &reads), Err(AbortReason::TooLarge));
    }

    #[test]
    fn no_transaction_writes_more_than_one_message_can_carry() {
        let long = vec![b'x'; VALUE_BYTES_MAX - 1];
        let held: Reads = (0..9)
            .map(|number| {
                let value = Some(Value::from(long.clone()));
                (Key::from(format!("k{number}")), Read { value, version: Version::INITIAL })
            })
            .collect();
        let append = |count: usize| -> Vec<Op> {
            let keys = held.keys().take(count).cloned();
            keys.map(|key| Op::Append(key, "x".into())).collect()
        };
        assert_eq!(Txn::execute(&append(7), &held).unwrap().len(), 7);
        assert_eq!(Txn::execute(&append(9), &held), Err(AbortReason::TooLarge));
    }

    #[test]
    fn a_procedure_declares_the_keys_its_operations_touch() {
        let id = TxnId::new(crate::ClientId(1), 1);
        let ops =
            vec![Op::Put("b".into(), "1".into()), Op::Add("a".into(), 1), Op::Get("c".into())];
        let txn = Txn::procedure(id, RegionId(0), ops);
        assert_eq!(txn.reads, ["a", "c"].map(Key::from));
        assert_eq!(txn.writes, ["a", "b"].map(Key::from));
    }
}
