//! Plans: the statements for each source, and how their answers are merged.

mod aggregate;
mod checks;
mod insert;
mod lock;
mod near;
mod overlay;
mod record;
mod spread;

use orthodrome_core::ordered::{OrdMap, OrdSet};

use sqlparser::ast::{
    CreateTable, CreateView, Expr, Fetch, FromTable, LimitClause, ObjectName, ObjectType, Query,
    SetExpr, Statement, TableWithJoins, UpdateTableFromKind, Value as SqlValue,
};
use sqlparser::tokenizer::Span;

use self::checks::{OTHER_COPIES, check_deterministic};
use self::lock::Locker;
pub use self::near::{
    DIFFERS, Does, Foreseeable, Strength, counted, foresee, hashed_cells, locks, read_check,
};
pub use self::overlay::overlaid;
use self::record::Named;
pub use self::record::{Keys, Record};
use self::spread::Spread;
use super::Refusal;
use super::arrays::list_elements;
use super::catalog::{Catalogue, Dialect, Placement, SourceId, Table};
use super::dialect::{bind, render, translate};
use super::generated::list_assignments;
use super::merge::Merge;
use super::names;
use super::parse::Isolation;
use super::route::{
    Names, RECORDS_MAX, Route, Router, one_place, relations, subqueries, table_name,
};
use super::schema::BYTES_AT_POSTGRESQL;
use super::typed::{self, Kinds};
use super::value::Value;
use super::walk::walk_mut;

/// The statements for one source.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Part {
    /// The source.
    pub source: SourceId,
    /// Statements that lock what `text` reads; their answers are ignored.
    pub prelude: Vec<String>,
    /// The statement, in the source's dialect.
    pub text: String,
    /// The records that it names at this source.
    pub records: Vec<Record>,
    /// Rows for which the source must prevent phantoms.
    pub keys: Keys,
}

/// The plan of a statement.
#[derive(Clone, PartialEq, Debug)]
pub struct Plan {
    /// The parts for the sources; empty if the statement concerns no table of the catalogue.
    pub parts: Vec<Part>,
    /// How the answers are merged.
    pub merge: Merge,
    /// True if it changes rows.
    pub is_write: bool,
    /// True if it returns rows.
    pub has_rows: bool,
}

/// The other inputs of a plan, besides the statement.
#[derive(Clone, Debug)]
pub struct Context {
    /// The client's dialect.
    pub client: Dialect,
    /// The transaction's isolation level.
    pub isolation: Isolation,
    /// The preferred sources for tables that several sources have: the first of these that has the
    /// table is read.
    pub prefer: Vec<SourceId>,
    /// Columns of tables at MariaDB sources, if the statement has constants whose meaning depends
    /// on them ([`tables_to_know`](super::typed::tables_to_know)).
    pub kinds: Kinds,
    /// For definitions of columns: the collations of PostgreSQL sources that compare texts byte by byte
    /// and know letters beyond ASCII ([`BYTES_QUESTION`](super::BYTES_QUESTION)).
    pub collations: OrdMap<SourceId, String>,
    /// True if every row that is read or changed must be named by its key, and repeated writes must
    /// have the same result: concurrency is controlled by record, as in [`crate::scalardb`].
    pub by_key: bool,
    /// The source of tables that nobody has placed, and of what belongs to no table.
    pub default_source: Option<SourceId>,
}

/// Plans a statement that reads or changes rows, or a change of the schema.
///
/// # Errors
/// It cannot be executed as one unsharded database would.
pub fn plan(
    catalogue: &Catalogue,
    statement: &Statement,
    parameters: &[Value],
    context: &Context,
) -> Result<Plan, Refusal> {
    names::check(catalogue, statement, context.client)?;
    let mut statement = statement.clone();
    if let Statement::Insert(insert) = &mut statement {
        list_assignments(insert);
    }
    // The syntax of bytes depends on the dialect, so a statement with bytes is bound again for each
    // source.
    let has_bytes = parameters.iter().any(|p| matches!(p, Value::Bytes(_)));
    let unbound = has_bytes.then(|| statement.clone());
    bind(&mut statement, parameters, context.client)?;
    list_elements(&mut statement)?;
    fetch_as_limit(&mut statement);
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

/// `FETCH FIRST n ROWS ONLY` as `LIMIT n`.
fn fetch_as_limit(statement: &mut Statement) {
    let Statement::Query(query) = statement else { return };
    let Some(Fetch { with_ties: false, percent: false, quantity }) = &query.fetch else { return };
    let limit = Some(quantity.clone().unwrap_or_else(|| number(1)));
    let offset = match &query.limit_clause {
        None => None,
        Some(LimitClause::LimitOffset { limit: None, offset, limit_by }) if limit_by.is_empty() => {
            offset.clone()
        }
        Some(_) => return,
    };
    query.limit_clause = Some(LimitClause::LimitOffset { limit, offset, limit_by: Vec::new() });
    query.fetch = None;
}

struct Planner<'a> {
    catalogue: &'a Catalogue,
    router: &'a Router<'a>,
    context: &'a Context,
    /// The statement with unbound parameters, if some of them are bytes.
    unbound: Option<Statement>,
    parameters: &'a [Value],
}

impl Planner<'_> {
    fn kind(&self, source: SourceId) -> Dialect {
        self.catalogue.source(source).map_or(self.context.client, |s| s.kind)
    }

    fn preferred(&self, among: &OrdSet<SourceId>) -> Option<SourceId> {
        let mut prefer = self.context.prefer.iter();
        prefer.find(|s| among.contains(s)).or(among.first()).copied()
    }

    /// A statement in its source's dialect, with the locks for the isolation level.
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
        if from != to {
            typed::convert(&mut statement, to, &self.context.kinds)?;
        }
        let mut prelude = Vec::new();
        let reads_or_changes = matches!(
            statement,
            Statement::Query(_)
                | Statement::Insert(_)
                | Statement::Update(_)
                | Statement::Delete(_)
        );
        // A definition would keep the locks: whoever read a view would take them.
        if self.context.isolation == Isolation::Serializable && reads_or_changes {
            let mut locker = Locker { to, depth: 0, prelude: Vec::new(), router: self.router };
            if matches!(
                statement,
                Statement::Insert(_) | Statement::Update(_) | Statement::Delete(_)
            ) {
                locker.depth = 1;
            }
            walk_mut(&mut statement, &mut locker)?;
            for query in locker.prelude {
                let mut query = Statement::Query(Box::new(query));
                translate(&mut query, from, to, self.catalogue)?;
                prelude.push(render(&query, from, to));
            }
        }
        translate(&mut statement, from, to, self.catalogue)?;
        if let Some(name) = super::schema::defined_name(&statement) {
            let is_mixed = self.is_mixed(name);
            if is_mixed || (from, to) == (Dialect::PostgreSql, Dialect::MariaDb) {
                let collation = self.context.collations.get(&source);
                let collation = collation.map_or(BYTES_AT_POSTGRESQL, String::as_str);
                super::schema::align(&mut statement, to, is_mixed, collation);
            }
        }
        Ok(Part { source, prelude, text: render(&statement, from, to), records, keys })
    }

    /// Whether the sources of a table are of both kinds.
    fn is_mixed(&self, name: &ObjectName) -> bool {
        let table = self.catalogue.table(&table_name(name));
        let sources = table.map(Table::sources).unwrap_or_default();
        let kinds: OrdSet<bool> =
            sources.into_iter().map(|id| self.kind(id) == Dialect::PostgreSql).collect();
        kinds.len() > 1
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
        let mut parts = Vec::new();
        for &source in sources {
            let mut query = query.clone();
            typed::order_bytewise(&mut query, self.kind(source), &self.context.kinds);
            let statement = Statement::Query(Box::new(query));
            parts.push(self.part(&statement, source, records(source))?);
        }
        Ok(Plan { parts, merge: Merge::Rows(merge), is_write, has_rows: true })
    }

    /// The statement with its parameters in the syntax of `source`.
    fn rebound(&self, bound: &Statement, source: SourceId) -> Result<Statement, Refusal> {
        match &self.unbound {
            Some(unbound) if self.kind(source) != self.context.client => {
                let mut statement = unbound.clone();
                bind(&mut statement, self.parameters, self.kind(source))?;
                list_elements(&mut statement)?;
                fetch_as_limit(&mut statement);
                Ok(statement)
            }
            _ => Ok(bound.clone()),
        }
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
        // The first table is the one that changes; rows of the others are read.
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

    /// Refuses a definition whose query does not see every row at the source that has it.
    fn check_definition(&self, query: &Query, source: SourceId) -> Result<(), Refusal> {
        for name in relations(query) {
            let Some(table) = self.router.table(&name)? else { continue };
            let has_all = match &table.placement {
                Placement::Broadcast(copies) => copies.contains(&source),
                Placement::Single(_) | Placement::Sharded(_) => table.sources() == [source].into(),
            };
            if !has_all {
                let at = self.catalogue.source(source);
                return Err(Refusal::unsupported(format!(
                    "source {} would have this definition, and it does not have all rows of \"{}\"; \
                     use the query itself, or place the table there or as a broadcast table",
                    at.map_or_else(|| source.to_string(), |at| at.name.clone()),
                    table.name
                )));
            }
        }
        Ok(())
    }

    /// A view, a sequence or such: it belongs to the source of new tables.
    fn unplaced(&self, statement: &Statement) -> Result<Plan, Refusal> {
        let at = self.context.default_source.filter(|at| self.kind(*at) == self.context.client);
        let source = at.ok_or_else(|| {
            Refusal::unsupported("this schema change is not supported; run it at each source")
        })?;
        if let Statement::CreateView(CreateView { query, .. })
        | Statement::AlterView { query, .. } = statement
        {
            self.check_definition(query, source)?;
        }
        let parts = vec![self.part(statement, source, Named::default())?];
        Ok(Plan { parts, merge: Merge::Only, is_write: true, has_rows: false })
    }

    /// Every PostgreSQL source has every type, so that tables of any placement can use it.
    fn types(&self, statement: &Statement) -> Result<Plan, Refusal> {
        let is_postgres = |id: &SourceId| self.kind(*id) == Dialect::PostgreSql;
        let sources = self.catalogue.sources().map(|(id, _)| id).filter(is_postgres);
        let mut parts = Vec::new();
        for source in sources {
            parts.push(self.part(statement, source, Named::default())?);
        }
        if parts.is_empty() || self.context.client != Dialect::PostgreSql {
            return Err(Refusal::unsupported("types belong to PostgreSQL sources and clients"));
        }
        Ok(Plan { parts, merge: Merge::Same, is_write: true, has_rows: false })
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
            Statement::CreateType { .. }
            | Statement::AlterType(_)
            | Statement::CreateDomain(_)
            | Statement::DropDomain(_)
            | Statement::Drop { object_type: ObjectType::Type, .. } => {
                return self.types(statement);
            }
            _ => return self.unplaced(statement),
        };
        let is_drop = matches!(statement, Statement::Drop { object_type: ObjectType::Table, .. });
        let mut per_source: OrdMap<SourceId, Vec<ObjectName>> = OrdMap::new();
        for name in names.drain(..) {
            let Some(table) = self.router.table(&name)? else {
                return Err(Refusal::unsupported("the sources' own catalogues cannot be changed"));
            };
            for source in table.sources() {
                per_source.entry(source).or_default().push(name.clone());
            }
        }
        if let Statement::CreateTable(CreateTable { query: Some(query), name, .. }) = statement {
            let table = self.router.table(name)?;
            let sources: Vec<SourceId> = per_source.keys().copied().collect();
            let (Some(Placement::Single(_)), [source]) =
                (table.map(|table| &table.placement), sources.as_slice())
            else {
                return Err(Refusal::unsupported(
                    "CREATE TABLE … AS needs a table that is at one source; create the table, then use INSERT … SELECT",
                ));
            };
            self.check_definition(query, *source)?;
        }
        let mut parts = Vec::new();
        for (source, names) in per_source {
            let mut statement = statement.clone();
            match &mut statement {
                Statement::Drop { names: all, .. } if is_drop => *all = names,
                Statement::Truncate(truncate) => {
                    truncate.table_names.retain(|t| names.contains(&t.name));
                    if self.kind(source) == Dialect::MariaDb {
                        // MariaDB truncates one table at a time.
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

fn number(value: usize) -> Expr {
    Expr::Value(SqlValue::Number(value.to_string(), false).with_span(Span::empty()))
}

impl Plan {
    /// The plan as text, in lines: the answer of EXPLAIN.
    #[must_use]
    pub fn explain(&self, catalogue: &Catalogue) -> Vec<String> {
        let mut lines = Vec::new();
        let kinds: OrdSet<SourceId> = self.parts.iter().map(|p| p.source).collect();
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
