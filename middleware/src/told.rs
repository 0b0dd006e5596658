//! The values of a row in the form of the types that a PostgreSQL client was told. A source of the
//! other kind may compute a value of another type: MariaDB's booleans are numbers, and its sums are
//! decimals. A client reads the bytes as the type that it was told, so they must be of it.

use std::borrow::Cow;

use orthodrome_geotp::sql::{Column, Kind, plain_time};

use super::errors::SqlError;
use super::postgres_wire::{kind, oid};

/// PostgreSQL's number of `oid`, which has the range of no signed number.
const OID: u32 = 26;

/// PostgreSQL's number of a column's type.
pub(crate) fn type_of(column: &Column) -> u32 {
    if column.oid == 0 { oid(column.kind) } else { column.oid }
}

/// The text of a value as one of the type `to` that the client was told. None if it is no value of
/// that type. `is_utc`: the session's time zone is UTC.
pub(crate) fn fitted<'a>(
    cell: &'a [u8],
    from: &Column,
    to: u32,
    is_utc: bool,
) -> Option<Cow<'a, [u8]>> {
    let kept = || Some(Cow::Borrowed(cell));
    if from.oid == to {
        // A source of PostgreSQL writes its own types.
        return kept();
    }
    let text = std::str::from_utf8(cell).ok();
    let whole = |from: i64, to: i64| match cell {
        b"t" => Some(Cow::Borrowed(&b"1"[..])),
        b"f" => Some(Cow::Borrowed(&b"0"[..])),
        _ => {
            let plain = whole(text?)?;
            let number: i64 = plain.parse().ok()?;
            (from..=to).contains(&number).then(|| Cow::Owned(number.to_string().into_bytes()))
        }
    };
    match kind(to) {
        Kind::Bool => truth(cell).map(Cow::Borrowed),
        Kind::Int2 => whole(i16::MIN.into(), i16::MAX.into()),
        Kind::Int4 => whole(i32::MIN.into(), i32::MAX.into()),
        Kind::Int8 if to != OID => whole(i64::MIN, i64::MAX),
        Kind::Decimal => {
            let is_decimal = |text: &str| {
                let digits = text.strip_prefix('-').unwrap_or(text);
                digits.starts_with(|c: char| c.is_ascii_digit())
                    && digits.chars().all(|c| c.is_ascii_digit() || c == '.')
            };
            match text? {
                "NaN" | "Infinity" | "-Infinity" => kept(),
                text if is_decimal(text) => kept(),
                // A number with an exponent.
                text => {
                    let number = text.parse::<f64>().ok().filter(|number| number.is_finite())?;
                    Some(Cow::Owned(number.to_string().into_bytes()))
                }
            }
        }
        Kind::Float4 | Kind::Float8 => text?.parse::<f64>().ok().and_then(|_| kept()),
        Kind::Date => match text?.split_once(' ') {
            None => kept(),
            Some((date, time)) => {
                let is_midnight = time.bytes().all(|byte| matches!(byte, b'0' | b':' | b'.'));
                is_midnight.then(|| Cow::Owned(date.as_bytes().to_vec()))
            }
        },
        Kind::Time => Some(plain_time(cell).map_or(Cow::Borrowed(cell), Cow::Owned)),
        Kind::Timestamp | Kind::TimestampTz if matches!(cell, b"infinity" | b"-infinity") => kept(),
        Kind::Timestamp | Kind::TimestampTz => {
            let mut plain = plain_time(cell).unwrap_or_else(|| cell.to_vec());
            if !plain.contains(&b' ') {
                plain.extend_from_slice(b" 00:00:00");
            }
            let time = plain.iter().position(|byte| *byte == b' ').unwrap_or(0);
            let zone = plain.iter().skip(time).position(|byte| matches!(byte, b'+' | b'-'));
            match (kind(to), zone) {
                (Kind::TimestampTz, None) if is_utc => plain.extend_from_slice(b"+00"),
                (Kind::TimestampTz, None) => return None,
                (Kind::Timestamp, Some(zone)) => plain.truncate(time + zone),
                _ => {}
            }
            Some(Cow::Owned(plain))
        }
        // These are their texts or bytes, whatever their source calls them.
        _ => kept(),
    }
}

/// A boolean: `t` or `f`. MariaDB's `bit(1)` is a byte.
fn truth(cell: &[u8]) -> Option<&'static [u8]> {
    match cell {
        b"t" | b"true" | [1] => Some(b"t"),
        b"f" | b"false" | [0] => Some(b"f"),
        _ => {
            let number: f64 = std::str::from_utf8(cell).ok()?.parse().ok()?;
            Some(if number == 0.0 { b"f" } else { b"t" })
        }
    }
}

/// A number without a fraction; none if its fraction is not 0.
fn whole(text: &str) -> Option<Cow<'_, str>> {
    match text.split_once('.') {
        None if text.contains(['e', 'E']) => {
            let number: f64 = text.parse().ok()?;
            (number.fract() == 0.0).then(|| Cow::Owned(number.to_string()))
        }
        None => Some(Cow::Borrowed(text)),
        Some((whole, fraction)) => {
            fraction.bytes().all(|byte| byte == b'0').then_some(Cow::Borrowed(whole))
        }
    }
}

/// The error for a value that is not of the type that the client was told.
pub(crate) fn does_not_fit(column: &Column, to: u32) -> SqlError {
    SqlError::new(
        "0A000",
        format!(
            "column \"{}\" was described with type {to}, and its source computed a value that is none of it; CAST the \
             column to its type, or prepare the statement again",
            column.name
        ),
    )
}

/// The error for a statement whose result has other columns than were described.
pub(crate) fn plan_changed() -> SqlError {
    SqlError::new("0A000", "cached plan must not change result type")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(cell: &str, kind: Kind, to: u32) -> Option<String> {
        let column = Column { name: "c".into(), kind, oid: 0 };
        let fitted = fitted(cell.as_bytes(), &column, to, true)?;
        Some(String::from_utf8(fitted.into_owned()).unwrap())
    }

    #[test]
    fn values_of_mariadb_are_of_the_type_that_was_described() {
        for (cell, kind, to, wanted) in [
            ("1", Kind::Int2, 16, Some("t")),
            ("0", Kind::Int4, 16, Some("f")),
            ("f", Kind::Bool, 16, Some("f")),
            ("yes", Kind::Text, 16, None),
            ("10", Kind::Decimal, 20, Some("10")),
            ("10.0000", Kind::Decimal, 20, Some("10")),
            ("10.5", Kind::Decimal, 20, None),
            ("t", Kind::Bool, 23, Some("1")),
            ("70000", Kind::Int4, 21, None),
            ("1e3", Kind::Float8, 23, Some("1000")),
            ("1e3", Kind::Float8, 1700, Some("1000")),
            ("2.50", Kind::Decimal, 1700, Some("2.50")),
            ("abc", Kind::Text, 1700, None),
            ("2024-01-01 00:00:00", Kind::Timestamp, 1082, Some("2024-01-01")),
            ("2024-01-01 01:00:00", Kind::Timestamp, 1082, None),
            ("2024-01-01 00:00:00.000000", Kind::Timestamp, 1114, Some("2024-01-01 00:00:00")),
            ("2024-01-01 00:00:00.500000", Kind::Timestamp, 1184, Some("2024-01-01 00:00:00.5+00")),
            ("2024-01-01", Kind::Date, 1114, Some("2024-01-01 00:00:00")),
            ("-infinity", Kind::Timestamp, 1114, Some("-infinity")),
            ("10:00:00.120", Kind::Time, 1083, Some("10:00:00.12")),
            ("any", Kind::Int4, 25, Some("any")),
        ] {
            assert_eq!(shown(cell, kind, to).as_deref(), wanted, "{cell} as {to}");
        }
        let column = Column { name: "c".into(), kind: Kind::Timestamp, oid: 0 };
        // Only UTC is known here.
        assert_eq!(fitted(b"2024-01-01 00:00:00", &column, 1184, false), None);
    }
}
