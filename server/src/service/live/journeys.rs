//! The journeys of slow and of recent transactions: when each phase ended.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use orthodrome_core::txn::AbortReason;
use orthodrome_core::{Outcome, TxnId};
use tokio::time::Instant;

use super::locked;
use crate::service::metrics::Timing;

/// Length of each list.
pub(in crate::service) const KEPT: usize = 10;
/// The slowest transactions are those of this period and of the one before it.
const PERIOD: Duration = Duration::from_secs(60);

/// A transaction that ended. Times count from its first request, with the time of its client.
#[derive(Clone, PartialEq, Debug)]
pub(in crate::service) struct Journey {
    pub(in crate::service) txn: TxnId,
    pub(in crate::service) kind: &'static str,
    pub(in crate::service) priority: &'static str,
    /// When the node answered the last of its rounds of reads; none if it had one round.
    pub(in crate::service) reads: Option<Duration>,
    /// When its client asked to commit or abort it; none if it had one round.
    pub(in crate::service) decided: Option<Duration>,
    /// When its outcome was known.
    pub(in crate::service) took: Duration,
    /// `committed`, `unknown`, or the reason for the abort.
    pub(in crate::service) outcome: Result<&'static str, AbortReason>,
    pub(in crate::service) path: &'static str,
    /// When it ended.
    pub(in crate::service) ended: Instant,
}

#[derive(Debug)]
struct Kept {
    /// The slowest ones of this period, and of the last.
    slow: [Vec<Journey>; 2],
    since: Instant,
    recent: VecDeque<Journey>,
}

/// The journeys that are kept.
#[derive(Debug)]
pub(super) struct Journeys {
    /// A transaction that took less is not among the slowest, in microseconds.
    slow_us_min: AtomicU64,
    /// True if the next one is to be kept.
    wants_recent: AtomicBool,
    kept: Mutex<Kept>,
}

fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}

impl Journeys {
    pub(super) fn new(now: Instant) -> Self {
        let kept = Kept { slow: Default::default(), since: now, recent: VecDeque::new() };
        Self {
            slow_us_min: AtomicU64::new(0),
            wants_recent: AtomicBool::new(true),
            kept: Mutex::new(kept),
        }
    }

    /// Keeps a transaction that ended if it is among the slowest, or the first one since the last
    /// tick. If another thread is doing the same, this one is not kept.
    pub(super) fn offer(
        &self,
        timing: &Timing,
        took: Duration,
        path: &'static str,
        outcome: Outcome,
        now: Instant,
    ) {
        let relaxed = Ordering::Relaxed;
        let is_slow = micros(took) >= self.slow_us_min.load(relaxed);
        let is_recent = self.wants_recent.load(relaxed);
        if !is_slow && !is_recent {
            return;
        }
        let Ok(mut kept) = self.kept.try_lock() else { return };
        let since = |at: Option<Instant>| at.map(|at| at.saturating_duration_since(timing.began));
        let journey = Journey {
            txn: timing.txn,
            kind: timing.kind,
            priority: timing.priority,
            reads: since(timing.reads_answered),
            decided: since(timing.decided),
            took,
            outcome: match outcome {
                Outcome::Committed(_) => Ok("committed"),
                Outcome::Unknown => Ok("unknown"),
                Outcome::Aborted(reason) => Err(reason),
            },
            path,
            ended: now,
        };
        if is_recent {
            self.wants_recent.store(false, relaxed);
            kept.recent.push_front(journey.clone());
            kept.recent.truncate(KEPT);
        }
        if is_slow {
            let [slow, _] = &mut kept.slow;
            slow.push(journey);
            slow.sort_by_key(|other| std::cmp::Reverse(other.took));
            slow.truncate(KEPT);
            if let Some(last) = slow.get(KEPT - 1) {
                self.slow_us_min.store(micros(last.took), relaxed);
            }
        }
    }

    /// Ends a second.
    pub(super) fn tick(&self, now: Instant) {
        self.wants_recent.store(true, Ordering::Relaxed);
        let mut kept = locked(&self.kept);
        if now.saturating_duration_since(kept.since) >= PERIOD {
            let [this, last] = &mut kept.slow;
            *last = std::mem::take(this);
            kept.since = now;
            self.slow_us_min.store(0, Ordering::Relaxed);
        }
    }

    /// The slowest, slowest first; and recent ones, newest first.
    pub(super) fn seen(&self) -> (Vec<Journey>, Vec<Journey>) {
        let kept = locked(&self.kept);
        let mut slow = kept.slow.concat();
        slow.sort_by_key(|journey| std::cmp::Reverse(journey.took));
        slow.truncate(KEPT);
        (slow, kept.recent.iter().cloned().collect())
    }
}

#[cfg(test)]
mod tests {
    use orthodrome_core::{ClientId, RegionId, Timestamp, Txn};

    use super::*;

    fn offer(journeys: &Journeys, counter: u64, now: Instant) {
        let id = TxnId::new(ClientId(1), counter);
        let timing = Timing::start(&Txn::read_only(id, RegionId(0), vec!["k".into()]));
        let outcome = Outcome::Committed(Timestamp(1));
        journeys.offer(&timing, Duration::from_millis(counter), "fast", outcome, now);
    }

    #[test]
    fn the_slowest_are_kept_for_a_minute_or_two() {
        let start = Instant::now();
        let journeys = Journeys::new(start);
        // Not in the order of their latencies.
        for counter in (1..=50).map(|n| n * 7 % 51) {
            offer(&journeys, counter, start);
        }
        let counters =
            || journeys.seen().0.iter().map(|found| found.txn.counter).collect::<Vec<_>>();
        let expected: Vec<u64> = (41..=50).rev().collect();
        assert_eq!(counters(), expected);
        journeys.tick(start + PERIOD);
        offer(&journeys, 45, start);
        assert_eq!(counters().len(), KEPT);
        assert_eq!(&counters()[..7], [50, 49, 48, 47, 46, 45, 45]);
        journeys.tick(start + 2 * PERIOD);
        assert_eq!(counters(), [45], "others are too old");
    }

    #[test]
    fn one_transaction_of_each_second_is_kept() {
        let start = Instant::now();
        let journeys = Journeys::new(start);
        for second in 0..20 {
            for more in 0..5 {
                offer(&journeys, second * 10 + more, start);
            }
            journeys.tick(start);
        }
        let found: Vec<u64> = journeys.seen().1.iter().map(|found| found.txn.counter).collect();
        let expected: Vec<u64> = (10..20).rev().map(|second| second * 10).collect();
        assert_eq!(found, expected);
    }
}
