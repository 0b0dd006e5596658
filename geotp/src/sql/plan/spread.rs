//! One SELECT over several sources: the query for each source, and how rows are merged.

use sqlparser::ast::{
    CastKind, Distinct, DuplicateTreatment, Expr, FunctionArg, FunctionArgExpr, FunctionArguments,
    GroupByExpr, Ident, LimitClause, ObjectName, ObjectNamePart, OrderByKind, OrderBySort, Query,
    Select, SelectItem, SetExpr, Value as SqlValue,
};

use super::super::Refusal;
use super::super::catalog::Dialect;
use super::super::dialect::nulls_first;
use super::super::merge::{At, Op, RowMerge, SortKey};
use super::super::route::{Scope, table_name};
use super::aggregate::{Contains, aggregate};
use super::number;

/// One SELECT for several sources.
pub(super) struct Spread<'a> {
    pub(super) client: Dialect,
    pub(super) select: &'a Select,
    pub(super) scope: &'a Scope<'a>,
}

/// The columns of each source's answer: first those of the client, then hidden ones.
struct Columns {
    items: Vec<SelectItem>,
    /// How the columns of aggregated rows are merged; none if rows are not aggregated.
    ops: Vec<Op>,
}

/// What combines rows: DISTINCT and GROUP BY.
struct Grouping<'a> {
    is_distinct: bool,
    is_aggregated: bool,
    groups: &'a [Expr],
}

fn no<T>(text: &str) -> Result<T, Refusal> {
    Err(Refusal::unsupported(format!(
        "{text} over several sources is not supported; restrict the statement to keys of one source"
    )))
}

impl Spread<'_> {
    /// The query for each source, and how all rows are merged to the client's result.
    pub(super) fn spread(&self, query: &Query) -> Result<(Query, RowMerge), Refusal> {
        let select = self.select;
        let grouping = self.grouping(query)?;
        let Grouping { is_distinct, is_aggregated, groups } = grouping;
        let visible = select.projection.len();
        let mut columns = Columns { items: select.projection.clone(), ops: Vec::new() };
        if is_aggregated {
            self.aggregates(groups, &mut columns)?;
        }
        let group_columns = match is_aggregated {
            true => self.group_columns(groups, &mut columns),
            false => Vec::new(),
        };
        let order = self.order(query, &grouping, &mut columns)?;
        let (limit, offset) = limits(query.limit_clause.as_ref())?;
        let mut query = query.clone();
        if is_aggregated {
            // The first groups of a source may not be among the first groups of all.
            query.limit_clause = None;
            query.order_by = None;
        } else {
            query.limit_clause = limit.map(|limit| LimitClause::LimitOffset {
                limit: Some(number(limit.saturating_add(offset))),
                offset: None,
                limit_by: Vec::new(),
            });
        }
        let Columns { items, ops } = columns;
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

    /// Refuses clauses that cannot be computed from the rows of each source.
    fn grouping(&self, query: &Query) -> Result<Grouping<'_>, Refusal> {
        let select = self.select;
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
        Ok(Grouping { is_distinct, is_aggregated, groups })
    }

    /// How the columns of the select list are merged.
    fn aggregates(&self, groups: &[Expr], columns: &mut Columns) -> Result<(), Refusal> {
        let Columns { items, ops } = columns;
        for item in &self.select.projection {
            let expr = match item {
                SelectItem::UnnamedExpr(expr) | SelectItem::ExprWithAlias { expr, .. } => expr,
                _ => return no("`*` beside an aggregate"),
            };
            ops.push(self.operation(expr, groups)?);
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
            self.split_average(items, index)?;
            if let Some(op) = ops.get_mut(index) {
                *op = Op::Average { count: hidden };
            }
            ops.push(Op::Sum);
        }
        Ok(())
    }

    /// The columns that identify groups; those that the client did not select are hidden.
    fn group_columns(&self, groups: &[Expr], columns: &mut Columns) -> Vec<usize> {
        let column = |by| {
            let by = self.resolve(by);
            self.position(by, &self.select.projection).unwrap_or_else(|| {
                columns.items.push(SelectItem::UnnamedExpr(by.clone()));
                columns.ops.push(Op::Group);
                columns.items.len() - 1
            })
        };
        groups.iter().map(column).collect()
    }

    fn order(
        &self,
        query: &Query,
        grouping: &Grouping<'_>,
        columns: &mut Columns,
    ) -> Result<Vec<SortKey>, Refusal> {
        let Some(by) = &query.order_by else { return Ok(Vec::new()) };
        let OrderByKind::Expressions(keys) = &by.kind else { return no("ORDER BY ALL") };
        let mut order = Vec::new();
        for key in keys {
            if matches!(key.options.sort, Some(OrderBySort::Using(_))) {
                return no("ORDER BY … USING");
            }
            order.push(SortKey {
                at: self.order_column(&key.expr, grouping, columns)?,
                is_descending: matches!(key.options.sort, Some(OrderBySort::Desc)),
                nulls_first: nulls_first(key, self.client),
            });
        }
        Ok(order)
    }

    /// Resolves `GROUP BY 2` and `GROUP BY alias` to an item of the select list.
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

    /// How a column of aggregated rows is merged.
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
        // coalesce(sum(x), 0) can be added up like sum(x).
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

    /// Replaces `avg(x)` by `sum(x)`, and appends `count(x)`.
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
        grouping: &Grouping<'_>,
        columns: &mut Columns,
    ) -> Result<At, Refusal> {
        if let Expr::Value(value) = key
            && let SqlValue::Number(text, _) = &value.value
            && let Some(index) = text.parse::<usize>().ok().and_then(|n| n.checked_sub(1))
        {
            return Ok(At::Column(index));
        }
        if let Some(at) = self.listed_column(key, grouping.is_distinct)? {
            return Ok(at);
        }
        if grouping.is_distinct {
            return Err(Refusal::unsupported(
                "with DISTINCT, ORDER BY must name columns of the list",
            ));
        }
        let Columns { items, ops } = columns;
        if grouping.is_aggregated {
            let op = self.operation(key, grouping.groups)?;
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
        // Hidden columns are counted from the end, because the width of `*` is unknown.
        Ok(At::Hidden(items.len() - 1 - self.select.projection.len()))
    }

    /// The name of a column of the result that is not a plain column of a table.
    fn name_of<'i>(&self, item: &'i SelectItem) -> Option<&'i Ident> {
        match item {
            SelectItem::ExprWithAlias { alias, .. } => Some(alias),
            // At PostgreSQL, a cast has the name of its column.
            SelectItem::UnnamedExpr(expr @ Expr::Cast { .. })
                if self.client == Dialect::PostgreSql =>
            {
                cast_column(expr)
            }
            _ => None,
        }
    }

    /// The column of the select list that an ORDER BY names.
    fn listed_column(&self, key: &Expr, is_distinct: bool) -> Result<Option<At>, Refusal> {
        let is_wild = |item: &SelectItem| {
            matches!(item, SelectItem::Wildcard(_) | SelectItem::QualifiedWildcard(..))
        };
        let projection = &self.select.projection;
        let has_wild = projection.iter().any(is_wild);
        if let Expr::Identifier(name) = key {
            let is_named = |item: &SelectItem| {
                self.name_of(item).is_some_and(|own| own.value.eq_ignore_ascii_case(&name.value))
            };
            let by_alias = projection.iter().position(is_named);
            if let Some(index) = by_alias {
                return Ok(Some(if has_wild {
                    At::Named(name.value.to_lowercase())
                } else {
                    At::Column(index)
                }));
            }
        }
        if !has_wild {
            return Ok(self.position(key, projection).map(At::Column));
        }
        let last = match key {
            Expr::Identifier(name) => Some(name),
            Expr::CompoundIdentifier(names) => names.last(),
            _ => None,
        };
        if let (Some(name), true) = (last, self.scope.tables.len() == 1) {
            return Ok(Some(At::Named(name.value.to_lowercase())));
        }
        if is_distinct {
            return Err(Refusal::unsupported(
                "with DISTINCT and `*` over several sources, order by plain columns of one table",
            ));
        }
        Ok(None)
    }
}

/// The column that is cast, possibly several times.
fn cast_column(expr: &Expr) -> Option<&Ident> {
    match expr {
        Expr::Cast { expr, .. } => cast_column(expr),
        Expr::Identifier(name) => Some(name),
        Expr::CompoundIdentifier(names) => names.last(),
        _ => None,
    }
}

/// Whether two expressions are equal except for table names before columns, and for letter case.
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
    // SQLAlchemy casts its numbers.
    fn constant(expr: &Expr) -> Option<Option<usize>> {
        match expr {
            Expr::Nested(inner) => constant(inner),
            Expr::Cast {
                expr, data_type, kind: CastKind::Cast | CastKind::DoubleColon, ..
            } => {
                const INTEGERS: [&str; 7] =
                    ["int", "integer", "bigint", "smallint", "int2", "int4", "int8"];
                let name = data_type.to_string().to_lowercase();
                let is_integer = INTEGERS.contains(&name.as_str());
                is_integer.then(|| constant(expr))?
            }
            Expr::Value(value) => match &value.value {
                SqlValue::Number(text, _) | SqlValue::SingleQuotedString(text) => {
                    text.parse::<usize>().ok().map(Some)
                }
                SqlValue::Null => Some(None),
                _ => None,
            },
            _ => None,
        }
    }
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
