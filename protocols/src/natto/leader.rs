//! The leader's own state, and the dispatch of its messages and of its log's commands.

use std::convert::Infallible;
use std::fmt;

use orthodrome_core::id::{NodeId, PartitionId, TxnId};
use orthodrome_core::machine::{Claim, Leak, Message as _};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::time::{Duration, Timestamp};
use orthodrome_core::txn::{AbortReason, Key, Outcome, Read};

use super::message::{Command, Elsewhere, Log, Msg};
use super::queue::{Queue, Stage};
use super::state::{Prepared, Request, State};
use super::{Config, Note, Timer};
use crate::commit::{
    Applied, Coordination, Participation, Reading, Verdict, WaitingRead, valid_at_least,
};
use crate::delays::difference;
use crate::gateway::Participant;
use crate::hosting::{self, Role};

/// The server side: every role that one node plays.
pub type Server = hosting::Server<Leader>;
/// The context of a node or a gateway.
pub(super) type Context<'a> = hosting::Context<'a, Leader>;
/// One replica of one partition.
pub(super) type Partition = hosting::Partition<Leader>;
/// The same while it leads.
pub(super) type Leading<'a> = hosting::Leading<'a, Leader>;
/// The context of its handlers.
pub(super) type World<'a> = hosting::World<'a, Leader>;

/// The leader's own state. It is lost with its leadership, and never needed afterwards.
#[derive(Debug, Default)]
pub struct Leader {
    // For the role of participant.
    /// All transactions that access a key here, in order: the transaction queue, those that wait
    /// for locks, and those that hold locks.
    pub queue: Queue,
    /// The requests of transactions that are queued or waiting.
    pub arrived: OrdMap<TxnId, Arrived>,
    /// For each transaction prepared on a condition: the transactions that must not commit, and
    /// have not aborted yet.
    pub conditional: OrdMap<TxnId, OrdSet<TxnId>>,
    /// For each prepared transaction: its keys at other participants, and how long it lasts here,
    /// if its client said so.
    pub known: OrdMap<TxnId, (Vec<Elsewhere>, Duration)>,
    /// The state of pending transactions, and what is remembered of ended ones.
    pub participation: Participation<Prepared>,
    /// Commits that are proposed but not applied, whose keys other transactions may have taken
    /// since (LECSF), with the keys that each writes here.
    pub leaving: OrdMap<TxnId, Vec<Key>>,
    /// The newest values of those keys.
    pub forwarded: OrdMap<Key, Read>,
    /// Promises to readers, and the readers that wait.
    pub reading: Reading,

    /// For the role of coordinator.
    pub coordination: Coordination<Leader>,
}

/// A transaction that has arrived and is not prepared.
#[derive(Clone, Debug)]
pub struct Arrived {
    /// The gateway that asked last.
    pub client: NodeId,
    pub participant: Participant,
    pub coordinator: PartitionId,
    /// How long after its turn it will need its keys, as its client estimates.
    pub lasts: Duration,
    /// Its keys at the other participants (§3.3.2).
    pub elsewhere: Vec<Elsewhere>,
    pub acknowledged_below: u64,
    /// Transactions that were refused in its favour (§3.3.1).
    pub refused: Vec<TxnId>,
    /// The transaction whose coordinator was asked to answer its reads (§3.4, RECSF).
    pub forwarded_to: Option<TxnId>,
}

/// A transaction that waits for another's writes.
#[derive(Clone, Debug)]
pub struct Forward {
    pub txn: TxnId,
    pub client: NodeId,
    pub partition: PartitionId,
    pub reads: Vec<(Key, Read)>,
}

impl Role for Leader {
    crate::commit::role_items!(super::Natto);

    type Own = ();
    type OwnRecord = Infallible;

    /// The delay is that of the node, not of a partition.
    fn on_node_message(from: NodeId, msg: Msg, cx: &mut Context<'_>) {
        let Msg::Probe { clock } = msg else { unreachable!("{} answers a client", msg.kind()) };
        let delay = difference(cx.clock().now, clock);
        cx.send(from, Msg::ProbeReply { delay });
    }

    fn on_timer(server: &mut Server, timer: Timer, cx: &mut Context<'_>) {
        match timer {
            Timer::Replication(id, timer) => server.on_log_timer(id, timer, cx),
            Timer::Turn(id) => server.with(id, cx, |p, world| p.led().on_turn(world)),
            Timer::Sweep(id) => server.with(id, cx, |p, world| p.led().on_sweep_timeout(world)),
            Timer::CommitWait(id) => {
                server.with(id, cx, |p, world| p.led().on_commit_wait_timeout(world));
            }
            Timer::Resend(_) | Timer::Heartbeat | Timer::Probe => {
                unreachable!("a client's timer at a server")
            }
        }
    }

    fn pending_names(partition: &Partition, name: &mut dyn FnMut(&Key)) {
        let prepared = partition.state.prepared.values().flat_map(|prepared| &prepared.writes);
        let queued = partition.leader.iter().flat_map(|leader| leader.queue.written_keys());
        prepared.chain(queued).for_each(name);
    }

    fn closed(partition: &Partition) -> Option<Timestamp> {
        let leader = partition.leader.as_ref()?;
        let prepared = partition.state.prepared.values();
        let prepared = prepared.chain(leader.participation.preparing.values());
        let proposals = prepared.map(|prepared| prepared.proposal);
        Some(partition.state.closed(leader.reading.floor, proposals))
    }

    fn command_names(command: &Command, name: &mut dyn FnMut(&Key)) {
        match command {
            Command::Prepare { writes, .. } => writes.iter().for_each(name),
            Command::End { verdict: Verdict::Commit(_, writes), .. } => {
                writes.keys().for_each(name);
            }
            Command::Refuse { .. }
            | Command::End { verdict: Verdict::Abort(_), .. }
            | Command::Coordinate { .. }
            | Command::RequestCommit { .. }
            | Command::Decide { .. }
            | Command::Settle(_)
            | Command::Forget(_)
            | Command::Acknowledge(_)
            | Command::Ceiling(_) => {}
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
        let settled: &[TxnId] = if let Command::Settle(txns) = command { txns } else { &[] };
        let applied = partition.state.apply(partition.id, command, world.store);
        applied.add_to(world.effects());
        for &txn in others.iter().filter(|_| matches!(applied, Applied::Ended(_))) {
            let outcome = Outcome::Aborted(AbortReason::Conflict);
            world.cx.claim(Claim::Decided { txn, outcome });
        }
        if let Some(outcome) = partition.state.told_by(applied) {
            world.cx.claim(outcome);
        }
        // A follower does nothing more.
        let Some(mut leading) = partition.leading() else { return };
        match applied {
            Applied::Prepared(txn) => leading.on_prepared(txn, world),
            Applied::Ended(txn) => {
                for other in others {
                    leading.on_ended(other, world);
                }
                leading.on_ended(txn, world);
                for (dependent, coordinator) in dependents {
                    leading.on_condition(dependent, coordinator, world);
                }
            }
            Applied::Ceiling => leading.on_ceiling(world),
            Applied::Nothing | Applied::Requested(_) | Applied::Decided(_) | Applied::Settled => {
                leading.on_coordinated(applied, settled, world)
            }
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

    fn assert_invariants(partition: &Partition) {
        let (id, state) = (partition.id, &partition.state);
        state.assert_invariants(id);
        let Some(leader) = &partition.leader else { return };
        leader.queue.assert_invariants();
        for txn in leader.queue.transactions() {
            let is_known = match leader.queue.stage(txn) {
                Some(Stage::Queued | Stage::Waiting) => leader.arrived.contains_key(&txn),
                Some(Stage::Conditional) => leader.conditional.contains_key(&txn),
                Some(Stage::Prepared) => {
                    state.prepared.contains_key(&txn)
                        || leader.participation.preparing.contains_key(&txn)
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

    fn leaks(&self, state: &State) -> Vec<Leak> {
        let mut leaks = vec![
            state.unforgettable(),
            ("transactions in the queue", self.queue.len()),
            ("waiting transactions", self.arrived.len()),
            ("conditional prepares", self.conditional.len()),
            ("known holders", self.known.len()),
            ("commits under way", self.leaving.len()),
            ("forwarded values", self.forwarded.len()),
            ("waiting reads", self.reading.len()),
        ];
        leaks.extend(state.leaks());
        leaks.extend(self.participation.leaks());
        leaks.extend(self.coordination.leaks());
        leaks
    }
}

impl Leading<'_> {
    fn serve(&mut self, from: NodeId, msg: Msg, world: &mut World<'_>) {
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
            Msg::WritebackAck { txn, partition, .. } => {
                self.on_decision_ack(txn, partition);
            }
            Msg::QueryDecision { txn, partition, vote, .. } => {
                self.on_query_decision(txn, partition, vote, world);
            }
            Msg::MayForget { partition, txns, .. } => self.on_may_forget(partition, txns, world),
            Msg::QueryPrepare { txn, coordinator, .. } => {
                self.on_query_prepare(txn, coordinator, world);
            }
            Msg::Writeback { txn, coordinator, verdict, .. } => {
                self.on_decision(txn, coordinator, verdict, world);
            }
            Msg::Forget { txns, coordinator, .. } => self.on_forget(coordinator, txns, world),
            Msg::ReadOnly { txn, keys, at_least, .. } => {
                let at_least = valid_at_least(&keys, at_least, world.cx.clock().now);
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

    /// The leader looks for overdue work.
    pub(super) fn on_sweep_timeout(&mut self, world: &mut World<'_>) {
        // Also in case the clock was set forward.
        self.on_turn(world);
        self.reserve(world.cx.clock().now, world);
        self.sweep_participation(world);
        self.sweep_coordinator(world);
        let next = world.cx.now() + world.config.timeouts.sweep_interval;
        world.cx.set_timer(Timer::Sweep(self.id), next);
    }
}

impl Partition {
    /// This replica leads, and everything that earlier leaders left has been applied. Their queues
    /// are lost (N10): clients ask again, late, and prepared transactions go first.
    fn on_leading(&mut self, world: &mut World<'_>) {
        let now = world.cx.now();
        let mut leader = Leader {
            queue: Queue::new(world.config.mutations),
            participation: Participation::new(
                self.state.prepared.keys(),
                self.state.ended.keys(),
                now,
            ),
            reading: Reading::new(&self.state),
            coordination: Coordination::new(self.state.settled.keys().copied(), now),
            ..Leader::default()
        };
        for (&txn, prepared) in &self.state.prepared {
            leader.queue.hold(txn, prepared.turn, prepared.reads(), &prepared.writes);
            if !prepared.unless.is_empty() {
                leader.queue.prepare_conditionally(txn);
                leader.conditional.insert(txn, prepared.unless.iter().copied().collect());
            }
        }
        if !self.state.prepared.is_empty() {
            world.cx.note(Note::ParticipantTakeover);
        }
        self.leader = Some(leader);
        let mut leading = self.led();
        leading.take_over_coordination(world);
        world.cx.set_timer(Timer::Sweep(leading.id), now + world.config.timeouts.sweep_interval);
        leading.reserve(world.cx.clock().now, world);
    }
}
