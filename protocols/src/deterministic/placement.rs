//! Which keys belong to which stream.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{PartitionId, RegionId};
use orthodrome_core::txn::Key;

use super::Ordering;
use crate::functor::Functor;

/// The streams, and the primary of every key: the region in which its partition prefers to be led. A
/// stream goes by the name of one of its partitions, whose replicas vote in its log.
#[derive(Clone, Debug)]
pub struct Placement {
    cluster: Arc<Cluster>,
    /// The stream of each partition.
    streams: BTreeMap<PartitionId, PartitionId>,
}

impl Placement {
    /// One stream for each region that is preferred by a partition; or one for all.
    #[must_use]
    pub fn new(cluster: Arc<Cluster>, ordering: Ordering) -> Self {
        let mut first: BTreeMap<Option<RegionId>, PartitionId> = BTreeMap::new();
        let mut streams = BTreeMap::new();
        for partition in cluster.partitions() {
            let region = match ordering {
                Ordering::Global => None,
                Ordering::Regional => Some(cluster.region_of(partition.preferred_leader)),
            };
            let stream = *first.entry(region).or_insert(partition.id);
            streams.insert(partition.id, stream);
        }
        Self { cluster, streams }
    }

    /// Every stream.
    #[must_use]
    pub fn streams(&self) -> BTreeSet<PartitionId> {
        self.streams.values().copied().collect()
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

    /// The stream that orders who touches `key`.
    #[must_use]
    pub fn stream_of(&self, key: &Key) -> PartitionId {
        self.streams.get(&self.partition_of(key)).copied().unwrap_or_default()
    }

    /// The streams that a transaction must be in, in order.
    #[must_use]
    pub fn homes(&self, functor: &Functor) -> Vec<PartitionId> {
        let keys = functor.reads.iter().chain(&functor.writes);
        let homes: BTreeSet<PartitionId> = keys.map(|key| self.stream_of(key)).collect();
        homes.into_iter().collect()
    }
}
