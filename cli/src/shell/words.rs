//! Words of a command line: separated by blanks, quoted where they contain some.

/// One word of a line.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(super) struct Word {
    pub(super) bytes: Vec<u8>,
    /// Part of it was in quotes, so it is not a keyword, whatever it contains.
    pub(super) is_quoted: bool,
}

impl Word {
    /// True if it is this keyword, without quotes.
    pub(super) fn is(&self, word: &str) -> bool {
        !self.is_quoted && self.bytes == word.as_bytes()
    }
}

/// Splits a line into words. `"…"` may contain blanks and the escapes `\n`, `\r`, `\t`, `\"`, `\'`,
/// `\\` and `\xNN`; `'…'` contains anything but `'`, as it is. A `#` that starts a word starts a
/// comment.
///
/// # Errors
/// What is wrong with the line.
pub(super) fn split(line: &str) -> Result<Vec<Word>, String> {
    let mut words = Vec::new();
    let mut word: Option<Word> = None;
    let mut chars = line.chars();
    while let Some(char) = chars.next() {
        match char {
            '#' if word.is_none() => break,
            '"' | '\'' => {
                let word = word.get_or_insert_default();
                word.is_quoted = true;
                if char == '"' {
                    escaped(&mut chars, &mut word.bytes)?;
                } else {
                    verbatim(&mut chars, &mut word.bytes)?;
                }
            }
            char if char.is_whitespace() => words.extend(word.take()),
            char => push(&mut word.get_or_insert_default().bytes, char),
        }
    }
    words.extend(word);
    Ok(words)
}

/// Reads up to the closing single quote.
fn verbatim(chars: &mut impl Iterator<Item = char>, word: &mut Vec<u8>) -> Result<(), String> {
    loop {
        match chars.next() {
            Some('\'') => return Ok(()),
            Some(char) => push(word, char),
            None => return Err("closing ' is missing".into()),
        }
    }
}

fn push(word: &mut Vec<u8>, char: char) {
    word.extend_from_slice(char.encode_utf8(&mut [0; 4]).as_bytes());
}

/// Reads up to the closing double quote.
fn escaped(chars: &mut impl Iterator<Item = char>, word: &mut Vec<u8>) -> Result<(), String> {
    loop {
        match chars.next() {
            Some('"') => return Ok(()),
            Some('\\') => escape(chars, word)?,
            Some(char) => push(word, char),
            None => return Err("closing \" is missing".into()),
        }
    }
}

fn escape(chars: &mut impl Iterator<Item = char>, word: &mut Vec<u8>) -> Result<(), String> {
    match chars.next() {
        Some('n') => word.push(b'\n'),
        Some('r') => word.push(b'\r'),
        Some('t') => word.push(b'\t'),
        Some(char @ ('"' | '\'' | '\\')) => push(word, char),
        Some('x') => {
            let mut digit = || chars.next().and_then(|char| char.to_digit(16));
            let (Some(high), Some(low)) = (digit(), digit()) else {
                return Err("\\x needs two hexadecimal digits".into());
            };
            word.push(u8::try_from(high * 16 + low).unwrap_or(u8::MAX));
        }
        Some(other) => return Err(format!("\\{other} is not an escape; use \\\\ for a backslash")),
        None => return Err("closing \" is missing".into()),
    }
    Ok(())
}

/// Formats bytes so that [`split`] reads them back: without quotes if they are one plain word.
pub(super) fn quote(bytes: &[u8]) -> String {
    let is_plain = |byte: &u8| byte.is_ascii_graphic() && !b"\"'\\#".contains(byte);
    match std::str::from_utf8(bytes) {
        Ok(text) if !text.is_empty() && bytes.iter().all(is_plain) => text.into(),
        // Readable text stays readable.
        Ok(text) if !text.chars().any(|char| char.is_control()) => {
            format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
        }
        Ok(_) | Err(_) => format!("\"{}\"", bytes.escape_ascii()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn words(line: &str) -> Vec<String> {
        split(line)
            .unwrap()
            .into_iter()
            .map(|word| String::from_utf8(word.bytes).unwrap())
            .collect()
    }

    #[test]
    fn blanks_separate_and_quotes_protect() {
        assert_eq!(words("  put a\t1 "), ["put", "a", "1"]);
        assert_eq!(
            words(r#"put "a b" 'c "d" \n' e"f g"h"#),
            ["put", "a b", r#"c "d" \n"#, "ef gh"]
        );
        assert_eq!(words(r#"put "" '' "\"\\\n\x41""#), ["put", "", "", "\"\\\nA"]);
        assert_eq!(words("get a # a comment"), ["get", "a"]);
        assert_eq!(words("get a#b"), ["get", "a#b"]);
        assert_eq!(words("# nothing"), Vec::<String>::new());
        assert_eq!(split(r#""\xff""#).unwrap(), [Word { bytes: vec![0xff], is_quoted: true }]);
        assert_eq!(
            split("a 'a' ''a").unwrap().iter().map(|w| w.is("a")).collect::<Vec<_>>(),
            [true, false, false]
        );
    }

    #[test]
    fn unreadable_lines_are_refused_with_a_reason() {
        for (line, reason) in [
            ("put \"a", "closing \" is missing"),
            ("put 'a", "closing ' is missing"),
            (r#"put "\"#, "is missing"),
            (r#"put "\q""#, "\\q is not an escape"),
            (r#"put "\x4""#, "hexadecimal"),
        ] {
            let error = split(line).unwrap_err();
            assert!(error.contains(reason), "{line}: {error}");
        }
    }

    proptest! {
        #[test]
        fn quoted_words_read_back(bytes: Vec<u8>) {
            let words = split(&quote(&bytes)).unwrap();
            prop_assert_eq!(words.into_iter().map(|word| word.bytes).collect::<Vec<_>>(), [bytes]);
        }

        #[test]
        fn quoted_text_reads_back(text: String) {
            let words = split(&quote(text.as_bytes())).unwrap();
            let texts: Vec<_> = words.into_iter().map(|word| String::from_utf8(word.bytes)).collect();
            prop_assert_eq!(texts, [Ok(text)]);
        }

        #[test]
        fn no_line_panics(line: String) {
            drop(split(&line));
        }
    }
}
