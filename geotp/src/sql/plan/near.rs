//! The mode `near`: which statements can be answered before their source has executed them, and the
//! SQL with which the source later checks that the answers were right (docs/adr/0042).
//!
//! A statement is *foreseeable* if it reads or changes rows of one table that it names by their
//! keys, and does nothing else. The proxy gets its answer from a copy of the rows, without locks. At
//! the commit the source executes the statement, compares its answer, and fails if it differs.

use sqlparser::ast::{
    AssignmentTarget, BinaryOperator, Expr, FromTable, GroupByExpr, Ident, Insert, ObjectName,
    Query, Select, SetExpr, Statement, TableFactor, TableObject, TableWithJoins, Update,
};
use sqlparser::dialect::PostgreSqlDialect;
use sqlparser::parser::Parser;

use super::super::catalog::{Catalogue, Dialect, KeyType, Placement, Table};
use super::super::dialect::bind;
use super::super::generated::list_assignments;
use super::super::route::{Names, Router, constant};
use super::super::set::effects;
use super::super::value::{Answer, Cell, Column, Key, Kind, Value};
use super::aggregate::Contains;
use super::checks::{check_deterministic, queries};
use super::insert::{columns_of, rows_of};
use super::record::Record;

/// The text by which errors of checks are recognized.
pub const DIFFERS: &str = "orthodrome_differs";

/// What a foreseeable statement does with its rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Does {
    /// It reads them.
    Read,
    /// It changes them.
    Update,
    /// It deletes them.
    Delete,
    /// It inserts them.
    Insert,
}

/// A foreseeable statement.
#[derive(Clone, PartialEq, Debug)]
pub struct Foreseeable {
    /// What it does with its rows.
    pub does: Does,
    /// For a change, a query that counts the rows that it would meet.
    pub question: Option<Statement>,
    /// True if no condition restricts its rows, except that they have these keys.
    pub is_exact: bool,
    /// The order of its rows matters.
    pub is_ordered: bool,
    /// The number of columns that an INSERT lists; none if it gives all columns.
    pub listed: Option<usize>,
}

/// Whether a statement is foreseeable.
#[must_use]
pub fn foresee(
    catalogue: &Catalogue,
    statement: &Statement,
    parameters: &[Value],
    client: Dialect,
) -> Option<Foreseeable> {
    // The syntax of bytes differs between sources.
    if parameters.iter().any(|value| matches!(value, Value::Bytes(_))) {
        return None;
    }
    let mut statement = statement.clone();
    if let Statement::Insert(insert) = &mut statement {
        list_assignments(insert);
    }
    bind(&mut statement, parameters, client).ok()?;
    if !is_pure(&statement) {
        return None;
    }
    let router = Router { catalogue, by_key: false };
    match &statement {
        Statement::Query(query) => read(&router, query),
        Statement::Update(update) => change(&router, update),
        Statement::Delete(delete) => {
            let (FromTable::WithFromKeyword(from) | FromTable::WithoutKeyword(from)) = &delete.from;
            let is_plain = delete.tables.is_empty()
                && delete.using.is_none()
                && delete.returning.is_none()
                && delete.output.is_none()
                && delete.order_by.is_empty()
                && delete.limit.is_none();
            let (is_exact, table) = keyed(&router, from, delete.selection.as_ref())?;
            if !is_plain || is_copied(table) {
                return None;
            }
            let question = question(from.clone(), delete.selection.clone())?;
            let question = Some(question);
            Some(Foreseeable {
                does: Does::Delete,
                question,
                is_exact,
                is_ordered: false,
                listed: None,
            })
        }
        Statement::Insert(insert) => insertion(&router, insert),
        _ => None,
    }
}

/// Whether a statement has the same effect and answer wherever and whenever it runs, as long as the
/// rows are the same.
fn is_pure(statement: &Statement) -> bool {
    let effects = effects(statement);
    let own = match statement {
        Statement::Query(_) => 1,
        Statement::Insert(insert) => usize::from(insert.source.is_some()),
        _ => 0,
    };
    effects.of_a_session.is_empty()
        && effects.user_variable.is_none()
        && !effects.has_into
        && !effects.calls_unknown
        && check_deterministic(statement, "").is_ok()
        && queries(statement) == own
        // A copy that sleeps would pass for one that does not answer.
        && !statement.to_string().to_lowercase().contains("sleep")
}

fn is_copied(table: &Table) -> bool {
    matches!(table.placement, Placement::Broadcast(_))
}

/// The table, if the conditions name all rows of one table by their keys; and whether that is all
/// they do.
fn keyed<'a>(
    router: &'a Router<'a>,
    from: &'a [TableWithJoins],
    selection: Option<&'a Expr>,
) -> Option<(bool, &'a Table)> {
    let [only] = from else { return None };
    let is_plain = matches!(
        &only.relation,
        TableFactor::Table {
            args: None,
            with_hints,
            version: None,
            partitions,
            sample: None,
            ..
        } if with_hints.is_empty() && partitions.is_empty()
    );
    if !is_plain || !only.joins.is_empty() {
        return None;
    }
    let names = Names::default();
    let scope = router.scope(from, selection, &names).ok()?;
    if !scope.names_all() {
        return None;
    }
    let is_exact = scope.names_only();
    let table = scope.tables.first()?.table;
    Some((is_exact, table))
}

fn read(router: &Router<'_>, query: &Query) -> Option<Foreseeable> {
    let SetExpr::Select(select) = &*query.body else { return None };
    let Select { distinct: None, top: None, having: None, qualify: None, .. } = &**select else {
        return None;
    };
    let is_plain = query.with.is_none()
        && query.fetch.is_none()
        && query.locks.is_empty()
        && query.for_clause.is_none()
        && matches!(&select.group_by, GroupByExpr::Expressions(by, _) if by.is_empty());
    let found = Contains::of(&select.projection);
    let (is_exact, _) = keyed(router, &select.from, select.selection.as_ref())?;
    if !is_plain || found.aggregate || found.window || select.projection.is_empty() {
        return None;
    }
    let is_exact = is_exact && query.limit_clause.is_none();
    let is_ordered = query.order_by.is_some();
    Some(Foreseeable { does: Does::Read, question: None, is_exact, is_ordered, listed: None })
}

fn change(router: &Router<'_>, update: &Update) -> Option<Foreseeable> {
    let from = std::slice::from_ref(&update.table);
    let is_plain = update.from.is_none()
        && update.returning.is_none()
        && update.output.is_none()
        && update.or.is_none()
        && update.order_by.is_empty()
        && update.limit.is_none();
    let (is_exact, table) = keyed(router, from, update.selection.as_ref())?;
    let keeps_key = update.assignments.iter().all(|assignment| match &assignment.target {
        AssignmentTarget::ColumnName(name) => {
            let column = super::super::route::table_name(name);
            !table.primary.contains(&column)
        }
        AssignmentTarget::Tuple(_) => false,
    });
    if !is_plain || !keeps_key || is_copied(table) {
        return None;
    }
    let question = question(from.to_vec(), update.selection.clone())?;
    let question = Some(question);
    Some(Foreseeable { does: Does::Update, question, is_exact, is_ordered: false, listed: None })
}

fn insertion(router: &Router<'_>, insert: &Insert) -> Option<Foreseeable> {
    let TableObject::TableName(name) = &insert.table else { return None };
    let is_plain = insert.or.is_none()
        && !insert.ignore
        && !insert.overwrite
        && !insert.replace_into
        && insert.on.is_none()
        && insert.returning.is_none()
        && insert.output.is_none()
        && insert.partitioned.is_none()
        && insert.insert_alias.is_none();
    let table = router.table(name).ok()??;
    if !is_plain || table.primary.is_empty() || is_copied(table) {
        return None;
    }
    let columns = columns_of(insert, table);
    let mut any: Option<Expr> = None;
    for row in rows_of(insert)? {
        let mut all: Option<Expr> = None;
        for column in &table.primary {
            let value = *row.get(columns.iter().position(|one| one == column)?)?;
            let key =
                constant(value, KeyType::Integer).or_else(|| constant(value, KeyType::Text))?;
            // In MariaDB, 0 means the next number of an auto-increment column.
            if table.generated.as_ref() == Some(column) && key == Key::Int(0) {
                return None;
            }
            let column = Expr::Identifier(Ident::new(column.clone()));
            all = Some(both(
                all,
                BinaryOperator::And,
                both(Some(column), BinaryOperator::Eq, value.clone()),
            ));
        }
        let all = Expr::Nested(Box::new(all?));
        any = Some(both(any, BinaryOperator::Or, all));
    }
    let mut question = question(Vec::new(), any)?;
    if let Statement::Query(query) = &mut question
        && let SetExpr::Select(select) = &mut *query.body
    {
        let factor = named_factor(name)?;
        select.from = vec![TableWithJoins { relation: factor, joins: Vec::new() }];
    }
    let (question, is_exact) = (Some(question), true);
    let listed = (!insert.columns.is_empty()).then_some(insert.columns.len());
    Some(Foreseeable { does: Does::Insert, question, is_exact, is_ordered: false, listed })
}

/// A table in a FROM clause.
fn named_factor(name: &ObjectName) -> Option<TableFactor> {
    let parsed = Parser::parse_sql(&PostgreSqlDialect {}, "SELECT 1 FROM x").ok()?;
    let Some(Statement::Query(query)) = parsed.into_iter().next() else { return None };
    let SetExpr::Select(select) = *query.body else { return None };
    let mut factor = select.from.into_iter().next()?.relation;
    if let TableFactor::Table { name: slot, .. } = &mut factor {
        *slot = name.clone();
    }
    Some(factor)
}

fn both(left: Option<Expr>, op: BinaryOperator, right: Expr) -> Expr {
    match left {
        None => right,
        Some(left) => Expr::BinaryOp { left: Box::new(left), op, right: Box::new(right) },
    }
}

/// `SELECT count(*) FROM … WHERE …`
fn question(from: Vec<TableWithJoins>, selection: Option<Expr>) -> Option<Statement> {
    let parsed = Parser::parse_sql(&PostgreSqlDialect {}, "SELECT count(*) FROM x").ok()?;
    let Some(Statement::Query(mut query)) = parsed.into_iter().next() else { return None };
    let SetExpr::Select(select) = &mut *query.body else { return None };
    select.selection = selection;
    select.from = from;
    Some(Statement::Query(query))
}

/// The rows of an answer as texts, in the form in which a check at a source of this kind hashes
/// them.
#[must_use]
pub fn hashed_cells(kind: Dialect, answer: &Answer) -> Vec<Vec<Cell>> {
    let is_hex = |column: Option<&Column>| {
        kind == Dialect::PostgreSql && column.is_some_and(|column| column.kind == Kind::Bytes)
    };
    let cell = |(place, cell): (usize, &Cell)| {
        let cell = cell.as_ref()?;
        Some(if is_hex(answer.columns.get(place)) { hex_of(cell) } else { cell.clone() })
    };
    answer.rows.iter().map(|row| row.iter().enumerate().map(cell).collect()).collect()
}

/// Bytes as PostgreSQL prints them.
fn hex_of(bytes: &[u8]) -> Vec<u8> {
    let mut text = String::from("\\x");
    for byte in bytes {
        text.push_str(&format!("{byte:02x}"));
    }
    text.into_bytes()
}

/// A query that fails if the rows of the query `text` are others than those with `digest`: the
/// hashes of all rows, in order of the hashes. The hash of a row is that of its cells' hashes; `~`
/// stands for NULL.
#[must_use]
pub fn read_check(kind: Dialect, text: &str, columns: &[Column], digest: &str) -> String {
    let names: Vec<String> = (1..=columns.len()).map(|number| format!("c{number}")).collect();
    let list = names.join(", ");
    match kind {
        Dialect::PostgreSql => {
            let cell = |name: &String| {
                format!(
                    "CASE WHEN {name} IS NOT DISTINCT FROM NULL THEN '~' \
                     ELSE encode(sha256(convert_to(concat({name}), 'UTF8')), 'hex') END"
                )
            };
            let cells: Vec<String> = names.iter().map(cell).collect();
            // The list may be shorter than the columns. The union fails if the table has more by now.
            let nulls = vec!["NULL"; names.len()].join(", ");
            format!(
                "SELECT CAST(CASE WHEN (SELECT coalesce(string_agg(d, '' ORDER BY d COLLATE \"C\"), '') FROM \
                 (SELECT encode(sha256(convert_to(concat({}), 'UTF8')), 'hex') AS d FROM \
                 (SELECT * FROM ({text}) AS p UNION ALL SELECT {nulls} WHERE false) AS q ({list})) AS r) \
                 = '{digest}' THEN '0' ELSE '{DIFFERS}' END AS int)",
                cells.join(", ")
            )
        }
        Dialect::MariaDb => {
            let cell = |(name, column): (&String, &Column)| match column.kind {
                Kind::Bytes => format!("IFNULL(SHA2({name}, 256), '~')"),
                _ => format!("IFNULL(SHA2(CONVERT({name} USING utf8mb4), 256), '~')"),
            };
            let cells: Vec<String> = names.iter().zip(columns).map(cell).collect();
            format!(
                "WITH q ({list}) AS ({text}) SELECT {ABOVE} FROM (SELECT IF(COALESCE(GROUP_CONCAT(d ORDER BY d SEPARATOR ''), '') \
                 = '{digest}', 0, 1) AS {DIFFERS} FROM (SELECT SHA2(CONCAT({}), 256) AS d FROM q) AS r) AS s",
                cells.join(", ")
            )
        }
    }
}

/// Fails if the column `orthodrome_differs` is 1, with an error that has this name.
const ABOVE: &str = "18446744073709551615 + orthodrome_differs";

/// A change, and a check that fails if the number of its rows is not `count`.
#[must_use]
pub fn counted(kind: Dialect, text: &str, count: u64) -> Vec<String> {
    match kind {
        Dialect::PostgreSql => vec![format!(
            "WITH orthodrome_done AS ({text} RETURNING 1) SELECT CAST(CASE WHEN count(*) = {count} THEN '0' ELSE '{DIFFERS}' END \
             AS int) FROM orthodrome_done"
        )],
        Dialect::MariaDb => vec![
            text.to_owned(),
            format!(
                "SELECT {ABOVE} FROM (SELECT IF(ROW_COUNT() = {count}, 0, 1) AS {DIFFERS} UNION ALL SELECT 0) AS s"
            ),
        ],
    }
}

/// How a transaction locks a record before it checks anything.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Strength {
    /// It is only read.
    Share,
    /// It is changed.
    Update,
    /// It is deleted.
    Delete,
}

/// PostgreSQL has at most 1664 columns in one query.
const COLUMNS_MAX: usize = 1_000;

/// Queries that lock records in this order. Transactions that lock their records in the same order
/// do not wait for each other in a cycle.
#[must_use]
pub fn locks(kind: Dialect, records: &[(&Record, Strength)]) -> Vec<String> {
    let of = |&(record, strength): &(&Record, Strength)| {
        let (condition, table) = (record.condition_at(kind)?, record.table_at(kind)?);
        let lock = match (kind, strength) {
            (Dialect::PostgreSql, Strength::Share) => "FOR SHARE",
            (Dialect::PostgreSql, Strength::Update) => "FOR NO KEY UPDATE",
            (Dialect::MariaDb, Strength::Share) => "LOCK IN SHARE MODE",
            (_, Strength::Update | Strength::Delete) => "FOR UPDATE",
        };
        Some(format!("SELECT 1 FROM {table} WHERE {condition} {lock}"))
    };
    let all: Vec<String> = records.iter().filter_map(of).collect();
    match kind {
        Dialect::PostgreSql if all.len() > 1 => {
            let one =
                |text: &String| format!("(SELECT count(*) FROM ({text}) AS orthodrome_locked)");
            let columns: Vec<String> = all.iter().map(one).collect();
            columns.chunks(COLUMNS_MAX).map(|some| format!("SELECT {}", some.join(", "))).collect()
        }
        _ => all,
    }
}
