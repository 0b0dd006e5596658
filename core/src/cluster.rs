//! The placement of a cluster: nodes in regions, partitions of the key space, replicas and
//! preferred leaders.

use std::fmt;

use crate::id::{NodeId, PartitionId, RegionId, ShareId};
use crate::key::mix;
use crate::ordered::{OrdMap, OrdSet};
use crate::topology::Topology;
use crate::txn::Key;

/// The role of a node.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Role {
    /// Holds replicas.
    Server,
    /// Runs the client side of the protocol for clients in its region.
    Gateway,
}

/// One node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Node {
    /// Its id.
    pub id: NodeId,
    /// Its region.
    pub region: RegionId,
    /// Its role.
    pub role: Role,
}

/// One partition and its initial replicas. Later changes of members are known only to the group
/// itself; the placement says where to look first.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Partition {
    /// Its id.
    pub id: PartitionId,
    /// Servers that hold a replica: 2f + 1 of them, in different regions where possible.
    pub replicas: Vec<NodeId>,
    /// The replica that should lead whenever it can.
    pub preferred_leader: NodeId,
}

/// How keys map to partitions.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Partitioning {
    /// Consistent hashing: each partition owns many arcs of a ring. Keys with the same text in
    /// their first braces, such as `savings{17}` and `checking{17}`, are in the same partition.
    Hash {
        /// End and owner of each arc, sorted.
        ring: Vec<(u64, PartitionId)>,
        /// For each of [`PIECES`] equal pieces of the ring, the first arc that ends in it or later.
        firsts: Vec<u32>,
    },
    /// Explicit ranges: each begins at its key and ends before the next one. The first begins at
    /// the empty key.
    Range {
        /// Start and owner of each range, sorted.
        starts: Vec<(Key, PartitionId)>,
    },
}

/// Arcs of the hash ring for each partition: enough that the partitions' sizes differ by only a few
/// per cent.
const ARCS: u64 = 256;

/// Pieces of the hash ring, as a power of two: with a few partitions more than there are arcs, so that a
/// search looks at one or two arcs.
const PIECES_BITS: u32 = 12;

/// The same as a number.
pub const PIECES: usize = 1 << PIECES_BITS;

impl Partitioning {
    /// Consistent hashing over `partitions`.
    #[must_use]
    pub fn hash(partitions: impl IntoIterator<Item = PartitionId>) -> Self {
        let mut ring: Vec<(u64, PartitionId)> = partitions
            .into_iter()
            .flat_map(|partition| {
                (0..ARCS).map(move |arc| (mix((u64::from(partition.0) << 32) | arc), partition))
            })
            .collect();
        ring.sort_unstable();
        let first = |piece| ring.partition_point(|&(end, _)| end >> (64 - PIECES_BITS) < piece);
        let firsts =
            (0..PIECES as u64).map(|piece| u32::try_from(first(piece)).unwrap_or(u32::MAX));
        Self::Hash { firsts: firsts.collect(), ring }
    }

    /// The partition that holds `key`.
    #[must_use]
    pub fn partition_of(&self, key: &Key) -> PartitionId {
        match self {
            Self::Hash { ring, firsts } => {
                let at = key.place();
                let piece = usize::try_from(at >> (64 - PIECES_BITS)).unwrap_or(0);
                let first = firsts.get(piece).map_or(0, |&first| first as usize);
                let arcs = ring.get(first..).unwrap_or_default();
                let next = arcs.iter().find(|&&(end, _)| end >= at).or_else(|| ring.first());
                next.map_or(PartitionId(0), |&(_, owner)| owner)
            }
            Self::Range { starts } => {
                let next = starts.partition_point(|(start, _)| start <= key);
                let owner = next.checked_sub(1).and_then(|at| starts.get(at));
                owner.map_or(PartitionId(0), |&(_, owner)| owner)
            }
        }
    }
}

/// The topology and placement of one cluster. Fixed during one epoch, and shared by all machines.
#[derive(Clone, PartialEq, Eq)]
pub struct Cluster {
    /// The regions, and the round trips between them.
    pub topology: Topology,
    /// The number of this placement, increased by every change. Nodes refuse messages of another
    /// epoch.
    pub epoch: u64,
    nodes: OrdMap<NodeId, Node>,
    partitions: OrdMap<PartitionId, Partition>,
    partitioning: Partitioning,
    /// The number of shares into which each region's copy of the data is divided.
    shares: u32,
    /// The servers with which partitions began that are on other servers in this epoch.
    founders: OrdMap<PartitionId, Vec<NodeId>>,
}

impl fmt::Debug for Cluster {
    /// As derived, without the founders: nodes compare this text, and only a node that has data knows
    /// founders.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { topology, epoch, nodes, partitions, partitioning, shares, founders: _ } = self;
        f.debug_struct("Cluster")
            .field("topology", topology)
            .field("epoch", epoch)
            .field("nodes", nodes)
            .field("partitions", partitions)
            .field("partitioning", partitioning)
            .field("shares", shares)
            .finish()
    }
}

/// The definition of a cluster contradicts itself.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClusterError {
    /// Two nodes have the same id.
    #[error("node {0} is listed twice; give each node an id of its own")]
    DuplicateNode(NodeId),
    /// A node is in a region that the topology does not have.
    #[error("node {0} is in {1}, which the topology does not have")]
    UnknownRegion(NodeId, RegionId),
    /// Two partitions have the same id.
    #[error("partition {0} is listed twice")]
    DuplicatePartition(PartitionId),
    /// A replica is on a node that is not a server of this cluster.
    #[error("partition {0} has a replica on {1}, which is not a server of this cluster")]
    UnknownReplica(PartitionId, NodeId),
    /// The number of replicas is even or zero, or one node holds two of them.
    #[error("partition {0} has {1} replicas; it needs an odd number of different nodes (2f + 1)")]
    ReplicaCount(PartitionId, usize),
    /// The preferred leader holds no replica.
    #[error("partition {0} prefers {1} as leader, which holds no replica of it")]
    Leader(PartitionId, NodeId),
    /// The partitioning names a partition that does not exist, or no partition owns the start of
    /// the key space.
    #[error("the key space is not covered: {0}")]
    KeySpace(String),
    /// A region has too few servers for all shares.
    #[error(
        "{shares} shares need {wanted} servers in each region that has any; {region} has {servers}"
    )]
    Shares {
        /// The number of shares.
        shares: u32,
        /// The number of servers that they need.
        wanted: u32,
        /// The region.
        region: RegionId,
        /// The number of its servers.
        servers: u32,
    },
    /// There are fewer nodes than replicas.
    #[error("{wanted} replicas of each partition need {wanted} servers; there are {have}")]
    TooFewServers {
        /// The number of replicas.
        wanted: usize,
        /// The number of servers.
        have: usize,
    },
}

impl Cluster {
    /// Builds a cluster and checks it.
    ///
    /// # Errors
    /// The first contradiction found.
    pub fn new(
        topology: Topology,
        epoch: u64,
        nodes: impl IntoIterator<Item = Node>,
        partitions: impl IntoIterator<Item = Partition>,
        partitioning: Partitioning,
    ) -> Result<Self, ClusterError> {
        let mut cluster = Self {
            topology,
            epoch,
            nodes: OrdMap::new(),
            partitions: OrdMap::new(),
            partitioning,
            shares: 1,
            founders: OrdMap::new(),
        };
        for node in nodes {
            if usize::from(node.region.0) >= cluster.topology.len() {
                return Err(ClusterError::UnknownRegion(node.id, node.region));
            }
            if cluster.nodes.insert(node.id, node).is_some() {
                return Err(ClusterError::DuplicateNode(node.id));
            }
        }
        for partition in partitions {
            cluster.check(&partition)?;
            let id = partition.id;
            if cluster.partitions.insert(id, partition).is_some() {
                return Err(ClusterError::DuplicatePartition(id));
            }
        }
        cluster.check_key_space()?;
        Ok(cluster)
    }

    fn check(&self, partition: &Partition) -> Result<(), ClusterError> {
        let distinct: OrdSet<NodeId> = partition.replicas.iter().copied().collect();
        if distinct.len() != partition.replicas.len() || distinct.len().is_multiple_of(2) {
            return Err(ClusterError::ReplicaCount(partition.id, partition.replicas.len()));
        }
        for &replica in &distinct {
            if self.nodes.get(&replica).is_none_or(|node| node.role != Role::Server) {
                return Err(ClusterError::UnknownReplica(partition.id, replica));
            }
        }
        if !distinct.contains(&partition.preferred_leader) {
            return Err(ClusterError::Leader(partition.id, partition.preferred_leader));
        }
        Ok(())
    }

    /// True if the node is one of the servers.
    #[must_use]
    pub fn is_server(&self, node: NodeId) -> bool {
        self.nodes.get(&node).is_some_and(|node| node.role == Role::Server)
    }

    /// Gives a partition other replicas, as its group has decided. A partition that does not exist is
    /// ignored.
    pub fn place(&mut self, id: PartitionId, replicas: Vec<NodeId>) {
        let Some(partition) = self.partitions.get_mut(&id) else { return };
        if let Some(&first) = replicas.first() {
            partition.preferred_leader = first;
        }
        partition.replicas = replicas;
    }

    fn check_key_space(&self) -> Result<(), ClusterError> {
        let owners: Vec<PartitionId> = match &self.partitioning {
            Partitioning::Hash { ring, .. } => ring.iter().map(|&(_, owner)| owner).collect(),
            Partitioning::Range { starts } => {
                if starts.first().is_none_or(|(start, _)| !start.is_empty()) {
                    return Err(ClusterError::KeySpace(
                        "the first range must start at the empty key".into(),
                    ));
                }
                if !starts.is_sorted_by(|(a, _), (b, _)| a < b) {
                    return Err(ClusterError::KeySpace(
                        "ranges must start in ascending order".into(),
                    ));
                }
                starts.iter().map(|&(_, owner)| owner).collect()
            }
        };
        if owners.is_empty() {
            return Err(ClusterError::KeySpace("there are no partitions".into()));
        }
        match owners.into_iter().find(|owner| !self.partitions.contains_key(owner)) {
            Some(owner) => Err(ClusterError::KeySpace(format!("{owner} does not exist"))),
            None => Ok(()),
        }
    }

    /// The placement of the papers: `partitions` partitions with `replicas` replicas each.
    /// Partition i prefers a leader in region i (modulo the number of regions), and its other
    /// replicas are in the following regions. So each region leads and holds about the same number
    /// of partitions. Servers have the first ids, region by region; gateways follow.
    ///
    /// # Errors
    /// If there are fewer servers than replicas, or the number of replicas is even.
    pub fn spread(
        topology: Topology,
        servers_per_region: u32,
        gateways_per_region: u32,
        partitions: u32,
        replicas: u32,
    ) -> Result<Self, ClusterError> {
        let regions: Vec<RegionId> = topology.regions().collect();
        let mut nodes = Vec::new();
        let mut next = 1;
        for (role, count) in
            [(Role::Server, servers_per_region), (Role::Gateway, gateways_per_region)]
        {
            for &region in &regions {
                for _ in 0..count {
                    nodes.push(Node { id: NodeId(next), region, role });
                    next += 1;
                }
            }
        }
        Self::spread_over(topology, 1, nodes, partitions, replicas)
    }

    /// The same placement over the given nodes. Regions without servers are skipped.
    ///
    /// # Errors
    /// If there are fewer servers than replicas, the number of replicas is even, or the nodes
    /// contradict each other.
    pub fn spread_over(
        topology: Topology,
        epoch: u64,
        nodes: Vec<Node>,
        partitions: u32,
        replicas: u32,
    ) -> Result<Self, ClusterError> {
        let servers = || nodes.iter().filter(|node| node.role == Role::Server);
        let regions: OrdSet<RegionId> = servers().map(|node| node.region).collect();
        let regions: Vec<RegionId> = regions.into_iter().collect();
        let (wanted, have) = (replicas as usize, servers().count());
        if wanted > have || have == 0 {
            return Err(ClusterError::TooFewServers { wanted, have });
        }
        let mut load: OrdMap<NodeId, usize> = OrdMap::new();
        let mut placed = Vec::new();
        for partition in 0..partitions {
            let mut holders: Vec<NodeId> = Vec::new();
            for step in 0..replicas {
                let at = (partition as usize + step as usize) % regions.len();
                let Some(&region) = regions.get(at) else { continue };
                let free =
                    servers().filter(|node| node.region == region && !holders.contains(&node.id));
                let least = free.map(|n| (load.get(&n.id).copied().unwrap_or(0), n.id)).min();
                if let Some((_, id)) = least {
                    *load.entry(id).or_default() += 1;
                    holders.push(id);
                }
            }
            let leader = holders.first().copied().unwrap_or_default();
            let id = PartitionId(partition);
            placed.push(Partition { id, replicas: holders, preferred_leader: leader });
        }
        let partitioning = Partitioning::hash((0..partitions).map(PartitionId));
        Self::new(topology, epoch, nodes, placed, partitioning)
    }

    /// The same cluster, with each region's copy of the data divided into `shares` shares. The
    /// servers of a region hold the shares in turn. This is for protocols that keep a complete copy
    /// in each region.
    ///
    /// # Errors
    /// If there are no shares, or a region has too few servers for all of them.
    pub fn divided(self, shares: u32) -> Result<Self, ClusterError> {
        let regions = self.servers_by_region();
        // Each share needs a second holder: a server that lags far behind copies the state of
        // another server with the same share.
        let wanted =
            if regions.len() == 1 && shares > 1 { shares.saturating_mul(2) } else { shares.max(1) };
        for (region, servers) in regions {
            let servers = u32::try_from(servers.len()).unwrap_or(u32::MAX);
            if shares == 0 || servers < wanted {
                return Err(ClusterError::Shares { shares, wanted, region, servers });
            }
        }
        Ok(Self { shares, ..self })
    }

    fn servers_by_region(&self) -> OrdMap<RegionId, Vec<NodeId>> {
        let mut servers: OrdMap<RegionId, Vec<NodeId>> = OrdMap::new();
        for server in self.servers() {
            servers.entry(server.region).or_default().push(server.id);
        }
        servers
    }

    /// The number of shares of each region's copy; one unless [`Cluster::divided`] changed it.
    #[must_use]
    pub fn shares(&self) -> u32 {
        self.shares
    }

    /// The share that contains `key`. Keys that are hashed alike are in one share.
    #[must_use]
    pub fn share_of(&self, key: &Key) -> ShareId {
        // The hash is mixed once more, because the ring's arcs, which decide about partitions,
        // group neighbouring hashes.
        let share = mix(key.place()) % u64::from(self.shares.max(1));
        ShareId(u32::try_from(share).unwrap_or_default())
    }

    /// The share that a server holds, and how many earlier servers of its region hold the same
    /// share.
    #[must_use]
    pub fn share_at(&self, server: NodeId) -> (ShareId, u32) {
        let region = self.region_of(server);
        let before = self.servers().filter(|node| node.region == region && node.id < server);
        let place = u32::try_from(before.count()).unwrap_or_default();
        let shares = self.shares.max(1);
        (ShareId(place % shares), place / shares)
    }

    /// Every node, by id.
    pub fn nodes(&self) -> impl Iterator<Item = &Node> {
        self.nodes.values()
    }

    /// Every server, by id.
    pub fn servers(&self) -> impl Iterator<Item = &Node> {
        self.nodes.values().filter(|node| node.role == Role::Server)
    }

    /// Every gateway, by id.
    pub fn gateways(&self) -> impl Iterator<Item = &Node> {
        self.nodes.values().filter(|node| node.role == Role::Gateway)
    }

    /// The node with this id.
    #[must_use]
    pub fn node(&self, id: NodeId) -> Option<&Node> {
        self.nodes.get(&id)
    }

    /// The region of a node; region 0 if the cluster does not have the node.
    #[must_use]
    pub fn region_of(&self, id: NodeId) -> RegionId {
        self.nodes.get(&id).map_or(RegionId(0), |node| node.region)
    }

    /// Every partition, by id.
    pub fn partitions(&self) -> impl Iterator<Item = &Partition> {
        self.partitions.values()
    }

    /// The partition with this id.
    #[must_use]
    pub fn partition(&self, id: PartitionId) -> Option<&Partition> {
        self.partitions.get(&id)
    }

    /// The servers that held the partition in the epoch in which its data began: the first members of
    /// its log. Operators may have moved it since, which its log knows.
    #[must_use]
    pub fn founders(&self, id: PartitionId) -> &[NodeId] {
        let placed = || self.partition(id).map(|placed| &placed.replicas);
        self.founders.get(&id).or_else(placed).map_or(&[], Vec::as_slice)
    }

    /// The same placement, of data that began on these servers. Partitions that are not named began
    /// where they are placed.
    #[must_use]
    pub fn founded(self, founders: OrdMap<PartitionId, Vec<NodeId>>) -> Self {
        Self { founders, ..self }
    }

    /// The partition that holds `key`.
    #[must_use]
    pub fn partition_of(&self, key: &Key) -> PartitionId {
        self.partitioning.partition_of(key)
    }

    /// How keys map to partitions.
    #[must_use]
    pub fn partitioning(&self) -> &Partitioning {
        &self.partitioning
    }

    /// The region of the partition's preferred leader.
    #[must_use]
    pub fn leader_region(&self, partition: PartitionId) -> RegionId {
        self.partitions
            .get(&partition)
            .map_or(RegionId(0), |partition| self.region_of(partition.preferred_leader))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::Duration;

    fn five() -> Topology {
        Topology::uniform(5, Duration::from_micros(500), Duration::from_millis(100))
    }

    #[test]
    fn spread_gives_every_region_one_leader_and_three_replicas() {
        for servers_per_region in [1, 3] {
            let cluster = Cluster::spread(five(), servers_per_region, 1, 5, 3).unwrap();
            let mut leaders = OrdMap::new();
            let mut held = OrdMap::new();
            for partition in cluster.partitions() {
                *leaders.entry(cluster.region_of(partition.preferred_leader)).or_insert(0) += 1;
                let regions: OrdSet<_> =
                    partition.replicas.iter().map(|&node| cluster.region_of(node)).collect();
                assert_eq!(regions.len(), 3, "replicas share a region");
                for &node in &partition.replicas {
                    *held.entry(node).or_insert(0) += 1;
                }
            }
            assert_eq!(leaders.values().copied().collect::<Vec<_>>(), [1; 5]);
            assert_eq!(held.values().sum::<i32>(), 15);
            assert_eq!(held.values().max(), held.values().min(), "servers hold unequal shares");
        }
    }

    #[test]
    fn spread_over_given_nodes_passes_over_regions_without_servers() {
        let node = |id, region, role| Node { id: NodeId(id), region: RegionId(region), role };
        let nodes = vec![
            node(7, 0, Role::Server),
            node(8, 2, Role::Server),
            node(9, 4, Role::Server),
            node(10, 1, Role::Gateway),
        ];
        let cluster = Cluster::spread_over(five(), 3, nodes.clone(), 6, 3).unwrap();
        assert_eq!(cluster.epoch, 3);
        for partition in cluster.partitions() {
            assert_eq!(partition.replicas.len(), 3, "{partition:?}");
        }
        let leaders: Vec<u32> =
            cluster.partitions().map(|partition| partition.preferred_leader.0).collect();
        assert_eq!(leaders, [7, 8, 9, 7, 8, 9]);
        let error = Cluster::spread_over(five(), 1, nodes, 6, 5).unwrap_err();
        assert_eq!(error, ClusterError::TooFewServers { wanted: 5, have: 3 });
    }

    #[test]
    fn keys_with_the_same_part_in_braces_lie_together() {
        let hash = Partitioning::hash((0..5).map(PartitionId));
        let Partitioning::Hash { ring, .. } = &hash else { panic!("{hash:?}") };
        for number in 0..20_000 {
            let key = Key::from(format!("{number}"));
            let next = ring.partition_point(|&(end, _)| end < key.place());
            let arc = ring.get(next).or_else(|| ring.first());
            assert_eq!(Some(hash.partition_of(&key)), arc.map(|arc| arc.1), "{key}");
        }
        let owner = |key: String| hash.partition_of(&Key::from(key));
        let mut seen = crate::ordered::OrdSet::new();
        for user in 0..100 {
            let together = owner(format!("savings{{{user}}}"));
            assert_eq!(owner(format!("checking{{{user}}}")), together);
            seen.insert(together);
        }
        assert_eq!(seen.len(), 5);
    }

    #[test]
    fn hashing_shares_keys_about_equally_and_moves_few_when_a_partition_joins() {
        let before = Partitioning::hash((0..5).map(PartitionId));
        let after = Partitioning::hash((0..6).map(PartitionId));
        let mut share = [0_u32; 5];
        let mut moved = 0;
        for number in 0..20_000 {
            let key = Key::from(format!("user{number}"));
            let owner = before.partition_of(&key);
            share[owner.0 as usize] += 1;
            if after.partition_of(&key) != owner {
                assert_eq!(
                    after.partition_of(&key),
                    PartitionId(5),
                    "a key moved between old owners"
                );
                moved += 1;
            }
        }
        assert!(share.iter().all(|&count| (3_200..4_800).contains(&count)), "{share:?}");
        assert!((2_400..4_400).contains(&moved), "{moved} of 20000 keys moved; a sixth is fair");
    }

    #[test]
    fn ranges_own_from_their_start() {
        let starts = vec![
            (Key::from(""), PartitionId(0)),
            (Key::from("g"), PartitionId(1)),
            (Key::from("t"), PartitionId(2)),
        ];
        let ranges = Partitioning::Range { starts };
        for (key, owner) in [("", 0), ("f", 0), ("g", 1), ("sz", 1), ("t", 2), ("zz", 2)] {
            assert_eq!(ranges.partition_of(&Key::from(key)), PartitionId(owner), "{key}");
        }
    }

    #[test]
    fn contradictions_are_named() {
        let node =
            |id, region| Node { id: NodeId(id), region: RegionId(region), role: Role::Server };
        let partition = |replicas: &[u32], leader| Partition {
            id: PartitionId(0),
            replicas: replicas.iter().copied().map(NodeId).collect(),
            preferred_leader: NodeId(leader),
        };
        let one = || Partitioning::hash([PartitionId(0)]);
        let build = |nodes: Vec<Node>, partitions: Vec<Partition>, keys: Partitioning| {
            Cluster::new(five(), 1, nodes, partitions, keys).unwrap_err().to_string()
        };
        let three = || vec![node(1, 0), node(2, 1), node(3, 2)];
        let cases = [
            (build(vec![node(1, 0), node(1, 1)], vec![], one()), "n1 is listed twice"),
            (build(vec![node(1, 9)], vec![], one()), "r9"),
            (build(three(), vec![partition(&[1, 2], 1)], one()), "odd number"),
            (build(three(), vec![partition(&[1, 2, 4], 1)], one()), "n4"),
            (build(three(), vec![partition(&[1, 2, 3], 5)], one()), "prefers n5"),
            (
                build(
                    three(),
                    vec![partition(&[1, 2, 3], 1)],
                    Partitioning::hash([PartitionId(1)]),
                ),
                "p1",
            ),
            (
                build(
                    three(),
                    vec![partition(&[1, 2, 3], 1)],
                    Partitioning::Range { starts: vec![("a".into(), PartitionId(0))] },
                ),
                "empty key",
            ),
        ];
        for (message, expected) in cases {
            assert!(message.contains(expected), "{message:?} does not contain {expected:?}");
        }
    }

    #[test]
    fn a_region_s_servers_hold_shares_in_turns() {
        let cluster = Cluster::spread(five(), 3, 1, 5, 3).unwrap();
        assert_eq!((cluster.shares(), cluster.share_at(NodeId(3))), (1, (ShareId(0), 2)));
        let cluster = cluster.divided(2).unwrap();
        let at = |id| cluster.share_at(NodeId(id));
        assert_eq!(
            [1, 2, 3, 4].map(at),
            [(ShareId(0), 0), (ShareId(1), 0), (ShareId(0), 1), (ShareId(0), 0)]
        );
        let share = |key: &str| cluster.share_of(&Key::from(key));
        assert_eq!(share("savings{17}"), share("checking{17}"));
        // Shares are independent of partitions, and of about equal size.
        let mut held: OrdMap<(PartitionId, ShareId), usize> = OrdMap::new();
        for number in 0..10_000 {
            let key = Key::from(format!("k{number}"));
            *held.entry((cluster.partition_of(&key), cluster.share_of(&key))).or_default() += 1;
        }
        assert_eq!(held.len(), 10);
        assert!(held.values().all(|keys| (800..1_200).contains(keys)), "{held:?}");
    }

    #[test]
    fn a_share_without_a_server_is_refused() {
        let cluster = Cluster::spread(five(), 2, 1, 5, 3).unwrap();
        let error = cluster.clone().divided(3).unwrap_err().to_string();
        assert!(error.contains("3 shares") && error.contains("has 2"), "{error}");
        assert!(cluster.divided(0).is_err());
        // Each share needs a second holder.
        let one = Topology::uniform(1, Duration::from_micros(500), Duration::from_millis(1));
        let cluster = Cluster::spread(one, 3, 1, 1, 3).unwrap();
        assert!(cluster.divided(2).unwrap_err().to_string().contains("need 4 servers"));
    }
}
