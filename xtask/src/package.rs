//! Builds the package for Debian and Ubuntu: the program, manual pages, completions, systemd units.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

/// The repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map(Path::to_path_buf).unwrap_or_default()
}

/// Files of the repository, and their places in the package.
const FILES: [(&str, &str); 10] = [
    ("operations/systemd/orthodrome@.service", "usr/lib/systemd/system/orthodrome@.service"),
    (
        "operations/systemd/orthodrome-proxy@.service",
        "usr/lib/systemd/system/orthodrome-proxy@.service",
    ),
    (
        "operations/systemd/orthodrome-agent@.service",
        "usr/lib/systemd/system/orthodrome-agent@.service",
    ),
    ("operations/systemd/orthodrome.sysusers", "usr/lib/sysusers.d/orthodrome.conf"),
    ("operations/systemd/orthodrome.tmpfiles", "usr/lib/tmpfiles.d/orthodrome.conf"),
    ("operations/prometheus.yml", "usr/share/doc/orthodrome/examples/prometheus.yml"),
    ("operations/alerts.yml", "usr/share/doc/orthodrome/examples/alerts.yml"),
    ("operations/grafana.json", "usr/share/doc/orthodrome/examples/grafana.json"),
    ("proto/orthodrome.proto", "usr/share/doc/orthodrome/examples/orthodrome.proto"),
    ("LICENSE", "usr/share/doc/orthodrome/copyright"),
];

/// Scripts that dpkg runs.
const SCRIPTS: [&str; 3] = ["postinst", "prerm", "postrm"];

/// The shells, and where each looks for completions.
const SHELLS: [(&str, &str); 3] = [
    ("bash", "usr/share/bash-completion/completions/orthodrome"),
    ("fish", "usr/share/fish/vendor_completions.d/orthodrome.fish"),
    ("zsh", "usr/share/zsh/vendor-completions/_orthodrome"),
];

/// Builds the package in `out`, and returns its path. Without a `program`, it builds one whose
/// servers cannot have a mutation (ADR 35).
pub fn run(program: Option<PathBuf>, out: &Path) -> Result<PathBuf> {
    let program = self::program(program)?;
    let version = version(&program)?;
    let architecture = output(Command::new("dpkg").arg("--print-architecture"))
        .context("packages for Debian need dpkg; on another system use one in a container")?;
    let architecture = architecture.trim();
    let stage = out.join("stage");
    if stage.exists() {
        fs::remove_dir_all(&stage).with_context(|| stage.display().to_string())?;
    }
    fill(&program, &stage)?;
    control(&program, &version, architecture, &stage)?;
    tidy(&stage)?;
    let package = out.join(format!("orthodrome_{version}_{architecture}.deb"));
    let mut deb = Command::new("dpkg-deb");
    // Times of files are those of the commit, so that one commit always gives the same package.
    if let Some(time) = commit_time() {
        deb.env("SOURCE_DATE_EPOCH", time);
    }
    deb.args(["--root-owner-group", "-Zxz", "-z1", "--build"]).arg(&stage).arg(&package);
    output(&mut deb)?;
    fs::remove_dir_all(&stage).with_context(|| stage.display().to_string())?;
    Ok(package)
}

/// The time of the commit, in seconds since 1970; none outside a repository.
pub fn commit_time() -> Option<String> {
    let mut git = Command::new("git");
    let time = output(git.args(["log", "-1", "--format=%ct"]).current_dir(root())).ok()?;
    Some(time.trim().to_owned())
}

/// The program to package: the given one, or one that is built now, in a folder of its own, because
/// its features differ from those of the tests.
pub fn program(given: Option<PathBuf>) -> Result<PathBuf> {
    if let Some(program) = given {
        return Ok(program);
    }
    let target = root().join("target/package");
    let mut cargo = super::command(&["build", "--release", "--package", "orthodrome"]);
    super::run(cargo.arg("--no-default-features").arg("--target-dir").arg(&target))?;
    Ok(target.join("release/orthodrome"))
}

/// The version that the program prints: `orthodrome 0.1.0 (commit …)`.
pub fn version(program: &Path) -> Result<String> {
    let text = output(Command::new(program).arg("--version"))?;
    match text.split_whitespace().collect::<Vec<_>>().as_slice() {
        ["orthodrome", version, ..] => Ok((*version).to_owned()),
        _ => bail!("{}: --version printed {text:?}", program.display()),
    }
}

/// Everything but the control files.
fn fill(program: &Path, stage: &Path) -> Result<()> {
    install(program, &stage.join("usr/bin/orthodrome"), 0o755)?;
    for (from, to) in FILES {
        install(&root().join(from), &stage.join(to), 0o644)?;
    }
    let pages = stage.join("usr/share/man/man1");
    output(Command::new(program).arg("man").arg(&pages))?;
    for page in list(&pages)? {
        compress(&page)?;
    }
    for (shell, to) in SHELLS {
        let script = output(Command::new(program).args(["completions", shell]))?;
        write(&stage.join(to), &script, 0o644)?;
    }
    let changes = stage.join("usr/share/doc/orthodrome/changelog");
    install(&root().join("CHANGELOG.md"), &changes, 0o644)?;
    compress(&changes)
}

fn control(program: &Path, version: &str, architecture: &str, stage: &Path) -> Result<()> {
    let place = root().join("operations/debian/control");
    let template =
        fs::read_to_string(&place).with_context(|| format!("cannot read {}", place.display()))?;
    let size = size(stage)?.div_ceil(1_024).to_string();
    let glibc =
        glibc(&fs::read(program)?).context("the program needs no version of the C library")?;
    let mut text = template;
    let values = [
        ("@VERSION@", version),
        ("@ARCHITECTURE@", architecture),
        ("@SIZE@", &size),
        ("@GLIBC@", &glibc),
    ];
    for (name, value) in values {
        ensure!(text.contains(name), "{}: {name} is missing", place.display());
        text = text.replace(name, value);
    }
    write(&stage.join("DEBIAN/control"), &text, 0o644)?;
    for script in SCRIPTS {
        let from = root().join("operations/debian").join(script);
        install(&from, &stage.join("DEBIAN").join(script), 0o755)?;
    }
    Ok(())
}

/// The newest version of the C library of which the program needs a symbol: `2.34`. Symbols name it
/// as `GLIBC_2.34`.
fn glibc(program: &[u8]) -> Option<String> {
    const NAME: &[u8] = b"GLIBC_";
    let places = program.windows(NAME.len()).enumerate().filter(|(_, window)| *window == NAME);
    let versions = places.filter_map(|(at, _)| {
        let rest = program.get(at + NAME.len()..)?;
        let end = rest.iter().position(|byte| !byte.is_ascii_digit() && *byte != b'.')?;
        let text = std::str::from_utf8(rest.get(..end)?).ok()?;
        let parts: Option<Vec<u32>> = text.split('.').map(|part| part.parse().ok()).collect();
        Some((parts?, text.to_owned()))
    });
    versions.max().map(|(_, text)| text)
}

pub fn install(from: &Path, to: &Path, mode: u32) -> Result<()> {
    let name = || format!("cannot copy {} to {}", from.display(), to.display());
    fs::create_dir_all(to.parent().unwrap_or(to)).with_context(name)?;
    fs::copy(from, to).with_context(name)?;
    fs::set_permissions(to, fs::Permissions::from_mode(mode)).with_context(name)
}

pub fn write(to: &Path, text: &str, mode: u32) -> Result<()> {
    let name = || format!("cannot write {}", to.display());
    fs::create_dir_all(to.parent().unwrap_or(to)).with_context(name)?;
    fs::write(to, text).with_context(name)?;
    fs::set_permissions(to, fs::Permissions::from_mode(mode)).with_context(name)
}

/// Compresses a file as Debian does with manual pages: without its name and time.
fn compress(file: &Path) -> Result<()> {
    output(Command::new("gzip").args(["-9", "--no-name"]).arg(file)).map(drop)
}

fn list(folder: &Path) -> Result<Vec<PathBuf>> {
    let name = || folder.display().to_string();
    let entries = fs::read_dir(folder).with_context(name)?;
    entries.map(|entry| Ok(entry.with_context(name)?.path())).collect()
}

/// The bytes of all files below a folder.
fn size(folder: &Path) -> Result<u64> {
    let mut sum = 0;
    for path in list(folder)? {
        sum += if path.is_dir() { size(&path)? } else { fs::metadata(&path)?.len() };
    }
    Ok(sum)
}

/// Directories are the same whatever the umask is.
pub fn tidy(folder: &Path) -> Result<()> {
    fs::set_permissions(folder, fs::Permissions::from_mode(0o755))?;
    for path in list(folder)? {
        if path.is_dir() {
            tidy(&path)?;
        }
    }
    Ok(())
}

/// The standard output of a command that must succeed.
pub fn output(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("could not start {command:?}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?} ended with {}:\n{said}", output.status);
    String::from_utf8(output.stdout).with_context(|| format!("{command:?} printed no text"))
}

#[cfg(test)]
mod unit {
    use super::glibc;

    #[test]
    fn the_newest_version_of_the_c_library_counts() {
        let program = b"\0GLIBC_2.2.5\0x\0GLIBC_2.34\0GLIBC_2.9\0GLIBC_PRIVATE\0";
        assert_eq!(glibc(program).as_deref(), Some("2.34"));
        assert_eq!(glibc(b"GLIBC_PRIVATE\0"), None);
    }
}
