//! Two PostgreSQL and two MariaDB servers, a proxy over them, and agents beside them.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::net::TcpListener;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use orthodrome_core::ordered::OrdMap;

use orthodrome_geotp::sql::Dialect;
use orthodrome_middleware::local::{DATABASE, LocalServer, Login, PASSWORD, USER};

pub const CLIENT: &str = "alice";
pub const SECRET: &str = "wonderland";
/// Accounts at each source, with 1000 each.
pub const ACCOUNTS: usize = 20;
/// Time limit of any step on a machine that is busy with other work.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// The kinds of the servers.
const KINDS: [Dialect; 4] =
    [Dialect::PostgreSql, Dialect::MariaDb, Dialect::PostgreSql, Dialect::MariaDb];

/// The names of our processes.
const LOGGING: [&str; 7] = ["proxy", "proxy2", "proxy3", "agent0", "agent1", "agent2", "agent3"];

/// Everything in it must end with the process, because a static is never dropped.
static RIG: Mutex<Option<Rig>> = Mutex::new(None);

/// The processes that a test needs.
#[derive(Clone)]
pub struct Setup {
    /// The servers that are sources.
    pub servers: Vec<usize>,
    /// True if each source has its own agent.
    pub agents: bool,
    /// The lock time-out.
    pub lock_wait_ms: u32,
    /// Further settings of the proxy's file, before its sources.
    pub settings: String,
    /// Ports of read replicas, by server.
    pub replicas: OrdMap<usize, u16>,
    /// The tables of the proxy's file.
    pub tables: String,
}

impl Setup {
    /// These servers, with a table of accounts that is sharded over them: a hundred ids each.
    pub fn accounts(servers: &[usize], agents: bool) -> Self {
        let last = servers.len() - 1;
        let parts: Vec<String> = servers
            .iter()
            .enumerate()
            .map(|(place, server)| {
                let below = format!("below = {}, ", (place + 1) * 100);
                let below = if place == last { "" } else { &below };
                format!("{{ {below}source = \"s{server}\" }}")
            })
            .collect();
        let tables = format!(
            "[[tables]]\nname = \"accounts\"\nshard = {{ by = \"range\", column = \"id\", parts = [ {} ] }}\n",
            parts.join(", ")
        );
        Self {
            servers: servers.to_vec(),
            agents,
            // Longer than a busy machine takes to commit what another client was told.
            lock_wait_ms: 3_000,
            settings: String::new(),
            replicas: OrdMap::new(),
            tables,
        }
    }
}

/// A process of ours. It ends when this is dropped, or when the test's process ends.
pub struct Process(Child, Child);

impl Drop for Process {
    fn drop(&mut self) {
        for child in [&mut self.1, &mut self.0] {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Runs a script when the test's process has ended in any way: its standard input ends then.
fn afterwards(script: &str, argument: &str) -> Child {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("read -r _; {script}"), argument]);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
    command.spawn().unwrap()
}

impl Process {
    /// Whether it is stopped, as by SIGSTOP.
    pub fn is_stopped(&self) -> bool {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.0.id())).unwrap_or_default();
        stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('T'))
    }

    /// Waits until it has ended by itself, and returns its status.
    pub fn ended(&mut self) -> Option<std::process::ExitStatus> {
        let mut status = None;
        wait(Instant::now() + PATIENCE, || {
            status = self.0.try_wait().unwrap();
            status.is_some()
        });
        status
    }

    /// Closes its standard input.
    pub fn end_input(&mut self) {
        drop(self.0.stdin.take());
    }

    /// Continues it after a stop.
    pub fn go_on(&self) {
        let pid = self.0.id().to_string();
        assert!(Command::new("kill").args(["-CONT", &pid]).status().unwrap().success());
    }
}

pub struct Rig {
    dir: PathBuf,
    /// Removes the files.
    _guard: Child,
    pub servers: Vec<LocalServer>,
    setup: Setup,
    pub proxy: Option<Process>,
    pub agents: OrdMap<usize, Process>,
    pub postgresql: u16,
    pub mysql: u16,
    agent_ports: Vec<u16>,
}

fn program() -> PathBuf {
    std::env::var_os("ORTHODROME_PROGRAM")
        .map_or_else(|| env!("CARGO_BIN_EXE_orthodrome").into(), PathBuf::from)
}

fn free_port() -> u16 {
    free_ports(1)[0]
}

/// Different ports: all are taken before the first is free again.
fn free_ports(count: usize) -> Vec<u16> {
    let taken: Vec<_> = (0..count).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    taken.iter().map(|listener| listener.local_addr().unwrap().port()).collect()
}

/// The rig, with only its servers running. One test has it at a time.
pub fn rig() -> MutexGuard<'static, Option<Rig>> {
    let mut rig = RIG.lock().unwrap_or_else(|failed| {
        // What a failed test has left in doubt would make the next tests wait in vain.
        RIG.clear_poison();
        let mut rig = failed.into_inner();
        *rig = None;
        rig
    });
    let rig_now = rig.get_or_insert_with(Rig::new);
    rig_now.stop();
    for server in &mut rig_now.servers {
        if !server.is_running() {
            server.restart().unwrap();
        }
    }
    rig_now.end_prepared();
    rig
}

impl Rig {
    fn new() -> Self {
        // The folder of a failed attempt is removed while the next one is made, so each has its own
        // name.
        static MADE: AtomicU32 = AtomicU32::new(0);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let name = format!("orthodrome-middleware-{}-{number}", std::process::id());
        let dir = std::env::temp_dir().join(name);
        fs::create_dir_all(&dir).unwrap();
        let guard = afterwards("sleep 2; rm -rf \"$0\"", &dir.display().to_string());
        fs::set_permissions(&dir, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let make = |place: usize, kind: Dialect| {
            let directory = dir.join(format!("server{place}"));
            std::thread::spawn(move || LocalServer::start(kind, &directory))
        };
        let made: Vec<_> =
            KINDS.into_iter().enumerate().map(|(place, kind)| make(place, kind)).collect();
        let servers =
            made.into_iter().map(|made| made.join().unwrap().unwrap_or_else(|e| panic!("{e}")));
        let servers: Vec<LocalServer> = servers.collect();
        let ports = free_ports(2 + servers.len());
        Self {
            dir,
            _guard: guard,
            setup: Setup::accounts(&[0, 1], false),
            proxy: None,
            agents: OrdMap::new(),
            postgresql: ports[0],
            mysql: ports[1],
            agent_ports: ports[2..].to_vec(),
            servers,
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    fn stop(&mut self) {
        self.proxy = None;
        self.agents.clear();
    }

    /// Starts a proxy, and agents if there are to be any, over some of the servers.
    pub fn start(&mut self, setup: Setup) {
        self.stop();
        for name in LOGGING {
            let _ = fs::remove_file(self.path(&format!("{name}.log")));
        }
        self.setup = setup;
        fs::write(self.path("proxy.toml"), self.proxy_file()).unwrap();
        for server in self.setup.servers.clone() {
            if self.setup.agents {
                fs::write(self.path(&format!("agent{server}.toml")), self.agent_file(server))
                    .unwrap();
                self.start_agent(server, None);
            }
        }
        self.start_proxy(None);
    }

    /// Starts another proxy over the same sources and agents, and returns its port for PostgreSQL
    /// clients.
    pub fn start_second_proxy(&self, port: Option<u16>) -> (Process, u16) {
        let port = port.unwrap_or_else(free_port);
        self.write_other("proxy2", 2, port);
        (self.run("proxy", "proxy2", None, &[]), port)
    }

    /// Writes the file of another proxy over the same sources and agents, with its own number and
    /// data directory.
    fn write_other(&self, name: &str, number: u32, port: u16) {
        let mut file = self.proxy_file();
        for (from, to) in [
            ("data_dir = \"proxy\"", format!("node = {number}\ndata_dir = \"{name}\"")),
            (&format!(":{}\"", self.postgresql), format!(":{port}\"")),
            (&format!("mysql = \"127.0.0.1:{}\"\n", self.mysql), String::new()),
        ] {
            assert!(file.contains(from), "{from}: {file}");
            file = file.replace(from, &to);
        }
        fs::write(self.path(&format!("{name}.toml")), file).unwrap();
    }

    /// The error of a third proxy with the number of the first and a new log, which refuses to
    /// start.
    pub fn third_refuses(&self) -> String {
        let _ = fs::remove_dir_all(self.path("proxy3"));
        self.write_other("proxy3", 1, free_port());
        self.refuses("proxy3", &[])
    }

    /// The error of a proxy that refuses to start.
    pub fn refuses(&self, name: &str, arguments: &[&str]) -> String {
        let mut process = self.spawn("proxy", name, None, arguments);
        let status = process.ended();
        let said = fs::read_to_string(self.path(&format!("{name}.log"))).unwrap_or_default();
        let code = status.and_then(|status| status.code());
        assert_eq!(code, Some(2), "{name} did not refuse to start: {status:?}\n{said}");
        let last = said.rsplit("error:").next().unwrap_or_default();
        // The message is wrapped.
        last.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    /// What `proxy --check` says about the proxy's file and its sources.
    pub fn check(&self) -> Output {
        let config = self.path("proxy.toml");
        let mut command = Command::new(program());
        command.arg("proxy").arg("--config").arg(config).arg("--check").output().unwrap()
    }

    /// Starts everything with a table of accounts: `ACCOUNTS` at each source, with a balance of
    /// 1000 each.
    pub fn start_bank(&mut self, servers: &[usize], agents: bool) {
        self.start_bank_as(Setup::accounts(servers, agents));
    }

    pub fn start_bank_as(&mut self, setup: Setup) {
        for server in &self.servers {
            said("DROP TABLE IF EXISTS accounts", server.login());
        }
        let servers = setup.servers.clone();
        self.start(setup);
        self.psql("CREATE TABLE accounts (id int PRIMARY KEY, balance int NOT NULL)");
        let rows: Vec<String> = (0..servers.len())
            .flat_map(|s| (1..=ACCOUNTS).map(move |n| format!("({}, 1000)", s * 100 + n)))
            .collect();
        self.psql(&format!("INSERT INTO accounts (id, balance) VALUES {}", rows.join(", ")));
        // Its rows are locked until the sources have committed it, on a busy machine for longer
        // than the next statement waits for a lock.
        self.settle_branches("the accounts were created");
    }

    /// The servers that are sources.
    pub fn places(&self) -> &[usize] {
        &self.setup.servers
    }

    fn kind(&self, server: usize) -> &'static str {
        match self.servers[server].kind {
            Dialect::PostgreSql => "postgresql",
            Dialect::MariaDb => "mariadb",
        }
    }

    fn proxy_file(&self) -> String {
        let mut file = format!(
            "name = \"test\"\ndata_dir = \"proxy\"\nsecret = \"{SECRET}\"\nlock_wait_ms = {}\n{}\
             [listen]\npostgresql = \"127.0.0.1:{}\"\nmysql = \"127.0.0.1:{}\"\n\
             [[users]]\nname = \"{CLIENT}\"\npassword = \"{SECRET}\"\n",
            self.setup.lock_wait_ms, self.setup.settings, self.postgresql, self.mysql,
        );
        for &server in &self.setup.servers {
            let agent = format!("agent = \"127.0.0.1:{}\"\n", self.agent_ports[server]);
            file.push_str(&format!(
                "[[sources]]\nname = \"s{server}\"\nid = {}\nkind = \"{}\"\naddress = \"127.0.0.1:{}\"\n\
                 database = \"{DATABASE}\"\nuser = \"{USER}\"\npassword = \"{PASSWORD}\"\n{}",
                server + 1,
                self.kind(server),
                self.servers[server].port,
                if self.setup.agents { &agent } else { "" },
            ));
            if let Some(port) = self.setup.replicas.get(&server) {
                file.push_str(&format!("replicas = [{{ address = \"127.0.0.1:{port}\" }}]\n"));
            }
        }
        file + &self.setup.tables
    }

    fn agent_file(&self, server: usize) -> String {
        let mut file = format!(
            "listen = \"127.0.0.1:{}\"\nsecret = \"{SECRET}\"\ndata_dir = \"agent{server}\"\nid = {}\nkind = \"{}\"\n\
             address = \"127.0.0.1:{}\"\ndatabase = \"{DATABASE}\"\nuser = \"{USER}\"\npassword = \"{PASSWORD}\"\nlock_wait_ms = {}\n",
            self.agent_ports[server],
            server + 1,
            self.kind(server),
            self.servers[server].port,
            self.setup.lock_wait_ms,
        );
        for &peer in self.setup.servers.iter().filter(|&&peer| peer != server) {
            file.push_str(&format!(
                "[[peers]]\nid = {}\naddress = \"127.0.0.1:{}\"\n",
                peer + 1,
                self.agent_ports[peer]
            ));
        }
        file
    }

    /// Runs one of our processes until it reports that it is ready; it stops at a step if one is
    /// given.
    pub fn run(
        &self,
        verb: &str,
        name: &str,
        stop_at: Option<&str>,
        arguments: &[&str],
    ) -> Process {
        let mut process = self.spawn(verb, name, stop_at, arguments);
        let mut first = String::new();
        BufReader::new(process.0.stdout.take().unwrap()).read_line(&mut first).unwrap();
        assert!(first.starts_with("ready"), "{}\n{first:?}", self.log());
        process
    }

    fn spawn(&self, verb: &str, name: &str, stop_at: Option<&str>, arguments: &[&str]) -> Process {
        let log = self.path(&format!("{name}.log"));
        let log = fs::OpenOptions::new().create(true).append(true).open(log).unwrap();
        let mut command = Command::new(program());
        command.arg(verb).arg("--config").arg(self.path(&format!("{name}.toml")));
        command.args(arguments).envs(stop_at.map(|step| ("ORTHODROME_STOP_AT", step)));
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log).spawn();
        let child = child.unwrap();
        let guard = afterwards("kill -KILL \"$0\"", &child.id().to_string());
        Process(child, guard)
    }

    pub fn start_proxy(&mut self, stop_at: Option<&str>) {
        self.proxy = None;
        self.proxy = Some(self.run("proxy", "proxy", stop_at, &[]));
    }

    pub fn start_agent(&mut self, server: usize, stop_at: Option<&str>) {
        self.agents.remove(&server);
        let agent = self.run("agent", &format!("agent{server}"), stop_at, &[]);
        self.agents.insert(server, agent);
    }

    /// The last lines of each process's log since the last start of everything. They are printed
    /// before the failure, so that the failure comes last.
    pub fn log(&self) -> String {
        let last = |name: &str| {
            let log = fs::read_to_string(self.path(&format!("{name}.log"))).unwrap_or_default();
            let lines: Vec<&str> = log.lines().rev().take(30).collect();
            let lines: Vec<&str> = lines.into_iter().rev().collect();
            if lines.is_empty() {
                String::new()
            } else {
                format!("{name}:\n{}\n", lines.join("\n"))
            }
        };
        LOGGING.map(last).concat()
    }

    /// The login of clients of a kind at the proxy.
    pub fn login(&self, kind: Dialect) -> Login<'static> {
        let port = match kind {
            Dialect::PostgreSql => self.postgresql,
            Dialect::MariaDb => self.mysql,
        };
        Login { kind, port, user: CLIENT, password: SECRET, database: DATABASE }
    }

    pub fn try_psql(&self, text: &str) -> Output {
        self.login(Dialect::PostgreSql).client(text).output().unwrap()
    }

    pub fn psql(&self, text: &str) -> String {
        self.said(text, self.login(Dialect::PostgreSql))
    }

    pub fn mysql(&self, text: &str) -> String {
        self.said(text, self.login(Dialect::MariaDb))
    }

    fn said(&self, text: &str, login: Login<'_>) -> String {
        let output = login.client(text).output().unwrap();
        assert!(output.status.success(), "{}\n{text}: {}", self.log(), all_of(&output));
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    /// Number of a rare event in the proxy's counters.
    pub fn noted(&self, note: &str) -> u64 {
        let notes = self.psql("SHOW ORTHODROME NOTES");
        let count = |line: &str| line.strip_prefix(note)?.strip_prefix('|')?.parse().ok();
        notes.lines().find_map(count).unwrap_or(0)
    }

    /// Waits until every source has executed the proxy's decisions, and the proxy has recorded
    /// that.
    pub fn finish(&self) {
        let undone = || self.psql("SHOW ORTHODROME TRANSACTIONS");
        let is_done = || undone().is_empty();
        let done = wait(Instant::now() + PATIENCE, is_done);
        done.unwrap_or_else(|| {
            panic!("{}{}\ndecided, and not done: {}", self.log(), self.open(), undone())
        });
        // Work after an answer is done before the next answer.
        assert!(is_done(), "{}\nsomething was decided that nobody asked for", self.log());
    }

    /// The prepared transactions at a server.
    fn prepared(&self, place: usize) -> String {
        let server = &self.servers[place];
        let text = match server.kind {
            Dialect::PostgreSql => "SELECT gid FROM pg_prepared_xacts",
            Dialect::MariaDb => "XA RECOVER",
        };
        said(text, server.login())
    }

    /// Rolls back prepared transactions at all servers: their proxy may have ended before it could,
    /// and no other process does it.
    fn end_prepared(&self) {
        let others = "SELECT count(*) FROM information_schema.processlist \
                      WHERE user = 'orthodrome' AND id <> connection_id()";
        let is_done = || {
            let mut left = 0;
            for (place, server) in self.servers.iter().enumerate() {
                for line in self.prepared(place).lines() {
                    left += 1;
                    // In MariaDB's answer the name is last.
                    let name = line.split_whitespace().next_back().unwrap_or_default();
                    let text = match server.kind {
                        Dialect::PostgreSql => format!("ROLLBACK PREPARED '{name}'"),
                        // It must not be ended while the session that prepared it is ending.
                        Dialect::MariaDb if said(others, server.login()) != "0" => continue,
                        Dialect::MariaDb => format!("XA ROLLBACK '{name}'"),
                    };
                    let _ = server.login().client(&text).output();
                }
            }
            left == 0
        };
        let done = wait(Instant::now() + PATIENCE, is_done);
        done.expect("what a test has left prepared cannot be rolled back");
    }

    /// Transactions and sessions at the servers, for finding the holder of a lock.
    fn open(&self) -> String {
        let one = |&place: &usize| {
            let server = &self.servers[place];
            let text = match server.kind {
                Dialect::PostgreSql => {
                    "SELECT pid, state, wait_event_type, query FROM pg_stat_activity"
                }
                Dialect::MariaDb => {
                    "SELECT trx_id, trx_state, trx_started, trx_mysql_thread_id, trx_rows_locked, trx_query \
                     FROM information_schema.innodb_trx; XA RECOVER; SHOW FULL PROCESSLIST"
                }
            };
            format!("source {place}:\n{}\n", said(text, server.login()))
        };
        self.setup.servers.iter().map(one).collect()
    }

    /// Waits until no source has a prepared branch.
    pub fn settle_branches(&self, after: &str) {
        let mut left = Vec::new();
        wait(Instant::now() + PATIENCE, || {
            left = self.setup.servers.iter().map(|&place| self.prepared(place)).collect();
            left.iter().all(String::is_empty)
        })
        .unwrap_or_else(|| panic!("{}\nafter {after}: {left:?}", self.log()));
    }

    /// Checks that nothing stays prepared or locked, and that the total is unchanged.
    pub fn settle(&self, after: &str) {
        self.settle_branches(after);
        let deadline = Instant::now() + PATIENCE;
        let servers = &self.setup.servers;
        // An update of every row needs every lock.
        let mut problem = String::new();
        wait(deadline, || {
            let output = self.try_psql("UPDATE accounts SET balance = balance");
            problem = all_of(&output);
            output.status.success()
        })
        .unwrap_or_else(|| panic!("{}{}\nafter {after}: {problem}", self.log(), self.open()));
        // A restarted source may break the first connections to it.
        let mut total = String::new();
        wait(deadline, || {
            let output = self.try_psql("SELECT count(*), sum(balance) FROM accounts");
            total = String::from_utf8_lossy(&output.stdout).trim().to_owned();
            output.status.success()
        })
        .unwrap_or_else(|| panic!("{}\nafter {after}: nothing can be counted", self.log()));
        let accounts = ACCOUNTS * servers.len();
        assert_eq!(total, format!("{accounts}|{}", accounts * 1000), "after {after}");
        // The next test may have other sources, and its proxy the same log. A decision about a source
        // that it does not have would stay in the log.
        self.finish();
    }
}

/// Waits until a condition is true.
pub fn wait(deadline: Instant, mut is_so: impl FnMut() -> bool) -> Option<()> {
    while !is_so() {
        if Instant::now() > deadline {
            return None;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Some(())
}

/// A client's exit status and all its output, for messages.
pub fn all_of(output: &Output) -> String {
    let Output { status, stdout, stderr } = output;
    let of = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    format!("{status}; output: {:?}; errors: {:?}", of(stdout), of(stderr))
}

/// A server's answer to its own client.
pub fn said(text: &str, login: Login<'_>) -> String {
    let output = login.client(text).output().unwrap();
    assert!(output.status.success(), "{text}: {}", all_of(&output));
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// The transactions that a run of `pgbench` reports.
pub fn done(path: &Path) -> u64 {
    let said = fs::read_to_string(path).unwrap();
    let line = said.lines().find(|line| line.contains("transactions actually processed"));
    // `12`, or `12/20`.
    let count = line.and_then(|line| line.rsplit(' ').next()?.split('/').next()?.parse().ok());
    count.unwrap_or_else(|| panic!("{said}"))
}
