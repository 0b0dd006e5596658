//! What the impure parts cost: the log, the state engine, the codec.

#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "a benchmark")]

use std::hint::black_box;
use std::sync::Arc;

use bytes::BytesMut;
use divan::Bencher;
use divan::counter::{BytesCount, ItemsCount};
use orthodrome_core::store::{StateEngine as _, Store};
use orthodrome_core::txn::{Read, Version, Writes};
use orthodrome_core::wire::{self, Wire as _};
use orthodrome_core::{ClientId, Key, NodeId, PartitionId, Timestamp, TxnId, Value};
use orthodrome_protocols::carousel::Msg;
use orthodrome_server::storage::Identity;
use orthodrome_server::storage::engine::Engine;
use orthodrome_server::storage::log::{Log, Options};

fn main() {
    divan::main();
}

fn me() -> Identity {
    Identity { cluster: "bench".into(), node: NodeId(1) }
}

/// One synced batch of so many records of 200 bytes. The disk decides.
#[divan::bench(args = [1, 10, 100, 1_000], sample_count = 50, sample_size = 4)]
fn log_append_and_sync(bencher: Bencher<'_, '_>, records: usize) {
    let dir = tempfile::tempdir_in(".").unwrap();
    let mut log = Log::create(dir.path(), &me(), Options::default()).unwrap();
    let record = [7; 200];
    bencher.counter(ItemsCount::new(records)).bench_local(|| {
        for _ in 0..records {
            log.add(1, &record).unwrap();
        }
        log.commit().unwrap();
    });
}

fn version(at: u64) -> Version {
    Version { timestamp: Timestamp(at), writer: TxnId::new(ClientId(1), at) }
}

fn key(n: u64) -> Key {
    Key::from(format!("user{n:08}"))
}

/// One key of 100 000, with one version of 100 bytes each.
#[divan::bench]
fn engine_read(bencher: Bencher<'_, '_>) {
    let dir = tempfile::tempdir_in(".").unwrap();
    let engine = Engine::create(&dir.path().join("state.redb"), &me()).unwrap();
    let mut store = Store::new(Box::new(engine.clone()));
    for n in 0..100_000 {
        store.put(PartitionId(0), key(n), version(n + 1), Some(Value::from(vec![7; 100])));
    }
    engine.merge(&store.freeze(), 1).unwrap();
    let mut n = 0_u64;
    bencher.bench_local(|| {
        n = (n + 7_919) % 100_000;
        black_box(engine.read(PartitionId(0), &key(n), Timestamp::MAX))
    });
}

/// A checkpoint of so many keys of 100 bytes, merged into an engine that holds them already.
#[divan::bench(args = [1_000, 10_000], sample_count = 10, sample_size = 1)]
fn engine_merge(bencher: Bencher<'_, '_>, keys: u64) {
    let dir = tempfile::tempdir_in(".").unwrap();
    let engine = Engine::create(&dir.path().join("state.redb"), &me()).unwrap();
    let mut round = 0;
    bencher.counter(ItemsCount::new(keys)).bench_local(|| {
        round += 1;
        let mut store = Store::new(Box::new(engine.clone()));
        for n in 0..keys {
            let value = Value::from(vec![7; 100]);
            store.put(PartitionId(0), key(n), version(round), Some(value));
        }
        store.collect_below(PartitionId(0), Timestamp(round));
        engine.merge(&store.freeze(), round).unwrap();
    });
}

/// A read result of so many keys with values of 100 bytes.
fn read_result(keys: u64) -> Msg {
    let read = |n| {
        let version = version(1_790_000_000_000_000_000 + n);
        (key(n), Read { value: Some(Value::from(vec![7; 100])), version })
    };
    let txn = TxnId::new(ClientId(1_001 << 40), 77);
    Msg::ReadResult { txn, partition: PartitionId(3), reads: (0..keys).map(read).collect() }
}

/// A commit request that writes so many keys with values of 100 bytes.
fn commit(keys: u64) -> Msg {
    let writes: Writes = (0..keys).map(|n| (key(n), Some(Value::from(vec![7; 100])))).collect();
    Msg::Commit {
        txn: TxnId::new(ClientId(1_001 << 40), 77),
        coordinator: PartitionId(0),
        participants: vec![PartitionId(0), PartitionId(3)],
        versions: Arc::new(
            (0..keys).map(|n| (key(n), version(1_790_000_000_000_000_000))).collect(),
        ),
        writes: Arc::new(writes),
    }
}

fn encoded(msg: &Msg) -> BytesMut {
    let mut out = BytesMut::with_capacity(msg.size());
    msg.put(&mut out);
    out
}

#[divan::bench(args = [1, 6, 100])]
fn wire_encode(bencher: Bencher<'_, '_>, keys: u64) {
    let msgs = [read_result(keys), commit(keys)];
    let size: usize = msgs.iter().map(|msg| encoded(msg).len()).sum();
    bencher
        .counter(BytesCount::new(size))
        .bench(|| msgs.iter().map(|m| encoded(m).len()).sum::<usize>());
}

#[divan::bench(args = [1, 6, 100])]
fn wire_decode(bencher: Bencher<'_, '_>, keys: u64) {
    let bytes = [read_result(keys), commit(keys)].map(|msg| encoded(&msg).freeze());
    let size: usize = bytes.iter().map(|bytes| bytes.len()).sum();
    bencher
        .counter(BytesCount::new(size))
        .bench(|| bytes.each_ref().map(|bytes| wire::decode::<Msg>(bytes).unwrap()));
}
