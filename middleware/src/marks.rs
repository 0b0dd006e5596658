//! The savepoints of a branch in SQL, and the locks that a rollback to a savepoint would lose.
//!
//! A rollback to a savepoint at PostgreSQL releases the locks that were taken since the savepoint.
//! But the client knows what it has read in the meantime. So at SERIALIZABLE the driver takes these
//! locks again in the same batch. A row that another transaction has changed in between is newer
//! than the branch's snapshot, and the branch fails with 40001. MariaDB keeps its locks.

use orthodrome_geotp::contract::{Isolation, Mark};
use orthodrome_geotp::sql::plan::Keys;

use super::driver::Statement;

/// The savepoints of a branch, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    all: Vec<Set>,
    locks_again: bool,
}

#[derive(Debug)]
struct Set {
    number: u32,
    /// Statements that take again the locks that were taken since.
    again: Vec<Statement>,
}

/// The statements of a branch with its actions on savepoints.
#[derive(Debug, Default)]
pub(crate) struct Marked {
    /// The actions on savepoints, which come first.
    pub(crate) texts: Vec<String>,
    /// True if it rolls back to a savepoint.
    pub(crate) goes_back: bool,
    /// Number of statements at the beginning that only take locks again.
    pub(crate) again: usize,
    pub(crate) statements: Vec<Statement>,
}

/// Which statement of several failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Failed {
    /// Its place among them.
    pub(crate) number: usize,
    /// True if a query before it failed, which only takes locks.
    pub(crate) in_prelude: bool,
    /// False if the server refused its text, so that it neither locked nor told anything.
    pub(crate) took_locks: bool,
}

impl Marks {
    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// The statements of a branch after these actions on savepoints.
    pub(crate) fn before(
        &mut self,
        begin: Option<Isolation>,
        marks: &[Mark],
        statements: Vec<Statement>,
        is_postgres: bool,
    ) -> Marked {
        if let Some(isolation) = begin {
            self.all.clear();
            self.locks_again = is_postgres && isolation == Isolation::Serializable;
        }
        let mut found = Marked::default();
        for mark in marks {
            match *mark {
                Mark::Set(number) => {
                    found.texts.push(format!("SAVEPOINT orthodrome_{number}"));
                    self.all.push(Set { number, again: Vec::new() });
                }
                Mark::Release(number) => {
                    found.texts.push(format!("RELEASE SAVEPOINT orthodrome_{number}"));
                    let released = self.since(number);
                    if let Some(last) = self.all.last_mut() {
                        last.again.extend(released);
                    }
                }
                Mark::Back(number) => {
                    found.texts.push(format!("ROLLBACK TO SAVEPOINT orthodrome_{number}"));
                    found.goes_back = true;
                    found.statements = self.since(number);
                    self.all.push(Set { number, again: found.statements.clone() });
                }
            }
        }
        found.again = found.statements.len();
        if let (Some(first), Some(next)) = (found.statements.first_mut(), statements.first()) {
            first.settings.clone_from(&next.settings);
        }
        found.statements.extend(statements);
        found
    }

    /// Notes the locks of statements that ran since the last savepoint. `failed` is the one of them
    /// that failed, if one did. Nothing after it ran.
    pub(crate) fn note(&mut self, statements: &[Statement], failed: Option<Failed>) {
        let Some(last) = self.all.last_mut().filter(|_| self.locks_again) else { return };
        let ran = failed.map_or(statements.len(), |failed| failed.number);
        let ended = failed.zip(statements.get(ran));
        let ended = ended.filter(|(failed, _)| failed.took_locks).map(|(failed, statement)| {
            let mut statement = statement.clone();
            // It would fail again.
            statement.text.clear();
            if failed.in_prelude {
                statement.prelude.clear();
            }
            statement
        });
        for again in statements.iter().take(ran).chain(&ended).filter_map(locking_again) {
            if !last.again.contains(&again) {
                last.again.push(again);
            }
        }
    }

    /// Removes a savepoint and those after it, and returns the statements that take again the locks
    /// that were taken since.
    fn since(&mut self, number: u32) -> Vec<Statement> {
        let place = self.all.iter().position(|set| set.number == number);
        let since = self.all.split_off(place.unwrap_or(self.all.len()));
        since.into_iter().flat_map(|set| set.again).collect()
    }
}

/// A statement that takes the same locks as this one, if this one takes some.
fn locking_again(statement: &Statement) -> Option<Statement> {
    let text = statement.text.trim_start();
    let is_query = text.starts_with("SELECT") || text.starts_with('(');
    let Keys { sought, inserted, .. } = statement.keys.clone();
    let mut records = sought;
    records.extend(inserted);
    // Rows that are named by their keys are locked that way.
    let text = if is_query && records.is_empty() {
        format!("SELECT count(*) FROM ({text}) AS orthodrome_again")
    } else {
        "SELECT 1".to_owned()
    };
    if records.is_empty() && !is_query && statement.prelude.is_empty() {
        return None;
    }
    records.sort();
    records.dedup();
    Some(Statement {
        prelude: statement.prelude.clone(),
        text,
        keys: Keys { sought: records, ..Keys::default() },
        settings: statement.settings.clone(),
        may_leave: statement.may_leave,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn query(text: &str) -> Statement {
        Statement {
            prelude: vec!["SELECT 1 FROM u FOR SHARE".into()],
            text: text.into(),
            keys: Keys::default(),
            settings: Vec::new(),
            may_leave: false,
        }
    }

    /// The texts that a rollback to the savepoint runs again after these statements.
    fn again(statements: &[Statement], failed: Option<Failed>) -> Vec<(usize, String)> {
        let mut marks = Marks::default();
        marks.before(Some(Isolation::Serializable), &[Mark::Set(1)], Vec::new(), true);
        marks.note(statements, failed);
        let back = marks.before(None, &[Mark::Back(1)], Vec::new(), true);
        back.statements.into_iter().map(|one| (one.prelude.len(), one.text)).collect()
    }

    #[test]
    fn locks_of_a_statement_that_failed_are_taken_again_without_it() {
        let statements = ["SELECT a FROM t FOR SHARE", "SELECT b FROM t FOR SHARE", "SELECT 2"];
        let statements = statements.map(query);
        let first =
            (1, "SELECT count(*) FROM (SELECT a FROM t FOR SHARE) AS orthodrome_again".into());
        assert_eq!(again(&statements[..1], None), std::slice::from_ref(&first));
        let failed = Failed { number: 1, in_prelude: false, took_locks: true };
        assert_eq!(again(&statements, Some(failed)), [first.clone(), (1, "SELECT 1".into())]);
        let failed = Failed { number: 1, in_prelude: true, took_locks: true };
        assert_eq!(again(&statements, Some(failed)), std::slice::from_ref(&first));
        // The server did not understand it.
        let failed = Failed { number: 1, in_prelude: false, took_locks: false };
        assert_eq!(again(&statements, Some(failed)), [first]);
    }
}
