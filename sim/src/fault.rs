//! Faults as data: which fault, where, from when until when.
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
//! lasts until the end. A new kind of fault is a variant of [`Fault`], its arms in `resolve.rs` and
//! `apply.rs`, and its weight in [`Fault::draw`].

mod apply;
mod draw;
mod resolve;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{NodeId, PartitionId};
use orthodrome_core::machine::Admin;
use orthodrome_core::time::{Duration, Time};
use serde::{Deserialize, Serialize};

pub use self::draw::Drawn;
pub(crate) use self::draw::{draw_for, draw_moves, draw_sequence};
use self::resolve::Names;
use crate::disk::DiskFailure;
use crate::network::{Disturbance, NetworkModel};

/// A fault. Durations are in milliseconds, probabilities in per cent.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Fault {
    /// Nodes lose power, and start again at the end. A random prefix of their unflushed writes
    /// survives. Of their messages in flight, those sent before a random moment arrive.
    Crash {
        /// The nodes.
        nodes: Vec<String>,
    },
    /// The same, and a record of the unflushed tail is cut in two, if there is one.
    TornWrite {
        /// The nodes.
        nodes: Vec<String>,
    },
    /// Nodes lose power when their next flush completes.
    CrashAtFlush {
        /// The nodes.
        nodes: Vec<String>,
        /// True: after the node has processed the report. False: before the node receives the
        /// report.
        after_report: bool,
    },
    /// Nodes are lost together with their disks. At the end new machines with empty disks replace
    /// them. Allowed for servers that the protocol can replace
    /// ([`orthodrome_core::machine::Protocol::replaceable`]), a minority of each partition; a
    /// schedule that names others is refused.
    Replace {
        /// The nodes.
        nodes: Vec<String>,
    },
    /// Nodes stop, as in a long garbage collection. At the end they receive everything that arrived
    /// meanwhile.
    Pause {
        /// The nodes.
        nodes: Vec<String>,
    },
    /// Messages are blocked. Ordered links hold them, and lose those that they held for too long.
    Partition {
        /// Senders.
        from: Vec<String>,
        /// Receivers; if empty, all other nodes.
        #[serde(default)]
        to: Vec<String>,
        /// True: also in the other direction.
        both_ways: bool,
    },
    /// Packets are lost. On ordered links this delays messages and reduces throughput.
    Loss {
        /// Senders.
        from: Vec<String>,
        /// Receivers; if empty, all other nodes.
        #[serde(default)]
        to: Vec<String>,
        /// Share of packets, in per cent.
        percent: u8,
    },
    /// Messages arrive twice, up to a round trip apart; on unordered links only.
    Duplicate {
        /// Senders.
        from: Vec<String>,
        /// Receivers; if empty, all other nodes.
        #[serde(default)]
        to: Vec<String>,
        /// Share of messages, in per cent.
        percent: u8,
    },
    /// Messages take longer.
    Delay {
        /// Senders.
        from: Vec<String>,
        /// Receivers; if empty, all other nodes.
        #[serde(default)]
        to: Vec<String>,
        /// The additional one-way delay.
        extra_ms: u32,
        /// True: also in the other direction.
        both_ways: bool,
    },
    /// Nodes compute more slowly.
    SlowCpu {
        /// The nodes.
        nodes: Vec<String>,
        /// The factor.
        factor: u32,
    },
    /// Clocks jump. At the end they are correct again.
    ClockStep {
        /// The nodes.
        nodes: Vec<String>,
        /// The jump: forward, or back if negative.
        by_ms: i64,
    },
    /// Clocks run fast or slow. At the end they are correct again.
    ClockDrift {
        /// The nodes.
        nodes: Vec<String>,
        /// The drift in parts per million; slow if negative.
        ppm: i64,
    },
    /// Disks are full. Nodes stop at their next write, and start again when there is space.
    DiskFull {
        /// The nodes.
        nodes: Vec<String>,
    },
    /// The next flush reports an error. Nodes stop, and start again with repaired disks.
    FsyncError {
        /// The nodes.
        nodes: Vec<String>,
    },
    /// Flushes take longer.
    SlowDisk {
        /// The nodes.
        nodes: Vec<String>,
        /// The additional time of each flush.
        extra_ms: u32,
    },
    /// Nodes lose power, and one bit of their log is wrong when they start again. A node that
    /// notices refuses to start. At the end of the fault its data is restored from a good copy.
    FlipBit {
        /// The nodes.
        nodes: Vec<String>,
    },
    /// Two servers lose power and start with each other's disks, which both refuse. At the end of
    /// the fault each gets its own disk back.
    SwapDisks {
        /// The two servers.
        nodes: Vec<String>,
    },
    /// Flushes report data as durable that is not, and a crash may lose it. At the end everything
    /// is durable. If writes are lost, the run is checked only up to that moment
    /// ([`crate::promise::Beyond`]).
    LyingFsync {
        /// The nodes.
        nodes: Vec<String>,
    },
    /// Disks are copied at the beginning. At the end the copies replace the disks while the nodes
    /// are down for a moment. No node can see that its data is old. If writes are lost, the run is
    /// checked only up to that moment ([`crate::promise::Beyond`]).
    OldCopy {
        /// The nodes.
        nodes: Vec<String>,
    },
    /// An operator transfers leadership.
    TransferLeader {
        /// The partition.
        partition: u32,
        /// The new leader.
        to: String,
    },
    /// An operator changes the members of a partition's group.
    ChangeMembers {
        /// The partition.
        partition: u32,
        /// The new voters.
        voters: Vec<String>,
        /// The new members that receive entries but do not vote.
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
    /// When it ends; none if it lasts until the end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until_ms: Option<u64>,
    /// The fault.
    pub fault: Fault,
}

/// A fault schedule.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Schedule {
    /// The purpose of the schedule.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub about: String,
    /// The faults, in any order.
    #[serde(default)]
    pub faults: Vec<Entry>,
}

/// The schedule cannot be carried out.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ScheduleError {
    /// It is not TOML, or has the wrong fields; the text says where.
    #[error("not a fault schedule: {0}")]
    Syntax(String),
    /// A name has no meaning in this cluster.
    #[error("fault {entry} at {at_ms} ms names {name:?}; {expected}")]
    Name {
        /// The number of the entry, from 1.
        entry: usize,
        /// When the entry begins.
        at_ms: u64,
        /// The name.
        name: String,
        /// What the name should be.
        expected: &'static str,
    },
    /// A number is out of range.
    #[error("fault {entry} at {at_ms} ms: {problem}")]
    Value {
        /// The number of the entry, from 1.
        entry: usize,
        /// When the entry begins.
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
    /// For an order to change members: the partition and its new voters.
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

impl Plan {
    /// See [`Schedule::breaks_clocks`].
    pub(crate) fn breaks_clocks(&self) -> bool {
        self.entries.iter().any(|entry| matches!(entry.action, Action::Clock { .. }))
    }
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
    /// The first problem found, and where it is.
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

    /// Looks up every name. Servers may lose their disks if `replaceable` names them, see
    /// [`orthodrome_core::machine::Protocol::replaceable`].
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
}
