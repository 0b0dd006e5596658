//! Errors for clients.

use orthodrome_geotp::sql::{Dialect, Refusal};

use super::driver::{Fault, Trouble};
use super::maria::TOO_LONG;

/// An error for a client.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct SqlError {
    pub(crate) sqlstate: String,
    pub(crate) number: u16,
    pub(crate) message: String,
    /// The position in the statement, in characters from 1; 0 if it is unknown.
    pub(crate) position: usize,
}

impl SqlError {
    pub(crate) fn new(sqlstate: &str, message: impl Into<String>) -> Self {
        let (number, message) = (number_of(sqlstate), message.into());
        Self { sqlstate: sqlstate.into(), number, message, position: 0 }
    }
}

impl From<Refusal> for SqlError {
    fn from(refusal: Refusal) -> Self {
        Self::new(refusal.sqlstate, refusal.message)
    }
}

impl From<Fault> for SqlError {
    fn from(fault: Fault) -> Self {
        let (mut sqlstate, mut number) = (fault.sqlstate, fault.number);
        if number == 1205 {
            sqlstate = "55P03".into();
        }
        if number == TOO_LONG {
            // Only the statement fails; MariaDB's own error would close the connection.
            sqlstate = "54000".into();
        }
        if number == 0 {
            number = number_of(&sqlstate);
        }
        Self { sqlstate, number, message: fault.message, position: 0 }
    }
}

impl From<Trouble> for SqlError {
    fn from(trouble: Trouble) -> Self {
        match trouble {
            Trouble::Fault(fault) => fault.into(),
            Trouble::Broken(error) => {
                Self::new("08006", format!("the source cannot be reached: {error}; try again"))
            }
        }
    }
}

/// The error for a source that could not be asked.
pub(crate) fn unreachable(trouble: Trouble, source: &str) -> SqlError {
    match trouble {
        Trouble::Fault(fault) => fault.into(),
        Trouble::Broken(error) => {
            SqlError::new("08006", format!("source {source} cannot be reached: {error}; try again"))
        }
    }
}

/// MariaDB's error number for a SQLSTATE of PostgreSQL.
fn number_of(sqlstate: &str) -> u16 {
    match sqlstate {
        "23505" => 1062,
        "23503" => 1452,
        "23502" => 1048,
        "40P01" | "40001" => 1213,
        "55P03" => 1205,
        "42P01" => 1146,
        "42703" => 1054,
        "42601" => 1064,
        "25001" => 1568,
        "25006" => 1792,
        "22021" => 1300,
        "22023" => 1231,
        "28000" | "28P01" => 1045,
        "54001" => 1436,
        "57014" => 1317,
        "0A000" => 1235,
        _ => 1105,
    }
}

/// The maximum length of a statement's part in errors for MySQL clients.
const SHOWN: usize = 80;

/// A syntax error in the words of the client's kind: the position at which the parser stopped, and
/// the text there.
pub(crate) fn syntax(client: Dialect, text: &str, problem: &str) -> SqlError {
    let (what, place) = problem.split_once(" at Line: ").unwrap_or((problem, ""));
    let (line, column) = place.split_once(", Column: ").unwrap_or_default();
    let (line, column): (usize, usize) = (line.parse().unwrap_or(0), column.parse().unwrap_or(0));
    let found = what.rsplit_once("found: ").map_or("", |(_, found)| found.trim());
    let before = text.split('\n').take(line.saturating_sub(1));
    let before: usize = before.map(|line| line.chars().count() + 1).sum();
    let at = if line > 0 { before + column.saturating_sub(1) } else { text.chars().count() };
    let rest: String = text.chars().skip(at).collect();
    let is_end = rest.trim().is_empty() || found == "EOF";
    match client {
        Dialect::PostgreSql => {
            let word = if found.is_empty() {
                rest.split_whitespace().next().unwrap_or_default()
            } else {
                found
            };
            let message = if is_end {
                "syntax error at end of input".to_owned()
            } else {
                format!("syntax error at or near \"{word}\"")
            };
            let position = if is_end { text.chars().count() + 1 } else { at + 1 };
            SqlError { position, ..SqlError::new("42601", message) }
        }
        Dialect::MariaDb => {
            let shown: String =
                if is_end { String::new() } else { rest.chars().take(SHOWN).collect() };
            let message = format!(
                "You have an error in your SQL syntax; check the manual that corresponds to your MariaDB server version \
                 for the right syntax to use near '{shown}' at line {}",
                line.max(1)
            );
            SqlError { sqlstate: "42000".into(), ..SqlError::new("42601", message) }
        }
    }
}

/// The error for a statement that took too long or was cancelled.
pub(crate) fn interrupted(client: Dialect, is_late: bool) -> SqlError {
    match (client, is_late) {
        (_, false) => SqlError::new("57014", "canceling statement due to user request"),
        (Dialect::PostgreSql, true) => {
            SqlError::new("57014", "canceling statement due to statement timeout")
        }
        (Dialect::MariaDb, true) => SqlError {
            sqlstate: "70100".into(),
            number: 1969,
            message: "Query execution was interrupted (max_statement_time exceeded)".into(),
            position: 0,
        },
    }
}

#[cfg(test)]
mod tests {
    use orthodrome_geotp::sql::parse;

    use super::*;

    fn told(client: Dialect, text: &str) -> SqlError {
        let parsed = parse(text, client).unwrap().pop().unwrap();
        syntax(client, text, &parsed.problem.unwrap_or_else(|| panic!("{text} is read")))
    }

    #[test]
    fn a_syntax_error_says_where_it_is() {
        for (text, message, position) in [
            ("SELECT * FORM t", "syntax error at or near \"t\"", 15),
            ("SELECT 1 FROM t\nWHERE ) x", "syntax error at or near \")\"", 23),
            ("SELECT (1", "syntax error at end of input", 10),
        ] {
            let error = told(Dialect::PostgreSql, text);
            assert_eq!((error.message.as_str(), error.position), (message, position), "{text}");
            assert_eq!(error.sqlstate, "42601");
        }
        let error = told(Dialect::MariaDb, "SELECT 1 FROM t\nWHERE ) x");
        assert_eq!((error.number, error.sqlstate.as_str()), (1064, "42000"));
        assert!(error.message.ends_with("near ') x' at line 2"), "{}", error.message);
    }
}
