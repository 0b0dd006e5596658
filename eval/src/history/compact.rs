//! The compact form of a history, and the rules for a history that can be checked.

use orthodrome_core::id::TxnId;
use orthodrome_core::txn::Version;

use super::dense::Dense;
use super::intern::{HashIndex, Keys, hash_words};
use super::{Entry, Op, ReadError, Reader, Status};

/// A key's number.
pub(crate) type KeyId = u32;

/// The completion time of an attempt that never completed.
pub(crate) const NEVER: u64 = u64::MAX;
/// No attempt.
pub(crate) const NOBODY: u32 = u32::MAX;
/// A commit timestamp that the history does not state.
pub(crate) const UNKNOWN: u64 = u64::MAX;

/// The most attempts, and the most keys, of one history. The checker's edge labels have room for so
/// many.
const LIMIT_ROWS: u32 = 1 << 28;
/// The most operations of one history. It keeps every edge number below `u32::MAX`.
pub(crate) const LIMIT_OPS: u32 = 1 << 29;

/// What is wrong with an entry, without the line number.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("field `{field}`: {problem}; {remedy}")]
pub struct FormError {
    /// The field at fault, with the index of the operation where there is one: `ops[2]`.
    pub field: String,
    /// What is wrong with it.
    pub problem: String,
    /// What to do.
    pub remedy: String,
}

impl FormError {
    pub(super) fn new(
        field: impl Into<String>,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self { field: field.into(), problem: problem.into(), remedy: remedy.into() }
    }
}

/// A whole history in memory, ready to be checked.
///
/// Attempts are numbered in the order in which they were added.
#[derive(Clone, Debug, Default)]
pub struct History {
    attempts: Dense<Attempt>,
    ops: Dense<CompactOp>,
    names: Dense<Name>,
    name_index: HashIndex,
    keys: Keys,
    kinds: Dense<KeyKind>,
    /// The longest list that reads by committed transactions agree on, by key.
    trunks: Dense<Vec<u64>>,
    /// The number of elements of all trunks.
    trunk_elements: usize,
    /// Lists read that were no prefix of the trunk when they were added.
    odd_lists: Dense<Box<[u64]>>,
    /// Versions read whose timestamp is not the one first claimed for their writer.
    odd_versions: Dense<(u32, u64)>,
}

#[derive(Clone, Copy, Debug)]
struct Attempt {
    invoke_us: u64,
    complete_us: u64,
    process: u64,
    /// The commit timestamp of the versions it wrote, or [`UNKNOWN`].
    timestamp: u64,
    name: u32,
    ops_end: u32,
    status: Status,
    is_stale: bool,
}

#[derive(Clone, Copy, Debug)]
struct Name {
    id: TxnId,
    /// The first timestamp that was mentioned with this name, or [`UNKNOWN`]. It only saves space,
    /// and proves nothing.
    claimed: u64,
    /// The attempt of this name, or [`NOBODY`].
    attempt: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum KeyKind {
    List,
    Versions,
}

/// Sixteen bytes an operation.
#[derive(Clone, Copy, Debug)]
enum CompactOp {
    Append { key: KeyId, element: u64 },
    ReadPrefix { key: KeyId, len: u32 },
    ReadOddList { key: KeyId, odd: u32 },
    ReadVersion { key: KeyId, name: u32 },
    ReadOddVersion { key: KeyId, odd: u32 },
    Write { key: KeyId, deletes: bool },
}

/// A list that was read: a prefix of the key's trunk, or a list stored separately.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ListRef {
    Prefix(u32),
    Odd(u32),
}

/// One operation as the checker sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum OpRef {
    Append {
        key: KeyId,
        element: u64,
    },
    ReadList {
        key: KeyId,
        list: ListRef,
    },
    /// `writer` is the attempt that the version names, or [`NOBODY`]; `name` is the number of its
    /// name.
    ReadVersion {
        key: KeyId,
        name: u32,
        writer: u32,
        timestamp: u64,
    },
    /// `deletes` is true if the version has no value.
    Write {
        key: KeyId,
        deletes: bool,
    },
}

impl History {
    /// An empty history.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Reads a whole history.
    ///
    /// # Errors
    /// If the input cannot be read, if a line is not an entry, or if a line breaks a rule of
    /// [`Self::push`]. The error names the line, the field and the remedy.
    pub fn read(input: impl std::io::BufRead) -> Result<Self, ReadError> {
        let mut history = Self::new();
        let mut reader = Reader::new(input);
        while let Some(entry) = reader.next() {
            let entry = entry?;
            history.push(&entry).map_err(|form| ReadError::Form { line: reader.line(), form })?;
        }
        Ok(history)
    }

    /// The number of attempts.
    #[must_use]
    pub fn len(&self) -> usize {
        self.attempts.rows().len()
    }

    /// True if there are no attempts.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds an attempt. After an error the history must not be checked: it may contain a part of
    /// the attempt.
    ///
    /// # Errors
    /// If the name is not a transaction's name, is reserved, or is already taken; if an attempt
    /// completes before it begins, or is `ok` without completion; if a written version names
    /// another writer or a second commit timestamp; if a key has both lists and versions; or if the
    /// history needs more than 32-bit ids.
    pub fn push(&mut self, entry: &Entry) -> Result<(), FormError> {
        let name = self.claim_name(&entry.txn)?;
        let complete_us = completion(entry)?;
        let attempt = self.attempts.len();
        let mut timestamp = UNKNOWN;
        for (index, op) in entry.ops.iter().enumerate() {
            let compact =
                self.compact(op, entry, name, &mut timestamp).map_err(|(problem, remedy)| {
                    FormError::new(format!("ops[{index}]"), problem, remedy)
                })?;
            self.ops.push(compact);
        }
        let too_large = |what: &str| {
            let remedy = "split the history where no transaction is pending";
            FormError::new("ops", format!("the history has too many {what}"), remedy)
        };
        if attempt >= LIMIT_ROWS || self.keys.len() > LIMIT_ROWS {
            return Err(too_large("attempts or keys"));
        }
        if self.ops.len() > LIMIT_OPS || self.trunk_elements > LIMIT_OPS as usize {
            return Err(too_large("operations or elements"));
        }
        self.names[name].attempt = attempt;
        self.attempts.push(Attempt {
            invoke_us: entry.invoke_us,
            complete_us,
            process: entry.process,
            timestamp,
            name,
            ops_end: self.ops.len(),
            status: entry.status,
            is_stale: entry.stale,
        });
        Ok(())
    }

    fn claim_name(&mut self, txn: &str) -> Result<u32, FormError> {
        let id: TxnId = txn.parse().map_err(|error| {
            FormError::new("txn", format!("{error}"), "name attempts as in c4.19 or c4.19#2")
        })?;
        if id == Version::INITIAL.writer {
            let remedy = "client 0 is the writer of initial versions; number clients from 1";
            return Err(FormError::new("txn", format!("{id} is reserved"), remedy));
        }
        let name = self.intern_name(id);
        if self.names[name].attempt == NOBODY {
            return Ok(name);
        }
        let remedy = "write one line for each attempt, each with its own name, as in c4.19#2";
        Err(FormError::new("txn", format!("{id} has a line already"), remedy))
    }

    fn intern_name(&mut self, id: TxnId) -> u32 {
        let hash = hash_words([id.client.0, id.counter, u64::from(id.attempt)]);
        if let Some(name) = self.name_index.find(hash, |name| self.names[name].id == id) {
            return name;
        }
        let name = self.names.push(Name { id, claimed: UNKNOWN, attempt: NOBODY });
        self.name_index.add(hash, name);
        name
    }

    /// One operation in brief, or what is wrong with it and the remedy.
    fn compact(
        &mut self,
        op: &Op,
        entry: &Entry,
        name: u32,
        timestamp: &mut u64,
    ) -> Result<CompactOp, (String, &'static str)> {
        match op {
            Op::Append(key, element) => {
                Ok(CompactOp::Append { key: self.key(key, KeyKind::List)?, element: *element })
            }
            Op::ReadList(key, list) => {
                let key = self.key(key, KeyKind::List)?;
                self.compact_list(key, list, entry.status)
            }
            Op::ReadVersion(key, version) => {
                let key = self.key(key, KeyKind::Versions)?;
                let (id, at) = parse_version(version)?;
                let writer = self.intern_name(id);
                let claimed = &mut self.names[writer].claimed;
                if *claimed == UNKNOWN {
                    *claimed = at;
                }
                if *claimed == at {
                    return Ok(CompactOp::ReadVersion { key, name: writer });
                }
                Ok(CompactOp::ReadOddVersion { key, odd: self.odd_versions.push((writer, at)) })
            }
            Op::WriteVersion(key, version) | Op::DeleteVersion(key, version) => {
                let deletes = matches!(op, Op::DeleteVersion(..));
                let key = self.key(key, KeyKind::Versions)?;
                if let Some(version) = version {
                    self.check_written(version, name, timestamp)?;
                }
                Ok(CompactOp::Write { key, deletes })
            }
        }
    }

    fn key(&mut self, name: &str, kind: KeyKind) -> Result<KeyId, (String, &'static str)> {
        let key = self.keys.intern(name);
        if key == self.kinds.len() {
            self.kinds.push(kind);
            self.trunks.push(Vec::new());
        }
        if self.kinds[key] == kind {
            return Ok(key);
        }
        let problem = format!("{name:?} has lists in some entries and versions in others");
        Err((problem, "record a key the same way in the whole history"))
    }

    fn compact_list(
        &mut self,
        key: KeyId,
        list: &[u64],
        status: Status,
    ) -> Result<CompactOp, (String, &'static str)> {
        let len = u32::try_from(list.len())
            .map_err(|_| ("the list is too long".to_owned(), "spread appends over more keys"))?;
        let trunk = &mut self.trunks[key];
        if trunk.starts_with(list) {
            return Ok(CompactOp::ReadPrefix { key, len });
        }
        // Only reads of committed transactions say anything about the order of versions.
        if status == Status::Ok && list.starts_with(trunk) {
            self.trunk_elements += list.len() - trunk.len();
            *trunk = list.to_vec();
            return Ok(CompactOp::ReadPrefix { key, len });
        }
        Ok(CompactOp::ReadOddList { key, odd: self.odd_lists.push(list.into()) })
    }

    fn check_written(
        &mut self,
        version: &str,
        name: u32,
        timestamp: &mut u64,
    ) -> Result<(), (String, &'static str)> {
        let (id, at) = parse_version(version)?;
        if id != self.names[name].id {
            let problem = format!("{version:?} is a version of another transaction");
            return Err((problem, "a transaction writes versions in its own name"));
        }
        if at == 0 {
            let problem = format!("{version:?} has the timestamp of the initial version");
            return Err((problem, "commit timestamps start at 1"));
        }
        if *timestamp != UNKNOWN && *timestamp != at {
            let problem = format!("{version:?} is a second commit timestamp");
            return Err((problem, "a transaction commits at one timestamp"));
        }
        *timestamp = at;
        let claimed = &mut self.names[name].claimed;
        if *claimed == UNKNOWN {
            *claimed = at;
        }
        Ok(())
    }

    /// All attempts.
    pub(crate) fn attempts(&self) -> std::ops::Range<u32> {
        self.attempts.ids()
    }

    /// The attempt's name.
    pub(crate) fn txn(&self, attempt: u32) -> TxnId {
        self.names[self.attempts[attempt].name].id
    }

    /// The name of that number.
    pub(crate) fn name(&self, name: u32) -> TxnId {
        self.names[name].id
    }

    /// The outcome that its client received.
    pub(crate) fn status(&self, attempt: u32) -> Status {
        self.attempts[attempt].status
    }

    /// True if it is a stale read.
    pub(crate) fn is_stale(&self, attempt: u32) -> bool {
        self.attempts[attempt].is_stale
    }

    /// The process that submitted it.
    pub(crate) fn process(&self, attempt: u32) -> u64 {
        self.attempts[attempt].process
    }

    /// When it was invoked, in microseconds.
    pub(crate) fn invoke_us(&self, attempt: u32) -> u64 {
        self.attempts[attempt].invoke_us
    }

    /// When it completed, in microseconds; [`NEVER`] unless it is known to have committed.
    pub(crate) fn complete_us(&self, attempt: u32) -> u64 {
        self.attempts[attempt].complete_us
    }

    /// The commit timestamp that its own operations state, or [`UNKNOWN`].
    pub(crate) fn timestamp(&self, attempt: u32) -> u64 {
        self.attempts[attempt].timestamp
    }

    /// Its operations, in order.
    pub(crate) fn ops(&self, attempt: u32) -> impl DoubleEndedIterator<Item = OpRef> + '_ {
        let start = if attempt == 0 { 0 } else { self.attempts[attempt - 1].ops_end };
        let ops = self.ops.slice(start..self.attempts[attempt].ops_end);
        ops.iter().map(|op| self.op_ref(*op))
    }

    fn op_ref(&self, op: CompactOp) -> OpRef {
        let version = |key, name: u32, timestamp| {
            let writer = self.names[name].attempt;
            OpRef::ReadVersion { key, name, writer, timestamp }
        };
        match op {
            CompactOp::Append { key, element } => OpRef::Append { key, element },
            CompactOp::ReadPrefix { key, len } => {
                OpRef::ReadList { key, list: ListRef::Prefix(len) }
            }
            CompactOp::ReadOddList { key, odd } => OpRef::ReadList { key, list: ListRef::Odd(odd) },
            CompactOp::ReadVersion { key, name } => version(key, name, self.names[name].claimed),
            CompactOp::ReadOddVersion { key, odd } => {
                let (name, timestamp) = self.odd_versions[odd];
                version(key, name, timestamp)
            }
            CompactOp::Write { key, deletes } => OpRef::Write { key, deletes },
        }
    }

    /// The number of keys.
    pub(crate) fn keys_len(&self) -> u32 {
        self.keys.len()
    }

    /// The name of a key.
    pub(crate) fn key_name(&self, key: KeyId) -> &str {
        self.keys.name(key)
    }

    /// The longest list that reads by committed transactions agree on.
    pub(crate) fn trunk(&self, key: KeyId) -> &[u64] {
        &self.trunks[key]
    }

    /// A list that was no prefix of the trunk when it was added.
    pub(crate) fn odd_list(&self, odd: u32) -> &[u64] {
        &self.odd_lists[odd]
    }

    /// The number of lists stored separately.
    pub(crate) fn odd_lists_len(&self) -> u32 {
        self.odd_lists.len()
    }
}

/// When the attempt completed; [`NEVER`] if it may still take effect.
fn completion(entry: &Entry) -> Result<u64, FormError> {
    match (entry.status, entry.complete_us) {
        (_, Some(complete_us)) if complete_us < entry.invoke_us => {
            let problem = format!("{complete_us} is before invoke_us, {}", entry.invoke_us);
            Err(FormError::new("complete_us", problem, "take both from one monotonic clock"))
        }
        (Status::Ok, None) => {
            let remedy =
                "record when the client learned the outcome, or status info if it never did";
            Err(FormError::new("complete_us", "missing although the status is ok", remedy))
        }
        (Status::Ok, Some(complete_us)) => Ok(complete_us.min(NEVER - 1)),
        (Status::Fail | Status::Info, _) => Ok(NEVER),
    }
}

fn parse_version(version: &str) -> Result<(TxnId, u64), (String, &'static str)> {
    let parsed = version.split_once('@').and_then(|(writer, timestamp)| {
        Some((writer.parse::<TxnId>().ok()?, timestamp.parse::<u64>().ok()?))
    });
    parsed.filter(|(_, timestamp)| *timestamp != UNKNOWN).ok_or_else(|| {
        (format!("{version:?} is not a version"), "write versions as writer@timestamp: c4.19@1700")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(txn: &str, status: Status, ops: Vec<Op>) -> Entry {
        Entry {
            txn: txn.into(),
            process: 1,
            region: "VA".into(),
            priority: "low".into(),
            stale: false,
            invoke_us: 5,
            complete_us: Some(9),
            status,
            ops,
        }
    }

    fn field_of(entries: &[Entry]) -> String {
        let mut history = History::new();
        let results: Vec<_> = entries.iter().map(|entry| history.push(entry)).collect();
        let (last, before) = results.split_last().unwrap();
        assert!(before.iter().all(Result::is_ok), "{before:?}");
        last.clone().unwrap_err().field
    }

    #[test]
    fn operations_stay_small() {
        assert_eq!(size_of::<CompactOp>(), 16);
        assert!(size_of::<Attempt>() <= 48);
    }

    #[test]
    fn entries_that_cannot_be_judged_are_refused() {
        let ok = |txn, ops| entry(txn, Status::Ok, ops);
        let write = |version: &str| Op::WriteVersion("k".into(), Some(version.into()));
        assert_eq!(field_of(&[ok("x", vec![])]), "txn");
        assert_eq!(field_of(&[ok("c0.0", vec![])]), "txn");
        assert_eq!(field_of(&[ok("c1.1", vec![]), ok("c1.1", vec![])]), "txn");
        assert_eq!(field_of(&[Entry { complete_us: None, ..ok("c1.1", vec![]) }]), "complete_us");
        assert_eq!(
            field_of(&[Entry { complete_us: Some(4), ..ok("c1.1", vec![]) }]),
            "complete_us"
        );
        assert_eq!(field_of(&[ok("c1.1", vec![write("c1.2@7")])]), "ops[0]");
        assert_eq!(field_of(&[ok("c1.1", vec![write("c1.1@0")])]), "ops[0]");
        assert_eq!(field_of(&[ok("c1.1", vec![write("c1.1@7"), write("c1.1@8")])]), "ops[1]");
        assert_eq!(field_of(&[ok("c1.1", vec![write("seven")])]), "ops[0]");
        let mixed = vec![Op::Append("k".into(), 1), write("c1.1@7")];
        assert_eq!(field_of(&[ok("c1.1", mixed)]), "ops[1]");
    }

    #[test]
    fn reads_shrink_to_prefixes_whatever_their_order() {
        let read = |list: &[u64]| Op::ReadList("k".into(), list.to_vec());
        let mut history = History::new();
        let ops = vec![read(&[1]), read(&[1, 2, 3]), read(&[]), read(&[1, 4])];
        history.push(&entry("c1.1", Status::Ok, ops)).unwrap();
        // The reads of a failed transaction must not decide the order.
        history.push(&entry("c1.2", Status::Fail, vec![read(&[1, 2, 3, 9])])).unwrap();
        assert_eq!(history.trunk(0), [1, 2, 3]);
        let ops: Vec<_> =
            history.attempts().flat_map(|a| history.ops(a).collect::<Vec<_>>()).collect();
        let expected = [
            ListRef::Prefix(1),
            ListRef::Prefix(3),
            ListRef::Prefix(0),
            ListRef::Odd(0),
            ListRef::Odd(1),
        ];
        assert_eq!(ops, expected.map(|list| OpRef::ReadList { key: 0, list }));
        assert_eq!(history.odd_list(1), [1, 2, 3, 9]);
    }

    #[test]
    fn a_second_timestamp_for_one_writer_is_kept() {
        let read = |version: &str| Op::ReadVersion("k".into(), version.into());
        let mut history = History::new();
        history
            .push(&entry("c1.1", Status::Ok, vec![read("c1.2@5"), read("c1.2@6"), read("c0.0@0")]))
            .unwrap();
        history
            .push(&entry("c1.2", Status::Info, vec![Op::WriteVersion("k".into(), None)]))
            .unwrap();
        // c1.2 was named second, after the reader, and c0.0 third.
        let expected = [(1, 1, 5), (1, 1, 6), (2, NOBODY, 0)].map(|(name, writer, timestamp)| {
            OpRef::ReadVersion { key: 0, name, writer, timestamp }
        });
        assert_eq!(history.ops(0).collect::<Vec<_>>(), expected);
        assert_eq!(history.name(1).to_string(), "c1.2");
    }
}
