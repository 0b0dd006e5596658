//! Locks for rows that a statement looks for at PostgreSQL and that do not exist: PostgreSQL has no
//! locks for them, so they are locked by name (docs/adr/0029). This module makes the SQL; `source`
//! runs it.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};

use orthodrome_geotp::sql::plan::Keys;
use orthodrome_geotp::sql::value::Key;
use orthodrome_geotp::sql::{Answer, Record};

/// Number of rows that a branch locks by name. Beyond it, the branch locks the names of the tables,
/// because PostgreSQL has room for a few thousand locks (`max_locks_per_transaction`).
pub(super) const NAMES_MAX: usize = 64;

/// How a query batch checks for missing rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Probe {
    /// Counts them; missing rows are handled afterwards.
    Count,
    /// Fails if a row is missing, because the batch ends the branch.
    Fail,
}

impl Probe {
    /// The query that counts each record and locks it: for reading, or against deletion.
    pub(super) fn text(self, keys: &Keys) -> String {
        let lock = if keys.is_delete { "UPDATE" } else { "SHARE" };
        let one = |record: &Record| {
            let count = format!(
                "(SELECT count(*) FROM (SELECT 1 FROM {} WHERE {} FOR {lock}) AS orthodrome_sought)",
                table(record),
                record.condition
            );
            match self {
                Self::Count => count,
                Self::Fail => format!("1 / {count}"),
            }
        };
        format!("SELECT {}", keys.sought.iter().map(one).collect::<Vec<_>>().join(", "))
    }
}

fn table(record: &Record) -> String {
    format!("\"{}\"", record.table.replace('"', "\"\""))
}

/// The number of the lock for a row, whether the row exists or not; without a key, for a whole
/// table. The function must never change, because proxies and agents of different versions use the
/// same server.
pub(super) fn name(table: &str, key: &str) -> i64 {
    Key::Text(format!("{table}\0{key}")).hash().cast_signed()
}

/// Columns that take each lock once, in an order that is the same for all.
fn locks(function: &str, names: impl IntoIterator<Item = i64>) -> Vec<String> {
    let names: BTreeSet<i64> = names.into_iter().collect();
    names.iter().map(|name| format!("{function}({name})")).collect()
}

/// A statement that locks the names of the rows that another statement inserts, or of their tables
/// if the branch inserts many.
pub(super) fn inserting(keys: &Keys, named: &AtomicUsize) -> Option<String> {
    let before = named.fetch_add(keys.inserted.len(), Ordering::AcqRel);
    let is_many = before + keys.inserted.len() > NAMES_MAX;
    let row = |record: &Record| name(&record.table, if is_many { "" } else { &record.key });
    let filled = keys.filled.iter().map(|table| name(table, ""));
    let columns = locks("pg_advisory_xact_lock", keys.inserted.iter().map(row).chain(filled));
    (!columns.is_empty()).then(|| format!("SELECT {}", columns.join(", ")))
}

/// The numbers of a transaction and of its parts between savepoints: its own session locks each.
const OWN_IDS: &str = "(SELECT string_agg(transactionid::text, ',') FROM pg_catalog.pg_locks \
                       WHERE locktype = 'transactionid' AND mode = 'ExclusiveLock' AND pid = pg_backend_pid())";

/// Locks the names of missing rows against inserts, and queries the numbers of the transaction
/// ([`own_ids`]).
pub(super) fn holding_off(missed: &[&Record], has_savepoints: bool) -> String {
    let names = missed
        .iter()
        .flat_map(|record| [name(&record.table, &record.key), name(&record.table, "")]);
    let mut columns = locks("pg_advisory_xact_lock_shared", names);
    let one = "pg_current_xact_id_if_assigned()::text";
    columns.push(if has_savepoints { OWN_IDS } else { one }.to_owned());
    format!("SELECT {}", columns.join(", "))
}

/// The transaction numbers in the answer to [`holding_off`], as rows contain them: their lower half.
pub(super) fn own_ids(answer: &Answer) -> Vec<u32> {
    let cell = answer.rows.first().and_then(|row| row.last()).cloned().flatten();
    let text = String::from_utf8(cell.unwrap_or_default()).unwrap_or_default();
    text.split(',').filter_map(|id| id.parse::<u64>().ok()).map(|id| id as u32).collect()
}

/// A query, for another session, whether one of the missing rows exists now. `own` are the numbers of
/// the transaction that missed them: rows that it has deleted itself do not count.
pub(super) fn looking_again(missed: &[&Record], own: &[u32]) -> String {
    let ids: Vec<String> = own.iter().map(|id| format!("'{id}'")).collect();
    let others = if ids.is_empty() {
        String::new()
    } else {
        format!(" AND xmax::text NOT IN ({})", ids.join(", "))
    };
    let one = |record: &&Record| {
        format!("EXISTS (SELECT 1 FROM {} WHERE {}{others})", table(record), record.condition)
    };
    format!("SELECT {}", missed.iter().map(one).collect::<Vec<_>>().join(" OR "))
}
