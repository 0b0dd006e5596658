//! What Geodesic's machines say to each other, and what a replica remembers.
//!
//! Every message that names a transaction names one attempt of it (`docs/pitfalls.md`, R3).

use std::fmt;
use std::mem::size_of;
use std::sync::Arc;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{ClientId, NodeId, PartitionId, TxnId};
use orthodrome_core::machine::Message;
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::scan::KeyRange;
use orthodrome_core::store::{Start, Versions, check_versions, sample_versions};
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::{Key, Outcome, Priority, Read, Version, Writes};
use orthodrome_core::wire::{self, Raw, Shape};
use orthodrome_core::{Rng, Wire, WireError};

use super::members::{Election, Members};
use super::state::State;
use crate::functor::Functor;
use crate::portions::Portion;

/// Who may decide a slot: the highest that a replica has promised. Ballot 0 is that of h.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Wire)]
pub struct Ballot {
    /// 0 for h; recovery counts from 1.
    pub round: u32,
    /// Who recovers.
    pub node: NodeId,
    /// Which start of that node: a gateway remembers nothing of an earlier one, and one ballot must
    /// not have two coordinators.
    pub incarnation: u64,
}

impl fmt::Display for Ballot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.round {
            0 => f.write_str("b0"),
            round => write!(f, "b{round}{}", self.node),
        }
    }
}

impl fmt::Debug for Ballot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// How a replica came by its stamp. A replica without one has no [`Stamp`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Wire)]
pub enum Kind {
    /// At ballot 0: the stamp of h, or one that respects the stamp of h.
    Confirmed,
    /// With a promise (D6).
    Recovery,
    /// At ballot 0, from the gateway itself, before the forward of h came (D9).
    Direct,
}

impl Kind {
    /// True for stamps of ballot 0.
    #[must_use]
    pub fn is_of_ballot_zero(self) -> bool {
        matches!(self, Self::Confirmed | Self::Direct)
    }
}

/// The timestamp that one replica gives a transaction.
#[derive(Clone, Copy, PartialEq, Eq, Wire)]
pub struct Stamp {
    /// The timestamp.
    pub at: Timestamp,
    /// How the replica came by it.
    pub kind: Kind,
}

impl fmt::Debug for Stamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            Kind::Confirmed => "",
            Kind::Recovery => " in recovery",
            Kind::Direct => " direct",
        };
        write!(f, "{}{kind}", self.at)
    }
}

/// What a slot decides.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Wire)]
pub enum Value {
    /// The transaction has this place at this partition.
    At(Timestamp),
    /// It has none, and aborts everywhere.
    Refused,
}

impl fmt::Debug for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::At(at) => write!(f, "{at}"),
            Self::Refused => f.write_str("refused"),
        }
    }
}

/// The replicas of one partition that the gateway names: h first, then y, or for f = 2 three others.
#[derive(Clone, PartialEq, Eq, Wire)]
pub struct Side {
    /// The partition.
    pub partition: PartitionId,
    /// Whom the gateway names.
    pub named: Vec<NodeId>,
    /// All replicas get the transaction from the gateway, and stamp it at once (D9).
    pub is_direct: bool,
    /// In direct mode: h forwards the transaction only if a stamp is above the timestamp, or if the
    /// gateway asks again.
    pub is_patient: bool,
}

impl fmt::Debug for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let direct = match (self.is_direct, self.is_patient) {
            (false, _) => "",
            (true, false) => " direct",
            (true, true) => " direct, patient",
        };
        write!(f, "{}{:?}{direct}", self.partition, self.named)
    }
}

/// All that must be known of a transaction to bring it to its end.
#[derive(Clone, PartialEq, Eq, Wire)]
pub struct Text {
    /// What it does.
    pub functor: Functor,
    /// How much it matters.
    pub priority: Priority,
    /// The gateway that began it.
    pub gateway: NodeId,
    /// The gateway's clock plus the largest predicted delay.
    pub t: Timestamp,
    /// Every partition that takes part; sorted.
    pub sides: Vec<Side>,
    /// Whose replicas keep the register of what an interactive transaction writes; none for one whose
    /// functor says what it writes.
    pub register: Option<PartitionId>,
}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} t={} of {} at {:?}", self.functor, self.t.0, self.gateway, self.sides)?;
        self.register.map_or(Ok(()), |register| write!(f, " register {register}"))
    }
}

impl Text {
    /// Its name.
    #[must_use]
    pub fn txn(&self) -> TxnId {
        self.functor.txn
    }

    /// What it writes, if that is certain once F is: it does not depend on what it reads, nor on its
    /// caller.
    #[must_use]
    pub fn fixed_writes(&self) -> Option<Writes> {
        self.functor.fixed_writes().filter(|_| self.register.is_none())
    }

    fn side(&self, partition: PartitionId) -> Option<&Side> {
        self.sides.iter().find(|side| side.partition == partition)
    }

    /// Whom the gateway named at a partition.
    #[must_use]
    pub fn named(&self, partition: PartitionId) -> &[NodeId] {
        self.side(partition).map_or(&[], |side| &side.named)
    }

    /// Whether h forwards it only if stamps differ.
    #[must_use]
    pub fn is_patient(&self, partition: PartitionId) -> bool {
        self.side(partition).is_some_and(|side| side.is_direct && side.is_patient)
    }

    /// Whether all replicas of a partition get it from the gateway.
    #[must_use]
    pub fn is_direct(&self, partition: PartitionId) -> bool {
        self.side(partition).is_some_and(|side| side.is_direct)
    }

    /// Every partition that takes part.
    #[must_use]
    pub fn participants(&self) -> Vec<PartitionId> {
        self.sides.iter().map(|side| side.partition).collect()
    }

    /// How many keys it has; those that it reads and writes count twice.
    #[must_use]
    pub fn keys(&self) -> usize {
        self.functor.reads.len() + self.functor.writes.len()
    }

    /// How many of them a node has that holds only some.
    fn keys_held(&self, holds: &dyn Fn(&Key) -> bool) -> usize {
        self.functor.reads.iter().chain(&self.functor.writes).filter(|key| holds(key)).count()
    }

    /// Keys of a partition that it reads.
    pub fn reads<'a>(
        &'a self,
        cluster: &'a Cluster,
        partition: PartitionId,
    ) -> impl Iterator<Item = &'a Key> {
        self.functor.reads.iter().filter(move |key| cluster.partition_of(key) == partition)
    }

    /// Keys of a partition that it may write.
    pub fn writes<'a>(
        &'a self,
        cluster: &'a Cluster,
        partition: PartitionId,
    ) -> impl Iterator<Item = &'a Key> {
        self.functor.writes.iter().filter(move |key| cluster.partition_of(key) == partition)
    }
}

/// What an interactive transaction writes, or that it does not: the content of its register (D16).
#[derive(Clone, PartialEq, Eq, Wire)]
pub struct Offer {
    /// The ballot in which it was stored: 0 for the gateway.
    pub ballot: Ballot,
    /// How often the caller has decided, at ballot 0. Only answers to the latest one count.
    pub attempt: u32,
    /// The versions that the caller had seen.
    pub seen: Vec<(Key, Version)>,
    /// What the caller writes; none if the transaction aborts.
    pub writes: Option<Writes>,
}

impl fmt::Debug for Offer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ballot, attempt, seen, writes } = self;
        write!(f, "{ballot}.{attempt} saw")?;
        for (key, version) in seen {
            write!(f, " {key}={version}")?;
        }
        match writes {
            Some(writes) => write!(f, ", writes {writes:?}"),
            None => f.write_str(", aborts"),
        }
    }
}

/// How a transaction ended: the same for whoever computes it.
#[derive(Clone, PartialEq, Eq, Wire)]
pub struct Output {
    /// Its outcome.
    #[wire(check = "Outcome::check_decided")]
    pub outcome: Outcome,
    /// What it writes, at all partitions; nothing if it aborts.
    pub writes: Writes,
}

impl fmt::Debug for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.outcome, self.writes)
    }
}

/// What a replica has on disk about a slot.
#[derive(Clone, PartialEq, Eq, Default, Wire)]
pub struct Answer {
    /// The highest ballot that it has promised.
    pub promised: Ballot,
    /// Its stamp.
    pub stamp: Option<Stamp>,
    /// The value that it has accepted, and the ballot. The record of h has ballot 0.
    pub accepted: Option<(Ballot, Value)>,
    /// The transaction, if the replica knows it and it has not ended.
    pub text: Option<Arc<Text>>,
    /// What is in the register, if the replica has some of it.
    pub offer: Option<Arc<Offer>>,
    /// How it ended.
    pub ended: Option<Arc<Output>>,
    /// The replica has forgotten how it ended (R6), or never heard of it. With
    /// [`Answer::has_ended`], only the former.
    pub is_forgotten: bool,
    /// The replica remembers that it ended, but not what it wrote.
    pub has_ended: bool,
    /// With [`Answer::has_ended`]: the outcome, if that is remembered.
    #[wire(check = "check_outcome")]
    pub outcome: Option<Outcome>,
}

fn check_outcome(outcome: &Option<Outcome>) -> Result<(), WireError> {
    outcome.as_ref().map_or(Ok(()), Outcome::check_decided)
}

impl fmt::Debug for Answer {
    /// Says only what there is.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { promised, stamp, accepted, text, offer, ended, .. } = self;
        let Self { is_forgotten, has_ended, outcome, .. } = self;
        write!(f, "({promised}")?;
        if let Some(stamp) = stamp {
            write!(f, " stamp {stamp:?}")?;
        }
        if let Some((ballot, value)) = accepted {
            write!(f, " accepted {value:?} in {ballot}")?;
        }
        if text.is_some() {
            f.write_str(" with text")?;
        }
        if let Some(offer) = offer {
            write!(f, " offer {offer:?}")?;
        }
        if let Some(ended) = ended {
            write!(f, " ended {ended:?}")?;
        }
        if let Some(outcome) = outcome {
            write!(f, " {outcome}")?;
        }
        f.write_str(match (*is_forgotten, *has_ended) {
            (false, _) => ")",
            (true, false) => " unknown)",
            (true, true) => " forgotten)",
        })
    }
}

/// A message.
#[derive(Clone, PartialEq, Eq, Debug, Wire, Message)]
pub enum Msg {
    /// Gateway → h, in direct mode all replicas: give this transaction a place. In direct mode also
    /// replica → h: its stamp is above the timestamp, so h has to decide.
    #[message(to = partition, txn = text.functor.txn, keys = text.keys(), held = text.keys_held(holds))]
    Begin {
        /// The partition.
        partition: PartitionId,
        /// The transaction.
        text: Arc<Text>,
        /// The same for further partitions.
        more: Vec<PartitionId>,
    },
    /// h → the other named replicas, once the stamp of h is durable: do so too, not below this (D3).
    #[message(to = partition, txn = text.functor.txn, keys = text.keys(), held = text.keys_held(holds))]
    Forward {
        /// The partition.
        partition: PartitionId,
        /// The transaction.
        text: Arc<Text>,
        /// The stamp of h.
        stamp: Timestamp,
        /// The same for further partitions.
        more: Vec<(PartitionId, Timestamp)>,
    },
    /// Named replica → h: it has closed up to its stamp. It gives no conflicting transaction a stamp
    /// at or below this any more.
    #[message(to = partition)]
    Ack {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
        /// Its stamp.
        stamp: Timestamp,
        /// What its clock said when the forward came.
        arrived: Timestamp,
    },
    /// h → all replicas (f ≥ 2): accept the largest stamp at ballot 0, for too few gave it (D11).
    #[message(to = partition)]
    Settle {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
        /// The largest stamp.
        at: Timestamp,
        /// The transaction, for those who have not heard of it.
        text: Arc<Text>,
    },
    /// Replica → h: it has accepted that, and has promised no ballot.
    #[message(to = partition)]
    Settled {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
    },
    /// h → gateway: the decision is durable, and h has closed up to it.
    Decided {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
        /// The decision.
        at: Timestamp,
        /// The last reading of a named replica's clock when the transaction came there.
        arrived: Timestamp,
        /// The transaction may be answered once this has passed on every clock, and the decision on the
        /// gateway's (D20). None: once the decision has passed on every clock.
        after: Option<Timestamp>,
    },
    /// Replica → coordinator: it has closed up to this, and this is what it knows of the keys that
    /// the transaction reads: every predecessor that it knows of is in there or aborted.
    Observed {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
        /// As of when.
        at: Timestamp,
        /// Which part of the answer.
        portion: Portion,
        /// The newest versions below the transaction's place.
        reads: Vec<(Key, Read)>,
    },
    /// Coordinator → all replicas of the register: store what the caller decided, or what recovery
    /// decided.
    #[message(to = partition, keys = offer.writes.as_ref().map_or(0, Writes::len))]
    Store {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
        /// What.
        offer: Arc<Offer>,
        /// Everybody who takes part.
        participants: Vec<PartitionId>,
    },
    /// Replica → coordinator: it has stored that, if its answer says so.
    Stored {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
        /// The ballot of what was to be stored.
        ballot: Ballot,
        /// Its attempt.
        attempt: u32,
        /// What the replica knows, without text and offer; it has stored it if it has not promised
        /// more.
        answer: Box<Answer>,
    },
    /// Coordinator → replicas: the transaction's timestamp is final; close up to it and observe.
    #[message(to = partition)]
    Commit {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
        /// F: the largest decision of all partitions.
        at: Timestamp,
        /// The transaction, for those who may not have heard of it.
        text: Option<Arc<Text>>,
    },
    /// Coordinator → all replicas of all participants: this is what came of it.
    #[message(
        to = partition,
        keys = output.writes.len(),
        held = output.writes.keys().filter(|key| holds(key)).count()
    )]
    Apply {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
        /// Its outcome and what it writes.
        output: Arc<Output>,
        /// Everybody who takes part.
        participants: Vec<PartitionId>,
        /// Further partitions of which the receiver is a replica.
        more: Vec<PartitionId>,
    },
    /// Replica → coordinator: that is durable here.
    Applied {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
        /// For so many nanoseconds the message was kept back, because nobody waits for it.
        late: u64,
    },
    /// Coordinator → all replicas: enough replicas of every participant have applied these, and
    /// their clients know; they may be forgotten (R6). Or they take too much memory.
    #[message(to = partition)]
    Forget {
        /// The partition.
        partition: PartitionId,
        /// The transactions.
        txns: Vec<TxnId>,
        /// Clients that know the outcome of everything below.
        acknowledged: Vec<(ClientId, u64)>,
        /// Clients may still ask for the outcomes: these are to be kept.
        keeps_outcomes: bool,
    },
    /// Replica → its peers: it missed how this ended, and everybody has forgotten. What did the
    /// transaction write, and what do these keys hold?
    #[message(to = partition, keys = keys.len())]
    Fetch {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
        /// Keys that it may have written.
        keys: Vec<Key>,
    },
    /// Peer → replica: that.
    #[message(to = partition)]
    Fetched {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
        /// What the transaction wrote, and the newest versions.
        #[wire(check = "check_versions", sample = "sample_versions")]
        keys: Vec<(Key, Versions)>,
        /// Keys that were asked for and are too much for this message: to be asked for again.
        rest: Vec<Key>,
    },
    /// Recovery coordinator → all replicas: promise this ballot and say what you know. A replica
    /// without a stamp gives itself a recovery stamp if it knows the transaction (D6).
    #[message(to = partition)]
    Recover {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
        /// The ballot.
        ballot: Ballot,
        /// The transaction, if the coordinator knows it.
        text: Option<Arc<Text>>,
        /// Everybody who takes part.
        participants: Vec<PartitionId>,
    },
    /// Replica → recovery coordinator: what it knows, once the promise is durable; or that it has
    /// promised a higher ballot.
    Promised {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
        /// The ballot that was asked for.
        ballot: Ballot,
        /// What it knows.
        answer: Box<Answer>,
    },
    /// Recovery coordinator → all replicas: accept this.
    #[message(to = partition)]
    Propose {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
        /// The ballot.
        ballot: Ballot,
        /// The value.
        value: Value,
        /// The transaction, if the coordinator knows it.
        text: Option<Arc<Text>>,
        /// Everybody who takes part.
        participants: Vec<PartitionId>,
    },
    /// Replica → recovery coordinator: it has accepted that, if its answer says so.
    Accepted {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
        /// The ballot that was proposed.
        ballot: Ballot,
        /// What it knows.
        answer: Box<Answer>,
    },
    /// Gateway → nearest replica: what do these keys hold?
    #[message(to = partition, keys = keys.len())]
    Read {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
        /// The keys.
        keys: Vec<Key>,
    },
    /// Replica → gateway: the latest versions that it knows of.
    ReadResult {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
        /// Every key asked for.
        reads: Vec<(Key, Read)>,
        /// These keys hold more than one answer may tell, so it tells nothing.
        is_too_much: bool,
        /// Who may yet write these keys below the transaction's place.
        behind: Vec<Predecessor>,
    },
    /// Gateway → f + 1 replicas: read these at that time, and let nobody write them before it (D14).
    #[message(to = partition, keys = keys.len())]
    ReadOnly {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
        /// The keys.
        keys: Vec<Key>,
        /// When.
        at: Timestamp,
        /// See [`Txn::fenced`](orthodrome_core::txn::Txn::fenced).
        fenced: Option<KeyRange>,
        /// It reads at no other partition.
        is_single: bool,
    },
    /// Replica → gateway: what they held then, as far as it knows.
    ReadOnlyResult {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
        /// When.
        at: Timestamp,
        /// Which part of the answer.
        portion: Portion,
        /// Every key asked for; none if the replica has no versions that are so old, or see `above`.
        reads: Option<Vec<(Key, Read)>>,
        /// If this is later than `at`: a write at this time may have been answered before. The
        /// transaction has to read at a later time (D20).
        above: Timestamp,
    },
    /// Replica → its peers, now and then.
    #[message(to = partition)]
    Gossip {
        /// The partition.
        partition: PartitionId,
        /// Nothing is unfinished here at or below this, and nothing will get a stamp there.
        mark: Timestamp,
    },
    /// Replica → gateway: do you still look after this transaction?
    #[message(control)]
    Inquire {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
    },
    /// Gateway → replica: yes or no.
    #[message(to = partition, control)]
    Driving {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
        /// Yes.
        is_driven: bool,
    },
    /// Gateway → server that did not answer: are you there?
    #[message(control)]
    Ping,
    /// Server → gateway: yes.
    #[message(control)]
    Pong,
    /// h → replicas that the gateway did not name: a pending transaction may write these keys. Whoever
    /// reads them there should wait for it.
    #[message(to = partition, keys = keys.len())]
    Hint {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
        /// Its gateway.
        gateway: NodeId,
        /// What it may write.
        keys: Vec<Key>,
    },
    /// Replica → gateway: the replica has closed up to this, but predecessors are still pending. These
    /// are the versions without them; their gateways know what they write.
    Blocked {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
        /// As of when.
        at: Timestamp,
        /// The newest versions below the transaction's place.
        reads: Vec<(Key, Read)>,
        /// Every predecessor that this replica knows and that is still pending here.
        behind: Vec<Predecessor>,
    },
    /// Gateway → gateway of a predecessor: send what the predecessor writes to these keys, as soon as
    /// you know it.
    Follow {
        /// The predecessor.
        txn: TxnId,
        /// The partition of the keys.
        partition: PartitionId,
        /// What the follower reads there and the predecessor may write.
        keys: Vec<Key>,
        /// Who follows.
        follower: TxnId,
    },
    /// Gateway of a predecessor → gateway of the follower: what the predecessor writes.
    Foretold {
        /// The transaction that follows.
        txn: TxnId,
        /// The partition of the keys.
        partition: PartitionId,
        /// The predecessor.
        of: TxnId,
        /// Its outcome and its writes.
        told: Arc<Foretold>,
    },
    /// Replica with a new disk → its peers: give no stamp to a transaction at or below `until` that you
    /// do not know, and send what you know of transactions.
    #[message(to = partition)]
    Rejoin {
        /// The partition.
        partition: PartitionId,
        /// The lost disk may have had a part in transactions with timestamps up to this, and in no
        /// later ones.
        until: Timestamp,
        /// Which part of the answer.
        number: u32,
        /// The answer's name, once a part of it has come.
        answer: u64,
        /// Largest part of the answer, in bytes; 0 from an earlier version, which sets no bound.
        bytes_max: u32,
    },
    /// Peer → replica with a new disk: a part of its state.
    #[message(to = partition)]
    Known {
        /// The partition.
        partition: PartitionId,
        /// That of the question.
        until: Timestamp,
        /// Which part.
        number: u32,
        /// How many parts there are.
        count: u32,
        /// The name of the answer to which the part belongs.
        answer: u64,
        /// The part.
        part: Box<State>,
    },
    /// Replica with a new disk → peer: send what you have from `start` on.
    #[message(to = partition)]
    Copy {
        /// The partition.
        partition: PartitionId,
        /// That of the question.
        until: Timestamp,
        /// Where to begin.
        start: Box<Start>,
        /// Largest piece, in bytes; 0 from an earlier version, which sets no bound.
        bytes_max: u32,
    },
    /// Peer → replica with a new disk: a piece of its data.
    #[message(to = partition, keys = keys.len())]
    Copied {
        /// The partition.
        partition: PartitionId,
        /// That of the question.
        until: Timestamp,
        /// Where this begins.
        start: Box<Start>,
        /// Keys, each with versions.
        #[wire(check = "check_versions", sample = "sample_versions")]
        keys: Vec<(Key, Versions)>,
        /// Where the rest begins, if there is more.
        next: Option<Box<Start>>,
    },
    /// What a node says to another one within one step; see `outbox.rs`.
    #[message(
        txn = of_one(f0),
        keys = f0.iter().map(|Inner(msg)| msg.keys()).sum(),
        held = f0.iter().map(|Inner(msg)| msg.keys_held(holds)).sum()
    )]
    Several(Vec<Inner>),
    /// Replica → gateway, in direct mode: its stamp of ballot 0 (D9).
    Stamped {
        /// The transaction.
        txn: TxnId,
        /// The partition.
        partition: PartitionId,
        /// The stamp.
        at: Timestamp,
        /// What its clock said when the transaction came.
        arrived: Timestamp,
    },
    /// A message to a replica of a partition whose members have changed, from a sender that knows these
    /// members.
    #[message(
        to = partition,
        txn = msg.0.txn(),
        keys = msg.0.keys(),
        held = msg.0.keys_held(holds)
    )]
    Under {
        /// The partition.
        partition: PartitionId,
        /// Its members.
        members: Arc<Members>,
        /// The message.
        msg: Box<Plain>,
    },
    /// Anybody → anybody: the members of a partition; or a question for them.
    #[message(control)]
    Members {
        /// The partition.
        partition: PartitionId,
        /// None: a question, to which only who knows of a change answers.
        members: Option<Arc<Members>>,
    },
    /// New member → other members: take no message of an earlier epoch any more.
    #[message(to = partition)]
    Fence {
        /// The partition.
        partition: PartitionId,
    },
    /// Member → new member: it will not, and that is durable.
    #[message(to = partition)]
    Fenced {
        /// The partition.
        partition: PartitionId,
        /// Before, it may have had a part in transactions with timestamps up to this.
        until: Timestamp,
    },
    /// Member → members: promise this ballot of the register of the next members; or accept these.
    #[message(to = partition)]
    Elect {
        /// The partition.
        partition: PartitionId,
        /// The ballot.
        ballot: Ballot,
        /// The next members.
        members: Arc<Members>,
        /// Accept them. Otherwise they are only what the sender would propose.
        is_final: bool,
    },
    /// Member → member: what the register has now.
    #[message(to = partition)]
    Elected {
        /// The partition.
        partition: PartitionId,
        /// The ballot of the question.
        ballot: Ballot,
        /// Whether the question was to accept.
        is_final: bool,
        /// The register.
        election: Box<Election>,
    },
}

impl Msg {
    /// The partition about which a replica answers a gateway or another coordinator.
    #[must_use]
    pub fn answers_about(&self) -> Option<PartitionId> {
        match self {
            Self::Stamped { partition, .. }
            | Self::Decided { partition, .. }
            | Self::Observed { partition, .. }
            | Self::Stored { partition, .. }
            | Self::Applied { partition, .. }
            | Self::Promised { partition, .. }
            | Self::Accepted { partition, .. }
            | Self::Blocked { partition, .. }
            | Self::ReadResult { partition, .. }
            | Self::ReadOnlyResult { partition, .. } => Some(*partition),
            Self::Begin { .. }
            | Self::Forward { .. }
            | Self::Ack { .. }
            | Self::Settle { .. }
            | Self::Settled { .. }
            | Self::Store { .. }
            | Self::Commit { .. }
            | Self::Apply { .. }
            | Self::Forget { .. }
            | Self::Fetch { .. }
            | Self::Fetched { .. }
            | Self::Recover { .. }
            | Self::Propose { .. }
            | Self::Read { .. }
            | Self::ReadOnly { .. }
            | Self::Gossip { .. }
            | Self::Inquire { .. }
            | Self::Driving { .. }
            | Self::Ping
            | Self::Pong
            | Self::Hint { .. }
            | Self::Follow { .. }
            | Self::Foretold { .. }
            | Self::Rejoin { .. }
            | Self::Known { .. }
            | Self::Copy { .. }
            | Self::Copied { .. }
            | Self::Several(_)
            | Self::Under { .. }
            | Self::Members { .. }
            | Self::Fence { .. }
            | Self::Fenced { .. }
            | Self::Elect { .. }
            | Self::Elected { .. } => None,
        }
    }

    /// The same for each further partition that it is for.
    #[must_use]
    pub fn of_further_partitions(&self) -> Vec<(PartitionId, Self)> {
        if let Self::Begin { text, more, .. } = self {
            let of = |&partition: &PartitionId| {
                let (text, more) = (text.clone(), vec![]);
                (partition, Self::Begin { partition, text, more })
            };
            return more.iter().map(of).collect();
        }
        if let Self::Forward { text, more, .. } = self {
            let of = |&(partition, stamp): &(PartitionId, Timestamp)| {
                let (text, more) = (text.clone(), vec![]);
                (partition, Self::Forward { partition, text, stamp, more })
            };
            return more.iter().map(of).collect();
        }
        if let Self::Apply { txn, output, participants, more, .. } = self {
            let of = |&partition: &PartitionId| {
                let (txn, output, participants) = (*txn, output.clone(), participants.clone());
                (partition, Self::Apply { txn, partition, output, participants, more: vec![] })
            };
            return more.iter().map(of).collect();
        }
        Vec::new()
    }
}

/// The number of [`Msg::Several`] among the variants.
const SEVERAL: u32 = 37;

/// The transaction that all of these are about.
fn of_one(parts: &[Inner]) -> Option<TxnId> {
    let first = parts.first()?.0.txn()?;
    parts.iter().all(|Inner(msg)| msg.txn() == Some(first)).then_some(first)
}

/// The number of [`Msg::Under`] among the variants.
const UNDER: u32 = 39;

/// A message inside [`Msg::Several`], which contains no other one of these: a decoder that follows
/// messages inside messages needs a bound.
#[derive(Clone, PartialEq, Eq)]
pub struct Inner(pub Msg);

/// A message inside [`Msg::Under`], which contains neither another one of these nor several.
#[derive(Clone, PartialEq, Eq)]
pub struct Plain(pub Msg);

/// Decodes a message that must not be one of those with these numbers.
fn take_within(raw: Raw<'_>, refused: &[u32]) -> Result<Msg, WireError> {
    let mut fields = raw.message("a message")?;
    while let Some((number, _)) = fields.next_field()? {
        if refused.contains(&number) {
            return Err(WireError::Value {
                field: if number == SEVERAL { "Msg.Several" } else { "Msg.Under" },
                found: "messages inside messages".into(),
                wanted: "messages",
            });
        }
    }
    Msg::take(raw)
}

/// How a message inside another one is written: as that message alone. `$refused` are the numbers of
/// the variants that it must not be.
macro_rules! message_within {
    ($name:ident, $refused:expr, $pattern:pat) => {
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl Wire for $name {
            const SHAPE: Shape = Msg::SHAPE;

            fn size(&self) -> usize {
                self.0.size()
            }

            fn put(&self, out: &mut wire::Out) {
                self.0.put(out);
            }

            fn take(raw: Raw<'_>) -> Result<Self, WireError> {
                take_within(raw, $refused).map(Self)
            }

            fn sample(rng: &mut Rng) -> Self {
                loop {
                    let msg = Msg::sample(rng);
                    if !matches!(msg, $pattern) {
                        return Self(msg);
                    }
                }
            }

            fn schema(schema: &mut wire::Schema) -> String {
                Msg::schema(schema)
            }
        }
    };
}

message_within!(Inner, &[SEVERAL], Msg::Several(_));
message_within!(Plain, &[SEVERAL, UNDER], Msg::Several(_) | Msg::Under { .. });

/// A pending transaction that may write what another one reads.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Predecessor {
    /// The transaction.
    pub txn: TxnId,
    /// Its gateway.
    pub gateway: NodeId,
    /// What it may write of what the other one reads.
    pub keys: Vec<Key>,
}

/// What the gateway of a predecessor says of it.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Foretold {
    /// Its outcome. If that is not certain, the transaction commits only if its caller read what is
    /// true at its place, and its decision is stored.
    pub outcome: Outcome,
    /// What it writes to the keys that were asked about.
    pub writes: Writes,
    /// The outcome is decided. Otherwise the transaction may still abort.
    pub is_certain: bool,
}

/// A durable change of a replica's state; see [`State::apply`].
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Change {
    /// A stamp of ballot 0.
    Stamp {
        /// The transaction.
        text: Arc<Text>,
        /// The stamp.
        at: Timestamp,
    },
    /// A promise, and the recovery stamp that goes with it.
    Promise {
        /// The transaction.
        txn: TxnId,
        /// Everybody who takes part.
        participants: Vec<PartitionId>,
        /// The transaction, if it was not known here and is now.
        text: Option<Arc<Text>>,
        /// The ballot.
        ballot: Ballot,
        /// The recovery stamp, if the replica had none.
        stamp: Option<Timestamp>,
    },
    /// A value was accepted; at ballot 0 by h, or for h.
    Accept {
        /// The transaction.
        txn: TxnId,
        /// Everybody who takes part.
        participants: Vec<PartitionId>,
        /// The transaction, if it was not known here and is now.
        text: Option<Arc<Text>>,
        /// The ballot.
        ballot: Ballot,
        /// The value.
        value: Value,
    },
    /// Something was stored in a register.
    Store {
        /// The transaction.
        txn: TxnId,
        /// Everybody who takes part.
        participants: Vec<PartitionId>,
        /// What.
        offer: Arc<Offer>,
    },
    /// The transaction's timestamp is final.
    Final {
        /// The transaction.
        txn: TxnId,
        /// The transaction, if it was not known here and is now.
        text: Option<Arc<Text>>,
        /// F.
        at: Timestamp,
    },
    /// The transaction has ended.
    End {
        /// The transaction.
        txn: TxnId,
        /// Everybody who takes part.
        participants: Vec<PartitionId>,
        /// How.
        output: Arc<Output>,
    },
    /// Versions that the replica missed.
    Copy {
        /// Keys, each with versions.
        #[wire(check = "check_versions", sample = "sample_versions")]
        keys: Vec<(Key, Versions)>,
    },
    /// These are forgotten.
    Forget(Vec<TxnId>),
    /// Clients know the outcome of everything below.
    Acknowledge(Vec<(ClientId, u64)>),
    /// No closing above this was promised before a later ceiling is durable.
    Ceiling(Timestamp),
    /// Nothing unfinished is, or will be, at or below this.
    Mark(Timestamp),
    /// Clients have known the outcome of everything below for a while.
    Age(Vec<(ClientId, u64)>),
    /// These are forgotten, except for their outcomes.
    Shorten(Vec<TxnId>),
    /// This disk is new. The lost one may have had a part in transactions up to this timestamp.
    Rejoin(Timestamp),
    /// A part of a peer's state, for a new disk.
    Inherit(Box<State>),
    /// A replica with a new disk has copied all that it needs.
    Rejoined,
    /// A peer has a new disk: this replica gives no stamps to transactions up to here that it does not
    /// know.
    Seal(Timestamp),
    /// A stamp of ballot 0, from the gateway itself (D9).
    Direct {
        /// The transaction.
        text: Arc<Text>,
        /// The stamp.
        at: Timestamp,
    },
    /// The stamp respects that of h now (D9).
    Confirm {
        /// The transaction.
        txn: TxnId,
        /// The stamp.
        at: Timestamp,
    },
    /// The register of the next members has promised a ballot, or has accepted these.
    Elect(Ballot, Option<Arc<Members>>),
    /// The group has these members now, and this replica is one of them.
    Members(Arc<Members>),
    /// The group has these members now, and this replica is none of them: it drops what it has.
    Leave(Arc<Members>),
}

/// What a server remembers.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Record {
    /// A partition's state at a checkpoint; the data is in the state engine.
    State(PartitionId, Box<State>),
    /// A change of it.
    Change(PartitionId, Change),
}

/// Reads by key: of each key the newest version that anybody told.
pub(super) fn merge_newest(
    into: &mut OrdMap<Key, Read>,
    reads: impl IntoIterator<Item = (Key, Read)>,
) {
    for (key, read) in reads {
        match into.get_mut(&key) {
            Some(known) if known.version >= read.version => {}
            Some(known) => *known = read,
            None => drop(into.insert(key, read)),
        }
    }
}

const _: () =
    assert!(size_of::<Msg>() <= 200, "messages are moved through queues; keep them small");
