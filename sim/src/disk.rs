//! Disks: a log with group commit under the machine's tickets, and a state engine under its
//! checkpoints. A crash keeps what was flushed and a prefix of what was not.

use std::collections::VecDeque;
use std::sync::Arc;

use orthodrome_core::id::Ticket;
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

/// One node's disk. It survives the node's crashes.
#[derive(Debug)]
pub struct Disk<P: Protocol> {
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
}

impl<P: Protocol> Disk<P> {
    /// An empty disk.
    #[must_use]
    pub fn new(model: DiskModel) -> Self {
        Self {
            model,
            engine: MemoryEngine::default(),
            records: Vec::new(),
            pending: VecDeque::new(),
            flushing: 0,
            extra: Duration::ZERO,
            failure: None,
        }
    }

    /// An empty disk takes the place of this one.
    pub fn replace(&mut self) {
        *self = Self::new(self.model);
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
        Some(now + writes + self.model.flush + self.extra + jitter)
    }

    /// The flush under way is done. Returns the last ticket that is durable now, and the longest
    /// causal path to a write it covered.
    pub fn finish_flush(&mut self) -> Option<(Ticket, u16)> {
        let mut last = None;
        for _ in 0..std::mem::take(&mut self.flushing) {
            let Some(done) = self.pending.pop_front() else { break };
            let hops = last.map_or(done.hops, |(_, hops): (Ticket, u16)| hops.max(done.hops));
            last = Some((done.ticket, hops));
            self.keep(done.entry);
        }
        last
    }

    /// The node crashed: of what was not durable, a random prefix survives. With `torn`, the cut
    /// goes through a record of the unflushed tail if there is one; a record that is cut fails its
    /// checksum and counts as lost.
    pub fn crash(&mut self, torn: bool, rng: &mut Rng) {
        let most = if torn { self.pending.len().saturating_sub(1) } else { self.pending.len() };
        let survive = rng.range(0, most as u64);
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
            }
        }
    }
}
