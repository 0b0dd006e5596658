//! Read-only transactions that wait for prepared writers (Natto, two-phase locking). A leader
//! answers with the newest values, and promises how long they stay the newest (C12, R8). Carousel
//! refuses such a reader instead.

use orthodrome_core::id::{NodeId, PartitionId, TxnId};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::scan::is_fence;
use orthodrome_core::time::{Duration, Timestamp};
use orthodrome_core::txn::Key;

use super::coordinator::Coordinator;
use super::state::State;
use crate::gateway::Snapshot;
use crate::hosting::{CommandOf, Leading, World};

/// True if one of these keys is a fence: the request is a scan's, and stands for all keys of the
/// partition that a pending transaction may create.
pub(crate) fn has_fence(keys: &[Key]) -> bool {
    keys.iter().any(is_fence)
}

/// Whoever reads a fence closes its partition up to so long ago.
const FENCE_LAG: Duration = Duration::from_millis(200);

/// The timestamp up to which the answer to a read-only request must be valid. The request of a scan or a
/// watch also closes its partition up to a moment ago, so that a watch goes on where nobody writes
/// ([`orthodrome_core::watch`]). Timestamps that clients propose are later than that.
pub(crate) fn valid_at_least(keys: &[Key], wanted: Timestamp, now: Timestamp) -> Timestamp {
    if has_fence(keys) { wanted.max(now - FENCE_LAG) } else { wanted }
}

/// The timestamps in a group's state.
pub trait Promises {
    /// At or above every applied commit timestamp.
    fn floor(&self) -> Timestamp;
    /// At or above every timestamp that any leader has promised.
    fn ceiling(&self) -> Timestamp;
}

impl<P, E, C> Promises for State<P, E, C> {
    fn floor(&self) -> Timestamp {
        self.floor
    }

    fn ceiling(&self) -> Timestamp {
        self.ceiling
    }
}

/// The hooks by which a protocol completes readers that wait for writers.
pub trait Reader: Coordinator<State: Promises> {
    /// A request waits for a leadership check.
    const READ_INDEX: Self::Note;
    /// A request waits for prepared writers.
    const READ_WAIT: Self::Note;

    /// The leader's field for it.
    fn reading(&mut self) -> &mut Reading;
    /// Transactions that may write one of these keys, or have committed such a write, and are still
    /// pending in the log.
    fn writers(&self, keys: &[Key]) -> OrdSet<TxnId>;
    /// Transactions whose prepare is proposed to the log and not chosen.
    fn unchosen(&self) -> OrdSet<TxnId>;
    /// The timestamp below which one of them will not commit; none if that is not known.
    fn proposal(leading: &Leading<'_, Self>, writer: TxnId) -> Option<Timestamp>;
    /// The command that allows later timestamps to be promised.
    fn ceiling_command(ceiling: Timestamp) -> CommandOf<Self>;
    /// The answer to the client: the values, unless they do not fit into one message.
    fn snapshot_message(
        txn: TxnId,
        partition: PartitionId,
        snapshot: Snapshot,
        is_too_much: bool,
    ) -> Self::Msg;

    /// True if readers need no lease: unsafe, for mutations.
    fn skips_lease(_config: &Self::Config) -> bool {
        false
    }
    /// True if readers do not wait for writers: unsafe, for mutations.
    fn skips_writers(_config: &Self::Config) -> bool {
        false
    }
}

/// A leader's promises to readers, and the readers that wait.
#[derive(Debug, Default)]
pub struct Reading {
    /// New proposals must be larger (C11).
    pub floor: Timestamp,
    /// The highest ceiling proposed.
    ceiling_proposed: Timestamp,
    /// Requests that wait for a leadership check.
    checked: OrdMap<u64, WaitingRead>,
    /// Requests that wait for a higher ceiling.
    above_ceiling: Vec<WaitingRead>,
    /// Requests that wait for prepared transactions to end.
    behind: Vec<WaitingRead>,
    /// The number of the next leadership check.
    next_check: u64,
}

impl Reading {
    /// The state of a new leader. Its predecessor may have promised anything up to the ceiling
    /// (C12, R8).
    pub fn new(state: &impl Promises) -> Self {
        let (floor, ceiling_proposed) = (state.ceiling().max(state.floor()), state.ceiling());
        Self { floor, ceiling_proposed, ..Self::default() }
    }

    /// The number of waiting requests.
    pub fn len(&self) -> usize {
        self.checked.len() + self.above_ceiling.len() + self.behind.len()
    }
}

/// A read-only request that waits.
#[derive(Clone, Debug)]
pub struct WaitingRead {
    /// The gateway.
    pub client: NodeId,
    /// The transaction.
    pub txn: TxnId,
    /// The keys to read.
    pub keys: Vec<Key>,
    /// The answer must be valid at least until this timestamp.
    pub at_least: Timestamp,
    /// Transactions that were prepared when the request arrived, may write its keys, and are still
    /// pending; none before the leader has checked. Later transactions do not matter: no client had
    /// their outcome when this one began.
    pub behind: Option<OrdSet<TxnId>>,
}

/// The transactions for which a request waits. A scan also waits until every prepare is chosen that
/// precedes it: its second list shows only prepares that a majority has.
fn awaited<R: Reader>(leader: &R, keys: &[Key]) -> OrdSet<TxnId> {
    let mut awaited = leader.writers(keys);
    if has_fence(keys) {
        awaited.extend(leader.unchosen());
    }
    awaited
}

impl<R: Reader> Leading<'_, R> {
    /// A read-only transaction's part: the newest values, and how long they are promised to be the
    /// newest. It is served under a lease or after a leadership check (C12), and within the ceiling
    /// that the group has agreed on (R8). It waits for every writer that was prepared when the
    /// request arrived: some client may already have that writer's outcome.
    pub fn on_read_only(&mut self, read: WaitingRead, world: &mut World<'_, R>) {
        if self.replica.has_lease(world.cx.now()) || R::skips_lease(world.config) {
            self.read_as_leader(read, world);
            return;
        }
        world.cx.note(R::READ_INDEX);
        let reading = self.leader.reading();
        let id = reading.next_check;
        reading.next_check += 1;
        reading.checked.insert(id, read);
        self.read_index(id, world);
    }

    /// The answer to a leadership check.
    pub fn on_read_index(&mut self, id: u64, is_leader: bool, world: &mut World<'_, R>) {
        let Some(read) = self.leader.reading().checked.remove(&id) else {
            unreachable!("{} was asked for no leadership check {id}", self.id);
        };
        if is_leader {
            self.read_as_leader(read, world);
        } else {
            world.send(read.client, R::not_leader(self.id, None, Some(read.txn)));
        }
    }

    fn read_as_leader(&mut self, mut read: WaitingRead, world: &mut World<'_, R>) {
        let reading = self.leader.reading();
        if read.at_least > self.state.ceiling() {
            let ceiling = read.at_least + R::timeouts(world.config).ceiling_ahead;
            reading.above_ceiling.push(read);
            self.raise_ceiling(ceiling, world);
            return;
        }
        // Transactions that prepare from now on commit above `at_least`.
        reading.floor = reading.floor.max(read.at_least);
        let writers = awaited(self.leader, &read.keys);
        let behind: OrdSet<TxnId> = match read.behind.take() {
            None => writers,
            Some(known) => known.intersection(&writers).copied().collect(),
        };
        if behind.is_empty() || R::skips_writers(world.config) {
            self.serve_read(read, world);
            return;
        }
        world.cx.note(R::READ_WAIT);
        read.behind = Some(behind);
        self.leader.reading().behind.push(read);
    }

    /// Answers a read-only request.
    fn serve_read(&mut self, read: WaitingRead, world: &mut World<'_, R>) {
        let WaitingRead { client, txn, keys, at_least, .. } = read;
        let wanted = world.cx.clock().now.max(at_least).max(self.leader.reading().floor);
        let mut valid_until = wanted.min(self.state.ceiling()).max(self.state.floor());
        // Writers that prepared after the request arrived will not commit below their proposals.
        for writer in awaited(self.leader, &keys) {
            let proposal = R::proposal(self, writer).unwrap_or(Timestamp::MAX);
            valid_until = valid_until.min(Timestamp(proposal.0.saturating_sub(1)));
        }
        let reading = self.leader.reading();
        reading.floor = reading.floor.max(valid_until);
        let is_too_much = world.is_too_much(self.id, &keys);
        let told = if is_too_much { vec![] } else { keys };
        let forgets = world.store.forgets(self.id).min(self.state.floor());
        let reads = told.into_iter().map(|key| {
            let read = world.store.read_known(self.id, &key, || forgets);
            (key, read)
        });
        let snapshot = Snapshot { reads: reads.collect(), valid_until };
        world.send(client, R::snapshot_message(txn, self.id, snapshot, is_too_much));
    }

    /// `txn` has ended: read-only requests do not wait for it any more.
    pub fn release_reads(&mut self, txn: TxnId, world: &mut World<'_, R>) {
        let mut free = Vec::new();
        self.leader.reading().behind.retain_mut(|read| {
            let waits = read.behind.as_mut().is_some_and(|behind| {
                behind.remove(&txn);
                !behind.is_empty()
            });
            if !waits {
                free.push(read.clone());
            }
            waits
        });
        for read in free {
            self.on_read_only(read, world);
        }
    }

    /// A prepare is chosen: scans do not wait for it any more, unless it writes their keys.
    pub fn release_scans(&mut self, world: &mut World<'_, R>) {
        let mut behind = std::mem::take(&mut self.leader.reading().behind);
        let free = behind.extract_if(.., |read| {
            has_fence(&read.keys) && {
                let awaited = awaited(self.leader, &read.keys);
                read.behind.as_ref().is_some_and(|behind| behind.is_disjoint(&awaited))
            }
        });
        let free: Vec<WaitingRead> = free.collect();
        self.leader.reading().behind = behind;
        for read in free {
            self.on_read_only(read, world);
        }
    }

    /// A higher ceiling is chosen: answers the requests that waited for it.
    pub fn on_ceiling(&mut self, world: &mut World<'_, R>) {
        for read in std::mem::take(&mut self.leader.reading().above_ceiling) {
            self.on_read_only(read, world);
        }
    }

    /// Ensures that the ceiling is above `timestamp` before any later log entry is chosen, and
    /// raises it well before it is reached.
    pub fn reserve(&mut self, timestamp: Timestamp, world: &mut World<'_, R>) {
        let ahead = R::timeouts(world.config).ceiling_ahead;
        if self.leader.reading().ceiling_proposed < timestamp + ahead / 2 {
            self.raise_ceiling(timestamp + ahead, world);
        }
    }

    fn raise_ceiling(&mut self, ceiling: Timestamp, world: &mut World<'_, R>) {
        let reading = self.leader.reading();
        if reading.ceiling_proposed < ceiling {
            reading.ceiling_proposed = ceiling;
            self.propose(R::ceiling_command(ceiling), world);
        }
    }
}
