//! How often something happens: events in the second that has the most of them, of the current one and
//! the one before. Seconds begin with an event.

use orthodrome_core::time::{Duration, Time};

/// Counts events of the current second.
#[derive(Debug, Default)]
pub(super) struct PerSecond {
    /// The current second began then.
    second: Time,
    /// Events in it, and in the second before.
    now: u32,
    before: u32,
}

impl PerSecond {
    /// So many more have happened.
    pub(super) fn add(&mut self, many: u32, now: Time) {
        let since = now.since(self.second);
        if since >= SECOND {
            self.before = if since < SECOND * 2 { self.now } else { 0 };
            (self.second, self.now) = (now, 0);
        }
        self.now = self.now.saturating_add(many);
    }

    /// The most in one second: the current one, or the one before.
    pub(super) fn most(&self) -> u32 {
        self.now.max(self.before)
    }
}

/// What it counts over.
pub(super) const SECOND: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_before_counts_until_the_next_one_has_passed() {
        let mut rate = PerSecond::default();
        let millis = Time::from_millis;
        rate.add(3, millis(0));
        rate.add(2, millis(900));
        assert_eq!(rate.most(), 5);
        rate.add(1, millis(1_100));
        assert_eq!(rate.most(), 5);
        rate.add(1, millis(2_200));
        assert_eq!(rate.most(), 1);
        rate.add(1, millis(9_000));
        assert_eq!(rate.most(), 1);
    }
}
