//! Exact decimals, for sums, averages and comparisons of merged results.

use std::cmp::Ordering;

/// `mantissa / 10^scale`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Decimal {
    mantissa: i128,
    scale: u32,
}

impl Decimal {
    /// Parses a decimal such as `-12.30`; none if the text is something else or the value is too
    /// large.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        let (is_negative, digits) = match text.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, text.strip_prefix('+').unwrap_or(text)),
        };
        let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
        if whole.is_empty() && fraction.is_empty() {
            return None;
        }
        let mut mantissa: i128 = 0;
        for digit in whole.chars().chain(fraction.chars()) {
            mantissa = mantissa.checked_mul(10)?.checked_add(i128::from(digit.to_digit(10)?))?;
        }
        let scale = u32::try_from(fraction.len()).ok()?;
        Some(Self { mantissa: if is_negative { -mantissa } else { mantissa }, scale })
    }

    fn at_scale(self, scale: u32) -> Option<i128> {
        self.mantissa.checked_mul(10_i128.checked_pow(scale.checked_sub(self.scale)?)?)
    }

    /// The sum, with the larger of the two scales.
    pub(super) fn add(self, other: Self) -> Option<Self> {
        let scale = self.scale.max(other.scale);
        Some(Self { mantissa: self.at_scale(scale)?.checked_add(other.at_scale(scale)?)?, scale })
    }

    /// The quotient, rounded half away from zero at `scale`.
    pub(super) fn divide(self, by: Self, scale: u32) -> Option<Self> {
        if by.mantissa == 0 {
            return None;
        }
        let up = (scale + by.scale).checked_sub(self.scale);
        let (mut over, mut under) = (self.mantissa, by.mantissa);
        match up {
            Some(up) => over = over.checked_mul(10_i128.checked_pow(up)?)?,
            None => {
                under = under.checked_mul(10_i128.checked_pow(self.scale - scale - by.scale)?)?
            }
        }
        let quotient = over / under;
        let rest = (over % under).unsigned_abs();
        let round_up = rest.checked_mul(2)? >= under.unsigned_abs();
        let sign = if (over < 0) == (under < 0) { 1 } else { -1 };
        Some(Self { mantissa: if round_up { quotient + sign } else { quotient }, scale })
    }

    pub(super) fn scale(self) -> u32 {
        self.scale
    }

    /// PostgreSQL's scale of `self / by`: at least 16 significant digits, counted in groups of four
    /// as its `numeric` stores them (`select_div_scale`).
    pub(super) fn postgres_scale(self, by: Self) -> u32 {
        let (weight, first) = self.weight();
        let (weight_by, first_by) = by.weight();
        let mut quotient = weight - weight_by;
        if first <= first_by {
            quotient -= 1;
        }
        let scale = (16 - quotient * 4).clamp(0, 1000) as u32;
        scale.max(self.scale).max(by.scale)
    }

    /// The position of the first non-zero group of four digits, and that group.
    fn weight(self) -> (i64, u128) {
        if self.mantissa == 0 {
            return (0, 0);
        }
        // Align the fraction to whole groups.
        let pad = (4 - self.scale % 4) % 4;
        let mut rest = self.mantissa.unsigned_abs().saturating_mul(10_u128.pow(pad));
        let mut weight = -i64::from((self.scale + pad) / 4);
        while rest >= 10_000 {
            rest /= 10_000;
            weight += 1;
        }
        (weight, rest)
    }
}

impl PartialOrd for Decimal {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Decimal {
    fn cmp(&self, other: &Self) -> Ordering {
        let scale = self.scale.max(other.scale);
        match (self.at_scale(scale), other.at_scale(scale)) {
            (Some(left), Some(right)) => left.cmp(&right),
            // One has too many digits to be widened: compares whole parts first, then fractions.
            _ => {
                let (left, right) = (self.parts(), other.parts());
                left.cmp(&right)
            }
        }
    }
}

impl Decimal {
    fn parts(self) -> (i128, i128) {
        match 10_i128.checked_pow(self.scale) {
            Some(unit) => (self.mantissa.div_euclid(unit), self.mantissa.rem_euclid(unit)),
            None => (0, self.mantissa),
        }
    }
}

impl std::fmt::Display for Decimal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let digits = self.mantissa.unsigned_abs().to_string();
        let scale = self.scale as usize;
        let sign = if self.mantissa < 0 { "-" } else { "" };
        if scale == 0 {
            return write!(f, "{sign}{digits}");
        }
        let padded = format!("{digits:0>width$}", width = scale + 1);
        let (whole, fraction) = padded.split_at(padded.len() - scale);
        write!(f, "{sign}{whole}.{fraction}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decimal(text: &str) -> Decimal {
        Decimal::parse(text).unwrap()
    }

    #[test]
    fn sums_and_order_are_exact() {
        assert_eq!(decimal("-0.05").add(decimal("1.2")).unwrap().to_string(), "1.15");
        assert_eq!(decimal("-7").add(decimal("-3")).unwrap().to_string(), "-10");
        assert!(decimal("1.10") == decimal("1.10") && decimal("1.1").cmp(&decimal("1.10")).is_eq());
        assert!(decimal("-2") < decimal("-1.9"));
        assert!(Decimal::parse("").is_none() && Decimal::parse("1e5").is_none());
    }

    /// The expected values are PostgreSQL 15's, for `SELECT 10/3.0::numeric` and the averages of
    /// {1,2}, {100000,2}, {0}.
    #[test]
    fn averages_have_the_digits_that_postgresql_gives() {
        let average = |sum: &str, count: &str| {
            let (sum, count) = (decimal(sum), decimal(count));
            sum.divide(count, sum.postgres_scale(count)).unwrap().to_string()
        };
        assert_eq!(average("3", "2"), "1.5000000000000000");
        assert_eq!(average("100002", "2"), "50001.000000000000");
        assert_eq!(average("10", "3"), "3.3333333333333333");
        assert_eq!(average("1", "3"), "0.33333333333333333333");
    }
}
