//! `measure`: the middleware over real PostgreSQL and MariaDB servers, with emulated round-trip times.

mod overhead;
mod replicas;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail};
use futures_util::future::try_join_all;
use orthodrome_core::Rng;
use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{ClientId, RegionId};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::time::nanos;
use orthodrome_core::txn::{Key, Kind, Op};
use orthodrome_eval::metrics::{Samples, Summary};
use orthodrome_eval::workload::{self, Issuer, Options, Request, Workload};
use orthodrome_middleware::Dialect;
use orthodrome_middleware::local::{Client, DATABASE, LocalServer, Login, PASSWORD, Refused, USER};
use serde::Serialize;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;

use self::replicas::Replicas;
use crate::private::{self, PLACES, Process, ProxyFile, enter};
use crate::{Status, common, output};

/// Measure throughput and latency of the middleware over real database servers, with emulated round-trip times
///
/// Starts four private PostgreSQL or MariaDB servers on loopback, an agent beside each, and a proxy. Messages are delayed by
/// round-trip times of 0, 27, 73 and 251 ms (GeoTP §VII-A3). Each client (terminal) runs one serializable YCSB transaction
/// after the other through the proxy, without retries. Each row of the table is a new proxy with new agents over the same
/// servers.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  orthodrome measure                                              PostgreSQL; modes xa and the three stages of GeoTP
  orthodrome measure --sources mixed --rounds 1,5 --seconds 30
  orthodrome measure --zipf 0.3,0.9,1.5 --distributed 0.2,0.5 --json > measured.json
  orthodrome measure --overhead                                   latency of a statement with and without the proxy

Needs PostgreSQL 15 or later, MariaDB, or both; as root: apt-get install postgresql mariadb-server

Exit status: 0 success, 2 bad usage, or a server did not start.")]
pub struct Args {
    /// Kinds of the four servers: postgresql, mariadb, or mixed (PostgreSQL and MariaDB in turn); one measurement for each
    #[arg(long, value_name = "KINDS", value_delimiter = ',', default_value = "postgresql")]
    sources: Vec<Sources>,
    /// Modes of the proxy (`mode` in its configuration file); one measurement for each
    #[arg(long, value_name = "MODES", value_delimiter = ',', default_value = "xa,geotp-o1,geotp-o2,geotp",
          value_parser = ["xa", "xa-local", "quro", "chiller", "scalardb", "scalardb+", "geotp-o1", "geotp-o2", "geotp", "near"])]
    modes: Vec<String>,
    /// Zipf exponents of the row distribution; one measurement for each
    #[arg(long, value_name = "Z", value_delimiter = ',', default_value = "0.9", value_parser = exponent)]
    zipf: Vec<f64>,
    /// Shares of the transactions with rows on two servers, from 0 to 1; one measurement for each
    #[arg(long, value_name = "F", value_delimiter = ',', default_value = "0.2", value_parser = share)]
    distributed: Vec<f64>,
    /// Query batches in which a client sends the five operations of a transaction, 1 to 5; one measurement for each
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1",
          value_parser = clap::value_parser!(u8).range(1..=5))]
    rounds: Vec<u8>,
    /// How clients send a transaction: batches (BEGIN and COMMIT with the statements, see --rounds), or interactive (BEGIN,
    /// each statement and COMMIT by itself)
    #[arg(long, value_name = "FORM", default_value = "batches")]
    client: Form,
    /// Start a read replica near the proxy for each server that is not; the mode `near` reads there
    #[arg(long)]
    replicas: bool,
    /// Clients; each has one connection and one transaction at a time
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=200))]
    terminals: u32,
    /// Rows on each server
    #[arg(long, value_name = "N", default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(10..=10_000_000))]
    rows: u32,
    /// Length of a row's value in bytes
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(16..=10_000))]
    value_bytes: u32,
    /// Length of each measurement, in seconds
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=3_600))]
    seconds: u64,
    /// Length of the warmup before each measurement, in seconds
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u64).range(0..=600))]
    warmup: u64,
    /// Lock time-out in milliseconds: a statement that waits longer aborts its transaction; MariaDB rounds to whole seconds
    #[arg(long, value_name = "MS", default_value_t = 5_000, value_parser = clap::value_parser!(u32).range(1..=600_000))]
    lock_wait: u32,
    /// Run without agents; the proxy takes their role
    #[arg(long)]
    no_agents: bool,
    /// Measure instead the latency of single statements on loopback, with and without the proxy
    #[arg(long)]
    overhead: bool,
    /// New directory for server data and logs [default: a temporary directory, removed at the end]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Print the results as one JSON object
    #[arg(long)]
    json: bool,
}

/// The kinds of the servers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum Sources {
    Postgresql,
    Mariadb,
    /// Both kinds in turn.
    Mixed,
}

/// How clients send a transaction.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum Form {
    Batches,
    Interactive,
}

impl Sources {
    fn kinds(self) -> [Dialect; 4] {
        let (postgres, maria) = (Dialect::PostgreSql, Dialect::MariaDb);
        match self {
            Self::Postgresql => [postgres; 4],
            Self::Mariadb => [maria; 4],
            Self::Mixed => [postgres, maria, postgres, maria],
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Postgresql => "PostgreSQL",
            Self::Mariadb => "MariaDB",
            Self::Mixed => "mixed",
        }
    }
}

/// The result that `--json` prints.
#[derive(Serialize)]
struct Printed {
    measured: bool,
    commit: &'static str,
    terminals: u32,
    rows: u32,
    value_bytes: u32,
    seconds: u64,
    agents: bool,
    client: Form,
    replicas: bool,
    lock_wait_ms: u32,
    runs: Vec<Run>,
}

/// One row of the table.
#[derive(Serialize)]
struct Run {
    sources: &'static str,
    mode: String,
    zipf: f64,
    distributed: f64,
    rounds: u8,
    /// Commits a second.
    throughput: f64,
    /// Latency of committed transactions.
    latency_ms: Summary,
    /// Latency of committed transactions at one server.
    centralized_ms: Summary,
    /// Latency of committed transactions at two servers.
    distributed_ms: Summary,
    /// Percentage of the transactions that aborted, of all that ended.
    abort_percent: f64,
    /// Error messages of aborted transactions, and how often each came.
    aborts: OrdMap<String, u64>,
    /// Number of unknown outcomes.
    unknown: u64,
    /// Utilization of all processors of this machine, in per cent.
    processor_percent: f64,
}

/// A Zipf exponent.
fn exponent(text: &str) -> Result<f64, String> {
    in_range(text, 10.0)
}

/// A share of the transactions.
fn share(text: &str) -> Result<f64, String> {
    in_range(text, 1.0)
}

fn in_range(text: &str, most: f64) -> Result<f64, String> {
    let number: Option<f64> = text.parse().ok();
    let found = number.filter(|number| (0.0..=most).contains(number));
    found.ok_or_else(|| format!("it must be a number from 0 to {most}"))
}

/// Runs the measurements.
///
/// # Errors
/// Servers or proxies do not start, or a client loses its connection.
pub fn run(args: &Args) -> anyhow::Result<Status> {
    for sources in &args.sources {
        for kind in sources.kinds() {
            LocalServer::check(kind)?;
        }
    }
    let folder = Folder::new(args.dir.as_deref())?;
    let runtime = Runtime::new().context("cannot start the runtime")?;
    if args.overhead {
        let found = runtime.block_on(overhead::measure(args, &folder.path))?;
        if args.json {
            output::print_json(&found)?;
        } else {
            output::print(&overhead::table(&found))?;
        }
        return Ok(Status::Passed);
    }
    let mut runs = Vec::new();
    for (number, &sources) in args.sources.iter().enumerate() {
        let dir = folder.path.join(format!("{number}"));
        std::fs::create_dir_all(&dir)?;
        note!("Starting four private servers ({}) and loading the rows.", sources.name());
        let begin = if args.replicas { LocalServer::start_primary } else { LocalServer::start };
        let servers = private::start_all(&sources.kinds(), &dir, begin)?;
        runtime.block_on(fill(args, &servers))?;
        let replicas = if args.replicas {
            Some(runtime.block_on(Replicas::start(&servers, &dir))?)
        } else {
            None
        };
        for &rounds in &args.rounds {
            for &distributed in &args.distributed {
                for &zipf in &args.zipf {
                    for mode in &args.modes {
                        let case = Case { sources, mode, zipf, distributed, rounds };
                        let run = runtime.block_on(case.measure(
                            args,
                            &servers,
                            replicas.as_ref(),
                            &dir,
                        ))?;
                        note!("{}", case.line(&run));
                        runs.push(run);
                    }
                }
            }
        }
    }
    let printed = Printed {
        measured: true,
        commit: output::COMMIT,
        terminals: args.terminals,
        rows: args.rows,
        value_bytes: args.value_bytes,
        seconds: args.seconds,
        agents: !args.no_agents,
        client: args.client,
        replicas: args.replicas,
        lock_wait_ms: args.lock_wait,
        runs,
    };
    if args.json {
        output::print_json(&printed)?;
    } else {
        output::print(&table(&printed))?;
    }
    Ok(Status::Passed)
}

/// A directory, removed at the end unless `--dir` names it.
struct Folder {
    path: PathBuf,
    is_kept: bool,
}

impl Folder {
    fn new(named: Option<&Path>) -> anyhow::Result<Self> {
        let path = common::directory(named, "measure")?;
        let folder = Self { path, is_kept: named.is_some() };
        // The servers run as users with fewer rights, who must be able to open files below.
        std::fs::set_permissions(
            &folder.path,
            std::os::unix::fs::PermissionsExt::from_mode(0o755),
        )?;
        Ok(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if !self.is_kept {
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}

/// Inserts the rows at the servers directly, without the proxy.
async fn fill(args: &Args, servers: &[LocalServer]) -> anyhow::Result<()> {
    let (rows, bytes) = (args.rows, args.value_bytes);
    let fills = servers.iter().enumerate().map(|(place, server)| async move {
        let (first, last) = (place as u64 * u64::from(rows), (place as u64 + 1) * u64::from(rows) - 1);
        let create = format!("CREATE TABLE usertable (id bigint PRIMARY KEY, field varchar({bytes}) NOT NULL)");
        let text = match server.kind {
            Dialect::PostgreSql => format!(
                "{create}; INSERT INTO usertable SELECT id, repeat('x', {bytes}) FROM generate_series({first}, {last}) AS id; \
                 VACUUM ANALYZE usertable"
            ),
            Dialect::MariaDb => format!(
                "{create}; INSERT INTO usertable SELECT seq, repeat('x', {bytes}) FROM seq_{first}_to_{last}"
            ),
        };
        let mut client = Client::enter(&server.login()).await?;
        // PostgreSQL refuses `VACUUM` in a transaction, and a query batch of several statements is
        // one.
        for one in text.split("; ") {
            client.text(one).await?;
        }
        anyhow::Ok(())
    });
    try_join_all(fills).await?;
    Ok(())
}

/// The parameters of one row of the table.
struct Case<'a> {
    sources: Sources,
    mode: &'a str,
    zipf: f64,
    distributed: f64,
    rounds: u8,
}

/// Results of the terminals since they were last taken.
#[derive(Default)]
struct Tally {
    centralized: Samples,
    distributed: Samples,
    aborts: OrdMap<String, u64>,
    unknown: u64,
}

fn locked(tally: &Mutex<Tally>) -> MutexGuard<'_, Tally> {
    tally.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Case<'_> {
    fn line(&self, run: &Run) -> String {
        let Self { sources, mode, zipf, distributed, rounds } = self;
        format!(
            "{}, {mode}, skew {zipf}, {:.0} % distributed, {rounds} round(s): {:.1} transactions/s, {:.1} % aborted",
            sources.name(),
            distributed * 100.0,
            run.throughput,
            run.abort_percent
        )
    }

    async fn measure(
        &self,
        args: &Args,
        servers: &[LocalServer],
        replicas: Option<&Replicas>,
        dir: &Path,
    ) -> anyhow::Result<Run> {
        let secret = "measured-on-loopback";
        let mut agents = Vec::new();
        let mut ports = Vec::new();
        let settings = format!("lock_wait_ms = {}\n", args.lock_wait);
        if !args.no_agents {
            for _ in servers {
                ports.push(private::free_port()?);
            }
            for number in 0..servers.len() {
                let text = settings.clone() + &agent_file(servers, number, &ports, secret)?;
                let name = format!("agent{}", number + 1);
                agents.push(Process::start("agent", dir, &name, &text)?);
            }
        }
        let table = ("usertable", args.rows as usize);
        let mut file = ProxyFile::new(self.mode, &ports, secret, table)?;
        let near = replicas.into_iter().flat_map(|replicas| &replicas.servers);
        file.replicas = near.map(|(place, server)| (*place, server.port)).collect();
        let text = settings + &file.text(servers);
        let proxy = Process::start("proxy", dir, "proxy", &text)?;
        // Clients use the protocol of the servers if all servers are of one kind.
        let login = file.login(match self.sources {
            Sources::Mariadb => Dialect::MariaDb,
            Sources::Postgresql | Sources::Mixed => Dialect::PostgreSql,
        });
        let run = self.drive(args, login).await;
        drop((proxy, agents));
        run
    }

    async fn drive(&self, args: &Args, login: Login<'static>) -> anyhow::Result<Run> {
        let tally: Arc<Mutex<Tally>> = Arc::default();
        let ends = CancellationToken::new();
        let mut terminals = tokio::task::JoinSet::new();
        for number in 0..args.terminals {
            let mut terminal = Terminal {
                batches: Batches::new(self, args)?,
                rng: Rng::stream(1, "measure", u64::from(number)),
                number,
                client: enter(&login).await?,
            };
            let (tally, ends) = (Arc::clone(&tally), ends.clone());
            terminals.spawn(async move {
                while !ends.is_cancelled() {
                    terminal.transact(&tally).await?;
                }
                anyhow::Ok(())
            });
        }
        tokio::time::sleep(Duration::from_secs(args.warmup)).await;
        std::mem::take(&mut *locked(&tally));
        let (begun, before) = (Instant::now(), processors());
        let window = tokio::time::sleep(Duration::from_secs(args.seconds));
        tokio::pin!(window);
        tokio::select! {
            () = &mut window => {}
            // A terminal that ends before it is stopped has failed.
            ended = terminals.join_next() => {
                ended.context("there are no clients")?.context("a client panicked")??;
                bail!("a client ended before the measurement did");
            }
        }
        let (seconds, after) = (begun.elapsed().as_secs_f64(), processors());
        let seen = std::mem::take(&mut *locked(&tally));
        ends.cancel();
        while let Some(ended) = terminals.join_next().await {
            ended.context("a client panicked")??;
        }
        let mut all = Samples::default();
        all.merge(&seen.centralized);
        all.merge(&seen.distributed);
        let aborted: u64 = seen.aborts.values().sum();
        let ended = (all.len() + aborted + seen.unknown).max(1);
        let (busy, whole) = (after.0 - before.0, (after.1 - before.1).max(1.0));
        Ok(Run {
            sources: self.sources.name(),
            mode: self.mode.to_owned(),
            zipf: self.zipf,
            distributed: self.distributed,
            rounds: self.rounds,
            throughput: round(all.len() as f64 / seconds),
            latency_ms: Summary::of_nanos(&all),
            centralized_ms: Summary::of_nanos(&seen.centralized),
            distributed_ms: Summary::of_nanos(&seen.distributed),
            abort_percent: round(aborted as f64 * 100.0 / ended as f64),
            aborts: seen.aborts,
            unknown: seen.unknown,
            processor_percent: round(busy * 100.0 / whole),
        })
    }
}

fn round(figure: f64) -> f64 {
    (figure * 10.0).round() / 10.0
}

/// The busy time and the total time of all processors since boot, in ticks; zeros if the system
/// does not report them.
fn processors() -> (f64, f64) {
    let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let ticks: Vec<f64> = stat
        .lines()
        .next()
        .unwrap_or_default()
        .split_whitespace()
        .skip(1)
        .take(8)
        .filter_map(|word| word.parse().ok())
        .collect();
    let idle: f64 = ticks.iter().skip(3).take(2).sum();
    let whole: f64 = ticks.iter().sum();
    (whole - idle, whole)
}

/// The configuration file of the agent beside one of the servers.
fn agent_file(
    servers: &[LocalServer],
    number: usize,
    ports: &[u16],
    secret: &str,
) -> anyhow::Result<String> {
    let server = servers.get(number).context("an agent has no server")?;
    let port = ports.get(number).context("an agent has no port")?;
    let map = common::topology("geotp4").context("the round-trip times between agents")?;
    let rtt_max = PLACES.iter().map(|(_, rtt)| *rtt).max().unwrap_or_default();
    let mut file = format!(
        "listen = \"127.0.0.1:{port}\"\nsecret = \"{secret}\"\ndata_dir = \"agent{0}\"\nid = {0}\nkind = \"{1}\"\n\
         address = \"127.0.0.1:{2}\"\ndatabase = \"{DATABASE}\"\nuser = \"{USER}\"\npassword = \"{PASSWORD}\"\n\
         rtt_max_ms = {rtt_max}\n",
        number + 1,
        private::kind_name(server.kind),
        server.port,
    );
    for (other, port) in ports.iter().enumerate().filter(|(other, _)| *other != number) {
        let rtt = map.rtt(region(number)?, region(other)?).as_secs_f64() * 1e3;
        // Writing to a string cannot fail.
        let _ = write!(
            file,
            "[[peers]]\nid = {}\naddress = \"127.0.0.1:{port}\"\nemulate_rtt_ms = {rtt}\n",
            other + 1
        );
    }
    Ok(file)
}

/// The region of the server with this number.
fn region(number: usize) -> anyhow::Result<RegionId> {
    Ok(RegionId(u16::try_from(number).context("there are more than four regions")?))
}

/// Draws transactions and formats them as query batches.
struct Batches {
    workload: Box<dyn Workload>,
    cluster: Cluster,
    rows: u64,
    value_bytes: usize,
    rounds: usize,
    form: Form,
}

/// A transaction: its query batches, and whether its rows are at two servers.
struct Transaction {
    batches: Vec<String>,
    is_distributed: bool,
}

impl Batches {
    fn new(case: &Case<'_>, args: &Args) -> anyhow::Result<Self> {
        let options = Options {
            keys: Some(u64::from(args.rows)),
            zipf: Some(case.zipf),
            distributed: Some(case.distributed),
            value_bytes: Some(u64::from(args.value_bytes)),
            ..Options::default()
        };
        let mut workload = workload::parse("ycsb:5", &options)?;
        let cluster = Cluster::spread(common::topology("geotp4")?, 1, 1, 4, 1)?;
        workload.place(&cluster);
        let (rows, value_bytes) = (u64::from(args.rows), args.value_bytes as usize);
        let (rounds, form) = (usize::from(case.rounds), args.client);
        Ok(Self { workload, cluster, rows, value_bytes, rounds, form })
    }

    /// The number of the row for a key of the workload.
    fn row(&self, key: &Key) -> anyhow::Result<u64> {
        let place = self.cluster.leader_region(self.cluster.partition_of(key)).0;
        let name = String::from_utf8_lossy(key.bytes()).into_owned();
        let rank = name.rsplit(':').next().and_then(|rank| rank.parse::<u64>().ok());
        let rank = rank.with_context(|| format!("{name} is not a row of the workload"))?;
        Ok(u64::from(place) * self.rows + rank % self.rows)
    }

    fn next(&mut self, issuer: Issuer, rng: &mut Rng) -> anyhow::Result<Transaction> {
        let Request { kind, reads, parameter, .. } = self.workload.next(issuer, rng);
        let ops: Vec<(Key, bool)> = match kind {
            Kind::Procedure(ops) => ops
                .into_iter()
                .map(|op| match op {
                    Op::Get(key) => Ok((key, true)),
                    Op::Put(key, _) => Ok((key, false)),
                    other @ (Op::Compare(..)
                    | Op::Add(..)
                    | Op::Append(..)
                    | Op::Delete(_)
                    | Op::Call(_)) => Err(anyhow!("{other:?} is not one of YCSB's operations")),
                })
                .collect::<anyhow::Result<_>>()?,
            Kind::ReadOnly | Kind::StaleReadOnly | Kind::Interactive | Kind::General => {
                reads.into_iter().map(|key| (key, true)).collect()
            }
        };
        let mut statements = Vec::new();
        let mut places = orthodrome_core::ordered::OrdSet::new();
        for (key, is_read) in &ops {
            let row = self.row(key)?;
            places.insert(row / self.rows);
            statements.push(if *is_read {
                format!("SELECT field FROM usertable WHERE id = {row}")
            } else {
                let value: String =
                    format!("{parameter:016x}").chars().cycle().take(self.value_bytes).collect();
                format!("UPDATE usertable SET field = '{value}' WHERE id = {row}")
            });
        }
        let is_distributed = places.len() > 1;
        if self.form == Form::Interactive {
            let ends = |word: &str| [word.to_owned()];
            let batches =
                ends("BEGIN").into_iter().chain(statements).chain(ends("COMMIT")).collect();
            return Ok(Transaction { batches, is_distributed });
        }
        let each = statements.len().div_ceil(self.rounds).max(1);
        let mut batches: Vec<String> =
            statements.chunks(each).map(|chunk| chunk.join("; ")).collect();
        if let Some(first) = batches.first_mut() {
            first.insert_str(0, "BEGIN; ");
        }
        if let Some(last) = batches.last_mut() {
            last.push_str("; COMMIT");
        }
        Ok(Transaction { batches, is_distributed })
    }
}

/// A connection with one transaction at a time.
struct Terminal {
    batches: Batches,
    rng: Rng,
    number: u32,
    client: Client,
}

impl Terminal {
    async fn transact(&mut self, tally: &Mutex<Tally>) -> anyhow::Result<()> {
        let issuer = Issuer {
            client: ClientId(u64::from(self.number)),
            index: self.number,
            region: RegionId(0),
        };
        let transaction = self.batches.next(issuer, &mut self.rng)?;
        let begun = Instant::now();
        for text in &transaction.batches {
            match self.client.text(text).await {
                Ok(_) => {}
                Err(Refused::Fault(fault)) if fault.sqlstate == "08007" => {
                    locked(tally).unknown += 1;
                    return Ok(());
                }
                Err(Refused::Fault(fault)) => {
                    *locked(tally).aborts.entry(fault.message).or_default() += 1;
                    // A failed transaction block stays open until `ROLLBACK`.
                    self.client.text("ROLLBACK").await?;
                    return Ok(());
                }
                Err(error) => {
                    return Err(error).context("a client lost its connection to the proxy");
                }
            }
        }
        let took = nanos(begun.elapsed());
        let mut tally = locked(tally);
        let samples = if transaction.is_distributed {
            &mut tally.distributed
        } else {
            &mut tally.centralized
        };
        samples.record(took);
        Ok(())
    }
}

fn table(printed: &Printed) -> String {
    let figure = |value: f64| format!("{value:.1}");
    let rows = printed.runs.iter().map(|run| {
        [
            format!("{}, {}", run.sources, run.mode),
            run.zipf.to_string(),
            format!("{:.0} %", run.distributed * 100.0),
            match printed.client {
                Form::Batches => run.rounds.to_string(),
                Form::Interactive => "each".to_owned(),
            },
            figure(run.throughput),
            figure(run.latency_ms.mean),
            figure(run.latency_ms.p50),
            figure(run.latency_ms.p99),
            figure(run.abort_percent),
            figure(run.processor_percent),
        ]
    });
    let header = [
        "sources, mode",
        "skew",
        "distributed",
        "rounds",
        "txn/s",
        "mean ms",
        "p50 ms",
        "p99 ms",
        "aborted %",
        "CPU %",
    ];
    let agents = if printed.agents { "with agents" } else { "without agents" };
    let replicas = if printed.replicas { " and replicas" } else { "" };
    format!(
        "Measured on this machine: four servers with emulated round-trip times of 0, 27, 73 and 251 ms, {agents}{replicas}, {} clients, five \
         operations per transaction, {} rows of {} bytes on each server; {} s per measurement; commit {}\n\n{}\n",
        printed.terminals,
        output::count(u64::from(printed.rows)),
        printed.value_bytes,
        printed.seconds,
        printed.commit,
        output::table(&header, rows).trim_fmt()
    )
}
