//! `cargo run` and the tests share their builds.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may stop at the first surprise")]
#![allow(clippy::disallowed_types, clippy::disallowed_methods)]

use std::collections::BTreeSet;
use std::process::Command;

/// Packages that are built twice: golden scripts need a parser that the program does not, and a test
/// library needs large tables. Little depends on either.
const TWICE: [&str; 2] = ["orthodrome-sim ", "regex-syntax "];

/// Each package that is linked, with its features.
fn packages(of: &[&str]) -> BTreeSet<String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut tree = Command::new(cargo);
    tree.args(["tree", "--prefix", "none", "--format", "{p}|{f}", "--locked"]).args(of);
    tree.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let output = tree.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(|line| line.trim_end_matches(" (*)").to_owned()).collect()
}

#[test]
fn the_program_has_the_features_that_its_tests_need() {
    let program = packages(&["--package", "orthodrome", "--edges", "normal"]);
    let tests = packages(&["--workspace", "--edges", "normal,dev"]);
    assert!(program.len() > 100, "{program:?}");
    let is_twice = |line: &String| TWICE.iter().any(|name| line.starts_with(name));
    let twice: Vec<&String> = program.difference(&tests).filter(|line| !is_twice(line)).collect();
    assert!(
        twice.is_empty(),
        "the tests build these with other features than `cargo run`, and all that depends on them; give \
         the program the same features, as `cli/Cargo.toml` does for others: {twice:#?}"
    );
}
