//! Builds the test programs, and runs several of them in parallel. Many wait for processes, disks
//! and time-outs most of the time, so running them one after the other would leave the processor
//! idle.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// One test program.
pub struct Suite {
    /// Its package and target, as in `orthodrome-server node`.
    pub name: String,
    program: PathBuf,
    /// The folder of its package, in which it runs.
    folder: PathBuf,
    /// The package's own programs, by name: tests of processes start them.
    programs: BTreeMap<String, PathBuf>,
    /// The names of its tests to run; none for all.
    tests: Vec<String>,
}

/// The result of a suite.
pub struct End {
    /// Everything that it printed.
    pub output: String,
    /// Whether all its tests passed.
    pub is_success: bool,
    /// How long it ran.
    pub took: Duration,
}

/// Suites that take minutes, the longest first: they begin first, so that no core is idle at the
/// end.
const LONG: [&str; 15] = [
    WAITING,
    "orthodrome-protocols simulated",
    "orthodrome-server node",
    "orthodrome-geotp swarm",
    "orthodrome flood",
    "orthodrome serve",
    "orthodrome families",
    "orthodrome redis",
    "orthodrome-protocols latency",
    "orthodrome parity",
    "orthodrome-middleware orthodrome_middleware",
    "orthodrome-server orthodrome_server",
    "orthodrome python",
    "orthodrome-server flood",
    "orthodrome siege",
];

/// Crates whose unit tests wait much and compute little. A unit test contains the whole crate once more,
/// and most of the time that this takes goes into making it fast.
const UNHURRIED: [&str; 5] = [
    "orthodrome",
    "orthodrome-geotp",
    "orthodrome-lab",
    "orthodrome-middleware",
    "orthodrome-server",
];

/// Builds the test programs of `scope`, which are arguments of `cargo test` that choose packages.
pub fn build(scope: &[&str]) -> Result<Vec<Suite>> {
    let (mut suites, mut programs) = (Vec::new(), BTreeMap::new());
    // Without the examples: one of them takes as long to build as a suite, and lints check them.
    build_into(&mut suites, &mut programs, &[scope, &["--test", "*"]].concat())?;
    let settings = UNHURRIED.map(|name| format!("profile.release.package.{name}.opt-level=0"));
    let mut units = [scope, &["--lib", "--bins"]].concat();
    for setting in &settings {
        units.extend(["--config", setting]);
    }
    if scope.contains(&"--workspace") {
        // It has no unit tests, and `--lib` would build them.
        units.extend(["--exclude", "orthodrome-lab"]);
    }
    build_into(&mut suites, &mut BTreeMap::new(), &units)?;
    for suite in &mut suites {
        let own = programs.iter().filter(|((folder, _), _)| *folder == suite.folder);
        suite.programs = own.map(|((_, name), program)| (name.clone(), program.clone())).collect();
    }
    if let Some(place) = suites.iter().position(|suite| suite.name == WAITING) {
        let whole = suites.swap_remove(place);
        suites.extend(whole.halves()?);
    }
    let place = |suite: &Suite| LONG.iter().position(|name| suite.name.starts_with(name));
    suites.sort_by_key(|suite| (place(suite).unwrap_or(LONG.len()), suite.name.clone()));
    Ok(suites)
}

/// Builds what `arguments` of `cargo test` choose: adds the tests to `suites`, and to `programs` the
/// programs that tests start, by folder and name.
fn build_into(
    suites: &mut Vec<Suite>,
    programs: &mut BTreeMap<(PathBuf, String), PathBuf>,
    arguments: &[&str],
) -> Result<()> {
    let mut cargo = super::command(&["test", "--release", "--no-run"]);
    cargo.args(["--message-format", "json-render-diagnostics"]).args(arguments);
    let mut child = cargo.stdout(Stdio::piped()).spawn().context("could not start cargo test")?;
    let stdout = child.stdout.take().context("cargo test has no output")?;
    for line in BufReader::new(stdout).lines() {
        let line = line.context("could not read the output of cargo test")?;
        let message: Value = serde_json::from_str(&line).unwrap_or_default();
        let Some((suite, is_test)) = artifact(&message) else { continue };
        if is_test {
            suites.push(suite);
        } else {
            let name = suite.name.rsplit(' ').next().unwrap_or_default().to_owned();
            programs.insert((suite.folder.clone(), name), suite.program);
        }
    }
    let status = child.wait().context("could not wait for cargo test")?;
    ensure!(status.success(), "the tests do not build");
    Ok(())
}

/// The program that a message of cargo says it has built, and whether that is a test.
fn artifact(message: &Value) -> Option<(Suite, bool)> {
    let program = PathBuf::from(message.get("executable")?.as_str()?);
    let folder = Path::new(message.get("manifest_path")?.as_str()?).parent()?.to_owned();
    let is_test = message.get("profile")?.get("test")?.as_bool()?;
    let target = message.get("target")?.get("name")?.as_str()?;
    // `path+file:///…/cli#orthodrome@0.1.0`, or `…/xtask#0.1.0` if the folder has the package's
    // name.
    let (path, version) = message.get("package_id")?.as_str()?.split_once('#')?;
    let package = match version.split_once('@') {
        Some((package, _)) => package,
        None => path.rsplit('/').next()?,
    };
    let name = format!("{package} {target}");
    Some((Suite { name, program, folder, programs: BTreeMap::new(), tests: Vec::new() }, is_test))
}

/// The suite that waits for database servers and time-outs most of the time. Its tests share four
/// servers, so they run one after the other, and take longer than all others. Each half of them has
/// servers of its own, and does not count as a suite that uses a core.
const WAITING: &str = "orthodrome middleware";

/// Packages with servers and clients. The suites of the others only compute.
const REAL: [&str; 4] =
    ["orthodrome", "orthodrome-client", "orthodrome-middleware", "orthodrome-server"];

/// How long a suite may run. The longest takes a quarter of an hour beside others on two cores; one
/// that hangs must not hide the results of all others until somebody stops the whole run.
const LIMIT: Duration = Duration::from_secs(45 * 60);

/// Runs all `suites`, and passes on each result as it arrives. One more runs in parallel than there
/// are cores, because several wait for processes, disks and time-outs most of the time.
pub fn run(
    suites: &[Suite],
    setting: &[(String, OsString)],
    mut ended: impl FnMut(&Suite, End),
) -> Result<()> {
    let waiting = suites.iter().filter(|suite| suite.waits()).count();
    let cores = std::thread::available_parallelism().map_or(1, usize::from).min(4);
    let at_once = cores + 1 + waiting;
    let next = AtomicUsize::new(0);
    let (send, receive) = mpsc::channel();
    std::thread::scope(|scope| {
        for _ in 0..at_once {
            let (send, next) = (send.clone(), &next);
            scope.spawn(move || {
                while let Some(suite) = suites.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let has_listener = send.send((suite, suite.run(setting))).is_ok();
                    if !has_listener || suite.waits() {
                        return;
                    }
                }
            });
        }
        drop(send);
        for (number, (suite, end)) in (1..).zip(receive) {
            ended(suite, end.with_context(|| format!("could not run {}", suite.name))?);
            eprintln!("{number} of {} suites have ended", suites.len());
        }
        Ok(())
    })
}

impl Suite {
    /// Whether it is a half of the suite that mostly waits.
    fn waits(&self) -> bool {
        self.name.starts_with(WAITING)
    }

    /// Whether its tests start processes, or servers in their own.
    fn is_real(&self) -> bool {
        let package = self.name.split(' ').next();
        package.is_some_and(|package| REAL.contains(&package))
    }

    /// Every other test, and the rest.
    fn halves(self) -> Result<[Self; 2]> {
        let listing = Command::new(&self.program).args(["--list", "--format", "terse"]).output();
        let listing = listing.with_context(|| format!("could not start {}", self.name))?;
        let text = String::from_utf8_lossy(&listing.stdout);
        let tests: Vec<&str> =
            text.lines().filter_map(|line| line.strip_suffix(": test")).collect();
        ensure!(tests.len() > 1, "{} lists no tests to halve", self.name);
        let half = |number: usize| Self {
            name: format!("{} {number}", self.name),
            tests: tests.iter().skip(number - 1).step_by(2).map(|&test| test.to_owned()).collect(),
            program: self.program.clone(),
            folder: self.folder.clone(),
            programs: self.programs.clone(),
        };
        Ok([half(1), half(2)])
    }

    fn run(&self, setting: &[(String, OsString)]) -> std::io::Result<End> {
        // Real processes wait most of the time, and have time limits. They go first when they do not
        // wait, and simulations have the rest.
        let mut command = Command::new(if self.is_real() { "env" } else { "nice" });
        if !self.is_real() {
            command.args(["-n", "5"]);
        }
        command
            .arg(&self.program)
            .current_dir(&self.folder)
            .env("CARGO_MANIFEST_DIR", &self.folder);
        command.envs(setting.iter().map(|(name, value)| (name, value)));
        if !self.tests.is_empty() {
            command.arg("--exact").args(&self.tests);
        }
        for (name, program) in &self.programs {
            command.env(format!("CARGO_BIN_EXE_{name}"), program);
        }
        let start = Instant::now();
        // A file instead of a pipe: a process that a test has left running would keep a pipe open.
        let path = self.program.with_file_name(format!("{}.output", self.name.replace(' ', "-")));
        let file = std::fs::File::create(&path)?;
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let is_success = wait(command.spawn()?, LIMIT)?;
        let took = start.elapsed();
        let output = std::fs::read(&path)?;
        let mut output =
            format!("\n     Running {}\n{}", self.name, String::from_utf8_lossy(&output));
        if took >= LIMIT {
            let minutes = LIMIT.as_secs() / 60;
            output += &format!("\n{} did not end within {minutes} min and was killed\n", self.name);
        }
        Ok(End { output, is_success, took })
    }
}

/// Waits until `child` ends, kills it after `limit`, and returns whether it succeeded.
fn wait(mut child: Child, limit: Duration) -> std::io::Result<bool> {
    let id = child.id().to_string();
    let (ended, end) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            if end.recv_timeout(limit) == Err(mpsc::RecvTimeoutError::Timeout) {
                // Not `Child::kill`: the other thread has the child until it ends.
                Command::new("kill").args(["-KILL", &id]).status()?;
            }
            std::io::Result::Ok(())
        });
        let is_success = child.wait()?.success();
        drop(ended);
        Ok(is_success)
    })
}

#[cfg(test)]
mod unit {
    use serde_json::json;

    use std::process::Command;
    use std::time::Duration;

    use super::{artifact, wait};

    #[test]
    fn a_suite_that_hangs_is_killed() {
        let sleep = |seconds: &str| Command::new("sleep").arg(seconds).spawn().expect("sleep");
        assert!(wait(sleep("0"), Duration::from_secs(600)).expect("it ended"));
        assert!(!wait(sleep("600"), Duration::from_millis(50)).expect("it was killed"));
    }

    #[test]
    fn suites_are_named_after_their_packages() {
        let name = |package_id: &str, is_test: bool| {
            let message = json!({
                "package_id": package_id,
                "manifest_path": "/project/part/Cargo.toml",
                "target": { "name": "documents" },
                "profile": { "test": is_test },
                "executable": "/project/target/documents-1",
            });
            artifact(&message).map(|(suite, is_test)| (suite.name, is_test))
        };
        let told = name("path+file:///project/cli#orthodrome@0.1.0", true);
        assert_eq!(told, Some(("orthodrome documents".to_owned(), true)));
        let told = name("path+file:///project/xtask#0.1.0", false);
        assert_eq!(told, Some(("xtask documents".to_owned(), false)));
        assert_eq!(
            artifact(&json!({ "reason": "build-finished", "success": true })).map(|_| ()),
            None
        );
    }
}
