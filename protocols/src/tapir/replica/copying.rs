//! A replica without data copies it from the leader of its view, in pieces; or, if the leader is
//! gone, from another replica in the view.

use orthodrome_core::id::NodeId;
use orthodrome_core::store::{Start, Versions};
use orthodrome_core::txn::Key;

use super::{Replica, Status};
use crate::ir::View;
use crate::tapir::message::{Change, Msg};
use crate::tapir::server::World;

impl Replica {
    /// Asks for the next piece. Whoever serves in the view has the data: what has left the records has
    /// been executed by every replica that counts. So if the leader dies, the others are asked. Those
    /// that copy, too, do not answer. Without that, no view could follow if the others were too few.
    pub(super) fn fetch(&mut self, start: Start, world: &mut World<'_, '_>) {
        let (partition, view) = (self.id, self.state.view);
        let leader = view.leader(&self.replicas);
        let sources =
            if self.is_alive(leader, world) { vec![leader] } else { self.peers(world.node) };
        self.status = Status::Copying { start: start.clone(), asked: world.cx.now() };
        for from in sources {
            world.reply(from, Msg::FetchState { partition, view, start: start.clone() });
        }
    }

    pub(super) fn on_fetch_state(
        &mut self,
        from: NodeId,
        view: View,
        start: Start,
        world: &mut World<'_, '_>,
    ) {
        if view != self.state.view || self.status != Status::Normal {
            return;
        }
        let bounds = (world.config.chunk_keys, world.config.piece_bytes);
        let (keys, next) = world.store.cut(self.id, &start, bounds);
        let is_last = next.is_none();
        let last = keys.last().map(|(key, _)| key);
        let within = next.as_ref().and_then(|next| next.within.as_ref());
        let is_cut = within.is_some_and(|(key, _)| Some(key) == last);
        let partition = self.id;
        world.reply(from, Msg::StateChunk { partition, view, start, keys, is_cut, is_last });
    }

    pub(super) fn on_state_chunk(
        &mut self,
        (view, start): (View, &Start),
        keys: Vec<(Key, Versions)>,
        (is_cut, is_last): (bool, bool),
        world: &mut World<'_, '_>,
    ) {
        let Status::Copying { start: wanted, .. } = &self.status else { return };
        if view != self.state.view || wanted != start || self.must_checkpoint {
            return;
        }
        let next = following(start, &keys, is_cut);
        world.store.put_copies(self.id, keys);
        if is_last {
            self.must_checkpoint = true;
        } else {
            self.fetch(next, world);
        }
    }

    /// The checkpoint with the copy is durable. Before that the replica is not whole: a crash may lose
    /// the checkpoint, and keep what was written after it.
    pub(in crate::tapir) fn on_copied(&mut self, world: &mut World<'_, '_>) {
        self.must_checkpoint = false;
        if let Status::Copying { .. } = self.status {
            self.change(Change::Whole, world);
            self.status = Status::Normal;
        }
    }
}

/// The start of the piece that follows these keys.
fn following(start: &Start, keys: &[(Key, Versions)], is_cut: bool) -> Start {
    let Some(((last, versions), before)) = keys.split_last() else { return start.clone() };
    match versions.last() {
        Some((told, _)) if is_cut => {
            let before = before.last().map(|(key, _)| key.clone());
            Start { after: before.or(start.after.clone()), within: Some((last.clone(), *told)) }
        }
        Some(_) | None => Start { after: Some(last.clone()), within: None },
    }
}
