//! Takeover: a *new coordinator* decides what a lost coordinator left undecided, from the state of
//! the replicas (V10).
//!
//! There is one procedure for every failure, whether the backup coordinator is alive (§5.2) or its
//! whole region is lost (§5.4). The server that the directory chooses ([`Task`]) collects durable
//! promises from f + 1 replicas of every partition. A replica promises to refuse messages of lower
//! ballots, and reports all versions of the incarnation that it has above its visibility watermark.
//! [`decide`] says for each timestamp whether it is to be written. The new coordinator writes such
//! a transaction in the task's ballot, as any coordinator does, until one of two things is true.
//! Either f + 1 replicas of each of its partitions have it finalized; or f + 1 replicas of one
//! partition have durably refused it, which proves that it never was and never will be stored. Then
//! every partition is *closed*: f + 1 replicas durably know which timestamps of the incarnation
//! survive, drop all others, and refuse them permanently. Only then is the incarnation out.
//!
//! # Why closing is needed
//!
//! A version that reached just one replica may be unknown to the f + 1 that promised. Then no
//! replica has a tombstone of it. But a reader that asks this replica and another one would find
//! it, with no mark of an abort. So a replica that learns that an incarnation is out, and has not
//! closed it, answers no reads above its replica watermark before it has caught up
//! ([`Acceptor::owes`]). The same holds for versions that the coordinator stored at f + 1 replicas
//! but did not deliver to the others.
//!
//! # What a backup is for
//!
//! Some open transactions can be neither ruled out nor counted as stored. They would have to be
//! aborted, because their contents are mostly unknown. Therefore a coordinator informs a backup in
//! its region of each write before the write begins ([`Backup`]). If the backup is the one that
//! takes over, it writes those transactions as well. Safety does not depend on this, so no message
//! waits for the backup, its log is not on disk, and it need not be complete. V4 requires that
//! decisions are at the backup before they are acknowledged, because there the backup's writes may
//! fail. Here an acknowledged transaction is found stored in any f + 1 replicas, whatever the
//! backup knows.

use std::fmt::{self, Debug};

use orthodrome_core::Wire;
use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{NodeId, PartitionId};
use orthodrome_core::machine::Kind;
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::time::{Duration, Time, Timestamp};

use super::directory::Task;
use super::watermark::Members;
use crate::waiting::RetryState;

/// The part of a transaction that takeover needs.
pub trait Functor: Clone + Eq + Debug + Wire {
    /// The id of a transaction: replicas store it under one version number only.
    type Name: Ord;
    /// Its name.
    fn name(&self) -> Self::Name;
    /// Partitions that it writes.
    fn partitions(&self, cluster: &Cluster) -> OrdSet<PartitionId>;
}

/// Sizes of quorums of 2f + 1 replicas.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Quorums {
    /// The replicas of a partition.
    pub replicas: usize,
}

impl Quorums {
    /// f.
    #[must_use]
    pub fn faults(self) -> usize {
        self.replicas.saturating_sub(1) / 2
    }

    /// f + 1: any two of these share a replica.
    #[must_use]
    pub fn slow(self) -> usize {
        self.faults() + 1
    }

    /// ⌈3f/2⌉ + 1: any f + 1 replicas include most of such a quorum, as far as they are visible.
    #[must_use]
    pub fn fast(self) -> usize {
        (3 * self.faults()).div_ceil(2) + 1
    }
}

/// The state of a version at a replica.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Wire)]
pub enum Mark {
    /// Stored; it is not known whether enough others have it.
    Tentative,
    /// Stored at enough replicas of its partition.
    Finalized,
    /// Aborted by its coordinator, or by a new one.
    Aborted,
}

/// One version at a replica.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Held<F> {
    /// The ballot of the mark; 0 is its own coordinator's.
    pub ballot: u64,
    /// The mark.
    pub mark: Mark,
    /// The stored functor; missing if a tombstone came first.
    pub functor: Option<F>,
}

/// The timestamps of an incarnation that survive in one partition: all others above `above` are
/// void.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Closed {
    /// The ballot of the close.
    pub ballot: u64,
    /// Timestamps up to this had been decided before.
    pub above: Timestamp,
    /// The last timestamp that the incarnation may have created.
    pub upto: Timestamp,
    /// The surviving timestamps.
    pub survivors: OrdSet<Timestamp>,
}

impl Closed {
    /// True if `at`, a timestamp of the incarnation, does not survive.
    #[must_use]
    pub fn voids(&self, at: Timestamp) -> bool {
        at > self.above && !self.survivors.contains(&at)
    }
}

/// One replica's versions of an incarnation at the time of its promise. It is durable before it is
/// sent.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Promise<F> {
    /// Its visibility watermark: lower timestamps are decided.
    pub visible: Timestamp,
    /// The earlier close of the partition here, in a lower ballot.
    pub closed: Option<Closed>,
    /// All versions and tombstones of the incarnation that are not below [`Promise::visible`].
    pub held: OrdMap<Timestamp, Held<F>>,
}

/// The part of a promise in a message: a long promise is sent in pieces. Conclusions are drawn from
/// a replica's state at one moment, so pieces of different moments are not combined.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Wire)]
pub struct Part {
    /// The id of the moment, unique for this replica over all its incarnations.
    pub moment: u64,
    /// The piece has all versions from here on,
    pub from: Timestamp,
    /// up to here; none: to the end.
    pub next: Option<Timestamp>,
}

/// The part of a promise that has arrived.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Wire)]
pub struct Bookmark {
    /// See [`Part::moment`].
    pub moment: u64,
    /// See [`Part::next`].
    pub next: Timestamp,
}

impl<F: Functor> Promise<F> {
    /// The piece from `from` on, of about `bytes` bytes, and the beginning of the next one.
    #[must_use]
    pub fn piece(&self, from: Timestamp, bytes: usize) -> (Self, Option<Timestamp>) {
        let mut held = OrdMap::new();
        let (mut size, mut next) = (0, None);
        for (&at, one) in self.held.range(from..) {
            if size >= bytes {
                next = Some(at);
                break;
            }
            size += one.size();
            held.insert(at, one.clone());
        }
        (Self { visible: self.visible, closed: self.closed.clone(), held }, next)
    }
}

impl<F> Promise<F> {
    /// The mark of `at` at this replica, in its highest ballot.
    fn mark(&self, at: Timestamp) -> Option<(u64, Mark)> {
        let held = self.held.get(&at).map(|held| (held.ballot, held.mark));
        let closed = self.closed.as_ref().filter(|closed| at > closed.above).map(|closed| {
            let survives = closed.survivors.contains(&at);
            (closed.ballot, if survives { Mark::Finalized } else { Mark::Aborted })
        });
        held.max(closed)
    }
}

/// The conclusion from the promises of one partition about one timestamp.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Finding {
    /// Too few have promised.
    Wait,
    /// It was decided before: some replica's visibility watermark is above it.
    Settled,
    /// It was aborted, here or elsewhere.
    Aborted,
    /// It may have been stored at enough replicas to count as decided.
    PossiblyStored,
    /// It was not, and never will be.
    NotStored,
}

fn find<F>(quorums: Quorums, promises: &[&Promise<F>], at: Timestamp) -> Finding {
    if promises.iter().any(|promise| at < promise.visible) {
        return Finding::Settled;
    }
    if promises.len() < quorums.slow() {
        return Finding::Wait;
    }
    let marks = || promises.iter().filter_map(|promise| promise.mark(at));
    let Some(highest) = marks().map(|(ballot, _)| ballot).max() else { return Finding::NotStored };
    let of_highest = || marks().filter(|&(ballot, _)| ballot == highest).map(|(_, mark)| mark);
    let has = |wanted: Mark| of_highest().any(|mark| mark == wanted);
    // A coordinator that decided in a higher ballot knew everything that could have been decided
    // before.
    if has(Mark::Aborted) {
        Finding::Aborted
    } else if has(Mark::Finalized) || highest > 0 {
        Finding::PossiblyStored
    } else {
        let unseen = quorums.replicas.saturating_sub(promises.len());
        let may_be_fast = of_highest().count() + unseen >= quorums.fast();
        if may_be_fast { Finding::PossiblyStored } else { Finding::NotStored }
    }
}

/// The decision about one timestamp.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Some partition has too few promises.
    Wait,
    /// It was decided before, and stays as it is.
    Settled,
    /// Write it until f + 1 replicas of each of its partitions have it finalized; if f + 1 of one
    /// have durably refused its transaction, it is aborted.
    Write,
    /// It was open and not acknowledged: write it too, unless a replica refuses it.
    Resume,
    /// It is void.
    Abort,
}

/// Decides about a timestamp of a fenced coordinator, from the promises of each of its partitions'
/// replicas (R7). `is_known` says whether the new coordinator knows the transaction from the lost
/// one and may continue it.
///
/// A transaction that its coordinator may have counted as stored everywhere is written. Either f +
/// 1 replicas had it finalized, of which any f + 1 include one; or ⌈3f/2⌉ + 1 had it stored, of
/// which any f + 1 include all except as many as have not answered. An aborted transaction stays
/// aborted: its client may know that, and then any f + 1 include a tombstone.
#[must_use]
pub fn decide<F>(
    partitions: &[(Quorums, Vec<&Promise<F>>)],
    at: Timestamp,
    is_known: bool,
) -> Verdict {
    let findings: Vec<Finding> =
        partitions.iter().map(|(quorums, promises)| find(*quorums, promises, at)).collect();
    let has = |wanted: Finding| findings.contains(&wanted);
    if has(Finding::Settled) {
        Verdict::Settled
    } else if has(Finding::Wait) || findings.is_empty() {
        Verdict::Wait
    } else if has(Finding::Aborted) {
        Verdict::Abort
    } else if has(Finding::NotStored) {
        if is_known { Verdict::Resume } else { Verdict::Abort }
    } else {
        Verdict::Write
    }
}

/// The open transactions of other coordinators, of which this server is the backup: those that they
/// began to write and did not abort. Volatile, and complete only as far as messages arrive.
#[derive(Debug)]
pub struct Backup<F>(OrdMap<(NodeId, u32), OrdMap<Timestamp, F>>);

impl<F> Default for Backup<F> {
    fn default() -> Self {
        Self(OrdMap::new())
    }
}

impl<F: Functor> Backup<F> {
    /// Notes that a coordinator begins to write a transaction.
    pub fn begin(&mut self, coordinator: NodeId, incarnation: u32, at: Timestamp, functor: F) {
        self.0.entry((coordinator, incarnation)).or_default().insert(at, functor);
    }

    /// Notes that a coordinator has aborted a transaction, or has it stored.
    pub fn end(&mut self, coordinator: NodeId, incarnation: u32, at: Timestamp) {
        if let Some(open) = self.0.get_mut(&(coordinator, incarnation)) {
            open.remove(&at);
        }
    }

    /// Forgets transactions below the visibility watermark, and incarnations of which everything is
    /// decided.
    pub fn forget(&mut self, visible: Timestamp, members: &Members) {
        self.0.retain(|&(coordinator, incarnation), open| {
            *open = open.split_off(&visible);
            incarnation > members.settled_through(coordinator) && !open.is_empty()
        });
    }

    /// The open transactions of an incarnation.
    #[must_use]
    pub fn open(&self, coordinator: NodeId, incarnation: u32) -> OrdMap<Timestamp, F> {
        self.0.get(&(coordinator, incarnation)).cloned().unwrap_or_default()
    }

    /// The number of transactions.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.values().map(OrdMap::len).sum()
    }

    /// True if there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The takeover state of one replica: its promises, the survivors that it knows, and the
/// incarnations of which it lacks versions.
#[derive(Debug, Default)]
pub struct Acceptor {
    /// For each server, the promised ballot for the last incarnation that was taken over. Before a
    /// takeover, everything of earlier incarnations is decided.
    pledges: OrdMap<NodeId, (u32, u64)>,
    /// The closes of incarnations.
    closed: OrdMap<(NodeId, u32), Closed>,
    /// For each server: this replica has all versions of incarnations up to this one.
    swept: OrdMap<NodeId, u32>,
}

/// A record of a replica's promises, for each partition. Each record adds to the state, in any
/// order.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub enum Record {
    /// The replica promised.
    Pledge {
        /// The server whose timestamps are concerned.
        server: NodeId,
        /// The incarnation.
        incarnation: u32,
        /// The ballot: messages of lower ballots are refused, and all messages of earlier
        /// incarnations.
        ballot: u64,
    },
    /// The replica closed.
    Closed {
        /// The server.
        server: NodeId,
        /// The incarnation.
        incarnation: u32,
        /// The surviving timestamps.
        closed: Closed,
    },
    /// The replica has all versions of a server's incarnations up to this one.
    Swept {
        /// The server.
        server: NodeId,
        /// The last of these incarnations.
        incarnation: u32,
    },
}

impl Acceptor {
    /// Applies a record; true if it is new.
    pub fn learn(&mut self, record: Record) -> bool {
        match record {
            Record::Pledge { server, incarnation, ballot } => {
                let held = self.pledges.entry(server).or_default();
                let is_news = *held < (incarnation, ballot);
                *held = (incarnation, ballot).max(*held);
                is_news
            }
            Record::Closed { server, incarnation, closed } => {
                let ballot = closed.ballot;
                let held = self.closed.get(&(server, incarnation));
                let is_news = held.is_none_or(|held| held.ballot < ballot);
                if is_news {
                    self.closed.insert((server, incarnation), closed);
                }
                self.learn(Record::Pledge { server, incarnation, ballot }) || is_news
            }
            Record::Swept { server, incarnation } => {
                let swept = self.swept.entry(server).or_default();
                let is_news = *swept < incarnation;
                *swept = incarnation.max(*swept);
                is_news
            }
        }
    }

    /// Its promises, and the survivors that it knows.
    pub fn promises(&self) -> impl Iterator<Item = Record> + '_ {
        let pledges = self.pledges.iter().map(|(&server, &(incarnation, ballot))| Record::Pledge {
            server,
            incarnation,
            ballot,
        });
        let closed = self.closed.iter().map(|(&(server, incarnation), closed)| Record::Closed {
            server,
            incarnation,
            closed: closed.clone(),
        });
        pledges.chain(closed)
    }

    /// The records for a checkpoint.
    pub fn records(&self) -> impl Iterator<Item = Record> + '_ {
        let swept = self.swept.iter();
        let swept = swept.map(|(&server, &incarnation)| Record::Swept { server, incarnation });
        self.promises().chain(swept)
    }

    /// True if a request about timestamp `at` is allowed, which `incarnation` of `server`, or its
    /// new coordinator, sends in `ballot`: to store, finalize or abort it (V5).
    #[must_use]
    pub fn allows(&self, server: NodeId, incarnation: u32, ballot: u64, at: Timestamp) -> bool {
        let pledge = self.pledges.get(&server).copied().unwrap_or_default();
        let closed = self.closed(server, incarnation);
        let is_void = |closed: &Closed| closed.voids(at) && ballot <= closed.ballot;
        (incarnation, ballot) >= pledge && !closed.is_some_and(is_void)
    }

    /// Handles a takeover's request: returns the record to persist before the versions are sent.
    ///
    /// # Errors
    /// The higher ballot that was promised before; none if a later incarnation was taken over.
    pub fn promise(
        &mut self,
        server: NodeId,
        incarnation: u32,
        ballot: u64,
    ) -> Result<Record, Option<u64>> {
        match self.pledges.get(&server) {
            Some(&(later, _)) if later > incarnation => return Err(None),
            Some(&(same, held)) if same == incarnation && held > ballot => return Err(Some(held)),
            Some(_) | None => {}
        }
        let record = Record::Pledge { server, incarnation, ballot };
        self.learn(record.clone());
        Ok(record)
    }

    /// Handles a close: returns the record to persist before it is acknowledged. All other versions
    /// of the incarnation above `closed.above`, in ballots up to the close's, are void and must be
    /// dropped. A survivor that is missing must be pulled, and then [`Record::Swept`] be applied.
    ///
    /// # Errors
    /// The higher ballot that was promised before.
    pub fn close(
        &mut self,
        server: NodeId,
        incarnation: u32,
        closed: Closed,
    ) -> Result<Record, u64> {
        // Before a later incarnation was taken over, this one was decided for good.
        if let Err(Some(held)) = self.promise(server, incarnation, closed.ballot) {
            return Err(held);
        }
        let record = Record::Closed { server, incarnation, closed };
        self.learn(record.clone());
        Ok(record)
    }

    /// True if the new coordinator of `task` may still ask for the versions here.
    #[must_use]
    pub fn is_asked_for(&self, task: &Task) -> bool {
        let Task { server, incarnation, ballot, .. } = *task;
        let pledge = self.pledges.get(&server).copied().unwrap_or_default();
        let is_closed = self.closed(server, incarnation).is_some_and(|of| of.ballot >= ballot);
        pledge <= (incarnation, ballot) && !is_closed && self.swept(server) < incarnation
    }

    /// The close of an incarnation here.
    #[must_use]
    pub fn closed(&self, server: NodeId, incarnation: u32) -> Option<&Closed> {
        self.closed.get(&(server, incarnation))
    }

    /// The incarnation of `server` up to which this replica has all versions: it closed it, or
    /// asked f + 1 replicas, and has every version from its replica watermark on.
    #[must_use]
    pub fn swept(&self, server: NodeId) -> u32 {
        self.swept.get(&server).copied().unwrap_or(0)
    }

    /// Incarnations that are out, and of which this replica may lack versions or have void ones;
    /// for each server the last. Until [`Record::Swept`] is applied for each, the replica must not
    /// answer reads by watermarks of `members`' epoch or a later one, and its own replica watermark
    /// must not pass their writes.
    #[must_use]
    pub fn owes(&self, members: &Members) -> Vec<(NodeId, u32)> {
        let servers = members.servers.keys().map(|&id| (id, members.settled_through(id)));
        servers.filter(|&(id, settled)| settled > self.swept(id)).collect()
    }

    /// True if it knows what survives of all incarnations that are out, whether it has these
    /// versions or not.
    #[must_use]
    pub fn has_closed(&self, members: &Members) -> bool {
        self.owes(members).into_iter().all(|(server, last)| {
            (self.swept(server) + 1..=last).all(|life| self.closed(server, life).is_some())
        })
    }

    /// Forgets closes of incarnations whose timestamps are all below `settled`, a replica
    /// watermark: survivors are settled, and void versions are gone.
    pub fn forget(&mut self, settled: Timestamp) {
        self.closed.retain(|_, closed| closed.upto >= settled);
    }
}

/// Messages between a new coordinator and replicas.
#[derive(Clone, PartialEq, Eq, Debug, Wire, Kind)]
pub enum Message<F> {
    /// To the replicas of every partition: promise, and send your versions.
    Promise {
        /// The partition.
        partition: PartitionId,
        /// The takeover, with its ballot.
        task: Task,
        /// The part that has arrived.
        after: Option<Bookmark>,
    },
    /// The answer. The promise is durable.
    Promised {
        /// The partition.
        partition: PartitionId,
        /// The takeover, with its ballot.
        task: Task,
        /// The part of the versions in this message.
        part: Part,
        /// The promise.
        promise: Promise<F>,
    },
    /// To the replicas of every partition: the surviving timestamps.
    Close {
        /// The partition.
        partition: PartitionId,
        /// The takeover.
        task: Task,
        /// The surviving timestamps.
        closed: Closed,
    },
    /// The answer. The close is durable, and void versions were dropped.
    Closed {
        /// The partition.
        partition: PartitionId,
        /// The takeover, with its ballot.
        task: Task,
    },
    /// To the other replicas of a partition, from one that was away when an incarnation was closed:
    /// close it here too. One of any f + 1 replicas can answer, with [`Message::Close`].
    AskClose {
        /// The partition.
        partition: PartitionId,
        /// The server.
        server: NodeId,
        /// Its incarnation, which is out.
        incarnation: u32,
    },
}

/// A transaction to write in the task's ballot.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ToWrite<F> {
    /// The timestamp.
    pub at: Timestamp,
    /// The functor.
    pub functor: F,
    /// True if one refusal is enough to abort it.
    pub is_optional: bool,
}

/// The evidence for one of a transaction's version numbers: whether it may have been stored, the
/// ballot in which it was written last, and its mark. A coordinator that wrote in a ballot had
/// found that numbers of the same transaction in lower ballots were not stored; and of two numbers
/// in ballot 0, only one can be finalized anywhere.
type Evidence = (bool, Option<(u64, Mark)>);

/// The stage of a takeover.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Stage {
    /// Promises are being collected.
    Promises,
    /// Surviving transactions are being written.
    Writes,
    /// Partitions are being closed.
    Closes,
    /// f + 1 replicas of every partition are closed: tell the directory
    /// ([`super::directory::Membership::finish`]).
    Finished,
}

/// Promises of a node's replicas, each of one moment, that have not been sent completely.
#[derive(Debug)]
pub struct Tellings<F> {
    moment: u64,
    /// By who asks, the partition, and the server that is taken over: a node may take over several
    /// servers at once.
    open: OrdMap<(NodeId, PartitionId, NodeId), Telling<F>>,
}

#[derive(Debug)]
struct Telling<F> {
    task: Task,
    moment: u64,
    whole: Promise<F>,
}

impl<F> Default for Tellings<F> {
    fn default() -> Self {
        Self::new(0)
    }
}

impl<F> Tellings<F> {
    /// Starts without any. Moments are numbered from `first` on, which no other incarnation of this
    /// node uses.
    #[must_use]
    pub fn new(first: u64) -> Self {
        Self { moment: first, open: OrdMap::new() }
    }

    /// Forgets those for which `is_over` is true: no coordinator asks for the rest.
    pub fn forget(&mut self, is_over: impl Fn(PartitionId, &Task) -> bool) {
        self.open.retain(|&(_, partition, _), telling| !is_over(partition, &telling.task));
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.open.len()
    }

    /// True if there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }
}

impl<F: Functor> Tellings<F> {
    /// The remaining pieces for `to`, each of about `bytes` bytes: of the promise whose first
    /// pieces it has, if that is remembered; otherwise of a new one, which `promise` returns.
    pub fn tell(
        &mut self,
        to: NodeId,
        (partition, task): (PartitionId, Task),
        after: Option<Bookmark>,
        bytes: usize,
        promise: impl FnOnce() -> Promise<F>,
    ) -> Vec<(Part, Promise<F>)> {
        let of = (to, partition, task.server);
        let told = self.open.remove(&of).filter(|telling| telling.task == task);
        let rest = after.and_then(|Bookmark { moment, next }| {
            told.filter(|telling| telling.moment == moment).map(|telling| (telling, next))
        });
        let (telling, mut from) = rest.unwrap_or_else(|| {
            self.moment = self.moment.wrapping_add(1);
            (Telling { task, moment: self.moment, whole: promise() }, Timestamp::ZERO)
        });
        let mut pieces = Vec::new();
        loop {
            let (piece, next) = telling.whole.piece(from, bytes);
            pieces.push((Part { moment: telling.moment, from, next }, piece));
            match next {
                Some(next) => from = next,
                None => break,
            }
        }
        // Any of several pieces may be lost.
        if from != Timestamp::ZERO {
            self.open.insert(of, telling);
        }
        pieces
    }
}

/// The pieces of a replica's promise of one moment.
#[derive(Debug)]
struct Told<F> {
    moment: u64,
    promise: Promise<F>,
    /// The beginnings and ends of the received pieces.
    pieces: OrdMap<Timestamp, Option<Timestamp>>,
}

impl<F> Told<F> {
    fn new(Part { moment, from, next }: Part, promise: Promise<F>) -> Self {
        Self { moment, promise, pieces: OrdMap::from([(from, next)]) }
    }

    /// The beginning of the first missing piece; none if the promise is complete.
    fn next(&self) -> Option<Timestamp> {
        let mut next = Timestamp::ZERO;
        while let Some(end) = self.pieces.get(&next) {
            next = (*end)?;
        }
        Some(next)
    }
}

/// The takeover of one incarnation.
#[derive(Debug)]
pub struct Takeover<F> {
    task: Task,
    stage: Stage,
    /// The replicas of each partition.
    replicas: OrdMap<PartitionId, OrdSet<NodeId>>,
    promises: OrdMap<PartitionId, OrdMap<NodeId, Told<F>>>,
    /// The open transactions that the lost coordinator reported, if this is its backup.
    known: OrdMap<Timestamp, F>,
    /// Timestamps up to this are not touched, because they were decided before.
    above: Timestamp,
    /// The timestamps that are being written.
    unwritten: OrdSet<Timestamp>,
    /// The timestamps that have been written.
    survivors: OrdSet<Timestamp>,
    /// Versions of replicas that are not written.
    void: OrdMap<Timestamp, F>,
    closed: OrdMap<PartitionId, OrdSet<NodeId>>,
    asked: RetryState,
}

impl<F: Functor> Takeover<F> {
    /// Begins a takeover. `known` has the open transactions that the incarnation had reported to
    /// this server, and `visible` is this server's visibility watermark. Send [`Takeover::round`].
    #[must_use]
    pub fn new(
        task: Task,
        cluster: &Cluster,
        known: OrdMap<Timestamp, F>,
        visible: Timestamp,
        now: Time,
    ) -> Self {
        let partitions = cluster.partitions();
        Self {
            task,
            stage: Stage::Promises,
            replicas: partitions.map(|p| (p.id, p.replicas.iter().copied().collect())).collect(),
            promises: OrdMap::new(),
            known,
            // Every timestamp of the incarnation that is below this, or not above its floor, is
            // decided or was never assigned.
            above: task.after.max(Timestamp(visible.0.saturating_sub(1))),
            unwritten: OrdSet::new(),
            survivors: OrdSet::new(),
            void: OrdMap::new(),
            closed: OrdMap::new(),
            asked: RetryState::new(now),
        }
    }

    fn quorums(&self, partition: PartitionId) -> Quorums {
        Quorums { replicas: self.replicas.get(&partition).map_or(0, OrdSet::len) }
    }

    pub(super) fn promised(&self, partition: PartitionId) -> Vec<&Promise<F>> {
        let told = self.promises.get(&partition).into_iter().flat_map(OrdMap::values);
        told.filter(|told| told.next().is_none()).map(|told| &told.promise).collect()
    }

    /// The next question to a replica; none if it has sent everything.
    fn question(&self, partition: PartitionId, to: NodeId) -> Option<Message<F>> {
        let told = self.promises.get(&partition).and_then(|promises| promises.get(&to));
        let after = match told {
            Some(told) => Some(Bookmark { moment: told.moment, next: told.next()? }),
            None => None,
        };
        Some(Message::Promise { partition, task: self.task, after })
    }

    /// The messages to replicas that have not answered; none while versions are being written.
    #[must_use]
    pub fn round(&self) -> Vec<(NodeId, Message<F>)> {
        let mut round = Vec::new();
        let task = self.task;
        for (&partition, replicas) in &self.replicas {
            for &to in replicas {
                match self.stage {
                    Stage::Promises => {
                        round.extend(self.question(partition, to).map(|msg| (to, msg)));
                    }
                    Stage::Closes => {
                        let closed = self.closed.get(&partition);
                        if !closed.is_some_and(|closed| closed.contains(&to)) {
                            let closed = self.close();
                            round.push((to, Message::Close { partition, task, closed }));
                        }
                    }
                    Stage::Writes | Stage::Finished => {}
                }
            }
        }
        round
    }

    /// True if [`Takeover::round`] and [`Takeover::void`] must be sent again; notes that they are
    /// sent.
    pub fn is_due(&mut self, timeout: Duration, now: Time) -> bool {
        let is_due = self.asked.is_due(timeout, now);
        if is_due {
            self.asked = self.asked.again(now);
        }
        is_due
    }

    /// While versions are being written: the void versions at replicas. Replicas must abort these
    /// in the task's ballot. Otherwise a replica refuses a transaction that it has under another
    /// number, and that may be the one that counts.
    pub fn void(&self) -> impl Iterator<Item = (Timestamp, &F)> {
        let is_of_use = self.stage == Stage::Writes;
        self.void.iter().filter(move |_| is_of_use).map(|(&at, functor)| (at, functor))
    }

    fn close(&self) -> Closed {
        let Task { ballot, upto, .. } = self.task;
        Closed { ballot, above: self.above, upto, survivors: self.survivors.clone() }
    }

    /// Handles a piece of a replica's promise. Once enough promises are complete, report the result
    /// of each write with [`Takeover::on_written`] or [`Takeover::on_refused`], and send
    /// [`Takeover::void`]; if nothing is being written, send [`Takeover::round`].
    pub fn on_promised(
        &mut self,
        from: NodeId,
        (partition, task): (PartitionId, Task),
        part: Part,
        promise: Promise<F>,
        cluster: &Cluster,
        now: Time,
    ) -> Vec<ToWrite<F>> {
        let is_replica = self.replicas.get(&partition).is_some_and(|of| of.contains(&from));
        if task != self.task || self.stage != Stage::Promises || !is_replica {
            return Vec::new();
        }
        let promises = self.promises.entry(partition).or_default();
        let is_first = part.from == Timestamp::ZERO;
        match promises.get_mut(&from) {
            // The replica's promise is complete. A piece of another moment is late.
            Some(told) if told.next().is_none() => {}
            Some(told) if told.moment == part.moment => {
                told.promise.held.extend(promise.held);
                told.pieces.insert(part.from, part.next);
            }
            // The replica has forgotten that moment, and starts again.
            Some(told) if is_first => *told = Told::new(part, promise),
            None if is_first => drop(promises.insert(from, Told::new(part, promise))),
            Some(_) | None => {}
        }
        let lacks = |p: PartitionId| self.promised(p).len() < self.quorums(p).slow();
        if self.replicas.keys().any(|&partition| lacks(partition)) {
            return Vec::new();
        }
        let writes = self.verdicts(cluster);
        self.unwritten = writes.iter().map(|write| write.at).collect();
        self.promises.clear();
        self.enter(if writes.is_empty() { Stage::Closes } else { Stage::Writes }, now);
        writes
    }

    fn verdicts(&mut self, cluster: &Cluster) -> Vec<ToWrite<F>> {
        let all = || self.replicas.keys().flat_map(|&partition| self.promised(partition));
        let visible = all().map(|promise| promise.visible).max().unwrap_or_default();
        let above = self.above.max(Timestamp(visible.0.saturating_sub(1)));
        let mut functors = self.known.clone();
        for (&at, held) in all().flat_map(|promise| &promise.held) {
            if let Some(functor) = &held.functor {
                functors.insert(at, functor.clone());
            }
        }
        // By transaction id: at most one of a transaction's version numbers was ever stored.
        let mut writes: OrdMap<F::Name, (Evidence, ToWrite<F>)> = OrdMap::new();
        let mut void = OrdMap::new();
        // A version without a functor at any replica was never stored where it counts.
        for (at, functor) in functors {
            if at <= above || at > self.task.upto {
                continue;
            }
            let partitions = functor.partitions(cluster).into_iter();
            let facts: Vec<_> = partitions.map(|p| (self.quorums(p), self.promised(p))).collect();
            let is_optional = match decide(&facts, at, self.known.contains_key(&at)) {
                Verdict::Write => false,
                Verdict::Resume => true,
                Verdict::Abort => {
                    void.insert(at, functor);
                    continue;
                }
                Verdict::Settled | Verdict::Wait => continue,
            };
            let marks = facts.iter().flat_map(|(_, promises)| promises);
            let evidence = (!is_optional, marks.filter_map(|promise| promise.mark(at)).max());
            let rival = writes.get(&functor.name()).map(|(evidence, _)| *evidence);
            let write = ToWrite { at, functor, is_optional };
            let loser = if rival.is_some_and(|rival| rival >= evidence) {
                Some(write)
            } else {
                writes.insert(write.functor.name(), (evidence, write)).map(|(_, loser)| loser)
            };
            void.extend(loser.map(|loser| (loser.at, loser.functor)));
        }
        self.void = void;
        let mut writes: Vec<_> = writes.into_values().map(|(_, write)| write).collect();
        writes.sort_unstable_by_key(|write| write.at);
        self.above = above;
        writes
    }

    /// Notes that f + 1 replicas of each partition have it finalized in the task's ballot. True if
    /// it was the last write: send [`Takeover::round`].
    pub fn on_written(&mut self, at: Timestamp, now: Time) -> bool {
        if self.unwritten.remove(&at) {
            self.survivors.insert(at);
        }
        self.end_writes(now)
    }

    /// Notes that f + 1 replicas of one partition have durably refused the transaction, or one
    /// replica an optional one. True if it was the last write: send [`Takeover::round`].
    pub fn on_refused(&mut self, at: Timestamp, now: Time) -> bool {
        self.unwritten.remove(&at);
        self.end_writes(now)
    }

    fn end_writes(&mut self, now: Time) -> bool {
        let is_over = self.stage == Stage::Writes && self.unwritten.is_empty();
        if is_over {
            self.enter(Stage::Closes, now);
        }
        is_over
    }

    /// Handles a replica's close. True if it was the last that is needed: the takeover is finished.
    /// The other replicas close when they catch up.
    pub fn on_closed(&mut self, from: NodeId, partition: PartitionId, task: Task) -> bool {
        let is_replica = self.replicas.get(&partition).is_some_and(|of| of.contains(&from));
        if task != self.task || self.stage != Stage::Closes || !is_replica {
            return false;
        }
        self.closed.entry(partition).or_default().insert(from);
        let closed = |p: &PartitionId| self.closed.get(p).map_or(0, OrdSet::len);
        if self.replicas.keys().all(|p| closed(p) >= self.quorums(*p).slow()) {
            self.stage = Stage::Finished;
        }
        self.stage == Stage::Finished
    }

    fn enter(&mut self, stage: Stage, now: Time) {
        self.stage = stage;
        self.asked = RetryState::new(now);
    }

    /// The takeover's task.
    #[must_use]
    pub fn task(&self) -> &Task {
        &self.task
    }

    /// The stage of the takeover.
    #[must_use]
    pub fn stage(&self) -> Stage {
        self.stage
    }
}

impl<F> fmt::Display for Message<F> {
    /// One short line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of = |f: &mut fmt::Formatter<'_>, name, partition: &PartitionId, task: &Task| {
            let Task { server, incarnation, ballot, .. } = task;
            write!(f, "{name} {partition} {server}.{incarnation} ballot {ballot}")
        };
        match self {
            Self::Promise { partition, task, after } => {
                of(f, "Promise", partition, task)?;
                after.map_or(Ok(()), |after| write!(f, " from {}", after.next))
            }
            Self::Promised { partition, task, promise, .. } => {
                of(f, "Promised", partition, task)?;
                write!(f, " visible {} held {}", promise.visible, promise.held.len())
            }
            Self::Close { partition, task, closed } => {
                of(f, "Close", partition, task)?;
                write!(f, " above {} survivors {}", closed.above, closed.survivors.len())
            }
            Self::Closed { partition, task } => of(f, "Closed", partition, task),
            Self::AskClose { partition, server, incarnation } => {
                write!(f, "AskClose {partition} {server}.{incarnation}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The possible states of one timestamp at a replica: absent and refused; tentative; finalized;
    /// a tombstone. All in ballot 0.
    const WAYS: [Option<Mark>; 4] =
        [None, Some(Mark::Tentative), Some(Mark::Finalized), Some(Mark::Aborted)];

    const AT: Timestamp = Timestamp(10);

    fn states(replicas: u32) -> impl Iterator<Item = Vec<Option<Mark>>> {
        (0..4_usize.pow(replicas))
            .map(move |state| (0..replicas).map(|r| WAYS[state / 4_usize.pow(r) % 4]).collect())
    }

    fn count(state: &[Option<Mark>], ways: &[Mark]) -> usize {
        state.iter().flatten().filter(|mark| ways.contains(mark)).count()
    }

    fn promise(mark: Option<Mark>, ballot: u64) -> Promise<()> {
        let held = mark.map(|mark| (AT, Held { ballot, mark, functor: None }));
        Promise { visible: Timestamp(5), closed: None, held: held.into_iter().collect() }
    }

    /// Every choice of f + 1 or more replicas.
    fn choices(quorums: Quorums) -> impl Iterator<Item = Vec<usize>> {
        (0..1_usize << quorums.replicas)
            .map(move |set| (0..quorums.replicas).filter(|r| set >> r & 1 == 1).collect())
            .filter(move |chosen: &Vec<usize>| chosen.len() >= quorums.slow())
    }

    /// The states that are possible when its coordinator stops: replicas finalize only what f + 1
    /// have stored.
    fn is_possible(quorums: Quorums, state: &[Option<Mark>]) -> bool {
        count(state, &[Mark::Finalized]) == 0 || {
            let held = count(state, &[Mark::Tentative, Mark::Finalized, Mark::Aborted]);
            held >= quorums.slow()
        }
    }

    /// True if the coordinator may have enough answers to count it as stored.
    fn may_be_stored(quorums: Quorums, state: &[Option<Mark>]) -> bool {
        count(state, &[Mark::Finalized]) >= quorums.slow()
            || count(state, &[Mark::Tentative, Mark::Finalized]) >= quorums.fast()
    }

    #[test]
    fn what_was_told_stands_whichever_replicas_are_asked() {
        let (mut told, mut stored, mut cases) = (0, 0, 0);
        for replicas in [1, 3, 5] {
            let quorums = Quorums { replicas: replicas as usize };
            for state in states(replicas).filter(|state| is_possible(quorums, state)) {
                let is_aborted = count(&state, &[Mark::Aborted]) >= quorums.slow();
                let has_tombstone = count(&state, &[Mark::Aborted]) > 0;
                // A coordinator that aborts it does not also count it as stored.
                let is_stored = may_be_stored(quorums, &state) && !has_tombstone;
                for chosen in choices(quorums) {
                    let promises: Vec<_> = chosen.iter().map(|&r| promise(state[r], 0)).collect();
                    let facts = [(quorums, promises.iter().collect::<Vec<_>>())];
                    for is_known in [false, true] {
                        let verdict = decide(&facts, AT, is_known);
                        cases += 1;
                        told += u32::from(is_aborted);
                        stored += u32::from(is_stored);
                        assert_ne!(verdict, Verdict::Wait);
                        if is_aborted {
                            assert_eq!(verdict, Verdict::Abort, "{state:?} by {chosen:?}");
                        }
                        if is_stored {
                            assert_eq!(verdict, Verdict::Write, "{state:?} by {chosen:?}");
                        }
                    }
                }
            }
        }
        assert!(cases > 10_000 && told > 1_000 && stored > 1_000, "{cases} {told} {stored}");
    }

    #[test]
    fn two_partitions_are_written_both_or_neither() {
        let quorums = Quorums { replicas: 3 };
        let possible = || states(3).filter(|state| is_possible(quorums, state));
        for (a, b) in possible().flat_map(|a| possible().map(move |b| (a.clone(), b))) {
            let is_given_up = [&a, &b].iter().any(|s| count(s, &[Mark::Aborted]) > 0);
            let is_told = [&a, &b].iter().all(|s| count(s, &[Mark::Aborted]) >= 2);
            let is_stored =
                !is_given_up && [&a, &b].iter().all(|state| may_be_stored(quorums, state));
            for (of_a, of_b) in
                choices(quorums).flat_map(|x| choices(quorums).map(move |y| (x.clone(), y)))
            {
                let promises = |state: &[Option<Mark>], of: &[usize]| {
                    of.iter().map(|&r| promise(state[r], 0)).collect::<Vec<_>>()
                };
                let (of_a, of_b) = (promises(&a, &of_a), promises(&b, &of_b));
                let facts = [(quorums, of_a.iter().collect()), (quorums, of_b.iter().collect())];
                let verdict = decide(&facts, AT, false);
                assert!(!is_told || verdict == Verdict::Abort, "{a:?} {b:?}: {verdict:?}");
                assert!(!is_stored || verdict == Verdict::Write, "{a:?} {b:?}: {verdict:?}");
            }
        }
    }

    /// A decision that was closed or written in one ballot is repeated by all later coordinators,
    /// whatever remains of lower ballots.
    #[test]
    fn whoever_comes_later_decides_the_same() {
        let quorums = Quorums { replicas: 3 };
        for state in states(3) {
            for finished in choices(quorums) {
                for survives in [false, true] {
                    let promises: Vec<_> = (0..3)
                        .map(|r| {
                            let mut promise = promise(state[r], 0);
                            if finished.contains(&r) {
                                let survivors = survives.then_some(AT).into_iter().collect();
                                let (above, upto) = (Timestamp(4), Timestamp(99));
                                promise.closed = Some(Closed { ballot: 7, above, upto, survivors });
                            }
                            promise
                        })
                        .collect();
                    let wanted = if survives { Verdict::Write } else { Verdict::Abort };
                    for chosen in choices(quorums) {
                        let asked = chosen.iter().filter_map(|&r| promises.get(r)).collect();
                        assert_eq!(decide(&[(quorums, asked)], AT, !survives), wanted);
                    }
                }
            }
        }
        // Written in a ballot, with a tombstone of a lower one.
        let all = [promise(Some(Mark::Finalized), 7), promise(Some(Mark::Aborted), 3)];
        assert_eq!(decide(&[(quorums, all.iter().collect())], AT, false), Verdict::Write);
    }

    #[test]
    fn nothing_is_decided_by_too_few_nor_below_the_watermark() {
        let quorums = Quorums { replicas: 3 };
        let one = promise(Some(Mark::Finalized), 0);
        assert_eq!(decide(&[(quorums, vec![&one])], AT, true), Verdict::Wait);
        let above = Promise { visible: AT.next(), ..promise(None, 0) };
        assert_eq!(decide(&[(quorums, vec![&one, &above])], AT, true), Verdict::Settled);
    }

    #[test]
    fn a_promise_outlasts_lower_ballots_and_a_close_all_but_survivors() {
        let (server, mut acceptor) = (NodeId(3), Acceptor::default());
        assert!(acceptor.allows(server, 1, 0, AT));
        let record = acceptor.promise(server, 1, 5).unwrap();
        assert!(!acceptor.allows(server, 1, 0, AT) && acceptor.allows(server, 1, 5, AT));
        assert!(acceptor.allows(server, 2, 0, AT), "a later incarnation is another");
        assert_eq!(acceptor.promise(server, 1, 4), Err(Some(5)));
        let survivors = OrdSet::from([AT]);
        let (above, upto) = (Timestamp(4), Timestamp(99));
        let closed = Closed { ballot: 5, above, upto, survivors };
        acceptor.close(server, 1, closed.clone()).unwrap();
        assert!(acceptor.allows(server, 1, 5, AT) && !acceptor.allows(server, 1, 5, AT.next()));
        assert!(acceptor.promise(server, 2, 9).is_ok());
        assert!(!acceptor.allows(server, 1, 6, AT), "everything of it is decided");
        assert!(acceptor.close(server, 1, closed).is_ok(), "a replica that was away closes late");
        assert_eq!(acceptor.promise(server, 1, 9), Err(None));
        let mut restarted = Acceptor::default();
        restarted.learn(record);
        assert!(!restarted.allows(server, 1, 0, AT));
        // Survivors are reported to others until no replica needs them.
        for record in acceptor.promises() {
            restarted.learn(record);
        }
        assert_eq!(restarted.closed(server, 1), acceptor.closed(server, 1));
        restarted.forget(upto);
        assert!(restarted.closed(server, 1).is_some());
        restarted.forget(upto.next());
        assert!(restarted.closed(server, 1).is_none() && !restarted.allows(server, 1, 9, AT));
    }
}
