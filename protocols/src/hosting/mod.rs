//! What one server node does for the replicas of partitions that it holds, whatever the protocol:
//! one store, one stream of durable records, checkpoints, snapshots, and the way in and out of each
//! replicated log. A protocol gives its [`Role`]: what a partition's leader does.

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
use orthodrome_core::time::Duration;
use orthodrome_core::txn::Key;

pub use self::leading::Leading;
pub use self::partition::{Partition, change_refusal, group_view, transfer_refusal};
pub use self::server::Server;
pub use self::world::World;
use crate::replication::{self, Index, Replicated};

/// A piece of a partition's state, for a replica that fell too far behind.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Chunk<S> {
    /// In the first piece, and in as many more as it takes: everything but the data, or a part of that.
    pub state: Option<Box<S>>,
    /// Keys with their versions; a key with many of them is in several pieces.
    #[wire(check = "check_versions", sample = "sample_versions")]
    pub keys: Vec<(Key, Versions)>,
}

/// Where a piece of a partition's state begins.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Cursor {
    /// The next part of everything but the data.
    State,
    /// In the data.
    Data(Start),
}

/// A state that may be larger than one record or one message.
pub trait Divisible: Sized {
    /// The same in parts, at least one, each of at most so many bytes unless one transaction alone has more.
    fn divide(self, bytes_max: usize) -> Vec<Self>;
    /// Adds another part of the same state.
    fn join(&mut self, part: Self);
}

/// What a server remembers of one partition. `O` is what the protocol's replicas remember beside the
/// log; most have nothing of the kind.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
#[wire(bound = "S: Wire, O: Wire")]
pub enum Record<R: Replicated, S, O = Infallible> {
    /// A partition's state at a checkpoint, or one of the parts of it that follow each other; the data is in the
    /// state engine.
    State(PartitionId, Box<S>),
    /// A record of a partition's log.
    Replication(PartitionId, replication::Record<R>),
    /// What this replica did on its own.
    Own(PartitionId, Box<O>),
}

/// Settings of hosting.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// The replicated log's own settings.
    pub replication: replication::Config,
    /// A node makes a checkpoint after this many bytes of records, or after as many as its last
    /// checkpoint took if those are more.
    pub checkpoint_bytes: usize,
    /// Versions that are not the newest of their key are kept for this long.
    pub version_retention: Duration,
    /// Keys per piece of a snapshot.
    pub chunk_keys: usize,
    /// Bytes per piece of a snapshot, and per record of a state at a checkpoint.
    pub piece_bytes: usize,
    /// Bytes per message that lists several transactions.
    pub batch_bytes: usize,
    /// Bytes of log entries kept for followers that are behind, before they need a snapshot.
    pub kept_bytes: usize,
    /// Messages that a leader holds back until it is ready to serve, and commands that it queues
    /// while its log takes none.
    pub early_max: usize,
    /// Tests only: the first server does not apply some of the entries that it does not lead.
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

    /// Draws other settings, for swarms; what is promised must not rest on those that suit.
    pub fn vary(&mut self, rng: &mut Rng) {
        self.version_retention = vary(self.version_retention, 1, 100, rng);
        let election_timeout = vary(self.replication.election_timeout, 75, 150, rng);
        self.checkpoint_bytes = size(10_000, 16 << 20, rng);
        self.chunk_keys = size(1, 1_000, rng);
        self.early_max = size(64, 1_024, rng);
        let mut replication = replication::Config::with_election_timeout(election_timeout);
        // Above what would make the log the bottleneck: a swarm's seed has no time to wait for it.
        replication.max_batch_bytes = size(16 << 10, 256 << 10, rng);
        replication.max_inflight = size(8, 64, rng);
        replication.max_unchosen = size(256, 64 << 10, rng);
        replication.snapshot_window = size(1, 4, rng);
        replication.followers_act = self.replication.followers_act;
        // Apart from the stream, so that what is drawn after it stays the same.
        replication.compared_entries = size(4, 1_024, &mut rng.clone()) as u64;
        self.replication = replication;
    }

    /// Keeps these limits.
    pub fn limit(&mut self, limits: Limits) {
        self.piece_bytes = limits.piece_bytes();
        self.batch_bytes = limits.batch_bytes();
        self.kept_bytes = limits.record_bytes;
        self.replication.limit(limits);
    }
}

/// Between `low` and `high`, each order of magnitude as likely as the next.
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
    /// A replica took a snapshot of the state from its leader.
    SnapshotInstalled,
    /// A leader whose log takes no commands dropped a request.
    Shed,
    /// A membership change was refused.
    ChangeRefused,
    /// A node made a checkpoint.
    Checkpoint,
}

/// The context of a machine that hosts partitions in the role `R`.
pub type Context<'a, R> = Cx<'a, <R as Role>::Protocol>;

/// What partitions in the role `R` replicate.
pub type CommandOf<R> = <<R as Role>::Log as Replicated>::Command;

/// What a node that hosts partitions in the role `R` remembers.
pub type RecordOf<R> = Record<<R as Role>::Log, <R as Role>::State, <R as Role>::OwnRecord>;

/// What a protocol's partitions replicate and how their leaders serve. Implemented by what only a
/// leader knows: it exists while a replica leads and has applied all that earlier leaders left.
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
    /// The state that the log gives, data apart.
    type State: Clone + Eq + Debug + Default + Send + Divisible;
    /// What a replica keeps beside that, leading or not; `()` if nothing.
    type Own: Debug + Default + Send;
    /// What it persists of that; [`Infallible`] if nothing.
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
    /// An entry is about to be applied.
    fn set_applied(state: &mut Self::State, index: Index);
    /// A message of the partition's log, as a message of the protocol.
    fn log_message(partition: PartitionId, message: replication::Message<Self::Log>) -> Self::Msg;
    /// A timer of the partition's log, as a timer of the protocol.
    fn log_timer(partition: PartitionId, timer: replication::Timer) -> Self::Timer;
    /// The receiver does not lead `partition`; who does, if it knows, and which transaction it was asked about.
    fn not_leader(partition: PartitionId, leader: Option<NodeId>, txn: Option<TxnId>) -> Self::Msg;
    /// These vote in `partition` since the entry `since` of its log.
    fn members(partition: PartitionId, since: Index, voters: Vec<NodeId>) -> Self::Msg;

    /// A message came to a node, or went from it to itself: hands it to one of the node's doors.
    fn deliver(server: &mut Server<Self>, from: NodeId, msg: Self::Msg, cx: &mut Context<'_, Self>);
    /// A timer of a node expired: likewise.
    fn on_timer(server: &mut Server<Self>, timer: Self::Timer, cx: &mut Context<'_, Self>);
    /// A message for this partition's leader.
    fn serve(
        leading: &mut Leading<'_, Self>,
        from: NodeId,
        msg: Self::Msg,
        world: &mut World<'_, Self>,
    );
    /// A command is chosen: apply it, and do what follows.
    fn on_chosen(
        partition: &mut Partition<Self>,
        command: &<Self::Log as Replicated>::Command,
        world: &mut World<'_, Self>,
    );
    /// This replica leads, and everything that earlier leaders left has been applied.
    fn on_leading(partition: &mut Partition<Self>, world: &mut World<'_, Self>);
    /// This replica no longer leads; what its leader knew is gone.
    fn on_deposed(partition: &mut Partition<Self>, world: &mut World<'_, Self>);
    /// A leadership check that was asked for has been answered.
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
    /// What goldens show of a replica beside its log, a space before each word.
    fn describe(partition: &Partition<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result;
    /// Panics if the partition's state contradicts itself.
    fn assert_invariants(partition: &Partition<Self>);
    /// What its leader holds that must be gone after quiet, see `Machine::leaks`.
    fn leaks(&self, state: &Self::State) -> Vec<Leak>;

    // For protocols whose replicas do something beside their log.

    /// What a replica keeps beside the state that must be gone after quiet, whoever leads.
    fn own_leaks(_own: &Self::Own) -> Vec<Leak> {
        Vec::new()
    }

    /// A replica starts, with all that survived of its own records, in order.
    fn on_opened(
        _partition: &mut Partition<Self>,
        _records: Vec<Self::OwnRecord>,
        _world: &mut World<'_, Self>,
    ) {
    }
    /// What a checkpoint must keep of the replica's own records.
    fn own_records(_partition: &Partition<Self>) -> Vec<Self::OwnRecord> {
        Vec::new()
    }
    /// Everything persisted up to `_ticket` is durable.
    fn on_durable(_partition: &mut Partition<Self>, _ticket: Ticket, _world: &mut World<'_, Self>) {
    }
    /// A snapshot has replaced the state.
    fn on_installed(_partition: &mut Partition<Self>) {}
    /// A message for this partition. Gives back what only a leader can answer.
    fn on_message(
        _partition: &mut Partition<Self>,
        _from: NodeId,
        msg: Self::Msg,
        _world: &mut World<'_, Self>,
    ) -> Option<Self::Msg> {
        Some(msg)
    }
    /// This replica was elected, and what earlier leaders left has yet to be applied. Told more than
    /// once.
    fn on_elected(_partition: &mut Partition<Self>, _world: &mut World<'_, Self>) {}
    /// False while a new leader is still busy with what it found: requests wait until it calls
    /// [`Partition::serve_early`], and the members stay as they are.
    fn is_ready(_partition: &Partition<Self>) -> bool {
        true
    }
}
