//! Carousel's Prepare Consensus (§4.2): what a replica remembers of the fast path, and how votes
//! and lists are counted. Counting is pure; `fast.rs` acts on it.

use orthodrome_core::Wire;
use orthodrome_core::id::{NodeId, PartitionId, TxnId};
use orthodrome_core::locks::PendingKeys;
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::time::{Duration, Time};
use orthodrome_core::txn::Key;

use super::message::Vote;
use super::state::Prepared;
use crate::replication::Term;

/// The most transactions in one replica's list. Beyond it, the replica refuses more.
pub(super) const LIST_MAX: usize = 65_536;

/// A transaction that one replica prepared on the fast path.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Listed {
    /// The replica's term at that time. Terms only grow, so an entry of an earlier term is frozen:
    /// no vote is sent for it any more (R5).
    pub term: Term,
    /// The prepared transaction.
    pub prepared: Prepared,
}

/// A vote on the fast path, as the coordinator stores it.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct FastVote {
    /// The voter's term.
    pub term: Term,
    /// The vote.
    pub vote: Vote,
    /// The group's voters, if the voter leads it.
    pub voters: Option<Vec<NodeId>>,
}

/// One replica's pending-transaction list: transactions that it prepared on the fast path, and
/// about which the log says nothing yet. Its entries never conflict with each other. Every later
/// leader knows the transactions that the log has settled (prepared, refused, ended), so they leave
/// the list.
#[derive(Debug, Default)]
pub struct PendingList {
    entries: OrdMap<TxnId, (Listed, Time)>,
    keys: PendingKeys,
}

impl PendingList {
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn get(&self, txn: TxnId) -> Option<&Listed> {
        self.entries.get(&txn).map(|(listed, _)| listed)
    }

    pub(super) fn txns(&self) -> impl Iterator<Item = TxnId> {
        self.entries.keys().copied()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (TxnId, &Listed)> {
        self.entries.iter().map(|(txn, (listed, _))| (*txn, listed))
    }

    pub(super) fn conflict(&self, txn: TxnId, reads: &[Key], writes: &[Key]) -> Option<TxnId> {
        self.keys.conflict(txn, reads, writes)
    }

    /// Adds an entry. When it was first added, all conflicting entries had left the list; the
    /// records of a restarted replica do not show that.
    pub(super) fn insert(&mut self, txn: TxnId, listed: Listed, now: Time) {
        self.remove(txn);
        let reads: Vec<Key> = listed.prepared.versions.iter().map(|(key, _)| key.clone()).collect();
        while let Some(gone) = self.keys.conflict(txn, &reads, &listed.prepared.writes) {
            self.remove(gone);
        }
        self.keys.insert(txn, &reads, listed.prepared.writes.iter());
        self.entries.insert(txn, (listed, now));
    }

    pub(super) fn remove(&mut self, txn: TxnId) {
        if let Some((listed, _)) = self.entries.remove(&txn) {
            self.keys.remove(txn, listed.prepared.keys());
        }
    }

    /// Removes earlier attempts of a transaction: its client knows that they aborted.
    pub(super) fn supersede(&mut self, txn: TxnId) {
        let earlier = txn.earlier();
        let gone: Vec<TxnId> = self.entries.range(earlier).map(|(txn, _)| *txn).collect();
        for txn in gone {
            self.remove(txn);
        }
    }

    /// Entries that are older than `timeout`, with their coordinators' groups. Their age starts
    /// again.
    pub(super) fn overdue(&mut self, now: Time, timeout: Duration) -> Vec<(TxnId, PartitionId)> {
        let mut overdue = Vec::new();
        for (txn, (listed, since)) in &mut self.entries {
            if now.since(*since) >= timeout {
                *since = now;
                overdue.push((*txn, listed.prepared.coordinator));
            }
        }
        overdue
    }
}

/// ⌈3f/2⌉ + 1 of 2f + 1 voters (§4.2, footnote 2). For an even number of voters, as many as make
/// the lists of any majority give the same result.
#[must_use]
pub fn supermajority(voters: usize) -> usize {
    voters - voters / 4
}

/// The number of lists, out of `lists`, that must contain a transaction which a supermajority of
/// `voters` may have prepared (§4.3.3 step 3, C6): all but those that the supermajority can lack.
#[must_use]
pub fn threshold(voters: usize, lists: usize) -> usize {
    lists.saturating_sub(voters / 4)
}

/// The partition's vote, if the fast path gives one (§4.2): a supermajority of the group that the
/// leader names voted the same as the leader, in its term and on the same versions.
#[must_use]
pub fn agreed(votes: &OrdMap<NodeId, FastVote>, ignore_terms: bool) -> Option<Vote> {
    votes.values().find_map(|leader| {
        let voters = leader.voters.as_ref()?;
        let is_same = |other: &&FastVote| {
            (ignore_terms || other.term == leader.term)
                && match (&other.vote, &leader.vote) {
                    (Vote::Refused(_), Vote::Refused(_)) => true,
                    (one, other) => one == other,
                }
        };
        let count = voters.iter().filter_map(|node| votes.get(node)).filter(is_same).count();
        (count >= supermajority(voters.len())).then(|| leader.vote.clone())
    })
}

/// §4.3.3 step 3: divides the transactions in these lists into those that a supermajority may have
/// prepared, and the others. `is_alike` says which entries count together.
pub(super) fn examine(
    lists: &OrdMap<NodeId, Vec<(TxnId, Listed)>>,
    voters: usize,
    is_alike: impl Fn(&Listed, &Listed) -> bool,
) -> OrdMap<TxnId, (Prepared, bool)> {
    let enough = threshold(voters, lists.len());
    let mut by_txn: OrdMap<TxnId, Vec<&Listed>> = OrdMap::new();
    for (txn, listed) in lists.values().flatten() {
        by_txn.entry(*txn).or_default().push(listed);
    }
    let mut examined = OrdMap::new();
    for (txn, all) in by_txn {
        let alike = |one: &Listed| all.iter().filter(|other| is_alike(one, other)).count();
        let Some(first) = all.iter().max_by_key(|one| alike(one)) else { continue };
        examined.insert(txn, (first.prepared.clone(), alike(first) >= enough));
    }
    examined
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn a_supermajority_is_the_papers() {
        for f in 0..20_usize {
            assert_eq!(supermajority(2 * f + 1), (3 * f).div_ceil(2) + 1, "f = {f}");
        }
    }

    /// Every subset of `0..n`.
    fn subsets(n: usize) -> impl Iterator<Item = u32> {
        0..1_u32 << n
    }

    /// C6, by trying all cases: whichever replicas vote and whichever lists arrive, a transaction
    /// that a supermajority prepared reaches the threshold. Of two transactions without a common
    /// voter (they conflict) at most one does.
    #[test]
    fn lists_show_every_transaction_of_a_supermajority_and_no_two_that_conflict() {
        for voters in 1..=9_usize {
            let majority = voters / 2 + 1;
            for lists in subsets(voters).filter(|set| set.count_ones() as usize >= majority) {
                let count = lists.count_ones() as usize;
                let enough = threshold(voters, count);
                assert!(2 * enough > count, "two disjoint sets of {enough} fit {count} lists");
                for prepared in subsets(voters) {
                    let seen = (prepared & lists).count_ones() as usize;
                    if prepared.count_ones() as usize >= supermajority(voters) {
                        assert!(seen >= enough, "{voters}: {prepared:b} in {lists:b}");
                    }
                }
            }
            // One vote less would not suffice: the lists of some majority would be evenly split.
            if voters % 2 == 1 && voters > 1 {
                let missing = voters - (supermajority(voters) - 1);
                assert!(2 * (majority - missing) <= majority, "{voters} need fewer");
            }
        }
    }

    fn vote(term: u64, vote: Vote, voters: Option<&[u32]>) -> FastVote {
        let voters = voters.map(|nodes| nodes.iter().copied().map(NodeId).collect());
        FastVote { term: Term(term), vote, voters }
    }

    fn prepared(proposal: u64) -> Vote {
        let proposal = orthodrome_core::time::Timestamp(proposal);
        Vote::Prepared { versions: Arc::default(), proposal }
    }

    #[test]
    fn votes_count_with_the_leaders_if_nothing_differs() {
        use orthodrome_core::txn::AbortReason::{Conflict, Recovery};
        let group: &[u32] = &[1, 2, 3];
        let of = |votes: &[FastVote]| {
            let nodes = (1..).map(NodeId);
            agreed(&nodes.zip(votes.iter().cloned()).collect(), false)
        };
        let leader = vote(4, prepared(9), Some(group));
        let same = vote(4, prepared(9), None);
        assert_eq!(of(&[leader.clone(), same.clone(), same.clone()]), Some(prepared(9)));
        // Too few; without the leader; another term; another timestamp; a refusal.
        assert_eq!(of(&[leader.clone(), same.clone()]), None);
        assert_eq!(of(&[same.clone(), same.clone(), same.clone()]), None);
        assert_eq!(of(&[leader.clone(), same.clone(), vote(3, prepared(9), None)]), None);
        assert_eq!(of(&[leader.clone(), same.clone(), vote(4, prepared(8), None)]), None);
        let no = vote(4, Vote::Refused(Conflict), None);
        assert_eq!(of(&[leader, same.clone(), no.clone()]), None);
        // A refusal by all, whatever the reasons; a refusal by the leader alone.
        let leader = vote(4, Vote::Refused(Recovery), Some(group));
        assert_eq!(of(&[leader.clone(), no.clone(), no]), Some(Vote::Refused(Recovery)));
        assert_eq!(of(&[leader, same.clone(), same.clone()]), None);
        // A vote of a node that the leader does not count.
        let leader = vote(4, prepared(9), Some(&[1, 2, 4]));
        assert_eq!(of(&[leader, same.clone(), same]), None);
    }
}
