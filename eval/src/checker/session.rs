//! Session guarantees (Terry et al., PDIS 1994): what a client reads is not older than what it
//! already knew: *read your writes*, and *monotonic reads*.
//!
//! For committed transactions they follow from strict serializability. But a client also sees the
//! reads of an attempt that then aborts, and stale reads have no place in the order. So this module
//! compares them with what had committed for the same process before they were invoked. The reads
//! of an attempt that did not commit say nothing about later attempts: they may never have existed.

use orthodrome_core::ordered::OrdMap;

use super::effects::Effects;
use super::lists::Lists;
use super::verdict::{Findings, Phenomenon};
use super::versions::Versions;
use crate::history::{History, KeyId, ListRef, NEVER, OpRef, Status, UNKNOWN};

/// A position: the length of a list, or a commit timestamp; and the attempt that showed it to the
/// process.
type Known = (u64, u32);

/// What one process knows of one key.
#[derive(Debug, Default)]
struct Told {
    written: Option<Known>,
    read: Option<Known>,
    /// Elements that it appended and no committed transaction read. They have no position in the
    /// list.
    unplaced: Vec<(u64, u32)>,
}

fn raise(known: &mut Option<Known>, new: Known) {
    if known.is_none_or(|(known, _)| known < new.0) {
        *known = Some(new);
    }
}

#[derive(Debug)]
struct Judge<'a> {
    history: &'a History,
    effects: &'a Effects,
    lists: &'a Lists<'a>,
    versions: &'a Versions<'a>,
    findings: &'a mut Findings,
}

/// Judges the reads that the order of all transactions does not judge.
pub(super) fn judge(
    history: &History,
    effects: &Effects,
    (lists, versions): (&Lists<'_>, &Versions<'_>),
    findings: &mut Findings,
) {
    let mut judge = Judge { history, effects, lists, versions, findings };
    let mut attempts: Vec<u32> = history.attempts().collect();
    attempts.sort_by_key(|attempt| history.process(*attempt));
    for group in attempts.chunk_by(|a, b| history.process(*a) == history.process(*b)) {
        judge.process(group);
    }
}

impl Judge<'_> {
    /// A client may have several pending transactions, so only attempts that completed before an
    /// attempt was invoked count for it.
    fn process(&mut self, attempts: &[u32]) {
        let history = self.history;
        let is_told = |attempt: &u32| {
            history.status(*attempt) == Status::Ok && history.complete_us(*attempt) != NEVER
        };
        let mut completed: Vec<u32> = attempts.iter().copied().filter(is_told).collect();
        completed.sort_by_key(|attempt| (history.complete_us(*attempt), *attempt));
        let mut invoked = attempts.to_vec();
        invoked.sort_by_key(|attempt| (history.invoke_us(*attempt), *attempt));

        let mut told: OrdMap<KeyId, Told> = OrdMap::new();
        let mut completed = completed.into_iter().peekable();
        for attempt in invoked {
            let now = history.invoke_us(attempt);
            while let Some(earlier) = completed.next_if(|a| history.complete_us(*a) < now) {
                self.learn(earlier, &mut told);
            }
            // The other attempts are judged by the order of all transactions.
            let is_apart = !self.effects.took[attempt] || history.is_stale(attempt);
            if is_apart && !told.is_empty() {
                self.attempt(attempt, &told);
            }
        }
    }

    /// The process now knows this commit.
    fn learn(&self, attempt: u32, told: &mut OrdMap<KeyId, Told>) {
        let at = self.effects.timestamps[attempt];
        for op in self.history.ops(attempt) {
            match op {
                OpRef::Append { key, element } => {
                    let told = told.entry(key).or_default();
                    match self.lists.length_with(key, element) {
                        Some(length) => raise(&mut told.written, (length.into(), attempt)),
                        None => told.unplaced.push((element, attempt)),
                    }
                }
                OpRef::ReadList { key, list } => {
                    let length = self.agreed(key, list);
                    raise(&mut told.entry(key).or_default().read, (length, attempt));
                }
                OpRef::ReadVersion { key, timestamp, .. } => {
                    raise(&mut told.entry(key).or_default().read, (timestamp, attempt));
                }
                OpRef::Write { key, .. } if at != UNKNOWN => {
                    raise(&mut told.entry(key).or_default().written, (at, attempt));
                }
                OpRef::Write { .. } => {}
            }
        }
    }

    /// The length of the common prefix of a list and what committed transactions read.
    fn agreed(&self, key: KeyId, list: ListRef) -> u64 {
        match list {
            ListRef::Prefix(length) => length.into(),
            ListRef::Odd(odd) => {
                let pairs = self.history.odd_list(odd).iter().zip(self.lists.trunk(key));
                pairs.take_while(|(a, b)| a == b).count() as u64
            }
        }
    }

    /// Compares what an attempt read with what its process knew.
    fn attempt(&mut self, attempt: u32, told: &OrdMap<KeyId, Told>) {
        let history = self.history;
        let mut own = Vec::new();
        for op in history.ops(attempt) {
            let (key, got, list) = match op {
                OpRef::ReadList { key, list } => (key, self.agreed(key, list), Some(list)),
                OpRef::ReadVersion { key, timestamp, .. } => (key, timestamp, None),
                OpRef::Append { key, .. } | OpRef::Write { key, .. } => {
                    own.push(key);
                    continue;
                }
            };
            let told = told.get(&key).filter(|_| !own.contains(&key));
            let Some(told) = told else { continue };
            let is_missing = |(element, _): &&(u64, u32)| match list {
                Some(ListRef::Odd(odd)) => !history.odd_list(odd).contains(element),
                Some(ListRef::Prefix(_)) => true,
                None => false,
            };
            let unread = told.unplaced.iter().find(is_missing).map(|(_, by)| *by);
            // A key whose deletion was forgotten has its initial version.
            let is_absent = |known| {
                list.is_none() && got == 0 && self.versions.may_be_deleted_since(key, known)
            };
            let is_older = |(known, _): &Known| got < *known && !is_absent(*known);
            let written = told.written.filter(is_older).map(|(_, by)| by);
            let read = told.read.filter(is_older).map(|(_, by)| by);
            if let Some(by) = written.or(unread) {
                self.report(Phenomenon::ReadYourWrites, attempt, key, (by, "wrote"));
            } else if let Some(by) = read {
                self.report(Phenomenon::MonotonicReads, attempt, key, (by, "read"));
            }
        }
    }

    fn report(
        &mut self,
        phenomenon: Phenomenon,
        attempt: u32,
        key: KeyId,
        (by, did): (u32, &'static str),
    ) {
        let history = self.history;
        self.findings.note(phenomenon, || {
            let (txn, by, key) = (history.txn(attempt), history.txn(by), history.key_name(key));
            let end = match history.status(attempt) {
                Status::Ok => "committed",
                Status::Fail => "aborted",
                Status::Info => "has an unknown outcome",
            };
            format!(
                "{txn} (which {end}) read {key} as it was before what {by} {did}, although its \
                 client had been told that {by} committed"
            )
        });
    }
}
