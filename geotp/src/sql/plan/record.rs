//! The records that a statement names by their keys.

use sqlparser::ast::Expr;

use super::super::catalog::{Dialect, KeyType, Table};
use super::super::route::{RECORDS_MAX, constant};
use super::super::value::Key;

/// A record that a statement names by its key.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Record {
    /// The table, lower case.
    pub table: String,
    /// The values of its primary key.
    pub key: String,
    /// A condition in PostgreSQL's syntax that only this record meets.
    pub condition: String,
}

impl Record {
    /// Makes a record from the values of its table's primary key.
    pub(in crate::sql) fn new(table: &Table, values: &[&Key]) -> Self {
        let texts = values.iter().map(|value| value.to_string());
        let key = texts.clone().collect::<Vec<_>>().join(",");
        let equals = |(column, text): (&String, String)| {
            format!("\"{}\" = '{}'", column.replace('"', "\"\""), text.replace('\'', "''"))
        };
        let condition = table.primary.iter().zip(texts).map(equals).collect::<Vec<_>>();
        Self { table: table.name.clone(), key, condition: condition.join(" AND ") }
    }

    /// The condition in the syntax of this kind; none for unusual names of columns.
    #[must_use]
    pub fn condition_at(&self, kind: Dialect) -> Option<String> {
        if kind == Dialect::PostgreSql {
            return Some(self.condition.clone());
        }
        let (mut is_text, mut is_name) = (false, false);
        let mut condition = String::with_capacity(self.condition.len());
        for c in self.condition.chars() {
            match c {
                '\'' if !is_name => is_text = !is_text,
                '"' if !is_text => is_name = !is_name,
                _ => {}
            }
            if is_name && c == '`' {
                return None;
            }
            condition.push(if c == '"' && !is_text { '`' } else { c });
        }
        Some(condition)
    }

    /// The name of the table in the syntax of this kind; none for unusual names.
    #[must_use]
    pub fn table_at(&self, kind: Dialect) -> Option<String> {
        match kind {
            Dialect::PostgreSql => Some(format!("\"{}\"", self.table.replace('"', "\"\""))),
            Dialect::MariaDb => (!self.table.contains('`')).then(|| format!("`{}`", self.table)),
        }
    }
}

/// Rows for which a PostgreSQL source must prevent phantoms, in addition to row locks: no record
/// may appear that a serializable transaction has not found.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Keys {
    /// Records that the statement looks for.
    pub sought: Vec<Record>,
    /// True if it deletes them.
    pub is_delete: bool,
    /// Records that it inserts.
    pub inserted: Vec<Record>,
    /// Tables into which it inserts records with unknown keys, or too many to be named.
    pub filled: Vec<String>,
}

/// Records that a statement names.
#[derive(Default)]
pub(super) struct Named {
    pub(super) records: Vec<Record>,
    /// The table into which it inserts further records.
    pub(super) unnamed: Option<String>,
}

impl From<Vec<Record>> for Named {
    fn from(records: Vec<Record>) -> Self {
        Self { records, unnamed: None }
    }
}

impl Named {
    /// Adds a row that is inserted. Tables with unknown primary keys have no records.
    pub(super) fn add(&mut self, table: &Table, columns: &[String], row: &[&Expr], by_key: bool) {
        let value = |column: &String| {
            let expr = row.get(columns.iter().position(|c| c == column)?)?;
            if by_key {
                // In MariaDB, 0 means the next number of an auto-increment column.
                return constant(expr, KeyType::Integer).filter(|key| *key != Key::Int(0));
            }
            match table.sharding().filter(|sharding| sharding.column == *column) {
                Some(sharding) => constant(expr, sharding.key),
                None => constant(expr, KeyType::Text).or_else(|| constant(expr, KeyType::Integer)),
            }
        };
        if table.primary.is_empty() {
            return;
        }
        let values: Option<Vec<Key>> = table.primary.iter().map(value).collect();
        match values {
            Some(values) if self.records.len() < RECORDS_MAX => {
                self.records.push(Record::new(table, &values.iter().collect::<Vec<_>>()));
            }
            _ => self.unnamed = Some(table.name.clone()),
        }
    }
}
