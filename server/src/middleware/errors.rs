//! What clients are told is wrong.

use orthodrome_geotp::sql::{Dialect, Refusal};

use super::driver::{Fault, Trouble};
use super::maria::TOO_LONG;

/// What a client is told is wrong.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct SqlError {
    pub(super) sqlstate: String,
    pub(super) number: u16,
    pub(super) message: String,
}

impl SqlError {
    pub(super) fn new(sqlstate: &str, message: impl Into<String>) -> Self {
        Self { sqlstate: sqlstate.into(), number: number_of(sqlstate), message: message.into() }
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
            // Only the statement is lost, and not the connection, as MariaDB's own would say.
            sqlstate = "54000".into();
        }
        if number == 0 {
            number = number_of(&sqlstate);
        }
        Self { sqlstate, number, message: fault.message }
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

/// MariaDB's number for a SQLSTATE of PostgreSQL.
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

/// Whoever waits too long, or says so, is told this.
pub(super) fn interrupted(client: Dialect, is_late: bool) -> SqlError {
    match (client, is_late) {
        (_, false) => SqlError::new("57014", "canceling statement due to user request"),
        (Dialect::PostgreSql, true) => {
            SqlError::new("57014", "canceling statement due to statement timeout")
        }
        (Dialect::MariaDb, true) => SqlError {
            sqlstate: "70100".into(),
            number: 1969,
            message: "Query execution was interrupted (max_statement_time exceeded)".into(),
        },
    }
}
