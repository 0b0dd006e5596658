//! The bytes of messages and records, derived from the definitions of their types.
//!
//! `#[derive(Wire)]` generates the encoding, which is that of protobuf. A message is a list of
//! numbered fields. A reader skips numbers that it does not know; a missing number, list or option
//! is zero, empty or none. So two versions understand each other as long as field numbers keep
//! their meaning. `wire.txt` in each protocol's folder lists the numbers, and a test compares.
//!
//! Decoding checks everything and never panics. Decoded values share the buffer from which they were
//! read; keys are short, and are copied.

mod schema;
mod source;
#[cfg(test)]
mod tests;
mod values;

use bytes::{BufMut as _, Bytes, BytesMut};

pub use orthodrome_derive::Wire;

pub use self::schema::{Described, Member, Schema};
pub use self::source::{Raw, Shape, Source};
pub use self::values::Fixed;
use crate::Rng;
use crate::ordered::OrdSet;

/// The buffer to which bytes are written.
pub type Out = BytesMut;

/// Bytes that cannot be decoded.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum WireError {
    /// The bytes are not a list of fields.
    #[error("the bytes are not a message: {0}")]
    Malformed(&'static str),
    /// A required field is missing.
    #[error("field {0} is missing")]
    Missing(&'static str),
    /// A field has another wire type than this version expects.
    #[error("{wanted} was expected, and the bytes hold {found}")]
    Shape {
        /// The expected type.
        wanted: &'static str,
        /// The type found.
        found: &'static str,
    },
    /// A variant that this version does not know.
    #[error("{of} has variant {number}, which this version does not know")]
    Unknown {
        /// The enum.
        of: &'static str,
        /// The number of the variant.
        number: u64,
    },
    /// A field has an invalid value.
    #[error("{field} holds {found}, which is not {wanted}")]
    Value {
        /// The field or type.
        field: &'static str,
        /// The value found.
        found: String,
        /// The values allowed.
        wanted: &'static str,
    },
}

impl WireError {
    /// An unknown variant.
    #[must_use]
    pub fn unknown(of: &'static str, number: u64) -> Self {
        Self::Unknown { of, number }
    }

    /// The same error, with the name of the field if it is about a value.
    #[must_use]
    pub fn of(self, field: &'static str) -> Self {
        match self {
            Self::Value { found, wanted, .. } => Self::Value { field, found, wanted },
            Self::Malformed(_) | Self::Missing(_) | Self::Shape { .. } | Self::Unknown { .. } => {
                self
            }
        }
    }
}

/// A type with an encoding. Derive it: `#[derive(Wire)]`.
pub trait Wire: Sized {
    /// The wire type of its field.
    const SHAPE: Shape;

    /// False for a type without values.
    const IS_POSSIBLE: bool = true;

    /// The number of bytes that [`Wire::put`] writes.
    fn size(&self) -> usize;

    /// Writes the value, without field number and length.
    fn put(&self, out: &mut Out);

    /// Reads the value.
    ///
    /// # Errors
    /// If the bytes do not encode such a value.
    fn take(raw: Raw<'_>) -> Result<Self, WireError>;

    /// A random value, for tests that encode and decode.
    fn sample(rng: &mut Rng) -> Self;

    /// Its name in the list of all fields. Adds its own fields to the list.
    fn schema(schema: &mut Schema) -> String;

    /// The size of the field if it is written.
    fn present_size(&self, number: u32) -> usize {
        let size = self.size();
        key_size(number)
            + size
            + if Self::SHAPE == Shape::Bytes { varint_size(size as u64) } else { 0 }
    }

    /// Writes the field.
    fn put_present(&self, number: u32, out: &mut Out) {
        put_key(number, Self::SHAPE, out);
        if Self::SHAPE == Shape::Bytes {
            put_varint(self.size() as u64, out);
        }
        self.put(out);
    }

    /// True if the value equals [`Wire::absent`], so that its field is omitted.
    fn is_absent(&self) -> bool {
        false
    }

    /// The size of the field, which is 0 if it is omitted.
    fn field_size(&self, number: u32) -> usize {
        if self.is_absent() { 0 } else { self.present_size(number) }
    }

    /// Writes the field, or omits it.
    fn put_field(&self, number: u32, out: &mut Out) {
        if !self.is_absent() {
            self.put_present(number, out);
        }
    }

    /// Processes one more occurrence of the field.
    ///
    /// # Errors
    /// If the bytes do not encode such a value.
    fn take_field(slot: &mut Option<Self>, raw: Raw<'_>) -> Result<(), WireError> {
        *slot = Some(Self::take(raw)?);
        Ok(())
    }

    /// The value that a missing field means; none if the field is required.
    fn absent() -> Option<Self> {
        None
    }
}

/// Encodes a value.
#[must_use]
pub fn encode<T: Wire>(value: &T) -> Bytes {
    let mut out = Out::with_capacity(value.size());
    value.put(&mut out);
    out.freeze()
}

/// Decodes a value. The value shares the bytes.
///
/// # Errors
/// If the bytes do not encode such a value.
pub fn decode<T: Wire>(bytes: &Bytes) -> Result<T, WireError> {
    T::take(Raw::Bytes(Source::new(bytes)))
}

/// The decoded field, or the value that its absence means.
///
/// # Errors
/// If field `name` is required and missing.
pub fn or_absent<T: Wire>(found: Option<T>, name: &'static str) -> Result<T, WireError> {
    found.or_else(T::absent).ok_or(WireError::Missing(name))
}

/// Checks that items ascend strictly: `#[wire(ascending)]`.
///
/// # Errors
/// If they do not.
pub fn check_ascending<T: Ord>(items: &[T]) -> Result<(), WireError> {
    if items.is_sorted_by(|a, b| a < b) {
        return Ok(());
    }
    let found = "items out of order".into();
    Err(WireError::Value { field: "list", found, wanted: "ascending, each once" })
}

/// Some random items that ascend strictly.
pub fn sample_ascending<T: Wire + Ord>(rng: &mut Rng) -> Vec<T> {
    OrdSet::sample(rng).into_iter().collect()
}

fn varint_size(value: u64) -> usize {
    let bits = 64 - (value | 1).leading_zeros() as usize;
    bits.div_ceil(7)
}

fn put_varint(mut value: u64, out: &mut Out) {
    while value >= 0x80 {
        out.put_u8((value & 0x7f) as u8 | 0x80);
        value >>= 7;
    }
    #[expect(clippy::cast_possible_truncation, reason = "seven bits")]
    out.put_u8(value as u8);
}

fn key_size(number: u32) -> usize {
    varint_size(u64::from(number) << 3)
}

fn put_key(number: u32, shape: Shape, out: &mut Out) {
    put_varint(u64::from(number) << 3 | shape.tag(), out);
}

/// The size of a field that contains a message of `size` bytes.
#[must_use]
pub fn nested_size(number: u32, size: usize) -> usize {
    key_size(number) + varint_size(size as u64) + size
}

/// Writes the number and the length of a field that contains a message of `size` bytes.
pub fn put_nested(number: u32, size: usize, out: &mut Out) {
    put_key(number, Shape::Bytes, out);
    put_varint(size as u64, out);
}
