//! The rows of an INSERT that frameworks write as a query over constants: `INSERT … SELECT … FROM
//! (VALUES …)` of SQLAlchemy and `INSERT … SELECT * FROM UNNEST(…)` of Django. Written as `VALUES`,
//! each row can be placed, and both kinds of sources read it.

use std::ops::ControlFlow;

use orthodrome_core::ordered::OrdMap;

use sqlparser::ast::{
    Expr, GroupByExpr, Ident, Insert, OrderByKind, Parens, Query, Select, SelectItem, SetExpr,
    TableFactor, Value as SqlValue, VisitMut, VisitorMut,
};

use super::Refusal;
use super::arrays::elements_of_any;
use super::generated::values;

/// Writes the rows of a query over constants as `VALUES`. Other queries stay.
pub(super) fn list_rows(insert: &mut Insert) {
    if let Some(rows) = insert.source.as_deref().and_then(rows_of) {
        insert.source = Some(Box::new(values(rows)));
    }
}

fn rows_of(query: &Query) -> Option<Vec<Parens<Vec<Expr>>>> {
    let Query { with: None, body, order_by, limit_clause: None, fetch: None, locks, .. } = query
    else {
        return None;
    };
    let SetExpr::Select(select) = &**body else { return None };
    let [from] = select.from.as_slice() else { return None };
    if !locks.is_empty() || !from.joins.is_empty() || !is_plain(select) {
        return None;
    }
    let rows = match &from.relation {
        TableFactor::Derived { lateral: false, subquery, alias: Some(alias), sample: None } => {
            let SetExpr::Values(values) = &*subquery.body else { return None };
            let is_alone = subquery.with.is_none()
                && subquery.order_by.is_none()
                && subquery.limit_clause.is_none()
                && subquery.fetch.is_none();
            if !is_alone {
                return None;
            }
            let names: Vec<&Ident> = alias.columns.iter().map(|column| &column.name).collect();
            let mut keys = Vec::new();
            if let Some(order) = order_by {
                let OrderByKind::Expressions(order) = &order.kind else { return None };
                let [key] = order.as_slice() else { return None };
                let is_changed = key.options.sort.is_some() || key.options.nulls_first.is_some();
                let Expr::Identifier(key) = &key.expr else { return None };
                let place = names.iter().position(|name| is_same(name, key))?;
                keys = values.rows.iter().map(|row| number(row.content.get(place)?)).collect();
                if is_changed {
                    return None;
                }
            }
            // The rows must be in the order that is asked for.
            let keys: Option<Vec<u64>> = keys.into_iter().collect();
            if !keys?.is_sorted_by(|one, next| one < next) {
                return None;
            }
            let row = |row: &Parens<Vec<Expr>>| selected(&select.projection, &names, &row.content);
            values.rows.iter().map(row).collect::<Option<Vec<_>>>()?
        }
        TableFactor::UNNEST { array_exprs, with_offset: false, with_ordinality: false, .. }
            if order_by.is_none() =>
        {
            let [SelectItem::Wildcard(_)] = select.projection.as_slice() else { return None };
            let columns: Vec<Vec<Expr>> =
                array_exprs.iter().map(elements_of_any).collect::<Option<_>>()?;
            let count = columns.first()?.len();
            if count == 0 || columns.iter().any(|column| column.len() != count) {
                return None;
            }
            let row = |at| columns.iter().map(|column| column.get(at).cloned()).collect();
            (0..count).map(row).collect::<Option<Vec<_>>>()?
        }
        _ => return None,
    };
    Some(rows.into_iter().map(Parens::with_empty_span).collect())
}

/// Whether a SELECT has nothing but a list and what it selects from.
fn is_plain(select: &Select) -> bool {
    let is_grouped = match &select.group_by {
        GroupByExpr::Expressions(by, modifiers) => !by.is_empty() || !modifiers.is_empty(),
        GroupByExpr::All(_) => true,
    };
    !is_grouped
        && select.distinct.is_none()
        && select.selection.is_none()
        && select.having.is_none()
        && select.into.is_none()
        && select.top.is_none()
        && select.qualify.is_none()
        && select.named_window.is_empty()
        && select.lateral_views.is_empty()
}

fn is_same(name: &Ident, other: &Ident) -> bool {
    name.value == other.value
        || (other.quote_style.is_none() && name.value.eq_ignore_ascii_case(&other.value))
}

fn number(expr: &Expr) -> Option<u64> {
    let Expr::Value(value) = expr else { return None };
    let SqlValue::Number(text, _) = &value.value else { return None };
    text.parse().ok()
}

/// The list of a SELECT with the values of one row in the place of its columns.
fn selected(list: &[SelectItem], names: &[&Ident], row: &[Expr]) -> Option<Vec<Expr>> {
    struct Placer<'a> {
        of: OrdMap<String, &'a Expr>,
        is_strange: bool,
    }
    impl VisitorMut for Placer<'_> {
        type Break = Refusal;
        fn post_visit_expr(&mut self, expr: &mut Expr) -> ControlFlow<Refusal> {
            let name = match &*expr {
                Expr::Identifier(name) => name,
                Expr::CompoundIdentifier(names) => match names.last() {
                    Some(name) => name,
                    None => return ControlFlow::Continue(()),
                },
                // A function may combine rows, or make several of one.
                Expr::Function(_)
                | Expr::Subquery(_)
                | Expr::Exists { .. }
                | Expr::InSubquery { .. } => {
                    self.is_strange = true;
                    return ControlFlow::Continue(());
                }
                _ => return ControlFlow::Continue(()),
            };
            match self.of.get(&name.value) {
                Some(value) => *expr = (*value).clone(),
                None => self.is_strange = true,
            }
            ControlFlow::Continue(())
        }
    }
    if names.len() != row.len() {
        return None;
    }
    let of = names.iter().map(|name| name.value.clone()).zip(row).collect();
    let mut placer = Placer { of, is_strange: false };
    let mut found = Vec::with_capacity(list.len());
    for item in list {
        let SelectItem::UnnamedExpr(expr) = item else { return None };
        let mut expr = expr.clone();
        let _ = VisitMut::visit(&mut expr, &mut placer);
        found.push(expr);
    }
    (!placer.is_strange).then_some(found)
}

#[cfg(test)]
mod tests {
    use super::super::{Dialect, Verb, parse};

    fn written(text: &str) -> String {
        match parse(text, Dialect::PostgreSql).unwrap().remove(0).verb {
            Verb::Data(statement) => statement.to_string(),
            other => panic!("{text}: {other:?}"),
        }
    }

    #[test]
    fn rows_of_frameworks_are_values() {
        for (text, expected) in [
            (
                "INSERT INTO t (a, b) SELECT p0::INTEGER, p1::VARCHAR FROM (VALUES ($1, $2, 0), ($3, $4, 1)) \
                 AS imp_sen(p0, p1, sen_counter) ORDER BY sen_counter RETURNING t.id",
                "INSERT INTO t (a, b) VALUES ($1::INTEGER, $2::VARCHAR), ($3::INTEGER, $4::VARCHAR) RETURNING t.id",
            ),
            (
                "INSERT INTO t (a) SELECT x.a FROM (VALUES ('p0'), (NULL)) AS x (a)",
                "INSERT INTO t (a) VALUES ('p0'), (NULL)",
            ),
            (
                "INSERT INTO t (a, b) SELECT * FROM UNNEST(('{1,2}')::integer[], (ARRAY['x', NULL])::text[]) RETURNING id",
                "INSERT INTO t (a, b) VALUES ('1', 'x'), ('2', NULL) RETURNING id",
            ),
        ] {
            assert_eq!(written(text), expected);
        }
        for text in [
            "INSERT INTO t (a) SELECT a FROM (VALUES (1), (2)) AS x (a) WHERE a > 1",
            "INSERT INTO t (a) SELECT a FROM (VALUES (1), (2)) AS x (a) LIMIT 1",
            "INSERT INTO t (a) SELECT a FROM (VALUES (2), (1)) AS x (a) ORDER BY a",
            "INSERT INTO t (a) SELECT b FROM (VALUES (1)) AS x (a)",
            "INSERT INTO t (a) SELECT DISTINCT a FROM (VALUES (1), (1)) AS x (a)",
            "INSERT INTO t (a) SELECT count(*) FROM (VALUES (1), (1)) AS x (a) GROUP BY a",
            "INSERT INTO t (a) SELECT max(a) FROM (VALUES (1), (2)) AS x (a)",
            "INSERT INTO t (a) SELECT (SELECT a) FROM (VALUES (1)) AS x (a)",
            "INSERT INTO t (a, b) SELECT * FROM UNNEST('{1,2}'::integer[], '{x}'::text[])",
            "INSERT INTO t (a) SELECT * FROM UNNEST($1::integer[])",
        ] {
            assert!(written(text).contains("SELECT"), "{}", written(text));
        }
    }
}
