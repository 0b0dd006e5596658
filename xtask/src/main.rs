//! `cargo xtask`: the tasks of contributors and of CI. `cargo xtask --help` lists them.

// A task runner starts processes and reads the clock; it is no protocol.
#![allow(clippy::disallowed_types, clippy::disallowed_methods)]

mod counts;
mod image;
mod package;
mod suites;
mod tests;

use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use clap::{Parser, Subcommand};

/// Orthodrome's task runner.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Args {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Run everything that a reviewer runs: format, lints, documentation, all tests, and the
    /// comparison of debug and release builds.
    Ci,
    /// Run the part of `ci` that is no test: lints, documentation, and the comparison of debug and
    /// release builds.
    Check,
    /// Run all tests. Installs missing database servers and clients first.
    Test {
        /// Run only the pure crates, with fewer seeds; under two minutes once built.
        #[arg(long)]
        quick: bool,
    },
    /// Rewrite the golden traces, the lists of fields, and the seeds that catch mutations. Review the diff
    /// like code.
    Golden,
    /// Run the benchmarks. `docs/performance.md` has earlier figures.
    Bench {
        /// Run only benchmarks whose name contains this text.
        filter: Option<String>,
        /// Count the instructions of the hot paths instead, and fail if one takes more than
        /// `xtask/counts.txt` allows. Needs valgrind; takes two minutes once built.
        #[arg(long, conflicts_with = "filter")]
        counts: bool,
        /// With --counts: write the counts to that file.
        #[arg(long, requires = "counts")]
        update: bool,
    },
    /// Run fifteen real processes under load; pause a leader, kill a region, kill everything; then
    /// check every guarantee and print the figures. `test` includes one round.
    Siege {
        /// Number of rounds; each injects every fault once, at a different place.
        #[arg(long, default_value_t = 5)]
        rounds: u32,
        /// Protocol of the processes; `test` uses the first one.
        #[arg(long, default_value = "carousel-basic")]
        protocol: String,
    },
    /// Compare real processes with emulated distances and the simulator, and print the figures.
    /// `test` includes it.
    Parity {
        /// Protocol of both; `test` uses the first one.
        #[arg(long, default_value = "carousel-basic")]
        protocol: String,
    },
    /// Fail if one seed gives different traces in a debug and a release build.
    Twin,
    /// Build the package for Debian and Ubuntu: the program, manual pages, completions for shells, and
    /// systemd units. Needs dpkg-deb.
    Package {
        /// Directory for the package; created if it does not exist.
        #[arg(long, value_name = "DIR", default_value = "target/debian")]
        out: PathBuf,
        /// Program to package instead of one that is built now, without mutations.
        #[arg(long, value_name = "FILE")]
        program: Option<PathBuf>,
    },
    /// Build a container image (OCI) without Docker: the program, the libraries that it loads, and
    /// nothing else. Load it with `docker load` or `podman load`.
    Image {
        /// Directory for the image; created if it does not exist.
        #[arg(long, value_name = "DIR", default_value = "target/image")]
        out: PathBuf,
        /// Program to package instead of one that is built now, without mutations.
        #[arg(long, value_name = "FILE")]
        program: Option<PathBuf>,
    },
}

fn main() -> Result<()> {
    match Args::parse().task {
        Task::Ci => ci(),
        Task::Check => check(),
        Task::Test { quick } => tests::run(quick, || Ok(())).and_then(tests::Summary::into_result),
        Task::Golden => golden(),
        Task::Bench { counts: true, update, .. } => count(update),
        Task::Bench { filter, .. } => bench(filter),
        Task::Siege { rounds, protocol } => {
            let mut siege = process_test("siege");
            siege.env("ORTHODROME_SIEGE_ROUNDS", rounds.to_string());
            run(siege.env("ORTHODROME_SIEGE_PROTOCOL", protocol))
        }
        Task::Parity { protocol } => {
            run(process_test("parity").env("ORTHODROME_PARITY_PROTOCOL", protocol))
        }
        Task::Twin => twin(),
        Task::Image { out, program } => {
            println!("{}", image::run(program, &out)?.display());
            Ok(())
        }
        Task::Package { out, program } => {
            let package = package::run(program, &out)?;
            println!("{}", package.display());
            Ok(())
        }
    }
}

fn ci() -> Result<()> {
    step("format", || cargo(&["fmt", "--all", "--check"]))?;
    // Tests wait for servers and time-outs much of the time. The other checks use the processors in
    // the meantime; at a low priority, they hardly slow down the tests. They begin when the tests are
    // built, because only one of them can build at a time.
    let this = std::env::current_exe().context("this program has no path")?;
    let mut checks = Command::new("nice");
    checks.args(["-n", "10"]).arg(this).arg("check");
    let (mut running, mut summary) = (None, None);
    let tested = step("tests", || {
        let ran = tests::run(false, || {
            running = Some(checks.spawn().context("could not start `nice`")?);
            Ok(())
        });
        summary = Some(ran?);
        Ok(())
    });
    let checked = match &mut running {
        Some(checks) => Some(checks.wait().context("could not wait for the checks")?),
        None => None,
    };
    tested?;
    // Last, so that the number of tests is at the end of the output.
    let tested = summary.context("no test ran")?.into_result();
    ensure!(
        checked.is_some_and(|it| it.success()),
        "the checks failed, see above (`cargo xtask check` repeats them)"
    );
    tested
}

fn check() -> Result<()> {
    // In the release profile: the tests build its macros and build scripts too.
    step("lints", || {
        let lints = ["clippy", "--release", "--workspace", "--all-targets", "--quiet"];
        cargo(&[&lints[..], &["--", "-D", "warnings"]].concat())
    })?;
    step("documentation", || {
        let mut doc = command(&["doc", "--release", "--workspace", "--no-deps", "--quiet"]);
        run(doc.env("RUSTDOCFLAGS", "-D warnings"))
    })?;
    step("debug and release agree", twin)?;
    // `cargo run` has fewer features than the tests need. So this only checks that it builds; the
    // tests use the program that they have built already.
    step("the program by itself", || cargo(&["check", "--release", "--quiet"]))
}

fn golden() -> Result<()> {
    let crates = ["-p", "orthodrome-protocols", "-p", "orthodrome-geotp"];
    let tests = ["--", "golden", "fields_keep_their_numbers", "are_caught"];
    let mut test = command(&[&["test", "--release"], &crates[..], &tests[..]].concat());
    run(test.env("UPDATE_GOLDENFILES", "1"))?;
    run(Command::new("git").args([
        "diff",
        "--stat",
        "--",
        "*/testdata/*",
        "*/wire.txt",
        "*/caught.txt",
    ]))
}

/// A test of real processes that prints figures.
fn process_test(name: &str) -> Command {
    command(&["test", "--release", "-p", "orthodrome", "--test", name, "--", "--nocapture"])
}

fn bench(filter: Option<String>) -> Result<()> {
    let mut args = vec!["bench", "--workspace", "--benches"];
    if let Some(filter) = &filter {
        args.extend(["--", filter]);
    }
    cargo(&args)
}

/// Counts the instructions of the hot paths.
fn count(update: bool) -> Result<()> {
    let package = ["--release", "--package", "orthodrome-protocols"];
    cargo(&[&["build", "--quiet", "--example", "counts"], &package[..]].concat())?;
    counts::run(&built("release", "examples/counts")?, update)
}

/// The trace of one simulated run, from each build.
fn twin() -> Result<()> {
    // The crates that a simulation runs, as unlike a release build as can be. The crates of others stay
    // as they are: to build all of them once more takes four times as long.
    const OURS: [&str; 5] = ["core", "eval", "lua", "protocols", "sim"];
    let unlike = |name| {
        ["opt-level=0", "debug-assertions=true"]
            .map(|setting| format!("--config=profile.release.package.orthodrome-{name}.{setting}"))
    };
    let trace = |settings: &[String]| -> Result<String> {
        // With the features of the whole workspace, so that nothing is built again with others.
        let build = ["build", "--quiet", "--workspace", "--example", "twin", "--release"];
        let settings = settings.iter().map(String::as_str);
        cargo(&build.into_iter().chain(settings).collect::<Vec<_>>())?;
        let output = Command::new(built("release", "examples/twin")?).output();
        let output = output.context("could not start the twin run")?;
        ensure!(
            output.status.success(),
            "the twin run failed:\n{}",
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8(output.stdout).context("the trace is not text")
    };
    let (debug, release) = (trace(&OURS.map(unlike).concat())?, trace(&[])?);
    ensure!(debug.lines().count() > 1_000, "the twin run printed no trace");
    if let Some((number, (a, b))) =
        debug.lines().zip(release.lines()).enumerate().find(|(_, (a, b))| a != b)
    {
        bail!("debug and release differ at line {}:\n  {a}\n  {b}", number + 1);
    }
    ensure!(debug.len() == release.len(), "debug and release traces differ in length");
    eprintln!("{} trace lines, equal byte for byte", debug.lines().count());
    Ok(())
}

/// A program that cargo has built: beside this one, under the profile's folder.
fn built(folder: &str, name: &str) -> Result<PathBuf> {
    let this = std::env::current_exe().context("this program has no path")?;
    let target = this.ancestors().nth(2).context("this program is in no target folder")?;
    Ok(target.join(folder).join(format!("{name}{}", std::env::consts::EXE_SUFFIX)))
}

fn step(name: &str, work: impl FnOnce() -> Result<()>) -> Result<()> {
    eprintln!("── {name}");
    let start = Instant::now();
    work().with_context(|| format!("{name} failed"))?;
    eprintln!("── {name}: {:.0} s", start.elapsed().as_secs_f64());
    Ok(())
}

fn command(args: &[&str]) -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    // `cargo run` describes this package to us. Build scripts of others that look at such variables
    // would run again, and much would be built again, after each change between `cargo test` and
    // `cargo xtask test`.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            cargo.env_remove(&name);
        }
    }
    cargo.args(args);
    cargo
}

fn cargo(args: &[&str]) -> Result<()> {
    run(&mut command(args))
}

fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("could not start {command:?}"))?;
    ensure!(status.success(), "{command:?} ended with {status}");
    Ok(())
}
