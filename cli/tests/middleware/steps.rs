//! A transfer between PostgreSQL and MariaDB in `psql`, where a party is killed at each step of the
//! commit. A decided transaction must be completed, any other one undone, the total must not
//! change, and nothing may stay prepared or locked.

use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use orthodrome_geotp::sql::Dialect;

use crate::rig::{PATIENCE, Rig, all_of, rig, wait};

/// A party that stops at a step, or is killed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Party {
    Proxy,
    Agent(usize),
    Source(usize),
}

/// The form of the transfer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Typed {
    /// In one query batch, so that agents prepare without a request.
    Text,
    /// Each statement by itself, so that the proxy requests votes.
    Statements,
}

/// The expected result of a kill.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Expected {
    Committed,
    RolledBack,
    Either,
}

use Expected::{Committed, Either, RolledBack};
use Party::{Agent, Proxy, Source};
use Typed::{Statements, Text};

/// The party and the step at which it stops, the killed parties, and the expected results. The
/// first source is PostgreSQL, the second MariaDB.
struct Case(Party, &'static str, Typed, &'static [(Party, Expected)]);

/// With the agents inside the proxy, so that they die with it.
const INSIDE: &[Case] = &[
    Case(Proxy, "execute:2", Statements, &[(Proxy, RolledBack)]),
    Case(Proxy, "vote:2", Text, &[(Proxy, RolledBack)]),
    Case(Proxy, "decide", Text, &[(Proxy, RolledBack)]),
    Case(Proxy, "commit:1", Text, &[(Proxy, Committed)]),
    Case(Proxy, "commit:2", Statements, &[(Proxy, Committed)]),
    Case(Proxy, "end:2", Text, &[(Proxy, Committed)]),
    Case(Proxy, "acknowledge:2", Text, &[(Proxy, Committed)]),
];

/// With agents of their own.
const BESIDE: &[Case] = &[
    Case(Proxy, "execute:2", Text, &[(Proxy, RolledBack), (Agent(0), Either)]),
    Case(
        Proxy,
        "prepare:2",
        Statements,
        &[(Proxy, RolledBack), (Agent(1), RolledBack), (Source(1), RolledBack)],
    ),
    // All votes have arrived, so the proxy decides to commit, whichever other party dies.
    Case(
        Proxy,
        "decide",
        Text,
        &[
            (Proxy, RolledBack),
            (Agent(0), Committed),
            (Agent(1), Committed),
            (Source(0), Committed),
            (Source(1), Committed),
        ],
    ),
    Case(
        Proxy,
        "commit:1",
        Text,
        &[(Proxy, Committed), (Agent(1), Committed), (Source(1), Committed)],
    ),
    Case(
        Proxy,
        "commit:2",
        Text,
        &[(Proxy, Committed), (Agent(0), Committed), (Source(1), Committed)],
    ),
    Case(Proxy, "tell", Text, &[(Proxy, Committed)]),
    Case(Proxy, "forget", Text, &[(Proxy, Committed)]),
    Case(Agent(0), "run", Text, &[(Agent(0), RolledBack), (Proxy, RolledBack)]),
    Case(Agent(0), "vote", Text, &[(Agent(0), RolledBack), (Proxy, RolledBack)]),
    Case(Agent(1), "vote", Text, &[(Agent(1), RolledBack), (Source(1), Either)]),
    Case(Agent(0), "end", Text, &[(Agent(0), Committed), (Source(0), Committed)]),
    Case(Agent(1), "end", Text, &[(Agent(1), Committed), (Proxy, Committed)]),
    Case(Agent(1), "acknowledge", Text, &[(Agent(1), Committed)]),
];

const FROM: &str = "UPDATE accounts SET balance = balance - 7 WHERE id = 1";
const TO: &str = "UPDATE accounts SET balance = balance + 7 WHERE id = 101";

impl Rig {
    fn transfer(&self, typed: Typed) -> Child {
        let texts = match typed {
            Text => vec![format!("BEGIN; {FROM}; {TO}; COMMIT")],
            Statements => ["BEGIN", FROM, TO, "COMMIT"].map(String::from).into(),
        };
        let mut psql = self.login(Dialect::PostgreSql).client("SELECT 1");
        for text in texts {
            psql.args(["-c", &text]);
        }
        psql.args(["-v", "ON_ERROR_STOP=1"]).stdout(Stdio::piped()).stderr(Stdio::piped());
        psql.spawn().unwrap()
    }

    fn is_stopped(&self, party: Party) -> bool {
        self.process(party).is_some_and(|process| process.is_stopped())
    }

    fn process(&self, party: Party) -> Option<&crate::rig::Process> {
        match party {
            Proxy => self.proxy.as_ref(),
            Agent(place) => self.agents.get(&place),
            Source(_) => None,
        }
    }

    fn start_party(&mut self, party: Party, stop_at: Option<&str>) {
        match party {
            Proxy => self.start_proxy(stop_at),
            Agent(place) => self.start_agent(place, stop_at),
            Source(place) => self.servers[place].restart().unwrap(),
        }
    }

    fn kill_party(&mut self, party: Party) {
        match party {
            Proxy => self.proxy = None,
            Agent(place) => drop(self.agents.remove(&place)),
            Source(place) => self.servers[place].kill(),
        }
    }

    fn balance(&self) -> i64 {
        self.psql("SELECT balance FROM accounts WHERE id = 1").parse().unwrap()
    }

    fn kill_at(&mut self, case: &Case, victim: Party, expected: Expected) {
        let Case(who, step, typed, _) = *case;
        let name = format!(
            "{who:?} stopped before {step} of a transfer by {typed:?}, {victim:?} was killed"
        );
        let before = self.balance();
        // Work of earlier transactions must not reach the step.
        self.finish();
        self.start_party(who, Some(step));
        let mut psql = self.transfer(typed);
        let deadline = Instant::now() + PATIENCE;
        wait(deadline, || {
            // The proxy may not be connected to an agent that has just started.
            if matches!(psql.try_wait(), Ok(Some(status)) if !status.success()) {
                psql = self.transfer(typed);
            }
            self.is_stopped(who)
        })
        .unwrap_or_else(|| panic!("{}\n{name}: never came there", self.log()));
        self.kill_party(victim);
        if who == victim {
            self.start_party(victim, None);
        } else {
            // It continues while the other one is dead.
            self.process(who).unwrap().go_on();
            std::thread::sleep(Duration::from_millis(100));
            self.start_party(victim, None);
        }
        let ended = wait(deadline, || psql.try_wait().unwrap().is_some());
        ended.unwrap_or_else(|| panic!("{}\n{name}: psql still waits", self.log()));
        let output = psql.wait_with_output().unwrap();
        let problem = all_of(&output);
        self.settle(&name);
        let took_place = match before - self.balance() {
            7 => true,
            0 => false,
            other => panic!("{name}: {other} have gone"),
        };
        if output.status.success() {
            assert!(took_place, "{name}: told and lost");
        } else if problem.contains("rolled back") {
            assert!(!took_place, "{name}: took place though psql was told: {problem}");
        }
        match expected {
            Committed => assert!(took_place, "{name}: rolled back; psql: {problem}"),
            RolledBack => assert!(!took_place, "{name}: committed"),
            Either => {}
        }
    }

    fn kill_at_all(&mut self, cases: &[Case]) {
        for case in cases {
            for &(victim, expected) in case.3 {
                let begun = Instant::now();
                self.kill_at(case, victim, expected);
                eprintln!(
                    "{:?} before {}, {victim:?} killed: {:.1} s",
                    case.0,
                    case.1,
                    begun.elapsed().as_secs_f64()
                );
            }
        }
    }
}

#[test]
fn whoever_dies_at_any_step_leaves_the_decision_as_it_was() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start_bank(&[0, 1], false);
    rig.kill_at_all(INSIDE);
}

#[test]
fn whoever_dies_at_any_step_beside_agents_leaves_the_decision_as_it_was() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.start_bank(&[0, 1], true);
    rig.kill_at_all(BESIDE);
}
