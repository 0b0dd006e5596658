//! Names of schemas and databases, views, indexes and types over several sources; what dumps and
//! drivers ask for first.

use std::process::{Command, Stdio};

use orthodrome_geotp::sql::Dialect;

use crate::rig::{Rig, SECRET, Setup, all_of, rig, said};
use crate::sessions::Talk;

const POSTGRES: Dialect = Dialect::PostgreSql;
const MARIA: Dialect = Dialect::MariaDb;

/// The proxy over a MariaDB server and two PostgreSQL servers, of which the first has a table of
/// the same name in another schema.
fn start(rig: &mut Rig) {
    said("DROP SCHEMA IF EXISTS s4 CASCADE", rig.servers[0].login());
    said("DROP DATABASE IF EXISTS other", rig.servers[1].login());
    rig.start_bank(&[0, 1, 2], false);
    said(
        "CREATE SCHEMA s4; CREATE TABLE s4.accounts (id int, balance int); INSERT INTO s4.accounts VALUES (7, 7)",
        rig.servers[0].login(),
    );
}

#[test]
fn another_schema_or_database_is_refused_and_its_rows_stay() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    start(rig);
    let mut postgres = Talk::begin(rig, POSTGRES);
    let mut maria = Talk::begin(rig, MARIA);
    for text in [
        "SELECT * FROM s4.accounts",
        "DELETE FROM s4.accounts",
        "TRUNCATE s4.accounts",
        "BEGIN; TRUNCATE s4.accounts; COMMIT",
        "DROP TABLE IF EXISTS s4.accounts",
        "DECLARE c CURSOR WITH HOLD FOR SELECT * FROM s4.accounts",
        "SELECT a.id FROM accounts a JOIN s4.accounts b ON a.balance = b.balance",
        "EXPLAIN SELECT * FROM s4.accounts",
    ] {
        assert_eq!(postgres.refused(text), "3F000", "{text}");
        postgres.does("ROLLBACK");
        let text = text.replace("s4.", "other.");
        if !text.starts_with("DECLARE") {
            assert_eq!(maria.refused(&text), "1146", "{text}");
            maria.does("ROLLBACK");
        }
    }
    for copy in ["COPY s4.accounts TO STDOUT", "COPY s4.accounts FROM STDIN"] {
        let output = rig.try_psql(copy);
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(told.contains("schema \"s4\" does not exist"), "{copy}: {told}");
    }
    let count = "SELECT count(*) FROM public.accounts";
    assert_eq!(postgres.shows(count), "60");
    assert_eq!(postgres.shows("SELECT count(*) FROM bank.public.accounts"), "60");
    assert_eq!(maria.shows("SELECT count(bank.accounts.id) FROM bank.accounts"), "60");
    assert_eq!(rig.psql("COPY public.accounts TO STDOUT").lines().count(), 60);
    assert_eq!(said("SELECT count(*) FROM s4.accounts", rig.servers[0].login()), "1");
}

#[test]
fn a_definition_sees_every_row_or_is_refused() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    start(rig);
    for server in &rig.servers {
        said("DROP VIEW IF EXISTS seen", server.login());
        said("DROP TABLE IF EXISTS seen_too", server.login());
        said("DROP TABLE IF EXISTS noted", server.login());
    }
    for (kind, code) in [(POSTGRES, "0A000"), (MARIA, "1235")] {
        let mut client = Talk::begin(rig, kind);
        for text in [
            "CREATE VIEW seen AS SELECT * FROM accounts",
            "CREATE TABLE seen_too AS SELECT * FROM accounts",
            "CREATE VIEW seen AS SELECT 1 AS x WHERE EXISTS (SELECT 1 FROM accounts)",
        ] {
            assert_eq!(client.refused(text), code, "{text}");
        }
        client.does("CREATE TABLE noted (id int PRIMARY KEY, v int)");
        client.does("INSERT INTO noted (id, v) VALUES (1, 2), (2, 3)");
        client.does("CREATE VIEW seen AS SELECT id, v FROM noted WHERE v > 2");
        client.does("CREATE TABLE seen_too AS SELECT id FROM noted");
        assert_eq!(client.shows("SELECT id FROM seen"), "2", "{kind}");
        assert_eq!(client.shows("SELECT count(*) FROM seen_too"), "2", "{kind}");
        let place = if kind == POSTGRES { 0 } else { 1 };
        let stored = match kind {
            POSTGRES => "SELECT pg_get_viewdef('seen'::regclass)",
            MARIA => {
                "SELECT view_definition FROM information_schema.views WHERE table_name = 'seen'"
            }
        };
        let stored = said(stored, rig.servers[place].login());
        assert!(!stored.to_lowercase().contains(" share"), "{stored}");
        client.does("DROP VIEW seen");
        client.does("DROP TABLE seen_too");
        client.does("DROP TABLE noted");
    }
}

#[test]
fn an_index_is_dropped_and_renamed_at_every_source() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    start(rig);
    let indexes = |rig: &Rig, name: &str| {
        let of = |place: usize| {
            let text = match rig.servers[place].kind {
                POSTGRES => format!("SELECT count(*) FROM pg_indexes WHERE indexname = '{name}'"),
                MARIA => format!(
                    "SELECT count(DISTINCT table_name) FROM information_schema.statistics \
                     WHERE index_name = '{name}' AND table_schema = 'bank'"
                ),
            };
            said(&text, rig.servers[place].login())
        };
        [of(0), of(1), of(2)].join("")
    };
    let mut postgres = Talk::begin(rig, POSTGRES);
    let mut maria = Talk::begin(rig, MARIA);
    postgres.does("CREATE INDEX pxi ON accounts (balance)");
    assert_eq!(indexes(rig, "pxi"), "111");
    postgres.does("ALTER INDEX pxi RENAME TO pxj");
    assert_eq!((indexes(rig, "pxi"), indexes(rig, "pxj")), ("000".into(), "111".into()));
    postgres.does("DROP INDEX pxj");
    assert_eq!(indexes(rig, "pxj"), "000");
    assert_eq!(postgres.refused("DROP INDEX pxj"), "42704");
    postgres.does("DROP INDEX IF EXISTS pxj");
    maria.does("CREATE INDEX pxi ON accounts (balance)");
    maria.does("DROP INDEX pxi ON accounts");
    assert_eq!(indexes(rig, "pxi"), "000");
    // In a transaction over PostgreSQL sources alone.
    let tables = "[[tables]]\nname = \"marks\"\nbroadcast = [\"s0\", \"s2\"]\n";
    for server in &rig.servers {
        said("DROP TABLE IF EXISTS marks", server.login());
    }
    rig.start(Setup { tables: tables.into(), ..Setup::accounts(&[0, 1, 2], false) });
    let mut postgres = Talk::begin(rig, POSTGRES);
    postgres.does(
        "BEGIN; CREATE TABLE marks (id int PRIMARY KEY, v int); CREATE INDEX pxi ON marks (v)",
    );
    postgres.does("DROP INDEX pxi");
    postgres.does("COMMIT");
    assert_eq!(indexes(rig, "pxi"), "000");
    postgres.does("DROP TABLE marks");
}

#[test]
fn types_are_created_at_every_postgresql_source() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    start(rig);
    for place in [0, 2] {
        let text =
            "DROP TABLE IF EXISTS moods; DROP TYPE IF EXISTS mood; DROP DOMAIN IF EXISTS amount";
        said(text, rig.servers[place].login());
    }
    let tables = "[[tables]]\nname = \"moods\"\n\
                  shard = { by = \"hash\", column = \"id\", sources = [\"s0\", \"s2\"] }\n";
    rig.start(Setup { tables: tables.into(), ..Setup::accounts(&[0, 1, 2], false) });
    let mut client = Talk::begin(rig, POSTGRES);
    client.does("CREATE TYPE mood AS ENUM ('sad', 'happy')");
    client.does("CREATE DOMAIN amount AS int CHECK (VALUE > 0)");
    client.does("CREATE TABLE moods (id int PRIMARY KEY, m mood, a amount)");
    for id in 1..9 {
        client.does(&format!("INSERT INTO moods (id, m, a) VALUES ({id}, 'happy', {id})"));
    }
    assert_eq!(client.shows("SELECT count(*) FROM moods WHERE m = 'happy'"), "8");
    assert_eq!(client.refused("INSERT INTO moods (id, m, a) VALUES (9, 'sad', 0)"), "23514");
    client.does("DROP TABLE moods");
    client.does("DROP TYPE mood");
    client.does("DROP DOMAIN amount");
    for place in [0, 2] {
        let text = "SELECT count(*) FROM pg_type WHERE typname IN ('mood', 'amount')";
        assert_eq!(said(text, rig.servers[place].login()), "0");
    }
}

#[test]
fn what_dumps_and_drivers_ask_for_first_is_answered() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    start(rig);
    let mut postgres = Talk::begin(rig, POSTGRES);
    let text = "SELECT current_setting('jit') AS cur, set_config('jit', 'off', false) AS new";
    let answer = postgres.text(text).unwrap().remove(0);
    let names: Vec<&str> = answer.columns.iter().map(|column| column.name.as_str()).collect();
    assert_eq!(names, ["cur", "new"]);
    assert_eq!(answer.rows, [vec![Some(b"on".to_vec()), Some(b"off".to_vec())]]);
    assert_eq!(postgres.shows("SHOW jit"), "off");
    let text = "SELECT set_config(name, 'x', false) FROM pg_settings WHERE name = 'no_such_name'";
    assert_eq!(postgres.text(text).unwrap().remove(0).rows.len(), 0);
    let text = "SELECT set_config(name, '11MB', false) FROM pg_settings WHERE name = 'work_mem'";
    assert_eq!(postgres.shows(text), "11MB");
    assert_eq!(postgres.shows("SHOW work_mem"), "11MB");
    let mut maria = Talk::begin(rig, MARIA);
    maria.does("UNLOCK TABLES");
    // As a driver does that takes the proxy for MySQL 8.
    maria.does("SET NAMES 'utf8mb4' COLLATE 'utf8mb4_0900_ai_ci'");
    assert_eq!(maria.shows("SELECT 'a' = 'A'"), "1");
    assert_eq!(maria.shows("SELECT balance FROM accounts WHERE id = 101"), "1000");
    assert_eq!(maria.shows("SELECT @@collation_connection"), "utf8mb4_0900_ai_ci");
    let mut dump = Command::new("mariadb-dump");
    dump.args(["--no-defaults", "--host=127.0.0.1", "--user=alice", "--single-transaction"]);
    dump.args(["--skip-lock-tables", &format!("--port={}", rig.mysql), "bank", "accounts"]);
    let dump = dump.env("MYSQL_PWD", SECRET).stdin(Stdio::null()).output().unwrap();
    assert!(dump.status.success(), "{}", all_of(&dump));
    let text = String::from_utf8_lossy(&dump.stdout).into_owned();
    assert!(text.contains("(1,1000)") && text.contains("(101,1000)"), "{text}");
}

#[test]
fn an_update_that_changes_nothing_affects_no_row_at_mariadb() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    for agents in [false, true] {
        rig.start_bank(&[0, 1], agents);
        for (text, affected) in [
            ("UPDATE accounts SET balance = 1000 WHERE id = 101", 0),
            ("UPDATE accounts SET balance = 999 + (id > 101) WHERE id IN (101, 102)", 1),
            ("UPDATE accounts SET balance = 1000 WHERE id = 101", 1),
            ("UPDATE accounts SET balance = 1000 WHERE id = 1", 1),
            ("DELETE FROM accounts WHERE id IN (101, 120)", 2),
        ] {
            let output = rig.login(MARIA).client(text).arg("-vv").output().unwrap();
            let told = format!("{affected} row");
            assert!(all_of(&output).contains(&told), "{agents}: {text}: {}", all_of(&output));
        }
    }
}

#[test]
fn a_source_that_refuses_the_login_is_named_with_its_words() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start_bank(&[0, 1], false);
    let file = std::fs::read_to_string(rig.path("proxy.toml")).unwrap();
    let (rest, last) = file.split_at(file.find("name = \"s1\"").unwrap());
    let wrong = last.replacen("loopback-only", "wrong", 1);
    std::fs::write(rig.path("proxy.toml"), format!("{rest}{wrong}")).unwrap();
    rig.start_proxy(None);
    for (text, login) in
        [("UPDATE accounts SET balance = 1 WHERE id = 101", POSTGRES), ("SELECT f()", MARIA)]
    {
        let told = all_of(&rig.login(login).client(text).output().unwrap());
        assert!(told.contains("s1") && told.contains("Access denied"), "{told}");
    }
}

#[test]
fn the_columns_of_a_table_are_asked_for_without_a_lock() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    start(rig);
    let mut talk = Talk::begin(rig, POSTGRES);
    talk.does("CREATE TABLE parents (id serial PRIMARY KEY)");
    talk.does("CREATE TABLE children (id int PRIMARY KEY REFERENCES parents)");
    // Without the foreign key, its table is locked; the proxy has not asked for it for long.
    std::thread::sleep(std::time::Duration::from_secs(11));
    talk.does("BEGIN; DROP TABLE children; DROP TABLE parents; COMMIT");
    assert_eq!(talk.refused("SELECT * FROM parents"), "42P01");
}

/// Migrations rename a table and go on with its new name, in one transaction.
#[test]
fn a_table_has_its_new_name_within_the_transaction_that_renames_it() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    start(rig);
    let mut talk = Talk::begin(rig, POSTGRES);
    talk.does("DROP TABLE IF EXISTS old_name; DROP TABLE IF EXISTS new_name");
    talk.does("BEGIN; CREATE TABLE old_name (id serial PRIMARY KEY, n int)");
    talk.does("INSERT INTO old_name (n) VALUES (1)");
    talk.does("ALTER TABLE old_name RENAME TO new_name");
    talk.does("INSERT INTO new_name VALUES (7, 2)");
    assert_eq!(talk.shows("SELECT sum(n) FROM new_name"), "3");
    talk.does("COMMIT");
    assert_eq!(Talk::begin(rig, POSTGRES).shows("SELECT sum(n) FROM new_name"), "3");
    assert_eq!(talk.refused("SELECT 1 FROM old_name"), "42P01");
    talk.does("BEGIN; ALTER TABLE new_name RENAME TO old_name");
    talk.does("INSERT INTO old_name VALUES (8, 4)");
    assert_eq!(talk.shows("SELECT sum(n) FROM old_name"), "7");
    talk.does("ROLLBACK");
    assert_eq!(talk.shows("SELECT sum(n) FROM new_name"), "3");
    talk.does("DROP TABLE new_name");
    rig.finish();
}

/// `pg_dump` and others empty the search path, and name the schema of each table.
#[test]
fn a_client_without_a_search_path_finds_the_tables_of_the_schema_public() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    for agents in [true, false] {
        rig.start_bank(&[0, 2], agents);
        let mut talk = Talk::begin(rig, POSTGRES);
        talk.does("SELECT pg_catalog.set_config('search_path', '', false)");
        for level in ["SERIALIZABLE", "REPEATABLE READ", "READ COMMITTED"] {
            talk.does(&format!("BEGIN ISOLATION LEVEL {level}"));
            talk.does("SELECT sum(balance) FROM public.accounts");
            talk.does("SELECT balance FROM public.accounts WHERE id = 1");
            talk.does("UPDATE public.accounts SET balance = balance + 1 WHERE id IN (1, 101)");
            talk.does("COMMIT");
        }
        talk.does("SELECT balance FROM public.accounts WHERE id = 101");
    }
    rig.finish();
}

/// Each source checks a unique key among its own rows. Nobody said so where a key does not contain
/// the column that places the rows.
#[test]
fn the_check_names_unique_keys_that_hold_at_each_source_only() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    for place in [0, 1] {
        said("DROP TABLE IF EXISTS people", rig.servers[place].login());
    }
    let mut setup = Setup::accounts(&[0, 1], false);
    setup.tables += "[[tables]]\nname = \"people\"\n\
        shard = { by = \"hash\", column = \"id\", sources = [\"s0\", \"s1\"] }\n";
    rig.start_bank_as(setup);
    let before = rig.check();
    assert!(before.status.success() && !all_of(&before).contains("note:"), "{before:?}");
    rig.psql(
        "CREATE TABLE people (id int PRIMARY KEY, number serial UNIQUE, email varchar(40) UNIQUE, \
         name varchar(40), UNIQUE (id, name))",
    );
    let checked = rig.check();
    let said = String::from_utf8_lossy(&checked.stdout);
    let notes: Vec<&str> = said.lines().filter(|line| line.contains("note:")).collect();
    assert!(checked.status.success(), "a note is no mistake: {checked:?}");
    assert_eq!(notes.len(), 2, "{said}");
    for (note, source) in notes.iter().zip(["source s0: note:", "source s1: note:"]) {
        assert!(note.starts_with(source) && note.contains("email"), "{note}");
        assert!(note.contains("does not contain id, by which the table is sharded"), "{note}");
    }
    rig.psql("DROP TABLE people");
    rig.finish();
}
