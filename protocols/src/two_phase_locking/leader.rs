//! The leader's own state, and the dispatch of its messages and of its log's commands.

use std::convert::Infallible;
use std::fmt;

use orthodrome_core::id::{NodeId, PartitionId, TxnId};
use orthodrome_core::machine::{Claim, Leak};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::time::{Time, Timestamp};
use orthodrome_core::txn::{Key, Version, Writes};

use super::locks::LockTable;
use super::message::{Command, Log, Msg, Vote};
use super::state::{Prepared, State};
use super::{Config, Note, Timer};
use crate::commit::{Applied, Coordination, Reading, WaitingRead, valid_at_least};
use crate::hosting::{self, Role};
use crate::waiting::RetryState;

/// The server side: every role that one node plays.
pub type Server = hosting::Server<Leader>;
/// One replica of one partition.
pub(super) type Partition = hosting::Partition<Leader>;
/// The same while it leads.
pub(super) type Leading<'a> = hosting::Leading<'a, Leader>;
/// The context of its handlers.
pub(super) type World<'a> = hosting::World<'a, Leader>;
/// The context of a node or a gateway.
pub(super) type Context<'a> = hosting::Context<'a, Leader>;

/// The leader's own state. It is lost with its leadership, and never needed afterwards.
#[derive(Debug, Default)]
pub struct Leader {
    // For the role of participant.
    /// The lock table.
    pub locks: LockTable,
    /// Transactions in the lock table that have not been asked to prepare.
    pub sessions: OrdMap<TxnId, Session>,
    /// Prepares that are proposed but not chosen.
    pub preparing: OrdMap<TxnId, Prepared>,
    /// Decisions that are proposed but not chosen.
    pub ending: OrdMap<TxnId, PartitionId>,
    /// When the coordinator of a prepared transaction was last asked for the decision.
    pub asked: OrdMap<TxnId, RetryState>,
    /// Promises to readers, and the readers that wait.
    pub reading: Reading,

    /// For the role of coordinator.
    pub coordination: Coordination<Leader>,
}

/// A transaction that holds locks, or waits for some, and is not prepared.
#[derive(Debug)]
pub struct Session {
    /// Its gateway.
    pub client: NodeId,
    /// The last round that requested locks here.
    pub round: u32,
    /// The keys that this round reads here.
    pub reads: Vec<Key>,
    /// When the last message of its client arrived.
    pub heard: Time,
}

/// A client's request to commit.
#[derive(Debug)]
pub struct Request {
    pub participants: Vec<PartitionId>,
    pub versions: Vec<(Key, Version)>,
    pub writes: Writes,
    pub acknowledged_below: u64,
}

impl Role for Leader {
    crate::commit::role_items!(super::Locking);

    type Own = ();
    type OwnRecord = Infallible;

    fn on_timer(server: &mut Server, timer: Timer, cx: &mut Context<'_>) {
        match timer {
            Timer::Replication(id, timer) => server.on_log_timer(id, timer, cx),
            Timer::Sweep(id) => server.with(id, cx, |p, world| p.led().on_sweep_timeout(world)),
            Timer::CommitWait(id) => {
                server.with(id, cx, |p, world| p.led().on_commit_wait_timeout(world));
            }
            Timer::Resend(_) | Timer::Heartbeat => unreachable!("a client's timer at a server"),
        }
    }

    fn on_chosen(partition: &mut Partition, command: &Command, world: &mut World<'_>) {
        let settled: &[TxnId] = if let Command::Settle(txns) = command { txns } else { &[] };
        let applied = partition.state.apply(partition.id, command, world.store);
        world.came_to(&applied);
        let told = match applied {
            Applied::Ended(txn) => partition.state.ended.get(&txn).map(|&outcome| (txn, outcome)),
            Applied::Decided(txn) => partition.state.decision(txn).map(|outcome| (txn, outcome)),
            Applied::Nothing
            | Applied::Prepared(_)
            | Applied::Requested(_)
            | Applied::Settled
            | Applied::Ceiling => None,
        };
        if let Some((txn, outcome)) = told {
            world.cx.claim(Claim::Decided { txn, outcome });
        }
        // A follower does nothing more.
        let Some(mut leading) = partition.leading() else { return };
        match applied {
            Applied::Nothing | Applied::Requested(_) => {}
            Applied::Prepared(txn) => leading.on_prepared(txn, world),
            Applied::Ended(txn) => leading.on_ended(txn, world),
            Applied::Decided(txn) => leading.on_decided(txn, world),
            Applied::Settled => leading.on_settled(settled, world),
            Applied::Ceiling => leading.on_ceiling(world),
        }
    }

    /// Locks of transactions that are not prepared are no votes. A prepare that is proposed is in the
    /// log.
    fn pending_names(partition: &Partition, name: &mut dyn FnMut(&Key)) {
        let prepared = partition.state.prepared.values();
        prepared.flat_map(|prepared| prepared.writes.keys()).for_each(name);
    }

    fn closed(partition: &Partition) -> Option<Timestamp> {
        let leader = partition.leader.as_ref()?;
        let prepared = partition.state.prepared.values();
        let prepared = prepared.chain(leader.preparing.values());
        let proposals = prepared.map(|prepared| prepared.proposal);
        Some(partition.state.closed(leader.reading.floor, proposals))
    }

    fn command_names(command: &Command, name: &mut dyn FnMut(&Key)) {
        match command {
            Command::Prepare { writes, .. } => writes.keys().for_each(name),
            // It writes what its prepare says.
            Command::End { .. }
            | Command::Decide { .. }
            | Command::Settle(_)
            | Command::Acknowledge(_)
            | Command::Ceiling(_) => {}
        }
    }

    fn on_leading(partition: &mut Partition, world: &mut World<'_>) {
        partition.on_leading(world);
    }

    fn on_deposed(partition: &mut Partition, world: &mut World<'_>) {
        world.cx.cancel_timer(Timer::Sweep(partition.id));
        world.cx.cancel_timer(Timer::CommitWait(partition.id));
    }

    fn leaks(&self, state: &State) -> Vec<Leak> {
        let mut leaks = vec![
            ("holders of locks and waiters", self.locks.owners().count()),
            ("sessions", self.sessions.len()),
            ("prepares under way", self.preparing.len()),
            ("endings under way", self.ending.len()),
            ("doubtful prepares", self.asked.len()),
            ("waiting reads", self.reading.len()),
        ];
        leaks.extend(state.leaks());
        leaks.extend(self.coordination.leaks());
        leaks
    }

    fn describe(partition: &Partition, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let State { prepared, coordinated: decided, .. } = &partition.state;
        if let Some(leader) = &partition.leader
            && !leader.sessions.is_empty()
        {
            write!(f, " open {:?}", leader.sessions.keys())?;
        }
        if !prepared.is_empty() {
            write!(f, " prepared {:?}", prepared.keys())?;
        }
        if !decided.is_empty() {
            write!(f, " decided {:?}", decided.keys())?;
        }
        Ok(())
    }

    fn assert_invariants(partition: &Partition) {
        let (id, state) = (partition.id, &partition.state);
        state.assert_invariants(id);
        let Some(leader) = &partition.leader else { return };
        leader.locks.assert_invariants();
        for txn in leader.locks.owners() {
            assert!(
                leader.sessions.contains_key(&txn)
                    || state.prepared.contains_key(&txn)
                    || leader.preparing.contains_key(&txn),
                "{txn} holds locks of {id} after its end"
            );
        }
        for txn in leader.sessions.keys() {
            assert!(
                !state.prepared.contains_key(txn) && !leader.preparing.contains_key(txn),
                "{txn} is prepared and undecided at {id}"
            );
        }
    }
}

impl Leading<'_> {
    fn serve(&mut self, from: NodeId, msg: Msg, world: &mut World<'_>) {
        match msg {
            Msg::Lock { txn, round, rank, participant } => {
                self.on_lock(from, (txn, round), rank, participant, world);
            }
            Msg::KeepAlive { txns, waiting, .. } => self.on_heartbeat(&txns, &waiting, world),
            Msg::Release { txn, .. } => self.on_release(txn, world),
            Msg::Prepare { txn, coordinator, versions, writes, acknowledged_below, .. } => {
                let wish = super::participant::Wish { versions, writes, acknowledged_below };
                self.on_prepare(txn, coordinator, wish, world);
            }
            Msg::Decision { txn, coordinator, outcome, .. } => {
                self.on_decision(txn, coordinator, outcome, world);
            }
            Msg::ReadOnly { txn, keys, at_least, .. } => {
                let at_least = valid_at_least(&keys, at_least, world.cx.clock().now);
                let read = WaitingRead { client: from, txn, keys, at_least, behind: None };
                self.on_read_only(read, world);
            }
            Msg::Commit { txn, participants, versions, writes, acknowledged_below, .. } => {
                let request = Request { participants, versions, writes, acknowledged_below };
                self.on_commit(from, txn, request, world);
            }
            Msg::Vote { txn, partition, vote, .. } => self.on_vote(txn, partition, vote, world),
            Msg::DecisionAck { txn, partition, .. } => self.on_decision_ack(txn, partition),
            Msg::QueryDecision { txn, partition, proposal, .. } => {
                self.on_query_decision(txn, partition, Vote::Prepared { proposal }, world);
            }
            Msg::Resolve { txn, participants, .. } => {
                self.on_resolve(from, txn, participants, world);
            }
            Msg::Locked { .. }
            | Msg::Waiting { .. }
            | Msg::Wounded { .. }
            | Msg::Decided { .. }
            | Msg::ReadOnlyResult { .. }
            | Msg::NotLeader { .. }
            | Msg::Members { .. }
            | Msg::Replication { .. } => {
                unreachable!("{} is not for a partition's leader", self.id)
            }
        }
    }

    /// The replica that was asked about `txn` does not lead `other`, and another one does. Sends it
    /// this leader's open requests about `txn`.
    fn on_not_leader(&mut self, other: PartitionId, txn: TxnId, world: &mut World<'_>) {
        if let Some(prepared) = self.state.prepared.get(&txn)
            && prepared.coordinator == other
        {
            self.query_decision(txn, world);
        }
        self.ask_for_votes(txn, Some(other), world);
        self.tell_participants(txn, Some(other), world);
    }

    /// The leader looks for overdue work.
    pub(super) fn on_sweep_timeout(&mut self, world: &mut World<'_>) {
        self.sweep_participant(world);
        self.sweep_coordinator(world);
        let next = world.cx.now() + world.config.timeouts.sweep_interval;
        world.cx.set_timer(Timer::Sweep(self.id), next);
    }
}

impl Partition {
    /// Locks of prepared transactions are in the state, so they are the first in the new table. All
    /// others are gone: their transactions must show at their prepare that none of their reads has
    /// changed (T4).
    fn on_leading(&mut self, world: &mut World<'_>) {
        let now = world.cx.now();
        let (config, state) = (world.config, &self.state);
        let mut leader = Leader {
            locks: LockTable::new(config.preemption, config.mutations.wounds_prepared()),
            reading: Reading::new(state),
            coordination: Coordination::new(
                state.ended.keys().chain(state.settled.keys()).copied(),
                now,
            ),
            ..Leader::default()
        };
        for (&txn, prepared) in &state.prepared {
            let is_free = leader.locks.seize(txn, prepared.locks());
            assert!(
                is_free || config.mutations.is_any(),
                "{txn} is prepared at {} beside a conflicting one",
                self.id
            );
            leader.asked.insert(txn, RetryState::new(now));
        }
        if !state.prepared.is_empty() {
            world.cx.note(Note::ParticipantTakeover);
        }
        self.leader = Some(leader);
        let mut leading = self.led();
        leading.take_over_coordination(world);
        world.cx.set_timer(Timer::Sweep(leading.id), now + world.config.timeouts.sweep_interval);
        leading.reserve(world.cx.clock().now, world);
    }
}
