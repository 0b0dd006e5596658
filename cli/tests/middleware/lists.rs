//! Clients of both kinds append to lists and read them, over sources of one kind and of both, while
//! a source and the proxy are killed. The history must be strictly serializable.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use orthodrome_core::ordered::OrdSet;

use orthodrome_eval::checker::{Model, check};
use orthodrome_eval::history::{Entry, History, Op, Status};
use orthodrome_geotp::sql::{Answer, Dialect};
use orthodrome_middleware::local::{Client, Login, Refused};

use crate::rig::{PATIENCE, Rig, Setup, rig, said, wait};

/// Number of lists at each source that are in use at a time.
const LISTS: u64 = 4;
/// The number of all lists.
const LISTS_MAX: u64 = 99;
/// Number of committed transactions after which a run ends.
const COMMITTED_MIN: u64 = 20;

/// When lists are made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Made {
    /// Before the first append.
    Before,
    /// By the first append: until then they are empty and do not exist. Further lists come into use
    /// over time.
    Meanwhile,
}

/// The form in which a transaction is sent to the proxy.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    Text,
    Statements,
    Marked,
}

struct Caller {
    process: u64,
    login: Login<'static>,
    sources: u64,
    made: Made,
    begun: Instant,
    state: u64,
    element: u64,
    /// Lists that are known to exist.
    there: OrdSet<String>,
    seen: Seen,
    /// Number of committed transactions of all clients.
    committed: Arc<AtomicU64>,
}

/// The observations of a client.
#[derive(Default)]
struct Seen {
    history: Vec<Entry>,
    /// Elements of transactions of unknown outcome, which found no list to append them to.
    doubtful: OrdSet<u64>,
}

impl Caller {
    /// SplitMix64.
    fn draw(&mut self, below: u64) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % below
    }

    fn key(&mut self) -> u64 {
        let first = match self.made {
            Made::Before => 1,
            Made::Meanwhile => 1 + (self.now() / 50_000).min(LISTS_MAX - LISTS),
        };
        self.draw(self.sources) * 100 + first + self.draw(LISTS)
    }

    fn now(&self) -> u64 {
        self.begun.elapsed().as_micros() as u64
    }

    async fn run(mut self, ends: Arc<AtomicBool>) -> Seen {
        let mut client = None;
        while !ends.load(Ordering::Relaxed) {
            if client.is_none() {
                client = Client::enter(&self.login).await.ok();
            }
            match &mut client {
                Some(open) => {
                    if !self.transaction(open).await {
                        client = None;
                    }
                }
                None => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
        self.seen
    }

    /// One transaction; false if the connection is gone.
    async fn transaction(&mut self, client: &mut Client) -> bool {
        let mut ops = Vec::new();
        for _ in 0..self.draw(3) {
            ops.push(Op::ReadList(self.key().to_string(), Vec::new()));
        }
        for _ in 0..self.draw(3) {
            self.element += 1;
            let element = self.process * 1_000_000 + self.element;
            ops.push(Op::Append(self.key().to_string(), element));
        }
        if ops.is_empty() {
            return true;
        }
        let form = [Form::Text, Form::Statements, Form::Marked][self.draw(3) as usize];
        let invoke_us = self.now();
        let (outcome, alive) = carry_out(client, &ops, form).await;
        let complete_us = Some(self.now());
        let (status, ops): (_, Vec<Op>) = match outcome {
            Some(Some(answers)) => (Status::Ok, ops.iter().zip(answers).map(seen).collect()),
            Some(None) => (Status::Fail, unseen(ops)),
            None => (Status::Info, unseen(ops)),
        };
        self.committed.fetch_add(u64::from(status == Status::Ok), Ordering::Relaxed);
        for op in &ops {
            let Op::Append(key, element) = op else { continue };
            if status == Status::Ok {
                self.there.insert(key.clone());
            } else if status == Status::Info
                && form != Form::Statements
                && !self.there.contains(key)
            {
                self.seen.doubtful.insert(*element);
            }
        }
        self.seen.history.push(Entry {
            txn: format!("c{}.{}", self.process, self.seen.history.len() + 1),
            process: self.process,
            region: "here".into(),
            priority: "low".into(),
            invoke_us,
            complete_us: complete_us.filter(|_| status != Status::Info),
            status,
            stale: false,
            ops,
        });
        // After an attempt of unknown outcome the client continues as another process of the
        // history.
        if status == Status::Info {
            self.process += 100;
            self.element = 0;
        }
        alive
    }
}

fn statement(op: &Op) -> String {
    match op {
        Op::Append(key, element) => {
            format!("UPDATE lists SET items = concat(items, ' {element}') WHERE id = {key}")
        }
        Op::ReadList(key, _)
        | Op::ReadVersion(key, _)
        | Op::WriteVersion(key, _)
        | Op::DeleteVersion(key, _) => {
            format!("SELECT items FROM lists WHERE id = {key}")
        }
    }
}

fn seen((op, answer): (&Op, Answer)) -> Op {
    match op {
        // It found no list to append to, which is the same as a read.
        Op::Append(key, _) if answer.affected == 0 => Op::ReadList(key.clone(), Vec::new()),
        Op::Append(..) => op.clone(),
        Op::ReadList(key, _)
        | Op::ReadVersion(key, _)
        | Op::WriteVersion(key, _)
        | Op::DeleteVersion(key, _) => Op::ReadList(key.clone(), items(&answer)),
    }
}

fn items(answer: &Answer) -> Vec<u64> {
    let Some(row) = answer.rows.first() else { return Vec::new() };
    let cell = row[0].clone().unwrap();
    String::from_utf8(cell).unwrap().split_whitespace().map(|item| item.parse().unwrap()).collect()
}

/// Removes reads without an answer.
fn unseen(ops: Vec<Op>) -> Vec<Op> {
    ops.into_iter().filter(|op| matches!(op, Op::Append(..))).collect()
}

/// The answers of a committed transaction; `Some(None)` if it aborted, none if its outcome is
/// unknown; and whether the connection is still open.
async fn carry_out(
    client: &mut Client,
    ops: &[Op],
    form: Form,
) -> (Option<Option<Vec<Answer>>>, bool) {
    let statements: Vec<String> = ops.iter().map(statement).collect();
    if form == Form::Text {
        let text = format!("BEGIN; {}; COMMIT", statements.join("; "));
        return match client.text(&text).await {
            Ok(answers) => (Some(Some(answers.into_iter().skip(1).collect())), true),
            Err(refused) => after(client, refused, true).await,
        };
    }
    let mut answers = Vec::new();
    for (number, statement) in ["BEGIN".to_owned()].into_iter().chain(statements).enumerate() {
        let mark = if form == Form::Marked && number == ops.len() { "/*last query*/ " } else { "" };
        match client.text(&format!("{mark}{statement}")).await {
            Ok(answer) => answers.extend(answer),
            Err(refused) => return after(client, refused, false).await,
        }
        if let (
            Some(Op::Append(key, element)),
            Form::Statements,
            Some(Answer { affected: 0, .. }),
        ) = (number.checked_sub(1).map(|before| &ops[before]), form, answers.last())
        {
            let made = format!("INSERT INTO lists (id, items) VALUES ({key}, ' {element}')");
            match client.text(&made).await {
                Ok(answer) => answers.splice(answers.len() - 1.., answer).for_each(drop),
                Err(refused) => return after(client, refused, false).await,
            }
        }
    }
    match client.text("COMMIT").await {
        Ok(_) => (Some(Some(answers.into_iter().skip(1).collect())), true),
        Err(refused) => after(client, refused, true).await,
    }
}

async fn after(
    client: &mut Client,
    refused: Refused,
    has_committed: bool,
) -> (Option<Option<Vec<Answer>>>, bool) {
    match refused {
        Refused::Broken(_) => ((!has_committed).then_some(None), false),
        Refused::Fault(fault) if fault.sqlstate == "08007" => (None, true),
        Refused::Fault(_) => (Some(None), client.text("ROLLBACK").await.is_ok()),
    }
}

impl Rig {
    fn lists(&mut self, servers: &[usize], agents: bool, made: Made) {
        self.lists_in("geotp", servers, agents, made);
    }

    fn lists_in(&mut self, mode: &str, servers: &[usize], agents: bool, made: Made) {
        for server in &self.servers {
            said("DROP TABLE IF EXISTS lists", server.login());
        }
        let mut setup = Setup::accounts(servers, agents);
        setup.tables = setup.tables.replace("accounts", "lists");
        setup.settings = format!("mode = \"{mode}\"\n");
        self.start(setup);
        self.psql("CREATE TABLE lists (id int PRIMARY KEY, items text NOT NULL)");
        let each = if made == Made::Before { LISTS } else { LISTS_MAX };
        let keys: Vec<u64> = (0..servers.len() as u64)
            .flat_map(|source| (1..=each).map(move |list| source * 100 + list))
            .collect();
        if made == Made::Before {
            let rows: Vec<String> = keys.iter().map(|key| format!("({key}, '')")).collect();
            self.psql(&format!("INSERT INTO lists (id, items) VALUES {}", rows.join(", ")));
        }

        let runtime = tokio::runtime::Runtime::new().unwrap();
        let ends = Arc::new(AtomicBool::new(false));
        let committed: Arc<AtomicU64> = Arc::default();
        let begun = Instant::now();
        let calls: Vec<_> = (1..=8)
            .map(|process| {
                let kind = [Dialect::PostgreSql, Dialect::MariaDb][process as usize % 2];
                let caller = Caller {
                    process,
                    login: self.login(kind),
                    sources: servers.len() as u64,
                    made,
                    begun,
                    state: process,
                    element: 0,
                    there: keys
                        .iter()
                        .filter(|_| made == Made::Before)
                        .map(u64::to_string)
                        .collect(),
                    seen: Seen::default(),
                    committed: Arc::clone(&committed),
                };
                runtime.spawn(caller.run(Arc::clone(&ends)))
            })
            .collect();
        let pause = |millis| std::thread::sleep(Duration::from_millis(millis));
        pause(1_200);
        let victim = *servers.last().unwrap();
        self.servers[victim].kill();
        pause(200);
        self.servers[victim].restart().unwrap();
        pause(1_500);
        self.start_proxy(None);
        pause(2_000);
        let is_enough = || committed.load(Ordering::Relaxed) > COMMITTED_MIN;
        let enough = wait(Instant::now() + PATIENCE, is_enough);
        enough.unwrap_or_else(|| {
            panic!("{}\n{servers:?}: only {committed:?} committed in {PATIENCE:?}", self.log())
        });
        ends.store(true, Ordering::Relaxed);
        let callers: Vec<Seen> =
            calls.into_iter().map(|call| runtime.block_on(call).unwrap()).collect();

        // Records of transactions that an earlier incarnation prepared cannot be read until these
        // have ended.
        let deadline = Instant::now() + PATIENCE;
        let read = |key: &u64| {
            let mut output = None;
            let is_read = wait(deadline, || {
                let tried = output
                    .insert(self.try_psql(&format!("SELECT items FROM lists WHERE id = {key}")));
                tried.status.success()
            });
            let output = output.unwrap();
            let problem = String::from_utf8_lossy(&output.stderr);
            assert!(is_read.is_some(), "{}\n{key} cannot be read: {problem}", self.log());
            let text = String::from_utf8(output.stdout).unwrap();
            let items = text.split_whitespace().map(|item| item.parse().unwrap()).collect();
            Op::ReadList(key.to_string(), items)
        };
        let invoke_us = begun.elapsed().as_micros() as u64;
        let ops: Vec<Op> = keys.iter().map(read).collect();
        let mut history = History::new();
        for Seen { history: entries, doubtful } in callers {
            for mut entry in entries {
                let is_there = |element: &u64| {
                    ops.iter()
                        .any(|op| matches!(op, Op::ReadList(_, items) if items.contains(element)))
                };
                entry.ops.retain(|op| {
                    let Op::Append(_, element) = op else { return true };
                    !doubtful.contains(element) || is_there(element)
                });
                history.push(&entry).unwrap();
            }
        }
        // One after the other, so that each is a transaction by itself.
        for (number, op) in ops.into_iter().enumerate() {
            let entry = Entry {
                txn: format!("c9999.{}", number + 1),
                process: 9999,
                region: "here".into(),
                priority: "low".into(),
                invoke_us: invoke_us + number as u64 * 2,
                complete_us: Some(invoke_us + number as u64 * 2 + 1),
                status: Status::Ok,
                stale: false,
                ops: vec![op],
            };
            history.push(&entry).unwrap();
        }
        let verdict = check(&history, Model::StrictSerializable);
        let counts = verdict.transactions;
        eprintln!(
            "{mode}, {servers:?}, {made:?}: {} ok, {} fail, {} info",
            counts.ok, counts.fail, counts.info
        );
        assert!(verdict.ok, "{}\n{servers:?}: {verdict}", self.log());
    }
}

#[test]
fn lists_are_strictly_serializable_on_postgresql() {
    rig().as_mut().unwrap().lists(&[0, 2], false, Made::Before);
}

#[test]
fn lists_are_strictly_serializable_on_mariadb() {
    rig().as_mut().unwrap().lists(&[1, 3], false, Made::Meanwhile);
}

#[test]
fn lists_are_strictly_serializable_on_both_with_agents() {
    rig().as_mut().unwrap().lists(&[0, 1, 2, 3], true, Made::Before);
}

#[test]
fn lists_that_are_made_meanwhile_are_strictly_serializable_on_postgresql() {
    rig().as_mut().unwrap().lists(&[0, 2], true, Made::Meanwhile);
}

#[test]
fn lists_that_are_made_meanwhile_are_strictly_serializable_on_both() {
    rig().as_mut().unwrap().lists(&[0, 1, 2, 3], false, Made::Meanwhile);
}

#[test]
fn lists_are_strictly_serializable_in_the_mode_near() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    for (servers, agents, made) in [
        (&[0, 2][..], false, Made::Before),
        (&[1, 3], false, Made::Meanwhile),
        (&[0, 1, 2, 3], true, Made::Meanwhile),
    ] {
        rig.lists_in("near", servers, agents, made);
        assert!(rig.noted("NearCommitted") > 0, "{}", rig.log());
    }
}

/// Their sources do not control concurrency: no lock is held between two requests.
#[test]
fn lists_are_strictly_serializable_with_scalardb() {
    let mut rig = rig();
    let rig = rig.as_mut().unwrap();
    rig.lists_in("scalardb", &[0, 1], false, Made::Before);
    assert!(rig.noted("RolledForward") + rig.noted("RolledBack") > 0);
    rig.lists_in("scalardb+", &[0, 1, 2, 3], false, Made::Meanwhile);
}
