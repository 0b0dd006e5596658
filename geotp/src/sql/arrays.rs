//! `x = ANY (array)` as `x IN (…)`, which MariaDB knows too, and from which the sources of a
//! statement follow.

use std::ops::ControlFlow;

use sqlparser::ast::{BinaryOperator, CastKind, Expr, Statement, Value as SqlValue, VisitorMut};
use sqlparser::tokenizer::Span;

use super::Refusal;
use super::walk::walk_mut;

/// Replaces comparisons with all elements of a constant array of one dimension.
///
/// # Errors
/// None: what is not such a comparison stays as it is.
pub(super) fn list_elements(statement: &mut Statement) -> Result<(), Refusal> {
    struct Lister;
    impl VisitorMut for Lister {
        type Break = Refusal;
        fn pre_visit_expr(&mut self, expr: &mut Expr) -> ControlFlow<Refusal> {
            let (left, right, negated) = match &*expr {
                Expr::AnyOp { left, compare_op: BinaryOperator::Eq, right, .. } => {
                    (left, right, false)
                }
                Expr::AllOp { left, compare_op: BinaryOperator::NotEq, right } => {
                    (left, right, true)
                }
                _ => return ControlFlow::Continue(()),
            };
            // PostgreSQL's and MariaDB's IN has at least one element.
            if let Some(list) = elements(right).filter(|list| !list.is_empty()) {
                *expr = Expr::InList { expr: left.clone(), list, negated };
            }
            ControlFlow::Continue(())
        }
    }
    walk_mut(statement, &mut Lister)
}

/// The elements of an array; none if they are not known here.
fn elements(array: &Expr) -> Option<Vec<Expr>> {
    match array {
        Expr::Nested(inner) => elements(inner),
        Expr::Cast { expr, kind: CastKind::Cast | CastKind::DoubleColon, .. } => {
            // The elements of a constructor may be anything, so the cast may change them.
            matches!(**expr, Expr::Value(_)).then(|| elements(expr))?
        }
        Expr::Array(array) => {
            let is_plain = |one: &Expr| !matches!(one, Expr::Array(_) | Expr::Subquery(_));
            array.elem.iter().all(is_plain).then(|| array.elem.clone())
        }
        Expr::Value(value) => match &value.value {
            SqlValue::SingleQuotedString(text) | SqlValue::EscapedStringLiteral(text) => {
                let constant = |text: Option<String>| match text {
                    None => SqlValue::Null,
                    Some(text) => SqlValue::SingleQuotedString(text),
                };
                let texts = texts(text)?.into_iter();
                Some(
                    texts
                        .map(|text| Expr::Value(constant(text).with_span(Span::empty())))
                        .collect(),
                )
            }
            _ => None,
        },
        _ => None,
    }
}

/// The elements of an array, whatever type it is cast to: they are written to columns of their own
/// types. None if they are not known here.
pub(super) fn elements_of_any(array: &Expr) -> Option<Vec<Expr>> {
    match array {
        Expr::Nested(inner) => elements_of_any(inner),
        Expr::Cast { expr, kind: CastKind::Cast | CastKind::DoubleColon, .. } => {
            elements_of_any(expr)
        }
        other => elements(other),
    }
}

/// The elements of an array in PostgreSQL's text form; none if it has another form than `{…}` with
/// one dimension.
fn texts(array: &str) -> Option<Vec<Option<String>>> {
    let inner = array.trim().strip_prefix('{')?.strip_suffix('}')?;
    let mut found = Vec::new();
    if inner.trim().is_empty() {
        return Some(found);
    }
    let mut chars = inner.chars().peekable();
    loop {
        while chars.next_if(|c| c.is_whitespace()).is_some() {}
        let mut text = String::new();
        let is_quoted = chars.next_if_eq(&'"').is_some();
        loop {
            match chars.next_if(|c| is_quoted || *c != ',') {
                None if is_quoted => return None,
                None => break,
                Some('"') if is_quoted => break,
                Some('"' | '{' | '}') if !is_quoted => return None,
                Some('\\') => text.push(chars.next()?),
                Some(c) => text.push(c),
            }
        }
        while chars.next_if(|c| is_quoted && c.is_whitespace()).is_some() {}
        let bare = text.trim_end();
        found.push(match is_quoted {
            true => Some(text),
            false if bare.is_empty() => return None,
            false if bare.eq_ignore_ascii_case("null") => None,
            false => Some(bare.to_owned()),
        });
        match chars.next() {
            None => return Some(found),
            Some(',') => {}
            Some(_) => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Dialect, Verb, parse};
    use super::*;

    fn listed(condition: &str) -> String {
        let text = format!("SELECT 1 WHERE {condition}");
        let Verb::Data(mut statement) = parse(&text, Dialect::PostgreSql).unwrap().remove(0).verb
        else {
            panic!("{text}");
        };
        list_elements(&mut statement).unwrap();
        statement.to_string().trim_start_matches("SELECT 1 WHERE ").to_owned()
    }

    #[test]
    fn constant_arrays_become_lists() {
        for (condition, expected) in [
            ("x = ANY('{1,2}')", "x IN ('1', '2')"),
            ("x = ANY('{ 1 , NULL }'::int[])", "x IN ('1', NULL)"),
            (r#"x = ANY('{"a,b","q\"\\", "NULL",c d }')"#, r#"x IN ('a,b', 'q"\', 'NULL', 'c d')"#),
            ("x = ANY(ARRAY[1, y + 1])", "x IN (1, y + 1)"),
            ("x = SOME('{1}')", "x IN ('1')"),
            ("x <> ALL('{1,2}')", "x NOT IN ('1', '2')"),
        ] {
            assert_eq!(listed(condition), expected);
        }
        // Everything else stays.
        for condition in [
            "x = ANY('{}')",
            "x = ANY('{{1},{2}}')",
            "x = ANY('{1,}')",
            "x = ANY('{\"1}')",
            "x = ANY('[0:1]={1,2}')",
            "x > ANY('{1,2}')",
            "x = ALL('{1,2}')",
            "x = ANY(y)",
            "x = ANY(SELECT 1)",
            "x = ANY(ARRAY['1']::INT[])",
        ] {
            assert_eq!(listed(condition), condition);
        }
    }
}
