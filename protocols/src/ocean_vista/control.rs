//! The state of this node in the cluster: its lease, its promises, whether its data is complete,
//! and its part of the directory.

use std::collections::VecDeque;
use std::sync::Arc;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{NodeId, PartitionId, Ticket};
use orthodrome_core::machine::{Claim, Cx};
use orthodrome_core::ordered::{OrdMap, OrdSet};
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

/// The state of a node in the cluster.
#[derive(Debug)]
pub(super) struct Control {
    pub membership: Membership,
    /// This node's part of the directory, if it has one.
    pub keeper: Option<Keeper>,
    /// The promises of each partition's replica.
    pub acceptors: OrdMap<PartitionId, Acceptor>,
    pub recoveries: Recoveries,
    /// Long promises of which the asking node has not received all pieces.
    pub tellings: Tellings<Arc<Functor>>,
    pub backup: Backup<Arc<Functor>>,
    /// True if the disk has all promises that this node ever made.
    pub is_intact: bool,
    /// The ticket of the record that says so, while it is being written.
    pub mark: Option<Ticket>,
    /// True if all versions up to the Vwatermark at the time when this incarnation joined are here.
    pub is_whole: bool,
    /// The node determines its missing versions when it knows watermarks of this epoch.
    pub needed_epoch: u64,
}

impl Control {
    /// The incarnations that are out and whose versions the replicas here do not have completely.
    pub(super) fn owes(&self) -> OrdMap<PartitionId, Vec<(NodeId, u32)>> {
        let members = self.membership.members();
        let owed = self.acceptors.iter().map(|(&id, acceptor)| (id, acceptor.owes(members)));
        owed.filter(|(_, owed)| !owed.is_empty()).collect()
    }

    /// True if replicas here may promise, store and vote: earlier promises are remembered, and a
    /// loss of this disk will be noticed.
    pub(super) fn is_acceptor(&self) -> bool {
        self.is_intact && self.membership.is_new() == Some(false)
    }

    /// True if the replicas here have all versions, so that they may answer and settle.
    pub(super) fn is_complete(&self) -> bool {
        self.is_whole
            && self.acceptors.values().all(|a| a.owes(self.membership.members()).is_empty())
    }

    /// What is needed to be complete; none if nothing, or if it cannot be determined yet.
    pub(super) fn lacks(&self, epoch: u64) -> Option<Whole> {
        let incarnation = self.membership.incarnation();
        if incarnation.is_none() || epoch < self.needed_epoch || self.is_complete() {
            return None;
        }
        Some(Whole { is_intact: self.is_intact, incarnation, owes: self.owes() })
    }

    /// True if the replicas here know which versions of servers that are out in `epoch` are void.
    pub(super) fn may_tell(&self, epoch: u64) -> bool {
        let members = self.membership.members();
        self.is_acceptor()
            && members.epoch >= epoch
            && self.acceptors.values().all(|acceptor| acceptor.has_closed(members))
    }
}

/// Sends the messages of a node's part of the directory.
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

/// The backup of a coordinator: the next active server of the same region, by id. The coordinator
/// informs it of its open transactions (§5.2).
pub(super) fn backup_of(node: NodeId, cluster: &Cluster, members: &Members) -> Option<NodeId> {
    let region = cluster.region_of(node);
    let active: OrdSet<NodeId> = members
        .active()
        .map(|(server, _)| server)
        .filter(|&server| cluster.region_of(server) == region && server != node)
        .collect();
    active.range(node..).next().or_else(|| active.first()).copied()
}
