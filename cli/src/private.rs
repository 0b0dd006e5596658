//! Private PostgreSQL and MariaDB servers on this machine with emulated distances between four
//! cities, and processes of this program in front of them: for `demo --middleware` and `measure`.

use std::fmt::Write as _;
use std::io::BufRead as _;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use orthodrome_core::ordered::OrdMap;

use anyhow::{Context as _, anyhow, bail};
use orthodrome_middleware::Dialect;
use orthodrome_middleware::local::{
    Client, DATABASE, LocalError, LocalServer, Login, PASSWORD, USER,
};

/// The emulated places of the servers, and their round-trip times to the proxy in milliseconds
/// (GeoTP §VII-A3).
pub const PLACES: [(&str, u32); 4] =
    [("Beijing", 0), ("Shanghai", 27), ("Singapore", 73), ("London", 251)];
/// The user of the clients at the proxy.
const CLIENT: &str = "demo";
/// Time limit for the start of a process.
const START: Duration = Duration::from_secs(30);

/// A child process of this program, which can be killed. It ends when this process ends, because
/// its standard input ends then.
pub struct Process {
    verb: &'static str,
    config: PathBuf,
    log: PathBuf,
    child: Option<Child>,
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Process {
    /// Writes `text` to `name.toml` in `dir`, starts `proxy` or `agent` with this configuration
    /// file, and waits until it is ready.
    pub fn start(verb: &'static str, dir: &Path, name: &str, text: &str) -> anyhow::Result<Self> {
        let config = dir.join(format!("{name}.toml"));
        std::fs::write(&config, text)?;
        let mut process = Self { verb, config, log: dir.join(format!("{name}.log")), child: None };
        process.restart()?;
        Ok(process)
    }

    /// Starts the process again, and waits until it is ready.
    pub fn restart(&mut self) -> anyhow::Result<()> {
        self.kill();
        let program = std::env::current_exe().context("cannot find the path of this program")?;
        let log = std::fs::OpenOptions::new().create(true).append(true).open(&self.log)?;
        let mut command = Command::new(program);
        command.arg(self.verb).arg("--config").arg(&self.config).arg("--end-with-input");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log).spawn()?;
        let stdout = child.stdout.take().context("the started process has no standard output")?;
        self.child = Some(child);
        let mut first = String::new();
        std::io::BufReader::new(stdout).read_line(&mut first)?;
        if first.starts_with("ready") {
            return Ok(());
        }
        bail!("the {} did not start; read the reason in {}", self.verb, self.log.display())
    }

    /// Kills the process as `kill -9` does.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Starts servers of these kinds in parallel.
pub fn start(kinds: &[Dialect], dir: &Path) -> anyhow::Result<Vec<LocalServer>> {
    start_all(kinds, dir, LocalServer::start)
}

/// Starts servers of these kinds in parallel, each with `begin`.
pub fn start_all(
    kinds: &[Dialect],
    dir: &Path,
    begin: fn(Dialect, &Path) -> Result<LocalServer, LocalError>,
) -> anyhow::Result<Vec<LocalServer>> {
    // The servers run as users with fewer rights, who must be able to open files below.
    std::fs::set_permissions(dir, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    let start = |(place, &kind): (usize, &Dialect)| {
        let directory = dir.join(format!("server{}", place + 1));
        std::thread::spawn(move || begin(kind, &directory))
    };
    let begun: Vec<_> = kinds.iter().enumerate().map(start).collect();
    let ended = begun
        .into_iter()
        .map(|one| one.join().map_err(|_| anyhow!("a private database server did not start")));
    ended.map(|one| Ok(one??)).collect()
}

/// A free port of the loopback interface.
pub fn free_port() -> anyhow::Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// The settings of a proxy's configuration file.
pub struct ProxyFile<'a> {
    /// The setting `mode`.
    mode: &'a str,
    postgresql: u16,
    mysql: u16,
    /// Ports of the agents beside its servers; empty if the proxy takes their role.
    agents: &'a [u16],
    /// The secret that agents require.
    secret: &'a str,
    /// A table that is sharded over all servers by its column `id`, and the number of ids on each
    /// server.
    table: (&'a str, usize),
    /// Ports of read replicas near the proxy, by the places of their servers.
    pub replicas: OrdMap<usize, u16>,
}

/// The name of a kind in configuration files.
pub const fn kind_name(kind: Dialect) -> &'static str {
    match kind {
        Dialect::PostgreSql => "postgresql",
        Dialect::MariaDb => "mariadb",
    }
}

impl<'a> ProxyFile<'a> {
    /// A file of a proxy that listens on free ports.
    pub fn new(
        mode: &'a str,
        agents: &'a [u16],
        secret: &'a str,
        table: (&'a str, usize),
    ) -> anyhow::Result<Self> {
        let (postgresql, mysql) = (free_port()?, free_port()?);
        let replicas = OrdMap::new();
        Ok(Self { mode, postgresql, mysql, agents, secret, table, replicas })
    }

    /// The login of clients of a kind.
    pub const fn login(&self, kind: Dialect) -> Login<'static> {
        let port = match kind {
            Dialect::PostgreSql => self.postgresql,
            Dialect::MariaDb => self.mysql,
        };
        Login { kind, port, user: CLIENT, password: PASSWORD, database: DATABASE }
    }

    /// The contents of the file.
    pub fn text(&self, servers: &[LocalServer]) -> String {
        let Self { mode, postgresql, mysql, secret, table: (table, each), .. } = *self;
        let mut file = format!(
            "name = \"private\"\ndata_dir = \"proxy\"\nmode = \"{mode}\"\nsecret = \"{secret}\"\n[listen]\n\
             postgresql = \"127.0.0.1:{postgresql}\"\nmysql = \"127.0.0.1:{mysql}\"\n\
             [[users]]\nname = \"{CLIENT}\"\npassword = \"{PASSWORD}\"\n"
        );
        let mut parts = Vec::new();
        for (number, (server, (place, rtt))) in servers.iter().zip(PLACES).enumerate() {
            let name = place.to_lowercase();
            // Writing to a string cannot fail.
            let _ = write!(
                file,
                "[[sources]]\nname = \"{name}\"\nid = {}\nregion = \"{place}\"\nkind = \"{}\"\naddress = \"127.0.0.1:{}\"\n\
                 database = \"{DATABASE}\"\nuser = \"{USER}\"\npassword = \"{PASSWORD}\"\nemulate_rtt_ms = {rtt}\n",
                number + 1,
                kind_name(server.kind),
                server.port,
            );
            if let Some(port) = self.agents.get(number) {
                let _ = writeln!(file, "agent = \"127.0.0.1:{port}\"");
            }
            if let Some(port) = self.replicas.get(&number) {
                let _ = writeln!(file, "replicas = [{{ address = \"127.0.0.1:{port}\" }}]");
            }
            let below = format!("below = {}, ", (number + 1) * each);
            let below = if number + 1 == servers.len() { "" } else { &below };
            parts.push(format!("{{ {below}source = \"{name}\" }}"));
        }
        let _ = write!(
            file,
            "[[tables]]\nname = \"{table}\"\nshard = {{ by = \"range\", column = \"id\", parts = [{}] }}\n",
            parts.join(", ")
        );
        file
    }
}

/// Connects, and retries until it succeeds.
pub async fn enter(login: &Login<'_>) -> anyhow::Result<Client> {
    let deadline = Instant::now() + START;
    loop {
        match Client::enter(login).await {
            Ok(client) => return Ok(client),
            Err(error) if Instant::now() > deadline => {
                return Err(error).context("the proxy accepts no connection");
            }
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}
