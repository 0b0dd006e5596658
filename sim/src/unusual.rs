//! Unusual draws of some seeds: unusual sizes, links that keep no order, bad disks, a region that
//! dies for ever. Each has a separate random stream, so the other draws are the same with and
//! without it.

use std::fmt;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::NodeId;
use orthodrome_core::machine::Protocol;
use orthodrome_core::ordered::OrdSet;
use orthodrome_core::rng::Rng;
use orthodrome_core::time::Duration;
use orthodrome_eval::workload;

use crate::fault::{Entry, Fault};
use crate::network::Links;
use crate::swarm::{SwarmOptions, leaves_majorities};

/// A draw that only some seeds have. A failing seed is easier to understand without the unusual
/// draws that it does not need, so the shrinker tries to leave out each of them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Unusual {
    /// One or seven replicas of each partition.
    Replicas,
    /// Nine partitions.
    Partitions,
    /// Three keys, or 64.
    Keys,
    /// Several shares of each copy.
    Shares,
    /// Scans of ranges in which other transactions create keys.
    Scans,
    /// Transactions that delete keys.
    Deletions,
    /// Keys that are attached to leases.
    Leases,
    /// Stale reads.
    StaleReads,
    /// Faults for minutes.
    Length,
    /// Links between regions that lose packets.
    Loss,
    /// Links that keep no order.
    Links,
    /// Processors that take time.
    Processors,
    /// Small limits of records and messages.
    Limits,
    /// Random settings instead of those that follow from the cluster.
    Settings,
    /// Operators who move partitions.
    Moves,
    /// Servers that are replaced by new ones with empty disks.
    Replaced,
    /// Servers that stay down for ever.
    Losses,
    /// Disks that damage, swap, lose or roll back data.
    Disks,
    /// A region that dies for ever.
    DeadRegion,
}

impl Unusual {
    /// All values.
    pub const ALL: [Self; 19] = [
        Self::Replicas,
        Self::Partitions,
        Self::Keys,
        Self::Shares,
        Self::Scans,
        Self::Deletions,
        Self::Leases,
        Self::StaleReads,
        Self::Length,
        Self::Loss,
        Self::Links,
        Self::Processors,
        Self::Limits,
        Self::Settings,
        Self::Moves,
        Self::Replaced,
        Self::Losses,
        Self::Disks,
        Self::DeadRegion,
    ];

    /// Its name in commands and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Replicas => "replicas",
            Self::Partitions => "partitions",
            Self::Keys => "keys",
            Self::Shares => "shares",
            Self::Scans => "scans",
            Self::Deletions => "deletions",
            Self::Leases => "leases",
            Self::StaleReads => "stale-reads",
            Self::Length => "length",
            Self::Loss => "loss",
            Self::Links => "links",
            Self::Processors => "processors",
            Self::Limits => "limits",
            Self::Settings => "settings",
            Self::Moves => "moves",
            Self::Replaced => "replaced",
            Self::Losses => "losses",
            Self::Disks => "disks",
            Self::DeadRegion => "dead-region",
        }
    }

    /// The draw of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|draw| draw.name() == name)
    }
}

impl fmt::Display for Unusual {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The unusual draws of a seed.
#[derive(Debug)]
pub(crate) struct Draws<'a> {
    /// The draws to leave out.
    without: &'a OrdSet<Unusual>,
    /// The draws that it has.
    pub(crate) taken: OrdSet<Unusual>,
}

impl<'a> Draws<'a> {
    /// All draws except those in `without`.
    pub(crate) fn new(without: &'a OrdSet<Unusual>) -> Self {
        Self { without, taken: OrdSet::new() }
    }

    /// Records a draw and returns it; none if there was nothing to draw, or it is left out.
    pub(crate) fn take<T>(&mut self, draw: Unusual, drawn: Option<T>) -> Option<T> {
        let drawn = drawn.filter(|_| !self.without.contains(&draw));
        if drawn.is_some() {
            self.taken.insert(draw);
        }
        drawn
    }
}

/// Sizes that replace the usual ones.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub(crate) struct Sizes {
    /// Replicas of each partition.
    pub(crate) replicas: Option<u32>,
    /// Partitions.
    pub(crate) partitions: Option<u32>,
    /// Keys of the workload.
    pub(crate) keys: Option<u64>,
    /// Share of the packets between regions that are lost.
    pub(crate) loss: Option<f64>,
    /// How long faults last.
    pub(crate) safety: Option<Duration>,
}

impl Sizes {
    /// Draws sizes. Runs of minutes, groups of seven and heavy loss cost several times as much as
    /// others, so they are rare.
    pub(crate) fn draw(seed: u64, options: &SwarmOptions, draws: &mut Draws<'_>) -> Self {
        let mut sizes = Self::default();
        if !options.unusual {
            return sizes;
        }
        let mut rng = Rng::stream(seed, "sizes", 0);
        match rng.below(32) {
            0 | 1 => sizes.replicas = Some(1),
            2 => sizes.replicas = Some(7),
            3 => sizes.partitions = Some(9),
            _ => {}
        }
        match rng.below(16) {
            0 => sizes.keys = Some(3),
            1 => sizes.keys = Some(64),
            _ => {}
        }
        match rng.below(128) {
            0 | 1 => sizes.safety = Some(Duration::from_secs(rng.range(60, 120))),
            2 => sizes.loss = Some(0.2),
            _ => {}
        }
        Self {
            replicas: draws.take(Unusual::Replicas, sizes.replicas),
            partitions: draws.take(Unusual::Partitions, sizes.partitions),
            keys: draws.take(Unusual::Keys, sizes.keys),
            safety: draws.take(Unusual::Length, sizes.safety),
            loss: sizes.loss,
        }
    }
}

/// A workload that scans, for one seed of six, with the form and priorities of the usual one of that
/// seed. In some seeds it deletes keys, too.
pub(crate) fn draw_scans<P: Protocol>(
    seed: u64,
    options: &SwarmOptions,
    usual: &workload::Options,
) -> Option<(&'static str, workload::Options)> {
    let mut rng = Rng::stream(seed, "scans", 0);
    let is_drawn = options.unusual && rng.chance(1, 6);
    if !P::SCANS || !(is_drawn || options.scans) {
        return None;
    }
    let keys = Some(rng.range(4, 64));
    let scans = rng.pick(&[0.1, 0.3, 0.5]).copied();
    let deletes = rng.pick(&[0.0, 0.0, 0.2, 0.5]).copied().filter(|_| !P::FORGETS_DELETIONS);
    let (form, high_priority) = (usual.form, usual.high_priority);
    Some((
        "ranges",
        workload::Options { keys, scans, deletes, form, high_priority, ..Default::default() },
    ))
}

/// A workload that deletes keys, for one seed of four, with as many keys and reads as the usual one
/// of that seed.
pub(crate) fn draw_deletions(
    seed: u64,
    usual: &workload::Options,
) -> Option<(&'static str, workload::Options)> {
    let mut rng = Rng::stream(seed, "deletions", 0);
    if !rng.chance(1, 4) {
        return None;
    }
    let name = rng.pick(&["ycsbt:3", "ycsbt:3", "bank"]).copied()?;
    let options = workload::Options {
        keys: usual.keys,
        form: usual.form,
        high_priority: usual.high_priority,
        read_only: usual.read_only.or_else(|| rng.pick(&[0.1, 0.3, 0.6]).copied()),
        deletes: rng.pick(&[0.1, 0.3, 0.6]).copied(),
        ..workload::Options::default()
    };
    Some((name, options))
}

/// Keys that are attached to leases, for one seed of ten, with the priorities of the usual workload of that
/// seed.
pub(crate) fn draw_leases(
    seed: u64,
    usual: &workload::Options,
) -> Option<(&'static str, workload::Options)> {
    let mut rng = Rng::stream(seed, "leases", 0);
    let keys = rng.chance(1, 10).then(|| rng.range(2, 8))?;
    let high_priority = usual.high_priority;
    Some(("leases", workload::Options { keys: Some(keys), high_priority, ..Default::default() }))
}

/// Links that lose, duplicate and reorder messages, for one seed of six.
pub(crate) fn draw_links<P: Protocol>(seed: u64, options: &SwarmOptions) -> Option<Links> {
    let is_possible = options.unordered && P::NEEDS_ORDERED_LINKS.is_none();
    let mut rng = Rng::stream(seed, "links", 0);
    let is_drawn = is_possible && rng.chance(1, 6);
    is_drawn.then(|| Links::Unordered { duplicate: rng.unit() / 10.0, reorder: rng.unit() / 5.0 })
}

/// Bad disks. Disks that nodes refuse are drawn like other faults. Disks that lose writes reported
/// as durable are rarer, because such a run is checked only up to that moment.
pub(crate) fn draw_disks(seed: u64, cluster: &Cluster, options: &SwarmOptions) -> Vec<Entry> {
    let mut rng = Rng::stream(seed, "bad disks", 0);
    let roll = rng.below(48);
    if !options.bad_disks || roll >= 7 {
        return Vec::new();
    }
    let mut nodes: Vec<NodeId> = cluster.nodes().map(|node| node.id).collect();
    rng.shuffle(&mut nodes);
    let mut named = nodes.into_iter().map(|node| node.to_string());
    let mut some = |count| named.by_ref().take(count).collect::<Vec<_>>();
    let end = u64::try_from(options.safety.as_millis()).unwrap_or(u64::MAX);
    let mut entries = Vec::new();
    for _ in 0..rng.range(1, 3) {
        let at_ms = rng.range(200, end);
        let until_ms = Some(at_ms + rng.range(10, 3_000));
        let nodes = some(if (3..5).contains(&roll) { 2 } else { 1 });
        let fault = match roll {
            0..3 => Fault::FlipBit { nodes },
            3 | 4 => Fault::SwapDisks { nodes },
            5 => {
                if rng.chance(1, 2) {
                    // While the disk lies.
                    let (nodes, at_ms) = (nodes.clone(), at_ms + rng.range(1, 9));
                    entries.push(Entry { at_ms, until_ms, fault: Fault::Crash { nodes } });
                }
                Fault::LyingFsync { nodes }
            }
            _ => Fault::OldCopy { nodes },
        };
        entries.push(Entry { at_ms, until_ms, fault });
    }
    entries
}

/// A region that dies for ever with its gateways, in one seed of 24. It may be any region whose
/// servers, together with `lost`, leave a majority of each partition's replicas. If the protocol
/// does not outlive its gateways ([`Protocol::OUTLIVES_GATEWAYS`]), the region comes back when
/// everything heals.
pub(crate) fn draw_dead_region(
    seed: u64,
    cluster: &Cluster,
    options: &SwarmOptions,
    lost: &[NodeId],
) -> Option<(Vec<NodeId>, Entry)> {
    let mut rng = Rng::stream(seed, "dead region", 0);
    if !options.unusual || !options.losses || !rng.chance(1, 24) {
        return None;
    }
    let mut regions: Vec<_> = cluster.topology.regions().collect();
    rng.shuffle(&mut regions);
    let dead = regions.into_iter().find(|region| {
        let mut lost = lost.to_vec();
        cluster.servers().filter(|node| node.region == *region).all(|node| {
            let is_spared = leaves_majorities(cluster, &lost, node.id);
            lost.push(node.id);
            is_spared
        })
    })?;
    let nodes = cluster.nodes().filter(|node| node.region == dead).map(|node| node.id).collect();
    let end = u64::try_from(options.safety.as_millis()).unwrap_or(u64::MAX);
    let fault = Fault::Crash { nodes: vec![cluster.topology.name_of(dead).to_owned()] };
    Some((nodes, Entry { at_ms: rng.range(200, end), until_ms: None, fault }))
}
