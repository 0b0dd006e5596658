//! This node's standing: its lease, its promises, whether it is complete, and its share of the
//! directory.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{NodeId, PartitionId, Ticket};
use orthodrome_core::machine::{Claim, Cx};
use orthodrome_core::rng::Rng;
use orthodrome_core::time::Time;

use super::directory::{self, Directory, Keeper, Membership};
use super::message::{Functor, Msg, Record};
use super::recovery::Recoveries;
use super::server::{Local, PendingWrites};
use super::sync::Whole;
use super::takeover::{Acceptor, Backup, Tellings};
use super::watermark::Members;
use super::{OceanVista, Timer};
use crate::replication;

/// A node's standing.
#[derive(Debug)]
pub(super) struct Control {
    pub membership: Membership,
    /// This node's share of the directory, if it has one.
    pub keeper: Option<Keeper>,
    /// What the replica of each partition promised.
    pub acceptors: BTreeMap<PartitionId, Acceptor>,
    pub recoveries: Recoveries,
    /// Long promises that whoever asked was not told all of.
    pub tellings: Tellings<Arc<Functor>>,
    pub backup: Backup<Arc<Functor>>,
    /// The disk remembers all that was ever promised from it.
    pub is_intact: bool,
    /// The mark on the disk that says so is under way.
    pub mark: Option<Ticket>,
    /// Everything up to the Vwatermark of when this life had joined is here.
    pub is_whole: bool,
    /// What is missing is decided once watermarks of this epoch are known.
    pub needed_epoch: u64,
}

impl Control {
    /// What the replicas here have still to take in of incarnations that are out.
    pub(super) fn owes(&self) -> BTreeMap<PartitionId, Vec<(NodeId, u32)>> {
        let members = self.membership.members();
        let owed = self.acceptors.iter().map(|(&id, acceptor)| (id, acceptor.owes(members)));
        owed.filter(|(_, owed)| !owed.is_empty()).collect()
    }

    /// True if replicas here may promise, store and vote: what they promised before is remembered,
    /// and whoever loses this disk will be known to have had it.
    pub(super) fn is_acceptor(&self) -> bool {
        self.is_intact && self.membership.is_new() == Some(false)
    }

    /// True if the replicas here hold everything, so that they may answer and settle.
    pub(super) fn is_complete(&self) -> bool {
        self.is_whole
            && self.acceptors.values().all(|a| a.owes(self.membership.members()).is_empty())
    }

    /// What has to be done to be complete; nothing if that is so, or cannot be done yet.
    pub(super) fn lacks(&self, epoch: u64) -> Option<Whole> {
        let incarnation = self.membership.incarnation();
        if incarnation.is_none() || epoch < self.needed_epoch || self.is_complete() {
            return None;
        }
        Some(Whole { is_intact: self.is_intact, incarnation, owes: self.owes() })
    }

    /// True if the replicas here know what is void of all that is out in `epoch`.
    pub(super) fn may_tell(&self, epoch: u64) -> bool {
        let members = self.membership.members();
        self.is_acceptor()
            && members.epoch >= epoch
            && self.acceptors.values().all(|acceptor| acceptor.has_closed(members))
    }
}

/// The way out of a node's share of the directory.
pub(super) struct Io<'a, 'b> {
    pub node: NodeId,
    pub local: &'a mut VecDeque<Local>,
    pub pending_writes: &'a mut PendingWrites,
    pub cx: &'a mut Cx<'b, OceanVista>,
}

impl replication::Io<Directory> for Io<'_, '_> {
    fn now(&self) -> Time {
        self.cx.now()
    }

    fn rng(&mut self) -> &mut Rng {
        self.cx.rng()
    }

    fn send(&mut self, to: NodeId, msg: replication::Message<Directory>) {
        directory::Io::send_to_server(self, to, directory::Message::Log(msg));
    }

    fn persist(&mut self, record: replication::Record<Directory>) -> Ticket {
        self.pending_writes.persist(Record::Directory(directory::Record::Log(record)), self.cx)
    }

    fn set_timer(&mut self, timer: replication::Timer, at: Time) {
        self.cx.set_timer(Timer::Directory(directory::Timer::Log(timer)), at);
    }

    fn cancel_timer(&mut self, timer: replication::Timer) {
        self.cx.cancel_timer(Timer::Directory(directory::Timer::Log(timer)));
    }
}

impl directory::Io for Io<'_, '_> {
    fn send_to_server(&mut self, to: NodeId, msg: directory::Message) {
        let msg = Msg::Directory(Box::new(msg));
        if to == self.node {
            self.local.push_back(Local::Message(msg));
        } else {
            self.cx.send(to, msg);
        }
    }

    fn set_sweep(&mut self, at: Time) {
        self.cx.set_timer(Timer::Directory(directory::Timer::Sweep), at);
    }

    fn claim(&mut self, claim: Claim) {
        self.cx.claim(claim);
    }
}

/// The next active server of the same region, by id: whom a coordinator tells of what it has under
/// way (§5.2).
pub(super) fn backup_of(node: NodeId, cluster: &Cluster, members: &Members) -> Option<NodeId> {
    let region = cluster.region_of(node);
    let active: BTreeSet<NodeId> = members
        .active()
        .map(|(server, _)| server)
        .filter(|&server| cluster.region_of(server) == region && server != node)
        .collect();
    active.range(node..).next().or_else(|| active.first()).copied()
}
