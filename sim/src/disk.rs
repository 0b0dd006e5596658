//! Disks: a log with group commit for the machine's tickets, and a state engine for its
//! checkpoints. A crash keeps what was flushed, and a prefix of the rest.
//!
//! A disk also has the data that a server's storage checks when it opens a data directory: the id
//! of its owner, checksums, and a note, written once a second, of how much of the log is durable.
//! So a simulated node refuses the same disks as a real one, see [`Disk::open`].

use std::collections::VecDeque;
use std::sync::Arc;

use orthodrome_core::id::{NodeId, Ticket};
use orthodrome_core::machine::Protocol;
use orthodrome_core::rng::Rng;
use orthodrome_core::store::{MemoryEngine, Memtable};
use orthodrome_core::time::{Duration, Time, nanos};

/// The speed of disks.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct DiskModel {
    /// The time to write one record into the operating system's buffers.
    pub write: Duration,
    /// The time to make everything written so far durable.
    pub flush: Duration,
    /// Each flush takes up to this much longer, uniformly distributed.
    pub jitter: Duration,
}

impl Default for DiskModel {
    fn default() -> Self {
        Self {
            write: Duration::from_micros(2),
            flush: Duration::from_micros(100),
            jitter: Duration::ZERO,
        }
    }
}

/// A write of a machine.
#[derive(Debug)]
enum Entry<P: Protocol> {
    Record(P::Record),
    Checkpoint { versions: Arc<Memtable>, records: Vec<P::Record> },
}

#[derive(Debug)]
struct Pending<P: Protocol> {
    ticket: Ticket,
    /// WAN hops on the causal path to this write.
    hops: u16,
    entry: Entry<P>,
}

/// How the disk fails at its next flush.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DiskFailure {
    /// The disk is full.
    Full,
    /// The flush returns an error. The data that it covered may or may not be durable.
    FsyncError,
    /// The node crashes when its next flush completes, before the machine receives the report.
    CrashBeforeReport,
    /// The node crashes after its next flush has completed and the machine has processed the
    /// report.
    CrashAfterReport,
}

/// Why a node refuses to start from a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Refusal {
    /// The disk belongs to another node.
    #[error("the data belongs to {found}, and this is {expected}; give each node its own disk")]
    WrongOwner {
        /// The owner of the disk.
        found: NodeId,
        /// The node that tries to start from it.
        expected: NodeId,
    },
    /// A checksum does not match.
    #[error("the log is damaged; restore this node's data from a good copy, or replace the node")]
    Damaged,
}

/// One node's disk. It survives the node's crashes.
#[derive(Debug)]
pub struct Disk<P: Protocol> {
    /// The owner, which the header of every file names.
    owner: NodeId,
    model: DiskModel,
    engine: MemoryEngine,
    records: Vec<P::Record>,
    pending: VecDeque<Pending<P>>,
    /// How many of the pending entries the current flush covers; 0 if there is no flush.
    flushing: usize,
    /// Faults extend each flush by this.
    extra: Duration,
    /// The failure that a fault has planned.
    pub failure: Option<DiskFailure>,
    /// True if one of its bits is wrong.
    is_damaged: bool,
    /// The index in `records` where the last batch of the log begins; none after a checkpoint.
    tail: usize,
    /// How many entries of the last batch were reported durable.
    tail_reported: usize,
    /// When the current or last flush is done.
    flush_done: Time,
    /// True while flushes report data as durable that is not.
    is_lying: bool,
    /// The number of writes that were reported durable and are not.
    unsafe_writes: u64,
    /// The number of writes ever reported durable.
    reported: u64,
    /// The value of `reported` when the disk was copied.
    copied: Option<u64>,
    /// The disk replaced a lost one.
    is_replacement: bool,
}

impl<P: Protocol> Disk<P> {
    /// An empty disk that belongs to `owner`.
    #[must_use]
    pub fn new(owner: NodeId, model: DiskModel) -> Self {
        Self {
            owner,
            model,
            engine: MemoryEngine::default(),
            records: Vec::new(),
            pending: VecDeque::new(),
            flushing: 0,
            extra: Duration::ZERO,
            failure: None,
            is_damaged: false,
            tail: 0,
            tail_reported: 0,
            flush_done: Time::ZERO,
            is_lying: false,
            unsafe_writes: 0,
            reported: 0,
            copied: None,
            is_replacement: false,
        }
    }

    /// Replaces this disk by an empty one.
    pub fn replace(&mut self) {
        *self = Self { is_replacement: true, ..Self::new(self.owner, self.model) };
    }

    /// True if the disk replaced a lost one.
    #[must_use]
    pub fn is_replacement(&self) -> bool {
        self.is_replacement
    }

    /// The node to which the disk belongs.
    #[must_use]
    pub fn owner(&self) -> NodeId {
        self.owner
    }

    /// Starts `node` from this disk. Returns every record that it recovers, oldest first.
    ///
    /// # Errors
    /// If the disk belongs to another node or is damaged: the node must not start.
    pub fn open(&mut self, node: NodeId) -> Result<Vec<P::Record>, Refusal> {
        if self.owner != node {
            return Err(Refusal::WrongOwner { found: self.owner, expected: node });
        }
        if self.is_damaged {
            return Err(Refusal::Damaged);
        }
        // The node acts on everything that it recovers.
        self.tail_reported = self.records.len().saturating_sub(self.tail);
        Ok(self.records.clone())
    }

    /// Flips a bit of the log while the node is down at `now`. Returns the number of reported
    /// writes that are lost without a trace. This happens if the bit is in the last batch, and the
    /// last note of the durable length is older than the batch. The log then looks as if the node
    /// had stopped while it wrote the batch, and the batch is cut off.
    pub fn flip_bit(&mut self, now: Time, rng: &mut Rng) -> u64 {
        let at = usize::try_from(rng.below(self.records.len() as u64)).unwrap_or(0);
        let is_noted = now.as_micros() / 1_000_000 > self.flush_done.as_micros() / 1_000_000;
        if at < self.tail || is_noted || self.records.is_empty() {
            self.is_damaged = true;
            return 0;
        }
        self.records.truncate(self.tail);
        std::mem::take(&mut self.tail_reported) as u64
    }

    /// Restores the data from a good copy.
    pub fn restore(&mut self) {
        self.is_damaged = false;
    }

    /// If `is_lying`, flushes report data as durable that is not. Otherwise everything is durable.
    pub fn lie(&mut self, is_lying: bool) {
        self.is_lying = is_lying;
        self.unsafe_writes = 0;
    }

    /// Copies the disk.
    pub fn copy(&mut self) {
        self.copied.get_or_insert(self.reported);
    }

    /// Puts the copy in place of the disk. Returns the number of writes that were reported durable
    /// since the copy was made: nothing on the copy shows that they existed.
    pub fn roll_back(&mut self) -> u64 {
        self.copied.take().map_or(0, |copied| self.reported.saturating_sub(copied))
    }

    /// The state engine on this disk.
    #[must_use]
    pub fn engine(&self) -> MemoryEngine {
        self.engine.clone()
    }

    /// The records that a restart would recover, oldest first.
    #[must_use]
    pub fn records(&self) -> &[P::Record] {
        &self.records
    }

    /// The number of writes that are not durable yet.
    #[must_use]
    pub fn unflushed(&self) -> usize {
        self.pending.len()
    }

    /// Writes a record.
    pub fn write(&mut self, ticket: Ticket, record: P::Record, hops: u16) {
        self.pending.push_back(Pending { ticket, hops, entry: Entry::Record(record) });
    }

    /// Writes a checkpoint.
    pub fn checkpoint(
        &mut self,
        ticket: Ticket,
        versions: Arc<Memtable>,
        records: Vec<P::Record>,
        hops: u16,
    ) {
        let entry = Entry::Checkpoint { versions, records };
        self.pending.push_back(Pending { ticket, hops, entry });
    }

    /// Starts a flush of everything written so far, if there is anything and no flush is pending.
    /// Returns when it will be done.
    pub fn start_flush(&mut self, now: Time, rng: &mut Rng) -> Option<Time> {
        if self.flushing > 0 || self.pending.is_empty() {
            return None;
        }
        self.flushing = self.pending.len();
        let writes = self.model.write * u32::try_from(self.flushing).unwrap_or(u32::MAX);
        let jitter = match nanos(self.model.jitter) {
            0 => Duration::ZERO,
            most => Duration::from_nanos(rng.range(0, most)),
        };
        self.flush_done = now + writes + self.model.flush + self.extra + jitter;
        Some(self.flush_done)
    }

    /// Ends the current flush. Returns the last durable ticket, and the longest causal path to a
    /// write that it covered.
    pub fn finish_flush(&mut self) -> Option<(Ticket, u16)> {
        let mut last = None;
        self.tail = self.records.len();
        for _ in 0..std::mem::take(&mut self.flushing) {
            let Some(done) = self.pending.pop_front() else { break };
            let hops = last.map_or(done.hops, |(_, hops): (Ticket, u16)| hops.max(done.hops));
            last = Some((done.ticket, hops));
            self.keep(done.entry);
            self.reported += 1;
            self.unsafe_writes += u64::from(self.is_lying);
        }
        self.tail_reported = self.records.len().saturating_sub(self.tail);
        last
    }

    /// The node crashes. A random prefix of the writes that were not durable survives. With `torn`,
    /// the cut goes through a record of the unflushed tail, if there is one; such a record fails
    /// its checksum and counts as lost. Returns the number of lost writes that had been reported
    /// durable.
    pub fn crash(&mut self, torn: bool, rng: &mut Rng) -> u64 {
        let unsafe_writes = std::mem::take(&mut self.unsafe_writes);
        // It draws only for a disk that lies, so that other runs keep their draws.
        let lost = if unsafe_writes > 0 { rng.range(0, unsafe_writes) } else { 0 };
        let most = if torn { self.pending.len().saturating_sub(1) } else { self.pending.len() };
        let survive = rng.range(0, most as u64);
        if survive > 0 {
            (self.tail, self.tail_reported) = (self.records.len(), 0);
        }
        for _ in 0..survive {
            if let Some(kept) = self.pending.pop_front() {
                self.keep(kept.entry);
            }
        }
        // A checkpoint merges its versions before it replaces the records, so a crash may come in
        // between.
        if let Some(Pending { entry: Entry::Checkpoint { versions, .. }, .. }) =
            self.pending.front()
            && rng.chance(1, 2)
        {
            self.engine.merge(versions);
        }
        self.pending.clear();
        self.flushing = 0;
        lost
    }

    /// For scripts, which leave nothing to chance: all pending writes survive the next crash, or
    /// none does.
    pub fn settle(&mut self, keep: bool) {
        self.flushing = if keep { self.pending.len() } else { 0 };
        if keep {
            self.finish_flush();
        } else {
            self.pending.clear();
        }
    }

    /// A fault extends each flush by `extra`; zero ends the fault.
    pub fn slow_down(&mut self, extra: Duration) {
        self.extra = extra;
    }

    fn keep(&mut self, entry: Entry<P>) {
        match entry {
            Entry::Record(record) => self.records.push(record),
            Entry::Checkpoint { versions, records } => {
                self.engine.merge(&versions);
                self.records = records;
                // A checkpoint is a separate file, which must be complete.
                self.tail = self.records.len();
            }
        }
    }
}
