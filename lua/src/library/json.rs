//! `cjson`.

use super::{Functions, one};
use crate::heap::Stop;
use crate::number;
use crate::value::{TableId, Value};
use crate::vm::{Args, NUMBER_WORK, Results, Vm};

pub(super) const FUNCTIONS: Functions = &[("decode", decode), ("encode", encode)];

/// How deeply values may nest.
const DEPTH_MAX: u32 = 128;
/// An array has at most this number of elements more than it holds values, as a factor.
const SPARSE_RATIO: f64 = 2.0;
/// Unless its last element is below this.
const SPARSE_SAFE: f64 = 10.0;

fn encode(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    if args.count != 1 {
        return Err(vm.bad_arg(args, 0, "expected 1 argument"));
    }
    let mut out = Vec::new();
    append(vm, vm.arg(args, 0), 1, &mut out)?;
    one(vm.heap.text(&out)?)
}

fn append(vm: &mut Vm<'_>, value: Value, depth: u32, out: &mut Vec<u8>) -> Result<(), Stop> {
    vm.heap.charge(8)?;
    match value {
        Value::Nil | Value::Null => out.extend(b"null"),
        Value::Boolean(is_true) => out.extend(is_true.to_string().bytes()),
        Value::Number(number) => {
            if !number.is_finite() {
                return Err(vm.error("Cannot serialise number: must not be NaN or Inf"));
            }
            vm.heap.charge(NUMBER_WORK)?;
            out.extend(number::shown(number).bytes());
        }
        Value::String(text) => {
            let text = vm.heap.bytes(text);
            vm.heap.charge_length(2 * text.len())?;
            append_text(&text, out);
        }
        Value::Table(table) => return append_table(vm, table, depth, out),
        Value::Closure(_) | Value::Native(_) | Value::Host(_) => {
            return Err(vm.error("Cannot serialise function: type not supported"));
        }
    }
    Ok(())
}

fn append_text(text: &[u8], out: &mut Vec<u8>) {
    out.push(b'"');
    for byte in text {
        match byte {
            b'"' | b'\\' | b'/' => out.extend([b'\\', *byte]),
            0x08 => out.extend(b"\\b"),
            b'\t' => out.extend(b"\\t"),
            b'\n' => out.extend(b"\\n"),
            0x0c => out.extend(b"\\f"),
            b'\r' => out.extend(b"\\r"),
            0..=0x1f | 0x7f => out.extend(format!("\\u{byte:04x}").bytes()),
            other => out.push(*other),
        }
    }
    out.push(b'"');
}

/// The last element if all keys are positions of elements.
fn array_length(pairs: &[(Value, Value)]) -> Option<f64> {
    let mut last = 0.0_f64;
    for (key, _) in pairs {
        match key {
            Value::Number(number) if *number >= 1.0 && number.trunc() == *number => {
                last = last.max(*number);
            }
            _ => return None,
        }
    }
    (!pairs.is_empty()).then_some(last)
}

fn append_table(
    vm: &mut Vm<'_>,
    table: TableId,
    depth: u32,
    out: &mut Vec<u8>,
) -> Result<(), Stop> {
    if depth > DEPTH_MAX {
        return Err(vm.error(&format!("Cannot serialise, excessive depth ({depth})")));
    }
    let pairs = vm.heap.pairs(table)?;
    if let Some(last) = array_length(&pairs) {
        let many = f64::from(u32::try_from(pairs.len()).unwrap_or(u32::MAX));
        if last > many * SPARSE_RATIO && last > SPARSE_SAFE {
            return Err(vm.error("Cannot serialise table: excessively sparse array"));
        }
        let last = usize::try_from(number::whole(last)).unwrap_or(0);
        for at in 1..=last {
            out.push(if at == 1 { b'[' } else { b',' });
            let value = vm.heap.get(table, super::count(at))?;
            append(vm, value, depth + 1, out)?;
        }
        out.push(b']');
        return Ok(());
    }
    out.push(b'{');
    for (at, (key, value)) in pairs.into_iter().enumerate() {
        if at > 0 {
            out.push(b',');
        }
        match key {
            Value::Number(number) => out.extend(format!("\"{}\"", number::shown(number)).bytes()),
            Value::String(_) => append(vm, key, depth, out)?,
            _ => {
                return Err(
                    vm.error("Cannot serialise table: table key must be a number or string")
                );
            }
        }
        out.push(b':');
        append(vm, value, depth + 1, out)?;
    }
    out.push(b'}');
    Ok(())
}

fn decode(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    if args.count != 1 {
        return Err(vm.bad_arg(args, 0, "expected 1 argument"));
    }
    let text = vm.string_arg(args, 0)?;
    vm.heap.charge_length(4 * text.len())?;
    let mut decoder = Decoder { text: &text, at: 0 };
    let value = decoder.value(vm, 1)?;
    decoder.skip_spaces();
    if decoder.peek().is_some() {
        return Err(decoder.error(vm, "the end"));
    }
    one(value)
}

struct Decoder<'a> {
    text: &'a [u8],
    at: usize,
}

impl Decoder<'_> {
    fn peek(&self) -> Option<u8> {
        self.text.get(self.at).copied()
    }

    fn skip_spaces(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    fn error(&mut self, vm: &mut Vm<'_>, wanted: &str) -> Stop {
        let found = match self.peek() {
            None => "T_END",
            Some(b'}') => "T_OBJ_END",
            Some(b']') => "T_ARR_END",
            Some(b'{') => "T_OBJ_BEGIN",
            Some(b'[') => "T_ARR_BEGIN",
            Some(b':') => "T_COLON",
            Some(b',') => "T_COMMA",
            Some(b'"') => "T_STRING",
            Some(b'0'..=b'9' | b'-') => "T_NUMBER",
            Some(_) => "invalid token",
        };
        let at = self.at + 1;
        vm.error(&format!("Expected {wanted} but found {found} at character {at}"))
    }

    fn takes(&mut self, byte: u8) -> bool {
        self.skip_spaces();
        let is = self.peek() == Some(byte);
        self.at += usize::from(is);
        is
    }

    fn value(&mut self, vm: &mut Vm<'_>, depth: u32) -> Result<Value, Stop> {
        self.skip_spaces();
        if depth > DEPTH_MAX {
            let at = self.at + 1;
            return Err(vm.error(&format!(
                "Found too many nested data structures ({depth}) at character {at}"
            )));
        }
        for (word, value) in [
            ("null", Value::Null),
            ("true", Value::Boolean(true)),
            ("false", Value::Boolean(false)),
        ] {
            if self.text.get(self.at..).is_some_and(|rest| rest.starts_with(word.as_bytes())) {
                self.at += word.len();
                return Ok(value);
            }
        }
        match self.peek() {
            Some(b'{') => self.object(vm, depth),
            Some(b'[') => self.array(vm, depth),
            Some(b'"') => {
                let text = self.string(vm)?;
                vm.heap.text(&text)
            }
            Some(b'0'..=b'9' | b'-') => {
                let start = self.at;
                while matches!(
                    self.peek(),
                    Some(
                        b'0'..=b'9' | b'a'..=b'f' | b'A'..=b'F' | b'x' | b'X' | b'+' | b'-' | b'.',
                    )
                ) {
                    self.at += 1;
                }
                let text = self.text.get(start..self.at).unwrap_or_default();
                match number::parse(text) {
                    Some(number) => Ok(Value::Number(number)),
                    None => {
                        self.at = start;
                        let at = start + 1;
                        Err(vm.error(&format!(
                            "Expected value but found invalid number at character {at}"
                        )))
                    }
                }
            }
            _ => Err(self.error(vm, "value")),
        }
    }

    fn array(&mut self, vm: &mut Vm<'_>, depth: u32) -> Result<Value, Stop> {
        self.at += 1;
        let table = vm.heap.new_table()?;
        if self.takes(b']') {
            return Ok(Value::Table(table));
        }
        for at in 1.. {
            let value = self.value(vm, depth + 1)?;
            vm.heap.set(table, super::count(at), value)?;
            if self.takes(b']') {
                break;
            }
            if !self.takes(b',') {
                return Err(self.error(vm, "comma or array end"));
            }
        }
        Ok(Value::Table(table))
    }

    fn object(&mut self, vm: &mut Vm<'_>, depth: u32) -> Result<Value, Stop> {
        self.at += 1;
        let table = vm.heap.new_table()?;
        if self.takes(b'}') {
            return Ok(Value::Table(table));
        }
        loop {
            self.skip_spaces();
            if self.peek() != Some(b'"') {
                return Err(self.error(vm, "object key string"));
            }
            let key = self.string(vm)?;
            let key = vm.heap.text(&key)?;
            if !self.takes(b':') {
                return Err(self.error(vm, "colon"));
            }
            let value = self.value(vm, depth + 1)?;
            vm.heap.set(table, key, value)?;
            if self.takes(b'}') {
                return Ok(Value::Table(table));
            }
            if !self.takes(b',') {
                return Err(self.error(vm, "comma or object end"));
            }
        }
    }

    fn string(&mut self, vm: &mut Vm<'_>) -> Result<Vec<u8>, Stop> {
        let start = self.at + 1;
        self.at += 1;
        let mut out = Vec::new();
        loop {
            let Some(byte) = self.peek() else {
                return Err(vm.error(&format!(
                    "Expected value but found unexpected end of string at character {start}"
                )));
            };
            self.at += 1;
            match byte {
                b'"' => return Ok(out),
                b'\\' => {
                    if self.escape(&mut out).is_none() {
                        let at = self.at;
                        return Err(vm.error(&format!(
                            "Expected value but found invalid escape code at character {at}"
                        )));
                    }
                }
                other => out.push(other),
            }
        }
    }

    fn escape(&mut self, out: &mut Vec<u8>) -> Option<()> {
        let byte = self.peek()?;
        self.at += 1;
        out.push(match byte {
            b'"' | b'\\' | b'/' => byte,
            b'b' => 0x08,
            b'f' => 0x0c,
            b'n' => b'\n',
            b'r' => b'\r',
            b't' => b'\t',
            b'u' => {
                let mut code = self.hex()?;
                if (0xd800..0xdc00).contains(&code) {
                    // The first half of a character.
                    self.text.get(self.at..)?.strip_prefix(b"\\u")?;
                    self.at += 2;
                    let second = self.hex()?.checked_sub(0xdc00).filter(|low| *low < 0x400)?;
                    code = 0x1_0000 + ((code - 0xd800) << 10) + second;
                }
                let character = char::from_u32(code)?;
                out.extend(character.encode_utf8(&mut [0; 4]).bytes());
                return Some(());
            }
            _ => return None,
        });
        Some(())
    }

    /// Four digits.
    fn hex(&mut self) -> Option<u32> {
        let digits = self.text.get(self.at..self.at + 4)?;
        let mut code = 0;
        for digit in digits {
            code = code * 16 + char::from(*digit).to_digit(16)?;
        }
        self.at += 4;
        Some(code)
    }
}
