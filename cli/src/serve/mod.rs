//! `serve`: runs a node, or writes the files of a whole cluster.

pub mod init;

use std::io::{IsTerminal as _, Write as _};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use orthodrome_server::config::NodeConfig;
use orthodrome_server::node::Durability;
use orthodrome_server::node::run::{RunError, check as check_node, run as run_node};
use orthodrome_server::storage::Expected;
use orthodrome_server::storage::directory::Directory;
use tokio::runtime::Runtime;
use tracing_subscriber::EnvFilter;

use crate::{Status, output, protocols};
use init::Wish;

/// Run a node of a cluster; or, with --init, write the configuration files of a cluster on this machine.
///
/// A node runs until SIGTERM or Ctrl-C. Then it refuses new transactions, finishes pending ones, hands over
/// its leaderships, and exits.
#[derive(clap::Args)]
#[command(after_help = "\
Logs go to standard error; ORTHODROME_LOG sets the level (error, warn, info, debug, trace), also by
module, as in warn,orthodrome_server::transport=debug.

Examples:
  orthodrome serve --init dev --topology azure5
  orthodrome serve --config dev/n1.toml --check
  orthodrome serve --config dev/n1.toml
  orthodrome serve --config /etc/orthodrome/n4.toml --mark-new
  orthodrome serve --config /etc/orthodrome/n4.toml --replace

Exit status: 0 clean shutdown, 1 failure while running, 2 failure to start.")]
pub struct Args {
    /// Configuration file of the node (TOML)
    #[arg(long, value_name = "FILE", required_unless_present = "init")]
    config: Option<PathBuf>,
    /// Check the configuration file and exit
    #[arg(long, requires = "config")]
    check: bool,
    /// First start of this node in a new cluster: its data directory is empty. Not needed after --init
    #[arg(long, requires = "config", conflicts_with = "replace")]
    new_cluster: bool,
    /// Mark the data directory as that of a node that has never run, and exit; then the first start needs no
    /// --new-cluster. For services, whose command is always the same
    #[arg(long, requires = "config", conflicts_with_all = ["check", "new_cluster", "replace"])]
    mark_new: bool,
    /// Start a node that has lost its data, in a running cluster: it recovers the data from other nodes
    ///
    /// Only for protocols that can restore a node (geodesic; ocean-vista, unless the node holds the first
    /// partition). The node counts in no quorum until its data is complete: until `status` in the shell shows
    /// that 0 are incomplete. Until then the other nodes of its partitions must keep running.
    #[arg(long, requires = "config")]
    replace: bool,
    /// Write the configuration files of a cluster to this new directory and exit
    #[arg(long, value_name = "DIR", conflicts_with = "config")]
    init: Option<PathBuf>,
    #[command(flatten)]
    cluster: InitArgs,
}

/// The options of `--init`.
#[derive(clap::Args)]
#[command(next_help_heading = "With --init")]
struct InitArgs {
    /// Topology, the regions and the round-trip times between them: a built-in name (azure5, azure6, ec2-3, ec2-5, geotp4,
    /// local3, local5) or a TOML file
    #[arg(long, value_name = "T", default_value = "azure5", conflicts_with = "config")]
    topology: String,
    /// Nodes in each region
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "config",
          value_parser = clap::value_parser!(u32).range(1..=16))]
    servers_per_region: u32,
    /// Number of partitions
    #[arg(long, value_name = "N", default_value_t = 5, conflicts_with = "config",
          value_parser = clap::value_parser!(u32).range(1..=4096))]
    partitions: u32,
    /// Replicas of each partition, an odd number
    #[arg(long, value_name = "N", default_value_t = 3, conflicts_with = "config")]
    replicas: u32,
    /// Protocol that commits transactions
    #[arg(long, value_name = "P", default_value = protocols::DEFAULT, conflicts_with = "config")]
    protocol: String,
    /// Enable TLS, with a new certificate authority for this cluster, and require a token from clients
    #[arg(long, conflicts_with = "config")]
    tls: bool,
    /// More host names and addresses for the nodes' certificates, such as those that clients connect to
    #[arg(
        long,
        value_name = "HOST[,…]",
        value_delimiter = ',',
        requires = "tls",
        conflicts_with = "config"
    )]
    host: Vec<String>,
    /// Name of the cluster: lower-case letters, digits and hyphens
    #[arg(long = "cluster", value_name = "NAME", default_value = init::CLUSTER, conflicts_with = "config")]
    name: String,
    /// Listen for clients of Redis, too: port 6379 for the first node, and the next ports for the others
    #[arg(long, conflicts_with = "config")]
    redis: bool,
    /// First port; each node uses two
    #[arg(long, value_name = "PORT", default_value_t = 7400, conflicts_with = "config")]
    base_port: u16,
}

/// Runs a node, checks its file, or writes the files of a cluster.
///
/// # Errors
/// The configuration is invalid, or the node cannot start.
pub fn run(args: &Args) -> anyhow::Result<Status> {
    if let Some(dir) = &args.init {
        let InitArgs { servers_per_region, partitions, replicas, tls, redis, base_port, .. } =
            args.cluster;
        let wish = Wish {
            dir: dir.clone(),
            topology: args.cluster.topology.clone(),
            protocol: args.cluster.protocol.clone(),
            servers_per_region,
            partitions,
            replicas,
            explicit: Vec::new(),
            tls,
            redis,
            base_port,
            cluster: args.cluster.name.clone(),
            hosts: args.cluster.host.clone(),
        };
        output::print(&init::init(&wish)?)?;
        return Ok(Status::Passed);
    }
    let Some(path) = &args.config else { bail!("nothing to do; use --config FILE or --init DIR") };
    let mut config = NodeConfig::load(path)?;
    if args.new_cluster {
        config.node.expected = Expected::NewCluster;
    } else if args.replace {
        config.node.expected = Expected::Replacement;
    }
    if args.check {
        check_node(&config).with_context(|| path.display().to_string())?;
        output::print(&format!("{}: ok\n{}", path.display(), banner(&config)))?;
        return Ok(Status::Passed);
    }
    if args.mark_new {
        let (dir, node) = (&config.node.data_dir, config.node.node);
        Directory::mark_unused(dir, node).with_context(|| path.display().to_string())?;
        output::print(&format!("{} is ready for the first start of {node}", dir.display()))?;
        return Ok(Status::Passed);
    }
    serve(config, path)
}

/// A description of the node, printed when it starts.
fn banner(config: &NodeConfig) -> String {
    let settings = &config.node;
    let map = &settings.map;
    let held = map.partitions().filter(|p| p.replicas.contains(&settings.node));
    let held: Vec<String> = held
        .map(|p| {
            let leads = if p.preferred_leader == settings.node { " (leads)" } else { "" };
            format!("{}{leads}", p.id)
        })
        .collect();
    let tls = match (&settings.tls, config.service.access.is_open()) {
        (Some(_), false) => "on; clients need a credential",
        (Some(_), true) => "on; open to every client",
        (None, false) => "off (loopback only); clients need a credential",
        (None, true) => "off (loopback only); open to every client",
    };
    let data = match settings.durability {
        Durability::Sync => {
            format!("{}, durable across power failures", settings.data_dir.display())
        }
        Durability::NoSync => {
            format!("{}, durable across crashes of the process only", settings.data_dir.display())
        }
        Durability::None => "in memory only".into(),
    };
    let wan = if settings.emulate_wan { ", emulated round-trip times" } else { "" };
    let redis = config.listen_redis.as_deref().unwrap_or("off");
    format!(
        "  cluster     {} ({}{wan})\n  protocol    {}\n  region      {}\n  partitions  {}\n  nodes       \
         {}\n  clients     {}\n  Redis       {redis}\n  TLS         {tls}\n  data        {data}",
        settings.cluster,
        map.topology.name,
        config.protocol,
        map.topology.name_of(map.region_of(settings.node)),
        held.join(", "),
        config.listen_peer,
        config.listen_client,
    )
}

/// Sends logs to standard error, at the level of ORTHODROME_LOG.
pub(crate) fn start_logs() -> anyhow::Result<()> {
    let filter = match std::env::var("ORTHODROME_LOG") {
        Ok(text) => EnvFilter::try_new(&text).with_context(|| format!("ORTHODROME_LOG {text}"))?,
        Err(_) => EnvFilter::new("info"),
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr)
        // If standard error is closed, the subscriber would try to report that there.
        .log_internal_errors(false)
        .init();
    Ok(())
}

fn serve(config: NodeConfig, path: &Path) -> anyhow::Result<Status> {
    start_logs()?;
    note!("orthodrome {} {}\n{}", output::VERSION, path.display(), banner(&config));
    let runtime = Runtime::new().context("cannot start the runtime")?;
    let (node, within) = (config.node.node, config.shutdown_within);
    let ended = runtime.block_on(async {
        // Signals that arrive during the start must not be lost.
        let stopped = stop_signal()?;
        let ready = move |place: SocketAddr| {
            // For scripts that wait until the node is ready. A failure to print it does not matter.
            let mut stdout = std::io::stdout().lock();
            let _ = writeln!(stdout, "ready: {node} serves clients on {place}");
            let _ = stdout.flush();
        };
        let stop = async move {
            let signal = stopped.await;
            note!("{signal}: shutting down; finishing pending transactions (at most {within:?})");
        };
        anyhow::Ok(run_node(config, ready, stop).await)
    })?;
    runtime.shutdown_background();
    match ended {
        Ok(()) => {
            note!("{node} has shut down");
            Ok(Status::Passed)
        }
        Err(RunError::Failed(problem)) => {
            note!("error: {node} has failed: {problem}");
            Ok(Status::Failed)
        }
        Err(error) => Err(error).with_context(|| path.display().to_string()),
    }
}

/// Resolves with the signal's name when this process is asked to end.
pub(crate) fn stop_signal() -> anyhow::Result<impl Future<Output = &'static str>> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate()).context("cannot wait for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot wait for SIGINT")?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => "SIGTERM",
            _ = interrupt.recv() => "SIGINT",
        }
    })
}
