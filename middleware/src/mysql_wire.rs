//! MySQL's packets, for both ends: a length of three bytes, a number, and a body; longer bodies
//! continue in further packets.

use std::io;

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use orthodrome_geotp::sql::Kind;

use super::stream::{Stream, TooLong, malformed};

const PART: usize = 0xff_ffff;

// Capabilities.
pub(crate) const FOUND_ROWS: u32 = 0x2;
pub(crate) const CONNECT_WITH_DB: u32 = 0x8;
pub(crate) const PROTOCOL_41: u32 = 0x200;
pub(crate) const SSL: u32 = 0x800;
pub(crate) const TRANSACTIONS: u32 = 0x2000;
pub(crate) const SECURE_CONNECTION: u32 = 0x8000;
pub(crate) const MULTI_STATEMENTS: u32 = 0x1_0000;
pub(crate) const MULTI_RESULTS: u32 = 0x2_0000;
pub(crate) const PS_MULTI_RESULTS: u32 = 0x4_0000;
pub(crate) const PLUGIN_AUTH: u32 = 0x8_0000;
pub(crate) const CONNECT_ATTRS: u32 = 0x10_0000;
pub(crate) const PLUGIN_AUTH_LENENC: u32 = 0x20_0000;
pub(crate) const DEPRECATE_EOF: u32 = 0x100_0000;
/// Long passwords and long flags, which every current client has.
pub(crate) const LONG: u32 = 0x1 | 0x4;

// Status.
pub(crate) const IN_TRANSACTION: u16 = 0x1;
pub(crate) const AUTOCOMMIT: u16 = 0x2;
pub(crate) const MORE_RESULTS: u16 = 0x8;

/// Reads one packet of any length, and sets the number of the next one.
pub(crate) async fn read(stream: &mut Stream, number: &mut u8) -> io::Result<Bytes> {
    let mut whole = BytesMut::new();
    loop {
        stream.fill(4).await?;
        let (length, sequence) = match stream.peeked() {
            [a, b, c, n, ..] => (u32::from_le_bytes([*a, *b, *c, 0]) as usize, *n),
            _ => return Err(malformed("a packet is cut off")),
        };
        if whole.len() + length > stream.longest {
            let tag = whole.first().copied().unwrap_or_default();
            return Err(io::Error::other(TooLong { tag, bytes: whole.len() + length }));
        }
        stream.fill(4 + length).await?;
        stream.skip(4);
        *number = sequence.wrapping_add(1);
        let part = stream.take(length);
        if whole.is_empty() && length < PART {
            return Ok(part.freeze());
        }
        whole.extend_from_slice(&part);
        if length < PART {
            return Ok(whole.freeze());
        }
    }
}

/// Skips the rest of a packet that [`read`] has found too long, and sets the number of the next
/// one.
pub(crate) async fn pass_over(stream: &mut Stream, number: &mut u8) -> io::Result<()> {
    loop {
        stream.fill(4).await?;
        let (length, sequence) = match stream.peeked() {
            [a, b, c, n, ..] => (u32::from_le_bytes([*a, *b, *c, 0]) as usize, *n),
            _ => return Err(malformed("a packet is cut off")),
        };
        *number = sequence.wrapping_add(1);
        stream.discard(4 + length).await?;
        if length < PART {
            return Ok(());
        }
    }
}

/// Appends a packet.
pub(crate) fn write(out: &mut BytesMut, number: &mut u8, body: &[u8]) {
    let mut rest = body;
    loop {
        let (part, more) = rest.split_at(rest.len().min(PART));
        out.put_uint_le(part.len() as u64, 3);
        out.put_u8(*number);
        *number = number.wrapping_add(1);
        out.extend_from_slice(part);
        rest = more;
        if part.len() < PART {
            return;
        }
    }
}

pub(crate) fn put_length(out: &mut BytesMut, value: u64) {
    match value {
        0..251 => out.put_u8(value as u8),
        251..0x1_0000 => {
            out.put_u8(0xfc);
            out.put_u16_le(value as u16);
        }
        0x1_0000..0x100_0000 => {
            out.put_u8(0xfd);
            out.put_uint_le(value, 3);
        }
        _ => {
            out.put_u8(0xfe);
            out.put_u64_le(value);
        }
    }
}

pub(crate) fn put_bytes(out: &mut BytesMut, bytes: &[u8]) {
    put_length(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

/// Parses a body.
pub(crate) struct Body(pub(crate) Bytes);

fn cut() -> io::Error {
    malformed("a packet is cut off")
}

impl Body {
    pub(crate) fn u8(&mut self) -> io::Result<u8> {
        self.0.try_get_u8().map_err(|_| cut())
    }

    pub(crate) fn uint(&mut self, bytes: usize) -> io::Result<u64> {
        if self.0.len() < bytes {
            return Err(cut());
        }
        Ok(self.0.get_uint_le(bytes))
    }

    pub(crate) fn bytes(&mut self, count: usize) -> io::Result<Bytes> {
        if self.0.len() < count {
            return Err(cut());
        }
        Ok(self.0.split_to(count))
    }

    /// Takes the bytes up to a zero, which is skipped, or to the end.
    pub(crate) fn zero_ended(&mut self) -> Bytes {
        let end = self.0.iter().position(|byte| *byte == 0).unwrap_or(self.0.len());
        let text = self.0.split_to(end);
        if !self.0.is_empty() {
            self.0.advance(1);
        }
        text
    }

    /// A length; `None` is NULL.
    pub(crate) fn length(&mut self) -> io::Result<Option<u64>> {
        Ok(match self.u8()? {
            0xfb => None,
            0xfc => Some(self.uint(2)?),
            0xfd => Some(self.uint(3)?),
            0xfe => Some(self.uint(8)?),
            0xff => return Err(malformed("a length is an error's mark")),
            short => Some(u64::from(short)),
        })
    }

    pub(crate) fn value(&mut self) -> io::Result<Option<Bytes>> {
        match self.length()? {
            None => Ok(None),
            Some(length) => {
                let length = usize::try_from(length).map_err(|_| cut())?;
                self.bytes(length).map(Some)
            }
        }
    }
}

/// The character set of bytes.
pub(crate) const BINARY: u16 = 63;
/// `utf8mb4_general_ci`.
pub(crate) const UTF8: u16 = 45;

/// The kind of a MySQL type.
pub(crate) fn kind(code: u8, charset: u16, flags: u16) -> Kind {
    let is_unsigned = flags & 0x20 != 0;
    match code {
        1 | 13 => Kind::Int2,
        2 => {
            if is_unsigned {
                Kind::Int4
            } else {
                Kind::Int2
            }
        }
        3 | 9 => {
            if is_unsigned {
                Kind::Int8
            } else {
                Kind::Int4
            }
        }
        8 => {
            if is_unsigned {
                Kind::Decimal
            } else {
                Kind::Int8
            }
        }
        0 | 246 => Kind::Decimal,
        4 => Kind::Float4,
        5 => Kind::Float8,
        10 | 14 => Kind::Date,
        11 => Kind::Time,
        7 | 12 => Kind::Timestamp,
        245 => Kind::Json,
        249..=252 | 253 | 254 | 15 | 16 => {
            if charset == BINARY {
                Kind::Bytes
            } else {
                Kind::Text
            }
        }
        _ => Kind::Other,
    }
}

/// The MySQL type and character set for a kind.
pub(crate) fn code(kind: Kind) -> (u8, u16) {
    match kind {
        Kind::Bool => (1, BINARY),
        Kind::Int2 => (2, BINARY),
        Kind::Int4 => (3, BINARY),
        Kind::Int8 => (8, BINARY),
        Kind::Decimal => (246, BINARY),
        Kind::Float4 => (4, BINARY),
        Kind::Float8 => (5, BINARY),
        Kind::Date => (10, BINARY),
        Kind::Time => (11, BINARY),
        Kind::Timestamp | Kind::TimestampTz => (12, BINARY),
        Kind::Bytes => (252, BINARY),
        Kind::Text | Kind::Json | Kind::Uuid | Kind::Other => (253, UTF8),
    }
}
