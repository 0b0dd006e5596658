//! Watches: all changes of the keys of a range, in the order of their commit timestamps.
//!
//! A watch goes in rounds. It knows all changes up to a timestamp A, and each round extends that:
//!
//! 1. **Read.** A read-only transaction reads the fences of the range, as a scan does
//!    ([`crate::scan`]). Let R be its timestamp.
//! 2. **Ask.** Servers answer with the versions after A, and up to which timestamp they have all of
//!    them ([`Changes::closed`]). A server that answers alone vouches for that ([`Basis::Complete`]).
//!    Of servers that must be asked with others ([`Basis::Voter`]), each says up to where nothing is
//!    unfinished that it has agreed to. What was not agreed to when R was read commits after R.
//! 3. All changes up to the least of these timestamps, and R where majorities answer, are complete. They
//!    are the next result.
//!
//! So each change is in one result, whatever happens to servers between two rounds: that it is in one
//! follows from its timestamp, and from nothing that anybody has to remember. A watch that was
//! interrupted goes on from the timestamp of its last result. `docs/watches.md` says why nothing is
//! missed with each protocol.
//!
//! Servers keep old versions for some time only ([`Changes::kept_after`]). A watch that has fallen
//! behind further ends with [`WatchError::TooOld`]; it never leaves anything out silently.

use crate::cluster::Cluster;
use crate::id::{NodeId, PartitionId, RegionId};
use crate::ordered::OrdMap;
use crate::scan::{
    self, Answer, Ask, Basis, KeyRange, Listing, NAMES_BYTES_MAX, Part, Unit, is_fence,
};
use crate::store::Store;
use crate::time::{Duration, Time, Timestamp};
use crate::txn::{AbortReason, Key, Value, Version};
use crate::wire::Wire;

/// The pause between two rounds.
pub const PAUSE: Duration = Duration::from_millis(50);

/// A watch is refused if it should begin so long after what the servers have. They may be behind by as
/// long as a transaction is unfinished.
const AHEAD_MAX: Duration = Duration::from_secs(3_600);

/// One change of one key: a version of it.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Change {
    /// The key.
    pub key: Key,
    /// The transaction that changed it, and its commit timestamp.
    pub version: Version,
    /// The new value; none if the key was deleted.
    pub value: Option<Value>,
}

/// What one server knows of the changes in a unit of the data.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Changes {
    /// The changes after the timestamp in the request and up to `closed`, by timestamp, then by key.
    pub changes: Vec<Change>,
    /// Up to here they are complete, as far as this server knows.
    pub closed: Timestamp,
    /// Older versions may have been dropped. If this is later than the timestamp in the request, the
    /// changes are not complete.
    pub kept_after: Timestamp,
}

impl Listing {
    /// The answer of a server to a watch: the changes in `partitions` up to `closed`, or as many as fit
    /// into a message.
    #[must_use]
    pub fn of_changes(
        store: &Store,
        partitions: impl IntoIterator<Item = PartitionId>,
        (ask, after): (&Ask, Timestamp),
        mut closed: Timestamp,
        basis: Basis,
    ) -> Self {
        let (mut changes, mut kept_after, mut has_more) = (Vec::new(), Timestamp::ZERO, false);
        for partition in partitions {
            kept_after = kept_after.max(store.kept_after(partition));
            match store.changes(partition, &ask.range, (after, closed)) {
                Some(found) => changes.extend(found),
                None => kept_after = kept_after.max(closed),
            }
        }
        changes.retain(|change| !is_fence(&change.key));
        changes.sort_by(|a, b| (a.version, &a.key).cmp(&(b.version, &b.key)));
        let mut bytes = 0;
        let first_over = changes.iter().position(|change| {
            let is_over = bytes >= NAMES_BYTES_MAX;
            bytes += change.key.len() + change.value.as_ref().map_or(0, Value::len) + 64;
            is_over
        });
        if let Some(over) = first_over {
            // All changes of one timestamp are in one answer.
            has_more = true;
            let last = changes.get(over - 1).map(|change| change.version.timestamp);
            closed = last.unwrap_or(closed);
            changes.retain(|change| change.version.timestamp <= closed);
        }
        let changes = Some(Changes { changes, closed, kept_after });
        Self { names: Vec::new(), has_more, basis, changes }
    }
}

/// The next changes of a watch.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Batch {
    /// All changes of the range after the end of the previous batch, by timestamp, then by key. All
    /// changes of one transaction are in one batch.
    pub changes: Vec<Change>,
    /// Up to this timestamp the watch has returned everything. A new watch can continue from here.
    pub through: Timestamp,
}

/// Why a watch ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum WatchError {
    /// Changes after the timestamp from which it should go on may have been forgotten.
    #[error(
        "the servers may have forgotten changes after timestamp {}; the earliest from which a watch \
         can start is {}. Begin a new watch from now on, then scan the range",
        after.0,
        kept_after.0
    )]
    TooOld {
        /// The timestamp from which the watch should go on.
        after: Timestamp,
        /// Nothing later has been forgotten.
        kept_after: Timestamp,
    },
    /// The timestamp from which it should go on is far in the future.
    #[error(
        "the watch should begin after timestamp {}, and the cluster is at {}; timestamps are \
         nanoseconds since 1970",
        after.0,
        closed.0
    )]
    Future {
        /// The timestamp from which the watch should go on.
        after: Timestamp,
        /// The servers have everything up to here.
        closed: Timestamp,
    },
    /// The read-only transaction was refused for a reason that a repetition does not change.
    #[error("the read of a watch was refused: {0}")]
    Refused(AbortReason),
    /// The placement has no key that could serve as a fence.
    #[error("a range of the placement has no room for a key of the watch's own")]
    NoFence,
}

/// What a watch needs next.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// Send this request to this server; pass the answer to [`Watcher::on_answer`].
    Ask(NodeId, Ask),
    /// Read these keys in one read-only transaction; pass the result to [`Watcher::on_read`] or
    /// [`Watcher::on_aborted`].
    Read(Vec<Key>),
    /// The next changes.
    Batch(Batch),
    /// The watch has ended.
    Failed(WatchError),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// Until this time, nothing.
    Pause(Time),
    Read,
    Ask,
    End,
}

/// A watch, as a state machine: its driver sends requests, runs transactions and tells the time.
#[derive(Debug)]
pub struct Watcher {
    range: KeyRange,
    /// Everything up to here was returned; none: the watch begins with its first read.
    after: Option<Timestamp>,
    parts: Vec<Part>,
    /// All servers, nearest first.
    servers: Vec<NodeId>,
    fences: Vec<Key>,
    phase: Phase,
    round: u32,
    /// The timestamp of the last read.
    at: Timestamp,
    /// When to ask again who did not answer.
    again: Time,
    patience: Duration,
    /// Servers that have forgotten what this round asks for, and after what they have not.
    forgetful: OrdMap<(Unit, NodeId), Timestamp>,
    /// It does not wait for what is unfinished.
    is_hasty: bool,
}

impl Watcher {
    /// A watch of `range` from a gateway in `region`, of the changes after `after`; none: of those from
    /// now on. `has_shares` is [`crate::Protocol::SHARES`]. Returns it with its first steps.
    ///
    /// # Errors
    /// [`WatchError::NoFence`].
    pub fn new(
        cluster: &Cluster,
        has_shares: bool,
        region: RegionId,
        (range, after): (KeyRange, Option<Timestamp>),
        now: Time,
    ) -> Result<(Self, Vec<Step>), WatchError> {
        let fences = scan::fences(cluster, has_shares, &range);
        let servers = cluster.servers().map(|server| server.id).collect();
        let mut watcher = Self {
            parts: scan::parts(cluster, has_shares, region, &range),
            range,
            after,
            servers: scan::nearest_first(cluster, region, servers),
            fences: fences.map_err(|_| WatchError::NoFence)?,
            phase: Phase::Pause(now),
            round: 0,
            at: Timestamp::ZERO,
            again: now,
            patience: cluster.topology.rtt_max() * 2 + Duration::from_millis(100),
            forgetful: OrdMap::new(),
            is_hasty: false,
        };
        let steps = watcher.read();
        Ok((watcher, steps))
    }

    /// From now on it takes the latest change that it sees for the end of what is complete. This is a
    /// mistake, for tests.
    pub fn without_waiting(&mut self) {
        self.is_hasty = true;
    }

    /// When to call [`Watcher::on_time`].
    #[must_use]
    pub fn deadline(&self) -> Option<Time> {
        match self.phase {
            Phase::Pause(until) => Some(until),
            Phase::Ask => Some(self.again),
            Phase::Read | Phase::End => None,
        }
    }

    /// Begins the next round after a pause, or asks again where answers are missing.
    pub fn on_time(&mut self, now: Time) -> Vec<Step> {
        match self.phase {
            Phase::Pause(until) if until <= now => self.read(),
            Phase::Ask if self.again <= now => self.ask(now),
            Phase::Pause(_) | Phase::Ask | Phase::Read | Phase::End => Vec::new(),
        }
    }

    /// Takes the result of the transaction.
    pub fn on_read(&mut self, at: Timestamp, now: Time) -> Vec<Step> {
        if self.phase != Phase::Read {
            return Vec::new();
        }
        self.at = self.at.max(at);
        self.begin_asking(now)
    }

    /// The transaction aborted.
    pub fn on_aborted(&mut self, reason: AbortReason, now: Time) -> Vec<Step> {
        if self.phase != Phase::Read {
            return Vec::new();
        }
        match reason {
            AbortReason::Conflict
            | AbortReason::StaleRead
            | AbortReason::Recovery
            | AbortReason::Abandoned
            | AbortReason::Overload => {
                self.phase = Phase::Pause(now + PAUSE);
                Vec::new()
            }
            AbortReason::Client
            | AbortReason::Guard
            | AbortReason::Invalid
            | AbortReason::TooLarge => self.fail(WatchError::Refused(reason)),
        }
    }

    /// Takes the answer of a server.
    pub fn on_answer(&mut self, from: NodeId, answer: Answer, now: Time) -> Vec<Step> {
        if self.phase != Phase::Ask || answer.round != self.round {
            return Vec::new();
        }
        let after = self.asked_after();
        let Some(part) = self.parts.iter_mut().find(|part| part.unit == answer.unit) else {
            return Vec::new();
        };
        let Some(listing) = answer.listing else { return Vec::new() };
        let Some(changes) = &listing.changes else { return Vec::new() };
        if changes.kept_after > after {
            self.forgetful.insert((part.unit, from), changes.kept_after);
            return Vec::new();
        }
        let (unknown, unit) = (part.take(from, listing), part.unit);
        if self.parts.iter().all(Part::is_complete) {
            return self.end_round(now);
        }
        unknown.into_iter().map(|node| Step::Ask(node, self.request(unit))).collect()
    }

    /// Begins a round.
    fn read(&mut self) -> Vec<Step> {
        self.phase = Phase::Read;
        vec![Step::Read(self.fences.clone())]
    }

    fn begin_asking(&mut self, now: Time) -> Vec<Step> {
        self.phase = Phase::Ask;
        self.round = self.round.wrapping_add(1);
        self.forgetful.clear();
        for part in &mut self.parts {
            part.answers.clear();
            part.asked = 0;
        }
        self.ask(now)
    }

    /// Asks the servers of the units of which the answers are not complete.
    fn ask(&mut self, now: Time) -> Vec<Step> {
        self.again = now + self.patience;
        let mut wanted = Vec::new();
        for part in self.parts.iter_mut().filter(|part| !part.is_complete()) {
            let forgotten = self.forgetful.iter().filter(|((unit, _), _)| *unit == part.unit);
            let kept_after = forgotten.map(|(_, kept_after)| *kept_after).min();
            if let (Some(kept_after), true) = (kept_after, part.asked > 1) {
                // Everybody was asked, and too many of those that answer have forgotten.
                let after = self.asked_after();
                return self.fail(WatchError::TooOld { after, kept_after });
            }
            let all = part.next_to_ask(&self.servers);
            wanted.extend(all.into_iter().map(|node| (node, part.unit)));
        }
        wanted.into_iter().map(|(node, unit)| Step::Ask(node, self.request(unit))).collect()
    }

    fn request(&self, unit: Unit) -> Ask {
        Ask {
            unit,
            range: self.range.clone(),
            backwards: false,
            limit: 1,
            at: self.at,
            round: self.round,
            changes_after: Some(self.asked_after()),
        }
    }

    /// A watch that begins asks for no changes at first, only up to where they are complete.
    fn asked_after(&self) -> Timestamp {
        self.after.unwrap_or(Timestamp::MAX)
    }

    /// All answers are complete.
    fn end_round(&mut self, now: Time) -> Vec<Step> {
        let (mut through, mut has_more) = (Timestamp::MAX, false);
        let mut found: OrdMap<(Version, Key), Option<Value>> = OrdMap::new();
        for listing in self.parts.iter().flat_map(Part::counted) {
            let Some(answer) = &listing.changes else { continue };
            has_more |= listing.has_more;
            through = through.min(answer.closed);
            if listing.basis != Basis::Complete {
                through = through.min(self.at);
            }
            for Change { key, version, value } in &answer.changes {
                found.insert((*version, key.clone()), value.clone());
            }
        }
        if let (true, Some((last, _))) = (self.is_hasty, found.last_key_value()) {
            through = through.max(last.0.timestamp);
        }
        self.phase = Phase::Pause(now + PAUSE);
        let Some(after) = self.after else {
            self.after = Some(through);
            return vec![Step::Batch(Batch { changes: Vec::new(), through })];
        };
        // A server that has just started may be far behind.
        let known = through.max(self.at);
        if known + AHEAD_MAX < after {
            return self.fail(WatchError::Future { after, closed: known });
        }
        if through <= after {
            // A transaction is unfinished.
            return Vec::new();
        }
        found.retain(|(version, _), _| after < version.timestamp && version.timestamp <= through);
        let change = |((version, key), value)| Change { key, version, value };
        let changes = found.into_iter().map(change).collect();
        self.after = Some(through);
        let mut steps = vec![Step::Batch(Batch { changes, through })];
        if has_more {
            // What is closed remains closed.
            steps.extend(self.begin_asking(now));
        }
        steps
    }

    fn fail(&mut self, error: WatchError) -> Vec<Step> {
        self.phase = Phase::End;
        vec![Step::Failed(error)]
    }
}

#[cfg(test)]
mod tests;
