//! A node's replicas: versions that are stored, finalized, aborted, computed, settled (§3.2, §4.1).
//!
//! A node answers for all its partitions with one voice: a transaction is stored in all of them, or
//! in none.

use std::cmp::Ordering;
use std::collections::VecDeque;
use std::sync::Arc;

use orthodrome_core::Wire as _;
use orthodrome_core::cluster::Cluster;
use orthodrome_core::digest::Digest;
use orthodrome_core::id::{ClientId, NodeId, PartitionId, Ticket, TxnId};
use orthodrome_core::machine::{Claim, ReplicaDigest};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::scan::{Basis, Listing};
use orthodrome_core::store::Store;
use orthodrome_core::time::{Time, Timestamp};
use orthodrome_core::txn::{Key, Outcome, Read, Version};

use super::checks::Checks;
use super::directory::Task;
use super::message::{
    Ask, Change, Functor, Holding, Knowledge, Msg, NAME, Output, Reason, Refusal, Seen, Shown,
    View, What,
};
use super::recovery::partitions;
use super::server::{Local, World};
use super::state::{Fate, Image, Name, Named, Phase, State, named};
use super::sync::{Answer, Covered};
use super::takeover::{self, Closed, Held, Mark, Promise};
use super::{Config, Note};

/// A node's replicas.
#[derive(Debug)]
pub(super) struct Replica {
    held: OrdSet<PartitionId>,
    pub state: State,
    pub store: Store,
    /// Version numbers of what is pending, by key.
    index: OrdMap<Key, OrdSet<Timestamp>>,
    /// The same by transaction.
    numbers: OrdMap<TxnId, OrdSet<Timestamp>>,
    /// Stored, and not computed yet as far as this node knows.
    unresolved: OrdSet<Timestamp>,
    /// Stored, and what it comes to is not durable here (V11).
    unexecuted: OrdSet<Timestamp>,
    executed: VecDeque<(Ticket, Timestamp)>,
    /// Questions that wait for a version to be computed.
    parked: OrdMap<Timestamp, Vec<Get>>,
    /// What was visible when, to tell what is overdue.
    history: VecDeque<(Time, Timestamp)>,
    /// What settled versions came to, here and elsewhere.
    pub checks: Checks,
    /// See [`super::Mutations::loses_writes`].
    loses_writes: bool,
}

/// A question about keys.
#[derive(Clone, Debug)]
pub(super) struct Get {
    pub from: NodeId,
    pub query: u64,
    pub partition: PartitionId,
    pub asks: Vec<Ask>,
    pub replicated: Timestamp,
    pub epoch: u64,
}

impl Replica {
    pub(super) fn new(
        node: NodeId,
        cluster: &Cluster,
        config: &Config,
        state: State,
        store: Store,
    ) -> Self {
        let first = cluster.servers().next().map(|server| server.id);
        let held = cluster.partitions().filter(|p| p.replicas.contains(&node)).map(|p| p.id);
        let mut replica = Self {
            held: held.collect(),
            store,
            index: OrdMap::new(),
            numbers: OrdMap::new(),
            unresolved: OrdSet::new(),
            unexecuted: OrdSet::new(),
            executed: VecDeque::new(),
            parked: OrdMap::new(),
            history: VecDeque::new(),
            checks: Checks::new(config.compared_span),
            loses_writes: config.mutations.loses_writes() && first == Some(node),
            state: State::default(),
        };
        let all: Vec<Timestamp> = state.pending.keys().copied().collect();
        replica.state = state;
        for &ts in &all {
            replica.enter(ts, cluster);
        }
        // What was computed after the watermark had passed it was settled at once, but that is in
        // no record: it is done again before anybody is told what is settled here.
        let settled = replica.state.settled;
        for &partition in &replica.held {
            replica.checks.begin(partition, replica.state.settled_of(partition));
        }
        for ts in all.into_iter().filter(|ts| *ts < settled) {
            replica.store_final(ts, cluster);
        }
        replica
    }

    /// The partitions of which this node holds replicas.
    pub(super) fn held(&self) -> &OrdSet<PartitionId> {
        &self.held
    }

    /// Makes a change durable, and carries it out.
    fn change(&mut self, change: Change, world: &mut World<'_, '_>) -> Ticket {
        self.state.apply(&change);
        world.change(change)
    }

    /// Notes what follows from a transaction's present state.
    fn enter(&mut self, ts: Timestamp, cluster: &Cluster) {
        let Self { held, state, index, numbers, unresolved, unexecuted, .. } = self;
        let Some(image) = state.pending.get(&ts) else { return };
        numbers.entry(image.functor.txn).or_default().insert(ts);
        for key in &image.functor.writes {
            if held.contains(&cluster.partition_of(key)) {
                index.entry(key.clone()).or_default().insert(ts);
            }
        }
        if image.phase == Phase::Aborted || image.output.is_some() {
            unresolved.remove(&ts);
            unexecuted.remove(&ts);
        } else {
            unresolved.insert(ts);
            unexecuted.insert(ts);
        }
    }

    /// Takes a transaction out of what is pending.
    fn leave(&mut self, ts: Timestamp) -> Option<Image> {
        self.unresolved.remove(&ts);
        self.unexecuted.remove(&ts);
        let image = self.state.pending.remove(&ts)?;
        self.unindex(ts, &image.functor);
        Some(image)
    }

    fn unindex(&mut self, ts: Timestamp, functor: &Functor) {
        for key in &functor.writes {
            if let Some(numbers) = self.index.get_mut(key) {
                numbers.remove(&ts);
                if numbers.is_empty() {
                    self.index.remove(key);
                }
            }
        }
        if let Some(numbers) = self.numbers.get_mut(&functor.txn) {
            numbers.remove(&ts);
            if numbers.is_empty() {
                self.numbers.remove(&functor.txn);
            }
        }
    }

    // Storing (§4.1).

    /// Stores a transaction, unless something speaks against it.
    pub(super) fn on_write(
        &mut self,
        from: NodeId,
        (ts, ballot, incarnation): (Timestamp, u64, u32),
        functor: Arc<Functor>,
        world: &mut World<'_, '_>,
    ) {
        let held = self.state.pending.get(&ts);
        let is_held =
            held.is_some_and(|held| held.phase != Phase::Aborted && held.ballot == ballot);
        if is_held {
            world.reply(from, Msg::Written { ts, ballot, disk: world.disk() });
            return;
        }
        if let Err(refusal) = self.check((ts, ballot, incarnation), &functor, world) {
            world.cx.note(match refusal {
                Refusal::Ahead => Note::FarFuture,
                Refusal::Known | Refusal::Final => Note::KnownName,
                Refusal::Below => Note::LateWrite,
                Refusal::Outvoted => Note::Outvoted,
            });
            if refusal == Refusal::Known {
                self.ask_close(functor.txn, world);
            }
            world.reply(from, Msg::Refused { ts, ballot, refusal });
            return;
        }
        self.change(Change::Write { ts, ballot, incarnation, functor }, world);
        self.enter(ts, world.cluster);
        world.reply(from, Msg::Written { ts, ballot, disk: world.disk() });
    }

    fn check(
        &self,
        (ts, ballot, incarnation): (Timestamp, u64, u32),
        functor: &Functor,
        world: &World<'_, '_>,
    ) -> Result<(), Refusal> {
        let held = self.state.pending.get(&ts);
        let is_late = held.is_none() && ts < world.marks.visible.max(self.state.settled);
        if is_late && world.config.mutations.late_writes_count() {
            return Ok(());
        }
        let is_outvoted = held.is_some_and(|held| {
            held.ballot > ballot || (held.ballot == ballot && held.phase == Phase::Aborted)
        });
        if is_outvoted || !world.allows(ts, incarnation, ballot) {
            return Err(Refusal::Outvoted);
        }
        // What is held may be raised to a higher ballot at any time; that changes nothing.
        if is_late {
            return Err(Refusal::Below);
        }
        if held.is_none() {
            self.check_name(functor.txn, ts, ballot)?;
        }
        // A clock that the directory finds far from others' is not gone by.
        let clock = world.window.map_or(world.cx.clock().now, |window| window.clock);
        if ts > clock + world.config.clock_ahead_max {
            return Err(Refusal::Ahead);
        }
        Ok(())
    }

    /// Whether the name belongs to something else (R1, R6). Whoever takes over may have it stored
    /// unless that is certain: what it writes was perhaps stored before.
    fn check_name(&self, txn: TxnId, ts: Timestamp, ballot: u64) -> Result<(), Refusal> {
        let name = self.state.names.get(&named(txn));
        let same = name.filter(|name| name.attempt == txn.attempt);
        // It was never stored under this number, for it is over under another, or without one.
        let is_over = match name.map(|name| (name.attempt.cmp(&txn.attempt), name.fate)) {
            // Its client would not have tried again if it had not been told that this attempt
            // aborted.
            Some((Ordering::Greater, _)) => ballot > 0,
            Some((Ordering::Equal, Fate::Refused { is_final })) => is_final,
            Some((Ordering::Equal, Fate::Ended(_))) => {
                ballot > 0 && same.is_some_and(|name| name.ts != ts)
            }
            Some((Ordering::Equal, Fate::At) | (Ordering::Less, _)) => false,
            None => ballot > 0 && self.state.is_forgotten(txn.client, txn.counter),
        };
        if is_over {
            return Err(Refusal::Final);
        }
        let is_known = if ballot == 0 {
            self.state.is_acknowledged(txn)
                || (name.is_none() && self.state.is_too_old(txn.client, txn.counter))
                || name.is_some_and(|name| name.attempt > txn.attempt)
                || same.is_some_and(|name| !is_at(name, ts))
        } else {
            let is_there = |name: &&Name| {
                let held = self.state.pending.get(&name.ts);
                name.fate == Fate::At && held.is_some_and(|held| held.phase != Phase::Aborted)
            };
            same.filter(is_there).is_some_and(|name| name.ts != ts)
        };
        if is_known { Err(Refusal::Known) } else { Ok(()) }
    }

    /// Asks the other replicas to repeat a close. This replica refuses a transaction that another
    /// server takes over, because it holds a version of it from an incarnation that is out. It was
    /// away when that incarnation was closed, so the version may be void.
    ///
    /// It would learn that when it copies what it lacks, too. But it copies only when it knows
    /// watermarks of the current epoch. These may wait for the takeover, and if other replicas are
    /// dead, the takeover waits for this one.
    fn ask_close(&self, txn: TxnId, world: &mut World<'_, '_>) {
        let Some(name) = self.state.names.get(&named(txn)) else { return };
        let Some(held) = self.state.pending.get(&name.ts) else { return };
        let (server, incarnation) = (world.owner(name.ts), held.incarnation);
        if !world.is_out(name.ts, incarnation) {
            return;
        }
        let mut asks = OrdSet::new();
        for partition in partitions(&held.functor, world.cluster) {
            let placed = world.cluster.partition(partition);
            let replicas = placed.map_or(&[][..], |placed| &placed.replicas);
            if replicas.contains(&world.node) {
                asks.extend(replicas.iter().map(|&peer| (peer, partition)));
            }
        }
        for (peer, partition) in asks {
            if peer != world.node {
                let msg = takeover::Message::AskClose { partition, server, incarnation };
                world.send(peer, Msg::Takeover(Box::new(msg)));
            }
        }
    }

    /// Marks a transaction that a majority of the replicas of each of its partitions has stored.
    pub(super) fn on_finalize(
        &mut self,
        from: NodeId,
        ts: Timestamp,
        ballot: u64,
        world: &mut World<'_, '_>,
    ) {
        let Some(image) = self.state.pending.get(&ts) else {
            let is_held = ts < self.state.settled;
            if !is_held {
                world.cx.note(Note::FinalizeUnheld);
            }
            world.reply(from, Msg::Confirm { ts, ballot, is_held, disk: world.disk() });
            return;
        };
        let is_allowed = world.allows(ts, image.incarnation, ballot);
        if image.ballot > ballot || image.phase == Phase::Aborted || !is_allowed {
            world.cx.note(Note::Outvoted);
            return;
        }
        let is_held = image.ballot == ballot;
        if is_held && image.phase == Phase::Tentative {
            self.change(Change::Finalize(ts), world);
        }
        world.reply(from, Msg::Confirm { ts, ballot, is_held, disk: world.disk() });
    }

    /// Promises never to accept a transaction.
    pub(super) fn on_abort(
        &mut self,
        from: NodeId,
        (ts, ballot, incarnation): (Timestamp, u64, u32),
        functor: Arc<Functor>,
        world: &mut World<'_, '_>,
    ) {
        let held = self.state.pending.get(&ts);
        let is_outvoted = held.is_some_and(|held| held.ballot > ballot);
        if is_outvoted || !world.allows(ts, incarnation, ballot) {
            world.cx.note(Note::Outvoted);
            return;
        }
        let is_promised =
            held.is_some_and(|held| held.phase == Phase::Aborted && held.ballot == ballot);
        if !is_promised && ts >= self.state.settled {
            world.cx.note(Note::Tombstone);
            self.change(Change::Abort { ts, ballot, incarnation, functor }, world);
            self.enter(ts, world.cluster);
            self.wake(ts, world);
        }
        world.reply(from, Msg::Aborted { ts, ballot, disk: world.disk() });
    }

    // Names.

    /// Somebody lost track of a transaction. If it is not known here, it never will be (R1).
    pub(super) fn on_query(
        &mut self,
        from: NodeId,
        (txn, is_final): (TxnId, bool),
        round: u32,
        world: &mut World<'_, '_>,
    ) {
        let name = self.state.names.get(&named(txn)).copied();
        let fate = name.filter(|name| name.attempt == txn.attempt).map(|name| name.fate);
        // Whatever its name stands for: what is aborted under one number may be stored under
        // another, and a later attempt is no proof that this one was not stored.
        let held = self.holdings(txn);
        let is_gone = name.is_none()
            && (self.state.is_too_old(txn.client, txn.counter) || self.state.is_acknowledged(txn))
            && held.iter().all(|holding| holding.is_aborted);
        let knowledge = match fate {
            None if is_gone => {
                world.cx.note(Note::Forgotten);
                Knowledge::Forgotten
            }
            Some(Fate::Ended(outcome)) => Knowledge::Ended(outcome),
            Some(Fate::Refused { is_final: true }) => Knowledge::Refused { is_final: true },
            Some(Fate::At | Fate::Refused { is_final: false }) | None if !held.is_empty() => {
                Knowledge::Stored(held)
            }
            Some(Fate::At) => unreachable!("{txn} is neither held nor over: {name:?}"),
            None if name.is_some_and(|name| name.attempt > txn.attempt) => {
                Knowledge::Refused { is_final }
            }
            Some(Fate::Refused { is_final: false }) => self.refuse(txn, is_final, world),
            None => {
                world.cx.note(Note::RefusedUnknown);
                self.refuse(txn, is_final, world)
            }
        };
        let settled = self.state.settled;
        world.reply(from, Msg::Known { txn, round, settled, knowledge });
    }

    /// What is pending of a transaction.
    fn holdings(&self, txn: TxnId) -> Vec<Holding> {
        let holding = |ts: &Timestamp| {
            let image = self.state.pending.get(ts)?;
            let (ballot, functor) = (image.ballot, image.functor.clone());
            Some(Holding { ts: *ts, ballot, is_aborted: image.phase == Phase::Aborted, functor })
        };
        self.numbers.get(&txn).into_iter().flatten().filter_map(holding).collect()
    }

    fn refuse(&mut self, txn: TxnId, is_final: bool, world: &mut World<'_, '_>) -> Knowledge {
        let at = world.cx.clock().now;
        self.change(Change::Refuse { txn, is_final, at }, world);
        Knowledge::Refused { is_final }
    }

    // Reading (§4.3).

    /// What is there of these keys? What this node must know first is computed first.
    pub(super) fn on_get(&mut self, get: Get, world: &mut World<'_, '_>) {
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
    fn must_resolve(
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

    fn view(&self, key: &Key, partition: PartitionId, below: Timestamp, limit: usize) -> View {
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
    fn settled(&self, partition: PartitionId, key: &Key, below: Timestamp) -> Read {
        self.store.read_at(partition, key, Timestamp(below.0.saturating_sub(1)))
    }

    /// A version is computed, or gone: what waited for it goes on.
    fn wake(&mut self, ts: Timestamp, world: &mut World<'_, '_>) {
        for get in self.parked.remove(&ts).unwrap_or_default() {
            self.on_get(get, world);
        }
    }

    // Computing (§3.1).

    /// Final values take the place of a functor.
    pub(super) fn on_put(
        &mut self,
        ts: Timestamp,
        output: &Arc<Output>,
        world: &mut World<'_, '_>,
    ) {
        if !self.unresolved.remove(&ts) {
            self.check_same(ts, output);
            return;
        }
        let ticket = self.change(Change::Resolve { ts, output: output.clone() }, world);
        self.executed.push_back((ticket, ts));
        if ts < self.state.settled {
            self.settle_one(ts, world);
        }
        self.wake(ts, world);
    }

    /// Whoever computes it comes to the same (V12).
    fn check_same(&self, ts: Timestamp, output: &Arc<Output>) {
        let Some(image) = self.state.pending.get(&ts) else { return };
        let Some(held) = &image.output else { return };
        assert!(
            held == output,
            "{} came to two results: {held:?} and {output:?}",
            image.functor.txn
        );
    }

    pub(super) fn on_durable(&mut self, ticket: Ticket) {
        while let Some(&(held, ts)) = self.executed.front()
            && held <= ticket
        {
            self.executed.pop_front();
            self.unexecuted.remove(&ts);
        }
    }

    /// Functors that have been visible for so long that whoever should compute them must be gone.
    pub(super) fn overdue(&mut self, world: &World<'_, '_>) -> Vec<(Timestamp, Arc<Functor>)> {
        let now = world.cx.now();
        self.history.push_back((now, world.marks.visible));
        let mut bound = Timestamp::ZERO;
        while let Some(&(since, visible)) = self.history.front()
            && now.since(since) >= world.config.resolve_after
        {
            bound = visible;
            if self
                .history
                .get(1)
                .is_none_or(|(next, _)| now.since(*next) < world.config.resolve_after)
            {
                break;
            }
            self.history.pop_front();
        }
        // Without a lease it would ask others who have none either, and make slow links slower.
        let most = if world.is_serving { OVERDUE_MAX } else { 0 };
        let late = self.unresolved.range(..bound).take(most);
        let image = |ts: &Timestamp| Some((*ts, self.state.pending.get(ts)?.functor.clone()));
        late.filter_map(image).collect()
    }

    /// The least version that this node has still to compute, or to make durable.
    pub(super) fn least_unexecuted(&self) -> Option<Timestamp> {
        self.unexecuted.first().copied()
    }

    /// True if a version is stored here, and it is not known what it comes to.
    pub(super) fn lacks(&self, ts: Timestamp) -> bool {
        self.unresolved.contains(&ts)
    }

    /// How many functors wait to be computed below the Vwatermark.
    pub(super) fn unresolved_below(&self, visible: Timestamp) -> usize {
        self.unresolved.range(..visible).count()
    }

    // Settling.

    /// The watermarks have moved: what every replica holds is moved to the store, tombstones go.
    pub(super) fn settle(&mut self, world: &mut World<'_, '_>) {
        let least = self.held.iter().map(|&id| world.marks.replicated(id)).min();
        let to = least.unwrap_or(Timestamp::MAX).min(world.marks.visible);
        if to <= self.state.settled {
            return;
        }
        let from = std::mem::replace(&mut self.state.settled, to);
        if from == Timestamp::ZERO {
            // Nothing is compared of what was before.
            self.held.iter().for_each(|&partition| self.checks.begin(partition, to));
        }
        self.state.copied.retain(|_, copied| *copied > to);
        let passed: Vec<Timestamp> =
            self.state.pending.range(from..to).map(|(ts, _)| *ts).collect();
        for ts in passed {
            self.settle_one(ts, world);
        }
    }

    fn settle_one(&mut self, ts: Timestamp, world: &mut World<'_, '_>) {
        // That its output is durable is awaited all the same.
        let is_awaited = self.unexecuted.contains(&ts);
        let Some((txn, fate)) = self.store_final(ts, world.cluster) else { return };
        if is_awaited {
            self.unexecuted.insert(ts);
        }
        if let Fate::Ended(outcome) = fate {
            world.cx.claim(Claim::Decided { txn, outcome });
        }
    }

    /// Takes a transaction out of what is pending if it is known what it comes to, and moves that
    /// to the store.
    fn store_final(&mut self, ts: Timestamp, cluster: &Cluster) -> Option<(TxnId, Fate)> {
        let image = self.state.pending.get(&ts)?;
        let fate = match (image.phase, image.output.as_deref()) {
            // Other numbers may have been given to this name, and one of them may be there.
            (Phase::Aborted, _) => Fate::Refused { is_final: false },
            (Phase::Tentative | Phase::Finalized, None) => return None,
            (Phase::Tentative | Phase::Finalized, Some(Ok(_))) => {
                Fate::Ended(Outcome::Committed(ts))
            }
            (Phase::Tentative | Phase::Finalized, Some(Err(reason))) => {
                Fate::Ended(Outcome::Aborted(*reason))
            }
        };
        let image = self.leave(ts)?;
        let txn = image.functor.txn;
        self.state.end(ts, &image, fate);
        if self.loses_writes && txn.counter.is_multiple_of(4) {
            return Some((txn, fate));
        }
        let mut digests: OrdMap<PartitionId, Digest> = OrdMap::new();
        for (key, value) in image.output.as_deref().into_iter().flatten().flatten() {
            let partition = cluster.partition_of(key);
            if self.held.contains(&partition) {
                let digest = digests.entry(partition).or_default();
                digest.add(ts.0);
                digest.add_bytes(key.bytes());
                digest.add(u64::from(value.is_some()));
                if let Some(value) = value {
                    digest.add_bytes(&value.0);
                }
                let version = Version { timestamp: ts, writer: txn.name() };
                self.store.put(partition, key.clone(), version, value.clone());
            }
        }
        for (partition, digest) in digests {
            self.checks.add(partition, ts, digest.value());
        }
        Some((txn, fate))
    }

    /// What is settled, as far as all of it is computed, can be compared. Only if the replicas here
    /// are complete.
    pub(super) fn close_spans(&mut self) {
        let first = self.state.pending.keys().next().copied();
        let below = first.map_or(self.state.settled, |first| first.min(self.state.settled));
        if below > Timestamp::ZERO {
            self.held.iter().for_each(|&partition| self.checks.close(partition, below));
        }
    }

    /// Before a checkpoint: lets the store drop what nobody will read any more (V11).
    pub(super) fn collect(&mut self, world: &World<'_, '_>) {
        let bound = if world.config.mutations.collect_by_age() {
            world.marks.visible - world.config.version_retention
        } else {
            world.marks.collectable
        };
        self.state.collected = self.state.collected.max(bound);
        for &id in &self.held {
            // A server that was away may have missed a deletion, and copies only newer versions.
            self.store.collect_values_below(id, self.state.collected.next());
        }
        self.state.forget(world.config.retention);
    }

    /// Takes in a transaction that the others have decided on, below the Vwatermark.
    pub(super) fn adopt(&mut self, ts: Timestamp, image: Image, world: &mut World<'_, '_>) {
        world.cx.note(Note::Adopted);
        self.change(Change::Adopt { ts, image }, world);
        self.enter(ts, world.cluster);
        if ts < self.state.settled {
            self.settle_one(ts, world);
        }
        self.wake(ts, world);
    }

    /// What this node holds of a partition in a range, for a peer that lacks some of it.
    pub(super) fn answer(
        &self,
        partition: PartitionId,
        range: (Timestamp, Timestamp),
        cluster: &Cluster,
    ) -> Answer {
        let (from, to) = range;
        let writes = |image: &Image| {
            image.functor.writes.iter().any(|key| cluster.partition_of(key) == partition)
        };
        let all = self.state.pending.range(from..=to.max(from));
        let entries = all.filter(|(_, image)| writes(image));
        let is_wanted = |name: &Name| name.ts >= from || matches!(name.fate, Fate::Refused { .. });
        let names = self.state.names.iter().filter(|(_, name)| is_wanted(name));
        Answer {
            settled: self.state.settled_of(partition),
            entries: entries.map(|(ts, image)| (*ts, image.clone())).collect(),
            names: names.map(|(name, held)| (*name, *held)).collect(),
            forgotten: self
                .state
                .forgotten
                .iter()
                .map(|(&client, &below)| (client, below))
                .collect(),
            promises: Vec::new(),
        }
    }

    /// Takes over what a peer knows of names.
    pub(super) fn learn_names(&mut self, names: &[(Named, Name)], world: &mut World<'_, '_>) {
        let news: Vec<_> =
            names.iter().filter(|(name, told)| self.state.is_news(*name, told)).copied().collect();
        for news in news.chunks(names_max(world)) {
            self.change(Change::Names(news.to_vec()), world);
        }
    }

    /// Takes over what a peer has forgotten: whoever replaces a replica forgets no less.
    pub(super) fn learn_forgotten(
        &mut self,
        forgotten: &[(ClientId, u64)],
        world: &mut World<'_, '_>,
    ) {
        let is_news = |&&(client, below): &&(ClientId, u64)| {
            crate::acknowledged::below(&self.state.forgotten, client) < below
        };
        let news: Vec<(ClientId, u64)> = forgotten.iter().filter(is_news).copied().collect();
        for news in news.chunks(names_max(world)) {
            self.change(Change::Forget(news.to_vec()), world);
        }
    }

    /// Settled versions of these partitions are all here now: what is pending of them is over. A
    /// transaction stays while another partition that it writes was not copied so far.
    pub(super) fn drop_covered(
        &mut self,
        from: Timestamp,
        covered: &Covered,
        world: &mut World<'_, '_>,
    ) {
        let is_over = |(ts, image): &(&Timestamp, &Image)| {
            let partitions = image.functor.writes.iter().map(|key| world.cluster.partition_of(key));
            let mut held = partitions.filter(|partition| self.held.contains(partition));
            held.all(|partition| {
                let covered = covered.get(&partition);
                covered.is_some_and(|(below, open)| *ts < below && !open.contains(ts))
            })
        };
        let over = self.state.pending.range(from..).filter(is_over).map(|(ts, _)| *ts);
        let over: Vec<Timestamp> = over.collect();
        for (&partition, (below, _)) in covered {
            let copied = self.state.copied.entry(partition).or_default();
            *copied = (*copied).max(*below);
            self.checks.begin(partition, *below);
        }
        for ts in over {
            self.unresolved.remove(&ts);
            self.unexecuted.remove(&ts);
            if let Some(functor) = self.state.pending.get(&ts).map(|image| image.functor.clone()) {
                self.unindex(ts, &functor);
            }
            self.state.drop(ts);
            self.wake(ts, world);
        }
    }

    /// What this node holds of an incarnation in a partition, for whoever takes it over.
    pub(super) fn promise(
        &self,
        partition: PartitionId,
        task: Task,
        closed: Option<Closed>,
        world: &World<'_, '_>,
    ) -> Promise<Arc<Functor>> {
        let visible = world.marks.visible;
        let is_it = |(ts, image): &(&Timestamp, &Image)| {
            image.incarnation == task.incarnation && world.owner(**ts) == task.server
        };
        let writes = |image: &Image| {
            image.functor.writes.iter().any(|key| world.cluster.partition_of(key) == partition)
        };
        let all = self.state.pending.range(visible..).filter(is_it);
        let held = all.filter(|(_, image)| writes(image)).map(|(&ts, image)| {
            let mark = match image.phase {
                Phase::Tentative => Mark::Tentative,
                Phase::Finalized => Mark::Finalized,
                Phase::Aborted => Mark::Aborted,
            };
            (ts, Held { ballot: image.ballot, mark, functor: Some(image.functor.clone()) })
        });
        Promise { visible, closed, held: held.collect() }
    }

    /// Drops what did not survive of an incarnation. True if everything that did is here.
    pub(super) fn close(&mut self, task: Task, closed: &Closed, world: &mut World<'_, '_>) -> bool {
        let first = closed.above.next();
        let is_void = |(ts, image): &(&Timestamp, &Image)| {
            image.incarnation == task.incarnation
                && world.owner(**ts) == task.server
                && image.ballot <= closed.ballot
                && image.phase != Phase::Aborted
                && !closed.survivors.contains(ts)
        };
        let void: Vec<(Timestamp, Arc<Functor>)> = self
            .state
            .pending
            .range(first..)
            .filter(is_void)
            .map(|(ts, image)| (*ts, image.functor.clone()))
            .collect();
        for (ts, functor) in void {
            world.cx.note(Note::Void);
            let (ballot, incarnation) = (closed.ballot, task.incarnation);
            self.change(Change::Abort { ts, ballot, incarnation, functor }, world);
            self.enter(ts, world.cluster);
            self.wake(ts, world);
        }
        let is_here = |ts: &Timestamp| {
            *ts < self.state.settled
                || self.state.pending.get(ts).is_some_and(|image| image.phase != Phase::Aborted)
        };
        closed.survivors.iter().all(is_here)
    }

    /// From which version on settled versions of a partition may be missing here, if those of
    /// others may be from `from` on: later if they were copied.
    pub(super) fn lacks_from(&self, partition: PartitionId, from: Timestamp) -> Timestamp {
        let copied = self.state.copied.get(&partition).copied().unwrap_or_default();
        // What is pending here may have been settled by others since.
        let first = self.state.pending.keys().next().copied();
        from.max(first.map_or(copied, |first| first.min(copied)))
    }

    /// From here on this node may lack something, or have something to be rid of.
    pub(super) fn first_open(&self) -> Timestamp {
        let first = self.state.pending.keys().next().copied();
        first.map_or(self.state.settled, |first| first.min(self.state.settled))
    }

    /// How many transactions are not settled.
    pub(super) fn unsettled(&self) -> usize {
        self.state.pending.len()
    }

    /// The names in a range of a partition: of settled versions, and of what is pending, whatever
    /// it comes to.
    pub(super) fn names(
        &self,
        partition: PartitionId,
        ask: &orthodrome_core::scan::Ask,
        basis: Basis,
        cluster: &Cluster,
    ) -> Listing {
        if let Some(after) = ask.changes_after {
            // A version that is settled is at every replica.
            let closed = Timestamp(self.first_open().0.saturating_sub(1));
            let basis = Basis::Complete;
            return Listing::of_changes(&self.store, [partition], (ask, after), closed, basis);
        }
        let pending = self.index.range(ask.range.from.clone()..).map(|(key, _)| key);
        let pending = pending.take_while(|key| ask.range.contains(key));
        let pending = pending.filter(|key| cluster.partition_of(key) == partition);
        Listing::of(&self.store, [partition], pending.cloned(), ask, basis)
    }

    /// What the partitions here hold that is settled.
    pub(super) fn replica_digests(&self) -> Vec<ReplicaDigest> {
        let copy = |&partition: &PartitionId| {
            let mut digest = Digest::default();
            let mut newest = Version::default();
            for (key, versions) in self.store.scan(partition, None, usize::MAX) {
                // Older versions go when a node makes a checkpoint, and so do deletions.
                if let Some((version, Some(value))) = versions.last() {
                    newest = newest.max(*version);
                    digest.add_debug(&(key, version, value));
                }
            }
            let (position, digest) = (newest.timestamp.0, digest.value());
            ReplicaDigest { partition, position, digest, members: None }
        };
        self.held.iter().map(copy).collect()
    }

    pub(super) fn assert_invariants(&self) {
        for ts in &self.unresolved {
            let image = self.state.pending.get(ts);
            assert!(
                image.is_some_and(|held| held.phase != Phase::Aborted && held.output.is_none()),
                "{ts} waits to be computed, but is {image:?}"
            );
        }
        assert!(
            self.parked.keys().all(|ts| self.unresolved.contains(ts)),
            "somebody waits for what is known: {:?}",
            self.parked
        );
    }
}

fn is_at(name: &Name, ts: Timestamp) -> bool {
    name.fate == Fate::At && name.ts == ts
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

/// So many versions of a key that are there are shown in one answer: more than one, because the
/// newest may be aborted.
const SHOWN_MAX: usize = 4;

/// An answer about several keys is no longer than so many pieces of a copy.
const GOT_PIECES: usize = 4;

/// So many names go into one record.
fn names_max(world: &World<'_, '_>) -> usize {
    (world.config.batch_bytes / NAME).max(1)
}

/// So many overdue functors are computed at a time.
const OVERDUE_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use orthodrome_core::store::MemoryEngine;
    use orthodrome_core::time::Duration;
    use orthodrome_core::topology::Topology;
    use orthodrome_core::txn::Value;

    use orthodrome_core::machine::Protocol as _;

    use super::super::message::Body;
    use super::super::{NAME, OceanVista};
    use super::*;

    fn image(txn: TxnId, key: &Key, phase: Phase, value: Option<&str>) -> Image {
        let functor = Functor {
            txn,
            reads: Vec::new(),
            writes: vec![key.clone()],
            body: Body::Ops(Vec::new()),
            acknowledged_below: 0,
        };
        let output =
            value.map(|text| Arc::new(Ok([(key.clone(), Some(Value::from(text)))].into())));
        Image { functor: Arc::new(functor), incarnation: 1, ballot: 0, phase, output }
    }

    /// The 5 000 092nd seed: a version that was computed after the watermark had passed it was
    /// settled, the node crashed, and told its peers, when it was back, that everything there was
    /// settled.
    #[test]
    fn what_the_watermark_had_passed_is_settled_again_after_a_crash() {
        let regions = Topology::uniform(3, Duration::from_millis(1), Duration::from_millis(100));
        let cluster = Cluster::spread(regions, 1, 1, 1, 3).unwrap();
        let node = cluster.servers().next().unwrap().id;
        let key = Key::from("k");
        let txn = |counter| TxnId::new(ClientId(1), counter);
        let mut state = State { settled: Timestamp(10), ..State::default() };
        let pending = [
            (5, image(txn(1), &key, Phase::Finalized, Some("there"))),
            (6, image(txn(2), &key, Phase::Aborted, None)),
            (7, image(txn(3), &key, Phase::Finalized, None)),
            (12, image(txn(4), &key, Phase::Finalized, Some("above"))),
        ];
        for (ts, image) in pending {
            let functor = image.functor.clone();
            state.apply(&Change::Adopt { ts: Timestamp(ts), image });
            assert!(state.names.contains_key(&named(functor.txn)));
        }
        let store = Store::new(Box::new(MemoryEngine::default()));
        let config = OceanVista::configure(&cluster, NAME);
        let replica = Replica::new(node, &cluster, &config, state, store);
        let left: Vec<u64> = replica.state.pending.keys().map(|ts| ts.0).collect();
        assert_eq!(left, [7, 12], "what is known below the watermark is over, nothing else");
        let read = replica.settled(PartitionId(0), &key, Timestamp(10));
        assert_eq!(
            (read.version.timestamp, read.value),
            (Timestamp(5), Some(Value::from("there")))
        );
        let fate = |counter| replica.state.names.get(&named(txn(counter))).map(|name| name.fate);
        assert_eq!(fate(1), Some(Fate::Ended(Outcome::Committed(Timestamp(5)))));
        assert_eq!(fate(3), Some(Fate::At));
        replica.assert_invariants();
    }
}
