//! Reading versions, and waiting for those that must be computed first (§4.3).

use orthodrome_core::Wire as _;
use orthodrome_core::id::PartitionId;
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::{Key, Read};

use super::{GOT_PIECES, Get, Replica, SHOWN_MAX};
use crate::ocean_vista::Note;
use crate::ocean_vista::message::{Ask, Msg, Reason, Seen, Shown, View, What};
use crate::ocean_vista::server::{Local, World};
use crate::ocean_vista::state::{Image, Phase};

impl Replica {
    /// What is there of these keys? What this node must know first is computed first.
    pub(in crate::ocean_vista) fn on_get(&mut self, get: Get, world: &mut World<'_, '_>) {
        let not_ready = |reason| Msg::NotReady { query: get.query, reason };
        if !world.is_serving || get.epoch > world.members.epoch {
            world.send(get.from, not_ready(Reason::Inactive));
            return;
        }
        if get.asks.iter().any(|ask| ask.below <= self.state.collected) {
            world.cx.note(Note::Collected);
            world.send(get.from, not_ready(Reason::Collected));
            return;
        }
        let own = world.marks.replicated(get.partition).min(world.marks.visible);
        let replicated = own.max(get.replicated);
        if let Some(ts) =
            get.asks.iter().find_map(|ask| self.must_resolve(get.partition, ask, replicated))
        {
            if let Some(image) = self.state.pending.get(&ts) {
                world.tell(Local::Execute { ts, functor: image.functor.clone() });
            }
            let waiting = self.parked.entry(ts).or_default();
            waiting.retain(|held| (held.from, held.query) != (get.from, get.query));
            waiting.push(get);
            return;
        }
        let mut bytes = 0;
        let mut seen = Vec::new();
        for ask in &get.asks {
            let limit = if ask.below <= replicated { 1 } else { SHOWN_MAX };
            let mut view = self.view(&ask.key, get.partition, ask.below, limit);
            if world.config.mutations.newest_only() {
                // Algorithm 3 knows no tombstones, and shows the newest version.
                view.versions.retain(|shown| shown.what != What::Aborted);
                view.versions.truncate(1);
                view.complete_from = Timestamp::ZERO;
            }
            // One at least, however long it is.
            bytes += 14 + ask.key.len() + view.size();
            if bytes > world.config.piece_bytes * GOT_PIECES && !seen.is_empty() {
                world.cx.note(Note::AnswerCut);
                break;
            }
            seen.push(Seen { key: ask.key.clone(), below: ask.below, view });
        }
        let is_cut = seen.len() < get.asks.len();
        world.send(get.from, Msg::Got { query: get.query, replicated, seen, is_cut });
    }

    /// The version that has to be computed before the question can be answered.
    pub(super) fn must_resolve(
        &self,
        partition: PartitionId,
        ask: &Ask,
        replicated: Timestamp,
    ) -> Option<Timestamp> {
        if let Some(ts) = ask.resolve
            && self.unresolved.contains(&ts)
        {
            return Some(ts);
        }
        if ask.below > replicated {
            return None;
        }
        // Everything there is is here, so the newest that holds something is the answer.
        let settled = self.settled(partition, &ask.key, ask.below).version.timestamp;
        for &ts in self.index.get(&ask.key)?.range(settled.next().min(ask.below)..ask.below).rev() {
            match what(self.state.pending.get(&ts)?, &ask.key) {
                What::Aborted | What::Void => {}
                What::Functor => return Some(ts),
                What::Final(_) => return None,
            }
        }
        None
    }

    pub(super) fn view(
        &self,
        key: &Key,
        partition: PartitionId,
        below: Timestamp,
        limit: usize,
    ) -> View {
        let mut versions = Vec::new();
        let mut present = 0;
        // What is older than a settled version is of no interest, even if it is not computed yet.
        let settled = self.settled(partition, key, below);
        let first = settled.version.timestamp.next().min(below);
        let numbers = self.index.get(key).into_iter().flat_map(|all| all.range(first..below).rev());
        for &ts in numbers {
            let Some(image) = self.state.pending.get(&ts) else { continue };
            let what = what(image, key);
            present += usize::from(matches!(what, What::Functor | What::Final(_)));
            versions.push(Shown {
                ts,
                ballot: image.ballot,
                txn: image.functor.txn,
                is_finalized: image.phase == Phase::Finalized,
                what,
            });
            if present == limit {
                let settled = Read::default();
                return View { versions, complete_from: ts, settled };
            }
        }
        View { versions, complete_from: Timestamp::ZERO, settled }
    }

    /// The newest settled version below a number.
    pub(super) fn settled(&self, partition: PartitionId, key: &Key, below: Timestamp) -> Read {
        self.store.read_at(partition, key, Timestamp(below.0.saturating_sub(1)))
    }

    /// A version is computed, or gone: what waited for it goes on.
    pub(super) fn wake(&mut self, ts: Timestamp, world: &mut World<'_, '_>) {
        for get in self.parked.remove(&ts).unwrap_or_default() {
            self.on_get(get, world);
        }
    }
}

/// What a transaction leaves in a key.
fn what(image: &Image, key: &Key) -> What {
    if image.phase == Phase::Aborted {
        return What::Aborted;
    }
    match image.output.as_deref() {
        None => What::Functor,
        Some(Ok(writes)) => writes.get(key).map_or(What::Void, |value| What::Final(value.clone())),
        Some(Err(_)) => What::Void,
    }
}
