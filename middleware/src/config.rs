//! The configuration files of a proxy and of an agent. Everything is checked before anything
//! starts. An error names the line or the field, the problem, and a correct value.

use std::path::{Path, PathBuf};
use std::time::Duration;

use orthodrome_core::limits::Limits;
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::{NodeId, Protocol as _};
use orthodrome_geotp::agent;
use orthodrome_geotp::contract::Kind;
use orthodrome_geotp::middleware::{self, Commit};
use orthodrome_geotp::scalardb::ScalarDb;
use orthodrome_geotp::sql::{Catalogue, Dialect, Isolation, SourceEntry, SourceId, TableEntry};
use serde::Deserialize;

use super::driver::Endpoint;
use super::operators::optimizations;
use super::trust::Trust;

/// An error in a file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}: {what}", file.display())]
pub struct ConfigError {
    /// The file.
    pub file: PathBuf,
    /// The field, the problem, and a correct value.
    pub what: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ProxyFile {
    name: String,
    #[serde(default = "one")]
    node: u32,
    data_dir: PathBuf,
    /// The region of the proxy.
    #[serde(default)]
    region: String,
    listen: Listen,
    #[serde(default)]
    tls: Option<TlsEntry>,
    #[serde(default = "serializable")]
    isolation: String,
    #[serde(default = "geotp")]
    mode: String,
    #[serde(default = "five_seconds")]
    lock_wait_ms: u64,
    #[serde(default)]
    secret: String,
    #[serde(default)]
    users: Vec<UserEntry>,
    sources: Vec<FileSource>,
    #[serde(default)]
    tables: Vec<TableEntry>,
    /// The source for tables that clients create and that the file does not name.
    new_tables: Option<String>,
    /// The tables that system catalogues show: `all`, or those of `one` source.
    #[serde(default = "all")]
    catalogue: String,
}

fn all() -> String {
    "all".into()
}

fn one() -> u32 {
    1
}

fn serializable() -> String {
    "serializable".into()
}

fn geotp() -> String {
    "geotp".into()
}

fn five_seconds() -> u64 {
    5_000
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Listen {
    postgresql: Option<String>,
    mysql: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TlsEntry {
    certificate: PathBuf,
    key: PathBuf,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct UserEntry {
    name: String,
    password: Option<String>,
    password_file: Option<PathBuf>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileSource {
    name: String,
    kind: Dialect,
    #[serde(default)]
    region: String,
    /// A number that is the same in the files of all proxies and agents; by default the position in
    /// the list.
    id: Option<u32>,
    address: String,
    database: String,
    user: String,
    #[serde(default)]
    password: Option<String>,
    password_file: Option<PathBuf>,
    /// The address of its agent; without one, the proxy takes the agent's role.
    agent: Option<String>,
    /// Certificates of the authority that signed the other end's certificate; enables TLS.
    tls_authority: Option<PathBuf>,
    /// The same for its agent.
    agent_tls_authority: Option<PathBuf>,
    /// An emulated round trip.
    #[serde(default)]
    emulate_rtt_ms: f64,
    /// Its read replicas, for the mode `near`.
    #[serde(default)]
    replicas: Vec<FileReplica>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileReplica {
    address: String,
    #[serde(default)]
    region: String,
    /// An emulated round trip.
    #[serde(default)]
    emulate_rtt_ms: f64,
}

/// One source of a proxy.
#[derive(Clone, Debug)]
pub struct SourceConfig {
    /// Its id in the catalogue.
    pub id: SourceId,
    /// Its node id.
    pub node: NodeId,
    /// Its address and login.
    pub endpoint: Endpoint,
    /// The address of its agent, if it has one.
    pub agent: Option<String>,
    /// Verifies the agent's certificate; none: the connection is not encrypted.
    pub agent_trust: Option<Trust>,
    /// The emulated round-trip time to the agent, or to the source itself.
    pub emulated_rtt: Duration,
    /// The nearest of its read replicas: the first that is listed with the proxy's own region, or
    /// the first.
    pub replica: Option<Endpoint>,
}

/// The settings of a proxy.
#[derive(Clone, Debug)]
pub struct ProxyConfig {
    /// Its name, which its decision log contains.
    pub name: String,
    /// Its number among all proxies of these sources.
    pub node: NodeId,
    /// The directory of its decision log.
    pub data_dir: PathBuf,
    /// The address for PostgreSQL clients.
    pub listen_postgresql: Option<String>,
    /// The address for MySQL clients.
    pub listen_mysql: Option<String>,
    /// Certificate and key, in PEM.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// The default isolation level of transactions.
    pub isolation: Isolation,
    /// Users and passwords.
    pub users: OrdMap<String, String>,
    /// The secret that agents require.
    pub secret: String,
    /// Sources.
    pub sources: Vec<SourceConfig>,
    /// Sources and tables.
    pub catalogue: Catalogue,
    /// The source for tables that clients create and that the catalogue does not have; by default
    /// the first of the client's kind.
    pub new_tables: Option<SourceId>,
    /// True if system catalogues show the tables of all sources.
    pub shows_all: bool,
    /// Settings of the machine.
    pub middleware: middleware::Config,
    /// Settings of agents inside the proxy.
    pub agent: agent::Config,
    /// The variant of [`ScalarDb`] that replaces the machine and its agents.
    pub by_key: Option<&'static str>,
    /// True if writing statements of a round come last (QURO).
    pub writes_last: bool,
    /// True if statements of a transaction are answered from copies until it commits.
    pub is_near: bool,
    /// True if it takes over its number from a proxy whose decision log is lost. This is not in the
    /// file, because it is for one start.
    pub takes_over: bool,
}

fn password(
    field: &str,
    base: &Path,
    plain: Option<&String>,
    file: Option<&PathBuf>,
) -> Result<String, String> {
    match (plain, file) {
        (Some(_), Some(_)) => {
            Err(format!("{field}.password: use only one of `password` and `password_file`"))
        }
        (Some(plain), None) => Ok(plain.clone()),
        (None, Some(path)) => {
            let path = base.join(path);
            let text = std::fs::read_to_string(&path);
            let text = text.map_err(|error| {
                format!("{field}.password_file: cannot read {}: {error}", path.display())
            })?;
            Ok(text.trim_end_matches(['\n', '\r']).to_owned())
        }
        (None, None) => Ok(String::new()),
    }
}

fn address(field: &str, address: &str) -> Result<(), String> {
    let port = address
        .rsplit_once(':')
        .and_then(|(host, port)| (!host.is_empty()).then_some(port)?.parse::<u16>().ok());
    port.map(|_| ()).ok_or_else(|| format!("{field}: `{address}` is not an address; use host:port"))
}

/// Reads the authority for verifying the certificate of `address`.
fn trust(
    field: &str,
    base: &Path,
    authority: Option<&Path>,
    address: &str,
) -> Result<Option<Trust>, String> {
    authority.map(|authority| Trust::load(field, &base.join(authority), address)).transpose()
}

/// Checks an emulated round-trip time.
fn emulated(field: &str, ms: f64) -> Result<Duration, String> {
    if !(0.0..=10_000.0).contains(&ms) {
        return Err(format!("{field}.emulate_rtt_ms: {ms} is out of range; use 0 to 10000"));
    }
    Ok(Duration::from_secs_f64(ms / 1e3))
}

/// The replica of a source that is nearest to a proxy in `region`.
fn replica(
    field: &str,
    base: &Path,
    source: &FileSource,
    endpoint: &Endpoint,
    region: &str,
) -> Result<Option<Endpoint>, String> {
    let mut found = Vec::new();
    for (place, replica) in source.replicas.iter().enumerate() {
        let field = format!("{field}.replicas.{}", place + 1);
        address(&format!("{field}.address"), &replica.address)?;
        let rtt = emulated(&field, replica.emulate_rtt_ms)?;
        let trust = trust(
            &format!("{field}.tls_authority"),
            base,
            source.tls_authority.as_deref(),
            &replica.address,
        )?;
        let address = replica.address.clone();
        let is_here = !region.is_empty() && replica.region == region;
        found.push((!is_here, Endpoint { address, one_way: rtt / 2, trust, ..endpoint.clone() }));
    }
    found.sort_by_key(|(is_elsewhere, _)| *is_elsewhere);
    Ok(found.into_iter().next().map(|(_, endpoint)| endpoint))
}

fn read<T: for<'de> Deserialize<'de>>(path: &Path) -> Result<T, ConfigError> {
    let bad = |what: String| ConfigError { file: path.to_owned(), what };
    let text = std::fs::read_to_string(path)
        .map_err(|error| bad(format!("cannot read the file: {error}")))?;
    toml::from_str(&text).map_err(|error| {
        let line = error
            .span()
            .map(|span| 1 + text.bytes().take(span.start).filter(|byte| *byte == b'\n').count());
        let at = line.map_or_else(String::new, |line| format!("line {line}: "));
        bad(format!("{at}{}", error.message().replace('\n', " ")))
    })
}

/// Interval at which agents query the lock waits of their source. A deadlock across sources lasts
/// about twice as long, plus the network delay.
const LOOK_EVERY: Duration = Duration::from_millis(50);

const fn kind(dialect: Dialect) -> Kind {
    match dialect {
        Dialect::PostgreSql => Kind::Postgres,
        Dialect::MariaDb => Kind::MariaDb,
    }
}

impl ProxyConfig {
    /// Reads and checks a proxy's file.
    ///
    /// # Errors
    /// The first error.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let file: ProxyFile = read(path)?;
        let base = path.parent().unwrap_or(Path::new("")).to_owned();
        Self::check(&base, file).map_err(|what| ConfigError { file: path.to_owned(), what })
    }

    fn check(base: &Path, file: ProxyFile) -> Result<Self, String> {
        check_listeners(&file)?;
        if file.node == 0 || file.node > 999 {
            return Err(format!(
                "node: {} is out of range; number proxies from 1 to 999",
                file.node
            ));
        }
        let isolation = Isolation::from_name(&file.isolation)
            .ok_or_else(|| format!("isolation: `{}` is not a level; use serializable, repeatable read or read committed", file.isolation))?;
        let by_key = ScalarDb::NAMES.iter().copied().find(|name| *name == file.mode);
        let switched = optimizations(by_key.map_or(file.mode.as_str(), |_| "xa")).ok_or_else(|| {
            format!(
                "mode: unknown mode `{}`; use xa, xa-local, quro, chiller, scalardb, scalardb+, geotp-o1, geotp-o2, geotp or near",
                file.mode
            )
        })?;
        let users = users(base, &file)?;
        let entries: Vec<SourceEntry> = file
            .sources
            .iter()
            .map(|s| SourceEntry { name: s.name.clone(), kind: s.kind, region: s.region.clone() })
            .collect();
        let catalogue =
            Catalogue::new(&entries, &file.tables).map_err(|error| error.to_string())?;
        let place = |name: &String| {
            catalogue.find_source(name).ok_or_else(|| {
                let known: Vec<_> = entries.iter().map(|entry| entry.name.as_str()).collect();
                format!("new_tables: unknown source `{name}`; use one of {}", known.join(", "))
            })
        };
        let shows_all = match &*file.catalogue {
            "all" => true,
            "one" => false,
            other => {
                return Err(format!(
                    "catalogue: unknown value `{other}`; use `all` for the tables of all sources, or `one` for \
                     those of one source"
                ));
            }
        };
        let new_tables = file.new_tables.as_ref().map(place).transpose()?;
        let mut sources = Vec::new();
        for place in 0..file.sources.len() {
            let source = source(base, &file, place, by_key.is_some())?;
            if sources.iter().any(|other: &SourceConfig| other.node == source.node) {
                let name = file.sources.get(place).map_or("", |source| source.name.as_str());
                return Err(format!(
                    "sources.{name}.id: another source has the same id; use another one"
                ));
            }
            sources.push(source);
        }
        let (middleware, agent) = machines(&file, switched, &sources);
        Ok(Self {
            name: file.name,
            node: NodeId(file.node),
            data_dir: base.join(file.data_dir),
            listen_postgresql: file.listen.postgresql,
            listen_mysql: file.listen.mysql,
            tls: file.tls.map(|tls| (base.join(tls.certificate), base.join(tls.key))),
            isolation,
            users,
            secret: file.secret,
            sources,
            catalogue,
            new_tables,
            shows_all,
            middleware,
            agent,
            by_key,
            writes_last: file.mode == "quro",
            is_near: file.mode == "near",
            takes_over: false,
        })
    }

    /// The names that clients may use for the database: its name, or its name at a source.
    pub(crate) fn databases(&self) -> OrdSet<String> {
        let at_sources = self.sources.iter().map(|source| source.endpoint.database.clone());
        at_sources.chain([self.name.clone()]).collect()
    }
}

fn check_listeners(file: &ProxyFile) -> Result<(), String> {
    if file.listen.postgresql.is_none() && file.listen.mysql.is_none() {
        return Err("listen: no listener; use `postgresql`, `mysql` or both".into());
    }
    for (field, given) in
        [("listen.postgresql", &file.listen.postgresql), ("listen.mysql", &file.listen.mysql)]
    {
        if let Some(given) = given {
            address(field, given)?;
        }
    }
    Ok(())
}

/// The passwords of the users of a proxy.
fn users(base: &Path, file: &ProxyFile) -> Result<OrdMap<String, String>, String> {
    let mut users = OrdMap::new();
    for user in &file.users {
        let field = format!("users.{}", user.name);
        let password = password(&field, base, user.password.as_ref(), user.password_file.as_ref())?;
        if password.is_empty() {
            return Err(format!(
                "{field}.password: it is empty; use a password, or `password_file`"
            ));
        }
        if users.insert(user.name.clone(), password).is_some() {
            return Err(format!("{field}: listed twice; remove one"));
        }
    }
    if users.is_empty() {
        return Err(
            "users: there are none, so nobody can come in; add `[[users]]` with name and password"
                .into(),
        );
    }
    Ok(users)
}

/// The source at this place of a proxy's file.
fn source(
    base: &Path,
    file: &ProxyFile,
    place: usize,
    by_key: bool,
) -> Result<SourceConfig, String> {
    let source = file.sources.get(place).ok_or("sources: the place is out of range")?;
    let field = format!("sources.{}", source.name);
    address(&format!("{field}.address"), &source.address)?;
    if let Some(agent) = &source.agent {
        address(&format!("{field}.agent"), agent)?;
    }
    let emulated_rtt = emulated(&field, source.emulate_rtt_ms)?;
    if source.agent.is_none() && source.agent_tls_authority.is_some() {
        return Err(format!(
            "{field}.agent_tls_authority: the source has no `agent`; remove this setting"
        ));
    }
    let trusted = |setting: &str, authority: &Option<PathBuf>, address: &str| {
        trust(&format!("{field}.{setting}"), base, authority.as_deref(), address)
    };
    let agent = source.agent.as_deref().unwrap_or_default();
    let agent_trust = trusted("agent_tls_authority", &source.agent_tls_authority, agent)?;
    if by_key && source.id.is_none() {
        return Err(format!(
            "{field}.id: mode `{}` stores ids of sources in its records; give each source an id, the same in the files of all proxies",
            file.mode
        ));
    }
    let endpoint = Endpoint {
        kind: source.kind,
        address: source.address.clone(),
        database: source.database.clone(),
        user: source.user.clone(),
        password: password(&field, base, source.password.as_ref(), source.password_file.as_ref())?,
        lock_wait: lock_wait(file),
        one_way: emulated_rtt / 2,
        trust: trusted("tls_authority", &source.tls_authority, &source.address)?,
        label: format!("orthodrome_{}_{}", file.name, file.node),
        look_every: LOOK_EVERY,
    };
    Ok(SourceConfig {
        id: SourceId(place as u16),
        node: NodeId(1_000 + source.id.unwrap_or(place as u32 + 1)),
        replica: replica(&field, base, source, &endpoint, &file.region)?,
        endpoint,
        agent: source.agent.clone(),
        agent_trust,
        emulated_rtt,
    })
}

fn lock_wait(file: &ProxyFile) -> Duration {
    Duration::from_millis(file.lock_wait_ms.max(1))
}

/// The settings of the machines: the middleware, and the agents in the proxy's process.
fn machines(
    file: &ProxyFile,
    optimizations: middleware::Optimizations,
    sources: &[SourceConfig],
) -> (middleware::Config, agent::Config) {
    let longest = sources
        .iter()
        .map(|s| s.emulated_rtt)
        .max()
        .unwrap_or_default()
        .max(Duration::from_millis(20));
    let quarantine = (longest * 4).max(Duration::from_secs(1));
    let is_geotp = file.mode.starts_with("geotp") || file.mode == "near";
    let middleware = middleware::Config {
        sources: sources.iter().map(|s| (s.node, kind(s.endpoint.kind))).collect(),
        optimizations,
        commit: if file.mode == "xa-local" { Commit::Local } else { Commit::TwoPhase },
        inner_below: (file.mode == "chiller").then_some(Duration::from_millis(10)),
        commit_in_text: is_geotp,
        answers_at_decision: is_geotp,
        ping_interval: Duration::from_millis(100),
        rtt_weight_percent: 10,
        hot_records: 10_000,
        hot_keep_percent: 80,
        // As in the simulator: transactions that wait for the full forecast hold locks in the
        // meantime.
        forecast_percent: 25,
        // So a wrong forecast delays the transactions that wait for locks by at most a quarter
        // of a round trip. The times of hot records vary more on real servers than on modelled
        // ones.
        forecast_max: longest / 4,
        admission_wait: Duration::from_millis(10),
        admission_tries: 10,
        resend_after: longest * 3 + Duration::from_millis(500),
        give_up_after: lock_wait(file) + longest * 4 + Duration::from_secs(5),
        scan_interval: Duration::from_secs(1),
        quarantine,
        checkpoint_records: 10_000,
        finds_deadlocks: is_geotp,
        mutations: middleware::Mutations::default(),
    };
    let agent = agent::Config {
        master_timeout: longest * 5 + Duration::from_secs(3),
        quarantine,
        limits: Limits::SERVER,
        mutations: agent::Mutations::default(),
    };
    (middleware, agent)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AgentFile {
    listen: String,
    secret: String,
    data_dir: PathBuf,
    /// The certificate of its listener.
    tls: Option<TlsEntry>,
    /// The source's number in the proxies' files.
    id: u32,
    kind: Dialect,
    address: String,
    database: String,
    user: String,
    password: Option<String>,
    password_file: Option<PathBuf>,
    #[serde(default = "five_seconds")]
    lock_wait_ms: u64,
    /// Certificates of the authority that signed the other end's certificate; enables TLS.
    tls_authority: Option<PathBuf>,
    #[serde(default)]
    rtt_max_ms: u64,
    /// Agents of other sources, for early abort.
    #[serde(default)]
    peers: Vec<PeerEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PeerEntry {
    id: u32,
    address: String,
    /// Certificates of the authority that signed the other end's certificate; enables TLS.
    tls_authority: Option<PathBuf>,
    /// An emulated round trip.
    #[serde(default)]
    emulate_rtt_ms: f64,
}

/// Another agent.
#[derive(Clone, Debug)]
pub struct PeerConfig {
    /// Its address.
    pub address: String,
    /// Verifies that agent's certificate; none: the connection is not encrypted.
    pub trust: Option<Trust>,
    /// An emulated round trip to it.
    pub emulated_rtt: Duration,
}

/// The settings of an agent.
#[derive(Clone, Debug)]
pub struct AgentConfig {
    /// The address on which it listens for middlewares and other agents.
    pub listen: String,
    /// The secret that they must send first.
    pub secret: String,
    /// Certificate and key of its listener, in PEM.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// The directory of the list of its sessions.
    pub data_dir: PathBuf,
    /// The node id of its source.
    pub node: NodeId,
    /// Its source.
    pub endpoint: Endpoint,
    /// Other agents.
    pub peers: OrdMap<NodeId, PeerConfig>,
    /// Settings of the machine.
    pub agent: agent::Config,
}

impl AgentConfig {
    /// Reads and checks an agent's file.
    ///
    /// # Errors
    /// The first error.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let file: AgentFile = read(path)?;
        let base = path.parent().unwrap_or(Path::new("")).to_owned();
        Self::check(&base, file).map_err(|what| ConfigError { file: path.to_owned(), what })
    }

    fn check(base: &Path, file: AgentFile) -> Result<Self, String> {
        address("listen", &file.listen)?;
        address("address", &file.address)?;
        if file.secret.len() < 8 {
            return Err(
                "secret: it has fewer than 8 characters; use a longer one, because it grants write access to the source"
                    .into(),
            );
        }
        let mut peers = OrdMap::new();
        for peer in &file.peers {
            let field = format!("peers.{}", peer.id);
            address(&format!("{field}.address"), &peer.address)?;
            let emulated_rtt = emulated(&field, peer.emulate_rtt_ms)?;
            let trust = trust(
                &format!("{field}.tls_authority"),
                base,
                peer.tls_authority.as_deref(),
                &peer.address,
            )?;
            let config = PeerConfig { address: peer.address.clone(), trust, emulated_rtt };
            peers.insert(NodeId(1_000 + peer.id), config);
        }
        let longest = Duration::from_millis(file.rtt_max_ms.max(20));
        let quarantine = (longest * 4).max(Duration::from_secs(1));
        Ok(Self {
            listen: file.listen,
            secret: file.secret,
            tls: file.tls.map(|tls| (base.join(tls.certificate), base.join(tls.key))),
            data_dir: base.join(&file.data_dir),
            node: NodeId(1_000 + file.id),
            endpoint: Endpoint {
                kind: file.kind,
                trust: trust("tls_authority", base, file.tls_authority.as_deref(), &file.address)?,
                address: file.address,
                database: file.database,
                user: file.user,
                password: password(
                    "source",
                    base,
                    file.password.as_ref(),
                    file.password_file.as_ref(),
                )?,
                lock_wait: Duration::from_millis(file.lock_wait_ms.max(1)),
                one_way: Duration::ZERO,
                label: format!("orthodrome_agent_{}", file.id),
                look_every: LOOK_EVERY,
            },
            peers,
            agent: agent::Config {
                master_timeout: longest * 5 + Duration::from_secs(3),
                quarantine,
                limits: Limits::SERVER,
                mutations: agent::Mutations::default(),
            },
        })
    }
}
