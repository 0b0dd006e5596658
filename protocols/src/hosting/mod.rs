//! What one server node does for its replicas of partitions, in any protocol with leaders: one
//! store, one stream of durable records, checkpoints, snapshots, and the messages of each
//! replicated log. A protocol provides its [`Role`]: what a partition's leader does.

mod leading;
mod partition;
mod server;
mod world;

use std::convert::Infallible;
use std::fmt::{self, Debug};

use orthodrome_core::Wire;
use orthodrome_core::id::{NodeId, PartitionId, Ticket, TxnId};
use orthodrome_core::limits::Limits;
use orthodrome_core::machine::{Cx, Leak, Message, Protocol};
use orthodrome_core::rng::Rng;
use orthodrome_core::store::{Start, Versions, check_versions, sample_versions};
use orthodrome_core::time::{Duration, Timestamp};
use orthodrome_core::txn::Key;

pub use self::leading::Leading;
pub use self::partition::{Partition, change_refusal, group_view, transfer_refusal};
pub use self::server::Server;
pub use self::world::World;
use crate::replication::{self, Index, Replicated};

/// A piece of a partition's state, for a replica that lags too far behind.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Chunk<S> {
    /// All or a part of the state without its data; present in the first pieces.
    pub state: Option<Box<S>>,
    /// Keys with their versions. A key with many versions is spread over several pieces.
    #[wire(check = "check_versions", sample = "sample_versions")]
    pub keys: Vec<(Key, Versions)>,
}

/// The position at which a piece of a partition's state begins.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Cursor {
    /// In the state without its data.
    State,
    /// In the data.
    Data(Start),
}

/// A state that may be larger than one record or one message.
pub trait Divisible: Sized {
    /// Splits it into parts, at least one. Each has at most `bytes_max` bytes, unless a single
    /// transaction has more.
    fn divide(self, bytes_max: usize) -> Vec<Self>;
    /// Adds another part of the same state.
    fn join(&mut self, part: Self);
}

/// The durable records of one partition. `O` is the type of the protocol's own records besides the
/// log; most protocols have none.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
#[wire(bound = "S: Wire, O: Wire")]
pub enum Record<R: Replicated, S, O = Infallible> {
    /// A partition's state at a checkpoint, or one of several consecutive parts of it. The data is
    /// in the state engine.
    State(PartitionId, Box<S>),
    /// A record of a partition's log.
    Replication(PartitionId, replication::Record<R>),
    /// A record of the protocol's own.
    Own(PartitionId, Box<O>),
}

/// Settings of hosting.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// Settings of the replicated log.
    pub replication: replication::Config,
    /// A node makes a checkpoint after this many bytes of records, or after as many as its last
    /// checkpoint had, if that is more.
    pub checkpoint_bytes: usize,
    /// How long versions are kept that are not the newest of their key.
    pub version_retention: Duration,
    /// The most keys in one piece of a snapshot.
    pub chunk_keys: usize,
    /// The most bytes in one piece of a snapshot, and in one record of a state at a checkpoint.
    pub piece_bytes: usize,
    /// The most bytes in one message that lists several transactions.
    pub batch_bytes: usize,
    /// The most bytes of log entries kept for followers that lag behind. Beyond it, they need a
    /// snapshot.
    pub kept_bytes: usize,
    /// The most requests that a leader keeps until it is ready to serve, and the most commands that
    /// it queues while its log accepts none.
    pub early_max: usize,
    /// Tests only: the first server skips some of the entries that it does not lead.
    pub skips_entries: bool,
}

impl Config {
    /// Settings for a cluster whose longest round trip is `round_trip`.
    #[must_use]
    pub fn for_round_trip(round_trip: Duration) -> Self {
        Self {
            replication: replication::Config::with_election_timeout(round_trip * 4),
            checkpoint_bytes: 16 << 20,
            version_retention: Duration::from_secs(10),
            chunk_keys: 1_000,
            piece_bytes: Limits::SERVER.piece_bytes(),
            batch_bytes: Limits::SERVER.batch_bytes(),
            kept_bytes: Limits::SERVER.record_bytes,
            early_max: 1_024,
            skips_entries: false,
        }
    }

    /// Draws other settings, for swarms: guarantees must not depend on settings that suit the
    /// network.
    pub fn vary(&mut self, rng: &mut Rng) {
        self.version_retention = vary(self.version_retention, 1, 100, rng);
        let election_timeout = vary(self.replication.election_timeout, 75, 150, rng);
        self.checkpoint_bytes = size(10_000, 16 << 20, rng);
        self.chunk_keys = size(1, 1_000, rng);
        self.early_max = size(64, 1_024, rng);
        let mut replication = replication::Config::with_election_timeout(election_timeout);
        // Large enough that the log is not the bottleneck: a swarm's seed has no time to wait for
        // it.
        replication.max_batch_bytes = size(16 << 10, 256 << 10, rng);
        replication.max_inflight = size(8, 64, rng);
        replication.max_unchosen = size(256, 64 << 10, rng);
        replication.snapshot_window = size(1, 4, rng);
        replication.followers_act = self.replication.followers_act;
        // Drawn from a copy of the stream, so that later draws stay the same.
        replication.compared_entries = size(4, 1_024, &mut rng.clone()) as u64;
        self.replication = replication;
    }

    /// Sets these limits.
    pub fn limit(&mut self, limits: Limits) {
        self.piece_bytes = limits.piece_bytes();
        self.batch_bytes = limits.batch_bytes();
        self.kept_bytes = limits.record_bytes;
        self.replication.limit(limits);
    }
}

/// A number between `low` and `high`, each order of magnitude equally likely.
pub(crate) fn size(low: u64, high: u64, rng: &mut Rng) -> usize {
    let bits = rng.range(u64::from(low.ilog2()), u64::from(high.ilog2()));
    usize::try_from(rng.range(1 << bits, 2 << bits).clamp(low, high)).unwrap_or(1)
}

/// Between `low` and `high` per cent of `span`.
pub(crate) fn vary(span: Duration, low: u32, high: u32, rng: &mut Rng) -> Duration {
    let percent = rng.range(u64::from(low), u64::from(high));
    span * u32::try_from(percent).unwrap_or(high) / 100
}

/// Rare events of hosting.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Note {
    /// A replica installed a snapshot of its leader's state.
    SnapshotInstalled,
    /// A leader whose log accepts no commands dropped a request.
    Shed,
    /// A membership change was refused.
    ChangeRefused,
    /// A node made a checkpoint.
    Checkpoint,
}

/// The context of a machine that hosts partitions in the role `R`.
pub type Context<'a, R> = Cx<'a, <R as Role>::Protocol>;

/// The command that partitions in the role `R` replicate.
pub type CommandOf<R> = <<R as Role>::Log as Replicated>::Command;

/// The durable records of a node that hosts partitions in the role `R`.
pub type RecordOf<R> = Record<<R as Role>::Log, <R as Role>::State, <R as Role>::OwnRecord>;

/// What a protocol's partitions replicate, and how their leaders serve. The leader's own state
/// implements it: that state exists while a replica leads and has applied everything that earlier
/// leaders left.
pub trait Role: Debug + Sized + Send + 'static {
    /// The protocol.
    type Protocol: Protocol<
            Config = Self::Config,
            Msg = Self::Msg,
            Timer = Self::Timer,
            Record = RecordOf<Self>,
            Note = Self::Note,
        >;
    /// The log.
    type Log: Replicated<Chunk = Chunk<Self::State>, Cursor = Cursor>;
    /// The state that follows from the log, without its data.
    type State: Clone + Eq + Debug + Default + Send + Divisible;
    /// The state that a replica keeps outside of the log, leader or not; `()` if there is none.
    type Own: Debug + Default + Send;
    /// The durable records of that state; [`Infallible`] if there are none.
    type OwnRecord: Clone + Eq + Debug + Send;
    /// The protocol's settings.
    type Config: Debug + Send + Sync;
    /// Its messages.
    type Msg: Message;
    /// Its timers.
    type Timer: Copy;
    /// Its rare events.
    type Note: From<Note>;

    /// The settings of hosting among the protocol's own.
    fn hosting(config: &Self::Config) -> &Config;
    /// The last log entry that the state reflects.
    fn applied(state: &Self::State) -> Index;
    /// Called before an entry is applied.
    fn set_applied(state: &mut Self::State, index: Index);
    /// At or above the timestamp of every version that the state has put into the store; the end of
    /// time if the protocol does not say.
    fn floor(_state: &Self::State) -> Timestamp {
        Timestamp::MAX
    }
    /// Wraps a message of the partition's log.
    fn log_message(partition: PartitionId, message: replication::Message<Self::Log>) -> Self::Msg;
    /// Wraps a timer of the partition's log.
    fn log_timer(partition: PartitionId, timer: replication::Timer) -> Self::Timer;
    /// The message that the receiver does not lead `partition`, with the leader if it is known, and
    /// the transaction of the request.
    fn not_leader(partition: PartitionId, leader: Option<NodeId>, txn: Option<TxnId>) -> Self::Msg;
    /// The message that these nodes vote in `partition` since the entry `since` of its log.
    fn members(partition: PartitionId, since: Index, voters: Vec<NodeId>) -> Self::Msg;

    /// A message arrived at a node, possibly from itself: passes it to the node's handler for it.
    fn deliver(server: &mut Server<Self>, from: NodeId, msg: Self::Msg, cx: &mut Context<'_, Self>);
    /// A timer of a node expired: passes it to the node's handler for it.
    fn on_timer(server: &mut Server<Self>, timer: Self::Timer, cx: &mut Context<'_, Self>);
    /// Processes a message for this partition's leader.
    fn serve(
        leading: &mut Leading<'_, Self>,
        from: NodeId,
        msg: Self::Msg,
        world: &mut World<'_, Self>,
    );
    /// Applies a chosen command, and acts on the change.
    fn on_chosen(
        partition: &mut Partition<Self>,
        command: &<Self::Log as Replicated>::Command,
        world: &mut World<'_, Self>,
    );
    /// This replica leads, and everything that earlier leaders left has been applied.
    fn on_leading(partition: &mut Partition<Self>, world: &mut World<'_, Self>);
    /// This replica does not lead any more, and the leader's own state is dropped.
    fn on_deposed(partition: &mut Partition<Self>, world: &mut World<'_, Self>);
    /// The answer to a leadership check.
    fn on_read_index(
        leading: &mut Leading<'_, Self>,
        id: u64,
        is_leader: bool,
        world: &mut World<'_, Self>,
    );
    /// The replica that was asked about `txn` does not lead `other`. Sends this leader's open
    /// requests about `txn` to the new leader.
    fn on_not_leader(
        leading: &mut Leading<'_, Self>,
        other: PartitionId,
        txn: TxnId,
        world: &mut World<'_, Self>,
    );
    /// The part of a replica's state that goldens show besides its log, with a space before each
    /// word.
    fn describe(partition: &Partition<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result;
    /// Panics if the partition's state contradicts itself.
    fn assert_invariants(partition: &Partition<Self>);
    /// The leader's state that must disappear when nothing is pending, see `Machine::leaks`.
    fn leaks(&self, state: &Self::State) -> Vec<Leak>;

    // For protocols with scans ([`Protocol::SCANS`]), which must implement both.

    /// Names the keys that pending transactions may write, according to the replica's state besides
    /// its log: at least those of every transaction for which it has voted.
    fn pending_names(_partition: &Partition<Self>, _name: &mut dyn FnMut(&Key)) {}
    /// Names the keys that a command of the log may write when it is applied, or later.
    fn command_names(_command: &CommandOf<Self>, _name: &mut dyn FnMut(&Key)) {}

    /// Of a leader: every version of the partition up to this timestamp is in the store, and stays the
    /// last such version. None if this replica does not lead, or the protocol has no scans.
    fn closed(_partition: &Partition<Self>) -> Option<Timestamp> {
        None
    }

    // Optional hooks, for protocols whose replicas do something besides their log.

    /// Processes a message for the node itself, and not for one of its partitions.
    fn on_node_message(_from: NodeId, msg: Self::Msg, _cx: &mut Context<'_, Self>) {
        unreachable!("{} answers a client", msg.kind());
    }

    /// The state outside of the log that must disappear when nothing is pending, whoever leads.
    fn own_leaks(_own: &Self::Own) -> Vec<Leak> {
        Vec::new()
    }

    /// A replica starts, with all its surviving records, in order.
    fn on_opened(
        _partition: &mut Partition<Self>,
        _records: Vec<Self::OwnRecord>,
        _world: &mut World<'_, Self>,
    ) {
    }
    /// The replica's own records that a checkpoint must keep.
    fn own_records(_partition: &Partition<Self>) -> Vec<Self::OwnRecord> {
        Vec::new()
    }
    /// Everything persisted up to `_ticket` is durable.
    fn on_durable(_partition: &mut Partition<Self>, _ticket: Ticket, _world: &mut World<'_, Self>) {
    }
    /// A snapshot has replaced the state.
    fn on_installed(_partition: &mut Partition<Self>) {}
    /// Processes a message for this partition. Returns it if only a leader can answer it.
    fn on_message(
        _partition: &mut Partition<Self>,
        _from: NodeId,
        msg: Self::Msg,
        _world: &mut World<'_, Self>,
    ) -> Option<Self::Msg> {
        Some(msg)
    }
    /// This replica was elected, but has not applied everything that earlier leaders left yet. May
    /// be called more than once.
    fn on_elected(_partition: &mut Partition<Self>, _world: &mut World<'_, Self>) {}
    /// False while a new leader is still processing what earlier leaders left. Requests then wait
    /// until it calls [`Partition::serve_early`], and the members do not change.
    fn is_ready(_partition: &Partition<Self>) -> bool {
        true
    }
}
