//! `COPY … FROM STDIN` and `COPY … TO STDOUT`.

use sqlparser::tokenizer::Token;

use super::Refusal;
use super::catalog::Dialect;
use super::parse::Verb;
use super::set::{Reader, near, switch};

/// The format of rows of a COPY.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CopyForm {
    /// True for CSV, which uses quotes; otherwise PostgreSQL's text format, which uses backslashes.
    pub is_csv: bool,
    /// The separator of fields.
    pub delimiter: u8,
    /// The text for NULL.
    pub null: String,
    /// True if the first line has the names of the columns.
    pub has_header: bool,
    /// The quote around fields (CSV).
    pub quote: u8,
    /// The escape before a quote within quotes (CSV).
    pub escape: u8,
}

/// Parses a COPY.
///
/// # Errors
/// Its syntax is wrong, or the proxy does not support it.
pub(super) fn read(text: &str) -> Result<Verb, Refusal> {
    let mut reader = Reader::new(text, Dialect::PostgreSql)?;
    reader.word("copy");
    let mut query = None;
    let (mut table, mut columns) = (String::new(), Vec::new());
    let mut before: Vec<String> = Vec::new();
    if reader.takes(&Token::LParen) {
        let rest = reader.up_to_parenthesis()?;
        query = Some(rest.iter().map(written).collect::<Vec<_>>().join(" "));
    } else {
        table = reader.column()?;
        while reader.takes(&Token::Period) {
            before.push(std::mem::replace(&mut table, reader.column()?));
        }
        if reader.takes(&Token::LParen) {
            columns.push(reader.column()?);
            while reader.takes(&Token::Comma) {
                columns.push(reader.column()?);
            }
            if !reader.takes(&Token::RParen) {
                return Err(near(reader.peek()));
            }
        }
    }
    let is_to = match (reader.word("to"), query.is_some()) {
        (true, _) => true,
        (false, false) if reader.word("from") => false,
        _ => return Err(near(reader.peek())),
    };
    if !reader.word(if is_to { "stdout" } else { "stdin" }) {
        return Err(Refusal::unsupported(
            "COPY of files and programs of a server is not supported; use STDIN or STDOUT",
        ));
    }
    let form = reader.form()?;
    if let Some(token) = reader.peek() {
        return Err(near(Some(token)));
    }
    if !is_to {
        return Ok(Verb::Copy { before, table, columns, form });
    }
    let query = query.unwrap_or_else(|| {
        let quoted = |name: &String| format!("\"{}\"", name.replace('"', "\"\""));
        let columns: Vec<String> = columns.iter().map(quoted).collect();
        let columns = if columns.is_empty() { "*".to_owned() } else { columns.join(", ") };
        let name: Vec<String> = before.iter().chain([&table]).map(quoted).collect();
        format!("SELECT {columns} FROM {}", name.join("."))
    });
    Ok(Verb::CopyOut { query, form })
}

/// Formats a token so that it can be parsed again: the tokenizer has removed the quotes inside of a
/// constant.
fn written(token: &Token) -> String {
    let quoted = |text: &str| format!("'{}'", text.replace('\'', "''"));
    match token {
        Token::SingleQuotedString(text)
        | Token::EscapedStringLiteral(text)
        | Token::UnicodeStringLiteral(text)
        | Token::NationalStringLiteral(text) => quoted(text),
        Token::DollarQuotedString(text) => quoted(&text.value),
        Token::Word(word) if word.quote_style.is_some() => {
            format!("\"{}\"", word.value.replace('"', "\"\""))
        }
        other => other.to_string(),
    }
}

impl Reader {
    /// A name, without its quotes.
    fn column(&mut self) -> Result<String, Refusal> {
        match self.next() {
            Some(Token::Word(word)) if word.quote_style.is_some() => Ok(word.value),
            Some(Token::Word(word)) => Ok(word.value.to_lowercase()),
            other => Err(near(other.as_ref())),
        }
    }

    /// All tokens up to the matching closing parenthesis.
    fn up_to_parenthesis(&mut self) -> Result<Vec<Token>, Refusal> {
        let (mut depth, mut found) = (1_u32, Vec::new());
        loop {
            let token = self.next().ok_or_else(|| near(None))?;
            match token {
                Token::LParen => depth += 1,
                Token::RParen => depth -= 1,
                _ => {}
            }
            if depth == 0 {
                return Ok(found);
            }
            found.push(token);
        }
    }

    /// The options, in parentheses or in the syntax before PostgreSQL 9.
    fn form(&mut self) -> Result<CopyForm, Refusal> {
        self.word("with");
        let is_listed = self.takes(&Token::LParen);
        let (mut is_csv, mut has_header) = (false, false);
        let (mut delimiter, mut null, mut quote, mut escape) = (None, None, None, None);
        while let Some(token) = self.peek() {
            let Token::Word(word) = token else {
                if is_listed && self.takes(&Token::RParen) {
                    break;
                }
                return Err(near(self.peek()));
            };
            let option = word.value.to_lowercase();
            self.next();
            if !is_listed {
                self.word("as");
            }
            match option.as_str() {
                "csv" if !is_listed => is_csv = true,
                "format" if is_listed => is_csv |= self.is_csv_format()?,
                "delimiter" => delimiter = Some(self.byte()?),
                "null" => null = Some(self.text()?),
                "quote" => quote = Some(self.byte()?),
                "escape" => escape = Some(self.byte()?),
                "header" => has_header = !is_listed || self.is_header_on()?,
                "freeze" => {
                    if is_listed && self.has_value() {
                        self.text()?;
                    }
                }
                "encoding" => {
                    let encoding = self.text()?.to_lowercase();
                    if !["utf8", "utf-8", "unicode"].contains(&encoding.as_str()) {
                        return Err(Refusal::unsupported("COPY takes rows in UTF-8"));
                    }
                }
                other => {
                    return Err(Refusal::unsupported(format!(
                        "COPY does not have the option `{other}` here; leave it out"
                    )));
                }
            }
            if is_listed && !self.takes(&Token::Comma) && self.peek() != Some(&Token::RParen) {
                return Err(near(self.peek()));
            }
        }
        let quote = quote.unwrap_or(b'"');
        Ok(CopyForm {
            is_csv,
            delimiter: delimiter.unwrap_or(if is_csv { b',' } else { b'\t' }),
            null: null.unwrap_or_else(|| if is_csv { String::new() } else { "\\N".into() }),
            has_header,
            quote,
            escape: escape.unwrap_or(quote),
        })
    }

    fn is_csv_format(&mut self) -> Result<bool, Refusal> {
        match self.text()?.to_lowercase().as_str() {
            "text" => Ok(false),
            "csv" => Ok(true),
            other => Err(Refusal::unsupported(format!(
                "COPY has the formats text and csv here, not {other}"
            ))),
        }
    }

    /// The value of HEADER; HEADER alone means on.
    fn is_header_on(&mut self) -> Result<bool, Refusal> {
        if !self.has_value() {
            return Ok(true);
        }
        let value = self.text()?;
        switch(&value).ok_or_else(|| {
            Refusal::unsupported(format!("COPY takes HEADER on or off, not {value}"))
        })
    }

    /// True if a value follows an option of the list.
    fn has_value(&self) -> bool {
        !matches!(self.peek(), Some(Token::Comma | Token::RParen))
    }

    fn text(&mut self) -> Result<String, Refusal> {
        match self.next() {
            Some(Token::Word(word)) => Ok(word.value),
            Some(
                Token::SingleQuotedString(text)
                | Token::EscapedStringLiteral(text)
                | Token::Number(text, _),
            ) => Ok(text),
            other => Err(near(other.as_ref())),
        }
    }

    fn byte(&mut self) -> Result<u8, Refusal> {
        match self.text()?.as_bytes() {
            &[byte] => Ok(byte),
            _ => Err(Refusal::data("this option of COPY is a single one-byte character")),
        }
    }
}
