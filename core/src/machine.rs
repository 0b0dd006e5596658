//! The contract between a protocol and whatever runs it.
//!
//! A protocol is two state machines, [`Protocol::Client`] and [`Protocol::Server`]. A machine takes
//! one [`Input`] at a time and answers through [`Cx`], its only door to the world: the time, its
//! clock, its random stream, messages, timers, durable records and answers to its caller. It never
//! waits: what must follow a write is held by the machine and sent when the write's ticket is
//! reported [`Input::Durable`].

use std::fmt::{Debug, Display};
use std::sync::Arc;

use crate::cluster::Cluster;
use crate::host::Timers;
use crate::id::{NodeId, PartitionId, Ticket, TxnId};
use crate::limits::Limits;
use crate::rng::Rng;
use crate::store::{Memtable, StateEngine};
use crate::time::{Clock, Time};
use crate::txn::{Decision, Key, Outcome, Reads, Txn};
use crate::workers::Workers;

/// A zero-sized name for a family of types: one transaction protocol.
pub trait Protocol: Copy + Eq + Debug + Send + Sync + 'static {
    /// The names under which it goes on the command line and in results: one, or one for each variant.
    /// Variants share every machine and message and differ by their settings, so that all of them are
    /// compiled once.
    const NAMES: &'static [&'static str];
    /// Transactions wait in line for locks, or for what others come to, so that what piled up while a fault lasted ends one by one
    /// after it. Tests then bound the time from one end to the next; of other protocols, the time
    /// until the last.
    const QUEUES: bool = false;
    /// Runs general transactions ([`crate::txn::Kind::General`]), whose keys are not declared. One
    /// that does not refuses them as invalid.
    const GENERAL: bool = false;
    /// It has a shorter way for reads of old states ([`crate::txn::Kind::StaleReadOnly`]). One that does not
    /// treats them as any read-only transaction.
    const STALE_READS: bool = false;
    /// Every region has a copy of everything, and its servers may hold shares of that
    /// ([`crate::Cluster::divided`]). Others do not look at shares.
    const SHARES: bool = false;
    /// What it does with priorities needs coincidences of its own to go wrong: a swarm then draws seeds
    /// that are mostly about those.
    const RANKS: bool = false;
    /// Partitions have replicas. Those of a protocol that has none are placed on one server each, and that comes
    /// back after it has failed.
    const REPLICATED: bool = true;
    /// What some replicas hold is used before the last one has it, so that mistakes show only where
    /// single replicas lag: a swarm then draws seeds that are mostly about those.
    const LAGS: bool = false;
    /// Strict serializability needs clocks that keep their stated error bound; without them
    /// serializability remains. If false, faulty clocks lower no promise.
    const NEEDS_CLOCKS: bool = true;
    /// Why the protocol needs links that deliver the messages of one node to another in order and
    /// once each. If none, messages may overtake each other and arrive twice, and a swarm draws that.
    const NEEDS_ORDERED_LINKS: Option<&'static str> = None;
    /// An operator may change the members of a partition's group ([`Admin::ChangeMembers`]). One that does
    /// not refuses such orders.
    const MEMBERS: bool = false;
    /// Other nodes end the transactions of a gateway that never comes back. Two-phase commit cannot: what is
    /// prepared waits for the gateway that decides. A swarm then lets every gateway come back at the end.
    const OUTLIVES_GATEWAYS: bool = true;

    /// Settings shared by all machines of one keyspace.
    type Config: Clone + Eq + Debug + Send + Sync + 'static;
    /// What machines say to each other.
    type Msg: Message;
    /// Names of timers; setting one again moves it.
    type Timer: Copy + Ord + Debug + Send + 'static;
    /// What a server must remember.
    type Record: Clone + Eq + Debug + Send + 'static;
    /// Rare events worth counting; tests report those that never happened.
    type Note: Copy + Ord + Debug + Send + 'static;
    /// Begins transactions for callers in one region.
    type Client: Machine<Self>;
    /// Every role that one server node plays.
    type Server: Machine<Self>;

    /// Servers that may be lost with their disks, for new ones with empty disks to take their places
    /// while everything runs, as long as a majority of each partition's replicas is not among them.
    fn replaceable(_cluster: &Cluster) -> Vec<NodeId> {
        Vec::new()
    }

    /// Settings of the variant `name`, one of [`Protocol::NAMES`], that suit `cluster`: time-outs follow
    /// from its round-trip times.
    fn configure(cluster: &Cluster, name: &str) -> Self::Config;

    /// The variant that has these settings.
    fn name(config: &Self::Config) -> &'static str;

    /// Names of the unsafe variants of `name` that exist as test-only switches: behaviours of the paper
    /// (or mistakes of implementers) that the simulator must catch (`reliability` F11).
    fn mutations(name: &str) -> &'static [&'static str];

    /// Switches on the unsafe variant `mutation`, one of [`Protocol::mutations`]. Tests only: nothing
    /// that serves users calls this.
    fn enable_mutation(config: &mut Self::Config, mutation: &str);

    /// Promises of `name` that a replica gives before a log has them, by a record of its own: a swarm
    /// then draws seeds in which several replicas lose power while their leader is cut off.
    fn promises_alone(_name: &str) -> bool {
        false
    }

    /// Draws other settings, any that an operator may choose: what a protocol promises must not
    /// rest on time-outs that suit the network, nor on buffers that are never full. A swarm calls
    /// this for some of its seeds; without an implementation settings stay as they are.
    fn vary(_config: &mut Self::Config, _rng: &mut Rng) {}

    /// Encoded bytes of a record; within a tenth of what the server's codec produces.
    fn record_size(record: &Self::Record) -> usize;

    /// Makes machines keep these limits in whatever holds several transactions. False: they keep
    /// [`Limits::SERVER`] and cannot be told to keep others, and nothing was changed.
    fn limit(_config: &mut Self::Config, _limits: Limits) -> bool {
        false
    }
}

/// What transports, models and traces need to know of a message without knowing the protocol.
pub trait Message: Clone + Eq + Debug + Send + 'static {
    /// The name of the message, as in its paper.
    fn kind(&self) -> &'static str;
    /// The transaction it is about, if it is about one.
    fn txn(&self) -> Option<TxnId>;
    /// Its encoded size in bytes; within a tenth of what the server's codec produces.
    fn wire_size(&self) -> usize;
    /// How many keys the receiver has to look at: an input of the CPU-time model.
    fn keys(&self) -> usize;
    /// The lane of the link that it takes.
    fn lane(&self) -> Lane {
        Lane::Data
    }
}

/// A lane of a link between two nodes. Each keeps the order of its messages; there is none between them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Lane {
    /// Goes first: short messages on which depends whether anything goes on at all, such as leases and
    /// watermarks. On a slow link they must not wait for data.
    Control,
    /// Everything else.
    #[default]
    Data,
}

/// What a machine is told when it starts.
#[derive(Debug)]
pub struct Setup<P: Protocol> {
    /// Its own address.
    pub node: NodeId,
    /// The map.
    pub cluster: Arc<Cluster>,
    /// The protocol's settings.
    pub config: Arc<P::Config>,
    /// Where versions live that earlier checkpoints made durable; empty for a client.
    pub engine: Box<dyn StateEngine>,
    /// Who does pieces of its work at once.
    pub workers: Arc<dyn Workers>,
}

/// A protocol's client side or server side. `Display` is its one-line state, shown in goldens.
pub trait Machine<P: Protocol>: Debug + Display + Send + Sized + 'static {
    /// Starts, or starts again after a crash: `recovered` holds the records of the last durable
    /// checkpoint and every durable record after it, in the order they were persisted, and perhaps
    /// a prefix of those that were never reported durable.
    fn new(setup: Setup<P>, recovered: Vec<P::Record>, cx: &mut Cx<'_, P>) -> Self;

    /// Takes one input.
    fn step(&mut self, input: Input<P>, cx: &mut Cx<'_, P>);

    /// Called when no further input is ready: the place to send what several inputs can share.
    /// Hosts call it at least once after every input, before time moves on.
    fn flush(&mut self, cx: &mut Cx<'_, P>);

    /// Panics if the state contradicts itself. Called after every step in tests and simulations.
    fn assert_invariants(&self);

    /// What is held here that must be gone some time after every transaction has ended and every
    /// fault has healed, and how much of it: locks, prepared transactions, waiters, outcomes that
    /// nobody can ask about any more. Simulations wait until everything is zero, and fail if it
    /// never is.
    fn leaks(&self) -> Vec<Leak> {
        Vec::new()
    }

    /// What an operator may want to watch, as of now.
    fn gauges(&self, _now: Time) -> Vec<Gauge> {
        Vec::new()
    }

    /// Orders to change members that were given to this machine since it started, the latest of each
    /// partition, oldest first.
    fn orders(&self) -> Vec<MembershipOrder> {
        Vec::new()
    }

    /// Why a server would not take this order now; none if it would. Whoever talks to operators asks
    /// before the order becomes an input, so that nobody is told that a server has taken an order
    /// which it ignores.
    fn refusal(&self, _order: &Admin) -> Option<Refusal> {
        Some(Refusal::Never("this protocol takes no orders of operators".into()))
    }

    /// The groups that a server knows something of that the placement does not say.
    fn groups(&self, _now: Time) -> Vec<GroupView> {
        Vec::new()
    }

    /// The copies of replicated state that this machine holds. Simulations compare them once
    /// nothing is left over.
    fn replica_digests(&self) -> Vec<ReplicaDigest> {
        Vec::new()
    }
}

/// The unsafe variant of every protocol that may show old values: clients forget what they were told
/// ([`crate::session`]). It is a mistake of callers, so those who drive callers switch it on, beside
/// [`Protocol::enable_mutation`].
pub const NO_SESSIONS: &str = "R11";

/// The path of an unknown outcome that stays unknown: nobody can ever tell, and whoever asks again is told the same.
pub const UNKNOWABLE: &str = "unknowable";

/// A quantity that an operator may want to watch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Gauge {
    /// What it is, its unit last.
    pub name: &'static str,
    /// The node that it is about.
    pub node: NodeId,
    /// How much.
    pub value: i64,
}

/// Something that a machine holds, and how much of it.
pub type Leak = (&'static str, usize);

/// One machine's copy of a group's replicated state. Copies at the same position are equal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReplicaDigest {
    /// Whose state it is.
    pub partition: PartitionId,
    /// How much of the group's history it reflects.
    pub position: u64,
    /// A hash of it, see [`crate::digest`].
    pub digest: u64,
    /// How many nodes keep the state at this position, if that changes: who has left keeps an old copy.
    pub members: Option<usize>,
}

/// A statement about the whole cluster on which a machine acts. Simulations hold all the claims of a
/// run, and what callers were told, against each other; servers drop them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Claim {
    /// This node leads the partition's group in this term: no other node ever does.
    Leads {
        /// Whose group.
        partition: PartitionId,
        /// The term.
        term: u64,
    },
    /// This entry of the log of the partition's group is chosen: no other ever is at its place.
    Chosen {
        /// Whose log.
        partition: PartitionId,
        /// The entry's place.
        index: u64,
        /// The term it was appended in, which together with the place names the entry.
        term: u64,
    },
    /// The transaction's outcome is decided: no other ever is, for this attempt, nor is its caller
    /// told another.
    Decided {
        /// The attempt.
        txn: TxnId,
        /// Its outcome.
        outcome: Outcome,
    },
}

/// Orders from an operator.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Admin {
    /// Hand leadership of a partition's group to another of its voters.
    TransferLeader {
        /// Whose leader is to change.
        partition: PartitionId,
        /// The wanted leader.
        to: NodeId,
    },
    /// Make these nodes the voters and learners of a partition's group.
    ChangeMembers {
        /// Whose members are to change.
        partition: PartitionId,
        /// Members that vote.
        voters: Vec<NodeId>,
        /// Members that only receive.
        learners: Vec<NodeId>,
    },
}

impl Admin {
    /// The partition that the order is about.
    #[must_use]
    pub fn partition(&self) -> PartitionId {
        match self {
            Self::TransferLeader { partition, .. } | Self::ChangeMembers { partition, .. } => {
                *partition
            }
        }
    }
}

/// Why a server does not take an operator's order. A refused order has no effect.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// The server does not lead the partition's group; who does, if the server knows.
    NotLeader(Option<NodeId>),
    /// The server leads, but cannot carry the order out now; why, and what to do.
    NotNow(String),
    /// The order contradicts the cluster's settings; why.
    Invalid(String),
    /// The protocol has no such orders; why, and what to do instead.
    Never(String),
}

/// What a server knows of the group of one partition. Members may differ from the placement.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GroupView {
    /// Whose group it is.
    pub partition: PartitionId,
    /// Members that vote; during a change, the new ones.
    pub voters: Vec<NodeId>,
    /// Members that only receive, as far as the server knows.
    pub learners: Vec<NodeId>,
    /// The member that leads, if the server knows.
    pub leader: Option<NodeId>,
    /// If this server leads: the voter to which it should hand leadership before it ends.
    pub successor: Option<NodeId>,
}

/// An order to change the members of a partition's group, and what became of it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MembershipOrder {
    /// Whose members are to change.
    pub partition: PartitionId,
    /// The wanted members that vote.
    pub voters: Vec<NodeId>,
    /// The wanted members that only receive.
    pub learners: Vec<NodeId>,
    /// When it was given.
    pub given: Time,
    /// What became of it.
    pub state: OrderState,
}

/// What became of an order to change members.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum OrderState {
    /// It is being carried out; what it waits for.
    Pending(String),
    /// These are the members, or were until a later order.
    Finished,
    /// It is not being carried out, and will not be; why, and what to do.
    Failed(String),
    /// It was given to a node that does not lead the group; who does, if that is known. It had no
    /// effect.
    NotLeader(Option<NodeId>),
}

impl OrderState {
    /// Its name in what programs read.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Pending(_) => "pending",
            Self::Finished => "finished",
            Self::Failed(_) | Self::NotLeader(_) => "failed",
        }
    }

    /// What there is to say besides the name; empty if nothing.
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

/// What a machine takes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Input<P: Protocol> {
    /// To a client: run this transaction.
    Begin(Txn),
    /// To a client: the next round of reads of a general transaction that it began and that waits
    /// for its caller. Keys that it has read already are told again as they were then. Ignored if the
    /// transaction has ended, or a round is under way.
    Read {
        /// Which transaction.
        txn: TxnId,
        /// What its caller wants to know.
        keys: Vec<Key>,
    },
    /// To a client: the end of an interactive or general transaction that it began and that waits
    /// for its caller. Ignored if the transaction has ended.
    Decide {
        /// Which transaction.
        txn: TxnId,
        /// What its caller wants.
        decision: Decision,
    },
    /// To a client: this transaction was begun here or elsewhere, and its caller does not know what
    /// became of it. With a decision, the caller had asked for that; `reads` are the versions it
    /// was based on. Finish with its one outcome, ending the transaction if it has none.
    Resolve {
        /// The transaction as it was begun.
        txn: Txn,
        /// What its reads returned, if they did, in all rounds.
        reads: Reads,
        /// What its caller had decided, if it had.
        decision: Option<Decision>,
    },
    /// A message arrived.
    Message {
        /// Its sender.
        from: NodeId,
        /// What it says.
        msg: P::Msg,
    },
    /// A timer that the machine set has expired.
    Timer(P::Timer),
    /// Everything persisted up to and including this ticket is durable.
    Durable(Ticket),
    /// To a server: an operator's order.
    Admin(Admin),
}

/// What a machine wants done. Effects are carried out first in, first out.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Effect<P: Protocol> {
    /// Send a message. It may be lost or delayed. It may arrive twice or after a later one, unless the
    /// protocol says that it needs ordered links ([`Protocol::NEEDS_ORDERED_LINKS`]).
    Send {
        /// To whom.
        to: NodeId,
        /// What.
        msg: P::Msg,
    },
    /// Make a record durable, after all records before it.
    Persist {
        /// Reported when it is done.
        ticket: Ticket,
        /// What to remember.
        record: P::Record,
    },
    /// Make `versions` durable in the state engine, then let `records` replace every record
    /// persisted before: the bound on restart time and on the size of the log.
    Checkpoint {
        /// Reported when it is done.
        ticket: Ticket,
        /// Versions to merge into the state engine first.
        versions: Arc<Memtable>,
        /// What to remember instead of everything before.
        records: Vec<P::Record>,
    },
    /// To the caller: what the transaction read. Once per attempt at most; of a general transaction
    /// once for each round, with the keys of that round.
    Reads {
        /// Which transaction.
        txn: TxnId,
        /// What it read.
        reads: Reads,
    },
    /// To the caller: what became of the transaction. Once per attempt. For a read-only
    /// transaction or a procedure that commits, its `Reads` went before, unless the caller had
    /// lost track and what was read is gone.
    Finish {
        /// Which transaction.
        txn: TxnId,
        /// What became of it.
        outcome: Outcome,
        /// Which of the protocol's paths it took: `fast`, `slow`, `read-only`, …
        path: &'static str,
    },
    /// Something rare happened.
    Note(P::Note),
    /// Something that no other machine may contradict.
    Claim(Claim),
}

/// The context of a machine's step: its only way to read a clock, to send and to write.
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
    /// The same context, to keep in a struct for the length of a borrow.
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

    /// Sets `timer` to expire at `at`, or moves it there.
    pub fn set_timer(&mut self, timer: P::Timer, at: Time) {
        self.timers.set(timer, at);
    }

    /// Stops `timer`, if it runs.
    pub fn cancel_timer(&mut self, timer: P::Timer) {
        self.timers.cancel(timer);
    }

    /// Persists `record` after all those before it; the ticket is reported when it is durable.
    pub fn persist(&mut self, record: P::Record) -> Ticket {
        let ticket = self.next_ticket();
        self.effects.push(Effect::Persist { ticket, record });
        ticket
    }

    /// Replaces everything persisted before by `records`, once `versions` are in the state engine.
    /// At most one checkpoint may be under way.
    pub fn checkpoint(&mut self, versions: Arc<Memtable>, records: Vec<P::Record>) -> Ticket {
        let ticket = self.next_ticket();
        self.effects.push(Effect::Checkpoint { ticket, versions, records });
        ticket
    }

    /// Answers the caller of `txn` with what it read.
    pub fn reads(&mut self, txn: TxnId, reads: Reads) {
        self.effects.push(Effect::Reads { txn, reads });
    }

    /// Tells the caller of `txn` what became of it.
    pub fn finish(&mut self, txn: TxnId, outcome: Outcome, path: &'static str) {
        self.effects.push(Effect::Finish { txn, outcome, path });
    }

    /// Counts something rare.
    pub fn note(&mut self, note: P::Note) {
        self.effects.push(Effect::Note(note));
    }

    /// States what no other machine may contradict, as this one acts on it.
    pub fn claim(&mut self, claim: Claim) {
        self.effects.push(Effect::Claim(claim));
    }

    fn next_ticket(&mut self) -> Ticket {
        self.last_ticket.0 += 1;
        *self.last_ticket
    }
}
