//! `SET` and `set_config`: what a client changes of its session.

use std::ops::ControlFlow;

use sqlparser::ast::{
    Expr, FunctionArg, FunctionArgExpr, FunctionArguments, Ident, LockClause, LockType, Select,
    SelectItem, SetExpr, Statement, TableFactor, Value as SqlValue, Visit, VisitMut, Visitor,
    VisitorMut,
};
use sqlparser::dialect::{MySqlDialect, PostgreSqlDialect};
use sqlparser::tokenizer::{Token, Tokenizer};

use super::catalog::Dialect;
use super::parse::Isolation;
use super::{Refusal, Value};

/// One thing that a `SET` changes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Change {
    /// The isolation level of the session, or of its transaction under way or next. None is the default.
    Level {
        /// The level.
        level: Option<Isolation>,
        /// Of all transactions that begin from now on.
        is_session: bool,
    },
    /// Whether transactions may write.
    ReadOnly {
        /// They may not.
        is: bool,
        /// All that begin from now on.
        is_session: bool,
    },
    /// `autocommit`.
    Autocommit(bool),
    /// Another setting.
    Setting {
        /// In lower case.
        name: String,
        /// Its value: a list, which mostly has one element.
        value: Vec<Term>,
        /// Until the transaction ends.
        is_local: bool,
    },
}

/// A value in a `SET`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Term {
    /// What a new session has.
    Default,
    /// A text constant, or a word without quotes.
    Text(String),
    /// A number.
    Number(String),
    /// The value of a variable.
    Variable {
        /// In lower case.
        name: String,
        /// What new sessions of the server have, not what this session has.
        is_global: bool,
    },
    /// These, one after the other: `concat(…)`.
    Concat(Vec<Term>),
}

/// The isolation levels, in words.
const LEVELS: [(&[&str], Isolation); 4] = [
    (&["read", "uncommitted"], Isolation::ReadCommitted),
    (&["read", "committed"], Isolation::ReadCommitted),
    (&["repeatable", "read"], Isolation::RepeatableRead),
    (&["serializable"], Isolation::Serializable),
];

/// Reads a `SET`.
///
/// # Errors
/// It cannot be read, or it asks for something that the proxy does not do.
pub(super) fn read(text: &str, dialect: Dialect) -> Result<Vec<Change>, Refusal> {
    let mut reader = Reader::new(text, dialect)?;
    reader.word("set");
    let changes = match dialect {
        Dialect::PostgreSql => reader.postgres()?,
        Dialect::MariaDb => reader.maria()?,
    };
    match reader.next() {
        None => Ok(changes),
        Some(token) => Err(near(Some(&token))),
    }
}

/// Reads `BEGIN` or `START TRANSACTION`: what it says of the transaction.
///
/// # Errors
/// It cannot be read.
pub(super) fn begin(text: &str, dialect: Dialect) -> Result<Vec<Change>, Refusal> {
    let mut reader = Reader::new(text, dialect)?;
    if reader.word("start") {
        reader.word("transaction");
    } else {
        reader.word("begin");
        let _ = reader.word("work") || reader.word("transaction");
    }
    let has_snapshot =
        dialect == Dialect::MariaDb && reader.words(&["with", "consistent", "snapshot"]);
    if has_snapshot {
        // Every read sees the same at the levels that promise it; there is no moment of all sources to begin with.
        reader.takes(&Token::Comma);
    }
    let changes = reader.modes(false)?;
    match reader.next() {
        None => Ok(changes),
        Some(token) => Err(near(Some(&token))),
    }
}

pub(super) fn near(token: Option<&Token>) -> Refusal {
    let place = token.map_or_else(|| "end of input".to_owned(), |t| format!("or near \"{t}\""));
    Refusal::syntax(format!("syntax error at {place}"))
}

pub(super) struct Reader {
    tokens: Vec<Token>,
    at: usize,
}

impl Reader {
    pub(super) fn new(text: &str, dialect: Dialect) -> Result<Self, Refusal> {
        let tokens = match dialect {
            Dialect::PostgreSql => Tokenizer::new(&PostgreSqlDialect {}, text).tokenize(),
            Dialect::MariaDb => Tokenizer::new(&MySqlDialect {}, text).tokenize(),
        };
        let tokens = tokens.map_err(|error| Refusal::syntax(error.to_string()))?;
        let tokens = tokens.into_iter().filter(|token| !matches!(token, Token::Whitespace(_)));
        Ok(Self { tokens: tokens.collect(), at: 0 })
    }

    pub(super) fn peek(&self) -> Option<&Token> {
        self.tokens.get(self.at)
    }

    pub(super) fn next(&mut self) -> Option<Token> {
        let token = self.tokens.get(self.at).cloned();
        self.at += usize::from(token.is_some());
        token
    }

    pub(super) fn takes(&mut self, wanted: &Token) -> bool {
        let is_it = self.peek() == Some(wanted);
        self.at += usize::from(is_it);
        is_it
    }

    /// Takes this word if it is next; it is in lower case.
    pub(super) fn word(&mut self, wanted: &str) -> bool {
        let is_it = matches!(self.peek(), Some(Token::Word(word))
            if word.quote_style.is_none() && word.value.eq_ignore_ascii_case(wanted));
        self.at += usize::from(is_it);
        is_it
    }

    /// Takes these words if all of them are next.
    fn words(&mut self, wanted: &[&str]) -> bool {
        let before = self.at;
        let are = wanted.iter().all(|word| self.word(word));
        if !are {
            self.at = before;
        }
        are
    }

    /// A name with its qualifiers, in lower case.
    fn name(&mut self) -> Result<String, Refusal> {
        let mut name = String::new();
        loop {
            match self.next() {
                Some(Token::Word(word)) => name.push_str(&word.value.to_lowercase()),
                other => return Err(near(other.as_ref())),
            }
            if !self.takes(&Token::Period) {
                return Ok(name);
            }
            name.push('.');
        }
    }

    // --- PostgreSQL ---

    fn postgres(&mut self) -> Result<Vec<Change>, Refusal> {
        if self.words(&["session", "characteristics", "as", "transaction"]) {
            return self.modes(true);
        }
        if self.word("transaction") {
            return self.modes(false);
        }
        if self.word("constraints") {
            self.at = self.tokens.len();
            return Err(Refusal::unsupported(
                "SET CONSTRAINTS is not supported: constraints are checked when their source checks them",
            ));
        }
        let is_local = self.word("local");
        if !is_local {
            self.word("session");
        }
        if self.word("role") || self.word("authorization") {
            return Err(Refusal::unsupported(
                "the proxy enters its sources as one user; grant rights there, or use several proxies",
            ));
        }
        let setting = |name: &str, value| Change::Setting { name: name.into(), value, is_local };
        if self.words(&["time", "zone"]) {
            let value = if self.word("local") { Term::Default } else { self.zone()? };
            return Ok(vec![setting("timezone", vec![value])]);
        }
        if self.word("names") {
            let value = if self.peek().is_none() { Term::Default } else { self.postgres_value()? };
            return Ok(vec![setting("client_encoding", vec![value])]);
        }
        if self.word("schema") {
            let value = self.postgres_value()?;
            return Ok(vec![setting("search_path", vec![value])]);
        }
        let name = self.name()?;
        if !self.takes(&Token::Eq) && !self.word("to") {
            return Err(near(self.peek()));
        }
        let mut value =
            vec![if name == "timezone" { self.zone()? } else { self.postgres_value()? }];
        while self.takes(&Token::Comma) {
            value.push(self.postgres_value()?);
        }
        Ok(vec![change(name, value, is_local, Dialect::PostgreSql)?])
    }

    /// `INTERVAL '+02:00' HOUR TO MINUTE`, or any value.
    fn zone(&mut self) -> Result<Term, Refusal> {
        if !self.word("interval") {
            return self.postgres_value();
        }
        let value = self.postgres_value()?;
        self.words(&["hour", "to", "minute"]);
        Ok(match value {
            // In POSIX's form the sign is the other way round.
            Term::Text(text) => match text.strip_prefix('-') {
                Some(offset) => Term::Text(format!("<-{offset}>+{offset}")),
                None => {
                    let offset = text.trim_start_matches('+');
                    Term::Text(format!("<+{offset}>-{offset}"))
                }
            },
            other => other,
        })
    }

    fn postgres_value(&mut self) -> Result<Term, Refusal> {
        match self.next() {
            Some(Token::Word(word)) => Ok(match word.quote_style {
                None if word.value.eq_ignore_ascii_case("default") => Term::Default,
                None => Term::Text(word.value.to_lowercase()),
                Some(_) => Term::Text(word.value),
            }),
            Some(
                Token::SingleQuotedString(text)
                | Token::EscapedStringLiteral(text)
                | Token::UnicodeStringLiteral(text),
            ) => Ok(Term::Text(text)),
            Some(Token::DollarQuotedString(text)) => Ok(Term::Text(text.value)),
            Some(Token::Number(number, _)) => Ok(Term::Number(number)),
            Some(sign @ (Token::Minus | Token::Plus)) => match self.next() {
                Some(Token::Number(number, _)) if sign == Token::Minus => {
                    Ok(Term::Number(format!("-{number}")))
                }
                Some(Token::Number(number, _)) => Ok(Term::Number(number)),
                other => Err(near(other.as_ref())),
            },
            other => Err(near(other.as_ref())),
        }
    }

    /// `ISOLATION LEVEL …, READ ONLY, NOT DEFERRABLE`.
    fn modes(&mut self, is_session: bool) -> Result<Vec<Change>, Refusal> {
        let mut changes = Vec::new();
        while self.peek().is_some() {
            if self.words(&["isolation", "level"]) {
                let found = LEVELS.into_iter().find(|(words, _)| self.words(words));
                let Some((_, level)) = found else { return Err(near(self.peek())) };
                changes.push(Change::Level { level: Some(level), is_session });
            } else if self.words(&["read", "only"]) {
                changes.push(Change::ReadOnly { is: true, is_session });
            } else if self.words(&["read", "write"]) {
                changes.push(Change::ReadOnly { is: false, is_session });
            } else if self.word("snapshot") {
                return Err(Refusal::unsupported(
                    "a snapshot belongs to one source, so none can be given to a transaction here",
                ));
            } else if !self.words(&["not", "deferrable"]) && !self.word("deferrable") {
                // That a transaction may wait for a safe snapshot is only allowed, never needed.
                return Err(near(self.peek()));
            }
            if self.takes(&Token::Comma) && self.peek().is_none() {
                return Err(near(None));
            }
        }
        Ok(changes)
    }

    // --- MySQL and MariaDB ---

    fn maria(&mut self) -> Result<Vec<Change>, Refusal> {
        let mut changes = Vec::new();
        loop {
            changes.extend(self.assignment()?);
            if !self.takes(&Token::Comma) {
                return Ok(changes);
            }
        }
    }

    fn assignment(&mut self) -> Result<Vec<Change>, Refusal> {
        let setting = |name: &str, value| Change::Setting {
            name: name.to_owned(),
            value: vec![value],
            is_local: false,
        };
        if self.word("names") {
            if self.word("default") {
                return Ok(vec![setting("names", Term::Default)]);
            }
            let mut found = vec![setting("names", self.term()?)];
            if self.word("collate") {
                found.push(setting("collation_connection", self.term()?));
            }
            return Ok(found);
        }
        if self.words(&["character", "set"]) || self.word("charset") {
            return Ok(vec![setting("names", self.term()?)]);
        }
        for refused in ["password", "role", "default", "statement", "resource"] {
            let before = self.at;
            let is_it = self.word(refused);
            if is_it && (refused == "password" || self.peek() != Some(&Token::Eq)) {
                return Err(Refusal::unsupported(format!(
                    "SET {} is not supported by the proxy; send it to a source",
                    refused.to_uppercase()
                )));
            }
            self.at = before;
        }
        let global =
            || Refusal::unsupported("global settings belong to the sources; set them there");
        if self.word("global") || self.word("persist") || self.word("persist_only") {
            return Err(global());
        }
        let mut is_session = self.word("session") || self.word("local");
        if self.word("transaction") {
            return self.modes(is_session);
        }
        let written = self.name()?;
        let mut name = written.clone();
        if let Some(bare) = written.strip_prefix("@@") {
            name = bare.to_owned();
            for scope in ["session.", "local."] {
                if let Some(bare) = name.strip_prefix(scope) {
                    (name, is_session) = (bare.to_owned(), true);
                }
            }
        } else {
            is_session = true;
        }
        if name.starts_with('@') {
            return Err(Refusal::unsupported(format!(
                "{name}: the proxy does not support user variables; keep the value in the client"
            )));
        }
        if name.starts_with("global.") || name.starts_with("persist") {
            return Err(global());
        }
        if !self.takes(&Token::Eq) && !self.takes(&Token::Assignment) {
            return Err(near(self.peek()));
        }
        let value = vec![self.term()?];
        Ok(vec![change(name, value, !is_session, Dialect::MariaDb)?])
    }

    fn term(&mut self) -> Result<Term, Refusal> {
        Ok(match self.next() {
            Some(Token::SingleQuotedString(text) | Token::DoubleQuotedString(text)) => {
                Term::Text(text)
            }
            Some(Token::Number(number, _)) => Term::Number(number),
            Some(Token::Minus) => match self.next() {
                Some(Token::Number(number, _)) => Term::Number(format!("-{number}")),
                other => return Err(near(other.as_ref())),
            },
            Some(Token::Word(word)) if word.value.starts_with("@@") => {
                self.at -= 1;
                let name = self.name()?;
                let name = name.trim_start_matches('@');
                let bare = ["session.", "local."].iter().find_map(|s| name.strip_prefix(s));
                let global = name.strip_prefix("global.");
                let is_global = global.is_some();
                let name = global.or(bare).unwrap_or(name).to_owned();
                Term::Variable { name, is_global }
            }
            Some(Token::Word(word)) if self.takes(&Token::LParen) => {
                if !word.value.eq_ignore_ascii_case("concat") {
                    return Err(Refusal::unsupported(format!(
                        "a setting is a constant, a variable or concat() of such, not {}()",
                        word.value
                    )));
                }
                let mut terms = vec![self.term()?];
                while self.takes(&Token::Comma) {
                    terms.push(self.term()?);
                }
                if !self.takes(&Token::RParen) {
                    return Err(near(self.peek()));
                }
                Term::Concat(terms)
            }
            Some(Token::Word(word)) if word.value.starts_with('@') => {
                return Err(Refusal::unsupported(format!(
                    "{}: the proxy does not support user variables; keep the value in the client",
                    word.value
                )));
            }
            Some(Token::Word(word)) if word.value.eq_ignore_ascii_case("default") => Term::Default,
            Some(Token::Word(word)) => Term::Text(word.value),
            other => return Err(near(other.as_ref())),
        })
    }
}

/// What a setting of this name changes.
fn change(
    name: String,
    value: Vec<Term>,
    is_local: bool,
    dialect: Dialect,
) -> Result<Change, Refusal> {
    let text = match value.as_slice() {
        [Term::Text(text) | Term::Number(text)] => Some(text.as_str()),
        _ => None,
    };
    let is_default = value == [Term::Default];
    let is_postgres = dialect == Dialect::PostgreSql;
    let switch = || {
        let found = text.and_then(switch);
        let found = found.or(is_default.then_some(name == "autocommit"));
        found.ok_or_else(|| wrong(&name, "a Boolean value"))
    };
    Ok(match (name.as_str(), is_postgres) {
        ("autocommit", false) => Change::Autocommit(switch()?),
        ("transaction_isolation" | "tx_isolation", _) | ("default_transaction_isolation", true) => {
            let level = match text {
                Some(text) => Some(Isolation::from_name(text).ok_or_else(|| {
                    wrong(&name, "serializable, repeatable read or read committed")
                })?),
                None if is_default => None,
                None => return Err(wrong(&name, "the name of an isolation level")),
            };
            let is_session = if is_postgres { name.starts_with("default") } else { !is_local };
            Change::Level { level, is_session }
        }
        ("transaction_read_only" | "tx_read_only", false) => {
            Change::ReadOnly { is: switch()?, is_session: !is_local }
        }
        ("transaction_read_only", true) => Change::ReadOnly { is: switch()?, is_session: false },
        ("default_transaction_read_only", true) => {
            Change::ReadOnly { is: switch()?, is_session: true }
        }
        // Without a scope, `@@name` is of the session.
        _ => Change::Setting { is_local: is_local && is_postgres, name, value },
    })
}

fn wrong(name: &str, wanted: &str) -> Refusal {
    Refusal {
        message: format!("invalid value for parameter \"{name}\": it requires {wanted}"),
        sqlstate: "22023",
    }
}

/// A word for true or false.
#[must_use]
pub fn switch(text: &str) -> Option<bool> {
    match text.to_lowercase().as_str() {
        "1" | "on" | "true" | "yes" | "t" | "y" => Some(true),
        "0" | "off" | "false" | "no" | "f" | "n" => Some(false),
        _ => None,
    }
}

/// The changes that `SELECT set_config(name, value, is_local), …` asks for, and the values that it answers with; nothing
/// if the statement is another.
///
/// # Errors
/// An argument is no constant.
pub fn set_config(
    statement: &Statement,
    values: &[Value],
) -> Result<Option<Vec<(Change, String)>>, Refusal> {
    let Statement::Query(query) = statement else { return Ok(None) };
    let SetExpr::Select(select) = &*query.body else { return Ok(None) };
    if !select.from.is_empty() || select.selection.is_some() {
        return Ok(None);
    }
    let mut changes = Vec::new();
    for item in &select.projection {
        let (SelectItem::UnnamedExpr(expr) | SelectItem::ExprWithAlias { expr, .. }) = item else {
            return Ok(None);
        };
        let Expr::Function(function) = expr else { return Ok(None) };
        let name = super::route::table_name(&function.name);
        if name != "set_config" {
            return Ok(None);
        }
        let FunctionArguments::List(list) = &function.args else { return Ok(None) };
        let constant = |arg: &FunctionArg| match arg {
            FunctionArg::Unnamed(FunctionArgExpr::Expr(expr)) => text_of(expr, values),
            _ => None,
        };
        let arguments: Vec<Option<String>> = list.args.iter().map(constant).collect();
        let [Some(name), Some(value), Some(is_local)] = arguments.as_slice() else {
            return Err(Refusal::unsupported(
                "set_config takes three constants here: the name, the value, and whether it is local",
            ));
        };
        let is_local = switch(is_local).ok_or_else(|| wrong("is_local", "a Boolean value"))?;
        changes.push((assigned(name, value, is_local)?, value.clone()));
    }
    Ok((!changes.is_empty()).then_some(changes))
}

/// The change that gives a setting of PostgreSQL's a value that was not written as SQL.
///
/// # Errors
/// The setting cannot have this value.
pub fn assigned(name: &str, value: &str, is_local: bool) -> Result<Change, Refusal> {
    let name = name.to_lowercase();
    let is_list = ["search_path", "datestyle"].contains(&name.as_str());
    let terms = if is_list && !value.trim().is_empty() {
        value.split(',').map(|one| Term::Text(bare(one))).collect()
    } else {
        vec![Term::Text(value.to_owned())]
    };
    change(name, terms, is_local, Dialect::PostgreSql)
}

/// A name in a list, without its quotes.
fn bare(name: &str) -> String {
    let name = name.trim();
    match name.strip_prefix('"').and_then(|name| name.strip_suffix('"')) {
        Some(quoted) => quoted.replace("\"\"", "\""),
        None => name.to_lowercase(),
    }
}

/// The text of a constant or of a bound parameter.
fn text_of(expr: &Expr, values: &[Value]) -> Option<String> {
    match expr {
        Expr::Cast { expr, .. } | Expr::Nested(expr) => text_of(expr, values),
        Expr::Value(value) => match &value.value {
            SqlValue::SingleQuotedString(text) | SqlValue::EscapedStringLiteral(text) => {
                Some(text.clone())
            }
            SqlValue::Number(number, _) => Some(number.to_string()),
            SqlValue::Boolean(is) => Some(is.to_string()),
            SqlValue::Placeholder(name) => {
                let place: usize = name.strip_prefix('$')?.parse().ok()?;
                match values.get(place.checked_sub(1)?)? {
                    Value::Text(text) | Value::Number(text) => Some(text.clone()),
                    Value::Bool(is) => Some(is.to_string()),
                    Value::Null | Value::Bytes(_) => None,
                }
            }
            _ => None,
        },
        _ => None,
    }
}

/// Puts the values of variables, which belong to a session, into a statement of MySQL's; `of` gives those that it knows,
/// by names in lower case. The value of `last_insert_id()` has that name.
pub fn put_variables(statement: &mut Statement, of: impl Fn(&str) -> Option<String>) {
    // A column is named after what the client wrote.
    if let Statement::Query(query) = statement
        && let SetExpr::Select(select) = &mut *query.body
    {
        for item in &mut select.projection {
            if let SelectItem::UnnamedExpr(expr) = item
                && variable(expr).is_some_and(|name| of(&name).is_some())
            {
                let alias = Ident::with_quote('`', expr.to_string());
                *item = SelectItem::ExprWithAlias { expr: expr.clone(), alias };
            }
        }
    }
    let _ = VisitMut::visit(statement, &mut Variables { of });
}

/// The variable that an expression is.
fn variable(expr: &Expr) -> Option<String> {
    let written = match expr {
        Expr::Identifier(name) => name.value.to_lowercase(),
        Expr::CompoundIdentifier(parts) => {
            let parts: Vec<String> = parts.iter().map(|part| part.value.to_lowercase()).collect();
            parts.join(".")
        }
        Expr::Function(function) => {
            let name = super::route::table_name(&function.name);
            let has_none =
                matches!(&function.args, FunctionArguments::List(list) if list.args.is_empty());
            return (name == "last_insert_id" && has_none).then_some(name);
        }
        _ => return None,
    };
    let name = written.strip_prefix("@@")?;
    let name = ["session.", "local."].iter().find_map(|s| name.strip_prefix(s)).unwrap_or(name);
    Some(name.to_owned())
}

struct Variables<F> {
    of: F,
}

impl<F: Fn(&str) -> Option<String>> VisitorMut for Variables<F> {
    type Break = ();
    fn pre_visit_expr(&mut self, expr: &mut Expr) -> ControlFlow<()> {
        if let Some(value) = variable(expr).and_then(|name| (self.of)(&name)) {
            let is_number = !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit());
            let value = if is_number {
                SqlValue::Number(value, false)
            } else {
                SqlValue::SingleQuotedString(value)
            };
            *expr = Expr::Value(value.with_empty_span());
        }
        ControlFlow::Continue(())
    }
}

/// What a statement does to the session that executes it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Effects {
    /// Functions whose effect or value belongs to one session at one source, which no client has.
    pub of_a_session: Vec<String>,
    /// The first variable of a user, with its sign.
    pub user_variable: Option<String>,
    /// `SELECT … INTO`, which makes a table or writes a file or a variable.
    pub has_into: bool,
    /// It calls a function that the proxy does not know, and that may change its session.
    pub calls_unknown: bool,
}

impl Effects {
    fn call(&mut self, name: &str) {
        if is_of_a_session(name) {
            self.of_a_session.push(name.to_owned());
        }
        self.calls_unknown |= KNOWN.binary_search(&name).is_err();
    }

    fn name(&mut self, name: &str) {
        if self.user_variable.is_none() && is_user_variable(name) {
            self.user_variable = Some(name.to_lowercase());
        }
    }
}

/// What a statement does to its session.
#[must_use]
pub fn effects(statement: &Statement) -> Effects {
    struct Finder(Effects);
    impl Visitor for Finder {
        type Break = ();
        fn pre_visit_expr(&mut self, expr: &Expr) -> ControlFlow<()> {
            match expr {
                Expr::Function(function) => self.0.call(&super::route::table_name(&function.name)),
                Expr::Identifier(name) => self.0.name(&name.value),
                Expr::CompoundIdentifier(parts) => {
                    if let Some(first) = parts.first() {
                        self.0.name(&first.value);
                    }
                }
                _ => {}
            }
            ControlFlow::Continue(())
        }
        fn pre_visit_table_factor(&mut self, table: &TableFactor) -> ControlFlow<()> {
            match table {
                TableFactor::Table { name, args: Some(_), .. }
                | TableFactor::Function { name, .. } => {
                    self.0.call(&super::route::table_name(name))
                }
                _ => {}
            }
            ControlFlow::Continue(())
        }
        fn pre_visit_select(&mut self, select: &Select) -> ControlFlow<()> {
            self.0.has_into |= select.into.is_some();
            ControlFlow::Continue(())
        }
    }
    let mut finder = Finder(Effects::default());
    let _ = Visit::visit(statement, &mut finder);
    finder.0
}

/// The same of a statement that the parser cannot read, by its words.
#[must_use]
pub fn effects_of_words(words: &[String]) -> Effects {
    let first = words.first().map(String::as_str);
    let of_a_session = words.iter().filter(|word| is_of_a_session(word)).cloned().collect();
    // `SHOW GRANTS FOR 'u'@'host'` has a sign of its own.
    let user_variable =
        words.iter().find(|word| is_user_variable(word) && (*word != "@" || first != Some("show")));
    Effects {
        of_a_session,
        user_variable: user_variable.cloned(),
        has_into: matches!(first, Some("select" | "with" | "table"))
            && words.iter().any(|word| word == "into"),
        calls_unknown: true,
    }
}

fn is_user_variable(name: &str) -> bool {
    name.starts_with('@') && !name.starts_with("@@")
}

fn is_of_a_session(function: &str) -> bool {
    // Drivers say so before they keep a connection for others. There is nothing to release.
    if function == "pg_advisory_unlock_all" {
        return false;
    }
    const BEGINNINGS: [&str; 4] =
        ["pg_advisory_", "pg_try_advisory_", "pg_replication_origin_", "dblink_"];
    BEGINNINGS.iter().any(|beginning| function.starts_with(beginning))
        || OF_A_SESSION.contains(&function)
}

const OF_A_SESSION: &[&str] = &[
    "currval",
    "found_rows",
    "get_lock",
    "last_insert_id",
    "lastval",
    "pg_export_snapshot",
    "release_lock",
    "row_count",
    "set_config",
    "setseed",
];

/// Functions that leave their session as it was, in the order of their names.
pub(super) const KNOWN: &[&str] = &[
    "abs",
    "age",
    "array_agg",
    "array_length",
    "array_position",
    "array_to_string",
    "ascii",
    "avg",
    "bin",
    "bit_and",
    "bit_length",
    "bit_or",
    "bool_and",
    "bool_or",
    "btrim",
    "cast",
    "cbrt",
    "ceil",
    "ceiling",
    "char",
    "char_length",
    "character_length",
    "chr",
    "clock_timestamp",
    "coalesce",
    "col_description",
    "concat",
    "concat_ws",
    "conv",
    "convert",
    "cos",
    "count",
    "cume_dist",
    "curdate",
    "current_catalog",
    "current_database",
    "current_date",
    "current_role",
    "current_schema",
    "current_schemas",
    "current_setting",
    "current_time",
    "current_timestamp",
    "current_user",
    "curtime",
    "database",
    "date",
    "date_add",
    "date_diff",
    "date_format",
    "date_part",
    "date_sub",
    "date_trunc",
    "datediff",
    "day",
    "dayname",
    "dayofmonth",
    "dayofweek",
    "dayofyear",
    "decode",
    "degrees",
    "dense_rank",
    "div",
    "elt",
    "encode",
    "every",
    "exp",
    "extract",
    "field",
    "find_in_set",
    "first_value",
    "floor",
    "format",
    "format_type",
    "from_unixtime",
    "gen_random_uuid",
    "generate_series",
    "get_byte",
    "greatest",
    "group_concat",
    "has_schema_privilege",
    "has_table_privilege",
    "hex",
    "hour",
    "if",
    "ifnull",
    "initcap",
    "instr",
    "isnull",
    "json_agg",
    "json_array",
    "json_array_length",
    "json_arrayagg",
    "json_build_array",
    "json_build_object",
    "json_extract",
    "json_extract_path_text",
    "json_length",
    "json_object",
    "json_object_agg",
    "json_objectagg",
    "json_set",
    "json_type",
    "json_unquote",
    "json_valid",
    "json_value",
    "jsonb_agg",
    "jsonb_array_elements",
    "jsonb_array_length",
    "jsonb_build_array",
    "jsonb_build_object",
    "jsonb_object_agg",
    "jsonb_set",
    "jsonb_typeof",
    "lag",
    "last_day",
    "last_value",
    "lcase",
    "lead",
    "least",
    "left",
    "length",
    "lengthb",
    "ln",
    "localtime",
    "localtimestamp",
    "locate",
    "log",
    "log10",
    "log2",
    "lower",
    "lpad",
    "ltrim",
    "make_date",
    "make_interval",
    "make_timestamp",
    "max",
    "md5",
    "microsecond",
    "mid",
    "min",
    "minute",
    "mod",
    "month",
    "monthname",
    "now",
    "nth_value",
    "ntile",
    "nullif",
    "nvl",
    "obj_description",
    "octet_length",
    "ord",
    "overlay",
    "percent_rank",
    "percentile_cont",
    "percentile_disc",
    "pg_advisory_unlock_all",
    "pg_backend_pid",
    "pg_encoding_to_char",
    "pg_function_is_visible",
    "pg_get_constraintdef",
    "pg_get_expr",
    "pg_get_function_arguments",
    "pg_get_function_result",
    "pg_get_functiondef",
    "pg_get_indexdef",
    "pg_get_serial_sequence",
    "pg_get_statisticsobjdef_columns",
    "pg_get_triggerdef",
    "pg_get_userbyid",
    "pg_get_viewdef",
    "pg_is_in_recovery",
    "pg_opclass_is_visible",
    "pg_relation_is_publishable",
    "pg_relation_size",
    "pg_size_pretty",
    "pg_sleep",
    "pg_table_is_visible",
    "pg_table_size",
    "pg_total_relation_size",
    "pg_type_is_visible",
    "pi",
    "position",
    "pow",
    "power",
    "quarter",
    "quote",
    "quote_ident",
    "quote_literal",
    "radians",
    "rand",
    "random",
    "rank",
    "regexp_match",
    "regexp_matches",
    "regexp_replace",
    "regexp_split_to_table",
    "release_all_locks",
    "repeat",
    "replace",
    "reverse",
    "right",
    "round",
    "row_number",
    "row_to_json",
    "rpad",
    "rtrim",
    "schema",
    "sec_to_time",
    "second",
    "session_user",
    "set_byte",
    "sha1",
    "sha2",
    "sha256",
    "shobj_description",
    "sign",
    "sin",
    "sleep",
    "soundex",
    "space",
    "split_part",
    "sqrt",
    "starts_with",
    "statement_timestamp",
    "std",
    "stddev",
    "stddev_pop",
    "stddev_samp",
    "str_to_date",
    "strcmp",
    "string_agg",
    "string_to_array",
    "strpos",
    "subdate",
    "substr",
    "substring",
    "substring_index",
    "sum",
    "sysdate",
    "system_user",
    "tan",
    "time",
    "time_to_sec",
    "timestamp",
    "timestampadd",
    "timestampdiff",
    "to_base64",
    "to_char",
    "to_date",
    "to_days",
    "to_hex",
    "to_json",
    "to_jsonb",
    "to_number",
    "to_regclass",
    "to_timestamp",
    "transaction_timestamp",
    "translate",
    "trim",
    "trunc",
    "truncate",
    "ucase",
    "unhex",
    "unix_timestamp",
    "unnest",
    "upper",
    "user",
    "utc_date",
    "utc_time",
    "utc_timestamp",
    "uuid",
    "values",
    "var_pop",
    "var_samp",
    "variance",
    "version",
    "week",
    "weekday",
    "width_bucket",
    "year",
    "yearweek",
];

/// Whether a query locks the rows that it reads, in a way that its server refuses in a transaction that only reads: MariaDB
/// lets it lock rows that others may read.
#[must_use]
pub fn locks_rows(statement: &Statement, dialect: Dialect) -> bool {
    let Statement::Query(query) = statement else { return false };
    let counts =
        |lock: &LockClause| dialect == Dialect::PostgreSql || lock.lock_type == LockType::Update;
    query.locks.iter().any(counts)
}
