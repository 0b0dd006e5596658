//! Untyped constants of a PostgreSQL client. PostgreSQL gives each the type of the column that it
//! is compared with or written to; MariaDB takes it as text. So a constant for a MariaDB source
//! that would have another meaning there is converted according to the type of its column.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use sqlparser::ast::{
    AssignmentTarget, BinaryOperator, Expr, Ident, Insert, ObjectName, SetExpr, Statement,
    TableObject, Value as SqlValue, ValueWithSpan, Visitor, VisitorMut,
};

use super::Refusal;
use super::catalog::Catalogue;
use super::dialect::hex_of;
use super::route::table_name;
use super::value::{Kind, Value};
use super::walk::{walk, walk_mut};

/// The columns of tables at a MariaDB source, by the table's name. Names are in lower case, and
/// columns in the table's order.
pub type Kinds = BTreeMap<String, Vec<(String, Kind)>>;

/// Tables whose columns must be known before a statement of a PostgreSQL client can be translated
/// for a MariaDB source: the tables that it names, if it has an untyped constant or parameter whose
/// meaning depends on the type of a column.
#[must_use]
pub fn tables_to_know(
    catalogue: &Catalogue,
    statement: &Statement,
    parameters: &[Value],
) -> Vec<String> {
    struct Finder<'a> {
        catalogue: &'a Catalogue,
        is_wanted: bool,
        tables: Vec<String>,
    }
    impl Visitor for Finder<'_> {
        type Break = ();
        fn pre_visit_value(&mut self, value: &ValueWithSpan) -> ControlFlow<()> {
            self.is_wanted |= text_of(&value.value).is_some_and(depends_on_type);
            ControlFlow::Continue(())
        }
        fn pre_visit_relation(&mut self, name: &ObjectName) -> ControlFlow<()> {
            let name = table_name(name);
            if self.catalogue.table(&name).is_some() && !self.tables.contains(&name) {
                self.tables.push(name);
            }
            ControlFlow::Continue(())
        }
    }
    let is_wanted = parameters.iter().any(|value| match value {
        Value::Text(text) => depends_on_type(text),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Bytes(_) => false,
    });
    let mut finder = Finder { catalogue, is_wanted, tables: Vec::new() };
    let _ = walk(statement, &mut finder);
    if finder.is_wanted { finder.tables } else { Vec::new() }
}

/// Whether a text has another meaning as bytes or as a boolean than as text.
fn depends_on_type(text: &str) -> bool {
    let is_array = text.trim_start().starts_with('{');
    let has_truth = |text: &str| text.split([',', '{', '}', '"']).any(|one| truth(one).is_some());
    text.contains('\\') || truth(text).is_some() || is_array && has_truth(text)
}

/// Parses a text that PostgreSQL accepts as a boolean and MariaDB does not as a number.
fn truth(text: &str) -> Option<bool> {
    let text = text.trim().to_ascii_lowercase();
    // Any unambiguous prefix of these words. `on` and `off` share their first letter.
    let begins = |word: &str| !text.is_empty() && word.starts_with(&text);
    if begins("true") || begins("yes") || text == "on" {
        Some(true)
    } else if begins("false") || begins("no") || (begins("off") && text.len() > 1) {
        Some(false)
    } else {
        None
    }
}

fn text_of(value: &SqlValue) -> Option<&str> {
    match value {
        SqlValue::SingleQuotedString(text)
        | SqlValue::EscapedStringLiteral(text)
        | SqlValue::UnicodeStringLiteral(text) => Some(text),
        SqlValue::DollarQuotedString(text) => Some(&text.value),
        _ => None,
    }
}

/// Converts the constants of a statement for a MariaDB source to the types of its tables' columns.
///
/// # Errors
/// A constant for a column of bytes is not valid as bytes in PostgreSQL.
pub(super) fn convert(statement: &mut Statement, kinds: &Kinds) -> Result<(), Refusal> {
    if kinds.is_empty() {
        return Ok(());
    }
    if let Statement::Insert(insert) = statement {
        convert_rows(insert, kinds)?;
    }
    if let Statement::Update(update) = statement {
        for assignment in &mut update.assignments {
            if let AssignmentTarget::ColumnName(name) = &assignment.target {
                retype(&mut assignment.value, kind_of(kinds, &table_name(name)))?;
            }
        }
    }
    walk_mut(statement, &mut Comparisons(kinds))
}

fn convert_rows(insert: &mut Insert, kinds: &Kinds) -> Result<(), Refusal> {
    let TableObject::TableName(name) = &insert.table else { return Ok(()) };
    let Some(all) = kinds.get(&table_name(name)) else { return Ok(()) };
    let of = |column: &ObjectName| {
        let column = table_name(column);
        all.iter().find(|(name, _)| *name == column).map(|(_, kind)| *kind)
    };
    let columns: Vec<Option<Kind>> = if insert.columns.is_empty() {
        all.iter().map(|(_, kind)| Some(*kind)).collect()
    } else {
        insert.columns.iter().map(of).collect()
    };
    let Some(SetExpr::Values(values)) = insert.source.as_mut().map(|query| &mut *query.body) else {
        return Ok(());
    };
    for row in &mut values.rows {
        for (value, kind) in row.content.iter_mut().zip(&columns) {
            retype(value, *kind)?;
        }
    }
    Ok(())
}

/// The kind of a column, if every table that has one of this name agrees.
fn kind_of(kinds: &Kinds, column: &str) -> Option<Kind> {
    let mut found = kinds.values().flatten().filter(|(name, _)| name == column);
    let (_, kind) = found.next()?;
    found.all(|(_, other)| other == kind).then_some(*kind)
}

/// Converts one constant to the type of its column.
fn retype(expr: &mut Expr, kind: Option<Kind>) -> Result<(), Refusal> {
    let Expr::Value(constant) = expr else { return Ok(()) };
    let Some(text) = text_of(&constant.value) else { return Ok(()) };
    match kind {
        Some(Kind::Bytes) if text.contains('\\') => {
            constant.value = SqlValue::HexStringLiteral(hex_of(text)?);
        }
        Some(Kind::Bool | Kind::Int2 | Kind::Int4 | Kind::Int8) => {
            if let Some(is) = truth(text) {
                constant.value = SqlValue::Boolean(is);
            }
        }
        _ => {}
    }
    Ok(())
}

/// Visits constants that are compared with a column.
struct Comparisons<'a>(&'a Kinds);

impl Comparisons<'_> {
    fn kind(&self, expr: &Expr) -> Option<Kind> {
        // In MariaDB, names of columns are not case-sensitive.
        let lower = |name: &Ident| name.value.to_lowercase();
        match expr {
            Expr::Identifier(name) => kind_of(self.0, &lower(name)),
            Expr::CompoundIdentifier(names) => kind_of(self.0, &lower(names.last()?)),
            Expr::Nested(inner) => self.kind(inner),
            _ => None,
        }
    }

    fn compared(&self, expr: &mut Expr) -> Result<(), Refusal> {
        match expr {
            Expr::BinaryOp {
                left,
                op:
                    BinaryOperator::Eq
                    | BinaryOperator::NotEq
                    | BinaryOperator::Lt
                    | BinaryOperator::LtEq
                    | BinaryOperator::Gt
                    | BinaryOperator::GtEq,
                right,
            }
            | Expr::IsDistinctFrom(left, right)
            | Expr::IsNotDistinctFrom(left, right) => {
                let (of_left, of_right) = (self.kind(left), self.kind(right));
                retype(left, of_right)?;
                retype(right, of_left)
            }
            Expr::InList { expr, list, .. } => {
                let kind = self.kind(expr);
                list.iter_mut().try_for_each(|one| retype(one, kind))
            }
            Expr::Between { expr, low, high, .. } => {
                let kind = self.kind(expr);
                retype(low, kind)?;
                retype(high, kind)
            }
            _ => Ok(()),
        }
    }
}

impl VisitorMut for Comparisons<'_> {
    type Break = Refusal;
    fn pre_visit_expr(&mut self, expr: &mut Expr) -> ControlFlow<Refusal> {
        match self.compared(expr) {
            Ok(()) => ControlFlow::Continue(()),
            Err(refusal) => ControlFlow::Break(refusal),
        }
    }
}
