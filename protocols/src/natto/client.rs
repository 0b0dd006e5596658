//! The client side of Natto: the hooks of [`commit`](crate::commit). It gives transactions their
//! timestamps, and handles provisional reads (§3.1 to §3.4).

use std::sync::Arc;

use orthodrome_core::id::{NodeId, PartitionId, TxnId};
use orthodrome_core::machine::{Gauge, Setup, UNKNOWABLE};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::session::is_below;
use orthodrome_core::time::{Duration, Time, Timestamp};
use orthodrome_core::txn::{Decision, Key, Kind, Outcome, Priority, Read};

use super::leader::Context;
use super::message::{Elsewhere, Msg, Turn};
use super::{Config, Level, Natto, Note, Timer};
use crate::commit::{self, Gateway, Phase};
use crate::delays::{Delays, delay, shifted};
use crate::gateway::Participant;

/// The client side of Natto.
pub type Client = commit::Client<Own>;
/// A pending transaction.
type Open = commit::Open<Own>;

/// Natto's own state at a gateway, besides the transactions.
#[derive(Debug, Default)]
pub struct Own {
    /// Transactions with a higher priority than their clients requested.
    promoted: OrdSet<TxnId>,
    delays: Delays,
    /// When delays were last needed; none while they are not measured.
    probing: Option<Time>,
}

/// The state of a pending transaction.
#[derive(Debug, Default)]
pub struct More {
    /// When all participants process it, and its priority.
    turn: Turn,
    /// When it should arrive at each participant.
    arrivals: OrdMap<PartitionId, Timestamp>,
    /// Participants whose answers are provisional: they depend on a condition, or were forwarded.
    provisional: OrdSet<PartitionId>,
    /// How often the coordinator was asked to commit.
    round: u32,
    /// True if an answer turned out to be wrong after the client had received it.
    is_stale: bool,
}

impl Gateway for Own {
    commit::gateway_items!();

    type Protocol = Natto;
    type More = More;

    fn new(_: &Setup<Natto>) -> Self {
        Self::default()
    }

    fn on_begun(client: &mut Client, open: &mut Open, cx: &mut Context<'_>) {
        client.keep_measuring(cx);
        if !open.txn.is_read_only() {
            open.more.turn = client.turn(open, cx);
        }
    }

    fn send_prepare(client: &Client, open: &Open, partition: PartitionId, cx: &mut Context<'_>) {
        let participant = open.participant(partition);
        let prepare = Msg::ReadAndPrepare {
            txn: open.txn.id,
            participant: participant.clone(),
            coordinator: open.coordinator,
            turn: open.more.turn,
            lasts: client.lasts(open, partition),
            elsewhere: client.elsewhere(open, partition),
            acknowledged_below: open.txn.acknowledged_below,
        };
        cx.send(client.routes.leader(partition), prepare);
    }

    fn coordinator_message(open: &Open) -> Option<Msg> {
        Some(Msg::CoordinatorPrepare {
            txn: open.txn.id,
            coordinator: open.coordinator,
            participants: Arc::new(open.participants.keys().copied().collect()),
            acknowledged_below: open.txn.acknowledged_below,
        })
    }

    fn end_message(open: &Open, decision: &Decision) -> Msg {
        let (txn, coordinator) = (open.txn.id, open.coordinator);
        let participants = open.participants.keys().copied().collect();
        let More { round, is_stale, .. } = open.more;
        match decision {
            Decision::Commit(writes) => {
                let versions = open.reads.iter().map(|(key, read)| (key.clone(), read.compared()));
                let (writes, versions) = (writes.clone(), versions.collect());
                let is_provisional = !open.more.provisional.is_empty();
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
            Decision::Abort => Msg::Abort { txn, coordinator, participants, round, is_stale },
        }
    }

    fn heartbeat_message(_: &Client, coordinator: PartitionId, txns: Vec<TxnId>) -> Msg {
        Msg::Heartbeat { coordinator, txns }
    }

    fn on_timer(client: &mut Client, timer: Timer, cx: &mut Context<'_>) {
        match timer {
            Timer::Resend(txn) => client.on_resend_timeout(txn, cx),
            Timer::Heartbeat => client.on_heartbeat_timeout(cx),
            Timer::Probe => client.on_probe_timeout(cx),
            Timer::Replication(..) | Timer::Sweep(_) | Timer::Turn(_) | Timer::CommitWait(_) => {
                unreachable!("a server's timer at a client")
            }
        }
    }

    fn is_stale(open: &Open) -> bool {
        open.more.is_stale
    }

    /// N5: each commit request is based on later reads than the previous one.
    fn carry_out(client: &mut Client, id: TxnId, decision: Decision, cx: &mut Context<'_>) {
        if let Decision::Commit(_) = decision {
            client.at_mut(id).more.round += 1;
        }
        client.end(id, decision, cx);
    }

    fn on_finished(client: &mut Client, txn: TxnId, _: Outcome) {
        client.own.promoted.remove(&txn);
    }

    fn gauges(&self, now: Time) -> Vec<Gauge> {
        self.delays.gauges(now)
    }
}

impl Client {
    /// §3.2: the transaction's turn is the time when it should have arrived at every participant,
    /// the same for all requests of this attempt. A later attempt gets a new turn (N10), and
    /// eventually a higher priority, so that no transaction starves (§3.3.1).
    fn turn(&mut self, open: &mut Open, cx: &mut Context<'_>) -> Turn {
        let clock = cx.clock().now;
        let mut furthest = i64::MIN;
        for &partition in open.participants.keys() {
            let delay = self.delay(partition, cx);
            open.more.arrivals.insert(partition, shifted(clock, delay));
            furthest = furthest.max(delay);
        }
        let timestamp = shifted(clock, if furthest == i64::MIN { 0 } else { furthest });
        let Config { levels, promote_after, promoted_max, .. } = *self.config;
        let own = open.txn.priority.0;
        let promoted = open.txn.id.attempt.checked_div(promote_after).unwrap_or(0);
        let highest = levels.saturating_sub(1);
        let level = u32::from(own).saturating_add(promoted);
        let mut level = u8::try_from(level).unwrap_or(u8::MAX).min(highest);
        if level > own && self.own.promoted.len() < promoted_max {
            cx.note(Note::Promoted);
            self.own.promoted.insert(open.txn.id);
        } else {
            level = own.min(highest);
        }
        Turn { timestamp, priority: Priority(level) }
    }

    /// How long a message takes to the leader of `partition`, as a difference of clocks: as
    /// measured, or from the topology until there is a measurement.
    fn delay(&mut self, partition: PartitionId, cx: &mut Context<'_>) -> i64 {
        let leader = self.routes.leader(partition);
        let Config { probe_window, probe_refresh, .. } = *self.config;
        let measured = self.own.delays.estimate(leader, probe_window, probe_refresh, cx.now());
        measured.unwrap_or_else(|| {
            cx.note(Note::Unmeasured);
            let region = |node| self.cluster.region_of(node);
            delay(self.cluster.topology.rtt(region(self.node), region(leader)) / 2)
        })
    }

    /// §3.3.1: how long after its turn a transaction needs its keys at `partition`, according to
    /// the topology. It needs them until the answers have arrived and its commit request is
    /// replicated, or until the last vote has arrived, plus the way of the decision.
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

    /// §3.3.2: the transaction's keys at other participants, and when it should arrive there.
    fn elsewhere(&self, open: &Open, partition: PartitionId) -> Vec<Elsewhere> {
        if self.config.level < Level::ConditionalPrepare {
            return Vec::new();
        }
        let others = open.participants.values().filter(|other| other.partition != partition);
        let arrival = |other: &Participant| {
            let arrives = open.more.arrivals.get(&other.partition).copied().unwrap_or_default();
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

    /// Delays are measured from the first transaction on, until no transaction has come for a
    /// while.
    fn keep_measuring(&mut self, cx: &mut Context<'_>) {
        if self.own.probing.replace(cx.now()).is_none() {
            self.on_probe_timeout(cx);
        }
    }

    /// §4: probes all nodes that lead something. Lost probes do not matter: the next ones are
    /// already in flight.
    fn on_probe_timeout(&mut self, cx: &mut Context<'_>) {
        let now = cx.now();
        let is_of_use =
            self.own.probing.is_some_and(|used| now.since(used) < self.config.probe_idle);
        if !is_of_use {
            self.own.probing = None;
            self.own.delays.clear();
            return;
        }
        let partitions = self.cluster.partitions();
        let leaders: OrdSet<NodeId> = partitions.map(|p| self.routes.leader(p.id)).collect();
        for leader in leaders {
            self.own.delays.sent(leader);
            cx.send(leader, Msg::Probe { clock: cx.clock().now });
        }
        cx.set_timer(Timer::Probe, now + self.config.probe_interval);
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
            // It waits. That is no answer, but it shows that the participant is alive.
            Msg::Waiting { .. } => {}
            Msg::ProbeReply { delay } => {
                self.own.delays.record(from, delay, self.config.probe_window, cx.now());
            }
            Msg::Decided { txn, outcome } => {
                // It ended before its reads were confirmed or refuted.
                let path = |open: &Open| match outcome {
                    Outcome::Unknown => UNKNOWABLE,
                    Outcome::Committed(_) | Outcome::Aborted(_)
                        if open.more.provisional.is_empty() =>
                    {
                        "normal"
                    }
                    Outcome::Committed(_) | Outcome::Aborted(_) => "provisional",
                };
                self.on_decided(from, txn, outcome, path, cx);
            }
            Msg::ReadOnlyResult { txn, is_too_much: true, .. } => self.on_too_much(txn, cx),
            Msg::ReadOnlyResult { txn, partition, snapshot, is_too_much: false } => {
                self.on_read_only_result(txn, partition, Some(snapshot), cx);
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

    /// One participant's values. The first ones are used; final ones may follow.
    fn on_read_result(
        &mut self,
        txn: TxnId,
        partition: PartitionId,
        reads: Vec<(Key, Read)>,
        is_provisional: bool,
        cx: &mut Context<'_>,
    ) {
        // It has finished: this is a late answer.
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
                open.more.provisional.insert(partition);
            }
            if open.silent.is_empty() {
                self.on_all_answered(txn, cx);
            }
        } else if !is_provisional && open.more.provisional.remove(&partition) {
            let is_known = |(key, read): &(Key, Read)| {
                open.reads.get(key).is_some_and(|known| known.compared() == read.compared())
            };
            if !reads.iter().all(is_known) {
                self.on_reads_changed(txn, reads, cx);
            }
        }
        // Otherwise a repetition: the client may have computed from the first answer.
    }

    /// §3.3.2: provisional reads turned out to be wrong. A procedure is computed again. A client
    /// that has received them must begin again.
    fn on_reads_changed(&mut self, id: TxnId, reads: Vec<(Key, Read)>, cx: &mut Context<'_>) {
        cx.note(Note::ReadsChanged);
        let open = self.at_mut(id);
        match (&open.phase, &open.txn.kind) {
            (Phase::Reading, _) => open.reads.extend(reads),
            (Phase::Ending(Decision::Commit(_)), Kind::Procedure(_)) => {
                open.reads.extend(reads);
                self.end_procedure(id, cx);
            }
            (Phase::Ending(Decision::Commit(_)), _) => {
                open.more.is_stale = true;
                self.end(id, Decision::Abort, cx);
            }
            (Phase::Deciding, _) => open.more.is_stale = true,
            (Phase::Ending(Decision::Abort) | Phase::Resolving | Phase::Snapshotting(_), _) => {}
        }
    }
}
