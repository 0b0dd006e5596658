//! Changing the members: joint consensus, Raft §6 and thesis §4.3; catching up, thesis §4.2.1.

use std::sync::Arc;

use orthodrome_core::id::PartitionId;
use orthodrome_core::machine::MembershipOrder;
use orthodrome_core::{NodeId, Time};

use super::leader::{Leading, Mode};
use super::quorum::{Members, QuorumError};
use super::replica::{Replica, Role};
use super::{Index, Io, Payload, Replicated};

/// A pending change whose new voters are catching up as learners. It is lost with the leader; the
/// operator must give the order again.
#[derive(Debug)]
pub(super) struct Change {
    target: Members,
    entrants: Vec<Entrant>,
    /// New voters that do not answer the leader, if too few others remain for a quorum.
    silent: Vec<NodeId>,
}

/// A learner that will become a voter. In each round it receives everything that the log contained
/// when the round began. When a round takes less than an election time-out, the rest delays nobody
/// (thesis §4.2.1).
#[derive(Debug)]
struct Entrant {
    node: NodeId,
    goal: Index,
    round_began: Time,
    has_caught_up: bool,
}

/// Why a change of members is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ChangeError {
    /// This node does not lead.
    #[error("this node does not lead the group; ask {leader:?}")]
    NotLeader {
        /// The leader, if known.
        leader: Option<NodeId>,
    },
    /// The leader has not chosen an entry of its term yet, so it cannot know whether an earlier
    /// change is still pending (Ongaro, raft-dev, 2015). Try again soon.
    #[error("the leader is not ready yet; ask again")]
    NotReady,
    /// An earlier change is not chosen yet. Try again soon.
    #[error("another change of members is under way; ask again when it is done")]
    UnderWay,
    /// The quorum sizes do not fit the new voters.
    #[error("quorums: {0}")]
    Quorums(#[from] QuorumError),
}

impl<R: Replicated> Replica<R> {
    /// Makes `voters` and `learners` the members. New voters first catch up as learners. Then old
    /// and new voters decide together until the new membership is chosen. Each step is an entry of
    /// the log, and a `Payload::Members` when it is chosen. A second order while new voters catch
    /// up replaces the first. If the leader changes meanwhile, give the order to the new one.
    /// [`Replica::orders`] reports the progress.
    ///
    /// # Errors
    /// Why the change is refused.
    pub fn change_members(
        &mut self,
        voters: Vec<NodeId>,
        learners: Vec<NodeId>,
        io: &mut impl Io<R>,
    ) -> Result<(), ChangeError> {
        let target = Members::settled(voters, learners);
        self.accept_change(target.clone(), io)
            .inspect_err(|why| self.orders.refuse(target, io.now(), why))
    }

    /// Whether [`Replica::change_members`] would accept an order for these voters now.
    ///
    /// # Errors
    /// Why it would refuse the order.
    pub fn check_change(&self, voters: &[NodeId]) -> Result<(), ChangeError> {
        let Role::Leader(lead) = &self.role else {
            return Err(ChangeError::NotLeader { leader: self.leader });
        };
        if !lead.is_ready {
            return Err(ChangeError::NotReady);
        }
        self.config.quorums.check(voters.len())?;
        if self.log.members().is_joint() || self.log.members_index() > self.chosen {
            return Err(ChangeError::UnderWay);
        }
        Ok(())
    }

    /// Refuses an order because the embedder is not ready for it. The operator can try again soon.
    pub fn refuse_change(
        &mut self,
        voters: Vec<NodeId>,
        learners: Vec<NodeId>,
        io: &mut impl Io<R>,
    ) {
        let target = Members::settled(voters, learners);
        self.orders.refuse(target, io.now(), &ChangeError::NotReady);
    }

    fn accept_change(&mut self, target: Members, io: &mut impl Io<R>) -> Result<(), ChangeError> {
        self.check_change(&target.voters)?;
        let Role::Leader(lead) = &mut self.role else {
            return Err(ChangeError::NotLeader { leader: self.leader });
        };
        let members = self.log.members();
        let (goal, now) = (self.log.last(), io.now());
        let entrants = target.voters.iter().filter(|node| !members.voters.contains(node));
        let entrants =
            entrants.map(|&node| Entrant { node, goal, round_began: now, has_caught_up: false });
        self.orders.accept(target.clone(), now);
        lead.change = Some(Change { entrants: entrants.collect(), target, silent: Vec::new() });
        self.pursue_change(io);
        self.orders.review(&self.log, self.chosen);
        Ok(())
    }

    /// The latest orders to change members that this replica has received since it started, oldest
    /// first, and their progress.
    #[must_use]
    pub fn orders(&self, partition: PartitionId) -> Vec<MembershipOrder> {
        let change = match &self.role {
            Role::Leader(lead) => lead.change.as_ref(),
            Role::Follower | Role::PreCandidate(_) | Role::Candidate { .. } => None,
        };
        let entrants = change.map_or(&[][..], |change| &change.entrants);
        let lagging = entrants.iter().filter(|entrant| !entrant.has_caught_up);
        let lagging: Vec<NodeId> = lagging.map(|entrant| entrant.node).collect();
        let silent = change.map_or(&[][..], |change| &change.silent);
        self.orders.tell(partition, &lagging, silent)
    }

    /// Takes the next step of a change if it can be taken.
    pub(super) fn pursue_change(&mut self, io: &mut impl Io<R>) {
        let (now, last) = (io.now(), self.log.last());
        if self.settled_voters().is_none() {
            // The previous step is not chosen yet: `on_members_chosen` continues.
            return;
        }
        let Role::Leader(lead) = &mut self.role else { return };
        let Some(mut change) = lead.change.take() else { return };
        change.silent.clear();
        let current = self.log.members();
        let target = &change.target;
        if current == target {
            return;
        }
        let mut newcomers = target.all();
        newcomers.retain(|&node| !current.is_member(node));
        if !newcomers.is_empty() {
            let learners = [current.learners.as_slice(), &newcomers].concat();
            let wider = Members::settled(current.voters.clone(), learners);
            lead.change = Some(change);
            self.append(Payload::Members(Arc::new(wider)), io);
            return;
        }
        // The voter must also know that it is a member. Otherwise it would refuse the vote that the
        // joint membership may need.
        let named = self.log.members_index();
        for entrant in &mut change.entrants {
            entrant.goal = entrant.goal.max(named);
            entrant.check(lead, now, last, self.config.election_timeout);
        }
        if change.entrants.iter().any(|entrant| !entrant.has_caught_up) {
            lead.change = Some(change);
            return;
        }
        let (me, quorums) = (self.me, self.config.quorums);
        let is_live = |node: NodeId| {
            node == me || lead.get(node).is_some_and(|other| other.is_live(now, &self.config))
        };
        if !change.target.is_quorum(|n| quorums.election(n).max(quorums.write(n)), is_live) {
            change.silent = change.target.voters.iter().copied().filter(|&n| !is_live(n)).collect();
            lead.change = Some(change);
            return;
        }
        let mut next = change.target;
        if next.voters != current.voters {
            next.outgoing.clone_from(&current.voters);
        }
        let index = self.append(Payload::Members(Arc::new(next)), io);
        self.orders.on_appended(index);
    }

    /// Checks again whether the voters that a change waits for answer. An answer without new
    /// information does not trigger this check.
    pub(super) fn pursue_change_of_silent(&mut self, io: &mut impl Io<R>) {
        let Role::Leader(lead) = &self.role else { return };
        if lead.change.as_ref().is_some_and(|change| !change.silent.is_empty()) {
            self.pursue_change(io);
        }
    }

    /// The membership in force has been chosen.
    pub(super) fn on_members_chosen(&mut self, io: &mut impl Io<R>) {
        let members = self.log.members().clone();
        if self.log.members_index() > self.chosen {
            return;
        }
        if members.is_joint() {
            let settled = Members::settled(members.voters, members.learners);
            self.append(Payload::Members(Arc::new(settled)), io);
            return;
        }
        let Role::Leader(lead) = &mut self.role else { return };
        if lead.progress.iter().any(|progress| !members.is_member(progress.node)) {
            // Members that leave are informed, so that they know it; then they are forgotten.
            self.beat_all(io);
        }
        let Role::Leader(lead) = &mut self.role else { return };
        lead.progress.retain(|progress| members.is_member(progress.node));
        if members.is_voter(self.me) {
            self.pursue_change(io);
        } else {
            self.abdicate(&members, io);
        }
    }

    /// Raft §6: a leader that is not in the new membership steps down once it is chosen. It asks
    /// the most up-to-date voter to campaign, so that no election timer has to expire.
    fn abdicate(&mut self, members: &Members, io: &mut impl Io<R>) {
        let Role::Leader(lead) = &self.role else { return };
        let voters = lead.progress.iter().filter(|progress| members.is_voter(progress.node));
        let best =
            voters.max_by_key(|progress| (progress.matched, std::cmp::Reverse(progress.node)));
        if let Some(to) = best.map(|progress| progress.node) {
            self.beat_all(io);
            self.yield_to(to, io);
        }
        self.step_down(self.term, None, io);
    }
}

impl Entrant {
    fn check<R: Replicated>(
        &mut self,
        lead: &Leading<R>,
        now: Time,
        last: Index,
        round_max: orthodrome_core::Duration,
    ) {
        let Some(progress) = lead.get(self.node) else { return };
        let is_streaming = matches!(progress.mode, Mode::Stream);
        if self.has_caught_up || !is_streaming || progress.matched < self.goal {
            return;
        }
        self.has_caught_up = now.since(self.round_began) < round_max;
        self.goal = last;
        self.round_began = now;
    }
}
