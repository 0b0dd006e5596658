//! `cargo run --release -p orthodrome-model -- --help`: checks the model of `geodesic`.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use orthodrome_model::catalogue::{CONFIGURATIONS, Configuration, Size, catches};
use orthodrome_model::mutation::Mutation;

#[derive(Parser)]
#[command(name = "orthodrome-model", about = "Checks the model of the protocol geodesic")]
struct Args {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Check configurations and print a table row for each
    Check {
        /// Names of configurations; all if none is given
        names: Vec<String>,
        /// Only the configurations that the tests run
        #[arg(long)]
        small: bool,
        /// Stop each after this many steps
        #[arg(long)]
        steps: Option<usize>,
    },
    /// Enable each mutation and print which property fails
    Mutations {
        /// Names of mutations; all if none is given
        names: Vec<String>,
        /// Print the shortest counterexample too
        #[arg(long)]
        trace: bool,
    },
}

fn main() -> ExitCode {
    match Args::parse().task {
        Task::Check { names, small, steps } => configurations(&names, small, steps),
        Task::Mutations { names, trace } => mutations(&names, trace),
    }
}

fn configurations(names: &[String], is_small: bool, steps: Option<usize>) -> ExitCode {
    println!("| configuration | covers | states | steps | depth | seconds | result |");
    println!("|---|---|---|---|---|---|---|");
    let mut code = ExitCode::SUCCESS;
    let is_named = |it: &&Configuration| names.is_empty() || names.iter().any(|n| n == it.name);
    let is_chosen = |it: &&Configuration| !is_small || it.size == Size::Small;
    for it in CONFIGURATIONS.iter().filter(is_named).filter(is_chosen) {
        let report = it.check(None, steps);
        let result = match (&report.failure, report.is_complete) {
            (Some((property, _)), _) => *property,
            (None, true) => "passed",
            (None, false) => "passed, not complete",
        };
        println!(
            "| `{}` | {} | {} | {} | {} | {:.1} | {result} |",
            it.name,
            it.covers,
            report.states,
            report.steps,
            report.depth,
            report.took.as_secs_f64()
        );
        if let Some((_, trace)) = &report.failure {
            eprintln!("{trace}");
            code = ExitCode::FAILURE;
        }
    }
    code
}

fn mutations(names: &[String], has_trace: bool) -> ExitCode {
    println!("| mutation | configuration | property | steps to it | states | seconds |");
    println!("|---|---|---|---|---|---|");
    let mut code = ExitCode::SUCCESS;
    let is_named = |it: &&Mutation| names.is_empty() || names.iter().any(|n| n == it.name());
    for &mutation in Mutation::ALL.iter().filter(is_named) {
        let (name, expected) = catches(mutation);
        let Some(it) = Configuration::named(name) else { continue };
        let report = it.check(Some(mutation), None);
        let (property, trace) = report.failure.unwrap_or(("nothing fails", String::new()));
        let length = trace.lines().filter(|line| line.contains(". ")).count();
        let seconds = report.took.as_secs_f64();
        let states = report.states;
        println!(
            "| `{}` | `{name}` | {property} | {length} | {states} | {seconds:.1} |",
            mutation.name()
        );
        if property != expected {
            eprintln!("expected {expected}");
            code = ExitCode::FAILURE;
        }
        if has_trace {
            println!("{trace}");
        }
    }
    code
}
