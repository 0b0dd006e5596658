//! The encoding of numbers, texts, lists, maps, options and pointers.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::{BufMut as _, Bytes};
use smallvec::{Array, SmallVec};

use super::{
    Out, Raw, Schema, Shape, Wire, WireError, nested_size, or_absent, put_nested, put_varint,
    varint_size,
};
use crate::ordered::{OrdMap, OrdSet};
use crate::procedure::Procedure;
use crate::{Rng, Time, Timestamp, TxnId, TxnMap};

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

            fn is_absent(&self) -> bool {
                *self == 0
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

            fn is_absent(&self) -> bool {
                $to(self).is_absent()
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

    fn is_absent(&self) -> bool {
        self.0 == 0
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

    fn is_absent(&self) -> bool {
        self.is_empty()
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

/// A value that is a message with one field, which may occur several times.
fn take_first_field<T: Wire + Default>(raw: Raw<'_>, name: &'static str) -> Result<T, WireError> {
    let (mut fields, mut all) = (raw.message(name)?, Some(T::default()));
    while let Some((number, raw)) = fields.next_field()? {
        if number == 1 {
            T::take_field(&mut all, raw)?;
        }
    }
    Ok(all.unwrap_or_default())
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
                take_first_field(raw, "a list")
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
    [T: Wire + Ord] OrdSet<T>: T, OrdSet::from_iter, |all: &mut OrdSet<T>, item| {
        if all.insert(item) { Ok(()) } else { Err(twice()) }
    };
}

/// Two values in one message, as fields 1 and 2.
fn pair_size<K: Wire, V: Wire>(key: &K, value: &V) -> usize {
    key.field_size(1) + value.field_size(2)
}

/// Maps: a message for each entry, in the order of their keys.
macro_rules! map {
    ($map:ty: $key:ty, $value:ty, [$($generics:tt)*]) => {
        impl<$($generics)*> Wire for $map {
            const SHAPE: Shape = Shape::Bytes;

            fn size(&self) -> usize {
                self.field_size(1)
            }

            fn put(&self, out: &mut Out) {
                self.put_field(1, out);
            }

            fn take(raw: Raw<'_>) -> Result<Self, WireError> {
                take_first_field(raw, "a map")
            }

            fn sample(rng: &mut Rng) -> Self {
                (0..rng.below(5)).map(|_| <($key, $value)>::sample(rng)).collect()
            }

            fn schema(schema: &mut Schema) -> String {
                format!("repeated {}", <($key, $value)>::schema(schema))
            }

            fn field_size(&self, number: u32) -> usize {
                self.iter().map(|(key, value)| nested_size(number, pair_size(key, value))).sum()
            }

            fn put_field(&self, number: u32, out: &mut Out) {
                for (key, value) in self.iter() {
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
                Some(Self::default())
            }
        }
    };
}
map!(OrdMap<K, V>: K, V, [K: Wire + Ord, V: Wire]);
map!(TxnMap<V>: TxnId, V, [V: Wire]);

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
