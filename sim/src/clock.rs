//! Node clocks. Each deviates from true time by a bounded amount that changes slowly, unless a
//! fault breaks the bound.

use orthodrome_core::rng::Rng;
use orthodrome_core::time::{Clock, Duration, Time, Timestamp, nanos};

/// The default reading of physical clocks at the start of a run, in nanoseconds since the Unix
/// epoch. It is far from zero, so that a protocol that confuses [`Time`] and [`Timestamp`] fails at
/// once.
pub const EPOCH: u64 = 1_700_000_000_000_000_000;

/// The accuracy of clocks.
#[derive(Clone, PartialEq, Debug)]
pub struct ClockModel {
    /// The error bound that every node states with each reading.
    pub error: Duration,
    /// The largest real deviation from true time. It must be within `error`, or else the bound is
    /// false.
    pub skew: Duration,
    /// The period in which a clock's deviation moves from one end of its range to the other and
    /// back.
    pub period: Duration,
    /// True time at the start of the run, in nanoseconds since the Unix epoch.
    pub epoch: u64,
}

impl Default for ClockModel {
    fn default() -> Self {
        Self {
            error: Duration::from_millis(2),
            skew: Duration::from_millis(1),
            period: Duration::from_secs(20),
            epoch: EPOCH,
        }
    }
}

/// One node's clock. Half of its skew is a constant offset. The other half is a triangle wave,
/// which resembles drift under periodic correction without its steps.
#[derive(Clone, Debug)]
pub struct NodeClock {
    epoch: u64,
    error: Duration,
    offset: i64,
    amplitude: i64,
    period: i64,
    phase: i64,
    /// Sum of the steps made by faults, in nanoseconds.
    step: i64,
    /// The drift caused by faults, in parts per million, and when it began.
    drift: (i64, Time),
}

impl NodeClock {
    /// Draws a clock.
    #[must_use]
    pub fn draw(model: &ClockModel, rng: &mut Rng) -> Self {
        let half = signed(model.skew) / 2;
        let mut within = || {
            let draw = rng.below(u64::try_from(2 * half + 1).unwrap_or(1));
            i64::try_from(draw).unwrap_or(0) - half
        };
        let (offset, amplitude) = (within(), within());
        let period = signed(model.period).max(4);
        let phase = i64::try_from(rng.below(period.unsigned_abs())).unwrap_or(0);
        let drift = (0, Time::ZERO);
        let (epoch, error) = (model.epoch, model.error);
        Self { epoch, error, offset, amplitude, period, phase, step: 0, drift }
    }

    /// The clock's reading at true time `now`.
    #[must_use]
    pub fn read(&self, now: Time) -> Clock {
        let away = self.offset_at(now);
        Clock {
            now: Timestamp(self.epoch.saturating_add(now.0).saturating_add_signed(away)),
            error: self.error,
        }
    }

    /// How far the clock is ahead of true time, in nanoseconds.
    #[must_use]
    pub fn offset_at(&self, now: Time) -> i64 {
        let at = i64::try_from(now.0).unwrap_or(i64::MAX);
        let in_period = (at % self.period + self.phase) % self.period;
        // 0 → 1 → 0 → -1 → 0 over one period, in units of a quarter.
        let quarter = self.period / 4;
        let wave = if in_period <= quarter {
            in_period
        } else if in_period <= 3 * quarter {
            2 * quarter - in_period
        } else {
            in_period - 4 * quarter
        };
        let wander = ratio(self.amplitude, wave.min(quarter), quarter.max(1));
        let (ppm, since) = self.drift;
        let elapsed = i64::try_from(now.0.saturating_sub(since.0)).unwrap_or(i64::MAX);
        let drifted = if ppm == 0 { 0 } else { ratio(ppm, elapsed, 1_000_000) };
        [wander, drifted, self.step].into_iter().fold(self.offset, i64::saturating_add)
    }

    /// A fault moves the clock by `nanoseconds`.
    pub fn step(&mut self, nanoseconds: i64) {
        self.step = self.step.saturating_add(nanoseconds);
    }

    /// A fault makes the clock run fast by `ppm` from `now` on, in addition to earlier drift. The
    /// deviation so far remains, as a step.
    pub fn drift(&mut self, ppm: i64, now: Time) {
        let before = self.offset_at(now);
        self.drift = (self.drift.0.saturating_add(ppm), now);
        let after = self.offset_at(now);
        self.step = self.step.saturating_add(before.saturating_sub(after));
    }

    /// Time synchronisation works again: the clock is back within its bound.
    pub fn repair(&mut self) {
        self.step = 0;
        self.drift = (0, Time::ZERO);
    }
}

/// `a * b / c` without intermediate overflow. Wide division is slow, and clocks are read at every
/// event.
fn ratio(a: i64, b: i64, c: i64) -> i64 {
    match a.checked_mul(b) {
        Some(product) => product / c,
        None => {
            let wide = i128::from(a) * i128::from(b) / i128::from(c);
            i64::try_from(wide).unwrap_or(if wide < 0 { i64::MIN } else { i64::MAX })
        }
    }
}

fn signed(span: Duration) -> i64 {
    i64::try_from(nanos(span)).unwrap_or(i64::MAX / 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_keep_their_promise_and_use_their_range() {
        let model = ClockModel::default();
        let mut widest = 0;
        for seed in 0..200 {
            let clock = NodeClock::draw(&model, &mut Rng::stream(seed, "clock", 0));
            for second in 0..60 {
                let off = clock.offset_at(Time::from_millis(second * 1_000 + 137));
                assert!(off.abs() <= 1_000_000, "seed {seed}: off by {off} ns");
                widest = widest.max(off.abs());
            }
        }
        assert!(widest > 900_000, "clocks never came near the bound: {widest} ns");
    }

    #[test]
    fn faults_move_and_bend_a_clock_until_it_is_repaired() {
        let model = ClockModel { skew: Duration::ZERO, ..ClockModel::default() };
        let mut clock = NodeClock::draw(&model, &mut Rng::stream(1, "clock", 0));
        clock.step(5_000);
        assert_eq!(clock.offset_at(Time::from_millis(1)), 5_000);
        clock.drift(100, Time::from_millis(1));
        assert_eq!(clock.offset_at(Time::from_millis(1)), 5_000, "drift starts without a step");
        assert_eq!(clock.offset_at(Time::from_millis(11)), 6_000);
        clock.drift(-100, Time::from_millis(11));
        assert_eq!(clock.offset_at(Time::from_millis(500)), 6_000, "what was gained stays");
        clock.repair();
        assert_eq!(clock.offset_at(Time::from_millis(500)), 0);
        assert_eq!(clock.read(Time(7)).now, Timestamp(EPOCH + 7));
    }
}
