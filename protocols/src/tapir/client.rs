//! The client side of TAPIR: runs transactions for the clients of one gateway, and coordinates them
//! (§5.2).

use std::fmt;
use std::sync::Arc;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{ClientId, NodeId, PartitionId, TxnId};
use orthodrome_core::machine::{Claim, Cx, Input, Leak, Machine, Setup, UNKNOWABLE};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::session::is_below;
use orthodrome_core::time::{Duration, Time, Timestamp, nanos};
use orthodrome_core::txn::{AbortReason, Decision, Key, Kind, Outcome, Read, Reads, Txn, Writes};

use super::coordinator::{Drive, Out, Progress, Stage};
use super::message::{Answer, Ballot, Msg, Part, Record};
use super::{Config, Note, Tapir, Timer};
use crate::gateway::{Participant, UNDECIDED, split};
use crate::ir::Quorums;

/// The client side of TAPIR.
#[derive(Debug)]
pub struct Client {
    node: NodeId,
    cluster: Arc<Cluster>,
    config: Arc<Config>,
    open: OrdMap<TxnId, Open>,
    /// Transactions that are being prepared, or whose decision is being sent.
    drives: OrdMap<TxnId, Drive>,
    /// Replicas that have not answered, until a message from them arrives.
    suspects: OrdSet<NodeId>,
    /// Transactions that are decided, but whose clients may not know the outcome yet.
    over: OrdMap<TxnId, Over>,
    /// For each client, the counter below which it knows all outcomes, and when it said so.
    acknowledged: OrdMap<ClientId, (u64, Time)>,
    is_flushing: bool,
}

/// A transaction that this gateway has finished.
#[derive(Debug)]
struct Over {
    participants: Vec<PartitionId>,
    since: Time,
    /// True if every replica has executed the decision. Otherwise the replicas complete it.
    is_complete: bool,
}

/// A transaction whose client waits.
#[derive(Debug)]
struct Open {
    txn: Txn,
    participants: OrdMap<PartitionId, Participant>,
    reads: Reads,
    phase: Phase,
    resent: u32,
    is_resolved: bool,
}

#[derive(Debug)]
enum Phase {
    /// Waiting for reads of these partitions.
    Reading(OrdMap<PartitionId, Owing>),
    /// Waiting for the client's decision.
    Deciding,
    /// The transaction is prepared.
    Preparing,
    /// Decided, but its timestamp has not passed on every clock.
    Waiting(Outcome, &'static str),
    /// Reads at one timestamp: for a read-only transaction, because a guard failed on reads that may
    /// be stale, or because a client asks for the outcome of a procedure that has aborted.
    Snapshotting { at: Timestamp, answers: OrdMap<PartitionId, Snapshots> },
}

/// A partition that has not answered a read.
#[derive(Debug)]
struct Owing {
    /// The number of time-outs so far, plus the replicas skipped at the start.
    tried: usize,
    /// Replicas that could not answer since the last time-out. Only a replica's first refusal
    /// causes another read, so duplicated messages cannot multiply reads.
    refused: OrdSet<NodeId>,
}

/// The answer of each replica; none if a pending write conflicted.
type Snapshots = OrdMap<NodeId, Option<Vec<(Key, Read)>>>;

impl Machine<Tapir> for Client {
    fn new(setup: Setup<Tapir>, _recovered: Vec<Record>, _cx: &mut Cx<'_, Tapir>) -> Self {
        // A gateway keeps nothing over a restart: replicas take over its transactions.
        Self {
            node: setup.node,
            cluster: setup.cluster,
            config: setup.config,
            open: OrdMap::new(),
            drives: OrdMap::new(),
            suspects: OrdSet::new(),
            over: OrdMap::new(),
            acknowledged: OrdMap::new(),
            is_flushing: false,
        }
    }

    fn step(&mut self, input: Input<Tapir>, cx: &mut Cx<'_, Tapir>) {
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
            Input::Timer(Timer::Sweep(_) | Timer::View(_))
            | Input::Durable(_)
            | Input::Admin(_) => unreachable!("a server's input at a client"),
        }
    }

    fn flush(&mut self, _cx: &mut Cx<'_, Tapir>) {}

    fn leaks(&self) -> Vec<Leak> {
        vec![("open transactions", self.open.len()), ("transactions driven", self.drives.len())]
    }

    fn assert_invariants(&self) {
        for (id, open) in &self.open {
            let is_driven = self.drives.contains_key(id);
            assert!(
                is_driven || !matches!(open.phase, Phase::Preparing),
                "{id} is being prepared by nobody"
            );
        }
    }
}

impl Client {
    fn on_begin(&mut self, txn: Txn, cx: &mut Cx<'_, Tapir>) {
        let id = txn.id;
        if self.open.contains_key(&id) {
            // It was already begun here: its answers will arrive.
            return;
        }
        if matches!(txn.kind, Kind::General) {
            cx.finish(id, Outcome::Aborted(AbortReason::Invalid), "refused");
            return;
        }
        self.acknowledged.insert(id.client, (txn.acknowledged_below, cx.now()));
        let is_read_only = txn.is_read_only();
        let participants = split(&self.cluster, &txn.reads, &txn.writes);
        let reading = participants.iter().filter(|(_, part)| !part.reads.is_empty());
        let first = usize::try_from(id.attempt.saturating_sub(NEAREST_TRIES)).unwrap_or(0);
        let owing = || Owing { tried: first, refused: OrdSet::new() };
        let silent: OrdMap<_, _> = reading.map(|(p, _)| (*p, owing())).collect();
        let owing: Vec<PartitionId> = silent.keys().copied().collect();
        let open = Open {
            txn,
            participants,
            reads: Reads::new(),
            phase: Phase::Reading(silent),
            resent: 0,
            is_resolved: false,
        };
        self.open.insert(id, open);
        if is_read_only {
            self.snapshot(id, cx);
        } else if owing.is_empty() {
            self.on_all_read(id, cx);
        } else {
            for partition in owing {
                self.send_read(id, partition, cx);
            }
            cx.set_timer(Timer::Open(id), cx.now() + self.config.resend_after);
        }
    }

    // Reads.

    /// The replicas of a partition, nearest first; those that have not answered last.
    fn nearest(&self, partition: PartitionId) -> Vec<NodeId> {
        let home = self.cluster.region_of(self.node);
        let placed = self.cluster.partition(partition);
        let mut replicas = placed.map_or_else(Vec::new, |placed| placed.replicas.clone());
        replicas.sort_by_key(|node| {
            let region = self.cluster.region_of(*node);
            let is_far = region != home;
            (self.suspects.contains(node), is_far, self.cluster.topology.rtt(home, region), *node)
        });
        replicas
    }

    /// §5.2 "Read": from the nearest replica; from the next one if that does not answer.
    fn send_read(&self, id: TxnId, partition: PartitionId, cx: &mut Cx<'_, Tapir>) {
        let Some(open) = self.open.get(&id) else { return };
        let Phase::Reading(silent) = &open.phase else { return };
        let Some(owing) = silent.get(&partition) else { return };
        let mut replicas = self.nearest(partition);
        replicas.retain(|node| !owing.refused.contains(node));
        let Some(at) = owing.tried.checked_rem(replicas.len()) else { return };
        let Some(participant) = open.participants.get(&partition) else { return };
        let Some(&to) = replicas.get(at) else { return };
        cx.send(to, Msg::Read { txn: id, partition, keys: participant.reads.clone() });
    }

    /// `from` cannot answer, but another replica may. If all have been asked, the client waits.
    fn pass_over(
        &mut self,
        from: NodeId,
        id: TxnId,
        partition: PartitionId,
        cx: &mut Cx<'_, Tapir>,
    ) {
        let Some(open) = self.open.get_mut(&id) else { return };
        let Phase::Reading(silent) = &mut open.phase else { return };
        let Some(owing) = silent.get_mut(&partition) else { return };
        if owing.refused.insert(from) {
            self.send_read(id, partition, cx);
        }
    }

    fn on_read_result(
        &mut self,
        from: NodeId,
        id: TxnId,
        partition: PartitionId,
        reads: Vec<(Key, Read)>,
        cx: &mut Cx<'_, Tapir>,
    ) {
        let Some(open) = self.open.get_mut(&id) else { return };
        let Phase::Reading(silent) = &mut open.phase else { return };
        if is_below(&open.txn.floors, reads.iter().map(|(key, read)| (key, read))) {
            // This replica has not executed yet a commit that the client knows (R11). The next one
            // may have.
            cx.note(Note::BehindClient);
            self.pass_over(from, id, partition, cx);
            return;
        }
        if silent.remove(&partition).is_none() {
            // A second answer: the client may have computed from the first.
            return;
        }
        open.reads.extend(reads);
        if silent.is_empty() {
            self.on_all_read(id, cx);
        }
    }

    /// The read round is complete: returns the values to the client, or runs the procedure.
    fn on_all_read(&mut self, id: TxnId, cx: &mut Cx<'_, Tapir>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        cx.cancel_timer(Timer::Open(id));
        match &open.txn.kind {
            Kind::Interactive => {
                open.phase = Phase::Deciding;
                cx.reads(id, open.reads.clone());
            }
            Kind::Procedure(ops) => match Txn::execute(ops, &open.reads) {
                Ok(writes) => self.prepare(id, writes, cx),
                // The reads may be old. A guard fails only on values that all held at one time.
                Err(_) => self.snapshot(id, cx),
            },
            Kind::ReadOnly | Kind::StaleReadOnly => unreachable!("{id} reads at one timestamp"),
            Kind::General => unreachable!("{id} is refused"),
        }
    }

    /// The client of an interactive transaction has decided.
    fn on_decide(&mut self, id: TxnId, decision: Decision, cx: &mut Cx<'_, Tapir>) {
        let Some(open) = self.open.get(&id) else { return };
        let is_asked = matches!(open.phase, Phase::Deciding);
        let is_reading = matches!(open.phase, Phase::Reading(_));
        match decision {
            Decision::Commit(writes) if is_asked => {
                if open.txn.declares(&writes) {
                    let decided = open.txn.decided(&open.reads, &writes);
                    self.rename(id, decided, cx);
                    self.prepare(decided, writes, cx);
                } else {
                    self.finish(id, Outcome::Aborted(AbortReason::Client), "abort", cx);
                }
            }
            // No replica knows the transaction yet, so no node can commit it.
            Decision::Abort if is_asked || is_reading => {
                self.finish(id, Outcome::Aborted(AbortReason::Client), "abort", cx);
            }
            Decision::Commit(_) | Decision::Abort => {}
        }
    }

    /// From now on the transaction has another id: its client has decided.
    fn rename(&mut self, id: TxnId, decided: TxnId, cx: &mut Cx<'_, Tapir>) {
        if let Some(mut open) = self.open.remove(&id) {
            cx.cancel_timer(Timer::Open(id));
            open.txn.id = decided;
            self.open.insert(decided, open);
        }
    }

    // Prepares (§5.2 "Prepare").

    /// Prepares at every replica of every participant, with a timestamp from this gateway's clock.
    fn prepare(&mut self, id: TxnId, writes: Writes, cx: &mut Cx<'_, Tapir>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        if open.participants.is_empty() {
            self.finish(id, Outcome::Committed(cx.clock().now), "empty", cx);
            return;
        }
        let mut parts: OrdMap<PartitionId, Option<Part>> = OrdMap::new();
        for (key, read) in &open.reads {
            let part = parts.entry(self.cluster.partition_of(key)).or_default();
            part.get_or_insert_default().reads.push((key.clone(), read.version));
        }
        for (key, value) in writes {
            let part = parts.entry(self.cluster.partition_of(&key)).or_default();
            part.get_or_insert_default().writes.insert(key, value);
        }
        if parts.is_empty() {
            // It read nothing and writes nothing.
            self.finish(id, Outcome::Committed(cx.clock().now), "empty", cx);
            return;
        }
        let latest = open.reads.values().map(|read| read.version.timestamp).max();
        let timestamp = cx.clock().now.max(latest.unwrap_or_default().next());
        open.phase = Phase::Preparing;
        let mut drive = Drive::new(&self.cluster, id, parts);
        let mut out = Out::new();
        drive.propose(0, timestamp, &mut out);
        self.drives.insert(id, drive);
        self.send(out, cx);
        cx.set_timer(Timer::Drive(id), cx.now() + self.timeout(id));
    }

    fn send(&self, out: Out, cx: &mut Cx<'_, Tapir>) {
        for (to, msg) in out {
            cx.send(to, msg);
        }
    }

    /// How long the farthest participant may take to answer.
    fn timeout(&self, id: TxnId) -> Duration {
        let home = self.cluster.region_of(self.node);
        let parts = self.drives.get(&id).map_or(&[][..], Drive::participants);
        let placed = parts.iter().filter_map(|&partition| self.cluster.partition(partition));
        let away = placed
            .flat_map(|placed| &placed.replicas)
            .map(|&node| self.cluster.topology.rtt(home, self.cluster.region_of(node)))
            .max()
            .unwrap_or_default();
        away + away / 4 + self.config.slack
    }

    fn on_answer(
        &mut self,
        from: NodeId,
        id: TxnId,
        partition: PartitionId,
        answer: (Answer, Option<Part>),
        cx: &mut Cx<'_, Tapir>,
    ) {
        let Some(drive) = self.drives.get_mut(&id) else { return };
        let mut out = Out::new();
        let progress = drive.on_answer(from, partition, answer, &self.suspects, &mut out);
        self.send(out, cx);
        self.on_progress(id, progress, cx);
    }

    fn on_progress(&mut self, id: TxnId, progress: Progress, cx: &mut Cx<'_, Tapir>) {
        let Some(drive) = self.drives.get_mut(&id) else { return };
        match progress {
            Progress::Nothing => {}
            Progress::Later(timestamp) if drive.ballot.round < ROUNDS => {
                cx.note(Note::LaterRound);
                let timestamp = timestamp.max(cx.clock().now);
                let mut out = Out::new();
                drive.propose(drive.ballot.round + 1, timestamp, &mut out);
                self.send(out, cx);
                cx.set_timer(Timer::Drive(id), cx.now() + self.timeout(id));
            }
            Progress::Later(_) => {
                // Its timestamps are always too early. Votes are not a decision (R2), so a decision
                // must be made.
                let mut out = Out::new();
                drive.take_over(self.node, Ballot::default(), &mut out);
                self.send(out, cx);
            }
            Progress::Preempted => {
                // The node that took over should have time to finish. After that, this node takes
                // over.
                cx.note(Note::Preempted);
                cx.set_timer(Timer::Drive(id), cx.now() + self.config.resend_after);
                drive.stage = Stage::TakingOver;
            }
            Progress::Decided(outcome) => {
                cx.claim(Claim::Decided { txn: id, outcome });
                let (path, proposed) = (drive.path(), drive.timestamp);
                cx.set_timer(Timer::Drive(id), cx.now() + self.config.resend_after);
                let is_read_only = self.open.get(&id).is_some_and(|open| open.txn.is_read_only());
                let told = match outcome {
                    // The result is that of a takeover or of another gateway, whose reads were made
                    // earlier than this gateway's.
                    Outcome::Committed(timestamp) if is_read_only && timestamp != proposed => {
                        cx.note(Note::OtherReads);
                        Outcome::Aborted(AbortReason::Recovery)
                    }
                    Outcome::Committed(_) | Outcome::Aborted(_) | Outcome::Unknown => outcome,
                };
                self.on_decided(id, told, path, cx);
            }
            Progress::Complete => {
                cx.cancel_timer(Timer::Drive(id));
                self.leave(id, true, cx);
            }
            Progress::Forgotten => {
                cx.note(Note::Forgotten);
                cx.cancel_timer(Timer::Drive(id));
                self.drives.remove(&id);
                self.finish(id, Outcome::Unknown, UNKNOWABLE, cx);
            }
        }
    }

    /// This gateway has done its part. Later it only reports that the client knows the outcome.
    fn leave(&mut self, id: TxnId, is_complete: bool, cx: &mut Cx<'_, Tapir>) {
        let Some(drive) = self.drives.remove(&id) else { return };
        let (participants, since) = (drive.participants().to_vec(), cx.now());
        self.over.insert(id, Over { participants, since, is_complete });
        if !std::mem::replace(&mut self.is_flushing, true) {
            cx.set_timer(Timer::Flush, cx.now() + self.config.flush_interval);
        }
    }

    /// Some of the replicas that were asked have not answered for a while.
    fn on_drive_timeout(&mut self, id: TxnId, cx: &mut Cx<'_, Tapir>) {
        let Some(drive) = self.drives.get_mut(&id) else { return };
        if matches!(drive.stage, Stage::Ending(_)) && drive.times >= SPREAD_TRIES {
            // The replicas ensure that all of them learn the decision.
            self.leave(id, false, cx);
            return;
        }
        cx.note(Note::Resent);
        let mut out = Out::new();
        let (progress, silent) = drive.on_timeout(self.node, &self.suspects, &mut out);
        let pause = self.config.resend_after * (1 << drive.times.min(3));
        self.suspects.extend(silent);
        cx.set_timer(Timer::Drive(id), cx.now() + pause);
        self.send(out, cx);
        self.on_progress(id, progress, cx);
    }

    /// The durable facts decide. A commit is acknowledged once its timestamp has passed on every
    /// clock (T1).
    fn on_decided(
        &mut self,
        id: TxnId,
        outcome: Outcome,
        path: &'static str,
        cx: &mut Cx<'_, Tapir>,
    ) {
        let Some(open) = self.open.get_mut(&id) else { return };
        if open.is_resolved
            && outcome == Outcome::Aborted(AbortReason::Recovery)
            && matches!(open.txn.kind, Kind::Procedure(_))
        {
            // No replica hears of a procedure whose guard fails. Whether it fails now says whether the
            // client should try again.
            self.snapshot(id, cx);
            return;
        }
        open.phase = Phase::Waiting(outcome, path);
        self.tell(id, cx);
    }

    fn tell(&mut self, id: TxnId, cx: &mut Cx<'_, Tapir>) {
        let Some(open) = self.open.get(&id) else { return };
        let Phase::Waiting(outcome, path) = open.phase else { return };
        if let Outcome::Committed(timestamp) = outcome
            && !self.config.mutations.no_commit_wait()
            && !cx.clock().has_passed_everywhere(timestamp)
        {
            cx.note(Note::CommitWait);
            let clock = cx.clock();
            let missing = nanos(clock.error) * 2 + timestamp.0 - clock.now.0.min(timestamp.0);
            let at = cx.now() + Duration::from_nanos(missing.saturating_add(1));
            cx.set_timer(Timer::Open(id), at);
            return;
        }
        self.finish(id, outcome, path, cx);
    }

    fn finish(&mut self, id: TxnId, outcome: Outcome, path: &'static str, cx: &mut Cx<'_, Tapir>) {
        let Some(open) = self.open.remove(&id) else { return };
        cx.cancel_timer(Timer::Open(id));
        let is_told_reads = matches!(open.txn.kind, Kind::Interactive) || open.is_resolved;
        if matches!(outcome, Outcome::Committed(_)) && !is_told_reads {
            cx.reads(id, open.reads);
        }
        cx.finish(id, outcome, path);
    }

    /// A client asks for the outcome of a transaction that it began here or at another gateway.
    fn on_resolve(
        &mut self,
        txn: Txn,
        reads: Reads,
        decision: Option<Decision>,
        cx: &mut Cx<'_, Tapir>,
    ) {
        let id = match (&decision, &txn.kind) {
            (Some(Decision::Commit(writes)), Kind::Interactive) => txn.decided(&reads, writes),
            (_, _) => txn.id,
        };
        let txn = Txn { id, ..txn };
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
        // It was prepared where it reads, or where the decision writes. Without the decision nobody
        // knows its id.
        let mut parts: OrdSet<PartitionId> =
            txn.reads.iter().map(|key| self.cluster.partition_of(key)).collect();
        match (&decision, &txn.kind) {
            (Some(Decision::Commit(writes)), _) => {
                parts.extend(writes.keys().map(|key| self.cluster.partition_of(key)));
            }
            (_, Kind::Procedure(_)) => {
                parts.extend(txn.writes.iter().map(|key| self.cluster.partition_of(key)));
            }
            (Some(Decision::Abort), _) => {
                cx.finish(id, Outcome::Aborted(AbortReason::Client), "recovered");
                return;
            }
            (None, _) => {
                cx.finish(id, Outcome::Unknown, UNDECIDED);
                return;
            }
        }
        if parts.is_empty() {
            cx.finish(id, Outcome::Committed(cx.clock().now), "empty");
            return;
        }
        let participants = split(&self.cluster, &txn.reads, &txn.writes);
        let phase = Phase::Preparing;
        let open = Open { txn, participants, reads, phase, resent: 0, is_resolved: true };
        self.open.insert(id, open);
        let mut drive = Drive::new(&self.cluster, id, parts.into_iter().map(|part| (part, None)));
        let mut out = Out::new();
        drive.take_over(self.node, Ballot::default(), &mut out);
        self.drives.insert(id, drive);
        self.send(out, cx);
        cx.set_timer(Timer::Drive(id), cx.now() + self.config.resend_after);
    }

    // Reads at one timestamp.

    /// Reads at a timestamp from this gateway's clock. It asks so many replicas that at least one
    /// of them knows any transaction that could still commit before that timestamp.
    fn snapshot(&mut self, id: TxnId, cx: &mut Cx<'_, Tapir>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        let at = cx.clock().now;
        let reading = open.participants.iter().filter(|(_, part)| !part.reads.is_empty());
        let answers = reading.map(|(partition, _)| (*partition, Snapshots::new())).collect();
        open.phase = Phase::Snapshotting { at, answers };
        open.resent = 0;
        self.send_snapshot(id, cx);
        cx.set_timer(Timer::Open(id), cx.now() + self.config.resend_after);
        self.on_snapshot_complete(id, cx);
    }

    fn send_snapshot(&self, id: TxnId, cx: &mut Cx<'_, Tapir>) {
        let Some(open) = self.open.get(&id) else { return };
        let Phase::Snapshotting { at, answers } = &open.phase else { return };
        for (&partition, answered) in answers {
            let Some(participant) = open.participants.get(&partition) else { continue };
            for to in self.nearest(partition) {
                if !answered.contains_key(&to) {
                    let (keys, timestamp) = (participant.reads.clone(), *at);
                    cx.send(to, Msg::ReadOnly { txn: id, partition, keys, timestamp });
                }
            }
        }
    }

    /// A part of a transaction's reads exceeds the size of an answer. No replica has been asked to
    /// prepare it.
    fn on_too_much(&mut self, id: TxnId, cx: &mut Cx<'_, Tapir>) {
        if let Some(open) = self.open.get(&id)
            && matches!(open.phase, Phase::Reading(_) | Phase::Snapshotting { .. })
        {
            self.finish(id, Outcome::Aborted(AbortReason::TooLarge), "read-only", cx);
        }
    }

    fn on_read_only_result(
        &mut self,
        from: NodeId,
        (id, timestamp): (TxnId, Timestamp),
        partition: PartitionId,
        reads: Option<Vec<(Key, Read)>>,
        cx: &mut Cx<'_, Tapir>,
    ) {
        let Some(open) = self.open.get_mut(&id) else { return };
        let Phase::Snapshotting { at, answers } = &mut open.phase else { return };
        if timestamp != *at && timestamp != Timestamp::ZERO {
            // This answers an earlier request of the transaction, perhaps from before a restart.
            return;
        }
        let Some(answered) = answers.get_mut(&partition) else { return };
        answered.entry(from).or_insert(reads);
        self.on_snapshot_complete(id, cx);
    }

    fn on_snapshot_complete(&mut self, id: TxnId, cx: &mut Cx<'_, Tapir>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        let Phase::Snapshotting { at, answers } = &open.phase else { return };
        let is_resolved = open.is_resolved;
        let path = if is_resolved { "recovered" } else { "read-only" };
        let (mut is_complete, mut is_certain) = (true, true);
        let mut reads = Reads::new();
        for (&partition, answered) in answers {
            let placed = self.cluster.partition(partition);
            let quorums = Quorums::of(placed.map_or(0, |placed| placed.replicas.len()));
            let parts: Vec<_> = answered.values().flatten().collect();
            let is_open =
                |node: &&NodeId| !answered.contains_key(node) && !self.suspects.contains(node);
            let open = placed.map_or(0, |p| p.replicas.iter().filter(is_open).count());
            if parts.len() < answered.len() && parts.len() + open < quorums.settled() {
                // A pending transaction may still write a key that it reads.
                let reason =
                    if is_resolved { AbortReason::Recovery } else { AbortReason::Conflict };
                self.finish(id, Outcome::Aborted(reason), path, cx);
                return;
            }
            // With f replicas gone, the state of f + 1 replicas can still be validated.
            is_certain &= parts.len() >= quorums.settled();
            is_complete &=
                parts.len() >= quorums.settled() || (open == 0 && parts.len() >= quorums.slow());
            for (key, read) in parts.into_iter().flatten() {
                let newest = reads.entry(key.clone()).or_insert_with(|| read.clone());
                if newest.version < read.version {
                    newest.clone_from(read);
                }
            }
        }
        if !is_complete {
            return;
        }
        let at = *at;
        open.reads = reads;
        let writes = match &open.txn.kind {
            Kind::Procedure(ops) => Txn::execute(ops, &open.reads),
            Kind::Interactive | Kind::General | Kind::ReadOnly | Kind::StaleReadOnly => {
                Ok(Writes::new())
            }
        };
        match writes {
            Err(reason) => self.finish(id, Outcome::Aborted(reason), path, cx),
            Ok(_) if is_resolved => {
                // It has aborted, and its guard does not fail.
                self.finish(id, Outcome::Aborted(AbortReason::Recovery), path, cx);
            }
            Ok(_) if open.txn.writes.is_empty() && is_certain => {
                self.on_decided(id, Outcome::Committed(at), "read-only", cx);
            }
            Ok(writes) => {
                cx.cancel_timer(Timer::Open(id));
                self.prepare(id, writes, cx);
            }
        }
    }

    /// No answer arrived for a while, or a timestamp has passed.
    fn on_open_timeout(&mut self, id: TxnId, cx: &mut Cx<'_, Tapir>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        open.resent += 1;
        let pause = self.config.resend_after * (1 << open.resent.min(3));
        match &mut open.phase {
            Phase::Waiting(..) => self.tell(id, cx),
            Phase::Reading(silent) => {
                cx.note(Note::Resent);
                for owing in silent.values_mut() {
                    owing.tried += 1;
                    owing.refused.clear();
                }
                let owing: Vec<PartitionId> = silent.keys().copied().collect();
                for partition in owing {
                    self.send_read(id, partition, cx);
                }
                cx.set_timer(Timer::Open(id), cx.now() + pause);
            }
            Phase::Snapshotting { answers, .. } => {
                cx.note(Note::Resent);
                for (partition, answered) in answers {
                    let placed = self.cluster.partition(*partition);
                    let all = placed.iter().flat_map(|placed| &placed.replicas);
                    self.suspects.extend(all.filter(|node| !answered.contains_key(node)));
                }
                self.send_snapshot(id, cx);
                cx.set_timer(Timer::Open(id), cx.now() + pause);
                self.on_snapshot_complete(id, cx);
            }
            Phase::Deciding | Phase::Preparing => {}
        }
    }

    /// A replica cannot answer at the moment.
    fn on_not_normal(
        &mut self,
        from: NodeId,
        partition: PartitionId,
        id: TxnId,
        cx: &mut Cx<'_, Tapir>,
    ) {
        self.suspects.insert(from);
        // The nearest replica that is not suspected. If all are, the client waits.
        let replicas = self.cluster.partition(partition).map_or(&[][..], |p| &p.replicas);
        if !replicas.iter().all(|node| self.suspects.contains(node)) {
            self.pass_over(from, id, partition, cx);
        }
    }

    // Housekeeping.

    /// Lets finished transactions leave the records, once their clients know the outcomes (R6).
    fn on_flush_timeout(&mut self, cx: &mut Cx<'_, Tapir>) {
        let now = cx.now();
        let mut batches = OrdMap::<PartitionId, (Vec<TxnId>, OrdMap<ClientId, u64>)>::new();
        let Self { over, acknowledged, .. } = self;
        over.retain(|txn, Over { participants, since, is_complete }| {
            let below = acknowledged.get(&txn.client).map_or(0, |(below, _)| *below);
            if txn.counter >= below {
                // Finally left to the replicas.
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
                cx.send(to, Msg::FinalizeInconsistent { partition, txns, acknowledged });
            }
        }
        self.is_flushing = !self.over.is_empty();
        if self.is_flushing {
            cx.set_timer(Timer::Flush, now + self.config.flush_interval);
        }
    }

    fn on_message(&mut self, from: NodeId, msg: Msg, cx: &mut Cx<'_, Tapir>) {
        if !matches!(msg, Msg::NotNormal { .. }) {
            self.suspects.remove(&from);
        }
        match msg {
            Msg::ReadResult { txn, partition, reads, is_too_much: false } => {
                self.on_read_result(from, txn, partition, reads, cx);
            }
            Msg::ReplyConsensus { txn, partition, answer }
            | Msg::Confirm { txn, partition, answer } => {
                self.on_answer(from, txn, partition, (answer, None), cx);
            }
            Msg::CoordinatorChangeReply { txn, partition, answer, part } => {
                self.on_answer(from, txn, partition, (answer, part), cx);
            }
            Msg::ReplyInconsistent { txn, partition, absent } => {
                let Some(drive) = self.drives.get_mut(&txn) else { return };
                let progress = drive.on_ack(from, partition, absent);
                self.on_progress(txn, progress, cx);
            }
            Msg::ReadResult { txn, is_too_much: true, .. }
            | Msg::ReadOnlyResult { txn, is_too_much: true, .. } => self.on_too_much(txn, cx),
            Msg::ReadOnlyResult { txn, partition, timestamp, reads, is_too_much: false } => {
                self.on_read_only_result(from, (txn, timestamp), partition, reads, cx);
            }
            Msg::NotNormal { partition, txn } => self.on_not_normal(from, partition, txn, cx),
            Msg::Read { .. }
            | Msg::ProposeConsensus { .. }
            | Msg::FinalizeConsensus { .. }
            | Msg::ProposeInconsistent { .. }
            | Msg::FinalizeInconsistent { .. }
            | Msg::CoordinatorChange { .. }
            | Msg::ReadOnly { .. }
            | Msg::DoViewChange { .. }
            | Msg::StartView { .. }
            | Msg::Gossip { .. }
            | Msg::FetchState { .. }
            | Msg::StateChunk { .. } => unreachable!("a replica's message at a client"),
        }
    }
}

/// The number of attempts that read from the nearest replica. After one more failure an attempt
/// reads elsewhere, in case that replica lags behind.
const NEAREST_TRIES: u32 = 4;

/// The number of later timestamps that one attempt tries.
const ROUNDS: u32 = 3;

/// How often a gateway repeats a decision before it leaves the rest to the replicas.
const SPREAD_TRIES: u32 = 5;

/// How long gateways remember acknowledgements of clients, and outcomes that only their clients do
/// not know yet.
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
                Phase::Deciding => write!(f, "{separator}{id} deciding")?,
                Phase::Preparing => write!(f, "{separator}{id} preparing")?,
                Phase::Waiting(outcome, _) => write!(f, "{separator}{id} waits to tell {outcome}")?,
                Phase::Snapshotting { at, .. } => write!(f, "{separator}{id} reads at {}", at.0)?,
            }
            separator = " | ";
        }
        for drive in self.drives.values() {
            write!(f, "{separator}drives {} {} {:?}", drive.txn, drive.ballot, drive.stage)?;
            separator = " | ";
        }
        Ok(())
    }
}
