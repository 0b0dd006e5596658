//! Transactions whose turn has come, on a server that holds only a share of all values (Calvin
//! §3.2).
//!
//! Each transaction requests the locks of its keys in this share in the order of the merge. Once it
//! has them, its reads in this share, its *part*, are taken, sent to the other shares that it
//! accesses, and kept. It runs when the parts of all these shares are here, and then releases its
//! locks. Transactions without a common key in this share do not wait for each other.
//!
//! There is no cycle of waits. A transaction that waits for a lock waits for an earlier one. A
//! transaction that waits for a part waits for a server on which the same transaction waits. And
//! all servers have conflicting transactions in one order.

use std::collections::VecDeque;
use std::sync::Arc;

use orthodrome_core::Wire as _;
use orthodrome_core::id::{PartitionId, ShareId, TxnId};
use orthodrome_core::ordered::{Entry, OrdMap, OrdSet};
use orthodrome_core::scan::is_fence;
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::Key;

use super::message::{Due, Name, Part, TURN, Turn};
use super::placement::Placement;
use crate::replication::Index;

/// The most transactions whose parts are remembered before their turn has come; further parts are
/// requested when they are needed.
const EARLY_MAX: usize = 65_536;
/// The most bytes of such parts.
const EARLY_BYTES_MAX: usize = 64 << 20;

/// The transactions that are due, and the parts that are kept of those that have run.
#[derive(Debug, Default)]
pub struct Shares {
    /// Transactions that are due, by their position in this server's order.
    due: OrdMap<Order, Waiting>,
    orders: OrdMap<Name, Order>,
    last: Order,
    locks: OrdMap<Key, VecDeque<Lock>>,
    /// Transactions of which a part must be taken.
    granted: OrdSet<Order>,
    /// Transactions that miss nothing.
    ready: OrdSet<Order>,
    /// Parts of other shares.
    arrived: OrdMap<Turn, OrdMap<ShareId, Arc<Part>>>,
    arrived_bytes: usize,
    /// This share's parts of transactions that have run or are about to, until no server can need
    /// them any more.
    kept: OrdMap<Turn, Arc<Part>>,
    kept_bytes: usize,
    /// Tests only: parts are taken before the locks are held.
    takes_early: bool,
}

/// A position in the order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Order(u64);

#[derive(Debug)]
struct Waiting {
    due: Due,
    /// The other shares that it accesses.
    others: OrdSet<ShareId>,
    /// The number of its locks that it does not have yet.
    locks: usize,
    /// This share's part.
    own: Option<Arc<Part>>,
}

/// A request for a key.
#[derive(Debug)]
struct Lock {
    order: Order,
    writes: bool,
    is_granted: bool,
}

impl Shares {
    /// Nothing is due. `takes_early` is a mutation that tests must catch.
    #[must_use]
    pub fn new(takes_early: bool) -> Self {
        Self { takes_early, ..Self::default() }
    }

    /// The next transaction in the order is due. Nothing happens if it accesses nothing in this
    /// share.
    pub fn insert(&mut self, due: Due, placement: &Placement) {
        let mut others = placement.shares(&due.entry.functor);
        if !others.remove(&placement.share()) {
            self.remove_arrived(due.turn());
            return;
        }
        self.last.0 += 1;
        let order = self.last;
        let mut locks = 0;
        for (key, writes) in keys(&due, placement) {
            let queue = self.locks.entry(key.clone()).or_default();
            let is_granted = if writes { queue.is_empty() } else { queue.iter().all(is_shared) };
            queue.push_back(Lock { order, writes, is_granted });
            locks += usize::from(!is_granted);
        }
        if locks == 0 || self.takes_early {
            self.granted.insert(order);
        }
        self.orders.insert(due.entry.name(), order);
        self.due.insert(order, Waiting { due, others, locks, own: None });
    }

    /// The next transaction that has its locks, and whose part was not taken.
    pub fn next_granted(&mut self) -> Option<(Order, &Due)> {
        while let Some(order) = self.granted.pop_first() {
            let waiting = self.due.get(&order);
            if waiting.is_some_and(|waiting| waiting.own.is_none()) {
                return Some((order, &self.due.get(&order)?.due));
            }
            self.look(order);
        }
        None
    }

    /// Stores this share's part of a transaction that has its locks. Returns the other shares that
    /// need it.
    pub fn take_part(&mut self, order: Order, part: Arc<Part>) -> OrdSet<ShareId> {
        let Some(waiting) = self.due.get_mut(&order) else { return OrdSet::new() };
        waiting.own = Some(part.clone());
        let (turn, others) = (waiting.due.turn(), waiting.others.clone());
        if !others.is_empty() {
            self.keep(turn, part);
        }
        self.look(order);
        others
    }

    fn keep(&mut self, turn: Turn, part: Arc<Part>) {
        self.kept_bytes += bytes_of(&part);
        if let Some(before) = self.kept.insert(turn, part) {
            self.kept_bytes = self.kept_bytes.saturating_sub(bytes_of(&before));
        }
    }

    /// The part of `turn` in `share` has arrived.
    pub fn arrive(&mut self, turn: Turn, share: ShareId, part: Arc<Part>) {
        let order = self.orders.get(&turn.name).copied();
        let is_full = self.arrived.len() >= EARLY_MAX
            || self.arrived_bytes + bytes_of(&part) > EARLY_BYTES_MAX;
        if order.is_none() && is_full {
            return;
        }
        if let Entry::Vacant(room) = self.arrived.entry(turn).or_default().entry(share) {
            self.arrived_bytes += bytes_of(&part);
            room.insert(part);
        }
        if let Some(order) = order {
            self.look(order);
        }
    }

    /// Records whether a transaction misses nothing any more.
    fn look(&mut self, order: Order) {
        let Some(waiting) = self.due.get(&order) else { return };
        if waiting.locks == 0 && waiting.own.is_some() && self.missing_of(waiting).next().is_none()
        {
            self.ready.insert(order);
        }
    }

    fn remove_arrived(&mut self, turn: Turn) -> OrdMap<ShareId, Arc<Part>> {
        let arrived = self.arrived.remove(&turn).unwrap_or_default();
        let bytes: usize = arrived.values().map(|part| bytes_of(part)).sum();
        self.arrived_bytes = self.arrived_bytes.saturating_sub(bytes);
        arrived
    }

    fn missing_of<'a>(&'a self, waiting: &'a Waiting) -> impl Iterator<Item = ShareId> + 'a {
        let arrived = self.arrived.get(&waiting.due.turn());
        let is_here = move |share: &ShareId| arrived.is_some_and(|all| all.contains_key(share));
        waiting.others.iter().copied().filter(move |share| !is_here(share))
    }

    /// The other shares whose parts of a due transaction have not arrived; empty if it is not due.
    #[must_use]
    pub fn missing(&self, name: Name) -> Vec<ShareId> {
        let waiting = self.orders.get(&name).and_then(|order| self.due.get(order));
        waiting.map_or_else(Vec::new, |waiting| self.missing_of(waiting).collect())
    }

    /// Transactions that miss nothing, in their order, with all their parts. They keep their locks
    /// until they are [released](Self::release), so that none of them writes a key that another
    /// accesses.
    pub fn take_ready(&mut self) -> Vec<(Order, Due, Vec<Arc<Part>>)> {
        let mut all = Vec::new();
        while let Some(order) = self.ready.pop_first() {
            let Some(waiting) = self.due.get(&order) else { continue };
            let (due, own) = (waiting.due.clone(), waiting.own.clone());
            let arrived = self.remove_arrived(due.turn());
            let parts = own.into_iter().chain(arrived.into_values()).collect();
            all.push((order, due, parts));
        }
        all
    }

    /// A transaction has run: other transactions may have its locks.
    pub fn release(&mut self, order: Order, placement: &Placement) {
        let Some(waiting) = self.due.remove(&order) else { return };
        self.orders.remove(&waiting.due.entry.name());
        for (key, _) in keys(&waiting.due, placement) {
            let Some(queue) = self.locks.get_mut(key) else { continue };
            queue.retain(|lock| lock.order != order);
            let mut free = Vec::new();
            for (at, lock) in queue.iter_mut().enumerate() {
                if lock.writes && at > 0 {
                    break;
                }
                if !std::mem::replace(&mut lock.is_granted, true) {
                    free.push(lock.order);
                }
                if lock.writes {
                    break;
                }
            }
            if queue.is_empty() {
                self.locks.remove(key);
            }
            for order in free {
                self.grant(order);
            }
        }
    }

    fn grant(&mut self, order: Order) {
        let Some(waiting) = self.due.get_mut(&order) else { return };
        waiting.locks = waiting.locks.saturating_sub(1);
        if waiting.locks == 0 {
            self.granted.insert(order);
        }
    }

    /// All transactions that are due, in their order.
    pub fn due(&self) -> impl Iterator<Item = &Due> {
        self.due.values().map(|waiting| &waiting.due)
    }

    /// The keys that transactions which are due may write, some of them several times.
    pub fn writes(&self) -> impl Iterator<Item = &Key> {
        self.due().flat_map(|due| &due.entry.functor.writes)
    }

    /// The number of transactions that are due.
    #[must_use]
    pub fn len(&self) -> usize {
        self.due.len()
    }

    /// True if nothing is due.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.due.is_empty()
    }

    /// True if this is due.
    #[must_use]
    pub fn is_due(&self, name: Name) -> bool {
        self.orders.contains_key(&name)
    }

    /// True if `txn` is due under any name.
    #[must_use]
    pub fn is_any_due(&self, txn: TxnId) -> bool {
        let names = Name { txn, map: 0 }..=Name { txn, map: u64::MAX };
        self.orders.range(names).next().is_some()
    }

    /// The earliest timestamp in `stream` of its transactions that are due.
    #[must_use]
    pub fn earliest(&self, stream: PartitionId) -> Option<Timestamp> {
        let places = self.due().flat_map(|due| &due.places);
        places.filter(|(at, _)| *at == stream).map(|(_, place)| place.stamp).min()
    }

    /// This share's part of `turn`, if this server has it.
    #[must_use]
    pub fn part(&self, turn: Turn) -> Option<Arc<Part>> {
        self.kept.get(&turn).cloned()
    }

    /// All parts that are kept.
    #[must_use]
    pub fn kept(&self) -> &OrdMap<Turn, Arc<Part>> {
        &self.kept
    }

    /// Their approximate size in bytes.
    #[must_use]
    pub fn kept_bytes(&self) -> usize {
        self.kept_bytes
    }

    /// Drops the parts of transactions up to `index` of `stream`, the oldest first, while there are
    /// more than `bytes` bytes.
    pub fn forget(&mut self, stream: PartitionId, index: Index, bytes: usize) {
        let first = |index| Turn { stream, index, name: Name::default() };
        while self.kept_bytes > bytes
            && let Some((&turn, _)) = self.kept.range(first(Index(0))..first(index.next())).next()
            && let Some(part) = self.kept.remove(&turn)
        {
            self.kept_bytes = self.kept_bytes.saturating_sub(bytes_of(&part));
        }
    }

    /// Starts again with the due transactions and the kept parts of a state. Parts that have
    /// arrived stay.
    pub fn restore(
        &mut self,
        due: impl IntoIterator<Item = Due>,
        kept: &OrdMap<Turn, Arc<Part>>,
        placement: &Placement,
    ) {
        for (&turn, part) in kept {
            self.keep(turn, part.clone());
        }
        self.granted.clear();
        self.ready.clear();
        self.due.clear();
        self.orders.clear();
        self.locks.clear();
        for due in due {
            self.insert(due, placement);
        }
    }

    /// Drops parts that arrived for transactions that have run.
    pub fn forget_arrived(&mut self, is_needed: impl Fn(Turn) -> bool) {
        let Self { arrived, arrived_bytes, orders, .. } = self;
        arrived.retain(|turn, _| orders.contains_key(&turn.name) || is_needed(*turn));
        *arrived_bytes = arrived.values().flat_map(OrdMap::values).map(|part| bytes_of(part)).sum();
    }

    /// Panics if the state contradicts itself.
    ///
    /// # Panics
    /// If it does; the message names the contradiction.
    pub fn assert_invariants(&self) {
        assert!(
            self.granted.is_empty() && self.ready.is_empty(),
            "transactions may run and do not"
        );
        self.assert_invariants_of_locks();
        let kept: usize = self.kept.values().map(|part| bytes_of(part)).sum();
        assert_eq!(kept, self.kept_bytes, "parts that are kept are not counted");
        let arrived = self.arrived.values().flat_map(OrdMap::values);
        let arrived: usize = arrived.map(|part| bytes_of(part)).sum();
        assert_eq!(arrived, self.arrived_bytes, "parts that have come are not counted");
    }

    fn assert_invariants_of_locks(&self) {
        for (key, queue) in &self.locks {
            let writes = queue.iter().filter(|lock| lock.is_granted && lock.writes).count();
            let granted = queue.iter().filter(|lock| lock.is_granted).count();
            assert!(writes == 0 || granted == 1, "{key}: locks contradict each other: {queue:?}");
            assert!(queue.front().is_some_and(|lock| lock.is_granted), "{key} is nobody's");
        }
    }
}

fn is_shared(lock: &Lock) -> bool {
    lock.is_granted && !lock.writes
}

/// The keys of a transaction in this share, and whether it writes them, or leaves a mark there.
fn keys<'a>(due: &'a Due, placement: &Placement) -> OrdMap<&'a Key, bool> {
    let functor = &due.entry.functor;
    let reads = functor.reads.iter().map(|key| (key, is_fence(key)));
    let writes = functor.writes.iter().map(|key| (key, true));
    reads.chain(writes).filter(|(key, _)| placement.holds(key)).collect()
}

/// The size of a part that is kept, in bytes. It is never zero, however little was read.
fn bytes_of(part: &Part) -> usize {
    TURN + part.size()
}

#[cfg(test)]
mod tests {
    use orthodrome_core::cluster::Cluster;
    use orthodrome_core::id::{NodeId, RegionId, TxnId};
    use orthodrome_core::time::Duration;
    use orthodrome_core::topology::Topology;

    use super::*;
    use crate::deterministic::merge::Place;
    use crate::deterministic::{Ordering, Sequenced};
    use crate::functor::{Body, Functor};

    fn placement() -> Placement {
        let map = Topology::uniform(3, Duration::from_millis(1), Duration::from_millis(10));
        let cluster = Cluster::spread(map, 2, 1, 1, 3).unwrap().divided(2).unwrap();
        Placement::new(Arc::new(cluster), Ordering::Global).seen_by(NodeId(1))
    }

    /// The first keys of each share.
    fn keys_of(placement: &Placement, holds: bool) -> Vec<Key> {
        let all = (0..99).map(|number| Key::from(format!("k{number:02}")));
        all.filter(|key| placement.holds(key) == holds).collect()
    }

    fn due(number: u64, reads: &[&Key], writes: &[&Key]) -> Due {
        let sorted = |keys: &[&Key]| {
            let keys: OrdSet<Key> = keys.iter().map(|&key| key.clone()).collect();
            keys.into_iter().collect()
        };
        let functor = Functor {
            txn: TxnId::new(orthodrome_core::id::ClientId(1), number),
            reads: sorted(reads),
            writes: sorted(writes),
            body: Body::Ops(Vec::new()),
            acknowledged_below: 0,
        };
        let stream = PartitionId(0);
        let entry = Sequenced::new(Arc::new(functor), vec![stream], Vec::new(), RegionId(0));
        let stamp = Timestamp(number);
        let place = Place { index: Index(number), offset: 0, stamp, is_late: false };
        Due { entry: Arc::new(entry), stamp, places: vec![(stream, place)] }
    }

    /// Takes the parts of all transactions that have their locks. Returns their numbers.
    fn take_parts(shares: &mut Shares) -> Vec<u64> {
        let mut taken = Vec::new();
        while let Some((order, due)) = shares.next_granted() {
            taken.push(due.turn().index.0);
            shares.take_part(order, Arc::default());
        }
        taken
    }

    fn run(shares: &mut Shares, placement: &Placement) -> Vec<u64> {
        let ready = shares.take_ready();
        for (order, ..) in &ready {
            shares.release(*order, placement);
        }
        ready.iter().map(|(_, due, _)| due.turn().index.0).collect()
    }

    #[test]
    fn a_transaction_that_waits_for_a_share_blocks_only_transactions_on_its_keys() {
        let placement = placement();
        let (here, there) = (keys_of(&placement, true), keys_of(&placement, false));
        let mut shares = Shares::new(false);
        shares.insert(due(1, &[&there[0]], &[&here[0]]), &placement);
        shares.insert(due(2, &[&here[0]], &[]), &placement);
        shares.insert(due(3, &[], &[&here[0]]), &placement);
        shares.insert(due(4, &[&here[1]], &[&here[1]]), &placement);
        // A transaction that accesses nothing in this share is ignored.
        shares.insert(due(5, &[], &[&there[1]]), &placement);
        assert_eq!(shares.len(), 4);
        assert_eq!(take_parts(&mut shares), [1, 4]);
        assert_eq!(run(&mut shares, &placement), [4]);
        assert_eq!(take_parts(&mut shares), [0; 0]);
        let turn = due(1, &[&there[0]], &[&here[0]]).turn();
        assert_eq!(shares.missing(turn.name), [ShareId(1)]);
        shares.arrive(turn, ShareId(1), Arc::default());
        assert_eq!(run(&mut shares, &placement), [1]);
        assert_eq!((take_parts(&mut shares), run(&mut shares, &placement)), (vec![2], vec![2]));
        assert_eq!((take_parts(&mut shares), run(&mut shares, &placement)), (vec![3], vec![3]));
        shares.assert_invariants();
        assert!(shares.is_empty() && shares.locks.is_empty());
    }

    #[test]
    fn a_part_that_arrives_early_is_not_requested() {
        let placement = placement();
        let (here, there) = (keys_of(&placement, true), keys_of(&placement, false));
        let mut shares = Shares::new(false);
        let early = due(7, &[&there[0]], &[&here[0]]);
        shares.arrive(early.turn(), ShareId(1), Arc::default());
        shares.insert(early.clone(), &placement);
        assert!(shares.missing(early.turn().name).is_empty());
        assert_eq!((take_parts(&mut shares), run(&mut shares, &placement)), (vec![7], vec![7]));
        // Its own part is kept for servers that have not received it.
        assert_eq!(shares.kept().len(), 1);
        shares.forget(PartitionId(0), Index(6), 0);
        assert!(shares.part(early.turn()).is_some());
        shares.forget(PartitionId(0), Index(7), 0);
        assert_eq!((shares.part(early.turn()), shares.kept_bytes()), (None, 0));
    }

    #[test]
    fn readers_share_a_key_and_have_it_before_the_writer_behind_them() {
        let placement = placement();
        let here = keys_of(&placement, true);
        let mut shares = Shares::new(false);
        for (number, writes) in [(1, true), (2, false), (3, false), (4, true), (5, false)] {
            let (reads, writes) =
                if writes { (vec![], vec![&here[0]]) } else { (vec![&here[0]], vec![]) };
            shares.insert(due(number, &reads, &writes), &placement);
        }
        let mut rounds = Vec::new();
        while !shares.is_empty() {
            take_parts(&mut shares);
            shares.assert_invariants_of_locks();
            rounds.push(run(&mut shares, &placement));
        }
        assert_eq!(rounds, [vec![1], vec![2, 3], vec![4], vec![5]]);
    }
}
