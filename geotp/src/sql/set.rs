//! `SET` and `set_config`: a client's changes of its session.

mod effects;
mod variables;

use sqlparser::ast::{
    Expr, Function, FunctionArg, FunctionArgExpr, FunctionArguments, Select, SelectItem, SetExpr,
    Statement, Value as SqlValue,
};
use sqlparser::dialect::{MySqlDialect, PostgreSqlDialect};
use sqlparser::tokenizer::{Token, Tokenizer};

#[cfg(test)]
pub(super) use self::effects::KNOWN;
pub use self::effects::{Effects, effects, effects_of_words, locks_rows};
pub use self::variables::put_variables;
use super::catalog::Dialect;
use super::parse::Isolation;
use super::{Refusal, Value};

/// One change of a `SET`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Change {
    /// The isolation level of the session, or of its current or next transaction. None means the
    /// default.
    Level {
        /// The level.
        level: Option<Isolation>,
        /// True if it is for all transactions from now on.
        is_session: bool,
    },
    /// Whether transactions may write.
    ReadOnly {
        /// True if they may not write.
        is: bool,
        /// True if it is for all transactions from now on.
        is_session: bool,
    },
    /// `autocommit`.
    Autocommit(bool),
    /// Another setting.
    Setting {
        /// The name, in lower case.
        name: String,
        /// Its value: a list, usually with one element.
        value: Vec<Term>,
        /// True if it lasts until the transaction ends.
        is_local: bool,
    },
}

/// A value in a `SET`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Term {
    /// The value in a new session.
    Default,
    /// A string constant, or a word without quotes.
    Text(String),
    /// A number.
    Number(String),
    /// The value of a variable.
    Variable {
        /// The name, in lower case.
        name: String,
        /// True for the value in new sessions of the server, and not in this session.
        is_global: bool,
    },
    /// A concatenation: `concat(…)`.
    Concat(Vec<Term>),
}

/// The names of the isolation levels.
const LEVELS: [(&[&str], Isolation); 4] = [
    (&["read", "uncommitted"], Isolation::ReadCommitted),
    (&["read", "committed"], Isolation::ReadCommitted),
    (&["repeatable", "read"], Isolation::RepeatableRead),
    (&["serializable"], Isolation::Serializable),
];

/// Parses a `SET`.
///
/// # Errors
/// Its syntax is wrong, or the proxy does not support it.
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

/// Parses `BEGIN` or `START TRANSACTION`, and returns the settings of the transaction.
///
/// # Errors
/// Its syntax is wrong.
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
        // At the levels that promise it, all reads are consistent. There is no snapshot of all
        // sources at the beginning.
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

    /// Takes this word, in lower case, if it is next.
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
            // POSIX's form has the opposite sign.
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
                // DEFERRABLE only allows a transaction to wait for a safe snapshot; it never
                // requires that.
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

/// The change that a setting of this name means.
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
        // Without a scope, `@@name` belongs to the session.
        _ => Change::Setting { is_local: is_local && is_postgres, name, value },
    })
}

fn wrong(name: &str, wanted: &str) -> Refusal {
    Refusal {
        message: format!("invalid value for parameter \"{name}\": it requires {wanted}"),
        sqlstate: "22023",
    }
}

/// Parses a boolean word.
#[must_use]
pub fn switch(text: &str) -> Option<bool> {
    match text.to_lowercase().as_str() {
        "1" | "on" | "true" | "yes" | "t" | "y" => Some(true),
        "0" | "off" | "false" | "no" | "f" | "n" => Some(false),
        _ => None,
    }
}

/// One column of a [`ConfigQuery`].
#[derive(Clone, PartialEq, Debug)]
pub enum ConfigItem {
    /// `set_config(name, value, is_local)`: the change, and the value that it returns.
    Set(Change, String),
    /// `current_setting(name)`, of a setting that no item before it changes.
    Current(String),
}

/// A `SELECT` that sets settings and may read others.
#[derive(Clone, PartialEq, Debug)]
pub struct ConfigQuery {
    /// Its columns.
    pub items: Vec<ConfigItem>,
    /// True if a setting that does not exist is no error: then there is no row.
    pub if_known: bool,
}

/// The calls of `set_config` and `current_setting` that a query consists of, with the names of their
/// columns; none if it is another query, or sets nothing.
fn config_calls(statement: &Statement) -> Option<Vec<(&Function, String)>> {
    let Statement::Query(query) = statement else { return None };
    let SetExpr::Select(select) = &*query.body else { return None };
    let mut calls = Vec::new();
    for item in &select.projection {
        let (expr, alias) = match item {
            SelectItem::UnnamedExpr(expr) => (expr, None),
            SelectItem::ExprWithAlias { expr, alias } => (expr, Some(alias)),
            _ => return None,
        };
        let Expr::Function(function) = expr else { return None };
        let name = super::route::table_name(&function.name);
        if name != "set_config" && name != "current_setting" {
            return None;
        }
        let alias = alias.map(|alias| match alias.quote_style {
            Some(_) => alias.value.clone(),
            None => alias.value.to_lowercase(),
        });
        calls.push((function, alias.unwrap_or(name)));
    }
    let sets = |(function, _): &(&Function, String)| {
        super::route::table_name(&function.name) == "set_config"
    };
    let is_asked = select.from.is_empty() && select.selection.is_none();
    (calls.iter().any(sets) && (is_asked || known_setting(select).is_some())).then_some(calls)
}

/// The setting that `FROM pg_settings WHERE name = 'setting'` means.
fn known_setting(select: &Select) -> Option<String> {
    let [from] = select.from.as_slice() else { return None };
    let sqlparser::ast::TableFactor::Table { name, args: None, .. } = &from.relation else {
        return None;
    };
    if !from.joins.is_empty() || super::route::table_name(name) != "pg_settings" {
        return None;
    }
    match &select.selection {
        Some(Expr::BinaryOp { left, op: sqlparser::ast::BinaryOperator::Eq, right }) => {
            is_name(left).then(|| text_of(right, &[]))?
        }
        _ => None,
    }
}

/// Whether an expression is the column `name`.
fn is_name(expr: &Expr) -> bool {
    matches!(expr, Expr::Identifier(name) if name.value.eq_ignore_ascii_case("name"))
}

/// The names of the columns of a query that [`set_config`] reads.
#[must_use]
pub fn config_columns(statement: &Statement) -> Option<Vec<String>> {
    config_calls(statement).map(|calls| calls.into_iter().map(|(_, name)| name).collect())
}

/// What `SELECT set_config(name, value, is_local), …` does; none if it is another statement.
///
/// # Errors
/// An argument is not a constant.
pub fn set_config(statement: &Statement, values: &[Value]) -> Result<Option<ConfigQuery>, Refusal> {
    let Some(calls) = config_calls(statement) else { return Ok(None) };
    let known = match statement {
        Statement::Query(query) => match &*query.body {
            SetExpr::Select(select) => known_setting(select),
            _ => None,
        },
        _ => None,
    };
    let mut items: Vec<ConfigItem> = Vec::new();
    let mut set: Vec<String> = Vec::new();
    for (function, _) in calls {
        let FunctionArguments::List(list) = &function.args else { return Ok(None) };
        let constant = |arg: &FunctionArg| match arg {
            FunctionArg::Unnamed(FunctionArgExpr::Expr(expr)) if is_name(expr) => known.clone(),
            FunctionArg::Unnamed(FunctionArgExpr::Expr(expr)) => text_of(expr, values),
            _ => None,
        };
        let arguments: Vec<Option<String>> = list.args.iter().map(constant).collect();
        if super::route::table_name(&function.name) == "current_setting" {
            let [Some(name)] = arguments.as_slice() else {
                return Err(Refusal::unsupported(
                    "beside set_config, current_setting takes one constant: the name",
                ));
            };
            if set.iter().any(|changed| changed.eq_ignore_ascii_case(name)) {
                return Err(Refusal::unsupported(
                    "current_setting after set_config of the same setting is not supported; ask in a statement of its own",
                ));
            }
            items.push(ConfigItem::Current(name.clone()));
            continue;
        }
        let [Some(name), Some(value), Some(is_local)] = arguments.as_slice() else {
            return Err(Refusal::unsupported(
                "set_config takes three constants here: the name, the value, and whether it is local",
            ));
        };
        let is_local = switch(is_local).ok_or_else(|| wrong("is_local", "a Boolean value"))?;
        set.push(name.clone());
        items.push(ConfigItem::Set(assigned(name, value, is_local)?, value.clone()));
    }
    Ok(Some(ConfigQuery { items, if_known: known.is_some() }))
}

/// The change of a PostgreSQL setting to a value that is not in SQL syntax.
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

/// A name of a list, without its quotes.
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
