//! Hashes of state, to compare copies of it without moving them.

use std::fmt::{self, Write};

/// A hash of everything written to it: 64-bit FNV-1a. Equal values with equal `Debug` forms give
/// equal digests on every machine and in every build; not for adversaries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Digest(u64);

impl Default for Digest {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Digest {
    /// Adds bytes.
    pub fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }

    /// Adds a value by its `Debug` form.
    pub fn add_debug(&mut self, value: &impl fmt::Debug) {
        // Writing to a digest cannot fail; a `Debug` form that fails ends early, and the same way
        // for equal values.
        let _ = write!(self, "{value:?};");
    }

    /// The hash of everything added.
    #[must_use]
    pub fn value(&self) -> u64 {
        self.0
    }
}

impl Write for Digest {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.add(text.as_bytes());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_content_and_boundaries_matter() {
        let of = |values: &[&str]| {
            let mut digest = Digest::default();
            values.iter().for_each(|value| digest.add_debug(value));
            digest.value()
        };
        assert_eq!(of(&["a", "b"]), of(&["a", "b"]));
        assert_ne!(of(&["a", "b"]), of(&["b", "a"]));
        assert_ne!(of(&["ab"]), of(&["a", "b"]));
        assert_ne!(of(&[]), of(&[""]));
    }
}
