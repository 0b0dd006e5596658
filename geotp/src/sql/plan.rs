//! What each source is told, and how their answers become the client's.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;

use sqlparser::ast::{
    Assignment, AssignmentTarget, Distinct, DuplicateTreatment, Expr, FromTable, Function,
    FunctionArg, FunctionArgExpr, FunctionArguments, GroupByExpr, Ident, LimitClause, LockClause,
    LockType, NonBlock, ObjectType, OnConflictAction, OnInsert, Query, Select, SelectItem, SetExpr,
    Statement, TableObject, TableWithJoins, UpdateTableFromKind, Value as SqlValue, Visit,
    VisitMut, Visitor, VisitorMut,
};
use sqlparser::ast::{ObjectName, ObjectNamePart, OrderByKind, OrderBySort};
use sqlparser::tokenizer::Span;

use super::Refusal;
use super::catalog::{Catalogue, Dialect, KeyType, Placement, SourceId, Table};
use super::dialect::{bind, nulls_first, render, translate};
use super::merge::{At, Merge, Op, RowMerge, SortKey};
use super::parse::Isolation;
use super::route::{
    Names, RECORDS_MAX, Route, Router, Scope, constant, one_place, subqueries, table_name,
};
use super::typed::{self, Kinds};
use super::value::{Key, Value};

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
    pub(super) fn new(table: &Table, values: &[&Key]) -> Self {
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

/// What one source is told.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Part {
    /// The source.
    pub source: SourceId,
    /// Statements that lock what `text` reads; their answers are not wanted.
    pub prelude: Vec<String>,
    /// The statement, in the source's dialect.
    pub text: String,
    /// The records it names there.
    pub records: Vec<Record>,
    /// Those that must be seen to.
    pub keys: Keys,
}

/// How a statement is carried out.
#[derive(Clone, PartialEq, Debug)]
pub struct Plan {
    /// What each source is told; none if the statement concerns no table of the catalogue.
    pub parts: Vec<Part>,
    /// How the answers become one.
    pub merge: Merge,
    /// It changes rows.
    pub is_write: bool,
    /// It answers with rows.
    pub has_rows: bool,
}

/// What a plan depends on besides the statement.
#[derive(Clone, Debug)]
pub struct Context {
    /// What the client speaks.
    pub client: Dialect,
    /// The transaction's level.
    pub isolation: Isolation,
    /// Where to read what several sources have: the first of these that has it.
    pub prefer: Vec<SourceId>,
    /// Columns of tables at MariaDB sources, where the statement has constants whose meaning depends on them
    /// ([`tables_to_know`](super::typed::tables_to_know)).
    pub kinds: Kinds,
    /// Every row that is read or changed must be named by its key, and what is written must be the same when it is
    /// written again: concurrency is controlled record by record, as by [`crate::scalardb`].
    pub by_key: bool,
}

/// Plans a statement that reads or changes rows, or a change of the schema.
///
/// # Errors
/// It cannot be carried out as one unsharded database would.
pub fn plan(
    catalogue: &Catalogue,
    statement: &Statement,
    parameters: &[Value],
    context: &Context,
) -> Result<Plan, Refusal> {
    let mut statement = statement.clone();
    // Bytes are written per dialect, so a statement with bytes is bound again for each source.
    let has_bytes = parameters.iter().any(|p| matches!(p, Value::Bytes(_)));
    let unbound = has_bytes.then(|| statement.clone());
    bind(&mut statement, parameters, context.client)?;
    let router = Router { catalogue, by_key: context.by_key };
    let planner = Planner { catalogue, router: &router, context, unbound, parameters };
    match &statement {
        Statement::Query(query) => planner.query(query),
        Statement::Insert(insert) => planner.insert(&statement, insert),
        Statement::Update(update) => {
            let mut from: Vec<TableWithJoins> = vec![update.table.clone()];
            if let Some(
                UpdateTableFromKind::BeforeSet(more) | UpdateTableFromKind::AfterSet(more),
            ) = &update.from
            {
                from.extend(more.iter().cloned());
            }
            planner.check_assignments(&from, &update.assignments)?;
            let has_limit = update.limit.is_some();
            planner.change(
                &statement,
                &from,
                update.selection.as_ref(),
                has_limit,
                update.returning.is_some(),
            )
        }
        Statement::Delete(delete) => {
            let (FromTable::WithFromKeyword(from) | FromTable::WithoutKeyword(from)) = &delete.from;
            let mut from = from.clone();
            from.extend(delete.using.iter().flatten().cloned());
            let has_limit = delete.limit.is_some();
            planner.change(
                &statement,
                &from,
                delete.selection.as_ref(),
                has_limit,
                delete.returning.is_some(),
            )
        }
        other => planner.schema(other),
    }
}

/// Records that a statement names.
#[derive(Default)]
struct Named {
    records: Vec<Record>,
    /// The table into which it inserts others.
    unnamed: Option<String>,
}

impl From<Vec<Record>> for Named {
    fn from(records: Vec<Record>) -> Self {
        Self { records, unnamed: None }
    }
}

impl Named {
    /// A row that is inserted. Tables whose primary columns are not known have no records.
    fn add(&mut self, table: &Table, columns: &[String], row: &[&Expr], by_key: bool) {
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

/// The records of an insert whose rows are all in one place.
fn inserted(insert: &sqlparser::ast::Insert, table: &Table, by_key: bool) -> Named {
    let (columns, mut named) = (columns_of(insert, table), Named::default());
    match rows_of(insert) {
        Some(rows) => rows.iter().for_each(|row| named.add(table, &columns, row, by_key)),
        None if table.primary.is_empty() => {}
        None => named.unnamed = Some(table.name.clone()),
    }
    named
}

/// Of which columns an insert gives values.
fn columns_of(insert: &sqlparser::ast::Insert, table: &Table) -> Vec<String> {
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

/// The values that an insert gives, row by row; none if they are a query's.
fn rows_of(insert: &sqlparser::ast::Insert) -> Option<Vec<Vec<&Expr>>> {
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

struct Planner<'a> {
    catalogue: &'a Catalogue,
    router: &'a Router<'a>,
    context: &'a Context,
    /// The statement before its parameters, if some of them are bytes.
    unbound: Option<Statement>,
    parameters: &'a [Value],
}

impl Planner<'_> {
    fn kind(&self, source: SourceId) -> Dialect {
        self.catalogue.source(source).map_or(self.context.client, |s| s.kind)
    }

    fn preferred(&self, among: &BTreeSet<SourceId>) -> Option<SourceId> {
        let mut prefer = self.context.prefer.iter();
        prefer.find(|s| among.contains(s)).or(among.first()).copied()
    }

    /// Refuses what does not name its rows, where that is wanted.
    fn check_named(&self, statement: &Statement, names_all: bool) -> Result<(), Refusal> {
        if !self.context.by_key {
            return Ok(());
        }
        let has_nested = match statement {
            Statement::Query(_) => queries(statement) > 1,
            Statement::Insert(insert) => {
                let is_values = |query: &Query| {
                    query.with.is_none() && matches!(&*query.body, SetExpr::Values(_))
                };
                let own = insert.source.as_deref().filter(|query| is_values(query));
                queries(statement) > usize::from(own.is_some())
            }
            _ => queries(statement) > 0,
        };
        if !names_all || has_nested {
            return Err(Refusal::unsupported(
                "in this mode a statement must name each row by the `primary` columns of the proxy's configuration file, \
                 with whole numbers and without subqueries; rewrite it, or choose another `mode`",
            ));
        }
        if let Statement::Insert(insert) = statement
            && (insert.on.is_some() || insert.replace_into || insert.ignore)
        {
            return Err(Refusal::unsupported(
                "this mode does not support ON CONFLICT, ON DUPLICATE KEY, REPLACE and IGNORE, because they change or \
                 skip rows that already exist; read the row first, or choose another `mode`",
            ));
        }
        if !matches!(statement, Statement::Query(_)) {
            check_deterministic(
                statement,
                "would have another value when the transaction commits",
            )?;
        }
        Ok(())
    }

    /// A statement in its source's dialect, with the locks that the level wants.
    fn part(&self, statement: &Statement, source: SourceId, named: Named) -> Result<Part, Refusal> {
        let (from, to) = (self.context.client, self.kind(source));
        if self.context.by_key && named.records.len() >= RECORDS_MAX {
            return Err(Refusal::unsupported(format!(
                "the statement names {RECORDS_MAX} rows or more of one source; split it",
            )));
        }
        let keys = self.keys(statement, to, &named)?;
        let records = named.records;
        let mut statement = statement.clone();
        if (from, to) == (Dialect::PostgreSql, Dialect::MariaDb) {
            typed::convert(&mut statement, &self.context.kinds)?;
        }
        let mut prelude = Vec::new();
        if self.context.isolation == Isolation::Serializable {
            let mut locker = Locker { to, depth: 0, prelude: Vec::new(), router: self.router };
            if matches!(
                statement,
                Statement::Insert(_) | Statement::Update(_) | Statement::Delete(_)
            ) {
                locker.depth = 1;
            }
            if let ControlFlow::Break(refusal) = VisitMut::visit(&mut statement, &mut locker) {
                return Err(refusal);
            }
            for query in locker.prelude {
                let mut query = Statement::Query(Box::new(query));
                translate(&mut query, from, to, self.catalogue)?;
                prelude.push(render(&query, from, to));
            }
        }
        translate(&mut statement, from, to, self.catalogue)?;
        Ok(Part { source, prelude, text: render(&statement, from, to), records, keys })
    }

    /// MariaDB locks the gaps itself. Who skips what is locked does not want to know whether it is there.
    fn keys(&self, statement: &Statement, to: Dialect, named: &Named) -> Result<Keys, Refusal> {
        let skips = |lock: &LockClause| lock.nonblock == Some(NonBlock::SkipLocked);
        let skips = matches!(statement, Statement::Query(query) if query.locks.iter().any(skips));
        if self.context.isolation != Isolation::Serializable || to == Dialect::MariaDb || skips {
            return Ok(Keys::default());
        }
        let records = named.records.clone();
        if matches!(statement, Statement::Insert(_)) {
            let filled = named.unnamed.iter().cloned().collect();
            return Ok(Keys { inserted: records, filled, ..Keys::default() });
        }
        if records.len() >= RECORDS_MAX {
            return Err(Refusal::unsupported(format!(
                "the statement names {RECORDS_MAX} rows or more of one source, and SERIALIZABLE must lock each of them; split it, \
                 or ask for REPEATABLE READ",
            )));
        }
        let is_delete = matches!(statement, Statement::Delete(_));
        Ok(Keys { sought: records, is_delete, ..Keys::default() })
    }

    fn query(&self, query: &Query) -> Result<Plan, Refusal> {
        let names = Names::default();
        let route = self.router.route_query(query, &names)?;
        let statement = Statement::Query(Box::new(query.clone()));
        let names = Names::of(query);
        let scope = match &*query.body {
            SetExpr::Select(select) => {
                Some((select, self.router.scope(&select.from, select.selection.as_ref(), &names)?))
            }
            _ => None,
        };
        let records = |source| {
            scope.as_ref().map_or_else(Named::default, |(_, scope)| scope.records(source).into())
        };
        if !matches!(route, Route::Free) {
            let names_all = scope.as_ref().is_some_and(|(_, scope)| scope.names_all());
            self.check_named(&statement, names_all)?;
        }
        let is_write = !query.locks.is_empty();
        let only = match &route {
            Route::Free => {
                return Ok(Plan {
                    parts: Vec::new(),
                    merge: Merge::Only,
                    is_write: false,
                    has_rows: true,
                });
            }
            Route::AnyOf(sources) => self.preferred(sources),
            Route::All(sources) if sources.len() == 1 => sources.first().copied(),
            Route::All(_) => None,
        };
        if let Some(source) = only {
            let statement = self.rebound(&statement, source)?;
            let part = self.part(&statement, source, records(source))?;
            return Ok(Plan { parts: vec![part], merge: Merge::Only, is_write, has_rows: true });
        }
        let Route::All(sources) = &route else {
            return Err(Refusal::unsupported("no source has all the tables of this statement"));
        };
        let Some((select, scope)) = &scope else {
            return Err(Refusal::unsupported(
                "a set operation over several sources is not supported; split the statement",
            ));
        };
        let (query, merge) = Spread { client: self.context.client, select, scope }.spread(query)?;
        let statement = Statement::Query(Box::new(query));
        let mut parts = Vec::new();
        for &source in sources {
            parts.push(self.part(&statement, source, records(source))?);
        }
        Ok(Plan { parts, merge: Merge::Rows(merge), is_write, has_rows: true })
    }

    /// The statement with its parameters as `source` writes them.
    fn rebound(&self, bound: &Statement, source: SourceId) -> Result<Statement, Refusal> {
        match &self.unbound {
            Some(unbound) if self.kind(source) != self.context.client => {
                let mut statement = unbound.clone();
                bind(&mut statement, self.parameters, self.kind(source))?;
                Ok(statement)
            }
            _ => Ok(bound.clone()),
        }
    }

    fn check_assignments(
        &self,
        from: &[TableWithJoins],
        assignments: &[Assignment],
    ) -> Result<(), Refusal> {
        let names = Names::default();
        let scope = self.router.scope(from, None, &names)?;
        for assignment in assignments {
            let targets: Vec<&ObjectName> = match &assignment.target {
                AssignmentTarget::ColumnName(name) => vec![name],
                AssignmentTarget::Tuple(names) => names.iter().collect(),
            };
            for target in targets {
                let column = table_name(target);
                // Which table of several a bare name belongs to is not known; any is reason enough.
                for scoped in &scope.tables {
                    if scoped.table.sharding().is_some_and(|s| s.column == column) {
                        return Err(Refusal::unsupported(format!(
                            "column \"{column}\" is the sharding column of \"{}\" and cannot be changed; delete the \
                             row and insert it anew",
                            scoped.table.name,
                        )));
                    }
                    let is_named = scoped.table.primary.contains(&column);
                    let locks = self.context.isolation == Isolation::Serializable
                        && scoped
                            .table
                            .sources()
                            .iter()
                            .any(|s| self.kind(*s) == Dialect::PostgreSql);
                    if is_named && (locks || self.context.by_key) {
                        return Err(Refusal::unsupported(format!(
                            "column \"{column}\" is one of those that name a row of \"{}\", and SERIALIZABLE wants to know names \
                             before; delete the row and insert it anew, or ask for REPEATABLE READ",
                            scoped.table.name,
                        )));
                    }
                }
            }
        }
        Ok(())
    }

    /// UPDATE and DELETE.
    fn change(
        &self,
        statement: &Statement,
        from: &[TableWithJoins],
        selection: Option<&Expr>,
        has_limit: bool,
        has_rows: bool,
    ) -> Result<Plan, Refusal> {
        let names = Names::default();
        let scope = self.router.scope(from, selection, &names)?;
        self.check_named(statement, scope.names_all())?;
        let own = self.router.route_scope(&scope)?;
        let mut nested = Route::Free;
        for query in subqueries(statement) {
            nested = one_place(nested, self.router.route_query(&query, &names)?)?;
        }
        // The table that changes is the first; rows of the others are read.
        let first = scope.tables.first().map(|t| t.table);
        let is_broadcast = first.is_some_and(|t| matches!(t.placement, Placement::Broadcast(_)));
        let (sources, merge) = if let (true, Some(table)) = (is_broadcast, first) {
            check_deterministic(statement, OTHER_COPIES)?;
            let copies = table.sources();
            let reads = one_place(own, nested)?;
            if !matches!(&reads, Route::AnyOf(sources) if *sources == copies) {
                return Err(Refusal::unsupported(format!(
                    "every copy of \"{}\" must change equally, but not every source has the tables that this statement reads",
                    table.name,
                )));
            }
            (copies, Merge::Same)
        } else {
            match one_place(nested, own)? {
                Route::All(sources) => (sources, Merge::Concatenate),
                Route::AnyOf(_) | Route::Free => {
                    return Err(Refusal::unsupported(
                        "the statement changes no table of the catalogue",
                    ));
                }
            }
        };
        if has_limit && (sources.len() > 1) {
            return Err(Refusal::unsupported(
                "LIMIT in a change is not supported over several sources; restrict the rows by a condition",
            ));
        }
        if scope.has_other && sources.len() > 1 {
            return Err(Refusal::unsupported(
                "over several sources only plain tables can be read here; restrict the statement to keys of one source",
            ));
        }
        let mut parts = Vec::new();
        for &source in &sources {
            let statement = self.rebound(statement, source)?;
            parts.push(self.part(&statement, source, scope.records(source).into())?);
        }
        let merge = if parts.len() == 1 { Merge::Only } else { merge };
        Ok(Plan { parts, merge, is_write: true, has_rows })
    }

    fn insert(
        &self,
        statement: &Statement,
        insert: &sqlparser::ast::Insert,
    ) -> Result<Plan, Refusal> {
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
        let done = |parts: Vec<Part>, merge| {
            let merge = if parts.len() == 1 { Merge::Only } else { merge };
            Ok(Plan { parts, merge, is_write: true, has_rows })
        };
        match &table.placement {
            Placement::Single(source) => {
                one_place(nested, Route::All([*source].into()))?;
                let statement = self.rebound(statement, *source)?;
                done(
                    vec![self.part(
                        &statement,
                        *source,
                        inserted(insert, table, self.context.by_key),
                    )?],
                    Merge::Only,
                )
            }
            Placement::Broadcast(sources) => {
                check_deterministic(statement, OTHER_COPIES)?;
                if !matches!(one_place(nested, Route::AnyOf(sources.clone()))?, Route::AnyOf(found) if found == *sources)
                {
                    return Err(Refusal::unsupported(
                        "every copy must get the same rows, but not every source can read them",
                    ));
                }
                let mut parts = Vec::new();
                for &source in sources {
                    let statement = self.rebound(statement, source)?;
                    parts.push(self.part(
                        &statement,
                        source,
                        inserted(insert, table, self.context.by_key),
                    )?);
                }
                done(parts, Merge::Same)
            }
            Placement::Sharded(sharding) => {
                let split = self.split_rows(insert, table, nested)?;
                let column = &sharding.column;
                let changes: &[Assignment] = match &insert.on {
                    Some(OnInsert::DuplicateKeyUpdate(changes)) => changes,
                    Some(OnInsert::OnConflict(conflict)) => match &conflict.action {
                        OnConflictAction::DoUpdate(update) => &update.assignments,
                        OnConflictAction::DoNothing => &[],
                    },
                    _ => &[],
                };
                let is_moved = |a: &Assignment| matches!(&a.target, AssignmentTarget::ColumnName(n) if table_name(n) == *column);
                if changes.iter().any(is_moved) {
                    return Err(Refusal::unsupported(format!(
                        "column \"{column}\" is the sharding column and cannot be changed"
                    )));
                }
                let mut parts = Vec::new();
                for (source, (rows, named)) in split {
                    let mut statement = self.rebound(statement, source)?;
                    if let Statement::Insert(insert) = &mut statement {
                        keep_rows(insert, &rows);
                    }
                    parts.push(self.part(&statement, source, named)?);
                }
                done(parts, Merge::Concatenate)
            }
        }
    }

    /// Which rows of an insert go where, by their numbers.
    #[allow(clippy::type_complexity, reason = "used once, just below its only caller")]
    fn split_rows(
        &self,
        insert: &sqlparser::ast::Insert,
        table: &Table,
        nested: Route,
    ) -> Result<BTreeMap<SourceId, (Vec<usize>, Named)>, Refusal> {
        let Placement::Sharded(sharding) = &table.placement else { return Ok(BTreeMap::new()) };
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
        let mut split: BTreeMap<SourceId, (Vec<usize>, Named)> = BTreeMap::new();
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

    /// A change of the schema goes to every source that has the table.
    fn schema(&self, statement: &Statement) -> Result<Plan, Refusal> {
        let mut names: Vec<ObjectName> = match statement {
            Statement::CreateTable(create) => vec![create.name.clone()],
            Statement::CreateIndex(create) => vec![create.table_name.clone()],
            Statement::AlterTable(alter) => vec![alter.name.clone()],
            Statement::Truncate(truncate) => {
                truncate.table_names.iter().map(|t| t.name.clone()).collect()
            }
            Statement::Drop { object_type: ObjectType::Table, names, .. } => names.clone(),
            Statement::Drop { object_type: ObjectType::Index, table: Some(table), .. } => {
                vec![table.clone()]
            }
            _ => {
                return Err(Refusal::unsupported(
                    "this schema change is not supported; run it at each source",
                ));
            }
        };
        let is_drop = matches!(statement, Statement::Drop { object_type: ObjectType::Table, .. });
        let mut per_source: BTreeMap<SourceId, Vec<ObjectName>> = BTreeMap::new();
        for name in names.drain(..) {
            let Some(table) = self.router.table(&name)? else {
                return Err(Refusal::unsupported("the sources' own catalogues cannot be changed"));
            };
            for source in table.sources() {
                per_source.entry(source).or_default().push(name.clone());
            }
        }
        let mut parts = Vec::new();
        for (source, names) in per_source {
            let mut statement = statement.clone();
            match &mut statement {
                Statement::Drop { names: all, .. } if is_drop => *all = names,
                Statement::Truncate(truncate) => {
                    truncate.table_names.retain(|t| names.contains(&t.name));
                    if self.kind(source) == Dialect::MariaDb {
                        // It truncates one table at a time.
                        for name in truncate.table_names.clone() {
                            let mut one = truncate.clone();
                            one.table_names = vec![name];
                            let one = Statement::Truncate(one);
                            parts.push(self.part(&one, source, Named::default())?);
                        }
                        continue;
                    }
                }
                _ => {}
            }
            parts.push(self.part(&statement, source, Named::default())?);
        }
        Ok(Plan { parts, merge: Merge::Same, is_write: true, has_rows: false })
    }
}

/// How many queries a statement is or contains, at any depth.
fn queries(statement: &Statement) -> usize {
    struct Count(usize);
    impl Visitor for Count {
        type Break = ();
        fn pre_visit_query(&mut self, _: &Query) -> ControlFlow<()> {
            self.0 += 1;
            ControlFlow::Continue(())
        }
    }
    let mut count = Count(0);
    let _ = statement.visit(&mut count);
    count.0
}

/// Keeps the rows of an insert that have these numbers.
fn keep_rows(insert: &mut sqlparser::ast::Insert, keep: &[usize]) {
    if let Some(SetExpr::Values(values)) = insert.source.as_mut().map(|q| &mut *q.body) {
        let mut number = 0;
        values.rows.retain(|_| {
            number += 1;
            keep.binary_search(&(number - 1)).is_ok()
        });
    }
}

const OTHER_COPIES: &str = "would have another value in each copy of a broadcast table";

/// Refuses what is another value each time, which is wrong as `why` says.
fn check_deterministic(statement: &Statement, why: &str) -> Result<(), Refusal> {
    const VARY: [&str; 34] = [
        "random",
        "rand",
        "uuid",
        "gen_random_uuid",
        "uuid_generate_v4",
        "now",
        "current_timestamp",
        "localtimestamp",
        "sysdate",
        "clock_timestamp",
        "statement_timestamp",
        "transaction_timestamp",
        "nextval",
        "current_time",
        "localtime",
        "unix_timestamp",
        "current_date",
        "curdate",
        "curtime",
        "utc_timestamp",
        "utc_date",
        "utc_time",
        "timeofday",
        "uuid_short",
        "sys_guid",
        "random_bytes",
        "gen_random_bytes",
        "last_insert_id",
        "connection_id",
        "pg_backend_pid",
        "txid_current",
        "setval",
        "lastval",
        "currval",
    ];
    struct Varies;
    impl Visitor for Varies {
        type Break = String;
        fn pre_visit_expr(&mut self, expr: &Expr) -> ControlFlow<String> {
            match expr {
                Expr::Function(function) if VARY.contains(&table_name(&function.name).as_str()) => {
                    ControlFlow::Break(table_name(&function.name))
                }
                _ => ControlFlow::Continue(()),
            }
        }
    }
    match statement.visit(&mut Varies) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(name) => {
            Err(Refusal::unsupported(format!("{name}() {why}; compute it in the client")))
        }
    }
}

/// The name of an aggregate function, if the expression is a call of one.
fn aggregate(expr: &Expr) -> Option<(String, &Function)> {
    const AGGREGATES: [&str; 18] = [
        "count",
        "sum",
        "min",
        "max",
        "avg",
        "bool_and",
        "bool_or",
        "every",
        "string_agg",
        "array_agg",
        "group_concat",
        "stddev",
        "variance",
        "std",
        "bit_and",
        "bit_or",
        "json_agg",
        "json_arrayagg",
    ];
    match expr {
        Expr::Nested(inner) => aggregate(inner),
        Expr::Function(function) => {
            let name = table_name(&function.name);
            let is = AGGREGATES.contains(&name.as_str())
                || !function.within_group.is_empty()
                || name.starts_with("stddev_")
                || name.starts_with("var_");
            is.then_some((name, function))
        }
        _ => None,
    }
}

/// What an expression contains, not looking into subqueries.
struct Contains {
    depth: usize,
    aggregate: bool,
    window: bool,
}

impl Contains {
    fn of(part: &impl Visit) -> Self {
        let mut found = Self { depth: 0, aggregate: false, window: false };
        let _ = part.visit(&mut found);
        found
    }
}

impl Visitor for Contains {
    type Break = ();
    fn pre_visit_query(&mut self, _: &Query) -> ControlFlow<()> {
        self.depth += 1;
        ControlFlow::Continue(())
    }
    fn post_visit_query(&mut self, _: &Query) -> ControlFlow<()> {
        self.depth -= 1;
        ControlFlow::Continue(())
    }
    fn pre_visit_expr(&mut self, expr: &Expr) -> ControlFlow<()> {
        if self.depth == 0
            && let Expr::Function(function) = expr
        {
            if function.over.is_some() {
                self.window = true;
            } else if aggregate(expr).is_some() {
                self.aggregate = true;
            }
        }
        ControlFlow::Continue(())
    }
}

/// Adds the locks that serializable reads need at a source.
struct Locker<'a> {
    to: Dialect,
    depth: usize,
    prelude: Vec<Query>,
    router: &'a Router<'a>,
}

impl VisitorMut for Locker<'_> {
    type Break = Refusal;

    fn pre_visit_query(&mut self, query: &mut Query) -> ControlFlow<Refusal> {
        self.depth += 1;
        match self.lock(query) {
            Ok(()) => ControlFlow::Continue(()),
            Err(refusal) => ControlFlow::Break(refusal),
        }
    }

    fn post_visit_query(&mut self, _: &mut Query) -> ControlFlow<Refusal> {
        self.depth -= 1;
        ControlFlow::Continue(())
    }
}

fn share(of: Option<&str>) -> LockClause {
    let of = of.map(|name| ObjectName(vec![ObjectNamePart::Identifier(Ident::new(name))]));
    LockClause { lock_type: LockType::Share, of, nonblock: None }
}

impl Locker<'_> {
    fn lock(&mut self, query: &mut Query) -> Result<(), Refusal> {
        if !query.locks.is_empty() {
            return Ok(());
        }
        let is_top = self.depth == 1;
        if self.to == Dialect::MariaDb {
            // A session at SERIALIZABLE locks every read of a transaction, subqueries included; the
            // words say so where they may stand.
            if is_top && matches!(&*query.body, SetExpr::Select(select) if !select.from.is_empty())
            {
                query.locks.push(share(None));
            }
            return Ok(());
        }
        let mut selects = Vec::new();
        selects_of(&query.body, &mut selects);
        let is_plain_select = matches!(&*query.body, SetExpr::Select(_));
        let mut aliases: Option<Vec<LockClause>> = None;
        let mut preludes = Vec::new();
        for select in selects {
            let names = Names::default();
            // Names that the router does not know here are CTEs; their queries lock for themselves.
            let Ok(scope) = self.router.scope(&select.from, None, &names) else { continue };
            if scope.tables.is_empty() {
                continue;
            }
            if scope.has_outer {
                return Err(Refusal::unsupported(
                    "PostgreSQL cannot lock the optional side of an outer join, as SERIALIZABLE wants here; read the \
                     tables in two statements, or ask for REPEATABLE READ",
                ));
            }
            let found = Contains::of(&select.projection);
            let is_grouped = select.distinct.is_some()
                || select.having.is_some()
                || found.aggregate
                || found.window
                || !matches!(&select.group_by, GroupByExpr::Expressions(by, _) if by.is_empty());
            if is_plain_select && !is_grouped {
                aliases = Some(if scope.has_other {
                    scope.aliases().map(|a| share(Some(a))).collect()
                } else {
                    vec![share(None)]
                });
            } else if is_top {
                preludes.push(locking_prelude(select));
            } else {
                return Err(Refusal::unsupported(
                    "PostgreSQL cannot lock what a grouped subquery reads, as SERIALIZABLE wants here; read it in a \
                     statement of its own, or ask for REPEATABLE READ",
                ));
            }
        }
        self.prelude.append(&mut preludes);
        query.locks.extend(aliases.into_iter().flatten());
        Ok(())
    }
}

fn selects_of<'a>(body: &'a SetExpr, into: &mut Vec<&'a Select>) {
    match body {
        SetExpr::Select(select) => into.push(select),
        SetExpr::SetOperation { left, right, .. } => {
            selects_of(left, into);
            selects_of(right, into);
        }
        _ => {}
    }
}

fn number(value: usize) -> Expr {
    Expr::Value(SqlValue::Number(value.to_string(), false).with_span(Span::empty()))
}

/// `SELECT count(*) FROM (SELECT 1 FROM … WHERE … FOR SHARE) AS orthodrome_locked`.
fn locking_prelude(select: &Select) -> Query {
    let mut inner = select.clone();
    inner.distinct = None;
    inner.projection = vec![SelectItem::UnnamedExpr(number(1))];
    inner.group_by = GroupByExpr::Expressions(Vec::new(), Vec::new());
    inner.having = None;
    inner.named_window = Vec::new();
    let inner = bare_query(SetExpr::Select(Box::new(inner)), vec![share(None)]);
    let mut outer = select.clone();
    outer.distinct = None;
    outer.selection = None;
    outer.group_by = GroupByExpr::Expressions(Vec::new(), Vec::new());
    outer.having = None;
    outer.named_window = Vec::new();
    outer.projection = vec![SelectItem::UnnamedExpr(count_all())];
    outer.from = vec![TableWithJoins {
        relation: sqlparser::ast::TableFactor::Derived {
            lateral: false,
            subquery: Box::new(inner),
            alias: Some(sqlparser::ast::TableAlias {
                explicit: true,
                name: Ident::new("orthodrome_locked"),
                columns: Vec::new(),
                at: None,
            }),
            sample: None,
        },
        joins: Vec::new(),
    }];
    bare_query(SetExpr::Select(Box::new(outer)), Vec::new())
}

fn bare_query(body: SetExpr, locks: Vec<LockClause>) -> Query {
    Query {
        with: None,
        body: Box::new(body),
        order_by: None,
        limit_clause: None,
        fetch: None,
        locks,
        for_clause: None,
        settings: None,
        format_clause: None,
        pipe_operators: Vec::new(),
    }
}

fn named_call(name: &str, args: FunctionArguments) -> Expr {
    Expr::Function(Function {
        name: ObjectName(vec![ObjectNamePart::Identifier(Ident::new(name))]),
        uses_odbc_syntax: false,
        parameters: FunctionArguments::None,
        args,
        filter: None,
        null_treatment: None,
        over: None,
        within_group: Vec::new(),
    })
}

fn count_all() -> Expr {
    named_call(
        "count",
        FunctionArguments::List(sqlparser::ast::FunctionArgumentList {
            duplicate_treatment: None,
            args: vec![FunctionArg::Unnamed(FunctionArgExpr::Wildcard)],
            clauses: Vec::new(),
        }),
    )
}

/// One SELECT for several sources.
struct Spread<'a> {
    client: Dialect,
    select: &'a Select,
    scope: &'a Scope<'a>,
}

impl Spread<'_> {
    fn spread(&self, query: &Query) -> Result<(Query, RowMerge), Refusal> {
        let select = self.select;
        let no = |text: &str| {
            Err(Refusal::unsupported(format!(
                "{text} over several sources is not supported; restrict the statement to keys of one source"
            )))
        };
        if query.fetch.is_some() || select.top.is_some() {
            return no("FETCH");
        }
        if select.into.is_some() {
            return no("SELECT INTO");
        }
        if select.qualify.is_some()
            || Contains::of(&select.projection).window
            || !select.named_window.is_empty()
        {
            return no("a window function");
        }
        let is_distinct = match &select.distinct {
            Some(Distinct::On(_)) => return no("DISTINCT ON"),
            Some(Distinct::Distinct) => true,
            Some(Distinct::All) | None => false,
        };
        let groups: &[Expr] = match &select.group_by {
            GroupByExpr::Expressions(by, modifiers) if modifiers.is_empty() => by,
            _ => return no("this GROUP BY"),
        };
        let is_local = groups.iter().any(|by| self.is_sharding_column(self.resolve(by)));
        let is_aggregated =
            !is_local && (!groups.is_empty() || Contains::of(&select.projection).aggregate);
        if is_aggregated && select.having.is_some() {
            return no("HAVING, when groups span sources,");
        }
        let mut items: Vec<SelectItem> = select.projection.clone();
        let visible = items.len();
        let mut ops: Vec<Op> = Vec::new();
        let mut group_columns = Vec::new();
        if is_aggregated {
            for item in &select.projection {
                let expr = match item {
                    SelectItem::UnnamedExpr(expr) | SelectItem::ExprWithAlias { expr, .. } => expr,
                    _ => return no("`*` beside an aggregate"),
                };
                ops.push(self.operation(expr, groups)?);
            }
        }
        // Averages are sums and counts; the count is a hidden column at the end.
        let averages: Vec<usize> = ops
            .iter()
            .enumerate()
            .filter(|(_, op)| matches!(op, Op::Average { .. }))
            .map(|(i, _)| i)
            .collect();
        for index in averages {
            let hidden = items.len();
            self.split_average(&mut items, index)?;
            if let Some(op) = ops.get_mut(index) {
                *op = Op::Average { count: hidden };
            }
            ops.push(Op::Sum);
        }
        if is_aggregated {
            for by in groups {
                let by = self.resolve(by);
                let at = match self.position(by, &select.projection) {
                    Some(at) => at,
                    None => {
                        items.push(SelectItem::UnnamedExpr(by.clone()));
                        ops.push(Op::Group);
                        items.len() - 1
                    }
                };
                group_columns.push(at);
            }
        }
        let mut order = Vec::new();
        if let Some(by) = &query.order_by {
            let OrderByKind::Expressions(keys) = &by.kind else { return no("ORDER BY ALL") };
            for key in keys {
                if matches!(key.options.sort, Some(OrderBySort::Using(_))) {
                    return no("ORDER BY … USING");
                }
                let at = self.order_column(
                    &key.expr,
                    &mut items,
                    &mut ops,
                    is_aggregated,
                    is_distinct,
                    groups,
                )?;
                order.push(SortKey {
                    at,
                    is_descending: matches!(key.options.sort, Some(OrderBySort::Desc)),
                    nulls_first: nulls_first(key, self.client),
                });
            }
        }
        let (limit, offset) = limits(query.limit_clause.as_ref())?;
        let mut query = query.clone();
        if is_aggregated {
            // A source's first groups need not be the first of all.
            query.limit_clause = None;
            query.order_by = None;
        } else {
            query.limit_clause = limit.map(|limit| LimitClause::LimitOffset {
                limit: Some(number(limit.saturating_add(offset))),
                offset: None,
                limit_by: Vec::new(),
            });
        }
        let hidden = items.len() - visible;
        if let SetExpr::Select(select) = &mut *query.body {
            select.projection = items;
        }
        let merge = RowMerge {
            order,
            groups: group_columns,
            ops,
            is_aggregated,
            is_distinct,
            limit,
            offset,
            hidden,
            client: self.client,
        };
        Ok((query, merge))
    }

    /// `GROUP BY 2` and `GROUP BY alias` mean an item of the list.
    fn resolve<'e>(&'e self, by: &'e Expr) -> &'e Expr {
        let items = &self.select.projection;
        if let Expr::Value(value) = by
            && let SqlValue::Number(text, _) = &value.value
            && let Some(item) =
                text.parse::<usize>().ok().and_then(|n| n.checked_sub(1)).and_then(|n| items.get(n))
        {
            return match item {
                SelectItem::UnnamedExpr(expr) | SelectItem::ExprWithAlias { expr, .. } => expr,
                _ => by,
            };
        }
        if let Expr::Identifier(name) = by {
            for item in items {
                if let SelectItem::ExprWithAlias { expr, alias } = item
                    && alias.value.eq_ignore_ascii_case(&name.value)
                {
                    return expr;
                }
            }
        }
        by
    }

    fn is_sharding_column(&self, expr: &Expr) -> bool {
        self.scope.is_sharding_column(expr)
    }

    fn position(&self, expr: &Expr, items: &[SelectItem]) -> Option<usize> {
        items.iter().position(|item| match item {
            SelectItem::UnnamedExpr(one) | SelectItem::ExprWithAlias { expr: one, .. } => {
                same(one, expr)
            }
            _ => false,
        })
    }

    /// How a column of groups is put together again.
    fn operation(&self, expr: &Expr, groups: &[Expr]) -> Result<Op, Refusal> {
        let no = |why: String| {
            Err(Refusal::unsupported(format!(
                "{why}; restrict the statement to keys of one source, or compute it in the client"
            )))
        };
        if let Some((name, function)) = aggregate(expr) {
            if let FunctionArguments::List(list) = &function.args
                && list.duplicate_treatment == Some(DuplicateTreatment::Distinct)
                && !matches!(name.as_str(), "min" | "max")
            {
                let is_local = list.args.iter().any(|arg| matches!(arg, FunctionArg::Unnamed(FunctionArgExpr::Expr(e)) if self.is_sharding_column(e)));
                if !(is_local && name == "count") {
                    return no(format!(
                        "{name}(DISTINCT …) cannot be computed over several sources"
                    ));
                }
            }
            return match name.as_str() {
                "count" | "sum" => Ok(Op::Sum),
                "min" => Ok(Op::Min),
                "max" => Ok(Op::Max),
                "avg" => Ok(Op::Average { count: 0 }),
                "bool_and" | "every" => Ok(Op::Min),
                "bool_or" => Ok(Op::Max),
                other => no(format!("{other}(…) cannot be computed over several sources")),
            };
        }
        if groups.iter().any(|by| same(self.resolve(by), expr)) {
            return Ok(Op::Group);
        }
        // coalesce(sum(x), 0) adds up as sum(x) does.
        if let Expr::Function(function) = expr
            && matches!(table_name(&function.name).as_str(), "coalesce" | "ifnull")
            && let FunctionArguments::List(list) = &function.args
            && let [
                FunctionArg::Unnamed(FunctionArgExpr::Expr(inner)),
                FunctionArg::Unnamed(FunctionArgExpr::Expr(Expr::Value(zero))),
            ] = list.args.as_slice()
            && matches!(aggregate(inner), Some((name, _)) if name == "sum" || name == "count")
            && matches!(&zero.value, SqlValue::Number(text, _) if text == "0")
        {
            return Ok(Op::Sum);
        }
        if Contains::of(expr).aggregate {
            return no("an expression of aggregates cannot be computed over several sources".into());
        }
        if is_constant(expr) {
            return Ok(Op::Group);
        }
        no("over several sources every column must be grouped or aggregated".into())
    }

    /// Turns `avg(x)` into `sum(x)` in place, and appends `count(x)`.
    fn split_average(&self, items: &mut Vec<SelectItem>, index: usize) -> Result<(), Refusal> {
        let bad = || Refusal::unsupported("this avg(…) cannot be computed over several sources");
        let item = items.get_mut(index).ok_or_else(bad)?;
        let (expr, alias) = match item {
            SelectItem::UnnamedExpr(expr) => (expr.clone(), Ident::new("avg")),
            SelectItem::ExprWithAlias { expr, alias } => (expr.clone(), alias.clone()),
            _ => return Err(bad()),
        };
        let (_, function) = aggregate(&expr).ok_or_else(bad)?;
        let renamed = |name: &str| {
            let mut function = function.clone();
            function.name = ObjectName(vec![ObjectNamePart::Identifier(Ident::new(name))]);
            Expr::Function(function)
        };
        let alias = match (self.client, &*item) {
            // MariaDB names a column by the text of its expression.
            (Dialect::MariaDb, SelectItem::UnnamedExpr(expr)) => {
                Ident::with_quote('`', expr.to_string())
            }
            _ => alias,
        };
        let (sum, count) = (renamed("sum"), renamed("count"));
        *item = SelectItem::ExprWithAlias { expr: sum, alias };
        items.push(SelectItem::UnnamedExpr(count));
        Ok(())
    }

    fn order_column(
        &self,
        key: &Expr,
        items: &mut Vec<SelectItem>,
        ops: &mut Vec<Op>,
        is_aggregated: bool,
        is_distinct: bool,
        groups: &[Expr],
    ) -> Result<At, Refusal> {
        let is_wild = |item: &SelectItem| {
            matches!(item, SelectItem::Wildcard(_) | SelectItem::QualifiedWildcard(..))
        };
        if let Expr::Value(value) = key
            && let SqlValue::Number(text, _) = &value.value
            && let Some(index) = text.parse::<usize>().ok().and_then(|n| n.checked_sub(1))
        {
            return Ok(At::Column(index));
        }
        let projection = &self.select.projection;
        let has_wild = projection.iter().any(is_wild);
        if let Expr::Identifier(name) = key {
            let by_alias = projection.iter().position(|item| matches!(item, SelectItem::ExprWithAlias { alias, .. } if alias.value.eq_ignore_ascii_case(&name.value)));
            if let Some(index) = by_alias {
                return Ok(if has_wild {
                    At::Named(name.value.to_lowercase())
                } else {
                    At::Column(index)
                });
            }
        }
        if has_wild {
            let last = match key {
                Expr::Identifier(name) => Some(name),
                Expr::CompoundIdentifier(names) => names.last(),
                _ => None,
            };
            if let (Some(name), true) = (last, self.scope.tables.len() == 1) {
                return Ok(At::Named(name.value.to_lowercase()));
            }
            if is_distinct {
                return Err(Refusal::unsupported(
                    "with DISTINCT and `*` over several sources, order by plain columns of one table",
                ));
            }
        } else if let Some(index) = self.position(key, projection) {
            return Ok(At::Column(index));
        }
        if is_distinct {
            return Err(Refusal::unsupported(
                "with DISTINCT, ORDER BY must name columns of the list",
            ));
        }
        if is_aggregated {
            let op = self.operation(key, groups)?;
            if matches!(op, Op::Average { .. }) {
                return Err(Refusal::unsupported(
                    "to order by an average over several sources, add it to the select list",
                ));
            }
            ops.push(op);
            items.push(SelectItem::UnnamedExpr(key.clone()));
            return Ok(At::Column(items.len() - 1));
        }
        items.push(SelectItem::UnnamedExpr(key.clone()));
        // Hidden columns are counted from the end, because `*` is of unknown width.
        Ok(At::Hidden(items.len() - 1 - projection.len()))
    }
}

/// Equal but for the table's name in front of a column, and letter case.
fn same(left: &Expr, right: &Expr) -> bool {
    let name = |expr: &Expr| match expr {
        Expr::Identifier(name) => Some(name.value.to_lowercase()),
        Expr::CompoundIdentifier(names) => names.last().map(|n| n.value.to_lowercase()),
        _ => None,
    };
    match (left, right) {
        (Expr::CompoundIdentifier(_), Expr::CompoundIdentifier(_)) => {
            left.to_string().eq_ignore_ascii_case(&right.to_string())
        }
        _ => match (name(left), name(right)) {
            (Some(left), Some(right)) => left == right,
            (None, None) => {
                left == right
                    || left.to_string().eq_ignore_ascii_case(&right.to_string())
                        && !left.to_string().contains('\'')
            }
            _ => false,
        },
    }
}

fn is_constant(expr: &Expr) -> bool {
    match expr {
        Expr::Value(_) => true,
        Expr::Nested(inner)
        | Expr::UnaryOp { expr: inner, .. }
        | Expr::Cast { expr: inner, .. } => is_constant(inner),
        _ => false,
    }
}

/// LIMIT and OFFSET as numbers.
fn limits(clause: Option<&LimitClause>) -> Result<(Option<usize>, usize), Refusal> {
    let constant = |expr: &Expr| match expr {
        Expr::Value(value) => match &value.value {
            SqlValue::Number(text, _) | SqlValue::SingleQuotedString(text) => {
                text.parse::<usize>().ok().map(Some)
            }
            SqlValue::Null => Some(None),
            _ => None,
        },
        _ => None,
    };
    let bad = || Refusal::unsupported("over several sources LIMIT and OFFSET must be integers");
    Ok(match clause {
        None => (None, 0),
        Some(LimitClause::LimitOffset { limit, offset, limit_by }) => {
            if !limit_by.is_empty() {
                return Err(bad());
            }
            let limit = limit.as_ref().map(|e| constant(e).ok_or_else(bad)).transpose()?.flatten();
            let offset =
                offset.as_ref().map(|o| constant(&o.value).ok_or_else(bad)).transpose()?.flatten();
            (limit, offset.unwrap_or(0))
        }
        Some(LimitClause::OffsetCommaLimit { offset, limit }) => {
            (constant(limit).ok_or_else(bad)?, constant(offset).ok_or_else(bad)?.unwrap_or(0))
        }
    })
}

impl Plan {
    /// The plan in words, one line each: what EXPLAIN answers.
    #[must_use]
    pub fn explain(&self, catalogue: &Catalogue) -> Vec<String> {
        let mut lines = Vec::new();
        let kinds: BTreeSet<SourceId> = self.parts.iter().map(|p| p.source).collect();
        lines.push(match kinds.len() {
            0 => "Answered without the tables of any source".to_owned(),
            1 => "Route: one source".to_owned(),
            n => format!("Route: {n} sources, {}", self.merge),
        });
        for part in &self.parts {
            let source = catalogue.source(part.source);
            let name = source.map_or_else(
                || part.source.to_string(),
                |s| format!("{} ({}, {})", s.name, s.kind, s.region),
            );
            lines.push(format!("  -> {name}"));
            lines.extend(part.prelude.iter().map(|text| format!("       locks: {text}")));
            lines.push(format!("       {}", part.text));
            if !part.records.is_empty() {
                let records: Vec<String> = part
                    .records
                    .iter()
                    .take(8)
                    .map(|r| format!("{}[{}]", r.table, r.key))
                    .collect();
                let more = part.records.len().saturating_sub(8);
                let more = if more > 0 { format!(" and {more} more") } else { String::new() };
                lines.push(format!("       records: {}{more}", records.join(", ")));
            }
        }
        lines
    }
}
