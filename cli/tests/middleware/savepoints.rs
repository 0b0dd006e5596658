//! Savepoints over several sources, in both protocols: what one database answers, the proxy answers.

use orthodrome_geotp::sql::{Answer, Dialect};
use orthodrome_middleware::local::{Client, Refused};
use tokio::runtime::Runtime;

use crate::rig::{Rig, Setup, rig, said};

const TABLE: &str = "CREATE TABLE marks (id int PRIMARY KEY, v int NOT NULL CHECK (v < 1000))";

/// Numbers that depend on a seed alone.
struct Draw(u64);

impl Draw {
    fn below(&mut self, bound: u64) -> u64 {
        // Xorshift, by Marsaglia.
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }

    /// A row at one of two sources.
    fn id(&mut self) -> u64 {
        self.below(2) * 100 + 1 + self.below(4)
    }

    fn name(&mut self) -> &'static str {
        ["a", "b", "c", "B"][self.below(4) as usize]
    }

    fn statement(&mut self) -> String {
        let (id, other, v, name) = (self.id(), self.id(), self.below(50), self.name());
        match self.below(17) {
            0..=3 => format!("SAVEPOINT {name}"),
            4..=6 => format!("ROLLBACK TO SAVEPOINT {name}"),
            7 => format!("RELEASE SAVEPOINT {name}"),
            8 | 9 => format!("INSERT INTO marks (id, v) VALUES ({id}, {v})"),
            10 if id == other => format!("INSERT INTO marks (id, v) VALUES ({id}, {v})"),
            10 => format!("INSERT INTO marks (id, v) VALUES ({id}, {v}), ({other}, {v})"),
            11 => format!("UPDATE marks SET v = v + 1 WHERE id IN ({id}, {other})"),
            12 => format!("UPDATE marks SET v = v + {v} + 1 WHERE id = {id}"),
            // Refused by a constraint, if the row is there.
            13 => format!("UPDATE marks SET v = v + 5000 WHERE id = {id}"),
            14 => format!("DELETE FROM marks WHERE id = {id}"),
            15 => format!("SELECT v FROM marks WHERE id = {id}"),
            _ => "SELECT id, v FROM marks ORDER BY id".to_owned(),
        }
    }

    fn transaction(&mut self) -> Vec<String> {
        let mut all = vec!["BEGIN".to_owned()];
        all.extend((0..4 + self.below(22)).map(|_| self.statement()));
        all.push(if self.below(4) == 0 { "ROLLBACK" } else { "COMMIT" }.to_owned());
        all.push("SELECT id, v FROM marks ORDER BY id".to_owned());
        all
    }
}

/// What a statement came to: rows and how many changed, or the code that it was refused with.
async fn told(client: &mut Client, kind: Dialect, text: &str) -> String {
    match client.text(text).await {
        Ok(answers) => {
            let cell = |cell: &Option<Vec<u8>>| {
                cell.as_ref()
                    .map_or("NULL".into(), |cell| String::from_utf8_lossy(cell).into_owned())
            };
            let row =
                |row: &Vec<Option<Vec<u8>>>| row.iter().map(cell).collect::<Vec<_>>().join("|");
            let one = |answer: &Answer| {
                let rows: Vec<String> = answer.rows.iter().map(row).collect();
                format!("{} {}", rows.join(","), answer.affected)
            };
            answers.iter().map(one).collect::<Vec<_>>().join(";")
        }
        Err(Refused::Broken(error)) => panic!("{text}: {error}"),
        Err(Refused::Fault(fault)) => match kind {
            Dialect::PostgreSql => format!("refused: {}", fault.sqlstate),
            Dialect::MariaDb => format!("refused: {}", fault.number),
        },
    }
}

fn start(rig: &mut Rig, servers: &[usize], agents: bool) {
    for server in &rig.servers {
        said("DROP TABLE IF EXISTS marks", server.login());
    }
    let setup = Setup::accounts(servers, agents);
    rig.start(Setup { tables: setup.tables.replace("accounts", "marks"), ..setup });
    rig.psql(TABLE);
}

/// Transactions with nested savepoints and statements that fail are answered as one database of the client's kind
/// answers them, over sources of one kind and of both.
#[test]
fn savepoints_are_those_of_one_database() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    for (servers, agents, seeds) in [([0, 1], false, 0..40), ([0, 1], true, 40..60)] {
        start(rig, &servers, agents);
        for (kind, oracle) in [(Dialect::PostgreSql, 2), (Dialect::MariaDb, 3)] {
            let oracle = rig.servers[oracle].login();
            said(&format!("DROP TABLE IF EXISTS marks; {TABLE}"), oracle);
            rig.psql("DELETE FROM marks WHERE id < 1000");
            Runtime::new().unwrap().block_on(async {
                let mut one = Client::enter(
                    &rig.servers[if kind == Dialect::PostgreSql { 2 } else { 3 }].login(),
                )
                .await
                .unwrap();
                let mut proxy = Client::enter(&rig.login(kind)).await.unwrap();
                for seed in seeds.clone() {
                    let mut draw = Draw(seed * 7_919 + 12_345);
                    let mut so_far = Vec::new();
                    for text in draw.transaction() {
                        let wanted = told(&mut one, kind, &text).await;
                        let found = told(&mut proxy, kind, &text).await;
                        so_far.push(format!("{text}: {wanted}"));
                        assert_eq!(
                            found,
                            wanted,
                            "{}\n{kind}, agents: {agents}, seed {seed}:\n{}",
                            rig.log(),
                            so_far.join("\n")
                        );
                    }
                }
            });
        }
    }
}

/// What a transaction has read stays locked when it goes back to a savepoint: a row, and one that is not there.
#[test]
fn what_was_read_stays_locked_when_it_is_undone() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    start(rig, &[0, 1], false);
    rig.psql("INSERT INTO marks (id, v) VALUES (1, 1), (101, 1)");
    let writes = [
        "UPDATE marks SET v = 2 WHERE id = 1",
        "INSERT INTO marks (id, v) VALUES (2, 2)",
        "UPDATE marks SET v = 2 WHERE id = 101",
        "INSERT INTO marks (id, v) VALUES (102, 2)",
    ];
    for kind in [Dialect::PostgreSql, Dialect::MariaDb] {
        Runtime::new().unwrap().block_on(async {
            let mut client = Client::enter(&rig.login(kind)).await.unwrap();
            for text in [
                "BEGIN",
                "SAVEPOINT a",
                "SELECT v FROM marks WHERE id IN (1, 2)",
                "SELECT v FROM marks WHERE id IN (101, 102)",
                "ROLLBACK TO SAVEPOINT a",
                // With this it takes the locks again.
                "SELECT v FROM marks WHERE id IN (3, 103)",
            ] {
                client.text(text).await.unwrap();
            }
            for write in writes {
                let output = rig.try_psql(write);
                assert!(!output.status.success(), "{kind}: {write} did not wait");
            }
            client.text("COMMIT").await.unwrap();
        });
    }
    for write in writes {
        rig.psql(write);
    }
}

/// A query that its source does not understand fails alone: after a rollback to a savepoint, and for a MySQL client without
/// one.
#[test]
fn a_query_that_was_refused_does_not_end_a_transaction_with_savepoints() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    start(rig, &[0], false);
    rig.psql("INSERT INTO marks (id, v) VALUES (1, 1), (2, 1)");
    let update = |id: u32| format!("UPDATE marks SET v = v + 1 WHERE id = {id}");
    for (kind, savepoint, back) in [
        (Dialect::PostgreSql, "SAVEPOINT a", "ROLLBACK TO SAVEPOINT a"),
        (Dialect::MariaDb, "SAVEPOINT a", "ROLLBACK TO SAVEPOINT a"),
        (Dialect::MariaDb, "SELECT 1", "SELECT 1"),
    ] {
        Runtime::new().unwrap().block_on(async {
            let mut client = Client::enter(&rig.login(kind)).await.unwrap();
            for text in ["BEGIN", &update(1), savepoint] {
                client.text(text).await.unwrap();
            }
            assert!(matches!(client.text("SELECT w FROM marks").await, Err(Refused::Fault(_))));
            for text in [back, &update(2), "COMMIT"] {
                client.text(text).await.unwrap();
            }
        });
    }
    assert_eq!(rig.psql("SELECT id, v FROM marks ORDER BY id"), "1|4\n2|4");
}

/// PostgreSQL takes back what was set since a savepoint, for the client and at the sources.
#[test]
fn settings_go_back_with_a_savepoint() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    start(rig, &[0], false);
    let seen = rig.psql(
        "BEGIN; SET TIME ZONE 'UTC'; SELECT count(*) FROM marks WHERE id = 1; SAVEPOINT a; \
         SET TIME ZONE 'Asia/Tokyo'; SELECT count(*), current_setting('timezone') FROM marks WHERE id = 1; \
         ROLLBACK TO a; SELECT count(*), current_setting('timezone') FROM marks WHERE id = 1; SHOW timezone; COMMIT",
    );
    assert_eq!(
        seen.lines().skip(1).collect::<Vec<_>>(),
        ["0|Asia/Tokyo", "0|UTC", "UTC"],
        "{seen}"
    );
}
