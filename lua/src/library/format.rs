//! `string.format`.

use super::one;
use crate::heap::Stop;
use crate::number;
use crate::vm::{Args, NUMBER_WORK, Results, Vm};

/// What is between `%` and the letter.
#[derive(Default)]
struct Spec {
    is_left: bool,
    has_plus: bool,
    has_space: bool,
    is_alternate: bool,
    has_zeros: bool,
    width: usize,
    precision: Option<usize>,
}

impl Spec {
    /// Reads it from the beginning of a text; what follows, too.
    fn parse(text: &[u8]) -> Result<(Self, &[u8]), &'static str> {
        let mut spec = Self::default();
        let flags = text.iter().take_while(|byte| b"-+ #0".contains(byte)).count();
        if flags > 5 {
            return Err("invalid format (repeated flags)");
        }
        let (flags, mut rest) = text.split_at(flags);
        for flag in flags {
            match flag {
                b'-' => spec.is_left = true,
                b'+' => spec.has_plus = true,
                b' ' => spec.has_space = true,
                b'#' => spec.is_alternate = true,
                _ => spec.has_zeros = true,
            }
        }
        let digits = |rest: &mut &[u8]| {
            let mut number = 0_usize;
            for _ in 0..2 {
                let Some((digit @ b'0'..=b'9', after)) = rest.split_first() else { break };
                number = number * 10 + usize::from(digit - b'0');
                *rest = after;
            }
            number
        };
        spec.width = digits(&mut rest);
        if let Some(after) = rest.strip_prefix(b".") {
            rest = after;
            spec.precision = Some(digits(&mut rest));
        }
        if rest.first().is_some_and(u8::is_ascii_digit) {
            return Err("invalid format (width or precision too long)");
        }
        Ok((spec, rest))
    }

    /// Adds spaces.
    fn pad(&self, text: &[u8]) -> Vec<u8> {
        let spaces = vec![b' '; self.width.saturating_sub(text.len())];
        if self.is_left { [text, &spaces].concat() } else { [spaces.as_slice(), text].concat() }
    }

    /// A number of these digits, with its sign or another prefix, and with zeros or spaces.
    fn padded(&self, prefix: &str, digits: &str, may_have_zeros: bool) -> Vec<u8> {
        let have = prefix.len() + digits.len();
        if self.has_zeros && may_have_zeros && !self.is_left && have < self.width {
            let zeros = "0".repeat(self.width - have);
            return [prefix, &zeros, digits].concat().into_bytes();
        }
        self.pad([prefix, digits].concat().as_bytes())
    }

    fn sign(&self, is_negative: bool) -> &'static str {
        match (is_negative, self.has_plus, self.has_space) {
            (true, _, _) => "-",
            (false, true, _) => "+",
            (false, false, true) => " ",
            (false, false, false) => "",
        }
    }

    fn integer(&self, prefix: &str, digits: &str) -> Vec<u8> {
        let zeros = self.precision.unwrap_or(1).saturating_sub(digits.len());
        let is_nothing = self.precision == Some(0) && digits == "0";
        let digits = if is_nothing { String::new() } else { "0".repeat(zeros) + digits };
        self.padded(prefix, &digits, self.precision.is_none())
    }

    fn unsigned(&self, number: u64, letter: u8) -> Vec<u8> {
        let (prefix, digits) = match letter {
            b'o' => (if self.is_alternate { "0" } else { "" }, format!("{number:o}")),
            b'x' => ("0x", format!("{number:x}")),
            b'X' => ("0X", format!("{number:X}")),
            _ => ("", number.to_string()),
        };
        let has_prefix = letter == b'o' || (self.is_alternate && number != 0);
        self.integer(if has_prefix { prefix } else { "" }, &digits)
    }

    fn float(&self, value: f64, letter: u8) -> Vec<u8> {
        let precision = self.precision.unwrap_or(6);
        let size = value.abs();
        let mut text = match letter.to_ascii_lowercase() {
            b'e' => number::scientific(size, precision),
            b'f' => number::fixed(size, precision),
            _ => number::general(size, precision, self.is_alternate),
        };
        if letter.is_ascii_uppercase() {
            text = text.to_uppercase();
        }
        let is_negative = value.is_sign_negative() && !value.is_nan();
        self.padded(self.sign(is_negative), &text, value.is_finite())
    }
}

/// A string in quotes that is read as the same string.
fn quoted(text: &[u8]) -> Vec<u8> {
    let mut whole = vec![b'"'];
    for byte in text {
        match byte {
            b'"' | b'\\' | b'\n' => whole.extend([b'\\', *byte]),
            b'\r' => whole.extend(b"\\r"),
            0 => whole.extend(b"\\000"),
            other => whole.push(*other),
        }
    }
    whole.push(b'"');
    whole
}

pub(super) fn format(vm: &mut Vm<'_>, args: Args) -> Result<Results, Stop> {
    let template = vm.string_arg(args, 0)?;
    vm.heap.charge_length(template.len())?;
    let mut rest: &[u8] = &template;
    let (mut whole, mut at) = (Vec::new(), 0);
    while let Some((byte, after)) = rest.split_first() {
        rest = after;
        if *byte != b'%' {
            whole.push(*byte);
            continue;
        }
        if let Some(after) = rest.strip_prefix(b"%") {
            whole.push(b'%');
            rest = after;
            continue;
        }
        at += 1;
        let (spec, after) = match Spec::parse(rest) {
            Ok(parsed) => parsed,
            Err(what) => return Err(vm.error(what)),
        };
        let Some((letter, after)) = after.split_first() else {
            return Err(vm.error("invalid option '%' to 'format'"));
        };
        rest = after;
        let part = match letter {
            b'c' => {
                let code = vm.integer_arg(args, at)?;
                spec.pad(&[code.to_le_bytes()[0]])
            }
            b'd' | b'i' => {
                let whole = vm.integer_arg(args, at)?;
                spec.integer(spec.sign(whole < 0), &whole.unsigned_abs().to_string())
            }
            b'o' | b'u' | b'x' | b'X' => {
                let whole = vm.integer_arg(args, at)?;
                spec.unsigned(u64::from_le_bytes(whole.to_le_bytes()), *letter)
            }
            b'e' | b'E' | b'f' | b'g' | b'G' => {
                let number = vm.number_arg(args, at)?;
                vm.heap.charge(20 * NUMBER_WORK)?;
                spec.float(number, *letter)
            }
            b'q' => {
                let text = vm.string_arg(args, at)?;
                vm.heap.charge_length(text.len())?;
                quoted(&text)
            }
            b's' => {
                let text = vm.string_arg(args, at)?;
                vm.heap.charge_length(text.len())?;
                let length = spec.precision.unwrap_or(text.len()).min(text.len());
                spec.pad(text.get(..length).unwrap_or_default())
            }
            other => {
                let shown = char::from(*other);
                return Err(vm.error(&format!("invalid option '%{shown}' to 'format'")));
            }
        };
        // A number may have hundreds of digits.
        vm.heap.charge_length(part.len())?;
        whole.extend_from_slice(&part);
    }
    vm.heap.charge_length(whole.len())?;
    one(vm.heap.text(&whole)?)
}
