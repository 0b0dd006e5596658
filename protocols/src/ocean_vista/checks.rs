//! Replicas of a partition compare digests of their settled versions in the background. A node
//! whose replica differs from the others stops.
//!
//! Version numbers are divided into *spans* of time. For each span, a replica adds up what it has
//! put into its store. Below its replica watermark every replica has every version, so once all
//! versions of a span are settled, the sum is the same everywhere. A replica does not compare spans
//! in which it settled nothing itself, because it copied a peer's versions or started from a
//! checkpoint.

use orthodrome_core::Wire;
use orthodrome_core::id::{NodeId, PartitionId};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::time::{Duration, Timestamp, nanos};

use crate::deterministic::checks::{self, Span};
use crate::replication::Index;

/// The digest of one replica's span of versions.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Wire)]
pub struct Sum {
    /// The partition.
    pub partition: PartitionId,
    /// The number of the span.
    pub number: u64,
    /// The sum of the hashes of its versions.
    pub digest: u64,
}

/// Maximum number of transactions of one partition that are remembered until their spans are
/// closed, some 30 MiB. Beyond it, earlier spans are not compared.
const ADDED_MAX: usize = 1 << 20;

/// The digests of a node's replicas and of other replicas.
#[derive(Debug)]
pub(super) struct Checks {
    /// Length of a span in nanoseconds, equal at all servers.
    length: u64,
    sums: checks::Checks,
    /// The versions that were added in open spans. A transaction that a server takes from a peer
    /// for one partition puts its versions of another partition into the store again, which changes
    /// nothing there.
    added: OrdMap<PartitionId, OrdSet<Timestamp>>,
    /// See [`ADDED_MAX`].
    added_max: usize,
}

impl Checks {
    /// Starts without any settled version, with spans of this length.
    pub(super) fn new(span: Duration) -> Self {
        let length = nanos(span).max(1);
        Self { length, sums: checks::Checks::new(1), added: OrdMap::new(), added_max: ADDED_MAX }
    }

    fn index(&self, ts: Timestamp) -> Index {
        Index(ts.0 / self.length + 1)
    }

    /// Notes that all versions of a partition up to this one come from elsewhere.
    pub(super) fn begin(&mut self, partition: PartitionId, upto: Timestamp) {
        let index = self.index(upto);
        self.sums.begin(partition, index);
    }

    /// Notes that a transaction's versions were put into the store, with this digest; possibly
    /// repeatedly.
    pub(super) fn add(&mut self, partition: PartitionId, ts: Timestamp, digest: u64) {
        let index = self.index(ts);
        if self.sums.is_closed(partition, index) {
            return;
        }
        let added = self.added.entry(partition).or_default();
        if added.len() >= self.added_max {
            let latest = added.last().map_or(ts, |last| ts.max(*last));
            added.clear();
            self.begin(partition, latest);
        } else if added.insert(ts) {
            self.sums.add(partition, index, digest);
        }
    }

    /// Notes that all versions of a partition below this one are settled.
    pub(super) fn close(&mut self, partition: PartitionId, below: Timestamp) {
        let Index(open) = self.index(below);
        self.sums.close(partition, Index(open.saturating_sub(1)));
        let first = Timestamp(open.saturating_sub(1).saturating_mul(self.length));
        if let Some(added) = self.added.get_mut(&partition) {
            *added = added.split_off(&first);
        }
    }

    /// Takes the digests that have not been sent to other replicas, by partition.
    pub(super) fn take_news(&mut self) -> OrdMap<PartitionId, Vec<Sum>> {
        let mut news: OrdMap<PartitionId, Vec<Sum>> = OrdMap::new();
        for (Span { stream: partition, first: Index(number), .. }, digest) in self.sums.take_news()
        {
            news.entry(partition).or_default().push(Sum { partition, number, digest });
        }
        news
    }

    /// Handles the digests of another replica.
    pub(super) fn hear(&mut self, from: NodeId, sums: Vec<Sum>) {
        let span = |sum: Sum| {
            let at = Index(sum.number);
            (Span { stream: sum.partition, first: at, last: at }, sum.digest)
        };
        self.sums.hear(from, sums.into_iter().map(span).collect());
    }

    /// Returns why this node must stop, if one of its replicas differs from the others.
    pub(super) fn judge(&mut self) -> Option<String> {
        let checks::Difference { span, own, other: (node, theirs) } = self.sums.judge()?;
        let number = span.first.0;
        let from = Timestamp(number.saturating_sub(1).saturating_mul(self.length));
        let to = Timestamp(number.saturating_mul(self.length));
        Some(format!(
            "versions from {from} to {to} of partition {} came to different results: their digest is \
             {own:016x} here and {theirs:016x} at {node}, and no majority of the replicas heard of has the \
             same as this one. One of them is wrong, so this server stops. Keep its data directory to find \
             the cause, and let a new server take its place",
            span.stream
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const P: PartitionId = PartitionId(2);
    const SECOND: u64 = 1_000_000_000;

    /// A replica that settled one version in each of ten seconds; `fifth` is the digest of the
    /// fifth.
    fn checks(fifth: u64) -> Checks {
        let mut checks = Checks::new(Duration::from_secs(1));
        checks.begin(P, Timestamp(100 * SECOND - 1));
        for second in 100..110 {
            let digest = if second == 104 { fifth } else { second };
            checks.add(P, Timestamp(second * SECOND + 7), digest);
        }
        checks.close(P, Timestamp(110 * SECOND + 3));
        checks
    }

    #[test]
    fn the_replica_of_three_that_differs_stops() {
        let mut all = [checks(4), checks(4), checks(5)];
        let news = all.each_mut().map(Checks::take_news);
        assert!(news.iter().all(|news| news[&P].len() == 10), "{news:?}");
        for (at, checks) in all.iter_mut().enumerate() {
            for (from, news) in (0..).zip(&news).filter(|(from, _)| *from as usize != at) {
                checks.hear(NodeId(from), news[&P].clone());
            }
            assert_eq!(checks.judge(), None, "others may still say what they came to");
        }
        let [one, two, three] = all.each_mut().map(Checks::judge);
        assert_eq!((one, two), (None, None));
        let text = three.unwrap();
        assert!(text.contains("p2") && text.contains("n0"), "{text}");
        assert!(text.contains("from @104000000000 to @105000000000"), "{text}");
    }

    #[test]
    fn what_is_remembered_of_open_spans_is_bounded() {
        let (mut bounded, mut other) = (checks(104), checks(104));
        bounded.added_max = 3;
        // Versions of two spans; the bound is exceeded in the second.
        for at in [1, 2, 3, 4, 5].map(|n| Timestamp(110 * SECOND + n * SECOND / 3)) {
            bounded.add(P, at, 7);
            other.add(P, at, 7);
            assert!(bounded.added[&P].len() <= 3);
        }
        let ten = bounded.take_news()[&P].len();
        for checks in [&mut bounded, &mut other] {
            checks.add(P, Timestamp(112 * SECOND + 5), 8);
            checks.close(P, Timestamp(113 * SECOND));
        }
        let compared = |checks: &mut Checks| -> Vec<u64> {
            checks.take_news()[&P].iter().map(|sum| sum.number).collect()
        };
        assert_eq!(
            (ten, compared(&mut bounded)),
            (10, vec![113]),
            "earlier spans are not compared"
        );
        assert!(compared(&mut other).ends_with(&[111, 112, 113]));
    }

    #[test]
    fn versions_that_are_put_again_count_once() {
        let (mut once, mut again) = (checks(104), checks(104));
        for checks in [&mut once, &mut again] {
            checks.add(P, Timestamp(110 * SECOND + 9), 7);
        }
        // One version of an open span, and one of a closed span.
        again.add(P, Timestamp(110 * SECOND + 9), 7);
        again.add(P, Timestamp(104 * SECOND + 7), 104);
        let news = [&mut once, &mut again].map(|checks| {
            checks.close(P, Timestamp(112 * SECOND));
            checks.take_news()
        });
        assert_eq!(news[0], news[1]);
        assert!(again.added[&P].is_empty(), "what is closed is forgotten");
    }

    #[test]
    fn what_was_copied_and_what_is_not_settled_yet_is_not_judged() {
        let mut other = Checks::new(Duration::from_secs(1));
        other.begin(P, Timestamp(104 * SECOND + 7));
        for second in 103..110 {
            other.add(P, Timestamp(second * SECOND + 7), second);
        }
        other.close(P, Timestamp(108 * SECOND + 999));
        let told: Vec<u64> = other.take_news()[&P].iter().map(|sum| sum.number).collect();
        assert_eq!(told, [106, 107, 108], "the seconds from 105 to 108");
        other.hear(NodeId(1), checks(99).take_news()[&P].clone());
        for _ in 0..3 {
            assert_eq!(other.judge(), None);
        }
    }
}
