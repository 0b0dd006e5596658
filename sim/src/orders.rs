//! The results of the orders to change members in a fault schedule.

use orthodrome_core::id::{NodeId, PartitionId};
use orthodrome_core::machine::{Admin, Machine, MembershipOrder, OrderState, Protocol, Refusal};
use orthodrome_core::time::Time;
use serde::Serialize;

use crate::simulation::{Process, Simulation};

/// An order to change members that the schedule gave to every server, and its result.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct OrderReport {
    /// When it was given, in milliseconds of the run.
    pub at_ms: u64,
    /// The partition.
    pub partition: u32,
    /// The new voters.
    pub voters: Vec<String>,
    /// `pending`, `finished`, `failed`, or `unknown` if the server that accepted it has restarted
    /// since.
    pub state: &'static str,
    /// What it waits for, or why it failed.
    pub detail: String,
}

/// An order that the schedule gave.
struct Given {
    at: Time,
    partition: PartitionId,
    voters: Vec<NodeId>,
}

impl Given {
    /// True if a server that reports `order` means this order and not `later`, the next one with
    /// the same members.
    fn is(&self, order: &MembershipOrder, later: Option<Time>) -> bool {
        self.wants_as_much(order.partition, &order.voters)
            && order.given >= self.at
            && later.is_none_or(|later| order.given < later)
    }

    fn wants_as_much(&self, partition: PartitionId, voters: &[NodeId]) -> bool {
        self.partition == partition
            && self.voters.len() == voters.len()
            && self.voters.iter().all(|node| voters.contains(node))
    }

    /// Why no server will ever carry the order out, if this one knows.
    fn refused_by<P: Protocol>(&self, server: &P::Server) -> Option<String> {
        let (partition, voters) = (self.partition, self.voters.clone());
        let order = Admin::ChangeMembers { partition, voters, learners: Vec::new() };
        match server.refusal(&order)? {
            Refusal::Invalid(why) | Refusal::Never(why) => Some(why),
            Refusal::NotLeader(_) | Refusal::NotNow(_) => None,
        }
    }

    /// The report of this order, which was given to so many `servers`. `told` is what those say that
    /// have a record of it.
    fn report(&self, told: &[OrderState], servers: usize, refused: Option<String>) -> OrderReport {
        // The leader's report takes precedence.
        let rank = |state: &&OrderState| match state {
            OrderState::Finished => 3,
            OrderState::Pending(_) => 2,
            OrderState::Failed(_) => 1,
            OrderState::NotLeader(_) => 0,
        };
        let (state, detail) = match told.iter().max_by_key(rank) {
            Some(OrderState::NotLeader(_)) if told.len() < servers => {
                ("unknown", "the server that took it has restarted since".into())
            }
            Some(OrderState::NotLeader(_)) => {
                ("failed", "no server led the partition; repeat the request".into())
            }
            Some(state) => (state.name(), state.detail()),
            None => match refused {
                Some(why) => ("failed", why),
                None => ("unknown", "no server has a record of it".into()),
            },
        };
        OrderReport {
            at_ms: u64::try_from(self.at.since(Time::ZERO).as_millis()).unwrap_or(u64::MAX),
            partition: self.partition.0,
            voters: self.voters.iter().map(NodeId::to_string).collect(),
            state,
            detail,
        }
    }
}

impl<P: Protocol> Simulation<P> {
    /// The results so far of the orders to change members.
    pub(crate) fn orders(&self) -> Vec<OrderReport> {
        let given: Vec<Given> = self
            .plan
            .entries
            .iter()
            .filter(|entry| entry.at <= self.now())
            .filter_map(|entry| {
                let (partition, voters) = entry.membership()?;
                Some(Given { at: entry.at, partition, voters: voters.to_vec() })
            })
            .collect();
        let servers = || {
            self.nodes.iter().filter_map(|node| match &node.process {
                Process::Server(host) => Some(host.machine()),
                Process::Gateway(_) | Process::Down => None,
            })
        };
        let told: Vec<MembershipOrder> = servers().flat_map(|server| server.orders()).collect();
        let report = |order: &Given| {
            let same = given.iter().filter(|other| {
                other.at > order.at && order.wants_as_much(other.partition, &other.voters)
            });
            let later = same.map(|other| other.at).min();
            let states = told.iter().filter(|told| order.is(told, later));
            let states: Vec<OrderState> = states.map(|told| told.state.clone()).collect();
            let refused = servers().find_map(|server| order.refused_by::<P>(server));
            order.report(&states, self.cluster.servers().count(), refused)
        };
        given.iter().map(report).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_whose_leader_has_restarted_is_not_called_failed() {
        let given = Given { at: Time(5), partition: PartitionId(0), voters: vec![NodeId(1)] };
        let others = [OrderState::NotLeader(None), OrderState::NotLeader(Some(NodeId(3)))];
        assert_eq!(given.report(&others, 3, None).state, "unknown");
        assert_eq!(given.report(&others, 2, None).state, "failed");
        let finished = [OrderState::NotLeader(None), OrderState::Finished];
        assert_eq!(given.report(&finished, 3, None).state, "finished");
    }
}
