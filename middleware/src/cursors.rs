//! Prepared statements and cursors of a session, by the names that its client gives them. A cursor keeps the rows of its query
//! here: they are those of the moment when it was declared.

use std::borrow::Cow;

use orthodrome_geotp::sql::{Answer, Column, Motion, Parsed, Value, Verb};

use super::session::{Reply, Session, SqlError};

/// A cursor.
pub(crate) struct Cursor {
    answer: Answer,
    /// The row where it is, counted from 1; 0 is before the first, and one more than there are is after the last.
    at: usize,
    is_held: bool,
}

impl Cursor {
    pub(crate) fn is_held(&self) -> bool {
        self.is_held
    }

    /// Moves it, and the rows that are fetched so.
    fn go(&mut self, motion: Motion) -> Vec<Vec<Option<Vec<u8>>>> {
        let count = self.answer.rows.len();
        let end = count + 1;
        let row = |at: usize| self.answer.rows.get(at.checked_sub(1)?).cloned();
        let far = |by: i64| usize::try_from(by.unsigned_abs()).unwrap_or(usize::MAX);
        let (at, rows) = match motion {
            Motion::By(0) | Motion::Relative(0) => (self.at, row(self.at).into_iter().collect()),
            Motion::By(by) if by > 0 => {
                let to = self.at.saturating_add(far(by)).min(end);
                let rows: Vec<_> = (self.at + 1..=to).filter_map(row).collect();
                (to, rows)
            }
            Motion::AllForward => (end, (self.at + 1..=count).filter_map(row).collect()),
            Motion::By(by) => {
                let to = self.at.saturating_sub(far(by));
                (to, (to..self.at).rev().filter_map(row).collect())
            }
            Motion::AllBackward => (0, (0..self.at).rev().filter_map(row).collect()),
            Motion::Absolute(place) => {
                let to =
                    if place < 0 { end.saturating_sub(far(place)) } else { far(place).min(end) };
                (to, row(to).into_iter().collect())
            }
            Motion::Relative(by) => {
                let to = if by < 0 {
                    self.at.saturating_sub(far(by))
                } else {
                    self.at.saturating_add(far(by)).min(end)
                };
                (to, row(to).into_iter().collect())
            }
        };
        self.at = at;
        rows
    }
}

impl Session {
    /// Statements in which those that were prepared stand for their names.
    pub(crate) fn with_prepared<'a>(
        &self,
        statements: &'a [(Parsed, Vec<Value>)],
    ) -> Cow<'a, [(Parsed, Vec<Value>)]> {
        let is_it = |(parsed, _): &(Parsed, Vec<Value>)| matches!(parsed.verb, Verb::Execute(..));
        if !statements.iter().any(is_it) {
            return Cow::Borrowed(statements);
        }
        let one = |(parsed, values): &(Parsed, Vec<Value>)| match &parsed.verb {
            Verb::Execute(name, values) => match self.executed(name, values) {
                Ok(found) => found,
                // It may be prepared before in the same text.
                Err(_) => (parsed.clone(), values.clone()),
            },
            _ => (parsed.clone(), values.clone()),
        };
        Cow::Owned(statements.iter().map(one).collect())
    }

    /// A statement that was prepared, with its values.
    pub(crate) fn executed(
        &self,
        name: &str,
        values: &[Value],
    ) -> Result<(Parsed, Vec<Value>), SqlError> {
        let prepared = self.prepared.get(name).ok_or_else(|| {
            let why = format!("prepared statement \"{name}\" does not exist");
            let mut error = SqlError::new("26000", why);
            error.number = 1243;
            error
        })?;
        if prepared.parameters != values.len() {
            return Err(SqlError::new(
                "42601",
                format!(
                    "wrong number of parameters for prepared statement \"{name}\": expected {}, got {}",
                    prepared.parameters,
                    values.len()
                ),
            ));
        }
        Ok((prepared.clone(), values.to_vec()))
    }

    pub(crate) fn prepare(&mut self, name: &str, parsed: &Parsed) -> Result<Reply, SqlError> {
        let is_new = self.prepared.insert(name.to_owned(), parsed.clone()).is_none();
        if !is_new && self.client == orthodrome_geotp::sql::Dialect::PostgreSql {
            let why = format!("prepared statement \"{name}\" already exists");
            return Err(SqlError::new("42P05", why));
        }
        Ok(Reply::done("PREPARE"))
    }

    pub(crate) async fn declare(
        &mut self,
        name: &str,
        query: &Parsed,
        is_held: bool,
    ) -> Result<Reply, SqlError> {
        if !self.in_block && !is_held {
            let why = "DECLARE CURSOR can only be used in transaction blocks";
            return Err(SqlError::new("25P01", why));
        }
        if self.cursors.contains_key(name) {
            return Err(SqlError::new("42P03", format!("cursor \"{name}\" already exists")));
        }
        let answer = match &query.verb {
            Verb::Data(_) => {
                let batch = [(query.clone(), Vec::new())];
                match Box::pin(self.data(&batch, false, false)).await?.pop() {
                    Some(Reply::Rows(answer, _)) => answer,
                    Some(Reply::Error(error)) => return Err(error),
                    Some(Reply::Done { .. }) | None => Answer::default(),
                }
            }
            _ => Box::pin(self.elsewhere(query, &[])).await?,
        };
        self.cursors.insert(name.to_owned(), Cursor { answer, at: 0, is_held });
        Ok(Reply::done("DECLARE CURSOR"))
    }

    pub(crate) fn fetch(
        &mut self,
        name: &str,
        motion: Motion,
        is_move: bool,
    ) -> Result<Reply, SqlError> {
        let cursor = self.cursors.get_mut(name).ok_or_else(|| no_cursor(name))?;
        let rows = cursor.go(motion);
        if is_move {
            return Ok(Reply::done(&format!("MOVE {}", rows.len())));
        }
        let (columns, affected) = (cursor.answer.columns.clone(), rows.len() as u64);
        Ok(Reply::Rows(Answer { columns, rows, affected, ..Answer::default() }, "FETCH"))
    }

    pub(crate) fn close(&mut self, name: Option<&str>) -> Result<Reply, SqlError> {
        match name {
            None => {
                self.cursors.clear();
                Ok(Reply::done("CLOSE CURSOR ALL"))
            }
            Some(name) => {
                self.cursors.remove(name).ok_or_else(|| no_cursor(name))?;
                Ok(Reply::done("CLOSE CURSOR"))
            }
        }
    }

    /// The columns of a cursor.
    pub(crate) fn columns_of_cursor(&self, name: &str) -> Option<Vec<Column>> {
        self.cursors.get(name).map(|cursor| cursor.answer.columns.clone())
    }
}

fn no_cursor(name: &str) -> SqlError {
    SqlError::new("34000", format!("cursor \"{name}\" does not exist"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_goes_where_postgresql_s_does() {
        let rows = (1..=3).map(|n: u8| vec![Some(vec![n])]).collect();
        let answer = Answer { rows, ..Answer::default() };
        let mut cursor = Cursor { answer, at: 0, is_held: false };
        for (motion, rows) in [
            (Motion::By(2), vec![1, 2]),
            (Motion::By(-1), vec![1]),
            (Motion::By(0), vec![1]),
            (Motion::AllForward, vec![2, 3]),
            (Motion::By(1), vec![]),
            (Motion::By(-2), vec![3, 2]),
            (Motion::Absolute(-1), vec![3]),
            (Motion::AllBackward, vec![2, 1]),
            (Motion::Relative(2), vec![2]),
            (Motion::Absolute(9), vec![]),
        ] {
            let found: Vec<u8> =
                cursor.go(motion).into_iter().flatten().flatten().flatten().collect();
            assert_eq!(found, rows, "{motion:?}");
        }
    }
}
