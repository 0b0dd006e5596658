//! The gateway: runs transactions for its callers, gives them timestamps, names replicas, and drives
//! them to their ends.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use orthodrome_core::Wire as _;
use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{ClientId, NodeId, PartitionId, TxnId};
use orthodrome_core::machine::{
    Claim, Cx, FAR_FUTURE, Gauge, Input, Leak, Machine, Setup, UNKNOWABLE,
};
use orthodrome_core::ordered::{Entry, OrdMap, OrdSet};
use orthodrome_core::scan::is_fence;
use orthodrome_core::session::{highest, is_below};
use orthodrome_core::time::{Duration, Time, Timestamp, nanos};
use orthodrome_core::txn::{
    AbortReason, Decision, Key, Kind, Op, Outcome, Priority, Read, Reads, Txn, Version, Writes,
};

use super::direct::Direct;
use super::drive::{Drive, Out, Progress, Stage};
use super::excess::Excess;
use super::lines::Lines;
use super::members::{Locating, Members, founded, is_member};
use super::message::{Foretold, Inner, Msg, Output, Predecessor, Record, Side, Text, merge_newest};
use super::naming::name;
use super::outbox::Outbox;
use super::pending::Maker;
use super::under_way::UnderWay;
use super::{Config, Geodesic, Note, Timer, backoff};
use crate::delays::{Delays, delay, difference, shifted};
use crate::functor::Functor;
use crate::gateway::{Participant, split};

/// The client side of Geodesic.
#[derive(Debug)]
pub struct Client {
    node: NodeId,
    /// Which start of this node it is, for ballots.
    incarnation: u64,
    cluster: Arc<Cluster>,
    config: Arc<Config>,
    open: OrdMap<TxnId, Open>,
    /// Transactions that have not ended everywhere.
    drives: OrdMap<TxnId, Driven>,
    under_way: UnderWay,
    lines: Lines,
    /// Large procedures that wait until there is less under way, with their bytes.
    line: VecDeque<(TxnId, usize)>,
    /// Servers that did not answer, and since when. They are asked again and again whether they are there.
    suspects: OrdMap<NodeId, Time>,
    /// When each server was last heard of.
    heard: OrdMap<NodeId, Time>,
    locating: Locating,
    /// New members that have not answered yet, and since when it knows them: they still copy.
    joining: OrdMap<PartitionId, (NodeId, Time)>,
    /// How long it takes from here through h to the last named replica.
    delays: Delays<(NodeId, NodeId)>,
    direct: Direct,
    maker: Maker,
    late: Lateness,
    excess: Excess,
    /// Ended, and perhaps not known to the caller yet.
    over: OrdMap<TxnId, Over>,
    /// Callers know the outcomes of everything below, as of then.
    acknowledged: OrdMap<ClientId, (u64, Time)>,
    is_flushing: bool,
    /// Messages to itself.
    local: VecDeque<Msg>,
    outbox: Outbox,
}

/// How well timestamps were predicted.
#[derive(Debug, Default)]
struct Lateness {
    decided: u64,
    /// The transaction came to a named replica after its timestamp.
    late: u64,
    /// A partition decided more than the timestamp, because of a closing.
    raised: u64,
    /// All replicas gave the same stamp, and the gateway did not wait for h.
    direct: u64,
}

impl Lateness {
    /// A partition has decided.
    fn note(&mut self, (at, arrived): (Timestamp, Timestamp), t: Timestamp) {
        self.decided += 1;
        self.late += u64::from(arrived > t);
        self.raised += u64::from(at > t);
    }
}

/// A transaction that this gateway drives.
#[derive(Debug)]
struct Driven {
    drive: Drive,
    /// What its timestamp was reckoned from.
    sent: Timestamp,
    /// When it began.
    began: Time,
    /// When replicas were asked last: to decide, or to apply what came of it.
    asked: Time,
    /// When it knows what it reads if nobody is before it.
    due: Time,
    /// Transactions that wait for what it writes.
    followers: Vec<Follower>,
}

/// A transaction that reads what one of this gateway writes.
#[derive(Debug)]
struct Follower {
    txn: TxnId,
    /// Its gateway.
    gateway: NodeId,
    partition: PartitionId,
    keys: Vec<Key>,
    /// Its gateway knows what the caller decided.
    is_informed: bool,
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
    participants: OrdMap<PartitionId, Participant>,
    reads: Reads,
    phase: Phase,
    resent: u32,
    is_resolved: bool,
    /// What the caller of an interactive transaction has decided to write.
    decided: Option<Writes>,
}

impl Open {
    /// True if it waits for what replicas read for its caller.
    fn is_reading(&self) -> bool {
        matches!(self.phase, Phase::Reading(_) | Phase::Snapshotting { .. })
    }

    /// Whether its caller is to be told what it has read, if it ends so.
    fn is_owed_reads(&self, outcome: Outcome) -> bool {
        let has_them = matches!(self.txn.kind, Kind::Interactive) || self.is_resolved;
        matches!(outcome, Outcome::Committed(_)) && !has_them
    }
}

#[derive(Debug)]
enum Phase {
    /// It waits at this gateway while others stand in line for its keys. It has no timestamp yet.
    Held,
    /// Waiting for reads of these partitions.
    Reading(OrdMap<PartitionId, Owing>),
    /// It waits until less is under way. It has no timestamp yet.
    InLine,
    /// Its caller will read what it reads at its place, when its turn has come.
    Queued,
    /// The caller thinks.
    Deciding,
    /// It is driven to its end.
    Submitted,
    /// It has ended; this timestamp has not passed everywhere, or the transaction's own not here.
    Waiting(Outcome, &'static str, Timestamp),
    /// A read-only transaction reads at this time.
    Snapshotting { at: Timestamp, parts: OrdMap<PartitionId, Snapshot>, is_refused: bool },
}

/// A partition that owes reads.
#[derive(Debug, Default)]
struct Owing {
    /// Time-outs so far.
    tried: usize,
    /// Replicas that could not answer since the last time-out.
    refused: OrdSet<NodeId>,
}

/// A partition that is read at one time.
#[derive(Debug, Default)]
struct Snapshot {
    asked: OrdSet<NodeId>,
    /// By replica. Each key counts by itself. Of any f + 1 answers for a key, one is from a replica
    /// that knows, or waits for, every earlier writer of that key. So answers may come at different
    /// times.
    answers: OrdMap<NodeId, OrdMap<Key, Read>>,
}

impl Snapshot {
    /// Those of the keys that the replica has not told.
    fn missing(&self, node: NodeId, keys: &[Key]) -> Vec<Key> {
        let told = self.answers.get(&node);
        let is_missing = |key: &&Key| told.is_none_or(|told| !told.contains_key(*key));
        keys.iter().filter(is_missing).cloned().collect()
    }

    /// The replicas that have told all of the keys.
    fn complete(&self, keys: &[Key]) -> impl Iterator<Item = &OrdMap<Key, Read>> {
        self.answers.values().filter(move |told| keys.iter().all(|key| told.contains_key(key)))
    }
}

impl Machine<Geodesic> for Client {
    fn new(setup: Setup<Geodesic>, _recovered: Vec<Record>, cx: &mut Cx<'_, Geodesic>) -> Self {
        // A gateway keeps nothing: replicas recover what it began.
        Self {
            node: setup.node,
            incarnation: cx.rng().next_u64(),
            cluster: founded(setup.cluster),
            config: setup.config,
            open: OrdMap::new(),
            drives: OrdMap::new(),
            under_way: UnderWay::default(),
            lines: Lines::default(),
            line: VecDeque::new(),
            suspects: OrdMap::new(),
            locating: Locating::default(),
            joining: OrdMap::new(),
            heard: OrdMap::new(),
            delays: Delays::at_percentile(DELAY_PERCENTILE),
            direct: Direct::default(),
            maker: Maker::new(setup.node),
            late: Lateness::default(),
            excess: Excess::default(),
            over: OrdMap::new(),
            acknowledged: OrdMap::new(),
            is_flushing: false,
            local: VecDeque::new(),
            outbox: Outbox::default(),
        }
    }

    fn step(&mut self, input: Input<Geodesic>, cx: &mut Cx<'_, Geodesic>) {
        match input {
            Input::Begin(txn) => self.on_begin(txn, cx),
            // Nothing waits for one: general transactions are refused.
            Input::Read { .. } => {}
            Input::Decide { txn, decision } => self.on_decide(txn, decision, cx),
            Input::Resolve { txn, reads, decision } => self.on_resolve(txn, reads, decision, cx),
            Input::Message { from, msg } => self.on_message(from, msg, cx),
            Input::Timer(Timer::Open(txn)) => self.on_open_timeout(txn, cx),
            Input::Timer(Timer::Drive(txn)) => self.on_drive_timeout(txn, cx),
            Input::Timer(Timer::Flush) => self.on_flush_timeout(cx),
            Input::Timer(Timer::Ping) => self.on_ping_timeout(cx),
            Input::Timer(Timer::Sweep(_) | Timer::Close(_) | Timer::Late)
            | Input::Durable(_)
            | Input::Admin(_) => unreachable!("a server's input at a client"),
        }
        while let Some(msg) = self.local.pop_front() {
            self.on_message(self.node, msg, cx);
        }
        self.begin_held(cx);
        self.begin_next(cx);
        self.outbox.send(&self.config, cx);
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
        let Lateness { decided, late, raised, direct } = self.late;
        vec![
            gauge("slots_decided", decided),
            gauge("slots_late", late),
            gauge("slots_raised", raised),
            gauge("slots_direct", direct),
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
        assert!(self.local.is_empty(), "{} left messages to itself", self.node);
        assert!(self.outbox.is_empty(), "{} left messages to others", self.node);
    }
}

impl Client {
    fn on_begin(&mut self, txn: Txn, cx: &mut Cx<'_, Geodesic>) {
        let id = txn.id;
        if self.open.contains_key(&id) {
            // Begun here already: its answers will come.
            return;
        }
        if matches!(txn.kind, Kind::General) {
            cx.finish(id, Outcome::Aborted(AbortReason::Invalid), "refused");
            return;
        }
        if self.open.len() >= self.config.open_max {
            cx.finish(id, Outcome::Aborted(AbortReason::Overload), "shed");
            return;
        }
        let floors = highest(&txn.floors, txn.floors.keys());
        if floors > cx.clock().now + self.config.clock_ahead_max {
            // Replicas would refuse a timestamp above what the client says that it knows (R8). No clock
            // that keeps its bound has shown that time yet, so no commit has it.
            cx.note(Note::FarFuture);
            cx.finish(id, Outcome::Aborted(AbortReason::Overload), FAR_FUTURE);
            return;
        }
        // Of a client that only reads, nothing has to be forgotten.
        if !txn.is_read_only() || self.acknowledged.contains_key(&id.client) {
            self.acknowledged.insert(id.client, (txn.acknowledged_below, cx.now()));
        }
        if !self.joining.is_empty() {
            // Without writes it is asked nothing that it would answer.
            let is_new = |since: Time| cx.now().since(since) < self.config.absence_after;
            self.joining.retain(|_, (_, since)| is_new(*since));
        }
        let participants = split(&self.cluster, &txn.reads, &txn.writes);
        let is_read_only = txn.is_read_only();
        if txn.priority > Priority::LOW {
            self.lines.saw_high(cx.now());
        }
        let stands_in_line =
            txn.priority == Priority::LOW && !is_read_only && !has_fixed_writes(&txn);
        let keys = txn.reads.iter().chain(&txn.writes);
        let mut is_held = false;
        if stands_in_line && id.attempt == 0 {
            is_held = !self.lines.may_begin(id, keys, cx.now());
        } else if stands_in_line {
            // It waits once: each attempt has a place of its own, and the next one is an old transaction.
            self.lines.begin(id, keys);
        }
        let (phase, resent, is_resolved) = (Phase::Held, 0, false);
        let reads = Reads::new();
        let decided = None;
        let open = Open { txn, participants, reads, phase, resent, is_resolved, decided };
        self.open.insert(id, open);
        if is_read_only {
            self.snapshot(id, Timestamp::ZERO, cx);
        } else if is_held {
            cx.note(Note::Held);
        } else {
            self.start(id, cx);
        }
    }

    /// Gives a transaction its place, and reads for its caller.
    fn start(&mut self, id: TxnId, cx: &mut Cx<'_, Geodesic>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        if let Kind::Procedure(ops) = &open.txn.kind {
            let ops = ops.clone();
            self.submit(id, ops, cx);
            return;
        }
        let reading = open.participants.iter().filter(|(_, part)| !part.reads.is_empty());
        let silent: OrdMap<_, _> = reading.map(|(p, _)| (*p, Owing::default())).collect();
        let owing: Vec<PartitionId> = silent.keys().copied().collect();
        open.phase = Phase::Reading(silent);
        // Its place is agreed on while its caller reads and decides (D16).
        self.submit(id, Vec::new(), cx);
        if owing.is_empty() {
            self.on_all_read(id, cx);
        } else if id.attempt == 0 {
            for partition in owing {
                self.send_read(id, partition);
            }
            cx.set_timer(Timer::Open(id), cx.now() + self.config.resend_after);
        } else if let Some(open) = self.open.get_mut(&id) {
            // What it read ahead of its turn was stale: now it waits for its turn.
            open.phase = Phase::Queued;
        }
    }

    /// A transaction knows what it reads: so long it stood in line.
    fn learn_line(&mut self, id: TxnId, cx: &mut Cx<'_, Geodesic>) {
        self.lines.left(id);
        let (Some(open), Some(driven)) = (self.open.get(&id), self.drives.get(&id)) else { return };
        let Driven { drive, began, due, .. } = driven;
        let is_usual = drive.path != "recovered" && !drive.has_fixed_writes();
        if open.txn.priority == Priority::LOW && is_usual {
            let now = cx.now();
            self.lines.saw(drive.hot.iter(), (now.since(*due), due.since(*began)), now);
        }
    }

    /// Gives places to transactions of low priority that were kept back.
    fn begin_held(&mut self, cx: &mut Cx<'_, Geodesic>) {
        while let Some(id) = self.lines.next(cx.now()) {
            self.start(id, cx);
        }
    }

    // Servers that do not answer.

    fn suspect(&mut self, node: NodeId, cx: &mut Cx<'_, Geodesic>) {
        if self.suspects.is_empty() {
            cx.set_timer(Timer::Ping, cx.now() + self.config.ping_interval);
        }
        if let Entry::Vacant(suspect) = self.suspects.entry(node) {
            suspect.insert(cx.now());
            cx.note(Note::Suspected);
            self.outbox.push(node, Msg::Ping);
        }
    }

    /// Asks those that did not answer whether they are there: no transaction has to find out.
    fn on_ping_timeout(&mut self, cx: &mut Cx<'_, Geodesic>) {
        for &node in self.suspects.keys() {
            self.outbox.push(node, Msg::Ping);
        }
        if !self.suspects.is_empty() {
            cx.set_timer(Timer::Ping, cx.now() + self.config.ping_interval);
        }
    }

    /// A server is there again: what its silence has delayed is repeated now, and not at the end of a
    /// pause that has become long. A server that answers to the first question was not silent: what was
    /// asked of it with that question will be answered too.
    fn on_pong(&mut self, from: NodeId, cx: &mut Cx<'_, Geodesic>) {
        let since = self.suspects.remove(&from);
        if since.is_none_or(|since| cx.now().since(since) < self.config.ping_interval) {
            return;
        }
        let drives = self.drives.iter().filter(|(_, it)| it.drive.is_delayed_by(from));
        let drives = drives.map(|(&id, _)| Timer::Drive(id));
        let reading = self.open.iter().filter(|(_, open)| {
            let mut of = open.participants.keys().filter(|it| is_member(&self.cluster, **it, from));
            open.resent > 0 && open.is_reading() && of.next().is_some()
        });
        let timers = drives.chain(reading.map(|(&id, _)| Timer::Open(id))).collect();
        self.hasten(timers, cx);
    }

    /// Lets these expire soon, at different times.
    fn hasten(&self, timers: Vec<Timer>, cx: &mut Cx<'_, Geodesic>) {
        for timer in timers {
            let jitter = cx.rng().below(1 + nanos(self.config.resend_after) / 4);
            cx.set_timer(timer, cx.now() + Duration::from_nanos(jitter));
        }
    }

    // Members that change.

    /// A partition has other members than this gateway knew. Those that are left refuse what it has sent
    /// under the former ones, so it sends that again.
    fn learn(&mut self, id: PartitionId, members: &Arc<Members>, cx: &mut Cx<'_, Geodesic>) {
        let known = self.outbox.members.get(&id).map_or(0, |known| known.epoch);
        if members.epoch <= known || !members.fit(&self.cluster, id) {
            return;
        }
        cx.note(Note::Moved);
        let before = self.cluster.partition(id).map(|placed| placed.replicas.as_slice());
        let is_known = |node: &NodeId| before.is_some_and(|before| before.contains(node));
        if let Some(newest) = members.newest.filter(|node| !is_known(node)) {
            self.joining.insert(id, (newest, cx.now()));
        }
        self.outbox.members.insert(id, members.clone());
        Arc::make_mut(&mut self.cluster).place(id, members.nodes.clone());
        let mut timers = Vec::new();
        for (&txn, driven) in &mut self.drives {
            if driven.drive.relocate(id, &members.nodes) {
                timers.push(Timer::Drive(txn));
            }
        }
        for (&txn, open) in &mut self.open {
            if let Phase::Snapshotting { parts, .. } = &mut open.phase
                && let Some(part) = parts.get_mut(&id)
            {
                part.asked.retain(|node| members.nodes.contains(node));
                part.answers.retain(|node, _| members.nodes.contains(node));
            }
            if open.is_reading() && open.participants.contains_key(&id) {
                timers.push(Timer::Open(txn));
            }
        }
        self.hasten(timers, cx);
    }

    /// A replica answers, so it takes part.
    fn on_member_heard(&mut self, from: NodeId, id: PartitionId) {
        if self.joining.get(&id).is_some_and(|(newest, _)| *newest == from) {
            self.joining.remove(&id);
        }
    }

    /// Asks all other servers for the members of partitions of which a majority does not answer.
    fn locate(&mut self, partitions: &[PartitionId], cx: &mut Cx<'_, Geodesic>) {
        let when = (cx.now(), self.config.resend_after * 4);
        for &partition in partitions {
            let Some(placed) = self.cluster.partition(partition) else { continue };
            let well = placed.replicas.iter().filter(|node| !self.suspects.contains_key(node));
            if well.count() > placed.replicas.len() / 2 {
                continue;
            }
            for to in self.locating.whom((&self.cluster, partition), when) {
                self.outbox.push(to, Msg::Members { partition, members: None });
            }
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

    /// True if a replica may be expected to answer.
    fn is_well(&self, node: NodeId, partition: PartitionId) -> bool {
        let joins = self.joining.get(&partition).is_some_and(|(newest, _)| *newest == node);
        !(joins || self.suspects.contains_key(&node))
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
            (!self.is_well(*node, partition), is_far, rtt, *node)
        });
        replicas
    }

    // Reading before the caller decides.

    /// From the nearest replica; from the next if that one does not answer.
    fn send_read(&mut self, id: TxnId, partition: PartitionId) {
        let Some(open) = self.open.get(&id) else { return };
        let Phase::Reading(silent) = &open.phase else { return };
        let Some(owing) = silent.get(&partition) else { return };
        let mut replicas = self.nearest(partition);
        replicas.retain(|node| !owing.refused.contains(node));
        let Some(at) = owing.tried.checked_rem(replicas.len()) else { return };
        let Some(participant) = open.participants.get(&partition) else { return };
        let Some(&to) = replicas.get(at) else { return };
        let keys = participant.reads.clone();
        self.outbox.push(to, Msg::Read { txn: id, partition, keys });
    }

    fn on_read_result(
        &mut self,
        from: NodeId,
        id: TxnId,
        partition: PartitionId,
        (reads, behind): (Vec<(Key, Read)>, &[Predecessor]),
        cx: &mut Cx<'_, Geodesic>,
    ) {
        let Some(open) = self.open.get_mut(&id) else { return };
        let Phase::Reading(silent) = &mut open.phase else { return };
        if let Some(Driven { drive, .. }) = self.drives.get_mut(&id)
            && !behind.is_empty()
        {
            // These values are about to change. So the transaction waits for its turn, or for what its
            // predecessors will write.
            open.phase = Phase::Queued;
            cx.cancel_timer(Timer::Open(id));
            let mut out = Out::new();
            drive.follow(partition, behind, &mut out);
            self.send(out);
            return;
        }
        let Some(owing) = silent.get_mut(&partition) else { return };
        if is_below(&open.txn.floors, reads.iter().map(|(key, read)| (key, read))) {
            // This replica has not applied yet what the client knows of (R11); the next one may have.
            cx.note(Note::BehindClient);
            if owing.refused.insert(from) {
                self.send_read(id, partition);
            }
            return;
        }
        silent.remove(&partition);
        open.reads.extend(reads);
        if silent.is_empty() {
            self.on_all_read(id, cx);
        }
    }

    /// Lets the caller decide on what its transaction will probably read. Only in a first attempt:
    /// later ones wait until the values are certain, so contention aborts at most one attempt.
    fn foresee(&mut self, id: TxnId, cx: &mut Cx<'_, Geodesic>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        let is_waiting = matches!(open.phase, Phase::Reading(_) | Phase::Queued);
        if !is_waiting || id.attempt > 0 {
            return;
        }
        let Some(reads) = self.drives.get(&id).and_then(|driven| driven.drive.foreseen()) else {
            return;
        };
        let bytes: usize = reads.iter().map(|(key, read)| key.size() + read.size()).sum();
        if bytes > self.config.read_bytes_max || is_below(&open.txn.floors, &reads) {
            return;
        }
        cx.note(Note::Foreseen);
        open.reads = reads;
        self.on_all_read(id, cx);
    }

    /// Another gateway has a transaction that reads what one of this gateway may write.
    fn on_follow(
        &mut self,
        gateway: NodeId,
        (id, partition): (TxnId, PartitionId),
        keys: Vec<Key>,
        txn: TxnId,
    ) {
        let most = self.config.followers_max;
        // If this gateway has finished with it, enough replicas know what it wrote.
        let Some(Driven { followers, .. }) = self.drives.get_mut(&id) else { return };
        if followers.len() < most {
            followers.push(Follower { txn, gateway, partition, keys, is_informed: false });
            self.inform(id);
        }
    }

    /// Sends to the gateways of followers what is new about a transaction.
    fn inform(&mut self, id: TxnId) {
        let bytes_max = self.config.piece_bytes;
        let Some(Driven { drive, followers, .. }) = self.drives.get_mut(&id) else { return };
        if followers.is_empty() {
            return;
        }
        let Some((outcome, writes, is_certain)) = drive.foretell(&self.config) else { return };
        let mut out = Out::new();
        followers.retain_mut(|Follower { txn, gateway, partition, keys, is_informed }| {
            if !*is_informed || is_certain {
                *is_informed = true;
                let own =
                    keys.iter().filter_map(|key| Some((key.clone(), writes.get(key)?.clone())));
                let told = Foretold { outcome, writes: own.collect(), is_certain };
                // What is larger comes from the replicas.
                if told.size() <= bytes_max {
                    let (txn, partition, told) = (*txn, *partition, Arc::new(told));
                    out.push((*gateway, Msg::Foretold { txn, partition, of: id, told }));
                }
            }
            !is_certain
        });
        self.send(out);
    }

    fn on_all_read(&mut self, id: TxnId, cx: &mut Cx<'_, Geodesic>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        open.phase = Phase::Deciding;
        cx.cancel_timer(Timer::Open(id));
        cx.reads(id, open.reads.clone());
        self.learn_line(id, cx);
    }

    /// The caller of an interactive transaction has decided.
    fn on_decide(&mut self, id: TxnId, decision: Decision, cx: &mut Cx<'_, Geodesic>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        let is_asked = matches!(open.phase, Phase::Deciding);
        let is_reading = matches!(open.phase, Phase::Held | Phase::Reading(_) | Phase::Queued);
        match decision {
            Decision::Commit(writes) if is_asked => {
                if !open.txn.declares(&writes) {
                    self.give_up(id, AbortReason::Client, cx);
                    return;
                }
                let seen = open.reads.iter().map(|(key, read)| (key.clone(), read.version));
                let seen: Vec<(Key, Version)> = seen.collect();
                let Some(Driven { drive, .. }) = self.drives.get_mut(&id) else {
                    self.finish(id, Outcome::Committed(cx.clock().now), "empty", cx);
                    return;
                };
                open.phase = Phase::Submitted;
                open.decided = Some(writes.clone());
                cx.cancel_timer(Timer::Open(id));
                let mut out = Out::new();
                let progress = drive.offer(seen, writes, (&self.config, &mut out));
                self.under_way.add(id, drive.bytes(), &self.config);
                self.send(out);
                self.on_progress(id, progress, cx);
            }
            // Nothing is in its register, so nobody can commit it.
            Decision::Abort if is_asked || is_reading => {
                self.give_up(id, AbortReason::Client, cx);
            }
            Decision::Commit(_) | Decision::Abort => {}
        }
    }

    /// Aborts an interactive transaction for whose place nothing is in its register.
    fn give_up(&mut self, id: TxnId, reason: AbortReason, cx: &mut Cx<'_, Geodesic>) {
        let outcome = Outcome::Aborted(reason);
        let Some(Driven { drive, .. }) = self.drives.get_mut(&id) else {
            self.finish(id, outcome, "abort", cx);
            return;
        };
        drive.path = "abort";
        let mut out = Out::new();
        let progress = drive.end(Arc::new(Output { outcome, writes: Writes::new() }), &mut out);
        self.send(out);
        self.on_progress(id, progress, cx);
    }

    // Ordering.

    /// Step 1: names replicas, chooses the timestamp, and gives the transaction to h of each partition.
    /// `ops` are those of a procedure.
    fn submit(&mut self, id: TxnId, ops: Vec<Op>, cx: &mut Cx<'_, Geodesic>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        let is_interactive = matches!(open.txn.kind, Kind::Interactive);
        let partitions: Vec<PartitionId> = open.participants.keys().copied().collect();
        if partitions.is_empty() {
            if !is_interactive {
                self.finish(id, Outcome::Committed(cx.clock().now), "empty", cx);
            }
            return;
        }
        let functor = Functor::clone(&Functor::procedure(&open.txn, ops));
        if !is_interactive {
            // Nobody waits for it while it waits: it has no place yet.
            let bytes = functor.size().saturating_mul(partitions.len());
            let was_in_line = matches!(open.phase, Phase::InLine);
            let is_behind = UnderWay::counts(bytes, &self.config) && !self.line.is_empty();
            let has_room = !is_behind && self.under_way.has_room(bytes, &self.config);
            if !was_in_line && !has_room {
                cx.note(Note::InLine);
                open.phase = Phase::InLine;
                self.line.push_back((id, bytes));
                return;
            }
            open.phase = Phase::Submitted;
        }
        let clock = cx.clock();
        let floors = highest(&open.txn.floors, open.txn.floors.keys());
        let mut t = clock.now.max(floors.next());
        let priority = open.txn.priority;
        self.direct.began(cx.now());
        let (mut sides, mut are_enough, mut round_trip) = (Vec::new(), true, Duration::ZERO);
        let mut nearest: Option<(Duration, PartitionId)> = None;
        for partition in partitions {
            let is_well = |node: NodeId| self.is_well(node, partition);
            let path = name(&self.cluster, self.node, partition, is_well);
            are_enough &= path.are_enough;
            round_trip = round_trip.max(path.round_trip);
            let direct = self.direct.choose(&path, &self.config, cx.now());
            let delay = match (&path.all, direct) {
                (Some(all), Some(_)) => self.predict_all(all, cx.now()),
                (Some(_) | None, _) => self.predict(path.ends(), path.one_way, cx.now()),
            };
            t = t.max(shifted(clock.now, delay));
            let here = (path.majority, partition);
            nearest = Some(nearest.map_or(here, |nearest| nearest.min(here)));
            let (is_direct, is_patient) = (direct.is_some(), direct == Some(true));
            sides.push(Side { partition, named: path.named, is_direct, is_patient });
        }
        let t = self.maker.at_least(t);
        self.maker.forget(clock.now - MAKER_KEEPS);
        let register = nearest.map(|(_, partition)| partition).filter(|_| is_interactive);
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
        self.under_way.add(id, drive.bytes(), &self.config);
        let due = asked + ahead.max(round_trip);
        let followers = Vec::new();
        self.drives.insert(id, Driven { drive, sent, began: asked, asked, due, followers });
        self.send(out);
        let patience = ahead + round_trip * 3 / 2 + clock.error * 2 + self.config.slack;
        let excess = self.excess.bound().min(self.config.resend_after * 4);
        let patience = patience + excess + self.under_way.span(&self.config);
        cx.set_timer(Timer::Drive(id), cx.now() + patience);
    }

    /// Begins procedures that waited in line.
    fn begin_next(&mut self, cx: &mut Cx<'_, Geodesic>) {
        while let Some(&(id, bytes)) = self.line.front()
            && self.under_way.has_room(bytes, &self.config)
        {
            self.line.pop_front();
            let Some(open) = self.open.get(&id) else { continue };
            if let Kind::Procedure(ops) = &open.txn.kind {
                let ops = ops.clone();
                self.submit(id, ops, cx);
            }
        }
    }

    /// How long answers may take, with all that is under way.
    fn patience(&self) -> Duration {
        self.config.resend_after + self.under_way.span(&self.config)
    }

    /// How long it takes from here along a path, in nanoseconds by the clock at its end.
    fn predict(&mut self, path: Option<(NodeId, NodeId)>, otherwise: Duration, now: Time) -> i64 {
        let Config { delay_window, delay_refresh, .. } = *self.config;
        let known =
            path.and_then(|ends| self.delays.estimate(ends, delay_window, delay_refresh, now));
        // More than a clock may be ahead is no delay.
        let most = delay(self.config.clock_ahead_max / 2);
        known.unwrap_or_else(|| delay(otherwise)).min(most)
    }

    /// How long it takes from here to the last of these replicas.
    fn predict_all(&mut self, replicas: &[(NodeId, Duration)], now: Time) -> i64 {
        let delays =
            replicas.iter().map(|&(node, rtt)| self.predict(Some((node, node)), rtt / 2, now));
        delays.max().unwrap_or_default()
    }

    fn send(&mut self, out: Out) {
        for (to, msg) in out {
            if to == self.node {
                self.local.push_back(msg);
            } else {
                self.outbox.push(to, msg);
            }
        }
    }

    /// Step 4 has come to an end at one partition.
    fn on_decided(
        &mut self,
        (id, partition): (TxnId, PartitionId),
        (at, arrived, after): (Timestamp, Timestamp, Option<Timestamp>),
        cx: &mut Cx<'_, Geodesic>,
    ) {
        let Some(Driven { drive, sent, began, .. }) = self.drives.get_mut(&id) else { return };
        drive.after = after;
        if let Some(text) = &drive.text {
            let named = text.named(partition);
            if let (Some(&h), Some(&last)) = (named.first(), named.last()) {
                let (window, now) = (self.config.delay_window, cx.now());
                self.delays.record((h, last), difference(arrived, *sent), window, now);
                self.direct.record((h, last), now.since(*began), &self.config, now);
            }
            if !drive.is_decided(partition) {
                self.late.note((at, arrived), text.t);
            }
        }
        self.take_decision(id, cx, |drive, context| drive.on_decided(partition, at, context));
    }

    /// A replica has stamped a transaction in direct mode.
    fn on_stamped(
        &mut self,
        from: NodeId,
        (id, partition): (TxnId, PartitionId),
        (at, arrived): (Timestamp, Timestamp),
        cx: &mut Cx<'_, Geodesic>,
    ) {
        let Some(Driven { drive, sent, .. }) = self.drives.get_mut(&id) else { return };
        let taken = difference(arrived, *sent);
        self.delays.record((from, from), taken, self.config.delay_window, cx.now());
        let was_decided = drive.is_decided(partition);
        self.take_decision(id, cx, |drive, context| {
            drive.on_stamped(from, (partition, at), context)
        });
        let Some(Driven { drive, .. }) = self.drives.get(&id) else { return };
        if let Some(text) = drive.text.as_ref().filter(|_| !was_decided)
            && drive.is_decided(partition)
        {
            self.late.direct += 1;
            self.late.note((at, arrived), text.t);
        }
    }

    /// A partition has decided, perhaps.
    fn take_decision(
        &mut self,
        id: TxnId,
        cx: &mut Cx<'_, Geodesic>,
        take: impl FnOnce(&mut Drive, (&Config, &mut Out)) -> Progress,
    ) {
        let Some(Driven { drive, due, .. }) = self.drives.get_mut(&id) else { return };
        let mut out = Out::new();
        let was_ordering = drive.stage == Stage::Ordering;
        let progress = take(drive, (&self.config, &mut out));
        if was_ordering && drive.stage != Stage::Ordering {
            self.excess.record(cx.now().since(*due));
        }
        self.send(out);
        self.on_progress(id, progress, cx);
    }

    /// An answer to the driver of a transaction.
    fn on_answer(&mut self, from: NodeId, id: TxnId, msg: Msg, cx: &mut Cx<'_, Geodesic>) {
        let Some(Driven { drive, asked, .. }) = self.drives.get_mut(&id) else { return };
        if let Msg::Applied { late, .. } = msg
            && drive.times == 0
        {
            let taken = cx.now().since(*asked).saturating_sub(Duration::from_nanos(late));
            self.direct.record((from, from), taken, &self.config, cx.now());
        }
        let mut out = Out::new();
        let config = &*self.config;
        let progress = match msg {
            Msg::Observed { partition, at, portion, reads, .. } => {
                let seen = (portion, reads);
                drive.on_observed(from, (partition, at), seen, (config, &mut out))
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
            Msg::Blocked { partition, at, reads, behind, .. } => {
                let seen = (reads, behind);
                drive.on_blocked(from, (partition, at), seen, (config, &mut out))
            }
            Msg::Foretold { partition, of, told, .. } => {
                drive.on_foretold((of, partition), told, (config, &mut out))
            }
            Msg::Begin { .. }
            | Msg::Forward { .. }
            | Msg::Ack { .. }
            | Msg::Settle { .. }
            | Msg::Settled { .. }
            | Msg::Stamped { .. }
            | Msg::Decided { .. }
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
            | Msg::Hint { .. }
            | Msg::Follow { .. }
            | Msg::Rejoin { .. }
            | Msg::Known { .. }
            | Msg::Copy { .. }
            | Msg::Copied { .. }
            | Msg::Several(_)
            | Msg::Ping
            | Msg::Pong
            | Msg::Under { .. }
            | Msg::Members { .. }
            | Msg::Fence { .. }
            | Msg::Fenced { .. }
            | Msg::Elect { .. }
            | Msg::Elected { .. } => unreachable!("no answer to the driver of {id}"),
        };
        self.send(out);
        self.on_progress(id, progress, cx);
    }

    fn on_progress(&mut self, id: TxnId, progress: Progress, cx: &mut Cx<'_, Geodesic>) {
        self.inform(id);
        let patience = self.patience();
        let Some(Driven { drive, .. }) = self.drives.get_mut(&id) else { return };
        match progress {
            Progress::Nothing => {
                let has_news = drive.take_news();
                if let Stage::Observing(_) = drive.stage
                    && (has_news || drive.times == 0)
                {
                    // It waits for predecessors: for longer than for answers.
                    cx.set_timer(Timer::Drive(id), cx.now() + patience * backoff(drive.times));
                }
                self.foresee(id, cx);
            }
            Progress::Exact => {
                let reads = drive.reads.clone().unwrap_or_default();
                cx.set_timer(Timer::Drive(id), cx.now() + patience);
                let Some(open) = self.open.get_mut(&id) else { return };
                if matches!(open.phase, Phase::Reading(_) | Phase::Queued) {
                    open.reads = reads;
                    self.on_all_read(id, cx);
                }
            }
            Progress::Stale => {
                cx.note(Note::Stale);
                self.give_up(id, AbortReason::StaleRead, cx);
            }
            Progress::Preempted => {
                // Whoever recovers should have the time to finish; then this node does.
                cx.note(Note::Preempted);
                let pause = patience;
                let jitter = cx.rng().below(1 + nanos(pause) / 2);
                let at = cx.now() + pause + Duration::from_nanos(jitter);
                cx.set_timer(Timer::Drive(id), at);
            }
            Progress::Ended(output) => {
                cx.claim(Claim::Decided { txn: id, outcome: output.outcome });
                if self
                    .open
                    .get(&id)
                    .is_some_and(|open| matches!(open.txn.kind, Kind::Procedure(_)))
                {
                    self.learn_line(id, cx);
                }
                let Some(Driven { drive, asked, .. }) = self.drives.get_mut(&id) else { return };
                *asked = cx.now();
                let (path, reads, after) = (drive.path, drive.reads.take(), drive.after);
                self.under_way.add(id, drive.bytes(), &self.config);
                let patience = self.patience();
                cx.set_timer(Timer::Drive(id), cx.now() + patience);
                self.on_ended(id, &output, (reads, path, after), cx);
            }
            Progress::Complete => {
                cx.cancel_timer(Timer::Drive(id));
                self.leave(id, true, cx);
            }
            Progress::Forgotten(outcome) => {
                cx.note(Note::Forgotten);
                cx.cancel_timer(Timer::Drive(id));
                self.under_way.remove(id);
                self.drives.remove(&id);
                let Some(open) = self.open.get_mut(&id) else { return };
                match outcome {
                    // Nobody knows any more what it has read. Its caller may ask for the outcome alone.
                    Some(outcome) if open.is_owed_reads(outcome) => {
                        self.finish(id, Outcome::Unknown, "reads-forgotten", cx);
                    }
                    Some(outcome) => {
                        self.wait_to_tell(id, outcome, ("recovered", None), cx);
                    }
                    None => self.finish(id, Outcome::Unknown, UNKNOWABLE, cx),
                }
            }
        }
    }

    /// This gateway has done its part; what remains is to say when the caller knows.
    fn leave(&mut self, id: TxnId, is_complete: bool, cx: &mut Cx<'_, Geodesic>) {
        self.under_way.remove(id);
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
        let (since, silent, unanswered) = (*asked, drive.silent(), drive.unanswered());
        *asked = cx.now();
        let mut out = Out::new();
        let progress = drive.on_timeout((self.node, self.incarnation), patience, &mut out);
        if drive.makes_room(patience) {
            self.under_way.make_room(id);
        }
        self.under_way.add(id, drive.bytes(), &self.config);
        let is_asked_again = drive.stage == Stage::Ordering && drive.is_of_ballot_zero();
        let pause = match is_asked_again {
            // h is near, and has to do what it would have done without direct mode.
            true => self.config.patience_max * 2 + self.config.slack,
            false => self.config.resend_after * backoff(drive.times),
        };
        let pause = pause + self.under_way.span(&self.config);
        let jitter = cx.rng().below(1 + nanos(pause) / 4);
        cx.set_timer(Timer::Drive(id), cx.now() + pause + Duration::from_nanos(jitter));
        self.suspect_silent(&silent, since, cx);
        self.locate(&unanswered, cx);
        self.send(out);
        self.on_progress(id, progress, cx);
    }

    /// It has ended. A commit is told once its timestamp has passed on every clock (D13), or earlier
    /// (D20).
    fn on_ended(
        &mut self,
        id: TxnId,
        output: &Output,
        (reads, path, after): (Option<Reads>, &'static str, Option<Timestamp>),
        cx: &mut Cx<'_, Geodesic>,
    ) {
        let Some(open) = self.open.get_mut(&id) else { return };
        let is_procedure = matches!(open.txn.kind, Kind::Procedure(_));
        let mut outcome = output.outcome;
        if matches!(outcome, Outcome::Committed(_))
            && open.decided.as_ref().is_some_and(|decided| *decided != output.writes)
        {
            // Its client has decided twice, and the other decision has committed.
            outcome = Outcome::Aborted(AbortReason::Invalid);
        }
        if is_procedure && matches!(outcome, Outcome::Committed(_)) && !open.is_resolved {
            match reads {
                Some(reads) => open.reads = reads,
                None if open.participants.values().all(|part| part.reads.is_empty()) => {}
                // Somebody else computed it, and what it read is gone; the caller may ask again.
                None => outcome = Outcome::Unknown,
            }
        }
        self.wait_to_tell(id, outcome, (path, after), cx);
    }

    /// Tells an outcome once it may be told: after the transaction's place has passed on every clock, or
    /// `after`.
    fn wait_to_tell(
        &mut self,
        id: TxnId,
        outcome: Outcome,
        (path, after): (&'static str, Option<Timestamp>),
        cx: &mut Cx<'_, Geodesic>,
    ) {
        let Some(open) = self.open.get_mut(&id) else { return };
        // A read may be placed anywhere above the newest version that it returns. What a scan does not
        // return may have been deleted just before its timestamp.
        let newest = || open.reads.values().map(|read| read.version.timestamp).max();
        let is_scan = || open.reads.keys().any(is_fence);
        let placed = match outcome {
            Outcome::Committed(_) if open.txn.is_read_only() && !is_scan() => newest(),
            Outcome::Committed(at) => Some(after.unwrap_or(at)),
            Outcome::Aborted(_) | Outcome::Unknown => None,
        };
        open.phase = Phase::Waiting(outcome, path, placed.unwrap_or_default());
        self.tell(id, cx);
    }

    fn tell(&mut self, id: TxnId, cx: &mut Cx<'_, Geodesic>) {
        let Some(open) = self.open.get(&id) else { return };
        let Phase::Waiting(outcome, path, after) = open.phase else { return };
        let clock = cx.clock();
        let mut due = if after > Timestamp::ZERO { after + clock.error * 2 } else { after };
        if let Outcome::Committed(at) = outcome
            && !open.txn.is_read_only()
        {
            due = due.max(at);
        }
        if due >= clock.now && !self.config.mutations.no_clock_wait() {
            cx.note(Note::ClockWait);
            let missing = due.0 - clock.now.0;
            let at = cx.now() + Duration::from_nanos(missing.saturating_add(1));
            cx.set_timer(Timer::Open(id), at);
            return;
        }
        self.finish(id, outcome, path, cx);
    }

    fn finish(
        &mut self,
        id: TxnId,
        outcome: Outcome,
        path: &'static str,
        cx: &mut Cx<'_, Geodesic>,
    ) {
        let Some(open) = self.open.remove(&id) else { return };
        self.lines.left(id);
        cx.cancel_timer(Timer::Open(id));
        if open.is_owed_reads(outcome) {
            cx.reads(id, open.reads);
        }
        cx.finish(id, outcome, path);
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
        if txn.is_read_only() || matches!(txn.kind, Kind::General) {
            // It changes nothing, so it can simply be read again; or it is refused again.
            self.on_begin(txn, cx);
            return;
        }
        cx.note(Note::Resolved);
        self.acknowledged.insert(id.client, (txn.acknowledged_below, cx.now()));
        let keys = txn.reads.iter().chain(&txn.writes);
        let parts: OrdSet<PartitionId> = keys.map(|key| self.cluster.partition_of(key)).collect();
        let decided = match (&decision, &txn.kind) {
            // Its register has the decision, if its client made one.
            (Some(Decision::Commit(writes)), Kind::Interactive) => Some(writes.clone()),
            (Some(Decision::Commit(_)) | None, _) | (_, Kind::Procedure(_)) => None,
            // Nothing came into its register, so nobody can commit it. Replicas bring it to its end.
            (Some(Decision::Abort), _) => {
                cx.finish(id, Outcome::Aborted(AbortReason::Client), "recovered");
                return;
            }
        };
        if parts.is_empty() {
            cx.finish(id, Outcome::Committed(cx.clock().now), "empty");
            return;
        }
        let (participants, phase) = (OrdMap::new(), Phase::Submitted);
        let (resent, is_resolved) = (0, true);
        let open = Open { txn, participants, reads, phase, resent, is_resolved, decided };
        self.open.insert(id, open);
        if let Some(Driven { drive, .. }) = self.drives.get(&id) {
            // It is under way here, or has just ended.
            if let Stage::Ending(output) = &drive.stage {
                let output = output.clone();
                self.on_ended(id, &output, (None, "recovered", None), cx);
            }
            return;
        }
        let mut drive = Drive::new(&self.cluster, id, None, parts);
        let mut out = Out::new();
        drive.recover((self.node, self.incarnation), &mut out);
        let (sent, asked, due) = (cx.clock().now, cx.now(), cx.now());
        self.drives
            .insert(id, Driven { drive, sent, began: asked, asked, due, followers: Vec::new() });
        self.send(out);
        cx.set_timer(Timer::Drive(id), cx.now() + self.config.resend_after);
    }

    // Reading at one timestamp.

    /// Reads from f + 1 replicas at this gateway's own time, or at `least` if that is later (D14).
    fn snapshot(&mut self, id: TxnId, least: Timestamp, cx: &mut Cx<'_, Geodesic>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        let floors = highest(&open.txn.floors, open.txn.floors.keys());
        let at = cx.clock().now.max(floors).max(least);
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
        let nearest: OrdMap<PartitionId, Vec<NodeId>> =
            wanted.into_iter().map(|partition| (partition, self.nearest(partition))).collect();
        let Some(open) = self.open.get_mut(&id) else { return };
        let Phase::Snapshotting { at, parts, .. } = &mut open.phase else { return };
        let is_single = parts.len() == 1;
        for (&partition, part) in parts {
            let Some(participant) = open.participants.get(&partition) else { continue };
            let Some(replicas) = nearest.get(&partition) else { continue };
            let majority = replicas.len() / 2 + 1;
            if part.complete(&participant.reads).count() >= majority {
                continue;
            }
            let many = if are_all { replicas.len() } else { majority };
            // Where packets are lost, a question or an answer of many packets hardly ever arrives. So
            // what is asked again is asked in small portions, and only what is missing.
            let portion = (participant.reads.len() / PORTIONS_MAX).max(KEYS_AGAIN);
            let portion = if are_all { portion } else { usize::MAX };
            for &to in replicas.iter().take(many) {
                let missing = part.missing(to, &participant.reads);
                for keys in missing.chunks(portion) {
                    part.asked.insert(to);
                    let (keys, at, fenced) = (keys.to_vec(), *at, open.txn.fenced.clone());
                    let msg = Msg::ReadOnly { txn: id, partition, keys, at, fenced, is_single };
                    if are_all {
                        cx.send(to, self.outbox.with_members(msg));
                    } else {
                        self.outbox.push(to, msg);
                    }
                }
            }
        }
    }

    fn on_read_only_result(
        &mut self,
        from: NodeId,
        (id, partition, then): (TxnId, PartitionId, Timestamp),
        (reads, above): (Option<Vec<(Key, Read)>>, Timestamp),
        cx: &mut Cx<'_, Geodesic>,
    ) {
        let Some(open) = self.open.get_mut(&id) else { return };
        let Phase::Snapshotting { at, parts, is_refused } = &mut open.phase else { return };
        if then != *at {
            // An answer to an earlier question of this transaction, perhaps before a restart.
            return;
        }
        let Some(part) = parts.get_mut(&partition) else { return };
        if above > then {
            self.snapshot_above(id, above, cx);
            return;
        }
        let Some(reads) = reads else {
            // It waited for so long that this time is gone, or the clocks are too far apart.
            if !std::mem::replace(is_refused, true) {
                let at = cx.now() + self.config.resend_after / 4;
                cx.set_timer(Timer::Open(id), at);
            }
            return;
        };
        part.answers.entry(from).or_default().extend(reads);
        self.on_snapshot_complete(id, cx);
    }

    /// Somebody may have been told of a write at this time before the transaction began, and its own time
    /// is earlier. It reads again: so late that this hardly happens twice.
    fn snapshot_above(&mut self, id: TxnId, above: Timestamp, cx: &mut Cx<'_, Geodesic>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        open.resent += 1;
        if open.resent > REFUSALS {
            self.finish(id, Outcome::Aborted(AbortReason::Overload), "read-only", cx);
            return;
        }
        cx.note(Note::ReadAgain);
        let partitions: Vec<PartitionId> = open.participants.keys().copied().collect();
        let here = self.cluster.region_of(self.node);
        let away = partitions.into_iter().filter_map(|partition| {
            let &first = self.nearest(partition).first()?;
            Some(self.cluster.topology.rtt(here, self.cluster.region_of(first)))
        });
        let away = away.max().unwrap_or_default();
        let clock = cx.clock();
        self.snapshot(id, above.max(clock.now + away) + clock.error * 2, cx);
    }

    fn on_snapshot_complete(&mut self, id: TxnId, cx: &mut Cx<'_, Geodesic>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        let Phase::Snapshotting { at, parts, .. } = &open.phase else { return };
        let mut reads = Reads::new();
        for (&partition, part) in parts {
            let placed = self.cluster.partition(partition);
            let majority = placed.map_or(0, |placed| placed.replicas.len()) / 2 + 1;
            let enough = if self.config.mutations.one_report() { 1 } else { majority };
            let keys = open.participants.get(&partition).map_or(&[][..], |part| &part.reads);
            if part.complete(keys).count() < enough {
                return;
            }
            for answer in part.complete(keys) {
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
        self.wait_to_tell(id, outcome, ("read-only", None), cx);
    }

    /// Nobody answered for a while, or a timestamp has passed.
    fn on_open_timeout(&mut self, id: TxnId, cx: &mut Cx<'_, Geodesic>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        open.resent += 1;
        let resent = open.resent;
        let pause = self.config.resend_after * backoff(resent);
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
                    self.send_read(id, partition);
                }
                self.locate(&owing, cx);
                cx.set_timer(Timer::Open(id), cx.now() + pause);
            }
            Phase::Snapshotting { is_refused: true, .. } => {
                if resent > REFUSALS {
                    self.finish(id, Outcome::Aborted(AbortReason::Overload), "read-only", cx);
                } else {
                    self.snapshot(id, Timestamp::ZERO, cx);
                }
            }
            Phase::Snapshotting { parts, .. } => {
                cx.note(Note::Resent);
                let silent = |part: &Snapshot| {
                    let answered = |node: &&NodeId| !part.answers.contains_key(*node);
                    part.asked.iter().filter(answered).copied().collect::<Vec<_>>()
                };
                let silent: Vec<NodeId> = parts.values().flat_map(silent).collect();
                let asked: Vec<PartitionId> = parts.keys().copied().collect();
                self.suspect_silent(&silent, since, cx);
                self.locate(&asked, cx);
                self.ask_snapshot(id, true, cx);
                cx.set_timer(Timer::Open(id), cx.now() + pause);
            }
            // Its caller's lease ends it if the caller is gone.
            Phase::Held | Phase::Deciding | Phase::InLine | Phase::Queued | Phase::Submitted => {}
        }
    }

    // Housekeeping.

    /// Lets what is over be forgotten, once the callers know (R6).
    fn on_flush_timeout(&mut self, cx: &mut Cx<'_, Geodesic>) {
        let now = cx.now();
        let mut batches = OrdMap::<PartitionId, (Vec<TxnId>, OrdMap<ClientId, u64>)>::new();
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
                let keeps_outcomes = false;
                let msg = Msg::Forget { partition, txns, acknowledged, keeps_outcomes };
                self.outbox.push(to, msg);
            }
        }
        self.is_flushing = !self.over.is_empty();
        if self.is_flushing {
            cx.set_timer(Timer::Flush, now + self.config.flush_interval);
        }
    }

    fn on_message(&mut self, from: NodeId, msg: Msg, cx: &mut Cx<'_, Geodesic>) {
        self.heard.insert(from, cx.now());
        if let Some(id) = msg.answers_about() {
            if !is_member(&self.cluster, id, from) {
                cx.note(Note::Outdated);
                return;
            }
            self.on_member_heard(from, id);
        }
        match msg {
            Msg::Decided { txn, partition, at, arrived, after } => {
                self.on_decided((txn, partition), (at, arrived, after), cx);
            }
            Msg::Stamped { txn, partition, at, arrived } => {
                self.on_stamped(from, (txn, partition), (at, arrived), cx);
            }
            Msg::Observed { txn, .. }
            | Msg::Stored { txn, .. }
            | Msg::Promised { txn, .. }
            | Msg::Accepted { txn, .. }
            | Msg::Applied { txn, .. }
            | Msg::Blocked { txn, .. }
            | Msg::Foretold { txn, .. } => self.on_answer(from, txn, msg, cx),
            Msg::Follow { txn, partition, keys, follower } => {
                self.on_follow(from, (txn, partition), keys, follower);
            }
            Msg::ReadResult { txn, is_too_much: true, .. } => {
                if self.open.get(&txn).is_some_and(|open| matches!(open.phase, Phase::Reading(_))) {
                    self.give_up(txn, AbortReason::TooLarge, cx);
                }
            }
            Msg::ReadResult { txn, partition, reads, is_too_much: false, behind } => {
                self.on_read_result(from, txn, partition, (reads, &behind), cx);
            }
            Msg::ReadOnlyResult { txn, partition, at, reads, above, .. } => {
                self.on_read_only_result(from, (txn, partition, at), (reads, above), cx);
            }
            Msg::Inquire { txn, partition } => {
                let is_driven = self.drives.contains_key(&txn);
                self.outbox.push(from, Msg::Driving { txn, partition, is_driven });
            }
            // Whatever else it says, it may not give stamps yet.
            Msg::Pong => self.on_pong(from, cx),
            Msg::Members { partition, members: Some(members) } => {
                self.learn(partition, &members, cx);
            }
            // Servers know better.
            Msg::Members { members: None, .. } => {}
            Msg::Several(parts) => {
                for Inner(msg) in parts {
                    self.on_message(from, msg, cx);
                }
            }
            Msg::Begin { .. }
            | Msg::Forward { .. }
            | Msg::Ack { .. }
            | Msg::Settle { .. }
            | Msg::Settled { .. }
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
            | Msg::Hint { .. }
            | Msg::Rejoin { .. }
            | Msg::Known { .. }
            | Msg::Copy { .. }
            | Msg::Copied { .. }
            | Msg::Under { .. }
            | Msg::Fence { .. }
            | Msg::Fenced { .. }
            | Msg::Elect { .. }
            | Msg::Elected { .. }
            | Msg::Ping => unreachable!("a replica's message at a client"),
        }
    }
}

/// Timestamps that were made are remembered for so long: no later one is below.
const MAKER_KEEPS: Duration = Duration::from_secs(60);

/// Timestamps allow for delays up to this percentile. Whoever comes later has to wait for another closing
/// only if a conflicting transaction was faster, so waiting for more would cost more than it saves.
const DELAY_PERCENTILE: usize = 75;

/// A read-only transaction that asks again asks for so many keys at once, or for more if it would need
/// more than so many portions.
const KEYS_AGAIN: usize = 16;
const PORTIONS_MAX: usize = 64;

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
                Phase::Held => write!(f, "{separator}{id} held")?,
                Phase::InLine => write!(f, "{separator}{id} in line")?,
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

/// True if the writes of a transaction do not depend on its reads: nobody stands in line behind it.
fn has_fixed_writes(txn: &Txn) -> bool {
    match &txn.kind {
        Kind::Procedure(ops) => Functor::procedure(txn, ops.clone()).fixed_writes().is_some(),
        Kind::Interactive | Kind::General | Kind::ReadOnly | Kind::StaleReadOnly => false,
    }
}

#[cfg(test)]
mod tests {
    use orthodrome_core::host::Host;
    use orthodrome_core::id::RegionId;
    use orthodrome_core::machine::{Effect, Protocol as _};
    use orthodrome_core::rng::Rng;
    use orthodrome_core::session::Floor;
    use orthodrome_core::store::MemoryEngine;
    use orthodrome_core::time::Clock;
    use orthodrome_core::topology::Topology;
    use orthodrome_core::workers::Alone;

    use super::super::message::{Answer, Ballot};
    use super::*;
    use crate::portions::Portion;

    const CLOCK: Clock = Clock { now: Timestamp(1_000_000_000), error: Duration::ZERO };

    fn gateway() -> (Host<Geodesic, Client>, Arc<Config>) {
        let map = Topology::uniform(3, Duration::from_millis(1), Duration::from_millis(10));
        let cluster = Arc::new(Cluster::spread(map, 1, 1, 1, 3).unwrap());
        let config = Arc::new(Geodesic::configure(&cluster, "geodesic"));
        let (engine, workers) = (Box::new(MemoryEngine::default()), Arc::new(Alone));
        let setup = Setup {
            node: NodeId(4),
            cluster,
            config: config.clone(),
            engine,
            workers,
            is_replacement: false,
        };
        let rng = Rng::stream(1, "test", 4);
        (Host::start(setup, vec![], rng, Time::ZERO, CLOCK), config)
    }

    /// How transactions ended since the last call.
    fn finished(host: &mut Host<Geodesic, Client>) -> Vec<(Outcome, &'static str)> {
        let ended = |effect| match effect {
            Effect::Finish { outcome, path, .. } => Some((outcome, path)),
            Effect::Send { .. }
            | Effect::Persist { .. }
            | Effect::Checkpoint { .. }
            | Effect::Reads { .. }
            | Effect::Note(_)
            | Effect::Claim(_) => None,
        };
        host.drain().filter_map(ended).collect()
    }

    #[test]
    fn a_session_that_is_ahead_of_all_clocks_is_refused() {
        let (mut host, config) = gateway();
        let key = Key::from("k");
        let begin = |host: &mut Host<Geodesic, Client>, counter, ahead| {
            let id = TxnId::new(ClientId(1), counter);
            let mut txn = Txn::read_only(id, RegionId(0), vec![key.clone()]);
            let floor = Floor { timestamp: CLOCK.now + ahead, is_deletion: false };
            txn.floors.insert(key.clone(), floor);
            host.step(Time::ZERO, CLOCK, Input::Begin(txn));
            finished(host)
        };
        assert_eq!(begin(&mut host, 1, config.clock_ahead_max), [], "a clock may show that");
        let hour = Duration::from_secs(3_500);
        let refused = [(Outcome::Aborted(AbortReason::Overload), FAR_FUTURE)];
        assert_eq!(begin(&mut host, 2, hour), refused);
    }

    /// A scan also says which keys are absent, so it has seen everything up to its timestamp.
    #[test]
    fn a_scan_waits_until_its_timestamp_has_passed_everywhere() {
        let told_at_once = |keys: Vec<Key>| {
            let (mut host, _) = gateway();
            let id = TxnId::new(ClientId(1), 1);
            let txn = Txn::read_only(id, RegionId(0), keys.clone());
            host.step(Time::ZERO, CLOCK, Input::Begin(txn));
            let asked = host.drain().find_map(|effect| {
                let Effect::Send { msg: Msg::ReadOnly { at, .. }, .. } = effect else {
                    return None;
                };
                Some(at)
            });
            let (partition, at) = (PartitionId(0), asked.unwrap());
            for from in [1, 2] {
                let reads = keys.iter().map(|key| (key.clone(), Read::default())).collect();
                let (portion, reads) = (Portion::WHOLE, Some(reads));
                let above = Timestamp::ZERO;
                let msg = Msg::ReadOnlyResult { txn: id, partition, at, portion, reads, above };
                host.step(Time::ZERO, CLOCK, Input::Message { from: NodeId(from), msg });
            }
            let at_once = finished(&mut host).len();
            let later = Clock { now: at + Duration::from_millis(1), ..CLOCK };
            host.fire(Time::ZERO + Duration::from_millis(1), later);
            (at_once, finished(&mut host).len())
        };
        let key = Key::from("k");
        assert_eq!(told_at_once(vec![key.clone()]), (1, 0));
        assert_eq!(told_at_once(vec![Key::from("\0fence0"), key]), (0, 1));
    }

    /// A client decided at one gateway, and again at another one.
    #[test]
    fn who_decides_twice_is_told_that_the_second_decision_is_invalid() {
        let committed = Outcome::Committed(Timestamp(5));
        let told = |decided: &str| {
            let (mut host, _) = gateway();
            let (id, key) = (TxnId::new(ClientId(1), 1), Key::from("k"));
            let txn = Txn::interactive(id, RegionId(0), vec![], vec![key.clone()]);
            let writes = |value: &str| Writes::from([(key.clone(), Some(value.into()))]);
            let decision = Some(Decision::Commit(writes(decided)));
            let resolve = Input::Resolve { txn, reads: Reads::new(), decision };
            host.step(Time::ZERO, CLOCK, resolve);
            let ended = Some(Arc::new(Output { outcome: committed, writes: writes("1") }));
            let answer = Box::new(Answer { ended, ..Answer::default() });
            let (partition, ballot) = (PartitionId(0), Ballot::default());
            let msg = Msg::Promised { txn: id, partition, ballot, answer };
            host.step(Time::ZERO, CLOCK, Input::Message { from: NodeId(1), msg });
            finished(&mut host).into_iter().map(|(outcome, _)| outcome).collect::<Vec<_>>()
        };
        assert_eq!(told("1"), [committed]);
        assert_eq!(told("2"), [Outcome::Aborted(AbortReason::Invalid)]);
    }

    /// Replicas that keep only an outcome cannot tell what a procedure has read: its caller asks again,
    /// for the outcome alone.
    #[test]
    fn an_outcome_without_its_reads_is_not_forgotten() {
        let committed = Outcome::Committed(Timestamp(5));
        let aborted = Outcome::Aborted(AbortReason::Recovery);
        let told = |is_asked_again, outcome| {
            let (mut host, _) = gateway();
            let id = TxnId::new(ClientId(1), 1);
            let ops = vec![Op::Add(Key::from("k"), 1)];
            let txn = Txn::procedure(id, RegionId(0), ops);
            let input = match is_asked_again {
                true => Input::Resolve { txn, reads: Reads::new(), decision: None },
                false => Input::Begin(txn),
            };
            host.step(Time::ZERO, CLOCK, input);
            let answer =
                Answer { is_forgotten: true, has_ended: true, outcome, ..Answer::default() };
            let (partition, ballot) = (PartitionId(0), Ballot::default());
            let msg = Msg::Promised { txn: id, partition, ballot, answer: Box::new(answer) };
            host.step(Time::ZERO, CLOCK, Input::Message { from: NodeId(1), msg });
            finished(&mut host)
        };
        assert_eq!(told(true, Some(committed)), [(committed, "recovered")]);
        assert_eq!(told(true, None), [(Outcome::Unknown, UNKNOWABLE)]);
        assert_eq!(told(false, Some(aborted)), [(aborted, "recovered")]);
        assert_eq!(told(false, Some(committed)), [(Outcome::Unknown, "reads-forgotten")]);
    }

    #[test]
    fn what_waits_for_replicas_is_repeated_when_one_is_there_again() {
        for is_read_only in [false, true] {
            let (mut host, config) = gateway();
            let (id, key) = (TxnId::new(ClientId(1), 1), Key::from("k"));
            let txn = match is_read_only {
                true => Txn::read_only(id, RegionId(0), vec![key]),
                false => Txn::procedure(id, RegionId(0), vec![Op::Add(key, 1)]),
            };
            host.step(Time::ZERO, CLOCK, Input::Begin(txn));
            let asks = |host: &mut Host<Geodesic, Client>| {
                let is_question = |effect| {
                    let Effect::Send { msg, .. } = effect else { return false };
                    let Msg::Several(parts) = msg else { return !matches!(msg, Msg::Ping) };
                    parts.iter().any(|Inner(part)| !matches!(part, Msg::Ping))
                };
                let questions: Vec<bool> = host.drain().map(is_question).collect();
                questions.contains(&true)
            };
            asks(&mut host);
            // Nobody answers for a long time.
            let mut now = Time::ZERO;
            let mut wait = |host: &mut Host<Geodesic, Client>| {
                let began = now;
                loop {
                    now = now + Duration::from_millis(1);
                    host.fire(now, CLOCK);
                    if asks(host) {
                        return (now, now.since(began));
                    }
                }
            };
            for _ in 0..8 {
                wait(&mut host);
            }
            let (_, pause) = wait(&mut host);
            assert!(pause >= config.resend_after * 16, "{pause:?}");
            let (now, _) = wait(&mut host);
            host.step(now, CLOCK, Input::Message { from: NodeId(1), msg: Msg::Pong });
            let (_, pause) = wait(&mut host);
            assert!(pause <= config.resend_after / 2, "{pause:?}");
        }
    }

    /// A link that loses one packet of five lost every answer of nine packets.
    #[test]
    fn a_read_that_is_repeated_asks_in_portions_for_what_is_missing() {
        let (mut host, config) = gateway();
        let clock = CLOCK;
        let keys: Vec<Key> = (10..50).map(|number| Key::from(format!("k{number}"))).collect();
        let id = TxnId::new(ClientId(1), 1);
        let txn = Txn::read_only(id, RegionId(0), keys.clone());
        host.step(Time::ZERO, clock, Input::Begin(txn));
        let asked = |host: &mut Host<Geodesic, Client>| {
            let mut asked: OrdMap<NodeId, Vec<Vec<Key>>> = OrdMap::new();
            let mut is_over = false;
            for effect in host.drain() {
                match effect {
                    Effect::Send { to, msg: Msg::ReadOnly { keys, .. } } => {
                        asked.entry(to).or_default().push(keys);
                    }
                    Effect::Finish { outcome, .. } => {
                        is_over = matches!(outcome, Outcome::Committed(_));
                    }
                    Effect::Send { .. }
                    | Effect::Persist { .. }
                    | Effect::Checkpoint { .. }
                    | Effect::Reads { .. }
                    | Effect::Note(_)
                    | Effect::Claim(_) => {}
                }
            }
            (asked, is_over)
        };
        let (first, _) = asked(&mut host);
        assert_eq!(first.values().cloned().collect::<Vec<_>>(), vec![vec![keys.clone()]; 2]);
        let tell = |host: &mut Host<Geodesic, Client>, now, from, keys: &[Key], number, of| {
            let portion = Portion { sent_at: Time(9), number, of };
            let reads = Some(keys.iter().map(|key| (key.clone(), Read::default())).collect());
            let (partition, at) = (PartitionId(0), clock.now);
            let above = Timestamp::ZERO;
            let msg = Msg::ReadOnlyResult { txn: id, partition, at, portion, reads, above };
            host.step(now, clock, Input::Message { from, msg });
        };
        // One of two parts of one answer arrives.
        tell(&mut host, Time::ZERO, NodeId(1), &keys[..20], 0, 2);
        let later = Time::ZERO + config.resend_after;
        host.fire(later, clock);
        let (again, _) = asked(&mut host);
        assert_eq!(again.len(), 3);
        for (node, portions) in again {
            assert!(portions.iter().all(|keys| keys.len() <= KEYS_AGAIN), "{portions:?}");
            let missing = if node == NodeId(1) { &keys[20..] } else { &keys[..] };
            assert_eq!(portions.concat(), missing, "of {node}");
            for keys in portions {
                tell(&mut host, later, node, &keys, 0, 1);
            }
        }
        assert!(asked(&mut host).1, "it has all answers");
    }
}
