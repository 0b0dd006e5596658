//! Reads requests of the Redis protocol: lists of strings, and lines of words.
//!
//! Every length is checked before anything of that length is kept. A request that arrives in many
//! pieces is read once, not again with each piece.

use bytes::{Buf as _, Bytes, BytesMut};

/// The longest line with the length of a list or of a string.
const HEAD_BYTES_MAX: usize = 64;
/// The longest request that is a line of words.
const LINE_BYTES_MAX: usize = 64 << 10;
/// What a word costs besides its bytes.
pub(super) const WORD_BYTES: usize = 64;
/// The largest word that is copied out of the buffer, so that a short word does not keep a large
/// buffer.
const COPIED_BYTES_MAX: usize = 64 << 10;

/// The bounds of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Bounds {
    /// Bytes of a request; each word counts [`WORD_BYTES`] more.
    pub(super) request_bytes_max: usize,
    /// Bytes of a word.
    pub(super) word_bytes_max: usize,
    /// Words of a request.
    pub(super) words_max: usize,
}

impl Bounds {
    /// The bounds of a client that has not shown its credential.
    pub(super) const STRANGER: Self =
        Self { request_bytes_max: 16 << 10, word_bytes_max: 4 << 10, words_max: 16 };
}

/// Bytes that are not a request. The connection cannot continue.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Malformed(pub(super) String);

fn malformed<T>(why: impl Into<String>) -> Result<T, Malformed> {
    Err(Malformed(why.into()))
}

/// The part of a request that has arrived.
#[derive(Debug)]
struct Partial {
    words: Vec<Bytes>,
    /// Words that have not arrived.
    left: usize,
    /// The length of the next word, if its head has arrived.
    length: Option<usize>,
    bytes: usize,
}

/// Reads one request after the other.
#[derive(Debug, Default)]
pub(super) struct Requests {
    partial: Option<Partial>,
}

/// The number in a head line such as `*3` or `$12`, and the bytes of the line; none if the line has
/// not arrived.
fn head(buffer: &[u8]) -> Result<Option<(i64, usize)>, Malformed> {
    let window = buffer.get(1..buffer.len().min(HEAD_BYTES_MAX)).unwrap_or_default();
    let Some(end) = window.iter().position(|byte| *byte == b'\n') else {
        return if buffer.len() >= HEAD_BYTES_MAX {
            malformed("too long a head")
        } else {
            Ok(None)
        };
    };
    let digits = window.get(..end).and_then(|line| line.strip_suffix(b"\r"));
    let number = digits.and_then(|digits| std::str::from_utf8(digits).ok()?.parse().ok());
    match number {
        Some(number) => Ok(Some((number, end + 2))),
        None => malformed("no number"),
    }
}

impl Requests {
    /// The bytes that the part of a request that has arrived takes, without what is in the buffer.
    pub(super) fn bytes(&self) -> usize {
        self.partial.as_ref().map_or(0, |partial| partial.bytes)
    }

    /// The next request, and its bytes, once it is complete.
    ///
    /// # Errors
    /// The bytes are no request, or exceed a bound.
    pub(super) fn next(
        &mut self,
        buffer: &mut BytesMut,
        bounds: Bounds,
    ) -> Result<Option<(Vec<Bytes>, usize)>, Malformed> {
        loop {
            if self.partial.is_none() {
                match buffer.first() {
                    None => return Ok(None),
                    Some(b'*') => {
                        let found = head(buffer)
                            .map_err(|_| Malformed("invalid multibulk length".into()))?;
                        let Some((count, size)) = found else { return Ok(None) };
                        buffer.advance(size);
                        let count = usize::try_from(count.max(0)).unwrap_or(usize::MAX);
                        let cost = count.saturating_mul(WORD_BYTES);
                        if count > bounds.words_max || cost > bounds.request_bytes_max {
                            return malformed("invalid multibulk length");
                        }
                        if count == 0 {
                            continue;
                        }
                        self.partial = Some(Partial {
                            words: Vec::new(),
                            left: count,
                            length: None,
                            bytes: 0,
                        });
                    }
                    Some(_) => match line(buffer, bounds)? {
                        None => return Ok(None),
                        Some((words, _)) if words.is_empty() => continue,
                        Some(request) => return Ok(Some(request)),
                    },
                }
            }
            let Some(partial) = &mut self.partial else { continue };
            if !partial.fill(buffer, bounds)? {
                return Ok(None);
            }
            let whole = self.partial.take();
            return Ok(whole.map(|partial| (partial.words, partial.bytes)));
        }
    }
}

impl Partial {
    /// Takes words from the buffer; true if the request is complete.
    fn fill(&mut self, buffer: &mut BytesMut, bounds: Bounds) -> Result<bool, Malformed> {
        while self.left > 0 {
            let length = match self.length {
                Some(length) => length,
                None => {
                    match buffer.first() {
                        None => return Ok(false),
                        Some(b'$') => {}
                        Some(other) => {
                            let other = char::from(*other).escape_default();
                            return malformed(format!("expected '$', got '{other}'"));
                        }
                    }
                    let found =
                        head(buffer).map_err(|_| Malformed("invalid bulk length".into()))?;
                    let Some((length, size)) = found else { return Ok(false) };
                    let length = usize::try_from(length).unwrap_or(usize::MAX);
                    let bytes = self.bytes.saturating_add(length).saturating_add(WORD_BYTES);
                    if length > bounds.word_bytes_max || bytes > bounds.request_bytes_max {
                        return malformed("invalid bulk length");
                    }
                    self.bytes = bytes;
                    buffer.advance(size);
                    self.length = Some(length);
                    length
                }
            };
            if buffer.len() < length + 2 {
                return Ok(false);
            }
            let word = buffer.split_to(length);
            if buffer.get(..2) != Some(b"\r\n") {
                return malformed("a string is not followed by the end of a line");
            }
            buffer.advance(2);
            self.words.push(if length <= COPIED_BYTES_MAX {
                Bytes::copy_from_slice(&word)
            } else {
                word.freeze()
            });
            self.length = None;
            self.left -= 1;
        }
        Ok(true)
    }
}

/// A request that is a line of words, as people type it.
fn line(buffer: &mut BytesMut, bounds: Bounds) -> Result<Option<(Vec<Bytes>, usize)>, Malformed> {
    let most = LINE_BYTES_MAX.min(bounds.request_bytes_max);
    let window = buffer.get(..buffer.len().min(most)).unwrap_or_default();
    let Some(end) = window.iter().position(|byte| *byte == b'\n') else {
        return if buffer.len() >= most { malformed("too big inline request") } else { Ok(None) };
    };
    let taken = buffer.split_to(end + 1);
    let text = taken.strip_suffix(b"\n").unwrap_or(&taken);
    let text = text.strip_suffix(b"\r").unwrap_or(text);
    let words = words(text).ok_or_else(|| Malformed("unbalanced quotes in request".into()))?;
    let bytes = words.iter().map(|word| word.len() + WORD_BYTES).sum();
    if words.len() > bounds.words_max || bytes > bounds.request_bytes_max {
        return malformed("too big inline request");
    }
    Ok(Some((words, bytes)))
}

/// The words of a line: separated by spaces, possibly in quotes. None if a quote does not end.
fn words(text: &[u8]) -> Option<Vec<Bytes>> {
    let mut words = Vec::new();
    let mut rest = text.trim_ascii();
    while let Some(first) = rest.first() {
        let (word, after) = match first {
            quote @ (b'"' | b'\'') => quoted(rest.get(1..)?, *quote)?,
            _ => {
                let end = rest.iter().position(u8::is_ascii_whitespace).unwrap_or(rest.len());
                let (word, after) = rest.split_at_checked(end)?;
                (word.to_vec(), after)
            }
        };
        words.push(Bytes::from(word));
        rest = after.trim_ascii_start();
    }
    Some(words)
}

/// A word up to its closing quote, and what follows.
fn quoted(text: &[u8], quote: u8) -> Option<(Vec<u8>, &[u8])> {
    let (mut word, mut at) = (Vec::new(), 0);
    loop {
        let byte = *text.get(at)?;
        at += 1;
        if byte == quote {
            let after = text.get(at..)?;
            let ends = after.first().is_none_or(u8::is_ascii_whitespace);
            return ends.then_some((word, after));
        }
        if byte != b'\\' {
            word.push(byte);
            continue;
        }
        let escaped = *text.get(at)?;
        at += 1;
        let byte = match (quote, escaped) {
            (b'"', b'n') => b'\n',
            (b'"', b'r') => b'\r',
            (b'"', b't') => b'\t',
            (b'"', b'x') => {
                let digits = std::str::from_utf8(text.get(at..at + 2)?).ok()?;
                at += 2;
                u8::from_str_radix(digits, 16).ok()?
            }
            (b'"', other) | (_, other @ b'\'') => other,
            (_, other) => {
                word.push(b'\\');
                other
            }
        };
        word.push(byte);
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    const BOUNDS: Bounds =
        Bounds { request_bytes_max: 4 << 10, word_bytes_max: 1 << 10, words_max: 20 };

    fn all(text: &[u8]) -> Result<Vec<Vec<Bytes>>, Malformed> {
        let (mut requests, mut buffer) = (Requests::default(), BytesMut::from(text));
        let mut found = Vec::new();
        while let Some((words, _)) = requests.next(&mut buffer, BOUNDS)? {
            found.push(words);
        }
        Ok(found)
    }

    fn why(text: &[u8]) -> String {
        all(text).unwrap_err().0
    }

    #[test]
    fn requests_are_lists_or_lines() {
        let text = b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n\r\nPING \"a b\\x41\" 'it\\'s'\r\n*0\r\n*-1\r\n*1\r\n$0\r\n\r\n";
        let found = all(text).unwrap();
        assert_eq!(
            found,
            [
                vec![Bytes::from("GET"), Bytes::from("k")],
                vec![Bytes::from("PING"), Bytes::from("a bA"), Bytes::from("it's")],
                vec![Bytes::new()],
            ]
        );
    }

    #[test]
    fn what_exceeds_a_bound_is_refused_before_it_arrives() {
        assert_eq!(why(b"*21\r\n"), "invalid multibulk length");
        assert_eq!(why(b"*9223372036854775807\r\n"), "invalid multibulk length");
        assert_eq!(why(b"*x\r\n"), "invalid multibulk length");
        assert_eq!(why(&[b"*1".as_slice(), &[b'0'; 80]].concat()), "invalid multibulk length");
        assert_eq!(why(b"*1\r\n$1025\r\n"), "invalid bulk length");
        assert_eq!(why(b"*1\r\n$-1\r\n"), "invalid bulk length");
        assert_eq!(why(b"*1\r\nx"), "expected '$', got 'x'");
        assert_eq!(why(b"*1\r\n$1\r\nabc"), "a string is not followed by the end of a line");
        let several = b"$1000\r\n".iter().chain(&[b'x'; 1_000]).chain(b"\r\n");
        let several: Vec<u8> = several.copied().collect();
        assert_eq!(
            why(&[b"*5\r\n".as_slice(), &several.repeat(5)].concat()),
            "invalid bulk length"
        );
        assert_eq!(why(&[b'a'; 5 << 10]), "too big inline request");
        assert_eq!(why(&[b"a ".repeat(21), b"\r\n".to_vec()].concat()), "too big inline request");
        assert_eq!(why(b"SET \"a\r\n"), "unbalanced quotes in request");
    }

    proptest! {
        #![proptest_config(crate::fuzz_config())]

        /// A request that arrives byte by byte is the one that was sent.
        #[test]
        fn pieces_make_the_same_requests(sent in vec(vec(vec(0_u8.., 0..40), 1..6), 1..6)) {
            let mut bytes = Vec::new();
            for words in &sent {
                bytes.extend(format!("*{}\r\n", words.len()).bytes());
                for word in words {
                    bytes.extend(format!("${}\r\n", word.len()).bytes());
                    bytes.extend(word);
                    bytes.extend(b"\r\n");
                }
            }
            let (mut requests, mut buffer) = (Requests::default(), BytesMut::new());
            let mut found = Vec::new();
            for byte in bytes {
                buffer.extend([byte]);
                if let Some((words, _)) = requests.next(&mut buffer, BOUNDS).unwrap() {
                    found.push(words);
                }
            }
            prop_assert_eq!(found, sent);
        }

        /// Any bytes are requests, or are refused, and no more is kept than the bounds allow.
        #[test]
        fn any_bytes_are_read_or_refused(bytes in vec(prop_oneof![
            Just(b'*'), Just(b'$'), Just(b'\r'), Just(b'\n'), b'0'..=b'9', 0_u8..,
        ], 0..200)) {
            let (mut requests, mut buffer) = (Requests::default(), BytesMut::from(&bytes[..]));
            while let Ok(Some((words, cost))) = requests.next(&mut buffer, BOUNDS) {
                prop_assert!(!words.is_empty() && words.len() <= BOUNDS.words_max);
                prop_assert!(cost <= BOUNDS.request_bytes_max);
            }
            prop_assert!(requests.bytes() <= BOUNDS.request_bytes_max);
        }
    }
}
