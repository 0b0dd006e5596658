//! Who leads which partition, as far as this node knows.

use std::collections::BTreeMap;
use std::sync::Arc;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{NodeId, PartitionId};

/// A cache of leaders: the placement's preferred leader until something better is known.
#[derive(Debug)]
pub(super) struct Routes {
    cluster: Arc<Cluster>,
    known: BTreeMap<PartitionId, NodeId>,
}

impl Routes {
    pub(super) fn new(cluster: Arc<Cluster>) -> Self {
        Self { cluster, known: BTreeMap::new() }
    }

    /// Where to send what is for the leader of `partition`.
    pub(super) fn leader(&self, partition: PartitionId) -> NodeId {
        self.known.get(&partition).copied().unwrap_or_else(|| {
            self.cluster.partition(partition).map(|p| p.preferred_leader).unwrap_or_default()
        })
    }

    /// Somebody says that `leader` leads.
    pub(super) fn learn(&mut self, partition: PartitionId, leader: NodeId) {
        self.known.insert(partition, leader);
    }

    /// The supposed leader did not answer, or says that it does not lead and knows no better: try
    /// the next replica, unless a better one has been learnt since.
    pub(super) fn suspect(&mut self, partition: PartitionId, silent: NodeId) {
        if self.leader(partition) != silent {
            return;
        }
        let Some(placed) = self.cluster.partition(partition) else { return };
        let at = placed.replicas.iter().position(|&node| node == silent).map_or(0, |at| at + 1);
        let next = placed.replicas.get(at).or_else(|| placed.replicas.first());
        if let Some(&next) = next {
            self.known.insert(partition, next);
        }
    }
}
