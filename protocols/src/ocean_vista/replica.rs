//! A node's replicas: versions that are stored, finalized, aborted, computed, settled (§3.2, §4.1).
//!
//! A node answers for all its partitions with one voice: a transaction is stored in all of them, or
//! in none.

mod reading;
mod settling;
mod sharing;

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::digest::Digest;
use orthodrome_core::id::{NodeId, PartitionId, Ticket, TxnId};
use orthodrome_core::machine::ReplicaDigest;
use orthodrome_core::store::Store;
use orthodrome_core::time::{Time, Timestamp};
use orthodrome_core::txn::{Key, Version};

use super::checks::Checks;
use super::message::{Ask, Change, Functor, Holding, Knowledge, Msg, NAME, Output, Refusal};
use super::server::World;
use super::state::{Fate, Image, Name, Phase, State};
use super::{Config, Note};

/// A node's replicas.
#[derive(Debug)]
pub(super) struct Replica {
    held: BTreeSet<PartitionId>,
    pub state: State,
    pub store: Store,
    /// Version numbers of what is pending, by key.
    index: BTreeMap<Key, BTreeSet<Timestamp>>,
    /// The same by transaction.
    numbers: BTreeMap<TxnId, BTreeSet<Timestamp>>,
    /// Stored, and not computed yet as far as this node knows.
    unresolved: BTreeSet<Timestamp>,
    /// Stored, and what it comes to is not durable here (V11).
    unexecuted: BTreeSet<Timestamp>,
    executed: VecDeque<(Ticket, Timestamp)>,
    /// Questions that wait for a version to be computed.
    parked: BTreeMap<Timestamp, Vec<Get>>,
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
            index: BTreeMap::new(),
            numbers: BTreeMap::new(),
            unresolved: BTreeSet::new(),
            unexecuted: BTreeSet::new(),
            executed: VecDeque::new(),
            parked: BTreeMap::new(),
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
    pub(super) fn held(&self) -> &BTreeSet<PartitionId> {
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
        let name = self.state.names.get(&(txn.client, txn.counter));
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
        let name = self.state.names.get(&(txn.client, txn.counter)).copied();
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
    use orthodrome_core::id::ClientId;
    use orthodrome_core::store::MemoryEngine;
    use orthodrome_core::time::Duration;
    use orthodrome_core::topology::Topology;
    use orthodrome_core::txn::{Outcome, Value};

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
            assert!(state.names.contains_key(&(ClientId(1), functor.txn.counter)));
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
        let fate = |counter| replica.state.names.get(&(ClientId(1), counter)).map(|name| name.fate);
        assert_eq!(fate(1), Some(Fate::Ended(Outcome::Committed(Timestamp(5)))));
        assert_eq!(fate(3), Some(Fate::At));
        replica.assert_invariants();
    }
}
