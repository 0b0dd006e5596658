//! The names of columns that a client expects. For PostgreSQL's clients, names are in lower case
//! unless they are in quotes, and a column without a name has that of its function or type. For
//! MySQL's clients, names are as written, and a column without one has the text of its expression.
//! Sources name the columns of what they compute in their own way, in the proxy's words.

use std::ops::Range;

use orthodrome_core::ordered::OrdSet;

use sqlparser::ast::{
    DataType, Expr, Ident, ObjectNamePart, OrderByExpr, SelectItem, SetExpr, Statement,
    TrimWhereField, Value as SqlValue,
};

use super::catalog::Dialect;
use super::dialect::leftmost;
use super::parse::{Lexeme, Parsed, Scan, Verb, in_name};
use super::value::Column;

/// Names the columns of an answer as a server of the client's kind would, whichever source has
/// answered. The columns of `*` keep the names that the source gave them.
pub fn name_columns(parsed: &Parsed, client: Dialect, columns: &mut [Column]) {
    let Verb::Data(statement) = &parsed.verb else { return };
    let Some(items) = list_of_statement(statement) else { return };
    let names: Vec<Option<String>> = match client {
        Dialect::PostgreSql => items.iter().map(postgres_name).collect(),
        Dialect::MariaDb => mysql_names(&parsed.text, statement, items),
    };
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
    for (at, name) in names.into_iter().enumerate() {
        let place = match last {
            _ if at < first => Some(at),
            Some(last) if at > last => (count + at).checked_sub(items.len()),
            _ => None,
        };
        let column = place.and_then(|place| columns.get_mut(place));
        if let (Some(column), Some(name)) = (column, name) {
            column.name = name;
        }
    }
}

/// The list that names the columns of a statement's answer.
fn list_of_statement(statement: &Statement) -> Option<&[SelectItem]> {
    match statement {
        Statement::Query(query) => list_of(&query.body),
        Statement::Insert(insert) => insert.returning.as_deref(),
        Statement::Update(update) => update.returning.as_deref(),
        Statement::Delete(delete) => delete.returning.as_deref(),
        _ => None,
    }
}

/// The name of an item that has one by itself, as the client has written it.
fn own_name(item: &SelectItem) -> Option<&Ident> {
    match item {
        SelectItem::ExprWithAlias { alias, .. } => Some(alias),
        SelectItem::UnnamedExpr(Expr::Identifier(name)) => Some(name),
        SelectItem::UnnamedExpr(Expr::CompoundIdentifier(names)) => names.last(),
        _ => None,
    }
}

/// MySQL shows names as they were written, and of an expression its text.
fn mysql_names(text: &str, statement: &Statement, items: &[SelectItem]) -> Vec<Option<String>> {
    let mut texts = Vec::new();
    if let Statement::Query(query) = statement
        && items.iter().any(is_expression)
    {
        texts = texts_of(text, query.with.is_some());
    }
    let is_known = texts.len() == items.len();
    let name = |(at, item): (usize, &SelectItem)| {
        let own = own_name(item).map(|name| name.value.as_str());
        let text = texts.get(at).filter(|_| is_known && is_expression(item)).copied();
        own.or_else(|| constant(item).filter(|_| is_known)).or(text).map(str::to_owned)
    };
    items.iter().enumerate().map(name).collect()
}

/// PostgreSQL's name for an item of a list.
fn postgres_name(item: &SelectItem) -> Option<String> {
    match item {
        SelectItem::UnnamedExpr(expr) => {
            Some(figure(expr).map_or_else(|| "?column?".into(), |(name, _)| name))
        }
        _ => own_name(item).map(folded),
    }
}

/// Gives the columns of a PostgreSQL client's subquery the names that it may use outside of it, or
/// in `order`: then only those that are used there. A name that occurs twice cannot be used.
pub(super) fn name_items(body: &mut SetExpr, order: Option<&[OrderByExpr]>) {
    let Some((select, _)) = leftmost(body) else { return };
    let is_key = |name: &str, key: &OrderByExpr| match &key.expr {
        Expr::Identifier(key) => folded(key) == name,
        _ => false,
    };
    let mut names: OrdSet<String> =
        select.projection.iter().filter_map(own_name).map(folded).collect();
    for item in &mut select.projection {
        if let SelectItem::UnnamedExpr(expr) = item
            && !matches!(expr, Expr::Identifier(_) | Expr::CompoundIdentifier(_))
            && let Some((name, _)) = figure(expr)
            && order.is_none_or(|keys| keys.iter().any(|key| is_key(&name, key)))
            && names.insert(name.clone())
        {
            let alias = Ident::with_quote('"', name);
            *item = SelectItem::ExprWithAlias { expr: expr.clone(), alias };
        }
    }
}

/// A name, in lower case unless it is in quotes.
fn folded(name: &Ident) -> String {
    if name.quote_style.is_some() { name.value.clone() } else { name.value.to_lowercase() }
}

/// PostgreSQL's name for a column without one, and whether it is stronger than that of a cast or of
/// a CASE around it.
fn figure(expr: &Expr) -> Option<(String, bool)> {
    let strong = |name: &str| Some((name.to_owned(), true));
    match expr {
        Expr::Identifier(name) => Some((folded(name), true)),
        Expr::CompoundIdentifier(names) => names.last().map(|name| (folded(name), true)),
        Expr::CompoundFieldAccess { root, .. } => figure(root),
        Expr::Nested(inner) => figure(inner),
        Expr::Collate { expr, .. } => figure(expr),
        Expr::Function(function) => {
            let name = function.name.0.last().and_then(ObjectNamePart::as_ident)?;
            Some((folded(name), true))
        }
        Expr::Cast { expr, data_type, .. } => {
            let inner = figure(expr).filter(|(_, is_strong)| *is_strong);
            inner.or_else(|| type_name(data_type).map(|name| (name, false)))
        }
        Expr::TypedString(typed) => type_name(&typed.data_type).map(|name| (name, false)),
        Expr::Interval(_) => Some(("interval".into(), false)),
        Expr::Case { else_result, .. } => {
            let inner = else_result.as_deref().and_then(figure);
            inner.filter(|(_, is_strong)| *is_strong).or_else(|| Some(("case".into(), false)))
        }
        Expr::Value(value) => {
            matches!(value.value, SqlValue::Boolean(_)).then(|| ("bool".into(), false))
        }
        Expr::Subquery(query) => match list_of(&query.body)?.first()? {
            SelectItem::UnnamedExpr(expr) => figure(expr),
            item => Some((own_name(item).map(folded)?, true)),
        },
        Expr::Exists { .. } => strong("exists"),
        Expr::Array(_) => strong("array"),
        Expr::Tuple(_) => strong("row"),
        Expr::Extract { .. } => strong("extract"),
        Expr::Ceil { .. } => strong("ceil"),
        Expr::Floor { .. } => strong("floor"),
        Expr::Position { .. } => strong("position"),
        Expr::Overlay { .. } => strong("overlay"),
        Expr::Substring { shorthand, .. } => {
            strong(if *shorthand { "substr" } else { "substring" })
        }
        Expr::Trim { trim_where, .. } => strong(match trim_where {
            Some(TrimWhereField::Leading) => "ltrim",
            Some(TrimWhereField::Trailing) => "rtrim",
            Some(TrimWhereField::Both) | None => "btrim",
        }),
        Expr::AtTimeZone { .. } => strong("timezone"),
        _ => None,
    }
}

/// PostgreSQL's own name of a type.
fn type_name(of: &DataType) -> Option<String> {
    let text = of.to_string().to_lowercase();
    let plain = text.split(['(', '[']).next().unwrap_or_default().trim();
    let zoned = text.contains("with time zone");
    let name = match plain {
        "int" | "integer" | "int4" => "int4",
        "bigint" | "int8" => "int8",
        "smallint" | "int2" => "int2",
        "decimal" | "dec" | "numeric" => "numeric",
        "real" | "float4" => "float4",
        "double precision" | "double" | "float" | "float8" => "float8",
        "boolean" | "bool" => "bool",
        "char" | "character" | "bpchar" => "bpchar",
        "varchar" | "character varying" | "char varying" => "varchar",
        "timestamptz" => "timestamptz",
        "timetz" => "timetz",
        _ if plain.starts_with("timestamp") && zoned => "timestamptz",
        _ if plain.starts_with("timestamp") => "timestamp",
        _ if plain.starts_with("time") && zoned => "timetz",
        _ if plain.starts_with("time") => "time",
        _ => plain.rsplit('.').next().unwrap_or_default().trim_matches('"'),
    };
    // A cast to an array is named by the type of the elements.
    (!name.is_empty()).then(|| name.to_owned())
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

    fn named(text: &str, dialect: Dialect, count: usize) -> Vec<String> {
        let parsed = parse(text, dialect).unwrap().remove(0);
        let mut columns = vec![Column { name: "own".into(), kind: Kind::Text, oid: 0 }; count];
        name_columns(&parsed, dialect, &mut columns);
        columns.into_iter().map(|column| column.name).collect()
    }

    #[test]
    fn columns_of_mysql_s_clients_have_the_text_of_their_expressions() {
        for (text, names) in [
            ("SELECT COUNT(*), i*2 , `i` FROM t", vec!["COUNT(*)", "i*2", "i"]),
            ("select  distinct max( a,  b ) , t.A from t", vec!["max( a,  b )", "A"]),
            ("SELECT 'x', \"it's\", NULL, 1+1", vec!["x", "it's", "NULL", "1+1"]),
            ("SELECT a AS Bb, IF(a, ',', `from`) FROM t", vec!["Bb", "IF(a, ',', `from`)"]),
            (
                "SELECT (a + 1) -- rest\n, EXTRACT(YEAR FROM b)/*c*/ FROM t",
                vec!["(a + 1)", "EXTRACT(YEAR FROM b)"],
            ),
            ("SELECT 1+1, t.*, 2+2 FROM t", vec!["1+1", "own", "own", "2+2"]),
            ("(SELECT a+1 FROM t) UNION SELECT 2", vec!["a+1"]),
            ("WITH x AS (SELECT 1+2 AS a) SELECT a+3 FROM x", vec!["a+3"]),
            ("SELECT (SELECT max(a) FROM t), count(*)", vec!["(SELECT max(a) FROM t)", "count(*)"]),
            ("SELECT a, firstName FROM t", vec!["a", "firstName"]),
            ("INSERT INTO t (a) VALUES (1) RETURNING Id, *", vec!["Id", "own", "own"]),
        ] {
            assert_eq!(named(text, Dialect::MariaDb, names.len()), names, "{text}");
        }
    }

    #[test]
    fn columns_of_postgresql_s_clients_have_its_names() {
        for (text, names) in [
            ("SELECT count(*), max(Amt), a + 1, Upper(n) FROM t", "count max ?column? upper"),
            ("SELECT a FN, \"Amt\" AS Total, t.\"Id\", B FROM t", "fn total Id b"),
            (
                "SELECT a::text, 1::int, 'x'::varchar(3), (b + 1)::bigint[] FROM t",
                "a int4 varchar int8",
            ),
            ("SELECT coalesce(a, '-'), nullif(a, 1), greatest(a, 1)", "coalesce nullif greatest"),
            ("SELECT CASE WHEN a THEN 1 END, CASE a WHEN 1 THEN 2 ELSE b END", "case b"),
            ("SELECT (SELECT max(a) FROM t), EXISTS (SELECT 1), true", "max exists bool"),
            (
                "SELECT 'x', NULL, a IS NULL, a = 1, -a, a || 'b' FROM t",
                "?column? ?column? ?column? ?column? ?column? ?column?",
            ),
            (
                "SELECT extract(year FROM a), trim(b), current_date, date '2020-01-01'",
                "extract btrim current_date date",
            ),
            ("SELECT 1 + 1, t.*, lower(a) FROM t", "?column? own own lower"),
            ("UPDATE t SET a = 1 RETURNING Id, a * 2", "id ?column?"),
            ("DELETE FROM t RETURNING count(*) OVER ()", "count"),
            ("SELECT a FROM t UNION SELECT lower(b) FROM t", "a"),
        ] {
            let names: Vec<&str> = names.split(' ').collect();
            assert_eq!(named(text, Dialect::PostgreSql, names.len()), names, "{text}");
        }
    }
}
