use std::sync::mpsc;

use orthodrome_core::Timestamp;
use orthodrome_geotp::contract::{Isolation, Mark};
use orthodrome_geotp::sql::plan::Keys;
use orthodrome_geotp::sql::{Column, Kind, Record};
use tempfile::TempDir;
use tokio::runtime::Runtime;

use super::*;
use crate::driver::{Statement, Trouble};
use crate::local::{Client, LocalServer, USER};
use crate::names::NAMES_MAX;

const NODE: NodeId = NodeId(1001);
/// Time limit for a server's answer on a machine that is busy with other work.
const PATIENCE: Duration = Duration::from_secs(120);

/// A driver of a private server with one row, and its reports.
struct Rig {
    source: Arc<Source>,
    reports: mpsc::Receiver<FromSource<Sql>>,
    runtime: Runtime,
    server: LocalServer,
    _directory: TempDir,
}

impl Rig {
    fn start(kind: Dialect) -> Self {
        Self::start_with(kind, None)
    }

    fn start_with(kind: Dialect, sessions: Option<PathBuf>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let server = LocalServer::start(kind, &directory.path().join("server")).unwrap();
        let runtime = Runtime::new().unwrap();
        let (report, reports) = mpsc::channel();
        let source = runtime.block_on(async {
            let mut client = Client::enter(&server.login()).await.unwrap();
            let made = "CREATE TABLE t (id INT PRIMARY KEY, v INT); INSERT INTO t VALUES (1, 0)";
            client.text(made).await.unwrap();
            let to = server.login().endpoint();
            Source::start(NODE, to, sessions, move |said| drop(report.send(said)))
        });
        Self { source, reports, runtime, server, _directory: directory }
    }

    fn order(&self, order: ToSource<Sql>) {
        let _entered = self.runtime.enter();
        self.source.order(order);
    }

    fn wait_for(&self, what: &str, is_it: impl Fn(&FromSource<Sql>) -> bool) {
        let mut before = Vec::new();
        loop {
            let said = self.reports.recv_timeout(PATIENCE).unwrap_or_else(|_| {
                panic!("awaited for {PATIENCE:?}: {what}; reported meanwhile: {before:?}")
            });
            if is_it(&said) {
                return;
            }
            before.push(said);
        }
    }

    fn run(&self, xid: Xid, statements: impl IntoIterator<Item = Statement>, then: Then) {
        let statements = statements.into_iter().collect();
        let begin = Some(Isolation::Serializable);
        let marks = Vec::new();
        self.order(ToSource::Run { xid, begin, marks, statements, then, wrote: true });
    }

    fn go_on(&self, xid: Xid, statement: Statement, then: Then) {
        self.go_on_after(xid, Vec::new(), statement, then);
    }

    fn go_on_after(&self, xid: Xid, marks: Vec<Mark>, statement: Statement, then: Then) {
        let statements = vec![statement];
        let begin = None;
        self.order(ToSource::Run { xid, begin, marks, statements, then, wrote: true });
    }

    /// The result of a transaction: the rows of its first answer, or why it failed.
    fn ran(&self, xid: Xid) -> Result<usize, Reason> {
        let of = |said: &FromSource<Sql>| match said {
            FromSource::Ran { xid: which, answers } if *which == xid => {
                Some(Ok(answers[0].rows.len()))
            }
            FromSource::RunFailed { xid: which, failure, .. } if *which == xid => {
                Some(Err(failure.reason))
            }
            // An interrupted MariaDB server may send nothing more; then its session is ended.
            FromSource::SessionLost { xid: which } if *which == xid => {
                Some(Err(Reason::Connection))
            }
            _ => None,
        };
        let found = std::cell::Cell::new(None);
        self.wait_for("ran", |said| {
            let is_it = of(said);
            let is_there = is_it.is_some();
            found.set(is_it);
            is_there
        });
        found.take().unwrap()
    }

    /// Waits until a branch waits for a lock.
    fn wait_until_locked(&self, xid: Xid) {
        self.wait_for("locked", |said| {
            matches!(said, FromSource::Waits { waits } if waits.iter().any(|wait| wait.waiter == xid))
        });
    }
}

fn xid(number: u64) -> Xid {
    Xid { middleware: NodeId(1), epoch: 1, number }
}

fn plain(text: impl Into<String>) -> Statement {
    let (prelude, keys) = (Vec::new(), Keys::default());
    Statement { prelude, text: text.into(), keys, settings: Vec::new(), may_leave: false }
}

fn record(id: usize) -> Record {
    Record { table: "t".into(), key: id.to_string(), condition: format!("\"id\" = '{id}'") }
}

fn insert(ids: impl Iterator<Item = usize>) -> Statement {
    let rows: Vec<String> = ids.map(|id| id.to_string()).collect();
    let inserted = rows.iter().map(|id| record(id.parse().unwrap())).collect();
    let keys = Keys { inserted, ..Keys::default() };
    let text = format!("INSERT INTO t VALUES ({}, 0)", rows.join(", 0), ("));
    Statement { keys, ..plain(text) }
}

fn select(id: usize) -> Statement {
    let keys = Keys { sought: vec![record(id)], ..Keys::default() };
    Statement { keys, ..plain(format!("SELECT v FROM t WHERE id = {id} FOR SHARE")) }
}

fn delete(id: usize) -> Statement {
    let keys = Keys { sought: vec![record(id)], is_delete: true, ..Keys::default() };
    Statement { keys, ..plain(format!("DELETE FROM t WHERE id = {id}")) }
}

/// A server that is interrupted while it commits a statement of a batch skips the rest of the
/// batch and sends nothing more.
#[test]
fn a_server_that_falls_silent_when_it_is_interrupted_keeps_nothing() {
    let rig = Rig::start(Dialect::MariaDb);
    for number in 1..=8 {
        let xid = xid(number);
        // The time between the statements of a branch is too short to hit; a commit is long
        // enough.
        let name = xid.at(NODE);
        let ends = [format!("XA END '{name}'"), format!("XA COMMIT '{name}' ONE PHASE")];
        let updates = (0..20).map(|_| "UPDATE t SET v = v + 1 WHERE id = 1".into());
        rig.run(xid, ends.into_iter().chain(updates).map(plain), Then::Wait);
        std::thread::sleep(Duration::from_micros(number * 500));
        rig.order(ToSource::Rollback { xid });
        rig.wait_for(
            "rolled back",
            |said| matches!(said, FromSource::RolledBack { xid: which } if *which == xid),
        );
    }
    // No lock remains.
    let login = rig.server.login();
    let free = login.client("SELECT v FROM t FOR UPDATE NOWAIT").output().unwrap();
    assert!(free.status.success(), "{}", String::from_utf8_lossy(&free.stderr));
}

/// An interrupt of a branch that has just ended does not hit the next one in its session.
#[test]
fn an_interrupt_that_comes_late_meets_nobody_else() {
    for kind in [Dialect::PostgreSql, Dialect::MariaDb] {
        let rig = Rig::start(kind);
        let (short, long) = match kind {
            Dialect::PostgreSql => ("SELECT v FROM t", "SELECT pg_sleep(0.005)"),
            Dialect::MariaDb => ("SELECT v FROM t", "SELECT SLEEP(0.005)"),
        };
        let (mut late, mut number) = (0, 0);
        // The longer the wait, the more likely the interrupt is late, however busy the machine
        // is.
        while number < 300 || late <= 30 {
            number += 1;
            assert!(number < 3_000, "{kind:?}: only {late} interrupts of {number} were late");
            let (first, next) = (xid(number * 2), xid(number * 2 + 1));
            rig.run(first, [plain(short)], Then::Commit);
            let wait = number % 30 * 20 * (1 + number / 300 * 10);
            std::thread::sleep(Duration::from_micros(wait));
            rig.order(ToSource::Interrupt { xid: first });
            let is_late = rig.ran(first).is_ok();
            late += u32::from(is_late);
            if is_late {
                rig.wait_for("committed", |said| {
                    matches!(said, FromSource::Committed { .. } | FromSource::Refused { .. })
                });
            } else {
                rig.order(ToSource::Rollback { xid: first });
                rig.wait_for("rolled back", |said| matches!(said, FromSource::RolledBack { .. }));
            }
            rig.run(next, [plain(long)], Then::Commit);
            assert_eq!(rig.ran(next), Ok(1), "{kind:?}, {number}");
            rig.wait_for("committed", |said| matches!(said, FromSource::Committed { .. }));
        }
    }
}

/// A server runs but refuses connections for a while. Afterwards it keeps no branch prepared,
/// although the end of the branch is ordered only once.
#[test]
fn a_prepared_branch_ends_when_the_server_lets_its_driver_in_again() {
    let rig = Rig::start(Dialect::PostgreSql);
    let xid = xid(1);
    rig.run(xid, [plain("UPDATE t SET v = 7 WHERE id = 1")], Then::Prepare);
    rig.wait_for("prepared", |said| matches!(said, FromSource::Prepared { .. }));
    rig.runtime.block_on(async {
        let mut owner = Client::enter(&rig.server.login()).await.unwrap();
        owner.text(&format!("ALTER ROLE {USER} NOLOGIN")).await.unwrap();
        let others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
                      WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'";
        owner.text(others).await.unwrap();
        rig.source.order(ToSource::CommitPrepared { xid, at: Timestamp::ZERO });
        rig.wait_for("lost", |said| matches!(said, FromSource::Down));
        // The order has been tried and has failed.
        tokio::time::sleep(AGAIN * 3).await;
        owner.text(&format!("ALTER ROLE {USER} LOGIN")).await.unwrap();
    });
    rig.wait_for("committed", |said| matches!(said, FromSource::Committed { .. }));
    let seen = rig.server.login().client("SELECT v FROM t").output().unwrap();
    assert_eq!(String::from_utf8_lossy(&seen.stdout).trim(), "7");
}

/// A statement that looks for a row which a prepared branch has inserted waits for the branch's
/// end, whatever its form.
#[test]
fn a_row_that_is_being_inserted_is_waited_for() {
    let rig = Rig::start(Dialect::PostgreSql);
    let mut number = 0;
    let mut next = || {
        number += 1;
        xid(number)
    };
    for (id, then, commits) in [
        (10, Then::Commit, true),
        (11, Then::Commit, false),
        (12, Then::Wait, true),
        (13, Then::Prepare, true),
    ] {
        let (writer, reader) = (next(), next());
        rig.run(writer, [insert(id..id + 1)], Then::Prepare);
        rig.wait_for("prepared", |said| matches!(said, FromSource::Prepared { .. }));
        rig.run(reader, [select(id)], then);
        rig.wait_until_locked(reader);
        if commits {
            rig.order(ToSource::CommitPrepared { xid: writer, at: Timestamp::ZERO });
            // Its snapshot was older than the row, so it has begun again.
            assert_eq!(rig.ran(reader), Ok(1), "{id}");
        } else {
            rig.order(ToSource::Rollback { xid: writer });
            assert_eq!(rig.ran(reader), Ok(0), "{id}");
        }
    }
}

/// An insert of a row waits for transactions that have looked for the row and not found it.
#[test]
fn a_row_that_was_missed_stays_missing() {
    let rig = Rig::start(Dialect::PostgreSql);
    // Many rows are locked through their tables' names.
    for (round, count) in [(0, 1), (1, NAMES_MAX), (2, NAMES_MAX + 1)] {
        let (reader, writer) = (xid(round * 2 + 1), xid(round * 2 + 2));
        let id = 1_000 * (round as usize + 1);
        rig.run(reader, [select(id)], Then::Wait);
        assert_eq!(rig.ran(reader), Ok(0));
        rig.run(writer, [insert(id..id + count)], Then::Commit);
        rig.wait_until_locked(writer);
        // Also in a later batch, and there it waits for nothing.
        rig.go_on(reader, select(id), Then::Prepare);
        assert_eq!(rig.ran(reader), Ok(0));
        rig.wait_for("prepared", |said| matches!(said, FromSource::Prepared { .. }));
        rig.order(ToSource::CommitPrepared { xid: reader, at: Timestamp::ZERO });
        assert_eq!(rig.ran(writer), Ok(0));
    }
}

/// A transaction does not conflict with its own deletes and inserts.
#[test]
fn a_transaction_does_not_stand_in_its_own_way() {
    let rig = Rig::start(Dialect::PostgreSql);
    let missing = 7;
    let texts = [
        vec![delete(1), select(1)],
        vec![delete(missing), select(missing)],
        vec![insert(2..3), select(2), delete(2), select(2)],
    ];
    for (number, statements) in (1..).zip(texts) {
        for (apart, then) in [(0, Then::Commit), (10, Then::Prepare)] {
            let xid = xid(number + apart);
            let (last, first) = statements.split_last().unwrap();
            rig.run(xid, first.to_vec(), Then::Wait);
            assert!(rig.ran(xid).is_ok(), "{xid}");
            rig.go_on(xid, last.clone(), then);
            assert_eq!(rig.ran(xid), Ok(0), "{xid}");
            rig.order(ToSource::Rollback { xid });
            rig.wait_for("rolled back", |said| {
                matches!(said, FromSource::RolledBack { .. } | FromSource::Committed { .. })
            });
        }
    }
    let whole = xid(100);
    rig.run(whole, [insert(1..2), delete(1), select(1)], Then::Commit);
    assert_eq!(rig.ran(whole), Ok(0));
}

/// A row that a transaction has deleted is missing for it afterwards and no conflict, whatever
/// has happened to the savepoints between.
#[test]
fn a_transaction_with_savepoints_does_not_stand_in_its_own_way() {
    let rig = Rig::start(Dialect::PostgreSql);
    let (set, release, back) = (Mark::Set, Mark::Release, Mark::Back);
    let steps = [
        // The savepoint is released, and then there is none or another one.
        vec![(vec![set(1)], delete(1)), (vec![release(1)], select(1))],
        vec![(vec![set(1)], delete(1)), (vec![release(1), set(2)], select(1))],
        // The row was locked before one savepoint and deleted after another.
        vec![(vec![set(1)], select(1)), (vec![set(2)], delete(1)), (vec![], select(1))],
        // The insert fails, and the lock that it had is taken again.
        vec![
            (vec![set(1)], delete(1)),
            (vec![release(1), set(2)], insert([1, 2].into_iter())),
            (vec![back(2)], insert(1..2)),
        ],
    ];
    rig.run(xid(100), [insert(2..3)], Then::Commit);
    rig.wait_for("committed", |said| matches!(said, FromSource::Committed { .. }));
    let ask = |client: &mut Client, text: &str| {
        rig.runtime.block_on(client.text(text)).unwrap();
    };
    let enter = || rig.runtime.block_on(Client::enter(&rig.server.login())).unwrap();
    let (mut older, mut writer) = (enter(), enter());
    for is_young in [false, true] {
        if is_young {
            // The row is younger than a transaction that runs all the time.
            ask(&mut older, "BEGIN; INSERT INTO t VALUES (50, 0)");
            ask(&mut writer, "UPDATE t SET v = v + 1 WHERE id = 1");
        }
        for (number, steps) in (1..).zip(&steps) {
            let xid = xid(number + if is_young { 10 } else { 0 });
            rig.run(xid, [plain("SELECT 1")], Then::Wait);
            assert_eq!(rig.ran(xid), Ok(1));
            let mut last = Err(Reason::Connection);
            for (marks, statement) in steps.clone() {
                rig.go_on_after(xid, marks, statement, Then::Wait);
                last = rig.ran(xid);
            }
            assert_eq!(last, Ok(0), "{number}, young: {is_young}");
            rig.order(ToSource::Rollback { xid });
            rig.wait_for("rolled back", |said| matches!(said, FromSource::RolledBack { .. }));
        }
    }
}

/// The columns of a query's result, without a time limit.
async fn columns(rig: &Rig, text: &str, settings: &[Setting]) -> Result<Vec<Column>, Trouble> {
    let found = rig.source.described_until(text, settings, std::future::pending()).await?;
    Ok(found.columns)
}

/// A query whose table another session has locked waits for the lock when it is described. The
/// source ends it when the proxy does not wait any more.
#[test]
fn a_description_that_waits_for_a_lock_can_be_interrupted() {
    let rig = Rig::start(Dialect::PostgreSql);
    rig.runtime.block_on(async {
        let mut owner = Client::enter(&rig.server.login()).await.unwrap();
        owner.text("BEGIN; LOCK TABLE t").await.unwrap();
        let stop = tokio::time::sleep(Duration::from_millis(300));
        let asked = rig.source.described_until("SELECT v FROM t", &[], stop);
        let ended = tokio::time::timeout(PATIENCE, asked).await.unwrap();
        assert!(matches!(&ended, Err(Trouble::Fault(fault)) if fault.is_interrupt()), "{ended:?}");
        let waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted";
        let answers = owner.text(waiting).await.unwrap();
        assert_eq!(answers[0].rows, [[Some(b"0".to_vec())]]);
    });
}

/// A server that describes a query does not run it.
#[test]
fn a_query_that_is_described_does_not_run() {
    for (kind, function) in [
        (
            Dialect::PostgreSql,
            "CREATE FUNCTION note() RETURNS int LANGUAGE sql AS \
             'UPDATE t SET v = v + 1 RETURNING v'",
        ),
        (
            Dialect::MariaDb,
            "CREATE FUNCTION note() RETURNS INT MODIFIES SQL DATA BEGIN \
             UPDATE t SET v = v + 1; RETURN 1; END",
        ),
    ] {
        let rig = Rig::start(kind);
        rig.runtime.block_on(async {
            let mut client = Client::enter(&rig.server.login()).await.unwrap();
            client.text(function).await.unwrap();
            let setting = match kind {
                Dialect::PostgreSql => Setting { name: "timezone".into(), value: "'-1'".into() },
                Dialect::MariaDb => Setting { name: "time_zone".into(), value: "'-01:00'".into() },
            };
            for settings in [vec![], vec![setting], vec![]] {
                for text in ["SELECT note() AS a, 'x' AS b", "SELECT v AS a, note() AS b FROM t"] {
                    let columns = columns(&rig, text, &settings).await.unwrap();
                    let names: Vec<&str> = columns.iter().map(|c| c.name.as_str()).collect();
                    assert_eq!(names, ["a", "b"], "{kind}");
                    assert_eq!(columns[0].kind, Kind::Int4, "{kind}");
                }
                let wrong = columns(&rig, "SELECT nothing FROM t", &settings).await;
                assert!(matches!(wrong, Err(Trouble::Fault(_))), "{kind}: {wrong:?}");
            }
            let answers = client.text("SELECT v FROM t").await.unwrap();
            assert_eq!(answers[0].rows, [[Some(b"0".to_vec())]], "{kind}");
        });
    }
}

/// A session of an earlier incarnation that owns a prepared branch, and whose connection lives
/// on, is ended before the branch is committed. The commit does not miss the branch.
#[test]
fn a_branch_is_committed_after_its_old_session_has_ended() {
    let rig = Rig::start(Dialect::MariaDb);
    // The start of the server is known.
    rig.wait_for("up", |said| matches!(said, FromSource::Up { .. }));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sessions");
    for number in 1..=10 {
        let xid = xid(number);
        let name = xid.at(NODE);
        let _old = rig.runtime.block_on(async {
            let mut old = Client::enter(&rig.server.login()).await.unwrap();
            let prepare = format!(
                "XA START '{name}'; UPDATE t SET v = {number} WHERE id = 1; XA END '{name}'; \
                 XA PREPARE '{name}'; SELECT connection_id()"
            );
            let answers = old.text(&prepare).await.unwrap();
            let id = answers.last().unwrap().rows[0][0].clone().unwrap();
            let start = rig.source.start.load(Ordering::Relaxed);
            let line = format!("{start} {}\n", String::from_utf8(id).unwrap());
            std::fs::write(&path, line).unwrap();
            old
        });
        let (report, reports) = mpsc::channel();
        let _entered = rig.runtime.enter();
        let to = rig.server.login().endpoint();
        let next = Source::start(NODE, to, Some(path.clone()), move |said| drop(report.send(said)));
        // At once, before the new incarnation has reached the server.
        next.order(ToSource::CommitPrepared { xid, at: Timestamp::ZERO });
        loop {
            match reports.recv_timeout(PATIENCE).unwrap() {
                FromSource::Committed { .. } => break,
                FromSource::Gone { .. } => panic!("{number}: the commit missed the branch"),
                _ => {}
            }
        }
        let seen = rig.server.login().client("SELECT v FROM t").output().unwrap();
        assert_eq!(String::from_utf8_lossy(&seen.stdout).trim(), number.to_string());
    }
}

/// A driver that reaches its server again keeps the sessions that live on in its list.
#[test]
fn sessions_that_live_on_stay_in_the_list() {
    for kind in [Dialect::PostgreSql, Dialect::MariaDb] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sessions");
        let rig = Rig::start_with(kind, Some(path.clone()));
        rig.wait_for("up", |said| matches!(said, FromSource::Up { .. }));
        let xid = xid(1);
        rig.run(xid, [plain("UPDATE t SET v = 7 WHERE id = 1")], Then::Wait);
        assert!(rig.ran(xid).is_ok());
        let own = rig.source.slot(xid).unwrap().session_id().unwrap();
        let is_listed = || {
            let text = std::fs::read_to_string(&path).unwrap();
            text.lines().any(|line| line.ends_with(&format!(" {own}")))
        };
        assert!(is_listed(), "{kind}");
        // All other sessions end, among them the one that watches the server.
        let others = match kind {
            Dialect::PostgreSql => {
                format!(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> {own} AND \
                     pid <> pg_backend_pid() AND backend_type = 'client backend'"
                )
            }
            Dialect::MariaDb => "SELECT id FROM information_schema.processlist".into(),
        };
        rig.runtime.block_on(async {
            let mut client = Client::enter(&rig.server.login()).await.unwrap();
            let answers = client.text(&others).await.unwrap();
            if kind == Dialect::MariaDb {
                let mine = client.text("SELECT connection_id()").await.unwrap();
                let mine = mine[0].rows[0][0].clone().unwrap();
                for id in answers[0].rows.iter().flatten().flatten() {
                    let id = String::from_utf8(id.clone()).unwrap();
                    if id != own.to_string() && id.as_bytes() != mine {
                        // It may have ended already.
                        let _ = client.text(&format!("KILL CONNECTION {id}")).await;
                    }
                }
            }
        });
        rig.wait_for("down", |said| matches!(said, FromSource::Down));
        rig.wait_for("up", |said| matches!(said, FromSource::Up { .. }));
        assert!(is_listed(), "{kind}");
        rig.order(ToSource::Rollback { xid });
        rig.wait_for("rolled back", |said| matches!(said, FromSource::RolledBack { .. }));
    }
}

/// A row is a conflict too if its number is lower than those in the snapshot's list, because a
/// savepoint of a running transaction has inserted it.
#[test]
fn a_row_that_a_savepoint_of_a_running_transaction_inserts_is_a_conflict() {
    let rig = Rig::start(Dialect::PostgreSql);
    let reader = xid(1);
    rig.runtime.block_on(async {
        let mut other = Client::enter(&rig.server.login()).await.unwrap();
        let inserting =
            "BEGIN; INSERT INTO t VALUES (20, 0); SAVEPOINT a; INSERT INTO t VALUES (21, 0)";
        other.text(inserting).await.unwrap();
        // With this the number of the savepoint is below the end of the snapshot.
        let mut third = Client::enter(&rig.server.login()).await.unwrap();
        third.text("UPDATE t SET v = 1 WHERE id = 1").await.unwrap();
        rig.source.order(ToSource::Run {
            xid: reader,
            begin: Some(Isolation::Serializable),
            marks: Vec::new(),
            statements: vec![select(1)],
            then: Then::Wait,
            wrote: false,
        });
        assert_eq!(rig.ran(reader), Ok(1));
        other.text("COMMIT").await.unwrap();
    });
    rig.go_on(reader, select(21), Then::Wait);
    assert_eq!(rig.ran(reader), Err(Reason::Serialization));
}
