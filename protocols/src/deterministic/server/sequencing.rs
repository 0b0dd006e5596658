//! The sequencers of the streams that this server leads (§4.2.1).

use std::sync::Arc;

use orthodrome_core::id::{NodeId, PartitionId, TxnId};

use super::super::message::{Msg, Sequenced};
use super::super::sequencer::{Sequencer, View};
use super::super::{Cx, Timer};
use super::Server;
use crate::replication::{Payload, Replica, Shared};

impl Server {
    /// Calls a function on the sequencer of a stream that this server leads.
    pub(super) fn sequencing<T>(
        &mut self,
        stream: PartitionId,
        cx: &Cx<'_>,
        act: impl FnOnce(&mut Sequencer, &View<'_>) -> T,
    ) -> Option<T> {
        let held = self.streams.get_mut(&stream)?;
        if !held.replica.is_leader() {
            return None;
        }
        let (state, placement, config) = (&self.state, &self.placement, &*self.config);
        let (now, clock) = (cx.now(), cx.clock());
        let view = View { stream, state, placement, config, now, clock };
        Some(act(&mut held.sequencer, &view))
    }

    /// A node wants a transaction in a stream.
    pub(super) fn on_sequence(
        &mut self,
        from: NodeId,
        stream: PartitionId,
        entry: Arc<Sequenced>,
        cx: &mut Cx<'_>,
    ) {
        let txn = entry.functor.txn;
        let taken = self.sequencing(stream, cx, |sequencer, view| {
            (sequencer.take(entry, view), sequencer.next_release())
        });
        let Some((note, release)) = taken else {
            let replica = self.streams.get(&stream).map(|held| &held.replica);
            let leader = replica.and_then(Replica::leader).filter(|&leader| leader != self.node);
            let txn = Some(txn);
            self.send(from, Msg::NotLeader { partition: stream, leader, txn }, cx);
            return;
        };
        if let Some(note) = note {
            cx.note(note);
        }
        if let Some(at) = release {
            cx.set_timer(Timer::Release(stream), at);
        }
        self.disk.unflushed.insert(stream);
    }

    /// Transactions that were held until now are released.
    pub(super) fn on_release_timeout(&mut self, stream: PartitionId, cx: &mut Cx<'_>) {
        let released = self.sequencing(stream, cx, |sequencer, view| {
            (sequencer.release(view), sequencer.next_release())
        });
        let Some((notes, release)) = released else { return };
        for note in notes {
            cx.note(note);
        }
        if let Some(at) = release {
            cx.set_timer(Timer::Release(stream), at);
        }
        self.disk.unflushed.insert(stream);
    }

    /// Proposes the waiting transactions. A new leader first applies everything that earlier
    /// leaders left. Otherwise an entry that is not chosen for long could be in the log once for
    /// each leader.
    pub(super) fn propose(&mut self, stream: PartitionId, cx: &mut Cx<'_>) {
        if self.streams.get(&stream).is_some_and(|held| held.replica.is_ready()) {
            self.sequencing(stream, cx, |sequencer, view| sequencer.follow_orderer(view));
        }
        while self.streams.get(&stream).is_some_and(|held| {
            let replica = &held.replica;
            held.sequencer.has_batch() && replica.is_ready() && replica.takes_commands()
        }) {
            let batch = self.sequencing(stream, cx, |sequencer, view| sequencer.next_batch(view));
            let Some(Some(command)) = batch else { return };
            let copy =
                self.config.mutations.merges_unchosen().then(|| Shared::new(command.clone()));
            let mut proposed = None;
            self.with(stream, cx, |held, io| proposed = held.replica.propose(command, io));
            if let (Some(command), Some((index, _))) = (copy, proposed)
                && index == self.state.applied(stream).next()
            {
                self.on_chosen(stream, vec![(index, Payload::Command(command))], cx);
            }
        }
    }

    /// The node that was asked does not lead the stream.
    pub(super) fn on_not_leader(
        &mut self,
        from: NodeId,
        stream: PartitionId,
        leader: Option<NodeId>,
        txn: Option<TxnId>,
        cx: &mut Cx<'_>,
    ) {
        if !self.routes.redirect(stream, from, leader, cx.now()) {
            return;
        }
        let Some(entry) = txn.and_then(|txn| Some(self.waiting.get(&txn)?.entry.clone())) else {
            return;
        };
        // Its keys may have moved since that stream was asked.
        if self.asked(&entry).contains(&stream) {
            let leader = self.routes.leader(stream);
            self.send(leader, Msg::Sequence { stream, entry }, cx);
        }
    }

    /// As the sequencer of a stream: moves keys that a single other region accesses, and informs
    /// the stream to which a key moves. No other node does, so a key moves from each home once.
    pub(super) fn relocate(
        &mut self,
        stream: PartitionId,
        entries: &[Arc<Sequenced>],
        cx: &mut Cx<'_>,
    ) {
        let mut moves = Vec::new();
        for entry in entries {
            let observed =
                self.sequencing(stream, cx, |sequencer, view| sequencer.observe(entry, view));
            let Some(observed) = observed else { return };
            moves.extend(observed);
            if entry.target.is_some() && !entry.is_piece && self.state.merge.contains(entry.name())
            {
                self.sequence(entry, cx);
            }
        }
        for (key, target) in moves {
            let (from, orderer) =
                (self.state.home(&key, &self.placement), self.placement.orderer());
            let entry = Arc::new(Sequenced::relocation(key, from, target, orderer));
            let first = orderer.unwrap_or(stream);
            let leader = self.routes.leader(first);
            self.send(leader, Msg::Sequence { stream: first, entry }, cx);
        }
    }
}
