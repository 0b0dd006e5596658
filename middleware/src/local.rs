//! Private PostgreSQL and MariaDB servers on free loopback ports, for tests and demonstrations.
//! When their handle is dropped they end, and their files are removed.

use std::fs;
use std::io;
use std::net::TcpListener;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use orthodrome_geotp::sql::{Answer, Dialect};

use super::driver::{Endpoint, Fault, Session, Trouble};

/// The user of a private server.
pub const USER: &str = "orthodrome";
/// The password of [`USER`].
pub const PASSWORD: &str = "loopback-only";
/// The database of a private server.
pub const DATABASE: &str = "bank";

/// Time limit for the first answer of a server.
const START: Duration = Duration::from_secs(120);

/// Number of ports that are tried.
const PORTS: u32 = 3;

/// Why a private server could not be started.
#[derive(Debug, thiserror::Error)]
pub enum LocalError {
    /// The programs are not installed.
    #[error("{what} was not found; install it: apt-get install {package}")]
    Missing {
        /// The missing programs.
        what: &'static str,
        /// Their Debian package.
        package: &'static str,
    },
    /// The server did not start.
    #[error("{what} failed: {why}")]
    Failed {
        /// The program.
        what: String,
        /// Its output.
        why: String,
    },
    /// An operation of the operating system failed.
    #[error("cannot start a private server: {0}")]
    Io(#[from] io::Error),
}

const NO_POSTGRES: LocalError =
    LocalError::Missing { what: "PostgreSQL 15 or later", package: "postgresql" };
const NO_MARIADB: LocalError = LocalError::Missing { what: "MariaDB", package: "mariadb-server" };

/// A private server.
#[derive(Debug)]
pub struct LocalServer {
    /// Its kind.
    pub kind: Dialect,
    /// Its port on loopback.
    pub port: u16,
    directory: PathBuf,
    child: Option<Child>,
    /// A process that ends the server if this process ends without doing so.
    guard: Option<Child>,
    /// What the server does about replication.
    role: Role,
}

/// What a server does about replication.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Role {
    /// Nothing.
    Alone,
    /// Replicas may follow it.
    Primary,
    /// It follows the server at this port.
    Replica(u16),
}

/// The folder of PostgreSQL's programs, in the newest version.
fn postgres_programs() -> Option<PathBuf> {
    let mut found: Vec<(u32, PathBuf)> = fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            Some((entry.file_name().to_str()?.parse().ok()?, entry.path().join("bin")))
        })
        .filter(|(version, path)| *version >= 15 && path.join("initdb").exists())
        .collect();
    found.sort();
    found.pop().map(|(_, path)| path)
}

/// A program for clients of PostgreSQL, such as `psql`. On Debian, the one in the search path is a
/// Perl script that finds this program, and takes four times as long to start.
#[must_use]
pub fn postgres_client(name: &str) -> PathBuf {
    static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();
    let folder = FOLDER.get_or_init(postgres_programs).as_ref();
    let direct = folder.map(|folder| folder.join(name)).filter(|program| program.exists());
    direct.unwrap_or_else(|| name.into())
}

fn mariadb_program() -> Option<PathBuf> {
    let places = [
        "/usr/sbin/mariadbd",
        "/usr/bin/mariadbd",
        "/usr/local/sbin/mariadbd",
        "/usr/local/bin/mariadbd",
    ];
    places.into_iter().map(PathBuf::from).find(|path| path.exists())
}

/// A user without privileges, if this process runs as root: both servers refuse to run as root.
fn lesser_user(names: &[&str]) -> Option<(u32, u32)> {
    let is_root = fs::metadata("/proc/self")
        .is_ok_and(|meta| std::os::unix::fs::MetadataExt::uid(&meta) == 0);
    if !is_root {
        return None;
    }
    let all = fs::read_to_string("/etc/passwd").unwrap_or_default();
    names.iter().find_map(|name| {
        let line = all.lines().find(|line| line.split(':').next() == Some(name))?;
        let mut fields = line.split(':').skip(2);
        Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
    })
}

fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

fn as_user(command: &mut Command, user: Option<(u32, u32)>) -> &mut Command {
    if let Some((uid, gid)) = user {
        command.uid(uid).gid(gid);
    }
    // Ctrl-C in a terminal goes to the whole process group, but only the holder of the handle may
    // stop the server.
    command.current_dir("/").stdin(Stdio::null()).process_group(0)
}

fn run(command: &mut Command) -> Result<(), LocalError> {
    let output = command.output()?;
    if output.status.success() {
        return Ok(());
    }
    let why = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Err(LocalError::Failed { what: format!("{:?}", command.get_program()), why })
}

/// A login at a server on this machine, or at a proxy with the protocol of such a server.
#[derive(Clone, Copy, Debug)]
pub struct Login<'a> {
    /// The kind of the server.
    pub kind: Dialect,
    /// The port on loopback.
    pub port: u16,
    /// The user.
    pub user: &'a str,
    /// The user's password.
    pub password: &'a str,
    /// The database.
    pub database: &'a str,
}

impl Login<'_> {
    /// The login for our own driver.
    pub(crate) fn endpoint(&self) -> Endpoint {
        Endpoint {
            kind: self.kind,
            address: format!("127.0.0.1:{}", self.port),
            database: self.database.to_owned(),
            user: self.user.to_owned(),
            password: self.password.to_owned(),
            lock_wait: Duration::from_secs(5),
            one_way: Duration::ZERO,
            trust: None,
            label: "orthodrome_local".into(),
            look_every: Duration::from_secs(1),
        }
    }

    /// The command-line client of this kind, which runs a query batch and prints rows without
    /// decoration.
    #[must_use]
    pub fn client(&self, text: &str) -> Command {
        let Self { kind, user, password, database, .. } = *self;
        let port = self.port.to_string();
        let mut command = match kind {
            Dialect::PostgreSql => {
                let mut command = Command::new(postgres_client("psql"));
                command.args(["-X", "-h", "127.0.0.1", "-p", &port, "-U", user, "-d", database]);
                command.args(["-Atqc", text]).env("PGPASSWORD", password);
                command
            }
            Dialect::MariaDb => {
                let mut command = Command::new("mariadb");
                command.args(["--no-defaults", "-h", "127.0.0.1", "-P", &port, "-u", user]);
                command.args(["-N", "-B", "-e", text, database]).env("MYSQL_PWD", password);
                command
            }
        };
        command.stdin(Stdio::null());
        command
    }
}

/// A connection to a server, or to a proxy with the protocol of such a server.
pub struct Client(Session);

/// Why a query batch failed.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// The server returned an error.
    #[error("{} ({})", .0.message, .0.sqlstate)]
    Fault(Fault),
    /// The connection broke, so it is unknown what was executed.
    #[error("the connection broke: {0}")]
    Broken(io::Error),
}

impl From<Trouble> for Refused {
    fn from(trouble: Trouble) -> Self {
        match trouble {
            Trouble::Fault(fault) => Self::Fault(fault),
            Trouble::Broken(error) => Self::Broken(error),
        }
    }
}

impl Client {
    /// Connects and logs in.
    ///
    /// # Errors
    /// The server is unreachable or rejects the login.
    pub async fn enter(login: &Login<'_>) -> Result<Self, Refused> {
        // The server's own lock time-out applies.
        let to = Endpoint { lock_wait: Duration::ZERO, ..login.endpoint() };
        Ok(Self(Session::connect(&to).await?))
    }

    /// Runs a query batch, and returns the answers of its statements.
    ///
    /// # Errors
    /// The first statement that failed, or the connection broke.
    pub async fn text(&mut self, text: &str) -> Result<Vec<Answer>, Refused> {
        let outcome = self.0.text(text, Duration::ZERO).await?;
        match outcome.fault {
            None => Ok(outcome.done.into_iter().map(|(answer, _)| answer).collect()),
            Some(fault) => Err(Refused::Fault(fault)),
        }
    }
}

impl LocalServer {
    /// The login of [`USER`].
    #[must_use]
    pub fn login(&self) -> Login<'static> {
        let Self { kind, port, .. } = *self;
        Login { kind, port, user: USER, password: PASSWORD, database: DATABASE }
    }

    /// Checks whether servers of a kind can be started here.
    ///
    /// # Errors
    /// The packages to install.
    pub fn check(kind: Dialect) -> Result<(), LocalError> {
        let (is_there, missing) = match kind {
            Dialect::PostgreSql => (postgres_programs().is_some(), NO_POSTGRES),
            Dialect::MariaDb => (mariadb_program().is_some(), NO_MARIADB),
        };
        if is_there { Ok(()) } else { Err(missing) }
    }

    /// Starts a server of a kind with its files in the new directory `directory`.
    ///
    /// # Errors
    /// See [`LocalError`].
    pub fn start(kind: Dialect, directory: &Path) -> Result<Self, LocalError> {
        Self::start_as(kind, directory, Role::Alone)
    }

    /// The same for a server that replicas may follow: a MariaDB server then writes a binary log.
    ///
    /// # Errors
    /// See [`LocalError`].
    pub fn start_primary(kind: Dialect, directory: &Path) -> Result<Self, LocalError> {
        Self::start_as(kind, directory, Role::Primary)
    }

    /// Starts a read replica of this server with its files in the new directory `directory`. It
    /// follows the server through the port `through` on loopback, which may be another one than
    /// the server's own: that of something that delays what it passes on. The server must be one
    /// that replicas may follow.
    ///
    /// # Errors
    /// See [`LocalError`].
    pub fn start_replica(&self, directory: &Path, through: u16) -> Result<Self, LocalError> {
        let replica = Self::start_from(self, directory, through)?;
        if self.kind == Dialect::MariaDb {
            let follow = format!(
                "CHANGE MASTER TO MASTER_HOST = '127.0.0.1', MASTER_PORT = {through}, MASTER_USER = '{USER}', \
                 MASTER_PASSWORD = '{PASSWORD}', MASTER_USE_GTID = slave_pos; START SLAVE"
            );
            run(&mut replica.login().client(&follow))?;
        }
        Ok(replica)
    }

    fn start_from(primary: &Self, directory: &Path, through: u16) -> Result<Self, LocalError> {
        if primary.kind == Dialect::MariaDb {
            // The binary log has everything since the primary's first start.
            return Self::start_as(primary.kind, directory, Role::Replica(through));
        }
        let mut replica = Self::prepared(primary.kind, directory, Role::Replica(through))?;
        let programs = postgres_programs().ok_or(NO_POSTGRES)?;
        fs::set_permissions(directory, fs::Permissions::from_mode(0o755))?;
        fs::create_dir(replica.data())?;
        fs::set_permissions(replica.data(), fs::Permissions::from_mode(0o700))?;
        replica.own(&replica.data())?;
        let mut copy = Command::new(programs.join("pg_basebackup"));
        copy.args(["-h", "127.0.0.1", "-p", &primary.port.to_string(), "-U", USER, "-c", "fast"]);
        copy.args(["-X", "stream", "-D"]).arg(replica.data()).env("PGPASSWORD", PASSWORD);
        run(as_user(&mut copy, replica.user()))?;
        let signal = replica.data().join("standby.signal");
        fs::write(&signal, "")?;
        replica.own(&signal)?;
        replica.first_start()?;
        Ok(replica)
    }

    fn prepared(kind: Dialect, directory: &Path, role: Role) -> Result<Self, LocalError> {
        fs::create_dir_all(directory)?;
        // The unprivileged user must be able to enter it.
        fs::set_permissions(directory, fs::Permissions::from_mode(0o755))?;
        Ok(Self {
            kind,
            port: free_port()?,
            directory: directory.to_owned(),
            child: None,
            guard: None,
            role,
        })
    }

    fn start_as(kind: Dialect, directory: &Path, role: Role) -> Result<Self, LocalError> {
        let mut server = Self::prepared(kind, directory, role)?;
        match kind {
            Dialect::PostgreSql => server.make_postgres()?,
            Dialect::MariaDb => server.make_mariadb()?,
        }
        server.first_start()?;
        Ok(server)
    }

    fn first_start(&mut self) -> Result<(), LocalError> {
        for _ in 1..PORTS {
            match self.restart() {
                // Another process may have taken the port since it was found free.
                Err(LocalError::Failed { .. }) => self.port = free_port()?,
                tried => return tried,
            }
        }
        self.restart()
    }

    fn user(&self) -> Option<(u32, u32)> {
        match self.kind {
            Dialect::PostgreSql => lesser_user(&["postgres", "nobody"]),
            Dialect::MariaDb => lesser_user(&["mysql", "nobody"]),
        }
    }

    fn data(&self) -> PathBuf {
        self.directory.join("data")
    }

    fn own(&self, path: &Path) -> io::Result<()> {
        match self.user() {
            Some((uid, gid)) => chown(path, Some(uid), Some(gid)),
            None => Ok(()),
        }
    }

    fn make_postgres(&self) -> Result<(), LocalError> {
        let programs = postgres_programs().ok_or(NO_POSTGRES)?;
        let secret = self.directory.join("password");
        fs::write(&secret, PASSWORD)?;
        fs::create_dir(self.data())?;
        self.own(&self.data())?;
        self.own(&secret)?;
        let mut initdb = Command::new(programs.join("initdb"));
        initdb.arg("-D").arg(self.data()).args([
            "-U",
            USER,
            "-A",
            "scram-sha-256",
            "--locale=C",
            "--encoding=UTF8",
        ]);
        initdb.arg(format!("--pwfile={}", secret.display()));
        run(as_user(&mut initdb, self.user()))
    }

    fn make_mariadb(&self) -> Result<(), LocalError> {
        if mariadb_program().is_none() {
            return Err(NO_MARIADB);
        }
        fs::create_dir(self.data())?;
        self.own(&self.data())?;
        self.own(&self.directory)?;
        let mut install = Command::new("mariadb-install-db");
        install.args([
            "--no-defaults",
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
        ]);
        install.arg(format!("--datadir={}", self.data().display()));
        // Each server has its own folder for temporary tables, because a starting server removes
        // those that a dead one seems to have left.
        install.env("TMPDIR", &self.directory);
        run(as_user(&mut install, self.user()))?;
        let script = format!(
            "CREATE DATABASE IF NOT EXISTS {DATABASE};\nCREATE USER IF NOT EXISTS {USER} IDENTIFIED BY '{PASSWORD}';\n\
             GRANT ALL ON *.* TO {USER};\n",
        );
        fs::write(self.directory.join("init.sql"), script)?;
        Ok(())
    }

    /// Restarts the server with TLS, with copies of this certificate and key (PEM).
    ///
    /// # Errors
    /// See [`LocalError`].
    pub fn secure(&mut self, certificate: &Path, key: &Path) -> Result<(), LocalError> {
        for (from, to) in [(certificate, self.certificate()), (key, self.key())] {
            fs::copy(from, &to)?;
            fs::set_permissions(&to, fs::Permissions::from_mode(0o600))?;
            self.own(&to)?;
        }
        self.restart()
    }

    fn certificate(&self) -> PathBuf {
        self.directory.join("tls.pem")
    }

    fn key(&self) -> PathBuf {
        self.directory.join("tls.key")
    }

    /// Starts or restarts the server, and waits until it answers.
    ///
    /// # Errors
    /// See [`LocalError`].
    pub fn restart(&mut self) -> Result<(), LocalError> {
        let deadline = Instant::now() + START;
        loop {
            match self.start_again() {
                // A process that was started while its server was being killed ends soon, but until
                // then it prevents the restart.
                Err(LocalError::Failed { why, .. })
                    if why.contains("pre-existing shared memory block")
                        && Instant::now() < deadline =>
                {
                    std::thread::sleep(Duration::from_millis(50));
                }
                tried => return tried,
            }
        }
    }

    fn start_again(&mut self) -> Result<(), LocalError> {
        self.kill();
        let log =
            fs::OpenOptions::new().create(true).append(true).open(self.directory.join("log"))?;
        let mut command = match self.kind {
            Dialect::PostgreSql => {
                let programs = postgres_programs().ok_or(NO_POSTGRES)?;
                let mut command = Command::new(programs.join("postgres"));
                command.arg("-D").arg(self.data()).args(["-p", &self.port.to_string()]);
                // A replica refuses every query at SERIALIZABLE.
                let isolation = match self.role {
                    Role::Replica(_) => "default_transaction_isolation=repeatable read",
                    Role::Alone | Role::Primary => "default_transaction_isolation=serializable",
                };
                for setting in [
                    "listen_addresses=127.0.0.1",
                    "unix_socket_directories=",
                    // Each prepared branch needs a slot.
                    "max_prepared_transactions=300",
                    "max_connections=300",
                    isolation,
                ] {
                    command.args(["-c", setting]);
                }
                if let Role::Replica(port) = self.role {
                    let primary = format!(
                        "primary_conninfo=host=127.0.0.1 port={port} user={USER} password={PASSWORD}"
                    );
                    command.args(["-c", &primary]);
                }
                if self.certificate().exists() {
                    command.args(["-c", "ssl=on"]);
                    let file = |name: &str, path: PathBuf| format!("{name}={}", path.display());
                    command.args(["-c", &file("ssl_cert_file", self.certificate())]);
                    command.args(["-c", &file("ssl_key_file", self.key())]);
                }
                if cfg!(target_os = "linux") {
                    // Syncing every file before recovery would take seconds.
                    command.args(["-c", "recovery_init_sync_method=syncfs"]);
                }
                command
            }
            Dialect::MariaDb => {
                let mut command = Command::new(mariadb_program().ok_or(NO_MARIADB)?);
                // G2: read locks outlive XA PREPARE only at SERIALIZABLE.
                command.args([
                    "--no-defaults",
                    "--bind-address=127.0.0.1",
                    "--transaction-isolation=SERIALIZABLE",
                ]);
                command.args([
                    "--character-set-server=utf8mb4",
                    "--collation-server=utf8mb4_bin",
                    "--max-connections=400",
                ]);
                if self.role == Role::Primary {
                    command.args(["--log-bin=bin", "--binlog-format=ROW"]);
                }
                if let Role::Replica(_) = self.role {
                    command.arg("--read-only");
                }
                if self.role != Role::Alone {
                    command.arg(format!("--server-id={}", self.port));
                }
                if self.certificate().exists() {
                    command.arg(format!("--ssl-cert={}", self.certificate().display()));
                    command.arg(format!("--ssl-key={}", self.key().display()));
                }
                command.arg(format!("--port={}", self.port)).env("TMPDIR", &self.directory);
                command.arg(format!("--datadir={}", self.data().display()));
                command.arg(format!("--socket={}", self.directory.join("socket").display()));
                command.arg(format!("--pid-file={}", self.directory.join("pid").display()));
                command.arg(format!("--init-file={}", self.directory.join("init.sql").display()));
                command
            }
        };
        let user = self.user();
        let child = as_user(&mut command, user).stdout(log.try_clone()?).stderr(log).spawn()?;
        let mut guard = Command::new("sh");
        guard.args(["-c", "read -r _; kill -KILL \"$0\"; rm -rf \"$1\"", &child.id().to_string()]);
        guard
            .arg(&self.directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        self.child = Some(child);
        // Its standard input ends when this process ends.
        self.guard = Some(guard.process_group(0).spawn()?);
        let deadline = Instant::now() + START;
        while !self.answers() {
            let has_ended =
                self.child.as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(Some(_))));
            if has_ended || Instant::now() > deadline {
                let said = fs::read_to_string(self.directory.join("log")).unwrap_or_default();
                let last: Vec<&str> = said.lines().rev().take(5).collect();
                return Err(LocalError::Failed {
                    what: self.kind.to_string(),
                    why: last.join("\n"),
                });
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Whether the server accepts a client; also creates PostgreSQL's database.
    fn answers(&self) -> bool {
        let answered = |login: Login<'_>, text: &str| {
            let output = login.client(text).stderr(Stdio::null()).output().ok()?;
            output.status.success().then_some(output.stdout)
        };
        if self.kind == Dialect::PostgreSql {
            let login = Login { database: "postgres", ..self.login() };
            let made = format!("SELECT 'x' FROM pg_database WHERE datname = '{DATABASE}'");
            match answered(login, &made) {
                None => return false,
                Some(said) if said.is_empty() => {
                    return answered(login, &format!("CREATE DATABASE {DATABASE}")).is_some();
                }
                Some(_) => {}
            }
        }
        answered(self.login(), "SELECT 1").is_some()
    }

    /// Whether the server has been started and not killed.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.child.is_some()
    }

    /// Kills the server as `kill -9` does, with all its processes.
    pub fn kill(&mut self) {
        if let Some(mut guard) = self.guard.take() {
            let _ = guard.kill();
            let _ = guard.wait();
        }
        if let Some(mut child) = self.child.take() {
            // PostgreSQL's sessions are processes, each in its own group. They must be found before
            // their parent dies, because afterwards they cannot be identified.
            let children = Command::new("pgrep").args(["-P", &child.id().to_string()]).output();
            let children = children.map(|output| output.stdout).unwrap_or_default();
            let _ = child.kill();
            let children = String::from_utf8_lossy(&children).into_owned();
            let _ = Command::new("kill")
                .arg("-KILL")
                .args(children.split_whitespace())
                .stderr(Stdio::null())
                .status();
            let _ = child.wait();
        }
    }
}

impl Drop for LocalServer {
    fn drop(&mut self) {
        self.kill();
        let _ = fs::remove_dir_all(&self.directory);
    }
}
