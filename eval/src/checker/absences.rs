//! Reads that found a key absent, of keys that were deleted.
//!
//! Absent is absent. A database may drop a deletion after a while; then the key has its initial
//! version again. It may also commit a transaction that found a key absent if the key is absent
//! once more, after another deletion. So such a read has several possible places among the
//! versions: it names the first one, and each later absence is another one. Real time rules most
//! of them out, and so does what the reader itself wrote. The reader comes after the first place
//! that is left, and before the end of the last one.

use std::collections::BTreeMap;

use super::effects::Effects;
use crate::history::{History, KeyId, OpRef, Status, UNKNOWN};

/// Where an absent key was read: the numbers of versions before the first and the last possible
/// place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Places {
    pub(super) first: usize,
    pub(super) last: usize,
}

/// The places at which `attempt` may have found a key absent whose versions these are, of which it
/// has seen `stated`. `deleted` says of each version whether it has no value. `is_timed`: the
/// reader must agree with real time.
pub(super) fn places(
    history: &History,
    attempt: u32,
    stated: usize,
    (versions, deleted): (&[(u64, u32)], &[bool]),
    is_timed: bool,
) -> Places {
    let absences = || {
        let later = deleted.iter().enumerate().skip(stated).filter(|(_, deleted)| **deleted);
        std::iter::once(stated).chain(later.map(|(place, _)| place + 1))
    };
    let exactly = |place| Places { first: place, last: place };
    if let Some(own) = versions.iter().position(|(_, writer)| *writer == attempt) {
        // It saw what its own version replaced.
        return exactly(absences().take_while(|place| *place <= own).last().unwrap_or(stated));
    }
    let has_begun = |place: &usize| {
        let writer = place.checked_sub(1).and_then(|at| versions.get(at));
        let complete = history.complete_us(attempt);
        writer.is_none_or(|(_, writer)| history.invoke_us(*writer) <= complete)
    };
    let has_ended = |place: &usize| {
        let invoke = history.invoke_us(attempt);
        versions.get(*place).is_some_and(|(_, next)| history.complete_us(*next) < invoke)
    };
    if !is_timed {
        return Places { first: stated, last: absences().last().unwrap_or(stated) };
    }
    let begun: Vec<usize> = absences().filter(has_begun).collect();
    let mut possible = begun.iter().copied().filter(|place| !has_ended(place));
    match possible.next() {
        Some(first) => Places { first, last: possible.next_back().unwrap_or(first) },
        // No absence is possible; the last one shows why.
        None => exactly(begun.last().copied().unwrap_or(stated)),
    }
}

/// Keys that an attempt deleted at an unknown timestamp, if it committed at all; each with the
/// first time at which this may have happened.
pub(super) fn unplaced(history: &History, effects: &Effects) -> BTreeMap<KeyId, u64> {
    let mut unplaced = BTreeMap::new();
    for attempt in history.attempts() {
        let is_known = effects.timestamps[attempt] != UNKNOWN && effects.took[attempt];
        if is_known || history.status(attempt) == Status::Fail {
            continue;
        }
        for op in history.ops(attempt) {
            if let OpRef::Write { key, deletes: true } = op {
                let first = unplaced.entry(key).or_insert(u64::MAX);
                *first = history.invoke_us(attempt).min(*first);
            }
        }
    }
    unplaced
}
