//! The proxy over private PostgreSQL and MariaDB servers, used by their own clients: money moves between the
//! two kinds, every party in turn is killed as `kill -9` does, and the total never changes.

#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a test of real processes, which may fail loudly"
)]

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use orthodrome_geotp::sql::Dialect;
use orthodrome_server::middleware::local::{DATABASE, LocalServer, Login, PASSWORD, USER};

const CLIENT: &str = "alice";
const SECRET: &str = "wonderland";
/// Accounts at each source, with 1000 each.
const ACCOUNTS: u32 = 20;

fn program() -> PathBuf {
    std::env::var_os("ORTHODROME_PROGRAM")
        .map_or_else(|| env!("CARGO_BIN_EXE_orthodrome").into(), PathBuf::from)
}

struct Rig {
    dir: tempfile::TempDir,
    servers: Vec<LocalServer>,
    proxy: Option<Child>,
    postgresql: u16,
    mysql: u16,
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.kill_proxy();
    }
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

impl Rig {
    /// A PostgreSQL, a MariaDB and another PostgreSQL with a table of accounts sharded over them.
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        // The servers' lesser users must get through.
        fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755))
            .unwrap();
        let kinds = [Dialect::PostgreSql, Dialect::MariaDb, Dialect::PostgreSql];
        let start = |(place, kind): (usize, Dialect)| {
            LocalServer::start(kind, &dir.path().join(format!("server{place}")))
                .unwrap_or_else(|e| panic!("{e}"))
        };
        let servers: Vec<LocalServer> = kinds.into_iter().enumerate().map(start).collect();
        let mut rig =
            Self { dir, servers, proxy: None, postgresql: free_port(), mysql: free_port() };
        fs::write(rig.path("proxy.toml"), rig.file()).unwrap();
        rig.start_proxy();
        rig.psql("CREATE TABLE accounts (id int PRIMARY KEY, balance int NOT NULL)");
        let rows: Vec<String> = (0..3)
            .flat_map(|s| (1..=ACCOUNTS).map(move |n| format!("({}, 1000)", s * 100 + n)))
            .collect();
        rig.psql(&format!("INSERT INTO accounts (id, balance) VALUES {}", rows.join(", ")));
        rig
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn file(&self) -> String {
        let mut file = format!(
            "name = \"test\"\ndata_dir = \"data\"\n[listen]\npostgresql = \"127.0.0.1:{}\"\nmysql = \"127.0.0.1:{}\"\n\
             [[users]]\nname = \"{CLIENT}\"\npassword = \"{SECRET}\"\n",
            self.postgresql, self.mysql,
        );
        for (place, server) in self.servers.iter().enumerate() {
            let kind = match server.kind {
                Dialect::PostgreSql => "postgresql",
                Dialect::MariaDb => "mariadb",
            };
            file.push_str(&format!(
                "[[sources]]\nname = \"s{place}\"\nkind = \"{kind}\"\naddress = \"127.0.0.1:{}\"\ndatabase = \"{DATABASE}\"\n\
                 user = \"{USER}\"\npassword = \"{PASSWORD}\"\n",
                server.port,
            ));
        }
        file.push_str(
            "[[tables]]\nname = \"accounts\"\nshard = { by = \"range\", column = \"id\", parts = [\n\
             { below = 100, source = \"s0\" }, { below = 200, source = \"s1\" }, { source = \"s2\" } ] }\n",
        );
        file
    }

    fn start_proxy(&mut self) {
        let log =
            fs::OpenOptions::new().create(true).append(true).open(self.path("proxy.log")).unwrap();
        let mut command = Command::new(program());
        command.arg("proxy").arg("--config").arg(self.path("proxy.toml"));
        let mut child = command.stdout(Stdio::piped()).stderr(log).spawn().unwrap();
        let mut first = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut first).unwrap();
        self.proxy = Some(child);
        assert!(first.starts_with("ready"), "{first:?}\n{}", self.log());
    }

    fn kill_proxy(&mut self) {
        if let Some(mut proxy) = self.proxy.take() {
            proxy.kill().unwrap();
            proxy.wait().unwrap();
        }
    }

    fn log(&self) -> String {
        fs::read_to_string(self.path("proxy.log")).unwrap_or_default()
    }

    /// How clients of a kind enter the proxy.
    fn login(&self, kind: Dialect) -> Login<'static> {
        let port = match kind {
            Dialect::PostgreSql => self.postgresql,
            Dialect::MariaDb => self.mysql,
        };
        Login { kind, port, user: CLIENT, password: SECRET, database: "bank" }
    }

    fn try_psql(&self, text: &str) -> Output {
        self.login(Dialect::PostgreSql).client(text).output().unwrap()
    }

    fn psql(&self, text: &str) -> String {
        self.said(text, self.login(Dialect::PostgreSql))
    }

    fn mysql(&self, text: &str) -> String {
        self.said(text, self.login(Dialect::MariaDb))
    }

    fn said(&self, text: &str, login: Login<'_>) -> String {
        let output = login.client(text).output().unwrap();
        let problem = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{text}: {problem}\n{}", self.log());
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    /// What is prepared at a server.
    fn prepared(&self, place: usize) -> String {
        let server = &self.servers[place];
        let text = match server.kind {
            Dialect::PostgreSql => "SELECT gid FROM pg_prepared_xacts",
            Dialect::MariaDb => "XA RECOVER",
        };
        self.said(text, server.login())
    }

    /// Transfers by `pgbench`, as many clients, until it is told to end or loses the proxy.
    fn load(&self, seconds: u32) -> Child {
        let script = "\\set a random(1, 20)\n\\set b random(101, 120)\n\\set c random(201, 220)\n\\set d random(1, 10)\n\
                      BEGIN;\nUPDATE accounts SET balance = balance - :d WHERE id = :a;\n\
                      UPDATE accounts SET balance = balance + :d - 1 WHERE id = :b;\n\
                      UPDATE accounts SET balance = balance + 1 WHERE id = :c;\nCOMMIT;\n";
        fs::write(self.path("transfer.sql"), script).unwrap();
        let log = fs::File::create(self.path("pgbench.log")).unwrap();
        let port = self.postgresql.to_string();
        let mut command = Command::new("pgbench");
        command.args([
            "-h",
            "127.0.0.1",
            "-p",
            &port,
            "-U",
            CLIENT,
            "-n",
            "-c",
            "6",
            "-T",
            &seconds.to_string(),
        ]);
        command
            .args(["--max-tries=50", "-f"])
            .arg(self.path("transfer.sql"))
            .arg("bank")
            .env("PGPASSWORD", SECRET);
        command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap()
    }

    /// Nothing stays prepared or locked, and the total is what it was.
    fn settle(&self, after: &str) {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let left: Vec<String> =
                (0..self.servers.len()).map(|place| self.prepared(place)).collect();
            if left.iter().all(String::is_empty) {
                break;
            }
            assert!(Instant::now() < deadline, "after {after}: {left:?}\n{}", self.log());
            std::thread::sleep(Duration::from_millis(50));
        }
        loop {
            // A change of every row needs every lock.
            let output = self.try_psql("UPDATE accounts SET balance = balance");
            if output.status.success() {
                break;
            }
            assert!(
                Instant::now() < deadline,
                "after {after}: {}",
                String::from_utf8_lossy(&output.stderr)
            );
        }
        let total = self.psql("SELECT count(*), sum(balance) FROM accounts");
        assert_eq!(total, format!("{}|{}", ACCOUNTS * 3, ACCOUNTS * 3000), "after {after}");
    }
}

fn done(path: &Path) -> u64 {
    let said = fs::read_to_string(path).unwrap();
    let line = said.lines().find(|line| line.contains("transactions actually processed"));
    line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or_else(|| panic!("{said}"))
}

#[test]
fn money_moves_between_postgresql_and_mariadb_and_none_is_lost() {
    let mut rig = Rig::new();
    // Both kinds of clients see one table.
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

    let mut load = rig.load(3);
    assert!(
        load.wait().unwrap().success(),
        "{}",
        fs::read_to_string(rig.path("pgbench.log")).unwrap()
    );
    assert!(done(&rig.path("pgbench.log")) > 20);
    rig.settle("undisturbed load");

    for round in 0..3 {
        let mut load = rig.load(20);
        std::thread::sleep(Duration::from_millis(1_000 + 170 * round));
        rig.kill_proxy();
        load.wait().unwrap();
        rig.start_proxy();
        rig.settle("kill -9 of the proxy");
    }
    for place in 0..3 {
        let mut load = rig.load(6);
        std::thread::sleep(Duration::from_millis(1_500));
        rig.servers[place].kill();
        std::thread::sleep(Duration::from_millis(300));
        rig.servers[place].restart().unwrap();
        load.wait().unwrap();
        rig.settle(&format!("kill -9 of source {place}"));
    }
}
