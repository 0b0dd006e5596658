//! Arguments and input files that several verbs share.

use std::convert::Infallible;
use std::fmt::Display;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail, ensure};
use orthodrome_core::cluster::{Cluster, Node, Partition, Partitioning, Role};
use orthodrome_core::id::{NodeId, PartitionId, RegionId};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::spelling::did_you_mean;
use orthodrome_core::topology::{Topology, TopologyError};
use orthodrome_eval::workload::{
    self, Description, Distribution, Form, ReadOnlyAs, Workload, WorkloadError,
};
use orthodrome_lab::{Sources, Subject};
use orthodrome_protocols::registry;
use orthodrome_sim::load::Arrival;

/// The options that say where nodes and replicas are.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Cluster")]
pub struct Placement {
    /// Topology, the regions and the round-trip times between them: a built-in name (azure5, azure6, ec2-3, ec2-5, geotp4,
    /// local3, local5) or a TOML file
    #[arg(long, value_name = "T")]
    pub topology: String,
    /// Number of partitions; the preferred leader of partition i is in region i, modulo the number of regions
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub partitions: u32,
    /// Replicas of each partition, an odd number; they are in consecutive regions
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = replicas)]
    pub replicas: u32,
    /// Servers in each region
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub servers_per_region: u32,
    /// Gateways in each region that has gateways
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub gateways_per_region: u32,
    /// Data sources behind the middleware; only for protocols of the middleware: mariadb, postgres, or mixed (the first,
    /// third, … source is PostgreSQL, the others are MariaDB) [default: mariadb]
    #[arg(long, value_name = "KIND", value_parser = sources)]
    pub sources: Option<Sources>,
    /// Number of shares into which each region's copy of the data is split, held by the region's servers in turn; only
    /// for deterministic protocols, such as calvin
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub shares: u32,
    /// Regions that have gateways and clients: names, separated by commas [default: all regions]
    #[arg(long, value_name = "REGIONS", value_delimiter = ',')]
    pub gateways: Vec<String>,
}

impl Placement {
    /// The cluster.
    pub fn cluster(&self) -> anyhow::Result<Cluster> {
        self.placed(self.replicas)
    }

    /// The protocol called `name`, with the sources of `--sources`.
    pub fn subject(&self, name: &str) -> anyhow::Result<Subject> {
        let mut subject =
            orthodrome_lab::find(name).map_err(|error| anyhow!("--protocol: {error}"))?;
        ensure!(
            self.sources.is_none() || subject.has_sources,
            "--sources: {name} is not a protocol of the middleware; omit the option, or use xa, geotp or another middleware protocol"
        );
        subject.sources = self.sources.unwrap_or_default();
        Ok(subject)
    }

    /// The same for a protocol that may have no replicas.
    pub fn cluster_of(&self, subject: &Subject) -> anyhow::Result<Cluster> {
        ensure!(
            self.shares == 1 || subject.has_shares,
            "--shares {}: {} does not support sharding within a region; omit the option, or use {}",
            self.shares,
            subject.row.name,
            registry::names_with_shares()
        );
        self.placed(if subject.is_replicated { self.replicas } else { 1 })
    }

    /// A readable description of the servers of a region.
    pub fn servers(&self) -> String {
        let servers = format!("{} server(s) per region", self.servers_per_region);
        match self.shares {
            1 => servers,
            shares => format!("{servers} with {shares} shares"),
        }
    }

    fn placed(&self, replicas: u32) -> anyhow::Result<Cluster> {
        let map = topology(&self.topology)?;
        let nodes = self.nodes(&map)?;
        let cluster = Cluster::spread_over(map, 1, nodes, self.partitions, replicas);
        let cluster = cluster.with_context(|| {
            format!(
                "--replicas {} on --topology {} with --servers-per-region {}",
                self.replicas, self.topology, self.servers_per_region
            )
        })?;
        cluster.divided(self.shares).with_context(|| format!("--shares {}", self.shares))
    }

    /// The servers of each region, numbered from 1, then the gateways of each region that has any.
    fn nodes(&self, map: &Topology) -> anyhow::Result<Vec<Node>> {
        for name in &self.gateways {
            ensure!(
                map.region_named(name).is_some(),
                "--gateways {name}: --topology {} has no such region; its regions are {}",
                self.topology,
                map.regions().map(|region| map.name_of(region)).collect::<Vec<_>>().join(", ")
            );
        }
        let has_gateway = |region| {
            let name = map.name_of(region);
            self.gateways.is_empty() || self.gateways.iter().any(|wanted| wanted == name)
        };
        let servers = map
            .regions()
            .flat_map(|region| (0..self.servers_per_region).map(move |_| (region, Role::Server)));
        let gateways = map
            .regions()
            .filter(|&region| has_gateway(region))
            .flat_map(|region| (0..self.gateways_per_region).map(move |_| (region, Role::Gateway)));
        let nodes = (1..).zip(servers.chain(gateways));
        Ok(nodes.map(|(id, (region, role))| Node { id: NodeId(id), region, role }).collect())
    }

    /// The cluster with the replicas of each partition in given regions, the leader's first; those of a region are
    /// spread over its servers.
    pub fn cluster_at(&self, regions: &[Vec<RegionId>]) -> anyhow::Result<Cluster> {
        let map = topology(&self.topology)?;
        let nodes = self.nodes(&map)?;
        let mut held: OrdMap<NodeId, (usize, usize)> = OrdMap::new();
        let mut partitions = Vec::new();
        for (id, regions) in (0..).map(PartitionId).zip(regions) {
            let mut replicas = Vec::new();
            for (place, &region) in regions.iter().enumerate() {
                let servers =
                    nodes.iter().filter(|node| node.region == region && node.role == Role::Server);
                // The server with the fewest leaderships; among equals, the one with the fewest
                // replicas.
                let least = |node: &&Node| {
                    let (leads, holds) = held.get(&node.id).copied().unwrap_or_default();
                    if place == 0 { (leads, holds, node.id) } else { (holds, leads, node.id) }
                };
                let Some(server) = servers.min_by_key(least) else { continue };
                let (leads, holds) = held.entry(server.id).or_default();
                *leads += usize::from(place == 0);
                *holds += 1;
                replicas.push(server.id);
            }
            let preferred_leader = replicas.first().copied().unwrap_or_default();
            partitions.push(Partition { id, replicas, preferred_leader });
        }
        let partitioning = Partitioning::hash(partitions.iter().map(|partition| partition.id));
        Ok(Cluster::new(map, 1, nodes, partitions, partitioning)?)
    }
}

fn sources(text: &str) -> Result<Sources, String> {
    match text {
        "mariadb" => Ok(Sources::MariaDb),
        "mixed" => Ok(Sources::Mixed),
        "postgres" => Ok(Sources::Postgres),
        _ => Err("use mariadb, mixed or postgres".into()),
    }
}

fn replicas(text: &str) -> Result<u32, String> {
    match text.parse::<u32>() {
        Ok(number) if number <= 99 && number % 2 == 1 => Ok(number),
        Ok(_) | Err(_) => Err("use an odd number from 1 to 99 (2f + 1 replicas survive f)".into()),
    }
}

/// Which transactions have high priority.
#[derive(Clone, Debug)]
pub enum HighPriority {
    /// This share of all transactions.
    Share(f64),
    /// The transactions with these names.
    Names(Vec<String>),
}

impl FromStr for HighPriority {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        let names = || text.split(',').map(str::to_owned).collect();
        Ok(text.parse().map_or_else(|_| Self::Names(names()), Self::Share))
    }
}

/// The transactions of a run.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Workload")]
pub struct WorkloadArgs {
    /// Workload, a name or a file. Names: ycsbt, ycsbt:KEYS, ycsb, ycsb:OPERATIONS, retwis, smallbank, tpcc, tpcc:new-order,
    /// movr, movr:begin-ride, bank, list-append, list-append:dependent, ranges, leases. Files: a workload with options (.toml), recorded
    /// transactions (.jsonl: a trace, or a history that --history wrote), YCSB properties (.properties)
    #[arg(long, value_name = "W")]
    pub workload: String,
    /// Offered load of an open loop: transactions submitted per second by all clients together [default: 100]
    #[arg(long, value_name = "R", conflicts_with = "clients", value_parser = rate)]
    pub rate: Option<f64>,
    /// Closed loop, instead of --rate: number of clients; each submits its next transaction when the last one has ended
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub clients: Option<u32>,
    /// Share of the load that each region submits, as relative weights (VA=3,SG=1); regions that are not listed submit
    /// nothing [default: equal shares]
    #[arg(long, value_name = "R=F,…", value_delimiter = ',', value_parser = origin)]
    pub origins: Vec<(String, f64)>,
    /// Zipf exponent of the key distribution, 0 is uniform [default: depends on the workload, see docs/workloads.md]
    #[arg(long, value_name = "Z")]
    pub zipf: Option<f64>,
    /// Number of keys [default: depends on the workload, see docs/workloads.md]
    #[arg(long, value_name = "N")]
    pub keys: Option<u64>,
    /// Number of keys for each rank of the Zipf distribution, all equally likely [default: 1]
    #[arg(long, value_name = "N")]
    pub keys_per_rank: Option<u64>,
    /// With --keys-per-rank: share of the draws, from 0 to 1, that choose one of the keys of the drawn rank; the other
    /// draws use the key whose number is the rank (Natto's generator: 5 keys, 0.35) [default: 1]
    #[arg(long, value_name = "F")]
    pub rank_share: Option<f64>,
    /// Ocean Vista's contention index, instead of a Zipf distribution: share of the keys that are hot; each transaction
    /// accesses one hot key and otherwise cold keys, all equally likely
    #[arg(long, value_name = "F", conflicts_with_all = ["zipf", "keys_per_rank", "rank_share"])]
    pub contention_index: Option<f64>,
    /// With --contention-index: each client has its own hot key and cold keys (Ocean Vista's CI-fix); there are no
    /// conflicts as long as there are no more clients than hot keys
    #[arg(long, requires = "contention_index")]
    pub contention_fixed: bool,
    /// Form of read-write transactions, in workloads that support both: interactive (the client receives the reads, then
    /// sends the writes), procedure (the client sends guarded operations in one request), or mixed (half of each)
    /// [default: interactive]
    #[arg(long, value_name = "HOW", value_parser = form)]
    pub form: Option<Form>,
    /// Form of read-only transactions: read-only (the protocol's read-only path), read-write (prepared and committed like
    /// transactions that write), or stale (any consistent snapshot, however old: a weaker guarantee) [default: read-only]
    #[arg(long, value_name = "HOW", value_parser = read_only_as)]
    pub read_only_as: Option<ReadOnlyAs>,
    /// tpcc: number of warehouses in each region [default: 16]
    #[arg(long, value_name = "N")]
    pub warehouses: Option<u64>,
    /// tpcc: share of the orders, from 0 to 1, with an order line from a second warehouse [default: each order line is
    /// from another warehouse with a probability of 1 %]
    #[arg(long, value_name = "F")]
    pub multi_warehouse: Option<f64>,
    /// tpcc: share of the transactions with two warehouses whose warehouses are in two regions [default: the second
    /// warehouse is drawn from all]; movr: share of the rides in another region, two thirds of them in a near one
    /// [default: 0.15]
    #[arg(long, value_name = "F")]
    pub multi_region: Option<f64>,
    /// tpcc: share of the orders that abort because they contain an item that does not exist [default: 0.01]
    #[arg(long, value_name = "F")]
    pub rollbacks: Option<f64>,
    /// ycsb: share of the operations that are reads [default: 0.5]
    #[arg(long, value_name = "F")]
    pub reads: Option<f64>,
    /// Share of the transactions that access rows in two regions. ycsb: of all transactions [default: 0.2]; tpcc: of
    /// NewOrder and Payment, with warehouses of any region [default: see --multi-region]
    #[arg(long, value_name = "F")]
    pub distributed: Option<f64>,
    /// ycsb: number of rounds in which a client sends the operations of a transaction [default: 1]
    #[arg(long, value_name = "N")]
    pub rounds: Option<u64>,
    /// Transactions with high priority: a share from 0 to 1, or names of the workload's transactions, separated by commas
    /// (send-payment) [default: the workload's own]
    #[arg(long, value_name = "F|NAMES")]
    pub high_priority: Option<HighPriority>,
}

impl WorkloadArgs {
    /// The contents of the workload file; defaults if `--workload` is not a file.
    pub fn described(&self) -> anyhow::Result<Description> {
        let text = &self.workload;
        let name = text.split(':').next().unwrap_or_default();
        if workload::NAMES.contains(&name) || !is_file(text) || self.is_recorded() {
            let workload = text.clone();
            return Ok(Description {
                workload,
                options: workload::Options::default(),
                origins: OrdMap::new(),
                goal: workload::Goal::default(),
            });
        }
        let place = format!("--workload {text}");
        let content = fs::read_to_string(text).context(place.clone())?;
        if has_ending(text, "properties") {
            return workload::read_properties(&content).map_err(|error| anyhow!("{text}: {error}"));
        }
        workload::read_file(&content).map_err(|error| match error {
            WorkloadError::Syntax(problem) => toml_error(text, &problem),
            WorkloadError::Unknown(_)
            | WorkloadError::Parameter { .. }
            | WorkloadError::Option { .. } => anyhow!("{place}: {error}"),
        })
    }

    /// The shares of the regions that submit transactions. The command line takes precedence over
    /// the workload file; if neither names any, all shares are equal. `regions` are the names of
    /// the regions that have gateways.
    pub fn origins(&self, regions: &[&str]) -> anyhow::Result<OrdMap<String, f64>> {
        let (origins, place) = if self.origins.is_empty() {
            (self.described()?.origins, format!("--workload {}: origins", self.workload))
        } else {
            (self.origins.iter().cloned().collect(), "--origins".into())
        };
        for (name, &share) in &origins {
            ensure!(
                regions.contains(&name.as_str()),
                "{place}: region {name:?} has no gateway; use some of {}",
                regions.join(", ")
            );
            ensure!(is_share(share), "{place}: {name}: {NO_SHARE}");
        }
        ensure!(
            origins.is_empty() || origins.values().sum::<f64>() > 0.0,
            "{place}: no region has a share above 0"
        );
        Ok(origins)
    }

    /// The workload. Options on the command line take precedence over those of a file.
    pub fn workload(&self) -> anyhow::Result<Box<dyn Workload>> {
        let text = &self.workload;
        let Description { workload: spec, mut options, .. } = self.described()?;
        options.zipf = self.zipf.or(options.zipf);
        options.keys = self.keys.or(options.keys);
        options.keys_per_rank = self.keys_per_rank.or(options.keys_per_rank);
        options.rank_share = self.rank_share.or(options.rank_share);
        if self.contention_index.is_some() {
            options.distribution = Some(if self.contention_fixed {
                Distribution::ContentionIndexFixed
            } else {
                Distribution::ContentionIndex
            });
            options.contention_index = self.contention_index;
        }
        options.form = self.form.or(options.form);
        options.warehouses = self.warehouses.or(options.warehouses);
        options.multi_warehouse = self.multi_warehouse.or(options.multi_warehouse);
        options.multi_region = self.multi_region.or(options.multi_region);
        options.reads = self.reads.or(options.reads);
        options.distributed = self.distributed.or(options.distributed);
        options.rollbacks = self.rollbacks.or(options.rollbacks);
        options.rounds = self.rounds.or(options.rounds);
        options.read_only_as = self.read_only_as.or(options.read_only_as);
        if let Some(high) = &self.high_priority {
            (options.high_priority, options.high_priority_names) = match high {
                HighPriority::Share(share) => (Some(*share), None),
                HighPriority::Names(names) => (None, Some(names.clone())),
            };
        }
        let workload = if self.is_recorded() {
            let content = fs::read_to_string(text).with_context(|| format!("--workload {text}"))?;
            workload::replay(text, &content, &options)
        } else {
            workload::parse(&spec, &options)
        };
        workload.map_err(|error| anyhow!("--workload {text}: {error}"))
    }

    /// Whether the workload is a file of recorded transactions.
    fn is_recorded(&self) -> bool {
        has_ending(&self.workload, "jsonl")
    }

    /// When clients submit transactions.
    pub fn arrival(&self) -> Arrival {
        match self.clients {
            Some(clients) => Arrival::Closed { clients, think: Duration::ZERO },
            None => Arrival::Open { per_second: self.per_second(), poisson: true },
        }
    }

    fn per_second(&self) -> f64 {
        self.rate.unwrap_or(100.0)
    }

    /// The offered load: transactions a second, or clients.
    pub fn amount(&self) -> f64 {
        self.clients.map_or_else(|| self.per_second(), f64::from)
    }

    /// What [`WorkloadArgs::amount`] counts.
    pub fn amount_unit(&self) -> &'static str {
        if self.clients.is_some() { "clients" } else { "transactions submitted per second" }
    }

    /// The same workload with `multiple` times the load.
    pub fn times(&self, multiple: f64) -> Self {
        let more = self.clone();
        match self.clients {
            Some(clients) => {
                let clients = (f64::from(clients) * multiple).round().max(1.0) as u32;
                Self { clients: Some(clients), ..more }
            }
            None => Self { rate: Some(self.per_second() * multiple), ..more },
        }
    }
}

const NO_SHARE: &str = "use a number that is not negative, such as 0.25 or 3";

fn is_share(share: f64) -> bool {
    (0.0..=1e9).contains(&share)
}

fn origin(text: &str) -> Result<(String, f64), String> {
    let (name, share) = text.split_once('=').ok_or("use REGION=SHARE, such as VA=3")?;
    let share: f64 = share.parse().map_err(|_| NO_SHARE.to_owned())?;
    if is_share(share) { Ok((name.to_owned(), share)) } else { Err(NO_SHARE.into()) }
}

fn form(text: &str) -> Result<Form, String> {
    match text {
        "interactive" => Ok(Form::Interactive),
        "procedure" => Ok(Form::Procedure),
        "mixed" => Ok(Form::Mixed),
        _ => Err("use interactive, procedure or mixed".into()),
    }
}

fn read_only_as(text: &str) -> Result<ReadOnlyAs, String> {
    match text {
        "read-only" => Ok(ReadOnlyAs::ReadOnly),
        "read-write" => Ok(ReadOnlyAs::ReadWrite),
        "stale" => Ok(ReadOnlyAs::Stale),
        _ => Err("use read-only, read-write or stale".into()),
    }
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate > 0.0 && rate <= 1e7 => Ok(rate),
        Ok(_) | Err(_) => {
            Err("use a number of transactions per second above 0, at most 10000000".into())
        }
    }
}

/// The built-in topology of that name, or the one in the file.
pub fn topology(name: &str) -> anyhow::Result<Topology> {
    if let Some(map) = Topology::built_in(name) {
        return Ok(map);
    }
    if !is_file(name) {
        let known = Topology::built_in_names().collect::<Vec<_>>();
        let hint = did_you_mean(name, known.iter().copied());
        let known = known.join(", ");
        bail!("--topology {name}: unknown topology{hint}; use one of {known}, or a TOML file");
    }
    let text = fs::read_to_string(name).with_context(|| format!("--topology {name}"))?;
    Topology::parse(&text).map_err(|error| match error {
        TopologyError::Syntax(problem) => toml_error(name, &problem),
        TopologyError::UnknownRegion(_)
        | TopologyError::Missing(..)
        | TopologyError::Twice(..)
        | TopologyError::OutOfRange { .. }
        | TopologyError::Regions => anyhow!("{name}: {error}"),
    })
}

/// Returns an error, before anything else is done, if an option names a file that cannot be
/// created.
pub fn check_place(option: &str, path: Option<&Path>) -> anyhow::Result<()> {
    let Some(path) = path else { return Ok(()) };
    let file = path.display();
    ensure!(!path.is_dir(), "{option} {file}: this is a directory; give the name of a file");
    // The parent of a name without a folder is the empty path.
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let parent = parent.unwrap_or(Path::new("."));
    let place = parent.display();
    ensure!(parent.is_dir(), "{option} {file}: directory {place} does not exist; create it first");
    Ok(())
}

/// A directory for this run alone: the one that `--dir` names, or a new temporary one.
pub fn directory(named: Option<&Path>, verb: &str) -> anyhow::Result<PathBuf> {
    if let Some(dir) = named {
        let place = || format!("--dir {}", dir.display());
        fs::create_dir_all(dir).with_context(place)?;
        let is_empty = fs::read_dir(dir).with_context(place)?.next().is_none();
        ensure!(is_empty, "{}: the directory is not empty; use a new directory", place());
        return Ok(dir.to_owned());
    }
    let temporary = std::env::temp_dir();
    for number in 0..1_000 {
        let name = format!("orthodrome-{verb}-{}-{number}", std::process::id());
        let dir = temporary.join(name);
        match fs::create_dir(&dir) {
            Ok(()) => return Ok(dir),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error).with_context(|| dir.display().to_string()),
        }
    }
    bail!(
        "{}: there are 1000 directories of earlier runs of {verb}; remove them, or use --dir",
        temporary.display()
    )
}

fn has_ending(path: &str, ending: &str) -> bool {
    Path::new(path).extension().is_some_and(|its| its == ending)
}

/// Whether an argument is meant as a file and not as a name.
fn is_file(text: &str) -> bool {
    text.contains(std::path::MAIN_SEPARATOR)
        || ["toml", "jsonl", "properties"].iter().any(|ending| has_ending(text, ending))
        || Path::new(text).is_file()
}

/// Joins the lines of a TOML error into one line, with the place in front: `file:line:column:
/// problem`.
pub fn toml_error(path: impl Display, problem: &str) -> anyhow::Error {
    let words: Vec<&str> = problem.lines().next().unwrap_or_default().split([' ', ',']).collect();
    let after = |word| words.iter().position(|w| *w == word).and_then(|at| words.get(at + 1));
    let is_picture = |line: &&str| {
        line.split_once('|')
            .is_some_and(|(left, _)| left.trim().chars().all(|letter| letter.is_ascii_digit()))
    };
    match (after("line"), after("column")) {
        (Some(line), Some(column)) => {
            let rest = problem.lines().skip(1).filter(|line| !is_picture(line));
            let text = rest.map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>();
            anyhow!("{path}:{line}:{column}: {}", text.join("; "))
        }
        (None, _) | (_, None) => {
            anyhow!("{path}: {}", problem.split_whitespace().collect::<Vec<_>>().join(" "))
        }
    }
}

/// A duration with its unit: `60s`, `1.5s`, `250ms`, `10m`, `2h`.
pub fn duration(text: &str) -> Result<Duration, String> {
    let unit_at = text.find(|letter: char| letter.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = text.split_at(unit_at);
    let scale = match unit {
        "ms" => 0.001,
        "s" => 1.0,
        "m" => 60.0,
        "h" => 3_600.0,
        _ => return Err("use a number and a unit: 250ms, 60s, 10m or 2h".into()),
    };
    match number.parse::<f64>() {
        Ok(number) if (0.0..=1e8).contains(&(number * scale)) => {
            Ok(Duration::from_secs_f64(number * scale))
        }
        Ok(_) | Err(_) => Err("use a number and a unit: 250ms, 60s, 10m or 2h".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_needs_a_number_and_a_unit() {
        for (text, millis) in
            [("60s", 60_000), ("250ms", 250), ("1.5s", 1_500), ("10m", 600_000), ("2h", 7_200_000)]
        {
            assert_eq!(duration(text), Ok(Duration::from_millis(millis)), "{text}");
        }
        for text in ["", "60", "s", "-1s", "1e99s", "NaNs", "infs", "5 s", "5d"] {
            assert!(duration(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn every_built_in_topology_is_in_the_help() {
        let help = <crate::Cli as clap::CommandFactory>::command()
            .find_subcommand_mut("sim")
            .unwrap()
            .render_long_help()
            .to_string();
        for name in Topology::built_in_names().chain(workload::NAMES.iter().copied()) {
            assert!(help.contains(name), "the help of `sim` does not name {name}");
        }
    }

    #[test]
    fn a_file_needs_a_directory_that_exists() {
        let folder = tempfile::tempdir().unwrap();
        let check = |path: &Path| check_place("--html", Some(path)).map_err(|e| e.to_string());
        assert_eq!(check(&folder.path().join("report.html")), Ok(()));
        assert_eq!(check(Path::new("report.html")), Ok(()));
        let error = check(&folder.path().join("none/report.html")).unwrap_err();
        assert!(error.starts_with("--html ") && error.ends_with("create it first"), "{error}");
        let error = check(folder.path()).unwrap_err();
        assert!(error.ends_with("give the name of a file"), "{error}");
        assert!(check_place("--html", None).is_ok());
    }

    #[test]
    fn mistakes_in_toml_become_one_line_with_their_place() {
        let error = Topology::parse("name = 3\n").unwrap_err().to_string();
        let line = toml_error("map.toml", &error).to_string();
        assert!(line.starts_with("map.toml:1:8: "), "{line}");
        assert!(line.contains("expected a string") && !line.contains('\n'), "{line}");
        let error = Topology::parse("name = \"a\"\n").unwrap_err().to_string();
        let line = toml_error("map.toml", &error).to_string();
        assert!(line.starts_with("map.toml:") && line.contains("missing field"), "{line}");
    }
}
