//! Whom a coordinator lets in, so that it goes on at its capacity however much is submitted.
//!
//! A server that takes more than it, or its peers, can do makes everything wait. Callers then ask
//! again and inquire, which makes more to do: such a server would do little else, and for as long as
//! so much is submitted. So a coordinator has a *window* of transactions under way. It shrinks while some
//! transaction takes too long to be stored, which needs no more than two round trips on servers that keep up,
//! and grows with each that ends. What does not fit is declined at once.

use orthodrome_core::time::{Duration, Time};

/// The window is never smaller.
const WINDOW_MIN: usize = 64;

/// What a coordinator goes by, in all its lives.
#[derive(Debug)]
pub(super) struct Admission {
    /// So many transactions may be under way.
    window: usize,
    /// The window when it shrank last: up to twice that it grows fast.
    known: usize,
    /// Transactions that ended since it grew.
    ended: usize,
    shrunk_at: Option<Time>,
}

impl Admission {
    /// Any number is let in until something takes too long.
    pub(super) fn new() -> Self {
        Self { window: usize::MAX, known: usize::MAX, ended: 0, shrunk_at: None }
    }

    /// True if one more fits beside `under_way` others, of which the oldest that is not stored yet began then.
    /// It takes too long after `patience`.
    pub(super) fn admits(
        &mut self,
        under_way: usize,
        oldest: Option<Time>,
        patience: Duration,
        now: Time,
    ) -> bool {
        let is_late = oldest.is_some_and(|begun| now.since(begun) >= patience);
        // What was let in before it shrank needs as long to show that it has.
        let is_due = self.shrunk_at.is_none_or(|at| now.since(at) >= patience);
        if is_late && is_due {
            self.window = (self.window.min(under_way) / 4 * 3).max(WINDOW_MIN);
            (self.known, self.ended, self.shrunk_at) = (self.window, 0, Some(now));
        }
        under_way < self.window
    }

    /// A transaction has ended that was let in.
    pub(super) fn end(&mut self) {
        if self.window == usize::MAX {
            return;
        }
        self.ended += 1;
        // Twice as many for each round of transactions at first, then one more for each.
        if self.window < self.known * 2 || self.ended >= self.window {
            self.window = self.window.saturating_add(1);
            self.ended = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_millis(500);

    fn at(ms: u64) -> Time {
        Time::from_millis(ms)
    }

    #[test]
    fn the_window_shrinks_while_storing_takes_long_and_grows_again() {
        let mut admission = Admission::new();
        assert!(admission.admits(1_000_000, Some(at(0)), PATIENCE, at(499)), "nothing is late");
        assert!(!admission.admits(10_000, Some(at(0)), PATIENCE, at(500)));
        // Once for each time that it needs to have an effect.
        assert!(admission.admits(7_499, Some(at(0)), PATIENCE, at(501)));
        assert!(!admission.admits(7_500, Some(at(0)), PATIENCE, at(501)));
        assert!(!admission.admits(7_499, Some(at(0)), PATIENCE, at(1_000)));
        for late in 2..100 {
            admission.admits(10, Some(at(0)), PATIENCE, at(late * 1_000));
        }
        assert!(admission.admits(WINDOW_MIN - 1, Some(at(0)), PATIENCE, at(100_001)));
        assert!(!admission.admits(WINDOW_MIN, Some(at(0)), PATIENCE, at(100_001)));
        for _ in 0..WINDOW_MIN {
            admission.end();
        }
        assert!(admission.admits(2 * WINDOW_MIN - 1, None, PATIENCE, at(100_002)), "twice as many");
        for _ in 0..2 * WINDOW_MIN {
            admission.end();
        }
        assert!(admission.admits(2 * WINDOW_MIN, None, PATIENCE, at(100_002)), "one more");
        assert!(!admission.admits(2 * WINDOW_MIN + 1, None, PATIENCE, at(100_002)));
    }
}
