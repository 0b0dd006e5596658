//! A number belongs to one proxy, whose decision log decides about the transactions with that
//! number.

use std::fs;
use std::process::{Command, Stdio};
use std::time::Instant;

use crate::rig::{PATIENCE, Rig, all_of, rig, said, wait};

/// PostgreSQL's lock on number 1, in both of its parts: server 0 is source 1001.
const POSTGRES_LOCK: &str = "1869742081, 1001";

impl Rig {
    /// Moves money between the sources until it succeeds.
    fn moves_money(&self, when: &str) {
        let mut problem = String::new();
        let moved = wait(Instant::now() + PATIENCE, || {
            let output = self.try_psql(
                "BEGIN; UPDATE accounts SET balance = balance - 3 WHERE id = 1; \
                 UPDATE accounts SET balance = balance + 3 WHERE id = 101; COMMIT",
            );
            problem = all_of(&output);
            output.status.success()
        });
        moved.unwrap_or_else(|| panic!("{}\nno money moves {when}: {problem}", self.log()));
        self.settle(when);
    }

    /// Ends the sessions that hold the claims at both sources.
    fn end_claims(&self) {
        let postgres = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
                        WHERE application_name LIKE 'orthodrome_claim_%'";
        assert_eq!(said(postgres, self.servers[0].login()), "t");
        let holder = "SELECT IS_USED_LOCK('orthodrome_proxy_1_1002')";
        let holder = said(holder, self.servers[1].login());
        said(&format!("KILL {holder}"), self.servers[1].login());
    }

    /// Waits until number 1 is claimed at both sources.
    fn wait_until_claimed(&self) {
        let is_claimed = || {
            let postgres = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 2";
            let maria = "SELECT IS_USED_LOCK('orthodrome_proxy_1_1002') IS NOT NULL";
            said(postgres, self.servers[0].login()) == "1"
                && said(maria, self.servers[1].login()) == "1"
        };
        let claimed = wait(Instant::now() + PATIENCE, is_claimed);
        claimed.unwrap_or_else(|| panic!("{}\nno claim at both sources", self.log()));
    }
}

#[test]
fn a_number_that_another_proxy_uses_is_refused() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    for agents in [false, true] {
        rig.start_bank(&[0, 1], agents);
        rig.wait_until_claimed();
        let said = rig.third_refuses();
        for part in
            ["source s", "number 1 belongs to another decision log", "proxy `test`, process "]
        {
            assert!(said.contains(part), "{part}: {said}");
        }
        rig.moves_money("beside a proxy that was refused");
    }
}

#[test]
fn copies_of_a_decision_log_are_refused() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start_bank(&[0, 1], false);
    rig.wait_until_claimed();
    // The file of the copy is written first, because its folder does not exist yet.
    let said = rig.third_refuses();
    assert!(said.contains("another decision log"), "{said}");
    fs::remove_dir_all(rig.path("proxy3")).unwrap();
    let copied =
        Command::new("cp").arg("-r").args([rig.path("proxy"), rig.path("proxy3")]).status();
    assert!(copied.unwrap().success());
    let said = rig.refuses("proxy3", &[]);
    assert!(said.contains("number 1 is held by its session"), "{said}");
    // After the original has run again, the copy lacks its decisions.
    rig.start_proxy(None);
    rig.wait_until_claimed();
    rig.moves_money("after a new start");
    rig.proxy = None;
    let said = rig.refuses("proxy3", &[]);
    assert!(said.contains("this decision log is an old copy"), "{said}");
    rig.start_proxy(None);
    rig.moves_money("after a copy was refused");
}

#[test]
fn a_lost_decision_log_is_taken_over_only_on_order_and_when_nothing_is_in_doubt() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    // All servers, because later tests use the new log with any of them.
    rig.start_bank(&[0, 1, 2, 3], false);
    rig.wait_until_claimed();
    rig.proxy = None;
    let life = "SELECT life FROM orthodrome_proxies WHERE proxy = 1 AND at_source = 1001";
    let before: u64 = said(life, rig.servers[0].login()).parse().unwrap();
    let prepare = "BEGIN; UPDATE accounts SET balance = balance WHERE id = 1; \
                   PREPARE TRANSACTION 'orthodrome_1_1_999_1001'";
    said(prepare, rig.servers[0].login());
    fs::rename(rig.path("proxy"), rig.path("lost")).unwrap();
    let told = rig.refuses("proxy", &[]);
    assert!(told.contains("belongs to another decision log"), "{told}");
    let told = rig.refuses("proxy", &["--take-over"]);
    assert!(told.contains("transaction n1/1.999 of number 1 is prepared there"), "{told}");
    said("ROLLBACK PREPARED 'orthodrome_1_1_999_1001'", rig.servers[0].login());
    rig.proxy = Some(rig.run("proxy", "proxy", None, &["--take-over"]));
    rig.wait_until_claimed();
    rig.moves_money("after the number was taken over");
    let after: u64 = said(life, rig.servers[0].login()).parse().unwrap();
    assert!(after > before, "names of life {before} are used again in life {after}");
    rig.start_proxy(None);
    rig.moves_money("at the next start");
}

#[test]
fn a_claim_that_is_lost_is_taken_again() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    for agents in [false, true] {
        rig.start_bank(&[0, 1], agents);
        rig.wait_until_claimed();
        rig.end_claims();
        rig.moves_money("after the claims were lost");
        rig.wait_until_claimed();
    }
}

#[test]
fn a_proxy_whose_number_another_has_taken_stops() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start_bank(&[0, 1], false);
    rig.wait_until_claimed();
    // Another session waits for the lock, and gets it when the claim is lost.
    let wanted = format!("SELECT pg_advisory_lock({POSTGRES_LOCK}); SELECT pg_sleep(1000)");
    let mut other = rig.servers[0].login().client(&wanted);
    let mut other = other.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let waits = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted";
    let waiting = wait(Instant::now() + PATIENCE, || said(waits, rig.servers[0].login()) == "1");
    waiting.expect("nobody waits for the lock on the number");
    rig.end_claims();
    let status = rig.proxy.as_mut().unwrap().ended();
    other.kill().unwrap();
    other.wait().unwrap();
    assert_eq!(status.and_then(|status| status.code()), Some(1), "{}", rig.log());
    let log = rig.log();
    assert!(log.contains("source s0: number 1 is held by its session"), "{log}");
    // This also ends its session at the server.
    let end = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE query LIKE '%pg_sleep%' \
               AND pid <> pg_backend_pid()";
    said(end, rig.servers[0].login());
    rig.start_proxy(None);
    rig.moves_money("after the other has gone");
}

#[test]
fn a_source_that_is_down_at_the_start_is_claimed_when_it_is_back() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start_bank(&[0, 1], false);
    rig.wait_until_claimed();
    for place in [0, 1] {
        rig.proxy = None;
        rig.servers[place].kill();
        rig.start_proxy(None);
        rig.servers[place].restart().unwrap();
        rig.moves_money("after a source came back");
        rig.wait_until_claimed();
    }
}

#[test]
fn a_proxy_ends_with_its_input_where_that_is_wanted() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start_bank(&[0, 1], false);
    rig.proxy = None;
    rig.proxy = Some(rig.run("proxy", "proxy", None, &["--end-with-input"]));
    rig.moves_money("while its input is open");
    let proxy = rig.proxy.as_mut().unwrap();
    proxy.end_input();
    let status = proxy.ended();
    assert!(status.is_some_and(|status| status.success()), "{status:?}\n{}", rig.log());
}
