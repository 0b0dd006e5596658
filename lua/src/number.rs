//! Numbers as text. Nothing here depends on the platform.

use std::fmt::Write as _;

/// The longest text that may be a number. Reading one counts no work.
const TEXT_BYTES_MAX: usize = 512;

/// The number that a text is: decimal, or hexadecimal with `0x`, with spaces around it.
pub(crate) fn parse(text: &[u8]) -> Option<f64> {
    if text.len() > TEXT_BYTES_MAX {
        return None;
    }
    let is_space = |byte: &u8| matches!(*byte, b' ' | b'\t' | b'\n' | 0x0b | 0x0c | b'\r');
    let start = text.iter().position(|byte| !is_space(byte))?;
    let end = text.iter().rposition(|byte| !is_space(byte))? + 1;
    let text = std::str::from_utf8(text.get(start..end)?).ok()?;
    let (sign, digits) = match text.strip_prefix('-') {
        Some(digits) => (-1.0, digits),
        None => (1.0, text.strip_prefix('+').unwrap_or(text)),
    };
    if let Some(hex) = digits.strip_prefix("0x").or_else(|| digits.strip_prefix("0X")) {
        return of_digits(hex.as_bytes(), 16).map(|number| sign * number);
    }
    // A second sign is none of a number.
    if digits.starts_with(['+', '-']) {
        return None;
    }
    let number: f64 = digits.parse().ok()?;
    Some(sign * number)
}

/// The number with these digits in a base from 2 to 36.
pub(crate) fn of_digits(text: &[u8], base: u32) -> Option<f64> {
    let mut number = 0.0;
    for byte in text {
        let digit = char::from(*byte).to_digit(base)?;
        number = number * f64::from(base) + f64::from(digit);
    }
    (!text.is_empty()).then_some(number)
}

/// A number as `tostring` shows it.
pub(crate) fn shown(number: f64) -> String {
    if number == number.trunc() && number.abs() < 1e14 {
        #[expect(clippy::cast_possible_truncation, reason = "a whole number that fits")]
        let whole = number as i64;
        if whole != 0 || number.is_sign_positive() {
            return whole.to_string();
        }
    }
    general(number, 14, false)
}

/// The number as C shows it with `%.{precision}g`, and with `#` if `keeps_zeros`.
pub(crate) fn general(number: f64, precision: usize, keeps_zeros: bool) -> String {
    if !number.is_finite() {
        return not_finite(number);
    }
    let precision = precision.max(1);
    let scientific = format!("{number:.*e}", precision - 1);
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i64 = exponent.parse().unwrap_or(0);
    let digits_max = i64::try_from(precision).unwrap_or(i64::MAX);
    let strip = |text: &str| match (text.contains('.'), keeps_zeros) {
        (true, false) => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        (false, true) => format!("{text}."),
        (true, true) | (false, false) => text.to_owned(),
    };
    if exponent < -4 || exponent >= digits_max {
        return with_exponent(&strip(digits), exponent);
    }
    let decimals = usize::try_from(digits_max - 1 - exponent).unwrap_or(0);
    strip(&format!("{number:.decimals$}"))
}

/// The number as C shows it with `%.{precision}e`.
pub(crate) fn scientific(number: f64, precision: usize) -> String {
    if !number.is_finite() {
        return not_finite(number);
    }
    let text = format!("{number:.precision$e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    with_exponent(digits, exponent.parse().unwrap_or(0))
}

/// The number as C shows it with `%.{precision}f`.
pub(crate) fn fixed(number: f64, precision: usize) -> String {
    if number.is_finite() { format!("{number:.precision$}") } else { not_finite(number) }
}

fn with_exponent(digits: &str, exponent: i64) -> String {
    let mut text = digits.to_owned();
    let sign = if exponent < 0 { '-' } else { '+' };
    let _ = write!(text, "e{sign}{:02}", exponent.abs());
    text
}

fn not_finite(number: f64) -> String {
    // The sign of NaN depends on the processor.
    let text = match number {
        _ if number.is_nan() => "nan",
        _ if number > 0.0 => "inf",
        _ => "-inf",
    };
    text.to_owned()
}

/// The number without what follows the point, in the range of 64 bits.
#[must_use]
pub fn whole(number: f64) -> i64 {
    #[expect(clippy::cast_possible_truncation, reason = "numbers out of range become its ends")]
    let whole = number as i64;
    whole
}

/// The largest number below or equal.
pub(crate) fn modulo(a: f64, b: f64) -> f64 {
    a - libm::floor(a / b) * b
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_shown_as_in_c() {
        let cases = [
            (0.0, "0"),
            (-0.0, "-0"),
            (3.0, "3"),
            (-1.5, "-1.5"),
            (0.1, "0.1"),
            (1.0 / 3.0, "0.33333333333333"),
            (1e14, "1e+14"),
            (123_456_789_012_345.0, "1.2345678901234e+14"),
            (99_999_999_999_999.0, "99999999999999"),
            (1e15, "1e+15"),
            (1e100, "1e+100"),
            (1e-5, "1e-05"),
            (0.0001, "0.0001"),
            (123_456.789, "123456.789"),
            (f64::INFINITY, "inf"),
            (f64::NEG_INFINITY, "-inf"),
            (f64::NAN, "nan"),
            (-f64::NAN, "nan"),
            (2.5e-10, "2.5e-10"),
            (5e-324, "4.9406564584125e-324"),
        ];
        for (number, text) in cases {
            assert_eq!(shown(number), text);
        }
        assert_eq!(general(0.1, 17, false), "0.10000000000000001");
        assert_eq!(general(100.0, 3, true), "100.");
        assert_eq!(general(1e20, 17, false), "1e+20");
        assert_eq!(scientific(12_345.678, 6), "1.234568e+04");
        assert_eq!(scientific(0.0, 0), "0e+00");
        assert_eq!(fixed(2.5, 0), "2", "ties go to even digits");
        assert_eq!(fixed(3.5, 0), "4");
    }

    #[test]
    fn texts_are_numbers_or_not() {
        let cases = [
            ("10", Some(10.0)),
            (" 10 \n", Some(10.0)),
            ("-1e2", Some(-100.0)),
            (".5", Some(0.5)),
            ("5.", Some(5.0)),
            ("0x1F", Some(31.0)),
            ("-0x10", Some(-16.0)),
            ("inf", Some(f64::INFINITY)),
            ("", None),
            (" ", None),
            ("0x", None),
            ("0xg", None),
            ("1e", None),
            ("1 2", None),
            ("--1", None),
            ("-+1", None),
            ("e5", None),
            ("\u{661}", None),
        ];
        for (text, number) in cases {
            assert_eq!(parse(text.as_bytes()), number, "{text:?}");
        }
        assert_eq!(parse(&[b'1'; 513]), None, "too long");
        assert_eq!(of_digits(b"zz", 36), Some(1_295.0));
        assert_eq!(of_digits(b"12", 2), None);
        assert_eq!(whole(-3.99), -3);
        assert_eq!(whole(f64::NAN), 0);
        assert_eq!(modulo(-5.0, 3.0), 1.0);
    }
}
