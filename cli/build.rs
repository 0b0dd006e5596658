//! Tells the binary which commit it was built from: every report names it, because a seed replays
//! only at its commit. `ORTHODROME_COMMIT` overrides it where there is no git, as in a source
//! archive. And embeds every file of `experiments/`: adding one is all it takes to add a figure.

use std::error::Error;
use std::path::Path;
use std::process::Command;
use std::{env, fs};

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-env-changed=ORTHODROME_COMMIT");
    println!("cargo::rerun-if-changed=build.rs");
    // Moves with every commit, whatever branch is checked out.
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
        println!("cargo::rerun-if-changed={log}");
    }
    let commit = env::var("ORTHODROME_COMMIT")
        .ok()
        .filter(|commit| !commit.is_empty())
        .or_else(|| git(&["rev-parse", "--short=12", "HEAD"]))
        .unwrap_or_else(|| "unknown".into());
    println!("cargo::rustc-env=ORTHODROME_COMMIT={commit}");
    experiments()
}

fn experiments() -> Result<(), Box<dyn Error>> {
    let folder = Path::new(&env::var("CARGO_MANIFEST_DIR")?).join("../experiments");
    println!("cargo::rerun-if-changed={}", folder.display());
    let mut rows = Vec::new();
    for file in fs::read_dir(&folder)? {
        let path = file?.path();
        if path.extension().is_some_and(|ending| ending == "toml") {
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            rows.push(format!("({name:?}, include_str!({:?})),", path.display().to_string()));
        }
    }
    rows.sort();
    let table = format!("&[{}]", rows.concat());
    fs::write(Path::new(&env::var("OUT_DIR")?).join("experiments.rs"), table)?;
    Ok(())
}

/// What git prints; none if there is no git, or no repository.
fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?.trim().to_owned();
    (output.status.success() && !text.is_empty()).then_some(text)
}
