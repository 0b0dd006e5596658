//! Merges the answers of several sources: sorts, groups, counts and limits rows.

use std::cmp::Ordering;
use std::fmt;

use orthodrome_core::ordered::{OrdMap, OrdSet};

use super::Refusal;
use super::catalog::Dialect;
use super::decimal::Decimal;
use super::value::{Answer, Cell, Column, Kind};

/// The way in which answers are merged.
#[derive(Clone, PartialEq, Debug)]
pub enum Merge {
    /// There is only one answer.
    Only,
    /// Rows are concatenated; counts of changed rows are added up.
    Concatenate,
    /// The same for rows of an INSERT: for each answer, the numbers of its rows in the statement. The
    /// rows that it returns come in this order, which PostgreSQL and MariaDB keep and ORMs rely on.
    InOrder(Vec<Vec<usize>>),
    /// All sources did the same; the first answer is used.
    Same,
    /// Rows of a SELECT.
    Rows(RowMerge),
}

impl fmt::Display for Merge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Only => f.write_str("no merge"),
            Self::Concatenate | Self::InOrder(_) => f.write_str("each has its own rows"),
            Self::Same => f.write_str("all do the same"),
            Self::Rows(rows) => {
                let mut steps = vec!["merged"];
                if rows.is_aggregated {
                    steps.push(if rows.groups.is_empty() { "aggregated" } else { "grouped" });
                }
                if rows.is_distinct {
                    steps.push("made distinct");
                }
                if !rows.order.is_empty() {
                    steps.push("sorted");
                }
                if rows.limit.is_some() || rows.offset > 0 {
                    steps.push("cut");
                }
                f.write_str(&steps.join(", "))
            }
        }
    }
}

/// The column of a sort key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum At {
    /// The column with this number.
    Column(usize),
    /// The hidden column with this number.
    Hidden(usize),
    /// The column with this name, in lower case.
    Named(String),
}

/// One key of a sort order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SortKey {
    /// Its column.
    pub at: At,
    /// True if the largest value comes first.
    pub is_descending: bool,
    /// True if NULLs come first.
    pub nulls_first: bool,
}

/// How a column of aggregated rows is merged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Op {
    /// The value is equal in the whole group.
    Group,
    /// The values are added up; NULL adds nothing.
    Sum,
    /// The minimum.
    Min,
    /// The maximum.
    Max,
    /// The values are added up and divided by the sum of the column `count`.
    Average {
        /// The column with the number of values.
        count: usize,
    },
}

/// How rows of a SELECT are merged.
#[derive(Clone, PartialEq, Debug)]
pub struct RowMerge {
    /// The sort order.
    pub order: Vec<SortKey>,
    /// The columns that identify a group.
    pub groups: Vec<usize>,
    /// How each column is merged, if rows are aggregated.
    pub ops: Vec<Op>,
    /// True if rows are aggregated.
    pub is_aggregated: bool,
    /// True if duplicate rows are removed.
    pub is_distinct: bool,
    /// Maximum number of rows.
    pub limit: Option<usize>,
    /// Number of rows that are skipped.
    pub offset: usize,
    /// Number of columns at the end that the client does not get.
    pub hidden: usize,
    /// The client's dialect, which decides the number of digits of averages.
    pub client: Dialect,
}

/// Merges answers, which are in the order of a plan's parts.
///
/// # Errors
/// The sources disagree about the type of a result, or a sum is too large.
pub fn merge(how: &Merge, mut answers: Vec<Answer>) -> Result<Answer, Refusal> {
    match how {
        Merge::Only => Ok(answers.pop().unwrap_or_default()),
        Merge::Same => {
            if let [first, rest @ ..] = answers.as_slice()
                && let Some(other) = rest.iter().find(|a| a.affected != first.affected)
            {
                return Err(Refusal::data(format!(
                    "copies of a broadcast table differ: {} rows changed at one source, {} at another; compare the \
                     copies and mend them",
                    first.affected, other.affected,
                )));
            }
            answers.truncate(1);
            Ok(answers.pop().unwrap_or_default())
        }
        Merge::InOrder(numbers) => {
            // A conflict may leave rows out; nobody knows which then.
            let is_whole = answers.len() == numbers.len()
                && answers.iter().zip(numbers).all(|(answer, own)| answer.rows.len() == own.len());
            let mut whole = merge(&Merge::Concatenate, answers)?;
            if is_whole {
                let mut rows: Vec<(usize, Vec<Cell>)> =
                    numbers.iter().flatten().copied().zip(whole.rows).collect();
                rows.sort_by_key(|(number, _)| *number);
                whole.rows = rows.into_iter().map(|(_, row)| row).collect();
            }
            Ok(whole)
        }
        Merge::Concatenate => {
            let columns = unify(&mut answers)?;
            let mut all = answers.drain(..);
            let mut whole = all.next().unwrap_or_default();
            whole.columns = columns;
            for answer in all {
                whole.affected += answer.affected;
                whole.unchanged += answer.unchanged;
                whole.rows.extend(answer.rows);
                if whole.last_insert_id == 0 {
                    whole.last_insert_id = answer.last_insert_id;
                }
            }
            Ok(whole)
        }
        Merge::Rows(rows) => rows.merge(answers),
    }
}

impl RowMerge {
    fn merge(&self, mut answers: Vec<Answer>) -> Result<Answer, Refusal> {
        let unordered = unordered(&answers);
        let columns = unify(&mut answers)?;
        let order = self.resolved(&columns)?;
        self.check_comparable(&order, &columns, &unordered)?;
        if !self.is_aggregated {
            check_sorted(&answers, &columns, &order)?;
        }
        let mut rows: Vec<Vec<Cell>> = answers.into_iter().flat_map(|a| a.rows).collect();
        let mut columns = columns;
        if self.is_aggregated {
            rows = self.group(rows, &mut columns)?;
        }
        rows.sort_by(|left, right| compare_rows(left, right, &columns, &order));
        let visible = columns.len().saturating_sub(self.hidden);
        columns.truncate(visible);
        rows.iter_mut().for_each(|row| row.truncate(visible));
        if self.is_distinct {
            let mut seen: OrdSet<Vec<Cell>> = OrdSet::new();
            rows.retain(|row| {
                let key = row
                    .iter()
                    .zip(&columns)
                    .map(|(cell, column)| canonical(cell, column.kind))
                    .collect();
                seen.insert(key)
            });
        }
        let rows: Vec<_> =
            rows.into_iter().skip(self.offset).take(self.limit.unwrap_or(usize::MAX)).collect();
        let affected = rows.len() as u64;
        Ok(Answer { columns, rows, affected, ..Answer::default() })
    }

    /// Refuses to compare values whose order is not that of their texts.
    fn check_comparable(
        &self,
        order: &[(usize, &SortKey)],
        columns: &[Column],
        unordered: &OrdSet<usize>,
    ) -> Result<(), Refusal> {
        let compared = self.ops.iter().enumerate();
        let compared = compared.filter(|(_, op)| matches!(op, Op::Min | Op::Max)).map(|(at, _)| at);
        let mut compared = compared.chain(order.iter().map(|(at, _)| *at));
        let Some(at) = compared.find(|at| unordered.contains(at)) else { return Ok(()) };
        let name = columns.get(at).map_or("", |column| column.name.as_str());
        Err(Refusal::unsupported(format!(
            "column \"{name}\" has a type whose order the proxy does not know (an enumeration, an array, an interval or \
             such), so it cannot find the first or the largest of several sources; restrict the statement to keys of \
             one source, or order by a number or a text: CAST(… AS text)"
        )))
    }

    /// The sort order with column numbers.
    fn resolved(&self, columns: &[Column]) -> Result<Vec<(usize, &SortKey)>, Refusal> {
        let mut found = Vec::new();
        for key in &self.order {
            let index = match &key.at {
                At::Column(index) => Some(*index),
                At::Hidden(number) => (columns.len() + number).checked_sub(self.hidden),
                At::Named(name) => columns.iter().position(|c| c.name.to_lowercase() == *name),
            };
            let index = index.filter(|i| *i < columns.len());
            found.push((
                index.ok_or_else(|| {
                    Refusal::syntax("ORDER BY names a column that the result does not have")
                })?,
                key,
            ));
        }
        Ok(found)
    }

    fn group(
        &self,
        rows: Vec<Vec<Cell>>,
        columns: &mut [Column],
    ) -> Result<Vec<Vec<Cell>>, Refusal> {
        let mut groups: OrdMap<Vec<Cell>, Vec<Cell>> = OrdMap::new();
        for row in rows {
            let key = self.groups.iter().map(|&at| {
                let kind = columns.get(at).map_or(Kind::Other, |c| c.kind);
                row.get(at).and_then(|cell| canonical(cell, kind))
            });
            let key: Vec<Cell> = key.collect();
            match groups.get_mut(&key) {
                None => {
                    groups.insert(key, row);
                }
                Some(whole) => {
                    for (index, op) in self.ops.iter().enumerate() {
                        let kind = columns.get(index).map_or(Kind::Other, |c| c.kind);
                        let (Some(into), Some(from)) = (whole.get_mut(index), row.get(index))
                        else {
                            continue;
                        };
                        *into = op.put(into.take(), from.clone(), kind)?;
                    }
                }
            }
        }
        let mut rows: Vec<Vec<Cell>> = groups.into_values().collect();
        for (index, op) in self.ops.iter().enumerate() {
            let Op::Average { count } = *op else { continue };
            let kind = columns.get(index).map_or(Kind::Other, |c| c.kind);
            for row in &mut rows {
                let divided =
                    match (row.get(index).cloned().flatten(), row.get(count).cloned().flatten()) {
                        (Some(sum), Some(count)) => Some(self.average(&sum, &count, kind)?),
                        _ => None,
                    };
                if let Some(cell) = row.get_mut(index) {
                    *cell = divided;
                }
            }
            if let Some(column) = columns.get_mut(index)
                && !column.kind.is_float()
            {
                (column.kind, column.oid) =
                    (Kind::Decimal, if column.oid == 0 { 0 } else { NUMERIC });
            }
        }
        Ok(rows)
    }

    fn average(&self, sum: &[u8], count: &[u8], kind: Kind) -> Result<Vec<u8>, Refusal> {
        let bad = || Refusal {
            message: "an average has too many digits for the proxy; compute it in the client"
                .into(),
            sqlstate: "22003",
        };
        if kind.is_float() {
            let (sum, count) = (float(sum).ok_or_else(bad)?, float(count).ok_or_else(bad)?);
            return Ok(print_float(sum / count).into_bytes());
        }
        let (sum, count) = (decimal(sum).ok_or_else(bad)?, decimal(count).ok_or_else(bad)?);
        let scale = match self.client {
            Dialect::PostgreSql => sum.postgres_scale(count),
            // `div_precision_increment` is 4.
            Dialect::MariaDb => sum.scale() + 4,
        };
        Ok(sum.divide(count, scale).ok_or_else(bad)?.to_string().into_bytes())
    }
}

/// PostgreSQL's type number of `numeric`.
const NUMERIC: u32 = 1700;

/// Types of PostgreSQL that only their sources can order: the texts of enumerations, arrays,
/// intervals and such have another order than the values.
fn is_unordered(column: &Column) -> bool {
    const JSONB: u32 = 3802;
    column.oid == JSONB || (column.kind == Kind::Other && column.oid != 0)
}

/// The columns that several answers have and that cannot be compared here.
fn unordered(answers: &[Answer]) -> OrdSet<usize> {
    if answers.len() < 2 {
        return OrdSet::new();
    }
    let columns = answers.iter().flat_map(|answer| answer.columns.iter().enumerate());
    columns.filter(|(_, column)| is_unordered(column)).map(|(at, _)| at).collect()
}

/// A time without zeros at the end of its fraction, as PostgreSQL writes it. MariaDB writes as many
/// digits as its column has. `2024-01-01 00:00:00.500000+00` is `2024-01-01 00:00:00.5+00`.
#[must_use]
pub fn plain_time(cell: &[u8]) -> Option<Vec<u8>> {
    let point = cell.iter().position(|byte| *byte == b'.')?;
    let (whole, rest) = cell.split_at(point);
    let digits = rest.iter().skip(1).take_while(|byte| byte.is_ascii_digit()).count();
    let (fraction, zone) = rest.split_at(digits + 1);
    let kept = fraction.iter().rposition(|byte| *byte != b'0').filter(|at| *at > 0);
    let fraction = fraction.get(..kept.map_or(0, |at| at + 1)).unwrap_or_default();
    Some([whole, fraction, zone].concat())
}

/// A time without the zone that PostgreSQL writes after it: `2024-01-01 00:00:00+00`.
fn without_zone(cell: &[u8]) -> &[u8] {
    let time = cell.iter().position(|byte| *byte == b' ').unwrap_or(cell.len());
    let zone = cell.iter().skip(time).position(|byte| matches!(byte, b'+' | b'-'));
    zone.and_then(|zone| cell.get(..time + zone)).unwrap_or(cell)
}

/// The columns of all answers, and converts their values to the same form: MariaDB's booleans are
/// numbers, and its times have zeros at the end.
fn unify(answers: &mut [Answer]) -> Result<Vec<Column>, Refusal> {
    let columns = common_columns(answers)?;
    // PostgreSQL's columns have numbers of types, and MariaDB's have none.
    let of_both = |place: usize| {
        let mut oids =
            answers.iter().filter_map(|answer| Some(answer.columns.get(place)?.oid == 0));
        let first = oids.next();
        oids.any(|other| Some(other) != first)
    };
    let is_mixed: Vec<bool> = (0..columns.len()).map(of_both).collect();
    for answer in answers {
        for (place, (column, own)) in columns.iter().zip(&answer.columns).enumerate() {
            let is_time = matches!(own.kind, Kind::Time | Kind::Timestamp | Kind::TimestampTz);
            if is_time && is_mixed.get(place) == Some(&true) {
                let loses_zone = own.kind == Kind::TimestampTz && column.kind == Kind::Timestamp;
                for cell in answer.rows.iter_mut().filter_map(|row| row.get_mut(place)?.as_mut()) {
                    if loses_zone {
                        *cell = without_zone(cell).to_vec();
                    }
                    if let Some(plain) = plain_time(cell) {
                        *cell = plain;
                    }
                }
            }
            if column.kind != Kind::Bool || own.kind == Kind::Bool {
                continue;
            }
            for cell in answer.rows.iter_mut().filter_map(|row| row.get_mut(place)?.as_mut()) {
                *cell = if is_true(cell) { b"t".to_vec() } else { b"f".to_vec() };
            }
        }
    }
    Ok(columns)
}

/// The columns of all answers; different kinds of two sources are widened to a kind that holds
/// both.
fn common_columns(answers: &[Answer]) -> Result<Vec<Column>, Refusal> {
    let mut answers = answers.iter();
    let mut columns = answers.next().map_or_else(Vec::new, |a| a.columns.clone());
    for answer in answers {
        if answer.columns.len() != columns.len() {
            return Err(Refusal::data(
                "the sources returned different columns; compare the table definitions",
            ));
        }
        for (column, other) in columns.iter_mut().zip(&answer.columns) {
            if let Some(typed) = typed_text(column, other) {
                (column.kind, column.oid) = typed;
                continue;
            }
            if column.kind != other.kind {
                column.kind = wider(column.kind, other.kind);
            }
            if column.oid != other.oid {
                column.oid = 0;
            }
        }
    }
    Ok(columns)
}

/// PostgreSQL's type of a column that is text at MariaDB, which has no type of its own for it.
fn typed_text(one: &Column, other: &Column) -> Option<(Kind, u32)> {
    let (typed, plain) = if one.oid == 0 { (other, one) } else { (one, other) };
    let is_it = plain.oid == 0
        && plain.kind == Kind::Text
        && typed.oid != 0
        && matches!(typed.kind, Kind::Json | Kind::Uuid);
    is_it.then_some((typed.kind, typed.oid))
}

fn wider(left: Kind, right: Kind) -> Kind {
    let rank = |kind: Kind| match kind {
        Kind::Bool => 1,
        Kind::Int2 => 2,
        Kind::Int4 => 3,
        Kind::Int8 => 4,
        Kind::Decimal => 5,
        Kind::Float4 => 6,
        Kind::Float8 => 7,
        _ => 0,
    };
    let is_whole = |kind| matches!(kind, Kind::Int2 | Kind::Int4 | Kind::Int8);
    if (left == Kind::Bool && is_whole(right)) || (right == Kind::Bool && is_whole(left)) {
        // PostgreSQL's booleans are numbers at MariaDB.
        return Kind::Bool;
    }
    match (rank(left), rank(right)) {
        (0, _) | (_, 0)
            if matches!(
                (left, right),
                (Kind::Timestamp, Kind::TimestampTz) | (Kind::TimestampTz, Kind::Timestamp)
            ) =>
        {
            Kind::Timestamp
        }
        (0, _) | (_, 0) => Kind::Text,
        (one, other) => {
            if one >= other {
                left
            } else {
                right
            }
        }
    }
}

fn text(cell: &[u8]) -> Option<&str> {
    std::str::from_utf8(cell).ok()
}

fn decimal(cell: &[u8]) -> Option<Decimal> {
    Decimal::parse(text(cell)?)
}

fn float(cell: &[u8]) -> Option<f64> {
    text(cell)?.trim().parse().ok()
}

fn print_float(value: f64) -> String {
    if value.is_infinite() {
        return if value > 0.0 { "Infinity".into() } else { "-Infinity".into() };
    }
    // The shortest text that is parsed as the same number, as PostgreSQL 12 and later print it.
    let plain = value.to_string();
    if plain.len() <= 20 { plain } else { format!("{value:e}") }
}

/// A form that is the same for equal values.
fn canonical(cell: &Cell, kind: Kind) -> Cell {
    let bytes = cell.as_ref()?;
    if kind.is_exact()
        && let Some(text) = text(bytes)
    {
        let trimmed = if text.contains('.') {
            text.trim_end_matches('0').trim_end_matches('.')
        } else {
            text
        };
        let trimmed = if trimmed == "-0" { "0" } else { trimmed };
        return Some(trimmed.as_bytes().to_vec());
    }
    if kind.is_float()
        && let Some(value) = float(bytes)
    {
        return Some(print_float(value).into_bytes());
    }
    if kind == Kind::Bool {
        return Some(if is_true(bytes) { b"t".to_vec() } else { b"f".to_vec() });
    }
    Some(bytes.clone())
}

fn is_true(cell: &[u8]) -> bool {
    !matches!(cell, b"f" | b"0" | b"false" | b"")
}

/// Compares two values of a kind. Text compares byte by byte.
fn compare(left: &[u8], right: &[u8], kind: Kind) -> Ordering {
    if kind.is_exact()
        && let (Some(left), Some(right)) = (decimal(left), decimal(right))
    {
        return left.cmp(&right);
    }
    if (kind.is_exact() || kind.is_float())
        && let (Some(left), Some(right)) = (float(left), float(right))
    {
        // NaN is above all values in PostgreSQL, as in this order.
        return left.total_cmp(&right);
    }
    if kind == Kind::Bool {
        return is_true(left).cmp(&is_true(right));
    }
    left.cmp(right)
}

fn compare_rows(
    left: &[Cell],
    right: &[Cell],
    columns: &[Column],
    order: &[(usize, &SortKey)],
) -> Ordering {
    for (index, key) in order {
        let kind = columns.get(*index).map_or(Kind::Other, |c| c.kind);
        let found = match (
            left.get(*index).and_then(Option::as_ref),
            right.get(*index).and_then(Option::as_ref),
        ) {
            (None, None) => Ordering::Equal,
            (None, Some(_)) => {
                if key.nulls_first {
                    Ordering::Less
                } else {
                    Ordering::Greater
                }
            }
            (Some(_), None) => {
                if key.nulls_first {
                    Ordering::Greater
                } else {
                    Ordering::Less
                }
            }
            (Some(left), Some(right)) => {
                let found = compare(left, right, kind);
                if key.is_descending { found.reverse() } else { found }
            }
        };
        if found != Ordering::Equal {
            return found;
        }
    }
    Ordering::Equal
}

/// Checks that each source sorts as the proxy does; otherwise the first rows of each source would
/// not include the first rows of all.
fn check_sorted(
    answers: &[Answer],
    columns: &[Column],
    order: &[(usize, &SortKey)],
) -> Result<(), Refusal> {
    if order.is_empty() {
        return Ok(());
    }
    for answer in answers {
        for pair in answer.rows.windows(2) {
            if let [one, next] = pair
                && compare_rows(one, next, columns, order) == Ordering::Greater
            {
                return Err(Refusal::unsupported(
                    "a source does not sort this column byte by byte, so the proxy cannot merge the rows of several \
                     sources in order; give the column a binary collation (COLLATE \"C\", utf8mb4_bin) at every source",
                ));
            }
        }
    }
    Ok(())
}

impl Op {
    fn put(self, into: Cell, from: Cell, kind: Kind) -> Result<Cell, Refusal> {
        let (Some(left), Some(right)) = (&into, &from) else { return Ok(into.or(from)) };
        let keep_left = |is: bool| Ok(if is { into.clone() } else { from.clone() });
        match self {
            Self::Group => Ok(into),
            Self::Min => keep_left(compare(left, right, kind) != Ordering::Greater),
            Self::Max => keep_left(compare(left, right, kind) != Ordering::Less),
            Self::Sum | Self::Average { .. } => add(left, right, kind).map(Some),
        }
    }
}

fn add(left: &[u8], right: &[u8], kind: Kind) -> Result<Vec<u8>, Refusal> {
    let bad = || Refusal {
        message: "a sum has too many digits for the proxy; compute it in the client".into(),
        sqlstate: "22003",
    };
    if kind.is_float() {
        let (left, right) = (float(left).ok_or_else(bad)?, float(right).ok_or_else(bad)?);
        return Ok(print_float(left + right).into_bytes());
    }
    let (left, right) = (decimal(left).ok_or_else(bad)?, decimal(right).ok_or_else(bad)?);
    Ok(left.add(right).ok_or_else(bad)?.to_string().into_bytes())
}
