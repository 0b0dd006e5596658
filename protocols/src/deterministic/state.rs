//! What a server knows: a function of the prefixes of the streams that it has merged.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use orthodrome_core::digest::Digest;
use orthodrome_core::id::{ClientId, PartitionId, RegionId, ShareId, TxnId};
use orthodrome_core::store::{PIECE_BYTES, Store, Versions, piece_len};
use orthodrome_core::time::{Time, Timestamp};
use orthodrome_core::txn::{Key, Outcome, Read, Reads, Version};
use orthodrome_core::workers::{self, Workers};

use super::Mutations;
use super::checks::Checks;
use super::merge::{Merge, Merged, Place};
use super::message::{
    Chunk, Command, Due, Ended, Home, Image, Name, Part, Sequenced, StreamImage, Turn,
};
use super::outcomes::{Bounds, Outcomes};
use super::placement::Placement;
use super::scheduler;
use super::shares::Shares;
use crate::acknowledged::advance;
use crate::functor::{Body, Functor, Output};
use crate::replication::Index;

/// Everything but the data.
#[derive(Debug)]
pub struct State {
    streams: BTreeMap<PartitionId, StreamImage>,
    /// Clients know the outcomes of everything below, as any stream says.
    acknowledged: BTreeMap<ClientId, u64>,
    /// What waits for its turn.
    pub merge: Merge,
    /// What became of transactions whose clients may ask.
    pub ended: Outcomes,
    /// What entries of streams came to here.
    pub checks: Checks,
    /// Keys that have moved.
    moved: BTreeMap<Key, Home>,
    /// How many of them are not where they were placed.
    away: usize,
    /// Transactions that have run, until every stream knows that their clients know it: they may come
    /// again under another name.
    ran: BTreeSet<TxnId>,
    /// Of what this server holds only a share: what is due, and what others may ask for.
    pub shares: Shares,
    /// Counts checkpoints.
    pub number: u64,
    /// Who runs transactions that do not conflict.
    workers: Arc<dyn Workers>,
    mutations: Mutations,
    loses_writes: bool,
}

/// What of the protocol's settings concerns a state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Settings {
    /// What is remembered of transactions that have run.
    pub outcomes: Bounds,
    /// Entries of a stream that are compared together.
    pub compared_entries: u64,
    /// Deliberate mistakes, for tests.
    pub mutations: Mutations,
    /// One of them, which only the first server makes.
    pub loses_writes: bool,
}

impl Default for Settings {
    fn default() -> Self {
        let (outcomes, mutations) = (Bounds::default(), Mutations::default());
        Self { outcomes, compared_entries: 64, mutations, loses_writes: false }
    }
}

/// How many keys have moved.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MovedCounts {
    /// And are not where they were placed now.
    pub away: usize,
    /// Whether they came back or not.
    pub ever: usize,
}

/// What an entry of a stream brought about.
#[derive(Debug, Default)]
pub struct Applied {
    /// What ran, in order.
    pub ran: Vec<(TxnId, Ended)>,
    /// Transactions that were in the stream before.
    pub repeated: usize,
    /// Transactions whose turn came when a key of theirs was elsewhere than they supposed.
    pub void: Vec<Name>,
    /// Keys that moved.
    pub relocated: usize,
    /// Parts of this share that were taken, and the shares that need them.
    pub taken: Vec<(Turn, BTreeSet<ShareId>, Arc<Part>)>,
    /// What is due now, and waits for parts of other shares.
    pub due: Vec<Turn>,
}

impl State {
    /// A server's state at a checkpoint; the data is in its store.
    #[must_use]
    pub fn new(
        image: &Image,
        placement: &Placement,
        settings: Settings,
        workers: Arc<dyn Workers>,
        now: Time,
    ) -> Self {
        let Settings { outcomes, compared_entries, mutations, loses_writes } = settings;
        let mut streams: BTreeMap<PartitionId, StreamImage> =
            placement.streams().into_iter().map(|id| (id, StreamImage::default())).collect();
        streams.extend(image.streams.clone());
        let acknowledged = acknowledged(&streams);
        let mut merge = Merge::new(placement.orderer(), mutations.waits_for_itself());
        for (stream, place, entry) in &image.pending {
            merge.insert(*stream, *place, entry, |key| placement.stream_of(key), now);
        }
        let mut ended = Outcomes::new(outcomes);
        image.ended.iter().for_each(|(&txn, known)| ended.insert(txn, known.clone()));
        let mut checks = Checks::new(compared_entries);
        streams.iter().for_each(|(&id, stream)| checks.begin(id, stream.applied));
        let mut shares = Shares::new(mutations.reads_early());
        shares.restore(image.due.iter().cloned(), &image.kept, placement);
        Self {
            streams,
            acknowledged,
            merge,
            ended,
            checks,
            moved: image.moved.clone(),
            away: away(&image.moved, placement),
            ran: image.ran.clone(),
            shares,
            number: image.number,
            workers,
            mutations,
            loses_writes,
        }
    }

    /// Everything, to go on from later.
    #[must_use]
    pub fn image(&self, placement: &Placement) -> Image {
        Image {
            number: self.number,
            piece: 0,
            pieces: 0,
            streams: self.streams.clone(),
            pending: self.merge.pending(),
            ended: self.ended.all().clone(),
            moved: self.moved.clone(),
            ran: self.ran.clone(),
            shares: placement.share_count(),
            due: self.shares.due().cloned().collect(),
            kept: self.shares.kept().clone(),
        }
    }

    /// Where `key` is, as of what has run here.
    #[must_use]
    pub fn home(&self, key: &Key, placement: &Placement) -> Home {
        let placed = || Home { stream: placement.stream_of(key), ..Home::default() };
        self.moved.get(key).copied().unwrap_or_else(placed)
    }

    /// How many keys have moved.
    #[must_use]
    pub fn moved_counts(&self) -> MovedCounts {
        MovedCounts { away: self.away, ever: self.moved.len() }
    }

    /// True if `key` has ever moved.
    #[must_use]
    pub fn has_moved(&self, key: &Key) -> bool {
        self.moved.contains_key(key)
    }

    /// How a transaction is to be sequenced, as of what has run here.
    #[must_use]
    pub fn plan(
        &self,
        functor: Arc<Functor>,
        origin: RegionId,
        placement: &Placement,
    ) -> Sequenced {
        let keys: BTreeSet<&Key> = functor.reads.iter().chain(&functor.writes).collect();
        let homes = placement.homes(keys.iter().map(|key| self.home(key, placement).stream));
        let moved = keys.into_iter().filter_map(|key| Some((key.clone(), *self.moved.get(key)?)));
        let moved = moved.collect();
        Sequenced::new(functor, homes, moved, origin)
    }

    /// True if the keys of `entry` are where it supposes.
    fn is_right(&self, entry: &Sequenced) -> bool {
        let keys = entry.functor.reads.iter().chain(&entry.functor.writes);
        keys.into_iter().all(|key| {
            let supposed = entry.moved.iter().find(|(moved, _)| moved == key);
            let counter = self.moved.get(key).map_or(0, |home| home.counter);
            supposed.map_or(0, |(_, home)| home.counter) == counter
        })
    }

    /// Learns what another server's state knows and this one does not (S3, S8): afterwards this is the
    /// state that follows from the longer prefix of each stream. Neither has to know more than the other, so
    /// it does not matter how much of their logs they have forgotten. Returns what ran of it that neither
    /// had run.
    ///
    /// It can be done because what a state has run is closed under *goes before*: of those that touch
    /// a key, one state has run the first few, the other the first few, and the same.
    pub fn join(
        &mut self,
        image: &Image,
        data: Vec<(Key, Versions)>,
        placement: &Placement,
        store: &mut Store,
        now: Time,
    ) -> Applied {
        let ours = self.image(placement);
        Self::join_data((&ours, image), data, placement, store);
        let mut pending: BTreeMap<(PartitionId, Place), Arc<Sequenced>> = BTreeMap::new();
        for (one, other) in [(&ours, image), (image, &ours)] {
            let has_run = other.has_run(&one.pending);
            for (stream, place, entry) in &one.pending {
                if !has_run.contains(&entry.name()) {
                    pending.insert((*stream, *place), entry.clone());
                }
            }
        }
        for (&stream, theirs) in &image.streams {
            let held = self.streams.entry(stream).or_default();
            if theirs.applied > held.applied {
                *held = theirs.clone();
            }
        }
        self.acknowledged = acknowledged(&self.streams);
        for (key, theirs) in &image.moved {
            let held = self.moved.entry(key.clone()).or_default();
            *held = (*held).max(*theirs);
        }
        self.away = away(&self.moved, placement);
        for (&txn, theirs) in &image.ended {
            let is_better = |ours: &Ended| ours.reads.is_none() && theirs.reads.is_some();
            if self.ended.get(txn).is_none_or(is_better) {
                self.ended.insert(txn, theirs.clone());
            }
        }
        for (&client, &below) in &self.acknowledged {
            self.ended.acknowledge(TxnId::new(client, 0)..TxnId::new(client, below));
        }
        for (&stream, held) in &self.streams {
            self.checks.begin(stream, held.applied);
        }
        self.ran.extend(image.ran.iter().copied());
        // One that only one of them knows to be due comes after whatever it has to wait for, in both.
        let (waits, theirs) = (ours.waits(), image.waits());
        let mine = ours.due.iter().filter(|due| !image.has_run_due(due, &theirs));
        let new = image
            .due
            .iter()
            .filter(|due| !self.shares.is_due(due.entry.name()) && !ours.has_run_due(due, &waits));
        let due: Vec<Due> = mine.chain(new).cloned().collect();
        self.shares.restore(due, &image.kept, placement);
        self.merge.clear();
        for ((stream, place), entry) in &pending {
            self.merge.insert(*stream, *place, entry, |key| placement.stream_of(key), now);
        }
        let mut applied = Applied::default();
        self.run_ready(&mut applied, placement, store);
        self.forget_arrived();
        applied
    }

    /// Of every key, the newest version counts: timestamps grow along it. Where one state has no version
    /// at all, it may have forgotten a deletion; that has happened if what the other has is older than
    /// everything that has not run in the first.
    fn join_data(
        (ours, theirs): (&Image, &Image),
        data: Vec<(Key, Versions)>,
        placement: &Placement,
        store: &mut Store,
    ) {
        let floors = Floors::of(ours, placement);
        let mut seen = BTreeSet::new();
        for (key, mut versions) in data {
            let partition = placement.partition_of(&key);
            let Some((version, value)) = versions.pop() else { continue };
            seen.insert(key.clone());
            let held = store.read(partition, &key).version;
            let is_known = if held == Version::INITIAL {
                version.timestamp < floors.at(&key)
            } else {
                version <= held
            };
            if !is_known {
                store.put(partition, key, version, value);
            }
        }
        let floors = Floors::of(theirs, placement);
        for (partition, _) in placement.partitions() {
            for (key, versions) in store.scan(partition, None, usize::MAX) {
                let floor = floors.at(&key);
                let is_old = versions.last().is_some_and(|(held, _)| held.timestamp < floor);
                if is_old && !seen.contains(&key) {
                    // Whatever comes later gets a larger timestamp than this.
                    let timestamp = Timestamp(floor.0.saturating_sub(1));
                    store.put(partition, key, Version { timestamp, ..Version::INITIAL }, None);
                }
            }
        }
    }

    /// The prefix of `stream` that this state covers.
    #[must_use]
    pub fn applied(&self, stream: PartitionId) -> Index {
        self.streams.get(&stream).map_or(Index(0), |stream| stream.applied)
    }

    /// The next entry of a stream is chosen; none if it is not for the merge. What has come so far
    /// and waits for nothing runs.
    pub fn apply(
        &mut self,
        (stream, index): (PartitionId, Index),
        command: Option<&Command>,
        placement: &Placement,
        store: &mut Store,
        now: Time,
    ) -> Applied {
        let mut applied = Applied::default();
        let Some(state) = self.streams.get_mut(&stream) else { return applied };
        if index <= state.applied {
            return applied;
        }
        assert!(
            index == state.applied.next(),
            "{stream} goes on at {index}, not after what is here"
        );
        state.applied = index;
        match command {
            Some(Command::Batch { stamp, entries }) => {
                let stamp = (*stamp).max(state.stamp.next());
                state.stamp = stamp;
                for (offset, entry) in (0..).zip(entries) {
                    let place = Place { index, offset, stamp, is_late: false };
                    if !self.sequence(stream, place, entry, placement, now) {
                        applied.repeated += 1;
                    }
                }
            }
            Some(Command::Acknowledge(clients)) => {
                for &(client, below) in clients {
                    self.acknowledge(stream, client, below);
                }
            }
            Some(Command::Forget(clients)) => {
                for &(client, below) in clients {
                    self.forget(stream, client, below);
                }
            }
            None => {}
        }
        self.run_ready(&mut applied, placement, store);
        applied
    }

    /// A transaction is at a place of a stream. False if it was in that stream before.
    fn sequence(
        &mut self,
        stream: PartitionId,
        place: Place,
        entry: &Arc<Sequenced>,
        placement: &Placement,
        now: Time,
    ) -> bool {
        let txn = entry.functor.txn;
        if let Some((key, from)) = entry.relocates() {
            // A key moves once from each home; the first who says where to is heard.
            let Some(state) = self.streams.get_mut(&stream) else { return false };
            if state.moves.get(key).is_some_and(|&moves| from.counter < moves) {
                return false;
            }
            state.moves.insert(key.clone(), from.counter + 1);
            self.merge.insert(stream, place, entry, |key| placement.stream_of(key), now);
            return true;
        }
        self.acknowledge(stream, txn.client, entry.functor.acknowledged_below);
        let Some(state) = self.streams.get_mut(&stream) else { return false };
        let is_below = |known: &BTreeMap<ClientId, u64>| {
            known.get(&txn.client).is_some_and(|&below| txn.counter < below)
        };
        // One that ran under another name may be in another stream under this, where all wait for it.
        let is_late = is_below(&state.acknowledged);
        let is_repeated = is_below(&state.forgotten) || !state.seen.insert(entry.name());
        let place = Place { is_late, ..place };
        if is_repeated && !self.mutations.runs_repeated() {
            return false;
        }
        self.merge.insert(stream, place, entry, |key| placement.stream_of(key), now);
        !is_repeated
    }

    /// A stream says below which counter a client knows the outcomes of its transactions.
    fn acknowledge(&mut self, stream: PartitionId, client: ClientId, below: u64) {
        let Some(state) = self.streams.get_mut(&stream) else { return };
        let is_news = advance(&mut state.acknowledged, client, below).is_some();
        if is_news && self.streams.len() == 1 {
            self.forget(stream, client, below);
        }
        self.forget_ran(client);
        if let Some(over) = advance(&mut self.acknowledged, client, below) {
            self.ended.acknowledge(over);
        }
    }

    /// A stream need not remember which transactions below this counter it holds.
    fn forget(&mut self, stream: PartitionId, client: ClientId, below: u64) {
        let Some(state) = self.streams.get_mut(&stream) else { return };
        if let Some(over) = advance(&mut state.forgotten, client, below) {
            let named = |txn| Name { txn, map: 0 };
            let over = state.seen.range(named(over.start)..named(over.end));
            for name in over.copied().collect::<Vec<_>>() {
                state.seen.remove(&name);
            }
        }
    }

    /// Forgets that transactions of `client` ran that no stream lets in again under any name.
    fn forget_ran(&mut self, client: ClientId) {
        let below = self.acknowledged_by_all(client);
        let over = self.ran.range(TxnId::new(client, 0)..TxnId::new(client, below));
        for txn in over.copied().collect::<Vec<_>>() {
            if !self.merge.contains_any(txn) {
                self.ran.remove(&txn);
            }
        }
    }

    /// True if the client of `txn` knows what became of it.
    #[must_use]
    pub fn is_acknowledged(&self, txn: TxnId) -> bool {
        self.acknowledged.get(&txn.client).is_some_and(|&below| txn.counter < below)
    }

    /// True if `txn`, which touches what is held here, has run so long ago that it is forgotten what became of it.
    #[must_use]
    pub fn has_forgotten(&self, txn: TxnId) -> bool {
        let mut streams = self.streams.values();
        let has_run = match (streams.next(), streams.next()) {
            // Nothing moves: it has one name, and runs when it is seen.
            (Some(only), None) => only.seen.contains(&Name { txn, map: 0 }),
            _ => self.ran.contains(&txn),
        };
        let waits = || self.merge.contains_any(txn) || self.shares.is_any_due(txn);
        has_run && self.ended.get(txn).is_none() && !waits()
    }

    /// True if `entry` need not be put into `stream` again.
    #[must_use]
    pub fn is_sequenced(&self, stream: PartitionId, entry: &Sequenced) -> bool {
        let Some(stream) = self.streams.get(&stream) else { return false };
        entry.relocates().map_or_else(
            || stream.seen.contains(&entry.name()),
            |(key, from)| stream.moves.get(key).is_some_and(|&moves| from.counter < moves),
        )
    }

    /// What other streams say of clients and `stream` does not know.
    #[must_use]
    pub fn unacknowledged(&self, stream: PartitionId) -> Vec<(ClientId, u64)> {
        let Some(state) = self.streams.get(&stream) else { return Vec::new() };
        let known = |client| state.acknowledged.get(client).copied().unwrap_or_default();
        let news = self.acknowledged.iter().filter(|&(client, &below)| below > known(client));
        news.map(|(&client, &below)| (client, below)).collect()
    }

    /// What every stream says that `client` knows.
    fn acknowledged_by_all(&self, client: ClientId) -> u64 {
        let below = self.streams.values().map(|stream| stream.acknowledged.get(&client).copied());
        below.map(Option::unwrap_or_default).min().unwrap_or_default()
    }

    /// What `stream` need not remember any more: who comes so late is refused by all streams, and
    /// nobody waits anywhere for what is not everywhere.
    #[must_use]
    pub fn forgettable(&self, stream: PartitionId) -> Vec<(ClientId, u64)> {
        let Some(state) = self.streams.get(&stream) else { return Vec::new() };
        let mut news = Vec::new();
        for &client in state.acknowledged.keys() {
            let below = self.acknowledged_by_all(client);
            let waits = self.merge.first_of(client).map_or(below, |first| first.min(below));
            if waits > state.forgotten.get(&client).copied().unwrap_or_default() {
                news.push((client, waits));
            }
        }
        news
    }

    /// True if `stream` holds that the client of `txn` knows what became of it.
    #[must_use]
    pub fn is_over(&self, stream: PartitionId, txn: TxnId) -> bool {
        let known = self.streams.get(&stream).and_then(|s| s.acknowledged.get(&txn.client));
        known.is_some_and(|&below| txn.counter < below)
    }

    /// Runs what has come so far and waits for nothing: what does not conflict at once.
    fn run_ready(&mut self, applied: &mut Applied, placement: &Placement, store: &mut Store) {
        let due: Vec<Merged> = std::iter::from_fn(|| self.merge.pop()).collect();
        if placement.is_divided() {
            for merged in due {
                if self.admit(&merged, applied, placement, store) {
                    self.ran.extend((self.streams.len() > 1).then_some(merged.entry.functor.txn));
                    let Merged { entry, stamp, places, .. } = merged;
                    let due = Due { entry, stamp, places };
                    applied.due.push(due.turn());
                    self.shares.insert(due, placement);
                }
            }
            self.run_due(applied, placement, store);
            return;
        }
        let keys = due.iter().map(|merged| {
            let Functor { reads, writes, .. } = &*merged.entry.functor;
            (reads.as_slice(), writes.as_slice())
        });
        for round in scheduler::rounds(keys) {
            let round = round.into_iter().filter_map(|place| due.get(place));
            self.run_round(round, applied, placement, store);
        }
    }

    /// Runs transactions of which none writes what another touches: workers read and compute, and then everything is
    /// written.
    fn run_round<'a>(
        &mut self,
        round: impl Iterator<Item = &'a Merged>,
        applied: &mut Applied,
        placement: &Placement,
        store: &mut Store,
    ) {
        let mut granted: Vec<&Merged> = Vec::new();
        for merged in round {
            if self.admit(merged, applied, placement, store) {
                granted.push(merged);
            }
        }
        let held: &Store = store;
        let all = workers::each(
            &*self.workers,
            &granted,
            |merged| cost(&merged.entry),
            |merged| {
                let own = part(&merged.entry.functor, placement, held);
                execute(&merged.entry, (merged.stamp, &merged.places), &[Arc::new(own)])
            },
        );
        for (merged, executed) in granted.into_iter().zip(all) {
            if self.streams.len() > 1 {
                self.ran.insert(merged.entry.functor.txn);
            }
            applied.ran.push(self.finish(&merged.entry.functor, executed, placement, store));
        }
    }

    /// True if a transaction runs, now that its turn has come.
    fn admit(
        &mut self,
        merged: &Merged,
        applied: &mut Applied,
        placement: &Placement,
        store: &Store,
    ) -> bool {
        let (name, txn) = (merged.entry.name(), merged.entry.functor.txn);
        // S10: whether it is void follows from what it comes after on its keys. If of one transaction
        // two names are not, the same one comes first everywhere.
        let has_run = merged.is_late || (name.map != 0 && self.ran.contains(&txn));
        let is_checked = merged.entry.target.is_some() || !self.mutations.runs_void();
        if is_checked && !self.is_right(&merged.entry) {
            applied.void.push(name);
            return false;
        }
        if merged.entry.target.is_some() {
            self.relocate(merged, placement, store);
            applied.relocated += 1;
            return false;
        }
        !has_run || self.mutations.runs_repeated()
    }

    /// Takes the parts of what has its locks, and runs that to which nothing is missing, until nothing is left to do.
    pub fn run_due(&mut self, applied: &mut Applied, placement: &Placement, store: &mut Store) {
        loop {
            while let Some((order, due)) = self.shares.next_granted() {
                let turn = due.turn();
                let own = Arc::new(part(&due.entry.functor, placement, store));
                let others = self.shares.take_part(order, own.clone());
                if !others.is_empty() {
                    applied.taken.push((turn, others, own));
                }
            }
            let ready = self.shares.take_ready();
            if ready.is_empty() {
                return;
            }
            // What others hold they have read.
            let cost = |(_, due, _): &(_, Due, _)| {
                let Functor { reads, writes, .. } = &*due.entry.functor;
                reads.iter().chain(writes).filter(|key| placement.holds(key)).count()
            };
            let all = workers::each(&*self.workers, &ready, cost, |(_, due, parts)| {
                execute(&due.entry, (due.stamp, &due.places), parts)
            });
            for ((order, due, _), executed) in ready.into_iter().zip(all) {
                applied.ran.push(self.finish(&due.entry.functor, executed, placement, store));
                self.shares.release(order, placement);
            }
        }
    }

    /// What a transaction reads in another share has come. Nothing happens if it has run.
    pub fn arrive(&mut self, turn: Turn, share: ShareId, part: Arc<Part>) {
        if !self.has_run(turn) {
            self.shares.arrive(turn, share, part);
        }
    }

    /// True if this was seen and has run, or never will.
    #[must_use]
    pub fn has_run(&self, turn: Turn) -> bool {
        let is_seen = turn.index <= self.applied(turn.stream);
        is_seen && !self.merge.contains(turn.name) && !self.shares.is_due(turn.name)
    }

    /// After a state was taken: parts that came for what has run are not needed.
    fn forget_arrived(&mut self) {
        let Self { merge, shares, streams, .. } = self;
        shares.forget_arrived(|Turn { stream, index, name }| {
            let applied = streams.get(&stream).map_or(Index(0), |stream| stream.applied);
            index > applied || merge.contains(name)
        });
    }

    /// A key moves.
    fn relocate(&mut self, merged: &Merged, placement: &Placement, store: &Store) {
        let (Some((key, from)), Some(stream)) = (merged.entry.relocates(), merged.entry.target)
        else {
            return;
        };
        let mut since = merged.stamp.max(from.since.next());
        if !placement.is_divided() {
            // What not all servers know must not decide.
            let held = store.read(placement.partition_of(key), key).version.timestamp;
            since = since.max(held.next());
        }
        let placed = placement.stream_of(key);
        let before = self.home(key, placement).stream;
        self.away += usize::from(stream != placed);
        self.away = self.away.saturating_sub(usize::from(before != placed));
        let home = Home { counter: from.counter + 1, stream, since };
        self.moved.insert(key.clone(), home);
        let mut digest = Digest::default();
        digest.add_debug(&(key, home));
        let (first, index) = first_of(&merged.places);
        self.checks.add(first, index, digest.value());
    }

    /// A transaction has run: writes what it writes, and remembers what came of it.
    fn finish(
        &mut self,
        functor: &Functor,
        executed: Executed,
        placement: &Placement,
        store: &mut Store,
    ) -> (TxnId, Ended) {
        let Executed { timestamp, reads, writes, stamp, first: (stream, index), digest } = executed;
        let txn = functor.txn;
        self.checks.add(stream, index, digest);
        let outcome = match writes {
            Ok(_) if self.loses_writes && txn.counter.is_multiple_of(4) => {
                Outcome::Committed(timestamp)
            }
            Ok(writes) => {
                let version = Version { timestamp, writer: txn };
                for (key, value) in writes.into_iter().filter(|(key, _)| placement.holds(key)) {
                    store.put(placement.partition_of(&key), key, version, value);
                }
                Outcome::Committed(timestamp)
            }
            Err(reason) => Outcome::Aborted(reason),
        };
        let reads = match functor.body {
            Body::Ops(_) => reads,
            Body::Validate { .. } => Reads::new(),
        };
        let ended = Ended { outcome, reads: Some(reads), stamp };
        if !self.is_acknowledged(txn) {
            self.ended.insert(txn, ended.clone());
        }
        (txn, ended)
    }

    /// Versions of the keys of `stream` older than this may go, but for the newest of each key: whatever
    /// comes later gets a larger timestamp, also where the newest was a deletion and is gone.
    #[must_use]
    pub fn collectable(&self, stream: PartitionId) -> Timestamp {
        let stamp = self.streams.get(&stream).map(|state| state.stamp).unwrap_or_default();
        let waiting = self.merge.earliest(stream).into_iter().chain(self.shares.earliest(stream));
        waiting.min().map_or(stamp, |earliest| earliest.min(stamp))
    }

    /// Below which timestamps old versions of each partition may go.
    #[must_use]
    pub fn collectables(&self, placement: &Placement) -> Vec<(PartitionId, Timestamp)> {
        let of = |stream| self.collectable(stream);
        let mut below: BTreeMap<PartitionId, Timestamp> =
            placement.partitions().map(|(partition, stream)| (partition, of(stream))).collect();
        let streams: BTreeSet<(PartitionId, PartitionId)> = self
            .moved
            .iter()
            .map(|(key, home)| (placement.partition_of(key), home.stream))
            .collect();
        for (partition, stream) in streams {
            if let Some(below) = below.get_mut(&partition) {
                *below = (*below).min(of(stream));
            }
        }
        // A key may have moved while transactions that the old home has ordered are due.
        for due in self.shares.due() {
            for key in due.keys().filter(|key| placement.holds(key)) {
                if let Some(below) = below.get_mut(&placement.partition_of(key)) {
                    *below = (*below).min(due.earliest());
                }
            }
        }
        below.into_iter().collect()
    }

    /// Up to where everything in each stream has run.
    #[must_use]
    pub fn covered(&self) -> BTreeMap<PartitionId, Index> {
        let streams = self.streams.iter();
        let mut covered: BTreeMap<_, _> = streams.map(|(&id, held)| (id, held.applied)).collect();
        let due = self.shares.due().flat_map(|due| due.places.iter().copied());
        for (stream, place) in self.merge.places().chain(due) {
            if let Some(covered) = covered.get_mut(&stream) {
                *covered = (*covered).min(Index(place.index.0.saturating_sub(1)));
            }
        }
        covered
    }

    /// Names the prefixes that this state follows from.
    #[must_use]
    pub fn position(&self) -> u64 {
        let mut digest = Digest::default();
        for stream in self.streams.values() {
            digest.add(stream.applied.0);
        }
        digest.value()
    }

    /// Adds what must be equal on all servers at one position, data apart.
    pub fn add_to(&self, digest: &mut Digest) {
        digest.add_debug(&self.streams);
        self.add_ended_to(digest);
        digest.add_debug(&self.moved);
        digest.add_debug(&self.merge.pending());
    }

    /// Adds what became of transactions. Which of it is forgotten and when is each server's own affair: so it is left out if so
    /// little is remembered that some may be.
    pub fn add_ended_to(&self, digest: &mut Digest) {
        if self.ended.bounds() == Bounds::default() {
            digest.add_debug(self.ended.all());
        }
    }

    /// Of that, what must be equal on servers of all shares.
    pub fn add_order_to(&self, digest: &mut Digest) {
        digest.add_debug(&self.streams);
        digest.add_debug(&self.moved);
        digest.add_debug(&self.merge.pending());
    }
}

/// Bounds of the timestamps that transactions get on each key if they have not run in a state. What the state
/// has forgotten of a key is older.
struct Floors<'a> {
    placement: &'a Placement,
    moved: &'a BTreeMap<Key, Home>,
    streams: BTreeMap<PartitionId, Timestamp>,
    /// Of keys that transactions touch that are due. The key may have moved since their turn came: what its new home
    /// orders is later, these need not be.
    due: BTreeMap<&'a Key, Timestamp>,
}

impl<'a> Floors<'a> {
    fn of(image: &'a Image, placement: &'a Placement) -> Self {
        let streams = placement.streams().into_iter();
        let streams = streams.map(|stream| (stream, image.collectable(stream))).collect();
        let mut due: BTreeMap<&Key, Timestamp> = BTreeMap::new();
        for waiting in &image.due {
            for key in waiting.keys() {
                let floor = due.entry(key).or_insert(Timestamp::MAX);
                *floor = (*floor).min(waiting.earliest());
            }
        }
        Self { placement, moved: &image.moved, streams, due }
    }

    /// Whatever has not run and touches `key` gets a timestamp that is not below this.
    fn at(&self, key: &Key) -> Timestamp {
        let placed = || Home { stream: self.placement.stream_of(key), ..Home::default() };
        let home = self.moved.get(key).copied().unwrap_or_else(placed);
        let floor = self.streams.get(&home.stream).copied().unwrap_or_default().max(home.since);
        self.due.get(key).map_or(floor, |due| floor.min(*due))
    }
}

/// What a transaction came to, before anything of it is written.
struct Executed {
    timestamp: Timestamp,
    reads: Reads,
    writes: Output,
    /// The latest time of its places.
    stamp: Timestamp,
    /// The first of its streams, and its entry in that.
    first: (PartitionId, Index),
    /// Of its name and everything that it came to.
    digest: u64,
}

/// The first of the places of a transaction.
fn first_of(places: &[(PartitionId, Place)]) -> (PartitionId, Index) {
    places.iter().map(|(stream, place)| (*stream, place.index)).min().unwrap_or_default()
}

/// A hash of what a transaction came to.
fn digest_of(name: Name, timestamp: Timestamp, reads: &Reads, writes: &Output) -> u64 {
    let mut digest = Digest::default();
    let Name { txn, map } = name;
    for word in [txn.client.0, txn.counter, u64::from(txn.attempt), map, timestamp.0] {
        digest.add(word);
    }
    for (key, Read { value, version }) in reads {
        digest.add_bytes(&key.0);
        digest.add(version.timestamp.0);
        digest.add_bytes(value.as_ref().map_or(&[], |value| &value.0));
    }
    match writes {
        Ok(writes) => {
            for (key, value) in writes {
                digest.add_bytes(&key.0);
                digest.add(u64::from(value.is_some()));
                digest.add_bytes(value.as_ref().map_or(&[], |value| &value.0));
            }
        }
        Err(reason) => digest.add_debug(reason),
    }
    digest.value()
}

/// How many keys a transaction touches.
fn cost(entry: &Sequenced) -> usize {
    entry.functor.reads.len() + entry.functor.writes.len()
}

/// What is held here of what a transaction touches.
fn part(functor: &Functor, placement: &Placement, store: &Store) -> Part {
    let held = |key| store.read(placement.partition_of(key), key);
    let mut part = Part::default();
    for key in functor.reads.iter().filter(|key| placement.holds(key)) {
        let read = held(key);
        part.newest = part.newest.max(read.version.timestamp);
        part.reads.insert(key.clone(), visible(read));
    }
    for key in functor.writes.iter().filter(|key| placement.holds(key)) {
        part.newest = part.newest.max(held(key).version.timestamp);
    }
    part
}

/// A transaction computes, on any thread. Its timestamp follows from its places and from what it
/// touches, so that it is the same in every region, and grows along each key.
fn execute(
    entry: &Sequenced,
    (stamp, places): (Timestamp, &[(PartitionId, Place)]),
    parts: &[Arc<Part>],
) -> Executed {
    let mut timestamp = stamp;
    for (_, home) in &entry.moved {
        timestamp = timestamp.max(home.since.next());
    }
    let mut reads = Reads::new();
    for part in parts {
        timestamp = timestamp.max(part.newest.next());
        reads.extend(part.reads.iter().map(|(key, read)| (key.clone(), read.clone())));
    }
    let writes = entry.functor.execute(&reads);
    let digest = digest_of(entry.name(), timestamp, &reads, &writes);
    Executed { timestamp, reads, writes, stamp, first: first_of(places), digest }
}

/// How many of these keys are not where they were placed.
fn away(moved: &BTreeMap<Key, Home>, placement: &Placement) -> usize {
    moved.iter().filter(|(key, home)| home.stream != placement.stream_of(key)).count()
}

/// Below which counters clients know the outcomes, as any stream says.
fn acknowledged(streams: &BTreeMap<PartitionId, StreamImage>) -> BTreeMap<ClientId, u64> {
    let mut acknowledged: BTreeMap<ClientId, u64> = BTreeMap::new();
    for (&client, &below) in streams.values().flat_map(|stream| &stream.acknowledged) {
        let known = acknowledged.entry(client).or_default();
        *known = (*known).max(below);
    }
    acknowledged
}

/// The keys of a state from `from` on that one message can carry, `keys_max` at most, and where to go on.
pub fn piece_from(
    all: &[(Key, Versions)],
    from: usize,
    keys_max: usize,
) -> (Vec<(Key, Versions)>, Option<usize>) {
    let rest = all.get(from..).unwrap_or_default();
    let rest = rest.get(..keys_max).unwrap_or(rest);
    let keys = rest.get(..piece_len(rest, PIECE_BYTES)).unwrap_or(rest).to_vec();
    let next = Some(from + keys.len()).filter(|&next| next < all.len());
    (keys, next)
}

/// A state that leaves in pieces.
#[derive(Clone, Debug)]
pub struct Leaving {
    images: Vec<Arc<Image>>,
    keys: Vec<(Key, Versions)>,
}

impl Leaving {
    /// An image in pieces, and its data.
    #[must_use]
    pub fn new(images: Vec<Arc<Image>>, keys: Vec<(Key, Versions)>) -> Self {
        Self { images, keys }
    }

    /// The piece from `at` on that one message can carry, with `keys_max` keys at most, and where to go on. Data comes
    /// with the last piece of the image, and after it.
    #[must_use]
    pub fn piece(&self, at: usize, keys_max: usize) -> (Chunk, Option<usize>) {
        let image = self.images.get(at).cloned();
        let last = self.images.len().saturating_sub(1);
        let Some(from) = at.checked_sub(last) else {
            return (Chunk { image, keys: Vec::new() }, Some(at + 1));
        };
        let (keys, next) = piece_from(&self.keys, from, keys_max);
        (Chunk { image, keys }, next.map(|next| next + last))
    }
}

/// What a transaction sees: a key that was deleted is one that was never written, for servers forget
/// deletions each by itself.
pub fn visible(read: Read) -> Read {
    if read.value.is_none() { Read::default() } else { read }
}

#[cfg(test)]
mod tests;
