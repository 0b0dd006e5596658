//! Fetches the versions that a node's replicas lack, from f + 1 replicas of each partition, by the
//! rule for readers (§5.3, V9).
//!
//! A *straggler* lacks visible versions that their coordinator wants to drop; every active replica
//! still has them above its Rwatermark. A node that *comes back*, or that does not know what
//! survives of a lost coordinator, may lack anything above the watermark up to which it was
//! complete, including settled versions.
//!
//! Of any f + 1 replicas one knows what survives of an incarnation that is out
//! ([`takeover::Closed`]). It reports that together with its own promises, because a new disk must
//! not break a promise of an old one. Copied data counts only when a checkpoint has made it
//! durable.

use orthodrome_core::Wire as _;
use orthodrome_core::id::{ClientId, NodeId, PartitionId};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::store::{Piece, Versions};
use orthodrome_core::time::{Duration, Time, Timestamp};
use orthodrome_core::txn::Key;

use super::directory::Life;
use super::message::{FLOOR, Msg, NAME, Rest};
use super::replica::Replica;
use super::server::World;
use super::state::{Image, Name, Named, Phase};
use super::takeover::{self, Acceptor};
use super::watermark::Members;
use super::{Config, Note};
use crate::waiting::{Paces, RetryState};

/// The data that a node is fetching.
#[derive(Debug)]
pub(super) struct Syncs {
    /// The number of the last question. Numbers begin with one that no other incarnation of this
    /// server uses, because an answer to an earlier incarnation describes an old state.
    round: u64,
    current: Option<Sync>,
    questions: Questions,
    /// Long answers, with the peers' questions, until a while after the last piece was sent: it may
    /// be lost, and then only that is asked for again.
    leaving: OrdMap<(NodeId, PartitionId), Leaving>,
    paces: Paces<Place>,
    /// What coordinators want to be confirmed.
    wanted: Ranges,
    /// All visible versions of this range are here, since the last copy for coordinators.
    confirmed: Option<(Timestamp, Timestamp)>,
}

/// For each coordinator, from which version to which.
type Ranges = OrdMap<NodeId, (Timestamp, Timestamp)>;

/// A place in an answer to a question of this number: after so many entries, or after a key.
#[derive(PartialEq, Debug)]
enum Place {
    Entry(u64, u64),
    Key(u64, Option<Key>),
}

/// An answer that is sent in pieces.
#[derive(Debug)]
struct Leaving {
    /// The question's number.
    round: u64,
    as_of: Timestamp,
    answer: Answer,
    /// When a piece was last asked for.
    asked: Time,
}

/// Questions to peers that wait for a piece, and how long pieces take. Answers are long. If they were
/// requested again before they can arrive, slow links would get slower, until not even votes
/// arrive. But links may also lose pieces, and then waiting does not help.
#[derive(Debug, Default)]
struct Questions {
    open: OrdMap<(PartitionId, NodeId), RetryState>,
    /// A peer that is gone must not slow down the copy from another one.
    pieces: OrdMap<NodeId, PieceTimes>,
}

/// How long pieces of one peer take, and how often it was late.
#[derive(Clone, Copy, Debug, Default)]
struct PieceTimes {
    /// How long they took lately, from the question that they answer.
    took: Option<Duration>,
    /// The number of times that the time-out was doubled since a piece arrived. Restarts of the copy
    /// do not reset it.
    doublings: u32,
}

impl PieceTimes {
    fn timeout(&self, config: &Config) -> Duration {
        let unknown = config.resend_after.max(config.directory.lease);
        let least = self.took.map_or(unknown, |took| (took * 4).max(config.resend_after));
        (least * (1 << self.doublings)).min(PATIENCE_MAX.max(unknown))
    }
}

impl Questions {
    /// A question is sent for the first time.
    fn ask(&mut self, partition: PartitionId, peer: NodeId, now: Time) {
        self.open.insert((partition, peer), RetryState::new(now));
    }

    /// The piece arrived. It answers the question that was sent at `asked`; an older version of the
    /// program does not say so.
    fn on_answer(&mut self, partition: PartitionId, peer: NodeId, asked: Option<Time>, now: Time) {
        let Some(last) = self.open.remove(&(partition, peer)) else { return };
        let Some(asked) = asked.or((last.times == 0).then_some(last.at)) else { return };
        let pieces = self.pieces.entry(peer).or_default();
        let took = now.since(asked);
        let before = pieces.took.unwrap_or(took);
        pieces.took = Some(took.max((before * 7 + took) / 8));
        pieces.doublings = 0;
    }

    /// Nothing more is expected from a partition.
    fn drop_all(&mut self, partition: PartitionId) {
        self.open.retain(|&(of, _), _| of != partition);
    }

    fn timeout(&self, peer: NodeId, config: &Config) -> Duration {
        self.pieces.get(&peer).copied().unwrap_or_default().timeout(config)
    }

    /// The questions that are asked again now.
    fn overdue(&mut self, config: &Config, now: Time) -> Vec<(PartitionId, NodeId)> {
        let is_late = |question: &(&(PartitionId, NodeId), &RetryState)| {
            let (&(_, peer), asked) = *question;
            now.since(asked.at) >= self.timeout(peer, config)
        };
        let overdue: Vec<_> = self.open.iter().filter(is_late).map(|(&late, _)| late).collect();
        for late in &overdue {
            if let Some(asked) = self.open.get_mut(late) {
                *asked = asked.again(now);
            }
        }
        let late: OrdSet<NodeId> = overdue.iter().map(|&(_, peer)| peer).collect();
        for peer in late {
            let pieces = self.pieces.entry(peer).or_default();
            pieces.doublings = (pieces.doublings + 1).min(DOUBLINGS);
        }
        overdue
    }

    /// How often a question was repeated.
    fn times(&self, partition: PartitionId, peer: NodeId) -> u32 {
        self.open.get(&(partition, peer)).map_or(0, |asked| asked.times)
    }
}

#[derive(Debug)]
struct Sync {
    round: u64,
    from: Timestamp,
    to: Timestamp,
    purpose: Purpose,
    /// The members at the beginning. Answers say what survives of incarnations that were out then.
    /// An incarnation that is out now may have stored versions after the answers were given.
    members: Members,
    open: OrdMap<PartitionId, Part>,
    /// Partitions whose settled versions have been copied.
    covered: Covered,
}

/// For each partition, the version below which a peer had settled everything when it was copied,
/// and the versions that it had not settled.
pub(super) type Covered = OrdMap<PartitionId, (Timestamp, OrdSet<Timestamp>)>;

/// The purpose of a copy.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Purpose {
    /// These coordinators wait for a confirmation that their ranges are here.
    Straggler(Ranges),
    /// To make the node complete.
    Whole(Whole),
}

/// A node's own state when it begins to make itself complete.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Whole {
    /// True if it was complete up to its own watermark, so that its own answer counts.
    pub is_intact: bool,
    /// The incarnation in which it began: versions that became visible before a later incarnation
    /// may still be missing.
    pub incarnation: Option<u32>,
    /// Incarnations that are out, of which each partition's replica may lack versions.
    pub owes: OrdMap<PartitionId, Vec<(NodeId, u32)>>,
}

impl Answer {
    /// The number of its entries and transaction ids.
    fn len(&self) -> u64 {
        (self.entries.len() + self.names.len() + self.forgotten.len()) as u64
    }

    /// A piece of about this number of bytes, after this number of entries and ids; and the number
    /// with this piece. Promises come first.
    fn piece(&self, skip: u64, bytes_max: usize) -> (Self, u64) {
        let mut bytes = 0;
        // At least one, however long it is.
        let mut fits = |size: usize| {
            let is_over = bytes > 0 && bytes >= bytes_max;
            bytes += size;
            !is_over
        };
        let skipped = usize::try_from(skip).unwrap_or(usize::MAX);
        let entries = self.entries.iter().skip(skipped);
        let entries = entries.take_while(|(_, image)| fits(image.size()));
        let entries: OrdMap<_, _> = entries.map(|(ts, image)| (*ts, image.clone())).collect();
        let names = self.names.iter().skip(skipped.saturating_sub(self.entries.len()));
        let names: Vec<_> = names.take_while(|_| fits(NAME)).copied().collect();
        let before = self.entries.len() + self.names.len();
        let forgotten = self.forgotten.iter().skip(skipped.saturating_sub(before));
        let forgotten: Vec<_> = forgotten.take_while(|_| fits(FLOOR)).copied().collect();
        let told = skip + (entries.len() + names.len() + forgotten.len()) as u64;
        let promises = if skip == 0 { self.promises.clone() } else { Vec::new() };
        (Self { settled: self.settled, entries, names, forgotten, promises }, told)
    }
}

/// The result of a step.
#[derive(Debug)]
pub(super) enum Done {
    /// Nothing has completed.
    Nothing,
    /// The node is complete, except for incarnations that have become out in the meantime.
    Whole(Whole),
}

/// The state of one partition.
#[derive(Debug)]
enum Part {
    /// Collecting the versions of peers above their watermarks.
    Asking(OrdMap<NodeId, Gathered>),
    /// Copying the versions that this peer has settled below its watermark, from a version on.
    Scanning {
        peer: NodeId,
        after: Option<Key>,
        from: Timestamp,
        below: Timestamp,
        /// Versions below that it has not settled.
        open: OrdSet<Timestamp>,
    },
}

/// The pieces of a peer's answer so far.
#[derive(Debug)]
struct Gathered {
    answer: Answer,
    as_of: Timestamp,
    /// The number of received entries; none if the answer is complete.
    next: Option<u64>,
}

/// A replica's versions in the range.
#[derive(Clone, Debug)]
pub(super) struct Answer {
    /// The replica has settled all versions up to this.
    pub settled: Timestamp,
    /// The unsettled versions.
    pub entries: OrdMap<Timestamp, Image>,
    /// Ids of transactions.
    pub names: Vec<(Named, Name)>,
    /// For clients, the counters below which transactions were forgotten.
    pub forgotten: Vec<(ClientId, u64)>,
    /// Its promises, and its knowledge of what survives of lost servers.
    pub promises: Vec<takeover::Record>,
}

impl Syncs {
    /// Starts with nothing to fetch.
    pub(super) fn new(life: Life, config: &Config) -> Self {
        let paces = Paces::new(config.piece_bytes);
        let (questions, leaving) = (Questions::default(), OrdMap::new());
        let (wanted, confirmed) = (Ranges::new(), None);
        Self { round: life.0, current: None, questions, leaving, paces, wanted, confirmed }
    }

    /// True if nothing is being fetched.
    pub(super) fn is_idle(&self) -> bool {
        self.current.is_none()
    }

    /// Handles the end of this node's lease: no coordinator waits for its confirmations any more.
    /// The copy that makes it complete continues, because over a slow link it takes longer than a
    /// lease lasts.
    pub(super) fn on_ended(&mut self) {
        let is_whole = |sync: &Sync| matches!(sync.purpose, Purpose::Whole(_));
        self.current = self.current.take().filter(is_whole);
        self.wanted.clear();
        self.confirmed = None;
    }

    /// Handles a coordinator's request to confirm the visible versions of a range. One copy serves all
    /// coordinators that have asked: they often lack the same answers, of one cut link.
    pub(super) fn on_missing(
        &mut self,
        coordinator: NodeId,
        (from, to): (Timestamp, Timestamp),
        replica: &mut Replica,
        world: &mut World<'_, '_>,
    ) -> Done {
        if to >= world.marks.visible {
            // The coordinator will repeat the request.
            return Done::Nothing;
        }
        if self.confirmed.is_some_and(|(first, last)| first <= from && to <= last) {
            // It must not widen the next copy.
            self.wanted.remove(&coordinator);
            world.reply(coordinator, Msg::Have { from, to });
            return Done::Nothing;
        }
        self.wanted.insert(coordinator, (from, to));
        if self.current.is_some() {
            return Done::Nothing;
        }
        world.cx.note(Note::Pulled);
        let wanted = std::mem::take(&mut self.wanted);
        let first = wanted.values().map(|(from, _)| *from).fold(from, Timestamp::min);
        let last = wanted.values().map(|(_, to)| *to).fold(to, Timestamp::max);
        self.begin((first, last), Purpose::Straggler(wanted), replica, world)
    }

    /// Begins to make this node complete: it may lack anything below the Vwatermark, and versions
    /// of incarnations that are out.
    pub(super) fn complete(
        &mut self,
        whole: Whole,
        replica: &mut Replica,
        world: &mut World<'_, '_>,
    ) -> Done {
        world.cx.note(Note::CaughtUp);
        let to = Timestamp(world.marks.visible.0.saturating_sub(1));
        // Versions that were settled without a result here may have been garbage-collected at all
        // other replicas.
        let from = if whole.is_intact { replica.first_open() } else { Timestamp::ZERO };
        self.begin((from, to), Purpose::Whole(whole), replica, world)
    }

    fn begin(
        &mut self,
        (from, to): (Timestamp, Timestamp),
        purpose: Purpose,
        replica: &mut Replica,
        world: &mut World<'_, '_>,
    ) -> Done {
        self.round = self.round.wrapping_add(1);
        let asking = |&partition: &PartitionId| (partition, Part::Asking(OrdMap::new()));
        let open: OrdMap<PartitionId, Part> = replica.held().iter().map(asking).collect();
        let partitions: Vec<PartitionId> = open.keys().copied().collect();
        let (round, covered) = (self.round, Covered::new());
        let members = world.members.clone();
        self.current = Some(Sync { round, from, to, purpose, members, open, covered });
        self.ask_all(world);
        // A node without replicas has nothing to fetch.
        let mut done = if partitions.is_empty() { self.end(replica, world) } else { Done::Nothing };
        for partition in partitions {
            if let Some(own) = self.own(partition, replica, world) {
                let piece = Rest { as_of: Timestamp::ZERO, skip: 0 };
                let at = (partition, self.round, piece, None);
                done = self.on_piece(world.node, at, (own, None), replica, world);
            }
        }
        done
    }

    /// This node's own answer, if it counts.
    fn own(
        &self,
        partition: PartitionId,
        replica: &Replica,
        world: &World<'_, '_>,
    ) -> Option<Answer> {
        let sync = self.current.as_ref()?;
        let counts = match &sync.purpose {
            Purpose::Straggler(_) => true,
            Purpose::Whole(whole) => whole.is_intact,
        };
        let to = sync.reach();
        counts.then(|| Answer {
            promises: world.promises(partition),
            ..replica.answer(partition, (sync.from, to), world.cluster)
        })
    }

    /// Asks every replica of every partition.
    fn ask_all(&mut self, world: &mut World<'_, '_>) {
        self.questions.open.clear();
        let Some(sync) = &self.current else { return };
        for &partition in sync.open.keys() {
            let placed = world.cluster.partition(partition);
            for &peer in placed.into_iter().flat_map(|placed| &placed.replicas) {
                if peer != world.node {
                    self.questions.ask(partition, peer, world.cx.now());
                    sync.send(partition, peer, world);
                }
            }
        }
    }

    /// Handles a peer's question for the versions here.
    pub(super) fn on_pull(
        &mut self,
        peer: NodeId,
        (partition, round, rest, asked): (PartitionId, u64, Option<Rest>, Option<Time>),
        range: (Timestamp, Timestamp),
        replica: &Replica,
        world: &mut World<'_, '_>,
    ) {
        // A repeated question gets the same answer. Two answers would be restarted alternately for
        // ever.
        let now = world.cx.now();
        let kept = self.leaving.remove(&(peer, partition)).filter(|kept| kept.round == round);
        let is_of = |rest: &Rest| kept.as_ref().is_some_and(|kept| kept.as_of == rest.as_of);
        let skip = rest.filter(is_of).map_or(0, |rest| rest.skip);
        let place = (Place::Entry(round, skip), kept.is_none());
        let bytes = self.pace((peer, partition), place, world);
        let Leaving { as_of, answer, .. } = kept.unwrap_or_else(|| {
            let promises = world.promises(partition);
            let answer = replica.answer(partition, range, world.cluster);
            let answer = Answer { promises, ..answer };
            Leaving { round, as_of: world.cx.clock().now, answer, asked: now }
        });
        let (piece, told) = answer.piece(skip, bytes);
        let is_all = told == answer.len();
        let Answer { settled, entries, names, forgotten, promises } = piece;
        let entries = entries.into_iter().collect();
        let (piece, next) = (Rest { as_of, skip }, (!is_all).then_some(told));
        if !is_all || skip > 0 {
            self.leaving.insert((peer, partition), Leaving { round, as_of, answer, asked: now });
        }
        let msg = Msg::Pulled {
            partition,
            round,
            piece,
            next,
            settled,
            entries,
            names,
            forgotten,
            promises,
            asked,
        };
        world.reply(peer, msg);
    }

    /// The current length of a piece of an answer.
    fn pace(
        &mut self,
        answer: (NodeId, PartitionId),
        place: (Place, bool),
        world: &World<'_, '_>,
    ) -> usize {
        // No lease may end because a piece delays the message that extends it.
        let within = world.config.directory.lease / 3;
        self.paces.next(answer, place, world.cx.now(), within)
    }

    /// Handles a replica's request for the next piece of settled versions.
    pub(super) fn on_scan(
        &mut self,
        peer: NodeId,
        (partition, round): (PartitionId, u64),
        (from, after): (Timestamp, Option<&Key>),
        replica: &Replica,
        world: &World<'_, '_>,
    ) -> (Vec<(Key, Versions)>, Option<Key>) {
        let place = (Place::Key(round, after.cloned()), after.is_none());
        let bytes = self.pace((peer, partition), place, world);
        let most = (world.config.chunk_keys, bytes);
        let Piece { keys, next } = replica.store.piece_within(partition, after, most);
        let keys = keys.into_iter().filter_map(|(key, mut versions)| {
            versions.retain(|(version, _)| version.timestamp >= from);
            (!versions.is_empty()).then_some((key, versions))
        });
        (keys.collect(), next)
    }

    /// Handles a piece of a replica's versions.
    pub(super) fn on_piece(
        &mut self,
        peer: NodeId,
        (partition, round, piece, asked): (PartitionId, u64, Rest, Option<Time>),
        (answer, next): (Answer, Option<u64>),
        replica: &mut Replica,
        world: &mut World<'_, '_>,
    ) -> Done {
        let Some(sync) = &mut self.current else { return Done::Nothing };
        let Some(Part::Asking(answers)) = sync.open.get_mut(&partition) else {
            return Done::Nothing;
        };
        if sync.round != round {
            return Done::Nothing;
        }
        match answers.get_mut(&peer) {
            Some(held) if held.next.is_none() => return Done::Nothing,
            Some(held) if held.rest() == Some(piece) => held.add(answer, next),
            Some(held) if held.as_of == piece.as_of => return Done::Nothing,
            // If the answer was restarted, pieces of the earlier one do not count.
            None | Some(_) if piece.skip == 0 => {
                answers.insert(peer, Gathered { answer, as_of: piece.as_of, next });
            }
            None | Some(_) => return Done::Nothing,
        }
        let now = world.cx.now();
        self.questions.on_answer(partition, peer, asked, now);
        if answers.get(&peer).is_some_and(|held| held.next.is_some()) {
            self.questions.ask(partition, peer, now);
            sync.send(partition, peer, world);
            return Done::Nothing;
        }
        let all = world.cluster.partition(partition).map_or(0, |placed| placed.replicas.len());
        let is_whole = |held: &Gathered| held.next.is_none();
        if answers.values().filter(|held| is_whole(held)).count() <= all / 2 {
            return Done::Nothing;
        }
        let answers = std::mem::take(answers).into_iter();
        let answers: OrdMap<NodeId, Answer> = answers
            .filter(|(_, held)| is_whole(held))
            .map(|(peer, held)| (peer, held.answer))
            .collect();
        let Some((peer, best)) = best(&answers, world.node) else { return Done::Nothing };
        let below = best.settled;
        let open = best.entries.keys().copied().collect();
        let is_whole = matches!(sync.purpose, Purpose::Whole(_));
        // Earlier copies remain valid, regardless of incarnations and leases that have ended since.
        let from = replica.lacks_from(partition, sync.from);
        sync.take_in(partition, &answers, replica, world);
        self.questions.drop_all(partition);
        if is_whole && below > sync.from && peer != world.node {
            if below > from {
                let after = None;
                sync.open.insert(partition, Part::Scanning { peer, after, from, below, open });
                self.questions.ask(partition, peer, now);
                sync.send(partition, peer, world);
                return Done::Nothing;
            }
            world.cx.note(Note::CopyResumed);
            sync.covered.insert(partition, (below, open));
        }
        sync.open.remove(&partition);
        self.end(replica, world)
    }

    /// Handles a piece of a peer's settled versions.
    pub(super) fn on_scanned(
        &mut self,
        from: NodeId,
        (partition, round, asked): (PartitionId, u64, Option<Time>),
        (keys, next, settled): (Vec<(Key, Versions)>, Option<Key>, Timestamp),
        replica: &mut Replica,
        world: &mut World<'_, '_>,
    ) -> Done {
        let Some(sync) = &mut self.current else { return Done::Nothing };
        let Some(Part::Scanning { peer, after, below, open, .. }) = sync.open.get_mut(&partition)
        else {
            return Done::Nothing;
        };
        let is_next =
            after.as_ref().is_none_or(|after| keys.first().is_none_or(|(key, _)| key > after));
        if sync.round != round || from != *peer || !is_next {
            return Done::Nothing;
        }
        if settled < *below {
            // The peer has restarted, and has not settled again everything that it had reported.
            let (range, purpose) = ((sync.from, sync.to), sync.purpose.clone());
            return self.begin(range, purpose, replica, world);
        }
        replica.store.put_copies(partition, keys);
        let (peer, now) = (*peer, world.cx.now());
        self.questions.on_answer(partition, peer, asked, now);
        if let Some(next) = next {
            *after = Some(next);
            // As long as pieces arrive, no other peer is asked, however much there is to copy.
            self.questions.ask(partition, peer, now);
            sync.send(partition, peer, world);
            return Done::Nothing;
        }
        sync.covered.insert(partition, (*below, std::mem::take(open)));
        sync.open.remove(&partition);
        self.end(replica, world)
    }

    fn end(&mut self, replica: &mut Replica, world: &mut World<'_, '_>) -> Done {
        if self.current.as_ref().is_none_or(|sync| !sync.open.is_empty()) {
            return Done::Nothing;
        }
        let Some(sync) = self.current.take() else { return Done::Nothing };
        self.questions.open.clear();
        replica.drop_covered(sync.from, &sync.covered, world);
        match sync.purpose {
            Purpose::Straggler(wanted) => {
                self.confirmed = Some((sync.from, sync.to));
                for (coordinator, (from, to)) in wanted {
                    world.reply(coordinator, Msg::Have { from, to });
                }
                Done::Nothing
            }
            Purpose::Whole(whole) => Done::Whole(whole),
        }
    }

    /// Repeats unanswered questions.
    pub(super) fn on_sweep(&mut self, replica: &mut Replica, world: &mut World<'_, '_>) -> Done {
        let now = world.cx.now();
        self.leaving.retain(|_, kept| now.since(kept.asked) < KEPT);
        let Some(sync) = &self.current else { return Done::Nothing };
        let overdue = self.questions.overdue(world.config, now);
        if overdue.is_empty() {
            return Done::Nothing;
        }
        world.cx.note(Note::Resent);
        let is_active = |peer: NodeId| world.members.active().any(|(active, _)| active == peer);
        let is_hopeless = sync.open.iter().any(|(&partition, part)| match part {
            // All replicas are asked; earlier questions will still be answered, however slow the
            // link is.
            Part::Asking(_) => false,
            // A server that is out may still run, and be the only one that does.
            Part::Scanning { peer, .. } => {
                let most = if is_active(*peer) { ATTEMPTS } else { ATTEMPTS_OUT };
                self.questions.times(partition, *peer) > most
            }
        });
        if is_hopeless {
            // Any other peer will do if this one is gone.
            let (range, purpose) = ((sync.from, sync.to), sync.purpose.clone());
            return self.begin(range, purpose, replica, world);
        }
        for (partition, peer) in overdue {
            sync.send(partition, peer, world);
        }
        Done::Nothing
    }
}

impl Gathered {
    fn add(&mut self, answer: Answer, next: Option<u64>) {
        self.answer.entries.extend(answer.entries);
        self.answer.names.extend(answer.names);
        self.answer.forgotten.extend(answer.forgotten);
        self.next = next;
    }

    /// The next piece to ask for, if the answer is incomplete.
    fn rest(&self) -> Option<Rest> {
        self.next.map(|skip| Rest { as_of: self.as_of, skip })
    }
}

impl Sync {
    /// Asks a peer for the piece of a partition that comes next, if one does.
    fn send(&self, partition: PartitionId, peer: NodeId, world: &mut World<'_, '_>) {
        let (round, from, to) = (self.round, self.from, self.reach());
        let asked = Some(world.cx.now());
        match self.open.get(&partition) {
            Some(Part::Asking(answers)) => {
                let held = answers.get(&peer);
                let rest = held.and_then(Gathered::rest);
                if held.is_none() || rest.is_some() {
                    world.send(peer, Msg::Pull { partition, round, from, to, rest, asked });
                }
            }
            Some(Part::Scanning { peer: of, after, from, .. }) if *of == peer => {
                let (from, after) = (*from, after.clone());
                world.send(peer, Msg::Scan { partition, round, from, after, asked });
            }
            Some(Part::Scanning { .. }) | None => {}
        }
    }

    /// The last version to ask for: versions of incarnations that are out are decided, however high
    /// they are.
    fn reach(&self) -> Timestamp {
        match self.purpose {
            Purpose::Straggler(_) => self.to,
            Purpose::Whole(_) => Timestamp::MAX,
        }
    }

    /// Adopts the result of enough replicas' answers.
    fn take_in(
        &self,
        partition: PartitionId,
        answers: &OrdMap<NodeId, Answer>,
        replica: &mut Replica,
        world: &mut World<'_, '_>,
    ) {
        let Some((_, best)) = best(answers, world.node) else { return };
        let own_word = answers.get(&world.node);
        // One of this number of replicas knows what survives of each incarnation that is out.
        let mut promised = Acceptor::default();
        for answer in answers.values() {
            replica.learn_forgotten(&answer.forgotten, world);
            replica.learn_names(&answer.names, world);
            for record in &answer.promises {
                promised.learn(record.clone());
            }
        }
        for record in promised.promises() {
            world.promise(partition, record);
        }
        let is_whole = matches!(self.purpose, Purpose::Whole(_));
        let has_lost = matches!(&self.purpose, Purpose::Whole(whole) if !whole.is_intact);
        let mine = replica.answer(partition, (self.from, self.reach()), world.cluster);
        let reported = answers.values().flat_map(|answer| answer.entries.keys());
        let versions: OrdSet<Timestamp> = reported.chain(mine.entries.keys()).copied().collect();
        for ts in versions {
            let is_over = |own: &Answer| ts < own.settled && !own.entries.contains_key(&ts);
            if own_word.is_some_and(is_over) {
                // It was settled here, or it is void.
                continue;
            }
            let is_settled = ts < best.settled;
            if is_settled && !is_whole {
                // A straggler has all versions that others have settled: they could not have
                // settled them without it.
                continue;
            }
            let counts = |answer: &&Answer| !is_settled || std::ptr::eq(*answer, best);
            let held: Vec<&Image> = answers
                .values()
                .filter(counts)
                .filter_map(|answer| answer.entries.get(&ts))
                .collect();
            let own = mine.entries.get(&ts);
            let Some(any) = held.first().copied().or(own) else { continue };
            let is_out = any.incarnation <= self.members.settled_through(world.owner(ts));
            // The acknowledgements of a lost disk counted, and no server will send those versions
            // again (seed 6002794). A version that no other replica has arrived here since.
            let is_counted = has_lost && !held.is_empty();
            if is_sent_again(ts, self.to, best.settled) && !is_out && !is_counted {
                continue;
            }
            let closed = promised.closed(world.owner(ts), any.incarnation).filter(|_| is_out);
            if let Some(closed) = closed.filter(|closed| !is_settled && closed.voids(ts)) {
                let (ballot, phase) = (closed.ballot, Phase::Aborted);
                adopt(
                    ts,
                    Image { ballot, phase, output: None, ..any.clone() },
                    own,
                    replica,
                    world,
                );
                continue;
            }
            match verdict(&held) {
                Some(image) => adopt(ts, image, own, replica, world),
                None if is_settled => {}
                None => {
                    // No replica that must know it does, so it was never committed.
                    let image = Image { phase: Phase::Aborted, output: None, ..any.clone() };
                    adopt(ts, image, own, replica, world);
                }
            }
        }
    }
}

/// The replica that has settled most. A peer is preferred to this node while there is a version
/// that this node has not computed: others may have computed it, and have garbage-collected what
/// that needs.
fn best(answers: &OrdMap<NodeId, Answer>, node: NodeId) -> Option<(NodeId, &Answer)> {
    let is_open = |image: &Image| image.phase != Phase::Aborted && image.output.is_none();
    let lacks =
        |answer: &Answer| answer.entries.range(..answer.settled).any(|(_, image)| is_open(image));
    let best = answers
        .iter()
        .max_by_key(|&(&peer, answer)| (peer != node || !lacks(answer), answer.settled));
    best.map(|(&peer, answer)| (peer, answer))
}

/// True if the coordinator of a version above the copied range sends it again. Nobody sends what a
/// peer has settled: this node was out then, and the copy counts as complete up to what the peer
/// has settled (seed 130000068).
fn is_sent_again(ts: Timestamp, to: Timestamp, settled: Timestamp) -> bool {
    ts > to && ts >= settled
}

/// The state of a version, by the rule for readers.
fn verdict(held: &[&Image]) -> Option<Image> {
    let ballot = held.iter().map(|image| image.ballot).max()?;
    let of_ballot = || held.iter().filter(|image| image.ballot == ballot);
    let is_aborted = of_ballot().any(|image| image.phase == Phase::Aborted);
    let image = of_ballot().find(|image| (image.phase == Phase::Aborted) == is_aborted)?;
    let mut image = (*image).clone();
    if is_aborted {
        image.output = None;
    } else if image.output.is_none() {
        image.output = held.iter().find_map(|image| image.output.clone());
    }
    Some(image)
}

fn adopt(
    ts: Timestamp,
    image: Image,
    own: Option<&Image>,
    replica: &mut Replica,
    world: &mut World<'_, '_>,
) {
    let is_known = own.is_some_and(|own| {
        own.ballot >= image.ballot
            && (own.phase == Phase::Aborted) == (image.phase == Phase::Aborted)
            && (own.output.is_some() || image.output.is_none())
    });
    if !is_known {
        replica.adopt(ts, image, world);
    }
}

/// The maximum number of times that the time-out doubles.
const DOUBLINGS: u32 = 4;

/// How long an answer is kept after a piece of it was asked for: some questions about the next one
/// may be lost, and each waits for its time-out.
const KEPT: Duration = Duration::from_secs(20);

/// The maximum time-out: a connection that is slower breaks.
const PATIENCE_MAX: Duration = Duration::from_secs(5);

/// The number of questions without a piece of a copy after which another peer is asked.
const ATTEMPTS: u32 = 4;

/// The same for a peer that the directory has put out.
const ATTEMPTS_OUT: u32 = 2;

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use orthodrome_core::cluster::Cluster;
    use orthodrome_core::id::TxnId;
    use orthodrome_core::machine::Protocol as _;
    use orthodrome_core::topology::Topology;

    use super::super::OceanVista;
    use super::super::message::{Body, Functor};
    use super::super::state::{Fate, named};
    use super::*;

    fn txn(counter: u64) -> TxnId {
        TxnId::new(ClientId(1), counter)
    }

    /// Ten versions and ten names.
    fn answer() -> Answer {
        let image = |number| Image {
            functor: Arc::new(Functor {
                txn: txn(number),
                reads: Vec::new(),
                writes: vec![Key::from("k")],
                body: Body::Ops(Vec::new()),
                acknowledged_below: 0,
            }),
            incarnation: 1,
            ballot: 0,
            phase: Phase::Tentative,
            output: None,
        };
        let name = |number| Name { attempt: 0, ts: Timestamp(number), fate: Fate::At };
        Answer {
            settled: Timestamp(1),
            entries: (1..=10).map(|number| (Timestamp(number), image(number))).collect(),
            names: (1..=10).map(|number| (named(txn(number)), name(number))).collect(),
            forgotten: (1..=10).map(|number| (ClientId(number), number)).collect(),
            promises: vec![takeover::Record::Swept { server: NodeId(1), incarnation: 1 }],
        }
    }

    /// With a time-out that doubled for each lost piece, up to five seconds, and halved only when a
    /// copy was complete, copies over links that lose a fifth of all packets never were (seed
    /// 8002017).
    #[test]
    fn lost_pieces_are_asked_for_again_as_soon_as_they_are_late() {
        let config = OceanVista::configure(
            &Cluster::spread(
                Topology::uniform(3, Duration::from_micros(500), Duration::from_millis(20)),
                1,
                1,
                1,
                3,
            )
            .unwrap(),
            super::super::NAME,
        );
        let (of, peer) = (PartitionId(0), NodeId(1));
        let at = |ms| Time::from_millis(ms);
        let mut questions = Questions::default();
        questions.ask(of, peer, at(0));
        let unknown = config.resend_after.max(config.directory.lease);
        assert_eq!(questions.timeout(peer, &config), unknown);
        // Nobody answers: the link may be slow.
        let mut now = Time::ZERO;
        for doublings in 0..DOUBLINGS {
            assert_eq!(
                questions.timeout(peer, &config),
                (unknown * (1 << doublings)).min(PATIENCE_MAX)
            );
            now = now + questions.timeout(peer, &config);
            assert_eq!(questions.overdue(&config, now), [(of, peer)]);
            assert_eq!(questions.overdue(&config, now), []);
        }
        // An older version of the program does not say which of the questions it answers.
        let patient = questions.timeout(peer, &config);
        questions.on_answer(of, peer, None, now);
        assert_eq!(questions.timeout(peer, &config), patient);
        // The answer to the second question is as quick as if the first had not been lost.
        questions.ask(of, peer, now);
        now = now + questions.timeout(peer, &config);
        assert_eq!(questions.overdue(&config, now), [(of, peer)]);
        questions.on_answer(of, peer, Some(now), now + Duration::from_millis(20));
        assert_eq!(
            questions.timeout(peer, &config),
            config.resend_after.max(Duration::from_millis(80))
        );
        questions.ask(of, peer, now);
        questions.on_answer(of, peer, None, now + Duration::from_millis(500));
        assert_eq!(questions.timeout(peer, &config), Duration::from_secs(2), "the link is slow");
        // Another peer that never answers is asked less and less often, and this one is not.
        let (gone, before) = (NodeId(2), questions.timeout(peer, &config));
        questions.ask(of, gone, now);
        let late = now + PATIENCE_MAX;
        assert_eq!(questions.overdue(&config, late), [(of, gone)]);
        assert_eq!(
            questions.timeout(gone, &config),
            PieceTimes { doublings: 1, took: None }.timeout(&config)
        );
        assert_eq!(questions.timeout(peer, &config), before);
    }

    /// A node that knew an old Vwatermark left out what a peer had settled above that and not yet
    /// computed. It counted that as copied, and never asked for it again (seed 130000068).
    #[test]
    fn what_a_peer_has_settled_above_the_own_watermark_is_copied() {
        let (to, settled) = (Timestamp(10), Timestamp(20));
        let sent = |ts| is_sent_again(Timestamp(ts), to, settled);
        assert!(!sent(10), "it was visible here when the copy began");
        assert!(!sent(11) && !sent(19), "the peer has settled it");
        assert!(sent(20) && sent(21));
        assert!(is_sent_again(Timestamp(11), to, Timestamp(5)), "the peer lags");
    }

    #[test]
    fn pieces_of_any_size_make_up_the_answer() {
        let whole = answer();
        let (mut most, mut least) = (0, usize::MAX);
        for bytes_max in [0, 1, 40, 100, 300, 1_000, 100_000] {
            let mut gathered: Option<Gathered> = None;
            let mut pieces = 0;
            loop {
                let skip = gathered.as_ref().map_or(0, |held| held.next.unwrap());
                let (piece, told) = whole.piece(skip, bytes_max);
                pieces += 1;
                let next = (told < whole.len()).then_some(told);
                match &mut gathered {
                    Some(held) => held.add(piece, next),
                    None => {
                        gathered = Some(Gathered { answer: piece, as_of: Timestamp::ZERO, next });
                    }
                }
                if next.is_none() || pieces > 30 {
                    break;
                }
            }
            let Gathered { answer, next, .. } = gathered.unwrap();
            assert_eq!(
                (answer.entries, answer.names, answer.forgotten),
                (whole.entries.clone(), whole.names.clone(), whole.forgotten.clone())
            );
            assert_eq!((answer.promises.len(), next), (1, None));
            (most, least) = (most.max(pieces), least.min(pieces));
        }
        assert_eq!((most, least), (30, 1));
    }
}
