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
//! lasts. A new kind of fault is a variant of [`Fault`], its arms in `resolve.rs` and `apply.rs`, and
//! its weight in [`Fault::draw`].

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
    /// servers that the protocol says may be ([`orthodrome_core::machine::Protocol::replaceable`]), a minority of each partition;
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
