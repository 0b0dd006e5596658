//! Functions of the table library.

use super::{Functions, count, number, one};
use crate::heap::Stop;
use crate::value::{TableId, Value};
use crate::vm::{Args, Results, Vm};

pub(super) const FUNCTIONS: Functions = &[
    ("concat", concat),
    ("foreach", foreach),
    ("foreachi", foreachi),
    ("getn", getn),
    ("insert", insert),
    ("maxn", maxn),
    ("remove", remove),
    ("sort", sort),
];

fn key(position: i64) -> Value {
    #[expect(clippy::cast_precision_loss, reason = "positions of elements are small")]
    let key = Value::Number(position as f64);
    key
}

fn length(vm: &Vm<'_>, table: TableId) -> i64 {
    i64::try_from(vm.heap.table_length(table)).unwrap_or(i64::MAX)
}

fn concat(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    let table = vm.table_arg(args, 0)?;
    let between = if vm.arg(args, 1).is_nil() { None } else { Some(vm.string_arg(args, 1)?) };
    let first = vm.integer_or(args, 2, 1)?;
    let last = vm.integer_or(args, 3, length(vm, table))?;
    let mut whole = Vec::new();
    let mut at = first;
    while at <= last {
        vm.heap.charge(4)?;
        let value = vm.heap.get(table, key(at))?;
        let Some(text) = vm.text_of(value)? else {
            let kind = value.type_name();
            return Err(
                vm.error(&format!("invalid value ({kind}) at index {at} in table for 'concat'"))
            );
        };
        let text = vm.heap.bytes(text);
        vm.heap.charge_length(text.len())?;
        whole.extend_from_slice(&text);
        if let Some(between) = between.as_ref().filter(|_| at < last) {
            vm.heap.charge_length(between.len())?;
            whole.extend_from_slice(between);
        }
        let Some(next) = at.checked_add(1) else { break };
        at = next;
    }
    one(vm.heap.text(&whole)?)
}

fn foreach(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    let table = vm.table_arg(args, 0)?;
    let function = vm.arg(args, 1);
    let mut key = Value::Nil;
    while let Some(Some((next, value))) = vm.heap.next(table, key)? {
        let results = vm.call(function, &[next, value])?;
        if let Some(first) = results.first().filter(|first| !first.is_nil()) {
            return one(*first);
        }
        key = next;
    }
    Ok(Results::None)
}

fn foreachi(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    let table = vm.table_arg(args, 0)?;
    let function = vm.arg(args, 1);
    for at in 1..=vm.heap.table_length(table) {
        let value = vm.heap.element(table, at);
        let results = vm.call(function, &[count(at), value])?;
        if let Some(first) = results.first().filter(|first| !first.is_nil()) {
            return one(*first);
        }
    }
    Ok(Results::None)
}

fn getn(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    let table = vm.table_arg(args, 0)?;
    one(count(vm.heap.table_length(table)))
}

fn maxn(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    let table = vm.table_arg(args, 0)?;
    let size = vm.heap.table(table).map_or(0, crate::table::Table::size);
    vm.heap.charge_length(4 * size)?;
    number(vm.heap.table(table).map_or(0.0, crate::table::Table::largest))
}

fn insert(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    let table = vm.table_arg(args, 0)?;
    let end = length(vm, table) + 1;
    match args.count {
        2 => {
            let value = vm.arg(args, 1);
            vm.raw_set(table, key(end), value)?;
        }
        3 => {
            let (position, value) = (vm.integer_arg(args, 1)?, vm.arg(args, 2));
            for at in (position.max(i64::MIN + 1)..end).rev() {
                vm.heap.charge(8)?;
                let moved = vm.heap.get(table, key(at))?;
                vm.raw_set(table, key(at + 1), moved)?;
            }
            vm.raw_set(table, key(position), value)?;
        }
        _ => return Err(vm.error("wrong number of arguments to 'insert'")),
    }
    Ok(Results::None)
}

fn remove(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    let table = vm.table_arg(args, 0)?;
    let end = length(vm, table);
    let position = vm.integer_or(args, 1, end)?;
    if position < 1 || position > end {
        return Ok(Results::None);
    }
    let removed = vm.heap.get(table, key(position))?;
    for at in position..end {
        vm.heap.charge(8)?;
        let moved = vm.heap.get(table, key(at + 1))?;
        vm.raw_set(table, key(at), moved)?;
    }
    vm.raw_set(table, key(end), Value::Nil)?;
    one(removed)
}

/// Sorts as Lua 5.1 does, so that equal elements come in the same order as there.
fn sort(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    let table = vm.table_arg(args, 0)?;
    let function = vm.arg(args, 1);
    if !function.is_nil() && !function.is_function() {
        return Err(vm.wrong_type(args, 1, "function"));
    }
    let last = length(vm, table);
    Sort { table, function }.part(vm, 1, last)?;
    Ok(Results::None)
}

struct Sort {
    table: TableId,
    function: Value,
}

impl Sort {
    fn get(&self, vm: &mut Vm<'_>, at: i64) -> Result<Value, Stop> {
        vm.heap.charge(4)?;
        vm.heap.get(self.table, key(at))
    }

    fn set(&self, vm: &mut Vm<'_>, at: i64, value: Value) -> Result<(), Stop> {
        vm.raw_set(self.table, key(at), value)
    }

    fn less(&self, vm: &mut Vm<'_>, left: Value, right: Value) -> Result<bool, Stop> {
        if self.function.is_nil() {
            return vm.less(left, right);
        }
        let results = vm.call(self.function, &[left, right])?;
        Ok(results.first().is_some_and(|first| first.is_true()))
    }

    /// Puts the smaller of two elements first.
    fn order(&self, vm: &mut Vm<'_>, low: i64, high: i64) -> Result<(), Stop> {
        let (first, second) = (self.get(vm, low)?, self.get(vm, high)?);
        if self.less(vm, second, first)? {
            self.set(vm, low, second)?;
            self.set(vm, high, first)?;
        }
        Ok(())
    }

    /// Sorts the elements from `low` to `high`. It calls itself for the smaller part only.
    fn part(&self, vm: &mut Vm<'_>, mut low: i64, mut high: i64) -> Result<(), Stop> {
        while low < high {
            self.order(vm, low, high)?;
            if high - low == 1 {
                break;
            }
            let middle = low + (high - low) / 2;
            let (pivot, first) = (self.get(vm, middle)?, self.get(vm, low)?);
            if self.less(vm, pivot, first)? {
                self.set(vm, middle, first)?;
                self.set(vm, low, pivot)?;
            } else {
                let last = self.get(vm, high)?;
                if self.less(vm, last, pivot)? {
                    self.set(vm, middle, last)?;
                    self.set(vm, high, pivot)?;
                }
            }
            if high - low == 2 {
                break;
            }
            let pivot = self.get(vm, middle)?;
            let beside = self.get(vm, high - 1)?;
            self.set(vm, middle, beside)?;
            self.set(vm, high - 1, pivot)?;
            let split = self.split(vm, pivot, low, high)?;
            if split - low < high - split {
                self.part(vm, low, split - 1)?;
                low = split + 1;
            } else {
                self.part(vm, split + 1, high)?;
                high = split - 1;
            }
        }
        Ok(())
    }

    /// Puts what is less than the pivot before it, and the rest after it; where the pivot is then.
    fn split(&self, vm: &mut Vm<'_>, pivot: Value, low: i64, high: i64) -> Result<i64, Stop> {
        let (mut left, mut right) = (low, high - 1);
        loop {
            left += 1;
            let mut first = self.get(vm, left)?;
            while self.less(vm, first, pivot)? {
                if left >= high {
                    return Err(vm.error("invalid order function for sorting"));
                }
                left += 1;
                first = self.get(vm, left)?;
            }
            right -= 1;
            let mut second = self.get(vm, right)?;
            while self.less(vm, pivot, second)? {
                if right <= low {
                    return Err(vm.error("invalid order function for sorting"));
                }
                right -= 1;
                second = self.get(vm, right)?;
            }
            if right < left {
                break;
            }
            self.set(vm, left, second)?;
            self.set(vm, right, first)?;
        }
        let (first, second) = (self.get(vm, high - 1)?, self.get(vm, left)?);
        self.set(vm, high - 1, second)?;
        self.set(vm, left, first)?;
        Ok(left)
    }
}
