//! What leaders wait for: answers, and timestamps that must pass.

use std::collections::{BTreeMap, BTreeSet};

use orthodrome_core::id::TxnId;
use orthodrome_core::time::{Clock, Duration, Time, Timestamp};

/// When and how often somebody was asked.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    pub at: Time,
    pub times: u32,
}

impl Asked {
    /// Patience begins now.
    pub fn new(now: Time) -> Self {
        Self { at: now, times: 0 }
    }

    /// How long to wait for an answer: `patience` at first, then twice as long each time, up to four
    /// times, or a second if that is longer: whoever is slow must not drown in questions of askers
    /// whose patience was set too short.
    pub fn patience(&self, patience: Duration) -> Duration {
        let longest = (patience * 4).max(Duration::from_secs(1));
        (patience * (1 << self.times.min(10))).min(longest)
    }

    /// Time to ask again.
    pub fn is_due(&self, patience: Duration, now: Time) -> bool {
        now.since(self.at) >= self.patience(patience)
    }

    /// Asked again now.
    pub fn again(self, now: Time) -> Self {
        Self { at: now, times: self.times + 1 }
    }
}

/// Takes note that whatever is due is asked now, and says when each was last.
pub(crate) fn take_due(
    asked: &mut BTreeMap<TxnId, Asked>,
    patience: Duration,
    now: Time,
) -> Vec<(TxnId, Asked)> {
    let due = asked.iter_mut().filter(|(_, asked)| asked.is_due(patience, now));
    due.map(|(&txn, asked)| (txn, std::mem::replace(asked, asked.again(now)))).collect()
}

/// Transactions named in one housekeeping message or log entry.
pub(crate) const BATCH: usize = 4_096;

/// Takes the first of these, no more than one message or entry may name.
pub(crate) fn take_batch(txns: &mut BTreeSet<TxnId>) -> Vec<TxnId> {
    std::iter::from_fn(|| txns.pop_first()).take(BATCH).collect()
}

/// Commits decided whose timestamps have not passed on every clock yet (C13).
#[derive(Debug, Default)]
pub struct CommitWait(BTreeSet<(Timestamp, TxnId)>);

impl CommitWait {
    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn insert(&mut self, timestamp: Timestamp, txn: TxnId) {
        self.0.insert((timestamp, txn));
    }

    /// When the first of them will have passed, by this clock.
    pub fn next(&self, clock: Clock, now: Time) -> Option<Time> {
        let &(timestamp, _) = self.0.first()?;
        let left = (timestamp + clock.error * 2).0.saturating_sub(clock.now.0).saturating_add(1);
        Some(Time(now.0.saturating_add(left)))
    }

    /// Takes out those that have passed.
    pub fn pop_passed(&mut self, clock: Clock) -> Vec<TxnId> {
        let mut passed = Vec::new();
        while let Some(&(timestamp, txn)) = self.0.first()
            && clock.has_passed_everywhere(timestamp)
        {
            self.0.pop_first();
            passed.push(txn);
        }
        passed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_grows_to_four_times_or_a_second() {
        let waits = |patience| {
            let mut asked = Asked::new(Time(0));
            let mut waits = Vec::new();
            for _ in 0..12 {
                waits.push(asked.patience(Duration::from_millis(patience)).as_millis());
                asked = asked.again(Time(0));
            }
            waits
        };
        assert_eq!(waits(1_000)[..4], [1_000, 2_000, 4_000, 4_000]);
        assert_eq!(waits(3)[..4], [3, 6, 12, 24]);
        assert_eq!(waits(3)[11], 1_000);
    }
}
