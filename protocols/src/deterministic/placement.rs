//! The stream of each key.

use std::sync::Arc;

use orthodrome_core::cluster::{Cluster, Partition};
use orthodrome_core::id::{NodeId, PartitionId, RegionId, ShareId};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::time::Duration;
use orthodrome_core::txn::Key;

use super::{Orderer, Ordering};
use crate::functor::Functor;

/// The stream of an orderer that belongs to no partition.
const APART: PartitionId = PartitionId(u32::MAX - 1);

/// The streams, and the primary of every key: the region in which its partition prefers to be led.
/// A stream has the name of one of its partitions, whose replicas vote in its log.
#[derive(Clone, Debug)]
pub struct Placement {
    cluster: Arc<Cluster>,
    /// The stream of each partition.
    streams: OrdMap<PartitionId, PartitionId>,
    /// The stream that orders transactions with several homes, if there is one (`slog`).
    orderer: Option<PartitionId>,
    /// The voters of an orderer that belongs to no partition; the first prefers to lead.
    central: Vec<NodeId>,
    /// The share of all values that this node holds.
    share: ShareId,
}

impl Placement {
    /// One stream for each region that some partition prefers; or one for all.
    #[must_use]
    pub fn new(cluster: Arc<Cluster>, ordering: Ordering) -> Self {
        let mut first: OrdMap<Option<RegionId>, PartitionId> = OrdMap::new();
        let mut streams = OrdMap::new();
        for partition in cluster.partitions() {
            let region = match ordering {
                Ordering::Global => None,
                Ordering::Regional | Ordering::Ordered(_) => {
                    Some(cluster.region_of(partition.preferred_leader))
                }
            };
            let stream = *first.entry(region).or_insert(partition.id);
            streams.insert(partition.id, stream);
        }
        let orderer = match ordering {
            // With one stream no transaction has several homes.
            Ordering::Ordered(_) if first.len() < 2 => None,
            Ordering::Ordered(Orderer::Region) => streams.values().min().copied(),
            Ordering::Ordered(Orderer::Consensus) => Some(APART),
            Ordering::Global | Ordering::Regional => None,
        };
        let central = central(&cluster);
        Self { cluster, streams, orderer, central, share: ShareId::default() }
    }

    /// The same, from the view of `server`.
    #[must_use]
    pub fn seen_by(self, server: NodeId) -> Self {
        let (share, _) = self.cluster.share_at(server);
        Self { share, ..self }
    }

    /// The share of all values that this node holds.
    #[must_use]
    pub fn share(&self) -> ShareId {
        self.share
    }

    /// The number of shares; 0 if values are not divided.
    #[must_use]
    pub fn share_count(&self) -> u32 {
        if self.is_divided() { self.cluster.shares() } else { 0 }
    }

    /// True if not every server holds all values.
    #[must_use]
    pub fn is_divided(&self) -> bool {
        self.cluster.shares() > 1
    }

    /// True if this node holds the value of `key`.
    #[must_use]
    pub fn holds(&self, key: &Key) -> bool {
        !self.is_divided() || self.cluster.share_of(key) == self.share
    }

    /// The shares that a transaction accesses.
    #[must_use]
    pub fn shares(&self, functor: &Functor) -> OrdSet<ShareId> {
        shares(&self.cluster, functor.reads.iter().chain(&functor.writes))
    }

    /// Every stream.
    #[must_use]
    pub fn streams(&self) -> OrdSet<PartitionId> {
        self.streams.values().copied().chain(self.orderer).collect()
    }

    /// The stream that orders transactions with several homes before those homes do, if there is
    /// one.
    #[must_use]
    pub fn orderer(&self) -> Option<PartitionId> {
        self.orderer
    }

    /// The voters of a stream's log, and the one that prefers to lead it.
    #[must_use]
    pub fn voters(&self, stream: PartitionId) -> (Vec<NodeId>, Option<NodeId>) {
        if stream == APART {
            return (self.central.clone(), self.central.first().copied());
        }
        let placed = self.cluster.partition(stream);
        let voters = placed.map(|placed| placed.replicas.clone()).unwrap_or_default();
        (voters, placed.map(|placed| placed.preferred_leader))
    }

    /// Every partition, with its stream.
    pub fn partitions(&self) -> impl Iterator<Item = (PartitionId, PartitionId)> + '_ {
        self.streams.iter().map(|(&partition, &stream)| (partition, stream))
    }

    /// The partition of a key.
    #[must_use]
    pub fn partition_of(&self, key: &Key) -> PartitionId {
        self.cluster.partition_of(key)
    }

    /// The stream that orders accesses to `key`.
    #[must_use]
    pub fn stream_of(&self, key: &Key) -> PartitionId {
        self.streams.get(&self.partition_of(key)).copied().unwrap_or_default()
    }

    /// The streams of a transaction, in order, if its keys are ordered by these.
    #[must_use]
    pub fn homes(&self, streams: impl Iterator<Item = PartitionId>) -> Vec<PartitionId> {
        let mut homes: OrdSet<PartitionId> = streams.collect();
        if homes.len() > 1 {
            homes.extend(self.orderer);
        }
        homes.into_iter().collect()
    }

    /// The region of a stream's primaries.
    #[must_use]
    pub fn region_of(&self, stream: PartitionId) -> RegionId {
        self.cluster.leader_region(stream)
    }

    /// The stream of the keys with their primary in `region`, if there are any.
    #[must_use]
    pub fn stream_in(&self, region: RegionId) -> Option<PartitionId> {
        self.streams.values().copied().find(|&stream| self.region_of(stream) == region)
    }
}

/// The shares of these keys.
pub(super) fn shares<'a>(
    cluster: &Cluster,
    keys: impl Iterator<Item = &'a Key>,
) -> OrdSet<ShareId> {
    keys.map(|key| cluster.share_of(key)).collect()
}

/// The voters of a common orderer: the replicas of one partition, beginning with the one nearest to
/// all regions.
fn central(cluster: &Cluster) -> Vec<NodeId> {
    let far = |node: NodeId| -> Duration {
        let region = cluster.region_of(node);
        cluster.topology.regions().map(|other| cluster.topology.rtt(region, other)).sum()
    };
    let nearest =
        |partition: &Partition| partition.replicas.iter().map(|&node| (far(node), node)).min();
    let placed = cluster.partitions().min_by_key(|partition| (nearest(partition), partition.id));
    let mut voters = placed.map(|placed| placed.replicas.clone()).unwrap_or_default();
    voters.sort_by_key(|&node| (far(node), node));
    voters
}
