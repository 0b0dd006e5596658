//! Splits a client's query batch into statements. A batch may have several, and a comment may mark
//! the last one of a transaction.

use std::ops::ControlFlow;

use sqlparser::ast::{Ident, Statement, Visitor};
use sqlparser::dialect::{MySqlDialect, PostgreSqlDialect};
use sqlparser::keywords::Keyword;
use sqlparser::parser::{Parser, ParserError};
use sqlparser::tokenizer::{Span, Token, TokenWithSpan, Tokenizer, Whitespace};

use super::Refusal;
use super::catalog::Dialect;
use super::copy::{self, CopyForm};
use super::rows::list_rows;
use super::set::{self, Change};
use super::statements::{self, Motion};
use super::value::Value;
use super::walk::walk;

/// Maximum nesting depth of expressions.
const DEPTH_MAX: usize = 200;

/// The comment that marks a transaction's last statement, without its delimiters.
const LAST: &str = "last query";

/// The isolation level of a transaction.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Isolation {
    /// Each statement sees what was committed when it began. A transaction over several sources may
    /// be seen in part.
    ReadCommitted,
    /// Each source provides a snapshot; the snapshots of two sources are not of the same moment.
    RepeatableRead,
    /// Globally serializable: every read locks.
    Serializable,
}

impl Isolation {
    /// The name in SQL.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::ReadCommitted => "READ COMMITTED",
            Self::RepeatableRead => "REPEATABLE READ",
            Self::Serializable => "SERIALIZABLE",
        }
    }

    /// Parses a name in any case, with spaces or dashes.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        match name.trim().to_uppercase().replace('-', " ").as_str() {
            // PostgreSQL has no weaker level either.
            "READ UNCOMMITTED" | "READ COMMITTED" => Some(Self::ReadCommitted),
            "REPEATABLE READ" => Some(Self::RepeatableRead),
            "SERIALIZABLE" => Some(Self::Serializable),
            _ => None,
        }
    }
}

/// The kind of a statement.
#[derive(Clone, PartialEq, Debug)]
pub enum Verb {
    /// Nothing: only blanks and comments.
    Empty,
    /// Begin a transaction, with its isolation level and access mode.
    Begin(Vec<Change>),
    /// Commit; `chain` begins another.
    Commit {
        /// `AND CHAIN`.
        chain: bool,
    },
    /// Roll back everything.
    Rollback {
        /// `AND CHAIN`.
        chain: bool,
    },
    /// An action on a savepoint, with its name; executed at every branch.
    Savepoint(Savepoint, String),
    /// `SET …`: all of it or nothing.
    Set(Vec<Change>),
    /// `RESET name`, or all.
    Reset(Option<String>),
    /// `SHOW name`: PostgreSQL's way to ask for one setting.
    Show(String),
    /// `USE database`.
    Use(String),
    /// SELECT, INSERT, UPDATE or DELETE.
    Data(Box<Statement>),
    /// A change of the schema, or another statement for every source with the table.
    Schema(Box<Statement>),
    /// The plan of a statement.
    Explain(Box<Parsed>),
    /// `SHOW ORTHODROME …` and similar statements: the following words, in lower case.
    Admin(Vec<String>),
    /// COPY … FROM STDIN: the table and columns.
    Copy {
        /// What is written before the table's name: its schema, or its database and schema.
        before: Vec<String>,
        /// The table.
        table: String,
        /// Its columns; none means all.
        columns: Vec<String>,
        /// The format of the rows.
        form: CopyForm,
    },
    /// `COPY … TO STDOUT`.
    CopyOut {
        /// The rows, as a PostgreSQL query.
        query: String,
        /// The format of the rows.
        form: CopyForm,
    },
    /// Deallocate a prepared statement of the session, or all.
    Deallocate(Option<String>),
    /// Keep a statement under a name.
    Prepare(String, Box<Parsed>),
    /// Carry out a statement that was prepared, with these values.
    Execute(String, Vec<Value>),
    /// A cursor for a query; held beyond its transaction.
    Declare {
        /// Its name.
        name: String,
        /// Its rows.
        query: Box<Parsed>,
        /// `WITH HOLD`.
        is_held: bool,
    },
    /// Rows of a cursor.
    Fetch {
        /// Its name.
        name: String,
        /// Which.
        motion: Motion,
        /// Without the rows.
        is_move: bool,
    },
    /// Close a cursor, or all.
    Close(Option<String>),
    /// Reset the session completely.
    DiscardAll,
    /// VACUUM, ANALYZE and similar statements, by name: nothing to do here.
    Housekeeping(&'static str),
    /// Another statement: unknown to the parser, or not about tables of the catalogue; a source may
    /// understand it.
    Other,
}

/// An action on a savepoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Savepoint {
    /// Set it.
    Set,
    /// Roll back to it.
    RollbackTo,
    /// Release it.
    Release,
}

/// One statement of a query batch.
#[derive(Clone, PartialEq, Debug)]
pub struct Parsed {
    /// The client's text, without the semicolon.
    pub text: String,
    /// Its kind.
    pub verb: Verb,
    /// True if the client marked it as its transaction's last statement.
    pub is_last: bool,
    /// Number of parameters.
    pub parameters: usize,
    /// The parser's error, if the statement could not be parsed.
    pub problem: Option<String>,
}

impl Parsed {
    /// The first word of PostgreSQL's command tag; SELECT for every statement that changes no rows.
    #[must_use]
    pub fn word(&self) -> &'static str {
        match &self.verb {
            Verb::Data(statement) => match &**statement {
                Statement::Insert(_) => "INSERT",
                Statement::Update(_) => "UPDATE",
                Statement::Delete(_) => "DELETE",
                _ => "SELECT",
            },
            _ => "SELECT",
        }
    }

    /// PostgreSQL's command tag of a change of the schema.
    #[must_use]
    pub fn schema_tag(&self) -> String {
        let Verb::Schema(statement) = &self.verb else { return "SELECT".into() };
        match &**statement {
            Statement::CreateTable(_) => "CREATE TABLE".into(),
            Statement::CreateIndex(_) => "CREATE INDEX".into(),
            Statement::AlterTable { .. } => "ALTER TABLE".into(),
            Statement::Truncate(_) => "TRUNCATE TABLE".into(),
            Statement::Drop { object_type, .. } => format!("DROP {object_type}"),
            Statement::CreateView { .. } => "CREATE VIEW".into(),
            Statement::CreateSequence { .. } => "CREATE SEQUENCE".into(),
            Statement::CreateType { .. } => "CREATE TYPE".into(),
            Statement::AlterType(_) => "ALTER TYPE".into(),
            Statement::CreateDomain(_) => "CREATE DOMAIN".into(),
            Statement::DropDomain(_) => "DROP DOMAIN".into(),
            Statement::Comment { .. } => "COMMENT".into(),
            Statement::AlterIndex { .. } => "ALTER INDEX".into(),
            Statement::AlterView { .. } => "ALTER VIEW".into(),
            _ => "SELECT".into(),
        }
    }
}

/// Parses a query batch of any number of statements.
///
/// # Errors
/// A quote or comment does not end. A statement that the parser cannot read is [`Verb::Other`].
pub fn parse(original: &str, dialect: Dialect) -> Result<Vec<Parsed>, Refusal> {
    let expanded = (dialect == Dialect::MariaDb).then(|| with_executable_comments(original));
    let text = expanded.transpose()?.flatten();
    let pieces = split(text.as_deref().unwrap_or(original), dialect)?;
    let mut parsed = Vec::with_capacity(pieces.len());
    for piece in pieces {
        let one = parse_one(piece.text, dialect, piece.is_last)?;
        if one.verb != Verb::Empty {
            parsed.push(one);
        }
    }
    Ok(parsed)
}

struct Piece<'a> {
    text: &'a str,
    is_last: bool,
}

/// Splits at semicolons outside of quotes and comments.
fn split(text: &str, dialect: Dialect) -> Result<Vec<Piece<'_>>, Refusal> {
    let mut pieces = Vec::new();
    let mut scan = Scan { text, at: 0, dialect };
    let (mut start, mut is_last) = (0, false);
    while let Some(part) = scan.next_part()? {
        match part {
            Lexeme::Semicolon => {
                let piece = text.get(start..scan.at - 1).unwrap_or_default().trim();
                pieces.push(Piece { text: piece, is_last });
                (start, is_last) = (scan.at, false);
            }
            Lexeme::Comment(comment) => is_last |= comment.trim().eq_ignore_ascii_case(LAST),
            Lexeme::Quoted | Lexeme::Plain => {}
        }
    }
    let piece = text.get(start..).unwrap_or_default().trim();
    if !piece.is_empty() {
        pieces.push(Piece { text: piece, is_last });
    }
    Ok(pieces)
}

/// A part of a statement's text.
pub(super) enum Lexeme<'a> {
    Semicolon,
    Comment(&'a str),
    Quoted,
    Plain,
}

/// Splits the text of a statement.
pub(super) struct Scan<'a> {
    pub(super) text: &'a str,
    pub(super) at: usize,
    pub(super) dialect: Dialect,
}

impl<'a> Scan<'a> {
    fn rest(&self) -> &'a str {
        self.text.get(self.at..).unwrap_or_default()
    }

    pub(super) fn next_part(&mut self) -> Result<Option<Lexeme<'a>>, Refusal> {
        let rest = self.rest();
        let Some(first) = rest.chars().next() else { return Ok(None) };
        let is_maria = self.dialect == Dialect::MariaDb;
        // MySQL parses `5--1` as five minus minus one.
        let is_dashes = rest.strip_prefix("--").is_some_and(|after| {
            let next = after.chars().next();
            !is_maria || next.is_none_or(|c| c.is_whitespace() || c.is_control())
        });
        if is_dashes || (first == '#' && is_maria) {
            let length = rest.find('\n').unwrap_or(rest.len());
            self.at += length;
            let skip = if first == '#' { 1 } else { 2 };
            return Ok(Some(Lexeme::Comment(rest.get(skip..length).unwrap_or_default())));
        }
        if rest.starts_with("/*") {
            return self.comment().map(Some);
        }
        let before = || self.text.get(..self.at).and_then(|text| text.chars().next_back());
        if first == '$'
            && !is_maria
            && !before().is_some_and(in_name)
            && let Some(tag) = dollar_tag(rest)
        {
            let body = rest.get(tag.len()..).unwrap_or_default();
            let end = body
                .find(tag)
                .ok_or_else(|| Refusal::syntax(format!("the string quoted by {tag} has no end")))?;
            self.at += tag.len() * 2 + end;
            return Ok(Some(Lexeme::Quoted));
        }
        if matches!(first, '\'' | '"' | '`') {
            let has_escapes = if is_maria {
                first != '`'
            } else {
                // `date'…'` is no such constant, although its word ends with the same letter.
                let mut back = self.text.get(..self.at).unwrap_or_default().chars().rev();
                first == '\''
                    && matches!(back.next(), Some('e' | 'E'))
                    && !back.next().is_some_and(in_name)
            };
            self.at += quoted(rest, first, has_escapes)
                .ok_or_else(|| Refusal::syntax(format!("a string quoted by {first} has no end")))?;
            return Ok(Some(Lexeme::Quoted));
        }
        self.at += first.len_utf8();
        Ok(Some(if first == ';' { Lexeme::Semicolon } else { Lexeme::Plain }))
    }

    fn comment(&mut self) -> Result<Lexeme<'a>, Refusal> {
        let rest = self.rest();
        let nests = self.dialect == Dialect::PostgreSql;
        let (mut depth, mut at) = (1, 2);
        while depth > 0 {
            let left = rest.get(at..).unwrap_or_default();
            let end = left.find("*/").ok_or_else(|| Refusal::syntax("a comment has no end"))?;
            match left.find("/*").filter(|&inner| nests && inner < end) {
                Some(inner) => (depth, at) = (depth + 1, at + inner + 2),
                None => (depth, at) = (depth - 1, at + end + 2),
            }
        }
        self.at += at;
        Ok(Lexeme::Comment(rest.get(2..at - 2).unwrap_or_default()))
    }
}

/// Whether a name can contain this character, except at its beginning.
pub(super) fn in_name(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '$')
}

/// The version of MariaDB whose executable comments the proxy executes.
const EXECUTABLE_UP_TO: u32 = 101_100;

/// Version numbers in such comments that only MySQL has, so that MariaDB ignores the comments.
const MYSQL_ONLY: std::ops::Range<u32> = 50_700..100_000;

/// Replaces the delimiters of executable comments (`/*! … */`, `/*M! … */`) by blanks, or the whole
/// comment if it is for another version; none if there are no such comments. So the proxy parses
/// what a server would execute.
fn with_executable_comments(text: &str) -> Result<Option<String>, Refusal> {
    if !text.contains("/*!") && !text.contains("/*M!") {
        return Ok(None);
    }
    let mut out = String::with_capacity(text.len());
    let mut scan = Scan { text, at: 0, dialect: Dialect::MariaDb };
    loop {
        let start = scan.at;
        let Some(part) = scan.next_part()? else { return Ok(Some(out)) };
        let slice = text.get(start..scan.at).unwrap_or_default();
        let body = match part {
            Lexeme::Comment(comment) if slice.starts_with("/*") => {
                comment.strip_prefix('!').or_else(|| comment.strip_prefix("M!"))
            }
            Lexeme::Comment(_) | Lexeme::Semicolon | Lexeme::Quoted | Lexeme::Plain => None,
        };
        let Some(body) = body else {
            out.push_str(slice);
            continue;
        };
        let digits = body.len() - body.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let (version, body) = body.split_at_checked(digits).unwrap_or(("", body));
        let version: u32 = version.parse().unwrap_or(0);
        let is_executed = version <= EXECUTABLE_UP_TO && !MYSQL_ONLY.contains(&version);
        out.push(' ');
        if is_executed {
            out.push_str(body);
            out.push(' ');
        }
    }
}

/// A statement that the parser cannot read, for a source of the client's kind.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Unread {
    /// The statement without comments, and with string constants in the syntax of the proxy's
    /// sources. One statement here is one statement at its source.
    pub text: String,
    /// Its words and quoted names, in lower case, without the contents of string constants.
    pub words: Vec<String>,
}

/// Rewrites one statement that the parser cannot read.
///
/// # Errors
/// A quote or comment does not end.
pub fn unread(statement: &str, dialect: Dialect) -> Result<Unread, Refusal> {
    let mut scan = Scan { text: statement, at: 0, dialect };
    let (mut text, mut words, mut word) = (String::new(), Vec::new(), String::new());
    loop {
        let start = scan.at;
        let part = scan.next_part()?;
        let slice = statement.get(start..scan.at).unwrap_or_default();
        let is_of_word = |c: char| in_name(c) || c == '@';
        if let (Some(Lexeme::Plain), true) = (&part, slice.chars().all(is_of_word)) {
            text.push_str(slice);
            word.push_str(slice);
            continue;
        }
        if !word.is_empty() {
            words.push(std::mem::take(&mut word).to_lowercase());
        }
        let Some(part) = part else { return Ok(Unread { text, words }) };
        match part {
            Lexeme::Comment(_) => text.push(' '),
            Lexeme::Semicolon => return Err(Refusal::syntax("syntax error at or near \";\"")),
            Lexeme::Plain => text.push_str(slice),
            Lexeme::Quoted if slice.starts_with('`') => {
                words.push(slice.trim_matches('`').to_lowercase());
                text.push_str(slice);
            }
            Lexeme::Quoted if dialect == Dialect::MariaDb => {
                text.push_str(&format!("'{}'", without_escapes(slice).replace('\'', "''")));
            }
            Lexeme::Quoted => {
                if slice.starts_with('"') {
                    words.push(slice.trim_matches('"').to_lowercase());
                }
                text.push_str(slice);
            }
        }
    }
}

/// The value of a MySQL string constant.
fn without_escapes(constant: &str) -> String {
    let quote = constant.chars().next();
    let inner = constant.get(1..constant.len().saturating_sub(1)).unwrap_or_default();
    let mut out = String::with_capacity(inner.len());
    let mut chars = inner.chars().peekable();
    while let Some(c) = chars.next() {
        if Some(c) == quote {
            chars.next();
        }
        if c != '\\' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('0') => out.push('\0'),
            Some('b') => out.push('\u{8}'),
            Some('n') => out.push('\n'),
            Some('r') => out.push('\r'),
            Some('t') => out.push('\t'),
            Some('Z') => out.push('\u{1a}'),
            // Escapes in patterns remain.
            Some(wildcard @ ('%' | '_')) => out.extend(['\\', wildcard]),
            Some(other) => out.push(other),
            None => out.push('\\'),
        }
    }
    out
}

/// The delimiter `$tag$` at the beginning of a text.
fn dollar_tag(text: &str) -> Option<&str> {
    let end = text.get(1..)?.find('$')? + 2;
    let tag = text.get(..end)?;
    let name = tag.get(1..end - 1)?;
    let is_name = name.chars().all(|c| c.is_alphanumeric() || c == '_');
    (is_name && !name.starts_with(|c: char| c.is_ascii_digit())).then_some(tag)
}

/// The length of a quoted text, including its quotes. Two quotes within it stand for one.
fn quoted(text: &str, quote: char, has_escapes: bool) -> Option<usize> {
    let mut chars = text.char_indices().skip(1).peekable();
    while let Some((at, c)) = chars.next() {
        if c == '\\' && has_escapes {
            chars.next();
        } else if c == quote {
            if chars.peek().is_some_and(|(_, next)| *next == quote) {
                chars.next();
            } else {
                return Some(at + quote.len_utf8());
            }
        }
    }
    None
}

/// Parses one statement.
fn parse_one(text: &str, dialect: Dialect, is_last: bool) -> Result<Parsed, Refusal> {
    let done = |verb, parameters| {
        Ok(Parsed { text: text.to_owned(), verb, is_last, parameters, problem: None })
    };
    let unread = |parameters, problem: String| {
        let (text, problem) = (text.to_owned(), Some(problem));
        Ok(Parsed { text, verb: Verb::Other, is_last, parameters, problem })
    };
    let words = words(text, 6);
    if words.is_empty() {
        return done(Verb::Empty, 0);
    }
    if let Some(verb) = by_words(&words, text, dialect)? {
        return done(verb, 0);
    }
    let tokens = match dialect {
        Dialect::PostgreSql => Tokenizer::new(&PostgreSqlDialect {}, text).tokenize_with_location(),
        Dialect::MariaDb => Tokenizer::new(&MySqlDialect {}, text).tokenize_with_location(),
    };
    let (mut tokens, mut spans): (Vec<Token>, Vec<Span>) = match tokens {
        Ok(tokens) => tokens.into_iter().map(|placed| (placed.token, placed.span)).unzip(),
        Err(error) => return unread(0, error.to_string()),
    };
    match dialect {
        Dialect::PostgreSql => read_weak_locks(&mut tokens),
        Dialect::MariaDb => {
            read_hex_numbers(&mut tokens, &spans);
            read_share_locks(&mut tokens);
            read_binary(&mut tokens, &mut spans);
        }
    }
    let parameters = number_parameters(&mut tokens);
    if let Some(problem) = chains_too_long(&tokens) {
        return Err(Refusal { message: problem, sqlstate: "54001" });
    }
    let tokens = tokens.into_iter().zip(spans);
    let tokens = tokens.map(|(token, span)| TokenWithSpan::new(token, span)).collect();
    let parsed = match dialect {
        Dialect::PostgreSql => statement(Parser::new(&PostgreSqlDialect {}), tokens),
        Dialect::MariaDb => statement(Parser::new(&MySqlDialect {}), tokens),
    };
    let mut statement = match parsed {
        Ok(statement) => statement,
        Err(problem) => return unread(parameters, problem),
    };
    // The parser takes the labels of an enumeration for names.
    let is_type = matches!(statement, Statement::CreateType { .. });
    if dialect == Dialect::PostgreSql && !is_type && names_like_a_text(&statement) {
        return unread(parameters, "a constant of this type cannot be read; use CAST".into());
    }
    if let (Dialect::PostgreSql, Statement::Insert(insert)) = (dialect, &mut statement) {
        list_rows(insert);
    }
    done(verb(statement, dialect)?, parameters)
}

/// The words of a statement that are not in quotes, with their places. Other tokens than blanks have
/// no keyword.
fn keywords(tokens: &[Token]) -> Vec<(usize, Keyword)> {
    let word = |(at, token): (usize, &Token)| match token {
        Token::Whitespace(_) => None,
        Token::Word(word) if word.quote_style.is_none() => Some((at, word.keyword)),
        _ => Some((at, Keyword::NoKeyword)),
    };
    tokens.iter().enumerate().filter_map(word).collect()
}

/// Writes `FOR NO KEY UPDATE` as `FOR UPDATE` and `FOR KEY SHARE` as `FOR SHARE`, which the parser
/// and MariaDB can read. These locks are stronger.
fn read_weak_locks(tokens: &mut [Token]) {
    let words = keywords(tokens);
    let of = |at: usize| words.get(at).map(|&(_, keyword)| keyword);
    let mut weak = Vec::new();
    for (at, &(_, keyword)) in words.iter().enumerate() {
        if keyword != Keyword::FOR {
            continue;
        }
        match (of(at + 1), of(at + 2), of(at + 3)) {
            (Some(Keyword::NO), Some(Keyword::KEY), Some(Keyword::UPDATE)) => {
                weak.extend([at + 1, at + 2]);
            }
            (Some(Keyword::KEY), Some(Keyword::SHARE), _) => weak.push(at + 1),
            _ => {}
        }
    }
    for (place, _) in weak.into_iter().filter_map(|at| words.get(at)) {
        if let Some(token) = tokens.get_mut(*place) {
            *token = Token::Whitespace(Whitespace::Space);
        }
    }
}

/// Writes `LOCK IN SHARE MODE` as `FOR SHARE`, which the parser can read.
fn read_share_locks(tokens: &mut [Token]) {
    let words = keywords(tokens);
    for four in words.windows(4) {
        let [
            (lock, Keyword::LOCK),
            (of, Keyword::IN),
            (share, Keyword::SHARE),
            (mode, Keyword::MODE),
        ] = four
        else {
            continue;
        };
        let blank = || Token::Whitespace(Whitespace::Space);
        let written = [Token::make_keyword("FOR"), Token::make_keyword("SHARE"), blank(), blank()];
        for (at, token) in [lock, of, share, mode].into_iter().zip(written) {
            if let Some(place) = tokens.get_mut(*at) {
                *place = token;
            }
        }
    }
}

/// Keeps `0x31` apart from `x'31'`, which the parser takes for the same: MariaDB takes the first for
/// a number beside numbers. It stays a number in the tree, in these digits.
fn read_hex_numbers(tokens: &mut [Token], spans: &[Span]) {
    let mut has_introducer = false;
    for (token, span) in tokens.iter_mut().zip(spans) {
        match token {
            Token::Whitespace(_) => continue,
            Token::HexStringLiteral(digits) if !has_introducer && !digits.is_empty() => {
                let length = span.end.column.saturating_sub(span.start.column);
                // `x'31'` has one sign more.
                if span.start.line == span.end.line && length == digits.len() as u64 + 2 {
                    *token = Token::Number(format!("0x{digits}"), false);
                }
            }
            _ => {}
        }
        // The parser reads `_latin1 0x31` with a constant of bytes only.
        has_introducer = matches!(token, Token::Word(word) if word.quote_style.is_none() && word.value.starts_with('_'));
    }
}

/// Writes `BINARY x` as `CAST(x AS BINARY)`. The parser would take all that follows, as in
/// `BINARY x = y`, for the operand.
fn read_binary(tokens: &mut Vec<Token>, spans: &mut Vec<Span>) {
    let is_binary = |token: &Token| matches!(token, Token::Word(word) if word.quote_style.is_none() && word.keyword == Keyword::BINARY);
    let places: Vec<usize> =
        tokens.iter().enumerate().filter(|(_, t)| is_binary(t)).map(|(at, _)| at).collect();
    for at in places.into_iter().rev() {
        let before = tokens.iter().take(at).rfind(|token| !matches!(token, Token::Whitespace(_)));
        if !before.is_some_and(precedes_operand) {
            continue;
        }
        let Some(end) = operand_end(tokens, at + 1) else { continue };
        let span = spans.get(at).copied().unwrap_or_else(Span::empty);
        let word = |text| [Token::Whitespace(Whitespace::Space), Token::make_keyword(text)];
        let after: Vec<Token> =
            word("AS").into_iter().chain(word("BINARY")).chain([Token::RParen]).collect();
        spans.splice(end..end, std::iter::repeat_n(span, after.len()));
        tokens.splice(end..end, after);
        spans.insert(at, span);
        tokens.splice(at..=at, [Token::make_keyword("CAST"), Token::LParen]);
    }
}

/// Whether an operand may follow this token.
fn precedes_operand(token: &Token) -> bool {
    match token {
        Token::Word(word) => matches!(
            word.keyword,
            Keyword::SELECT
                | Keyword::DISTINCT
                | Keyword::WHERE
                | Keyword::HAVING
                | Keyword::ON
                | Keyword::BY
                | Keyword::AND
                | Keyword::OR
                | Keyword::XOR
                | Keyword::NOT
                | Keyword::LIKE
                | Keyword::RLIKE
                | Keyword::REGEXP
                | Keyword::BETWEEN
                | Keyword::CASE
                | Keyword::WHEN
                | Keyword::THEN
                | Keyword::ELSE
        ),
        Token::LParen
        | Token::Comma
        | Token::Eq
        | Token::DoubleEq
        | Token::Neq
        | Token::Lt
        | Token::Gt
        | Token::LtEq
        | Token::GtEq
        | Token::Spaceship
        | Token::Plus
        | Token::Minus
        | Token::Mul
        | Token::Div
        | Token::Mod
        | Token::Pipe
        | Token::StringConcat
        | Token::Ampersand
        | Token::Overlap => true,
        _ => false,
    }
}

/// The end of the operand of a sign or of BINARY; none if it is of another form than a name, a call,
/// a constant or an expression in parentheses.
fn operand_end(tokens: &[Token], from: usize) -> Option<usize> {
    let next = |from: usize| {
        let mut rest = tokens.iter().enumerate().skip(from);
        rest.find(|(_, token)| !matches!(token, Token::Whitespace(_)))
    };
    let closed = |open: usize| {
        let mut depth = 0_usize;
        tokens.iter().enumerate().skip(open).find_map(|(at, token)| {
            match token {
                Token::LParen => depth += 1,
                Token::RParen => depth -= 1,
                _ => {}
            }
            (depth == 0).then_some(at + 1)
        })
    };
    let (at, first) = next(from)?;
    match first {
        Token::Plus | Token::Minus => operand_end(tokens, at + 1),
        Token::LParen => closed(at),
        Token::Word(word) => {
            let is_other = matches!(
                word.keyword,
                Keyword::CASE
                    | Keyword::NOT
                    | Keyword::INTERVAL
                    | Keyword::SELECT
                    | Keyword::BINARY
            );
            if is_other && word.quote_style.is_none() {
                return None;
            }
            let mut end = at + 1;
            while let (Some(Token::Period), Some(Token::Word(_))) =
                (tokens.get(end), tokens.get(end + 1))
            {
                end += 2;
            }
            match next(end) {
                Some((open, Token::LParen)) => closed(open),
                // `_utf8'…'`
                Some((text, Token::SingleQuotedString(_))) if word.value.starts_with('_') => {
                    Some(text + 1)
                }
                _ => Some(end),
            }
        }
        Token::Number(..)
        | Token::SingleQuotedString(_)
        | Token::DoubleQuotedString(_)
        | Token::HexStringLiteral(_)
        | Token::NationalStringLiteral(_)
        | Token::Placeholder(_) => Some(at + 1),
        _ => None,
    }
}

/// Maximum number of tokens between two commas or parentheses. Operators of one level build a tree
/// as deep as their number, and every walk over it needs stack ([`STACK_BYTES`]).
const CHAIN_MAX: usize = 10_000;

/// Maximum number of queries that UNION and similar operators combine: each needs more stack, and
/// contains commas.
const QUERIES_MAX: usize = 1_000;

/// Stack size of a thread that parses statements, in bytes: several times what the longest chain
/// needs.
pub const STACK_BYTES: usize = 64 << 20;

/// The error for a statement whose tree would be too deep.
fn chains_too_long(tokens: &[Token]) -> Option<String> {
    // For each open parenthesis: the tokens since the last comma, and the number of queries.
    let mut levels = vec![(0_usize, 0_usize)];
    for token in tokens {
        let outer = levels.len() > 1;
        let (length, queries) = levels.last_mut()?;
        match token {
            Token::LParen | Token::LBracket | Token::LBrace => {
                *length += 1;
                levels.push((0, 0));
                continue;
            }
            Token::RParen | Token::RBracket | Token::RBrace if outer => {
                levels.pop();
                continue;
            }
            Token::Comma => *length = 0,
            Token::Whitespace(_) => {}
            Token::Word(word)
                if matches!(
                    word.keyword,
                    Keyword::UNION | Keyword::EXCEPT | Keyword::INTERSECT | Keyword::MINUS
                ) =>
            {
                *queries += 1;
                *length = 0;
            }
            _ => *length += 1,
        }
        if *length > CHAIN_MAX || *queries > QUERIES_MAX {
            return Some(format!(
                "the statement is too complex: it has more than {CHAIN_MAX} words and signs without a \
                 comma or parenthesis, or more than {QUERIES_MAX} queries of one UNION; use IN, VALUES or \
                 several statements"
            ));
        }
    }
    None
}

/// The statement, or the parser's error.
fn statement(parser: Parser<'_>, tokens: Vec<TokenWithSpan>) -> Result<Statement, String> {
    let mut parser = parser.with_recursion_limit(DEPTH_MAX).with_tokens_with_locations(tokens);
    let statement = parser.parse_statement().map_err(|error| match error {
        ParserError::TokenizerError(why) | ParserError::ParserError(why) => why,
        ParserError::RecursionLimitExceeded => "it nests too deeply".to_owned(),
    })?;
    let next = parser.peek_token();
    match next.token {
        Token::EOF => Ok(statement),
        more => Err(format!("Expected: end of statement, found: {more}{}", next.span.start)),
    }
}

/// Whether the parser has mistaken a string for a name, as in `SELECT name 'x'`, which is a
/// constant of the type `name`.
fn names_like_a_text(statement: &Statement) -> bool {
    struct Finder;
    impl Visitor for Finder {
        type Break = ();
        fn pre_visit_ident(&mut self, name: &Ident) -> ControlFlow<()> {
            if name.quote_style == Some('\'') {
                return ControlFlow::Break(());
            }
            ControlFlow::Continue(())
        }
    }
    walk(statement, &mut Finder).is_break()
}

/// Numbers the parameters written `?`, so that `?` and `$n` are the same from here on. Returns the
/// number of parameters.
fn number_parameters(tokens: &mut [Token]) -> usize {
    let (mut count, mut highest) = (0, 0);
    for token in tokens {
        if let Token::Placeholder(name) = token {
            if name == "?" {
                count += 1;
                *name = format!("${count}");
            } else if let Some(number) = name.strip_prefix('$').and_then(|n| n.parse().ok()) {
                highest = highest.max(number);
            }
        }
    }
    highest.max(count)
}

/// The first words of a text, in upper case, without comments.
fn words(text: &str, count: usize) -> Vec<String> {
    let mut bare = String::new();
    let mut rest = text.trim_start();
    while let Some(after) = rest.strip_prefix("/*") {
        rest =
            after.find("*/").and_then(|end| after.get(end + 2..)).unwrap_or_default().trim_start();
    }
    while let Some(start) = rest.find("/*") {
        bare.push_str(rest.get(..start).unwrap_or_default());
        bare.push(' ');
        let after = rest.get(start + 2..).unwrap_or_default();
        rest = after.find("*/").and_then(|end| after.get(end + 2..)).unwrap_or_default();
    }
    bare.push_str(rest);
    let lines: Vec<&str> =
        bare.lines().filter(|line| !line.trim_start().starts_with("--")).collect();
    lines
        .join(" ")
        .split(|c: char| c.is_whitespace() || c == '(' || c == ',')
        .filter(|word| !word.is_empty())
        .take(count)
        .map(str::to_uppercase)
        .collect()
}

/// Statements that are recognized by their first words, before the parser.
fn by_words(words: &[String], text: &str, dialect: Dialect) -> Result<Option<Verb>, Refusal> {
    let word = |n: usize| words.get(n).map_or("", String::as_str);
    let lower = || {
        let words = text.split_whitespace().skip(2);
        words.map(|w| w.trim_matches(|c| c == '\'' || c == '"').to_lowercase()).collect()
    };
    let verb = match (word(0), word(1)) {
        ("SHOW" | "RESOLVE" | "ALTER", "ORTHODROME") => {
            let mut order: Vec<String> = lower();
            order.insert(0, word(0).to_lowercase());
            Verb::Admin(order)
        }
        ("EXPLAIN", next) if !next.is_empty() => {
            let body = text.trim_start().get("EXPLAIN".len()..).unwrap_or_default();
            let inner = parse_one(body.trim(), dialect, false)?;
            if !matches!(inner.verb, Verb::Data(_)) {
                return Ok(None);
            }
            Verb::Explain(Box::new(inner))
        }
        ("COPY", _) if dialect == Dialect::PostgreSql => copy::read(text)?,
        ("VACUUM", _) => Verb::Housekeeping("VACUUM"),
        ("CHECKPOINT", _) => Verb::Housekeeping("CHECKPOINT"),
        ("DISCARD", "ALL") => Verb::DiscardAll,
        ("DISCARD", "PLANS") => Verb::Housekeeping("DISCARD PLANS"),
        ("DISCARD", "SEQUENCES") => Verb::Housekeeping("DISCARD SEQUENCES"),
        ("DISCARD", "TEMP" | "TEMPORARY") => Verb::Housekeeping("DISCARD TEMP"),
        ("DEALLOCATE", name) if !name.is_empty() => {
            let mut names = text.split_whitespace().skip(1).peekable();
            names.next_if(|word| word.eq_ignore_ascii_case("prepare"));
            let name = names.next().unwrap_or_default();
            let is_all = name.eq_ignore_ascii_case("all");
            Verb::Deallocate((!is_all).then(|| match name.strip_prefix('"') {
                Some(quoted) => quoted.trim_end_matches('"').to_owned(),
                None => name.to_lowercase(),
            }))
        }
        ("SET", _) => Verb::Set(set::read(text, dialect)?),
        ("BEGIN", _) | ("START", "TRANSACTION") => Verb::Begin(set::begin(text, dialect)?),
        ("UNLISTEN", _) => Verb::Housekeeping("UNLISTEN"),
        ("CLOSE", "ALL") if dialect == Dialect::PostgreSql => Verb::Close(None),
        ("CLOSE", name) if dialect == Dialect::PostgreSql && !name.is_empty() => {
            statements::close(text, dialect)?
        }
        ("FETCH" | "MOVE", _) if dialect == Dialect::PostgreSql => {
            statements::fetch(text, dialect)?
        }
        ("DECLARE", _) if dialect == Dialect::PostgreSql => statements::declare(text, dialect)?,
        ("LISTEN" | "NOTIFY", _) if dialect == Dialect::PostgreSql => {
            return Err(Refusal::unsupported(format!(
                "{} is not supported: a notification belongs to one source; use a table that clients read, or connect to \
                 a source",
                word(0)
            )));
        }
        ("ANALYZE", _) if dialect == Dialect::PostgreSql => Verb::Housekeeping("ANALYZE"),
        ("END", "") if dialect == Dialect::PostgreSql => Verb::Commit { chain: false },
        ("ABORT", "") if dialect == Dialect::PostgreSql => Verb::Rollback { chain: false },
        ("PREPARE", "TRANSACTION") | ("COMMIT" | "ROLLBACK", "PREPARED") | ("XA", _) => {
            return Err(Refusal::unsupported(
                "the proxy prepares and decides transactions itself; use BEGIN and COMMIT",
            ));
        }
        ("PREPARE", name) if !name.is_empty() => statements::prepare(text, dialect)?,
        ("EXECUTE", name) if !name.is_empty() && name != "IMMEDIATE" => {
            statements::execute(text, dialect)?
        }
        // No client has locked a table.
        ("UNLOCK", "TABLES") if dialect == Dialect::MariaDb => Verb::Housekeeping("UNLOCK TABLES"),
        ("LOCK", "TABLES") | ("UNLOCK", "TABLES") => {
            return Err(Refusal::unsupported(
                "LOCK TABLES is not part of a transaction; use SELECT … FOR UPDATE",
            ));
        }
        ("SHOW", name) if dialect == Dialect::PostgreSql && !name.is_empty() => {
            Verb::Show(match (name, word(2)) {
                ("TRANSACTION", _) => "transaction_isolation".into(),
                ("TIME", "ZONE") => "timezone".into(),
                _ => name.to_lowercase().replace('"', ""),
            })
        }
        _ => return Ok(None),
    };
    Ok(Some(verb))
}

/// The name of a savepoint, in the form in which its kind of server compares names.
fn folded(name: Ident, dialect: Dialect) -> String {
    match (dialect, name.quote_style) {
        (Dialect::PostgreSql, Some(_)) => name.value,
        (Dialect::PostgreSql, None) | (Dialect::MariaDb, _) => name.value.to_lowercase(),
    }
}

fn verb(statement: Statement, dialect: Dialect) -> Result<Verb, Refusal> {
    Ok(match statement {
        Statement::Commit { chain, .. } => Verb::Commit { chain },
        Statement::Rollback { chain, savepoint: None } => Verb::Rollback { chain },
        Statement::Rollback { savepoint: Some(name), .. } => {
            Verb::Savepoint(Savepoint::RollbackTo, folded(name, dialect))
        }
        Statement::Savepoint { name } => Verb::Savepoint(Savepoint::Set, folded(name, dialect)),
        Statement::ReleaseSavepoint { name } => {
            Verb::Savepoint(Savepoint::Release, folded(name, dialect))
        }
        Statement::Reset(reset) => Verb::Reset(match reset.reset {
            sqlparser::ast::Reset::ConfigurationParameter(name) => {
                Some(name.to_string().to_lowercase())
            }
            _ => None,
        }),
        Statement::Use(name) => {
            let name = name.to_string();
            let name = name.strip_prefix("USE ").unwrap_or(&name);
            Verb::Use(name.trim_matches('`').to_owned())
        }
        Statement::Query(_)
        | Statement::Insert(_)
        | Statement::Update(_)
        | Statement::Delete(_) => Verb::Data(Box::new(statement)),
        Statement::CreateView(view) if view.temporary => {
            return Err(Refusal::unsupported("temporary views are not supported; create a view"));
        }
        Statement::CreateSequence { temporary: true, .. } => {
            return Err(Refusal::unsupported(
                "temporary sequences are not supported; create a sequence",
            ));
        }
        Statement::CreateTable(create) if create.temporary => {
            return Err(Refusal::unsupported(
                "temporary tables are not supported; use a table of the catalogue",
            ));
        }
        Statement::CreateTable(_)
        | Statement::CreateIndex(_)
        | Statement::AlterTable { .. }
        | Statement::Drop { .. }
        | Statement::CreateView { .. }
        | Statement::CreateSequence { .. }
        | Statement::CreateType { .. }
        | Statement::AlterType(_)
        | Statement::CreateDomain(_)
        | Statement::DropDomain(_)
        | Statement::Comment { .. }
        | Statement::AlterIndex { .. }
        | Statement::AlterView { .. }
        | Statement::Truncate(_) => Verb::Schema(Box::new(statement)),
        _ if dialect == Dialect::MariaDb
            && matches!(
                statement,
                Statement::ShowVariables { .. }
                    | Statement::ShowVariable { .. }
                    | Statement::ShowStatus { .. }
            ) =>
        {
            Verb::Other
        }
        _ => Verb::Other,
    })
}
