//! `cluster`: starts, stops and shows all nodes of a directory that `serve --init` wrote, on this
//! machine.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs;
use std::io::IsTerminal as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use orthodrome_client::{Client, ClusterInfo, Config, Link, StatusInfo, Tls};
use orthodrome_core::NodeId;
use orthodrome_server::config::NodeConfig;
use serde::Serialize;
use tokio::net::TcpStream;
use tokio::runtime::Runtime;

use crate::serve::init::{AUTHORITY_FILE, TOKEN_FILE};
use crate::style::Style;
use crate::{Status, common, output};

/// The interval between two looks at a process.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// How long a node may take to answer `status`.
const ANSWER: Duration = Duration::from_secs(2);
/// The interval of `status --watch`.
const WATCH_EVERY: Duration = Duration::from_secs(1);
/// The most lines of a log that an error shows.
const LOG_LINES: usize = 5;

/// Start, stop and show all nodes of a cluster on this machine.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  orthodrome serve --init planet --topology local3
  orthodrome cluster start planet
  orthodrome cluster status planet --watch
  orthodrome cluster stop planet

Exit status: 0 success, 1 a node is down or did not stop, 2 bad usage or input.")]
pub struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(clap::Subcommand)]
enum Verb {
    /// Start every node that is not running, and return when all serve clients
    ///
    /// The nodes go on in the background. Their logs are the files nN.log beside their configuration files; the logs of
    /// the processes before are nN.log.before.
    #[command(after_help = "Example:\n  orthodrome cluster start planet")]
    Start {
        /// Directory that `serve --init` wrote
        dir: PathBuf,
        /// Time limit until all nodes serve
        #[arg(long, value_name = "TIME", default_value = "60s", value_parser = common::duration)]
        within: Duration,
    },
    /// Ask every node to shut down, and return when all have ended
    #[command(after_help = "Example:\n  orthodrome cluster stop planet")]
    Stop {
        /// Directory that `serve --init` wrote
        dir: PathBuf,
        /// Time limit until all nodes have ended
        #[arg(long, value_name = "TIME", default_value = "60s", value_parser = common::duration)]
        within: Duration,
    },
    /// Show which nodes are up or down and since when, what they lead, and what they have done
    ///
    /// The other nodes know since when a node is down. If none of them answers, that is not shown.
    #[command(after_help = "Example:\n  orthodrome cluster status planet --watch")]
    Status {
        /// Directory that `serve --init` wrote
        dir: PathBuf,
        /// Show it again every second, until Ctrl-C
        #[arg(long, conflicts_with = "json")]
        watch: bool,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
}

/// Runs the command.
///
/// # Errors
/// The directory has no cluster, or a node cannot be started.
pub fn run(args: &Args) -> anyhow::Result<Status> {
    match &args.verb {
        Verb::Start { dir, within } => start(dir, *within),
        Verb::Stop { dir, within } => stop(dir, *within),
        Verb::Status { dir, watch, json } => status(dir, *watch, *json),
    }
}

/// One node of a directory.
struct Member {
    id: NodeId,
    file: PathBuf,
    config: NodeConfig,
}

impl Member {
    fn beside(&self, extension: &str) -> PathBuf {
        self.file.with_extension(extension)
    }

    /// The process of the node, if it runs: the one that `start` has noted, or one that somebody
    /// started by hand. The number in the note may by now belong to another program; only one that
    /// serves this file counts.
    fn process(&self) -> Option<u32> {
        let file = fs::canonicalize(&self.file).ok()?;
        let noted = fs::read_to_string(self.beside("pid")).ok();
        let noted = noted.and_then(|number| number.trim().parse().ok());
        noted.filter(|number| serves(*number, &file)).or_else(|| {
            let names = fs::read_dir("/proc")
                .ok()?
                .filter_map(|entry| entry.ok()?.file_name().into_string().ok());
            names.filter_map(|name| name.parse().ok()).find(|number| serves(*number, &file))
        })
    }

    fn region(&self) -> &str {
        let map = &self.config.node.map;
        map.topology.name_of(map.region_of(self.id))
    }

    /// The last lines of its log.
    fn log(&self) -> String {
        let log = fs::read_to_string(self.beside("log")).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines.get(lines.len().saturating_sub(LOG_LINES)..).unwrap_or_default().join("\n")
    }
}

/// Whether this process is a node with this configuration file.
fn serves(process: u32, file: &Path) -> bool {
    let Ok(command) = fs::read(format!("/proc/{process}/cmdline")) else { return false };
    let words = || command.split(|byte| *byte == 0).map(OsStr::from_bytes);
    if !words().any(|word| word == "serve") {
        return false;
    }
    let folder = fs::read_link(format!("/proc/{process}/cwd")).unwrap_or_default();
    words().any(|word| {
        let word = word.as_bytes().strip_prefix(b"--config=").map_or(word, OsStr::from_bytes);
        fs::canonicalize(folder.join(word)).is_ok_and(|found| found == file)
    })
}

/// The nodes of a directory, by number.
fn members(dir: &Path) -> anyhow::Result<Vec<Member>> {
    let entries = fs::read_dir(dir).with_context(|| dir.display().to_string())?;
    let mut all = Vec::new();
    for entry in entries {
        let file = entry.with_context(|| dir.display().to_string())?.path();
        let id = file.file_stem().and_then(|stem| stem.to_str()?.parse::<NodeId>().ok());
        if let (Some(id), true) = (id, file.extension().is_some_and(|end| end == "toml")) {
            let config = NodeConfig::load(&file)?;
            ensure!(
                config.node.node == id,
                "{}: node: it is the file of {}; name it {}.toml",
                file.display(),
                config.node.node,
                config.node.node
            );
            all.push(Member { id, file, config });
        }
    }
    all.sort_by_key(|member| member.id);
    ensure!(
        !all.is_empty(),
        "{}: there is no file of a node (n1.toml); make a cluster with `orthodrome serve --init {}`",
        dir.display(),
        dir.display()
    );
    Ok(all)
}

/// Waits until no other `start` or `stop` works on the directory, and keeps others out until the
/// result is dropped. The lock is on the directory itself, so it leaves no file.
fn alone(dir: &Path, deadline: Instant) -> anyhow::Result<fs::File> {
    let lock = fs::File::open(dir).with_context(|| dir.display().to_string())?;
    let mut is_told = false;
    loop {
        match lock.try_lock() {
            Ok(()) => return Ok(lock),
            Err(fs::TryLockError::WouldBlock) => {}
            Err(fs::TryLockError::Error(error)) => {
                return Err(error).with_context(|| format!("cannot lock {}", dir.display()));
            }
        }
        if !is_told {
            note!("waiting: another `cluster start` or `cluster stop` of {} runs", dir.display());
            is_told = true;
        }
        ensure!(
            Instant::now() < deadline,
            "another `cluster start` or `cluster stop` of {} still runs; nothing was done",
            dir.display()
        );
        std::thread::sleep(LOOK_EVERY);
    }
}

fn spawn(member: &Member) -> anyhow::Result<Child> {
    let program = std::env::current_exe().context("cannot find this program")?;
    let place = member.beside("log");
    if place.exists() {
        // It may say why the node ended.
        let before = member.beside("log.before");
        fs::rename(&place, &before).with_context(|| before.display().to_string())?;
    }
    let log = fs::File::create(&place).with_context(|| place.display().to_string())?;
    let errors = log.try_clone().with_context(|| place.display().to_string())?;
    let file = fs::canonicalize(&member.file).with_context(|| member.file.display().to_string())?;
    let mut command = Command::new(program);
    command.arg("serve").arg("--config").arg(file);
    // In a group of its own, so that Ctrl-C in this terminal does not reach it.
    command.stdin(Stdio::null()).stdout(log).stderr(errors).process_group(0);
    let process = command.spawn().with_context(|| format!("cannot start {}", member.id))?;
    let place = member.beside("pid");
    fs::write(&place, format!("{}\n", process.id()))
        .with_context(|| place.display().to_string())?;
    Ok(process)
}

fn start(dir: &Path, within: Duration) -> anyhow::Result<Status> {
    let members = members(dir)?;
    let deadline = Instant::now() + within;
    let _alone = alone(dir, deadline)?;
    let (mut started, mut running) = (Vec::new(), Vec::new());
    for member in &members {
        match member.process() {
            Some(number) => running.push((member, number)),
            None => started.push((member, spawn(member)?)),
        }
    }
    let runtime = Runtime::new().context("cannot start the runtime")?;
    for (member, number) in running {
        if runtime.block_on(goes_on(dir, member, number, deadline))? {
            note!("{} runs already (process {number})", member.id);
        } else {
            started.push((member, spawn(member)?));
        }
    }
    for (member, process) in &mut started {
        let ready = format!("ready: {} ", member.id);
        // A log may hold bytes of any kind; lines are compared by their beginning.
        let serves = |member: &Member| {
            let log = fs::read(member.beside("log")).unwrap_or_default();
            String::from_utf8_lossy(&log).lines().any(|line| line.starts_with(&ready))
        };
        while !serves(member) {
            if let Some(ended) = process.try_wait().with_context(|| member.id.to_string())? {
                bail!("{} has ended ({ended}); its log ends with:\n{}", member.id, member.log());
            }
            ensure!(
                Instant::now() < deadline,
                "{} does not serve after {within:?}; see {}",
                member.id,
                member.beside("log").display()
            );
            std::thread::sleep(LOOK_EVERY);
        }
    }
    let mut text = format!("{} nodes serve clients:\n", members.len());
    for member in &members {
        // Writing to a string cannot fail.
        let _ =
            write!(text, "  {}  {}  {}", member.id, member.region(), member.config.listen_client);
        if let Some(redis) = &member.config.listen_redis {
            let _ = write!(text, "  redis {redis}");
        }
        text.push('\n');
    }
    let first = members.first().map(|member| member.config.listen_client.clone());
    let place = dir.display();
    let _ = write!(
        text,
        "\nNext:\n  orthodrome cluster status {place}\n  orthodrome shell --connect {}{}\n  \
         orthodrome cluster stop {place}\n",
        first.unwrap_or_default(),
        options(dir)
    );
    output::print(&text)?;
    Ok(Status::Passed)
}

/// True if a node that runs already serves; false if it was stopping, and has ended meanwhile.
async fn goes_on(
    dir: &Path,
    member: &Member,
    process: u32,
    deadline: Instant,
) -> anyhow::Result<bool> {
    let (mut is_ending, mut is_told) = (false, false);
    loop {
        let state = match ask(dir, member).await {
            Ok((_, status)) if status.trouble.is_empty() => return Ok(true),
            Ok((_, status)) => {
                is_ending = true;
                status.trouble
            }
            Err(_) if member.process().is_none() => return Ok(false),
            Err(error) => {
                let listens = TcpStream::connect(&member.config.listen_client).await.is_ok();
                if listens && !is_ending {
                    // It serves clients with other credentials than those in the directory.
                    return Ok(true);
                }
                format!("not answering: {error:#}")
            }
        };
        if !is_told {
            note!("{} (process {process}) is {state}; waiting", member.id);
            is_told = true;
        }
        ensure!(
            Instant::now() < deadline,
            "{} (process {process}) runs, but is {state}; see {}",
            member.id,
            member.beside("log").display()
        );
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// The options of a shell for the credentials in the directory.
fn options(dir: &Path) -> String {
    let mut text = String::new();
    for (option, file) in [("--tls-ca", AUTHORITY_FILE), ("--token-file", TOKEN_FILE)] {
        let place = dir.join(file);
        if place.exists() {
            // Writing to a string cannot fail.
            let _ = write!(text, " {option} {}", place.display());
        }
    }
    text
}

fn stop(dir: &Path, within: Duration) -> anyhow::Result<Status> {
    let members = members(dir)?;
    let deadline = Instant::now() + within;
    let _alone = alone(dir, deadline)?;
    let running: Vec<(&Member, u32)> =
        members.iter().filter_map(|member| Some((member, member.process()?))).collect();
    for (member, number) in &running {
        let sent = Command::new("kill").arg("-TERM").arg(number.to_string()).status();
        let sent = sent.with_context(|| format!("cannot stop {}", member.id))?;
        // It may have ended in between.
        if !sent.success() && member.process().is_some() {
            bail!("cannot stop {} (process {number})", member.id);
        }
    }
    for (member, number) in &running {
        while member.process().is_some() {
            if Instant::now() >= deadline {
                note!("error: {} (process {number}) is still running after {within:?}", member.id);
                return Ok(Status::Failed);
            }
            std::thread::sleep(LOOK_EVERY);
        }
        // It is of no use any more; the next start writes it again.
        let _ = fs::remove_file(member.beside("pid"));
    }
    let rest = members.len() - running.len();
    let also = if rest > 0 { format!("; {rest} were not running") } else { String::new() };
    output::print(&format!("{} nodes have ended{also}", running.len()))?;
    Ok(Status::Passed)
}

/// What is known of one node.
#[derive(Serialize)]
struct Row {
    node: String,
    region: String,
    /// `serving`, `down`, `starting`, or what troubles it.
    state: String,
    process: Option<u32>,
    clients: String,
    version: Option<String>,
    /// How long it has been up, in seconds.
    up_s: Option<f64>,
    /// How long the others have been without a connection to it, in seconds.
    down_s: Option<f64>,
    /// The nodes that it cannot reach, although they are up.
    cannot_reach: Vec<String>,
    /// How many partitions it still copies after the loss of its disk, with `geodesic`.
    incomplete: u64,
    /// How many other nodes do not send it a copy of these.
    without_a_copy: u64,
    leads: Vec<String>,
    committed: Option<u64>,
    aborted: Option<u64>,
    unknown: Option<u64>,
}

/// What is known of the cluster.
#[derive(Serialize)]
struct Report {
    cluster: String,
    protocol: String,
    topology: String,
    nodes: Vec<Row>,
    /// Partitions of which no node that answers knows a leader, for protocols with leaders.
    without_leader: Vec<String>,
}

fn status(dir: &Path, watch: bool, json: bool) -> anyhow::Result<Status> {
    let runtime = Runtime::new().context("cannot start the runtime")?;
    let style = Style::new(std::io::stdout().is_terminal());
    loop {
        let report = runtime.block_on(report(dir))?;
        let is_up = report.nodes.iter().all(|row| row.state == "serving");
        if json {
            output::print_json(&report)?;
        } else {
            // The terminal's codes for "clear" and "go to the first line".
            let clear = if watch && std::io::stdout().is_terminal() { "\x1b[2J\x1b[H" } else { "" };
            output::print(&format!("{clear}{}", shown(&report, style)))?;
        }
        if !watch {
            return Ok(if is_up { Status::Passed } else { Status::Failed });
        }
        std::thread::sleep(WATCH_EVERY);
    }
}

async fn report(dir: &Path) -> anyhow::Result<Report> {
    let members = members(dir)?;
    let asked = members.iter().map(|member| ask(dir, member));
    let answers = futures_util::future::join_all(asked).await;
    let mut led: Vec<String> = Vec::new();
    let mut knows_leaders = false;
    let mut nodes = Vec::new();
    let mut all: Vec<String> = Vec::new();
    let links: Vec<(NodeId, Vec<Link>)> = members
        .iter()
        .zip(&answers)
        .filter_map(|(member, answer)| Some((member.id, answer.as_ref().ok()?.1.links.clone())))
        .collect();
    for (member, answer) in members.iter().zip(answers) {
        let process = member.process();
        let mut row = Row {
            node: member.id.to_string(),
            region: member.region().to_owned(),
            state: if process.is_some() { "starting".into() } else { "down".into() },
            process,
            clients: member.config.listen_client.clone(),
            version: None,
            up_s: None,
            down_s: None,
            cannot_reach: Vec::new(),
            incomplete: 0,
            without_a_copy: 0,
            leads: Vec::new(),
            committed: None,
            aborted: None,
            unknown: None,
        };
        match answer {
            Ok((about, status)) => {
                row.state =
                    if status.trouble.is_empty() { "serving".into() } else { status.trouble };
                row.version = Some(status.version);
                row.up_s = Some(status.uptime.as_secs_f64());
                row.cannot_reach = unreachable(&status.links, &links);
                let gauge = |name: &str| {
                    let named = status.gauges.iter().find(|gauge| gauge.name == name);
                    named.map(|gauge| u64::try_from(gauge.value).unwrap_or(0))
                };
                // Another protocol means something else by `incomplete`.
                if let Some(silent) = gauge("peers_that_do_not_send_a_copy") {
                    row.incomplete = gauge("incomplete").unwrap_or(0);
                    row.without_a_copy = silent;
                }
                let leads = about.partitions.iter().filter(|p| p.leader == Some(member.id));
                row.leads = leads.map(|partition| partition.id.to_string()).collect();
                let known = about.partitions.iter().filter(|p| p.leader.is_some());
                let known: Vec<String> = known.map(|partition| partition.id.to_string()).collect();
                knows_leaders |= !known.is_empty();
                led.extend(known);
                all = about.partitions.iter().map(|partition| partition.id.to_string()).collect();
                row.committed = Some(status.committed);
                row.aborted = Some(status.aborted);
                row.unknown = Some(status.unknown);
            }
            Err(why) => {
                if process.is_some() {
                    row.state = format!("does not answer: {why:#}");
                }
                row.down_s = down_for(member.id, &links).map(|time| time.as_secs_f64());
            }
        }
        nodes.push(row);
    }
    let without_leader = all.into_iter().filter(|id| knows_leaders && !led.contains(id)).collect();
    let first = members.first().context("there are no nodes")?;
    Ok(Report {
        cluster: first.config.node.cluster.clone(),
        protocol: first.config.protocol.to_owned(),
        topology: first.config.node.map.topology.name.clone(),
        nodes,
        without_leader,
    })
}

/// How long the nodes that answer have been without a connection to this one. The longest time
/// counts: a node that restarted meanwhile knows only of the time since then.
fn down_for(node: NodeId, links: &[(NodeId, Vec<Link>)]) -> Option<Duration> {
    let to_it = links.iter().flat_map(|(_, links)| links).filter(|link| link.node == node);
    to_it.filter(|link| !link.is_connected).map(|link| link.since).max()
}

/// The nodes that answer, and to which one has no connection.
fn unreachable(of_one: &[Link], links: &[(NodeId, Vec<Link>)]) -> Vec<String> {
    let answers = |node: NodeId| links.iter().any(|(other, _)| *other == node);
    let down = of_one.iter().filter(|link| !link.is_connected && answers(link.node));
    down.map(|link| link.node.to_string()).collect()
}

/// Asks a node. A node that is not running does not answer at once.
async fn ask(dir: &Path, member: &Member) -> anyhow::Result<(ClusterInfo, StatusInfo)> {
    if member.process().is_none() {
        bail!("it is not running");
    }
    let mut config =
        Config::new([member.config.listen_client.clone()]).deadline(ANSWER).attempt_timeout(ANSWER);
    let read = |file: &str| {
        let place = dir.join(file);
        place.exists().then(|| fs::read(&place)).transpose()
    };
    if let Some(authority) = read(AUTHORITY_FILE)? {
        config = config.tls(Tls { authority, server_name: None, identity: None });
    }
    if let Some(token) = read(TOKEN_FILE)? {
        config = config.token(String::from_utf8_lossy(&token).trim());
    }
    let client = Client::connect(config).await?;
    Ok((client.describe().await?, client.status().await?))
}

/// What is said of a node that still copies its data from others.
fn still_copies(row: &Row) -> String {
    let Row { node, without_a_copy, .. } = row;
    let mut text = format!("{node} does not have all of its data yet");
    if *without_a_copy > 0 {
        text += &format!(
            "; {without_a_copy} of the nodes that have replicas of it send no copy. If most replicas of a partition \
             are lost, only copies of their data directories can bring its data back"
        );
    }
    text.push('\n');
    text
}

fn shown(report: &Report, style: Style) -> String {
    let count = |number: Option<u64>| number.map(|number| number.to_string()).unwrap_or_default();
    // Not every protocol has leaders.
    let has_leaders = report.nodes.iter().any(|row| !row.leads.is_empty());
    let rows = report.nodes.iter().map(|row| {
        let since = row.up_s.or(row.down_s).map(Duration::from_secs_f64);
        let mut cells = vec![
            row.node.clone(),
            row.region.clone(),
            row.state.clone(),
            since.map(output::span).unwrap_or_default(),
            row.version.clone().unwrap_or_default(),
        ];
        cells.extend(has_leaders.then(|| row.leads.join(" ")));
        cells.extend([row.committed, row.aborted, row.unknown].map(count));
        cells.push(row.clients.clone());
        cells
    });
    let mut header = vec!["node", "region", "state", "for", "version"];
    header.extend(has_leaders.then_some("leads"));
    header.extend(["committed", "aborted", "unknown", "clients"]);
    let table = output::table(&header, rows);
    let Report { cluster, protocol, topology, .. } = report;
    let up = report.nodes.iter().filter(|row| row.state == "serving").count();
    let all = report.nodes.len();
    let serving = format!("{up} of {all} nodes serve");
    let serving = if up == all { style.good(&serving) } else { style.error(&serving) };
    let mut text = format!("{cluster}: {protocol} on {topology}, {serving}\n{table}\n");
    if !report.without_leader.is_empty() {
        let which = report.without_leader.join(", ");
        text += &style.error(&format!("no leader is known of {which}\n"));
    }
    for row in report.nodes.iter().filter(|row| row.incomplete > 0) {
        text += &style.error(&still_copies(row));
    }
    for row in report.nodes.iter().filter(|row| !row.cannot_reach.is_empty()) {
        let which = row.cannot_reach.join(", ");
        text += &style.error(&format!("{} cannot reach {which}\n", row.node));
    }
    text
}
