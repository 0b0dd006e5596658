//! `serve`: runs a node; or makes the files of a whole cluster of them.

mod config;
mod init;

use std::io::{IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use orthodrome_server::node::{self, Durability};
use orthodrome_server::service;
use orthodrome_server::wire::WireProtocol;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tracing_subscriber::EnvFilter;

use crate::{Status, output, protocols};
use config::Node;
use init::Wish;

/// How long a node takes to finish what it has begun before it ends.
const SHUTDOWN: Duration = Duration::from_secs(10);
/// How long answers that are ready may take to reach their clients.
const LAST_ANSWERS: Duration = Duration::from_secs(2);

/// Run a node of a cluster; or, with --init, make the files of a cluster on this machine.
///
/// A node runs until SIGTERM or Ctrl-C; then it takes nothing new, finishes what it has begun, hands
/// leadership over and ends.
#[derive(clap::Args)]
#[command(after_help = "\
Logs go to standard error; ORTHODROME_LOG sets what is logged (error, warn, info, debug, trace; or by
part, as in warn,orthodrome_server::transport=debug).

Examples:
  orthodrome serve --init dev --topology azure5
  orthodrome serve --config dev/n1.toml --check
  orthodrome serve --config dev/n1.toml

Exit status: 0 it ended in good order, 1 it failed while it ran, 2 it could not start.")]
pub struct Args {
    /// The node's file
    #[arg(long, value_name = "FILE", required_unless_present = "init")]
    config: Option<PathBuf>,
    /// Check the configuration and leave
    #[arg(long, requires = "config")]
    check: bool,
    /// Make the files of a cluster in this new directory and leave
    #[arg(long, value_name = "DIR", conflicts_with = "config")]
    init: Option<PathBuf>,
    #[command(flatten)]
    cluster: InitArgs,
}

/// What `--init` makes.
#[derive(clap::Args)]
#[command(next_help_heading = "With --init")]
struct InitArgs {
    /// A built-in map (azure5, azure6, ec2-3, ec2-5, local3, local5) or a file of that form
    #[arg(long, value_name = "T", default_value = "azure5", conflicts_with = "config")]
    topology: String,
    /// Nodes in each region
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "config",
          value_parser = clap::value_parser!(u32).range(1..=16))]
    servers_per_region: u32,
    /// Partitions of the key space
    #[arg(long, value_name = "N", default_value_t = 5, conflicts_with = "config",
          value_parser = clap::value_parser!(u32).range(1..=4096))]
    partitions: u32,
    /// Replicas of each partition: an odd number
    #[arg(long, value_name = "N", default_value_t = 3, conflicts_with = "config")]
    replicas: u32,
    /// The protocol that commits transactions
    #[arg(long, value_name = "P", default_value = protocols::DEFAULT, conflicts_with = "config")]
    protocol: String,
    /// Talk TLS, with an authority made for this cluster, and ask clients for a token
    #[arg(long, conflicts_with = "config")]
    tls: bool,
    /// First of the ports to listen on, two for each node
    #[arg(long, value_name = "PORT", default_value_t = 7400, conflicts_with = "config")]
    base_port: u16,
}

/// Serves, checks or makes files.
///
/// # Errors
/// The configuration makes no sense, or the node cannot start.
pub fn run(args: &Args) -> anyhow::Result<Status> {
    if let Some(dir) = &args.init {
        let InitArgs { servers_per_region, partitions, replicas, tls, base_port, .. } =
            args.cluster;
        let wish = Wish {
            dir: dir.clone(),
            topology: args.cluster.topology.clone(),
            protocol: args.cluster.protocol.clone(),
            servers_per_region,
            partitions,
            replicas,
            tls,
            base_port,
        };
        // A name that nothing runs must be refused before anything is written.
        protocols::with(&wish.protocol, Known)?;
        output::print(&init::init(&wish)?)?;
        return Ok(Status::Held);
    }
    let Some(path) = &args.config else { bail!("give --config FILE, or --init DIR") };
    let node = config::load(path)?;
    let protocol = node.protocol.clone();
    if args.check {
        protocols::with(&protocol, Known).with_context(|| path.display().to_string())?;
        output::print(&format!("{}: ok\n{}", path.display(), banner(&node)))?;
        return Ok(Status::Held);
    }
    let serve = Serve { node, path };
    protocols::with(&protocol, serve).with_context(|| path.display().to_string())?
}

/// Only whether there is such a protocol.
struct Known;

impl protocols::Visitor for Known {
    type Out = ();
    fn visit<P: WireProtocol>(self) {}
}

/// What a node is, for whoever starts it.
fn banner(node: &Node) -> String {
    let settings = &node.settings;
    let map = &settings.map;
    let held = map.partitions().filter(|p| p.replicas.contains(&settings.node));
    let held: Vec<String> = held
        .map(|p| {
            let leads = if p.preferred_leader == settings.node { " (leads)" } else { "" };
            format!("{}{leads}", p.id)
        })
        .collect();
    let tls = match (&settings.tls, node.service.access.is_open()) {
        (Some(_), false) => "on; clients need a token",
        (Some(_), true) => "on; open to every client",
        (None, false) => "off (loopback only); clients need a token",
        (None, true) => "off (loopback only); open to every client",
    };
    let data = match settings.durability {
        Durability::Sync => format!("{}, survives power failures", settings.data_dir.display()),
        Durability::NoSync => {
            format!("{}, survives the process only", settings.data_dir.display())
        }
        Durability::None => "not kept".into(),
    };
    let wan = if settings.emulate_wan { ", emulated distances" } else { "" };
    format!(
        "  cluster     {} ({}{wan})\n  protocol    {}\n  region      {}\n  partitions  {}\n  nodes       \
         {}\n  clients     {}\n  TLS         {tls}\n  data        {data}",
        settings.cluster,
        map.topology.name,
        node.protocol,
        map.topology.name_of(map.region_of(settings.node)),
        held.join(", "),
        node.address,
        node.clients,
    )
}

struct Serve<'a> {
    node: Node,
    path: &'a Path,
}

impl protocols::Visitor for Serve<'_> {
    type Out = anyhow::Result<Status>;

    fn visit<P: WireProtocol>(self) -> anyhow::Result<Status> {
        let filter = match std::env::var("ORTHODROME_LOG") {
            Ok(text) => {
                EnvFilter::try_new(&text).with_context(|| format!("ORTHODROME_LOG {text}"))?
            }
            Err(_) => EnvFilter::new("info"),
        };
        tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_ansi(std::io::stderr().is_terminal())
            .with_writer(std::io::stderr)
            .init();
        eprintln!("orthodrome {} {}\n{}", output::VERSION, self.path.display(), banner(&self.node));
        let runtime = Runtime::new().context("cannot start the runtime")?;
        let status = runtime.block_on(serve::<P>(self.node));
        runtime.shutdown_background();
        status
    }
}

async fn serve<P: WireProtocol>(node: Node) -> anyhow::Result<Status> {
    let Node { settings, address, clients, service: config, .. } = node;
    // Signals that come while it starts must not be lost.
    let stopped = stop_signal()?;
    let listen = |address| async move {
        TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address}"))
    };
    let (peers, clients) = (listen(address).await?, listen(clients).await?);
    let (name, map) = (settings.node, Arc::clone(&settings.map));
    let place = clients.local_addr()?;
    let configuration = P::configure(&map);
    let handle = node::start::<P>(settings, configuration, peers).await?;
    let (stop, mut told) = watch::channel(false);
    let served = service::serve(Arc::new(handle.gateway()), map, clients, config, async move {
        // An error means that the sender is gone: all ends.
        let _ = told.wait_for(|stop| *stop).await;
    });
    let mut served = tokio::spawn(served);
    {
        // For scripts that wait for it.
        let mut stdout = std::io::stdout().lock();
        writeln!(stdout, "ready: {name} serves clients on {place}")?;
        stdout.flush()?;
    }
    let problem = tokio::select! {
        signal = stopped => {
            eprintln!(
                "{signal}: taking nothing new, finishing what was begun (at most {SHUTDOWN:?})"
            );
            handle.shutdown(SHUTDOWN).await;
            None
        }
        why = handle.failed() => Some(why),
        ended = &mut served => Some(match ended {
            Ok(Ok(())) => "the service for clients ended by itself".to_owned(),
            Ok(Err(error)) => error.to_string(),
            Err(error) => error.to_string(),
        }),
    };
    stop.send_replace(true);
    if !served.is_finished() {
        // Who does not take its answer in time does not get it.
        let _ = tokio::time::timeout(LAST_ANSWERS, served).await;
    }
    match problem {
        None => {
            eprintln!("{name} has ended in good order");
            Ok(Status::Held)
        }
        Some(problem) => {
            eprintln!("error: {name} has failed: {problem}");
            Ok(Status::Broken)
        }
    }
}

/// Ready with its name when somebody asks this process to end.
fn stop_signal() -> anyhow::Result<impl Future<Output = &'static str>> {
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
