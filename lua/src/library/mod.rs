//! The functions that every script has.

mod base;
mod bit;
mod format;
mod json;
mod math;
mod pack;
mod pattern;
mod string;
mod table;

use crate::heap::{Heap, Stop};
use crate::value::{TableId, Value};
use crate::vm::{Native, Results};

pub(crate) use math::RANDOM_SEED;

/// Functions with their names.
type Functions = &'static [(&'static str, Native)];

/// All libraries: the global variable of each (none: its functions are global), and its functions.
/// A function is known by its position here.
const LIBRARIES: [(&str, Functions); 8] = [
    ("", base::FUNCTIONS),
    ("string", string::FUNCTIONS),
    ("table", table::FUNCTIONS),
    ("math", math::FUNCTIONS),
    ("bit", bit::FUNCTIONS),
    ("cjson", json::FUNCTIONS),
    ("cmsgpack", pack::FUNCTIONS),
    // Functions that scripts get from others, and cannot name.
    ("(hidden)", HIDDEN),
];

const HIDDEN: Functions =
    &[("for iterator", base::next_element), ("for iterator", pattern::next_match)];
/// What `ipairs` returns.
const NEXT_ELEMENT: u16 = 7 << 8;
/// What `gmatch` returns.
const NEXT_MATCH: u16 = (7 << 8) | 1;

fn entry(number: u16) -> Option<(&'static str, Native)> {
    let (_, functions) = LIBRARIES.get(usize::from(number >> 8))?;
    functions.get(usize::from(number & 0xff)).copied()
}

/// The function with this number.
pub(crate) fn function(number: u16) -> Option<Native> {
    entry(number).map(|(_, function)| function)
}

/// The name of a function, for errors.
pub(crate) fn name(function: Value) -> &'static str {
    match function {
        Value::Native(number) => entry(number).map_or("?", |(name, _)| name),
        _ => "?",
    }
}

/// Makes the libraries; the table of functions of strings.
pub(crate) fn install(heap: &mut Heap, globals: TableId) -> Result<TableId, Stop> {
    let mut strings = globals;
    for (number, (library, functions)) in (0_u16..).zip(LIBRARIES) {
        if library == "(hidden)" {
            continue;
        }
        let table = if library.is_empty() { globals } else { heap.new_table()? };
        for (at, (name, _)) in (0_u16..).zip(functions) {
            heap.set_field(table, name, Value::Native((number << 8) | at))?;
        }
        match library {
            "string" => strings = table,
            "math" => {
                heap.set_field(table, "pi", Value::Number(std::f64::consts::PI))?;
                heap.set_field(table, "huge", Value::Number(f64::INFINITY))?;
            }
            "cjson" => heap.set_field(table, "null", Value::Null)?,
            _ => {}
        }
        if !library.is_empty() {
            heap.protect(table);
            heap.set_field(globals, library, Value::Table(table))?;
        }
    }
    heap.set_field(globals, "_G", Value::Table(globals))?;
    let version = heap.text(b"Lua 5.1")?;
    heap.set_field(globals, "_VERSION", version)?;
    Ok(strings)
}

/// A number of things.
pub(crate) fn count(many: usize) -> Value {
    Value::Number(f64::from(u32::try_from(many).unwrap_or(u32::MAX)))
}

fn one(value: Value) -> Result<Results, Stop> {
    Ok(Results::One(value))
}

fn number(number: f64) -> Result<Results, Stop> {
    Ok(Results::One(Value::Number(number)))
}
