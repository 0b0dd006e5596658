//! What only a partition's leader knows, and how its messages and its log's commands find their
//! handlers.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::fmt;

use orthodrome_core::id::{NodeId, PartitionId, TxnId};
use orthodrome_core::machine::{Claim, Leak, Message as _};
use orthodrome_core::time::{Duration, Time, Timestamp};
use orthodrome_core::txn::{AbortReason, Key, Outcome, Read};

use super::delays::difference;
use super::message::{Command, Elsewhere, Log, Msg, Vote};
use super::queue::{Letter, Queue, Stage};
use super::state::{Prepared, Request, State};
use super::{Config, Note, Timer};
use crate::commit::{Applied, Ended};
use crate::gateway::Participant;
use crate::hosting::{self, Role};
use crate::replication::{self, Index};
use crate::waiting::{CommitWait, RetryState};

/// The server side: every role that one node plays.
pub type Server = hosting::Server<Leader>;
/// The way out of a node or a gateway.
pub(super) type Context<'a> = hosting::Context<'a, Leader>;
/// One replica of one partition.
pub(super) type Partition = hosting::Partition<Leader>;
/// Everything around it that its handlers need.
pub(super) type World<'a> = hosting::World<'a, Leader>;

/// What only the leader knows; lost with its leadership, and never needed after it.
#[derive(Debug, Default)]
pub struct Leader {
    // As participant.
    /// Everybody who touches a key here, in order: the transaction queue, those that wait for locks,
    /// and those that hold them.
    pub queue: Queue,
    /// What those that are queued or wait will ask for when they may go.
    pub arrived: BTreeMap<TxnId, Arrived>,
    /// Of those that are prepared on a condition: which others must not commit, and have not aborted.
    pub conditional: BTreeMap<TxnId, BTreeSet<TxnId>>,
    /// What those that are prepared touch elsewhere, and how long they last here, if it was said.
    pub known: BTreeMap<TxnId, (Vec<Elsewhere>, Duration)>,
    /// Prepares proposed, not yet chosen.
    pub preparing: BTreeMap<TxnId, Prepared>,
    /// Commits proposed, not yet applied, whose keys others may have had since (LECSF): what each
    /// writes here.
    pub leaving: BTreeMap<TxnId, Vec<Key>>,
    /// The newest values of those.
    pub forwarded: BTreeMap<Key, Read>,
    /// Refusals proposed, not yet chosen.
    pub refusing: BTreeSet<TxnId>,
    /// Decisions proposed, not yet chosen.
    pub ending: BTreeSet<TxnId>,
    /// When the coordinator of a prepared transaction was last asked for the decision.
    pub asked: BTreeMap<TxnId, RetryState>,
    /// Endings that the coordinator's group may still ask about, and when it was last asked.
    pub unforgotten: BTreeMap<TxnId, RetryState>,
    /// Coordinators that were asked what may be forgotten and have not answered, and since when.
    pub forget_asked: BTreeMap<PartitionId, Time>,
    /// Proposals must be larger (C11).
    pub floor: Timestamp,
    /// The highest ceiling proposed.
    pub ceiling_proposed: Timestamp,
    /// Read-only requests that wait for a leadership check.
    pub reads: BTreeMap<u64, WaitingRead>,
    /// Read-only requests that wait for a higher ceiling.
    pub reads_above_ceiling: Vec<WaitingRead>,
    /// Read-only requests that wait for prepared transactions to end.
    pub reads_behind: Vec<WaitingRead>,
    /// Numbers leadership checks.
    pub next_read: u64,

    // As coordinator.
    /// Transactions under way.
    pub coordinating: BTreeMap<TxnId, Coordinating>,
    /// Commits decided whose timestamps have not passed yet.
    pub commit_wait: CommitWait,
    /// Decisions that every participant has acknowledged; to be settled together.
    pub settling: BTreeSet<TxnId>,
    /// When settled outcomes were first seen by this leader, for [`super::Config::retention`].
    pub settled_since: BTreeMap<TxnId, Time>,
}

/// A transaction that has arrived and is not prepared.
#[derive(Clone, Debug)]
pub struct Arrived {
    /// Who asked, last.
    pub client: NodeId,
    pub participant: Participant,
    pub coordinator: PartitionId,
    /// How long after its turn it will need its keys, its client thinks.
    pub lasts: Duration,
    /// What it touches at the other participants (§3.3.2).
    pub elsewhere: Vec<Elsewhere>,
    pub acknowledged_below: u64,
    /// Those that were refused for its sake (§3.3.1).
    pub refused: Vec<TxnId>,
    /// Whose coordinator was asked to answer its reads (§3.4, RECSF).
    pub forwarded_to: Option<TxnId>,
}

/// Somebody waits for what a transaction writes.
#[derive(Clone, Debug)]
pub struct Forward {
    pub txn: TxnId,
    pub client: NodeId,
    pub partition: PartitionId,
    pub reads: Vec<(Key, Read)>,
}

/// A read-only request that cannot be served yet.
#[derive(Clone, Debug)]
pub struct WaitingRead {
    pub client: NodeId,
    pub txn: TxnId,
    pub keys: Vec<Key>,
    pub at_least: Timestamp,
    /// Transactions that were prepared when it came, may write its keys, and have not ended; none if
    /// nobody has looked yet. Later ones cannot have been told to anybody when it began.
    pub behind: Option<BTreeSet<TxnId>>,
}

/// A leader's view of a transaction that it coordinates.
#[derive(Debug)]
pub struct Coordinating {
    /// Who wants to know.
    pub client: Option<NodeId>,
    /// Votes so far.
    pub votes: BTreeMap<PartitionId, Vote>,
    /// The last of the client's commit requests that was proposed, or is in the log; 0 if there is none.
    pub requested: u32,
    /// The client has given up what it asked for, because its reads did not hold, or its caller did.
    pub withdrawn: Option<AbortReason>,
    /// Clients that wait for what this transaction writes (§3.4, RECSF).
    pub forwards: Vec<Forward>,
    /// A decision has been proposed.
    pub is_decision_proposed: bool,
    /// What the facts decide, from the moment they do.
    pub outcome: Option<Outcome>,
    /// The outcome has been told and written back: its timestamp has passed.
    pub is_told: bool,
    /// Participants that have acknowledged the decision.
    pub acks: BTreeSet<PartitionId>,
    /// When the client was last heard of.
    pub heard: Time,
    /// When missing votes were last asked for, or missing acknowledgements last called in.
    pub asked: RetryState,
}

impl Role for Leader {
    type Protocol = super::Natto;
    type Log = Log;
    type State = State;
    type Own = ();
    type OwnRecord = Infallible;
    type Config = Config;
    type Msg = Msg;
    type Timer = Timer;
    type Note = Note;

    fn hosting(config: &Config) -> &hosting::Config {
        &config.hosting
    }

    fn applied(state: &State) -> Index {
        state.applied
    }

    fn set_applied(state: &mut State, index: Index) {
        state.applied = index;
    }

    fn log_message(partition: PartitionId, message: replication::Message<Log>) -> Msg {
        Msg::Replication { partition, message }
    }

    fn log_timer(partition: PartitionId, timer: replication::Timer) -> Timer {
        Timer::Replication(partition, timer)
    }

    fn not_leader(partition: PartitionId, leader: Option<NodeId>, txn: Option<TxnId>) -> Msg {
        Msg::NotLeader { partition, leader, txn }
    }

    fn members(partition: PartitionId, since: Index, voters: Vec<NodeId>) -> Msg {
        Msg::Members { partition, since, voters }
    }

    fn deliver(server: &mut Server, from: NodeId, msg: Msg, cx: &mut Context<'_>) {
        if let Some(id) = msg.partition() {
            server.on_message(id, from, msg, cx);
        } else if let Msg::Replication { partition, message } = msg {
            server.on_log_message(partition, from, message, cx);
        } else if let Msg::NotLeader { partition, leader, txn } = msg {
            server.on_not_leader(from, partition, leader, txn, cx);
        } else if let Msg::Members { partition, since, voters } = msg {
            server.on_members(partition, since, &voters);
        } else if let Msg::Probe { clock } = msg {
            // Of the node, not of a partition: whoever leads here, this is how long it takes.
            let delay = difference(cx.clock().now, clock);
            cx.send(from, Msg::ProbeReply { delay });
        } else {
            unreachable!("{} answers a client", msg.kind());
        }
    }

    fn on_timer(server: &mut Server, timer: Timer, cx: &mut Context<'_>) {
        match timer {
            Timer::Replication(id, timer) => server.on_log_timer(id, timer, cx),
            Timer::Turn(id) => server.with(id, cx, |p, world| p.on_turn(world)),
            Timer::Sweep(id) => server.with(id, cx, |p, world| p.on_sweep_timeout(world)),
            Timer::CommitWait(id) => {
                server.with(id, cx, |p, world| p.on_commit_wait_timeout(world));
            }
            Timer::Resend(_) | Timer::Heartbeat | Timer::Probe => {
                unreachable!("a client's timer at a server")
            }
        }
    }

    fn describe(partition: &Partition, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let State { prepared, coordinated, .. } = &partition.state;
        if let Some(leader) = &partition.leader
            && !leader.arrived.is_empty()
        {
            write!(f, " waiting {:?}", leader.arrived.keys())?;
        }
        if !prepared.is_empty() {
            write!(f, " prepared {:?}", prepared.keys())?;
        }
        if !coordinated.is_empty() {
            write!(f, " coordinated {:?}", coordinated.keys())?;
        }
        Ok(())
    }

    fn serve(partition: &mut Partition, from: NodeId, msg: Msg, world: &mut World<'_>) {
        partition.serve(from, msg, world);
    }

    fn on_chosen(partition: &mut Partition, command: &Command, world: &mut World<'_>) {
        let others = partition.state.aborted_by(command);
        let dependents = match command {
            Command::End { txn, .. } => partition.state.dependents(*txn),
            Command::Prepare { .. }
            | Command::Refuse { .. }
            | Command::Coordinate { .. }
            | Command::RequestCommit { .. }
            | Command::Decide { .. }
            | Command::Settle(_)
            | Command::Forget(_)
            | Command::Acknowledge(_)
            | Command::Ceiling(_) => Vec::new(),
        };
        let applied = partition.state.apply(partition.id, command, world.store);
        world.came_to(&applied);
        match applied {
            Applied::Nothing => {}
            Applied::Prepared(txn) => partition.on_prepared(txn, world),
            Applied::Ended(txn) => {
                for other in others {
                    let outcome = Outcome::Aborted(AbortReason::Conflict);
                    world.cx.claim(Claim::Decided { txn: other, outcome });
                    partition.on_ended(other, world);
                }
                if let Some(&Ended { outcome, .. }) = partition.state.ended.get(&txn) {
                    world.cx.claim(Claim::Decided { txn, outcome });
                }
                partition.on_ended(txn, world);
                for (dependent, coordinator) in dependents {
                    partition.on_condition(dependent, coordinator, world);
                }
            }
            Applied::Requested(txn) => partition.try_decide(txn, world),
            Applied::Decided(txn) => {
                if let Some(outcome) = partition.state.decision(txn) {
                    world.cx.claim(Claim::Decided { txn, outcome });
                }
                partition.on_decided(txn, world);
            }
            Applied::Settled => {
                if let Command::Settle(txns) = command {
                    partition.on_settled(txns, world);
                }
            }
            Applied::Ceiling => partition.on_ceiling(world),
        }
    }

    fn on_leading(partition: &mut Partition, world: &mut World<'_>) {
        partition.on_leading(world);
    }

    fn on_deposed(partition: &mut Partition, world: &mut World<'_>) {
        world.cx.cancel_timer(Timer::Sweep(partition.id));
        world.cx.cancel_timer(Timer::Turn(partition.id));
        world.cx.cancel_timer(Timer::CommitWait(partition.id));
    }

    fn on_read_index(partition: &mut Partition, id: u64, is_leader: bool, world: &mut World<'_>) {
        partition.on_read_index(id, is_leader, world);
    }

    fn on_not_leader(
        partition: &mut Partition,
        other: PartitionId,
        txn: TxnId,
        world: &mut World<'_>,
    ) {
        partition.on_not_leader(other, txn, world);
    }

    fn assert_invariants(partition: &Partition) {
        let (id, state) = (partition.id, &partition.state);
        assert!(state.floor <= state.ceiling, "{id}: floor above ceiling");
        for txn in state.prepared.keys() {
            assert!(!state.ended.contains_key(txn), "{txn} prepared and ended at {id}");
        }
        let Some(leader) = &partition.leader else { return };
        leader.queue.assert_invariants();
        for txn in leader.queue.transactions() {
            let is_known = match leader.queue.stage(txn) {
                Some(Stage::Queued | Stage::Waiting) => leader.arrived.contains_key(&txn),
                Some(Stage::Conditional) => leader.conditional.contains_key(&txn),
                Some(Stage::Prepared) => {
                    state.prepared.contains_key(&txn) || leader.preparing.contains_key(&txn)
                }
                None => false,
            };
            assert!(is_known, "{txn} is in the queue of {id} after its end");
        }
        for txn in leader.arrived.keys() {
            let stage = leader.queue.stage(*txn);
            assert!(
                matches!(stage, Some(Stage::Queued | Stage::Waiting | Stage::Conditional)),
                "{txn} has arrived at {id} and is {stage:?}"
            );
        }
        for (txn, conditions) in &leader.conditional {
            let held = |other: &TxnId| leader.queue.stage(*other) == Some(Stage::Prepared);
            assert!(
                leader.queue.stage(*txn) == Some(Stage::Conditional)
                    && !conditions.is_empty()
                    && conditions.iter().all(held),
                "{txn} is prepared at {id} unless {conditions:?}"
            );
        }
    }

    /// R6 allows endings and outcomes to stay only above what their clients are known here to have
    /// acknowledged.
    fn leaks(&self, state: &State) -> Vec<Leak> {
        let is_acknowledged = |txn: &&TxnId| state.is_acknowledged(**txn);
        let has_questioner = |ended: &&Ended| !ended.is_forgettable;
        let reads = self.reads.len() + self.reads_above_ceiling.len() + self.reads_behind.len();
        vec![
            ("prepared transactions", state.prepared.len()),
            ("coordinated transactions", state.coordinated.len()),
            ("endings with a questioner", state.ended.values().filter(has_questioner).count()),
            ("acknowledged endings", state.ended.keys().filter(is_acknowledged).count()),
            ("acknowledged outcomes", state.settled.keys().filter(is_acknowledged).count()),
            ("transactions in the queue", self.queue.len()),
            ("waiting transactions", self.arrived.len()),
            ("conditional prepares", self.conditional.len()),
            ("known holders", self.known.len()),
            ("prepares under way", self.preparing.len()),
            ("commits under way", self.leaving.len()),
            ("forwarded values", self.forwarded.len()),
            ("refusals under way", self.refusing.len()),
            ("endings under way", self.ending.len()),
            ("doubtful prepares", self.asked.len()),
            ("unforgotten endings", self.unforgotten.len()),
            ("waiting reads", reads),
            ("coordinations", self.coordinating.len()),
            ("waiting commits", self.commit_wait.len()),
            ("unsettled decisions", self.settling.len()),
        ]
    }
}

impl Partition {
    fn serve(&mut self, from: NodeId, msg: Msg, world: &mut World<'_>) {
        if let Some(led) = msg.led_by_sender() {
            world.routes.learn(led, from, world.cx.now());
        }
        match msg {
            Msg::ReadAndPrepare {
                txn,
                participant,
                coordinator,
                turn,
                lasts,
                elsewhere,
                acknowledged_below,
            } => {
                let arrived = Arrived {
                    client: from,
                    participant,
                    coordinator,
                    lasts,
                    elsewhere,
                    acknowledged_below,
                    refused: Vec::new(),
                    forwarded_to: None,
                };
                self.on_read_and_prepare(txn, turn, arrived, world);
            }
            Msg::CoordinatorPrepare { txn, participants, acknowledged_below, .. } => {
                self.on_coordinator_prepare(from, txn, participants, acknowledged_below, world);
            }
            Msg::Commit { txn, participants, writes, versions, round, is_provisional, .. } => {
                let request = Request { writes, versions, round, is_provisional };
                self.on_commit(from, txn, participants, request, world);
            }
            Msg::Abort { txn, participants, round, is_stale, .. } => {
                let reason = if is_stale { AbortReason::StaleRead } else { AbortReason::Client };
                self.on_abort(from, (txn, round), participants, reason, world);
            }
            Msg::ForwardRead { txn, client, partition, of, reads, .. } => {
                self.on_forward_read(of, Forward { txn, client, partition, reads }, world);
            }
            Msg::Heartbeat { txns, .. } => self.on_heartbeat(&txns, world),
            Msg::Resolve { txn, participants, .. } => {
                self.on_resolve(from, txn, participants, world);
            }
            Msg::PrepareResult { txn, partition, vote, .. } => {
                self.on_prepare_result(txn, partition, vote, world);
            }
            Msg::WritebackAck { txn, partition, .. } => self.on_writeback_ack(txn, partition),
            Msg::QueryDecision { txn, partition, vote, .. } => {
                self.on_query_decision(txn, partition, vote, world);
            }
            Msg::MayForget { partition, txns, .. } => self.on_may_forget(partition, txns, world),
            Msg::QueryPrepare { txn, coordinator, .. } => {
                self.on_query_prepare(txn, coordinator, world);
            }
            Msg::Writeback { txn, coordinator, verdict, .. } => {
                self.on_writeback(txn, coordinator, verdict, world);
            }
            Msg::Forget { txns, coordinator, .. } => self.on_forget(coordinator, txns, world),
            Msg::ReadOnly { txn, keys, at_least, .. } => {
                let read = WaitingRead { client: from, txn, keys, at_least, behind: None };
                self.on_read_only(read, world);
            }
            Msg::ReadResult { .. }
            | Msg::ForwardedRead { .. }
            | Msg::Waiting { .. }
            | Msg::Decided { .. }
            | Msg::ReadOnlyResult { .. }
            | Msg::Probe { .. }
            | Msg::ProbeReply { .. }
            | Msg::NotLeader { .. }
            | Msg::Members { .. }
            | Msg::Replication { .. } => {
                unreachable!("{} is not for a partition's leader", self.id)
            }
        }
    }

    /// This replica leads, and everything that earlier leaders left has been applied. Their queues
    /// are gone (N10): clients ask again, late, and those that are prepared go first.
    fn on_leading(&mut self, world: &mut World<'_>) {
        let now = world.cx.now();
        let mutations = world.config.mutations;
        let letter = Letter {
            waits_for_later: mutations.late_waits_for_later,
            ignores_waiters: mutations.waiters_are_bypassed,
        };
        let mut leader = Leader {
            queue: Queue::new(letter),
            // C12, R8: a predecessor may have promised anything up to its ceiling.
            floor: self.state.ceiling.max(self.state.floor),
            ceiling_proposed: self.state.ceiling,
            settled_since: self.state.settled.keys().map(|&txn| (txn, now)).collect(),
            ..Leader::default()
        };
        for (&txn, prepared) in &self.state.prepared {
            leader.queue.hold(txn, prepared.turn, prepared.reads(), &prepared.writes);
            if !prepared.unless.is_empty() {
                leader.queue.prepare_conditionally(txn);
                leader.conditional.insert(txn, prepared.unless.iter().copied().collect());
            }
            leader.asked.insert(txn, RetryState::new(now));
        }
        if !self.state.prepared.is_empty() {
            world.cx.note(Note::ParticipantTakeover);
        }
        leader.unforgotten =
            self.state.ended.keys().map(|&txn| (txn, RetryState::new(now))).collect();
        self.leader = Some(leader);
        self.take_over_coordination(world);
        world.cx.set_timer(Timer::Sweep(self.id), now + world.config.sweep_interval);
        self.reserve(world.cx.clock().now, world);
    }

    /// Whoever was asked about `txn` does not lead `partition`, and somebody else does: ask again
    /// there what this replica, as leader, wants of it.
    fn on_not_leader(&mut self, partition: PartitionId, txn: TxnId, world: &mut World<'_>) {
        let Some(leader) = &self.leader else { return };
        if let Some(prepared) = self.state.prepared.get(&txn)
            && prepared.coordinator == partition
        {
            let vote = prepared.vote();
            if leader.asked.get(&txn).is_some_and(|asked| asked.times > 0) {
                let query =
                    Msg::QueryDecision { txn, coordinator: partition, partition: self.id, vote };
                world.send_to_leader(partition, query);
            } else {
                self.send_vote(txn, partition, vote, world);
            }
        }
        if let Some(Ended { coordinator, outcome: Outcome::Aborted(reason), .. }) =
            self.state.ended.get(&txn)
            && *coordinator == partition
        {
            self.send_vote(txn, partition, Vote::Refused(*reason), world);
        }
        if let Some(coordinating) = leader.coordinating.get(&txn) {
            if coordinating.is_told {
                self.write_back(txn, Some(partition), world);
            } else if coordinating.requested > 0 {
                self.ask_for_votes(txn, Some(partition), world);
            }
        }
    }

    /// The leader looks for overdue work.
    pub(super) fn on_sweep_timeout(&mut self, world: &mut World<'_>) {
        if self.leader.is_none() {
            return;
        }
        // Also in case the clock was set forward.
        self.on_turn(world);
        self.sweep_participant(world);
        self.sweep_coordinator(world);
        let next = world.cx.now() + world.config.sweep_interval;
        world.cx.set_timer(Timer::Sweep(self.id), next);
    }
}
