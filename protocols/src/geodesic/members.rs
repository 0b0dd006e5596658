//! The members of a partition's group, which an operator may change (D17).
//!
//! One member at a time leaves, and another server takes its place. Each such step is an *epoch*: the
//! members of one epoch decide on those of the next, in a register of their own. A server that knows
//! the next epoch takes no message of an earlier one: it answers with the members.

use std::sync::Arc;

use orthodrome_core::Wire;
use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{NodeId, PartitionId};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::time::{Duration, Time};

use super::message::Ballot;

/// The members of one partition in one epoch. The members of epoch 0 are those of the placement.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Members {
    /// The number of the epoch, from 1.
    pub epoch: u64,
    /// The members.
    pub nodes: Vec<NodeId>,
    /// The one of them that became a member last, if any did. It copies the partition before it takes
    /// part.
    pub newest: Option<NodeId>,
    /// The members that an operator has ordered. Until they are reached, epochs follow each other.
    pub target: Vec<NodeId>,
}

impl Members {
    /// True if the partition may have these members: as many servers as it has replicas.
    #[must_use]
    pub fn fit(&self, cluster: &Cluster, partition: PartitionId) -> bool {
        let placed = cluster.partition(partition);
        let is_size = placed.is_some_and(|placed| placed.replicas.len() == self.nodes.len());
        let is_member = self.newest.is_none_or(|newest| self.nodes.contains(&newest));
        is_size && is_member && has_no_twice(&self.nodes)
    }

    /// True if nothing remains to be done.
    #[must_use]
    pub fn are_reached(&self) -> bool {
        is_same(&self.nodes, &self.target)
    }

    /// True if these may follow: one member is replaced, or the same ones have another order.
    #[must_use]
    pub fn follow(&self, epoch: u64, nodes: &[NodeId], newest: Option<NodeId>) -> bool {
        let is_next = self.epoch == epoch + 1 && self.nodes.len() == nodes.len();
        let mut changed = self.nodes.iter().copied().filter(|node| !nodes.contains(node));
        let is_step = match (changed.next(), changed.next()) {
            (None, _) => self.newest == newest,
            (incoming, None) => self.newest == incoming,
            (Some(_), Some(_)) => false,
        };
        is_next && is_step && has_no_twice(&self.nodes)
    }

    /// The members after these, on the way to `target`: `newest` takes the place of `leaves`.
    #[must_use]
    pub fn after(
        (epoch, nodes): (u64, &[NodeId]),
        (leaves, newest): (NodeId, NodeId),
        target: &[NodeId],
    ) -> Self {
        let place = |&node: &NodeId| if node == leaves { newest } else { node };
        let nodes = nodes.iter().map(place).collect();
        Self { epoch: epoch + 1, nodes, newest: Some(newest), target: target.to_vec() }
    }
}

/// The register in which the members of one epoch decide on those of the next, at one of them.
#[derive(Clone, PartialEq, Eq, Debug, Default, Wire)]
pub struct Election {
    /// No ballot below this is accepted any more.
    pub promised: Ballot,
    /// What was accepted last.
    pub accepted: Option<(Ballot, Arc<Members>)>,
}

/// The placement with the servers on which the data of each partition began, and not with those that
/// an operator has written into the file since. These are the members of epoch 0.
#[must_use]
pub fn founded(mut cluster: Arc<Cluster>) -> Arc<Cluster> {
    let began = |id| cluster.founders(id).to_vec();
    let placed: Vec<_> = cluster.partitions().map(|placed| (placed.id, began(placed.id))).collect();
    for (id, founders) in placed {
        if cluster.partition(id).is_some_and(|placed| placed.replicas != founders) {
            Arc::make_mut(&mut cluster).place(id, founders);
        }
    }
    cluster
}

/// Questions to all other servers for the members of a partition. All members that a node knows may have
/// left.
#[derive(Debug, Default)]
pub(super) struct Locating {
    /// When they were asked last.
    asked: OrdMap<PartitionId, Time>,
}

impl Locating {
    /// Whom to ask now: nobody if they were asked less than `pause` ago.
    pub(super) fn whom(
        &mut self,
        (cluster, partition): (&Cluster, PartitionId),
        (now, pause): (Time, Duration),
    ) -> Vec<NodeId> {
        if self.asked.get(&partition).is_some_and(|asked| now.since(*asked) < pause) {
            return Vec::new();
        }
        self.asked.insert(partition, now);
        let others = cluster.servers().map(|server| server.id);
        others.filter(|&node| !is_member(cluster, partition, node)).collect()
    }
}

/// True if the node is a member of the partition.
pub(super) fn is_member(cluster: &Cluster, partition: PartitionId, node: NodeId) -> bool {
    cluster.partition(partition).is_some_and(|placed| placed.replicas.contains(&node))
}

/// True if both have the same nodes.
#[must_use]
pub fn is_same(some: &[NodeId], others: &[NodeId]) -> bool {
    some.len() == others.len() && some.iter().all(|node| others.contains(node))
}

/// True if no node is named twice.
#[must_use]
pub fn has_no_twice(nodes: &[NodeId]) -> bool {
    nodes.iter().enumerate().all(|(at, node)| !nodes.iter().take(at).any(|other| other == node))
}
