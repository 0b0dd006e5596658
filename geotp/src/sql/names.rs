//! Names of tables with a schema or a database before them. Clients see one database, with one
//! schema, so any other one is refused: without it the name would mean another table.

use std::ops::ControlFlow;

use sqlparser::ast::{
    AlterTableOperation, ColumnOption, CommentObject, CreateTable, CreateTableLikeKind, Ident,
    ObjectName, ObjectType, RenameTableNameKind, Statement, TableConstraint, TableFactor, Visitor,
};

use super::Refusal;
use super::catalog::{Catalogue, Dialect, PUBLIC};
use super::route::SYSTEM_SCHEMAS;
use super::walk::walk;

/// The name of a schema or database, in the form in which its kind of server compares names.
fn folded(name: &Ident, client: Dialect) -> String {
    match (client, name.quote_style) {
        (Dialect::PostgreSql, None) => name.value.to_lowercase(),
        _ => name.value.clone(),
    }
}

/// The parts of a name before its last one.
fn qualifiers(name: &ObjectName, client: Dialect) -> Vec<String> {
    let parts = name.0.iter().rev().skip(1).rev();
    parts.filter_map(|part| part.as_ident()).map(|part| folded(part, client)).collect()
}

/// Whether a name has the proxy's own schema or database before it.
pub(super) fn is_own(catalogue: &Catalogue, name: &ObjectName, client: Dialect) -> bool {
    let before = qualifiers(name, client);
    let before: Vec<&str> = before.iter().map(String::as_str).collect();
    match (client, before.as_slice()) {
        (Dialect::PostgreSql, [schema]) => catalogue.has_schema(schema),
        (Dialect::PostgreSql, [database, schema]) => {
            catalogue.has_database(database) && catalogue.has_schema(schema)
        }
        (Dialect::MariaDb, [database]) => catalogue.has_database(database),
        _ => false,
    }
}

/// Whether a name means a table of a source's own catalogues, or one of its session.
fn is_of_system(name: &ObjectName, client: Dialect) -> bool {
    let before = qualifiers(name, client);
    before.last().is_some_and(|schema| {
        let schema = schema.to_lowercase();
        SYSTEM_SCHEMAS.contains(&schema.as_str()) || schema.starts_with("pg_")
    })
}

/// Removes the proxy's own schema or database from a name, for a source of the kind `to`. A
/// PostgreSQL source has the schema `public`, too, where a session may look elsewhere first.
pub(super) fn strip(catalogue: &Catalogue, name: &mut ObjectName, from: Dialect, to: Dialect) {
    if name.0.len() < 2 || !is_own(catalogue, name, from) {
        return;
    }
    let is_public = qualifiers(name, from).last().is_some_and(|schema| schema == PUBLIC);
    let kept =
        if (from, to) == (Dialect::PostgreSql, Dialect::PostgreSql) && is_public { 2 } else { 1 };
    name.0.drain(..name.0.len() - kept);
}

/// The names of tables, views, indexes and sequences in a statement that the parser's visitors do
/// not visit.
pub(super) fn unvisited(statement: &mut Statement) -> Vec<&mut ObjectName> {
    match statement {
        Statement::Drop {
            object_type:
                ObjectType::Table
                | ObjectType::View
                | ObjectType::MaterializedView
                | ObjectType::Index
                | ObjectType::Sequence,
            names,
            table,
            ..
        } => names.iter_mut().chain(table).collect(),
        Statement::AlterIndex { name, .. } | Statement::CreateSequence { name, .. } => vec![name],
        Statement::Comment {
            object_type: CommentObject::Table | CommentObject::View,
            object_name,
            ..
        } => vec![object_name],
        Statement::CreateTable(create) => of_table(create),
        Statement::AlterTable(alter) => {
            alter.operations.iter_mut().filter_map(of_operation).collect()
        }
        _ => Vec::new(),
    }
}

fn of_table(create: &mut CreateTable) -> Vec<&mut ObjectName> {
    let like = create.like.iter_mut().map(|like| match like {
        CreateTableLikeKind::Parenthesized(like) | CreateTableLikeKind::Plain(like) => {
            &mut like.name
        }
    });
    let options = create.columns.iter_mut().flat_map(|column| &mut column.options);
    let options = options.filter_map(|option| of_option(&mut option.option));
    like.chain(options).chain(create.constraints.iter_mut().filter_map(of_constraint)).collect()
}

fn of_option(option: &mut ColumnOption) -> Option<&mut ObjectName> {
    match option {
        ColumnOption::ForeignKey(key) => Some(&mut key.foreign_table),
        _ => None,
    }
}

fn of_constraint(constraint: &mut TableConstraint) -> Option<&mut ObjectName> {
    match constraint {
        TableConstraint::ForeignKey(key) => Some(&mut key.foreign_table),
        _ => None,
    }
}

fn of_operation(operation: &mut AlterTableOperation) -> Option<&mut ObjectName> {
    match operation {
        AlterTableOperation::AddConstraint { constraint, .. } => of_constraint(constraint),
        AlterTableOperation::AddColumn { column_def, .. } => {
            column_def.options.iter_mut().find_map(|option| of_option(&mut option.option))
        }
        AlterTableOperation::RenameTable {
            table_name: RenameTableNameKind::To(name) | RenameTableNameKind::As(name),
        } => Some(name),
        _ => None,
    }
}

/// The names with a schema or database before them that are neither the proxy's own nor a
/// source's own catalogues'.
fn foreign(catalogue: &Catalogue, statement: &Statement, client: Dialect) -> Vec<ObjectName> {
    struct Finder {
        names: Vec<ObjectName>,
        functions: Vec<ObjectName>,
    }
    impl Visitor for Finder {
        type Break = ();
        fn pre_visit_relation(&mut self, name: &ObjectName) -> ControlFlow<()> {
            if name.0.len() > 1 {
                self.names.push(name.clone());
            }
            ControlFlow::Continue(())
        }
        fn pre_visit_table_factor(&mut self, factor: &TableFactor) -> ControlFlow<()> {
            if let TableFactor::Table { name, args: Some(_), .. } = factor {
                self.functions.push(name.clone());
            }
            ControlFlow::Continue(())
        }
    }
    let mut finder = Finder { names: Vec::new(), functions: Vec::new() };
    let _ = walk(statement, &mut finder);
    let Finder { mut names, functions } = finder;
    names.retain(|name| !functions.contains(name));
    let is_changed = matches!(
        statement,
        Statement::Drop { .. }
            | Statement::AlterIndex { .. }
            | Statement::CreateSequence { .. }
            | Statement::Comment { .. }
            | Statement::CreateTable(_)
            | Statement::AlterTable(_)
    );
    if is_changed {
        let mut statement = statement.clone();
        names.extend(unvisited(&mut statement).into_iter().map(|name| name.clone()));
    }
    names.retain(|name| {
        name.0.len() > 1 && !is_of_system(name, client) && !is_own(catalogue, name, client)
    });
    names
}

/// Whether a statement has a schema or database before a name that the catalogue does not know yet.
#[must_use]
pub fn has_foreign(catalogue: &Catalogue, statement: &Statement, client: Dialect) -> bool {
    !foreign(catalogue, statement, client).is_empty()
}

/// Refuses names of tables with a schema or database that the proxy does not show.
///
/// # Errors
/// The statement has such a name.
pub fn check(catalogue: &Catalogue, statement: &Statement, client: Dialect) -> Result<(), Refusal> {
    let found = foreign(catalogue, statement, client);
    let Some(name) = found.first() else { return Ok(()) };
    let before = qualifiers(name, client);
    Err(match (client, before.as_slice()) {
        (Dialect::PostgreSql, [.., schema]) if !catalogue.has_schema(schema) => Refusal {
            message: format!(
                "schema \"{schema}\" does not exist: the proxy shows one schema, \"{PUBLIC}\"; send the statement to a \
                 source directly"
            ),
            sqlstate: "3F000",
        },
        (Dialect::PostgreSql, _) => Refusal::unsupported(format!(
            "cross-database references are not implemented: {name}; leave the database out"
        )),
        (Dialect::MariaDb, _) => Refusal {
            message: format!(
                "Table '{}' doesn't exist: the proxy shows one database, and it does not have this name",
                before
                    .into_iter()
                    .chain([super::route::table_name(name)])
                    .collect::<Vec<_>>()
                    .join(".")
            ),
            sqlstate: "42P01",
        },
    })
}
