//! Tables: an array from 1, and other keys in the order in which they were added.

use crate::index::Index;
use crate::value::{TableId, Value};

/// Up to this number of entries are searched one after the other.
const SCANNED_MAX: usize = 8;

/// A table.
#[derive(Debug, Default)]
pub(crate) struct Table {
    /// The values of the keys from 1. The last one is not nil; the key after it is not in `entries`.
    array: Vec<Value>,
    /// All other keys. An entry whose value is nil is not there, and keeps its position for `next`.
    entries: Vec<(Value, Value)>,
    /// Finds the entries if there are many.
    index: Index,
    pub(crate) meta: Option<TableId>,
    pub(crate) is_read_only: bool,
}

/// What a change of a table costs.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Cost {
    /// Steps of searches.
    pub(crate) steps: u64,
    /// Bytes for new entries.
    pub(crate) bytes: u64,
}

/// The bytes that one more value in the array counts.
const ARRAY_BYTES: u64 = 32;
/// The bytes that one more entry counts.
const ENTRY_BYTES: u64 = 80;

/// The position in an array of a key.
fn position(key: Value) -> Option<usize> {
    let Value::Number(number) = key else { return None };
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "compared below")]
    let whole = number as usize;
    #[expect(clippy::cast_precision_loss, reason = "numbers that differ are no positions")]
    let is_whole = whole as f64 == number;
    (is_whole && whole <= u32::MAX as usize).then(|| whole.checked_sub(1)).flatten()
}

fn number(position: usize) -> Value {
    Value::Number(f64::from(u32::try_from(position + 1).unwrap_or(u32::MAX)))
}

impl Table {
    /// The number of elements from 1 that are there one after the other, or so if some are missing.
    pub(crate) fn len(&self) -> usize {
        self.array.len()
    }

    fn find(&self, key: Value) -> (Option<usize>, u64) {
        if self.entries.len() <= SCANNED_MAX {
            return (self.entries.iter().position(|(own, _)| *own == key), 0);
        }
        let is_wanted = |at: u32| self.entries.get(at as usize).is_some_and(|(own, _)| *own == key);
        let (found, steps) = self.index.find(key.hash(), is_wanted);
        (found.map(|at| at as usize), steps)
    }

    /// The value of a key, and the steps of the search.
    pub(crate) fn get(&self, key: Value) -> (Value, u64) {
        if let Some(at) = position(key)
            && let Some(value) = self.array.get(at)
        {
            return (*value, 0);
        }
        if self.entries.is_empty() {
            return (Value::Nil, 0);
        }
        let (found, steps) = self.find(key);
        let entry = found.and_then(|at| self.entries.get(at));
        (entry.map_or(Value::Nil, |(_, value)| *value), steps)
    }

    /// The element at this position, from 1.
    pub(crate) fn at(&self, position: usize) -> Value {
        let Some(at) = position.checked_sub(1) else { return Value::Nil };
        match self.array.get(at) {
            Some(value) => *value,
            None => self.get(number(at)).0,
        }
    }

    /// Sets a key, which is neither nil nor NaN.
    pub(crate) fn set(&mut self, key: Value, value: Value) -> Cost {
        let mut cost = Cost::default();
        if let Some(at) = position(key) {
            let length = self.array.len();
            if let Some(own) = self.array.get_mut(at) {
                *own = value;
                if value.is_nil() && at + 1 == length {
                    self.drop_last();
                }
                return cost;
            }
            if at == length {
                if !value.is_nil() {
                    cost.bytes += ARRAY_BYTES;
                    self.array.push(value);
                    self.adopt(&mut cost);
                }
                return cost;
            }
        }
        let (found, steps) = self.find(key);
        cost.steps += steps;
        match found.and_then(|at| self.entries.get_mut(at)) {
            Some((_, own)) => *own = value,
            None if value.is_nil() => {}
            None => {
                cost.bytes += ENTRY_BYTES;
                self.add(key, value, &mut cost);
            }
        }
        cost
    }

    /// Drops the values at the end of the array that are nil.
    fn drop_last(&mut self) {
        while self.array.last().is_some_and(|last| last.is_nil()) {
            self.array.pop();
        }
    }

    /// Moves entries that follow the array into it.
    fn adopt(&mut self, cost: &mut Cost) {
        while !self.entries.is_empty() {
            let (found, steps) = self.find(number(self.array.len()));
            cost.steps += steps;
            let Some((_, value)) = found.and_then(|at| self.entries.get_mut(at)) else { return };
            let value = std::mem::take(value);
            if value.is_nil() {
                return;
            }
            cost.bytes += ARRAY_BYTES;
            self.array.push(value);
        }
    }

    fn add(&mut self, key: Value, value: Value, cost: &mut Cost) {
        if self.entries.len() >= SCANNED_MAX && self.index.is_full() {
            self.entries.retain(|(_, value)| !value.is_nil());
            let count = u32::try_from(self.entries.len()).unwrap_or(u32::MAX);
            cost.steps += u64::from(count);
            let entries = &self.entries;
            self.index
                .rebuild(count, |at| entries.get(at as usize).map_or(0, |(key, _)| key.hash()));
        }
        let at = u32::try_from(self.entries.len()).unwrap_or(u32::MAX);
        self.entries.push((key, value));
        self.index.insert(key.hash(), at);
    }

    /// Sets the elements from `first`, which may be nil.
    pub(crate) fn set_list(&mut self, first: usize, values: &[Value]) -> Cost {
        if first == self.array.len() + 1 {
            let bytes = ARRAY_BYTES * values.len() as u64;
            let mut cost = Cost { steps: 0, bytes };
            self.array.extend_from_slice(values);
            self.drop_last();
            self.adopt(&mut cost);
            return cost;
        }
        let mut cost = Cost::default();
        for (at, value) in values.iter().enumerate() {
            let more = self.set(number(first - 1 + at), *value);
            cost.steps += more.steps;
            cost.bytes += more.bytes;
        }
        cost
    }

    /// The key after `key` and its value, and the steps of the search. Outside none if `key` is
    /// unknown, inside none at the end.
    #[allow(clippy::type_complexity, reason = "two reasons for none")]
    pub(crate) fn next(&self, key: Value) -> (Option<Option<(Value, Value)>>, u64) {
        let (mut entry, mut steps) = (0, 1);
        let array = match position(key) {
            _ if key.is_nil() => Some(0),
            Some(at) if at < self.array.len() => Some(at + 1),
            _ => {
                let (found, more) = self.find(key);
                steps += more;
                match found {
                    Some(at) => entry = at + 1,
                    // An element that was removed at the end of the array.
                    None if position(key).is_some() => {}
                    None => return (None, steps),
                }
                None
            }
        };
        if let Some(from) = array {
            let rest = self.array.get(from..).unwrap_or_default();
            if let Some(skipped) = rest.iter().position(|value| !value.is_nil()) {
                let value = rest.get(skipped).copied().unwrap_or_default();
                steps += skipped as u64;
                return (Some(Some((number(from + skipped), value))), steps);
            }
            steps += rest.len() as u64;
        }
        let rest = self.entries.get(entry..).unwrap_or_default();
        let skipped = rest.iter().take_while(|(_, value)| value.is_nil()).count();
        steps += skipped as u64;
        (Some(rest.get(skipped).copied()), steps)
    }

    /// The largest number that is a key.
    pub(crate) fn largest(&self) -> f64 {
        let array = f64::from(u32::try_from(self.array.len()).unwrap_or(u32::MAX));
        let number = |(key, value): &(Value, Value)| match key {
            Value::Number(number) if !value.is_nil() => Some(*number),
            _ => None,
        };
        self.entries.iter().filter_map(number).fold(array, f64::max)
    }

    /// The number of entries, whether they are there or not.
    pub(crate) fn size(&self) -> usize {
        self.array.len() + self.entries.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn num(number: u32) -> Value {
        Value::Number(f64::from(number))
    }

    fn keys(table: &Table) -> Vec<Value> {
        let (mut keys, mut key) = (Vec::new(), Value::Nil);
        while let (Some(Some((next, _))), _) = table.next(key) {
            keys.push(next);
            key = next;
        }
        keys
    }

    #[test]
    fn keys_come_in_the_order_of_their_insertion_after_the_array() {
        let mut table = Table::default();
        for key in [30, 3, 20, 2, 1, 10] {
            table.set(num(key), Value::Boolean(true));
        }
        assert_eq!(table.len(), 3);
        assert_eq!(keys(&table), [1, 2, 3, 30, 20, 10].map(num));
        table.set(num(20), Value::Nil);
        table.set(num(3), Value::Nil);
        assert_eq!(table.len(), 2);
        assert_eq!(keys(&table), [1, 2, 30, 10].map(num));
    }

    #[test]
    fn a_table_may_be_emptied_while_it_is_traversed() {
        let mut table = Table::default();
        for key in (1..=20).chain(100..=130) {
            table.set(num(key), num(key));
        }
        let (mut seen, mut key) = (0, Value::Nil);
        while let (Some(Some((next, _))), _) = table.next(key) {
            table.set(next, Value::Nil);
            (key, seen) = (next, seen + 1);
        }
        assert_eq!((seen, table.len()), (51, 0));
        assert_eq!(table.next(Value::Boolean(true)).0, None, "an unknown key");
    }

    #[test]
    fn many_keys_are_found_after_changes() {
        let mut table = Table::default();
        #[allow(clippy::disallowed_types, reason = "it compares with the standard library")]
        let mut model = std::collections::BTreeMap::new();
        let mut state = 1_u64;
        for _ in 0..20_000 {
            state = crate::value::mix(state);
            let key = u32::try_from(state % 500).unwrap();
            let value = if state.is_multiple_of(3) { Value::Nil } else { num(key) };
            table.set(num(key), value);
            model.insert(key, value);
        }
        for (key, value) in model {
            assert_eq!(table.get(num(key)).0, value, "{key}");
        }
        assert!(table.get(num(table.len() as u32 + 1)).0.is_nil());
    }
}
