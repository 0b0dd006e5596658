//! Runs the test suites and counts what ran.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

/// How many tests ran.
#[derive(Default)]
pub struct Summary {
    passed: u64,
    failed: u64,
    /// Suites that did not end well: a failed test, or no end at all.
    broken: u64,
}

impl Summary {
    /// Prints the closing line, and fails if any test did or none ran.
    pub fn into_result(self) -> Result<()> {
        println!("{} passed, {} failed", self.passed, self.failed);
        ensure!(self.broken == 0 && self.failed == 0, "tests failed");
        ensure!(self.passed > 0, "no test ran");
        Ok(())
    }
}

/// The pure crates: no sockets, no files, no waiting.
const PURE: [&str; 4] =
    ["orthodrome-core", "orthodrome-protocols", "orthodrome-eval", "orthodrome-sim"];

/// The database servers that the middleware is tested with: what shows that they are there, and Debian's names.
const DATABASES: [(&str, &str); 2] =
    [("/usr/lib/postgresql", "postgresql"), ("/usr/sbin/mariadbd", "mariadb-server")];

/// Clients that the middleware is tested with: what shows that they are there, and Debian's names. Their tests say so
/// and pass where they cannot be had.
const CLIENTS: [(&str, &str); 4] = [
    ("sysbench --version", "sysbench"),
    ("javac -version", "default-jdk-headless"),
    ("python3 -c 'import ensurepip'", "python3-venv"),
    ("curl --version", "curl"),
];

/// Installs database servers that are missing, and clients of theirs; the tests start private servers of their own.
fn install_databases() -> Result<()> {
    let missing = DATABASES.iter().filter(|(place, _)| !std::path::Path::new(place).exists());
    let servers: Vec<&str> = missing.map(|(_, package)| *package).collect();
    let missing = CLIENTS.iter().filter(|(proof, _)| !succeeds("sh", &["-c", proof]));
    let clients: Vec<&str> = missing.map(|(_, package)| *package).collect();
    if servers.is_empty() && clients.is_empty() {
        return Ok(());
    }
    println!("installing {}", [servers.as_slice(), &clients].concat().join(", "));
    let install = |packages: &[&str]| {
        packages.is_empty()
            || succeeds("apt-get", &[["install", "-y"].as_slice(), packages].concat())
    };
    let is_updated = succeeds("apt-get", &["update"]);
    if !(is_updated && install(&clients)) {
        println!("could not install them; as root: apt-get install {}", clients.join(" "));
    }
    let done = servers.is_empty() || (is_updated && install(&servers));
    ensure!(done, "could not install them; as root: apt-get install {}", servers.join(" "));
    Ok(())
}

fn succeeds(program: &str, args: &[&str]) -> bool {
    let mut command = Command::new(program);
    command.env("DEBIAN_FRONTEND", "noninteractive").args(args);
    if program == "sh" {
        command.stdout(Stdio::null()).stderr(Stdio::null());
    }
    command.status().is_ok_and(|status| status.success())
}

/// Runs all tests, or those of the pure crates with fewer seeds.
pub fn run(quick: bool) -> Result<Summary> {
    if !quick {
        install_databases()?;
    }
    let mut args = vec!["test", "--release", "--no-fail-fast"];
    if quick {
        args.extend(PURE.iter().flat_map(|name| ["-p", name]));
    } else {
        args.push("--workspace");
    }
    let mut cargo = super::command(&args);
    if quick {
        cargo.env("ORTHODROME_SEEDS", "20");
    }
    let mut child = cargo.stdout(Stdio::piped()).spawn().context("could not start cargo test")?;
    let stdout = child.stdout.take().context("cargo test has no output")?;
    let mut summary = Summary::default();
    for line in BufReader::new(stdout).lines() {
        let line = line.context("could not read the output of cargo test")?;
        println!("{line}");
        if let Some(result) = line.strip_prefix("test result: ") {
            summary.passed += count(result, " passed");
            summary.failed += count(result, " failed");
        }
    }
    if !child.wait().context("could not wait for cargo test")?.success() {
        summary.broken += 1;
    }
    Ok(summary)
}

/// The number before `word` in `ok. 12 passed; 0 failed; …`.
fn count(result: &str, word: &str) -> u64 {
    result
        .split(word)
        .next()
        .and_then(|before| before.rsplit(|c: char| !c.is_ascii_digit()).next())
        .and_then(|digits| digits.parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod unit {
    use super::count;

    #[test]
    fn counts_come_from_the_closing_line() {
        let line = "FAILED. 12 passed; 3 failed; 0 ignored; 0 measured; 7 filtered out";
        assert_eq!((count(line, " passed"), count(line, " failed")), (12, 3));
        assert_eq!(count("nonsense", " passed"), 0);
    }
}
