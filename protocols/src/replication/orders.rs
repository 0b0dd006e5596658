//! The progress of orders to change members.

use std::collections::VecDeque;

use orthodrome_core::id::PartitionId;
use orthodrome_core::machine::{MembershipOrder, OrderState};
use orthodrome_core::{NodeId, Time};

use super::log::Log;
use super::quorum::Members;
use super::{ChangeError, Index, Replicated};

/// The number of orders remembered for each group.
const KEPT: usize = 8;

/// The latest orders that one replica received.
#[derive(Debug, Default)]
pub(super) struct Orders {
    /// At most one of them is pending.
    list: VecDeque<Order>,
}

#[derive(Debug)]
struct Order {
    target: Members,
    given: Time,
    state: State,
}

#[derive(Debug)]
enum State {
    /// Accepted. Its new voters catch up as learners.
    CatchingUp,
    /// Its first or only entry is in the log at this index. The next leader continues with it,
    /// unless the entry is lost.
    InLog(Index),
    Finished,
    Failed(String),
    NotLeader(Option<NodeId>),
}

impl State {
    fn is_pending(&self) -> bool {
        matches!(self, Self::CatchingUp | Self::InLog(_))
    }
}

impl Orders {
    fn push(&mut self, target: Members, given: Time, state: State) {
        self.list.push_back(Order { target, given, state });
        if self.list.len() > KEPT {
            let oldest = self.list.iter().position(|order| !order.state.is_pending());
            drop(oldest.and_then(|at| self.list.remove(at)));
        }
    }

    fn pending(&mut self) -> Option<&mut Order> {
        self.list.iter_mut().find(|order| order.state.is_pending())
    }

    fn fail(&mut self, why: &str) {
        if let Some(order) = self.pending() {
            order.state = State::Failed(why.into());
        }
    }

    pub(super) fn accept(&mut self, target: Members, now: Time) {
        self.fail("a later order has taken its place");
        self.push(target, now, State::CatchingUp);
    }

    pub(super) fn refuse(&mut self, target: Members, now: Time, why: &ChangeError) {
        let state = match why {
            ChangeError::NotLeader { leader } => State::NotLeader(*leader),
            ChangeError::NotReady | ChangeError::UnderWay | ChangeError::Quorums(_) => {
                State::Failed(why.to_string())
            }
        };
        self.push(target, now, state);
    }

    /// The last step that this leader must take is in its log.
    pub(super) fn on_appended(&mut self, index: Index) {
        if let Some(order) = self.pending() {
            order.state = State::InLog(index);
        }
    }

    /// The replica that accepted the orders does not lead any more.
    pub(super) fn on_deposed(&mut self) {
        if let Some(order) = self.pending()
            && matches!(order.state, State::CatchingUp)
        {
            order.state = State::Failed(
                "the leader changed before its new voters had caught up; give the order to the new \
                 leader"
                    .into(),
            );
        }
    }

    /// More of the log is chosen: up to `chosen`.
    pub(super) fn review<R: Replicated>(&mut self, log: &Log<R>, chosen: Index) {
        let Some(order) = self.pending() else { return };
        let members = log.members();
        if members.is_joint() || log.members_index() > chosen {
            return;
        }
        if *members == order.target {
            order.state = State::Finished;
        } else if let State::InLog(index) = order.state
            && index <= chosen
        {
            order.state = State::Failed(
                "the leader changed, and what it had written of the change was lost; give the order \
                 to the new leader"
                    .into(),
            );
        }
    }

    pub(super) fn tell(
        &self,
        partition: PartitionId,
        lagging: &[NodeId],
        silent: &[NodeId],
    ) -> Vec<MembershipOrder> {
        let names =
            |nodes: &[NodeId]| nodes.iter().map(NodeId::to_string).collect::<Vec<_>>().join(", ");
        let state = |state: &State| match state {
            State::CatchingUp if !silent.is_empty() => OrderState::Pending(format!(
                "the leader does not hear {}; too few of the new voters would be left",
                names(silent)
            )),
            State::CatchingUp if lagging.is_empty() => {
                OrderState::Pending("the new members are being made known".into())
            }
            State::CatchingUp => {
                OrderState::Pending(format!("{} must catch up first", names(lagging)))
            }
            State::InLog(_) => {
                OrderState::Pending("old and new voters have yet to agree to it".into())
            }
            State::Finished => OrderState::Finished,
            State::Failed(why) => OrderState::Failed(why.clone()),
            State::NotLeader(leader) => OrderState::NotLeader(*leader),
        };
        let orders = self.list.iter().map(|order| MembershipOrder {
            partition,
            voters: order.target.voters.clone(),
            learners: order.target.learners.clone(),
            given: order.given,
            state: state(&order.state),
        });
        orders.collect()
    }
}
