//! Scans: the keys of a range, in order, as one consistent snapshot.
//!
//! No protocol locks a range. A scan is optimistic instead, and writers hardly pay for it:
//!
//! 1. **List.** Servers list the names that they have in the range: of keys that they hold, and of
//!    keys that a pending transaction may write. No values.
//! 2. **Read.** An ordinary read-only transaction reads these keys. So that it has a place in the
//!    order of each unit of the data (a partition, or a share of a region's copy), it also reads one
//!    key of each unit that nobody writes, a *fence*.
//! 3. **List again.** If no server lists a name that was not read, then no other key of the range
//!    existed when the transaction read: the result is a snapshot. Otherwise the new names are read
//!    with the others, from step 2 on. After some times the page ends before the first new name.
//!
//! The second list misses no key that existed at the time of the read. In effect, whoever reads a
//! fence reads all keys of the range in its unit, the absent ones too: a transaction T before the
//! read, by time or by a chain of conflicts, was prepared before the read ended at a majority of each
//! partition that it writes, and any majority that lists names has one of these replicas
//! ([`Basis::Voter`]). Servers that have a whole copy of the data and run a log in order answer alone,
//! once they have run the read ([`Basis::Complete`]). `docs/scans.md` says what each protocol does for
//! that, and why it holds.
//!
//! A key may also be written before the read and deleted before the second list. So servers list
//! deletions too, with their versions, as long as they remember them, which is longer than
//! [`LISTS_APART_MAX`].

use std::cmp::Ordering;

use crate::cluster::{Cluster, Partition, Partitioning};
use crate::id::{NodeId, PartitionId, RegionId, ShareId};
use crate::ordered::{OrdMap, OrdSet};
use crate::store::{Head, Store};
use crate::time::{Duration, Time, Timestamp};
use crate::txn::{AbortReason, Key, Read, Reads, Version};
use crate::watch::Changes;
use crate::wire::Wire;

/// The number of names in one answer of a server.
pub const NAMES_MAX: usize = 1_024;

/// The size of the names in one answer of a server, in bytes, besides the last one.
pub const NAMES_BYTES_MAX: usize = 256 << 10;

/// The largest time between the beginning of the first list and the end of the second. Servers
/// remember deletions for longer.
pub const LISTS_APART_MAX: Duration = Duration::from_secs(5);

/// The number of times that a scan reads before it gives up.
const READS_MAX: u32 = 32;

/// The number of reads after which a scan is content with the part of its page before the first
/// name that it has not read.
const WHOLE_READS: u32 = 4;

/// A range of keys.
#[derive(Clone, PartialEq, Eq, Debug, Default, Wire)]
pub struct KeyRange {
    /// The first key that may be in it.
    pub from: Key,
    /// The first key after it; none: it has no end.
    pub until: Option<Key>,
}

impl KeyRange {
    /// All keys that begin with `prefix`.
    #[must_use]
    pub fn prefix(prefix: &[u8]) -> Self {
        let mut end = prefix.to_vec();
        // The end is the prefix with its last byte that can grow increased.
        while end.last() == Some(&u8::MAX) {
            end.pop();
        }
        let until = end.pop().map(|last| {
            end.push(last + 1);
            Key::from(end)
        });
        Self { from: prefix.into(), until }
    }

    /// True if `key` is in the range.
    #[must_use]
    pub fn contains(&self, key: &Key) -> bool {
        self.from <= *key && self.until.as_ref().is_none_or(|until| key < until)
    }

    /// True if no key can be in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.until.as_ref().is_some_and(|until| *until <= self.from)
    }

    /// The part of the range that follows `key`, in the given direction.
    #[must_use]
    pub fn after(self, key: &Key, backwards: bool) -> Self {
        if backwards {
            return Self { until: Some(key.clone()), ..self };
        }
        Self { from: successor(key), ..self }
    }

    /// The part of the range that begins with `key`, in the given direction.
    #[must_use]
    pub fn from_on(self, key: &Key, backwards: bool) -> Self {
        if backwards {
            return Self { until: Some(successor(key)), ..self };
        }
        Self { from: key.clone(), ..self }
    }

    /// The part of the range up to `key`, inclusive, in the given direction.
    #[must_use]
    pub fn up_to(self, key: &Key, backwards: bool) -> Self {
        if backwards {
            return Self { from: key.clone(), ..self };
        }
        Self { until: Some(successor(key)), ..self }
    }
}

/// The smallest key after `key`.
fn successor(key: &Key) -> Key {
    Key::from([key.bytes(), &[0]].concat())
}

/// A key that a server has, without its value.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Name {
    /// The key.
    pub key: Key,
    /// The version of its deletion, if the newest version here is a deletion and no pending
    /// transaction may write the key.
    pub deleted: Option<Version>,
}

/// What an answer is based on.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Basis {
    /// One replica of a group. The answers of a majority of the voters together are complete.
    Voter {
        /// The position in the group's log since which these are the voters, or a later one. The answer
        /// with the latest position says who votes: its replica has everything from before.
        since: u64,
        /// The voters, as far as this replica knows. While they change there are two sets, and each
        /// must have a majority.
        voters: Vec<Voters>,
    },
    /// The answer is complete for the unit: everything up to the timestamp in the request is in it.
    Complete,
}

/// One set of voters of a group.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Wire)]
pub struct Voters {
    /// The servers.
    pub nodes: Vec<NodeId>,
}

/// The names that one server has in one unit of the data.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Listing {
    /// The first names of the range, in the direction of the scan, without duplicates.
    pub names: Vec<Name>,
    /// True if more names follow.
    pub has_more: bool,
    /// What the answer is based on.
    pub basis: Basis,
    /// Of a watch: the changes, instead of names.
    pub changes: Option<Changes>,
}

impl Listing {
    /// The answer of a server that stores `partitions` in `store`, and knows of pending transactions
    /// that may write the keys `pending`: any keys, in any order.
    #[must_use]
    pub fn of(
        store: &Store,
        partitions: impl IntoIterator<Item = PartitionId>,
        pending: impl IntoIterator<Item = Key>,
        ask: &Ask,
        basis: Basis,
    ) -> Self {
        let (limit, backwards) = (ask.limit(), ask.backwards);
        let (mut merged, mut end) = (Names::default(), None::<Key>);
        let is_after = |key: &Key, end: &Key| if backwards { key < end } else { key > end };
        for partition in partitions {
            let heads = store.heads(partition, &ask.range, backwards, limit);
            let last = heads.heads.last().filter(|_| heads.has_more).map(|head| head.key.clone());
            if let Some(last) = last
                && end.as_ref().is_none_or(|end| is_after(end, &last))
            {
                end = Some(last);
            }
            for Head { key, version, is_deletion } in heads.heads {
                merged.add(Name { key, deleted: is_deletion.then_some(version) });
            }
        }
        for key in pending {
            if ask.range.contains(&key) {
                merged.add(Name { key, deleted: None });
            }
        }
        let mut has_more = end.is_some();
        if let Some(end) = end {
            merged.0.retain(|key, _| !is_after(key, &end));
        }
        let (mut names, mut bytes) = (Vec::new(), 0);
        for name in merged.iter(backwards) {
            if names.len() >= limit || bytes >= NAMES_BYTES_MAX {
                has_more = true;
                break;
            }
            bytes += name.key.len() + 16;
            names.push(name);
        }
        Self { names, has_more, basis, changes: None }
    }
}

/// A unit of the data whose names servers list.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Wire)]
pub enum Unit {
    /// A partition.
    Partition(PartitionId),
    /// A share of a region's copy, for protocols with a copy in each region
    /// ([`crate::Protocol::SHARES`]).
    Share(ShareId),
}

/// A request to a server for names.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Ask {
    /// The unit.
    pub unit: Unit,
    /// The range.
    pub range: KeyRange,
    /// From the last key of the range to the first.
    pub backwards: bool,
    /// The most names to list; at most [`NAMES_MAX`].
    pub limit: u32,
    /// A server that answers with [`Basis::Complete`] has processed everything up to this timestamp.
    pub at: Timestamp,
    /// Which list of the scan this is; the answer says it again.
    pub round: u32,
    /// Of a watch: the changes after this timestamp are wanted, instead of names
    /// ([`crate::watch`]).
    pub changes_after: Option<Timestamp>,
}

impl Ask {
    /// The most names to list.
    #[must_use]
    pub fn limit(&self) -> usize {
        usize::try_from(self.limit).unwrap_or(usize::MAX).clamp(1, NAMES_MAX)
    }
}

/// The answer of a server.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Answer {
    /// The unit of the request.
    pub unit: Unit,
    /// The round of the request.
    pub round: u32,
    /// The names; none if this server cannot list them now.
    pub listing: Option<Listing>,
}

/// Names from several servers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Names(OrdMap<Key, Option<Version>>);

impl Names {
    /// Adds a name. A key is deleted if all say so; the newest deletion counts.
    fn add(&mut self, name: Name) {
        let Name { key, deleted } = name;
        self.0
            .entry(key)
            .and_modify(|known| *known = known.zip(deleted).map(|(a, b)| a.max(b)))
            .or_insert(deleted);
    }

    fn iter(&self, backwards: bool) -> Box<dyn Iterator<Item = Name> + '_> {
        let name =
            |(key, deleted): (&Key, &Option<Version>)| Name { key: key.clone(), deleted: *deleted };
        if backwards {
            Box::new(self.0.iter().rev().map(name))
        } else {
            Box::new(self.0.iter().map(name))
        }
    }
}

/// What to scan.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Scan {
    /// The range.
    pub range: KeyRange,
    /// From the last key of the range to the first.
    pub backwards: bool,
    /// The most keys in the result, at least 1.
    pub limit: usize,
}

/// The result of a scan.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Page {
    /// The keys that have a value, in the direction of the scan, as one snapshot.
    pub rows: Vec<(Key, Read)>,
    /// The rest of the range, if it may have more keys.
    pub rest: Option<KeyRange>,
    /// The commit timestamp of the read.
    pub timestamp: Timestamp,
}

/// Why a scan has no result.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ScanError {
    /// The read-only transaction was refused for a reason that a repetition does not change.
    #[error("the read of a scan was refused: {0}")]
    Refused(AbortReason),
    /// Other transactions created keys in the range all the time.
    #[error(
        "other transactions create keys in this range all the time; ask for fewer keys at once"
    )]
    Busy,
    /// The placement has no key that could serve as a fence.
    #[error("a range of the placement has no room for a key of the scan's own")]
    NoFence,
}

/// What a scan needs next.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// Send this request to this server; pass the answer to [`Scanner::on_answer`].
    Ask(NodeId, Ask),
    /// Read these keys in one read-only transaction; pass the result to [`Scanner::on_read`] or
    /// [`Scanner::on_aborted`].
    Read(Vec<Key>),
    /// The result. The scan has ended.
    Done(Result<Page, ScanError>),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// The first list.
    List,
    /// The transaction.
    Read,
    /// The second list.
    Verify,
    /// It has ended.
    End,
}

/// One unit of the data.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) unit: Unit,
    /// Servers that hold it as far as is known, nearest first.
    pub(crate) holders: Vec<NodeId>,
    /// The answers in this round.
    pub(crate) answers: OrdMap<NodeId, Listing>,
    /// How often it was asked in this round.
    pub(crate) asked: usize,
}

/// The units that may have keys of `range`, for a gateway in `region`. `has_shares` is
/// [`crate::Protocol::SHARES`].
pub(crate) fn parts(
    cluster: &Cluster,
    has_shares: bool,
    region: RegionId,
    range: &KeyRange,
) -> Vec<Part> {
    let part = |unit, holders| Part {
        unit,
        holders: nearest_first(cluster, region, holders),
        answers: OrdMap::new(),
        asked: 0,
    };
    if has_shares {
        let holders = |share: ShareId| {
            let servers = cluster.servers().map(|server| server.id);
            servers.filter(move |&server| cluster.share_at(server).0 == share).collect()
        };
        let shares = (0..cluster.shares()).map(ShareId);
        return shares.map(|share| part(Unit::Share(share), holders(share))).collect();
    }
    let owners = owners(cluster, range);
    let placed = cluster.partitions().filter(|placed| owners.contains(&placed.id));
    let of = |placed: &Partition| {
        let founders = cluster.founders(placed.id).iter();
        let all: OrdSet<NodeId> = placed.replicas.iter().chain(founders).copied().collect();
        part(Unit::Partition(placed.id), all.into_iter().collect())
    };
    placed.map(of).collect()
}

/// These nodes, those nearest to `region` first.
pub(crate) fn nearest_first(
    cluster: &Cluster,
    region: RegionId,
    mut nodes: Vec<NodeId>,
) -> Vec<NodeId> {
    nodes.sort_by_key(|&node| (cluster.topology.rtt(region, cluster.region_of(node)), node));
    nodes
}

/// A scan, as a state machine: its driver sends requests, runs transactions and tells the time.
#[derive(Debug)]
pub struct Scanner {
    scan: Scan,
    parts: Vec<Part>,
    /// All servers, nearest first.
    servers: Vec<NodeId>,
    fences: Vec<Key>,
    phase: Phase,
    round: u32,
    /// All names up to `bound`, as far as known.
    known: Names,
    /// The last key of the page; none: the page goes to the end of the range.
    bound: Option<Key>,
    /// The keys of the last read.
    read: OrdSet<Key>,
    rows: Reads,
    at: Timestamp,
    /// When the list that the last read was based on began.
    listed: Time,
    /// When the present list began.
    began: Time,
    /// When to ask again who did not answer.
    again: Time,
    patience: Duration,
    reads: u32,
    /// The most keys to read at once.
    limit: usize,
    /// It accepts the first read.
    lists_once: bool,
    /// It ends with the first list.
    reads_nothing: bool,
}

impl Scanner {
    /// A scan from a gateway in `region`. `has_shares` is [`crate::Protocol::SHARES`]. Returns it
    /// with its first steps.
    ///
    /// # Errors
    /// [`ScanError::NoFence`].
    pub fn new(
        cluster: &Cluster,
        has_shares: bool,
        region: RegionId,
        scan: Scan,
        now: Time,
    ) -> Result<(Self, Vec<Step>), ScanError> {
        let parts = parts(cluster, has_shares, region, &scan.range);
        let fences = fences(cluster, has_shares, &scan.range)?;
        let limit = scan.limit.clamp(1, NAMES_MAX);
        let servers = cluster.servers().map(|server| server.id).collect();
        let mut scanner = Self {
            scan,
            parts,
            servers: nearest_first(cluster, region, servers),
            fences,
            phase: Phase::List,
            round: 0,
            known: Names::default(),
            bound: None,
            read: OrdSet::new(),
            rows: Reads::new(),
            at: Timestamp::ZERO,
            listed: now,
            began: now,
            again: now,
            patience: cluster.topology.rtt_max() * 2 + Duration::from_millis(100),
            reads: 0,
            limit,
            lists_once: false,
            reads_nothing: false,
        };
        let steps = scanner.list(Phase::List, now);
        Ok((scanner, steps))
    }

    /// The scan only lists names, and reads nothing: one round of messages, and no transaction. The
    /// page has the keys that exist or that a pending transaction may write, without values and
    /// versions. It is no snapshot: it may have keys that do not exist any more, and miss keys that
    /// were created while it ran.
    pub fn names_only(&mut self) {
        self.reads_nothing = true;
    }

    /// From now on it does not list again after it has read. This is a mistake, for tests.
    pub fn without_second_list(&mut self) {
        self.lists_once = true;
    }

    /// When to call [`Scanner::on_time`].
    #[must_use]
    pub fn deadline(&self) -> Option<Time> {
        matches!(self.phase, Phase::List | Phase::Verify).then_some(self.again)
    }

    /// Asks again where answers are missing.
    pub fn on_time(&mut self, now: Time) -> Vec<Step> {
        if self.deadline().is_none_or(|at| now < at) {
            return Vec::new();
        }
        self.again = now + self.patience;
        self.ask()
    }

    /// Takes the answer of a server.
    pub fn on_answer(&mut self, from: NodeId, answer: Answer, now: Time) -> Vec<Step> {
        let is_expected = matches!(self.phase, Phase::List | Phase::Verify);
        if !is_expected || answer.round != self.round {
            return Vec::new();
        }
        let Some(part) = self.parts.iter_mut().find(|part| part.unit == answer.unit) else {
            return Vec::new();
        };
        let Some(listing) = answer.listing else { return Vec::new() };
        let unknown = part.take(from, listing);
        let unit = part.unit;
        if self.parts.iter().all(Part::is_complete) {
            return if self.phase == Phase::List { self.listed() } else { self.verified(now) };
        }
        unknown.into_iter().map(|node| Step::Ask(node, self.request(unit))).collect()
    }

    /// Takes the result of the transaction.
    pub fn on_read(&mut self, reads: Reads, at: Timestamp, now: Time) -> Vec<Step> {
        if self.phase != Phase::Read {
            return Vec::new();
        }
        self.rows = reads;
        self.at = at;
        if self.lists_once {
            return self.done(None);
        }
        self.list(Phase::Verify, now)
    }

    /// The transaction aborted.
    pub fn on_aborted(&mut self, reason: AbortReason) -> Vec<Step> {
        if self.phase != Phase::Read {
            return Vec::new();
        }
        match reason {
            AbortReason::TooLarge if self.limit > 1 => {
                self.limit /= 2;
                self.read_again()
            }
            AbortReason::Conflict
            | AbortReason::StaleRead
            | AbortReason::Recovery
            | AbortReason::Abandoned => self.read_again(),
            AbortReason::Client
            | AbortReason::Guard
            | AbortReason::Overload
            | AbortReason::Invalid
            | AbortReason::TooLarge => self.end(Err(ScanError::Refused(reason))),
        }
    }

    /// Begins a list.
    fn list(&mut self, phase: Phase, now: Time) -> Vec<Step> {
        self.phase = phase;
        self.round += 1;
        self.began = now;
        self.again = now + self.patience;
        for part in &mut self.parts {
            part.answers.clear();
            part.asked = 0;
        }
        self.ask()
    }

    /// Asks the servers of the units of which the answers are not complete.
    fn ask(&mut self) -> Vec<Step> {
        let mut wanted = Vec::new();
        for part in &mut self.parts {
            if part.is_complete() {
                continue;
            }
            // Also those that have answered: since then, the members may have changed.
            let all = part.next_to_ask(&self.servers);
            wanted.extend(all.into_iter().map(|node| (node, part.unit)));
        }
        wanted.into_iter().map(|(node, unit)| Step::Ask(node, self.request(unit))).collect()
    }

    fn request(&self, unit: Unit) -> Ask {
        let (range, backwards) = (self.scan.range.clone(), self.scan.backwards);
        let (range, limit) = match self.phase {
            Phase::Verify => {
                let range = match &self.bound {
                    Some(bound) => range.up_to(bound, backwards),
                    None => range,
                };
                (range, NAMES_MAX)
            }
            // One more, so that the page knows whether it is the last one.
            Phase::List | Phase::Read | Phase::End => (range, self.limit.saturating_add(1)),
        };
        let limit = u32::try_from(limit).unwrap_or(u32::MAX);
        Ask { unit, range, backwards, limit, at: self.at, round: self.round, changes_after: None }
    }

    /// The order of two keys in the direction of the scan.
    fn order(&self, left: &Key, right: &Key) -> Ordering {
        if self.scan.backwards { right.cmp(left) } else { left.cmp(right) }
    }

    /// The names that the servers have listed, up to the first key where a list ended early.
    fn take_names(&mut self) -> Names {
        let (mut names, mut bound) = (Names::default(), self.bound.take());
        for part in std::mem::take(&mut self.parts) {
            for listing in part.counted() {
                let last = listing.names.last().filter(|_| listing.has_more);
                let is_earlier = |last: &Key| {
                    bound.as_ref().is_none_or(|bound| self.order(last, bound) == Ordering::Less)
                };
                if let Some(last) = last.filter(|last| is_earlier(&last.key)) {
                    bound = Some(last.key.clone());
                }
                listing.names.iter().cloned().for_each(|name| names.add(name));
            }
            self.parts.push(part);
        }
        self.bound = bound;
        names.0.retain(|key, _| self.is_in_page(key));
        names
    }

    /// The part of the range that a read is about: names beyond it do not change the page.
    #[must_use]
    pub fn part(&self) -> KeyRange {
        let Scan { range, backwards, .. } = &self.scan;
        match &self.bound {
            Some(last) => range.clone().up_to(last, *backwards),
            None => range.clone(),
        }
    }

    fn is_in_page(&self, key: &Key) -> bool {
        self.bound.as_ref().is_none_or(|bound| self.order(key, bound) != Ordering::Greater)
    }

    /// The first list is complete.
    fn listed(&mut self) -> Vec<Step> {
        self.known = self.take_names();
        self.listed = self.began;
        if self.reads_nothing {
            let live = self.known.iter(self.scan.backwards).filter(|name| name.deleted.is_none());
            let rows = live.map(|name| (name.key, Read::default())).collect();
            let rest = self
                .bound
                .as_ref()
                .map(|bound| self.scan.range.clone().after(bound, self.scan.backwards));
            return self.end(Ok(Page { rows, rest, timestamp: Timestamp::ZERO }));
        }
        self.read_again()
    }

    /// Reads all keys of the page that may have a value.
    fn read_again(&mut self) -> Vec<Step> {
        self.reads += 1;
        if self.reads > READS_MAX {
            return self.end(Err(ScanError::Busy));
        }
        let live: Vec<Key> = self
            .known
            .iter(self.scan.backwards)
            .filter(|name| name.deleted.is_none())
            .map(|name| name.key)
            .collect();
        if let (true, Some(last)) = (live.len() > self.limit, live.get(self.limit - 1)) {
            self.bound = Some(last.clone());
            let mut known = std::mem::take(&mut self.known);
            known.0.retain(|key, _| self.is_in_page(key));
            self.known = known;
        }
        self.read = live.into_iter().take(self.limit).collect();
        self.phase = Phase::Read;
        let mut keys: Vec<Key> = self.read.iter().chain(&self.fences).cloned().collect();
        keys.sort_unstable();
        keys.dedup();
        vec![Step::Read(keys)]
    }

    /// The second list is complete.
    fn verified(&mut self, now: Time) -> Vec<Step> {
        if now.since(self.listed) > LISTS_APART_MAX {
            // A deletion may have been forgotten in the meantime.
            self.bound = None;
            self.reads += 1;
            return if self.reads > READS_MAX {
                self.end(Err(ScanError::Busy))
            } else {
                self.list(Phase::List, now)
            };
        }
        let names = self.take_names();
        let mut known = std::mem::take(&mut self.known);
        known.0.retain(|key, _| self.is_in_page(key));
        self.known = known;
        // The first name, in the direction of the scan, that the read missed.
        let mut first_new = None;
        for name in names.iter(self.scan.backwards) {
            let known = self.known.0.get(&name.key).copied();
            let is_known = match (known, name.deleted) {
                _ if self.read.contains(&name.key) => true,
                (Some(Some(known)), Some(deleted)) => deleted <= known,
                (Some(_) | None, _) => false,
            };
            if !is_known {
                first_new.get_or_insert_with(|| name.key.clone());
                self.known.0.insert(name.key, name.deleted);
            }
        }
        // A deletion may be later than the read: then the key was there, and must be read as well. Some
        // protocols write a version before its time has come.
        let is_later = |(key, deleted): &(&Key, &Option<Version>)| {
            !self.read.contains(key) && deleted.is_some_and(|deleted| deleted.timestamp > self.at)
        };
        let later = self.known.0.iter().filter(is_later).map(|(key, _)| key.clone());
        for key in later.collect::<Vec<Key>>() {
            let is_first = |first: &Key| self.order(&key, first) == Ordering::Less;
            if first_new.as_ref().is_none_or(is_first) {
                first_new = Some(key.clone());
            }
            self.known.0.insert(key, None);
        }
        let Some(first_new) = first_new else { return self.done(None) };
        let has_row_before = self
            .read
            .iter()
            .any(|key| self.order(key, &first_new) == Ordering::Less && self.is_in_page(key));
        if self.reads >= WHOLE_READS && has_row_before {
            // Nothing is new up to there.
            return self.done(Some(&first_new));
        }
        self.listed = self.began;
        self.read_again()
    }

    /// Ends with the page, or with its part before `end`.
    fn done(&mut self, end: Option<&Key>) -> Vec<Step> {
        let (range, backwards) = (self.scan.range.clone(), self.scan.backwards);
        let is_in_page = |key: &Key| {
            self.is_in_page(key) && end.is_none_or(|end| self.order(key, end) == Ordering::Less)
        };
        let read = |(key, read): &(&Key, &Read)| {
            read.value.is_some() && self.read.contains(key) && is_in_page(key)
        };
        let rows = self.rows.iter().filter(read).map(|(key, read)| (key.clone(), read.clone()));
        let mut rows: Vec<(Key, Read)> = rows.collect();
        if backwards {
            rows.reverse();
        }
        let rest = match (end, &self.bound) {
            (Some(end), _) => Some(range.from_on(end, backwards)),
            (None, Some(bound)) => Some(range.after(bound, backwards)),
            (None, None) => None,
        };
        let rest = rest.filter(|rest| !rest.is_empty());
        let page = Page { rows, rest, timestamp: self.at };
        self.end(Ok(page))
    }

    fn end(&mut self, result: Result<Page, ScanError>) -> Vec<Step> {
        self.phase = Phase::End;
        vec![Step::Done(result)]
    }
}

impl Part {
    /// Takes an answer. Returns the voters that it names and nobody here knew of.
    pub(crate) fn take(&mut self, from: NodeId, listing: Listing) -> Vec<NodeId> {
        let mut unknown = Vec::new();
        if let Basis::Voter { voters, .. } = &listing.basis {
            let named = voters.iter().flat_map(|voters| &voters.nodes);
            unknown.extend(named.filter(|node| !self.holders.contains(node)).copied());
            unknown.sort_unstable();
            unknown.dedup();
        }
        self.answers.insert(from, listing);
        self.holders.extend(&unknown);
        if !self.holders.contains(&from) {
            self.holders.push(from);
        }
        unknown
    }

    /// The servers to ask now: at first those that are known to hold it, then all `servers`, because
    /// orders of operators may have moved it to servers that nobody here knows of.
    pub(crate) fn next_to_ask(&mut self, servers: &[NodeId]) -> Vec<NodeId> {
        let all = match self.unit {
            // A whole copy is on each of several servers, and the nearest one is enough.
            Unit::Share(_) if self.asked == 0 => self.holders.get(..1).unwrap_or_default(),
            Unit::Share(_) => &self.holders,
            Unit::Partition(_) if self.asked == 0 => &self.holders,
            Unit::Partition(_) => servers,
        };
        self.asked += 1;
        all.to_vec()
    }

    /// True if the answers so far are complete.
    pub(crate) fn is_complete(&self) -> bool {
        if self.answers.values().any(|listing| listing.basis == Basis::Complete) {
            return true;
        }
        let sets = self.answers.values().filter_map(|listing| match &listing.basis {
            Basis::Voter { since, voters } => Some((*since, voters)),
            Basis::Complete => None,
        });
        let Some((_, sets)) = sets.max_by_key(|(since, _)| *since) else { return false };
        let has_majority = |voters: &Voters| {
            let answered = voters.nodes.iter().filter(|node| self.answers.contains_key(node));
            answered.count() * 2 > voters.nodes.len()
        };
        !sets.is_empty() && sets.iter().all(has_majority)
    }

    /// The answers that count: a complete one alone, or all.
    pub(crate) fn counted(&self) -> impl Iterator<Item = &Listing> {
        let complete = self.answers.values().find(|listing| listing.basis == Basis::Complete);
        let others = self.answers.values().filter(move |_| complete.is_none());
        complete.into_iter().chain(others)
    }
}

/// The partitions that may hold keys of `range`.
fn owners(cluster: &Cluster, range: &KeyRange) -> OrdSet<PartitionId> {
    match cluster.partitioning() {
        Partitioning::Hash { .. } => cluster.partitions().map(|placed| placed.id).collect(),
        Partitioning::Range { starts } => {
            let ends = starts.iter().skip(1).map(|(start, _)| Some(start)).chain([None]);
            let is_met = |start: &Key, end: Option<&Key>| {
                range.until.as_ref().is_none_or(|until| start < until)
                    && end.is_none_or(|end| range.from < *end)
            };
            let met = starts.iter().zip(ends).filter(|((start, _), end)| is_met(start, *end));
            met.map(|((_, owner), _)| *owner).collect()
        }
    }
}

/// The number of keys to try for a fence, for each unit.
const FENCES_TRIED: u32 = 4_096;

/// What the name of a fence ends with, before its number.
const FENCE: &[u8] = b"\0fence";

/// True if `key` has the form of a fence. Such keys are for scans alone. Protocols in which the place
/// of a scan in the order must hold for all keys of a unit treat the fence as if it stood for them.
#[must_use]
pub fn is_fence(key: &Key) -> bool {
    key.is_fence()
}

/// True if a key of these bytes is a fence.
pub(crate) fn has_form_of_fence(bytes: &[u8]) -> bool {
    let digits = bytes.iter().rev().take_while(|byte| byte.is_ascii_digit()).count();
    digits > 0 && bytes.get(..bytes.len() - digits).is_some_and(|rest| rest.ends_with(FENCE))
}

/// One key of each unit that may have keys of `range`, by partition and share, which nobody writes.
///
/// # Errors
/// [`ScanError::NoFence`].
pub fn fences(
    cluster: &Cluster,
    has_shares: bool,
    range: &KeyRange,
) -> Result<Vec<Key>, ScanError> {
    let shares = if has_shares { cluster.shares() } else { 1 };
    let share_of = |key: &Key| if has_shares { cluster.share_of(key).0 } else { 0 };
    let owners: OrdSet<PartitionId> = if has_shares {
        cluster.partitions().map(|placed| placed.id).collect()
    } else {
        owners(cluster, range)
    };
    let starts: Vec<Key> = match cluster.partitioning() {
        Partitioning::Hash { .. } => vec![Key::default()],
        Partitioning::Range { starts } => starts.iter().map(|(start, _)| start.clone()).collect(),
    };
    let mut missing: OrdSet<(PartitionId, u32)> =
        owners.iter().flat_map(|&owner| (0..shares).map(move |share| (owner, share))).collect();
    let mut found = Vec::new();
    for number in 0..FENCES_TRIED {
        for start in &starts {
            if missing.is_empty() {
                return Ok(found);
            }
            let number = number.to_string();
            let key = Key::from([start.bytes(), FENCE, number.as_bytes()].concat());
            if missing.remove(&(cluster.partition_of(&key), share_of(&key))) {
                found.push(key);
            }
        }
    }
    if missing.is_empty() { Ok(found) } else { Err(ScanError::NoFence) }
}

#[cfg(test)]
mod tests;
