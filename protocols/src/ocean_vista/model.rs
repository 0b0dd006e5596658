//! A small model of everything that watermarks rest on: real directory, memberships and gossipers,
//! and servers that do nothing but assign timestamps and decide them, over a network that loses,
//! repeats and delays, with pauses, restarts and clocks that step. Whatever happens, no watermark
//! passes a timestamp that is undecided or assigned later.

use std::sync::Arc;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{NodeId, Ticket};
use orthodrome_core::machine::Claim;
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::rng::Rng;
use orthodrome_core::time::{Duration, Time, Timestamp};
use orthodrome_core::topology::Topology;

use super::directory::{
    self, Change, Config, Directory, Io, Keeper, Membership, Phase, Record, Task, Timer, voters,
};
use super::gossiper::{self, Gossiper, Heard, gossipers};
use super::watermark::{Report, Watermarks};
use crate::replication;

/// What the model gets wrong on purpose.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Broken {
    Nothing,
    /// In a gossiper.
    Gossip(gossiper::Mutation),
    /// V7: what was reported is not remembered as assigned, and clocks step.
    ReportNotAtomic,
    /// V6: timestamps are assigned without a lease.
    NoLease,
    /// Whoever joins begins at its clock.
    NoFloor,
}

#[derive(Clone, Debug)]
enum Wire {
    Directory(directory::Message),
    Gossip(gossiper::Message),
}

#[derive(Clone, Debug)]
enum Event {
    Deliver { from: NodeId, msg: Wire },
    Keeper { boot: u32, timer: Timer },
    Ask { boot: u32 },
    Gossip { boot: u32 },
    Work { boot: u32 },
    TakenOver { boot: u32, task: Task },
}

struct Out<'a> {
    now: Time,
    rng: &'a mut Rng,
    records: &'a mut Vec<Record>,
    timers: &'a mut OrdMap<Timer, Time>,
    last: &'a mut u64,
    sent: Vec<(NodeId, directory::Message)>,
}

impl replication::Io<Directory> for Out<'_> {
    fn now(&self) -> Time {
        self.now
    }
    fn rng(&mut self) -> &mut Rng {
        self.rng
    }
    fn send(&mut self, to: NodeId, msg: replication::Message<Directory>) {
        self.sent.push((to, directory::Message::Log(msg)));
    }
    fn persist(&mut self, record: replication::Record<Directory>) -> Ticket {
        self.records.push(Record::Log(record));
        *self.last += 1;
        Ticket(*self.last)
    }
    fn set_timer(&mut self, timer: replication::Timer, at: Time) {
        self.timers.insert(Timer::Log(timer), at);
    }
    fn cancel_timer(&mut self, timer: replication::Timer) {
        self.timers.remove(&Timer::Log(timer));
    }
}

impl Io for Out<'_> {
    fn send_to_server(&mut self, to: NodeId, msg: directory::Message) {
        self.sent.push((to, msg));
    }
    fn set_sweep(&mut self, at: Time) {
        self.timers.insert(Timer::Sweep, at);
    }
    fn claim(&mut self, _: Claim) {}
}

struct Server {
    boot: u32,
    /// Nothing happens here before this.
    paused_until: Time,
    skew: i64,
    membership: Membership,
    gossiper: Gossiper,
    watermarks: Watermarks,
    last: u64,
    open: OrdSet<Timestamp>,
    keeper: Option<Keeper>,
    records: Vec<Record>,
    timers: OrdMap<Timer, Time>,
    ticket: u64,
}

/// One timestamp that was assigned.
struct Assigned {
    by: (NodeId, u32),
    is_decided: bool,
}

struct World {
    now: Time,
    end_of_faults: Time,
    sequence: u64,
    queue: OrdMap<(Time, u64), (NodeId, Event)>,
    servers: OrdMap<NodeId, Server>,
    cut_off: Option<(NodeId, Time)>,
    cluster: Arc<Cluster>,
    config: Config,
    rng: Rng,
    broken: Broken,
    assigned: OrdMap<Timestamp, Assigned>,
    /// The highest visibility watermark that anybody computed.
    top: Timestamp,
    lives_ended: u32,
    error: Option<String>,
}

const EPOCH: u64 = 1_000_000_000_000_000;
const SLOTS: u64 = 4_096;

impl World {
    fn new(seed: u64, broken: Broken) -> Self {
        let mut rng = Rng::stream(seed, "watermarks", 0);
        let regions = if rng.chance(1, 2) { 3 } else { 2 };
        let map = Topology::uniform(regions, Duration::from_micros(500), Duration::from_millis(20));
        let cluster = Cluster::spread(map, 2, 0, 2, 3).unwrap();
        let cluster = Arc::new(cluster);
        let config = Config::for_round_trip(Duration::from_millis(40));
        let mut world = Self {
            now: Time::ZERO,
            end_of_faults: Time::from_millis(6_000),
            sequence: 0,
            queue: OrdMap::new(),
            servers: OrdMap::new(),
            cut_off: None,
            cluster: cluster.clone(),
            config,
            rng,
            broken,
            assigned: OrdMap::new(),
            top: Timestamp::ZERO,
            lives_ended: 0,
            error: None,
        };
        for server in cluster.servers() {
            world.start(server.id, 1, 0, Vec::new());
        }
        world
    }

    fn start(&mut self, id: NodeId, boot: u32, skew: i64, records: Vec<Record>) {
        let label = u64::from(id.0) << 32 | u64::from(boot);
        let mut rng = Rng::stream(self.rng.next_u64(), "life", label);
        let membership = Membership::new(id, &self.cluster, self.config.clone(), true, &mut rng);
        let region = self.cluster.region_of(id);
        let mut gossiper =
            Gossiper::new(self.cluster.clone(), region, membership.members().clone());
        if let Broken::Gossip(mutation) = self.broken {
            gossiper.mutation = Some(mutation);
        }
        let server = Server {
            boot,
            paused_until: Time::ZERO,
            skew,
            membership,
            gossiper,
            watermarks: Watermarks::default(),
            last: 0,
            open: OrdSet::new(),
            keeper: None,
            records: Vec::new(),
            timers: OrdMap::new(),
            ticket: 0,
        };
        self.servers.insert(id, server);
        if voters(&self.cluster).contains(&id) {
            self.servers.get_mut(&id).unwrap().records = records.clone();
            self.with_keeper(id, |keeper, cluster, config, out| {
                *keeper = Some(Keeper::new(id, cluster, config, records, out));
            });
        }
        for event in [Event::Ask { boot }, Event::Gossip { boot }, Event::Work { boot }] {
            self.after(Duration::from_micros(100), id, event);
        }
    }

    fn after(&mut self, span: Duration, node: NodeId, event: Event) {
        self.sequence += 1;
        self.queue.insert((self.now + span, self.sequence), (node, event));
    }

    /// Calls a voter, then makes durable what it wrote, sends what it said and sets its timers.
    fn with_keeper(
        &mut self,
        id: NodeId,
        f: impl FnOnce(&mut Option<Keeper>, Arc<Cluster>, Config, &mut Out<'_>),
    ) {
        let (cluster, config) = (self.cluster.clone(), self.config.clone());
        let server = self.servers.get_mut(&id).unwrap();
        let before = server.keeper.as_ref().map(|keeper| keeper.state().clone());
        let timers_before = server.timers.clone();
        let mut out = Out {
            now: self.now,
            rng: &mut self.rng,
            records: &mut server.records,
            timers: &mut server.timers,
            last: &mut server.ticket,
            sent: Vec::new(),
        };
        f(&mut server.keeper, cluster, config, &mut out);
        let Some(keeper) = &mut server.keeper else { return };
        for _ in 0..3 {
            let ticket = Ticket(*out.last);
            keeper.on_durable(ticket, &mut out);
            keeper.flush(&mut out);
        }
        keeper.assert_invariants();
        if keeper.needs_checkpoint() {
            *out.records = keeper.checkpoint_records();
            keeper.on_checkpoint_durable(&mut out);
        }
        let sent = std::mem::take(&mut out.sent);
        let (after, boot) = (keeper.state().clone(), server.boot);
        for (&timer, &at) in &server.timers {
            if timers_before.get(&timer) != Some(&at) {
                self.sequence += 1;
                let event = Event::Keeper { boot, timer };
                self.queue.insert((at.max(self.now), self.sequence), (id, event));
            }
        }
        if let Some(before) = before {
            self.check_fences(&before, &after);
        }
        for (to, msg) in sent {
            self.send(id, to, Wire::Directory(msg));
        }
    }

    /// Nobody is fenced who still has a lease.
    fn check_fences(&mut self, before: &directory::State, after: &directory::State) {
        for (&id, server) in &self.servers {
            let (Some(was), Some(is)) = (before.standing(id), after.standing(id)) else { continue };
            let is_fenced = was.phase == Phase::Active && matches!(is.phase, Phase::Fenced { .. });
            self.lives_ended += u32::from(is_fenced);
            let holds = server.membership.incarnation() == Some(is.incarnation);
            if is_fenced && holds && server.membership.has_lease(self.now) {
                self.error = Some(format!("{id} was fenced while it had a lease"));
            }
        }
    }

    fn send(&mut self, from: NodeId, to: NodeId, msg: Wire) {
        if from == to {
            self.after(Duration::ZERO, to, Event::Deliver { from, msg });
            return;
        }
        let is_faulty = self.now < self.end_of_faults;
        let is_cut = self
            .cut_off
            .is_some_and(|(node, until)| self.now < until && (node == from || node == to));
        if is_cut || is_faulty && self.rng.chance(1, 20) {
            return;
        }
        let copies = if is_faulty && self.rng.chance(1, 20) { 2 } else { 1 };
        for _ in 0..copies {
            let longest = if is_faulty && self.rng.chance(1, 30) { 1_500_000 } else { 15_000 };
            let delay = Duration::from_micros(self.rng.range(200, longest));
            self.after(delay, to, Event::Deliver { from, msg: msg.clone() });
        }
    }

    fn clock(&self, id: NodeId) -> Timestamp {
        let skew = self.servers[&id].skew;
        Timestamp((EPOCH + self.now.0).saturating_add_signed(skew))
    }

    /// A timestamp that is not remembered as assigned.
    fn create(&self, id: NodeId) -> Option<u64> {
        let server = &self.servers[&id];
        let at = if self.broken == Broken::NoLease { Time::ZERO } else { self.now };
        let window = server.membership.window(at, self.clock(id))?;
        let floor = if self.broken == Broken::NoFloor { 0 } else { window.floor.0 };
        let seen = if self.broken == Broken::NoFloor { 0 } else { server.watermarks.visible.0 };
        let least = window.clock.0.max(server.last).max(floor).max(seen);
        let at = (least / SLOTS + 1) * SLOTS + u64::from(id.0);
        (at <= window.limit.0).then_some(at)
    }

    fn report(&mut self, id: NodeId) -> Option<Report> {
        let created = self.create(id)?;
        let broken = self.broken;
        let server = self.servers.get_mut(&id).unwrap();
        let svw = match server.open.first() {
            Some(first) => *first,
            None => {
                if broken != Broken::ReportNotAtomic {
                    server.last = created;
                }
                Timestamp(created)
            }
        };
        let (incarnation, epoch) =
            (server.membership.incarnation()?, server.membership.members().epoch);
        let (srw, sgw) = (OrdMap::new(), server.watermarks.visible);
        Some(Report { server: id, incarnation, epoch, svw, srw, sgw })
    }

    fn take(&mut self, id: NodeId, changes: Vec<Change>) {
        for change in changes {
            let server = self.servers.get_mut(&id).unwrap();
            match change {
                Change::Members => {
                    let members = server.membership.members().clone();
                    server.gossiper.on_members(&members);
                }
                Change::Joined { .. } => {}
                Change::Ended => {
                    server.open.clear();
                    server.last = 0;
                }
                Change::Tasks => {
                    let (tasks, boot): (Vec<Task>, u32) =
                        (server.membership.tasks().copied().collect(), server.boot);
                    for task in tasks {
                        let span = Duration::from_millis(self.rng.range(5, 200));
                        self.after(span, id, Event::TakenOver { boot, task });
                    }
                }
            }
        }
    }

    fn publish(&mut self, id: NodeId) {
        let visible = self.servers[&id].gossiper.results().visible;
        let mut below = self.assigned.range(..visible);
        if let Some((at, of)) = below.find(|(_, of)| !of.is_decided) {
            let (server, incarnation) = of.by;
            self.error = Some(format!("{id}: {visible} passes {at} of {server}.{incarnation}"));
        }
        self.top = self.top.max(visible);
    }

    fn deliver(&mut self, id: NodeId, from: NodeId, msg: Wire) {
        let (now, clock) = (self.now, self.clock(id));
        match msg {
            Wire::Directory(directory::Message::Log(msg)) => {
                self.with_keeper(id, |keeper, _, _, out| {
                    keeper.as_mut().unwrap().on_log(from, msg, out);
                });
            }
            Wire::Directory(directory::Message::Ask(ask)) => {
                self.with_keeper(id, |keeper, _, _, out| {
                    keeper.as_mut().unwrap().on_ask(from, &ask, out);
                });
            }
            Wire::Directory(directory::Message::Answer(answer)) => {
                let server = self.servers.get_mut(&id).unwrap();
                let changes = server.membership.on_answer(from, answer, now, &mut self.rng);
                self.take(id, changes);
            }
            Wire::Directory(directory::Message::NotLeader { leader }) => {
                let server = self.servers.get_mut(&id).unwrap();
                if let Some((to, msg)) = server.membership.on_not_leader(from, leader, now, clock) {
                    self.send(id, to, Wire::Directory(msg));
                }
            }
            Wire::Directory(directory::Message::Members(members)) => {
                let server = self.servers.get_mut(&id).unwrap();
                let changes = server.membership.on_members(&members, &mut self.rng);
                self.take(id, changes);
            }
            Wire::Gossip(gossiper::Message::Watermarks(watermarks)) => {
                let server = self.servers.get_mut(&id).unwrap();
                if watermarks.epoch <= server.membership.members().epoch {
                    server.watermarks.adopt(&watermarks);
                }
            }
            Wire::Gossip(gossiper::Message::Report(report)) => {
                let heard = self.servers.get_mut(&id).unwrap().gossiper.on_report(report);
                self.on_heard(id, from, heard);
            }
            Wire::Gossip(gossiper::Message::Regional(regional)) => {
                let heard = self.servers.get_mut(&id).unwrap().gossiper.on_regional(regional);
                self.on_heard(id, from, heard);
            }
        }
    }

    fn on_heard(&mut self, id: NodeId, from: NodeId, heard: Heard) {
        match heard {
            Heard::Taken => {
                let server = self.servers.get_mut(&id).unwrap();
                server.gossiper.merge();
                if self.broken == Broken::Nothing {
                    server.gossiper.assert_invariants();
                }
                self.publish(id);
            }
            Heard::OlderEpoch => {
                let members = self.servers[&id].membership.members().clone();
                self.send(id, from, Wire::Directory(directory::Message::Members(members)));
            }
            Heard::Useless | Heard::NewerEpoch => {}
        }
    }

    fn gossip(&mut self, id: NodeId) {
        let cluster = self.cluster.clone();
        let members = self.servers[&id].membership.members().clone();
        let of = |region| gossipers(&cluster, &members, region, 2);
        if let Some(report) = self.report(id) {
            for to in of(cluster.region_of(id)) {
                self.send(id, to, Wire::Gossip(gossiper::Message::Report(report.clone())));
            }
        }
        let regional = self.servers[&id].gossiper.regional();
        if let Some(regional) = regional.filter(|_| of(cluster.region_of(id)).contains(&id)) {
            for to in cluster.topology.regions().flat_map(of).filter(|to| *to != id) {
                self.send(id, to, Wire::Gossip(gossiper::Message::Regional(regional.clone())));
            }
            let results = self.servers[&id].gossiper.results().clone();
            for server in cluster.servers().filter(|s| s.region == cluster.region_of(id)) {
                let msg = gossiper::Message::Watermarks(results.clone());
                self.send(id, server.id, Wire::Gossip(msg));
            }
        }
    }

    /// Assigns a timestamp, or decides one.
    fn work(&mut self, id: NodeId) {
        let minority = (self.servers.len() - 1) / 2;
        let may_step = self.servers.keys().take(minority).any(|stepping| *stepping == id);
        if may_step && self.now < self.end_of_faults && self.rng.chance(1, 20) {
            let skew = self.rng.range(0, 200_000_000) as i64 - 100_000_000;
            self.servers.get_mut(&id).unwrap().skew = skew;
        }
        let (is_assigning, created) = (self.rng.chance(2, 5), self.create(id));
        let server = self.servers.get_mut(&id).unwrap();
        if is_assigning {
            let (Some(at), Some(incarnation)) = (created, server.membership.incarnation()) else {
                return;
            };
            server.last = at;
            server.open.insert(Timestamp(at));
            let at = Timestamp(at);
            let by = (id, incarnation);
            let old = self.assigned.insert(at, Assigned { by, is_decided: false });
            if old.is_some() {
                self.error = Some(format!("{id} assigned {at}, which was assigned before"));
            }
            if at < self.top {
                let top = self.top;
                self.error = Some(format!("{id}.{incarnation} assigned {at}, but {top} is out"));
            }
        } else if !server.open.is_empty() {
            let open: Vec<Timestamp> = server.open.iter().copied().collect();
            let is_calm = self.now >= self.end_of_faults;
            let at = if is_calm { open[0] } else { *self.rng.pick(&open).unwrap() };
            server.open.remove(&at);
            self.assigned.get_mut(&at).unwrap().is_decided = true;
        }
    }

    fn break_something(&mut self) {
        let ids: Vec<NodeId> = self.servers.keys().copied().collect();
        let id = *self.rng.pick(&ids).unwrap();
        let minority = (ids.len() - 1) / 2;
        match self.rng.below(10) {
            0 | 1 => {
                let span = Duration::from_millis(self.rng.range(20, 900));
                self.servers.get_mut(&id).unwrap().paused_until = self.now + span;
            }
            2 => {
                let server = self.servers.remove(&id).unwrap();
                self.start(id, server.boot + 1, server.skew, server.records);
            }
            3 if self.rng.chance(1, 10) => {
                // Power fails everywhere.
                for id in ids {
                    let server = self.servers.remove(&id).unwrap();
                    self.start(id, server.boot + 1, server.skew, server.records);
                }
            }
            4 => {
                let id = ids[self.rng.below(minority as u64) as usize];
                let skew = self.rng.range(0, 4_000_000_000) as i64 - 2_000_000_000;
                self.servers.get_mut(&id).unwrap().skew = skew;
            }
            5 | 6 => {
                let span = Duration::from_millis(self.rng.range(50, 1_200));
                self.cut_off = Some((id, self.now + span));
            }
            _ => {}
        }
    }

    fn step(&mut self) {
        let Some(((at, _), (id, event))) = self.queue.pop_first() else { return };
        self.now = self.now.max(at);
        let until = self.servers[&id].paused_until;
        if until > self.now {
            // It happens once the process goes on, by the time as it then is.
            let span = until.since(self.now);
            self.after(span, id, event);
            return;
        }
        let now_boot = self.servers[&id].boot;
        match event {
            Event::Deliver { from, msg } => self.deliver(id, from, msg),
            Event::Keeper { boot, timer } if boot == now_boot => {
                let timers = &mut self.servers.get_mut(&id).unwrap().timers;
                if timers.get(&timer).is_some_and(|at| *at <= self.now) {
                    timers.remove(&timer);
                    self.with_keeper(id, |keeper, _, _, out| {
                        keeper.as_mut().unwrap().on_timer(timer, out);
                    });
                }
            }
            Event::Ask { boot } if boot == now_boot => {
                let (now, clock) = (self.now, self.clock(id));
                let membership = &mut self.servers.get_mut(&id).unwrap().membership;
                let (to, msg) = membership.ask(now, clock);
                let interval = membership.ask_interval();
                self.send(id, to, Wire::Directory(msg));
                self.after(interval, id, Event::Ask { boot });
            }
            Event::Gossip { boot } if boot == now_boot => {
                self.gossip(id);
                self.after(Duration::from_millis(10), id, Event::Gossip { boot });
            }
            Event::Work { boot } if boot == now_boot => {
                self.work(id);
                let span = Duration::from_micros(self.rng.range(500, 10_000));
                self.after(span, id, Event::Work { boot });
            }
            Event::TakenOver { boot, task } if boot == now_boot => {
                let of = (task.server, task.incarnation);
                let server = self.servers.get_mut(&id).unwrap();
                if server.membership.tasks().any(|open| *open == task) {
                    for (at, assigned) in &mut self.assigned {
                        if assigned.by == of && !assigned.is_decided {
                            if *at <= task.after || *at > task.upto {
                                self.error = Some(format!("{at} is outside of {task:?}"));
                            }
                            assigned.is_decided = true;
                        }
                    }
                    server.membership.finish(task);
                }
            }
            // Of a process that is gone.
            Event::Keeper { .. }
            | Event::Ask { .. }
            | Event::Gossip { .. }
            | Event::Work { .. }
            | Event::TakenOver { .. } => {}
        }
        if self.now < self.end_of_faults && self.rng.chance(1, 150) {
            self.break_something();
        }
    }

    fn run(&mut self) -> Result<(), String> {
        while self.now < self.end_of_faults + Duration::from_secs(6) {
            self.step();
            if let Some(error) = self.error.take() {
                return Err(format!("at {}: {error}", self.now));
            }
        }
        Ok(())
    }
}

#[test]
fn no_watermark_passes_what_is_undecided_or_assigned_later() {
    let mut lives_ended = 0;
    for seed in 0..40 {
        let mut world = World::new(seed, Broken::Nothing);
        world.run().unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        lives_ended += world.lives_ended;
        // With all faults over everybody is back, and a clock that is still wrong holds up nobody
        // for long.
        for (id, server) in &world.servers {
            assert!(server.membership.has_lease(world.now), "seed {seed}: {id} has no lease");
            let seen = server.watermarks.visible.0.saturating_sub(EPOCH);
            let late = world.now.since(Time(seen));
            let bound = world.config.ahead * 2;
            let gossiper = &server.gossiper;
            assert!(late < bound, "seed {seed}: {id} is behind by {late:?}: {gossiper}");
        }
    }
    assert!(lives_ended > 100, "only {lives_ended} lives were ended; the test shows little");
}

fn caught(broken: Broken, seeds: u64) {
    let first = (0..seeds).find_map(|seed| World::new(seed, broken).run().err());
    assert!(first.is_some(), "{broken:?} was not caught in {seeds} seeds");
}

#[test]
fn a_minimum_over_those_that_reported_is_caught() {
    caught(Broken::Gossip(gossiper::Mutation::PartialMinimum), 20);
}

#[test]
fn a_minimum_without_the_fenced_is_caught() {
    caught(Broken::Gossip(gossiper::Mutation::FencedForgotten), 20);
}

#[test]
fn reports_of_other_epochs_are_caught() {
    caught(Broken::Gossip(gossiper::Mutation::EpochsIgnored), 60);
}

#[test]
fn a_report_that_is_not_remembered_is_caught() {
    caught(Broken::ReportNotAtomic, 20);
}

#[test]
fn assigning_without_a_lease_is_caught() {
    caught(Broken::NoLease, 20);
}

#[test]
fn joining_without_a_floor_is_caught() {
    caught(Broken::NoFloor, 60);
}
