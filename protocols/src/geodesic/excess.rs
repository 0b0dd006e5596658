//! How long decisions may take. A gateway that recovered what is only slow would send much more than
//! before, and on links that lose packets everything would become slower still.

use orthodrome_core::time::Duration;

use crate::delays::delay;

/// How much longer than expected it took lately until all partitions had decided.
#[derive(Debug, Default)]
pub(super) struct Excess {
    /// Moving averages, in nanoseconds: of the excess, and of its distance from that.
    mean: i64,
    deviation: i64,
}

impl Excess {
    pub(super) fn record(&mut self, excess: Duration) {
        let excess = delay(excess);
        let distance = excess.saturating_sub(self.mean);
        self.mean = self.mean.saturating_add(distance / 8);
        self.deviation += (distance.saturating_abs() - self.deviation) / 4;
    }

    /// Few decisions take longer.
    pub(super) fn bound(&self) -> Duration {
        let nanos = self.mean.saturating_add(self.deviation.saturating_mul(4));
        Duration::from_nanos(nanos.max(0).unsigned_abs())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_follows_the_mean_and_the_deviation() {
        let ms = Duration::from_millis;
        let mut excess = Excess::default();
        for _ in 0..100 {
            excess.record(Duration::ZERO);
        }
        assert_eq!(excess.bound(), Duration::ZERO, "links on which nothing is late");
        for round in 0..100 {
            excess.record(ms(if round % 10 == 0 { 600 } else { 0 }));
        }
        let bound = excess.bound();
        assert!((ms(100)..ms(900)).contains(&bound), "one of ten is late: {bound:?}");
        for _ in 0..100 {
            excess.record(Duration::ZERO);
        }
        assert!(excess.bound() < ms(1), "{:?}", excess.bound());
        excess.record(Duration::MAX);
        assert!(excess.bound() > ms(1), "nothing overflows");
    }
}
