//! Reads that found a key absent, of keys that were deleted.
//!
//! Absent is absent. A database may drop a deletion after a while; then the key has its initial
//! version again. It may also commit a transaction that found a key absent if the key is absent
//! once more, after another deletion. So such a read has several possible places among the
//! versions: it names the first one, and each later absence is another one. Real time rules most
//! of them out, and so does what the reader itself wrote. The reader comes after the first place
//! that is left, and before the end of the last one.

use orthodrome_core::ordered::OrdMap;

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

/// Deletions of one key at unknown timestamps, if their attempts committed at all.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Unplaced {
    /// When the first of them may have happened.
    pub(super) since: u64,
    /// The attempt, if it is the only one.
    pub(super) only: Option<u32>,
}

/// Keys that an attempt deleted at an unknown timestamp, if it committed at all.
pub(super) fn unplaced(history: &History, effects: &Effects) -> OrdMap<KeyId, Unplaced> {
    let mut unplaced: OrdMap<KeyId, Unplaced> = OrdMap::new();
    for attempt in history.attempts() {
        let is_known = effects.timestamps[attempt] != UNKNOWN && effects.took[attempt];
        if is_known || history.status(attempt) == Status::Fail {
            continue;
        }
        for op in history.ops(attempt) {
            if let OpRef::Write { key, deletes: true } = op {
                let invoke = history.invoke_us(attempt);
                let known = unplaced.entry(key);
                known
                    .and_modify(|known| {
                        known.since = invoke.min(known.since);
                        known.only = known.only.filter(|only| *only == attempt);
                    })
                    .or_insert(Unplaced { since: invoke, only: Some(attempt) });
            }
        }
    }
    unplaced
}

/// The places among these versions that an attempt can have in real time: after all that had been
/// written before it began, and before all that were begun after it had ended. None if the versions
/// contradict that themselves.
fn timely(history: &History, attempt: u32, versions: &[(u64, u32)]) -> Option<Places> {
    let (invoke, complete) = (history.invoke_us(attempt), history.complete_us(attempt));
    let ended = |(_, writer): &(u64, u32)| history.complete_us(*writer) < invoke;
    let begun_later = |(_, writer): &(u64, u32)| history.invoke_us(*writer) > complete;
    let first = versions.iter().rposition(ended).map_or(0, |last| last + 1);
    let last = versions.iter().position(begun_later).unwrap_or(versions.len());
    (first <= last).then_some(Places { first, last })
}

/// Where `attempt` has found the key absent, if none of these deletions explains that: then the one
/// deletion of unknown outcome stands there. The arguments are those of [`places`].
pub(super) fn unexplained(
    history: &History,
    attempt: u32,
    stated: usize,
    (versions, deleted): (&[(u64, u32)], &[bool]),
) -> Option<Places> {
    let later = deleted.iter().enumerate().skip(stated).filter(|(_, deleted)| **deleted);
    let mut absences = std::iter::once(stated).chain(later.map(|(place, _)| place + 1));
    let possible = match versions.iter().position(|(_, writer)| *writer == attempt) {
        // It saw what its own version replaced.
        Some(own) => Places { first: own, last: own },
        None => timely(history, attempt, versions)?,
    };
    let is_explained = absences.any(|place| possible.first <= place && place <= possible.last);
    let first = possible.first.max(stated);
    (!is_explained && first <= possible.last).then_some(Places { first, ..possible })
}
