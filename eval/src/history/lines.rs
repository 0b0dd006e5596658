//! Reads and writes JSON lines.

use std::io::{self, BufRead, Write};

use serde_json::Value;

use super::{Entry, FormError, Op, Status};

/// Why a history could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The input failed.
    #[error("line {line}: cannot read the history: {source}")]
    Io {
        /// The line being read, from 1.
        line: u64,
        /// The error of the operating system.
        source: io::Error,
    },
    /// A line is not an entry.
    #[error("line {line}, {form}")]
    Form {
        /// The line, from 1.
        line: u64,
        /// The field, what is wrong with it, and what to do.
        form: FormError,
    },
}

/// Reads entries from JSON lines, one at a time. It skips blank lines, and stops after the first
/// error.
#[derive(Debug)]
pub struct Reader<R> {
    input: R,
    line: u64,
    text: Vec<u8>,
    is_done: bool,
}

impl<R: BufRead> Reader<R> {
    /// Reads from `input`.
    pub fn new(input: R) -> Self {
        Self { input, line: 0, text: Vec::new(), is_done: false }
    }

    /// The number of the line that was read last, from 1; 0 before the first.
    #[must_use]
    pub fn line(&self) -> u64 {
        self.line
    }
}

impl<R: BufRead> Iterator for Reader<R> {
    type Item = Result<Entry, ReadError>;

    fn next(&mut self) -> Option<Self::Item> {
        while !self.is_done {
            self.line += 1;
            self.text.clear();
            match self.input.read_until(b'\n', &mut self.text) {
                Ok(0) => self.is_done = true,
                Ok(_) if self.text.trim_ascii().is_empty() => {}
                Ok(_) => {
                    let entry = serde_json::from_slice(&self.text).map_err(|error| {
                        self.is_done = true;
                        ReadError::Form { line: self.line, form: diagnose(&self.text, &error) }
                    });
                    return Some(entry);
                }
                Err(source) => {
                    self.is_done = true;
                    return Some(Err(ReadError::Io { line: self.line, source }));
                }
            }
        }
        None
    }
}

/// Writes entries as JSON lines.
#[derive(Debug)]
pub struct Writer<W> {
    output: W,
}

impl<W: Write> Writer<W> {
    /// Writes to `output`, which should be buffered.
    pub fn new(output: W) -> Self {
        Self { output }
    }

    /// Writes one line.
    ///
    /// # Errors
    /// If the output fails.
    pub fn write(&mut self, entry: &Entry) -> io::Result<()> {
        serde_json::to_writer(&mut self.output, entry)?;
        self.output.write_all(b"\n")
    }

    /// Flushes the output and returns it.
    ///
    /// # Errors
    /// If the output fails.
    pub fn finish(mut self) -> io::Result<W> {
        self.output.flush()?;
        Ok(self.output)
    }
}

/// Finds the faulty field by reading the line again, field by field.
fn diagnose(text: &[u8], error: &serde_json::Error) -> FormError {
    let value: Value = match serde_json::from_slice(text) {
        Ok(value) => value,
        Err(syntax) if syntax.is_eof() => {
            let problem = "the line ends in the middle of an entry";
            let remedy = "if the run was killed while it wrote, delete this line";
            return FormError::new("(line)", problem, remedy);
        }
        Err(syntax) => {
            let remedy = "write one JSON object on each line";
            return FormError::new("(line)", format!("not JSON: {syntax}"), remedy);
        }
    };
    let Value::Object(fields) = value else {
        return FormError::new("(line)", "not a JSON object", "write one JSON object on each line");
    };
    let number = |value: Value| serde_json::from_value::<u64>(value).map(drop);
    let string = |value: Value| serde_json::from_value::<String>(value).map(drop);
    for (field, value) in fields {
        let (result, remedy) = match field.as_str() {
            "txn" => (string(value), "name attempts as in \"c4.19\" or \"c4.19#2\""),
            "region" | "priority" => (string(value), "write a string"),
            "process" => (number(value), "write a whole number from 0"),
            "invoke_us" => (number(value), "write whole microseconds from 0"),
            "complete_us" => {
                let result = serde_json::from_value::<Option<u64>>(value).map(drop);
                (result, "write whole microseconds from 0, or omit the field")
            }
            "status" => {
                (serde_json::from_value::<Status>(value).map(drop), "write ok, fail or info")
            }
            "ops" => match diagnose_ops(value) {
                Some(form) => return form,
                None => continue,
            },
            _ => return FormError::new(field, "unknown field", "remove it"),
        };
        if let Err(error) = result {
            return FormError::new(field, error.to_string(), remedy);
        }
    }
    let message = error.to_string();
    let named = message.split('`').nth(1).unwrap_or("(line)").to_owned();
    let remedy = "every line has txn, process, region, priority, invoke_us, status and ops, once";
    FormError::new(named, message, remedy)
}

fn diagnose_ops(value: Value) -> Option<FormError> {
    const REMEDY: &str = "use [\"append\",key,number], [\"r\",key,[numbers]], \
                          [\"r\",key,\"writer@timestamp\"], [\"w\",key,\"writer@timestamp\"] or \
                          [\"d\",key,\"writer@timestamp\"]";
    let Value::Array(ops) = value else {
        return Some(FormError::new("ops", "not a list", REMEDY));
    };
    ops.into_iter().enumerate().find_map(|(index, op)| {
        let text = op.to_string();
        let error = serde_json::from_str::<Op>(&text).err()?;
        Some(FormError::new(format!("ops[{index}]"), format!("{text}: {error}"), REMEDY))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::History;

    const GOOD: &str = r#"{"txn":"c1.1","process":1,"region":"VA","priority":"low","invoke_us":1,"complete_us":2,"status":"ok","ops":[["append","k",1]]}"#;

    fn error_of(second_line: &str) -> String {
        let text = format!("{GOOD}\n\n{second_line}\n");
        History::read(text.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn lines_round_trip() {
        let mut writer = Writer::new(Vec::new());
        for entry in Reader::new(GOOD.as_bytes()) {
            writer.write(&entry.unwrap()).unwrap();
        }
        assert_eq!(String::from_utf8(writer.finish().unwrap()).unwrap(), format!("{GOOD}\n"));
        assert_eq!(History::read(GOOD.as_bytes()).unwrap().len(), 1);
        assert!(History::read(&b"\n"[..]).unwrap().is_empty());
    }

    #[test]
    fn errors_name_line_field_and_remedy() {
        let second = GOOD.replace("c1.1", "c1.2");
        let cases: [(String, &[&str]); 11] = [
            (GOOD.into(), &["field `txn`", "has a line already", "c4.19#2"]),
            (second.replace("\"invoke_us\":1", "\"invoke_us\":-1"), &["field `invoke_us`", "-1"]),
            (second.replace("\"process\":1,", ""), &["field `process`", "every line has"]),
            (second.replace("\"ok\"", "\"fine\""), &["field `status`", "fine", "ok, fail or info"]),
            (second.replace("\"low\"", "7"), &["field `priority`", "write a string"]),
            (second.replace("\"region\"", "\"zone\""), &["field `zone`", "remove it"]),
            (second.replace("append", "push"), &["field `ops[0]`", "push", "use [\"append\""]),
            (second.replace("\"complete_us\":2", "\"complete_us\":0"), &["field `complete_us`"]),
            (second[..40].into(), &["ends in the middle", "delete this line"]),
            ("{]".into(), &["not JSON", "one JSON object on each line"]),
            ("[]".into(), &["not a JSON object"]),
        ];
        for (line, parts) in cases {
            let error = error_of(&line);
            assert!(error.starts_with("line 3, field"), "{error}");
            for part in parts {
                assert!(error.contains(part), "{error:?} should mention {part:?}");
            }
        }
    }

    #[test]
    fn nothing_is_read_after_an_error() {
        let text = format!("{{]\n{GOOD}\n");
        let mut reader = Reader::new(text.as_bytes());
        assert!(reader.next().unwrap().is_err());
        assert!(reader.next().is_none());
    }

    proptest::proptest! {
        #[test]
        fn any_text_gives_entries_or_an_error(text in ".*") {
            let _ = History::read(text.as_bytes());
        }

        #[test]
        fn a_line_with_one_byte_changed_is_read_or_refused_by_number(
            at in 0..GOOD.len(),
            byte in proptest::num::u8::ANY,
        ) {
            let mut line = GOOD.as_bytes().to_vec();
            line[at] = byte;
            if let Err(error) = History::read(line.as_slice()) {
                assert!(error.to_string().starts_with("line "), "{error}");
            }
        }

        #[test]
        fn lines_round_trip_whatever_keys_are_called(
            key in ".*",
            list in proptest::collection::vec(proptest::num::u64::ANY, 0..4),
        ) {
            let mut entry: Entry = serde_json::from_str(GOOD).unwrap();
            entry.ops = vec![Op::ReadList(key.clone(), list), Op::WriteVersion(key, None)];
            let mut writer = Writer::new(Vec::new());
            writer.write(&entry).unwrap();
            let text = writer.finish().unwrap();
            assert_eq!(Reader::new(text.as_slice()).next().unwrap().unwrap(), entry);
        }
    }
}
