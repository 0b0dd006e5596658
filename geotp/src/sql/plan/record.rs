//! The records that a statement names by their keys.

use sqlparser::ast::Expr;

use super::super::catalog::{KeyType, Table};
use super::super::route::{RECORDS_MAX, constant};
use super::super::value::Key;

/// A record that a statement names by its key.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Record {
    /// The table, lower case.
    pub table: String,
    /// The values of its primary columns.
    pub key: String,
    /// The condition that it alone meets, as PostgreSQL writes it.
    pub condition: String,
}

impl Record {
    /// By the values of its table's primary columns.
    pub(in crate::sql) fn new(table: &Table, values: &[&Key]) -> Self {
        let texts = values.iter().map(|value| value.to_string());
        let key = texts.clone().collect::<Vec<_>>().join(",");
        let equals = |(column, text): (&String, String)| {
            format!("\"{}\" = '{}'", column.replace('"', "\"\""), text.replace('\'', "''"))
        };
        let condition = table.primary.iter().zip(texts).map(equals).collect::<Vec<_>>();
        Self { table: table.name.clone(), key, condition: condition.join(" AND ") }
    }
}

/// What a PostgreSQL source must see to, beside the locks of rows, so that no record appears that a serializable transaction has
/// missed.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Keys {
    /// Records that are looked for.
    pub sought: Vec<Record>,
    /// They are deleted.
    pub is_delete: bool,
    /// Records that are inserted.
    pub inserted: Vec<Record>,
    /// Tables into which others are inserted, whose keys are not known, or which are too many to be named.
    pub filled: Vec<String>,
}

/// Records that a statement names.
#[derive(Default)]
pub(super) struct Named {
    pub(super) records: Vec<Record>,
    /// The table into which it inserts others.
    pub(super) unnamed: Option<String>,
}

impl From<Vec<Record>> for Named {
    fn from(records: Vec<Record>) -> Self {
        Self { records, unnamed: None }
    }
}

impl Named {
    /// A row that is inserted. Tables whose primary columns are not known have no records.
    pub(super) fn add(&mut self, table: &Table, columns: &[String], row: &[&Expr], by_key: bool) {
        let value = |column: &String| {
            let expr = row.get(columns.iter().position(|c| c == column)?)?;
            if by_key {
                // MariaDB takes 0 for the next number of a column that counts.
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
