//! `proxy` and `agent`: transactions across PostgreSQL and MariaDB servers that already run.

use std::io::{Read as _, Write as _};
use std::path::PathBuf;
use std::pin::Pin;

use anyhow::Context as _;
use orthodrome_middleware::{self as middleware, AgentConfig, ProxyConfig, RunError};
use tokio::runtime::Builder;

use crate::serve::{start_logs, stop_signal};
use crate::{Status, output};

/// Resolves when the process is asked to end.
type Stop = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Run a proxy: PostgreSQL and MySQL clients see one database whose tables are spread over PostgreSQL and MariaDB
/// servers.
#[derive(clap::Args)]
#[command(after_help = "\
Logs go to standard error; ORTHODROME_LOG sets the level (error, warn, info, debug, trace).
docs/middleware.md explains the configuration file.

Examples:
  orthodrome proxy --config proxy.toml            run the proxy
  orthodrome proxy --config proxy.toml --check    check the configuration file, and every data source
  orthodrome proxy --config proxy.toml --take-over
                                                  run the proxy with a new decision log after the old one was lost

Exit status: 0 clean shutdown, 1 failure while running, 2 failure to start.")]
pub struct ProxyArgs {
    #[command(flatten)]
    file: FileArgs,
    /// Replace a proxy whose decision log is lost: claim its number at every data source and start a new log. Use this
    /// option once; omit it at the next start
    #[arg(long)]
    take_over: bool,
}

/// Run an agent beside a PostgreSQL or MariaDB server: the agent prepares transactions locally, which saves one
/// wide-area round trip.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  orthodrome agent --config agent.toml            run the agent
  orthodrome agent --config agent.toml --check    check the configuration file

Exit status: 0 clean shutdown, 1 failure while running, 2 failure to start.")]
pub struct AgentArgs {
    #[command(flatten)]
    file: FileArgs,
}

#[derive(clap::Args)]
struct FileArgs {
    /// Configuration file (TOML)
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Check the configuration file and, for a proxy, every data source; then exit. Exit status 1: something is missing
    #[arg(long)]
    check: bool,
    /// Shut down when standard input ends (it ends when the parent process dies)
    #[arg(long, hide = true)]
    end_with_input: bool,
}

/// Runs or checks a proxy.
///
/// # Errors
/// The configuration is invalid, or the proxy cannot start.
pub fn run_proxy(ProxyArgs { file, take_over }: &ProxyArgs) -> anyhow::Result<Status> {
    let mut config = ProxyConfig::load(&file.config)?;
    config.takes_over = *take_over;
    if file.check {
        return check_proxy(file, &config);
    }
    file.run(|stop| {
        let ready = |places: middleware::Addresses| {
            let named = [("PostgreSQL", places.postgresql), ("MySQL", places.mysql)];
            let served = named
                .iter()
                .filter_map(|(name, place)| Some(format!("{name} clients on {}", (*place)?)));
            say_ready(&format!("the proxy serves {}", served.collect::<Vec<_>>().join(", ")));
        };
        middleware::run_proxy(config, ready, stop)
    })
}

/// Reports what is missing at the data sources of a proxy.
fn check_proxy(file: &FileArgs, config: &ProxyConfig) -> anyhow::Result<Status> {
    let mut runtime = Builder::new_current_thread();
    let runtime = runtime.enable_all().build().context("cannot start the runtime")?;
    let found = runtime.block_on(middleware::inspect(config));
    let mut text = format!("{}: ok\n", file.config.display());
    for middleware::Inspected { name, version, problems, notes } in &found {
        if problems.is_empty() {
            text.push_str(&format!("{name}: {version}: ok\n"));
        }
        for problem in problems {
            text.push_str(&format!("{name}: {problem}\n"));
        }
        for note in notes {
            text.push_str(&format!("{name}: note: {note}\n"));
        }
    }
    output::print(&text)?;
    let is_ok = found.iter().all(|one| one.problems.is_empty());
    Ok(if is_ok { Status::Passed } else { Status::Failed })
}

/// Runs or checks an agent.
///
/// # Errors
/// The configuration is invalid, or the agent cannot start.
pub fn run_agent(AgentArgs { file }: &AgentArgs) -> anyhow::Result<Status> {
    let config = AgentConfig::load(&file.config)?;
    file.run(|stop| {
        let ready = |place| say_ready(&format!("the agent serves proxies on {place}"));
        middleware::run_agent(config, ready, stop)
    })
}

impl FileArgs {
    /// Runs a proxy or an agent until the process is asked to end; with `--check`, only reports
    /// that the file is valid.
    fn run<F: Future<Output = Result<(), RunError>>>(
        &self,
        serve: impl FnOnce(Stop) -> F,
    ) -> anyhow::Result<Status> {
        if self.check {
            output::print(&format!("{}: ok\n", self.config.display()))?;
            return Ok(Status::Passed);
        }
        start_logs()?;
        // The threads of the runtime parse statements, which needs a deep stack.
        let mut runtime = Builder::new_multi_thread();
        runtime.enable_all().thread_stack_size(middleware::STACK_BYTES);
        let runtime = runtime.build().context("cannot start the runtime")?;
        let ended = runtime.block_on(async {
            let stopped = stop_signal()?;
            let input = self.end_with_input.then(input_ends);
            let input = async move {
                match input {
                    Some(ended) => ended.await,
                    None => std::future::pending().await,
                }
            };
            let stop = async move {
                let why = tokio::select! {
                    signal = stopped => signal,
                    () = input => "standard input ended",
                };
                note!("{why}: shutting down");
            };
            anyhow::Ok(serve(Box::pin(stop)).await)
        })?;
        runtime.shutdown_background();
        status(ended, &self.config)
    }
}

/// Ready when standard input ends.
fn input_ends() -> impl Future<Output = ()> {
    let (ends, ended) = tokio::sync::oneshot::channel::<()>();
    std::thread::spawn(move || {
        let mut bytes = [0; 64];
        while std::io::stdin().read(&mut bytes).is_ok_and(|count| count > 0) {}
        drop(ends);
    });
    async move {
        // The sender is dropped when standard input ends.
        let _ = ended.await;
    }
}

/// For scripts that wait until the process is ready. A failure to print it does not matter.
fn say_ready(what: &str) {
    let mut stdout = std::io::stdout().lock();
    let _ = writeln!(stdout, "ready: {what}");
    let _ = stdout.flush();
}

fn status(ended: Result<(), RunError>, path: &std::path::Path) -> anyhow::Result<Status> {
    match ended {
        Ok(()) => Ok(Status::Passed),
        Err(RunError::Failed(problem)) => {
            note!("error: {problem}");
            Ok(Status::Failed)
        }
        Err(error) => Err(error).with_context(|| path.display().to_string()),
    }
}
