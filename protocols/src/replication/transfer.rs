//! Leadership transfer: thesis §3.10.

use orthodrome_core::{NodeId, Time};

use super::leader::Transfer;
use super::replica::{Replica, Role};
use super::{Io, Replicated};

/// Why a leadership transfer is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TransferError {
    /// This node does not lead.
    #[error("this node does not lead the group")]
    NotLeader {
        /// The leader, if known.
        leader: Option<NodeId>,
    },
    /// The target does not vote.
    #[error("{0} does not vote in the group; name one of its voters")]
    NotVoter(NodeId),
    /// A transfer to another node is pending.
    #[error("leadership is being handed to {0}; ask again when that is done")]
    UnderWay(NodeId),
}

impl<R: Replicated> Replica<R> {
    /// Transfers leadership to the voter `to` (thesis §3.10). It refuses proposals until `to` has
    /// caught up and was asked to campaign, or an election time-out has passed, which is longer
    /// while messages are late. Ignored if this node does not lead, or `to` cannot lead:
    /// [`Replica::check_transfer`] says why.
    pub fn transfer(&mut self, to: NodeId, io: &mut impl Io<R>) {
        let is_possible = self.check_transfer(to).is_ok() && to != self.me;
        let patience = self.config.election_timeout.max(self.timeout.current());
        if let Role::Leader(lead) = &mut self.role
            && is_possible
        {
            let until = io.now() + patience;
            lead.transfer = Some(Transfer { to, until, is_asked: false });
        }
    }

    /// Whether [`Replica::transfer`] would begin a transfer to `to` now, or this node is `to` and
    /// already leads.
    ///
    /// # Errors
    /// Why it would refuse.
    pub fn check_transfer(&self, to: NodeId) -> Result<(), TransferError> {
        let Role::Leader(lead) = &self.role else {
            return Err(TransferError::NotLeader { leader: self.leader() });
        };
        if !self.log.members().voters.contains(&to) {
            return Err(TransferError::NotVoter(to));
        }
        match &lead.transfer {
            Some(transfer) => Err(TransferError::UnderWay(transfer.to)),
            None => Ok(()),
        }
    }

    /// If this node leads, the voter to which it should transfer leadership before it stops: the
    /// preferred leader if that answers, otherwise the most up-to-date voter among those that
    /// answer. A new leader may have had no answer yet: then one that may be there.
    #[must_use]
    pub fn successor(&self, now: Time) -> Option<NodeId> {
        let Role::Leader(lead) = &self.role else { return None };
        let voters = &self.log.members().voters;
        let fit = lead.progress.iter().filter(|progress| {
            progress.node != self.me
                && voters.contains(&progress.node)
                && lead.may_be_live(progress, now, &self.config)
        });
        let best = fit.max_by_key(|progress| {
            let is_preferred = self.preferred == Some(progress.node);
            let answers = progress.is_live(now, &self.config);
            (answers, is_preferred, progress.matched, std::cmp::Reverse(progress.node))
        });
        best.map(|progress| progress.node)
    }

    /// If this node leads: each other member, and the number of entries that are not durable there
    /// yet, as far as this node knows. Otherwise empty.
    #[must_use]
    pub fn behind(&self) -> Vec<(NodeId, u64)> {
        let Role::Leader(lead) = &self.role else { return Vec::new() };
        let others = lead.progress.iter().filter(|progress| progress.node != self.me);
        let last = self.log.last();
        others.map(|other| (other.node, last.0.saturating_sub(other.matched.0))).collect()
    }
}
