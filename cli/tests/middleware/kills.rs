//! Money moves between both kinds of sources under load, every party is killed in turn as `kill -9`
//! does, and the total must not change.

use std::fs;
use std::process::{Child, Command};
use std::time::Duration;

use orthodrome_middleware::local::postgres_client;

use crate::rig::{CLIENT, Rig, SECRET, done, rig};

/// A transfer over three sources in rounds.
const ROUNDS: &str = "BEGIN;\nUPDATE accounts SET balance = balance - :d WHERE id = :a;\n\
     UPDATE accounts SET balance = balance + :d - 1 WHERE id = :b;\n\
     UPDATE accounts SET balance = balance + 1 WHERE id = :c;\nCOMMIT;\n";

/// The last statement of a transaction in rounds is marked.
const MARKED: &str = "BEGIN;\nUPDATE accounts SET balance = balance - :d WHERE id = :a;\n\
     UPDATE accounts SET balance = balance + :d - 1 WHERE id = :b;\n\
     /*last query*/ UPDATE accounts SET balance = balance + 1 WHERE id = :c;\nCOMMIT;\n";

/// All of it in one query batch.
const TEXT: &str = "BEGIN \\; UPDATE accounts SET balance = balance - :d WHERE id = :a \\; \
     UPDATE accounts SET balance = balance + :d - 1 WHERE id = :b \\; \
     UPDATE accounts SET balance = balance + 1 WHERE id = :c \\; COMMIT;\n";

/// All of it in one pipeline of the extended protocol.
const PIPELINE: &str = "\\startpipeline\nBEGIN;\nUPDATE accounts SET balance = balance - :d WHERE id = :a;\n\
     UPDATE accounts SET balance = balance + :d - 1 WHERE id = :b;\n\
     UPDATE accounts SET balance = balance + 1 WHERE id = :c;\nCOMMIT;\n\\endpipeline\n";

impl Rig {
    /// Transfers by `pgbench`, with several clients, until it is stopped or loses the proxy.
    fn load(&self, script: &str, seconds: u32) -> Child {
        self.load_on(self.postgresql, "pgbench.log", script, &["-T", &seconds.to_string()])
    }

    fn load_on(&self, port: u16, log: &str, script: &str, length: &[&str]) -> Child {
        let draws = "\\set a random(1, 20)\n\\set b random(101, 120)\n\\set c random(201, 220)\n\
                     \\set d random(1, 10)\n";
        fs::write(self.path("transfer.sql"), format!("{draws}{script}")).unwrap();
        let log = fs::File::create(self.path(log)).unwrap();
        let mut command = Command::new(postgres_client("pgbench"));
        command.args(["-h", "127.0.0.1", "-p", &port.to_string(), "-U", CLIENT, "-n"]);
        command.args(["-c", "6"]).args(length).args(["--max-tries=50", "-f"]);
        let protocol = if script == PIPELINE { "extended" } else { "simple" };
        command
            .arg(self.path("transfer.sql"))
            .args(["-M", protocol])
            .arg("bank")
            .env("PGPASSWORD", SECRET);
        command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap()
    }

    /// Number of votes that came without a request.
    fn undisturbed(&self, script: &str) -> u64 {
        let log = self.path("pgbench.log");
        let mut tries = 0;
        let before = loop {
            let before = self.noted("DecentralizedPrepare");
            tries += 1;
            // This may take any time.
            let mut load = self.load_on(self.postgresql, "pgbench.log", script, &["-t", "12"]);
            if load.wait().unwrap().success() {
                break before;
            }
            // On a busy machine, others hold a row for longer than a statement waits.
            let said = fs::read_to_string(&log).unwrap();
            let is_late = said.contains("due to lock timeout") && tries < 5;
            assert!(is_late, "{}\n{said}", self.log());
        };
        assert!(done(&log) > 5, "{}", fs::read_to_string(log).unwrap());
        let unasked = self.noted("DecentralizedPrepare") - before;
        self.settle("undisturbed load");
        unasked
    }

    fn kill_source(&mut self, place: usize, script: &str) {
        let mut load = self.load(script, 3);
        std::thread::sleep(Duration::from_millis(1_300));
        self.servers[place].kill();
        std::thread::sleep(Duration::from_millis(300));
        self.servers[place].restart().unwrap();
        load.wait().unwrap();
        self.settle(&format!("kill -9 of source {place}"));
    }
}

#[test]
fn money_moves_between_postgresql_and_mariadb_and_none_is_lost() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start_bank(&[0, 1, 2], false);
    // Both kinds of clients see the same table.
    rig.psql("BEGIN; UPDATE accounts SET balance = balance - 5 WHERE id = 1; UPDATE accounts SET balance = balance + 5 WHERE id = 101; COMMIT");
    assert_eq!(
        rig.mysql("SELECT id, balance FROM accounts WHERE id IN (1, 101) ORDER BY id DESC"),
        "101\t1005\n1\t995"
    );
    rig.mysql("BEGIN; UPDATE accounts SET balance = balance + 5 WHERE id = 1; UPDATE accounts SET balance = balance - 5 WHERE id = 101; COMMIT");
    assert_eq!(
        rig.psql("SELECT min(balance), max(balance), avg(balance) FROM accounts"),
        "1000|1000|1000.0000000000000000"
    );
    // A failure at one source undoes the other's part.
    let failed = rig.try_psql("BEGIN; UPDATE accounts SET balance = 0 WHERE id = 1; INSERT INTO accounts (id, balance) VALUES (101, 1); COMMIT");
    assert!(
        !failed.status.success() && String::from_utf8_lossy(&failed.stderr).contains("Duplicate")
    );
    rig.settle("a failed statement");
    assert!(
        rig.psql("EXPLAIN SELECT * FROM accounts WHERE id = 101").contains("LOCK IN SHARE MODE")
    );
    rig.undisturbed(ROUNDS);
    for round in 0..2 {
        let mut load = rig.load(ROUNDS, 20);
        std::thread::sleep(Duration::from_millis(1_000 + 170 * round));
        rig.proxy = None;
        load.wait().unwrap();
        rig.start_proxy(None);
        rig.settle("kill -9 of the proxy");
    }
    for place in 0..2 {
        rig.kill_source(place, ROUNDS);
    }
}

#[test]
fn agents_beside_the_sources_prepare_and_every_party_may_die() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start_bank(&[0, 1, 2], true);
    for script in [MARKED, TEXT, PIPELINE] {
        let unasked = rig.undisturbed(script);
        assert!(unasked > 15, "only {unasked} votes came without having been asked for");
    }
    // Without an annotation, and with `COMMIT` in its own query batch, it is unknown which
    // statement is the last.
    assert_eq!(rig.undisturbed(ROUNDS), 0);
    for place in 0..2 {
        let mut load = rig.load(TEXT, 3);
        std::thread::sleep(Duration::from_millis(1_300));
        rig.agents.remove(&place);
        std::thread::sleep(Duration::from_millis(300));
        rig.start_agent(place, None);
        load.wait().unwrap();
        rig.settle(&format!("kill -9 of the agent of source {place}"));
    }
    let mut load = rig.load(TEXT, 20);
    std::thread::sleep(Duration::from_millis(1_300));
    rig.proxy = None;
    load.wait().unwrap();
    rig.start_proxy(None);
    rig.settle("kill -9 of the proxy");
    for place in 0..2 {
        rig.kill_source(place, TEXT);
    }
}

#[test]
fn two_proxies_share_sources_and_one_dies() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start_bank(&[0, 1, 2], true);
    let (second, port) = rig.start_second_proxy(None);
    let mut first_load = rig.load(TEXT, 12);
    let mut second_load = rig.load_on(port, "second.log", MARKED, &["-T", "4"]);
    std::thread::sleep(Duration::from_millis(1_500));
    drop(second);
    second_load.wait().unwrap();
    let (second, _) = rig.start_second_proxy(Some(port));
    assert!(first_load.wait().unwrap().success(), "{}", rig.log());
    let mut committed = done(&rig.path("pgbench.log"));
    // On a busy machine, a transaction may take seconds.
    for _ in 0..10 {
        if committed > 5 {
            break;
        }
        assert!(rig.load(TEXT, 6).wait().unwrap().success(), "{}", rig.log());
        committed += done(&rig.path("pgbench.log"));
    }
    assert!(committed > 5, "the first proxy committed {committed}: {}", rig.log());
    rig.settle("kill -9 of one of two proxies");
    drop(second);
}
