//! Constants whose meaning depends on the type of the column that they are compared with or written
//! to. PostgreSQL gives an untyped constant the type of its column; MariaDB takes it as text. So a
//! constant that would have another meaning at a source of the other kind than the client's is
//! converted according to the type of its column.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use sqlparser::ast::{
    AssignmentTarget, BinaryOperator, Expr, Function, FunctionArg, FunctionArgExpr,
    FunctionArguments, Ident, Insert, ObjectName, OrderBy, OrderByKind, Query, SelectItem, SetExpr,
    Statement, TableObject, Value as SqlValue, ValueWithSpan, Visitor, VisitorMut,
};

use super::Refusal;
use super::catalog::{Catalogue, Dialect};
use super::dialect::{bytes_of_text, hex_of};
use super::route::table_name;
use super::schema::BYTES_AT_MARIADB;
use super::value::{Kind, Value};
use super::walk::{walk, walk_mut};

/// The columns of tables at a source of the other kind than the client's, by the table's name. Names are in lower case, and
/// columns in the table's order.
pub type Kinds = BTreeMap<String, Vec<(String, Kind)>>;

/// Tables whose columns must be known before a statement of a `client` can be translated for a source
/// of the other kind: the tables that it names, if it has a constant or parameter whose meaning
/// depends on the type of a column.
#[must_use]
pub fn tables_to_know(
    catalogue: &Catalogue,
    client: Dialect,
    statement: &Statement,
    parameters: &[Value],
) -> Vec<String> {
    struct Finder<'a> {
        catalogue: &'a Catalogue,
        client: Dialect,
        is_wanted: bool,
        tables: Vec<String>,
    }
    impl Visitor for Finder<'_> {
        type Break = ();
        fn pre_visit_value(&mut self, value: &ValueWithSpan) -> ControlFlow<()> {
            let is_truth = matches!(value.value, SqlValue::Boolean(_));
            self.is_wanted |= is_truth && self.client == Dialect::MariaDb;
            let text = text_of(&value.value, self.client);
            self.is_wanted |= text.is_some_and(|text| depends_on_type(text, self.client));
            ControlFlow::Continue(())
        }
        fn pre_visit_relation(&mut self, name: &ObjectName) -> ControlFlow<()> {
            let name = table_name(name);
            if self.catalogue.table(&name).is_some() && !self.tables.contains(&name) {
                self.tables.push(name);
            }
            ControlFlow::Continue(())
        }
    }
    let is_wanted = parameters.iter().any(|value| match value {
        Value::Text(text) => depends_on_type(text, client),
        Value::Bool(_) => client == Dialect::MariaDb,
        Value::Null | Value::Number(_) | Value::Bytes(_) => false,
    });
    let mut finder = Finder { catalogue, client, is_wanted, tables: Vec::new() };
    let _ = walk(statement, &mut finder);
    if finder.is_wanted { finder.tables } else { Vec::new() }
}

/// Whether a client's text has another meaning as bytes, as a boolean or as a time than as text.
fn depends_on_type(text: &str, client: Dialect) -> bool {
    if client == Dialect::MariaDb {
        return text.contains('\\');
    }
    let is_array = text.trim_start().starts_with('{');
    let has_truth = |text: &str| text.split([',', '{', '}', '"']).any(|one| truth(one).is_some());
    text.contains('\\')
        || truth(text).is_some()
        || is_array && has_truth(text)
        || without_zone(text).is_some()
}

/// A date, or a date and time, in MariaDB's form: without the `T` and the zone that drivers of
/// PostgreSQL send. PostgreSQL ignores the zone, for a column without one. None for other texts, and
/// for those that need no change.
fn without_zone(text: &str) -> Option<String> {
    let trimmed = text.trim();
    let (date, rest) = trimmed.split_at_checked("2024-01-01".len())?;
    let is_digit = |(at, byte): (usize, u8)| match at {
        4 | 7 => byte == b'-',
        _ => byte.is_ascii_digit(),
    };
    if !date.bytes().enumerate().all(is_digit) {
        return None;
    }
    let zoned = rest.trim_start();
    let is_zone = |text: &str| {
        let text = text.trim();
        let digits = text.strip_prefix(['+', '-']);
        let is_offset = digits.is_some_and(|digits| {
            !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit() || b == b':')
        });
        is_offset || text.eq_ignore_ascii_case("z") || text.eq_ignore_ascii_case("utc")
    };
    if is_zone(zoned) {
        return Some(date.to_owned());
    }
    let time = rest.strip_prefix(['T', 't', ' '])?.trim_start();
    let end = time.find(|c: char| !(c.is_ascii_digit() || c == ':' || c == '.'));
    let (time, zone) = time.split_at(end.unwrap_or(time.len()));
    let is_time = time.contains(':') && time.starts_with(|c: char| c.is_ascii_digit());
    if !is_time || !(zone.trim().is_empty() || is_zone(zone)) {
        return None;
    }
    let plain = format!("{date} {time}");
    (plain != text).then_some(plain)
}

/// Parses a text that PostgreSQL accepts as a boolean and MariaDB does not as a number.
fn truth(text: &str) -> Option<bool> {
    let text = text.trim().to_ascii_lowercase();
    // Any unambiguous prefix of these words. `on` and `off` share their first letter.
    let begins = |word: &str| !text.is_empty() && word.starts_with(&text);
    if begins("true") || begins("yes") || text == "on" {
        Some(true)
    } else if begins("false") || begins("no") || (begins("off") && text.len() > 1) {
        Some(false)
    } else {
        None
    }
}

fn text_of(value: &SqlValue, client: Dialect) -> Option<&str> {
    match value {
        SqlValue::DoubleQuotedString(text) if client == Dialect::MariaDb => Some(text),
        SqlValue::SingleQuotedString(text)
        | SqlValue::EscapedStringLiteral(text)
        | SqlValue::UnicodeStringLiteral(text) => Some(text),
        SqlValue::DollarQuotedString(text) => Some(&text.value),
        _ => None,
    }
}

/// Converts the constants of a statement for a source of the kind `to`, which is not the client's, to
/// the types of its tables' columns.
///
/// # Errors
/// A constant for a column of bytes is not valid as bytes in PostgreSQL.
pub(super) fn convert(
    statement: &mut Statement,
    to: Dialect,
    kinds: &Kinds,
) -> Result<(), Refusal> {
    if kinds.is_empty() {
        return Ok(());
    }
    if let Statement::Insert(insert) = statement {
        convert_rows(insert, to, kinds)?;
    }
    if let Statement::Update(update) = statement {
        for assignment in &mut update.assignments {
            if let AssignmentTarget::ColumnName(name) = &assignment.target {
                retype(&mut assignment.value, to, kind_of(kinds, &table_name(name)))?;
            }
        }
    }
    walk_mut(statement, &mut Comparisons { kinds, to })
}

fn convert_rows(insert: &mut Insert, to: Dialect, kinds: &Kinds) -> Result<(), Refusal> {
    let TableObject::TableName(name) = &insert.table else { return Ok(()) };
    let Some(all) = kinds.get(&table_name(name)) else { return Ok(()) };
    let of = |column: &ObjectName| {
        let column = table_name(column);
        all.iter().find(|(name, _)| *name == column).map(|(_, kind)| *kind)
    };
    let columns: Vec<Option<Kind>> = if insert.columns.is_empty() {
        all.iter().map(|(_, kind)| Some(*kind)).collect()
    } else {
        insert.columns.iter().map(of).collect()
    };
    let Some(SetExpr::Values(values)) = insert.source.as_mut().map(|query| &mut *query.body) else {
        return Ok(());
    };
    for row in &mut values.rows {
        for (value, kind) in row.content.iter_mut().zip(&columns) {
            retype(value, to, *kind)?;
        }
    }
    Ok(())
}

/// The kind of a column, if every table that has one of this name agrees.
fn kind_of(kinds: &Kinds, column: &str) -> Option<Kind> {
    let mut found = kinds.values().flatten().filter(|(name, _)| name == column);
    let (_, kind) = found.next()?;
    found.all(|(_, other)| other == kind).then_some(*kind)
}

/// Converts one constant to the type of its column.
fn retype(expr: &mut Expr, to: Dialect, kind: Option<Kind>) -> Result<(), Refusal> {
    match to {
        Dialect::MariaDb => for_mariadb(expr, kind),
        Dialect::PostgreSql => {
            for_postgresql(expr, kind);
            Ok(())
        }
    }
}

fn for_mariadb(expr: &mut Expr, kind: Option<Kind>) -> Result<(), Refusal> {
    let Expr::Value(constant) = expr else { return Ok(()) };
    let Some(text) = text_of(&constant.value, Dialect::PostgreSql) else { return Ok(()) };
    match kind {
        Some(Kind::Bytes) if text.contains('\\') => {
            constant.value = SqlValue::HexStringLiteral(hex_of(text)?);
        }
        Some(Kind::Bool | Kind::Int2 | Kind::Int4 | Kind::Int8) => {
            if let Some(is) = truth(text) {
                constant.value = SqlValue::Boolean(is);
            }
        }
        Some(Kind::Date | Kind::Timestamp) => {
            if let Some(plain) = without_zone(text) {
                constant.value = SqlValue::SingleQuotedString(plain);
            }
        }
        _ => {}
    }
    Ok(())
}

/// A text with a backslash is no text of bytes for PostgreSQL, and a number is no boolean.
fn for_postgresql(expr: &mut Expr, kind: Option<Kind>) {
    let Expr::Value(constant) = expr else { return };
    match (kind, &constant.value) {
        (Some(Kind::Bytes), value) => {
            let text = text_of(value, Dialect::MariaDb).filter(|text| text.contains('\\'));
            if let Some(text) = text {
                *expr = bytes_of_text(text);
            }
        }
        (Some(Kind::Int2 | Kind::Int4 | Kind::Int8 | Kind::Decimal), SqlValue::Boolean(is)) => {
            constant.value = SqlValue::Number(u8::from(*is).to_string(), false);
        }
        _ => {}
    }
}

/// Visits constants that are compared with a column.
struct Comparisons<'a> {
    kinds: &'a Kinds,
    to: Dialect,
}

/// The kind of a column that an expression names.
pub(super) fn column_kind(kinds: &Kinds, expr: &Expr) -> Option<Kind> {
    // In MariaDB, names of columns are not case-sensitive.
    let lower = |name: &Ident| name.value.to_lowercase();
    match expr {
        Expr::Identifier(name) => kind_of(kinds, &lower(name)),
        Expr::CompoundIdentifier(names) => kind_of(kinds, &lower(names.last()?)),
        Expr::Nested(inner) => column_kind(kinds, inner),
        _ => None,
    }
}

/// Tables whose columns must be known before a query's rows can be ordered over several sources:
/// text is ordered byte by byte, whatever the collation of its column.
#[must_use]
pub fn tables_to_order(catalogue: &Catalogue, statement: &Statement) -> Vec<String> {
    struct Finder<'a> {
        catalogue: &'a Catalogue,
        is_wanted: bool,
        tables: Vec<String>,
    }
    impl Visitor for Finder<'_> {
        type Break = ();
        fn pre_visit_order_by(&mut self, _: &OrderBy) -> ControlFlow<()> {
            self.is_wanted = true;
            ControlFlow::Continue(())
        }
        fn pre_visit_expr(&mut self, expr: &Expr) -> ControlFlow<()> {
            self.is_wanted |= is_extreme(expr);
            ControlFlow::Continue(())
        }
        fn pre_visit_relation(&mut self, name: &ObjectName) -> ControlFlow<()> {
            let name = table_name(name);
            let is_spread = self.catalogue.table(&name).is_some_and(|t| t.sources().len() > 1);
            if is_spread && !self.tables.contains(&name) {
                self.tables.push(name);
            }
            ControlFlow::Continue(())
        }
    }
    if !matches!(statement, Statement::Query(_)) {
        return Vec::new();
    }
    let mut finder = Finder { catalogue, is_wanted: false, tables: Vec::new() };
    let _ = walk(statement, &mut finder);
    if finder.is_wanted { finder.tables } else { Vec::new() }
}

/// Whether an expression is `min(…)` or `max(…)`.
fn is_extreme(expr: &Expr) -> bool {
    let Expr::Function(function) = expr else { return false };
    matches!(table_name(&function.name).as_str(), "min" | "max")
}

/// Lets a source order text byte by byte where the rows of several sources are ordered: in ORDER BY,
/// and for `min` and `max`.
pub(super) fn order_bytewise(query: &mut Query, to: Dialect, kinds: &Kinds) {
    let collated = |expr: &Expr| {
        let is_text = column_kind(kinds, expr) == Some(Kind::Text);
        is_text.then(|| bytewise(expr.clone(), to))
    };
    let SetExpr::Select(select) = &mut *query.body else { return };
    for item in &mut select.projection {
        if let SelectItem::UnnamedExpr(expr) | SelectItem::ExprWithAlias { expr, .. } = item
            && is_extreme(expr)
            && let Expr::Function(Function { args: FunctionArguments::List(list), .. }) = expr
            && let [FunctionArg::Unnamed(FunctionArgExpr::Expr(value))] = list.args.as_mut_slice()
            && let Some(collated) = collated(value)
        {
            *value = collated;
        }
    }
    let Some(OrderByKind::Expressions(keys)) = query.order_by.as_mut().map(|by| &mut by.kind)
    else {
        return;
    };
    // PostgreSQL orders distinct rows only by what is selected.
    if select.distinct.is_some() {
        return;
    }
    for key in keys {
        if let Some(collated) = collated(named(&select.projection, &key.expr)) {
            key.expr = collated;
        }
    }
}

/// Text that a source compares byte by byte, whatever the collation of its column.
fn bytewise(text: Expr, to: Dialect) -> Expr {
    let named = |name: Ident| ObjectName::from(vec![name]);
    let (text, collation) = match to {
        Dialect::PostgreSql => (text, Ident::with_quote('"', "C")),
        Dialect::MariaDb => {
            // A column of another character set does not have this collation.
            let converted = Expr::Convert {
                is_try: false,
                expr: Box::new(text),
                data_type: None,
                charset: Some(named(Ident::new("utf8mb4"))),
                target_before_value: false,
                styles: Vec::new(),
            };
            (converted, Ident::new(BYTES_AT_MARIADB))
        }
    };
    Expr::Collate { expr: Box::new(text), collation: named(collation) }
}

/// What a key of ORDER BY means that is the position or the name of a column of the list.
fn named<'a>(list: &'a [SelectItem], key: &'a Expr) -> &'a Expr {
    let by_position = match key {
        Expr::Value(ValueWithSpan { value: SqlValue::Number(text, _), .. }) => {
            text.parse::<usize>().ok().and_then(|place| list.get(place.checked_sub(1)?))
        }
        _ => None,
    };
    let is_wild = |item: &SelectItem| {
        matches!(item, SelectItem::Wildcard(_) | SelectItem::QualifiedWildcard(..))
    };
    if let Some(SelectItem::UnnamedExpr(expr) | SelectItem::ExprWithAlias { expr, .. }) =
        by_position.filter(|_| !list.iter().any(is_wild))
    {
        return expr;
    }
    let aliased = list.iter().find_map(|item| match (item, key) {
        (SelectItem::ExprWithAlias { expr, alias }, Expr::Identifier(name))
            if alias.value.eq_ignore_ascii_case(&name.value) =>
        {
            Some(expr)
        }
        _ => None,
    });
    aliased.unwrap_or(key)
}

impl Comparisons<'_> {
    fn kind(&self, expr: &Expr) -> Option<Kind> {
        column_kind(self.kinds, expr)
    }

    fn compared(&self, expr: &mut Expr) -> Result<(), Refusal> {
        match expr {
            Expr::BinaryOp {
                left,
                op:
                    BinaryOperator::Eq
                    | BinaryOperator::NotEq
                    | BinaryOperator::Lt
                    | BinaryOperator::LtEq
                    | BinaryOperator::Gt
                    | BinaryOperator::GtEq,
                right,
            }
            | Expr::IsDistinctFrom(left, right)
            | Expr::IsNotDistinctFrom(left, right) => {
                let (of_left, of_right) = (self.kind(left), self.kind(right));
                retype(left, self.to, of_right)?;
                retype(right, self.to, of_left)
            }
            Expr::InList { expr, list, .. } => {
                let kind = self.kind(expr);
                list.iter_mut().try_for_each(|one| retype(one, self.to, kind))
            }
            Expr::Between { expr, low, high, .. } => {
                let kind = self.kind(expr);
                retype(low, self.to, kind)?;
                retype(high, self.to, kind)
            }
            _ => Ok(()),
        }
    }
}

impl VisitorMut for Comparisons<'_> {
    type Break = Refusal;
    fn pre_visit_expr(&mut self, expr: &mut Expr) -> ControlFlow<Refusal> {
        match self.compared(expr) {
            Ok(()) => ControlFlow::Continue(()),
            Err(refusal) => ControlFlow::Break(refusal),
        }
    }
}
