//! Programs that tests of other clients need: found on the machine, or fetched once into the target
//! folder.

#![allow(dead_code, reason = "not every test needs every tool")]

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// From Maven Central: PostgreSQL's and MariaDB's drivers for Java.
const JARS: [(&str, &str); 2] = [
    ("postgresql-42.7.4.jar", "org.postgresql:postgresql:42.7.4"),
    ("mariadb-java-client-3.5.1.jar", "org.mariadb.jdbc:mariadb-java-client:3.5.1"),
];

/// The goal of Maven that puts one artifact into a folder.
const MAVEN_COPY: &str = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy";

/// From the Python package index.
const PACKAGES: [&str; 7] = [
    "sqlalchemy==2.0.36",
    "psycopg2-binary==2.9.10",
    "psycopg[binary]==3.2.3",
    "asyncpg==0.32.0",
    "pymysql==1.1.1",
    "django==5.1.4",
    "redis==5.2.1",
];

/// Reports why a test is skipped. `cargo xtask test` names the file that lists such tests, and does
/// not count them as passed.
pub fn skipped(why: &str) {
    eprintln!("SKIPPED: {why}");
    let Some(list) = std::env::var_os("ORTHODROME_SKIPPED") else { return };
    let mut list = std::fs::File::options().append(true).create(true).open(list).unwrap();
    let thread = std::thread::current();
    let line = format!("{}: {}\n", thread.name().unwrap_or("a test"), why.replace('\n', " "));
    list.write_all(line.as_bytes()).unwrap();
}

fn folder() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("tools");
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// No test takes a tool that another one, of this program or of another, is still fetching. The lock
/// ends when the file is dropped.
fn alone() -> std::fs::File {
    let lock = std::fs::File::create(folder().join("lock")).unwrap();
    lock.lock().unwrap();
    lock
}

/// Whether a program is installed.
pub fn is_here(program: &str, argument: &str) -> bool {
    let mut command = Command::new(program);
    command.arg(argument).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

fn run(command: &mut Command) -> Result<(), String> {
    let name = format!("{command:?}");
    let output = command.output().map_err(|error| format!("{name}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let last: Vec<&str> = said.lines().rev().take(2).collect();
    Err(format!("{name}: {}", last.join("; ")))
}

/// A Python that has the packages.
pub fn python() -> Result<PathBuf, String> {
    let _alone = alone();
    let place = folder().join("venv");
    let python = place.join("bin/python");
    if !has_packages(&python) {
        run(Command::new("python3").args(["-m", "venv"]).arg(&place))?;
        run(Command::new(&python).args(["-m", "pip", "install", "--quiet"]).args(PACKAGES))?;
    }
    Ok(python)
}

/// What builds and checks the Python client.
const BUILDERS: [&str; 5] = [
    "setuptools==80.9.0",
    "grpcio-tools==1.74.0",
    "mypy==1.18.2",
    "types-protobuf",
    "types-grpcio",
];

/// A Python with the project's own client, from a wheel that is built anew, and with mypy.
pub fn python_client(source: &Path) -> Result<PathBuf, String> {
    let _alone = alone();
    let place = folder().join("client-venv");
    let python = place.join("bin/python");
    let mut found = Command::new(&python);
    found.args(["-c", "import setuptools, grpc_tools, mypy"]).stderr(Stdio::null());
    if !found.status().is_ok_and(|status| status.success()) {
        run(Command::new("python3").args(["-m", "venv"]).arg(&place))?;
        run(Command::new(&python).args(["-m", "pip", "install", "--quiet"]).args(BUILDERS))?;
    }
    let wheels = folder().join("wheels");
    let _ = std::fs::remove_dir_all(&wheels);
    let mut build = Command::new(&python);
    build.args(["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]);
    // A package that does not build is a defect, not a missing tool.
    run(build.arg("--wheel-dir").arg(&wheels).arg(source)).unwrap();
    let mut names = std::fs::read_dir(&wheels).unwrap();
    let wheel = names.next().unwrap().unwrap().path();
    let mut install = Command::new(&python);
    install.args(["-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps"]);
    run(install.arg(&wheel)).unwrap();
    // Its dependencies, if they are not there yet.
    run(Command::new(&python).args(["-m", "pip", "install", "--quiet"]).arg(&wheel))?;
    Ok(python)
}

fn has_packages(python: &Path) -> bool {
    let mut command = Command::new(python);
    command
        .args(["-c", "import sqlalchemy, psycopg2, psycopg, asyncpg, pymysql, django, redis"])
        .stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// The class path of the drivers for Java; an error says why Java cannot be used.
pub fn class_path() -> Result<String, String> {
    if !is_here("java", "-version") {
        return Err("java is not installed: apt-get install default-jdk-headless".into());
    }
    let _alone = alone();
    let mut places = Vec::new();
    for (name, artifact) in JARS {
        let place = folder().join(name);
        if !place.exists() {
            let mut maven = Command::new("mvn");
            maven.args(["--quiet", "--batch-mode", MAVEN_COPY]);
            maven.arg(format!("-Dartifact={artifact}"));
            run(maven.arg(format!("-DoutputDirectory={}", folder().display())))?;
        }
        places.push(place.display().to_string());
    }
    Ok(places.join(":"))
}
