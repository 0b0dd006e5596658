//! PostgreSQL's messages, version 3.0, for both ends: a type, a length that includes itself, and a
//! body.

use std::io;

use bytes::{Buf, BufMut as _, Bytes, BytesMut};
use orthodrome_geotp::sql::Kind;

use super::stream::{Stream, TooLong, malformed};

/// A message.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) tag: u8,
    pub(crate) body: Bytes,
}

/// Reads one message.
pub(crate) async fn read(stream: &mut Stream) -> io::Result<Message> {
    stream.fill(5).await?;
    let head = stream.peeked();
    let (tag, length) = match head {
        [tag, a, b, c, d, ..] => (*tag, u32::from_be_bytes([*a, *b, *c, *d]) as usize),
        _ => return Err(malformed("a message is cut off")),
    };
    if (stream.longest + 1..1 << 30).contains(&length) {
        return Err(io::Error::other(TooLong { tag, bytes: 1 + length }));
    }
    if !(4..=stream.longest).contains(&length) {
        return Err(malformed("a message has an impossible length"));
    }
    stream.fill(1 + length).await?;
    stream.skip(5);
    Ok(Message { tag, body: stream.take(length - 4).freeze() })
}

/// Appends a message whose body `fill` writes.
pub(crate) fn write(out: &mut BytesMut, tag: u8, fill: impl FnOnce(&mut BytesMut)) {
    out.put_u8(tag);
    let at = out.len();
    out.put_u32(0);
    fill(out);
    let length = (out.len() - at) as u32;
    if let Some(place) = out.get_mut(at..at + 4) {
        place.copy_from_slice(&length.to_be_bytes());
    }
}

pub(crate) fn put_text(out: &mut BytesMut, text: &str) {
    // A zero would end the text early.
    out.extend(text.bytes().filter(|byte| *byte != 0));
    out.put_u8(0);
}

/// A text that is not UTF-8, in a complete message.
#[derive(Debug, thiserror::Error)]
#[error("invalid byte sequence for encoding \"UTF8\"")]
pub(crate) struct NotUtf8;

/// Whether an error means that a text is not UTF-8.
pub(crate) fn is_not_utf8(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|inner| inner.is::<NotUtf8>())
}

/// Parses a body; reading beyond its end is an error.
pub(crate) struct Body(pub(crate) Bytes);

impl Body {
    pub(crate) fn text(&mut self) -> io::Result<String> {
        let end = self
            .0
            .iter()
            .position(|byte| *byte == 0)
            .ok_or_else(|| malformed("a text does not end"))?;
        let text = self.0.split_to(end);
        self.0.advance(1);
        String::from_utf8(text.to_vec()).map_err(|_| io::Error::other(NotUtf8))
    }

    pub(crate) fn u8(&mut self) -> io::Result<u8> {
        self.0.try_get_u8().map_err(|_| malformed("a message is cut off"))
    }

    pub(crate) fn i16(&mut self) -> io::Result<i16> {
        self.0.try_get_i16().map_err(|_| malformed("a message is cut off"))
    }

    pub(crate) fn u16(&mut self) -> io::Result<u16> {
        self.0.try_get_u16().map_err(|_| malformed("a message is cut off"))
    }

    pub(crate) fn i32(&mut self) -> io::Result<i32> {
        self.0.try_get_i32().map_err(|_| malformed("a message is cut off"))
    }

    pub(crate) fn bytes(&mut self, count: usize) -> io::Result<Bytes> {
        if self.0.len() < count {
            return Err(malformed("a message is cut off"));
        }
        Ok(self.0.split_to(count))
    }

    /// A value with its length; `None` is NULL.
    pub(crate) fn value(&mut self) -> io::Result<Option<Bytes>> {
        match usize::try_from(self.i32()?) {
            Ok(length) => self.bytes(length).map(Some),
            Err(_) => Ok(None),
        }
    }
}

/// The kind of a PostgreSQL type.
pub(crate) fn kind(oid: u32) -> Kind {
    match oid {
        16 => Kind::Bool,
        21 => Kind::Int2,
        23 => Kind::Int4,
        20 | 26 => Kind::Int8,
        1700 => Kind::Decimal,
        700 => Kind::Float4,
        701 => Kind::Float8,
        18 | 19 | 25 | 1042 | 1043 | 705 => Kind::Text,
        17 => Kind::Bytes,
        1082 => Kind::Date,
        1083 => Kind::Time,
        1114 => Kind::Timestamp,
        1184 => Kind::TimestampTz,
        114 | 3802 => Kind::Json,
        2950 => Kind::Uuid,
        _ => Kind::Other,
    }
}

/// The PostgreSQL type for a kind.
pub(crate) fn oid(kind: Kind) -> u32 {
    match kind {
        Kind::Bool => 16,
        Kind::Int2 => 21,
        Kind::Int4 => 23,
        Kind::Int8 => 20,
        Kind::Decimal => 1700,
        Kind::Float4 => 700,
        Kind::Float8 => 701,
        Kind::Text | Kind::Other => 25,
        Kind::Bytes => 17,
        Kind::Date => 1082,
        Kind::Time => 1083,
        Kind::Timestamp => 1114,
        Kind::TimestampTz => 1184,
        Kind::Json => 114,
        Kind::Uuid => 2950,
    }
}

/// The SQLSTATE and the message of an error or a notice.
pub(crate) fn fields(body: Bytes) -> (String, String) {
    let mut body = Body(body);
    let (mut code, mut message) = (String::from("XX000"), String::new());
    while let Ok(field) = body.u8() {
        if field == 0 {
            break;
        }
        let Ok(text) = body.text() else { break };
        match field {
            b'C' => code = text,
            b'M' => message = text,
            _ => {}
        }
    }
    (code, message)
}

/// `\x0aff` as bytes.
pub(crate) fn from_hex(text: &[u8]) -> Option<Vec<u8>> {
    let digits = text.strip_prefix(b"\\x")?;
    let digit = |byte: &u8| char::from(*byte).to_digit(16);
    digits
        .chunks(2)
        .map(|pair| match pair {
            [high, low] => Some((digit(high)? * 16 + digit(low)?) as u8),
            _ => None,
        })
        .collect()
}

/// Parses a value of `bytea`: in hexadecimal digits, or with backslashes.
pub(crate) fn from_bytea(text: &[u8]) -> Option<Vec<u8>> {
    if text.starts_with(b"\\x") {
        return from_hex(text);
    }
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    loop {
        match rest {
            [] => return Some(out),
            [b'\\', b'\\', after @ ..] => {
                out.push(b'\\');
                rest = after;
            }
            [b'\\', a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', after @ ..] => {
                out.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                rest = after;
            }
            [b'\\', ..] => return None,
            [byte, after @ ..] => {
                out.push(*byte);
                rest = after;
            }
        }
    }
}

/// Bytes as `\x0aff`.
pub(crate) fn to_hex(bytes: &[u8]) -> Vec<u8> {
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("\\x{hex}").into_bytes()
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt as _;

    use super::*;

    async fn stream(bytes: &[u8]) -> Stream {
        let (mut client, server) = tokio::io::duplex(1 << 10);
        client.write_all(bytes).await.unwrap();
        Stream::new(server)
    }

    fn message(tag: u8, body: &[u8]) -> Vec<u8> {
        let mut out = BytesMut::new();
        write(&mut out, tag, |out| out.extend_from_slice(body));
        out.to_vec()
    }

    /// These messages made `pgwire` 0.42 take bytes of the next message, change a text, or panic
    /// (ADR 36).
    #[tokio::test]
    async fn a_damaged_message_is_an_error_and_takes_nothing_of_the_next() {
        for body in [&b""[..], b"SELECT 1", b"caf\xe9\0"] {
            let next = message(b'Q', b"SELECT 2\0");
            let mut stream = stream(&[message(b'Q', body), next].concat()).await;
            let damaged = read(&mut stream).await.unwrap();
            assert_eq!(damaged.body, body);
            let error = Body(damaged.body).text().unwrap_err();
            assert_eq!(is_not_utf8(&error), body.contains(&0xe9), "{error}");
            let next = read(&mut stream).await.unwrap();
            assert_eq!((next.tag, Body(next.body).text().unwrap().as_str()), (b'Q', "SELECT 2"));
        }
        let body = || Body(Bytes::from_static(b"\0"));
        assert!(body().i16().is_err() && body().i32().is_err());
        assert!(body().bytes(2).is_err() && body().value().is_err());
        let longer_than_it_is = Bytes::from_static(b"\0\0\0\x09abc");
        assert!(Body(longer_than_it_is).value().is_err());
    }

    #[tokio::test]
    async fn an_impossible_length_is_refused_before_the_body_comes() {
        for length in [0_u32, 3, 1 << 30, u32::MAX] {
            let mut stream = stream(&[&b"Q"[..], &length.to_be_bytes()].concat()).await;
            let error = read(&mut stream).await.unwrap_err();
            assert!(error.to_string().contains("impossible length"), "{length}: {error}");
        }
        // A message that is too long can be skipped.
        for length in [(64 << 20) + 1, (1_u32 << 30) - 1] {
            let mut stream = stream(&[&b"Q"[..], &length.to_be_bytes()].concat()).await;
            let error = read(&mut stream).await.unwrap_err();
            assert_eq!(TooLong::of(&error).map(|long| long.bytes), Some(1 + length as usize));
        }
    }
}
