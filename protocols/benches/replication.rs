//! Proposals through a group of three in memory: no network, disks that finish at once.
//! `cargo bench -p orthodrome-protocols --bench replication`
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    missing_docs,
    reason = "a benchmark: a failed assumption should stop it"
)]

use std::collections::VecDeque;
use std::hint::black_box;

use orthodrome_core::{Duration, NodeId, Rng, Ticket, Time};
use orthodrome_protocols::replication::{
    Config, Event, Group, Index, Io, Message, Record, Replica, Replicated, Timer,
};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Numbers;

impl Replicated for Numbers {
    type Command = u64;
    type Chunk = u64;
    type Cursor = u64;
}

struct Out {
    now: Time,
    rng: Rng,
    sent: VecDeque<(NodeId, Message<Numbers>)>,
    last: u64,
    durable: u64,
}

impl Io<Numbers> for Out {
    fn now(&self) -> Time {
        self.now
    }
    fn rng(&mut self) -> &mut Rng {
        &mut self.rng
    }
    fn send(&mut self, to: NodeId, msg: Message<Numbers>) {
        self.sent.push_back((to, msg));
    }
    fn persist(&mut self, record: Record<Numbers>) -> Ticket {
        black_box(record);
        self.last += 1;
        Ticket(self.last)
    }
    fn set_timer(&mut self, _: Timer, _: Time) {}
    fn cancel_timer(&mut self, _: Timer) {}
}

struct Trio {
    replicas: Vec<Replica<Numbers>>,
    outs: Vec<Out>,
    next: u64,
    chosen: Index,
}

impl Trio {
    fn new() -> Self {
        let voters: Vec<NodeId> = (0..3).map(NodeId).collect();
        let mut outs: Vec<Out> = (0..3)
            .map(|node| Out {
                now: Time::ZERO,
                rng: Rng::stream(1, "bench", node),
                sent: VecDeque::new(),
                last: 0,
                durable: 0,
            })
            .collect();
        let config = Config::with_election_timeout(Duration::from_secs(1));
        let replicas = voters.iter().zip(&mut outs).map(|(&me, out)| {
            let preferred_leader = Some(NodeId(0));
            let group = Group { voters: voters.clone(), learners: Vec::new(), preferred_leader };
            Replica::new(me, group, config.clone(), Vec::new(), out)
        });
        let replicas = replicas.collect();
        let mut trio = Self { replicas, outs, next: 0, chosen: Index(0) };
        trio.replicas[0].on_timer(Timer::Election, &mut trio.outs[0]);
        trio.settle();
        assert!(trio.replicas[0].is_ready());
        trio
    }

    fn after(&mut self, at: usize) {
        let (replica, out) = (&mut self.replicas[at], &mut self.outs[at]);
        if out.last > out.durable {
            out.durable = out.last;
            replica.on_durable(Ticket(out.last), out);
        }
        replica.flush(out);
        while let Some(event) = replica.next_event() {
            if let Event::Chosen { index, .. } = event {
                self.chosen = self.chosen.max(index);
            }
        }
    }

    fn settle(&mut self) {
        (0..3).for_each(|at| self.after(at));
        while let Some(from) = self.outs.iter().position(|out| !out.sent.is_empty()) {
            let (to, msg) = self.outs[from].sent.pop_front().unwrap();
            let at = usize::try_from(to.0).unwrap();
            let sender = NodeId(u32::try_from(from).unwrap());
            self.replicas[at].step(sender, msg, &mut self.outs[at]);
            self.after(at);
        }
    }

    /// Proposes `batch` commands, and returns when they are chosen.
    fn propose(&mut self, batch: u64) {
        for _ in 0..batch {
            self.next += 1;
            let place = self.replicas[0].propose(self.next, &mut self.outs[0]);
            assert!(place.is_some());
        }
        self.settle();
        assert_eq!(self.chosen, self.replicas[0].last_index());
        if self.next % 1_024 < batch {
            for replica in &mut self.replicas {
                replica.compact(replica.surfaced_index());
            }
        }
    }
}

/// CPU time of all three replicas together, for one proposal or a batch that shares messages.
#[divan::bench(args = [1, 8, 64])]
fn proposals(bencher: divan::Bencher<'_, '_>, batch: u64) {
    let mut trio = Trio::new();
    bencher.counter(divan::counter::ItemsCount::new(batch)).bench_local(|| trio.propose(batch));
}

fn main() {
    divan::main();
}
