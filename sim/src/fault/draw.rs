//! The faults that a swarm draws.

use orthodrome_core::cluster::{Cluster, Role};
use orthodrome_core::id::{NodeId, PartitionId};
use orthodrome_core::rng::Rng;

use super::{Entry, Fault};
use crate::network::{Links, NetworkModel};
use crate::swarm::FaultProfile;

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

/// The nodes that a drawn fault affects: mostly one, sometimes a region, several nodes, or all.
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
    /// Draws a fault of this kind. A partition of an unusual shape consists of several faults at
    /// once.
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

/// A fault that fits a seed's profile, and its duration in milliseconds; none if any fault fits.
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
        // A new leader knows only what its log contains.
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
                // Clients still reach it.
                let leader = leader.to_string();
                let others = servers.into_iter().filter(|other| *other != leader).collect();
                Fault::Partition { from: vec![leader], to: others, both_ways }
            };
            // Long enough for the others to elect a new leader, and for clients to find it.
            let round_trip = u64::try_from(cluster.topology.rtt_max().as_millis()).unwrap_or(300);
            Some((1_000 + round_trip * rng.range(6, 50), vec![fault]))
        }
    }
}

/// A sequence of faults, for a profile that consists of such sequences.
pub(crate) fn draw_sequence(
    profile: FaultProfile,
    cluster: &Cluster,
    at_ms: u64,
    rng: &mut Rng,
) -> Option<Vec<Entry>> {
    match profile {
        FaultProfile::PowerCuts => draw_power_cut(cluster, at_ms, rng),
        FaultProfile::PriorityRaces if rng.chance(1, 3) => draw_lost_votes(cluster, at_ms, rng),
        FaultProfile::Partitions if rng.chance(1, 3) => draw_long_log(cluster, at_ms, rng),
        FaultProfile::Mixed
        | FaultProfile::ClockSkew
        | FaultProfile::LeaderChurn
        | FaultProfile::Partitions
        | FaultProfile::PriorityRaces
        | FaultProfile::LaggingReplicas => None,
    }
}

/// A leader is cut off from its followers, but not from its clients. Then it loses power until the
/// others have a new leader, and some of the others lose power for a moment.
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

/// What a leader says to one server does not arrive, while a majority follows it; then it loses
/// power, and what it said is lost with it. So its group goes on with what is in the log, and the
/// other server, which may coordinate transactions, has to ask the next leader. Perhaps a third
/// leader hears nothing of the group until then: what the group decides reaches the second one first
/// (N4).
fn draw_lost_votes(cluster: &Cluster, at_ms: u64, rng: &mut Rng) -> Option<Vec<Entry>> {
    let partitions: Vec<_> = cluster.partitions().collect();
    let group = rng.pick(&partitions)?;
    let leader = group.preferred_leader;
    let mut others: Vec<NodeId> = partitions
        .iter()
        .map(|placed| placed.preferred_leader)
        .filter(|id| *id != leader)
        .collect();
    others.sort_unstable();
    others.dedup();
    rng.shuffle(&mut others);
    let name = |id: &NodeId| id.to_string();
    let from = vec![name(&leader)];
    let to = vec![name(others.first()?)];
    let round_trip = u64::try_from(cluster.topology.rtt_max().as_millis()).unwrap_or(300);
    let crash_ms = at_ms + 20 + rng.range(round_trip / 2, round_trip * 4);
    let until_ms = Some(crash_ms + round_trip * rng.range(5, 30));
    let cut = Fault::Partition { from: from.clone(), to, both_ways: false };
    let crash = Fault::Crash { nodes: from };
    let mut entries = vec![
        Entry { at_ms, until_ms: Some(crash_ms + 1), fault: cut },
        Entry { at_ms: crash_ms, until_ms, fault: crash },
    ];
    if let (Some(third), true) = (others.get(1), rng.chance(2, 3)) {
        let from = group.replicas.iter().filter(|id| *id != third).map(name).collect();
        let cut = Fault::Partition { from, to: vec![name(third)], both_ways: false };
        let until_ms = Some(crash_ms + round_trip * rng.range(8, 40));
        entries.push(Entry { at_ms: crash_ms, until_ms, fault: cut });
    }
    Some(entries)
}

/// A leader is cut off from all other servers, but not from its clients, so its log grows with
/// entries that no other server has. The others elect a leader, which goes on. Then they lose power,
/// and the first one is back with a long log and nobody who knows better: it must not lead (S4).
fn draw_long_log(cluster: &Cluster, at_ms: u64, rng: &mut Rng) -> Option<Vec<Entry>> {
    let partitions: Vec<_> = cluster.partitions().collect();
    let partition = rng.pick(&partitions)?;
    let leader = partition.preferred_leader;
    let name = |id: &NodeId| id.to_string();
    let followers: Vec<String> =
        partition.replicas.iter().filter(|id| **id != leader).map(name).collect();
    let servers = cluster.servers().map(|node| node.id).filter(|id| *id != leader);
    let servers: Vec<String> = servers.map(|id| name(&id)).collect();
    if followers.is_empty() {
        return None;
    }
    let round_trip = u64::try_from(cluster.topology.rtt_max().as_millis()).unwrap_or(300);
    let crash_ms = at_ms + 300 + round_trip * rng.range(4, 30);
    let cut = Fault::Partition { from: vec![name(&leader)], to: servers, both_ways: true };
    Some(vec![
        Entry { at_ms, until_ms: Some(crash_ms + 1), fault: cut },
        Entry {
            at_ms: crash_ms,
            until_ms: Some(crash_ms + 2 + rng.below(2_000)),
            fault: Fault::Crash { nodes: followers },
        },
    ])
}

/// A server that hears another one late, whatever others say to it; or clients who ask again before
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
                // Of several messages in sequence, some are late.
                let percent = u8::try_from(rng.range(10, 50)).unwrap_or(10);
                Fault::Loss { from, to, percent }
            };
            Some((rng.range(300, 3_000), vec![late]))
        }
    }
}

/// The messages of one gateway's clients are late: at one server, which then receives them after
/// the others, or everywhere, so that the clients retry before any answer arrives.
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

/// A node or region is cut off, in one direction or both; or a random set of links between regions
/// is cut, which makes rings, bridges and overlapping majorities.
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

/// A new leader for a partition, or a new server in place of one of its replicas.
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

/// Operators who keep moving partitions to other servers: one replica at a time, all at once, to
/// more replicas or fewer, and back to the original ones. They move several partitions, perhaps at
/// the same moment; give the same order twice; and transfer leadership meanwhile.
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

/// The next voters of a group that has the voters `now`, and that began with `first`.
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
        // Groups with an even number of voters are rare.
        5 if now.len() < 4 && rng.chance(1, 2) => match others.pop() {
            Some(new) if now.len() == 1 => next.push(new),
            Some(_) | None => next.truncate((now.len() - 1).max(1)),
        },
        _ => {
            // An original voter rather than one added later.
            let leaving = next.iter().position(|id| first.contains(id)).unwrap_or(0);
            if let (Some(place), Some(new)) = (next.get_mut(leaving), others.first()) {
                *place = *new;
            }
        }
    }
    next
}
