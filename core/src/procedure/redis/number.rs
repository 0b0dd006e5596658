//! The numbers of Redis commands: integers, exact decimals, and the scores of sorted sets.

use std::cmp::Ordering;
use std::fmt;

use crate::Rng;
use crate::wire::{Fixed, Out, Raw, Schema, Shape, Wire, WireError};

/// A 64-bit integer in its only decimal form: no plus sign, no leading zeros, no spaces.
#[must_use]
pub fn integer(text: &[u8]) -> Option<i64> {
    // The longest has 20 digits.
    let text = std::str::from_utf8(text.get(..text.len().min(21))?).ok()?;
    let number: i64 = text.parse().ok()?;
    (number.to_string() == text).then_some(number)
}

/// Digits after the point.
const SCALE_DIGITS: usize = 17;
const SCALE: i128 = 10_i128.pow(17);

/// A decimal number with 17 digits after the point. Its sums are exact, and so the same everywhere.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Decimal(i128);

/// The bounds of [`Decimal`]: 21 digits before the point.
const DECIMAL_MAX: i128 = SCALE * 10_i128.pow(21);

impl Decimal {
    /// Zero.
    pub const ZERO: Self = Self(0);

    /// Reads digits with a sign, a point and an exponent; digits beyond the 17th after the point
    /// are dropped.
    #[must_use]
    pub fn parse(text: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(text).ok().filter(|text| text.len() <= 64)?;
        let (mantissa, exponent) = match text.split_once(['e', 'E']) {
            Some((mantissa, exponent)) => (mantissa, exponent.parse::<i32>().ok()?),
            None => (text, 0),
        };
        let digits = mantissa.strip_prefix(['-', '+']).unwrap_or(mantissa);
        let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
        let all = [whole, fraction].concat();
        if all.is_empty() || !all.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        let mut value: i128 = 0;
        // The position of the last digit, counted from the 17th after the point.
        let fraction_digits = i32::try_from(fraction.len()).ok()?;
        let mut shift = i32::try_from(SCALE_DIGITS).ok()? + exponent.clamp(-200, 200);
        shift -= fraction_digits;
        let kept = if shift < 0 {
            let dropped = usize::try_from(shift.unsigned_abs()).ok()?.min(all.len());
            shift = 0;
            all.get(..all.len() - dropped)?
        } else {
            all.as_str()
        };
        for digit in kept.bytes() {
            value = value.checked_mul(10)?.checked_add(i128::from(digit - b'0'))?;
        }
        if value != 0 {
            value = value.checked_mul(10_i128.checked_pow(u32::try_from(shift).ok()?)?)?;
        }
        let value = if mantissa.starts_with('-') { -value } else { value };
        (value.abs() < DECIMAL_MAX).then_some(Self(value))
    }

    /// The sum, unless it is too large.
    #[must_use]
    pub fn plus(self, other: Self) -> Option<Self> {
        let sum = self.0.checked_add(other.0)?;
        (sum.abs() < DECIMAL_MAX).then_some(Self(sum))
    }
}

impl fmt::Display for Decimal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = if self.0 < 0 { "-" } else { "" };
        let (whole, fraction) = (self.0.abs() / SCALE, self.0.abs() % SCALE);
        write!(f, "{sign}{whole}")?;
        if fraction == 0 {
            return Ok(());
        }
        let digits = format!("{fraction:0SCALE_DIGITS$}");
        write!(f, ".{}", digits.trim_end_matches('0'))
    }
}

/// The score of a member of a sorted set: a 64-bit floating-point number that is a number.
#[derive(Clone, Copy, Debug)]
pub struct Score(f64);

impl Score {
    /// The lowest one.
    pub const MIN: Self = Self(f64::NEG_INFINITY);
    /// The highest one.
    pub const MAX: Self = Self(f64::INFINITY);

    /// Zero.
    pub const ZERO: Self = Self(0.0);
    /// One.
    pub const ONE: Self = Self(1.0);

    /// The score with this value; none if it is not a number.
    #[must_use]
    pub fn new(value: f64) -> Option<Self> {
        // One zero, so that equal scores have equal bits.
        let value = if value == 0.0 { 0.0 } else { value };
        (!value.is_nan()).then_some(Self(value))
    }

    /// Its value.
    #[must_use]
    pub fn get(self) -> f64 {
        self.0
    }

    /// Reads a number, `inf` or `-inf`; none also if the number is too large.
    #[must_use]
    pub fn parse(text: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(text).ok().filter(|text| text.len() <= 512)?;
        let value: f64 = text.parse().ok()?;
        let is_too_large = value.is_infinite() && text.bytes().any(|byte| byte.is_ascii_digit());
        Self::new(value).filter(|_| !is_too_large)
    }

    /// The sum; none if it is not a number (the sum of both infinities).
    #[must_use]
    #[allow(clippy::float_arithmetic, reason = "a single IEEE addition has one result everywhere")]
    pub fn plus(self, other: Self) -> Option<Self> {
        Self::new(self.0 + other.0)
    }

    /// The product; none if it is not a number (zero times an infinity).
    #[must_use]
    #[allow(
        clippy::float_arithmetic,
        reason = "a single IEEE multiplication has one result everywhere"
    )]
    pub fn times(self, other: Self) -> Option<Self> {
        Self::new(self.0 * other.0)
    }
}

impl PartialEq for Score {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Score {}

impl PartialOrd for Score {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Score {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl fmt::Display for Score {
    /// The shortest digits that name the number.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = self.0.abs();
        if size.is_finite() && size != 0.0 && !(1e-5..1e21).contains(&size) {
            let text = format!("{:e}", self.0);
            let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
            let sign = if exponent.starts_with('-') { "" } else { "+" };
            return write!(f, "{digits}e{sign}{exponent}");
        }
        write!(f, "{}", self.0)
    }
}

impl Wire for Score {
    const SHAPE: Shape = Shape::Fixed;

    fn size(&self) -> usize {
        8
    }

    fn put(&self, out: &mut Out) {
        Fixed(self.0.to_bits()).put(out);
    }

    fn take(raw: Raw<'_>) -> Result<Self, WireError> {
        let Fixed(bits) = Fixed::take(raw)?;
        Self::new(f64::from_bits(bits)).ok_or(WireError::Value {
            field: "score",
            found: "NaN".into(),
            wanted: "a number",
        })
    }

    fn sample(rng: &mut Rng) -> Self {
        loop {
            let any = f64::from_bits(rng.next_u64());
            if let Some(score) = Self::new(any) {
                return score;
            }
        }
    }

    fn schema(_: &mut Schema) -> String {
        "score".to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_have_one_form() {
        for (text, number) in [("0", 0), ("-1", -1), ("9223372036854775807", i64::MAX)] {
            assert_eq!(integer(text.as_bytes()), Some(number));
        }
        for text in ["", "-", "+1", "01", "-0", " 1", "1 ", "1.0", "9223372036854775808"] {
            assert_eq!(integer(text.as_bytes()), None, "{text:?}");
        }
        assert_eq!(integer(&[b'1'; 1_000]), None);
    }

    #[test]
    fn decimals_add_exactly() {
        let sum = |a: &str, b: &str| {
            let [a, b] = [a, b].map(|text| Decimal::parse(text.as_bytes()).unwrap());
            a.plus(b).map(|sum| sum.to_string())
        };
        assert_eq!(sum("0.1", "0.2").unwrap(), "0.3");
        assert_eq!(sum("10.50", "0.1").unwrap(), "10.6");
        assert_eq!(sum("5.0e3", "2.0e2").unwrap(), "5200");
        assert_eq!(sum("3", "-3.25").unwrap(), "-0.25");
        assert_eq!(sum("-1e-17", "0").unwrap(), "-0.00000000000000001");
        assert_eq!(sum("1e-18", "0").unwrap(), "0");
        assert_eq!(sum("999999999999999999999", "1"), None);
        for text in ["", ".", "-", "abc", "1e", "1e400", "inf", "nan", "0x10", "1 ", "1e21"] {
            assert_eq!(Decimal::parse(text.as_bytes()), None, "{text:?}");
        }
    }

    #[test]
    fn scores_are_ordered_and_written_shortly() {
        let score = |text: &str| Score::parse(text.as_bytes()).unwrap();
        let all = ["-inf", "-1", "0", "0.5", "1e300", "inf"].map(score);
        assert!(all.is_sorted_by(|a, b| a < b));
        assert_eq!(score("-0"), score("0"));
        let texts = [("3.0", "3"), ("3.1", "3.1"), ("1e300", "1e+300"), ("1e-7", "1e-7")];
        for (given, shown) in texts {
            assert_eq!(score(given).to_string(), shown);
        }
        assert_eq!(score("inf").plus(score("-inf")), None);
        assert_eq!(Score::parse(b"nan"), None);
        assert_eq!(Score::MIN, score("-inf"));
        assert_eq!(Score::MAX, score("inf"));
    }
}
