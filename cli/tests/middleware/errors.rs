//! What clients are told is wrong: the same each time, in the codes of their own protocol.

use orthodrome_geotp::sql::Dialect;
use orthodrome_server::middleware::local::{Client, Login, Refused};
use tokio::runtime::Runtime;

use crate::rig::{Rig, all_of, rig};

/// The code that a text is refused with: SQLSTATE for PostgreSQL's clients, the number for MySQL's; and the words.
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

/// Both kinds of clients are told so, however often they try.
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

/// Whichever source is quicker, and whoever interrupts whom: a duplicate key stays one when it is tried again.
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
