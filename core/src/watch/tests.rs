use super::*;
use crate::cluster::Cluster;
use crate::id::{ClientId, TxnId};
use crate::scan::Voters;
use crate::store::{CHANGED_KEYS_MAX, MemoryEngine, StateEngine as _};
use crate::topology::Topology;

const HERE: RegionId = RegionId(0);
const P: PartitionId = PartitionId(0);

fn cluster() -> Cluster {
    let topology = Topology::uniform(3, Duration::from_millis(1), Duration::from_millis(100));
    Cluster::spread(topology, 1, 1, 1, 3).unwrap()
}

fn version(timestamp: u64) -> Version {
    Version { timestamp: Timestamp(timestamp), writer: TxnId::new(ClientId(1), timestamp) }
}

fn change(key: &str, at: u64) -> Change {
    Change { key: key.into(), version: version(at), value: Some("v".into()) }
}

fn answer(watcher: &Watcher, basis: Basis, changes: Vec<Change>, closed: u64) -> Answer {
    kept(watcher, basis, changes, (closed, 0))
}

fn kept(
    watcher: &Watcher,
    basis: Basis,
    changes: Vec<Change>,
    (closed, kept_after): (u64, u64),
) -> Answer {
    let (closed, kept_after) = (Timestamp(closed), Timestamp(kept_after));
    let changes = Some(Changes { changes, closed, kept_after });
    let listing = Some(Listing { names: Vec::new(), has_more: false, basis, changes });
    Answer { unit: Unit::Partition(P), round: watcher.round, listing }
}

fn voter() -> Basis {
    let nodes = vec![NodeId(1), NodeId(2), NodeId(3)];
    Basis::Voter { since: 0, voters: vec![Voters { nodes }] }
}

/// A watch after 10 that has read its fences at 100, and asks.
fn asking() -> Watcher {
    let watched = (KeyRange::default(), Some(Timestamp(10)));
    let (mut watcher, steps) = Watcher::new(&cluster(), false, HERE, watched, Time(0)).unwrap();
    assert!(matches!(&steps[..], [Step::Read(fences)] if fences.iter().all(is_fence)));
    let steps = watcher.on_read(Timestamp(100), Time(1));
    let all =
        |step: &Step| matches!(step, Step::Ask(_, ask) if ask.changes_after == Some(Timestamp(10)));
    assert!(steps.len() == 3 && steps.iter().all(all), "{steps:?}");
    watcher
}

fn batch(steps: &[Step]) -> &Batch {
    let [Step::Batch(batch)] = steps else { panic!("{steps:?}") };
    batch
}

#[test]
fn a_majority_is_complete_up_to_the_least_that_each_vouches_for() {
    let mut watcher = asking();
    let (one, two) =
        (vec![change("a", 20), change("b", 30)], vec![change("c", 25), change("a", 20)]);
    let first = answer(&watcher, voter(), one, 28);
    assert_eq!(watcher.on_answer(NodeId(1), first, Time(2)), []);
    let second = answer(&watcher, voter(), two, 90);
    let steps = watcher.on_answer(NodeId(2), second, Time(2));
    let expected = vec![change("a", 20), change("c", 25)];
    assert_eq!(batch(&steps), &Batch { changes: expected, through: Timestamp(28) });
    // The next round asks for what follows.
    assert_eq!(watcher.deadline(), Some(Time(2) + PAUSE));
    assert!(matches!(&watcher.on_time(Time(2) + PAUSE)[..], [Step::Read(_)]));
    let steps = watcher.on_read(Timestamp(110), Time(3));
    assert!(
        matches!(&steps[..], [Step::Ask(_, ask), ..] if ask.changes_after == Some(Timestamp(28)))
    );
}

/// What none of a majority has agreed to may still commit after the read.
#[test]
fn voters_do_not_vouch_for_what_is_after_the_read() {
    let mut watcher = asking();
    for node in [1, 2] {
        let said = answer(&watcher, voter(), vec![change("a", 150)], 200);
        let steps = watcher.on_answer(NodeId(node), said, Time(2));
        if node == 2 {
            assert_eq!(batch(&steps), &Batch { changes: Vec::new(), through: Timestamp(100) });
        }
    }
}

#[test]
fn a_server_that_answers_alone_vouches_for_all() {
    let mut watcher = asking();
    let said = answer(&watcher, Basis::Complete, vec![change("a", 150)], 200);
    let steps = watcher.on_answer(NodeId(3), said, Time(2));
    assert_eq!(batch(&steps), &Batch { changes: vec![change("a", 150)], through: Timestamp(200) });
}

#[test]
fn nothing_is_returned_while_a_transaction_is_unfinished() {
    let mut watcher = asking();
    let said = answer(&watcher, Basis::Complete, vec![], 10);
    assert_eq!(watcher.on_answer(NodeId(1), said, Time(2)), []);
    assert!(matches!(&watcher.on_time(Time(2) + PAUSE)[..], [Step::Read(_)]));
}

#[test]
fn answers_of_servers_that_have_forgotten_do_not_count() {
    let mut watcher = asking();
    let forgotten = kept(&watcher, voter(), vec![change("a", 50)], (90, 11));
    for node in [1, 2] {
        assert_eq!(watcher.on_answer(NodeId(node), forgotten.clone(), Time(2)), []);
    }
    // Others may know more.
    let later = watcher.again;
    assert_eq!(watcher.on_time(later).len(), 3);
    assert_eq!(watcher.on_answer(NodeId(1), forgotten, later), []);
    let steps = watcher.on_time(watcher.again);
    let error = WatchError::TooOld { after: Timestamp(10), kept_after: Timestamp(11) };
    assert_eq!(steps, [Step::Failed(error)]);
    assert!(error.to_string().contains("then scan the range"), "{error}");
}

#[test]
fn a_watch_from_now_on_begins_where_everything_is_known() {
    let watched = (KeyRange::default(), None);
    let (mut watcher, _) = Watcher::new(&cluster(), false, HERE, watched, Time(0)).unwrap();
    watcher.on_read(Timestamp(100), Time(1));
    let said = answer(&watcher, Basis::Complete, vec![], 40);
    let steps = watcher.on_answer(NodeId(1), said, Time(2));
    assert_eq!(batch(&steps), &Batch { changes: Vec::new(), through: Timestamp(40) });
}

#[test]
fn a_watch_that_should_begin_in_the_far_future_is_refused() {
    let hour = 3_600_000_000_000;
    for (after, is_refused) in [(hour + 90, false), (hour + 110, true)] {
        let watched = (KeyRange::default(), Some(Timestamp(after)));
        let (mut watcher, _) = Watcher::new(&cluster(), false, HERE, watched, Time(0)).unwrap();
        watcher.on_read(Timestamp(100), Time(1));
        let said = answer(&watcher, Basis::Complete, vec![], 40);
        let steps = watcher.on_answer(NodeId(1), said, Time(2));
        let (after, closed) = (Timestamp(after), Timestamp(100));
        let refused = vec![Step::Failed(WatchError::Future { after, closed })];
        assert_eq!(steps, if is_refused { refused } else { Vec::new() });
    }
}

#[test]
fn an_aborted_read_is_repeated_after_a_pause() {
    let watched = (KeyRange::default(), None);
    let (mut watcher, _) = Watcher::new(&cluster(), false, HERE, watched, Time(0)).unwrap();
    assert_eq!(watcher.on_aborted(AbortReason::Conflict, Time(5)), []);
    assert_eq!(watcher.on_time(Time(5)), []);
    assert!(matches!(&watcher.on_time(Time(5) + PAUSE)[..], [Step::Read(_)]));
    let steps = watcher.on_aborted(AbortReason::Invalid, Time(5) + PAUSE);
    assert_eq!(steps, [Step::Failed(WatchError::Refused(AbortReason::Invalid))]);
}

fn ask(after: u64) -> Ask {
    Ask {
        unit: Unit::Partition(P),
        range: KeyRange::default(),
        backwards: false,
        limit: 1,
        at: Timestamp(0),
        round: 1,
        changes_after: Some(Timestamp(after)),
    }
}

fn changes(store: &Store, after: u64, closed: u64) -> (Vec<(String, u64)>, Changes, bool) {
    let asked = ask(after);
    let closed = Timestamp(closed);
    let listing =
        Listing::of_changes(store, [P], (&asked, Timestamp(after)), closed, Basis::Complete);
    let changes = listing.changes.unwrap();
    let shown = changes.changes.iter().map(|c| (c.key.to_string(), c.version.timestamp.0));
    (shown.collect(), changes, listing.has_more)
}

#[test]
fn versions_of_all_layers_are_changes_until_they_are_dropped() {
    let engine = MemoryEngine::default();
    let mut store = Store::new(Box::new(engine.clone()));
    store.put(P, "a".into(), version(5), Some("x".into()));
    store.put(P, "b".into(), version(7), None);
    engine.merge(&store.freeze());
    store.thaw();
    store.put(P, "a".into(), version(9), Some("y".into()));
    let _ = store.freeze();
    store.put(P, "c".into(), version(8), Some("z".into()));
    store.put(P, "\0fence0".into(), version(8), None);
    let all = [("a", 5), ("b", 7), ("c", 8), ("a", 9)].map(|(key, at)| (key.to_owned(), at));
    assert_eq!(changes(&store, 0, 100).0, all);
    assert_eq!(changes(&store, 5, 8).0, all[1..3]);
    assert_eq!(changes(&store, 0, 100).1.kept_after, Timestamp(0));
    store.collect_below(P, Timestamp(8));
    assert_eq!(changes(&store, 0, 100).1.kept_after, Timestamp(7));
}

/// What has been dropped is known after a restart, too.
#[test]
fn an_engine_remembers_what_it_dropped() {
    let engine = MemoryEngine::default();
    let mut store = Store::new(Box::new(engine.clone()));
    store.put(P, "a".into(), version(5), Some("x".into()));
    store.collect_below(P, Timestamp(4));
    engine.merge(&store.freeze());
    store.thaw();
    let copies = vec![("a".into(), [(version(20), None)].into_iter().collect())];
    store.put_copies(P, copies);
    assert_eq!(store.kept_after(P), Timestamp(20));
    engine.merge(&store.freeze());
    let restarted = Store::new(Box::new(engine.clone()));
    assert_eq!(restarted.kept_after(P), Timestamp(20));
    assert_eq!(engine.extent(P).newest, Timestamp(20));
}

#[test]
fn an_answer_ends_between_two_timestamps() {
    let mut store = Store::new(Box::new(MemoryEngine::default()));
    let long = Value::from(vec![b'x'; NAMES_BYTES_MAX / 2]);
    for (key, at) in [("a", 1), ("b", 2), ("c", 2), ("d", 2), ("e", 3)] {
        store.put(P, key.into(), version(at), Some(long.clone()));
    }
    let (shown, answer, has_more) = changes(&store, 0, 100);
    assert_eq!(shown.iter().map(|(_, at)| *at).collect::<Vec<_>>(), [1, 2, 2, 2]);
    assert_eq!((answer.closed, has_more), (Timestamp(2), true));
    let (shown, answer, has_more) = changes(&store, 2, 100);
    assert_eq!((shown.len(), answer.closed, has_more), (1, Timestamp(100), false));
}

/// What would take a search through the whole engine counts as forgotten.
#[test]
fn changes_among_too_many_keys_on_disk_are_refused() {
    let engine = MemoryEngine::default();
    let mut store = Store::new(Box::new(engine.clone()));
    for number in 0..=CHANGED_KEYS_MAX {
        store.put(P, format!("k{number}").into(), version(5), Some("x".into()));
    }
    engine.merge(&store.freeze());
    store.thaw();
    store.put(P, "new".into(), version(9), Some("x".into()));
    assert_eq!(changes(&store, 4, 100).1.kept_after, Timestamp(100));
    // Nothing there is later than 5.
    let (shown, answer, _) = changes(&store, 5, 100);
    assert_eq!((shown, answer.kept_after), (vec![("new".to_owned(), 9)], Timestamp(0)));
}

/// A watch that is a little behind does not search the engine, however large it is.
#[test]
fn the_last_checkpoint_stays_in_memory_while_somebody_watches() {
    let engine = MemoryEngine::default();
    let mut store = Store::new(Box::new(engine.clone()));
    for number in 0..=CHANGED_KEYS_MAX {
        store.put(P, format!("k{number}").into(), version(5), Some("x".into()));
    }
    engine.merge(&store.freeze());
    store.thaw();
    let known = |store: &Store, after| changes(store, after, 100).1.kept_after == Timestamp(0);
    for at in [10, 20, 30] {
        store.put(P, "k".into(), version(at), Some("x".into()));
        assert!(known(&store, at - 10 + u64::from(at == 10) * 5), "{at}");
        let frozen = store.freeze();
        assert!(known(&store, at - 1));
        engine.merge(&frozen);
        assert!(known(&store, at - 1), "it is in the engine, and still in memory");
        store.thaw();
        assert!(known(&store, at - 1));
        assert_eq!(changes(&store, at - 1, 100).0, [("k".to_owned(), at)]);
    }
    assert!(!known(&store, 9), "two checkpoints ago");
}
