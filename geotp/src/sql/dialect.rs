//! Translates statements between PostgreSQL's and MariaDB's SQL, and formats values as constants.
//!
//! Connections to MariaDB use `NO_BACKSLASH_ESCAPES`, those to PostgreSQL
//! `standard_conforming_strings`. So a string constant has one syntax for both: quotes are doubled,
//! and no other character is special.

use std::ops::ControlFlow;

use sqlparser::ast::{
    BinaryOperator, CastKind, CreateView, DataType, Distinct, ExactNumberInfo, Expr, Function,
    FunctionArg, FunctionArgExpr, FunctionArgumentClause, FunctionArgumentList, FunctionArguments,
    GroupByExpr, Ident, Join, JoinOperator, LimitClause, LockType, NamedWindowDefinition,
    NamedWindowExpr, ObjectName, ObjectNamePart, Offset, OffsetRows, OrderByExpr, OrderByKind,
    OrderBySort, Query, Select, SelectItem, SelectItemQualifiedWildcardKind, SetExpr, Statement,
    TableFactor, TableWithJoins, UnaryOperator, Value as SqlValue, ValueWithSpan, VisitorMut,
    WindowFrameBound, WindowFrameUnits, WindowSpec, WindowType,
};
use sqlparser::tokenizer::Span;

use super::Refusal;
use super::catalog::{Catalogue, Dialect};
use super::route::table_name;
use super::value::Value;
use super::walk::walk_mut;
use super::{labels, names, typed};

/// Replaces the placeholders `$n` by parameters.
///
/// # Errors
/// A parameter is missing, or its bytes cannot be text.
pub fn bind(statement: &mut Statement, parameters: &[Value], to: Dialect) -> Result<(), Refusal> {
    struct Binder<'a>(&'a [Value], Dialect);
    impl VisitorMut for Binder<'_> {
        type Break = Refusal;
        fn pre_visit_expr(&mut self, expr: &mut Expr) -> ControlFlow<Refusal> {
            let Expr::Value(value) = &expr else { return ControlFlow::Continue(()) };
            let SqlValue::Placeholder(name) = &value.value else {
                return ControlFlow::Continue(());
            };
            let index = name.strip_prefix('$').and_then(|n| n.parse::<usize>().ok());
            let found = index.and_then(|n| n.checked_sub(1)).and_then(|n| self.0.get(n));
            let Some(found) = found else {
                return ControlFlow::Break(Refusal {
                    message: format!("unknown parameter {name}"),
                    sqlstate: "42P02",
                });
            };
            *expr = literal(found, self.1);
            ControlFlow::Continue(())
        }
    }
    walk_mut(statement, &mut Binder(parameters, to))
}

fn value(value: SqlValue) -> Expr {
    Expr::Value(value.with_span(Span::empty()))
}

/// A value as a constant.
#[must_use]
pub fn literal(of: &Value, to: Dialect) -> Expr {
    match of {
        Value::Null => value(SqlValue::Null),
        Value::Bool(is) => value(SqlValue::Boolean(*is)),
        // Parentheses prevent that two signs form a comment.
        Value::Number(text) if is_number(text) => match text.strip_prefix('-') {
            Some(digits) => Expr::Nested(Box::new(Expr::UnaryOp {
                op: UnaryOperator::Minus,
                expr: Box::new(value(SqlValue::Number(digits.to_owned(), false))),
            })),
            None => value(SqlValue::Number(text.trim_start_matches('+').to_owned(), false)),
        },
        Value::Number(text) | Value::Text(text) => {
            value(SqlValue::SingleQuotedString(text.clone()))
        }
        Value::Bytes(bytes) => {
            let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            match to {
                Dialect::MariaDb => value(SqlValue::HexStringLiteral(hex)),
                Dialect::PostgreSql => Expr::Cast {
                    kind: CastKind::Cast,
                    expr: Box::new(value(SqlValue::SingleQuotedString(format!("\\x{hex}")))),
                    data_type: DataType::Bytea,
                    format: None,
                },
            }
        }
    }
}

/// Whether a text is a number in SQL's syntax. `NaN` and `Infinity` are not.
fn is_number(text: &str) -> bool {
    let digits = text.trim_start_matches(['-', '+']);
    text.len() - digits.len() <= 1
        && digits.starts_with(|c: char| c.is_ascii_digit() || c == '.')
        && digits.contains(|c: char| c.is_ascii_digit())
        && digits.chars().all(|c| c.is_ascii_digit() || matches!(c, '.' | 'e' | 'E' | '+' | '-'))
}

/// Translates a statement from the client's dialect `from` to a source's dialect `to`.
///
/// # Errors
/// It uses a feature that `to` does not have.
pub fn translate(
    statement: &mut Statement,
    from: Dialect,
    to: Dialect,
    catalogue: &Catalogue,
) -> Result<(), Refusal> {
    walk_mut(statement, &mut Translator { from, to, catalogue })?;
    for name in names::unvisited(statement) {
        names::strip(catalogue, name, from, to);
    }
    if from == to {
        return Ok(());
    }
    super::schema::translate(statement, to)?;
    check(statement, from, to)
}

/// Refuses features that the other dialect lacks, or in which it has another meaning.
fn check(statement: &Statement, from: Dialect, to: Dialect) -> Result<(), Refusal> {
    let refuse = |message: String| Err(Refusal::unsupported(message));
    match statement {
        Statement::Insert(insert)
            if insert.on.is_some() || insert.ignore || insert.replace_into =>
        {
            refuse(format!(
                "the conflict handling of this INSERT differs between {from} and {to}; use \
                 UPDATE, then INSERT",
            ))
        }
        Statement::Update(update) if update.returning.is_some() => refuse(
            "MariaDB has no UPDATE … RETURNING; read the rows in a statement of its own".into(),
        ),
        Statement::Update(update) if update.limit.is_some() || !update.order_by.is_empty() => {
            refuse("PostgreSQL has no UPDATE … LIMIT; restrict the rows by a condition".into())
        }
        Statement::Update(update) if update.from.is_some() || !update.table.joins.is_empty() => {
            refuse(format!(
                "UPDATE of several tables differs between {from} and {to}; use a subquery"
            ))
        }
        Statement::Delete(delete)
            if delete.using.is_some()
                || delete.limit.is_some()
                || !delete.order_by.is_empty()
                || !delete.tables.is_empty() =>
        {
            refuse(format!(
                "this DELETE differs between {from} and {to}; restrict the rows by a condition"
            ))
        }
        _ => Ok(()),
    }
}

struct Translator<'a> {
    from: Dialect,
    to: Dialect,
    catalogue: &'a Catalogue,
}

type Flow = ControlFlow<Refusal>;

impl VisitorMut for Translator<'_> {
    type Break = Refusal;

    fn pre_visit_relation(&mut self, name: &mut ObjectName) -> Flow {
        // A schema or database in a client's statement is the proxy's, not the source's. What the
        // catalogue does not know may be a function.
        if name.0.len() > 1 && self.catalogue.table(&table_name(name)).is_some() {
            names::strip(self.catalogue, name, self.from, self.to);
        }
        ControlFlow::Continue(())
    }

    fn pre_visit_select(&mut self, select: &mut Select) -> Flow {
        if (self.from, self.to) == (Dialect::PostgreSql, Dialect::MariaDb)
            && let Some(clause) = unknown_to_mariadb(select)
        {
            return ControlFlow::Break(Refusal::unsupported(format!("MariaDB has no {clause}")));
        }
        if self.to == Dialect::PostgreSql {
            // Hints of MySQL, such as SQL_NO_CACHE.
            select.select_modifiers = None;
        }
        for item in &mut select.projection {
            if let SelectItem::QualifiedWildcard(
                SelectItemQualifiedWildcardKind::ObjectName(name),
                _,
            ) = item
            {
                names::strip(self.catalogue, name, self.from, self.to);
            }
        }
        for NamedWindowDefinition(_, window) in &mut select.named_window {
            if let NamedWindowExpr::WindowSpec(window) = window
                && let Err(refusal) = self.window(window)
            {
                return ControlFlow::Break(refusal);
            }
        }
        ControlFlow::Continue(())
    }

    fn pre_visit_table_factor(&mut self, factor: &mut TableFactor) -> Flow {
        if let TableFactor::Derived { subquery, alias, .. } = factor
            && self.renames()
            && alias.as_ref().is_none_or(|alias| alias.columns.is_empty())
        {
            labels::name_items(&mut subquery.body, None);
        }
        ControlFlow::Continue(())
    }

    fn pre_visit_statement(&mut self, statement: &mut Statement) -> Flow {
        if let Statement::CreateView(CreateView { name, .. }) | Statement::AlterView { name, .. } =
            statement
        {
            names::strip(self.catalogue, name, self.from, self.to);
        }
        ControlFlow::Continue(())
    }

    fn pre_visit_query(&mut self, query: &mut Query) -> Flow {
        if self.to == Dialect::PostgreSql
            && let Some(LimitClause::OffsetCommaLimit { offset, limit }) = &query.limit_clause
        {
            let offset = Offset { value: offset.clone(), rows: OffsetRows::None };
            let (limit, offset) = (Some(limit.clone()), Some(offset));
            query.limit_clause =
                Some(LimitClause::LimitOffset { limit, offset, limit_by: Vec::new() });
        }
        if self.renames() {
            let ctes = query.with.iter_mut().flat_map(|with| &mut with.cte_tables);
            for cte in ctes.filter(|cte| cte.alias.columns.is_empty()) {
                labels::name_items(&mut cte.query.body, None);
            }
            if let Some(OrderByKind::Expressions(keys)) =
                query.order_by.as_ref().map(|order| &order.kind)
            {
                labels::name_items(&mut query.body, Some(keys));
            }
        }
        if let Some(order) = &mut query.order_by
            && let OrderByKind::Expressions(keys) = &mut order.kind
        {
            let mut translated = Vec::with_capacity(keys.len());
            for key in std::mem::take(keys) {
                let named = match self.tests_null(&key) {
                    true => self.named(&mut query.body, &key.expr),
                    false => Ok(None),
                };
                match named {
                    Ok(named) => translated.extend(self.order(key, named)),
                    Err(refusal) => return ControlFlow::Break(refusal),
                }
            }
            *keys = translated;
        }
        ControlFlow::Continue(())
    }

    fn pre_visit_expr(&mut self, expr: &mut Expr) -> Flow {
        if let Expr::Value(found) = expr {
            if self.to == Dialect::PostgreSql
                && let SqlValue::SingleQuotedString(text) | SqlValue::DoubleQuotedString(text) =
                    &found.value
                && text.contains('\0')
            {
                return ControlFlow::Break(Refusal {
                    message: "invalid byte sequence for encoding \"UTF8\": 0x00".into(),
                    sqlstate: "22021",
                });
            }
            match &found.value {
                SqlValue::DoubleQuotedString(text) | SqlValue::NationalStringLiteral(text)
                    if self.from == Dialect::MariaDb =>
                {
                    found.value = SqlValue::SingleQuotedString(text.clone());
                }
                SqlValue::EscapedStringLiteral(text) | SqlValue::UnicodeStringLiteral(text) => {
                    found.value = SqlValue::SingleQuotedString(text.clone());
                }
                SqlValue::DollarQuotedString(text) => {
                    found.value = SqlValue::SingleQuotedString(text.value.clone())
                }
                SqlValue::HexStringLiteral(_)
                    if self.from != self.to && self.to == Dialect::PostgreSql =>
                {
                    self.bytes(expr);
                }
                // Beside numbers it has become one.
                number
                    if self.from != self.to
                        && self.to == Dialect::PostgreSql
                        && typed::is_hex_number(number) =>
                {
                    self.bytes(expr);
                }
                _ => {}
            }
            return ControlFlow::Continue(());
        }
        if let Expr::CompoundIdentifier(parts) = expr
            && parts.len() > 2
        {
            self.strip_column(parts);
        }
        if self.to == Dialect::MariaDb {
            escape_pattern(expr);
        }
        if self.from == self.to {
            // Two bars mean OR for a MariaDB client, whatever the parser reports.
            return ControlFlow::Continue(());
        }
        match self.expr(expr) {
            Ok(()) => ControlFlow::Continue(()),
            Err(refusal) => ControlFlow::Break(refusal),
        }
    }
}

fn cast(expr: Expr, data_type: DataType) -> Expr {
    Expr::Cast { kind: CastKind::Cast, expr: Box::new(expr), data_type, format: None }
}

/// The bytes of a text, as a constant for PostgreSQL.
pub(super) fn bytes_of_text(text: &str) -> Expr {
    literal(&Value::Bytes(text.as_bytes().to_vec()), Dialect::PostgreSql)
}

fn call(name: &str, args: Vec<Expr>) -> Expr {
    Expr::Function(Function {
        name: ObjectName(vec![ObjectNamePart::Identifier(Ident::new(name))]),
        uses_odbc_syntax: false,
        parameters: FunctionArguments::None,
        args: FunctionArguments::List(FunctionArgumentList {
            duplicate_treatment: None,
            args: args
                .into_iter()
                .map(|e| FunctionArg::Unnamed(FunctionArgExpr::Expr(e)))
                .collect(),
            clauses: Vec::new(),
        }),
        filter: None,
        null_treatment: None,
        over: None,
        within_group: Vec::new(),
    })
}

fn is_value(expr: &Expr) -> bool {
    matches!(expr, Expr::Value(_))
}

/// The first SELECT of a query, whose columns name those of the result, and whether it is an
/// operand of a set operation or stands in parentheses.
pub(super) fn leftmost(body: &mut SetExpr) -> Option<(&mut Select, bool)> {
    match body {
        SetExpr::Select(select) => Some((select, false)),
        SetExpr::SetOperation { left, .. } => leftmost(left).map(|(select, _)| (select, true)),
        SetExpr::Query(query) => leftmost(&mut query.body).map(|(select, _)| (select, true)),
        _ => None,
    }
}

/// The expression of the column that has this alias.
fn aliased(select: &Select, key: &Expr) -> Option<Expr> {
    let Expr::Identifier(name) = key else { return None };
    select.projection.iter().find_map(|item| match item {
        SelectItem::ExprWithAlias { expr, alias }
            if alias.value.eq_ignore_ascii_case(&name.value) =>
        {
            Some(expr.clone())
        }
        _ => None,
    })
}

/// The name of a column of a result. One that has none gets its text, as MariaDB names it.
fn name_of(item: &mut SelectItem) -> Option<Ident> {
    match item {
        SelectItem::ExprWithAlias { alias, .. } => Some(alias.clone()),
        SelectItem::UnnamedExpr(Expr::Identifier(name)) => Some(name.clone()),
        SelectItem::UnnamedExpr(Expr::CompoundIdentifier(names)) => names.last().cloned(),
        SelectItem::UnnamedExpr(expr) => {
            let alias = Ident::with_quote('"', expr.to_string());
            *item = SelectItem::ExprWithAlias { expr: expr.clone(), alias: alias.clone() };
            Some(alias)
        }
        _ => None,
    }
}

/// Whether NULLs come first for a client of `dialect`.
#[must_use]
pub(super) fn nulls_first(key: &OrderByExpr, dialect: Dialect) -> bool {
    let is_descending = matches!(key.options.sort, Some(OrderBySort::Desc));
    // NULL is above all values in PostgreSQL, and below all values in MariaDB.
    key.options.nulls_first.unwrap_or(is_descending == (dialect == Dialect::PostgreSql))
}

impl Translator<'_> {
    /// Writes a constant of bytes in PostgreSQL's words.
    fn bytes(&self, expr: &mut Expr) {
        if let Some(bytes) = typed::constant_bytes(expr) {
            *expr = literal(&Value::Bytes(bytes), self.to);
        }
    }

    /// Whether the source names columns otherwise than the client's statement expects, if an outer
    /// query or ORDER BY uses the names.
    fn renames(&self) -> bool {
        self.from == Dialect::PostgreSql && self.to == Dialect::MariaDb
    }

    /// Removes the proxy's schema or database from the name of a column, as from that of its table.
    fn strip_column(&self, parts: &mut Vec<Ident>) {
        let Some(column) = parts.pop() else { return };
        let table = std::mem::take(parts).into_iter().map(ObjectNamePart::Identifier).collect();
        let mut table = ObjectName(table);
        names::strip(self.catalogue, &mut table, self.from, self.to);
        parts.extend(table.0.into_iter().filter_map(|part| part.as_ident().cloned()));
        parts.push(column);
    }

    /// Whether the source needs a key of its own that puts NULLs where the client expects them.
    fn tests_null(&self, key: &OrderByExpr) -> bool {
        let is_same = self.from == self.to && key.options.nulls_first.is_none();
        if is_same || self.to == Dialect::PostgreSql {
            return false;
        }
        let mut plain = key.clone();
        plain.options.nulls_first = None;
        nulls_first(key, self.from) != nulls_first(&plain, self.to)
    }

    /// What a key of ORDER BY means that is the position or the name of a column of the result: the
    /// column's expression, or its name if the query has a set operation. None for other keys.
    ///
    /// # Errors
    /// It is a position, and `*` hides which column has it.
    fn named(&self, body: &mut SetExpr, key: &Expr) -> Result<Option<Expr>, Refusal> {
        let position = match key {
            Expr::Value(value) => match &value.value {
                SqlValue::Number(text, _) => text.parse::<usize>().ok(),
                _ => None,
            },
            _ => None,
        };
        let unknown = || {
            Refusal::unsupported(
                "MariaDB and PostgreSQL order NULL differently, and here the proxy does not know which column ORDER BY \
                 means by its position; write the column's name",
            )
        };
        let Some((select, is_set)) = leftmost(body) else {
            return if position.is_some() { Err(unknown()) } else { Ok(None) };
        };
        let Some(position) = position else {
            return Ok(if is_set { None } else { aliased(select, key) });
        };
        let Some(place) = position.checked_sub(1) else { return Ok(None) };
        let is_wild = |item: &SelectItem| {
            matches!(item, SelectItem::Wildcard(_) | SelectItem::QualifiedWildcard(..))
        };
        if select.projection.iter().take(position).any(is_wild) {
            return self.of_all(select, place).map(Some).ok_or_else(unknown);
        }
        // A position that the list does not have is the source's error.
        let Some(item) = select.projection.get_mut(place) else { return Ok(None) };
        if is_set {
            return name_of(item).map(|name| Some(Expr::Identifier(name))).ok_or_else(unknown);
        }
        match item {
            SelectItem::UnnamedExpr(expr) | SelectItem::ExprWithAlias { expr, .. } => {
                Ok(Some(expr.clone()))
            }
            _ => Err(unknown()),
        }
    }

    /// The column at a place of `SELECT *` from one table, if its columns are known.
    fn of_all(&self, select: &Select, place: usize) -> Option<Expr> {
        let ([SelectItem::Wildcard(_)], [from]) =
            (select.projection.as_slice(), select.from.as_slice())
        else {
            return None;
        };
        let TableFactor::Table { name, args: None, .. } = &from.relation else { return None };
        let table = self.catalogue.table(&table_name(name)).filter(|_| from.joins.is_empty())?;
        let quote = quote_of(self.from);
        table.columns.get(place).map(|name| Expr::Identifier(Ident::with_quote(quote, name)))
    }

    /// The same order at the source, regardless of where the source puts NULLs by default. `named`
    /// is what a position or the name of a column means.
    fn order(&self, mut key: OrderByExpr, named: Option<Expr>) -> Vec<OrderByExpr> {
        if self.from == self.to
            && (self.to == Dialect::PostgreSql || key.options.nulls_first.is_none())
        {
            return vec![key];
        }
        let tests_null = self.tests_null(&key);
        let wanted = nulls_first(&key, self.from);
        key.options.nulls_first = None;
        match self.to {
            Dialect::PostgreSql => {
                let given = nulls_first(&key, self.to);
                key.options.nulls_first = (wanted != given).then_some(wanted);
                vec![key]
            }
            // A constant is not NULL, or every row has it.
            Dialect::MariaDb if tests_null && (named.is_some() || !is_value(&key.expr)) => {
                let tested = match named.unwrap_or_else(|| key.expr.clone()) {
                    plain @ (Expr::Identifier(_)
                    | Expr::CompoundIdentifier(_)
                    | Expr::Function(_)
                    | Expr::Nested(_)) => plain,
                    other => Expr::Nested(Box::new(other)),
                };
                let mut test = key.clone();
                test.expr = Expr::IsNull(Box::new(tested));
                test.options.sort = wanted.then_some(OrderBySort::Desc);
                vec![test, key]
            }
            Dialect::MariaDb => vec![key],
        }
    }

    /// The order inside of a window, or of the values of an aggregate.
    fn orders(&self, keys: &mut Vec<OrderByExpr>) {
        *keys = std::mem::take(keys).into_iter().flat_map(|key| self.order(key, None)).collect();
    }

    fn window(&self, window: &mut WindowSpec) -> Result<(), Refusal> {
        let has_distance = window.window_frame.as_ref().is_some_and(|frame| {
            let bounds = [Some(&frame.start_bound), frame.end_bound.as_ref()];
            !matches!(frame.units, WindowFrameUnits::Rows)
                && bounds.into_iter().flatten().any(|bound| {
                    matches!(
                        bound,
                        WindowFrameBound::Preceding(Some(_)) | WindowFrameBound::Following(Some(_))
                    )
                })
        });
        if has_distance && window.order_by.iter().any(|key| self.tests_null(key)) {
            return Err(Refusal::unsupported(
                "MariaDB and PostgreSQL order NULL differently, and a window with a distance in RANGE has only one \
                 order; use ROWS, or compute it in the client",
            ));
        }
        self.orders(&mut window.order_by);
        Ok(())
    }

    fn expr(&self, expr: &mut Expr) -> Result<(), Refusal> {
        if self.to == Dialect::MariaDb
            && let Some(text) = constant_of_bytes(expr)
        {
            *expr = value(SqlValue::HexStringLiteral(hex_of(text)?));
            return Ok(());
        }
        if self.to == Dialect::MariaDb {
            refuse_compared_document(expr)?;
            if let Some(constant) = constant_of_type(expr) {
                *expr = constant;
                return Ok(());
            }
        }
        if let (Dialect::PostgreSql, Expr::Prefixed { .. }) = (self.to, &*expr) {
            self.bytes(expr);
            return Ok(());
        }
        match (self.to, &mut *expr) {
            (_, Expr::Function(function)) => self.function(function),
            (Dialect::MariaDb, _) => to_mariadb(expr),
            (Dialect::PostgreSql, _) => to_postgresql(expr),
        }
    }

    fn function(&self, function: &mut Function) -> Result<(), Refusal> {
        if self.to == Dialect::MariaDb && function.filter.is_some() {
            return Err(Refusal::unsupported("MariaDB has no FILTER; use CASE"));
        }
        if let Some(WindowType::WindowSpec(window)) = &mut function.over {
            self.window(window)?;
        }
        if let FunctionArguments::List(list) = &mut function.args {
            for clause in &mut list.clauses {
                if let FunctionArgumentClause::OrderBy(keys) = clause {
                    self.orders(keys);
                }
            }
        }
        let name = table_name(&function.name);
        if self.to == Dialect::PostgreSql && matches!(&*name, "concat" | "concat_ws") {
            texts_of_concat(function)?;
        }
        if let Some(other) = other_function(&name, self.to) {
            function.name = ObjectName(vec![ObjectNamePart::Identifier(Ident::new(other))]);
        }
        Ok(())
    }
}

/// Operators and casts of PostgreSQL, for MariaDB.
fn to_mariadb(expr: &mut Expr) -> Result<(), Refusal> {
    match expr {
        Expr::Collate { expr: text, collation } if is_bytewise(collation) => {
            *expr = typed::bytewise((**text).clone(), Dialect::MariaDb);
        }
        Expr::Cast { kind, data_type, .. } => {
            *kind = CastKind::Cast;
            *data_type = for_mariadb(data_type)?;
        }
        Expr::BinaryOp { left, op: BinaryOperator::StringConcat, right } => {
            *expr = call("concat", vec![(**left).clone(), (**right).clone()]);
        }
        Expr::BinaryOp { op: BinaryOperator::Divide, .. } => {
            return Err(Refusal::unsupported(
                "division of integers differs between PostgreSQL and MariaDB; compute it in the client",
            ));
        }
        Expr::ILike { .. } | Expr::SimilarTo { .. } => {
            return Err(Refusal::unsupported(
                "MariaDB has no ILIKE or SIMILAR TO; use lower(…) LIKE",
            ));
        }
        _ => {}
    }
    Ok(())
}

/// Operators and casts of MariaDB, for PostgreSQL.
fn to_postgresql(expr: &mut Expr) -> Result<(), Refusal> {
    match expr {
        Expr::BinaryOp {
            left,
            op:
                BinaryOperator::Plus
                | BinaryOperator::Minus
                | BinaryOperator::Multiply
                | BinaryOperator::Modulo
                | BinaryOperator::BitwiseAnd
                | BinaryOperator::BitwiseOr,
            right,
        } => {
            for side in [left, right] {
                if let Some(number) = typed::constant_number(side) {
                    **side = number;
                }
            }
        }
        Expr::Cast { data_type, .. } => *data_type = for_postgresql(data_type),
        Expr::BinaryOp { op: op @ BinaryOperator::StringConcat, .. } => *op = BinaryOperator::Or,
        Expr::BinaryOp { left, op: BinaryOperator::Spaceship, right } => {
            *expr = Expr::IsNotDistinctFrom(left.clone(), right.clone());
        }
        Expr::BinaryOp { op: BinaryOperator::MyIntegerDivide, left, right } => {
            *expr = call("div", vec![(**left).clone(), (**right).clone()]);
        }
        Expr::BinaryOp { op: BinaryOperator::Divide, left, right: _ } => {
            // In MariaDB the quotient of integers is not an integer.
            **left = cast((**left).clone(), DataType::Numeric(ExactNumberInfo::None));
        }
        Expr::RLike { .. } => {
            return Err(Refusal::unsupported("PostgreSQL has no RLIKE; use LIKE"));
        }
        _ => {}
    }
    Ok(())
}

/// A clause of PostgreSQL that MariaDB does not have.
fn unknown_to_mariadb(select: &Select) -> Option<&'static str> {
    let is_lateral = |table: &TableFactor| {
        matches!(
            table,
            TableFactor::Derived { lateral: true, .. }
                | TableFactor::Function { lateral: true, .. }
        )
    };
    let is_full = |join: &Join| matches!(join.join_operator, JoinOperator::FullOuter(_));
    let has = |table: &TableWithJoins, is_one: &dyn Fn(&TableFactor) -> bool| {
        is_one(&table.relation) || table.joins.iter().any(|join| is_one(&join.relation))
    };
    let is_grouping_set =
        |expr: &Expr| matches!(expr, Expr::Rollup(_) | Expr::Cube(_) | Expr::GroupingSets(_));
    if matches!(select.distinct, Some(Distinct::On(_))) {
        Some("DISTINCT ON")
    } else if select.from.iter().any(|table| has(table, &is_lateral)) {
        Some("LATERAL")
    } else if select.from.iter().any(|table| table.joins.iter().any(is_full)) {
        Some("FULL JOIN")
    } else if matches!(&select.group_by, GroupByExpr::Expressions(by, _) if by.iter().any(is_grouping_set))
    {
        Some("ROLLUP, CUBE and GROUPING SETS as PostgreSQL has them")
    } else {
        None
    }
}

/// PostgreSQL's `concat` takes values of any type, and writes bytes and booleans in its own syntax.
fn texts_of_concat(function: &mut Function) -> Result<(), Refusal> {
    let FunctionArguments::List(list) = &mut function.args else { return Ok(()) };
    for arg in &mut list.args {
        let FunctionArg::Unnamed(FunctionArgExpr::Expr(arg)) = arg else { continue };
        if typed::constant_bytes(arg).is_some() {
            return Err(typed::bytes_in_text());
        }
        if let Expr::Value(ValueWithSpan { value: SqlValue::Boolean(is), .. }) = arg {
            *arg = value(SqlValue::Number(u8::from(*is).to_string(), false));
        }
    }
    Ok(())
}

/// Whether a collation of PostgreSQL compares texts byte by byte.
fn is_bytewise(collation: &ObjectName) -> bool {
    let last = collation.0.last().and_then(|part| part.as_ident());
    let names = ["C", "POSIX", "C.utf8", "C.UTF-8", "pg_c_utf8", "ucs_basic"];
    last.is_some_and(|name| names.contains(&name.value.as_str()))
}

/// The type and the text of `'…'::type`.
fn typed_text(expr: &Expr) -> Option<(String, &str)> {
    let Expr::Cast { expr, data_type, kind, .. } = expr else { return None };
    if !matches!(kind, CastKind::Cast | CastKind::DoubleColon) {
        return None;
    }
    let Expr::Value(constant) = &**expr else { return None };
    let (SqlValue::SingleQuotedString(text) | SqlValue::EscapedStringLiteral(text)) =
        &constant.value
    else {
        return None;
    };
    Some((data_type.to_string().to_uppercase(), text))
}

/// A constant of PostgreSQL's types `uuid`, `time` and `jsonb` for MariaDB, which has no such casts;
/// none for other constants, and for texts that MariaDB would read otherwise.
fn constant_of_type(expr: &Expr) -> Option<Expr> {
    let (name, text) = typed_text(expr)?;
    let text = text.trim();
    match &*name {
        "UUID" => {
            let digits: String = text.chars().filter(|c| *c != '-').collect();
            let is_uuid = digits.len() == 32 && digits.bytes().all(|b| b.is_ascii_hexdigit());
            if !is_uuid {
                return None;
            }
            let digits = digits.to_ascii_lowercase();
            let parts = [0..8, 8..12, 12..16, 16..20, 20..32].map(|part| digits.get(part));
            let parts: Option<Vec<&str>> = parts.into_iter().collect();
            Some(value(SqlValue::SingleQuotedString(parts?.join("-"))))
        }
        "TIME" | "TIME WITHOUT TIME ZONE" => {
            let parts: Vec<&str> = text.split(':').collect();
            let is_number =
                |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
            let (whole, seconds) = match parts.as_slice() {
                [hours, minutes] => ([*hours, *minutes], "00"),
                [hours, minutes, seconds] => ([*hours, *minutes], *seconds),
                _ => return None,
            };
            let (second, fraction) = seconds.split_once('.').unwrap_or((seconds, "0"));
            let is_time =
                whole.into_iter().chain([second]).all(|part| is_number(part) && part.len() <= 2);
            if !is_time || !is_number(fraction) || fraction.len() > 6 {
                return None;
            }
            let text = format!("{}:{}:{seconds}", whole[0], whole[1]);
            let data_type = DataType::Time(Some(6), sqlparser::ast::TimezoneInfo::None);
            Some(cast(value(SqlValue::SingleQuotedString(text)), data_type))
        }
        "JSON" | "JSONB" => Some(value(SqlValue::SingleQuotedString(text.to_owned()))),
        _ => None,
    }
}

/// Refuses to compare with a constant of `jsonb`: MariaDB would compare texts.
fn refuse_compared_document(expr: &Expr) -> Result<(), Refusal> {
    let Expr::BinaryOp { left, right, .. } = expr else { return Ok(()) };
    let is_document =
        |side: &Expr| typed_text(side).is_some_and(|(name, _)| matches!(&*name, "JSON" | "JSONB"));
    if is_document(left) || is_document(right) {
        return Err(Refusal::unsupported(
            "MariaDB compares documents as texts; compare them in the client",
        ));
    }
    Ok(())
}

/// Adds an explicit escape character to a pattern that has none. A source without escapes in
/// constants has none in patterns either, but every client expects a backslash.
fn escape_pattern(expr: &mut Expr) {
    let Expr::Like { pattern, escape_char, .. } = expr else { return };
    if let Some(own) = escape_char {
        // PostgreSQL's way to say that there is no such character, as there is none without a clause.
        let is_none = matches!(&**own, Expr::Value(ValueWithSpan { value: SqlValue::SingleQuotedString(text), .. }) if text.is_empty());
        if is_none {
            *escape_char = None;
        }
        return;
    }
    let is_plain = match &**pattern {
        Expr::Value(constant) => match &constant.value {
            SqlValue::SingleQuotedString(text)
            | SqlValue::DoubleQuotedString(text)
            | SqlValue::NationalStringLiteral(text)
            | SqlValue::EscapedStringLiteral(text) => !text.contains('\\'),
            _ => false,
        },
        _ => false,
    };
    if !is_plain {
        *escape_char = Some(Box::new(value(SqlValue::SingleQuotedString("\\".into()))));
    }
}

/// The text of `'…'::bytea`.
fn constant_of_bytes(expr: &Expr) -> Option<&str> {
    let Expr::Cast { expr, data_type: DataType::Bytea, .. } = expr else { return None };
    let Expr::Value(constant) = &**expr else { return None };
    match &constant.value {
        SqlValue::SingleQuotedString(text) | SqlValue::EscapedStringLiteral(text) => Some(text),
        _ => None,
    }
}

/// The bytes of a text that is read as `bytea`, in hexadecimal digits.
pub(super) fn hex_of(text: &str) -> Result<String, Refusal> {
    let wrong =
        || Refusal { message: "invalid input syntax for type bytea".into(), sqlstate: "22P02" };
    if let Some(digits) = text.strip_prefix("\\x") {
        let is_hex = digits.len() % 2 == 0 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        return is_hex.then(|| digits.to_owned()).ok_or_else(wrong);
    }
    let mut bytes = text.bytes();
    let mut hex = String::new();
    while let Some(byte) = bytes.next() {
        let byte = match byte {
            b'\\' => match bytes.next().ok_or_else(wrong)? {
                b'\\' => b'\\',
                first @ b'0'..=b'3' => {
                    let mut octal = first - b'0';
                    for _ in 0..2 {
                        let digit = bytes.next().filter(|b| (b'0'..=b'7').contains(b));
                        octal = octal << 3 | (digit.ok_or_else(wrong)? - b'0');
                    }
                    octal
                }
                _ => return Err(wrong()),
            },
            byte => byte,
        };
        hex.push_str(&format!("{byte:02x}"));
    }
    Ok(hex)
}

/// The other dialect's name of a function.
fn other_function(name: &str, to: Dialect) -> Option<&'static str> {
    const PAIRS: [(&str, &str); 6] = [
        ("random", "rand"),
        ("coalesce", "ifnull"),
        ("octet_length", "lengthb"),
        ("char_length", "character_length"),
        ("substr", "mid"),
        ("clock_timestamp", "sysdate"),
    ];
    let mut pairs = PAIRS.iter();
    match to {
        Dialect::PostgreSql => {
            pairs.find(|(_, maria)| *maria == name).map(|(postgres, _)| *postgres)
        }
        Dialect::MariaDb => pairs
            .find(|(postgres, _)| *postgres == name && *postgres != "coalesce")
            .map(|(_, maria)| *maria),
    }
}

fn for_mariadb(data_type: &DataType) -> Result<DataType, Refusal> {
    let text = data_type.to_string().to_uppercase();
    let bare = text.split('(').next().unwrap_or_default().trim();
    Ok(match bare {
        "INT" | "INTEGER" | "INT4" | "INT8" | "INT2" | "BIGINT" | "SMALLINT" => DataType::Signed,
        "TEXT" | "VARCHAR" | "CHARACTER VARYING" | "BPCHAR" | "CHAR" | "CHARACTER" => {
            DataType::Char(None)
        }
        "NUMERIC" | "DECIMAL" => match data_type {
            DataType::Numeric(info) | DataType::Decimal(info) if *info != ExactNumberInfo::None => {
                DataType::Decimal(*info)
            }
            _ => DataType::Decimal(ExactNumberInfo::PrecisionAndScale(65, 20)),
        },
        "REAL" | "DOUBLE PRECISION" | "FLOAT8" | "FLOAT4" | "FLOAT" => {
            DataType::Double(ExactNumberInfo::None)
        }
        "BYTEA" => DataType::Binary(None),
        "DATE" => DataType::Date,
        "TIMESTAMP" | "TIMESTAMP WITHOUT TIME ZONE" => DataType::Datetime(Some(6)),
        _ => {
            return Err(Refusal::unsupported(format!(
                "MariaDB has no cast to {text}; cast in the client"
            )));
        }
    })
}

fn for_postgresql(data_type: &DataType) -> DataType {
    match data_type {
        DataType::Signed | DataType::SignedInteger => DataType::BigInt(None),
        DataType::Unsigned | DataType::UnsignedInteger => DataType::Numeric(ExactNumberInfo::None),
        DataType::Char(None) => DataType::Text,
        DataType::Datetime(precision) => {
            DataType::Timestamp(*precision, sqlparser::ast::TimezoneInfo::None)
        }
        DataType::Binary(_) => DataType::Bytea,
        DataType::Double(_) => DataType::DoublePrecision,
        other => other.clone(),
    }
}

/// The SQL of a statement, with the quotes around names and the lock clauses of `to`.
#[must_use]
pub fn render(statement: &Statement, from: Dialect, to: Dialect) -> String {
    let mut statement = statement.clone();
    let mut lock = "";
    if to == Dialect::MariaDb
        && let Statement::Query(query) = &mut statement
        && query.locks.iter().any(|l| l.lock_type == LockType::Share)
    {
        query.locks.clear();
        lock = " LOCK IN SHARE MODE";
    }
    // This visitor returns no error.
    let has_labels = matches!(statement, Statement::CreateType { .. });
    let reserved: &[&str] = match (from, to) {
        (Dialect::PostgreSql, Dialect::MariaDb) => RESERVED_BY_MARIADB,
        (Dialect::MariaDb, Dialect::PostgreSql) => RESERVED_BY_POSTGRESQL,
        _ => &[],
    };
    let mut quoter = Quoter { quote: quote_of(from), has_labels, reserved, of_function: 0 };
    let _ = walk_mut(&mut statement, &mut quoter);
    let mut text = statement.to_string();
    text.push_str(lock);
    if from == to { text } else { requote(&text, from, to) }
}

/// Doubles the quotes in constants and names. The parser removes the second of two quotes when it
/// reads a constant, and writes a quote next to another one or after a backslash unchanged, so that
/// the author of the text could end the constant with it. Names get this quote character: MySQL
/// clients may quote column aliases like strings.
struct Quoter {
    quote: char,
    /// True if names in single quotes are the labels of an enumeration.
    has_labels: bool,
    /// Words that are no names without quotes at the source.
    reserved: &'static [&'static str],
    /// How many of the next names are those of a function, which has no quotes.
    of_function: usize,
}

/// Words that MariaDB or MySQL reserve and PostgreSQL does not, except for types, which the
/// statements of both have as words.
const RESERVED_BY_MARIADB: &[&str] = &[
    "accessible",
    "before",
    "by",
    "call",
    "cascade",
    "change",
    "condition",
    "continue",
    "convert",
    "cume_dist",
    "cursor",
    "database",
    "databases",
    "day_hour",
    "day_microsecond",
    "day_minute",
    "day_second",
    "delayed",
    "delete",
    "dense_rank",
    "describe",
    "deterministic",
    "distinctrow",
    "div",
    "drop",
    "each",
    "elseif",
    "empty",
    "enclosed",
    "escaped",
    "exit",
    "explain",
    "first_value",
    "force",
    "fulltext",
    "function",
    "general",
    "groups",
    "high_priority",
    "hour_microsecond",
    "hour_minute",
    "hour_second",
    "if",
    "ignore",
    "index",
    "infile",
    "inout",
    "insert",
    "iterate",
    "key",
    "keys",
    "kill",
    "lag",
    "last_value",
    "lead",
    "leave",
    "linear",
    "lines",
    "load",
    "lock",
    "loop",
    "low_priority",
    "match",
    "maxvalue",
    "minute_microsecond",
    "minute_second",
    "mod",
    "modifies",
    "nth_value",
    "ntile",
    "of",
    "optimize",
    "optionally",
    "out",
    "outfile",
    "over",
    "partition",
    "percent_rank",
    "procedure",
    "purge",
    "range",
    "rank",
    "read",
    "reads",
    "read_write",
    "recursive",
    "regexp",
    "release",
    "rename",
    "repeat",
    "replace",
    "require",
    "resignal",
    "restrict",
    "return",
    "revoke",
    "rlike",
    "row",
    "row_number",
    "rows",
    "schema",
    "schemas",
    "second_microsecond",
    "sensitive",
    "separator",
    "set",
    "show",
    "signal",
    "slow",
    "spatial",
    "specific",
    "sql",
    "sqlexception",
    "sqlstate",
    "sqlwarning",
    "ssl",
    "starting",
    "straight_join",
    "system",
    "terminated",
    "trigger",
    "undo",
    "unlock",
    "update",
    "usage",
    "use",
    "utc_date",
    "utc_time",
    "utc_timestamp",
    "while",
    "write",
    "xor",
    "year_month",
];

/// Words that PostgreSQL reserves and MySQL does not.
const RESERVED_BY_POSTGRESQL: &[&str] = &[
    "analyse",
    "any",
    "array",
    "asymmetric",
    "authorization",
    "collation",
    "concurrently",
    "deferrable",
    "do",
    "end",
    "freeze",
    "ilike",
    "initially",
    "isnull",
    "notnull",
    "offset",
    "only",
    "overlaps",
    "placing",
    "session_user",
    "similar",
    "some",
    "symmetric",
    "tablesample",
    "user",
    "variadic",
    "verbose",
];

impl VisitorMut for Quoter {
    type Break = Refusal;
    fn pre_visit_expr(&mut self, expr: &mut Expr) -> Flow {
        // Its name is visited next.
        if let Expr::Function(function) = expr {
            self.of_function = function.name.0.len();
        }
        ControlFlow::Continue(())
    }
    fn pre_visit_ident(&mut self, name: &mut Ident) -> Flow {
        if self.of_function > 0 {
            self.of_function -= 1;
        } else if name.quote_style.is_none() {
            let is_reserved = |word: &&&str| {
                word.len() == name.value.len() && word.eq_ignore_ascii_case(&name.value)
            };
            if let Some(word) = self.reserved.iter().find(is_reserved) {
                *name = Ident::with_quote(self.quote, *word);
            }
            return ControlFlow::Continue(());
        }
        if let Some(before) = name.quote_style {
            let quote = if self.has_labels && before == '\'' { before } else { self.quote };
            name.quote_style = Some(quote);
            name.value = name.value.replace(quote, &format!("{quote}{quote}"));
        }
        ControlFlow::Continue(())
    }
    fn pre_visit_value(&mut self, found: &mut ValueWithSpan) -> Flow {
        let is_digit = |text: &str| text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let text = match &found.value {
            SqlValue::SingleQuotedString(text)
            | SqlValue::DoubleQuotedString(text)
            | SqlValue::NationalStringLiteral(text)
            | SqlValue::UnicodeStringLiteral(text)
            | SqlValue::EscapedStringLiteral(text) => text,
            SqlValue::HexStringLiteral(text) | SqlValue::SingleQuotedByteStringLiteral(text)
                if !is_digit(text) =>
            {
                text
            }
            _ => return ControlFlow::Continue(()),
        };
        found.value = SqlValue::SingleQuotedString(text.replace('\'', "''"));
        ControlFlow::Continue(())
    }
}

/// The quote character of names.
fn quote_of(dialect: Dialect) -> char {
    if dialect == Dialect::PostgreSql { '"' } else { '`' }
}

/// Changes the quotes of names; constants in single quotes stay unchanged.
fn requote(text: &str, from: Dialect, to: Dialect) -> String {
    let (old, new) = (quote_of(from), quote_of(to));
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    let mut inside: Option<char> = None;
    while let Some(c) = chars.next() {
        match inside {
            Some('\'') => {
                out.push(c);
                if c == '\'' {
                    inside = None;
                }
            }
            Some(_) if c == old => {
                if chars.peek() == Some(&old) {
                    chars.next();
                    out.push(old);
                } else {
                    out.push(new);
                    inside = None;
                }
            }
            Some(_) => {
                out.push(c);
                if c == new {
                    out.push(c);
                }
            }
            None if c == old => {
                out.push(new);
                inside = Some(old);
            }
            None => {
                out.push(c);
                if c == '\'' {
                    inside = Some(c);
                }
            }
        }
    }
    out
}
