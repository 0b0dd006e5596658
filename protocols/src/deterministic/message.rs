//! The messages between machines of the deterministic protocols, and the durable records of
//! servers.

use std::fmt;
use std::sync::Arc;

use orthodrome_core::digest::Digest;
use orthodrome_core::id::{ClientId, NodeId, PartitionId, RegionId, TxnId};
use orthodrome_core::machine::Message;
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::store::{Versions, check_versions, sample_versions};
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::{Key, Outcome, Reads};
use orthodrome_core::{Rng, Wire, WireError};

use super::checks::Span;
use super::merge::Place;
use crate::functor::{Body, Functor};
use crate::replication::{self, Index, Replicated};
use crate::sizes::TXN;

/// A transaction as it is sequenced: complete, in every stream of it (S6).
#[derive(Clone, PartialEq, Eq, Wire)]
#[wire(check = "Sequenced::check", sample = "Sequenced::draw")]
pub struct Sequenced {
    /// What it does.
    pub functor: Arc<Functor>,
    /// The streams that it must be in, in order. The transaction names them itself, so that its
    /// completeness does not depend on the observer (S5).
    pub homes: Vec<PartitionId>,
    /// When sequencers take it, by their clocks: about when all of them have it (S1).
    pub due: Timestamp,
    /// The homes of its moved keys, as far as the server that submitted it knew. It is void if they
    /// are wrong when its turn comes (S10).
    pub moved: Vec<(Key, Home)>,
    /// The stream to which it moves its only key.
    pub target: Option<PartitionId>,
    /// The region of its gateway.
    pub origin: RegionId,
    /// With `slog`: only the keys that one of its homes orders. The stream of the orderer has the
    /// operations (SLOG's `LockOnly`).
    pub is_piece: bool,
}

impl Sequenced {
    /// Homes are in order, each once: their number determines when a transaction is complete.
    fn check(&self) -> Result<(), WireError> {
        if !self.homes.is_empty() && self.homes.is_sorted_by(|a, b| a < b) {
            return Ok(());
        }
        let (field, found) = ("Sequenced.homes", format!("{:?}", self.homes));
        Err(WireError::Value { field, found, wanted: "ascending, at least one" })
    }

    /// A random transaction, for tests of its encoding.
    fn draw(rng: &mut Rng) -> Self {
        let mut homes = OrdSet::<PartitionId>::sample(rng);
        homes.insert(PartitionId::sample(rng));
        Self {
            functor: Wire::sample(rng),
            homes: homes.into_iter().collect(),
            due: Wire::sample(rng),
            moved: Wire::sample(rng),
            target: Wire::sample(rng),
            origin: Wire::sample(rng),
            is_piece: Wire::sample(rng),
        }
    }
}

/// The home of a key, and how often the key has moved (SLOG's remastering).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Wire)]
pub struct Home {
    /// The number of moves.
    pub counter: u64,
    /// The stream that orders its accesses.
    pub stream: PartitionId,
    /// The timestamp of the last move; later accesses get larger timestamps.
    pub since: Timestamp,
}

/// The name of an entry of streams: a transaction, as submitted by a server that assumed certain
/// homes for its keys. Two names of one transaction may both be sequenced, but at most one of them
/// runs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Wire)]
pub struct Name {
    /// The transaction.
    pub txn: TxnId,
    /// Follows from the assumed homes of its keys; 0 if none has ever moved.
    pub map: u64,
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { txn, map } = self;
        if *map == 0 { write!(f, "{txn}") } else { write!(f, "{txn} of {map:x}") }
    }
}

/// The client under whose name keys are moved.
const MOVER: ClientId = ClientId(u64::MAX);

impl Sequenced {
    /// A transaction that a server was asked to run, from the region `origin`. `moved` has the
    /// homes of its keys.
    #[must_use]
    pub fn new(
        functor: Arc<Functor>,
        homes: Vec<PartitionId>,
        moved: Vec<(Key, Home)>,
        origin: RegionId,
    ) -> Self {
        let due = Timestamp::ZERO;
        Self { functor, homes, due, moved, target: None, origin, is_piece: false }
    }

    /// Moves `key` from its current home.
    #[must_use]
    pub fn relocation(
        key: Key,
        from: Home,
        target: PartitionId,
        orderer: Option<PartitionId>,
    ) -> Self {
        let mut digest = Digest::default();
        digest.add_debug(&key);
        let functor = Functor {
            txn: TxnId::new(MOVER, digest.value()),
            reads: Vec::new(),
            writes: vec![key.clone()],
            body: Body::Ops(Vec::new()),
            acknowledged_below: 0,
        };
        let homes: OrdSet<PartitionId> = [from.stream, target].into_iter().chain(orderer).collect();
        let (homes, moved) = (homes.into_iter().collect(), vec![(key, from)]);
        let entry = Self::new(Arc::new(functor), homes, moved, RegionId::default());
        Self { target: Some(target), ..entry }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> Name {
        let txn = self.functor.txn;
        if self.moved.is_empty() {
            return Name { txn, map: 0 };
        }
        let mut digest = Digest::default();
        for (key, home) in &self.moved {
            digest.add_debug(key);
            digest.add(home.counter);
        }
        digest.add_debug(&self.target);
        Name { txn, map: digest.value() }
    }

    /// If it moves a key: the key, and its old home.
    #[must_use]
    pub fn relocates(&self) -> Option<(&Key, Home)> {
        let (key, from) = self.moved.first().filter(|_| self.target.is_some())?;
        Some((key, *from))
    }

    /// True if `stream` orders accesses to `key`, as this transaction assumes.
    #[must_use]
    pub fn is_ordered_by(
        &self,
        stream: PartitionId,
        key: &Key,
        placed: impl Fn(&Key) -> PartitionId,
    ) -> bool {
        if self.is_piece || self.target == Some(stream) {
            return true;
        }
        let moved = self.moved.iter().find(|(moved, _)| moved == key);
        moved.map_or_else(|| placed(key), |(_, home)| home.stream) == stream
    }

    /// True if it has several homes.
    #[must_use]
    pub fn is_multi_home(&self) -> bool {
        self.homes.len() > 1
    }

    /// Its piece for one home, which orders the keys that `here` accepts.
    pub(super) fn piece(&self, here: impl Fn(&Key) -> bool) -> Arc<Self> {
        let of = |keys: &[Key]| keys.iter().filter(|key| here(key)).cloned().collect();
        let functor = Functor {
            reads: of(&self.functor.reads),
            writes: of(&self.functor.writes),
            body: Body::Ops(Vec::new()),
            ..Functor::clone(&self.functor)
        };
        Arc::new(Self { functor: Arc::new(functor), is_piece: true, ..self.clone() })
    }
}

impl fmt::Debug for Sequenced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_piece {
            let Functor { reads, writes, .. } = &*self.functor;
            return write!(f, "piece of {}: reads {reads:?}, writes {writes:?}", self.name());
        }
        if let (Some((key, from)), Some(target)) = (self.relocates(), self.target) {
            return write!(f, "move {key} from {} to {target}", from.stream);
        }
        write!(f, "{:?} in {:?}", self.functor, self.homes)?;
        for (key, home) in &self.moved {
            write!(f, ", {key} moved {} times", home.counter)?;
        }
        Ok(())
    }
}

/// One entry of a stream.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Command {
    /// Transactions, in their order.
    Batch {
        /// The sequencer's clock.
        stamp: Timestamp,
        /// The transactions.
        entries: Vec<Arc<Sequenced>>,
    },
    /// For each client, the counter below which it knows all outcomes (R6), according to other
    /// streams.
    Acknowledge(Vec<(ClientId, u64)>),
    /// All streams have these counters, and no transaction below them is in one stream and missing
    /// in another: their names need not be remembered any more.
    Forget(Vec<(ClientId, u64)>),
}

/// The log of one stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Log;

impl Replicated for Log {
    type Command = Command;
    type Chunk = Chunk;
    type Cursor = usize;
}

/// The state that follows from the prefixes of the streams that a server has merged, without its
/// data (S8).
#[derive(Clone, PartialEq, Eq, Debug, Default, Wire)]
pub struct Image {
    /// The number of the server's checkpoint.
    pub number: u64,
    /// A large state is written and sent in pieces. Each piece is an image with a part of the
    /// content. This is the piece's number, from 0.
    pub piece: u32,
    /// The number of pieces; 0 if this is the whole state.
    pub pieces: u32,
    /// Each stream.
    pub streams: OrdMap<PartitionId, StreamImage>,
    /// Transactions that were merged and have not run.
    pub pending: Vec<(PartitionId, Place, Arc<Sequenced>)>,
    /// The outcomes of transactions whose clients may ask.
    pub ended: OrdMap<TxnId, Ended>,
    /// Keys that have moved.
    pub moved: OrdMap<Key, Home>,
    /// Transactions that have run and that may arrive again under another name.
    pub ran: OrdSet<TxnId>,
    /// The number of shares; 0 if copies are not divided.
    pub shares: u32,
    /// Transactions that have their position in the order and have not run, in that order.
    pub due: Vec<Due>,
    /// Parts of transactions that have run, for which other servers may ask.
    pub kept: OrdMap<Turn, Arc<Part>>,
}

/// A transaction whose turn has come, and which waits for its reads (Calvin §3.2).
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Due {
    /// The transaction.
    pub entry: Arc<Sequenced>,
    /// The latest timestamp of its positions.
    pub stamp: Timestamp,
    /// Its positions.
    pub places: Vec<(PartitionId, Place)>,
}

impl Due {
    /// Its name among servers.
    #[must_use]
    pub fn turn(&self) -> Turn {
        let first = self.places.iter().map(|(stream, place)| (*stream, place.index)).min();
        let (stream, index) = first.unwrap_or_default();
        Turn { stream, index, name: self.entry.name() }
    }

    /// The keys that it accesses; a key that it reads and writes occurs twice.
    pub(super) fn keys(&self) -> impl Iterator<Item = &Key> {
        self.entry.functor.reads.iter().chain(&self.entry.functor.writes)
    }

    /// A lower bound of its timestamp.
    pub(super) fn earliest(&self) -> Timestamp {
        let moved = self.entry.moved.iter().map(|(_, home)| home.since.next());
        moved.max().map_or(self.stamp, |moved| moved.max(self.stamp))
    }
}

/// A transaction at its position in the order, as servers name it to each other.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Wire)]
pub struct Turn {
    /// The first of its streams.
    pub stream: PartitionId,
    /// Its entry in that stream.
    pub index: Index,
    /// Its name.
    pub name: Name,
}

/// The values in one share that a transaction accesses, when its turn comes.
#[derive(Clone, PartialEq, Eq, Default, Wire)]
pub struct Part {
    /// Its reads there.
    pub reads: Reads,
    /// The newest timestamp of its keys there: its own timestamp is larger.
    pub newest: Timestamp,
}

impl fmt::Debug for Turn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { stream, index, name } = self;
        write!(f, "{name} at {stream} {index}")
    }
}

impl fmt::Debug for Part {
    /// A short form for goldens: the reads, and the newest timestamp.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (key, read) in &self.reads {
            let value = read.value.as_ref().map_or_else(|| "-".into(), ToString::to_string);
            write!(f, "{key}={value}({}) ", read.version)?;
        }
        write!(f, "up to {}", self.newest)
    }
}

/// The result of a transaction.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Ended {
    /// Its outcome.
    pub outcome: Outcome,
    /// Its reads; empty if its client had read before it was submitted. Another server than the
    /// first may have to answer, and reading again would be reading at another position in the
    /// order. None if they are forgotten.
    pub reads: Option<Reads>,
    /// The latest timestamp of its positions: the oldest results are forgotten first.
    pub stamp: Timestamp,
}

impl Ended {
    /// The size of its reads in bytes.
    pub(super) fn reads_size(&self) -> usize {
        self.reads.as_ref().map_or(0, Wire::size)
    }

    /// The answer to its gateway.
    pub(super) fn answer(self, txn: TxnId) -> Msg {
        match (self.outcome, self.reads) {
            (outcome, Some(reads)) => Msg::Answer { txn, outcome, reads },
            (outcome @ Outcome::Aborted(_), None) => {
                Msg::Answer { txn, outcome, reads: Reads::new() }
            }
            (outcome, None) => Msg::TooOld { txn, outcome: Some(outcome) },
        }
    }
}

impl Image {
    /// True if an entry that another server has seen and not run has run here: it was seen at one
    /// of its positions and does not wait.
    pub(super) fn has_run(&self, pending: &[(PartitionId, Place, Arc<Sequenced>)]) -> OrdSet<Name> {
        let waits: OrdSet<Name> = self.pending.iter().map(|(_, _, entry)| entry.name()).collect();
        let is_seen = |stream: &PartitionId, place: &Place| {
            self.streams.get(stream).is_some_and(|stream| place.index <= stream.applied)
        };
        let seen = pending.iter().filter(|(stream, place, _)| is_seen(stream, place));
        seen.map(|(_, _, entry)| entry.name()).filter(|name| !waits.contains(name)).collect()
    }

    /// As [`super::state::State::collectable`].
    pub(super) fn collectable(&self, stream: PartitionId) -> Timestamp {
        let stamp = self.streams.get(&stream).map(|state| state.stamp).unwrap_or_default();
        let waiting = self.places().filter(|(at, _)| *at == stream);
        waiting.map(|(_, place)| place.stamp).min().map_or(stamp, |first| first.min(stamp))
    }

    /// The positions of all transactions that have not run.
    fn places(&self) -> impl Iterator<Item = (PartitionId, Place)> + '_ {
        let pending = self.pending.iter().map(|(stream, place, _)| (*stream, *place));
        pending.chain(self.due.iter().flat_map(|due| due.places.iter().copied()))
    }

    /// For each stream, the entry up to which all transactions have run.
    pub(super) fn covered(&self) -> OrdMap<PartitionId, Index> {
        let mut covered: OrdMap<PartitionId, Index> =
            self.streams.iter().map(|(&id, stream)| (id, stream.applied)).collect();
        for (stream, place) in self.places() {
            if let Some(covered) = covered.get_mut(&stream) {
                *covered = (*covered).min(Index(place.index.0.saturating_sub(1)));
            }
        }
        covered
    }

    /// True if a transaction that another server has as due has run here.
    pub(super) fn has_run_due(&self, due: &Due, waits: &OrdSet<Name>) -> bool {
        let is_seen = |(stream, place): &(PartitionId, Place)| {
            self.streams.get(stream).is_some_and(|stream| place.index <= stream.applied)
        };
        due.places.iter().any(is_seen) && !waits.contains(&due.entry.name())
    }

    /// Transactions that were seen and have not run.
    pub(super) fn waits(&self) -> OrdSet<Name> {
        let pending = self.pending.iter().map(|(_, _, entry)| entry.name());
        pending.chain(self.due.iter().map(|due| due.entry.name())).collect()
    }

    /// True if this is the whole state.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.piece + 1 >= self.pieces
    }

    /// Splits the state into pieces of about `bytes_max` bytes, unless a single transaction has
    /// more.
    #[must_use]
    pub fn into_pieces(self, bytes_max: usize) -> Vec<Arc<Self>> {
        let mut all = Pieces::new(&self, bytes_max);
        for (id, mut stream) in self.streams {
            let StreamImage { applied, stamp, .. } = stream;
            let head = || StreamImage { applied, stamp, ..StreamImage::default() };
            let mut of = |size: usize, add: &mut dyn FnMut(&mut StreamImage)| {
                add(all.room(size).streams.entry(id).or_insert_with(head));
            };
            of(24, &mut |_| {});
            for name in std::mem::take(&mut stream.seen) {
                of(10 + TXN, &mut |piece| piece.seen.extend([name]));
            }
            for (client, below) in std::mem::take(&mut stream.acknowledged) {
                of(24, &mut |piece| piece.acknowledged.extend([(client, below)]));
            }
            for (client, below) in std::mem::take(&mut stream.forgotten) {
                of(24, &mut |piece| piece.forgotten.extend([(client, below)]));
            }
            for (key, moves) in std::mem::take(&mut stream.moves) {
                of(16 + key.len(), &mut |piece| piece.moves.extend([(key.clone(), moves)]));
            }
        }
        for pending in self.pending {
            all.room(24 + pending.2.size()).pending.push(pending);
        }
        for (txn, ended) in self.ended {
            all.room(TXN + ended.size()).ended.insert(txn, ended);
        }
        for (key, home) in self.moved {
            all.room(32 + key.len()).moved.insert(key, home);
        }
        for txn in self.ran {
            all.room(TXN).ran.insert(txn);
        }
        for due in self.due {
            all.room(24 + 24 * due.places.len() + due.entry.size()).due.push(due);
        }
        for (turn, part) in self.kept {
            all.room(TURN + part.size()).kept.insert(turn, part);
        }
        all.finish()
    }

    /// Adds the next piece.
    pub(super) fn add(&mut self, next: &Self) {
        let Self { number, piece, .. } = *next;
        assert!(
            number == self.number && piece == self.piece + 1,
            "piece {piece} of image {number} comes after {} of {}",
            self.piece,
            self.number
        );
        self.piece = piece;
        self.pieces = next.pieces;
        for (id, more) in &next.streams {
            let StreamImage { applied, stamp, .. } = *more;
            let stream = self.streams.entry(*id).or_default();
            (stream.applied, stream.stamp) = (applied, stamp);
            stream.seen.extend(&more.seen);
            stream.acknowledged.extend(&more.acknowledged);
            stream.forgotten.extend(&more.forgotten);
            stream.moves.extend(more.moves.clone());
        }
        self.pending.extend(next.pending.iter().cloned());
        self.ended.extend(next.ended.clone());
        self.moved.extend(next.moved.clone());
        self.ran.extend(&next.ran);
        self.due.extend(next.due.iter().cloned());
        self.kept.extend(next.kept.clone());
    }
}

/// An image that is being split into pieces.
struct Pieces {
    done: Vec<Image>,
    last: Image,
    bytes: usize,
    bytes_max: usize,
}

impl Pieces {
    fn new(of: &Image, bytes_max: usize) -> Self {
        let last = Image { number: of.number, shares: of.shares, ..Image::default() };
        Self { done: Vec::new(), last, bytes: 0, bytes_max }
    }

    /// The piece for an item of this size.
    fn room(&mut self, size: usize) -> &mut Image {
        if self.bytes > 0 && self.bytes + size > self.bytes_max {
            let Image { number, shares, .. } = self.last;
            let next = Image { number, shares, ..Image::default() };
            self.done.push(std::mem::replace(&mut self.last, next));
            self.bytes = 0;
        }
        self.bytes += size;
        &mut self.last
    }

    fn finish(self) -> Vec<Arc<Image>> {
        let count = u32::try_from(self.done.len() + 1).unwrap_or(u32::MAX);
        let pieces = if count > 1 { count } else { 0 };
        let all = (0..).zip(self.done.into_iter().chain([self.last]));
        all.map(|(piece, image)| Arc::new(Image { piece, pieces, ..image })).collect()
    }
}

/// The state that follows from a prefix of one stream.
#[derive(Clone, PartialEq, Eq, Debug, Default, Wire)]
pub struct StreamImage {
    /// The end of the prefix.
    pub applied: Index,
    /// The timestamp of the last batch. It grows along the stream whatever clocks do.
    pub stamp: Timestamp,
    /// Transactions in it whose clients may send them again.
    pub seen: OrdSet<Name>,
    /// How often each key has moved from it or to it.
    pub moves: OrdMap<Key, u64>,
    /// For each client, the counter below which it knows all outcomes.
    pub acknowledged: OrdMap<ClientId, u64>,
    /// For each client, the counter below which no transaction is accepted any more, under any
    /// name.
    pub forgotten: OrdMap<ClientId, u64>,
}

/// A piece of a server's state, for one that lags too far behind.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Chunk {
    /// The state without its data, in the first piece or the first few.
    pub image: Option<Arc<Image>>,
    /// Keys with their newest versions.
    #[wire(check = "check_versions", sample = "sample_versions")]
    pub keys: Vec<(Key, Versions)>,
}

impl Chunk {
    /// True if a state begins with this piece.
    pub(super) fn is_first(&self) -> bool {
        self.image.as_ref().is_some_and(|image| image.piece == 0)
    }

    /// True if `next` continues its image, or has data that follows it.
    pub(super) fn goes_on_with(&self, next: &Self) -> bool {
        match (&self.image, &next.image) {
            (Some(image), Some(next)) => {
                next.number == image.number && next.piece == image.piece + 1
            }
            (Some(image), None) => image.is_whole(),
            (None, _) => false,
        }
    }

    /// Adds the next piece of the state.
    pub(super) fn add(&mut self, next: Self) {
        if let (Some(image), Some(next)) = (&mut self.image, &next.image) {
            Arc::make_mut(image).add(next);
        }
        self.keys.extend(next.keys);
    }
}

/// Durable records of a server.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Record {
    /// Its state at a checkpoint. The data is in the state engine. The image is written before the
    /// checkpoint as well as with it: after a crash in between, the data is new, and this image
    /// counts. Several records if it is large.
    Image(Arc<Image>),
    /// A record of a stream's log.
    Replication(PartitionId, replication::Record<Log>),
}

/// Messages between machines.
#[derive(Clone, PartialEq, Eq, Debug, Wire, Message)]
pub enum Msg {
    /// Gateway → server: run this transaction, and report its result. May be sent again to any
    /// server at any time; the transaction runs once.
    // Planning and ordering a transaction read no data. A server is charged for its keys when it runs.
    #[message(txn = functor.txn)]
    Submit {
        /// The transaction.
        functor: Arc<Functor>,
    },
    /// Server → gateway: the result of a transaction, once it has run here.
    Answer {
        /// The transaction.
        txn: TxnId,
        /// Its outcome.
        outcome: Outcome,
        /// Its reads; empty if its client knows them.
        reads: Reads,
    },
    /// Server → gateway: the transaction ran so long ago that its reads are forgotten.
    TooOld {
        /// The transaction.
        txn: TxnId,
        /// Its outcome; none if that is forgotten too.
        outcome: Option<Outcome>,
    },
    /// Gateway → server: a client reads keys before it decides (reconnaissance).
    #[message(keys = keys.len())]
    Look {
        /// The transaction.
        txn: TxnId,
        /// The number of the round.
        round: u32,
        /// The keys.
        keys: Vec<Key>,
    },
    /// Server → gateway: the values of the keys here, which may be old.
    #[message(keys = reads.len())]
    Found {
        /// The transaction.
        txn: TxnId,
        /// The number of the round.
        round: u32,
        /// The values.
        reads: Reads,
    },
    /// Server → sequencer: put this into the stream. Sent by the server that was asked, and by any
    /// home that saw it in one stream and not in another (S6).
    #[message(txn = entry.functor.txn)]
    Sequence {
        /// The stream.
        stream: PartitionId,
        /// The transaction.
        entry: Arc<Sequenced>,
    },
    /// Server → sender: this server does not lead the stream.
    NotLeader {
        /// The stream.
        partition: PartitionId,
        /// Its leader, if known.
        leader: Option<NodeId>,
        /// The transaction of the request.
        txn: Option<TxnId>,
    },
    /// A message of a stream's log.
    #[message(kind = message.kind())]
    Replication {
        /// The stream.
        partition: PartitionId,
        /// The message.
        message: replication::Message<Log>,
    },
    /// Server → servers of its region with other shares, and servers that asked: the reads of
    /// transactions in the sender's share, taken when their turn came (Calvin §3.2).
    #[message(keys = parts.iter().map(|(_, part)| part.reads.len()).sum())]
    RemoteReads {
        /// The part of each transaction.
        parts: Vec<(Turn, Arc<Part>)>,
    },
    /// Server → a server of another share: the parts of these transactions have not arrived.
    WantReads {
        /// The transactions.
        turns: Vec<Turn>,
    },
    /// Server → server that asked: these have run here, and their parts are not kept any more.
    ReadsGone {
        /// The transactions.
        turns: Vec<Turn>,
    },
    /// Server → servers of other shares: everything up to these entries has run, and is in a
    /// durable checkpoint. Earlier parts will not be requested again.
    Covered {
        /// The last entry of each stream.
        through: OrdMap<PartitionId, Index>,
    },
    /// Server → a server of its share: it needs a state in which this transaction has run, or the
    /// next piece of it.
    WantState {
        /// The number of the sender's request for a state.
        number: u64,
        /// The transaction.
        past: Turn,
        /// The start of the piece; none for the first.
        cursor: Option<usize>,
    },
    /// Server → server that asked: a piece of its state.
    StatePiece {
        /// The number of the request.
        number: u64,
        /// The piece.
        chunk: Chunk,
        /// The start of the next piece, if there is one.
        next: Option<usize>,
        /// The start of this piece; none from servers of earlier versions.
        start: Option<usize>,
    },
    /// Server → all others with the same data: the sums of spans.
    Digests {
        /// The sum of each span.
        digests: Vec<(Span, u64)>,
    },
}

/// The approximate size of a [`Turn`] in bytes.
pub(super) const TURN: usize = 22 + TXN;
