//! The mode `near`: transactions that are answered from copies and executed at COMMIT.

use std::time::Instant;

use orthodrome_geotp::sql::Dialect;
use orthodrome_middleware::local::{Client, Refused};
use tokio::runtime::Runtime;

use crate::rig::{PATIENCE, Rig, Setup, rig, said, wait};

const KINDS: [Dialect; 2] = [Dialect::PostgreSql, Dialect::MariaDb];

fn start(rig: &mut Rig, servers: &[usize], agents: bool) {
    let mut setup = Setup::accounts(servers, agents);
    setup.settings = "mode = \"near\"\n".into();
    rig.start_bank_as(setup);
}

async fn text(client: &mut Client, text: &str) -> Vec<String> {
    let answers = client.text(text).await.unwrap_or_else(|error| panic!("{text}: {error}"));
    let rows = answers.iter().flat_map(|answer| &answer.rows);
    let cell = |cell: &Option<Vec<u8>>| {
        cell.as_ref().map_or("NULL".into(), |cell| String::from_utf8_lossy(cell).into_owned())
    };
    rows.map(|row| row.iter().map(cell).collect::<Vec<_>>().join("|")).collect()
}

async fn changes(client: &mut Client, text: &str) -> u64 {
    let answers = client.text(text).await.unwrap_or_else(|error| panic!("{text}: {error}"));
    answers.iter().map(|answer| answer.affected).sum()
}

async fn state(client: &mut Client, text: &str) -> String {
    match client.text(text).await {
        Ok(_) => "committed".into(),
        Err(Refused::Fault(fault)) => fault.sqlstate,
        Err(Refused::Broken(error)) => panic!("{text}: {error}"),
    }
}

impl Rig {
    /// A query's rows at the server itself.
    fn at(&self, server: usize, text: &str) -> String {
        said(text, self.servers[server].login())
    }

    fn stored(&self, id: u64) -> String {
        let server = if id < 100 { 0 } else { 1 };
        let place = self.places()[server];
        self.at(place, &format!("SELECT balance FROM accounts WHERE id = {id}"))
    }
}

/// Clients of both kinds move money within a source and between two. Nothing reaches a source
/// before COMMIT.
fn moves_money(servers: &[usize], agents: bool) {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    start(rig, servers, agents);
    let mut moved = 0;
    Runtime::new().unwrap().block_on(async {
        for kind in KINDS {
            let mut client = Client::enter(&rig.login(kind)).await.unwrap();
            for (from, to) in [(1, 2), (1, 101), (101, 2)] {
                // Until the sources have committed what this client has changed before, it reads
                // such rows with locks.
                rig.finish();
                text(&mut client, "BEGIN").await;
                let read = format!("SELECT balance FROM accounts WHERE id = {from}");
                let before: i64 = text(&mut client, &read).await[0].parse().unwrap();
                assert_eq!(text(&mut client, &read).await, [before.to_string()]);
                let less = format!("UPDATE accounts SET balance = balance - 1 WHERE id = {from}");
                assert_eq!(changes(&mut client, &less).await, 1);
                let more = format!("UPDATE accounts SET balance = balance + 1 WHERE id = {to}");
                assert_eq!(changes(&mut client, &more).await, 1);
                let none = "UPDATE accounts SET balance = 0 WHERE id = 55";
                assert_eq!(changes(&mut client, none).await, 0);
                let open: String = servers.iter().map(|&at| open(rig, at)).collect();
                assert_eq!(open, "00", "a source knows the transaction before COMMIT");
                text(&mut client, "COMMIT").await;
                moved += 1;
                // The next transaction of the same connection sees it.
                text(&mut client, "BEGIN").await;
                assert_eq!(text(&mut client, &read).await, [(before - 1).to_string()]);
                text(&mut client, "ROLLBACK").await;
            }
        }
    });
    assert_eq!(rig.noted("NearCommitted"), moved, "{}", rig.log());
    rig.finish();
    rig.settle("moving money");
}

/// Number of open transactions of the proxy at a server that have done something.
fn open(rig: &Rig, server: usize) -> String {
    match rig.servers[server].kind {
        Dialect::PostgreSql => {
            let text = "SELECT count(*) FROM pg_stat_activity \
                        WHERE state = 'idle in transaction' AND usename = 'orthodrome'";
            rig.at(server, text)
        }
        // `information_schema.innodb_trx` may show what was a tenth of a second ago.
        Dialect::MariaDb => {
            let status = rig.at(server, "SHOW ENGINE INNODB STATUS");
            // Above this, it tells of the latest deadlock.
            let (_, status) = status.split_once("LIST OF TRANSACTIONS FOR EACH SESSION").unwrap();
            let (all, without) = ("row lock(s)", " 0 row lock(s)");
            (status.matches(all).count() - status.matches(without).count()).to_string()
        }
    }
}

#[test]
fn money_moves_on_postgresql_and_no_source_knows_before_commit() {
    moves_money(&[0, 2], false);
}

#[test]
fn money_moves_on_mariadb_and_no_source_knows_before_commit() {
    moves_money(&[1, 3], false);
}

#[test]
fn money_moves_on_both_with_agents_and_no_source_knows_before_commit() {
    moves_money(&[0, 1], true);
}

/// What a transaction was told before a change of another client at the server itself, and what
/// happens at its COMMIT.
fn differs(servers: &[usize]) {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    start(rig, servers, false);
    let there = servers[0];
    let cases = [
        (
            "SELECT balance FROM accounts WHERE id = 1",
            "UPDATE accounts SET balance = balance + 5 WHERE id = 1",
        ),
        ("SELECT balance FROM accounts WHERE id = 2", "DELETE FROM accounts WHERE id = 2"),
        ("SELECT balance FROM accounts WHERE id = 50", "INSERT INTO accounts VALUES (50, 7)"),
        (
            "SELECT balance FROM accounts WHERE id IN (3, 51)",
            "INSERT INTO accounts VALUES (51, 1000)",
        ),
        (
            "UPDATE accounts SET balance = balance + 1 WHERE id = 4",
            "DELETE FROM accounts WHERE id = 4",
        ),
        (
            "UPDATE accounts SET balance = balance + 1 WHERE id = 52",
            "INSERT INTO accounts VALUES (52, 7)",
        ),
        (
            "UPDATE accounts SET balance = 0 WHERE id = 5 AND balance = 1000",
            "UPDATE accounts SET balance = 999 WHERE id = 5",
        ),
        ("DELETE FROM accounts WHERE id = 6", "DELETE FROM accounts WHERE id = 6"),
    ];
    Runtime::new().unwrap().block_on(async {
        for kind in KINDS {
            let mut client = Client::enter(&rig.login(kind)).await.unwrap();
            for (statement, change) in cases {
                for (also, expected) in [("", "committed"), (change, "40001")] {
                    for id in [1, 2, 3, 4, 5, 6] {
                        let row = format!("DELETE FROM accounts WHERE id = {id}");
                        rig.at(there, &row);
                        rig.at(there, &format!("INSERT INTO accounts VALUES ({id}, 1000)"));
                    }
                    rig.at(there, "DELETE FROM accounts WHERE id BETWEEN 21 AND 99");
                    let before = rig.stored(101);
                    text(&mut client, "BEGIN").await;
                    client.text(statement).await.unwrap();
                    // The other source must not keep this if the first one differs.
                    let other = "UPDATE accounts SET balance = balance + 1 WHERE id = 101";
                    assert_eq!(changes(&mut client, other).await, 1);
                    if !also.is_empty() {
                        rig.at(there, also);
                    }
                    let outcome = state(&mut client, "COMMIT").await;
                    assert_eq!(outcome, expected, "{}\n{kind}: {statement}, {also}", rig.log());
                    rig.finish();
                    let grown = rig.stored(101) != before;
                    assert_eq!(grown, expected == "committed", "{kind}: {statement}, {also}");
                }
            }
        }
    });
}

#[test]
fn a_transaction_whose_answers_were_overtaken_is_rolled_back_on_postgresql() {
    differs(&[0, 2]);
}

#[test]
fn a_transaction_whose_answers_were_overtaken_is_rolled_back_on_mariadb() {
    differs(&[1, 3]);
}

/// A transaction that holds locks has looked for a row and found none, and has made the answer of
/// another transaction wrong. The other one inserts that row at its COMMIT, waits for the locks, and
/// must then notice the change: otherwise each would come before the other.
fn waits_and_notices(servers: &[usize]) {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    let mut setup = Setup::accounts(servers, false);
    setup.settings = "mode = \"near\"\n".into();
    // Nobody gives up before the test has seen the wait.
    setup.lock_wait_ms = 2 * PATIENCE.as_millis() as u32;
    rig.start_bank_as(setup);
    let there = servers[0];
    let waits = match rig.servers[there].kind {
        Dialect::PostgreSql => "SELECT count(*) FROM pg_locks WHERE NOT granted",
        // The server answers from a cache about single transactions, as long as it is asked often.
        Dialect::MariaDb => {
            "SELECT variable_value FROM information_schema.global_status \
             WHERE variable_name = 'INNODB_ROW_LOCK_CURRENT_WAITS'"
        }
    };
    let cases = [
        // The row is missing.
        (
            "SELECT balance FROM accounts WHERE id = 50",
            "INSERT INTO accounts (id, balance) VALUES (50, 1)",
        ),
        // The row does not meet another condition.
        (
            "SELECT balance FROM accounts WHERE id = 5 AND balance > 5000",
            "UPDATE accounts SET balance = 6000 WHERE id = 5",
        ),
        (
            "UPDATE accounts SET balance = 0 WHERE id = 5 AND balance > 5000",
            "UPDATE accounts SET balance = 6000 WHERE id = 5",
        ),
    ];
    Runtime::new().unwrap().block_on(async {
        for (read, change) in cases {
            rig.at(there, "UPDATE accounts SET balance = 1000 WHERE id = 5");
            rig.at(there, "DELETE FROM accounts WHERE id BETWEEN 21 AND 99");
            let login = rig.login(Dialect::PostgreSql);
            let mut holder = Client::enter(&login).await.unwrap();
            let mut other = Client::enter(&login).await.unwrap();
            text(&mut holder, "BEGIN").await;
            let none = "SELECT balance FROM accounts WHERE id = 60 FOR UPDATE";
            assert_eq!(text(&mut holder, none).await, [""; 0]);
            assert_eq!(changes(&mut holder, change).await, 1);
            text(&mut other, "BEGIN").await;
            assert_eq!(text(&mut other, read).await, [""; 0]);
            let insert = "INSERT INTO accounts (id, balance) VALUES (60, 1)";
            assert_eq!(changes(&mut other, insert).await, 1);
            let commit = tokio::spawn(async move { state(&mut other, "COMMIT").await });
            let is_waiting = || rig.at(there, waits) != "0";
            wait(Instant::now() + PATIENCE, is_waiting)
                .unwrap_or_else(|| panic!("{}\n{read}: nothing waits", rig.log()));
            assert_eq!(state(&mut holder, "COMMIT").await, "committed", "{read}");
            assert_eq!(commit.await.unwrap(), "40001", "{}\n{read}", rig.log());
            rig.finish();
        }
    });
}

#[test]
fn a_row_that_is_missing_or_not_met_is_locked_before_it_is_read_on_postgresql() {
    waits_and_notices(&[0, 2]);
}

#[test]
fn a_row_that_is_missing_or_not_met_is_locked_before_it_is_read_on_mariadb() {
    waits_and_notices(&[1, 3]);
}

/// A client whose rows change again and again takes locks at its fourth try.
fn perseveres(servers: &[usize]) {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    start(rig, servers, false);
    let there = servers[0];
    let read = "SELECT balance FROM accounts WHERE id = 1";
    Runtime::new().unwrap().block_on(async {
        for kind in KINDS {
            let mut client = Client::enter(&rig.login(kind)).await.unwrap();
            for _ in 0..3 {
                text(&mut client, "BEGIN").await;
                text(&mut client, read).await;
                rig.at(there, "UPDATE accounts SET balance = balance + 1 WHERE id = 1");
                let outcome = state(&mut client, "COMMIT").await;
                assert_eq!(outcome, "40001", "{}\n{kind}", rig.log());
            }
            for locks in ["1", "0"] {
                text(&mut client, "BEGIN").await;
                text(&mut client, read).await;
                assert_eq!(open(rig, there), locks, "{}\n{kind}", rig.log());
                assert_eq!(state(&mut client, "COMMIT").await, "committed");
                rig.finish();
            }
        }
    });
}

#[test]
fn a_client_that_was_overtaken_three_times_takes_locks_on_postgresql() {
    perseveres(&[0, 2]);
}

#[test]
fn a_client_that_was_overtaken_three_times_takes_locks_on_mariadb() {
    perseveres(&[1, 3]);
}

/// Statements whose answers cannot be foreseen run at the source, after what was remembered.
fn goes_on(servers: &[usize]) {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    start(rig, servers, false);
    Runtime::new().unwrap().block_on(async {
        for (round, kind) in KINDS.into_iter().enumerate() {
            let mut client = Client::enter(&rig.login(kind)).await.unwrap();
            let expected = |times: usize| (1000 + times).to_string();
            for statement in [
                "SELECT balance FROM accounts WHERE balance > 1000 AND id < 50",
                "SELECT balance FROM accounts WHERE id = 7 FOR UPDATE",
                "SELECT max(balance) FROM accounts WHERE id < 99",
                "SELECT balance FROM accounts WHERE id = 7",
            ] {
                let more = "UPDATE accounts SET balance = balance + 1 WHERE id = 7";
                text(&mut client, "BEGIN").await;
                assert_eq!(changes(&mut client, more).await, 1);
                let seen = text(&mut client, statement).await;
                assert_eq!(seen, [expected(1 + round)], "{kind}: {statement}");
                text(&mut client, "ROLLBACK").await;
            }
            // A savepoint, and a failure after it.
            text(&mut client, "BEGIN").await;
            changes(&mut client, "UPDATE accounts SET balance = balance + 1 WHERE id = 7").await;
            text(&mut client, "SAVEPOINT a").await;
            changes(&mut client, "UPDATE accounts SET balance = 0 WHERE id = 7").await;
            text(&mut client, "ROLLBACK TO SAVEPOINT a").await;
            text(&mut client, "COMMIT").await;
            // A row that exists is reported by the source, in its own words.
            text(&mut client, "BEGIN").await;
            changes(&mut client, "INSERT INTO accounts (id, balance) VALUES (30, 1)").await;
            let again =
                state(&mut client, "INSERT INTO accounts (id, balance) VALUES (30, 2)").await;
            assert_eq!(again, if kind == Dialect::PostgreSql { "23505" } else { "23000" });
            text(&mut client, "ROLLBACK").await;
        }
    });
    rig.finish();
    assert_eq!(rig.stored(7), "1002");
}

#[test]
fn what_cannot_be_foreseen_runs_at_the_source_on_postgresql() {
    goes_on(&[0, 2]);
}

#[test]
fn what_cannot_be_foreseen_runs_at_the_source_on_mariadb() {
    goes_on(&[1, 3]);
}

/// A change of settings sends what was remembered with the old ones; an order of several rows, which
/// nobody would compare, comes from the source; and many changes of one row stay one short query.
fn is_careful(servers: &[usize]) {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    start(rig, servers, false);
    let there = servers[0];
    Runtime::new().unwrap().block_on(async {
        for (round, kind) in (1..).zip(KINDS) {
            let mut client = Client::enter(&rig.login(kind)).await.unwrap();
            let read = "SELECT balance FROM accounts WHERE id = 9";
            let setting = match kind {
                Dialect::PostgreSql => "SET LOCAL lock_timeout = 7000",
                Dialect::MariaDb => "SET time_zone = '+01:00'",
            };
            for (then, is_sent) in [
                ("SELECT id FROM accounts WHERE id = 9 ORDER BY balance DESC", false),
                ("SELECT id FROM accounts WHERE id IN (9, 10) ORDER BY balance DESC", true),
                (setting, true),
            ] {
                rig.finish();
                text(&mut client, "BEGIN").await;
                text(&mut client, read).await;
                text(&mut client, then).await;
                if is_sent {
                    wait(Instant::now() + PATIENCE, || open(rig, there) == "1")
                        .unwrap_or_else(|| panic!("{kind}: {then}\n{}", rig.log()));
                } else {
                    assert_eq!(open(rig, there), "0", "{kind}: {then}\n{}", rig.log());
                }
                text(&mut client, "ROLLBACK").await;
            }
            text(&mut client, "BEGIN").await;
            for _ in 0..12 {
                let less = "UPDATE accounts SET balance = balance - 1 WHERE id = 8 AND balance > 0";
                assert_eq!(changes(&mut client, less).await, 1);
            }
            assert_eq!(state(&mut client, "COMMIT").await, "committed", "{}", rig.log());
            rig.finish();
            assert_eq!(rig.stored(8), (1000 - 12 * round).to_string());
        }
    });
}

#[test]
fn settings_orders_and_many_changes_are_noticed_on_postgresql() {
    is_careful(&[0, 2]);
}

#[test]
fn settings_orders_and_many_changes_are_noticed_on_mariadb() {
    is_careful(&[1, 3]);
}

/// A trigger changes a row that the transaction has read and reads again: the second answer is not
/// taken from the first.
#[test]
fn a_row_that_a_trigger_changes_is_compared_each_time() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    start(rig, &[0, 2], false);
    rig.at(
        0,
        "CREATE OR REPLACE FUNCTION mirror() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
         UPDATE accounts SET balance = balance + 1 WHERE id = 2; RETURN NEW; END $$; \
         CREATE TRIGGER mirror AFTER UPDATE ON accounts FOR EACH ROW WHEN (NEW.id = 1) \
         EXECUTE FUNCTION mirror()",
    );
    Runtime::new().unwrap().block_on(async {
        let mut client = Client::enter(&rig.login(Dialect::PostgreSql)).await.unwrap();
        let read = "SELECT balance FROM accounts WHERE id = 2";
        text(&mut client, "BEGIN").await;
        text(&mut client, read).await;
        changes(&mut client, "UPDATE accounts SET balance = balance - 1 WHERE id = 1").await;
        let again = text(&mut client, read).await;
        let outcome = state(&mut client, "COMMIT").await;
        assert!(outcome == "40001" || again == ["1001"], "told {again:?}, {outcome}");
    });
    rig.finish();
    rig.at(0, "DROP TRIGGER mirror ON accounts");
}

/// The source generates a key, and a MySQL client is told which, within the transaction.
#[test]
fn a_generated_key_is_told_before_commit() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    // Another test may have left one there.
    for server in &rig.servers {
        said("DROP TABLE IF EXISTS notes", server.login());
    }
    start(rig, &[1, 3], false);
    rig.mysql(
        "CREATE TABLE notes (id INT PRIMARY KEY AUTO_INCREMENT, body VARCHAR(20)) ENGINE=InnoDB",
    );
    Runtime::new().unwrap().block_on(async {
        let mut client = Client::enter(&rig.login(Dialect::MariaDb)).await.unwrap();
        text(&mut client, "BEGIN").await;
        assert_eq!(text(&mut client, "SELECT balance FROM accounts WHERE id = 6").await, ["1000"]);
        for (insert, key) in [
            ("INSERT INTO notes (body) VALUES ('a')", "1"),
            ("INSERT INTO notes (body) VALUES ('b'), ('c')", "2"),
        ] {
            changes(&mut client, insert).await;
            assert_eq!(text(&mut client, "SELECT LAST_INSERT_ID()").await, [key], "{insert}");
        }
        assert_eq!(state(&mut client, "COMMIT").await, "committed", "{}", rig.log());
    });
    assert_eq!(rig.mysql("SELECT id, body FROM notes ORDER BY id"), "1\ta\n2\tb\n3\tc");
    rig.finish();
    rig.settle_branches("the last row");
    rig.mysql("DROP TABLE notes");
}

/// A table gets a column after a client has read a row of it with `*`: the client has an answer that
/// nobody would get now.
fn gets_a_column(servers: &[usize], kind: Dialect) {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    start(rig, servers, false);
    let there = servers[0];
    Runtime::new().unwrap().block_on(async {
        let mut client = Client::enter(&rig.login(kind)).await.unwrap();
        let read = "SELECT * FROM accounts WHERE id = 6";
        text(&mut client, "BEGIN").await;
        assert_eq!(text(&mut client, read).await, ["6|1000"]);
        assert_eq!(open(rig, there), "0", "the source knows the transaction before COMMIT");
        rig.at(there, "ALTER TABLE accounts ADD COLUMN note int");
        let outcome = state(&mut client, "COMMIT").await;
        assert_ne!(outcome, "committed", "{}", rig.log());
    });
    rig.finish();
}

#[test]
fn a_column_that_was_added_is_noticed_on_postgresql() {
    gets_a_column(&[0, 2], Dialect::PostgreSql);
}

#[test]
fn a_column_that_was_added_is_noticed_on_mariadb() {
    gets_a_column(&[1, 3], Dialect::MariaDb);
}

/// Rows come from a replica, and a replica that lags costs an abort.
#[test]
fn a_replica_that_lags_is_noticed_at_commit() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    let server = &rig.servers[2];
    let directory = rig.path("replica2");
    let replica = server.start_replica(&directory, server.port).unwrap();
    let mut setup = Setup::accounts(&[0, 2], false);
    setup.settings = "mode = \"near\"\n".into();
    setup.replicas = [(2, replica.port)].into();
    rig.start_bank_as(setup);
    let read = "SELECT balance FROM accounts WHERE id = 101";
    let more = "UPDATE accounts SET balance = balance + 1 WHERE id = 101";
    let there = || said(read, replica.login());
    let is_there = |balance: &str| wait(Instant::now() + PATIENCE, || there() == balance);
    let has_row =
        || replica.login().client(read).output().is_ok_and(|output| output.stdout == b"1000\n");
    wait(Instant::now() + PATIENCE, has_row).expect("the replica does not follow");
    Runtime::new().unwrap().block_on(async {
        let login = rig.login(Dialect::PostgreSql);
        let mut writer = Client::enter(&login).await.unwrap();
        let mut reader = Client::enter(&login).await.unwrap();
        said("SELECT pg_wal_replay_pause()", replica.login());
        text(&mut writer, "BEGIN").await;
        assert_eq!(changes(&mut writer, more).await, 1);
        assert_eq!(text(&mut writer, read).await, ["1001"], "its own change");
        text(&mut writer, "COMMIT").await;
        // The client that has changed the row sees that; another one sees what the replica has.
        text(&mut writer, "BEGIN").await;
        assert_eq!(text(&mut writer, read).await, ["1001"], "its own commit");
        assert_eq!(state(&mut writer, "COMMIT").await, "committed");
        text(&mut reader, "BEGIN").await;
        assert_eq!(text(&mut reader, read).await, ["1000"]);
        assert_eq!(changes(&mut reader, more).await, 1);
        assert_eq!(state(&mut reader, "COMMIT").await, "40001");
        said("SELECT pg_wal_replay_resume()", replica.login());
        is_there("1001").expect("the replica does not go on");
        text(&mut reader, "BEGIN").await;
        assert_eq!(text(&mut reader, read).await, ["1001"]);
        assert_eq!(changes(&mut reader, more).await, 1);
        assert_eq!(state(&mut reader, "COMMIT").await, "committed");
    });
    // Without the replica, the source answers.
    drop(replica);
    Runtime::new().unwrap().block_on(async {
        let mut client = Client::enter(&rig.login(Dialect::PostgreSql)).await.unwrap();
        text(&mut client, "BEGIN").await;
        assert_eq!(text(&mut client, read).await, ["1002"]);
        assert_eq!(state(&mut client, "COMMIT").await, "committed");
    });
    assert_eq!((rig.noted("NearDiffered"), rig.noted("NearSilent")), (1, 1), "{}", rig.log());
    rig.finish();
}
