//! SQL statements: which sources they concern, how they are translated for each source, and how the
//! answers are merged.
//!
//! Reading order: [`catalog`] (sources, and the placement of rows), [`parse`](mod@parse) (splits a
//! query batch into statements, and classifies them), [`route`] (the sources of a statement),
//! [`plan`](mod@plan) (the statement for each source, and the merge of the answers), [`dialect`]
//! (translation between PostgreSQL's and MariaDB's SQL), [`merge`]. A statement that cannot be
//! answered as one unsharded database would is refused, with the reason.

#![allow(
    clippy::wildcard_enum_match_arm,
    reason = "sqlparser's trees grow with each release; whatever is not named is refused or passed on"
)]

mod arrays;
pub mod catalog;
mod copy;
mod decimal;
pub mod dialect;
pub mod gather;
pub mod generated;
mod labels;
pub mod merge;
pub mod names;
pub mod parse;
pub mod plan;
pub mod route;
mod rows;
mod schema;
pub mod set;
pub mod shape;
mod statements;
pub mod system;
#[cfg(test)]
mod tests;
pub mod typed;
pub mod value;
mod walk;

/// What of the parser's trees callers must name.
pub mod ast {
    pub use sqlparser::ast::{FromTable, ObjectType, Statement, TableObject};
}

pub use catalog::{Catalogue, CatalogueError, Dialect, SourceEntry, SourceId, Table, TableEntry};
pub use copy::CopyForm;
pub use labels::name_columns;
pub use merge::plain_time;
pub use parse::{Isolation, Parsed, Unread, Verb, parse, unread};
pub use plan::{Context, Part, Plan, Record, plan};
pub use route::unknown_tables;
pub use schema::{
    BYTES_QUESTION, allow_values, created, defined_table, deletes, index_changes, renamed,
};
pub use set::{Change, Term};
pub use statements::Motion;
pub use value::{Answer, Cell, Column, Kind, Value};

/// The reason why a statement is refused.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// The problem, and what to do instead.
    pub message: String,
    /// PostgreSQL's SQLSTATE.
    pub sqlstate: &'static str,
}

impl Refusal {
    /// The statement is not supported.
    #[must_use]
    pub fn unsupported(message: impl Into<String>) -> Self {
        Self { message: message.into(), sqlstate: "0A000" }
    }

    /// The syntax is wrong.
    #[must_use]
    pub fn syntax(message: impl Into<String>) -> Self {
        Self { message: message.into(), sqlstate: "42601" }
    }

    /// The data is invalid.
    #[must_use]
    pub fn data(message: impl Into<String>) -> Self {
        Self { message: message.into(), sqlstate: "22000" }
    }
}
