//! `completions`: what a shell needs to complete the command line.

use clap_complete::Shell;

use crate::{Status, output};

/// Print a completion script for a shell
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  orthodrome completions bash > ~/.local/share/bash-completion/completions/orthodrome
  orthodrome completions zsh > ~/.zfunc/_orthodrome
  orthodrome completions fish > ~/.config/fish/completions/orthodrome.fish")]
pub struct Args {
    /// Shell that will run the script
    shell: Shell,
}

/// Prints the script.
pub fn run(args: &Args, command: &mut clap::Command) -> anyhow::Result<Status> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, command, "orthodrome", &mut script);
    output::print(&String::from_utf8_lossy(&script))?;
    Ok(Status::Passed)
}
