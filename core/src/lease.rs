//! Leases: keys that are deleted when their owner does not renew the lease any more.
//!
//! A lease lives for some time, and longer if its owner renews it. When it ends, the keys that were
//! attached to it are deleted. No protocol knows leases: a lease is three keys, and everything that
//! happens to it is a transaction.
//!
//! | key | value | written by |
//! |---|---|---|
//! | `orthodrome/lease/{ID}`, the *record* | empty | the grant; it is there as long as the lease lives |
//! | `orthodrome/lease/{ID}/until` | when the lease ends | the grant and every renewal |
//! | `orthodrome/due/TIME/{ID}`, the *due entry* | empty | the same transaction |
//! | `orthodrome/lease/{ID}/key/K`, an *attachment* | empty | the transaction that writes K |
//!
//! Two keys that one transaction has written have the same version. So a due entry counts if `until`
//! has its version; otherwise the lease was renewed since. And a key is attached as long as it has
//! the version of its attachment; otherwise somebody has written it since without the lease.
//!
//! A transaction that attaches a key reads the record, and the transaction that ends a lease deletes
//! it. So no key is attached to a lease that has ended, and a gateway that lists the attachments after
//! the end finds all of them. [`Ending`] is the sequence of transactions. It may stop anywhere, and
//! several gateways may run it at once: the last transaction deletes the due entry, and a gateway that
//! still finds the entry continues.

use std::fmt;
use std::str::FromStr;

use crate::cluster::Cluster;
use crate::id::NodeId;
use crate::scan::{KeyRange, Page, Scan};
use crate::time::{Duration, Timestamp};
use crate::txn::{Key, Op, Read, Reads, Value, Writes};

/// The shortest time for which a lease may be granted or renewed.
pub const TTL_MIN: Duration = Duration::from_secs(1);

/// The longest such time: a year.
pub const TTL_MAX: Duration = Duration::from_secs(366 * 24 * 60 * 60);

/// The number of keys that one transaction of an end deletes, if their values fit into a message.
pub const KEYS_AT_ONCE: usize = 128;

/// The number of due entries that one transaction looks at.
pub const ENTRIES_AT_ONCE: usize = 64;

/// What the keys of leases begin with.
const LEASE: &str = "orthodrome/lease/";

/// What due entries begin with.
const DUE: &str = "orthodrome/due/";

/// The id of a lease: for how long it is granted and renewed, and a random number.
///
/// As text, `30000-9f86d081884c7d65`: the time in milliseconds, and 16 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LeaseId {
    ttl_ms: u64,
    nonce: u64,
}

/// Why a text is not the id of a lease.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "{0:?} is not the id of a lease; an id looks like 30000-9f86d081884c7d65, as the grant returned it"
)]
pub struct NotALease(String);

impl LeaseId {
    /// A lease that is granted and renewed for `ttl`, with a random number that no other lease has.
    /// None if the time is not between [`TTL_MIN`] and [`TTL_MAX`].
    #[must_use]
    pub fn new(ttl: Duration, nonce: u64) -> Option<Self> {
        let ttl_ms = u64::try_from(ttl.as_millis()).ok()?;
        (TTL_MIN..=TTL_MAX).contains(&ttl).then_some(Self { ttl_ms, nonce })
    }

    /// For how long it is granted and renewed.
    #[must_use]
    pub fn ttl(self) -> Duration {
        Duration::from_millis(self.ttl_ms)
    }

    /// When it ends if it is granted or renewed at `now`: an eighth later than it must. So a renewal soon
    /// after another has nothing to write, and a lease has few due entries, however often it is renewed.
    #[must_use]
    pub fn end(self, now: Timestamp) -> Timestamp {
        now + self.ttl() + self.ttl() / 8
    }

    /// The key that is there as long as the lease lives. A transaction that attaches keys must read
    /// it, and must not commit if it is absent.
    #[must_use]
    pub fn record(self) -> Key {
        Key::from(format!("{LEASE}{{{self}}}"))
    }

    /// The key whose value says when the lease ends, in nanoseconds since the Unix epoch.
    #[must_use]
    pub fn until(self) -> Key {
        Key::from(format!("{LEASE}{{{self}}}/until"))
    }

    /// The key that attaches `key`. The transaction that writes `key` must write it too, with any
    /// value.
    #[must_use]
    pub fn attachment(self, key: &Key) -> Key {
        Key::from([self.attachments_prefix().as_bytes(), key.bytes()].concat())
    }

    fn attachments_prefix(self) -> String {
        format!("{LEASE}{{{self}}}/key/")
    }

    /// All attachments.
    #[must_use]
    pub fn attachments(self) -> KeyRange {
        KeyRange::prefix(self.attachments_prefix().as_bytes())
    }

    /// The key that an attachment attaches.
    #[must_use]
    pub fn attached(self, attachment: &Key) -> Option<Key> {
        attachment.bytes().strip_prefix(self.attachments_prefix().as_bytes()).map(Key::from)
    }

    /// The due entry of a lease that ends at `until`.
    #[must_use]
    pub fn due(self, until: Timestamp) -> Key {
        // Twenty digits, so that the order of the names is that of the times.
        Key::from(format!("{DUE}{:020}/{{{self}}}", until.0))
    }

    /// The operations that grant it. If they may have run, they must not run again: that could be after
    /// a renewal.
    #[must_use]
    pub fn grant(self, now: Timestamp) -> Vec<Op> {
        let until = self.end(now);
        vec![
            Op::Put(self.record(), Value::default()),
            Op::Put(self.until(), Value::from(until.0.to_string())),
            Op::Put(self.due(until), Value::default()),
        ]
    }

    /// The operations that end it now, whether it lives or not. [`Ending`] then deletes its keys.
    #[must_use]
    pub fn revoke(self, now: Timestamp) -> Vec<Op> {
        vec![
            Op::Delete(self.record()),
            Op::Delete(self.until()),
            Op::Put(self.due(now), Value::default()),
        ]
    }

    /// The keys of the transaction that renews it.
    #[must_use]
    pub fn renewal_keys(self, now: Timestamp) -> Keys {
        let reads = vec![self.record(), self.until()];
        Keys { reads, writes: vec![self.until(), self.due(self.end(now))] }
    }

    /// What that transaction writes: nothing if the lease lives long enough. A renewal that is late
    /// does not shorten it. None if the lease has ended.
    #[must_use]
    pub fn renew(self, now: Timestamp, reads: &Reads) -> Option<Writes> {
        reads.get(&self.record())?.value.as_ref()?;
        let current = ends_at(reads.get(&self.until()));
        let mut writes = Writes::new();
        if current.is_none_or(|current| current < now + self.ttl()) {
            let until = self.end(now);
            writes.insert(self.until(), Some(Value::from(until.0.to_string())));
            writes.insert(self.due(until), Some(Value::default()));
        }
        Some(writes)
    }

    /// The guard that fails if the lease has ended.
    fn lives(self) -> Op {
        Op::Compare(self.record(), Some(Value::default()))
    }

    /// The operations that set a key and attach it. A guard fails if the lease has ended.
    #[must_use]
    pub fn put(self, key: Key, value: Value) -> Vec<Op> {
        let attach = Op::Put(self.attachment(&key), Value::default());
        vec![self.lives(), Op::Put(key, value), attach]
    }

    /// The gateway that ends this lease, if it lives.
    #[must_use]
    pub fn gateway(self, cluster: &Cluster) -> Option<NodeId> {
        let gateways: Vec<NodeId> = cluster.gateways().map(|gateway| gateway.id).collect();
        let at = self.nonce.checked_rem(u64::try_from(gateways.len()).ok()?)?;
        gateways.get(usize::try_from(at).ok()?).copied()
    }
}

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{:016x}", self.ttl_ms, self.nonce)
    }
}

impl FromStr for LeaseId {
    type Err = NotALease;

    fn from_str(text: &str) -> Result<Self, NotALease> {
        let id = text.split_once('-').and_then(|(ttl, nonce)| {
            let ttl = Duration::from_millis(ttl.parse().ok()?);
            Self::new(ttl, u64::from_str_radix(nonce, 16).ok()?)
        });
        // One text for each id, because keys are named after it. A text that is not an id is shown in
        // part, because it may be long.
        id.filter(|id| id.to_string() == text)
            .ok_or_else(|| NotALease(text.chars().take(64).collect()))
    }
}

/// True if `key` is written for leases only by what is in this module: a record, an end, a due entry, or
/// an attachment of such a key. Clients may delete it, and write attachments of other keys.
#[must_use]
pub fn is_reserved(key: &Key) -> bool {
    let of_leases =
        |bytes: &[u8]| bytes.starts_with(LEASE.as_bytes()) || bytes.starts_with(DUE.as_bytes());
    let attached = || {
        let name = key.bytes().strip_prefix(LEASE.as_bytes())?.strip_prefix(b"{")?;
        let end = name.iter().position(|byte| *byte == b'}')?;
        let id: LeaseId = std::str::from_utf8(name.get(..end)?).ok()?.parse().ok()?;
        id.attached(key).filter(|attached| !of_leases(attached.bytes()))
    };
    of_leases(key.bytes()) && attached().is_none()
}

/// When a lease ends, as its key says ([`LeaseId::until`]).
#[must_use]
pub fn ends_at(until: Option<&Read>) -> Option<Timestamp> {
    let value = until?.value.as_ref()?;
    std::str::from_utf8(&value.0).ok()?.parse().ok().map(Timestamp)
}

/// The range of all due entries, those that are due first come first.
#[must_use]
pub fn all_due() -> KeyRange {
    KeyRange::prefix(DUE.as_bytes())
}

/// When the lease of a due entry ends, and which lease it is. None if the key is no due entry.
#[must_use]
pub fn parse_due(key: &Key) -> Option<(Timestamp, LeaseId)> {
    let name = std::str::from_utf8(key.bytes()).ok()?.strip_prefix(DUE)?;
    let (time, id) = name.split_once('/')?;
    let (time, id) = (Timestamp(time.parse().ok()?), id.strip_prefix('{')?.strip_suffix('}')?);
    let id: LeaseId = id.parse().ok()?;
    (id.due(time) == *key).then_some((time, id))
}

/// The keys that a transaction reads and may write.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Keys {
    /// What it reads.
    pub reads: Vec<Key>,
    /// What it may write.
    pub writes: Vec<Key>,
}

/// The keys of the transaction that removes due entries of leases that were renewed.
#[must_use]
pub fn renewed_keys(due: &[(Timestamp, LeaseId)]) -> Keys {
    let entries: Vec<Key> = due.iter().map(|(time, id)| id.due(*time)).collect();
    let untils = due.iter().map(|(_, id)| id.until());
    Keys { reads: untils.chain(entries.iter().cloned()).collect(), writes: entries }
}

/// What that transaction writes, and the leases that end now.
#[must_use]
pub fn renewed(due: &[(Timestamp, LeaseId)], reads: &Reads) -> (Writes, Vec<(Timestamp, LeaseId)>) {
    let (mut writes, mut ending) = (Writes::new(), Vec::new());
    for &(time, id) in due {
        match state(time, id, reads) {
            State::Over => {}
            State::Renewed => drop(writes.insert(id.due(time), None)),
            State::Due | State::Ended => ending.push((time, id)),
        }
    }
    (writes, ending)
}

/// What a due entry says about its lease.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// The lease ends at that time.
    Due,
    /// It was renewed.
    Renewed,
    /// It has ended, and attached keys may be left.
    Ended,
    /// It has ended, and nothing is left.
    Over,
}

fn state(time: Timestamp, id: LeaseId, reads: &Reads) -> State {
    let present = |key: &Key| reads.get(key).filter(|read| read.value.is_some());
    match (present(&id.due(time)), present(&id.until())) {
        (None, _) => State::Over,
        (Some(_), None) => State::Ended,
        (Some(entry), Some(until)) if entry.version == until.version => State::Due,
        (Some(_), Some(_)) => State::Renewed,
    }
}

/// What became of one transaction of an [`Ending`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Progress {
    /// Scan again: attached keys may be left.
    Again,
    /// The lease has ended, and all its keys are deleted.
    Over,
    /// It was renewed, and does not end.
    Renewed,
}

/// The number of aborts after which the lease ends in a transaction of its own, without attached keys.
const ABORTS: u32 = 3;

/// The end of a lease. Repeat until it is over: scan ([`Ending::scan`]), run an interactive
/// transaction over [`Ending::keys`] that commits the writes of [`Ending::decide`], and tell
/// [`Ending::on_committed`] or [`Ending::on_aborted`] what became of it.
///
/// The first transaction deletes the lease with the first page of its keys; the attachments are
/// scanned once more after that. If others are in the way, the lease is deleted first, so that no
/// more keys are attached.
#[derive(Clone, Debug)]
pub struct Ending {
    id: LeaseId,
    due: Timestamp,
    /// The lease is deleted.
    has_ended: bool,
    /// What is left of this pass over the attachments.
    rest: KeyRange,
    /// This pass began when the lease was deleted, and has found nothing so far.
    is_last: bool,
    limit: usize,
    /// The number of aborts since the last commit.
    aborts: u32,
    /// The number of attached keys that were deleted.
    deleted: u64,
}

impl Ending {
    /// The end of the lease with this due entry, which must be due.
    #[must_use]
    pub fn new(due: Timestamp, id: LeaseId) -> Self {
        Self {
            id,
            due,
            has_ended: false,
            rest: id.attachments(),
            is_last: false,
            limit: KEYS_AT_ONCE,
            aborts: 0,
            deleted: 0,
        }
    }

    /// The number of attached keys that were deleted so far.
    #[must_use]
    pub fn deleted(&self) -> u64 {
        self.deleted
    }

    /// The scan of the next attachments.
    #[must_use]
    pub fn scan(&self) -> Scan {
        Scan { range: self.rest.clone(), backwards: false, limit: self.limit }
    }

    /// The attachments that the next transaction deletes.
    fn attachments<'a>(&self, page: &'a Page) -> impl Iterator<Item = &'a Key> {
        let ends_alone = !self.has_ended && self.aborts >= ABORTS;
        page.rows.iter().map(|(attachment, _)| attachment).filter(move |_| !ends_alone)
    }

    /// The keys of the next transaction.
    #[must_use]
    pub fn keys(&self, page: &Page) -> Keys {
        let (id, due) = (self.id, self.id.due(self.due));
        let attached = self.attachments(page).filter_map(|attachment| id.attached(attachment));
        let pairs: Vec<Key> = self.attachments(page).cloned().chain(attached).collect();
        let reads = [id.until(), due.clone()].into_iter().chain(pairs.iter().cloned()).collect();
        let writes = [id.record(), id.until(), due].into_iter().chain(pairs).collect();
        Keys { reads, writes }
    }

    /// What the transaction writes.
    #[must_use]
    pub fn decide(&self, page: &Page, reads: &Reads) -> (Writes, Progress) {
        let (id, mut writes) = (self.id, Writes::new());
        match state(self.due, id, reads) {
            State::Over => return (writes, Progress::Over),
            State::Renewed => {
                writes.insert(id.due(self.due), None);
                return (writes, Progress::Renewed);
            }
            State::Due => {
                writes.insert(id.record(), None);
                writes.insert(id.until(), None);
            }
            State::Ended => {}
        }
        if self.is_last && page.rows.is_empty() && page.rest.is_none() {
            writes.insert(id.due(self.due), None);
            return (writes, Progress::Over);
        }
        for attachment in self.attachments(page) {
            let Some(key) = id.attached(attachment) else { continue };
            if is_attached(reads.get(attachment), reads.get(&key)) {
                writes.insert(key, None);
            }
            writes.insert(attachment.clone(), None);
        }
        (writes, Progress::Again)
    }

    /// The transaction has committed, with these writes.
    pub fn on_committed(&mut self, page: &Page, writes: &Writes) {
        let id = self.id;
        let is_ours = |key: &Key| {
            [id.record(), id.until(), id.due(self.due)].contains(key) || id.attached(key).is_some()
        };
        self.deleted += writes.keys().filter(|key| !is_ours(key)).count() as u64;
        let is_whole = self.attachments(page).count() == page.rows.len();
        self.is_last &= page.rows.is_empty();
        match &page.rest {
            Some(rest) if self.has_ended || is_whole => self.rest = rest.clone(),
            Some(_) | None => (self.rest, self.is_last) = (id.attachments(), true),
        }
        (self.has_ended, self.aborts) = (true, 0);
    }

    /// The transaction has aborted, because others were in the way.
    pub fn on_aborted(&mut self) {
        self.aborts += 1;
    }

    /// The values of the attached keys did not fit into a message: the next scan is shorter. False if
    /// it cannot be.
    #[must_use]
    pub fn shorten(&mut self) -> bool {
        let can = self.limit > 1;
        self.limit = (self.limit / 2).max(1);
        can
    }
}

/// True if a key still has the value that was attached.
#[must_use]
pub fn is_attached(attachment: Option<&Read>, key: Option<&Read>) -> bool {
    let present = |read: Option<&Read>| read.filter(|read| read.value.is_some()).map(|r| r.version);
    present(attachment).is_some_and(|version| present(key) == Some(version))
}

#[cfg(test)]
mod tests;
