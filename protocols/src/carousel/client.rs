//! The client side of Carousel: runs transactions for the callers of one gateway (§4.1, §4.4.2).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{NodeId, PartitionId, TxnId};
use orthodrome_core::machine::{Cx, Input, Leak, Machine, Setup, UNKNOWABLE};
use orthodrome_core::session::is_below;
use orthodrome_core::time::{Duration, Time, Timestamp};
use orthodrome_core::txn::{AbortReason, Decision, Key, Kind, Outcome, Read, Reads, Txn};

use super::leader::Context;
use super::message::Msg;
use super::{Carousel, Config, Note, Record, Timer};
use crate::gateway::{Participant, Snapshot, Snapshots, coordinator_of, set_floors, split};
use crate::replication::Index;
use crate::routes::Routes;
use crate::waiting::RetryState;

/// The client side of Carousel.
#[derive(Debug)]
pub struct Client {
    cluster: Arc<Cluster>,
    config: Arc<Config>,
    routes: Routes,
    open: BTreeMap<TxnId, Open>,
    beats: bool,
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
    /// On the fast path: what every participant is asked to propose.
    timestamp: Timestamp,
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

impl Machine<Carousel> for Client {
    fn new(setup: Setup<Carousel>, _recovered: Vec<Record>, _cx: &mut Cx<'_, Carousel>) -> Self {
        // A gateway keeps nothing: a caller whose gateway died resolves through another.
        Self {
            routes: Routes::new(setup.cluster.clone()),
            cluster: setup.cluster,
            config: setup.config,
            open: BTreeMap::new(),
            beats: false,
        }
    }

    fn step(&mut self, input: Input<Carousel>, cx: &mut Cx<'_, Carousel>) {
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
            Input::Timer(Timer::Replication(..) | Timer::Sweep(_) | Timer::CommitWait(_))
            | Input::Durable(_)
            | Input::Admin(_) => unreachable!("a server's input at a client"),
        }
    }

    fn flush(&mut self, _cx: &mut Cx<'_, Carousel>) {}

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
        let mut participants = split(&self.cluster, &txn.reads, &txn.writes);
        set_floors(&mut participants, &txn.floors);
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
            timestamp: Timestamp::ZERO,
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
        open.timestamp = self.timestamp(&open, cx);
        if open.txn.is_read_only() {
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

    /// The commit timestamp to ask for on the fast path: one that is still to come at the furthest
    /// leader when the request gets there, for a leader cannot promise what has passed. A fourth of
    /// the way and a millisecond are for delays that are not as on the map.
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

    /// §4.2, §4.4.1: asks every replica to prepare, and the leader and the closest for the values.
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
            timestamp: open.timestamp,
            wants_reads,
        };
        cx.send(node, prepare);
    }

    fn send_prepare(&self, open: &Open, partition: PartitionId, cx: &mut Context<'_>) {
        let Some(participant) = open.participants.get(&partition) else { return };
        if self.config.is_fast {
            self.send_fast_prepare(open, participant, cx);
            return;
        }
        let prepare = Msg::ReadAndPrepare {
            txn: open.txn.id,
            participant: participant.clone(),
            coordinator: open.coordinator,
            priority: open.txn.priority,
            acknowledged_below: open.txn.acknowledged_below,
        };
        cx.send(self.routes.leader(partition), prepare);
    }

    /// Somebody who was asked does not lead. On the fast path the others have been asked already: if
    /// they were asked again, one of them that does not vote would say the same, for ever.
    fn send_prepare_to_leader(&self, open: &Open, partition: PartitionId, cx: &mut Context<'_>) {
        if !self.config.is_fast {
            self.send_prepare(open, partition, cx);
        } else if let Some(participant) = open.participants.get(&partition) {
            let leader = self.routes.leader(partition);
            self.send_fast_prepare_to(leader, true, open, participant, cx);
        }
    }

    fn send_coordinator_prepare(&self, open: &Open, cx: &mut Context<'_>) {
        // What the client knows is for those who read, not for the log.
        let participants = open.participants.values().cloned();
        let without_floor = |participant| Participant { floor: Timestamp::ZERO, ..participant };
        let prepare = Msg::CoordinatorPrepare {
            txn: open.txn.id,
            coordinator: open.coordinator,
            participants: participants.map(without_floor).collect(),
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
                Msg::Commit { txn, coordinator, participants, writes, versions }
            }
            Phase::Ending(Decision::Abort) => Msg::Abort { txn, coordinator, participants },
            Phase::Resolving => Msg::Resolve { txn, coordinator, participants },
            Phase::Reading | Phase::Deciding | Phase::Snapshotting(_) => return,
        };
        cx.send(self.routes.leader(coordinator), msg);
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
                if let Some(open) = self.open.get(&txn) {
                    self.routes.learn(open.coordinator, from, cx.now());
                    if outcome == Outcome::Aborted(AbortReason::Recovery) {
                        // Some participant never got the prepare. One that is only written to owes
                        // no answer, so this is the only sign that its leader may be gone.
                        for &partition in open.participants.keys() {
                            self.routes.suspect(partition, open.begun, cx.now());
                        }
                    }
                    let path = match outcome {
                        Outcome::Unknown => UNKNOWABLE,
                        Outcome::Committed(_) | Outcome::Aborted(_) if self.config.is_fast => {
                            "slow"
                        }
                        Outcome::Committed(_) | Outcome::Aborted(_) => "basic",
                    };
                    self.finish(txn, outcome, path, cx);
                }
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
        let Some(open) = self.open.get_mut(&txn) else { return };
        if is_below(&open.txn.floors, reads.iter().map(|(key, read)| (key, read))) {
            // From a follower that lags, or a leader that was deposed (R11). The leader answers too.
            cx.note(Note::BehindClient);
            return;
        }
        if !matches!(open.phase, Phase::Reading) || !open.silent.remove(&partition) {
            // A repetition: the caller may have computed from the first answer.
            return;
        }
        open.reads.extend(reads);
        if open.silent.is_empty() {
            self.on_all_answered(txn, cx);
        }
    }

    /// §4.4.1: the values of the closest replica. It also says who leads: a leader that the placement
    /// does not list has not been asked yet.
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

    /// These vote in `partition`. On the fast path every voter must be asked to prepare, so those that
    /// were not known when transactions under way began are asked now.
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

    /// §4.1.2 ⑦: asks the coordinator to commit or abort.
    fn end(&mut self, id: TxnId, decision: Decision, cx: &mut Context<'_>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        open.phase = Phase::Ending(decision);
        self.ask(id, cx);
    }

    /// Sends what a new phase asks for.
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

    /// §4.4.2: one participant's part of a read-only transaction.
    fn on_read_only_result(
        &mut self,
        id: TxnId,
        partition: PartitionId,
        snapshot: Option<Snapshot>,
        cx: &mut Context<'_>,
    ) {
        let Some(open) = self.open.get_mut(&id) else { return };
        let Phase::Snapshotting(snapshots) = &mut open.phase else { return };
        let Some(snapshot) = snapshot else {
            self.finish(id, Outcome::Aborted(AbortReason::Conflict), "read-only", cx);
            return;
        };
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
                    self.send_prepare_to_leader(open, partition, cx);
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

    /// §4.3.1: tells each coordinator whose callers are alive.
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
