//! Disks: a log with group commit under the machine's tickets, and a state engine under its
//! checkpoints. A crash keeps what was flushed and a prefix of what was not.
//!
//! A disk also carries what a server's storage checks when it opens a data directory: whose data it
//! is, checksums, and once a second how much of the log is durable. So a simulated node refuses the
//! same disks as a real one, see [`Disk::open`].

use std::collections::VecDeque;
use std::sync::Arc;

use orthodrome_core::id::{NodeId, Ticket};
use orthodrome_core::machine::Protocol;
use orthodrome_core::rng::Rng;
use orthodrome_core::store::{MemoryEngine, Memtable};
use orthodrome_core::time::{Duration, Time, nanos};

/// How fast disks are.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct DiskModel {
    /// Writing one record into the operating system's buffers.
    pub write: Duration,
    /// Making everything written so far durable.
    pub flush: Duration,
    /// Each flush takes up to this much longer, uniformly.
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

/// What a machine asked to remember.
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

/// How a fault makes the disk fail at its next flush.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DiskFailure {
    /// Nothing more can be written.
    Full,
    /// A flush returned an error; what it covered may or may not be durable.
    FsyncError,
    /// The node crashes as its next flush completes, before it hears of it.
    CrashBeforeReport,
    /// The node crashes when its next flush has completed and it has acted on that.
    CrashAfterReport,
}

/// Why a node refuses to start from a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Refusal {
    /// The data is another node's.
    #[error("the data belongs to {found}, and this is {expected}; give each node its own disk")]
    WrongOwner {
        /// Whose it is.
        found: NodeId,
        /// Who wants to start from it.
        expected: NodeId,
    },
    /// A checksum does not match.
    #[error("the log is damaged; restore this node's data from a good copy, or replace the node")]
    Damaged,
}

/// One node's disk. It survives the node's crashes.
#[derive(Debug)]
pub struct Disk<P: Protocol> {
    /// Whose data it is: in the header of every file.
    owner: NodeId,
    model: DiskModel,
    engine: MemoryEngine,
    records: Vec<P::Record>,
    pending: VecDeque<Pending<P>>,
    /// How many of the pending entries the flush under way covers; 0 if there is none.
    flushing: usize,
    /// Faults make each flush take this much longer.
    extra: Duration,
    /// What a fault has in store.
    pub failure: Option<DiskFailure>,
    /// A bit of it is wrong.
    is_damaged: bool,
    /// Which of `records`, from here on, are the last batch of the log; none after a checkpoint.
    tail: usize,
    /// How many of the last batch were reported durable.
    tail_reported: usize,
    /// When the flush under way, or the last one, is done.
    flush_done: Time,
    /// Flushes report what is not durable.
    is_lying: bool,
    /// Writes that were reported durable and are not.
    unsafe_writes: u64,
    /// Writes that were reported durable, of all times.
    reported: u64,
    /// `reported` when somebody copied the disk.
    copied: Option<u64>,
}

impl<P: Protocol> Disk<P> {
    /// An empty disk of `owner`.
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
        }
    }

    /// An empty disk takes the place of this one.
    pub fn replace(&mut self) {
        *self = Self::new(self.owner, self.model);
    }

    /// Whose data it holds.
    #[must_use]
    pub fn owner(&self) -> NodeId {
        self.owner
    }

    /// `node` starts from this disk: every record that it recovers, oldest first.
    ///
    /// # Errors
    /// The data is another node's, or damaged: the node must not start.
    pub fn open(&mut self, node: NodeId) -> Result<Vec<P::Record>, Refusal> {
        if self.owner != node {
            return Err(Refusal::WrongOwner { found: self.owner, expected: node });
        }
        if self.is_damaged {
            return Err(Refusal::Damaged);
        }
        // The node acts on everything it recovers.
        self.tail_reported = self.records.len().saturating_sub(self.tail);
        Ok(self.records.clone())
    }

    /// A bit of the log flips while the node is down at `now`. Returns how many writes that were
    /// reported durable are lost without a trace: if the bit is in the last batch, and the batch is
    /// younger than the last note of how much is durable, the log looks as if the batch had been
    /// under way when the node stopped, and the batch is cut off.
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

    /// The data is restored from a good copy.
    pub fn restore(&mut self) {
        self.is_damaged = false;
    }

    /// From now on flushes report what is not durable; or no longer, and everything is durable.
    pub fn lie(&mut self, is_lying: bool) {
        self.is_lying = is_lying;
        self.unsafe_writes = 0;
    }

    /// Somebody copies the disk.
    pub fn copy(&mut self) {
        self.copied.get_or_insert(self.reported);
    }

    /// The copy comes back in place of the disk. Returns how many writes are lost that were reported
    /// durable since: nothing on the copy tells that there were any.
    pub fn roll_back(&mut self) -> u64 {
        self.copied.take().map_or(0, |copied| self.reported.saturating_sub(copied))
    }

    /// The state engine on this disk.
    #[must_use]
    pub fn engine(&self) -> MemoryEngine {
        self.engine.clone()
    }

    /// Every record that a restart would recover, oldest first.
    #[must_use]
    pub fn records(&self) -> &[P::Record] {
        &self.records
    }

    /// How many writes are not durable yet.
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

    /// Starts a flush of everything written so far, if there is something and no flush is under
    /// way. Returns when it will be done.
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

    /// The flush under way is done. Returns the last ticket that is durable now, and the longest
    /// causal path to a write it covered.
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

    /// The node crashed: of what was not durable, a random prefix survives. With `torn`, the cut
    /// goes through a record of the unflushed tail if there is one; a record that is cut fails its
    /// checksum and counts as lost. Returns how many writes are lost that were reported durable.
    pub fn crash(&mut self, torn: bool, rng: &mut Rng) -> u64 {
        let unsafe_writes = std::mem::take(&mut self.unsafe_writes);
        // Drawn only for a disk that lies, so that other runs draw what they always drew.
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
        // A checkpoint merges its versions before it replaces the records, so the crash may fall
        // in between.
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

    /// Makes everything written survive the next crash, or nothing of what was not flushed: for
    /// scripts, which leave nothing to chance.
    pub fn settle(&mut self, keep: bool) {
        self.flushing = if keep { self.pending.len() } else { 0 };
        if keep {
            self.finish_flush();
        } else {
            self.pending.clear();
        }
    }

    /// A fault makes each flush take `extra` longer; zero ends it.
    pub fn slow_down(&mut self, extra: Duration) {
        self.extra = extra;
    }

    fn keep(&mut self, entry: Entry<P>) {
        match entry {
            Entry::Record(record) => self.records.push(record),
            Entry::Checkpoint { versions, records } => {
                self.engine.merge(&versions);
                self.records = records;
                // A checkpoint is a file of its own, which must be whole.
                self.tail = self.records.len();
            }
        }
    }
}
