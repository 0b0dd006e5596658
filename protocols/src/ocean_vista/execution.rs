//! The E-phase: functors are computed from the versions just below them (§3.1, §4.3).
//!
//! There is no recursion. An execution sends questions and waits for answers. A question that first
//! needs the result of another functor waits at the replica that has that functor
//! ([`super::replica`]), which has it executed on its own node. At most one execution of a version
//! runs on a node.

use std::sync::Arc;

use orthodrome_core::Wire as _;
use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{NodeId, PartitionId, TxnId};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::time::{Duration, Time, Timestamp};
use orthodrome_core::txn::{AbortReason, Key, Reads};

use super::message::{Ask, Functor, Msg, Output, Reason, Seen};
use super::reading::{Said, Verdict, read};
use super::server::World;
use super::{Config, Note};
use crate::waiting::RetryState;

/// The purpose of a read.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Owner {
    /// The execution of a version.
    Execution(Timestamp),
    /// A read of a gateway for a transaction that decides afterwards.
    Look { txn: TxnId, round: u32, gateway: NodeId, at: Timestamp },
}

/// The progress of a read.
#[derive(Debug)]
pub(super) enum Progress {
    /// More answers are needed.
    Nothing,
    /// The reads are complete.
    Read(Owner, Reads),
    /// A needed version has been garbage-collected.
    Collected(Owner),
    /// The data is larger than one transaction may read.
    TooLarge(Owner),
}

/// The pending reads of this node.
#[derive(Debug)]
pub(super) struct Reader {
    /// The replicas of each partition, nearest first.
    nearest: OrdMap<PartitionId, Vec<NodeId>>,
    /// Replicas that owe an answer, or could not answer, and since when. They are removed when a
    /// message of theirs arrives, or when a lease has passed: by then they are back, or out.
    suspects: OrdMap<NodeId, Time>,
    owners: OrdMap<Owner, Reading>,
    queries: OrdMap<u64, Query>,
    last_query: u64,
}

/// The reads that an owner has, and those that it waits for.
#[derive(Debug)]
struct Reading {
    below: Timestamp,
    reads: Reads,
    /// Size of the reads so far.
    bytes: usize,
    queries: OrdSet<u64>,
}

/// A question about keys of one partition.
#[derive(Debug)]
struct Query {
    owner: Owner,
    partition: PartitionId,
    wanted: OrdMap<Key, Wanted>,
    /// The replicas that were asked.
    replicas: Vec<NodeId>,
    asked: RetryState,
    /// True if an active replica could not answer.
    is_declined: bool,
}

#[derive(Debug)]
struct Wanted {
    below: Timestamp,
    said: OrdMap<NodeId, Said>,
    /// A version that must be computed, and the replica that was asked to compute it.
    resolving: Option<(Timestamp, NodeId)>,
}

impl Reader {
    pub(super) fn new(node: NodeId, cluster: &Cluster) -> Self {
        let home = cluster.region_of(node);
        let nearest = cluster.partitions().map(|placed| {
            let mut replicas = placed.replicas.clone();
            replicas.sort_by_key(|&replica| {
                let region = cluster.region_of(replica);
                let is_far = region != home;
                (replica != node, is_far, cluster.topology.rtt(home, region), replica)
            });
            (placed.id, replicas)
        });
        Self {
            nearest: nearest.collect(),
            suspects: OrdMap::new(),
            owners: OrdMap::new(),
            queries: OrdMap::new(),
            last_query: 0,
        }
    }

    /// Number of open questions.
    pub(super) fn len(&self) -> usize {
        self.queries.len()
    }

    /// The lowest version number of a pending read.
    pub(super) fn least(&self) -> Option<Timestamp> {
        let looks = |(owner, reading): (&Owner, &Reading)| match owner {
            Owner::Execution(_) => None,
            Owner::Look { .. } => Some(reading.below),
        };
        // Executions come first, ordered by version.
        let first = match self.owners.first_key_value() {
            Some((Owner::Execution(ts), _)) => Some(*ts),
            Some((Owner::Look { .. }, _)) | None => None,
        };
        let least_look = self.owners.iter().rev().map_while(looks).min();
        first.into_iter().chain(least_look).min()
    }

    /// Notes that a message of a node has arrived.
    pub(super) fn on_heard(&mut self, from: NodeId) {
        self.suspects.remove(&from);
    }

    /// Reads the newest versions below `below`, which is at most the Vwatermark.
    pub(super) fn begin(
        &mut self,
        owner: Owner,
        keys: &[Key],
        below: Timestamp,
        world: &mut World<'_, '_>,
    ) -> Progress {
        if keys.is_empty() {
            return Progress::Read(owner, Reads::new());
        }
        if self.owners.contains_key(&owner) {
            return Progress::Nothing;
        }
        let mut parts: OrdMap<PartitionId, OrdMap<Key, Wanted>> = OrdMap::new();
        for key in keys {
            let wanted = Wanted { below, said: OrdMap::new(), resolving: None };
            let part = parts.entry(world.cluster.partition_of(key)).or_default();
            part.insert(key.clone(), wanted);
        }
        let (reads, bytes, queries) = (Reads::new(), 0, OrdSet::new());
        let mut reading = Reading { below, reads, bytes, queries };
        for (partition, wanted) in parts {
            self.last_query += 1;
            let asked = RetryState::new(world.cx.now());
            let (replicas, is_declined) = (Vec::new(), false);
            let query = Query { owner, partition, wanted, replicas, asked, is_declined };
            self.queries.insert(self.last_query, query);
            reading.queries.insert(self.last_query);
        }
        let queries: Vec<u64> = reading.queries.iter().copied().collect();
        self.owners.insert(owner, reading);
        for query in queries {
            self.ask_enough(query, world);
        }
        Progress::Nothing
    }

    /// Asks as many replicas as are needed if all of them answer: one if the Rwatermark has passed,
    /// otherwise f + 1.
    fn ask_enough(&mut self, id: u64, world: &mut World<'_, '_>) {
        let Self { nearest, suspects, queries, .. } = self;
        let Some(query) = queries.get_mut(&id) else { return };
        let replicas = nearest.get(&query.partition).map_or(&[][..], Vec::as_slice);
        let replicated = replicated(query.partition, world);
        let highest = query.wanted.values().map(|wanted| wanted.below).max().unwrap_or_default();
        let enough = if highest <= replicated { 1 } else { replicas.len() / 2 + 1 };
        let is_fresh = |node: &&NodeId| !query.replicas.contains(node) && is_active(**node, world);
        let mut fresh: Vec<NodeId> = replicas.iter().filter(is_fresh).copied().collect();
        let (now, lease) = (world.cx.now(), world.config.directory.lease);
        fresh.sort_by_key(|node| suspects.get(node).is_some_and(|&at| now.since(at) < lease));
        let more = enough.saturating_sub(query.replicas.len());
        for to in fresh.into_iter().take(more) {
            query.replicas.push(to);
            query.send(id, to, None, replicated, world);
        }
    }

    /// Handles a replica's answer.
    pub(super) fn on_got(
        &mut self,
        from: NodeId,
        id: u64,
        replicated: Timestamp,
        (seen, is_cut): (Vec<Seen>, bool),
        world: &mut World<'_, '_>,
    ) -> Progress {
        let Some(query) = self.queries.get_mut(&id) else { return Progress::Nothing };
        for Seen { key, below, view } in seen {
            if let Some(wanted) = query.wanted.get_mut(&key)
                && wanted.below == below
            {
                wanted.said.insert(from, Said { replicated, view });
                if wanted.resolving.is_some_and(|(_, by)| by == from) {
                    wanted.resolving = None;
                }
            }
        }
        let progress = self.evaluate(id, world);
        if is_cut && let Some(query) = self.queries.get(&id) {
            query.send_rest(id, from, world);
        }
        progress
    }

    fn evaluate(&mut self, id: u64, world: &mut World<'_, '_>) -> Progress {
        let Self { nearest, owners, queries, .. } = self;
        let Some(query) = queries.get_mut(&id) else { return Progress::Nothing };
        let Some(reading) = owners.get_mut(&query.owner) else { return Progress::Nothing };
        let replicas = nearest.get(&query.partition).map_or(&[][..], Vec::as_slice);
        let majority = replicas.len() / 2 + 1;
        let mut asks: OrdMap<NodeId, Vec<Ask>> = OrdMap::new();
        let mut is_lower = false;
        query.wanted.retain(|key, wanted| {
            let is_enough = wanted.said.len() >= majority
                || wanted.said.values().any(|said| said.replicated >= wanted.below);
            if !is_enough || wanted.resolving.is_some() {
                return true;
            }
            match read(&wanted.said, world.config.mutations) {
                Verdict::Read(read) => {
                    reading.bytes += key.size() + read.size();
                    reading.reads.insert(key.clone(), read);
                    return false;
                }
                Verdict::Resolve(ts, holders) => {
                    let first = replicas.iter().find(|node| holders.contains(node));
                    let Some(&by) = first else { unreachable!("{ts} of {key} is held by nobody") };
                    wanted.resolving = Some((ts, by));
                    let (key, below) = (key.clone(), wanted.below);
                    asks.entry(by).or_default().push(Ask { key, below, resolve: Some(ts) });
                }
                Verdict::Lower(below) => {
                    wanted.below = below;
                    wanted.said.clear();
                    is_lower = true;
                }
            }
            true
        });
        let (owner, partition) = (query.owner, query.partition);
        if reading.bytes > world.config.read_bytes_max {
            // Every executor gets the same result, in whatever order answers arrive.
            world.cx.note(Note::ReadTooLarge);
            self.forget(owner);
            return Progress::TooLarge(owner);
        }
        if query.wanted.is_empty() {
            self.queries.remove(&id);
            reading.queries.remove(&id);
            if !reading.queries.is_empty() {
                return Progress::Nothing;
            }
            let reads = self.owners.remove(&owner).map(|reading| reading.reads);
            return Progress::Read(owner, reads.unwrap_or_default());
        }
        let replicated = replicated(partition, world);
        for (to, asks) in asks {
            let epoch = world.marks.epoch;
            world.send(to, Msg::Get { query: id, partition, asks, replicated, epoch });
        }
        if is_lower {
            world.cx.note(Note::ReadLower);
            let asked = query.replicas.clone();
            for to in asked {
                query.send(id, to, None, replicated, world);
            }
        }
        Progress::Nothing
    }

    /// Handles the message that a replica cannot answer.
    pub(super) fn on_not_ready(
        &mut self,
        from: NodeId,
        id: u64,
        reason: Reason,
        world: &mut World<'_, '_>,
    ) -> Progress {
        let Some(query) = self.queries.get_mut(&id) else { return Progress::Nothing };
        match reason {
            Reason::Inactive | Reason::Busy | Reason::TooLarge => {
                let (now, lease) = (world.cx.now(), world.config.directory.lease);
                let since = self.suspects.insert(from, now);
                let was_fresh = since.is_none_or(|at| now.since(at) >= lease);
                query.is_declined = true;
                query.replicas.retain(|&asked| asked != from || !was_fresh);
                for wanted in query.wanted.values_mut() {
                    wanted.resolving = wanted.resolving.filter(|(_, by)| *by != from);
                }
                if was_fresh {
                    self.ask_enough(id, world);
                }
                Progress::Nothing
            }
            Reason::Collected => {
                let owner = query.owner;
                self.forget(owner);
                Progress::Collected(owner)
            }
        }
    }

    /// Cancels the reads of an owner.
    pub(super) fn forget(&mut self, owner: Owner) {
        let Some(reading) = self.owners.remove(&owner) else { return };
        for query in reading.queries {
            self.queries.remove(&query);
        }
    }

    /// Repeats questions whose answers are overdue, also to other replicas. A node that has lost
    /// its lease waits until it is back: other nodes compute the functors in the meantime, and if
    /// no node has a lease, none answers.
    pub(super) fn on_sweep(&mut self, world: &mut World<'_, '_>) {
        if !world.is_serving {
            return;
        }
        let now = world.cx.now();
        let Config { resend_after, directory, .. } = world.config;
        let is_due = |(_, query): &(&u64, &Query)| {
            // A replica that is joining or leaving does not complete that sooner than leases
            // expire.
            let least = if query.is_declined { directory.lease } else { Duration::ZERO };
            query.asked.is_due(least.max(*resend_after), now)
        };
        let due: Vec<u64> = self.queries.iter().filter(is_due).map(|(id, _)| *id).collect();
        for id in due {
            let Some(query) = self.queries.get_mut(&id) else { continue };
            world.cx.note(Note::Resent);
            query.asked = query.asked.again(now);
            let has_answered =
                |node: &NodeId| query.wanted.values().all(|wanted| wanted.said.contains_key(node));
            let silent = query.replicas.iter().copied().filter(|node| !has_answered(node));
            self.suspects.extend(silent.map(|node| (node, now)));
            let replicas = self.nearest.get(&query.partition).into_iter().flatten();
            let replicas: Vec<NodeId> =
                replicas.copied().filter(|&node| is_active(node, world)).collect();
            let replicated = replicated(query.partition, world);
            // If a replica does not compute a functor, another replica that has it may.
            let resolve = query.wanted.values().find_map(|wanted| wanted.resolving);
            for wanted in query.wanted.values_mut() {
                // The answers so far were not enough, and their consequences have not arrived.
                wanted.said.clear();
                wanted.resolving = None;
            }
            for &to in &replicas {
                query.send(id, to, resolve.map(|(ts, _)| ts), replicated, world);
            }
            query.replicas = replicas;
        }
    }
}

/// Inactive replicas may not answer, so questions to them would only add load to slow links.
fn is_active(node: NodeId, world: &World<'_, '_>) -> bool {
    world.members.active().any(|(server, _)| server == node)
}

/// The watermark below which one replica's answer suffices.
fn replicated(partition: PartitionId, world: &World<'_, '_>) -> Timestamp {
    world.marks.replicated(partition).min(world.marks.visible)
}

impl Query {
    fn send(
        &self,
        id: u64,
        to: NodeId,
        resolve: Option<Timestamp>,
        replicated: Timestamp,
        world: &mut World<'_, '_>,
    ) {
        let ask = |(key, wanted): (&Key, &Wanted)| Ask {
            key: key.clone(),
            below: wanted.below,
            resolve: resolve.or(wanted.resolving.map(|(ts, _)| ts)),
        };
        let asks = self.wanted.iter().map(ask).collect();
        let (partition, epoch) = (self.partition, world.marks.epoch);
        world.send(to, Msg::Get { query: id, partition, asks, replicated, epoch });
    }

    /// Asks a replica that has sent a part of its answer for the rest.
    fn send_rest(&self, id: u64, to: NodeId, world: &mut World<'_, '_>) {
        let is_untold = |(_, wanted): &(&Key, &Wanted)| {
            wanted.resolving.is_none() && !wanted.said.contains_key(&to)
        };
        let ask = |(key, wanted): (&Key, &Wanted)| {
            let (key, below, resolve) = (key.clone(), wanted.below, None);
            Ask { key, below, resolve }
        };
        let asks: Vec<Ask> = self.wanted.iter().filter(is_untold).map(ask).collect();
        if !asks.is_empty() {
            let (partition, epoch) = (self.partition, world.marks.epoch);
            let replicated = replicated(partition, world);
            world.send(to, Msg::Get { query: id, partition, asks, replicated, epoch });
        }
    }
}

/// The result of a functor for its reads, and the reads that are reported; together they have at
/// most this number of bytes.
pub(super) fn compute(functor: &Functor, reads: Reads, bytes_max: usize) -> (Output, Reads) {
    let output = functor.execute(&reads);
    let is_too_large = reads.size() + output.size() > bytes_max;
    if is_too_large { too_large() } else { (output, reads) }
}

/// The result of a functor whose reads are too large.
pub(super) fn too_large() -> (Output, Reads) {
    (Err(AbortReason::TooLarge), Reads::new())
}

/// The executions that run on this node.
#[derive(Debug, Default)]
pub(super) struct Executions {
    running: OrdMap<Timestamp, Arc<Functor>>,
}

impl Executions {
    /// Starts computing a functor, unless its execution is running.
    pub(super) fn begin(
        &mut self,
        ts: Timestamp,
        functor: &Arc<Functor>,
        reader: &mut Reader,
        world: &mut World<'_, '_>,
    ) -> Progress {
        if self.running.contains_key(&ts) {
            return Progress::Nothing;
        }
        self.running.insert(ts, functor.clone());
        reader.begin(Owner::Execution(ts), &functor.reads, ts, world)
    }

    /// Ends an execution: the functor has been computed, or is not needed any more.
    pub(super) fn end(&mut self, ts: Timestamp) -> Option<Arc<Functor>> {
        self.running.remove(&ts)
    }

    /// The number of executions.
    pub(super) fn len(&self) -> usize {
        self.running.len()
    }
}
