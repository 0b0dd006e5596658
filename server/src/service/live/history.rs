//! Rates and latencies of each of the last seconds, from counters that only grow.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use orthodrome_core::Outcome;
use orthodrome_core::txn::AbortReason;
use tokio::time::Instant;

/// Number of seconds that are kept.
pub(in crate::service) const HISTORY: usize = 300;
/// Number of seconds over which percentiles are computed.
pub(in crate::service) const WINDOW: usize = 5;

/// The reasons of aborts, in the order of [`Second::reasons`].
pub(in crate::service) const REASONS: [AbortReason; 9] = [
    AbortReason::Conflict,
    AbortReason::StaleRead,
    AbortReason::Client,
    AbortReason::Guard,
    AbortReason::Recovery,
    AbortReason::Abandoned,
    AbortReason::Overload,
    AbortReason::Invalid,
    AbortReason::TooLarge,
];

/// Buckets of latencies: eight for each doubling, from a microsecond to four minutes. A percentile
/// is wrong by at most 6 %.
const BUCKETS: usize = 28 * EIGHTHS;
const EIGHTHS: usize = 8;

fn bucket_of(latency: Duration) -> usize {
    let us = u64::try_from(latency.as_micros()).unwrap_or(u64::MAX).max(1);
    let octave = us.ilog2();
    let eighth = if octave >= 3 { us >> (octave - 3) } else { us << (3 - octave) } & 7;
    let bucket = octave as usize * EIGHTHS + usize::try_from(eighth).unwrap_or_default();
    bucket.min(BUCKETS - 1)
}

/// The middle of a bucket, in milliseconds.
fn middle_of(bucket: usize) -> f64 {
    let octave = i32::try_from(bucket / EIGHTHS).unwrap_or(i32::MAX);
    let eighth = (bucket % EIGHTHS) as f64 + 0.5;
    2f64.powi(octave) * (1.0 + eighth / EIGHTHS as f64) / 1e3
}

/// Counts of the transactions of one priority since the node started.
#[derive(Debug)]
struct ClassCounters {
    committed: [AtomicU64; BUCKETS],
    aborted: AtomicU64,
    unknown: AtomicU64,
}

/// Counts of all transactions since the node started.
#[derive(Debug)]
pub(super) struct Counters {
    low: ClassCounters,
    high: ClassCounters,
    reasons: [AtomicU64; REASONS.len()],
}

impl Default for ClassCounters {
    fn default() -> Self {
        Self {
            committed: std::array::from_fn(|_| AtomicU64::new(0)),
            aborted: AtomicU64::new(0),
            unknown: AtomicU64::new(0),
        }
    }
}

impl Default for Counters {
    fn default() -> Self {
        Self {
            low: ClassCounters::default(),
            high: ClassCounters::default(),
            reasons: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }
}

fn count(counter: Option<&AtomicU64>) {
    if let Some(counter) = counter {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

impl Counters {
    pub(super) fn add(&self, is_high: bool, took: Duration, outcome: Outcome) {
        let class = if is_high { &self.high } else { &self.low };
        match outcome {
            Outcome::Committed(_) => count(class.committed.get(bucket_of(took))),
            Outcome::Aborted(reason) => {
                count(Some(&class.aborted));
                let at = REASONS.iter().position(|known| *known == reason);
                count(at.and_then(|at| self.reasons.get(at)));
            }
            Outcome::Unknown => count(Some(&class.unknown)),
        }
    }
}

/// What transactions of one priority did in a second.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(in crate::service) struct Class {
    /// Number that committed.
    pub(in crate::service) committed: u64,
    /// Number that aborted.
    pub(in crate::service) aborted: u64,
    /// Number whose outcome the client could not be told.
    pub(in crate::service) unknown: u64,
    /// p50, p95 and p99 of the latency of those that committed in the last [`WINDOW`] seconds, in
    /// milliseconds; none if there are none.
    pub(in crate::service) latency_ms: Option<[f64; 3]>,
}

/// What happened in one second.
#[derive(Clone, PartialEq, Debug, Default)]
pub(in crate::service) struct Second {
    /// How long it really was, in seconds. On a busy machine it may be longer.
    pub(in crate::service) length: f64,
    pub(in crate::service) low: Class,
    pub(in crate::service) high: Class,
    /// Aborts by reason, in the order of [`REASONS`].
    pub(in crate::service) reasons: [u64; REASONS.len()],
}

/// The counts of one priority at some time.
#[derive(Debug, Clone)]
struct ClassTotals {
    committed: Vec<u64>,
    aborted: u64,
    unknown: u64,
}

/// The latencies of one priority in the last seconds.
#[derive(Debug)]
struct ClassHistory {
    totals: ClassTotals,
    window: VecDeque<Vec<u64>>,
}

impl ClassHistory {
    fn new() -> Self {
        let totals = ClassTotals { committed: vec![0; BUCKETS], aborted: 0, unknown: 0 };
        Self { totals, window: VecDeque::new() }
    }

    fn tick(&mut self, counters: &ClassCounters) -> Class {
        let totals = ClassTotals {
            committed: counters.committed.iter().map(get).collect(),
            aborted: get(&counters.aborted),
            unknown: get(&counters.unknown),
        };
        let before = std::mem::replace(&mut self.totals, totals);
        let pairs = self.totals.committed.iter().zip(&before.committed);
        let new: Vec<u64> = pairs.map(|(now, before)| now.saturating_sub(*before)).collect();
        let committed = new.iter().sum();
        self.window.push_back(new);
        if self.window.len() > WINDOW {
            self.window.pop_front();
        }
        Class {
            committed,
            aborted: self.totals.aborted.saturating_sub(before.aborted),
            unknown: self.totals.unknown.saturating_sub(before.unknown),
            latency_ms: percentiles(&self.window),
        }
    }
}

fn percentiles(window: &VecDeque<Vec<u64>>) -> Option<[f64; 3]> {
    let mut all = vec![0; BUCKETS];
    for second in window {
        for (sum, more) in all.iter_mut().zip(second) {
            *sum += more;
        }
    }
    let total: u64 = all.iter().sum();
    let at = |per_mille: u64| {
        // The rank of the percentile, from 1.
        let rank = (total * per_mille).div_ceil(1_000).max(1);
        let mut below = 0;
        let reaches = |count: &u64| {
            below += count;
            below >= rank
        };
        all.iter().position(reaches).map(middle_of)
    };
    (total > 0).then_some(())?;
    Some([at(500)?, at(950)?, at(990)?])
}

/// The last seconds.
#[derive(Debug)]
pub(super) struct History {
    seconds: VecDeque<Second>,
    low: ClassHistory,
    high: ClassHistory,
    reasons: [u64; REASONS.len()],
    ticked: Instant,
}

impl History {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            seconds: VecDeque::new(),
            low: ClassHistory::new(),
            high: ClassHistory::new(),
            reasons: [0; REASONS.len()],
            ticked: now,
        }
    }

    /// Ends a second. Returns the number of transactions that ended in it.
    pub(super) fn tick(&mut self, counters: &Counters, now: Instant) -> u64 {
        let (low, high) = (self.low.tick(&counters.low), self.high.tick(&counters.high));
        let mut reasons = [0; REASONS.len()];
        for ((new, last), counter) in
            reasons.iter_mut().zip(&mut self.reasons).zip(&counters.reasons)
        {
            let total = get(counter);
            (*new, *last) = (total.saturating_sub(*last), total);
        }
        let length = now.saturating_duration_since(self.ticked).as_secs_f64();
        self.ticked = now;
        self.seconds.push_back(Second { length, low, high, reasons });
        if self.seconds.len() > HISTORY {
            self.seconds.pop_front();
        }
        [low, high].iter().map(|class| class.committed + class.aborted + class.unknown).sum()
    }

    pub(super) fn seconds(&self) -> Vec<Second> {
        self.seconds.iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use orthodrome_core::Timestamp;

    use super::*;

    #[test]
    fn a_bucket_contains_its_latency_within_six_percent() {
        for us in (0..27).flat_map(|octave| [1 << octave, (1 << octave) * 3 / 2 + 1]) {
            let middle = middle_of(bucket_of(Duration::from_micros(us))) * 1e3;
            let error = (middle - us as f64).abs() / us as f64;
            // Below eight microseconds, latencies are whole numbers, and the middle is not.
            assert!(error <= 0.0625 || us < 8, "{us} is in a bucket around {middle}");
        }
        for extreme in [Duration::ZERO, Duration::MAX] {
            assert!(bucket_of(extreme) < BUCKETS);
        }
    }

    #[test]
    fn a_second_has_what_was_counted_since_the_last_and_percentiles_of_five() {
        let (counters, start) = (Counters::default(), Instant::now());
        let mut history = History::new(start);
        for ms in 1..=100 {
            let took = Duration::from_millis(ms);
            counters.add(false, took, Outcome::Committed(Timestamp(1)));
        }
        counters.add(true, Duration::ZERO, Outcome::Aborted(AbortReason::Guard));
        counters.add(true, Duration::ZERO, Outcome::Unknown);
        let tick = |history: &mut History, second| {
            history.tick(&counters, start + Duration::from_secs(second))
        };
        assert_eq!(tick(&mut history, 2), 102);
        let first = history.seconds().remove(0);
        assert_eq!((first.length, first.low.committed, first.low.aborted), (2.0, 100, 0));
        assert_eq!((first.high.aborted, first.high.unknown), (1, 1));
        assert_eq!(first.high.latency_ms, None);
        assert_eq!(first.reasons, [0, 0, 0, 1, 0, 0, 0, 0, 0]);
        for (found, expected) in first.low.latency_ms.unwrap().into_iter().zip([50.0, 95.0, 99.0]) {
            assert!((found / expected - 1.0f64).abs() < 0.07, "{found} is not near {expected}");
        }

        assert_eq!(tick(&mut history, 3), 0);
        let second = history.seconds().remove(1);
        assert_eq!((second.low.committed, second.reasons), (0, [0; 9]));
        assert_eq!(second.low.latency_ms, first.low.latency_ms, "of the last five seconds");
        for at in 0..2 * HISTORY as u64 {
            tick(&mut history, 4 + at);
        }
        let seconds = history.seconds();
        assert_eq!(seconds.len(), HISTORY);
        assert_eq!(seconds.last().unwrap().low.latency_ms, None);
    }
}
