//! The replicas of the streams' logs, and the processing of their events.

use std::mem::take;
use std::sync::Arc;

use orthodrome_core::Wire as _;
use orthodrome_core::id::{NodeId, PartitionId, Ticket};
use orthodrome_core::machine::Claim;
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::rng::Rng;
use orthodrome_core::time::Time;

use super::super::message::{Chunk, Command, Log, Msg, Record};
use super::super::sequencer::Sequencer;
use super::super::state::{Applied, Leaving};
use super::super::{Cx, Note, Timer};
use super::Server;
use super::checkpoint::Disk;
use crate::replication::{self, Event, Group, Index, Payload, Replica};

/// One stream's replica.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) replica: Replica<Log>,
    pub(super) sequencer: Sequencer,
    /// As the leader, this server has announced that entries are chosen up to here.
    announced: Index,
    /// A snapshot that is arriving in pieces.
    pub(super) staged: Option<Chunk>,
    /// The data of snapshots that are being sent in pieces, as of their first piece.
    pub(super) leaving: OrdMap<NodeId, Arc<Leaving>>,
}

/// A log's I/O.
pub(super) struct Io<'a, 'b> {
    stream: PartitionId,
    disk: &'a mut Disk,
    cx: &'a mut Cx<'b>,
}

impl replication::Io<Log> for Io<'_, '_> {
    fn now(&self) -> Time {
        self.cx.now()
    }

    fn rng(&mut self) -> &mut Rng {
        self.cx.rng()
    }

    fn send(&mut self, to: NodeId, message: replication::Message<Log>) {
        self.cx.send(to, Msg::Replication { partition: self.stream, message });
    }

    fn persist(&mut self, record: replication::Record<Log>) -> Ticket {
        self.disk.pace.wrote(record.size());
        self.cx.persist(Record::Replication(self.stream, record))
    }

    fn set_timer(&mut self, timer: replication::Timer, at: Time) {
        self.cx.set_timer(Timer::Replication(self.stream, timer), at);
    }

    fn cancel_timer(&mut self, timer: replication::Timer) {
        self.cx.cancel_timer(Timer::Replication(self.stream, timer));
    }
}

impl Server {
    /// Starts a stream's replica from its surviving records. The voters are the replicas of the
    /// partition with the stream's name; all other servers are learners.
    pub(super) fn open(
        &mut self,
        stream: PartitionId,
        log: Vec<replication::Record<Log>>,
        cx: &mut Cx<'_>,
    ) {
        let (voters, preferred_leader) = self.placement.voters(stream);
        let config = self.config.hosting.replication.clone();
        if self.cluster.partition(stream).is_none() {
            self.routes.learn(stream, preferred_leader.unwrap_or_default(), cx.now());
        }
        let group = Group { learners: self.others(&voters), voters, preferred_leader };
        let mut io = Io { stream, disk: &mut self.disk, cx };
        let replica = Replica::new(self.node, group, config, log, &mut io);
        let (applied, base) = (self.state.applied(stream), replica.base_index());
        assert!(
            applied >= base,
            "{stream}: the image ends at {applied}, its log begins after {base}"
        );
        let (sequencer, leaving) = (Sequencer::default(), OrdMap::new());
        let held = Stream { replica, sequencer, announced: Index(0), staged: None, leaving };
        self.streams.insert(stream, held);
        self.touch(stream);
    }

    /// Every server except these.
    pub(super) fn others(&self, voters: &[NodeId]) -> Vec<NodeId> {
        let servers = self.cluster.servers().map(|server| server.id);
        servers.filter(|server| !voters.contains(server)).collect()
    }

    fn touch(&mut self, stream: PartitionId) {
        self.disk.touched.insert(stream);
        self.disk.unflushed.insert(stream);
    }

    /// Sends the messages that streams have collected.
    pub(super) fn flush_streams(&mut self, cx: &mut Cx<'_>) {
        for stream in take(&mut self.disk.unflushed) {
            self.propose(stream, cx);
            let Some(held) = self.streams.get_mut(&stream) else { continue };
            let mut io = Io { stream, disk: &mut self.disk, cx };
            let chosen = held.replica.chosen_index();
            if held.replica.is_leader() && chosen > held.announced {
                // The other servers run chosen entries, and wait for nothing else.
                held.announced = chosen;
                held.replica.announce();
            }
            held.replica.flush(&mut io);
            self.drain_events(stream, cx);
        }
    }

    /// Calls a function on a stream's replica.
    pub(super) fn with(
        &mut self,
        stream: PartitionId,
        cx: &mut Cx<'_>,
        act: impl FnOnce(&mut Stream, &mut Io<'_, '_>),
    ) {
        if let Some(held) = self.streams.get_mut(&stream) {
            act(held, &mut Io { stream, disk: &mut self.disk, cx });
            self.touch(stream);
        }
    }

    /// Processes all events of a stream's log.
    pub(super) fn drain_events(&mut self, stream: PartitionId, cx: &mut Cx<'_>) {
        let mut chosen = Vec::new();
        loop {
            let event = self.streams.get_mut(&stream).and_then(|held| held.replica.next_event());
            if !matches!(event, Some(Event::Chosen { .. })) {
                self.on_chosen(stream, take(&mut chosen), cx);
            }
            let (Some(event), Some(held)) = (event, self.streams.get_mut(&stream)) else { break };
            match event {
                Event::Chosen { index, term, payload } => {
                    let (partition, at) = (stream, index.0);
                    cx.claim(Claim::Chosen { partition, index: at, term: term.0 });
                    chosen.push((index, payload));
                }
                Event::Leading { term } => {
                    cx.claim(Claim::Leads { partition: stream, term: term.0 });
                }
                Event::Deposed { .. } => {
                    if take(&mut held.sequencer).len() > 0 {
                        cx.note(Note::Deposed);
                    }
                    held.leaving.clear();
                    held.announced = Index(0);
                }
                Event::ReadReady { .. } | Event::ReadFailed { .. } => {
                    unreachable!("nobody reads by leadership")
                }
                Event::SnapshotWanted { to, cursor } => self.send_chunk(stream, to, cursor, cx),
                Event::SnapshotChunk { chunk, first, last, index } => {
                    if first && chunk.image.is_none() {
                        self.on_empty_chunk(stream, index, cx);
                    } else {
                        self.on_chunk(stream, chunk, last, cx);
                    }
                }
            }
        }
        let leader = self.streams.get(&stream).and_then(|held| held.replica.leader());
        self.routes.follow(stream, leader, cx.now());
    }

    /// The next entries of a stream are chosen: merges them, and runs what may run. Entries that are
    /// chosen at once run together, so that transactions without conflicts run in parallel even if
    /// they are in different entries.
    pub(super) fn on_chosen(
        &mut self,
        stream: PartitionId,
        chosen: Vec<(Index, Payload<Command>)>,
        cx: &mut Cx<'_>,
    ) {
        let (mut applied, mut merged) = (Applied::default(), Vec::new());
        let largest = self.state.merge.largest();
        for (index, payload) in chosen {
            if self.exchange.hold(stream, index, &payload) {
                continue;
            }
            let command = match payload {
                Payload::Command(command) => Some(command),
                Payload::Noop | Payload::Members(_) => None,
            };
            if let (Some(Command::Batch { entries, .. }), Some(held)) =
                (command.as_deref(), self.streams.get_mut(&stream))
            {
                for entry in entries {
                    held.sequencer.sequenced(entry);
                }
            }
            let at = (stream, index);
            self.state.enter(at, command.as_deref(), &self.placement, cx.now(), &mut applied);
            merged.push(command);
        }
        if merged.is_empty() {
            return;
        }
        self.state.run_ready(&mut applied, &self.placement, &mut self.store);
        if self.state.merge.largest() > largest.max(1) {
            cx.note(Note::Component);
        }
        if Some(stream) == self.placement.orderer() {
            // Pieces of it must be proposed.
            self.disk.unflushed.extend(self.streams.keys());
        }
        for command in merged.iter().flatten() {
            if let Command::Batch { entries, .. } = command.as_ref() {
                self.relocate(stream, entries, cx);
            }
        }
        if !applied.ran.is_empty() {
            // There is room for transactions that sequencers had to keep.
            let keeps = self.streams.iter().filter(|(_, held)| held.sequencer.has_batch());
            self.disk.unflushed.extend(keeps.map(|(&stream, _)| stream));
        }
        self.answer(applied, cx);
    }
}
