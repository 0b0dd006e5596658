//! The status of a gateway.

use std::time::Duration;

use orthodrome_core::{NodeId, PartitionId};

use crate::Error;
use crate::client::Client;
use crate::gateway::Stubs;
use crate::pace::Pace;
use crate::wire::api;

/// The status of a gateway, and its counters since its process started.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct StatusInfo {
    /// The node that answers.
    pub node: NodeId,
    /// Why it does not serve; empty if it serves.
    pub trouble: String,
    /// Requests in progress.
    pub requests: u64,
    /// The limit on requests in progress.
    pub requests_max: u64,
    /// Pending transactions.
    pub txns_in_flight: u64,
    /// The limit on pending transactions.
    pub txns_in_flight_max: u64,
    /// Pending transactions that wait for their client.
    pub txns_open: u64,
    /// The limit on transactions that wait for their client.
    pub txns_open_max: u64,
    /// Transactions that it acknowledged as committed.
    pub committed: u64,
    /// Transactions that it acknowledged as aborted.
    pub aborted: u64,
    /// Transactions that it reported with an unknown outcome.
    pub unknown: u64,
    /// Requests that it refused because a limit was reached.
    pub refused: u64,
    /// Transactions aborted because their lease ran out.
    pub leases_expired: u64,
    /// Transactions that ran with low instead of high priority, because a quota was used up.
    pub demoted: u64,
    /// How long the process has been up.
    pub uptime: Duration,
    /// Gauges of the protocol, such as the delays that it measures.
    pub gauges: Vec<Gauge>,
    /// Orders to change members that its node has accepted since its process started: the latest of
    /// each partition, oldest first.
    pub orders: Vec<MembershipOrder>,
    /// The version of its program; empty if the program is too old to say it.
    pub version: String,
    /// Its links to the other nodes.
    pub links: Vec<Link>,
}

/// How a node stands to another one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Link {
    /// The other node.
    pub node: NodeId,
    /// Whether the node can send to it now.
    pub is_connected: bool,
    /// How long that has been so. A node that was never reached counts from the start of the
    /// process.
    pub since: Duration,
    /// Round-trip time of the last ping, without emulated delays; none if none was answered.
    pub rtt: Option<Duration>,
}

/// An order to change the members of a partition, and its progress.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MembershipOrder {
    /// The partition.
    pub partition: PartitionId,
    /// The new voters.
    pub voters: Vec<NodeId>,
    /// The new members that receive data but do not vote.
    pub learners: Vec<NodeId>,
    /// Its progress.
    pub state: OrderState,
    /// What it waits for, or why it failed and what to do.
    pub detail: String,
    /// The time since it was given.
    pub age: Duration,
}

/// The progress of an order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OrderState {
    /// The node is carrying it out.
    Pending,
    /// It was carried out. A later order may have changed the members again.
    Finished,
    /// It failed, and will not be carried out.
    Failed,
    /// A newer server sent a state that this client does not know.
    Unknown,
}

/// A quantity for operators to watch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Gauge {
    /// Its name, with the unit at the end: `delay_us`.
    pub name: String,
    /// The node that it describes.
    pub node: NodeId,
    /// Its value.
    pub value: i64,
}

impl Client {
    /// The status of the gateway in use.
    ///
    /// # Errors
    /// [`Error::Unreachable`] or [`Error::Deadline`] if no gateway answered in time.
    pub async fn status(&self) -> Result<StatusInfo, Error> {
        let mut pace = Pace::new(self.inner.deadline);
        loop {
            let at = self.inner.gateways.current();
            let request = api::StatusRequest {};
            match self.inner.gateways.send(at, pace.deadline, request, Stubs::status).await {
                Ok(answer) => return Ok(StatusInfo::from_api(answer)),
                Err(failure) => self.inner.after_failure(at, failure, &mut pace).await?,
            }
        }
    }
}

impl StatusInfo {
    pub(crate) fn from_api(answer: api::StatusResponse) -> Self {
        Self {
            node: NodeId(answer.node),
            trouble: answer.trouble,
            requests: answer.requests,
            requests_max: answer.requests_max,
            txns_in_flight: answer.txns_in_flight,
            txns_in_flight_max: answer.txns_in_flight_max,
            txns_open: answer.txns_open,
            txns_open_max: answer.txns_open_max,
            committed: answer.committed,
            aborted: answer.aborted,
            unknown: answer.unknown,
            refused: answer.refused,
            leases_expired: answer.leases_expired,
            demoted: answer.demoted,
            uptime: Duration::from_millis(answer.uptime_ms),
            gauges: answer.gauges.into_iter().map(Gauge::from_api).collect(),
            orders: answer.orders.into_iter().map(MembershipOrder::from_api).collect(),
            version: answer.version,
            links: answer.links.into_iter().map(Link::from_api).collect(),
        }
    }
}

impl MembershipOrder {
    fn from_api(order: api::MembershipOrder) -> Self {
        use api::membership_order::State;
        let nodes = |ids: &[u32]| ids.iter().copied().map(NodeId).collect();
        Self {
            partition: PartitionId(order.partition),
            voters: nodes(&order.voters),
            learners: nodes(&order.learners),
            state: match order.state() {
                State::Pending => OrderState::Pending,
                State::Finished => OrderState::Finished,
                State::Failed => OrderState::Failed,
                State::Unspecified => OrderState::Unknown,
            },
            detail: order.detail,
            age: Duration::from_millis(order.age_ms),
        }
    }
}

impl Link {
    fn from_api(api::Link { node, connected, since_ms, rtt_us }: api::Link) -> Self {
        Self {
            node: NodeId(node),
            is_connected: connected,
            since: Duration::from_millis(since_ms),
            rtt: (rtt_us > 0).then(|| Duration::from_micros(rtt_us)),
        }
    }
}

impl Gauge {
    fn from_api(api::Gauge { name, node, value }: api::Gauge) -> Self {
        Self { name, node: NodeId(node), value }
    }
}
