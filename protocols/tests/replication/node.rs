//! One replica with all that an embedder gives it: a disk, timers, and a state to replicate.

use orthodrome_core::ordered::OrdMap;
use orthodrome_core::{NodeId, Rng, Ticket, Time};
use orthodrome_protocols::replication::{
    Config, Event, Group, Index, Io, Message, Payload, Record, Replica, Replicated, Term, Timer,
};

/// Keys of the test state; few, so that snapshots take several pieces and keys are overwritten.
pub const KEYS: u64 = 8;
/// Keys in one piece of a snapshot.
const KEYS_PER_CHUNK: usize = 3;

/// The test state: command `c` writes key `c % KEYS`. A key remembers which entry wrote it, so that
/// applying an entry again changes nothing.
pub type State = OrdMap<u64, (Index, u64)>;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Register;

impl Replicated for Register {
    type Command = u64;
    type Chunk = Vec<(u64, (Index, u64))>;
    type Cursor = u64;
}

/// What lies on a disk: the last checkpoint and what was written after it.
#[derive(Clone, Debug, Default)]
pub struct Image {
    pub records: Vec<Record<Register>>,
    pub state: State,
    pub applied: Index,
}

#[derive(Clone, Debug)]
enum Write {
    Record(Record<Register>),
    /// Replaces everything before; the flag says that it completes a snapshot.
    Checkpoint(Image, bool),
}

#[derive(Debug, Default)]
pub struct Disk {
    pub durable: Image,
    pending: Vec<(Ticket, Write)>,
}

impl Disk {
    fn make_durable(&mut self, count: usize) -> (Option<Ticket>, usize) {
        let (mut last, mut snapshots) = (None, 0);
        for (ticket, write) in self.pending.drain(..count) {
            last = Some(ticket);
            match write {
                Write::Record(record) => self.durable.records.push(record),
                Write::Checkpoint(image, completes) => {
                    self.durable = image;
                    snapshots += usize::from(completes);
                }
            }
        }
        (last, snapshots)
    }

    pub fn pending(&self) -> usize {
        self.pending.len()
    }

    pub fn last_pending(&self) -> Option<Ticket> {
        self.pending.last().map(|&(ticket, _)| ticket)
    }
}

/// The way out, for one call.
pub struct Out<'a> {
    now: Time,
    rng: &'a mut Rng,
    sent: &'a mut Vec<(NodeId, Message<Register>)>,
    pending: &'a mut Vec<(Ticket, Write)>,
    timers: &'a mut OrdMap<Timer, Time>,
    last_ticket: &'a mut u64,
}

impl Io<Register> for Out<'_> {
    fn now(&self) -> Time {
        self.now
    }

    fn rng(&mut self) -> &mut Rng {
        self.rng
    }

    fn send(&mut self, to: NodeId, msg: Message<Register>) {
        self.sent.push((to, msg));
    }

    fn persist(&mut self, record: Record<Register>) -> Ticket {
        *self.last_ticket += 1;
        self.pending.push((Ticket(*self.last_ticket), Write::Record(record)));
        Ticket(*self.last_ticket)
    }

    fn set_timer(&mut self, timer: Timer, at: Time) {
        self.timers.insert(timer, at);
    }

    fn cancel_timer(&mut self, timer: Timer) {
        self.timers.remove(&timer);
    }
}

/// What an embedder was told, for observers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Told {
    Chosen { index: Index, term: Term, payload: Payload<u64> },
    Leading { term: Term },
    Deposed { term: Term },
    ReadReady { id: u64, applied: Index },
    ReadFailed { id: u64 },
    SnapshotWanted { to: NodeId },
    SnapshotBegun,
    SnapshotDone { index: Index },
}

pub struct Node {
    pub id: NodeId,
    pub group: Group,
    pub config: Config,
    pub replica: Option<Replica<Register>>,
    pub disk: Disk,
    pub timers: OrdMap<Timer, Time>,
    pub state: State,
    pub applied: Index,
    /// Messages sent since last taken.
    pub sent: Vec<(NodeId, Message<Register>)>,
    pub told: Vec<Told>,
    /// Keep this many entries when compacting.
    pub keep: usize,
    /// This node applies the entry wrongly.
    pub wrong_at: Option<Index>,
    seed: u64,
    incarnation: u64,
    rng: Rng,
    last_ticket: u64,
}

impl Node {
    pub fn new(id: NodeId, group: Group, config: Config, seed: u64) -> Self {
        Self {
            id,
            group,
            config,
            replica: None,
            disk: Disk::default(),
            timers: OrdMap::new(),
            state: State::new(),
            applied: Index(0),
            sent: Vec::new(),
            told: Vec::new(),
            keep: 0,
            wrong_at: None,
            seed,
            incarnation: 0,
            rng: Rng::stream(seed, "node", u64::from(id.0)),
            last_ticket: 0,
        }
    }

    pub fn is_up(&self) -> bool {
        self.replica.is_some()
    }

    pub fn start(&mut self, now: Time) {
        assert!(self.replica.is_none(), "{} runs already", self.id);
        self.incarnation += 1;
        let stream = u64::from(self.id.0) + (self.incarnation << 32);
        self.rng = Rng::stream(self.seed, "node", stream);
        self.last_ticket = 0;
        self.state = self.disk.durable.state.clone();
        self.applied = self.disk.durable.applied;
        let recovered = self.disk.durable.records.clone();
        let (group, config) = (self.group.clone(), self.config.clone());
        let id = self.id;
        let mut out = Out {
            now,
            rng: &mut self.rng,
            sent: &mut self.sent,
            pending: &mut self.disk.pending,
            timers: &mut self.timers,
            last_ticket: &mut self.last_ticket,
        };
        self.replica = Some(Replica::new(id, group, config, recovered, &mut out));
        self.settle(now);
    }

    /// Loses everything but what is durable and the first `survive` writes that are not.
    pub fn crash(&mut self, survive: usize) {
        self.replica = None;
        self.disk.make_durable(survive.min(self.disk.pending.len()));
        self.disk.pending.clear();
        self.timers.clear();
        self.sent.clear();
    }

    /// One call into the replica, and what an embedder does after each.
    pub fn with<T>(
        &mut self,
        now: Time,
        act: impl FnOnce(&mut Replica<Register>, &mut Out<'_>) -> T,
    ) -> Option<T> {
        let result = self.call(now, act)?;
        self.settle(now);
        Some(result)
    }

    fn call<T>(
        &mut self,
        now: Time,
        act: impl FnOnce(&mut Replica<Register>, &mut Out<'_>) -> T,
    ) -> Option<T> {
        let replica = self.replica.as_mut()?;
        let mut out = Out {
            now,
            rng: &mut self.rng,
            sent: &mut self.sent,
            pending: &mut self.disk.pending,
            timers: &mut self.timers,
            last_ticket: &mut self.last_ticket,
        };
        Some(act(replica, &mut out))
    }

    fn settle(&mut self, now: Time) {
        // Flushing and answering may raise events; a replica that never stops is a bug.
        for _ in 0..10_000 {
            let Some(event) = self.replica.as_mut().and_then(Replica::next_event) else { break };
            self.on_event(event, now);
        }
        self.call(now, |replica, out| replica.flush(out));
        while let Some(event) = self.replica.as_mut().and_then(Replica::next_event) {
            self.on_event(event, now);
        }
        if let Some(replica) = &self.replica {
            replica.assert_invariants();
        }
    }

    fn on_event(&mut self, event: Event<Register>, now: Time) {
        match event {
            Event::Chosen { index, term, payload } => {
                assert_eq!(index, self.applied.next(), "{}: surfaced out of order", self.id);
                self.applied = index;
                let mut effect = 0;
                if let Payload::Command(command) = &payload {
                    let command = **command + u64::from(self.wrong_at == Some(index));
                    effect = command;
                    let slot = self.state.entry(command % KEYS).or_default();
                    if slot.0 < index {
                        *slot = (index, command);
                    }
                }
                if let Some(replica) = &mut self.replica {
                    replica.came_to(index, effect);
                }
                self.told.push(Told::Chosen { index, term, payload });
            }
            Event::Leading { term } => self.told.push(Told::Leading { term }),
            Event::Deposed { term } => self.told.push(Told::Deposed { term }),
            Event::ReadReady { id } => {
                self.told.push(Told::ReadReady { id, applied: self.applied });
            }
            Event::ReadFailed { id } => self.told.push(Told::ReadFailed { id }),
            Event::SnapshotWanted { to, cursor } => {
                self.told.push(Told::SnapshotWanted { to });
                let from = cursor.unwrap_or(0);
                let rest = self.state.range(from..).map(|(&key, &slot)| (key, slot));
                let mut chunk: Vec<_> = rest.take(KEYS_PER_CHUNK + 1).collect();
                let next = chunk.get(KEYS_PER_CHUNK).map(|&(key, _)| key);
                chunk.truncate(KEYS_PER_CHUNK);
                self.call(now, |replica, out| replica.send_chunk(to, chunk, next, out));
            }
            Event::SnapshotChunk { chunk, first, last, index } => {
                if first {
                    self.state.clear();
                    self.told.push(Told::SnapshotBegun);
                }
                self.state.extend(chunk);
                if last {
                    self.applied = index;
                    self.told.push(Told::SnapshotDone { index });
                    self.checkpoint(true);
                }
            }
        }
    }

    fn checkpoint(&mut self, completes_snapshot: bool) {
        let Some(replica) = &self.replica else { return };
        let records = replica.checkpoint_records();
        // The state may be ahead of the base; what comes after the base will be applied again.
        let applied = replica.base_index();
        let image = Image { records, state: self.state.clone(), applied };
        self.last_ticket += 1;
        let write = Write::Checkpoint(image, completes_snapshot);
        self.disk.pending.push((Ticket(self.last_ticket), write));
    }

    /// Forgets what can be forgotten, and writes a checkpoint.
    pub fn compact(&mut self) {
        let Some(replica) = &mut self.replica else { return };
        let through = replica.compactable(self.keep);
        replica.compact(through);
        // An incomplete state is not a prefix of anything: what counts is its `Incomplete` record.
        self.checkpoint(false);
    }

    /// The disk finishes everything up to `ticket`.
    pub fn sync(&mut self, through: Ticket, now: Time) {
        let count = self.disk.pending.partition_point(|&(ticket, _)| ticket <= through);
        if count == 0 || self.replica.is_none() {
            return;
        }
        let (last, snapshots) = self.disk.make_durable(count);
        if let Some(ticket) = last {
            self.with(now, |replica, out| replica.on_durable(ticket, out));
        }
        for _ in 0..snapshots {
            self.with(now, |replica, out| replica.snapshot_durable(out));
        }
    }

    pub fn fire(&mut self, timer: Timer, now: Time) {
        self.timers.remove(&timer);
        self.with(now, |replica, out| replica.on_timer(timer, out));
    }
}
