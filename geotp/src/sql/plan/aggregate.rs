//! Aggregates and window functions in expressions.

use std::ops::ControlFlow;

use sqlparser::ast::{Expr, Function, Query, Visit, Visitor};

use super::super::route::table_name;
use super::super::walk::walk;

/// The name of an aggregate function, if the expression is a call of one.
pub(super) fn aggregate(expr: &Expr) -> Option<(String, &Function)> {
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

/// What an expression contains, not counting subqueries.
pub(super) struct Contains {
    depth: usize,
    pub(super) aggregate: bool,
    pub(super) window: bool,
}

impl Contains {
    pub(super) fn of(part: &impl Visit) -> Self {
        let mut found = Self { depth: 0, aggregate: false, window: false };
        let _ = walk(part, &mut found);
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
