//! The context of a partition's handlers.

use std::collections::VecDeque;
use std::fmt::Debug;

use orthodrome_core::Wire as _;
use orthodrome_core::cluster::Cluster;
use orthodrome_core::digest::Digest;
use orthodrome_core::id::{NodeId, PartitionId, Ticket};
use orthodrome_core::rng::Rng;
use orthodrome_core::store::Store;
use orthodrome_core::time::Time;
use orthodrome_core::txn::{Key, VALUE_BYTES_MAX};

use super::{Context, Record, Role};
use crate::checkpoint::CheckpointPace;
use crate::replication;
use crate::routes::Routes;
use crate::sizes::READ_BYTES_MAX;

/// A few partitions, in order.
#[derive(Debug, Default)]
pub(super) struct Few(
    /// In descending order. A list reuses its memory, where a tree would allocate each time.
    Vec<PartitionId>,
);

impl Few {
    pub fn insert(&mut self, id: PartitionId) {
        let at = self.0.partition_point(|&held| held > id);
        if self.0.get(at) != Some(&id) {
            self.0.insert(at, id);
        }
    }

    pub fn pop_first(&mut self) -> Option<PartitionId> {
        self.0.pop()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Pending writes by partition, and the partitions whose logs may have events or messages.
#[derive(Debug, Default)]
pub(super) struct PendingWrites {
    /// Records being written, in order.
    pub tickets: VecDeque<(Ticket, PartitionId)>,
    /// When the next checkpoint is due.
    pub pace: CheckpointPace,
    /// Partitions whose snapshots have been installed. The snapshots count once a checkpoint makes
    /// them durable.
    pub installed: Few,
    /// Partitions whose logs may have events.
    pub touched: Few,
    /// Partitions whose logs may have messages to send together.
    pub unflushed: Few,
}

/// The context of one partition's handlers.
pub struct World<'a, R: Role> {
    /// The node.
    pub node: NodeId,
    /// The placement.
    pub cluster: &'a Cluster,
    /// The protocol's settings.
    pub config: &'a R::Config,
    /// The data of all partitions of the node.
    pub store: &'a mut Store,
    /// The leader of each partition.
    pub routes: &'a mut Routes,
    pub(super) local: &'a mut VecDeque<R::Msg>,
    pub(super) pending_writes: &'a mut PendingWrites,
    /// The machine's context.
    pub cx: Context<'a, R>,
    /// The digest of the changes made by the entry that is being applied.
    pub(super) effects: Digest,
}

/// The I/O of the replicated log.
pub(super) struct Io<'a, R: Role> {
    pub partition: PartitionId,
    pub pending_writes: &'a mut PendingWrites,
    pub cx: Context<'a, R>,
}

impl<R: Role> replication::Io<R::Log> for Io<'_, R> {
    fn now(&self) -> Time {
        self.cx.now()
    }

    fn rng(&mut self) -> &mut Rng {
        self.cx.rng()
    }

    fn send(&mut self, to: NodeId, message: replication::Message<R::Log>) {
        self.cx.send(to, R::log_message(self.partition, message));
    }

    fn persist(&mut self, record: replication::Record<R::Log>) -> Ticket {
        self.pending_writes.pace.wrote(record.size());
        let ticket = self.cx.persist(Record::Replication(self.partition, record));
        self.pending_writes.tickets.push_back((ticket, self.partition));
        ticket
    }

    fn set_timer(&mut self, timer: replication::Timer, at: Time) {
        self.cx.set_timer(R::log_timer(self.partition, timer), at);
    }

    fn cancel_timer(&mut self, timer: replication::Timer) {
        self.cx.cancel_timer(R::log_timer(self.partition, timer));
    }
}

impl<R: Role> World<'_, R> {
    /// Sends a message. A message to this node itself is delivered before the step ends.
    pub fn send(&mut self, to: NodeId, msg: R::Msg) {
        if to == self.node {
            self.local.push_back(msg);
        } else {
            self.cx.send(to, msg);
        }
    }

    /// True if the values of these keys exceed the size of one answer.
    pub fn is_too_much(&self, partition: PartitionId, keys: &[Key]) -> bool {
        let mut bytes = 0;
        // For a few keys the answer follows without reading.
        keys.len() > READ_BYTES_MAX / VALUE_BYTES_MAX
            && keys.iter().any(|key| {
                bytes += key.size() + self.store.read(partition, key).size();
                bytes > READ_BYTES_MAX
            })
    }

    /// Sends a message to the leader of `partition`, as far as it is known.
    pub fn send_to_leader(&mut self, partition: PartitionId, msg: R::Msg) {
        self.send(self.routes.leader(partition), msg);
    }

    /// The supposed leader of `partition` has not answered a request sent at `asked`.
    pub fn suspect(&mut self, partition: PartitionId, asked: Time) {
        self.routes.suspect(partition, asked, self.cx.now());
    }

    /// Persists a record of the protocol's own for `partition`, of about this many bytes.
    /// [`Role::on_durable`] is called when it is durable.
    pub fn persist(
        &mut self,
        partition: PartitionId,
        record: R::OwnRecord,
        bytes: usize,
    ) -> Ticket {
        self.pending_writes.pace.wrote(bytes);
        let ticket = self.cx.persist(Record::Own(partition, Box::new(record)));
        self.pending_writes.tickets.push_back((ticket, partition));
        ticket
    }

    /// The last record of `partition` that is not durable yet.
    pub fn last_ticket(&self, partition: PartitionId) -> Option<Ticket> {
        let mut open = self.pending_writes.tickets.iter().rev();
        open.find(|(_, id)| *id == partition).map(|(ticket, _)| *ticket)
    }

    pub(super) fn io(&mut self, partition: PartitionId) -> Io<'_, R> {
        Io { partition, pending_writes: self.pending_writes, cx: self.cx.reborrow() }
    }

    /// Adds the effect of the entry that is being applied, besides what it put into the store. The
    /// replicas of a partition compare these digests, see [`replication::Replica::came_to`].
    pub fn came_to(&mut self, effect: &impl Debug) {
        self.effects.add_debug(effect);
    }

    /// The digest to which [`World::came_to`] adds, for effects that need not be formatted.
    pub(crate) fn effects(&mut self) -> &mut Digest {
        &mut self.effects
    }

    /// The log of `partition` may have events and messages.
    pub(super) fn touch(&mut self, partition: PartitionId) {
        self.pending_writes.touched.insert(partition);
        self.pending_writes.unflushed.insert(partition);
    }
}
