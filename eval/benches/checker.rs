//! Measures how fast the checker reads and judges histories.
//!
//! The histories come from a simulated correct store and a closed loop of overlapping transactions.
//! The checker therefore finds no anomaly and has to look at every operation.
#![allow(missing_docs, reason = "the benchmark macros make items that cannot be documented")]
#![allow(clippy::unwrap_used, reason = "a benchmark that cannot run should say so at once")]

use divan::Bencher;
use divan::counter::{BytesCount, ItemsCount};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::rng::Rng;
use orthodrome_eval::checker::{Model, check};
use orthodrome_eval::history::{Entry, History, Op, Status, Writer};

fn main() {
    divan::main();
}

const SIZES: [u64; 1] = [1_000_000];
const CLIENTS: u64 = 500;

/// Appends to a key before the workload moves to a new key, as in list-append workloads.
const APPENDS_A_KEY: usize = 32;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    /// Two reads of lists, then an append to one or two keys.
    Lists,
    /// Six keys read and written, as in YCSB+T.
    Versions,
}

/// Calls `take` with each attempt of a run of `count` transactions. One in twenty fails, and one in
/// a hundred has an unknown outcome.
fn generate(form: Form, count: u64, mut take: impl FnMut(&Entry)) {
    let mut rng = Rng::stream(1, "bench", 0);
    let mut lists: OrdMap<u64, Vec<u64>> = OrdMap::new();
    let mut versions: OrdMap<u64, String> = OrdMap::new();
    let mut first_key = 0;
    // A transaction takes effect at its number times ten microseconds. It is pending for up to a
    // whole round of clients before and after that moment.
    for number in 1..=count {
        let client = 1 + number % CLIENTS;
        let at = number * 10 + CLIENTS * 10;
        let mut entry = Entry {
            txn: format!("c{client}.{}", 1 + number / CLIENTS),
            process: client,
            region: "VA".into(),
            priority: "low".into(),
            stale: false,
            invoke_us: at - rng.below(CLIENTS * 5),
            complete_us: Some(at + rng.below(CLIENTS * 5)),
            status: match rng.below(100) {
                0..5 => Status::Fail,
                5 => Status::Info,
                _ => Status::Ok,
            },
            ops: Vec::new(),
        };
        let takes_effect = entry.status == Status::Ok || rng.chance(1, 2);
        let takes_effect = takes_effect && entry.status != Status::Fail;
        match form {
            Form::Lists => {
                let mut keys: Vec<u64> = (0..4).map(|_| first_key + rng.below(200)).collect();
                keys.sort_unstable();
                keys.dedup();
                for key in keys.iter().take(2) {
                    let list = lists.get(key).cloned().unwrap_or_default();
                    entry.ops.push(Op::ReadList(format!("k{key}"), list));
                }
                for key in keys.iter().skip(2) {
                    entry.ops.push(Op::Append(format!("k{key}"), number));
                    if takes_effect {
                        let list = lists.entry(*key).or_default();
                        list.push(number);
                        if list.len() > APPENDS_A_KEY {
                            first_key += 1;
                        }
                    }
                }
            }
            Form::Versions => {
                let keys = (0..6)
                    .map(|_| rng.below(1_000_000))
                    .collect::<orthodrome_core::ordered::OrdSet<_>>();
                for key in &keys {
                    let version = versions.get(key).cloned().unwrap_or_else(|| "c0.0@0".into());
                    entry.ops.push(Op::ReadVersion(format!("user{key}"), version));
                }
                for key in keys {
                    let version = format!("{}@{}", entry.txn, at * 1_000);
                    let known = (entry.status == Status::Ok).then(|| version.clone());
                    entry.ops.push(Op::WriteVersion(format!("user{key}"), known));
                    if takes_effect {
                        versions.insert(key, version);
                    }
                }
            }
        }
        take(&entry);
    }
}

fn compact(form: Form, count: u64) -> History {
    let mut history = History::new();
    generate(form, count, |entry| history.push(entry).unwrap());
    history
}

fn json(form: Form, count: u64) -> Vec<u8> {
    let mut writer = Writer::new(Vec::new());
    generate(form, count, |entry| writer.write(entry).unwrap());
    writer.finish().unwrap()
}

fn bench_check(bencher: Bencher<'_, '_>, form: Form, count: u64) {
    let history = compact(form, count);
    bencher.counter(ItemsCount::new(count)).bench_local(|| {
        let verdict = check(&history, Model::StrictSerializable);
        assert!(verdict.ok, "{verdict}");
    });
}

fn bench_read(bencher: Bencher<'_, '_>, form: Form, count: u64) {
    let text = json(form, count);
    bencher
        .counter(ItemsCount::new(count))
        .counter(BytesCount::new(text.len()))
        .bench_local(|| History::read(text.as_slice()).unwrap());
}

fn bench_all(bencher: Bencher<'_, '_>, form: Form, count: u64) {
    let text = json(form, count);
    bencher.counter(ItemsCount::new(count)).bench_local(|| {
        let history = History::read(text.as_slice()).unwrap();
        let verdict = check(&history, Model::StrictSerializable);
        assert!(verdict.ok, "{verdict}");
    });
}

#[divan::bench(args = SIZES, sample_count = 3, sample_size = 1)]
fn lists_check(bencher: Bencher<'_, '_>, count: u64) {
    bench_check(bencher, Form::Lists, count);
}

/// One read in a thousand is stale. Most transactions then lie on some cycle, and the search for
/// cycles to show must still end soon.
#[divan::bench(args = SIZES, sample_count = 1, sample_size = 1)]
fn broken_lists_check(bencher: Bencher<'_, '_>, count: u64) {
    let mut history = History::new();
    let mut rng = Rng::stream(1, "stale", 0);
    generate(Form::Lists, count, |entry| {
        let mut entry = entry.clone();
        for op in &mut entry.ops {
            if let Op::ReadList(_, list) = op
                && rng.chance(1, 1_000)
            {
                list.truncate(list.len() / 2);
            }
        }
        history.push(&entry).unwrap();
    });
    bencher.counter(ItemsCount::new(count)).bench_local(|| {
        let verdict = check(&history, Model::StrictSerializable);
        assert!(!verdict.ok);
    });
}

#[divan::bench(args = SIZES, sample_count = 3, sample_size = 1)]
fn lists_read(bencher: Bencher<'_, '_>, count: u64) {
    bench_read(bencher, Form::Lists, count);
}

#[divan::bench(args = SIZES, sample_count = 3, sample_size = 1)]
fn lists_read_and_check(bencher: Bencher<'_, '_>, count: u64) {
    bench_all(bencher, Form::Lists, count);
}

#[divan::bench(args = SIZES, sample_count = 3, sample_size = 1)]
fn versions_check(bencher: Bencher<'_, '_>, count: u64) {
    bench_check(bencher, Form::Versions, count);
}

#[divan::bench(args = SIZES, sample_count = 3, sample_size = 1)]
fn versions_read(bencher: Bencher<'_, '_>, count: u64) {
    bench_read(bencher, Form::Versions, count);
}

#[divan::bench(args = SIZES, sample_count = 3, sample_size = 1)]
fn versions_read_and_check(bencher: Bencher<'_, '_>, count: u64) {
    bench_all(bencher, Form::Versions, count);
}
