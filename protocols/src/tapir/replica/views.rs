//! Views of a replica (§3.2.2): it leaves one, offers its record to the leader of the next, and
//! installs what that leader merged.

use std::collections::VecDeque;

use orthodrome_core::Wire;
use orthodrome_core::id::{NodeId, TxnId};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::store::Start;
use orthodrome_core::time::{Duration, Time, Timestamp};
use orthodrome_core::txn::Outcome;

use super::{Replica, Status};
use crate::ir::{Gathering, Offer, View, is_founder};
use crate::portions::{Assembly, Portion};
use crate::tapir::message::{Change, Image, Msg};
use crate::tapir::server::World;
use crate::tapir::state::State;
use crate::tapir::{Note, Timer, decide};

/// A record that is on its way to a peer.
#[derive(Debug, Default)]
pub(super) struct Outgoing {
    /// Sent parts that the peer has not acknowledged.
    sent: OrdMap<u32, (Portion, Msg)>,
    /// Parts that have not been sent yet.
    waiting: VecDeque<(Portion, Msg)>,
    /// When a part was last sent, or last arrived.
    moved: Time,
    /// How often the missing parts were sent again since one arrived.
    repeated: u32,
    /// It consists of small parts, because parts of it were lost.
    is_small: bool,
}

impl Replica {
    /// The next view whose leader is alive. A view with a dead leader would cost everybody a
    /// time-out each time its turn comes.
    pub(super) fn next_view(&self, world: &World<'_, '_>) -> View {
        let mut view = self.state.view.next();
        // This node itself is alive, so the loop ends.
        while !self.is_alive(view.leader(&self.replicas), world) {
            view = view.next();
        }
        view
    }

    /// True for this node, and for a node that has sent a message lately.
    pub(super) fn is_alive(&self, node: NodeId, world: &World<'_, '_>) -> bool {
        self.is_here(node, world.config.gossip_interval * 2 + world.config.view_timeout, world)
    }

    /// True for this node, and for a node whose last message is not older than `silence`.
    pub(super) fn is_here(&self, node: NodeId, silence: Duration, world: &World<'_, '_>) -> bool {
        let now = world.cx.now();
        node == world.node || self.heard.get(&node).is_some_and(|at| now.since(*at) < silence)
    }

    /// Leaves its view for a later one.
    pub(super) fn enter(&mut self, view: View, world: &mut World<'_, '_>) {
        assert!(view > self.state.view, "{} goes back to {view}", self.id);
        world.cx.note(Note::ViewChange);
        self.change(Change::Enter(view), world);
        self.status = Status::Changing { since: world.cx.now() };
        self.gathering = Gathering::default();
        self.arriving.clear();
        self.starting = Assembly::default();
        self.joined.clear();
        self.outgoing.clear();
        self.view_sent.clear();
        self.offer(world);
        self.await_view(world);
    }

    /// Sends the record to the new view's leader, and a notice to the others.
    pub(super) fn offer(&mut self, world: &mut World<'_, '_>) {
        let view = self.state.view;
        let leader = view.leader(&self.replicas);
        let (partition, now) = (self.id, world.cx.now());
        for to in self.peers(world.node) {
            if to != leader {
                let (offer, portion) = (None, Portion::WHOLE);
                world.reply(to, Msg::DoViewChange { partition, view, offer, portion });
                continue;
            }
            let parts = self.offer_parts(world.config.piece_bytes, now);
            self.send_parts(to, parts, false, world);
        }
        if leader == world.node {
            let mine = self.offer_of(self.state.image(false));
            self.gathering.add(world.node, mine);
            self.begin_view(world);
        }
    }

    fn offer_of(&self, image: Image) -> Offer<Image> {
        let State { normal_view, is_whole, born, .. } = self.state;
        let (synced, founders) = (self.state.synced.clone(), self.state.founders.clone());
        Offer { normal_view, is_whole, synced, image, born, founders }
    }

    /// The record, for the leader of the new view.
    fn offer_parts(&self, bytes_max: usize, now: Time) -> VecDeque<(Portion, Msg)> {
        let (partition, view) = (self.id, self.state.view);
        let parts = self.state.image(false).divide(bytes_max);
        let parts = Portion::number(parts, now).map(|(portion, part)| {
            let offer = Some(Box::new(self.offer_of(part)));
            (portion, Msg::DoViewChange { partition, view, offer, portion })
        });
        parts.collect()
    }

    /// The leader of the view that should begin has not acknowledged the whole record for a while, and
    /// no view begins: parts may be lost. Another view would need all records again.
    pub(super) fn repeat_offer(&mut self, world: &mut World<'_, '_>) {
        let leader = self.state.view.leader(&self.replicas);
        if !matches!(self.status, Status::Changing { .. }) || leader == world.node {
            return;
        }
        let Some(outgoing) = self.outgoing.get_mut(&leader) else { return };
        let now = world.cx.now();
        let pause = world.config.resend_after * (1 << outgoing.repeated.min(5));
        if outgoing.sent.is_empty() || now.since(outgoing.moved) < pause {
            return;
        }
        world.cx.note(Note::Resent);
        if !outgoing.resend((leader, now), world) {
            let parts = self.offer_parts(self.small(world), now);
            self.send_parts(leader, parts, true, world);
        }
    }

    /// The size of the parts of a record that is sent again. The smaller a message, the likelier it
    /// arrives where packets are lost.
    fn small(&self, world: &World<'_, '_>) -> usize {
        (self.entries_bytes / SMALL_PARTS)
            .clamp(SMALL_BYTES, world.config.piece_bytes.max(SMALL_BYTES))
    }

    pub(super) fn await_view(&mut self, world: &mut World<'_, '_>) {
        // Links may be slow: the time-out grows until a view lasts.
        self.views_failed += 1;
        self.set_view_timeout(world);
    }

    fn set_view_timeout(&mut self, world: &mut World<'_, '_>) {
        self.is_moving = false;
        let doublings = self.views_failed.saturating_sub(1).min(5);
        let timeout = world.config.view_timeout * (1 << doublings);
        let jitter = world.cx.rng().below(1 + u64::try_from(timeout.as_nanos()).unwrap_or(0) / 4);
        let at = world.cx.now() + timeout + Duration::from_nanos(jitter);
        world.cx.set_timer(Timer::View(self.id), at);
    }

    /// The view does not begin: tries the next one, unless too few replicas are alive.
    pub(in crate::tapir) fn on_view_timeout(&mut self, world: &mut World<'_, '_>) {
        let Status::Changing { since } = self.status else { return };
        if self.is_moving {
            // Records may be large. Another view would send them all again.
            self.set_view_timeout(world);
            return;
        }
        let heard = self.heard.values().filter(|at| **at > since).count();
        if heard + 1 >= self.quorums.slow() {
            self.enter(self.next_view(world), world);
        } else {
            self.offer(world);
            self.await_view(world);
        }
    }

    pub(super) fn on_do_view_change(
        &mut self,
        from: NodeId,
        view: View,
        offer: Option<(Portion, Offer<Image>)>,
        world: &mut World<'_, '_>,
    ) {
        if view > self.state.view {
            self.enter(view, world);
        } else if view == self.state.view && from == view.leader(&self.replicas) {
            // It receives the records.
            self.is_moving = true;
        }
        let is_leader = self.state.view.leader(&self.replicas) == world.node;
        let is_installed = !matches!(self.status, Status::Changing { .. });
        if view < self.state.view {
            // Too late: the sender joins the existing view.
            world.send(from, self.gossip());
            if is_leader && is_installed {
                self.send_view(from, false, world);
            }
            return;
        }
        let Some((portion, mut offer)) = offer.filter(|_| is_leader) else { return };
        let arriving = self.arriving.entry(from).or_default();
        let Some(parts) = arriving.add(portion, std::mem::take(&mut offer.image)) else {
            self.accept_part(from, portion, world);
            // The others see that the leader is receiving.
            for to in self.peers(world.node).into_iter().filter(|to| *to != from) {
                let (partition, offer, portion) = (self.id, None, Portion::WHOLE);
                world.send(to, Msg::DoViewChange { partition, view, offer, portion });
            }
            return;
        };
        if portion.of > 1 {
            self.accept_part(from, portion, world);
        }
        offer.image = Image::join(parts);
        if !is_installed {
            self.gathering.add(from, offer);
            self.begin_view(world);
        } else if !offer.is_whole && self.joined.contains(&from) {
            // It took part in this view already, and has lost its promises.
            self.enter(self.next_view(world), world);
        } else {
            self.send_view(from, false, world);
        }
    }

    /// The leader merges, once it has f + 1 records.
    pub(super) fn begin_view(&mut self, world: &mut World<'_, '_>) {
        let view = self.state.view;
        let mut founders = self.gathering.founders();
        let (image, before) = match self.gathering.ready(self.quorums) {
            // Only a replica with all data can give others a copy.
            Some(gathered) if gathered.all.iter().all(|(node, _)| *node != world.node) => {
                self.enter(self.next_view(world), world);
                return;
            }
            Some(gathered) => {
                let top = gathered.latest.first().map(|(_, offer)| offer);
                founders = top.map_or_else(OrdMap::new, |offer| offer.founders.clone());
                let before = top.map(|offer| offer.synced.clone());
                (decide::merge(self.quorums, &gathered), before)
            }
            None if self.gathering.is_new_group(self.quorums) => (Image::default(), None),
            None => return,
        };
        let is_new_group = before.is_none();
        let before = before.unwrap_or_default();
        // A replica that did not count has missed something, and counts only from now on.
        let synced: OrdMap<NodeId, View> = self
            .replicas
            .iter()
            .filter(|node| self.is_here(**node, world.config.absence_after, world))
            .map(|node| (*node, before.get(node).copied().unwrap_or(view)))
            .collect();
        // Nor does it count as a founder any more.
        founders.retain(|node, _| {
            synced.contains_key(node) && (is_new_group || before.contains_key(node))
        });
        self.install(view, (synced, founders), Box::new(image), true, world);
        self.join(world);
        for to in self.peers(world.node) {
            self.send_view(to, is_new_group, world);
        }
    }

    /// Sends what is settled in this view. The leader's other votes are only its own.
    pub(super) fn send_view(&mut self, to: NodeId, is_new_group: bool, world: &mut World<'_, '_>) {
        let now = world.cx.now();
        let is_on_its_way = |at: &Time| now.since(*at) < world.config.resend_after;
        if self.view_sent.get(&to).is_some_and(is_on_its_way) {
            return;
        }
        let is_repeated = self.view_sent.insert(to, now).is_some();
        if let Some(outgoing) = self.outgoing.get_mut(&to)
            && outgoing.resend((to, now), world)
        {
            return;
        }
        let bytes_max = if is_repeated { self.small(world) } else { world.config.piece_bytes };
        let parts = self.state.image(true).divide(bytes_max);
        let parts = Portion::number(parts, now).map(|(portion, part)| {
            let msg = Msg::StartView {
                partition: self.id,
                view: self.state.view,
                synced: self.state.synced.clone(),
                is_new_group,
                image: Box::new(part),
                portion,
                founders: self.state.founders.clone(),
            };
            (portion, msg)
        });
        let parts = parts.collect();
        self.send_parts(to, parts, is_repeated, world);
    }

    /// Sends the first parts. Each one that arrives makes room for the next, because a record may
    /// be larger than all that may wait for a connection.
    fn send_parts(
        &mut self,
        to: NodeId,
        waiting: VecDeque<(Portion, Msg)>,
        is_small: bool,
        world: &mut World<'_, '_>,
    ) {
        let repeated = u32::from(is_small);
        let mut outgoing = Outgoing { waiting, is_small, repeated, ..Outgoing::default() };
        let now = world.cx.now();
        let window = world.config.piece_bytes.saturating_mul(PARTS_AT_ONCE) / self.small(world);
        let small_at_once = window.clamp(1, SMALL_PARTS_AT_ONCE);
        let at_once = if is_small { small_at_once } else { PARTS_AT_ONCE };
        for _ in 0..at_once {
            outgoing.send_next((to, now), world);
        }
        self.outgoing.insert(to, outgoing);
    }

    /// The peer has part of a record, and waits for more.
    pub(super) fn on_part_arrived(
        &mut self,
        from: NodeId,
        view: View,
        arrived: Portion,
        world: &mut World<'_, '_>,
    ) {
        let now = world.cx.now();
        let Some(parts) = self.outgoing.get_mut(&from).filter(|_| view == self.state.view) else {
            return;
        };
        self.is_moving = true;
        if let Some(at) = self.view_sent.get_mut(&from) {
            *at = now;
        }
        let is_of_these = |(portion, _): &(Portion, Msg)| *portion == arrived;
        if parts.sent.get(&arrived.number).is_some_and(is_of_these) {
            parts.sent.remove(&arrived.number);
            (parts.moved, parts.repeated) = (now, 0);
            parts.send_next((from, now), world);
        }
    }

    /// Acknowledges one part of a record.
    fn accept_part(&mut self, from: NodeId, portion: Portion, world: &mut World<'_, '_>) {
        self.is_moving = true;
        let (partition, view) = (self.id, self.state.view);
        world.send(from, Msg::DoViewChange { partition, view, offer: None, portion });
    }

    pub(super) fn install(
        &mut self,
        view: View,
        (synced, founders): (OrdMap<NodeId, View>, OrdMap<NodeId, Timestamp>),
        image: Box<Image>,
        is_whole: bool,
        world: &mut World<'_, '_>,
    ) {
        self.change(Change::Install { view, synced, image, is_whole, founders }, world);
        if !is_whole {
            // It may have made promises to readers that it does not remember. Any f + 1 of the
            // other replicas know a bound.
            self.validator.raise_floor(self.state.ceiling);
        }
        self.gathering = Gathering::default();
        self.joined.clear();
        self.outgoing.clear();
        self.view_sent.clear();
        self.installed = world.cx.now();
        world.cx.cancel_timer(Timer::View(self.id));
        self.reindex(world);
    }

    /// Takes part in the view that it has just installed, once it has the data.
    pub(super) fn join(&mut self, world: &mut World<'_, '_>) {
        if self.state.is_whole {
            self.status = Status::Normal;
        } else {
            world.cx.note(Note::Copy);
            self.fetch(Start::default(), world);
        }
    }

    pub(super) fn on_start_view(
        &mut self,
        view: View,
        (synced, is_new_group, founders): Members,
        (portion, part): (Portion, Image),
        world: &mut World<'_, '_>,
    ) {
        let is_installed = !matches!(self.status, Status::Changing { .. });
        if view < self.state.view || (view == self.state.view && is_installed) {
            return;
        }
        let Some(parts) = self.starting.add(portion, part) else {
            self.accept_part(view.leader(&self.replicas), portion, world);
            return;
        };
        let image = Box::new(Image::join(parts));
        let since = synced.get(&world.node).copied();
        let is_counted_on = since.is_some();
        let was_there = since.is_some_and(|since| since <= self.state.normal_view);
        let begins = is_new_group && self.state.normal_view == View(0);
        // The group has counted on it ever since it began, so this record has all that it lacks.
        let founds =
            self.state.normal_view == View(0) && is_founder(world.node, self.state.born, &founders);
        let is_whole = (self.state.is_whole && was_there) || (is_counted_on && (begins || founds));
        self.install(view, (synced, founders), image, is_whole, world);
        if is_counted_on {
            self.join(world);
            world.reply(view.leader(&self.replicas), self.gossip());
        } else {
            // The others continued without it. The next view counts it again.
            self.enter(self.next_view(world), world);
        }
    }

    pub(super) fn on_gossip(
        &mut self,
        from: NodeId,
        view: View,
        is_normal: bool,
        world: &mut World<'_, '_>,
    ) {
        let is_leader = self.state.view.leader(&self.replicas) == world.node;
        let is_installed = !matches!(self.status, Status::Changing { .. });
        if view > self.state.view {
            self.enter(view, world);
        } else if view == self.state.view && is_normal {
            self.joined.insert(from);
            self.outgoing.remove(&from);
        } else if is_leader && is_installed {
            self.send_view(from, false, world);
        }
    }

    /// Rebuilds everything that follows from the record.
    pub(super) fn reindex(&mut self, world: &mut World<'_, '_>) {
        self.entries_bytes = self.state.entries.values().map(Wire::size).sum();
        let stale: Vec<TxnId> = self.validator.prepared().collect();
        for txn in stale {
            self.validator.release(txn);
        }
        let gone = |txn: &TxnId| !self.state.entries.contains_key(txn);
        let gone: Vec<TxnId> = self.watched.keys().copied().filter(gone).collect();
        for txn in gone {
            self.unwatch(txn);
        }
        let all: Vec<(TxnId, Option<Outcome>)> =
            self.state.entries.iter().map(|(txn, entry)| (*txn, entry.ended)).collect();
        for (txn, ended) in all {
            match ended {
                Some(outcome) => self.ended(txn, outcome),
                None => self.hold(txn),
            }
            self.watch(txn, world);
        }
    }
}

impl Outgoing {
    fn send_next(&mut self, (to, now): (NodeId, Time), world: &mut World<'_, '_>) {
        let Some((portion, msg)) = self.waiting.pop_front() else { return };
        world.reply(to, msg.clone());
        self.sent.insert(portion.number, (portion, msg));
        self.moved = now;
    }

    /// Sends the small parts again that are not acknowledged. False if the parts are large, or none is
    /// missing.
    fn resend(&mut self, (to, now): (NodeId, Time), world: &mut World<'_, '_>) -> bool {
        if !self.is_small || self.sent.is_empty() {
            return false;
        }
        (self.moved, self.repeated) = (now, self.repeated + 1);
        for (_, msg) in self.sent.values() {
            world.reply(to, msg.clone());
        }
        true
    }
}

/// The replicas that a view counts, whether the group begins with the view, and the founders.
type Members = (OrdMap<NodeId, View>, bool, OrdMap<NodeId, Timestamp>);

/// The number of parts of a record that may be on their way to one peer.
const PARTS_AT_ONCE: usize = 4;

/// The same for a record that is sent again in small parts.
const SMALL_PARTS_AT_ONCE: usize = 32;

/// A small part fits into one packet. The parts of a record of more than [`SMALL_PARTS`] packets are
/// larger.
const SMALL_BYTES: usize = 1_024;
const SMALL_PARTS: usize = 256;
