//! PostgreSQL's binary forms of arrays, and of types that are not those of a column of both kinds of
//! sources.

use bytes::Bytes;
use orthodrome_geotp::sql::{Kind, Value};

use super::postgres_front::{from_binary, to_binary};
use super::postgres_wire::kind;

/// The type of numbers of objects.
pub(super) const OID: u32 = 26;

/// The type of arrays of texts.
pub(super) const TEXT_ARRAY: u32 = 1009;

const INT2: u32 = 21;
const INT2_VECTOR: u32 = 22;
const OID_VECTOR: u32 = 30;
const JSONB: u32 = 3802;

/// The first number of a type that is no part of PostgreSQL itself, such as an enum's.
const FIRST_OF_USERS: u32 = 16_384;

/// The type of an array's elements; none if it is no array, or one of types without a binary form
/// here.
pub(super) fn element_of(array: u32) -> Option<u32> {
    Some(match array {
        199 => 114,
        1000 => 16,
        1001 => 17,
        1002 => 18,
        1003 => 19,
        1005 => INT2,
        1007 => 23,
        TEXT_ARRAY => 25,
        1014 => 1042,
        1015 => 1043,
        1016 => 20,
        1021 => 700,
        1022 => 701,
        1028 => OID,
        1115 => 1114,
        1182 => 1082,
        1183 => 1083,
        1185 => 1184,
        1231 => 1700,
        2951 => 2950,
        3807 => JSONB,
        _ => return None,
    })
}

/// An array of one dimension in PostgreSQL's text form.
pub(super) fn from_array(bytes: &Bytes) -> Option<Value> {
    let number = |at: usize| {
        let four = bytes.get(at..at.checked_add(4)?)?;
        Some(i32::from_be_bytes(four.try_into().ok()?))
    };
    let element = number(8)? as u32;
    if element_of(element).is_some() {
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
        let value = bytes.slice(at..bytes.get(at..end).map(|_| end)?);
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

/// A value of a type in PostgreSQL's binary form, from its text form; none if this does not know
/// the type's.
pub(super) fn binary_of(cell: &[u8], oid: u32) -> Option<Vec<u8>> {
    let text = || std::str::from_utf8(cell).ok();
    match oid {
        // Numbers of objects, transactions and commands.
        OID | 28 | 29 => Some(text()?.parse::<u32>().ok()?.to_be_bytes().to_vec()),
        INT2_VECTOR | OID_VECTOR => {
            let element = if oid == OID_VECTOR { OID } else { INT2 };
            let parts = text()?.split_whitespace().map(|part| Some(part.as_bytes().to_vec()));
            to_array(&parts.collect::<Vec<_>>(), element, 0)
        }
        JSONB => Some([b"\x01", cell].concat()),
        _ => match (element_of(oid), kind(oid)) {
            (Some(element), _) => to_array(&elements(cell)?, element, 1),
            // Both forms of `xml`, expressions, `void` and enums are the same.
            (None, Kind::Other) if !matches!(oid, 142 | 194 | 2278 | FIRST_OF_USERS..) => None,
            (None, kind) => to_binary(cell, kind),
        },
    }
}

/// An array of one dimension, or an empty one.
fn to_array(parts: &[Option<Vec<u8>>], element: u32, lower: i32) -> Option<Vec<u8>> {
    let has_nulls = i32::from(parts.iter().any(Option::is_none));
    let dimensions = i32::from(!parts.is_empty());
    let mut out = Vec::new();
    let put = |out: &mut Vec<u8>, number: i32| out.extend(number.to_be_bytes());
    put(&mut out, dimensions);
    put(&mut out, has_nulls);
    put(&mut out, element.cast_signed());
    if dimensions == 1 {
        put(&mut out, i32::try_from(parts.len()).ok()?);
        put(&mut out, lower);
    }
    for part in parts {
        match part {
            None => put(&mut out, -1),
            Some(part) => {
                let of_bytes = super::postgres_wire::from_bytea;
                let part = match kind(element) {
                    Kind::Bytes => of_bytes(part)?,
                    _ => binary_of(part, element)?,
                };
                put(&mut out, i32::try_from(part.len()).ok()?);
                out.extend(part);
            }
        }
    }
    Some(out)
}

/// The elements of an array in text form, `{1,"a b",NULL}`; none if it has several dimensions or
/// lower bounds of its own.
fn elements(cell: &[u8]) -> Option<Vec<Option<Vec<u8>>>> {
    let inner = cell.strip_prefix(b"{")?.strip_suffix(b"}")?;
    let mut parts = Vec::new();
    let mut bytes = inner.iter().copied().peekable();
    while bytes.peek().is_some() {
        let mut part = Vec::new();
        let is_quoted = bytes.next_if_eq(&b'"').is_some();
        loop {
            match bytes.next() {
                Some(b'"') if is_quoted => break,
                Some(b'\\') => part.push(bytes.next()?),
                Some(b'{' | b'}' | b'"' | b',') if !is_quoted => return None,
                Some(byte) => part.push(byte),
                None => return None,
            }
            if !is_quoted && matches!(bytes.peek(), None | Some(b',')) {
                break;
            }
        }
        let is_null = !is_quoted && part.eq_ignore_ascii_case(b"NULL");
        parts.push((!is_null).then_some(part));
        match bytes.next() {
            None => break,
            Some(b',') if bytes.peek().is_some() => {}
            Some(_) => return None,
        }
    }
    Some(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn array(element: u32, parts: &[Option<&[u8]>]) -> Bytes {
        let mut bytes = Vec::new();
        let has_nulls = i32::from(parts.contains(&None));
        for number in [1, has_nulls, element as i32, parts.len() as i32, 1] {
            bytes.extend(i32::to_be_bytes(number));
        }
        for part in parts {
            bytes.extend(i32::to_be_bytes(part.map_or(-1, |part| part.len() as i32)));
            bytes.extend(part.unwrap_or_default());
        }
        Bytes::from(bytes)
    }

    #[test]
    fn arrays_in_binary_form_are_read() {
        let texts = array(25, &[Some(b"a"), None, Some(b"b\"\\")]);
        assert_eq!(
            from_binary(&texts, kind(TEXT_ARRAY), TEXT_ARRAY),
            Some(Value::Text("{\"a\",NULL,\"b\\\"\\\\\"}".into()))
        );
        let numbers = array(23, &[Some(&7_i32.to_be_bytes()), Some(&(-1_i32).to_be_bytes())]);
        assert_eq!(from_array(&numbers), Some(Value::Text("{7,-1}".into())));
        let empty = [0, 0, 25].map(i32::to_be_bytes).concat();
        assert_eq!(from_array(&Bytes::from(empty)), Some(Value::Text("{}".into())));
        // It ends too early, has more elements than bytes, arrays as elements, or no text.
        assert_eq!(from_array(&numbers.slice(..numbers.len() - 1)), None);
        let mut many = numbers.to_vec();
        many[12..16].copy_from_slice(&i32::MAX.to_be_bytes());
        assert_eq!(from_array(&Bytes::from(many)), None);
        assert_eq!(from_array(&array(TEXT_ARRAY, &[Some(&numbers)])), None);
        assert_eq!(from_array(&array(25, &[Some(b"a\0")])), None);
    }

    #[test]
    fn arrays_are_written_in_binary_form() {
        let of = |text: &str, oid: u32| binary_of(text.as_bytes(), oid).map(Bytes::from);
        assert_eq!(
            of("{a,NULL,\"NULL\",\"b \\\"\\\\,{\"}", TEXT_ARRAY),
            Some(array(25, &[Some(b"a"), None, Some(b"NULL"), Some(b"b \"\\,{")]))
        );
        assert_eq!(of("{\"\"}", TEXT_ARRAY), Some(array(25, &[Some(b"")])));
        let (one, two) = (1_i16.to_be_bytes(), (-2_i16).to_be_bytes());
        assert_eq!(of("{1,-2}", 1005), Some(array(INT2, &[Some(&one), Some(&two)])));
        assert_eq!(of("{}", 1005).unwrap(), [0, 0, 21].map(i32::to_be_bytes).concat());
        for text in ["{{1},{2}}", "[0:1]={1,2}", "{1,}", "{,1}", "{1", "{\"1}", "{a}"] {
            assert_eq!(of(text, 1005), None, "{text}");
        }
    }

    #[test]
    fn system_types_have_their_own_binary_forms() {
        assert_eq!(binary_of(b"4294967295", OID).unwrap(), u32::MAX.to_be_bytes());
        let vector = binary_of(b"1 2", INT2_VECTOR).unwrap();
        let head = [1, 0, 21, 2, 0].map(i32::to_be_bytes).concat();
        assert_eq!(vector, [&head[..], &[0, 0, 0, 2, 0, 1, 0, 0, 0, 2, 0, 2]].concat());
        assert_eq!(binary_of(b"{}", JSONB).unwrap(), b"\x01{}");
        // An interval and the name of a table: neither is sent in a wrong form.
        assert_eq!(binary_of(b"01:00:00", 1186), None);
        assert_eq!(binary_of(b"t", 2205), None);
        assert_eq!(binary_of(b"sad", 16_500).unwrap(), b"sad");
    }
}
