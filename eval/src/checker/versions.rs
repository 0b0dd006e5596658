//! What histories of versions show: the database states the version order, by commit timestamp.
//!
//! The only unknowns are the timestamps of writes whose client never learnt them. The first
//! committed read of any such version states its timestamp. A transaction commits at one timestamp
//! ([`orthodrome_core::txn::Version`]), so this also gives the positions of its other writes.

use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::txn::Version;

use super::absences::{self, Places, Unplaced};
use super::effects::{Effects, writes};
use super::graph::{Builder, Label, Reason};
use super::verdict::{Findings, Phenomenon};
use crate::history::dense::Dense;
use crate::history::{History, KeyId, NOBODY, OpRef, Status, UNKNOWN};

/// The version order of every key.
#[derive(Debug)]
pub(super) struct Versions<'a> {
    history: &'a History,
    effects: &'a Effects,
    /// Timestamp and writer of each version, by key and then by timestamp.
    written: Dense<(u64, u32)>,
    /// Of each row, whether that version deleted the key.
    deleted: Dense<bool>,
    /// Where each key's rows start; one more at the end.
    starts: Dense<u32>,
    /// Keys that may have been deleted at an unknown timestamp.
    deleted_somewhere: OrdMap<KeyId, Unplaced>,
    /// Committed writes whose timestamp nobody knew.
    pub(super) unplaced: u64,
}

/// A version that was read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct ReadOf {
    name: u32,
    writer: u32,
    timestamp: u64,
}

impl<'a> Versions<'a> {
    /// Collects the versions, and reports those that share a timestamp.
    pub(super) fn new(history: &'a History, effects: &'a Effects, findings: &mut Findings) -> Self {
        let mut unplaced = 0;
        let mut all = Vec::new();
        for attempt in history.attempts().filter(|attempt| effects.took[*attempt]) {
            let timestamp = effects.timestamps[attempt];
            for op in history.ops(attempt) {
                let OpRef::Write { key, deletes } = op else { continue };
                if timestamp == UNKNOWN {
                    unplaced += 1;
                } else {
                    all.push((key, timestamp, attempt, deletes));
                }
            }
        }
        all.sort_by_key(|&(key, timestamp, attempt, _)| (key, timestamp, attempt));
        all.dedup_by_key(|&mut (key, timestamp, attempt, _)| (key, timestamp, attempt));
        let (mut written, mut deleted) = (Dense::default(), Dense::default());
        let mut starts = Dense::filled(0, history.keys_len() + 1);
        for &(key, timestamp, attempt, deletes) in &all {
            written.push((timestamp, attempt));
            deleted.push(deletes);
            starts[key + 1] = written.len();
        }
        for key in 0..history.keys_len() {
            starts[key + 1] = starts[key + 1].max(starts[key]);
        }
        for ((key, timestamp, a, _), (other, same, b, _)) in all.iter().zip(all.iter().skip(1)) {
            if (key, timestamp) == (other, same) {
                findings.note(Phenomenon::TimestampTie, || {
                    let (a, b) = (history.txn(*a), history.txn(*b));
                    format!("{a} and {b} both wrote {} at {timestamp}", history.key_name(*key))
                });
            }
        }
        let deleted_somewhere = absences::unplaced(history, effects);
        Self { history, effects, written, deleted, starts, deleted_somewhere, unplaced }
    }

    fn of_key(&self, key: KeyId) -> &[(u64, u32)] {
        self.written.slice(self.starts[key]..self.starts[key + 1])
    }

    fn deleted_of_key(&self, key: KeyId) -> &[bool] {
        self.deleted.slice(self.starts[key]..self.starts[key + 1])
    }

    /// True if the key may have been deleted at this timestamp or later.
    pub(super) fn may_be_deleted_since(&self, key: KeyId, timestamp: u64) -> bool {
        let mut versions = self.of_key(key).iter().zip(self.deleted_of_key(key));
        self.deleted_somewhere.contains_key(&key)
            || versions.any(|((at, _), deleted)| *deleted && *at >= timestamp)
    }

    /// Adds all edges, and reports impossible reads. `is_strict`: transactions must agree with real
    /// time. Returns the number of reads whose place is not known exactly.
    pub(super) fn add_edges(
        &self,
        is_strict: bool,
        builder: &mut Builder,
        findings: &mut Findings,
    ) -> u64 {
        let mut unplaced = 0;
        for key in 0..self.history.keys_len() {
            let versions = self.of_key(key);
            for ((_, earlier), (_, later)) in versions.iter().zip(versions.iter().skip(1)) {
                builder.edge(*earlier, *later, Label::new(Reason::Ww, key));
            }
        }
        let last_places = if is_strict { self.last_places() } else { OrdMap::new() };
        let mut seen = Dense::filled(Seen::default(), self.history.keys_len());
        for attempt in self.history.attempts().filter(|attempt| self.effects.took[*attempt]) {
            for op in self.history.ops(attempt) {
                match op {
                    OpRef::Write { key, .. } => {
                        let seen = seen_by(&mut seen[key], attempt);
                        seen.has_written = true;
                    }
                    OpRef::ReadVersion { key, name, writer, timestamp } => {
                        let read = ReadOf { name, writer, timestamp };
                        let seen = seen_by(&mut seen[key], attempt);
                        if !self.is_external(attempt, key, read, seen, findings) {
                            continue;
                        }
                        if self.is_absent(key, read) {
                            let (of, last) = ((attempt, key), last_places.get(&key).copied());
                            let is_exact = self.add_absence(of, read, (is_strict, last), builder);
                            unplaced += u64::from(!is_exact);
                        } else {
                            self.add_read(attempt, key, read, builder, findings);
                        }
                    }
                    OpRef::Append { .. } | OpRef::ReadList { .. } => {}
                }
            }
        }
        unplaced
    }

    fn is_initial(&self, read: ReadOf) -> bool {
        self.history.name(read.name) == Version::INITIAL.writer
            && read.timestamp == Version::INITIAL.timestamp.0
    }

    /// True for the first read of a key that the transaction has not written yet. Reports reads
    /// that contradict earlier ones or the transaction's own writes.
    fn is_external(
        &self,
        attempt: u32,
        key: KeyId,
        read: ReadOf,
        seen: &mut Seen,
        findings: &mut Findings,
    ) -> bool {
        let (txn, name) = (self.history.txn(attempt), self.history.key_name(key));
        let mut contradicts = |what: &str| {
            findings.note(Phenomenon::Internal, || {
                format!("{txn} read {name} as {}, {what}", self.text(read))
            });
            false
        };
        if read.writer == attempt {
            let own = self.effects.timestamps[attempt];
            if !seen.has_written {
                return contradicts("before it wrote that itself, or without ever doing so");
            }
            if own != UNKNOWN && own != read.timestamp {
                return contradicts("but committed at another timestamp");
            }
            return false;
        }
        if seen.has_written {
            return contradicts("after it had written the key itself");
        }
        match seen.read.replace(read) {
            None => true,
            Some(first) if first == read => false,
            // A deletion, and the initial version in its place.
            Some(first) if self.is_absent(key, first) && self.is_absent(key, read) => true,
            Some(first) => {
                let first = self.text(first);
                contradicts(&format!("and elsewhere as {first}"))
            }
        }
    }

    fn add_read(
        &self,
        attempt: u32,
        key: KeyId,
        read: ReadOf,
        builder: &mut Builder,
        findings: &mut Findings,
    ) {
        let versions = self.of_key(key);
        let Ok(place) = versions.binary_search(&(read.timestamp, read.writer)) else {
            return self.report(attempt, key, read, findings);
        };
        builder.edge(read.writer, attempt, Label::new(Reason::Wr, key));
        if let Some((_, next)) = versions.get(place + 1).filter(|(_, next)| *next != attempt) {
            builder.edge(attempt, *next, Label::new(Reason::Rw, key));
        }
    }

    /// True if the version has no value.
    fn is_absent(&self, key: KeyId, read: ReadOf) -> bool {
        let place = self.of_key(key).binary_search(&(read.timestamp, read.writer));
        let deleted = place.ok().and_then(|place| self.deleted_of_key(key).get(place));
        self.is_initial(read) || deleted.is_some_and(|deleted| *deleted)
    }

    /// The number of versions before the one that a reader states, and that one.
    fn stated(&self, key: KeyId, read: ReadOf) -> usize {
        let stated = self.of_key(key).binary_search(&(read.timestamp, read.writer));
        stated.map_or(0, |place| place + 1)
    }

    /// Where a read found a key absent, if only its one deletion of unknown outcome explains that.
    fn unexplained(&self, attempt: u32, key: KeyId, read: ReadOf) -> Option<Places> {
        let Unplaced { since, only } = self.deleted_somewhere.get(&key)?;
        let is_other = only.is_some_and(|only| only != attempt);
        let is_possible = *since <= self.history.complete_us(attempt);
        if !is_other || !is_possible || self.history.is_stale(attempt) {
            return None;
        }
        let rows = (self.of_key(key), self.deleted_of_key(key));
        absences::unexplained(self.history, attempt, self.stated(key, read), rows)
    }

    /// A deletion of unknown outcome has one place. For each key with one such deletion that some read
    /// needs as its explanation, the last place that agrees with all these reads.
    fn last_places(&self) -> OrdMap<KeyId, usize> {
        let mut last_places = OrdMap::new();
        if self.deleted_somewhere.is_empty() {
            return last_places;
        }
        for attempt in self.history.attempts().filter(|attempt| self.effects.took[*attempt]) {
            let mut written = OrdSet::new();
            for op in self.history.ops(attempt) {
                let (key, read) = match op {
                    OpRef::ReadVersion { key, name, writer, timestamp } => {
                        (key, ReadOf { name, writer, timestamp })
                    }
                    OpRef::Write { key, .. } => {
                        written.insert(key);
                        continue;
                    }
                    OpRef::Append { .. } | OpRef::ReadList { .. } => continue,
                };
                if written.contains(&key) || !self.is_absent(key, read) {
                    continue;
                }
                let Some(found) = self.unexplained(attempt, key, read) else { continue };
                let last = last_places.entry(key).or_insert(found.last);
                *last = found.last.min(*last);
            }
        }
        last_places
    }

    /// Adds the edges of a read that found the key absent. `last` is the last place of the only deletion
    /// of unknown outcome, if a read shows that it happened. Returns false if the read may have several
    /// places.
    fn add_absence(
        &self,
        (attempt, key): (u32, KeyId),
        read: ReadOf,
        (is_strict, last): (bool, Option<usize>),
        builder: &mut Builder,
    ) -> bool {
        let (versions, deleted) = (self.of_key(key), self.deleted_of_key(key));
        let is_timed = is_strict && !self.history.is_stale(attempt);
        if let Some(Unplaced { since, .. }) = self.deleted_somewhere.get(&key)
            && !(is_timed && *since > self.history.complete_us(attempt))
        {
            if !self.is_initial(read) {
                builder.edge(read.writer, attempt, Label::new(Reason::Wr, key));
            }
            if let Some(last) = last
                && self.unexplained(attempt, key, read).is_some()
            {
                self.add_next((attempt, key), last, builder);
            }
            return false;
        }
        let stated = self.stated(key, read);
        let rows = (versions, deleted);
        let places = absences::places(self.history, attempt, stated, rows, is_timed);
        let before = places.first.checked_sub(1).and_then(|before| versions.get(before));
        if let Some((_, writer)) = before {
            builder.edge(*writer, attempt, Label::new(Reason::Wr, key));
        }
        self.add_next((attempt, key), places.last, builder);
        places.first == places.last
    }

    /// A reader comes before the version that follows its last possible place.
    fn add_next(&self, (attempt, key): (u32, KeyId), last: usize, builder: &mut Builder) {
        let next = self.of_key(key).get(last);
        if let Some((_, next)) = next.filter(|(_, next)| *next != attempt) {
            builder.edge(attempt, *next, Label::new(Reason::Rw, key));
        }
    }

    /// Reports the read of a version that does not exist.
    fn report(&self, attempt: u32, key: KeyId, read: ReadOf, findings: &mut Findings) {
        let (txn, name) = (self.history.txn(attempt), self.history.key_name(key));
        let version = self.text(read);
        let mut note = |phenomenon, what: String| {
            findings.note(phenomenon, || format!("{txn} read {name} as {version}, {what}"));
        };
        if read.writer == NOBODY {
            return note(Phenomenon::GarbageRead, "and there is no such transaction".into());
        }
        let writer = self.history.txn(read.writer);
        let is_failed = self.history.status(read.writer) == Status::Fail;
        match (writes(self.history, read.writer, key), is_failed) {
            (false, _) => {
                note(Phenomenon::GarbageRead, format!("but {writer} did not write that key"));
            }
            (true, true) => note(Phenomenon::G1a, format!("but {writer} aborted")),
            (true, false) => {
                let at = self.effects.timestamps[read.writer];
                note(Phenomenon::GarbageRead, format!("but {writer} committed at {at}"));
            }
        }
    }

    fn text(&self, read: ReadOf) -> String {
        format!("{}@{}", self.history.name(read.name), read.timestamp)
    }
}

/// What an attempt has done with a key so far.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    /// The number of the attempt, plus one.
    by: u32,
    has_written: bool,
    read: Option<ReadOf>,
}

fn seen_by(seen: &mut Seen, attempt: u32) -> &mut Seen {
    if seen.by != attempt + 1 {
        *seen = Seen { by: attempt + 1, ..Seen::default() };
    }
    seen
}
