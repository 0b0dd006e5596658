//! Rows of `COPY … FROM STDIN`, in the text format, as the values of inserts.

use orthodrome_geotp::sql::Column;

use super::driver::quoted;
use super::session::SqlError;

/// Rows of one insert.
const ROWS_MAX: usize = 1_000;

/// A copy under way.
pub(super) struct Copy {
    /// Up to `VALUES`.
    head: String,
    columns: Vec<Column>,
    /// What has come of the row that is not whole yet.
    rest: Vec<u8>,
    rows: Vec<String>,
    is_over: bool,
    /// Rows so far.
    pub(super) count: u64,
}

impl Copy {
    pub(super) fn new(table: &str, columns: Vec<Column>) -> Self {
        let names: Vec<&str> = columns.iter().map(|column| column.name.as_str()).collect();
        let head = format!("INSERT INTO {table} ({}) VALUES ", names.join(", "));
        Self { head, columns, rest: Vec::new(), rows: Vec::new(), is_over: false, count: 0 }
    }

    /// Takes what the client sent: the inserts that are full by now.
    pub(super) fn take(&mut self, bytes: &[u8]) -> Result<Vec<String>, SqlError> {
        self.rest.extend_from_slice(bytes);
        let rest = std::mem::take(&mut self.rest);
        let mut inserts = Vec::new();
        let mut lines = rest.split(|byte| *byte == b'\n').peekable();
        while let Some(line) = lines.next() {
            if lines.peek().is_none() {
                self.rest = line.to_vec();
                break;
            }
            self.line(line)?;
            if self.rows.len() >= ROWS_MAX {
                inserts.extend(self.insert());
            }
        }
        Ok(inserts)
    }

    /// What is left when the client has sent everything.
    pub(super) fn end(&mut self) -> Result<Option<String>, SqlError> {
        let rest = std::mem::take(&mut self.rest);
        if !rest.is_empty() {
            self.line(&rest)?;
        }
        Ok(self.insert())
    }

    fn insert(&mut self) -> Option<String> {
        let rows = std::mem::take(&mut self.rows);
        (!rows.is_empty()).then(|| format!("{}{}", self.head, rows.join(", ")))
    }

    fn line(&mut self, line: &[u8]) -> Result<(), SqlError> {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        self.is_over |= line == b"\\.";
        if self.is_over {
            return Ok(());
        }
        let bad =
            |what: &str, row: u64| SqlError::new("22P04", format!("row {row} of COPY {what}"));
        self.count += 1;
        let cells: Vec<&[u8]> = line.split(|byte| *byte == b'\t').collect();
        if cells.len() != self.columns.len() {
            let what = format!("has {} fields instead of {}", cells.len(), self.columns.len());
            return Err(bad(&what, self.count));
        }
        let mut values = Vec::with_capacity(cells.len());
        for (cell, column) in cells.into_iter().zip(&self.columns) {
            if cell == b"\\N" {
                values.push("NULL".to_owned());
                continue;
            }
            let text = unescaped(cell).and_then(|bytes| String::from_utf8(bytes).ok());
            let text = text.ok_or_else(|| bad("is not UTF-8", self.count))?;
            let is_whole =
                text.len() < 19 && text.trim_start_matches('-').bytes().all(|b| b.is_ascii_digit());
            if column.kind.is_exact() && is_whole && text.bytes().any(|b| b.is_ascii_digit()) {
                values.push(text);
            } else {
                values.push(quoted(&text));
            }
        }
        self.rows.push(format!("({})", values.join(", ")));
        Ok(())
    }
}

/// A field without its backslashes; nothing if it has one too many.
fn unescaped(cell: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(cell.len());
    let mut bytes = cell.iter().copied().peekable();
    while let Some(byte) = bytes.next() {
        if byte != b'\\' {
            out.push(byte);
            continue;
        }
        out.push(match bytes.next()? {
            b'b' => 8,
            b'f' => 12,
            b'n' => b'\n',
            b'r' => b'\r',
            b't' => b'\t',
            b'v' => 11,
            first @ b'0'..=b'7' => {
                let mut value = u32::from(first - b'0');
                for _ in 0..2 {
                    match bytes.next_if(|next| (b'0'..=b'7').contains(next)) {
                        Some(digit) => value = value * 8 + u32::from(digit - b'0'),
                        None => break,
                    }
                }
                value as u8
            }
            b'x' => {
                let mut value = None;
                for _ in 0..2 {
                    let digit = bytes.peek().and_then(|next| char::from(*next).to_digit(16));
                    let Some(digit) = digit else { break };
                    bytes.next();
                    value = Some(value.unwrap_or(0) * 16 + digit);
                }
                value.map_or(b'x', |value| value as u8)
            }
            other => other,
        });
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use orthodrome_geotp::sql::Kind;

    use super::*;

    #[test]
    fn rows_become_values_however_they_are_cut() {
        let column = |name: &str, kind| Column { name: name.into(), kind, oid: 0 };
        let columns = vec![column("id", Kind::Int4), column("note", Kind::Text)];
        let sent = b"1\ta'b\n-2\t\\N\n3\tx\\ty\\\\\\101\\x42\n\\.\n9\tno\n";
        for cut in 0..sent.len() {
            let mut copy = Copy::new("t", columns.clone());
            let (first, second) = sent.split_at(cut);
            assert!(copy.take(first).unwrap().is_empty() && copy.take(second).unwrap().is_empty());
            let insert = copy.end().unwrap().unwrap();
            assert_eq!(
                insert,
                "INSERT INTO t (id, note) VALUES (1, 'a''b'), (-2, NULL), (3, 'x\ty\\AB')"
            );
            assert_eq!(copy.count, 3);
        }
        let mut copy = Copy::new("t", columns);
        assert!(copy.take(b"1\n").unwrap_err().message.contains("1 fields instead of 2"));
    }
}
