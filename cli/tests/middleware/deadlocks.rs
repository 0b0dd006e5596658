//! Deadlocks across several sources end at once, and not by a lock time-out.

use std::time::{Duration, Instant};

use orthodrome_geotp::sql::Dialect;
use orthodrome_middleware::local::{Client, Refused};
use tokio::runtime::Runtime;

use crate::rig::{PATIENCE, Rig, Setup, rig, said, wait};

/// The lock time-out of statements: longer than any of these tests may take.
const LOCK_WAIT: Duration = Duration::from_secs(50);

fn start(rig: &mut Rig, servers: &[usize], agents: bool) {
    let mut setup = Setup::accounts(servers, agents);
    setup.lock_wait_ms = LOCK_WAIT.as_millis() as u32;
    rig.start_bank_as(setup);
}

async fn enter(rig: &Rig) -> Client {
    Client::enter(&rig.login(Dialect::PostgreSql)).await.unwrap()
}

fn take(id: u32) -> String {
    format!("UPDATE accounts SET balance = balance - 1 WHERE id = {id}")
}

/// Each of two transactions waits for a lock of the other, at two sources: the younger one is
/// aborted.
fn statements(rig: &mut Rig, servers: &[usize], agents: bool) {
    start(rig, servers, agents);
    let runtime = Runtime::new().unwrap();
    let begun = Instant::now();
    let (older, younger) = runtime.block_on(async {
        let (mut older, mut younger) = (enter(rig).await, enter(rig).await);
        older.text(&format!("BEGIN; {}", take(1))).await.unwrap();
        younger.text(&format!("BEGIN; {}", take(101))).await.unwrap();
        let (of_older, of_younger) = (take(101), take(1));
        let (told, told_younger) = tokio::join!(older.text(&of_older), younger.text(&of_younger));
        told.unwrap();
        younger.text("ROLLBACK").await.unwrap();
        (older.text("COMMIT").await, told_younger)
    });
    older.unwrap();
    let Err(Refused::Fault(fault)) = younger else { panic!("{servers:?}: both went on") };
    assert_eq!(fault.sqlstate, "40P01", "{servers:?}: {}", fault.message);
    assert!(begun.elapsed() < LOCK_WAIT / 2, "{servers:?}: it took {:?}", begun.elapsed());
    assert_eq!(rig.noted("GlobalDeadlock"), 1, "{}\n{servers:?}", rig.log());
    rig.psql("UPDATE accounts SET balance = balance + 1 WHERE id IN (1, 101)");
    rig.settle("a deadlock");
}

/// The younger one holds its lock as a prepared branch, which at PostgreSQL belongs to no session.
/// It came in one query batch, so the proxy retries it, and its client notices nothing. The retry
/// may overtake the older one at PostgreSQL, which then aborts the older one (40001): its client
/// retries, as clients do.
fn prepared(rig: &mut Rig, servers: &[usize]) {
    start(rig, servers, true);
    let runtime = Runtime::new().unwrap();
    let begun = Instant::now();
    runtime.block_on(async {
        let (mut older, mut younger) = (enter(rig).await, enter(rig).await);
        older.text(&format!("BEGIN; {}", take(1))).await.unwrap();
        let text = format!("BEGIN; {}; {}; COMMIT", take(1), take(101));
        let whole = tokio::spawn(async move { younger.text(&text).await.map(drop) });
        let second = rig.servers[servers[1]].login();
        let list = match second.kind {
            Dialect::PostgreSql => "SELECT gid FROM pg_prepared_xacts",
            Dialect::MariaDb => "XA RECOVER",
        };
        let mut at_second = Client::enter(&second).await.unwrap();
        while at_second.text(list).await.unwrap().iter().all(|answer| answer.rows.is_empty()) {
            assert!(begun.elapsed() < LOCK_WAIT / 2, "{servers:?}: nothing was prepared");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let mut rest = format!("{}; COMMIT", take(101));
        while let Err(refused) = older.text(&rest).await {
            let Refused::Fault(fault) = refused else { panic!("{servers:?}: {refused}") };
            assert!(fault.sqlstate.starts_with("40"), "{servers:?}: {}", fault.message);
            assert!(begun.elapsed() < LOCK_WAIT / 2, "{servers:?}: {}", fault.message);
            rest = format!("ROLLBACK; BEGIN; {}; {}; COMMIT", take(1), take(101));
        }
        whole.await.unwrap().unwrap();
    });
    assert!(begun.elapsed() < LOCK_WAIT / 2, "{servers:?}: it took {:?}", begun.elapsed());
    assert!(rig.noted("GlobalDeadlock") >= 1, "{}\n{servers:?}", rig.log());
    rig.psql("UPDATE accounts SET balance = balance + 2 WHERE id IN (1, 101)");
    rig.settle("a deadlock with a prepared branch");
}

#[test]
fn a_deadlock_across_sources_ends_at_once() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    for servers in [[0, 1], [0, 2], [1, 3]] {
        statements(rig, &servers, true);
    }
    statements(rig, &[0, 1], false);
}

#[test]
fn a_deadlock_with_a_prepared_branch_ends_at_once() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    for servers in [[1, 0], [0, 1]] {
        prepared(rig, &servers);
    }
}

/// Each has looked for a row that the other then inserts at another source: in no serial order both
/// are first.
#[test]
fn rows_that_two_have_missed_are_not_inserted_by_both() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    for (servers, agents) in [([0, 2], true), ([0, 2], false), ([0, 1], true)] {
        start(rig, &servers, agents);
        let runtime = Runtime::new().unwrap();
        let begun = Instant::now();
        let done = runtime.block_on(async {
            let (mut one, mut other) = (enter(rig).await, enter(rig).await);
            let look = |id| format!("BEGIN; SELECT balance FROM accounts WHERE id = {id}");
            for (client, id) in [(&mut one, 50), (&mut other, 150)] {
                let answers = client.text(&look(id)).await.unwrap();
                assert!(answers[1].rows.is_empty(), "{servers:?}: {id} is there");
            }
            let insert = |id| format!("INSERT INTO accounts (id, balance) VALUES ({id}, 0)");
            let (by_one, by_other) = (insert(150), insert(50));
            let (one_said, other_said) = tokio::join!(one.text(&by_one), other.text(&by_other));
            let mut done = Vec::new();
            for (mut client, said) in [(one, one_said), (other, other_said)] {
                if said.is_ok() && client.text("COMMIT").await.is_ok() {
                    done.push(true);
                }
            }
            done.len()
        });
        assert_eq!(done, 1, "{}\n{servers:?}, {agents}", rig.log());
        assert!(begun.elapsed() < LOCK_WAIT / 2, "{servers:?}: it took {:?}", begun.elapsed());
        assert_eq!(rig.psql("SELECT count(*) FROM accounts WHERE id IN (50, 150)"), "1");
        rig.psql("DELETE FROM accounts WHERE id IN (50, 150)");
        rig.settle("rows that were missed");
    }
}

/// Waits until this number of sessions wait for a lock at the second server, which is MariaDB.
fn wait_until_waiting(rig: &Rig, count: usize) {
    let text = "SELECT count(*) FROM information_schema.processlist WHERE info LIKE 'UPDATE accounts%' AND time_ms > 50";
    let waiting =
        wait(Instant::now() + PATIENCE, || said(text, rig.servers[1].login()) == count.to_string());
    waiting.unwrap_or_else(|| panic!("{}\n{count} do not wait", rig.log()));
}

fn balance_of(id: u32) -> String {
    format!("SELECT balance FROM accounts WHERE id = {id}")
}

/// InnoDB returns cached answers if it is asked too often, and a transaction that has only read has
/// no number. A deadlock that closes while others wait, through a row that was only read, is found
/// nevertheless.
#[test]
fn a_deadlock_that_closes_while_others_wait_ends_at_once() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    for agents in [false, true] {
        start(rig, &[0, 1], agents);
        let begun = Instant::now();
        Runtime::new().unwrap().block_on(async {
            // From now on there are lock waits to be queried.
            let (mut holder, mut waiter) = (enter(rig).await, enter(rig).await);
            holder.text(&format!("BEGIN; {}", take(110))).await.unwrap();
            let waits = tokio::spawn(async move { waiter.text(&take(110)).await.map(drop) });
            tokio::task::block_in_place(|| wait_until_waiting(rig, 1));
            let (mut older, mut younger) = (enter(rig).await, enter(rig).await);
            older.text(&format!("BEGIN; {}", balance_of(101))).await.unwrap();
            younger.text(&format!("BEGIN; {}", take(1))).await.unwrap();
            let (of_older, of_younger) = (take(1), take(101));
            let (told, told_younger) =
                tokio::join!(older.text(&of_older), younger.text(&of_younger));
            told.unwrap();
            let Err(Refused::Fault(fault)) = told_younger else { panic!("both went on") };
            assert_eq!(fault.sqlstate, "40P01", "{}", fault.message);
            assert!(begun.elapsed() < LOCK_WAIT / 2, "it took {:?}", begun.elapsed());
            older.text("ROLLBACK").await.unwrap();
            holder.text("ROLLBACK").await.unwrap();
            waits.await.unwrap().unwrap();
        });
        assert_eq!(rig.noted("GlobalDeadlock"), 1, "{}", rig.log());
        rig.psql("UPDATE accounts SET balance = balance + 1 WHERE id = 110");
        rig.settle("a deadlock through a row that was only read");
    }
}

/// Two transactions have only read at MariaDB, and one of them is waited for: they must not be
/// confused.
#[test]
fn who_has_only_read_is_not_taken_for_somebody_else() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    start(rig, &[0, 1], false);
    Runtime::new().unwrap().block_on(async {
        let (mut writer, mut reader, mut other) =
            (enter(rig).await, enter(rig).await, enter(rig).await);
        writer.text(&format!("BEGIN; {}", take(1))).await.unwrap();
        reader.text(&format!("BEGIN; {}", balance_of(101))).await.unwrap();
        other.text(&format!("BEGIN; {}", balance_of(102))).await.unwrap();
        // The other waits for the writer, the writer for the reader, and the reader for nothing.
        let other = tokio::spawn(async move {
            let told = other.text(&take(1)).await.map(drop);
            (other, told)
        });
        let writer = tokio::spawn(async move {
            let told = writer.text(&take(101)).await.map(drop);
            (writer, told)
        });
        tokio::task::block_in_place(|| wait_until_waiting(rig, 1));
        // Long enough for several queries of the lock waits.
        tokio::time::sleep(Duration::from_millis(1_500)).await;
        reader.text("COMMIT").await.unwrap();
        for waiting in [writer, other] {
            let (mut client, told) = waiting.await.unwrap();
            told.unwrap_or_else(|error| panic!("{}\n{error}", rig.log()));
            client.text("ROLLBACK").await.unwrap();
        }
    });
    assert_eq!(rig.noted("GlobalDeadlock"), 0, "{}", rig.log());
    rig.settle("readers");
}

/// Two who have locked a row each and then read the row of the other, both at MariaDB: only numbers
/// of branches show who waits for a reader.
async fn readers_deadlock(rig: &Rig) -> Option<String> {
    let (mut one, mut other) = (enter(rig).await, enter(rig).await);
    one.text(&format!("BEGIN; {}", take(1))).await.unwrap();
    other.text(&format!("BEGIN; {}", take(101))).await.unwrap();
    let (of_one, of_other) = (balance_of(101), balance_of(1));
    let (told, told_other) = tokio::join!(one.text(&of_one), other.text(&of_other));
    let fault = [told, told_other].into_iter().find_map(|told| match told {
        Err(Refused::Fault(fault)) => Some(fault.sqlstate),
        _ => None,
    });
    for client in [&mut one, &mut other] {
        client.text("ROLLBACK").await.unwrap();
    }
    fault
}

#[test]
fn interrupted_statements_do_not_end_the_detection_of_deadlocks() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    start(rig, &[1, 3], false);
    Runtime::new().unwrap().block_on(async {
        assert_eq!(readers_deadlock(rig).await.as_deref(), Some("40P01"));
        let mut clients = Vec::new();
        for number in 0..8 {
            let mut client = enter(rig).await;
            clients.push(tokio::spawn(async move {
                client.text(&format!("SET statement_timeout = {}", 1 + number % 4)).await.unwrap();
                let text = format!("BEGIN; {}; {}; COMMIT", take(10 + number), take(110 + number));
                let mut interrupted = 0;
                for _ in 0..60 {
                    if client.text(&text).await.is_err() {
                        interrupted += 1;
                        client.text("ROLLBACK").await.unwrap();
                    }
                }
                interrupted
            }));
        }
        let mut interrupted = 0;
        for client in clients {
            interrupted += client.await.unwrap();
        }
        assert!(interrupted > 20, "only {interrupted} statements were interrupted");
        let begun = Instant::now();
        assert_eq!(readers_deadlock(rig).await.as_deref(), Some("40P01"));
        assert!(begun.elapsed() < LOCK_WAIT / 2, "it took {:?}", begun.elapsed());
    });
    rig.finish();
}
