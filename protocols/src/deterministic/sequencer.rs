//! The state of a stream's leader: transactions that are about to enter the stream (Sloth §4.2.1).
//! It is lost with its leadership and never needed afterwards: every node that waits for a
//! transaction sends it again.

use std::mem::take;
use std::sync::Arc;

use orthodrome_core::Wire as _;
use orthodrome_core::id::{ClientId, PartitionId, RegionId};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::scan::is_fence;
use orthodrome_core::time::{Clock, Time, Timestamp};
use orthodrome_core::txn::Key;

use super::merge::Place;
use super::message::{Command, Name, Sequenced};
use super::placement::Placement;
use super::state::State;
use super::{Config, Note, Ordering};
use crate::replication::Index;

/// The most keys that are watched for a move at a time.
const GUESTS_MAX: usize = 65_536;
/// About the most keys that are away from their placement.
const AWAY_MAX: usize = 65_536;
/// About the most keys that have ever moved: every server remembers, in every image, how often each
/// of them has moved. A key that has moved before may move again.
const MOVED_MAX: usize = 262_144;

/// The most clients whose acknowledgements one entry contains; the next entry continues.
const NEWS_MAX: usize = 16_384;

/// How often the number of transactions after which a key moves is doubled.
const DOUBLED_MAX: u64 = 10;

/// A stream's leader.
#[derive(Debug, Default)]
pub(super) struct Sequencer {
    /// All transactions here, and those proposed but not chosen, with their sizes in bytes.
    taken: OrdMap<Name, usize>,
    taken_bytes: usize,
    /// Transactions held until all homes have them, by the time of release here, and then by the
    /// time on which all homes agree (S1).
    held: OrdMap<(Time, Timestamp, Name), Arc<Sequenced>>,
    /// Transactions that are not admitted while others on their keys wait for long (S1).
    closed: Vec<Arc<Sequenced>>,
    /// Transactions for the next batch.
    batch: Vec<Arc<Sequenced>>,
    /// Transactions that are proposed but not chosen.
    proposed: OrdSet<Name>,
    /// The last position in the orderer's stream of which a piece was added to the batch.
    pieced: Option<Place>,
    /// Keys that other regions access: the region, and the number of consecutive accesses.
    guests: OrdMap<Key, (RegionId, u32)>,
    /// The acknowledgements of clients that are in the stream or proposed to it.
    told: OrdMap<ClientId, u64>,
    /// The entry of the last proposed acknowledgement.
    acknowledging: Index,
    /// True if the next proposal is a `Forget`, if anything can be forgotten.
    is_forgetting_next: bool,
}

/// What a sequencer needs to know of its server.
pub(super) struct View<'a> {
    pub stream: PartitionId,
    pub state: &'a State,
    pub placement: &'a Placement,
    pub config: &'a Config,
    pub now: Time,
    pub clock: Clock,
}

impl View<'_> {
    /// True if `entry` is not admitted for now, because a transaction on its keys has waited for
    /// long. An entry that is already in another stream is admitted: it waits there, and others
    /// wait for it.
    fn is_closed(&self, entry: &Sequenced) -> bool {
        if self.config.mutations.is_unbounded() || !self.is_new(entry) {
            return false;
        }
        let keys = entry.functor.reads.iter().chain(&entry.functor.writes);
        let here = keys.filter(|key| self.orders(entry, key));
        let since = self.state.merge.waits_since(self.stream, here);
        since.is_some_and(|since| self.now.since(since) >= self.config.close_after)
    }

    /// True if `entry` has several homes and is in no stream yet, as far as this server knows.
    fn is_new(&self, entry: &Sequenced) -> bool {
        let closes_cycles = entry.is_multi_home() && self.placement.orderer().is_none();
        closes_cycles && !self.state.merge.contains(entry.name())
    }

    /// True if `entry` must be given to this stream: it is one of its homes, and does not take it
    /// from an orderer.
    fn expects(&self, entry: &Sequenced) -> bool {
        let first = self.placement.orderer().filter(|_| entry.is_multi_home());
        first.map_or_else(|| entry.homes.contains(&self.stream), |first| first == self.stream)
    }

    /// True if there is room to remember that `key` is at `target`. There always is room for its
    /// original placement.
    fn may_move(&self, key: &Key, target: PartitionId) -> bool {
        let (counts, placed) = (self.state.moved_counts(), self.placement.stream_of(key));
        let is_away = self.state.home(key, self.placement).stream != placed;
        let is_known = self.state.has_moved(key) || counts.ever < MOVED_MAX;
        target == placed || is_away || (counts.away < AWAY_MAX && is_known)
    }

    /// True if this stream orders accesses to `key`, as `entry` assumes.
    fn orders(&self, entry: &Sequenced, key: &Key) -> bool {
        entry.is_ordered_by(self.stream, key, |key| self.placement.stream_of(key))
    }
}

impl Sequencer {
    /// The number of transactions that are about to enter the stream.
    pub fn len(&self) -> usize {
        self.held.len() + self.closed.len() + self.batch.len()
    }

    /// True if there is a batch to propose.
    pub fn has_batch(&self) -> bool {
        !self.batch.is_empty()
    }

    /// With an orderer: takes pieces of the transactions that it has ordered, in its order. Only
    /// for a leader that has applied everything that earlier leaders left, so that no piece comes
    /// before an earlier one.
    pub fn follow_orderer(&mut self, view: &View<'_>) {
        let pieces = view
            .state
            .merge
            .ordered(view.stream, self.pieced)
            .map(|(place, entry)| (place, entry.piece(|key| view.orders(entry, key))));
        for (place, piece) in pieces.collect::<Vec<_>>() {
            self.pieced = Some(place);
            self.batch.push(piece);
        }
    }

    /// A node wants `entry` in the stream.
    pub fn take(&mut self, entry: Arc<Sequenced>, view: &View<'_>) -> Option<Note> {
        let name = entry.name();
        assert!(view.expects(&entry), "{name} has no business in {}: {entry:?}", view.stream);
        if view.state.is_sequenced(view.stream, &entry) || self.taken.contains_key(&name) {
            return Some(Note::RepeatedSequence);
        }
        if self.is_over(&entry, view) {
            return Some(Note::RepeatedSequence);
        }
        // A transaction that is in another stream is always admitted: the transactions that are not
        // admitted wait for it.
        let (size, bytes_max) = (entry.size(), view.config.in_flight_bytes);
        let is_over = self.taken_bytes > 0 && self.taken_bytes + size > bytes_max;
        let is_full = is_over || self.taken.len() >= view.config.in_flight_max;
        if is_full && !view.state.merge.contains(name) {
            return Some(Note::Shed);
        }
        self.taken.insert(name, size);
        self.taken_bytes += size;
        if !view.config.mutations.is_unbounded() && view.is_new(&entry) {
            let ahead = entry.due.0.saturating_sub(view.clock.now.0);
            let wait = orthodrome_core::Duration::from_nanos(ahead).min(view.config.hold_max);
            if !wait.is_zero() {
                self.held.insert((view.now + wait, entry.due, name), entry);
                return Some(Note::Held);
            }
        }
        self.admit(entry, view)
    }

    /// True if the client of `entry` knows its outcome, according to the stream and everything
    /// proposed to it. If the entry waits in another stream under this name, other transactions
    /// there wait for it, and it is admitted.
    fn is_over(&self, entry: &Sequenced, view: &View<'_>) -> bool {
        let txn = entry.functor.txn;
        let proposed = self.told.get(&txn.client).is_some_and(|&below| txn.counter < below);
        let is_over = proposed || view.state.is_over(view.stream, txn);
        let is_over = is_over && !view.config.mutations.runs_repeated();
        is_over && entry.target.is_none() && !view.state.merge.contains(entry.name())
    }

    /// Records an acknowledgement of a client that is about to be proposed.
    fn tell(&mut self, client: ClientId, below: u64) {
        let told = self.told.entry(client).or_default();
        *told = (*told).max(below);
    }

    /// Admits `entry`, unless its keys are closed.
    fn admit(&mut self, entry: Arc<Sequenced>, view: &View<'_>) -> Option<Note> {
        if view.is_closed(&entry) {
            self.closed.push(entry);
            return Some(Note::Closed);
        }
        self.batch.push(entry);
        None
    }

    /// When the first transaction that is held will be released.
    pub fn next_release(&self) -> Option<Time> {
        self.held.first_key_value().map(|(&(at, ..), _)| at)
    }

    /// Releases transactions whose time has come.
    pub fn release(&mut self, view: &View<'_>) -> Vec<Note> {
        let mut notes = Vec::new();
        while self.next_release().is_some_and(|at| at <= view.now)
            && let Some((_, entry)) = self.held.pop_first()
        {
            notes.extend(self.admit(entry, view));
        }
        notes
    }

    /// Admits transactions whose keys are open again, in the order on which all homes agree.
    pub fn reopen(&mut self, view: &View<'_>) {
        let mut closed = take(&mut self.closed);
        closed.sort_by_key(|entry| (entry.due, entry.functor.txn));
        for entry in closed {
            self.admit(entry, view);
        }
    }

    /// The next batch to propose.
    pub fn next_batch(&mut self, view: &View<'_>) -> Option<Command> {
        for entry in take(&mut self.batch) {
            // An earlier leader may have proposed some of it.
            if view.state.is_sequenced(view.stream, &entry) {
                self.drop_taken(entry.name());
            } else {
                self.batch.push(entry);
            }
        }
        if self.batch.is_empty() {
            return None;
        }
        // S1: the number of transactions in the stream that have not run is bounded. Those that are
        // in another stream already are admitted, because others wait for them.
        let waiting = view.state.merge.waiting(view.stream) + self.proposed.len();
        let mut room = match view.config.ordering {
            Ordering::Regional if !view.config.mutations.is_unbounded() => {
                view.config.waiting_max.saturating_sub(waiting)
            }
            Ordering::Regional | Ordering::Global | Ordering::Ordered(_) => usize::MAX,
        };
        let (mut entries, mut bytes, mut is_full) = (Vec::new(), 0, false);
        for entry in take(&mut self.batch) {
            // An earlier entry may say that its client knows the outcome.
            if self.is_over(&entry, view) {
                self.drop_taken(entry.name());
                continue;
            }
            let is_elsewhere = view.state.merge.contains(entry.name());
            // Pieces keep their order: none passes another that has no room.
            is_full |= entries.len() >= view.config.batch_max
                || (bytes > 0 && bytes + entry.size() > view.config.piece_bytes);
            if !is_full && (room > 0 || is_elsewhere) {
                room = room.saturating_sub(1);
                bytes += entry.size();
                self.proposed.insert(entry.name());
                self.tell(entry.functor.txn.client, entry.functor.acknowledged_below);
                entries.push(entry);
            } else {
                self.batch.push(entry);
            }
        }
        if entries.is_empty() {
            return None;
        }
        Some(Command::Batch { stamp: view.clock.now, entries })
    }

    /// `entry` is now in the stream.
    pub fn sequenced(&mut self, entry: &Sequenced) {
        let name = entry.name();
        self.drop_taken(name);
        self.proposed.remove(&name);
    }

    /// Removes a transaction that is not about to enter any more.
    fn drop_taken(&mut self, name: Name) {
        let size = self.taken.remove(&name).unwrap_or_default();
        self.taken_bytes = self.taken_bytes.saturating_sub(size);
    }

    /// Counts accesses to the stream's keys: a key that a single other region has accessed for long
    /// should move there (SLOG §3.4; Sloth §6.2.2). Returns the keys that should move now, with
    /// their new homes.
    pub fn observe(&mut self, entry: &Sequenced, view: &View<'_>) -> Vec<(Key, PartitionId)> {
        let Some(timeout) = view.config.migrate_after else { return Vec::new() };
        if entry.target.is_some() {
            return Vec::new();
        }
        let keys: OrdSet<&Key> = entry.functor.reads.iter().chain(&entry.functor.writes).collect();
        let mut moves = Vec::new();
        // A scan reads a fence in every partition so that it is in every stream.
        let keys = keys.into_iter().filter(|key| !is_fence(key));
        for key in keys.filter(|key| view.orders(entry, key)) {
            if entry.origin == view.placement.region_of(view.stream) {
                self.guests.remove(key);
                continue;
            }
            if self.guests.len() >= GUESTS_MAX {
                self.guests.clear();
            }
            let (region, times) = self.guests.entry(key.clone()).or_default();
            if *region != entry.origin {
                (*region, *times) = (entry.origin, 0);
            }
            *times = times.saturating_add(1);
            let home = view.state.home(key, view.placement);
            // Twice as many each time. Transactions that a move's old home sequences are void, so
            // if two regions competed for a key, none of their transactions would ever run.
            let doubled = timeout.saturating_mul(1 << home.counter.min(DOUBLED_MAX));
            if *times >= doubled
                && home.stream == view.stream
                && let Some(target) = view.placement.stream_in(entry.origin)
                && view.may_move(key, target)
            {
                self.guests.remove(key);
                moves.push((key.clone(), target));
            }
        }
        moves
    }

    /// Proposes `Acknowledge` (what other streams have) and `Forget` (what all streams have) in turns.
    /// At most one of them is pending.
    pub fn acknowledgement(&mut self, view: &View<'_>) -> Option<Command> {
        if self.acknowledging > view.state.applied(view.stream) {
            return None;
        }
        let mut news = view.state.unacknowledged(view.stream);
        news.truncate(NEWS_MAX);
        // In turns: while clients are active, there is always something to acknowledge.
        let is_forgetting = std::mem::replace(&mut self.is_forgetting_next, true);
        if news.is_empty() || is_forgetting {
            let mut over = view.state.forgettable(view.stream);
            over.truncate(NEWS_MAX);
            if !over.is_empty() || news.is_empty() {
                self.is_forgetting_next = false;
                return (!over.is_empty()).then_some(Command::Forget(over));
            }
        }
        for &(client, below) in &news {
            self.tell(client, below);
        }
        Some(Command::Acknowledge(news))
    }

    /// An acknowledgement was proposed at this index.
    pub fn acknowledging(&mut self, at: Index) {
        self.acknowledging = at;
    }
}

#[cfg(test)]
mod tests {
    use orthodrome_core::cluster::Cluster;
    use orthodrome_core::id::TxnId;
    use orthodrome_core::machine::Protocol;
    use orthodrome_core::time::Duration;
    use orthodrome_core::topology::Topology;
    use orthodrome_core::txn::Op;
    use orthodrome_core::workers::Alone;

    use super::super::message::{Home, Image};
    use super::super::state::Settings;
    use super::super::{CALVIN, Deterministic, SLOTH};
    use super::*;
    use crate::functor::{Body, Functor};

    /// The leader of an empty stream.
    struct Leader {
        config: Config,
        placement: Placement,
        state: State,
        stream: PartitionId,
    }

    impl Leader {
        fn new(name: &str) -> Self {
            let map = Topology::uniform(3, Duration::from_millis(1), Duration::from_millis(10));
            let cluster = Arc::new(Cluster::spread(map, 1, 1, 3, 3).unwrap());
            let config = Deterministic::configure(&cluster, name);
            let placement = Placement::new(cluster, config.ordering);
            let (image, settings) = (Image::default(), Settings::default());
            let state = State::new(&image, &placement, settings, Arc::new(Alone), Time(0));
            let stream = placement.streams().into_iter().next().unwrap();
            Self { config, placement, state, stream }
        }

        fn view(&self) -> View<'_> {
            let Self { config, placement, state, stream } = self;
            let clock = Clock { now: Timestamp(1), error: Duration::ZERO };
            View { stream: *stream, state, placement, config, now: Time(1), clock }
        }

        /// A transaction that only this stream orders, and that writes this many bytes.
        fn entry(&self, client: u64, counter: u64, told: u64, bytes: usize) -> Arc<Sequenced> {
            let mut keys = (0..999).map(|number| Key::from(format!("k{number}")));
            let key = keys.find(|key| self.placement.stream_of(key) == self.stream).unwrap();
            let functor = Functor {
                txn: TxnId::new(ClientId(client), counter),
                reads: Vec::new(),
                writes: vec![key.clone()],
                body: Body::Ops(vec![Op::Put(key, vec![b'x'; bytes].into())]),
                acknowledged_below: told,
            };
            let (homes, origin) = (vec![self.stream], RegionId(0));
            Arc::new(Sequenced::new(Arc::new(functor), homes, Vec::new(), origin))
        }
    }

    fn names(command: Option<Command>) -> Vec<u64> {
        let Some(Command::Batch { entries, .. }) = command else { return Vec::new() };
        entries.iter().map(|entry| entry.functor.txn.counter).collect()
    }

    #[test]
    fn acknowledged_transactions_take_no_room_in_a_batch() {
        let leader = Leader::new(CALVIN);
        let mut sequencer = Sequencer::default();
        let (old, new) = (leader.entry(1, 1, 0, 9), leader.entry(1, 2, 2, 9));
        for entry in [&new, &old] {
            assert_eq!(sequencer.take(entry.clone(), &leader.view()), None);
        }
        assert_eq!(names(sequencer.next_batch(&leader.view())), [2]);
        assert_eq!(sequencer.taken.keys().collect::<Vec<_>>(), [&new.name()]);
        sequencer.sequenced(&new);
        assert!(sequencer.taken.is_empty() && sequencer.taken_bytes == 0);
    }

    #[test]
    fn a_batch_is_bounded_in_bytes_and_so_is_what_waits() {
        let mut leader = Leader::new(CALVIN);
        leader.config.piece_bytes = 2_500;
        leader.config.in_flight_bytes = 7_000;
        let mut sequencer = Sequencer::default();
        // One that is larger than a batch, and some of which two fit into a batch.
        for (client, bytes) in [(1, 3_000), (2, 1_000), (3, 1_000), (4, 1_000)] {
            let entry = leader.entry(client, client, 0, bytes);
            assert_eq!(sequencer.take(entry, &leader.view()), None);
        }
        let entry = leader.entry(5, 5, 0, 1_000);
        assert_eq!(sequencer.take(entry, &leader.view()), Some(Note::Shed));
        let mut batches = Vec::new();
        while sequencer.has_batch() {
            batches.push(names(sequencer.next_batch(&leader.view())));
        }
        assert_eq!(batches, [vec![1], vec![2, 3], vec![4]]);
    }

    /// A state in which `ever` keys have moved, and `away` of them are away from their placement.
    fn moved(leader: &mut Leader, ever: usize, away: usize) {
        let mut image = Image::default();
        for number in 0..ever {
            let key = Key::from(format!("moved{number}"));
            let placed = leader.placement.stream_of(&key);
            let mut others = leader.placement.streams().into_iter();
            let other = others.find(|stream| *stream != placed).unwrap();
            let stream = if number < away { other } else { placed };
            let home = Home { counter: 1, stream, since: Timestamp(1) };
            image.moved.insert(key, home);
        }
        let settings = Settings::default();
        leader.state = State::new(&image, &leader.placement, settings, Arc::new(Alone), Time(0));
    }

    #[test]
    fn keys_that_came_back_leave_room_for_others_to_move() {
        let mut leader = Leader::new(SLOTH);
        let (placed, other) = {
            let mut streams = leader.placement.streams().into_iter();
            (streams.next().unwrap(), streams.next().unwrap())
        };
        let new = leader.entry(1, 1, 0, 9).functor.writes[0].clone();
        assert_eq!(leader.placement.stream_of(&new), placed);
        moved(&mut leader, AWAY_MAX + 10, 9);
        assert!(leader.view().may_move(&new, other));
        moved(&mut leader, AWAY_MAX, AWAY_MAX);
        assert!(!leader.view().may_move(&new, other), "so many are away");
        let (away, home) = {
            let key = Key::from("moved0");
            let placed = leader.placement.stream_of(&key);
            (key, placed)
        };
        assert!(leader.view().may_move(&away, home), "one that is away may come back");
    }
}
