//! INSERT: distributes rows over sources.

use orthodrome_core::ordered::{OrdMap, OrdSet};

use sqlparser::ast::{
    Assignment, AssignmentTarget, Expr, Insert, OnConflictAction, OnInsert, SetExpr, Statement,
    TableObject,
};

use super::super::Refusal;
use super::super::catalog::{Placement, SourceId, Table};
use super::super::merge::Merge;
use super::super::route::{Route, constant, one_place, subqueries, table_name};
use super::checks::{OTHER_COPIES, check_deterministic};
use super::record::Named;
use super::{Names, Part, Plan, Planner};

/// For each source, the numbers of the rows that are placed there, and their records.
type SplitRows = OrdMap<SourceId, (Vec<usize>, Named)>;

impl Planner<'_> {
    pub(super) fn insert(&self, statement: &Statement, insert: &Insert) -> Result<Plan, Refusal> {
        let TableObject::TableName(name) = &insert.table else {
            return Err(Refusal::unsupported("an INSERT names a table"));
        };
        let Some(table) = self.router.table(name)? else {
            return Err(Refusal::unsupported("the sources' own catalogues cannot be changed"));
        };
        let has_rows = insert.returning.is_some();
        let named = inserted(insert, table, self.context.by_key);
        self.check_named(statement, named.unnamed.is_none() && !named.records.is_empty())?;
        let names = Names::default();
        let mut nested = Route::Free;
        for query in subqueries(statement) {
            if !matches!(&*query.body, SetExpr::Values(_)) {
                nested = one_place(nested, self.router.route_query(&query, &names)?)?;
            }
        }
        let (parts, merge) = match &table.placement {
            Placement::Single(source) => {
                one_place(nested, Route::All([*source].into()))?;
                (self.whole_insert(statement, insert, table, &[*source].into())?, Merge::Only)
            }
            Placement::Broadcast(sources) => {
                check_deterministic(statement, OTHER_COPIES)?;
                if !matches!(one_place(nested, Route::AnyOf(sources.clone()))?, Route::AnyOf(found) if found == *sources)
                {
                    return Err(Refusal::unsupported(
                        "every copy must get the same rows, but not every source can read them",
                    ));
                }
                (self.whole_insert(statement, insert, table, sources)?, Merge::Same)
            }
            Placement::Sharded(sharding) => {
                let split = self.split_rows(insert, table, nested)?;
                check_unmoved(insert, &sharding.column)?;
                let numbers = split.values().map(|(rows, _)| rows.clone()).collect();
                (self.divided_insert(statement, split)?, Merge::InOrder(numbers))
            }
        };
        let merge = if parts.len() == 1 { Merge::Only } else { merge };
        Ok(Plan { parts, merge, is_write: true, has_rows })
    }

    /// Sends all rows to each of these sources.
    fn whole_insert(
        &self,
        statement: &Statement,
        insert: &Insert,
        table: &Table,
        sources: &OrdSet<SourceId>,
    ) -> Result<Vec<Part>, Refusal> {
        let part = |&source: &SourceId| {
            let statement = self.rebound(statement, source)?;
            self.part(&statement, source, inserted(insert, table, self.context.by_key))
        };
        sources.iter().map(part).collect()
    }

    /// Sends each source the rows that are placed there.
    fn divided_insert(
        &self,
        statement: &Statement,
        split: SplitRows,
    ) -> Result<Vec<Part>, Refusal> {
        let part = |(source, (rows, named)): (SourceId, (Vec<usize>, Named))| {
            let mut statement = self.rebound(statement, source)?;
            if let Statement::Insert(insert) = &mut statement {
                keep_rows(insert, &rows);
            }
            self.part(&statement, source, named)
        };
        split.into_iter().map(part).collect()
    }

    /// The placement of an insert's rows, by their numbers.
    fn split_rows(
        &self,
        insert: &Insert,
        table: &Table,
        nested: Route,
    ) -> Result<SplitRows, Refusal> {
        let Placement::Sharded(sharding) = &table.placement else { return Ok(SplitRows::new()) };
        let columns = columns_of(insert, table);
        if columns.is_empty() {
            return Err(Refusal::unsupported(format!(
                "list the columns of this INSERT, or give tables.{}.columns in the proxy's file, so that \"{}\" can be \
                 found among its values",
                table.name, sharding.column,
            )));
        }
        let Some(at) = columns.iter().position(|c| *c == sharding.column) else {
            return Err(Refusal::unsupported(format!(
                "this INSERT has no value for \"{}\", the sharding column of \"{}\"",
                sharding.column, table.name,
            )));
        };
        let Some(rows) = rows_of(insert) else {
            return Err(Refusal::unsupported(format!(
                "rows of \"{}\" are placed one by one, and a query's rows are not known here; select them, then \
                 insert their values",
                table.name,
            )));
        };
        if !matches!(nested, Route::Free) {
            return Err(Refusal::unsupported(
                "a subquery in the values of a sharded INSERT is not supported; select the values first",
            ));
        }
        let mut split = SplitRows::new();
        for (number, row) in rows.iter().enumerate() {
            let value = row.get(at).ok_or_else(|| {
                Refusal::syntax(format!("row {} has fewer values than columns", number + 1))
            })?;
            let key = constant(value, sharding.key).ok_or_else(|| {
                Refusal::unsupported(format!(
                    "the value of \"{}\" must be a constant, so that the row can be placed",
                    sharding.column
                ))
            })?;
            let source = sharding.layout.place(&key).ok_or_else(|| {
                Refusal::data(format!(
                    "no source is listed for {} = {key}; add it to tables.{}.shard.parts",
                    sharding.column, table.name
                ))
            })?;
            let (rows, named) = split.entry(source).or_default();
            rows.push(number);
            named.add(table, &columns, row, self.context.by_key);
        }
        Ok(split)
    }
}

/// Refuses an insert that would move an existing row to another source.
fn check_unmoved(insert: &Insert, column: &str) -> Result<(), Refusal> {
    let changes: &[Assignment] = match &insert.on {
        Some(OnInsert::DuplicateKeyUpdate(changes)) => changes,
        Some(OnInsert::OnConflict(conflict)) => match &conflict.action {
            OnConflictAction::DoUpdate(update) => &update.assignments,
            OnConflictAction::DoNothing => &[],
        },
        _ => &[],
    };
    let is_moved = |change: &Assignment| matches!(&change.target, AssignmentTarget::ColumnName(name) if table_name(name) == column);
    if changes.iter().any(is_moved) {
        return Err(Refusal::unsupported(format!(
            "column \"{column}\" is the sharding column and cannot be changed"
        )));
    }
    Ok(())
}

/// The records of an insert whose rows are all at the same sources.
fn inserted(insert: &Insert, table: &Table, by_key: bool) -> Named {
    let (columns, mut named) = (columns_of(insert, table), Named::default());
    match rows_of(insert) {
        Some(rows) => rows.iter().for_each(|row| named.add(table, &columns, row, by_key)),
        None if table.primary.is_empty() => {}
        None => named.unnamed = Some(table.name.clone()),
    }
    named
}

/// The columns for which an insert has values.
pub(super) fn columns_of(insert: &Insert, table: &Table) -> Vec<String> {
    let assigned: Vec<String> = insert
        .assignments
        .iter()
        .filter_map(|a| match &a.target {
            AssignmentTarget::ColumnName(name) => Some(table_name(name)),
            AssignmentTarget::Tuple(_) => None,
        })
        .collect();
    if !assigned.is_empty() {
        assigned
    } else if insert.columns.is_empty() {
        table.columns.clone()
    } else {
        insert.columns.iter().map(table_name).collect()
    }
}

/// The values of an insert, row by row; none if they come from a query.
pub(super) fn rows_of(insert: &Insert) -> Option<Vec<Vec<&Expr>>> {
    match insert.source.as_ref().map(|q| &*q.body) {
        Some(SetExpr::Values(values)) => {
            Some(values.rows.iter().map(|row| row.content.iter().collect()).collect())
        }
        None if !insert.assignments.is_empty() => {
            Some(vec![insert.assignments.iter().map(|a| &a.value).collect()])
        }
        _ => None,
    }
}

/// Keeps only the rows of an insert with these numbers.
fn keep_rows(insert: &mut Insert, keep: &[usize]) {
    if let Some(SetExpr::Values(values)) = insert.source.as_mut().map(|q| &mut *q.body) {
        let mut number = 0;
        values.rows.retain(|_| {
            number += 1;
            keep.binary_search(&(number - 1)).is_ok()
        });
    }
}
