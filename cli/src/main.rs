//! The `orthodrome` binary. Each command has one module, with its arguments and `run`. [`common`]
//! and [`output`] have what several commands share.
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "the command line measures wall-clock time and runs one simulation a thread; neither \
              reaches into a simulation"
)]

/// Prints to standard error as `eprintln!` does, but ignores errors: if standard error is closed,
/// the message is lost.
macro_rules! note {
    ($($text:tt)*) => { $crate::output::note(format_args!($($text)*)) };
}

mod check;
mod cluster;
mod common;
mod compare;
mod completions;
mod connect;
mod demo;
mod guard;
mod load;
mod man;
mod measure;
mod memory;
mod middleware;
mod output;
mod page;
mod plan;
mod private;
mod protocols;
mod recording;
mod reproduce;
mod serve;
mod shell;
mod sim;
mod style;
mod swarm;
mod topology;
mod trace;
mod watch;
mod workers;

use std::io::{self, IsTerminal as _};
use std::process::ExitCode;

use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};

/// The exit status of a command that did its work. If it could not (bad usage, bad input), that is
/// an error and status 2.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Status {
    /// Every check passed: 0.
    Passed,
    /// A check failed: 1.
    Failed,
}

/// Orthodrome: a geo-distributed transactional database that commits in the fewest wide-area round
/// trips.
///
/// The same protocol code runs in servers (`serve`) and in a deterministic simulator (`sim`, `compare`,
/// `plan`, `reproduce`, `swarm`), where one seed repeats a run with all its faults. Runs can record a
/// history of what their clients saw; `check` checks a history for anomalies. Results of the simulator
/// are marked as simulated.
#[derive(Parser)]
#[command(
    name = "orthodrome",
    version = output::VERSION,
    after_help = "Exit status: 0 success, 1 a check failed, 2 bad usage or input.\nTry \
                  first:\n  orthodrome demo\n  orthodrome sim --protocol \
                  carousel-basic --topology azure5 --workload retwis"
)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

/// Simulations and servers allocate and free many small values; this allocator halves that cost
/// (`docs/performance.md`).
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[derive(Subcommand)]
enum Command {
    Demo(demo::Args),
    Sim(Box<sim::Args>),
    Compare(Box<compare::Args>),
    Plan(Box<plan::Args>),
    Topology(topology::Args),
    Reproduce(reproduce::Args),
    Swarm(Box<swarm::Args>),
    Check(check::Args),
    Trace(trace::Args),
    Serve(Box<serve::Args>),
    Cluster(cluster::Args),
    Proxy(middleware::ProxyArgs),
    Agent(middleware::AgentArgs),
    Shell(Box<shell::Args>),
    Watch(Box<watch::Args>),
    Load(Box<load::Args>),
    Measure(measure::Args),
    Completions(completions::Args),
    Man(man::Args),
}

fn main() -> ExitCode {
    let parsed = Cli::from_arg_matches(&with_negative_numbers(Cli::command()).get_matches());
    match run(parsed.unwrap_or_else(|error| error.exit())) {
        Ok(Status::Passed) => ExitCode::SUCCESS,
        Ok(Status::Failed) => ExitCode::from(1),
        // The reader of standard output has closed it, as `head` does.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            note!("error: {}", in_one_line(&error));
            ExitCode::from(2)
        }
    }
}

/// The same command, where `-5` after an option is the option's value, which the option may refuse,
/// and not an unknown option.
fn with_negative_numbers(command: clap::Command) -> clap::Command {
    let command = command.mut_args(|arg| match arg.get_action().takes_values() {
        true => arg.allow_negative_numbers(true),
        false => arg,
    });
    command.mut_subcommands(with_negative_numbers)
}

fn run(cli: Cli) -> anyhow::Result<Status> {
    match cli.command {
        None => {
            let help = Cli::command().render_long_help();
            let is_terminal = io::stdout().is_terminal();
            let text = if is_terminal { help.ansi().to_string() } else { help.to_string() };
            output::print(&text)?;
            Ok(Status::Passed)
        }
        Some(Command::Demo(args)) => demo::run(&args),
        Some(Command::Sim(args)) => simulate(|| sim::run(&args)),
        Some(Command::Compare(args)) => simulate(|| compare::run(&args)),
        Some(Command::Plan(args)) => simulate(|| plan::run(&args)),
        Some(Command::Topology(args)) => topology::run(&args),
        Some(Command::Reproduce(args)) => simulate(|| reproduce::run(&args)),
        Some(Command::Swarm(args)) => simulate(|| swarm::run(&args)),
        Some(Command::Check(args)) => check::run(&args),
        Some(Command::Trace(args)) => trace::run(args),
        Some(Command::Serve(args)) => serve::run(&args),
        Some(Command::Cluster(args)) => cluster::run(&args),
        Some(Command::Proxy(args)) => middleware::run_proxy(&args),
        Some(Command::Agent(args)) => middleware::run_agent(&args),
        Some(Command::Shell(args)) => shell::run(&args),
        Some(Command::Watch(args)) => watch::run(&args),
        Some(Command::Load(args)) => load::run(&args),
        Some(Command::Measure(args)) => measure::run(&args),
        Some(Command::Completions(args)) => completions::run(&args, &mut Cli::command()),
        Some(Command::Man(args)) => man::run(&args, Cli::command()),
    }
}

/// Runs a command that simulates.
fn simulate(run: impl FnOnce() -> anyhow::Result<Status>) -> anyhow::Result<Status> {
    memory::keep_freed();
    run()
}

/// The error and its causes in one line. Some errors contain their cause; it is not repeated.
fn in_one_line(error: &anyhow::Error) -> String {
    let mut line = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !line.contains(&cause) {
            line = format!("{line}: {cause}");
        }
    }
    line
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<output::StdoutError>()
        .is_some_and(|error| error.0.kind() == io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cause_of_an_error_is_printed_once() {
        let in_use = || io::Error::from(io::ErrorKind::AddrInUse);
        let error = anyhow::Error::from(in_use()).context("client.listen: cannot listen");
        assert_eq!(in_one_line(&error), "client.listen: cannot listen: address in use");
        let field = "client.listen";
        let address = "127.0.0.1:7400".into();
        let error =
            orthodrome_server::node::run::RunError::Listen { field, address, source: in_use() };
        let error = anyhow::Error::from(error).context("n1.toml");
        assert_eq!(
            in_one_line(&error),
            "n1.toml: client.listen: cannot listen on 127.0.0.1:7400: address in use; is another \
             process using it?"
        );
    }

    #[test]
    fn the_arguments_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_verb_has_a_description_and_examples() {
        for verb in Cli::command().get_subcommands() {
            let name = verb.get_name();
            assert!(verb.get_about().is_some(), "{name} has no description");
            let nested = verb.get_subcommands().flat_map(|verb| verb.get_after_help());
            let after = verb.get_after_help().into_iter().chain(nested);
            let examples = after.map(ToString::to_string).collect::<String>();
            assert!(examples.contains(&format!("orthodrome {name}")), "{name} has no examples");
        }
    }

    #[test]
    fn every_option_is_explained() {
        fn explained(verb: &clap::Command) {
            for argument in verb.get_arguments() {
                let (verb, id) = (verb.get_name(), argument.get_id());
                assert!(argument.get_help().is_some(), "{verb} does not explain {id}");
            }
            verb.get_subcommands().for_each(explained);
        }
        explained(&Cli::command());
    }
}
