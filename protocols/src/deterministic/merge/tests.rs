use orthodrome_core::id::{ClientId, RegionId, TxnId};
use orthodrome_core::rng::Rng;
use orthodrome_core::time::Duration;

use super::*;
use crate::functor::{Body, Functor};

const STREAMS: u32 = 3;

/// Keys are named after their stream: `0a` belongs to stream 0.
fn home(key: &Key) -> PartitionId {
    PartitionId(u32::from(key.bytes()[0] - b'0'))
}

fn id(number: u64) -> Name {
    Name { txn: TxnId::new(ClientId(1), number), map: 0 }
}

fn txn(number: u64, reads: &[&str], writes: &[&str]) -> Arc<Sequenced> {
    let keys = |names: &[&str]| {
        let keys: OrdSet<Key> = names.iter().map(|name| Key::from(*name)).collect();
        keys.into_iter().collect::<Vec<_>>()
    };
    let (reads, writes) = (keys(reads), keys(writes));
    let homes: OrdSet<PartitionId> = reads.iter().chain(&writes).map(home).collect();
    let body = Body::Ops(Vec::new());
    let functor = Functor { txn: id(number).txn, reads, writes, body, acknowledged_below: 0 };
    let homes = homes.into_iter().collect();
    Arc::new(Sequenced::new(Arc::new(functor), homes, Vec::new(), RegionId(0)))
}

/// Streams, and how far each is merged.
struct Merging {
    merge: Merge,
    merged: Vec<u64>,
    order: Vec<Name>,
}

impl Merging {
    fn new() -> Self {
        Self {
            merge: Merge::new(None, false),
            merged: vec![0; STREAMS as usize],
            order: Vec::new(),
        }
    }

    fn insert(&mut self, stream: u32, entry: &Arc<Sequenced>) {
        let at = &mut self.merged[stream as usize];
        *at += 1;
        let place = Place { index: Index(*at), offset: 0, stamp: Timestamp(*at), is_late: false };
        self.merge.insert(PartitionId(stream), place, entry, home, Time(*at));
        self.order.extend(std::iter::from_fn(|| self.merge.pop()).map(|m| m.entry.name()));
        self.merge.assert_invariants();
    }

    fn ran(&self) -> Vec<u64> {
        self.order.iter().map(|name| name.txn.counter).collect()
    }
}

#[test]
fn figure_4_3_a_running_example() {
    let (t1, t2) = (txn(1, &[], &["0a", "1b"]), txn(2, &[], &["2c"]));
    let t3 = txn(3, &[], &["0a", "1b", "2c"]);
    let mut merging = Merging::new();
    merging.insert(0, &t1);
    merging.insert(0, &t3);
    assert_eq!(merging.ran(), [0; 0], "its place in the other stream is not known");
    merging.insert(2, &t2);
    assert_eq!(merging.ran(), [2]);
    merging.insert(2, &t3);
    merging.insert(1, &t1);
    assert_eq!(merging.ran(), [2, 1]);
    merging.insert(1, &t3);
    assert_eq!(merging.ran(), [2, 1, 3]);
    assert_eq!(merging.merge.largest(), 1);
}

#[test]
fn figure_4_3_b_cyclic_conflict() {
    let (t1, t2) = (txn(1, &[], &["0a", "1b"]), txn(2, &[], &["0a", "1b"]));
    let t3 = txn(3, &[], &["0a"]);
    let mut orders = Vec::new();
    for first in [0, 1] {
        let mut merging = Merging::new();
        let streams = [vec![&t1, &t2, &t3], vec![&t2, &t1]];
        for stream in [first, 1 - first] {
            for entry in &streams[stream] {
                merging.insert(u32::try_from(stream).unwrap(), entry);
            }
        }
        assert_eq!(merging.merge.largest(), 2);
        assert!(merging.merge.is_empty() && merging.merge.tails.is_empty());
        orders.push(merging.ran());
    }
    assert_eq!(orders[0], orders[1], "whichever stream came first");
    assert_eq!(orders[0][2], 3, "the third goes after the cycle");
}

#[test]
fn figure_4_3_c_reads_intermixed_with_writes() {
    // All but the last wait for the second stream, so the order of running shows the conflicts.
    let t1 = txn(1, &[], &["0a", "1x"]);
    let (t2, t3) = (txn(2, &["0a", "1y"], &[]), txn(3, &["0a", "1z"], &[]));
    let t4 = txn(4, &[], &["0a"]);
    let mut merging = Merging::new();
    for entry in [&t1, &t2, &t3, &t4] {
        merging.insert(0, entry);
    }
    merging.insert(1, &t3);
    assert_eq!(merging.ran(), [0; 0], "it reads what the first writes");
    merging.insert(1, &t1);
    assert_eq!(merging.ran(), [1, 3], "readers do not wait for each other");
    merging.insert(1, &t2);
    assert_eq!(merging.ran(), [1, 3, 2, 4], "a writer waits for both");
}

#[test]
fn a_transaction_that_reads_and_writes_a_key_does_not_wait_for_itself() {
    let entry = txn(1, &["0a"], &["0a"]);
    let mut merging = Merging::new();
    merging.insert(0, &entry);
    assert_eq!(merging.ran(), [1]);
    let mut mistaken = Merge::new(None, true);
    let place = Place { index: Index(1), offset: 0, stamp: Timestamp(1), is_late: false };
    mistaken.insert(PartitionId(0), place, &entry, home, Time(0));
    assert_eq!((mistaken.pop(), mistaken.len()), (None, 1), "S7");
}

/// Random transactions and their streams. Each stream has its own order.
fn draw(rng: &mut Rng) -> Vec<Vec<Arc<Sequenced>>> {
    let keys = 1 + rng.below(3);
    let mut streams = vec![Vec::new(); STREAMS as usize];
    for number in 1..=rng.range(2, 24) {
        let mut names = || -> Vec<String> {
            let key =
                |rng: &mut Rng| format!("{}{}", rng.below(u64::from(STREAMS)), rng.below(keys));
            (0..rng.below(3)).map(|_| key(rng)).collect()
        };
        let (reads, mut writes) = (names(), names());
        writes.push(format!("{}0", number % u64::from(STREAMS)));
        let text =
            |names: &[String]| names.iter().map(String::as_str).collect::<Vec<_>>().join(",");
        let (reads, writes) = (text(&reads), text(&writes));
        let split = |text: &str| -> Vec<String> {
            text.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect()
        };
        let (reads, writes) = (split(&reads), split(&writes));
        let reads: Vec<&str> = reads.iter().map(String::as_str).collect();
        let writes: Vec<&str> = writes.iter().map(String::as_str).collect();
        let entry = txn(number, &reads, &writes);
        for home in &entry.homes {
            let stream: &mut Vec<_> = &mut streams[home.0 as usize];
            // Near the end, as with concurrent transactions.
            let at = stream.len() - usize::try_from(rng.below(4)).unwrap().min(stream.len());
            stream.insert(at, entry.clone());
        }
    }
    streams
}

fn conflict(a: &Sequenced, b: &Sequenced, stream: PartitionId) -> bool {
    let here = |keys: &[Key]| -> OrdSet<Key> {
        keys.iter().filter(|key| home(key) == stream).cloned().collect()
    };
    let (ra, wa) = (here(&a.functor.reads), here(&a.functor.writes));
    let (rb, wb) = (here(&b.functor.reads), here(&b.functor.writes));
    !wa.is_disjoint(&wb) || !wa.is_disjoint(&rb) || !ra.is_disjoint(&wb)
}

/// The definition: all transactions that must have run before or together with each transaction,
/// according to these prefixes, and whether all of them are complete.
fn closure(prefixes: &[&[Arc<Sequenced>]]) -> OrdMap<Name, (OrdSet<Name>, bool)> {
    let mut before: OrdMap<Name, OrdSet<Name>> = OrdMap::new();
    let mut seen: OrdMap<Name, usize> = OrdMap::new();
    let mut homes: OrdMap<Name, usize> = OrdMap::new();
    for (stream, prefix) in (0..).zip(prefixes) {
        for (at, entry) in prefix.iter().enumerate() {
            let txn = entry.name();
            *seen.entry(txn).or_default() += 1;
            homes.insert(txn, entry.homes.len());
            let earlier = prefix[..at].iter();
            let these = earlier.filter(|other| conflict(other, entry, PartitionId(stream)));
            before.entry(txn).or_default().extend(these.map(|other| other.name()));
        }
    }
    let mut all = OrdMap::new();
    for &txn in before.keys() {
        let mut reached = OrdSet::from([txn]);
        let mut work = vec![txn];
        while let Some(next) = work.pop() {
            work.extend(before[&next].iter().filter(|other| reached.insert(**other)));
        }
        let is_closed = reached.iter().all(|txn| seen[txn] == homes[txn]);
        all.insert(txn, (reached, is_closed));
    }
    all
}

/// Any interleaving of the same streams: at any time exactly those transactions have run that may
/// run by the definition, and conflicting transactions run in the same order as in any other
/// interleaving.
#[test]
fn every_interleaving_runs_all_that_may_in_the_same_order() {
    let mut rng = Rng::stream(3, "merge", 0);
    let (mut components, mut largest) = (0, 0);
    for _ in 0..400 {
        let streams = draw(&mut rng);
        let mut orders: Vec<Vec<Name>> = Vec::new();
        for _ in 0..3 {
            let mut merging = Merging::new();
            let total: usize = streams.iter().map(Vec::len).sum();
            for step in 0..total {
                let open: Vec<u32> = (0..STREAMS)
                    .filter(|&s| (merging.merged[s as usize] as usize) < streams[s as usize].len())
                    .collect();
                let stream = *rng.pick(&open).unwrap();
                let at = merging.merged[stream as usize] as usize;
                merging.insert(stream, &streams[stream as usize][at]);
                if step % 5 == 0 || step + 1 == total {
                    let prefixes: Vec<&[Arc<Sequenced>]> = (0..STREAMS as usize)
                        .map(|s| &streams[s][..merging.merged[s] as usize])
                        .collect();
                    let expected: OrdSet<Name> = closure(&prefixes)
                        .into_iter()
                        .filter_map(|(txn, (_, is_closed))| is_closed.then_some(txn))
                        .collect();
                    assert_eq!(merging.order.iter().copied().collect::<OrdSet<_>>(), expected);
                }
                if rng.chance(1, 10) {
                    merging.merge = again(&merging.merge);
                }
            }
            assert!(merging.merge.is_empty() && merging.merge.tails.is_empty());
            assert!(merging.merge.incomplete.is_empty());
            components += usize::from(merging.merge.largest() > 1);
            largest = largest.max(merging.merge.largest());
            orders.push(merging.order);
        }
        let whole: Vec<&[Arc<Sequenced>]> = streams.iter().map(Vec::as_slice).collect();
        let all = closure(&whole);
        let place = |order: &[Name], txn: Name| order.iter().position(|other| *other == txn);
        for (a, (before_a, _)) in &all {
            for b in before_a.iter().filter(|b| *b != a) {
                let goes = |order: &[Name]| place(order, *b) < place(order, *a);
                let first = goes(&orders[0]);
                assert!(orders.iter().all(|order| goes(order) == first), "{a} and {b}");
                let is_cycle = all[b].0.contains(a);
                assert!(first || is_cycle, "{b} goes before {a}, and ran after it");
            }
        }
    }
    assert!(components > 100 && largest > 5, "{components} components, the largest of {largest}");
}

/// The merge that a checkpoint of this one restores (S8).
fn again(merge: &Merge) -> Merge {
    let mut copy = Merge::new(None, false);
    for (stream, place, entry) in merge.pending() {
        copy.insert(stream, place, &entry, home, Time(0));
    }
    assert_eq!(copy.pop(), None, "what could not run cannot run after a restart");
    assert_eq!(copy.pending(), merge.pending());
    copy.largest = merge.largest;
    copy.assert_invariants();
    copy
}

#[test]
fn what_is_missing_where_is_known() {
    let (t1, t2) = (txn(1, &[], &["0a", "1b", "2c"]), txn(2, &[], &["0a"]));
    let mut merging = Merging::new();
    merging.insert(1, &t1);
    assert_eq!(merging.merge.missing(id(1)), Some(vec![PartitionId(0), PartitionId(2)]));
    assert_eq!(merging.merge.missing(id(2)), None);
    merging.insert(0, &t1);
    merging.insert(0, &t2);
    let old: Vec<Name> =
        merging.merge.incomplete_since(Time(9)).map(|entry| entry.name()).collect();
    assert_eq!(old, [id(1)]);
    let key = Key::from("0a");
    assert_eq!(merging.merge.waits_since(PartitionId(0), [&key].into_iter()), Some(Time(1)));
    assert_eq!(merging.merge.waits_since(PartitionId(2), [&Key::from("2x")].into_iter()), None);
    assert_eq!(merging.merge.earliest(PartitionId(0)), Some(Timestamp(1)));
    merging.insert(2, &t1);
    assert_eq!(merging.ran(), [1, 2]);
    assert_eq!(merging.merge.earliest(PartitionId(0)), None);
}

/// Two regions 40 ms apart, each with one hot key that every transaction accesses: the model of S1.
/// Returns the largest component and the time that the slowest transaction took in the first
/// region.
fn contended(per_second: u64, is_bounded: bool) -> (usize, Duration) {
    const WAY: u64 = 40;
    let mut rng = Rng::stream(7, "contended", per_second);
    // Which transaction arrives at which sequencer, by millisecond.
    let mut arrivals: OrdMap<(u64, u64, usize), Arc<Sequenced>> = OrdMap::new();
    let mut began = OrdMap::new();
    let mut number = 0;
    for from in 0..2_usize {
        let mut at = 0;
        while at < 20_000 {
            at += 1 + rng.below(2_000 / per_second);
            number += 1;
            let entry = txn(number, &["0a", "1a"], &["0a", "1a"]);
            began.insert(entry.name(), at);
            for to in 0..2 {
                // Bounded: both regions take it at the time when the farther one has it.
                let way = if from == to && !is_bounded { 0 } else { WAY };
                arrivals.insert((at + way, number, to), entry.clone());
            }
        }
    }
    // What the first region merges, by millisecond.
    let mut merged: OrdMap<(u64, usize, u64), Arc<Sequenced>> = OrdMap::new();
    for (order, ((at, _, to), entry)) in (0..).zip(arrivals) {
        merged.insert((at + if to == 0 { 0 } else { WAY }, to, order), entry);
    }
    let (mut merging, mut slowest, mut ran) = (Merging::new(), 0, 0);
    for ((at, to, _), entry) in merged {
        merging.insert(u32::try_from(to).unwrap(), &entry);
        while ran < merging.order.len() {
            slowest = slowest.max(at - began[&merging.order[ran]]);
            ran += 1;
        }
    }
    assert_eq!(ran as u64, number);
    (merging.merge.largest(), Duration::from_millis(slowest))
}

#[test]
fn the_merge_is_bounded_by_what_sequencers_hold() {
    let (component, slowest) = contended(200, false);
    println!(
        "S1, as the thesis has it: {component} in one component, the slowest took {slowest:?}"
    );
    assert!(component > 1_000 && slowest > Duration::from_secs(5), "{component} {slowest:?}");
    let (component, slowest) = contended(200, true);
    println!("S1, bounded: {component} in one component, the slowest took {slowest:?}");
    assert!(component <= 1 && slowest <= Duration::from_millis(90), "{component} {slowest:?}");
}
