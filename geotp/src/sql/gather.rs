//! Queries that no source can answer by itself, and whose parts cannot be merged: joins of tables
//! that are not sharded alike, set operations, `count(DISTINCT …)` over several sources. The proxy
//! gathers the rows that such a query may need, and one source computes the result from them: each
//! table becomes a common table expression with its rows.
//!
//! A read takes more rows than the query needs, but never fewer: conditions restrict it only if each
//! row of the result satisfies them, and an outer join restricts only the side that it may fill with
//! NULL.

use std::fmt::Write as _;
use std::ops::ControlFlow;

use orthodrome_core::ordered::{OrdMap, OrdSet};

use sqlparser::ast::{
    BinaryOperator, Expr, Ident, Join, JoinConstraint, JoinOperator, LockClause, ObjectName, Query,
    SetExpr, Statement, TableFactor, TableWithJoins, Value as SqlValue, Visitor, VisitorMut,
};
use sqlparser::tokenizer::Span;

use super::Refusal;
use super::arrays::list_elements;
use super::catalog::{Catalogue, Dialect};
use super::dialect::{bind, render};
use super::names;
use super::parse::{Parsed, Verb, parse};
use super::route::{is_system, relations, table_name};
use super::system::quote;
use super::value::{Answer, Cell, Column, Kind, Value};
use super::walk::{walk, walk_mut};

/// Maximum number of rows that are gathered of one table.
pub const ROWS_MAX: usize = 50_000;

/// Maximum number of values of a join by which a read is restricted.
const VALUES_MAX: usize = 200;

/// The first number of types that users and extensions of PostgreSQL define.
const OWN_TYPES: u32 = 16_384;

/// A query whose rows are gathered.
#[derive(Clone, Debug)]
pub struct Gather {
    client: Dialect,
    query: Query,
    reads: Vec<Read>,
    /// Every name in the query, in lower case.
    names: OrdSet<String>,
}

/// A table to read.
#[derive(Clone, Debug)]
struct Read {
    table: String,
    statement: Parsed,
    /// Conditions on its own columns.
    conditions: Vec<Expr>,
    links: Vec<Link>,
}

/// An equality with a column of another table: only rows with its values are needed.
#[derive(Clone, Debug)]
struct Link {
    own: Expr,
    table: String,
    column: String,
}

/// Where a table is defined at the source that computes the result.
#[derive(Clone, Debug)]
pub struct Template {
    /// Its name there, quoted, with its schema.
    pub name: String,
    /// True if it is a copy, which has text for types that users have defined.
    pub is_copy: bool,
    /// Its columns of types whose order is not that of their text, such as enumerations.
    pub unordered: OrdSet<String>,
    /// Its columns of JSON, at PostgreSQL, with their types. A source of the other kind returns their
    /// text.
    pub documents: OrdMap<String, String>,
}

/// The next step of gathering.
#[derive(Clone, PartialEq, Debug)]
pub enum Step {
    /// Read these rows of the table.
    Read(String, Box<Parsed>),
    /// No row of the table is needed.
    Skip(String),
    /// All rows are there.
    Finish,
}

impl Gather {
    /// The way to gather for a query; none if the statement is not a query of tables of the
    /// catalogue alone.
    ///
    /// # Errors
    /// The parameters do not fit.
    pub fn of(
        catalogue: &Catalogue,
        statement: &Statement,
        parameters: &[Value],
        client: Dialect,
    ) -> Result<Option<Self>, Refusal> {
        names::check(catalogue, statement, client)?;
        let mut statement = statement.clone();
        bind(&mut statement, parameters, client)?;
        list_elements(&mut statement)?;
        let Statement::Query(query) = statement else { return Ok(None) };
        let mut used = Used::default();
        let _ = walk(&*query, &mut used);
        let tables = relations(&query);
        let is_known =
            |name: &ObjectName| !is_system(name) && catalogue.table(&table_name(name)).is_some();
        // A common table expression may be meant where it has the name of a table.
        let is_hidden = used.parts.iter().any(|part| catalogue.table(part).is_some());
        if tables.is_empty() || is_hidden || !tables.iter().all(is_known) {
            return Ok(None);
        }
        let mut counts: OrdMap<String, usize> = OrdMap::new();
        for name in tables {
            *counts.entry(table_name(&name)).or_default() += 1;
        }
        let mut outline = Outline::default();
        if let SetExpr::Select(select) = &*query.body {
            outline.add(&select.from, select.selection.as_ref(), &counts);
        }
        // Bytes have another syntax in each dialect.
        if parameters.iter().any(|value| matches!(value, Value::Bytes(_))) {
            outline.inner.clear();
            outline.outer.clear();
        }
        let locks: Vec<LockClause> =
            query.locks.iter().map(|lock| LockClause { of: None, ..lock.clone() }).collect();
        let mut reads = Vec::new();
        for table in counts.into_keys() {
            reads.push(outline.read(table, &locks, client)?);
        }
        let query = Query { locks: Vec::new(), ..*query };
        Ok(Some(Self { client, query, reads, names: used.names }))
    }

    /// The tables whose rows are gathered.
    pub fn tables(&self) -> impl Iterator<Item = &str> {
        self.reads.iter().map(|read| read.table.as_str())
    }

    /// The next step, given the rows of other tables.
    #[must_use]
    pub fn next(&self, found: &OrdMap<String, Answer>) -> Step {
        let left = self.reads.iter().filter(|read| !found.contains_key(&read.table));
        let is_linked =
            |read: &&Read| read.links.iter().any(|link| found.contains_key(&link.table));
        // What conditions restrict comes first, then what is joined to rows that are there.
        let place = |read: &&Read| (read.conditions.is_empty(), !is_linked(read));
        left.min_by_key(place).map_or(Step::Finish, |read| read.step(found, self.client))
    }

    /// What is read of each table if nothing is known of the others.
    pub fn statements(&self) -> impl Iterator<Item = Step> {
        let nothing = OrdMap::new();
        self.reads.iter().map(move |read| read.step(&nothing, self.client))
    }

    /// The query that computes the result at a source of the client's kind.
    ///
    /// # Errors
    /// It needs a column of a type that rows cannot be carried in.
    pub fn result(
        &self,
        found: &OrdMap<String, Answer>,
        templates: &OrdMap<String, Template>,
    ) -> Result<String, Refusal> {
        let mut statement = Statement::Query(Box::new(self.query.clone()));
        let tables: OrdSet<String> = self.tables().map(str::to_owned).collect();
        walk_mut(&mut statement, &mut Renamer { client: self.client, tables: &tables })?;
        let own = render(&statement, self.client, self.client);
        let (is_recursive, rest) = match own.strip_prefix("WITH ") {
            Some(rest) => match rest.strip_prefix("RECURSIVE ") {
                Some(rest) => (true, format!(", {rest}")),
                None => (false, format!(", {rest}")),
            },
            None => (false, format!(" {own}")),
        };
        let mut ctes = Vec::new();
        for table in &tables {
            let template = templates.get(table).ok_or_else(|| {
                Refusal::unsupported(format!(
                    "the rows of \"{table}\" cannot be gathered: no source of this kind knows the table"
                ))
            })?;
            let answer = found.get(table);
            self.check_types(table, template, answer)?;
            let rows = match self.client {
                Dialect::PostgreSql => postgres_rows(template, answer),
                Dialect::MariaDb => maria_rows(template, answer),
            };
            ctes.push(format!("{} AS ({rows})", quote(table, self.client)));
        }
        let recursive = if is_recursive { "RECURSIVE " } else { "" };
        Ok(format!("WITH {recursive}{}{rest}", ctes.join(", ")))
    }

    /// Refuses a query that names a column of which only the text is carried.
    fn check_types(
        &self,
        table: &str,
        template: &Template,
        answer: Option<&Answer>,
    ) -> Result<(), Refusal> {
        let columns = answer.into_iter().flat_map(|answer| &answer.columns);
        let is_text = |column: &&Column| {
            let name = column.name.to_lowercase();
            let is_own = column.oid >= OWN_TYPES && template.is_copy;
            (is_own || template.unordered.contains(&name)) && self.names.contains(&name)
        };
        match columns.into_iter().find(is_text) {
            None => Ok(()),
            Some(column) => Err(Refusal::unsupported(format!(
                "column \"{}\" of \"{table}\" has a type of its own, which this query over several sources cannot use; \
                 restrict the tables to rows of one source",
                column.name
            ))),
        }
    }
}

impl Read {
    fn step(&self, found: &OrdMap<String, Answer>, client: Dialect) -> Step {
        let mut conditions = self.conditions.clone();
        for link in &self.links {
            let values = found.get(&link.table).and_then(|answer| link.values(answer, client));
            let Some(values) = values else { continue };
            if values.is_empty() {
                return Step::Skip(self.table.clone());
            }
            let expr = Box::new(link.own.clone());
            conditions.push(Expr::InList { expr, list: values, negated: false });
        }
        let mut parsed = self.statement.clone();
        if let Verb::Data(statement) = &mut parsed.verb
            && let Statement::Query(query) = &mut **statement
            && let SetExpr::Select(select) = &mut *query.body
        {
            let and = |left, right| Expr::BinaryOp {
                left: Box::new(left),
                op: BinaryOperator::And,
                right: Box::new(right),
            };
            let nested = conditions.into_iter().map(|one| Expr::Nested(Box::new(one)));
            select.selection = nested.reduce(and);
        }
        Step::Read(self.table.clone(), Box::new(parsed))
    }
}

impl Link {
    /// The values of the other table's column as constants; none if they do not restrict the read.
    fn values(&self, answer: &Answer, client: Dialect) -> Option<Vec<Expr>> {
        let is_it = |column: &Column| column.name.eq_ignore_ascii_case(&self.column);
        let place = answer.columns.iter().position(is_it);
        let Some(place) = place else { return answer.rows.is_empty().then(Vec::new) };
        let kind = answer.columns.get(place)?.kind;
        let is_number = kind.is_exact();
        // At MariaDB two texts are equal that another collation takes for different ones.
        let is_text = matches!(kind, Kind::Text | Kind::Uuid) && client == Dialect::PostgreSql;
        if !(is_number || is_text) {
            return None;
        }
        let values: OrdSet<&[u8]> =
            answer.rows.iter().filter_map(|row| row.get(place)?.as_deref()).collect();
        if values.len() > VALUES_MAX {
            return None;
        }
        let constant = |value: &[u8]| {
            let text = std::str::from_utf8(value).ok()?.to_owned();
            let value = if is_number {
                SqlValue::Number(text, false)
            } else {
                SqlValue::SingleQuotedString(text)
            };
            Some(Expr::Value(value.with_span(Span::empty())))
        };
        values.into_iter().map(constant).collect()
    }
}

/// The names in a query.
#[derive(Default)]
struct Used {
    /// Common table expressions.
    parts: OrdSet<String>,
    names: OrdSet<String>,
}

impl Visitor for Used {
    type Break = ();
    fn pre_visit_query(&mut self, query: &Query) -> ControlFlow<()> {
        let ctes = query.with.iter().flat_map(|with| &with.cte_tables);
        self.parts.extend(ctes.map(|cte| cte.alias.name.value.to_lowercase()));
        ControlFlow::Continue(())
    }
    fn pre_visit_ident(&mut self, name: &Ident) -> ControlFlow<()> {
        self.names.insert(name.value.to_lowercase());
        ControlFlow::Continue(())
    }
}

/// The tables and conditions of the query's own FROM and WHERE.
#[derive(Default)]
struct Outline {
    /// Tables that occur once in the whole statement, with their aliases.
    tables: OrdMap<String, Aliased>,
    /// True if the query reads nothing else.
    is_single: bool,
    /// Conditions that every row of the result satisfies.
    inner: Vec<Expr>,
    /// Conditions on the rows of a table that match the other side of an outer join.
    outer: Vec<(String, Expr)>,
}

/// A table with the name by which the query knows it.
struct Aliased {
    alias: String,
    /// The same as the client has written it.
    written: Option<Ident>,
    /// True if rows of the result may have NULL in its place.
    is_nullable: bool,
}

impl Outline {
    fn add(
        &mut self,
        from: &[TableWithJoins],
        selection: Option<&Expr>,
        counts: &OrdMap<String, usize>,
    ) {
        self.is_single = matches!(from, [only] if only.joins.is_empty());
        for item in from {
            let mut here = Vec::new();
            here.extend(self.add_table(&item.relation, counts));
            for Join { relation, join_operator, .. } in &item.joins {
                let new = self.add_table(relation, counts);
                let on = |constraint: &JoinConstraint| match constraint {
                    JoinConstraint::On(on) => conjuncts(on),
                    _ => Vec::new(),
                };
                match join_operator {
                    JoinOperator::Join(c)
                    | JoinOperator::Inner(c)
                    | JoinOperator::CrossJoin(c)
                    | JoinOperator::StraightJoin(c) => self.inner.extend(on(c)),
                    JoinOperator::Left(c) | JoinOperator::LeftOuter(c) => {
                        if let Some(table) = &new {
                            self.nullable([table]);
                            self.outer.extend(on(c).into_iter().map(|one| (table.clone(), one)));
                        }
                    }
                    JoinOperator::Right(_) | JoinOperator::RightOuter(_) => self.nullable(&here),
                    // A full join, or one that restricts nothing here.
                    _ => self.nullable(here.iter().chain(&new)),
                }
                here.extend(new);
            }
        }
        self.inner.extend(selection.map(conjuncts).unwrap_or_default());
    }

    fn add_table(
        &mut self,
        factor: &TableFactor,
        counts: &OrdMap<String, usize>,
    ) -> Option<String> {
        let TableFactor::Table { name, alias, args: None, .. } = factor else { return None };
        let table = table_name(name);
        if counts.get(&table) != Some(&1) {
            return None;
        }
        let written = alias.as_ref().map(|alias| alias.name.clone());
        let alias = written.as_ref().map_or_else(|| table.clone(), |a| a.value.to_lowercase());
        self.tables.insert(table.clone(), Aliased { alias, written, is_nullable: false });
        Some(table)
    }

    fn nullable<'a>(&mut self, tables: impl IntoIterator<Item = &'a String>) {
        for table in tables {
            if let Some(found) = self.tables.get_mut(table) {
                found.is_nullable = true;
            }
        }
    }

    /// The table that a column belongs to, and its name.
    fn column(&self, expr: &Expr) -> Option<(&str, String)> {
        match expr {
            Expr::CompoundIdentifier(parts) => {
                let [alias, column] = parts.as_slice() else { return None };
                let alias = alias.value.to_lowercase();
                let mut tables = self.tables.iter();
                let (table, _) = tables.find(|(_, aliased)| aliased.alias == alias)?;
                Some((table, column.value.clone()))
            }
            Expr::Identifier(column) if self.is_single => {
                Some((self.tables.keys().next()?, column.value.clone()))
            }
            _ => None,
        }
    }

    /// Whether a condition concerns columns of one table only, and says the same wherever it runs.
    fn is_about(&self, condition: &Expr, table: &str) -> bool {
        struct Columns<'a> {
            outline: &'a Outline,
            table: &'a str,
            is_it: bool,
        }
        impl Visitor for Columns<'_> {
            type Break = ();
            fn pre_visit_query(&mut self, _: &Query) -> ControlFlow<()> {
                self.is_it = false;
                ControlFlow::Break(())
            }
            fn pre_visit_expr(&mut self, expr: &Expr) -> ControlFlow<()> {
                match expr {
                    Expr::Identifier(_) | Expr::CompoundIdentifier(_) => {
                        let found = self.outline.column(expr);
                        self.is_it &= found.is_some_and(|(table, _)| table == self.table);
                    }
                    Expr::Function(_) => self.is_it = false,
                    _ => {}
                }
                ControlFlow::Continue(())
            }
        }
        let mut columns = Columns { outline: self, table, is_it: true };
        let _ = walk(condition, &mut columns);
        columns.is_it
    }

    /// The read of a table.
    fn read(&self, table: String, locks: &[LockClause], client: Dialect) -> Result<Read, Refusal> {
        let name = quote(&table, client);
        let aliased = self.tables.get(&table);
        let alias = aliased.and_then(|aliased| aliased.written.as_ref()).map(|written| {
            let bare = match client {
                Dialect::PostgreSql if written.quote_style.is_none() => {
                    written.value.to_lowercase()
                }
                _ => written.value.clone(),
            };
            format!(" AS {}", quote(&bare, client))
        });
        let limit = ROWS_MAX + 1;
        let text = format!("SELECT * FROM {name}{} LIMIT {limit}", alias.unwrap_or_default());
        let mut statement = parse(&text, client)?.pop();
        let Some(Parsed { verb: Verb::Data(data), .. }) = &mut statement else {
            return Err(Refusal::syntax(format!("\"{table}\" cannot be read")));
        };
        if let Statement::Query(query) = &mut **data {
            query.locks = locks.to_vec();
        }
        let statement = statement.ok_or_else(|| Refusal::syntax("no statement"))?;
        let (mut conditions, mut links) = (Vec::new(), Vec::new());
        let is_filled = aliased.is_none_or(|aliased| aliased.is_nullable);
        for condition in &self.inner {
            if !is_filled && self.is_about(condition, &table) {
                conditions.push(condition.clone());
            }
            links.extend(self.link(condition, &table).filter(|_| !is_filled));
        }
        let own = self.outer.iter().filter(|(side, _)| *side == table);
        links.extend(own.filter_map(|(_, condition)| self.link(condition, &table)));
        Ok(Read { table, statement, conditions, links })
    }

    /// The other column of an equality with a column of `table`.
    fn link(&self, condition: &Expr, table: &str) -> Option<Link> {
        let Expr::BinaryOp { left, op: BinaryOperator::Eq, right } = condition else { return None };
        let sides = [(left, right), (right, left)];
        sides.into_iter().find_map(|(own, other)| {
            let ((mine, _), (other, column)) = (self.column(own)?, self.column(other)?);
            let is_it = mine == table && other != table;
            is_it.then(|| Link { own: (**own).clone(), table: other.to_owned(), column })
        })
    }
}

/// The conditions that hold if `condition` holds.
fn conjuncts(condition: &Expr) -> Vec<Expr> {
    match condition {
        Expr::Nested(inner) => conjuncts(inner),
        Expr::BinaryOp { left, op: BinaryOperator::And, right } => {
            [conjuncts(left), conjuncts(right)].concat()
        }
        other => vec![other.clone()],
    }
}

/// Lets a query read common table expressions in place of tables.
struct Renamer<'a> {
    client: Dialect,
    tables: &'a OrdSet<String>,
}

impl VisitorMut for Renamer<'_> {
    type Break = Refusal;
    fn pre_visit_table_factor(&mut self, factor: &mut TableFactor) -> ControlFlow<Refusal> {
        if let TableFactor::Table { name, args: None, index_hints, partitions, .. } = factor {
            let table = table_name(name);
            if self.tables.contains(&table) {
                if !partitions.is_empty() {
                    return ControlFlow::Break(Refusal::unsupported(
                        "PARTITION is not supported in this query over several sources",
                    ));
                }
                index_hints.clear();
                let mark = if self.client == Dialect::PostgreSql { '"' } else { '`' };
                *name = ObjectName::from(vec![Ident::with_quote(mark, table)]);
            }
        }
        ControlFlow::Continue(())
    }
    fn pre_visit_expr(&mut self, expr: &mut Expr) -> ControlFlow<Refusal> {
        if let Expr::CompoundIdentifier(parts) = expr
            && let Some(first) = parts.len().checked_sub(2)
        {
            parts.drain(..first);
        }
        ControlFlow::Continue(())
    }
}

/// The rows of a table as a query in PostgreSQL's SQL.
fn postgres_rows(template: &Template, answer: Option<&Answer>) -> String {
    if let Some(rows) = answer.and_then(|answer| rows_with_documents(template, answer)) {
        return rows;
    }
    let mut json = String::from("[");
    for (number, row) in answer.iter().flat_map(|answer| &answer.rows).enumerate() {
        json.push_str(if number == 0 { "{" } else { ",{" });
        let columns = answer.iter().flat_map(|answer| &answer.columns);
        for (place, (column, cell)) in columns.zip(row).enumerate() {
            if place > 0 {
                json.push(',');
            }
            json_text(&mut json, &column.name);
            json.push(':');
            match cell {
                None => json.push_str("null"),
                Some(value) if column.kind == Kind::Bytes => {
                    json.push_str("\"\\\\x");
                    hex(&mut json, value);
                    json.push('"');
                }
                // A document is a value of its own and not its text.
                Some(value)
                    if column.kind == Kind::Json
                        || template.documents.contains_key(&column.name.to_lowercase()) =>
                {
                    json.push_str(&String::from_utf8_lossy(value));
                }
                Some(value) => json_text(&mut json, &String::from_utf8_lossy(value)),
            }
        }
        json.push('}');
    }
    json.push(']');
    let (name, json) = (&template.name, json.replace('\'', "''"));
    format!("SELECT * FROM pg_catalog.json_populate_recordset(NULL::{name}, '{json}')")
}

/// The same with documents as texts that are cast. `json_populate_recordset` would make NULL of the
/// document `null`, and fail for `\u0000` in a document. None if no document is like that.
fn rows_with_documents(template: &Template, answer: &Answer) -> Option<String> {
    let type_of = |column: &Column| template.documents.get(&column.name.to_lowercase());
    let is_special = |value: &[u8]| {
        value.trim_ascii() == b"null" || value.windows(6).any(|part| part == b"\\u0000")
    };
    let is_it = |row: &Vec<Cell>| {
        let mut cells = answer.columns.iter().zip(row);
        cells.any(|(column, cell)| {
            type_of(column).is_some() && cell.as_deref().is_some_and(is_special)
        })
    };
    if !answer.rows.iter().any(is_it) {
        return None;
    }
    let mut plain = answer.clone();
    let mut json = String::from("[");
    for (number, row) in plain.rows.iter_mut().enumerate() {
        json.push_str(if number == 0 { "[" } else { ",[" });
        let mut separator = "";
        for (column, cell) in answer.columns.iter().zip(row) {
            if type_of(column).is_none() {
                continue;
            }
            json.push_str(separator);
            separator = ",";
            match cell.take() {
                None => json.push_str("null"),
                Some(value) => json_text(&mut json, &String::from_utf8_lossy(&value)),
            }
        }
        json.push(']');
    }
    json.push(']');
    let mut place = 0;
    let columns = answer.columns.iter().map(|column| {
        let name = quote(&column.name, Dialect::PostgreSql);
        let Some(of) = type_of(column) else { return format!("r.{name}") };
        place += 1;
        format!("(d.documents->>{})::{of} AS {name}", place - 1)
    });
    let columns = columns.collect::<Vec<_>>().join(", ");
    // The rows and their documents have the same numbers.
    Some(format!(
        "SELECT {columns} FROM (SELECT x.*, row_number() OVER () AS orthodrome_number FROM ({}) x) r \
         JOIN pg_catalog.json_array_elements('{}') WITH ORDINALITY d(documents, orthodrome_number) \
         USING (orthodrome_number)",
        postgres_rows(template, Some(&plain)),
        json.replace('\'', "''"),
    ))
}

/// A text as a constant of JSON.
fn json_text(json: &mut String, text: &str) {
    json.push('"');
    for c in text.chars() {
        match c {
            '"' => json.push_str("\\\""),
            '\\' => json.push_str("\\\\"),
            c if u32::from(c) < 32 => {
                let _ = write!(json, "\\u{:04x}", u32::from(c));
            }
            c => json.push(c),
        }
    }
    json.push('"');
}

fn hex(text: &mut String, bytes: &[u8]) {
    for byte in bytes {
        let _ = write!(text, "{byte:02x}");
    }
}

/// The rows of a table as a query in MariaDB's SQL. The table itself gives types and collations.
fn maria_rows(template: &Template, answer: Option<&Answer>) -> String {
    let name = &template.name;
    let Some(answer) = answer.filter(|answer| !answer.rows.is_empty()) else {
        return format!("SELECT * FROM {name} WHERE 1 = 0");
    };
    let columns: Vec<String> =
        answer.columns.iter().map(|column| quote(&column.name, Dialect::MariaDb)).collect();
    let mut text =
        format!("SELECT {} FROM {name} WHERE 1 = 0 UNION ALL VALUES ", columns.join(", "));
    for (number, row) in answer.rows.iter().enumerate() {
        text.push_str(if number == 0 { "(" } else { ",(" });
        for (place, (column, cell)) in answer.columns.iter().zip(row).enumerate() {
            if place > 0 {
                text.push(',');
            }
            maria_constant(&mut text, column.kind, cell);
        }
        text.push(')');
    }
    text
}

fn maria_constant(text: &mut String, kind: Kind, cell: &Cell) {
    let Some(value) = cell else { return text.push_str("NULL") };
    let shown = String::from_utf8_lossy(value);
    match kind {
        Kind::Int2 | Kind::Int4 | Kind::Int8 | Kind::Decimal => text.push_str(&shown),
        Kind::Float4 | Kind::Float8 => {
            text.push_str(&shown);
            if !shown.contains(['e', 'E']) {
                text.push_str("e0");
            }
        }
        Kind::Bool => text.push(if *value == b"t" || *value == b"1" { '1' } else { '0' }),
        Kind::Bytes => {
            text.push_str("X'");
            hex(text, value);
            text.push('\'');
        }
        Kind::Date | Kind::Time | Kind::Timestamp if !shown.starts_with("0000") => {
            text.push_str(match kind {
                Kind::Date => "DATE'",
                Kind::Time => "TIME'",
                _ => "TIMESTAMP'",
            });
            text.push_str(&shown);
            text.push('\'');
        }
        _ => {
            text.push('\'');
            text.push_str(&shown.replace('\'', "''"));
            text.push('\'');
        }
    }
}

#[cfg(test)]
mod tests;
