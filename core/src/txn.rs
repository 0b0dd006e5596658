//! Transactions as every protocol sees them: their reads, writes and outcomes.

use std::fmt;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::id::{Content, RegionId, TxnId};
pub use crate::key::Key;
use crate::limits::{TXN_BYTES_MAX, bytes_of};
use crate::ordered::OrdMap;
use crate::procedure::Call;
use crate::scan::KeyRange;
use crate::session::Floors;
use crate::time::Timestamp;
use crate::wire::{self, Wire, WireError};

/// A value: any bytes.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Wire)]
pub struct Value(pub Bytes);

impl Value {
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

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self(Bytes::copy_from_slice(text.as_bytes()))
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Self(Bytes::from(text))
    }
}

impl From<Vec<u8>> for Value {
    fn from(bytes: Vec<u8>) -> Self {
        Self(Bytes::from(bytes))
    }
}

impl fmt::Display for Value {
    /// Printable ASCII as it is, any other byte as `\xNN`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.escape_ascii().fmt(f)
    }
}

impl fmt::Debug for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The priority of a transaction: higher is more important.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug, Serialize, Deserialize, Wire,
)]
#[serde(transparent)]
pub struct Priority(pub u8);

impl Priority {
    /// The default priority.
    pub const LOW: Self = Self(0);
    /// For transactions whose tail latency matters.
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

/// The write that a read saw: commit timestamp and name of the transaction that wrote it.
///
/// Versions of one key are totally ordered by timestamp. [`Version::INITIAL`] is the version of a
/// key that was never written.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug, Wire)]
pub struct Version {
    /// Commit timestamp of the writer.
    pub timestamp: Timestamp,
    /// The writer.
    pub writer: TxnId,
}

impl Version {
    /// The version of a key that was never written.
    pub const INITIAL: Self =
        Self { timestamp: Timestamp::ZERO, writer: TxnId::new(crate::ClientId(0), 0) };

    /// True if nobody wrote it: the key was never written, or its deletion has been forgotten. The
    /// timestamp then says only which transactions the server that was asked has run.
    #[must_use]
    pub fn is_unwritten(self) -> bool {
        self.writer == Self::INITIAL.writer
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.writer, self.timestamp.0)
    }
}

/// The value of one key, if it has one, and its version.
#[derive(Clone, PartialEq, Eq, Default, Debug, Wire)]
pub struct Read {
    /// None if the key was never written, or was deleted.
    pub value: Option<Value>,
    /// The version. If nobody wrote it ([`Version::is_unwritten`]), every version of the key up to
    /// its timestamp had been written, and deleted again, when the key was read.
    pub version: Version,
}

impl Read {
    /// The version by which replicas compare what was read. They drop deletions at different times,
    /// so an absent key has its initial version, whether they remember that it was deleted or not. A
    /// key that was written and deleted again in between is as absent as before.
    #[must_use]
    pub fn compared(&self) -> Version {
        if self.value.is_some() { self.version } else { Version::INITIAL }
    }

    /// A read of which only the compared version is known: enough to check that it still holds. If
    /// there was a value, an empty one stands for it.
    #[must_use]
    pub fn without_value(compared: Version) -> Self {
        let value = (!compared.is_unwritten()).then(Value::default);
        Self { value, version: compared }
    }
}

/// The reads of a transaction, by key.
pub type Reads = OrdMap<Key, Read>;

/// The writes of a transaction, by key; none deletes the key.
pub type Writes = OrdMap<Key, Option<Value>>;

/// The decision of the client of an interactive or general transaction.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Decision {
    /// Commit these writes: of keys declared as writes, or, in a general transaction, of any keys.
    Commit(Writes),
    /// Abort; nothing is written.
    Abort,
}

impl Outcome {
    /// Refuses the outcome `Unknown`, for containers of decided outcomes.
    ///
    /// # Errors
    /// If the outcome is unknown.
    pub fn check_decided(&self) -> Result<(), WireError> {
        if *self == Self::Unknown {
            let (field, found) = ("Outcome", "unknown".into());
            return Err(WireError::Value { field, found, wanted: "a commit or an abort" });
        }
        Ok(())
    }
}

/// One guarded operation of a built-in procedure. Operations run in order, and later ones see the
/// effects of earlier ones.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Op {
    /// Reads a key.
    Get(Key),
    /// Aborts the transaction unless the key has exactly this value (none: the key is absent).
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
    /// Calls a stored procedure, which may read and write several keys.
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

/// The kind of a transaction: how its writes are determined.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Kind {
    /// Two rounds and fixed sets: the client receives the reads and answers with a [`Decision`]
    /// (Carousel §3.2).
    Interactive,
    /// Any number of rounds of reads, whose keys the client chooses round by round; then a
    /// [`Decision`], which may write any key. Not every protocol runs them
    /// ([`crate::Protocol::GENERAL`]). For the other protocols the client library reads first and
    /// then declares the keys that it found (reconnaissance).
    General,
    /// A deterministic function of its reads: guarded operations.
    Procedure(Vec<Op>),
    /// Reads only; one consistent snapshot.
    ReadOnly,
    /// Reads one consistent snapshot, which may be old: the state of the nearest replica. The
    /// snapshot has all effects of a transaction or none, and also the transactions on which it
    /// depends. It may miss commits that were acknowledged before it began, and two such reads may
    /// disagree about the order of two independent transactions. Protocols without a shorter path
    /// treat it as [`Kind::ReadOnly`], which promises more.
    StaleReadOnly,
}

/// One attempt at a transaction, as its client declares it.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Txn {
    /// Its id, which includes the attempt.
    pub id: TxnId,
    /// The region of the gateway where it began. It stays the same for all attempts, so that
    /// another node that resolves the transaction finds the same coordinator.
    pub home: RegionId,
    /// Its priority.
    pub priority: Priority,
    /// How its writes are determined.
    pub kind: Kind,
    /// Keys that it reads, sorted and without duplicates. In a general transaction, the keys of the
    /// first round, if it has one.
    #[wire(ascending)]
    pub reads: Vec<Key>,
    /// Keys that it may write, sorted and without duplicates; may overlap `reads`. A general
    /// transaction declares none: there it is only a hint which keys to lock for writing when they
    /// are read.
    #[wire(ascending)]
    pub writes: Vec<Key>,
    /// The client knows the outcomes of all its transactions with a smaller counter, and will never
    /// ask for them again (`protocol-pitfalls` R6).
    pub acknowledged_below: u64,
    /// The oldest versions that may still be shown to its client, for keys that it reads or writes
    /// (`docs/pitfalls.md`, R11). An older read must not be returned.
    pub floors: Floors,
    /// The keys for which the fences among its reads stand, if it is the read of a scan; none: all
    /// keys of their partitions ([`crate::scan`]).
    pub fenced: Option<KeyRange>,
}

impl Txn {
    /// The transaction under an id with the digest of its content. The digest leaves out what a client
    /// may change when it asks for the outcome again: the priority, the acknowledgement, and the
    /// versions that it knows.
    #[must_use]
    pub fn with_content(self) -> Self {
        let Self { home, kind, reads, writes, .. } = self.clone();
        let plain = Self::new(TxnId::default(), home, kind, reads, writes);
        let content = Content::of(&wire::encode(&plain));
        Self { id: TxnId { content, ..self.id }, ..self }
    }

    /// The id under which the decision of its client is carried out, for protocols in which no server
    /// knows the transaction before. Its content includes the decision, so that two decisions are two
    /// transactions. An id without content stays as it is.
    #[must_use]
    pub fn decided(&self, reads: &Reads, writes: &Writes) -> TxnId {
        if self.id.content == Content::NONE {
            return self.id;
        }
        let seen = reads.iter().map(|(key, read)| (key.clone(), read.compared()));
        let decision = (seen.collect::<Vec<_>>(), writes.clone());
        TxnId { content: self.id.content.and(&wire::encode(&decision)), ..self.id }
    }

    /// An interactive transaction.
    #[must_use]
    pub fn interactive(id: TxnId, home: RegionId, reads: Vec<Key>, writes: Vec<Key>) -> Self {
        Self::new(id, home, Kind::Interactive, reads, writes)
    }

    /// A general transaction whose first round reads these keys.
    #[must_use]
    pub fn general(id: TxnId, home: RegionId, reads: Vec<Key>) -> Self {
        Self::new(id, home, Kind::General, reads, Vec::new())
    }

    /// A read-only transaction.
    #[must_use]
    pub fn read_only(id: TxnId, home: RegionId, reads: Vec<Key>) -> Self {
        Self::new(id, home, Kind::ReadOnly, reads, Vec::new())
    }

    /// A stale read ([`Kind::StaleReadOnly`]).
    #[must_use]
    pub fn stale_read_only(id: TxnId, home: RegionId, reads: Vec<Key>) -> Self {
        Self::new(id, home, Kind::StaleReadOnly, reads, Vec::new())
    }

    /// A procedure of guarded operations; its key sets follow from the operations. A procedure that
    /// writes nothing is a read-only transaction whose comparisons the gateway checks.
    #[must_use]
    pub fn procedure(id: TxnId, home: RegionId, ops: Vec<Op>) -> Self {
        let reads = ops.iter().flat_map(Op::reads).cloned().collect();
        let writes = ops.iter().flat_map(Op::writes).cloned().collect();
        Self::new(id, home, Kind::Procedure(ops), reads, writes)
    }

    fn new(id: TxnId, home: RegionId, kind: Kind, reads: Vec<Key>, writes: Vec<Key>) -> Self {
        let (priority, acknowledged_below) = (Priority::LOW, 0);
        let (floors, fenced) = (Floors::new(), None);
        let mut txn =
            Self { id, home, priority, kind, reads, writes, acknowledged_below, floors, fenced };
        txn.reads.sort_unstable();
        txn.reads.dedup();
        txn.writes.sort_unstable();
        txn.writes.dedup();
        txn
    }

    /// True if it certainly writes nothing, so that a snapshot suffices.
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

    /// Runs a procedure on the values read.
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
        // A few operations may extend many long values.
        if bytes_of(&writes) > TXN_BYTES_MAX { Err(AbortReason::TooLarge) } else { Ok(writes) }
    }
}

/// A value as a decimal 64-bit integer; a missing one is 0.
fn number(value: Option<&Value>) -> Option<i64> {
    value.map_or(Some(0), |value| std::str::from_utf8(&value.0).ok()?.parse().ok())
}

/// The longest value that any transaction may write, in bytes; hosts may allow less. Procedures
/// check it when they run, because [`Op::Append`] may extend a value.
pub const VALUE_BYTES_MAX: usize = 1 << 20;

/// The reason why a transaction aborted: definitely, without effect, and safe to retry.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize, Wire,
)]
#[serde(rename_all = "kebab-case")]
pub enum AbortReason {
    /// It conflicted with another transaction. Retry.
    Conflict,
    /// A value that it read was overwritten before it could commit. Retry.
    StaleRead,
    /// The client aborted it.
    Client,
    /// A guard of its procedure failed, or an operand had the wrong form. A retry helps only if the
    /// data changed.
    Guard,
    /// Recovery found it unfinished and aborted it. Retry.
    Recovery,
    /// Its client stopped extending its lease before it asked to commit.
    Abandoned,
    /// The cluster was too busy to accept it. Retry later.
    Overload,
    /// The request can never succeed: unknown keys, wrong epoch of the placement, or a reused name.
    Invalid,
    /// A value would exceed [`VALUE_BYTES_MAX`], its writes [`TXN_BYTES_MAX`], or its reads at one
    /// partition the size of a message. A retry helps only if the data changed.
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

/// The outcome of a transaction that its client receives.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Wire)]
pub enum Outcome {
    /// Committed at this timestamp, and durable.
    Committed(Timestamp),
    /// Aborted, with no effect.
    Aborted(AbortReason),
    /// This node does not know the outcome. It is never reported as aborted. Asking again under the
    /// same name is safe.
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
