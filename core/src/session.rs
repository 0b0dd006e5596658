//! The versions that a client has seen, so that none of its later reads is older: read your writes,
//! and monotonic reads (`docs/pitfalls.md`, R11).
//!
//! A [`Session`] remembers the newest version of each key that its client wrote or read in a
//! committed transaction. A transaction has the versions of its own keys as [`Floors`]. A read
//! below its floor is stale: the node that serves it waits for a newer version or ends the attempt.
//! A key that the session never touched has no floor, so sessions cost nothing for transactions
//! without conflicts.

use crate::ordered::OrdMap;
use crate::wire::Wire;

use crate::key::{Placed, placed};
use crate::time::Timestamp;
use crate::txn::{Key, Op, Read, Reads, Writes};

/// The oldest version of one key that a session may still read.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Wire)]
pub struct Floor {
    /// Its commit timestamp.
    pub timestamp: Timestamp,
    /// True if this version is, or may be, a deletion, or the key was absent at this time. Servers
    /// drop old deletions, and say of an absent key what they have run. So a read that finds the key
    /// absent, of a version that nobody wrote, also satisfies such a floor.
    pub is_deletion: bool,
}

impl Floor {
    /// True if this read is not older than the floor.
    #[must_use]
    pub fn admits(self, read: &Read) -> bool {
        read.version.timestamp >= self.timestamp
            || (self.is_deletion && read.value.is_none() && read.version.is_unwritten())
    }
}

/// Floors by key. A key that the session never touched has none.
pub type Floors = OrdMap<Key, Floor>;

/// True if one of these reads is older than its floor.
pub fn is_below<'a>(floors: &Floors, reads: impl IntoIterator<Item = (&'a Key, &'a Read)>) -> bool {
    !floors.is_empty()
        && reads
            .into_iter()
            .any(|(key, read)| floors.get(key).is_some_and(|floor| !floor.admits(read)))
}

/// The highest floor of these keys; zero if none has a floor.
pub fn highest<'a>(floors: &Floors, keys: impl IntoIterator<Item = &'a Key>) -> Timestamp {
    if floors.is_empty() {
        return Timestamp::ZERO;
    }
    let floors = keys.into_iter().filter_map(|key| floors.get(key));
    floors.map(|floor| floor.timestamp).max().unwrap_or_default()
}

/// The largest number of keys that one session remembers. When it is full, it forgets the keys that
/// it saw longest ago.
pub const KEYS_MAX: usize = 4_096;

/// The largest total length of the keys that one session remembers, in bytes.
pub const BYTES_MAX: usize = 1 << 20;

/// The versions that one client has seen, by key.
#[derive(Clone, Debug)]
pub struct Session {
    floors: OrdMap<Placed, (Floor, u64)>,
    /// Keys in the order in which they were last seen.
    order: OrdMap<u64, Key>,
    told: u64,
    bytes: usize,
    keys_max: usize,
    bytes_max: usize,
}

impl Default for Session {
    /// A session with the limits [`KEYS_MAX`] and [`BYTES_MAX`].
    fn default() -> Self {
        Self::bounded(KEYS_MAX, BYTES_MAX)
    }
}

impl Session {
    /// A session with these limits on the number of keys and on their total bytes.
    #[must_use]
    pub fn bounded(keys_max: usize, bytes_max: usize) -> Self {
        let (floors, order) = (OrdMap::new(), OrdMap::new());
        Self { floors, order, told: 0, bytes: 0, keys_max, bytes_max }
    }

    /// A transaction with these reads committed.
    pub fn read(&mut self, reads: &Reads) {
        for (key, Read { value, version }) in reads {
            self.raise(key, version.timestamp, value.is_none());
        }
    }

    /// A transaction with these writes committed at `at`.
    pub fn wrote(&mut self, at: Timestamp, writes: &Writes) {
        for (key, value) in writes {
            self.raise(key, at, value.is_none());
        }
    }

    /// A procedure with these operations committed at `at`.
    pub fn ran(&mut self, at: Timestamp, ops: &[Op]) {
        let mut writes: OrdMap<&Key, bool> = OrdMap::new();
        for op in ops {
            // The value that a stored procedure wrote is not known here.
            let is_deletion = matches!(op, Op::Delete(_) | Op::Call(_));
            writes.extend(op.writes().iter().map(|key| (key, is_deletion)));
        }
        for (key, is_deletion) in writes {
            self.raise(key, at, is_deletion);
        }
    }

    fn raise(&mut self, key: &Key, timestamp: Timestamp, is_deletion: bool) {
        if timestamp == Timestamp::ZERO {
            return;
        }
        self.told += 1;
        let told = self.told;
        match self.floors.get_mut(&placed(key)) {
            Some((floor, last)) => {
                if floor.timestamp < timestamp {
                    *floor = Floor { timestamp, is_deletion };
                }
                if let Some(key) = self.order.remove(last) {
                    self.order.insert(told, key);
                }
                *last = told;
            }
            None => {
                self.bytes += key.len();
                self.order.insert(told, key.clone());
                self.floors.insert(placed(key), (Floor { timestamp, is_deletion }, told));
            }
        }
        while self.floors.len() > self.keys_max || self.bytes > self.bytes_max {
            let Some((_, oldest)) = self.order.pop_first() else { break };
            self.floors.remove(&placed(&oldest));
            self.bytes = self.bytes.saturating_sub(oldest.len());
        }
    }

    /// The floors of these keys.
    #[must_use]
    pub fn floors_of<'a>(&self, keys: impl IntoIterator<Item = &'a Key>) -> Floors {
        let floor = |key: &Key| {
            let (floor, _) = self.floors.get(&placed(key))?;
            Some((key.clone(), *floor))
        };
        keys.into_iter().filter_map(floor).collect()
    }

    /// As [`Session::is_ahead_of`], for the reads of a transaction that committed at `at`. Everything
    /// up to then precedes it, so an absent key was deleted since the client knew a value of it.
    #[must_use]
    pub fn is_ahead_of_snapshot(&self, reads: &Reads, at: Timestamp) -> bool {
        let is_absent = |read: &Read| read.value.is_none() && read.version.is_unwritten();
        reads.iter().any(|(key, read)| {
            let floor = self.floors.get(&placed(key)).map(|(floor, _)| *floor).unwrap_or_default();
            !(floor.admits(read) || (is_absent(read) && at >= floor.timestamp))
        })
    }

    /// True if one of these reads is older than the client's floor.
    #[must_use]
    pub fn is_ahead_of(&self, reads: &Reads) -> bool {
        is_below(&self.floors_of(reads.keys()), reads)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{ClientId, TxnId};
    use crate::txn::{Value, Version};

    fn reads(key: &str, at: u64, value: Option<&str>) -> Reads {
        let writer = if at == 0 { TxnId::default() } else { TxnId::new(ClientId(1), at) };
        let version = Version { timestamp: Timestamp(at), writer };
        Reads::from([(Key::from(key), Read { value: value.map(Value::from), version })])
    }

    #[test]
    fn a_read_below_what_was_written_or_read_before_is_stale() {
        let mut session = Session::default();
        assert!(!session.is_ahead_of(&reads("k", 0, None)));
        session.wrote(Timestamp(5), &Writes::from([("k".into(), Some("v".into()))]));
        assert!(session.is_ahead_of(&reads("k", 0, None)));
        assert!(session.is_ahead_of(&reads("k", 4, Some("u"))));
        assert!(!session.is_ahead_of(&reads("k", 5, Some("v"))));
        assert!(!session.is_ahead_of(&reads("other", 0, None)));
        session.read(&reads("k", 7, Some("w")));
        assert!(session.is_ahead_of(&reads("k", 5, Some("v"))));
        // An older version changes nothing.
        session.read(&reads("k", 6, Some("x")));
        assert!(session.is_ahead_of(&reads("k", 6, Some("x"))));
        assert_eq!(highest(&session.floors_of([&"k".into()]), [&"k".into()]), Timestamp(7));
    }

    #[test]
    fn a_procedure_writes_the_keys_of_its_operations() {
        let mut session = Session::default();
        let ops = [
            Op::Get("read".into()),
            Op::Put("put".into(), "1".into()),
            Op::Put("gone".into(), "1".into()),
            Op::Delete("gone".into()),
        ];
        session.ran(Timestamp(5), &ops);
        let floors = session.floors_of(&["read", "put", "gone"].map(Key::from));
        let deletions: Vec<bool> = floors.values().map(|floor| floor.is_deletion).collect();
        assert_eq!(floors.keys().cloned().collect::<Vec<_>>(), ["gone", "put"].map(Key::from));
        assert_eq!(deletions, [true, false]);
    }

    #[test]
    fn a_forgotten_deletion_is_not_stale() {
        let mut session = Session::default();
        session.wrote(Timestamp(5), &Writes::from([("k".into(), None)]));
        assert!(session.is_ahead_of(&reads("k", 4, Some("v"))));
        assert!(!session.is_ahead_of(&reads("k", 5, None)));
        assert!(!session.is_ahead_of(&reads("k", 0, None)));
    }

    #[test]
    fn an_absent_read_tells_what_had_been_deleted_when_it_was_read() {
        let absent = |at: u64| {
            let version = Version { timestamp: Timestamp(at), ..Version::INITIAL };
            Reads::from([("k".into(), Read { value: None, version })])
        };
        let mut session = Session::default();
        session.wrote(Timestamp(5), &Writes::from([("k".into(), Some("v".into()))]));
        // A server that has run everything up to 4 may not have run the write.
        assert!(session.is_ahead_of(&absent(4)));
        assert!(!session.is_ahead_of(&absent(5)));
        session.read(&absent(6));
        // The key has been absent since then. Other servers may have run less, or know less of it.
        assert!(session.is_ahead_of(&reads("k", 5, Some("v"))));
        assert!(!session.is_ahead_of(&absent(3)));
        assert!(!session.is_ahead_of(&absent(0)));
        // A deletion that is older than what the client knows comes from a server that is behind.
        assert!(session.is_ahead_of(&reads("k", 5, None)));
    }

    #[test]
    fn what_is_absent_from_a_snapshot_had_been_deleted_before() {
        let mut session = Session::default();
        session.wrote(Timestamp(5), &Writes::from([("k".into(), Some("v".into()))]));
        let absent = reads("k", 0, None);
        assert!(session.is_ahead_of(&absent));
        assert!(session.is_ahead_of_snapshot(&absent, Timestamp(4)));
        assert!(!session.is_ahead_of_snapshot(&absent, Timestamp(6)));
        assert!(session.is_ahead_of_snapshot(&reads("k", 4, Some("u")), Timestamp(6)));
    }

    #[test]
    fn a_session_is_bounded_and_forgets_what_it_was_told_longest_ago() {
        let mut session = Session::default();
        let key = |number: usize| Key::from(format!("{number:06}"));
        for number in 0..KEYS_MAX + 10 {
            session.wrote(Timestamp(9), &Writes::from([(key(number), None)]));
            session.read(&reads("hot", 9, Some("v")));
        }
        assert_eq!(session.floors.len(), KEYS_MAX);
        assert_eq!(session.order.len(), KEYS_MAX);
        assert!(session.floors_of([&key(0)]).is_empty());
        assert_eq!(session.floors_of([&key(KEYS_MAX + 9), &Key::from("hot")]).len(), 2);
        let long = |number: usize| Key::from(format!("{number:04096}"));
        for number in 0..2_000 {
            session.wrote(Timestamp(9), &Writes::from([(long(number), None)]));
        }
        let bytes = session.floors.keys().map(|(_, key)| key.len()).sum::<usize>();
        assert_eq!(session.bytes, bytes);
        assert!(bytes <= BYTES_MAX);
    }
}
