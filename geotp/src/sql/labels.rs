//! The names of columns that a MySQL client expects: a column without a name has the text of its
//! expression, as the client has written it. Sources get the expressions in the proxy's own words,
//! and PostgreSQL would name the columns otherwise.

use std::ops::Range;

use sqlparser::ast::{Expr, SelectItem, SetExpr, Statement, Value as SqlValue};

use super::catalog::Dialect;
use super::parse::{Lexeme, Parsed, Scan, Verb, in_name};
use super::value::Column;

/// Names the columns of an answer to a MySQL client's query.
pub fn name_columns(parsed: &Parsed, columns: &mut [Column]) {
    let Verb::Data(statement) = &parsed.verb else { return };
    let Statement::Query(query) = &**statement else { return };
    let Some(items) = list_of(&query.body) else { return };
    if !items.iter().any(is_expression) {
        return;
    }
    let texts = texts_of(&parsed.text, query.with.is_some());
    if texts.len() != items.len() {
        return;
    }
    let is_wild = |item: &SelectItem| {
        matches!(item, SelectItem::Wildcard(_) | SelectItem::QualifiedWildcard(..))
    };
    // `*` stands for any number of columns, so those after it are counted from the end.
    let first = items.iter().position(is_wild).unwrap_or(items.len());
    let last = items.iter().rposition(is_wild);
    let count = columns.len();
    if last.is_none() && items.len() != count {
        return;
    }
    for (at, (item, text)) in items.iter().zip(texts).enumerate() {
        let place = match last {
            _ if at < first => Some(at),
            Some(last) if at > last => (count + at).checked_sub(items.len()),
            _ => None,
        };
        if let Some(column) = place.and_then(|place| columns.get_mut(place))
            && is_expression(item)
        {
            column.name = constant(item).unwrap_or(text).to_owned();
        }
    }
}

/// The list of the first SELECT.
fn list_of(body: &SetExpr) -> Option<&[SelectItem]> {
    match body {
        SetExpr::Select(select) => Some(&select.projection),
        SetExpr::SetOperation { left, .. } => list_of(left),
        SetExpr::Query(query) => list_of(&query.body),
        _ => None,
    }
}

/// Whether a column has no name of its own.
fn is_expression(item: &SelectItem) -> bool {
    let SelectItem::UnnamedExpr(expr) = item else { return false };
    !matches!(expr, Expr::Identifier(_) | Expr::CompoundIdentifier(_))
}

/// A constant text, which names its column without its quotes.
fn constant(item: &SelectItem) -> Option<&str> {
    let SelectItem::UnnamedExpr(Expr::Value(value)) = item else { return None };
    match &value.value {
        SqlValue::SingleQuotedString(text) | SqlValue::DoubleQuotedString(text) => Some(text),
        _ => None,
    }
}

/// Words between SELECT and its list.
const BEFORE: [&str; 11] = [
    "all",
    "distinct",
    "distinctrow",
    "high_priority",
    "sql_big_result",
    "sql_buffer_result",
    "sql_cache",
    "sql_calc_found_rows",
    "sql_no_cache",
    "sql_small_result",
    "straight_join",
];

/// Words that end the list.
const AFTER: [&str; 14] = [
    "except",
    "for",
    "from",
    "group",
    "having",
    "intersect",
    "into",
    "limit",
    "lock",
    "order",
    "procedure",
    "union",
    "where",
    "window",
];

/// The texts of the items of the first list; none if the text cannot be read.
fn texts_of(text: &str, has_with: bool) -> Vec<&str> {
    let mut scan = Scan { text, at: 0, dialect: Dialect::MariaDb };
    let mut depth = 0_usize;
    let mut word: Range<usize> = 0..0;
    // The depth of the SELECT whose list this is.
    let mut list = None;
    let mut item: Option<Range<usize>> = None;
    let mut found = Vec::new();
    loop {
        let start = scan.at;
        let Ok(part) = scan.next_part() else { return Vec::new() };
        let slice = text.get(start..scan.at).unwrap_or_default();
        let is_plain = matches!(part, Some(Lexeme::Plain));
        if is_plain && slice.chars().all(|c| in_name(c) || c == '@') {
            word = if word.end == start { word.start..scan.at } else { start..scan.at };
            continue;
        }
        if !word.is_empty() {
            let lower = text.get(word.clone()).unwrap_or_default().to_lowercase();
            let is_name = text.get(..word.start).is_some_and(|before| before.ends_with('.'));
            let is_here = list == Some(depth) && !is_name;
            if list.is_none() {
                let is_first = lower == "select" && (depth == 0 || !has_with);
                list = is_first.then_some(depth);
            } else if is_here && AFTER.contains(&lower.as_str()) {
                break;
            } else if !(is_here && item.is_none() && BEFORE.contains(&lower.as_str())) {
                item = Some(item.map_or(word.start, |item| item.start)..word.end);
            }
        }
        word = scan.at..scan.at;
        let Some(part) = part else { break };
        let is_blank = slice.chars().all(char::is_whitespace);
        if is_blank || matches!(part, Lexeme::Comment(_) | Lexeme::Semicolon) {
            continue;
        }
        if list == Some(depth) && slice == "," {
            found.extend(item.take());
            continue;
        }
        if list == Some(depth) && slice == ")" {
            break;
        }
        if list.is_some() {
            item = Some(item.map_or(start, |item| item.start)..scan.at);
        }
        match slice {
            "(" => depth += 1,
            ")" => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    found.into_iter().chain(item).filter_map(|range| text.get(range)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::parse::parse;
    use super::super::value::Kind;
    use super::*;

    fn named(text: &str, count: usize) -> Vec<String> {
        let parsed = parse(text, Dialect::MariaDb).unwrap().remove(0);
        let mut columns = vec![Column { name: "own".into(), kind: Kind::Text, oid: 0 }; count];
        name_columns(&parsed, &mut columns);
        columns.into_iter().map(|column| column.name).collect()
    }

    #[test]
    fn columns_of_mysql_s_clients_have_the_text_of_their_expressions() {
        for (text, names) in [
            ("SELECT COUNT(*), i*2 , `i` FROM t", vec!["COUNT(*)", "i*2", "own"]),
            ("select  distinct max( a,  b ) , t.a from t", vec!["max( a,  b )", "own"]),
            ("SELECT 'x', \"it's\", NULL, 1+1", vec!["x", "it's", "NULL", "1+1"]),
            ("SELECT a AS b, IF(a, ',', `from`) FROM t", vec!["own", "IF(a, ',', `from`)"]),
            (
                "SELECT (a + 1) -- rest\n, EXTRACT(YEAR FROM b)/*c*/ FROM t",
                vec!["(a + 1)", "EXTRACT(YEAR FROM b)"],
            ),
            ("SELECT 1+1, t.*, 2+2 FROM t", vec!["1+1", "own", "own", "2+2"]),
            ("(SELECT a+1 FROM t) UNION SELECT 2", vec!["a+1"]),
            ("WITH x AS (SELECT 1+2 AS a) SELECT a+3 FROM x", vec!["a+3"]),
            ("SELECT (SELECT max(a) FROM t), count(*)", vec!["(SELECT max(a) FROM t)", "count(*)"]),
            ("SELECT a, b FROM t", vec!["own", "own"]),
        ] {
            assert_eq!(named(text, names.len()), names, "{text}");
        }
    }
}
