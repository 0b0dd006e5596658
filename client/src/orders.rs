//! Orders of an operator. The library finds the node that leads the partition.

use orthodrome_core::ordered::OrdSet;
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
    /// the partition names the leader, as far as it knows: one that does not hold the partition may
    /// name a node that led it long ago.
    async fn order(
        &self,
        give: impl AsyncFn(usize, Instant) -> Result<NodeId, Option<Status>>,
    ) -> Result<NodeId, Error> {
        let gateways = &self.inner.gateways;
        let mut pace = Pace::new(self.inner.deadline);
        let mut at = gateways.current();
        // The gateways asked since the last pause, and whether a pause may help.
        let (mut asked, mut may_help) = (OrdSet::new(), false);
        loop {
            let refused = match give(at, pace.deadline).await {
                Ok(node) => return Ok(node),
                Err(Some(status)) => refusal(gateways.endpoint(at), &status),
                Err(None) => {
                    let text = format!("{} did not answer in time", gateways.endpoint(at));
                    return Err(Error::Deadline(text));
                }
            };
            asked.insert(at);
            let (next, error) = match refused {
                Refused::NotLeader { leader: Some(leader), text } => {
                    match gateways.of_node(leader, pace.deadline).await {
                        Found::At(named) => (Next::Named(named), Error::Refused(text)),
                        // A new leader may be elected soon.
                        Found::NotYet => (Next::Other, Error::Refused(text)),
                        Found::Nowhere => {
                            let text = format!(
                                "{text}; none of the endpoints is the gateway of {leader}: add it"
                            );
                            (Next::Unknown, Error::Refused(text))
                        }
                    }
                }
                Refused::NotLeader { leader: None, text } => (Next::Other, Error::Refused(text)),
                Refused::Failure(Failure::Busy(text)) => (Next::Same, Error::Busy(text)),
                Refused::Failure(Failure::Unavailable(text)) => {
                    (Next::Other, Error::Unreachable(text))
                }
                // The leader cannot do it now.
                Refused::Failure(Failure::NotOpen(text)) => (Next::Same, Error::Refused(text)),
                Refused::Failure(
                    other @ (Failure::Never(_) | Failure::Unregistered(_) | Failure::Lost(_)),
                ) => return Err(other.into_error()),
            };
            may_help |= next != Next::Unknown;
            let all = (0..gateways.len()).map(|step| (at + step) % gateways.len());
            let other = all.filter(|gateway| !asked.contains(gateway)).min_by_key(|gateway| {
                // The named one first.
                next != Next::Named(*gateway)
            });
            match other.filter(|_| next != Next::Same) {
                Some(other) => at = other,
                None => {
                    if !may_help || !pace.pause().await {
                        return Err(error);
                    }
                    at = match next {
                        Next::Named(named) => named,
                        Next::Other | Next::Unknown => gateways.after(at),
                        Next::Same => at,
                    };
                    (asked, may_help) = (OrdSet::new(), false);
                }
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

/// Whom to give a refused order next.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Next {
    /// The gateway of the leader that the refusal names.
    Named(usize),
    /// Another one.
    Other,
    /// Another one, although the refusal names a leader: no endpoint belongs to it.
    Unknown,
    /// The same, after a pause.
    Same,
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
