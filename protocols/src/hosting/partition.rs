//! One replica of one partition.

use std::collections::VecDeque;
use std::fmt;
use std::mem::take;

use orthodrome_core::digest::Digest;
use orthodrome_core::id::{NodeId, PartitionId};
use orthodrome_core::machine::{Admin, Claim, GroupView, Message as _, Protocol as _, Refusal};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::scan::{Ask, Basis, Listing, Voters};
use orthodrome_core::store::{Start, Store};
use orthodrome_core::time::{Duration, Time};
use orthodrome_core::txn::Key;

use super::leading::propose_backlog;
use super::{Chunk, Config, Cursor, Divisible as _, Note, Role, World};
use crate::replication::{ChangeError, Event, Index, Payload, Replica, Replicated, TransferError};

/// A node that keeps sending to a partition receives the members again after this time, because a
/// message may be lost.
const TELL_AGAIN: Duration = Duration::from_secs(5);

/// One replica of one partition: the replicated log, the state that follows from it, and, if this
/// replica leads, the leader's own state.
#[derive(Debug)]
pub struct Partition<R: Role> {
    /// The partition.
    pub id: PartitionId,
    /// The replica of its log.
    pub replica: Replica<R::Log>,
    /// The state that follows from the log, without its data.
    pub state: R::State,
    /// The protocol's state outside of the log, leader or not.
    pub own: R::Own,
    /// Present while this replica leads and has applied everything that earlier leaders left.
    pub leader: Option<R>,
    /// Requests that arrived while this replica led but was not ready.
    pub(super) early: Vec<(NodeId, R::Msg)>,
    /// Their size.
    early_bytes: usize,
    /// Commands that the log has not accepted yet.
    pub(super) backlog: VecDeque<<R::Log as Replicated>::Command>,
    /// For each follower that needs a snapshot, the remaining parts of the state as it was when the
    /// snapshot began.
    telling: OrdMap<NodeId, VecDeque<R::State>>,
    /// A snapshot that is arriving in pieces. It replaces the state only when it is complete: until
    /// then this replica may have to continue with its old state.
    staged: Option<Chunk<R::State>>,
    /// When each node was last sent the members, and which.
    told_members: OrdMap<NodeId, (Index, Time)>,
}

impl<R: Role> Partition<R> {
    pub(super) fn new(id: PartitionId, replica: Replica<R::Log>, state: R::State) -> Self {
        Self {
            id,
            replica,
            state,
            own: R::Own::default(),
            leader: None,
            early: Vec::new(),
            early_bytes: 0,
            backlog: VecDeque::new(),
            telling: OrdMap::new(),
            staged: None,
            told_members: OrdMap::new(),
        }
    }

    /// True if requests can be answered now.
    fn is_serving(&self) -> bool {
        self.leader.is_some() && R::is_ready(self)
    }

    /// Processes a message.
    pub(super) fn on_message(&mut self, from: NodeId, msg: R::Msg, world: &mut World<'_, R>) {
        self.tell_members(from, world);
        // Otherwise it was for any replica, and is done.
        let Some(msg) = R::on_message(self, from, msg, world) else { return };
        let Config { early_max, kept_bytes, .. } = *R::hosting(world.config);
        if self.is_serving() && self.backlog.len() < early_max {
            R::serve(&mut self.led(), from, msg, world);
        } else if self.is_serving() {
            // It is overloaded, or a leadership transfer takes long: the sender will retry.
            world.cx.note(Note::Shed.into());
        } else if self.replica.is_leader()
            && self.early.len() < early_max
            && self.early_bytes < kept_bytes
        {
            self.early_bytes += msg.wire_size();
            self.early.push((from, msg));
        } else {
            let leader = self.replica.leader().filter(|&leader| leader != world.node);
            world.send(from, R::not_leader(self.id, leader, msg.txn()));
        }
    }

    /// Sends `to` the voters, if they differ from the placement, or did once. A node that asks a
    /// replica which does not vote any more is told at once. A voter tells it from time to time:
    /// `to` can find the leader without it, but may want to reach every voter, and a message may be
    /// lost.
    fn tell_members(&mut self, to: NodeId, world: &mut World<'_, R>) {
        // The members are changing: the next voters are not known yet.
        let Some((since, voters)) = self.replica.settled() else { return };
        let is_placed = world.cluster.partition(self.id).is_some_and(|placed| {
            placed.replicas.len() == voters.len()
                && placed.replicas.iter().all(|node| voters.contains(node))
        });
        let is_as_placed = is_placed && !self.replica.has_changed_members();
        if to == world.node || voters.contains(&to) || is_as_placed {
            return;
        }
        let (now, told) = (world.cx.now(), self.told_members.get(&to));
        let knows = told.is_some_and(|&(told, at)| told == since && now.since(at) < TELL_AGAIN);
        if voters.contains(&world.node) && knows {
            return;
        }
        let msg = R::members(self.id, since, voters.to_vec());
        self.told_members.insert(to, (since, now));
        world.send(to, msg);
    }

    /// The node's other partitions find this one through this replica, even if it does not vote any
    /// more.
    fn learn_voters(&self, world: &mut World<'_, R>) {
        if let Some((since, voters)) = self.replica.settled() {
            world.routes.learn_voters(self.id, since, voters);
        }
    }

    /// Processes the requests that arrived before this leader was ready, if it is ready now.
    pub fn serve_early(&mut self, world: &mut World<'_, R>) {
        if self.is_serving() {
            self.early_bytes = 0;
            for (from, msg) in take(&mut self.early) {
                R::serve(&mut self.led(), from, msg, world);
            }
        }
    }

    fn propose_backlog(&mut self, world: &mut World<'_, R>) {
        propose_backlog(self.id, &mut self.replica, &mut self.backlog, world);
    }

    /// Why this replica would refuse an order now; none if it would accept it.
    pub(super) fn refusal(&self, order: &Admin) -> Option<Refusal> {
        if !self.replica.is_leader() {
            return Some(Refusal::NotLeader(self.replica.leader()));
        }
        match order {
            Admin::TransferLeader { to, .. } => transfer_refusal(&self.replica, *to),
            Admin::ChangeMembers { .. } if !R::is_ready(self) => {
                Some(Refusal::NotNow(ChangeError::NotReady.to_string()))
            }
            Admin::ChangeMembers { voters, .. } => change_refusal(&self.replica, voters),
        }
    }

    /// The names that this replica has ([`crate::hosting::Role::pending_names`]). None if its state is
    /// incomplete. None also if it does not vote, or knows no leader: it may have been removed long
    /// ago, and the scan would wait for the voters that it remembers.
    pub(super) fn names(&self, node: NodeId, ask: &Ask, store: &Store) -> Option<Listing> {
        if let Some(after) = ask.changes_after {
            let (closed, basis) = (R::closed(self)?, Basis::Complete);
            return Some(Listing::of_changes(store, [self.id], (ask, after), closed, basis));
        }
        let members = self.replica.members();
        if !R::Protocol::SCANS
            || !self.replica.is_complete()
            || !members.is_voter(node)
            || self.replica.leader().is_none()
        {
            return None;
        }
        let mut pending = OrdSet::new();
        let mut name = |key: &Key| {
            if ask.range.contains(key) {
                pending.insert(key.clone());
            }
        };
        R::pending_names(self, &mut name);
        // Entries that this replica has not applied, whether or not they are chosen: it may have
        // told its leader that it has them.
        let mut index = R::applied(&self.state).next();
        while let Some(entry) = self.replica.entry(index) {
            if let Payload::Command(command) = &entry.payload {
                R::command_names(command.as_ref(), &mut name);
            }
            index = index.next();
        }
        for command in &self.backlog {
            R::command_names(command, &mut name);
        }
        let halves = [&members.voters, &members.outgoing].into_iter();
        let voters = halves.filter(|half| !half.is_empty());
        let voters = voters.map(|half| Voters { nodes: half.clone() }).collect();
        let basis = Basis::Voter { since: self.replica.members_since().0, voters };
        Some(Listing::of(store, [self.id], pending, ask, basis))
    }

    /// What this replica knows about its group.
    pub(super) fn group(&self, now: Time) -> GroupView {
        group_view(self.id, &self.replica, now)
    }

    /// Processes an operator's order. `orders` reports its progress.
    pub(super) fn change_members(
        &mut self,
        voters: Vec<NodeId>,
        learners: Vec<NodeId>,
        world: &mut World<'_, R>,
    ) {
        let mut io = world.io(self.id);
        let is_refused = if R::is_ready(self) {
            self.replica.change_members(voters, learners, &mut io).is_err()
        } else {
            // The knowledge of the current members must be in the log first.
            self.replica.refuse_change(voters, learners, &mut io);
            true
        };
        // A replica that does not lead does not judge.
        if is_refused && self.replica.is_leader() {
            world.cx.note(Note::ChangeRefused.into());
        }
        world.touch(self.id);
    }

    /// True if [`Partition::drain_events`] has something to do after a flush: most flushes only send.
    pub(super) fn has_events(&self) -> bool {
        self.replica.has_events() || !self.backlog.is_empty()
    }

    /// Processes all events of the replicated log.
    pub(super) fn drain_events(&mut self, world: &mut World<'_, R>) {
        while let Some(event) = self.replica.next_event() {
            match event {
                Event::Chosen { index, term, payload } => {
                    let (partition, at) = (self.id, index.0);
                    world.cx.claim(Claim::Chosen { partition, index: at, term: term.0 });
                    self.on_chosen(index, &payload, world);
                }
                Event::Leading { term } => {
                    world.cx.claim(Claim::Leads { partition: self.id, term: term.0 });
                    world.routes.follow(self.id, Some(world.node), world.cx.now());
                    R::on_leading(self, world);
                    self.serve_early(world);
                }
                Event::Deposed { .. } => {
                    self.leader = None;
                    self.early.clear();
                    self.early_bytes = 0;
                    self.backlog.clear();
                    self.telling.clear();
                    R::on_deposed(self, world);
                }
                Event::ReadReady { id } => self.on_read_index(id, true, world),
                Event::ReadFailed { id } => self.on_read_index(id, false, world),
                Event::SnapshotWanted { to, cursor } => self.send_chunk(to, cursor, world),
                Event::SnapshotChunk { chunk, first, last, .. } => {
                    self.on_chunk(chunk, first, last, world);
                }
            }
        }
        self.propose_backlog(world);
        self.learn_voters(world);
        world.routes.follow(self.id, self.replica.leader(), world.cx.now());
        if self.leader.is_none() && self.replica.is_leader() {
            R::on_elected(self, world);
        }
    }

    /// The result of a leadership check. A deposed leader drops it, and the reader retries.
    fn on_read_index(&mut self, id: u64, is_leader: bool, world: &mut World<'_, R>) {
        if let Some(mut leading) = self.leading() {
            R::on_read_index(&mut leading, id, is_leader, world);
        }
    }

    fn on_chosen(
        &mut self,
        index: Index,
        payload: &Payload<<R::Log as Replicated>::Command>,
        world: &mut World<'_, R>,
    ) {
        if index <= R::applied(&self.state) {
            // The checkpoint from which this replica started covers it.
            return;
        }
        R::set_applied(&mut self.state, index);
        world.effects = Digest::default();
        world.store.take_puts();
        if let Payload::Command(command) = payload
            && !self.is_skipped(index, world)
        {
            R::on_chosen(self, command.as_ref(), world);
        }
        world.effects.add(world.store.take_puts());
        self.replica.came_to(index, world.effects.value());
    }

    /// Tests only: the first server skips some entries.
    fn is_skipped(&self, index: Index, world: &World<'_, R>) -> bool {
        R::hosting(world.config).skips_entries
            && world.node == NodeId(1)
            && self.leader.is_none()
            && index.0.is_multiple_of(7)
    }

    fn send_chunk(&mut self, to: NodeId, cursor: Option<Cursor>, world: &mut World<'_, R>) {
        let config = R::hosting(world.config);
        let bounds = (config.chunk_keys, config.piece_bytes);
        if cursor.is_none() {
            // The snapshot has the current state, so the later parts must be of the same moment.
            let parts = self.state.clone().divide(config.piece_bytes);
            self.telling.insert(to, parts.into());
        }
        let (state, start) = match cursor {
            Some(Cursor::Data(start)) => (None, start),
            Some(Cursor::State) | None => {
                let parts = self.telling.get_mut(&to);
                (parts.and_then(VecDeque::pop_front).map(Box::new), Start::default())
            }
        };
        let is_told = self.telling.get(&to).is_none_or(VecDeque::is_empty);
        let (keys, next) = if is_told {
            self.telling.remove(&to);
            let (keys, next) = world.store.cut(self.id, &start, bounds);
            (keys, next.map(Cursor::Data))
        } else {
            (Vec::new(), Some(Cursor::State))
        };
        self.replica.send_chunk(to, Chunk { state, keys }, next, &mut world.io(self.id));
        world.touch(self.id);
    }

    /// A piece of the leader's state has arrived. The data may be newer than the state of the first
    /// pieces; applying the log from there on changes nothing that is already present.
    fn on_chunk(
        &mut self,
        chunk: Chunk<R::State>,
        first: bool,
        last: bool,
        world: &mut World<'_, R>,
    ) {
        if first {
            self.staged = Some(chunk);
        } else if let Some(staged) = &mut self.staged {
            match (&mut staged.state, chunk.state) {
                (Some(state), Some(part)) => state.join(*part),
                (state, part) => *state = state.take().or(part),
            }
            staged.keys.extend(chunk.keys);
        }
        if !last {
            return;
        }
        // An earlier incarnation received the first piece, which has the state.
        let Some(Chunk { state: Some(state), keys }) = self.staged.take() else { return };
        world.cx.note(Note::SnapshotInstalled.into());
        world.store.clear(self.id);
        for (key, versions) in keys {
            for (version, value) in versions {
                world.store.put(self.id, key.clone(), version, value);
            }
        }
        self.state = *state;
        world.store.may_lack(self.id, R::floor(&self.state));
        world.store.copied(self.id, R::floor(&self.state));
        R::on_installed(self);
        world.pending_writes.installed.insert(self.id);
    }
}

/// Why a replica would refuse to transfer leadership to `to` now; none if it would accept.
pub fn transfer_refusal<R: Replicated>(replica: &Replica<R>, to: NodeId) -> Option<Refusal> {
    let why = replica.check_transfer(to).err()?;
    Some(match why {
        TransferError::NotLeader { leader } => Refusal::NotLeader(leader),
        TransferError::NotVoter(_) => Refusal::Invalid(why.to_string()),
        TransferError::UnderWay(_) => Refusal::NotNow(why.to_string()),
    })
}

/// Why a replica would refuse these voters now; none if it would accept them.
pub fn change_refusal<R: Replicated>(replica: &Replica<R>, voters: &[NodeId]) -> Option<Refusal> {
    let why = replica.check_change(voters).err()?;
    Some(match why {
        ChangeError::NotLeader { .. } => Refusal::NotLeader(replica.leader()),
        ChangeError::NotReady | ChangeError::UnderWay => Refusal::NotNow(why.to_string()),
        ChangeError::Quorums(_) => Refusal::Invalid(why.to_string()),
    })
}

/// What a replica knows about its group.
pub fn group_view<R: Replicated>(
    partition: PartitionId,
    replica: &Replica<R>,
    now: Time,
) -> GroupView {
    GroupView {
        partition,
        voters: replica.voters().to_vec(),
        learners: replica.learners().to_vec(),
        leader: replica.leader(),
        has_leaders: true,
        successor: replica.successor(now),
        behind: replica.behind(),
    }
}

impl<R: Role> fmt::Display for Partition<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.id, self.replica)?;
        R::describe(self, f)
    }
}
