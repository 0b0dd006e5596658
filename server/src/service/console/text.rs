//! Numbers, times and keys as text.

use std::time::Duration;

/// A time since something happened.
pub(super) fn age(span: Duration) -> String {
    let seconds = span.as_secs();
    match seconds {
        0 => format!("{} ms", span.as_millis()),
        1..60 => format!("{seconds} s"),
        60..3_600 => format!("{} min {} s", seconds / 60, seconds % 60),
        3_600..86_400 => format!("{} h {} min", seconds / 3_600, seconds / 60 % 60),
        _ => format!("{} d {} h", seconds / 86_400, seconds / 3_600 % 24),
    }
}

/// A number with about three digits.
pub(super) fn number(value: f64) -> String {
    match value {
        0.0 => "0".into(),
        value if value < 10.0 => format!("{value:.2}"),
        value if value < 100.0 => format!("{value:.1}"),
        value => format!("{value:.0}"),
    }
}

/// Milliseconds, without the unit.
pub(super) fn millis(span: Duration) -> String {
    number(span.as_secs_f64() * 1e3)
}

/// Bytes.
pub(super) fn bytes(bytes: usize) -> String {
    match bytes {
        0..1_024 => format!("{bytes} B"),
        1_024..1_048_576 => format!("{} KiB", bytes / 1_024),
        _ => format!("{} MiB", bytes / 1_048_576),
    }
}

/// A character, escaped if it is not printable. Quotes need no escape, because no quotes surround a
/// key.
fn printable(char: char) -> String {
    match char {
        '"' | '\'' => char.into(),
        char => char.escape_debug().collect(),
    }
}

/// A key whose first bytes are these: as text if it is printable, otherwise in hexadecimal.
pub(super) fn key(bytes: &[u8], length: usize) -> String {
    let is_cut = bytes.len() < length;
    let text = match std::str::from_utf8(bytes) {
        Ok(text) => Some(text),
        // The cut went through a character.
        Err(error) if is_cut && error.error_len().is_none() => {
            bytes.get(..error.valid_up_to()).and_then(|valid| std::str::from_utf8(valid).ok())
        }
        Err(_) => None,
    };
    let shown = match text {
        Some(text) => text.chars().map(printable).collect(),
        None => {
            let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            format!("0x{digits}")
        }
    };
    if is_cut { format!("{shown}… ({length} bytes)") } else { shown }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_shown_as_text_or_in_hexadecimal() {
        for (bytes, length, expected) in [
            (b"user/7".as_slice(), 6, "user/7"),
            ("zürich".as_bytes(), 7, "zürich"),
            (b"a\nb\x00", 4, "a\\nb\\0"),
            (b"it's \"quoted\"", 13, "it's \"quoted\""),
            ("a\u{202e}b".as_bytes(), 5, "a\\u{202e}b"),
            (b"\xff\x00\x01", 3, "0xff0001"),
            (b"abc", 200, "abc… (200 bytes)"),
            (b"ab\xc3", 200, "ab… (200 bytes)"),
            (b"\xc3", 1, "0xc3"),
            (b"", 0, ""),
        ] {
            assert_eq!(key(bytes, length), expected);
        }
    }

    #[test]
    fn times_have_one_or_two_units() {
        for (seconds, expected) in [
            (59, "59 s"),
            (60, "1 min 0 s"),
            (3_599, "59 min 59 s"),
            (3_600, "1 h 0 min"),
            (90_000, "1 d 1 h"),
        ] {
            assert_eq!(age(Duration::from_secs(seconds)), expected);
        }
        assert_eq!(age(Duration::from_millis(999)), "999 ms");
    }
}
