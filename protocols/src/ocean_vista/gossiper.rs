//! Computes watermarks from reports (§3.3, §4.2). The gossipers of a region take the minimum of the
//! reports of the region's servers, send it to all gossipers of all regions, and take the minimum
//! over the regions.
//!
//! A [`Gossiper`] knows only what it has received since it started. It publishes nothing until it
//! has received reports of every active member in the current epoch (V8). It needs no lease, and
//! its own server need not be active: its messages follow from reports and contain their epoch.
//!
//! Every report is a permanent promise. So all reports of one server in one epoch hold, and
//! messages may be lost, repeated and reordered. Reports of two epochs are not combined, although
//! each of them holds. A report that was made after a server joined may be above the timestamps of
//! that server, and a gossiper that does not know the server would not wait for it. A node that
//! receives a later epoch first fetches its members, and a node that receives an earlier epoch
//! sends its own ([`Heard`]).
//!
//! While a server is fenced no watermark moves, because its undecided transactions are not known.
//! Its last report would bound the minimum too, but a restarted gossiper does not have it, and the
//! gain would be less than one round of gossip.
//!
//! Work and message sizes grow with the number of servers of a region, of regions and of
//! partitions, but not with the number of transactions.

use std::cmp::Ordering;
use std::fmt;
use std::sync::Arc;

use orthodrome_core::Wire;
use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{NodeId, PartitionId, RegionId};
use orthodrome_core::machine::Kind;
use orthodrome_core::ordered::{Entry, OrdMap, OrdSet};
use orthodrome_core::time::{Duration, Time, Timestamp};

use super::watermark::{Members, Report, Watermarks, least};

/// Messages between servers and gossipers. All contents are lower bounds that only grow within an
/// epoch, so each message may be lost, late or repeated, and the next one compensates for it.
#[derive(Clone, PartialEq, Eq, Debug, Wire, Kind)]
pub enum Message {
    /// A server to the gossipers of its region, in rounds ([`Pace`]): its report.
    Report(Report),
    /// A gossiper to all gossipers of all regions, in rounds: the bounds of its region.
    Regional(Regional),
    /// A gossiper to the servers of its region, whenever a watermark has moved: the watermarks.
    Watermarks(Watermarks),
}

/// The bounds that hold for every active server of one region.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Regional {
    /// The region.
    pub region: RegionId,
    /// The epoch of the members over which it was computed.
    pub epoch: u64,
    /// The minimum [`Report::svw`].
    pub dvw: Timestamp,
    /// The minimum [`Report::srw`] of each partition; [`Regional::dvw`] for those that are not
    /// listed.
    pub drw: OrdMap<PartitionId, Timestamp>,
    /// The minimum [`Report::sgw`].
    pub dgw: Timestamp,
}

/// The result of handling a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Heard {
    /// The contents were adopted; call [`Gossiper::merge`] when a round is due.
    Taken,
    /// The contents are not new, or the sender is not a member.
    Useless,
    /// The sender has later members: fetch them. The message was dropped; it will be repeated.
    NewerEpoch,
    /// The sender does not have the current members: send them. The message was dropped.
    OlderEpoch,
}

/// Lower bounds of one server or one region: one for visibility, and one for replication of each
/// partition, which is never above the first, and equal to it if it is not listed.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct Bounds {
    visible: Timestamp,
    replicated: OrdMap<PartitionId, Timestamp>,
    collectable: Timestamp,
}

impl Bounds {
    fn replicated(&self, partition: PartitionId) -> Timestamp {
        let listed = self.replicated.get(&partition).copied();
        listed.map_or(self.visible, |at| at.min(self.visible))
    }

    /// Combines two promises, which both hold; true if a bound grew.
    fn join(&mut self, other: &Self) -> bool {
        let listed = self.replicated.keys().chain(other.replicated.keys());
        let replicated = listed.map(|&p| (p, self.replicated(p).max(other.replicated(p))));
        let mut joined = Self {
            visible: self.visible.max(other.visible),
            replicated: replicated.collect(),
            collectable: self.collectable.max(other.collectable),
        };
        joined.replicated.retain(|_, at| *at != joined.visible);
        let has_moved = joined != *self;
        *self = joined;
        has_moved
    }

    /// The bounds that hold for all; none if there are none, or one is missing.
    fn least<'a>(all: &[Option<&'a Self>]) -> Option<Self> {
        let of = |f: &dyn Fn(&'a Self) -> Timestamp| least(all.iter().map(|one| one.map(f)));
        let visible = of(&|one| one.visible)?;
        let collectable = of(&|one| one.collectable)?;
        let mut replicated = OrdMap::new();
        for &partition in all.iter().flatten().flat_map(|one| one.replicated.keys()) {
            if let Entry::Vacant(empty) = replicated.entry(partition) {
                empty.insert(of(&|one| one.replicated(partition))?);
            }
        }
        replicated.retain(|_, at| *at != visible);
        Some(Self { visible, replicated, collectable })
    }
}

impl From<Report> for Bounds {
    fn from(report: Report) -> Self {
        Self { visible: report.svw, replicated: report.srw, collectable: report.sgw }
    }
}

impl From<Regional> for Bounds {
    fn from(regional: Regional) -> Self {
        Self { visible: regional.dvw, replicated: regional.drw, collectable: regional.dgw }
    }
}

/// A gossiper: the reports of the current epoch, and the watermarks that follow.
#[derive(Debug)]
pub struct Gossiper {
    cluster: Arc<Cluster>,
    region: RegionId,
    members: Members,
    /// Bounds of active servers of this region, in the current epoch.
    reports: OrdMap<NodeId, Bounds>,
    /// Bounds of regions with active servers, in the current epoch; this region's as last computed.
    regions: OrdMap<RegionId, Bounds>,
    /// True if there are new bounds since the last merge.
    is_stale: bool,
    results: Watermarks,
    #[cfg(test)]
    pub(super) mutation: Option<Mutation>,
}

/// Mistakes that the tests must catch.
#[cfg(test)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Mutation {
    /// V8: the minimum is over those servers whose reports are known.
    PartialMinimum,
    /// Fenced servers do not count, although their undecided transactions are unknown.
    FencedForgotten,
    /// Reports of other epochs count.
    EpochsIgnored,
}

impl Gossiper {
    /// A gossiper for `region` without any reports.
    #[must_use]
    pub fn new(cluster: Arc<Cluster>, region: RegionId, members: Members) -> Self {
        Self {
            cluster,
            region,
            members,
            reports: OrdMap::new(),
            regions: OrdMap::new(),
            is_stale: false,
            results: Watermarks::default(),
            #[cfg(test)]
            mutation: None,
        }
    }

    #[cfg(test)]
    fn has(&self, mutation: Mutation) -> bool {
        self.mutation == Some(mutation)
    }

    /// Handles a change of members. Reports of earlier epochs are dropped; watermarks that followed
    /// from them remain true.
    pub fn on_members(&mut self, members: &Members) {
        if !self.members.adopt(members) {
            return;
        }
        self.reports.clear();
        self.regions.clear();
        self.is_stale = false;
    }

    /// The result for a message of this epoch, if it is not the current one.
    fn is_other(&self, epoch: u64) -> Option<Heard> {
        #[cfg(test)]
        if self.has(Mutation::EpochsIgnored) {
            return None;
        }
        match epoch.cmp(&self.members.epoch) {
            Ordering::Less => Some(Heard::OlderEpoch),
            Ordering::Equal => None,
            Ordering::Greater => Some(Heard::NewerEpoch),
        }
    }

    /// Handles a report of a server of this region.
    pub fn on_report(&mut self, report: Report) -> Heard {
        if let Some(heard) = self.is_other(report.epoch) {
            return heard;
        }
        let server = report.server;
        let is_mine = self.cluster.region_of(server) == self.region;
        if !is_mine || !self.members.is_active(server, report.incarnation) {
            return Heard::Useless;
        }
        let has_moved = join(&mut self.reports, server, report.into());
        self.is_stale |= has_moved;
        if has_moved { Heard::Taken } else { Heard::Useless }
    }

    /// Handles the bounds of a region, which may be this one.
    pub fn on_regional(&mut self, regional: Regional) -> Heard {
        if let Some(heard) = self.is_other(regional.epoch) {
            return heard;
        }
        let region = regional.region;
        if !self.regions_needed().contains(&region) {
            return Heard::Useless;
        }
        let has_moved = join(&mut self.regions, region, regional.into());
        self.is_stale |= has_moved;
        if has_moved { Heard::Taken } else { Heard::Useless }
    }

    /// Handles watermarks of another gossiper or server; true if they are higher than the current
    /// ones.
    pub fn on_watermarks(&mut self, watermarks: &Watermarks) -> bool {
        self.results.adopt(watermarks)
    }

    /// Regions that have active servers.
    fn regions_needed(&self) -> OrdSet<RegionId> {
        self.members.active().map(|(server, _)| self.cluster.region_of(server)).collect()
    }

    /// The bounds of this region, if all its active servers have reported.
    fn own_region(&self) -> Option<Bounds> {
        let active = self.members.active().map(|(server, _)| server);
        let mine = active.filter(|&server| self.cluster.region_of(server) == self.region);
        let reports = mine.map(|server| self.reports.get(&server)).collect::<Vec<_>>();
        #[cfg(test)]
        if self.has(Mutation::PartialMinimum) {
            return Bounds::least(&self.reports.values().map(Some).collect::<Vec<_>>());
        }
        Bounds::least(&reports)
    }

    /// The bounds of all regions, if no server is fenced and all regions with active servers have
    /// reported.
    fn all_regions(&self) -> Option<Bounds> {
        #[cfg(test)]
        if self.has(Mutation::PartialMinimum) {
            return Bounds::least(&self.regions.values().map(Some).collect::<Vec<_>>());
        }
        let needed = self.regions_needed();
        let regions = needed.iter().map(|region| self.regions.get(region)).collect::<Vec<_>>();
        #[cfg(test)]
        if self.has(Mutation::FencedForgotten) {
            return Bounds::least(&regions);
        }
        if self.members.is_settled() { Bounds::least(&regions) } else { None }
    }

    /// Computes bounds from the reports since the last call. Returns true if a watermark grew: then
    /// send the watermarks to the servers of the region. [`Gossiper::regional`] then has the bounds
    /// of this region.
    pub fn merge(&mut self) -> bool {
        if !std::mem::take(&mut self.is_stale) {
            return false;
        }
        if let Some(own) = self.own_region() {
            join(&mut self.regions, self.region, own);
        }
        let Some(all) = self.all_regions() else { return false };
        let of = |partition: PartitionId| (partition, all.replicated(partition));
        self.results.adopt(&Watermarks {
            epoch: self.members.epoch,
            visible: all.visible,
            replicated: self.cluster.partitions().map(|partition| of(partition.id)).collect(),
            collectable: all.collectable,
        })
    }

    /// The bounds of this region, to be sent to the other gossipers in each round; none while
    /// reports of active servers are missing.
    #[must_use]
    pub fn regional(&self) -> Option<Regional> {
        self.regions.get(&self.region).map(|own| Regional {
            region: self.region,
            epoch: self.members.epoch,
            dvw: own.visible,
            drw: own.replicated.clone(),
            dgw: own.collectable,
        })
    }

    /// The watermarks, as far as they have been computed or received.
    #[must_use]
    pub fn results(&self) -> &Watermarks {
        &self.results
    }

    /// The members that this gossiper uses.
    #[must_use]
    pub fn members(&self) -> &Members {
        &self.members
    }

    /// Panics if the state is inconsistent.
    ///
    /// # Panics
    /// If it has bounds of a server or a region that is not a member.
    pub fn assert_invariants(&self) {
        let mut active = self.members.active().map(|(server, _)| server).collect::<OrdSet<_>>();
        active.retain(|&server| self.cluster.region_of(server) == self.region);
        for server in self.reports.keys() {
            assert!(active.contains(server), "{server} is not an active server of {}", self.region);
        }
        let needed = self.regions_needed();
        for region in self.regions.keys() {
            assert!(needed.contains(region), "{region} has no active server");
        }
    }
}

/// Adds bounds of a server or a region; true if a bound grew.
fn join<K: Ord>(held: &mut OrdMap<K, Bounds>, of: K, bounds: Bounds) -> bool {
    match held.entry(of) {
        Entry::Occupied(mut held) => held.get_mut().join(&bounds),
        Entry::Vacant(empty) => {
            empty.insert(bounds);
            true
        }
    }
}

impl fmt::Display for Gossiper {
    /// `gossiper r1 e7 2 reports 3 regions, e7 visible @9 …`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (reports, regions) = (self.reports.len(), self.regions.len());
        write!(f, "gossiper {} e{} ", self.region, self.members.epoch)?;
        write!(f, "{reports} reports {regions} regions, {}", self.results)
    }
}

/// The gossipers of a region: its first active servers by id, in this number. If none is active,
/// its first servers, so that servers that are about to join receive watermarks.
#[must_use]
pub fn gossipers(
    cluster: &Cluster,
    members: &Members,
    region: RegionId,
    count: usize,
) -> Vec<NodeId> {
    let active: OrdSet<NodeId> = members.active().map(|(server, _)| server).collect();
    let servers = || cluster.servers().filter(|node| node.region == region).map(|node| node.id);
    let some: Vec<NodeId> = servers().filter(|id| active.contains(id)).take(count).collect();
    if some.is_empty() { servers().take(count).collect() } else { some }
}

/// Decides when rounds take place: of a server's reports, or of a gossiper's gossip.
///
/// Rounds are an interval apart. While transactions wait for them, rounds are more frequent. The
/// more transactions wait, the more of them one round serves, and the smaller is the increase. So
/// gossip costs little when few transactions gain from it, and under high load not more than at
/// rest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pace {
    interval: Duration,
    last: Time,
}

/// The factor by which rounds are more frequent while few transactions wait.
const HURRY: u32 = 5;
/// This number of waiting transactions makes rounds less frequent by one part of [`HURRY`].
const FEW: usize = 64;

impl Pace {
    /// Rounds `interval` apart, the first one at `now`.
    #[must_use]
    pub fn new(interval: Duration, now: Time) -> Self {
        Self { interval, last: now - interval }
    }

    /// The time of the next round, if this number of transactions wait for it.
    #[must_use]
    pub fn next(&self, waiting: usize) -> Time {
        let parts = if waiting == 0 { HURRY as usize } else { 1 + waiting / FEW };
        let parts = u32::try_from(parts).unwrap_or(HURRY).min(HURRY);
        self.last + self.interval * parts / HURRY
    }

    /// Notes that a round takes place now.
    pub fn round(&mut self, now: Time) {
        self.last = now;
    }
}

impl fmt::Display for Message {
    /// One short line; a partition's watermark is written `p3@17`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind())?;
        let partitions = match self {
            Self::Report(Report { server, incarnation, epoch, svw, srw, sgw }) => {
                write!(f, " {server}.{incarnation} e{epoch} svw {svw} sgw {sgw}")?;
                srw
            }
            Self::Regional(Regional { region, epoch, dvw, drw, dgw }) => {
                write!(f, " {region} e{epoch} dvw {dvw} dgw {dgw}")?;
                drw
            }
            Self::Watermarks(watermarks) => return write!(f, " {watermarks}"),
        };
        partitions.iter().try_for_each(|(partition, at)| write!(f, " {partition}{at}"))
    }
}

#[cfg(test)]
mod tests {
    use orthodrome_core::topology::Topology;

    use super::*;
    use crate::ocean_vista::watermark::{Member, Status};

    fn bounds(visible: u64, replicated: &[(u32, u64)]) -> Bounds {
        let of = replicated.iter().map(|&(p, at)| (PartitionId(p), Timestamp(at)));
        let (visible, collectable) = (Timestamp(visible), Timestamp(0));
        Bounds { visible, replicated: of.collect(), collectable }
    }

    #[test]
    fn what_is_not_listed_is_as_far_as_what_is_visible() {
        let (a, b) = (bounds(9, &[(1, 4)]), bounds(7, &[(2, 3)]));
        let all = Bounds::least(&[Some(&a), Some(&b)]).unwrap();
        assert_eq!(all, bounds(7, &[(1, 4), (2, 3)]));
        assert_eq!(Bounds::least(&[Some(&a), None]), None);
        // A later report without the partition means that none of its versions is outstanding.
        let mut joined = a.clone();
        assert!(joined.join(&bounds(12, &[])) && !joined.join(&a));
        assert_eq!(joined, bounds(12, &[]));
        // The watermark of a partition is never above the visibility watermark.
        assert_eq!(bounds(5, &[(1, 8)]).replicated(PartitionId(1)), Timestamp(5));
    }

    #[test]
    fn rounds_hurry_for_a_few_and_rest_when_nobody_or_everybody_waits() {
        let mut pace = Pace::new(Duration::from_millis(25), Time::from_millis(100));
        assert_eq!(pace.next(0), Time::from_millis(100));
        pace.round(Time::from_millis(100));
        let next = [0, 1, FEW, 3 * FEW, 100 * FEW].map(|waiting| pace.next(waiting));
        assert_eq!(next, [125, 105, 110, 120, 125].map(Time::from_millis));
    }

    #[test]
    fn gossipers_are_active_where_any_server_is() {
        let map = Topology::uniform(2, Duration::from_micros(500), Duration::from_millis(20));
        let cluster = Cluster::spread(map, 3, 0, 1, 3).unwrap();
        let mut members = Members::default();
        let of = |members: &Members, region| {
            gossipers(&cluster, members, RegionId(region), 2)
                .iter()
                .map(|n| n.0)
                .collect::<Vec<_>>()
        };
        assert_eq!(of(&members, 1), [4, 5]);
        for (server, status) in [(4, Status::Out), (5, Status::Active), (6, Status::Active)] {
            members.servers.insert(NodeId(server), Member { incarnation: 1, status, disk: 0 });
        }
        assert_eq!(of(&members, 1), [5, 6]);
        assert_eq!(of(&members, 0), [1, 2]);
    }
}
