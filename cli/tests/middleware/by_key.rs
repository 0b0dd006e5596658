//! The modes `scalardb` and `scalardb+`: supported statements, and what clients see.

use std::time::Instant;

use crate::rig::{PATIENCE, Rig, Setup, rig, said, wait};

impl Rig {
    fn start_by_key(&mut self, mode: &str) {
        let mut setup = Setup::accounts(&[0, 1], false);
        setup.settings = format!("mode = \"{mode}\"\n");
        self.start_bank_as(setup);
    }

    /// The error of a refused statement.
    fn refused(&self, text: &str) -> String {
        let output = self.try_psql(text);
        assert!(!output.status.success(), "{text}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    }
}

#[test]
fn a_transaction_by_key_sees_what_it_has_written_and_nobody_else_does() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    for mode in ["scalardb", "scalardb+"] {
        rig.start_by_key(mode);
        let inside = rig.psql(
            "BEGIN; UPDATE accounts SET balance = balance - 10 WHERE id = 1; \
             UPDATE accounts SET balance = balance + 10 WHERE id = 101; \
             UPDATE accounts SET balance = balance * 2 WHERE id IN (1, 101); INSERT INTO accounts (id, balance) VALUES (50, 7); \
             SELECT balance FROM accounts WHERE id IN (1, 50, 101) ORDER BY id; ROLLBACK",
        );
        assert!(inside.contains("1980\n7\n2020"), "{mode}: {inside}");
        let all = "SELECT balance FROM accounts WHERE id IN (1, 50, 101) ORDER BY id";
        assert_eq!(rig.psql(all), "1000\n1000", "{mode}");
        // From clients of both kinds, and in several query batches.
        rig.mysql(
            "BEGIN; UPDATE accounts SET balance = balance - 10 WHERE id = 1; \
             UPDATE accounts SET balance = balance + 10 WHERE id = 101; COMMIT",
        );
        rig.psql("INSERT INTO accounts (id, balance) VALUES (50, 7)");
        assert_eq!(rig.psql(all), "990\n7\n1010", "{mode}");
        // The tables contain the committed values, also for direct readers.
        let there = said("SELECT balance FROM accounts WHERE id = 1", rig.servers[0].login());
        assert_eq!(there, "990");
        // Also with comments before the verb.
        rig.psql("-- name: Pay :exec\nUPDATE/**/accounts SET balance = 8 WHERE id = 50");
        rig.psql("/* a /* b */ c */ UPDATE accounts SET balance = balance + 1 WHERE id = 50");
        assert_eq!(rig.psql("SELECT balance FROM accounts WHERE id = 50"), "9", "{mode}");
        rig.psql("DELETE FROM accounts WHERE id = 50");
        assert_eq!(rig.psql(all), "990\n1010", "{mode}");
    }
}

#[test]
fn statements_that_cannot_be_controlled_by_key_are_refused() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start_by_key("scalardb");
    for (text, because) in [
        ("SELECT sum(balance) FROM accounts", "name each row"),
        ("UPDATE accounts SET balance = 0 WHERE id < 5", "name each row"),
        (
            "UPDATE accounts SET balance = random() WHERE id = 5",
            "random() would have another value",
        ),
        ("TRUNCATE accounts", "delete rows by their keys"),
        ("INSERT INTO accounts (id, balance) VALUES (1, 1)", "duplicate key"),
        ("INSERT INTO accounts (id, balance) VALUES (90, 'x')", "invalid input syntax"),
        ("SHOW ORTHODROME TRANSACTIONS", "does not support this"),
        ("BEGIN; INSERT INTO accounts VALUES (90, 1); ROLLBACK", "name each row"),
    ] {
        let said = rig.refused(text);
        assert!(said.contains(because), "{text}: {said}");
    }
    assert_eq!(rig.psql("SELECT balance FROM accounts WHERE id = 5"), "1000");
    let plan = rig.psql("EXPLAIN SELECT balance FROM accounts WHERE id = 5");
    assert!(plan.contains("records: accounts[5]"), "{plan}");
}

/// A proxy that dies between its decision and the end leaves a record that is prepared and
/// committed.
#[test]
fn what_a_dead_proxy_left_prepared_is_ended_as_it_had_decided() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start_by_key("scalardb");
    rig.psql("UPDATE accounts SET balance = 1 WHERE id IN (1, 101)");
    // In the state that such a proxy leaves at both sources. The transaction state is at the
    // nearest one, whose node is 1001.
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let since = since.as_nanos();
    let digits = |text: &str| text.bytes().map(|byte| format!("{byte:02x}")).collect::<String>();
    for (decided, left, then) in [(true, 7, "8"), (false, 9, "8")] {
        for (server, id) in [(0, 1), (1, 101)] {
            let login = || rig.servers[server].login();
            let redo = digits(&format!("UPDATE accounts SET balance = 8 WHERE id = {id}"));
            // The record that was just written is the only one.
            said(
                &format!(
                    "UPDATE orthodrome_records SET by_client = {left}, by_counter = 1, coordinator = 1001, since = {since}"
                ),
                login(),
            );
            said(&format!("INSERT INTO orthodrome_redo VALUES ({left}, 1, '{redo}')"), login());
        }
        let state = if decided { "1" } else { "NULL" };
        said(
            &format!("INSERT INTO orthodrome_states VALUES ({left}, 1, {state})"),
            rig.servers[0].login(),
        );
        for id in [1, 101] {
            let mut seen = String::new();
            wait(Instant::now() + PATIENCE, || {
                let output = rig.try_psql(&format!("SELECT balance FROM accounts WHERE id = {id}"));
                seen = String::from_utf8_lossy(&output.stdout).trim().to_owned();
                output.status.success()
            })
            .unwrap_or_else(|| panic!("{}\n{id}, {decided}: cannot be read", rig.log()));
            assert_eq!(seen, then, "{id}, {decided}");
        }
    }
    // A reader that comes before the end of the record finds it again.
    assert!(rig.noted("RolledForward") >= 2 && rig.noted("RolledBack") >= 2);
}
