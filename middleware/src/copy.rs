//! Converts rows of `COPY … FROM STDIN` to inserts, and rows to lines of `COPY … TO STDOUT`.

use orthodrome_geotp::sql::{Cell, Column, CopyForm, Kind};

use super::driver::quoted;
use super::session::SqlError;

/// Maximum number of rows in one insert.
const ROWS_MAX: usize = 1_000;
/// Size of an insert after which no further row is added. Servers bound the length of a statement.
const INSERT_BYTES_MAX: usize = 1 << 20;
/// Maximum length of a row.
const LINE_BYTES_MAX: usize = 16 << 20;

/// A copy in progress.
pub(crate) struct Copy {
    /// The insert statement up to `VALUES`.
    head: String,
    columns: Vec<Column>,
    form: CopyForm,
    /// True if the header line has been read.
    has_begun: bool,
    /// The bytes of an incomplete row.
    rest: Vec<u8>,
    rows: Vec<String>,
    /// Bytes of these rows.
    bytes: usize,
    is_over: bool,
    /// Number of rows so far.
    pub(crate) count: u64,
}

impl Copy {
    /// `table` is quoted.
    pub(crate) fn new(table: &str, columns: Vec<Column>, form: CopyForm) -> Self {
        let names: Vec<String> = columns.iter().map(|column| name(&column.name)).collect();
        let head = format!("INSERT INTO {table} ({}) VALUES ", names.join(", "));
        let (rest, rows) = (Vec::new(), Vec::new());
        Self {
            head,
            columns,
            form,
            has_begun: false,
            rest,
            rows,
            bytes: 0,
            is_over: false,
            count: 0,
        }
    }

    /// Adds data from the client, and returns the inserts that are full.
    pub(crate) fn take(&mut self, bytes: &[u8]) -> Result<Vec<String>, SqlError> {
        self.rest.extend_from_slice(bytes);
        let rest = std::mem::take(&mut self.rest);
        let mut inserts = Vec::new();
        let mut left = rest.as_slice();
        while let Some(end) = self.end_of_line(left) {
            let (line, after) = left.split_at(end);
            left = after.get(1..).unwrap_or_default();
            self.line(line)?;
            if self.rows.len() >= ROWS_MAX || self.bytes >= INSERT_BYTES_MAX {
                inserts.extend(self.insert());
            }
        }
        self.rest = left.to_vec();
        if self.rest.len() > LINE_BYTES_MAX {
            return Err(SqlError::new(
                "54000",
                format!("row {} of COPY has more than {LINE_BYTES_MAX} bytes", self.count + 1),
            ));
        }
        Ok(inserts)
    }

    /// The end of the first line, if it is complete. In CSV, quoted fields may contain line breaks.
    fn end_of_line(&self, bytes: &[u8]) -> Option<usize> {
        let CopyForm { is_csv, quote, escape, .. } = self.form;
        let (mut is_quoted, mut is_escaped) = (false, false);
        bytes.iter().position(|byte| {
            if is_csv && !std::mem::take(&mut is_escaped) {
                if is_quoted && *byte == escape && escape != quote {
                    is_escaped = true;
                } else if *byte == quote {
                    is_quoted = !is_quoted;
                }
            }
            *byte == b'\n' && !is_quoted
        })
    }

    /// The fields of a line; none if it is malformed.
    fn fields(&self, line: &[u8]) -> Option<Vec<Option<Vec<u8>>>> {
        let CopyForm { is_csv, delimiter, quote, escape, .. } = self.form;
        let null = self.form.null.as_bytes();
        if !is_csv {
            let mut fields = Vec::new();
            for cell in split_unescaped(line, delimiter) {
                fields.push(if cell == null { None } else { Some(unescaped(cell)?) });
            }
            return Some(fields);
        }
        let mut fields = Vec::new();
        let (mut field, mut was_quoted, mut is_quoted) = (Vec::new(), false, false);
        let mut bytes = line.iter().copied().peekable();
        let done =
            |field: Vec<u8>, was_quoted: bool| (was_quoted || field != null).then_some(field);
        while let Some(byte) = bytes.next() {
            if is_quoted
                && byte == escape
                && bytes.peek().is_some_and(|b| *b == quote || *b == escape)
            {
                field.extend(bytes.next());
            } else if byte == quote {
                is_quoted = !is_quoted;
                was_quoted = true;
            } else if byte == delimiter && !is_quoted {
                fields.push(done(std::mem::take(&mut field), std::mem::take(&mut was_quoted)));
            } else {
                field.push(byte);
            }
        }
        fields.push(done(field, was_quoted));
        (!is_quoted).then_some(fields)
    }

    /// Ends the copy, and returns the last insert.
    pub(crate) fn end(&mut self) -> Result<Option<String>, SqlError> {
        let rest = std::mem::take(&mut self.rest);
        if !rest.is_empty() {
            self.line(&rest)?;
        }
        Ok(self.insert())
    }

    fn insert(&mut self) -> Option<String> {
        let rows = std::mem::take(&mut self.rows);
        self.bytes = 0;
        (!rows.is_empty()).then(|| format!("{}{}", self.head, rows.join(", ")))
    }

    fn line(&mut self, line: &[u8]) -> Result<(), SqlError> {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        self.is_over |= line == b"\\.";
        if self.is_over || (!std::mem::replace(&mut self.has_begun, true) && self.form.has_header) {
            return Ok(());
        }
        let bad =
            |what: &str, row: u64| SqlError::new("22P04", format!("row {row} of COPY {what}"));
        self.count += 1;
        let cells = self.fields(line).ok_or_else(|| bad("is cut off", self.count))?;
        if cells.len() != self.columns.len() {
            let what = format!("has {} fields instead of {}", cells.len(), self.columns.len());
            return Err(bad(&what, self.count));
        }
        let mut values = Vec::with_capacity(cells.len());
        for (cell, column) in cells.into_iter().zip(&self.columns) {
            let Some(cell) = cell else {
                values.push("NULL".to_owned());
                continue;
            };
            let text = String::from_utf8(cell).ok().filter(|text| !text.contains('\0'));
            let text = text.ok_or_else(|| {
                let why = "invalid byte sequence for encoding \"UTF8\" in row";
                SqlError::new("22021", format!("{why} {} of COPY", self.count))
            })?;
            if column.kind.is_exact() && is_whole(&text) {
                values.push(text);
            } else if column.kind == Kind::Bytes {
                values.push(format!("{}::bytea", quoted(&text)));
            } else {
                values.push(quoted(&text));
            }
        }
        let row = format!("({})", values.join(", "));
        self.bytes += row.len();
        self.rows.push(row);
        Ok(())
    }
}

/// An identifier in PostgreSQL's quotes.
pub(crate) fn name(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// Splits a line at delimiters that are not escaped.
fn split_unescaped(line: &[u8], delimiter: u8) -> Vec<&[u8]> {
    let mut is_escaped = false;
    let pieces = line.split(|byte| {
        let ends = *byte == delimiter && !is_escaped;
        is_escaped = *byte == b'\\' && !is_escaped;
        ends
    });
    pieces.collect()
}

/// A line of `COPY … TO STDOUT`.
pub(crate) fn copy_line(form: &CopyForm, row: &[Cell]) -> Vec<u8> {
    let mut line = Vec::new();
    for (place, cell) in row.iter().enumerate() {
        if place > 0 {
            line.push(form.delimiter);
        }
        match cell {
            None => line.extend_from_slice(form.null.as_bytes()),
            Some(cell) if form.is_csv => {
                let is_special = |byte: &u8| {
                    [form.delimiter, form.quote, form.escape, b'\n', b'\r'].contains(byte)
                };
                let is_end = row.len() == 1 && cell.as_slice() == b"\\.";
                if cell.iter().any(is_special) || cell.as_slice() == form.null.as_bytes() || is_end
                {
                    line.push(form.quote);
                    for byte in cell {
                        if *byte == form.quote || *byte == form.escape {
                            line.push(form.escape);
                        }
                        line.push(*byte);
                    }
                    line.push(form.quote);
                } else {
                    line.extend_from_slice(cell);
                }
            }
            Some(cell) => {
                for byte in cell {
                    let letter = match byte {
                        8 => b'b',
                        9 => b't',
                        b'\n' => b'n',
                        11 => b'v',
                        12 => b'f',
                        b'\r' => b'r',
                        b'\\' => b'\\',
                        byte if *byte == form.delimiter => form.delimiter,
                        byte => {
                            line.push(*byte);
                            continue;
                        }
                    };
                    line.extend_from_slice(&[b'\\', letter]);
                }
            }
        }
    }
    line.push(b'\n');
    line
}

/// Removes the escapes of a field; none if an escape is incomplete.
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

/// True if `text` is a whole number that needs no quotes in a statement. Two dashes begin a comment
/// there.
fn is_whole(text: &str) -> bool {
    let digits = text.strip_prefix('-').unwrap_or(text);
    (1..18).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use orthodrome_geotp::sql::Kind;

    use super::*;

    fn form(is_csv: bool) -> CopyForm {
        CopyForm {
            is_csv,
            delimiter: if is_csv { b',' } else { b'\t' },
            null: if is_csv { String::new() } else { "\\N".into() },
            has_header: false,
            quote: b'"',
            escape: b'"',
        }
    }

    fn columns() -> Vec<Column> {
        let column = |name: &str, kind| Column { name: name.into(), kind, oid: 0 };
        vec![column("id", Kind::Int4), column("note", Kind::Text)]
    }

    #[test]
    fn a_cell_cannot_end_the_row_by_a_comment() {
        let mut copy = Copy::new("t", columns(), form(false));
        let line = b"--1\tx\\n2, NULL); DELETE FROM accounts; --\n";
        assert!(copy.take(line).unwrap().is_empty());
        let insert = copy.end().unwrap().unwrap();
        assert!(insert.contains("('--1', 'x"), "{insert}");
        for (text, wanted) in [("1", true), ("-1", true), ("-", false), ("", false), ("--1", false)]
        {
            assert_eq!(is_whole(text), wanted, "{text:?}");
        }
    }

    /// The inserts for these bytes, which must not depend on where the bytes are split.
    fn inserted(form: &CopyForm, sent: &[u8]) -> String {
        let mut found = None;
        for cut in 0..sent.len() {
            let mut copy = Copy::new("\"t\"", columns(), form.clone());
            let (first, second) = sent.split_at(cut);
            assert!(copy.take(first).unwrap().is_empty() && copy.take(second).unwrap().is_empty());
            let insert = copy.end().unwrap().unwrap();
            assert_eq!(copy.count, 3);
            assert_eq!(found.get_or_insert_with(|| insert.clone()), &insert, "cut at {cut}");
        }
        found.unwrap()
    }

    #[test]
    fn rows_become_values_however_they_are_cut() {
        let sent = b"1\ta'b\n-2\t\\N\n3\tx\\ty\\\\\\101\\x42\n\\.\n9\tno\n";
        assert_eq!(
            inserted(&form(false), sent),
            "INSERT INTO \"t\" (\"id\", \"note\") VALUES (1, 'a''b'), (-2, NULL), (3, 'x\ty\\AB')"
        );
        let bars = CopyForm { delimiter: b'|', null: "-".into(), ..form(false) };
        assert_eq!(
            inserted(&bars, b"1|-\n2|a\\|b\n3|\\-\n"),
            "INSERT INTO \"t\" (\"id\", \"note\") VALUES (1, NULL), (2, 'a|b'), (3, '-')"
        );
        let named = CopyForm { has_header: true, ..form(true) };
        assert_eq!(
            inserted(&named, b"id,note\n1,\n2,\"a \"\"b\"\", \n c\"\n3,\"\"\n"),
            "INSERT INTO \"t\" (\"id\", \"note\") VALUES (1, NULL), (2, 'a \"b\", \n c'), (3, '')"
        );
    }

    #[test]
    fn inserts_are_bounded_in_bytes() {
        let mut copy = Copy::new("t", columns(), form(false));
        let row = format!("1\t{}\n", "x".repeat(INSERT_BYTES_MAX / 2));
        assert_eq!(copy.take(row.repeat(4).as_bytes()).map(|inserts| inserts.len()), Ok(2));
        assert_eq!(copy.end(), Ok(None));
    }

    #[test]
    fn bytes_are_written_as_bytes() {
        let columns = vec![Column { name: "Note".into(), kind: Kind::Bytes, oid: 0 }];
        let mut copy = Copy::new(&name("a\"b"), columns, form(false));
        copy.take(b"\\\\x41\n").unwrap();
        let insert = "INSERT INTO \"a\"\"b\" (\"Note\") VALUES ('\\x41'::bytea)";
        assert_eq!(copy.end(), Ok(Some(insert.to_owned())));
    }

    #[test]
    fn rows_that_are_wrong_are_refused() {
        for (sent, state) in [
            (b"1\n".as_slice(), "22P04"),
            (b"1\t\xff\n", "22021"),
            (b"1\ta\\000\n", "22021"),
            (b"1\ta\\", "22P04"),
        ] {
            let mut copy = Copy::new("t", columns(), form(false));
            let refused = copy.take(sent).and_then(|_| copy.end()).unwrap_err();
            assert_eq!(refused.sqlstate, state, "{sent:?}: {}", refused.message);
        }
    }

    #[test]
    fn lines_are_read_back_as_they_were() {
        let cells: [&[u8]; 7] =
            [b"", b"a", b"\\N", b"a\tb\nc\\d", b"\\.", b"x,\"y\"", b"\r\x0b\x08\x0c"];
        for form in [form(false), form(true), CopyForm { escape: b'\\', ..form(true) }] {
            for cell in cells.iter().map(|cell| Some(cell.to_vec())).chain([None]) {
                let line = copy_line(&form, &[Some(b"1".to_vec()), cell.clone()]);
                let copy = Copy::new("t", columns(), form.clone());
                let end = copy.end_of_line(&line).unwrap();
                assert_eq!(end + 1, line.len(), "{form:?}, {cell:?}");
                let read = copy.fields(&line[..end]).unwrap();
                assert_eq!(read, [Some(b"1".to_vec()), cell.clone()], "{form:?}, {cell:?}");
            }
        }
    }
}
