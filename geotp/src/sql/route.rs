//! Routing: the sources that a statement concerns, from its tables and the conditions on their
//! keys.
//!
//! A condition that is not understood restricts nothing: a route may be wider than necessary, but
//! never narrower. A result of several sources is correct only if no row of it needs rows of two
//! sources; a statement for which that cannot be shown is refused.

use std::ops::ControlFlow;

use orthodrome_core::ordered::OrdSet;

use sqlparser::ast::{
    BinaryOperator, CastKind, Expr, Join, JoinConstraint, JoinOperator, ObjectName, ObjectType,
    Query, Select, SetExpr, Statement, TableFactor, TableWithJoins, UnaryOperator,
    Value as SqlValue, Visit, Visitor,
};

use super::Refusal;
use super::catalog::{Catalogue, KeyType, Placement, Sharding, SourceId, Table};
use super::plan::Record;
use super::value::Key;
use super::walk::walk;

/// Maximum number of records of one statement that the hotspot footprint gets.
pub(super) const RECORDS_MAX: usize = 256;

/// The sources at which a statement, or a part of it, can be answered.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Route {
    /// Any source: no table is concerned.
    Free,
    /// Any one of these sources.
    AnyOf(OrdSet<SourceId>),
    /// All of these sources together.
    All(OrdSet<SourceId>),
}

impl Route {
    /// The source, if there is exactly one possible.
    #[must_use]
    pub fn only(&self) -> Option<SourceId> {
        match self {
            Self::All(sources) | Self::AnyOf(sources) if sources.len() == 1 => {
                sources.first().copied()
            }
            _ => None,
        }
    }
}

/// A restriction of one column by conditions.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Constraint {
    Any,
    In(OrdSet<Key>),
    Between(Option<Key>, Option<Key>),
}

impl Constraint {
    fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Any, one) | (one, Self::Any) => one,
            (Self::In(left), Self::In(right)) => {
                Self::In(left.intersection(&right).cloned().collect())
            }
            (Self::In(keys), Self::Between(low, high))
            | (Self::Between(low, high), Self::In(keys)) => {
                let is_within = |key: &Key| {
                    low.as_ref().is_none_or(|low| key >= low)
                        && high.as_ref().is_none_or(|high| key <= high)
                };
                Self::In(keys.into_iter().filter(is_within).collect())
            }
            (Self::Between(l1, h1), Self::Between(l2, h2)) => {
                // `None` is below every low bound and above every high one.
                let high = match (h1, h2) {
                    (Some(one), Some(other)) => Some(one.min(other)),
                    (one, other) => one.or(other),
                };
                Self::Between(l1.max(l2), high)
            }
        }
    }

    fn or(self, other: Self) -> Self {
        match (self, other) {
            (Self::In(mut left), Self::In(right)) => {
                left.extend(right);
                Self::In(left)
            }
            _ => Self::Any,
        }
    }

    fn sources(&self, sharding: &Sharding) -> OrdSet<SourceId> {
        match self {
            Self::Any => sharding.layout.sources(),
            Self::In(keys) => keys.iter().filter_map(|key| sharding.layout.place(key)).collect(),
            Self::Between(low, high) => sharding.layout.between(low.as_ref(), high.as_ref()),
        }
    }
}

/// The last part of a name, in lower case. [`names::check`](super::names::check) checks the parts before it.
#[must_use]
pub fn table_name(name: &ObjectName) -> String {
    name.0
        .last()
        .and_then(|part| part.as_ident())
        .map_or_else(String::new, |ident| ident.value.to_lowercase())
}

/// A constant as a key of type `key`; `None` if it is not a constant, or cannot be compared safely.
pub(super) fn constant(expr: &Expr, key: KeyType) -> Option<Key> {
    match expr {
        Expr::Nested(inner) => constant(inner, key),
        Expr::Cast { expr, kind: CastKind::Cast | CastKind::DoubleColon, .. } => {
            constant(expr, key)
        }
        Expr::UnaryOp { op: UnaryOperator::Minus, expr } if key == KeyType::Integer => {
            match constant(expr, key)? {
                Key::Int(value) => value.checked_neg().map(Key::Int),
                Key::Text(_) => None,
            }
        }
        Expr::UnaryOp { op: UnaryOperator::Plus, expr } => constant(expr, key),
        Expr::Value(value) => match (&value.value, key) {
            (SqlValue::Number(text, _), KeyType::Integer) => match text.strip_prefix("0x") {
                Some(digits) => i128::from_str_radix(digits, 16).ok().map(Key::Int),
                None => text.parse().ok().map(Key::Int),
            },
            (
                SqlValue::SingleQuotedString(text)
                | SqlValue::EscapedStringLiteral(text)
                | SqlValue::DoubleQuotedString(text),
                key,
            ) => match key {
                KeyType::Integer => text.trim().parse().ok().map(Key::Int),
                KeyType::Text => Some(Key::Text(text.clone())),
            },
            _ => None,
        },
        _ => None,
    }
}

/// A table of a FROM clause.
pub(super) struct Scoped<'a> {
    alias: String,
    pub(super) table: &'a Table,
    /// True if an outer join may fill it with NULLs.
    pub(super) is_nullable: bool,
}

impl Scoped<'_> {
    fn sharding(&self) -> Option<&Sharding> {
        self.table.sharding()
    }

    /// Whether `expr` is this table's `column`.
    fn is_column(&self, expr: &Expr, column: &str) -> bool {
        match expr {
            Expr::Nested(inner) => self.is_column(inner, column),
            Expr::Identifier(name) => name.value.to_lowercase() == column,
            Expr::CompoundIdentifier(names) => match names.as_slice() {
                [.., table, name] => {
                    name.value.to_lowercase() == column && table.value.to_lowercase() == self.alias
                }
                _ => false,
            },
            _ => false,
        }
    }

    pub(super) fn constrain(&self, expr: &Expr, column: &str, key: KeyType) -> Constraint {
        let on_column = |e: &Expr| self.is_column(e, column);
        let any = Constraint::Any;
        match expr {
            Expr::Nested(inner) => self.constrain(inner, column, key),
            Expr::BinaryOp { left, op: BinaryOperator::And, right } => {
                self.constrain(left, column, key).and(self.constrain(right, column, key))
            }
            Expr::BinaryOp { left, op: BinaryOperator::Or, right } => {
                self.constrain(left, column, key).or(self.constrain(right, column, key))
            }
            Expr::BinaryOp { left, op, right } => {
                let (value, op) = if on_column(left) {
                    (constant(right, key), op.clone())
                } else if on_column(right) {
                    (constant(left, key), mirrored(op))
                } else {
                    return any;
                };
                let Some(value) = value else { return any };
                match op {
                    BinaryOperator::Eq => Constraint::In([value].into()),
                    BinaryOperator::Lt => Constraint::Between(None, Some(before(value))),
                    BinaryOperator::LtEq => Constraint::Between(None, Some(value)),
                    BinaryOperator::Gt => Constraint::Between(Some(after(value)), None),
                    BinaryOperator::GtEq => Constraint::Between(Some(value), None),
                    _ => any,
                }
            }
            Expr::InList { expr, list, negated: false } if on_column(expr) => {
                let keys: Option<OrdSet<Key>> =
                    list.iter().map(|item| constant(item, key)).collect();
                keys.map_or(any, Constraint::In)
            }
            Expr::Between { expr, negated: false, low, high } if on_column(expr) => {
                match (constant(low, key), constant(high, key)) {
                    (Some(low), Some(high)) => Constraint::Between(Some(low), Some(high)),
                    _ => any,
                }
            }
            _ => any,
        }
    }
}

fn before(key: Key) -> Key {
    match key {
        Key::Int(value) => Key::Int(value.saturating_sub(1)),
        // This includes the bound itself, which is safe.
        text @ Key::Text(_) => text,
    }
}

fn after(key: Key) -> Key {
    match key {
        Key::Int(value) => Key::Int(value.saturating_add(1)),
        text @ Key::Text(_) => text,
    }
}

fn mirrored(op: &BinaryOperator) -> BinaryOperator {
    match op {
        BinaryOperator::Lt => BinaryOperator::Gt,
        BinaryOperator::LtEq => BinaryOperator::GtEq,
        BinaryOperator::Gt => BinaryOperator::Lt,
        BinaryOperator::GtEq => BinaryOperator::LtEq,
        other => other.clone(),
    }
}

/// The tables of one FROM clause, and their join conditions.
pub(super) struct Scope<'a> {
    pub(super) tables: Vec<Scoped<'a>>,
    /// Conditions that every row of the result satisfies.
    conditions: Vec<&'a Expr>,
    /// Conditions of outer joins: they restrict which rows match, not which rows are in the result.
    outer: Vec<&'a Expr>,
    /// `USING (column)`.
    using: Vec<String>,
    pub(super) has_outer: bool,
    /// True if there is a table function or a derived table.
    pub(super) has_other: bool,
    by_key: bool,
}

/// Names of parts of the statement itself, such as CTEs.
#[derive(Clone, Default)]
pub(super) struct Names(OrdSet<String>);

impl Names {
    /// The CTEs of a query.
    pub(super) fn of(query: &Query) -> Self {
        let ctes = query.with.iter().flat_map(|with| &with.cte_tables);
        Self(ctes.map(|cte| cte.alias.name.value.to_lowercase()).collect())
    }
}

/// Builds scopes and routes with one catalogue.
pub(super) struct Router<'a> {
    pub(super) catalogue: &'a Catalogue,
    /// True if keys must identify rows exactly: then only integers are keys, because other types
    /// have several spellings for one value.
    pub(super) by_key: bool,
}

impl Router<'_> {
    /// The table, or an error if it is unknown; `None` for system catalogues of sources.
    pub(super) fn table(&self, name: &ObjectName) -> Result<Option<&Table>, Refusal> {
        let bare = table_name(name);
        if let Some(table) = self.catalogue.table(&bare).filter(|_| !has_system_schema(name)) {
            return Ok(Some(table));
        }
        if is_system(name) {
            return Ok(None);
        }
        Err(Refusal {
            message: format!(
                "relation \"{bare}\" does not exist: no source has such a table, and the proxy's file names none"
            ),
            sqlstate: "42P01",
        })
    }

    /// The scope of a FROM clause and a WHERE clause.
    pub(super) fn scope<'a>(
        &'a self,
        from: &'a [TableWithJoins],
        selection: Option<&'a Expr>,
        names: &Names,
    ) -> Result<Scope<'a>, Refusal> {
        let mut scope = Scope {
            tables: Vec::new(),
            conditions: selection.into_iter().collect(),
            outer: Vec::new(),
            using: Vec::new(),
            has_outer: false,
            has_other: false,
            by_key: self.by_key,
        };
        for item in from {
            self.add_joined(&mut scope, item, names)?;
        }
        Ok(scope)
    }

    fn add_joined<'a>(
        &'a self,
        scope: &mut Scope<'a>,
        item: &'a TableWithJoins,
        names: &Names,
    ) -> Result<(), Refusal> {
        let first = scope.tables.len();
        self.add_factor(scope, &item.relation, names)?;
        for Join { relation, join_operator, .. } in &item.joins {
            let joined = scope.tables.len();
            self.add_factor(scope, relation, names)?;
            let constraint = match join_operator {
                JoinOperator::Join(c)
                | JoinOperator::Inner(c)
                | JoinOperator::CrossJoin(c)
                | JoinOperator::StraightJoin(c) => {
                    if let JoinConstraint::On(on) = c {
                        scope.conditions.push(on);
                    }
                    c
                }
                JoinOperator::Left(c) | JoinOperator::LeftOuter(c) => {
                    scope.has_outer = true;
                    scope.tables.iter_mut().skip(joined).for_each(|t| t.is_nullable = true);
                    if let JoinConstraint::On(on) = c {
                        scope.outer.push(on);
                    }
                    c
                }
                JoinOperator::Right(c) | JoinOperator::RightOuter(c) => {
                    scope.has_outer = true;
                    scope
                        .tables
                        .iter_mut()
                        .take(joined)
                        .skip(first)
                        .for_each(|t| t.is_nullable = true);
                    if let JoinConstraint::On(on) = c {
                        scope.outer.push(on);
                    }
                    c
                }
                JoinOperator::FullOuter(c) => {
                    scope.has_outer = true;
                    scope.tables.iter_mut().skip(first).for_each(|t| t.is_nullable = true);
                    if let JoinConstraint::On(on) = c {
                        scope.outer.push(on);
                    }
                    c
                }
                _ => {
                    return Err(Refusal::unsupported(
                        "this kind of join is not supported; use INNER, LEFT or RIGHT JOIN",
                    ));
                }
            };
            match constraint {
                JoinConstraint::Using(columns) => {
                    scope.using.extend(columns.iter().map(table_name))
                }
                JoinConstraint::Natural if scope.tables.len() > 1 => {
                    // A natural join depends on columns that are not known here.
                    scope.has_other = true;
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn add_factor<'a>(
        &'a self,
        scope: &mut Scope<'a>,
        factor: &'a TableFactor,
        names: &Names,
    ) -> Result<(), Refusal> {
        match factor {
            TableFactor::Table { name, alias, args: None, .. } => {
                if name.0.len() == 1 && names.0.contains(&table_name(name)) {
                    scope.has_other = true;
                    return Ok(());
                }
                match self.table(name)? {
                    Some(table) => {
                        let alias = alias
                            .as_ref()
                            .map_or_else(|| table_name(name), |a| a.name.value.to_lowercase());
                        scope.tables.push(Scoped { alias, table, is_nullable: false });
                    }
                    None => scope.has_other = true,
                }
                Ok(())
            }
            TableFactor::NestedJoin { table_with_joins, .. } => {
                self.add_joined(scope, table_with_joins, names)
            }
            _ => {
                scope.has_other = true;
                Ok(())
            }
        }
    }

    /// The sources of a scope's rows. `what` is for messages.
    pub(super) fn route_scope(&self, scope: &Scope<'_>) -> Result<Route, Refusal> {
        if scope.tables.is_empty() {
            return Ok(Route::Free);
        }
        let classes = scope.classes();
        let mut route = Route::Free;
        for class in &classes {
            let sources = scope.sources_of(class);
            route = match route {
                Route::Free => Route::All(sources),
                before => {
                    let next = Route::All(sources);
                    if before.only().is_none() || before.only() != next.only() {
                        return Err(Refusal::unsupported(
                            "the joined tables are not sharded equally, and the join needs several sources; join on both \
                             sharding columns, or restrict both to keys of one source",
                        ));
                    }
                    before
                }
            };
        }
        let spreads = matches!(&route, Route::All(sources) if sources.len() > 1);
        if spreads && scope.has_outer {
            scope.check_outer(classes.len())?;
        }
        for scoped in &scope.tables {
            let here = match &scoped.table.placement {
                Placement::Sharded(_) => continue,
                Placement::Single(source) => Route::All([*source].into()),
                Placement::Broadcast(sources) => Route::AnyOf(sources.clone()),
            };
            route = together(route, here, &scoped.table.name)?;
        }
        Ok(route)
    }

    /// The sources at which a whole query can be answered, subqueries included.
    pub(super) fn route_query(&self, query: &Query, names: &Names) -> Result<Route, Refusal> {
        let mut names = names.clone();
        let mut nested = Route::Free;
        if let Some(with) = &query.with {
            for cte in &with.cte_tables {
                if with.recursive {
                    names.0.insert(cte.alias.name.value.to_lowercase());
                }
                nested = one_place(nested, self.route_query(&cte.query, &names)?)?;
                names.0.insert(cte.alias.name.value.to_lowercase());
            }
        }
        let body = self.route_body(&query.body, &names)?;
        one_place(nested, body)
    }

    fn route_body(&self, body: &SetExpr, names: &Names) -> Result<Route, Refusal> {
        match body {
            SetExpr::Select(select) => self.route_select(select, names),
            SetExpr::Query(query) => self.route_query(query, names),
            SetExpr::SetOperation { left, right, .. } => {
                one_place(self.route_body(left, names)?, self.route_body(right, names)?)
            }
            SetExpr::Values(_) => Ok(Route::Free),
            _ => Err(Refusal::unsupported(
                "changes inside a query are not supported; send them as separate statements",
            )),
        }
    }

    fn route_select(&self, select: &Select, names: &Names) -> Result<Route, Refusal> {
        let scope = self.scope(&select.from, select.selection.as_ref(), names)?;
        let own = self.route_scope(&scope)?;
        let mut nested = Route::Free;
        for query in subqueries(select) {
            nested = one_place(nested, self.route_query(&query, names)?)?;
        }
        if scope.has_other && matches!(&own, Route::All(sources) if sources.len() > 1) {
            return Err(Refusal::unsupported(
                "a part of this FROM clause is not a plain table, and the rest is on several sources; \
                 restrict it to keys of one source",
            ));
        }
        one_place(nested, own)
    }
}

/// Combines two routes that must be answered at one source; a free one has no effect.
pub(super) fn one_place(left: Route, right: Route) -> Result<Route, Refusal> {
    match (left, right) {
        (Route::Free, route) | (route, Route::Free) => Ok(route),
        (Route::AnyOf(left), Route::AnyOf(right)) => {
            let both: OrdSet<_> = left.intersection(&right).copied().collect();
            if both.is_empty() {
                return Err(Refusal::unsupported(
                    "no single source has all the tables of this statement; split it",
                ));
            }
            Ok(Route::AnyOf(both))
        }
        (Route::AnyOf(any), Route::All(all)) | (Route::All(all), Route::AnyOf(any)) => {
            if all.len() == 1 && all.is_subset(&any) {
                return Ok(Route::All(all));
            }
            Err(Refusal::unsupported(
                "a subquery, CTE or set operation would need rows of several sources; split the statement, or \
                 restrict it to keys of one source",
            ))
        }
        (Route::All(left), Route::All(right)) => {
            if left == right && left.len() == 1 {
                return Ok(Route::All(left));
            }
            Err(Refusal::unsupported(
                "a subquery, CTE or set operation would need rows of several sources; split the statement, or \
                 restrict it to keys of one source",
            ))
        }
    }
}

/// Adds a table that is not sharded to a route.
fn together(route: Route, here: Route, name: &str) -> Result<Route, Refusal> {
    match (&route, &here) {
        (Route::Free, _) => Ok(here),
        (Route::All(sources), Route::AnyOf(copies))
        | (Route::AnyOf(copies), Route::All(sources)) => {
            if sources.is_subset(copies) {
                return Ok(Route::All(sources.clone()));
            }
            Err(Refusal::unsupported(format!(
                "table \"{name}\" is not at every source that this statement needs"
            )))
        }
        (Route::All(one), Route::All(other)) if one == other => Ok(route),
        (Route::AnyOf(_), Route::AnyOf(_)) => one_place(route, here),
        _ => Err(Refusal::unsupported(format!(
            "table \"{name}\" is at one source and this statement needs rows of others; make it a broadcast table, or \
             restrict the statement to that source",
        ))),
    }
}

impl Scope<'_> {
    /// The restriction of a column by all conditions.
    pub(super) fn constraint(&self, scoped: &Scoped<'_>, column: &str, key: KeyType) -> Constraint {
        let all = self.conditions.iter();
        all.fold(Constraint::Any, |found, condition| {
            found.and(scoped.constrain(condition, column, key))
        })
    }

    /// Groups sharded tables that are joined on their sharding columns and have the same layout.
    fn classes(&self) -> Vec<Vec<usize>> {
        let mut classes: Vec<Vec<usize>> = Vec::new();
        for (index, scoped) in self.tables.iter().enumerate() {
            let Some(sharding) = scoped.sharding() else { continue };
            let meets = |other: &usize| {
                let Some(other) = self.tables.get(*other) else { return false };
                other.sharding().is_some_and(|there| {
                    there.layout == sharding.layout
                        && there.key == sharding.key
                        && (self.is_joined(scoped, sharding, other, there)
                            || (there.column == sharding.column
                                && self.using.contains(&sharding.column)))
                })
            };
            let (mut with, without): (Vec<_>, Vec<_>) =
                classes.into_iter().partition(|class| class.iter().any(meets));
            let mut class: Vec<usize> = with.drain(..).flatten().collect();
            class.push(index);
            classes = without;
            classes.push(class);
        }
        classes
    }

    /// The sources with rows that a class of [`Scope::classes`] can join.
    fn sources_of(&self, class: &[usize]) -> OrdSet<SourceId> {
        let mut found: Option<OrdSet<SourceId>> = None;
        for &index in class {
            let Some(scoped) = self.tables.get(index) else { continue };
            let Some(sharding) = scoped.sharding() else { continue };
            let constraint = self.constraint(scoped, &sharding.column, sharding.key);
            let sources = constraint.sources(sharding);
            // A condition on the nullable side of an outer join removes no row of the other side.
            if scoped.is_nullable && class.len() > 1 {
                found.get_or_insert_with(|| sharding.layout.sources());
                continue;
            }
            found = Some(match found {
                None => sources,
                Some(before) => before.intersection(&sources).copied().collect(),
            });
        }
        let mut sources = found.unwrap_or_default();
        if sources.is_empty() {
            // No row can match. Any source returns the empty result with the right columns.
            let first = class
                .iter()
                .find_map(|&i| self.tables.get(i))
                .and_then(|t| t.table.sources().first().copied());
            sources.extend(first);
        }
        sources
    }

    /// Refuses an outer join over several sources in which each would fill in NULLs for rows that
    /// another source has.
    fn check_outer(&self, classes: usize) -> Result<(), Refusal> {
        let is_kept_whole = self.tables.iter().any(|t| !t.is_nullable && t.sharding().is_none());
        let all_nullable = self.tables.iter().all(|t| t.is_nullable);
        let all_sharded = self.tables.iter().all(|t| t.sharding().is_some());
        let is_one_class = all_nullable && all_sharded && classes == 1;
        if (is_kept_whole || all_nullable) && !is_one_class {
            return Err(Refusal::unsupported(
                "this outer join keeps rows of a table that is not sharded, once per source; \
                 turn it round, or restrict it to keys of one source",
            ));
        }
        Ok(())
    }

    /// The name or alias of each table.
    pub(super) fn aliases(&self) -> impl Iterator<Item = &str> {
        self.tables.iter().map(|scoped| scoped.alias.as_str())
    }

    /// Whether an expression is the sharding column of a table of the scope.
    pub(super) fn is_sharding_column(&self, expr: &Expr) -> bool {
        self.tables
            .iter()
            .any(|scoped| scoped.sharding().is_some_and(|s| scoped.is_column(expr, &s.column)))
    }

    fn is_joined(
        &self,
        one: &Scoped<'_>,
        here: &Sharding,
        other: &Scoped<'_>,
        there: &Sharding,
    ) -> bool {
        let mut all = self.conditions.iter().chain(&self.outer);
        all.any(|condition| {
            equates(condition, &|left, right| {
                (one.is_column(left, &here.column) && other.is_column(right, &there.column))
                    || (one.is_column(right, &here.column) && other.is_column(left, &there.column))
            })
        })
    }

    /// The restriction of a primary key column by all conditions.
    fn primary(&self, scoped: &Scoped<'_>, column: &str) -> Constraint {
        match scoped.sharding().filter(|sharding| sharding.column == column) {
            _ if self.by_key => self.constraint(scoped, column, KeyType::Integer),
            Some(sharding) => self.constraint(scoped, column, sharding.key),
            None => match self.constraint(scoped, column, KeyType::Text) {
                Constraint::In(keys) => Constraint::In(keys),
                _ => self.constraint(scoped, column, KeyType::Integer),
            },
        }
    }

    /// Whether conditions name all rows that are read or changed by their keys.
    pub(super) fn names_all(&self) -> bool {
        let is_named = |scoped: &Scoped<'_>, column: &String| {
            matches!(self.primary(scoped, column), Constraint::In(_))
        };
        let all_named = |scoped: &Scoped<'_>| {
            let primary = &scoped.table.primary;
            !primary.is_empty() && primary.iter().all(|column| is_named(scoped, column))
        };
        !self.has_other && self.tables.iter().all(all_named)
    }

    /// Whether all conditions are equalities of primary key columns of the only table: each column
    /// has one value, and nothing else restricts the rows.
    pub(super) fn names_only(&self) -> bool {
        let [scoped] = self.tables.as_slice() else { return false };
        let mut columns: Vec<&String> = scoped.table.primary.iter().collect();
        let mut rest: Vec<&Expr> = self.conditions.clone();
        while let Some(condition) = rest.pop() {
            match condition {
                Expr::Nested(inner) => rest.push(inner),
                Expr::BinaryOp { left, op: BinaryOperator::And, right } => {
                    rest.extend([&**left, &**right]);
                }
                Expr::BinaryOp { left, op: BinaryOperator::Eq, right } => {
                    let is_it = |column: &&String| {
                        let is_constant = |expr| {
                            constant(expr, KeyType::Integer)
                                .or_else(|| constant(expr, KeyType::Text))
                                .is_some()
                        };
                        (scoped.is_column(left, column) && is_constant(right))
                            || (scoped.is_column(right, column) && is_constant(left))
                    };
                    let Some(place) = columns.iter().position(is_it) else { return false };
                    columns.remove(place);
                }
                _ => return false,
            }
        }
        columns.is_empty()
    }

    /// The records that conditions name, at most [`RECORDS_MAX`].
    pub(super) fn records(&self, source: SourceId) -> Vec<Record> {
        let mut records = Vec::new();
        for scoped in self.tables.iter().filter(|scoped| !scoped.table.primary.is_empty()) {
            let mut names: Vec<Vec<Key>> = vec![Vec::new()];
            for column in &scoped.table.primary {
                let sharding = scoped.sharding().filter(|sharding| sharding.column == *column);
                let Constraint::In(keys) = self.primary(scoped, column) else {
                    names.clear();
                    break;
                };
                let here = |key: &&Key| {
                    sharding.is_none_or(|sharding| sharding.layout.place(key) == Some(source))
                };
                let with = |name: &Vec<Key>, key: &Key| {
                    name.iter().chain([key]).cloned().collect::<Vec<_>>()
                };
                let keys: Vec<&Key> = keys.iter().filter(here).collect();
                let longer = names.iter().flat_map(|name| keys.iter().map(|key| with(name, key)));
                names = longer.take(RECORDS_MAX).collect();
            }
            let one = |name: &Vec<Key>| Record::new(scoped.table, &name.iter().collect::<Vec<_>>());
            records.extend(names.iter().map(one));
        }
        records.truncate(RECORDS_MAX);
        records
    }
}

/// Whether a condition requires an equality that `is` accepts.
fn equates(condition: &Expr, is: &dyn Fn(&Expr, &Expr) -> bool) -> bool {
    match condition {
        Expr::Nested(inner) => equates(inner, is),
        Expr::BinaryOp { left, op: BinaryOperator::And, right } => {
            equates(left, is) || equates(right, is)
        }
        Expr::BinaryOp { left, op: BinaryOperator::Eq, right } => is(left, right),
        _ => false,
    }
}

/// The tables that a query reads, without the names of parts of it.
pub(super) fn relations(query: &Query) -> Vec<ObjectName> {
    struct Finder(Vec<ObjectName>, OrdSet<String>);
    impl Visitor for Finder {
        type Break = ();
        fn pre_visit_table_factor(&mut self, table: &TableFactor) -> ControlFlow<()> {
            if let TableFactor::Table { name, args: None, .. } = table {
                self.0.push(name.clone());
            }
            ControlFlow::Continue(())
        }
        fn pre_visit_query(&mut self, query: &Query) -> ControlFlow<()> {
            self.1.extend(Names::of(query).0);
            ControlFlow::Continue(())
        }
    }
    let mut finder = Finder(Vec::new(), OrdSet::new());
    let _ = walk(query, &mut finder);
    let Finder(mut names, parts) = finder;
    names.retain(|name| name.0.len() > 1 || !parts.contains(&table_name(name)));
    names
}

/// The tables that a statement names and the catalogue does not have, other than those of the sources' own catalogues.
#[must_use]
pub fn unknown_tables(catalogue: &Catalogue, statement: &Statement) -> OrdSet<String> {
    struct Finder(Vec<ObjectName>, OrdSet<String>);
    impl Visitor for Finder {
        type Break = ();
        fn pre_visit_relation(&mut self, name: &ObjectName) -> ControlFlow<()> {
            self.0.push(name.clone());
            ControlFlow::Continue(())
        }
        fn pre_visit_query(&mut self, query: &Query) -> ControlFlow<()> {
            self.1.extend(Names::of(query).0);
            ControlFlow::Continue(())
        }
    }
    let mut finder = Finder(Vec::new(), OrdSet::new());
    let _ = walk(statement, &mut finder);
    let Finder(mut names, parts) = finder;
    match statement {
        Statement::Drop { object_type: ObjectType::Table, names: all, .. } => {
            names.extend(all.iter().cloned());
        }
        Statement::Drop { table: Some(table), .. } => names.push(table.clone()),
        Statement::Truncate(truncate) => {
            names.extend(truncate.table_names.iter().map(|target| target.name.clone()));
        }
        _ => {}
    }
    let known = |name: &String| catalogue.table(name).is_some() || parts.contains(name);
    let names = names.iter().filter(|name| !is_system(name)).map(table_name);
    names.filter(|name| !known(name)).collect()
}

/// Whether a statement reads a table of the sources' own catalogues.
#[must_use]
pub fn reads_system_tables(statement: &Statement) -> bool {
    struct Finder(bool);
    impl Visitor for Finder {
        type Break = ();
        fn pre_visit_table_factor(&mut self, table: &TableFactor) -> ControlFlow<()> {
            // Nothing is read from `dual`.
            self.0 |= matches!(table, TableFactor::Table { name, args: None, .. }
                if is_system(name) && table_name(name) != "dual");
            ControlFlow::Continue(())
        }
    }
    let mut finder = Finder(false);
    let _ = walk(statement, &mut finder);
    finder.0
}

/// The sources' own schemas and databases.
pub(super) const SYSTEM_SCHEMAS: [&str; 5] =
    ["pg_catalog", "information_schema", "mysql", "performance_schema", "sys"];

/// The first part of a name, in lower case.
fn first_part(name: &ObjectName) -> String {
    let first = name.0.first().and_then(|part| part.as_ident());
    first.map_or_else(String::new, |ident| ident.value.to_lowercase())
}

/// Whether a name has the schema of a system catalogue of the sources before it.
fn has_system_schema(name: &ObjectName) -> bool {
    name.0.len() > 1 && SYSTEM_SCHEMAS.contains(&first_part(name).as_str())
}

/// Whether a name belongs to a system catalogue of the sources.
pub(super) fn is_system(name: &ObjectName) -> bool {
    let first = first_part(name);
    SYSTEM_SCHEMAS.contains(&first.as_str())
        || table_name(name).starts_with("pg_")
        || first == "dual"
}

/// The direct subqueries of a part of a statement, as derived tables and in expressions, without
/// nested ones. They are copies, because a visitor's references end with its calls.
pub(super) fn subqueries(part: &impl Visit) -> Vec<Query> {
    struct Outermost(usize, Vec<Query>);
    impl Visitor for Outermost {
        type Break = ();
        fn pre_visit_query(&mut self, query: &Query) -> ControlFlow<()> {
            if self.0 == 0 {
                self.1.push(query.clone());
            }
            self.0 += 1;
            ControlFlow::Continue(())
        }
        fn post_visit_query(&mut self, _: &Query) -> ControlFlow<()> {
            self.0 -= 1;
            ControlFlow::Continue(())
        }
    }
    let mut seen = Outermost(0, Vec::new());
    let _ = walk(part, &mut seen);
    seen.1
}
