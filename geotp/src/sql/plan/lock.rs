//! The locks that serializable transactions take at their sources.

use std::ops::ControlFlow;

use sqlparser::ast::{
    Expr, Function, FunctionArg, FunctionArgExpr, FunctionArguments, GroupByExpr, Ident, Join,
    JoinConstraint, JoinOperator, LockClause, LockType, NonBlock, ObjectName, ObjectNamePart,
    Query, Select, SelectItem, SetExpr, Statement, TableFactor, TableWithJoins, Visitor,
    VisitorMut,
};

use super::super::Refusal;
use super::super::catalog::Dialect;
use super::super::parse::Isolation;
use super::super::route::{Names, RECORDS_MAX, Router, table_name};
use super::super::walk::walk;
use super::aggregate::Contains;
use super::record::{Keys, Named};
use super::{Planner, number};

impl Planner<'_> {
    /// MariaDB locks the gaps itself. Who skips what is locked does not want to know whether it is there.
    pub(super) fn keys(
        &self,
        statement: &Statement,
        to: Dialect,
        named: &Named,
    ) -> Result<Keys, Refusal> {
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
}

/// Adds the locks that serializable reads need at a source.
pub(super) struct Locker<'a> {
    pub(super) to: Dialect,
    pub(super) depth: usize,
    pub(super) prelude: Vec<Query>,
    pub(super) router: &'a Router<'a>,
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

    fn post_visit_query(&mut self, query: &mut Query) -> ControlFlow<Refusal> {
        self.depth -= 1;
        query.locks.retain(|lock| !is_operand(lock));
        ControlFlow::Continue(())
    }
}

fn share(of: Option<&str>) -> LockClause {
    let of = of.map(|name| ObjectName(vec![ObjectNamePart::Identifier(Ident::new(name))]));
    LockClause { lock_type: LockType::Share, of, nonblock: None }
}

/// The name in a lock that only marks an operand of a set operation in parentheses. PostgreSQL
/// accepts no locks there, so the whole query locks what the operand reads.
const OPERAND: &str = "orthodrome_operand";

fn is_operand(lock: &LockClause) -> bool {
    lock.of.as_ref().is_some_and(|of| of.to_string() == OPERAND)
}

/// Marks the operands in parentheses, which are visited later.
fn mark_operands(body: &mut SetExpr) {
    match body {
        SetExpr::SetOperation { left, right, .. } => {
            mark_operands(left);
            mark_operands(right);
        }
        SetExpr::Query(query) => {
            mark_operands(&mut query.body);
            if query.locks.is_empty() {
                query.locks.push(share(Some(OPERAND)));
            }
        }
        _ => {}
    }
}

/// Whether the list of a SELECT has a function that returns several rows. PostgreSQL locks no rows
/// of such a query.
fn returns_sets(select: &Select) -> bool {
    const SETS: [&str; 18] = [
        "unnest",
        "generate_series",
        "generate_subscripts",
        "json_array_elements",
        "json_array_elements_text",
        "jsonb_array_elements",
        "jsonb_array_elements_text",
        "json_each",
        "json_each_text",
        "jsonb_each",
        "jsonb_each_text",
        "json_object_keys",
        "jsonb_object_keys",
        "jsonb_path_query",
        "regexp_matches",
        "regexp_split_to_table",
        "string_to_table",
        "json_populate_recordset",
    ];
    struct Finder {
        depth: usize,
    }
    impl Visitor for Finder {
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
                && SETS.contains(&table_name(&function.name).as_str())
            {
                return ControlFlow::Break(());
            }
            ControlFlow::Continue(())
        }
    }
    walk(&select.projection, &mut Finder { depth: 0 }).is_break()
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
        if matches!(&*query.body, SetExpr::Query(_)) {
            // The query in the parentheses locks for itself.
            return Ok(());
        }
        mark_operands(&mut query.body);
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
            let optional = if scope.has_outer { optional_sides(select) } else { Some(Vec::new()) };
            let Some(optional) = optional.filter(|sides| sides.is_empty() || is_top) else {
                return Err(Refusal::unsupported(
                    "PostgreSQL cannot lock the optional side of an outer join, as SERIALIZABLE wants here; read the \
                     tables in two statements, or ask for REPEATABLE READ",
                ));
            };
            for (select, alias) in optional {
                preludes.push(locking_prelude(&select, vec![share_of(alias)]));
            }
            let found = Contains::of(&select.projection);
            let is_grouped = select.distinct.is_some()
                || select.having.is_some()
                || found.aggregate
                || found.window
                || returns_sets(select)
                || !matches!(&select.group_by, GroupByExpr::Expressions(by, _) if by.is_empty());
            if is_plain_select && !is_grouped && scope.has_outer {
                aliases = Some(required_sides(select));
            } else if is_plain_select && !is_grouped {
                aliases = Some(if scope.has_other {
                    scope.aliases().map(|a| share(Some(a))).collect()
                } else {
                    vec![share(None)]
                });
            } else if is_top {
                let all = vec![share(None)];
                let locks = if scope.has_outer { required_sides(select) } else { all };
                preludes.push(locking_prelude(select, locks));
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

fn share_of(alias: Ident) -> LockClause {
    let of = Some(ObjectName(vec![ObjectNamePart::Identifier(alias)]));
    LockClause { lock_type: LockType::Share, of, nonblock: None }
}

/// What a table is called in its FROM clause.
fn alias_of(table: &TableFactor) -> Option<Ident> {
    match table {
        TableFactor::Table { alias: Some(alias), .. } => Some(alias.name.clone()),
        TableFactor::Table { name, alias: None, .. } => name.0.last()?.as_ident().cloned(),
        _ => None,
    }
}

/// The constraint of a left join.
fn left(join: &Join) -> Option<&JoinConstraint> {
    match &join.join_operator {
        JoinOperator::Left(constraint) | JoinOperator::LeftOuter(constraint) => Some(constraint),
        _ => None,
    }
}

/// For each table on the optional side of a left join: a query in which that join is an inner one, so that PostgreSQL can
/// lock the rows of the table that are found, and the table's name there. Nothing if another outer join is among them.
fn optional_sides(select: &Select) -> Option<Vec<(Select, Ident)>> {
    let mut found = Vec::new();
    for (item, from) in select.from.iter().enumerate() {
        for (place, join) in from.joins.iter().enumerate() {
            let is_inner = matches!(
                join.join_operator,
                JoinOperator::Join(_) | JoinOperator::Inner(_) | JoinOperator::CrossJoin(_)
            );
            if is_inner {
                continue;
            }
            let constraint = left(join)?.clone();
            // What a derived table reads it locks for itself.
            let Some(alias) = alias_of(&join.relation) else { continue };
            let mut select = select.clone();
            let join = select.from.get_mut(item)?.joins.get_mut(place)?;
            join.join_operator = JoinOperator::Inner(constraint);
            found.push((select, alias));
        }
    }
    Some(found)
}

/// Locks of the tables that are on no optional side.
fn required_sides(select: &Select) -> Vec<LockClause> {
    let of = |from: &TableWithJoins| {
        let joined = from.joins.iter().filter(|join| left(join).is_none());
        let tables = [&from.relation].into_iter().chain(joined.map(|join| &join.relation));
        tables.filter_map(alias_of).map(share_of).collect::<Vec<_>>()
    };
    select.from.iter().flat_map(of).collect()
}

fn selects_of<'a>(body: &'a SetExpr, into: &mut Vec<&'a Select>) {
    match body {
        SetExpr::Select(select) => into.push(select),
        SetExpr::SetOperation { left, right, .. } => {
            selects_of(left, into);
            selects_of(right, into);
        }
        SetExpr::Query(query) => selects_of(&query.body, into),
        _ => {}
    }
}

/// `SELECT count(*) FROM (SELECT 1 FROM … WHERE … FOR SHARE) AS orthodrome_locked`.
fn locking_prelude(select: &Select, locks: Vec<LockClause>) -> Query {
    let mut inner = select.clone();
    inner.distinct = None;
    inner.projection = vec![SelectItem::UnnamedExpr(number(1))];
    inner.group_by = GroupByExpr::Expressions(Vec::new(), Vec::new());
    inner.having = None;
    inner.named_window = Vec::new();
    let inner = bare_query(SetExpr::Select(Box::new(inner)), locks);
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
