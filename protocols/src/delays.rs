//! How long messages take to servers: measured all the time, and asked whenever a transaction needs
//! its timestamp (Natto §2.2, §4).
//!
//! What is measured is a difference of clocks: what the receiver's clock says when a message comes, less
//! what the sender's said when it left. The difference of the clocks themselves is in it, so that "now,
//! by my clock, and the measured delay" is a reading of the *receiver's* clock.

use std::collections::VecDeque;

use orthodrome_core::id::NodeId;
use orthodrome_core::machine::Gauge;
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::time::{Duration, Time, Timestamp, nanos};

/// Measured delays to nodes, or along other paths that have a name.
#[derive(Debug)]
pub struct Delays<K = NodeId> {
    by_path: OrdMap<K, Measured>,
    /// The estimate is at or above this percentage of all measurements.
    percentile: usize,
}

impl<K: Ord> Default for Delays<K> {
    fn default() -> Self {
        Self::at_percentile(95)
    }
}

impl<K: Ord> Delays<K> {
    /// Nothing is measured yet. Estimates will be at or above this percentage of all measurements.
    #[must_use]
    pub const fn at_percentile(percentile: usize) -> Self {
        Self { by_path: OrdMap::new(), percentile }
    }
}

#[derive(Debug, Default)]
struct Measured {
    /// The last measurements, oldest first: when each came back, and the delay.
    samples: VecDeque<(Time, i64)>,
    /// The estimate, and when it was made.
    estimate: Option<(Time, i64)>,
    sent: u64,
    answered: u64,
}

impl<K: Copy + Ord> Delays<K> {
    /// A probe of `node` is on its way.
    pub fn sent(&mut self, node: K) {
        self.by_path.entry(node).or_default().sent += 1;
    }

    /// A probe of `node` has come back.
    pub fn record(&mut self, node: K, delay: i64, window: Duration, now: Time) {
        let Measured { samples, answered, .. } = self.by_path.entry(node).or_default();
        *answered += 1;
        samples.push_back((now, delay));
        while samples.front().is_some_and(|(at, _)| now.since(*at) > window) {
            samples.pop_front();
        }
    }

    /// The delay to `node` in nanoseconds; none if no recent measurement exists. It is computed
    /// again at most once in `refresh`.
    pub fn estimate(
        &mut self,
        node: K,
        window: Duration,
        refresh: Duration,
        now: Time,
    ) -> Option<i64> {
        let measured = self.by_path.get_mut(&node)?;
        if let Some((at, estimate)) = measured.estimate
            && now.since(at) < refresh
        {
            return Some(estimate);
        }
        let young = measured.samples.iter().filter(|(at, _)| now.since(*at) <= window);
        let mut delays: Vec<i64> = young.map(|(_, delay)| *delay).collect();
        let rank = (delays.len() * self.percentile).div_ceil(100);
        let at = rank.checked_sub(1).filter(|at| *at < delays.len());
        let estimate = at.map(|at| *delays.select_nth_unstable(at).1);
        measured.estimate = estimate.map(|estimate| (now, estimate));
        estimate
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.by_path.clear();
    }
}

impl Delays {
    /// For each node that is measured: the estimate in use, how far above the smallest delay of the
    /// window it is, how old the last answer is, and how many probes went out and came back.
    pub fn gauges(&self, now: Time) -> Vec<Gauge> {
        let mut gauges = Vec::new();
        for (&node, Measured { samples, estimate, sent, answered }) in &self.by_path {
            let mut tell = |name, value| gauges.push(Gauge { name, node, value });
            if let Some((_, estimate)) = estimate {
                tell("delay_us", estimate / 1_000);
                let least = samples.iter().map(|(_, delay)| *delay).min();
                tell(
                    "delay_spread_us",
                    estimate.saturating_sub(least.unwrap_or(*estimate)) / 1_000,
                );
            }
            if let Some((at, _)) = samples.back() {
                tell("probe_age_us", delay(now.since(*at)) / 1_000);
            }
            tell("probes_sent", i64::try_from(*sent).unwrap_or(i64::MAX));
            tell("probes_answered", i64::try_from(*answered).unwrap_or(i64::MAX));
        }
        gauges
    }
}

/// `to` minus `from`, in nanoseconds.
#[must_use]
pub fn difference(to: Timestamp, from: Timestamp) -> i64 {
    i64::try_from(i128::from(to.0) - i128::from(from.0)).unwrap_or(if to < from {
        i64::MIN
    } else {
        i64::MAX
    })
}

/// `clock` plus `delay` nanoseconds; the delay may be negative.
#[must_use]
pub fn shifted(clock: Timestamp, delay: i64) -> Timestamp {
    Timestamp(clock.0.saturating_add_signed(delay))
}

/// A duration as a delay.
#[must_use]
pub fn delay(span: Duration) -> i64 {
    i64::try_from(nanos(span)).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: NodeId = NodeId(7);
    const WINDOW: Duration = Duration::from_secs(1);
    const REFRESH: Duration = Duration::from_millis(100);

    fn ms(millis: u64) -> Time {
        Time::from_millis(millis)
    }

    #[test]
    fn the_estimate_is_the_95th_percentile_of_the_last_second() {
        let mut delays = Delays::default();
        assert_eq!(delays.estimate(NODE, WINDOW, REFRESH, ms(0)), None);
        for turn in 0..200 {
            // The first hundred are from before the window.
            let delay = if turn < 100 { 9_999 } else { turn - 100 };
            delays.record(NODE, delay, WINDOW, ms(u64::try_from(turn).unwrap() * 10));
        }
        // 100 samples and the one at the edge of the window: 9999, 0, 1, … 99.
        assert_eq!(delays.estimate(NODE, WINDOW, REFRESH, ms(1_990)), Some(95));
        assert_eq!(delays.estimate(NODE, WINDOW, REFRESH, ms(2_000)), Some(95), "not made anew");
        // Half of them are too old by now: 50, 51, … 99.
        assert_eq!(delays.estimate(NODE, WINDOW, REFRESH, ms(2_500)), Some(97));
    }

    #[test]
    fn lost_probes_leave_an_estimate_until_all_are_too_old() {
        let mut delays = Delays::default();
        delays.record(NODE, -5, WINDOW, ms(0));
        assert_eq!(delays.estimate(NODE, WINDOW, REFRESH, ms(900)), Some(-5));
        assert_eq!(delays.estimate(NODE, WINDOW, REFRESH, ms(1_001)), None);
    }

    #[test]
    fn a_clock_that_steps_is_believed_after_one_window() {
        let mut delays = Delays::default();
        for turn in 0..100 {
            delays.record(NODE, 1_000_000, WINDOW, ms(turn * 10));
        }
        for turn in 100..202 {
            delays.record(NODE, -1_000_000, WINDOW, ms(turn * 10));
        }
        assert_eq!(delays.estimate(NODE, WINDOW, REFRESH, ms(2_010)), Some(-1_000_000));
    }

    #[test]
    fn differences_and_shifts_know_signs() {
        assert_eq!(difference(Timestamp(5), Timestamp(8)), -3);
        assert_eq!(difference(Timestamp::MAX, Timestamp::ZERO), i64::MAX);
        assert_eq!(shifted(Timestamp(5), -8), Timestamp::ZERO);
        assert_eq!(shifted(Timestamp(5), 8), Timestamp(13));
        assert_eq!(delay(Duration::from_micros(1)), 1_000);
    }

    #[test]
    fn no_answer_makes_gauges_overflow() {
        let mut delays = Delays::default();
        for delay in [i64::MIN, i64::MAX] {
            delays.record(NODE, delay, WINDOW, ms(1));
        }
        assert_eq!(delays.estimate(NODE, WINDOW, REFRESH, ms(2)), Some(i64::MAX));
        let spread = Gauge { name: "delay_spread_us", node: NODE, value: i64::MAX / 1_000 };
        assert!(delays.gauges(ms(2)).contains(&spread));
    }

    #[test]
    fn gauges_tell_what_was_measured() {
        let mut delays = Delays::default();
        for turn in 0..20 {
            delays.sent(NODE);
            if turn != 5 {
                delays.record(NODE, 1_000_000 + turn * 1_000, WINDOW, ms(turn.unsigned_abs() * 10));
            }
        }
        delays.estimate(NODE, WINDOW, REFRESH, ms(200));
        let gauges: Vec<(&str, i64)> =
            delays.gauges(ms(200)).iter().map(|gauge| (gauge.name, gauge.value)).collect();
        let expected = [
            ("delay_us", 1_019),
            ("delay_spread_us", 19),
            ("probe_age_us", 10_000),
            ("probes_sent", 20),
            ("probes_answered", 19),
        ];
        assert_eq!(gauges, expected);
    }
}
