//! Members of a group compare the effects of their log entries in the background. A member whose
//! effects differ from the majority's stops.
//!
//! The log is divided into *spans* of a fixed number of entries. A member computes a sum over the
//! effects of each entry of a span, as reported by its embedder. The leader sends the sum of one
//! span with its heartbeats, members answer with theirs, and the leader judges: if most answers
//! differ from the leader's sum, the leader stops; otherwise the members that differ stop. Members
//! may be at different positions. A member does not judge a span if it obtained a part of it from
//! elsewhere, in a snapshot or from a checkpoint.

use std::collections::VecDeque;
use std::fmt;

use orthodrome_core::digest::Digest;
use orthodrome_core::{NodeId, Time, Wire};

use super::replica::{Replica, Role};
use super::{Index, Replicated};

/// The number of spans remembered. A follower that lags further behind is not compared.
const SPANS_KEPT: usize = 16;

/// The sum of one span at one member.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Wire)]
pub struct Sum {
    /// The last entry of the span.
    pub through: Index,
    /// The digest of the span's effects. None if this member obtained a part of the span from
    /// elsewhere.
    pub digest: Option<u64>,
    /// True if the leader has the answers of all voters that it is in contact with, and most of
    /// them agree with it. A member with another sum stops.
    pub is_final: bool,
}

impl fmt::Display for Sum {
    /// `sum of ..1024: 0123456789abcdef final`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sum of ..{}", self.through)?;
        match self.digest {
            Some(digest) => write!(f, ": {digest:016x}")?,
            None => f.write_str(" unknown")?,
        }
        f.write_str(if self.is_final { " final" } else { "" })
    }
}

/// The sums of this member.
#[derive(Debug)]
pub(super) struct Checks {
    /// The number of entries in a span.
    length: u64,
    /// The entry after the last one added.
    next: Index,
    /// The digest of the current span, if all its entries so far were added.
    open: Option<Digest>,
    /// The digests of complete spans, by their last entries; the latest last.
    closed: VecDeque<(Index, u64)>,
}

impl Checks {
    /// No entries yet. Spans have `length` entries.
    pub(super) fn new(length: u64) -> Self {
        Self { length: length.max(1), next: Index(1), open: None, closed: VecDeque::new() }
    }

    /// The entry at `index` has been applied with this effect.
    pub(super) fn add(&mut self, index: Index, effect: u64) {
        if index.previous().0.is_multiple_of(self.length) {
            self.open = Some(Digest::default());
        } else if index != self.next {
            self.open = None;
        }
        self.next = index.next();
        if let Some(digest) = &mut self.open {
            digest.add(effect);
        }
        if index.0.is_multiple_of(self.length)
            && let Some(digest) = self.open.take()
        {
            self.closed.push_back((index, digest.value()));
            if self.closed.len() > SPANS_KEPT {
                self.closed.pop_front();
            }
        }
    }

    fn of(&self, through: Index) -> Option<u64> {
        self.closed.iter().find(|(last, _)| *last == through).map(|&(_, digest)| digest)
    }

    /// The sum of the span that ends at `through`; none if this member has not applied all of it.
    pub(super) fn answer(&self, through: Index) -> Option<Sum> {
        let digest = self.of(through);
        (through < self.next).then_some(Sum { through, digest, is_final: false })
    }
}

/// Two members have different sums.
struct Difference {
    through: Index,
    length: u64,
    own: u64,
    other: (NodeId, u64),
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { through, length, own, other: (node, theirs) } = self;
        let first = Index(through.0 - length).next();
        write!(
            f,
            "entries {first} to {through} of the log came to different results: their digest is {own:016x} \
             here and {theirs:016x} at {node}, and no majority of the members heard of has the same as this \
             one. One of the copies is wrong, so this server stops. Keep its data directory to find the \
             cause, and let another server take its place"
        )
    }
}

impl<R: Replicated> Replica<R> {
    /// The embedder has applied the entry at `index`, and `effect` is a digest of the changes,
    /// which depends only on the entries up to this one. The embedder must call this in order, for
    /// every entry or for none.
    ///
    /// # Panics
    /// Not here. Later, when a message shows that this replica's state is wrong.
    pub fn came_to(&mut self, index: Index, effect: u64) {
        self.checks.add(index, effect);
    }

    fn stop(&self, through: Index, own: u64, other: (NodeId, u64)) -> ! {
        let length = self.checks.length;
        panic!("{self}: {}", Difference { through, length, own, other });
    }

    /// A leader compares one span after the other. Returns the sum to send for the current one.
    pub(super) fn compare(&mut self, now: Time) -> Option<Sum> {
        let Role::Leader(lead) = &mut self.role else { return None };
        let under_way = lead.comparing.filter(|through| self.checks.of(*through).is_some());
        let latest = self.checks.closed.back().map(|&(through, _)| through);
        let through = under_way.or(latest.filter(|latest| *latest > lead.compared))?;
        let own = self.checks.of(through)?;
        lead.comparing = Some(through);
        let (mut same, mut silent, mut other, mut others) = (1, 0, None, 0);
        for progress in lead.progress.iter().filter(|of| of.is_live(now, &self.config)) {
            let is_voter = self.log.members().is_voter(progress.node);
            match progress.sum.filter(|sum| sum.through == through) {
                None => silent += usize::from(is_voter),
                Some(Sum { digest: None, .. }) => {}
                Some(Sum { digest: Some(theirs), .. }) if theirs == own => {
                    same += usize::from(is_voter);
                }
                Some(Sum { digest: Some(theirs), .. }) => {
                    others += usize::from(is_voter);
                    other = Some((progress.node, theirs));
                }
            }
        }
        let is_final = silent == 0;
        match other.filter(|_| is_final) {
            Some(other) if others > same => self.stop(through, own, other),
            None if is_final => {
                lead.compared = through;
                lead.comparing = None;
                None
            }
            Some(_) | None => Some(Sum { through, digest: Some(own), is_final }),
        }
    }

    /// Processes a member's sum.
    pub(super) fn on_sum(&mut self, from: NodeId, sum: Option<Sum>) {
        if let Role::Leader(lead) = &mut self.role
            && let Some(progress) = lead.of(from)
        {
            progress.sum = sum.or(progress.sum);
        }
    }

    /// Processes a leader's sum, and returns the answer.
    pub(super) fn answer_sum(&self, leader: NodeId, sum: Option<Sum>) -> Option<Sum> {
        let Sum { through, digest, is_final } = sum?;
        let answer = self.checks.answer(through)?;
        if let (true, Some(own), Some(theirs)) = (is_final, answer.digest, digest)
            && own != theirs
        {
            self.stop(through, own, (leader, theirs));
        }
        Some(answer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A member that has applied these entries; its effect of the entry `differs` is different.
    fn checks(entries: std::ops::RangeInclusive<u64>, differs: u64) -> Checks {
        let mut checks = Checks::new(4);
        for index in entries {
            checks.add(Index(index), if index == differs { 99 } else { index });
        }
        checks
    }

    #[test]
    fn members_that_have_come_differently_far_have_equal_sums_of_equal_spans() {
        let (one, other) = (checks(1..=22, 0), checks(1..=13, 0));
        let lasts: Vec<u64> = one.closed.iter().map(|(last, _)| last.0).collect();
        assert_eq!(lasts, [4, 8, 12, 16, 20]);
        for last in [4, 8, 12] {
            assert!(one.of(Index(last)).is_some());
            assert_eq!(one.answer(Index(last)), other.answer(Index(last)));
        }
        assert_eq!(other.answer(Index(16)), None, "it has not come so far");
        let wrong = checks(1..=22, 6);
        let differ = |last: u64| wrong.of(Index(last)) != one.of(Index(last));
        assert_eq!([4, 8, 12].map(differ), [false, true, false]);
    }

    #[test]
    fn spans_that_were_taken_from_elsewhere_in_part_are_not_judged() {
        let mut late = checks(6..=9, 0);
        assert_eq!(late.answer(Index(8)).map(|sum| sum.digest), Some(None));
        // Entries 10 to 14 came in a snapshot.
        for index in 15..=20 {
            late.add(Index(index), index);
        }
        for last in [12, 16] {
            assert_eq!(late.answer(Index(last)).map(|sum| sum.digest), Some(None), "{last}");
        }
        assert_eq!(late.of(Index(20)), checks(1..=20, 0).of(Index(20)));
    }

    #[test]
    fn a_number_of_spans_is_remembered() {
        let checks = checks(1..=1_000, 0);
        assert_eq!(checks.closed.len(), SPANS_KEPT);
        assert_eq!(checks.answer(Index(4)).map(|sum| sum.digest), Some(None));
    }
}
