//! Parameters of PostgreSQL's extended protocol: their types, and their two forms.

use bytes::Bytes;
use orthodrome_geotp::sql::system::array_parameters;
use orthodrome_geotp::sql::{Kind, Parsed, Value, Verb};

use super::postgres_wire::{from_bytea, kind};
use super::session::{Session, SqlError};

/// Converts a bound parameter; its name is for error messages.
pub(crate) fn parameter(
    value: Option<Bytes>,
    oid: u32,
    is_binary: bool,
    name: &str,
) -> Result<Value, SqlError> {
    let Some(bytes) = value else { return Ok(Value::Null) };
    let kind = kind(oid);
    let is_text = !is_binary || matches!(kind, Kind::Text | Kind::Json) || oid == 0;
    if is_text && (bytes.contains(&0) || std::str::from_utf8(&bytes).is_err()) {
        let why = format!("invalid byte sequence for encoding \"UTF8\" in {name}");
        return Err(SqlError::new("22021", why));
    }
    let found = if is_binary { from_binary(&bytes, kind, oid) } else { from_text(&bytes, kind) };
    found.ok_or_else(|| match (is_binary, kind) {
        (true, _) => {
            let why = format!("{name} is not understood in binary form; send it as text");
            SqlError::new("0A000", why)
        }
        (false, _) => SqlError::new("22P02", format!("invalid input syntax in {name}")),
    })
}

fn from_text(bytes: &Bytes, kind: Kind) -> Option<Value> {
    let text = String::from_utf8(bytes.to_vec()).ok()?;
    Some(match kind {
        Kind::Int2 | Kind::Int4 | Kind::Int8 | Kind::Decimal => {
            Value::Number(text.trim().to_owned())
        }
        Kind::Bool => Value::Bool(matches!(text.as_str(), "t" | "true" | "1" | "on" | "yes")),
        Kind::Bytes => Value::Bytes(from_bytea(text.as_bytes())?),
        _ => Value::Text(text),
    })
}

/// The type of arrays of texts.
const TEXT_ARRAY: u32 = 1009;

/// Types of arrays whose elements' binary forms [`from_binary`] knows.
const ARRAYS: [u32; 19] = [
    1000, 1002, 1003, 1005, 1007, 1009, 1014, 1015, 1016, 1021, 1022, 1028, 1115, 1182, 1183, 1185,
    1187, 1231, 2951,
];

/// An array of one dimension in PostgreSQL's text form.
fn from_array(bytes: &Bytes) -> Option<Value> {
    let number = |at: usize| {
        let four = bytes.get(at..at.checked_add(4)?)?;
        Some(i32::from_be_bytes(four.try_into().ok()?))
    };
    let element = number(8)? as u32;
    if ARRAYS.contains(&element) {
        return None;
    }
    let (count, mut at) = match number(0)? {
        0 => (0, 12),
        1 => (number(12)?, 20),
        _ => return None,
    };
    let mut parts = Vec::new();
    for _ in 0..count {
        let length = number(at)?;
        at += 4;
        let Ok(length) = usize::try_from(length) else {
            parts.push("NULL".to_owned());
            continue;
        };
        let end = at.checked_add(length)?;
        let value = Bytes::copy_from_slice(bytes.get(at..end)?);
        at = end;
        parts.push(match from_binary(&value, kind(element), element)? {
            Value::Number(number) => number,
            Value::Bool(is_true) => is_true.to_string(),
            Value::Text(text) if !text.contains('\0') => {
                format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
            }
            Value::Text(_) | Value::Bytes(_) | Value::Null => return None,
        });
    }
    (at == bytes.len()).then(|| Value::Text(format!("{{{}}}", parts.join(","))))
}

fn from_binary(bytes: &Bytes, kind: Kind, oid: u32) -> Option<Value> {
    let array = |count: usize| if bytes.len() == count { Some(&bytes[..]) } else { None };
    Some(match kind {
        Kind::Bool => Value::Bool(bytes.first() == Some(&1)),
        Kind::Int2 => Value::Number(i16::from_be_bytes(array(2)?.try_into().ok()?).to_string()),
        Kind::Int4 => Value::Number(i32::from_be_bytes(array(4)?.try_into().ok()?).to_string()),
        // oid
        Kind::Int8 if oid == 26 => {
            Value::Number(u32::from_be_bytes(array(4)?.try_into().ok()?).to_string())
        }
        Kind::Int8 => Value::Number(i64::from_be_bytes(array(8)?.try_into().ok()?).to_string()),
        Kind::Float4 => Value::Text(f32::from_be_bytes(array(4)?.try_into().ok()?).to_string()),
        Kind::Float8 => Value::Text(f64::from_be_bytes(array(8)?.try_into().ok()?).to_string()),
        // jsonb begins with its version.
        Kind::Json if oid == 3802 => {
            Value::Text(String::from_utf8(bytes.strip_prefix(&[1])?.to_vec()).ok()?)
        }
        Kind::Text | Kind::Json => Value::Text(String::from_utf8(bytes.to_vec()).ok()?),
        // Untyped and binary: clients mean text.
        Kind::Other if oid == 0 => Value::Text(String::from_utf8(bytes.to_vec()).ok()?),
        Kind::Other if ARRAYS.contains(&oid) => from_array(bytes)?,
        Kind::Bytes => Value::Bytes(bytes.to_vec()),
        Kind::Uuid => {
            let hex: String = array(16)?.iter().map(|byte| format!("{byte:02x}")).collect();
            Value::Text(hex)
        }
        Kind::Decimal => number(bytes)?,
        Kind::Date => Value::Text(match i32::from_be_bytes(array(4)?.try_into().ok()?) {
            i32::MAX => "infinity".to_owned(),
            i32::MIN => "-infinity".to_owned(),
            days => {
                let (date, era) = date(days.into());
                format!("{date}{era}")
            }
        }),
        Kind::Time => Value::Text(clock(i64::from_be_bytes(array(8)?.try_into().ok()?))),
        Kind::Timestamp | Kind::TimestampTz => {
            let zone = if kind == Kind::TimestampTz { "+00" } else { "" };
            Value::Text(match i64::from_be_bytes(array(8)?.try_into().ok()?) {
                i64::MAX => "infinity".to_owned(),
                i64::MIN => "-infinity".to_owned(),
                micros => {
                    let (date, era) = date(micros.div_euclid(DAY));
                    format!("{date} {}{zone}{era}", clock(micros.rem_euclid(DAY)))
                }
            })
        }
        Kind::Other if oid == INTERVAL => interval(bytes)?,
        Kind::Other => return None,
    })
}

/// The type `interval`.
const INTERVAL: u32 = 1186;

/// Microseconds of a day.
const DAY: i64 = 86_400_000_000;

/// A date by the number of days since 2000-01-01, and the era if it is before year 1.
fn date(days: i64) -> (String, &'static str) {
    // In this algorithm (civil from days) the year begins in March.
    let days = days + 10_957 + 719_468;
    let (era, of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let of_years = of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096;
    let year = of_years / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year + era * 400 + i64::from(month <= 2);
    // The year before 1 is 1 BC.
    let (year, era) = if year > 0 { (year, "") } else { (1 - year, " BC") };
    (format!("{year:04}-{month:02}-{day:02}"), era)
}

/// A time of day by its microseconds.
fn clock(micros: i64) -> String {
    let (seconds, rest) = (micros / 1_000_000, micros % 1_000_000);
    let (hour, minute, second) = (seconds / 3_600, seconds / 60 % 60, seconds % 60);
    let fraction = if rest == 0 { String::new() } else { format!(".{rest:06}") };
    format!("{hour:02}:{minute:02}:{second:02}{fraction}")
}

/// `numeric`: groups of four digits.
fn number(bytes: &Bytes) -> Option<Value> {
    let word = |at: usize| -> Option<i16> {
        Some(i16::from_be_bytes(bytes.get(2 * at..2 * at + 2)?.try_into().ok()?))
    };
    let (count, weight, scale) = (word(0)?, i64::from(word(1)?), word(3)?);
    let sign = match word(2)? as u16 {
        0 => "",
        0x4000 => "-",
        0xc000 => return Some(Value::Text("NaN".into())),
        0xd000 => return Some(Value::Text("Infinity".into())),
        0xf000 => return Some(Value::Text("-Infinity".into())),
        _ => return None,
    };
    let (count, scale) = (usize::try_from(count).ok()?, usize::try_from(scale).ok()?);
    if bytes.len() != 8 + 2 * count {
        return None;
    }
    let group = |at: i64| -> Option<i16> {
        let at = usize::try_from(at).ok().filter(|at| *at < count);
        let group = at.map_or(Some(0), |at| word(4 + at))?;
        (0..10_000).contains(&group).then_some(group)
    };
    let mut whole = String::new();
    for at in 0..=weight {
        whole.push_str(&format!("{:04}", group(at)?));
    }
    let whole = whole.trim_start_matches('0');
    let mut fraction = String::new();
    for at in 0..scale.div_ceil(4) {
        fraction.push_str(&format!("{:04}", group(weight + 1 + i64::try_from(at).ok()?)?));
    }
    let fraction = fraction.get(..scale)?;
    let point = if scale > 0 { "." } else { "" };
    let whole = if whole.is_empty() { "0" } else { whole };
    Some(Value::Number(format!("{sign}{whole}{point}{fraction}")))
}

/// `interval`: microseconds, days and months.
fn interval(bytes: &Bytes) -> Option<Value> {
    if bytes.len() != 16 {
        return None;
    }
    let micros = i64::from_be_bytes(bytes.get(..8)?.try_into().ok()?);
    let days = i32::from_be_bytes(bytes.get(8..12)?.try_into().ok()?);
    let months = i32::from_be_bytes(bytes.get(12..)?.try_into().ok()?);
    Some(Value::Text(format!("{months} mons {days} days {micros} microseconds")))
}

/// Whether the proxy reads both forms of parameters of a type.
fn is_read(oid: u32) -> bool {
    kind(oid) != Kind::Other || oid == INTERVAL || ARRAYS.contains(&oid)
}

impl Session {
    /// The types of a statement's parameters, as the home of the catalogue understands it; 0 for a
    /// type that the proxy does not read in both forms, or that the home does not know.
    pub(crate) async fn parameter_types(&self, parsed: &Parsed) -> Vec<u32> {
        let mut types = vec![0; parsed.parameters];
        // A change of the schema that is not committed may hold locks which the home waits for.
        if matches!(parsed.verb, Verb::Data(_)) && !self.has_schema {
            let learned = self.types_at_home(&parsed.text).await.unwrap_or_default();
            let known = types.iter_mut().zip(learned).filter(|(_, oid)| is_read(*oid));
            known.for_each(|(own, oid)| *own = oid);
        }
        // What `= ANY ($1)` compares with is an array in any case.
        for number in array_parameters(&parsed.text).unwrap_or_default() {
            if let Some(it) = number.checked_sub(1).and_then(|place| types.get_mut(place))
                && *it == 0
            {
                *it = TEXT_ARRAY;
            }
        }
        types
    }
}

#[cfg(test)]
mod tests {
    use super::super::binary::field;
    use super::*;

    #[test]
    fn arrays_in_binary_form_are_read() {
        let array = |element: u32, parts: &[Option<&[u8]>]| {
            let mut bytes = Vec::new();
            for number in [1, 0, element as i32, parts.len() as i32, 1] {
                bytes.extend(i32::to_be_bytes(number));
            }
            for part in parts {
                bytes.extend(i32::to_be_bytes(part.map_or(-1, |part| part.len() as i32)));
                bytes.extend(part.unwrap_or_default());
            }
            Bytes::from(bytes)
        };
        let texts = array(25, &[Some(b"a"), None, Some(b"b\"\\")]);
        assert_eq!(
            from_binary(&texts, kind(TEXT_ARRAY), TEXT_ARRAY),
            Some(Value::Text("{\"a\",NULL,\"b\\\"\\\\\"}".into()))
        );
        let numbers = array(23, &[Some(&7_i32.to_be_bytes()), Some(&(-1_i32).to_be_bytes())]);
        assert_eq!(from_array(&numbers), Some(Value::Text("{7,-1}".into())));
        let empty = [0, 0, 25].map(i32::to_be_bytes).concat();
        assert_eq!(from_array(&Bytes::from(empty)), Some(Value::Text("{}".into())));
        // It ends too early, or has more elements than bytes, or bytes that no text has.
        assert_eq!(from_array(&numbers.slice(..numbers.len() - 1)), None);
        let mut many = numbers.to_vec();
        many[12..16].copy_from_slice(&i32::MAX.to_be_bytes());
        assert_eq!(from_array(&Bytes::from(many)), None);
        assert_eq!(from_array(&array(25, &[Some(b"a\0")])), None);
    }

    #[test]
    fn parameters_of_both_forms_are_read() {
        let of = |bytes: &[u8], oid, is_binary| {
            let read = parameter(Some(Bytes::copy_from_slice(bytes)), oid, is_binary, "$1");
            read.map_err(|error| error.sqlstate)
        };
        assert_eq!(of(&(-5_i32).to_be_bytes(), 23, true), Ok(Value::Number("-5".into())));
        assert_eq!(of(b"7", 0, false), Ok(Value::Text("7".into())));
        assert_eq!(parameter(None, 23, true, "$1"), Ok(Value::Null));
        assert_eq!(of(b"123", 23, true), Err("0A000".into()));
        assert_eq!(of(&7_u32.to_be_bytes(), 26, true), Ok(Value::Number("7".into())));
        assert_eq!(of(b"\x01{}", 3802, true), Ok(Value::Text("{}".into())));
        // Bytes are unchanged; text must be UTF-8 without zeros.
        assert_eq!(of(b"\xff\0", 17, true), Ok(Value::Bytes(vec![0xff, 0])));
        assert_eq!(of(b"\\xff00", 17, false), Ok(Value::Bytes(vec![0xff, 0])));
        assert_eq!(of(b"a\\\\\\377", 17, false), Ok(Value::Bytes(b"a\\\xff".to_vec())));
        assert_eq!(of(b"a\\9", 17, false), Err("22P02".into()));
        for (bytes, oid, is_binary) in
            [(b"\xff", 25, false), (b"\xff", 25, true), (b"\xff", 0, true), (b"\0", 25, false)]
        {
            assert_eq!(of(bytes, oid, is_binary), Err("22021".into()), "{bytes:?}, {oid}");
        }
    }

    #[test]
    fn moments_and_numbers_in_binary_form_are_read() {
        let of =
            |bytes: &[u8], oid| match from_binary(&Bytes::copy_from_slice(bytes), kind(oid), oid) {
                Some(Value::Text(text) | Value::Number(text)) => text,
                other => format!("{other:?}"),
            };
        // What `binary` writes is read back as it was.
        for (oid, text) in [
            (1082, "2024-02-29"),
            (1082, "2000-01-01"),
            (1082, "1999-12-31"),
            (1082, "0044-03-15 BC"),
            (1082, "infinity"),
            (1083, "23:59:59.000001"),
            (1083, "00:00:00"),
            (1114, "1969-07-20 20:17:40"),
            (1114, "2024-12-31 23:59:59.999999"),
            (1114, "-infinity"),
            (1184, "2024-01-01 00:00:00+00"),
            (1700, "0"),
            (1700, "-1234567.0089"),
            (1700, "100000000"),
            (1700, "0.00001"),
            (1700, "0.10"),
            (1700, "NaN"),
        ] {
            assert_eq!(of(&field(text.as_bytes(), oid).unwrap(), oid), text, "{oid}");
        }
        let hour =
            [3_600_000_000_i64.to_be_bytes().to_vec(), [2_i32, 3].map(i32::to_be_bytes).concat()]
                .concat();
        assert_eq!(of(&hour, INTERVAL), "3 mons 2 days 3600000000 microseconds");
        for (oid, bytes) in [(1082, 3), (1083, 7), (1114, 9), (1700, 7), (INTERVAL, 15), (1700, 9)]
        {
            assert_eq!(of(&vec![0; bytes], oid), "None", "{oid}");
        }
        // A group has four digits.
        let wrong = [1_i16, 0, 0, 0, 10_000].map(i16::to_be_bytes).concat();
        assert_eq!(of(&wrong, 1700), "None");
    }
}
