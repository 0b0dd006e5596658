//! A session at a source: a common interface to both kinds of servers.

use std::io;
use std::time::Duration;

use orthodrome_core::NodeId;
use orthodrome_core::ordered::OrdSet;
use orthodrome_geotp::contract::{Failure, Isolation, Reason, Work, Xid};
use orthodrome_geotp::sql::plan::{DIFFERS, Keys};
use orthodrome_geotp::sql::{Answer, Column, Dialect};

use super::maria::{Maria, TOO_LONG};
use super::postgres::Postgres;
use super::trust::Trust;

/// The statements of a real source: SQL.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sql;

impl Work for Sql {
    type Statement = Statement;
    type Answer = Answer;
    type Fault = Fault;
}

/// A statement, and the statements that lock what it reads.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Statement {
    /// Statements that run first; their answers are ignored.
    pub prelude: Vec<String>,
    /// The statement.
    pub text: String,
    /// Rows for which the source must prevent phantoms.
    pub keys: Keys,
    /// Settings of the client's session for the source. The first statement of a message has the
    /// settings for all of them.
    pub settings: Vec<Setting>,
    /// True if it calls a function that may change its session in a way that the proxy does not
    /// notice.
    pub may_leave: bool,
}

/// A setting of a session at a source, in the syntax of its kind of server.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Setting {
    /// Its name.
    pub name: String,
    /// Its value, quoted if necessary.
    pub value: String,
}

/// A source's error message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fault {
    /// SQLSTATE.
    pub sqlstate: String,
    /// MariaDB's error number; 0 for PostgreSQL.
    pub number: u16,
    /// The text.
    pub message: String,
}

impl Fault {
    /// Whether the statement was interrupted.
    pub(crate) fn is_interrupt(&self) -> bool {
        self.sqlstate == "57014" || self.number == 1317
    }
}

/// What a statement takes and gives.
#[derive(Default, Debug)]
pub(crate) struct Described {
    /// PostgreSQL's numbers of its parameters' types; none at MariaDB.
    pub(crate) parameters: Vec<u32>,
    /// The columns of its result.
    pub(crate) columns: Vec<Column>,
}

/// Why a source did not execute a request.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// The source returned an error.
    Fault(Fault),
    /// The connection broke, so it is unknown what was executed.
    Broken(io::Error),
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Self {
        Self::Broken(error)
    }
}

impl std::fmt::Display for Trouble {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Fault(fault) => write!(f, "{} ({})", fault.message, fault.sqlstate),
            Self::Broken(error) => write!(f, "{error}"),
        }
    }
}

/// The results of a query batch.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// The answers of the executed statements, with PostgreSQL's command tags.
    pub(crate) done: Vec<(Answer, String)>,
    /// The error that ended the batch.
    pub(crate) fault: Option<Fault>,
}

impl Outcome {
    pub(crate) fn ok(self) -> Result<Vec<(Answer, String)>, Trouble> {
        match self.fault {
            None => Ok(self.done),
            Some(fault) => Err(Trouble::Fault(fault)),
        }
    }
}

/// The address of a source, and the login there.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// Its kind.
    pub kind: Dialect,
    /// `host:port`.
    pub address: String,
    /// The database.
    pub database: String,
    /// The user.
    pub user: String,
    /// Its password.
    pub password: String,
    /// Lock time-out of statements; zero: the server's default.
    pub lock_wait: Duration,
    /// Half of an emulated round trip, by which each request and each answer is delayed.
    pub one_way: Duration,
    /// Verifies the source's certificate; none: the connection is not encrypted.
    pub trust: Option<Trust>,
    /// The name of this agent's sessions at the source.
    pub label: String,
    /// Interval of the queries for lock waits. They begin when a statement has run for this long.
    pub look_every: Duration,
}

/// The holder of a lock that a session waits for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Holder {
    /// The session with this number.
    Session(u64),
    /// A prepared branch that belongs to no session.
    Prepared(Xid),
}

/// Queries the lock waits of a PostgreSQL server. `pg_blocking_pids` names sessions that block a
/// session, but not prepared transactions.
const POSTGRES_WAITS: &str = "\
    WITH locks AS MATERIALIZED (SELECT * FROM pg_locks WHERE mode <> 'SIReadLock'), \
    waiting AS (SELECT * FROM locks WHERE NOT granted) \
    SELECT waiting.pid, by.pid, '' FROM waiting, unnest(pg_blocking_pids(waiting.pid)) AS by(pid) WHERE by.pid <> 0 \
    UNION \
    SELECT waiting.pid, 0, prepared.gid FROM waiting \
    JOIN locks ON locks.granted AND locks.pid IS NULL AND locks.locktype = waiting.locktype AND ( \
        locks.transactionid = waiting.transactionid \
        OR waiting.locktype = 'advisory' AND (locks.database, locks.classid, locks.objid, locks.objsubid) \
            = (waiting.database, waiting.classid, waiting.objid, waiting.objsubid) \
        OR waiting.locktype = 'relation' AND locks.relation = waiting.relation \
            AND locks.mode NOT IN ('AccessShareLock', 'RowShareLock')) \
    JOIN locks own ON own.pid IS NULL AND own.locktype = 'transactionid' AND own.virtualtransaction = locks.virtualtransaction \
    JOIN pg_prepared_xacts prepared ON prepared.transaction = own.transactionid";

/// Queries the lock waits of a MariaDB server, where prepared branches belong to sessions. InnoDB
/// answers from a cache, and refreshes it only if it has not been read for a tenth of a second. A
/// driver that asks more often gets the same answer for ever. So drivers hold a lock during their
/// query, and until they have [let the tables rest](MARIA_RESTS).
const MARIA_WAITS: &str = "\
    SELECT GET_LOCK('orthodrome_waits', 3); SELECT r.trx_mysql_thread_id, b.trx_mysql_thread_id, '' FROM information_schema.innodb_lock_waits w \
    JOIN information_schema.innodb_trx r ON r.trx_id = w.requesting_trx_id \
    JOIN information_schema.innodb_trx b ON b.trx_id = w.blocking_trx_id \
    WHERE w.requesting_trx_id <> 0 AND w.blocking_trx_id <> 0";

/// Must follow [`MARIA_WAITS`].
const MARIA_RESTS: &str = "DO SLEEP(0.11); DO RELEASE_LOCK('orthodrome_waits')";

/// Reads an empty table, so that a branch has a transaction number from its beginning on. InnoDB
/// gives none to a transaction that has only read, and then the holder of a lock cannot be
/// identified. The table is never written to.
const MARIA_NUMBERING: &str = "SELECT 1 FROM orthodrome_branches FOR UPDATE";

/// Makes the table of [`MARIA_NUMBERING`].
const MARIA_NUMBERING_TABLE: &str =
    "CREATE TABLE IF NOT EXISTS orthodrome_branches (id INT PRIMARY KEY) ENGINE = InnoDB";

/// A session of either kind.
pub(crate) enum Session {
    Postgres(Postgres),
    Maria(Maria),
}

/// The data needed to interrupt a session from another one.
#[derive(Clone, Debug)]
pub(crate) enum Interrupt {
    Postgres { pid: u32, secret: u32 },
    Maria { id: u64 },
}

impl Interrupt {
    /// The session's number at its server.
    pub(crate) fn id(&self) -> u64 {
        match self {
            Self::Postgres { pid, .. } => u64::from(*pid),
            Self::Maria { id } => *id,
        }
    }
}

impl Session {
    pub(crate) async fn connect(to: &Endpoint) -> Result<Self, Trouble> {
        tokio::time::sleep(to.one_way * 2).await;
        Ok(match to.kind {
            Dialect::PostgreSql => Self::Postgres(Postgres::connect(to).await?),
            Dialect::MariaDb => Self::Maria(Maria::connect(to).await?),
        })
    }

    /// Sends a query batch and waits for all its answers: one round trip.
    pub(crate) async fn text(&mut self, text: &str, one_way: Duration) -> Result<Outcome, Trouble> {
        if one_way.is_zero() {
            return self.send(text).await;
        }
        tokio::time::sleep(one_way).await;
        let outcome = self.send(text).await;
        tokio::time::sleep(one_way).await;
        outcome
    }

    async fn send(&mut self, text: &str) -> Result<Outcome, Trouble> {
        match self {
            Self::Postgres(session) => session.text(text).await,
            Self::Maria(session) => session.text(text).await,
        }
    }

    /// What a statement takes and gives: the server parses it and does not run it.
    pub(crate) async fn describe(
        &mut self,
        text: &str,
        one_way: Duration,
    ) -> Result<Described, Trouble> {
        tokio::time::sleep(one_way * 2).await;
        match self {
            Self::Postgres(session) => session.describe(text).await,
            Self::Maria(session) => {
                let columns = session.columns(text).await?;
                Ok(Described { columns, parameters: Vec::new() })
            }
        }
    }

    /// Waits, in an idle session, until the server sends something or closes the connection.
    pub(crate) async fn stirs(&mut self) {
        match self {
            Self::Postgres(session) => session.stream.stirs().await,
            Self::Maria(session) => session.stream.stirs().await,
        }
    }

    /// Settings that differ from those of a new session.
    pub(crate) fn settings(&self) -> &[Setting] {
        match self {
            // These settings end with each transaction.
            Self::Postgres(_) => &[],
            Self::Maria(session) => &session.settings,
        }
    }

    /// Records that the session has these settings now.
    pub(crate) fn has_settings(&mut self, settings: Vec<Setting>) {
        match self {
            Self::Postgres(_) => {}
            Self::Maria(session) => session.settings = settings,
        }
    }

    pub(crate) fn interrupt(&self) -> Interrupt {
        match self {
            Self::Postgres(session) => {
                Interrupt::Postgres { pid: session.pid, secret: session.secret }
            }
            Self::Maria(session) => Interrupt::Maria { id: session.id },
        }
    }

    /// A number that changes when the server restarts. `before` is the last known one.
    pub(crate) async fn start_id(
        &mut self,
        before: u64,
        last_id: u64,
    ) -> Result<(u64, u64), Trouble> {
        match self {
            Self::Postgres(_) => {
                let text =
                    "SELECT (extract(epoch from pg_postmaster_start_time()) * 1000000)::bigint";
                Ok((number(&self.send(text).await?.ok()?), 0))
            }
            Self::Maria(session) => {
                let id = session.id;
                let text = "SELECT unix_timestamp() - variable_value FROM information_schema.global_status \
                            WHERE variable_name = 'UPTIME'";
                let start = number(&self.send(text).await?.ok()?) * 1000;
                // Seconds are too coarse; but connection numbers only increase as long as a server
                // runs.
                let is_same = start.abs_diff(before - before % 1000) <= 1000 && id > last_id;
                let start = if is_same { before } else { start.max(before + 1) };
                Ok((start, id))
            }
        }
    }

    /// The number of sessions that the server allows to users like this one.
    pub(crate) async fn sessions_max(&mut self) -> Result<usize, Trouble> {
        let text = match self {
            Self::Postgres(_) => {
                "SELECT current_setting('max_connections')::int \
                 - current_setting('superuser_reserved_connections')::int"
            }
            Self::Maria(_) => "SELECT @@max_connections",
        };
        Ok(usize::try_from(number(&self.send(text).await?.ok()?)).unwrap_or(usize::MAX))
    }

    /// The prepared branches of Orthodrome at this source.
    pub(crate) async fn prepared(
        &mut self,
        source: NodeId,
        one_way: Duration,
    ) -> Result<Vec<Xid>, Trouble> {
        let (text, column) = match self {
            Self::Postgres(_) => {
                ("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()", 0)
            }
            Self::Maria(_) => ("XA RECOVER", 3),
        };
        let done = self.text(text, one_way).await?.ok()?;
        let rows = done.into_iter().flat_map(|(answer, _)| answer.rows);
        let names = rows.filter_map(|row| row.into_iter().nth(column).flatten());
        let ours = names.filter_map(|name| Xid::parse(std::str::from_utf8(&name).ok()?));
        Ok(ours.filter(|(_, at)| *at == source).map(|(xid, _)| xid).collect())
    }
}

impl Session {
    /// Restores the initial state of the session: settings, locks, temporary tables, and everything
    /// else.
    pub(crate) async fn reset(&mut self, lock_wait: Duration) -> Result<(), Trouble> {
        match self {
            Self::Postgres(session) => session.text("DISCARD ALL").await?.ok().map(drop),
            Self::Maria(session) => session.reset(lock_wait).await,
        }
    }

    /// The lock waits at this server: numbers of waiting sessions, and the holders of the locks.
    pub(crate) async fn waits(
        &mut self,
        source: NodeId,
        one_way: Duration,
    ) -> Result<Vec<(u64, Holder)>, Trouble> {
        let text = match self {
            Self::Postgres(_) => POSTGRES_WAITS,
            Self::Maria(_) => MARIA_WAITS,
        };
        let done = self.text(text, one_way).await?.ok()?;
        let rows = done.into_iter().flat_map(|(answer, _)| answer.rows);
        let wait = |row: Vec<Option<Vec<u8>>>| {
            let mut cells = row.into_iter().map(|cell| String::from_utf8(cell?).ok());
            let mut next = || cells.next().flatten();
            let waiter = next()?.parse().ok()?;
            let (holder, name) = (next()?.parse().ok()?, next()?);
            let holder = match Xid::parse(&name) {
                Some((xid, at)) if at == source => Holder::Prepared(xid),
                _ => Holder::Session(holder),
            };
            Some((waiter, holder))
        };
        Ok(rows.filter_map(wait).collect())
    }

    /// The numbers of the sessions at this server.
    pub(crate) async fn ids(&mut self) -> Result<OrdSet<u64>, Trouble> {
        let text = match self {
            Self::Postgres(_) => "SELECT pid FROM pg_stat_activity",
            Self::Maria(_) => "SELECT id FROM information_schema.processlist",
        };
        let done = self.send(text).await?.ok()?;
        let cells = done.into_iter().flat_map(|(answer, _)| answer.rows).flatten().flatten();
        Ok(cells.filter_map(|cell| String::from_utf8(cell).ok()?.parse().ok()).collect())
    }

    /// Lets the cache of [`Session::waits`] expire, so that the next reader gets new data.
    pub(crate) async fn rest(&mut self) -> Result<(), Trouble> {
        match self {
            Self::Postgres(_) => Ok(()),
            Self::Maria(_) => self.send(MARIA_RESTS).await?.ok().map(drop),
        }
    }

    /// Makes the table that numbers branches, if this kind of server needs it. Returns whether
    /// branches can be numbered.
    pub(crate) async fn number_branches(&mut self) -> Result<bool, Trouble> {
        match self {
            Self::Postgres(_) => Ok(false),
            Self::Maria(_) => {
                let outcome = self.send(MARIA_NUMBERING).await?;
                if outcome.fault.as_ref().is_some_and(|fault| fault.number == 1146) {
                    self.send(MARIA_NUMBERING_TABLE).await?.ok()?;
                    self.send(MARIA_NUMBERING).await?.ok()?;
                } else {
                    outcome.ok()?;
                }
                Ok(true)
            }
        }
    }
}

fn number(done: &[(Answer, String)]) -> u64 {
    let cell = done
        .first()
        .and_then(|(answer, _)| answer.rows.first())
        .and_then(|row| row.first())
        .cloned()
        .flatten();
    let text = cell.and_then(|cell| String::from_utf8(cell).ok()).unwrap_or_default();
    text.split('.').next().and_then(|text| text.parse().ok()).unwrap_or(0)
}

impl Endpoint {
    /// Interrupts the running statement of a session.
    pub(crate) async fn interrupt(&self, what: Interrupt) -> Result<(), Trouble> {
        tokio::time::sleep(self.one_way).await;
        match what {
            Interrupt::Postgres { pid, secret } => {
                super::postgres::cancel(self, pid, secret).await?
            }
            Interrupt::Maria { id } => {
                let mut session = Maria::connect(self).await?;
                session.text(&format!("KILL QUERY {id}")).await?;
            }
        }
        Ok(())
    }

    /// Ends a session whose owner is gone; true if it still existed.
    pub(crate) async fn end_session(
        &self,
        session: &mut Session,
        id: u64,
    ) -> Result<bool, Trouble> {
        match self.kind {
            Dialect::PostgreSql => {
                let label = quoted(&self.label);
                let text = format!(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = {id} AND application_name = {label}",
                );
                let done = session.send(&text).await?.ok()?;
                Ok(done.iter().any(|(answer, _)| !answer.rows.is_empty()))
            }
            Dialect::MariaDb => {
                match session.send(&format!("KILL CONNECTION {id}")).await?.fault {
                    None => Ok(true),
                    // There is no such thread.
                    Some(fault) if fault.number == 1094 => Ok(false),
                    Some(fault) => Err(Trouble::Fault(fault)),
                }
            }
        }
    }

    /// The SQL that opens a branch, which gets a number if `is_numbered`.
    pub(crate) fn begin(&self, name: &str, isolation: Isolation, is_numbered: bool) -> String {
        let level = match (isolation, self.kind) {
            // MariaDB keeps read locks of prepared branches only at SERIALIZABLE (G2).
            (Isolation::Serializable, _) | (Isolation::Keyed, Dialect::MariaDb) => "SERIALIZABLE",
            (Isolation::RepeatableRead, _) => "REPEATABLE READ",
            (Isolation::ReadCommitted, _) | (Isolation::Keyed, Dialect::PostgreSql) => {
                "READ COMMITTED"
            }
        };
        match self.kind {
            Dialect::PostgreSql => format!("BEGIN ISOLATION LEVEL {level}"),
            Dialect::MariaDb => {
                let number =
                    if is_numbered { [";", MARIA_NUMBERING].concat() } else { String::new() };
                format!("SET TRANSACTION ISOLATION LEVEL {level};XA START '{name}'{number}")
            }
        }
    }

    /// The SQL that changes a session's settings from `before` to `wanted`. At PostgreSQL they last
    /// until the transaction ends.
    pub(crate) fn settle(&self, before: &[Setting], wanted: &[Setting]) -> Vec<String> {
        let gone = before.iter().filter(|old| wanted.iter().all(|new| new.name != old.name));
        let new = wanted.iter().filter(|new| !before.contains(new));
        match self.kind {
            Dialect::PostgreSql => {
                // Parts of names may be reserved words of PostgreSQL.
                let name = |name: &str| format!("\"{}\"", name.replace('.', "\".\""));
                let gone = gone.map(|old| format!("SET LOCAL {} TO DEFAULT", name(&old.name)));
                let new = new.map(|new| format!("SET LOCAL {} = {}", name(&new.name), new.value));
                gone.chain(new).collect()
            }
            Dialect::MariaDb => {
                let gone = gone.map(|old| super::maria::initial(&old.name, self.lock_wait));
                let new = new.map(|new| format!("{} = {}", new.name, new.value));
                let all: Vec<String> = gone.chain(new).collect();
                if all.is_empty() { all } else { vec![format!("SET {}", all.join(", "))] }
            }
        }
    }

    /// The SQL that prepares a branch.
    pub(crate) fn prepare(&self, name: &str) -> String {
        match self.kind {
            Dialect::PostgreSql => format!("PREPARE TRANSACTION '{name}'"),
            Dialect::MariaDb => format!("XA END '{name}';XA PREPARE '{name}'"),
        }
    }

    /// The SQL that commits a branch that is not prepared.
    pub(crate) fn commit(&self, name: &str) -> String {
        match self.kind {
            Dialect::PostgreSql => "COMMIT".into(),
            Dialect::MariaDb => format!("XA END '{name}';XA COMMIT '{name}' ONE PHASE"),
        }
    }

    /// The SQL that ends a prepared branch.
    pub(crate) fn end_prepared(&self, name: &str, commit: bool) -> String {
        let verb = if commit { "COMMIT" } else { "ROLLBACK" };
        match self.kind {
            Dialect::PostgreSql => format!("{verb} PREPARED '{name}'"),
            Dialect::MariaDb => format!("XA {verb} '{name}'"),
        }
    }

    /// The SQL that rolls back a branch that is not prepared.
    pub(crate) fn rollback(&self, name: &str) -> String {
        match self.kind {
            Dialect::PostgreSql => "ROLLBACK".into(),
            Dialect::MariaDb => format!("XA END '{name}';XA ROLLBACK '{name}'"),
        }
    }

    /// The meaning of an error for the branch: the reason, and whether the branch can continue.
    pub(crate) fn judge(&self, fault: Fault) -> (Failure<Sql>, bool) {
        // Only this agent interrupts its sessions, and only to end a branch that failed elsewhere.
        if fault.is_interrupt() {
            return (Reason::Peer.into(), false);
        }
        // A check of the mode `near` failed. Nothing of the branch may remain.
        if is_difference(&fault) {
            return (Failure { reason: Reason::Serialization, fault: Some(fault) }, false);
        }
        let (reason, goes_on) = match (self.kind, fault.sqlstate.as_str(), fault.number) {
            (Dialect::PostgreSql, "40P01", _) => (Reason::Deadlock, false),
            (Dialect::PostgreSql, "40001", _) => (Reason::Serialization, false),
            (Dialect::PostgreSql, "55P03", _) => (Reason::LockTimeout, false),
            (Dialect::PostgreSql, ..) => (Reason::Statement, false),
            // The whole transaction is rolled back.
            (Dialect::MariaDb, _, 1213 | 1614) => (Reason::Deadlock, false),
            (Dialect::MariaDb, _, 1205) => (Reason::LockTimeout, false),
            (Dialect::MariaDb, _, 1020) => (Reason::Serialization, false),
            (Dialect::MariaDb, _, 1402 | 1399 | 1397 | 1398) => (Reason::Unprepared, false),
            (Dialect::MariaDb, ..) => (Reason::Statement, true),
        };
        (Failure { reason, fault: Some(fault) }, goes_on)
    }

    /// Whether an error at the first statement of a batch may concern any of its statements.
    /// PostgreSQL parses a whole batch before it runs anything, and no server runs anything of a
    /// batch that is too long.
    pub(crate) fn reads_whole(&self, fault: Option<&Fault>) -> bool {
        match self.kind {
            // Class 57: the statement was interrupted, or the server is shutting down.
            Dialect::PostgreSql => fault.is_some_and(|fault| !fault.sqlstate.starts_with("57")),
            Dialect::MariaDb => fault.is_some_and(|fault| fault.number == TOO_LONG),
        }
    }

    /// Whether an error says that the prepared branch does not exist.
    pub(crate) fn is_gone(&self, fault: &Fault) -> bool {
        match self.kind {
            Dialect::PostgreSql => fault.sqlstate == "42704",
            Dialect::MariaDb => fault.number == 1397,
        }
    }
}

/// Whether an error says that an answer differs from the one that the client already has.
pub(crate) fn is_difference(fault: &Fault) -> bool {
    (fault.sqlstate == "22P02" || fault.number == 1690) && fault.message.contains(DIFFERS)
}

/// A quoted string constant.
pub(crate) fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}
