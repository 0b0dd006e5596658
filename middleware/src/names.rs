//! Locks for rows that a statement looks for at PostgreSQL and that do not exist: PostgreSQL has no
//! locks for them, so they are locked by name (docs/adr/0029). This module makes the SQL; `source`
//! runs it.

use std::sync::atomic::{AtomicUsize, Ordering};

use orthodrome_core::ordered::{OrdMap, OrdSet};

use orthodrome_geotp::sql::plan::Keys;
use orthodrome_geotp::sql::value::Key;
use orthodrome_geotp::sql::{Answer, Record};

/// Number of rows that a branch locks by name. Beyond it, the branch locks the names of the tables,
/// because PostgreSQL has room for a few thousand locks (`max_locks_per_transaction`).
pub(crate) const NAMES_MAX: usize = 64;

/// Number of transactions that a branch remembers ([`Missing::before`]).
const BEFORE_MAX: usize = 1_024;

/// How a query batch checks for missing rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Probe {
    /// Counts them, or says which transaction has made a row that is deleted; missing rows are
    /// handled afterwards.
    Count,
    /// Fails if a row is missing, because the batch ends the branch.
    Fail,
}

impl Probe {
    /// The query that looks for each record and locks it: for reading, or against deletion. A
    /// record that is missing has the answer 0.
    pub(crate) fn text(self, keys: &Keys) -> String {
        let lock = if keys.is_delete { "UPDATE" } else { "SHARE" };
        let one = |record: &Record| {
            let (found, maker) = if self.says_makers(keys) {
                ("coalesce(min(maker::text), '0')", "xmin AS maker")
            } else {
                ("count(*)", "1")
            };
            let count = format!(
                "(SELECT {found} FROM (SELECT {maker} FROM {} WHERE {} FOR {lock}) AS orthodrome_sought)",
                table(record),
                record.condition
            );
            match self {
                Self::Count => count,
                Self::Fail => format!("1 / {count}"),
            }
        };
        let columns = keys.sought.iter().map(one).collect::<Vec<_>>().join(", ");
        let outside = if self.says_makers(keys) { outside(UNKNOWN) } else { String::new() };
        format!("SELECT {columns}{outside}")
    }

    /// Whether the answers are the makers of the rows.
    fn says_makers(self, keys: &Keys) -> bool {
        keys.is_delete && self == Self::Count
    }
}

/// The number that PostgreSQL gives to the maker of its first rows.
const UNKNOWN: u32 = 1;

/// What the columns `xmin` and `xmax` are inside a query on a view, which has none itself.
fn outside(xmin: u32) -> String {
    format!(" FROM (SELECT '{xmin}'::xid AS xmin, '0'::xid AS xmax) AS orthodrome_outside")
}

fn table(record: &Record) -> String {
    format!("\"{}\"", record.table.replace('"', "\"\""))
}

/// The number of the lock for a row, whether the row exists or not; without a key, for a whole
/// table. The function must never change, because proxies and agents of different versions use the
/// same server.
pub(crate) fn name(table: &str, key: &str) -> i64 {
    Key::Text(format!("{table}\0{key}")).hash().cast_signed()
}

/// Columns that take each lock once, in an order that is the same for all.
fn locks(function: &str, names: impl IntoIterator<Item = i64>) -> Vec<String> {
    let names: OrdSet<i64> = names.into_iter().collect();
    names.iter().map(|name| format!("{function}({name})")).collect()
}

/// PostgreSQL has at most 1664 columns in one query.
const COLUMNS_MAX: usize = 1_000;

/// Queries that take the locks with these numbers in order; `true` stands for an exclusive lock.
pub(crate) fn in_order(wanted: &OrdMap<i64, bool>) -> Vec<String> {
    let one = |(name, is_exclusive): (&i64, &bool)| {
        let kind = if *is_exclusive { "" } else { "_shared" };
        format!("pg_advisory_xact_lock{kind}({name})")
    };
    let columns: Vec<String> = wanted.iter().map(one).collect();
    columns.chunks(COLUMNS_MAX).map(|some| format!("SELECT {}", some.join(", "))).collect()
}

/// A statement that locks the names of the rows that another statement inserts, or of their tables
/// if the branch inserts many.
pub(crate) fn inserting(keys: &Keys, named: &AtomicUsize) -> Option<String> {
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

/// What a transaction knows of itself when it has missed rows.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Missing {
    /// All transactions with lower numbers had ended when its snapshot was taken.
    since: Option<u32>,
    /// Others that had committed then: they have made rows that it has found and deleted.
    before: OrdSet<u32>,
    /// Its own numbers, except those of savepoints that it has released.
    own: Vec<u32>,
}

impl Missing {
    /// Notes who has made the rows that these statements deleted, by the answers to their probes.
    pub(crate) fn note<'a>(&mut self, probes: impl Iterator<Item = (&'a Keys, &'a [u8])>) {
        for (_, maker) in probes.filter(|(keys, _)| keys.is_delete) {
            let maker = std::str::from_utf8(maker).ok().and_then(|id| id.parse::<u32>().ok());
            if self.before.len() < BEFORE_MAX {
                self.before.extend(maker.filter(|id| *id > UNKNOWN));
            }
        }
    }

    /// Notes the answer to [`holding_off`]. Rows contain the lower half of a number.
    pub(crate) fn learn(&mut self, answer: &Answer) {
        let mut cells = answer.rows.first().into_iter().flatten().rev();
        let mut ids = || -> Vec<u32> {
            let cell = cells.next().cloned().flatten();
            let text = String::from_utf8(cell.unwrap_or_default()).unwrap_or_default();
            text.split(',').filter_map(|id| id.parse::<u64>().ok()).map(|id| id as u32).collect()
        };
        self.own = ids();
        self.since = ids().first().copied();
    }
}

/// Locks the names of missing rows against inserts, and queries what [`looking_again`] must know
/// of the transaction ([`Missing::learn`]).
pub(crate) fn holding_off(missed: &[&Record], has_savepoints: bool) -> String {
    let names = missed
        .iter()
        .flat_map(|record| [name(&record.table, &record.key), name(&record.table, "")]);
    let mut columns = locks("pg_advisory_xact_lock_shared", names);
    columns.push("pg_snapshot_xmin(pg_current_snapshot())::text".to_owned());
    let one = "pg_current_xact_id_if_assigned()::text";
    columns.push(if has_savepoints { OWN_IDS } else { one }.to_owned());
    format!("SELECT {}", columns.join(", "))
}

/// A query, for another session, whether one of the missing rows has been inserted since the
/// snapshot of the transaction that missed them.
///
/// The other session also sees rows that the transaction has deleted itself. Their deleter's number
/// does not always show this: a savepoint that has been released is in no list, and a row that was
/// locked before one savepoint and deleted after another contains the number of a set of
/// transactions. But a row that was in the snapshot cannot have been deleted by anybody else. It was
/// there if its maker's number is lower than those of all transactions of the snapshot, or if the
/// transaction has found and deleted a row of the same maker. (A higher number that is not in the list of
/// running transactions proves nothing: it may belong to a savepoint of one of them.)
pub(crate) fn looking_again(missed: &[&Record], itself: &Missing) -> String {
    let all = |ids: &mut dyn Iterator<Item = &u32>| {
        ids.map(|id| format!("'{id}'")).collect::<Vec<_>>().join(", ")
    };
    let mut counts = String::new();
    if let Some(since) = itself.since {
        counts.push_str(&format!(" AND age(xmin) <= age('{since}'::xid)"));
    }
    for (column, ids) in
        [("xmin", all(&mut itself.before.iter())), ("xmax", all(&mut itself.own.iter()))]
    {
        if !ids.is_empty() {
            counts.push_str(&format!(" AND {column}::text NOT IN ({ids})"));
        }
    }
    let one = |record: &&Record| {
        format!("EXISTS (SELECT 1 FROM {} WHERE {}{counts})", table(record), record.condition)
    };
    let columns = missed.iter().map(one).collect::<Vec<_>>().join(" OR ");
    // Rows of a view count.
    format!("SELECT {columns}{}", outside(itself.since.unwrap_or(UNKNOWN)))
}
