//! One replicated log, as a value to embed: Raft, with the election and write quorums of Flexible
//! Paxos as parameters.
//!
//! - D. Ongaro, J. Ousterhout: *In Search of an Understandable Consensus Algorithm (Extended
//!   Version)*, 2014, <https://raft.github.io/raft.pdf>; cited below as "Raft".
//! - D. Ongaro: *Consensus: Bridging Theory and Practice*, PhD thesis, Stanford 2014,
//!   <https://github.com/ongardie/dissertation>; cited as "thesis".
//! - H. Howard, D. Malkhi, A. Spiegelman: *Flexible Paxos: Quorum Intersection Revisited*, OPODIS
//!   2016, <https://arxiv.org/abs/1608.06696>.
//!
//! A group of replicas agrees on one growing sequence of commands. One of them leads in each *term*
//! and appends; an entry that a write quorum holds durably is *chosen* and never changes. An
//! election quorum of voters makes a leader, and only of a node whose log is not behind theirs;
//! since every election quorum meets every write quorum, a leader has every chosen entry.
//!
//! A [`Replica`] is one member of one group. A server machine embeds one for each partition it
//! holds, wraps [`Message`], [`Timer`] and [`Record`] in its own variants, and lends it a [`Io`]
//! with each call. After each call it drains [`Replica::next_event`].
//!
//! | message | from → to | when | source |
//! |---|---|---|---|
//! | `PreVote`, `PreVoteReply` | node → voters and back | election timer ran out | thesis §9.6 |
//! | `RequestVote`, `VoteReply` | candidate → voters and back | pre-vote won, or `TimeoutNow` | Raft §5.2, §5.4.1 |
//! | `AppendEntries`, `AppendReply`, `AppendReject` | leader → members and back | at `flush` | Raft §5.3 |
//! | `Heartbeat`, `HeartbeatReply` | leader → members and back | at the interval; for reads | Raft §5.2; thesis §6.4 |
//! | `SnapshotPiece`, `SnapshotReply` | leader → member and back | the log no longer reaches back | Raft §7 |
//! | `TimeoutNow` | leader → voter | transfer | thesis §3.10 |
//!
//! # Order of writing and telling
//!
//! Nothing that depends on a term, a vote or an entry leaves before it is durable. The one
//! exception that the thesis allows (§10.2.1) is used: a leader sends entries while it writes them,
//! and counts itself only when its own ticket is durable, so a group stays available with a leader
//! whose disk is slow.
//!
//! # Deviations
//!
//! - Raft's heartbeat is an empty `AppendEntries`. Here it is a message of its own, answered without
//!   waiting for the disk; what it brings back also reveals lost appends, so there are no
//!   retransmission timers.
//! - The first entry of a log is the membership itself rather than a no-op, so that a node that
//!   starts empty learns its group from the log.
//! - A leader that was removed sends `TimeoutNow` to the best voter as it leaves, so that the group
//!   does not wait for an election timer.
//! - Two election quorums must meet as well as an election and a write quorum: Flexible Paxos numbers
//!   its ballots by proposer, Raft's terms are shared ([`QuorumError::TwoLeaders`]).
//! - Members compare digests of what the entries came to, with heartbeats ([`Replica::came_to`]).
//! - Snapshots are *fuzzy*: taken while the state goes on changing, so a piece may hold effects of
//!   entries that come after the snapshot's index and that the follower will apply again.
//!
//! # Not implemented
//!
//! - Witnesses, and votes by location (hierarchical quorums): no protocol here uses them.
//! - Single-server membership change (thesis §4.1): joint consensus covers any change, and the two
//!   together would be two sets of rules to get wrong. See `docs/adr/0003`.
//! - A voter that lost its disk cannot come back under its name: it would forget its votes. It is
//!   removed and a node of another name is added ([`Group`]).

mod change;
mod checks;
mod election;
mod follower;
mod leader;
mod log;
mod message;
mod mutations;
mod orders;
mod quorum;
mod replica;
mod shared;
mod snapshot;
mod timeout;
mod transfer;

use std::fmt::{self, Debug};
use std::sync::Arc;

use orthodrome_core::{Duration, Limits, NodeId, Rng, Ticket, Time, Wire};

pub use change::ChangeError;
pub use checks::Sum;
pub use message::{Beat, Message, Record};
pub use mutations::Mutations;
pub use quorum::{Members, QuorumError, Quorums};
pub use replica::Replica;
pub use shared::Shared;
pub use transfer::TransferError;

/// What a group replicates.
pub trait Replicated: Copy + Eq + Debug + Send + Sync + 'static {
    /// One command of the embedding protocol.
    type Command: Wire + Clone + Eq + Debug + Send + Sync + 'static;
    /// A piece of a snapshot of the state that the commands build.
    type Chunk: Wire + Clone + Eq + Debug + Send + 'static;
    /// Where the next piece starts.
    type Cursor: Clone + Eq + Debug + Send + 'static;
}

/// The way from a replica to the world: the embedder's own context, which wraps what passes.
pub trait Io<R: Replicated> {
    /// Monotonic time.
    fn now(&self) -> Time;
    /// The machine's random stream.
    fn rng(&mut self) -> &mut Rng;
    /// Sends a message; it may be lost.
    fn send(&mut self, to: NodeId, msg: Message<R>);
    /// Persists a record after all those before it.
    fn persist(&mut self, record: Record<R>) -> Ticket;
    /// Sets a timer, or moves it.
    fn set_timer(&mut self, timer: Timer, at: Time);
    /// Stops a timer, if it runs.
    fn cancel_timer(&mut self, timer: Timer);
}

/// A count of leaderships: each has at most one leader.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Wire)]
pub struct Term(pub u64);

/// A place in the log, from 1; 0 is before the first entry.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Wire)]
pub struct Index(pub u64);

impl Term {
    fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

impl Index {
    /// The place after this one.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }

    fn previous(self) -> Self {
        Self(self.0.saturating_sub(1))
    }

    fn plus(self, count: usize) -> Self {
        Self(self.0.saturating_add(count as u64))
    }
}

impl fmt::Display for Term {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "t{}", self.0)
    }
}

impl fmt::Display for Index {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl Debug for Term {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Debug for Index {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "i{}", self.0)
    }
}

/// One entry of the log; its place is known from where it is.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Entry<C> {
    /// The term of the leader that appended it.
    pub term: Term,
    /// What it says.
    pub payload: Payload<C>,
}

/// What an entry says.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Payload<C> {
    /// Nothing: a new leader's first entry, whose choice makes everything before it chosen.
    Noop,
    /// From here on, these are the members.
    Members(Arc<Members>),
    /// A command of the embedding protocol. Shared, because an entry is in the log, in its record
    /// and in a message to every follower at once.
    Command(Shared<C>),
}

impl<C> fmt::Display for Entry<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.payload {
            Payload::Noop => write!(f, "{} noop", self.term),
            Payload::Members(members) => write!(f, "{} members {members}", self.term),
            Payload::Command(_) => write!(f, "{} command", self.term),
        }
    }
}

/// The members a group starts with. Used only by a node that remembers nothing of the group.
///
/// To list a node among `voters` is to say that it never voted in this group before. A voter that
/// lost its disk must not come back under its name, for it has forgotten promises that others rely
/// on: remove it, and add a node of another name. A node that joins later starts with a group that
/// does not list it (an empty one will do): it neither votes nor campaigns until a membership in its
/// log names it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Group {
    /// Members that vote.
    pub voters: Vec<NodeId>,
    /// Members that only receive.
    pub learners: Vec<NodeId>,
    /// Who should lead when nothing stands against it: it campaigns first when the group is new,
    /// and another leader hands over to it once it has kept up for a while.
    pub preferred_leader: Option<NodeId>,
}

/// Settings, the same for every member of a group.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// The least time without a leader after which a node campaigns; it draws from this to twice
    /// this. Voters that heard a leader within this time refuse other candidates, which is what a
    /// lease rests on; a leader that hears no quorum for this long steps down. Several round trips.
    /// A node that gave up too early more than once waits longer than this, up to five seconds.
    pub election_timeout: Duration,
    /// How often a leader says that it still leads. At most a third of `election_timeout`.
    pub heartbeat_interval: Duration,
    /// How much shorter than `election_timeout` a lease is: covers the difference in rate between
    /// two monotonic clocks over that time.
    pub lease_margin: Duration,
    /// Quorum sizes.
    pub quorums: Quorums,
    /// Bytes of entries in one message; a larger entry travels alone.
    pub max_batch_bytes: usize,
    /// Messages with entries under way to one follower.
    pub max_inflight: usize,
    /// Bytes of entries under way to one follower; a message that goes over it is the last for now. What is
    /// under way to all fits into the queue of a link, or the same would be sent and dropped for ever.
    pub max_inflight_bytes: usize,
    /// Entries appended but not chosen, over which proposals are refused.
    pub max_unchosen: usize,
    /// Reads waiting for confirmation, over which they fail.
    pub max_reads: usize,
    /// Pieces of a snapshot under way to one follower.
    pub snapshot_window: usize,
    /// Members compare what so many entries came to, see [`Replica::came_to`].
    pub compared_entries: u64,
    /// Followers act on what is chosen, and not only remember it: one that has restarted is told
    /// how far its log agrees at once, rather than with the next entry.
    pub followers_act: bool,
    /// Deliberate mistakes, for tests (ADR 35).
    pub mutations: Mutations,
}

impl Config {
    /// Settings that follow from the election time-out: heartbeats at a tenth, leases a tenth
    /// shorter.
    #[must_use]
    pub fn with_election_timeout(election_timeout: Duration) -> Self {
        Self {
            election_timeout,
            heartbeat_interval: election_timeout / 10,
            lease_margin: election_timeout / 10,
            quorums: Quorums::Majority,
            max_batch_bytes: 256 * 1024,
            max_inflight: 64,
            max_inflight_bytes: Limits::SERVER.batch_bytes(),
            max_unchosen: 64 * 1024,
            max_reads: 64 * 1024,
            snapshot_window: 4,
            compared_entries: 1_024,
            followers_act: false,
            mutations: Mutations::default(),
        }
    }

    /// Keeps these limits.
    pub fn limit(&mut self, limits: Limits) {
        self.max_batch_bytes = self.max_batch_bytes.min(limits.batch_bytes());
        self.max_inflight_bytes = limits.batch_bytes();
    }

    /// Checks the settings, for a group that starts as `group`.
    ///
    /// # Errors
    /// What is wrong and what to change.
    pub fn check(&self, group: &Group) -> Result<(), ConfigError> {
        if self.heartbeat_interval.is_zero() || self.heartbeat_interval * 3 > self.election_timeout
        {
            return Err(ConfigError::Heartbeat(self.heartbeat_interval, self.election_timeout));
        }
        if self.lease_margin >= self.election_timeout {
            return Err(ConfigError::Lease(self.lease_margin, self.election_timeout));
        }
        let bounds = [
            ("max_batch_bytes", self.max_batch_bytes),
            ("max_inflight", self.max_inflight),
            ("max_inflight_bytes", self.max_inflight_bytes),
            ("max_unchosen", self.max_unchosen),
            ("max_reads", self.max_reads),
            ("snapshot_window", self.snapshot_window),
        ];
        if let Some(&(name, _)) = bounds.iter().find(|&&(_, bound)| bound == 0) {
            return Err(ConfigError::Zero(name));
        }
        if !group.voters.is_empty() {
            self.quorums.check(group.voters.len())?;
        }
        Ok(())
    }
}

/// Settings that cannot work.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ConfigError {
    /// Heartbeats too rare for the election time-out.
    #[error("heartbeat_interval {0:?} must be above zero and at most a third of {1:?}")]
    Heartbeat(Duration, Duration),
    /// No lease would ever hold.
    #[error("lease_margin {0:?} must be below election_timeout {1:?}")]
    Lease(Duration, Duration),
    /// A bound of nothing.
    #[error("{0} must be at least 1")]
    Zero(&'static str),
    /// Unsafe quorums.
    #[error("quorums: {0}")]
    Quorums(#[from] QuorumError),
}

/// Timers of one replica.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Timer {
    /// Nothing was heard from a leader for too long, or an election did not end.
    Election,
    /// The leader's interval.
    Heartbeat,
}

/// What a replica tells its embedder.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event<R: Replicated> {
    /// The entry at `index` is chosen: apply it. In log order, each once per incarnation, starting
    /// after the base.
    Chosen {
        /// Its place.
        index: Index,
        /// The term it was appended in.
        term: Term,
        /// What it says.
        payload: Payload<R::Command>,
    },
    /// This node leads, and everything chosen in earlier terms has been surfaced: ready to serve.
    Leading {
        /// Its term.
        term: Term,
    },
    /// This node no longer leads, whether or not it ever said `Leading`. Proposals that were not
    /// surfaced may be lost, or chosen later.
    Deposed {
        /// The term it led.
        term: Term,
    },
    /// Leadership was confirmed after the read was asked for, and everything chosen before that
    /// has been surfaced: the state may be read.
    ReadReady {
        /// As given to [`Replica::read_index`].
        id: u64,
    },
    /// The read cannot be confirmed here: this node does not lead, or has too many reads waiting.
    ReadFailed {
        /// As given to [`Replica::read_index`].
        id: u64,
    },
    /// A follower needs the state. To be answered by exactly one [`Replica::send_chunk`], now or
    /// later.
    SnapshotWanted {
        /// For whom.
        to: NodeId,
        /// Where the wanted piece starts; none for the first.
        cursor: Option<R::Cursor>,
    },
    /// A piece of another replica's state arrived.
    SnapshotChunk {
        /// The piece.
        chunk: R::Chunk,
        /// Clear the state first: a new snapshot begins.
        first: bool,
        /// The state is complete as of `index`. Make it durable together with
        /// [`Replica::checkpoint_records`] and then call [`Replica::snapshot_durable`].
        last: bool,
        /// The last entry that the snapshot covers for sure.
        index: Index,
    },
}
