//! The client side of Natto: gives transactions their timestamps, and runs them for the callers of one
//! gateway (§3.1, §3.2).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{NodeId, PartitionId, TxnId};
use orthodrome_core::machine::{Cx, Gauge, Input, Leak, Machine, Setup, UNKNOWABLE};
use orthodrome_core::session::is_below;
use orthodrome_core::time::{Duration, Time, Timestamp};
use orthodrome_core::txn::{AbortReason, Decision, Key, Kind, Outcome, Priority, Read, Reads, Txn};

use super::delays::{Delays, delay, shifted};
use super::leader::Context;
use super::message::{Elsewhere, Msg, Record, Turn};
use super::{Config, Level, Natto, Note, Timer};
use crate::gateway::{Participant, Snapshot, Snapshots, coordinator_of, split};
use crate::routes::Routes;
use crate::waiting::RetryState;

/// The client side of Natto.
#[derive(Debug)]
pub struct Client {
    node: NodeId,
    cluster: Arc<Cluster>,
    config: Arc<Config>,
    routes: Routes,
    open: BTreeMap<TxnId, Open>,
    /// Those of a higher priority than they came with.
    promoted: BTreeSet<TxnId>,
    beats: bool,
    delays: Delays,
    /// When delays were last of use; none while they are not measured.
    probing: Option<Time>,
}

/// A transaction under way.
#[derive(Debug)]
struct Open {
    txn: Txn,
    participants: BTreeMap<PartitionId, Participant>,
    coordinator: PartitionId,
    reads: Reads,
    /// Participants that have not answered.
    silent: BTreeSet<PartitionId>,
    phase: Phase,
    begun: Time,
    /// When the unanswered requests were last sent.
    asked: RetryState,
    /// When it is to be processed everywhere, and how much it matters.
    turn: Turn,
    /// When it should be at each participant.
    arrivals: BTreeMap<PartitionId, Timestamp>,
    /// Participants whose answers may not hold: they stand on a condition, or are from elsewhere.
    provisional: BTreeSet<PartitionId>,
    /// How often the coordinator was asked to commit.
    round: u32,
    /// An answer did not hold, and its caller was told it.
    is_stale: bool,
    /// The caller lost track of it: what it knows of its reads are versions at most.
    is_resolved: bool,
}

#[derive(Debug)]
enum Phase {
    /// Waiting for reads.
    Reading,
    /// The caller thinks.
    Deciding,
    /// The coordinator was asked to commit or abort.
    Ending(Decision),
    /// The caller lost track, and had not decided.
    Resolving,
    /// A read-only transaction.
    Snapshotting(Snapshots),
}

impl Machine<Natto> for Client {
    fn new(setup: Setup<Natto>, _recovered: Vec<Record>, _cx: &mut Cx<'_, Natto>) -> Self {
        // A gateway keeps nothing: a caller whose gateway died resolves through another.
        Self {
            node: setup.node,
            routes: Routes::new(setup.cluster.clone()),
            cluster: setup.cluster,
            config: setup.config,
            open: BTreeMap::new(),
            promoted: BTreeSet::new(),
            beats: false,
            delays: Delays::default(),
            probing: None,
        }
    }

    fn step(&mut self, input: Input<Natto>, cx: &mut Cx<'_, Natto>) {
        match input {
            Input::Begin(txn) => self.on_begin(txn, cx),
            // Nothing waits for one: general transactions are refused.
            Input::Read { .. } => {}
            Input::Decide { txn, decision } => self.on_decide(txn, decision, cx),
            Input::Resolve { txn, reads, decision } => {
                self.on_resolve_request(txn, reads, decision, cx);
            }
            Input::Message { from, msg } => self.on_message(from, msg, cx),
            Input::Timer(Timer::Resend(txn)) => self.on_resend_timeout(txn, cx),
            Input::Timer(Timer::Heartbeat) => self.on_heartbeat_timeout(cx),
            Input::Timer(Timer::Probe) => self.on_probe_timeout(cx),
            Input::Timer(
                Timer::Replication(..) | Timer::Sweep(_) | Timer::Turn(_) | Timer::CommitWait(_),
            )
            | Input::Durable(_)
            | Input::Admin(_) => unreachable!("a server's input at a client"),
        }
    }

    fn flush(&mut self, _cx: &mut Cx<'_, Natto>) {}

    fn gauges(&self, now: Time) -> Vec<Gauge> {
        self.delays.gauges(now)
    }

    fn leaks(&self) -> Vec<Leak> {
        vec![("open transactions", self.open.len())]
    }

    fn assert_invariants(&self) {
        for (id, open) in &self.open {
            assert!(
                open.silent.iter().all(|partition| open.participants.contains_key(partition)),
                "{id} waits for a partition that takes no part"
            );
        }
    }
}

impl Client {
    fn open(&self, txn: Txn, now: Time) -> Open {
        let participants = split(&self.cluster, &txn.reads, &txn.writes);
        let coordinator =
            coordinator_of(&self.cluster, txn.id, txn.home, participants.keys().copied());
        Open {
            // Blind writes need no answer before the caller can go on.
            silent: participants
                .values()
                .filter(|participant| !participant.reads.is_empty())
                .map(|participant| participant.partition)
                .collect(),
            participants,
            coordinator,
            reads: Reads::new(),
            phase: Phase::Reading,
            begun: now,
            asked: RetryState::new(now),
            turn: Turn::default(),
            arrivals: BTreeMap::new(),
            provisional: BTreeSet::new(),
            round: 0,
            is_stale: false,
            is_resolved: false,
            txn,
        }
    }

    /// Starts a transaction: one message to each participant leader, one to the coordinator.
    fn on_begin(&mut self, txn: Txn, cx: &mut Context<'_>) {
        let id = txn.id;
        if self.open.contains_key(&id) {
            // Begun here already: its answers will come.
            return;
        }
        if matches!(txn.kind, Kind::General) {
            cx.finish(id, Outcome::Aborted(AbortReason::Invalid), "refused");
            return;
        }
        let mut open = self.open(txn, cx.now());
        self.keep_measuring(cx);
        if !open.txn.is_read_only() {
            open.turn = self.turn(&mut open, cx);
        } else {
            open.phase = Phase::Snapshotting(Snapshots::default());
        }
        self.open.insert(id, open);
        self.send_first(id, cx);
        cx.set_timer(Timer::Resend(id), cx.now() + self.config.resend_after);
        if !std::mem::replace(&mut self.beats, true) {
            cx.set_timer(Timer::Heartbeat, cx.now() + self.config.heartbeat_interval);
        }
        if self.open.get(&id).is_some_and(|open| open.silent.is_empty()) {
            self.on_all_answered(id, cx);
        }
    }

    /// Sends what a transaction begins with.
    fn send_first(&mut self, id: TxnId, cx: &mut Context<'_>) {
        let Some(open) = self.open.get(&id) else { return };
        if open.participants.is_empty() || !matches!(open.phase, Phase::Reading) {
            self.send_outstanding(id, cx);
            return;
        }
        for &partition in open.participants.keys() {
            self.send_prepare(open, partition, cx);
        }
        self.send_coordinator_prepare(open, cx);
    }

    /// Sends whatever has not been answered yet.
    fn send_outstanding(&mut self, id: TxnId, cx: &mut Context<'_>) {
        let Some(open) = self.open.get(&id) else { return };
        match &open.phase {
            Phase::Reading if !open.participants.is_empty() => {
                for partition in &open.silent {
                    self.send_prepare(open, *partition, cx);
                }
                self.send_coordinator_prepare(open, cx);
            }
            Phase::Reading | Phase::Deciding => {}
            Phase::Ending(_) | Phase::Resolving => self.send_end(open, cx),
            Phase::Snapshotting(snapshots) => {
                for &partition in &open.silent {
                    self.send_read_only(open, snapshots, partition, cx);
                }
            }
        }
    }

    fn send_read_only(
        &self,
        open: &Open,
        snapshots: &Snapshots,
        partition: PartitionId,
        cx: &mut Context<'_>,
    ) {
        let Some(participant) = open.participants.get(&partition) else { return };
        let (keys, at_least) = (participant.reads.clone(), snapshots.at_least);
        let read = Msg::ReadOnly { txn: open.txn.id, partition, keys, at_least };
        cx.send(self.routes.leader(partition), read);
    }

    /// §3.2: the transaction's turn is when it should have arrived at every participant, and the same for
    /// all requests of this attempt. A later attempt gets one of its own (N10), and in time a higher
    /// priority, so that nobody starves (§3.3.1).
    fn turn(&mut self, open: &mut Open, cx: &mut Context<'_>) -> Turn {
        let clock = cx.clock().now;
        let mut furthest = i64::MIN;
        for &partition in open.participants.keys() {
            let delay = self.delay(partition, cx);
            open.arrivals.insert(partition, shifted(clock, delay));
            furthest = furthest.max(delay);
        }
        let timestamp = shifted(clock, if furthest == i64::MIN { 0 } else { furthest });
        let Config { levels, promote_after, promoted_max, .. } = *self.config;
        let own = open.txn.priority.0;
        let promoted = open.txn.id.attempt.checked_div(promote_after).unwrap_or(0);
        let highest = levels.saturating_sub(1);
        let level = u32::from(own).saturating_add(promoted);
        let mut level = u8::try_from(level).unwrap_or(u8::MAX).min(highest);
        if level > own && self.promoted.len() < promoted_max {
            cx.note(Note::Promoted);
            self.promoted.insert(open.txn.id);
        } else {
            level = own.min(highest);
        }
        Turn { timestamp, priority: Priority(level) }
    }

    /// How long a message takes to whoever leads `partition`, by the difference of the clocks: as
    /// measured, or as the map says until something is.
    fn delay(&mut self, partition: PartitionId, cx: &mut Context<'_>) -> i64 {
        let leader = self.routes.leader(partition);
        let Config { probe_window, probe_refresh, .. } = *self.config;
        let measured = self.delays.estimate(leader, probe_window, probe_refresh, cx.now());
        measured.unwrap_or_else(|| {
            cx.note(Note::Unmeasured);
            let region = |node| self.cluster.region_of(node);
            delay(self.cluster.topology.rtt(region(self.node), region(leader)) / 2)
        })
    }

    /// §3.3.1: how long after its turn a transaction needs its keys at `partition`, by the map: until
    /// its answers are here and its commit request replicated, or until the last vote is, and the word of
    /// that is there.
    fn lasts(&self, open: &Open, partition: PartitionId) -> Duration {
        let region = |partition| self.cluster.region_of(self.routes.leader(partition));
        let way = |from, to| self.cluster.topology.rtt(from, to) / 2;
        let (here, decides) = (self.cluster.region_of(self.node), region(open.coordinator));
        let participants = || open.participants.keys().copied();
        let answered = participants().map(|p| way(region(p), here)).max().unwrap_or_default();
        let requested = answered + way(here, decides) + self.majority(open.coordinator);
        let vote = |p| self.majority(p) + way(region(p), decides);
        let voted = participants().map(vote).max().unwrap_or_default();
        requested.max(voted) + way(decides, region(partition))
    }

    /// §3.3.2: what the transaction touches at other participants, and when it should be there.
    fn elsewhere(&self, open: &Open, partition: PartitionId) -> Vec<Elsewhere> {
        if self.config.level < Level::ConditionalPrepare {
            return Vec::new();
        }
        let others = open.participants.values().filter(|other| other.partition != partition);
        let arrival = |other: &Participant| {
            let arrives = open.arrivals.get(&other.partition).copied().unwrap_or_default();
            Elsewhere { participant: other.clone(), arrives }
        };
        others.map(arrival).collect()
    }

    /// How long it takes to replicate something in a partition's group.
    fn majority(&self, partition: PartitionId) -> Duration {
        let leader = self.routes.leader(partition);
        let from = self.cluster.region_of(leader);
        let voters = self.routes.voters(partition);
        let others = voters.iter().filter(|&&node| node != leader);
        let mut away: Vec<Duration> = others
            .map(|&node| self.cluster.topology.rtt(from, self.cluster.region_of(node)))
            .collect();
        away.sort_unstable();
        let last = away.len().div_ceil(2).checked_sub(1);
        last.and_then(|last| away.get(last)).copied().unwrap_or_default()
    }

    /// Delays are measured from the first transaction on, until none has come for a while.
    fn keep_measuring(&mut self, cx: &mut Context<'_>) {
        if self.probing.replace(cx.now()).is_none() {
            self.on_probe_timeout(cx);
        }
    }

    /// §4: probes everybody who leads something. Lost probes are not missed: the next ones are on their
    /// way already.
    fn on_probe_timeout(&mut self, cx: &mut Context<'_>) {
        let now = cx.now();
        let is_of_use = self.probing.is_some_and(|used| now.since(used) < self.config.probe_idle);
        if !is_of_use {
            self.probing = None;
            self.delays.clear();
            return;
        }
        let partitions = self.cluster.partitions();
        let leaders: BTreeSet<NodeId> = partitions.map(|p| self.routes.leader(p.id)).collect();
        for leader in leaders {
            self.delays.sent(leader);
            cx.send(leader, Msg::Probe { clock: cx.clock().now });
        }
        cx.set_timer(Timer::Probe, now + self.config.probe_interval);
    }

    fn send_prepare(&self, open: &Open, partition: PartitionId, cx: &mut Context<'_>) {
        let Some(participant) = open.participants.get(&partition) else { return };
        let prepare = Msg::ReadAndPrepare {
            txn: open.txn.id,
            participant: participant.clone(),
            coordinator: open.coordinator,
            turn: open.turn,
            lasts: self.lasts(open, partition),
            elsewhere: self.elsewhere(open, partition),
            acknowledged_below: open.txn.acknowledged_below,
        };
        cx.send(self.routes.leader(partition), prepare);
    }

    fn send_coordinator_prepare(&self, open: &Open, cx: &mut Context<'_>) {
        let prepare = Msg::CoordinatorPrepare {
            txn: open.txn.id,
            coordinator: open.coordinator,
            participants: open.participants.keys().copied().collect(),
            acknowledged_below: open.txn.acknowledged_below,
        };
        cx.send(self.routes.leader(open.coordinator), prepare);
    }

    /// Asks the coordinator to end the transaction as its caller decided, or to say how it ended.
    fn send_end(&self, open: &Open, cx: &mut Context<'_>) {
        let (txn, coordinator) = (open.txn.id, open.coordinator);
        let participants: Vec<PartitionId> = open.participants.keys().copied().collect();
        let msg = match &open.phase {
            Phase::Ending(Decision::Commit(writes)) => {
                let versions = open.reads.iter().map(|(key, read)| (key.clone(), read.version));
                let (writes, versions) = (writes.clone(), versions.collect());
                let (round, is_provisional) = (open.round, !open.provisional.is_empty());
                Msg::Commit {
                    txn,
                    coordinator,
                    participants,
                    writes,
                    versions,
                    round,
                    is_provisional,
                }
            }
            Phase::Ending(Decision::Abort) => {
                let Open { round, is_stale, .. } = *open;
                Msg::Abort { txn, coordinator, participants, round, is_stale }
            }
            Phase::Resolving => Msg::Resolve { txn, coordinator, participants },
            Phase::Reading | Phase::Deciding | Phase::Snapshotting(_) => return,
        };
        cx.send(self.routes.leader(coordinator), msg);
    }

    fn on_message(&mut self, from: NodeId, msg: Msg, cx: &mut Context<'_>) {
        if let Some(led) = msg.led_by_sender() {
            self.routes.learn(led, from, cx.now());
        }
        match msg {
            Msg::ReadResult { txn, partition, reads, is_provisional } => {
                self.on_read_result(txn, partition, reads, is_provisional, cx);
            }
            Msg::ForwardedRead { txn, partition, reads } => {
                self.on_read_result(txn, partition, reads, true, cx);
            }
            // That it waits is no answer, but a sign that somebody is there.
            Msg::Waiting { .. } => {}
            Msg::ProbeReply { delay } => {
                self.delays.record(from, delay, self.config.probe_window, cx.now());
            }
            Msg::Decided { txn, outcome } => {
                if let Some(open) = self.open.get(&txn) {
                    self.routes.learn(open.coordinator, from, cx.now());
                    if outcome == Outcome::Aborted(AbortReason::Recovery) {
                        // Some participant never got the prepare. One that is only written to owes
                        // no answer, so this is the only sign that its leader may be gone.
                        for &partition in open.participants.keys() {
                            self.routes.suspect(partition, open.begun, cx.now());
                        }
                    }
                    // It ended before its reads were known to hold, or not.
                    let path = match outcome {
                        Outcome::Unknown => UNKNOWABLE,
                        Outcome::Committed(_) | Outcome::Aborted(_)
                            if open.provisional.is_empty() =>
                        {
                            "normal"
                        }
                        Outcome::Committed(_) | Outcome::Aborted(_) => "provisional",
                    };
                    self.finish(txn, outcome, path, cx);
                }
            }
            Msg::ReadOnlyResult { txn, is_too_much: true, .. } => self.on_too_much(txn, cx),
            Msg::ReadOnlyResult { txn, partition, snapshot, is_too_much: false } => {
                self.on_read_only_result(txn, partition, snapshot, cx);
            }
            Msg::Members { partition, since, voters } => {
                self.routes.learn_voters(partition, since, &voters);
            }
            Msg::NotLeader { partition, leader, txn } => {
                self.on_not_leader(from, partition, leader, txn, cx);
            }
            Msg::ReadAndPrepare { .. }
            | Msg::CoordinatorPrepare { .. }
            | Msg::Commit { .. }
            | Msg::Abort { .. }
            | Msg::Heartbeat { .. }
            | Msg::Resolve { .. }
            | Msg::PrepareResult { .. }
            | Msg::Writeback { .. }
            | Msg::WritebackAck { .. }
            | Msg::QueryPrepare { .. }
            | Msg::QueryDecision { .. }
            | Msg::MayForget { .. }
            | Msg::Forget { .. }
            | Msg::ReadOnly { .. }
            | Msg::ForwardRead { .. }
            | Msg::Probe { .. }
            | Msg::Replication { .. } => unreachable!("a server's message at a client"),
        }
    }

    /// One participant's values. The first that come are used; those that hold for good may follow.
    fn on_read_result(
        &mut self,
        txn: TxnId,
        partition: PartitionId,
        reads: Vec<(Key, Read)>,
        is_provisional: bool,
        cx: &mut Context<'_>,
    ) {
        let Some(open) = self.open.get_mut(&txn) else { return };
        if is_below(&open.txn.floors, reads.iter().map(|(key, read)| (key, read))) {
            // From a leader that was deposed (R11).
            cx.note(Note::BehindClient);
            return;
        }
        if matches!(open.phase, Phase::Reading) && open.silent.remove(&partition) {
            open.reads.extend(reads);
            if is_provisional {
                cx.note(Note::Provisional);
                open.provisional.insert(partition);
            }
            if open.silent.is_empty() {
                self.on_all_answered(txn, cx);
            }
        } else if !is_provisional && open.provisional.remove(&partition) {
            let is_known = |(key, read): &(Key, Read)| {
                open.reads.get(key).is_some_and(|known| known.version == read.version)
            };
            if !reads.iter().all(is_known) {
                self.on_reads_changed(txn, reads, cx);
            }
        }
        // Else a repetition: the caller may have computed from the first answer.
    }

    /// §3.3.2: what was read on a condition, or from elsewhere, does not hold. A procedure is computed
    /// anew; a caller that was told has to begin again.
    fn on_reads_changed(&mut self, id: TxnId, reads: Vec<(Key, Read)>, cx: &mut Context<'_>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        cx.note(Note::ReadsChanged);
        match (&open.phase, &open.txn.kind) {
            (Phase::Reading, _) => open.reads.extend(reads),
            (Phase::Ending(Decision::Commit(_)), Kind::Procedure(ops)) => {
                open.reads.extend(reads);
                let decision = match Txn::execute(ops, &open.reads) {
                    Ok(writes) => Decision::Commit(writes),
                    Err(_) => Decision::Abort,
                };
                self.end(id, decision, cx);
            }
            (Phase::Ending(Decision::Commit(_)), _) => {
                open.is_stale = true;
                self.end(id, Decision::Abort, cx);
            }
            (Phase::Deciding, _) => open.is_stale = true,
            (Phase::Ending(Decision::Abort) | Phase::Resolving | Phase::Snapshotting(_), _) => {}
        }
    }

    /// The read round is complete: ask the caller, or compute in its stead.
    fn on_all_answered(&mut self, id: TxnId, cx: &mut Context<'_>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        match (&open.phase, &open.txn.kind) {
            (Phase::Snapshotting(_), _) => self.on_snapshot_complete(id, cx),
            (_, Kind::Interactive) => {
                cx.reads(id, open.reads.clone());
                open.phase = Phase::Deciding;
                cx.cancel_timer(Timer::Resend(id));
            }
            (_, Kind::Procedure(ops)) => {
                let decision = match Txn::execute(ops, &open.reads) {
                    Ok(writes) => Decision::Commit(writes),
                    Err(_) => Decision::Abort,
                };
                self.end(id, decision, cx);
            }
            (_, Kind::ReadOnly | Kind::StaleReadOnly) => {
                unreachable!("a read-only transaction takes its own path")
            }
            (_, Kind::General) => unreachable!("a general transaction is refused"),
        }
    }

    /// The caller of an interactive transaction has decided.
    fn on_decide(&mut self, id: TxnId, decision: Decision, cx: &mut Context<'_>) {
        let Some(open) = self.open.get(&id) else { return };
        match open.phase {
            Phase::Deciding => {}
            Phase::Reading if decision == Decision::Abort => {}
            Phase::Reading | Phase::Ending(_) | Phase::Resolving | Phase::Snapshotting(_) => {
                return;
            }
        }
        if open.is_stale {
            self.end(id, Decision::Abort, cx);
            return;
        }
        if let Decision::Commit(writes) = &decision
            && !open.txn.declares(writes)
        {
            self.end(id, Decision::Abort, cx);
            return;
        }
        if open.participants.is_empty() {
            let outcome = match decision {
                Decision::Commit(_) => Outcome::Committed(cx.clock().now),
                Decision::Abort => Outcome::Aborted(AbortReason::Client),
            };
            self.finish(id, outcome, "empty", cx);
            return;
        }
        self.end(id, decision, cx);
    }

    /// Asks the coordinator to commit or abort.
    fn end(&mut self, id: TxnId, decision: Decision, cx: &mut Context<'_>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        if let Decision::Commit(_) = decision {
            open.round += 1;
        }
        open.phase = Phase::Ending(decision);
        self.ask(id, cx);
    }

    /// Sends what a new phase or round asks for.
    fn ask(&mut self, id: TxnId, cx: &mut Context<'_>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        open.asked = RetryState::new(cx.now());
        self.send_outstanding(id, cx);
        cx.set_timer(Timer::Resend(id), cx.now() + self.config.resend_after);
    }

    /// A caller lost track of a transaction that it began here or elsewhere.
    fn on_resolve_request(
        &mut self,
        txn: Txn,
        reads: Reads,
        decision: Option<Decision>,
        cx: &mut Context<'_>,
    ) {
        let id = txn.id;
        let mut open = self.open(txn, cx.now());
        if open.txn.is_read_only() || matches!(open.txn.kind, Kind::General) {
            // It changes nothing, so it can simply be read again; or it is refused again.
            self.open.remove(&id);
            self.on_begin(open.txn, cx);
            return;
        }
        if open.participants.is_empty() {
            cx.finish(id, Outcome::Committed(cx.clock().now), "empty");
            return;
        }
        open.reads = reads;
        open.is_resolved = true;
        open.silent.clear();
        open.phase = match decision {
            Some(Decision::Commit(writes)) if open.txn.declares(&writes) => {
                open.round = 1;
                Phase::Ending(Decision::Commit(writes))
            }
            Some(Decision::Commit(_) | Decision::Abort) => Phase::Ending(Decision::Abort),
            None => Phase::Resolving,
        };
        self.open.insert(id, open);
        self.ask(id, cx);
    }

    /// A part of what a read-only transaction reads is more than one answer may tell.
    fn on_too_much(&mut self, id: TxnId, cx: &mut Context<'_>) {
        if let Some(open) = self.open.get(&id)
            && matches!(open.phase, Phase::Snapshotting(_))
        {
            self.finish(id, Outcome::Aborted(AbortReason::TooLarge), "read-only", cx);
        }
    }

    /// One participant's part of a read-only transaction.
    fn on_read_only_result(
        &mut self,
        id: TxnId,
        partition: PartitionId,
        snapshot: Snapshot,
        cx: &mut Context<'_>,
    ) {
        let Some(open) = self.open.get_mut(&id) else { return };
        let Phase::Snapshotting(snapshots) = &mut open.phase else { return };
        if !snapshots.is_current(&snapshot) || !open.silent.remove(&partition) {
            return;
        }
        snapshots.insert(partition, snapshot);
        if open.silent.is_empty() {
            self.on_snapshot_complete(id, cx);
        }
    }

    /// Every part is here: done, or some are asked again.
    fn on_snapshot_complete(&mut self, id: TxnId, cx: &mut Context<'_>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        let Phase::Snapshotting(snapshots) = &mut open.phase else { return };
        match snapshots.complete(&open.txn) {
            Ok((reads, outcome)) => {
                let path = snapshots.path();
                open.reads = reads;
                self.finish(id, outcome, path, cx);
            }
            Err(short) => {
                cx.note(Note::SecondRound);
                open.silent.extend(short);
                self.ask(id, cx);
            }
        }
    }

    /// Tells the caller, and forgets.
    fn finish(&mut self, id: TxnId, outcome: Outcome, path: &'static str, cx: &mut Context<'_>) {
        let Some(open) = self.open.remove(&id) else { return };
        self.promoted.remove(&id);
        cx.cancel_timer(Timer::Resend(id));
        let mut outcome = outcome;
        match (&open.txn.kind, &open.phase, outcome) {
            // What the procedure refuses looks like the client's own abort to the coordinator.
            (
                Kind::Procedure(ops),
                Phase::Ending(Decision::Abort),
                Outcome::Aborted(AbortReason::Client),
            ) => {
                let reason = Txn::execute(ops, &open.reads).err().unwrap_or(AbortReason::Guard);
                outcome = Outcome::Aborted(reason);
            }
            (
                Kind::Procedure(_) | Kind::ReadOnly | Kind::StaleReadOnly,
                _,
                Outcome::Committed(_),
            ) if !open.is_resolved => {
                cx.reads(id, open.reads);
            }
            _ => {}
        }
        cx.finish(id, outcome, path);
    }

    fn on_not_leader(
        &mut self,
        from: NodeId,
        partition: PartitionId,
        leader: Option<NodeId>,
        txn: Option<TxnId>,
        cx: &mut Context<'_>,
    ) {
        if !self.routes.redirect(partition, from, leader, cx.now()) {
            return;
        }
        let Some(open) = txn.and_then(|txn| self.open.get(&txn)) else { return };
        match &open.phase {
            Phase::Reading => {
                if open.silent.contains(&partition) {
                    self.send_prepare(open, partition, cx);
                }
                if open.coordinator == partition {
                    self.send_coordinator_prepare(open, cx);
                }
            }
            Phase::Deciding => {
                if open.coordinator == partition {
                    self.send_coordinator_prepare(open, cx);
                }
            }
            Phase::Ending(_) | Phase::Resolving => {
                if open.coordinator == partition {
                    self.send_end(open, cx);
                }
            }
            Phase::Snapshotting(snapshots) => {
                if open.silent.contains(&partition) {
                    self.send_read_only(open, snapshots, partition, cx);
                }
            }
        }
    }

    /// Nobody answered for a while: ask somebody else, and more patiently each time.
    fn on_resend_timeout(&mut self, id: TxnId, cx: &mut Context<'_>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        cx.note(Note::Resent);
        let asked = open.asked.at;
        open.asked = open.asked.again(cx.now());
        let timeout = open.asked.timeout(self.config.resend_after);
        match &open.phase {
            Phase::Reading | Phase::Snapshotting(_) => {
                for &partition in &open.silent {
                    self.routes.suspect(partition, asked, cx.now());
                }
                self.routes.suspect(open.coordinator, asked, cx.now());
            }
            Phase::Ending(_) | Phase::Resolving => {
                self.routes.suspect(open.coordinator, asked, cx.now());
            }
            Phase::Deciding => {}
        }
        self.send_outstanding(id, cx);
        cx.set_timer(Timer::Resend(id), cx.now() + timeout);
    }

    /// Carousel §4.3.1: tells each coordinator whose callers are alive.
    fn on_heartbeat_timeout(&mut self, cx: &mut Context<'_>) {
        let now = cx.now();
        let interval = self.config.heartbeat_interval;
        let mut beats: BTreeMap<PartitionId, Vec<TxnId>> = BTreeMap::new();
        for open in self.open.values() {
            let is_undecided = matches!(open.phase, Phase::Reading | Phase::Deciding);
            if is_undecided && now.since(open.begun) >= interval / 2 {
                beats.entry(open.coordinator).or_default().push(open.txn.id);
            }
        }
        for (coordinator, txns) in beats {
            cx.send(self.routes.leader(coordinator), Msg::Heartbeat { coordinator, txns });
        }
        self.beats = !self.open.is_empty();
        if self.beats {
            cx.set_timer(Timer::Heartbeat, now + interval);
        }
    }
}

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.open.is_empty() {
            return f.write_str("idle");
        }
        for (at, (id, open)) in self.open.iter().enumerate() {
            let separator = if at == 0 { "" } else { " | " };
            let phase = match &open.phase {
                Phase::Reading => "reading",
                Phase::Deciding => "deciding",
                Phase::Ending(Decision::Commit(_)) => "committing",
                Phase::Ending(Decision::Abort) => "aborting",
                Phase::Resolving => "resolving",
                Phase::Snapshotting(_) => "snapshotting",
            };
            write!(f, "{separator}{id} {phase} via {}", open.coordinator)?;
            if !open.silent.is_empty() {
                write!(f, " waits {:?}", open.silent)?;
            }
        }
        Ok(())
    }
}
