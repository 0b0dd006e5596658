//! One voter of the directory, driven by hand: how long it waits for lives that say nothing.

use std::sync::Arc;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{NodeId, Ticket};
use orthodrome_core::machine::Claim;
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::rng::Rng;
use orthodrome_core::time::{Duration, Time, Timestamp};
use orthodrome_core::topology::Topology;

use super::directory::{
    self, Answer, Ask, Config, Directory, Io, Keeper, Life, Membership, Message, Phase, Timer,
};
use super::watermark::{Member, Members, Status};
use crate::replication;

/// The only voter.
const VOTER: NodeId = NodeId(1);
/// A server that asks it.
const SERVER: NodeId = NodeId(2);
/// Another one, that asks in one test.
const OTHER: NodeId = NodeId(3);

struct Out {
    now: Time,
    rng: Rng,
    timers: OrdMap<Timer, Time>,
    last: u64,
    sent: Vec<(NodeId, Message)>,
}

impl replication::Io<Directory> for Out {
    fn now(&self) -> Time {
        self.now
    }
    fn rng(&mut self) -> &mut Rng {
        &mut self.rng
    }
    fn send(&mut self, _: NodeId, _: replication::Message<Directory>) {}
    fn persist(&mut self, _: replication::Record<Directory>) -> Ticket {
        self.last += 1;
        Ticket(self.last)
    }
    fn set_timer(&mut self, timer: replication::Timer, at: Time) {
        self.timers.insert(Timer::Log(timer), at);
    }
    fn cancel_timer(&mut self, timer: replication::Timer) {
        self.timers.remove(&Timer::Log(timer));
    }
}

impl Io for Out {
    fn send_to_server(&mut self, to: NodeId, msg: Message) {
        self.sent.push((to, msg));
    }
    fn set_sweep(&mut self, at: Time) {
        self.timers.insert(Timer::Sweep, at);
    }
    fn claim(&mut self, _: Claim) {}
}

/// The voter, and a server that asks it whenever a test says so.
struct Desk {
    keeper: Keeper,
    out: Out,
    config: Config,
    life: Life,
    ended: Option<Life>,
    /// The voter is not of an earlier version.
    keeps_lengths: bool,
    /// How long answers take to its server.
    took: Duration,
    /// The voter is a server too, and asks itself.
    voter_asks: bool,
}

fn cluster() -> Cluster {
    let map = Topology::uniform(3, Duration::from_micros(500), Duration::from_millis(20));
    Cluster::spread(map, 1, 0, 1, 1).unwrap()
}

impl Desk {
    fn new(keeps_lengths: bool) -> Self {
        let cluster = cluster();
        assert_eq!(directory::voters(&cluster), [VOTER]);
        let config = Config::for_round_trip(Duration::from_millis(40));
        let (rng, timers) = (Rng::stream(1, "desk", 0), OrdMap::new());
        let mut out = Out { now: Time::ZERO, rng, timers, last: 0, sent: Vec::new() };
        let keeper = Keeper::new(VOTER, Arc::new(cluster), config.clone(), Vec::new(), &mut out);
        let (life, took) = (Life(1), Duration::ZERO);
        let (ended, voter_asks) = (None, true);
        let mut desk = Self { keeper, out, config, life, ended, keeps_lengths, took, voter_asks };
        desk.settle();
        desk.pass(Duration::from_secs(1));
        desk
    }

    /// The voter starts again with what it remembers.
    fn restart(&mut self) {
        let records = self.keeper.checkpoint_records();
        self.out.timers.clear();
        let cluster = Arc::new(cluster());
        self.keeper = Keeper::new(VOTER, cluster, self.config.clone(), records, &mut self.out);
        self.settle();
    }

    fn settle(&mut self) {
        for _ in 0..4 {
            self.keeper.on_durable(Ticket(self.out.last), &mut self.out);
            self.keeper.flush(&mut self.out);
        }
    }

    /// Lets time pass. The voter asks itself, as its server does.
    fn pass(&mut self, span: Duration) {
        let until = self.out.now + span;
        while self.out.now < until {
            self.out.now = self.out.now + Duration::from_millis(1);
            let now = self.out.now;
            let due = self.out.timers.iter().filter(|(_, at)| **at <= now);
            for timer in due.map(|(timer, _)| *timer).collect::<Vec<_>>() {
                self.out.timers.remove(&timer);
                self.keeper.on_timer(timer, &mut self.out);
                self.settle();
            }
            if self.voter_asks && now.0.is_multiple_of(10_000_000) {
                self.hear(VOTER, Life(9), None);
            }
        }
    }

    fn hear(&mut self, from: NodeId, life: Life, ended: Option<Life>) {
        let last = self
            .out
            .sent
            .drain(..)
            .filter_map(|(to, msg)| {
                let Message::Answer(answer) = msg else { return None };
                (to == from).then_some(answer.tasks)
            })
            .next_back();
        let done = last.unwrap_or_default();
        let clock = Timestamp(self.out.now.0);
        let (sent, is_marked, keeps_lengths) = (self.out.now, true, self.keeps_lengths);
        let took = if from == SERVER { self.took } else { Duration::ZERO };
        let ask = Ask { life, sent, epoch: 0, clock, done, is_marked, ended, keeps_lengths, took };
        self.keeper.on_ask(from, &ask, &mut self.out);
        self.settle();
    }

    fn ask(&mut self) {
        self.hear(SERVER, self.life, self.ended);
    }

    /// The ballot in which somebody is to decide what the voter's server left.
    fn takeover(&self) -> Option<u64> {
        match self.keeper.state().standing(VOTER)?.phase {
            Phase::Fenced { ballot, .. } => Some(ballot),
            Phase::Active | Phase::Out => None,
        }
    }

    fn is_active(&self) -> bool {
        let standing = self.keeper.state().standing(SERVER).unwrap();
        standing.phase == Phase::Active && standing.life == self.life
    }

    /// The server says nothing until its life is ended: for how many leases that takes, rounded
    /// down.
    fn silence(&mut self) -> u32 {
        self.ask();
        assert!(self.is_active());
        let from = self.out.now;
        while self.is_active() {
            self.pass(Duration::from_millis(1));
            assert!(self.out.now.since(from) < self.config.lease * 100, "it is never ended");
        }
        let leases = self.out.now.since(from).as_nanos() / self.config.lease.as_nanos();
        u32::try_from(leases).unwrap()
    }

    /// A new life of the same process, or of a new one, asks until it takes part.
    fn join(&mut self, is_well: bool) {
        let life = Life(self.life.0 + 10);
        self.ended = is_well.then_some(self.life);
        self.life = life;
        self.stay(Duration::from_millis(400));
        assert!(self.is_active());
    }

    /// The server goes on asking.
    fn stay(&mut self, span: Duration) {
        let until = self.out.now + span;
        while self.out.now < until {
            self.ask();
            self.pass(Duration::from_millis(40));
        }
    }
}

#[test]
fn leases_double_if_the_life_before_was_ended_while_its_process_was_well() {
    let mut desk = Desk::new(true);
    desk.join(false);
    for leases in [1, 2, 4, 8, 16] {
        assert_eq!(desk.silence(), leases);
        desk.join(true);
    }
    desk.silence();
    // Whoever comes back in a new process was not well, and has proved nothing.
    desk.join(false);
    assert_eq!(desk.silence(), 32);
}

#[test]
fn leases_halve_again_while_a_life_lasts() {
    let mut desk = Desk::new(true);
    desk.join(false);
    for _ in 0..3 {
        desk.silence();
        desk.join(true);
    }
    let lease = desk.config.lease;
    desk.stay(lease * 8 * 66);
    assert_eq!(desk.silence(), 4);
    desk.join(false);
    desk.stay(lease * (4 + 2) * 66);
    assert_eq!(desk.silence(), 1);
}

/// On links that lose a fifth of all packets, answers take seconds: leases that double from a fraction of a
/// second would have ended many lives first.
#[test]
fn leases_are_several_times_as_long_as_answers_take() {
    let mut desk = Desk::new(true);
    desk.took = Duration::from_secs(1);
    desk.join(false);
    let lease = desk.config.lease;
    assert_eq!(u128::from(desk.silence()), (desk.took * 4).as_nanos() / lease.as_nanos());
    desk.took = Duration::from_secs(3_600);
    desk.join(false);
    assert_eq!(u128::from(desk.silence()), 20_000_000_000 / lease.as_nanos(), "there is a bound");
}

/// A server whose own life has been ended has no long lease, and links to it may be slow all the same.
#[test]
fn a_takeover_is_left_to_a_server_for_as_long_as_answers_take_to_it() {
    let takeover_after_silence = |took| {
        let mut desk = Desk::new(true);
        desk.join(false);
        (desk.voter_asks, desk.took) = (false, took);
        while desk.takeover().is_none() {
            desk.ask();
            desk.pass(Duration::from_millis(10));
        }
        let first = desk.takeover();
        let until = desk.out.now + desk.config.lease * 3 / 2;
        while desk.out.now < until {
            desk.hear(OTHER, Life(7), None);
            desk.pass(Duration::from_millis(10));
        }
        desk.takeover() == first
    };
    assert!(!takeover_after_silence(Duration::ZERO), "another server is there");
    assert!(takeover_after_silence(Duration::from_millis(150)));
}

/// A server whose answers take seconds does not take each of its questions for one that nobody answers.
#[test]
fn a_server_asks_the_same_voter_for_as_long_as_answers_take() {
    let map = Topology::uniform(3, Duration::from_micros(500), Duration::from_millis(20));
    let (cluster, mut rng) = (Cluster::spread(map, 1, 0, 1, 3).unwrap(), Rng::stream(1, "asks", 0));
    let config = Config::for_round_trip(Duration::from_millis(20));
    let mut membership = Membership::new(SERVER, &cluster, config, true, &mut rng);
    let at = |ms| Time::from_millis(ms);
    let asked = |membership: &mut Membership, ms| membership.ask(at(ms), Timestamp(1));
    let (first, msg) = asked(&mut membership, 0);
    assert_ne!(asked(&mut membership, 20).0, first, "it knows of no delay");
    let Message::Ask(ask) = msg else { panic!("{msg}") };
    let answer = |ask: &Ask| Answer {
        life: ask.life,
        sent: ask.sent,
        grant: None,
        is_over: false,
        epoch: 1,
        members: None,
        tasks: Vec::new(),
    };
    membership.on_answer(first, answer(&ask), at(1_000), &mut rng);
    for ms in (1_000..2_000).step_by(20) {
        assert_eq!(asked(&mut membership, ms).0, first);
    }
    assert_ne!(asked(&mut membership, 2_000).0, first);
    // One late answer makes no long lease; many do.
    let mut took = Vec::new();
    for second in 3..43 {
        let (to, msg) = asked(&mut membership, second * 1_000);
        let Message::Ask(ask) = msg else { panic!("{msg}") };
        membership.on_answer(to, answer(&ask), at(second * 1_000 + 999), &mut rng);
        took.push(ask.took);
    }
    assert_eq!(took[0], Duration::from_millis(125));
    assert!(took[39] > Duration::from_millis(950), "{took:?}");
}

/// A voter of an earlier version lets a usual lease pass when it begins to lead, and no more.
#[test]
fn leases_do_not_grow_before_every_voter_keeps_their_lengths() {
    let mut desk = Desk::new(false);
    desk.join(false);
    for _ in 0..3 {
        assert_eq!(desk.silence(), 1);
        desk.join(true);
    }
}

/// A new leader does not know what was granted, and lets the longest lease of each incarnation
/// pass.
#[test]
fn a_new_leader_waits_for_leases_that_have_grown() {
    let mut desk = Desk::new(true);
    desk.join(false);
    for _ in 0..2 {
        desk.silence();
        desk.join(true);
    }
    desk.restart();
    let from = desk.out.now;
    while desk.is_active() {
        desk.pass(Duration::from_millis(1));
    }
    assert!(desk.out.now.since(from) >= desk.config.lease * 4);
}

/// Of members that somebody else tells, a server with an empty disk cannot know whether they are
/// those before it joined, lost its disk and was replaced.
#[test]
fn members_that_come_late_do_not_prove_that_a_disk_is_new() {
    let (cluster, mut rng) = (cluster(), Rng::stream(1, "late", 0));
    let config = Config::for_round_trip(Duration::from_millis(40));
    let mut membership = Membership::new(SERVER, &cluster, config, false, &mut rng);
    let member = |incarnation, status| Member { incarnation, status, disk: 0 };
    let of = |epoch, member| Members { epoch, servers: [(SERVER, member)].into() };
    let early = of(1, member(0, Status::Out));
    let (_, msg) = membership.ask(Time::ZERO, Timestamp(1));
    let Message::Ask(ask) = msg else { panic!("{msg}") };
    membership.on_members(&early, &mut rng);
    assert_eq!(membership.is_new(), None, "only the leader can know");
    let answer = |life, epoch, members| Answer {
        life,
        sent: ask.sent,
        grant: None,
        is_over: false,
        epoch,
        members,
        tasks: Vec::new(),
    };
    membership.on_answer(VOTER, answer(Life(7), 1, Some(early)), Time::ZERO, &mut rng);
    assert_eq!(membership.is_new(), None, "what an earlier process was answered is as old");
    let mut other = membership.members().clone();
    membership.on_answer(VOTER, answer(ask.life, 1, None), Time::ZERO, &mut rng);
    assert_eq!(membership.is_new(), Some(true));
    other.epoch = 8;
    other.servers.insert(SERVER, member(1, Status::Out));
    membership.on_members(&other, &mut rng);
    assert_eq!(membership.is_new(), Some(false), "that it has joined stays true");
}
