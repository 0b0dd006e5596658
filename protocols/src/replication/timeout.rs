//! How long a replica waits for a leader or for votes, or a leader for answers. The time-out grows
//! after a replica has given up too early more than once. Links that lose packets deliver a burst
//! of heartbeats late, and a healthy leader must not be replaced for that repeatedly.
//!
//! Leases do not depend on this: voters protect a leader for at least
//! [`super::Config::election_timeout`].

use orthodrome_core::{Duration, Time};

use super::Term;

/// No time-out grows beyond this, unless it starts there: a leader that has really failed must be
/// replaced on bad links, too.
const LONGEST: Duration = Duration::from_secs(5);

/// After this time without anything late, the time-out is halved, or one mistake is forgotten.
const CALM: Duration = Duration::from_secs(30);

/// The number of mistakes that change nothing: a pause of this node or of its leader looks like
/// one.
const FREE_MISTAKES: u32 = 1;

/// The election time-out of one replica.
#[derive(Debug)]
pub(super) struct Timeout {
    /// The time-out as configured.
    least: Duration,
    /// The time-out now.
    current: Duration,
    /// Mistakes since the last calm period, while the time-out is as configured.
    mistakes: u32,
    /// The last term whose leader or election this node gave up.
    given_up: Option<Term>,
    /// Nothing has been late since this time.
    calm_since: Time,
}

impl Timeout {
    pub(super) fn new(least: Duration, now: Time) -> Self {
        Self { least, current: least, mistakes: 0, given_up: None, calm_since: now }
    }

    /// The least time to wait.
    pub(super) fn current(&self) -> Duration {
        self.current
    }

    /// Whether messages have been so late that the least time is too short.
    pub(super) fn is_longer(&self) -> bool {
        self.current > self.least
    }

    /// This node stops waiting: for the leader of `term`, for votes in it, or as its leader for
    /// answers.
    pub(super) fn give_up(&mut self, term: Term) {
        self.given_up = Some(term);
    }

    /// The message that this node waited for in `term` has arrived, late or not.
    pub(super) fn hear_in(&mut self, term: Term, now: Time) {
        if self.given_up != Some(term) {
            return;
        }
        self.given_up = None;
        self.calm_since = now;
        if self.mistakes < FREE_MISTAKES {
            self.mistakes += 1;
        } else {
            self.current = (self.current * 2).min(LONGEST.max(self.least));
        }
    }

    /// A message arrived `gap` after the previous one. It counts as late if half of the time-out
    /// would have been at risk.
    pub(super) fn hear_after(&mut self, gap: Duration, now: Time) {
        let shorter = (self.current / 2).max(self.least);
        if gap * 2 > shorter {
            self.calm_since = now;
        } else if now.since(self.calm_since) >= CALM {
            self.calm_since = now;
            if self.current > self.least {
                self.current = shorter;
            } else {
                self.mistakes = 0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEAST: Duration = Duration::from_millis(100);

    fn at(millis: u64) -> Time {
        Time::from_millis(millis)
    }

    /// Gives up too early in each of these terms.
    fn mistakes(timeout: &mut Timeout, terms: std::ops::Range<u64>) {
        for term in terms {
            timeout.give_up(Term(term));
            timeout.hear_in(Term(term), at(0));
        }
    }

    #[test]
    fn one_mistake_changes_nothing_and_more_double_the_time_out_up_to_a_bound() {
        let mut timeout = Timeout::new(LEAST, at(0));
        mistakes(&mut timeout, 1..2);
        assert_eq!(timeout.current(), LEAST, "a pause looks the same");
        mistakes(&mut timeout, 2..4);
        assert_eq!(timeout.current(), LEAST * 4);
        mistakes(&mut timeout, 4..100);
        assert_eq!(timeout.current(), LONGEST);
        let mut timeout = Timeout::new(LONGEST * 2, at(0));
        mistakes(&mut timeout, 1..100);
        assert_eq!(timeout.current(), LONGEST * 2);
    }

    #[test]
    fn giving_up_once_is_one_mistake_and_giving_up_rightly_is_none() {
        let mut timeout = Timeout::new(LEAST, at(0));
        for term in 1..10 {
            // This term's leader never sends another message, but the leaders of an earlier term
            // and of the next do.
            timeout.give_up(Term(term));
            timeout.hear_in(Term(term - 1), at(0));
            timeout.hear_in(Term(term + 1), at(0));
        }
        assert_eq!((timeout.current(), timeout.mistakes), (LEAST, 0));
        for _ in 0..10 {
            timeout.hear_in(Term(9), at(0));
        }
        assert_eq!((timeout.current(), timeout.mistakes), (LEAST, 1));
    }

    #[test]
    fn time_out_comes_down_slowly_while_nothing_is_late() {
        let mut timeout = Timeout::new(LEAST, at(0));
        mistakes(&mut timeout, 1..5);
        assert_eq!(timeout.current(), LEAST * 8);
        let hear = |timeout: &mut Timeout, seconds: std::ops::Range<u64>, gap| {
            for second in seconds {
                timeout.hear_after(Duration::from_millis(gap), at(second * 1_000));
            }
        };
        // With half the time-out of 800 ms, 250 ms are a risk.
        hear(&mut timeout, 0..60, 250);
        assert_eq!(timeout.current(), LEAST * 8);
        hear(&mut timeout, 60..89, 10);
        assert_eq!(timeout.current(), LEAST * 8);
        hear(&mut timeout, 89..90, 10);
        assert_eq!(timeout.current(), LEAST * 4);
        hear(&mut timeout, 90..150, 10);
        assert_eq!((timeout.current(), timeout.mistakes), (LEAST, 1));
        hear(&mut timeout, 150..180, 10);
        assert_eq!(timeout.mistakes, 0);
    }
}
