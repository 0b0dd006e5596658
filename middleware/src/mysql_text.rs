//! Converts the bytes of a MySQL statement, which may contain bytes that are not UTF-8, to text.

use super::session::SqlError;

/// Converts a statement to text. Byte constants, which are `_binary'…'` and those that are not
/// UTF-8, are written in hexadecimal digits.
///
/// # Errors
/// Other bytes are not UTF-8.
pub(crate) fn statement(bytes: &[u8]) -> Result<String, SqlError> {
    let has_binary = bytes.windows(7).any(|word| word.eq_ignore_ascii_case(b"_binary"));
    if let (false, Ok(text)) = (has_binary, std::str::from_utf8(bytes)) {
        return Ok(text.to_owned());
    }
    let mut out: Vec<u8> = Vec::with_capacity(bytes.len());
    let mut at = 0;
    let part = |from: usize| bytes.get(from..).unwrap_or_default();
    while let Some(&byte) = bytes.get(at) {
        let rest = part(at);
        let is_word = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$' | b'@');
        let begins = !out.last().is_some_and(|before| is_word(*before));
        let mut length = 1;
        if begins
            && rest.len() > 7
            && rest.get(..7).is_some_and(|w| w.eq_ignore_ascii_case(b"_binary"))
        {
            let blanks = part(at + 7).iter().take_while(|byte| byte.is_ascii_whitespace()).count();
            let constant = part(at + 7 + blanks);
            if let Some(quote @ (b'\'' | b'"')) = constant.first().copied()
                && let Some((value, end)) = quoted(constant, quote)
            {
                out.extend_from_slice(&in_digits(&value));
                at += 7 + blanks + end;
                continue;
            }
            length = 7;
        } else if matches!(byte, b'\'' | b'"' | b'`') {
            let Some((value, end)) = quoted(rest, byte) else {
                out.extend_from_slice(rest);
                break;
            };
            if begins
                && byte != b'`'
                && std::str::from_utf8(part(at).get(..end).unwrap_or(rest)).is_err()
            {
                out.extend_from_slice(&in_digits(&value));
                at += end;
                continue;
            }
            length = end;
        } else if byte == b'#' || rest.starts_with(b"-- ") {
            length = rest.iter().position(|byte| *byte == b'\n').unwrap_or(rest.len());
        } else if rest.starts_with(b"/*") && !rest.starts_with(b"/*!") {
            let end = rest.windows(2).skip(2).position(|two| two == b"*/");
            length = end.map_or(rest.len(), |end| end + 4);
        }
        out.extend_from_slice(rest.get(..length).unwrap_or_default());
        at += length;
    }
    text(&out)
}

/// `X'…'`.
fn in_digits(value: &[u8]) -> Vec<u8> {
    let digits: String = value.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("X'{digits}'").into_bytes()
}

/// Checks that bytes are UTF-8.
pub(crate) fn text(bytes: &[u8]) -> Result<String, SqlError> {
    String::from_utf8(bytes.to_vec()).map_err(|error| {
        let bad = bytes.get(error.utf8_error().valid_up_to()..).unwrap_or_default();
        let shown: String = bad.iter().take(6).map(|byte| format!("\\x{byte:02X}")).collect();
        SqlError::new("22021", format!("Invalid utf8mb4 character string: '{shown}'"))
    })
}

/// The value of a quoted constant at the beginning of `bytes`, and its end.
fn quoted(bytes: &[u8], quote: u8) -> Option<(Vec<u8>, usize)> {
    let mut value = Vec::new();
    let mut at = 1;
    loop {
        let byte = *bytes.get(at)?;
        at += 1;
        if byte == quote {
            if bytes.get(at) != Some(&quote) {
                return Some((value, at));
            }
            at += 1;
            value.push(quote);
        } else if byte == b'\\' && quote != b'`' {
            let escaped = *bytes.get(at)?;
            at += 1;
            value.push(match escaped {
                b'0' => 0,
                b'b' => 8,
                b'n' => b'\n',
                b'r' => b'\r',
                b't' => b'\t',
                b'Z' => 26,
                other => other,
            });
        } else {
            value.push(byte);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_of_bytes_are_kept_as_they_are() {
        for (given, read) in [
            (b"SELECT 1".as_slice(), "SELECT 1"),
            (
                b"INSERT INTO t VALUES (_binary'\xff\x00a', 'b')",
                "INSERT INTO t VALUES (X'ff0061', 'b')",
            ),
            (b"SELECT _BINARY \"\\0\\'\\\\\xe4\"", "SELECT X'00275ce4'"),
            (b"SELECT _binary''", "SELECT X''"),
            (b"SELECT _binary'it''s'", "SELECT X'69742773'"),
            (b"SELECT '_binary''x', a_binary'y'", "SELECT '_binary''x', a_binary'y'"),
            (b"SELECT 1 -- _binary'x'\n, _binary'x'", "SELECT 1 -- _binary'x'\n, X'78'"),
            (b"SELECT /* _binary' */ _binary'x'", "SELECT /* _binary' */ X'78'"),
            (b"SELECT _binary column", "SELECT _binary column"),
            (b"SELECT '\xff\\'', 'a', \"\xe4\"", "SELECT X'ff27', 'a', X'e4'"),
            (b"SELECT _binary'a', '\xe4'", "SELECT X'61', X'e4'"),
            ("SELECT 'ä\\n'".as_bytes(), "SELECT 'ä\\n'"),
        ] {
            assert_eq!(statement(given).ok().as_deref(), Some(read));
        }
        for bad in
            [b"SELECT \xff".as_slice(), b"SELECT _binary'a', `\xe4`", b"SELECT _latin1'\xe4'"]
        {
            let told = statement(bad).unwrap_err();
            assert_eq!((told.sqlstate.as_str(), told.number), ("22021", 1300), "{bad:?}");
        }
        // Any input must not stop the proxy.
        for cut in [b"_binary'".as_slice(), b"_binary'\\", b"'_binary", b"/*_binary", b"_binary"] {
            let _ = statement(cut);
        }
    }
}
