//! The contract between a protocol and its host.
//!
//! A protocol is two state machines, [`Protocol::Client`] and [`Protocol::Server`]. A machine takes
//! one [`Input`] at a time. Its only connection to the outside is [`Cx`], which gives the time, the
//! node's clock and a random stream, and which takes messages, timers, durable records and answers
//! to clients. A machine never waits. If a message must follow a write, the machine keeps the
//! message and sends it when [`Input::Durable`] reports the write's ticket.

use std::fmt::{Debug, Display};
use std::sync::Arc;

pub use orthodrome_derive::{Kind, Message};

use crate::cluster::Cluster;
use crate::host::Timers;
use crate::id::{NodeId, PartitionId, Ticket, TxnId};
use crate::limits::Limits;
use crate::rng::Rng;
use crate::scan::{Ask, Listing};
use crate::store::{Memtable, StateEngine};
use crate::time::{Clock, Time};
use crate::txn::{Decision, Key, Outcome, Reads, Txn};
use crate::workers::Workers;

/// One transaction protocol: a zero-sized type that names the protocol's other types.
pub trait Protocol: Copy + Eq + Debug + Send + Sync + 'static {
    /// The protocol's names on the command line and in results: one, or one for each variant.
    /// Variants share all machines and messages and differ only in their settings, so that they are
    /// compiled once.
    const NAMES: &'static [&'static str];
    /// True if transactions queue for locks or for the outcomes of others. After a fault such
    /// queues drain serially, one transaction after the other. For such a protocol, tests bound the
    /// time between two transactions that end; for other protocols, they bound the time until the
    /// last one ends.
    const QUEUES: bool = false;
    /// True if the protocol runs general transactions ([`crate::txn::Kind::General`]), whose keys
    /// are not declared. Otherwise it refuses them as invalid.
    const GENERAL: bool = false;
    /// True if stale reads ([`crate::txn::Kind::StaleReadOnly`]) have a shorter path. Otherwise the
    /// protocol treats them like other read-only transactions.
    const STALE_READS: bool = false;
    /// True if every region has a complete copy of the data, whose shares the region's servers may
    /// divide ([`crate::Cluster::divided`]). Other protocols ignore shares.
    const SHARES: bool = false;
    /// True if servers drop a deletion at once, so that a client that knows the deleted value takes
    /// them for servers that are behind. The swarm deletes no keys with such a protocol. Only the
    /// example in `protocols/tests/adding` is one.
    const FORGETS_DELETIONS: bool = false;
    /// True if servers list names and changes ([`Machine::names`]), so that clients can scan and watch
    /// ranges of keys.
    const SCANS: bool = false;
    /// Enables the swarm's fault profile "priority races", for protocols that use priorities.
    const RANKS: bool = false;
    /// True if partitions have replicas. Otherwise each partition is on one server, which comes
    /// back after it fails.
    const REPLICATED: bool = true;
    /// Enables the swarm's fault profile "lagging replicas", for protocols that use the state of
    /// some replicas before all have it. Their bugs appear only while single replicas lag.
    const LAGS: bool = false;
    /// True if strict serializability needs clocks that keep their stated error bound; with faulty
    /// clocks, serializability remains. If false, faulty clocks weaken no guarantee.
    const NEEDS_CLOCKS: bool = true;
    /// The reason why the protocol needs links that deliver the messages between two nodes in order
    /// and once each. If none, messages may overtake each other and arrive twice, and the swarm
    /// tests that.
    const NEEDS_ORDERED_LINKS: Option<&'static str> = None;
    /// True if an operator may change the members of a partition's group
    /// ([`Admin::ChangeMembers`]). Otherwise the protocol refuses such orders.
    const MEMBERS: bool = false;
    /// True if other nodes end the transactions of a gateway that never comes back. Two-phase
    /// commit by a gateway cannot do that: prepared transactions wait for the gateway's decision.
    /// If false, the swarm restarts every gateway at the end.
    const OUTLIVES_GATEWAYS: bool = true;

    /// Settings shared by all machines of one keyspace.
    type Config: Clone + Eq + Debug + Send + Sync + 'static;
    /// Messages between machines.
    type Msg: Message;
    /// Names of timers. Setting a running timer again moves it.
    type Timer: Copy + Ord + Debug + Send + 'static;
    /// Durable records of a server.
    type Record: Clone + Eq + Debug + Send + 'static;
    /// Rare events to count. Tests report those that never happened.
    type Note: Copy + Ord + Debug + Send + 'static;
    /// Runs transactions for clients in one region.
    type Client: Machine<Self>;
    /// Plays every role of one server node.
    type Server: Machine<Self>;

    /// Servers that may lose their disks and be replaced by new ones with empty disks, while the
    /// cluster runs. A majority of each partition's replicas must not be among the lost ones.
    fn replaceable(_cluster: &Cluster) -> Vec<NodeId> {
        Vec::new()
    }

    /// Settings of the variant `name`, one of [`Protocol::NAMES`], for `cluster`: time-outs follow
    /// from its round-trip times.
    fn configure(cluster: &Cluster, name: &str) -> Self::Config;

    /// The name of the variant with these settings.
    fn name(config: &Self::Config) -> &'static str;

    /// The names of the mutations of the variant `name`. A mutation is a test-only switch that
    /// enables an unsafe behaviour, which the simulator must catch (`reliability` F11).
    fn mutations(name: &str) -> &'static [&'static str];

    /// Enables `mutation`, one of [`Protocol::mutations`]. Only tests call this.
    fn enable_mutation(config: &mut Self::Config, mutation: &str);

    /// True if a replica of the variant `name` makes promises on the strength of a record of its
    /// own, before the log has them. The swarm then also uses the fault profile "power cuts":
    /// several replicas lose power while their leader is cut off.
    fn promises_alone(_name: &str) -> bool {
        false
    }

    /// Draws other settings, any that an operator may choose. A protocol's guarantees must not
    /// depend on time-outs that suit the network, or on buffers that are never full. The swarm
    /// calls this for some of its seeds. The default changes nothing.
    fn vary(_config: &mut Self::Config, _rng: &mut Rng) {}

    /// Size of an encoded record in bytes, within a tenth of the codec's result.
    fn record_size(record: &Self::Record) -> usize;

    /// Sets the limits for records and messages that hold several transactions. Returns false, and
    /// changes nothing, if the protocol always uses [`Limits::SERVER`].
    fn limit(_config: &mut Self::Config, _limits: Limits) -> bool {
        false
    }
}

/// The properties of a message that transports, models and traces need without knowing the
/// protocol.
pub trait Message: Clone + Eq + Debug + Send + 'static {
    /// The name of the message, as in its paper.
    fn kind(&self) -> &'static str;
    /// The transaction that it belongs to, if it belongs to one.
    fn txn(&self) -> Option<TxnId>;
    /// Its encoded size in bytes, within a tenth of the codec's result.
    fn wire_size(&self) -> usize;
    /// The number of keys that the receiver processes: an input of the CPU-time model.
    fn keys(&self) -> usize;
    /// The number of keys that a receiver processes that holds only some of the data. `holds` is
    /// true for a key of which the receiver has a replica.
    fn keys_held(&self, _holds: &dyn Fn(&Key) -> bool) -> usize {
        self.keys()
    }
    /// The lane of the link that it uses.
    fn lane(&self) -> Lane {
        Lane::Data
    }
}

/// A lane of a link between two nodes. Messages of one lane keep their order; messages of different
/// lanes may overtake each other.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Lane {
    /// Goes first: short messages that are needed for any progress, such as leases and watermarks.
    /// On a slow link they must not wait for data.
    Control,
    /// All other messages.
    #[default]
    Data,
}

/// The arguments with which a machine starts.
#[derive(Debug)]
pub struct Setup<P: Protocol> {
    /// The machine's own node.
    pub node: NodeId,
    /// The cluster: its nodes, topology and placement.
    pub cluster: Arc<Cluster>,
    /// The protocol's settings.
    pub config: Arc<P::Config>,
    /// The durable versions of earlier checkpoints; empty for a client.
    pub engine: Box<dyn StateEngine>,
    /// Runs independent parts of a step in parallel.
    pub workers: Arc<dyn Workers>,
    /// The node's disk was lost, and this one was empty when the node first started from it. True at
    /// every start from this disk ([`Protocol::replaceable`]).
    pub is_replacement: bool,
}

/// A protocol's client side or server side. `Display` is its one-line state, shown in golden
/// traces.
pub trait Machine<P: Protocol>: Debug + Display + Send + Sized + 'static {
    /// Starts the machine, for the first time or after a crash. `recovered` has the records of the
    /// last durable checkpoint and every durable record after it, in the order in which they were
    /// persisted. It may also have a prefix of the records that were never reported durable.
    fn new(setup: Setup<P>, recovered: Vec<P::Record>, cx: &mut Cx<'_, P>) -> Self;

    /// Processes one input.
    fn step(&mut self, input: Input<P>, cx: &mut Cx<'_, P>);

    /// Called when no further input is ready. The machine can now send messages that combine
    /// several inputs. Hosts call it at least once after every input, before time advances.
    fn flush(&mut self, cx: &mut Cx<'_, P>);

    /// Panics if the state contradicts itself. Tests and simulations call it after every step.
    fn assert_invariants(&self);

    /// State that must disappear some time after every transaction has ended and every fault has
    /// healed, with its amount: locks, prepared transactions, waiting requests, outcomes that
    /// nobody can ask for any more. Simulations wait until all amounts are zero, and fail if that
    /// never happens.
    fn leaks(&self) -> Vec<Leak> {
        Vec::new()
    }

    /// Quantities for operators to watch.
    fn gauges(&self, _now: Time) -> Vec<Gauge> {
        Vec::new()
    }

    /// Orders to change members that this machine has received since it started: the latest of each
    /// partition, oldest first.
    fn orders(&self) -> Vec<MembershipOrder> {
        Vec::new()
    }

    /// Why a server would refuse this order now; none if it would accept it. The service asks
    /// before it passes the order on as an input. So no operator is told that a server accepted an
    /// order which it then ignores.
    fn refusal(&self, _order: &Admin) -> Option<Refusal> {
        Some(Refusal::Never("this protocol takes no orders of operators".into()))
    }

    /// The groups about which a server knows more than the placement says.
    fn groups(&self, _now: Time) -> Vec<GroupView> {
        Vec::new()
    }

    /// The names that this server has in a unit of the data, for a scan ([`crate::scan`]), or the
    /// changes there, for a watch ([`crate::watch`]); none if it does not hold the unit, or cannot list
    /// it now. Every protocol with [`Protocol::SCANS`] implements both.
    fn names(&self, _ask: &Ask) -> Option<Listing> {
        None
    }

    /// Digests of the replicated states on this machine. Simulations compare them once all leaks
    /// are gone.
    fn replica_digests(&self) -> Vec<ReplicaDigest> {
        Vec::new()
    }
}

/// A mutation of every protocol that may show old values: clients forget what they have seen
/// ([`crate::session`]). The mutation is in the clients, so the code that drives clients enables
/// it, together with [`Protocol::enable_mutation`].
pub const NO_SESSIONS: &str = "R11";

/// The path of an unknown outcome that stays unknown: no node can ever find it out, and every later
/// request gets the same answer.
pub const UNKNOWABLE: &str = "unknowable";

/// The path of a transaction that is refused because its session knows a timestamp that no clock of the
/// cluster shows yet: no commit can have it.
pub const FAR_FUTURE: &str = "far-future";

/// A quantity for operators to watch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Gauge {
    /// Its name, with the unit at the end.
    pub name: &'static str,
    /// The node that it describes.
    pub node: NodeId,
    /// Its value.
    pub value: i64,
}

/// The name of something that a machine still holds, and its amount.
pub type Leak = (&'static str, usize);

/// The digest of one replica's state. Replicas at the same position have equal digests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReplicaDigest {
    /// The partition.
    pub partition: PartitionId,
    /// The position in the group's history that the state reflects.
    pub position: u64,
    /// A hash of the state, see [`crate::digest`].
    pub digest: u64,
    /// The number of nodes that keep the state at this position, if that number changes. A node
    /// that has left keeps an old state.
    pub members: Option<usize>,
}

/// A statement about the whole cluster on which a machine acts. Simulations compare all claims of a
/// run with each other and with the outcomes that clients received. Servers drop claims.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Claim {
    /// This node leads the partition's group in this term, and no other node ever does.
    Leads {
        /// The partition.
        partition: PartitionId,
        /// The term.
        term: u64,
    },
    /// This entry of the log of the partition's group is chosen, and no other entry ever is at its
    /// index.
    Chosen {
        /// The partition.
        partition: PartitionId,
        /// The entry's index.
        index: u64,
        /// The term in which it was appended. Term and index together name the entry.
        term: u64,
    },
    /// The outcome of this attempt is decided. No other outcome is ever decided for it, and no
    /// client ever receives another one.
    Decided {
        /// The attempt.
        txn: TxnId,
        /// Its outcome.
        outcome: Outcome,
    },
}

/// Orders of an operator.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Admin {
    /// Transfer leadership of a partition's group to another of its voters.
    TransferLeader {
        /// The partition.
        partition: PartitionId,
        /// The new leader.
        to: NodeId,
    },
    /// Replace the voters and learners of a partition's group.
    ChangeMembers {
        /// The partition.
        partition: PartitionId,
        /// The new voters.
        voters: Vec<NodeId>,
        /// The new members that receive entries but do not vote.
        learners: Vec<NodeId>,
    },
}

impl Admin {
    /// The partition of the order.
    #[must_use]
    pub fn partition(&self) -> PartitionId {
        match self {
            Self::TransferLeader { partition, .. } | Self::ChangeMembers { partition, .. } => {
                *partition
            }
        }
    }
}

/// Why a server refuses an operator's order. A refused order has no effect.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// The server does not lead the partition's group. It names the leader, if it knows.
    NotLeader(Option<NodeId>),
    /// The server leads, but cannot carry the order out now. The text says why and what to do.
    NotNow(String),
    /// The order contradicts the cluster's settings. The text says why.
    Invalid(String),
    /// The protocol has no such orders. The text says why and what to do instead.
    Never(String),
}

/// What a server knows about the group of one partition. The members may differ from the placement.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GroupView {
    /// The partition.
    pub partition: PartitionId,
    /// The voters; during a change, the new ones.
    pub voters: Vec<NodeId>,
    /// The members that receive entries but do not vote, as far as the server knows.
    pub learners: Vec<NodeId>,
    /// The leader, if the server knows it.
    pub leader: Option<NodeId>,
    /// False if the groups of this protocol have no leaders, so that none is missing.
    pub has_leaders: bool,
    /// If this server leads: the voter to which it should transfer leadership before it stops.
    pub successor: Option<NodeId>,
    /// If this server leads: for each other member, the number of entries of the log that it has
    /// not made durable yet, as far as this server knows. Otherwise empty.
    pub behind: Vec<(NodeId, u64)>,
}

/// An order to change the members of a partition's group, and its progress.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MembershipOrder {
    /// The partition.
    pub partition: PartitionId,
    /// The new voters.
    pub voters: Vec<NodeId>,
    /// The new members that receive entries but do not vote.
    pub learners: Vec<NodeId>,
    /// When the order was given.
    pub given: Time,
    /// Its progress.
    pub state: OrderState,
}

/// The progress of an order to change members.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum OrderState {
    /// The leader is carrying it out. The text says what it waits for.
    Pending(String),
    /// It was carried out. A later order may have changed the members again.
    Finished,
    /// It failed, and will not be carried out. The text says why and what to do.
    Failed(String),
    /// The node that received it does not lead the group. It names the leader, if it knows. The
    /// order had no effect.
    NotLeader(Option<NodeId>),
}

impl OrderState {
    /// Its name in machine-readable output.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Pending(_) => "pending",
            Self::Finished => "finished",
            Self::Failed(_) | Self::NotLeader(_) => "failed",
        }
    }

    /// The details besides the name; empty if there are none.
    #[must_use]
    pub fn detail(&self) -> String {
        match self {
            Self::Pending(what) | Self::Failed(what) => what.clone(),
            Self::Finished => String::new(),
            Self::NotLeader(Some(leader)) => {
                format!("this node does not lead the partition; give the order to {leader}")
            }
            Self::NotLeader(None) => {
                "this node does not lead the partition and does not know who does; ask again, or \
                 give the order to another server"
                    .into()
            }
        }
    }
}

/// An input of a machine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Input<P: Protocol> {
    /// For a client machine: run this transaction.
    Begin(Txn),
    /// For a client machine: the next round of reads of a general transaction that it began and
    /// that waits for its client. Keys that it has already read keep their values. Ignored if the
    /// transaction has ended, or a round is pending.
    Read {
        /// The transaction.
        txn: TxnId,
        /// The keys to read.
        keys: Vec<Key>,
    },
    /// For a client machine: the decision on an interactive or general transaction that it began
    /// and that waits for its client. Ignored if the transaction has ended.
    Decide {
        /// The transaction.
        txn: TxnId,
        /// The client's decision.
        decision: Decision,
    },
    /// For a client machine: find out the outcome of a transaction that began here or at another
    /// gateway, and end it if it is still pending. `decision` is set if the client had decided;
    /// `reads` has the versions on which that decision was based.
    Resolve {
        /// The transaction as it was submitted.
        txn: Txn,
        /// The values that its reads returned, in all rounds, as far as the client received them.
        reads: Reads,
        /// The client's decision, if it had decided.
        decision: Option<Decision>,
    },
    /// A message arrived.
    Message {
        /// Its sender.
        from: NodeId,
        /// The message.
        msg: P::Msg,
    },
    /// A timer that the machine set has expired.
    Timer(P::Timer),
    /// Everything persisted up to and including this ticket is durable.
    Durable(Ticket),
    /// For a server machine: an operator's order.
    Admin(Admin),
}

/// An effect that a machine requests. Effects are carried out in the order of the requests.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Effect<P: Protocol> {
    /// Send a message. It may be lost or delayed. It may arrive twice or after a later one, unless
    /// the protocol says that it needs ordered links ([`Protocol::NEEDS_ORDERED_LINKS`]).
    Send {
        /// The receiver.
        to: NodeId,
        /// The message.
        msg: P::Msg,
    },
    /// Make a record durable, after all records before it.
    Persist {
        /// The ticket that is reported when the record is durable.
        ticket: Ticket,
        /// The record.
        record: P::Record,
    },
    /// Make `versions` durable in the state engine, and then replace all earlier records by
    /// `records`. Checkpoints bound the restart time and the size of the log.
    Checkpoint {
        /// The ticket that is reported when the checkpoint is durable.
        ticket: Ticket,
        /// The versions to merge into the state engine first.
        versions: Arc<Memtable>,
        /// The records that replace all earlier ones.
        records: Vec<P::Record>,
    },
    /// For the client: the values that the transaction read. At most once per attempt; in a general
    /// transaction once for each round, with the keys of that round.
    Reads {
        /// The transaction.
        txn: TxnId,
        /// The values.
        reads: Reads,
    },
    /// For the client: the outcome of the transaction, once per attempt. If a read-only transaction
    /// or a procedure commits, `Reads` comes first, unless the transaction was resolved later and
    /// its reads are no longer known.
    Finish {
        /// The transaction.
        txn: TxnId,
        /// Its outcome.
        outcome: Outcome,
        /// The protocol's path that it took: `fast`, `slow`, `read-only`, …
        path: &'static str,
    },
    /// A rare event happened.
    Note(P::Note),
    /// A claim that no other machine may contradict.
    Claim(Claim),
}

/// The handler context: a machine's only way to read a clock, to send and to write.
#[derive(Debug)]
pub struct Cx<'a, P: Protocol> {
    pub(crate) now: Time,
    pub(crate) clock: Clock,
    pub(crate) rng: &'a mut Rng,
    pub(crate) timers: &'a mut Timers<P::Timer>,
    pub(crate) effects: &'a mut Vec<Effect<P>>,
    pub(crate) last_ticket: &'a mut Ticket,
}

impl<P: Protocol> Cx<'_, P> {
    /// The same context with a shorter lifetime.
    pub fn reborrow(&mut self) -> Cx<'_, P> {
        let Self { now, clock, rng, timers, effects, last_ticket } = self;
        Cx { now: *now, clock: *clock, rng, timers, effects, last_ticket }
    }

    /// Monotonic time, for timers and measurements.
    #[must_use]
    pub fn now(&self) -> Time {
        self.now
    }

    /// This node's physical clock, for protocol timestamps.
    #[must_use]
    pub fn clock(&self) -> Clock {
        self.clock
    }

    /// This machine's own random stream.
    pub fn rng(&mut self) -> &mut Rng {
        self.rng
    }

    /// Sends `msg` to `to`.
    pub fn send(&mut self, to: NodeId, msg: P::Msg) {
        self.effects.push(Effect::Send { to, msg });
    }

    /// Sets `timer` to expire at `at`. A running timer moves there.
    pub fn set_timer(&mut self, timer: P::Timer, at: Time) {
        self.timers.set(timer, at);
    }

    /// Stops `timer`, if it runs.
    pub fn cancel_timer(&mut self, timer: P::Timer) {
        self.timers.cancel(timer);
    }

    /// Persists `record` after all earlier ones. The ticket is reported when the record is durable.
    pub fn persist(&mut self, record: P::Record) -> Ticket {
        let ticket = self.next_ticket();
        self.effects.push(Effect::Persist { ticket, record });
        ticket
    }

    /// Replaces all earlier records by `records`, once `versions` are in the state engine. At most
    /// one checkpoint may be pending.
    pub fn checkpoint(&mut self, versions: Arc<Memtable>, records: Vec<P::Record>) -> Ticket {
        let ticket = self.next_ticket();
        self.effects.push(Effect::Checkpoint { ticket, versions, records });
        ticket
    }

    /// Sends the client of `txn` the values read.
    pub fn reads(&mut self, txn: TxnId, reads: Reads) {
        self.effects.push(Effect::Reads { txn, reads });
    }

    /// Sends the client of `txn` its outcome.
    pub fn finish(&mut self, txn: TxnId, outcome: Outcome, path: &'static str) {
        self.effects.push(Effect::Finish { txn, outcome, path });
    }

    /// Counts a rare event.
    pub fn note(&mut self, note: P::Note) {
        self.effects.push(Effect::Note(note));
    }

    /// Makes a claim, at the moment when this machine acts on it.
    pub fn claim(&mut self, claim: Claim) {
        self.effects.push(Effect::Claim(claim));
    }

    fn next_ticket(&mut self) -> Ticket {
        self.last_ticket.0 += 1;
        *self.last_ticket
    }
}
