//! One replica of one partition: the replicated log, the state it gives, and, where this replica
//! leads, what only a leader knows.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use orthodrome_core::id::{NodeId, PartitionId, TxnId};
use orthodrome_core::locks::PendingKeys;
use orthodrome_core::machine::{Claim, Leftover};
use orthodrome_core::store::Versions;
use orthodrome_core::time::{Time, Timestamp};
use orthodrome_core::txn::{Key, Outcome};

use super::cpc::{FastVote, PendingList};
use super::fast::{Fast, Recovery};
use super::message::{Chunk, Command, Log, Msg, Verdict, Vote};
use super::participant::Prepare;
use super::server::World;
use super::state::{Applied, Ended, Prepared, State};
use super::{Note, Timer};
use crate::replication::{self, Event, Payload, Replica};

/// One replica of one partition.
#[derive(Debug)]
pub(super) struct Partition {
    pub id: PartitionId,
    pub replica: Replica<Log>,
    pub state: State,
    /// Present while this replica leads and is ready to serve.
    pub leader: Option<Leader>,
    /// Requests that came while this replica led but was not ready (§4.3.3, step 1).
    early: Vec<(NodeId, Msg)>,
    /// Commands that the log did not take yet.
    backlog: VecDeque<Command>,
    /// A snapshot that is arriving in pieces. It replaces the state only when it is whole: until
    /// then this replica may have to go on with the state it has.
    staged: Option<Staged>,
    /// A snapshot has been installed; it counts once a checkpoint makes it durable.
    pub must_checkpoint: bool,
    /// What this replica keeps for the fast path.
    pub fast: Fast,
    /// How far a new leader is with the lists of its group.
    pub recovery: Option<Recovery>,
}

/// The pieces of a snapshot so far.
#[derive(Debug)]
struct Staged {
    state: Box<State>,
    keys: Vec<(Key, Versions)>,
}

/// What only the leader knows; lost with its leadership, and never needed after it.
#[derive(Debug)]
pub(super) struct Leader {
    // As participant.
    /// The sets of all transactions prepared or being prepared.
    pub pending: PendingKeys,
    /// The keys that each of them holds.
    pub held: BTreeMap<TxnId, Vec<Key>>,
    /// Prepares proposed, not yet chosen.
    pub preparing: BTreeMap<TxnId, Prepared>,
    /// Refusals proposed, not yet chosen.
    pub refusing: BTreeSet<TxnId>,
    /// Decisions proposed, not yet chosen.
    pub ending: BTreeSet<TxnId>,
    /// When the coordinator of a prepared transaction was last asked for the decision.
    pub asked: BTreeMap<TxnId, Asked>,
    /// Endings that the coordinator's group may still ask about, and when it was last asked.
    pub unforgotten: BTreeMap<TxnId, Asked>,
    /// Coordinators that were asked what may be forgotten and have not answered, and since when.
    pub forget_asked: BTreeMap<PartitionId, Time>,
    /// Proposals must be larger (C11).
    pub floor: Timestamp,
    /// At or above every ceiling and commit timestamp that this leader or one before it has put into
    /// the log, chosen or not: the fast path must be above.
    pub logged: Timestamp,
    /// The highest ceiling proposed.
    pub ceiling_proposed: Timestamp,
    /// Read-only requests that wait for a leadership check.
    pub reads: BTreeMap<u64, WaitingRead>,
    /// Read-only requests that wait for a higher ceiling.
    pub reads_above_ceiling: Vec<WaitingRead>,
    /// Numbers leadership checks.
    pub next_read: u64,

    // As coordinator.
    /// Transactions under way.
    pub coordinating: BTreeMap<TxnId, Coordinating>,
    /// Commits decided whose timestamps have not passed yet.
    pub commit_wait: BTreeSet<(Timestamp, TxnId)>,
    /// Decisions that every participant has acknowledged; to be settled together.
    pub settling: BTreeSet<TxnId>,
    /// When settled outcomes were first seen by this leader, for [`super::Config::retention`].
    pub settled_since: BTreeMap<TxnId, Time>,
}

/// When and how often somebody was asked.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    pub at: Time,
    pub times: u32,
}

/// A read-only request that cannot be served yet.
#[derive(Clone, Debug)]
pub(super) struct WaitingRead {
    pub client: NodeId,
    pub txn: TxnId,
    pub keys: Vec<Key>,
    pub at_least: Timestamp,
}

/// A leader's view of a transaction that it coordinates.
#[derive(Debug)]
pub(super) struct Coordinating {
    /// Who wants to know.
    pub client: Option<NodeId>,
    /// Votes so far.
    pub votes: BTreeMap<PartitionId, Vote>,
    /// Votes of single replicas, as long as their partition's is open.
    pub fast: BTreeMap<PartitionId, BTreeMap<NodeId, FastVote>>,
    /// Partitions whose vote the fast path gave.
    pub by_fast: BTreeSet<PartitionId>,
    /// A commit request has been proposed.
    pub is_requested: bool,
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
    pub asked: Asked,
}

impl Partition {
    pub(super) fn new(
        id: PartitionId,
        replica: Replica<Log>,
        state: State,
        list: PendingList,
    ) -> Self {
        Self {
            id,
            fast: Fast::recovered(list, &state),
            recovery: None,
            replica,
            state,
            leader: None,
            early: Vec::new(),
            staged: None,
            must_checkpoint: false,
            backlog: VecDeque::new(),
        }
    }

    /// Takes a message meant for this partition's leader.
    pub(super) fn on_message(&mut self, from: NodeId, msg: Msg, world: &mut World<'_, '_>) {
        if let Msg::CollectPending { term, .. } = msg {
            self.on_collect_pending(from, term, world);
            return;
        }
        if let Msg::PendingList { term, listed, .. } = msg {
            self.on_pending_list(from, term, listed, world);
            return;
        }
        if !self.replica.is_leader()
            && let Some(prepare) = Prepare::fast(&msg)
        {
            self.on_follower_prepare(from, prepare, world);
            return;
        }
        let is_serving = self.leader.is_some() && self.recovery.is_none();
        if is_serving && self.backlog.len() < world.config.early_max {
            self.serve(from, msg, world);
        } else if is_serving {
            // Overloaded, or handing over for long: the sender asks again.
            world.cx.note(Note::Shed);
        } else if self.replica.is_leader() && self.early.len() < world.config.early_max {
            self.early.push((from, msg));
        } else {
            let leader = self.replica.leader().filter(|&leader| leader != world.node);
            let txn = orthodrome_core::Message::txn(&msg);
            world.send(from, Msg::NotLeader { partition: self.id, leader, txn });
        }
    }

    fn serve(&mut self, from: NodeId, msg: Msg, world: &mut World<'_, '_>) {
        if let Some(led) = msg.led_by_sender() {
            world.routes.learn(led, from, world.cx.now());
        }
        match msg {
            Msg::ReadAndPrepare { txn, participant, coordinator, acknowledged_below, .. } => {
                let prepare = Prepare {
                    txn,
                    participant,
                    coordinator,
                    acknowledged_below,
                    timestamp: None,
                    wants_reads: true,
                };
                self.on_read_and_prepare(from, prepare, world);
            }
            Msg::FastPrepare { .. } => {
                if let Some(prepare) = Prepare::fast(&msg) {
                    self.on_read_and_prepare(from, prepare, world);
                }
            }
            Msg::FastPrepareResult { txn, partition, vote, .. } => {
                self.on_fast_prepare_result(from, txn, partition, vote, world);
            }
            Msg::QueryPending { txns, .. } => self.on_query_pending(txns, world),
            Msg::CoordinatorPrepare { txn, participants, acknowledged_below, .. } => {
                self.on_coordinator_prepare(from, txn, participants, acknowledged_below, world);
            }
            Msg::Commit { txn, participants, writes, versions, .. } => {
                self.on_commit(from, txn, participants, writes, versions, world);
            }
            Msg::Abort { txn, participants, .. } => {
                self.on_abort(from, txn, &participants, world);
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
            Msg::QueryPrepare { txn, participant, coordinator } => {
                self.on_query_prepare(txn, participant, coordinator, world);
            }
            Msg::Writeback { txn, coordinator, verdict, .. } => {
                self.on_writeback(txn, coordinator, verdict, world);
            }
            Msg::Forget { txns, coordinator, .. } => self.on_forget(coordinator, txns, world),
            Msg::ReadOnly { txn, keys, at_least, .. } => {
                self.on_read_only(from, txn, keys, at_least, world);
            }
            Msg::ReadResult { .. }
            | Msg::FollowerReadResult { .. }
            | Msg::CollectPending { .. }
            | Msg::PendingList { .. }
            | Msg::FastDecided { .. }
            | Msg::Decided { .. }
            | Msg::ReadOnlyResult { .. }
            | Msg::NotLeader { .. }
            | Msg::Replication { .. } => {
                unreachable!("{} is not for a partition's leader", self.id)
            }
        }
    }

    /// Proposes a command. While the log takes none, because leadership is being handed over or too
    /// much waits to be chosen, commands queue up in order: a leader that stays has to propose what
    /// it acted on. One that is deposed loses them, like one that crashes.
    pub(super) fn propose(&mut self, command: Command, world: &mut World<'_, '_>) {
        if let (
            Some(leader),
            Command::Ceiling(timestamp)
            | Command::End { verdict: Verdict::Commit(timestamp, _), .. },
        ) = (&mut self.leader, &command)
        {
            leader.logged = leader.logged.max(*timestamp);
        }
        self.backlog.push_back(command);
        self.propose_backlog(world);
        world.touch(self.id);
    }

    fn propose_backlog(&mut self, world: &mut World<'_, '_>) {
        while self.replica.takes_commands()
            && let Some(command) = self.backlog.pop_front()
        {
            self.replica.propose(command, &mut world.door(self.id));
        }
    }

    pub(super) fn read_index(&mut self, id: u64, world: &mut World<'_, '_>) {
        self.replica.read_index(id, &mut world.door(self.id));
        world.touch(self.id);
    }

    /// Carries out everything that the replicated log has to say.
    pub(super) fn drain_events(&mut self, world: &mut World<'_, '_>) {
        while let Some(event) = self.replica.next_event() {
            match event {
                Event::Chosen { index, term, payload } => {
                    let (partition, at) = (self.id, index.0);
                    world.cx.claim(Claim::Chosen { partition, index: at, term: term.0 });
                    self.on_chosen(index, &payload, world);
                }
                Event::Leading { term } => {
                    world.cx.claim(Claim::Leads { partition: self.id, term: term.0 });
                    if world.config.is_fast {
                        self.on_log_complete(world);
                    } else {
                        self.on_leading(BTreeMap::new(), world);
                        self.serve_early(world);
                    }
                }
                Event::Deposed { .. } => {
                    self.leader = None;
                    self.recovery = None;
                    self.early.clear();
                    self.backlog.clear();
                    if self.fast.list.len() == 0 {
                        world.cx.cancel_timer(Timer::Sweep(self.id));
                    }
                    world.cx.cancel_timer(Timer::CommitWait(self.id));
                }
                Event::ReadReady { id } => {
                    let read = self.leader.as_mut().and_then(|leader| leader.reads.remove(&id));
                    if let Some(read) = read {
                        if read.at_least > self.state.ceiling {
                            self.reserve(read.at_least, world);
                            if let Some(leader) = &mut self.leader {
                                leader.reads_above_ceiling.push(read);
                            }
                        } else {
                            self.serve_read(read, world);
                        }
                    }
                }
                Event::ReadFailed { id } => {
                    let read = self.leader.as_mut().and_then(|leader| leader.reads.remove(&id));
                    if let Some(WaitingRead { client, txn, .. }) = read {
                        let answer =
                            Msg::NotLeader { partition: self.id, leader: None, txn: Some(txn) };
                        world.send(client, answer);
                    }
                }
                Event::SnapshotWanted { to, cursor } => self.send_chunk(to, cursor, world),
                Event::SnapshotChunk { chunk, last, .. } => self.on_chunk(chunk, last, world),
            }
        }
        self.propose_backlog(world);
        world.routes.follow(self.id, self.replica.leader(), world.cx.now());
        if world.config.is_fast
            && self.replica.is_leader()
            && self.leader.is_none()
            && self.recovery.is_none()
        {
            self.begin_recovery(world);
        }
    }

    fn on_chosen(
        &mut self,
        index: replication::Index,
        payload: &Payload<Command>,
        world: &mut World<'_, '_>,
    ) {
        if index <= self.state.applied {
            // The checkpoint that this replica started from covers it.
            return;
        }
        self.state.applied = index;
        let Payload::Command(command) = payload else { return };
        let command = command.as_ref();
        if world.config.is_fast {
            let keeps_ended = world.config.teeth.lists_keep_the_ended;
            self.fast.before_apply(command, &self.state, keeps_ended);
        }
        match self.state.apply(self.id, command, world.store) {
            Applied::Nothing => {
                if let Command::Ceiling(_) = command {
                    self.on_ceiling(world);
                }
            }
            Applied::Prepared(txn) => {
                self.on_prepared(txn, world);
                self.on_recovered(txn, world);
            }
            Applied::Ended(txn) => {
                if let Some(Ended { outcome, .. }) = self.state.ended.get(&txn).copied() {
                    world.cx.claim(Claim::Decided { txn, outcome });
                }
                self.on_ended(txn, world);
                self.on_recovered(txn, world);
            }
            Applied::Requested(txn) => self.try_decide(txn, world),
            Applied::Decided(txn) => {
                if let Some(outcome) = self.state.decision(txn) {
                    world.cx.claim(Claim::Decided { txn, outcome });
                }
                self.on_decided(txn, world);
            }
        }
        if let (Command::Settle(txns), Some(leader)) = (command, &mut self.leader) {
            for txn in txns {
                leader.coordinating.remove(txn);
                leader.settled_since.insert(*txn, world.cx.now());
            }
        }
    }

    /// This replica leads, and everything that earlier leaders left has been applied. On the fast
    /// path, what the lists of the group show comes first.
    pub(super) fn on_leading(
        &mut self,
        examined: BTreeMap<TxnId, (Prepared, bool)>,
        world: &mut World<'_, '_>,
    ) {
        let now = world.cx.now();
        let mut leader = Leader {
            pending: PendingKeys::default(),
            held: BTreeMap::new(),
            preparing: BTreeMap::new(),
            refusing: BTreeSet::new(),
            ending: BTreeSet::new(),
            asked: BTreeMap::new(),
            unforgotten: BTreeMap::new(),
            forget_asked: BTreeMap::new(),
            // C12, R8: a predecessor may have promised anything up to its ceiling.
            floor: self.state.ceiling.max(self.state.floor),
            logged: self.state.ceiling.max(self.state.floor),
            ceiling_proposed: self.state.ceiling,
            reads: BTreeMap::new(),
            reads_above_ceiling: Vec::new(),
            next_read: 0,
            coordinating: BTreeMap::new(),
            commit_wait: BTreeSet::new(),
            settling: BTreeSet::new(),
            settled_since: self.state.settled.keys().map(|&txn| (txn, now)).collect(),
        };
        if world.config.teeth.no_lease {
            leader.floor = self.state.floor;
        }
        for (&txn, prepared) in &self.state.prepared {
            leader.hold(txn, prepared);
            leader.asked.insert(txn, Asked { at: now, times: 0 });
        }
        if !self.state.prepared.is_empty() {
            world.cx.note(Note::ParticipantTakeover);
        }
        let asked = Asked { at: now, times: 0 };
        leader.unforgotten = self.state.ended.keys().map(|&txn| (txn, asked)).collect();
        self.leader = Some(leader);
        self.replicate_recovered(examined, world);
        world.routes.follow(self.id, Some(world.node), now);
        self.take_over_coordination(world);
        self.set_sweep_timer(world);
        self.reserve(world.cx.clock().now, world);
    }

    /// Takes what came while this leader was not ready.
    pub(super) fn serve_early(&mut self, world: &mut World<'_, '_>) {
        for (from, msg) in std::mem::take(&mut self.early) {
            self.serve(from, msg, world);
        }
    }

    /// Whoever was asked about `txn` does not lead `partition`, and somebody else does: ask again
    /// there what this replica, as leader, wants of it.
    pub(super) fn on_not_leader(
        &mut self,
        partition: PartitionId,
        txn: TxnId,
        world: &mut World<'_, '_>,
    ) {
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
                self.write_back(txn, world);
            } else if coordinating.is_requested {
                self.ask_for_votes(txn, world);
            }
        }
    }

    /// The leader looks for overdue work; a follower, for what its list should not hold any more.
    pub(super) fn on_sweep_timeout(&mut self, world: &mut World<'_, '_>) {
        if world.config.is_fast {
            self.collect(world);
            self.sweep_list(world);
        }
        if self.leader.is_some() {
            self.sweep_participant(world);
            self.sweep_coordinator(world);
        } else if self.recovery.is_none() && self.fast.list.len() == 0 {
            return;
        }
        self.set_sweep_timer(world);
    }

    fn send_chunk(&mut self, to: NodeId, cursor: Option<Key>, world: &mut World<'_, '_>) {
        let limit = world.config.chunk_keys;
        let keys = world.store.scan(self.id, cursor.as_ref(), limit);
        let state = cursor.is_none().then(|| Box::new(self.state.clone()));
        let next = (keys.len() == limit).then(|| keys.last().map(|(key, _)| key.clone())).flatten();
        let chunk = Chunk { state, keys };
        self.replica.send_chunk(to, chunk, next, &mut world.door(self.id));
        world.touch(self.id);
    }

    /// A piece of the leader's state arrived. The data may be newer than the state that came with
    /// the first piece; applying the log from there on changes nothing that is there already.
    fn on_chunk(&mut self, chunk: Chunk, last: bool, world: &mut World<'_, '_>) {
        if let Some(state) = chunk.state {
            self.staged = Some(Staged { state, keys: Vec::new() });
        }
        let Some(staged) = &mut self.staged else { return };
        staged.keys.extend(chunk.keys);
        if !last {
            return;
        }
        let Some(Staged { state, keys }) = self.staged.take() else { return };
        world.cx.note(Note::SnapshotInstalled);
        world.store.clear(self.id);
        for (key, versions) in keys {
            for (version, value) in versions {
                world.store.put(self.id, key.clone(), version, value);
            }
        }
        self.state = *state;
        self.fast.reindex(&self.state);
        self.must_checkpoint = true;
    }

    /// What must be gone after quiet. What is replicated counts where it is led: a replica that was
    /// removed while it was cut off never learns how things ended, and does not matter. R6 allows
    /// endings and outcomes to stay only above what their clients are known here to have
    /// acknowledged.
    pub(super) fn leftovers(&self) -> Vec<Leftover> {
        let mut left =
            vec![("early requests", self.early.len()), ("waiting commands", self.backlog.len())];
        let Some(leader) = &self.leader else { return left };
        let state = &self.state;
        let is_acknowledged = |txn: &&TxnId| state.is_acknowledged(**txn);
        left.extend([
            ("prepared transactions", state.prepared.len()),
            ("coordinated transactions", state.coordinated.len()),
            ("endings with a questioner", {
                state.ended.values().filter(|ended| !ended.is_forgettable).count()
            }),
            ("acknowledged endings", state.ended.keys().filter(is_acknowledged).count()),
            ("acknowledged outcomes", state.settled.keys().filter(is_acknowledged).count()),
            ("pending keys", leader.pending.len()),
            ("holders of keys", leader.held.len()),
            ("prepares under way", leader.preparing.len()),
            ("refusals under way", leader.refusing.len()),
            ("endings under way", leader.ending.len()),
            ("doubtful prepares", leader.asked.len()),
            ("unforgotten endings", leader.unforgotten.len()),
            ("waiting reads", leader.reads.len() + leader.reads_above_ceiling.len()),
            ("coordinations", leader.coordinating.len()),
            ("waiting commits", leader.commit_wait.len()),
            ("unsettled decisions", leader.settling.len()),
        ]);
        left
    }

    /// Panics if the partition's state contradicts itself.
    pub(super) fn assert_invariants(&self) {
        self.replica.assert_invariants();
        assert!(self.state.floor <= self.state.ceiling, "{}: floor above ceiling", self.id);
        for txn in self.state.prepared.keys() {
            assert!(!self.state.ended.contains_key(txn), "{txn} prepared and ended at {}", self.id);
        }
        let Some(leader) = &self.leader else { return };
        assert!(self.replica.is_leader(), "{} serves without leading", self.id);
        for txn in leader.held.keys() {
            assert!(
                self.state.prepared.contains_key(txn) || leader.preparing.contains_key(txn),
                "{txn} holds keys of {} after its end",
                self.id
            );
        }
        if leader.held.is_empty() {
            assert!(leader.pending.is_empty(), "{} holds keys for nobody", self.id);
        }
    }
}

impl Leader {
    /// Takes the keys of a transaction.
    pub(super) fn hold(&mut self, txn: TxnId, prepared: &Prepared) {
        self.pending.insert(txn, prepared.versions.iter().map(|(key, _)| key), &prepared.writes);
        self.held.insert(txn, prepared.keys().cloned().collect());
    }

    /// Frees the keys of a transaction, if it holds any.
    pub(super) fn free(&mut self, txn: TxnId) {
        if let Some(held) = self.held.remove(&txn) {
            self.pending.remove(txn, held.iter());
        }
    }
}
