//! The directory: who takes part, as a small replicated log (§5.1).
//!
//! Every watermark rests on knowing all who may assign timestamps, so that is decided in one place.
//! A few servers, its *voters*, each hold a [`Keeper`]: a replica of the log with the [`State`]
//! that the log gives. Every server holds a [`Membership`]: what it knows of the directory.
//!
//! # Lives and leases
//!
//! A *life* of a server begins with its process, and again whenever the one before was ended by the
//! directory. It has a token that no other life has ([`Life`]); nobody takes a message for or from
//! one life for another's. The leader lets a life join (a new *incarnation*) once everything that the
//! one before left is decided, and grants it leases as long as it asks. A life acts only under its
//! lease, by its own monotonic clock, from when it *asked*, so that pauses and slow messages are
//! charged to it. The leader grants while it is sure to lead, or once a majority has confirmed that it
//! still led when it was asked, and counts from when it granted. The second is for links on which
//! heartbeats and their answers take longer than an election time-out: there a leader is never sure.
//! It ends a life (`Fence`) only when what it granted has run out, also if it hears from a new
//! process of the same server: the message may be an old one. A new leader does not know what was
//! granted before, but that it was before it led, and so lets one lease pass.
//!
//! # Leases that grow
//!
//! On links that deliver late for ever, lives that are well are ended again and again, and what each of
//! them left has to be decided while nothing becomes visible. So a server says how late answers
//! came to it ([`Ask::took`]), and a life has leases of several times that. They are also twice as long
//! as those of the life before if that was ended although its process was well ([`Ask::ended`]). Both up
//! to `LONGEST`, or `LEASE_MAX` times the usual length; leases halve again each time the life has lasted
//! for `CALM` of them. The longest length that an incarnation may be granted is in the log with its joining
//! (`Standing::lease`): a new leader lets so long a time pass for each. It is the usual one until
//! every voter is known to keep lengths, for a voter of an earlier version would not wait for longer.
//!
//! # The limit
//!
//! No timestamp is assigned and no watermark reported above a *limit* that is in the log (R8): the
//! leader moves it ahead of the clocks of those that ask, and grants tell it together with the
//! epoch. So every watermark computed without a server is below the limit as of its joining, and
//! above that its timestamps begin ([`Grant::floor`]). That holds if every disk but those of the
//! directory is lost, and if no server is left that was active before. The limit follows the median
//! of the clocks, so that one clock which is far ahead assigns nothing that others would have to
//! wait for, and one that is far behind can go by the limit instead ([`Membership::window`]).
//!
//! # Messages
//!
//! | message | from → to | when |
//! |---|---|---|
//! | `Log` | voter → voter | see [`crate::replication`] |
//! | `Ask` | server → leader | a quarter of a lease apart |
//! | `Answer` | leader → server | at once |
//! | `NotLeader` | voter → server | at once |
//! | `Members` | leader → every server; anybody → who is behind | on change |
//!
//! Messages of a node to itself must be delivered like others.

use std::fmt;
use std::sync::Arc;

use orthodrome_core::Wire;
use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{NodeId, PartitionId, Ticket};
use orthodrome_core::machine::{Claim, Kind};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::rng::Rng;
use orthodrome_core::time::{Duration, Time, Timestamp, nanos};

use super::watermark::{Member, Members, Status};
use crate::replication::{self, Event, Group, Index, Payload, Replica, Replicated};

/// The name of the directory's log among the groups of a cluster.
pub const DIRECTORY: PartitionId = PartitionId(u32::MAX);

/// Entries of the log that are kept for followers that lag.
const KEEP_ENTRIES: usize = 64;

/// The longest leases are so many times as long as the usual ones, or
const LEASE_MAX: u32 = 8;

/// this long: links that lose a fifth of all packets hold what they carry for seconds.
const LONGEST: Duration = Duration::from_secs(20);

/// A lease is so many times as long as answers took lately: one may take twice as long, and the next one is
/// asked for in good time.
const ANSWERS: u32 = 4;

/// Little is left of a lease if that is less than one part of so many. Without a fault, half of it is.
const PRESSED: u32 = 3;

/// A lease is asked for so many times while it lasts, at least.
const ASKS: u32 = 24;

/// Leases of an incarnation halve each time it has taken part for so many of them.
const CALM: u32 = 64;

/// The servers that vote on the directory: those that hold the first partition, so that it outlives
/// whatever leaves every partition a majority.
#[must_use]
pub fn voters(cluster: &Cluster) -> Vec<NodeId> {
    cluster.partitions().next().map(|first| first.replicas.clone()).unwrap_or_default()
}

/// Settings of the directory, the same on every server.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// How long the leader waits for a life that it granted a lease, before it ends it.
    pub lease: Duration,
    /// How much sooner the lease ends where it is used: covers the difference in rate between two
    /// monotonic clocks over that time.
    pub lease_margin: Duration,
    /// How far the limit is moved ahead of the clocks. A life that joins has to wait up to this
    /// long until others' timestamps have caught up with its own. Above [`Config::lease`].
    pub ahead: Duration,
    /// How long somebody may take at first to decide what another left, before somebody else is
    /// told to; twice as long each time.
    pub takeover_timeout: Duration,
    /// Settings of the log.
    pub replication: replication::Config,
}

impl Config {
    /// Settings for a cluster whose longest round trip is `round_trip`.
    #[must_use]
    pub fn for_round_trip(round_trip: Duration) -> Self {
        // A server asks once in a round trip, its question and the answer take one, and what the
        // leader writes for it another: half of the lease is for what comes late.
        let lease = round_trip * 6;
        Self {
            lease,
            lease_margin: lease / 10,
            ahead: lease * 2,
            takeover_timeout: round_trip * 16,
            // All leases run out while nobody leads: shorter than they are.
            replication: replication::Config::with_election_timeout(round_trip * 2),
        }
    }

    /// For how long a lease of that length may be used; of the usual length, if none is said.
    fn held(&self, lease: Duration) -> Duration {
        let usual = self.lease;
        let lease = if lease.is_zero() { usual } else { lease };
        // The margin grows with it.
        let times = nanos(lease).div_ceil(nanos(usual).max(1));
        let margin = self.lease_margin.saturating_mul(u32::try_from(times).unwrap_or(u32::MAX));
        lease.saturating_sub(margin)
    }

    /// Leases are never longer.
    fn lease_max(&self) -> Duration {
        (self.lease * LEASE_MAX).max(LONGEST)
    }

    /// How often a server asks.
    #[must_use]
    pub fn ask_interval(&self) -> Duration {
        self.lease / 6
    }
}

/// The token of one life of a server: drawn at random when it begins, never used again.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug, Wire)]
pub struct Life(pub u64);

/// A change of the members, or of what they may assign.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Wire)]
pub enum Command {
    /// A life of a server that is out becomes active, with the next incarnation.
    Join {
        /// Which server.
        server: NodeId,
        /// Which of its lives.
        life: Life,
        /// See [`Ask::is_marked`].
        is_marked: bool,
        /// See `Standing::lease`.
        lease: Duration,
        /// See [`Ask::keeps_lengths`].
        keeps_lengths: bool,
    },
    /// An incarnation is active no more, or somebody else than before is to decide what it left.
    Fence {
        /// Which server.
        server: NodeId,
        /// Which of its incarnations.
        incarnation: u32,
        /// The ballot of whoever was to decide until now; 0 if the incarnation is active.
        over: u64,
        /// Who is to decide.
        by: NodeId,
        /// Which of its lives: a later one would not know what it did in the ballot before.
        life: Life,
    },
    /// Everything that a fenced incarnation left is decided.
    Out {
        /// Which server.
        server: NodeId,
        /// Which of its incarnations.
        incarnation: u32,
        /// In which ballot.
        ballot: u64,
    },
    /// Timestamps may be assigned up to here.
    Extend {
        /// The new limit.
        limit: Timestamp,
    },
}

impl Command {
    /// About which server it is.
    fn server(&self) -> Option<NodeId> {
        match *self {
            Self::Extend { .. } => None,
            Self::Join { server, .. } | Self::Fence { server, .. } | Self::Out { server, .. } => {
                Some(server)
            }
        }
    }
}

/// What the directory knows of one server.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Wire)]
pub struct Standing {
    /// Counts its lives that took part.
    pub incarnation: u32,
    /// The last of them.
    pub life: Life,
    /// Timestamps of this incarnation are above this.
    pub floor: Timestamp,
    /// Whether it takes part.
    pub phase: Phase,
    /// See [`Member::disk`].
    pub disk: u32,
    /// Leases of this incarnation are never longer. Leaders of an earlier version did not say:
    /// theirs have the usual length, [`Config::lease`].
    pub lease: Duration,
    /// See [`Ask::keeps_lengths`].
    pub keeps_lengths: bool,
}

impl Standing {
    /// The longest that a lease of this incarnation can be.
    fn lease_max(&self, usual: Duration) -> Duration {
        if self.lease.is_zero() { usual } else { self.lease }
    }

    /// How long leases of this incarnation are when the limit is `limit`: they halve, down to the usual
    /// length, each time it has taken part for `CALM` of them.
    fn lease(&self, limit: Timestamp, usual: Duration) -> Duration {
        let mut age = limit.0.saturating_sub(self.floor.0);
        let mut lease = self.lease_max(usual);
        while lease > usual
            && let Some(rest) = age.checked_sub(nanos(lease * CALM))
        {
            age = rest;
            lease = (lease / 2).max(usual);
        }
        lease
    }
}

/// Whether an incarnation takes part.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Wire)]
pub enum Phase {
    /// It does.
    Active,
    /// What it left is being decided.
    Fenced {
        /// By whom,
        by: NodeId,
        /// by which of its lives,
        life: Life,
        /// in which ballot: the epoch that began with it.
        ballot: u64,
        /// Timestamps of the incarnation are not above this.
        upto: Timestamp,
    },
    /// It left nothing undecided.
    #[default]
    Out,
}

/// What the directory's log adds up to.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct State {
    /// Up to which entry.
    pub applied: Index,
    /// Counts the changes of the members.
    pub epoch: u64,
    /// No timestamp is above this.
    pub limit: Timestamp,
    /// Every server of the cluster.
    pub servers: OrdMap<NodeId, Standing>,
}

impl State {
    /// Before the first entry: nobody takes part.
    #[must_use]
    pub fn new(cluster: &Cluster) -> Self {
        let servers = cluster.servers().map(|server| (server.id, Standing::default())).collect();
        Self { applied: Index(0), epoch: 1, limit: Timestamp::ZERO, servers }
    }

    /// Who takes part.
    #[must_use]
    pub fn members(&self) -> Members {
        let member = |standing: &Standing| Member {
            incarnation: standing.incarnation,
            status: match standing.phase {
                Phase::Active => Status::Active,
                Phase::Fenced { by, .. } => Status::Fenced { by },
                Phase::Out => Status::Out,
            },
            disk: standing.disk,
        };
        let servers = self.servers.iter().map(|(&id, standing)| (id, member(standing)));
        Members { epoch: self.epoch, servers: servers.collect() }
    }

    /// No timestamp is above this.
    #[must_use]
    pub fn limit(&self) -> Timestamp {
        self.limit
    }

    /// What is known of `server`.
    #[must_use]
    pub fn standing(&self, server: NodeId) -> Option<&Standing> {
        self.servers.get(&server)
    }

    /// Applies a command. One that came too late does nothing. True if the members changed.
    pub fn apply(&mut self, command: Command) -> bool {
        let (limit, next) = (self.limit, self.epoch + 1);
        let has_changed = match command {
            Command::Extend { limit } => {
                self.limit = self.limit.max(limit);
                false
            }
            Command::Join { server, life, is_marked, lease, keeps_lengths } => {
                self.servers.get_mut(&server).is_some_and(|s| {
                    let is_out = s.phase == Phase::Out && (s.incarnation == 0 || s.life != life);
                    if is_out {
                        let incarnation = s.incarnation + 1;
                        let disk = if is_marked { s.disk } else { incarnation };
                        *s = Standing {
                            incarnation,
                            life,
                            floor: limit,
                            phase: Phase::Active,
                            disk,
                            lease,
                            keeps_lengths,
                        };
                    }
                    is_out
                })
            }
            Command::Fence { server, incarnation, over, by, life } => {
                self.change(server, incarnation, over, |upto| {
                    let upto = upto.unwrap_or(limit);
                    Phase::Fenced { by, life, ballot: next, upto }
                })
            }
            Command::Out { server, incarnation, ballot } => {
                ballot > 0 && self.change(server, incarnation, ballot, |_| Phase::Out)
            }
        };
        if has_changed {
            self.epoch = next;
        }
        has_changed
    }

    /// Moves an incarnation on, if it is active (ballot 0) or fenced in just that ballot.
    fn change(
        &mut self,
        server: NodeId,
        incarnation: u32,
        ballot: u64,
        to: impl FnOnce(Option<Timestamp>) -> Phase,
    ) -> bool {
        let Some(standing) = self.servers.get_mut(&server) else { return false };
        let (at, upto) = match standing.phase {
            Phase::Active => (Some(0), None),
            Phase::Fenced { ballot, upto, .. } => (Some(ballot), Some(upto)),
            Phase::Out => (None, None),
        };
        let is_meant = standing.incarnation == incarnation && at == Some(ballot);
        if is_meant {
            standing.phase = to(upto);
        }
        is_meant
    }

    /// What this life of a server is to decide.
    fn tasks(&self, of: NodeId, its: Life) -> Vec<Task> {
        let tasks = self.servers.iter().filter_map(|(&server, standing)| match standing.phase {
            Phase::Fenced { by, life, ballot, upto } if (by, life) == (of, its) => {
                let incarnation = standing.incarnation;
                Some(Task { server, incarnation, ballot, after: standing.floor, upto })
            }
            Phase::Active | Phase::Fenced { .. } | Phase::Out => None,
        });
        tasks.collect()
    }
}

/// What is replicated: the directory's commands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Directory;

impl Replicated for Directory {
    type Command = Command;
    type Chunk = State;
    type Cursor = ();
}

/// An order to one life of a server: decide what an incarnation of another, or of itself, left.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Wire)]
pub struct Task {
    /// Whose.
    pub server: NodeId,
    /// Which of its incarnations.
    pub incarnation: u32,
    /// In this ballot. Nobody else has it.
    pub ballot: u64,
    /// Its timestamps are above this, and
    pub after: Timestamp,
    /// not above this.
    pub upto: Timestamp,
}

/// A lease, and what may be assigned under it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Wire)]
pub struct Grant {
    /// The life that asked has this incarnation.
    pub incarnation: u32,
    /// The members as of the grant are those of this epoch.
    pub epoch: u64,
    /// Its timestamps are above this.
    pub floor: Timestamp,
    /// Timestamps, and watermarks that it reports, are not above this.
    pub limit: Timestamp,
    /// How long the leader waits for the life, from when it granted; a leader of an earlier version
    /// does not say, and waits as long as [`Config::lease`].
    pub lease: Duration,
}

/// What is said to and by the directory.
#[derive(Clone, PartialEq, Eq, Debug, Wire, Kind)]
pub enum Message {
    /// Between voters.
    #[message(kind = f0.kind())]
    Log(replication::Message<Directory>),
    /// A server to the leader, as far as it knows: may this life take part, or go on?
    Ask(Ask),
    /// The leader to a server that asked.
    Answer(Answer),
    /// A voter that does not lead, to a server that asked.
    NotLeader {
        /// Who does, if it knows.
        leader: Option<NodeId>,
    },
    /// The members have changed; from anybody.
    Members(Members),
}

/// What a voter remembers.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Record {
    /// In a checkpoint only: the state that the log before the base adds up to.
    State(State),
    /// Of the log.
    Log(replication::Record<Directory>),
}

/// Timers of a voter.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Timer {
    /// Of the log.
    Log(replication::Timer),
    /// A leader looks at who has not asked for too long.
    Sweep,
}

/// The way from a voter to the world, beside that of its log.
pub trait Io: replication::Io<Directory> {
    /// Sends a message to a server, which may be this one; it may be lost.
    fn send_to_server(&mut self, to: NodeId, msg: Message);
    /// Sets [`Timer::Sweep`], or moves it.
    fn set_sweep(&mut self, at: Time);
    /// States what no other may contradict.
    fn claim(&mut self, claim: Claim);
}

/// What only a leader knows.
#[derive(Debug)]
struct Lead {
    /// Since when it leads: whoever was granted a lease by another was so before.
    since: Time,
    /// Who asked, by server.
    heard: OrdMap<NodeId, Heard>,
    /// When what was granted runs out; if nothing was, a lease after it began to lead.
    granted: OrdMap<NodeId, Time>,
    /// Servers about which a command is under way, and is not a second time. Whoever is among them
    /// gets no lease.
    proposed: OrdSet<NodeId>,
    /// The limit is being moved.
    is_extending: bool,
    /// When somebody was told to decide what a server left, and how many were.
    told: OrdMap<NodeId, (Time, u32)>,
    /// Asked while it was not sure to lead: what each server said last, for the next round of
    /// confirmation.
    waiting: OrdMap<NodeId, Ask>,
    /// Asked before the present round of confirmation began.
    confirming: OrdMap<NodeId, Ask>,
    /// Counts the rounds.
    round: u64,
}

/// What a server said when it asked last.
#[derive(Clone, Copy, Debug)]
struct Heard {
    at: Time,
    life: Life,
    clock: Timestamp,
    /// See [`Ask::took`].
    took: Duration,
}

/// One voter of the directory.
#[derive(Debug)]
pub struct Keeper {
    me: NodeId,
    cluster: Arc<Cluster>,
    config: Config,
    replica: Replica<Directory>,
    state: State,
    lead: Option<Lead>,
    /// A snapshot has replaced the state and is not durable yet.
    needs_checkpoint: bool,
}

impl Keeper {
    /// Starts, or starts again with what survived.
    pub fn new(
        me: NodeId,
        cluster: Arc<Cluster>,
        config: Config,
        recovered: Vec<Record>,
        io: &mut impl Io,
    ) -> Self {
        let mut state = State::new(&cluster);
        let mut log = Vec::new();
        for record in recovered {
            match record {
                Record::State(kept) => state = kept,
                Record::Log(record) => log.push(record),
            }
        }
        let voters = voters(&cluster);
        let preferred_leader = voters.first().copied();
        let group = Group { voters, learners: Vec::new(), preferred_leader };
        let replica = Replica::new(me, group, config.replication.clone(), log, io);
        let lead = None;
        let mut keeper =
            Self { me, cluster, config, replica, state, lead, needs_checkpoint: false };
        keeper.drain(io);
        keeper
    }

    /// A message from another voter.
    pub fn on_log(&mut self, from: NodeId, msg: replication::Message<Directory>, io: &mut impl Io) {
        self.replica.step(from, msg, io);
        self.drain(io);
    }

    /// A timer expired.
    pub fn on_timer(&mut self, timer: Timer, io: &mut impl Io) {
        match timer {
            Timer::Log(timer) => self.replica.on_timer(timer, io),
            Timer::Sweep => self.on_sweep_timeout(io),
        }
        self.drain(io);
    }

    /// Everything persisted up to `ticket` is durable.
    pub fn on_durable(&mut self, ticket: Ticket, io: &mut impl Io) {
        self.replica.on_durable(ticket, io);
        self.drain(io);
    }

    /// Sends what several inputs can share.
    pub fn flush(&mut self, io: &mut impl Io) {
        self.replica.flush(io);
        self.drain(io);
    }

    /// True if the embedder should make a checkpoint soon: another voter's state was taken over,
    /// and counts once it is durable.
    #[must_use]
    pub fn needs_checkpoint(&self) -> bool {
        self.needs_checkpoint
    }

    /// What to remember from now on instead of everything before. Forgets the entries that the
    /// state covers and nobody needs.
    pub fn checkpoint_records(&mut self) -> Vec<Record> {
        self.replica.compact(self.replica.compactable(KEEP_ENTRIES));
        let log = self.replica.checkpoint_records().into_iter().map(Record::Log);
        std::iter::once(Record::State(self.state.clone())).chain(log).collect()
    }

    /// The records of a checkpoint are durable that was made after [`Keeper::needs_checkpoint`] was
    /// seen to be true.
    pub fn on_checkpoint_durable(&mut self, io: &mut impl Io) {
        self.needs_checkpoint = false;
        self.replica.snapshot_durable(io);
        self.drain(io);
    }

    /// What the log adds up to here.
    #[must_use]
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Panics if the state contradicts itself.
    ///
    /// # Panics
    /// If it does.
    pub fn assert_invariants(&self) {
        self.replica.assert_invariants();
        for (server, standing) in &self.state.servers {
            assert!(standing.floor <= self.state.limit, "{server} begins above the limit");
            if let Phase::Fenced { ballot, upto, .. } = standing.phase {
                assert!(ballot <= self.state.epoch, "{server}: a ballot of a later epoch");
                assert!(upto <= self.state.limit, "{server} ends above the limit");
            }
        }
        let is_leader = self.replica.is_leader();
        assert!(self.lead.is_none() || is_leader, "what a leader knows, without leading");
    }

    /// Carries out what the log has to say.
    fn drain(&mut self, io: &mut impl Io) {
        while let Some(event) = self.replica.next_event() {
            match event {
                Event::Chosen { index, term, payload } => {
                    let (partition, at) = (DIRECTORY, index.0);
                    io.claim(Claim::Chosen { partition, index: at, term: term.0 });
                    self.on_chosen(index, &payload, io);
                }
                Event::Leading { term } => {
                    io.claim(Claim::Leads { partition: DIRECTORY, term: term.0 });
                    self.lead = Some(Lead {
                        since: io.now(),
                        heard: OrdMap::new(),
                        granted: OrdMap::new(),
                        proposed: OrdSet::new(),
                        is_extending: false,
                        told: OrdMap::new(),
                        waiting: OrdMap::new(),
                        confirming: OrdMap::new(),
                        round: 0,
                    });
                    io.set_sweep(io.now() + self.config.ask_interval());
                }
                Event::Deposed { .. } => self.lead = None,
                Event::ReadReady { id } => self.on_confirmed(id, io),
                // They ask again.
                Event::ReadFailed { id } => drop(self.take_confirmed(id)),
                Event::SnapshotWanted { to, cursor: _ } => {
                    self.replica.send_chunk(to, self.state.clone(), None, io);
                }
                Event::SnapshotChunk { chunk, last, .. } => {
                    self.state = chunk;
                    self.needs_checkpoint |= last;
                }
            }
        }
    }

    fn on_chosen(&mut self, index: Index, payload: &Payload<Command>, io: &mut impl Io) {
        if index <= self.state.applied {
            // The checkpoint or snapshot that this replica started from covers it.
            return;
        }
        self.state.applied = index;
        let Payload::Command(command) = payload else { return };
        let has_changed = self.state.apply(**command);
        let lease = command.server().map_or(self.config.lease, |server| self.lease_of(server));
        let Some(lead) = &mut self.lead else { return };
        match **command {
            Command::Extend { .. } => lead.is_extending = false,
            Command::Join { server, .. } | Command::Out { server, .. } => {
                lead.proposed.remove(&server);
                lead.told.remove(&server);
                // Of this life nothing was granted yet; it is given a lease's time to ask.
                lead.granted.insert(server, io.now() + lease);
            }
            Command::Fence { server, .. } => {
                lead.proposed.remove(&server);
                let told = lead.told.entry(server).or_insert((io.now(), 0));
                *told = (io.now(), told.1.saturating_add(1));
            }
        }
        if has_changed {
            let members = self.state.members();
            for server in self.cluster.servers() {
                io.send_to_server(server.id, Message::Members(members.clone()));
            }
        }
    }

    fn propose(&mut self, command: Command, io: &mut impl Io) {
        let Some(lead) = &mut self.lead else { return };
        let server = command.server();
        let is_under_way = server.map_or(lead.is_extending, |of| lead.proposed.contains(&of));
        if is_under_way || self.replica.propose(command, io).is_none() {
            return;
        }
        match server {
            Some(server) => drop(lead.proposed.insert(server)),
            None => lead.is_extending = true,
        }
    }

    /// True if at `now` no other can lead, and nothing is chosen that is not applied here.
    fn is_sure_to_lead(&self, now: Time) -> bool {
        self.lead.is_some() && self.replica.is_ready() && self.replica.has_lease(now)
    }

    /// A server asks for a lease. A leader that is not sure to lead asks the other voters first, and
    /// answers when a majority says that it still leads.
    pub fn on_ask(&mut self, from: NodeId, ask: &Ask, io: &mut impl Io) {
        if self.lead.is_none() {
            let leader = self.replica.leader().filter(|&leader| leader != self.me);
            io.send_to_server(from, Message::NotLeader { leader });
            return;
        }
        let now = io.now();
        let is_sure = self.is_sure_to_lead(now);
        let Some(lead) = &mut self.lead else { return };
        lead.heard
            .insert(from, Heard { at: now, life: ask.life, clock: ask.clock, took: ask.took });
        if is_sure {
            self.answer(from, ask, io);
        } else {
            lead.waiting.insert(from, ask.clone());
            self.confirm(io);
        }
        self.replica.flush(io);
        self.drain(io);
    }

    /// Has a majority confirm that this voter leads, for all who wait; one round at a time.
    fn confirm(&mut self, io: &mut impl Io) {
        let Some(lead) = &mut self.lead else { return };
        if lead.confirming.is_empty() && !lead.waiting.is_empty() {
            lead.confirming = std::mem::take(&mut lead.waiting);
            lead.round += 1;
            self.replica.read_index(lead.round, io);
        }
    }

    fn take_confirmed(&mut self, round: u64) -> OrdMap<NodeId, Ask> {
        let lead = self.lead.as_mut().filter(|lead| lead.round == round);
        lead.map(|lead| std::mem::take(&mut lead.confirming)).unwrap_or_default()
    }

    /// When this round began no other voter led: one that leads since lets the leases pass that are
    /// granted now, for they count from before.
    fn on_confirmed(&mut self, round: u64, io: &mut impl Io) {
        for (from, ask) in self.take_confirmed(round) {
            self.answer(from, &ask, io);
        }
        self.confirm(io);
    }

    /// Grants a lease if this life may have one, and lets the next life join.
    fn answer(&mut self, from: NodeId, ask: &Ask, io: &mut impl Io) {
        let now = io.now();
        let Some(&standing) = self.state.servers.get(&from) else { return };
        let Some(lead) = &mut self.lead else { return };
        let is_own = standing.life == ask.life && standing.incarnation > 0;
        let is_active = is_own && standing.phase == Phase::Active;
        let is_granted = is_active && !lead.proposed.contains(&from);
        let lease = standing.lease(self.state.limit, self.config.lease);
        if is_granted {
            let until = lead.granted.entry(from).or_insert(now);
            *until = (*until).max(now + lease);
        }
        let grant = is_granted.then_some(Grant {
            incarnation: standing.incarnation,
            epoch: self.state.epoch,
            floor: standing.floor,
            limit: self.state.limit,
            lease,
        });
        let members = (ask.epoch != self.state.epoch).then(|| self.state.members());
        let answer = Answer {
            life: ask.life,
            sent: ask.sent,
            grant,
            is_over: is_own && !is_active,
            epoch: self.state.epoch,
            members,
            tasks: self.state.tasks(from, ask.life),
        };
        io.send_to_server(from, Message::Answer(answer));
        for task in &ask.done {
            let Task { server, incarnation, ballot, .. } = *task;
            if self.state.tasks(from, ask.life).contains(task) {
                self.propose(Command::Out { server, incarnation, ballot }, io);
            }
        }
        let is_known = ask.is_marked || standing.incarnation > 0;
        if standing.phase == Phase::Out && !is_own && is_known {
            self.propose(self.join(from, &standing, ask), io);
        }
        self.extend(now, io);
    }

    /// What lets the next life of a server join, which is out.
    fn join(&self, server: NodeId, standing: &Standing, ask: &Ask) -> Command {
        let Ask { life, is_marked, ended, keeps_lengths, took, .. } = *ask;
        let (usual, longest) = (self.config.lease, self.config.lease_max());
        let are_kept = voters(&self.cluster)
            .iter()
            .all(|voter| self.state.servers.get(voter).is_some_and(|of| of.keeps_lengths));
        let last = standing.lease(self.state.limit, usual);
        let was_well = standing.incarnation > 0 && ended == Some(standing.life);
        let next = if was_well { last * 2 } else { last }.max(took.saturating_mul(ANSWERS));
        let next = next.min(longest).max(usual);
        let lease = if are_kept { next } else { usual };
        Command::Join { server, life, is_marked, lease, keeps_lengths }
    }

    /// How long leases of a server are now.
    fn lease_of(&self, server: NodeId) -> Duration {
        let (limit, usual) = (self.state.limit, self.config.lease);
        self.state.servers.get(&server).map_or(usual, |standing| standing.lease(limit, usual))
    }

    /// True if a server has asked within its lease, or not longer ago than answers may take to it: one
    /// that is fenced keeps the lease of a life that has ended, however slow its links are now.
    fn is_there(&self, server: NodeId, heard: &Heard, now: Time) -> bool {
        let slow = heard.took.saturating_mul(ANSWERS).min(self.config.lease_max());
        now.since(heard.at) < self.lease_of(server).max(slow)
    }

    /// Moves the limit ahead of the clocks of those that asked lately.
    fn extend(&mut self, now: Time, io: &mut impl Io) {
        let Some(lead) = &self.lead else { return };
        let recent = lead.heard.iter().filter(|&(&id, heard)| self.is_there(id, heard, now));
        let mut clocks: Vec<Timestamp> = recent.map(|(_, heard)| heard.clock).collect();
        clocks.sort_unstable();
        let Some(&median) = clocks.get(clocks.len().saturating_sub(1) / 2) else { return };
        if self.state.limit < median + self.config.ahead * 3 / 4 {
            self.propose(Command::Extend { limit: median + self.config.ahead }, io);
        }
    }

    /// Ends the lives whose leases have run out, and sees to it that what they left is decided.
    fn on_sweep_timeout(&mut self, io: &mut impl Io) {
        let now = io.now();
        let Some(lead) = &self.lead else { return };
        io.set_sweep(now + self.config.ask_interval() / 2);
        let mut fences = Vec::new();
        for (&server, standing) in &self.state.servers {
            let (over, previous) = match standing.phase {
                Phase::Out => continue,
                Phase::Active => {
                    let granted = lead.granted.get(&server).copied();
                    if now < granted.unwrap_or(lead.since + standing.lease_max(self.config.lease)) {
                        continue;
                    }
                    (0, None)
                }
                Phase::Fenced { by, life, ballot, .. } => {
                    if self.is_at_work(server, by, life, now) {
                        continue;
                    }
                    (ballot, Some(by))
                }
            };
            if let Some((by, life)) = self.choose(server, previous, now) {
                let incarnation = standing.incarnation;
                fences.push(Command::Fence { server, incarnation, over, by, life });
            }
        }
        for fence in fences {
            self.propose(fence, io);
        }
        self.extend(now, io);
        self.replica.flush(io);
    }

    /// True if whoever is to decide what `server` left may still be doing so.
    fn is_at_work(&self, server: NodeId, by: NodeId, life: Life, now: Time) -> bool {
        let Some(lead) = &self.lead else { return true };
        let is_there = match lead.heard.get(&by) {
            Some(heard) => heard.life == life && self.is_there(by, heard, now),
            None => now.since(lead.since) < self.lease_of(by),
        };
        let (told, times) = lead.told.get(&server).copied().unwrap_or((lead.since, 1));
        let timeout = self.config.takeover_timeout * (1 << times.saturating_sub(1).min(10));
        is_there && now.since(told) < timeout
    }

    /// Who is to decide what `server` left: one that asks for leases now, active rather than not,
    /// of the same region rather than not, the next one by id; and another than last time, if there
    /// is.
    fn choose(
        &self,
        server: NodeId,
        previous: Option<NodeId>,
        now: Time,
    ) -> Option<(NodeId, Life)> {
        let lead = self.lead.as_ref()?;
        let region = self.cluster.region_of(server);
        let is_active = |id: NodeId, life: Life| {
            let standing = self.state.servers.get(&id);
            standing.is_some_and(|s| s.phase == Phase::Active && s.life == life)
        };
        let ended = self.state.servers.get(&server)?.life;
        let is_there = |id: NodeId, heard: &Heard| {
            self.is_there(id, heard, now) && (id, heard.life) != (server, ended)
        };
        let heard = lead.heard.iter().filter(|&(&id, heard)| is_there(id, heard));
        let best = heard.min_by_key(|&(&id, heard)| {
            (
                previous == Some(id),
                !is_active(id, heard.life),
                self.cluster.region_of(id) != region,
                // The next one by id, around the end.
                id.0.wrapping_sub(server.0).wrapping_sub(1),
            )
        });
        best.map(|(&id, heard)| (id, heard.life))
    }
}

/// What [`Message::Ask`] says.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Ask {
    /// Which life.
    pub life: Life,
    /// When it asks.
    pub sent: Time,
    /// The members that it knows.
    pub epoch: u64,
    /// Its physical clock.
    pub clock: Timestamp,
    /// Tasks that it has finished.
    pub done: Vec<Task>,
    /// Its disk remembers that it may have promised something. Nobody joins for the first time
    /// without: a disk without that mark, of a server that has joined before, is not the one it
    /// had.
    pub is_marked: bool,
    /// The life of the same process before this one, which the directory ended.
    pub ended: Option<Life>,
    /// As a voter it knows how long leases are (`Standing::lease`); one of an earlier version does
    /// not.
    pub keeps_lengths: bool,
    /// How long answers take, from when it asked: a mean of the last ones. After a pause or a cut a
    /// lease must not be long, because nothing is visible until it ends if its holder is lost.
    pub took: Duration,
}

/// What [`Message::Answer`] says.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Answer {
    /// The life that asked.
    pub life: Life,
    /// When it asked.
    pub sent: Time,
    /// It is active, and has a lease from when it asked.
    pub grant: Option<Grant>,
    /// It was active and never will be again.
    pub is_over: bool,
    /// The epoch of the answer.
    pub epoch: u64,
    /// The members, if they are not those that it knew.
    pub members: Option<Members>,
    /// All that it is to do.
    pub tasks: Vec<Task>,
}

/// What changed for a server.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Wire)]
pub enum Change {
    /// The members: adopt [`Membership::members`] everywhere on the node, in one step.
    Members,
    /// This life takes part from now on.
    Joined {
        /// As this incarnation.
        incarnation: u32,
        /// It assigns nothing below, also if its first lease had run out when it came.
        floor: Timestamp,
    },
    /// The life is over: drop everything that it coordinated, and answer no reads. A new one asks
    /// to join.
    Ended,
    /// [`Membership::tasks`] are others than before: drop those that are gone, begin those that are
    /// new.
    Tasks,
}

/// Between which timestamps a server may assign, and what time it should go by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Window {
    /// Assign, and report, only above this,
    pub floor: Timestamp,
    /// and not above this.
    pub limit: Timestamp,
    /// The clock, or what it should say if it is far from those of others.
    pub clock: Timestamp,
}

/// What one server knows of the directory.
#[derive(Debug)]
pub struct Membership {
    me: NodeId,
    config: Config,
    voters: Vec<NodeId>,
    /// Whom to ask.
    supposed: NodeId,
    /// When it was asked first since it answered last; none if it has answered.
    unanswered: Option<Time>,
    /// How long the slowest of the last answers took.
    took: Duration,
    /// See [`Ask::took`].
    usual: Duration,
    /// Somebody else was named and asked since the last round.
    is_redirected: bool,
    life: Life,
    /// See [`Ask::ended`].
    ended: Option<Life>,
    members: Members,
    grant: Option<Grant>,
    /// When the lease ends; whether it has is judged by the time as it is.
    until: Time,
    /// How long one may be used, from when it was asked for.
    held: Duration,
    tasks: OrdSet<Task>,
    /// The epoch of the answer that told the tasks.
    tasks_epoch: u64,
    done: OrdSet<Task>,
    is_marked: bool,
    /// The leader has answered this process.
    is_told: bool,
}

impl Membership {
    /// A server that has just started, with a token for its life drawn at random. `is_marked`:
    /// see [`Ask`].
    #[must_use]
    pub fn new(
        me: NodeId,
        cluster: &Cluster,
        config: Config,
        is_marked: bool,
        rng: &mut Rng,
    ) -> Self {
        let voters = voters(cluster);
        let region = cluster.region_of(me);
        let near = voters.iter().find(|&&voter| cluster.region_of(voter) == region);
        let supposed = near.or(voters.first()).copied().unwrap_or(me);
        Self {
            me,
            config,
            voters,
            supposed,
            unanswered: None,
            took: Duration::ZERO,
            usual: Duration::ZERO,
            is_redirected: false,
            life: Life(rng.next_u64()),
            ended: None,
            members: Members::default(),
            grant: None,
            until: Time::ZERO,
            held: Duration::ZERO,
            tasks: OrdSet::new(),
            tasks_epoch: 0,
            done: OrdSet::new(),
            is_marked,
            is_told: false,
        }
    }

    /// How long after a round of asking the next one is. Leases that are longer are asked for less often:
    /// what is late on a link holds back what comes after it.
    #[must_use]
    pub fn ask_interval(&self) -> Duration {
        self.config.ask_interval().max(self.held / ASKS)
    }

    /// A round of asking, [`Membership::ask_interval`] apart: what to send to whom. Whoever has not
    /// answered for as long as answers take is not asked again before the others were.
    pub fn ask(&mut self, now: Time, clock: Timestamp) -> (NodeId, Message) {
        if self.unanswered.is_some_and(|since| now.since(since) >= self.took) {
            let at = self.voters.iter().position(|&voter| voter == self.supposed);
            let next = at.and_then(|at| self.voters.get(at + 1)).or(self.voters.first());
            self.supposed = next.copied().unwrap_or(self.supposed);
            self.unanswered = Some(now);
        }
        self.unanswered.get_or_insert(now);
        self.is_redirected = false;
        (self.supposed, self.question(now, clock))
    }

    /// The mark is on the disk.
    pub fn on_marked(&mut self) {
        self.is_marked = true;
    }

    /// True if this server has never taken part; none if that is not known. Only the leader's
    /// answer to this process proves it: members that somebody else tells, or told before, may be
    /// those of an epoch before this server joined, and lost its disk.
    #[must_use]
    pub fn is_new(&self) -> Option<bool> {
        let is_first = self.members.servers.get(&self.me)?.incarnation == 0;
        (self.is_told || !is_first).then_some(is_first)
    }

    fn question(&self, now: Time, clock: Timestamp) -> Message {
        Message::Ask(Ask {
            life: self.life,
            sent: now,
            epoch: self.members.epoch,
            clock,
            done: self.done.iter().copied().collect(),
            is_marked: self.is_marked,
            ended: self.ended,
            keeps_lengths: true,
            took: self.usual,
        })
    }

    /// Whoever was asked does not lead: what to send to whom at once, if that is known and has not
    /// been done in this round.
    pub fn on_not_leader(
        &mut self,
        from: NodeId,
        leader: Option<NodeId>,
        now: Time,
        clock: Timestamp,
    ) -> Option<(NodeId, Message)> {
        let leader = leader.filter(|leader| from == self.supposed && *leader != from)?;
        self.supposed = leader;
        self.unanswered = Some(now);
        if std::mem::replace(&mut self.is_redirected, true) {
            return None;
        }
        Some((leader, self.question(now, clock)))
    }

    /// The leader answered. What changed, in order.
    pub fn on_answer(
        &mut self,
        from: NodeId,
        answer: Answer,
        now: Time,
        rng: &mut Rng,
    ) -> Vec<Change> {
        self.supposed = from;
        self.unanswered = None;
        if answer.life == self.life {
            // The longest counts, and is forgotten little by little.
            let took = now.since(answer.sent);
            self.took = took.max(self.took - self.took / 8);
            // A pause of this process, or a link that was cut, delays one answer or a few.
            self.usual = self.usual - self.usual / 8 + took / 8;
        }
        self.is_told |= answer.life == self.life;
        let mut changes = Vec::new();
        // Members and limit are taken over in one step: what is reported in an epoch is not above
        // the limit as of that epoch, which is what floors of later ones rest on.
        if let Some(members) = &answer.members
            && self.members.adopt(members)
        {
            changes.push(Change::Members);
        }
        if answer.life != self.life {
            // To an earlier life, perhaps of an earlier process; only the members are news.
            self.end_if_over(false, rng, &mut changes);
            return changes;
        }
        self.end_if_over(answer.is_over, rng, &mut changes);
        if answer.life != self.life {
            return changes;
        }
        let is_active = |grant: &Grant| self.members.is_active(self.me, grant.incarnation);
        if let Some(grant) = answer.grant.filter(is_active)
            && grant.epoch <= self.members.epoch
        {
            self.held = self.config.held(grant.lease);
            self.until = self.until.max(answer.sent + self.held);
            let held = self.grant.get_or_insert_with(|| {
                let Grant { incarnation, floor, .. } = grant;
                changes.push(Change::Joined { incarnation, floor });
                grant
            });
            held.limit = held.limit.max(grant.limit);
            held.epoch = held.epoch.max(grant.epoch);
        }
        if answer.epoch >= self.tasks_epoch {
            self.tasks_epoch = answer.epoch;
            let tasks = OrdSet::from_iter(answer.tasks);
            self.done.retain(|task| tasks.contains(task));
            if tasks != self.tasks {
                self.tasks = tasks;
                changes.push(Change::Tasks);
            }
        }
        changes
    }

    /// Somebody knows the members of this epoch. What changed, in order.
    pub fn on_members(&mut self, members: &Members, rng: &mut Rng) -> Vec<Change> {
        let mut changes = Vec::new();
        if self.members.adopt(members) {
            changes.push(Change::Members);
            self.end_if_over(false, rng, &mut changes);
        }
        changes
    }

    /// Begins a new life if this one was ended.
    fn end_if_over(&mut self, is_said: bool, rng: &mut Rng, changes: &mut Vec<Change>) {
        let is_seen = |grant: Grant| !self.members.is_active(self.me, grant.incarnation);
        if !is_said && !self.grant.is_some_and(is_seen) {
            return;
        }
        self.ended = Some(std::mem::replace(&mut self.life, Life(rng.next_u64())));
        self.grant = None;
        self.until = Time::ZERO;
        self.done.clear();
        changes.push(Change::Ended);
        if !std::mem::take(&mut self.tasks).is_empty() {
            changes.push(Change::Tasks);
        }
    }

    /// What a task asked for is done: everything that the incarnation left is decided, in the
    /// task's ballot. The directory is told until it knows.
    pub fn finish(&mut self, task: Task) {
        if self.tasks.contains(&task) {
            self.done.insert(task);
        }
    }

    /// The members, as far as this server knows.
    #[must_use]
    pub fn members(&self) -> &Members {
        &self.members
    }

    /// What this server is to decide and has not finished.
    pub fn tasks(&self) -> impl Iterator<Item = &Task> {
        self.tasks.difference(&self.done)
    }

    /// The token of this life.
    #[must_use]
    pub fn life(&self) -> Life {
        self.life
    }

    /// The incarnation of this life, if it takes part as far as this server knows.
    #[must_use]
    pub fn incarnation(&self) -> Option<u32> {
        self.grant.map(|grant| grant.incarnation)
    }

    /// True if nobody can have ended this life at `now`. Give the time as it is, not as it was when
    /// something came: a pause is charged to the lease.
    #[must_use]
    pub fn has_lease(&self, now: Time) -> bool {
        self.grant.is_some() && now < self.until
    }

    /// True if little is left of the lease: what extends it comes late, as a rule because this
    /// server or the leader has more to do than it can. All that it takes now adds to that, and
    /// would have to be taken over if the lease ended.
    #[must_use]
    pub fn is_pressed(&self, now: Time) -> bool {
        self.until.since(now) < self.held / PRESSED
    }

    /// Between which timestamps this server may assign and report now; not at all without a lease.
    /// A clock that is further from the limit than any right one can be is drawn near it.
    #[must_use]
    pub fn window(&self, now: Time, clock: Timestamp) -> Option<Window> {
        let grant = self.grant.filter(|_| self.has_lease(now))?;
        let (floor, limit) = (grant.floor, grant.limit);
        // Between these are all clocks near the median, with some room to count on from the
        // fastest.
        let (slowest, fastest) = (limit - self.config.ahead, limit - self.config.ahead / 8);
        Some(Window { floor, limit, clock: clock.clamp(slowest, fastest) })
    }
}

impl fmt::Display for Message {
    /// One short line; lives are not shown, for they are random.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !matches!(self, Self::Log(_)) {
            f.write_str(self.kind())?;
        }
        match self {
            Self::Log(msg) => write!(f, "{msg}"),
            Self::Ask(ask) => write!(f, " e{} done {}", ask.epoch, ask.done.len()),
            Self::Answer(answer) => {
                write!(f, " e{}", answer.epoch)?;
                match answer.grant {
                    Some(Grant { incarnation, floor, limit, .. }) => {
                        write!(f, " lease {incarnation} {floor}..{limit}")?;
                    }
                    None if answer.is_over => f.write_str(" over")?,
                    None => f.write_str(" no lease")?,
                }
                write!(f, " tasks {}", answer.tasks.len())
            }
            Self::NotLeader { leader: Some(leader) } => write!(f, " {leader}"),
            Self::NotLeader { leader: None } => f.write_str(" unknown"),
            Self::Members(members) => write!(f, " {members}"),
        }
    }
}

impl fmt::Display for Keeper {
    /// `directory n1 leader t3 … limit @9 e4 n1.1 active`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (limit, members) = (self.state.limit, self.state.members());
        write!(f, "directory {} limit {limit} {members}", self.replica)
    }
}
