//! What clients set of their sessions, read-only transactions, rows in bulk, and bytes that are no text.

use std::path::Path;
use std::process::Command;

use orthodrome_geotp::sql::{Answer, Dialect};
use orthodrome_server::middleware::local::{Client, Refused};
use tokio::runtime::Runtime;

use crate::rig::{CLIENT, Rig, SECRET, all_of, rig, said};
use crate::tools::{python, skipped};

const POSTGRES: Dialect = Dialect::PostgreSql;
const MARIA: Dialect = Dialect::MariaDb;

/// A client that does one text after the other.
struct Talk {
    client: Client,
    kind: Dialect,
    runtime: Runtime,
}

impl Talk {
    fn begin(rig: &Rig, kind: Dialect) -> Self {
        let runtime = Runtime::new().unwrap();
        let client = runtime.block_on(Client::enter(&rig.login(kind))).unwrap();
        Self { client, kind, runtime }
    }

    fn text(&mut self, text: &str) -> Result<Vec<Answer>, Refused> {
        self.runtime.block_on(self.client.text(text))
    }

    fn does(&mut self, text: &str) {
        self.text(text).unwrap_or_else(|error| panic!("{}: {text}: {error}", self.kind));
    }

    /// The first field of the last answer.
    fn shows(&mut self, text: &str) -> String {
        let kind = self.kind;
        let answers = self.text(text).unwrap_or_else(|error| panic!("{kind}: {text}: {error}"));
        let rows = answers.into_iter().next_back().map(|answer| answer.rows);
        let cell = rows.unwrap_or_default().into_iter().next().and_then(|row| row[0].clone());
        cell.map_or_else(|| "NULL".into(), |cell| String::from_utf8_lossy(&cell).into_owned())
    }

    /// The code that a text is refused with.
    fn refused(&mut self, text: &str) -> String {
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
        // What the source itself says, as part of a statement about its rows.
        let at_postgres = "SELECT current_setting('timezone') FROM accounts WHERE id = 1";
        let at_maria = "SELECT @@time_zone FROM accounts WHERE id = 101";
        let mut postgres = Talk::begin(rig, POSTGRES);
        let mut maria = Talk::begin(rig, MARIA);
        for round in 0..3 {
            postgres.does("SET TIME ZONE INTERVAL '+05:30' HOUR TO MINUTE");
            maria.does("SET time_zone = '-03:00', group_concat_max_len = 2000");
            assert_eq!(postgres.shows(at_postgres), "<+05:30>-05:30", "{round}");
            assert_eq!(postgres.shows("SELECT current_setting('timezone')"), "<+05:30>-05:30");
            assert_eq!(postgres.shows("SHOW timezone"), "<+05:30>-05:30");
            assert_eq!(maria.shows(at_maria), "-03:00", "{round}");
            assert_eq!(maria.shows("SELECT @@time_zone"), "-03:00");
            let both = "SELECT @@group_concat_max_len FROM accounts WHERE id = 101";
            assert_eq!(maria.shows(both), "2000");
            // The other kind of source is in the same zone.
            assert_eq!(maria.shows("SELECT balance FROM accounts WHERE id = 1"), "1000");
            // Nobody else is.
            assert_eq!(rig.psql(at_postgres), "UTC");
            assert_eq!(rig.mysql(at_maria), "+00:00");
            assert_eq!(rig.mysql(&both.replace("SELECT", "SELECT /* other */")), "1048576");
            postgres.does("RESET ALL");
            maria.does("SET time_zone = DEFAULT, group_concat_max_len = DEFAULT");
            assert_eq!(postgres.shows(at_postgres), "UTC");
            assert_eq!(maria.shows(at_maria), "+00:00");
            assert_eq!(maria.shows(both), "1048576");
        }
        postgres.does("SET myapp.tenant = 'a; b'");
        let tenant = "SELECT current_setting('myapp.tenant', true) FROM accounts WHERE id = 2";
        assert_eq!(postgres.shows(tenant), "a; b");
        assert_eq!(rig.psql(tenant), "");
        postgres.does("DISCARD ALL");
        // A server that has known the name once says nothing instead of NULL.
        assert!(["", "NULL"].contains(&postgres.shows(tenant).as_str()));
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
    // A text is a transaction.
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
        // The session goes on.
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
        ("SELEC 1", "42601"),
        ("SELECT FROM WHERE accounts", "42601"),
        ("COPY accounts FROM '/etc/passwd'", "0A000"),
        ("COPY accounts FROM STDIN (FORMAT binary)", "0A000"),
        ("SHOW foo", "42704"),
    ] {
        assert_eq!(client.refused(text), code, "{text}");
        assert_eq!(client.shows("SELECT balance FROM accounts WHERE id = 1"), "1000", "{text}");
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
        ("SELEC 1", "1064"),
        ("SELECT FROM WHERE accounts", "1064"),
    ] {
        assert_eq!(client.refused(text), code, "{text}");
        assert_eq!(client.shows("SELECT balance FROM accounts WHERE id = 1"), "1000", "{text}");
    }
    // Drivers ask for modes to know how to quote: the proxy reads backslashes.
    for text in
        ["SELECT @@sql_mode", "SELECT @@session.sql_mode AS m", "SHOW VARIABLES LIKE 'sql_mode'"]
    {
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
        if is_refused {
            assert_eq!(client.refused(write), "1792", "{begin}");
        } else {
            client.does(write);
        }
        client.does("ROLLBACK");
    }
    // It was of the next transaction only.
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
