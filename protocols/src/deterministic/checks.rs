//! Servers with the same data compare the effects of stream entries in the background. A server
//! whose effects differ from the majority's stops.
//!
//! A stream is divided into *spans* of a fixed number of entries. For each span, a server sums up
//! the results of its transactions: their outcomes, reads and writes. Once all transactions of a
//! span have run, the sum follows from the chosen entries, in whatever order they ran. So two
//! servers can be compared that are at different positions, and a wrong value is found when the
//! next transaction reads it. A server does not judge spans of which it obtained a part from
//! elsewhere, in another server's state or from a checkpoint.

use std::fmt;

use orthodrome_core::Wire;
use orthodrome_core::id::{NodeId, PartitionId};
use orthodrome_core::ordered::{OrdMap, OrdSet};

use crate::replication::Index;

/// The number of spans of each stream that are remembered, of this server and of others.
const SPANS_MAX: u64 = 256;
/// The most sums in one message.
const TOLD_MAX: usize = 256;

/// Consecutive entries of a stream.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Wire)]
pub struct Span {
    /// The stream.
    pub stream: PartitionId,
    /// The first entry.
    pub first: Index,
    /// The last entry.
    pub last: Index,
}

/// The sums of this server and of others.
#[derive(Debug)]
pub struct Checks {
    /// The number of entries in a span.
    length: u64,
    /// Partial sums of spans that have not run completely.
    open: OrdMap<Span, u64>,
    /// Everything up to this entry was obtained from elsewhere.
    since: OrdMap<PartitionId, Index>,
    /// The entry up to which all spans are complete.
    closed: OrdMap<PartitionId, Index>,
    /// Sums of complete spans.
    own: OrdMap<Span, u64>,
    /// Complete spans that have not been sent to others.
    news: OrdSet<Span>,
    /// The sums of other servers.
    theirs: OrdMap<Span, OrdMap<NodeId, u64>>,
    /// Spans in which another server differed at the last comparison.
    doubted: OrdSet<Span>,
}

/// Two servers differ.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Difference {
    /// The span.
    pub span: Span,
    /// This server's sum.
    pub own: u64,
    /// The other server, and its sum.
    pub other: (NodeId, u64),
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { span: Span { stream, first, last }, own, other: (node, theirs) } = self;
        write!(
            f,
            "entries {first} to {last} of stream {stream} came to different results: their digest is \
             {own:016x} here and {theirs:016x} at {node}, and no majority of the servers heard of has the \
             same as this one. One of the copies is wrong, so this server stops. Keep its data directory to \
             find the cause, and let a new server take its place"
        )
    }
}

impl Checks {
    /// Nothing has run yet. Spans have `length` entries.
    #[must_use]
    pub fn new(length: u64) -> Self {
        Self {
            length: length.max(1),
            open: OrdMap::new(),
            since: OrdMap::new(),
            closed: OrdMap::new(),
            own: OrdMap::new(),
            news: OrdSet::new(),
            theirs: OrdMap::new(),
            doubted: OrdSet::new(),
        }
    }

    /// Everything of `stream` up to `index` was obtained from elsewhere.
    pub fn begin(&mut self, stream: PartitionId, index: Index) {
        let since = self.since.entry(stream).or_default();
        *since = (*since).max(index);
        let since = *since;
        self.open.retain(|span, _| span.stream != stream || span.first > since);
    }

    /// The span with this number.
    fn span(&self, stream: PartitionId, number: u64) -> Span {
        let (first, last) = (number * self.length + 1, (number + 1) * self.length);
        Span { stream, first: Index(first), last: Index(last) }
    }

    fn since(&self, stream: PartitionId) -> Index {
        self.since.get(&stream).copied().unwrap_or_default()
    }

    /// A transaction of this entry has run, with this result.
    pub fn add(&mut self, stream: PartitionId, index: Index, digest: u64) {
        let span = self.span(stream, index.0.saturating_sub(1) / self.length);
        if span.first > self.since(stream) {
            let sum = self.open.entry(span).or_default();
            *sum = sum.wrapping_add(digest);
        }
    }

    /// True if everything of `stream` up to `index` has run, or was obtained from elsewhere.
    #[must_use]
    pub fn is_closed(&self, stream: PartitionId, index: Index) -> bool {
        let closed = self.closed.get(&stream).copied().unwrap_or_default();
        index <= closed.max(self.since(stream))
    }

    /// Everything of `stream` up to `index` has run.
    pub fn close(&mut self, stream: PartitionId, index: Index) {
        let closed = self.closed.get(&stream).copied().unwrap_or_default();
        let from = self.since(stream).max(closed).0.div_ceil(self.length);
        let through = index.0 / self.length;
        for number in from..through {
            let span = self.span(stream, number);
            let sum = self.open.remove(&span).unwrap_or_default();
            self.own.insert(span, sum);
            self.news.insert(span);
            self.closed.insert(stream, span.last);
        }
        let old = self.spans_before(stream, through.saturating_sub(SPANS_MAX));
        self.own.retain(|span, _| !old.contains(span));
        self.news.retain(|span| !old.contains(span));
    }

    /// The spans of `stream` with smaller numbers.
    fn spans_before(&self, stream: PartitionId, number: u64) -> std::ops::Range<Span> {
        let none = Span { stream, first: Index(0), last: Index(0) };
        none..self.span(stream, number)
    }

    /// Sums that have not been sent to others.
    pub fn take_news(&mut self) -> Vec<(Span, u64)> {
        let mut told = Vec::new();
        while told.len() < TOLD_MAX
            && let Some(span) = self.news.pop_last()
        {
            told.extend(self.own.get(&span).map(|&digest| (span, digest)));
        }
        told.reverse();
        told
    }

    /// Stores the sums of another server.
    pub fn hear(&mut self, from: NodeId, digests: Vec<(Span, u64)>) {
        for (span, digest) in digests {
            self.theirs.entry(span).or_default().insert(from, digest);
            let number = (span.last.0 / self.length).saturating_sub(SPANS_MAX);
            let old = self.spans_before(span.stream, number);
            self.theirs.retain(|span, _| !old.contains(span));
        }
    }

    /// Returns a difference if this server's sum differs from others, and most of the known servers
    /// do not agree with it. If one server differs, the others have until the next comparison to
    /// send their sums. So of three servers, the two correct ones continue.
    pub fn judge(&mut self) -> Option<Difference> {
        let doubted = std::mem::take(&mut self.doubted);
        for (&span, theirs) in &self.theirs {
            let Some(&own) = self.own.get(&span) else { continue };
            let differing = theirs.iter().filter(|(_, digest)| **digest != own);
            let agreeing = 1 + theirs.len() - differing.clone().count();
            let Some((&node, &digest)) = differing.clone().next() else { continue };
            if doubted.contains(&span) && differing.count() >= agreeing {
                return Some(Difference { span, own, other: (node, digest) });
            }
            self.doubted.insert(span);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const P: PartitionId = PartitionId(3);

    /// A server that has run 20 entries, one of them with this result.
    fn checks(at: u64, digest: u64) -> Checks {
        let mut checks = Checks::new(4);
        for index in 1..=20 {
            checks.add(P, Index(index), if index == at { digest } else { index });
        }
        checks.close(P, Index(19));
        checks
    }

    fn tell(from: u32, news: &[(Span, u64)], to: &mut Checks) {
        to.hear(NodeId(from), news.to_vec());
    }

    #[test]
    fn servers_that_have_come_differently_far_agree_on_what_both_have_run() {
        let (mut one, mut other) = (checks(1, 1), Checks::new(4));
        let news = one.take_news();
        assert_eq!(news.len(), 4, "the last span is not closed");
        assert!(one.take_news().is_empty());
        tell(1, &news, &mut other);
        for index in [6, 5, 4, 2, 3, 1, 8, 7] {
            other.add(P, Index(index), index);
        }
        other.close(P, Index(8));
        for _ in 0..3 {
            assert_eq!(other.judge(), None);
        }
        assert_eq!(other.take_news(), news[..2]);
    }

    #[test]
    fn the_one_of_three_that_differs_stops() {
        let mut all = [checks(6, 6), checks(6, 66), checks(6, 6)];
        let news = all.each_mut().map(Checks::take_news);
        for (at, checks) in all.iter_mut().enumerate() {
            for (from, news) in news.iter().enumerate().filter(|(from, _)| *from != at) {
                tell(u32::try_from(from).unwrap(), news, checks);
            }
            assert_eq!(checks.judge(), None, "others may still say what they came to");
        }
        let [one, two, three] = all.each_mut().map(Checks::judge);
        assert_eq!((one, three), (None, None));
        let difference = two.unwrap();
        assert_eq!((difference.span.first, difference.span.last), (Index(5), Index(8)));
        assert_eq!(
            (difference.own, difference.other),
            (66 + 5 + 7 + 8, (NodeId(0), 5 + 6 + 7 + 8))
        );
        let text = difference.to_string();
        assert!(
            text.contains("p3") && text.contains("n0") && text.contains("0000000000000056"),
            "{text}"
        );
    }

    #[test]
    fn of_two_that_differ_both_stop() {
        let mut all = [checks(6, 6), checks(6, 66)];
        let [one, two] = all.each_mut().map(Checks::take_news);
        tell(2, &two, &mut all[0]);
        tell(1, &one, &mut all[1]);
        assert_eq!(all.each_mut().map(|checks| checks.judge().is_some()), [false, false]);
        assert_eq!(all.each_mut().map(|checks| checks.judge().is_some()), [true, true]);
    }

    #[test]
    fn spans_obtained_from_elsewhere_are_not_judged() {
        let mut other = Checks::new(4);
        other.add(P, Index(3), 99);
        other.begin(P, Index(6));
        for index in 7..=20 {
            other.add(P, Index(index), index);
        }
        other.close(P, Index(20));
        let spans: Vec<u64> = other.take_news().iter().map(|(span, _)| span.first.0).collect();
        assert_eq!(spans, [9, 13, 17]);
        tell(1, &checks(1, 1).take_news(), &mut other);
        for _ in 0..3 {
            assert_eq!(other.judge(), None);
        }
    }

    #[test]
    fn no_more_is_remembered_than_a_number_of_spans() {
        let mut checks = Checks::new(4);
        checks.close(P, Index(100_000));
        assert_eq!(checks.own.len() as u64, SPANS_MAX);
        assert_eq!(checks.take_news().len(), TOLD_MAX);
        let mut other = Checks::new(4);
        for number in 0..3_000 {
            let span = checks.span(P, number);
            tell(1, &[(span, 1)], &mut other);
        }
        assert!(other.theirs.len() as u64 <= SPANS_MAX + 1);
    }
}
