//! Deadlines, and pauses between attempts.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::time::Duration;

use tokio::time::Instant;

const PAUSE_MIN: Duration = Duration::from_millis(4);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// The deadline of one call, and how often it has failed so far.
#[derive(Clone, Debug)]
pub(crate) struct Pace {
    pub(crate) deadline: Instant,
    failures: u32,
}

impl Pace {
    pub(crate) fn new(time: Duration) -> Self {
        let now = Instant::now();
        // A duration too long to add means no deadline; a year has the same effect.
        let year = Duration::from_secs(365 * 24 * 3600);
        Self { deadline: now + time.min(year), failures: 0 }
    }

    /// Pauses after a failure: twice as long each time, up to a second, minus a random part, so
    /// that clients which failed together do not retry together. False if the deadline comes first.
    pub(crate) async fn pause(&mut self) -> bool {
        let Some(until) = self.next(Instant::now()) else { return false };
        tokio::time::sleep_until(until).await;
        true
    }

    /// When a pause that begins now ends, unless the deadline comes first.
    fn next(&mut self, now: Instant) -> Option<Instant> {
        let span = PAUSE_MIN.saturating_mul(1 << self.failures.min(16)).min(PAUSE_MAX);
        self.failures = self.failures.saturating_add(1);
        Some(now + jittered(span, random())).filter(|until| *until < self.deadline)
    }
}

/// A random duration between half of `span` and `span`.
fn jittered(span: Duration, random: u64) -> Duration {
    let half = span / 2;
    let nanos = u64::try_from(half.as_nanos()).unwrap_or(u64::MAX).saturating_add(1);
    half + Duration::from_nanos(random % nanos)
}

/// The standard library seeds each hasher at random.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jitter_stays_between_half_and_the_whole_span() {
        let span = Duration::from_millis(10);
        for random in [0, 1, 4_999_999, 5_000_000, 5_000_001, u64::MAX] {
            let pause = jittered(span, random);
            assert!(pause >= span / 2 && pause <= span, "{pause:?}");
        }
        assert_ne!(random(), random());
    }

    #[test]
    fn pauses_grow_and_end_at_the_deadline() {
        let start = Instant::now();
        let mut pace = Pace { deadline: start + Duration::from_secs(10), failures: 0 };
        let (mut now, mut pauses) = (start, 0);
        while let Some(until) = pace.next(now) {
            assert!(until > now);
            (now, pauses) = (until, pauses + 1);
        }
        assert!(now < pace.deadline);
        assert!((12..=40).contains(&pauses), "{pauses} pauses in ten seconds");
        assert!(Pace::new(Duration::MAX).deadline > start);
    }
}
