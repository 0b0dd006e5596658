//! Functions of the string library.

use super::{Functions, count, format, one, pattern};
use crate::heap::Stop;
use crate::value::Value;
use crate::vm::{Args, Results, Vm};

pub(super) const FUNCTIONS: Functions = &[
    ("byte", byte),
    ("char", char),
    ("find", |vm, args| pattern::find(vm, args, true)),
    ("format", format::format),
    ("gfind", pattern::gmatch),
    ("gmatch", pattern::gmatch),
    ("gsub", pattern::gsub),
    ("len", len),
    ("lower", |vm, args| map(vm, args, |bytes| bytes.make_ascii_lowercase())),
    ("match", |vm, args| pattern::find(vm, args, false)),
    ("rep", rep),
    ("reverse", |vm, args| map(vm, args, <[u8]>::reverse)),
    ("sub", sub),
    ("upper", |vm, args| map(vm, args, |bytes| bytes.make_ascii_uppercase())),
];

/// The position from 0 of a position from 1, or from the end if it is negative.
pub(super) fn start(position: i64, length: usize) -> usize {
    let length = i64::try_from(length).unwrap_or(i64::MAX);
    let position = if position < 0 { length.saturating_add(position) } else { position - 1 };
    usize::try_from(position.clamp(0, length)).unwrap_or(0)
}

/// The end from 0 of a part whose last position this is.
fn end(position: i64, length: usize) -> usize {
    let whole = i64::try_from(length).unwrap_or(i64::MAX);
    let position =
        if position < 0 { whole.saturating_add(position).saturating_add(1) } else { position };
    usize::try_from(position.clamp(0, whole)).unwrap_or(0)
}

fn byte(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    let text = vm.string_arg(args, 0)?;
    let first = vm.integer_or(args, 1, 1)?;
    let last = vm.integer_or(args, 2, first)?;
    let (from, to) = (start(first, text.len()), end(last, text.len()));
    if from >= to || first == 0 && args.count < 3 {
        return Ok(Results::None);
    }
    if to - from > 8_000 {
        return Err(vm.error("string slice too long"));
    }
    vm.heap.charge_length(4 * (to - from))?;
    let bytes = text.get(from..to).unwrap_or_default();
    Ok(Results::Many(bytes.iter().map(|byte| Value::Number(f64::from(*byte))).collect()))
}

fn char(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    let mut bytes = Vec::new();
    for at in 0..args.count {
        let code = vm.integer_arg(args, at)?;
        let Ok(byte) = u8::try_from(code) else {
            return Err(vm.bad_arg(args, at, "invalid value"));
        };
        bytes.push(byte);
    }
    one(vm.heap.text(&bytes)?)
}

fn len(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    let text = vm.string_arg(args, 0)?;
    one(count(text.len()))
}

fn map(vm: &mut Vm<'_>, args: Args, change: fn(&mut [u8])) -> Result<Results, Stop> {
    let text = vm.string_arg(args, 0)?;
    vm.heap.charge_length(text.len())?;
    let mut bytes = text.to_vec();
    change(&mut bytes);
    one(vm.heap.text(&bytes)?)
}

fn rep(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    let text = vm.string_arg(args, 0)?;
    let many = usize::try_from(vm.integer_arg(args, 1)?).unwrap_or(0);
    // Counted before it is made. The bytes of the new string count once more.
    vm.heap.charge_length(text.len().saturating_mul(many).saturating_mul(2))?;
    one(vm.heap.text(&text.repeat(if text.is_empty() { 0 } else { many }))?)
}

fn sub(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    let text = vm.string_arg(args, 0)?;
    let first = vm.integer_arg(args, 1)?;
    let last = vm.integer_or(args, 2, -1)?;
    let part = text.get(start(first.max(i64::MIN + 1), text.len())..end(last, text.len()));
    one(vm.heap.text(part.unwrap_or_default())?)
}
