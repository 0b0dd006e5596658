//! Inconsistent replication: fault-tolerant operations without an order.
//!
//! Irene Zhang, Naveen Kr. Sharma, Adriana Szekeres, Arvind Krishnamurthy, Dan R. K. Ports:
//! *Building Consistent Transactions with Inconsistent Replication*, SOSP 2015 (§3),
//! <https://doi.org/10.1145/2815400.2815404>; TOCS 35(4), 2018.
//!
//! # The idea
//! Replicas keep an unordered *record* of operations instead of a log. Every replica eventually
//! executes an *inconsistent* operation, in any order. A *consensus* operation is executed in any
//! order too, but the replicas agree on its *result*. On the fast path, ⌈3f/2⌉ + 1 replicas return
//! the same result. On the slow path, f + 1 replicas accept the result that the caller's decide
//! function computed from theirs. Operations that a majority has seen survive: a *view change*
//! collects f + 1 records, merges them, and distributes the merged record.
//!
//! This module contains the parts that do not depend on the operations: the quorum sizes
//! ([`Quorums`]), and the test whether a view change has enough records ([`Gathering`]). As in the
//! paper, the protocol on top ([`crate::tapir`]) defines the operations, merges records, and
//! decides what is durable when.
//!
//! # Deviations
//! - **Records are on disk before an answer leaves** (`protocol-pitfalls` R4). The paper keeps them
//!   in memory, and treats a restart as the loss of a replica. A replica that has lost its record
//!   may not answer from it: it counts in no quorum, view changes included (T2), until it has a
//!   copy.
//! - **Every answer contains the replica's view, and only answers of one view count together**
//!   (R5). A result of the slow path is accepted only in the view of the votes behind it.
//! - **An operation leaves the record** once every replica has executed it and nobody will ask for
//!   it any more. The group does not wait for a replica that has been away for too long: the view
//!   says which replicas count ([`Offer::synced`]), and a replica that is not among them needs a
//!   copy of the state.

use std::fmt;

use orthodrome_core::Wire;
use orthodrome_core::id::NodeId;
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::time::Timestamp;

/// A view of one group. Agreements of a later view replace everything of earlier views that was not
/// agreed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Wire)]
pub struct View(pub u64);

impl View {
    /// The view after this one.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }

    /// The replica that merges the records of this view: the replicas take turns.
    #[must_use]
    pub fn leader(self, replicas: &[NodeId]) -> NodeId {
        let count = replicas.len().max(1) as u64;
        let turn = usize::try_from(self.0 % count).unwrap_or(0);
        replicas.get(turn).copied().unwrap_or_default()
    }
}

impl fmt::Display for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "v{}", self.0)
    }
}

impl fmt::Debug for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The quorum sizes of a group of 2f + 1 replicas.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Quorums {
    replicas: usize,
}

impl Quorums {
    /// The quorum sizes of a group with this many replicas.
    #[must_use]
    pub fn of(replicas: usize) -> Self {
        Self { replicas }
    }

    /// The number of replicas.
    #[must_use]
    pub fn replicas(self) -> usize {
        self.replicas
    }

    /// The number of replicas that may fail.
    #[must_use]
    pub fn failures(self) -> usize {
        self.replicas.saturating_sub(1) / 2
    }

    /// f + 1: any two such quorums intersect.
    #[must_use]
    pub fn slow(self) -> usize {
        self.failures() + 1
    }

    /// ⌈3f/2⌉ + 1: any f + 1 replicas contain ⌈f/2⌉ + 1 of them, a majority of that f + 1.
    #[must_use]
    pub fn fast(self) -> usize {
        (3 * self.failures()).div_ceil(2) + 1
    }

    /// ⌈f/2⌉ + 1: the fast path may have agreed on a result only if at least this many of f + 1
    /// records have it.
    #[must_use]
    pub fn revive(self) -> usize {
        self.failures().div_ceil(2) + 1
    }

    /// 2f + 1 − ⌈f/2⌉: if this many replicas lack a result, no f + 1 records can look as if the
    /// fast path had agreed on it.
    #[must_use]
    pub fn settled(self) -> usize {
        self.replicas - self.failures().div_ceil(2)
    }
}

/// A replica's contribution to a view change.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Offer<I> {
    /// The latest view in which the replica took part. Its record is complete up to that view.
    pub normal_view: View,
    /// False while it has no complete state: its disk is new, or its copy of the other replicas'
    /// state is not finished.
    pub is_whole: bool,
    /// The replicas that count in that view, each with the view since which it counts. Operations
    /// left the record without waiting for other replicas, so a replica that has not taken part
    /// since then lacks some operations.
    pub synced: OrdMap<NodeId, View>,
    /// The record.
    pub image: I,
    /// When the replica first used its disk: a replica that lost its disk shows another time. Zero if
    /// it does not know.
    pub born: Timestamp,
    /// The replicas with whose empty records the group began, and which have counted ever since, each
    /// with its time `born`. A founder that has never taken part in a view, and still has this time,
    /// has lost nothing.
    pub founders: OrdMap<NodeId, Timestamp>,
}

impl<I> Offer<I> {
    /// True if the record is complete although the replica has never taken part in a view: the group
    /// began with it, and it has made no promise since.
    fn is_of_founder(&self, node: NodeId, founders: &OrdMap<NodeId, Timestamp>) -> bool {
        let is_new = !self.is_whole && self.normal_view == View(0);
        is_new && is_founder(node, self.born, founders)
    }
}

/// True if the group began with the record of this replica, which has had the same disk since then.
#[must_use]
pub fn is_founder(node: NodeId, born: Timestamp, founders: &OrdMap<NodeId, Timestamp>) -> bool {
    born != Timestamp::ZERO && founders.get(&node) == Some(&born)
}

/// The records that the leader of a view has collected.
#[derive(Debug)]
pub struct Gathering<I> {
    offers: OrdMap<NodeId, Offer<I>>,
}

/// The records that a leader has to merge.
#[derive(Debug)]
pub struct Gathered<'a, I> {
    /// The records that count, at least f + 1. Every fact in them counts, whichever view it is
    /// from.
    pub all: Vec<(NodeId, &'a Offer<I>)>,
    /// Those among them of the latest view. Only their votes still count.
    pub latest: Vec<(NodeId, &'a Offer<I>)>,
}

impl<I> Default for Gathering<I> {
    fn default() -> Self {
        Self { offers: OrdMap::new() }
    }
}

impl<I> Gathering<I> {
    /// A replica's record arrived; a later one of the same replica replaces it.
    pub fn add(&mut self, from: NodeId, offer: Offer<I>) {
        self.offers.insert(from, offer);
    }

    /// The replicas that have sent anything.
    pub fn offered(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.offers.keys().copied()
    }

    /// The replicas whose records have arrived, with the times at which they first used their disks.
    #[must_use]
    pub fn founders(&self) -> OrdMap<NodeId, Timestamp> {
        self.offers.iter().map(|(node, offer)| (*node, offer.born)).collect()
    }

    /// The records to merge, if there are enough: f + 1 from replicas that have a complete state,
    /// and that count in the latest view among them.
    #[must_use]
    pub fn ready(&self, quorums: Quorums) -> Option<Gathered<'_, I>> {
        let whole = || self.offers.iter().filter(|(_, offer)| offer.is_whole);
        let (_, top) = whole().max_by_key(|(_, offer)| offer.normal_view)?;
        let all: Vec<(NodeId, &Offer<I>)> = (self.offers.iter())
            .filter(|(node, offer)| {
                let was_there = |since: &View| offer.is_whole && *since <= offer.normal_view;
                top.synced.get(node).is_some_and(|since| {
                    was_there(since) || offer.is_of_founder(**node, &top.founders)
                })
            })
            .map(|(node, offer)| (*node, offer))
            .collect();
        if all.len() < quorums.slow() {
            return None;
        }
        let is_latest = |(_, offer): &&(NodeId, &Offer<I>)| offer.normal_view == top.normal_view;
        let latest = all.iter().filter(is_latest).copied().collect();
        Some(Gathered { all, latest })
    }

    /// True if f + 1 replicas have answered and none has a record: the group is new.
    #[must_use]
    pub fn is_new_group(&self, quorums: Quorums) -> bool {
        let is_new = |offer: &Offer<I>| !offer.is_whole && offer.normal_view == View(0);
        self.offers.len() >= quorums.slow() && self.offers.values().all(is_new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quorums_meet_as_the_paper_needs() {
        for failures in 0..10 {
            let quorums = Quorums::of(2 * failures + 1);
            let n = quorums.replicas();
            // Any slow quorum contains enough of a fast quorum to notice its result, and two
            // conflicting results cannot both be noticed.
            assert!(quorums.fast() + quorums.slow() - n >= quorums.revive());
            assert!(2 * quorums.revive() > quorums.slow());
            // If `settled` replicas lack a result, no f + 1 replicas can appear to have it.
            assert!(n - quorums.settled() < quorums.revive());
            assert!(quorums.settled() >= quorums.slow() && quorums.settled() <= n);
            assert!(quorums.fast() <= n);
        }
        assert_eq!((Quorums::of(3).fast(), Quorums::of(3).settled()), (3, 2));
        assert_eq!((Quorums::of(5).fast(), Quorums::of(5).settled()), (4, 4));
    }

    fn offer(view: u64, is_whole: bool, synced: &[u32]) -> Offer<()> {
        let synced = synced.iter().map(|&node| (NodeId(node), View(4))).collect();
        let (born, founders) = (Timestamp::ZERO, OrdMap::new());
        Offer { normal_view: View(view), is_whole, synced, image: (), born, founders }
    }

    #[test]
    fn only_whole_records_that_the_latest_view_counts_on_are_merged() {
        let quorums = Quorums::of(3);
        let mut gathering = Gathering::default();
        gathering.add(NodeId(1), offer(4, true, &[1, 2, 3]));
        gathering.add(NodeId(2), offer(6, false, &[1, 2, 3]));
        assert!(gathering.ready(quorums).is_none(), "a replica without a state was counted");
        gathering.add(NodeId(3), offer(5, true, &[2, 3]));
        assert!(gathering.ready(quorums).is_none(), "a replica that was left behind was counted");
        gathering.add(NodeId(2), offer(3, true, &[1, 2, 3]));
        assert!(gathering.ready(quorums).is_none(), "a replica was counted that had been away");
        gathering.add(NodeId(2), offer(4, true, &[1, 2, 3]));
        let gathered = gathering.ready(quorums).unwrap();
        assert_eq!(gathered.all.len(), 2);
        assert_eq!(gathered.latest.len(), 1);
        assert!(!gathering.is_new_group(quorums));
    }

    #[test]
    fn a_group_starts_new_only_if_no_replica_has_a_record() {
        let quorums = Quorums::of(3);
        let mut gathering = Gathering::default();
        gathering.add(NodeId(1), offer(0, false, &[]));
        assert!(!gathering.is_new_group(quorums));
        gathering.add(NodeId(3), offer(0, false, &[]));
        assert!(gathering.is_new_group(quorums));
        gathering.add(NodeId(2), offer(3, true, &[1, 2, 3]));
        assert!(!gathering.is_new_group(quorums));
    }

    #[test]
    fn a_founder_that_never_took_part_counts_while_it_has_its_disk() {
        let quorums = Quorums::of(3);
        let of = |founders: OrdMap<NodeId, Timestamp>, since, born| {
            let mut gathering = Gathering::default();
            let synced = OrdMap::from([(NodeId(1), View(1)), (NodeId(2), since)]);
            gathering.add(NodeId(1), Offer { synced, founders, ..offer(5, true, &[]) });
            gathering.add(NodeId(2), Offer { born, ..offer(0, false, &[]) });
            gathering.ready(quorums).is_some()
        };
        let founders = OrdMap::from([(NodeId(2), Timestamp(7)), (NodeId(3), Timestamp(8))]);
        assert!(of(founders.clone(), View(1), Timestamp(7)));
        assert!(!of(founders.clone(), View(1), Timestamp(9)), "it has lost its disk");
        assert!(!of(OrdMap::new(), View(1), Timestamp(7)), "it may have lost its disk");
        let zero = OrdMap::from([(NodeId(2), Timestamp::ZERO)]);
        assert!(!of(zero, View(1), Timestamp::ZERO), "nobody knows its disk");
    }

    #[test]
    fn leaders_take_turns() {
        let replicas = [NodeId(4), NodeId(7), NodeId(9)];
        let leaders: Vec<u32> = (0..4).map(|view| View(view).leader(&replicas).0).collect();
        assert_eq!(leaders, [4, 7, 9, 4]);
    }
}
