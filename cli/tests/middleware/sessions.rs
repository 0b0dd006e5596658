//! Session settings, read-only transactions, bulk inserts, and bytes that are not text.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use orthodrome_geotp::sql::{Answer, Dialect};
use orthodrome_middleware::local::{Client, Refused};
use tokio::runtime::Runtime;

use crate::rig::{CLIENT, PATIENCE, Rig, SECRET, all_of, rig, said, wait};
use crate::tools::{python, skipped};

const POSTGRES: Dialect = Dialect::PostgreSql;
const MARIA: Dialect = Dialect::MariaDb;

/// A client that runs one query batch after the other.
pub struct Talk {
    client: Client,
    kind: Dialect,
    runtime: Runtime,
}

impl Talk {
    pub fn begin(rig: &Rig, kind: Dialect) -> Self {
        let runtime = Runtime::new().unwrap();
        let client = runtime.block_on(Client::enter(&rig.login(kind))).unwrap();
        Self { client, kind, runtime }
    }

    pub fn text(&mut self, text: &str) -> Result<Vec<Answer>, Refused> {
        self.runtime.block_on(self.client.text(text))
    }

    pub fn does(&mut self, text: &str) {
        self.text(text).unwrap_or_else(|error| panic!("{}: {text}: {error}", self.kind));
    }

    /// The first field of the last answer.
    pub fn shows(&mut self, text: &str) -> String {
        let kind = self.kind;
        let answers = self.text(text).unwrap_or_else(|error| panic!("{kind}: {text}: {error}"));
        let rows = answers.into_iter().next_back().map(|answer| answer.rows);
        let cell = rows.unwrap_or_default().into_iter().next().and_then(|row| row[0].clone());
        cell.map_or_else(|| "NULL".into(), |cell| String::from_utf8_lossy(&cell).into_owned())
    }

    /// The error code of a refused query batch.
    pub fn refused(&mut self, text: &str) -> String {
        match self.text(text) {
            Ok(_) => panic!("{}: {text}: was carried out", self.kind),
            Err(Refused::Broken(error)) => panic!("{}: {text}: {error}", self.kind),
            Err(Refused::Fault(fault)) if self.kind == POSTGRES => fault.sqlstate,
            Err(Refused::Fault(fault)) => fault.number.to_string(),
        }
    }
}

#[test]
fn settings_reach_the_sources_and_end_with_their_session() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    for agents in [false, true] {
        rig.start_bank(&[0, 1], agents);
        // The source's own value, in a statement about its rows.
        let at_postgres = "SELECT current_setting('timezone') FROM accounts WHERE id = 1";
        let at_maria = "SELECT timediff(now(), utc_timestamp()) FROM accounts WHERE id = 101";
        let mut postgres = Talk::begin(rig, POSTGRES);
        let mut maria = Talk::begin(rig, MARIA);
        for round in 0..3 {
            postgres.does("SET TIME ZONE INTERVAL '+05:30' HOUR TO MINUTE");
            maria.does("SET time_zone = '-03:00', group_concat_max_len = 2000");
            assert_eq!(postgres.shows(at_postgres), "<+05:30>-05:30", "{round}");
            assert_eq!(postgres.shows("SELECT current_setting('timezone')"), "<+05:30>-05:30");
            assert_eq!(postgres.shows("SHOW timezone"), "<+05:30>-05:30");
            assert_eq!(maria.shows(at_maria), "-03:00:00", "{round}");
            assert_eq!(maria.shows("SELECT @@time_zone"), "-03:00");
            let both = "SELECT @@group_concat_max_len FROM accounts WHERE id = 101";
            assert_eq!(maria.shows(both), "2000");
            // The other kind of source is in the same zone.
            assert_eq!(maria.shows("SELECT balance FROM accounts WHERE id = 1"), "1000");
            // Other sessions are not.
            assert_eq!(rig.psql(at_postgres), "UTC");
            assert_eq!(rig.mysql(at_maria), "00:00:00");
            assert_eq!(rig.mysql(&both.replace("SELECT", "SELECT /* other */")), "1048576");
            let modes =
                "SET NAMES utf8mb4 COLLATE utf8mb4_bin; SELECT 'a' = 'A'; SET NAMES utf8mb4";
            maria.does(modes);
            assert_eq!(maria.shows("SELECT 'a' = 'A'"), "1");
            postgres.does("RESET ALL");
            maria.does("SET time_zone = DEFAULT, group_concat_max_len = DEFAULT");
            assert_eq!(postgres.shows(at_postgres), "UTC");
            assert_eq!(maria.shows(at_maria), "00:00:00");
            assert_eq!(maria.shows(both), "1048576");
        }
        postgres.does("SET myapp.tenant = 'a; b'");
        let tenant = "SELECT current_setting('myapp.tenant', true) FROM accounts WHERE id = 2";
        assert_eq!(postgres.shows(tenant), "a; b");
        assert_eq!(rig.psql(tenant), "");
        postgres.does("DISCARD ALL");
        // A server that has had the name once returns an empty string instead of NULL.
        assert!(["", "NULL"].contains(&postgres.shows(tenant).as_str()));
    }
}

#[test]
fn clients_that_take_turns_keep_their_own_settings() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start_bank(&[0, 1], true);
    let postgres = "SELECT current_setting('timezone') || ' ' || current_setting('search_path') \
                    FROM accounts WHERE id = 1";
    let maria = "SELECT concat(timediff(now(), utc_timestamp()), ' ', @@group_concat_max_len) \
                 FROM accounts WHERE id = 101";
    let mut clients: Vec<(Talk, &str, String)> = Vec::new();
    for hours in 1..=3 {
        let mut client = Talk::begin(rig, POSTGRES);
        client.does(&format!("SET timezone = '{hours}'; SET search_path = s{hours}, public"));
        let own = format!("<+0{hours}:00>-0{hours}:00 s{hours}, public");
        clients.push((client, postgres, own));
        let mut client = Talk::begin(rig, MARIA);
        client.does(&format!("SET time_zone = '+0{hours}:00', group_concat_max_len = 200{hours}"));
        clients.push((client, maria, format!("0{hours}:00:00 200{hours}")));
    }
    clients.push((Talk::begin(rig, POSTGRES), postgres, "UTC \"$user\", public".into()));
    clients.push((Talk::begin(rig, MARIA), maria, "00:00:00 1048576".into()));
    for round in 0..10 {
        for (client, text, own) in &mut clients {
            let in_block = round % 2 == 1;
            if in_block {
                client.does("BEGIN");
            }
            assert_eq!(client.shows(text), *own, "{round}");
        }
        for (client, text, own) in &mut clients {
            assert_eq!(client.shows(text), *own, "{round}");
            client.does(if round % 4 == 1 { "ROLLBACK" } else { "COMMIT" });
        }
    }
}

/// User-defined functions may change their session in ways that clients may not.
#[test]
fn a_session_that_a_function_has_changed_is_reset_before_others_use_it() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start_bank(&[0, 1], false);
    let at_postgres = "\
        CREATE OR REPLACE FUNCTION leaves() RETURNS int LANGUAGE plpgsql AS $$ BEGIN \
        PERFORM set_config('timezone', 'Asia/Tokyo', false), set_config('myapp.secret', 'secret', false), \
            pg_advisory_lock(4711); \
        CREATE TEMP TABLE IF NOT EXISTS mine (id int); RETURN 1; END $$";
    let at_maria = "CREATE OR REPLACE FUNCTION leaves() RETURNS INT NOT DETERMINISTIC BEGIN \
        SET @secret = 7; SET SESSION time_zone = '+09:00'; RETURN GET_LOCK('leaves', 0); END";
    for (place, text) in [(0, at_postgres), (1, at_maria)] {
        let runtime = Runtime::new().unwrap();
        let made = async {
            Client::enter(&rig.servers[place].login()).await.unwrap().text(text).await.unwrap()
        };
        runtime.block_on(made);
    }
    for (kind, id, zone, free, clean) in [
        (
            POSTGRES,
            1,
            "SELECT concat(current_setting('timezone'), current_setting('myapp.secret', true), to_regclass('mine')) \
             FROM accounts WHERE id = 1",
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 4711",
            ("UTC", "0"),
        ),
        (
            MARIA,
            101,
            "SELECT timediff(now(), utc_timestamp()) FROM accounts WHERE id = 101",
            "SELECT IS_USED_LOCK('leaves') IS NOT NULL",
            ("00:00:00", "0"),
        ),
    ] {
        let server = &rig.servers[usize::from(kind == MARIA)];
        let own = format!("SELECT leaves() FROM accounts WHERE id = {id}");
        let begun = format!("BEGIN; {own}");
        let mut client = Talk::begin(rig, kind);
        let mut other = Talk::begin(rig, kind);
        for texts in [
            ["SELECT leaves()", "SELECT 1"],
            [&own, "SELECT 1"],
            [&begun, "COMMIT"],
            [&begun, "ROLLBACK"],
        ] {
            texts.iter().for_each(|text| client.does(text));
            for _ in 0..3 {
                assert_eq!(client.shows(zone), clean.0, "{texts:?}");
                assert_eq!(other.shows(zone), clean.0, "{texts:?}");
            }
            let is_free = || said(free, server.login()) == clean.1;
            wait(Instant::now() + PATIENCE, is_free)
                .unwrap_or_else(|| panic!("{texts:?}: its lock stays"));
        }
    }
    rig.settle("functions that change their session");
}

/// A function may write, so a query of it is part of the transaction, also if no table says where
/// it runs.
#[test]
fn a_function_without_a_table_runs_once_and_in_the_transaction() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start_bank(&[0, 1], true);
    let at_postgres = "\
        DROP TABLE IF EXISTS notes; CREATE TABLE notes (id int); \
        CREATE OR REPLACE FUNCTION note(given int) RETURNS int LANGUAGE sql AS \
            'INSERT INTO notes VALUES (given) RETURNING id'";
    let at_maria = "\
        DROP TABLE IF EXISTS notes; CREATE TABLE notes (id int); \
        CREATE OR REPLACE FUNCTION note(given int) RETURNS int NOT DETERMINISTIC MODIFIES SQL DATA BEGIN \
            INSERT INTO notes VALUES (given); RETURN given; END";
    for (place, kind, text) in [(0, POSTGRES, at_postgres), (1, MARIA, at_maria)] {
        let runtime = Runtime::new().unwrap();
        runtime.block_on(async {
            let mut client = Client::enter(&rig.servers[place].login()).await.unwrap();
            client.text(text).await.unwrap();
        });
        let written = || {
            rig.finish();
            said("SELECT count(*) FROM notes", rig.servers[place].login())
        };
        let mut client = Talk::begin(rig, kind);
        let transfer = "UPDATE accounts SET balance = balance - 1 WHERE id = 1; \
                        UPDATE accounts SET balance = balance + 1 WHERE id = 101";
        client.does(&format!("BEGIN; {transfer}"));
        assert_eq!(client.shows("SELECT note(7)"), "7");
        client.does("ROLLBACK");
        assert_eq!(written(), "0", "{kind}");
        client.does(&format!("BEGIN; {transfer}"));
        for text in ["SELECT note(8)", "SELECT * FROM (SELECT note(8)) AS it"] {
            assert_eq!(client.shows(text), "8", "{kind}");
        }
        client.does("COMMIT");
        assert_eq!(written(), "2", "{kind}");
        assert_eq!(client.shows("SELECT note(9)"), "9");
        assert_eq!(written(), "3", "{kind}");
        // Functions of which the proxy knows that they change nothing need no transaction.
        assert_eq!(client.shows("SELECT length('abc')"), "3");
    }
    rig.settle("functions that write");
}

#[test]
fn what_belongs_to_a_client_is_not_another_s() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start_bank(&[0, 1], false);
    let server = &rig.servers[1];
    said("DROP TABLE accounts", server.login());
    let text = "CREATE TABLE accounts (id int PRIMARY KEY, balance int NOT NULL, n int AUTO_INCREMENT UNIQUE)";
    said(text, server.login());
    let insert = "INSERT INTO accounts (id, balance) VALUES (101, 0)";
    let own = "SELECT LAST_INSERT_ID() FROM accounts WHERE id = 101";
    let mut one = Talk::begin(rig, MARIA);
    let mut other = Talk::begin(rig, MARIA);
    one.does(insert);
    assert_eq!(one.shows(own), "1");
    assert_eq!(other.shows(own), "0");
    assert_eq!(other.shows("SELECT LAST_INSERT_ID()"), "0");
    other.does("UPDATE accounts SET balance = LAST_INSERT_ID(5) WHERE id = 101");
    assert_eq!(other.shows("SELECT LAST_INSERT_ID()"), "5");
    one.does("UPDATE accounts SET balance = LAST_INSERT_ID() WHERE id = 101");
    assert_eq!(other.shows("SELECT balance FROM accounts WHERE id = 101"), "1");
    assert_eq!(one.refused(insert), "1062");
    for text in ["SHOW WARNINGS", "SHOW ERRORS LIMIT 1"] {
        assert_eq!(other.shows(text), "NULL");
    }
    assert_eq!(other.shows("SHOW COUNT(*) WARNINGS"), "0");
    assert_eq!(other.shows("SELECT @@warning_count"), "0");
}

/// A string that an application quotes according to its server's documentation has the same value
/// at every source.
#[test]
fn backslashes_mean_what_the_client_s_protocol_says() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start_bank(&[0, 1], false);
    for place in [0, 1] {
        said("ALTER TABLE accounts ADD note varchar(40)", rig.servers[place].login());
        said(
            "DROP TABLE IF EXISTS canary; CREATE TABLE canary (id int)",
            rig.servers[place].login(),
        );
    }
    let mut postgres = Talk::begin(rig, POSTGRES);
    let mut maria = Talk::begin(rig, MARIA);
    for id in [1, 101] {
        let read = format!("SELECT note FROM accounts WHERE id = {id}");
        for (client, constant, note) in [
            (POSTGRES, r"'\'", r"\"),
            (POSTGRES, r"'a\''; DROP TABLE canary; --'", r"a\'; DROP TABLE canary; --"),
            (POSTGRES, r"E'a\'b\\c'", r"a'b\c"),
            (POSTGRES, r"$q$it's\$q$", r"it's\"),
            (MARIA, r"'a\'; DROP TABLE canary; -- '", "a'; DROP TABLE canary; -- "),
            (MARIA, r#""a\"b'c\\""#, r#"a"b'c\"#),
            (MARIA, r"'it''s\n\%'", "it's\n\\%"),
        ] {
            let writer = if client == POSTGRES { &mut postgres } else { &mut maria };
            writer.does(&format!("UPDATE accounts SET note = {constant} WHERE id = {id}"));
            for reader in [&mut postgres, &mut maria] {
                assert_eq!(reader.shows(&read), note, "{constant}");
            }
        }
        // A backslash is the escape character of patterns in both protocols.
        for (note, is_like) in [("10%", "1"), ("100", "0")] {
            postgres.does(&format!("UPDATE accounts SET note = '{note}' WHERE id = {id}"));
            let text =
                format!("SELECT count(*) FROM accounts WHERE id = {id} AND note LIKE '10\\%'");
            assert_eq!(postgres.shows(&text), is_like, "{note} at {id}");
            assert_eq!(maria.shows(&text), is_like, "{note} at {id}");
        }
    }
    // Names that a client gives.
    for (id, kind) in [(1, POSTGRES), (101, POSTGRES), (1, MARIA), (101, MARIA)] {
        let (client, quote) = match kind {
            POSTGRES => (&mut postgres, '"'),
            MARIA => (&mut maria, '`'),
        };
        let alias = format!(r"{quote}a\{quote}{quote}; DROP TABLE canary; -- {quote}");
        client.does(&format!("SELECT balance AS {alias} FROM accounts WHERE id = {id}"));
        if kind == MARIA {
            let alias = "'a''; DROP TABLE canary; -- '";
            client.does(&format!("SELECT balance {alias} FROM accounts WHERE id = {id}"));
        }
    }
    // A statement that the proxy's parser cannot read reaches a source with the meaning that the
    // proxy assumed.
    maria.does(r"SHOW TABLES LIKE 'a\'; DROP TABLE canary; -- '");
    maria.does(r"SHOW TABLES WHERE Tables_in_bank IN ('a\'; DROP TABLE canary; -- ', '\\')");
    assert_eq!(maria.shows(r"SELECT 'a\'b', 5--1"), "a'b");
    assert_eq!(maria.shows("SELECT 1 /*!50000 + 1 */ /*!50700 + 1 */ /*M!100000 + 1 */"), "3");
    assert_eq!(
        postgres.shows(r"SELECT name'\''; DROP TABLE canary; --'"),
        r"\'; DROP TABLE canary; --"
    );
    for place in [0, 1] {
        said("SELECT * FROM canary", rig.servers[place].login());
    }
}

#[test]
fn settings_of_a_transaction_end_with_it() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start_bank(&[0, 1], false);
    let mut client = Talk::begin(rig, POSTGRES);
    let zone = "SELECT current_setting('timezone') FROM accounts WHERE id = 1";
    for (end, after) in [("COMMIT", "<+02:00>-02:00"), ("ROLLBACK", "UTC")] {
        client.does("RESET timezone");
        client.does("BEGIN");
        assert_eq!(client.shows(zone), "UTC");
        client.does("SET timezone = '2'");
        assert_eq!(client.shows(zone), "<+02:00>-02:00");
        client.does("SET LOCAL timezone = '3'");
        assert_eq!(client.shows(zone), "<+03:00>-03:00");
        client.does(end);
        assert_eq!(client.shows(zone), after, "{end}");
    }
    // A query batch is a transaction.
    client.does("RESET timezone");
    assert_eq!(client.shows(&format!("SET LOCAL timezone = '4'; {zone}")), "<+04:00>-04:00");
    assert_eq!(client.shows(zone), "UTC");
    assert_eq!(client.shows("SELECT set_config('timezone', '5', false)"), "5");
    assert_eq!(client.shows(zone), "<+05:00>-05:00");
    assert_eq!(rig.psql(zone), "UTC");
}

#[test]
fn times_that_clients_set_are_kept() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start_bank(&[0, 1], false);
    let mut holder = Talk::begin(rig, POSTGRES);
    holder.does("BEGIN; UPDATE accounts SET balance = balance WHERE id IN (1, 101)");
    for (kind, set, code) in [
        (POSTGRES, "SET statement_timeout = 300", "57014"),
        (MARIA, "SET max_statement_time = 0.3", "1969"),
    ] {
        let mut client = Talk::begin(rig, kind);
        client.does(set);
        for id in [1, 101] {
            let text = format!("UPDATE accounts SET balance = 0 WHERE id = {id}");
            assert_eq!(client.refused(&text), code, "{id}");
        }
        // The session continues.
        assert_eq!(client.shows("SELECT balance FROM accounts WHERE id = 2"), "1000");
    }
    holder.does("ROLLBACK");
    let mut idle = Talk::begin(rig, POSTGRES);
    idle.does("SET idle_in_transaction_session_timeout = '200ms'");
    idle.does("BEGIN; UPDATE accounts SET balance = 0 WHERE id = 1");
    std::thread::sleep(std::time::Duration::from_millis(800));
    assert!(idle.text("COMMIT").is_err());
    rig.settle("a client that was silent");
}

#[test]
fn what_cannot_be_done_is_refused_and_the_connection_goes_on() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start_bank(&[0, 1], false);
    let mut client = Talk::begin(rig, POSTGRES);
    for (text, code) in [
        ("SET client_encoding = 'LATIN1'", "0A000"),
        ("SET datestyle = 'German'", "0A000"),
        ("SET timezone = 'Nowhere/Land'", "22023"),
        ("SET work_mem = 'much'", "22023"),
        ("SET foo = 1", "42704"),
        ("SET foo TO DEFAULT", "42704"),
        ("SET ROLE admin", "0A000"),
        ("SELECT pg_advisory_lock(1)", "0A000"),
        ("SELECT pg_advisory_lock(1) FROM accounts WHERE id = 1", "0A000"),
        ("SELECT * FROM pg_try_advisory_lock(1)", "0A000"),
        ("SELECT set_config(name, 'x', false) FROM pg_settings", "0A000"),
        ("SELECT 1, (SELECT lastval())", "55000"),
        ("EXPLAIN ANALYZE SELECT pg_advisory_lock(1)", "0A000"),
        ("EXPLAIN (ANALYZE) SELECT 1", "0A000"),
        ("LISTEN news", "0A000"),
        ("LOAD 'auto_explain'", "0A000"),
        ("LOCK TABLE accounts IN EXCLUSIVE MODE", "0A000"),
        ("DO $$ BEGIN PERFORM pg_advisory_lock(1); END $$", "0A000"),
        ("CALL anything()", "0A000"),
        ("EXECUTE p", "26000"),
        ("FETCH c", "34000"),
        ("CREATE TEMP SEQUENCE s", "0A000"),
        ("CREATE TEMP TABLE mine (id int)", "0A000"),
        ("CREATE TEMPORARY VIEW mine AS SELECT 1", "0A000"),
        ("SELECT 1 AS one INTO TEMP mine", "0A000"),
        ("SET SESSION AUTHORIZATION postgres", "0A000"),
        ("SELEC 1", "42601"),
        ("SELECT balance FROM accounts WHERE (", "42601"),
        ("COPY accounts FROM '/etc/passwd'", "0A000"),
        ("COPY accounts FROM STDIN (FORMAT binary)", "0A000"),
        ("SHOW foo", "42704"),
    ] {
        assert_eq!(client.refused(text), code, "{text}");
        assert_eq!(client.shows("SELECT balance FROM accounts WHERE id = 1"), "1000", "{text}");
    }
    // Statements of drivers before they return a connection to a pool.
    for text in
        ["SELECT pg_advisory_unlock_all()", "CLOSE ALL", "UNLISTEN *", "RESET ALL", "DISCARD ALL"]
    {
        client.does(text);
    }
    let mut client = Talk::begin(rig, MARIA);
    for (text, code) in [
        ("SET NAMES latin1", "1235"),
        ("SET sql_mode = 'ANSI_QUOTES'", "1235"),
        ("SET sql_mode = 'NO_SUCH_MODE'", "1231"),
        ("SET time_zone = 'Nowhere/Land'", "1298"),
        ("SET sql_safe_updates = 1", "1235"),
        ("SET foo = 1", "1193"),
        ("SET sql_notes = 0, foo = 1", "1193"),
        ("SET @mine = 1", "1235"),
        ("SELECT GET_LOCK('a', 1)", "1235"),
        ("SELECT LAST_INSERT_ID(), GET_LOCK('a', 1)", "1235"),
        ("SELECT /*! GET_LOCK('a', 1) */", "1235"),
        ("DO GET_LOCK('a', 1)", "1235"),
        ("SHOW TABLES WHERE GET_LOCK('a', 1)", "1235"),
        ("SELECT @mine := 1", "1235"),
        ("SELECT @mine FROM accounts WHERE id = 101", "1235"),
        ("SELECT 1 INTO @mine", "1235"),
        ("SELECT 1 INTO OUTFILE '/tmp/orthodrome-test'", "1235"),
        ("CREATE TEMPORARY TABLE mine (id int)", "1235"),
        ("PREPARE p FROM @mine", "1235"),
        ("EXECUTE p USING @mine", "1235"),
        ("LOCK TABLES accounts READ", "1235"),
        ("FLUSH TABLES WITH READ LOCK", "1235"),
        ("HANDLER accounts OPEN", "1235"),
        ("CALL anything()", "1235"),
        ("SET profiling = 1", "1235"),
        ("SHOW PROFILES", "1235"),
        ("SET SESSION timestamp = 1", "1235"),
        ("SELEC 1", "1064"),
        ("SELECT balance FROM accounts WHERE (", "1064"),
    ] {
        assert_eq!(client.refused(text), code, "{text}");
        assert_eq!(client.shows("SELECT balance FROM accounts WHERE id = 1"), "1000", "{text}");
    }
    // Drivers query the modes to know how to quote: the proxy reads backslashes.
    for text in [
        "SELECT @@sql_mode",
        "SELECT @@session.sql_mode AS m",
        "SELECT @@global.sql_mode",
        "SELECT @@sql_mode FROM accounts WHERE id = 101",
        "SHOW VARIABLES LIKE 'sql_mode'",
        "SELECT variable_value FROM information_schema.session_variables WHERE variable_name = 'sql_mode'",
    ] {
        let told = rig.mysql(text);
        assert!(told.contains("STRICT_TRANS_TABLES") && !told.contains("NO_BACKSLASH"), "{told}");
    }
}

#[test]
fn read_only_transactions_do_not_write() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start_bank(&[0, 1], false);
    let write = "UPDATE accounts SET balance = 0 WHERE id = 101";
    let mut client = Talk::begin(rig, POSTGRES);
    for (begin, is_refused) in [
        ("BEGIN READ ONLY", true),
        ("START TRANSACTION ISOLATION LEVEL SERIALIZABLE, READ ONLY, DEFERRABLE", true),
        ("BEGIN; SET TRANSACTION READ ONLY", true),
        ("SET default_transaction_read_only = on; BEGIN", true),
        ("BEGIN READ WRITE", false),
        ("SET SESSION CHARACTERISTICS AS TRANSACTION READ WRITE; BEGIN", false),
        ("SET TRANSACTION READ ONLY; COMMIT; BEGIN", false),
    ] {
        client.does(begin);
        assert_eq!(client.shows("SELECT balance FROM accounts WHERE id = 1"), "1000");
        let shown = if is_refused { "on" } else { "off" };
        assert_eq!(client.shows("SHOW transaction_read_only"), shown, "{begin}");
        if is_refused {
            assert_eq!(client.refused("SET TRANSACTION READ WRITE"), "25001");
            client.does("ROLLBACK");
            client.does(begin);
            assert_eq!(client.refused(write), "25006", "{begin}");
            client.does("ROLLBACK");
        } else {
            client.does(write);
            client.does("ROLLBACK");
        }
    }
    client.does("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY; RESET ALL");
    assert_eq!(client.shows("SHOW default_transaction_read_only"), "off");
    client.does("SET default_transaction_read_only = on");
    for text in [write, "TRUNCATE accounts", "SELECT 1 FROM accounts WHERE id = 1 FOR UPDATE"] {
        assert_eq!(client.refused(text), "25006", "{text}");
    }
    let mut client = Talk::begin(rig, MARIA);
    for (begin, is_refused) in [
        ("START TRANSACTION READ ONLY", true),
        ("SET TRANSACTION READ ONLY; START TRANSACTION", true),
        ("SET SESSION TRANSACTION READ ONLY; START TRANSACTION", true),
        ("START TRANSACTION READ WRITE", false),
        (
            "SET SESSION transaction_read_only = 0; START TRANSACTION WITH CONSISTENT SNAPSHOT",
            false,
        ),
    ] {
        client.does(begin);
        assert_eq!(client.shows("SELECT balance FROM accounts WHERE id = 1"), "1000");
        // Writers may wait for locks of readers, which MySQL clients may take.
        client.does("SELECT 1 FROM accounts WHERE id = 1 LOCK IN SHARE MODE");
        if is_refused {
            assert_eq!(client.refused(write), "1792", "{begin}");
            let locks = "SELECT 1 FROM accounts WHERE id = 101 FOR UPDATE";
            assert_eq!(client.refused(locks), "1792", "{begin}");
        } else {
            client.does(write);
        }
        client.does("ROLLBACK");
    }
    client.does("START TRANSACTION");
    for text in ["SET TRANSACTION READ ONLY", "SET TRANSACTION ISOLATION LEVEL READ COMMITTED"] {
        assert_eq!(client.refused(text), "1568", "{text}");
    }
    client.does("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED; ROLLBACK");
    // It applied to the next transaction only.
    client.does("SET TRANSACTION READ ONLY");
    assert_eq!(client.refused(write), "1792");
    client.does("ROLLBACK");
    client.does(write);
    client.does("UPDATE accounts SET balance = 1000 WHERE id = 101");
    rig.settle("read-only transactions");
}

/// psycopg2 and PyMySQL set, copy, and send bytes, as they do for frameworks.
#[test]
fn drivers_for_python_set_copy_and_send_bytes() {
    let python = match python() {
        Ok(python) => python,
        Err(why) => return skipped(&format!("no Python with drivers could be made: {why}")),
    };
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start_bank(&[0, 1], false);
    for (place, blob) in [(0, "bytea"), (1, "longblob")] {
        let server = &rig.servers[place];
        said("DROP TABLE IF EXISTS accounts", server.login());
        let text = format!(
            "CREATE TABLE accounts (id int PRIMARY KEY, balance int NOT NULL, note {blob})"
        );
        said(&text, server.login());
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/middleware/drivers.py");
    let ports = [rig.postgresql.to_string(), rig.mysql.to_string()];
    let output =
        Command::new(&python).arg(&script).args([CLIENT, SECRET]).args(ports).output().unwrap();
    let told = all_of(&output);
    assert!(output.status.success() && told.contains("ok"), "{}\n{told}", rig.log());
}

/// A statement of a MySQL client that fails at a PostgreSQL source, or at several, undoes only itself.
#[test]
fn a_statement_of_a_mysql_client_that_fails_undoes_only_itself() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start_bank(&[0, 1], false);
    let mut maria = Talk::begin(rig, MARIA);
    let balances = "SELECT sum(balance) FROM accounts WHERE id IN (2, 101, 102)";
    let add = |id| format!("UPDATE accounts SET balance = balance + 5 WHERE id = {id}");
    for (round, starts) in ["BEGIN", "SET autocommit = 0"].into_iter().enumerate() {
        maria.does(starts);
        maria.does(&add(101));
        maria.does(&add(2));
        for (repeated, code) in [
            ("INSERT INTO accounts (id, balance) VALUES (1, 7)", "1062"),
            ("INSERT INTO accounts (id, balance) VALUES (101, 7)", "1062"),
            ("INSERT INTO accounts (id, balance) VALUES (50, 7), (101, 7)", "1062"),
            ("INSERT INTO accounts (id, balance) VALUES (150, 7), (1, 7)", "1062"),
            ("UPDATE accounts SET balance = NULL WHERE id IN (3, 103)", "1048"),
        ] {
            assert_eq!(maria.refused(repeated), code, "{starts}: {repeated}");
        }
        maria.does(&add(102));
        maria.does("COMMIT");
        maria.does("SET autocommit = 1");
        assert_eq!(maria.shows(balances), (3_000 + 15 * (round + 1)).to_string(), "{starts}");
        assert_eq!(maria.shows("SELECT count(*) FROM accounts"), "40", "{starts}");
    }
}

/// A failure in one text with the COMMIT, at a PostgreSQL source or at several, rolls back the whole transaction. A MySQL
/// client expects that its other statements remain: what follows must not be carried out as if they did.
#[test]
fn a_mysql_client_is_told_that_a_failure_at_postgresql_rolled_its_transaction_back() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start_bank(&[0, 1], false);
    let mut maria = Talk::begin(rig, MARIA);
    let balance = |maria: &mut Talk, id| {
        maria.shows(&format!("SELECT balance FROM accounts WHERE id = {id}"))
    };
    let (first, second) = (balance(&mut maria, 101), balance(&mut maria, 102));
    let add = |id| format!("UPDATE accounts SET balance = balance + 5 WHERE id = {id}");
    let repeated = "INSERT INTO accounts (id, balance) VALUES (1, 7)";
    for starts in ["BEGIN", "SET autocommit = 0"] {
        maria.does("SET autocommit = 1");
        maria.does("BEGIN");
        maria.does(&add(101));
        assert_eq!(maria.refused(&format!("{repeated}; COMMIT")), "1062", "{starts}");
        assert_eq!(maria.refused(&add(102)), "1213", "{starts}: a statement that follows");
        maria.does("ROLLBACK");
        maria.does("BEGIN");
        maria.does(&add(101));
        assert_eq!(maria.refused(&format!("{repeated}; COMMIT")), "1062", "{starts}");
        assert_eq!(maria.refused("COMMIT"), "1213", "{starts}: its end");
        maria.does(starts);
        maria.does(&add(101));
        assert_eq!(maria.refused(repeated), "1062", "{starts}");
        maria.does("ROLLBACK");
        maria.does("SET autocommit = 1");
        assert_eq!(
            (balance(&mut maria, 101), balance(&mut maria, 102)),
            (first.clone(), second.clone())
        );
    }
    // Nothing came before the failure, so nothing is lost.
    maria.does("BEGIN");
    assert_eq!(maria.refused(repeated), "1062");
    maria.does(&add(102));
    maria.does("COMMIT");
    assert_eq!(balance(&mut maria, 102), (second.parse::<i64>().unwrap() + 5).to_string());
    assert_eq!(balance(&mut maria, 101), first);
}

/// Operators of one level make a tree as deep as their number. It fits into the stack, or is
/// refused.
#[test]
fn statements_of_many_operators_are_carried_out_or_refused() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start_bank(&[0, 1], false);
    for kind in [POSTGRES, MARIA] {
        let mut talk = Talk::begin(rig, kind);
        let sum = |terms: usize| format!("SELECT 1{}", "+1".repeat(terms));
        let any = |terms: usize| {
            format!("SELECT count(*) FROM accounts WHERE id = 1{}", " OR id = 1".repeat(terms))
        };
        let union = |terms: usize| format!("SELECT 1{}", " UNION SELECT 1".repeat(terms));
        // MariaDB itself has a small stack, and refuses longer ones with the same number.
        let (terms, queries) = if kind == POSTGRES { (3_000, 300) } else { (300, 100) };
        assert_eq!(talk.shows(&sum(terms)), (terms + 1).to_string(), "{kind}");
        assert_eq!(talk.shows(&any(2_000)), "1", "{kind}");
        assert_eq!(talk.shows(&union(queries)), "1", "{kind}");
        let code = if kind == POSTGRES { "54001" } else { "1436" };
        for text in [sum(30_000), any(30_000), union(3_000), format!("SELECT ({})", sum(30_000))] {
            assert_eq!(talk.refused(&text), code, "{kind}");
        }
        let casts = format!("SELECT 1{}", "::int".repeat(20_000));
        if kind == POSTGRES {
            assert_eq!(talk.refused(&casts), code);
        }
        assert_eq!(talk.shows("SELECT 1"), "1", "{kind}: the connection goes on");
    }
}

/// A decision to commit is durable before the sources have executed it. A client that knows of the
/// commit sees it everywhere.
#[test]
fn a_client_sees_what_it_has_committed() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    for agents in [true, false] {
        rig.start_bank(&[0, 1], agents);
        for (kind, level) in [
            (POSTGRES, "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL READ COMMITTED"),
            (MARIA, "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED"),
        ] {
            let mut client = Talk::begin(rig, kind);
            for id in 21..60 {
                client.does(&format!(
                    "BEGIN; INSERT INTO accounts (id, balance) VALUES ({id}, 0), ({}, 0); COMMIT",
                    100 + id
                ));
                let count = client.shows("SELECT count(*) FROM accounts");
                assert_eq!(count, (id * 2).to_string(), "{kind}, agents: {agents}");
            }
            client.does(level);
            for balance in 2_000..2_040 {
                client.does("BEGIN");
                client
                    .does(&format!("UPDATE accounts SET balance = {balance} WHERE id IN (1, 101)"));
                client.does("COMMIT");
                let found = format!("SELECT count(*) FROM accounts WHERE balance = {balance}");
                assert_eq!(client.shows(&found), "2", "{kind}, agents: {agents}");
            }
            client.does("UPDATE accounts SET balance = 1000 WHERE id IN (1, 101)");
            client.does("DELETE FROM accounts WHERE id > 20 AND balance = 0");
        }
        rig.settle("clients that read what they wrote");
    }
}

#[test]
fn chained_transactions_have_the_same_isolation_and_access() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start_bank(&[0, 1], false);
    let write = "UPDATE accounts SET balance = 1000 WHERE id = 1";
    let read = "SELECT balance FROM accounts WHERE id IN (1, 101)";
    let mut client = Talk::begin(rig, POSTGRES);
    for end in ["COMMIT AND CHAIN", "ROLLBACK AND CHAIN"] {
        for does in ["", read, "SELECT 1 / 0 FROM accounts WHERE id = 1"] {
            client.does("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY");
            if !does.is_empty() {
                let _ = client.text(does);
            }
            client.does(end);
            assert_eq!(
                client.shows("SHOW transaction_isolation"),
                "repeatable read",
                "{end}, {does}"
            );
            client.does(end);
            assert_eq!(client.shows("SHOW transaction_read_only"), "on", "{end}, {does}");
            client.does(read);
            assert_eq!(client.refused(write), "25006", "{end}, {does}");
            client.does("ROLLBACK");
            assert_eq!(client.shows("SHOW transaction_isolation"), "serializable", "{end}, {does}");
            client.does(write);
        }
    }
    let mut client = Talk::begin(rig, MARIA);
    for end in ["COMMIT AND CHAIN", "ROLLBACK AND CHAIN"] {
        client.does("START TRANSACTION READ ONLY");
        client.does(read);
        client.does(end);
        assert_eq!(client.refused(write), "1792", "{end}");
        client.does("COMMIT");
        client.does(write);
        // At this level, reads of the chained transaction take no locks.
        let mut other = Talk::begin(rig, MARIA);
        client.does("SET TRANSACTION ISOLATION LEVEL READ COMMITTED; BEGIN");
        client.does(read);
        client.does(end);
        client.does(read);
        other.does(write);
        client.does("COMMIT");
    }
    rig.settle("chained transactions");
}

/// Statements and cursors that a client gives names by SQL.
#[test]
fn prepared_statements_and_cursors_belong_to_their_session() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start_bank(&[0, 1], false);
    let seen = rig.psql(
        "PREPARE p (int, int) AS SELECT balance + $2 FROM accounts WHERE id = $1; EXECUTE p (1, 5); EXECUTE p (101, 6); \
         DEALLOCATE p",
    );
    assert_eq!(seen, "1005\n1006");
    let seen = rig.psql(
        "BEGIN; DECLARE c SCROLL CURSOR FOR SELECT id FROM accounts WHERE id IN (1, 2, 101) ORDER BY id; \
         FETCH 2 FROM c; FETCH NEXT FROM c; FETCH BACKWARD 1 FROM c; MOVE LAST FROM c; FETCH 0 FROM c; CLOSE c; COMMIT",
    );
    assert_eq!(seen, "1\n2\n101\n2\n101");
    let refused = rig.try_psql("BEGIN; DECLARE c CURSOR FOR SELECT 1; COMMIT; FETCH c");
    assert!(all_of(&refused).contains("does not exist"), "{}", all_of(&refused));
    let seen = rig.mysql(
        "PREPARE p FROM 'SELECT balance FROM accounts WHERE id = 101'; EXECUTE p; EXECUTE p; DEALLOCATE PREPARE p",
    );
    assert_eq!(seen, "1000\n1000");
}

/// Transactions that fail with a duplicate key are over for their clients before MariaDB has ended
/// them, so they pile up. They used up all connections, and clients were told to try again.
#[test]
fn branches_leave_connections_of_a_source_to_others() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    said("SET GLOBAL max_connections = 16", rig.servers[1].login());
    rig.start_bank(&[0, 1], false);
    let duplicate = "INSERT INTO accounts (id, balance) VALUES (1, 0), (101, 0)";
    let told = std::thread::scope(|threads| {
        let clients: Vec<_> = (0..16)
            .map(|number| {
                let mut talk = Talk::begin(rig, if number % 2 == 0 { POSTGRES } else { MARIA });
                threads.spawn(move || {
                    let refusals = (0..15).map(|_| match talk.text(duplicate) {
                        Err(Refused::Fault(fault)) => fault,
                        other => panic!("{other:?}"),
                    });
                    refusals.collect::<Vec<_>>()
                })
            })
            .collect();
        clients.into_iter().flat_map(|client| client.join().unwrap()).collect::<Vec<_>>()
    });
    assert_eq!(said("SELECT 1", rig.servers[1].login()).trim(), "1");
    said("SET GLOBAL max_connections = 151", rig.servers[1].login());
    for fault in &told {
        assert!(!fault.message.contains("broke"), "{fault:?}");
        assert!(!fault.message.contains("Too many connections"), "{fault:?}");
    }
    let duplicates = told.iter().filter(|fault| fault.sqlstate.starts_with("23")).count();
    assert!(duplicates > 0, "{told:?}");
    rig.finish();
}
