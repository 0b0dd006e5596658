//! Storage against crashes and damage.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use bytes::Bytes;
use orthodrome_core::cluster::{Cluster, Node, Partition, Role};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::scan::KeyRange;
use orthodrome_core::store::{MemoryEngine, Memtable, StateEngine, Store, Versions};
use orthodrome_core::topology::Topology;
use orthodrome_core::txn::Version;
use orthodrome_core::{
    ClientId, Key, NodeId, PartitionId, RegionId, Ticket, Timestamp, TxnId, Value,
};
use proptest::prelude::*;

use super::directory::{Ceilings, Directory, Values};
use super::engine::Engine;
use super::log::{BATCH_HEAD, HEADER, Hook, Log, Options, Record};
use super::*;

fn me() -> Identity {
    Identity { cluster: "test".into(), node: NodeId(1) }
}

/// Tests that write thousands of logs skip syncs: they only test what is read back.
fn unsynced() -> Options {
    Options { sync: false, ..Options::default() }
}

fn record(text: &str) -> Record {
    Record { tag: 1, bytes: Bytes::copy_from_slice(text.as_bytes()) }
}

fn texts(records: &[Record]) -> Vec<String> {
    records.iter().map(|record| String::from_utf8(record.bytes.to_vec()).unwrap()).collect()
}

/// A log of `batches`, each of which is one sync; the path of its only segment.
fn write(dir: &Path, batches: &[&[&str]]) -> PathBuf {
    let mut log = Log::create(dir, &me(), unsynced()).unwrap();
    for batch in batches {
        for text in *batch {
            log.add(1, text.as_bytes()).unwrap();
        }
        log.commit().unwrap();
    }
    dir.join("0000000000000001.log")
}

fn read(dir: &Path) -> Result<Vec<String>, StorageError> {
    Log::open(dir, &me(), unsynced()).map(|(_, found)| texts(&found.records))
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
    }
}

#[test]
fn a_log_gives_back_what_was_put_in() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &[&["a", ""], &["b"], &["c", "d"]]);
    let (mut log, found) = Log::open(dir.path(), &me(), Options::default()).unwrap();
    assert_eq!(texts(&found.records), ["a", "", "b", "c", "d"]);
    assert!(found.torn.is_none());
    log.add(1, b"e").unwrap();
    log.commit().unwrap();
    assert_eq!(read(dir.path()).unwrap(), ["a", "", "b", "c", "d", "e"]);
}

#[test]
fn a_log_cut_at_any_byte_of_its_last_batch_loses_that_batch_alone_and_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let segment = write(dir.path(), &[&["first"], &["second"], &["third", "fourth"]]);
    let whole = fs::read(&segment).unwrap();
    let last = BATCH_HEAD + 2 * 5 + "thirdfourth".len();
    for cut in whole.len() - last..=whole.len() {
        fs::write(&segment, &whole[..cut]).unwrap();
        let (mut log, found) = Log::open(dir.path(), &me(), unsynced()).unwrap();
        let is_whole = cut == whole.len();
        let expected: &[&str] =
            if is_whole { &["first", "second", "third", "fourth"] } else { &["first", "second"] };
        assert_eq!(texts(&found.records), expected, "cut at {cut}");
        assert_eq!(found.torn.is_some(), !is_whole && cut != whole.len() - last, "cut at {cut}");
        log.add(1, b"after").unwrap();
        log.commit().unwrap();
        drop(log);
        let again = read(dir.path()).unwrap();
        assert_eq!(again.last().unwrap(), "after");
        assert_eq!(again.len(), expected.len() + 1, "cut at {cut}");
    }
}

#[test]
fn a_tail_of_zeros_is_cut_off() {
    let dir = tempfile::tempdir().unwrap();
    let segment = write(dir.path(), &[&["first"], &["second"]]);
    let whole = fs::read(&segment).unwrap();
    for zeros in [1, 31, 32, 4096] {
        let mut bytes = whole.clone();
        bytes.resize(whole.len() + zeros, 0);
        fs::write(&segment, &bytes).unwrap();
        assert_eq!(read(dir.path()).unwrap(), ["first", "second"], "{zeros} zeros");
    }
}

#[test]
fn any_flipped_bit_is_refused_or_cuts_off_the_last_batch() {
    let dir = tempfile::tempdir().unwrap();
    let segment = write(dir.path(), &[&["first"], &["second", "x"], &["third"]]);
    let whole = fs::read(&segment).unwrap();
    let last = whole.len() - (BATCH_HEAD + 5 + "third".len());
    let (mut refused, mut torn) = (0, 0);
    for bit in 0..whole.len() * 8 {
        let mut bytes = whole.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        fs::write(&segment, &bytes).unwrap();
        match read(dir.path()) {
            Err(StorageError::Corrupt { path, offset, .. }) => {
                assert!(bit / 8 < last, "bit {bit} of the last batch is a torn tail");
                assert_eq!(path, segment);
                let expected = if bit / 8 < HEADER { 0 } else { offset };
                assert_eq!(offset, expected);
                assert!(offset as usize <= bit / 8, "offset {offset} for byte {}", bit / 8);
                refused += 1;
            }
            Ok(found) => {
                assert!(bit / 8 >= last, "bit {bit}: silently read as {found:?}");
                assert_eq!(found, ["first", "second", "x"]);
                torn += 1;
            }
            Err(other) => panic!("bit {bit}: {other}"),
        }
    }
    assert_eq!((refused, torn), (last * 8, (whole.len() - last) * 8));
}

#[test]
fn what_is_known_to_be_durable_is_never_cut_off() {
    let dir = tempfile::tempdir().unwrap();
    let segment = write(dir.path(), &[&["first"], &["second"]]);
    let whole = fs::read(&segment).unwrap();
    let (log, _) = Log::open(dir.path(), &me(), unsynced()).unwrap();
    let durable = log.end();
    drop(log);
    for bit in (whole.len() - 38) * 8..whole.len() * 8 {
        let mut bytes = whole.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        fs::write(&segment, &bytes).unwrap();
        let error = Log::open(dir.path(), &me(), Options { durable, ..unsynced() }).unwrap_err();
        assert!(matches!(error, StorageError::Corrupt { .. }), "bit {bit}: {error}");
    }
}

#[test]
fn logs_of_others_and_misplaced_files_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let segment = write(dir.path(), &[&["first"]]);
    for other in [
        Identity { cluster: "other".into(), node: NodeId(1) },
        Identity { cluster: "test".into(), node: NodeId(2) },
    ] {
        let error = Log::open(dir.path(), &other, unsynced()).unwrap_err();
        assert!(matches!(error, StorageError::WrongIdentity { .. }), "{error}");
        assert!(error.to_string().contains("n1 of cluster \"test\""), "{error}");
    }
    fs::rename(&segment, dir.path().join("0000000000000002.log")).unwrap();
    assert!(matches!(read(dir.path()), Err(StorageError::Missing { .. })));
    fs::copy(dir.path().join("0000000000000002.log"), &segment).unwrap();
    assert!(matches!(read(dir.path()), Err(StorageError::Corrupt { .. })));
    fs::remove_file(dir.path().join("0000000000000002.log")).unwrap();
    assert_eq!(read(dir.path()).unwrap(), ["first"]);
    fs::write(dir.path().join("notes.txt"), "hello").unwrap();
    assert!(matches!(read(dir.path()), Err(StorageError::Foreign { .. })));
}

/// Three segments and a checkpoint before them.
fn segmented(dir: &Path) {
    let mut log = Log::create(dir, &me(), unsynced()).unwrap();
    for text in ["a", "b"] {
        log.add(1, text.as_bytes()).unwrap();
        log.commit().unwrap();
    }
    let number = log.rotate().unwrap();
    log.checkpoint(number, log.sequence(), &[record("ab")]).unwrap();
    for text in ["c", "d", "e"] {
        log.add(1, text.as_bytes()).unwrap();
        log.commit().unwrap();
        if text != "e" {
            log.rotate().unwrap();
        }
    }
}

#[test]
fn a_missing_or_cut_file_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    segmented(dir.path());
    assert_eq!(read(dir.path()).unwrap(), ["ab", "c", "d", "e"]);
    let mut names: Vec<PathBuf> =
        fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    names.sort();
    assert_eq!(names.len(), 4, "{names:?}");
    for path in names {
        let bytes = fs::read(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let error = read(dir.path()).unwrap_err();
        assert!(matches!(error, StorageError::Missing { .. }), "without {path:?}: {error}");
        // Only the last segment may be cut, and only behind its header.
        let is_last = path.ends_with("0000000000000004.log");
        for cut in 0..bytes.len() {
            fs::write(&path, &bytes[..cut]).unwrap();
            let result = read(dir.path());
            if is_last && cut >= HEADER {
                assert_eq!(result.unwrap(), ["ab", "c", "d"], "{path:?} cut at {cut}");
            } else {
                let error = result.unwrap_err();
                assert!(
                    matches!(error, StorageError::Corrupt { .. }),
                    "{path:?} at {cut}: {error}"
                );
            }
        }
        fs::write(&path, &bytes).unwrap();
    }
    assert_eq!(read(dir.path()).unwrap(), ["ab", "c", "d", "e"]);
}

#[test]
fn an_old_segment_put_back_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let segment = write(dir.path(), &[&["a"]]);
    let old = fs::read(&segment).unwrap();
    let (mut log, _) = Log::open(dir.path(), &me(), unsynced()).unwrap();
    log.add(1, b"b").unwrap();
    log.commit().unwrap();
    log.rotate().unwrap();
    log.add(1, b"c").unwrap();
    log.commit().unwrap();
    drop(log);
    fs::write(&segment, old).unwrap();
    assert!(matches!(read(dir.path()), Err(StorageError::Corrupt { .. })));
}

/// Copies the directory at every step of a rotation and a checkpoint, and recovers each copy.
#[test]
fn a_crash_at_any_step_of_a_checkpoint_leaves_the_old_log_or_the_new_one() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("live");
    fs::create_dir(&dir).unwrap();
    let steps = Arc::new(Mutex::new(Vec::new()));
    let (from, seen, copies) = (dir.clone(), steps.clone(), root.path().to_owned());
    let hook: Hook = Box::new(move |name| {
        let mut seen = seen.lock().unwrap();
        copy(&from, &copies.join(format!("step{}", seen.len())));
        seen.push(name);
        Ok(())
    });
    let mut log = Log::create(&dir, &me(), Options { hook: Some(hook), ..unsynced() }).unwrap();
    log.add(1, b"a").unwrap();
    log.add(1, b"b").unwrap();
    log.commit().unwrap();
    let begin = steps.lock().unwrap().len();
    let number = log.rotate().unwrap();
    let first = log.sequence();
    log.add(1, b"c").unwrap();
    log.commit().unwrap();
    let written = steps.lock().unwrap().len();
    log.checkpoint(number, first, &[record("ab")]).unwrap();
    let steps = steps.lock().unwrap().clone();
    let mut outcomes = OrdSet::new();
    for (at, step) in steps.iter().enumerate().skip(begin) {
        let found = read(&root.path().join(format!("step{at}"))).unwrap();
        // "c" was reported durable when its commit returned.
        let old: &[&str] = if at < written { &["a", "b"] } else { &["a", "b", "c"] };
        let is_old = found == old || (at < written && found == ["a", "b", "c"]);
        let is_new = found == ["ab", "c"];
        assert!(is_old || (is_new && at >= written), "at {step} ({at}): {found:?}");
        outcomes.insert(is_new);
        // The recovered log can be appended to and recovered again.
        let copy = root.path().join(format!("step{at}"));
        let (mut log, _) = Log::open(&copy, &me(), unsynced()).unwrap();
        log.add(1, b"z").unwrap();
        log.commit().unwrap();
        drop(log);
        assert_eq!(read(&copy).unwrap(), [found.as_slice(), &["z".to_owned()]].concat());
    }
    assert_eq!(outcomes.len(), 2, "both ends were seen: {steps:?}");
    assert_eq!(read(&dir).unwrap(), ["ab", "c"]);
}

#[test]
fn a_failed_write_or_sync_is_final() {
    for failing in ["write batch", "sync batch", "write draft", "rename draft", "sync directory"] {
        let dir = tempfile::tempdir().unwrap();
        let armed = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let is_armed = armed.clone();
        let hook: Hook = Box::new(move |name| {
            if name == failing && is_armed.load(std::sync::atomic::Ordering::Relaxed) {
                return Err(io::Error::from(io::ErrorKind::StorageFull));
            }
            Ok(())
        });
        let options = Options { hook: Some(hook), ..Options::default() };
        let mut log = Log::create(dir.path(), &me(), options).unwrap();
        log.add(1, b"kept").unwrap();
        log.commit().unwrap();
        armed.store(true, std::sync::atomic::Ordering::Relaxed);
        let is_batch = failing.ends_with("batch");
        let error = if is_batch {
            log.add(1, b"lost").unwrap();
            log.commit().unwrap_err()
        } else {
            log.rotate().unwrap_err()
        };
        assert!(error.to_string().contains(failing.split(' ').next().unwrap()), "{error}");
        armed.store(false, std::sync::atomic::Ordering::Relaxed);
        if is_batch {
            assert!(matches!(log.commit(), Err(StorageError::Broken)), "{failing} was retried");
        } else {
            log.add(1, b"lost").unwrap();
            assert!(matches!(log.commit(), Err(StorageError::Broken)), "{failing} was retried");
        }
        drop(log);
        let found = read(dir.path()).unwrap();
        assert_eq!(found[0], "kept", "{failing}");
        assert!(found.len() == 1 || (failing == "sync batch" && found[1] == "lost"), "{found:?}");
    }
}

#[test]
fn the_data_directory_is_held_by_one_and_kept_for_one() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("data");
    let mut first = Directory::open(&dir, &me(), "toy", Expected::Either).unwrap();
    first.finish().unwrap();
    let error = Directory::open(&dir, &me(), "toy", Expected::Either).unwrap_err();
    let process = format!("process {}", std::process::id());
    assert!(error.to_string().contains(&process), "{error}");
    drop(first);
    let other = Identity { node: NodeId(2), ..me() };
    let error = Directory::open(&dir, &other, "toy", Expected::Either).unwrap_err();
    assert!(matches!(error, StorageError::WrongIdentity { .. }), "{error}");
    let error = Directory::open(&dir, &me(), "another", Expected::Either).unwrap_err();
    assert!(matches!(error, StorageError::WrongProtocol { .. }), "{error}");
    Directory::open(&dir, &me(), "toy", Expected::Either).unwrap();

    let foreign = root.path().join("foreign");
    fs::create_dir(&foreign).unwrap();
    fs::write(foreign.join("thesis.tex"), "precious").unwrap();
    let error = Directory::open(&foreign, &me(), "toy", Expected::Either).unwrap_err();
    assert!(matches!(error, StorageError::NotOurs { .. }), "{error}");
    assert_eq!(fs::read_dir(&foreign).unwrap().count(), 1, "a foreign directory was written to");
}

#[test]
fn a_replacement_stays_one_at_every_start() {
    let root = tempfile::tempdir().unwrap();
    let begins_as = |name: &str, expected| {
        let dir = root.path().join(name);
        let open = |expected| Directory::open(&dir, &me(), "toy", expected).unwrap();
        let mut first = open(expected);
        let is_replacement = first.is_replacement();
        first.finish().unwrap();
        drop(first);
        let mut second = open(Expected::Data);
        // As for a directory of an earlier version.
        second.finish().unwrap();
        let later = second.is_replacement();
        drop(second);
        [is_replacement, later, open(Expected::Data).is_replacement()]
    };
    assert_eq!(begins_as("lost", Expected::Replacement), [true; 3]);
    assert_eq!(begins_as("new", Expected::NewCluster), [false; 3]);
}

#[test]
fn an_empty_directory_is_taken_only_by_whom_nobody_counts_on() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("data");
    let open = |expected| Directory::open(&dir, &me(), "toy", expected);
    let error = open(Expected::Data).unwrap_err();
    assert!(matches!(error, StorageError::Empty { .. }), "{error}");
    assert!(!dir.exists(), "it was refused and made");

    // Made for a new cluster: once, and again if that was cut short.
    Directory::mark_new(&dir).unwrap();
    drop(open(Expected::Data).unwrap());
    open(Expected::Data).unwrap().finish().unwrap();
    open(Expected::Data).unwrap();
    for expected in [Expected::NewCluster, Expected::Replacement] {
        let error = open(expected).unwrap_err();
        assert!(matches!(error, StorageError::NotEmpty { .. }), "{error}");
    }

    let error = Directory::mark_unused(&dir, me().node).unwrap_err();
    assert!(matches!(error, StorageError::NotEmpty { .. }), "{error}");

    // Lost: the mark is gone too, whether anything else is left or not.
    fs::remove_file(dir.join("identity.toml")).unwrap();
    let error = open(Expected::Data).unwrap_err();
    assert!(matches!(error, StorageError::Empty { .. }), "{error}");
    fs::remove_dir_all(&dir).unwrap();
    let error = open(Expected::Data).unwrap_err();
    assert!(matches!(error, StorageError::Empty { .. }), "{error}");
    for expected in [Expected::NewCluster, Expected::Replacement] {
        open(expected).unwrap();
        fs::remove_dir_all(&dir).unwrap();
    }
    Directory::mark_unused(&dir, me().node).unwrap();
    open(Expected::Data).unwrap();
    let foreign = root.path().join("foreign");
    fs::create_dir(&foreign).unwrap();
    fs::write(foreign.join("letter"), "").unwrap();
    let error = Directory::mark_unused(&foreign, me().node).unwrap_err();
    assert!(matches!(error, StorageError::NotOurs { .. }), "{error}");
}

#[test]
fn a_new_directory_gives_no_client_number_of_a_lost_one() {
    let at = tempfile::tempdir().unwrap();
    let first = |name: &str| {
        let (_, recovered) = Storage::open(settings(&at.path().join(name))).unwrap();
        recovered.values.clients
    };
    let lost = first("lost");
    // One second later, at the earliest, its clients have used fewer numbers than that second has.
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    assert!(lost >= (now.as_secs() - 60) << 8, "{lost}");
    assert!(first("new") >= lost);
}

/// A number that is given twice would make a new transaction pass for an old one of its name.
#[test]
fn an_older_copy_of_a_directory_gives_no_client_number_again() {
    let at = tempfile::tempdir().unwrap();
    let dir = at.path().join("data");
    let first = || Storage::open(settings(&dir)).unwrap().1.values.clients;
    let made = first();
    let file = dir.join("ceilings");
    let mut ceilings = Ceilings::open(&file, &me(), true).unwrap();
    let values = ceilings.values();
    // As it was long ago.
    ceilings.write(Values { clients: 5, ..values }).unwrap();
    ceilings.write(Values { clients: 5, ..values }).unwrap();
    drop(ceilings);
    assert!(first() >= made);
    // A clock that was set back gives none again either.
    let mut ceilings = Ceilings::open(&file, &me(), true).unwrap();
    let later = Values { clients: made + (1 << 30), ..ceilings.values() };
    ceilings.write(later).unwrap();
    drop(ceilings);
    assert_eq!(first(), later.clients);
}

#[test]
fn ceilings_survive_any_damage_to_one_copy() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ceilings");
    let values =
        Values { incarnation: 3, clients: 8192, clock: Timestamp(77), ..Values::default() };
    let mut ceilings = Ceilings::create(&path, &me(), true).unwrap();
    ceilings.write(values).unwrap();
    drop(ceilings);
    let whole = fs::read(&path).unwrap();
    for bit in 0..whole.len() * 8 {
        if (256 * 8..8192 * 8).contains(&bit) {
            continue; // Nothing is written between the copies.
        }
        let mut bytes = whole.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        fs::write(&path, &bytes).unwrap();
        assert_eq!(Ceilings::open(&path, &me(), true).unwrap().values(), values, "bit {bit}");
    }
    fs::write(&path, vec![0; whole.len()]).unwrap();
    assert!(matches!(Ceilings::open(&path, &me(), true), Err(StorageError::Corrupt { .. })));
    fs::write(&path, &whole).unwrap();
    let other = Identity { cluster: "other".into(), ..me() };
    assert!(matches!(Ceilings::open(&path, &other, true), Err(StorageError::WrongIdentity { .. })));
}

fn version(at: u64) -> Version {
    Version { timestamp: Timestamp(at), writer: TxnId::new(ClientId(1), at) }
}

#[test]
fn a_flipped_bit_anywhere_in_the_engine_is_never_read_as_data() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state.redb");
    let engine = Engine::create(&path, &me()).unwrap();
    let mut store = Store::new(Box::new(engine.clone()));
    let key = |n: u64| Key::from(format!("key{n:03}"));
    for n in 0..200 {
        store.put(PartitionId(1), key(n), version(n + 1), Some(Value::from("value")));
    }
    engine.merge(&store.freeze(), 1).unwrap();
    drop(store);
    let expected = engine.scan(PartitionId(1), None, 1_000);
    assert_eq!(expected.len(), 200);
    drop(engine);
    let whole = fs::read(&path).unwrap();
    let damaged = dir.path().join("damaged.redb");
    let (mut refused, mut same) = (0, 0);
    for page in 0..whole.len() / 4096 {
        // One bit in each page, at a different place in each.
        let bit = page * 4096 * 8 + (page * 7919) % (4096 * 8);
        let mut bytes = whole.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        fs::write(&damaged, &bytes).unwrap();
        let opened = std::panic::catch_unwind(|| Engine::open(&damaged, &me(), true));
        match opened {
            Ok(Ok((engine, _))) => {
                assert_eq!(engine.scan(PartitionId(1), None, 1_000), expected, "bit {bit}");
                same += 1;
            }
            Ok(Err(_)) | Err(_) => refused += 1,
        }
    }
    assert!(same > 0, "unused pages do no harm; {refused} refused");
}

/// An operation on an engine.
#[derive(Clone, Debug)]
enum Step {
    Put { partition: u32, key: u8, at: u64, is_delete: bool },
    Clear(u32),
    Collect { partition: u32, below: u64 },
    Merge,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (0..3_u32, 0..6_u8, 1..40_u64, any::<bool>())
            .prop_map(|(partition, key, at, is_delete)| Step::Put { partition, key, at, is_delete }),
        1 => (0..3_u32).prop_map(Step::Clear),
        1 => (0..3_u32, 1..40_u64).prop_map(|(partition, below)| Step::Collect { partition, below }),
        2 => Just(Step::Merge),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    /// The durable engine and the one in memory, which `core` tests, agree on every read.
    #[test]
    fn the_engine_agrees_with_the_one_in_memory(steps in prop::collection::vec(step(), 1..60)) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.redb");
        let (mut engine, model) = (Engine::create(&path, &me()).unwrap(), MemoryEngine::default());
        let mut store = Store::new(Box::new(model.clone()));
        let mut number = 0;
        for step in steps {
            match step {
                Step::Put { partition, key, at, is_delete } => {
                    let value = (!is_delete).then(|| Value::from(format!("v{at}")));
                    store.put(PartitionId(partition), Key::from(vec![key]), version(at), value);
                }
                Step::Clear(partition) => store.clear(PartitionId(partition)),
                Step::Collect { partition, below } => {
                    store.collect_below(PartitionId(partition), Timestamp(below));
                }
                Step::Merge => {
                    let frozen: Arc<Memtable> = store.freeze();
                    number += 1;
                    engine.merge(&frozen, number).unwrap();
                    model.merge(&frozen);
                    store.thaw();
                }
            }
        }
        for round in 0..2 {
            for partition in (0..3).map(PartitionId) {
                for key in (0..6).map(|key| Key::from(vec![key])) {
                    prop_assert_eq!(
                        engine.versions(partition, &key), model.versions(partition, &key),
                        "{} {} in round {}", partition, key, round
                    );
                    for at in [0, 1, 7, 20, 39, u64::MAX].map(Timestamp) {
                        prop_assert_eq!(
                            engine.read(partition, &key, at), model.read(partition, &key, at),
                            "{} {} {} in round {}", partition, key, at, round
                        );
                    }
                }
                prop_assert_eq!(engine.extent(partition), model.extent(partition));
                for (from, until, after) in [(0, 6, 0), (2, 4, 7), (1, 6, 20), (3, 3, 0)] {
                    let (from, until) = (Key::from(vec![from]), Some(Key::from(vec![until])));
                    let range = KeyRange { from, until };
                    let changed = |engine: &dyn StateEngine| {
                        let changed = engine.changed(partition, &range, Timestamp(after)).unwrap();
                        let flat = |(key, versions): (Key, Versions)| {
                            versions.into_iter().map(move |versioned| (key.clone(), versioned))
                        };
                        changed.into_iter().flat_map(flat).collect::<Vec<_>>()
                    };
                    prop_assert_eq!(changed(&engine), changed(&model));
                }
                for (after, limit) in [(None, 100), (None, 2), (Some(Key::from(vec![2])), 3)] {
                    prop_assert_eq!(
                        engine.scan(partition, after.as_ref(), limit),
                        model.scan(partition, after.as_ref(), limit)
                    );
                }
            }
            drop(engine);
            let at;
            (engine, at) = Engine::open(&path, &me(), true).unwrap();
            prop_assert_eq!(at, number);
        }
    }

    /// For any appends, checkpoints and crashes, recovery returns the same records as a list in
    /// memory.
    #[test]
    fn a_log_agrees_with_a_list(
        steps in prop::collection::vec((0..6_u8, prop::collection::vec(any::<u8>(), 0..40)), 1..40),
        segment_bytes in 200..2_000_u64,
    ) {
        let dir = tempfile::tempdir().unwrap();
        let options = || Options { segment_bytes, ..unsynced() };
        let mut log = Log::create(dir.path(), &me(), options()).unwrap();
        let (mut durable, mut open): (Vec<Vec<u8>>, Vec<Vec<u8>>) = Default::default();
        for (kind, bytes) in steps {
            match kind {
                0..=2 => {
                    log.add(7, &bytes).unwrap();
                    open.push(bytes);
                }
                3 => {
                    log.commit().unwrap();
                    durable.append(&mut open);
                }
                4 => {
                    log.commit().unwrap();
                    durable.append(&mut open);
                    let number = log.rotate().unwrap();
                    durable = vec![bytes.clone(), vec![]];
                    let records: Vec<Record> =
                        durable.iter().map(|b| Record { tag: 7, bytes: b.clone().into() }).collect();
                    log.checkpoint(number, log.sequence(), &records).unwrap();
                }
                _ => {
                    open.clear();
                    drop(log);
                    let found;
                    (log, found) = Log::open(dir.path(), &me(), options()).unwrap();
                    let found: Vec<Vec<u8>> =
                        found.records.iter().map(|record| record.bytes.to_vec()).collect();
                    prop_assert_eq!(&found, &durable);
                }
            }
        }
    }
}

/// The placement of two partitions on three servers.
fn placement(replicas: u32, epoch: u64) -> Placement {
    let topology = Topology::built_in("local3").unwrap();
    let mut cluster = Cluster::spread(topology, 1, 1, 2, replicas).unwrap();
    cluster.epoch = epoch;
    Placement::of(&cluster, "toy")
}

#[test]
fn data_is_not_opened_with_another_placement() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("data");
    let open = |placement, may_move| {
        let settings = Settings { placement: (placement, may_move), ..settings(&dir) };
        Storage::open(settings).map(drop).map_err(|error| error.to_string())
    };
    open(placement(3, 1), false).unwrap();
    open(placement(3, 1), false).unwrap();
    let error = open(placement(1, 1), false).unwrap_err();
    assert!(error.contains("p0 on n1 n2 n3") && error.contains("p0 on n1;"), "{error}");
    // Only data that knows the members of its partitions may have others in its file.
    open(placement(1, 2), false).unwrap_err();
    open(placement(1, 1), true).unwrap_err();
    open(placement(1, 2), true).unwrap();
    let error = open(placement(3, 1), true).unwrap_err();
    assert!(error.contains("map_epoch 2") && error.contains("map_epoch 1;"), "{error}");
    open(placement(3, 3), true).unwrap();
    // Its log began on the first servers, however often it has moved since.
    let founders = |placement: Placement| placement.check(&dir, true, true).unwrap();
    assert!(founders(placement(3, 3)).is_empty());
    let first = [PartitionId(0), PartitionId(1)].map(|id| {
        let servers = [NodeId(1), NodeId(2), NodeId(3)];
        (id, servers.to_vec())
    });
    assert_eq!(founders(placement(1, 4)), first.clone().into());
    assert_eq!(founders(placement(1, 5)), first.into());
    assert!(founders(placement(3, 6)).is_empty());
    // A key is in the partition that it was in.
    let topology = Topology::built_in("local3").unwrap();
    let mut cluster = Cluster::spread(topology, 1, 1, 3, 3).unwrap();
    cluster.epoch = 7;
    let error = open(Placement::of(&cluster, "toy"), true).unwrap_err();
    assert!(error.contains("over 2 partitions") && error.contains("over 3"), "{error}");
    // Without the copy nobody knows where the data belongs, unless the directory is of an earlier
    // version, which made none.
    fs::remove_file(dir.join("placement.toml")).unwrap();
    let error = open(placement(3, 1), false).unwrap_err();
    assert!(error.contains("placement.toml is missing"), "{error}");
    let identity = dir.join("identity.toml");
    let text = fs::read_to_string(&identity).unwrap();
    fs::write(&identity, text.replace("format = 3", "format = 2")).unwrap();
    open(placement(3, 1), false).unwrap();
    open(placement(1, 1), false).unwrap_err();
    fs::remove_file(dir.join("placement.toml")).unwrap();
    open(placement(3, 1), false).unwrap_err();
}

/// The default placement of three partitions on three servers, `leaders` apart, of `protocol`.
fn led_by(protocol: &str, leaders: [u32; 3]) -> Placement {
    led_in(1, protocol, leaders)
}

fn led_in(epoch: u64, protocol: &str, leaders: [u32; 3]) -> Placement {
    let topology = Topology::built_in("local3").unwrap();
    let cluster = Cluster::spread(topology.clone(), 1, 1, 3, 3).unwrap();
    let partitions = cluster.partitions().zip(leaders).map(|(partition, leader)| {
        let preferred_leader = NodeId(leader);
        Partition { preferred_leader, ..partition.clone() }
    });
    let keys = cluster.partitioning().clone();
    let nodes = cluster.nodes().copied();
    let cluster = Cluster::new(topology, epoch, nodes, partitions, keys).unwrap();
    Placement::of(&cluster, protocol)
}

#[test]
fn other_leaders_are_refused_where_logs_follow_from_them() {
    let (before, other, same) = ([1, 2, 3], [1, 1, 3], [2, 3, 1]);
    for (protocol, depends) in [
        ("slog", true),
        ("slog-consensus", true),
        ("sloth", true),
        ("calvin", false),
        ("geodesic", false),
    ] {
        for is_older in [false, true] {
            let root = tempfile::tempdir().unwrap();
            let dir = root.path().join("data");
            let open = |placement| {
                let settings = Settings { placement: (placement, true), ..settings(&dir) };
                Storage::open(settings).map(drop).map_err(|error| error.to_string())
            };
            open(led_by(protocol, before)).unwrap();
            if is_older {
                // An earlier version did not store logs. The file is written anew with them.
                let path = dir.join("placement.toml");
                let text = fs::read_to_string(&path).unwrap();
                assert_eq!(text.contains("[logs]"), depends, "{protocol}: {text}");
                fs::write(&path, text.split("[logs]").next().unwrap()).unwrap();
                open(led_by(protocol, before)).unwrap();
                assert_eq!(fs::read_to_string(&path).unwrap(), text, "{protocol}");
            }
            let opened = open(led_by(protocol, other));
            assert_eq!(opened.is_err(), depends, "{protocol}: {opened:?}");
            if let Err(error) = opened {
                let told = ["p1 in the log p1", "p1 in the log p0", "set the preferred leaders"];
                assert!(told.iter().all(|part| error.contains(part)), "{protocol}: {error}");
            }
            // The same logs, each led elsewhere.
            open(led_by(protocol, same)).unwrap();
        }
    }
}

#[test]
fn other_leaders_need_a_new_epoch_where_coordinators_follow_from_them() {
    let (before, other) = ([1, 2, 3], [1, 1, 3]);
    let rows = orthodrome_protocols::registry::rows().map(|row| row.name);
    for protocol in rows.chain(["toy"]) {
        let depends = ["carousel", "natto", "2pl"].iter().any(|of| protocol.starts_with(of));
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("data");
        let open = |placement| {
            let settings = Settings { placement: (placement, true), ..settings(&dir) };
            Storage::open(settings).map(drop).map_err(|error| error.to_string())
        };
        open(led_by(protocol, before)).unwrap();
        let opened = open(led_by(protocol, other));
        let has_logs = protocol.starts_with("slo");
        assert_eq!(opened.is_err(), depends || has_logs, "{protocol}: {opened:?}");
        let Err(error) = opened else { continue };
        if depends {
            let told = ["the preferred leader of p1 in r1", "p1 in r0", "map_epoch"];
            assert!(told.iter().all(|part| error.contains(part)), "{protocol}: {error}");
            open(led_in(9, protocol, other)).unwrap();
            open(led_in(9, protocol, before)).unwrap_err();
        }
    }
}

#[test]
fn other_regions_are_refused_where_shares_follow_from_them() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("data");
    let open = |regions: [u16; 4]| {
        let topology = Topology::uniform(2, Duration::from_micros(100), Duration::from_millis(5));
        let node =
            |(at, region)| Node { id: NodeId(at), region: RegionId(region), role: Role::Server };
        let nodes = (1..).zip(regions).map(node).collect();
        let cluster = Cluster::spread_over(topology, 1, nodes, 1, 3).unwrap();
        let cluster = cluster.divided(2).unwrap();
        let placement = (Placement::of(&cluster, "calvin"), true);
        Storage::open(Settings { placement, ..settings(&dir) }).map(drop)
    };
    open([0, 0, 1, 1]).unwrap();
    let error = open([0, 1, 1, 0]).unwrap_err().to_string();
    assert!(error.contains("share s1 on n2") && error.contains("share s0 on n2"), "{error}");
    open([0, 0, 1, 1]).unwrap();
}

#[test]
fn files_that_are_not_text_are_damaged() {
    for name in ["identity.toml", "placement.toml"] {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("data");
        drop(Storage::open(settings(&dir)).unwrap());
        let path = dir.join(name);
        let mut bytes = fs::read(&path).unwrap();
        bytes[3] ^= 0x80;
        fs::write(&path, bytes).unwrap();
        let error = Storage::open(settings(&dir)).map(drop).unwrap_err();
        assert!(matches!(error, StorageError::Corrupt { .. }), "{name}: {error}");
    }
}

fn settings(dir: &Path) -> Settings {
    Settings {
        data_dir: dir.to_owned(),
        identity: me(),
        protocol: "toy",
        expected: Expected::Either,
        placement: (placement(3, 1), false),
        sync: true,
        segment_bytes: 1 << 20,
        verify: true,
        hook: None,
    }
}

/// Starts a writer; its reports come through the channel.
fn start(dir: &Path) -> (Writer, Recovered, mpsc::Receiver<Report>) {
    let (storage, recovered) = Storage::open(settings(dir)).unwrap();
    let (sender, reports) = mpsc::channel();
    (storage.start(move |report| drop(sender.send(report))).unwrap(), recovered, reports)
}

fn persist(writer: &Writer, tag: Tag, ticket: u64) {
    let record = Bytes::from(format!("{tag:?}{ticket}"));
    writer.submit(Work::Persist { tag, ticket: Ticket(ticket), record });
}

/// Waits until both owners' tickets are durable.
fn wait(reports: &mpsc::Receiver<Report>, server: u64, gateway: u64) {
    let mut last: OrdMap<Tag, u64> = OrdMap::new();
    while last.get(&Tag::Server).copied().unwrap_or(0) < server
        || last.get(&Tag::Gateway).copied().unwrap_or(0) < gateway
    {
        match reports.recv().unwrap() {
            Report::Durable(tag, ticket) => {
                let before = last.insert(tag, ticket.0);
                assert!(before.is_none_or(|before| before < ticket.0), "{tag:?} went back");
            }
            Report::Failed(error) => panic!("{error}"),
        }
    }
}

#[test]
fn a_writer_reports_prefixes_and_recovers_what_it_reported() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("data");
    let (writer, recovered, reports) = start(&dir);
    assert!(recovered.server.is_empty() && recovered.gateway.is_empty());
    assert_eq!(recovered.values.incarnation, 1);
    for ticket in 1..=5 {
        persist(&writer, Tag::Server, ticket);
        persist(&writer, Tag::Gateway, ticket);
    }
    wait(&reports, 5, 5);
    // The server's checkpoint keeps the gateway's records, and the other way round.
    let mut store = Store::new(Box::new(recovered.engine.clone()));
    store.put(PartitionId(1), "k".into(), version(3), Some("v".into()));
    let records = vec![Bytes::from_static(b"server checkpoint")];
    let (ticket, versions) = (Ticket(6), store.freeze());
    writer.submit(Work::Checkpoint { tag: Tag::Server, ticket, versions, records });
    persist(&writer, Tag::Server, 7);
    persist(&writer, Tag::Gateway, 6);
    wait(&reports, 7, 6);
    let records = vec![Bytes::from_static(b"gateway checkpoint"), Bytes::new()];
    let versions = Arc::default();
    let ticket = Ticket(7);
    writer.submit(Work::Checkpoint { tag: Tag::Gateway, ticket, versions, records });
    persist(&writer, Tag::Gateway, 8);
    wait(&reports, 0, 8);
    drop((recovered, store, writer));

    let (writer, recovered, _reports) = start(&dir);
    assert_eq!(recovered.server, ["server checkpoint", "Server7"].map(Bytes::from));
    assert_eq!(recovered.gateway, ["gateway checkpoint", "", "Gateway8"].map(Bytes::from));
    assert_eq!(recovered.values.incarnation, 2);
    let read = recovered.engine.read(PartitionId(1), &"k".into(), Timestamp::MAX);
    assert_eq!(read, Some((version(3), Some("v".into()))));
    writer.stop();
}

#[test]
fn client_ids_are_never_handed_out_twice() {
    let root = tempfile::tempdir().unwrap();
    let mut seen = 0;
    for _ in 0..3 {
        let (writer, _, _reports) = start(&root.path().join("data"));
        for _ in 0..2 {
            let (reply, answer) = tokio::sync::oneshot::channel();
            writer.submit(Work::Clients(reply));
            let (first, end) = answer.blocking_recv().unwrap();
            assert!(first >= seen && end > first);
            seen = end;
        }
    }
}

#[test]
fn processes_on_copies_of_one_directory_give_different_client_ids() {
    let root = tempfile::tempdir().unwrap();
    let [dir, copy] = ["data", "copy"].map(|name| root.path().join(name));
    let reserve = |writer: &Writer| {
        let (reply, answer) = tokio::sync::oneshot::channel();
        writer.submit(Work::Clients(reply));
        answer.blocking_recv().unwrap()
    };
    let (writer, _, _reports) = start(&dir);
    reserve(&writer);
    writer.stop();
    fs::create_dir_all(copy.join("log")).unwrap();
    for name in ["identity.toml", "placement.toml", "ceilings", "state.redb", "log"] {
        let from = dir.join(name);
        if from.is_dir() {
            for file in fs::read_dir(from).unwrap() {
                let file = file.unwrap();
                fs::copy(file.path(), copy.join("log").join(file.file_name())).unwrap();
            }
        } else {
            fs::copy(from, copy.join(name)).unwrap();
        }
    }
    let (first, second) = (start(&dir), start(&copy));
    let (first, second) = (reserve(&first.0), reserve(&second.0));
    // Once in ten thousand runs they overlap.
    assert!(first.1 <= second.0 || second.1 <= first.0, "{first:?} and {second:?}");
}

#[test]
fn an_engine_older_than_its_log_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("data");
    let (writer, recovered, reports) = start(&dir);
    drop(recovered);
    let old = root.path().join("old.redb");
    writer.stop();
    fs::copy(dir.join("state.redb"), &old).unwrap();
    drop(reports);
    let (writer, _, reports) = start(&dir);
    let (versions, records) = (Arc::default(), vec![]);
    let ticket = Ticket(1);
    writer.submit(Work::Checkpoint { tag: Tag::Server, ticket, versions, records });
    wait(&reports, 1, 0);
    writer.stop();
    fs::copy(&old, dir.join("state.redb")).unwrap();
    let error = Storage::open(settings(&dir)).map(|_| ()).unwrap_err();
    assert!(matches!(error, StorageError::EngineBehind { engine: 0, log: 2, .. }), "{error}");
}

#[test]
fn a_panic_of_a_thread_that_writes_is_reported() {
    let root = tempfile::tempdir().unwrap();
    let hook: Hook = Box::new(|name| {
        assert!(name != "sync batch", "an invariant is broken");
        Ok(())
    });
    let settings = Settings { hook: Some(hook), ..settings(&root.path().join("data")) };
    let (storage, _) = Storage::open(settings).unwrap();
    let (sender, reports) = mpsc::channel();
    let writer = storage.start(move |report| drop(sender.send(report))).unwrap();
    persist(&writer, Tag::Server, 1);
    let Report::Failed(error) = reports.recv().unwrap() else { panic!("it is not durable") };
    let text = error.to_string();
    assert!(text.contains(r#"the thread "storage" failed"#), "{text}");
    assert!(text.contains("an invariant is broken"), "{text}");
    assert!(reports.recv().is_err(), "the thread has ended");
    // The thread that merges uses the same guard.
    let merged = super::writer::guard("checkpoint", || -> Result<(), _> { panic!("no more room") });
    let text = merged.unwrap_err().to_string();
    assert!(text.contains(r#"the thread "checkpoint" failed"#) && text.contains("no more room"));
}

#[test]
fn a_seal_that_was_not_synced_is_durable_before_it_is_relied_on() {
    let dir = tempfile::tempdir().unwrap();
    let mut log = Log::create(dir.path(), &me(), Options::default()).unwrap();
    log.add(1, b"a").unwrap();
    log.commit().unwrap();
    drop(log);
    // The process dies when it has written the seal and not synced it.
    let hook: Hook = Box::new(|name| match name {
        "sync batch" => Err(io::Error::from(io::ErrorKind::Interrupted)),
        _ => Ok(()),
    });
    let options = Options { hook: Some(hook), ..Options::default() };
    let (mut log, _) = Log::open(dir.path(), &me(), options).unwrap();
    log.rotate().unwrap_err();
    drop(log);
    let open = |durable| {
        let steps = Arc::new(Mutex::new(Vec::new()));
        let seen = steps.clone();
        let hook: Hook = Box::new(move |name| {
            seen.lock().unwrap().push(name);
            Ok(())
        });
        let options = Options { hook: Some(hook), durable, ..Options::default() };
        let (log, found) = Log::open(dir.path(), &me(), options).unwrap();
        assert_eq!(texts(&found.records), ["a"]);
        let steps = steps.lock().unwrap().clone();
        (log.end(), steps)
    };
    let (end, steps) = open(super::log::Position::default());
    assert_eq!(end.segment, 2);
    assert_eq!(steps, ["settle seal", "settle end"]);
    let (_, steps) = open(end);
    assert_eq!(steps, ["settle end"], "nothing before the second segment is new");
}

#[test]
fn keys_that_an_earlier_version_deleted_are_found() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state.redb");
    let engine = Engine::create(&path, &me()).unwrap();
    let mut store = Store::new(Box::new(engine.clone()));
    store.put(PartitionId(1), "k".into(), version(10), Some("secret".into()));
    store.put(PartitionId(1), "k".into(), version(20), None);
    store.put(PartitionId(1), "l".into(), version(5), Some("v".into()));
    engine.merge(&store.freeze(), 1).unwrap();
    drop((store, engine));
    // An earlier version had no list of deleted keys.
    let database = redb::Database::create(&path).unwrap();
    let write = database.begin_write().unwrap();
    let table = redb::TableDefinition::<&[u8], &[u8]>::new("deleted");
    assert!(write.delete_table(table).unwrap());
    write.commit().unwrap();
    drop(database);
    let (engine, _) = Engine::open(&path, &me(), true).unwrap();
    let mut store = Store::new(Box::new(engine.clone()));
    store.collect_below(PartitionId(1), Timestamp(21));
    engine.merge(&store.freeze(), 2).unwrap();
    let left = engine.scan(PartitionId(1), None, 10);
    assert_eq!(left.into_iter().map(|(key, _)| key).collect::<Vec<_>>(), [Key::from("l")]);
}

#[test]
fn a_disk_that_fails_ends_the_writer_and_is_reported_once() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("data");
    let hook: Hook = {
        let mut syncs = 0;
        Box::new(move |name| {
            syncs += usize::from(name == "sync batch");
            if syncs > 2 { Err(io::Error::from_raw_os_error(5)) } else { Ok(()) }
        })
    };
    let (storage, _) = Storage::open(Settings { hook: Some(hook), ..settings(&dir) }).unwrap();
    let (sender, reports) = mpsc::channel();
    let writer = storage.start(move |report| drop(sender.send(report))).unwrap();
    let mut durable = 0;
    for ticket in 1..=10 {
        persist(&writer, Tag::Server, ticket);
        match reports.recv().unwrap() {
            Report::Durable(_, Ticket(ticket)) => durable = ticket,
            Report::Failed(error) => {
                assert!(error.to_string().contains("Input/output error"), "{error}");
                break;
            }
        }
    }
    assert_eq!(durable, 2);
    persist(&writer, Tag::Server, 11);
    assert!(reports.recv().is_err(), "the thread has ended");
    drop(writer);
    let (_storage, recovered) = Storage::open(settings(&dir)).unwrap();
    assert!(recovered.server.len() >= 2);
}
