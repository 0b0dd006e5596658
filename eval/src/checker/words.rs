//! Describes the reasons for edges in words.

use super::cycles::Hop;
use super::effects::Effects;
use super::graph::Reason;
use super::verdict::{Dependency, Step};
use crate::history::dense::Dense;
use crate::history::{History, KeyId, ListRef, OpRef, UNKNOWN};

/// How many elements of a list are shown: the last ones.
const SHOWN: usize = 8;

/// A list, abridged at its start if it is long.
pub(super) fn list_text(list: &[u64]) -> String {
    let hidden = list.len().saturating_sub(SHOWN);
    let mut parts = Vec::new();
    if hidden > 0 {
        parts.push(format!("… {hidden} more"));
    }
    parts.extend(list.iter().skip(hidden).map(u64::to_string));
    format!("[{}]", parts.join(", "))
}

/// What an attempt first read in a key: `c4.19 read k7=[3, 12]`.
pub(super) fn read_text(
    history: &History,
    trunks: &Dense<&[u64]>,
    attempt: u32,
    key: KeyId,
) -> String {
    let read = read_list(history, trunks, attempt, key).map_or_else(String::new, list_text);
    format!("{} read {}={read}", history.txn(attempt), history.key_name(key))
}

fn read_list<'a>(
    history: &'a History,
    trunks: &Dense<&'a [u64]>,
    attempt: u32,
    key: KeyId,
) -> Option<&'a [u64]> {
    history.ops(attempt).find_map(|op| match op {
        OpRef::ReadList { key: k, list } if k == key => Some(match list {
            ListRef::Prefix(len) => trunks[key].get(..len as usize).unwrap_or_default(),
            ListRef::Odd(odd) => history.odd_list(odd),
        }),
        OpRef::ReadList { .. }
        | OpRef::Append { .. }
        | OpRef::ReadVersion { .. }
        | OpRef::Write { .. } => None,
    })
}

/// Microseconds as milliseconds without needless zeros: `10.2 ms`.
fn time_text(micros: u64) -> String {
    let text = format!("{}.{:03}", micros / 1_000, micros % 1_000);
    format!("{} ms", text.trim_end_matches('0').trim_end_matches('.'))
}

/// A version, or a placeholder for it.
fn version_text(history: &History, name: u32, timestamp: u64) -> String {
    if timestamp == 0 {
        return "its initial version".into();
    }
    format!("{}@{timestamp}", history.name(name))
}

/// Describes the edges of cycles in words.
#[derive(Debug)]
pub(super) struct Words<'a> {
    pub(super) history: &'a History,
    pub(super) effects: &'a Effects,
    pub(super) trunks: &'a Dense<&'a [u64]>,
}

impl Words<'_> {
    /// The hop as a step of a verdict.
    pub(super) fn step(&self, hop: Hop) -> Step {
        let (from, to) = (self.history.txn(hop.from), self.history.txn(hop.to));
        let order = |name| {
            let completed = time_text(self.history.complete_us(hop.from));
            let invoked = time_text(self.history.invoke_us(hop.to));
            format!("{from} completed at {completed} before {to} was invoked at {invoked} ({name})")
        };
        let (dependency, reason) = match hop.label.reason() {
            Reason::Ww => (Dependency::Ww, self.write_write(hop)),
            Reason::Wr => (Dependency::Wr, self.write_read(hop)),
            Reason::Rw => (Dependency::Rw, self.read_write(hop)),
            Reason::Process => (Dependency::Process, order("same process")),
            Reason::RealTime => (Dependency::RealTime, order("real time")),
            Reason::Junction => unreachable!("a hop is labelled with what led into its junctions"),
        };
        Step { from, to, dependency, reason }
    }

    /// The elements that an attempt appended to a key, in order.
    fn appended(&self, attempt: u32, key: KeyId) -> Vec<u64> {
        let elements = self.history.ops(attempt).filter_map(|op| match op {
            OpRef::Append { key: k, element } if k == key => Some(element),
            OpRef::Append { .. }
            | OpRef::ReadList { .. }
            | OpRef::ReadVersion { .. }
            | OpRef::Write { .. } => None,
        });
        elements.collect()
    }

    /// True if no list that was read has the element which the hop's reader missed.
    pub(super) fn is_lost(&self, hop: Hop) -> bool {
        hop.label.reason() == Reason::Rw
            && self.missed(hop).is_some_and(|e| !self.trunks[hop.label.key()].contains(&e))
    }

    /// The first element that the hop's writer appended and the hop's reader did not see.
    fn missed(&self, hop: Hop) -> Option<u64> {
        let key = hop.label.key();
        let list = read_list(self.history, self.trunks, hop.from, key)?;
        self.appended(hop.to, key).into_iter().find(|element| !list.contains(element))
    }

    fn write_write(&self, hop: Hop) -> String {
        let key = hop.label.key();
        let (from, to) = (self.history.txn(hop.from), self.history.txn(hop.to));
        let name = self.history.key_name(key);
        let (ours, theirs) = (self.appended(hop.from, key), self.appended(hop.to, key));
        let (Some(first), Some(last)) = (ours.first(), theirs.last()) else {
            let (earlier, later) =
                (self.effects.timestamps[hop.from], self.effects.timestamps[hop.to]);
            return format!("{from} wrote {name} at {earlier}, before {to} did at {later} (ww)");
        };
        // Of all pairs, show the closest: our last element before one of the other transaction.
        let mut before = None;
        for element in self.trunks[key] {
            if let Some(before) = before.filter(|_| theirs.contains(element)) {
                return format!(
                    "{from} appended {before} to {name} before {to} appended {element} (ww)"
                );
            }
            if ours.contains(element) {
                before = Some(element);
            }
        }
        let first = before.unwrap_or(first);
        format!(
            "{from} appended {first} to {name}, and the longest list read there lacks {last}, which \
             {to} appended (ww)"
        )
    }

    fn write_read(&self, hop: Hop) -> String {
        let key = hop.label.key();
        let (from, to) = (self.history.txn(hop.from), self.history.txn(hop.to));
        let name = self.history.key_name(key);
        let Some(list) = read_list(self.history, self.trunks, hop.to, key) else {
            let at = self.effects.timestamps[hop.from];
            return format!("{to} read {name} as {from} wrote it at {at} (wr)");
        };
        let ours = self.appended(hop.from, key);
        let element = list.iter().rfind(|e| ours.contains(e)).copied().unwrap_or_default();
        let list = list_text(list);
        format!("{to} read {name}={list} and saw {element}, which {from} appended (wr)")
    }

    fn read_write(&self, hop: Hop) -> String {
        let key = hop.label.key();
        let (from, to) = (self.history.txn(hop.from), self.history.txn(hop.to));
        let name = self.history.key_name(key);
        if let Some(missed) = self.missed(hop) {
            let read = read_text(self.history, self.trunks, hop.from, key);
            return format!("{read} and missed {missed}, which {to} appended (rw)");
        }
        let read = self.history.ops(hop.from).find_map(|op| match op {
            OpRef::ReadVersion { key: k, name, timestamp, .. } if k == key => {
                Some(version_text(self.history, name, timestamp))
            }
            OpRef::ReadVersion { .. }
            | OpRef::ReadList { .. }
            | OpRef::Append { .. }
            | OpRef::Write { .. } => None,
        });
        let read = read.unwrap_or_default();
        let at = self.effects.timestamps[hop.to];
        let at = if at == UNKNOWN { String::new() } else { format!(" at {at}") };
        format!("{from} read {name} as {read} and missed what {to} wrote{at} (rw)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_brief() {
        assert_eq!(list_text(&[]), "[]");
        assert_eq!(list_text(&[3, 12]), "[3, 12]");
        let long: Vec<u64> = (1..=10).collect();
        assert_eq!(list_text(&long), "[… 2 more, 3, 4, 5, 6, 7, 8, 9, 10]");
        assert_eq!(time_text(10_200), "10.2 ms");
        assert_eq!(time_text(0), "0 ms");
        assert_eq!(time_text(100_001), "100.001 ms");
    }
}
