//! Columns whose values are generated, in INSERT; and the functions of PostgreSQL's sequences.
//!
//! A table at one source leaves its keys to that source. Where several sources have rows of a table, each would count by
//! itself; so the proxy gives the values, and this module puts them into the statement.

use std::ops::ControlFlow;

use sqlparser::ast::{
    Assignment, AssignmentTarget, Expr, Function, FunctionArg, FunctionArgExpr, FunctionArguments,
    Ident, Insert, ObjectName, Parens, Query, SelectItem, SetExpr, Statement, TableObject,
    Value as SqlValue, Values, Visitor, VisitorMut,
};
use sqlparser::tokenizer::Span;

use super::Refusal;
use super::catalog::{Dialect, Table};
use super::route::table_name;
use super::value::Value;
use super::walk::{walk, walk_mut};

/// The table that an INSERT fills.
#[must_use]
pub fn target(statement: &Statement) -> Option<String> {
    match statement {
        Statement::Insert(Insert { table: TableObject::TableName(name), .. }) => {
            Some(table_name(name))
        }
        _ => None,
    }
}

/// Whether an INSERT lists its columns.
#[must_use]
pub fn lists_columns(statement: &Statement) -> bool {
    match statement {
        Statement::Insert(insert) => !insert.columns.is_empty() || !insert.assignments.is_empty(),
        _ => true,
    }
}

/// What is put in the place of a value that is to be generated.
pub enum Filler<'a> {
    /// The next of these.
    Numbers(&'a mut (dyn Iterator<Item = i64> + Send)),
    /// `DEFAULT`: the source generates it.
    Default,
}

impl Filler<'_> {
    fn next(&mut self) -> Result<Expr, Refusal> {
        match self {
            Self::Numbers(numbers) => {
                let next = numbers.next();
                next.map(number).ok_or_else(|| Refusal::data("there are too few generated keys"))
            }
            Self::Default => Ok(Expr::Identifier(Ident::new("DEFAULT"))),
        }
    }
}

fn number(value: i64) -> Expr {
    Expr::Value(SqlValue::Number(value.to_string(), false).with_span(Span::empty()))
}

/// What an INSERT says of a column whose values are generated.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Filled {
    /// How many rows were given a value.
    pub count: usize,
    /// The largest number that the statement gives itself.
    pub largest: Option<i64>,
}

/// Gives each row of an INSERT a value of `column`, unless it has one.
///
/// # Errors
/// The rows are a query's, so that nobody knows how many there are.
pub fn fill(
    statement: &mut Statement,
    table: &Table,
    column: &str,
    client: Dialect,
    parameters: &[Value],
    filler: &mut Filler<'_>,
) -> Result<Filled, Refusal> {
    let mut filled = Filled::default();
    let Statement::Insert(insert) = statement else { return Ok(filled) };
    list_assignments(insert);
    if insert.source.is_none() || is_empty_row(insert.source.as_deref()) {
        // DEFAULT VALUES, and MySQL's `() VALUES ()`.
        let row = Parens::with_empty_span(vec![filler.next()?]);
        insert.columns = vec![ObjectName::from(vec![Ident::new(column)])];
        insert.source = Some(Box::new(values(vec![row])));
        filled.count += 1;
        return Ok(filled);
    }
    let listed: Vec<String> = insert.columns.iter().map(table_name).collect();
    let all = if listed.is_empty() { table.columns.clone() } else { listed.clone() };
    let place = all.iter().position(|one| one == column);
    let Some(SetExpr::Values(values)) = insert.source.as_mut().map(|query| &mut *query.body) else {
        if place.is_some() {
            return Ok(filled);
        }
        return Err(Refusal::unsupported(format!(
            "the proxy generates the values of \"{column}\" row by row, and a query's rows are not known here; select \
             them, then insert their values",
        )));
    };
    if place.is_none() {
        insert.columns.push(ObjectName::from(vec![Ident::new(column)]));
    }
    for row in &mut values.rows {
        match place.and_then(|place| row.content.get_mut(place)) {
            Some(value) => replace(value, client, parameters, filler, &mut filled)?,
            None => {
                // A row may be shorter than a list of columns that nobody wrote.
                while listed.is_empty() && row.content.len() + 1 < all.len() {
                    row.content.push(Expr::Identifier(Ident::new("DEFAULT")));
                }
                row.content.push(filler.next()?);
                filled.count += 1;
            }
        }
    }
    Ok(filled)
}

/// Writes MySQL's `INSERT … SET a = 1` as `INSERT … (a) VALUES (1)`, which both kinds of sources read.
pub(super) fn list_assignments(insert: &mut Insert) {
    let is_plain = |one: &Assignment| matches!(one.target, AssignmentTarget::ColumnName(_));
    if insert.assignments.is_empty() || !insert.assignments.iter().all(is_plain) {
        return;
    }
    let mut row = Vec::new();
    for Assignment { target, value } in std::mem::take(&mut insert.assignments) {
        if let AssignmentTarget::ColumnName(name) = target {
            insert.columns.push(name);
            row.push(value);
        }
    }
    insert.source = Some(Box::new(values(vec![Parens::with_empty_span(row)])));
}

pub(super) fn values(rows: Vec<Parens<Vec<Expr>>>) -> Query {
    Query {
        with: None,
        body: Box::new(SetExpr::Values(Values { explicit_row: false, rows, value_keyword: false })),
        order_by: None,
        limit_clause: None,
        fetch: None,
        locks: Vec::new(),
        for_clause: None,
        settings: None,
        format_clause: None,
        pipe_operators: Vec::new(),
    }
}

fn is_empty_row(query: Option<&Query>) -> bool {
    match query.map(|query| &*query.body) {
        Some(SetExpr::Values(values)) => {
            matches!(values.rows.as_slice(), [row] if row.content.is_empty())
        }
        _ => false,
    }
}

/// Puts a value in the place of one that asks for it: DEFAULT, and at MySQL NULL and 0.
fn replace(
    expr: &mut Expr,
    client: Dialect,
    parameters: &[Value],
    filler: &mut Filler<'_>,
    filled: &mut Filled,
) -> Result<(), Refusal> {
    let is_maria = client == Dialect::MariaDb;
    let bound = match &*expr {
        Expr::Value(value) => match &value.value {
            SqlValue::Placeholder(name) => {
                let place = name.trim_start_matches('$').parse::<usize>().ok();
                place.and_then(|place| parameters.get(place.checked_sub(1)?))
            }
            _ => None,
        },
        _ => None,
    };
    let (asks, given) = match (&*expr, bound) {
        (Expr::Identifier(name), _) => (name.value.eq_ignore_ascii_case("default"), None),
        (_, Some(Value::Null)) => (is_maria, None),
        (_, Some(Value::Number(text) | Value::Text(text))) => {
            (is_maria && text == "0", text.trim().parse().ok())
        }
        (Expr::Value(value), None) => match &value.value {
            SqlValue::Null => (is_maria, None),
            SqlValue::Number(text, _) | SqlValue::SingleQuotedString(text) => {
                (is_maria && text == "0", text.parse().ok())
            }
            _ => (false, None),
        },
        _ => (false, None),
    };
    if asks {
        *expr = filler.next()?;
        filled.count += 1;
    } else {
        filled.largest = filled.largest.max(given);
    }
    Ok(())
}

/// Adds `RETURNING column` to an INSERT that returns nothing.
pub fn return_column(statement: &mut Statement, column: &str, client: Dialect) -> bool {
    let quote = match client {
        Dialect::PostgreSql => '"',
        Dialect::MariaDb => '`',
    };
    match statement {
        Statement::Insert(insert) if insert.returning.is_none() => {
            insert.returning = Some(vec![SelectItem::UnnamedExpr(Expr::Identifier(
                Ident::with_quote(quote, column),
            ))]);
            true
        }
        _ => false,
    }
}

/// A call of a function of PostgreSQL's sequences.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Call {
    /// `nextval('name')`.
    Next(String),
    /// `currval('name')`.
    Current(String),
    /// `lastval()`.
    Last,
}

/// The calls in a statement, in their order. None if it has some that the proxy cannot answer: then they are the
/// source's affair.
#[must_use]
pub fn calls(statement: &Statement) -> Option<Vec<Call>> {
    struct Finder(Vec<Call>, bool);
    impl Visitor for Finder {
        type Break = ();
        fn pre_visit_expr(&mut self, expr: &Expr) -> ControlFlow<()> {
            if let Expr::Function(function) = expr {
                match call(function) {
                    Some(Ok(call)) => self.0.push(call),
                    Some(Err(())) => self.1 = true,
                    None => {}
                }
            }
            ControlFlow::Continue(())
        }
    }
    let is_plain = match statement {
        Statement::Query(query) => match &*query.body {
            SetExpr::Select(select) => select.from.is_empty() && select.selection.is_none(),
            _ => false,
        },
        Statement::Insert(insert) => {
            matches!(insert.source.as_ref().map(|query| &*query.body), Some(SetExpr::Values(_)))
        }
        _ => false,
    };
    if !is_plain {
        return None;
    }
    let mut finder = Finder(Vec::new(), false);
    let _ = walk(statement, &mut finder);
    (!finder.1 && !finder.0.is_empty()).then_some(finder.0)
}

/// A call of `setval`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SetCall {
    /// The sequence; none if the statement computes its name.
    pub sequence: Option<String>,
    /// The smallest value that `nextval` may give afterwards; none if the statement computes it.
    pub next: Option<i64>,
}

/// The calls of `setval` in a statement.
#[must_use]
pub fn set_calls(statement: &Statement) -> Vec<SetCall> {
    struct Finder(Vec<SetCall>);
    impl Visitor for Finder {
        type Break = ();
        fn pre_visit_expr(&mut self, expr: &Expr) -> ControlFlow<()> {
            self.0.extend(set_call(expr));
            ControlFlow::Continue(())
        }
    }
    let mut finder = Finder(Vec::new());
    let _ = walk(statement, &mut finder);
    finder.0
}

fn set_call(expr: &Expr) -> Option<SetCall> {
    let Expr::Function(function) = expr else { return None };
    if table_name(&function.name) != "setval" {
        return None;
    }
    let FunctionArguments::List(list) = &function.args else { return None };
    let args = list.args.iter().map(|arg| match arg {
        FunctionArg::Unnamed(FunctionArgExpr::Expr(expr)) => Some(expr),
        _ => None,
    });
    let args: Vec<Option<&Expr>> = args.collect();
    let is_called = match args.get(2) {
        None => Some(true),
        Some(Some(Expr::Value(value))) => match value.value {
            SqlValue::Boolean(is) => Some(is),
            _ => None,
        },
        Some(_) => None,
    };
    let value = args.get(1).copied().flatten();
    let value = value.and_then(|value| value.to_string().parse::<i64>().ok());
    let next = value.zip(is_called);
    Some(SetCall {
        sequence: args.first().copied().flatten().and_then(named_sequence),
        next: next.map(|(value, is_called)| value.saturating_add(is_called.into())),
    })
}

/// A sequence by its name, or as `pg_get_serial_sequence('table', 'column')`.
fn named_sequence(expr: &Expr) -> Option<String> {
    let arguments = match expr {
        Expr::Cast { expr, .. } | Expr::Nested(expr) => return named_sequence(expr),
        Expr::Function(function) if table_name(&function.name) == "pg_get_serial_sequence" => {
            &function.args
        }
        _ => return text(expr),
    };
    let FunctionArguments::List(list) = arguments else { return None };
    match list.args.as_slice() {
        [
            FunctionArg::Unnamed(FunctionArgExpr::Expr(table)),
            FunctionArg::Unnamed(FunctionArgExpr::Expr(column)),
        ] => Some(format!("{}_{}_seq", text(table)?, text(column)?)),
        _ => None,
    }
}

/// Puts values in the places of the calls of `setval`, which return what they were given.
pub fn put_set_calls(statement: &mut Statement) {
    struct Putter;
    impl VisitorMut for Putter {
        type Break = Refusal;
        fn pre_visit_expr(&mut self, expr: &mut Expr) -> ControlFlow<Refusal> {
            if set_call(expr).is_some()
                && let Expr::Function(function) = &*expr
                && let FunctionArguments::List(list) = &function.args
                && let Some(FunctionArg::Unnamed(FunctionArgExpr::Expr(value))) = list.args.get(1)
            {
                *expr = value.clone();
            }
            ControlFlow::Continue(())
        }
    }
    if let Statement::Query(query) = statement
        && let SetExpr::Select(select) = &mut *query.body
    {
        for item in &mut select.projection {
            if let SelectItem::UnnamedExpr(expr) = item
                && set_call(expr).is_some()
            {
                let (expr, alias) = (expr.clone(), Ident::new("setval"));
                *item = SelectItem::ExprWithAlias { expr, alias };
            }
        }
    }
    // It refuses nothing.
    let _ = walk_mut(statement, &mut Putter);
}

/// Puts these values in the places of the calls.
pub fn put_calls(statement: &mut Statement, values: &[i64]) {
    struct Putter<'a>(std::slice::Iter<'a, i64>);
    impl VisitorMut for Putter<'_> {
        type Break = Refusal;
        fn pre_visit_expr(&mut self, expr: &mut Expr) -> ControlFlow<Refusal> {
            if let Expr::Function(function) = expr
                && let Some(Ok(_)) = call(function)
                && let Some(value) = self.0.next()
            {
                *expr = number(*value);
            }
            ControlFlow::Continue(())
        }
    }
    name_columns(statement);
    // It refuses nothing.
    let _ = walk_mut(statement, &mut Putter(values.iter()));
}

/// Columns of a query that are calls keep their names.
fn name_columns(statement: &mut Statement) {
    let Statement::Query(query) = statement else { return };
    let SetExpr::Select(select) = &mut *query.body else { return };
    for item in &mut select.projection {
        if let SelectItem::UnnamedExpr(Expr::Function(function)) = item
            && let Some(Ok(_)) = call(function)
        {
            let (expr, alias) =
                (Expr::Function(function.clone()), Ident::new(table_name(&function.name)));
            *item = SelectItem::ExprWithAlias { expr, alias };
        }
    }
}

fn call(function: &Function) -> Option<Result<Call, ()>> {
    let name = table_name(&function.name);
    if !matches!(name.as_str(), "nextval" | "currval" | "lastval") {
        return None;
    }
    let FunctionArguments::List(list) = &function.args else { return Some(Err(())) };
    let sequence = match list.args.as_slice() {
        [] if name == "lastval" => return Some(Ok(Call::Last)),
        [FunctionArg::Unnamed(FunctionArgExpr::Expr(expr))] => text(expr),
        _ => None,
    };
    let Some(sequence) = sequence else { return Some(Err(())) };
    Some(match name.as_str() {
        "nextval" => Ok(Call::Next(sequence)),
        "currval" => Ok(Call::Current(sequence)),
        _ => Err(()),
    })
}

/// The name of a sequence in a text constant, without its schema.
fn text(expr: &Expr) -> Option<String> {
    match expr {
        Expr::Cast { expr, .. } | Expr::Nested(expr) => text(expr),
        Expr::Value(value) => match &value.value {
            SqlValue::SingleQuotedString(text) => {
                let last = text.rsplit('.').next().unwrap_or(text);
                Some(match last.strip_prefix('"') {
                    Some(quoted) => quoted.trim_end_matches('"').to_owned(),
                    None => last.to_lowercase(),
                })
            }
            _ => None,
        },
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::catalog::{Placement, SourceId};
    use super::super::parse::{Verb, parse};
    use super::*;

    fn table() -> Table {
        Table {
            name: "t".into(),
            placement: Placement::Broadcast([SourceId(0), SourceId(1)].into()),
            primary: Vec::new(),
            columns: vec!["id".into(), "v".into()],
            generated: Some("id".into()),
        }
    }

    fn filled(text: &str, client: Dialect, parameters: &[Value]) -> (String, Filled) {
        let Verb::Data(mut statement) = parse(text, client).unwrap().remove(0).verb else {
            panic!("{text}")
        };
        let filler = &mut Filler::Numbers(&mut (7..));
        let filled =
            fill(&mut statement, &table(), "id", client, parameters, filler).unwrap_or_default();
        (statement.to_string(), filled)
    }

    #[test]
    fn rows_without_a_key_get_one() {
        let postgres = |text| filled(text, Dialect::PostgreSql, &[]).0;
        let maria = |text| filled(text, Dialect::MariaDb, &[]).0;
        assert_eq!(
            postgres("INSERT INTO t (v) VALUES (1), (2)"),
            "INSERT INTO t (v, id) VALUES (1, 7), (2, 8)"
        );
        assert_eq!(
            postgres("INSERT INTO t (id, v) VALUES (DEFAULT, 1), (5, 2)"),
            "INSERT INTO t (id, v) VALUES (7, 1), (5, 2)"
        );
        assert_eq!(postgres("INSERT INTO t DEFAULT VALUES"), "INSERT INTO t (id) VALUES (7)");
        // NULL is a value at PostgreSQL, and asks for one at MySQL.
        assert_eq!(
            postgres("INSERT INTO t (id, v) VALUES (NULL, 1)"),
            "INSERT INTO t (id, v) VALUES (NULL, 1)"
        );
        assert_eq!(
            maria("INSERT INTO t (id, v) VALUES (NULL, 1), (0, 2)"),
            "INSERT INTO t (id, v) VALUES (7, 1), (8, 2)"
        );
        assert_eq!(maria("INSERT INTO t SET v = 3"), "INSERT INTO t (v, id) VALUES (3, 7)");
        assert_eq!(maria("INSERT INTO t VALUES (NULL, 1)"), "INSERT INTO t VALUES (7, 1)");
        let (text, found) =
            filled("INSERT INTO t (id) VALUES (?), (90)", Dialect::MariaDb, &[Value::Null]);
        assert_eq!(text, "INSERT INTO t (id) VALUES (7), (90)");
        assert_eq!(found, Filled { count: 1, largest: Some(90) });
    }

    #[test]
    fn calls_that_set_a_sequence_are_found_and_become_their_values() {
        let statement = |text: &str| {
            let Verb::Data(statement) = parse(text, Dialect::PostgreSql).unwrap().remove(0).verb
            else {
                panic!("{text}")
            };
            *statement
        };
        let call =
            |sequence: Option<&str>, next| SetCall { sequence: sequence.map(str::to_owned), next };
        for (text, found) in [
            ("setval('public.a_id_seq', 7)", call(Some("a_id_seq"), Some(8))),
            ("setval('a_id_seq'::regclass, 7, false)", call(Some("a_id_seq"), Some(7))),
            (
                "setval(pg_get_serial_sequence('\"a\"', 'id'), coalesce(max(id), 1)) FROM a",
                call(Some("a_id_seq"), None),
            ),
            ("setval(x, 7) FROM a", call(None, Some(8))),
        ] {
            assert_eq!(set_calls(&statement(&format!("SELECT {text}"))), [found], "{text}");
        }
        let mut made = statement("SELECT setval('a_id_seq', 7), 1");
        put_set_calls(&mut made);
        assert_eq!(made.to_string(), "SELECT 7 AS setval, 1");
        assert_eq!(set_calls(&made), []);
    }

    #[test]
    fn sequences_are_asked_in_their_order() {
        let text = "SELECT nextval('a_id_seq'::regclass), currval('\"B\"'), lastval() AS l";
        let Verb::Data(mut statement) = parse(text, Dialect::PostgreSql).unwrap().remove(0).verb
        else {
            panic!("{text}")
        };
        let found = calls(&statement).unwrap();
        assert_eq!(found, [Call::Next("a_id_seq".into()), Call::Current("B".into()), Call::Last]);
        put_calls(&mut statement, &[1, 2, 3]);
        assert_eq!(statement.to_string(), "SELECT 1 AS nextval, 2 AS currval, 3 AS l");
    }
}
