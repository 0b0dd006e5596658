//! Reports of servers, the watermarks that follow from them, and the members of the cluster.
//!
//! A watermark is a promise about timestamps: below the *visibility* watermark, every timestamp
//! that was ever assigned is decided, and none will be assigned. A true promise stays true, so a
//! node keeps the maximum of the watermarks that it sees ([`Watermarks::adopt`]), whatever happens
//! to the servers that contributed. The difficult part is the minimum from which watermarks are
//! computed ([`least`]): it is over *all* members of one epoch, from reports of that epoch, and an
//! unknown report counts as minus infinity (V8). Members change one at a time, each change begins a
//! new epoch, and reports of two epochs are never combined.

use std::fmt;

use orthodrome_core::Wire;
use orthodrome_core::id::{NodeId, PartitionId};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::time::Timestamp;

/// The report of one server. All its parts are of one moment.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Report {
    /// The server.
    pub server: NodeId,
    /// The incarnation of the server.
    pub incarnation: u32,
    /// The epoch of the members that the server knew, and of which it considered itself one.
    pub epoch: u64,
    /// Every timestamp below this that the server assigned is decided, and it will assign none
    /// below this.
    pub svw: Timestamp,
    /// For each partition: all active replicas have the versions that the server decided below
    /// this. [`Report::svw`] for a partition that is not listed.
    pub srw: OrdMap<PartitionId, Timestamp>,
    /// The server needs no version that is replaced by a version at or below this.
    pub sgw: Timestamp,
}

/// The watermarks that follow from the reports of all members.
#[derive(Clone, PartialEq, Eq, Debug, Default, Wire)]
pub struct Watermarks {
    /// The latest epoch from which a part was computed. A node that uses these watermarks must know
    /// the members of this epoch: servers that left before it may have left versions that some
    /// replicas lack.
    pub epoch: u64,
    /// Every timestamp below this that was ever assigned is decided, and none will ever be
    /// assigned.
    pub visible: Timestamp,
    /// For each partition: each active replica has what was decided below this.
    pub replicated: OrdMap<PartitionId, Timestamp>,
    /// No server needs a version that is replaced by a version at or below this.
    pub collectable: Timestamp,
}

/// The members of the cluster in one epoch.
#[derive(Clone, PartialEq, Eq, Debug, Default, Wire)]
pub struct Members {
    /// The number of the epoch, which counts changes.
    pub epoch: u64,
    /// Every server of the cluster.
    pub servers: OrdMap<NodeId, Member>,
}

/// One server among the members.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Wire)]
pub struct Member {
    /// The incarnation; 0 if the server has not participated yet.
    pub incarnation: u32,
    /// Whether this incarnation participates.
    pub status: Status,
    /// The first incarnation with the current disk; 0 for the first disk. Acknowledgements of
    /// earlier disks may be lost.
    pub disk: u32,
}

/// Whether an incarnation of a server participates.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Wire)]
pub enum Status {
    /// The server assigns timestamps while it has a lease, and every watermark waits for its
    /// reports.
    Active,
    /// The server assigns no timestamps any more, but its undecided ones are not known yet:
    /// watermarks do not move.
    Fenced {
        /// The server that takes over and decides them.
        by: NodeId,
    },
    /// All timestamps of the server are decided.
    Out,
}

impl Members {
    /// The active servers with their incarnations.
    pub fn active(&self) -> impl Iterator<Item = (NodeId, u32)> + '_ {
        let servers = self.servers.iter();
        servers.filter(|(_, m)| m.status == Status::Active).map(|(&id, m)| (id, m.incarnation))
    }

    /// True if this incarnation of `server` is active.
    #[must_use]
    pub fn is_active(&self, server: NodeId, incarnation: u32) -> bool {
        let member = self.servers.get(&server);
        member.is_some_and(|m| m.incarnation == incarnation && m.status == Status::Active)
    }

    /// The disk of a server ([`Member::disk`]).
    #[must_use]
    pub fn disk(&self, server: NodeId) -> u32 {
        self.servers.get(&server).map_or(0, |member| member.disk)
    }

    /// Servers whose last incarnation has ended, and has left undecided timestamps.
    pub fn fenced(&self) -> impl Iterator<Item = (NodeId, u32)> + '_ {
        let is_fenced = |m: &Member| matches!(m.status, Status::Fenced { .. });
        self.servers.iter().filter(move |(_, m)| is_fenced(m)).map(|(&id, m)| (id, m.incarnation))
    }

    /// True if no server is fenced. Then a minimum over the active members covers all servers that
    /// may have undecided timestamps.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        !self.servers.values().any(|m| matches!(m.status, Status::Fenced { .. }))
    }

    /// The highest incarnation of `server` whose timestamps are all decided: the current one if it
    /// is out, otherwise the previous one.
    #[must_use]
    pub fn settled_through(&self, server: NodeId) -> u32 {
        self.servers.get(&server).map_or(0, |member| match member.status {
            Status::Out => member.incarnation,
            Status::Active | Status::Fenced { .. } => member.incarnation.saturating_sub(1),
        })
    }

    /// Adopts the members of a later epoch; true if they were later.
    pub fn adopt(&mut self, other: &Self) -> bool {
        let is_later = other.epoch > self.epoch;
        if is_later {
            self.clone_from(other);
        }
        is_later
    }
}

/// The minimum; none if there is no value, or if one is unknown.
#[must_use]
pub fn least(all: impl IntoIterator<Item = Option<Timestamp>>) -> Option<Timestamp> {
    let mut all = all.into_iter();
    let first = all.next().flatten()?;
    all.try_fold(first, |least, next| next.map(|next| least.min(next)))
}

impl Watermarks {
    /// Adopts larger watermarks; true if any was larger.
    pub fn adopt(&mut self, other: &Self) -> bool {
        let mut has_moved = raise(&mut self.visible, other.visible);
        has_moved |= raise(&mut self.collectable, other.collectable);
        for (&partition, &at) in &other.replicated {
            has_moved |= raise(self.replicated.entry(partition).or_default(), at);
        }
        if other.epoch > self.epoch {
            self.epoch = other.epoch;
            has_moved = true;
        }
        has_moved
    }

    /// The watermark up to which every active replica of `partition` has everything.
    #[must_use]
    pub fn replicated(&self, partition: PartitionId) -> Timestamp {
        self.replicated.get(&partition).copied().unwrap_or_default()
    }
}

/// Raises a watermark, never lowers it; true if it changed.
fn raise(held: &mut Timestamp, to: Timestamp) -> bool {
    let has_moved = to > *held;
    *held = to.max(*held);
    has_moved
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Active => f.write_str("active"),
            Self::Fenced { by } => write!(f, "fenced by {by}"),
            Self::Out => f.write_str("out"),
        }
    }
}

impl fmt::Display for Members {
    /// `e7 n1.2 active, n2.1 fenced by n1`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "e{}", self.epoch)?;
        for (at, (server, member)) in self.servers.iter().enumerate() {
            let comma = if at == 0 { "" } else { "," };
            write!(f, "{comma} {server}.{} {}", member.incarnation, member.status)?;
        }
        Ok(())
    }
}

impl fmt::Display for Watermarks {
    /// `e7 visible @9 collectable @4 p0@7`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "e{} visible {} collectable {}", self.epoch, self.visible, self.collectable)?;
        self.replicated.iter().try_for_each(|(partition, at)| write!(f, " {partition}{at}"))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_least_waits_for_everybody_and_of_nobody_there_is_none() {
        assert_eq!(least([]), None);
        assert_eq!(least([None, Some(Timestamp(3))]), None);
        assert_eq!(least([Some(Timestamp(3)), None]), None);
        assert_eq!(least([5, 3, 4].map(|at| Some(Timestamp(at)))), Some(Timestamp(3)));
    }

    fn watermarks() -> impl Strategy<Value = Watermarks> {
        let replicated = proptest::collection::btree_map(0..3_u32, 0..9_u64, 0..4);
        (0..4_u64, 0..9_u64, replicated, 0..9_u64).prop_map(|(epoch, visible, of, collectable)| {
            let of = of.into_iter().map(|(p, at)| (PartitionId(p), Timestamp(at)));
            Watermarks {
                epoch,
                visible: Timestamp(visible),
                replicated: of.collect(),
                collectable: Timestamp(collectable),
            }
        })
    }

    proptest! {
        #[test]
        fn adopting_forgets_nothing_and_order_does_not_matter(a in watermarks(), b in watermarks()) {
            let (mut ab, mut ba) = (a.clone(), b.clone());
            let moved = ab.adopt(&b);
            ba.adopt(&a);
            prop_assert_eq!(&ab, &ba);
            prop_assert!(!ab.clone().adopt(&a) && !ab.clone().adopt(&b));
            prop_assert!(moved || ab.visible == a.visible && ab.epoch == a.epoch);
            prop_assert_eq!(ab.visible, a.visible.max(b.visible));
            for p in (0..3).map(PartitionId) {
                prop_assert_eq!(ab.replicated(p), a.replicated(p).max(b.replicated(p)));
            }
        }
    }

    #[test]
    fn a_life_is_settled_when_it_is_out_or_another_follows() {
        let of = |incarnation, status| Member { incarnation, status, disk: 0 };
        let fenced = Status::Fenced { by: NodeId(1) };
        let mut members = Members { epoch: 3, servers: OrdMap::new() };
        members.servers.insert(NodeId(1), of(2, Status::Active));
        members.servers.insert(NodeId(2), of(2, Status::Out));
        assert!(members.is_settled());
        members.servers.insert(NodeId(3), of(4, fenced));
        assert!(!members.is_settled());
        assert_eq!([1, 2, 3, 4].map(|n| members.settled_through(NodeId(n))), [1, 2, 3, 0]);
        assert_eq!(members.active().collect::<Vec<_>>(), [(NodeId(1), 2)]);
        assert!(members.is_active(NodeId(1), 2) && !members.is_active(NodeId(1), 1));
        assert_eq!(members.to_string(), "e3 n1.2 active, n2.2 out, n3.4 fenced by n1");
    }
}
