//! The mode `near`: a query of rows that its own transaction has changed, as a copy can answer it,
//! which does not have the changes. In the query, the table is replaced by its rows with the changes.
//!
//! The source compares the answer later, so an inexact overlay costs an abort and nothing else.

use sqlparser::ast::{
    Assignment, AssignmentTarget, Delete, Expr, FromTable, Ident, SetExpr, Statement, TableAlias,
    TableFactor, TableWithJoins,
};
use sqlparser::dialect::{MySqlDialect, PostgreSqlDialect};
use sqlparser::parser::Parser;

use super::super::catalog::Dialect;
use super::super::dialect::render;
use super::super::route::table_name;
use super::insert::rows_of;
use super::record::Record;

/// A query over the rows of `records`, as they are after `changes` of the same transaction, in this
/// order. All texts are in the source's dialect; `columns` are those of the table. None if the
/// changes cannot be expressed like that.
#[must_use]
pub fn overlaid(
    kind: Dialect,
    query: &str,
    records: &[&Record],
    changes: &[&str],
    columns: &[String],
) -> Option<String> {
    if changes.len() > CHANGES_MAX {
        return None;
    }
    // Sources read a backslash in a constant as it is, and the parser would not.
    if std::iter::once(&query).chain(changes).any(|text| text.contains('\\')) {
        return None;
    }
    let mut statement = parsed(kind, query)?;
    let Statement::Query(outer) = &mut statement else { return None };
    let SetExpr::Select(select) = &mut *outer.body else { return None };
    let [TableWithJoins { relation, .. }] = select.from.as_mut_slice() else { return None };
    let TableFactor::Table { name, alias, .. } = &*relation else { return None };
    let overlay = Overlay { kind, table: name.to_string(), columns };
    let mut rows = overlay.stored(records)?;
    for change in changes {
        rows = overlay.with(rows, &parsed(kind, change)?)?;
    }
    let alias = alias.clone().unwrap_or_else(|| TableAlias {
        explicit: true,
        name: name.0.last().and_then(|part| part.as_ident()).cloned().unwrap_or(Ident::new("t")),
        columns: Vec::new(),
        at: None,
    });
    // The parser cannot read the rows of a PostgreSQL query, so they are put into the text.
    let place = parsed(kind, &format!("SELECT 1 FROM {PLACE}"))?;
    let Statement::Query(place) = place else { return None };
    let SetExpr::Select(place) = *place.body else { return None };
    let mut factor = place.from.into_iter().next()?.relation;
    if let TableFactor::Table { alias: slot, .. } = &mut factor {
        *slot = Some(alias);
    }
    *relation = factor;
    let text = render(&statement, kind, kind);
    (text.matches(PLACE).count() == 1).then(|| text.replace(PLACE, &format!("({rows})")))
}

/// More changes of one query's rows are not overlaid: each one makes the query longer.
const CHANGES_MAX: usize = 8;

/// Stands for the rows in a query.
const PLACE: &str = "orthodrome_overlaid";

fn parsed(kind: Dialect, text: &str) -> Option<Statement> {
    let all = match kind {
        Dialect::PostgreSql => Parser::parse_sql(&PostgreSqlDialect {}, text),
        Dialect::MariaDb => Parser::parse_sql(&MySqlDialect {}, text),
    };
    let [one] = <[Statement; 1]>::try_from(all.ok()?).ok()?;
    Some(one)
}

/// The text of a part of a statement.
fn text_of(kind: Dialect, expr: &Expr) -> Option<String> {
    // Constants are written correctly only as part of a statement.
    let mut statement = parsed(kind, "SELECT 1 WHERE x")?;
    let Statement::Query(query) = &mut statement else { return None };
    let SetExpr::Select(select) = &mut *query.body else { return None };
    select.selection = Some(expr.clone());
    render(&statement, kind, kind).strip_prefix("SELECT 1 WHERE ").map(str::to_owned)
}

struct Overlay<'a> {
    kind: Dialect,
    table: String,
    columns: &'a [String],
}

impl Overlay<'_> {
    fn name(&self, column: &str) -> String {
        match self.kind {
            Dialect::PostgreSql => format!("\"{}\"", column.replace('"', "\"\"")),
            Dialect::MariaDb => format!("`{}`", column.replace('`', "``")),
        }
    }

    /// The rows that the copy has.
    fn stored(&self, records: &[&Record]) -> Option<String> {
        let conditions: Option<Vec<String>> =
            records.iter().map(|record| record.condition_at(self.kind)).collect();
        let conditions = conditions?;
        if conditions.is_empty() || self.columns.is_empty() {
            return None;
        }
        Some(format!(
            "SELECT {} FROM {} WHERE ({})",
            self.list(),
            self.table,
            conditions.join(") OR (")
        ))
    }

    fn list(&self) -> String {
        self.columns.iter().map(|column| self.name(column)).collect::<Vec<_>>().join(", ")
    }

    fn with(&self, rows: String, change: &Statement) -> Option<String> {
        match change {
            Statement::Update(update) => {
                let alias = self.alias(&update.table.relation)?;
                let met = self.met(update.selection.as_ref())?;
                self.updated(&rows, &alias, &met, &update.assignments)
            }
            Statement::Delete(delete) => self.deleted(&rows, delete),
            Statement::Insert(insert) => {
                let columns: Vec<String> = insert.columns.iter().map(table_name).collect();
                let mut all = rows;
                for row in rows_of(insert)? {
                    let mut values = Vec::new();
                    for column in self.columns {
                        let place = columns.iter().position(|one| one == column)?;
                        values.push(text_of(self.kind, row.get(place)?)?);
                    }
                    all = format!("{all} UNION ALL {}", self.inserted(&values));
                }
                Some(format!("SELECT * FROM ({all}) AS orthodrome_rows"))
            }
            _ => None,
        }
    }

    /// A row with these values, with the types of the columns.
    fn inserted(&self, values: &[String]) -> String {
        match self.kind {
            Dialect::PostgreSql => {
                let pairs = self.columns.iter().zip(values);
                let pair = |(column, value): (&String, &String)| {
                    format!("'{}', {value}", column.replace('\'', "''"))
                };
                let pairs: Vec<String> = pairs.map(pair).collect();
                format!(
                    "SELECT (jsonb_populate_record(NULL::{}, jsonb_build_object({}))).*",
                    self.table,
                    pairs.join(", ")
                )
            }
            Dialect::MariaDb => format!("SELECT {}", values.join(", ")),
        }
    }

    fn alias(&self, relation: &TableFactor) -> Option<String> {
        let TableFactor::Table { name, alias, .. } = relation else { return None };
        Some(match alias {
            Some(alias) => alias.name.to_string(),
            None => name.0.last()?.as_ident()?.to_string(),
        })
    }

    /// The condition of the rows that a change meets.
    fn met(&self, selection: Option<&Expr>) -> Option<String> {
        Some(format!("({}) IS TRUE", text_of(self.kind, selection?)?))
    }

    fn updated(
        &self,
        rows: &str,
        alias: &str,
        met: &str,
        assignments: &[Assignment],
    ) -> Option<String> {
        let mut changed: Vec<(String, String)> = Vec::new();
        for assignment in assignments {
            let AssignmentTarget::ColumnName(name) = &assignment.target else { return None };
            changed.push((table_name(name), text_of(self.kind, &assignment.value)?));
        }
        let list = match self.kind {
            Dialect::PostgreSql => {
                let pair = |(column, value): &(String, String)| {
                    format!("'{}', {value}", column.replace('\'', "''"))
                };
                let pairs: Vec<String> = changed.iter().map(pair).collect();
                format!(
                    "(jsonb_populate_record(NULL::{}, to_jsonb({alias}) || CASE WHEN {met} \
                     THEN jsonb_build_object({}) ELSE '{{}}'::jsonb END)).*",
                    self.table,
                    pairs.join(", ")
                )
            }
            Dialect::MariaDb => {
                // Later assignments see the values of earlier ones here.
                let reads_changed = changed.len() > 1
                    && changed.iter().any(|(column, _)| {
                        changed.iter().any(|(_, value)| value.to_lowercase().contains(column))
                    });
                if reads_changed {
                    return None;
                }
                let one = |column: &String| {
                    let name = self.name(column);
                    match changed.iter().find(|(other, _)| other == column) {
                        Some((_, value)) => format!("IF({met}, {value}, {name}) AS {name}"),
                        None => name,
                    }
                };
                self.columns.iter().map(one).collect::<Vec<_>>().join(", ")
            }
        };
        // PostgreSQL would put the inner query into each place that names one of its columns, and the
        // text would grow exponentially with the changes. It leaves a query with an offset alone.
        let fence = if self.kind == Dialect::PostgreSql { " OFFSET 0" } else { "" };
        Some(format!("SELECT {list} FROM ({rows}{fence}) AS {alias}"))
    }

    fn deleted(&self, rows: &str, delete: &Delete) -> Option<String> {
        let (FromTable::WithFromKeyword(from) | FromTable::WithoutKeyword(from)) = &delete.from;
        let alias = self.alias(&from.first()?.relation)?;
        let met = self.met(delete.selection.as_ref())?;
        Some(format!("SELECT * FROM ({rows}) AS {alias} WHERE NOT ({met})"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const READ: &str = "SELECT balance FROM accounts WHERE id = 5";

    fn of(kind: Dialect, changes: &[&str]) -> Option<String> {
        let (table, key) = ("accounts".to_owned(), "5".to_owned());
        let record = Record { table, key, condition: "\"id\" = '5'".into() };
        let columns = ["id".to_owned(), "balance".to_owned()];
        overlaid(kind, READ, &[&record], changes, &columns)
    }

    #[test]
    fn an_update_is_shown_to_a_later_query() {
        let update = "UPDATE accounts SET balance = balance + 1 WHERE id = 5";
        assert_eq!(
            of(Dialect::MariaDb, &[update]).unwrap(),
            "SELECT balance FROM (SELECT `id`, IF((id = 5) IS TRUE, balance + 1, `balance`) AS `balance` FROM \
             (SELECT `id`, `balance` FROM accounts WHERE (`id` = '5')) AS accounts) AS accounts WHERE id = 5"
        );
        let postgres = of(Dialect::PostgreSql, &[update, update]).unwrap();
        assert_eq!(postgres.matches("jsonb_populate_record").count(), 2, "{postgres}");
        assert!(postgres.contains("'balance', balance + 1"), "{postgres}");
        assert_eq!(postgres.matches("OFFSET 0").count(), 2, "{postgres}");
        assert_eq!(of(Dialect::PostgreSql, &[update; CHANGES_MAX + 1]), None);
    }

    #[test]
    fn quotes_in_constants_remain() {
        let update = "UPDATE accounts SET balance = 'it''s' WHERE id = 5";
        for kind in [Dialect::PostgreSql, Dialect::MariaDb] {
            let query = of(kind, &[update]).unwrap();
            assert!(query.contains("'it''s'"), "{query}");
        }
    }

    #[test]
    fn deleted_and_inserted_rows_are_shown() {
        let deleted = of(Dialect::MariaDb, &["DELETE FROM accounts WHERE id = 5"]).unwrap();
        assert!(deleted.contains("WHERE NOT ((id = 5) IS TRUE)"), "{deleted}");
        let insert = "INSERT INTO accounts (balance, id) VALUES (7, 5)";
        let inserted = of(Dialect::MariaDb, &[insert]).unwrap();
        assert!(inserted.contains("UNION ALL SELECT 5, 7"), "{inserted}");
    }

    #[test]
    fn what_cannot_be_expressed_is_not_overlaid() {
        for change in [
            "INSERT INTO accounts (id) VALUES (5)",
            "UPDATE accounts SET balance = 'a\\b' WHERE id = 5",
        ] {
            assert_eq!(of(Dialect::MariaDb, &[change]), None, "{change}");
        }
    }
}
