//! Translates errors of one kind of source to the other kind's errors, if clients must recognize
//! them: those for which a retry never succeeds. A PostgreSQL client recognizes a duplicate key by
//! 23505, whichever source reports it.

use orthodrome_geotp::sql::Dialect;

use super::driver::Fault;
use super::session::SqlError;

/// An error that both kinds know.
struct Known {
    postgres: &'static str,
    maria: u16,
    /// MariaDB's SQLSTATE of it.
    maria_state: &'static str,
    /// The message of each kind; empty to keep the source's message.
    postgres_words: &'static str,
    maria_words: &'static str,
}

const fn known(
    postgres: &'static str,
    maria: u16,
    maria_state: &'static str,
    postgres_words: &'static str,
    maria_words: &'static str,
) -> Known {
    Known { postgres, maria, maria_state, postgres_words, maria_words }
}

/// For each code, the first entry gives the other kind's code.
const KNOWN: &[Known] = &[
    known(
        "23505",
        1062,
        "23000",
        "duplicate key value violates unique constraint",
        "Duplicate entry",
    ),
    known(
        "23503",
        1452,
        "23000",
        "insert or update on table violates foreign key constraint",
        "Cannot add or update a child row: a foreign key constraint fails",
    ),
    known(
        "23503",
        1451,
        "23000",
        "update or delete on table violates foreign key constraint",
        "Cannot delete or update a parent row: a foreign key constraint fails",
    ),
    known(
        "23502",
        1048,
        "23000",
        "null value in column violates not-null constraint",
        "Column cannot be null",
    ),
    known("23514", 4025, "23000", "new row violates check constraint", "CONSTRAINT failed"),
    known("42P01", 1146, "42S02", "", ""),
    known("42703", 1054, "42S22", "", ""),
    known("42601", 1064, "42000", "", ""),
    known("42883", 1305, "42000", "", ""),
    known("42501", 1142, "42000", "", ""),
    known("22001", 1406, "22001", "", ""),
    known("22003", 1264, "22003", "", ""),
    known("22012", 1365, "22012", "", ""),
    known("53300", 1040, "08004", "", ""),
];

/// Maps numbers of MariaDB and MySQL to another number with the same meaning.
fn canonical(number: u16) -> u16 {
    match number {
        1022 | 1586 => 1062,
        1216 => 1452,
        1217 => 1451,
        // A column that needs a value has none.
        1364 => 1048,
        3819 => 4025,
        other => other,
    }
}

/// Translates a source's error for a client.
pub(crate) fn translated(fault: Fault, client: Dialect, source: &str) -> SqlError {
    // PostgreSQL's errors have no numbers.
    let kind = if fault.number == 0 { Dialect::PostgreSql } else { Dialect::MariaDb };
    let mut error = SqlError::from(fault);
    if kind == client {
        return error;
    }
    let is_it = |one: &&Known| match kind {
        Dialect::PostgreSql => one.postgres == error.sqlstate,
        Dialect::MariaDb => one.maria == canonical(error.number),
    };
    // PostgreSQL has one code for both ends of a foreign key.
    let is_of_parent =
        kind == Dialect::PostgreSql && error.message.starts_with("update or delete on table");
    let mut found: Vec<&Known> = KNOWN.iter().filter(is_it).collect();
    if is_of_parent {
        found.reverse();
    }
    let Some(known) = found.first() else { return error };
    let words = match client {
        Dialect::PostgreSql => {
            error.sqlstate = known.postgres.into();
            known.postgres_words
        }
        Dialect::MariaDb => {
            (error.sqlstate, error.number) = (known.maria_state.into(), known.maria);
            known.maria_words
        }
    };
    if !words.is_empty() {
        error.message = format!("{words} (source {source}: {})", error.message);
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(sqlstate: &str, number: u16, message: &str) -> Fault {
        Fault { sqlstate: sqlstate.into(), number, message: message.into() }
    }

    /// The error for both kinds of clients.
    fn told(fault: &Fault) -> [(String, u16); 2] {
        [Dialect::PostgreSql, Dialect::MariaDb].map(|client| {
            let error = translated(fault.clone(), client, "s1");
            (error.sqlstate, error.number)
        })
    }

    #[test]
    fn violated_constraints_have_each_protocols_own_codes() {
        let parent = "update or delete on table \"a\" violates foreign key constraint \"b\"";
        for (given, postgres, maria) in [
            (fault("23505", 0, "duplicate key"), "23505", 1062),
            (fault("23000", 1062, "Duplicate entry"), "23505", 1062),
            (fault("23503", 0, "insert or update on table"), "23503", 1452),
            (fault("23503", 0, parent), "23503", 1451),
            (fault("23000", 1452, "Cannot add"), "23503", 1452),
            (fault("23000", 1451, "Cannot delete"), "23503", 1451),
            (fault("23502", 0, "null value"), "23502", 1048),
            (fault("23000", 1048, "Column 'v' cannot be null"), "23502", 1048),
            (fault("23514", 0, "new row"), "23514", 4025),
            (fault("23000", 4025, "CONSTRAINT `c` failed"), "23514", 4025),
        ] {
            let [(state, _), (maria_state, number)] = told(&given);
            assert_eq!((state.as_str(), number), (postgres, maria), "{given:?}");
            assert_eq!(maria_state, "23000", "{given:?}");
        }
        assert_eq!(told(&fault("HY000", 1364, "no default"))[0].0, "23502");
    }

    #[test]
    fn the_sources_own_words_stay_in_the_message() {
        let given = fault("23000", 1062, "Duplicate entry '101' for key 'PRIMARY'");
        let error = translated(given.clone(), Dialect::PostgreSql, "s1");
        assert_eq!(
            error.message,
            "duplicate key value violates unique constraint (source s1: Duplicate entry '101' for key 'PRIMARY')"
        );
        assert_eq!(translated(given.clone(), Dialect::MariaDb, "s1").message, given.message);
    }

    #[test]
    fn what_only_one_kind_knows_is_passed_on() {
        assert_eq!(told(&fault("40001", 0, "could not serialize"))[0].0, "40001");
        assert_eq!(told(&fault("XX001", 0, "corrupt"))[1], ("XX001".into(), 1105));
    }
}
