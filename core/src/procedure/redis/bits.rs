//! Single bits of strings.

use bytes::Bytes;

use super::parse::Args;
use super::reply::{Failure, NOT_INTEGER, SYNTAX};
use super::{keys, number};

/// A part of a string, both ends included.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct BitSpan {
    /// Its first byte or bit; negative numbers count from the end.
    first: i64,
    /// Its last one.
    last: i64,
    /// True if both are bits.
    is_bits: bool,
}

const BAD_OFFSET: Failure = Failure::new("ERR bit offset is not an integer or out of range");
const BAD_BIT: Failure = Failure::new("ERR bit is not an integer or out of range");

/// The offset of a bit.
pub(super) fn parse_offset(args: &mut Args<'_>) -> Result<u64, Failure> {
    // Redis allows no string of more bytes.
    let is_allowed = |offset: &u64| *offset < 1 << 32;
    let offset = number::integer(&args.bytes()?).and_then(|offset| u64::try_from(offset).ok());
    offset.filter(is_allowed).ok_or(BAD_OFFSET)
}

/// A bit.
pub(super) fn parse_bit(args: &mut Args<'_>) -> Result<bool, Failure> {
    match number::integer(&args.bytes()?) {
        Some(0) => Ok(false),
        Some(1) => Ok(true),
        Some(_) | None => Err(BAD_BIT),
    }
}

/// `[start end [BYTE | BIT]]`
pub(super) fn span(words: &[Bytes]) -> Result<Option<BitSpan>, Failure> {
    let (first, last, unit) = match words {
        [] => return Ok(None),
        [first, last] => (first, last, None),
        [first, last, unit] => (first, last, Some(unit)),
        _ => return Err(SYNTAX),
    };
    let end = |text: &Bytes| number::integer(text).ok_or(NOT_INTEGER);
    let (first, last) = (end(first)?, end(last)?);
    let is = |word: &str| unit.is_some_and(|unit| unit.eq_ignore_ascii_case(word.as_bytes()));
    // As in Redis, nobody reads the unit of a part whose ends are in wrong order.
    let is_empty = first < 0 && last < 0 && first > last;
    if unit.is_some() && !is_empty && !is("BIT") && !is("BYTE") {
        return Err(SYNTAX);
    }
    Ok(Some(BitSpan { first, last, is_bits: is("BIT") }))
}

/// The byte of a bit, and the bit in it. The first bit of a byte is its highest one.
fn place(offset: u64) -> (usize, u8) {
    let byte = usize::try_from(offset / 8).unwrap_or(usize::MAX);
    (byte, 0x80 >> (offset % 8))
}

/// One bit; those after the end are 0.
pub(super) fn get(text: &[u8], offset: u64) -> bool {
    let (byte, mask) = place(offset);
    text.get(byte).is_some_and(|byte| byte & mask != 0)
}

/// The string with one bit set to `bit`, longer if the bit is after its end.
pub(super) fn with(text: Option<&Bytes>, offset: u64, bit: bool) -> Bytes {
    let (byte, mask) = place(offset);
    let mut bytes = text.map(|text| text.to_vec()).unwrap_or_default();
    if bytes.len() <= byte {
        bytes.resize(byte + 1, 0);
    }
    if let Some(byte) = bytes.get_mut(byte) {
        *byte = if bit { *byte | mask } else { *byte & !mask };
    }
    bytes.into()
}

/// The number of bits that are set in a part of a string.
pub(super) fn count(text: &[u8], span: Option<BitSpan>) -> u64 {
    let Some(BitSpan { first, last, is_bits }) = span else { return ones(text) };
    if !is_bits {
        return ones(text.get(keys::byte_span(first, last, text.len())).unwrap_or_default());
    }
    let part = keys::byte_span(first, last, text.len() * 8);
    if part.is_empty() {
        return 0;
    }
    let (start, end) = (part.start / 8, part.end.div_ceil(8));
    let whole = ones(text.get(start..end).unwrap_or_default());
    let outside = (start * 8..part.start).chain(part.end..end * 8);
    let extra = outside.filter(|bit| get(text, *bit as u64)).count();
    whole - extra as u64
}

fn ones(text: &[u8]) -> u64 {
    text.iter().map(|byte| u64::from(byte.count_ones())).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_of_a_part_are_counted() {
        let text = [0b1010_0001, 0xff, 0b0000_0110];
        for first in -26..26_i64 {
            for last in -26..26_i64 {
                let part = keys::byte_span(first, last, 24);
                let wanted = part.filter(|bit| get(&text, *bit as u64)).count() as u64;
                let span = BitSpan { first, last, is_bits: true };
                assert_eq!(count(&text, Some(span)), wanted, "{first} {last}");
            }
        }
        assert_eq!(count(&text, None), 13);
        assert_eq!(count(&text, Some(BitSpan { first: 1, last: -1, is_bits: false })), 10);
    }
}
