//! The client side of Carousel: the hooks of [`commit`](crate::commit). It sends prepares, on the
//! fast path to every replica (§4.2), and processes the values that come back (§4.1.1, §4.4.1).

use std::sync::Arc;

use orthodrome_core::id::{NodeId, PartitionId, TxnId};
use orthodrome_core::machine::{Setup, UNKNOWABLE};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::session::is_below;
use orthodrome_core::time::{Duration, Timestamp};
use orthodrome_core::txn::{Decision, Key, Kind, Outcome, Read, Txn};

use super::leader::Context;
use super::message::Msg;
use super::{Carousel, Config, Note, Timer};
use crate::commit::{self, Gateway, Phase};
use crate::gateway::{Participant, set_floors};
use crate::replication::Index;

/// The client side of Carousel.
pub type Client = commit::Client<Own>;
/// A pending transaction.
type Open = commit::Open<Own>;

/// Carousel's own state at a gateway; it has none besides the transactions.
#[derive(Debug)]
pub struct Own;

impl Gateway for Own {
    commit::gateway_items!();

    type Protocol = Carousel;
    /// On the fast path: the commit timestamp that every participant is asked to propose.
    type More = Timestamp;

    fn new(_: &Setup<Carousel>) -> Self {
        Self
    }

    fn on_begun(client: &mut Client, open: &mut Open, cx: &mut Context<'_>) {
        open.more = client.timestamp(open, cx);
    }

    fn set_floors(participants: &mut OrdMap<PartitionId, Participant>, txn: &Txn) {
        set_floors(participants, &txn.floors);
    }

    fn send_prepare(client: &Client, open: &Open, partition: PartitionId, cx: &mut Context<'_>) {
        let participant = open.participant(partition);
        if client.config.is_fast {
            client.send_fast_prepare(open, participant, cx);
            return;
        }
        let prepare = Msg::ReadAndPrepare {
            txn: open.txn.id,
            participant: participant.clone(),
            coordinator: open.coordinator,
            priority: open.txn.priority,
            acknowledged_below: open.txn.acknowledged_below,
        };
        cx.send(client.routes.leader(partition), prepare);
    }

    /// On the fast path the other replicas have been asked already. If they were asked again, one
    /// that does not vote would give the same answer for ever.
    fn send_prepare_to_leader(
        client: &Client,
        open: &Open,
        partition: PartitionId,
        cx: &mut Context<'_>,
    ) {
        if !client.config.is_fast {
            Self::send_prepare(client, open, partition, cx);
        } else {
            let leader = client.routes.leader(partition);
            client.send_fast_prepare_to(leader, true, open, open.participant(partition), cx);
        }
    }

    fn coordinator_message(open: &Open) -> Option<Msg> {
        // The versions that the client knows matter to readers, not to the log.
        let participants = open.participants.values().cloned();
        let without_floor = |participant| Participant { floor: Timestamp::ZERO, ..participant };
        Some(Msg::CoordinatorPrepare {
            txn: open.txn.id,
            coordinator: open.coordinator,
            participants: Arc::new(participants.map(without_floor).collect()),
            acknowledged_below: open.txn.acknowledged_below,
        })
    }

    fn end_message(open: &Open, decision: &Decision) -> Msg {
        let (txn, coordinator) = (open.txn.id, open.coordinator);
        let participants = open.participants.keys().copied().collect();
        let versions = open.reads.iter().map(|(key, read)| (key.clone(), read.compared()));
        let versions = Arc::new(versions.collect());
        match decision {
            Decision::Commit(writes) => {
                let writes = Arc::new(writes.clone());
                Msg::Commit { txn, coordinator, participants, writes, versions }
            }
            Decision::Abort => {
                let is_refusal = matches!(open.txn.kind, Kind::Procedure(_));
                Msg::Abort { txn, coordinator, participants, is_refusal, versions }
            }
        }
    }

    fn heartbeat_message(_: &Client, coordinator: PartitionId, txns: Vec<TxnId>) -> Msg {
        Msg::Heartbeat { coordinator, txns }
    }

    fn on_timer(client: &mut Client, timer: Timer, cx: &mut Context<'_>) {
        match timer {
            Timer::Resend(txn) => client.on_resend_timeout(txn, cx),
            Timer::Heartbeat => client.on_heartbeat_timeout(cx),
            Timer::Replication(..) | Timer::Sweep(_) | Timer::CommitWait(_) => {
                unreachable!("a server's timer at a client")
            }
        }
    }
}

impl Client {
    /// The commit timestamp to request on the fast path. It must still be in the future at the
    /// farthest leader when the request arrives, because a leader cannot promise a timestamp that
    /// has passed. A quarter of the delay and a millisecond are added in case delays differ from
    /// the topology.
    fn timestamp(&self, open: &Open, cx: &Context<'_>) -> Timestamp {
        let home = open.txn.home;
        let away = |&partition: &PartitionId| {
            let leader = self.cluster.region_of(self.routes.leader(partition));
            self.cluster.topology.rtt(home, leader) / 2
        };
        let way = open.participants.keys().map(away).max().unwrap_or_default();
        let clock = cx.clock();
        clock.now + clock.error * 2 + way + way / 4 + Duration::from_millis(1)
    }

    /// §4.2, §4.4.1: asks every replica to prepare, and the leader and the closest replica for the
    /// values.
    fn send_fast_prepare(&self, open: &Open, participant: &Participant, cx: &mut Context<'_>) {
        let voters = self.routes.voters(participant.partition);
        let home = open.txn.home;
        let distance = |node: NodeId| self.cluster.topology.rtt(home, self.cluster.region_of(node));
        let leader = self.routes.leader(participant.partition);
        let nearest = voters.iter().copied().min_by_key(|&node| distance(node));
        let closest = nearest.filter(|&node| distance(node) < distance(leader));
        let elsewhere = Some(leader).filter(|leader| !voters.contains(leader));
        for node in voters.iter().copied().chain(elsewhere) {
            let wants_reads = node == leader || Some(node) == closest;
            self.send_fast_prepare_to(node, wants_reads, open, participant, cx);
        }
    }

    fn send_fast_prepare_to(
        &self,
        node: NodeId,
        wants_reads: bool,
        open: &Open,
        participant: &Participant,
        cx: &mut Context<'_>,
    ) {
        let prepare = Msg::FastPrepare {
            txn: open.txn.id,
            participant: participant.clone(),
            coordinator: open.coordinator,
            priority: open.txn.priority,
            acknowledged_below: open.txn.acknowledged_below,
            timestamp: open.more,
            wants_reads,
        };
        cx.send(node, prepare);
    }

    fn on_message(&mut self, from: NodeId, msg: Msg, cx: &mut Context<'_>) {
        match msg {
            Msg::ReadResult { txn, partition, reads } => {
                self.routes.learn(partition, from, cx.now());
                self.on_read_result(txn, partition, reads, cx);
            }
            Msg::FollowerReadResult { txn, partition, reads, leader } => {
                self.on_follower_read_result(txn, partition, reads, leader, cx);
            }
            Msg::FastDecided { txn, outcome } => {
                if let Some(open) = self.open.get(&txn) {
                    self.routes.learn(open.coordinator, from, cx.now());
                    self.finish(txn, outcome, "fast", cx);
                }
            }
            Msg::Decided { txn, outcome } => {
                let path = match outcome {
                    Outcome::Unknown => UNKNOWABLE,
                    Outcome::Committed(_) | Outcome::Aborted(_) if self.config.is_fast => "slow",
                    Outcome::Committed(_) | Outcome::Aborted(_) => "basic",
                };
                self.on_decided(from, txn, outcome, |_| path, cx);
            }
            Msg::ReadOnlyResult { txn, is_too_much: true, .. } => self.on_too_much(txn, cx),
            Msg::ReadOnlyResult { txn, partition, snapshot, is_too_much: false } => {
                self.routes.learn(partition, from, cx.now());
                self.on_read_only_result(txn, partition, snapshot, cx);
            }
            Msg::Members { partition, since, voters } => {
                self.on_members(partition, since, &voters, cx);
            }
            Msg::NotLeader { partition, leader, txn } => {
                self.on_not_leader(from, partition, leader, txn, cx);
            }
            Msg::ReadAndPrepare { .. }
            | Msg::FastPrepare { .. }
            | Msg::FastPrepareResult { .. }
            | Msg::CollectPending { .. }
            | Msg::PendingList { .. }
            | Msg::QueryPending { .. }
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
            | Msg::Replication { .. } => unreachable!("a server's message at a client"),
        }
    }

    /// §4.1.1 ③⑤: one participant's values.
    fn on_read_result(
        &mut self,
        txn: TxnId,
        partition: PartitionId,
        reads: Vec<(Key, Read)>,
        cx: &mut Context<'_>,
    ) {
        // It has finished: this is a late answer.
        let Some(open) = self.open.get_mut(&txn) else { return };
        if is_below(&open.txn.floors, reads.iter().map(|(key, read)| (key, read))) {
            // From a follower that lags behind, or a leader that was deposed (R11). The leader
            // answers too.
            cx.note(Note::BehindClient);
            return;
        }
        if !matches!(open.phase, Phase::Reading) || !open.silent.remove(&partition) {
            // A repetition: the client may have computed from the first answer.
            return;
        }
        open.reads.extend(reads);
        if open.silent.is_empty() {
            self.on_all_answered(txn, cx);
        }
    }

    /// §4.4.1: the values of the closest replica. It also names the leader: a leader that the
    /// placement does not list has not been asked yet.
    fn on_follower_read_result(
        &mut self,
        txn: TxnId,
        partition: PartitionId,
        reads: Vec<(Key, Read)>,
        leader: Option<NodeId>,
        cx: &mut Context<'_>,
    ) {
        if let Some(leader) = leader {
            self.routes.learn(partition, leader, cx.now());
            if !self.routes.voters(partition).contains(&leader)
                && let Some(open) = self.open.get(&txn)
                && matches!(open.phase, Phase::Reading)
                && let Some(participant) = open.participants.get(&partition)
            {
                self.send_fast_prepare_to(leader, false, open, participant, cx);
            }
        }
        if !reads.is_empty() {
            self.on_read_result(txn, partition, reads, cx);
        }
    }

    /// These nodes vote in `partition`. On the fast path every voter must be asked to prepare, so
    /// voters that were not known when pending transactions began are asked now.
    fn on_members(
        &mut self,
        partition: PartitionId,
        since: Index,
        voters: &[NodeId],
        cx: &mut Context<'_>,
    ) {
        let mut asked = self.routes.voters(partition).to_vec();
        asked.push(self.routes.leader(partition));
        self.routes.learn_voters(partition, since, voters);
        if !self.config.is_fast {
            return;
        }
        let voters = self.routes.voters(partition).iter();
        let new: Vec<NodeId> = voters.copied().filter(|node| !asked.contains(node)).collect();
        for open in self.open.values() {
            let may_commit = match &open.phase {
                Phase::Reading | Phase::Deciding | Phase::Ending(Decision::Commit(_)) => {
                    !open.is_resolved
                }
                Phase::Ending(Decision::Abort) | Phase::Resolving | Phase::Snapshotting(_) => false,
            };
            let Some(participant) = open.participants.get(&partition).filter(|_| may_commit) else {
                continue;
            };
            for &node in &new {
                self.send_fast_prepare_to(node, false, open, participant, cx);
            }
        }
    }
}
