//! Writes answers in both versions of the Redis protocol.

use bytes::{BufMut as _, Bytes, BytesMut};
use orthodrome_core::procedure::redis::number::Score;
use orthodrome_core::procedure::redis::reply::Reply;

/// The version of the protocol that a client speaks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Version {
    /// RESP2, until the client says `HELLO 3`.
    Two,
    /// RESP3.
    Three,
}

fn head(kind: u8, number: impl std::fmt::Display, out: &mut BytesMut) {
    out.put_u8(kind);
    out.put_slice(number.to_string().as_bytes());
    out.put_slice(b"\r\n");
}

fn bulk(text: &[u8], out: &mut BytesMut) {
    head(b'$', text.len(), out);
    out.put_slice(text);
    out.put_slice(b"\r\n");
}

/// A line: no byte of it may end the line.
fn line(kind: u8, text: &str, out: &mut BytesMut) {
    out.put_u8(kind);
    out.extend(text.bytes().map(|byte| if byte == b'\r' || byte == b'\n' { b' ' } else { byte }));
    out.put_slice(b"\r\n");
}

fn double(score: Score, version: Version, out: &mut BytesMut) {
    match version {
        Version::Two => bulk(score.to_string().as_bytes(), out),
        Version::Three => line(b',', &score.to_string(), out),
    }
}

fn pair(name: &Bytes, score: Score, version: Version, out: &mut BytesMut) {
    if version == Version::Three {
        head(b'*', 2, out);
    }
    bulk(name, out);
    double(score, version, out);
}

/// Writes an answer.
pub(super) fn write(reply: &Reply, version: Version, out: &mut BytesMut) {
    let is_three = version == Version::Three;
    match reply {
        Reply::Status(text) => line(b'+', text, out),
        Reply::Line(text) => line(b'+', text, out),
        Reply::Integer(number) => head(b':', number, out),
        Reply::Bulk(text) => bulk(text, out),
        Reply::Nil if is_three => out.put_slice(b"_\r\n"),
        Reply::NilArray if is_three => out.put_slice(b"_\r\n"),
        Reply::Nil => out.put_slice(b"$-1\r\n"),
        Reply::NilArray => out.put_slice(b"*-1\r\n"),
        Reply::Double(score) => double(*score, version, out),
        Reply::Array(items) => {
            head(b'*', items.len(), out);
            items.iter().for_each(|item| write(item, version, out));
        }
        Reply::Set(items) => {
            head(if is_three { b'~' } else { b'*' }, items.len(), out);
            items.iter().for_each(|item| write(item, version, out));
        }
        Reply::Map(items) => {
            let (kind, many) = if is_three { (b'%', items.len()) } else { (b'*', 2 * items.len()) };
            head(kind, many, out);
            for (name, value) in items {
                write(name, version, out);
                write(value, version, out);
            }
        }
        Reply::Pairs(items) => {
            head(b'*', if is_three { items.len() } else { 2 * items.len() }, out);
            items.iter().for_each(|(name, score)| pair(name, *score, version, out));
        }
        Reply::Couples(items) => {
            head(b'*', if is_three { items.len() } else { 2 * items.len() }, out);
            for (name, value) in items {
                if is_three {
                    head(b'*', 2, out);
                }
                bulk(name, out);
                bulk(value, out);
            }
        }
        Reply::Error(failure) => line(b'-', &failure.0, out),
    }
}

/// Writes a message that answers no request; in RESP2 a list.
pub(super) fn push(items: &[Reply], version: Version, out: &mut BytesMut) {
    head(if version == Version::Three { b'>' } else { b'*' }, items.len(), out);
    items.iter().for_each(|item| write(item, version, out));
}

#[cfg(test)]
mod tests {
    use orthodrome_core::procedure::redis::reply::Failure;

    use super::*;

    fn written(reply: &Reply, version: Version) -> String {
        let mut out = BytesMut::new();
        write(reply, version, &mut out);
        assert!(out.len() <= reply.bytes(), "{reply:?} takes {}", out.len());
        String::from_utf8(out.to_vec()).unwrap()
    }

    #[test]
    fn both_versions_say_the_same() {
        let text = |text: &'static str| Reply::Bulk(Bytes::from_static(text.as_bytes()));
        let score = Score::parse(b"1.5").unwrap();
        let cases = [
            (Reply::OK, "+OK\r\n", "+OK\r\n"),
            (Reply::Line("a\nb".into()), "+a b\r\n", "+a b\r\n"),
            (Reply::Integer(-3), ":-3\r\n", ":-3\r\n"),
            (text("ab"), "$2\r\nab\r\n", "$2\r\nab\r\n"),
            (Reply::Nil, "$-1\r\n", "_\r\n"),
            (Reply::NilArray, "*-1\r\n", "_\r\n"),
            (Reply::Double(score), "$3\r\n1.5\r\n", ",1.5\r\n"),
            (
                Reply::Array(vec![text("a"), Reply::Nil]),
                "*2\r\n$1\r\na\r\n$-1\r\n",
                "*2\r\n$1\r\na\r\n_\r\n",
            ),
            (Reply::Set(vec![text("a")]), "*1\r\n$1\r\na\r\n", "~1\r\n$1\r\na\r\n"),
            (
                Reply::Map(vec![(text("a"), text("b"))]),
                "*2\r\n$1\r\na\r\n$1\r\nb\r\n",
                "%1\r\n$1\r\na\r\n$1\r\nb\r\n",
            ),
            (
                Reply::Pairs(vec![("a".into(), score)]),
                "*2\r\n$1\r\na\r\n$3\r\n1.5\r\n",
                "*1\r\n*2\r\n$1\r\na\r\n,1.5\r\n",
            ),
            (
                Reply::Couples(vec![("a".into(), "b".into())]),
                "*2\r\n$1\r\na\r\n$1\r\nb\r\n",
                "*1\r\n*2\r\n$1\r\na\r\n$1\r\nb\r\n",
            ),
        ];
        for (reply, two, three) in cases {
            assert_eq!(written(&reply, Version::Two), two);
            assert_eq!(written(&reply, Version::Three), three);
        }
        let error = Reply::Error(Failure::new("ERR two\r\nlines"));
        assert_eq!(written(&error, Version::Two), "-ERR two  lines\r\n");
    }
}
