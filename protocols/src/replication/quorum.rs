//! Quorums: their sizes, and the members from which they are drawn.

use std::fmt;

use orthodrome_core::{NodeId, Wire};

/// How many voters elect a leader, and how many must have an entry for it to be chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Quorums {
    /// Raft: more than half, for both.
    #[default]
    Majority,
    /// Flexible Paxos: any two sizes whose quorums intersect. The numbers are fixed, so a change of
    /// members that would break the intersection is refused.
    Flexible {
        /// Voters that elect a leader.
        election: usize,
        /// Voters (the leader may be one) that must have an entry durably for it to be chosen, and
        /// that must acknowledge a round for a read or a lease.
        write: usize,
    },
}

/// Quorum sizes that do not keep data safe.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum QuorumError {
    /// There are no voters.
    #[error("a group needs at least one voter")]
    NoVoters,
    /// A quorum is larger than the group, or empty.
    #[error("quorums of {election} and {write} do not fit {voters} voters; use 1 to {voters}")]
    Size {
        /// Election quorum.
        election: usize,
        /// Write quorum.
        write: usize,
        /// Number of voters.
        voters: usize,
    },
    /// A new leader could miss a chosen entry (Flexible Paxos §3: every two quorums of the two
    /// phases must intersect).
    #[error(
        "an election quorum of {election} may miss a write quorum of {write} among {voters} \
         voters; their sum must exceed {voters}"
    )]
    Disjoint {
        /// Election quorum.
        election: usize,
        /// Write quorum.
        write: usize,
        /// Number of voters.
        voters: usize,
    },
    /// Two leaders could be elected in one term. Paxos does not need this rule, because it numbers
    /// ballots by proposer. Raft needs it, because all candidates share its terms.
    #[error(
        "two election quorums of {election} among {voters} voters may not meet, so one term could \
         have two leaders; use more than half"
    )]
    TwoLeaders {
        /// Election quorum.
        election: usize,
        /// Number of voters.
        voters: usize,
    },
}

impl Quorums {
    /// Votes that elect a leader among `voters`.
    #[must_use]
    pub fn election(self, voters: usize) -> usize {
        match self {
            Self::Majority => voters / 2 + 1,
            Self::Flexible { election, .. } => election,
        }
    }

    /// Durable replicas that make an entry chosen among `voters`.
    #[must_use]
    pub fn write(self, voters: usize) -> usize {
        match self {
            Self::Majority => voters / 2 + 1,
            Self::Flexible { write, .. } => write,
        }
    }

    /// Checks that the sizes are safe for a group of `voters`.
    ///
    /// # Errors
    /// The first broken rule; the message names the sizes.
    pub fn check(self, voters: usize) -> Result<(), QuorumError> {
        let (election, write) = (self.election(voters), self.write(voters));
        if voters == 0 {
            return Err(QuorumError::NoVoters);
        }
        if election == 0 || write == 0 || election > voters || write > voters {
            return Err(QuorumError::Size { election, write, voters });
        }
        if election + write <= voters {
            return Err(QuorumError::Disjoint { election, write, voters });
        }
        if 2 * election <= voters {
            return Err(QuorumError::TwoLeaders { election, voters });
        }
        Ok(())
    }
}

/// The members of a group as of some entry. Lists are sorted and free of duplicates.
#[derive(Clone, PartialEq, Eq, Debug, Default, Wire)]
pub struct Members {
    /// Members that vote.
    #[wire(ascending)]
    pub voters: Vec<NodeId>,
    /// During a change (joint consensus, Raft §6): the previous voters, of whom a quorum must also
    /// agree to everything. Otherwise empty.
    #[wire(ascending)]
    pub outgoing: Vec<NodeId>,
    /// Members that receive entries but do not vote. A voter that becomes a learner may also be in
    /// `outgoing`.
    #[wire(ascending)]
    pub learners: Vec<NodeId>,
}

impl Members {
    /// Members outside of a change.
    #[must_use]
    pub fn settled(mut voters: Vec<NodeId>, mut learners: Vec<NodeId>) -> Self {
        voters.sort_unstable();
        voters.dedup();
        learners.sort_unstable();
        learners.dedup();
        learners.retain(|node| voters.binary_search(node).is_err());
        Self { voters, outgoing: Vec::new(), learners }
    }

    /// True between the two entries of a change.
    #[must_use]
    pub fn is_joint(&self) -> bool {
        !self.outgoing.is_empty()
    }

    /// True if `node`'s vote counts, in either half of a joint membership.
    #[must_use]
    pub fn is_voter(&self, node: NodeId) -> bool {
        self.voters.contains(&node) || self.outgoing.contains(&node)
    }

    /// True if `node` is in any list.
    #[must_use]
    pub fn is_member(&self, node: NodeId) -> bool {
        self.is_voter(node) || self.learners.contains(&node)
    }

    /// Every member once, ascending.
    #[must_use]
    pub fn all(&self) -> Vec<NodeId> {
        let lists = [&self.voters, &self.outgoing, &self.learners];
        let mut all: Vec<NodeId> = lists.into_iter().flatten().copied().collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// The one or two sets of voters that must each agree.
    fn halves(&self) -> impl Iterator<Item = &Vec<NodeId>> {
        [&self.voters, &self.outgoing].into_iter().filter(|half| !half.is_empty())
    }

    /// True if the nodes that `agrees` accepts form a quorum of `size(voters)` in every half.
    pub(super) fn is_quorum(
        &self,
        size: impl Fn(usize) -> usize,
        agrees: impl Fn(NodeId) -> bool,
    ) -> bool {
        !self.voters.is_empty()
            && self
                .halves()
                .all(|half| half.iter().filter(|&&node| agrees(node)).count() >= size(half.len()))
    }

    /// The highest value that a quorum of `size(voters)` in every half has reached; none if there
    /// are no voters. `scratch` avoids an allocation.
    pub(super) fn reached<T: Ord + Copy>(
        &self,
        size: impl Fn(usize) -> usize,
        scratch: &mut Vec<T>,
        value: impl Fn(NodeId) -> T,
    ) -> Option<T> {
        let mut lowest: Option<T> = None;
        for half in self.halves() {
            scratch.clear();
            scratch.extend(half.iter().map(|&node| value(node)));
            scratch.sort_unstable();
            let reached = *scratch.get(half.len().checked_sub(size(half.len()))?)?;
            lowest = Some(lowest.map_or(reached, |other| other.min(reached)));
        }
        lowest
    }
}

impl fmt::Display for Members {
    /// `n1 n2 n3`, or `n1 n2 n4 <- n1 n2 n3 + n5`: voters, the voters that they replace, learners.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        list(f, &self.voters)?;
        if self.is_joint() {
            f.write_str(" <- ")?;
            list(f, &self.outgoing)?;
        }
        if !self.learners.is_empty() {
            f.write_str(" + ")?;
            list(f, &self.learners)?;
        }
        Ok(())
    }
}

fn list(f: &mut fmt::Formatter<'_>, nodes: &[NodeId]) -> fmt::Result {
    for (at, node) in nodes.iter().enumerate() {
        let space = if at == 0 { "" } else { " " };
        write!(f, "{space}{node}")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every subset of `0..voters` with `size` elements.
    fn subsets(voters: usize, size: usize) -> Vec<u32> {
        (0..1_u32 << voters).filter(|set| set.count_ones() as usize == size).collect()
    }

    #[test]
    fn accepted_sizes_are_exactly_those_whose_quorums_intersect() {
        for voters in 1..=6 {
            for election in 0..=7 {
                for write in 0..=7 {
                    let sizes = Quorums::Flexible { election, write };
                    let fits = (1..=voters).contains(&election) && (1..=voters).contains(&write);
                    let meet = |a: usize, b: usize| {
                        subsets(voters, a)
                            .iter()
                            .all(|x| subsets(voters, b).iter().all(|y| x & y != 0))
                    };
                    let safe = fits && meet(election, write) && meet(election, election);
                    assert_eq!(sizes.check(voters).is_ok(), safe, "{sizes:?} of {voters}");
                }
            }
            assert_eq!(Quorums::Majority.check(voters), Ok(()));
        }
    }

    #[test]
    fn refusals_say_what_is_wrong() {
        let check = |election, write, voters| {
            Quorums::Flexible { election, write }.check(voters).unwrap_err().to_string()
        };
        assert!(check(3, 2, 5).contains("must exceed 5"));
        assert!(check(2, 4, 5).contains("two leaders"));
        assert!(check(6, 1, 5).contains("do not fit"));
        assert!(Quorums::Majority.check(0).unwrap_err().to_string().contains("at least one"));
    }

    #[test]
    fn what_a_quorum_reached_is_the_lowest_over_both_halves() {
        let nodes = |ids: &[u32]| ids.iter().copied().map(NodeId).collect::<Vec<_>>();
        let mut members = Members::settled(nodes(&[3, 1, 2]), nodes(&[9, 3]));
        assert_eq!(members.learners, nodes(&[9]), "a voter is no learner");
        let value = |node: NodeId| [0, 10, 20, 30, 5][node.0 as usize];
        let mut scratch = Vec::new();
        let write = |voters| Quorums::Majority.write(voters);
        assert_eq!(members.reached(write, &mut scratch, value), Some(20));
        members.outgoing = nodes(&[1, 3, 4]);
        assert_eq!(members.reached(write, &mut scratch, value), Some(10));
        assert!(members.is_quorum(write, |node| node.0 == 1 || node.0 == 3));
        assert!(!members.is_quorum(write, |node| node.0 == 2 || node.0 == 3));
        assert_eq!(members.to_string(), "n1 n2 n3 <- n1 n3 n4 + n9");
        assert_eq!(Members::default().reached(write, &mut scratch, value), None);
    }
}
