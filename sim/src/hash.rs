//! A running hash of everything that happens, so that two runs can be compared without keeping
//! either's trace.

/// Order-sensitive and cheap; not for adversaries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TraceHash(u64);

impl Default for TraceHash {
    fn default() -> Self {
        Self(0x9e37_79b9_7f4a_7c15)
    }
}

impl TraceHash {
    /// Adds a word.
    pub fn add(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(23) ^ word).wrapping_mul(0xff51_afd7_ed55_8ccd);
    }

    /// Adds a text.
    pub fn add_text(&mut self, text: &str) {
        let (words, rest) = text.as_bytes().as_chunks::<8>();
        for word in words {
            self.add(u64::from_le_bytes(*word));
        }
        self.add(rest.iter().fold(rest.len() as u64, |word, &byte| (word << 8) | u64::from(byte)));
    }

    /// The hash of everything added.
    #[must_use]
    pub fn value(&self) -> u64 {
        self.0 ^ (self.0 >> 32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_and_content_matter() {
        let of = |words: &[u64]| {
            let mut hash = TraceHash::default();
            words.iter().for_each(|&word| hash.add(word));
            hash.value()
        };
        assert_ne!(of(&[1, 2]), of(&[2, 1]));
        assert_ne!(of(&[1, 2]), of(&[1, 3]));
        assert_ne!(of(&[0]), of(&[0, 0]));
        let (mut a, mut b) = (TraceHash::default(), TraceHash::default());
        a.add_text("AppendEntries");
        b.add_text("AppendEntrie5");
        assert_ne!(a, b);
    }
}
