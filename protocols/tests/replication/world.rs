//! A group under random faults, watched from outside.

use std::collections::BinaryHeap;

use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::{Duration, NodeId, Rng, Ticket, Time};
use orthodrome_protocols::replication::{
    Config, Group, Index, Message, Mutations, Payload, Quorums, Term, Timer,
};

use crate::node::{KEYS, Node, Register, Told};

const ELECTION_TIMEOUT: Duration = Duration::from_millis(300);

/// How bad it is; drawn per seed, so that some seeds have none of one fault and much of another.
#[derive(Debug, Clone)]
pub struct Weather {
    pub loss_percent: u64,
    pub repeat_percent: u64,
    /// One-way delay in microseconds; a wide range reorders.
    pub delay_us: (u64, u64),
    /// Rarely a message takes this many milliseconds.
    pub straggle_ms: u64,
    pub disk_us: (u64, u64),
    /// Mean milliseconds between two faults of each kind; none if 0.
    pub crash_ms: u64,
    pub partition_ms: u64,
    pub pause_ms: u64,
    pub change_ms: u64,
    pub transfer_ms: u64,
    pub compact_ms: u64,
    /// Clocks run at rates that differ by up to twice this many per mille.
    pub drift_per_mille: u64,
}

impl Weather {
    fn draw(rng: &mut Rng) -> Self {
        let mut often = |choices: &[u64]| rng.pick(choices).copied().unwrap_or(0);
        let slowest = often(&[1_000, 10_000, 60_000]);
        Self {
            loss_percent: often(&[0, 0, 1, 10, 30]),
            repeat_percent: often(&[0, 0, 5, 20]),
            delay_us: (500, slowest),
            straggle_ms: often(&[0, 500, 3_000]),
            disk_us: (50, often(&[100, 5_000, 100_000, 400_000])),
            crash_ms: often(&[0, 300, 1_000, 3_000]),
            partition_ms: often(&[0, 500, 1_500]),
            pause_ms: often(&[0, 500, 1_500]),
            change_ms: often(&[0, 0, 700, 2_000]),
            transfer_ms: often(&[0, 0, 500, 2_000]),
            compact_ms: often(&[0, 100, 500]),
            drift_per_mille: often(&[0, 10, 40]),
        }
    }
}

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Fault {
    Crash,
    Partition,
    Pause,
    Change,
    Transfer,
    Compact,
}

#[derive(Debug)]
enum Happening {
    Deliver { from: NodeId, to: NodeId, msg: Box<Message<Register>> },
    Timer { node: NodeId, timer: Timer, incarnation: u64 },
    Sync { node: NodeId, through: Ticket, incarnation: u64 },
    Restart { node: NodeId },
    Resume { node: NodeId },
    Heal { partition: u64 },
    Fault(Fault),
    Client,
}

struct Due(Time, u64, Happening);

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        (self.0, self.1) == (other.0, other.1)
    }
}
impl Eq for Due {}
impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Due {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (other.0, other.1).cmp(&(self.0, self.1))
    }
}

struct Host {
    node: Node,
    /// This node's monotonic time is `offset + now * rate / 1000`.
    offset: u64,
    rate: u64,
    incarnation: u64,
    paused: Option<Vec<Happening>>,
    armed: OrdMap<Timer, Time>,
    /// One write to disk is under way; what comes meanwhile shares the next.
    is_syncing: bool,
}

impl Host {
    fn local(&self, now: Time) -> Time {
        let scaled = u128::from(now.0) * u128::from(self.rate) / 1_000;
        Time(self.offset + u64::try_from(scaled).unwrap())
    }

    fn global(&self, local: Time) -> Time {
        let scaled = u128::from(local.0.saturating_sub(self.offset)) * 1_000;
        Time(u64::try_from(scaled.div_ceil(u128::from(self.rate))).unwrap())
    }
}

/// What happened in a run; two runs of one seed must agree on all of it.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Report {
    pub steps: u64,
    pub chosen: u64,
    pub acked: u64,
    pub reads: u64,
    pub lease_reads: u64,
    pub leaders: u64,
    pub crashes: u64,
    pub partitions: u64,
    pub pauses: u64,
    pub snapshots: u64,
    pub changes: u64,
    pub transfers: u64,
    /// FNV over everything that was delivered.
    pub trace: u64,
}

impl Report {
    pub fn add(&mut self, other: &Self) {
        self.steps += other.steps;
        self.chosen += other.chosen;
        self.acked += other.acked;
        self.reads += other.reads;
        self.lease_reads += other.lease_reads;
        self.leaders += other.leaders;
        self.crashes += other.crashes;
        self.partitions += other.partitions;
        self.pauses += other.pauses;
        self.snapshots += other.snapshots;
        self.changes += other.changes;
        self.transfers += other.transfers;
        self.trace ^= other.trace;
    }
}

pub struct World {
    now: Time,
    sequence: u64,
    queue: BinaryHeap<Due>,
    rng: Rng,
    hosts: OrdMap<NodeId, Host>,
    weather: Weather,
    calm: bool,
    cut: OrdMap<u64, OrdSet<(NodeId, NodeId)>>,
    voters_min: usize,
    next_command: u64,
    next_read: u64,

    // What the world knows better than any node.
    chosen: Vec<(Term, Payload<u64>)>,
    /// For each of them, a term by which it was chosen: the lowest in which anyone surfaced it.
    chosen_by: Vec<Term>,
    leaders: OrdMap<Term, NodeId>,
    /// The highest entry that some finished operation showed.
    frontier: Index,
    /// Frontier when a read was asked for.
    reads: OrdMap<u64, (NodeId, Index)>,
    /// Frontier when a write was proposed, by node and place.
    writes: OrdMap<(NodeId, Index, Term), Index>,
    pub report: Report,
}

impl World {
    pub fn new(seed: u64, mutations: Mutations) -> Self {
        let mut rng = Rng::stream(seed, "world", 0);
        let weather = Weather::draw(&mut rng);
        let count = *rng.pick(&[1_u32, 3, 3, 3, 5, 5]).unwrap();
        let spare = if weather.change_ms > 0 { 2 } else { 0 };
        let flexible = count == 5 && weather.change_ms == 0 && rng.chance(1, 2);
        let mut config = Config::with_election_timeout(ELECTION_TIMEOUT);
        config.mutations = mutations;
        config.max_batch_bytes = *rng.pick(&[1, 100, 10_000]).unwrap();
        config.max_inflight = *rng.pick(&[1, 4, 64]).unwrap();
        config.snapshot_window = *rng.pick(&[1, 3]).unwrap();
        config.compared_entries = 8;
        if flexible {
            config.quorums = Quorums::Flexible { election: 4, write: 2 };
        }
        let voters: Vec<NodeId> = (1..=count).map(NodeId).collect();
        let preferred = rng.chance(1, 2).then_some(NodeId(1));
        let mut hosts = OrdMap::new();
        for id in (1..=count + spare).map(NodeId) {
            let group = if voters.contains(&id) {
                Group { voters: voters.clone(), learners: vec![], preferred_leader: preferred }
            } else {
                Group { preferred_leader: preferred, ..Group::default() }
            };
            let mut node = Node::new(id, group, config.clone(), seed);
            node.keep = *rng.pick(&[0, 2, 20]).unwrap();
            let drift = rng.below(2 * weather.drift_per_mille + 1);
            let host = Host {
                node,
                offset: rng.below(1_000_000_000_000),
                rate: 1_000 - weather.drift_per_mille + drift,
                incarnation: 0,
                paused: None,
                armed: OrdMap::new(),
                is_syncing: false,
            };
            hosts.insert(id, host);
        }
        let mut world = Self {
            now: Time::ZERO,
            sequence: 0,
            queue: BinaryHeap::new(),
            rng,
            hosts,
            weather,
            calm: false,
            cut: OrdMap::new(),
            voters_min: if count >= 3 { 2 } else { 1 },
            next_command: 1,
            next_read: 1,
            chosen: Vec::new(),
            chosen_by: Vec::new(),
            leaders: OrdMap::new(),
            frontier: Index(0),
            reads: OrdMap::new(),
            writes: OrdMap::new(),
            report: Report { trace: 0xcbf2_9ce4_8422_2325, ..Report::default() },
        };
        for id in world.ids() {
            world.start(id);
        }
        for fault in [
            Fault::Crash,
            Fault::Partition,
            Fault::Pause,
            Fault::Change,
            Fault::Transfer,
            Fault::Compact,
        ] {
            world.plan(fault);
        }
        world.after(Duration::from_millis(1), Happening::Client);
        world
    }

    pub fn describe(&self) -> String {
        let states = self.hosts.values().map(|host| match &host.node.replica {
            Some(replica) => format!("  {replica}\n"),
            None => format!("  {} down\n", host.node.id),
        });
        format!("{:?}\n{:?}\n{}", self.weather, self.report, states.collect::<String>())
    }

    fn ids(&self) -> Vec<NodeId> {
        self.hosts.keys().copied().collect()
    }

    fn after(&mut self, delay: Duration, what: Happening) {
        self.at(self.now + delay, what);
    }

    fn at(&mut self, at: Time, what: Happening) {
        self.sequence += 1;
        self.queue.push(Due(at.max(self.now), self.sequence, what));
    }

    fn plan(&mut self, fault: Fault) {
        let mean = match fault {
            Fault::Crash => self.weather.crash_ms,
            Fault::Partition => self.weather.partition_ms,
            Fault::Pause => self.weather.pause_ms,
            Fault::Change => self.weather.change_ms,
            Fault::Transfer => self.weather.transfer_ms,
            Fault::Compact => self.weather.compact_ms,
        };
        if mean > 0 {
            let delay = Duration::from_millis(self.rng.range(1, 2 * mean));
            self.after(delay, Happening::Fault(fault));
        }
    }

    fn start(&mut self, id: NodeId) {
        let now = self.now;
        let host = self.hosts.get_mut(&id).unwrap();
        if host.node.is_up() {
            return;
        }
        host.incarnation += 1;
        host.armed.clear();
        host.is_syncing = false;
        // A new process has a clock of its own.
        host.offset = self.rng.below(1_000_000_000_000);
        let local = host.local(now);
        host.node.start(local);
        self.collect(id);
    }

    /// Runs for `span`; then the caller may look.
    pub fn run(&mut self, span: Duration) {
        let end = self.now + span;
        while self.queue.peek().is_some_and(|due| due.0 <= end) {
            let Some(Due(at, _, what)) = self.queue.pop() else { break };
            self.now = at;
            self.happen(what);
            self.report.steps += 1;
            if self.report.steps.is_multiple_of(64) {
                self.check_log_matching();
            }
        }
        self.now = end;
    }

    fn happen(&mut self, what: Happening) {
        let node = match &what {
            Happening::Deliver { to, .. } => Some(*to),
            Happening::Timer { node, incarnation, .. }
            | Happening::Sync { node, incarnation, .. } => {
                if self.hosts[node].incarnation != *incarnation {
                    return;
                }
                Some(*node)
            }
            _ => None,
        };
        if let Some(node) = node
            && let Some(backlog) = &mut self.hosts.get_mut(&node).unwrap().paused
        {
            backlog.push(what);
            return;
        }
        match what {
            Happening::Deliver { from, to, msg } => self.deliver(from, to, *msg),
            Happening::Timer { node, timer, .. } => self.fire(node, timer),
            Happening::Sync { node, through, .. } => {
                let now = self.now;
                let host = self.hosts.get_mut(&node).unwrap();
                host.is_syncing = false;
                host.node.sync(through, host.local(now));
                self.collect(node);
            }
            Happening::Restart { node } => self.start(node),
            Happening::Resume { node } => self.resume(node),
            Happening::Heal { partition } => {
                self.cut.remove(&partition);
            }
            Happening::Fault(fault) => {
                if !self.calm {
                    self.strike(&fault);
                    self.plan(fault);
                }
            }
            Happening::Client => {
                self.client();
                let pause = self.rng.range(500, 20_000);
                self.after(Duration::from_micros(pause), Happening::Client);
            }
        }
    }

    fn deliver(&mut self, from: NodeId, to: NodeId, msg: Message<Register>) {
        let is_cut = |cut: &OrdSet<(NodeId, NodeId)>| cut.contains(&(from, to));
        if self.cut.values().any(is_cut) {
            return;
        }
        let line = format!("{:?} {from} {to} {msg}", self.now);
        for byte in line.bytes() {
            self.report.trace =
                (self.report.trace ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        let now = self.now;
        let host = self.hosts.get_mut(&to).unwrap();
        let local = host.local(now);
        host.node.with(local, |replica, out| replica.step(from, msg, out));
        self.collect(to);
    }

    fn fire(&mut self, node: NodeId, timer: Timer) {
        let now = self.now;
        let host = self.hosts.get_mut(&node).unwrap();
        host.armed.remove(&timer);
        let local = host.local(now);
        if host.node.timers.get(&timer).is_some_and(|&at| at <= local) {
            host.node.fire(timer, local);
        }
        self.collect(node);
    }

    /// A paused process wakes: whatever waited for it comes at once, in any order, and a client may
    /// be first.
    fn resume(&mut self, node: NodeId) {
        let Some(mut backlog) = self.hosts.get_mut(&node).unwrap().paused.take() else { return };
        if self.rng.chance(2, 3) {
            self.lease_read(node);
        }
        if self.rng.chance(1, 2) {
            self.rng.shuffle(&mut backlog);
        }
        for what in backlog {
            self.happen(what);
            if self.rng.chance(1, 4) {
                self.lease_read(node);
            }
        }
    }

    /// Moves what a node did since the last call into the world, and checks it.
    fn collect(&mut self, id: NodeId) {
        let now = self.now;
        let host = self.hosts.get_mut(&id).unwrap();
        let sent = std::mem::take(&mut host.node.sent);
        let told = std::mem::take(&mut host.node.told);
        let incarnation = host.incarnation;
        let mut plans = Vec::new();
        for (&timer, &at) in &host.node.timers {
            if host.armed.get(&timer) != Some(&at) {
                host.armed.insert(timer, at);
                let due = host.global(at);
                plans.push((due, Happening::Timer { node: id, timer, incarnation }));
            }
        }
        if let Some(through) = host.node.disk.last_pending()
            && !host.is_syncing
        {
            host.is_syncing = true;
            let (low, high) = if self.calm { (50, 500) } else { self.weather.disk_us };
            let wait = Duration::from_micros(self.rng.range(low, high));
            plans.push((now + wait, Happening::Sync { node: id, through, incarnation }));
        }
        for (at, what) in plans {
            self.at(at, what);
        }
        for (to, msg) in sent {
            self.transmit(id, to, &msg);
        }
        let is_exact =
            told.iter().any(|told| matches!(told, Told::Leading { .. } | Told::ReadReady { .. }));
        for what in told {
            self.observe(id, what);
        }
        if is_exact && self.hosts[&id].node.replica.as_ref().is_some_and(|r| r.is_ready()) {
            self.check_state(id);
        }
        self.check_leader(id);
    }

    fn transmit(&mut self, from: NodeId, to: NodeId, msg: &Message<Register>) {
        if !self.hosts.contains_key(&to) {
            return;
        }
        let copies = if self.calm {
            1
        } else if self.rng.chance(self.weather.loss_percent, 100) {
            0
        } else {
            1 + u64::from(self.rng.chance(self.weather.repeat_percent, 100))
        };
        for _ in 0..copies {
            let (low, high) = if self.calm { (500, 2_000) } else { self.weather.delay_us };
            let mut delay = Duration::from_micros(self.rng.range(low, high));
            if !self.calm && self.rng.chance(1, 200) {
                delay += Duration::from_millis(self.rng.below(self.weather.straggle_ms + 1));
            }
            let what = Happening::Deliver { from, to, msg: Box::new(msg.clone()) };
            self.after(delay, what);
        }
    }

    fn observe(&mut self, id: NodeId, told: Told) {
        match told {
            Told::Chosen { index, term, payload } => {
                let at = usize::try_from(index.0).unwrap() - 1;
                // If it was down already, its term is not known any more.
                let replica = self.hosts[&id].node.replica.as_ref();
                let by = replica.map_or(Term(u64::MAX), |replica| replica.term());
                assert!(at <= self.chosen.len(), "{id}: {index} surfaced before those before it");
                if let Some(known) = self.chosen.get(at) {
                    assert_eq!(
                        known,
                        &(term, payload.clone()),
                        "state machine safety: {id} surfaced another entry at {index}"
                    );
                    self.chosen_by[at] = self.chosen_by[at].min(by);
                } else {
                    self.chosen.push((term, payload));
                    self.chosen_by.push(by);
                    self.report.chosen += 1;
                }
                // The proposer surfaces its own entry: that is when a client hears of it.
                if let Some(before) = self.writes.remove(&(id, index, term)) {
                    assert!(index > before, "linearizability: write {index} not after {before}");
                    self.frontier = self.frontier.max(index);
                    self.report.acked += 1;
                }
            }
            Told::ReadReady { id: read, applied } => {
                let (asked, before) = self.reads.remove(&read).expect("a read that was asked for");
                assert_eq!(asked, id);
                assert!(
                    applied >= before,
                    "linearizability: {id} confirmed a read at {applied}, {before} was known"
                );
                self.frontier = self.frontier.max(applied);
                self.report.reads += 1;
            }
            Told::ReadFailed { id: read } => {
                self.reads.remove(&read);
            }
            Told::SnapshotDone { .. } => self.report.snapshots += 1,
            Told::Leading { .. }
            | Told::Deposed { .. }
            | Told::SnapshotWanted { .. }
            | Told::SnapshotBegun => {}
        }
    }

    /// Election safety, and leader completeness with regard to all that anyone surfaced.
    fn check_leader(&mut self, id: NodeId) {
        let Some(replica) = &self.hosts[&id].node.replica else { return };
        if !replica.is_leader() {
            return;
        }
        let term = replica.term();
        if let Some(&leader) = self.leaders.get(&term) {
            assert_eq!(leader, id, "election safety: two leaders in {term}");
            return;
        }
        self.leaders.insert(term, id);
        self.report.leaders += 1;
        for (at, (chosen_term, _)) in self.chosen.iter().enumerate() {
            let index = Index(at as u64 + 1);
            // A candidate may win late, when entries were chosen in later terms.
            if index > replica.base_index() && self.chosen_by[at] < term {
                let found = replica.entry(index).map(|entry| entry.term);
                assert_eq!(
                    found,
                    Some(*chosen_term),
                    "leader completeness: {id} leads {term} without the entry at {index}"
                );
            }
        }
    }

    /// Log matching: where two logs have an entry of one term at one place, they agree before it.
    fn check_log_matching(&self) {
        let up: Vec<_> =
            self.hosts.values().filter_map(|host| host.node.replica.as_ref()).collect();
        for (at, a) in up.iter().enumerate() {
            for b in up.iter().skip(at + 1) {
                let low = a.base_index().max(b.base_index());
                let high = a.last_index().min(b.last_index());
                let mut agree = false;
                for index in (low.0 + 1..=high.0).rev().map(Index) {
                    let (x, y) = (a.entry(index).unwrap(), b.entry(index).unwrap());
                    agree |= x.term == y.term;
                    assert!(!agree || x == y, "log matching: {a} and {b} differ at {index}");
                }
            }
        }
    }

    /// The state of a leader that is ready is exactly what the chosen entries make it.
    fn check_state(&self, id: NodeId) {
        let node = &self.hosts[&id].node;
        let mut expected = crate::node::State::new();
        let applied = usize::try_from(node.applied.0).unwrap();
        for (at, (_, payload)) in self.chosen.iter().take(applied).enumerate() {
            if let Payload::Command(command) = payload {
                expected.insert(**command % KEYS, (Index(at as u64 + 1), **command));
            }
        }
        assert_eq!(node.state, expected, "{id}: the state is not that of entry {applied}");
    }

    fn client(&mut self) {
        let ids = self.ids();
        let Some(&id) = self.rng.pick(&ids) else { return };
        if self.hosts[&id].paused.is_some() {
            return;
        }
        match self.rng.below(4) {
            0 | 1 => self.propose(id),
            2 => self.read(id),
            _ => self.lease_read(id),
        }
    }

    fn propose(&mut self, id: NodeId) {
        let before = self.frontier;
        let now = self.now;
        let burst = self.rng.range(1, 4);
        let host = self.hosts.get_mut(&id).unwrap();
        let local = host.local(now);
        let first = self.next_command;
        self.next_command += burst;
        let places = host.node.with(local, |replica, out| {
            (first..first + burst).map(|c| replica.propose(c, out)).collect::<Vec<_>>()
        });
        for (index, term) in places.into_iter().flatten().flatten() {
            self.writes.insert((id, index, term), before);
        }
        self.collect(id);
    }

    fn read(&mut self, id: NodeId) {
        let now = self.now;
        let host = self.hosts.get_mut(&id).unwrap();
        if !host.node.is_up() {
            return;
        }
        let local = host.local(now);
        let read = self.next_read;
        self.next_read += 1;
        self.reads.insert(read, (id, self.frontier));
        host.node.with(local, |replica, out| replica.read_index(read, out));
        self.collect(id);
    }

    fn lease_read(&mut self, id: NodeId) {
        let host = &self.hosts[&id];
        let local = host.local(self.now);
        let Some(replica) = &host.node.replica else { return };
        if replica.has_lease(local) {
            let applied = host.node.applied;
            assert!(
                applied >= self.frontier,
                "linearizability: {id} served a lease read at {applied}, {} was known",
                self.frontier
            );
            self.check_state(id);
            self.frontier = self.frontier.max(applied);
            self.report.lease_reads += 1;
        }
    }

    fn strike(&mut self, fault: &Fault) {
        let ids = self.ids();
        let Some(&id) = self.rng.pick(&ids) else { return };
        let leader = self.leader();
        // Leaders are where the trouble is.
        let id = if self.rng.chance(1, 2) { leader.unwrap_or(id) } else { id };
        match fault {
            Fault::Crash => {
                let mut victims = vec![id];
                if self.rng.chance(1, 10) {
                    victims.clone_from(&ids);
                }
                for victim in victims {
                    self.crash(victim);
                }
            }
            Fault::Partition => self.partition(id),
            Fault::Pause => {
                let length = Duration::from_millis(self.rng.range(1, 1_500));
                let host = self.hosts.get_mut(&id).unwrap();
                if host.node.is_up() && host.paused.is_none() {
                    host.paused = Some(Vec::new());
                    self.report.pauses += 1;
                    self.after(length, Happening::Resume { node: id });
                }
            }
            Fault::Change => self.change_members(leader.unwrap_or(id)),
            Fault::Transfer => {
                let Some(&to) = self.rng.pick(&ids) else { return };
                self.admin(leader.unwrap_or(id), |replica, out| replica.transfer(to, out));
                self.report.transfers += 1;
            }
            Fault::Compact => {
                let host = self.hosts.get_mut(&id).unwrap();
                if host.paused.is_none() {
                    host.node.compact();
                    self.collect(id);
                }
            }
        }
    }

    fn admin(
        &mut self,
        id: NodeId,
        act: impl FnOnce(
            &mut orthodrome_protocols::replication::Replica<Register>,
            &mut crate::node::Out<'_>,
        ),
    ) {
        let now = self.now;
        let host = self.hosts.get_mut(&id).unwrap();
        if host.paused.is_none() {
            let local = host.local(now);
            host.node.with(local, act);
            self.collect(id);
        }
    }

    fn crash(&mut self, id: NodeId) {
        let host = self.hosts.get_mut(&id).unwrap();
        if !host.node.is_up() {
            return;
        }
        let pending = host.node.disk.pending();
        let survive = usize::try_from(self.rng.below(pending as u64 + 1)).unwrap();
        host.node.crash(survive);
        host.incarnation += 1;
        host.paused = None;
        self.writes.retain(|&(node, _, _), _| node != id);
        self.reads.retain(|_, &mut (node, _)| node != id);
        self.report.crashes += 1;
        // Half come back at once: what was promised just before must still hold.
        let longest = if self.rng.chance(1, 2) { 20 } else { 2_000 };
        let down = self.rng.range(1, longest);
        self.after(Duration::from_millis(down), Happening::Restart { node: id });
    }

    fn partition(&mut self, id: NodeId) {
        let ids = self.ids();
        let mut cut = OrdSet::new();
        match self.rng.below(4) {
            // One alone.
            0 => {
                for &other in &ids {
                    cut.extend([(id, other), (other, id)]);
                }
            }
            // One that hears nobody, or that nobody hears.
            1 => {
                let mute = self.rng.chance(1, 2);
                for &other in &ids {
                    cut.insert(if mute { (id, other) } else { (other, id) });
                }
            }
            // Two sides.
            2 => {
                let side: OrdSet<NodeId> =
                    ids.iter().copied().filter(|_| self.rng.chance(1, 2)).collect();
                for &a in &ids {
                    for &b in &ids {
                        if side.contains(&a) != side.contains(&b) {
                            cut.insert((a, b));
                        }
                    }
                }
            }
            // Single links.
            _ => {
                for &a in &ids {
                    for &b in &ids {
                        if self.rng.chance(1, 3) {
                            cut.insert((a, b));
                        }
                    }
                }
            }
        }
        self.sequence += 1;
        let partition = self.sequence;
        self.cut.insert(partition, cut);
        self.report.partitions += 1;
        let length = self.rng.range(10, 2_500);
        self.after(Duration::from_millis(length), Happening::Heal { partition });
    }

    fn change_members(&mut self, id: NodeId) {
        let mut ids = self.ids();
        self.rng.shuffle(&mut ids);
        let voters = self.rng.range(self.voters_min as u64, ids.len() as u64);
        let learners = ids.split_off(usize::try_from(voters).unwrap());
        let keep = self.rng.below(learners.len() as u64 + 1);
        let learners = learners.into_iter().take(usize::try_from(keep).unwrap()).collect();
        let mut accepted = false;
        self.admin(id, |replica, out| {
            accepted = replica.change_members(ids, learners, out).is_ok();
        });
        self.report.changes += u64::from(accepted);
    }

    fn leader(&self) -> Option<NodeId> {
        let up = self.hosts.values().filter_map(|host| host.node.replica.as_ref());
        let leading = up.filter(|replica| replica.is_leader());
        let latest = leading.max_by_key(|replica| replica.term())?;
        Some(latest.leader().unwrap())
    }

    /// Ends all faults and requires that the group works again within bounded time: one ready
    /// leader, a new entry surfaced by every member, leases held.
    pub fn heal(&mut self) {
        self.calm = true;
        self.cut.clear();
        for id in self.ids() {
            self.resume(id);
            self.start(id);
        }
        let goal = Index(self.chosen.len() as u64 + 5);
        let mut waited = 0;
        while waited < 100 {
            self.run(ELECTION_TIMEOUT);
            waited += 1;
            if self.has_recovered(goal) {
                return;
            }
        }
        panic!("liveness: no progress past {goal} within {waited} election time-outs of the heal");
    }

    fn has_recovered(&self, goal: Index) -> bool {
        let Some(leader) = self.leader() else { return false };
        let host = &self.hosts[&leader];
        let replica = host.node.replica.as_ref().unwrap();
        let members = replica.members();
        replica.is_ready()
            && !members.is_joint()
            && (replica.has_lease(host.local(self.now)) || members.voters == [leader])
            && members.all().iter().all(|id| self.hosts[id].node.applied >= goal)
    }
}
