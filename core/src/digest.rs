//! Running hashes, which compare traces without storing them and replicas without copying their
//! state.

use std::fmt::{self, Write};

/// A hash of all added values, in order. It is the same on every machine and in every build. It is
/// fast, and does not resist adversaries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Digest(u64);

impl Default for Digest {
    fn default() -> Self {
        Self(0x9e37_79b9_7f4a_7c15)
    }
}

impl Digest {
    /// Adds a word.
    pub fn add(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(23) ^ word).wrapping_mul(0xff51_afd7_ed55_8ccd);
    }

    /// Adds a string.
    pub fn add_text(&mut self, text: &str) {
        self.add_bytes(text.as_bytes());
    }

    /// Adds bytes.
    pub fn add_bytes(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<8>();
        for word in words {
            self.add(u64::from_le_bytes(*word));
        }
        self.add(rest.iter().fold(rest.len() as u64, |word, &byte| (word << 8) | u64::from(byte)));
    }

    /// Adds a number by its decimal form, as [`Digest::add_text`] would.
    pub fn add_number(&mut self, number: u64) {
        let (mut digits, mut first, mut left) = ([0_u8; 20], 20, number);
        for (at, digit) in digits.iter_mut().enumerate().rev() {
            *digit = b'0' + (left % 10) as u8;
            (first, left) = (at, left / 10);
            if left == 0 {
                break;
            }
        }
        self.add_bytes(digits.get(first..).unwrap_or_default());
    }

    /// Adds a value by its `Debug` form.
    pub fn add_debug(&mut self, value: &impl fmt::Debug) {
        // Writing to a digest cannot fail. A `Debug` form that fails ends early, and does so in the
        // same way for equal values.
        let _ = write!(self, "{value:?};");
    }

    /// The hash of all values so far.
    #[must_use]
    pub fn value(&self) -> u64 {
        self.0 ^ (self.0 >> 32)
    }
}

impl Write for Digest {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.add_text(text);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of<T: ?Sized>(values: &[&T], add: impl Fn(&mut Digest, &T)) -> u64 {
        let mut digest = Digest::default();
        values.iter().for_each(|value| add(&mut digest, value));
        digest.value()
    }

    #[test]
    fn order_and_content_of_words_matter() {
        let of = |words: &[&u64]| of(words, |digest, word| digest.add(*word));
        assert_ne!(of(&[&1, &2]), of(&[&2, &1]));
        assert_ne!(of(&[&1, &2]), of(&[&1, &3]));
        assert_ne!(of(&[&0]), of(&[&0, &0]));
    }

    #[test]
    fn numbers_have_the_digest_of_their_decimal_form() {
        for number in [0, 1, 9, 10, 99, 12_345_678, 123_456_789, u64::MAX] {
            let (mut short, mut text) = (Digest::default(), Digest::default());
            short.add_number(number);
            text.add_text(&number.to_string());
            assert_eq!(short, text, "{number}");
        }
    }

    #[test]
    fn order_content_and_boundaries_of_values_matter() {
        let of = |values: &[&str]| of(values, |digest, value| digest.add_debug(&value));
        assert_eq!(of(&["a", "b"]), of(&["a", "b"]));
        assert_ne!(of(&["a", "b"]), of(&["b", "a"]));
        assert_ne!(of(&["AppendEntries"]), of(&["AppendEntrie5"]));
        assert_ne!(of(&["ab"]), of(&["a", "b"]));
        assert_ne!(of(&[]), of(&[""]));
    }
}
