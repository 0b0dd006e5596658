//! What machines of the deterministic protocols say to each other, and what servers remember.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use orthodrome_core::digest::Digest;
use orthodrome_core::id::{ClientId, NodeId, PartitionId, RegionId, TxnId};
use orthodrome_core::machine::Message;
use orthodrome_core::store::{Versions, check_versions, sample_versions};
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::{Key, Outcome, Reads};
use orthodrome_core::{Rng, Wire, WireError};

use super::checks::Span;
use super::merge::Place;
use crate::functor::{Body, Functor};
use crate::replication::{self, Index, Replicated};
use crate::sizes::TXN;

/// A transaction as it is sequenced: all of it, in every stream that it is in (S6).
#[derive(Clone, PartialEq, Eq, Wire)]
#[wire(check = "Sequenced::check", sample = "Sequenced::draw")]
pub struct Sequenced {
    /// What it does.
    pub functor: Arc<Functor>,
    /// The streams that it must be in, in order. It names them itself, so that what is complete does not
    /// depend on who looks (S5).
    pub homes: Vec<PartitionId>,
    /// When sequencers take it, by their clocks: about when all of them have it (S1).
    pub due: Timestamp,
    /// Where those of its keys are that have moved, as far as whoever submitted it knew. It is void if that
    /// is not so when its turn comes (S10).
    pub moved: Vec<(Key, Home)>,
    /// It moves its only key to this stream.
    pub target: Option<PartitionId>,
    /// The region in which it began.
    pub origin: RegionId,
    /// With `slog`: only the keys that one of its homes orders. What it does is in the stream of the
    /// orderer (SLOG's `LockOnly`).
    pub is_piece: bool,
}

impl Sequenced {
    /// Homes are in order, each once: how many there are says when a transaction is complete.
    fn check(&self) -> Result<(), WireError> {
        if !self.homes.is_empty() && self.homes.is_sorted_by(|a, b| a < b) {
            return Ok(());
        }
        let (field, found) = ("Sequenced.homes", format!("{:?}", self.homes));
        Err(WireError::Value { field, found, wanted: "ascending, at least one" })
    }

    /// Any transaction, for tests of its bytes.
    fn draw(rng: &mut Rng) -> Self {
        let mut homes = BTreeSet::<PartitionId>::sample(rng);
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

/// Where a key is, and how often it has moved (SLOG's remastering).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Wire)]
pub struct Home {
    /// How often it has moved.
    pub counter: u64,
    /// The stream that orders who touches it.
    pub stream: PartitionId,
    /// The timestamp of the last move; whoever touches it afterwards gets a larger one.
    pub since: Timestamp,
}

/// The name of an entry of streams: of a transaction, as somebody submitted it who supposed its keys in certain
/// homes. Two names of one transaction can both be sequenced; at most one of them runs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Wire)]
pub struct Name {
    /// The transaction.
    pub txn: TxnId,
    /// Follows from where its keys were supposed to be; 0 if none has ever moved.
    pub map: u64,
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { txn, map } = self;
        if *map == 0 { write!(f, "{txn}") } else { write!(f, "{txn} of {map:x}") }
    }
}

/// In whose name keys are moved.
const MOVER: ClientId = ClientId(u64::MAX);

impl Sequenced {
    /// What a server was asked to run, begun in the region `origin`; `moved` says where keys are.
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

    /// Moves `key` from where it is.
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
        let homes: BTreeSet<PartitionId> =
            [from.stream, target].into_iter().chain(orderer).collect();
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

    /// If it moves a key: which, and from where.
    #[must_use]
    pub fn relocates(&self) -> Option<(&Key, Home)> {
        let (key, from) = self.moved.first().filter(|_| self.target.is_some())?;
        Some((key, *from))
    }

    /// True if `stream` orders who touches `key`, as this transaction supposes.
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

    /// True if the order of one stream is not enough.
    #[must_use]
    pub fn is_multi_home(&self) -> bool {
        self.homes.len() > 1
    }

    /// The piece of it for one home, which orders `here`.
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
    /// Transactions in their order.
    Batch {
        /// The sequencer's clock.
        stamp: Timestamp,
        /// The transactions.
        entries: Vec<Arc<Sequenced>>,
    },
    /// Clients know the outcomes of everything below these counters (R6), as other streams say.
    Acknowledge(Vec<(ClientId, u64)>),
    /// All streams hold that, and nothing below is in one and not in another: names need not be
    /// remembered any more.
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

/// What follows from the prefixes of the streams that a server has merged, data apart (S8).
#[derive(Clone, PartialEq, Eq, Debug, Default, Wire)]
pub struct Image {
    /// Counts the checkpoints of a server.
    pub number: u64,
    /// A large state is written and sent in pieces, each an image with a part of everything: which piece this is, the
    /// first being 0.
    pub piece: u32,
    /// How many there are; 0 if this is the whole.
    pub pieces: u32,
    /// Each stream.
    pub streams: BTreeMap<PartitionId, StreamImage>,
    /// What was merged and has not run.
    pub pending: Vec<(PartitionId, Place, Arc<Sequenced>)>,
    /// What became of transactions whose clients may ask.
    pub ended: BTreeMap<TxnId, Ended>,
    /// Keys that have moved.
    pub moved: BTreeMap<Key, Home>,
    /// Transactions that have run and that may come again under another name.
    pub ran: BTreeSet<TxnId>,
    /// Into how many shares copies are divided; 0 as long as they are not.
    pub shares: u32,
    /// What has its place in the order and has not run, in that order.
    pub due: Vec<Due>,
    /// What others may ask for of what has run.
    pub kept: BTreeMap<Turn, Arc<Part>>,
}

/// A transaction whose turn has come, and which waits for what it reads (Calvin §3.2).
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Due {
    /// The transaction.
    pub entry: Arc<Sequenced>,
    /// The latest time of its places.
    pub stamp: Timestamp,
    /// Its places.
    pub places: Vec<(PartitionId, Place)>,
}

impl Due {
    /// What other servers know it by.
    #[must_use]
    pub fn turn(&self) -> Turn {
        let first = self.places.iter().map(|(stream, place)| (*stream, place.index)).min();
        let (stream, index) = first.unwrap_or_default();
        Turn { stream, index, name: self.entry.name() }
    }

    /// The keys that it touches; one that it reads and writes comes twice.
    pub(super) fn keys(&self) -> impl Iterator<Item = &Key> {
        self.entry.functor.reads.iter().chain(&self.entry.functor.writes)
    }

    /// Its timestamp is not below this.
    pub(super) fn earliest(&self) -> Timestamp {
        let moved = self.entry.moved.iter().map(|(_, home)| home.since.next());
        moved.max().map_or(self.stamp, |moved| moved.max(self.stamp))
    }
}

/// A transaction in its place in the order, as servers name it to each other.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Wire)]
pub struct Turn {
    /// The first of its streams.
    pub stream: PartitionId,
    /// Its entry in that.
    pub index: Index,
    /// Its name.
    pub name: Name,
}

/// What a share holds of what a transaction touches, when the transaction's turn comes.
#[derive(Clone, PartialEq, Eq, Default, Wire)]
pub struct Part {
    /// What it reads there.
    pub reads: Reads,
    /// The newest of what it reads or writes there: its own timestamp is larger.
    pub newest: Timestamp,
}

impl fmt::Debug for Turn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { stream, index, name } = self;
        write!(f, "{name} at {stream} {index}")
    }
}

impl fmt::Debug for Part {
    /// Short, for goldens: what is read, and the newest timestamp.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (key, read) in &self.reads {
            let value = read.value.as_ref().map_or_else(|| "-".into(), ToString::to_string);
            write!(f, "{key}={value}({}) ", read.version)?;
        }
        write!(f, "up to {}", self.newest)
    }
}

/// What came of a transaction.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Ended {
    /// What became of it.
    pub outcome: Outcome,
    /// What it read; nothing if its client had read before it was submitted. Another server than the
    /// one that was asked first may have to tell, and to read again would be to read at another place in
    /// the order. None if that is forgotten.
    pub reads: Option<Reads>,
    /// The latest time of its places: what is older is forgotten first.
    pub stamp: Timestamp,
}

impl Ended {
    /// How many bytes it read.
    pub(super) fn reads_size(&self) -> usize {
        self.reads.as_ref().map_or(0, Wire::size)
    }

    /// What its gateway is told.
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
    /// Which of these entries of streams, which somebody else has seen and not run, have run here: those
    /// that were seen in one of the places and do not wait.
    pub(super) fn has_run(
        &self,
        pending: &[(PartitionId, Place, Arc<Sequenced>)],
    ) -> BTreeSet<Name> {
        let waits: BTreeSet<Name> = self.pending.iter().map(|(_, _, entry)| entry.name()).collect();
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

    /// The places of everything that has not run.
    fn places(&self) -> impl Iterator<Item = (PartitionId, Place)> + '_ {
        let pending = self.pending.iter().map(|(stream, place, _)| (*stream, *place));
        pending.chain(self.due.iter().flat_map(|due| due.places.iter().copied()))
    }

    /// Up to where everything in each stream has run.
    pub(super) fn covered(&self) -> BTreeMap<PartitionId, Index> {
        let mut covered: BTreeMap<PartitionId, Index> =
            self.streams.iter().map(|(&id, stream)| (id, stream.applied)).collect();
        for (stream, place) in self.places() {
            if let Some(covered) = covered.get_mut(&stream) {
                *covered = (*covered).min(Index(place.index.0.saturating_sub(1)));
            }
        }
        covered
    }

    /// True if a transaction that somebody else knows to be due has run here.
    pub(super) fn has_run_due(&self, due: &Due, waits: &BTreeSet<Name>) -> bool {
        let is_seen = |(stream, place): &(PartitionId, Place)| {
            self.streams.get(stream).is_some_and(|stream| place.index <= stream.applied)
        };
        due.places.iter().any(is_seen) && !waits.contains(&due.entry.name())
    }

    /// What was seen and has not run.
    pub(super) fn waits(&self) -> BTreeSet<Name> {
        let pending = self.pending.iter().map(|(_, _, entry)| entry.name());
        pending.chain(self.due.iter().map(|due| due.entry.name())).collect()
    }

    /// True if this is everything.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.piece + 1 >= self.pieces
    }

    /// The same in pieces of about so many bytes, unless what one transaction read or does is more.
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

/// An image that is cut into pieces.
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

    /// Where something of this size goes.
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

/// What follows from a prefix of one stream.
#[derive(Clone, PartialEq, Eq, Debug, Default, Wire)]
pub struct StreamImage {
    /// The end of the prefix.
    pub applied: Index,
    /// The time of the last batch; grows along the stream whatever clocks do.
    pub stamp: Timestamp,
    /// Transactions in it whose clients may send them again.
    pub seen: BTreeSet<Name>,
    /// How often keys have moved from it or to it.
    pub moves: BTreeMap<Key, u64>,
    /// Clients know the outcomes of everything below.
    pub acknowledged: BTreeMap<ClientId, u64>,
    /// Nothing below is let in any more under any name.
    pub forgotten: BTreeMap<ClientId, u64>,
}

/// A piece of a server's state, for one that fell too far behind.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Chunk {
    /// Everything but the data, in the first piece, or in the first few.
    pub image: Option<Arc<Image>>,
    /// Keys with their newest versions.
    #[wire(check = "check_versions", sample = "sample_versions")]
    pub keys: Vec<(Key, Versions)>,
}

impl Chunk {
    /// True if a state begins with it.
    pub(super) fn is_first(&self) -> bool {
        self.image.as_ref().is_some_and(|image| image.piece == 0)
    }

    /// True if `next` goes on with its image, or has data behind it.
    pub(super) fn goes_on_with(&self, next: &Self) -> bool {
        match (&self.image, &next.image) {
            (Some(image), Some(next)) => next.piece == image.piece + 1,
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

/// What a server remembers.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Record {
    /// Its state at a checkpoint; the data is in the state engine. Written before the checkpoint as
    /// well as with it: a crash in between leaves new data, and then this image counts. Several records if it is
    /// large.
    Image(Arc<Image>),
    /// A record of a stream's log.
    Replication(PartitionId, replication::Record<Log>),
}

/// What machines say to each other.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Msg {
    /// Gateway → server: run this, and say what came of it. Sent again to anybody at any time; it
    /// runs once.
    Submit {
        /// The transaction.
        functor: Arc<Functor>,
    },
    /// Server → gateway: what came of a transaction, once it ran here.
    Answer {
        /// Which.
        txn: TxnId,
        /// What became of it.
        outcome: Outcome,
        /// What it read; nothing if its client knows that.
        reads: Reads,
    },
    /// Server → gateway: a transaction ran so long ago that it is forgotten what it read.
    TooOld {
        /// Which.
        txn: TxnId,
        /// What became of it; none if that is forgotten, too.
        outcome: Option<Outcome>,
    },
    /// Gateway → server: a client wants to see keys before it decides (reconnaissance).
    Look {
        /// Whose.
        txn: TxnId,
        /// Which round.
        round: u32,
        /// Which keys.
        keys: Vec<Key>,
    },
    /// Server → gateway: what the keys hold here; may be old.
    Found {
        /// Whose.
        txn: TxnId,
        /// Which round.
        round: u32,
        /// What there is.
        reads: Reads,
    },
    /// Server → sequencer: put this into the stream. From the server that was asked, and from any home
    /// that saw it in one stream and not in another (S6).
    Sequence {
        /// Which stream.
        stream: PartitionId,
        /// The transaction.
        entry: Arc<Sequenced>,
    },
    /// Server → whoever took it for the stream's sequencer.
    NotLeader {
        /// Which stream.
        partition: PartitionId,
        /// Who is, if it knows.
        leader: Option<NodeId>,
        /// What it was asked about.
        txn: Option<TxnId>,
    },
    /// Of a stream's log.
    Replication {
        /// Which stream.
        partition: PartitionId,
        /// What.
        message: replication::Message<Log>,
    },
    /// Server → servers of its region that hold other shares: what transactions read in the sender's share, taken
    /// when their turn came (Calvin §3.2). To whoever asked as well.
    RemoteReads {
        /// Of each transaction.
        parts: Vec<(Turn, Arc<Part>)>,
    },
    /// Server → a server of another share: what these transactions read there has not come.
    WantReads {
        /// Which.
        turns: Vec<Turn>,
    },
    /// Server → whoever asked: these have run here, and what they read is not kept any more.
    ReadsGone {
        /// Which.
        turns: Vec<Turn>,
    },
    /// Server → servers of other shares: everything up to here has run, and is in a durable checkpoint. What
    /// was read before is not asked for again.
    Covered {
        /// Of each stream.
        through: BTreeMap<PartitionId, Index>,
    },
    /// Server → a server of its share: it needs a state in which this has run, or the next piece of it.
    WantState {
        /// Counts the states that the sender has asked for.
        number: u64,
        /// What has run in it.
        past: Turn,
        /// Where the piece begins; none: the first.
        cursor: Option<usize>,
    },
    /// Server → whoever wanted it: a piece of its state.
    StatePiece {
        /// Which state.
        number: u64,
        /// The piece.
        chunk: Chunk,
        /// Where the next one begins, if there is one.
        next: Option<usize>,
    },
    /// Server → all others that hold the same: what entries of streams came to.
    Digests {
        /// Digests of all that ran of these entries.
        digests: Vec<(Span, u64)>,
    },
}

impl Message for Msg {
    fn kind(&self) -> &'static str {
        match self {
            Self::Submit { .. } => "Submit",
            Self::Answer { .. } => "Answer",
            Self::Look { .. } => "Look",
            Self::Found { .. } => "Found",
            Self::Sequence { .. } => "Sequence",
            Self::NotLeader { .. } => "NotLeader",
            Self::Replication { message, .. } => message.kind(),
            Self::RemoteReads { .. } => "RemoteReads",
            Self::WantReads { .. } => "WantReads",
            Self::ReadsGone { .. } => "ReadsGone",
            Self::Covered { .. } => "Covered",
            Self::WantState { .. } => "WantState",
            Self::StatePiece { .. } => "StatePiece",
            Self::TooOld { .. } => "TooOld",
            Self::Digests { .. } => "Digests",
        }
    }

    fn txn(&self) -> Option<TxnId> {
        match self {
            Self::Submit { functor } => Some(functor.txn),
            Self::Sequence { entry, .. } => Some(entry.functor.txn),
            Self::Answer { txn, .. }
            | Self::TooOld { txn, .. }
            | Self::Look { txn, .. }
            | Self::Found { txn, .. } => Some(*txn),
            Self::NotLeader { txn, .. } => *txn,
            Self::Replication { .. }
            | Self::RemoteReads { .. }
            | Self::WantReads { .. }
            | Self::ReadsGone { .. }
            | Self::Covered { .. }
            | Self::WantState { .. }
            | Self::StatePiece { .. }
            | Self::Digests { .. } => None,
        }
    }

    fn wire_size(&self) -> usize {
        self.size()
    }

    fn keys(&self) -> usize {
        match self {
            Self::Submit { functor } => functor.reads.len() + functor.writes.len(),
            Self::Sequence { entry, .. } => entry.functor.reads.len() + entry.functor.writes.len(),
            Self::Look { keys, .. } => keys.len(),
            Self::Found { reads, .. } => reads.len(),
            Self::RemoteReads { parts } => parts.iter().map(|(_, part)| part.reads.len()).sum(),
            Self::Answer { .. }
            | Self::NotLeader { .. }
            | Self::Replication { .. }
            | Self::WantReads { .. }
            | Self::ReadsGone { .. }
            | Self::Covered { .. }
            | Self::WantState { .. }
            | Self::StatePiece { .. }
            | Self::TooOld { .. }
            | Self::Digests { .. } => 0,
        }
    }
}

/// About how many bytes a [`Turn`] takes.
pub(super) const TURN: usize = 22 + TXN;
