//! Encoded bytes, cut into fields.

use bytes::Bytes;

use super::WireError;

/// The wire type of a field, as in protobuf.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shape {
    /// A number of 1 to 10 bytes.
    Varint,
    /// Eight bytes.
    Fixed,
    /// A length and as many bytes.
    Bytes,
}

impl Shape {
    pub(super) fn tag(self) -> u64 {
        match self {
            Self::Varint => 0,
            Self::Fixed => 1,
            Self::Bytes => 2,
        }
    }
}

/// The encoded value of one field.
#[derive(Clone, Copy, Debug)]
pub enum Raw<'a> {
    /// A number.
    Varint(u64),
    /// Eight bytes.
    Fixed(u64),
    /// Bytes.
    Bytes(Source<'a>),
}

impl<'a> Raw<'a> {
    fn found(&self) -> &'static str {
        match self {
            Self::Varint(_) => "a number",
            Self::Fixed(_) => "eight bytes",
            Self::Bytes(_) => "bytes",
        }
    }

    /// The fields of a message named `wanted`.
    ///
    /// # Errors
    /// If it is a number.
    pub fn message(self, wanted: &'static str) -> Result<Source<'a>, WireError> {
        match self {
            Self::Bytes(source) => Ok(source),
            Self::Varint(_) | Self::Fixed(_) => Err(self.mismatch(wanted)),
        }
    }

    pub(super) fn number(self, wanted: &'static str) -> Result<u64, WireError> {
        match self {
            Self::Varint(number) => Ok(number),
            Self::Fixed(_) | Self::Bytes(_) => Err(self.mismatch(wanted)),
        }
    }

    pub(super) fn mismatch(self, wanted: &'static str) -> WireError {
        WireError::Shape { wanted, found: self.found() }
    }
}

/// Bytes to decode: a part of a shared buffer.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    all: &'a Bytes,
    at: usize,
    end: usize,
}

impl<'a> Source<'a> {
    /// All of `bytes`.
    #[must_use]
    pub fn new(bytes: &'a Bytes) -> Self {
        Self { all: bytes, at: 0, end: bytes.len() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.at == self.end
    }

    /// The remaining bytes, shared.
    pub(super) fn bytes(&self) -> Bytes {
        self.all.slice(self.at..self.end)
    }

    fn slice(&self) -> &'a [u8] {
        self.all.get(self.at..self.end).unwrap_or_default()
    }

    fn varint(&mut self) -> Result<u64, WireError> {
        let (mut value, mut shift) = (0_u64, 0);
        for (index, &byte) in self.slice().iter().take(10).enumerate() {
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                return Err(WireError::Malformed("a number of more than 64 bits"));
            }
            value |= bits << shift;
            if byte & 0x80 == 0 {
                self.at += index + 1;
                return Ok(value);
            }
            shift += 7;
        }
        Err(WireError::Malformed("a number without an end"))
    }

    fn fixed(&mut self) -> Result<u64, WireError> {
        let bytes = self.slice().first_chunk::<8>();
        let bytes = bytes.ok_or(WireError::Malformed("fewer than eight bytes"))?;
        self.at += 8;
        Ok(u64::from_le_bytes(*bytes))
    }

    pub(super) fn raw(&mut self, shape: u64) -> Result<Raw<'a>, WireError> {
        match shape {
            0 => Ok(Raw::Varint(self.varint()?)),
            1 => Ok(Raw::Fixed(self.fixed()?)),
            2 => {
                let length = usize::try_from(self.varint()?).unwrap_or(usize::MAX);
                if length > self.end - self.at {
                    return Err(WireError::Malformed("a field that is longer than its message"));
                }
                let (at, end) = (self.at, self.at + length);
                self.at = end;
                Ok(Raw::Bytes(Source { all: self.all, at, end }))
            }
            _ => Err(WireError::Malformed("a field of an unknown wire type")),
        }
    }

    /// The next field, with its number.
    ///
    /// # Errors
    /// If the bytes are not a list of fields.
    pub fn next_field(&mut self) -> Result<Option<(u32, Raw<'a>)>, WireError> {
        if self.is_empty() {
            return Ok(None);
        }
        let key = self.varint()?;
        let number = u32::try_from(key >> 3).ok().filter(|number| *number > 0);
        let number = number.ok_or(WireError::Malformed("a field without a number"))?;
        Ok(Some((number, self.raw(key & 7)?)))
    }
}
