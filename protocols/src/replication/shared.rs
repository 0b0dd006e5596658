//! A command that many hold at once, and how many bytes it takes.

use std::fmt::{self, Debug, Display};
use std::ops::Deref;
use std::sync::Arc;

use orthodrome_core::Rng;
use orthodrome_core::wire::{Out, Raw, Schema, Shape, Wire, WireError};

/// A shared value that knows its encoded size. A log entry is measured when it is appended, when its
/// record is written and for every message that carries it; a walk through its keys and values each
/// time took a tenth of a simulation.
pub struct Shared<C>(Arc<Measured<C>>);

struct Measured<C> {
    bytes: usize,
    value: C,
}

impl<C: Wire> Shared<C> {
    /// Shares `value`.
    #[must_use]
    pub fn new(value: C) -> Self {
        Self(Arc::new(Measured { bytes: value.size(), value }))
    }
}

impl<C> Clone for Shared<C> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<C> Deref for Shared<C> {
    type Target = C;

    fn deref(&self) -> &C {
        &self.0.value
    }
}

impl<C> AsRef<C> for Shared<C> {
    fn as_ref(&self) -> &C {
        self
    }
}

impl<C: PartialEq> PartialEq for Shared<C> {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl<C: Eq> Eq for Shared<C> {}

impl<C: Debug> Debug for Shared<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Debug::fmt(&**self, f)
    }
}

impl<C: Display> Display for Shared<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Display::fmt(&**self, f)
    }
}

/// The bytes are those of the value.
impl<C: Wire> Wire for Shared<C> {
    const SHAPE: Shape = C::SHAPE;
    const IS_POSSIBLE: bool = C::IS_POSSIBLE;

    fn size(&self) -> usize {
        self.0.bytes
    }

    fn put(&self, out: &mut Out) {
        C::put(self, out);
    }

    fn take(raw: Raw<'_>) -> Result<Self, WireError> {
        C::take(raw).map(Self::new)
    }

    fn sample(rng: &mut Rng) -> Self {
        Self::new(C::sample(rng))
    }

    fn schema(schema: &mut Schema) -> String {
        C::schema(schema)
    }

    fn field_size(&self, number: u32) -> usize {
        match C::absent() {
            Some(_) => C::field_size(self, number),
            None => self.present_size(number),
        }
    }

    fn put_field(&self, number: u32, out: &mut Out) {
        C::put_field(self, number, out);
    }

    fn take_field(slot: &mut Option<Self>, raw: Raw<'_>) -> Result<(), WireError> {
        let inner = slot.take().and_then(|shared| Arc::into_inner(shared.0));
        let mut inner = inner.map(|measured| measured.value);
        C::take_field(&mut inner, raw)?;
        *slot = inner.map(Self::new);
        Ok(())
    }

    fn absent() -> Option<Self> {
        C::absent().map(Self::new)
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use orthodrome_core::wire::{decode, encode};

    use super::*;

    #[test]
    fn a_shared_value_has_the_bytes_of_the_value_and_knows_their_number() {
        for length in [0, 1, 127, 128, 20_000] {
            let value = (7_u64, Bytes::from(vec![b'x'; length]));
            let shared = Shared::new(value.clone());
            let bytes = encode(&value);
            assert_eq!((encode(&shared), shared.size()), (bytes.clone(), bytes.len()));
            assert_eq!(decode::<Shared<(u64, Bytes)>>(&bytes), Ok(shared.clone()));
            assert_eq!(format!("{shared:?}"), format!("{value:?}"));
        }
    }
}
