//! Errors for clients: the same at each try, with the codes of their own protocol.

use std::time::Instant;

use orthodrome_geotp::sql::Dialect;
use orthodrome_middleware::local::{Client, Login, Refused};
use tokio::runtime::Runtime;

use crate::rig::{PATIENCE, Rig, Setup, all_of, rig, said, wait};
use crate::sessions::Talk;

/// The code and the message with which a query batch is refused: SQLSTATE for PostgreSQL clients,
/// the number for MySQL clients.
async fn refused(client: &mut Client, kind: Dialect, text: &str) -> (String, String) {
    match client.text(text).await {
        Ok(_) => panic!("{text}: was carried out"),
        Err(Refused::Broken(error)) => panic!("{text}: {error}"),
        Err(Refused::Fault(fault)) => {
            let code = match kind {
                Dialect::PostgreSql => fault.sqlstate,
                Dialect::MariaDb => fault.number.to_string(),
            };
            (code, fault.message)
        }
    }
}

/// Both kinds of clients get this error, at every try.
fn are_told(rig: &Rig, text: &str, postgres: &str, maria: &str) {
    Runtime::new().unwrap().block_on(async {
        for (kind, code) in [(Dialect::PostgreSql, postgres), (Dialect::MariaDb, maria)] {
            let mut client = Client::enter(&rig.login(kind)).await.unwrap();
            for attempt in 0..15 {
                let (told, words) = refused(&mut client, kind, text).await;
                assert_eq!(told, code, "{}\n{kind}, {attempt}: {text}: {words}", rig.log());
                client.text("ROLLBACK").await.unwrap();
            }
        }
    });
}

/// Whichever source is faster, and whichever branch is interrupted: a duplicate key is reported as
/// one at every retry.
#[test]
fn a_violated_constraint_is_told_as_such_and_not_as_a_conflict() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    for agents in [true, false] {
        rig.start_bank(&[0, 1], agents);
        for text in [
            "INSERT INTO accounts (id, balance) VALUES (1, 0), (101, 0)",
            "BEGIN; INSERT INTO accounts (id, balance) VALUES (101, 0), (1, 0); COMMIT",
            "BEGIN; UPDATE accounts SET balance = 0 WHERE id = 102; \
             INSERT INTO accounts (id, balance) VALUES (1, 0); COMMIT",
            "BEGIN; UPDATE accounts SET balance = 0 WHERE id = 2; \
             INSERT INTO accounts (id, balance) VALUES (101, 0); COMMIT",
        ] {
            are_told(rig, text, "23505", "1062");
        }
        for id in [50, 150] {
            let text = format!("INSERT INTO accounts (id, balance) VALUES ({id}, NULL)");
            are_told(rig, &text, "23502", "1048");
        }
        rig.settle("violated constraints");
    }
}

#[test]
fn settings_and_databases_that_are_not_there_are_refused() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start_bank(&[0, 1], false);
    are_told(rig, "SET foo = 1", "42704", "1193");
    Runtime::new().unwrap().block_on(async {
        let mut postgres = Client::enter(&rig.login(Dialect::PostgreSql)).await.unwrap();
        let (code, _) = refused(&mut postgres, Dialect::PostgreSql, "RESET foo").await;
        assert_eq!(code, "42704");
        for known in ["SET work_mem = '4MB'", "SET myapp.user = 'a'", "SET application_name = 'x'"]
        {
            postgres.text(known).await.unwrap();
        }
        let mut maria = Client::enter(&rig.login(Dialect::MariaDb)).await.unwrap();
        for (text, code) in
            [("USE foo", "1049"), ("SET sql_mode = '', foo = 1", "1193"), ("SET @mine = 1", "1235")]
        {
            let (told, words) = refused(&mut maria, Dialect::MariaDb, text).await;
            assert_eq!(told, code, "{text}: {words}");
        }
        for known in [
            "USE bank",
            "SET max_heap_table_size = 16384",
            "SET NAMES utf8mb4",
            "SET sql_mode = ''",
        ] {
            maria.text(known).await.unwrap_or_else(|error| panic!("{known}: {error}"));
        }
        for (kind, code) in [(Dialect::PostgreSql, "3D000"), (Dialect::MariaDb, "42000")] {
            let login = Login { database: "nodb", ..rig.login(kind) };
            match Client::enter(&login).await {
                Err(Refused::Fault(fault)) => assert_eq!(fault.sqlstate, code, "{kind}"),
                Err(Refused::Broken(error)) => panic!("{kind}: {error}"),
                Ok(_) => panic!("{kind}: came into a database that is not there"),
            }
        }
    });
}

#[test]
fn changes_of_the_schema_have_postgresql_s_tags() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start_bank(&[0, 1], false);
    for (text, tag) in [
        ("CREATE UNIQUE INDEX extra ON accounts (id, balance)", "CREATE INDEX"),
        ("TRUNCATE accounts", "TRUNCATE TABLE"),
        ("-- a comment\nALTER TABLE accounts ADD COLUMN note text", "ALTER TABLE"),
        ("DROP TABLE IF EXISTS accounts", "DROP TABLE"),
    ] {
        let output = rig.psql_by("").args(["-c", text]).output().unwrap();
        let told = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        assert_eq!(told, tag, "{text}: {}", all_of(&output));
    }
}

/// A PostgreSQL server parses a whole query batch before it runs any of it.
#[test]
fn a_statement_that_a_source_cannot_read_is_told_as_such() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    for agents in [false, true] {
        rig.start_bank(&[0, 1], agents);
        for id in [1, 101] {
            let mut maria = Talk::begin(rig, Dialect::MariaDb);
            let read = format!("SELECT balance FROM accounts WHERE id = {id}");
            for (text, code) in [
                (format!("{read} AND (1 XOR 0)"), "1064"),
                // The proxy writes this one in the form that both kinds of sources read.
                (format!("INSERT INTO accounts SET id = {id}, balance = 1"), "1062"),
                (format!("SELECT no_such_function(id) FROM accounts WHERE id = {id}"), "1305"),
            ] {
                // At their own kind of source some of these are valid statements.
                let is_told = |talk: &mut Talk| {
                    if id == 1 {
                        assert_eq!(talk.refused(&text), code, "{text}");
                    } else {
                        let _ = talk.text(&text);
                    }
                };
                is_told(&mut maria);
                assert_eq!(maria.shows(&read), "1000", "{text}");
                maria.does("BEGIN");
                is_told(&mut maria);
                assert_eq!(maria.shows(&read), "1000", "{text}");
                maria.does("COMMIT");
            }
            assert_eq!(maria.shows(&format!("{read} LIMIT 0, 1")), "1000");
        }
        rig.settle("statements that cannot be read");
    }
}

#[test]
fn a_statement_that_is_too_long_is_refused_and_the_connection_goes_on() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    for agents in [false, true] {
        rig.start_bank(&[0, 1], agents);
        for (kind, code) in [(Dialect::PostgreSql, "54000"), (Dialect::MariaDb, "1153")] {
            let mut talk = Talk::begin(rig, kind);
            let update = |id: u32, bytes: usize| {
                let text = "x".repeat(bytes);
                format!("UPDATE accounts SET balance = length('{text}') WHERE id = {id}")
            };
            // A MariaDB server accepts 16 MiB by default.
            let long = update(101, 17 << 20);
            assert_eq!(talk.refused(&long), code, "{kind}");
            talk.does("BEGIN");
            assert_eq!(talk.refused(&long), code, "{kind}");
            talk.does("ROLLBACK");
            assert_eq!(talk.shows("SELECT balance FROM accounts WHERE id = 101"), "1000");
            // The proxy accepts 64 MiB.
            assert_eq!(talk.refused(&update(1, 80 << 20)), code, "{kind}");
            assert_eq!(talk.shows("SELECT balance FROM accounts WHERE id = 1"), "1000");
            talk.does(&update(1, 40 << 20));
            assert_eq!(talk.shows("SELECT balance FROM accounts WHERE id = 1"), "41943040");
            talk.does("UPDATE accounts SET balance = 1000 WHERE id = 1");
        }
        let mut maria = Talk::begin(rig, Dialect::MariaDb);
        maria.does("BEGIN; UPDATE accounts SET balance = balance + 1 WHERE id = 102");
        let long = format!("SELECT '{}' FROM accounts WHERE id = 101", "x".repeat(17 << 20));
        assert_eq!(maria.refused(&long), "1153");
        maria.does("UPDATE accounts SET balance = balance - 1 WHERE id = 103; COMMIT");
        assert_eq!(maria.shows("SELECT balance FROM accounts WHERE id = 102"), "1001");
        rig.settle("long statements");
    }
}

#[test]
fn long_rows_come_from_a_source_with_an_agent() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start_bank(&[0, 1], true);
    let mut talk = Talk::begin(rig, Dialect::PostgreSql);
    let text = "SELECT repeat('x', 40000000) FROM accounts WHERE id IN (1, 2)";
    assert_eq!(talk.text(text).unwrap()[0].rows.len(), 2);
    assert_eq!(talk.shows("SELECT balance FROM accounts WHERE id = 1"), "1000");
}

#[test]
fn a_transaction_whose_first_statement_at_mariadb_failed_commits() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    for agents in [false, true] {
        rig.start_bank(&[0, 1], agents);
        let mut maria = Talk::begin(rig, Dialect::MariaDb);
        for more in ["", "UPDATE accounts SET balance = 1000 WHERE id = 102; "] {
            maria.does("BEGIN");
            let repeated = "INSERT INTO accounts (id, balance) VALUES (101, 0)";
            assert_eq!(maria.refused(repeated), "1062");
            maria.does(&format!("{more}UPDATE accounts SET balance = 1000 WHERE id = 1"));
            maria.does("COMMIT");
        }
        rig.settle("a first statement that failed");
    }
}

/// Longer than the lock time-out: its source is working, and reports that.
#[test]
fn a_statement_may_take_long() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start_bank(&[0, 1], false);
    let mut postgres = Talk::begin(rig, Dialect::PostgreSql);
    let mut maria = Talk::begin(rig, Dialect::MariaDb);
    let sleeps =
        std::thread::spawn(move || maria.shows("SELECT sleep(9) FROM accounts WHERE id = 101"));
    postgres.does("BEGIN; SELECT pg_sleep(9) FROM accounts WHERE id = 1; COMMIT");
    postgres.does("SELECT pg_sleep(9) FROM accounts WHERE id = 1");
    assert_eq!(sleeps.join().unwrap(), "0");
}

/// When a time-out is told, the source has ended the statement, and does not carry it out later.
#[test]
fn a_statement_outside_a_transaction_has_ended_when_its_time_out_is_told() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    let mut setup = Setup::accounts(&[0, 1], false);
    setup.lock_wait_ms = 60_000;
    rig.start_bank_as(setup);
    for (place, kind, limit, lock, free) in [
        (
            0,
            Dialect::PostgreSql,
            "SET statement_timeout = 300",
            "BEGIN; LOCK TABLE slow",
            "ROLLBACK",
        ),
        (
            1,
            Dialect::MariaDb,
            "SET max_statement_time = 0.3",
            "LOCK TABLES slow WRITE",
            "UNLOCK TABLES",
        ),
    ] {
        said("DROP TABLE IF EXISTS slow", rig.servers[place].login());
        let mut client = Talk::begin(rig, kind);
        client.does("CREATE TABLE slow (id int)");
        client.does(limit);
        let runtime = Runtime::new().unwrap();
        let mut owner = runtime.block_on(Client::enter(&rig.servers[place].login())).unwrap();
        runtime.block_on(owner.text(lock)).unwrap();
        let code = client.refused("ALTER TABLE slow ADD COLUMN more int");
        assert_eq!(code, if kind == Dialect::MariaDb { "1969" } else { "57014" });
        runtime.block_on(owner.text(free)).unwrap();
        let running = match kind {
            Dialect::PostgreSql => {
                "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query LIKE 'ALTER%'"
            }
            Dialect::MariaDb => {
                "SELECT count(*) FROM information_schema.processlist WHERE info LIKE 'ALTER%'"
            }
        };
        let is_over = || said(running, rig.servers[place].login()) == "0";
        wait(Instant::now() + PATIENCE, is_over).unwrap();
        let columns = "SELECT count(*) FROM information_schema.columns WHERE table_name = 'slow'";
        assert_eq!(said(columns, rig.servers[place].login()), "1", "{kind}");
        // The connection goes on.
        client.does("DROP TABLE slow");
    }
}

/// Copies that differ are told before anything is committed.
#[test]
fn a_change_of_copies_that_differ_changes_nothing() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    let tables = "[[tables]]\nname = \"notes\"\nbroadcast = [\"s0\", \"s1\"]\n";
    let create = "DROP TABLE IF EXISTS notes; CREATE TABLE notes (id int PRIMARY KEY, v int); \
                  INSERT INTO notes VALUES (1, 0), (2, 0)";
    for (agents, mode) in [(false, "geotp"), (true, "geotp"), (false, "xa")] {
        for place in [0, 1] {
            said(create, rig.servers[place].login());
        }
        said("DELETE FROM notes WHERE id = 2", rig.servers[1].login());
        let mut setup = Setup::accounts(&[0, 1], agents);
        setup.tables.push_str(tables);
        setup.settings = format!("mode = \"{mode}\"\n");
        rig.start_bank_as(setup);
        let seen = |rig: &Rig| {
            rig.finish();
            [0, 1].map(|place| said("SELECT sum(v) FROM notes", rig.servers[place].login()))
        };
        for text in [
            "UPDATE notes SET v = v + 1",
            "BEGIN; UPDATE notes SET v = v + 1; COMMIT",
            "BEGIN; UPDATE notes SET v = v + 1 WHERE id = 1; UPDATE notes SET v = v + 1; COMMIT",
        ] {
            for kind in [Dialect::PostgreSql, Dialect::MariaDb] {
                Runtime::new().unwrap().block_on(async {
                    let mut client = Client::enter(&rig.login(kind)).await.unwrap();
                    let (code, words) = refused(&mut client, kind, text).await;
                    assert!(
                        words.contains("copies of a broadcast table differ"),
                        "{code}: {words}"
                    );
                    client.text("ROLLBACK").await.unwrap();
                });
                assert_eq!(seen(rig), ["0", "0"], "{agents}, {mode}, {kind}: {text}");
            }
        }
        // A MySQL client's transaction goes on without the statement that failed.
        let both =
            "UPDATE notes SET v = v + 1 WHERE id = 1; UPDATE notes SET v = v - 1 WHERE id = 1";
        for before in [None, Some(both)] {
            let mut client = Talk::begin(rig, Dialect::MariaDb);
            client.does("BEGIN");
            before.into_iter().for_each(|text| client.does(text));
            client.refused("UPDATE notes SET v = v + 1");
            assert_eq!(client.shows("SELECT sum(v) FROM notes"), "0", "{agents}, {mode}");
            client.does("COMMIT");
            assert_eq!(seen(rig), ["0", "0"], "{agents}, {mode}, {before:?}");
        }
        // A PostgreSQL client's goes on from a savepoint.
        let mut client = Talk::begin(rig, Dialect::PostgreSql);
        client.does(&format!("BEGIN; {both}; SAVEPOINT a"));
        client.refused("UPDATE notes SET v = v + 1");
        client.does("ROLLBACK TO a; COMMIT");
        assert_eq!(seen(rig), ["0", "0"], "{agents}, {mode}");
        // Where they are equal, all of them change.
        rig.psql("UPDATE notes SET v = v + 1 WHERE id = 1");
        rig.mysql("UPDATE notes SET v = v + 1 WHERE id = 1");
        rig.psql("BEGIN; UPDATE notes SET v = v + 1 WHERE id = 1; COMMIT");
        assert_eq!(seen(rig), ["3", "3"], "{agents}, {mode}");
        rig.settle("copies that differ");
    }
}

#[test]
fn a_transaction_that_is_not_prepared_cannot_be_resolved() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start_bank(&[0, 1], false);
    let mut talk = Talk::begin(rig, Dialect::PostgreSql);
    for source in ["s0", "s1"] {
        for verb in ["COMMIT", "ROLLBACK"] {
            let text = format!("RESOLVE ORTHODROME {verb} n9/3.17 AT {source}");
            assert_eq!(talk.refused(&text), "42704", "{text}");
        }
    }
    assert_eq!(talk.refused("RESOLVE ORTHODROME COMMIT n9/3.17 AT nowhere"), "22023");
}

#[test]
fn tables_of_the_proxy_are_not_shown_to_clients() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    // Of the tables of one source, and of all.
    let mut setup = Setup::accounts(&[0, 1], false);
    setup.settings = "catalogue = \"one\"\n".into();
    rig.start_bank_as(setup);
    hides_own_tables(rig);
    rig.start_bank(&[0, 1], false);
    hides_own_tables(rig);
}

fn hides_own_tables(rig: &Rig) {
    for text in [
        "SHOW TABLES",
        "SHOW FULL TABLES",
        "SHOW TABLE STATUS",
        "SELECT table_name FROM information_schema.tables WHERE table_schema = 'bank'",
    ] {
        let told = rig.mysql(text);
        assert!(told.contains("accounts") && !told.contains("orthodrome"), "{text}: {told}");
    }
    for text in [
        "SELECT relname, relkind FROM pg_class WHERE relkind = 'r'",
        "SELECT table_name FROM information_schema.tables WHERE table_schema = 'public'",
        "\\dt",
    ] {
        let told = rig.psql(text);
        // This is the name of the tables' owner.
        let told = told.replace("|orthodrome", "");
        assert!(told.contains("accounts") && !told.contains("orthodrome"), "{text}: {told}");
    }
}
