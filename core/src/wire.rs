//! The bytes of messages and records, derived from the definitions of their types.
//!
//! `#[derive(Wire)]` generates the encoding, which is that of protobuf. A message is a list of
//! numbered fields. A reader skips numbers that it does not know; a missing number, list or option
//! is zero, empty or none. So two versions understand each other as long as field numbers keep
//! their meaning. `wire.txt` in each protocol's folder lists the numbers, and a test compares.
//!
//! Decoding checks everything and never panics. Decoded keys and values share the buffer from which
//! they were read.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};
use smallvec::{Array, SmallVec};

pub use orthodrome_derive::Wire;

use crate::procedure::Procedure;
use crate::{Rng, Time, Timestamp};

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
    fn tag(self) -> u64 {
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

    fn number(self, wanted: &'static str) -> Result<u64, WireError> {
        match self {
            Self::Varint(number) => Ok(number),
            Self::Fixed(_) | Self::Bytes(_) => Err(self.mismatch(wanted)),
        }
    }

    fn mismatch(self, wanted: &'static str) -> WireError {
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

    fn is_empty(&self) -> bool {
        self.at == self.end
    }

    /// The remaining bytes, shared.
    fn bytes(&self) -> Bytes {
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

    fn raw(&mut self, shape: u64) -> Result<Raw<'a>, WireError> {
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

    /// The size of the field, which is 0 if it is omitted.
    fn field_size(&self, number: u32) -> usize {
        self.present_size(number)
    }

    /// Writes the field, or omits it if the value equals [`Wire::absent`].
    fn put_field(&self, number: u32, out: &mut Out) {
        self.put_present(number, out);
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
    BTreeSet::sample(rng).into_iter().collect()
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

macro_rules! number {
    ($($type:ty),*) => {$(
        impl Wire for $type {
            const SHAPE: Shape = Shape::Varint;

            fn size(&self) -> usize {
                varint_size(*self as u64)
            }

            fn put(&self, out: &mut Out) {
                put_varint(*self as u64, out);
            }

            fn take(raw: Raw<'_>) -> Result<Self, WireError> {
                let number = raw.number(stringify!($type))?;
                Self::try_from(number).map_err(|_| WireError::Value {
                    field: stringify!($type),
                    found: number.to_string(),
                    wanted: "a number of that width",
                })
            }

            fn sample(rng: &mut Rng) -> Self {
                let wide = rng.next_u64() >> rng.below(64);
                Self::try_from(wide & u64::try_from(Self::MAX).unwrap_or(u64::MAX)).unwrap_or(0)
            }

            fn schema(_: &mut Schema) -> String {
                stringify!($type).to_owned()
            }

            fn field_size(&self, number: u32) -> usize {
                if *self == 0 { 0 } else { self.present_size(number) }
            }

            fn put_field(&self, number: u32, out: &mut Out) {
                if *self != 0 {
                    self.put_present(number, out);
                }
            }

            fn absent() -> Option<Self> {
                Some(0)
            }
        }
    )*};
}

number!(u8, u16, u32, u64, usize);

/// Implements [`Wire`] for a type with the encoding of another type: how to convert one into the
/// other, and how to draw a random value.
macro_rules! as_other {
    ($type:ty as $other:ty, $to:expr, $from:expr, $draw:expr) => {
        impl Wire for $type {
            const SHAPE: Shape = <$other>::SHAPE;

            fn size(&self) -> usize {
                $to(self).size()
            }

            fn put(&self, out: &mut Out) {
                $to(self).put(out);
            }

            fn take(raw: Raw<'_>) -> Result<Self, WireError> {
                $from(<$other>::take(raw)?)
            }

            fn sample(rng: &mut Rng) -> Self {
                $draw(rng)
            }

            fn schema(_: &mut Schema) -> String {
                stringify!($type).to_owned()
            }

            fn field_size(&self, number: u32) -> usize {
                $to(self).field_size(number)
            }

            fn put_field(&self, number: u32, out: &mut Out) {
                $to(self).put_field(number, out);
            }

            fn absent() -> Option<Self> {
                <$other>::absent().and_then(|other| $from(other).ok())
            }
        }
    };
}

as_other!(
    bool as u64,
    |value: &bool| u64::from(*value),
    |number: u64| match number {
        0 => Ok(false),
        1 => Ok(true),
        other => {
            let found = other.to_string();
            Err(WireError::Value { field: "bool", found, wanted: "0 or 1" })
        }
    },
    |rng: &mut Rng| rng.chance(1, 2)
);

// The sign is the lowest bit, so that small negative numbers are short.
as_other!(
    i64 as u64,
    |value: &i64| ((value << 1) ^ (value >> 63)).cast_unsigned(),
    |number: u64| Ok::<_, WireError>((number >> 1).cast_signed() ^ -(number & 1).cast_signed()),
    |rng: &mut Rng| rng.next_u64().cast_signed() >> rng.below(64)
);

as_other!(
    Duration as u64,
    |value: &Duration| u64::try_from(value.as_nanos()).unwrap_or(u64::MAX),
    |nanos| Ok::<_, WireError>(Duration::from_nanos(nanos)),
    |rng: &mut Rng| Duration::from_nanos(u64::sample(rng))
);

as_other!(
    String as Bytes,
    |value: &String| Bytes::copy_from_slice(value.as_bytes()),
    |bytes: Bytes| {
        String::from_utf8(bytes.to_vec()).map_err(|_| WireError::Value {
            field: "text",
            found: "other bytes".into(),
            wanted: "UTF-8",
        })
    },
    |rng: &mut Rng| u64::sample(rng).to_string()
);

as_other!(
    Procedure as String,
    |procedure: &Procedure| procedure.name().to_owned(),
    |name: String| Procedure::find(&name).ok_or(WireError::Value {
        field: "procedure",
        found: name,
        wanted: "a procedure that this version knows",
    }),
    |rng: &mut Rng| rng.pick(&Procedure::ALL).copied().unwrap_or(Procedure::TpccPayment)
);

/// Eight bytes for any value: for times, which are large.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fixed(pub u64);

impl Wire for Fixed {
    const SHAPE: Shape = Shape::Fixed;

    fn size(&self) -> usize {
        8
    }

    fn put(&self, out: &mut Out) {
        out.put_u64_le(self.0);
    }

    fn take(raw: Raw<'_>) -> Result<Self, WireError> {
        match raw {
            Raw::Fixed(value) => Ok(Self(value)),
            Raw::Varint(_) | Raw::Bytes(_) => Err(raw.mismatch("eight bytes")),
        }
    }

    fn sample(rng: &mut Rng) -> Self {
        Self(u64::sample(rng))
    }

    fn schema(_: &mut Schema) -> String {
        "fixed64".to_owned()
    }

    fn field_size(&self, number: u32) -> usize {
        if self.0 == 0 { 0 } else { self.present_size(number) }
    }

    fn put_field(&self, number: u32, out: &mut Out) {
        if self.0 != 0 {
            self.put_present(number, out);
        }
    }

    fn absent() -> Option<Self> {
        Some(Self(0))
    }
}

as_other!(
    Time as Fixed,
    |time: &Time| Fixed(time.0),
    |fixed: Fixed| Ok::<_, WireError>(Time(fixed.0)),
    |rng: &mut Rng| Time(u64::sample(rng))
);

as_other!(
    Timestamp as Fixed,
    |timestamp: &Timestamp| Fixed(timestamp.0),
    |fixed: Fixed| Ok::<_, WireError>(Timestamp(fixed.0)),
    |rng: &mut Rng| Timestamp(u64::sample(rng))
);

impl Wire for Bytes {
    const SHAPE: Shape = Shape::Bytes;

    fn size(&self) -> usize {
        self.len()
    }

    fn put(&self, out: &mut Out) {
        out.put_slice(self);
    }

    fn take(raw: Raw<'_>) -> Result<Self, WireError> {
        Ok(raw.message("bytes")?.bytes())
    }

    fn sample(rng: &mut Rng) -> Self {
        (0..rng.below(40)).map(|_| rng.next_u64().to_le_bytes()[0]).collect()
    }

    fn schema(_: &mut Schema) -> String {
        "bytes".to_owned()
    }

    fn field_size(&self, number: u32) -> usize {
        if self.is_empty() { 0 } else { self.present_size(number) }
    }

    fn put_field(&self, number: u32, out: &mut Out) {
        if !self.is_empty() {
            self.put_present(number, out);
        }
    }

    fn absent() -> Option<Self> {
        Some(Self::new())
    }
}

impl Wire for () {
    const SHAPE: Shape = Shape::Bytes;

    fn size(&self) -> usize {
        0
    }

    fn put(&self, _: &mut Out) {}

    fn take(raw: Raw<'_>) -> Result<Self, WireError> {
        raw.message("nothing").map(|_| ())
    }

    fn sample(_: &mut Rng) -> Self {}

    fn schema(_: &mut Schema) -> String {
        "nothing".to_owned()
    }

    fn absent() -> Option<Self> {
        Some(())
    }
}

impl Wire for Infallible {
    const SHAPE: Shape = Shape::Bytes;
    const IS_POSSIBLE: bool = false;

    fn size(&self) -> usize {
        match *self {}
    }

    fn put(&self, _: &mut Out) {
        match *self {}
    }

    fn take(_: Raw<'_>) -> Result<Self, WireError> {
        Err(WireError::Missing("of a type without values"))
    }

    fn sample(_: &mut Rng) -> Self {
        unreachable!("a type without values has no sample")
    }

    fn schema(_: &mut Schema) -> String {
        "nothing".to_owned()
    }
}

impl<T: Wire, E: Wire> Wire for Result<T, E> {
    const SHAPE: Shape = Shape::Bytes;

    fn size(&self) -> usize {
        match self {
            Ok(value) => value.present_size(1),
            Err(error) => error.present_size(2),
        }
    }

    fn put(&self, out: &mut Out) {
        match self {
            Ok(value) => value.put_present(1, out),
            Err(error) => error.put_present(2, out),
        }
    }

    fn take(raw: Raw<'_>) -> Result<Self, WireError> {
        let mut fields = raw.message("a result")?;
        let mut found = Err(WireError::Missing("of a result"));
        while let Some((number, raw)) = fields.next_field()? {
            found = match number {
                1 => T::take(raw).map(Ok),
                2 => E::take(raw).map(Err),
                other => Err(WireError::unknown("a result", other.into())),
            };
        }
        found
    }

    fn sample(rng: &mut Rng) -> Self {
        if rng.chance(1, 2) { Ok(T::sample(rng)) } else { Err(E::sample(rng)) }
    }

    fn schema(schema: &mut Schema) -> String {
        format!("result {} {}", T::schema(schema), E::schema(schema))
    }
}

impl<T: Wire> Wire for Option<T> {
    const SHAPE: Shape = Shape::Bytes;

    fn size(&self) -> usize {
        self.as_ref().map_or(0, |value| value.present_size(1))
    }

    fn put(&self, out: &mut Out) {
        if let Some(value) = self {
            value.put_present(1, out);
        }
    }

    fn take(raw: Raw<'_>) -> Result<Self, WireError> {
        let (mut fields, mut value) = (raw.message("an option")?, None);
        while let Some((number, raw)) = fields.next_field()? {
            if number == 1 {
                value = Some(T::take(raw)?);
            }
        }
        Ok(value)
    }

    fn sample(rng: &mut Rng) -> Self {
        rng.chance(1, 2).then(|| T::sample(rng))
    }

    fn schema(schema: &mut Schema) -> String {
        format!("optional {}", T::schema(schema))
    }

    fn field_size(&self, number: u32) -> usize {
        self.as_ref().map_or(0, |value| value.present_size(number))
    }

    fn put_field(&self, number: u32, out: &mut Out) {
        if let Some(value) = self {
            value.put_present(number, out);
        }
    }

    fn take_field(slot: &mut Option<Self>, raw: Raw<'_>) -> Result<(), WireError> {
        *slot = Some(Some(T::take(raw)?));
        Ok(())
    }

    fn absent() -> Option<Self> {
        Some(None)
    }
}

/// Several numbers are packed into one field after its length. Other values have one field each.
fn several_size<'a, T: Wire + 'a>(
    number: u32,
    items: impl Iterator<Item = &'a T> + Clone,
) -> usize {
    if T::SHAPE == Shape::Bytes {
        return items.map(|item| item.present_size(number)).sum();
    }
    let size = items.map(Wire::size).sum::<usize>();
    if size == 0 { 0 } else { nested_size(number, size) }
}

fn put_several<'a, T: Wire + 'a>(
    number: u32,
    items: impl Iterator<Item = &'a T> + Clone,
    out: &mut Out,
) {
    if T::SHAPE == Shape::Bytes {
        items.for_each(|item| item.put_present(number, out));
        return;
    }
    let size = items.clone().map(Wire::size).sum::<usize>();
    if size > 0 {
        put_nested(number, size, out);
        items.for_each(|item| item.put(out));
    }
}

/// Processes one more field of a list.
fn take_several<T: Wire>(
    raw: Raw<'_>,
    mut push: impl FnMut(T) -> Result<(), WireError>,
) -> Result<(), WireError> {
    if T::SHAPE == Shape::Bytes {
        return push(T::take(raw)?);
    }
    let Raw::Bytes(mut numbers) = raw else {
        // A single number, which protobuf also allows.
        return push(T::take(raw)?);
    };
    while !numbers.is_empty() {
        push(T::take(numbers.raw(T::SHAPE.tag())?)?)?;
    }
    Ok(())
}

macro_rules! several {
    ($([$($generic:tt)*] $type:ty: $item:ty, $sample:expr, $push:expr;)*) => {$(
        impl<$($generic)*> Wire for $type {
            const SHAPE: Shape = Shape::Bytes;

            fn size(&self) -> usize {
                self.field_size(1)
            }

            fn put(&self, out: &mut Out) {
                self.put_field(1, out);
            }

            fn take(raw: Raw<'_>) -> Result<Self, WireError> {
                let (mut fields, mut all) = (raw.message("a list")?, Some(Self::default()));
                while let Some((number, raw)) = fields.next_field()? {
                    if number == 1 {
                        Self::take_field(&mut all, raw)?;
                    }
                }
                Ok(all.unwrap_or_default())
            }

            fn sample(rng: &mut Rng) -> Self {
                let count = rng.below(5);
                $sample((0..count).map(|_| <$item>::sample(rng)))
            }

            fn schema(schema: &mut Schema) -> String {
                format!("repeated {}", <$item>::schema(schema))
            }

            fn field_size(&self, number: u32) -> usize {
                several_size(number, self.iter())
            }

            fn put_field(&self, number: u32, out: &mut Out) {
                put_several(number, self.iter(), out);
            }

            fn take_field(slot: &mut Option<Self>, raw: Raw<'_>) -> Result<(), WireError> {
                let all = slot.get_or_insert_default();
                take_several(raw, |item: $item| $push(all, item))
            }

            fn absent() -> Option<Self> {
                Some(Self::default())
            }
        }
    )*};
}

fn twice() -> WireError {
    WireError::Value { field: "set", found: "one item twice".into(), wanted: "each item once" }
}

several! {
    [T: Wire] Vec<T>: T, Vec::from_iter, |all: &mut Vec<T>, item| {
        all.push(item);
        Ok(())
    };
    [T: Wire] VecDeque<T>: T, VecDeque::from_iter, |all: &mut VecDeque<T>, item| {
        all.push_back(item);
        Ok(())
    };
    [A: Array<Item: Wire>] SmallVec<A>: A::Item, SmallVec::from_iter, |all: &mut SmallVec<A>, item| {
        all.push(item);
        Ok(())
    };
    [T: Wire + Ord] BTreeSet<T>: T, BTreeSet::from_iter, |all: &mut BTreeSet<T>, item| {
        if all.insert(item) { Ok(()) } else { Err(twice()) }
    };
}

/// Two values in one message, as fields 1 and 2.
fn pair_size<K: Wire, V: Wire>(key: &K, value: &V) -> usize {
    key.field_size(1) + value.field_size(2)
}

impl<K: Wire + Ord, V: Wire> Wire for BTreeMap<K, V> {
    const SHAPE: Shape = Shape::Bytes;

    fn size(&self) -> usize {
        self.field_size(1)
    }

    fn put(&self, out: &mut Out) {
        self.put_field(1, out);
    }

    fn take(raw: Raw<'_>) -> Result<Self, WireError> {
        let (mut fields, mut all) = (raw.message("a map")?, Some(Self::new()));
        while let Some((number, raw)) = fields.next_field()? {
            if number == 1 {
                Self::take_field(&mut all, raw)?;
            }
        }
        Ok(all.unwrap_or_default())
    }

    fn sample(rng: &mut Rng) -> Self {
        (0..rng.below(5)).map(|_| <(K, V)>::sample(rng)).collect()
    }

    fn schema(schema: &mut Schema) -> String {
        format!("repeated {}", <(K, V)>::schema(schema))
    }

    fn field_size(&self, number: u32) -> usize {
        self.iter().map(|(key, value)| nested_size(number, pair_size(key, value))).sum()
    }

    fn put_field(&self, number: u32, out: &mut Out) {
        for (key, value) in self {
            put_nested(number, pair_size(key, value), out);
            key.put_field(1, out);
            value.put_field(2, out);
        }
    }

    fn take_field(slot: &mut Option<Self>, raw: Raw<'_>) -> Result<(), WireError> {
        let (key, value) = Wire::take(raw)?;
        match slot.get_or_insert_default().insert(key, value) {
            None => Ok(()),
            Some(_) => Err(twice()),
        }
    }

    fn absent() -> Option<Self> {
        Some(Self::new())
    }
}

macro_rules! tuple {
    ($text:literal: $($type:ident $number:tt $name:ident),*) => {
        impl<$($type: Wire),*> Wire for ($($type,)*) {
            const SHAPE: Shape = Shape::Bytes;

            fn size(&self) -> usize {
                let ($($name,)*) = self;
                0 $(+ $name.field_size($number))*
            }

            fn put(&self, out: &mut Out) {
                let ($($name,)*) = self;
                $($name.put_field($number, out);)*
            }

            fn take(raw: Raw<'_>) -> Result<Self, WireError> {
                let mut fields = raw.message($text)?;
                $(let mut $name: Option<$type> = None;)*
                while let Some((number, raw)) = fields.next_field()? {
                    match number {
                        $($number => Wire::take_field(&mut $name, raw)?,)*
                        _ => {}
                    }
                }
                Ok(($(or_absent($name, $text)?,)*))
            }

            fn sample(rng: &mut Rng) -> Self {
                ($($type::sample(rng),)*)
            }

            fn schema(schema: &mut Schema) -> String {
                let parts = [$(format!("{} {}", $number, $type::schema(schema))),*];
                format!("({})", parts.join(", "))
            }
        }
    };
}

tuple!("of a pair": A 1 a, B 2 b);
tuple!("of a triple": A 1 a, B 2 b, C 3 c);
tuple!("of four": A 1 a, B 2 b, C 3 c, D 4 d);

/// A pointer has the encoding of its value.
macro_rules! pointer {
    ($($pointer:ident, $unwrap:expr;)*) => {$(
        impl<T: Wire> Wire for $pointer<T> {
            const SHAPE: Shape = T::SHAPE;
            const IS_POSSIBLE: bool = T::IS_POSSIBLE;

            fn size(&self) -> usize {
                T::size(self)
            }

            fn put(&self, out: &mut Out) {
                T::put(self, out);
            }

            fn take(raw: Raw<'_>) -> Result<Self, WireError> {
                T::take(raw).map(Self::new)
            }

            fn sample(rng: &mut Rng) -> Self {
                Self::new(T::sample(rng))
            }

            fn schema(schema: &mut Schema) -> String {
                T::schema(schema)
            }

            fn field_size(&self, number: u32) -> usize {
                T::field_size(self, number)
            }

            fn put_field(&self, number: u32, out: &mut Out) {
                T::put_field(self, number, out);
            }

            fn take_field(slot: &mut Option<Self>, raw: Raw<'_>) -> Result<(), WireError> {
                let mut inner = slot.take().and_then($unwrap);
                T::take_field(&mut inner, raw)?;
                *slot = inner.map(Self::new);
                Ok(())
            }

            fn absent() -> Option<Self> {
                T::absent().map(Self::new)
            }
        }
    )*};
}

pointer! {
    Arc, Arc::into_inner;
    Box, |inner: Box<T>| Some(*inner);
}

impl<T: Wire> Wire for Arc<[T]> {
    const SHAPE: Shape = Shape::Bytes;

    fn size(&self) -> usize {
        several_size(1, self.iter())
    }

    fn put(&self, out: &mut Out) {
        put_several(1, self.iter(), out);
    }

    fn take(raw: Raw<'_>) -> Result<Self, WireError> {
        Vec::take(raw).map(Self::from)
    }

    fn sample(rng: &mut Rng) -> Self {
        Vec::sample(rng).into()
    }

    fn schema(schema: &mut Schema) -> String {
        Vec::<T>::schema(schema)
    }
}

/// One member of a type: a field or a variant.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Member {
    /// Its number.
    pub number: u32,
    /// Its name.
    pub name: String,
    /// Its type; empty for a variant without fields.
    pub of: String,
}

/// The fields and variants of a type, and of all types that it contains.
#[derive(Clone, Default, Debug)]
pub struct Schema {
    types: BTreeMap<&'static str, Option<Vec<Member>>>,
}

impl Schema {
    /// The schema of `T` and of all types that it contains.
    #[must_use]
    pub fn of<T: Wire>() -> Self {
        let mut schema = Self::default();
        T::schema(&mut schema);
        schema
    }

    /// True if `name` is new: its members are then added with [`Schema::end`].
    pub fn begin(&mut self, name: &'static str) -> bool {
        let is_new = !self.types.contains_key(name);
        if is_new {
            self.types.insert(name, None);
        }
        is_new
    }

    /// Adds the members of a type.
    pub fn end(&mut self, name: &'static str, members: Vec<Member>) {
        self.types.insert(name, Some(members));
    }

    /// One line for each member: type, number, name and type of the member; sorted.
    #[must_use]
    pub fn lines(&self) -> BTreeSet<String> {
        let mut lines = BTreeSet::new();
        for (name, members) in &self.types {
            for member in members.iter().flatten() {
                let Member { number, name: field, of } = member;
                lines.insert(format!("{name} {number:>3} {field} {of}").trim_end().to_owned());
            }
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A message of an early version.
    #[derive(Wire, Clone, PartialEq, Eq, Debug)]
    enum Old {
        Read { key: Bytes, at_least: u64 },
        Stop,
    }

    /// The same message later: with new fields and a new variant.
    #[derive(Wire, Clone, PartialEq, Eq, Debug)]
    enum New {
        Read { key: Bytes, at_least: u64, limit: Option<u64>, nodes: Vec<u32>, flag: bool },
        Stop,
        Pause(u64),
    }

    fn pass<A: Wire, B: Wire>(value: &A) -> Result<B, WireError> {
        decode(&encode(value))
    }

    #[test]
    fn a_later_version_reads_what_an_earlier_one_wrote() {
        let old = Old::Read { key: Bytes::from_static(b"k"), at_least: 7 };
        let new = New::Read {
            key: Bytes::from_static(b"k"),
            at_least: 7,
            limit: None,
            nodes: vec![],
            flag: false,
        };
        assert_eq!(pass(&old), Ok(new));
        assert_eq!(pass(&Old::Stop), Ok(New::Stop));
    }

    #[test]
    fn an_earlier_version_skips_fields_of_a_later_one_and_refuses_its_variants() {
        let new = New::Read {
            key: Bytes::from_static(b"k"),
            at_least: 7,
            limit: Some(0),
            nodes: vec![0, 300],
            flag: true,
        };
        assert_eq!(pass(&new), Ok(Old::Read { key: Bytes::from_static(b"k"), at_least: 7 }));
        let error = WireError::Unknown { of: "Old", number: 3 };
        assert_eq!(pass::<_, Old>(&New::Pause(1)), Err(error));
    }

    #[test]
    fn numbers_keep_their_value_and_take_no_more_than_they_need() {
        for value in [0, 1, 127, 128, 300, u64::from(u32::MAX), u64::MAX - 1, u64::MAX] {
            assert_eq!(pass(&(value, true)), Ok((value, true)));
            assert_eq!(encode(&(value, false)).len(), (value, false).size());
        }
        for value in [0, 1, -1, 63, -64, i64::MAX, i64::MIN] {
            assert_eq!(pass(&(value, 0_u8)), Ok((value, 0_u8)));
        }
        assert_eq!((-1_i64).size(), 1);
        assert!(pass::<_, (u8, u8)>(&(256_u64, 0_u8)).is_err(), "too wide");
    }

    #[test]
    fn options_and_lists_within_each_other_keep_their_form() {
        type Deep = (Option<Option<u64>>, Vec<Vec<u32>>, Vec<Option<Bytes>>);
        let deep: Deep = (
            Some(None),
            vec![vec![], vec![0, 1], vec![]],
            vec![None, Some(Bytes::new()), Some(Bytes::from_static(b"v"))],
        );
        assert_eq!(pass(&deep), Ok(deep));
    }

    #[test]
    fn bytes_that_are_cut_or_changed_are_refused_or_mean_something_else() {
        let mut rng = Rng::stream(1, "wire", 0);
        for _ in 0..2_000 {
            let whole = encode(&New::sample(&mut rng));
            let cut = whole.slice(..usize::try_from(rng.below(whole.len() as u64)).unwrap());
            let _ = decode::<New>(&cut);
            let mut changed = whole.to_vec();
            if let Some(byte) = rng.pick(&(0..changed.len()).collect::<Vec<_>>()).copied() {
                changed[byte] ^= 1 << rng.below(8);
            }
            let _ = decode::<New>(&changed.into());
        }
        let endless = Bytes::from_static(&[0x80; 11]);
        assert_eq!(decode::<Old>(&endless), Err(WireError::Malformed("a number without an end")));
    }

    /// A message whose second variant and second field have been removed.
    #[derive(Wire, Clone, PartialEq, Eq, Debug)]
    enum Later {
        Read {
            key: Bytes,
            #[wire(number = 3)]
            limit: Option<u64>,
        },
        #[wire(number = 3)]
        Pause(u64),
    }

    #[test]
    fn fields_and_variants_after_a_removed_one_keep_their_numbers() {
        let key = Bytes::from_static(b"k");
        let new =
            New::Read { key: key.clone(), at_least: 7, limit: Some(3), nodes: vec![], flag: false };
        assert_eq!(pass(&new), Ok(Later::Read { key: key.clone(), limit: Some(3) }));
        assert_eq!(pass(&New::Pause(9)), Ok(Later::Pause(9)));
        let error = WireError::Unknown { of: "Later", number: 2 };
        assert_eq!(pass::<_, Later>(&New::Stop), Err(error));
    }

    #[test]
    fn missing_fields_and_other_types_are_refused_by_name() {
        assert_eq!(decode::<Old>(&Bytes::new()), Err(WireError::Missing("Old")));
        /// Field 1 is a number here, and bytes in `Old`.
        #[derive(Wire)]
        enum Other {
            Read { key: u64 },
        }
        let error = pass::<_, Old>(&Other::Read { key: 5 }).unwrap_err();
        assert!(matches!(error, WireError::Shape { found: "a number", .. }), "{error}");
        // A wire type that protobuf once had: the start of a group.
        let group = Bytes::from_static(&[0x0b]);
        let error = WireError::Malformed("a field of an unknown wire type");
        assert_eq!(decode::<Old>(&group), Err(error));
    }

    /// A list that must ascend.
    #[derive(Wire, Clone, PartialEq, Eq, Debug)]
    struct Sorted {
        #[wire(ascending)]
        nodes: Vec<u32>,
    }

    /// The same list without that rule.
    #[derive(Wire)]
    struct Unsorted {
        nodes: Vec<u32>,
    }

    #[test]
    fn lists_that_do_not_ascend_are_refused_with_the_name_of_the_field() {
        assert_eq!(pass(&Unsorted { nodes: vec![1, 2] }), Ok(Sorted { nodes: vec![1, 2] }));
        for nodes in [vec![2, 1], vec![1, 1]] {
            let error = pass::<_, Sorted>(&Unsorted { nodes }).unwrap_err();
            assert!(error.to_string().starts_with("Sorted.nodes holds"), "{error}");
        }
    }

    #[test]
    fn one_key_twice_is_no_map() {
        let twice = vec![(1_u64, 2_u64), (1, 3)];
        assert!(pass::<_, BTreeMap<u64, u64>>(&twice).is_err());
        assert_eq!(pass(&BTreeMap::from([(1_u64, 2_u64)])), Ok(vec![(1_u64, 2_u64)]));
    }

    #[test]
    fn the_schema_names_each_field_once() {
        let lines = Schema::of::<New>().lines();
        assert!(
            lines.iter().any(|line| line.ends_with("New::Read   3 limit optional u64")),
            "{lines:?}"
        );
        assert_eq!(lines.len(), 3 + 5);
    }
}
