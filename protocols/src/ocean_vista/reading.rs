//! The rule for readers: from some replicas' answers it determines the committed version, the same
//! for every reader (§4.3, with V1–V3).
//!
//! Below the Vwatermark every version is decided: it is stored at f + 1 replicas of its partition,
//! or aborted at f + 1, in the ballot that decided it. So any f + 1 answers include one of these,
//! and a tombstone among the answers of the highest ballot means that the version is aborted. Below
//! the Rwatermark every replica has all versions, and tombstones are forgotten: there the answer of
//! one replica whose Rwatermark is high enough suffices.

use orthodrome_core::id::NodeId;
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::{Read, Version};

use super::Mutations;
use super::message::{Shown, View, What};

/// One replica's answer about one key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Said {
    /// The replica's Rwatermark of the partition.
    pub replicated: Timestamp,
    /// The versions of the key.
    pub view: View,
}

/// The conclusion from several replicas' answers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// The value of the key.
    Read(Read),
    /// This version is committed. These replicas have its functor, and none has its value.
    Resolve(Timestamp, Vec<NodeId>),
    /// None of the shown versions is committed, and older versions were not shown.
    Lower(Timestamp),
}

/// The value of the key below a version that is below the Vwatermark, from the answers of f + 1
/// replicas, or of one whose Rwatermark is at least that version.
///
/// # Panics
/// If there is no answer.
#[must_use]
pub fn read(said: &OrdMap<NodeId, Said>, mutations: Mutations) -> Verdict {
    if mutations.newest_only() {
        return match_newest(said);
    }
    // The replica with the highest Rwatermark knows best what is settled.
    let best = said.values().max_by_key(|said| said.replicated);
    let best = best.unwrap_or_else(|| unreachable!("nobody was asked"));
    let settled_below = best.replicated;
    let shown_from = said.values().map(|said| said.view.complete_from).max().unwrap_or_default();
    let versions = merge(said, settled_below, best);
    // A replica that has copied from a peer may have settled more than its watermark says.
    let settled = said.values().map(|said| &said.view.settled).max_by_key(|read| read.version);
    let settled = settled.unwrap_or(&best.view.settled);
    for (&ts, held) in versions.iter().rev() {
        if ts < shown_from && settled_below < shown_from {
            break;
        }
        if ts < settled.version.timestamp {
            return Verdict::Read(settled.clone());
        }
        match judge(held, mutations) {
            Judged::Absent => {}
            Judged::Value(read) => return Verdict::Read(read),
            Judged::Functor(holders) => return Verdict::Resolve(ts, holders),
        }
    }
    let is_cut = best.view.complete_from > Timestamp::ZERO;
    if shown_from > Timestamp::ZERO && (settled_below < shown_from || is_cut) {
        return Verdict::Lower(shown_from);
    }
    Verdict::Read(settled.clone())
}

/// All answers about each version, by version number.
fn merge<'a>(
    said: &'a OrdMap<NodeId, Said>,
    settled_below: Timestamp,
    best: &'a Said,
) -> OrdMap<Timestamp, Vec<(NodeId, &'a Shown)>> {
    let mut versions: OrdMap<Timestamp, Vec<(NodeId, &Shown)>> = OrdMap::new();
    for (&node, said) in said {
        let counts = |shown: &&Shown| shown.ts >= settled_below || std::ptr::eq(said, best);
        for shown in said.view.versions.iter().filter(counts) {
            versions.entry(shown.ts).or_default().push((node, shown));
        }
    }
    versions
}

enum Judged {
    Absent,
    Value(Read),
    Functor(Vec<NodeId>),
}

/// Whether a version is committed, and its value.
fn judge(held: &[(NodeId, &Shown)], mutations: Mutations) -> Judged {
    let ballot = held.iter().map(|(_, shown)| shown.ballot).max().unwrap_or_default();
    let of_ballot = || held.iter().filter(|(_, shown)| shown.ballot == ballot);
    let is_aborted = of_ballot().any(|(_, shown)| shown.what == What::Aborted);
    let is_believed =
        mutations.finalized_is_committed() && held.iter().any(|(_, s)| s.is_finalized);
    if is_aborted && !is_believed {
        return Judged::Absent;
    }
    // The result is the same wherever it was computed.
    for (_, shown) in held {
        match &shown.what {
            What::Void => return Judged::Absent,
            What::Final(value) => {
                let version = Version { timestamp: shown.ts, writer: shown.txn.name() };
                return Judged::Value(Read { value: value.clone(), version });
            }
            What::Aborted | What::Functor => {}
        }
    }
    let holds = |(_, shown): &&(NodeId, &Shown)| shown.what == What::Functor;
    Judged::Functor(held.iter().filter(holds).map(|(node, _)| *node).collect())
}

/// Algorithm 3 as printed: of each replica's newest versions, the newest one that a replica has
/// finalized or a majority has stored. Unsafe (V1, V2); for tests.
fn match_newest(said: &OrdMap<NodeId, Said>) -> Verdict {
    let mut versions: OrdMap<Timestamp, Vec<(NodeId, &Shown)>> = OrdMap::new();
    let mut settled: Option<&Read> = None;
    for (&node, said) in said {
        match said.view.versions.first() {
            Some(shown) => versions.entry(shown.ts).or_default().push((node, shown)),
            None => {
                let newest = settled.filter(|held| held.version > said.view.settled.version);
                settled = newest.or(Some(&said.view.settled));
            }
        }
    }
    let majority = said.len();
    for (&ts, held) in versions.iter().rev() {
        if settled.is_some_and(|read| read.version.timestamp > ts) {
            break;
        }
        if held.iter().any(|(_, shown)| shown.is_finalized) || held.len() >= majority {
            match judge(held, Mutations::default()) {
                Judged::Absent => {}
                Judged::Value(read) => return Verdict::Read(read),
                Judged::Functor(holders) => return Verdict::Resolve(ts, holders),
            }
        }
    }
    match (settled, versions.last_key_value()) {
        (Some(read), _) => Verdict::Read(read.clone()),
        (None, Some((&ts, _))) => Verdict::Lower(ts),
        (None, None) => Verdict::Read(Read::default()),
    }
}

#[cfg(test)]
mod tests {
    use orthodrome_core::id::{ClientId, TxnId};
    use orthodrome_core::rng::Rng;
    use orthodrome_core::txn::Value;

    use super::*;

    /// One replica's state of one version of the key.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    enum Has {
        Nothing,
        Tentative,
        Value,
        Tombstone,
    }

    const ALL: [Has; 4] = [Has::Nothing, Has::Tentative, Has::Value, Has::Tombstone];

    fn txn(ts: u64) -> TxnId {
        TxnId::new(ClientId(1), ts)
    }

    fn value(ts: u64) -> Option<Value> {
        Some(Value::from(ts.to_string()))
    }

    fn shown(ts: u64, has: Has) -> Option<Shown> {
        let what = match has {
            Has::Nothing => return None,
            Has::Tentative => What::Functor,
            Has::Value => What::Final(value(ts)),
            Has::Tombstone => What::Aborted,
        };
        Some(Shown { ts: Timestamp(ts), ballot: 0, txn: txn(ts), is_finalized: true, what })
    }

    /// The states that replicas can be in when a version is below the Vwatermark.
    fn is_possible(has: &[Has], is_committed: bool, f: usize) -> bool {
        let count = |wanted: Has| has.iter().filter(|&&has| has == wanted).count();
        let stored = count(Has::Tentative) + count(Has::Value);
        if is_committed {
            stored > f && count(Has::Tombstone) == 0
        } else {
            // Values are computed only of committed versions. But a replica that does not know of
            // the abort may have computed one nevertheless.
            count(Has::Tombstone) > f
        }
    }

    /// One replica's answer: its newest `limit` versions, and tombstones between them.
    fn said(versions: &[Option<Shown>], limit: usize, settled: &Read, replicated: u64) -> Said {
        let mut view =
            View { versions: Vec::new(), complete_from: Timestamp::ZERO, settled: settled.clone() };
        let mut present = 0;
        for shown in versions.iter().rev().flatten() {
            if present == limit {
                let last = view.versions.last().map(|shown: &Shown| shown.ts);
                view.complete_from = last.unwrap_or_default();
                view.settled = Read::default();
                break;
            }
            present += usize::from(shown.what != What::Aborted);
            view.versions.push(shown.clone());
        }
        Said { replicated: Timestamp(replicated), view }
    }

    /// Reads until a value is found, as a reader does.
    fn resolve(replicas: &[Vec<Option<Shown>>], asked: &[usize], limit: usize) -> u64 {
        let settled =
            Read { value: value(1), version: Version { timestamp: Timestamp(1), writer: txn(1) } };
        let mut below = Timestamp::MAX;
        for _ in 0..20 {
            let answers = asked.iter().map(|&at| {
                let held = replicas[at]
                    .iter()
                    .filter(|held| held.as_ref().is_none_or(|shown| shown.ts < below));
                let held: Vec<_> = held.cloned().collect();
                (NodeId(u32::try_from(at).unwrap()), said(&held, limit, &settled, 2))
            });
            match read(&answers.collect(), Mutations::default()) {
                Verdict::Read(read) => return read.version.timestamp.0,
                Verdict::Resolve(ts, holders) => {
                    assert!(!holders.is_empty());
                    return ts.0;
                }
                Verdict::Lower(lower) => {
                    assert!(lower < below, "the reader goes round in circles");
                    below = lower;
                }
            }
        }
        unreachable!("no end")
    }

    fn subsets(of: usize, size: usize) -> Vec<Vec<usize>> {
        (0..1_usize << of)
            .filter(|set| set.count_ones() as usize == size)
            .map(|set| (0..of).filter(|at| set >> at & 1 == 1).collect())
            .collect()
    }

    fn check(states: &[(Vec<Has>, bool)], f: usize) -> usize {
        let replicas: Vec<Vec<Option<Shown>>> = (0..=2 * f)
            .map(|node| states.iter().zip(2..).map(|((has, _), ts)| shown(ts, has[node])).collect())
            .collect();
        let committed = states.iter().zip(2..).filter(|((_, is_committed), _)| *is_committed);
        let wanted = committed.last().map_or(1, |(_, ts)| ts);
        let mut checked = 0;
        for limit in [1, 2, 9] {
            for asked in subsets(2 * f + 1, f + 1) {
                let found = resolve(&replicas, &asked, limit);
                assert_eq!(found, wanted, "{states:?} asked {asked:?}, {limit} shown");
                checked += 1;
            }
        }
        checked
    }

    /// All states of one version at 2f + 1 replicas, with its decision.
    fn possible(f: usize) -> Vec<(Vec<Has>, bool)> {
        let replicas = 2 * f + 1;
        let mut all = Vec::new();
        for code in 0..ALL.len().pow(u32::try_from(replicas).unwrap()) {
            let digit =
                |at: usize| ALL[code / ALL.len().pow(u32::try_from(at).unwrap()) % ALL.len()];
            let has: Vec<Has> = (0..replicas).map(digit).collect();
            for is_committed in [false, true] {
                if is_possible(&has, is_committed, f) {
                    all.push((has.clone(), is_committed));
                }
            }
        }
        all
    }

    /// V1–V3 for f = 1: every state of three replicas for up to three versions, and every pair of
    /// answers.
    #[test]
    fn two_of_three_answers_tell_what_is_there() {
        let possible = possible(1);
        let mut checked = 0;
        for first in &possible {
            checked += check(std::slice::from_ref(first), 1);
            for second in &possible {
                checked += check(&[first.clone(), second.clone()], 1);
                for third in &possible {
                    checked += check(&[first.clone(), second.clone(), third.clone()], 1);
                }
            }
        }
        assert!(checked > 100_000, "only {checked} cases");
    }

    /// The same for f = 2, with random states.
    #[test]
    fn three_of_five_answers_tell_what_is_there() {
        let possible = possible(2);
        let mut rng = Rng::stream(1, "reading", 0);
        for _ in 0..5_000 {
            let count = 1 + rng.below(4);
            let states: Vec<_> =
                (0..count).map(|_| rng.pick(&possible).cloned().unwrap()).collect();
            check(&states, 2);
        }
    }

    /// A takeover stored, in a higher ballot, a version that its coordinator had begun to abort.
    #[test]
    fn the_highest_ballot_decides() {
        let version = |ballot, what| Shown {
            ts: Timestamp(5),
            ballot,
            txn: txn(5),
            is_finalized: false,
            what,
        };
        let answer = |shown: Shown| Said {
            replicated: Timestamp(2),
            view: View {
                versions: vec![shown],
                complete_from: Timestamp::ZERO,
                settled: Read::default(),
            },
        };
        let verdict = |a: (u64, What), b: (u64, What)| {
            let said =
                [(NodeId(1), answer(version(a.0, a.1))), (NodeId(2), answer(version(b.0, b.1)))];
            read(&said.into(), Mutations::default())
        };
        let there = verdict((0, What::Aborted), (3, What::Functor));
        assert_eq!(there, Verdict::Resolve(Timestamp(5), vec![NodeId(2)]));
        let gone = verdict((3, What::Aborted), (0, What::Functor));
        assert_eq!(gone, Verdict::Read(Read::default()));
    }

    /// The mistakes of Algorithm 3: an aborted version that one replica had finalized is read (V1),
    /// and a committed one is hidden by an aborted one whose abort a replica does not know (V2).
    #[test]
    fn the_printed_rule_reads_what_is_aborted_and_skips_what_is_committed() {
        let version = |ts, is_finalized, what| Shown {
            ts: Timestamp(ts),
            ballot: 0,
            txn: txn(ts),
            is_finalized,
            what,
        };
        let settled =
            Read { value: value(1), version: Version { timestamp: Timestamp(1), writer: txn(1) } };
        let answer = |versions: &[Shown]| Said {
            replicated: Timestamp(2),
            view: View {
                versions: versions.to_vec(),
                complete_from: Timestamp::ZERO,
                settled: settled.clone(),
            },
        };
        let verdict = |a: &[Shown], b: &[Shown], mutations| {
            read(&[(NodeId(1), answer(a)), (NodeId(2), answer(b))].into(), mutations)
        };
        let (gone, functor) = (What::Aborted, What::Functor);
        // One has the tombstone; the other knows only that a majority had stored the version.
        let a = [version(5, false, gone.clone())];
        let b = [version(5, true, functor.clone())];
        let enabled = |name| {
            let mut mutations = Mutations::default();
            mutations.enable(name);
            mutations
        };
        let believing = enabled("V1");
        let found = Verdict::Resolve(Timestamp(5), vec![NodeId(2)]);
        assert_eq!(verdict(&a, &b, believing), found);
        assert_eq!(verdict(&a, &b, Mutations::default()), Verdict::Read(settled.clone()));
        // One lacks version 5 and has the tombstone of 7; the other has both.
        let a = [version(7, false, gone)];
        let b = [version(7, false, functor.clone()), version(5, true, functor)];
        let newest = enabled("V2");
        // Such replicas show the newest version only, and no tombstones.
        assert_eq!(verdict(&[], &b[..1], newest), Verdict::Read(settled.clone()));
        assert_eq!(verdict(&a, &b, Mutations::default()), found);
    }

    /// Below a replica's Rwatermark, other replicas may have forgotten that a version is aborted.
    #[test]
    fn who_has_come_furthest_knows_what_is_settled() {
        let settled =
            Read { value: value(1), version: Version { timestamp: Timestamp(1), writer: txn(1) } };
        let behind = said(&[shown(5, Has::Tombstone)], 9, &Read::default(), 2);
        let stale = said(&[shown(5, Has::Tentative)], 9, &Read::default(), 2);
        let ahead = said(&[], 9, &settled, 9);
        for other in [behind, stale] {
            let said = OrdMap::from([(NodeId(1), other), (NodeId(2), ahead.clone())]);
            assert_eq!(read(&said, Mutations::default()), Verdict::Read(settled.clone()));
        }
    }
}
