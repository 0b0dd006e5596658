//! Compiles two things into the binary. The first is the commit that it was built from: every
//! report names it, because a seed replays only at its commit. `ORTHODROME_COMMIT` sets it where
//! there is no git, as in a source archive. The second is every file of `experiments/`, so a new
//! file there is a new figure.

#[path = "../core/embed.rs"]
mod embed;

use std::env;
use std::error::Error;
use std::process::Command;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-env-changed=ORTHODROME_COMMIT");
    println!("cargo::rerun-if-changed=build.rs");
    // This file changes with every commit and every checkout.
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
        println!("cargo::rerun-if-changed={log}");
    }
    let commit = env::var("ORTHODROME_COMMIT")
        .ok()
        .filter(|commit| !commit.is_empty())
        .or_else(|| git(&["rev-parse", "--short=12", "HEAD"]))
        .unwrap_or_else(|| "unknown".into());
    println!("cargo::rustc-env=ORTHODROME_COMMIT={commit}");
    embed::embed("experiments")
}

/// The output of git; none if there is no git, or no repository.
fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?.trim().to_owned();
    (output.status.success() && !text.is_empty()).then_some(text)
}
