//! The coordinator of a node: S-phase, and the end of every transaction that it was given (§3.1,
//! §4.1).

use std::sync::Arc;

use orthodrome_core::Wire as _;
use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{NodeId, PartitionId, TxnId};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::time::{Time, Timestamp};
use orthodrome_core::txn::{Outcome, Reads};

use super::admission::Admission;
use super::message::{Functor, Msg, Output, Path, Reason, Refusal};
use super::recovery::partitions;
use super::server::{Local, World};
use super::tid::Tids;
use super::watermark::Members;
use super::{Config, Note};
use crate::waiting::RetryState;

/// What a coordinator keeps of a transaction beside its functor, in bytes: so many transactions fit
/// into [`super::Config::in_flight_bytes_max`] that a takeover can name all of them in one message.
pub const RECENT_BYTES: usize = 24;

/// A node's coordinator.
#[derive(Debug)]
pub(super) struct Coordinator {
    pub tids: Tids,
    admission: Admission,
    /// The life in which it creates version numbers.
    pub incarnation: u32,
    /// Transactions whose callers wait.
    flights: OrdMap<Timestamp, Flight>,
    /// The same, by name.
    names: OrdMap<TxnId, Timestamp>,
    /// When each flight has to be looked at again.
    due: OrdSet<(Time, Timestamp)>,
    /// Stored everywhere, or aborted; will be visible.
    stored: OrdSet<Timestamp>,
    /// What was begun above the Vwatermark: who else takes part in it matters if members change.
    recent: OrdMap<Timestamp, Recent>,
    /// How long all that is.
    recent_bytes: usize,
    /// Versions that replicas have not said they hold.
    owed: OrdMap<NodeId, OrdSet<Timestamp>>,
    /// When each straggler was last told so.
    told: OrdMap<NodeId, RetryState>,
    /// Aborted, and some replica still owes its promise.
    aborted: OrdSet<Timestamp>,
}

/// A transaction whose caller waits.
#[derive(Debug)]
struct Flight {
    functor: Arc<Functor>,
    gateway: NodeId,
    stage: Stage,
    /// Every replica of every partition that it writes.
    voters: Vec<Voter>,
    partitions: Vec<PartitionId>,
    is_finalizing: bool,
    path: Path,
    begun: Time,
    asked: RetryState,
}

/// What a replica has said of a transaction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Voter {
    node: NodeId,
    word: Word,
    /// On which of its disks that is.
    disk: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Word {
    Silent,
    Refused,
    Stored,
    Confirmed,
    Aborted,
}

/// How far a transaction has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// Being stored: the S-phase.
    Storing,
    /// Being aborted, because replicas refuse it.
    Aborting,
    /// Stored wherever it writes; waits to be visible.
    Stored,
    /// Being executed.
    Executing,
}

/// What is left of a transaction that is decided.
#[derive(Debug)]
struct Recent {
    voters: Vec<NodeId>,
    /// Those that have it, or have promised, and on which of their disks.
    acked: Vec<(NodeId, u32)>,
    bytes: usize,
}

impl Coordinator {
    pub(super) fn new(tids: Tids, incarnation: u32) -> Self {
        Self {
            tids,
            admission: Admission::new(),
            incarnation,
            flights: OrdMap::new(),
            names: OrdMap::new(),
            due: OrdSet::new(),
            stored: OrdSet::new(),
            recent: OrdMap::new(),
            recent_bytes: 0,
            owed: OrdMap::new(),
            told: OrdMap::new(),
            aborted: OrdSet::new(),
        }
    }

    /// The coordinator of the next life of this process, which has as much to do.
    pub(super) fn next(&mut self, tids: Tids, incarnation: u32) -> Self {
        let admission = std::mem::replace(&mut self.admission, Admission::new());
        Self { admission, ..Self::new(tids, incarnation) }
    }

    /// How many callers wait.
    pub(super) fn len(&self) -> usize {
        self.flights.len()
    }

    /// How many wait for a report to say more than that of `reported`.
    pub(super) fn waiting(&self, reported: Timestamp) -> usize {
        let is_stuck = self.tids.least_storing().is_some_and(|least| least <= reported);
        let waits = self.stored.last().is_some_and(|&last| last >= reported);
        if is_stuck || !waits { 0 } else { self.stored.len() }
    }

    /// The least version that is not executed yet.
    pub(super) fn least(&self) -> Option<Timestamp> {
        self.flights.keys().next().copied()
    }

    // The S-phase (§3.1, Alg. 1 l. 2–5; §4.1).

    /// A gateway wants a transaction run.
    pub(super) fn on_submit(
        &mut self,
        gateway: NodeId,
        functor: Arc<Functor>,
        world: &mut World<'_, '_>,
    ) {
        let txn = functor.txn;
        if self.names.contains_key(&txn) {
            world.cx.note(Note::RepeatedSubmit);
            return;
        }
        let last = world.marks.visible + world.config.lag_max;
        let lags = world.window.is_some_and(|window| window.clock > last);
        if world.is_pressed || (lags && !world.is_serving) {
            // It has more to do than it can, or does not know yet how far the Vwatermark is.
            world.send(gateway, Msg::Declined { txn, reason: Reason::Inactive });
            return;
        }
        let Config { in_flight_max, in_flight_bytes_max, .. } = world.config;
        let is_full =
            self.flights.len() >= *in_flight_max || self.recent_bytes >= *in_flight_bytes_max;
        let oldest = self.tids.least_storing().and_then(|ts| self.flights.get(&ts));
        let oldest = oldest.map(|flight| flight.begun);
        let (patience, now) = (world.config.storing_max, world.cx.now());
        let fits = self.admission.admits(self.flights.len(), oldest, patience, now);
        if lags || is_full || !fits {
            world.cx.note(Note::Shed);
            world.send(gateway, Msg::Declined { txn, reason: Reason::Busy });
            return;
        }
        // Without a lease somebody else may already decide in this node's name (V6).
        let begun = world.window.and_then(|window| {
            self.tids.raise(window.limit);
            self.tids.begin(window.clock)
        });
        let Some(ts) = begun else {
            world.send(gateway, Msg::Declined { txn, reason: Reason::Inactive });
            return;
        };
        let partitions = partitions(&functor, world.cluster);
        let nodes = replicas(world.cluster, &partitions);
        let is_read_only = functor.is_read_only();
        for &node in &nodes {
            self.owe(node, ts, world.members);
        }
        if !is_read_only {
            let bytes = RECENT_BYTES + functor.size();
            self.recent_bytes += bytes;
            self.recent.insert(ts, Recent { voters: nodes.clone(), acked: Vec::new(), bytes });
        }
        let voters =
            nodes.into_iter().map(|node| Voter { node, word: Word::Silent, disk: 0 }).collect();
        let asked = RetryState::new(world.cx.now());
        let path = if is_read_only {
            Path::ReadOnly
        } else if functor.is_write_only() {
            Path::WriteOnly
        } else {
            Path::Fast
        };
        let stage = if is_read_only { Stage::Stored } else { Stage::Storing };
        let flight = Flight {
            functor,
            gateway,
            stage,
            voters,
            partitions,
            is_finalizing: false,
            path,
            begun: asked.at,
            asked,
        };
        self.names.insert(txn, ts);
        if is_read_only {
            self.tids.stored(ts);
            self.stored.insert(ts);
            self.flights.insert(ts, flight);
            return;
        }
        self.due.insert((asked.at + world.config.resend_after, ts));
        if let Some(backup) = world.backup {
            let (incarnation, functor) = (self.incarnation, Some(flight.functor.clone()));
            world.send(backup, Msg::Intent { ts, incarnation, functor });
        }
        flight.send_write(ts, self.incarnation, world);
        self.flights.insert(ts, flight);
    }

    /// A replica has to say that it holds a version, if it takes part.
    fn owe(&mut self, node: NodeId, ts: Timestamp, members: &Members) {
        if members.active().any(|(active, _)| active == node) {
            self.owed.entry(node).or_default().insert(ts);
        }
    }

    /// A replica holds it, or promises never to: what it owed is paid.
    fn paid(&mut self, (node, disk): (NodeId, u32), ts: Timestamp) {
        if let Some(owed) = self.owed.get_mut(&node) {
            owed.remove(&ts);
        }
        if let Some(recent) = self.recent.get_mut(&ts)
            && !recent.acked.contains(&(node, disk))
        {
            recent.acked.push((node, disk));
        }
    }

    /// A replica has stored it.
    pub(super) fn on_written(
        &mut self,
        from: (NodeId, u32),
        ts: Timestamp,
        world: &mut World<'_, '_>,
    ) {
        if !is_present(from, world.members) {
            return;
        }
        if !self.aborted.contains(&ts) {
            // One that is aborted has to be paid for by a promise.
            self.paid(from, ts);
        }
        let Some(flight) = self.flights.get_mut(&ts) else { return };
        if flight.stage == Stage::Storing && flight.hear(from, Word::Stored) {
            self.advance(ts, world);
        }
    }

    /// A replica has marked it.
    pub(super) fn on_confirm(
        &mut self,
        from: (NodeId, u32),
        ts: Timestamp,
        is_held: bool,
        world: &mut World<'_, '_>,
    ) {
        if !is_present(from, world.members) {
            return;
        }
        if is_held && !self.aborted.contains(&ts) {
            self.paid(from, ts);
        }
        let Some(flight) = self.flights.get_mut(&ts) else { return };
        if flight.stage != Stage::Storing {
            return;
        }
        if !is_held {
            // Its Write was lost, or comes later.
            world.cx.note(Note::Resent);
            let (incarnation, functor) = (self.incarnation, flight.functor.clone());
            world.send(from.0, Msg::Write { ts, ballot: 0, incarnation, functor });
            return;
        }
        if flight.hear(from, Word::Confirmed) {
            self.advance(ts, world);
        }
    }

    /// A replica does not store it.
    pub(super) fn on_refused(
        &mut self,
        from: NodeId,
        ts: Timestamp,
        refusal: Refusal,
        world: &mut World<'_, '_>,
    ) {
        let Some(flight) = self.flights.get_mut(&ts) else { return };
        if flight.stage != Stage::Storing {
            return;
        }
        match refusal {
            // Nobody has been told anything, so one refusal is enough.
            Refusal::Known | Refusal::Final => {}
            Refusal::Ahead => {
                flight.hear((from, world.members.disk(from)), Word::Refused);
                let is_refused = |&partition: &PartitionId| {
                    let (refused, all) =
                        flight.count(world.cluster, partition, |word| word == Word::Refused);
                    refused > all / 2
                };
                if !flight.partitions.iter().any(is_refused) {
                    return;
                }
            }
            // Visible already, or taken over: others say so where it matters.
            Refusal::Below | Refusal::Outvoted => return,
        }
        world.cx.note(Note::AbortedStoring);
        flight.stage = Stage::Aborting;
        flight.asked = RetryState::new(world.cx.now());
        self.aborted.insert(ts);
        if let Some(backup) = world.backup {
            let (incarnation, functor) = (self.incarnation, None);
            world.send(backup, Msg::Intent { ts, incarnation, functor });
        }
        for voter in flight.voters.clone() {
            self.owe(voter.node, ts, world.members);
        }
        if let Some(recent) = self.recent.get_mut(&ts) {
            recent.acked.clear();
        }
        if let Some(flight) = self.flights.get(&ts) {
            flight.send_abort(ts, self.incarnation, world);
        }
    }

    /// A replica has promised never to accept it.
    pub(super) fn on_aborted(
        &mut self,
        from: (NodeId, u32),
        ts: Timestamp,
        world: &mut World<'_, '_>,
    ) {
        if !is_present(from, world.members) {
            return;
        }
        self.paid(from, ts);
        let Some(flight) = self.flights.get_mut(&ts) else { return };
        if flight.stage != Stage::Aborting {
            return;
        }
        flight.hear(from, Word::Aborted);
        let is_promised = |&partition: &PartitionId| {
            let (promised, all) =
                flight.count(world.cluster, partition, |word| word == Word::Aborted);
            promised > all / 2
        };
        if flight.partitions.iter().all(is_promised) {
            self.on_decided(ts, world);
        }
    }

    /// Where enough replicas have stored it, the next step begins; no time-out is awaited, so that
    /// both paths race (§4.1).
    fn advance(&mut self, ts: Timestamp, world: &mut World<'_, '_>) {
        let Some(flight) = self.flights.get_mut(&ts) else { return };
        let (mut is_fast, mut is_stored, mut has_majority) = (true, true, true);
        let mut is_any_stored = false;
        for &partition in &flight.partitions {
            let holds = |word| matches!(word, Word::Stored | Word::Confirmed);
            let (stored, all) = flight.count(world.cluster, partition, holds);
            let (confirmed, _) =
                flight.count(world.cluster, partition, |word| word == Word::Confirmed);
            let f = all / 2;
            let super_quorum = (3 * f).div_ceil(2) + 1;
            has_majority &= stored > f;
            is_any_stored |= stored > f;
            is_fast &= stored >= super_quorum;
            is_stored &= stored >= super_quorum || confirmed > f;
        }
        // The paper's way is to finalize each partition by itself.
        has_majority |= is_any_stored && world.config.mutations.finalized_is_committed();
        if has_majority && !std::mem::replace(&mut flight.is_finalizing, true) {
            for voter in &flight.voters {
                world.send(voter.node, Msg::Finalize { ts, ballot: 0 });
            }
        }
        if !is_stored {
            return;
        }
        if !is_fast && flight.path == Path::Fast {
            flight.path = Path::Slow;
        }
        flight.stage = Stage::Stored;
        self.on_decided(ts, world);
    }

    /// The S-phase is over: Svw may pass.
    fn on_decided(&mut self, ts: Timestamp, world: &mut World<'_, '_>) {
        self.tids.stored(ts);
        let Some(flight) = self.flights.get(&ts) else { return };
        match flight.stage {
            Stage::Aborting => {
                let (gateway, functor) = (flight.gateway, flight.functor.clone());
                self.remove(ts);
                // Another coordinator may have a copy, and that may commit.
                world.tell(Local::Inquire { gateway, functor });
            }
            Stage::Stored => {
                self.stored.insert(ts);
                self.on_visible(world);
            }
            Stage::Storing | Stage::Executing => unreachable!("{ts} is not decided yet"),
        }
    }

    fn remove(&mut self, ts: Timestamp) -> Option<Flight> {
        let flight = self.flights.remove(&ts)?;
        self.names.remove(&flight.functor.txn);
        self.stored.remove(&ts);
        self.admission.end();
        Some(flight)
    }

    // The E-phase (§3.1, Alg. 1 l. 12).

    /// The watermarks have moved: what is visible now is executed.
    pub(super) fn on_visible(&mut self, world: &mut World<'_, '_>) {
        while let Some(&ts) = self.stored.first()
            && ts < world.marks.visible
        {
            self.stored.pop_first();
            let Some(flight) = self.flights.get_mut(&ts) else { continue };
            flight.stage = Stage::Executing;
            let functor = flight.functor.clone();
            if functor.is_write_only() {
                // Its values are final from the start.
                let output = functor.execute(&Reads::new());
                self.answer(ts, &output, Some(Reads::new()), world);
            } else {
                world.tell(Local::Execute { ts, functor });
            }
        }
        let visible = world.marks.visible;
        while let Some(entry) = self.recent.first_entry()
            && *entry.key() < visible
        {
            self.recent_bytes -= entry.remove().bytes;
        }
    }

    /// Somebody has executed it; the first to say so is believed (V12).
    pub(super) fn on_executed(
        &mut self,
        ts: Timestamp,
        output: &Output,
        reads: &Reads,
        world: &mut World<'_, '_>,
    ) {
        if self.flights.get(&ts).is_some_and(|flight| flight.stage == Stage::Executing) {
            self.answer(ts, output, Some(reads.clone()), world);
        }
    }

    /// Others have executed it, and what it read is gone: its outcome is inquired.
    pub(super) fn on_collected(&mut self, ts: Timestamp, world: &mut World<'_, '_>) {
        if self.flights.get(&ts).is_some_and(|flight| flight.stage == Stage::Executing)
            && let Some(Flight { gateway, functor, .. }) = self.remove(ts)
        {
            world.tell(Local::Inquire { gateway, functor });
        }
    }

    fn answer(
        &mut self,
        ts: Timestamp,
        output: &Output,
        reads: Option<Reads>,
        world: &mut World<'_, '_>,
    ) {
        let Some(flight) = self.remove(ts) else { return };
        let outcome = match output {
            Ok(_) => Outcome::Committed(ts),
            Err(reason) => Outcome::Aborted(*reason),
        };
        let (txn, path) = (flight.functor.txn, flight.path);
        world.send(flight.gateway, Msg::Answer { txn, outcome, reads, path });
    }

    // Housekeeping.

    /// Says again what has not been answered. Once a version is visible, stragglers pull instead.
    pub(super) fn on_sweep(&mut self, world: &mut World<'_, '_>) {
        let now = world.cx.now();
        while let Some(&(at, ts)) = self.due.first()
            && at <= now
        {
            self.due.pop_first();
            let Some(flight) = self.flights.get_mut(&ts) else { continue };
            match flight.stage {
                Stage::Storing => {
                    flight.send_write(ts, self.incarnation, world);
                    if flight.is_finalizing {
                        for voter in flight.voters.iter().filter(|v| v.word == Word::Stored) {
                            world.send(voter.node, Msg::Finalize { ts, ballot: 0 });
                        }
                    }
                }
                Stage::Aborting => flight.send_abort(ts, self.incarnation, world),
                Stage::Stored | Stage::Executing => continue,
            }
            world.cx.note(Note::Resent);
            flight.asked = flight.asked.again(now);
            let again = now + flight.asked.timeout(world.config.resend_after);
            self.due.insert((again, ts));
        }
        self.tell_stragglers(world);
        let owed = &self.owed;
        self.aborted.retain(|ts| owed.values().any(|owed| owed.contains(ts)));
    }

    /// Tells replicas that owe visible versions which.
    fn tell_stragglers(&mut self, world: &mut World<'_, '_>) {
        let (now, visible) = (world.cx.now(), world.marks.visible);
        for (&node, owed) in &self.owed {
            let range = owed.range(..visible);
            let (Some(&from), Some(&to)) = (range.clone().next(), range.clone().next_back()) else {
                self.told.remove(&node);
                continue;
            };
            let told = self.told.entry(node).or_insert_with(|| RetryState::new(now));
            if told.is_due(world.config.resend_after, now) {
                *told = told.again(now);
                world.cx.note(Note::Straggler);
                world.send(node, Msg::Missing { from, to });
            }
        }
    }

    /// A replica has brought itself up to date.
    pub(super) fn on_have(&mut self, node: NodeId, from: Timestamp, to: Timestamp) {
        if let Some(owed) = self.owed.get_mut(&node) {
            let paid: Vec<Timestamp> = owed.range(from..=to).copied().collect();
            for ts in paid {
                owed.remove(&ts);
            }
        }
        self.told.remove(&node);
    }

    /// The members have changed: who is out owes nothing any more, who is new owes what is not
    /// visible yet. What a lost disk had acknowledged counts no more: its successor copies what the
    /// others hold at one moment, and others may have stored this only afterwards. That successor
    /// copies nothing before every server has reported in the epoch in which it joined, so what is
    /// decided before this node knows that epoch is among what it copies.
    pub(super) fn on_members(&mut self, members: &Members) {
        for flight in self.flights.values_mut() {
            for voter in &mut flight.voters {
                if voter.disk < members.disk(voter.node) {
                    voter.word = Word::Silent;
                }
            }
        }
        let active: OrdSet<NodeId> = members.active().map(|(node, _)| node).collect();
        self.owed.retain(|node, _| active.contains(node));
        for (&ts, recent) in &mut self.recent {
            recent.acked.retain(|&acked| is_present(acked, members));
            for &node in &recent.voters {
                let is_acked = recent.acked.iter().any(|(acked, _)| *acked == node);
                if active.contains(&node) && !is_acked {
                    self.owed.entry(node).or_default().insert(ts);
                }
            }
        }
    }

    /// Srw: of each partition, below which version everybody has what this server decided; those of
    /// which that is `svw` are left out.
    pub(super) fn srw(&self, svw: Timestamp, cluster: &Cluster) -> OrdMap<PartitionId, Timestamp> {
        let mut srw: OrdMap<PartitionId, Timestamp> = OrdMap::new();
        for (&node, owed) in &self.owed {
            let Some(&first) = owed.first() else { continue };
            if first >= svw {
                continue;
            }
            for placed in cluster.partitions().filter(|placed| placed.replicas.contains(&node)) {
                let held = srw.entry(placed.id).or_insert(first);
                *held = first.min(*held);
            }
        }
        srw
    }

    /// How many versions replicas owe.
    pub(super) fn owed(&self) -> usize {
        self.owed.values().map(OrdSet::len).sum()
    }

    pub(super) fn assert_invariants(&self) {
        let bytes = self.recent.values().map(|recent| recent.bytes).sum::<usize>();
        assert_eq!(self.recent_bytes, bytes, "bytes that are not visible yet");
        assert_eq!(self.names.len(), self.flights.len(), "a name without a transaction");
        for ts in &self.stored {
            assert!(
                self.flights.get(ts).is_some_and(|flight| flight.stage == Stage::Stored),
                "{ts} is not stored"
            );
        }
    }
}

impl Flight {
    /// A replica has spoken. True if that is news.
    fn hear(&mut self, (from, disk): (NodeId, u32), word: Word) -> bool {
        let Some(voter) = self.voters.iter_mut().find(|voter| voter.node == from) else {
            return false;
        };
        voter.disk = disk;
        // A copy of an earlier word that comes late takes nothing back.
        let is_news = match (voter.word, word) {
            (Word::Confirmed, Word::Stored) => false,
            (held, word) => held != word,
        };
        if is_news {
            voter.word = word;
        }
        is_news
    }

    /// How many replicas of a partition have said such a thing, and how many there are.
    fn count(
        &self,
        cluster: &Cluster,
        partition: PartitionId,
        is_counted: impl Fn(Word) -> bool,
    ) -> (usize, usize) {
        let replicas = cluster.partition(partition).map_or(&[][..], |placed| &placed.replicas);
        let counts = |node: &&NodeId| {
            self.voters.iter().any(|voter| voter.node == **node && is_counted(voter.word))
        };
        (replicas.iter().filter(counts).count(), replicas.len())
    }

    fn send_write(&self, ts: Timestamp, incarnation: u32, world: &mut World<'_, '_>) {
        // Where it was too far ahead it is less so now.
        let lacks = |voter: &&Voter| matches!(voter.word, Word::Silent | Word::Refused);
        for voter in self.voters.iter().filter(lacks) {
            let functor = self.functor.clone();
            world.send(voter.node, Msg::Write { ts, ballot: 0, incarnation, functor });
        }
    }

    fn send_abort(&self, ts: Timestamp, incarnation: u32, world: &mut World<'_, '_>) {
        for voter in self.voters.iter().filter(|voter| voter.word != Word::Aborted) {
            let functor = self.functor.clone();
            world.send(voter.node, Msg::Abort { ts, ballot: 0, incarnation, functor });
        }
    }
}

/// True if a server has not lost this disk, as far as is known.
fn is_present((node, disk): (NodeId, u32), members: &Members) -> bool {
    disk >= members.disk(node)
}

/// The servers that hold replicas of any of these.
pub(super) fn replicas(cluster: &Cluster, partitions: &[PartitionId]) -> Vec<NodeId> {
    let placed = partitions.iter().filter_map(|&partition| cluster.partition(partition));
    let mut nodes: Vec<NodeId> = placed.flat_map(|placed| placed.replicas.clone()).collect();
    nodes.sort_unstable();
    nodes.dedup();
    nodes
}
