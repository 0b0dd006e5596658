//! Links that deliver everything, in order, and again and again in late bursts, as TCP does where
//! packets are lost. A leader that is well must be able to stay.

use orthodrome_core::ordered::OrdMap;
use orthodrome_core::{Duration, NodeId, Rng, Ticket, Time};
use orthodrome_protocols::replication::{Config, Group, Index, Message, Term};

use crate::node::{Node, Register};

const TIMEOUT: Duration = Duration::from_millis(200);
/// A link that stalls delivers nothing for up to so long.
const STALL_MS: u64 = 1_500;
/// The mean time between two stalls of one link.
const BETWEEN_MS: u64 = 4_000;

struct Network {
    now: Time,
    rng: Rng,
    nodes: OrdMap<NodeId, Node>,
    /// By arrival, sender and number.
    under_way: OrdMap<(Time, NodeId, u64), (NodeId, Message<Register>)>,
    sent: u64,
    /// When each link delivers again, and the end of the last message on it.
    links: OrdMap<(NodeId, NodeId), Time>,
    stalls: bool,
}

impl Network {
    fn new(seed: u64) -> Self {
        let ids = (1..=3).map(NodeId);
        let voters: Vec<NodeId> = ids.clone().collect();
        let group = Group { voters, learners: Vec::new(), preferred_leader: Some(NodeId(1)) };
        let mut config = Config::with_election_timeout(TIMEOUT);
        config.compared_entries = 4;
        let nodes = ids.map(|id| (id, Node::new(id, group.clone(), config.clone(), seed)));
        let mut network = Self {
            now: Time::ZERO,
            rng: Rng::stream(seed, "late", 0),
            nodes: nodes.collect(),
            under_way: OrdMap::new(),
            sent: 0,
            links: OrdMap::new(),
            stalls: true,
        };
        for id in network.ids() {
            network.nodes.get_mut(&id).unwrap().start(Time::ZERO);
            network.collect(id);
        }
        network
    }

    fn ids(&self) -> Vec<NodeId> {
        self.nodes.keys().copied().collect()
    }

    /// Disks are fast; links are slow at times.
    fn collect(&mut self, id: NodeId) {
        let node = self.nodes.get_mut(&id).unwrap();
        while node.disk.pending() > 0 {
            node.sync(Ticket(u64::MAX), self.now);
        }
        node.told.clear();
        for (to, msg) in std::mem::take(&mut node.sent) {
            let link = self.links.entry((id, to)).or_default();
            // Several messages in a heartbeat's interval.
            let is_stalled = self.stalls && self.rng.chance(20, BETWEEN_MS);
            let late = if is_stalled { self.rng.below(STALL_MS) } else { 0 };
            let arrival = self.now + Duration::from_millis(20 + late);
            *link = arrival.max(*link);
            self.sent += 1;
            self.under_way.insert((*link, id, self.sent), (to, msg));
        }
    }

    fn run(&mut self, span: Duration) {
        let end = self.now + span;
        loop {
            let message = self.under_way.first_key_value().map(|(&(at, ..), _)| at);
            let timers = self
                .nodes
                .values()
                .flat_map(|node| node.timers.iter().map(move |(&timer, &at)| (at, node.id, timer)));
            let timer = timers.min();
            let next = message.into_iter().chain(timer.map(|(at, ..)| at)).min();
            let Some(next) = next.filter(|next| *next <= end) else { break };
            self.now = self.now.max(next);
            if message == Some(next) {
                let ((_, from, _), (to, msg)) = self.under_way.pop_first().unwrap();
                let now = self.now;
                let node = self.nodes.get_mut(&to).unwrap();
                node.with(now, |replica, out| replica.step(from, msg, out));
                self.collect(to);
            } else if let Some((_, id, timer)) = timer {
                self.nodes.get_mut(&id).unwrap().fire(timer, self.now);
                self.collect(id);
            }
        }
        self.now = end;
    }

    fn term(&self) -> Term {
        let replicas = self.nodes.values().filter_map(|node| node.replica.as_ref());
        replicas.map(|replica| replica.term()).max().unwrap_or_default()
    }

    /// How many seconds pass until others have elected a leader after the leader has gone.
    fn replace_leader(&mut self) -> u64 {
        let leads = |node: &&Node| node.replica.as_ref().is_some_and(|replica| replica.is_ready());
        let leader = self.nodes.values().find(leads).unwrap().id;
        self.nodes.get_mut(&leader).unwrap().crash(0);
        self.under_way.retain(|&(_, from, _), (to, _)| from != leader && *to != leader);
        for tenths in 1..1_000 {
            self.run(Duration::from_millis(100));
            if self.nodes.values().any(|node| leads(&node)) {
                self.nodes.get_mut(&leader).unwrap().start(self.now);
                self.collect(leader);
                return tenths;
            }
        }
        panic!("nobody leads");
    }
}

/// What the nodes panic with if these apply the fifth entry wrongly.
fn difference(wrong: &[u32]) -> Option<String> {
    let mut network = Network::new(1);
    network.stalls = false;
    for &id in wrong {
        network.nodes.get_mut(&NodeId(id)).unwrap().wrong_at = Some(Index(5));
    }
    let run = std::panic::AssertUnwindSafe(|| {
        for command in 0..20 {
            network.run(Duration::from_secs(1));
            let now = network.now;
            let leader = network.nodes.get_mut(&NodeId(1)).unwrap();
            let place = leader.with(now, |replica, out| replica.propose(command, out));
            assert!(place.flatten().is_some(), "n1 leads");
            network.collect(NodeId(1));
        }
    });
    let panic = std::panic::catch_unwind(run).err()?;
    panic.downcast_ref::<String>().cloned()
}

#[test]
fn a_follower_that_came_to_something_else_stops() {
    assert_eq!(difference(&[]), None);
    let text = difference(&[3]).unwrap();
    assert!(text.starts_with("n3 follower"), "{text}");
    assert!(text.contains("entries 5 to 8 of the log came to different results"), "{text}");
    assert!(text.contains("at n1"), "{text}");
}

#[test]
fn a_leader_that_came_to_something_else_than_most_stops() {
    for wrong in [&[1][..], &[2, 3]] {
        let text = difference(wrong).unwrap();
        assert!(text.starts_with("n1 leader"), "{text}");
    }
}

#[test]
fn leaders_that_are_well_stay_on_links_that_deliver_late() {
    for seed in 0..10 {
        let mut network = Network::new(seed);
        network.run(Duration::from_secs(60));
        let learning = network.term();
        network.run(Duration::from_secs(120));
        let Term(elections) = Term(network.term().0 - learning.0);
        println!("seed {seed}: term {learning} after a minute, {elections} more in two");
        assert!(learning.0 <= 20 && elections <= 6, "seed {seed}: {learning}, then {elections}");
    }
}

#[test]
fn leaders_that_fail_are_replaced_soon_once_links_are_well_again() {
    for seed in 0..10 {
        let mut network = Network::new(seed);
        network.run(Duration::from_secs(60));
        network.stalls = false;
        network.run(Duration::from_secs(200));
        // Twice the longest time-out that a voter draws, and the first election that may be split.
        let tenths = network.replace_leader();
        assert!(tenths <= 12, "seed {seed}: {tenths} tenths of a second");
    }
}
