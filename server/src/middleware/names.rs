//! Rows that are looked for at PostgreSQL and are not there: it has no locks for them, so they are locked by their names
//! (docs/adr/0029). What has to be asked of the server for that, as text; `source` asks it.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};

use orthodrome_geotp::sql::plan::Keys;
use orthodrome_geotp::sql::value::Key;
use orthodrome_geotp::sql::{Answer, Record};

/// Rows that a branch locks by their names: beyond, it locks their tables' names, since PostgreSQL has room for some
/// thousand locks (`max_locks_per_transaction`).
pub(super) const NAMES_MAX: usize = 64;

/// What a text does about rows that are looked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Probe {
    /// Counts them: something can be done afterwards about those that are not there.
    Count,
    /// Fails if one is not there: the text ends the branch.
    Fail,
}

impl Probe {
    /// How often each record is there, which locks it: as it is, or against whoever else would delete it.
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

/// The lock that stands for a row, whether it is there or not; for all of a table without a key. It must never change: proxies and
/// agents of several versions meet at a server.
pub(super) fn name(table: &str, key: &str) -> i64 {
    Key::Text(format!("{table}\0{key}")).hash().cast_signed()
}

/// Columns that take locks, each once, in an order that is everybody's.
fn locks(function: &str, names: impl IntoIterator<Item = i64>) -> Vec<String> {
    let names: BTreeSet<i64> = names.into_iter().collect();
    names.iter().map(|name| format!("{function}({name})")).collect()
}

/// Locks the names of the rows that a statement inserts, or of their tables if the branch inserts many.
pub(super) fn inserting(keys: &Keys, named: &AtomicUsize) -> Option<String> {
    let before = named.fetch_add(keys.inserted.len(), Ordering::AcqRel);
    let is_many = before + keys.inserted.len() > NAMES_MAX;
    let row = |record: &Record| name(&record.table, if is_many { "" } else { &record.key });
    let filled = keys.filled.iter().map(|table| name(table, ""));
    let columns = locks("pg_advisory_xact_lock", keys.inserted.iter().map(row).chain(filled));
    (!columns.is_empty()).then(|| format!("SELECT {}", columns.join(", ")))
}

/// The numbers of a transaction and of what it does between savepoints: each is locked by its own session.
const OWN_IDS: &str = "(SELECT string_agg(transactionid::text, ',') FROM pg_catalog.pg_locks \
                       WHERE locktype = 'transactionid' AND mode = 'ExclusiveLock' AND pid = pg_backend_pid())";

/// Holds off whoever would insert rows that are not there, and asks for the numbers of the transaction ([`own_ids`]).
pub(super) fn holding_off(missed: &[&Record], has_savepoints: bool) -> String {
    let names = missed
        .iter()
        .flat_map(|record| [name(&record.table, &record.key), name(&record.table, "")]);
    let mut columns = locks("pg_advisory_xact_lock_shared", names);
    let one = "pg_current_xact_id_if_assigned()::text";
    columns.push(if has_savepoints { OWN_IDS } else { one }.to_owned());
    format!("SELECT {}", columns.join(", "))
}

/// The numbers of the transaction that has asked with [`holding_off`], as rows have them: their lower half.
pub(super) fn own_ids(answer: &Answer) -> Vec<u32> {
    let cell = answer.rows.first().and_then(|row| row.last()).cloned().flatten();
    let text = String::from_utf8(cell.unwrap_or_default()).unwrap_or_default();
    text.split(',').filter_map(|id| id.parse::<u64>().ok()).map(|id| id as u32).collect()
}

/// Whether one of the rows is there by now, asked by another session than that of the transaction that has not found
/// them; `own` are its numbers. What it has deleted itself is no other's.
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
