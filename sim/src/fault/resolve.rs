//! Looks up the nodes, links and partitions that the entries of a schedule name.

use orthodrome_core::cluster::{Cluster, Role};
use orthodrome_core::id::{NodeId, PartitionId};
use orthodrome_core::machine::Admin;
use orthodrome_core::ordered::OrdSet;
use orthodrome_core::time::Duration;

use super::{Action, Fault, ScheduleError};
use crate::disk::DiskFailure;
use crate::network::{Disturbance, Links, NetworkModel};

/// Looks up the names in one entry.
pub(super) struct Names<'a> {
    pub(super) cluster: &'a Cluster,
    pub(super) entry: usize,
    pub(super) at_ms: u64,
}

impl Names<'_> {
    pub(super) fn value(&self, problem: String) -> ScheduleError {
        ScheduleError::Value { entry: self.entry, at_ms: self.at_ms, problem }
    }

    fn unknown(&self, name: &str, expected: &'static str) -> ScheduleError {
        ScheduleError::Name { entry: self.entry, at_ms: self.at_ms, name: name.into(), expected }
    }

    /// Dense numbers of the nodes in `names`.
    fn nodes(&self, names: &[String]) -> Result<Vec<u32>, ScheduleError> {
        let mut found = OrdSet::new();
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
        let mut pairs = OrdSet::new();
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

    /// The servers that receive an operator's order about `partition`: all servers, because after
    /// some changes of members any of them may lead. Servers that do not lead ignore the order.
    fn group(&self, partition: u32) -> Result<Vec<u32>, ScheduleError> {
        if self.cluster.partition(PartitionId(partition)).is_none() {
            return Err(self.unknown(&format!("p{partition}"), "use a partition of the cluster"));
        }
        let nodes = (0_u32..).zip(self.cluster.nodes());
        let servers = nodes.filter(|(_, node)| node.role == Role::Server);
        Ok(servers.map(|(index, _)| index).collect())
    }

    /// Nodes that may lose their disks: gateways, and servers that `replaceable` names.
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

impl Names<'_> {
    fn check_duplicates(&self, links: Links) -> Result<(), ScheduleError> {
        match links {
            Links::Ordered => Err(self
                .value("ordered links do not duplicate messages; run with unordered links".into())),
            Links::Unordered { .. } => Ok(()),
        }
    }

    fn transfer_leader(&self, partition: u32, to: &str) -> Result<Action, ScheduleError> {
        let to = self.server(to)?;
        let order = Admin::TransferLeader { partition: PartitionId(partition), to };
        Ok(Action::Admin { nodes: self.group(partition)?, order })
    }

    fn change_members(
        &self,
        partition: u32,
        voters: &[String],
        learners: &[String],
    ) -> Result<Action, ScheduleError> {
        let look_up = |list: &[String]| -> Result<Vec<NodeId>, ScheduleError> {
            list.iter().map(|name| self.server(name)).collect()
        };
        let (voters, learners) = (look_up(voters)?, look_up(learners)?);
        let nodes = self.group(partition)?;
        let partition = PartitionId(partition);
        Ok(Action::Admin { nodes, order: Admin::ChangeMembers { partition, voters, learners } })
    }
}

impl Fault {
    pub(super) fn resolve(
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
                names.check_duplicates(network.links)?;
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
            Self::TransferLeader { partition, to } => names.transfer_leader(*partition, to),
            Self::ChangeMembers { partition, voters, learners } => {
                names.change_members(*partition, voters, learners)
            }
        }
    }
}
