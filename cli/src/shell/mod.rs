//! `shell`: a key-value shell on a cluster, for people at a terminal and for scripts in a pipe.

mod command;
mod describe;
mod editor;
mod session;
mod words;

use std::io::{BufRead as _, IsTerminal as _};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use orthodrome_client::{Client, Config};
use tokio::runtime::Runtime;

use crate::connect::Connect;
use crate::{Status, common, output};
use command::{Command, parse};
use editor::{Editor, Line};
use session::Session;

/// Open a key-value shell on a cluster.
///
/// On a terminal the shell has line editing and a history. From a pipe it runs every line.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  orthodrome shell --connect 127.0.0.1:7400
  orthodrome shell -e 'put tea 12' -e 'get tea'
  printf 'begin tea -> tea\\nadd tea -1\\ncommit\\n' | orthodrome shell

Exit status: 0 every command succeeded, 1 a command failed, 2 bad usage or no gateway can be reached.")]
pub struct Args {
    #[command(flatten)]
    connect: Connect,
    /// Run this command and exit; may be repeated [default: read commands from standard input]
    #[arg(short, long, value_name = "COMMAND")]
    execute: Vec<String>,
    /// Time limit of one command, retries included
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = common::duration)]
    deadline: Duration,
    /// Print the latency of each command [default: only on a terminal]
    #[arg(long)]
    timing: bool,
}

/// Runs the shell.
///
/// # Errors
/// The cluster cannot be reached, or an option cannot be used.
pub fn run(args: &Args) -> anyhow::Result<Status> {
    let runtime = Runtime::new().context("cannot start the runtime")?;
    let config = args.connect.config(args.connect.endpoints())?.deadline(args.deadline);
    args.connect.note_refusals();
    let client = runtime
        .block_on(Client::connect(config))
        .with_context(|| format!("cannot connect to {}", args.connect.endpoints().join(", ")))?;
    let is_good = Shell::new(runtime, client).run(&args.execute, args.timing)?;
    Ok(if is_good { Status::Passed } else { Status::Failed })
}

/// Opens a shell on a cluster of this process, for a terminal or a pipe; true if every command
/// succeeded, or a person saw those that did not.
pub fn open(config: Config) -> anyhow::Result<bool> {
    let runtime = Runtime::new().context("cannot start the runtime")?;
    let client = runtime.block_on(Client::connect(config)).context("cannot open a shell")?;
    Shell::new(runtime, client).run(&[], false)
}

struct Shell {
    session: Session,
    runtime: Runtime,
    has_timing: bool,
    failures: u64,
    typed: Vec<String>,
}

impl Shell {
    fn new(runtime: Runtime, client: Client) -> Self {
        let session = Session::new(client, std::io::stdout().is_terminal());
        Self { session, runtime, has_timing: false, failures: 0, typed: Vec::new() }
    }

    /// Runs these commands; or without any, what a person types or a pipe contains. False if a
    /// command failed and no person saw that.
    fn run(mut self, commands: &[String], has_timing: bool) -> anyhow::Result<bool> {
        let is_tty = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
        let is_interactive = is_tty && commands.is_empty();
        self.has_timing = is_interactive || has_timing;
        let ended = if is_interactive { self.interact() } else { self.run_all(commands) };
        self.leave();
        ended?;
        Ok(self.failures == 0 || is_interactive)
    }

    /// Runs these commands, or without any those on standard input.
    fn run_all(&mut self, commands: &[String]) -> anyhow::Result<()> {
        if commands.is_empty() {
            for (number, line) in std::io::stdin().lock().lines().enumerate() {
                let line = line.context("cannot read standard input")?;
                if !self.line(&line, Some(number + 1))? {
                    break;
                }
            }
        }
        for line in commands {
            if !self.line(line, None)? {
                break;
            }
        }
        Ok(())
    }

    fn interact(&mut self) -> anyhow::Result<()> {
        let mut editor = Editor::new()?;
        let welcome = self.runtime.block_on(self.session.welcome());
        output::print(&welcome)?;
        loop {
            match editor.read(&self.session.prompt())? {
                Line::Text(line) => {
                    if !self.line(&line, None)? {
                        return Ok(());
                    }
                }
                Line::Interrupted if self.session.is_open() => {
                    output::print(
                        "a transaction is open: `commit` or `abort` it, or exit with Ctrl-D",
                    )?;
                }
                Line::Interrupted => output::print("exit with Ctrl-D or `quit`")?,
                Line::End => return Ok(()),
            }
        }
    }

    /// Runs one line and prints its result; false if the line ends the shell.
    fn line(&mut self, line: &str, number: Option<usize>) -> anyhow::Result<bool> {
        let started = Instant::now();
        let answer = match parse(line) {
            Ok(Command::Quit) => return Ok(false),
            Ok(Command::Nothing) => return Ok(true),
            Ok(Command::History) => Ok(self.typed.join("\n")),
            Ok(command) => {
                self.typed.push(line.trim().to_owned());
                self.runtime.block_on(interruptible(self.session.run(command)))
            }
            Err(problem) => Err(problem),
        };
        match answer {
            Ok(text) if text.is_empty() => {}
            Ok(text) => output::print(text.trim_end())?,
            Err(problem) => {
                self.failures += 1;
                // Earlier output must be visible before the error.
                let place = number.map(|number| format!("line {number}: ")).unwrap_or_default();
                note!("{}{place}{problem}", self.session.style().error("error: "));
            }
        }
        if self.has_timing {
            let millis = started.elapsed().as_secs_f64() * 1_000.0;
            output::print(&self.session.style().dim(&format!("({millis:.1} ms)")))?;
        }
        Ok(true)
    }

    /// Ends the open transaction, so that other transactions need not wait until its lease expires.
    fn leave(&mut self) {
        if let Some(problem) = self.runtime.block_on(self.session.close()) {
            self.failures += 1;
            note!("{}{problem}", self.session.style().error("error: "));
        }
    }
}

/// Runs a command; Ctrl-C interrupts it.
async fn interruptible(
    command: impl Future<Output = Result<String, String>>,
) -> Result<String, String> {
    tokio::select! {
        answer = command => answer,
        _ = tokio::signal::ctrl_c() => Err(
            "interrupted; if this was a commit, its outcome is unknown here".into(),
        ),
    }
}
