//! The checker against brute force: thousands of histories small enough to try every order.

use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::rng::Rng;

use super::{Model, Phenomenon, Verdict, check};
use crate::history::{Entry, History, Op, Status};

/// What a key holds in one serial execution.
#[derive(Clone, Default)]
struct Cell {
    list: Vec<u64>,
    /// The version, as a reader names it; none if nobody read its timestamp.
    version: Option<String>,
    /// The newest known timestamp so far.
    timestamp: u64,
    /// The version has no value, and readers may have seen an earlier absence.
    is_deleted: bool,
    /// Versions that had no value.
    deletions: OrdSet<String>,
}

/// The version of a key that was never written.
const INITIAL: &str = "c0.0@0";

type State = OrdMap<String, Cell>;

/// True if some serial order of all `ok` entries and some `info` entries explains every read. For
/// strict serializability the order must also agree with the clock.
fn is_explained(entries: &[Entry], model: Model) -> bool {
    let left: Vec<&Entry> = entries.iter().filter(|entry| entry.status != Status::Fail).collect();
    let stamps = left.iter().map(|entry| (entry.txn.as_str(), stamps(entry, entries))).collect();
    can_go_on(&left, &State::new(), &stamps, model)
}

/// The possible commit timestamps of an entry: the stated one, or else any that somebody read, or
/// none of those.
fn stamps(entry: &Entry, entries: &[Entry]) -> Vec<Option<u64>> {
    let of = |version: &str| {
        let (writer, timestamp) = version.split_once('@').unwrap();
        (writer == entry.txn).then(|| timestamp.parse::<u64>().unwrap())
    };
    let own = entry.ops.iter().find_map(|op| match op {
        Op::WriteVersion(_, Some(version)) | Op::DeleteVersion(_, Some(version)) => of(version),
        Op::WriteVersion(_, None)
        | Op::DeleteVersion(_, None)
        | Op::Append(..)
        | Op::ReadList(..)
        | Op::ReadVersion(..) => None,
    });
    if own.is_some() {
        return vec![own];
    }
    let ops = entries.iter().flat_map(|entry| &entry.ops);
    let read: OrdSet<u64> = ops
        .filter_map(|op| match op {
            Op::ReadVersion(_, version) => of(version),
            Op::WriteVersion(..) | Op::DeleteVersion(..) | Op::Append(..) | Op::ReadList(..) => {
                None
            }
        })
        .collect();
    read.into_iter().map(Some).chain([None]).collect()
}

fn can_go_on(
    left: &[&Entry],
    state: &State,
    stamps: &OrdMap<&str, Vec<Option<u64>>>,
    model: Model,
) -> bool {
    if left.iter().all(|entry| entry.status == Status::Info) {
        return true;
    }
    (0..left.len()).any(|index| {
        let mut rest = left.to_vec();
        let next = rest.remove(index);
        let is_too_early = model == Model::StrictSerializable
            && rest.iter().any(|other| {
                other.status == Status::Ok && other.complete_us.unwrap() < next.invoke_us
            });
        !is_too_early
            && stamps[next.txn.as_str()].iter().any(|stamp| {
                run(next, *stamp, state)
                    .is_some_and(|state| can_go_on(&rest, &state, stamps, model))
            })
    })
}

/// The state after an entry, if every read returns the recorded value.
fn run(entry: &Entry, stamp: Option<u64>, state: &State) -> Option<State> {
    let mut state = state.clone();
    let mut written = OrdSet::new();
    for op in &entry.ops {
        let cell = state
            .entry(op.key().to_owned())
            .or_insert_with(|| Cell { version: Some("c0.0@0".into()), ..Cell::default() });
        match op {
            Op::Append(_, element) => cell.list.push(*element),
            Op::ReadList(_, list) => {
                if cell.list != *list {
                    return None;
                }
            }
            Op::ReadVersion(_, version) => {
                let is_forgotten = cell.is_deleted
                    && (version == INITIAL || cell.deletions.contains(version))
                    && !written.contains(op.key());
                if cell.version.as_ref() != Some(version) && !is_forgotten {
                    return None;
                }
            }
            Op::WriteVersion(key, _) | Op::DeleteVersion(key, _) => {
                if !written.insert(key.as_str()) {
                    continue;
                }
                // Versions follow each other in the order of their timestamps.
                if stamp.is_some_and(|stamp| stamp <= cell.timestamp) {
                    return None;
                }
                cell.timestamp = stamp.unwrap_or(cell.timestamp);
                cell.is_deleted = matches!(op, Op::DeleteVersion(..));
                cell.version = stamp.map(|stamp| format!("{}@{stamp}", entry.txn));
                if cell.is_deleted {
                    cell.deletions.extend(cell.version.clone());
                }
            }
        }
    }
    Some(state)
}

/// Counts the verdicts on one kind of random history.
#[derive(Default, Debug)]
struct Tally {
    explained: u32,
    refused: u32,
    only_strict_refused: u32,
    unplaced: u32,
    old_reads: u32,
    kinds: OrdMap<String, u32>,
}

/// True if the checker found nothing wrong with the order of all transactions. Reads of attempts
/// that did not commit are not part of that order.
fn has_order(verdict: &Verdict) -> bool {
    let of_session = [Phenomenon::ReadYourWrites, Phenomenon::MonotonicReads];
    verdict.anomalies.iter().all(|anomaly| of_session.contains(&anomaly.kind.phenomenon))
}

/// Compares the checker with brute force on `count` histories of one kind.
fn compare(name: &str, count: u64, generate: fn(&mut Rng) -> Vec<Entry>) -> Tally {
    let mut tally = Tally::default();
    for seed in 0..count {
        let entries = generate(&mut Rng::stream(seed, name, 0));
        let mut history = History::new();
        for entry in &entries {
            history.push(entry).unwrap();
        }
        let show = || {
            let lines: Vec<_> =
                entries.iter().map(|entry| serde_json::to_string(entry).unwrap()).collect();
            format!("{name} seed {seed}\n{}", lines.join("\n"))
        };
        let mut oks = Vec::new();
        for model in [Model::StrictSerializable, Model::Serializable] {
            let verdict = check(&history, model);
            let is_explained = is_explained(&entries, model);
            if is_explained {
                assert!(has_order(&verdict), "a false alarm: {}\n{verdict}", show());
            } else if verdict.unplaced_writes == 0 && verdict.unplaced_reads == 0 {
                assert!(!has_order(&verdict), "missed, {model}: {}", show());
            }
            tally.unplaced += u32::from(verdict.unplaced_writes > 0);
            for anomaly in &verdict.anomalies {
                *tally.kinds.entry(anomaly.kind.to_string()).or_insert(0) += 1;
                check_cycle(anomaly, &show);
            }
            tally.old_reads += u32::from(has_order(&verdict) && !verdict.ok);
            oks.push(has_order(&verdict));
        }
        match oks[..] {
            [true, true] => tally.explained += 1,
            [false, false] => tally.refused += 1,
            [false, true] => tally.only_strict_refused += 1,
            _ => panic!("strict but not serializable: {}", show()),
        }
    }
    tally
}

/// Asserts that a cycle is closed, visits each transaction once, and has the edges that its kind
/// requires.
fn check_cycle(anomaly: &super::Anomaly, show: &dyn Fn() -> String) {
    use super::{Dependency, Order, Phenomenon};
    let count = |dependency| anomaly.cycle.iter().filter(|s| s.dependency == dependency).count();
    let nexts = anomaly.cycle.iter().cycle().skip(1);
    assert!(anomaly.cycle.iter().zip(nexts).all(|(step, next)| step.to == next.from), "{}", show());
    let txns: OrdSet<_> = anomaly.cycle.iter().map(|step| step.from).collect();
    assert_eq!(txns.len(), anomaly.cycle.len(), "{}", show());
    assert_ne!(anomaly.cycle.len(), 1);
    let (wr, rw) = (count(Dependency::Wr), count(Dependency::Rw));
    let fits = match anomaly.kind.phenomenon {
        Phenomenon::G0 => !txns.is_empty() && wr == 0 && rw == 0,
        Phenomenon::G1c => wr > 0 && rw == 0,
        Phenomenon::GSingle | Phenomenon::LostAppend => rw == 1,
        Phenomenon::G2Item => rw > 1,
        Phenomenon::AmbiguousAppend
        | Phenomenon::GarbageRead
        | Phenomenon::G1a
        | Phenomenon::G1b
        | Phenomenon::DuplicateAppend
        | Phenomenon::IncompatibleOrder
        | Phenomenon::Internal
        | Phenomenon::TimestampTie
        | Phenomenon::ReadYourWrites
        | Phenomenon::MonotonicReads => txns.is_empty(),
    };
    assert!(fits, "{:?}: {}", anomaly, show());
    let (process, real_time) = (count(Dependency::Process), count(Dependency::RealTime));
    let order = match (process, real_time) {
        (0, 0) => None,
        (_, 0) => Some(Order::Process),
        (_, _) => Some(Order::RealTime),
    };
    assert_eq!(anomaly.kind.order, order, "{}", show());
}

fn blank(number: u64, rng: &mut Rng) -> Entry {
    let process = 1 + rng.below(2);
    let invoke_us = rng.below(12);
    Entry {
        txn: format!("c{process}.{}", number + 1),
        process,
        region: "VA".into(),
        priority: "low".into(),
        stale: false,
        invoke_us,
        complete_us: Some(invoke_us + rng.below(8)),
        status: match rng.below(8) {
            0 => Status::Fail,
            1 => Status::Info,
            _ => Status::Ok,
        },
        ops: Vec::new(),
    }
}

fn key(rng: &mut Rng, keys: u64) -> String {
    format!("k{}", rng.below(keys))
}

/// A list of elements that some transaction appends to the key, with a little garbage.
fn random_list(rng: &mut Rng, appended: &[u64]) -> Vec<u64> {
    let mut left = appended.to_vec();
    // Mostly ascending, so that lists agree often enough to get past the first reads.
    let len = rng.below(left.len() as u64 + 1);
    let mut list = Vec::new();
    for _ in 0..len {
        let place = if rng.chance(5, 6) { 0 } else { rng.below(left.len() as u64) };
        let element = left[place as usize];
        list.push(element);
        if !rng.chance(1, 30) {
            left.remove(place as usize);
        }
    }
    if rng.chance(1, 60) {
        list.push(99);
    }
    list
}

/// Random histories of lists.
fn random_lists(rng: &mut Rng) -> Vec<Entry> {
    let keys = 1 + rng.below(3);
    let mut entries: Vec<Entry> = (0..2 + rng.below(4)).map(|number| blank(number, rng)).collect();
    let mut appended: OrdMap<String, Vec<u64>> = OrdMap::new();
    let mut element = 0;
    for entry in &mut entries {
        for _ in 0..1 + rng.below(3) {
            let key = key(rng, keys);
            // A retry appends what an attempt before it failed to append.
            let failed = entry.status == Status::Fail && rng.chance(1, 4);
            if rng.chance(1, 2) {
                element += u64::from(!failed || element == 0);
                entry.ops.push(Op::Append(key.clone(), element));
                appended.entry(key).or_default().push(element);
            } else {
                entry.ops.push(Op::ReadList(key, Vec::new()));
            }
        }
    }
    for elements in appended.values_mut() {
        elements.dedup();
    }
    for op in entries.iter_mut().flat_map(|entry| &mut entry.ops) {
        if let Op::ReadList(key, list) = op {
            *list = random_list(rng, appended.get(key).map_or(&[], Vec::as_slice));
        }
    }
    entries
}

/// Random histories of versions.
fn random_versions(rng: &mut Rng) -> Vec<Entry> {
    let keys = 1 + rng.below(3);
    let mut entries: Vec<Entry> = (0..2 + rng.below(4)).map(|number| blank(number, rng)).collect();
    let mut written: OrdMap<String, Vec<String>> = OrdMap::new();
    for (number, entry) in entries.iter_mut().enumerate() {
        let timestamp = if rng.chance(1, 20) { 1 } else { 1 + number as u64 };
        let is_known = match entry.status {
            Status::Ok => rng.chance(9, 10),
            Status::Fail | Status::Info => rng.chance(1, 3),
        };
        for _ in 0..1 + rng.below(3) {
            let key = key(rng, keys);
            if rng.chance(1, 2) {
                let version = format!("{}@{timestamp}", entry.txn);
                let stated = is_known.then(|| version.clone());
                entry.ops.push(if rng.chance(1, 3) {
                    Op::DeleteVersion(key.clone(), stated)
                } else {
                    Op::WriteVersion(key.clone(), stated)
                });
                written.entry(key).or_default().push(version);
            } else {
                entry.ops.push(Op::ReadVersion(key, String::new()));
            }
        }
    }
    for op in entries.iter_mut().flat_map(|entry| &mut entry.ops) {
        if let Op::ReadVersion(key, version) = op {
            let choices = written.get(key).map_or(&[][..], Vec::as_slice);
            *version = match rng.below(choices.len() as u64 + 1) {
                0 => "c0.0@0".into(),
                choice => choices[choice as usize - 1].clone(),
            };
            if rng.chance(1, 60) {
                *version = "c1.1@77".into();
            }
        }
    }
    entries
}

/// The history of a correct store under random transactions; some outcomes are forgotten.
fn from_store(rng: &mut Rng, is_list: bool) -> Vec<Entry> {
    let keys = 1 + rng.below(3);
    let mut state: OrdMap<String, (Vec<u64>, String, bool)> = OrdMap::new();
    let mut entries = Vec::new();
    let mut element = 0;
    for number in 0..2 + rng.below(4) {
        let mut entry = blank(number, rng);
        // It takes effect at three times its number, between invocation and completion.
        let at = 10 + 3 * number;
        entry.invoke_us = at - rng.below(8);
        entry.complete_us = Some(at + rng.below(8));
        let mut after = state.clone();
        let mut own = OrdSet::new();
        for _ in 0..1 + rng.below(4) {
            let key = key(rng, keys);
            let cell = after.entry(key.clone()).or_insert((Vec::new(), INITIAL.into(), false));
            let is_write = rng.chance(1, 2);
            let op = match (is_list, is_write) {
                (true, true) => {
                    element += 1;
                    cell.0.push(element);
                    Op::Append(key, element)
                }
                (true, false) => Op::ReadList(key, cell.0.clone()),
                (false, true) => {
                    let is_first = own.insert(key.clone());
                    cell.1 = format!("{}@{}", entry.txn, number + 1);
                    cell.2 = if is_first { rng.chance(1, 3) } else { cell.2 };
                    let version = Some(cell.1.clone());
                    if cell.2 {
                        Op::DeleteVersion(key, version)
                    } else {
                        Op::WriteVersion(key, version)
                    }
                }
                (false, false) if cell.2 && !own.contains(&key) && rng.chance(1, 2) => {
                    Op::ReadVersion(key, INITIAL.into())
                }
                (false, false) => Op::ReadVersion(key, cell.1.clone()),
            };
            entry.ops.push(op);
        }
        let happened = match entry.status {
            Status::Ok => true,
            Status::Fail => false,
            Status::Info => rng.chance(1, 2),
        };
        if entry.status != Status::Ok {
            for op in &mut entry.ops {
                if let Op::WriteVersion(_, version) | Op::DeleteVersion(_, version) = op {
                    *version = None;
                }
            }
        }
        if happened {
            state = after;
        }
        entries.push(entry);
    }
    // The file is in no particular order.
    for place in (1..entries.len()).rev() {
        entries.swap(place, rng.below(place as u64 + 1) as usize);
    }
    entries
}

/// Injects one change, which may or may not be an anomaly.
fn inject(rng: &mut Rng, entries: &mut [Entry]) {
    let versions: Vec<String> = entries
        .iter()
        .flat_map(|entry| &entry.ops)
        .filter_map(|op| match op {
            Op::ReadVersion(_, version)
            | Op::WriteVersion(_, Some(version))
            | Op::DeleteVersion(_, Some(version)) => Some(version.clone()),
            Op::WriteVersion(_, None)
            | Op::DeleteVersion(_, None)
            | Op::Append(..)
            | Op::ReadList(..) => None,
        })
        .collect();
    let place = rng.below(entries.len() as u64) as usize;
    let entry = &mut entries[place];
    match rng.below(6) {
        0 => entry.status = Status::Fail,
        1 => entry.status = Status::Info,
        2 => {
            let shift = rng.below(12);
            entry.invoke_us += shift;
            entry.complete_us = entry.complete_us.map(|complete_us| complete_us + shift);
        }
        _ => {
            for op in &mut entry.ops {
                match op {
                    Op::ReadList(_, list) if rng.chance(1, 2) => match rng.below(4) {
                        0 => drop(list.pop()),
                        1 => list.reverse(),
                        2 => list.push(1 + rng.below(6)),
                        _ => drop((!list.is_empty()).then(|| list.remove(0))),
                    },
                    Op::ReadVersion(_, version) if !versions.is_empty() && rng.chance(1, 2) => {
                        *version = versions[rng.below(versions.len() as u64) as usize].clone();
                    }
                    Op::ReadList(..)
                    | Op::ReadVersion(..)
                    | Op::Append(..)
                    | Op::WriteVersion(..)
                    | Op::DeleteVersion(..) => {}
                }
            }
        }
    }
}

/// Asserts that both verdicts occurred often enough to make the comparison meaningful.
#[track_caller]
fn assert_varied(tally: &Tally, count: u32) {
    println!("{tally:?}");
    assert!(tally.explained > count / 20, "{tally:?}");
    assert!(tally.refused > count / 20, "{tally:?}");
    assert!(tally.only_strict_refused > count / 200, "{tally:?}");
    assert!(tally.kinds.len() >= 8, "{tally:?}");
    assert!(tally.old_reads > 0, "{tally:?}");
}

const COUNT: u64 = 6_000;

#[test]
fn random_lists_agree_with_brute_force() {
    let tally = compare("random lists", COUNT, random_lists);
    assert_varied(&tally, COUNT as u32);
    assert_eq!(tally.unplaced, 0);
}

#[test]
fn random_versions_agree_with_brute_force() {
    let tally = compare("random versions", COUNT, random_versions);
    assert_varied(&tally, COUNT as u32);
    assert!(tally.unplaced > 0 && tally.unplaced < COUNT as u32 / 4, "{tally:?}");
}

#[test]
fn faulty_stores_agree_with_brute_force() {
    let lists = compare("faulty lists", COUNT, |rng| {
        let mut entries = from_store(rng, true);
        inject(rng, &mut entries);
        entries
    });
    assert_varied(&lists, COUNT as u32);
    let versions = compare("faulty versions", COUNT, |rng| {
        let mut entries = from_store(rng, false);
        inject(rng, &mut entries);
        entries
    });
    assert_varied(&versions, COUNT as u32);
}

#[test]
fn correct_stores_are_never_blamed() {
    for is_list in [true, false] {
        let tally = compare(
            "correct",
            COUNT,
            if is_list { |rng| from_store(rng, true) } else { |rng| from_store(rng, false) },
        );
        assert_eq!(u64::from(tally.explained), COUNT, "{tally:?}");
        // The same holds for reads of aborted attempts.
        assert_eq!(tally.old_reads, 0, "{tally:?}");
    }
}
