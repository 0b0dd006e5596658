//! Who leads which partition, as far as this node knows.

use std::collections::BTreeMap;
use std::sync::Arc;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{NodeId, PartitionId};
use orthodrome_core::time::Time;

/// A cache of leaders: the placement's preferred leader until something better is known.
#[derive(Debug)]
pub(crate) struct Routes {
    cluster: Arc<Cluster>,
    known: BTreeMap<PartitionId, Route>,
}

#[derive(Clone, Copy, Debug)]
struct Route {
    leader: NodeId,
    /// When the leader was last heard of, or first supposed to be one.
    heard: Time,
    /// This node's own replica knows the leader: its election timer is what doubts.
    is_followed: bool,
}

impl Routes {
    pub(crate) fn new(cluster: Arc<Cluster>) -> Self {
        Self { cluster, known: BTreeMap::new() }
    }

    /// Where to send what is for the leader of `partition`.
    pub(crate) fn leader(&self, partition: PartitionId) -> NodeId {
        self.known.get(&partition).map(|route| route.leader).unwrap_or_else(|| {
            self.cluster.partition(partition).map(|p| p.preferred_leader).unwrap_or_default()
        })
    }

    /// This node holds a replica of `partition`, which knows best who leads, if it knows at all.
    pub(crate) fn follow(&mut self, partition: PartitionId, leader: Option<NodeId>, now: Time) {
        match (leader, self.known.get_mut(&partition)) {
            (Some(leader), Some(route)) => {
                *route = Route { leader, heard: now, is_followed: true };
            }
            (Some(leader), None) => {
                self.known.insert(partition, Route { leader, heard: now, is_followed: true });
            }
            (None, Some(route)) => route.is_followed = false,
            (None, None) => {}
        }
    }

    /// Somebody who should know says that `leader` leads.
    pub(crate) fn learn(&mut self, partition: PartitionId, leader: NodeId, heard: Time) {
        if self.known.get(&partition).is_none_or(|route| !route.is_followed) {
            self.known.insert(partition, Route { leader, heard, is_followed: false });
        }
    }

    /// `from` says that it does not lead `partition`, and who does if it knows. True if what it was
    /// asked should go out again at once: not if it would come back to `from`, which would answer
    /// the same.
    pub(crate) fn redirect(
        &mut self,
        partition: PartitionId,
        from: NodeId,
        leader: Option<NodeId>,
        now: Time,
    ) -> bool {
        if let Some(leader) = leader {
            self.learn(partition, leader, now);
        } else if self.leader(partition) == from {
            self.try_next(partition, now);
        }
        leader.is_some() && self.leader(partition) != from
    }

    /// The supposed leader of `partition` was asked something at `asked` and has not answered: try
    /// the next replica, unless it was heard of since, or has only been supposed since.
    pub(crate) fn suspect(&mut self, partition: PartitionId, asked: Time, now: Time) {
        if self.known.get(&partition).is_none_or(|route| route.heard < asked) {
            self.try_next(partition, now);
        }
    }

    fn try_next(&mut self, partition: PartitionId, now: Time) {
        let silent = self.leader(partition);
        let Some(placed) = self.cluster.partition(partition) else { return };
        let at = placed.replicas.iter().position(|&node| node == silent).map_or(0, |at| at + 1);
        if let Some(&next) = placed.replicas.get(at).or_else(|| placed.replicas.first()) {
            self.learn(partition, next, now);
        }
    }
}
