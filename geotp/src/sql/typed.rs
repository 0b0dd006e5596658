//! Constants whose meaning depends on the type of the column that they are compared with or written
//! to. PostgreSQL gives an untyped constant the type of its column; MariaDB takes it as text. So a
//! constant that would have another meaning at a source of the other kind than the client's is
//! converted according to the type of its column.

use std::ops::ControlFlow;

use orthodrome_core::ordered::OrdMap;

use sqlparser::ast::{
    AssignmentTarget, BinaryOperator, DataType, Expr, Function, FunctionArg, FunctionArgExpr,
    FunctionArguments, Ident, Insert, ObjectName, OrderBy, OrderByKind, Query, SelectItem, SetExpr,
    Statement, TableObject, Value as SqlValue, ValueWithSpan, Visitor, VisitorMut,
};

use super::Refusal;
use super::catalog::{Catalogue, Dialect};
use super::dialect::{bytes_of_text, hex_of, literal};
use super::route::table_name;
use super::schema::{BYTES_AT_MARIADB, BYTES_AT_POSTGRESQL};
use super::value::{Kind, Value};
use super::walk::{walk, walk_mut};

/// The columns of tables at a source of the other kind than the client's, by the table's name. Names are in lower case, and
/// columns in the table's order.
pub type Kinds = OrdMap<String, Vec<(String, Kind)>>;

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
            let is_bytes = matches!(
                value.value,
                SqlValue::HexStringLiteral(_) | SqlValue::SingleQuotedByteStringLiteral(_)
            ) || is_hex_number(&value.value);
            self.is_wanted |= (is_truth || is_bytes) && self.client == Dialect::MariaDb;
            let text = text_of(&value.value, self.client);
            self.is_wanted |= text.is_some_and(|text| depends_on_type(text, self.client));
            ControlFlow::Continue(())
        }
        fn pre_visit_expr(&mut self, expr: &Expr) -> ControlFlow<()> {
            // `_binary'a'`
            let is_prefixed = matches!(expr, Expr::Prefixed { .. });
            self.is_wanted |= is_prefixed && self.client == Dialect::MariaDb;
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
        Value::Bool(_) | Value::Bytes(_) => client == Dialect::MariaDb,
        Value::Null | Value::Number(_) => false,
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
                assign(&mut assignment.value, to, kind_of(kinds, &table_name(name)))?;
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
    match insert.source.as_mut().map(|query| &mut *query.body) {
        Some(SetExpr::Values(values)) => {
            for row in &mut values.rows {
                for (value, kind) in row.content.iter_mut().zip(&columns) {
                    assign(value, to, *kind)?;
                }
            }
        }
        // The constants of other queries are converted by their source.
        Some(SetExpr::Select(select)) if to == Dialect::PostgreSql => {
            for (item, kind) in select.projection.iter_mut().zip(&columns) {
                match item {
                    SelectItem::UnnamedExpr(value)
                    | SelectItem::ExprWithAlias { expr: value, .. } => assign(value, to, *kind)?,
                    _ => break,
                }
            }
        }
        _ => {}
    }
    Ok(())
}

/// Converts a value that is written to a column.
fn assign(value: &mut Expr, to: Dialect, kind: Option<Kind>) -> Result<(), Refusal> {
    retype(value, to, kind)?;
    // PostgreSQL would write `\x41` for the bytes of A.
    if to == Dialect::PostgreSql && matches!(kind, Some(Kind::Text | Kind::Json)) {
        refuse_bytes(value)?;
    }
    Ok(())
}

/// Refuses constants of bytes inside of an expression whose value becomes text.
fn refuse_bytes(value: &Expr) -> Result<(), Refusal> {
    struct Finder(bool);
    impl Visitor for Finder {
        type Break = ();
        fn pre_visit_expr(&mut self, expr: &Expr) -> ControlFlow<()> {
            self.0 |= constant_bytes(expr).is_some();
            ControlFlow::Continue(())
        }
    }
    let mut finder = Finder(false);
    let _ = walk(value, &mut finder);
    if finder.0 { Err(bytes_in_text()) } else { Ok(()) }
}

/// The refusal of bytes that PostgreSQL would write in its own syntax.
pub(super) fn bytes_in_text() -> Refusal {
    Refusal::unsupported(
        "PostgreSQL does not take bytes inside of an expression for text; write the constant as text",
    )
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
        Dialect::PostgreSql => for_postgresql(expr, kind),
    }
}

/// Whether a number is written as `0x31`.
pub(super) fn is_hex_number(value: &SqlValue) -> bool {
    matches!(value, SqlValue::Number(text, _) if text.starts_with("0x"))
}

/// The bytes of a constant in MySQL's words, `x'41'`, `0x41`, `b'1000001'` or `_binary x'41'`, or of
/// a parameter.
pub(super) fn constant_bytes(expr: &Expr) -> Option<Vec<u8>> {
    let of_hex = |digits: &str| {
        let digits =
            if digits.len().is_multiple_of(2) { digits.to_owned() } else { format!("0{digits}") };
        let pair = |at: usize| u8::from_str_radix(digits.get(at..at + 2)?, 16).ok();
        (0..digits.len()).step_by(2).map(pair).collect::<Option<Vec<u8>>>()
    };
    match expr {
        Expr::Nested(inner) => constant_bytes(inner),
        Expr::Prefixed { prefix, value } if prefix.value.eq_ignore_ascii_case("_binary") => {
            match &**value {
                Expr::Value(ValueWithSpan { value, .. })
                    if text_of(value, Dialect::MariaDb).is_some() =>
                {
                    text_of(value, Dialect::MariaDb).map(|text| text.as_bytes().to_vec())
                }
                other => constant_bytes(other),
            }
        }
        Expr::Cast { expr, data_type: DataType::Bytea, .. } => match &**expr {
            Expr::Value(ValueWithSpan { value: SqlValue::SingleQuotedString(text), .. }) => {
                of_hex(text.strip_prefix("\\x")?)
            }
            _ => None,
        },
        Expr::Value(constant) => match &constant.value {
            // MariaDB refuses `x'3'`, and takes `0x3`.
            SqlValue::HexStringLiteral(digits) if digits.len().is_multiple_of(2) => of_hex(digits),
            SqlValue::Number(text, _) => of_hex(text.strip_prefix("0x")?),
            SqlValue::SingleQuotedByteStringLiteral(bits) => {
                let padded = format!("{}{bits}", "0".repeat((8 - bits.len() % 8) % 8));
                let byte = |at: usize| u8::from_str_radix(padded.get(at..at + 8)?, 2).ok();
                (0..padded.len()).step_by(8).map(byte).collect()
            }
            _ => None,
        },
        _ => None,
    }
}

/// Whether a constant is `0x31` or `b'110001'`, which are numbers beside numbers.
fn is_written_as_number(expr: &Expr) -> bool {
    match expr {
        Expr::Nested(inner) => is_written_as_number(inner),
        Expr::Value(constant) => {
            matches!(constant.value, SqlValue::SingleQuotedByteStringLiteral(_))
                || is_hex_number(&constant.value)
        }
        _ => false,
    }
}

/// The number that `0x31` and `b'110001'` are beside numbers. None for others, and if it has more
/// than 64 bits.
pub(super) fn constant_number(expr: &Expr) -> Option<Expr> {
    if !is_written_as_number(expr) {
        return None;
    }
    let bytes = constant_bytes(expr)?;
    let significant = bytes.iter().skip_while(|byte| **byte == 0);
    // MariaDB's numbers of this form have 64 bits.
    if significant.clone().count() > 8 {
        return None;
    }
    let number = significant.fold(0_u64, |number, byte| number << 8 | u64::from(*byte));
    let value = SqlValue::Number(number.to_string(), false);
    Some(Expr::Value(value.with_empty_span()))
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

/// A text with a backslash is no text of bytes for PostgreSQL, and a number is no boolean. Bytes are
/// a number, a text or bytes, as their column is.
fn for_postgresql(expr: &mut Expr, kind: Option<Kind>) -> Result<(), Refusal> {
    if let (Some(kind), Some(bytes)) = (kind, constant_bytes(expr)) {
        let is_number = kind.is_exact() || kind.is_float() || kind == Kind::Bool;
        if is_number && is_written_as_number(expr) {
            *expr = constant_number(expr).ok_or_else(|| Refusal {
                message:
                    "a constant of bytes is out of range for a number: it has more than 8 bytes"
                        .into(),
                sqlstate: "22003",
            })?;
        } else if kind == Kind::Bytes {
            *expr = literal(&Value::Bytes(bytes), Dialect::PostgreSql);
        } else if kind != Kind::Other {
            let text = String::from_utf8(bytes).map_err(|_| Refusal {
                message: "invalid byte sequence for encoding \"UTF8\" in a constant of bytes for a column of another type"
                    .into(),
                sqlstate: "22021",
            })?;
            *expr = Expr::Value(SqlValue::SingleQuotedString(text).with_empty_span());
        }
        return Ok(());
    }
    let Expr::Value(constant) = expr else { return Ok(()) };
    match (kind, &constant.value) {
        (Some(Kind::Text), SqlValue::Boolean(is)) => {
            constant.value = SqlValue::SingleQuotedString(u8::from(*is).to_string());
        }
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
    Ok(())
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
        let kind = column_kind(kinds, expr);
        // MariaDB does not order UUIDs by their texts, and PostgreSQL does.
        let is_text =
            kind == Some(Kind::Text) || kind == Some(Kind::Uuid) && to == Dialect::MariaDb;
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
pub(super) fn bytewise(text: Expr, to: Dialect) -> Expr {
    let named = |name: Ident| ObjectName::from(vec![name]);
    let (text, collation) = match to {
        Dialect::PostgreSql => (text, Ident::with_quote('"', BYTES_AT_POSTGRESQL)),
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
