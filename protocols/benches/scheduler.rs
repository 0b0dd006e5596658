//! What running a transaction costs that is in its place, against workers and contention: entries
//! of one stream with 1 024 transactions of four read-modify-writes each. `cargo bench -p
//! orthodrome-protocols --bench scheduler` A core-second is a second of processor time, which does
//! not depend on what else the machine does.
#![allow(
    clippy::unwrap_used,
    clippy::disallowed_types,
    missing_docs,
    reason = "a benchmark: a failed assumption should stop it"
)]

/// The server's own threads.
#[allow(unused_imports, reason = "its tests are not run here")]
#[path = "../../server/src/node/workers.rs"]
mod workers;

use std::num::NonZero;
use std::sync::Arc;
use std::time::Instant;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{ClientId, RegionId, TxnId};
use orthodrome_core::rng::Rng;
use orthodrome_core::store::{MemoryEngine, Store};
use orthodrome_core::time::{Duration, Time, Timestamp};
use orthodrome_core::topology::Topology;
use orthodrome_core::txn::{Key, Op, Txn};
use orthodrome_protocols::deterministic::state::{Settings, State};
use orthodrome_protocols::deterministic::{Command, Image, Ordering, Placement};
use orthodrome_protocols::functor::Functor;
use orthodrome_protocols::replication::Index;
use workers::Threads;

const KEYS: u64 = 200_000;
const BATCH: u64 = 1_024;
const BATCHES: u64 = 40;

fn key(number: u64) -> Key {
    Key::from(format!("k{number:063}"))
}

struct Bench {
    placement: Placement,
    state: State,
    store: Store,
    index: u64,
}

impl Bench {
    fn new(threads: usize) -> Self {
        let map = Topology::uniform(3, Duration::from_millis(1), Duration::from_millis(10));
        let cluster = Arc::new(Cluster::spread(map, 1, 1, 3, 3).unwrap());
        let placement = Placement::new(cluster, Ordering::Global);
        let workers = Arc::new(Threads::new(NonZero::new(threads)));
        let state = State::new(
            &Image::default(),
            &placement,
            Settings::default(),
            workers,
            Time::default(),
        );
        let store = Store::new(Box::new(MemoryEngine::default()));
        Self { placement, state, store, index: 0 }
    }

    /// How many ran.
    fn apply(&mut self, all: Vec<Vec<Op>>) -> usize {
        self.index += 1;
        let plan = |(number, ops): (u64, Vec<Op>)| {
            let id = TxnId::new(ClientId(1), self.index * BATCH + number);
            let mut txn = Txn::procedure(id, RegionId(0), ops.clone());
            txn.acknowledged_below = id.counter;
            let functor = Functor::procedure(&txn, ops);
            Arc::new(self.state.plan(functor, RegionId(0), &self.placement))
        };
        let entries = (0..).zip(all).map(plan).collect();
        let command = Command::Batch { stamp: Timestamp(self.index), entries };
        let stream = *self.placement.streams().first().unwrap();
        let at = (stream, Index(self.index));
        let applied =
            self.state.apply(at, Some(&command), &self.placement, &mut self.store, Time::default());
        applied.ran.len()
    }
}

/// Processor time of this process so far, in seconds.
fn processor() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    // Fields are counted after the name, which is in parentheses.
    let fields = stat.rsplit_once(')').unwrap().1.split_whitespace().skip(11).take(2);
    // USER_HZ is 100 on every Linux.
    fields.map(|ticks| ticks.parse::<f64>().unwrap() / 100.0).sum()
}

fn measure(threads: usize, hot: u64) {
    let mut bench = Bench::new(threads);
    for first in (0..KEYS).step_by(BATCH as usize) {
        let put = |number| vec![Op::Put(key(number), vec![b'x'; 64].into())];
        bench.apply((first..(first + BATCH).min(KEYS)).map(put).collect());
    }
    let mut rng = Rng::stream(1, "bench", 0);
    let mut ran = 0;
    let (mut spent, mut busy) = (Duration::ZERO, 0.0);
    for _ in 0..BATCHES {
        let mut keys = Vec::new();
        for _ in 0..BATCH {
            let put = |number| Op::Put(key(number), vec![b'y'; 64].into());
            let numbers: Vec<u64> = (0..4).map(|_| rng.below(hot)).collect();
            let gets = numbers.iter().map(|&number| Op::Get(key(number)));
            keys.push(gets.chain(numbers.iter().map(|&number| put(number))).collect());
        }
        let (began, before) = (Instant::now(), processor());
        ran += bench.apply(keys);
        spent += began.elapsed();
        busy += processor() - before;
    }
    let (rate, a_core) = (ran as f64 / spent.as_secs_f64(), ran as f64 / busy);
    println!("{threads:>8} {hot:>9} {rate:>12.0} {a_core:>17.0}");
}

fn main() {
    println!("{:>8} {:>9} {:>12} {:>17}", "workers", "keys", "txn/s", "txn/core-second");
    for hot in [KEYS, 1_000, 10] {
        for threads in [1, 2] {
            measure(threads, hot);
        }
    }
}
