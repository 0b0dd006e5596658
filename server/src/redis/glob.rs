//! Patterns of names, as `KEYS` and `MATCH` have them.
//!
//! A pattern is a list of elements, each for one byte, with stars in between. The matcher keeps the set
//! of all positions in the pattern that the bytes so far may have reached, one bit for each. So a
//! pattern with many stars takes no longer than another one of the same length.

use bytes::Bytes;
use orthodrome_core::Key;
use orthodrome_core::procedure::redis::reply::Failure;
use orthodrome_core::scan::KeyRange;

/// The longest pattern, in bytes. For each byte of a name the matcher passes over all its elements.
const PATTERN_BYTES_MAX: usize = 1_024;

const TOO_LONG: Failure = Failure::new("ERR a pattern has at most 1024 bytes");

/// A pattern.
#[derive(Clone, Debug)]
pub(super) struct Pattern {
    /// The number of words of a set of positions.
    words: usize,
    /// For each byte, the positions at which the next element accepts it.
    accepts: Vec<u64>,
    /// The positions with a star, at which any byte may pass.
    stars: Vec<u64>,
    /// The number of elements, which is the last position.
    end: usize,
    /// The bytes with which every matching name begins.
    literal: Vec<u8>,
    /// True if these bytes are the whole name.
    is_exact: bool,
}

/// What one byte must be.
enum Element {
    Byte(u8),
    Any,
    /// One of these, or none of them.
    Class {
        is_negated: bool,
        ranges: Vec<(u8, u8)>,
    },
}

impl Element {
    fn accepts(&self, byte: u8) -> bool {
        match self {
            Self::Byte(own) => *own == byte,
            Self::Any => true,
            Self::Class { is_negated, ranges } => {
                let is_in = ranges.iter().any(|(low, high)| (*low..=*high).contains(&byte));
                is_in != *is_negated
            }
        }
    }
}

/// Reads what follows `[`; what follows the class, too. As in Redis, the end of the pattern closes it.
fn class(text: &[u8]) -> (Element, &[u8]) {
    let (is_negated, mut rest) = match text {
        [b'^', rest @ ..] => (true, rest),
        rest => (false, rest),
    };
    let mut ranges = Vec::new();
    loop {
        rest = match rest {
            [b'\\', byte, rest @ ..] => {
                ranges.push((*byte, *byte));
                rest
            }
            [b']', rest @ ..] => return (Element::Class { is_negated, ranges }, rest),
            [] => return (Element::Class { is_negated, ranges }, rest),
            [one, b'-', other, rest @ ..] => {
                ranges.push((*one.min(other), *one.max(other)));
                rest
            }
            [byte, rest @ ..] => {
                ranges.push((*byte, *byte));
                rest
            }
        };
    }
}

fn set(positions: &mut [u64], position: usize) {
    if let Some(word) = positions.get_mut(position / 64) {
        *word |= 1 << (position % 64);
    }
}

impl Pattern {
    /// Reads a pattern: `*`, `?`, `[abc]`, `[^a]`, `[a-z]`, and `\` before a byte that means itself.
    ///
    /// # Errors
    /// It is too long.
    pub(super) fn parse(text: &Bytes) -> Result<Self, Failure> {
        if text.len() > PATTERN_BYTES_MAX {
            return Err(TOO_LONG);
        }
        let (mut elements, mut starred) = (Vec::new(), Vec::new());
        let (mut literal, mut is_exact) = (Vec::new(), true);
        let mut rest: &[u8] = text;
        while let Some((first, after)) = rest.split_first() {
            rest = after;
            let element = match (*first, rest) {
                (b'*', _) => {
                    is_exact = false;
                    starred.push(elements.len());
                    continue;
                }
                (b'?', _) => Element::Any,
                (b'[', _) => {
                    let (class, after) = class(rest);
                    rest = after;
                    class
                }
                (b'\\', [byte, after @ ..]) => {
                    rest = after;
                    Element::Byte(*byte)
                }
                (byte, _) => Element::Byte(byte),
            };
            match element {
                Element::Byte(byte) if is_exact => literal.push(byte),
                Element::Byte(_) => {}
                Element::Any | Element::Class { .. } => is_exact = false,
            }
            elements.push(element);
        }
        let end = elements.len();
        let words = end / 64 + 1;
        let mut accepts = Vec::with_capacity(256 * words);
        for byte in 0..=u8::MAX {
            let mut positions = vec![0; words];
            for (position, element) in elements.iter().enumerate() {
                if element.accepts(byte) {
                    set(&mut positions, position);
                }
            }
            accepts.extend(positions);
        }
        let mut stars = vec![0; words];
        starred.into_iter().for_each(|position| set(&mut stars, position));
        Ok(Self { words, accepts, stars, end, literal, is_exact })
    }

    /// The bytes that the pattern of a text of this length takes.
    pub(super) const fn table_bytes(length: usize) -> usize {
        (length / 64 + 1) * (256 + 1) * size_of::<u64>()
    }

    /// True if the whole name matches.
    pub(super) fn matches(&self, name: &[u8]) -> bool {
        let mut positions = vec![0; self.words];
        set(&mut positions, 0);
        for byte in name {
            let accepts = self.accepts.iter().skip(usize::from(*byte) * self.words);
            let mut carried = 0;
            let mut any = 0;
            for ((word, star), accepts) in positions.iter_mut().zip(&self.stars).zip(accepts) {
                let passed = *word & accepts;
                *word = (passed << 1) | carried | (*word & star);
                carried = passed >> 63;
                any |= *word;
            }
            if any == 0 {
                return false;
            }
        }
        positions.get(self.end / 64).is_some_and(|word| word >> (self.end % 64) & 1 == 1)
    }

    /// The keys that begin with `prefix` and whose rest may match.
    pub(super) fn range(&self, prefix: &str) -> KeyRange {
        let start = [prefix.as_bytes(), &self.literal].concat();
        let range = KeyRange::prefix(&start);
        if self.is_exact { range.up_to(&Key::from(start), false) } else { range }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(text: &str) -> Pattern {
        Pattern::parse(&Bytes::copy_from_slice(text.as_bytes())).unwrap()
    }

    #[test]
    fn patterns_match_as_in_redis() {
        for (text, matching, others) in [
            ("", &[""][..], &["a"][..]),
            ("abc", &["abc"], &["", "ab", "abcd", "abd"]),
            ("*", &["", "a", "\0\n"], &[]),
            ("a*", &["a", "ab"], &["", "b", "ba"]),
            ("*a", &["a", "ba", "aa"], &["", "ab"]),
            ("a**b*c", &["abc", "axbxc", "abbcc"], &["ab", "acb"]),
            ("h?llo", &["hello", "hallo", "h?llo"], &["hllo", "heello"]),
            ("h[ae]llo", &["hello", "hallo"], &["hillo", "hllo"]),
            ("h[^e]llo", &["hallo", "h^llo"], &["hello", "hllo"]),
            ("h[a-c]llo", &["hallo", "hbllo", "hcllo"], &["hdllo", "h-llo"]),
            ("[c-a]", &["a", "b", "c"], &["d", "-"]),
            ("[a-]", &["a", "]", "^"], &["-", "b"]),
            (r"[\]a]", &["]", "a"], &["\\", "b"]),
            (r"\*a\?", &["*a?"], &["xa?", r"\*a\?"]),
            (r"a\", &[r"a\"], &["a"]),
            ("[]a]", &[], &["]a]", "a]", "]"]),
            ("[^]a", &["xa", "]a"], &["a", "x"]),
            ("a[bc", &["ab", "ac"], &["a", "a[bc", "abc"]),
            ("a[", &[], &["a", "a["]),
        ] {
            let pattern = pattern(text);
            for name in matching {
                assert!(pattern.matches(name.as_bytes()), "{text:?} and {name:?}");
            }
            for name in others {
                assert!(!pattern.matches(name.as_bytes()), "{text:?} and {name:?}");
            }
        }
    }

    #[test]
    fn patterns_longer_than_a_word_match() {
        for length in [63, 64, 65, 127, 128, 129, 1_000] {
            let text = format!("{}*{}?", "a".repeat(length / 2), "b".repeat(length / 2));
            let pattern = pattern(&text);
            let name = |middle: &str| {
                format!("{}{middle}{}c", "a".repeat(length / 2), "b".repeat(length / 2))
            };
            assert!(pattern.matches(name("").as_bytes()), "{length}");
            assert!(pattern.matches(name("xyz").as_bytes()), "{length}");
            assert!(!pattern.matches(&name("").as_bytes()[1..]), "{length}");
        }
        let long = Bytes::from(vec![b'a'; PATTERN_BYTES_MAX + 1]);
        assert_eq!(Pattern::parse(&long).unwrap_err(), TOO_LONG);
    }

    /// A matcher that tries every length of every star would not end before the sun does.
    #[test]
    fn many_stars_cost_no_more_than_other_elements() {
        let hostile = pattern(&"*a".repeat(PATTERN_BYTES_MAX / 2 - 1));
        let name = [vec![b'a'; 4_095], vec![b'b']].concat();
        for _ in 0..100 {
            assert!(!hostile.matches(&name));
        }
    }

    #[test]
    fn what_a_pattern_begins_with_bounds_the_range() {
        let range = |text: &str| pattern(text).range("redis/0/");
        let between = |from: &str, until: &str| KeyRange {
            from: Key::from(from),
            until: Some(Key::from(until)),
        };
        assert_eq!(range("*b"), between("redis/0/", "redis/00"));
        assert_eq!(range("ab*c"), between("redis/0/ab", "redis/0/ac"));
        assert_eq!(range("ab[c]"), between("redis/0/ab", "redis/0/ac"));
        assert_eq!(range(r"a\*?"), between("redis/0/a*", "redis/0/a+"));
        assert_eq!(range("ab"), between("redis/0/ab", "redis/0/ab\0"));
    }
}
