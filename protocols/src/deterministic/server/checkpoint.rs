//! Checkpoints: what is persisted, and which part of it a restart uses.

use std::collections::VecDeque;
use std::mem::take;

use orthodrome_core::Wire as _;
use orthodrome_core::id::{NodeId, PartitionId, Ticket};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::scan::LISTS_APART_MAX;
use orthodrome_core::time::{Duration, Time, Timestamp};
use orthodrome_core::txn::{Key, Value, Version};

use super::super::message::{Image, Log, Record};
use super::super::{Cx, Note};
use super::Server;
use crate::checkpoint::CheckpointPace;
use crate::replication;

/// The server's own table in its store: the number of the checkpoint to which the data belongs.
pub(super) const OWN: PartitionId = PartitionId(u32::MAX);

/// The surviving records of each stream's log.
pub(super) type Logs = OrdMap<PartitionId, Vec<replication::Record<Log>>>;

/// The surviving images, by their numbers, each stream's log, and when the next checkpoint is due.
pub(super) fn read(
    node: NodeId,
    recovered: Vec<Record>,
) -> (OrdMap<u64, Image>, Logs, CheckpointPace) {
    let mut pace = CheckpointPace::default();
    let mut images = OrdMap::from([(0, Image::default())]);
    let mut logs: Logs = OrdMap::new();
    for record in recovered {
        pace.recovered(record.size(), matches!(record, Record::Image(_)));
        match record {
            Record::Image(image) if image.piece == 0 => {
                images.insert(image.number, Image::clone(&image));
            }
            Record::Image(next) => match images.get_mut(&next.number) {
                Some(image) => image.add(&next),
                None => {
                    panic!("{node}: piece {} of image {} comes first", next.piece, next.number)
                }
            },
            Record::Replication(stream, record) => {
                logs.entry(stream).or_default().push(record);
            }
        }
    }
    (images, logs, pace)
}

/// The pending writes, and the streams whose logs may have events or messages.
#[derive(Debug, Default)]
pub(super) struct Disk {
    /// When the next checkpoint is due.
    pub(super) pace: CheckpointPace,
    /// Streams whose logs may have events.
    pub(super) touched: OrdSet<PartitionId>,
    /// Streams whose logs may have messages to send together.
    pub(super) unflushed: OrdSet<PartitionId>,
    /// The pending checkpoint.
    checkpoint: Option<Ticket>,
    /// Streams through which another server's state was installed since the last checkpoint.
    pub(super) installed: OrdSet<PartitionId>,
    /// The same, before the pending checkpoint began.
    settling: OrdSet<PartitionId>,
    /// For some checkpoints, oldest first: when each was made, and for each partition the timestamp
    /// below which everything had run.
    collectables: VecDeque<(Time, Vec<(PartitionId, Timestamp)>)>,
}

/// A scan must find every deletion that was applied after it began. So what was applied less than
/// this ago is not dropped.
const DELETIONS_KEPT: Duration = Duration::from_secs(2 * LISTS_APART_MAX.as_secs());

/// The least time between two checkpoints that are remembered for this.
const COLLECTABLES_APART: Duration = Duration::from_secs(2);

impl Disk {
    /// Nothing is pending.
    pub(super) fn new(pace: CheckpointPace) -> Self {
        Self { pace, ..Self::default() }
    }
}

impl Server {
    /// Everything persisted up to `ticket` is durable.
    pub(super) fn on_durable(&mut self, ticket: Ticket, cx: &mut Cx<'_>) {
        for stream in self.placement.streams() {
            self.with(stream, cx, |held, io| held.replica.on_durable(ticket, io));
        }
        if self.disk.checkpoint.is_some_and(|checkpoint| checkpoint <= ticket) {
            self.disk.checkpoint = None;
            self.store.thaw();
            if self.placement.is_divided() {
                self.covered(cx);
            }
            for stream in take(&mut self.disk.settling) {
                self.with(stream, cx, |held, io| held.replica.snapshot_durable(io));
            }
        }
    }

    /// Makes a checkpoint if enough has been persisted since the last one, or another server's
    /// state was installed (S8).
    pub(super) fn checkpoint_if_due(&mut self, cx: &mut Cx<'_>) {
        let is_due = !self.disk.installed.is_empty()
            || self.disk.pace.is_due(self.config.hosting.checkpoint_bytes);
        if !is_due || self.store.is_frozen() || self.exchange.has_gaps() {
            return;
        }
        cx.note(Note::Checkpoint);
        self.state.number += 1;
        let number = Timestamp(self.state.number);
        let version = Version { timestamp: number, ..Version::INITIAL };
        self.store.put(OWN, Key::default(), version, Some(Value::default()));
        self.store.collect_below(OWN, number);
        for (partition, below) in self.collectables(cx.now()) {
            self.store.collect_below(partition, below);
        }
        let image = self.state.image(&self.placement);
        self.exchange.checkpoint(&image);
        let pieces = image.into_pieces(self.config.piece_bytes).into_iter();
        let pieces: Vec<Record> = pieces.map(Record::Image).collect();
        let mut records = pieces.clone();
        for (&stream, held) in &mut self.streams {
            let applied = self.state.applied(stream);
            let (entries, bytes) = (self.config.log_kept, self.config.hosting.kept_bytes);
            let through = held.replica.compactable_within(entries, bytes).min(applied);
            let through = through.min(self.exchange.compactable(self.placement.share(), stream));
            held.replica.compact(through);
            let log = held.replica.checkpoint_records().into_iter();
            records.extend(log.map(|record| Record::Replication(stream, record)));
        }
        // The pieces are written twice.
        let bytes = pieces.iter().chain(&records).map(Record::size).sum();
        for piece in pieces {
            cx.persist(piece);
        }
        self.disk.settling = take(&mut self.disk.installed);
        self.disk.pace.made(bytes);
        self.disk.checkpoint = Some(cx.checkpoint(self.store.freeze(), records));
    }

    /// For each partition, the timestamp below which old versions and deletions may be dropped.
    /// What ran after an earlier checkpoint has no timestamps below those of that checkpoint. So an
    /// earlier checkpoint says which deletions are old, and no clock has to be trusted.
    fn collectables(&mut self, now: Time) -> Vec<(PartitionId, Timestamp)> {
        let all = &mut self.disk.collectables;
        if all.back().is_none_or(|(made, _)| now.since(*made) >= COLLECTABLES_APART) {
            all.push_back((now, self.state.collectables(&self.placement)));
        }
        let is_old = |(made, _): &(Time, Vec<_>)| now.since(*made) >= DELETIONS_KEPT;
        while all.get(1).is_some_and(is_old) {
            all.pop_front();
        }
        let first = all.front().filter(|first| is_old(first));
        first.map(|(_, below)| below.clone()).unwrap_or_default()
    }
}
