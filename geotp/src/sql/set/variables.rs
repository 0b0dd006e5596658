//! Session variables in MySQL statements: replaces them by their values.

use std::ops::ControlFlow;

use sqlparser::ast::{
    Expr, FunctionArguments, Ident, SelectItem, SetExpr, Statement, Value as SqlValue, VisitorMut,
};

use super::super::Refusal;
use super::super::route::table_name;
use super::super::walk::walk_mut;

/// Replaces session variables in a MySQL statement by their values. `of` returns the values of
/// known variables by their names in lower case; the value of `last_insert_id()` has that name.
pub fn put_variables(statement: &mut Statement, of: impl Fn(&str) -> Option<String>) {
    // The column keeps the name that the client's expression gives it.
    if let Statement::Query(query) = statement
        && let SetExpr::Select(select) = &mut *query.body
    {
        for item in &mut select.projection {
            if let SelectItem::UnnamedExpr(expr) = item
                && variable(expr).is_some_and(|name| of(&name).is_some())
            {
                let alias = Ident::with_quote('`', expr.to_string());
                *item = SelectItem::ExprWithAlias { expr: expr.clone(), alias };
            }
        }
    }
    // This visitor returns no error.
    let _ = walk_mut(statement, &mut Variables { of });
}

/// The name of a variable, if the expression is one.
fn variable(expr: &Expr) -> Option<String> {
    let written = match expr {
        Expr::Identifier(name) => name.value.to_lowercase(),
        Expr::CompoundIdentifier(parts) => {
            let parts: Vec<String> = parts.iter().map(|part| part.value.to_lowercase()).collect();
            parts.join(".")
        }
        Expr::Function(function) => {
            let name = table_name(&function.name);
            let has_none =
                matches!(&function.args, FunctionArguments::List(list) if list.args.is_empty());
            return (name == "last_insert_id" && has_none).then_some(name);
        }
        _ => return None,
    };
    let name = written.strip_prefix("@@")?;
    let name = ["session.", "local."].iter().find_map(|s| name.strip_prefix(s)).unwrap_or(name);
    Some(name.to_owned())
}

struct Variables<F> {
    of: F,
}

impl<F: Fn(&str) -> Option<String>> VisitorMut for Variables<F> {
    type Break = Refusal;
    fn pre_visit_expr(&mut self, expr: &mut Expr) -> ControlFlow<Refusal> {
        if let Some(value) = variable(expr).and_then(|name| (self.of)(&name)) {
            let is_number = !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit());
            let value = if is_number {
                SqlValue::Number(value, false)
            } else {
                SqlValue::SingleQuotedString(value)
            };
            *expr = Expr::Value(value.with_empty_span());
        }
        ControlFlow::Continue(())
    }
}
