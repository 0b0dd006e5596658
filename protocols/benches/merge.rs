//! What the merge of streams costs a transaction, against the backlog and against contention: so
//! many transactions wait all the time. `cargo bench -p orthodrome-protocols --bench merge`, of
//! which the table at the beginning says how many a core merges a second and what the slowest
//! hundredth takes.
//!
//! Two regions; the second one's stream is `backlog` transactions behind the first one's, so that
//! what has its home in both waits as long. `disjoint`: no two touch a key. `contended`: all that
//! wait touch one of ten keys of each region, and each waits for those before it.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::disallowed_types,
    missing_docs,
    reason = "a benchmark: a failed assumption should stop it"
)]

use std::collections::VecDeque;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use divan::Bencher;
use divan::counter::ItemsCount;
use orthodrome_core::id::{ClientId, PartitionId, RegionId, TxnId};
use orthodrome_core::time::{Time, Timestamp};
use orthodrome_core::txn::Key;
use orthodrome_protocols::deterministic::Sequenced;
use orthodrome_protocols::deterministic::merge::{Merge, Place};
use orthodrome_protocols::functor::{Body, Functor};
use orthodrome_protocols::replication::Index;

/// Transactions of one sample.
const BATCH: u64 = 1_000;

/// Keys are named after the region of their home.
fn home(key: &Key) -> PartitionId {
    PartitionId(u32::from(key.bytes().first() == Some(&b'b')))
}

/// A transaction that writes a key of each region.
fn transaction(number: u64, keys: u64) -> Arc<Sequenced> {
    let at = number % keys;
    let writes = vec![Key::from(format!("a{at}")), Key::from(format!("b{at}"))];
    let functor = Functor {
        txn: TxnId::new(ClientId(1), number),
        reads: Vec::new(),
        writes,
        body: Body::Ops(Vec::new()),
        acknowledged_below: 0,
    };
    let homes = vec![PartitionId(0), PartitionId(1)];
    Arc::new(Sequenced::new(Arc::new(functor), homes, Vec::new(), RegionId(0)))
}

/// Two streams, the second one behind.
struct Streams {
    merge: Merge,
    keys: u64,
    next: [u64; 2],
    behind: VecDeque<Arc<Sequenced>>,
}

impl Streams {
    fn new(backlog: u64, keys: u64) -> Self {
        let mut streams =
            Self { merge: Merge::new(None, false), keys, next: [0; 2], behind: VecDeque::new() };
        for _ in 0..backlog {
            streams.sequence();
        }
        streams
    }

    fn insert(&mut self, stream: u32, entry: &Arc<Sequenced>) {
        let next = self.next.get_mut(stream as usize).unwrap();
        *next += 1;
        let place =
            Place { index: Index(*next), offset: 0, stamp: Timestamp(*next), is_late: false };
        self.merge.insert(PartitionId(stream), place, entry, home, Time(*next));
    }

    /// One more in the first stream.
    fn sequence(&mut self) {
        let entry = transaction(self.next.first().unwrap() + 1, self.keys);
        self.insert(0, &entry);
        self.behind.push_back(entry);
    }

    /// The second stream goes on; whatever may run does.
    fn follow(&mut self) {
        let entry = self.behind.pop_front().unwrap();
        self.insert(1, &entry);
        while let Some(merged) = self.merge.pop() {
            black_box(merged);
        }
    }
}

fn run(bencher: Bencher<'_, '_>, backlog: u64, keys: u64) {
    let mut streams = Streams::new(backlog, keys);
    bencher.counter(ItemsCount::new(BATCH)).bench_local(|| {
        for _ in 0..BATCH {
            streams.sequence();
            streams.follow();
        }
    });
    assert_eq!(streams.merge.len() as u64, backlog);
}

#[divan::bench(args = [10, 1_000, 100_000])]
fn disjoint(bencher: Bencher<'_, '_>, backlog: u64) {
    run(bencher, backlog, 1 << 40);
}

#[divan::bench(args = [10, 1_000, 100_000])]
fn contended(bencher: Bencher<'_, '_>, backlog: u64) {
    run(bencher, backlog, 10);
}

/// One core, so many transactions; how long each keeps the merge busy: both its streams, and what
/// runs because of it.
const SINGLY: usize = 100_000;

/// Processor time of this process so far, in seconds.
fn processor() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    // Fields are counted after the name, which is in parentheses.
    let fields = stat.rsplit_once(')').unwrap().1.split_whitespace().skip(11).take(2);
    // USER_HZ is 100 on every Linux.
    fields.map(|ticks| ticks.parse::<f64>().unwrap() / 100.0).sum()
}

fn singly(backlog: u64, keys: u64) {
    let mut streams = Streams::new(backlog, keys);
    let mut took = Vec::with_capacity(SINGLY);
    let before = processor();
    for _ in 0..SINGLY {
        let at = Instant::now();
        streams.sequence();
        streams.follow();
        took.push(at.elapsed().as_nanos());
    }
    // What else the machine does makes it longer, and no more work.
    let rate = SINGLY as f64 / (processor() - before);
    took.sort_unstable();
    let quantile = |share: f64| took[(SINGLY as f64 * share) as usize] as f64 / 1e3;
    let keys = if keys < 1 << 40 { keys.to_string() } else { "∞".into() };
    let (median, slow) = (quantile(0.5), quantile(0.99));
    println!("{backlog:>8} {keys:>6} {rate:>12.0} {median:>9.1} {slow:>9.1}");
}

fn main() {
    println!("{:>8} {:>6} {:>12} {:>9} {:>9}", "backlog", "keys", "txn/core-s", "p50 µs", "p99 µs");
    for keys in [1 << 40, 1_000, 10, 1] {
        for backlog in [10, 1_000, 100_000] {
            singly(backlog, keys);
        }
    }
    divan::main();
}
