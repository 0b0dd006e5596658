//! Functions of the base library.

use super::{Functions, NEXT_ELEMENT, count, one};
use crate::heap::Stop;
use crate::number;
use crate::value::Value;
use crate::vm::{Args, Results, Vm};

pub(super) const FUNCTIONS: Functions = &[
    ("assert", assert),
    ("error", error),
    ("getmetatable", getmetatable),
    ("ipairs", ipairs),
    ("loadstring", loadstring),
    ("next", next),
    ("pairs", pairs),
    ("pcall", pcall),
    ("rawequal", rawequal),
    ("rawget", rawget),
    ("rawset", rawset),
    ("select", select),
    ("setmetatable", setmetatable),
    ("tonumber", tonumber),
    ("tostring", tostring),
    ("type", type_of),
    ("unpack", unpack),
    ("xpcall", xpcall),
];

/// The most values that `unpack` returns, as in Lua 5.1.
const UNPACKED_MAX: i64 = 8_000;

fn assert(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    let value = vm.any_arg(args, 0)?;
    if value.is_true() {
        return Ok(Results::Many(vm.args(args, 0)));
    }
    if vm.arg(args, 1).is_nil() {
        return Err(vm.error("assertion failed!"));
    }
    let text = vm.string_arg(args, 1)?;
    Err(vm.error_at(1, &text))
}

fn error(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    let value = vm.arg(args, 0);
    let level = vm.integer_or(args, 1, 1)?;
    if let Value::String(text) = value
        && let Ok(level @ 1..) = usize::try_from(level)
    {
        let text = vm.heap.bytes(text);
        return Err(vm.error_at(level, &text));
    }
    Err(Stop::Error(value))
}

fn getmetatable(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    let value = vm.any_arg(args, 0)?;
    let Some(meta) = vm.metatable(value) else { return one(Value::Nil) };
    let protected = vm.heap.get(meta, vm.metas().meta)?;
    one(if protected.is_nil() { Value::Table(meta) } else { protected })
}

fn setmetatable(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    let table = vm.table_arg(args, 0)?;
    let meta = match vm.arg(args, 1) {
        Value::Nil if args.count > 1 => None,
        Value::Table(meta) => Some(meta),
        _ => return Err(vm.bad_arg(args, 1, "nil or table expected")),
    };
    let protected = vm.meta_of(Value::Table(table), vm.metas().meta)?;
    if !protected.is_nil() {
        return Err(vm.error("cannot change a protected metatable"));
    }
    if vm.heap.is_read_only(table) {
        return Err(vm.error("Attempt to modify a readonly table"));
    }
    vm.heap.set_meta(table, meta);
    one(Value::Table(table))
}

fn ipairs(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    let table = vm.table_arg(args, 0)?;
    let begin = [Value::Native(NEXT_ELEMENT), Value::Table(table), Value::Number(0.0)];
    Ok(Results::Many(begin.to_vec()))
}

/// The next element of a list, for `ipairs`.
pub(super) fn next_element(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    let table = vm.table_arg(args, 0)?;
    let next = Value::Number(vm.number_arg(args, 1)? + 1.0);
    let value = vm.heap.get(table, next)?;
    if value.is_nil() { one(Value::Nil) } else { Ok(Results::Many(vec![next, value])) }
}

/// The function of a text. Its name in errors is its own.
fn loadstring(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    let text = vm.string_arg(args, 0)?;
    let line = text.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let part = String::from_utf8_lossy(line.get(..line.len().min(44)).unwrap_or_default());
    let dots = if part.len() < text.len() { "..." } else { "" };
    match vm.load_as(&text, &format!("[string \"{part}{dots}\"]")) {
        Ok(function) => one(function),
        Err(Stop::Error(why)) => Ok(Results::Many(vec![Value::Nil, why])),
        Err(Stop::Exhausted) => Err(Stop::Exhausted),
    }
}

fn next(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    let table = vm.table_arg(args, 0)?;
    let key = vm.arg(args, 1);
    match vm.heap.next(table, key)? {
        None => Err(vm.error("invalid key to 'next'")),
        Some(None) => one(Value::Nil),
        Some(Some((key, value))) => Ok(Results::Many(vec![key, value])),
    }
}

fn pairs(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    let table = vm.table_arg(args, 0)?;
    let globals = vm.globals();
    let next = vm.heap.field(globals, "next")?;
    Ok(Results::Many(vec![next, Value::Table(table), Value::Nil]))
}

/// The error that a script catches. As in Redis 7, it is the text of an error that a command
/// answered.
fn caught(vm: &mut Vm<'_>, error: Value) -> Result<Value, Stop> {
    let Value::Table(table) = error else { return Ok(error) };
    let text = vm.heap.field(table, "err")?;
    Ok(if matches!(text, Value::String(_) | Value::Number(_)) { text } else { error })
}

fn protected(
    vm: &mut Vm<'_>,
    function: Value,
    args: &[Value],
) -> Result<Result<Vec<Value>, Value>, Stop> {
    match vm.call(function, args) {
        Ok(mut results) => {
            results.insert(0, Value::Boolean(true));
            Ok(Ok(results))
        }
        Err(Stop::Error(error)) => {
            vm.forget_error();
            caught(vm, error).map(Err)
        }
        Err(Stop::Exhausted) => Err(Stop::Exhausted),
    }
}

fn pcall(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    let function = vm.any_arg(args, 0)?;
    let rest = vm.args(args, 1);
    let results = protected(vm, function, &rest)?;
    Ok(Results::Many(results.unwrap_or_else(|error| vec![Value::Boolean(false), error])))
}

fn xpcall(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    let function = vm.any_arg(args, 0)?;
    let handler = vm.arg(args, 1);
    match protected(vm, function, &[])? {
        Ok(results) => Ok(Results::Many(results)),
        Err(error) => match protected(vm, handler, &[error])? {
            Ok(mut results) => {
                if let Some(status) = results.first_mut() {
                    *status = Value::Boolean(false);
                }
                Ok(Results::Many(results))
            }
            // Lua says no more of an error that the handler itself has made.
            Err(_) => {
                let text = vm.heap.text(b"error in error handling")?;
                Ok(Results::Many(vec![Value::Boolean(false), text]))
            }
        },
    }
}

fn rawequal(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    let (left, right) = (vm.any_arg(args, 0)?, vm.any_arg(args, 1)?);
    one(Value::Boolean(left == right))
}

fn rawget(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    let table = vm.table_arg(args, 0)?;
    let key = vm.any_arg(args, 1)?;
    one(vm.heap.get(table, key)?)
}

fn rawset(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    let table = vm.table_arg(args, 0)?;
    let (key, value) = (vm.any_arg(args, 1)?, vm.any_arg(args, 2)?);
    vm.raw_set(table, key, value)?;
    one(Value::Table(table))
}

fn select(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    if let Value::String(text) = vm.arg(args, 0)
        && vm.heap.bytes(text).first() == Some(&b'#')
    {
        return one(count(args.count - 1));
    }
    let position = vm.integer_arg(args, 0)?;
    let length = i64::try_from(args.count).unwrap_or(i64::MAX);
    let first = if position < 0 { length.saturating_add(position) } else { position.min(length) };
    if first < 1 {
        return Err(vm.bad_arg(args, 0, "index out of range"));
    }
    vm.heap.charge_length(4 * args.count)?;
    Ok(Results::Many(vm.args(args, usize::try_from(first).unwrap_or(usize::MAX))))
}

fn tonumber(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    let value = vm.any_arg(args, 0)?;
    let base = vm.integer_or(args, 1, 10)?;
    if base == 10 {
        return one(vm.number_of(value).map_or(Value::Nil, Value::Number));
    }
    let Some(base) = u32::try_from(base).ok().filter(|base| (2..=36).contains(base)) else {
        return Err(vm.bad_arg(args, 1, "base out of range"));
    };
    let text = vm.string_arg(args, 0)?;
    vm.heap.charge_length(text.len())?;
    let text = text.trim_ascii();
    let (sign, digits) = match text.strip_prefix(b"-") {
        Some(digits) => (-1.0, digits),
        None => (1.0, text),
    };
    let found = number::of_digits(digits, base);
    one(found.map_or(Value::Nil, |number| Value::Number(sign * number)))
}

fn tostring(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    let value = vm.any_arg(args, 0)?;
    let handler = vm.meta_of(value, vm.metas().shown)?;
    if !handler.is_nil() {
        let results = vm.call(handler, &[value])?;
        return one(results.first().copied().unwrap_or_default());
    }
    if let Some(text) = vm.text_of(value)? {
        return one(Value::String(text));
    }
    // The numbers say in which order values were made. They are no addresses.
    let text = match value {
        Value::Boolean(is_true) => is_true.to_string(),
        Value::Table(table) => format!("table: {:#010x}", table.0),
        Value::Closure(closure) => format!("function: {closure:#010x}"),
        Value::Native(native) => format!("function: builtin: {native:#06x}"),
        Value::Host(host) => format!("function: builtin: {:#06x}", 0x8000 | host),
        Value::Null => "userdata: (nil)".to_owned(),
        Value::Nil | Value::Number(_) | Value::String(_) => "nil".to_owned(),
    };
    one(vm.heap.text(text.as_bytes())?)
}

fn type_of(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    let name = vm.any_arg(args, 0)?.type_name();
    one(vm.heap.text(name.as_bytes())?)
}

fn unpack(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    let table = vm.table_arg(args, 0)?;
    let first = vm.integer_or(args, 1, 1)?;
    let length = i64::try_from(vm.heap.table_length(table)).unwrap_or(i64::MAX);
    let last = vm.integer_or(args, 2, length)?;
    if first > last {
        return Ok(Results::None);
    }
    if last.saturating_sub(first) >= UNPACKED_MAX {
        return Err(vm.error("too many results to unpack"));
    }
    let mut values = Vec::new();
    for at in first..=last {
        vm.heap.charge(4)?;
        #[expect(clippy::cast_precision_loss, reason = "positions of elements are small")]
        let key = Value::Number(at as f64);
        values.push(vm.heap.get(table, key)?);
    }
    Ok(Results::Many(values))
}
