//! How reports become watermarks (§3.3, §4.2): the gossipers of a region take the least of what the
//! region's servers report, tell all gossipers of all regions, and take the least of that.
//!
//! A [`Gossiper`] is a value that knows only what it was told since it started, and publishes
//! nothing until it has heard of every active member in the present epoch (V8). It needs no lease,
//! and it does not matter whether its own server takes part: what it says follows from reports, and
//! names their epoch.
//!
//! Every report is a promise for good, so of several reports of one server in one epoch all hold,
//! and messages may be lost, repeated and reordered. Reports of two epochs do not count together,
//! though each holds: one made later than a server joined may be above what that server assigns,
//! and whoever does not know the server would not wait for it. Whoever hears of a later epoch
//! fetches its members first, and whoever hears of an earlier one sends them ([`Heard`]).
//!
//! While anybody is fenced nothing moves: what it left undecided is not known. Its last report
//! would bound the minimum as well, but a gossiper that restarted does not have it, and what is
//! gained is less than one round of gossip.
//!
//! Work and size of messages grow with the servers of a region, with regions and with partitions;
//! nothing grows with transactions.

use std::cmp::Ordering;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use orthodrome_core::Wire;
use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{NodeId, PartitionId, RegionId};
use orthodrome_core::time::{Duration, Time, Timestamp};

use super::watermark::{Members, Report, Watermarks, least};

/// What servers and gossipers say to each other. All of it is lower bounds that only grow within an
/// epoch: each message may be lost, late or repeated, and the next one makes up for it.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Message {
    /// A server to the gossipers of its region, in rounds ([`Pace`]): what holds of it.
    Report(Report),
    /// A gossiper to all gossipers of all regions, in rounds: what holds of its region.
    Regional(Regional),
    /// A gossiper to the servers of its region, whenever it has moved: what holds everywhere.
    Watermarks(Watermarks),
}

/// What holds of every active server of one region.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Regional {
    /// Which region.
    pub region: RegionId,
    /// The members it was computed over.
    pub epoch: u64,
    /// The least [`Report::svw`].
    pub dvw: Timestamp,
    /// The least [`Report::srw`] of each partition; [`Regional::dvw`] of those that are not listed.
    pub drw: BTreeMap<PartitionId, Timestamp>,
    /// The least [`Report::sgw`].
    pub dgw: Timestamp,
}

/// What became of something heard.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Heard {
    /// It was taken over; call [`Gossiper::merge`] when a round is due.
    Taken,
    /// It says nothing new, or comes from nobody who counts.
    Useless,
    /// Its sender knows later members: fetch them. It was dropped; it will come again.
    NewerEpoch,
    /// Its sender does not know the present members: send them. It was dropped.
    OlderEpoch,
}

/// Lower bounds that one server, or one region, gives: one for visibility, and one per partition
/// for replication, which is never above it and equal to it where none is listed.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct Bounds {
    visible: Timestamp,
    replicated: BTreeMap<PartitionId, Timestamp>,
    collectable: Timestamp,
}

impl Bounds {
    fn replicated(&self, partition: PartitionId) -> Timestamp {
        let listed = self.replicated.get(&partition).copied();
        listed.map_or(self.visible, |at| at.min(self.visible))
    }

    /// Both were promised, so both hold. True if that says more than before.
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

    /// What holds of all of them; nothing if there are none, or one is missing.
    fn least<'a>(all: &[Option<&'a Self>]) -> Option<Self> {
        let of = |f: &dyn Fn(&'a Self) -> Timestamp| least(all.iter().map(|one| one.map(f)));
        let visible = of(&|one| one.visible)?;
        let collectable = of(&|one| one.collectable)?;
        let mut replicated = BTreeMap::new();
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

/// One gossiper: what it has heard in the present epoch, and what follows.
#[derive(Debug)]
pub struct Gossiper {
    cluster: Arc<Cluster>,
    region: RegionId,
    members: Members,
    /// Of active servers of this region, in the present epoch.
    reports: BTreeMap<NodeId, Bounds>,
    /// Of regions with active servers, in the present epoch; this one's as last computed.
    regions: BTreeMap<RegionId, Bounds>,
    /// Something was heard since the last merge.
    is_stale: bool,
    results: Watermarks,
    #[cfg(test)]
    pub(super) mutation: Option<Mutation>,
}

/// Mistakes that the tests must catch.
#[cfg(test)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Mutation {
    /// V8: the minimum is over those that were heard of.
    PartialMinimum,
    /// Who is fenced no longer counts, though nobody knows what it left undecided.
    FencedForgotten,
    /// What was reported in other epochs counts.
    EpochsIgnored,
}

impl Gossiper {
    /// One for `region` that has heard nothing.
    #[must_use]
    pub fn new(cluster: Arc<Cluster>, region: RegionId, members: Members) -> Self {
        Self {
            cluster,
            region,
            members,
            reports: BTreeMap::new(),
            regions: BTreeMap::new(),
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

    /// The members changed. Everything heard before was said in another epoch and is dropped; what
    /// followed from it stays true.
    pub fn on_members(&mut self, members: &Members) {
        if !self.members.adopt(members) {
            return;
        }
        self.reports.clear();
        self.regions.clear();
        self.is_stale = false;
    }

    /// What an epoch that somebody names means, if it is not the present one.
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

    /// A server of this region reports.
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

    /// A gossiper says what holds of its region, which may be this one.
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

    /// Another gossiper, or a server, knows these watermarks. True if they are further than those
    /// here.
    pub fn on_watermarks(&mut self, watermarks: &Watermarks) -> bool {
        self.results.adopt(watermarks)
    }

    /// Regions that have active servers.
    fn regions_needed(&self) -> BTreeSet<RegionId> {
        self.members.active().map(|(server, _)| self.cluster.region_of(server)).collect()
    }

    /// What holds of this region, if all its active servers have reported.
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

    /// What holds everywhere, if nobody is fenced and all regions with active servers were heard
    /// of.
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

    /// Draws the conclusions from what was heard since the last time. True if more holds everywhere
    /// than before: tell the servers of the region. What holds of this region is then in
    /// [`Gossiper::regional`].
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

    /// What holds of this region, to be told to the other gossipers in each round; nothing while
    /// some of its active servers were not heard of.
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

    /// What holds everywhere, as far as was merged or heard.
    #[must_use]
    pub fn results(&self) -> &Watermarks {
        &self.results
    }

    /// The members that it goes by.
    #[must_use]
    pub fn members(&self) -> &Members {
        &self.members
    }

    /// Panics if the state contradicts itself.
    ///
    /// # Panics
    /// If something is held of somebody who does not count.
    pub fn assert_invariants(&self) {
        let mut active = self.members.active().map(|(server, _)| server).collect::<BTreeSet<_>>();
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

/// Adds bounds to what is held of somebody. True if that says more than before.
fn join<K: Ord>(held: &mut BTreeMap<K, Bounds>, of: K, bounds: Bounds) -> bool {
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

/// The gossipers of a region: its first so many active servers by id. Where none is active, its
/// first servers, so that those that are about to join hear of watermarks.
#[must_use]
pub fn gossipers(
    cluster: &Cluster,
    members: &Members,
    region: RegionId,
    count: usize,
) -> Vec<NodeId> {
    let active: BTreeSet<NodeId> = members.active().map(|(server, _)| server).collect();
    let servers = || cluster.servers().filter(|node| node.region == region).map(|node| node.id);
    let some: Vec<NodeId> = servers().filter(|id| active.contains(id)).take(count).collect();
    if some.is_empty() { servers().take(count).collect() } else { some }
}

/// When rounds are: a server's reports, or a gossiper's gossip.
///
/// Rounds are an interval apart. While somebody waits for them they come sooner, but the more wait,
/// the more one round serves, and the less sooner: gossip costs little when little is to be gained,
/// and no more than at rest when much is to be done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pace {
    interval: Duration,
    last: Time,
}

/// Rounds while few wait are this many times as frequent as when nobody does.
const HURRY: u32 = 5;
/// So many who wait make one more part of [`HURRY`] to wait for.
const FEW: usize = 64;

impl Pace {
    /// Rounds `interval` apart, the first one at `now`.
    #[must_use]
    pub fn new(interval: Duration, now: Time) -> Self {
        Self { interval, last: now - interval }
    }

    /// When the next round is, if so many wait for it.
    #[must_use]
    pub fn next(&self, waiting: usize) -> Time {
        let parts = if waiting == 0 { HURRY as usize } else { 1 + waiting / FEW };
        let parts = u32::try_from(parts).unwrap_or(HURRY).min(HURRY);
        self.last + self.interval * parts / HURRY
    }

    /// There is a round now.
    pub fn round(&mut self, now: Time) {
        self.last = now;
    }
}

impl Message {
    /// The name of the message.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Report(_) => "Report",
            Self::Regional(_) => "Regional",
            Self::Watermarks(_) => "Watermarks",
        }
    }
}

impl fmt::Display for Message {
    /// One short line; a partition's watermark as `p3@17`.
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
        // A later report without the partition says that nothing of it is outstanding.
        let mut joined = a.clone();
        assert!(joined.join(&bounds(12, &[])) && !joined.join(&a));
        assert_eq!(joined, bounds(12, &[]));
        // A partition is never ahead of what is visible.
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
