//! The gateway: runs transactions for its callers, gives them timestamps, names replicas, and drives
//! them to their ends.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use orthodrome_core::Wire as _;
use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{ClientId, NodeId, PartitionId, TxnId};
use orthodrome_core::machine::{Claim, Cx, Gauge, Input, Leak, Machine, Setup, UNKNOWABLE};
use orthodrome_core::session::{highest, is_below};
use orthodrome_core::time::{Duration, Time, Timestamp, nanos};
use orthodrome_core::txn::{AbortReason, Decision, Key, Kind, Outcome, Read, Reads, Txn, Writes};

use super::drive::{Drive, Out, Progress, Seen, Stage};
use super::message::{Msg, Output, Record, Side, Text, merge_newest};
use super::naming::{ends as named_ends, name};
use super::pending::Maker;
use super::{Config, Geodesic, Note, Timer};
use crate::delays::{Delays, delay, difference, shifted};
use crate::functor::Functor;
use crate::gateway::{Participant, split};
use crate::portions::{Assembly, Portion};

/// The client side of Geodesic.
#[derive(Debug)]
pub struct Client {
    node: NodeId,
    /// Which start of this node it is, for ballots.
    incarnation: u64,
    cluster: Arc<Cluster>,
    config: Arc<Config>,
    open: BTreeMap<TxnId, Open>,
    /// Transactions that have not ended everywhere.
    drives: BTreeMap<TxnId, Driven>,
    /// Servers that did not answer, and when they were last asked whether they are there.
    suspects: BTreeMap<NodeId, Time>,
    /// When each server was last heard of.
    heard: BTreeMap<NodeId, Time>,
    /// How long it takes from here through h to the last named replica.
    delays: Delays<(NodeId, NodeId)>,
    maker: Maker,
    late: Lateness,
    /// What general transactions accessed that were decided on reads that were not current any more.
    /// Their next attempts get places with these keys before they read.
    keys: BTreeMap<(ClientId, u64), Declared>,
    /// Ended, and perhaps not known to the caller yet.
    over: BTreeMap<TxnId, Over>,
    /// Callers know the outcomes of everything below, as of then.
    acknowledged: BTreeMap<ClientId, (u64, Time)>,
    is_flushing: bool,
}

/// How well timestamps were predicted.
#[derive(Debug, Default)]
struct Lateness {
    decided: u64,
    /// The transaction came to a named replica after its timestamp.
    late: u64,
    /// A partition decided more than the timestamp, because of a closing.
    raised: u64,
}

/// A transaction that this gateway drives.
#[derive(Debug)]
struct Driven {
    drive: Drive,
    /// What its timestamp was reckoned from.
    sent: Timestamp,
    /// When its named replicas were asked.
    asked: Time,
}

/// Keys that a general transaction read, and those that it wrote.
#[derive(Debug)]
struct Declared {
    reads: Vec<Key>,
    writes: Vec<Key>,
}

/// A transaction that this gateway has done with.
#[derive(Debug)]
struct Over {
    participants: Vec<PartitionId>,
    since: Time,
    /// Enough replicas have applied it. If not, the replicas see to that.
    is_complete: bool,
}

/// A transaction whose caller waits.
#[derive(Debug)]
struct Open {
    txn: Txn,
    participants: BTreeMap<PartitionId, Participant>,
    reads: Reads,
    /// Of these keys its caller was told a guess.
    guessed: BTreeSet<Key>,
    /// How often its caller was told what it reads: which run of the attempt it is in.
    runs: u32,
    /// What its caller was told is not the newest any more. The caller has not decided yet.
    newer: Option<(Reads, BTreeSet<Key>)>,
    /// Of a general transaction: the keys of this round.
    round: Vec<Key>,
    phase: Phase,
    resent: u32,
    is_resolved: bool,
}

#[derive(Debug)]
enum Phase {
    /// Waiting for reads of these partitions.
    Reading(BTreeMap<PartitionId, Owing>),
    /// Its caller will read what it reads at its place, when its turn has come.
    Queued,
    /// The caller thinks.
    Deciding,
    /// It is driven to its end.
    Submitted,
    /// It has ended, by what its caller decided in this run; its timestamp has not passed everywhere.
    Waiting(Outcome, &'static str, u32),
    /// A read-only transaction reads at this time.
    Snapshotting { at: Timestamp, parts: BTreeMap<PartitionId, Snapshot>, is_refused: bool },
}

/// A partition that owes reads.
#[derive(Debug, Default)]
struct Owing {
    /// Time-outs so far.
    tried: usize,
    /// Replicas that could not answer since the last time-out.
    refused: BTreeSet<NodeId>,
}

/// A partition that is read at one time.
#[derive(Debug, Default)]
struct Snapshot {
    asked: BTreeSet<NodeId>,
    arriving: BTreeMap<NodeId, Assembly<Vec<(Key, Read)>>>,
    answers: BTreeMap<NodeId, Vec<(Key, Read)>>,
}

impl Machine<Geodesic> for Client {
    fn new(setup: Setup<Geodesic>, _recovered: Vec<Record>, cx: &mut Cx<'_, Geodesic>) -> Self {
        // A gateway keeps nothing: replicas recover what it began.
        Self {
            node: setup.node,
            incarnation: cx.rng().next_u64(),
            cluster: setup.cluster,
            config: setup.config,
            open: BTreeMap::new(),
            drives: BTreeMap::new(),
            suspects: BTreeMap::new(),
            heard: BTreeMap::new(),
            delays: Delays::default(),
            maker: Maker::new(setup.node),
            late: Lateness::default(),
            keys: BTreeMap::new(),
            over: BTreeMap::new(),
            acknowledged: BTreeMap::new(),
            is_flushing: false,
        }
    }

    fn step(&mut self, input: Input<Geodesic>, cx: &mut Cx<'_, Geodesic>) {
        match input {
            Input::Begin(txn) => self.on_begin(txn, cx),
            Input::Read { txn, keys } => self.on_read(txn, keys, cx),
            Input::Decide { txn, decision } => self.on_decide(txn, decision, cx),
            Input::Resolve { txn, reads, decision } => self.on_resolve(txn, reads, decision, cx),
            Input::Message { from, msg } => self.on_message(from, msg, cx),
            Input::Timer(Timer::Open(txn)) => self.on_open_timeout(txn, cx),
            Input::Timer(Timer::Drive(txn)) => self.on_drive_timeout(txn, cx),
            Input::Timer(Timer::Flush) => self.on_flush_timeout(cx),
            Input::Timer(Timer::Sweep(_) | Timer::Close(_))
            | Input::Durable(_)
            | Input::Admin(_) => unreachable!("a server's input at a client"),
        }
    }

    fn flush(&mut self, _cx: &mut Cx<'_, Geodesic>) {}

    fn leaks(&self) -> Vec<Leak> {
        vec![("open transactions", self.open.len()), ("transactions driven", self.drives.len())]
    }

    fn gauges(&self, _now: Time) -> Vec<Gauge> {
        let node = self.node;
        let gauge = |name, value: u64| {
            let value = i64::try_from(value).unwrap_or(i64::MAX);
            Gauge { name, node, value }
        };
        let Lateness { decided, late, raised } = self.late;
        vec![
            gauge("slots_decided", decided),
            gauge("slots_late", late),
            gauge("slots_raised", raised),
            gauge("servers_suspected", self.suspects.len() as u64),
        ]
    }

    fn assert_invariants(&self) {
        for (id, open) in &self.open {
            let is_driven = self.drives.contains_key(id);
            assert!(
                is_driven || !matches!(open.phase, Phase::Submitted),
                "{id} is driven by nobody"
            );
        }
    }
}

impl Client {
    fn on_begin(&mut self, txn: Txn, cx: &mut Cx<'_, Geodesic>) {
        let id = txn.id;
        if self.open.contains_key(&id) {
            // Begun here already: its answers will come.
            return;
        }
        if self.open.len() >= self.config.open_max {
            cx.finish(id, Outcome::Aborted(AbortReason::Overload), "shed");
            return;
        }
        self.acknowledged.insert(id.client, (txn.acknowledged_below, cx.now()));
        self.look_for_suspects(cx);
        let participants = split(&self.cluster, &txn.reads, &txn.writes);
        let (is_read_only, kind) = (txn.is_read_only(), txn.kind.clone());
        let reading = participants.iter().filter(|(_, part)| !part.reads.is_empty());
        let silent: BTreeMap<_, _> = reading.map(|(p, _)| (*p, Owing::default())).collect();
        let owing: Vec<PartitionId> = silent.keys().copied().collect();
        let open = Open {
            txn,
            participants,
            reads: Reads::new(),
            guessed: BTreeSet::new(),
            runs: 0,
            newer: None,
            round: Vec::new(),
            phase: Phase::Reading(silent),
            resent: 0,
            is_resolved: false,
        };
        self.open.insert(id, open);
        match kind {
            _ if is_read_only => self.snapshot(id, cx),
            Kind::Procedure(ops) => {
                let Some(open) = self.open.get(&id) else { return };
                let functor = Functor::clone(&Functor::procedure(&open.txn, ops));
                self.submit(id, functor, false, cx);
            }
            Kind::General => self.begin_general(id, cx),
            Kind::Interactive | Kind::ReadOnly | Kind::StaleReadOnly => {
                // Its place is agreed on while its caller reads and decides (D16).
                let Some(open) = self.open.get(&id) else { return };
                let functor = Functor::clone(&Functor::procedure(&open.txn, Vec::new()));
                self.submit(id, functor, true, cx);
                if owing.is_empty() {
                    self.on_all_read(id, cx);
                } else if id.attempt == 0 {
                    for partition in owing {
                        self.send_read(id, partition, cx);
                    }
                    cx.set_timer(Timer::Open(id), cx.now() + self.config.resend_after);
                } else if let Some(open) = self.open.get_mut(&id) {
                    // What it read ahead of its turn was stale: now it waits for its turn.
                    open.phase = Phase::Queued;
                }
            }
        }
    }

    // Servers that do not answer.

    /// Asks those that did not answer whether they are there, from time to time: no transaction has to
    /// find out.
    fn look_for_suspects(&mut self, cx: &mut Cx<'_, Geodesic>) {
        let now = cx.now();
        for (&node, asked) in &mut self.suspects {
            if now.since(*asked) >= self.config.ping_interval {
                *asked = now;
                cx.send(node, Msg::Ping);
            }
        }
    }

    fn suspect(&mut self, node: NodeId, cx: &mut Cx<'_, Geodesic>) {
        if let Entry::Vacant(suspect) = self.suspects.entry(node) {
            suspect.insert(cx.now());
            cx.note(Note::Suspected);
            cx.send(node, Msg::Ping);
        }
    }

    /// Suspects those of `nodes` that were not heard of since then.
    fn suspect_silent(&mut self, nodes: &[NodeId], since: Time, cx: &mut Cx<'_, Geodesic>) {
        for &node in nodes {
            if self.heard.get(&node).is_none_or(|at| *at < since) {
                self.suspect(node, cx);
            }
        }
    }

    /// The replicas of a partition, nearest first, those that did not answer last.
    fn nearest(&self, partition: PartitionId) -> Vec<NodeId> {
        let home = self.cluster.region_of(self.node);
        let placed = self.cluster.partition(partition);
        let mut replicas = placed.map_or_else(Vec::new, |placed| placed.replicas.clone());
        replicas.sort_by_key(|node| {
            let region = self.cluster.region_of(*node);
            let is_far = region != home;
            let rtt = self.cluster.topology.rtt(home, region);
            (self.suspects.contains_key(node), is_far, rtt, *node)
        });
        replicas
    }

    // Reading before the caller decides.

    /// From the nearest replica; from the next if that one does not answer.
    fn send_read(&self, id: TxnId, partition: PartitionId, cx: &mut Cx<'_, Geodesic>) {
        let Some(open) = self.open.get(&id) else { return };
        let Phase::Reading(silent) = &open.phase else { return };
        let Some(owing) = silent.get(&partition) else { return };
        let mut replicas = self.nearest(partition);
        replicas.retain(|node| !owing.refused.contains(node));
        let Some(at) = owing.tried.checked_rem(replicas.len()) else { return };
        let Some(participant) = open.participants.get(&partition) else { return };
        let Some(&to) = replicas.get(at) else { return };
        let text = self.drives.get(&id).and_then(|driven| driven.drive.text.as_ref());
        let at = text.map_or(Timestamp::MAX, |text| text.t);
        cx.send(to, Msg::Read { txn: id, partition, keys: participant.reads.clone(), at });
    }

    fn on_read_result(
        &mut self,
        from: NodeId,
        (id, partition): (TxnId, PartitionId),
        (reads, guessed): (Vec<(Key, Read)>, Vec<Key>),
        cx: &mut Cx<'_, Geodesic>,
    ) {
        let Some(open) = self.open.get_mut(&id) else { return };
        let Phase::Reading(silent) = &mut open.phase else { return };
        let Some(owing) = silent.get_mut(&partition) else { return };
        if is_below(&open.txn.floors, reads.iter().map(|(key, read)| (key, read))) {
            // This replica has not applied yet what the client knows of (R11); the next one may have.
            cx.note(Note::BehindClient);
            if owing.refused.insert(from) {
                self.send_read(id, partition, cx);
            }
            return;
        }
        silent.remove(&partition);
        open.reads.extend(reads);
        open.guessed.extend(guessed);
        if silent.is_empty() {
            self.on_all_read(id, cx);
        }
    }

    /// What an interactive transaction would read has changed, as far as h of a partition knows. If
    /// what its caller was told was older, or a guess, the caller decides again. What it reads at its
    /// place will be told in any case, so this is done a few times only.
    fn on_preview(
        &mut self,
        id: TxnId,
        (reads, guessed): (Vec<(Key, Read)>, Vec<Key>),
        cx: &mut Cx<'_, Geodesic>,
    ) {
        let Some(Driven { drive, .. }) = self.drives.get(&id) else { return };
        let Some(open) = self.open.get_mut(&id) else { return };
        let is_exact = drive.reads.is_some() || drive.is_aborting();
        let is_behind = is_below(&open.txn.floors, reads.iter().map(|(key, read)| (key, read)));
        if is_exact || is_behind || open.is_resolved || open.runs >= RUNS_MAX {
            return;
        }
        let told = || (open.reads.clone(), open.guessed.clone());
        let (mut newer, mut guesses) = open.newer.clone().unwrap_or_else(told);
        let mut is_changed = false;
        for (key, read) in reads {
            // Of keys that were not read yet the replica that reads them will tell.
            let Some(known) = newer.get_mut(&key) else { continue };
            let is_news = read.version > known.version || guesses.contains(&key);
            if *known == read || !is_news {
                continue;
            }
            is_changed = true;
            *known = read;
            if guessed.contains(&key) {
                guesses.insert(key);
            } else {
                guesses.remove(&key);
            }
        }
        if !is_changed {
            return;
        }
        match open.phase {
            Phase::Reading(_) => (open.reads, open.guessed) = (newer, guesses),
            Phase::Deciding => open.newer = Some((newer, guesses)),
            Phase::Submitted => {
                cx.note(Note::Repaired);
                (open.reads, open.guessed) = (newer, guesses);
                self.on_all_read(id, cx);
            }
            Phase::Queued | Phase::Waiting(..) | Phase::Snapshotting { .. } => {}
        }
    }

    /// The caller decides, for the first time or again.
    fn on_all_read(&mut self, id: TxnId, cx: &mut Cx<'_, Geodesic>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        open.phase = Phase::Deciding;
        open.newer = None;
        open.runs = open.runs.saturating_add(1);
        let reads = if matches!(open.txn.kind, Kind::General) {
            let told = |key: &Key| Some((key.clone(), open.reads.get(key)?.clone()));
            open.round.iter().filter_map(told).collect()
        } else {
            open.reads.clone()
        };
        cx.reads(id, reads);
        cx.set_timer(Timer::Open(id), cx.now() + self.config.think_max);
    }

    // General transactions.

    /// The first attempt reads nearby, round by round, gets its place when its caller has decided, and
    /// commits if its reads are true there. If they are not, the next attempt gets its place first, with
    /// the keys of the one before.
    fn begin_general(&mut self, id: TxnId, cx: &mut Cx<'_, Geodesic>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        open.round.clone_from(&open.txn.reads);
        let Some(Declared { reads, writes }) = self.keys.remove(&(id.client, id.counter)) else {
            self.next_round(id, cx);
            return;
        };
        cx.note(Note::PlaceFirst);
        open.participants = split(&self.cluster, &reads, &writes);
        let txn = Txn { reads, writes, ..open.txn.clone() };
        let functor = Functor::clone(&Functor::procedure(&txn, Vec::new()));
        open.phase = Phase::Queued;
        self.submit(id, functor, true, cx);
    }

    /// The caller of a general transaction wants to read more.
    fn on_read(&mut self, id: TxnId, keys: Vec<Key>, cx: &mut Cx<'_, Geodesic>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        if matches!((&open.phase, &open.txn.kind), (Phase::Deciding, Kind::General)) {
            open.round = keys;
            self.next_round(id, cx);
        }
    }

    /// Reads what has not been read yet. Values that were read do not change.
    fn next_round(&mut self, id: TxnId, cx: &mut Cx<'_, Geodesic>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        let unread = open.round.iter().filter(|key| !open.reads.contains_key(*key));
        let wanted = split(&self.cluster, unread, []);
        let owing: Vec<PartitionId> = wanted.keys().copied().collect();
        if owing.is_empty() {
            self.on_all_read(id, cx);
            return;
        }
        if let Some(Driven { drive, .. }) = self.drives.get(&id) {
            // It has its place, and these keys are none of it.
            let text = drive.text.clone();
            let mut declared = text.map_or_else(
                || Declared { reads: Vec::new(), writes: Vec::new() },
                |text| Declared {
                    reads: text.functor.reads.clone(),
                    writes: text.functor.writes.clone(),
                },
            );
            declared.reads.extend(open.round.iter().cloned());
            self.declare(id, declared);
            self.give_up(id, AbortReason::StaleRead, cx);
            return;
        }
        open.participants = wanted;
        open.phase = Phase::Reading(owing.iter().map(|at| (*at, Owing::default())).collect());
        for partition in owing {
            self.send_read(id, partition, cx);
        }
        cx.set_timer(Timer::Open(id), cx.now() + self.config.resend_after);
    }

    /// The next attempt of a general transaction gets a place with these keys.
    fn declare(&mut self, id: TxnId, Declared { mut reads, mut writes }: Declared) {
        for keys in [&mut reads, &mut writes] {
            keys.sort_unstable();
            keys.dedup();
        }
        let bytes: usize = reads.iter().chain(&writes).map(Key::size).sum();
        if bytes == 0 || bytes > DECLARED_BYTES_MAX {
            return;
        }
        while self.keys.len() >= DECLARED_MAX {
            self.keys.pop_first();
        }
        self.keys.insert((id.client, id.counter), Declared { reads, writes });
    }

    /// The caller of a general transaction has decided.
    fn commit_general(&mut self, id: TxnId, writes: Writes, cx: &mut Cx<'_, Geodesic>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        if let Some(Driven { drive, .. }) = self.drives.get(&id) {
            let Some(text) = drive.text.clone() else { return };
            let declared = &text.functor.writes;
            if writes.keys().all(|key| declared.binary_search(key).is_ok()) {
                self.offer(id, Some(writes), cx);
                return;
            }
            let all = declared.iter().chain(writes.keys()).cloned().collect();
            self.declare(id, Declared { reads: text.functor.reads.clone(), writes: all });
            self.give_up(id, AbortReason::StaleRead, cx);
            return;
        }
        cx.cancel_timer(Timer::Open(id));
        let functor = Functor::clone(&Functor::validation(&open.txn, &open.reads, writes));
        open.participants = split(&self.cluster, &functor.reads, &functor.writes);
        self.submit(id, functor, false, cx);
    }

    /// The caller of an interactive transaction has decided.
    fn on_decide(&mut self, id: TxnId, decision: Decision, cx: &mut Cx<'_, Geodesic>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        let is_asked = matches!(open.phase, Phase::Deciding);
        let is_reading = matches!(open.phase, Phase::Reading(_) | Phase::Queued);
        match decision {
            Decision::Commit(writes) if is_asked && matches!(open.txn.kind, Kind::General) => {
                self.commit_general(id, writes, cx);
            }
            Decision::Commit(writes) if is_asked => {
                if !open.txn.declares(&writes) {
                    self.give_up(id, AbortReason::Client, cx);
                    return;
                }
                if let Some((reads, guessed)) = open.newer.take() {
                    cx.note(Note::Repaired);
                    (open.reads, open.guessed) = (reads, guessed);
                    self.on_all_read(id, cx);
                    return;
                }
                self.offer(id, Some(writes), cx);
            }
            Decision::Abort if is_asked || is_reading => {
                if matches!(open.txn.kind, Kind::General) {
                    // Its caller may have given it up because a nearby replica is behind what it knows.
                    let reads = open.reads.keys().chain(&open.round).cloned().collect();
                    self.declare(id, Declared { reads, writes: open_writes(&self.drives, id) });
                }
                self.give_up(id, AbortReason::Client, cx);
            }
            Decision::Commit(_) | Decision::Abort => {}
        }
    }

    /// What the caller has decided goes to the register.
    fn offer(&mut self, id: TxnId, writes: Option<Writes>, cx: &mut Cx<'_, Geodesic>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        let Some(Driven { drive, .. }) = self.drives.get_mut(&id) else {
            self.finish(id, (Outcome::Committed(cx.clock().now), "empty", 0), cx);
            return;
        };
        open.phase = Phase::Submitted;
        cx.cancel_timer(Timer::Open(id));
        let mut out = Out::new();
        let of = (open.runs, &open.reads, &open.guessed);
        let progress = drive.offer(of, writes, &self.cluster, (&self.config, &mut out));
        self.send(out, cx);
        self.on_progress(id, progress, cx);
    }

    /// Aborts an interactive transaction. If its caller has decided before, somebody who recovers may
    /// find that decision: then the abort has to be stored first.
    fn give_up(&mut self, id: TxnId, reason: AbortReason, cx: &mut Cx<'_, Geodesic>) {
        let Some(Driven { drive, .. }) = self.drives.get_mut(&id) else {
            self.finish(id, (Outcome::Aborted(reason), "abort", 0), cx);
            return;
        };
        (drive.path, drive.reason) = ("abort", reason);
        if drive.has_offer() {
            self.offer(id, None, cx);
            return;
        }
        let mut out = Out::new();
        let progress = drive.end(Arc::new(Output::abort(reason)), &mut out);
        self.send(out, cx);
        self.on_progress(id, progress, cx);
    }

    // Ordering.

    /// Step 1: names replicas, chooses the timestamp, and gives the transaction to h of each partition.
    /// With a register its caller decides what it writes; otherwise the functor says.
    fn submit(
        &mut self,
        id: TxnId,
        functor: Functor,
        has_register: bool,
        cx: &mut Cx<'_, Geodesic>,
    ) {
        let Some(open) = self.open.get_mut(&id) else { return };
        let partitions: Vec<PartitionId> = open.participants.keys().copied().collect();
        if partitions.is_empty() {
            if !has_register {
                self.finish(id, (Outcome::Committed(cx.clock().now), "empty", 0), cx);
            }
            return;
        }
        if !has_register {
            open.phase = Phase::Submitted;
        }
        let clock = cx.clock();
        let floors = highest(&open.txn.floors, open.txn.floors.keys());
        let mut t = clock.now.max(floors.next());
        let priority = open.txn.priority;
        let (mut sides, mut are_enough, mut round_trip) = (Vec::new(), true, Duration::ZERO);
        let mut nearest: Option<(Duration, PartitionId)> = None;
        for partition in partitions {
            let is_well = |node: NodeId| !self.suspects.contains_key(&node);
            let path = name(&self.cluster, self.node, partition, is_well);
            are_enough &= path.are_enough;
            round_trip = round_trip.max(path.round_trip);
            let here = (path.majority, partition);
            nearest = Some(nearest.map_or(here, |nearest| nearest.min(here)));
            let is_direct = path.direct.is_some() && self.config.direct;
            if let Some((all, furthest)) = path.direct.filter(|_| is_direct) {
                for to in all {
                    let to = Some((to, to));
                    t = t.max(shifted(clock.now, self.predict(to, furthest / 2, cx.now())));
                }
            } else {
                let ends = named_ends(&path.named);
                t = t.max(shifted(clock.now, self.predict(ends, path.one_way, cx.now())));
            }
            sides.push(Side { partition, named: path.named, is_direct });
        }
        let t = self.maker.at_least(t);
        self.maker.forget(clock.now - MAKER_KEEPS);
        let register = nearest.map(|(_, partition)| partition).filter(|_| has_register);
        let ahead = Duration::from_nanos(t.0.saturating_sub(clock.now.0));
        let text = Arc::new(Text { functor, priority, gateway: self.node, t, sides, register });
        let mut drive = Drive::new(&self.cluster, id, Some(text), []);
        drive.expect_decision();
        let mut out = Out::new();
        if are_enough {
            drive.begin(&mut out);
        } else {
            // Too few replicas are there for ballot 0.
            cx.note(Note::TooFewForBallotZero);
            drive.recover((self.node, self.incarnation), &mut out);
        }
        let (sent, asked) = (clock.now, cx.now());
        self.drives.insert(id, Driven { drive, sent, asked });
        self.send(out, cx);
        let patience = ahead + round_trip * 3 / 2 + clock.error * 2 + self.config.slack;
        cx.set_timer(Timer::Drive(id), cx.now() + patience);
    }

    /// How long it takes from here through one replica to another; in direct mode both are the same.
    fn predict(&mut self, ends: Option<(NodeId, NodeId)>, one_way: Duration, now: Time) -> i64 {
        let Config { delay_window, delay_refresh, .. } = *self.config;
        let known =
            ends.and_then(|ends| self.delays.estimate(ends, delay_window, delay_refresh, now));
        // More than a clock may be ahead is no delay.
        let most = delay(self.config.clock_ahead_max / 2);
        known.unwrap_or_else(|| delay(one_way)).min(most)
    }

    fn send(&self, out: Out, cx: &mut Cx<'_, Geodesic>) {
        for (to, msg) in out {
            cx.send(to, msg);
        }
    }

    /// Step 4 has come to an end at one partition.
    fn on_decided(
        &mut self,
        (id, partition): (TxnId, PartitionId),
        (at, arrived): (Timestamp, Timestamp),
        cx: &mut Cx<'_, Geodesic>,
    ) {
        let Some(Driven { drive, sent, .. }) = self.drives.get_mut(&id) else { return };
        if let Some(text) = &drive.text {
            self.late.decided += 1;
            self.late.late += u64::from(arrived > text.t);
            self.late.raised += u64::from(at > text.t);
            let named = text.named(partition);
            if let (Some(&h), Some(&last)) = (named.first(), named.last()) {
                let taken = difference(arrived, *sent);
                self.delays.record((h, last), taken, self.config.delay_window, cx.now());
            }
        }
        let mut out = Out::new();
        let progress = drive.on_decided(partition, at, (&self.config, &mut out));
        self.send(out, cx);
        self.on_progress(id, progress, cx);
    }

    /// In direct mode a replica has stamped.
    fn on_stamped(
        &mut self,
        from: NodeId,
        (id, partition): (TxnId, PartitionId),
        (stamp, arrived): (Timestamp, Timestamp),
        cx: &mut Cx<'_, Geodesic>,
    ) {
        let Some(Driven { drive, sent, .. }) = self.drives.get_mut(&id) else { return };
        let taken = difference(arrived, *sent);
        self.delays.record((from, from), taken, self.config.delay_window, cx.now());
        let mut out = Out::new();
        let progress = drive.on_stamped(from, (partition, stamp), (&self.config, &mut out));
        self.send(out, cx);
        self.on_progress(id, progress, cx);
    }

    /// An answer to the driver of a transaction.
    fn on_answer(&mut self, from: NodeId, id: TxnId, msg: Msg, cx: &mut Cx<'_, Geodesic>) {
        let Some(Driven { drive, .. }) = self.drives.get_mut(&id) else { return };
        let mut out = Out::new();
        let config = &*self.config;
        let progress = match msg {
            Msg::Observed { partition, at, portion, reads, open, .. } => {
                let seen = (portion, Seen { reads, open });
                drive.on_observed(from, (partition, at), seen, (config, &mut out))
            }
            Msg::Cleared { partition, at, of, reads, .. } => {
                drive.on_cleared((partition, at), (of, reads), (config, &mut out))
            }
            Msg::Promised { partition, ballot, answer, .. } => {
                let at = (partition, ballot);
                drive.on_promised(from, at, *answer, &self.cluster, (config, &mut out))
            }
            Msg::Accepted { partition, ballot, answer, .. } => {
                drive.on_accepted(from, (partition, ballot), &answer, (config, &mut out))
            }
            Msg::Stored { partition, ballot, attempt, answer, .. } => {
                let of = (partition, ballot, attempt);
                drive.on_stored(from, of, &answer, (config, &mut out))
            }
            Msg::Applied { partition, .. } => drive.on_applied(from, partition),
            Msg::Begin { .. }
            | Msg::Forward { .. }
            | Msg::Ack { .. }
            | Msg::Settle { .. }
            | Msg::Settled { .. }
            | Msg::Decided { .. }
            | Msg::Direct { .. }
            | Msg::Stamped { .. }
            | Msg::Guess { .. }
            | Msg::Preview { .. }
            | Msg::Store { .. }
            | Msg::Commit { .. }
            | Msg::Apply { .. }
            | Msg::Forget { .. }
            | Msg::Fetch { .. }
            | Msg::Fetched { .. }
            | Msg::Recover { .. }
            | Msg::Propose { .. }
            | Msg::Read { .. }
            | Msg::ReadResult { .. }
            | Msg::ReadOnly { .. }
            | Msg::ReadOnlyResult { .. }
            | Msg::Gossip { .. }
            | Msg::Inquire { .. }
            | Msg::Driving { .. }
            | Msg::Ping
            | Msg::Pong => unreachable!("no answer to the driver of {id}"),
        };
        self.send(out, cx);
        self.on_progress(id, progress, cx);
    }

    fn on_progress(&mut self, id: TxnId, progress: Progress, cx: &mut Cx<'_, Geodesic>) {
        let Some(Driven { drive, .. }) = self.drives.get_mut(&id) else { return };
        match progress {
            Progress::Nothing => {
                if let Stage::Observing(_) = drive.stage
                    && drive.times == 0
                {
                    // It waits for predecessors: for longer than for answers.
                    cx.set_timer(Timer::Drive(id), cx.now() + self.config.resend_after);
                }
            }
            Progress::Exact => {
                let reads = drive.reads.clone().unwrap_or_default();
                cx.set_timer(Timer::Drive(id), cx.now() + self.config.resend_after);
                let Some(open) = self.open.get_mut(&id) else { return };
                if matches!(open.phase, Phase::Reading(_) | Phase::Queued) {
                    (open.reads, open.guessed) = (reads, BTreeSet::new());
                    if matches!(open.txn.kind, Kind::General) {
                        self.next_round(id, cx);
                    } else {
                        self.on_all_read(id, cx);
                    }
                }
            }
            Progress::Stale => {
                // The transaction keeps its place, and its caller decides again.
                let exact = drive.reads.clone().unwrap_or_default();
                let Some(open) = self.open.get_mut(&id) else { return };
                if matches!(open.phase, Phase::Submitted) && !open.is_resolved {
                    cx.note(Note::Stale);
                    (open.reads, open.guessed) = (exact, BTreeSet::new());
                    self.on_all_read(id, cx);
                }
            }
            Progress::Preempted => {
                // Whoever recovers should have the time to finish; then this node does.
                cx.note(Note::Preempted);
                let pause = self.config.resend_after;
                let jitter = cx.rng().below(1 + nanos(pause) / 2);
                let at = cx.now() + pause + Duration::from_nanos(jitter);
                cx.set_timer(Timer::Drive(id), at);
            }
            Progress::Ended(output) => {
                cx.claim(Claim::Decided { txn: id, outcome: output.outcome });
                let (path, reads) = (drive.path, drive.reads.take());
                cx.set_timer(Timer::Drive(id), cx.now() + self.config.resend_after);
                self.on_ended(id, (output.outcome, output.run), (reads, path), cx);
            }
            Progress::Complete => {
                cx.cancel_timer(Timer::Drive(id));
                self.leave(id, true, cx);
            }
            Progress::Forgotten => {
                cx.note(Note::Forgotten);
                cx.cancel_timer(Timer::Drive(id));
                self.drives.remove(&id);
                self.finish(id, (Outcome::Unknown, UNKNOWABLE, 0), cx);
            }
        }
    }

    /// This gateway has done its part; what remains is to say when the caller knows.
    fn leave(&mut self, id: TxnId, is_complete: bool, cx: &mut Cx<'_, Geodesic>) {
        let Some(Driven { drive, .. }) = self.drives.remove(&id) else { return };
        let (participants, since) = (drive.participants(), cx.now());
        self.over.insert(id, Over { participants, since, is_complete });
        if !std::mem::replace(&mut self.is_flushing, true) {
            cx.set_timer(Timer::Flush, cx.now() + self.config.flush_interval);
        }
    }

    /// Nothing came for a while from some of those who were asked.
    fn on_drive_timeout(&mut self, id: TxnId, cx: &mut Cx<'_, Geodesic>) {
        let Some(Driven { drive, asked, .. }) = self.drives.get_mut(&id) else { return };
        let patience = self.config.spread_tries;
        if matches!(drive.stage, Stage::Ending(_)) && drive.times >= patience * 2 {
            // The replicas see to it that everybody hears of it.
            self.leave(id, false, cx);
            return;
        }
        cx.note(Note::Resent);
        let (since, silent) = (*asked, drive.silent());
        *asked = cx.now();
        let mut out = Out::new();
        let progress = drive.on_timeout((self.node, self.incarnation), patience, &mut out);
        let pause = self.config.resend_after * (1 << drive.times.min(3));
        let jitter = cx.rng().below(1 + nanos(pause) / 4);
        cx.set_timer(Timer::Drive(id), cx.now() + pause + Duration::from_nanos(jitter));
        self.suspect_silent(&silent, since, cx);
        self.send(out, cx);
        self.on_progress(id, progress, cx);
    }

    /// It has ended. A commit is told once its timestamp has passed on every clock (D13).
    fn on_ended(
        &mut self,
        id: TxnId,
        (outcome, run): (Outcome, u32),
        (reads, path): (Option<Reads>, &'static str),
        cx: &mut Cx<'_, Geodesic>,
    ) {
        let Some(open) = self.open.get(&id) else { return };
        let is_stale = outcome == Outcome::Aborted(AbortReason::StaleRead);
        if is_stale
            && matches!(open.txn.kind, Kind::General)
            && !self.keys.contains_key(&(id.client, id.counter))
        {
            let text = self.drives.get(&id).and_then(|driven| driven.drive.text.clone());
            if let Some(text) = text {
                let (reads, writes) = (text.functor.reads.clone(), text.functor.writes.clone());
                self.declare(id, Declared { reads, writes });
            }
        }
        let Some(open) = self.open.get_mut(&id) else { return };
        let is_procedure = matches!(open.txn.kind, Kind::Procedure(_));
        let mut outcome = outcome;
        if is_procedure && matches!(outcome, Outcome::Committed(_)) && !open.is_resolved {
            match reads {
                Some(reads) => open.reads = reads,
                // Somebody else computed it, and what it read is gone; the caller may ask again.
                None => outcome = Outcome::Unknown,
            }
        }
        open.phase = Phase::Waiting(outcome, path, run);
        self.tell(id, cx);
    }

    fn tell(&mut self, id: TxnId, cx: &mut Cx<'_, Geodesic>) {
        let Some(open) = self.open.get(&id) else { return };
        let Phase::Waiting(outcome, path, run) = open.phase else { return };
        // A read may be placed anywhere above the newest version that it returns.
        let newest = || open.reads.values().map(|read| read.version.timestamp).max();
        let placed = match outcome {
            Outcome::Committed(_) if open.txn.is_read_only() => newest(),
            Outcome::Committed(at) => Some(at),
            Outcome::Aborted(_) | Outcome::Unknown => None,
        };
        if let Some(placed) = placed
            && !self.config.mutations.no_clock_wait()
            && !cx.clock().has_passed_everywhere(placed)
        {
            cx.note(Note::ClockWait);
            let clock = cx.clock();
            let missing = nanos(clock.error) * 2 + placed.0 - clock.now.0.min(placed.0);
            let at = cx.now() + Duration::from_nanos(missing.saturating_add(1));
            cx.set_timer(Timer::Open(id), at);
            return;
        }
        self.finish(id, (outcome, path, run), cx);
    }

    fn finish(
        &mut self,
        id: TxnId,
        (outcome, path, run): (Outcome, &'static str, u32),
        cx: &mut Cx<'_, Geodesic>,
    ) {
        let Some(open) = self.open.remove(&id) else { return };
        cx.cancel_timer(Timer::Open(id));
        let is_open = matches!(open.txn.kind, Kind::Interactive | Kind::General);
        let is_told_reads = is_open || open.is_resolved;
        if matches!(outcome, Outcome::Committed(_)) && !is_told_reads {
            cx.reads(id, open.reads);
        }
        cx.finish_run(id, outcome, path, run);
    }

    /// A caller lost track of a transaction that it began here or elsewhere.
    fn on_resolve(
        &mut self,
        txn: Txn,
        reads: Reads,
        decision: Option<Decision>,
        cx: &mut Cx<'_, Geodesic>,
    ) {
        let id = txn.id;
        if self.open.contains_key(&id) {
            return;
        }
        if txn.is_read_only() {
            // It changes nothing, so it can simply be read again.
            self.on_begin(txn, cx);
            return;
        }
        cx.note(Note::Resolved);
        self.acknowledged.insert(id.client, (txn.acknowledged_below, cx.now()));
        let keys = txn.reads.iter().chain(&txn.writes);
        let mut parts: BTreeSet<PartitionId> =
            keys.map(|key| self.cluster.partition_of(key)).collect();
        if let (Kind::General, Some(Decision::Commit(writes))) = (&txn.kind, &decision) {
            let keys = reads.keys().chain(writes.keys());
            parts = keys.map(|key| self.cluster.partition_of(key)).collect();
        }
        match (&decision, &txn.kind) {
            (Some(Decision::Commit(_)), _) | (_, Kind::Procedure(_)) => {}
            // Nothing came into its register, so nobody can commit it. Replicas bring it to its end.
            (Some(Decision::Abort) | None, _) => {
                cx.finish(id, Outcome::Aborted(AbortReason::Client), "recovered");
                return;
            }
        }
        if parts.is_empty() {
            cx.finish(id, Outcome::Committed(cx.clock().now), "empty");
            return;
        }
        let (participants, phase) = (BTreeMap::new(), Phase::Submitted);
        let open = Open {
            txn,
            participants,
            reads,
            guessed: BTreeSet::new(),
            runs: 0,
            newer: None,
            round: Vec::new(),
            phase,
            resent: 0,
            is_resolved: true,
        };
        self.open.insert(id, open);
        if let Some(Driven { drive, .. }) = self.drives.get(&id) {
            // It is under way here, or has just ended.
            if let Stage::Ending(output) = &drive.stage {
                self.on_ended(id, (output.outcome, output.run), (None, "recovered"), cx);
            }
            return;
        }
        let mut drive = Drive::new(&self.cluster, id, None, parts);
        let mut out = Out::new();
        drive.recover((self.node, self.incarnation), &mut out);
        let (sent, asked) = (cx.clock().now, cx.now());
        self.drives.insert(id, Driven { drive, sent, asked });
        self.send(out, cx);
        cx.set_timer(Timer::Drive(id), cx.now() + self.config.resend_after);
    }

    // Reading at one timestamp.

    /// Reads at this gateway's own time from f + 1 replicas (D14).
    fn snapshot(&mut self, id: TxnId, cx: &mut Cx<'_, Geodesic>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        let floors = highest(&open.txn.floors, open.txn.floors.keys());
        let at = cx.clock().now.max(floors);
        let reading = open.participants.iter().filter(|(_, part)| !part.reads.is_empty());
        let parts = reading.map(|(partition, _)| (*partition, Snapshot::default())).collect();
        open.phase = Phase::Snapshotting { at, parts, is_refused: false };
        self.ask_snapshot(id, false, cx);
        cx.set_timer(Timer::Open(id), cx.now() + self.config.resend_after);
        self.on_snapshot_complete(id, cx);
    }

    /// Asks f + 1 replicas of each partition that has not answered, or all.
    fn ask_snapshot(&mut self, id: TxnId, are_all: bool, cx: &mut Cx<'_, Geodesic>) {
        let Some(open) = self.open.get(&id) else { return };
        let Phase::Snapshotting { parts, .. } = &open.phase else { return };
        let wanted: Vec<PartitionId> = parts.keys().copied().collect();
        let nearest: BTreeMap<PartitionId, Vec<NodeId>> =
            wanted.into_iter().map(|partition| (partition, self.nearest(partition))).collect();
        let Some(open) = self.open.get_mut(&id) else { return };
        let Phase::Snapshotting { at, parts, .. } = &mut open.phase else { return };
        for (&partition, part) in parts {
            let Some(participant) = open.participants.get(&partition) else { continue };
            let Some(replicas) = nearest.get(&partition) else { continue };
            let majority = replicas.len() / 2 + 1;
            if part.answers.len() >= majority {
                continue;
            }
            let many = if are_all { replicas.len() } else { majority };
            for &to in replicas.iter().take(many) {
                if !part.answers.contains_key(&to) {
                    part.asked.insert(to);
                    let (keys, at) = (participant.reads.clone(), *at);
                    cx.send(to, Msg::ReadOnly { txn: id, partition, keys, at });
                }
            }
        }
    }

    fn on_read_only_result(
        &mut self,
        from: NodeId,
        (id, partition, then): (TxnId, PartitionId, Timestamp),
        portion: Portion,
        reads: Option<Vec<(Key, Read)>>,
        cx: &mut Cx<'_, Geodesic>,
    ) {
        let Some(open) = self.open.get_mut(&id) else { return };
        let Phase::Snapshotting { at, parts, is_refused } = &mut open.phase else { return };
        if then != *at {
            // An answer to an earlier question of this transaction, perhaps before a restart.
            return;
        }
        let Some(part) = parts.get_mut(&partition) else { return };
        let Some(reads) = reads else {
            // It waited for so long that this time is gone, or the clocks are too far apart.
            if !std::mem::replace(is_refused, true) {
                let at = cx.now() + self.config.resend_after / 4;
                cx.set_timer(Timer::Open(id), at);
            }
            return;
        };
        if part.answers.contains_key(&from) {
            return;
        }
        if let Some(whole) = part.arriving.entry(from).or_default().add(portion, reads) {
            part.answers.insert(from, whole.concat());
            part.arriving.remove(&from);
            self.on_snapshot_complete(id, cx);
        }
    }

    fn on_snapshot_complete(&mut self, id: TxnId, cx: &mut Cx<'_, Geodesic>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        let Phase::Snapshotting { at, parts, .. } = &open.phase else { return };
        let mut reads = Reads::new();
        for (&partition, part) in parts {
            let placed = self.cluster.partition(partition);
            let majority = placed.map_or(0, |placed| placed.replicas.len()) / 2 + 1;
            let enough = if self.config.mutations.one_report() { 1 } else { majority };
            if part.answers.len() < enough {
                return;
            }
            for answer in part.answers.values() {
                merge_newest(&mut reads, answer.clone());
            }
        }
        let at = *at;
        let bytes: usize = reads.iter().map(|(key, read)| key.size() + read.size()).sum();
        open.reads = reads;
        let result = match &open.txn.kind {
            _ if bytes > self.config.read_bytes_max => Err(AbortReason::TooLarge),
            Kind::Procedure(ops) => Txn::execute(ops, &open.reads).map(drop),
            Kind::Interactive | Kind::General | Kind::ReadOnly | Kind::StaleReadOnly => Ok(()),
        };
        let outcome = match result {
            Ok(()) => Outcome::Committed(at),
            Err(reason) => Outcome::Aborted(reason),
        };
        open.phase = Phase::Waiting(outcome, "read-only", 0);
        self.tell(id, cx);
    }

    /// Nobody answered for a while, or a timestamp has passed.
    fn on_open_timeout(&mut self, id: TxnId, cx: &mut Cx<'_, Geodesic>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        open.resent += 1;
        let resent = open.resent;
        let pause = self.config.resend_after * (1 << resent.min(3));
        let since = Time(cx.now().0.saturating_sub(nanos(self.config.resend_after)));
        match &mut open.phase {
            Phase::Waiting(..) => self.tell(id, cx),
            Phase::Reading(silent) => {
                cx.note(Note::Resent);
                for owing in silent.values_mut() {
                    owing.tried += 1;
                    owing.refused.clear();
                }
                let owing: Vec<PartitionId> = silent.keys().copied().collect();
                for &partition in &owing {
                    if let Some(&first) = self.nearest(partition).first() {
                        self.suspect_silent(&[first], since, cx);
                    }
                    self.send_read(id, partition, cx);
                }
                cx.set_timer(Timer::Open(id), cx.now() + pause);
            }
            Phase::Snapshotting { is_refused: true, .. } => {
                if resent > REFUSALS {
                    let outcome = Outcome::Aborted(AbortReason::Overload);
                    self.finish(id, (outcome, "read-only", 0), cx);
                } else {
                    self.snapshot(id, cx);
                }
            }
            Phase::Snapshotting { parts, .. } => {
                cx.note(Note::Resent);
                let silent = |part: &Snapshot| {
                    let answered = |node: &&NodeId| !part.answers.contains_key(*node);
                    part.asked.iter().filter(answered).copied().collect::<Vec<_>>()
                };
                let silent: Vec<NodeId> = parts.values().flat_map(silent).collect();
                self.suspect_silent(&silent, since, cx);
                self.ask_snapshot(id, true, cx);
                cx.set_timer(Timer::Open(id), cx.now() + pause);
            }
            // It keeps others waiting.
            Phase::Deciding => self.give_up(id, AbortReason::Abandoned, cx),
            Phase::Queued | Phase::Submitted => {}
        }
    }

    // Housekeeping.

    /// Lets what is over be forgotten, once the callers know (R6).
    fn on_flush_timeout(&mut self, cx: &mut Cx<'_, Geodesic>) {
        let now = cx.now();
        let mut batches = BTreeMap::<PartitionId, (Vec<TxnId>, BTreeMap<ClientId, u64>)>::new();
        let Self { over, acknowledged, .. } = self;
        over.retain(|txn, Over { participants, since, is_complete }| {
            let below = acknowledged.get(&txn.client).map_or(0, |(below, _)| *below);
            if txn.counter >= below {
                // Left to the replicas, in the end.
                return now.since(*since) < IDLE;
            }
            for &partition in participants.iter() {
                let (txns, clients) = batches.entry(partition).or_default();
                txns.extend(is_complete.then_some(*txn));
                clients.insert(txn.client, below);
            }
            false
        });
        acknowledged.retain(|_, (_, since)| now.since(*since) < IDLE);
        for (partition, (txns, clients)) in batches {
            let placed = self.cluster.partition(partition);
            let acknowledged: Vec<(ClientId, u64)> = clients.into_iter().collect();
            for &to in placed.iter().flat_map(|placed| &placed.replicas) {
                let (txns, acknowledged) = (txns.clone(), acknowledged.clone());
                cx.send(to, Msg::Forget { partition, txns, acknowledged });
            }
        }
        self.is_flushing = !self.over.is_empty();
        if self.is_flushing {
            cx.set_timer(Timer::Flush, now + self.config.flush_interval);
        }
    }

    fn on_message(&mut self, from: NodeId, msg: Msg, cx: &mut Cx<'_, Geodesic>) {
        self.suspects.remove(&from);
        self.heard.insert(from, cx.now());
        match msg {
            Msg::Decided { txn, partition, at, arrived } => {
                self.on_decided((txn, partition), (at, arrived), cx);
            }
            Msg::Stamped { txn, partition, stamp, arrived } => {
                self.on_stamped(from, (txn, partition), (stamp, arrived), cx);
            }
            Msg::Observed { txn, .. }
            | Msg::Cleared { txn, .. }
            | Msg::Stored { txn, .. }
            | Msg::Promised { txn, .. }
            | Msg::Accepted { txn, .. }
            | Msg::Applied { txn, .. } => self.on_answer(from, txn, msg, cx),
            Msg::ReadResult { txn, is_too_much: true, .. } => {
                if self.open.get(&txn).is_some_and(|open| matches!(open.phase, Phase::Reading(_))) {
                    self.give_up(txn, AbortReason::TooLarge, cx);
                }
            }
            Msg::ReadResult { txn, partition, reads, is_too_much: false, guessed } => {
                self.on_read_result(from, (txn, partition), (reads, guessed), cx);
            }
            Msg::Preview { txn, reads, guessed, .. } => {
                self.on_preview(txn, (reads, guessed), cx);
            }
            Msg::ReadOnlyResult { txn, partition, at, portion, reads } => {
                self.on_read_only_result(from, (txn, partition, at), portion, reads, cx);
            }
            Msg::Inquire { txn, partition } => {
                let is_driven = self.drives.contains_key(&txn);
                cx.send(from, Msg::Driving { txn, partition, is_driven });
            }
            Msg::Pong => {}
            Msg::Begin { .. }
            | Msg::Forward { .. }
            | Msg::Ack { .. }
            | Msg::Settle { .. }
            | Msg::Settled { .. }
            | Msg::Direct { .. }
            | Msg::Guess { .. }
            | Msg::Store { .. }
            | Msg::Commit { .. }
            | Msg::Apply { .. }
            | Msg::Forget { .. }
            | Msg::Fetch { .. }
            | Msg::Fetched { .. }
            | Msg::Recover { .. }
            | Msg::Propose { .. }
            | Msg::Read { .. }
            | Msg::ReadOnly { .. }
            | Msg::Gossip { .. }
            | Msg::Driving { .. }
            | Msg::Ping => unreachable!("a replica's message at a client"),
        }
    }
}

/// Timestamps that were made are remembered for so long: no later one is below.
const MAKER_KEEPS: Duration = Duration::from_secs(60);

/// General transactions whose keys a gateway remembers; of others the next attempt reads nearby again.
const DECLARED_MAX: usize = 1_000;

/// Bytes of keys that are remembered of one transaction; with more it reads nearby again.
const DECLARED_BYTES_MAX: usize = 16 << 10;

/// The keys that a transaction with a place may write.
fn open_writes(drives: &BTreeMap<TxnId, Driven>, id: TxnId) -> Vec<Key> {
    let text = drives.get(&id).and_then(|driven| driven.drive.text.as_ref());
    text.map_or_else(Vec::new, |text| text.functor.writes.clone())
}

/// After so many runs a caller hears only of what its transaction reads at its place.
const RUNS_MAX: u32 = 8;

/// How often a read-only transaction takes another time.
const REFUSALS: u32 = 8;

/// Gateways remember for so long what callers know, and what only their callers do not know yet.
const IDLE: Duration = Duration::from_secs(60);

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.open.is_empty() && self.drives.is_empty() {
            return f.write_str("idle");
        }
        let mut separator = "";
        for (id, open) in &self.open {
            match &open.phase {
                Phase::Reading(silent) => write!(f, "{separator}{id} reads {:?}", silent.keys())?,
                Phase::Queued => write!(f, "{separator}{id} queued")?,
                Phase::Deciding => write!(f, "{separator}{id} deciding")?,
                Phase::Submitted => write!(f, "{separator}{id} submitted")?,
                Phase::Waiting(outcome, ..) => {
                    write!(f, "{separator}{id} waits to tell {outcome}")?
                }
                Phase::Snapshotting { at, .. } => write!(f, "{separator}{id} reads at {}", at.0)?,
            }
            separator = " | ";
        }
        for Driven { drive, .. } in self.drives.values() {
            write!(f, "{separator}drives {} {} {:?}", drive.txn, drive.ballot, drive.stage)?;
            separator = " | ";
        }
        Ok(())
    }
}
