//! What only a partition's leader knows, and how its messages and its log's commands find their
//! handlers.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::fmt;

use orthodrome_core::id::{NodeId, PartitionId, TxnId};
use orthodrome_core::machine::{Claim, Leak, Message as _};
use orthodrome_core::time::{Time, Timestamp};
use orthodrome_core::txn::{Key, Outcome, Version, Writes};

use super::locks::LockTable;
use super::message::{Command, Log, Msg, Vote};
use super::state::{Applied, Prepared, State};
use super::{Config, Note, Timer};
use crate::acknowledged::overdue;
use crate::hosting::{self, Role};
use crate::replication::{self, Index};
use crate::waiting::{CommitWait, RetryState};

/// The server side: every role that one node plays.
pub type Server = hosting::Server<Leader>;
/// One replica of one partition.
pub(super) type Partition = hosting::Partition<Leader>;
/// Everything around it that its handlers need.
pub(super) type World<'a> = hosting::World<'a, Leader>;
/// The way out of a node or a gateway.
pub(super) type Context<'a> = hosting::Context<'a, Leader>;

/// What only the leader knows; lost with its leadership, and never needed after it.
#[derive(Debug, Default)]
pub struct Leader {
    // As participant.
    /// Who holds and who waits.
    pub locks: LockTable,
    /// Transactions in the lock table that have not been asked to prepare.
    pub sessions: BTreeMap<TxnId, Session>,
    /// Prepares proposed, not yet chosen.
    pub preparing: BTreeMap<TxnId, Prepared>,
    /// Decisions proposed, not yet chosen.
    pub ending: BTreeSet<TxnId>,
    /// When the coordinator of a prepared transaction was last asked for the decision.
    pub asked: BTreeMap<TxnId, RetryState>,
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

    /// When this leader first saw outcomes that are kept for clients to acknowledge.
    pub kept_since: BTreeMap<TxnId, Time>,
}

/// A transaction that holds locks, or waits for some, and is not prepared.
#[derive(Debug)]
pub struct Session {
    /// Its gateway.
    pub client: NodeId,
    /// The last round that asked for something here.
    pub round: u32,
    /// What that round reads here.
    pub reads: Vec<Key>,
    /// When its client was last heard of.
    pub heard: Time,
}

/// A read-only request that cannot be served yet.
#[derive(Clone, Debug)]
pub struct WaitingRead {
    pub client: NodeId,
    pub txn: TxnId,
    pub keys: Vec<Key>,
    pub at_least: Timestamp,
    /// Transactions that were prepared when it came, write its keys, and have not ended; none if
    /// nobody has looked yet. Later ones cannot have been told to anybody when it began.
    pub behind: Option<BTreeSet<TxnId>>,
}

/// A leader's view of a transaction that it coordinates.
#[derive(Debug)]
pub struct Coordinating {
    /// Who wants to know.
    pub client: Option<NodeId>,
    /// What the client asked to commit, if it did.
    pub request: Option<Request>,
    /// Votes so far.
    pub votes: BTreeMap<PartitionId, Vote>,
    /// A decision has been proposed.
    pub is_decision_proposed: bool,
    /// The decision, once it is chosen.
    pub outcome: Option<Outcome>,
    /// The outcome has been told: its timestamp has passed.
    pub is_told: bool,
    /// Participants that have acknowledged the decision.
    pub acks: BTreeSet<PartitionId>,
    /// When the request came.
    pub since: Time,
    /// When missing votes were last asked for, or missing acknowledgements last called in.
    pub asked: RetryState,
}

/// What a client asked to commit.
#[derive(Debug)]
pub struct Request {
    pub participants: Vec<PartitionId>,
    pub versions: Vec<(Key, Version)>,
    pub writes: Writes,
    pub acknowledged_below: u64,
}

impl Role for Leader {
    type Protocol = super::Locking;
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
        } else {
            unreachable!("{} answers a client", msg.kind());
        }
    }

    fn on_timer(server: &mut Server, timer: Timer, cx: &mut Context<'_>) {
        match timer {
            Timer::Replication(id, timer) => server.on_log_timer(id, timer, cx),
            Timer::Sweep(id) => server.with(id, cx, |p, world| p.on_sweep_timeout(world)),
            Timer::CommitWait(id) => {
                server.with(id, cx, |p, world| p.on_commit_wait_timeout(world));
            }
            Timer::Resend(_) | Timer::Heartbeat => unreachable!("a client's timer at a server"),
        }
    }

    fn serve(partition: &mut Partition, from: NodeId, msg: Msg, world: &mut World<'_>) {
        partition.serve(from, msg, world);
    }

    fn on_chosen(partition: &mut Partition, command: &Command, world: &mut World<'_>) {
        let applied = partition.state.apply(partition.id, command, world.store);
        world.came_to(&applied);
        match applied {
            Applied::Nothing => {}
            Applied::Prepared(txn) => partition.on_prepared(txn, world),
            Applied::Ended(txn, coordinator) => {
                if let Some(&outcome) = partition.state.ended.get(&txn) {
                    world.cx.claim(Claim::Decided { txn, outcome });
                }
                partition.on_ended(txn, coordinator, world);
            }
            Applied::Decided(txn) => {
                if let Some(outcome) = partition.state.decision(txn) {
                    world.cx.claim(Claim::Decided { txn, outcome });
                }
                partition.on_decided(txn, world);
            }
            Applied::Settled => partition.on_settled(world),
            Applied::Ceiling => partition.on_ceiling(world),
        }
    }

    fn on_leading(partition: &mut Partition, world: &mut World<'_>) {
        partition.on_leading(world);
    }

    fn on_deposed(partition: &mut Partition, world: &mut World<'_>) {
        world.cx.cancel_timer(Timer::Sweep(partition.id));
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

    /// R6 allows endings and outcomes to stay only above what their clients are known here to have
    /// acknowledged.
    fn leaks(&self, state: &State) -> Vec<Leak> {
        let is_acknowledged = |txn: &&TxnId| state.is_acknowledged(**txn);
        let reads = self.reads.len() + self.reads_above_ceiling.len() + self.reads_behind.len();
        vec![
            ("prepared transactions", state.prepared.len()),
            ("decisions with an audience", state.coordinated.len()),
            ("acknowledged endings", state.ended.keys().filter(is_acknowledged).count()),
            ("acknowledged outcomes", state.settled.keys().filter(is_acknowledged).count()),
            ("holders of locks and waiters", self.locks.owners().count()),
            ("sessions", self.sessions.len()),
            ("prepares under way", self.preparing.len()),
            ("endings under way", self.ending.len()),
            ("doubtful prepares", self.asked.len()),
            ("waiting reads", reads),
            ("coordinations", self.coordinating.len()),
            ("waiting commits", self.commit_wait.len()),
            ("unsettled decisions", self.settling.len()),
        ]
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
        assert!(state.floor <= state.ceiling, "{id}: floor above ceiling");
        for txn in state.prepared.keys() {
            assert!(!state.ended.contains_key(txn), "{txn} prepared and ended at {id}");
        }
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

impl Partition {
    fn serve(&mut self, from: NodeId, msg: Msg, world: &mut World<'_>) {
        if let Some(led) = msg.led_by_sender() {
            world.routes.learn(led, from, world.cx.now());
        }
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

    /// Locks of prepared transactions are in the state, so they are the first in the new table;
    /// all others are gone, and their transactions must show at their prepare that nothing they
    /// read has changed (T4).
    fn on_leading(&mut self, world: &mut World<'_>) {
        let now = world.cx.now();
        let (config, state) = (world.config, &self.state);
        let mut leader = Leader {
            locks: LockTable::new(config.preemption, config.mutations.wounds_prepared),
            // C12, R8: a predecessor may have promised anything up to its ceiling.
            floor: state.ceiling.max(state.floor),
            ceiling_proposed: state.ceiling,
            kept_since: state.ended.keys().chain(state.settled.keys()).map(|&t| (t, now)).collect(),
            ..Leader::default()
        };
        for (&txn, prepared) in &state.prepared {
            let is_free = leader.locks.seize(txn, prepared.locks());
            assert!(
                is_free || config.mutations != super::Mutations::default(),
                "{txn} is prepared at {} beside a conflicting one",
                self.id
            );
            leader.asked.insert(txn, RetryState::new(now));
        }
        if !state.prepared.is_empty() {
            world.cx.note(Note::ParticipantTakeover);
        }
        self.leader = Some(leader);
        self.take_over_coordination(world);
        world.cx.set_timer(Timer::Sweep(self.id), now + world.config.sweep_interval);
        self.reserve(world.cx.clock().now, world);
    }

    /// Whoever was asked about `txn` does not lead `other`, and somebody else does: ask again there
    /// what this replica, as leader, wants of it.
    fn on_not_leader(&mut self, other: PartitionId, txn: TxnId, world: &mut World<'_>) {
        if self.leader.is_none() {
            return;
        }
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
        if self.leader.is_none() {
            return;
        }
        self.sweep_participant(world);
        self.sweep_coordinator(world);
        self.sweep_kept(world);
        let next = world.cx.now() + world.config.sweep_interval;
        world.cx.set_timer(Timer::Sweep(self.id), next);
    }

    /// R6: outcomes are kept until their clients acknowledge them; for clients that have been
    /// silent for too long, the leader does.
    fn sweep_kept(&mut self, world: &mut World<'_>) {
        let now = world.cx.now();
        let retention = world.config.retention;
        let Some(leader) = &mut self.leader else { return };
        let state = &self.state;
        let is_kept =
            |txn: &TxnId| state.ended.contains_key(txn) || state.settled.contains_key(txn);
        let silent = overdue(&mut leader.kept_since, is_kept, retention, now);
        if !silent.is_empty() {
            world.cx.note(Note::Retired);
            self.propose(Command::Acknowledge(silent), world);
        }
    }
}
