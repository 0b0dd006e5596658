//! Splits the text of a script into words.

use crate::heap::{Heap, Stop};
use crate::number;
use crate::value::StringId;

/// A word of a script.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Token {
    /// The end of the text.
    End,
    /// A keyword or a symbol.
    Word(&'static str),
    /// A name.
    Name(StringId),
    /// A string in quotes or brackets.
    String(StringId),
    /// A number.
    Number(f64),
}

const KEYWORDS: [&str; 21] = [
    "and", "break", "do", "else", "elseif", "end", "false", "for", "function", "if", "in", "local",
    "nil", "not", "or", "repeat", "return", "then", "true", "until", "while",
];

/// Symbols; a longer one before those that it begins with.
const SYMBOLS: [&str; 26] = [
    "...", "..", "==", "~=", "<=", ">=", "+", "-", "*", "/", "%", "^", "#", "<", ">", "=", "(",
    ")", "{", "}", "[", "]", ";", ":", ",", ".",
];

/// Why a text is no script.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// What is wrong, with the line.
    Syntax(String),
    Exhausted,
}

impl From<Stop> for Refusal {
    fn from(stop: Stop) -> Self {
        match stop {
            Stop::Exhausted => Self::Exhausted,
            Stop::Error(_) => Self::Syntax("error in the text of a script".to_owned()),
        }
    }
}

/// Reads the words of a text.
pub(crate) struct Lexer<'a> {
    text: &'a [u8],
    at: usize,
    /// The line of the word that was read last.
    pub(crate) line: u32,
    chunk: &'a str,
}

impl<'a> Lexer<'a> {
    pub(crate) fn new(text: &'a [u8], chunk: &'a str) -> Self {
        let mut lexer = Self { text, at: 0, line: 1, chunk };
        // The first line may say what the text is for.
        if lexer.text.starts_with(b"#!") {
            while lexer.peek(0).is_some_and(|byte| byte != b'\n') {
                lexer.at += 1;
            }
        }
        lexer
    }

    fn peek(&self, ahead: usize) -> Option<u8> {
        self.text.get(self.at.saturating_add(ahead)).copied()
    }

    fn from(&self, start: usize) -> &'a [u8] {
        self.text.get(start..self.at).unwrap_or_default()
    }

    pub(crate) fn error(&self, what: &str, near: &str) -> Refusal {
        let Self { chunk, line, .. } = self;
        let near = if near.is_empty() { String::new() } else { format!(" near '{near}'") };
        Refusal::Syntax(format!("{chunk}:{line}: {what}{near}"))
    }

    fn error_from(&self, what: &str, start: usize) -> Refusal {
        let part = self.from(start);
        let part = part.get(..part.len().min(80)).unwrap_or_default();
        self.error(what, &String::from_utf8_lossy(part))
    }

    /// How a word is shown in errors.
    pub(crate) fn shown(token: Token, heap: &Heap) -> String {
        match token {
            Token::End => "<eof>".to_owned(),
            Token::Word(word) => word.to_owned(),
            Token::Name(name) | Token::String(name) => heap.shown(name).chars().take(80).collect(),
            Token::Number(number) => number::shown(number),
        }
    }

    fn newline(&mut self) {
        let first = self.peek(0);
        self.at += 1;
        if let Some(second @ (b'\n' | b'\r')) = self.peek(0)
            && Some(second) != first
        {
            self.at += 1;
        }
        self.line += 1;
    }

    /// The next word.
    pub(crate) fn next(&mut self, heap: &mut Heap) -> Result<Token, Refusal> {
        loop {
            let Some(byte) = self.peek(0) else { return Ok(Token::End) };
            match byte {
                b'\n' | b'\r' => self.newline(),
                b' ' | b'\t' | 0x0b | 0x0c => self.at += 1,
                b'-' if self.peek(1) == Some(b'-') => self.comment()?,
                b'[' => match self.long_bracket() {
                    Some(level) => {
                        let bytes = self.long(level, "unfinished long string")?;
                        return Ok(Token::String(heap.string(&bytes)?));
                    }
                    None if self.peek(1) == Some(b'=') => {
                        return Err(self.error("invalid long string delimiter", "["));
                    }
                    None => return Ok(self.symbol("[")),
                },
                b'"' | b'\'' => {
                    let bytes = self.quoted(byte)?;
                    return Ok(Token::String(heap.string(&bytes)?));
                }
                b'0'..=b'9' => return self.number(),
                b'.' if self.peek(1).is_some_and(|next| next.is_ascii_digit()) => {
                    return self.number();
                }
                _ if byte.is_ascii_alphabetic() || byte == b'_' => {
                    let start = self.at;
                    while self.peek(0).is_some_and(|at| at.is_ascii_alphanumeric() || at == b'_') {
                        self.at += 1;
                    }
                    let word = self.from(start);
                    let keyword = KEYWORDS.iter().find(|keyword| keyword.as_bytes() == word);
                    return Ok(match keyword {
                        Some(keyword) => Token::Word(keyword),
                        None => Token::Name(heap.string(word)?),
                    });
                }
                _ => {
                    let rest = self.text.get(self.at..).unwrap_or_default();
                    let mut symbols = SYMBOLS.iter();
                    let found = symbols.find(|symbol| rest.starts_with(symbol.as_bytes()));
                    let Some(symbol) = found else {
                        let shown = match byte {
                            0x21..=0x7e => char::from(byte).to_string(),
                            _ => format!("char({byte})"),
                        };
                        return Err(self.error("unexpected symbol", &shown));
                    };
                    return Ok(self.symbol(symbol));
                }
            }
        }
    }

    fn symbol(&mut self, symbol: &'static str) -> Token {
        self.at += symbol.len();
        Token::Word(symbol)
    }

    fn comment(&mut self) -> Result<(), Refusal> {
        self.at += 2;
        if self.peek(0) == Some(b'[')
            && let Some(level) = self.long_bracket()
        {
            self.long(level, "unfinished long comment")?;
            return Ok(());
        }
        while self.peek(0).is_some_and(|byte| byte != b'\n' && byte != b'\r') {
            self.at += 1;
        }
        Ok(())
    }

    /// The number of `=` between the brackets that are here, if two are.
    fn long_bracket(&self) -> Option<usize> {
        let mut level = 0;
        while self.peek(1 + level) == Some(b'=') {
            level += 1;
        }
        (self.peek(1 + level) == Some(b'[')).then_some(level)
    }

    /// The text between long brackets.
    fn long(&mut self, level: usize, unfinished: &str) -> Result<Vec<u8>, Refusal> {
        self.at += level + 2;
        if matches!(self.peek(0), Some(b'\n' | b'\r')) {
            self.newline();
        }
        let mut bytes = Vec::new();
        loop {
            match self.peek(0) {
                None => return Err(self.error(unfinished, "<eof>")),
                Some(b'\n' | b'\r') => {
                    bytes.push(b'\n');
                    self.newline();
                }
                Some(b']') => {
                    let marks = (0..level).all(|at| self.peek(1 + at) == Some(b'='));
                    if marks && self.peek(1 + level) == Some(b']') {
                        self.at += level + 2;
                        return Ok(bytes);
                    }
                    bytes.push(b']');
                    self.at += 1;
                }
                Some(byte) => {
                    bytes.push(byte);
                    self.at += 1;
                }
            }
        }
    }

    fn quoted(&mut self, quote: u8) -> Result<Vec<u8>, Refusal> {
        let start = self.at;
        self.at += 1;
        let mut bytes = Vec::new();
        loop {
            let Some(byte) = self.peek(0) else {
                return Err(self.error("unfinished string", "<eof>"));
            };
            match byte {
                b'\n' | b'\r' => return Err(self.error_from("unfinished string", start)),
                b'\\' => {
                    self.at += 1;
                    self.escape(&mut bytes, start)?;
                }
                _ => {
                    self.at += 1;
                    if byte == quote {
                        return Ok(bytes);
                    }
                    bytes.push(byte);
                }
            }
        }
    }

    fn escape(&mut self, bytes: &mut Vec<u8>, start: usize) -> Result<(), Refusal> {
        let Some(byte) = self.peek(0) else {
            return Err(self.error("unfinished string", "<eof>"));
        };
        let meant = match byte {
            b'a' => 7,
            b'b' => 8,
            b'f' => 12,
            b'n' => b'\n',
            b'r' => b'\r',
            b't' => b'\t',
            b'v' => 11,
            b'\n' | b'\r' => {
                bytes.push(b'\n');
                self.newline();
                return Ok(());
            }
            b'0'..=b'9' => {
                let mut code = 0_u32;
                for _ in 0..3 {
                    let Some(digit) = self.peek(0).filter(u8::is_ascii_digit) else { break };
                    code = code * 10 + u32::from(digit - b'0');
                    self.at += 1;
                }
                let code = u8::try_from(code)
                    .map_err(|_| self.error_from("escape sequence too large", start))?;
                bytes.push(code);
                return Ok(());
            }
            other => other,
        };
        bytes.push(meant);
        self.at += 1;
        Ok(())
    }

    fn number(&mut self) -> Result<Token, Refusal> {
        let start = self.at;
        while self.peek(0).is_some_and(|byte| byte.is_ascii_digit() || byte == b'.') {
            self.at += 1;
        }
        if matches!(self.peek(0), Some(b'e' | b'E')) {
            self.at += 1;
            if matches!(self.peek(0), Some(b'+' | b'-')) {
                self.at += 1;
            }
        }
        while self.peek(0).is_some_and(|byte| byte.is_ascii_alphanumeric() || byte == b'_') {
            self.at += 1;
        }
        let parsed = number::parse(self.from(start));
        parsed.map(Token::Number).ok_or_else(|| self.error_from("malformed number", start))
    }
}
