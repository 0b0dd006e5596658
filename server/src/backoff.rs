//! Pauses between the attempts at a transaction that this node runs.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher as _, Hasher as _};
use std::time::Duration;

/// The next pauses: twice as long each time, up to a bound, minus a random part of up to a half, so that
/// two nodes that were in each other's way do not retry at the same time.
#[derive(Debug)]
pub(crate) struct Backoff {
    next: Duration,
    max: Duration,
}

impl Backoff {
    /// Pauses from `first` to `max`.
    pub(crate) fn new(first: Duration, max: Duration) -> Self {
        Self { next: first, max }
    }

    /// The length of the next pause.
    pub(crate) fn pause(&mut self) -> Duration {
        let span = self.next;
        self.next = (span * 2).min(self.max);
        let half = span / 2;
        let nanos = u64::try_from(half.as_nanos()).unwrap_or(u64::MAX).saturating_add(1);
        // The standard library seeds each hasher at random.
        half + Duration::from_nanos(RandomState::new().build_hasher().finish() % nanos)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_their_bound_less_a_half_at_most() {
        let millis = Duration::from_millis;
        let mut backoff = Backoff::new(millis(4), millis(10));
        for span in [4, 8, 10, 10].map(millis) {
            let pause = backoff.pause();
            assert!(pause >= span / 2 && pause <= span, "{pause:?} of {span:?}");
        }
    }
}
