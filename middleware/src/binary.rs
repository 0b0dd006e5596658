//! PostgreSQL's binary form of values, from the text form in which sources send them.

use std::net::IpAddr;

use bytes::BufMut as _;
use orthodrome_geotp::sql::Kind;

use super::postgres_wire::{from_hex, kind};

/// Maximum depth of an array, as at PostgreSQL.
const DEPTH_MAX: usize = 6;
/// The first number of a type that is not PostgreSQL's own.
const FIRST_OF_USERS: u32 = 16_384;

/// The types of arrays, each with the type of its elements.
const ARRAYS: &[(u32, u32)] = &[
    (143, 142),
    (199, 114),
    (271, 5069),
    (629, 628),
    (651, 650),
    (719, 718),
    (775, 774),
    (791, 790),
    (1000, 16),
    (1001, 17),
    (1002, 18),
    (1003, 19),
    (1005, 21),
    (1007, 23),
    (1009, 25),
    (1010, 27),
    (1011, 28),
    (1012, 29),
    (1014, 1042),
    (1015, 1043),
    (1016, 20),
    (1017, 600),
    (1018, 601),
    (1019, 602),
    (1020, 603),
    (1021, 700),
    (1022, 701),
    (1027, 604),
    (1028, 26),
    (1040, 829),
    (1041, 869),
    (1115, 1114),
    (1182, 1082),
    (1183, 1083),
    (1185, 1184),
    (1187, 1186),
    (1231, 1700),
    (1263, 2275),
    (1270, 1266),
    (1561, 1560),
    (1563, 1562),
    (2201, 1790),
    (2951, 2950),
    (3221, 3220),
    (3807, 3802),
    (3905, 3904),
    (3907, 3906),
    (3909, 3908),
    (3911, 3910),
    (3913, 3912),
    (3927, 3926),
    (4073, 4072),
];

/// The types of ranges, each with the type of its bounds.
const RANGES: &[(u32, u32)] =
    &[(3904, 23), (3906, 1700), (3908, 1114), (3910, 1184), (3912, 1082), (3926, 20)];

fn member(of: &[(u32, u32)], oid: u32) -> Option<u32> {
    of.iter().find(|(whole, _)| *whole == oid).map(|(_, member)| *member)
}

/// A field of a row in binary form: its bytes if the type is `bytea`, otherwise its text. None if
/// the proxy does not know the binary form of the type, or the text is no value of the type.
pub(crate) fn field(cell: &[u8], oid: u32) -> Option<Vec<u8>> {
    if kind(oid) == Kind::Bytes { Some(cell.to_vec()) } else { value(cell, oid) }
}

/// A value from its text.
fn value(cell: &[u8], oid: u32) -> Option<Vec<u8>> {
    if let Some(element) = member(ARRAYS, oid) {
        return array(std::str::from_utf8(cell).ok()?, element);
    }
    if let Some(bound) = member(RANGES, oid) {
        return range(std::str::from_utf8(cell).ok()?, bound);
    }
    let text = std::str::from_utf8(cell);
    Some(match oid {
        // char, name, text, json, xml, pg_node_tree, unknown, bpchar, varchar, refcursor, cstring,
        // void
        18 | 19 | 25 | 114 | 142 | 194 | 705 | 1042 | 1043 | 1790 | 2275 | 2278 => cell.to_vec(),
        // jsonb, jsonpath: the version comes first.
        3802 | 4072 => [&[1], cell].concat(),
        16 => vec![u8::from(matches!(cell, b"t" | b"1" | b"true"))],
        17 => from_hex(cell)?,
        21 => text.ok()?.parse::<i16>().ok()?.to_be_bytes().to_vec(),
        23 => text.ok()?.parse::<i32>().ok()?.to_be_bytes().to_vec(),
        20 => text.ok()?.parse::<i64>().ok()?.to_be_bytes().to_vec(),
        // oid, xid, cid, and the types of names in the catalogues, if there is no name
        24 | 26 | 28 | 29 | 2202..=2206 | 3734 | 3769 | 4089 | 4096 | 4191 => {
            text.ok()?.parse::<u32>().ok()?.to_be_bytes().to_vec()
        }
        5069 => text.ok()?.parse::<u64>().ok()?.to_be_bytes().to_vec(),
        700 => text.ok()?.parse::<f32>().ok()?.to_be_bytes().to_vec(),
        701 => text.ok()?.parse::<f64>().ok()?.to_be_bytes().to_vec(),
        1700 => numeric(text.ok()?)?,
        790 => money(text.ok()?)?.to_be_bytes().to_vec(),
        1082 => date(text.ok()?)?.to_be_bytes().to_vec(),
        1083 => time_of_day(text.ok()?)?.to_be_bytes().to_vec(),
        1114 | 1184 => micros(text.ok()?)?.to_be_bytes().to_vec(),
        1266 => {
            let (time, east) = zoned(text.ok()?)?;
            let mut out = time_of_day(time)?.to_be_bytes().to_vec();
            out.put_i32(-east);
            out
        }
        1186 => interval(text.ok()?)?,
        2950 => {
            let digits: Vec<u8> = cell.iter().copied().filter(|byte| *byte != b'-').collect();
            let bytes = from_hex(&[b"\\x", digits.as_slice()].concat())?;
            (bytes.len() == 16).then_some(bytes)?
        }
        // int2vector, oidvector
        22 => vector(text.ok()?, 21)?,
        30 => vector(text.ok()?, 26)?,
        27 => {
            let inner = text.ok()?.strip_prefix('(')?.strip_suffix(')')?;
            let (block, place) = inner.split_once(',')?;
            let mut out = block.parse::<u32>().ok()?.to_be_bytes().to_vec();
            out.put_u16(place.parse().ok()?);
            out
        }
        3220 => {
            let (high, low) = text.ok()?.split_once('/')?;
            let part = |digits| u32::from_str_radix(digits, 16).ok();
            [part(high)?.to_be_bytes(), part(low)?.to_be_bytes()].concat()
        }
        650 | 869 => address(text.ok()?, oid == 650)?,
        829 | 774 => {
            let digits = text.ok()?.replace(':', "");
            let bytes = from_hex(format!("\\x{digits}").as_bytes())?;
            (bytes.len() == if oid == 829 { 6 } else { 8 }).then_some(bytes)?
        }
        1560 | 1562 => bits(text.ok()?)?,
        600 | 601 | 603 | 628 | 718 => {
            let count = match oid {
                600 => 2,
                601 | 603 => 4,
                _ => 3,
            };
            let numbers = numbers(text.ok()?)?;
            if numbers.len() != count {
                return None;
            }
            numbers.into_iter().flat_map(f64::to_be_bytes).collect()
        }
        602 | 604 => {
            let text = text.ok()?;
            let numbers = numbers(text)?;
            let mut out = Vec::new();
            if oid == 602 {
                out.put_u8(u8::from(text.starts_with('(')));
            }
            out.put_i32(i32::try_from(numbers.len() / 2).ok()?);
            out.extend(numbers.into_iter().flat_map(f64::to_be_bytes));
            out
        }
        // Enumerations are texts in both forms. The proxy cannot know the form of other types of
        // users, but what is written in parentheses or braces is a row or an array.
        FIRST_OF_USERS.. if !matches!(cell.first(), Some(b'(' | b'{' | b'[')) => cell.to_vec(),
        _ => return None,
    })
}

/// `numeric`: groups of four digits with a weight.
fn numeric(text: &str) -> Option<Vec<u8>> {
    // No digits, no weight, the sign, and a scale that means nothing.
    match text {
        "NaN" => return Some(vec![0, 0, 0, 0, 0xc0, 0, 0, 0]),
        "Infinity" => return Some(vec![0, 0, 0, 0, 0xd0, 0, 0, 0x20]),
        "-Infinity" => return Some(vec![0, 0, 0, 0, 0xf0, 0, 0, 0x20]),
        _ => {}
    }
    let (is_negative, digits) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    if whole.is_empty() || !whole.chars().chain(fraction.chars()).all(|c| c.is_ascii_digit()) {
        return None;
    }
    let scale = fraction.len();
    let whole = format!("{}{whole}", "0".repeat((4 - whole.len() % 4) % 4));
    let fraction = format!("{fraction}{}", "0".repeat((4 - fraction.len() % 4) % 4));
    let all = format!("{whole}{fraction}");
    let groups: Option<Vec<i16>> = all
        .as_bytes()
        .chunks(4)
        .map(|group| std::str::from_utf8(group).ok()?.parse().ok())
        .collect();
    let groups = groups?;
    let leading = groups.iter().take_while(|group| **group == 0).count();
    let weight = whole.len() as i64 / 4 - 1 - leading as i64;
    let mut kept: Vec<i16> = groups.into_iter().skip(leading).collect();
    while kept.last() == Some(&0) {
        kept.pop();
    }
    let mut out = Vec::new();
    out.put_i16(kept.len() as i16);
    out.put_i16(if kept.is_empty() { 0 } else { weight as i16 });
    out.put_u16(if is_negative && !kept.is_empty() { 0x4000 } else { 0 });
    out.put_i16(scale as i16);
    kept.into_iter().for_each(|group| out.put_i16(group));
    Some(out)
}

/// `money` in its smallest unit. Its text has a currency's sign and separators, but all digits.
fn money(text: &str) -> Option<i64> {
    let digits: String = text.chars().filter(char::is_ascii_digit).collect();
    let is_negative = text.contains(['-', '(']);
    let signed = if is_negative { format!("-{digits}") } else { digits };
    signed.parse().ok()
}

/// A text without ` BC` at its end, and whether it was there.
fn before_christ(text: &str) -> (&str, bool) {
    text.strip_suffix(" BC").map_or((text, false), |rest| (rest, true))
}

/// `date`: days since 2000-01-01.
fn date(text: &str) -> Option<i32> {
    match text {
        "infinity" => Some(i32::MAX),
        "-infinity" => Some(i32::MIN),
        _ => {
            let (text, is_bc) = before_christ(text);
            days(text, is_bc)
        }
    }
}

/// Days since 2000-01-01.
fn days(text: &str, is_bc: bool) -> Option<i32> {
    let mut parts = text.splitn(3, '-').map(str::parse::<i64>);
    let (year, month, day) = (parts.next()?.ok()?, parts.next()?.ok()?, parts.next()?.ok()?);
    // MariaDB has dates with zeros, and PostgreSQL has not.
    if !(1..=6_000_000).contains(&year) || !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    // The year before 1 is 1 BC.
    let year = if is_bc { 1 - year } else { year };
    // In this algorithm (days from civil) the year begins in March.
    let (year, month) = if month <= 2 { (year - 1, month + 9) } else { (year, month - 3) };
    let era = year.div_euclid(400);
    let of_era = year.rem_euclid(400);
    let of_year = (153 * month + 2) / 5 + day - 1;
    let days = era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468;
    i32::try_from(days - 10_957).ok()
}

/// Microseconds since midnight. MariaDB's times may be outside of a day, and PostgreSQL's may not.
fn time_of_day(text: &str) -> Option<i64> {
    let micros = clock(text)?;
    (0..=86_400_000_000).contains(&micros).then_some(micros)
}

/// `04:05:06.789` in microseconds, without a sign.
fn clock(text: &str) -> Option<i64> {
    let (clock, fraction) = text.split_once('.').unwrap_or((text, ""));
    let mut parts = clock.splitn(3, ':').map(|part| part.parse::<u32>().map(i64::from));
    let (hour, minute, second) = (parts.next()?.ok()?, parts.next()?.ok()?, parts.next()?.ok()?);
    let fraction: u32 = format!("{fraction:0<6}").get(..6)?.parse().ok()?;
    let seconds = (hour * 60 + minute) * 60 + second;
    seconds.checked_mul(1_000_000)?.checked_add(i64::from(fraction))
}

/// A time, and how many seconds its zone is east of UTC. In `12:00:00+05:30` the offset is how much
/// the zone is ahead of UTC.
fn zoned(text: &str) -> Option<(&str, i32)> {
    let at = text.find(['+', '-']).unwrap_or(text.len());
    let (time, zone) = text.split_at_checked(at)?;
    let sign = if zone.starts_with('-') { -1 } else { 1 };
    let parts = zone.get(1..).unwrap_or_default().split(':').filter(|part| !part.is_empty());
    let mut seconds = 0;
    for (part, unit) in parts.zip([3_600, 60, 1]) {
        // A zone is less than a day from UTC.
        let part = part.parse::<i32>().ok().filter(|part| (0..60).contains(part))?;
        seconds += part * unit;
    }
    Some((time, sign * seconds))
}

/// `timestamp` and `timestamptz`: microseconds since 2000-01-01.
fn micros(text: &str) -> Option<i64> {
    match text {
        "infinity" => return Some(i64::MAX),
        "-infinity" => return Some(i64::MIN),
        _ => {}
    }
    let (text, is_bc) = before_christ(text);
    let (date, time) = text.split_once(' ')?;
    let (time, east) = zoned(time)?;
    let local = i64::from(days(date, is_bc)?)
        .checked_mul(86_400_000_000)?
        .checked_add(time_of_day(time)?)?;
    local.checked_sub(i64::from(east) * 1_000_000)
}

/// `interval`, in PostgreSQL's own style: `1 year 2 mons -3 days +04:05:06.789`.
fn interval(text: &str) -> Option<Vec<u8>> {
    let (mut micros, mut days, mut months) = (0_i64, 0_i32, 0_i32);
    let mut words = text.split(' ');
    while let Some(word) = words.next() {
        if word.contains(':') {
            let (sign, rest) = match word.strip_prefix('-') {
                Some(rest) => (-1, rest),
                None => (1, word.strip_prefix('+').unwrap_or(word)),
            };
            micros = sign * clock(rest)?;
            continue;
        }
        let number: i32 = word.parse().ok()?;
        match words.next()? {
            "year" | "years" => months = months.checked_add(number.checked_mul(12)?)?,
            "mon" | "mons" => months = months.checked_add(number)?,
            "day" | "days" => days = number,
            _ => return None,
        }
    }
    let mut out = micros.to_be_bytes().to_vec();
    out.put_i32(days);
    out.put_i32(months);
    Some(out)
}

/// `inet` and `cidr`.
fn address(text: &str, is_cidr: bool) -> Option<Vec<u8>> {
    let (host, bits) = match text.split_once('/') {
        Some((host, bits)) => (host, Some(bits.parse::<u8>().ok()?)),
        None => (text, None),
    };
    let (family, bytes) = match host.parse().ok()? {
        IpAddr::V4(host) => (2, host.octets().to_vec()),
        IpAddr::V6(host) => (3, host.octets().to_vec()),
    };
    let length = u8::try_from(bytes.len()).ok()?;
    let head = [family, bits.unwrap_or(length * 8), u8::from(is_cidr), length];
    Some([&head, bytes.as_slice()].concat())
}

/// `bit` and `varbit`.
fn bits(text: &str) -> Option<Vec<u8>> {
    let mut out = i32::try_from(text.len()).ok()?.to_be_bytes().to_vec();
    for eight in text.as_bytes().chunks(8) {
        let mut byte = 0;
        for (place, bit) in eight.iter().enumerate() {
            match bit {
                b'1' => byte |= 0x80 >> place,
                b'0' => {}
                _ => return None,
            }
        }
        out.push(byte);
    }
    Some(out)
}

/// The numbers of a geometric value.
fn numbers(text: &str) -> Option<Vec<f64>> {
    let parts = text.split(['(', ')', '[', ']', '{', '}', '<', '>', ',']);
    parts.filter(|part| !part.is_empty()).map(|part| part.parse().ok()).collect()
}

fn put_value(out: &mut Vec<u8>, value: &[u8]) -> Option<()> {
    out.put_i32(i32::try_from(value.len()).ok()?);
    out.extend_from_slice(value);
    Some(())
}

/// `int2vector` and `oidvector`: an array that begins with 0.
fn vector(text: &str, element: u32) -> Option<Vec<u8>> {
    let elements: Vec<&str> = text.split(' ').filter(|word| !word.is_empty()).collect();
    let mut out = Vec::new();
    out.put_i32(1);
    out.put_i32(0);
    out.put_u32(element);
    out.put_i32(i32::try_from(elements.len()).ok()?);
    out.put_i32(0);
    for text in elements {
        put_value(&mut out, &value(text.as_bytes(), element)?)?;
    }
    Some(out)
}

/// A range: `empty`, or `[1,5)` with bounds that may be quoted or missing.
fn range(text: &str, bound: u32) -> Option<Vec<u8>> {
    const EMPTY: u8 = 0x01;
    const LOWER_IS_IN: u8 = 0x02;
    const UPPER_IS_IN: u8 = 0x04;
    const NO_LOWER: u8 = 0x08;
    const NO_UPPER: u8 = 0x10;
    if text == "empty" {
        return Some(vec![EMPTY]);
    }
    let mut flags = match text.chars().next()? {
        '[' => LOWER_IS_IN,
        '(' => 0,
        _ => return None,
    };
    flags |= match text.chars().next_back()? {
        ']' => UPPER_IS_IN,
        ')' => 0,
        _ => return None,
    };
    let mut reader = Reader { rest: text.get(1..text.len() - 1)? };
    let lower = reader.item(&[','])?;
    reader.rest = reader.rest.strip_prefix(',')?;
    let upper = reader.item(&[])?;
    let mut out = vec![0];
    for (item, missing) in [(lower, NO_LOWER), (upper, NO_UPPER)] {
        if item.text.is_empty() && !item.is_quoted {
            flags |= missing;
        } else {
            put_value(&mut out, &value(item.text.as_bytes(), bound)?)?;
        }
    }
    if let Some(first) = out.first_mut() {
        *first = flags;
    }
    Some(out)
}

/// An array: `{1,NULL,"a,b"}`, `{{1},{2}}`, or with bounds, `[0:1]={1,2}`.
fn array(text: &str, element: u32) -> Option<Vec<u8>> {
    let (bounds, text) = match text.split_once('=') {
        Some((bounds, rest)) if text.starts_with('[') => (bounds, rest),
        _ => ("", text),
    };
    let lowest: Option<Vec<i32>> = bounds
        .split(['[', ']'])
        .filter(|part| !part.is_empty())
        .map(|part| part.split_once(':')?.0.parse().ok())
        .collect();
    let lowest = lowest?;
    // Boxes contain commas.
    let delimiter = if element == 603 { ';' } else { ',' };
    let mut reader = Reader { rest: text };
    let mut elements = Elements { lengths: Vec::new(), items: Vec::new() };
    reader.array(delimiter, 0, &mut elements)?;
    if !reader.rest.is_empty() {
        return None;
    }
    let Elements { lengths, items } = elements;
    let mut out = Vec::new();
    if items.is_empty() {
        out.put_i32(0);
        out.put_i32(0);
        out.put_u32(element);
        return Some(out);
    }
    out.put_i32(i32::try_from(lengths.len()).ok()?);
    out.put_i32(i32::from(items.iter().any(Item::is_null)));
    out.put_u32(element);
    for (depth, length) in lengths.iter().enumerate() {
        out.put_i32(i32::try_from(*length).ok()?);
        out.put_i32(lowest.get(depth).copied().unwrap_or(1));
    }
    for item in items {
        if item.is_null() {
            out.put_i32(-1);
        } else {
            put_value(&mut out, &value(item.text.as_bytes(), element)?)?;
        }
    }
    Some(out)
}

/// The elements of an array.
struct Elements {
    /// The number of elements in each dimension.
    lengths: Vec<usize>,
    items: Vec<Item>,
}

/// An element of an array, or a bound of a range.
struct Item {
    text: String,
    is_quoted: bool,
}

impl Item {
    fn is_null(&self) -> bool {
        !self.is_quoted && self.text == "NULL"
    }
}

/// Reads the text of an array or of a range.
struct Reader<'a> {
    rest: &'a str,
}

impl Reader<'_> {
    /// Reads one level of an array with its braces.
    fn array(&mut self, delimiter: char, depth: usize, into: &mut Elements) -> Option<()> {
        if depth >= DEPTH_MAX {
            return None;
        }
        self.rest = self.rest.strip_prefix('{')?;
        let mut count = 0;
        if let Some(rest) = self.rest.strip_prefix('}') {
            self.rest = rest;
            return Some(());
        }
        // The lengths are those of the first element of each level.
        let is_first = into.lengths.len() == depth;
        if is_first {
            into.lengths.push(0);
        }
        loop {
            if self.rest.starts_with('{') {
                self.array(delimiter, depth + 1, into)?;
            } else {
                let item = self.item(&[delimiter, '}'])?;
                into.items.push(item);
            }
            count += 1;
            if let Some(rest) = self.rest.strip_prefix(delimiter) {
                self.rest = rest;
            } else {
                self.rest = self.rest.strip_prefix('}')?;
                break;
            }
        }
        if is_first && let Some(length) = into.lengths.get_mut(depth) {
            *length = count;
        }
        Some(())
    }

    /// Reads an item up to one of `ends`, or to the end. A quote may be written as two, or after a
    /// backslash.
    fn item(&mut self, ends: &[char]) -> Option<Item> {
        let (mut text, mut is_quoted, mut in_quotes) = (String::new(), false, false);
        let mut chars = self.rest.char_indices().peekable();
        let mut end = self.rest.len();
        while let Some((at, c)) = chars.next() {
            match c {
                '\\' => text.push(chars.next()?.1),
                '"' if in_quotes && chars.peek().is_some_and(|(_, next)| *next == '"') => {
                    chars.next();
                    text.push('"');
                }
                '"' => {
                    in_quotes = !in_quotes;
                    is_quoted = true;
                }
                c if !in_quotes && ends.contains(&c) => {
                    end = at;
                    break;
                }
                c => text.push(c),
            }
        }
        if in_quotes {
            return None;
        }
        self.rest = self.rest.get(end..)?;
        Some(Item { text, is_quoted })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(cell: &str, oid: u32) -> Option<String> {
        let bytes = value(cell.as_bytes(), oid)?;
        Some(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    #[test]
    fn binary_forms_are_postgresql_s() {
        assert_eq!(value(b"2000-01-02", 1082).unwrap(), 1_i32.to_be_bytes());
        assert_eq!(value(b"1999-12-31", 1082).unwrap(), (-1_i32).to_be_bytes());
        let micros = 1_500_000_i64.to_be_bytes();
        assert_eq!(value(b"2000-01-01 00:00:01.5", 1114).unwrap(), micros);
        assert_eq!(numeric("12345.678").unwrap(), [0, 3, 0, 1, 0, 0, 0, 3, 0, 1, 9, 41, 26, 124]);
        assert_eq!(numeric("-0.0001").unwrap(), [0, 1, 255, 255, 64, 0, 0, 4, 0, 1]);
        assert_eq!(numeric("0").unwrap(), [0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(numeric("Infinity").unwrap(), [0, 0, 0, 0, 0xd0, 0, 0, 0x20]);
        assert_eq!(numeric("-Infinity").unwrap(), [0, 0, 0, 0, 0xf0, 0, 0, 0x20]);
        assert_eq!(numeric("NaN").unwrap(), [0, 0, 0, 0, 0xc0, 0, 0, 0]);
        assert!(value(b"x", 23).is_none());
    }

    #[test]
    fn types_without_a_kind_have_postgresql_s_binary_form() {
        let time = "00000003668e3e60000000040000000e";
        for (oid, text, binary) in [
            (1186, "1 year 2 mons 4 days 04:03:25.5", Some(time.to_owned())),
            (1186, "P1Y", None),
            (26, "4294967295", Some("ffffffff".into())),
            (790, "-$1,234.56", Some(format!("{:016x}", -123_456_i64))),
            (3802, "{}", Some("017b7d".into())),
            (1007, "{}", Some("000000000000000000000017".into())),
            (
                1007,
                "[0:1]={7,NULL}",
                Some("00000001000000010000001700000002000000000000000400000007ffffffff".into()),
            ),
            (
                1009,
                r#"{"a\"b"}"#,
                Some("000000010000000000000019000000010000000100000003612262".into()),
            ),
            (3904, "[1,)", Some("120000000400000001".into())),
            (869, "10.0.0.1/8", Some("020800040a000001".into())),
            (1266, "04:05:06+02", Some("000000036c8bc080ffffe3e0".into())),
            // A row, and an enumeration.
            (20_000, "(1,2)", None),
            (20_000, "mild", Some("6d696c64".into())),
            // A name of a table, which stands for its number.
            (2205, "accounts", None),
        ] {
            assert_eq!(hex(text, oid), binary, "{oid}: {text}");
        }
    }

    #[test]
    fn texts_that_are_no_value_of_their_type_are_refused() {
        for (oid, text) in [
            (1007, "{1"),
            (1007, "{1}x"),
            (1007, "{x}"),
            (1009, "{\"a}"),
            (1082, "0000-00-00"),
            (1082, "9223372036854775807-01-01"),
            (1184, "2024-01-01 00:00:00+2147483647"),
            (1083, "-01:00:00"),
            (1083, "100:00:00"),
            (3904, "1,2"),
            (600, "(1,2,3)"),
            (2950, "00"),
            (790, "$"),
            (1186, "1 fortnight"),
        ] {
            assert_eq!(hex(text, oid), None, "{oid}: {text}");
        }
    }

    #[test]
    fn moments_of_every_zone_are_the_same_in_binary_form() {
        let utc = micros("2024-03-01 12:00:00.5+00");
        assert!(utc.is_some());
        for text in [
            "2024-03-01 12:00:00.5",
            "2024-03-01 17:30:00.5+05:30",
            "2024-03-01 05:00:00.5-07",
            "2024-03-02 02:00:00.5+14:00:00",
        ] {
            assert_eq!(micros(text), utc, "{text}");
        }
    }
}
