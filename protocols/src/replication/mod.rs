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
//! A group of replicas agrees on one growing sequence of commands. In each *term* at most one
//! replica leads and appends entries. An entry that a write quorum has durably is *chosen* and
//! never changes. A leader needs the votes of an election quorum, and voters elect only a node
//! whose log is not behind theirs. Every election quorum intersects every write quorum, so a leader
//! has every chosen entry.
//!
//! A [`Replica`] is one member of one group. A server machine embeds one replica for each partition
//! that it holds, wraps [`Message`], [`Timer`] and [`Record`] in its own variants, and passes an
//! [`Io`] to each call. After each call it drains [`Replica::next_event`].
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
//! # Order of writes and messages
//!
//! No message that depends on a term, a vote or an entry leaves before that is durable. There is
//! one exception, which the thesis allows (§10.2.1): a leader sends entries while it writes them,
//! and counts itself only when its own ticket is durable. So a group with a slow disk at its leader
//! stays available.
//!
//! # Deviations
//!
//! - Raft's heartbeat is an empty `AppendEntries`. Here it is a separate message, answered without
//!   waiting for the disk. Its answer also reveals lost appends, so there are no retransmission
//!   timers.
//! - The first entry of a log is the membership itself rather than a no-op, so that a node that
//!   starts empty learns its group from the log.
//! - A leader that was removed sends `TimeoutNow` to the best voter as it leaves, so that the group
//!   does not wait for an election timer.
//! - Two election quorums must intersect, as well as an election and a write quorum. Flexible Paxos
//!   numbers its ballots by proposer, but candidates share Raft's terms
//!   ([`QuorumError::TwoLeaders`]).
//! - Members compare digests of the effects of entries, with heartbeats ([`Replica::came_to`]).
//! - Snapshots are *fuzzy*: the state keeps changing while the snapshot is taken. So a piece may
//!   contain effects of entries after the snapshot's index, which the follower will apply again.
//!
//! # Not implemented
//!
//! - Witnesses, and votes by location (hierarchical quorums): no protocol here uses them.
//! - Single-server membership change (thesis §4.1): joint consensus covers any change, and two
//!   mechanisms would be two sets of rules to get wrong. See `docs/adr/0003`.
//! - A voter that lost its disk cannot come back under its name, because it would forget its votes.
//!   It is removed, and a node with another name is added ([`Group`]).

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

/// The types that a group replicates.
pub trait Replicated: Copy + Eq + Debug + Send + Sync + 'static {
    /// A command of the embedding protocol.
    type Command: Wire + Clone + Eq + Debug + Send + Sync + 'static;
    /// A piece of a snapshot of the state that the commands produce.
    type Chunk: Wire + Clone + Eq + Debug + Send + 'static;
    /// The position at which the next piece starts.
    type Cursor: Clone + Eq + Debug + Send + 'static;
}

/// A replica's I/O: the embedder's context, which wraps messages, timers and records.
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

/// A period with at most one leader. Terms are numbered.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Wire)]
pub struct Term(pub u64);

/// A position in the log, from 1; 0 is before the first entry.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Wire)]
pub struct Index(pub u64);

impl Term {
    fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

impl Index {
    /// The next position.
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

/// One entry of the log. Its position follows from its place in the log.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Entry<C> {
    /// The term of the leader that appended it.
    pub term: Term,
    /// Its content.
    pub payload: Payload<C>,
}

/// The content of an entry.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Payload<C> {
    /// No content: a new leader's first entry. When it is chosen, all earlier entries are chosen.
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

/// The initial members of a group. Only a node without any record of the group uses them.
///
/// Listing a node among `voters` states that it has never voted in this group. A voter that lost
/// its disk must not come back under its name, because it has forgotten promises on which others
/// rely: remove it, and add a node with another name. A node that joins later starts with a group
/// that does not list it (an empty one will do). It neither votes nor campaigns until a membership
/// in its log names it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Group {
    /// Members that vote.
    pub voters: Vec<NodeId>,
    /// Members that receive entries but do not vote.
    pub learners: Vec<NodeId>,
    /// The node that should lead whenever it can. It campaigns first when the group is new, and
    /// another leader transfers leadership to it once it has kept up for a while.
    pub preferred_leader: Option<NodeId>,
}

/// Settings, the same for every member of a group.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// The least time without a leader's message after which a node campaigns; it draws from this
    /// to twice this. Voters that received a leader's message within this time refuse other
    /// candidates; leases rely on that. A leader that receives no answer of a quorum for this long
    /// steps down. It should be several round trips. A node that gave up too early more than once
    /// waits longer than this, up to five seconds.
    pub election_timeout: Duration,
    /// How often a leader sends heartbeats. At most a third of `election_timeout`.
    pub heartbeat_interval: Duration,
    /// How much shorter than `election_timeout` a lease is. It covers the difference in rate
    /// between two monotonic clocks over that time.
    pub lease_margin: Duration,
    /// Quorum sizes.
    pub quorums: Quorums,
    /// The most bytes of entries in one message; a larger entry is sent alone.
    pub max_batch_bytes: usize,
    /// The most messages with entries in flight to one follower.
    pub max_inflight: usize,
    /// The most bytes of entries in flight to one follower; one message may exceed it. The total
    /// for all followers must fit into the queue of a link, or the same messages would be sent and
    /// dropped for ever.
    pub max_inflight_bytes: usize,
    /// The most entries that were appended but not chosen. Beyond it, proposals are refused.
    pub max_unchosen: usize,
    /// The most reads that wait for confirmation. Beyond it, reads fail.
    pub max_reads: usize,
    /// The most pieces of a snapshot in flight to one follower.
    pub snapshot_window: usize,
    /// The number of entries whose effects members compare at once, see [`Replica::came_to`].
    pub compared_entries: u64,
    /// True if followers act on chosen entries instead of only storing them. A follower that has
    /// restarted is then told at once how far its log agrees, rather than with the next entry.
    pub followers_act: bool,
    /// Mutations, for tests (ADR 35).
    pub mutations: Mutations,
}

impl Config {
    /// Settings that follow from the election time-out: heartbeats at a tenth of it, and leases a
    /// tenth shorter.
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

    /// Sets these limits.
    pub fn limit(&mut self, limits: Limits) {
        self.max_batch_bytes = self.max_batch_bytes.min(limits.batch_bytes());
        self.max_inflight_bytes = limits.batch_bytes();
    }

    /// Checks the settings for a group that starts as `group`.
    ///
    /// # Errors
    /// The first problem, and what to change.
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

/// The settings cannot work.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ConfigError {
    /// Heartbeats are too rare for the election time-out.
    #[error("heartbeat_interval {0:?} must be above zero and at most a third of {1:?}")]
    Heartbeat(Duration, Duration),
    /// No lease would ever be valid.
    #[error("lease_margin {0:?} must be below election_timeout {1:?}")]
    Lease(Duration, Duration),
    /// A bound is zero.
    #[error("{0} must be at least 1")]
    Zero(&'static str),
    /// The quorums are unsafe.
    #[error("quorums: {0}")]
    Quorums(#[from] QuorumError),
}

/// Timers of one replica.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Timer {
    /// No leader's message arrived for too long, or an election did not end.
    Election,
    /// The leader's interval has passed.
    Heartbeat,
}

/// Events that a replica reports to its embedder.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event<R: Replicated> {
    /// The entry at `index` is chosen: apply it. Reported in log order, once per incarnation,
    /// starting after the base.
    Chosen {
        /// Its index.
        index: Index,
        /// The term in which it was appended.
        term: Term,
        /// Its content.
        payload: Payload<R::Command>,
    },
    /// This node leads, and everything chosen in earlier terms has been reported: it is ready to
    /// serve.
    Leading {
        /// Its term.
        term: Term,
    },
    /// This node does not lead any more, whether or not it reported `Leading`. Proposals that were
    /// not reported may be lost, or chosen later.
    Deposed {
        /// The term it led.
        term: Term,
    },
    /// Leadership was confirmed after the read was requested, and everything chosen before that has
    /// been reported: the state may be read.
    ReadReady {
        /// The id given to [`Replica::read_index`].
        id: u64,
    },
    /// The read cannot be confirmed: this node does not lead, or has too many waiting reads.
    ReadFailed {
        /// The id given to [`Replica::read_index`].
        id: u64,
    },
    /// A follower needs the state. Answer with exactly one [`Replica::send_chunk`], now or later.
    SnapshotWanted {
        /// The follower.
        to: NodeId,
        /// The position at which the piece starts; none for the first.
        cursor: Option<R::Cursor>,
    },
    /// A piece of another replica's state has arrived.
    SnapshotChunk {
        /// The piece.
        chunk: R::Chunk,
        /// A new snapshot begins: clear the state first.
        first: bool,
        /// The state is complete as of `index`. Make it durable together with
        /// [`Replica::checkpoint_records`], and then call [`Replica::snapshot_durable`].
        last: bool,
        /// The last entry that the snapshot certainly covers.
        index: Index,
    },
}
