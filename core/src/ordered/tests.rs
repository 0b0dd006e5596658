//! Every function does what that of the standard library does.

#![allow(clippy::disallowed_types, reason = "it compares with the standard library")]

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{Hash as _, Hasher as _};
use std::ops::Bound;

use proptest::collection::vec;
use proptest::prelude::*;

use super::{Entry, OrdMap, OrdSet};

/// A value so large that a list has eight entries: a few hundred entries make many lists.
type Large = [u64; 40];

#[derive(Clone, Copy, Debug)]
enum Act {
    Insert(u16),
    Remove(u16),
    EntryOf(u16),
    RemoveEntry(u16),
    PopFirst,
    PopLast,
    Keep(u16),
    Extract(u16, u16),
    SplitOff(u16),
    AppendTo(u16),
    Range(u16, u16),
    Clear,
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let key = || 0..300_u16;
    let act = prop_oneof![
        60 => key().prop_map(Act::Insert),
        20 => key().prop_map(Act::Remove),
        10 => key().prop_map(Act::EntryOf),
        5 => key().prop_map(Act::RemoveEntry),
        5 => Just(Act::PopFirst),
        5 => Just(Act::PopLast),
        1 => (2..9_u16).prop_map(Act::Keep),
        1 => (key(), key()).prop_map(|(a, b)| Act::Extract(a, b)),
        1 => key().prop_map(Act::SplitOff),
        1 => key().prop_map(Act::AppendTo),
        5 => (key(), key()).prop_map(|(a, b)| Act::Range(a, b)),
        1 => Just(Act::Clear),
    ];
    vec(act, 0..900)
}

fn large(value: u64) -> Large {
    [value; 40]
}

/// The bounds of a range in all forms that do not end before they begin.
fn bounds(a: u16, b: u16) -> Vec<(Bound<u16>, Bound<u16>)> {
    let (a, b) = (a.min(b), a.max(b));
    let mut all = vec![
        (Bound::Included(a), Bound::Included(b)),
        (Bound::Included(a), Bound::Excluded(b)),
        (Bound::Excluded(a), Bound::Included(b)),
        (Bound::Unbounded, Bound::Excluded(b)),
        (Bound::Excluded(a), Bound::Unbounded),
        (Bound::Unbounded, Bound::Unbounded),
    ];
    if a < b {
        all.push((Bound::Excluded(a), Bound::Excluded(b)));
    }
    all
}

/// No list is empty or too long, and the count is right.
fn check(map: &OrdMap<u16, Large>) {
    let lists = map.lists();
    assert!(lists.len() == 1 || lists.iter().all(|list| !list.is_empty()));
    assert!(lists.iter().all(|list| list.len() <= OrdMap::<u16, Large>::MOST));
    assert_eq!(lists.iter().map(Vec::len).sum::<usize>(), map.len());
    assert!(map.keys().is_sorted_by(|a, b| a < b));
}

fn act(act: Act, number: u64, map: &mut OrdMap<u16, Large>, model: &mut BTreeMap<u16, Large>) {
    match act {
        Act::Insert(key) => {
            assert_eq!(map.insert(key, large(number)), model.insert(key, large(number)));
        }
        Act::Remove(key) => assert_eq!(map.remove(&key), model.remove(&key)),
        Act::RemoveEntry(key) => assert_eq!(map.remove_entry(&key), model.remove_entry(&key)),
        Act::EntryOf(key) => {
            let own = map.entry(key).and_modify(|value| *value = large(1)).or_insert(large(number));
            let other =
                model.entry(key).and_modify(|value| *value = large(1)).or_insert(large(number));
            assert_eq!(own, other);
            if number.is_multiple_of(3)
                && let Entry::Occupied(mut entry) = map.entry(key)
            {
                assert_eq!(entry.insert(large(7)), *other);
                assert_eq!(entry.remove_entry(), (key, large(7)));
                model.remove(&key);
            }
        }
        Act::PopFirst if number.is_multiple_of(2) => {
            let own = map.first_entry().map(|entry| (*entry.key(), entry.remove()));
            assert_eq!(own, model.pop_first());
        }
        Act::PopFirst => assert_eq!(map.pop_first(), model.pop_first()),
        Act::PopLast => assert_eq!(map.pop_last(), model.pop_last()),
        Act::Keep(part) => {
            map.retain(|key, _| !key.is_multiple_of(part));
            model.retain(|key, _| !key.is_multiple_of(part));
        }
        Act::Extract(a, b) => {
            let range = a.min(b)..a.max(b);
            let own: Vec<_> = map.extract_if(range.clone(), |key, _| key % 3 > 0).collect();
            let other: Vec<_> = model.extract_if(range, |key, _| key % 3 > 0).collect();
            assert_eq!(own, other);
        }
        Act::SplitOff(key) => {
            let (own, other) = (map.split_off(&key), model.split_off(&key));
            check(&own);
            assert!(own.iter().eq(&other));
            assert_eq!(own.len(), other.len());
        }
        Act::AppendTo(key) => {
            let (mut own, mut other) = (map.split_off(&key), model.split_off(&key));
            own.append(map);
            other.append(model);
            (*map, *model) = (own, other);
        }
        Act::Range(a, b) => {
            for range in bounds(a, b) {
                assert!(map.range(range).eq(model.range(range)));
                assert!(map.range(range).rev().eq(model.range(range).rev()));
                assert_eq!(map.range(range).len(), model.range(range).count());
                // From both ends at once.
                let (mut own, mut other) = (map.range(range), model.range(range));
                while let Some(entry) = other.next() {
                    assert_eq!(own.next(), Some(entry));
                    assert_eq!(own.next_back(), other.next_back());
                }
                assert_eq!((own.next(), own.next_back()), (None, None));
                for (_, value) in map.range_mut(range) {
                    value[1] += 1;
                }
                for (_, value) in model.range_mut(range) {
                    value[1] += 1;
                }
                assert!(
                    map.range_mut(range)
                        .rev()
                        .map(|(key, _)| *key)
                        .eq(model.range_mut(range).rev().map(|(key, _)| *key))
                );
            }
        }
        Act::Clear => {
            map.clear();
            model.clear();
        }
    }
}

proptest! {
    #[test]
    fn a_map_is_like_that_of_the_standard_library(acts in acts()) {
        let (mut map, mut model) = (OrdMap::new(), BTreeMap::new());
        for (number, what) in (0..).zip(acts) {
            act(what, number, &mut map, &mut model);
            check(&map);
            prop_assert_eq!(map.len(), model.len());
            prop_assert_eq!(map.first_key_value(), model.first_key_value());
            prop_assert_eq!(map.last_key_value(), model.last_key_value());
        }
        for key in 0..300 {
            prop_assert_eq!(map.get(&key), model.get(&key));
            prop_assert_eq!(map.get_key_value(&key), model.get_key_value(&key));
            prop_assert_eq!(map.get_mut(&key), model.get_mut(&key));
        }
        prop_assert!(map.iter().eq(&model));
        prop_assert!(map.iter_mut().rev().map(|(key, _)| *key).eq(model.keys().rev().copied()));
        prop_assert!(map.values().eq(model.values()));
        prop_assert_eq!((map.keys().min(), map.keys().max()), (model.keys().min(), model.keys().max()));
        prop_assert_eq!((map.iter().last(), map.values().last()), (model.iter().last(), model.values().last()));
        prop_assert_eq!(map.keys().count(), model.len());
        prop_assert_eq!(format!("{map:?}"), format!("{model:?}"));
        prop_assert_eq!(&map, &model.clone().into_iter().collect::<OrdMap<_, _>>());
        prop_assert!(map.clone().into_iter().rev().eq(model.clone().into_iter().rev()));
        prop_assert_eq!(map.clone().into_iter().len(), model.len());
        prop_assert!(map.into_iter().eq(model));
    }

    #[test]
    fn a_set_is_like_that_of_the_standard_library(
        a in vec(0..60_u16, 0..50),
        b in vec(0..60_u16, 0..50),
        at in 0..60_u16,
    ) {
        let own: [OrdSet<u16>; 2] = [a.iter().copied().collect(), b.iter().copied().collect()];
        let model: [BTreeSet<u16>; 2] = [a.into_iter().collect(), b.into_iter().collect()];
        let ([own, own_other], [model, model_other]) = (&own, &model);
        prop_assert!(own.iter().eq(model));
        prop_assert!(own.union(own_other).eq(model.union(model_other)));
        prop_assert!(own.difference(own_other).eq(model.difference(model_other)));
        prop_assert!(own.intersection(own_other).eq(model.intersection(model_other)));
        prop_assert_eq!(own.is_subset(own_other), model.is_subset(model_other));
        prop_assert_eq!(own.is_superset(own_other), model.is_superset(model_other));
        prop_assert_eq!(own.is_disjoint(own_other), model.is_disjoint(model_other));
        prop_assert_eq!(own.cmp(own_other), model.cmp(model_other));
        prop_assert_eq!((own.first(), own.last()), (model.first(), model.last()));
        prop_assert_eq!((own.get(&at), own.contains(&at)), (model.get(&at), model.contains(&at)));
        prop_assert!(own.range(at..).eq(model.range(at..)));
        let (mut own, mut model) = (own.clone(), model.clone());
        prop_assert!(own.split_off(&at).into_iter().eq(model.split_off(&at)));
        own.extend(own_other);
        model.extend(model_other);
        prop_assert_eq!(own.take(&at), model.take(&at));
        prop_assert_eq!((own.pop_first(), own.pop_last()), (model.pop_first(), model.pop_last()));
        let taken = |element: &u16| element.is_multiple_of(3);
        prop_assert!(own.extract_if(at.., taken).eq(model.extract_if(at.., taken)));
        own.retain(|element| element % 5 > 0);
        model.retain(|element| element % 5 > 0);
        prop_assert_eq!(own.len(), model.len());
        prop_assert!(own.into_iter().rev().eq(model.into_iter().rev()));
    }
}

#[test]
fn entries_that_arrive_in_order_fill_lists() {
    let map: OrdMap<u64, Large> = (0..800).map(|key| (key, large(key))).collect();
    assert_eq!(map.lists().len(), 800 / OrdMap::<u64, Large>::MOST);
}

#[test]
fn lists_that_are_nearly_empty_are_merged() {
    let mut map: OrdMap<u64, Large> = (0..800).map(|key| (key, large(key))).collect();
    map.retain(|key, _| key.is_multiple_of(10));
    assert_eq!(map.lists().len(), 80 / OrdMap::<u64, Large>::MOST);
    // One entry of each list goes after the other, so that none is empty for long.
    let mut map: OrdMap<u64, Large> = (0..800).map(|key| (key, large(key))).collect();
    for part in 1..OrdMap::<u64, Large>::MOST as u64 {
        for key in (part..800).step_by(OrdMap::<u64, Large>::MOST) {
            assert_eq!(map.remove(&key), Some(large(key)));
        }
    }
    assert_eq!(map.len(), 800 / OrdMap::<u64, Large>::MOST);
    assert!(map.lists().len() <= 50, "{} lists for {} entries", map.lists().len(), map.len());
}

#[test]
fn maps_with_the_same_entries_are_equal_however_they_are_split() {
    let hash = |map: &OrdMap<u64, Large>| {
        let mut state = std::hash::DefaultHasher::new();
        map.hash(&mut state);
        state.finish()
    };
    let ascending: OrdMap<u64, Large> = (0..100).map(|key| (key, large(key))).collect();
    let descending: OrdMap<u64, Large> = (0..100).rev().map(|key| (key, large(key))).collect();
    assert_ne!(ascending.lists().len(), descending.lists().len());
    assert_eq!(ascending, descending);
    assert_eq!(hash(&ascending), hash(&descending));
    assert_eq!(ascending[&7], large(7));
}
