//! Orders of an operator. The library finds the node that leads the partition.

use orthodrome_core::{NodeId, PartitionId};
use tokio::time::Instant;
use tonic::{Code, Status};

use crate::Error;
use crate::client::Client;
use crate::gateway::{Failure, Found, Stubs, failure};
use crate::pace::Pace;
use crate::status::StatusInfo;
use crate::wire::api;

/// The trailer with the id of the leading node.
const LEADER: &str = "orthodrome-leader";

/// Why a node refused an order.
enum Refused {
    /// Another node leads. The node may know which.
    NotLeader { leader: Option<NodeId>, text: String },
    /// A failure as with any other request.
    Failure(Failure),
}

impl Client {
    /// Hands leadership of a partition to another of its voters. Needs the role `admin`. Returns
    /// the node that accepted the order, which leads until the transfer; the node carries the order
    /// out in the background.
    ///
    /// # Errors
    /// [`Error::PermissionDenied`]; [`Error::Invalid`] if there is no such partition or node, or
    /// the node does not vote; [`Error::Refused`] if no node accepts the order now;
    /// [`Error::Unsupported`] if the protocol has no such orders. [`Error::Deadline`] if no answer
    /// came: a node may have accepted the order.
    pub async fn transfer_leader(
        &self,
        partition: PartitionId,
        to: NodeId,
    ) -> Result<NodeId, Error> {
        let request = api::TransferLeaderRequest { partition: partition.0, to: to.0 };
        self.order(async |at, deadline| {
            let answer =
                self.inner.gateways.ask(at, deadline, request, Stubs::transfer_leader).await;
            answer.map(|answer: api::TransferLeaderResponse| NodeId(answer.node))
        })
        .await
    }

    /// Replaces the voters and learners of a partition. Needs the role `admin`. Returns the node
    /// that accepted the order, which carries it out in the background. [`Client::statuses`] shows
    /// its progress.
    ///
    /// # Errors
    /// [`Error::PermissionDenied`]; [`Error::Invalid`] if there is no such partition or node, one
    /// is named twice, or the number of voters is even; [`Error::Refused`] if no node accepts the
    /// order now; [`Error::Unsupported`] if the protocol has no such orders. [`Error::Deadline`] if
    /// no answer came: a node may have accepted the order.
    pub async fn change_members(
        &self,
        partition: PartitionId,
        voters: &[NodeId],
        learners: &[NodeId],
    ) -> Result<NodeId, Error> {
        let numbers = |nodes: &[NodeId]| nodes.iter().map(|node| node.0).collect();
        let request = api::ChangeMembersRequest {
            partition: partition.0,
            voters: numbers(voters),
            learners: numbers(learners),
        };
        self.order(async |at, deadline| {
            let answer =
                self.inner.gateways.ask(at, deadline, request.clone(), Stubs::change_members).await;
            answer.map(|answer: api::ChangeMembersResponse| NodeId(answer.node))
        })
        .await
    }

    /// Sends an order to one node after the other until one accepts it. A node that does not lead
    /// the partition names the leader.
    async fn order(
        &self,
        give: impl AsyncFn(usize, Instant) -> Result<NodeId, Option<Status>>,
    ) -> Result<NodeId, Error> {
        let gateways = &self.inner.gateways;
        let mut pace = Pace::new(self.inner.deadline);
        let mut at = gateways.current();
        let mut asked = 0;
        loop {
            let refused = match give(at, pace.deadline).await {
                Ok(node) => return Ok(node),
                Err(Some(status)) => refusal(gateways.endpoint(at), &status),
                Err(None) => {
                    let text = format!("{} did not answer in time", gateways.endpoint(at));
                    return Err(Error::Deadline(text));
                }
            };
            let (next, error) = match refused {
                Refused::NotLeader { leader: Some(leader), text } => {
                    match gateways.of_node(leader, pace.deadline).await {
                        Found::At(named) => (named, Error::Refused(text)),
                        // A new leader may be elected soon.
                        Found::NotYet => (gateways.after(at), Error::Refused(text)),
                        Found::Nowhere => {
                            return Err(Error::Refused(format!(
                                "{text}; none of the endpoints is the gateway of {leader}: add it"
                            )));
                        }
                    }
                }
                Refused::NotLeader { leader: None, text } => {
                    (gateways.after(at), Error::Refused(text))
                }
                Refused::Failure(Failure::Busy(text)) => (at, Error::Busy(text)),
                Refused::Failure(Failure::Unavailable(text)) => {
                    (gateways.after(at), Error::Unreachable(text))
                }
                // The leader cannot do it now.
                Refused::Failure(Failure::NotOpen(text)) => (at, Error::Refused(text)),
                Refused::Failure(
                    other @ (Failure::Never(_) | Failure::Unregistered(_) | Failure::Lost(_)),
                ) => return Err(other.into_error()),
            };
            at = next;
            asked += 1;
            // Every gateway is asked before the first pause.
            if asked % gateways.len() == 0 && !pace.pause().await {
                return Err(error);
            }
        }
    }

    /// The status of every gateway of the configuration, with its endpoint, in order. Only the node
    /// that accepted an order reports on it.
    pub async fn statuses(&self) -> Vec<(String, Result<StatusInfo, Error>)> {
        let gateways = &self.inner.gateways;
        let deadline = Pace::new(self.inner.deadline).deadline;
        let mut all = Vec::new();
        for at in 0..gateways.len() {
            let answer = gateways.send(at, deadline, api::StatusRequest {}, Stubs::status).await;
            let status = answer.map(StatusInfo::from_api).map_err(Failure::into_error);
            all.push((gateways.endpoint(at).to_owned(), status));
        }
        all
    }
}

fn refusal(endpoint: &str, status: &Status) -> Refused {
    let leader = status.metadata().get(LEADER).and_then(|leader| leader.to_str().ok());
    match leader {
        Some(leader) if status.code() == Code::FailedPrecondition => Refused::NotLeader {
            leader: leader.parse().ok().map(NodeId),
            text: format!("{endpoint}: {}", status.message()),
        },
        Some(_) | None => Refused::Failure(failure(endpoint, status)),
    }
}
