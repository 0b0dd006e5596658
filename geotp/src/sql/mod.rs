//! Statements: which sources they concern, how each is told, and how their answers become one.
//!
//! Reading order: [`catalog`] (sources, and where rows live), [`parse`](mod@parse) (a query batch is several
//! statements; what each is), [`route`] (which sources), [`plan`](mod@plan) (what each is told, and how the
//! answers are merged), [`dialect`] (PostgreSQL's words in MariaDB's and the reverse), [`merge`].
//! What cannot be answered as one unsharded database would is refused, with the reason.

#![allow(
    clippy::wildcard_enum_match_arm,
    reason = "sqlparser's trees grow with each release; whatever is not named is refused or passed on"
)]

pub mod catalog;
mod copy;
mod decimal;
pub mod dialect;
pub mod generated;
pub mod merge;
pub mod parse;
pub mod plan;
pub mod route;
mod schema;
pub mod set;
mod statements;
#[cfg(test)]
mod tests;
pub mod typed;
pub mod value;
mod walk;

/// What of the parser's trees callers must name.
pub mod ast {
    pub use sqlparser::ast::{FromTable, ObjectType, Statement, TableObject};
}

pub use catalog::{Catalogue, CatalogueError, Dialect, SourceEntry, SourceId, TableEntry};
pub use copy::CopyForm;
pub use parse::{Isolation, Parsed, Unread, Verb, parse, unread};
pub use plan::{Context, Part, Plan, Record, plan};
pub use route::unknown_tables;
pub use schema::{allow_values, created, deletes};
pub use set::{Change, Term};
pub use statements::Motion;
pub use value::{Answer, Cell, Column, Kind, Value};

/// Why a statement is not carried out.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// What is wrong, and what to do instead.
    pub message: String,
    /// PostgreSQL's class of it.
    pub sqlstate: &'static str,
}

impl Refusal {
    /// It is not supported.
    #[must_use]
    pub fn unsupported(message: impl Into<String>) -> Self {
        Self { message: message.into(), sqlstate: "0A000" }
    }

    /// It cannot be read.
    #[must_use]
    pub fn syntax(message: impl Into<String>) -> Self {
        Self { message: message.into(), sqlstate: "42601" }
    }

    /// Its data are wrong.
    #[must_use]
    pub fn data(message: impl Into<String>) -> Self {
        Self { message: message.into(), sqlstate: "22000" }
    }
}
