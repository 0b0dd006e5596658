use super::*;
use crate::cluster::{Node, Partition, Role};
use crate::id::TxnId;
use crate::rng::Rng;
use crate::store::MemoryEngine;
use crate::topology::Topology;
use crate::txn::Value;
use crate::{ClientId, wire};

const HERE: RegionId = RegionId(0);

/// Two partitions by hash on the same three servers.
fn cluster() -> Cluster {
    let topology = Topology::uniform(3, Duration::from_millis(1), Duration::from_millis(100));
    Cluster::spread(topology, 1, 1, 2, 3).unwrap()
}

fn version(timestamp: u64) -> Version {
    Version { timestamp: Timestamp(timestamp), writer: TxnId::new(ClientId(1), timestamp) }
}

fn live(key: &str) -> Name {
    Name { key: key.into(), deleted: None }
}

fn deleted(key: &str, at: u64) -> Name {
    Name { key: key.into(), deleted: Some(version(at)) }
}

/// Servers with the same names, of which the first two of three answer, and one snapshot.
struct World {
    cluster: Cluster,
    names: Vec<Name>,
    values: Reads,
    reads: u32,
}

impl World {
    fn new(names: Vec<Name>) -> Self {
        let mut world = Self { cluster: cluster(), names, values: Reads::new(), reads: 0 };
        for name in world.names.clone() {
            if name.deleted.is_none() {
                world.write(name.key);
            }
        }
        world
    }

    fn write(&mut self, key: Key) {
        let read = Read { value: Some(Value::from("v")), version: version(1) };
        self.values.insert(key, read);
    }

    fn voters(&self, unit: Unit) -> Vec<NodeId> {
        let Unit::Partition(id) = unit else { unreachable!("the cluster has no shares") };
        self.cluster.partition(id).unwrap().replicas.clone()
    }

    fn answer(&self, ask: &Ask) -> Answer {
        let of_unit = |name: &&Name| {
            ask.range.contains(&name.key)
                && Unit::Partition(self.cluster.partition_of(&name.key)) == ask.unit
        };
        let mut names: Vec<Name> = self.names.iter().filter(of_unit).cloned().collect();
        names.sort_by(|a, b| a.key.cmp(&b.key));
        if ask.backwards {
            names.reverse();
        }
        let has_more = names.len() > ask.limit();
        names.truncate(ask.limit());
        let basis =
            Basis::Voter { since: 0, voters: vec![Voters { nodes: self.voters(ask.unit) }] };
        let listing = Some(Listing { names, has_more, basis, changes: None });
        Answer { unit: ask.unit, round: ask.round, listing }
    }

    /// Runs a scan. `between` is called after each read, before the second list.
    fn scan(
        &mut self,
        scan: Scan,
        mut between: impl FnMut(&mut Self, u32),
    ) -> Result<Page, ScanError> {
        let (mut scanner, steps) =
            Scanner::new(&self.cluster, false, HERE, scan, Time::ZERO).unwrap();
        let mut steps: std::collections::VecDeque<Step> = steps.into();
        while let Some(step) = steps.pop_front() {
            steps.extend(match step {
                Step::Ask(to, ask) => {
                    if self.voters(ask.unit).iter().position(|&node| node == to) == Some(2) {
                        continue;
                    }
                    let answer = wire::decode(&wire::encode(&self.answer(&ask))).unwrap();
                    scanner.on_answer(to, answer, Time(1))
                }
                Step::Read(keys) => {
                    let read = |key: &Key| {
                        (key.clone(), self.values.get(key).cloned().unwrap_or_default())
                    };
                    let reads = keys.iter().map(read).collect();
                    self.reads += 1;
                    let count = self.reads;
                    between(self, count);
                    scanner.on_read(reads, Timestamp(7), Time(2))
                }
                Step::Done(result) => return result,
            });
        }
        panic!("the scan waits for nothing: {scanner:?}");
    }
}

fn keys(page: &Page) -> Vec<String> {
    page.rows.iter().map(|(key, _)| key.to_string()).collect()
}

fn all(limit: usize) -> Scan {
    Scan { range: KeyRange::default(), backwards: false, limit }
}

#[test]
fn a_page_has_the_keys_of_all_partitions_in_order() {
    let names = || ["d", "a", "c", "b", "e"].map(live).to_vec();
    let page = World::new(names()).scan(all(10), |_, _| {}).unwrap();
    assert_eq!(keys(&page), ["a", "b", "c", "d", "e"]);
    assert_eq!((page.rest, page.timestamp), (None, Timestamp(7)));
    let range = KeyRange { from: "b".into(), until: Some("e".into()) };
    let scan = Scan { range, backwards: true, limit: 10 };
    let page = World::new(names()).scan(scan, |_, _| {}).unwrap();
    assert_eq!(keys(&page), ["d", "c", "b"]);
}

#[test]
fn pages_follow_each_other_in_both_directions() {
    let names: Vec<Name> = (0..37).map(|number| live(&format!("k{number:02}"))).collect();
    for backwards in [false, true] {
        for limit in [1, 2, 7, 36, 37, 38] {
            let (mut found, mut rest) = (Vec::new(), Some(KeyRange::prefix(b"k")));
            while let Some(range) = rest {
                let scan = Scan { range, backwards, limit };
                let page = World::new(names.clone()).scan(scan, |_, _| {}).unwrap();
                assert!(page.rows.len() <= limit);
                found.extend(keys(&page));
                rest = page.rest;
            }
            if backwards {
                found.reverse();
            }
            let expected: Vec<String> = names.iter().map(|name| name.key.to_string()).collect();
            assert_eq!(found, expected, "limit {limit}, backwards {backwards}");
        }
    }
}

#[test]
fn a_key_that_appears_while_the_others_are_read_is_read_too() {
    let mut world = World::new(vec![live("a")]);
    let page = world
        .scan(all(10), |world, reads| {
            if reads == 1 {
                world.names.push(live("b"));
                world.write("b".into());
            }
        })
        .unwrap();
    assert_eq!((keys(&page), world.reads), (vec!["a".into(), "b".into()], 2));
}

#[test]
fn a_deletion_counts_only_if_the_first_list_did_not_have_it() {
    let mut world = World::new(vec![live("a"), deleted("b", 3)]);
    let page = world.scan(all(10), |_, _| {}).unwrap();
    assert_eq!((keys(&page), world.reads), (vec!["a".into()], 1));
    // `b` was written again, and deleted again: it may have existed when `a` was read.
    let mut world = World::new(vec![live("a"), deleted("b", 3)]);
    world
        .scan(all(10), |world, reads| {
            if reads == 1 {
                world.names = vec![live("a"), deleted("b", 5), deleted("c", 4)];
            }
        })
        .unwrap();
    assert_eq!(world.reads, 2);
}

/// A server had written a deletion before its time had come, and a scan at an earlier timestamp took
/// the key for absent.
#[test]
fn a_key_that_is_deleted_later_is_read() {
    let mut world = World::new(vec![live("a"), deleted("b", 8), deleted("c", 7)]);
    world.write("b".into());
    let page = world.scan(all(10), |_, _| {}).unwrap();
    assert_eq!((keys(&page), world.reads), (vec!["a".into(), "b".into()], 2));
}

#[test]
fn a_range_that_never_stays_the_same_is_given_up() {
    let mut world = World::new(vec![live("a")]);
    let page = world.scan(all(10), |world, reads| {
        let key = format!("a{:03}", 999 - reads);
        world.names.push(live(&key));
        world.write(key.into());
    });
    // It ends before the name that was new at last.
    let page = page.unwrap();
    assert_eq!(keys(&page), ["a"]);
    assert_eq!(page.rest.map(|rest| rest.from), Some("a995".into()));
    // In the other direction too.
    let mut world = World::new(vec![live("b")]);
    let scan = Scan { backwards: true, ..all(10) };
    let page = world.scan(scan, |world, reads| {
        let key = format!("a{reads:03}");
        world.names.push(live(&key));
        world.write(key.into());
    });
    let page = page.unwrap();
    assert_eq!(keys(&page), ["b"]);
    assert!(page.rest.unwrap().contains(&"a004".into()));
    let mut world = World::new(vec![]);
    let page = world.scan(all(10), |world, reads| {
        let key = format!("a{:03}", 999 - reads);
        world.names.push(live(&key));
        world.write(key.into());
    });
    assert_eq!(page.unwrap_err(), ScanError::Busy);
}

fn listing(names: &[&str], basis: Basis) -> Option<Listing> {
    Some(Listing {
        names: names.iter().map(|name| live(name)).collect(),
        has_more: false,
        basis,
        changes: None,
    })
}

fn sets(since: u64, of: &[&[u32]]) -> Basis {
    let set = |nodes: &&[u32]| Voters { nodes: nodes.iter().map(|&node| NodeId(node)).collect() };
    Basis::Voter { since, voters: of.iter().map(set).collect() }
}

#[test]
fn each_set_of_voters_must_have_a_majority() {
    let topology = Topology::uniform(3, Duration::from_millis(1), Duration::from_millis(100));
    let nodes = (1..=6).map(|id| Node { id: NodeId(id), region: HERE, role: Role::Server });
    let partition = Partition {
        id: PartitionId(0),
        replicas: [1, 2, 3].map(NodeId).to_vec(),
        preferred_leader: NodeId(1),
    };
    let partitioning = Partitioning::hash([PartitionId(0)]);
    let cluster = Cluster::new(topology, 1, nodes, [partition], partitioning).unwrap();
    let (mut scanner, steps) = Scanner::new(&cluster, false, HERE, all(10), Time::ZERO).unwrap();
    assert_eq!(steps.len(), 3);
    let unit = Unit::Partition(PartitionId(0));
    let mut answer = |from, basis| {
        let answer = Answer { unit, round: 1, listing: listing(&["a"], basis) };
        scanner.on_answer(NodeId(from), answer, Time(1))
    };
    assert_eq!(answer(1, sets(1, &[&[1, 2, 3]])), []);
    // The new voters are unknown, so they are asked.
    let asked: Vec<NodeId> = answer(2, sets(8, &[&[4, 5, 6], &[1, 2, 3]]))
        .into_iter()
        .map(|step| match step {
            Step::Ask(to, _) => to,
            other @ (Step::Read(_) | Step::Done(_)) => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(asked, [4, 5, 6].map(NodeId));
    assert_eq!(answer(4, sets(8, &[&[4, 5, 6], &[1, 2, 3]])), []);
    // The change is over, for one that knows more: the old voters need not answer.
    let steps = answer(6, sets(9, &[&[4, 5, 6]]));
    assert!(matches!(steps[..], [Step::Read(_)]), "{steps:?}");
    // While the change lasts, the old voters must have a majority too.
    let (mut scanner, _) = Scanner::new(&cluster, false, HERE, all(10), Time::ZERO).unwrap();
    let joint = || sets(8, &[&[4, 5, 6], &[1, 2, 3]]);
    let mut counts = Vec::new();
    for from in [4, 5, 1, 3] {
        let answer = Answer { unit, round: 1, listing: listing(&["a"], joint()) };
        let steps = scanner.on_answer(NodeId(from), answer, Time(1));
        counts.push(steps.iter().filter(|step| matches!(step, Step::Read(_))).count());
    }
    assert_eq!(counts, [0, 0, 0, 1]);
}

/// A group had one voter since, which had answered before the change and was not asked again.
#[test]
fn an_answer_from_before_a_change_of_members_is_replaced() {
    let cluster = cluster();
    let (mut scanner, _) = Scanner::new(&cluster, false, HERE, all(10), Time::ZERO).unwrap();
    let mut answer = |from: u32, partition, basis, now| {
        let unit = Unit::Partition(PartitionId(partition));
        let answer = Answer { unit, round: 1, listing: listing(&[], basis) };
        scanner.on_answer(NodeId(from), answer, now);
    };
    answer(1, 0, sets(1, &[&[1, 2, 3]]), Time(1));
    answer(1, 1, sets(1, &[&[1]]), Time(1));
    let again = scanner.deadline().unwrap();
    let asked = scanner.on_time(again);
    assert!(asked.iter().any(|step| matches!(step, Step::Ask(NodeId(1), _))), "{asked:?}");
    let unit = Unit::Partition(PartitionId(0));
    let answer = Answer { unit, round: 1, listing: listing(&[], sets(9, &[&[1]])) };
    let steps = scanner.on_answer(NodeId(1), answer, again);
    assert!(matches!(steps[..], [Step::Read(_)]), "{steps:?}");
}

#[test]
fn one_complete_answer_is_enough_and_silent_servers_are_asked_again() {
    let cluster = cluster().divided(1).unwrap();
    let (mut scanner, steps) = Scanner::new(&cluster, true, HERE, all(10), Time::ZERO).unwrap();
    assert!(matches!(&steps[..], [Step::Ask(NodeId(1), _)]), "the nearest: {steps:?}");
    let again = scanner.deadline().unwrap();
    assert_eq!(scanner.on_time(Time(0)), []);
    assert_eq!(scanner.on_time(again).len(), 3);
    let unit = Unit::Share(ShareId(0));
    let cannot = Answer { unit, round: 1, listing: None };
    assert_eq!(scanner.on_answer(NodeId(2), cannot, again), []);
    let late = Answer { unit, round: 0, listing: listing(&["b"], Basis::Complete) };
    assert_eq!(scanner.on_answer(NodeId(3), late, again), []);
    let answer = Answer { unit, round: 1, listing: listing(&["a"], Basis::Complete) };
    let steps = scanner.on_answer(NodeId(3), answer, again);
    let Some(Step::Read(keys)) = steps.first() else { panic!("{steps:?}") };
    let owners: OrdSet<PartitionId> = keys
        .iter()
        .filter(|key| **key != "a".into())
        .map(|key| cluster.partition_of(key))
        .collect();
    assert_eq!(owners.len(), 2, "a fence in each partition: {keys:?}");
    // A later list asks for what the read saw.
    let steps = scanner.on_read(Reads::new(), Timestamp(9), again);
    assert!(matches!(&steps[..], [Step::Ask(_, Ask { at: Timestamp(9), round: 2, .. })]));
}

#[test]
fn a_page_that_is_too_large_is_halved() {
    let world = World::new((0..9).map(|number| live(&format!("k{number}"))).collect());
    let (mut scanner, steps) =
        Scanner::new(&world.cluster, false, HERE, all(8), Time::ZERO).unwrap();
    let mut steps: std::collections::VecDeque<Step> = steps.into();
    let mut counts = Vec::new();
    while let Some(step) = steps.pop_front() {
        steps.extend(match step {
            Step::Ask(to, ask) => scanner.on_answer(to, world.answer(&ask), Time(1)),
            Step::Read(keys) => {
                counts.push(keys.len() - 2);
                scanner.on_aborted(AbortReason::TooLarge)
            }
            Step::Done(result) => {
                assert_eq!(result, Err(ScanError::Refused(AbortReason::TooLarge)));
                break;
            }
        });
    }
    assert_eq!(counts, [8, 4, 2, 1]);
}

#[test]
fn a_prefix_ends_before_the_next_one() {
    let range = |prefix: &[u8]| KeyRange::prefix(prefix);
    assert_eq!(range(b"ab").until, Some("ac".into()));
    assert_eq!(range(b"a\xff\xff").until, Some("b".into()));
    assert_eq!(range(b"\xff"), KeyRange { from: b"\xff"[..].into(), until: None });
    assert_eq!(range(b""), KeyRange::default());
    assert!(range(b"ab").contains(&"abz".into()) && !range(b"ab").contains(&"ac".into()));
    assert!(range(b"a").after(&"a".into(), false).contains(&b"a\0"[..].into()));
    assert!(!range(b"a").after(&"ab".into(), true).contains(&"ab".into()));
}

#[test]
fn a_fence_is_known_by_its_form() {
    for key in ["fence1", "\0fence", "a\0fence1b", "7", ""] {
        assert!(!is_fence(&Key::from(key)), "{key:?}");
    }
    assert!(is_fence(&Key::from("\0fence0")) && is_fence(&Key::from("user\0fence123")));
}

#[test]
fn fences_are_in_the_partitions_of_the_range() {
    let topology = Topology::uniform(3, Duration::from_millis(1), Duration::from_millis(100));
    let nodes = (1..=3).map(|id| Node { id: NodeId(id), region: HERE, role: Role::Server });
    let partition = |id| Partition {
        id: PartitionId(id),
        replicas: [1, 2, 3].map(NodeId).to_vec(),
        preferred_leader: NodeId(1),
    };
    let starts = vec![
        (Key::default(), PartitionId(0)),
        ("g".into(), PartitionId(1)),
        ("p".into(), PartitionId(2)),
    ];
    let partitioning = Partitioning::Range { starts };
    let cluster = Cluster::new(topology, 1, nodes, (0..3).map(partition), partitioning).unwrap();
    let of = |from: &str, until: Option<&str>| {
        let range = KeyRange { from: from.into(), until: until.map(Key::from) };
        let fences = fences(&cluster, false, &range).unwrap();
        let mut owners: Vec<u32> = fences.iter().map(|key| cluster.partition_of(key).0).collect();
        owners.sort_unstable();
        owners
    };
    assert_eq!(of("", None), [0, 1, 2]);
    assert_eq!(of("a", Some("g")), [0]);
    assert_eq!(of("h", Some("i")), [1]);
    assert_eq!(of("h", Some("q")), [1, 2]);
}

#[test]
fn the_heads_of_a_store_are_those_of_all_its_layers() {
    let partition = PartitionId(3);
    for seed in 0..300 {
        let mut rng = Rng::stream(seed, "heads", 0);
        let engine = MemoryEngine::default();
        let mut store = Store::new(Box::new(engine.clone()));
        let mut model: OrdMap<Key, (Version, bool)> = OrdMap::new();
        for step in 0..rng.below(40) {
            match rng.below(12) {
                0 if !store.is_frozen() => {
                    let frozen = store.freeze();
                    if rng.below(2) == 0 {
                        engine.merge(&frozen);
                        store.thaw();
                    }
                }
                1 => {
                    store.clear(partition);
                    model.clear();
                }
                _ => {
                    let key = Key::from(format!("k{}", rng.below(12)));
                    let version = version(1 + rng.below(30) * 64 + step);
                    let value = (rng.below(3) > 0).then(|| Value::from("v"));
                    let newest = model.entry(key.clone()).or_default();
                    if newest.0 < version {
                        *newest = (version, value.is_none());
                    }
                    store.put(partition, key, version, value);
                }
            }
        }
        let until = (rng.below(2) == 0).then(|| Key::from(format!("k{}", rng.below(12))));
        let range = KeyRange { from: Key::from(format!("k{}", rng.below(6))), until };
        for backwards in [false, true] {
            let limit = 1 + usize::try_from(rng.below(14)).unwrap();
            let (mut found, mut rest) = (Vec::new(), Some(range.clone()));
            while let Some(range) = rest.take() {
                let heads = store.heads(partition, &range, backwards, limit);
                assert!(heads.heads.len() <= limit);
                if heads.has_more {
                    let last = &heads.heads.last().expect("a list that goes on has begun").key;
                    rest = Some(range.after(last, backwards)).filter(|rest| !rest.is_empty());
                }
                found.extend(heads.heads);
            }
            let mut expected: Vec<_> =
                model.iter().filter(|(key, _)| range.contains(key)).collect();
            if backwards {
                expected.reverse();
            }
            let found: Vec<_> =
                found.iter().map(|head| (&head.key, (head.version, head.is_deletion))).collect();
            let expected: Vec<_> = expected.into_iter().map(|(key, head)| (key, *head)).collect();
            assert_eq!(found, expected, "seed {seed}, backwards {backwards}, limit {limit}");
        }
    }
}
