//! `cmsgpack`.

use super::{Functions, one};
use crate::heap::Stop;
use crate::number;
use crate::value::{TableId, Value};
use crate::vm::{Args, Results, Vm};

pub(super) const FUNCTIONS: Functions = &[("pack", pack), ("unpack", unpack)];

/// Tables that nest deeper are packed as nil, as in Redis.
const DEPTH_MAX: u32 = 16;
/// Data that nests deeper cannot be unpacked.
const UNPACK_DEPTH_MAX: u32 = 128;

fn pack(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    if args.count == 0 {
        return Err(vm.bad_arg(args, 0, "MessagePack pack needs input."));
    }
    let mut out = Vec::new();
    for at in 0..args.count {
        append(vm, vm.arg(args, at), 0, &mut out)?;
    }
    one(vm.heap.text(&out)?)
}

/// Writes the length of something, in the shortest of its forms: a mask with a limit, and the codes
/// for 8, 16 and 32 bits, of which the first may be missing.
fn append_length(
    length: usize,
    (mask, below): (u8, usize),
    codes: (Option<u8>, u8, u8),
    out: &mut Vec<u8>,
) {
    let length = u32::try_from(length).unwrap_or(u32::MAX);
    match (u8::try_from(length), u16::try_from(length), codes) {
        (Ok(length), _, _) if usize::from(length) < below => out.push(mask | length),
        (Ok(length), _, (Some(code), ..)) => out.extend([code, length]),
        (_, Ok(length), (_, code, _)) => {
            out.push(code);
            out.extend(length.to_be_bytes());
        }
        (_, Err(_), (_, _, code)) => {
            out.push(code);
            out.extend(length.to_be_bytes());
        }
    }
}

fn append(vm: &mut Vm<'_>, value: Value, depth: u32, out: &mut Vec<u8>) -> Result<(), Stop> {
    vm.heap.charge(16)?;
    match value {
        Value::Nil | Value::Null | Value::Closure(_) | Value::Native(_) | Value::Host(_) => {
            out.push(0xc0);
        }
        Value::Boolean(is_true) => out.push(if is_true { 0xc3 } else { 0xc2 }),
        Value::Number(number) => append_number(number, out),
        Value::String(text) => {
            let text = vm.heap.bytes(text);
            vm.heap.charge_length(text.len())?;
            append_length(text.len(), (0xa0, 32), (Some(0xd9), 0xda, 0xdb), out);
            out.extend_from_slice(&text);
        }
        Value::Table(_) if depth >= DEPTH_MAX => out.push(0xc0),
        Value::Table(table) => append_table(vm, table, depth, out)?,
    }
    Ok(())
}

fn append_table(
    vm: &mut Vm<'_>,
    table: TableId,
    depth: u32,
    out: &mut Vec<u8>,
) -> Result<(), Stop> {
    let pairs = vm.heap.pairs(table)?;
    let many = pairs.len();
    let is_position = |key: &Value| match key {
        Value::Number(number) => {
            let whole = usize::try_from(number::whole(*number)).unwrap_or(0);
            number.trunc() == *number && (1..=many).contains(&whole)
        }
        _ => false,
    };
    if pairs.iter().all(|(key, _)| is_position(key)) {
        append_length(many, (0x90, 16), (None, 0xdc, 0xdd), out);
        for at in 1..=many {
            let value = vm.heap.get(table, super::count(at))?;
            append(vm, value, depth + 1, out)?;
        }
        return Ok(());
    }
    append_length(many, (0x80, 16), (None, 0xde, 0xdf), out);
    for (key, value) in pairs {
        append(vm, key, depth + 1, out)?;
        append(vm, value, depth + 1, out)?;
    }
    Ok(())
}

fn append_number(number: f64, out: &mut Vec<u8>) {
    let is_whole = number.trunc() == number && number.abs() < 9_223_372_036_854_775_808.0;
    if !is_whole {
        #[expect(clippy::cast_possible_truncation, reason = "compared below")]
        let short = number as f32;
        if number.is_nan() {
            // One of the many: which one a processor makes is not the same everywhere.
            out.extend([0xca, 0x7f, 0xc0, 0, 0]);
        } else if f64::from(short) == number {
            out.push(0xca);
            out.extend(short.to_be_bytes());
        } else {
            out.push(0xcb);
            out.extend(number.to_be_bytes());
        }
        return;
    }
    let whole = number::whole(number);
    let bytes = whole.to_be_bytes();
    let low = |many: usize| bytes.get(8 - many..).unwrap_or_default();
    let (code, many) = match whole {
        0..=0x7f => (None, 1),
        0x80..=0xff => (Some(0xcc), 1),
        0x100..=0xffff => (Some(0xcd), 2),
        0x1_0000..=0xffff_ffff => (Some(0xce), 4),
        0x1_0000_0000.. => (Some(0xcf), 8),
        -0x20..0 => (None, 1),
        -0x80..-0x20 => (Some(0xd0), 1),
        -0x8000..-0x80 => (Some(0xd1), 2),
        -0x8000_0000..-0x8000 => (Some(0xd2), 4),
        i64::MIN..-0x8000_0000 => (Some(0xd3), 8),
    };
    out.extend(code);
    out.extend_from_slice(low(many));
}

fn unpack(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    let text = vm.string_arg(args, 0)?;
    let mut reader = Reader { rest: &text };
    let mut values = Vec::new();
    while !reader.rest.is_empty() {
        if values.len() >= 8_000 {
            return Err(vm.error("too many values to unpack"));
        }
        values.push(reader.value(vm, 0)?);
    }
    Ok(Results::Many(values))
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn take(&mut self, vm: &mut Vm<'_>, many: usize) -> Result<&'a [u8], Stop> {
        match self.rest.split_at_checked(many) {
            Some((taken, rest)) => {
                self.rest = rest;
                Ok(taken)
            }
            None => Err(vm.error("Missing bytes in input.")),
        }
    }

    /// An unsigned number of so many bytes.
    fn unsigned(&mut self, vm: &mut Vm<'_>, many: usize) -> Result<u64, Stop> {
        let bytes = self.take(vm, many)?;
        Ok(bytes.iter().fold(0, |number, byte| (number << 8) | u64::from(*byte)))
    }

    fn signed(&mut self, vm: &mut Vm<'_>, many: usize) -> Result<i64, Stop> {
        let shift = 64 - 8 * u32::try_from(many).unwrap_or(8);
        let number = self.unsigned(vm, many)? << shift;
        Ok(i64::from_le_bytes(number.to_le_bytes()) >> shift)
    }

    fn length(&mut self, vm: &mut Vm<'_>, many: usize) -> Result<usize, Stop> {
        Ok(usize::try_from(self.unsigned(vm, many)?).unwrap_or(usize::MAX))
    }

    fn text(&mut self, vm: &mut Vm<'_>, length: usize) -> Result<Value, Stop> {
        let text = self.take(vm, length)?;
        vm.heap.text(text)
    }

    #[expect(clippy::cast_precision_loss, reason = "Lua has no other numbers")]
    fn value(&mut self, vm: &mut Vm<'_>, depth: u32) -> Result<Value, Stop> {
        vm.heap.charge(16)?;
        if depth > UNPACK_DEPTH_MAX {
            return Err(vm.error("Too many nested values in input."));
        }
        let code = self.unsigned(vm, 1)?;
        let low = usize::try_from(code & 0x1f).unwrap_or(0);
        match code {
            0..=0x7f => Ok(Value::Number(code as f64)),
            0x80..=0x8f => self.map(vm, low & 0xf, depth),
            0x90..=0x9f => self.array(vm, low & 0xf, depth),
            0xa0..=0xbf => self.text(vm, low),
            0xc0 => Ok(Value::Nil),
            0xc2 => Ok(Value::Boolean(false)),
            0xc3 => Ok(Value::Boolean(true)),
            0xc4 | 0xd9 => {
                let length = self.length(vm, 1)?;
                self.text(vm, length)
            }
            0xc5 | 0xda => {
                let length = self.length(vm, 2)?;
                self.text(vm, length)
            }
            0xc6 | 0xdb => {
                let length = self.length(vm, 4)?;
                self.text(vm, length)
            }
            0xca => {
                let bits = u32::try_from(self.unsigned(vm, 4)?).unwrap_or(0);
                Ok(Value::Number(f64::from(f32::from_bits(bits))))
            }
            0xcb => Ok(Value::Number(f64::from_bits(self.unsigned(vm, 8)?))),
            0xcc => Ok(Value::Number(self.unsigned(vm, 1)? as f64)),
            0xcd => Ok(Value::Number(self.unsigned(vm, 2)? as f64)),
            0xce => Ok(Value::Number(self.unsigned(vm, 4)? as f64)),
            0xcf => Ok(Value::Number(self.unsigned(vm, 8)? as f64)),
            0xd0 => Ok(Value::Number(self.signed(vm, 1)? as f64)),
            0xd1 => Ok(Value::Number(self.signed(vm, 2)? as f64)),
            0xd2 => Ok(Value::Number(self.signed(vm, 4)? as f64)),
            0xd3 => Ok(Value::Number(self.signed(vm, 8)? as f64)),
            0xdc | 0xdd => {
                let length = self.length(vm, if code == 0xdc { 2 } else { 4 })?;
                self.array(vm, length, depth)
            }
            0xde | 0xdf => {
                let length = self.length(vm, if code == 0xde { 2 } else { 4 })?;
                self.map(vm, length, depth)
            }
            0xe0..=0xff => {
                let number = i64::try_from(code).unwrap_or(0) - 0x100;
                Ok(Value::Number(number as f64))
            }
            _ => Err(vm.error("Bad data format in input.")),
        }
    }

    fn array(&mut self, vm: &mut Vm<'_>, length: usize, depth: u32) -> Result<Value, Stop> {
        let table = vm.heap.new_table()?;
        for at in 1..=length {
            let value = self.value(vm, depth + 1)?;
            vm.heap.set(table, super::count(at), value)?;
        }
        Ok(Value::Table(table))
    }

    fn map(&mut self, vm: &mut Vm<'_>, length: usize, depth: u32) -> Result<Value, Stop> {
        let table = vm.heap.new_table()?;
        for _ in 0..length {
            let key = self.value(vm, depth + 1)?;
            let value = self.value(vm, depth + 1)?;
            vm.heap.set(table, key, value)?;
        }
        Ok(Value::Table(table))
    }
}
