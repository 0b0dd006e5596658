//! What only the leader of a stream knows: transactions on their way into it (Sloth §4.2.1). Lost with its
//! leadership, and never needed after it: whoever waits for a transaction asks again.

use std::collections::{BTreeMap, BTreeSet};
use std::mem::take;
use std::sync::Arc;

use orthodrome_core::id::{ClientId, PartitionId, RegionId};
use orthodrome_core::time::{Clock, Time, Timestamp};
use orthodrome_core::txn::Key;

use super::merge::Place;
use super::message::{Command, Name, Sequenced};
use super::placement::Placement;
use super::state::State;
use super::{Config, Note, Ordering};
use crate::replication::Index;

/// So many keys are watched for a move at a time.
const GUESTS_MAX: usize = 65_536;
/// No more keys are moved than about so many: every server remembers where each of them is, in every image.
const MOVED_MAX: usize = 65_536;

/// How often the number of transactions that a key moves for is doubled.
const DOUBLED_MAX: u64 = 10;

/// A stream's leader.
#[derive(Debug, Default)]
pub(super) struct Sequencer {
    /// Everything here, and everything proposed that is not chosen yet.
    taken: BTreeSet<Name>,
    /// Held until all homes have it; by the time of release here, then by the time that all homes
    /// agree on (S1).
    held: BTreeMap<(Time, Timestamp, Name), Arc<Sequenced>>,
    /// Kept out while something on their keys waits for long (S1).
    closed: Vec<Arc<Sequenced>>,
    /// To be proposed with the next batch.
    batch: Vec<Arc<Sequenced>>,
    /// Proposed, and not chosen yet.
    proposed: BTreeSet<Name>,
    /// The last place in the orderer's stream of which a piece went into the batch.
    pieced: Option<Place>,
    /// Keys that other regions have touched: which one, and how often in a row.
    guests: BTreeMap<Key, (RegionId, u32)>,
    /// What clients know, as the stream says with all that is proposed.
    told: BTreeMap<ClientId, u64>,
    /// Where an acknowledgement was proposed last.
    acknowledging: Index,
}

/// What a sequencer has to know of its server.
pub(super) struct View<'a> {
    pub stream: PartitionId,
    pub state: &'a State,
    pub placement: &'a Placement,
    pub config: &'a Config,
    pub now: Time,
    pub clock: Clock,
}

impl View<'_> {
    /// True if `entry` is kept out for now: something on its keys has waited for long. One that
    /// is in another stream already is not: it waits there, and others wait for it.
    fn is_closed(&self, entry: &Sequenced) -> bool {
        if self.config.teeth.is_unbounded || !self.is_new(entry) {
            return false;
        }
        let keys = entry.functor.reads.iter().chain(&entry.functor.writes);
        let here = keys.filter(|key| self.orders(entry, key));
        let since = self.state.merge.waits_since(self.stream, here);
        since.is_some_and(|since| self.now.since(since) >= self.config.close_after)
    }

    /// True if `entry` has several homes and is in no stream yet, as far as is known here.
    fn is_new(&self, entry: &Sequenced) -> bool {
        let closes_circles = entry.is_multi_home() && self.placement.orderer().is_none();
        closes_circles && !self.state.merge.contains(entry.name())
    }

    /// True if `entry` is to be given to this stream: it is one of its homes, and does not take it from an orderer.
    fn expects(&self, entry: &Sequenced) -> bool {
        let first = self.placement.orderer().filter(|_| entry.is_multi_home());
        first.map_or_else(|| entry.homes.contains(&self.stream), |first| first == self.stream)
    }

    /// True if this stream orders who touches `key`, as `entry` supposes.
    fn orders(&self, entry: &Sequenced, key: &Key) -> bool {
        entry.is_ordered_by(self.stream, key, |key| self.placement.stream_of(key))
    }
}

impl Sequencer {
    /// Everything that is on its way into the stream.
    pub fn len(&self) -> usize {
        self.held.len() + self.closed.len() + self.batch.len()
    }

    /// True if a batch is to be proposed.
    pub fn has_batch(&self) -> bool {
        !self.batch.is_empty()
    }

    /// With an orderer: takes pieces of what it has ordered, in its order. Only for a leader that knows
    /// everything earlier ones left, so that no piece comes before an earlier one.
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

    /// Somebody wants `entry` in the stream.
    pub fn take(&mut self, entry: Arc<Sequenced>, view: &View<'_>) -> Option<Note> {
        let name = entry.name();
        assert!(view.expects(&entry), "{name} has no business in {}: {entry:?}", view.stream);
        if view.state.is_sequenced(view.stream, &entry) || self.taken.contains(&name) {
            return Some(Note::RepeatedSequence);
        }
        if self.is_over(&entry, view) {
            return Some(Note::RepeatedSequence);
        }
        // One that is in another stream is always let in: those that are kept out wait for it.
        let is_full = self.taken.len() >= view.config.in_flight_max;
        if is_full && !view.state.merge.contains(name) {
            return Some(Note::Shed);
        }
        self.taken.insert(name);
        if !view.config.teeth.is_unbounded && view.is_new(&entry) {
            let ahead = entry.due.0.saturating_sub(view.clock.now.0);
            let wait = orthodrome_core::Duration::from_nanos(ahead).min(view.config.hold_max);
            if !wait.is_zero() {
                self.held.insert((view.now + wait, entry.due, name), entry);
                return Some(Note::Held);
            }
        }
        self.admit(entry, view)
    }

    /// True if the client of `entry` knows what became of it, as far as the stream says with all that is
    /// proposed. If it waits in another stream under this name, all there wait, and it is let in.
    fn is_over(&self, entry: &Sequenced, view: &View<'_>) -> bool {
        let txn = entry.functor.txn;
        let proposed = self.told.get(&txn.client).is_some_and(|&below| txn.counter < below);
        let is_over = proposed || view.state.is_over(view.stream, txn);
        let is_over = is_over && !view.config.teeth.runs_repeated;
        is_over && entry.target.is_none() && !view.state.merge.contains(entry.name())
    }

    /// Takes note of what is about to be proposed that clients know.
    fn tell(&mut self, client: ClientId, below: u64) {
        let told = self.told.entry(client).or_default();
        *told = (*told).max(below);
    }

    /// Lets `entry` in, unless its keys are closed.
    fn admit(&mut self, entry: Arc<Sequenced>, view: &View<'_>) -> Option<Note> {
        if view.is_closed(&entry) {
            self.closed.push(entry);
            return Some(Note::Closed);
        }
        self.batch.push(entry);
        None
    }

    /// When the first that is held goes on.
    pub fn next_release(&self) -> Option<Time> {
        self.held.first_key_value().map(|(&(at, ..), _)| at)
    }

    /// Lets go on what was held until now.
    pub fn release(&mut self, view: &View<'_>) -> Vec<Note> {
        let mut notes = Vec::new();
        while self.next_release().is_some_and(|at| at <= view.now)
            && let Some((_, entry)) = self.held.pop_first()
        {
            notes.extend(self.admit(entry, view));
        }
        notes
    }

    /// Lets in what was kept out, as far as its keys are open again, in the order that all homes agree on.
    pub fn reopen(&mut self, view: &View<'_>) {
        let mut closed = take(&mut self.closed);
        closed.sort_by_key(|entry| (entry.due, entry.functor.txn));
        for entry in closed {
            self.admit(entry, view);
        }
    }

    /// The next batch to propose.
    pub fn next_batch(&mut self, view: &View<'_>) -> Option<Command> {
        // An earlier leader may have left some of it.
        self.batch.retain(|entry| !view.state.is_sequenced(view.stream, entry));
        if self.batch.is_empty() {
            return None;
        }
        // S1: no more in the stream at a time that have not run; but what is in another stream already
        // is let in, for others wait for it.
        let waiting = view.state.merge.waiting(view.stream) + self.proposed.len();
        let mut room = match view.config.ordering {
            Ordering::Regional if !view.config.teeth.is_unbounded => {
                view.config.waiting_max.saturating_sub(waiting)
            }
            Ordering::Regional | Ordering::Global | Ordering::Ordered(_) => usize::MAX,
        };
        let mut entries = Vec::new();
        for entry in take(&mut self.batch) {
            if self.is_over(&entry, view) {
                continue;
            }
            let is_elsewhere = view.state.merge.contains(entry.name());
            if entries.len() < view.config.batch_max && (room > 0 || is_elsewhere) {
                room = room.saturating_sub(1);
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

    /// `entry` is in the stream.
    pub fn sequenced(&mut self, entry: &Sequenced) {
        let name = entry.name();
        self.taken.remove(&name);
        self.proposed.remove(&name);
    }

    /// Takes note of who touches the stream's keys: what one other region alone has touched for long is
    /// to move there (SLOG §3.4; Sloth §6.2.2). Returns the keys for which it is time, and where to.
    pub fn observe(&mut self, entry: &Sequenced, view: &View<'_>) -> Vec<(Key, PartitionId)> {
        let Some(patience) = view.config.migrate_after else { return Vec::new() };
        if entry.target.is_some() || view.state.moved_count() >= MOVED_MAX {
            return Vec::new();
        }
        let keys: BTreeSet<&Key> =
            entry.functor.reads.iter().chain(&entry.functor.writes).collect();
        let mut moves = Vec::new();
        for key in keys.into_iter().filter(|key| view.orders(entry, key)) {
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
            // Twice as many each time: what is sequenced by a move's old home is void, and nothing would ever run of what
            // two regions pull at.
            let doubled = patience.saturating_mul(1 << home.counter.min(DOUBLED_MAX));
            if *times >= doubled
                && home.stream == view.stream
                && let Some(target) = view.placement.stream_in(entry.origin)
            {
                self.guests.remove(key);
                moves.push((key.clone(), target));
            }
        }
        moves
    }

    /// What other streams say that clients know, or else what all of them say, if nothing of the kind is
    /// under way.
    pub fn acknowledgement(&mut self, view: &View<'_>) -> Option<Command> {
        if self.acknowledging > view.state.applied(view.stream) {
            return None;
        }
        let news = view.state.unacknowledged(view.stream);
        if news.is_empty() {
            let news = view.state.forgettable(view.stream);
            return (!news.is_empty()).then_some(Command::Forget(news));
        }
        for &(client, below) in &news {
            self.tell(client, below);
        }
        Some(Command::Acknowledge(news))
    }

    /// An acknowledgement was proposed there.
    pub fn acknowledging(&mut self, at: Index) {
        self.acknowledging = at;
    }
}
