//! Faults as data: what goes wrong, where, from when until when.
//!
//! A schedule is a list of entries in TOML:
//!
//! ```toml
//! [[faults]]
//! at_ms = 2000
//! until_ms = 3500
//! fault.partition = { from = ["VA"], to = ["n4", "SG"], both_ways = false }
//! ```
//!
//! Nodes are named by id (`n4`), by region (`VA`), or all at once (`*`). A fault without `until_ms`
//! lasts. A new kind of fault is a variant of [`Fault`], its arms in `begin` and `end` below, and
//! its weight in [`Fault::draw`].

use std::collections::BTreeSet;

use orthodrome_core::cluster::{Cluster, Role};
use orthodrome_core::id::{NodeId, PartitionId};
use orthodrome_core::machine::{Admin, Input, Protocol};
use orthodrome_core::rng::Rng;
use orthodrome_core::time::{Duration, Time};
use orthodrome_core::trace::Event as TraceEvent;
use serde::{Deserialize, Serialize};

use crate::disk::DiskFailure;
use crate::network::{Disturbance, Links, NetworkModel};
use crate::simulation::Simulation;
use crate::swarm::FaultProfile;

/// Something that goes wrong. Durations are in milliseconds, probabilities in per cent.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Fault {
    /// Nodes lose power; at the end they start again. Of what was not flushed, a random prefix
    /// survives; of what they had in flight, what was sent before a random moment arrives.
    Crash {
        /// Which.
        nodes: Vec<String>,
    },
    /// The same, with a record of the unflushed tail cut in two if there is any.
    TornWrite {
        /// Which nodes.
        nodes: Vec<String>,
    },
    /// Nodes lose power just as their next flush is done.
    CrashAtFlush {
        /// Which.
        nodes: Vec<String>,
        /// After the node acted on what was flushed, rather than before it heard of it.
        after_report: bool,
    },
    /// Nodes are lost with their disks; at the end new machines with empty disks take their places. For
    /// servers that the protocol says may be ([`Protocol::replaceable`]), a minority of each partition;
    /// a schedule that names others is refused.
    Replace {
        /// Which.
        nodes: Vec<String>,
    },
    /// Nodes stand still, as in a long garbage collection; then they get everything that arrived
    /// meanwhile.
    Pause {
        /// Which.
        nodes: Vec<String>,
    },
    /// Messages do not get through. Ordered links hold them, and lose what they held for too long.
    Partition {
        /// Senders.
        from: Vec<String>,
        /// Receivers; empty: everyone else.
        #[serde(default)]
        to: Vec<String>,
        /// Cut the way back too.
        both_ways: bool,
    },
    /// Packets are lost; on ordered links that means they are late and throughput falls.
    Loss {
        /// Senders.
        from: Vec<String>,
        /// Receivers; empty: everyone else.
        #[serde(default)]
        to: Vec<String>,
        /// Share of packets, in per cent.
        percent: u8,
    },
    /// Messages arrive twice, with up to a round trip in between; unordered links only.
    Duplicate {
        /// Senders.
        from: Vec<String>,
        /// Receivers; empty: everyone else.
        #[serde(default)]
        to: Vec<String>,
        /// Share of messages, in per cent.
        percent: u8,
    },
    /// Messages take longer.
    Delay {
        /// Senders.
        from: Vec<String>,
        /// Receivers; empty: everyone else.
        #[serde(default)]
        to: Vec<String>,
        /// By how much, one way.
        extra_ms: u32,
        /// On the way back too.
        both_ways: bool,
    },
    /// Nodes compute this many times slower.
    SlowCpu {
        /// Which.
        nodes: Vec<String>,
        /// How many times.
        factor: u32,
    },
    /// Clocks jump; at the end they are right again.
    ClockStep {
        /// Whose.
        nodes: Vec<String>,
        /// Forward, or back if negative.
        by_ms: i64,
    },
    /// Clocks run fast or slow; at the end they are right again.
    ClockDrift {
        /// Whose.
        nodes: Vec<String>,
        /// By how many parts per million; slow if negative.
        ppm: i64,
    },
    /// Disks are full: nodes stop at their next write, and start again when there is room.
    DiskFull {
        /// Whose.
        nodes: Vec<String>,
    },
    /// The next flush reports an error: nodes stop, and start again on repaired disks.
    FsyncError {
        /// Whose.
        nodes: Vec<String>,
    },
    /// Flushes take longer.
    SlowDisk {
        /// Whose.
        nodes: Vec<String>,
        /// By how much.
        extra_ms: u32,
    },
    /// Nodes lose power, and one bit of their log is wrong when they start again. A node that
    /// notices refuses to start; at the end of the fault its data is restored from a good copy.
    FlipBit {
        /// Whose.
        nodes: Vec<String>,
    },
    /// Two servers lose power and start with each other's disks, which both refuse; at the end of the
    /// fault each gets its own disk back.
    SwapDisks {
        /// Which two.
        nodes: Vec<String>,
    },
    /// Flushes report what is not durable, and a crash may lose it. At the end everything is durable.
    /// If writes are lost, the run is judged up to that moment ([`crate::promise::Beyond`]).
    LyingFsync {
        /// Whose.
        nodes: Vec<String>,
    },
    /// Somebody copies disks at the beginning and puts the copies in the places of the disks at the
    /// end, while the nodes are down for a moment. No node can see that its data is old. If writes
    /// are lost, the run is judged up to that moment ([`crate::promise::Beyond`]).
    OldCopy {
        /// Whose.
        nodes: Vec<String>,
    },
    /// An operator wants another leader.
    TransferLeader {
        /// Of which partition.
        partition: u32,
        /// Which node.
        to: String,
    },
    /// An operator changes a partition's group.
    ChangeMembers {
        /// Which partition.
        partition: u32,
        /// Members that vote.
        voters: Vec<String>,
        /// Members that only receive.
        #[serde(default)]
        learners: Vec<String>,
    },
}

/// One entry of a schedule.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// When the fault begins, in milliseconds of the run.
    pub at_ms: u64,
    /// When it ends; none: it lasts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until_ms: Option<u64>,
    /// What goes wrong.
    pub fault: Fault,
}

/// A fault schedule.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Schedule {
    /// What the schedule is for.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub about: String,
    /// The faults, in any order.
    #[serde(default)]
    pub faults: Vec<Entry>,
}

/// A schedule that cannot be carried out.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ScheduleError {
    /// Not TOML, or not of this shape; the text says where.
    #[error("not a fault schedule: {0}")]
    Syntax(String),
    /// A name that means nothing in this cluster.
    #[error("fault {entry} at {at_ms} ms names {name:?}; {expected}")]
    Name {
        /// Which entry, from 1.
        entry: usize,
        /// When it begins.
        at_ms: u64,
        /// The name.
        name: String,
        /// What it should be.
        expected: &'static str,
    },
    /// A number out of range.
    #[error("fault {entry} at {at_ms} ms: {problem}")]
    Value {
        /// Which entry, from 1.
        entry: usize,
        /// When it begins.
        at_ms: u64,
        /// What is wrong, and what to do.
        problem: String,
    },
}

/// An entry with every name looked up.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Planned {
    pub(crate) at: Time,
    pub(crate) until: Option<Time>,
    pub(crate) name: &'static str,
    action: Action,
}

impl Planned {
    /// If it is an order to change members: whose, and the wanted voters.
    pub(crate) fn membership(&self) -> Option<(PartitionId, &[NodeId])> {
        match &self.action {
            Action::Admin { order: Admin::ChangeMembers { partition, voters, .. }, .. } => {
                Some((*partition, voters))
            }
            Action::Admin { order: Admin::TransferLeader { .. }, .. }
            | Action::Crash { .. }
            | Action::Replace(_)
            | Action::Disk { .. }
            | Action::Pause(_)
            | Action::Links { .. }
            | Action::SlowCpu { .. }
            | Action::Clock { .. }
            | Action::SlowDisk { .. }
            | Action::FlipBit(_)
            | Action::SwapDisks(..)
            | Action::LyingFsync(_)
            | Action::OldCopy(_) => None,
        }
    }
}

/// A schedule with every name looked up.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(crate) struct Plan {
    pub(crate) entries: Vec<Planned>,
}

#[derive(Clone, PartialEq, Debug)]
enum Action {
    Crash { nodes: Vec<u32>, torn: bool },
    Replace(Vec<u32>),
    Disk { nodes: Vec<u32>, failure: DiskFailure },
    Pause(Vec<u32>),
    Links { pairs: Vec<(u32, u32)>, by: Disturbance },
    SlowCpu { nodes: Vec<u32>, factor: u32 },
    Clock { nodes: Vec<u32>, step_ns: i64, ppm: i64 },
    SlowDisk { nodes: Vec<u32>, extra: Duration },
    FlipBit(Vec<u32>),
    SwapDisks(u32, u32),
    LyingFsync(Vec<u32>),
    OldCopy(Vec<u32>),
    Admin { nodes: Vec<u32>, order: Admin },
}

impl Eq for Action {}

impl Schedule {
    /// Reads a schedule from the text of a TOML file.
    ///
    /// # Errors
    /// What is wrong with the text, and where.
    pub fn parse(text: &str) -> Result<Self, ScheduleError> {
        toml::from_str(text).map_err(|error| ScheduleError::Syntax(error.to_string()))
    }

    /// The schedule as TOML.
    ///
    /// # Panics
    /// Never: every schedule has a TOML form.
    #[must_use]
    pub fn to_toml(&self) -> String {
        toml::to_string(self).unwrap_or_else(|error| unreachable!("a schedule as TOML: {error}"))
    }

    /// True if some fault makes clocks break their stated bound.
    #[must_use]
    pub fn breaks_clocks(&self) -> bool {
        self.faults
            .iter()
            .any(|entry| matches!(entry.fault, Fault::ClockStep { .. } | Fault::ClockDrift { .. }))
    }

    /// Looks every name up. Servers may be lost with their disks if `replaceable` names them, see
    /// [`Protocol::replaceable`].
    pub(crate) fn resolve(
        &self,
        cluster: &Cluster,
        network: &NetworkModel,
        replaceable: &[NodeId],
    ) -> Result<Plan, ScheduleError> {
        let mut entries = Vec::new();
        for (number, entry) in (1..).zip(&self.faults) {
            let names = Names { cluster, entry: number, at_ms: entry.at_ms };
            if let Some(until) = entry.until_ms
                && until <= entry.at_ms
            {
                return Err(names.value(format!(
                    "until_ms = {until} is not later than at_ms; use a later end"
                )));
            }
            entries.push(Planned {
                at: Time::from_millis(entry.at_ms),
                until: entry.until_ms.map(Time::from_millis),
                name: entry.fault.name(),
                action: entry.fault.resolve(&names, network, replaceable)?,
            });
        }
        Ok(Plan { entries })
    }
}

/// A kind of fault that a swarm may draw.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Drawn {
    /// Power cuts, torn writes, crashes at a flush.
    Crash,
    /// Pauses.
    Pause,
    /// Partitions of every shape.
    Partition,
    /// Packet loss.
    Loss,
    /// Duplicated messages.
    Duplicate,
    /// Delay spikes.
    Delay,
    /// Slow nodes.
    SlowCpu,
    /// Clocks beyond their bound.
    Clock,
    /// Failing and slow disks.
    Disk,
    /// Leader transfers and membership changes.
    Admin,
}

impl Drawn {
    /// The kinds that may be drawn, each as often as its weight.
    #[must_use]
    pub fn all(network: &NetworkModel, admin: bool, clocks: bool) -> Vec<Self> {
        let weights = [
            (Self::Crash, 3, true),
            (Self::Pause, 2, true),
            (Self::Partition, 3, true),
            (Self::Loss, 1, true),
            (Self::Duplicate, 1, network.links != Links::Ordered),
            (Self::Delay, 2, true),
            (Self::SlowCpu, 1, true),
            (Self::Clock, 1, clocks),
            (Self::Disk, 2, true),
            (Self::Admin, 1, admin),
        ];
        let possible = weights.into_iter().filter(|&(_, _, is_possible)| is_possible);
        possible.flat_map(|(kind, weight, _)| std::iter::repeat_n(kind, weight)).collect()
    }
}

/// Which nodes a drawn fault hits: mostly one, sometimes a region, several, or all.
fn draw_nodes(cluster: &Cluster, rng: &mut Rng) -> Vec<String> {
    let nodes: Vec<NodeId> = cluster.nodes().map(|node| node.id).collect();
    let one = |rng: &mut Rng| rng.pick(&nodes).copied().unwrap_or_default().to_string();
    match rng.below(20) {
        0 => vec!["*".into()],
        1..=3 => {
            let regions: Vec<_> = cluster.topology.regions().collect();
            let region = rng.pick(&regions).copied().unwrap_or_default();
            vec![cluster.topology.name_of(region).into()]
        }
        4..=6 => (0..rng.range(2, 4)).map(|_| one(rng)).collect(),
        _ => vec![one(rng)],
    }
}

impl Fault {
    /// Draws a fault of that kind; a partition of an odd shape is several at once.
    #[must_use]
    pub fn draw(kind: Drawn, cluster: &Cluster, rng: &mut Rng) -> Vec<Self> {
        let nodes = draw_nodes(cluster, rng);
        let (from, to) = (nodes.clone(), Vec::new());
        let small = |rng: &mut Rng, most: u64| u32::try_from(rng.range(1, most)).unwrap_or(1);
        let percent = u8::try_from(rng.range(1, 40)).unwrap_or(1);
        let fault = match kind {
            Drawn::Crash => match rng.below(4) {
                0 => Self::TornWrite { nodes },
                1 => Self::CrashAtFlush { nodes, after_report: rng.chance(1, 2) },
                _ => Self::Crash { nodes },
            },
            Drawn::Pause => Self::Pause { nodes },
            Drawn::Partition => return draw_partition(cluster, nodes, rng),
            Drawn::Loss => Self::Loss { from, to, percent },
            Drawn::Duplicate => Self::Duplicate { from, to, percent },
            Drawn::Delay => {
                Self::Delay { from, to, extra_ms: small(rng, 400), both_ways: rng.chance(1, 2) }
            }
            Drawn::SlowCpu => Self::SlowCpu { nodes, factor: small(rng, 500) },
            Drawn::Clock => match rng.below(2) {
                0 => {
                    let by_ms = i64::try_from(rng.range(1, 2_000)).unwrap_or(1);
                    Self::ClockStep { nodes, by_ms: if rng.chance(1, 2) { by_ms } else { -by_ms } }
                }
                _ => {
                    let ppm = i64::try_from(rng.range(100, 100_000)).unwrap_or(100);
                    Self::ClockDrift { nodes, ppm: if rng.chance(1, 2) { ppm } else { -ppm } }
                }
            },
            Drawn::Disk => match rng.below(4) {
                0 => Self::DiskFull { nodes },
                1 => Self::FsyncError { nodes },
                _ => Self::SlowDisk { nodes, extra_ms: small(rng, 500) },
            },
            Drawn::Admin => return draw_admin(cluster, rng),
        };
        vec![fault]
    }
}

/// A fault that suits a seed's profile, and for how many milliseconds; none if any will do.
pub(crate) fn draw_for(
    profile: FaultProfile,
    cluster: &Cluster,
    rng: &mut Rng,
) -> Option<(u64, Vec<Fault>)> {
    let servers: Vec<String> = cluster.servers().map(|node| node.id.to_string()).collect();
    let partitions: Vec<_> = cluster.partitions().collect();
    let partition = rng.pick(&partitions)?;
    let leader = partition.preferred_leader;
    match profile {
        FaultProfile::Mixed | FaultProfile::PowerCuts => None,
        FaultProfile::ClockSkew if rng.chance(2, 3) => {
            let to = vec![rng.pick(&servers)?.clone()];
            Some((rng.range(500, 3_000), draw_late(cluster, to, 800, rng)?))
        }
        FaultProfile::LeaderChurn if rng.chance(1, 8) => {
            Some((rng.below(200), vec![Fault::Crash { nodes: vec![leader.to_string()] }]))
        }
        FaultProfile::LeaderChurn if rng.chance(1, 5) => {
            Some((rng.range(500, 3_000), draw_late(cluster, Vec::new(), 800, rng)?))
        }
        FaultProfile::PriorityRaces if rng.chance(1, 3) => {
            Some((rng.below(200), vec![Fault::Crash { nodes: vec![leader.to_string()] }]))
        }
        // A new leader of a term knows only what its log says.
        FaultProfile::ClockSkew | FaultProfile::LeaderChurn | FaultProfile::PriorityRaces => {
            let to = rng.pick(&partition.replicas)?.to_string();
            Some((0, vec![Fault::TransferLeader { partition: partition.id.0, to }]))
        }
        FaultProfile::LaggingReplicas => Some(draw_straggler(cluster, servers, rng)?),
        FaultProfile::Partitions => {
            let both_ways = rng.chance(2, 3);
            let fault = if rng.chance(1, 2) {
                let region = cluster.topology.name_of(cluster.region_of(leader)).to_owned();
                Fault::Partition { from: vec![region], to: Vec::new(), both_ways }
            } else {
                // Callers still reach it.
                let leader = leader.to_string();
                let others = servers.into_iter().filter(|other| *other != leader).collect();
                Fault::Partition { from: vec![leader], to: others, both_ways }
            };
            // Long enough for the others to choose another leader, and for callers to find it.
            let round_trip = u64::try_from(cluster.topology.rtt_max().as_millis()).unwrap_or(300);
            Some((1_000 + round_trip * rng.range(6, 50), vec![fault]))
        }
    }
}

/// Faults that must follow each other, for a profile that consists of such sequences.
pub(crate) fn draw_sequence(
    profile: FaultProfile,
    cluster: &Cluster,
    at_ms: u64,
    rng: &mut Rng,
) -> Option<Vec<Entry>> {
    match profile {
        FaultProfile::PowerCuts => draw_power_cut(cluster, at_ms, rng),
        FaultProfile::Mixed
        | FaultProfile::ClockSkew
        | FaultProfile::LeaderChurn
        | FaultProfile::Partitions
        | FaultProfile::PriorityRaces
        | FaultProfile::LaggingReplicas => None,
    }
}

/// A leader does not reach its followers, but its callers; then it loses power until the others have
/// another leader, and some of the others lose it for a moment.
fn draw_power_cut(cluster: &Cluster, at_ms: u64, rng: &mut Rng) -> Option<Vec<Entry>> {
    let partitions: Vec<_> = cluster.partitions().collect();
    let partition = rng.pick(&partitions)?;
    let leader = partition.preferred_leader;
    let mut followers: Vec<String> = partition
        .replicas
        .iter()
        .filter(|node| **node != leader)
        .map(ToString::to_string)
        .collect();
    if followers.is_empty() {
        return None;
    }
    let round_trip = u64::try_from(cluster.topology.rtt_max().as_millis()).unwrap_or(300);
    let crash_ms = at_ms + 20 + rng.range(round_trip / 2, round_trip * 5);
    let long_ms = crash_ms + round_trip * rng.range(10, 40);
    let short_ms = crash_ms + rng.range(1, 20);
    let cut = Fault::Partition {
        from: vec![leader.to_string()],
        to: followers.clone(),
        both_ways: false,
    };
    let leader = Fault::Crash { nodes: vec![leader.to_string()] };
    rng.shuffle(&mut followers);
    let most = (followers.len() as u64).saturating_sub(1).max(1);
    followers.truncate(usize::try_from(rng.range(1, most)).unwrap_or(1));
    let others = Fault::Crash { nodes: followers };
    Some(vec![
        Entry { at_ms, until_ms: Some(crash_ms + 1), fault: cut },
        Entry { at_ms: crash_ms, until_ms: Some(long_ms), fault: leader },
        Entry { at_ms: crash_ms, until_ms: Some(short_ms), fault: others },
    ])
}

/// A server that hears another one late, whatever others say to it; or callers who ask again before
/// they hear anything; or a server that crashes while its disk has much to write.
fn draw_straggler(
    cluster: &Cluster,
    servers: Vec<String>,
    rng: &mut Rng,
) -> Option<(u64, Vec<Fault>)> {
    let server = rng.pick(&servers)?.clone();
    match rng.below(8) {
        0..3 => Some((rng.range(300, 2_000), draw_late(cluster, Vec::new(), 800, rng)?)),
        3 => {
            let extra_ms = u32::try_from(rng.range(50, 500)).unwrap_or(50);
            let slow = Fault::SlowDisk { nodes: vec![server.clone()], extra_ms };
            let crash = Fault::CrashAtFlush { nodes: vec![server], after_report: rng.chance(1, 2) };
            Some((rng.range(600, 2_000), vec![slow, crash]))
        }
        _ => {
            let others: Vec<String> =
                servers.into_iter().filter(|other| *other != server).collect();
            let to = vec![rng.pick(&others)?.clone()];
            let from = vec![server];
            let late = if rng.chance(1, 2) {
                let extra_ms = u32::try_from(rng.range(200, 3_000)).unwrap_or(200);
                Fault::Delay { from, to, extra_ms, both_ways: false }
            } else {
                // Of what is said one after the other, some is late.
                let percent = u8::try_from(rng.range(10, 50)).unwrap_or(10);
                Fault::Loss { from, to, percent }
            };
            Some((rng.range(300, 3_000), vec![late]))
        }
    }
}

/// What the callers of one gateway say is late: at one server, so that it hears of them after the
/// others, or everywhere, so that they ask again before they hear anything.
fn draw_late(
    cluster: &Cluster,
    to: Vec<String>,
    most_ms: u64,
    rng: &mut Rng,
) -> Option<Vec<Fault>> {
    let gateways: Vec<_> = cluster.nodes().filter(|node| node.role == Role::Gateway).collect();
    let from = vec![rng.pick(&gateways)?.id.to_string()];
    let extra_ms = u32::try_from(rng.range(50, most_ms)).unwrap_or(50);
    Some(vec![Fault::Delay { from, to, extra_ms, both_ways: rng.chance(1, 4) }])
}

/// A node or region cut off, one way or both; or a random set of links between regions, which
/// makes rings, bridges and majorities that do not agree on who is in them.
fn draw_partition(cluster: &Cluster, nodes: Vec<String>, rng: &mut Rng) -> Vec<Fault> {
    if rng.chance(2, 3) {
        return vec![Fault::Partition { from: nodes, to: Vec::new(), both_ways: rng.chance(2, 3) }];
    }
    let names: Vec<&str> =
        cluster.topology.regions().map(|region| cluster.topology.name_of(region)).collect();
    let both_ways = rng.chance(1, 2);
    let mut faults = Vec::new();
    for from in &names {
        let others = names.iter().filter(|name| *name != from && rng.chance(1, 3));
        let to: Vec<String> = others.map(|name| (*name).to_owned()).collect();
        if !to.is_empty() {
            faults.push(Fault::Partition { from: vec![(*from).to_owned()], to, both_ways });
        }
    }
    faults
}

/// Another leader for a partition, or one of its replicas replaced by a server that has none.
fn draw_admin(cluster: &Cluster, rng: &mut Rng) -> Vec<Fault> {
    let partitions: Vec<_> = cluster.partitions().collect();
    let Some(partition) = rng.pick(&partitions) else { return Vec::new() };
    let name = |id: &NodeId| id.to_string();
    let spare: Vec<NodeId> = cluster.servers().map(|node| node.id).collect();
    let spare: Vec<NodeId> =
        spare.into_iter().filter(|id| !partition.replicas.contains(id)).collect();
    if let (true, Some(new)) = (rng.chance(1, 3), rng.pick(&spare)) {
        let mut voters: Vec<String> = partition.replicas.iter().map(name).collect();
        let out = usize::try_from(rng.below(voters.len() as u64)).unwrap_or(0);
        if let Some(place) = voters.get_mut(out) {
            *place = name(new);
        }
        return vec![Fault::ChangeMembers {
            partition: partition.id.0,
            voters,
            learners: Vec::new(),
        }];
    }
    let to = rng.pick(&partition.replicas).map(name).unwrap_or_default();
    vec![Fault::TransferLeader { partition: partition.id.0, to }]
}

/// Operators who give partitions to other servers, again and again: one replica at a time, all at once,
/// more replicas or fewer, back to where they were; several partitions, perhaps in the same moment; the
/// same order twice; and a leader that is told to go, or to come, meanwhile.
pub(crate) fn draw_moves(cluster: &Cluster, end_ms: u64, rng: &mut Rng) -> Vec<Entry> {
    let servers: Vec<NodeId> = cluster.servers().map(|node| node.id).collect();
    let mut partitions: Vec<_> = cluster.partitions().collect();
    rng.shuffle(&mut partitions);
    let moved = if rng.chance(1, 2) { rng.range(1, partitions.len() as u64) } else { 1 };
    partitions.truncate(usize::try_from(moved).unwrap_or(1));
    let together = rng.chance(1, 2).then(|| 200 + rng.below(end_ms / 2));
    let mut entries = Vec::new();
    for placed in partitions {
        let mut at_ms = together.unwrap_or_else(|| 200 + rng.below(end_ms / 2));
        let mut voters = placed.replicas.clone();
        let gap = rng.range(50, 2_000);
        for _ in 0..rng.range(1, 6) {
            if at_ms >= end_ms {
                break;
            }
            let next = draw_voters(&placed.replicas, &voters, &servers, rng);
            let mut give = |at_ms, fault| entries.push(Entry { at_ms, until_ms: None, fault });
            let order = change_members(placed.id, &next);
            give(at_ms, order.clone());
            if rng.chance(1, 3) {
                give(at_ms + rng.below(1_500), order);
            }
            if let (true, Some(to)) = (rng.chance(1, 2), rng.pick(&[&*voters, &*next].concat())) {
                let transfer = Fault::TransferLeader { partition: placed.id.0, to: to.to_string() };
                give((at_ms + rng.below(600)).saturating_sub(200), transfer);
            }
            voters = next;
            at_ms += 1 + rng.below(2 * gap);
        }
    }
    entries
}

fn change_members(partition: PartitionId, voters: &[NodeId]) -> Fault {
    let voters = voters.iter().map(NodeId::to_string).collect();
    Fault::ChangeMembers { partition: partition.0, voters, learners: Vec::new() }
}

/// The voters after `now` of a group that began with `first`.
fn draw_voters(first: &[NodeId], now: &[NodeId], servers: &[NodeId], rng: &mut Rng) -> Vec<NodeId> {
    let mut others: Vec<NodeId> = servers.iter().copied().filter(|id| !now.contains(id)).collect();
    rng.shuffle(&mut others);
    let mut next = now.to_vec();
    rng.shuffle(&mut next);
    match rng.below(8) {
        0 => return first.to_vec(),
        1 | 2 if others.len() >= now.len() => {
            others.truncate(now.len());
            return others;
        }
        3 if others.len() >= 2 && matches!(now.len(), 1 | 3 | 5) => next.extend(others.drain(..2)),
        4 if now.len() > 2 => next.truncate(now.len() - 2),
        // Groups of an even number are rare.
        5 if now.len() < 4 && rng.chance(1, 2) => match others.pop() {
            Some(new) if now.len() == 1 => next.push(new),
            Some(_) | None => next.truncate((now.len() - 1).max(1)),
        },
        _ => {
            // Rather one of the first than one that has come since.
            let leaving = next.iter().position(|id| first.contains(id)).unwrap_or(0);
            if let (Some(place), Some(new)) = (next.get_mut(leaving), others.first()) {
                *place = *new;
            }
        }
    }
    next
}

/// Looks names up on behalf of one entry.
struct Names<'a> {
    cluster: &'a Cluster,
    entry: usize,
    at_ms: u64,
}

impl Names<'_> {
    fn value(&self, problem: String) -> ScheduleError {
        ScheduleError::Value { entry: self.entry, at_ms: self.at_ms, problem }
    }

    fn unknown(&self, name: &str, expected: &'static str) -> ScheduleError {
        ScheduleError::Name { entry: self.entry, at_ms: self.at_ms, name: name.into(), expected }
    }

    /// Dense numbers of the nodes that `names` mean.
    fn nodes(&self, names: &[String]) -> Result<Vec<u32>, ScheduleError> {
        let mut found = BTreeSet::new();
        for name in names {
            let id = name.parse::<NodeId>().ok();
            let region = self.cluster.topology.region_named(name);
            let before = found.len();
            for (index, node) in (0_u32..).zip(self.cluster.nodes()) {
                if name == "*" || Some(node.id) == id || Some(node.region) == region {
                    found.insert(index);
                }
            }
            let is_known = name == "*" || region.is_some() || found.len() > before;
            if !is_known && id.is_none_or(|id| self.cluster.node(id).is_none()) {
                return Err(self.unknown(
                    name,
                    "use a node of the cluster (`n4`), one of its regions, or `*` for every node",
                ));
            }
        }
        Ok(found.into_iter().collect())
    }

    /// Ordered pairs of different nodes.
    fn pairs(
        &self,
        from: &[String],
        to: &[String],
        both_ways: bool,
    ) -> Result<Vec<(u32, u32)>, ScheduleError> {
        let from = self.nodes(from)?;
        let to = if to.is_empty() {
            let all = self.nodes(&["*".into()])?;
            all.into_iter().filter(|node| !from.contains(node)).collect()
        } else {
            self.nodes(to)?
        };
        let mut pairs = BTreeSet::new();
        for &a in &from {
            for &b in to.iter().filter(|&&b| b != a) {
                pairs.insert((a, b));
                if both_ways {
                    pairs.insert((b, a));
                }
            }
        }
        Ok(pairs.into_iter().collect())
    }

    fn server(&self, name: &str) -> Result<NodeId, ScheduleError> {
        let id = name.parse::<NodeId>().ok();
        let node = id.and_then(|id| self.cluster.node(id));
        let server = node.filter(|node| node.role == Role::Server);
        server
            .map(|node| node.id)
            .ok_or_else(|| self.unknown(name, "use a server of the cluster (`n4`)"))
    }

    /// The servers that an operator's order about `partition` goes to: all, for after some changes of
    /// members anyone may lead. Whoever does not lead ignores it.
    fn group(&self, partition: u32) -> Result<Vec<u32>, ScheduleError> {
        if self.cluster.partition(PartitionId(partition)).is_none() {
            return Err(self.unknown(&format!("p{partition}"), "use a partition of the cluster"));
        }
        let nodes = (0_u32..).zip(self.cluster.nodes());
        let servers = nodes.filter(|(_, node)| node.role == Role::Server);
        Ok(servers.map(|(index, _)| index).collect())
    }

    /// Nodes that may be lost with their disks: gateways, and servers that `replaceable` names.
    fn replaced(
        &self,
        names: &[String],
        replaceable: &[NodeId],
    ) -> Result<Vec<u32>, ScheduleError> {
        let chosen = self.nodes(names)?;
        for (index, node) in (0_u32..).zip(self.cluster.nodes()) {
            let may_be = node.role == Role::Gateway || replaceable.contains(&node.id);
            if chosen.contains(&index) && !may_be {
                return Err(self.value(format!(
                    "it replaces {}, whose disk holds votes and entries of replicated logs that \
                     others count on: with this protocol, no new server may take its name. Use \
                     fault.change-members to give its partitions to other servers, and fault.crash \
                     to take it away",
                    node.id
                )));
            }
        }
        Ok(chosen)
    }

    fn ppm(&self, percent: u8) -> Result<u32, ScheduleError> {
        if percent > 100 {
            return Err(self.value(format!("{percent} is not a percentage; use 0 to 100")));
        }
        Ok(u32::from(percent) * 10_000)
    }
}

impl Fault {
    /// Its name in schedules and reports.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Crash { .. } => "crash",
            Self::TornWrite { .. } => "torn-write",
            Self::CrashAtFlush { .. } => "crash-at-flush",
            Self::Replace { .. } => "replace",
            Self::Pause { .. } => "pause",
            Self::Partition { .. } => "partition",
            Self::Loss { .. } => "loss",
            Self::Duplicate { .. } => "duplicate",
            Self::Delay { .. } => "delay",
            Self::SlowCpu { .. } => "slow-cpu",
            Self::ClockStep { .. } => "clock-step",
            Self::ClockDrift { .. } => "clock-drift",
            Self::DiskFull { .. } => "disk-full",
            Self::FsyncError { .. } => "fsync-error",
            Self::SlowDisk { .. } => "slow-disk",
            Self::FlipBit { .. } => "flip-bit",
            Self::SwapDisks { .. } => "swap-disks",
            Self::LyingFsync { .. } => "lying-fsync",
            Self::OldCopy { .. } => "old-copy",
            Self::TransferLeader { .. } => "transfer-leader",
            Self::ChangeMembers { .. } => "change-members",
        }
    }

    fn resolve(
        &self,
        names: &Names<'_>,
        network: &NetworkModel,
        replaceable: &[NodeId],
    ) -> Result<Action, ScheduleError> {
        let disk =
            |nodes: &[String], failure| Ok(Action::Disk { nodes: names.nodes(nodes)?, failure });
        let links = |pairs, by| Ok(Action::Links { pairs, by });
        let none = Disturbance::default();
        match self {
            Self::Crash { nodes } => Ok(Action::Crash { nodes: names.nodes(nodes)?, torn: false }),
            Self::TornWrite { nodes } => {
                Ok(Action::Crash { nodes: names.nodes(nodes)?, torn: true })
            }
            Self::CrashAtFlush { nodes, after_report: true } => {
                disk(nodes, DiskFailure::CrashAfterReport)
            }
            Self::CrashAtFlush { nodes, after_report: false } => {
                disk(nodes, DiskFailure::CrashBeforeReport)
            }
            Self::Replace { nodes } => Ok(Action::Replace(names.replaced(nodes, replaceable)?)),
            Self::Pause { nodes } => Ok(Action::Pause(names.nodes(nodes)?)),
            Self::Partition { from, to, both_ways } => {
                let by = Disturbance { blocked: true, ..none };
                links(names.pairs(from, to, *both_ways)?, by)
            }
            Self::Loss { from, to, percent } => {
                let by = Disturbance { loss_ppm: names.ppm(*percent)?, ..none };
                links(names.pairs(from, to, false)?, by)
            }
            Self::Duplicate { from, to, percent } => {
                if network.links == Links::Ordered {
                    return Err(names.value(
                        "ordered links do not duplicate messages; run with unordered links".into(),
                    ));
                }
                let by = Disturbance { duplicate_ppm: names.ppm(*percent)?, ..none };
                links(names.pairs(from, to, false)?, by)
            }
            Self::Delay { from, to, extra_ms, both_ways } => {
                let delay = Duration::from_millis(u64::from(*extra_ms));
                links(names.pairs(from, to, *both_ways)?, Disturbance { delay, ..none })
            }
            Self::SlowCpu { nodes, factor } => {
                Ok(Action::SlowCpu { nodes: names.nodes(nodes)?, factor: *factor })
            }
            Self::ClockStep { nodes, by_ms } => Ok(Action::Clock {
                nodes: names.nodes(nodes)?,
                step_ns: by_ms.saturating_mul(1_000_000),
                ppm: 0,
            }),
            Self::ClockDrift { nodes, ppm } => {
                Ok(Action::Clock { nodes: names.nodes(nodes)?, step_ns: 0, ppm: *ppm })
            }
            Self::DiskFull { nodes } => disk(nodes, DiskFailure::Full),
            Self::FsyncError { nodes } => disk(nodes, DiskFailure::FsyncError),
            Self::SlowDisk { nodes, extra_ms } => Ok(Action::SlowDisk {
                nodes: names.nodes(nodes)?,
                extra: Duration::from_millis(u64::from(*extra_ms)),
            }),
            Self::FlipBit { nodes } => Ok(Action::FlipBit(names.nodes(nodes)?)),
            Self::SwapDisks { nodes } => match names.nodes(nodes)?.as_slice() {
                &[a, b] => Ok(Action::SwapDisks(a, b)),
                _ => Err(names.value("`swap-disks` needs exactly two nodes".into())),
            },
            Self::LyingFsync { nodes } => Ok(Action::LyingFsync(names.nodes(nodes)?)),
            Self::OldCopy { nodes } => Ok(Action::OldCopy(names.nodes(nodes)?)),
            Self::TransferLeader { partition, to } => {
                let to = names.server(to)?;
                let order = Admin::TransferLeader { partition: PartitionId(*partition), to };
                Ok(Action::Admin { nodes: names.group(*partition)?, order })
            }
            Self::ChangeMembers { partition, voters, learners } => {
                let look_up = |list: &[String]| list.iter().map(|n| names.server(n)).collect();
                let voters: Vec<NodeId> = Result::from_iter::<Vec<_>>(look_up(voters))?;
                let learners: Vec<NodeId> = Result::from_iter::<Vec<_>>(look_up(learners))?;
                let nodes = names.group(*partition)?;
                let partition = PartitionId(*partition);
                Ok(Action::Admin {
                    nodes,
                    order: Admin::ChangeMembers { partition, voters, learners },
                })
            }
        }
    }
}

impl<P: Protocol> Simulation<P> {
    /// An entry of the schedule begins or ends.
    pub(crate) fn fault(&mut self, entry: u32, is_heal: bool) {
        let Some(planned) = self.plan.entries.get(entry as usize) else { return };
        let (name, action) = (planned.name, planned.action.clone());
        // A schedule's entry belongs to no node: it is logged at `n0`, which no cluster has.
        self.world.log(u32::MAX, TraceEvent::Fault, None, None, None, name, || {
            let what = if is_heal { "ends" } else { "begins" };
            format!("{what} {action:?}")
        });
        if is_heal {
            self.end_fault(&action);
        } else {
            *self.injected.entry(name).or_default() += 1;
            self.begin_fault(&action);
        }
    }

    fn begin_fault(&mut self, action: &Action) {
        let now = self.world.now;
        match action {
            Action::Crash { nodes, torn } => {
                for &index in nodes {
                    self.node(index).held_down += 1;
                    self.crash(index, *torn);
                }
            }
            Action::Replace(nodes) => {
                for &index in nodes {
                    self.node(index).held_down += 1;
                    self.crash(index, false);
                    self.return_disk(index);
                    self.node(index).disk.replace();
                }
            }
            Action::Disk { nodes, failure } => {
                nodes.iter().for_each(|&n| self.node(n).disk.failure = Some(*failure));
            }
            Action::Pause(nodes) => nodes.iter().for_each(|&n| self.node(n).paused += 1),
            Action::Links { pairs, by } => {
                pairs.iter().for_each(|&(from, to)| self.world.network.disturb(from, to, *by));
            }
            Action::SlowCpu { nodes, factor } => {
                nodes.iter().for_each(|&n| self.node(n).cpu.slow_down(*factor));
            }
            Action::Clock { nodes, step_ns, ppm } => {
                for &index in nodes {
                    let clock = &mut self.node(index).clock;
                    clock.step(*step_ns);
                    clock.drift(*ppm, now);
                }
            }
            Action::SlowDisk { nodes, extra } => {
                nodes.iter().for_each(|&n| self.node(n).disk.slow_down(*extra));
            }
            Action::FlipBit(nodes) => nodes.iter().for_each(|&n| self.flip_bit(n)),
            Action::SwapDisks(a, b) => self.swap_disks(*a, *b),
            Action::LyingFsync(nodes) => nodes.iter().for_each(|&n| self.node(n).disk.lie(true)),
            Action::OldCopy(nodes) => nodes.iter().for_each(|&n| self.node(n).disk.copy()),
            Action::Admin { nodes, order } => {
                for &index in nodes {
                    self.input(index, Input::Admin(order.clone()), 0);
                }
            }
        }
    }

    fn end_fault(&mut self, action: &Action) {
        let now = self.world.now;
        match action {
            Action::Crash { nodes, .. } | Action::Replace(nodes) => {
                for &index in nodes {
                    let node = self.node(index);
                    node.held_down = node.held_down.saturating_sub(1);
                    self.start_node(index);
                }
            }
            Action::Disk { nodes, .. } => nodes.iter().for_each(|&n| self.repair_disk(n)),
            Action::Pause(nodes) => {
                for &index in nodes {
                    let node = self.node(index);
                    node.paused = node.paused.saturating_sub(1);
                    self.resume(index);
                }
            }
            Action::Links { pairs, by } => {
                for &(from, to) in pairs {
                    let released = self.world.network.calm(now, from, to, *by);
                    self.release(released);
                }
            }
            Action::SlowCpu { nodes, .. } => {
                nodes.iter().for_each(|&n| self.speed_up(n));
            }
            Action::Clock { nodes, .. } => nodes.iter().for_each(|&n| self.node(n).clock.repair()),
            Action::SlowDisk { nodes, .. } => {
                nodes.iter().for_each(|&n| self.node(n).disk.slow_down(Duration::ZERO));
            }
            Action::FlipBit(nodes) => {
                for &index in nodes {
                    self.node(index).disk.restore();
                    self.start_node(index);
                }
            }
            Action::SwapDisks(a, b) => {
                for index in [*a, *b] {
                    self.return_disk(index);
                    self.start_node(index);
                }
            }
            Action::LyingFsync(nodes) => nodes.iter().for_each(|&n| self.node(n).disk.lie(false)),
            Action::OldCopy(nodes) => nodes.iter().for_each(|&n| self.roll_back(n)),
            // An order is given once.
            Action::Admin { .. } => {}
        }
    }

    /// A node loses power, a bit of its log flips, and it tries to start.
    fn flip_bit(&mut self, index: u32) {
        self.crash(index, false);
        let Self { nodes, world, .. } = self;
        let Some(node) = nodes.get_mut(index as usize) else { return };
        let lost = node.disk.flip_bit(world.now, &mut world.disk_rng);
        self.lose_writes(index, lost, "by a flipped bit at the end of its log");
        self.start_node(index);
    }

    /// Two nodes lose power, and each tries to start with the other's disk.
    fn swap_disks(&mut self, a: u32, b: u32) {
        for index in [a, b] {
            self.crash(index, false);
            self.return_disk(index);
        }
        self.exchange_disks(a, b);
        self.start_node(a);
        self.start_node(b);
    }

    fn exchange_disks(&mut self, a: u32, b: u32) {
        if let Ok([a, b]) = self.nodes.get_disjoint_mut([a as usize, b as usize]) {
            std::mem::swap(&mut a.disk, &mut b.disk);
        }
    }

    /// A node that is down gets its own disk back, if another one has it.
    fn return_disk(&mut self, index: u32) {
        let id = self.node(index).id;
        let holder = (0_u32..).zip(&self.nodes).find(|(_, node)| node.disk.owner() == id);
        if let Some((holder, _)) = holder.filter(|(holder, _)| *holder != index) {
            self.exchange_disks(index, holder);
        }
    }

    /// A copy of a node's disk comes back in place of the disk.
    fn roll_back(&mut self, index: u32) {
        self.crash(index, false);
        let lost = self.node(index).disk.roll_back();
        self.lose_writes(index, lost, "by an old copy of its disk");
        self.start_node(index);
    }

    fn repair_disk(&mut self, index: u32) {
        let node = self.node(index);
        node.disk.failure = None;
        if std::mem::take(&mut node.disk_stopped) {
            node.held_down = node.held_down.saturating_sub(1);
            self.start_node(index);
        }
    }

    /// Ends every fault and cancels those that are still to come, except that `down` stay down for
    /// ever: the start of a liveness phase.
    pub fn heal_all(&mut self, down: &[NodeId]) {
        let now = self.world.now;
        self.plan.entries.clear();
        let count = u32::try_from(self.nodes.len()).unwrap_or(u32::MAX);
        for from in 0..count {
            for to in 0..count {
                let released = self.world.network.calm_all(now, from, to);
                self.release(released);
            }
        }
        (0..count).for_each(|index| self.return_disk(index));
        for index in 0..count {
            self.speed_up(index);
            let node = self.node(index);
            let stays_down = down.contains(&node.id);
            node.held_down = u32::from(stays_down);
            node.disk_stopped = false;
            node.disk.failure = None;
            node.disk.slow_down(Duration::ZERO);
            node.disk.restore();
            node.disk.lie(false);
            node.clock.repair();
            node.paused = 0;
            if stays_down {
                self.crash(index, false);
            } else {
                self.start_node(index);
                self.resume(index);
            }
        }
    }
}
