//! Runs the test suites and counts their tests.

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use anyhow::{Context, Result, anyhow, ensure};

use crate::suites;

/// The numbers of tests.
#[derive(Default)]
pub struct Summary {
    passed: u64,
    failed: u64,
    /// Tests that are ignored, or that reported that they cannot run.
    skipped: u64,
    /// Suites that failed: a test failed, or the suite did not end.
    broken: u64,
}

impl Summary {
    /// Adds the totals of one suite.
    fn add(&mut self, result: &str) {
        self.passed += count(result, " passed");
        self.failed += count(result, " failed");
        self.skipped += count(result, " ignored");
    }

    /// Adds the totals of all suites in this output.
    fn read(&mut self, output: &str) {
        for result in output.lines().filter_map(|line| line.strip_prefix("test result: ")) {
            self.add(result);
        }
    }

    /// Counts the tests of `list` as skipped. To the test harness they seemed to pass.
    fn skip(&mut self, list: &str) {
        for line in list.lines() {
            println!("skipped: {line}");
            self.skipped += 1;
            self.passed = self.passed.saturating_sub(1);
        }
    }

    /// Prints the closing line. Fails if any test failed, or none ran.
    pub fn into_result(self) -> Result<()> {
        println!("{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped);
        ensure!(self.broken == 0 && self.failed == 0, "tests failed");
        ensure!(self.passed > 0, "no test ran");
        Ok(())
    }
}

/// The pure crates: no sockets, no files, no waiting.
const PURE: [&str; 5] = [
    "orthodrome-lua",
    "orthodrome-core",
    "orthodrome-protocols",
    "orthodrome-eval",
    "orthodrome-sim",
];

/// The database servers for tests of the middleware: a program that shows that the server is
/// installed, and the name of Debian's package.
const DATABASES: [(&str, &str); 2] =
    [("/usr/lib/postgresql", "postgresql"), ("/usr/sbin/mariadbd", "mariadb-server")];

/// The clients for tests of the middleware, of the Redis protocol and of the metrics: a program that
/// shows that the client is installed, and the name of Debian's package. A test whose client cannot
/// be installed says so, and counts as skipped.
const CLIENTS: [(&str, &str); 7] = [
    ("sysbench --version", "sysbench"),
    ("javac -version", "default-jdk-headless"),
    // Fetches the drivers for Java.
    ("mvn --version", "maven"),
    ("python3 -c 'import ensurepip'", "python3-venv"),
    ("redis-cli --version", "redis-tools"),
    // The answers of commands are compared with those of Redis.
    ("redis-server --version", "redis-server"),
    // Checks the alerts, and scrapes a cluster.
    ("promtool --version", "prometheus"),
];

/// Installs missing database servers and clients. The tests start private servers of their own.
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

/// What the test programs and their data need on the disk, with a reserve. A full disk makes tests of
/// real servers fail one after the other, each with another message.
const DISK_GIB: u64 = 10;

/// Refuses to start if the disk of this program, or that of temporary files, is nearly full.
fn ensure_disk() -> Result<()> {
    let program = std::env::current_exe().context("this program has no path")?;
    for place in [program, std::env::temp_dir()] {
        let output = Command::new("df").args(["-P", "-k"]).arg(&place).output();
        let output = output.context("could not ask df for the free space")?;
        let text = String::from_utf8_lossy(&output.stdout);
        let free = free_kib(&text).with_context(|| format!("df said: {text}"))?;
        ensure!(
            free >= DISK_GIB << 20,
            "{} GiB are free where {} is, and the tests need {DISK_GIB}: remove old build outputs",
            free >> 20,
            place.display()
        );
    }
    Ok(())
}

/// The free space in the output of `df -P -k` for one file, in KiB.
fn free_kib(text: &str) -> Option<u64> {
    text.lines().nth(1)?.split_whitespace().nth(3)?.parse().ok()
}

/// Runs all tests, or those of the pure crates with fewer seeds. Calls `on_built` when the test
/// programs are built.
pub fn run(quick: bool, on_built: impl FnOnce() -> Result<()>) -> Result<Summary> {
    if !quick {
        ensure_disk()?;
    }
    let scope = match quick {
        true => PURE.iter().flat_map(|name| ["-p", name]).collect(),
        false => vec!["--workspace"],
    };
    let list = List::new()?;
    let mut setting = vec![(SKIPPED.to_owned(), list.path.clone().into_os_string())];
    if quick {
        setting.push(("ORTHODROME_SEEDS".to_owned(), "20".into()));
    }
    // Packages are fetched while the tests are built.
    let built = std::thread::scope(|threads| {
        let installation = (!quick).then(|| threads.spawn(install_databases));
        let built = suites::build(&scope)?;
        installation
            .map_or(Ok(Ok(())), std::thread::ScopedJoinHandle::join)
            .map_err(|_| anyhow!("the thread of the installation panicked"))??;
        anyhow::Ok(built)
    })?;
    on_built()?;
    let mut summary = Summary::default();
    // The examples of the documentation are compiled while suites wait for servers.
    let documentation = std::thread::scope(|threads| -> Result<Output> {
        let documentation = threads.spawn(|| {
            let mut tests = super::command(&["test", "--release", "--doc", "--no-fail-fast"]);
            tests.args(&scope).stderr(Stdio::inherit()).output()
        });
        suites::run(&built, &setting, |suite, end| {
            print!("{}", end.output);
            println!("── {} ended after {:.0} s", suite.name, end.took.as_secs_f64());
            summary.read(&end.output);
            summary.broken += u64::from(!end.is_success);
        })?;
        let output = documentation
            .join()
            .map_err(|_| anyhow!("the thread of the documentation's tests panicked"))?;
        output.context("could not start the tests of the documentation")
    })?;
    let text = String::from_utf8_lossy(&documentation.stdout);
    print!("{text}");
    summary.read(&text);
    summary.broken += u64::from(!documentation.status.success());
    summary.skip(&list.read()?);
    Ok(summary)
}

/// The variable that names the file to which a test that cannot run adds a line: its name, and why.
const SKIPPED: &str = "ORTHODROME_SKIPPED";

/// The list of tests that could not run; gone when dropped.
struct List {
    path: PathBuf,
}

impl List {
    fn new() -> Result<Self> {
        let path = std::env::temp_dir().join(format!("orthodrome-skipped-{}", std::process::id()));
        std::fs::write(&path, "").with_context(|| path.display().to_string())?;
        Ok(Self { path })
    }

    fn read(&self) -> Result<String> {
        std::fs::read_to_string(&self.path).with_context(|| self.path.display().to_string())
    }
}

impl Drop for List {
    fn drop(&mut self) {
        // At worst a small temporary file remains.
        let _ = std::fs::remove_file(&self.path);
    }
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
    use super::{Summary, count, free_kib};

    #[test]
    fn the_free_space_is_the_fourth_column() {
        let text = "Filesystem 1024-blocks Used Available Capacity Mounted on\n\
                    /dev/vda 264116896 12582912 83886080 14% /\n";
        assert_eq!(free_kib(text), Some(83_886_080));
        assert_eq!(free_kib("df: no such file"), None);
    }

    #[test]
    fn counts_come_from_the_closing_line() {
        let line = "FAILED. 12 passed; 3 failed; 0 ignored; 0 measured; 7 filtered out";
        assert_eq!((count(line, " passed"), count(line, " failed")), (12, 3));
        assert_eq!(count("nonsense", " passed"), 0);
    }

    #[test]
    fn a_test_that_could_not_run_is_not_counted_as_passed() {
        let mut summary = Summary::default();
        summary.add("ok. 12 passed; 0 failed; 2 ignored; 0 measured; 0 filtered out");
        summary.skip("clients::one: no such client\nclients::two: no such client\n");
        assert_eq!((summary.passed, summary.failed, summary.skipped), (10, 0, 4));
    }
}
